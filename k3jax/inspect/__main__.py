"""A report of a run directory: `python -m k3jax.inspect RUN_DIR [--out FILE]`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import tyro

from k3jax.inspect.report import report


def main(run_dir: Annotated[Path, tyro.conf.Positional], out: Path | None = None) -> None:
    """Write what a run directory holds into one HTML file, which opens without a network.

    Args:
        run_dir: directory of a training run, whole, damaged or still running.
        out: file to write; RUN_DIR/report.html if left out.
    """
    out = out or run_dir / "report.html"
    text = report(run_dir)
    out.write_text(text)
    print(f"{out} ({len(text) / 1e3:,.0f} kB)")


if __name__ == "__main__":
    try:
        tyro.cli(main)
    except OSError as error:
        sys.exit(f"error: {error}")
