"""Safetensors files by byte range: headers, parts of tensors, and files written in any order.

The `safetensors` library reads and writes whole tensors; a host that holds a few shards of a parameter wants parts of
them. The format: 8 bytes of header length, a JSON header of names, dtypes, shapes and offsets, then the data.
"""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from k3jax.checkpoint.layout import CheckpointFormatError

DTYPES: dict[str, Any] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U8": np.uint8,
    "BOOL": np.bool_,
}
_NAMES = {np.dtype(dtype): name for name, dtype in DTYPES.items()}
_MIN_RUN = 4096
"""Bytes below which a run is read together with what lies between it and the next: devices and page caches would."""
_MAX_HEADER = 100 << 20  # the library's own limit

Range = tuple[int, int]


class TensorInfo(NamedTuple):
    """Where a tensor lies."""

    file: Path
    dtype: str  # of the format: "BF16", "F32", "U8", …
    shape: tuple[int, ...]
    start: int  # byte in the file
    stop: int

    @property
    def itemsize(self) -> int:
        return np.dtype(DTYPES[self.dtype]).itemsize


def dtype_name(dtype: Any) -> str:
    """The format's name of a numpy dtype."""
    return _NAMES[np.dtype(dtype)]


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Every tensor of a file; nothing but the header is read.

    Raises:
        CheckpointFormatError: no such file, no valid header, a file that is not as long as its header says, or tensors
            that overlap or leave bytes between them.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or not 2 <= length <= min(size - 8, _MAX_HEADER):
                raise CheckpointFormatError(f"{path} is cut off in its header, or is no safetensors file")
            header = json.loads(file.read(length))
    except FileNotFoundError:
        raise CheckpointFormatError(f"{path} does not exist") from None
    except OSError as error:
        raise CheckpointFormatError(f"{path} cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointFormatError(f"{path} has no readable safetensors header: {error}") from None
    if not isinstance(header, dict):
        raise CheckpointFormatError(f"{path} has a safetensors header that is no JSON object")
    out: dict[str, TensorInfo] = {}
    begin = 8 + length
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        try:
            dtype, shape, (start, stop) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
            if not isinstance(dtype, str) or not all(type(n) is int and n >= 0 for n in (*shape, start, stop)):
                raise ValueError
        except (KeyError, TypeError, ValueError):
            raise CheckpointFormatError(f"{path}: header entry of {name} is not one of a tensor") from None
        info = TensorInfo(path, dtype, shape, begin + start, begin + stop)
        if dtype in DTYPES and stop - start != math.prod(shape) * np.dtype(DTYPES[dtype]).itemsize:
            raise CheckpointFormatError(f"{path}: {name} has {stop - start} bytes for {dtype}{list(shape)}")
        if info.stop > size:
            raise CheckpointFormatError(
                f"{path} is truncated: {size} bytes, and {name} would end at byte {info.stop}; fetch the file again"
            )
        out[name] = info
    end = begin
    for name, info in sorted(out.items(), key=lambda item: item[1][3:]):
        if info.start != end:
            raise CheckpointFormatError(f"{path}: {name} begins at byte {info.start}, the tensor before ends at {end}")
        end = info.stop
    if end != size:
        raise CheckpointFormatError(f"{path} has {size - end} bytes behind its last tensor")
    return out


def covering(view: Sequence[int], ranges: Sequence[Range], itemsize: int) -> tuple[Range, ...]:
    """`ranges` of an array `view`, made wider where a run of bytes would be shorter than is worth a read of its own."""
    out, run = list(ranges), itemsize
    for axis in reversed(range(len(view))):
        start, stop = out[axis]
        if axis and run * (stop - start) < _MIN_RUN:
            out[axis] = (0, view[axis])
        run *= out[axis][1] - out[axis][0]
        if out[axis] != (0, view[axis]):
            break
    return tuple(out)


def _runs(view: Sequence[int], ranges: Sequence[Range]) -> Iterator[tuple[int, int]]:
    """(first element, number) of the contiguous runs of `ranges` in an array `view`, in order."""
    axis = len(view)
    while axis and ranges[axis - 1] == (0, view[axis - 1]):
        axis -= 1
    if axis == 0:
        yield 0, math.prod(view)
        return
    strides = [math.prod(view[i + 1 :]) for i in range(len(view))]
    start, stop = ranges[axis - 1]
    outer = [range(*r) for r in ranges[: axis - 1]]
    for index in np.ndindex(*map(len, outer)):
        base = sum(o[i] * s for o, i, s in zip(outer, index, strides))
        yield base + start * strides[axis - 1], (stop - start) * strides[axis - 1]


class Reader:
    """Parts of tensors from open files; usable from several threads."""

    def __init__(self) -> None:
        self.bytes_read = 0
        self._files: dict[Path, int] = {}
        self._lock = threading.Lock()
        self._own = threading.local()

    def read(self, name: str, info: TensorInfo, view: Sequence[int], ranges: Sequence[Range]) -> np.ndarray:
        """The elements `ranges` of a tensor whose data is seen as an array `view` (or begins with one).

        The memory is the thread's own and is used again by its next call.

        Raises:
            CheckpointFormatError: the file ends before them.
        """
        dtype = np.dtype(DTYPES[info.dtype])
        out = self._memory([stop - start for start, stop in ranges], dtype)
        target, at, size = memoryview(out.reshape(-1).view(np.uint8)), 0, dtype.itemsize
        fd = self._open(info.file)
        for first, number in _runs(view, ranges):
            place, end = info.start + first * size, at + number * size
            while at < end:
                got = os.preadv(fd, [target[at:end]], place)
                if not got:
                    raise CheckpointFormatError(f"{info.file} ended while {name} was read; it is truncated")
                at, place = at + got, place + got
        with self._lock:
            self.bytes_read += out.nbytes
        return out

    def _memory(self, shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
        size = math.prod(shape) * dtype.itemsize
        held = getattr(self._own, "memory", None)
        if held is None or len(held) < size:
            held = self._own.memory = np.empty(size, np.uint8)
        return held[:size].view(dtype).reshape(shape)

    def _open(self, path: Path) -> int:
        with self._lock:
            if path not in self._files:
                self._files[path] = os.open(path, os.O_RDONLY)
            return self._files[path]

    def close(self) -> None:
        while self._files:
            os.close(self._files.popitem()[1])


class Writer:
    """Files of one directory whose tensors are all known before; parts of them are then written in any order.

    What is not written is zero.
    """

    def __init__(self, directory: Path, files: Mapping[str, Mapping[str, tuple[str, tuple[int, ...]]]]) -> None:
        """`files`: for every file of this process its tensors, {name: (dtype, shape)}, in their order on disk."""
        self._infos: dict[str, TensorInfo] = {}
        self._files: dict[Path, int] = {}
        for file, tensors in files.items():
            path, at = directory / file, 0
            header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
            for name, (dtype, shape) in tensors.items():
                size = math.prod(shape) * np.dtype(DTYPES[dtype]).itemsize
                header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
                at += size
            text = json.dumps(header, separators=(",", ":")).encode()
            text += b" " * (-len(text) % 8)  # the data begins at a multiple of 8
            begin = 8 + len(text)
            fd = self._files[path] = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
            os.pwrite(fd, len(text).to_bytes(8, "little") + text, 0)
            os.ftruncate(fd, begin + at)
            for name, (dtype, shape) in tensors.items():
                start, stop = header[name]["data_offsets"]
                self._infos[name] = TensorInfo(path, dtype, shape, begin + start, begin + stop)

    def __contains__(self, name: str) -> bool:
        return name in self._infos

    def write(self, name: str, view: Sequence[int], ranges: Sequence[Range], value: np.ndarray) -> None:
        """Writes `value` at the elements `ranges` of a tensor seen as an array `view`; its dtype is the tensor's."""
        info = self._infos[name]
        assert dtype_name(value.dtype) == info.dtype, (name, value.dtype, info.dtype)
        source, at, size = memoryview(np.ascontiguousarray(value).reshape(-1).view(np.uint8)), 0, value.itemsize
        fd = self._files[info.file]
        for first, number in _runs(view, ranges):
            place, end = info.start + first * size, at + number * size
            while at < end:
                done = os.pwrite(fd, source[at:end], place)
                at, place = at + done, place + done

    def close(self) -> None:
        """Closes the files when all of them is on disk."""
        for fd in self._files.values():
            os.fsync(fd)
        self.abandon()

    def abandon(self) -> None:
        """Closes the files as they are."""
        while self._files:
            os.close(self._files.popitem()[1])
