"""Sampling and cached generation."""

import inspect
import io
import itertools
import subprocess
import sys
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import micro
from PIL import Image

from k3jax import generate
from k3jax.checkpoint.publish import Publisher
from k3jax.checkpoint.version import PublishedWeights, snapshot
from k3jax.config import ConfigError, RunConfig, VisionConfig, moonvit
from k3jax.data.digits import encode_png
from k3jax.data.images import ImageError
from k3jax.data.patches import arrange
from k3jax.data.tokenizers import load_tokenizer
from k3jax.generate import (
    Loaded,
    encode_prompt,
    generate_text,
    generate_tokens,
    sample,
    source_of,
    stream_text,
    versions,
)
from k3jax.model.k3 import create
from k3jax.model.vision import Images


@lru_cache
def model():
    return create(micro(vocab_size=512), seed=1)


def bias():
    config = model().config
    return jnp.zeros((config.num_moe_layers, config.moe.num_experts), jnp.float32)


def test_greedy_generation_equals_full_passes():
    prompt = [5, 200, 33, 7, 90]
    generated = list(generate_tokens(model(), bias(), prompt, max_tokens=4, temperature=0.0))
    full = jax.jit(lambda m, t: m(t, router_bias=bias()))
    ids = list(prompt)
    for token in generated:
        padded = np.zeros((1, 16), np.int32)
        padded[0, : len(ids)] = ids
        assert token == int(jnp.argmax(full(model(), padded)[0, len(ids) - 1]))
        ids.append(token)


def picture(seed: int, width: int, height: int) -> bytes:
    return encode_png(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def opened(file: bytes) -> Image.Image:
    return Image.open(io.BytesIO(file))


def test_generation_with_images_equals_full_passes():
    tower = VisionConfig(
        hidden_size=16, num_layers=1, num_heads=2, head_dim=8, mlp_size=24, patch_size=2, position_grid=(4, 4)
    )
    seeing, tokenizer = create(micro(vocab_size=512, vision=tower), seed=1), load_tokenizer("bytes")
    ids, items = encode_prompt("a<image>b<image>", [picture(0, 7, 5), picture(1, 4, 4)], tokenizer, tower)
    media = tokenizer.special_tokens["<|media_pad|>"]
    generated = list(
        generate_tokens(seeing, bias(), ids, max_tokens=3, temperature=0.0, items=items, media_token=media)
    )
    full = jax.jit(lambda m, t, i: m(t, images=i, router_bias=bias()))
    for token in generated:
        padded = np.zeros((1, 64), np.int32)
        padded[0, : len(ids)] = ids
        packed = arrange([items], padded, media_token=media, rows=1, patches=32, merge=2, patch_size=2)
        images = Images.of({name: jnp.asarray(array) for name, array in packed.items()})
        assert token == int(jnp.argmax(full(seeing, padded, images)[0, len(ids) - 1]))
        ids.append(token)


def test_images_that_a_prompt_cannot_have_are_refused_by_name():
    tokenizer = load_tokenizer("bytes")
    for image in (picture(0, 4, 4), opened(picture(0, 4, 4))):
        with pytest.raises(ValueError, match="takes no images"):
            encode_prompt("a", [image], tokenizer, None)
    with pytest.raises(ImageError, match="2 <image> in the text, 1 images"):
        encode_prompt("<image><image>", [picture(0, 4, 4)], tokenizer, moonvit())
    with pytest.raises(ImageError, match="nowhere.png"):
        encode_prompt("a", ["nowhere.png"], tokenizer, moonvit())
    with pytest.raises(ImageError, match="image 2: floating-point"):
        encode_prompt("a", [picture(0, 4, 4), Image.new("F", (4, 4))], tokenizer, moonvit())


def test_an_opened_image_is_as_good_as_its_file():
    tokenizer, file = load_tokenizer("bytes"), picture(0, 30, 20)
    (ids, (of_file,)), (same_ids, (of_image,)) = (
        encode_prompt("a<image>", [image], tokenizer, moonvit()) for image in (file, opened(file))
    )
    assert ids == same_ids
    np.testing.assert_array_equal(of_file.patches, of_image.patches)


def test_the_command_prints_no_prompt_before_it_says_what_is_wrong_with_an_image(monkeypatch, capsys):
    run = Loaded(model(), bias(), load_tokenizer("bytes"), None, 0)
    monkeypatch.setattr(generate, "load", lambda *args: run)
    with pytest.raises(ValueError, match="takes no images"):
        generate.main("run", prompt="ab", image=("a.png",))
    assert capsys.readouterr().out == ""


def test_all_ways_to_a_text_have_one_default_temperature():
    defaults = [
        inspect.signature(f).parameters["temperature"].default
        for f in (generate_tokens, generate_text, stream_text, generate.main)
    ]
    assert defaults == [generate.TEMPERATURE] * 4


def test_a_seed_fixes_the_text_and_another_changes_it():
    def text(seed):
        return generate_text(model(), bias(), load_tokenizer("bytes"), "ab", max_tokens=12, seed=seed)

    assert text(0) == text(0) != text(1)


def test_generation_stops_at_the_stop_token():
    tokens = list(generate_tokens(model(), bias(), [1, 2], max_tokens=6, temperature=0.0))
    stopped = list(generate_tokens(model(), bias(), [1, 2], max_tokens=6, temperature=0.0, stop=tokens[0]))
    assert stopped == []


def test_top_p_keeps_the_smallest_likeliest_set():
    logits = jnp.log(jnp.array([[0.5, 0.3, 0.15, 0.05]]))

    def drawn(temperature, top_p):
        keys = jax.random.split(jax.random.key(0), 200)
        draw = jax.vmap(lambda k: sample(logits, k, jnp.float32(temperature), jnp.float32(top_p))[0])
        return set(np.asarray(draw(keys)).tolist())

    assert drawn(0.0, 1.0) == {0}
    assert drawn(1.0, 1e-6) == {0}
    assert drawn(1.0, 0.6) == {0, 1}
    assert drawn(1.0, 1.0) == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt": []}, "prompt is empty"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"max_tokens": -1}, "max_tokens"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    values = {"prompt": [1], "max_tokens": 1} | arguments
    with pytest.raises(ValueError, match=message):
        list(generate_tokens(model(), bias(), values.pop("prompt"), **values))


def test_the_command_runs_without_a_warning():
    command = [sys.executable, "-W", "error::RuntimeWarning", "-m", "k3jax.generate", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "--max-tokens" in done.stdout


def published(version: int) -> PublishedWeights:
    config = RunConfig(micro(num_layers=2, mla_layers=(1,), vocab_size=512))
    weights = create(config.model, seed=version)
    bias = jnp.zeros((1, config.model.moe.num_experts), jnp.float32)
    return snapshot(weights, bias, version=version, config=config, prompt=[1, 2])


@pytest.mark.slow
def test_following_swaps_between_texts_and_never_within_one(tmp_path):
    publisher = Publisher(tmp_path / "later")
    served = versions(source_of(str(tmp_path / "later")), 0.02)
    publisher.publish(published(1))
    first = next(served)
    weights = np.asarray(first.model.embed[...])
    publisher.publish(published(2))
    publisher.close()
    second = next(served)
    assert (first.version, second.version) == (1, 2)
    np.testing.assert_array_equal(np.asarray(first.model.embed[...]), weights)
    assert not np.array_equal(np.asarray(second.model.embed[...]), weights)
    served.close()


def test_the_command_writes_a_text_of_every_version(tmp_path, monkeypatch, capsys):
    publisher = Publisher(tmp_path, address="127.0.0.1:0")
    publisher.publish(published(1))
    real = generate.versions
    monkeypatch.setattr(generate, "versions", lambda source: itertools.islice(real(source, 0.02), 1))
    for source in (str(tmp_path), publisher.address):
        generate.main(source, prompt="ab", max_tokens=3, follow=True)
        assert capsys.readouterr().out.startswith("[version 1]\nab")
    publisher.close()
    with pytest.raises(ConfigError, match="give one of them"):
        generate.main(str(tmp_path), step=3, follow=True)
