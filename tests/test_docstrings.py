"""Examples in docstrings do what they say."""

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in (ROOT / "k3jax").rglob("*.py")
    if ">>>" in path.read_text()
)
COMPILES_A_MODEL = {"k3jax.model.k3"}


def test_some_docstrings_have_examples():
    assert "k3jax.model.k3" in MODULES


@pytest.mark.parametrize(
    "name", [pytest.param(m, marks=pytest.mark.slow if m in COMPILES_A_MODEL else ()) for m in MODULES]
)
def test_examples_of_docstrings_give_what_they_show(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)  # they name files of configs/
    failed, tried = doctest.testmod(importlib.import_module(name))
    assert tried, "no docstring holds the >>> of this file"
    assert not failed
