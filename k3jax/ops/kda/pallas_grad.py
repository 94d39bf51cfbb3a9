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
from collections.abc import Callable
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
    Tile,
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


class Team(Tile):
    """A chunk shared by warpgroups, 64 channels each. `exchange` [., groups, 64]: their parts of sums over channels."""

    def __init__(self, kit: Kit, marks, wg, groups: int, meet, exchange):
        super().__init__(kit, marks)
        self.wg, self._groups, self._meet, self._exchange = wg, groups, meet, exchange

    def sync(self) -> None:
        """What each has written to shared memory is there for all, and for copies and wgmma."""
        plgpu.commit_smem()
        if self._groups > 1:
            plgpu.barrier_arrive(self._meet)
            plgpu.barrier_wait(self._meet)

    def only(self, wg: int, action: Callable[[], None]) -> None:
        pl.when(self.wg == wg % self._groups)(action) if self._groups > 1 else action()

    def give(self, i: int, part: jax.Array) -> None:
        self._exchange[i, self.wg] = part

    def given(self, i: int) -> jax.Array:
        """Sum `i` over the channels of all warpgroups."""
        return functools.reduce(jnp.add, (self.row_vector(self._exchange.at[i, j]) for j in range(self._groups)))


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
    square, wide = (CHUNK, CHUNK), (CHUNK, STRIP)
    share = CHUNK // groups  # columns of the score matrices that a warpgroup computes
    bf16, f16, f32 = jnp.bfloat16, jnp.float16, jnp.float32
    marked = tokens is not None

    def body(q_g, k_g, g_g, b_g, rate_g, bias_g, t_g, do_g, vc_g, dvc_g, st_g, ds_g, *refs):
        keeps_g = None
        if marked:
            rows_g, keeps_g, *refs = refs
        dq_g, dk_g, dv_g, dg_g, db_g, tiles, states, inverses, ends, scores, exchange, small, full, meet = refs
        qs, ks, gs, g16, dos, vcs, xs, dvs = (tiles[i] for i in ("q", "k", "g", "g16", "d_o", "v", "x", "dv"))
        ts, da_l = inverses
        dss, (writers, dn_l) = ends
        da_s, dn_s = scores
        by_columns, by_rows_q, by_rows_k = dos, vcs, xs  # once the states are done with, operands of sums over pairs
        tile_i, h, wg = lax.axis_index("t"), lax.axis_index("h"), lax.axis_index("wg")
        team = Team(kit, small.get("marks"), wg, groups, meet, exchange)
        real, flagged, sync = team.real, team.flagged, team.sync
        mine, part = pl.ds(wg * STRIP, STRIP), pl.ds(wg * share, share)
        tokens_i = pl.ds(tile_i * CHUNK, CHUNK)

        @functools.partial(team.only, 0)
        def _():
            sources = [
                (g_g.at[tokens_i, h], gs),
                (b_g.at[h, tokens_i], small["beta"]),
                (bias_g.at[h], small["bias"]),
                (q_g.at[tokens_i, h], qs),
                (k_g.at[tokens_i, h], ks),
                (t_g.at[h, tokens_i], ts),
                (dvc_g.at[h, tokens_i], xs),
                (vc_g.at[h, tokens_i], vcs),
                (do_g.at[tokens_i, h], dos),
                (st_g.at[h, tile_i], states),
                (ds_g.at[h, tile_i], dss),
            ]
            if marked:
                sources.append((rows_g.at[:, tokens_i], small["marks"]))
            for i, (source, target) in enumerate(sources):
                plgpu.copy_gmem_to_smem(source, target, full.at[i])

        def arrived(*which):
            for i in which:
                plgpu.barrier_wait(full.at[i])

        def get(ref):
            return kit.load(ref.at[:, mine]).astype(f32)

        def put(ref, value):
            kit.store(ref.at[:, mine], value.astype(ref.dtype))

        def sums(mask):
            return kit.mm(wide, (team.ones_where(mask), g16.at[:, mine]))

        def gate_inputs():
            if how.gate == "none":
                return real(get(gs)), None, None
            return real(get(gs)), rate_g[h], kit.load(small["bias"].at[mine], COLUMN, optimized=False)

        # Gates and norms, as in `prepare`.
        arrived(0, 1, 2, *range(11, 12 if marked else 11))
        put(g16, real(log2_gate(*gate_inputs(), how)))
        arrived(3, 4)
        if how.qk_l2norm:
            for i, ref in enumerate((qs, ks)):
                x = real(get(ref))
                team.give(i, jnp.sum(x * x, axis=1))

        # X, and what each token's own V' says about its β.
        beta = team.row_vector(small["beta"])
        arrived(5, 6, 7)
        x = kit.mm(wide, (kit.t(ts), xs.at[:, mine]))
        kit.all_warps()
        put(xs, x)
        put(dvs, x * along_rows(beta, wide))
        team.give(2, jnp.sum(x * get(vcs), axis=1))
        sync()
        norm_q: Any = along_rows(lax.rsqrt(team.given(0) + L2_EPS), wide) if how.qk_l2norm else 1.0
        norm_k: Any = along_rows(lax.rsqrt(team.given(1) + L2_EPS), wide) if how.qk_l2norm else 1.0

        @functools.partial(team.only, 0)
        def _():
            db_g[h, tokens_i] = team.given(2) * (1.0 - beta)
            plgpu.copy_smem_to_gmem(dvs, dv_g.at[tokens_i, h])

        def queries():
            return real(get(qs)) * (norm_q * how.scale)

        def keys():
            return real(get(ks)) * norm_k

        # Scores.
        arrived(8, 9, 10)
        r, c = team.indices(share, wg * share)
        before = team.allowed(r > c, wg * share)
        d_a = kit.mm((CHUNK, share), (dos, kit.t(vcs.at[part])))
        zero = beta * 0.0  # unknown to the compiler, as in `prepare`
        team.give(3, jnp.sum(jnp.where(r == c, d_a, 0.0), axis=1))
        kit.store(da_s.at[:, part], jnp.where(before, d_a, along_rows(zero, r.shape)).astype(bf16))
        d_n = kit.mm((CHUNK, share), (xs, kit.t(vcs.at[part]))) * along_rows(beta * -1.0, r.shape)
        kit.store(dn_s.at[:, part], jnp.where(before, d_n, along_rows(zero, r.shape)).astype(bf16))

        # Through the states.
        up = jnp.exp2(sums(since_block(LEVELS)))
        rows_q = flagged(kit.mm(wide, (dos, states.at[:, mine])), 2) * up
        rows_k = flagged(kit.mm(wide, (xs, states.at[:, mine])) * along_rows(beta * -1.0, wide), 2) * up
        # What each token adds to the gates up to its own, and takes away again where it acts as a column.
        value = queries() * rows_q + keys() * rows_k
        writer = flagged(kit.mm(wide, (vcs, dss.at[:, mine])), 3) * jnp.exp2(sums(to_block_end(LEVELS)))
        d_k = rows_k + writer
        writer = (keys() * writer).astype(bf16)
        kit.all_warps()
        for i in range(0, dim, CHUNK):
            some = pl.ds(i, CHUNK)
            kit.store(states.at[some, mine], kit.load(states.at[some, mine]) * kit.load(dss.at[some, mine]))
        sync()  # all have read the operands
        put(writers, writer)

        def pairs(mask):
            """The scores of these pairs alone, for all."""
            for i, (source, target) in enumerate(((da_s, da_l), (dn_s, dn_l))):

                def pick(source=source, target=target):
                    score = kit.load(source).astype(f32)
                    kit.store(target, jnp.where(mask(*team.indices()), score, along_rows(zero, square)).astype(bf16))

                team.only(i, pick)

        def gather(so_far, up, down):
            """Sums over `pairs`, anchored by `up` as rows and by `down` as columns.

            What a pair adds to the gates' sums it takes away at its column: made of the same rounded factors, the two
            cancel, and no error is left on the gates before it.
            """
            rows_q, d_k, value = so_far
            put(by_columns, keys() * down)
            put(by_rows_q, queries() * up)
            put(by_rows_k, keys() * up)
            sync()
            gathered = kit.mm(wide, (da_l, by_columns.at[:, mine]))
            rows_q, value = rows_q + gathered * up, value + get(by_rows_q) * gathered
            gathered = kit.mm(wide, (dn_l, by_columns.at[:, mine]))
            d_k, value = d_k + gathered * up, value + get(by_rows_k) * gathered
            gathered = kit.mm(wide, (kit.t(da_l), by_rows_q.at[:, mine]), (kit.t(dn_l), by_rows_k.at[:, mine]))
            d_k, value = d_k + gathered * down, value - get(by_columns) * gathered
            sync()
            return rows_q, d_k, value

        def level(shift, so_far):
            pairs(level_pairs(shift))
            return gather(so_far, jnp.exp2(sums(since_block(shift))), jnp.exp2(sums(to_block_end(shift))))

        so_far = rows_q, d_k, value
        first = first_level(how)
        # A loop, so that the compiler keeps no address of one level in a register for the next.
        so_far = lax.fori_loop(0, LEVELS - first, lambda i, so_far: level(LEVELS - 1 - i, so_far), so_far)
        if first:
            pairs(lambda r, c: block_of(r, first) == block_of(c, first))
            since = sums(since_block(first))
            so_far = gather(so_far, jnp.exp2(since - ANCHOR), jnp.exp2(ANCHOR - since))
        rows_q, d_k, value = so_far

        # The gates' sums: of float32 values as a high and a low half, for they cancel.
        high = value.astype(bf16)
        kit.store(dos.at[:, mine], high)
        put(vcs, value - high.astype(f32))
        plgpu.commit_smem()
        later, earlier = (team.ones_where(mask, bf16, True) for mask in (lambda r, c: c >= r, lambda r, c: c < r))
        d_g = kit.mm(wide, (later, dos.at[:, mine]), (later, vcs.at[:, mine]), (earlier, writers.at[:, mine]))
        ones = kit.full(square, 1.0, bf16)
        through = kit.mm(wide, *((ones, states.at[pl.ds(i, CHUNK), mine]) for i in range(0, dim, CHUNK)))
        through = through * jnp.exp2(kit.mm(wide, (kit.full(square, 1.0, f16), g16.at[:, mine])))
        d_g = d_g + (through if keeps_g is None else through * keeps_g[tile_i])
        put(gs, real(_gate_backward(*gate_inputs(), d_g, how)))

        # A token's pair with itself has no decay in it.
        itself = along_rows(team.given(3), wide)
        rows_q, d_k = rows_q + keys() * itself, d_k + queries() * itself

        # Norms.
        if how.qk_l2norm:
            team.give(4, jnp.sum(real(get(qs)) * norm_q * rows_q, axis=1))
            team.give(5, jnp.sum(keys() * d_k, axis=1))
            sync()
            rows_q = (rows_q - real(get(qs)) * norm_q * along_rows(team.given(4), wide)) * norm_q
            d_k = (d_k - keys() * along_rows(team.given(5), wide)) * norm_k
        put(qs, real(rows_q * how.scale))
        put(ks, real(d_k))
        sync()

        @functools.partial(team.only, 0)
        def _():
            for source, target in ((qs, dq_g), (ks, dk_g), (gs, dg_g)):
                plgpu.copy_smem_to_gmem(source, target.at[tokens_i, h])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def wide_tile(dtype=bf16):
        return smem((CHUNK, dim), dtype, STRIP)

    scores = smem(square, bf16)
    kernel = kit.kernel(
        body,
        out_type=[*[jax.ShapeDtypeStruct((n, heads, dim), bf16)] * 4, jax.ShapeDtypeStruct((heads, n), f32)],
        grid=(n // CHUNK, heads),
        grid_names=("t", "h"),
        num_threads=groups,
        thread_name="wg",
        scratch_types=[
            {name: wide_tile() for name in ("q", "k", "g", "d_o", "v", "x", "dv")} | {"g16": wide_tile(f16)},
            smem((dim, dim), bf16, STRIP),
            kit.union(scores, scores),
            kit.union(smem((dim, dim), bf16, STRIP), [wide_tile(), scores]),
            [smem(square, bf16, share)] * 2,
            plgpu.SMEM((6, groups, CHUNK), f32),
            {
                "beta": plgpu.SMEM((CHUNK,), f32),
                "bias": plgpu.SMEM((dim,), f32),
                **({"marks": plgpu.SMEM((4, CHUNK), f32)} if marked else {}),
            },
            plgpu.Barrier(num_barriers=12 if marked else 11),
            plgpu.Barrier(num_arrivals=groups),
        ],
        compiler_params=COMPILER,
    )
    marks = (tokens.rows, tokens.keeps) if tokens is not None else ()
    scanned = (forward.corrected, backward.corrected, forward.states, backward.states)
    return Gradients(*kernel(q, k, g, beta, rate, bias, inverse, d_o, *scanned, *marks))
