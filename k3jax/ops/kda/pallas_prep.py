"""First KDA kernel: everything a chunk of 64 tokens computes without its incoming state.

With G the running sum of the log-decay in the chunk, Q = scale·q and k normalised (Kimi Linear, arXiv 2510.26692):

    M_ij = β_i ⟨k_i e^{G_i−G_j}, k_j⟩ (j < i)      T = (I + M)⁻¹      A_ij = ⟨Q_i e^{G_i−G_j}, k_j⟩ (j ≤ i)
    W = T β (k e^G)      U = T β v      Qb = Q e^G      Kt = k e^{G_C−G}

A decay per channel must be split between the two operands of a product, around an anchor that all their tokens share.
Levels do that with exponents that are never positive: at level b the chunk is cut in blocks of b tokens, and the pairs
with the row in an odd block and the column in the even block before it are anchored at the border between the two. Going
to level 2b multiplies the rows of odd blocks by the decay over the block before, the columns of even blocks by that over
the block after. With a gate bounded by −5 the diagonal blocks of 16 tokens are one product more, anchored at their
start (e^80 is finite); any other gate goes down to level 1.

T is built by the same levels: T ← T − T M_b T, whose entries stay within [−1, 1], so that nearly parallel keys cost no
digits (a Neumann series over a block of 16 loses all of them).

One thread of control is one warpgroup; each owns 64 of the K channels.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from k3jax.ops.mosaic import COLUMN, ROW, Kit, along_columns, along_rows, smem

from .gates import L2_EPS, Activation

CHUNK = 64
LOG2_E = 1.4426950408889634
# e^-100 is 0 in what it multiplies; a steeper decay would only take the digits of the sums that it enters.
STEEPEST = -100.0 * LOG2_E


class Tokens(NamedTuple):
    """Which tokens of each chunk are real, belong together, read the incoming state and write to the outgoing one.

    Rows of `rows` [4, N] float32: document within the chunk, real, reads, writes. `keeps` [N / 64] float32: 1 where the
    state passes through the chunk, 0 where a document ends in it.
    """

    rows: jax.Array
    keeps: jax.Array


class Prepared(NamedTuple):
    """What `prepare` returns: bfloat16 but for the decay. N tokens, H heads, 64 tokens a chunk."""

    w: jax.Array  # [H, N, K], −W
    q: jax.Array  # [H, N, K], Qb
    k: jax.Array  # [H, N, K], Kt
    u: jax.Array  # [H, N, V]
    a: jax.Array  # [H, N, 64]
    decay: jax.Array  # [H, N / 64, K] float32, e^{G_C}
    inverse: jax.Array  # [H, N, 64], T


def levels(how: Activation) -> tuple[int, ...]:
    """Block sizes of the levels; those under 16 replace the product over diagonal blocks of 16."""
    return (16, 32) if how.gate == "lower_bound" else (1, 2, 4, 8, 16, 32)


def log2_gate(raw: jax.Array, rate: jax.Array, bias: jax.Array | None, how: Activation) -> jax.Array:
    """Log-decay in units of ln 2 from the raw gate of a tile."""
    if how.gate == "none":
        return jnp.maximum(raw * LOG2_E, STEEPEST)
    z = raw if bias is None else raw + along_columns(bias, raw.shape)
    if how.gate == "lower_bound":
        return (how.lower_bound * LOG2_E) / (1.0 + jnp.exp2(z * (rate * -LOG2_E)))
    softplus = jnp.maximum(z, 0.0) * LOG2_E + jnp.log2(1.0 + jnp.exp2(jnp.abs(z) * -LOG2_E))
    return jnp.maximum(-rate * softplus, STEEPEST)


class Tile:
    """Masks and decay sums of one 64-token tile, for one warpgroup's channels."""

    def __init__(self, kit: Kit, gates, channels: int, documents: tuple | None):
        self.kit, self.gates, self.shape, self.documents = kit, gates, (CHUNK, channels), documents

    def rows_columns(self, columns: int = CHUNK, offset=0) -> tuple[jax.Array, jax.Array]:
        shape = (CHUNK, columns)
        return self.kit.iota(shape, 0), self.kit.iota(shape, 1) + offset

    def odd(self, size: int) -> jax.Array:
        """[64, channels]: rows in odd blocks of `size` tokens."""
        return lax.rem(lax.div(self.kit.iota(self.shape, 0), jnp.int32(size)), jnp.int32(2)) == 1

    def sums(self, mask: jax.Array) -> jax.Array:
        """Σ over the tokens that `mask` [64, 64] picks for each row."""
        return self.kit.mm(self.shape, (jnp.where(mask, 1.0, 0.0).astype(jnp.float16), self.gates))

    def since_block(self, size: int) -> jax.Array:
        """From the start of the row's block of `size` tokens to the row, inclusive."""
        r, c = self.rows_columns()
        return self.sums(_same_block(r, c, size) & (r >= c))

    def to_block_end(self, size: int) -> jax.Array:
        """From the token after the row to the end of its block."""
        r, c = self.rows_columns()
        return self.sums(_same_block(r, c, size) & (c > r))

    def other_block(self, size: int) -> jax.Array:
        """The whole block of `size` tokens that level `size` pairs with the row's."""
        r, c = self.rows_columns()
        rb, cb = lax.div(r, jnp.int32(size)), lax.div(c, jnp.int32(size))
        is_odd = lax.rem(rb, jnp.int32(2)) == 1
        return self.sums(jnp.where(is_odd, cb + 1, cb - 1) == rb)

    def pairs(self, size: int, columns: int, offset=0) -> jax.Array:
        """[64, columns]: the (row, column) pairs of level `size`."""
        r, c = self.rows_columns(columns, offset)
        rb, cb = lax.div(r, jnp.int32(size)), lax.div(c, jnp.int32(size))
        return (lax.rem(rb, jnp.int32(2)) == 1) & (cb + 1 == rb)


def _same_block(r: jax.Array, c: jax.Array, size: int) -> jax.Array:
    if size == CHUNK:
        return r >= 0
    return lax.div(r, jnp.int32(size)) == lax.div(c, jnp.int32(size))


def inverse(kit: Kit, m_ref, work, out) -> None:
    """`out` ← (I + M)⁻¹ in bfloat16 for strictly lower triangular M [64, 64] float16, by one warpgroup."""
    shape = (CHUNK, CHUNK)

    def block(size: int) -> jax.Array:
        r, c = kit.iota(shape, 0), kit.iota(shape, 1)
        rb, cb = lax.div(r, jnp.int32(size)), lax.div(c, jnp.int32(size))
        pairs = (lax.rem(rb, jnp.int32(2)) == 1) & (cb + 1 == rb)
        return jnp.where(pairs, kit.load(m_ref).astype(jnp.float32), 0.0)

    t = jnp.where(kit.iota(shape, 0) == kit.iota(shape, 1), 1.0, 0.0) - block(1)
    for size in (2, 4, 8, 16, 32):
        t16 = t.astype(jnp.float16)
        kit.store(work, t16)
        plgpu.commit_smem()
        y = kit.mm(shape, (block(size).astype(jnp.float16), work))
        kit.store(work, y.astype(jnp.float16))
        plgpu.commit_smem()
        t = kit.mm_acc(t, (-t16, work))
    kit.store(out, t.astype(jnp.bfloat16))


def prepare(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    rate: jax.Array,
    bias: jax.Array,
    tokens: Tokens | None,
    how: Activation,
    *,
    interpret: bool = False,
) -> Prepared:
    """Run the kernel. N is a multiple of 64, K = V is 64 or 128.

    Args:
      q, k, v: [N, H, K] bfloat16; g: [N, H, K] bfloat16 or float32.
      beta: [H, N] float32 in (0, 1), 0 where a token is not real.
      rate: [H] float32, e^A_log (ignored without a gate). bias: [H, K] float32.
    """
    n, heads, dim = q.shape
    groups = dim // 64  # warpgroups
    kit = Kit(interpret)
    wide, square = (CHUNK, 64), (CHUNK, CHUNK)
    slice_columns = CHUNK // groups  # columns of the score matrices that a warpgroup computes
    bf16, f16, f32 = jnp.bfloat16, jnp.float16, jnp.float32
    marked = tokens is not None

    def body(*refs):
        q_g, k_g, v_g, g_g, b_g, rate_g, bias_g = refs[:7]
        refs = refs[7:]
        if marked:
            rows_g, keeps_g, *refs = refs
        w_g, qo_g, ko_g, u_g, a_g, decay_g, t_g, qs, ks, xs, vs, gs, g16, a_s, m_s, work, t_s, exchange, full, meet = refs
        tile_i, h = lax.axis_index("t"), lax.axis_index("h")
        wg = lax.axis_index("wg") if groups > 1 else 0
        tokens_i = pl.ds(tile_i * CHUNK, CHUNK)
        mine = pl.ds(wg * 64, 64)
        part = pl.ds(wg * slice_columns, slice_columns)

        def sync():
            plgpu.commit_smem()
            if groups > 1:
                plgpu.barrier_arrive(meet)
                plgpu.barrier_wait(meet)

        def on_first(action):
            if groups > 1:
                pl.when(wg == 0)(action)
            else:
                action()

        @on_first
        def _():
            for i, (source, target) in enumerate(((g_g, gs), (q_g, qs), (k_g, ks), (v_g, vs))):
                plgpu.copy_gmem_to_smem(source.at[tokens_i, h], target, full.at[i])

        def row_vector(ref):
            return kit.load(ref, ROW, optimized=False)

        be = row_vector(b_g.at[h, tokens_i])
        documents = row_vector(rows_g.at[0, tokens_i]) if marked else None

        def real(x):
            if not marked:
                return x
            return jnp.where(along_rows(row_vector(rows_g.at[1, tokens_i]), x.shape) > 0.5, x, 0.0)

        def allowed(mask, columns, offset):
            """`mask` without pairs of tokens of two documents."""
            if not marked:
                return mask
            other = kit.load(rows_g.at[0, pl.ds(tile_i * CHUNK + offset, columns)], COLUMN, optimized=False)
            return mask & (along_rows(documents, mask.shape) == along_columns(other, mask.shape))

        tile = Tile(kit, g16.at[:, mine], 64, None)

        # Gates.
        plgpu.barrier_wait(full.at[0])
        bias_v = None if how.gate == "none" else kit.load(bias_g.at[h, mine], COLUMN, optimized=False)
        rate_h = None if how.gate == "none" else rate_g[h]
        raw = real(kit.load(gs.at[:, mine]).astype(f32))
        kit.store(g16.at[:, mine], real(log2_gate(raw, rate_h, bias_v, how)).astype(f16))
        on_first(lambda: kit.store(work, jnp.where(kit.iota(square, 0) >= 0, 1.0, 0.0).astype(f16)))

        # Norms: each warpgroup sums over its channels.
        plgpu.barrier_wait(full.at[1])
        plgpu.barrier_wait(full.at[2])
        x = real(kit.load(qs.at[:, mine]).astype(f32))
        y = real(kit.load(ks.at[:, mine]).astype(f32))
        if how.qk_l2norm:
            exchange[0, wg] = jnp.sum(x * x, axis=1)
            exchange[1, wg] = jnp.sum(y * y, axis=1)
        sync()
        if how.qk_l2norm:
            totals = [
                sum((row_vector(exchange.at[i, j]) for j in range(1, groups)), row_vector(exchange.at[i, 0]))
                for i in range(2)
            ]
            x = x * along_rows(lax.rsqrt(totals[0] + L2_EPS) * how.scale, wide)
            y = y * along_rows(lax.rsqrt(totals[1] + L2_EPS), wide)
        else:
            x = x * how.scale

        # Decay over the chunk: channels as rows, so that it is one value a row.
        total = kit.mm((64, 8), (kit.t(g16.at[:, mine]), kit.t(work.at[pl.ds(0, 8)])))
        decay = jnp.exp2(jnp.max(total, axis=1))
        if marked:
            decay = decay * keeps_g[tile_i]
        decay_g[h, tile_i, mine] = decay

        # Scores, level by level.
        def scores(columns_ref):
            other = kit.t(columns_ref.at[part])
            return kit.mm((CHUNK, slice_columns), (qs, other)), kit.mm((CHUNK, slice_columns), (ks, other))

        offset = wg * slice_columns
        zeros = (CHUNK, slice_columns)
        if how.gate == "lower_bound":
            since = tile.since_block(16)
            up = jnp.exp2(since)
            kit.store(qs.at[:, mine], (x * up).astype(bf16))
            kit.store(ks.at[:, mine], (y * up).astype(bf16))
            kit.store(xs.at[:, mine], (y * jnp.exp2(-since)).astype(bf16))
            sync()
            sq, sk = scores(xs)
            r, c = tile.rows_columns(slice_columns, offset)
            same = allowed(_same_block(r, c, 16), slice_columns, offset)
            a = jnp.where(same & (r >= c), sq, 0.0)
            m = jnp.where(same & (r > c), sk, 0.0)
            first = 16
            sync()  # both warpgroups have read the operands
        else:
            r, c = tile.rows_columns(slice_columns, offset)
            # exchange rows 2: ⟨Q_i, k_i⟩, the pairs that no level has
            exchange[2, wg] = jnp.sum(x * y, axis=1)
            up = jnp.exp2(tile.since_block(1))
            kit.store(qs.at[:, mine], (x * up).astype(bf16))
            kit.store(ks.at[:, mine], (y * up).astype(bf16))
            sync()
            diagonal = sum((row_vector(exchange.at[2, j]) for j in range(1, groups)), row_vector(exchange.at[2, 0]))
            a = jnp.where(r == c, along_rows(diagonal, zeros), 0.0)
            m = jnp.where(r == c, 0.0, 0.0)
            first = 1
        for size in levels(how):
            if size == first:
                kit.store(xs.at[:, mine], (y * jnp.exp2(tile.to_block_end(size))).astype(bf16))
            sync()
            sq, sk = scores(xs)
            pairs = allowed(tile.pairs(size, slice_columns, offset), slice_columns, offset)
            a = a + jnp.where(pairs, sq, 0.0)
            m = m + jnp.where(pairs, sk, 0.0)
            factor = jnp.exp2(tile.other_block(size))
            odd = tile.odd(size)
            sync()  # both warpgroups have read the operands
            rows_factor = jnp.where(odd, factor, 1.0)
            kit.store(qs.at[:, mine], (kit.load(qs.at[:, mine]).astype(f32) * rows_factor).astype(bf16))
            kit.store(ks.at[:, mine], (kit.load(ks.at[:, mine]).astype(f32) * rows_factor).astype(bf16))
            kept = kit.load(xs.at[:, mine]).astype(f32)
            kit.store(xs.at[:, mine], (kept * jnp.where(odd, 1.0, factor)).astype(bf16))
        kit.store(a_s.at[:, part], a.astype(bf16))
        kit.store(m_s.at[:, part], (m * along_rows(be, zeros)).astype(f16))
        if marked:
            reads = along_rows(row_vector(rows_g.at[2, tokens_i]), wide)
            writes = along_rows(row_vector(rows_g.at[3, tokens_i]), wide)
            kit.store(qs.at[:, mine], (kit.load(qs.at[:, mine]).astype(f32) * reads).astype(bf16))
            kit.store(ks.at[:, mine], (kit.load(ks.at[:, mine]).astype(f32) * reads).astype(bf16))
            kit.store(xs.at[:, mine], (kit.load(xs.at[:, mine]).astype(f32) * writes).astype(bf16))
        sync()

        @on_first
        def _():
            plgpu.copy_smem_to_gmem(qs, qo_g.at[h, tokens_i])
            plgpu.copy_smem_to_gmem(xs, ko_g.at[h, tokens_i])
            plgpu.copy_smem_to_gmem(a_s, a_g.at[h, tokens_i])
            inverse(kit, m_s, work, t_s)

        beta_wide = along_rows(be, wide)
        kit.store(ks.at[:, mine], (kit.load(ks.at[:, mine]).astype(f32) * beta_wide).astype(bf16))
        plgpu.barrier_wait(full.at[3])
        kit.store(vs.at[:, mine], (real(kit.load(vs.at[:, mine]).astype(f32)) * beta_wide).astype(bf16))
        sync()
        w = kit.mm(wide, (t_s, ks.at[:, mine]))
        u = kit.mm(wide, (t_s, vs.at[:, mine]))
        kit.store(ks.at[:, mine], (-w).astype(bf16))
        kit.store(vs.at[:, mine], u.astype(bf16))
        sync()

        @on_first
        def _():
            plgpu.copy_smem_to_gmem(t_s, t_g.at[h, tokens_i])
            plgpu.copy_smem_to_gmem(ks, w_g.at[h, tokens_i])
            plgpu.copy_smem_to_gmem(vs, u_g.at[h, tokens_i])
            plgpu.wait_smem_to_gmem(0)

    def tokens_like(columns):
        return jax.ShapeDtypeStruct((heads, n, columns), bf16)

    tile_of = smem((CHUNK, dim), bf16)
    kernel = kit.kernel(
        body,
        out_type=[
            *[tokens_like(dim)] * 4,
            tokens_like(CHUNK),
            jax.ShapeDtypeStruct((heads, n // CHUNK, dim), f32),
            tokens_like(CHUNK),
        ],
        grid=(n // CHUNK, heads),
        grid_names=("t", "h"),
        num_threads=groups,
        thread_name="wg",
        scratch_types=[
            *[tile_of] * 4,
            smem((CHUNK, dim), g.dtype, 64),
            smem((CHUNK, dim), f16),
            smem(square, bf16, slice_columns),
            smem(square, f16, slice_columns),
            smem(square, f16),
            smem(square, bf16),
            plgpu.SMEM((3, groups, CHUNK), f32),
            plgpu.Barrier(num_barriers=4),
            plgpu.Barrier(num_arrivals=groups),
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=4096),
    )
    marks = (tokens.rows, tokens.keeps) if marked else ()
    return Prepared(*kernel(q, k, v, g, beta, rate, bias, *marks))
