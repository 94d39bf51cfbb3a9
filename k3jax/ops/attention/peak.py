"""Mosaic GPU kernel for the largest logit of each query: products and a running maximum, no logits in memory.

A program holds TILE queries of one head and walks over the tiles of keys that any of them sees, from the first token of
the earliest document in it to its own. Two warpgroups compute, 64 queries each; one loads ahead.

Legend: B rows, T time, H heads, K key width, n tiles of a row.
"""

from __future__ import annotations

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from k3jax.ops.mosaic import ROW, Kit, along_rows, smem, why_not_here

TILE = 128
_STAGES = 2
_GROUPS = 2


def refusal(dtype, key_width: int) -> str | None:
    """Why the kernel cannot run here; None if it can."""
    if jnp.dtype(dtype) != jnp.bfloat16:
        return f"q and k must be bfloat16, they are {jnp.dtype(dtype).name}"
    if key_width % 64 or key_width > 256:
        return f"the width of q and k must be a multiple of 64 up to 256, it is {key_width}"
    return why_not_here()


def first_visible(ids_BT: jax.Array) -> jax.Array:
    """First key that each query sees [B, T] int32, T for padding; documents must be runs."""
    T = ids_BT.shape[1]
    before = jnp.pad(ids_BT[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    start = lax.cummax(jnp.where(ids_BT != before, jnp.arange(T, dtype=jnp.int32), 0), axis=1)
    return jnp.where(ids_BT == 0, T, start)


def largest_logit(
    q_BTHK: jax.Array, k_BTHK: jax.Array, ids_BT: jax.Array | None, scale: float, interpret: bool = False
) -> jax.Array:
    """Largest scaled logit of the visible pairs [B, H] float32, −inf without any; no gradient. `scale` > 0."""
    B, T, H, K = q_BTHK.shape
    n = -(-T // TILE)
    fill = ((0, 0), (0, n * TILE - T))
    q, k = (jnp.pad(lax.stop_gradient(x), (*fill, (0, 0), (0, 0))) for x in (q_BTHK, k_BTHK))
    first = jnp.zeros((B, T), jnp.int32) if ids_BT is None else first_visible(ids_BT)
    first = jnp.pad(first, fill, constant_values=n * TILE)  # no query of the filling sees a key
    lowest = jnp.min(first.reshape(B, n, TILE), axis=-1) // TILE
    lowest = jnp.minimum(lowest, jnp.arange(n, dtype=jnp.int32))
    return jnp.max(_rows(q, k, first, lowest, Kit(interpret)), axis=-1) * scale


def _rows(q, k, first, lowest, kit: Kit) -> jax.Array:
    """Largest product of each query [B, H, n · TILE]."""
    B, T, H, K = q.shape
    shape = (TILE // _GROUPS, TILE)

    def body(q_g, k_g, first_g, lowest_g, out_g, q_s, k_s, q_full, full, free):
        i, h, b, wg = (lax.axis_index(name) for name in ("t", "h", "b", "wg"))
        low = lowest_g[b, i]
        count = i + 1 - low

        def slot_of(j):
            return lax.rem(j, jnp.array(_STAGES, j.dtype))

        @pl.when(wg == _GROUPS)
        def _():
            plgpu.set_max_registers(40, action="decrease")
            plgpu.copy_gmem_to_smem(q_g.at[b, pl.ds(i * TILE, TILE), h], q_s, q_full)

            def issue(j, slot):
                source = k_g.at[b, pl.ds((low + j) * TILE, TILE), h]
                plgpu.copy_gmem_to_smem(source, k_s.at[slot], full.at[slot])

            for j in range(_STAGES):
                pl.when(j < count)(lambda j=j: issue(jnp.int32(j), jnp.int32(j)))

            @pl.loop(0, lax.max(count - _STAGES, jnp.int32(0)))
            def _(j):
                plgpu.barrier_wait(free.at[slot_of(j)])
                issue(j + _STAGES, slot_of(j))

            for j in range(_STAGES):  # no barrier may be left with a completion that nobody has seen
                pl.when(j < count)(lambda j=j: plgpu.barrier_wait(free.at[slot_of(count - 1 - j)]))

        @pl.when(wg < _GROUPS)
        def _():
            plgpu.set_max_registers(232, action="increase")
            mine = pl.ds(wg * shape[0], shape[0])
            here = pl.ds(i * TILE + wg * shape[0], shape[0])
            starts = along_rows(kit.load(first_g.at[b, here], ROW, optimized=False), shape)
            queries = kit.iota(shape, 0) + (i * TILE + wg * shape[0])
            plgpu.barrier_wait(q_full)

            def step(j, largest):
                slot = slot_of(j)
                plgpu.barrier_wait(full.at[slot])
                logits = kit.mm(shape, (q_s.at[mine], kit.t(k_s.at[slot])))
                kit.release(free.at[slot])
                keys = kit.iota(shape, 1) + (low + j) * TILE
                seen = jnp.logical_and(keys >= starts, keys <= queries)
                return jnp.maximum(largest, jnp.where(seen, logits, -jnp.inf))

            nothing = jnp.where(queries < 0, 0.0, -jnp.inf)  # −inf in the layout of the products
            out_g[b, h, here] = jnp.max(lax.fori_loop(0, count, step, nothing), axis=1)

    barrier = plgpu.Barrier
    return kit.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((B, H, T), jnp.float32),
        grid=(T // TILE, H, B),
        grid_names=("t", "h", "b"),
        num_threads=_GROUPS + 1,
        thread_name="wg",
        scratch_types=[
            smem((TILE, K), jnp.bfloat16),
            smem((_STAGES, TILE, K), jnp.bfloat16),
            barrier(),
            barrier(num_barriers=_STAGES),
            barrier(num_arrivals=_GROUPS, num_barriers=_STAGES),
        ],
    )(q, k, first, lowest)
