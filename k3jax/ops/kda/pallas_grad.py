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
blocks of 16 under the bounded gate. The gradient of a token's gate sums the pairs that straddle it: any other pair of
the chunk enters twice, at its row and its column, and cancels (see `gather`). Sums stop at the ends of documents.

Then the backward of the gate, of the L2 norms and of the sigmoid, while the tile is still on chip.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from k3jax.ops.mosaic import COLUMN, Kit, along_columns, smem

from .gates import L2_EPS, Activation
from .pallas_prep import (
    ANCHOR,
    CHUNK,
    COMPILER,
    LEVELS,
    LOG2_E,
    MARKS,
    STRIP,
    Loads,
    Tile,
    Tokens,
    block_of,
    first_level,
    is_odd,
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
    decay: jax.Array,
    inverse: jax.Array,
    d_o: jax.Array,
    forward: Scanned,
    backward: Reversed,
    tokens: Tokens | None,
    how: Activation,
    *,
    interpret: bool = False,
) -> Gradients:
    """Run the kernel; arguments as in `prepare` and `reverse_scan`, `decay` and `inverse` from `Prepared`."""
    n, heads, dim = q.shape
    groups = dim // STRIP
    kit = Kit(interpret)
    square, wide = (CHUNK, CHUNK), (CHUNK, STRIP)
    share = CHUNK // groups  # columns of the score matrices that a warpgroup computes
    bf16, f16, f32 = jnp.bfloat16, jnp.float16, jnp.float32
    marked = tokens is not None

    def body(q_g, k_g, g_g, b_g, rate_g, bias_g, t_g, do_g, vc_g, dvc_g, st_g, ds_g, decay_g, *refs):
        rows_g: Any = None
        if marked:
            rows_g, *refs = refs
        dq_g, dk_g, dv_g, dg_g, db_g, tiles, inverses, ends, small, exchange, full, meet = refs
        named = {**tiles, **small, "t": inverses[0], "ones": inverses[1], "d_states": ends[0]}
        named |= dict(zip(("writers", "da_l", "dn_l"), ends[1]))
        tile_i, h, wg = lax.axis_index("t"), lax.axis_index("h"), lax.axis_index("wg")
        s = SimpleNamespace(**named)
        team = Team(kit, small.get("marks"), wg, groups, meet, exchange)
        real, flagged, sync = team.real, team.flagged, team.sync
        mine, part = pl.ds(wg * STRIP, STRIP), pl.ds(wg * share, share)
        tokens_i = pl.ds(tile_i * CHUNK, CHUNK)
        rate_h = None if how.gate == "none" else rate_g[h]  # before the copies: behind them it would wait for all

        copies = {
            "g": (g_g.at[tokens_i, h], s.g),
            "beta": (b_g.at[h, tokens_i], s.beta),
            "bias": (bias_g.at[h], s.bias),
            "q": (q_g.at[tokens_i, h], s.q),
            "k": (k_g.at[tokens_i, h], s.k),
            "t": (t_g.at[h, tokens_i], s.t),
            "x": (dvc_g.at[h, tokens_i], s.x),
            "v": (vc_g.at[h, tokens_i], s.v),
            "d_o": (do_g.at[tokens_i, h], s.d_o),
            "states": (st_g.at[h, tile_i], s.states),
            "d_states": (ds_g.at[h, tile_i], s.d_states),
            "decay": (decay_g.at[h, tile_i], s.decay),
        }
        if marked:
            copies["marks"] = rows_g.at[:, tokens_i], s.marks

        loads = Loads(copies, full)
        team.only(0, loads.start)

        def get(ref):
            return kit.load(ref.at[:, mine]).astype(f32)

        def put(ref, value):
            kit.store(ref.at[:, mine], value.astype(ref.dtype))

        def sums(mask):
            return kit.mm(wide, (team.ones_where(mask), s.g16.at[:, mine]))

        def gate_inputs():
            if how.gate == "none":
                return real(get(s.g)), None, None
            return real(get(s.g)), rate_h, kit.load(s.bias.at[mine], COLUMN, optimized=False)

        # Gates and norms, as in `prepare`.
        loads.wait("g", "beta", "bias", *["marks"] * marked)
        put(s.g16, real(log2_gate(*gate_inputs(), how)))
        loads.wait("q", "k")
        if how.qk_l2norm:
            for i, ref in enumerate((s.q, s.k)):
                x = real(get(ref))
                team.give(i, jnp.sum(x * x, axis=1))

        # X, and what each token's own V' says about its β.
        beta = team.row_vector(s.beta)
        loads.wait("t", "x", "v")
        x = kit.mm(wide, (kit.t(s.t), s.x.at[:, mine]))
        kit.all_warps()
        put(s.x, x)
        put(s.dv, x * kit.along_rows(beta, wide))
        team.give(2, jnp.sum(x * get(s.v), axis=1))
        sync()
        norm_q: Any = kit.along_rows(lax.rsqrt(team.given(0) + L2_EPS), wide) if how.qk_l2norm else 1.0
        norm_k: Any = kit.along_rows(lax.rsqrt(team.given(1) + L2_EPS), wide) if how.qk_l2norm else 1.0

        @functools.partial(team.only, 0)
        def _():
            db_g[h, tokens_i] = team.given(2) * (1.0 - beta)
            plgpu.copy_smem_to_gmem(s.dv, dv_g.at[tokens_i, h])

        def queries():
            return real(get(s.q)) * (norm_q * how.scale)

        def keys():
            return real(get(s.k)) * norm_k

        # Scores.
        loads.wait("d_o", "states", "d_states", "decay")
        r, c = team.indices(share, wg * share)
        before = team.allowed(r > c, wg * share)
        d_a = kit.mm((CHUNK, share), (s.d_o, kit.t(s.v.at[part])))
        zero = beta * 0.0  # unknown to the compiler, as in `prepare`
        team.give(3, jnp.sum(jnp.where(r == c, d_a, 0.0), axis=1))
        kit.store(s.da.at[:, part], jnp.where(before, d_a, kit.along_rows(zero, r.shape)).astype(bf16))
        d_n = kit.mm((CHUNK, share), (s.x, kit.t(s.v.at[part]))) * kit.along_rows(beta * -1.0, r.shape)
        kit.store(s.dn.at[:, part], jnp.where(before, d_n, kit.along_rows(zero, r.shape)).astype(bf16))

        # Through the states.
        up = jnp.exp2(sums(since_block(LEVELS)))
        rows_q = flagged(kit.mm(wide, (s.d_o, s.states.at[:, mine])), 2) * up
        rows_k = flagged(kit.mm(wide, (s.x, s.states.at[:, mine])) * kit.along_rows(beta * -1.0, wide), 2) * up
        # What each token adds to the gates up to its own, and takes away again where it acts as a column.
        value = queries() * rows_q + keys() * rows_k
        writer = flagged(kit.mm(wide, (s.v, s.d_states.at[:, mine])), 3) * jnp.exp2(sums(to_block_end(LEVELS)))
        d_k = rows_k + writer
        writer = (keys() * writer).astype(bf16)
        kit.all_warps()
        for i in range(0, dim, CHUNK):
            some = pl.ds(i, CHUNK)
            kit.store(s.states.at[some, mine], kit.load(s.states.at[some, mine]) * kit.load(s.d_states.at[some, mine]))
        team.only(1, lambda: kit.store(s.ones, kit.full(square, 1.0, bf16)))
        sync()  # all have read the operands
        put(s.writers, writer)

        # Σ_v of S dS, with channels as rows: one value a row.
        ones = kit.t(s.ones.at[pl.ds(0, 8)])
        total = kit.mm((64, 8), *((kit.t(s.states.at[pl.ds(i, CHUNK), mine]), ones) for i in range(0, dim, CHUNK)))
        s.through[mine] = jnp.max(total, axis=1) * team.row_vector(s.decay.at[mine])

        def pairs(mask):
            """The scores of these pairs alone, for all."""
            for i, (source, target) in enumerate(((s.da, s.da_l), (s.dn, s.dn_l))):

                def pick(source=source, target=target):
                    score = kit.load(source).astype(f32)
                    kit.store(
                        target, jnp.where(mask(*team.indices()), score, kit.along_rows(zero, square)).astype(bf16)
                    )

                team.only(i, pick)

        def gather(so_far, up, down):
            """Sums over `pairs`, anchored by `up` as rows and by `down` as columns.

            What a pair adds to the gates' sums it takes away at its column: made of the same rounded factors, the two
            cancel, and no error is left on the gates before it.
            """
            rows_q, d_k, value = so_far
            put(s.d_o, keys() * down)
            put(s.v, queries() * up)
            put(s.x, keys() * up)
            sync()
            gathered = kit.mm(wide, (s.da_l, s.d_o.at[:, mine]))
            rows_q, value = rows_q + gathered * up, value + get(s.v) * gathered
            gathered = kit.mm(wide, (s.dn_l, s.d_o.at[:, mine]))
            d_k, value = d_k + gathered * up, value + get(s.x) * gathered
            gathered = kit.mm(wide, (kit.t(s.da_l), s.v.at[:, mine]), (kit.t(s.dn_l), s.x.at[:, mine]))
            d_k, value = d_k + gathered * down, value - get(s.d_o) * gathered
            sync()
            return rows_q, d_k, value

        first = first_level(how)
        blocks = 1 if first else 0  # the pairs within blocks of 16 come last

        def level(i, so_far):
            within = blocks * (i == LEVELS - first).astype(jnp.int32)
            shift, flag = lax.max(LEVELS - 1 - i, jnp.int32(first)), within.astype(f32)
            anchor = flag * ANCHOR

            def picked(r, c):
                row, column = block_of(r, shift), block_of(c, shift)
                return is_odd(row | within) & (column + (1 - within) == row)

            pairs(picked)
            since = sums(since_block(shift))
            until = sums(to_block_end(shift)) * (1.0 - flag) + (anchor - since * flag)
            return gather(so_far, jnp.exp2(since - anchor), jnp.exp2(until))

        # A loop, not only for size: the compiler keeps no address of one level in a register for the next.
        rows_q, d_k, value = lax.fori_loop(0, LEVELS - first + blocks, level, (rows_q, d_k, value))

        # The gates' sums: of float32 values as a high and a low half, for they cancel.
        high = value.astype(bf16)
        kit.store(s.d_o.at[:, mine], high)
        put(s.v, value - high.astype(f32))
        plgpu.commit_smem()
        later, earlier = (team.ones_where(mask, bf16, True) for mask in (lambda r, c: c >= r, lambda r, c: c < r))
        d_g = kit.mm(wide, (later, s.d_o.at[:, mine]), (later, s.v.at[:, mine]), (earlier, s.writers.at[:, mine]))
        d_g = d_g + kit.along_columns(kit.load(s.through.at[mine], COLUMN, optimized=False), wide)
        put(s.g, real(_gate_backward(*gate_inputs(), d_g, how)))

        # A token's pair with itself has no decay in it.
        itself = kit.along_rows(team.given(3), wide)
        rows_q, d_k = rows_q + keys() * itself, d_k + queries() * itself

        # Norms.
        if how.qk_l2norm:
            team.give(0, jnp.sum(real(get(s.q)) * norm_q * rows_q, axis=1))
            team.give(1, jnp.sum(keys() * d_k, axis=1))
            sync()
            rows_q = (rows_q - real(get(s.q)) * norm_q * kit.along_rows(team.given(0), wide)) * norm_q
            d_k = (d_k - keys() * kit.along_rows(team.given(1), wide)) * norm_k
        put(s.q, real(rows_q * how.scale))
        put(s.k, real(d_k))
        sync()

        @functools.partial(team.only, 0)
        def _():
            for source, target in ((s.q, dq_g), (s.k, dk_g), (s.g, dg_g)):
                plgpu.copy_smem_to_gmem(source, target.at[tokens_i, h])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def tile(*shape, dtype=bf16, swizzle_columns=STRIP):
        return smem(shape, dtype, swizzle_columns)

    def vector(*shape):
        return plgpu.SMEM(shape, f32)

    wide_tile, states, scores = tile(CHUNK, dim), tile(dim, dim), tile(CHUNK, CHUNK)
    kernel = kit.kernel(
        body,
        out_type=[*[jax.ShapeDtypeStruct((n, heads, dim), bf16)] * 4, jax.ShapeDtypeStruct((heads, n), f32)],
        grid=(n // CHUNK, heads),
        grid_names=("t", "h"),
        num_threads=groups,
        thread_name="wg",
        scratch_types=[
            {
                **dict.fromkeys(("q", "k", "g", "d_o", "v", "x", "dv"), wide_tile),
                "g16": tile(CHUNK, dim, dtype=f16),
                "states": states,
                **dict.fromkeys(("da", "dn"), tile(CHUNK, CHUNK, swizzle_columns=share)),
            },
            kit.union(scores, scores),
            kit.union(states, [wide_tile, scores, scores]),
            {
                "beta": vector(CHUNK),
                **dict.fromkeys(("bias", "decay", "through"), vector(dim)),
                **({"marks": vector(MARKS, CHUNK)} if marked else {}),
            },
            plgpu.SMEM((4, groups, CHUNK), f32),
            plgpu.Barrier(num_barriers=13 if marked else 12),
            plgpu.Barrier(num_arrivals=groups),
        ],
        compiler_params=COMPILER,
    )
    marks = (tokens.rows,) if tokens is not None else ()
    scanned = (forward.corrected, backward.corrected, forward.states, backward.states, decay)
    return Gradients(
        *kernel(
            q,
            k,
            g,
            beta,
            rate,
            bias,
            inverse,
            d_o,
            *scanned,
            *marks,
        )
    )
