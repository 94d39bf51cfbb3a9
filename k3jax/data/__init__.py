"""Text in, packed batches out: `sources`, `tokenizers`, `packing`, `loader`; bits per byte in `bits`."""
