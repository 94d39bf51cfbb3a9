"""What the Mosaic GPU kernels of this package share: matrix products, loads, and how they run without a GPU.

Kernels are written once, against a `Kit`. On a GPU its methods emit wgmma and swizzled shared-memory accesses. In
interpret mode (CPU) the same methods work on values, because the interpreter knows neither wgmma with an operand in
registers nor accumulators that start from a value; copies, barriers, slots, warpgroups and masks are then really
executed, and so is every rounding.

Kernels need a GPU of compute capability 9.0 (wgmma).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

INTERPRETER = plgpu.InterpretGPUParams()
LAYOUT = plgpu.Layout.WGMMA
ROW = LAYOUT.reduce(1)  # one value for each row of a WGMMA tile
COLUMN = LAYOUT.reduce(0)  # one value for each column


def why_not_here() -> str | None:
    """Why Mosaic kernels cannot run on the default device; None if they can."""
    device = jax.devices()[0]
    if device.platform != "gpu":
        return f"they need an NVIDIA GPU of compute capability 9.0, and the default device is {device.platform!r}"
    capability = str(getattr(device, "compute_capability", "unknown"))
    if capability != "9.0":
        return f"they need an NVIDIA GPU of compute capability 9.0 (Hopper); {device.device_kind} has {capability}"
    return None


def xla_or_pallas(
    op: str, implementation: Literal["xla", "pallas"] | None, why_not: Callable[[], str | None]
) -> Literal["xla", "pallas"]:
    """Which of an op's two implementations runs; None means the kernels where `why_not` has nothing against them.

    Raises:
        ValueError: the name is unknown, or the kernels were asked for and cannot run; the message says why.
    """
    if implementation not in (None, "xla", "pallas"):
        raise ValueError(f"{op}: unknown implementation {implementation!r}; there are xla and pallas")
    if implementation == "xla":
        return "xla"
    reason = why_not()
    if implementation == "pallas" and reason:
        raise ValueError(f"{op}: implementation='pallas' cannot run: {reason}")
    return "xla" if reason else "pallas"


def multiprocessors() -> int:
    """Of the device that is traced for: the default one, or an abstract mesh's."""
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    return (abstract.num_cores if abstract else None) or jax.devices()[0].core_count


def swizzled(columns: int, dtype: Any) -> tuple[Any, ...]:
    """Transforms of a row-major shared-memory tile with this many columns that wgmma and TMA both accept."""
    width = min(128, columns * jnp.dtype(dtype).itemsize)
    return plgpu.TilingTransform((8, width // jnp.dtype(dtype).itemsize)), plgpu.SwizzleTransform(width)


def smem(shape: Sequence[int], dtype: Any, swizzle_columns: int | None = None) -> Any:
    """A swizzled tile [..., rows, columns]; `swizzle_columns` narrows the swizzle (to slice columns, say)."""
    return plgpu.SMEM(tuple(shape), dtype, transforms=swizzled(swizzle_columns or shape[-1], dtype))


def along_rows(row_values: Any, shape: tuple[int, ...]) -> jax.Array:
    """One value a row → [rows, columns]."""
    return lax.broadcast_in_dim(row_values, shape, [0])


def along_columns(column_values: Any, shape: tuple[int, ...]) -> jax.Array:
    """One value a column → [rows, columns]."""
    return lax.broadcast_in_dim(column_values, shape, [1])


@dataclasses.dataclass(frozen=True)
class Transposed:
    """A shared-memory tile seen transposed."""

    ref: Any


@dataclasses.dataclass(frozen=True)
class Kit:
    """The operations of a kernel body; `interpret` says where it runs."""

    interpret: bool = False

    def t(self, ref: Any) -> Transposed:
        return Transposed(ref)

    def _gpu(self, x: Any) -> Any:
        return x.ref.transpose((1, 0)) if isinstance(x, Transposed) else x

    def _value(self, x: Any) -> jax.Array:
        if isinstance(x, Transposed):
            return x.ref[...].T
        return x if isinstance(x, jax.Array) else x[...]

    def mm(self, shape: tuple[int, int], *pairs: tuple[Any, Any]) -> jax.Array:
        """Σ a b in float32 [64, N]; a in shared memory or registers, b in shared memory."""
        if self.interpret:
            return functools.reduce(jnp.add, (self._dot(a, b) for a, b in pairs))

        def body(acc):
            for a, b in pairs:
                plgpu.wgmma(acc, self._gpu(a), self._gpu(b))
            return acc[...]

        return pl.run_scoped(body, plgpu.ACC(shape, jnp.float32))

    def mm_acc(self, init: jax.Array, *pairs: tuple[Any, Any]) -> Any:
        """init + Σ a b."""
        if self.interpret:
            return init + functools.reduce(jnp.add, (self._dot(a, b) for a, b in pairs))

        def body(acc):
            for a, b in pairs:
                plgpu.wgmma(acc, self._gpu(a), self._gpu(b))

        return pl.run_state(body)(plgpu.ACC.init(init))

    def _dot(self, a: Any, b: Any) -> jax.Array:
        return jnp.dot(self._value(a), self._value(b), preferred_element_type=jnp.float32)

    def load(self, ref: Any, layout: Any = LAYOUT, *, optimized: bool = True) -> jax.Array:
        """A tile or vector into registers."""
        if self.interpret:
            return self._value(ref)
        return plgpu.load(self._gpu(ref), layout=layout, optimized=optimized)

    def store(self, ref: Any, value: jax.Array) -> None:
        """Registers into a tile, transposed if the reference is."""
        if isinstance(ref, Transposed) and self.interpret:
            ref.ref[...] = value.T
        else:
            self._gpu(ref)[...] = value

    def all_warps(self) -> None:
        """All four warps are done with the products that they have waited for; their operands may be overwritten.

        Needed where a kernel runs without automatic barriers; a warp waits for its own quarter of a product only.
        """
        plgpu.commit_smem()

    def release(self, barrier: Any) -> None:
        """Tell the loading warpgroup that this one has read its slot.

        wgmma reads through the asynchronous proxy and needs no fence before the next copy; the plain loads that stand
        for it in interpret mode do.
        """
        if self.interpret:
            plgpu.commit_smem()
        plgpu.barrier_arrive(barrier)

    def iota(self, shape: tuple[int, int], axis: int) -> jax.Array:
        if self.interpret:
            return lax.broadcasted_iota(jnp.int32, shape, axis)
        return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=LAYOUT)

    def along_rows(self, row_values: Any, shape: tuple[int, ...]) -> jax.Array:
        """One value a row → [rows, columns], its layout said: looked for, it takes minutes in a long kernel."""
        tile = along_rows(row_values, shape)
        return tile if self.interpret else plgpu.layout_cast(tile, LAYOUT)

    def along_columns(self, column_values: Any, shape: tuple[int, ...]) -> jax.Array:
        """One value a column → [rows, columns]."""
        tile = along_columns(column_values, shape)
        return tile if self.interpret else plgpu.layout_cast(tile, LAYOUT)

    def full(self, shape: tuple[int, int], value: float, dtype: Any) -> jax.Array:
        """A constant tile in registers."""
        tile = jnp.full(shape, value, dtype)
        return tile if self.interpret else plgpu.layout_cast(tile, LAYOUT)

    def kernel(self, body: Callable[..., None], **kwargs: Any) -> Callable[..., Any]:
        """`plgpu.kernel` where this kit runs."""
        return plgpu.kernel(body, interpret=INTERPRETER if self.interpret else None, **kwargs)

    def union(self, *groups: Any) -> Any:
        """Groups of tiles that take turns in one piece of memory; unpacks into the groups.

        Interpreted, each has memory of its own: the race detector takes a union for one location.
        """
        return list(groups) if self.interpret else plgpu.RefUnion(*groups)


def h200_mesh() -> jax.sharding.AbstractMesh:
    """A mesh to trace and lower under for an H200 on a machine without one:

    with jax.sharding.use_abstract_mesh(h200_mesh()):
        jax.jit(f).trace(x).lower(lowering_platforms=("cuda",))
    """
    device = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", platform="gpu", num_cores=132)
    return jax.sharding.AbstractMesh((), (), abstract_device=device)
