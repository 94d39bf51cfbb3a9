"""Two mechanisms that cross GPUs, by themselves: experts under skewed routing, and KDA on a long sequence.

    python -m benchmarks.parallel_ops                       # all GPUs of this machine
    python -m benchmarks.parallel_ops --what kda --length 131072

"experts": forward and backward of `expert_mlp_over_ranks` with the routing from balanced to all tokens on one rank's
experts, MoonEP ("balanced") beside the ordinary dispatch ("home"). Must: MoonEP within 10 % from best to worst.

"kda": forward and backward of `kda_over_context` on 1, 2, … GPUs.

Prints medians with spread, and peak memory of a program by XLA's count. Writes results/parallel_ops.json.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from benchmarks.common import device_line, measure, write_results
from k3jax.ops.grouped_matmul import ExpertOptions
from k3jax.ops.kda import kda
from k3jax.parallel.context import kda_over_context
from k3jax.parallel.expert import Balance, expert_mlp_over_ranks

What = Literal["experts", "kda"]


@dataclasses.dataclass(frozen=True)
class Arguments:
    """What to time."""

    what: tuple[What, ...] = ("experts", "kda")
    tokens: int = 8192
    """Of one rank, for the experts."""
    experts: int = 64
    experts_per_token: int = 8
    latent: int = 768
    width: int = 768
    length: int = 131072
    """Of the sequence, for KDA."""
    heads: int = 12
    dtype: str = "bfloat16"


def ranks_mesh(count: int, axis: str) -> jax.sharding.Mesh:
    return jax.make_mesh((count,), (axis,), axis_types=(AxisType.Auto,), devices=jax.devices()[:count])


def routing(rng: np.random.Generator, tokens: int, a: Arguments, ranks: int, skew: float) -> np.ndarray:
    """Different experts for each token; a share `skew` of the tokens picks those of the first rank only."""
    scores = rng.random((tokens, a.experts))
    skewed = rng.random(tokens) < skew
    scores[np.ix_(skewed, np.arange(a.experts // ranks, a.experts))] -= 1
    return np.argsort(-scores, axis=1)[:, : a.experts_per_token].astype(np.int32)


def time_experts(a: Arguments) -> list[dict[str, Any]]:
    ranks, dtype = jax.device_count(), jnp.dtype(a.dtype)
    mesh, rng, rows = ranks_mesh(ranks, "expert"), np.random.default_rng(0), []
    tokens = ranks * a.tokens
    on_gpu = jax.default_backend() == "gpu"
    options = ExpertOptions(4.0, 25.0, 8 if on_gpu else 1, "pallas" if on_gpu else "ragged")
    cut = jax.sharding.NamedSharding(mesh, P("expert"))

    def normal(*shape: int) -> jax.Array:
        return jax.device_put(jnp.asarray(rng.standard_normal(shape, np.float32) / shape[-2] ** 0.5, dtype), cut)

    z, dy = normal(tokens, a.latent), normal(tokens, a.latent)
    w13, w2 = normal(a.experts, a.latent, 2 * a.width), normal(a.experts, a.width, a.latent)
    weights = jax.device_put(jnp.full((tokens, a.experts_per_token), 1 / a.experts_per_token, jnp.float32), cut)

    def step(balance: Balance, z, w13, w2, weights, experts, dy):
        def forward(z, w13, w2, weights):
            return expert_mlp_over_ranks(z, w13, w2, experts, weights, None, options, axis="expert", balance=balance)

        y, pull = jax.vjp(forward, z, w13, w2, weights)
        return y, *pull(dy)

    balances: tuple[Balance, ...] = ("balanced", "home")
    for balance in balances:
        run = jax.jit(
            jax.shard_map(
                partial(step, balance), mesh=mesh, in_specs=P("expert"), out_specs=P("expert"), check_vma=False
            )
        )
        compiled: Any = None
        for skew in (0.0, 0.25, 0.5, 1.0):
            experts = jax.device_put(routing(rng, tokens, a, ranks, skew), cut)
            args = (z, w13, w2, weights, experts, dy)
            compiled = compiled or run.lower(*args).compile()  # one program for every routing
            ms, low, high = measure(compiled, *args)
            temporaries = compiled.memory_analysis().temp_size_in_bytes
            rows.append({"what": "experts", "ranks": ranks, "balance": balance, "skew": skew, "ms": ms})
            rows[-1] |= {"spread": [low, high], "temporaries": temporaries}
            print(
                f"experts, {ranks} ranks, {balance:8} {skew:4.0%} on one rank: {ms:7.3f} ms ({low:.3f}-{high:.3f}), "
                f"temporaries {temporaries / 2**30:.2f} GiB",
                flush=True,
            )
        times = [row["ms"] for row in rows if row["balance"] == balance]
        print(f"experts, {balance}: slowest routing {max(times) / min(times):.3f} times the fastest", flush=True)
    return rows


def time_kda(a: Arguments) -> list[dict[str, Any]]:
    rows, dim = [], 128
    counts = [n for n in (1, 2, 4, 8) if n <= jax.device_count()]
    keys = jax.random.split(jax.random.key(0), 6)
    shape = (1, a.length, a.heads, dim)
    q, k, v, g, dy = (jax.random.normal(key, shape, jnp.dtype(a.dtype)) for key in keys[:5])
    beta = jax.random.normal(keys[5], shape[:3], jnp.dtype(a.dtype))
    gates = {"A_log": jnp.zeros(a.heads), "dt_bias": jnp.full((a.heads, dim), -6.0)}
    options: dict[str, Any] = {"gate": "lower_bound", "beta_is_logit": True, "qk_l2norm": True}
    for count in counts:
        mesh = ranks_mesh(count, "context")
        cut = jax.sharding.NamedSharding(mesh, P(None, "context"))

        def step(gates, dy, *args, alone=count == 1):
            def forward(*args):
                if alone:
                    return kda(*args, **gates, **options)
                return kda_over_context(*args, axis="context", **gates, **options)[0]

            o, pull = jax.vjp(forward, *args)
            return o, *pull(dy)

        run = jax.jit(
            jax.shard_map(
                step,
                mesh=mesh,
                in_specs=(P(), *[P(None, "context")] * 6),
                out_specs=P(None, "context"),
                check_vma=False,
            )
        )
        args = (gates, *(jax.device_put(x, cut) for x in (dy, q, k, v, g, beta)))
        ms, low, high = measure(run, *args)
        rows.append({"what": "kda", "devices": count, "length": a.length, "heads": a.heads, "ms": ms})
        rows[-1] |= {"spread": [low, high]}
        print(
            f"KDA forward + backward, {a.length} × {a.heads} on {count}: {ms:7.2f} ms ({low:.2f}-{high:.2f}), "
            f"{rows[0]['ms'] / ms:.2f} times one",
            flush=True,
        )
    return rows


if __name__ == "__main__":
    arguments = tyro.cli(Arguments)
    print(f"{device_line()}, {jax.device_count()} devices")
    found = [row for what in arguments.what for row in {"experts": time_experts, "kda": time_kda}[what](arguments)]
    print(f"written to {write_results('parallel_ops', found)}")
