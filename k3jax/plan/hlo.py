"""Collectives and products of a compiled program, from its text, with the trip counts of its loops."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass, field

_ITEMSIZE = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4}
_ITEMSIZE |= {"s64": 8, "u64": 8, "f64": 8, "c64": 8, "c128": 16}
_OPS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute")
_BEGIN = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_LINE = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$")
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")
_CALLS = re.compile(r"(?:calls|to_apply|body|condition)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'known_trip_count":\{"n":"(\d+)"')


def _sizes(shape: str) -> list[int]:
    """Bytes of every array of a shape or of a tuple of them."""
    return [
        _ITEMSIZE.get(dtype, 0) * math.prod(int(n) for n in dims.split(",") if n)
        for dtype, dims in _ARRAY.findall(shape)
    ]


@dataclass
class _Computation:
    calls: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    flops: int = 0


@dataclass(frozen=True)
class Program:
    """What one device does in one run of a program."""

    bytes: dict[str, int]
    """By collective, of the whole arrays that are gathered, reduced or exchanged; scalars left out."""
    counts: dict[str, int]
    flops: int
    """Of products; a loop of unknown length counts once."""


def read_program(text: str) -> Program:
    """Counts what a program's text (`compiled.as_text()`) holds."""
    computations: dict[str, _Computation] = {}
    entry = name = ""
    shapes: dict[str, str] = {}
    for line in text.splitlines():
        if begins := _BEGIN.match(line):
            name, shapes = begins[2], {}
            entry = name if begins[1] else entry
            computations[name] = _Computation()
        elif name and (found := _LINE.match(line)):
            _add(computations[name], shapes, *found.groups())
    bytes_, counts, flops = Counter[str](), Counter[str](), 0
    for name, times in _times(computations, entry).items():
        for op, size in computations[name].bytes.items():
            bytes_[op] += times * size
            counts[op] += times * computations[name].counts[op]
        flops += times * computations[name].flops
    return Program(dict(bytes_), dict(counts), flops)


def _add(computation: _Computation, shapes: dict[str, str], result: str, shape: str, op: str, rest: str) -> None:
    shapes[result] = shape
    arguments = re.findall(r"%([\w.\-]+)", rest.split("), ")[0])
    trips = _TRIPS.search(rest)
    for called in _CALLS.findall(rest):
        computation.calls[called] += int(trips[1]) if trips else 1
    for branches in _BRANCHES.findall(rest):
        for called in re.findall(r"[\w.\-]+", branches):
            computation.calls[called] += 1
    kind = op.removesuffix("-start")
    if kind in _OPS and _ranks(rest) != 1:  # a group of one device is left where nothing has to be moved
        arrays = [shapes.get(a, "") for a in arguments] if op == "reduce-scatter" else [shape]
        sizes = [s for array in arrays for s in _sizes(array.replace("u32[]", ""))]
        if op.endswith("-start") and (kind in ("all-gather", "collective-permute") or shape.startswith("((")):
            half = len(sizes) // 2  # operands, then results
            sizes = [max(pair) for pair in zip(sizes[:half], sizes[half:])]
        size = sum(s for s in sizes if s > 8)
        if size:
            computation.bytes[kind] += size
            computation.counts[kind] += 1
    elif op == "dot":
        dims = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", rest)
        left = _ARRAY.search(shapes.get(arguments[0], "") if arguments else "")
        out = _ARRAY.search(shape)
        if dims and left and out:
            sides = [int(n) for n in left[2].split(",") if n]
            contracted = math.prod(sides[int(i)] for i in dims[1].split(",") if i)
            computation.flops += 2 * contracted * math.prod(int(n) for n in out[2].split(",") if n)


def _ranks(rest: str) -> int | None:
    """Devices of a group of a collective; None if the text does not say."""
    if mesh := re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", rest):
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", mesh[1])}
        return math.prod(sizes[name] for name in re.findall(r"'(\w+)'", mesh[2]))
    if iota := re.search(r"replica_groups=\[\d+,(\d+)\]<=", rest):
        return int(iota[1])
    if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", rest):
        return listed[1].count(",") + 1
    return None


def _times(computations: dict[str, _Computation], entry: str) -> Counter[str]:
    """How often each computation runs."""
    order: list[str] = []
    seen: set[str] = set()

    def visit(name: str) -> None:
        if name not in seen and name in computations:
            seen.add(name)
            for called in computations[name].calls:
                visit(called)
            order.append(name)

    visit(entry)
    times = Counter({entry: 1})
    for name in reversed(order):
        for called, count in computations[name].calls.items():
            if called in computations:
                times[called] += times[name] * count
    return times
