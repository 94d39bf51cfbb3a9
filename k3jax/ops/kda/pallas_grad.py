"""Last KDA kernel of the backward pass: from what the two scans met in each chunk to the gradients of the raw inputs.

With S the state a chunk starts from, dS the cotangent of the one it ends with, V' and dV' from the scans, and the names
of `pallas_prep` (N_ij = ⟨k_i e^{G_i−G_j}, k_j⟩, so M = β N):

    X = Tᵀ dV'      dv = β X      dA = tril(dO V'ᵀ)      dN = −β stril(X V'ᵀ)      dβ = ⟨X, V'⟩ / β
    dQ = e^G dO Sᵀ + Σ_j dA_ij e^{G_i−G_j} k_j
    dk = −β e^G X Sᵀ + Σ_j dN_ij e^{G_i−G_j} k_j  (as row)      + Σ_i (dA_ij Q_i + dN_ij k_i) e^{G_i−G_j}  (as column)
         + e^{G_C−G} V' dSᵀ  (as writer)
    dg_i = Σ_{r≥i} (Q dQ + k dk_row − k dk_column)_r + Σ_{r<i} (k dk_writer)_r + e^{G_C} Σ_v (S dS)_v

(I + M) V' = β (V − e^G K S) makes dT, dW and dU of the textbook form collapse into X. The sums over pairs go down the
levels of `pallas_prep`: at each, what has been gathered is rescaled to the anchors of the level, then the pairs of the
level are added, so that again no exponent is positive but within blocks of 16 under the bounded gate. The gradient of a
token's gate sums pairs that straddle it; sums stop at documents' ends, so that others get exact zeros.

Then the backward of the gate, of the L2 norms and of the sigmoid, while the tile is still on chip.
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
from .pallas_prep import CHUNK, LOG2_E, Tile, Tokens, _same_block, levels, log2_gate
from .pallas_scan import Reversed, Scanned


class Gradients(NamedTuple):
    """N tokens, H heads."""

    q: jax.Array  # [N, H, K] bfloat16, as k and v
    k: jax.Array
    v: jax.Array
    g: jax.Array  # [N, H, K] in the dtype of g: of the raw gate
    beta_logit: jax.Array  # [H, N] float32


def _gate_backward(raw: jax.Array, d_g: jax.Array, rate, bias, how: Activation) -> jax.Array:
    """Cotangent of the raw gate from that of the log-decay."""
    if how.gate == "none":
        return d_g
    z = raw if bias is None else raw + along_columns(bias, raw.shape)
    if how.gate == "softplus":
        return d_g * (-rate / (1.0 + jnp.exp2(z * -LOG2_E)))
    e = jnp.exp2(jnp.abs(z) * (rate * -LOG2_E))  # σ(1 − σ) = e / (1 + e)², even in z
    return d_g * (how.lower_bound * rate * e / ((1.0 + e) * (1.0 + e)))


def gradients(
    q: jax.Array,
    k: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    rate: jax.Array,
    bias: jax.Array,
    inverse: jax.Array,
    d_o: jax.Array,
    forward: Scanned,
    backward: Reversed,
    tokens: Tokens | None,
    how: Activation,
    *,
    interpret: bool = False,
) -> Gradients:
    """Run the kernel; arguments as in `prepare` and `reverse_scan`, `inverse` from `Prepared`."""
    n, heads, dim = q.shape
    groups = dim // 64
    kit = Kit(interpret)
    wide, square = (CHUNK, 64), (CHUNK, CHUNK)
    slice_columns = CHUNK // groups
    bf16, f16, f32 = jnp.bfloat16, jnp.float16, jnp.float32
    marked = tokens is not None
    bounded = how.gate == "lower_bound"

    def body(*refs):
        q_g, k_g, g_g, b_g, rate_g, bias_g, t_g, do_g, vc_g, dvc_g, st_g, ds_g = refs[:12]
        refs = refs[12:]
        if marked:
            rows_g, keeps_g, *refs = refs
        dq_g, dk_g, dv_g, dg_g, db_g, qs, ks, gs, g16, ts, dos, vcs, xs, sts, dss, da_s, dn_s, exchange, full, meet = refs
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
            for i, (source, target) in enumerate(
                (
                    (g_g.at[tokens_i, h], gs),
                    (q_g.at[tokens_i, h], qs),
                    (k_g.at[tokens_i, h], ks),
                    (t_g.at[h, tokens_i], ts),
                    (dvc_g.at[h, tokens_i], xs),
                    (vc_g.at[h, tokens_i], vcs),
                    (do_g.at[tokens_i, h], dos),
                    (st_g.at[h, tile_i], sts),
                    (ds_g.at[h, tile_i], dss),
                )
            ):
                plgpu.copy_gmem_to_smem(source, target, full.at[i])

        def arrived(*which):
            for i in which:
                plgpu.barrier_wait(full.at[i])

        def row_vector(ref):
            return kit.load(ref, ROW, optimized=False)

        def exchanged(i):
            return sum((row_vector(exchange.at[i, j]) for j in range(1, groups)), row_vector(exchange.at[i, 0]))

        def real(x):
            if not marked:
                return x
            return jnp.where(along_rows(row_vector(rows_g.at[1, tokens_i]), x.shape) > 0.5, x, 0.0)

        def flagged(x, row):
            return x if not marked else x * along_rows(row_vector(rows_g.at[row, tokens_i]), x.shape)

        def allowed(mask, columns=CHUNK, offset=0):
            if not marked:
                return mask
            own = row_vector(rows_g.at[0, tokens_i])
            other = kit.load(rows_g.at[0, pl.ds(tile_i * CHUNK + offset, columns)], COLUMN, optimized=False)
            return mask & (along_rows(own, mask.shape) == along_columns(other, mask.shape))

        def tile_of(ref):
            return kit.load(ref.at[:, mine]).astype(f32)

        def put(ref, value):
            kit.store(ref.at[:, mine], value.astype(bf16))

        be = row_vector(b_g.at[h, tokens_i])
        beta_wide = along_rows(be, wide)
        bias_v = None if how.gate == "none" else kit.load(bias_g.at[h, mine], COLUMN, optimized=False)
        rate_h = None if how.gate == "none" else rate_g[h]
        tile = Tile(kit, g16.at[:, mine], 64, None)

        # Gates and norms, as in `prepare`.
        arrived(0, 1, 2)
        kit.store(g16.at[:, mine], real(log2_gate(real(tile_of(gs)), rate_h, bias_v, how)).astype(f16))
        if how.qk_l2norm:
            for i, ref in ((0, qs), (1, ks)):
                x = real(tile_of(ref))
                exchange[i, wg] = jnp.sum(x * x, axis=1)

        # X, and what each token's own V' says about its β.
        arrived(3, 4, 5)
        x = kit.mm(wide, (kit.load(kit.t(ts)), xs.at[:, mine]))
        exchange[2, wg] = jnp.sum(x * tile_of(vcs), axis=1)
        put(xs, x)
        sync()
        norm_q = norm_k = None
        if how.qk_l2norm:
            norm_q = lax.rsqrt(exchanged(0) + L2_EPS)
            norm_k = lax.rsqrt(exchanged(1) + L2_EPS)
        on_first(lambda: db_g.__setitem__((h, tokens_i), exchanged(2) * (1.0 - be)))

        def q_tile():
            x = real(tile_of(qs))
            return x * (along_rows(norm_q * how.scale, wide) if how.qk_l2norm else how.scale)

        def k_tile():
            x = real(tile_of(ks))
            return x * along_rows(norm_k, wide) if how.qk_l2norm else x

        # Scores.
        arrived(6, 7, 8)
        offset = wg * slice_columns
        part_shape = (CHUNK, slice_columns)
        r, c = tile.rows_columns(slice_columns, offset)
        d_a = kit.mm(part_shape, (dos, kit.t(vcs.at[part])))
        kit.store(da_s.at[:, part], jnp.where(allowed(r >= c, slice_columns, offset), d_a, 0.0).astype(bf16))
        d_n = kit.mm(part_shape, (xs, kit.t(vcs.at[part]))) * along_rows(-be, part_shape)
        kit.store(dn_s.at[:, part], jnp.where(allowed(r > c, slice_columns, offset), d_n, 0.0).astype(bf16))

        # Through the states.
        as_writer = kit.mm(wide, (vcs, dss.at[:, mine]))
        rows_q = flagged(kit.mm(wide, (dos, sts.at[:, mine])), 2)
        rows_k = flagged(kit.mm(wide, (xs, sts.at[:, mine])) * -beta_wide, 2)
        for i in range(groups):
            some = pl.ds(i * 64, 64)
            product = kit.load(sts.at[some, mine]).astype(f32) * kit.load(dss.at[some, mine]).astype(f32)
            kit.store(sts.at[some, mine], product.astype(bf16))
        sync()  # dO, V' and dS have been read: their tiles now hold operands of the sums over pairs
        op_k, op_q, op_c = dos, vcs, dss.at[pl.ds(0, CHUNK)]
        put(xs, tile_of(xs) * beta_wide)

        def exact_sums(mask, value):
            """Σ over tokens of float32 values, as a high and a low half."""
            high = value.astype(bf16)
            kit.store(op_c.at[:, mine], high)
            put(op_q, value - high.astype(f32))
            plgpu.commit_smem()
            ones = jnp.where(mask, 1.0, 0.0).astype(bf16)
            return kit.mm(wide, (ones, op_c.at[:, mine]), (ones, op_q.at[:, mine]))

        r, c = tile.rows_columns()
        as_writer = flagged(as_writer * jnp.exp2(tile.to_block_end(CHUNK)), 3)
        d_g = exact_sums(allowed(r > c), k_tile() * as_writer)
        ones = jnp.where(r >= 0, 1.0, 0.0).astype(bf16)
        through = kit.mm(wide, *((ones, sts.at[pl.ds(i * 64, 64), mine]) for i in range(groups)))
        through = through * jnp.exp2(tile.sums(r >= 0))
        if marked:
            through = through * keeps_g[tile_i]
        d_g = d_g + through

        # Sums over pairs, from the largest blocks down.
        def picked(ref, mask):
            return jnp.where(mask, kit.load(ref).astype(f32), 0.0).astype(bf16)

        def add_pairs(rows_q, rows_k, columns, mask, mask_t):
            plgpu.commit_smem()
            rows_q = plus(rows_q, (picked(da_s, mask), op_c.at[:, mine]))
            rows_k = plus(rows_k, (picked(dn_s, mask), op_c.at[:, mine]))
            as_rows = (picked(kit.t(da_s), mask_t), op_q.at[:, mine]), (picked(kit.t(dn_s), mask_t), op_k.at[:, mine])
            return rows_q, rows_k, plus(columns, *as_rows)

        def plus(before, *pairs):
            return kit.mm(wide, *pairs) if before is None else kit.mm_acc(before, *pairs)

        columns = None
        for size in reversed(levels(how)):
            factor, odd = jnp.exp2(tile.other_block(size)), tile.odd(size)
            rows_factor = jnp.where(odd, factor, 1.0)
            rows_q, rows_k = rows_q * rows_factor, rows_k * rows_factor
            if columns is not None:
                columns = columns * jnp.where(odd, 1.0, factor)
            since = jnp.exp2(tile.since_block(size))
            put(op_q, q_tile() * since)
            put(op_k, k_tile() * since)
            put(op_c, k_tile() * jnp.exp2(tile.to_block_end(size)))
            r, c = tile.rows_columns()
            mask_t = (lax.rem(lax.div(c, jnp.int32(size)), jnp.int32(2)) == 1) & (
                lax.div(r, jnp.int32(size)) + 1 == lax.div(c, jnp.int32(size))
            )
            rows_q, rows_k, columns = add_pairs(rows_q, rows_k, columns, tile.pairs(size, CHUNK), mask_t)
        since = tile.since_block(levels(how)[0])
        up = jnp.exp2(since)
        rows_q, rows_k = rows_q * up, rows_k * up
        if bounded:
            columns = columns * jnp.exp2(tile.to_block_end(16))

        # The gate's share; what is left has no decay beyond its block of 16, or none.
        kn = k_tile()
        r, c = tile.rows_columns()
        d_g = d_g + exact_sums(allowed(c >= r), q_tile() * rows_q + kn * (rows_k - columns))
        d_k = rows_k + columns + as_writer
        if bounded:
            down = jnp.exp2(-since)
            put(op_q, q_tile() * up)
            put(op_k, k_tile() * up)
            put(op_c, k_tile() * down)
            r, c = tile.rows_columns()
            same = _same_block(r, c, 16)
            row_q, row_k, column = add_pairs(None, None, None, same & (r > c), same & (c > r))
            row_q, row_k, column = row_q * up, row_k * up, column * down
            r, c = tile.rows_columns()
            within = allowed(_same_block(r, c, 16) & (c >= r))
            d_g = d_g + exact_sums(within, q_tile() * row_q + k_tile() * (row_k - column))
            rows_q, d_k = rows_q + row_q, d_k + row_k + column
        d_raw = real(_gate_backward(real(tile_of(gs)), d_g, rate_h, bias_v, how))
        kit.store(gs.at[:, mine], d_raw.astype(g.dtype))
        r, c = tile.rows_columns()
        itself = along_rows(jnp.sum(jnp.where(r == c, kit.load(da_s).astype(f32), 0.0), axis=1), wide)
        kn = k_tile()
        rows_q, d_k = rows_q + kn * itself, d_k + q_tile() * itself

        # Norms.
        if how.qk_l2norm:
            exchange[3, wg] = jnp.sum(q_tile() * rows_q, axis=1)
            exchange[4, wg] = jnp.sum(kn * d_k, axis=1)
            sync()
            d_k = (d_k - kn * along_rows(exchanged(4), wide)) * along_rows(norm_k, wide)
            unit_q = real(tile_of(qs)) * along_rows(norm_q, wide)
            d_q = (rows_q * how.scale - unit_q * along_rows(exchanged(3), wide)) * along_rows(norm_q, wide)
        else:
            d_q = rows_q * how.scale
        put(qs, real(d_q))
        put(ks, real(d_k))
        sync()

        @on_first
        def _():
            for source, target in ((qs, dq_g), (ks, dk_g), (xs, dv_g), (gs, dg_g)):
                plgpu.copy_smem_to_gmem(source, target.at[tokens_i, h])
            plgpu.wait_smem_to_gmem(0)

    def tokens_like(dtype):
        return jax.ShapeDtypeStruct((n, heads, dim), dtype)

    kernel = kit.kernel(
        body,
        out_type=[*[tokens_like(bf16)] * 3, tokens_like(g.dtype), jax.ShapeDtypeStruct((heads, n), f32)],
        grid=(n // CHUNK, heads),
        grid_names=("t", "h"),
        num_threads=groups,
        thread_name="wg",
        scratch_types=[
            *[smem((CHUNK, dim), bf16)] * 2,
            smem((CHUNK, dim), g.dtype, 64),
            smem((CHUNK, dim), f16),
            smem(square, bf16),
            *[smem((CHUNK, dim), bf16)] * 3,
            *[smem((dim, dim), bf16)] * 2,
            *[smem(square, bf16, slice_columns)] * 2,
            plgpu.SMEM((5, groups, CHUNK), f32),
            plgpu.Barrier(num_barriers=9),
            plgpu.Barrier(num_arrivals=groups),
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=4096),
    )
    marks = (tokens.rows, tokens.keeps) if marked else ()
    states = (forward.corrected, backward.corrected, forward.states, backward.states)
    return Gradients(*kernel(q, k, g, beta, rate, bias, inverse, d_o, *states, *marks))
