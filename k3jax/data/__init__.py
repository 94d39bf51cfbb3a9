"""Text and images in, packed batches out: `sources`, `records`, `tokenizers`, `packing`, `loader`; the patches of a
batch in `patches`, bits per byte in `bits`."""
