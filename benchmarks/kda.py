"""KDA: times and errors of the implementations, and of fla-core's kernels where they can be imported.

    python benchmarks/kda.py --shapes 8192x96 --gates steep slow --implementations pallas

Forward, backward, both (gate, norms and sigmoid inside, bf16, batch 1) and one decoding step of 128 sequences. Errors
are relative L2 distances from a float64 recurrence over 1024 tokens of 2 heads with an initial state and a gradient of
the final one. The floor is the compulsory traffic at the copy rate of an H200. fla-core, torch and triton are optional;
the peer's kernels are tuned before they are timed.

Gates: "steep" forgets within a few tokens (A_log and the bias uniform in (0, 1)), "slow" shifts the bias by -6,
"mixed" does so in every other channel.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the peer allocates on the same GPU
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import kda_peer
from benchmarks.common import device_line, measure, write_results
from k3jax.ops.kda import kda
from k3jax.ops.kda.decode import Weights, kda_decode

COPY_RATE = 4.26e12  # bytes/s
DIM = 128
OPTIONS: dict[str, Any] = {"gate": "lower_bound", "lower_bound": -5.0, "beta_is_logit": True, "qk_l2norm": True}
# bytes of a token of a head: q, k, v, g in and o out; the same four and do in, their gradients out
FORWARD_BYTES, BACKWARD_BYTES = 5 * 256, 9 * 256
GRADIENTS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias")


@dataclasses.dataclass(frozen=True)
class Shape:
    """`sequences` packed in one row of `tokens`."""

    tokens: int
    heads: int
    sequences: int = 1

    @property
    def cu_seqlens(self) -> np.ndarray | None:
        bounds = np.linspace(0, self.tokens, self.sequences + 1, dtype=np.int32)
        return bounds if self.sequences > 1 else None


SHAPES = {
    "8192x96": Shape(8192, 96),
    "8192x32": Shape(8192, 32),
    "65536x8": Shape(65536, 8),
    "8x1024x96": Shape(8192, 96, 8),
}


def make_inputs(tokens: int, heads: int, gate: str, sequences: int = 1) -> dict[str, jax.Array]:
    """Random inputs of `kda`, with an initial state and cotangents of the output and of the final state."""
    keys = iter(jax.random.split(jax.random.key(0), 16))
    names = ("q", "k", "v", "g", "d_o")
    x = {name: jax.random.normal(next(keys), (1, tokens, heads, DIM), jnp.bfloat16) for name in names}
    shift = {"steep": 0.0, "slow": -6.0, "mixed": -6.0 * (jnp.arange(DIM) % 2)}[gate]
    x["beta"] = jax.random.normal(next(keys), (1, tokens, heads), jnp.bfloat16)
    x["A_log"] = jax.random.uniform(next(keys), (heads,))
    x["dt_bias"] = jax.random.uniform(next(keys), (heads, DIM)) + shift
    for name in ("initial_state", "d_state"):
        x[name] = jax.random.normal(next(keys), (sequences, heads, DIM, DIM)) * 0.3
    return x


def our_gradients(x: dict[str, jax.Array], implementation: Any, cast: Any = None) -> dict[str, jax.Array]:
    """Output, final state and every gradient, with initial state and its gradient."""
    names = (*GRADIENTS, "initial_state")

    def run(*args):
        return kda(**dict(zip(names, args)), **OPTIONS, return_final_state=True, implementation=implementation)

    args = [x[n] if cast is None else x[n].astype(cast) for n in names]
    (o, state), vjp = jax.vjp(run, *args)
    grads = vjp((x["d_o"].astype(o.dtype), x["d_state"].astype(state.dtype)))
    return {"o": o, "state": state} | {f"d_{n}": g for n, g in zip(names, grads)}


@functools.cache
def exact(gate: str) -> dict[str, np.ndarray]:
    """`our_gradients` of the recurrence in float64, on the CPU."""
    x = jax.device_get(make_inputs(1024, 2, gate))
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        run = jax.jit(lambda x: our_gradients(x, "reference", jnp.float64))
        return jax.device_get(run({name: np.asarray(v, np.float64) for name, v in x.items()}))


def errors(got: dict[str, Any], gate: str) -> dict[str, float]:
    """Relative L2 distance of every tensor from the float64 recurrence."""
    out = {}
    for name, right in exact(gate).items():
        ours = np.asarray(got[name], np.float64).reshape(right.shape)
        out[name] = float(np.linalg.norm(ours - right) / np.linalg.norm(right))
    return out


def our_function(
    what: str, x: dict[str, jax.Array], shape: Shape, implementation: Any
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """What is timed, jitted, with its arguments."""
    cu = None if shape.cu_seqlens is None else jnp.asarray(shape.cu_seqlens)

    def run(*args):
        return kda(**dict(zip(GRADIENTS, args)), **OPTIONS, cu_seqlens=cu, implementation=implementation)

    def both(d_o, *args):
        o, vjp = jax.vjp(run, *args)
        return o, vjp(d_o)

    args = tuple(x[n] for n in GRADIENTS)
    if what == "forward":
        return jax.jit(run), args
    if what == "both":
        return jax.jit(both), (x["d_o"], *args)
    saved = jax.jit(lambda *args: jax.vjp(run, *args)[1])(*args)
    return jax.jit(lambda vjp, d_o: vjp(d_o)), (saved, x["d_o"])


def floor_ms(what: str, shape: Shape) -> float:
    size = {"forward": FORWARD_BYTES, "backward": BACKWARD_BYTES, "both": FORWARD_BYTES + BACKWARD_BYTES}[what]
    return size * shape.tokens * shape.heads / COPY_RATE * 1e3


class Table:
    """Prints rows as they come and keeps them."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        columns = f"{'ms':>8} {'(min-max)':>17}{'floor':>8}{'x floor':>9}{'/ fla':>7}"
        print(f"{'shape':12}{'gate':7}{'what':10}{'who':10}{columns}")

    def add(self, shape: str, gate: str, what: str, who: str, ms: tuple[float, float, float], floor: float) -> None:
        row = {"shape": shape, "gate": gate, "what": what, "who": who}
        fla = [r["ms"] for r in self.rows if r | row | {"who": "fla"} == r]
        row |= {"ms": ms[0], "min": ms[1], "max": ms[2], "floor_ms": floor, "times_floor": ms[0] / floor}
        ratio = ""
        if fla:
            row["times_fla"] = ms[0] / fla[0]
            ratio = f"{row['times_fla']:.2f}"
        self.rows.append(row)
        spread = f"({ms[1]:.3f}-{ms[2]:.3f})"
        columns = f"{ms[0]:8.3f} {spread:>17}{floor:8.3f}{ms[0] / floor:9.1f}{ratio:>7}"
        print(f"{shape:12}{gate:7}{what:10}{who:10}{columns}", flush=True)

    def add_errors(self, gate: str, who: str, found: dict[str, float]) -> None:
        self.rows.append({"gate": gate, "what": "errors", "who": who, **found})
        print(f"errors {gate:6} {who:10} " + " ".join(f"{n} {e:.1e}" for n, e in found.items()), flush=True)


def attempt(what: str, fn: Callable[..., None], *args: Any) -> None:
    """Runs `fn(*args)`; a failure is printed and does not stop the others."""
    try:
        fn(*args)
    except Exception:
        print(f"{what} failed")
        traceback.print_exc()


def time_peer(table: Table, name: str, gate: str, x: dict[str, jax.Array], whats: list[str]) -> None:
    shape = SHAPES[name]
    for what, fn in kda_peer.functions(x, shape.cu_seqlens).items():
        if what in whats:
            table.add(name, gate, what, "fla", kda_peer.measure(fn), floor_ms(what, shape))


def time_ours(table: Table, name: str, gate: str, x: dict[str, jax.Array], whats: list[str], who: Any) -> None:
    shape = SHAPES[name]
    for what in ("forward", "backward", "both"):
        if what in whats:
            fn, args = our_function(what, x, shape, who)
            table.add(name, gate, what, who, measure(fn, *args), floor_ms(what, shape))


def find_errors(table: Table, gate: str, who: Any) -> None:
    x = make_inputs(1024, 2, gate)
    run = kda_peer.gradients if who == "fla" else jax.jit(lambda x: our_gradients(x, who))
    table.add_errors(gate, who, errors(jax.device_get(run(x)), gate))


def decode_inputs(rows: int, heads: int) -> tuple[dict[str, jax.Array], Weights]:
    keys = iter(jax.random.split(jax.random.key(1), 16))
    x = {
        n: jax.random.normal(next(keys), (rows, heads, DIM), jnp.bfloat16) for n in ("q", "k", "v", "g", "output_gate")
    }
    x["beta"] = jax.random.normal(next(keys), (rows, heads), jnp.bfloat16)
    q_conv, k_conv, v_conv = (jax.random.normal(next(keys), (heads, DIM, 4)) for _ in range(3))
    A_log, dt_bias = jax.random.uniform(next(keys), (heads,)), jax.random.uniform(next(keys), (heads, DIM))
    return x, Weights(q_conv, k_conv, v_conv, A_log, dt_bias, jnp.ones(DIM))


def time_decode(table: Table, who: Any, state_dtype: Any, rows: int = 128, heads: int = 96) -> None:
    """One step in place: convolutions, recurrence, gated norm. The peer's is the recurrence alone, out of place."""
    x, weights = decode_inputs(rows, heads)
    state = jax.random.normal(jax.random.key(2), (rows, heads, DIM, DIM), state_dtype)
    floor = 2 * state.nbytes / COPY_RATE * 1e3
    if who == "fla":
        x = {n: a[:, None] for n, a in x.items()}
        x |= {"A_log": weights.A_log, "dt_bias": weights.dt_bias, "initial_state": state}
        table.add(f"{rows}x{heads}", "steep", "decode", who, kda_peer.measure(kda_peer.step(x), calls=20), floor)
        return
    tails = tuple(
        jax.random.normal(key, (rows, 3, heads, DIM), jnp.bfloat16) for key in jax.random.split(jax.random.key(3), 3)
    )
    slots = jnp.arange(rows, dtype=jnp.int32)

    @functools.partial(jax.jit, donate_argnums=(1, 2))
    def step(x, state, tails):
        return kda_decode(**x, state=state, tails=tails, slots=slots, weights=weights, implementation=who)

    pools = [state, tails]

    def in_place() -> jax.Array:
        y, *pools[:] = step(x, *pools)
        return y

    label = who if state_dtype == jnp.float32 else f"{who} bf16"
    table.add(f"{rows}x{heads}", "steep", "decode", label, measure(in_place, calls=20), floor)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="*", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--gates", nargs="*", choices=("steep", "slow", "mixed"), default=["steep", "slow", "mixed"])
    parser.add_argument("--implementations", nargs="*", choices=("pallas", "xla"), default=["pallas", "xla"])
    everything = ["forward", "backward", "both", "decode", "errors"]
    parser.add_argument("--what", nargs="*", choices=everything, default=everything)
    parser.add_argument("--peer", action=argparse.BooleanOptionalAction, default=kda_peer.why_missing() is None)
    parser.add_argument("--name", default="kda", help="of the file of results")
    options = parser.parse_args()
    print(device_line())
    if options.peer:
        print(kda_peer.versions())
    else:
        print(f"no peer: {kda_peer.why_missing() or '--no-peer'}")
    table = Table()
    peers = ["fla"] if options.peer else []
    for gate in options.gates:
        for who in (*peers, *options.implementations) if "errors" in options.what else ():
            attempt(f"errors {gate} {who}", find_errors, table, gate, who)
        for name in options.shapes:
            shape = SHAPES[name]
            x = make_inputs(shape.tokens, shape.heads, gate, shape.sequences)
            if options.peer:
                attempt(f"{name} {gate} fla", time_peer, table, name, gate, x, options.what)
            for who in options.implementations:
                attempt(f"{name} {gate} {who}", time_ours, table, name, gate, x, options.what, who)
    for who in (*peers, *options.implementations) if "decode" in options.what else ():
        attempt(f"decode {who}", time_decode, table, who, jnp.float32)
        if who != "fla":
            attempt(f"decode {who} bf16", time_decode, table, who, jnp.bfloat16)
    print(f"written to {write_results(options.name, table.rows)}")


if __name__ == "__main__":
    main()
