"""The gated norm's own backward pass."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_rows_close, wide_copy

from k3jax.ops import gated_norm_gpu
from k3jax.ops.mosaic import h200_mesh
from k3jax.ops.norms import gated_rms_norm, resolve_gated_norm


def test_gated_norm_and_every_gradient_match_the_definition(x64):
    rng = np.random.default_rng(0)
    x, gate, cotangent = (rng.normal(size=(2, 3, 4, 8)) for _ in range(3))
    weight = rng.normal(size=8)

    def defined(x, weight, gate):
        return x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-5) * weight / (1 + jnp.exp(-gate))

    np.testing.assert_allclose(gated_rms_norm(x, weight, gate, 1e-5), defined(x, weight, gate), rtol=1e-12)
    ours = jax.grad(lambda *a: jnp.sum(gated_rms_norm(*a, 1e-5) * cotangent), argnums=(0, 1, 2))(x, weight, gate)
    theirs = jax.grad(lambda *a: jnp.sum(defined(*a) * cotangent), argnums=(0, 1, 2))(x, weight, gate)
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-12)


def kernel_arguments(dtype, rows=72):
    rng = np.random.default_rng(0)
    x, gate, d_y = (jnp.asarray(rng.normal(size=(rows // 2, 2, 128)), dtype) for _ in range(3))
    return x, 1 + jnp.asarray(rng.normal(size=128) * 0.1, jnp.float32), gate, d_y


@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.float32, 1e-6), (jnp.bfloat16, 3e-3)])
def test_kernels_match_plain_jax(dtype, tolerance):
    x, weight, gate, d_y = kernel_arguments(dtype)
    y, vjp = jax.vjp(lambda *a: gated_rms_norm(*a, 1e-5), x, weight, gate)
    ours = (
        gated_norm_gpu.forward(x, weight, gate, 1e-5, interpret=True),
        *gated_norm_gpu.backward(x, weight, gate, 1e-5, d_y, interpret=True),
    )
    for a, b in zip(ours, (y, *vjp(d_y)), strict=True):
        assert a.dtype == b.dtype
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        assert np.linalg.norm(a - b) <= tolerance * np.linalg.norm(b)


@pytest.mark.gpu
@pytest.mark.parametrize("dtypes", [("float32", "float32"), ("bfloat16", "bfloat16"), ("float32", "bfloat16")], ids=str)
@pytest.mark.parametrize("lead", [(4, 4096, 12), (36, 2), (1000, 1)], ids=str)
def test_kernels_match_plain_jax_on_a_gpu(lead, dtypes):
    rng = np.random.default_rng(2)
    x, gate, d_y = (jnp.asarray(rng.normal(size=(*lead, 128)), t) for t in (*dtypes, dtypes[1]))
    weight = 1 + jnp.asarray(rng.normal(size=128) * 0.1, jnp.float32)

    def value_and_grads(x, weight, gate, d_y, implementation):
        y, vjp = jax.vjp(lambda *a: gated_rms_norm(*a, 1e-5, implementation), x, weight, gate)
        return y, *vjp(d_y)

    run = jax.jit(value_and_grads, static_argnames="implementation")
    got = run(x, weight, gate, d_y, implementation="pallas")
    with jax.enable_x64(True):
        want = run(*wide_copy((x, weight, gate, d_y)), implementation="xla")
    for name, a, b, like in zip(("y", "d_x", "d_weight", "d_gate"), got, want, (gate, x, weight, gate), strict=True):
        assert a.dtype == like.dtype
        assert_rows_close(a, b, 1e-5 if a.dtype == jnp.float32 else 4e-3, name)


def test_kernels_lower_for_a_gpu():
    def both(x, weight, gate, d_y):
        return gated_norm_gpu.forward(x, weight, gate, 1e-5), gated_norm_gpu.backward(x, weight, gate, 1e-5, d_y)

    with jax.sharding.use_abstract_mesh(h200_mesh()):
        jax.jit(both).trace(*kernel_arguments(jnp.bfloat16)).lower(lowering_platforms=("cuda",))


def test_the_kernels_run_unasked_where_they_can(monkeypatch):
    x, _, gate, _ = kernel_arguments(jnp.bfloat16)
    assert resolve_gated_norm(x, gate) == "xla"
    monkeypatch.setattr(gated_norm_gpu, "why_not_here", lambda: None)
    assert resolve_gated_norm(x, gate) == "pallas"
    assert resolve_gated_norm(x, gate, "xla") == resolve_gated_norm(x[:-1], gate[:-1]) == "xla"


def test_asking_for_the_kernels_where_they_cannot_run_says_why():
    x, weight, gate, _ = kernel_arguments(jnp.bfloat16)
    with pytest.raises(ValueError, match="multiple of 8"):
        gated_rms_norm(x[:-1], weight, gate[:-1], 1e-5, implementation="pallas")
    with pytest.raises(ValueError, match="NVIDIA GPU"):
        gated_rms_norm(x, weight, gate, 1e-5, implementation="pallas")
