"""`train.py` with a configuration in JSON: `process_driver.py CONFIG OUT PLAN [arguments…]`.

OUT: a folder for rows-<rank>.jsonl, a line of the tokens of this process's rows for each training step; or empty.
PLAN: {"term": [rank, step]} sends this process SIGTERM before that step, {"kill": …} SIGKILL, {"raise": …} an error,
{"nan": step} makes NaN of that step's loss everywhere.
"""

import json
import os
import signal
import sys
import tempfile
from pathlib import Path

values, out, plan = json.loads(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])

import train as program  # noqa: E402
from k3jax.train import loop  # noqa: E402

real, step, rank = loop.Loader.__next__, 0, int(os.environ["RANK"])


def next_batch(loader):
    global step
    batch, step = real(loader), step + 1
    for what in ("term", "kill", "raise"):
        if plan.get(what) == [rank, step]:
            if what == "raise":
                raise loop.DataError("a bad record")
            os.kill(os.getpid(), signal.SIGTERM if what == "term" else signal.SIGKILL)
    if out:
        rows = [list(map(int, row)) for row in batch["tokens"]]
        with (Path(out) / f"rows-{rank}.jsonl").open("a") as file:
            print(json.dumps(rows), file=file)
    if plan.get("nan") == step:
        batch["targets"] = batch["targets"] * 0 + 1
    return batch


loop.Loader.__next__ = next_batch

with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
    file.write(f"from k3jax.config import RunConfig, from_dict\nconfig = from_dict(RunConfig, {values!r})\n")
    file.flush()
    status = program.main([file.name, *sys.argv[4:]])
sys.exit(status)
