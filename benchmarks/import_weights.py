"""Import of a checkpoint in the released layout: host memory beyond the model, and time against reading the bytes.

    python -m benchmarks.import_weights            # writes 4.3 GiB to a temporary folder, and removes it

Rounds alternate between plain sequential reading of the files, into one buffer ("read") and into memory that stays
("kept"), and `load_pretrained`, in one process. Before each the
files are dropped from the page cache (where the system allows it); `--warm` leaves them there.
"""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import os
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import jax
import ml_dtypes
import numpy as np
import tyro

from benchmarks.common import device_line, write_results
from k3jax.checkpoint import export
from k3jax.checkpoint.hf_config import QUANTIZATION, config_to_hf
from k3jax.checkpoint.layout import leaves
from k3jax.checkpoint.load import HOST_BYTES, load_pretrained
from k3jax.checkpoint.safetensors_io import DTYPES, Writer
from k3jax.config import ModelConfig, proxy

GIB = 1 << 30


@dataclass(frozen=True)
class Arguments:
    """What to measure."""

    experts: int = 90
    """Routed experts a layer; 90 make 4.3 GiB."""
    rounds: int = 3
    packed: bool = False
    """MXFP4 experts, which are decoded to bfloat16."""
    warm: bool = False
    """Leave the files in the page cache."""
    shard_gb: float = 0.5
    folder: str | None = None
    """Where the temporary folder is made."""
    save: bool = False
    """Write the rows to benchmarks/results."""


def write_checkpoint(config: ModelConfig, directory: Path, max_shard_bytes: int, *, packed: bool = False) -> list[Path]:
    """A checkpoint of finite random numbers."""
    tensors = export.plan_tensors(leaves(config), "BF16", packed=packed)
    files = export.plan_files(tensors, max_shard_bytes)
    rng = np.random.default_rng(0)
    pattern = rng.standard_normal(1 << 22).astype(ml_dtypes.bfloat16)
    codes, scales = (rng.integers(low, high, 1 << 22, np.uint8) for low, high in ((0, 255), (118, 124)))
    writer = Writer(directory, files)
    for name, (dtype, shape) in tensors.items():
        kind = scales if name.endswith("_scale") else codes if dtype == "U8" else pattern
        value = np.resize(kind, shape).astype(DTYPES[dtype])
        if name.endswith("A_log"):
            value[config.kda.num_heads :] = 0
        writer.write(name, shape, [(0, size) for size in shape], value)
    writer.close()
    values = config_to_hf(config, "bfloat16")
    if packed:
        values["text_config"]["quantization_config"] = QUANTIZATION
    export.write_metadata(directory, files, values)
    return [directory / file for file in files]


def drop_from_cache(files: list[Path]) -> None:
    for file in files:
        fd = os.open(file, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def read_all(files: list[Path]) -> float:
    """Seconds that plain sequential reading takes."""
    buffer = bytearray(16 << 20)
    begin = time.perf_counter()
    for file in files:
        with file.open("rb", buffering=0) as opened:
            while opened.readinto(buffer):
                pass
    return time.perf_counter() - begin


def keep_all(files: list[Path]) -> float:
    """Seconds that reading takes into memory which stays, as a model's does: a system clears it first."""
    begin = time.perf_counter()
    _ = [np.fromfile(file, np.uint8) for file in files]
    return time.perf_counter() - begin


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Peak:
    """The largest resident size while it is entered, beyond that at its beginning."""

    def __enter__(self) -> Peak:
        self.begin = self.highest = resident()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._stop.wait(0.005):
            self.highest = max(self.highest, resident())

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.highest = max(self.highest, resident())

    @property
    def more(self) -> int:
        return self.highest - self.begin


def measure(directory: Path, files: list[Path], warm: bool) -> dict[str, float]:
    """One round: seconds of reading and of importing, and GiB that the import took beyond its arrays."""
    seconds = []
    for read in (read_all, keep_all):
        if not warm:
            drop_from_cache(files)
        ctypes.CDLL(None).malloc_trim(0)  # else what was freed before would be used again and not seen
        seconds.append(read(files))
    if not warm:
        drop_from_cache(files)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with Peak() as peak:
        begin = time.perf_counter()
        loaded = jax.block_until_ready(load_pretrained(directory))
        importing = time.perf_counter() - begin
    arrays = sum(leaf.nbytes for leaf in jax.tree.leaves((loaded.model, loaded.router_bias)))
    beyond = (peak.more - arrays) / GIB
    ratios = {"ratio": importing / seconds[0], "ratio_kept": importing / seconds[1]}
    return {"read_s": seconds[0], "kept_s": seconds[1], "import_s": importing, **ratios, "beyond_gib": beyond}


def main(args: Arguments) -> None:
    base = proxy(param_dtype="bfloat16")
    config = dataclasses.replace(base, moe=dataclasses.replace(base.moe, num_experts=args.experts))
    print(device_line())
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        files = write_checkpoint(config, Path(folder), int(args.shard_gb * 1e9), packed=args.packed)
        size = sum(file.stat().st_size for file in files)
        print(f"{size / GIB:.2f} GiB in {len(files)} files, {'warm' if args.warm else 'dropped from the page cache'}")
        rows = []
        for _ in range(args.rounds):
            row = measure(Path(folder), files, args.warm)
            rows.append(row | {"bytes": size, "warm": args.warm, "packed": args.packed})
            print("  ".join(f"{name} {value:.2f}" for name, value in row.items()))
    ratio, kept = (median(row[name] for row in rows) for name in ("ratio", "ratio_kept"))
    beyond = max(row["beyond_gib"] for row in rows)
    print(f"medians: {ratio:.2f} of reading, {kept:.2f} of reading into memory that stays")
    print(f"at most {beyond:.2f} GiB beyond the arrays (bound {HOST_BYTES / GIB:.2f})")
    if args.save:
        print(write_results("import_weights", rows))


if __name__ == "__main__":
    main(tyro.cli(Arguments))
