"""Models as directories in the released layout: shards, index and `config.json`, complete or absent.

    export_pretrained(model, router_bias, "out", like="Kimi-K3")

Files are laid out before anything is written, so tensors are written as they come from the devices, in parts; the host
holds at most `HOST_BYTES` besides what the model itself may have there. Every process writes its share of the files.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from k3jax.checkpoint.hf_config import QUANTIZATION, check_stored, config_from_hf, config_to_hf, is_kimi_linear, text_of
from k3jax.checkpoint.layout import (
    GROUP,
    PREFIX,
    ROUTER_BIAS,
    CheckpointFormatError,
    Leaf,
    get,
    held_leaves,
    leaves,
    packed_names,
    packed_shapes,
    stored_wide,
)
from k3jax.checkpoint.load import _NAN_SCALE, _STAGE, _TASK, _THREADS, _chunks, _finite, _in_place, _split, settle
from k3jax.checkpoint.preflight import INDEX, Checkpoint, preflight
from k3jax.checkpoint.safetensors_io import DTYPES, Range, Reader, Writer
from k3jax.model.k3 import K3
from k3jax.ops.mx import PackedMX, ScaleRule, dequantize, quantize
from k3jax.parallel.launch import together

Tensors = dict[str, tuple[str, tuple[int, ...]]]


def export_pretrained(
    model: K3,
    router_bias: jax.Array,
    directory: str | Path,
    *,
    like: str | Path | None = None,
    experts: Literal["plain", "mxfp4"] | None = None,
    dtype: Literal["bfloat16", "float32"] = "bfloat16",
    max_shard_bytes: int = 5 * 10**9,
) -> None:
    """Writes a model as `directory`, which appears when all of it is on disk.

    Args:
        like: a directory in the released layout that the weights came from. Its tensors' dtypes and padding are kept,
            and its tokenizer and other files are copied; so is its tower, if the model has none. Of packed experts the
            scales are kept wherever a group's values still are exact with them, so that what did not change has the
            same bytes. Experts that the model holds as codes are written as they are but for that.
        experts: None: as in `like`, plain without it. New scales follow the model's `moe.qat_scale_rule`, with which
            it may have been trained.
        dtype: of what the release stores as bfloat16, without `like`.
        max_shard_bytes: files are no larger, but for a tensor that is.

    Raises:
        FileExistsError: `directory` exists.
        CheckpointFormatError: weights that are not finite, a `like` of another geometry, or a model of which its
            `config.json` (or that of `like`) cannot say what it computes. Nothing is left behind.
    """
    directory = Path(directory).absolute()
    if directory.exists():
        raise FileExistsError(f"{directory} exists; export to a new directory")
    source = None if like is None else preflight(like, any_float=True)
    found = _leaves_of(model, source)
    if source is not None:
        dtype = "float32" if source.config.param_dtype == "float32" else "bfloat16"
    stored = {"bfloat16": "BF16", "float32": "F32"}[dtype]
    packed = source is not None and source.packed if experts is None else experts == "mxfp4"
    values = _values(model, source, dtype, packed)
    check_stored(model.config, config_from_hf(values))
    tensors = plan_tensors(found, stored, source, packed)
    files = plan_files(tensors, max_shard_bytes)
    temporary = directory.with_name(f".{directory.name}.incomplete")
    rank, count = jax.process_index(), jax.process_count()
    mine = {file: held for i, (file, held) in enumerate(files.items()) if i % count == rank}
    try:
        with together("begin to export"):
            if rank == 0:
                shutil.rmtree(temporary, ignore_errors=True)
                temporary.mkdir(parents=True)
        with _Exporter(temporary, mine, source, packed, model.config.moe.qat_scale_rule) as exporter:
            pure = nnx.to_pure_dict(nnx.state(model))
            for one in found:
                value = router_bias if one.path == ROUTER_BIAS else get(pure, one.path)
                if isinstance(value, PackedMX) and not packed:
                    value = _decoded(value, model.config.param_dtype)
                exporter.write(one, value)
            with together("export"):
                exporter.end([] if source is None else copied(found, source))
        with together("end the export"):
            if rank == 0:
                _finish(temporary, directory, files, values, source)
    except BaseException:
        if rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise


def _leaves_of(model: K3, source: Checkpoint | None) -> list[Leaf]:
    if source is None:
        return leaves(model.config, "" if is_kimi_linear(model.config) else PREFIX)
    prefix = PREFIX if any(name.startswith(PREFIX) for name in source.tensors) else ""
    found, theirs = leaves(model.config, prefix), source.leaves
    if model.config.vision is None:
        theirs = [one for one in theirs if not one.of_tower]
    if found != theirs:
        raise CheckpointFormatError(f"{source.directory} has another geometry than the model that is exported")
    return found


def plan_tensors(found: list[Leaf], stored: str, source: Checkpoint | None = None, packed: bool = False) -> Tensors:
    """Every tensor of the export with its dtype and shape: layer by layer, the whole model's, the tower's."""
    by_layer: dict[tuple[bool, float], Tensors] = {}
    for one in found:
        for index in np.ndindex(*one.stack):
            name = one.name(*index)
            number = math.inf if one.layers is None else one.layers[index[0]]
            layer = (one.of_tower, number)
            if packed and one.experts is not None:
                shapes = zip(packed_names(name), packed_shapes(one.shape))
                by_layer.setdefault(layer, {}).update({part: ("U8", shape) for part, shape in shapes})
                continue
            described = ("F32" if stored_wide(name) else stored, one.shape)
            if one.template.endswith("A_log") and not name.startswith(PREFIX):
                described = ("F32", (1, 1, *one.held, 1))
            if source is not None and name in source.tensors:
                info = source.tensors[name]
                described = (info.dtype, info.shape)
            by_layer.setdefault(layer, {})[name] = described
    out: Tensors = {}
    for layer in sorted(by_layer):
        out |= by_layer[layer]
    if source is not None:
        out |= {name: (source.tensors[name].dtype, source.tensors[name].shape) for name in copied(found, source)}
    return out


def copied(found: list[Leaf], source: Checkpoint) -> list[str]:
    """Tensors of the source's tower that a model without one leaves as they are."""
    if any(one.of_tower for one in found):
        return []
    return list({name: None for one in source.leaves if one.of_tower for name in one.names()})


def _size(described: tuple[str, tuple[int, ...]]) -> int:
    dtype, shape = described
    return math.prod(shape) * np.dtype(DTYPES[dtype]).itemsize


def plan_files(tensors: Tensors, limit: int) -> dict[str, Tensors]:
    """Tensors in their order by file, at most `limit` bytes each but for a tensor that is larger."""
    shards: list[Tensors] = [{}]
    size = 0
    for name, described in tensors.items():
        if shards[-1] and size + _size(described) > limit:
            shards.append({})
            size = 0
        shards[-1][name] = described
        size += _size(described)
    return {f"model-{i + 1:05}-of-{len(shards):05}.safetensors": shard for i, shard in enumerate(shards)}


def _values(model: K3, source: Checkpoint | None, dtype: str, packed: bool) -> dict[str, Any]:
    """The `config.json`; it declares a quantisation exactly if there is one."""
    values = config_to_hf(model.config, dtype) if source is None else json.loads(json.dumps(source.values))
    declared = text_of(values).pop("quantization_config", None) or values.pop("quantization_config", None)
    if packed:
        text_of(values)["quantization_config"] = declared or QUANTIZATION
    return values


def _finish(
    temporary: Path, directory: Path, files: dict[str, Tensors], values: dict[str, Any], source: Checkpoint | None
) -> None:
    """Index, configuration and other files, then the name."""
    if source is not None:
        for path in source.directory.iterdir():
            if path.is_file() and path.suffix != ".safetensors" and path.name not in (INDEX, "config.json"):
                shutil.copyfile(path, temporary / path.name)
    write_metadata(temporary, files, values)
    _to_disk(temporary)
    temporary.rename(directory)
    _to_disk(directory.parent)


def write_metadata(directory: Path, files: dict[str, Tensors], values: dict[str, Any]) -> None:
    """`config.json` and the index."""
    total = sum(_size(described) for held in files.values() for described in held.values())
    weight_map = {name: file for file, held in files.items() for name in held}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    for name, content in (("config.json", values), (INDEX, index)):
        (directory / name).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
        _to_disk(directory / name)


def _to_disk(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


class _Exporter:
    def __init__(
        self, temporary: Path, mine: dict[str, Tensors], source: Checkpoint | None, packed: bool, rule: ScaleRule
    ) -> None:
        self._described = {name: described for held in mine.values() for name, described in held.items()}
        self._source, self._packed, self._rule = source, packed, rule
        self._reader = Reader()
        self._writer = Writer(temporary, mine)
        self._threads = ThreadPoolExecutor(_THREADS, "k3jax-export")
        self._error: Exception | None = None

    def __enter__(self) -> _Exporter:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(cancel_futures=True)
        self._reader.close()
        self._writer.abandon()

    def write(self, found: Leaf, value: jax.Array | PackedMX) -> None:
        """Every tensor of a parameter that belongs into this process's files; what fails, `end` raises."""
        if isinstance(value, PackedMX):
            self._write_bank(found, value)
            return
        for ranges, block in _blocks(found, value):
            if self._error is not None:  # other processes may still wait for what this one's devices hold
                continue
            stack = len(found.stack)
            view = [ranges[stack + found.order.index(axis)] for axis in range(len(found.view))]
            if found.window is not None:
                axis, begin, _ = found.window
                view[axis] = (view[axis][0] + begin, view[axis][1] + begin)
            values = found.to_view(block)
            futures = []
            for index in np.ndindex(*(stop - start for start, stop in ranges[:stack])):
                name = found.name(*(i + start for i, (start, _) in zip(index, ranges)))
                if found.experts is not None and self._packed:
                    if packed_names(name)[0] in self._writer:
                        futures += self._submit(self._encode, name, found.view, tuple(view), values[index])
                elif name in self._writer:
                    futures += self._submit(self._job, name, found.view, tuple(view), values[index])
            self._settle(futures)

    def _write_bank(self, found: Leaf, bank: PackedMX) -> None:
        """A bank that is held as codes."""
        parts = zip(held_leaves(found), (bank.codes, bank.scales), (_STAGE, _STAGE * 2 // GROUP))  # the same cuts
        for (_, codes), (ranges, scales) in zip(*(_blocks(*part) for part in parts), strict=True):
            if self._error is not None:
                continue
            *stack, columns, rows = ranges
            futures = []
            for index in np.ndindex(*(stop - start for start, stop in stack)):
                name = found.name(*(i + start for i, (start, _) in zip(index, stack)))
                if packed_names(name)[0] in self._writer:
                    values = codes[index].T, scales[index].T
                    futures += self._submit(self._as_held, name, found.view, (rows, columns), *values)
            self._settle(futures)

    def _settle(self, futures: list[Future]) -> None:
        try:
            settle(futures)
        except (CheckpointFormatError, OSError) as error:
            self._error = error

    def _submit(
        self, job: Callable, name: str, view: tuple[int, ...], ranges: tuple[Range, ...], *values: np.ndarray
    ) -> list[Future]:
        row = 4 * math.prod(values[0].shape[1:])
        begin, end = ranges[0]
        return [
            self._threads.submit(
                job, name, view, ((start, stop), *ranges[1:]), *(v[start - begin : stop - begin] for v in values)
            )
            for start, stop in _split((begin, end), max(_TASK // row, 1))
        ]

    def _job(self, name: str, view: tuple[int, ...], ranges: tuple[Range, ...], value: np.ndarray) -> None:
        self._writer.write(name, view, ranges, _rows(name, value, DTYPES[self._described[name][0]]))

    def _encode(self, name: str, view: tuple[int, ...], ranges: tuple[Range, ...], value: np.ndarray) -> None:
        """Rows of an expert as MXFP4."""
        rows, (begin, end) = ranges
        if view[-1] % GROUP:
            raise CheckpointFormatError(f"{name}: its {view[-1]} inputs are no multiple of {GROUP}, an MXFP4 group")
        if begin % GROUP or end % GROUP:
            raise CheckpointFormatError(f"{name}: the mesh cuts its inputs at {begin}:{end}, within groups of {GROUP}")
        groups = (rows, (begin // GROUP, end // GROUP))
        codes, scales = _encoding(_rows(name, value, np.float32), self._kept(name, view, groups), self._rule)
        self._write_packed(name, view, groups, np.asarray(codes), np.asarray(scales))

    def _as_held(
        self, name: str, view: tuple[int, ...], groups: tuple[Range, ...], codes: np.ndarray, scales: np.ndarray
    ) -> None:
        """Rows of an expert that are codes already."""
        codes, scales = (_rows(name, part, np.uint8) for part in (codes, scales))
        if np.any(scales == _NAN_SCALE):
            raise CheckpointFormatError(f"{name} of the model that is exported holds NaN or infinity")
        kept = self._kept(name, view, groups)
        if kept is not None and not np.array_equal(kept, scales):
            codes, scales = _with_scales(codes, scales, kept, self._rule)
        self._write_packed(name, view, groups, codes, scales)

    def _kept(self, name: str, view: tuple[int, ...], groups: tuple[Range, ...]) -> np.ndarray | None:
        """The scales of `like`."""
        name = packed_names(name)[1]
        if self._source is None or name not in self._source.tensors:
            return None
        return self._reader.read(name, self._source.tensors[name], packed_shapes(view)[1], groups).copy()

    def _write_packed(
        self, name: str, view: tuple[int, ...], groups: tuple[Range, ...], codes: np.ndarray, scales: np.ndarray
    ) -> None:
        rows, (begin, end) = groups
        each = GROUP // 2
        parts = zip(packed_names(name), packed_shapes(view), ((rows, (begin * each, end * each)), groups))
        for (part, shape, ranges), value in zip(parts, (codes, scales)):
            self._writer.write(part, shape, ranges, value)

    def end(self, copies: list[str]) -> None:
        """Copies what is not the model's, and closes the files when all is on disk.

        Raises:
            CheckpointFormatError, OSError: of an earlier call too.
        """
        if self._error is not None:
            raise self._error
        futures = []
        for name in copies:
            if name in self._writer:
                futures.append(self._threads.submit(self._copy, name))
        settle(futures)
        self._writer.close()

    def _copy(self, name: str) -> None:
        assert self._source is not None
        info = self._source.tensors[name]
        for start, stop in _split((0, info.shape[0]), max(_TASK // max(math.prod(info.shape[1:]) * 4, 1), 1)):
            ranges = ((start, stop), *((0, size) for size in info.shape[1:]))
            self._writer.write(name, info.shape, ranges, self._reader.read(name, info, info.shape, ranges))


def _rows(name: str, value: np.ndarray, dtype: Any) -> np.ndarray:
    """Rows of a tensor in its dtype and order."""
    out = np.empty(value.shape, dtype)
    for start, stop in _split((0, len(value)), 64):  # rows of the tensor are columns of the parameter: see `load`
        out[start:stop] = value[start:stop]
    if not _finite(out):
        raise CheckpointFormatError(f"{name} of the model that is exported holds NaN or infinity")
    return out


def _with_scales(
    codes: np.ndarray, scales: np.ndarray, wanted: np.ndarray, rule: ScaleRule
) -> tuple[np.ndarray, np.ndarray]:
    """The same numbers, with the scales `wanted` where groups are exact with them."""
    values = dequantize(codes, scales, np.float32, format="mxfp4")
    other_codes, other = quantize(values, format="mxfp4", scale_rule=rule, source_scales=wanted)
    same = (other == wanted) & np.all(
        (dequantize(other_codes, other, np.float32, format="mxfp4") == values).reshape(*scales.shape, GROUP), axis=-1
    )
    return np.where(np.repeat(same, GROUP // 2, axis=-1), other_codes, codes), np.where(same, wanted, scales)


def _blocks(found: Leaf, array: jax.Array, limit: int | None = None) -> Iterator[tuple[tuple[Range, ...], np.ndarray]]:
    """The array in blocks on the host, at most `limit` bytes of all devices: where each lies, and its values.

    On several processes every process gets every block, whoever's devices hold it: they all have to call this alike.
    """
    shape, sharding = array.shape, array.sharding
    several = jax.process_count() > 1 and isinstance(sharding, NamedSharding)
    if not several and _in_place():
        for shard in _first_copies(array):
            yield _ranges(shard.index, shape), np.asarray(shard.data)
        return
    local = sharding.shard_shape(shape)
    holders = sharding.devices_indices_map(shape)
    pieces = len({_ranges(index, shape) for index in holders.values()})
    for start, block in _chunks(found, local, array.dtype.itemsize, (limit or _STAGE) // pieces):
        chunk = _cutting(sharding, block, several)(array, np.array(start, np.int32))
        whole = tuple(n * (s // l) for n, s, l in zip(block, shape, local))
        host = np.asarray(chunk.addressable_shards[0].data) if several else None
        seen = set()
        inside = sharding.devices_indices_map(whole)
        for device, index in holders.items():
            ranges = _ranges(index, shape)
            if ranges in seen or (not several and device.process_index != jax.process_index()):
                continue
            seen.add(ranges)
            if host is None:
                value = next(np.asarray(s.data) for s in chunk.addressable_shards if s.device == device)
            else:
                value = host[inside[device]]
            yield tuple((r[0] + at, r[0] + at + n) for r, at, n in zip(ranges, start, block)), value


def _ranges(index: Any, shape: tuple[int, ...]) -> tuple[Range, ...]:
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape))


def _first_copies(array: jax.Array) -> Iterator[Any]:
    seen = set()
    for shard in array.addressable_shards:
        ranges = _ranges(shard.index, array.shape)
        if ranges not in seen:
            seen.add(ranges)
            yield shard


@partial(jax.jit, static_argnums=1)
def _decoded(bank: PackedMX, dtype: str) -> jax.Array:
    return bank.dequantize(dtype)


@partial(jax.jit, static_argnums=2)
def _encoding(values: jax.Array, kept: jax.Array | None, rule: ScaleRule) -> tuple[jax.Array, jax.Array]:
    return quantize(values, format="mxfp4", scale_rule=rule, source_scales=kept)


@lru_cache
def _cutting(sharding: Any, block: tuple[int, ...], replicated: bool) -> Any:
    """The same block of every device's shard, each where it is or all of them everywhere."""

    def cut(array: jax.Array, start: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice(array, tuple(start), block)

    if isinstance(sharding, NamedSharding):
        specs = (sharding.spec, P())
        cut = jax.shard_map(cut, mesh=sharding.mesh, in_specs=specs, out_specs=sharding.spec, check_vma=False)
    if not replicated:
        return jax.jit(cut)
    return jax.jit(lambda *args: jax.sharding.reshard(cut(*args), NamedSharding(sharding.mesh, P())))
