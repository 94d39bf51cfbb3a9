"""Seconds per GB from a trainer's devices to a consumer's, by directory, by stream and in one process.

    python -m benchmarks.publish [--gigabytes 1] [--rounds 3] [--folder DIR] [--no-write]

All in one process, side by side: an Orbax checkpoint of the same arrays written and read back (what publication is
measured against), then versions of the weights as they are and with MXFP4 experts. A version's way includes all that it
is proved by: checksums on both sides, the canary on both sides. GB are those of the weights in the trainer's memory,
10⁹ bytes. Files are read just after they were written, so from the page cache; `--folder /dev/shm/x` leaves out the
disk altogether.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.common import device_line, write_results
from k3jax.checkpoint.publish import Directory, Follower, Publisher, Stream
from k3jax.checkpoint.store import CheckpointStore, RunRecord
from k3jax.checkpoint.version import PublishedWeights, snapshot
from k3jax.config import ExpertFormat, PublishConfig, RunConfig, TrainConfig, proxy
from k3jax.model.k3 import K3, create

SNAPSHOT = "snapshot (copies, checksums, canary)"


def sized(gigabytes: float) -> RunConfig:
    """The proxy in four layers, with as many experts as make about that many bytes of float32."""
    base = proxy(num_layers=4, mla_layers=(3,), dtype="bfloat16" if jax.default_backend() == "gpu" else "float32")
    experts = max(int((gigabytes * 2.5e8 - 2e8) / (3 * 3 * 768 * 768)), 9)  # the rest has 200M parameters
    return RunConfig(dataclasses.replace(base, moe=dataclasses.replace(base.moe, num_experts=experts)))


def timed(times: dict[str, list[float]], what: str, fn: Callable[[], Any]) -> Any:
    begin = time.perf_counter()
    out = fn()
    if isinstance(out, PublishedWeights):
        jax.block_until_ready(out.arrays)
    elif out is not None:
        jax.block_until_ready(out)
    times.setdefault(what, []).append(time.perf_counter() - begin)
    return out


def places(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


class Ways:
    """The ways that weights take, each measured once a round."""

    def __init__(self, config: RunConfig, model: K3, folder: Path, experts: ExpertFormat) -> None:
        self.config = dataclasses.replace(config, train=TrainConfig(publish=PublishConfig(experts=experts)))
        bias = jnp.zeros((config.model.num_moe_layers, config.model.moe.num_experts), jnp.float32)
        self.tree: dict[str, Any] = {"params": model, "router_bias": bias}
        self.store = CheckpointStore(folder / "checkpoints", keep_last=1)
        directory, stream = Publisher(folder / "published", keep=1), Publisher(None, address="127.0.0.1:0")
        assert stream.address is not None
        self.ways = {
            "directory": (directory, Follower(Directory(folder / "published"))),
            "stream": (stream, Follower(Stream(stream.address))),
        }
        self.beside = Follower()
        self.times: dict[str, list[float]] = {}

    def round(self, step: int) -> None:
        def write() -> None:
            record = RunRecord({}, {}, {}, {})
            self.store.save(step, model=self.tree, training={"step": jnp.int32(step)}, record=record)
            self.store.wait()

        timed(self.times, "checkpoint: write", write)
        timed(self.times, "checkpoint: read", lambda: self.store.load("model", places(self.tree), step))
        weights, bias = self.tree["params"], self.tree["router_bias"]
        version = timed(
            self.times,
            SNAPSHOT,
            lambda: snapshot(weights, bias, version=step, config=self.config, prompt=[1, 2, 3]),
        )
        self.sent = sum(x.nbytes for x in version.arrays.values()) / 1e9
        timed(self.times, "in one process: move, prove and swap", lambda: self.beside.take(version))
        for name, (publisher, follower) in self.ways.items():

            def publish(publisher: Publisher = publisher) -> None:
                publisher.publish(version)
                publisher.wait()

            timed(self.times, f"{name}: publish", publish)
            if not timed(self.times, f"{name}: read, prove and swap", follower.poll):
                raise RuntimeError(f"the follower of the {name} took nothing; see above")

    def close(self) -> None:
        self.store.close()
        for publisher, _ in self.ways.values():
            publisher.close()


def bench(config: RunConfig, model: K3, folder: Path, rounds: int, experts: ExpertFormat) -> list[dict[str, Any]]:
    """Rows of one format of the experts."""
    ways = Ways(config, model, folder, experts)
    ways.round(0)  # compiles
    ways.times.clear()
    for step in range(1, rounds + 1):
        ways.round(step)
    ways.close()
    size = sum(x.nbytes for x in jax.tree.leaves(model)) / 1e9
    whole = {
        "checkpoint": ("checkpoint: write", "checkpoint: read"),
        **{name: (SNAPSHOT, f"{name}: publish", f"{name}: read, prove and swap") for name in ("directory", "stream")},
        "in one process": (SNAPSHOT, "in one process: move, prove and swap"),
    }
    rows = [(what, seconds) for what, seconds in ways.times.items()]
    rows += [
        (f"{name}: whole way", [sum(parts) for parts in zip(*(ways.times[p] for p in whole[name]))]) for name in whole
    ]
    baseline = median(dict(rows)["checkpoint: whole way"])
    geometry = config.model
    moe = geometry.moe
    shape = (
        f"{geometry.num_layers} layers of {geometry.hidden_size}, {geometry.num_moe_layers} with {moe.num_experts} "
        f"experts of {moe.latent_size} x {moe.expert_size}, {geometry.param_dtype}"
    )
    print(f"\n{shape}")
    print(f"experts {experts}: {size:.2f} GB of weights, {ways.sent:.2f} GB a version")
    out = []
    for what, seconds in rows:
        ratio = median(seconds) / baseline
        print(
            f"{what:<40} {median(seconds) / size:7.3f} s/GB ({min(seconds):.2f}–{max(seconds):.2f} s)  {ratio:6.2f} ×"
        )
        out.append(
            {
                "what": what,
                "experts": experts,
                "shape": shape,
                "rounds": rounds,
                "weights_gb": round(size, 3),
                "version_gb": round(ways.sent, 3),
                "median_s": round(median(seconds), 3),
                "min_s": round(min(seconds), 3),
                "max_s": round(max(seconds), 3),
                "s_per_gb": round(median(seconds) / size, 4),
                "of_checkpoint": round(ratio, 3),
            }
        )
    return out


def main(gigabytes: float, rounds: int, folder: str | None, write: bool) -> None:
    print(device_line())
    config, rows = sized(gigabytes), []
    model = create(config.model)
    for experts in ("plain", "mxfp4"):
        with tempfile.TemporaryDirectory(dir=folder) as place:
            rows += bench(config, model, Path(place), rounds, experts)
    if write:
        print("written to", write_results("publish", rows))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0, help="of float32 parameters, at least 1")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", help="where files go; the system's temporary folder if left out")
    parser.add_argument("--no-write", action="store_true", help="print only")
    options = parser.parse_args()
    main(options.gigabytes, options.rounds, options.folder, not options.no_write)
