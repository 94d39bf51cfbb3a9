"""Runs of several processes on loopback: `train.py` as a launcher starts it, watched from inside.

Each process writes to OUT/<name>-<rank>.jsonl the rows it placed, step by step.
"""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

from k3jax.config import RunConfig, to_dict

ROOT = Path(__file__).parents[2]
DRIVER = Path(__file__).with_name("process_driver.py")


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


class Processes:
    """The processes of one run, with `devices` CPU devices each (a list: by process).

    Args:
        arguments: of the command line, besides the configuration; of one process: `of={rank: [...]}`.
        plan: what the driver does in each process, see there.
    """

    def __init__(self, config: RunConfig, count: int, devices, arguments=(), of=None, plan=None, out=None):
        devices = [devices] * count if isinstance(devices, int) else devices
        port = free_port()
        common = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "XLA_FLAGS"))}
        common |= {"PYTHONPATH": str(ROOT), "JAX_ENABLE_X64": "1", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
        common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(count)}
        command = [sys.executable, str(DRIVER), json.dumps(to_dict(config)), str(out or ""), json.dumps(plan or {})]
        self.processes = [
            subprocess.Popen(
                [*command, *arguments, *(of or {}).get(rank, [])],
                env=common
                | {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(count)}
                | {"XLA_FLAGS": f"--xla_force_host_platform_device_count={n} --xla_backend_optimization_level=0"},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank, n in enumerate(devices)
        ]

    def wait(self, timeout: float = 300) -> list[tuple[int, str, str]]:
        """Exit status, output and errors of each process."""
        try:
            results = [(p.communicate(timeout=timeout), p) for p in self.processes]
        finally:
            for p in self.processes:
                p.kill()
        return [(p.returncode, out, err) for (out, err), p in results]


def run(*args, **kwargs) -> list[str]:
    """Outputs of the processes of a run that ends well."""
    results = Processes(*args, **kwargs).wait()
    for rank, (status, out, err) in enumerate(results):
        assert status == 0, f"process {rank} left with {status}\n{out[-2000:]}\n{err[-4000:]}"
    return [out for _, out, _ in results]


def train_from_nothing(configuration: str, folder: Path, timeout: float) -> str:
    """Output of `train.py` with a cold compile cache, its run in `folder`/run; prints how long it took."""
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    environment["JAX_COMPILATION_CACHE_DIR"] = str(folder / "cache")
    begin = time.monotonic()
    command = [sys.executable, "train.py", f"configs/{configuration}.py", "--run-dir", str(folder / "run")]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout)
    print(f"{configuration} from nothing took {time.monotonic() - begin:.0f} s")
    assert result.returncode == 0, result.stderr[-2000:]
    return result.stdout
