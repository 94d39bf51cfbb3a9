"""`import k3jax` stays light: notebooks and command lines wait for it."""

import subprocess
import sys

SECONDS = 30.0
"""About 2 s on two idle CPU cores; a machine that is busy with tests takes several times that."""

HEAVY = ("PIL", "grain", "matplotlib", "orbax", "pyarrow", "sklearn", "tensorboardX", "tiktoken", "tokenizers")
"""What one use or another needs is imported by the modules that use it."""

SCRIPT = f"""
import sys, time
start = time.perf_counter()
import k3jax
seconds = time.perf_counter() - start
heavy = sorted(set({HEAVY}) & sys.modules.keys())
assert not heavy, f"imported at once: {{heavy}}"
import jax
assert not jax._src.xla_bridge._backends, "a device was initialised: processes of a cluster must meet before that"
print(seconds)
"""


def test_import_is_quick_loads_nothing_heavy_and_touches_no_device():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < SECONDS
