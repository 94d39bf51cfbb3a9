"""Models from directories in the released layout, streamed into the shards of the current mesh.

    loaded = load_pretrained("Kimi-K3")
    logits = loaded.model(tokens, router_bias=loaded.router_bias)

MXFP4 experts are decoded, for training; with experts="packed" they stay codes, for inference.

Each process reads the byte ranges that its devices hold, a few MiB at a time, and turns them into the parameter's
layout on threads. On a CPU the pieces are written where the array will be; elsewhere they are collected in staging
buffers that are copied into the device's shard. Either way the host holds at most `HOST_BYTES` besides its arrays.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from k3jax.checkpoint.layout import (
    GROUP,
    ROUTER_BIAS,
    CheckpointFormatError,
    Leaf,
    abstract_model,
    held_leaves,
    leaves,
    packed_leaves,
)
from k3jax.checkpoint.preflight import Checkpoint, preflight
from k3jax.checkpoint.safetensors_io import Range, Reader, covering
from k3jax.checkpoint.store import from_paths, to_paths
from k3jax.config import ConfigError
from k3jax.model.k3 import K3
from k3jax.model.quantize import pack_experts
from k3jax.ops.mx import dequantize
from k3jax.parallel.launch import together
from k3jax.sharding import shardings

HOST_BYTES = 1 << 30
"""Most host memory that an import takes beside the arrays it returns (and beside the headers of the shards)."""
_STAGE = 128 << 20  # five of these at most: three that are filled or copied, two of smaller parameters begun after
_TASK = 8 << 20  # a thread holds one of these, and a part of it in another dtype
_THREADS = min(16, 2 * (os.cpu_count() or 1))
_NAN_SCALE = 255
_LAST_SCALE = 252  # up to which every code is finite
_LARGEST_CODE = {253: 5, 254: 3}  # 3 · 2^126 and 1.5 · 2^127
_ROWS = 128  # rows that are transposed together: about a cache line of each fits the cache

Experts = Literal["plain", "packed"]
Progress = Callable[[int], None]
Shards = dict[tuple[Range, ...], list[jax.Device]]


@dataclass(frozen=True)
class Pretrained:
    """A model from a directory in the released layout."""

    model: K3
    router_bias: jax.Array
    """[MoE layers, E] float32."""
    checkpoint: Checkpoint
    """What the directory holds; `checkpoint.lines()` says it in words."""


def load_pretrained(
    directory: str | Path,
    *,
    fsdp: bool = False,
    any_float: bool = False,
    experts: Experts = "plain",
    progress: Progress | None = None,
    **overrides: Any,
) -> Pretrained:
    """Model and router biases from a directory in the released layout (Kimi K3 or Kimi-Linear).

    Arrays land on the current mesh, or on the first device when none is set. Nothing is returned unless all of it was
    read and is finite. With `vision=None` the tower is checked and not loaded.

    Args:
        fsdp: parameters in their layout at rest, as `MeshConfig.fsdp`.
        any_float: see `preflight`.
        experts: "packed" keeps MXFP4 experts as they are stored, codes and scales (`PackedMX`), a quarter of bfloat16;
            no plain copy is made anywhere. For inference: there is no gradient.
        progress: called with numbers of bytes as they are read, from several threads.
        overrides: fields of `ModelConfig`, e.g. `param_dtype="float32"`; the dtypes are otherwise the checkpoint's.

    Raises:
        CheckpointFormatError: see `preflight`; also NaN or infinite weights, padding of `A_log` that is not zero, and
            plain experts that are asked for as "packed": codes would be other weights than the directory's.
        ConfigError: a parameter that the mesh cannot cut.
        LaunchError: another process failed.
    """
    with together("import weights"):
        return _load(directory, fsdp, any_float, experts, progress, overrides)


def _load(
    directory: str | Path,
    fsdp: bool,
    any_float: bool,
    experts: Experts,
    progress: Progress | None,
    overrides: dict[str, Any],
) -> Pretrained:
    if experts not in get_args(Experts):
        raise ConfigError(f"experts must be one of {', '.join(map(repr, get_args(Experts)))}, got {experts!r}")
    checkpoint = preflight(directory, any_float=any_float)
    config = dataclasses.replace(checkpoint.config, **overrides)
    wanted = [one for one in checkpoint.leaves if config.vision is not None or not one.of_tower]
    if overrides and not _same_shapes(leaves(config, ""), wanted):
        raise CheckpointFormatError(f"{directory}: {overrides} changes the shapes of parameters")
    shapes: dict[str, Any] = {"params": abstract_model(config)}
    if experts == "packed":
        if not checkpoint.packed:
            raise CheckpointFormatError(
                f"{directory} holds plain experts, and quantising them would change the model; load them as they are "
                'and export with experts="mxfp4" first, then load that directory with experts="packed"'
            )
        # the rule has no say in shapes
        shapes["params"] = jax.eval_shape(partial(pack_experts, scale_rule="even"), shapes["params"])
        wanted = [part for one in wanted for part in ([one] if one.experts is None else held_leaves(one))]
    shapes[ROUTER_BIAS] = jax.ShapeDtypeStruct((config.num_moe_layers, config.moe.num_experts), jnp.float32)
    mesh = jax.sharding.get_mesh()
    device = SingleDeviceSharding(jax.devices()[0])
    places = (
        jax.tree.map(lambda _: device, shapes) if mesh.empty else shardings(shapes, mesh, at_rest=fsdp, strict=fsdp)
    )
    abstract, placed = _flat(to_paths(shapes)), _flat(to_paths(places))
    arrays: dict[str, jax.Array] = {}
    begun: deque[tuple[str, Callable[[], jax.Array]]] = deque()
    with _Importer(checkpoint, progress) as importer:
        for found in wanted:
            path = found.path if found.path == ROUTER_BIAS else f"params.{found.path}"
            decode = checkpoint.packed and experts == "plain" and found.experts is not None
            begun.append((path, importer.begin(found, placed[path], abstract[path].dtype, decode=decode)))
            if len(begun) > 2:  # threads have work while one is put together
                path, end = begun.popleft()
                arrays[path] = end()
        arrays |= {path: end() for path, end in begun}
    if not config.num_moe_layers:
        arrays[ROUTER_BIAS] = jnp.zeros(shapes[ROUTER_BIAS].shape, jnp.float32)
    loaded = from_paths(shapes, _nested(arrays))
    return Pretrained(loaded["params"], loaded[ROUTER_BIAS], checkpoint)


def _same_shapes(a: list[Leaf], b: list[Leaf]) -> bool:
    return [(one.path, one.stack, one.held) for one in a] == [(one.path, one.stack, one.held) for one in b]


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, value in tree.items():
        out |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return out


def _nested(flat: dict[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for path, value in flat.items():
        *parents, last = path.split(".")
        node = out
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return out


@dataclass(frozen=True)
class _Part:
    """A block of a parameter on the host: where it lies in the whole, and the array to fill."""

    ranges: tuple[Range, ...]
    array: np.ndarray


class _Importer:
    def __init__(self, checkpoint: Checkpoint, progress: Progress | None) -> None:
        self._tensors = checkpoint.tensors
        self._progress = progress or (lambda _: None)
        self.reader = Reader()
        self._threads = ThreadPoolExecutor(_THREADS, "k3jax-import")

    def __enter__(self) -> _Importer:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(cancel_futures=True)
        self.reader.close()

    def begin(self, found: Leaf, sharding: Any, dtype: Any, *, decode: bool = False) -> Callable[[], jax.Array]:
        """Begins to read a parameter (or the router biases); what it returns ends that with an array of `sharding`.

        `decode`: the bank is MXFP4 in the file and an array of numbers here.
        """
        shape = (*found.stack, *(found.held[axis] for axis in found.order))
        if found.template.endswith("A_log"):
            self._check_tails(found)
        local = sharding.shard_shape(shape)
        shards = _shards(sharding, shape)
        size = math.prod(local) * np.dtype(dtype).itemsize * len(shards)
        if not decode and (size <= _STAGE or _in_place()):
            parts = {ranges: _Part(ranges, _empty(local, dtype)) for ranges in shards}
            futures = self._fill(found, parts)

            def end() -> jax.Array:
                settle(futures)
                return jax.block_until_ready(_assemble(shape, sharding, shards, parts))

            return end
        return partial(self._staged, found, decode, shape, sharding, dtype, shards)

    def _staged(
        self, found: Leaf, packed: bool, shape: tuple[int, ...], sharding: Any, dtype: Any, shards: Shards
    ) -> jax.Array:
        """Chunk by chunk through host buffers; packed experts are decoded on the device."""
        local = sharding.shard_shape(shape)
        if packed and local[-2] % GROUP:
            raise ConfigError(
                f"{found.path}: the mesh cuts the {shape[-2]} inputs of an expert into {local[-2]} a device, and "
                f"{GROUP} share a scale; cut experts instead"
            )
        sources = list(zip(packed_leaves(found), (2, GROUP))) if packed else [(found, 1)]
        turned: Callable[[tuple], tuple] = _out_in if packed else lambda axes: axes
        place = _in_file_order(sharding) if packed else sharding
        copies = turned(tuple(s // l for s, l in zip(shape, local)))
        array = jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=sharding)()
        in_flight: deque[jax.Array] = deque()
        for start, block in _chunks(found, local, np.dtype(dtype).itemsize, _STAGE // len(shards)):
            if len(in_flight) > 1:
                jax.block_until_ready(in_flight.popleft())
            filled, futures = [], []
            for source, each in sources:
                parts = {}
                for ranges in shards:
                    *lead, last = turned(tuple((r[0] + at, r[0] + at + n) for r, at, n in zip(ranges, start, block)))
                    mine = (*lead, (last[0] // each, last[1] // each))
                    size = tuple(stop - begin for begin, stop in mine)
                    parts[ranges] = _Part(mine, _empty(size, np.uint8 if packed else dtype))
                futures += self._fill(source, parts)
                filled.append(parts)
            settle(futures)
            chunks = []
            for parts in filled:
                one = next(iter(parts.values())).array.shape
                whole = tuple(n * count for n, count in zip(one, copies))
                chunks.append(_assemble(whole, place, shards, parts))
            array, done = _writing(sharding, packed)(array, np.array(start, np.int32), *chunks)
            in_flight.append(done)
        return array

    def _fill(self, found: Leaf, parts: dict[Any, _Part]) -> list[Future]:
        """Begins to read everything that the parts need, each byte once."""
        stack = len(found.stack)
        jobs: dict[tuple, list[tuple[np.ndarray, tuple[Range, ...]]]] = {}
        for part in parts.values():
            view = [part.ranges[stack + found.order.index(axis)] for axis in range(len(found.view))]
            if found.window is not None:
                axis, begin, _ = found.window
                view[axis] = (view[axis][0] + begin, view[axis][1] + begin)
            target = found.to_view(part.array)
            for index in np.ndindex(*(stop - start for start, stop in part.ranges[:stack])):
                place = tuple(i + start for i, (start, _) in zip(index, part.ranges))
                key = (place, covering(found.view, view, self._tensors[found.name(*place)].itemsize))
                jobs.setdefault(key, []).append((target[index], tuple(view)))
        futures = []
        for (place, ranges), targets in jobs.items():
            name = found.name(*place)
            row = 4 * math.prod(stop - start for start, stop in ranges[1:])
            for start, stop in _split(ranges[0], max(_TASK // row, 1)):
                block = ((start, stop), *ranges[1:])
                futures.append(self._threads.submit(self._job, name, found.view, block, targets))
        return futures

    def _job(self, name: str, view: tuple[int, ...], ranges: tuple[Range, ...], targets: list) -> None:
        """Reads a block of rows of one tensor and writes it where it belongs."""
        info = self._tensors[name]
        raw = self.reader.read(name, info, view, ranges)
        first, last = ranges[0]
        rows = max(_ROWS // max(math.prod(view[1:-1]), 1), 1) if len(view) > 1 else last - first
        for start, stop in _split((first, last), rows):
            block = raw[start - first : stop - first]
            if not (np.all(block != _NAN_SCALE) if name.endswith("_scale") else _finite(block)):
                raise CheckpointFormatError(f"{info.file}: {name} holds NaN or infinity")
            for target, wanted in targets:
                (top, bottom), *sides = wanted
                begin, end = max(start, top), min(stop, bottom)
                if begin < end:
                    columns = (slice(a - r[0], b - r[0]) for (a, b), r in zip(sides, ranges[1:]))
                    target[begin - top : end - top] = block[(slice(begin - start, end - start), *columns)]
        self._progress(raw.nbytes)
        if name.endswith("_scale") and (np.min(raw) <= 1 or np.max(raw) > _LAST_SCALE):
            self._check_extremes(name, ranges, raw.copy())

    def _check_extremes(self, name: str, ranges: tuple[Range, ...], scales: np.ndarray) -> None:
        """Refuses values that overflow, and values below the smallest normal number: devices take them for zero.

        Groups of zeros are fine.
        """
        codes = name.removesuffix("_scale") + "_packed"
        info = self._tensors[codes]
        each = GROUP // 2
        rows, (begin, end) = ranges
        raw = self.reader.read(codes, info, info.shape, (rows, (begin * each, end * each)))
        raw = (raw & 0x77).reshape(*scales.shape, each)
        largest = np.max(np.maximum(raw & 7, raw >> 4), axis=-1)
        for scale in range(_LAST_SCALE + 1, _NAN_SCALE):
            if np.any(largest[scales == scale] > _LARGEST_CODE[scale]):
                raise CheckpointFormatError(
                    f"{info.file}: {codes} has values of 2^128 or more, which are infinite here"
                )
        if np.any((scales <= 1) & (largest > 0)):
            raise CheckpointFormatError(f"{info.file}: {codes} has values below 2^-126, where bfloat16 is not exact")

    def _check_tails(self, found: Leaf) -> None:
        heads = found.held[0]
        for name in found.names():
            info = self._tensors[name]
            stored = math.prod(info.shape)
            if stored > heads and np.any(self.reader.read(name, info, (stored,), ((heads, stored),))):
                raise CheckpointFormatError(
                    f"{info.file}: {name} holds values for {heads} heads and padding, which must be zero and is not"
                )


def settle(futures: list[Future]) -> None:
    """Waits for all of them; the first error ends the rest."""
    done, waiting = wait(futures, return_when=FIRST_EXCEPTION)
    for future in waiting:
        future.cancel()
    for future in done:
        future.result()


def _in_place() -> bool:
    """Whether devices take over memory that the host has filled."""
    return jax.default_backend() == "cpu"


def _finite(block: np.ndarray) -> bool:
    """Whether no element is NaN or infinite; on the bits, which is several times as fast for bfloat16."""
    if block.dtype == np.uint8:
        return True
    if block.dtype == ml_dtypes.bfloat16:
        return bool(np.max(block.view(np.uint16) & np.uint16(0x7F80), initial=0) < 0x7F80)
    return bool(np.all(np.isfinite(block)))


def _split(whole: Range, size: int) -> Iterator[Range]:
    for start in range(*whole, size):
        yield start, min(start + size, whole[1])


def _shards(sharding: Any, shape: tuple[int, ...]) -> Shards:
    """The different blocks that devices of this process hold, and which do."""
    out: Shards = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        ranges = tuple(part.indices(size)[:2] for part, size in zip(index, shape))
        out.setdefault(ranges, []).append(device)
    return out


def _assemble(shape: tuple[int, ...], sharding: Any, shards: Shards, parts: dict[Any, _Part]) -> jax.Array:
    pieces = [jax.device_put(parts[ranges].array, device) for ranges, devices in shards.items() for device in devices]
    return jax.make_array_from_single_device_arrays(shape, sharding, pieces)


def _empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Uninitialised memory that a CPU device takes over without a copy."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.empty(size + 64, np.uint8)
    begin = -memory.ctypes.data % 64
    return memory[begin : begin + size].view(dtype).reshape(shape)


def _out_in(axes: tuple) -> tuple:
    """[..., in, out] in the order of a file."""
    *lead, inputs, outputs = axes
    return (*lead, outputs, inputs)


def _in_file_order(sharding: Any) -> Any:
    """The sharding of a bank of experts [layers, E, in, out] for [layers, E, out, in]."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    spec = (*sharding.spec, *(None,) * (4 - len(sharding.spec)))
    return NamedSharding(sharding.mesh, P(*_out_in(spec)))


@lru_cache
def _writing(sharding: Any, packed: bool) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """Writes each device's part of a chunk at the same place of its shard; also returns when that is done."""

    def write(array: jax.Array, start: jax.Array, *chunk: jax.Array) -> jax.Array:
        values = dequantize(chunk[0], chunk[1], array.dtype, format="mxfp4").swapaxes(-1, -2) if packed else chunk[0]
        return jax.lax.dynamic_update_slice(array, values, tuple(start))

    if isinstance(sharding, NamedSharding):
        spec = sharding.spec
        chunk = (_in_file_order(sharding).spec,) * 2 if packed else (spec,)
        specs = (spec, P(), *chunk)
        write = jax.shard_map(write, mesh=sharding.mesh, in_specs=specs, out_specs=spec, check_vma=False)
    return jax.jit(lambda *args: (write(*args), jnp.zeros(())), donate_argnums=0)


def _chunks(
    found: Leaf, local: tuple[int, ...], itemsize: int, limit: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(start, shape) of equal blocks of a shard `local`, at most `limit` bytes each.

    They follow the order of the file, so that reads are long. The last may overlap the one before.
    """
    stack = len(found.stack)
    axes = (*range(stack), *(stack + found.order.index(axis) for axis in range(len(found.view))))
    block, left = list(local), limit // itemsize
    for axis in axes:
        inner = math.prod(block) // block[axis]
        if math.prod(block) > left:
            pieces = -(-local[axis] // max(left // inner, 1))
            block[axis] = -(-local[axis] // pieces)
    counts = [-(-size // part) for size, part in zip(local, block)]
    for index in np.ndindex(*(counts[axis] for axis in axes)):
        number = dict(zip(axes, index))
        start = tuple(min(number[axis] * block[axis], local[axis] - block[axis]) for axis in range(len(local)))
        yield start, tuple(block)
