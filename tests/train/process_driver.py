"""`train.py` with a configuration in JSON: `process_driver.py CONFIG OUT PLAN [arguments…]`.

OUT: a folder for rows-<rank>.jsonl, a line of the tokens of this process's rows for each training step; or empty.
PLAN: {"term": [rank, step]} sends this process SIGTERM before that step, {"kill": …} SIGKILL, {"raise": …} an error,
{"nan": …} makes NaN of the loss of this process's rows.
"""

import json
import os
import signal
import sys
import tempfile
from pathlib import Path

values, out, plan = json.loads(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])

import jax.numpy as jnp  # noqa: E402

import train as program  # noqa: E402
from k3jax.data.loader import Loader, TextData  # noqa: E402
from k3jax.data.sources import DataError  # noqa: E402
from k3jax.train import step as step_module  # noqa: E402

rank = int(os.environ["RANK"])
real_loader, real_next, real_loss = TextData.train_loader, Loader.__next__, step_module.linear_cross_entropy
step = 0


def train_loader(*args):
    loader = real_loader(*args)
    loader.trains = True
    return loader


def next_batch(loader):
    global step
    batch = real_next(loader)
    if not getattr(loader, "trains", False):
        return batch
    step += 1
    planned = {what for what, when in plan.items() if when == [rank, step]}
    if "raise" in planned:
        raise DataError("a bad record")
    if planned & {"term", "kill"}:
        os.kill(os.getpid(), signal.SIGTERM if "term" in planned else signal.SIGKILL)
    if out:
        rows = [list(map(int, row)) for row in batch["tokens"]]
        with (Path(out) / f"rows-{rank}.jsonl").open("a") as file:
            print(json.dumps(rows), file=file)
    if "nan" in planned:
        batch["targets"][:] = 1  # a byte that no text holds
    return batch


def nan_at_the_mark(x, w, targets, mask, **options):
    loss, aux = real_loss(x, w, targets, mask, **options)
    return jnp.where(jnp.any(targets == 1), jnp.nan, loss), aux


TextData.train_loader, Loader.__next__ = train_loader, next_batch
if "nan" in plan:
    step_module.linear_cross_entropy = nan_at_the_mark

with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
    file.write(f"from k3jax.config import RunConfig, from_dict\nconfig = from_dict(RunConfig, {values!r})\n")
    file.flush()
    status = program.main([file.name, *sys.argv[4:]])
sys.exit(status)
