"""How well a run of configs/nano_vision.py reads lines of handwritten digits that no training document has shown.

python -m benchmarks.digits runs/nano_vision --count 500

Prints the share of digits and of whole lines that are right, and the same with every pixel 0: a model that reads them
from the text around them would not get worse by that. Chance is 10 % and 0.1 %.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from k3jax.data.digits import encode_png, lines
from k3jax.data.images import open_item, prompt
from k3jax.data.patches import arrange
from k3jax.data.tokenizers import MEDIA_TOKEN
from k3jax.generate import Loaded, load
from k3jax.model.k3 import K3
from k3jax.model.vision import Images


@dataclass(frozen=True)
class Accuracy:
    """Shares in [0, 1]."""

    digits: float
    lines: float

    def __str__(self) -> str:
        return f"{100 * self.digits:5.1f} % of digits, {100 * self.lines:5.1f} % of lines"


@partial(jax.jit, static_argnames=("first", "digits"))
def _read(model: K3, bias: jax.Array, tokens_BT: jax.Array, images: Images, *, first: int, digits: int) -> jax.Array:
    """The likeliest continuation [B, digits] of prompts of `first` tokens, one token after the other."""

    def step(i: int, tokens_BT: jax.Array) -> jax.Array:
        at = first + i
        x, _ = model.features(tokens_BT, images=images, router_bias=bias)
        logits = model.logits(jax.lax.dynamic_slice_in_dim(x, at - 1, 1, axis=1))
        return jax.lax.dynamic_update_slice_in_dim(tokens_BT, jnp.argmax(logits, -1).astype(jnp.int32), at, axis=1)

    return jax.lax.fori_loop(0, digits, step, tokens_BT)[:, first:]


def measure(loaded: Loaded, *, count: int = 500, digits: int = 3, blank: bool = False, seed: int = 0) -> Accuracy:
    """Accuracy on `count` lines of held-out digits; `blank`: with every pixel 0."""
    config, tokenizer = loaded.config, loaded.tokenizer
    vision = config.model.vision
    assert vision is not None, "the run has no tower"
    shown = lines(held_out=True, count=count, digits=digits, seed=seed)
    items = [
        open_item(encode_png(pixels * (not blank)), "line", vision, config.data.images.patches) for pixels, _ in shown
    ]
    prompts = np.array([prompt(item, tokenizer, vision.merge) for item in items], np.int32)
    tokens = np.pad(prompts, ((0, 0), (0, digits)))
    packed = arrange(
        [[item] for item in items],
        tokens,
        media_token=tokenizer.special_tokens[MEDIA_TOKEN],
        rows=count,
        patches=len(items[0].patches),
        merge=vision.merge,
        patch_size=vision.patch_size,
    )
    images = Images.of({name: jnp.asarray(array) for name, array in packed.items()})
    assert images is not None
    read = _read(loaded.model, loaded.router_bias, jnp.asarray(tokens), images, first=prompts.shape[1], digits=digits)
    right = np.array(
        [[tokenizer.id_bytes(int(t)) == d.encode() for t, d in zip(row, label)] for row, (_, label) in zip(read, shown)]
    )
    return Accuracy(float(right.mean()), float(right.all(axis=1).mean()))


def main(run_dir: Annotated[Path, tyro.conf.Positional], /, count: int = 500, digits: int = 3) -> None:
    """Reads lines of held-out digits.

    Args:
        run_dir: directory of a training run.
        count: number of lines.
        digits: in a line.
    """
    loaded = load(run_dir)
    print(f"step {loaded.step}, {count} lines of {digits} digits")
    for blank in (False, True):
        print(
            f"{'pixels 0' if blank else 'pixels':10s}{measure(loaded, count=count, digits=digits, blank=blank)}",
            flush=True,
        )


if __name__ == "__main__":
    tyro.cli(main)
