"""The short convolution as two Mosaic GPU kernels: each array crosses memory once, forward and backward.

A warpgroup takes `ROWS` tokens of one head of 128 channels with the neighbours that the taps reach; what lies outside
the sequence arrives as zeros, and what would be written there is dropped. In registers each warp holds every fourth
token and each lane four channels.

Legend: B batch, T time, H heads, W taps, N tiles of time; "lag" is how many tokens back a tap reaches.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from k3jax.ops.mosaic import Kit, along_columns, along_rows, why_not_here

DIM = 128
ROWS = 64
HALO = 8  # tokens before and after a tile; more than any tap reaches
STEP = 16  # tokens in registers at a time
TILE = plgpu.Layout.TILED(plgpu.Tiling(((4, DIM), (4,))), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)
ROW, COLUMN = TILE.reduce(1), TILE.reduce(0)


def why_not(u: Array, weight: Array, segment_ids: Array | None) -> str | None:
    """Why the kernels cannot run on these arrays here; None if they can."""
    if u.ndim != 4 or u.shape[-1] != DIM:
        return f"u must be [B, T, H, {DIM}], not {u.shape}"
    if u.dtype not in (jnp.float32, jnp.bfloat16):
        return f"u must be float32 or bfloat16, not {u.dtype}"
    if not 2 <= weight.shape[-1] <= HALO:
        return f"from 2 to {HALO} taps, not {weight.shape[-1]}"
    if u.shape[1] < ROWS + 3 * HALO or u.shape[1] % 8:
        return f"at least {ROWS + 3 * HALO} tokens and a multiple of 8, not {u.shape[1]}"
    if segment_ids is not None and segment_ids.dtype != jnp.int32:
        return f"segment_ids must be int32, not {segment_ids.dtype}"
    return why_not_here()


def _rows(kit: Kit, ref: Any, start: Any) -> Array:
    return kit.load(ref.at[pl.ds(start, STEP)], TILE, optimized=False).astype(jnp.float32)


def _tap(kit: Kit, u_s: Any, ids_s: Any, row: Any, lag: int) -> Array:
    """[STEP, 128] float32: what the tap sees from tokens `row`... of the shared tile."""
    past = _rows(kit, u_s, row - lag)
    return past if ids_s is None or lag == 0 else jnp.where(_same(kit, ids_s, row, lag), past, 0.0)


def _same(kit: Kit, ids_s: Any, row: Any, lag: int) -> Array:
    """Whether tokens `row`... and those `lag` before them are of one document, [STEP, 128]."""
    now, then = (kit.load(ids_s.at[pl.ds(r, STEP)], ROW, optimized=False) for r in (row, row - lag))
    key = along_rows(jnp.where(now == 0, -1, now), (STEP, DIM))  # padding reaches nothing
    return key == along_rows(then, (STEP, DIM))


def _taps(kit: Kit, weight_g: Any, h: Any) -> list[Array]:
    """By lag: [128] float32."""
    width = weight_g.shape[0]
    load = functools.partial(kit.load, layout=COLUMN, optimized=False)
    return [load(weight_g.at[width - 1 - lag, h]).astype(jnp.float32) for lag in range(width)]


def _pre_activation(kit: Kit, u_s: Any, ids_s: Any, taps: list[Array], row: Any) -> Array:
    shape = (STEP, DIM)
    parts = (_tap(kit, u_s, ids_s, row, lag) * along_columns(w, shape) for lag, w in enumerate(taps))
    return functools.reduce(jnp.add, parts)


def _without_ids(refs: tuple[Any, ...], inputs: int) -> tuple[Any, ...]:
    """None where a kernel without documents has no ids: after its inputs, and before the barrier."""
    return (*refs[:inputs], None, *refs[inputs:-1], None, refs[-1])


def _sigmoid(x: Array) -> Array:
    return 1.0 / (1.0 + jnp.exp(-x))


def _forward_body(kit: Kit, origin: int, documents: bool, *refs: Any) -> None:
    refs = refs if documents else _without_ids(refs, 2)
    u_g, weight_g, ids_g, y_g, u_s, y_s, ids_s, arrived = refs
    b, n, h = (lax.axis_index(a) for a in ("row", "tile", "head"))
    here = pl.ds(n * ROWS - HALO + origin, ROWS + HALO)
    plgpu.copy_gmem_to_smem(u_g.at[b, here, h], u_s, arrived)
    if documents:
        plgpu.copy_gmem_to_smem(ids_g.at[b, here], ids_s, arrived)
    taps = _taps(kit, weight_g, h)
    plgpu.barrier_wait(arrived)
    for row in range(0, ROWS, STEP):
        z = _pre_activation(kit, u_s, ids_s, taps, row + HALO)
        y_s[pl.ds(row, STEP), :] = (z * _sigmoid(z)).astype(y_s.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(y_s, y_g.at[b, pl.ds(n * ROWS, ROWS), h])
    plgpu.wait_smem_to_gmem(0)


def _backward_body(kit: Kit, origin: int, documents: bool, *refs: Any) -> None:
    refs = refs if documents else _without_ids(refs, 3)
    d_y_g, u_g, weight_g, ids_g, d_u_g, d_w_g, u_s, d_z_s, d_u_s, ids_s, arrived = refs
    b, n, h = (lax.axis_index(a) for a in ("row", "tile", "head"))
    here = pl.ds(n * ROWS - HALO + origin, ROWS + 3 * HALO)
    plgpu.copy_gmem_to_smem(u_g.at[b, here, h], u_s, arrived)
    plgpu.copy_gmem_to_smem(d_y_g.at[b, pl.ds(n * ROWS + origin, ROWS + 2 * HALO), h], d_z_s, arrived)
    if documents:
        plgpu.copy_gmem_to_smem(ids_g.at[b, here], ids_s, arrived)
    taps, shape = _taps(kit, weight_g, h), (STEP, DIM)
    plgpu.barrier_wait(arrived)
    for row in range(0, ROWS + 2 * HALO, STEP):  # d_y becomes d_z, rounded like it, also after the tile
        z = _pre_activation(kit, u_s, ids_s, taps, row + HALO)
        gate = _sigmoid(z)
        d_z = _rows(kit, d_z_s, row) * gate * (1.0 + z * (1.0 - gate))
        d_z_s[pl.ds(row, STEP), :] = d_z.astype(d_z_s.dtype)
    d_w = [jnp.zeros(shape, jnp.float32) for _ in taps]
    for row in range(0, ROWS, STEP):
        d_z, d_u = _rows(kit, d_z_s, row), jnp.zeros(shape, jnp.float32)
        for lag, w in enumerate(taps):
            d_w[lag] = d_w[lag] + d_z * _tap(kit, u_s, ids_s, row + HALO, lag)
            later = d_z if lag == 0 else _rows(kit, d_z_s, row + lag)
            if documents and lag:
                later = jnp.where(_same(kit, ids_s, row + HALO + lag, lag), later, 0.0)
            d_u = d_u + later * along_columns(w, shape)
        d_u_s[pl.ds(row, STEP), :] = d_u.astype(d_u_s.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(d_u_s, d_u_g.at[b, pl.ds(n * ROWS, ROWS), h])
    for lag, part in enumerate(d_w):
        d_w_g[b, n, h, lag] = jnp.sum(part, axis=0)
    plgpu.wait_smem_to_gmem(0)


def _row_major(rows: int, dtype: Any) -> Any:
    """A shared tile that can be read from any row on.

    Said, because jax 0.11 infers tiles of one row with a swizzle for such reads: the copy swizzles by address and the
    reads by row of the tile, so that they see other channels.
    """
    return plgpu.SMEM((rows, DIM), dtype, transforms=(plgpu.TilingTransform((1, DIM)),))


def _run(body: Any, out_type: Any, tiles: Any, args: tuple, segment_ids: Array | None, interpret: bool) -> Any:
    """`args` start with arrays [B, T, H, 128] and end with the weight [W, H, 128]; `tiles` are shared-memory types."""
    (B, T, H, _), documents = args[0].shape, segment_ids is not None
    steps, kit = -(-T // ROWS), Kit(interpret)
    origin = 0
    if interpret:  # the interpreter does not fill what lies outside an array
        origin, end = HALO, steps * ROWS - T + 3 * HALO
        pad = functools.partial(jnp.pad, mode="constant")
        args = (*(pad(x, ((0, 0), (HALO, end), (0, 0), (0, 0))) for x in args[:-1]), args[-1])
        segment_ids = None if segment_ids is None else pad(segment_ids, ((0, 0), (HALO, end)))
    ids = () if segment_ids is None else (segment_ids,)
    ids_tile = [plgpu.SMEM(tiles[0].shape[:1], jnp.int32)] if documents else []
    params = {} if interpret else {"compiler_params": plgpu.CompilerParams(approx_math=True)}
    return kit.kernel(
        functools.partial(body, kit, origin, documents),
        out_type=out_type,
        grid=(B, steps, H),
        grid_names=("row", "tile", "head"),
        num_threads=1,
        thread_name="wg",
        scratch_types=[*tiles, *ids_tile, plgpu.Barrier(num_arrivals=len(args) - 1 + documents)],
        kernel_name=body.__name__.strip("_") + "_short_conv",
        **params,
    )(*args, *ids)


@functools.partial(jax.jit, static_argnames="interpret")  # lowered once for all layers
def forward(u: Array, weight: Array, segment_ids: Array | None, interpret: bool = False) -> Array:
    """SiLU of the convolution, in the dtype of `u`."""
    tiles = [_row_major(ROWS + HALO, u.dtype), plgpu.SMEM((ROWS, DIM), u.dtype)]
    T = u.shape[1] if not interpret else -(-u.shape[1] // ROWS) * ROWS
    out = jax.ShapeDtypeStruct((u.shape[0], T, *u.shape[2:]), u.dtype)
    return _run(_forward_body, out, tiles, (u, jnp.moveaxis(weight, -1, 0)), segment_ids, interpret)[:, : u.shape[1]]


@functools.partial(jax.jit, static_argnames="interpret")
def backward(
    u: Array, weight: Array, segment_ids: Array | None, d_y: Array, interpret: bool = False
) -> tuple[Array, Array]:
    """Gradients of `u`, in its dtype, and of `weight`."""
    (B, T, H, _), steps = u.shape, -(-u.shape[1] // ROWS)
    tiles = [_row_major(ROWS + 3 * HALO, u.dtype), _row_major(ROWS + 2 * HALO, u.dtype)]
    tiles.append(plgpu.SMEM((ROWS, DIM), u.dtype))
    out = [
        jax.ShapeDtypeStruct((B, steps * ROWS if interpret else T, H, DIM), u.dtype),
        jax.ShapeDtypeStruct((B, steps, H, weight.shape[-1], DIM), jnp.float32),
    ]
    args = (d_y.astype(u.dtype), u, jnp.moveaxis(weight, -1, 0))
    d_u, d_w = _run(_backward_body, out, tiles, args, segment_ids, interpret)
    d_w = jnp.sum(d_w, axis=(0, 1))[:, ::-1]  # by lag → by tap
    return d_u[:, :T], jnp.moveaxis(d_w, 1, 2).astype(weight.dtype)
