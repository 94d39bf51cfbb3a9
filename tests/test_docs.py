"""What the documentation names exists: files, tests, configuration fields, modules."""

import ast
import dataclasses
import functools
import re
import typing
from pathlib import Path

import pytest

from k3jax.config import LaunchConfig, RunConfig

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
ROOMS = ("k3jax", "tests", "configs", "benchmarks", "notebooks", "docs")
GROUPS = ("model", "data", "mesh", "optimizer", "train", "launch")

SPAN = re.compile(r"`([^`\n]+)`")
FILE = re.compile(rf"(?:{'|'.join(ROOMS)})/[\w./-]*")
FIELD = re.compile(rf"(?:{'|'.join(GROUPS)})(?:\.\w+)+")
OPTION = re.compile(rf"--((?:{'|'.join(GROUPS)})\.[\w.-]+)")


@functools.cache
def names_of_tests() -> set[str]:
    files = list((ROOT / "tests").rglob("*.py"))
    nodes = (node for path in files for node in ast.parse(path.read_text()).body)
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef)} | {path.stem for path in files}


def is_field(name: str) -> bool:
    kind: typing.Any = RunConfig
    if name.startswith("launch."):
        kind, name = LaunchConfig, name.removeprefix("launch.")
    for part in name.replace("-", "_").split("."):
        options = [o for o in (kind, *typing.get_args(kind)) if dataclasses.is_dataclass(o)]
        if not options or part not in {field.name for field in dataclasses.fields(options[0])}:
            return False
        kind = typing.get_type_hints(options[0])[part]
    return True


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_what_a_page_names_exists(page: Path):
    text, known = page.read_text(), names_of_tests()
    spans = SPAN.findall(text)
    files = [span for span in spans if FILE.fullmatch(span) and "DIR" not in span]
    tests = [span for span in spans if re.fullmatch(r"test_\w+", span)]
    fields = [span for span in spans if FIELD.fullmatch(span) and not span.endswith((".py", ".md"))]
    missing = [file for file in files if not (ROOT / file).exists()]
    missing += [test for test in tests if test not in known]
    missing += [field for field in [*fields, *OPTION.findall(text)] if not is_field(field.rstrip("."))]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_rows_of_a_table_have_as_many_cells(page: Path):
    """A bar inside a cell, also in code, would begin another one."""
    lines = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL).splitlines()
    for above, line in zip(lines, lines[1:]):
        if above.startswith("|") and line.startswith("|"):
            assert line.count("|") == above.count("|"), line


@pytest.mark.parametrize("name", ["train.publish.experts", "model.vision.norm_eps", "launch.timeout"])
def test_fields_are_found(name: str):
    assert is_field(name)


@pytest.mark.parametrize("name", ["train.nothing", "model.vision.nothing", "train.steps.nothing"])
def test_fields_that_are_none_are_not_found(name: str):
    assert not is_field(name)
