"""Processes of `test_publish.py`: `publish_driver.py trainer CONFIG PLAN` or `… consumer SOURCE OUT PLAN`.

A trainer writes to RUN_DIR/truth.jsonl what it is about to publish. PLAN "directory N" kills it while it writes version
N there, "stream N" while it sends that version. A consumer writes to OUT a line for everything that it serves; PLAN
"kill" kills it within its first pull, "flip" changes a byte of it.
"""

import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import jax
import numpy as np

from k3jax.checkpoint import stream
from k3jax.checkpoint.publish import Directory, Follower, Stream
from k3jax.checkpoint.store import ArrayStore, flat_paths
from k3jax.config import RunConfig, from_dict
from k3jax.sharding import make_mesh
from k3jax.train import loop


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def digest(arrays) -> str:
    whole = hashlib.sha256()
    for path in sorted(arrays):
        whole.update(path.encode() + np.asarray(arrays[path]).tobytes())
    return whole.hexdigest()


def say(path, version, arrays):
    with Path(path).open("a") as file:
        print(json.dumps([version, digest(arrays)]), file=file)


def trainer(config: RunConfig, plan: str) -> None:
    where, _, when = plan.partition(" ")
    real_publish, real_save, real_bytes = loop.Publisher.publish, ArrayStore.save_items, stream._bytes

    def publish(self, weights):
        say(Path(config.run_dir) / "truth.jsonl", weights.manifest.version, weights.arrays)
        real_publish(self, weights)
        time.sleep(0.3)  # so that consumers see more than the last

    def save_items(self, step, items, metadata):
        real_save(self, step, items, metadata)
        if where == "directory" and "weights" in items and step == int(when):
            die()  # the save goes on in the background

    def send_bytes(array):
        if where == "stream" and server_version() == int(when):
            sent.append(1)
            if len(sent) == 5:
                die()
        return real_bytes(array)

    sent, servers, real_init = [], [], stream.StreamServer.__init__

    def server_version():
        return servers[0]._offered[0]

    def init(self, address):
        servers.append(self)
        real_init(self, address)

    stream.StreamServer.__init__, stream._bytes = init, send_bytes
    loop.Publisher.publish, ArrayStore.save_items = publish, save_items
    if plan == "stay":  # a stream ends with its run
        loop.Publisher.close = lambda self: time.sleep(600)
    mesh = make_mesh(config.mesh)
    with jax.set_mesh(mesh):
        loop.train(config, mesh)


def consumer(source: str, out: str, plan: str) -> None:
    real, pulls = stream._receive, []

    def receive(source, leaves):
        pulls.append(1)
        if plan == "kill" and len(pulls) == 2:
            die()
        arrays = real(source, leaves)
        if plan == "flip" and len(pulls) == 1:
            arrays[0].reshape(-1).view(np.uint8)[0] ^= 4
        return arrays

    stream._receive, stream.BUCKET_BYTES = receive, 1 << 14
    follower = Follower(
        Stream(source) if ":" in source else Directory(source), report=lambda reason: print(reason, flush=True)
    )
    while True:
        if follower.poll():
            served = follower.current
            say(out, served.version, flat_paths({"params": served.model, "router_bias": served.router_bias}))
        time.sleep(0.05)


if sys.argv[1] == "trainer":
    trainer(from_dict(RunConfig, json.loads(sys.argv[2])), sys.argv[3])
else:
    consumer(*sys.argv[2:])
