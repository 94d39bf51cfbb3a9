"""Which tokens of a row belong together: packed documents, padding, and sequences packed end to end.

Shape suffixes: B batch, T time, S sequences, N chunks, C tokens of a chunk.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array


def document_starts(segment_ids_BT: Array) -> Array:
    """Bool [B, T]: where a row goes over to another document, which is not at its first one.

    A document that goes on after padding (id 0) does not start there: a real token is compared with the last real one.
    """
    last_id, reach = segment_ids_BT, 1
    while reach < last_id.shape[1]:  # fill padding from the left, twice as far in each step
        last_id = jnp.where(last_id != 0, last_id, _shift(last_id, reach))
        reach *= 2
    before = _shift(last_id, 1)
    return (before != 0) & (last_id != before)


def _shift(x_BT: Array, by: int) -> Array:
    return jnp.pad(x_BT, ((0, 0), (by, 0)))[:, : x_BT.shape[1]]


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
