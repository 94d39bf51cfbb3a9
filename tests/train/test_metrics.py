"""Curves without duplicates or torn lines, and what the terminal shows."""

import io
import json
import math
import time

from rich.console import Console

from k3jax.train.metrics import Clock, Display, MetricsLog, count, duration, read_records, step_line

VALUES = {"loss": 2.0, "bits_per_byte": 2.9, "grad_norm": 0.5, "max_violation": 0.25}


def steps(run_dir) -> list[tuple[str, int]]:
    return [(r["kind"], r["step"]) for r in read_records(run_dir / "metrics.jsonl")]


def write(run_dir, start: int, numbers) -> None:
    log = MetricsLog(run_dir, start)
    for number in numbers:
        log.write("train", number, {"loss": 1.0 * number})
        if number % 2 == 0:
            log.write("eval", number, {"loss": 0.0})
    log.close()


def test_a_resumed_log_drops_later_steps_and_the_line_that_was_cut_off(tmp_path):
    write(tmp_path, 0, range(1, 6))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')
    write(tmp_path, 2, [3, 4])
    expected = [("train", 1), ("train", 2), ("eval", 2), ("train", 3), ("train", 4), ("eval", 4)]
    assert steps(tmp_path) == expected
    assert all(json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines())


def test_a_run_that_starts_again_starts_its_curves_again(tmp_path):
    write(tmp_path, 0, [1, 2])
    write(tmp_path, 0, [1])
    assert steps(tmp_path) == [("train", 1)]


def test_samples_of_a_resumed_run_go_on_where_its_curves_do(tmp_path):
    for start, numbers in ((0, (2, 4)), (2, (3,))):
        log = MetricsLog(tmp_path, start)
        for number in numbers:
            log.write_sample(number, "def ", f"def f{number}(): pass")
        log.close()
    found = read_records(tmp_path / "samples.jsonl")
    assert [(r["step"], r["prompt"], r["text"]) for r in found] == [(i, "def ", f"def f{i}(): pass") for i in (2, 3)]


def test_the_log_is_valid_json_even_for_a_loss_that_is_not_a_number(tmp_path):
    log = MetricsLog(tmp_path, 0)
    log.write("train", 1, {"loss": math.nan, "grad_norm": math.inf})
    log.close()
    line = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(line, parse_constant=lambda name: 1 / 0)["loss"] == "nan"


def test_numbers_are_short_enough_to_read():
    assert [count(x) for x in (950, 31_300, 2.78e12)] == ["950", "31.3k", "2.78T"]
    assert [duration(x) for x in (5, 75, 4000)] == ["0:05", "1:15", "1:06:40"]
    line = step_line(7, 300, VALUES | {"tokens_per_second": 1234.0, "mfu": 0.4}, 61.0)
    assert line == (
        "step   7/300  loss 2.0000  bits/byte 2.900  1.234k tok/s  MFU 40.0 %  grad 0.500  load +25 %  ETA 1:01"
    )


def test_without_a_terminal_only_kept_lines_are_printed():
    out = io.StringIO()
    display = Display(10, console=Console(file=out))
    display.step(1, "one", keep=False)
    display.step(2, "two [bold]", keep=True)
    display.close()
    assert out.getvalue() == "two [bold]\n"


def test_in_a_terminal_the_live_line_moves():
    out = io.StringIO()
    display = Display(10, console=Console(file=out, force_terminal=True, width=100))
    display.step(3, "loss [1]", keep=False)
    display.print("a line that stays")
    display.close()
    assert "loss [1]" in out.getvalue()
    assert "a line that stays" in out.getvalue()


def test_the_clock_counts_training_and_no_pauses():
    clock = Clock()
    clock.resume()
    time.sleep(0.02)
    clock.tick()
    clock.pause()
    time.sleep(0.2)
    clock.resume()
    time.sleep(0.02)
    clock.tick()
    assert clock.steps == 2
    assert 0.04 <= clock.seconds < 0.2
    assert clock.rate is not None


def test_the_end_is_told_by_usual_steps_and_pauses(monkeypatch):
    """A first step that warms up and a first pause that compiles something count for themselves only."""
    clock, now = Clock(), 0.0
    monkeypatch.setattr("k3jax.train.metrics.time.perf_counter", lambda: now)

    def steps(*seconds):
        nonlocal now
        for second in seconds:
            now += second
            clock.tick()

    def pause(seconds):
        nonlocal now
        clock.pause()
        now += seconds
        clock.resume()

    clock.resume()
    steps(30.0, 1.0)
    assert clock.eta(100) is None
    steps(1.0, 1.0)
    assert clock.eta(100) == 100
    pause(40.0)
    steps(*[1.0] * 4)
    pause(2.0)
    pause(2.0)
    steps(*[1.0] * 4)
    assert clock.eta(100) == 100 + 100 * 3 / 12 * 2
