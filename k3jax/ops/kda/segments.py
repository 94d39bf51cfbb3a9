"""Which tokens of a row belong together: packed documents, padding, and sequences packed end to end.

Shape suffixes: B batch, T time, S sequences, N chunks, C tokens of a chunk.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array


def running_segment(segment_ids_BT: Array) -> Array:
    """Index [B, T] of the document each token belongs to, counted from 0 in each row; it only ever grows.

    Padding (id 0) takes the index of what came before it, so a document that goes on after padding keeps its index;
    padding before the first real token has the index of the first document, to which an initial state belongs.
    """
    last_id = jax.lax.associative_scan(lambda old, new: jnp.where(new != 0, new, old), segment_ids_BT, axis=1)
    before = jnp.pad(last_id[:, :-1], ((0, 0), (1, 0)))
    starts = (before != 0) & (last_id != before)
    return jnp.cumsum(starts.astype(jnp.int32), axis=1)


def token_sequence(cu_seqlens: Array, length: int) -> Array:
    """Index [T] of the sequence each of `length` packed tokens belongs to; S for tokens past the last sequence."""
    return jnp.searchsorted(cu_seqlens, jnp.arange(length), side="right") - 1


class Aligned(NamedTuple):
    """Sequences packed end to end, moved apart so that each begins at a chunk boundary."""

    source: Array  # [N*C] token that each aligned position holds; T (out of range) where it holds none
    position: Array  # [T] aligned position of each token; N*C (out of range) past the last sequence
    owner: Array  # [N] sequence that each chunk belongs to


def align_to_chunks(cu_seqlens: Array, length: int, chunk: int) -> Aligned:
    """Where each token of `length` packed tokens goes. N = ceil(T / C) + S chunks are enough for any lengths."""
    sequences = cu_seqlens.shape[0] - 1
    chunks = -(-length // chunk) + sequences
    ends = jnp.cumsum(-(-jnp.diff(cu_seqlens) // chunk))
    first_chunk = jnp.concatenate([jnp.zeros_like(ends[:1]), ends])
    # Chunks after the last sequence hold no token: to whom they belong does not matter.
    owner = jnp.minimum(jnp.searchsorted(ends, jnp.arange(chunks), side="right"), sequences - 1)
    offset = (jnp.arange(chunks) - first_chunk[owner])[:, None] * chunk + jnp.arange(chunk)
    source = cu_seqlens[owner][:, None] + offset
    source = jnp.where(source < cu_seqlens[owner + 1][:, None], source, length).reshape(-1)
    sequence = token_sequence(cu_seqlens, length)
    position = first_chunk[sequence] * chunk + jnp.arange(length) - cu_seqlens[sequence]
    return Aligned(source, jnp.where(sequence < sequences, position, chunks * chunk), owner)
