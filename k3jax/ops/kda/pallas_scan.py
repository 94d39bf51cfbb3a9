"""Second KDA kernels: the recurrence over chunks, forward and in reverse.

One program works through one run of chunks of one head. The state is kept transposed, Sᵀ [V, K] in float32, as the
accumulators of one warpgroup for each 64 value channels: rows of Sᵀ never meet. One more warpgroup loads ahead.

    forward   V'ᵀ = Uᵀ − Sᵀ Wᵀ        Oᵀ = Sᵀ Qbᵀ + V'ᵀ Aᵀ        Sᵀ ← Sᵀ e^{G_C} + V'ᵀ Kt
    reverse   dV'ᵀ = dOᵀ A + dSᵀ Ktᵀ                              dSᵀ ← dSᵀ e^{G_C} + dOᵀ Qb − dV'ᵀ W
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from k3jax.ops.mosaic import COLUMN, LAYOUT, Kit, along_columns, smem

from .pallas_prep import CHUNK, COMPILER, Prepared

STAGES = 2
_bf16, _f32 = jnp.bfloat16, jnp.float32


class Scanned(NamedTuple):
    """What a scan returns; None for what was not asked for. R runs, H heads, N tokens."""

    final: jax.Array  # [R, H, V, K] float32
    o: jax.Array | None  # [N, H, V] bfloat16
    states: jax.Array | None  # [H, N / 64, V, K] bfloat16: the state that each chunk starts from
    corrected: jax.Array | None  # [H, N, V] bfloat16, V'
    borders: jax.Array | None  # [rows, borders of a row, H, V, K] float32: the states at borders inside rows


class Borders(NamedTuple):
    """Where a scan writes its states out, whatever runs the rows are cut in."""

    row: int  # chunks of a row
    interval: int  # chunks from one border to the next


class Reversed(NamedTuple):
    """What the reverse scan returns. R runs, H heads, N tokens."""

    initial: jax.Array  # [R, H, V, K] float32, cotangent of the state that each run starts from
    states: jax.Array | None  # [H, N / 64, V, K] bfloat16: cotangent of the state that each chunk ends with
    corrected: jax.Array | None  # [H, N, V] bfloat16, dV'


class _Pipe(NamedTuple):
    """Loads ahead of the computing warpgroups: slot i % STAGES holds chunk i."""

    full: Any
    free: Any
    copies: Callable[[Any, Any], list[tuple[Any, Any]]]  # (chunk, slot) → (source, target)

    def load(self, order: Callable[[Any], Any], count: Any) -> None:
        """Run the loading warpgroup over chunks order(0), order(1), …"""
        plgpu.set_max_registers(40, action="decrease")

        def issue(i, slot):
            for source, target in self.copies(order(i), slot):
                plgpu.copy_gmem_to_smem(source, target, self.full.at[slot])

        for i in range(STAGES):
            pl.when(i < count)(lambda i=i: issue(jnp.int32(i), jnp.int32(i)))

        @pl.loop(0, lax.max(count - STAGES, jnp.int32(0)))
        def _(i):
            slot = lax.rem(i, jnp.array(STAGES, i.dtype))
            plgpu.barrier_wait(self.free.at[slot])
            issue(i + STAGES, slot)

        for i in range(STAGES):  # no barrier may be left with a completion that nobody has seen
            pl.when(i < count)(lambda i=i: plgpu.barrier_wait(self.free.at[lax.rem(count - 1 - i, jnp.int32(STAGES))]))


def _chunk_tokens(chunk):
    return pl.ds(chunk * CHUNK, CHUNK)


def _over_runs(
    kit: Kit,
    body: Callable[..., None],
    grid: tuple[int, int],
    groups: int,
    loads: int,
    out_type: dict[str, Any],
    scratch: dict[str, Any],
) -> Callable[..., Any]:
    """The kernel of one program for each (head, run): `groups` warpgroups that compute, and one that loads."""
    return kit.kernel(
        body,
        out_type=[out_type],
        grid=grid,
        grid_names=("h", "r"),
        num_threads=groups + 1,
        thread_name="wg",
        scratch_types=[
            scratch,
            plgpu.Barrier(num_arrivals=loads, num_barriers=STAGES),
            plgpu.Barrier(num_arrivals=groups, num_barriers=STAGES),
        ],
        compiler_params=COMPILER,
    )


def _write_at_border(state: jax.Array, target: Any, chunk: Any, borders: Borders) -> None:
    """The state after `chunk`, straight from the accumulators, if its row has a border there."""
    row, interval = (jnp.int32(n) for n in borders)
    passed = lax.rem(chunk, row) + 1

    @pl.when(lax.rem(passed, interval) == 0)
    def _():
        target[lax.div(chunk, row), lax.div(passed, interval) - 1] = state


def scan(
    prepared: Prepared,
    initial: jax.Array,
    runs: jax.Array,
    *,
    outputs: bool = True,
    residuals: bool = False,
    values: bool = True,
    borders: Borders | None = None,
    interpret: bool = False,
) -> Scanned:
    """Forward over the chunks of each run.

    Args:
      initial: [R, H, V, K] float32.
      runs: [R, 2] int32, first chunk and number of chunks (0 allowed).
      outputs: compute o. residuals: keep what the backward pass needs.
      values: False leaves U out: with the identity as initial state the final one is the run's transition P,
        Sᵀ ← Sᵀ P + ….
      borders: also return the state after each `interval` chunks of a row.
    """
    heads, n, dim = prepared.w.shape
    count_runs, groups, kit = runs.shape[0], dim // 64, Kit(interpret)
    like = jax.ShapeDtypeStruct
    names = ["w", "k"] + ["u"] * values + ["q", "a"] * outputs
    loaded = {"w": prepared.w, "k": prepared.k, "u": prepared.u, "q": prepared.q, "a": prepared.a}
    tile = smem((STAGES, CHUNK, dim), _bf16)
    square = smem((STAGES, CHUNK, CHUNK), _bf16)
    half = smem((groups, CHUNK, 64), _bf16)
    out_type: dict[str, Any] = {"final": like((count_runs, heads, dim, dim), _f32)}
    scratch: dict[str, Any] = {name: square if name == "a" else tile for name in names}
    scratch |= {"decay": plgpu.SMEM((STAGES, dim), _f32)}
    if outputs:
        out_type["o"] = like((n, heads, dim), _bf16)
        scratch["o_out"] = half
    if residuals:
        out_type["states"] = like((heads, n // CHUNK, dim, dim), _bf16)
        out_type["corrected"] = like((heads, n, dim), _bf16)
        scratch["v_out"], scratch["s_out"] = half, smem((groups, 64, dim), _bf16)
    if borders:
        rows = n // CHUNK // borders.row
        out_type["borders"] = like((rows, borders.row // borders.interval, heads, dim, dim), _f32)

    def body(sources, decay_g, initial_g, runs_g, outs, s, full, free):
        h, run = lax.axis_index("h"), lax.axis_index("r")
        wg = lax.axis_index("wg")
        first, count = runs_g[run, 0], runs_g[run, 1]

        def copies(chunk, slot):
            pairs = [(sources[name].at[h, _chunk_tokens(chunk)], s[name].at[slot]) for name in names]
            return [*pairs, (decay_g.at[h, chunk], s["decay"].at[slot])]

        @pl.when(wg == groups)
        def _():
            _Pipe(full, free, copies).load(lambda i: first + i, count)

        @pl.when(wg < groups)
        def _():
            plgpu.set_max_registers(232, action="increase")
            mine = pl.ds(wg * 64, 64)

            def step(i, state):
                chunk = first + i
                slot = lax.rem(i, jnp.array(STAGES, i.dtype))
                plgpu.barrier_wait(full.at[slot])
                read = state.astype(_bf16)
                minus = (read, kit.t(s["w"].at[slot]))
                if values:
                    v = kit.mm_acc(kit.load(kit.t(s["u"].at[slot, :, mine])).astype(_f32), minus)
                else:
                    v = kit.mm((64, CHUNK), minus)
                v = v.astype(_bf16)
                o = None
                if outputs:
                    o = kit.mm((64, CHUNK), (read, kit.t(s["q"].at[slot])), (v, kit.t(s["a"].at[slot])))
                decay = kit.load(s["decay"].at[slot], COLUMN)
                new = kit.mm_acc(state * along_columns(decay, state.shape), (v, s["k"].at[slot]))
                kit.release(free.at[slot])
                if outputs or residuals:
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                if o is not None:
                    kit.store(kit.t(s["o_out"].at[wg]), o.astype(_bf16))
                if residuals:
                    kit.store(kit.t(s["v_out"].at[wg]), v)
                    kit.store(s["s_out"].at[wg], read)
                if outputs or residuals:
                    plgpu.commit_smem()
                tokens = _chunk_tokens(chunk)
                if outputs:
                    plgpu.copy_smem_to_gmem(s["o_out"].at[wg], outs["o"].at[tokens, h, mine])
                if residuals:
                    plgpu.copy_smem_to_gmem(s["v_out"].at[wg], outs["corrected"].at[h, tokens, mine])
                    plgpu.copy_smem_to_gmem(s["s_out"].at[wg], outs["states"].at[h, chunk, mine])
                if borders:
                    _write_at_border(new, outs["borders"].at[:, :, h, mine], chunk, borders)
                return new

            state = kit.load(initial_g.at[run, h, mine], LAYOUT, optimized=False)
            outs["final"][run, h, mine] = lax.fori_loop(jnp.int32(0), count, step, state)
            plgpu.wait_smem_to_gmem(0)

    kernel = _over_runs(kit, body, (heads, count_runs), groups, len(names) + 1, out_type, scratch)
    (out,) = kernel({name: loaded[name] for name in names}, prepared.decay, initial, runs)
    return Scanned(out["final"], out.get("o"), out.get("states"), out.get("corrected"), out.get("borders"))


def reverse_scan(
    prepared: Prepared,
    d_o: jax.Array,
    final: jax.Array,
    runs: jax.Array,
    *,
    residuals: bool = True,
    interpret: bool = False,
) -> Reversed:
    """Backward over the chunks of each run, from `final` [R, H, V, K] float32, the cotangent of its last state.

    d_o: [N, H, V] bfloat16. `residuals` False returns the cotangent of the initial states alone.
    """
    heads, n, dim = prepared.w.shape
    count_runs, groups, kit = runs.shape[0], dim // 64, Kit(interpret)
    like = jax.ShapeDtypeStruct
    tile = smem((STAGES, CHUNK, dim), _bf16)
    out_type: dict[str, Any] = {"initial": like((count_runs, heads, dim, dim), _f32)}
    scratch: dict[str, Any] = {"w": tile, "q": tile, "k": tile, "d_o": tile}
    scratch |= {"a": smem((STAGES, CHUNK, CHUNK), _bf16), "decay": plgpu.SMEM((STAGES, dim), _f32)}
    if residuals:
        out_type["states"] = like((heads, n // CHUNK, dim, dim), _bf16)
        out_type["corrected"] = like((heads, n, dim), _bf16)
        scratch["v_out"] = smem((groups, CHUNK, 64), _bf16)
        scratch["s_out"] = smem((groups, 64, dim), _bf16)

    def body(w_g, q_g, k_g, a_g, decay_g, d_o_g, final_g, runs_g, outs, s, full, free):
        h, run = lax.axis_index("h"), lax.axis_index("r")
        wg = lax.axis_index("wg")
        first, count = runs_g[run, 0], runs_g[run, 1]

        def copies(chunk, slot):
            tokens = _chunk_tokens(chunk)
            return [
                (k_g.at[h, tokens], s["k"].at[slot]),
                (d_o_g.at[tokens, h], s["d_o"].at[slot]),
                (a_g.at[h, tokens], s["a"].at[slot]),
                (q_g.at[h, tokens], s["q"].at[slot]),
                (w_g.at[h, tokens], s["w"].at[slot]),
                (decay_g.at[h, chunk], s["decay"].at[slot]),
            ]

        @pl.when(wg == groups)
        def _():
            _Pipe(full, free, copies).load(lambda i: first + count - 1 - i, count)

        @pl.when(wg < groups)
        def _():
            plgpu.set_max_registers(232, action="increase")
            mine = pl.ds(wg * 64, 64)

            def step(i, state):
                chunk = first + count - 1 - i
                slot = lax.rem(i, jnp.array(STAGES, i.dtype))
                plgpu.barrier_wait(full.at[slot])
                passed = state.astype(_bf16)
                d_o = kit.load(kit.t(s["d_o"].at[slot, :, mine]))
                d_v = kit.mm((64, CHUNK), (d_o, s["a"].at[slot]), (passed, kit.t(s["k"].at[slot]))).astype(_bf16)
                decay = kit.load(s["decay"].at[slot], COLUMN)
                new = kit.mm_acc(
                    state * along_columns(decay, state.shape), (d_o, s["q"].at[slot]), (d_v, s["w"].at[slot])
                )
                kit.release(free.at[slot])
                if residuals:
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    kit.store(kit.t(s["v_out"].at[wg]), d_v)
                    kit.store(s["s_out"].at[wg], passed)
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(s["v_out"].at[wg], outs["corrected"].at[h, _chunk_tokens(chunk), mine])
                    plgpu.copy_smem_to_gmem(s["s_out"].at[wg], outs["states"].at[h, chunk, mine])
                return new

            state = kit.load(final_g.at[run, h, mine], LAYOUT, optimized=False)
            outs["initial"][run, h, mine] = lax.fori_loop(jnp.int32(0), count, step, state)
            plgpu.wait_smem_to_gmem(0)

    kernel = _over_runs(kit, body, (heads, count_runs), groups, 6, out_type, scratch)
    args = (prepared.w, prepared.q, prepared.k, prepared.a, prepared.decay, d_o, final, runs)
    (out,) = kernel(*args)
    return Reversed(out["initial"], out.get("states"), out.get("corrected"))
