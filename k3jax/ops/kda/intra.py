"""What a chunk of KDA computes without its incoming state: decayed scores and the inverse of a triangular matrix.

The decay between two tokens sits inside the sum over channels, so it must be split around an anchor a into
`(x_i e^{G_i - G_a}) (k_j e^{G_a - G_j})`, with G the running sum of the log-decay. Which anchor keeps the exponents in
range depends on the pair:

* tokens of different tiles: the first row of the later tile. Neither exponent is above 0;
* tokens of one 16-token tile, log-decay >= -5: the first row again, exponents within 75 (e^75 = 4e32 fits float32 and
  bfloat16). A row then depends on no later token, to the last bit. The backward pass need not care about that and
  takes the middle row, exponents within 40: the gradient of a column is its factor times a sum that holds the inverse
  of the factor, and e^-75 times a small cotangent (of a mean over many tokens) is below the smallest float32;
* tokens of one tile, unbounded log-decay: the tile is cut into smaller tiles, down to single tokens.

Sums of log-decay are taken over the tokens concerned and never as differences of longer sums, which would lose digits
after a steep token. Shape suffixes: C tokens of a chunk, K key dim; N tiles, R tokens of a tile.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

TILE = 16


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 3))
def matmul(spec: str, a: Array, b: Array, dtype: DTypeLike) -> Array:
    """Einsum of two operands rounded to `dtype`, accumulated and returned in at least float32, and so its gradients."""
    # Unless told otherwise, GPUs multiply float32 in TF32.
    precision = None if dtype == jnp.bfloat16 else jax.lax.Precision.HIGHEST
    accumulate = jnp.promote_types(dtype, jnp.float32)
    return jnp.einsum(spec, a.astype(dtype), b.astype(dtype), precision=precision, preferred_element_type=accumulate)


def _matmul_fwd(spec, a, b, dtype):
    return matmul(spec, a, b, dtype), (a, b)


def _matmul_bwd(spec, dtype, operands, cotangent):
    a, b = operands
    operand_specs, out = spec.split("->")
    spec_a, spec_b = operand_specs.split(",")
    d_a = matmul(f"{out},{spec_b}->{spec_a}", cotangent, b, dtype)
    d_b = matmul(f"{spec_a},{out}->{spec_b}", a, cotangent, dtype)
    return d_a.astype(a.dtype), d_b.astype(b.dtype)


matmul.defvjp(_matmul_fwd, _matmul_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def decayed(x: Array, exponent: Array, dtype: DTypeLike) -> Array:
    """`x * exp(exponent)` rounded to `dtype`, in the dtype of x.

    The gradient of the exponent is that of the rounded factor: in a sum over the rows and columns of a tile, what a
    pair gives to its row and takes from its column then cancels, where the decay between the two is not concerned.
    """
    return _decayed_fwd(x, exponent, dtype)[0]


def _decayed_fwd(x, exponent, dtype):
    decay = jnp.exp(exponent)
    rounded = x * decay
    if dtype == jnp.bfloat16:  # not a pair of casts, which XLA may drop
        rounded = jax.lax.reduce_precision(rounded, exponent_bits=8, mantissa_bits=7)
    return rounded, (decay, rounded)


def _decayed_bwd(dtype, residuals, cotangent):
    decay, rounded = residuals
    d_x = cotangent * decay
    d_exponent = cotangent * rounded
    return d_x, d_exponent


decayed.defvjp(_decayed_fwd, _decayed_bwd)


class DecaySums(NamedTuple):
    """Sums of log-decay in tiles of R tokens. Leading axes are free."""

    prefix: Array  # [N, R, K] up to each row, inclusive
    rest: Array  # [N, R, K] what follows each row in its tile
    row: Array  # [N, R, K] from the anchor row of the tile to each row; minus that for rows before the anchor
    head: Array  # [N, K] up to the anchor row, inclusive
    before: Array  # [N, K] all earlier tiles
    after: Array  # [N, K] all later tiles
    between: Array  # [N, N, K] the tiles strictly between tile n and an earlier tile m


@functools.cache
def _sum_matrices(tile: int, tiles: int, anchor: int) -> tuple[np.ndarray, np.ndarray]:
    """Matrices of 0, 1 and -1: [3R, R] sums inside a tile, [N*N + 2N, N] sums of whole tiles."""
    i, m = np.arange(tile)[:, None], np.arange(tile)[None]
    prefix, rest = m <= i, m > i
    row = np.where(prefix & (m > anchor), 1, 0) - np.where(rest & (m <= anchor), 1, 0)
    n, c, m = np.arange(tiles)[:, None, None], np.arange(tiles)[:, None], np.arange(tiles)
    between = ((c < m) & (m < n)).reshape(tiles * tiles, tiles)
    n = n[:, 0]
    return np.concatenate([prefix, rest, row]), np.concatenate([between, m < n, m > n])


def decay_sums(g_NRK: Array, anchor: int) -> DecaySums:
    """`DecaySums` of log-decay [..., N, R, K] around row `anchor` of each tile, without any cancellation."""
    tiles, tile, dim = g_NRK.shape[-3:]
    inside, across = (jnp.asarray(x, g_NRK.dtype) for x in _sum_matrices(tile, tiles, anchor))

    def products(matrix: Array, x: Array) -> Array:
        # A batched product although the matrix is the same in all of it: XLA would transpose x and the result else.
        matrix = matrix + jnp.zeros_like(x[..., :1, :1])
        return matmul("...sr,...rk->...sk", matrix, x, x.dtype)

    prefix, rest, row = jnp.split(products(inside, g_NRK), 3, axis=-2)
    whole = products(across, prefix[..., -1, :])
    between, before, after = jnp.split(whole, [tiles * tiles, tiles * tiles + tiles], axis=-2)
    between = between.reshape(*between.shape[:-2], tiles, tiles, dim)
    return DecaySums(prefix, rest, row, prefix[..., anchor, :], before, after, between)


def tile_scores(q: Array, k: Array, sums: DecaySums, within: bool, dtype: DTypeLike) -> tuple[Array, Array]:
    """Decayed scores [..., C, C] of the rows of q, and of those of k, with the columns of k, tile by tile.

    Columns of later tiles come out as 0, as do those of the row's own tile unless `within`; in the own tile, columns
    after the row come out as junk, possibly infinite.
    """
    *lead, length, dim = k.shape
    tiles, tile = sums.row.shape[-3:-1]
    split = (*lead, tiles, tile, dim)
    later, earlier = np.arange(tiles)[:, None, None, None], np.arange(tiles)[None, :, None, None]
    # Selects come before exp: what they hide would overflow.
    to_anchor = sums.head[..., :, None, None, :] + sums.between[..., None, :]
    exponent = jnp.where(earlier < later, to_anchor + sums.rest[..., None, :, :, :], -jnp.inf)
    if within:
        exponent = jnp.where(earlier == later, -sums.row[..., None, :, :], exponent)
    columns = jnp.broadcast_to(k.reshape(split)[..., None, :, :, :], exponent.shape)
    columns = decayed(columns, exponent, dtype)
    columns = columns.reshape(*lead, tiles, length, dim)

    def scores(x: Array) -> Array:
        rows = decayed(x.reshape(split), sums.row, dtype)
        return matmul("...nik,...njk->...nij", rows, columns, dtype).reshape(*lead, length, length)

    return scores(q), scores(k)


def unbounded_scores(q: Array, k: Array, g: Array, sums: DecaySums, dtype: DTypeLike) -> tuple[Array, Array]:
    """`tile_scores` within tiles too, for any log-decay <= 0; `sums` is of 16-token tiles around their first row.

    Tiles of 16 in the chunk, of 4 in those, of 1 in those: every pair of different tokens is in different tiles once,
    where no exponent is above 0. The diagonal comes out as 0.
    """
    *lead, length, dim = k.shape
    total_q, total_k = tile_scores(q, k, sums, False, dtype)
    for block, tile in ((TILE, 4), (4, 1)):
        blocks = (*lead, length // block, block, dim)
        inner_sums = decay_sums(g.reshape(*blocks[:-2], block // tile, tile, dim), 0)
        inner_q, inner_k = tile_scores(q.reshape(blocks), k.reshape(blocks), inner_sums, False, dtype)
        total_q, total_k = total_q + _block_diagonal(inner_q), total_k + _block_diagonal(inner_k)
    return total_q, total_k


def _block_diagonal(x_NRR: Array) -> Array:
    """[..., N, R, R] -> [..., N*R, N*R]."""
    *lead, blocks, block, _ = x_NRR.shape
    own = np.eye(blocks, dtype=bool)[:, None, :, None]
    x = jnp.where(own, x_NRR[..., :, :, None, :], 0)
    # One axis at a time: explicit sharding does not allow two to be merged at once.
    return x.reshape(*lead, blocks * block, blocks, block).reshape(*lead, blocks * block, blocks * block)


@jax.custom_vjp
def unit_lower_inverse(m_CC: Array) -> Array:
    """(I + M)^-1 of strictly lower triangular M [..., C, C], C a multiple of 16.

    16x16 blocks by forward substitution, then pairs of blocks merged by [[A, 0], [B, D]]^-1 = [[A^-1, 0],
    [-D^-1 B A^-1, D^-1]]. Neumann doubling, (I - M)(I + M^2)(I + M^4)..., ends too, but its powers grow binomially for
    near-parallel keys: on 16x16 blocks already it loses four of float32's seven digits.
    """
    size = m_CC.shape[-1]
    padded = TILE << max(0, (size // TILE - 1).bit_length())  # a power of two of blocks
    m = jnp.pad(m_CC, [(0, 0)] * (m_CC.ndim - 2) + [(0, padded - size)] * 2)
    blocks = jnp.stack([m[..., i : i + TILE, i : i + TILE] for i in range(0, padded, TILE)], axis=-3)
    rows = jnp.moveaxis(blocks, -2, 0)[1:]

    def substitute(inverse, at):
        i, row = at
        return inverse.at[..., i, :].add(-jnp.sum(row[..., None] * inverse, axis=-2)), None

    identity = jnp.eye(TILE, dtype=m.dtype) + jnp.zeros_like(blocks)
    inverse, _ = jax.lax.scan(substitute, identity, (jnp.arange(1, TILE), rows))
    while inverse.shape[-3] > 1:
        half = inverse.shape[-1]
        a, d = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        b = jnp.stack([m[..., i + half : i + 2 * half, i : i + half] for i in range(0, padded, 2 * half)], axis=-3)
        low = -matmul("...ij,...jk->...ik", d, matmul("...ij,...jk->...ik", b, a, m.dtype), m.dtype)
        top = jnp.concatenate([a, jnp.zeros_like(a)], axis=-1)
        inverse = jnp.concatenate([top, jnp.concatenate([low, d], axis=-1)], axis=-2)
    return inverse[..., 0, :size, :size]


def _inverse_fwd(m_CC):
    inverse = unit_lower_inverse(m_CC)
    return inverse, inverse


def _inverse_bwd(inverse, d_inverse):
    """dM = -T^T dT T^T, of which only the part strictly below the diagonal is free."""
    left = matmul("...ji,...jk->...ik", inverse, d_inverse, inverse.dtype)
    return (-jnp.tril(matmul("...ij,...kj->...ik", left, inverse, inverse.dtype), -1),)


unit_lower_inverse.defvjp(_inverse_fwd, _inverse_bwd)
