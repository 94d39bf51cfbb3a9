"""Where the numbers of a run go: metrics.jsonl, TensorBoard, and the terminal.

    RUN_DIR/metrics.jsonl     one JSON object a line: {"kind": "train" | "eval", "step": 120, "loss": …}
    RUN_DIR/samples.jsonl     generated texts: {"step": 120, "prompt": …, "text": …}
    RUN_DIR/tensorboard/      the same numbers as metrics.jsonl

A resumed run first drops the records after the step it resumes from, so that every (kind, step) occurs once.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import time
from collections import deque
from pathlib import Path
from typing import Any, TextIO

from metrax.logging import TensorboardBackend
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from tensorboardX import SummaryWriter


def read_records(path: Path) -> list[dict[str, Any]]:
    """Records of a metrics.jsonl or samples.jsonl; a last line that a killed process left unfinished is ignored."""
    if not path.exists():
        return []
    records = []
    for line in path.read_text().splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return records


def to_json(value: Any) -> Any:
    """`value` with non-finite floats as strings, which JSON cannot hold otherwise."""
    if isinstance(value, dict):
        return {key: to_json(v) for key, v in value.items()}
    if isinstance(value, list):
        return [to_json(v) for v in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _continued(path: Path, start_step: int) -> TextIO:
    """A file of records to append to, without those after `start_step`."""
    kept = [r for r in read_records(path) if r["step"] <= start_step] if start_step else []
    draft = path.with_suffix(".tmp")
    draft.write_text("".join(json.dumps(r) + "\n" for r in kept))
    os.replace(draft, path)
    return path.open("a")


class MetricsLog:
    """Appends records to metrics.jsonl, samples.jsonl and TensorBoard.

    Args:
        run_dir: must exist.
        start_step: records after this step are dropped; at 0, all of them.
    """

    def __init__(self, run_dir: Path, start_step: int) -> None:
        board = str(run_dir / "tensorboard")
        self._file, self._samples = (_continued(run_dir / f"{n}.jsonl", start_step) for n in ("metrics", "samples"))
        # a START event tells TensorBoard to forget what older event files hold from this step on
        SummaryWriter(board, purge_step=start_step + 1 if start_step else 0).close()
        self._board = TensorboardBackend(board)

    def write(self, kind: str, step: int, values: dict[str, float]) -> None:
        """One record; `kind` is "train" or "eval"."""
        self._file.write(json.dumps({"kind": kind, "step": step} | to_json(values)) + "\n")
        self._file.flush()
        for name, value in values.items():
            self._board.log_scalar(f"{kind}/{name}", value, step=step)

    def write_sample(self, step: int, prompt: str, text: str) -> None:
        """A generated text, prompt included."""
        self._samples.write(json.dumps({"step": step, "prompt": prompt, "text": text}) + "\n")
        self._samples.flush()

    def close(self) -> None:
        self._file.close()
        self._samples.close()
        self._board.close()


class Clock:
    """Training time: the time between steps, without pauses for evaluation, samples and saving."""

    def __init__(self) -> None:
        self._mark: float | None = None
        self.seconds = 0.0
        self.steps = 0
        self.rate: float | None = None
        """Seconds a step, smoothed."""
        self._last: deque[float] = deque(maxlen=25)
        self._pauses: deque[float] = deque(maxlen=5)
        self._paused_at: float | None = None
        self._pause_count = 0

    def tick(self) -> None:
        """A step has finished."""
        now = time.perf_counter()
        if self._mark is not None:
            last = now - self._mark
            self.seconds += last
            self.steps += 1
            # a plain mean at first, then a window of about 20 steps
            weight = max(1 / self.steps, 0.05)
            self.rate = last if self.rate is None else (1 - weight) * self.rate + weight * last
            self._last.append(last)
        self._mark = now

    def pause(self) -> None:
        """Something other than training follows; time counts again from `resume`."""
        self._mark, self._paused_at = None, time.perf_counter()

    def resume(self) -> None:
        self._mark = time.perf_counter()
        if self._paused_at is not None:
            self._pauses.append(self._mark - self._paused_at)
            self._paused_at, self._pause_count = None, self._pause_count + 1

    def eta(self, steps: int) -> float | None:
        """Seconds that `steps` more will take, pauses as frequent as so far included; None in the first three steps.

        Medians of late: neither a first step that warms up nor a pause that compiles something counts for the rest.
        """
        if self.steps < 3:
            return None
        pauses = self._pause_count / self.steps * statistics.median_low(self._pauses) if self._pauses else 0.0
        return steps * (statistics.median(self._last) + pauses)


class Display:
    """What a person sees: a live line in a terminal, plain lines elsewhere; nothing on processes other than 0."""

    def __init__(self, total_steps: int, *, quiet: bool = False, console: Console | None = None) -> None:
        self.console = console or Console(quiet=quiet, soft_wrap=True, highlight=False)
        self._total = total_steps
        self._live: Progress | None = None
        if self.console.is_terminal and not quiet:
            columns = (BarColumn(20), TextColumn("{task.description}", markup=False))
            self._live = Progress(*columns, console=self.console, transient=True)
            self._task = self._live.add_task("compiling …", total=total_steps)
            self._live.start()

    def print(self, text: Any = "") -> None:
        """A line (or a rich table) that stays."""
        self.console.print(text, markup=False)

    def step(self, step: int, line: str, *, keep: bool) -> None:
        """Shows the state of the run; `keep` makes it stay where there is no live line."""
        if self._live is not None:
            self._live.update(self._task, completed=step, description=line)
        elif keep:
            self.print(line)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()


def duration(seconds: float) -> str:
    """`75` → `1:15`, `4000` → `1:06:40`."""
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"


def count(value: float) -> str:
    """`31300` → `31.3k`."""
    for limit, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.4g}{unit}"
    return f"{value:.4g}"


def step_line(step: int, total: int, values: dict[str, float], eta_seconds: float | None) -> str:
    """The live line of one step."""
    parts = [
        f"step {step:>{len(str(total))}}/{total}",
        f"loss {values['loss']:.4f}",
        f"bits/byte {values['bits_per_byte']:.3f}",
    ]
    if "tokens_per_second" in values:
        parts.append(f"{count(values['tokens_per_second'])} tok/s")
    if "mfu" in values:
        parts.append(f"MFU {100 * values['mfu']:.1f} %")
    parts += [f"grad {values['grad_norm']:.3f}", f"load +{100 * values['max_violation']:.0f} %"]
    if eta_seconds is not None:
        parts.append(f"ETA {duration(eta_seconds)}")
    return "  ".join(parts)
