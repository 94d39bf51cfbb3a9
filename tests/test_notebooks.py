"""Notebooks exist twice: the .py that is edited, and the .ipynb that people open and `make notebooks` runs."""

from pathlib import Path

import jupytext
import pytest

NOTEBOOKS = Path(__file__).parent.parent / "notebooks"


@pytest.mark.parametrize(
    "stem", sorted({path.stem for path in NOTEBOOKS.glob("*.*") if path.suffix in (".py", ".ipynb")})
)
def test_notebook_and_its_script_hold_the_same_cells(stem: str):
    script, notebook = (jupytext.read(NOTEBOOKS / f"{stem}{suffix}") for suffix in (".py", ".ipynb"))
    command = f"jupytext --update --to ipynb notebooks/{stem}.py (or --to py:percent notebooks/{stem}.ipynb)"
    cells = [[(cell.cell_type, cell.source) for cell in side.cells] for side in (script, notebook)]
    assert cells[0] == cells[1], f"out of sync: run {command}"
    pairing = [side.metadata["jupytext"]["formats"] for side in (script, notebook)]
    assert pairing == ["ipynb,py:percent"] * 2


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebook_is_stored_without_outputs(path: Path):
    code = [cell for cell in jupytext.read(path).cells if cell.cell_type == "code"]
    assert code
    assert not any(cell.outputs or cell.execution_count for cell in code), f"run jupytext --to ipynb on {path.stem}.py"
