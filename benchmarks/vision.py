"""A training step with images against one of text alone, with the same number of tokens, in one process.

    python -m benchmarks.vision configs/proxy_vision.py --share 0.1 --steps 20

Of each row `share` of the tokens are images of `side` × `side` tokens with random pixels. The steps alternate. Prints
medians and spread, the throughput with images as a share of that without, and the tower's part of the operations.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from typing import Annotated, Any

import jax
import numpy as np
import tyro

from benchmarks.common import device_line, write_results
from benchmarks.train_step import set_up
from k3jax.config import ImagesConfig, RunConfig, VisionConfig
from k3jax.data.images import Item
from k3jax.data.tokenizers import MEDIA_TOKEN
from k3jax.model.vision import require_tower
from k3jax.sharding import make_mesh
from k3jax.train import flops
from k3jax.train.batch import patch_rows, place_batch
from k3jax.train.config_file import load_config


@dataclasses.dataclass(frozen=True)
class Arguments:
    """What to time."""

    config: Annotated[RunConfig, tyro.conf.arg(name="")]
    share: float = 0.1
    """Of the tokens."""
    side: int = 16
    """Of an image, in tokens."""
    steps: int = 20


def images_in_a_row(length: int, share: float, side: int) -> int:
    """How many images of `side` × `side` tokens are nearest to `share` of a row."""
    count = round(share * length / side**2)
    if not count:
        sys.exit(f"error: {share} of {length} tokens is no image of {side} × {side}")
    return count


def with_images(batch: dict[str, Any], vision: VisionConfig, media: int, count: int, side: int) -> dict[str, Any]:
    """A batch of text whose rows begin with `count` images; the loss is not on their tokens."""
    grid, rng = (1, side * vision.merge, side * vision.merge), np.random.default_rng(0)
    shape = (grid[1] * grid[2], 3 * vision.patch_size**2)
    pixels = (grid[2] * vision.patch_size, grid[1] * vision.patch_size)
    tokens, mask = batch["tokens"].copy(), batch["loss_mask"].copy()
    tokens[:, : count * side**2] = media
    mask[:, : count * side**2] = False
    items = [[Item(rng.integers(0, 256, shape, dtype=np.uint8), grid, pixels) for _ in range(count)] for _ in tokens]
    return batch | {"tokens": tokens, "loss_mask": mask, "images": items}


def main(arguments: Arguments) -> None:
    """Times both steps."""
    config, vision = arguments.config, require_tower(arguments.config.model.vision)
    count = images_in_a_row(config.data.sequence_length, arguments.share, arguments.side)
    patches = count * (arguments.side * vision.merge) ** 2
    images = ImagesConfig(source="random", share=1.0, patches=patches)
    packed = dataclasses.replace(config, data=dataclasses.replace(config.data, images=images))
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, images=ImagesConfig()))
    print(device_line())
    mesh = make_mesh(config.mesh)
    with jax.set_mesh(mesh):
        data, state, step = set_up(config, mesh)
        media = data.tokenizer.special_tokens[MEDIA_TOKEN]
        rows = patch_rows(packed, mesh, media)
        with data.train_loader() as loader:
            text = next(loader)
        seen = with_images(text, vision, media, count, arguments.side)
        batches = {"text": place_batch(text, config.train.accumulation, mesh)}
        batches["images"] = place_batch(seen, config.train.accumulation, mesh, rows)
        compiled = {name: step.lower(state, batch).compile() for name, batch in batches.items()}
        times: dict[str, list[float]] = {name: [] for name in batches}
        for _ in range(arguments.steps + 2):
            for name, batch in batches.items():
                begin = time.perf_counter()
                state, metrics = compiled[name](state, batch)
                jax.block_until_ready(metrics)
                times[name].append(1e3 * (time.perf_counter() - begin))
    row: dict[str, Any] = {"share": arguments.share, "side": arguments.side}
    for name, values in times.items():
        ms = np.array(values[2:])
        row[name] = {"ms": float(np.median(ms)), "min": float(ms.min()), "max": float(ms.max())}
        print(f"{name:7s}{row[name]['ms']:9.1f} ms a step ({ms.min():.1f}-{ms.max():.1f}, n = {len(ms)})")
    of_text = flops.flops_per_token(config.model, config.data.sequence_length) * text["tokens"].size
    tower = flops.tower_flops(config.model, [item.grid for items in seen["images"] for item in items])
    row |= {"throughput": row["text"]["ms"] / row["images"]["ms"], "tower_of_operations": tower / (tower + of_text)}
    print(f"throughput with images {row['throughput']:.1%}; tower {row['tower_of_operations']:.1%} of the operations")
    print(f"written to {write_results('vision', [row])}")


if __name__ == "__main__":
    main(tyro.cli(Arguments, args=sys.argv[2:], default=Arguments(load_config(sys.argv[1]))))
