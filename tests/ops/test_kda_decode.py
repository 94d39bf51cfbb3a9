"""One decoding step on a pool of states: the kernel (interpreted, and lowered for a GPU) against the other ops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_rows_close, wide_copy

from k3jax.ops.kda import kda
from k3jax.ops.kda.decode import Weights, decode_kernel, decode_reference, kda_decode
from k3jax.ops.kda.gates import Activation
from k3jax.ops.mosaic import h200_mesh
from k3jax.ops.norms import gated_rms_norm
from k3jax.ops.short_conv import short_conv


def arguments(rows, slots, heads, dim=128, dtype=jnp.bfloat16, state_dtype=jnp.float32, width=4, inactive=()):
    rng = np.random.default_rng(rows)

    def normal(*shape, dtype=jnp.float32, scale=1.0):
        return jnp.asarray(rng.normal(size=shape) * scale, dtype)

    q, k, v, g, output_gate = (normal(rows, heads, dim, dtype=dtype) for _ in range(5))
    beta = normal(rows, heads, dtype=dtype)
    state = normal(slots, heads, dim, dim, dtype=state_dtype, scale=0.3)
    tails = tuple(normal(slots, width - 1, heads, dim, dtype=dtype) for _ in range(3))
    index = rng.permutation(slots)[:rows].astype(np.int32)
    index[list(inactive)] = -1
    convs = (normal(heads, dim, width, scale=0.5) for _ in range(3))
    weights = Weights(*convs, normal(heads, scale=0.3), normal(heads, dim), 1 + normal(dim, scale=0.1))
    return q, k, v, g, beta, output_gate, state, tails, jnp.asarray(index), weights


def how(gate, dim=128):
    return Activation(gate, -5.0, True, True, dim**-0.5)


def distance(a, b):
    a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
    return np.linalg.norm(a - b) / np.linalg.norm(b)


@pytest.mark.parametrize("gate", ["lower_bound", "softplus"])
@pytest.mark.parametrize(
    ("dtype", "state_dtype", "tolerance"),
    [(jnp.float32, jnp.float32, 2e-6), (jnp.bfloat16, jnp.float32, 6e-3), (jnp.bfloat16, jnp.bfloat16, 6e-3)],
)
def test_kernel_matches_the_reference_and_leaves_other_slots_alone(gate, dtype, state_dtype, tolerance):
    args = arguments(3, 6, 2, dtype=dtype, state_dtype=state_dtype, inactive=[1])
    y, state, tails = decode_kernel(*args, how(gate), 1e-5, interpret=True)
    y_ref, state_ref, tails_ref = decode_reference(*args, how(gate), 1e-5)
    assert y.dtype == dtype
    assert state.dtype == state_dtype
    assert distance(y, y_ref) <= tolerance
    assert distance(state, state_ref) <= tolerance
    assert not np.asarray(y[1]).any()
    for ours, reference in zip(tails, tails_ref, strict=True):
        np.testing.assert_array_equal(ours, reference)
    untouched = np.setdiff1d(np.arange(6), args[8])
    np.testing.assert_array_equal(state[untouched], args[6][untouched])


def test_two_taps_are_enough_for_the_kernel():
    args = arguments(2, 2, 1, dtype=jnp.float32, width=2)
    y, state, _ = decode_kernel(*args, how("lower_bound"), 1e-5, interpret=True)
    y_ref, state_ref, _ = decode_reference(*args, how("lower_bound"), 1e-5)
    assert distance(y, y_ref) <= 2e-6
    assert distance(state, state_ref) <= 2e-6


@pytest.mark.gpu
@pytest.mark.parametrize("gate", ["lower_bound", "softplus"])
@pytest.mark.parametrize(
    ("dtype", "state_dtype"), [("float32", "float32"), ("bfloat16", "float32"), ("bfloat16", "bfloat16")]
)
@pytest.mark.parametrize(("rows", "slots", "heads", "width"), [(3, 6, 2, 4), (32, 40, 12, 4), (5, 5, 1, 2)])
def test_kernel_matches_the_reference_on_a_gpu(rows, slots, heads, width, dtype, state_dtype, gate):
    args = arguments(rows, slots, heads, dtype=dtype, state_dtype=state_dtype, width=width, inactive=[1])
    before, index = np.asarray(args[6], np.float64), np.asarray(args[8])
    with jax.enable_x64(True):
        want = kda_decode(*wide_copy(args), gate=gate, implementation="xla")
        y_want, state_want, tails_want = jax.tree.map(np.asarray, want)
    step = jax.jit(lambda *args: kda_decode(*args, gate=gate, implementation="pallas"), donate_argnums=(6, 7))
    y, state, tails = step(*args)
    assert (y.dtype, state.dtype) == (dtype, state_dtype)
    for name, a, b in (("y", y, y_want), ("state", state, state_want)):
        assert_rows_close(a, b, 1e-5 if a.dtype == jnp.float32 else 4e-3, name)
    assert not np.asarray(y[1]).any()
    for a, b in zip(tails, tails_want, strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float64), b)
    untouched = np.setdiff1d(np.arange(slots), index)
    np.testing.assert_array_equal(np.asarray(state, np.float64)[untouched], before[untouched])


@pytest.mark.parametrize("state_dtype", [jnp.float32, jnp.bfloat16])
def test_kernel_lowers_for_a_gpu_and_works_in_place(state_dtype):
    *args, weights = arguments(4, 8, 2, state_dtype=state_dtype)
    step = jax.jit(lambda *x: decode_kernel(*x, weights, how("lower_bound"), 1e-5), donate_argnums=(6, 7))
    with jax.sharding.use_abstract_mesh(h200_mesh()):
        text = step.trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("output_operand_alias<") == 4


def test_steps_equal_one_pass_over_the_sequence(x64):
    T, H, K = 7, 2, 16
    q, k, v, g, beta, output_gate, state, tails, _, weights = arguments(T, 3, H, K, jnp.float64, jnp.float64)
    state, tails = state.at[1].set(0), tuple(t.at[1].set(0) for t in tails)
    steps = []
    for t in range(T):
        token = (x[t : t + 1] for x in (q, k, v, g, beta, output_gate))
        y, state, tails = kda_decode(*token, state, tails, jnp.array([1], jnp.int32), weights)
        steps.append(y[0])
    convs = zip((q, k, v), (weights.q_conv, weights.k_conv, weights.v_conv))
    convolved = (short_conv(x[None], w) for x, w in convs)
    gates = {"A_log": weights.A_log, "dt_bias": weights.dt_bias, "gate": "lower_bound"}
    o, final = kda(
        *convolved,
        g[None],
        beta[None],
        **gates,
        beta_is_logit=True,
        qk_l2norm=True,
        return_final_state=True,
        implementation="reference",
    )
    np.testing.assert_allclose(
        jnp.stack(steps), gated_rms_norm(o[0], weights.norm, output_gate, 1e-5), rtol=1e-9, atol=1e-12
    )
    np.testing.assert_allclose(state[1], final[0], rtol=1e-9, atol=1e-12)


def test_asking_for_the_kernel_where_it_cannot_run_says_why():
    with pytest.raises(ValueError, match="K and V must be 128, not 64"):
        kda_decode(*arguments(1, 1, 1, 64), implementation="pallas")
    args = arguments(1, 1, 1, dtype=jnp.float32)
    tails = tuple(t.astype(jnp.bfloat16) for t in args[7])
    with pytest.raises(ValueError, match="tails must be float32"):
        kda_decode(*args[:7], tails, *args[8:], implementation="pallas")
    with pytest.raises(ValueError, match="NVIDIA GPU"):
        kda_decode(*arguments(1, 1, 1), implementation="pallas")
    args = arguments(2, 2, 1)
    with pytest.raises(ValueError, match="slots has shape"):
        kda_decode(*args[:8], args[8][:1], args[9])
