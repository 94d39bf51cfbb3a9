"""The main job from nothing: `configs/nano.py` on two cores with a cold compile cache."""

import json

import pytest
from processes import train_from_nothing


@pytest.mark.slow
def test_nano_learns_python_from_nothing(tmp_path):
    """≤ 3.2 held-out bits per byte, 1.0 below the first evaluation, with a sample and a checkpoint at the end.

    The time limit of five minutes holds on an idle machine with two cores; the figure is printed.
    """
    printed = train_from_nothing("nano", tmp_path, timeout=1500)
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    held_out = [r["bits_per_byte"] for r in records if r["kind"] == "eval"]
    assert held_out[-1] <= 3.2
    assert held_out[-1] <= held_out[0] - 1.0
    assert "sample" in printed
    assert (tmp_path / "run" / "checkpoints" / "100").is_dir()
