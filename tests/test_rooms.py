"""The rooms of the package: who may import whom, read from the sources without importing anything."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "k3jax"

# What each room may import of the others. A new room needs a line here.
_MATHS = {"config", "sharding", "ops", "parallel"}
_LEARNED = _MATHS | {"model"}
_AROUND = _LEARNED | {"data", "checkpoint", "train"}
ROOMS: dict[str, set[str]] = {
    "config": set(),
    "sharding": {"config"},
    "ops": set(),
    "parallel": {"config", "sharding", "ops"},
    "model": _MATHS,
    "data": {"config"},
    "checkpoint": _LEARNED,
    "train": _LEARNED | {"data", "checkpoint"},
    "plan": _AROUND,
    "generate": _AROUND,
    "inspect": _AROUND | {"plan", "generate"},
    "__init__": _AROUND | {"plan", "inspect", "generate"},
}

# (file, what it imports): why
EXCEPTIONS = {
    ("checkpoint/__main__.py", "k3jax.data.sources"): "the command line reports unusable data like anything else",
    ("checkpoint/__main__.py", "k3jax.data.tokenizers"): "an import checks the tokenizer that the run will use",
    ("checkpoint/__main__.py", "k3jax.generate"): "export reads a run as generation does; imported when called",
    ("train/loop.py", "k3jax.generate"): "samples of a run; imported when called, because generation reads runs",
    ("train/report.py", "k3jax"): "the version of the package in the start-up log",
}


def modules_of(path: Path) -> list[str]:
    """Modules of k3jax that a file imports, anywhere in it, under their absolute names."""
    package = ["k3jax", *path.relative_to(PACKAGE).parts[:-1]]
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join(base + ([node.module] if node.module else []))
            # `from k3jax import ops` names a room, `from k3jax.config import nano` a thing in one
            found += [f"k3jax.{alias.name}" for alias in node.names] if module == "k3jax" else [module]
    return [name for name in found if name.split(".")[0] == "k3jax"]


def room_of(module: str) -> str:
    return module.split(".")[1] if "." in module else "__init__"


def imports() -> list[tuple[str, str, str]]:
    """(file, its room, module of another room)."""
    out = []
    for path in sorted(PACKAGE.rglob("*.py")):
        file = path.relative_to(PACKAGE)
        room = file.parts[0].removesuffix(".py")
        out += [(str(file), room, module) for module in modules_of(path) if room_of(module) != room]
    return out


def test_imports_go_from_room_to_room_in_one_direction_only():
    unknown = {room for _, room, _ in imports()} - ROOMS.keys()
    assert not unknown, f"rooms without a line in ROOMS: {unknown}"
    wrong = {(file, module) for file, room, module in imports() if room_of(module) not in ROOMS[room]}
    assert not wrong - EXCEPTIONS.keys(), "imports against the order of rooms"
    assert not EXCEPTIONS.keys() - wrong, "exceptions that are none any more"


def test_the_order_of_rooms_has_no_cycle():
    order: list[str] = []
    while len(order) < len(ROOMS):
        free = [room for room, above in ROOMS.items() if room not in order and above <= set(order)]
        assert free, f"a cycle among {ROOMS.keys() - set(order)}"
        order += free


@pytest.mark.parametrize(
    ("line", "module"),
    [
        ("import k3jax.train.loop", "k3jax.train.loop"),
        ("from k3jax import train", "k3jax.train"),
        ("from k3jax.train import loop as l", "k3jax.train"),
        ("from ..train import loop", "k3jax.train"),
        ("def f():\n    from ..train.loop import train", "k3jax.train.loop"),
    ],
)
def test_every_form_of_an_import_is_seen(line: str, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(f"{__name__}.PACKAGE", tmp_path)
    (tmp_path / "ops").mkdir()
    (tmp_path / "ops" / "a.py").write_text(line)
    assert imports() == [("ops/a.py", "ops", module)]


def test_only_the_store_imports_orbax():
    users = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if any(
            isinstance(node, ast.ImportFrom)
            and (node.module or "").startswith("orbax")
            or isinstance(node, ast.Import)
            and any(alias.name.startswith("orbax") for alias in node.names)
            for node in ast.walk(ast.parse(path.read_text()))
        )
    }
    assert users == {"checkpoint/store.py"}
