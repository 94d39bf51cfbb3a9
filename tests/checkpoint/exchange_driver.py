"""Imports a directory and exports it again, as one of several processes: `exchange_driver.py SOURCE OUT PLAN`.

PLAN "nan" spoils the last norm before the export, "packed" keeps experts as codes. Prints the bytes that this process
read as JSON.
"""

import json
import sys

source, out, plan = sys.argv[1:]

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

from k3jax.checkpoint import export, load  # noqa: E402
from k3jax.checkpoint.layout import CheckpointFormatError  # noqa: E402
from k3jax.config import LaunchConfig, MeshConfig  # noqa: E402
from k3jax.parallel.launch import LaunchError, initialize  # noqa: E402
from k3jax.sharding import make_mesh  # noqa: E402

initialize(LaunchConfig(), expected_devices=4)
bytes_read = []
close = load.Reader.close


def note(reader):
    bytes_read.append(reader.bytes_read)
    close(reader)


load.Reader.close = note
export._STAGE = 64 << 10
with jax.set_mesh(make_mesh(MeshConfig(expert=4, fsdp=True))):
    loaded = load.load_pretrained(source, fsdp=True, experts="packed" if plan == "packed" else "plain")
    norm = loaded.model.final_norm
    if plan == "nan":
        norm[...] = jax.jit(lambda a: a * jnp.nan)(norm[...])
    try:
        export.export_pretrained(loaded.model, loaded.router_bias, out, like=source, max_shard_bytes=400_000)
        error = ""
    except (CheckpointFormatError, LaunchError) as caught:
        error = f"{type(caught).__name__}: {caught}"
print(json.dumps({"read": bytes_read[0], "error": error}))
