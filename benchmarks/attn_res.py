"""Times of attention residuals and of the loss beside what memory or the tensor cores allow.

    python -m benchmarks.attn_res [--small] [--no-write]

`block` is one AttnRes block as the decoder runs it: a scan over layers of two sublayers with rematerialisation, once
with attention residuals and once with plain ones; what a sublayer costs is the difference. The products that stand for
the sublayers are the same in both.

Floors of a sublayer, in rows [T, D] of bfloat16 and beyond a plain residual: forward N reads. Backward with
rematerialisation 2 N reads, one write of the mix's gradient, and its share of one pass over the bank for the block:
Q + 2 N reads and N writes over Q sublayers.
"""

from __future__ import annotations

import argparse
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.common import device_line, measure, write_results
from k3jax.ops.attn_res import mix_norm, query_read, read_bank, why_not_pallas
from k3jax.ops.cross_entropy import linear_cross_entropy
from k3jax.ops.norms import rms_norm

BANDWIDTH, FLOPS = 4.26e12, 760e12  # a copy and a large bfloat16 product, measured on an H200
EPS = 1e-5
Row = dict[str, Any]


def normal(seed: int, shape: Sequence[int], dtype: Any = jnp.bfloat16, scale: float = 1.0) -> jax.Array:
    return (scale * jax.random.normal(jax.random.key(seed), shape)).astype(dtype)


def block(kind: str, N: int, layers: int, B: int, T: int, D: int) -> tuple[Callable, tuple]:
    """A function of (bank, x, queries, norms, small weights) → x, and its arguments."""
    bank = tuple(normal(i, (B, T, D)) for i in range(N))
    args = (
        bank,
        normal(20, (B, T, D)),
        normal(21, (layers, 2, D), jnp.float32, 0.02),
        1 + normal(22, (layers, 2, D), jnp.float32, 0.1),
        normal(23, (D, 64), scale=D**-0.5),
        normal(24, (64, D), scale=0.1),
    )

    def run(bank, x, queries, norms, down, up):
        reads = read_bank(bank, [queries], EPS)[0] if kind != "plain" else None
        fixed = jax.lax.stop_gradient(bank)

        def layer(x, xs):
            read, query, norm = xs
            for i in range(2):
                if kind == "plain":
                    h = rms_norm(x, norm[i], EPS)
                else:
                    h, _, x = mix_norm(
                        fixed,
                        query_read(read, i),
                        x,
                        query[i],
                        norm[i],
                        EPS,
                        implementation=kind,  # type: ignore
                    )
                x = x + h @ down @ up
            return x, None

        return jax.lax.scan(jax.checkpoint(layer, prevent_cse=False), x, (reads, queries, norms))[0]

    return run, args


def bench_block(shape: str, N: int, layers: int, B: int, T: int, D: int) -> list[Row]:
    row_ms, Q, rows = B * T * D * 2 / BANDWIDTH * 1e3, 2 * layers, []
    floors = {"forward": N * row_ms, "forward+backward": (3 * N + 1 + (Q + 3 * N) / Q) * row_ms}
    plain: dict[str, float] = {}
    bank, x = [jax.ShapeDtypeStruct((B, T, D), jnp.bfloat16)] * N, jax.ShapeDtypeStruct((B, T, D), jnp.bfloat16)
    kinds = ["plain", "xla"] + (["pallas"] if why_not_pallas(bank, x) is None else [])  # type: ignore
    for kind in kinds:
        run, args = block(kind, N, layers, B, T, D)
        d_out = normal(30, (B, T, D))

        def backward(*args, run=run):
            out, vjp = jax.vjp(run, *args[:-1])
            return vjp(args[-1])

        for direction, fn, given in (
            ("forward", jax.jit(run), args),
            ("forward+backward", jax.jit(backward), (*args, d_out)),
        ):
            middle, low, high = (ms / Q for ms in measure(fn, *given))
            if kind == "plain":
                plain[direction] = middle
                continue
            extra, floor = middle - plain[direction], floors[direction]
            name = f"attn_res {shape} N={N} {kind} {direction}, a sublayer beyond plain"
            rows.append(line(name, extra, low - plain[direction], high - plain[direction], floor))
    return rows


def line(name: str, ms: float, low: float, high: float, floor: float, note: str = "") -> Row:
    print(f"{name:76s} {ms:8.3f} ms ({low:.3f}–{high:.3f})  floor {floor:7.3f}  ×{ms / floor:5.2f} {note}", flush=True)
    return {"name": name, "ms": ms, "min": low, "max": high, "floor_ms": floor, "ratio": ms / floor}


def bench_loss(B: int, T: int, D: int, V: int, chunks: Sequence[int], z_loss: float = 1e-4) -> list[Row]:
    x, w = normal(1, (B, T, D)), normal(2, (D, V), jnp.float32, D**-0.5)
    targets = jax.random.randint(jax.random.key(3), (B, T), 0, V)
    mask, product, rows = jnp.ones((B, T), bool), 2 * B * T * D * V / FLOPS * 1e3, []
    for chunk in chunks:
        loss = partial(linear_cross_entropy, chunk=chunk, z_loss=z_loss)
        grads = jax.jit(jax.grad(lambda *args, loss=loss: loss(*args), (0, 1), has_aux=True))
        args = (x, w, targets, mask)
        temp = grads.lower(*args).compile().memory_analysis()
        note = f"temp {temp.temp_size_in_bytes / 2**30:.2f} GiB" if temp else ""
        name = f"cross-entropy {B}×{T}×{D}→{V} chunk {chunk}"
        rows.append(line(f"{name} forward", *measure(jax.jit(loss), *args), product))
        rows.append(line(f"{name} forward+backward", *measure(grads, *args), 3 * product, note))
    return rows


def main(small: bool, write: bool) -> None:
    print(device_line())
    shapes = (
        [lambda: bench_block("tiny", 2, 2, 1, 64, 256), lambda: bench_loss(1, 64, 32, 128, (16, 64))]
        if small
        else [
            *(partial(bench_block, "proxy 4×4096×1536", N, 4, 4, 4096, 1536) for N in (1, 2, 3, 4)),
            partial(bench_block, "K3 1×4096×7168", 8, 4, 1, 4096, 7168),
            lambda: bench_loss(4, 4096, 1536, 32_768, (512, 1024, 2048, 4096)),
        ]
    )
    rows: list[Row] = []
    for bench in shapes:
        try:
            rows += bench()
        except Exception:  # one failure must not hide the other sections
            traceback.print_exc()
    if write:
        print("written to", write_results("attn_res", rows))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="tiny shapes, to try the script")
    parser.add_argument("--no-write", action="store_true", help="print only")
    options = parser.parse_args()
    main(options.small, not options.no_write)
