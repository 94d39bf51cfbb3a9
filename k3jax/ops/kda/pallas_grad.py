"""Last KDA kernel of the backward pass: from what the two scans met in each chunk to the gradients of the raw inputs.

With S the state a chunk starts from, dS the cotangent of the one it ends with, V' and dV' from the scans, and the names
of `pallas_prep` (N_ij = ⟨k_i e^{G_i−G_j}, k_j⟩, so M = β N):

    X = Tᵀ dV'      dv = β X      dA = tril(dO V'ᵀ)      dN = −β stril(X V'ᵀ)      dβ = ⟨X, V'⟩ / β
    dQ = e^G dO Sᵀ + Σ_j dA_ij e^{G_i−G_j} k_j
    dk = −β e^G X Sᵀ + Σ_j dN_ij e^{G_i−G_j} k_j  (as row)      + Σ_i (dA_ij Q_i + dN_ij k_i) e^{G_i−G_j}  (as column)
         + e^{G_C−G} V' dSᵀ  (as writer)
    dg_i = Σ_{r≥i} (Q dQ + k dk_row − k dk_column)_r + Σ_{r<i} (k dk_writer)_r + e^{G_C} Σ_v (S dS)_v

(I + M) V' = β (V − e^G K S) makes dT, dW and dU of the textbook form collapse into X. The sums over pairs are taken
level by level of `pallas_prep`, each anchored at its own borders, so that again no exponent is positive but within
blocks of 16 under the bounded gate. The gradient of a token's gate sums pairs that straddle it; sums stop at the ends
of the level's blocks and of documents, so that others get exact zeros.

Then the backward of the gate, of the L2 norms and of the sigmoid, while the tile is still on chip.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from k3jax.ops.mosaic import COLUMN, Kit, along_columns, along_rows, smem

from .gates import L2_EPS, Activation
from .pallas_prep import (
    ANCHOR,
    CHUNK,
    COMPILER,
    LEVELS,
    LOG2_E,
    STRIP,
    TILE,
    Scratch,
    Team,
    Tokens,
    block_of,
    first_level,
    level_pairs,
    log2_gate,
    since_block,
    to_block_end,
)
from .pallas_scan import Reversed, Scanned


class Gradients(NamedTuple):
    """N tokens, H heads."""

    q: jax.Array  # [N, H, K] bfloat16, as k and v
    k: jax.Array
    v: jax.Array
    g: jax.Array  # of the raw gate
    beta_logit: jax.Array  # [H, N] float32


def _gate_backward(raw: jax.Array, rate, bias, d_g: jax.Array, how: Activation) -> jax.Array:
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
    groups = dim // STRIP
    kit = Kit(interpret)
    wide, square = (CHUNK, STRIP), (CHUNK, CHUNK)
    slice_columns = CHUNK // groups
    bf16, f16, f32 = jnp.bfloat16, jnp.float16, jnp.float32
    marked = tokens is not None
    bounded = how.gate == "lower_bound"
    first = first_level(how)
    copies = 12 if marked else 11

    def body(q_g, k_g, g_g, b_g, rate_g, bias_g, zero_g, t_g, do_g, vc_g, dvc_g, st_g, ds_g, *refs):
        keeps_g = None
        if marked:
            rows_g, keeps_g, *refs = refs
        dq_g, dk_g, dv_g, dg_g, db_g, scratch, exchange, small, full, late, meet = refs
        dss, (gs, da_s, dn_s) = scratch["ends"]
        named = {**scratch["tiles"], **scratch["masks"], **scratch["pairs"]}
        named |= {"dss": dss, "gs": gs, "da_s": da_s, "dn_s": dn_s}
        named |= dict(zip(("g_first", "g16"), scratch["gates"]))
        named |= dict(zip(("ts", "order_s"), scratch["inverse"]))
        named |= dict(zip(("sts", "d_g"), scratch["states"]))
        s = Scratch(named, 0, zero_g)
        tile_i, h = lax.axis_index("t"), lax.axis_index("h")
        wg = lax.axis_index("wg")
        team = Team(kit, wg, groups, meet, exchange, small.get("marks"))
        mine, sync = pl.ds(wg * STRIP, STRIP), team.sync
        tokens_i = pl.ds(tile_i * CHUNK, CHUNK)
        part = pl.ds(wg * slice_columns, slice_columns)

        @functools.partial(team.only, 0)
        def _():
            pairs = [
                (g_g.at[tokens_i, h], s.g_first),
                (q_g.at[tokens_i, h], s.qs),
                (k_g.at[tokens_i, h], s.ks),
                (t_g.at[h, tokens_i], s.ts),
                (dvc_g.at[h, tokens_i], s.xs),
                (vc_g.at[h, tokens_i], s.vcs),
                (do_g.at[tokens_i, h], s.dos),
                (st_g.at[h, tile_i], s.sts),
                (ds_g.at[h, tile_i], s.dss),
                (b_g.at[h, tokens_i], small["beta"]),
                (bias_g.at[h], small["bias"]),
            ]
            if marked:
                pairs.append((rows_g.at[:, tokens_i], small["marks"]))
            for i, (source, target) in enumerate(pairs):
                plgpu.copy_gmem_to_smem(source, target, full.at[i])

        def arrived(*which):
            for i in which:
                plgpu.barrier_wait(full.at[i])

        row_vector, exchanged, real, allowed = team.row_vector, team.exchanged, team.real, team.allowed

        def beta_row():
            return row_vector(small["beta"])

        def flagged(x, row):
            return x if not marked else x * along_rows(row_vector(small["marks"].at[row]), x.shape)

        def get(ref):
            return kit.load(ref.at[:, mine]).astype(f32)

        def put(ref, value):
            kit.store(ref.at[:, mine], value.astype(ref.dtype))

        def sums(mask_ref):
            return kit.mm(wide, (mask_ref, s.g16.at[:, mine]))

        def share_sums(shift):
            masks = (s.since_s, since_block), (s.end_s, to_block_end)
            team.share(*((ref, team.ones_where(mask(shift))) for ref, mask in masks))

        def share_order(mask):
            """Tokens of the row's document that `mask` picks."""
            team.share((s.order_s, lambda i, n: jnp.where(allowed(mask(*team.indices(n, i)), n, i), 1.0, 0.0)))

        def share_pairs(mask):
            def picked(ref):
                def values(i, n):
                    score = kit.load(ref.at[:, pl.ds(i, n)]).astype(f32)
                    return jnp.where(mask(*team.indices(n, i)), score, 0.0)

                return values

            team.share((s.da_l, picked(s.da_s)), (s.dn_l, picked(s.dn_s)))

        def gate_of(raw):
            bias_v = None if how.gate == "none" else kit.load(small["bias"].at[mine], COLUMN, optimized=False)
            return raw, None if how.gate == "none" else rate_g[h], bias_v

        # Gates and norms, as in `prepare`.
        arrived(0, 1, 2, *range(9, copies))
        put(s.g16, real(log2_gate(*gate_of(real(get(s.g_first))), how)))
        if how.qk_l2norm:
            for i, ref in ((0, s.qs), (1, s.ks)):
                x = real(get(ref))
                exchange[i, wg] = jnp.sum(x * x, axis=1)
        share_sums(LEVELS)

        s.move()
        # X, and what each token's own V' says about its β.
        arrived(3, 4, 5)
        x = kit.mm(wide, (kit.t(s.ts), s.xs.at[:, mine]))
        kit.all_warps()
        exchange[2, wg] = jnp.sum(x * get(s.vcs), axis=1)
        put(s.xs, x)
        sync()
        share_order(lambda r, c: r > c)
        norm_q: Any = None
        norm_k: Any = None
        if how.qk_l2norm:
            norm_q = lax.rsqrt(exchanged(0) + L2_EPS)
            norm_k = lax.rsqrt(exchanged(1) + L2_EPS)
        team.only(0, lambda: db_g.__setitem__((h, tokens_i), exchanged(2) * (1.0 - beta_row())))

        def q_tile():
            x = real(get(s.qs))
            return x * (along_rows(norm_q * how.scale, wide) if how.qk_l2norm else how.scale)

        def k_tile():
            x = real(get(s.ks))
            return x * along_rows(norm_k, wide) if how.qk_l2norm else x

        s.move()
        # Scores.
        arrived(6, 7, 8)
        offset = wg * slice_columns
        part_shape = (CHUNK, slice_columns)
        r, c = team.indices(slice_columns, offset)
        d_a = kit.mm(part_shape, (s.dos, kit.t(s.vcs.at[part])))
        exchange[3, wg] = jnp.sum(jnp.where(r == c, d_a, 0.0), axis=1)
        d_a = jnp.where(allowed(r > c, slice_columns, offset), d_a, 0.0).astype(bf16)
        d_n = kit.mm(part_shape, (s.xs, kit.t(s.vcs.at[part]))) * along_rows(-beta_row(), part_shape)
        d_n = jnp.where(allowed(r > c, slice_columns, offset), d_n, 0.0).astype(bf16)

        s.move()
        # Through the states.
        rows_q = flagged(kit.mm(wide, (s.dos, s.sts.at[:, mine])), 2)
        rows_k = flagged(kit.mm(wide, (s.xs, s.sts.at[:, mine])) * along_rows(-beta_row(), wide), 2)
        writer = kit.mm(wide, (s.vcs, s.dss.at[:, mine]))
        kit.all_warps()
        for i in range(0, dim, 64):
            some = pl.ds(i, 64)
            product = kit.load(s.sts.at[some, mine]).astype(f32) * kit.load(s.dss.at[some, mine]).astype(f32)
            kit.store(s.sts.at[some, mine], product.astype(bf16))
        sync()  # dO, V' and dS have been read: their tiles are free
        kit.store(s.da_s.at[:, part], d_a)
        kit.store(s.dn_s.at[:, part], d_n)
        put(s.xs, get(s.xs) * along_rows(beta_row(), wide))

        def exact_sums(value):
            """Σ of float32 values over the tokens that `s.order_s` picks, as a high and a low half."""
            high = value.astype(bf16)
            kit.all_warps()
            kit.store(s.dos.at[:, mine], high)
            put(s.vcs, value - high.astype(f32))
            plgpu.commit_smem()
            return kit.mm(wide, (s.order_s, s.dos.at[:, mine]), (s.order_s, s.vcs.at[:, mine]))

        s.move()
        # Registers are scarce: what is not needed at once waits in shared memory.
        put(s.gs, flagged(writer * jnp.exp2(sums(s.end_s)), 3))
        d_g = exact_sums(k_tile() * get(s.gs))
        ones = kit.full(square, 1.0, bf16)
        s.move()
        through = kit.mm(wide, *((ones, s.sts.at[pl.ds(i, 64), mine]) for i in range(0, dim, 64)))
        through = through * jnp.exp2(sums(s.end_s) + sums(s.since_s))
        d_g = d_g + (through if keeps_g is None else through * keeps_g[tile_i])
        sync()
        share_order(lambda r, c: c >= r)
        put(s.d_g, d_g)
        up = jnp.exp2(sums(s.since_s))
        rows_q, rows_k = rows_q * up, rows_k * up
        sync()
        put(s.d_g, get(s.d_g) + exact_sums(q_tile() * rows_q + k_tile() * rows_k))
        d_k = rows_k + get(s.gs)
        sync()
        team.only(0, lambda: plgpu.copy_gmem_to_smem(g_g.at[tokens_i, h], s.gs, late))

        # Sums over pairs, level by level. The pairs of a level lie in one block of twice its size, and so do the gates
        # between them.
        def rounded(x):
            """As the operand of a product is."""
            return x.astype(bf16).astype(f32)

        def gather(rows_q, d_k, up, down):
            """Pairs of `da_l` and `dn_l`, anchored by up() as rows and down() as columns.

            What a pair adds to the gates' sums it takes away at its column: made of the same rounded factors, the two
            cancel, and no error is left on the gates before it.
            """
            s.move()
            kit.all_warps()
            put(s.dos, k_tile() * down())
            plgpu.commit_smem()
            gathered = kit.mm(wide, (s.da_l, s.dos.at[:, mine]))
            rows_q, value = rows_q + gathered * up(), rounded(q_tile() * up()) * gathered
            gathered = kit.mm(wide, (s.dn_l, s.dos.at[:, mine]))
            d_k, value = d_k + gathered * up(), value + rounded(k_tile() * up()) * gathered
            kit.all_warps()
            s.move()
            put(s.dos, q_tile() * up())
            put(s.vcs, k_tile() * up())
            plgpu.commit_smem()
            gathered = kit.mm(wide, (kit.t(s.da_l), s.dos.at[:, mine]), (kit.t(s.dn_l), s.vcs.at[:, mine]))
            d_k, value = d_k + gathered * down(), value - rounded(k_tile() * down()) * gathered
            put(s.d_g, get(s.d_g) + exact_sums(value))
            return rows_q, d_k

        def share_block(shift, pairs):
            share_pairs(pairs)
            share_order(lambda r, c: (block_of(r, shift) == block_of(c, shift)) & (c >= r))

        def level(i, so_far):
            s.move()
            shift = LEVELS - 1 - i
            share_sums(shift)
            share_block(shift + 1, level_pairs(shift))
            sync()
            rows_q, d_k = so_far
            up, down = lambda: jnp.exp2(sums(s.since_s)), lambda: jnp.exp2(sums(s.end_s))
            so_far = gather(rows_q, d_k, up, down)
            sync()
            return so_far

        rows_q, d_k = lax.fori_loop(0, LEVELS - first, level, (rows_q, d_k))
        s.move()
        if bounded:
            share_block(TILE, lambda r, c: (block_of(r, TILE) == block_of(c, TILE)) & (r > c))
            sync()
            up, down = lambda: jnp.exp2(sums(s.since_s) - ANCHOR), lambda: jnp.exp2(ANCHOR - sums(s.since_s))
            rows_q, d_k = gather(rows_q, d_k, up, down)
        s.move()
        plgpu.barrier_wait(late)
        d_raw = real(_gate_backward(*gate_of(real(get(s.gs))), get(s.d_g), how))
        put(s.gs, d_raw)

        # A token's pair with itself has no decay in it.
        itself = along_rows(exchanged(3), wide)
        rows_q, d_k = rows_q + k_tile() * itself, d_k + q_tile() * itself

        s.move()
        # Norms.
        if how.qk_l2norm:
            exchange[4, wg] = jnp.sum(q_tile() * rows_q, axis=1)
            exchange[5, wg] = jnp.sum(k_tile() * d_k, axis=1)
            sync()
            d_k = (d_k - k_tile() * along_rows(exchanged(5), wide)) * along_rows(norm_k, wide)
            unit_q = real(get(s.qs)) * along_rows(norm_q, wide)
            d_q = (rows_q * how.scale - unit_q * along_rows(exchanged(4), wide)) * along_rows(norm_q, wide)
        else:
            d_q = rows_q * how.scale
        put(s.qs, real(d_q))
        put(s.ks, real(d_k))
        sync()

        @functools.partial(team.only, 0)
        def _():
            for source, target in ((s.qs, dq_g), (s.ks, dk_g), (s.xs, dv_g), (s.gs, dg_g)):
                plgpu.copy_smem_to_gmem(source, target.at[tokens_i, h])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    tokens_like = jax.ShapeDtypeStruct((n, heads, dim), bf16)
    tile = smem((1, CHUNK, dim), bf16, STRIP)
    states = smem((1, dim, dim), bf16, STRIP)
    scores = smem((1, *square), bf16, slice_columns)

    def mask(dtype):
        return smem((1, *square), dtype, STRIP)

    kernel = kit.kernel(
        body,
        out_type=[*[tokens_like] * 4, jax.ShapeDtypeStruct((heads, n), f32)],
        grid=(n // CHUNK, heads),
        grid_names=("t", "h"),
        num_threads=groups,
        thread_name="wg",
        scratch_types=[
            {
                "tiles": {name: tile for name in ("qs", "ks", "dos", "vcs", "xs")},
                "states": kit.union(states, smem((1, CHUNK, dim), f32, STRIP)),
                "masks": {name: mask(f16) for name in ("since_s", "end_s")},
                "pairs": {name: mask(bf16) for name in ("da_l", "dn_l")},
                "gates": kit.union(tile, smem((1, CHUNK, dim), f16, STRIP)),
                "inverse": kit.union(mask(bf16), mask(bf16)),
                "ends": kit.union(states, [tile, scores, scores]),
            },
            plgpu.SMEM((6, groups, CHUNK), f32),
            {
                "beta": plgpu.SMEM((CHUNK,), f32),
                "bias": plgpu.SMEM((dim,), f32),
                **({"marks": plgpu.SMEM((4, CHUNK), f32)} if marked else {}),
            },
            plgpu.Barrier(num_barriers=copies),
            plgpu.Barrier(),
            plgpu.Barrier(num_arrivals=groups),
        ],
        compiler_params=COMPILER,
    )
    marks = (tokens.rows, tokens.keeps) if marked else ()
    scanned = (forward.corrected, backward.corrected, forward.states, backward.states)
    return Gradients(*kernel(q, k, g, beta, rate, bias, jnp.zeros(1, jnp.int32), inverse, d_o, *scanned, *marks))
