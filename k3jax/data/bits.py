"""Bits per byte: from a loss, and of compressors to compare with."""

from __future__ import annotations

import gzip
import lzma
import math
from collections.abc import Iterable

import numpy as np

from k3jax.data.packing import Batch
from k3jax.data.sources import Documents


def target_bytes(batch: Batch, token_bytes: np.ndarray) -> int:
    """UTF-8 bytes of all targets of a batch that count (EOS counts 0 bytes).

    Args:
        batch: targets [B,T], loss_mask [B,T].
        token_bytes: `Tokenizer.token_bytes`, [vocab_size].
    """
    return int(token_bytes[batch["targets"]][batch["loss_mask"]].sum())


def bits_per_byte(total_nats: float, total_bytes: int) -> float:
    """Loss summed over targets (nats) as bits per byte of the text those targets stand for."""
    return total_nats / math.log(2) / total_bytes


def sample_text(documents: Documents, indices: Iterable[int], max_bytes: int = 4_000_000) -> bytes:
    """The given documents end to end, as UTF-8, cut off behind `max_bytes`."""
    parts, size = [], 0
    for index in indices:
        parts.append(documents.text(index).encode())
        size += len(parts[-1])
        if size >= max_bytes:
            break
    return b"".join(parts)[:max_bytes]


def reference_bits_per_byte(text: bytes) -> dict[str, float]:
    """What simpler models need for the same text: entropy of single bytes, `gzip -9`, `xz -9`. About 1 s per 2 MB.

    Raises:
        ValueError: no text.
    """
    if not text:
        raise ValueError("no text to compress")
    frequencies = np.bincount(np.frombuffer(text, np.uint8), minlength=256) / len(text)
    used = frequencies[frequencies > 0]
    return {
        "unigram": float(-(used * np.log2(used)).sum()),
        "gzip": 8 * len(gzip.compress(text, 9)) / len(text),
        "xz": 8 * len(lzma.compress(text, preset=9)) / len(text),
    }
