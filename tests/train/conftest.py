"""Fixtures of the training tests: synthetic text, and short runs of the model of `micro.py`."""

import random

import jax
import pytest
from micro import micro_config

from k3jax.config import RunConfig


@pytest.fixture(autouse=True, scope="session")
def quick_compilation():
    """These programs run for milliseconds: compiling them is all the time they take, here and in child processes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
        jax.config.update("jax_disable_most_optimizations", True)
        yield
        jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory):
    """60 files of about 1 kB, the same ones every time."""
    folder, rng = tmp_path_factory.mktemp("text"), random.Random(0)
    words = ["".join(rng.choices("abcdefghij", k=rng.randint(1, 8))) for _ in range(200)]
    for number in range(60):
        text = " ".join(rng.choices(words, k=rng.randint(100, 250)))
        (folder / f"{number:02d}.txt").write_text(text)
    return folder


@pytest.fixture
def micro_run(tmp_path, text_folder):
    """`micro_run(train={...}, data={...})`: a `micro_config` under `tmp_path`."""

    def build(**parts) -> RunConfig:
        return micro_config(text_folder, tmp_path / "run", **parts)

    return build
