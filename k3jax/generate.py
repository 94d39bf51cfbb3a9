"""Text from a trained model: one prefill pass, then cached decoding token by token.

    python -m k3jax.generate RUN_DIR --prompt "def " --max-tokens 200 --temperature 0.8 --top-p 0.95 --seed 1
    python -m k3jax.generate RUN_DIR --image a.png b.png --prompt "<image> and <image> show "
    python -m k3jax.generate RUN_DIR/published --follow     # a text from every version that a run publishes there
    python -m k3jax.generate HOST:PORT --follow             # the same from train.publish.address

The cache holds KDA states and convolution tails (constant size) and MLA latents (one row a token); a decode step uses
the absorbed form of MLA. Prefill plus decode equals one full pass.
"""

from __future__ import annotations

import math
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from k3jax.checkpoint.publish import Directory, Follower, Served, Source, Stream
from k3jax.checkpoint.store import CheckpointError, CheckpointStore
from k3jax.config import ConfigError, RunConfig, VisionConfig, from_dict
from k3jax.data.images import ImageSource, Item, open_item
from k3jax.data.images import prompt as image_prompt
from k3jax.data.patches import arrange
from k3jax.data.records import between_images
from k3jax.data.sources import DataError
from k3jax.data.tokenizers import MEDIA_TOKEN, StreamDecoder, Tokenizer, check_tokens, load_tokenizer
from k3jax.model.k3 import K3, Cache, init_cache
from k3jax.model.quantize import served
from k3jax.model.vision import Images, require_tower
from k3jax.sharding import place, shardings
from k3jax.train.state import abstract_params

TEMPERATURE = 0.8
"""Of every text that is not told another one: here, on the command line, and of a run's samples."""
_BUCKET = 64  # prompts are padded on the left to a multiple, so that few lengths are compiled


@dataclass(frozen=True)
class Loaded:
    """A trained model and what is needed to use it."""

    model: K3
    router_bias: jax.Array
    tokenizer: Tokenizer
    config: RunConfig
    step: int


def load(run_dir: str | Path, step: int | None = None) -> Loaded:
    """Model, router biases and tokenizer of a run (default: its latest checkpoint); optimizer state is not read.

    Arrays land on the current mesh, or on the first device when none is set. Routed experts of a run with
    `model.moe.qat` are held as MXFP4 codes (`k3jax.model.quantize`).

    Raises:
        CheckpointError: no checkpoint there.
    """
    store = CheckpointStore(Path(run_dir) / "checkpoints", read_only=True)
    try:
        step = step if step is not None else store.latest
        config = from_dict(RunConfig, store.read_record(step).config)
        shapes = {
            "params": abstract_params(config.model),
            "router_bias": jax.ShapeDtypeStruct(
                (config.model.num_moe_layers, config.model.moe.num_experts), jnp.float32
            ),
        }
        mesh = jax.sharding.get_mesh()
        device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        places = jax.tree.map(lambda _: device, shapes) if mesh.empty else shardings(shapes, mesh)
        abstract = jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), shapes, places)
        loaded = store.load("model", abstract, step)
    finally:
        store.close()
    params = served(loaded["params"], config.model)
    return Loaded(params, loaded["router_bias"], load_tokenizer(config.data.tokenizer), config, step or 0)


def sample(logits_BV: jax.Array, key: jax.Array, temperature: jax.Array, top_p: jax.Array) -> jax.Array:
    """Draws ids [B] from logits; temperature 0 takes the most likely, `top_p` keeps the smallest likeliest set.

    The likeliest token is always kept.
    """
    scaled = logits_BV.astype(jnp.float32) / jnp.maximum(temperature, 1e-6)
    order = jnp.argsort(-scaled, axis=-1)
    probabilities = jax.nn.softmax(jnp.take_along_axis(scaled, order, axis=-1), axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    kept = jnp.where(before < top_p, jnp.log(probabilities), -jnp.inf)
    drawn = jax.random.categorical(key, kept.at[:, 0].max(jnp.log(probabilities[:, 0])))
    drawn = jnp.where(temperature <= 0, 0, drawn)
    return jnp.take_along_axis(order, drawn[:, None], axis=-1)[:, 0].astype(jnp.int32)


@jax.jit
def prefill(
    model: K3,
    router_bias: jax.Array,
    tokens_BT: jax.Array,
    segment_ids: jax.Array,
    cache: Cache,
    images: Images | None = None,
) -> tuple[jax.Array, Cache]:
    """Logits after the last token [B, V] and the filled cache; padding stands on the left."""
    x, aux = model.features(tokens_BT, segment_ids, images=images, router_bias=router_bias, cache=cache)
    assert aux.cache is not None
    return place(model.logits(x[:, -1:])[:, 0]), aux.cache


@partial(jax.jit, donate_argnames="cache")
def decode(model: K3, router_bias: jax.Array, token_B: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
    """Logits after one more token [B, V] and the cache with it."""
    x, aux = model.features(token_B[:, None], router_bias=router_bias, cache=cache)
    assert aux.cache is not None
    return place(model.logits(x[:, -1:])[:, 0]), aux.cache


_sample = jax.jit(sample)


def generate_tokens(
    model: K3,
    router_bias: jax.Array,
    prompt: list[int],
    *,
    max_tokens: int,
    temperature: float = TEMPERATURE,
    top_p: float = 1.0,
    seed: int = 0,
    stop: int | None = None,
    items: Sequence[Item] = (),
    media_token: int = -1,
) -> Iterator[int]:
    """Ids one by one, until `max_tokens` or the id `stop`, which is not among them; arguments are checked by the call.

    Args:
        router_bias: float32 [MoE layers, E].
        prompt: ids below the model's vocabulary.
        temperature: 0 takes the most likely id.
        items: images of the prompt, in order; one `media_token` in the prompt stands for each of their features.

    Raises:
        ValueError: an empty prompt, a negative temperature or number of tokens, `top_p` outside (0, 1], or images that
            are not those of the prompt (`DataError`) or that the model cannot take.
    """
    if not prompt:
        raise ValueError("the prompt is empty: give at least one token (the tokenizer's bos_id, for instance)")
    if not 0 <= temperature < math.inf or not 0 < top_p <= 1:
        raise ValueError(f"temperature must be ≥ 0 and top_p in (0, 1], got {temperature} and {top_p}")
    if max_tokens < 0:
        raise ValueError(f"max_tokens must be ≥ 0, got {max_tokens}")
    padded = -(-len(prompt) // _BUCKET) * _BUCKET
    length = -(-(padded + max_tokens) // _BUCKET) * _BUCKET
    tokens = np.zeros((1, padded), np.int32)
    tokens[0, padded - len(prompt) :] = prompt
    segment_ids = (np.arange(padded) >= padded - len(prompt)).astype(np.int32)[None]
    images = _images(model, tokens, items, media_token)

    def ids() -> Iterator[int]:
        key, cache = jax.random.key(seed), init_cache(model.config, 1, length)
        logits, cache = prefill(model, router_bias, jnp.asarray(tokens), jnp.asarray(segment_ids), cache, images)
        for i in range(max_tokens):
            drawn = _sample(logits, jax.random.fold_in(key, i), jnp.float32(temperature), jnp.float32(top_p))
            token = int(drawn[0])
            if token == stop:
                return
            yield token
            if i + 1 < max_tokens:
                logits, cache = decode(model, router_bias, drawn, cache)

    return ids()


def _images(model: K3, tokens: np.ndarray, items: Sequence[Item], media_token: int) -> Images | None:
    """The images of a prompt, in one row of patches whose length is a power of two of groups."""
    if not items:
        return None
    vision = require_tower(model.config.vision)
    group = vision.merge**2
    groups = sum(len(item.patches) for item in items) // group
    options = {"merge": vision.merge, "patch_size": vision.patch_size}
    patches = group << (groups - 1).bit_length()
    packed = arrange([items], tokens, media_token=media_token, rows=1, patches=patches, **options)
    return Images.of({name: jnp.asarray(array) for name, array in packed.items()})


def encode_prompt(
    text: str, images: Sequence[ImageSource], tokenizer: Tokenizer, vision: VisionConfig | None
) -> tuple[list[int], list[Item]]:
    """Ids of a prompt and its images, read in the order of the text's `<image>`s; without one they come first.

    Raises:
        ImageError: an image that cannot be used (which), or not one for each `<image>`.
        ValueError: images for a model without a tower.
    """
    if not images:
        return tokenizer.encode(text), []
    vision = require_tower(vision)
    pieces = between_images(text, len(images), "the prompt")
    ids, items = tokenizer.encode(pieces[0]), []
    for number, (image, piece) in enumerate(zip(images, pieces[1:]), 1):
        items.append(open_item(image, str(image) if isinstance(image, str | Path) else f"image {number}", vision))
        ids += image_prompt(items[-1], tokenizer, vision.merge) + tokenizer.encode(piece)
    return ids, items


def stream_text(
    model: K3,
    router_bias: jax.Array,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    max_tokens: int = 200,
    temperature: float = TEMPERATURE,
    top_p: float = 1.0,
    seed: int = 0,
    images: Sequence[ImageSource] = (),
) -> Iterator[str]:
    """The continuation of `prompt` as pieces of text, as soon as each is complete; stops at end of text.

    Prompt and images are read when it is called, so what is wrong with them is raised before the first piece.

    Args:
        router_bias: float32 [MoE layers, E].
        max_tokens: how many tokens to add at most.
        temperature: 0 is greedy.
        top_p: nucleus; 1 keeps all.
        images: files, their contents or `PIL.Image`s, for the `<image>`s of the prompt; see `encode_prompt`.

    Raises:
        DataError: the prompt holds an id outside the model's vocabulary, or an image cannot be used.
        ValueError: see `generate_tokens`.
    """
    ids, items = encode_prompt(prompt, images, tokenizer, model.config.vision)
    ids = ids or [tokenizer.bos_id]
    check_tokens(ids, tokenizer, model.config.vocab_size)
    decoder = StreamDecoder(tokenizer)
    tokens = generate_tokens(
        model,
        router_bias,
        ids,
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        stop=tokenizer.eos_id,
        items=items,
        media_token=tokenizer.special_tokens[MEDIA_TOKEN],
    )

    def pieces() -> Iterator[str]:
        for token in tokens:
            yield decoder.feed(token) if token < tokenizer.vocab_size else "\N{REPLACEMENT CHARACTER}"
        yield decoder.flush()

    return pieces()


def generate_text(
    model: K3,
    router_bias: jax.Array,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    max_tokens: int = 200,
    temperature: float = TEMPERATURE,
    top_p: float = 1.0,
    seed: int = 0,
    images: Sequence[ImageSource] = (),
) -> str:
    """The prompt and its continuation as one string; arguments as for `stream_text`."""
    pieces = stream_text(
        model,
        router_bias,
        tokenizer,
        prompt,
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        images=images,
    )
    return prompt + "".join(pieces)


def source_of(place: str) -> Source:
    """Where versions are: HOST:PORT, or a directory."""
    return Stream(place) if re.fullmatch(r"[^/]+:\d+", place) else Directory(place)


def versions(source: Source, seconds: float = 1.0) -> Iterator[Served]:
    """Yields what a run publishes, from the newest version that is there on, while the next ones load behind.

    A text that is being written keeps its version: what was yielded does not change. Ends with `GeneratorExit` only.
    """
    follower = Follower(source, report=lambda reason: print(f"[{reason}]", file=sys.stderr))
    last = None
    with follower.following(seconds):
        while True:
            served = follower.current
            if served is None or served is last:
                time.sleep(seconds / 10)
                continue
            last = served
            yield served


def main(
    run_dir: Annotated[str, tyro.conf.Positional],
    /,
    prompt: str = "def ",
    max_tokens: int = 200,
    temperature: float = TEMPERATURE,
    top_p: float = 1.0,
    seed: int = 0,
    step: int | None = None,
    follow: bool = False,
    image: tuple[Path, ...] = (),
) -> None:
    """Continue a prompt with a trained model, streaming.

    Args:
        run_dir: directory of a training run; with `follow` where it publishes, a directory or HOST:PORT.
        prompt: text to continue.
        max_tokens: how many tokens to add at most.
        temperature: 0 is greedy.
        top_p: nucleus; 1 keeps all.
        seed: same seed, same text.
        step: checkpoint to use; the latest if left out.
        image: files that the model sees where the prompt says <image>, or before it if it does not.
        follow: a continuation from every version that the run publishes (train.publish), until interrupted.
    """
    options = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "seed": seed, "images": image}
    if not follow:
        loaded = load(run_dir, step)
        _print_text(stream_text(loaded.model, loaded.router_bias, loaded.tokenizer, prompt, **options), prompt)
        return
    if step is not None:
        raise ConfigError(
            "--step chooses a checkpoint, --follow takes every version that is published: give one of them"
        )
    for published in versions(source_of(run_dir)):
        print(f"[version {published.version}]")
        tokenizer = load_tokenizer(published.config.data.tokenizer)
        _print_text(stream_text(published.model, published.router_bias, tokenizer, prompt, **options), prompt)


def _print_text(pieces: Iterator[str], prompt: str) -> None:
    print(prompt, end="", flush=True)
    for piece in pieces:
        print(piece, end="", flush=True)
    print()


if __name__ == "__main__":
    try:
        tyro.cli(main)
    except KeyboardInterrupt:
        print()
    except (CheckpointError, ConfigError, DataError, ValueError) as error:
        sys.exit(f"error: {error}")
