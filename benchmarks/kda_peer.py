"""fla-core's KDA kernels: the same inputs through them and ours, and what the benchmark needs to time them.

    python benchmarks/kda_peer.py            # compares every output and gradient; needs a GPU, torch, triton, fla-core

Two bf16 kernels may differ by the sum of their distances from the float64 recurrence, and each must be within 1e-2 of
it and ours within 1.5 times the peer's. Arrays cross by dlpack, without a copy.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
import numpy as np

NAMES = ("q", "k", "v", "g", "beta", "A_log", "dt_bias")


def why_missing() -> str | None:
    """Why the peer cannot be used here; None if it can."""
    try:
        importlib.import_module("fla.ops.kda")
    except Exception as error:  # torch and triton fail to import in many ways
        return f"{type(error).__name__}: {error}"
    return None if _torch().cuda.is_available() else "torch sees no GPU"


def versions() -> str:
    return ", ".join(f"{m} {importlib.import_module(m).__version__}" for m in ("torch", "triton", "fla"))


def _torch() -> Any:
    return importlib.import_module("torch")


def _tensor(x: jax.Array) -> Any:
    jax.block_until_ready(x)  # the two libraries use different streams
    return _torch().from_dlpack(x)


def _call(x: dict[str, Any], **options: Any) -> Any:
    """`chunk_kda` on tensors by our names."""
    return importlib.import_module("fla.ops.kda").chunk_kda(
        x["q"],
        x["k"],
        x["v"],
        x["g"],
        x["beta"],
        A_log=x["A_log"],
        dt_bias=x["dt_bias"].flatten(),
        initial_state=x.get("initial_state"),
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        safe_gate=True,
        lower_bound=-5.0,
        **options,
    )


def gradients(x: dict[str, jax.Array]) -> dict[str, np.ndarray]:
    """Output, final state and every gradient, as `our_gradients` of the benchmark."""
    names = (*NAMES, "initial_state")
    leaves = {n: _tensor(x[n]).clone().requires_grad_() for n in names}
    o, state = _call(leaves, output_final_state=True)
    _torch().autograd.backward((o, state), (_tensor(x["d_o"]).to(o.dtype), _tensor(x["d_state"])))
    out = {"o": o, "state": state} | {f"d_{n}": leaf.grad for n, leaf in leaves.items()}
    return {n: t.detach().float().cpu().numpy() for n, t in out.items()}


def functions(x: dict[str, jax.Array], cu_seqlens: np.ndarray | None) -> dict[str, Callable[[], Any]]:
    """Forward, backward, and both, as functions of nothing."""
    torch = _torch()
    leaves = {n: _tensor(x[n]).clone().requires_grad_() for n in NAMES}
    d_o = _tensor(x["d_o"])
    packed = None if cu_seqlens is None else torch.tensor(cu_seqlens, dtype=torch.long, device="cuda")

    def forward() -> Any:
        with torch.no_grad():
            return _call(leaves, cu_seqlens=packed)[0]

    def both() -> Any:
        return torch.autograd.grad(_call(leaves, cu_seqlens=packed)[0], list(leaves.values()), d_o)

    o = _call(leaves, cu_seqlens=packed)[0]

    def backward() -> Any:
        return torch.autograd.grad(o, list(leaves.values()), d_o, retain_graph=True)

    return {"forward": forward, "backward": backward, "both": both}


def step(x: dict[str, jax.Array]) -> Callable[[], Any]:
    """One token of every sequence through `fused_recurrent_kda`: the recurrence alone, out of place."""
    run = importlib.import_module("fla.ops.kda").fused_recurrent_kda
    t = {n: _tensor(a) for n, a in x.items()}
    return lambda: run(
        t["q"],
        t["k"],
        t["v"],
        t["g"],
        t["beta"],
        A_log=t["A_log"],
        dt_bias=t["dt_bias"].float().flatten(),
        initial_state=t["initial_state"],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        lower_bound=-5.0,
    )


def measure(fn: Callable[[], Any], batches: int = 7, calls: int = 4) -> tuple[float, float, float]:
    """`common.measure` for torch; the first call tunes the kernels."""
    torch = _torch()
    for _ in range(3):
        fn()
    torch.cuda.synchronize()
    times = []
    for _ in range(batches):
        begin = time.perf_counter()
        for _ in range(calls):
            fn()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) / calls * 1e3)
    return median(times), min(times), max(times)


def compare(implementation: str) -> bool:
    """Prints distances from float64 and from each other; whether all are within bounds."""
    from benchmarks.kda import errors, make_inputs, our_gradients  # it imports this module

    good = True
    for gate in ("steep", "slow", "mixed"):
        x = make_inputs(1024, 2, gate)
        ours = jax.device_get(jax.jit(lambda x: our_gradients(x, implementation))(x))
        theirs = gradients(x)
        our_errors, their_errors = errors(ours, gate), errors(theirs, gate)
        for name, error in our_errors.items():
            a, b = np.asarray(ours[name], np.float64).ravel(), np.asarray(theirs[name], np.float64).ravel()
            apart = float(np.linalg.norm(a - b) / np.linalg.norm(b))
            limit = 1.05 * (error + their_errors[name])
            ok = error <= 1e-2 and error <= 1.5 * their_errors[name] and apart <= limit
            good &= ok
            verdict = "" if ok else "  OUT OF BOUNDS"
            print(f"{gate:6} {name:16} ours {error:.1e}  fla {their_errors[name]:.1e}  apart {apart:.1e}{verdict}")
    return good


if __name__ == "__main__":
    if (missing := why_missing()) is not None:
        sys.exit(f"the peer is missing: {missing}")
    print(versions())
    sys.exit(0 if compare(sys.argv[1] if len(sys.argv) > 1 else "pallas") else 1)
