"""The short convolution against its definition, token by token."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_rows_close, wide_copy

from k3jax.ops import short_conv_gpu
from k3jax.ops.mosaic import h200_mesh
from k3jax.ops.short_conv import conv_tail, resolve_implementation, short_conv


def defined(u, weight, segment_ids=None, tail=None):
    """One token and one tap at a time, in plain differentiable jnp."""
    T, W = u.shape[1], weight.shape[-1]
    past = jnp.zeros_like(u[:, : W - 1]) if tail is None else tail
    past = jnp.zeros((u.shape[0], W - 1, *u.shape[2:])) if past.shape[1] < W - 1 else past
    joined = jnp.concatenate([past, u], axis=1)
    ids = np.ones(u.shape[:2], int) if segment_ids is None else np.asarray(segment_ids)
    first = ids[:, :1] if tail is not None or segment_ids is None else np.zeros_like(ids[:, :1])
    ids = np.concatenate([first] * (W - 1) + [ids], axis=1)
    rows = []
    for t in range(T):
        z = 0.0
        for j in range(W):
            now, then = ids[:, t + W - 1], ids[:, t + j]
            keep = ((now == then) & (now != 0)) | (j == W - 1)
            z = z + jnp.where(keep.reshape(-1, *(1,) * (u.ndim - 2)), joined[:, t + j], 0) * weight[..., j]
        rows.append(z * jax.nn.sigmoid(z))
    return jnp.stack(rows, axis=1)


DOCUMENTS = np.array([[1, 1, 2, 2, 2, 0, 2, 3, 3, 0, 0], [0, 0, 1, 1, 1, 1, 1, 1, 4, 4, 4]], np.int32)


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("with_tail", [False, True])
@pytest.mark.parametrize("length", [1, 2, 3, 11])
def test_convolution_and_every_gradient_match_the_definition(x64, documents, with_tail, length):
    rng = np.random.default_rng(length)
    u, weight, cotangent = (
        rng.normal(size=(2, length, 2, 3)),
        rng.normal(size=(2, 3, 4)),
        rng.normal(size=(2, length, 2, 3)),
    )
    ids = jnp.asarray(DOCUMENTS[:, :length]) if documents else None
    tail = rng.normal(size=(2, 3, 2, 3)) if with_tail else None
    tails = () if tail is None else (tail,)

    def loss(f):
        return lambda u, w, *tail: jnp.sum(cotangent * f(u, w, ids, *tail))

    args = (u, weight, *tails)
    np.testing.assert_allclose(short_conv(u, weight, ids, tail), defined(u, weight, ids, tail), atol=1e-12)
    ours = jax.grad(loss(short_conv), argnums=tuple(range(len(args))))(*args)
    theirs = jax.grad(loss(defined), argnums=tuple(range(len(args))))(*args)
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-12)


def test_convolution_in_pieces_equals_one_pass():
    rng = np.random.default_rng(0)
    u, weight = jnp.asarray(rng.normal(size=(1, 9, 5)), jnp.float32), jnp.asarray(rng.normal(size=(5, 4)), jnp.float32)
    tail, pieces = None, []
    for piece in (u[:, :2], u[:, 2:3], u[:, 3:]):
        pieces.append(short_conv(piece, weight, tail=tail))
        tail = conv_tail(piece, 4, tail=tail)
    np.testing.assert_allclose(jnp.concatenate(pieces, axis=1), short_conv(u, weight), atol=1e-6)


def test_bfloat16_gradients_round_once_or_twice():
    rng = np.random.default_rng(1)
    u, weight = rng.normal(size=(1, 200, 8)), rng.normal(size=(8, 4))
    cotangent = jnp.asarray(rng.normal(size=u.shape), jnp.bfloat16)

    def grads(dtype):
        return jax.grad(lambda u, w: jnp.sum((short_conv(u, w) * cotangent).astype(jnp.float32)), argnums=(0, 1))(
            jnp.asarray(u, jnp.bfloat16).astype(dtype), jnp.asarray(weight, jnp.float32)
        )

    for low, full in zip(grads(jnp.bfloat16), grads(jnp.float32), strict=True):
        assert low.dtype in (jnp.bfloat16, jnp.float32)
        assert jnp.linalg.norm(low.astype(jnp.float32) - full) <= 4e-3 * jnp.linalg.norm(full)


def kernel_arguments(T, dtype, documents, H=1, B=2):
    rng = np.random.default_rng(T)
    u, d_y = (jnp.asarray(rng.normal(size=(B, T, H, 128)), dtype) for _ in range(2))
    weight = jnp.asarray(rng.normal(size=(H, 128, 4)), jnp.float32)
    ids = np.cumsum(rng.random((B, T)) < 0.1, axis=1) * (rng.random((B, T)) < 0.95)
    return u, weight, jnp.asarray(ids, jnp.int32) if documents else None, d_y


@pytest.mark.parametrize(("T", "dtype", "documents"), [(132, jnp.float32, True), (128, jnp.bfloat16, False)])
def test_kernels_match_plain_jax(T, dtype, documents):
    u, weight, ids, d_y = kernel_arguments(T, dtype, documents)
    y, vjp = jax.vjp(lambda u, w: short_conv(u, w, ids), u, weight)
    ours = (
        short_conv_gpu.forward(u, weight, ids, interpret=True),
        *short_conv_gpu.backward(u, weight, ids, d_y, interpret=True),
    )
    for a, b in zip(ours, (y, *vjp(d_y)), strict=True):
        assert a.dtype == b.dtype
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        assert np.linalg.norm(a - b) <= (1e-6 if dtype == jnp.float32 else 3e-3) * np.linalg.norm(b)


@pytest.mark.gpu
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 4e-3)])
@pytest.mark.parametrize(("B", "T", "H"), [(4, 4096, 12), (3, 136, 1), (2, 1000, 3), (1, 88, 2)])
def test_kernels_match_plain_jax_on_a_gpu(B, T, H, dtype, tolerance, documents):
    u, weight, ids, d_y = kernel_arguments(T, dtype, documents, H, B)

    def value_and_grads(u, weight, d_y, implementation):
        y, vjp = jax.vjp(lambda u, w: short_conv(u, w, ids, implementation=implementation), u, weight)
        return y, *vjp(d_y)

    run = jax.jit(value_and_grads, static_argnames="implementation")
    got = run(u, weight, d_y, implementation="pallas")
    with jax.enable_x64(True):
        want = run(*wide_copy((u, weight, d_y)), implementation="xla")
    for name, a, b, like in zip(("y", "d_u", "d_weight"), got, want, (u, u, weight), strict=True):
        assert a.dtype == like.dtype
        by_channel = (lambda x: np.swapaxes(x, -1, -2)) if name == "d_weight" else np.asarray
        assert_rows_close(by_channel(a), by_channel(b), tolerance, name)


def reads_of_shared_tiles(module):
    """(first row, rows of the tile's inner tile, whether it is swizzled) for every read of rows of a shared tile."""
    reads = []
    for line in module.splitlines():
        rows = re.search(
            r"memref<\d+x(\d+)x\w+, strided<\[\d+, 1\](?:, offset: (\d+))?>, #gpu.address_space<work", line
        )
        if "mosaic_gpu.vector_load" in line and rows:
            inner = re.search(r"#mosaic_gpu.tile<\[(\d+), \d+\]>", line)
            swizzled = "#mosaic_gpu.swizzle" in line
            reads.append((int(rows[2] or 0) // int(rows[1]), int(inner[1]) if inner else 1, swizzled))
    return reads


@pytest.mark.parametrize(("dtype", "documents"), [("bfloat16", True), ("bfloat16", False), ("float32", True)])
def test_kernels_lower_for_a_gpu_and_read_no_swizzled_tile_of_few_rows(dtype, documents, monkeypatch, tmp_path):
    """A copy swizzles by address and a read by row of the inner tile, which differ where that has less than 8 rows."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    u, weight, ids, d_y = kernel_arguments(200, dtype, documents, H=2)

    def both(u, weight, d_y):
        return short_conv_gpu.forward(u, weight, ids), short_conv_gpu.backward(u, weight, ids, d_y)

    with jax.sharding.use_abstract_mesh(h200_mesh()):
        jax.jit(both).trace(u, weight, d_y).lower(lowering_platforms=("cuda",))
    for kernel in ("forward", "backward"):
        (path,) = tmp_path.glob(f"{kernel}_*.after_layout_inference.txt")
        reads = reads_of_shared_tiles(path.read_text())
        assert {row % 8 for row, _, _ in reads} >= {0, 5, 6, 7}  # it is the tiles of u that were found
        assert not [read for read in reads if read[2] and read[1] < 8]


def test_the_kernels_run_unasked_where_they_can(monkeypatch):
    u, weight, ids, _ = kernel_arguments(200, jnp.bfloat16, True)
    assert resolve_implementation(u, weight, ids) == "xla"
    monkeypatch.setattr(short_conv_gpu, "why_not_here", lambda: None)
    assert resolve_implementation(u, weight, ids) == "pallas"
    assert resolve_implementation(u, weight, ids, "xla") == resolve_implementation(u[:, :1], weight, None) == "xla"


def test_asking_for_the_kernels_where_they_cannot_run_says_why():
    u, weight, ids, _ = kernel_arguments(200, jnp.bfloat16, True)
    for change, message in (
        ({"u": u[:, :40], "segment_ids": None}, "at least 88 tokens and a multiple of 8, not 40"),
        ({"u": u[:, :101], "segment_ids": ids[:, :101]}, "multiple of 8, not 101"),
        ({"u": u[..., :64], "weight": weight[:, :64]}, "must be"),
        ({}, "NVIDIA GPU"),
    ):
        with pytest.raises(ValueError, match=message):
            short_conv(**({"u": u, "weight": weight, "segment_ids": ids} | change), implementation="pallas")
