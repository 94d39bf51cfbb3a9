"""The gated RMS norm as two Mosaic GPU kernels: each array crosses memory once, forward and backward.

A warpgroup takes `ROWS` rows of 128 values; each warp holds every fourth row and each lane four values of it. Rows
beyond the last arrive as zeros and are not written.

Legend: N rows (all leading axes), D = 128.
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
STEP = 16  # rows in registers at a time
TILE = plgpu.Layout.TILED(plgpu.Tiling(((4, DIM), (4,))), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)
COLUMN = TILE.reduce(0)


def why_not(x: Array, gate: Array) -> str | None:
    """Why the kernels cannot run on these arrays here; None if they can."""
    if x.shape[-1] != DIM or x.size < ROWS * DIM or x.size % (8 * DIM):
        return f"x must be [..., {DIM}] of at least {ROWS} rows and a multiple of 8, not {x.shape}"
    if x.dtype not in (jnp.float32, jnp.bfloat16) or gate.dtype not in (jnp.float32, jnp.bfloat16):
        return f"x and gate must be float32 or bfloat16, not {x.dtype} and {gate.dtype}"
    return why_not_here()


def _parts(kit: Kit, ref: Any, row: int) -> Array:
    return kit.load(ref.at[pl.ds(row, STEP)], TILE, optimized=False).astype(jnp.float32)


def _scale(x: Array, eps: float) -> Array:
    return along_rows(lax.rsqrt(jnp.sum(x * x, axis=1) * (1 / DIM) + eps), (STEP, DIM))


def _sigmoid(x: Array) -> Array:
    return 1.0 / (1.0 + jnp.exp(-x))


def _forward_body(kit: Kit, eps: float, x_g, gate_g, weight_g, y_g, x_s, gate_s, y_s, arrived) -> None:
    rows = pl.ds(lax.axis_index("tile") * ROWS, ROWS)
    plgpu.copy_gmem_to_smem(x_g.at[rows], x_s, arrived)
    plgpu.copy_gmem_to_smem(gate_g.at[rows], gate_s, arrived)
    weight = along_columns(kit.load(weight_g, COLUMN, optimized=False).astype(jnp.float32), (STEP, DIM))
    plgpu.barrier_wait(arrived)
    for row in range(0, ROWS, STEP):
        x = _parts(kit, x_s, row)
        y = x * _scale(x, eps) * weight * _sigmoid(_parts(kit, gate_s, row))
        y_s[pl.ds(row, STEP), :] = y.astype(y_s.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(y_s, y_g.at[rows])
    plgpu.wait_smem_to_gmem(0)


def _backward_body(
    kit: Kit, eps: float, d_y_g, x_g, gate_g, weight_g, d_x_g, d_gate_g, d_w_g, d_y_s, x_s, gate_s, arrived
) -> None:
    n = lax.axis_index("tile")
    rows = pl.ds(n * ROWS, ROWS)
    for source, target in ((d_y_g, d_y_s), (x_g, x_s), (gate_g, gate_s)):
        plgpu.copy_gmem_to_smem(source.at[rows], target, arrived)
    weight = along_columns(kit.load(weight_g, COLUMN, optimized=False).astype(jnp.float32), (STEP, DIM))
    plgpu.barrier_wait(arrived)
    d_w = jnp.zeros((STEP, DIM), jnp.float32)
    for row in range(0, ROWS, STEP):
        x, d_y, opened = _parts(kit, x_s, row), _parts(kit, d_y_s, row), _sigmoid(_parts(kit, gate_s, row))
        scale = _scale(x, eps)
        normed, d_scaled = x * scale, d_y * opened
        d_w = d_w + d_scaled * normed
        d_normed = d_scaled * weight
        mean = along_rows(jnp.sum(d_normed * normed, axis=1) * (1 / DIM), (STEP, DIM))
        here = (pl.ds(row, STEP), slice(None))
        x_s[here] = (scale * (d_normed - normed * mean)).astype(x_s.dtype)  # in place of what was read
        gate_s[here] = (d_normed * normed * (1.0 - opened)).astype(gate_s.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(x_s, d_x_g.at[rows])
    plgpu.copy_smem_to_gmem(gate_s, d_gate_g.at[rows])
    d_w_g[n] = jnp.sum(d_w, axis=0)
    plgpu.wait_smem_to_gmem(0)


def _run(body: Any, eps: float, arrays: list[Array], weight: Array, out: list[Any], tiles: Any, interpret: bool) -> Any:
    """`arrays` are [N, 128]; `out` and `tiles` are the dtypes of outputs like them and of shared-memory tiles."""
    N, steps, kit = arrays[0].shape[0], -(-arrays[0].shape[0] // ROWS), Kit(interpret)
    if interpret:  # the interpreter does not fill what lies outside an array
        arrays, N = [jnp.pad(x, ((0, steps * ROWS - N), (0, 0))) for x in arrays], steps * ROWS
    out_type = [jax.ShapeDtypeStruct((N, DIM), dtype) for dtype in out]
    if body is _backward_body:
        out_type.append(jax.ShapeDtypeStruct((steps, DIM), jnp.float32))
    params = {} if interpret else {"compiler_params": plgpu.CompilerParams(approx_math=True)}
    return kit.kernel(
        functools.partial(body, kit, eps),
        out_type=out_type,
        grid=(steps,),
        grid_names=("tile",),
        num_threads=1,
        thread_name="wg",
        scratch_types=[*(plgpu.SMEM((ROWS, DIM), dtype) for dtype in tiles), plgpu.Barrier(num_arrivals=len(arrays))],
        kernel_name=body.__name__.strip("_") + "_gated_norm",
        **params,
    )(*arrays, weight)


@functools.partial(jax.jit, static_argnames=("eps", "interpret"))  # lowered once for all layers
def forward(x: Array, weight: Array, gate: Array, eps: float, interpret: bool = False) -> Array:
    """`gated_rms_norm`, in the dtype of `gate`."""
    arrays, dtypes = [x.reshape(-1, DIM), gate.reshape(-1, DIM)], [x.dtype, gate.dtype, gate.dtype]
    (y,) = _run(_forward_body, eps, arrays, weight, [gate.dtype], dtypes, interpret)
    return y[: arrays[0].shape[0]].reshape(gate.shape)


@functools.partial(jax.jit, static_argnames=("eps", "interpret"))
def backward(
    x: Array, weight: Array, gate: Array, eps: float, d_y: Array, interpret: bool = False
) -> tuple[Array, Array, Array]:
    """Gradients of x, weight and gate, in their dtypes."""
    arrays = [d_y.astype(gate.dtype).reshape(-1, DIM), x.reshape(-1, DIM), gate.reshape(-1, DIM)]
    dtypes = [gate.dtype, x.dtype, gate.dtype]
    d_x, d_gate, d_w = _run(_backward_body, eps, arrays, weight, dtypes[1:], dtypes, interpret)
    n = arrays[0].shape[0]
    return d_x[:n].reshape(x.shape), jnp.sum(d_w, axis=0).astype(weight.dtype), d_gate[:n].reshape(gate.shape)
