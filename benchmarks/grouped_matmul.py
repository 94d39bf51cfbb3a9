"""Experts' grouped products against XLA's, and a whole MoE layer with its parts.

    python benchmarks/grouped_matmul.py               on one Hopper GPU; writes results/grouped_matmul.json
    python benchmarks/grouped_matmul.py --tilings     other tiles, unaligned groups, and float32 products as well
    python benchmarks/grouped_matmul.py --peers       `lax.ragged_dot` and the blocked products in plain JAX as well
    python benchmarks/grouped_matmul.py --small       a rehearsal with tiny shapes, interpreted on a CPU

Every row has the time, its arithmetic rate and its ratio to a floor: operations at 790 TFLOP/s or bytes at 4.26 TB/s,
whichever is longer. Dense work of equal size is a batched product of equal groups.

Legend: M rows, E groups, D → F widths, N tokens, K experts of a token.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import traceback
from collections.abc import Callable
from functools import partial, reduce
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.common import device_line, measure, write_results
from k3jax.config import MoEConfig, proxy
from k3jax.model.mlp import MLP
from k3jax.model.moe import LatentMoE
from k3jax.ops.grouped_matmul import ExpertOptions, Tiling, expert_mlp, group_layout, grouped_matmul, mosaic, ragged
from k3jax.ops.grouped_matmul.glu import Glu
from k3jax.ops.grouped_matmul.layout import rows_at
from k3jax.ops.quantile_balancing import qb_histogram
from k3jax.ops.router import route, router_logits

BF16 = jnp.bfloat16


class Table:
    """Measures, prints and keeps rows; a failing one prints its traceback and is left out."""

    def __init__(self, small: bool):
        self.rows: list[dict[str, Any]] = []
        self.repeats = {"batches": 1, "calls": 1} if small else {"batches": 7, "calls": 4}

    def add(self, shape: str, name: str, fn: Callable, *args: Any, flops: float = 0, bytes: float = 0) -> None:
        try:
            ms, low, high = measure(fn, *args, **self.repeats)
        except Exception:
            print(f"{shape:10s} {name:44s} FAILED")
            traceback.print_exc()
            return
        floor = max(flops / 790e9, bytes / 4.26e9)
        row = {"shape": shape, "name": name, "ms": ms, "min": low, "max": high}
        row |= {"tflops": flops / ms / 1e9, "floor_ms": floor, "over_floor": ms / floor if floor else None}
        self.rows.append(row)
        ratio = f"{ms / floor:5.2f}×" if floor else ""
        print(
            f"{shape:10s} {name:44s} {ms:8.3f} ms [{low:.3f}, {high:.3f}] {row['tflops']:6.0f} TFLOP/s {ratio}",
            flush=True,
        )


def random(seed: int, *shape: int, dtype: Any = BF16) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)


def sizes_of(M: int, E: int, align: int = 1) -> np.ndarray:
    """Dirichlet sizes, the second group empty, multiples of `align`."""
    share = np.random.default_rng(0).dirichlet(np.ones(E))
    share[1] = 0
    sizes = (share / share.sum() * M).astype(np.int32) // align * align
    sizes[0] += M - sizes.sum()
    return sizes


@partial(jax.jit, static_argnames=("implementation", "align", "tiling"))
def all_three(x, w, sizes, dy, implementation, align=1, tiling=ragged.DEFAULT):
    """y, dx, dw."""
    options = {"implementation": implementation, "align": align, "tiling": tiling}
    y, pullback = jax.vjp(lambda x, w: grouped_matmul(x, w, sizes, **options), x, w)
    return y, *pullback(dy)


def check(M: int, E: int, D: int, F: int, sizes: np.ndarray, tiling: Tiling) -> dict[str, float]:
    """Largest relative L2 error over groups of y, dx, dw against float64, tails poisoned."""
    x, w, dy = random(1, M, D), random(2, E, D, F), random(3, M, F)
    used = int(sizes.sum())
    x, dy = x.at[used:].set(jnp.nan), dy.at[used:].set(jnp.nan)
    got = [np.asarray(a, np.float64) for a in all_three(x, w, jnp.asarray(sizes), dy, "pallas", tiling=tiling)]
    x, w, dy = (np.asarray(a, np.float64) for a in (x, w, dy))
    errors, ends = {"y": 0.0, "dx": 0.0, "dw": 0.0}, np.cumsum(sizes)
    for e, (start, end) in enumerate(zip(ends - sizes, ends)):
        r = slice(start, end)
        want = {"y": x[r] @ w[e], "dx": dy[r] @ w[e].T, "dw": x[r].T @ dy[r]}
        for (name, b), a in zip(want.items(), (got[0][r], got[1][r], got[2][e])):
            error = np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-30)
            errors[name] = max(errors[name], error if np.isfinite(error) else np.inf)
    exact = not got[0][used:].any() and not got[1][used:].any() and not got[2][sizes == 0].any()
    if not exact or max(errors.values()) > 4e-3:
        raise AssertionError(f"wrong: {errors}, zeros where there are no rows: {exact}")
    return errors


def correctness(table: Table, small: bool, tilings: list[Tiling]) -> None:
    cases = {
        "unaligned": np.array([70, 5, 130, 0, 1, 64, 333, 0], np.int32),
        "short": np.array([1, 2, 3, 0, 4, 5, 6, 7], np.int32),
        "aligned": np.array([128, 0, 64, 8, 256, 0, 512, 16], np.int32),
        "one group": np.array([0, 0, 0, 1000, 0, 0, 0, 0], np.int32),
    }
    for tiling in tilings:
        for name, sizes in cases.items():
            try:
                D, F = (128, 128) if small else (384, 512)
                errors = check(1024, 8, D, F, sizes, tiling)
                table.rows.append({"shape": "check", "name": f"{name}, {tiling}", "errors": errors})
                print(f"{name:12s} columns {tiling.columns}: {', '.join(f'{k} {v:.1e}' for k, v in errors.items())}")
            except Exception:
                traceback.print_exc()
        if small:
            break


def products(table: Table, shape: str, M: int, E: int, D: int, F: int, tilings: list[Tiling], peers: bool) -> None:
    """Forward, dx, dw and all three at one shape."""
    w, flops = random(2, E, D, F), 2 * M * D * F
    x, dy = random(1, M, D), random(3, M, F)
    bytes = 2 * (M * (D + F) + E * D * F)
    add = partial(table.add, shape, flops=flops, bytes=bytes)
    sizes = jnp.asarray(sizes_of(M, E))
    for tiling in tilings:
        forward = jax.jit(partial(mosaic.rows_times_matrices, tiling=tiling))
        dx = jax.jit(partial(mosaic.rows_times_matrices, tiling=tiling, transpose=True))
        dw = jax.jit(partial(mosaic.outer_products, tiling=tiling))
        ordered = jax.jit(partial(mosaic.outer_products, tiling=dataclasses.replace(tiling, largest_first=True)))
        even = np.full(E, M // E // 8 * 8, np.int32)
        splits = {"even groups": even, "align 8": sizes_of(M, E, 8)} | ({"align 1": sizes} if len(tilings) > 1 else {})
        for split, cut in splits.items():
            tag, cut = f"pallas {tiling.columns}×{tiling.stages} {split}", jnp.asarray(cut)
            tiles = ragged.row_tiles(cut, M)
            add(f"{tag} forward", forward, x, w, tiles)
            add(f"{tag} dx", dx, dy, w, tiles)
            add(f"{tag} dw", dw, x, dy, cut)
            add(f"{tag} dw, largest first", ordered, x, dy, cut)
    three = {"flops": 3 * flops, "bytes": 3 * bytes}
    add("pallas all", partial(all_three, implementation="pallas", tiling=tilings[0]), x, w, sizes, dy, **three)
    if len(tilings) > 1:
        wide = partial(mosaic.outer_products, tiling=tilings[0], out_dtype=jnp.float32)
        add("pallas dw in float32", jax.jit(wide), x, dy, sizes)
    xe, dye = x[: M // E * E].reshape(E, -1, D), dy[: M // E * E].reshape(E, -1, F)
    add("dense forward", jax.jit(partial(jnp.einsum, "ead,edf->eaf")), xe, w)
    add("dense dx", jax.jit(partial(jnp.einsum, "eaf,edf->ead")), dye, w)
    add("dense dw", jax.jit(partial(jnp.einsum, "ead,eaf->edf")), xe, dye)
    if peers:
        few = dict(table.repeats, batches=3, calls=1)
        table.repeats, usual = few, table.repeats
        add("lax.ragged_dot forward", jax.jit(jax.lax.ragged_dot), x, w, sizes)
        aligned = jnp.asarray(sizes_of(M, E, 128))
        add("blocked forward", jax.jit(partial(grouped_matmul, implementation="blocked", align=128)), x, w, aligned)
        add("blocked all", partial(all_three, implementation="blocked", align=128), x, w, aligned, dy, **three)
        table.repeats = usual


def layer_parts(table: Table, N: int, K: int, E: int, L: int, F: int, tiling: Tiling) -> None:
    """What an expert layer does besides plain products."""
    logits, z = random(1, N, E, dtype=jnp.float32), random(2, N, L)
    positions, bias, valid = jnp.arange(N, dtype=jnp.int32), jnp.zeros(E), jnp.ones((N, K), bool)
    pick = partial(route, experts_per_token=K)
    routing = jax.jit(pick)(logits, bias, positions)
    experts, weights = routing.experts_NK, routing.weights_NK
    layout = jax.jit(partial(group_layout, num_experts=E, align=8))(experts, valid)
    M = len(layout.slot_of_row)

    def add(name: str, fn: Callable, *args: Any, flops: float = 0, bytes: float = 0) -> None:
        table.add("layer", name, jax.jit(fn), *args, flops=flops, bytes=bytes)

    x, router = random(10, N, 2 * L), random(11, 2 * L, E, dtype=jnp.float32)
    add("router logits", router_logits, x, router, bytes=4 * N * L)
    add("their backward", lambda x, w, d: jax.vjp(router_logits, x, w)[1](d), x, router, logits, bytes=8 * N * L)
    histogram = partial(qb_histogram, experts_per_token=K, bins=1000)
    add(
        "quantile-balancing histogram",
        lambda s, b, a: histogram(s, b, alpha_N=a),
        routing.scores_NE,
        bias,
        routing.threshold_N,
    )
    add("route", pick, logits, bias, positions)
    add("route gradient", jax.grad(lambda l: jnp.sum(pick(l, bias, positions).weights_NK ** 2)), logits)
    add("group_layout", partial(group_layout, num_experts=E, align=8), experts, valid)
    rows = random(3, M, L)
    gate, up = random(5, M, F), random(6, M, F)
    w13, w2 = random(7, E, L, 2 * F) / L**0.5, random(8, E, F, L) / F**0.5
    moved = 2 * (M + N) * L
    add("gather of tokens", lambda z, s: rows_at(z, s // K), z, layout.slot_of_row, bytes=moved)

    def sum_of_slots(y, rows_of):
        return reduce(jnp.add, [rows_at(y, rows_of[:, k]).astype(jnp.float32) for k in range(K)]).astype(y.dtype)

    add("sum over a token's rows", sum_of_slots, rows, layout.row_of_NK, bytes=moved)
    scale, tiles = random(9, M, dtype=jnp.float32), ragged.row_tiles(layout.group_sizes_E, M)
    both = {"flops": 4 * M * L * F, "bytes": 2 * M * (L + 2 * F)}
    multiply = partial(mosaic.rows_times_matrices, tiling=tiling)
    glu = lambda x, w, t, s: multiply(x, w, t, glu=Glu(s, 4.0, 25.0))  # noqa: E731
    add("gate, up and SiTU", glu, rows, w13, tiles, scale, flops=both["flops"], bytes=2 * M * (L + F))
    add("dx of gate and up", lambda g, u, w, t: multiply((g, u), w, t, transpose=True), gate, up, w13, tiles, **both)
    pair = lambda x, g, u, s: mosaic.outer_products(x, (g, u), s, tiling=tiling)  # noqa: E731
    add("dw of gate and up", pair, rows, gate, up, layout.group_sizes_E, **both)
    flops = 6 * M * L * F
    options = ExpertOptions(4.0, 25.0, 8, "pallas", tiling)
    apply = lambda z, w13, w2, p: expert_mlp(z, w13, w2, p, layout, options)  # noqa: E731
    grad = jax.grad(lambda *args: jnp.sum(apply(*args) ** 2), (0, 1, 2, 3))
    add("expert_mlp forward", apply, z, w13, w2, weights, flops=flops)
    add("expert_mlp forward and backward", grad, z, w13, w2, weights, flops=3 * flops + flops * 2 / 3)


def whole_layer(table: Table, B: int, T: int, config: Any, names: tuple[str, ...]) -> None:
    """`LatentMoE` from float32 parameters, its forward pass repeated in the backward pass as in training."""
    x, d_out = random(1, B, T, config.hidden_size), random(2, B, T, config.hidden_size)
    positions = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
    valid, bias, key = jnp.ones((B, T), bool), jnp.zeros(config.moe.num_experts), jax.random.key(0)
    for name in names:
        moe = dataclasses.replace(config.moe, implementation=name)
        layer = LatentMoE(dataclasses.replace(config, moe=moe), key)
        graph, params = nnx.split(layer)

        def forward(params, x, graph=graph):
            return nnx.merge(graph, params)(x, positions, valid, bias, False)[0]

        def both(params, x, d_out, forward=forward, keep=()):
            policy = jax.checkpoint_policies.save_only_these_names(*keep)
            y, pullback = jax.vjp(jax.checkpoint(forward, policy=policy), params, x)
            return y, *pullback(d_out)

        table.add("layer", f"LatentMoE forward, {name}", jax.jit(forward), params, x)
        table.add("layer", f"LatentMoE forward, backward, remat, {name}", jax.jit(both), params, x, d_out)
        keeping = jax.jit(partial(both, keep=("experts",)))
        table.add("layer", f"LatentMoE same, experts' sum kept, {name}", keeping, params, x, d_out)
    mlp_graph, mlp_params = nnx.split(MLP(config, config.moe.num_shared_experts * config.moe.expert_size, key))

    def shared(params, x, d_out):
        return jax.vjp(jax.checkpoint(lambda p, x: nnx.merge(mlp_graph, p)(x)), params, x)[1](d_out)

    table.add("layer", "shared experts forward, backward, remat", jax.jit(shared), mlp_params, x, d_out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="tiny shapes, interpreted: a rehearsal")
    parser.add_argument("--tilings", action="store_true", help="several tilings")
    parser.add_argument("--peers", action="store_true", help="the implementations in plain JAX")
    arguments = parser.parse_args()
    if arguments.small:  # the interpreter compiles on threads that one CPU device would keep waiting
        jax.config.update("jax_num_cpu_devices", 8)
    print(device_line())
    table = Table(arguments.small)
    if arguments.small:
        tilings = [Tiling(128, 2, 2, True)]
        correctness(table, True, tilings)
        moe = MoEConfig(num_experts=4, experts_per_token=2, expert_size=128, latent_size=128)
        whole_layer(table, 1, 32, dataclasses.replace(proxy(), hidden_size=128, moe=moe), ("blocked",))
        layer_parts(table, 32, 2, 4, 128, 128, tilings[0])
        products(table, "small", 256, 4, 128, 128, tilings, peers=False)
        return
    tilings = [Tiling(256, 4), Tiling(128, 6)] if arguments.tilings else [Tiling()]
    correctness(table, False, [*tilings, Tiling(largest_first=True)])
    whole_layer(table, 4, 4096, proxy(), ("pallas", "blocked") if arguments.peers else ("pallas",))
    layer_parts(table, 16_384, 8, 64, 768, 768, tilings[0])
    products(table, "proxy", 131_072, 64, 768, 768, tilings, peers=False)
    products(table, "k3", 16_384, 32, 3584, 3072, tilings, peers=arguments.peers)
    print(f"wrote {write_results('grouped_matmul', table.rows)}")


if __name__ == "__main__":
    main()
