"""KDA against the golden vectors, against its recurrence in float64, and against what its callers rely on."""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3jax.ops.kda import kda, kda_step, resolve_for, resolve_implementation
from k3jax.ops.kda.intra import unit_lower_inverse

CASES = json.loads((Path(__file__).parents[1] / "golden" / "g1_kda_op" / "cases.json").read_text())
RAW = dict(gate="lower_bound", beta_is_logit=True, qk_l2norm=True)
TOKENS = ("q", "k", "v", "g", "beta")  # the inputs with a T axis

# Most of the time here is compilation; without LLVM's optimisation it is half.
quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def map_tokens(f, inputs):
    return {n: f(x) if n in TOKENS else x for n, x in inputs.items()}


def make_inputs(batch, length, heads=2, key=16, value=16, seed=0, dtype=np.float64, states=None, **changes):
    """Random raw inputs, as a KDA layer makes them; `changes` replace some."""
    rng = np.random.default_rng(seed)
    inputs = dict(
        q=rng.normal(size=(batch, length, heads, key)),
        k=rng.normal(size=(batch, length, heads, key)),
        v=rng.normal(size=(batch, length, heads, value)),
        g=2 * rng.normal(size=(batch, length, heads, key)),
        beta=rng.normal(size=(batch, length, heads)),
        A_log=0.3 * rng.normal(size=heads),
        dt_bias=rng.normal(size=(heads, key)),
        initial_state=rng.normal(size=(states or batch, heads, key, value)),
    )
    return {name: jnp.asarray(x, dtype) for name, x in (inputs | changes).items()}


@functools.partial(quick_jit, static_argnames=("options",))
def _value_and_grads(inputs, weights, layout, options):
    def loss(inputs):
        o, state = kda(**inputs, **layout, **dict(options), return_final_state=True)
        w_o, w_state = default_weights(o, state) if weights is None else weights
        return jnp.sum(o * w_o) + jnp.sum(state * w_state), {"o": o, "final_state": state}

    gradients, outputs = jax.grad(loss, has_aux=True)(inputs)
    return outputs | {f"d{name}": x for name, x in gradients.items()}


def default_weights(o, state):
    return tuple(jnp.cos(jnp.arange(x.size, dtype=state.dtype)).reshape(x.shape) for x in (o, state))


def run(inputs, weights=None, segment_ids=None, cu_seqlens=None, **options):
    """Outputs, final state and the gradient of their weighted sum with respect to every input, as numpy arrays."""
    layout = {"segment_ids": segment_ids, "cu_seqlens": cu_seqlens}
    layout = {name: jnp.asarray(x, jnp.int32) for name, x in layout.items() if x is not None}
    return jax.device_get(_value_and_grads(inputs, weights, layout, tuple(sorted(options.items()))))


def relmax(a, b):
    return np.max(np.abs(np.float64(a) - np.float64(b))) / max(np.max(np.abs(b)), 1e-30)


def relative_l2(a, b):
    return np.linalg.norm(np.float64(a) - np.float64(b)) / max(np.linalg.norm(b), 1e-30)


def assert_close(got, expected, tolerance, measure=relmax):
    errors = {name: measure(got[name], x) for name, x in expected.items()}
    limit = tolerance if isinstance(tolerance, dict) else dict.fromkeys(expected, tolerance)
    bad = {name: e for name, e in errors.items() if not e <= limit[name]}
    assert not bad, f"{bad} of {errors}"


@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.parametrize("case", CASES)
def test_golden_vectors(golden, case, implementation):
    data, about = golden("g1_kda_op", case), CASES[case]
    theirs = {n: n for n in ("q", "k", "v", "beta", "A_log", "dt_bias")} | {"g": "g_raw"}
    theirs |= {"initial_state": "h0"} if about["has_initial_state"] else {}
    inputs = {n: data[f"in.{name}"] for n, name in theirs.items()}
    expected = {"o": data["out.o"], "final_state": data["out.final_state"]}
    expected |= {f"d{n}": data[f"grad.{name}"] for n, name in theirs.items()}
    for arrays, name in ((inputs, "dt_bias"), (expected, "ddt_bias")):
        arrays[name] = arrays[name].reshape(about["H"], about["K"])
    tolerance = {"o": about["suggested_relmax"]["o"], "final_state": about["suggested_relmax"]["final_state"]}
    tolerance |= {f"d{n}": about["suggested_relmax"][f"d{name}"] for n, name in theirs.items()}
    got = run(
        inputs,
        (data["in.w_o"], data["in.w_state"]),
        cu_seqlens=data.get("in.cu_seqlens"),
        implementation=implementation,
        gate=about["gate"],
        qk_l2norm=about["use_qk_l2norm"],
        scale=about["scale"],
    )
    assert_close(got, expected, tolerance)


SHAPES = [  # T, chunk, K, V, gate
    (1, 64, 16, 16, "lower_bound"),
    (2, 16, 16, 8, "softplus"),
    (15, 32, 8, 16, "lower_bound"),
    (16, 16, 16, 16, "lower_bound"),
    (17, 16, 16, 16, "softplus"),
    (63, 32, 16, 8, "lower_bound"),
    (64, 64, 16, 16, "softplus"),
    (65, 48, 16, 16, "lower_bound"),
    (130, 64, 8, 16, "lower_bound"),
    (130, 32, 16, 16, "none"),
]


@pytest.mark.parametrize(("length", "chunk", "key", "value", "gate"), SHAPES)
def test_chunkwise_equals_recurrence_in_float64(x64, length, chunk, key, value, gate):
    inputs = make_inputs(2, length, key=key, value=value, seed=length)
    if gate == "none":
        inputs["g"] = -(jnp.abs(inputs["g"]) ** 3)
        del inputs["A_log"], inputs["dt_bias"]
    options = RAW | dict(gate=gate)
    got = run(inputs, chunk_size=chunk, **options)
    assert_close(got, run(inputs, implementation="reference", **options), 1e-11)


def test_no_initial_state_is_a_zero_initial_state(x64):
    inputs = make_inputs(2, 17)
    inputs["initial_state"] = jnp.zeros_like(inputs["initial_state"])
    expected = run(inputs, **RAW)
    del inputs["initial_state"], expected["dinitial_state"]
    assert_close(run(inputs, **RAW), expected, 0)


documents = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 40)), min_size=1, max_size=8)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(rows=st.tuples(documents, documents))
def test_any_packing_and_padding_equals_the_recurrence(rows):
    ids = np.array([np.concatenate([np.full(n, i) for i, n in [*row, (0, 80)]])[:80] for row in rows])
    with jax.enable_x64(True):
        inputs = make_inputs(2, 80)
        got = run(inputs, segment_ids=ids, chunk_size=32, **RAW)
        assert_close(got, run(inputs, segment_ids=ids, implementation="reference", **RAW), 1e-11)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(lengths=st.lists(st.sampled_from([0, 1, 2, 15, 16, 17, 33, 63, 64, 65]), min_size=5, max_size=5))
def test_any_sequence_lengths_equal_the_recurrence(lengths):
    with jax.enable_x64(True):
        inputs = make_inputs(1, 140, states=5)
        ends = np.minimum(np.cumsum([0, *lengths]), 140)
        got = run(inputs, cu_seqlens=ends, chunk_size=64, **RAW)
        assert_close(got, run(inputs, cu_seqlens=ends, implementation="reference", **RAW), 1e-11)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_packed_documents_equal_separate_documents(x64, implementation):
    lengths, inputs = (20, 1, 27), make_inputs(1, 48)
    zeros = jnp.zeros_like(inputs["initial_state"])

    @quick_jit
    def forward(inputs, layout):
        return kda(**inputs, **layout, **RAW, implementation=implementation, return_final_state=True)

    packed, last_state = forward(inputs, dict(segment_ids=np.repeat([5, 2, 9], lengths)[None]))
    o, states = [], []
    for i, (start, end) in enumerate([(0, 20), (20, 21), (21, 48)]):
        own = {n: x[:, start:end] if n in TOKENS else x for n, x in inputs.items()}
        one, state = forward(own | ({"initial_state": zeros} if i else {}), {})
        o.append(one)
        states.append(state)
    np.testing.assert_allclose(packed, np.concatenate(o, axis=1), rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(last_state, states[-1], rtol=1e-10, atol=1e-12)
    inputs["initial_state"] = jnp.concatenate([inputs["initial_state"], zeros, zeros])
    sequences, final = forward(inputs, dict(cu_seqlens=np.cumsum([0, *lengths])))
    np.testing.assert_allclose(sequences, packed, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(final, np.concatenate(states), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_padding_is_exactly_zero_and_its_content_never_read(x64, implementation):
    ids = np.array([[0, 0, 4, 4, 0, 4, 4, 0, 7, 7] + [0] * 14 + [7] * 3 + [1] * 5 + [0]])
    pad = ids == 0
    clean = make_inputs(1, ids.shape[1])
    dirty = map_tokens(lambda x: jnp.where(pad.reshape(pad.shape + (1,) * (x.ndim - 2)), jnp.nan, x), clean)
    options = RAW | dict(implementation=implementation)
    got = run(dirty, segment_ids=ids, **options)
    by_token = ("o", "dq", "dk", "dv", "dg", "dbeta")
    for name in by_token:
        assert np.all(got[name][pad] == 0), name
    # Without the padding, and with other numbers for the documents, the rest is the same.
    w_o, w_state = default_weights(got["o"], got["final_state"])
    real = map_tokens(lambda x: x[:, ~pad[0]], clean)
    expected = run(real, (w_o[:, ~pad[0]], w_state), segment_ids=ids[:, ~pad[0]] + 3, **options)
    assert_close({n: x[:, ~pad[0]] if n in by_token else x for n, x in got.items()}, expected, 1e-11)


@pytest.mark.parametrize(
    ("gate", "dtype"), [("lower_bound", "float32"), ("softplus", "float32"), ("lower_bound", "bfloat16")]
)
def test_suffix_perturbation_leaves_the_prefix_bitwise_unchanged(gate, dtype):
    inputs, other = (make_inputs(1, 130, seed=s, dtype=dtype) for s in (0, 1))
    forward = jax.jit(lambda inputs: kda(**inputs, **RAW | dict(gate=gate)))
    before = np.asarray(forward(inputs), np.float32)
    for start in (1, 7, 8, 15, 16, 40, 64, 100, 129):
        changed = inputs | {n: np.concatenate([inputs[n][:, :start], other[n][:, start:]], axis=1) for n in TOKENS}
        after = np.asarray(forward(changed), np.float32)
        np.testing.assert_array_equal(after[:, :start], before[:, :start])
        assert not np.array_equal(after[:, start:], before[:, start:])


def saturated_inputs(length, raw_gate, dtype):
    """Every gate at its end, keys nearly parallel, beta near 1."""
    rng = np.random.default_rng(3)
    return make_inputs(
        1,
        length,
        heads=1,
        dtype=dtype,
        k=rng.normal(size=(1, 1, 1, 16)) + 0.05 * rng.normal(size=(1, length, 1, 16)),
        g=np.full((1, length, 1, 16), raw_gate),
        beta=np.full((1, length, 1), 9.0),
        A_log=np.zeros(1),
        dt_bias=np.zeros((1, 16)),
    )


@pytest.mark.parametrize("raw_gate", [1e4, 10.0, -10.0])
def test_saturated_gates_and_parallel_keys_stay_right_over_4096_tokens(raw_gate):
    with jax.enable_x64(True):
        expected = run(saturated_inputs(4096, raw_gate, np.float64), implementation="reference", **RAW)
    got = run(saturated_inputs(4096, raw_gate, np.float32), **RAW)
    # These go through 1 - sigmoid near 1, of which float32 itself keeps three digits.
    tolerance = {n: 2e-3 if n in ("dg", "dA_log", "ddt_bias", "dbeta") else 2e-5 for n in expected}
    assert_close(got, expected, tolerance, relative_l2)


def test_gradients_of_a_small_loss_do_not_underflow_when_gates_saturate():
    inputs = saturated_inputs(64, 1e4, np.float32)
    weights = [np.cos(np.arange(64 * 16)).reshape(1, 64, 1, 16), np.ones((1, 1, 16, 16))]
    large, small = (run(inputs, tuple(jnp.float32(s * w) for w in weights), **RAW) for s in (1, 1e-12))
    linear = ("dq", "dk", "dv", "dbeta", "dinitial_state")  # the gate's own slope is 0 here
    assert_close(small, {n: large[n] * np.float32(1e-12) for n in linear}, 1e-5)


@pytest.mark.parametrize("steep", [30.0, 3000.0, np.inf])
def test_any_log_decay_is_right_next_to_slow_ones(steep):
    """Steep tokens among slow ones: digits of the slow ones must not drown in sums with the steep."""
    rng = np.random.default_rng(0)
    g = np.where(rng.random((1, 96, 2, 16)) < 0.1, -steep, -0.05 * rng.random((1, 96, 2, 16)))
    options = dict(beta_is_logit=True, qk_l2norm=True)

    def inputs(dtype):
        return {n: x for n, x in make_inputs(1, 96, dtype=dtype, g=g).items() if n not in ("A_log", "dt_bias")}

    with jax.enable_x64(True):
        expected = run(inputs(np.float64), implementation="reference", **options)
    assert_close(run(inputs(np.float32), **options), expected, 1e-5)


@pytest.mark.parametrize("size", [16, 48, 64])
def test_triangular_inverse_holds_for_near_parallel_keys_without_decay(size):
    rng = np.random.default_rng(0)
    inverse_and_gradient = jax.jit(lambda m, d: (unit_lower_inverse(m), jax.vjp(unit_lower_inverse, m)[1](d)[0]))
    for spread in (1e-3, 0.1, 1.0):
        k = rng.normal(size=(8, 1, 32)) + spread * rng.normal(size=(8, size, 32))
        k /= np.linalg.norm(k, axis=-1, keepdims=True)
        m = np.tril(0.9999 * k @ k.swapaxes(-1, -2), -1).astype(np.float32)
        exact = np.linalg.inv(np.eye(size) + m.astype(np.float64))
        cotangent = rng.normal(size=m.shape).astype(np.float32)
        inverse, gradient = inverse_and_gradient(m, cotangent)
        assert relmax(inverse, exact) < 3e-6
        assert relative_l2(gradient, -np.tril(exact.mT @ cotangent @ exact.mT, -1)) < 1e-5


@pytest.mark.parametrize("regime", ["steep", "slow", "mixed"])
def test_bfloat16_inputs_stay_within_one_percent(regime):
    inputs = make_inputs(1, 144, heads=8, key=32, value=32, dtype=jnp.bfloat16)
    inputs |= {n: inputs[n].astype(jnp.float32) for n in ("A_log", "dt_bias", "initial_state")}
    inputs["dt_bias"] -= {"steep": 0, "slow": 6, "mixed": np.arange(32) % 2 * 6}[regime]
    rng = np.random.default_rng(1)
    weights = [jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in ((1, 144, 8, 32), (1, 8, 32, 32))]
    got = run(inputs, weights, **RAW)
    assert got["o"].dtype == jnp.bfloat16
    assert got["final_state"].dtype == np.float32
    assert {n: x.dtype for n, x in inputs.items()} == {n: got[f"d{n}"].dtype for n in inputs}
    with jax.enable_x64(True):
        inputs, weights = jax.tree.map(lambda x: jnp.asarray(np.asarray(x, np.float64)), (inputs, weights))
        expected = run(inputs, weights, implementation="reference", **RAW)
    assert_close(got, expected, 1e-2, relative_l2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_backward_keeps_the_inputs_and_one_state_per_chunk(dtype):
    inputs = jax.eval_shape(lambda: make_inputs(2, 512, heads=2, key=32, value=32, dtype=dtype))
    ids = jax.ShapeDtypeStruct((2, 512), jnp.int32)

    def saved(inputs, ids):
        return jax.vjp(lambda inputs: kda(**inputs, **RAW, segment_ids=ids, chunk_size=64), inputs)[1]

    def size(tree):
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))

    states = 2 * 2 * (512 // 64) * 32 * 32 * jnp.dtype(dtype).itemsize
    masks = 2 * 512 * 2  # which tokens are real, and which start a document
    first_state = 2 * 2 * 32 * 32 * 4  # in float32 whatever its dtype
    assert size(jax.eval_shape(saved, inputs, ids)) <= size(inputs) + states + masks + first_state


def test_prefill_then_steps_equals_one_pass(x64):
    inputs = make_inputs(2, 40)
    forward = quick_jit(lambda inputs: kda(**inputs, **RAW, return_final_state=True))
    step = quick_jit(lambda token, state: kda_step(**token, state=state, **RAW))
    expected, expected_state = forward(inputs)
    o, state = forward(map_tokens(lambda x: x[:, :29], inputs))
    outputs = [o]
    del inputs["initial_state"]
    for t in range(29, 40):
        o, state = step({n: x[:, t] if n in TOKENS else x for n, x in inputs.items()}, state)
        outputs.append(o[:, None])
    np.testing.assert_allclose(np.concatenate(outputs, axis=1), expected, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(state, expected_state, rtol=1e-10, atol=1e-12)


INTERIOR_IDS = np.stack([np.repeat([4, 0, 4, 7, 2], [50, 30, 60, 52, 8]), np.repeat([1, 0, 3], [128, 10, 62])])


@pytest.mark.parametrize(
    ("implementation", "interval", "chunk"),
    [("reference", 64, 64), ("xla", 128, 32), ("xla", 64, 48), ("xla", 128, 256), ("xla", 256, 64)],
)
def test_states_at_borders_are_final_states_of_the_prefixes(x64, implementation, interval, chunk):
    inputs = make_inputs(2, 200, heads=1)
    options = RAW | dict(implementation=implementation, chunk_size=chunk, return_final_state=True)

    def prefix(length, **more):
        ids = jnp.asarray(INTERIOR_IDS[:, :length], jnp.int32)
        return kda(**map_tokens(lambda x: x[:, :length], inputs), segment_ids=ids, **options, **more)

    o, final, states = prefix(200, state_interval=interval)
    assert states.shape == (2, 200 // interval, 1, 16, 16)
    for got, expected in zip((o, final), prefix(200)):
        np.testing.assert_allclose(got, expected, rtol=1e-10, atol=1e-12)
    for i in range(200 // interval):
        np.testing.assert_allclose(states[:, i], prefix((i + 1) * interval)[1], rtol=1e-10, atol=1e-12)


def test_states_at_borders_keep_the_digits_of_float32_under_bfloat16_products():
    inputs = make_inputs(1, 192, dtype=jnp.bfloat16)
    states = kda(**inputs, **RAW, state_interval=64)[1]
    assert states.dtype == jnp.float32
    prefix = map_tokens(lambda x: x[:, :128], inputs)
    expected = kda(**prefix, **RAW, return_final_state=True)[1]
    assert relmax(states[:, 1], expected) < 1e-6
    assert relmax(expected.astype(jnp.bfloat16), expected) > 1e-4


def test_a_gradient_through_states_at_borders_is_right_or_refused(x64):
    inputs = make_inputs(1, 128, heads=1)
    tokens = {n: inputs[n] for n in TOKENS}

    def loss(tokens, implementation, state_interval, length=128):
        prefix = {n: x[:, :length] for n, x in tokens.items()}
        options = RAW | dict(implementation=implementation, return_final_state=True)
        o, *_, states = kda(**inputs | prefix, **options, state_interval=state_interval)
        return (jnp.sum(o**2) if length == 128 else 0), jnp.sum(states**2)

    def gradient(index, *args):
        return quick_jit(jax.grad(lambda tokens: loss(tokens, *args)[index]))(tokens)

    def assert_same(got, expected):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12), got, expected)

    with pytest.raises(NotImplementedError, match="states of state_interval have no gradient"):
        gradient(1, "xla", 64)
    assert_same(gradient(0, "xla", 64), gradient(0, "xla", None))  # of o alone
    both = jax.tree.map(lambda *x: sum(x), *(gradient(1, "xla", None, n) for n in (64, 128)))
    assert_same(gradient(1, "reference", 64), both)


def test_step_leaves_inactive_rows_alone():
    inputs = make_inputs(3, 1, dtype=np.float32)
    state = inputs.pop("initial_state")
    token = map_tokens(lambda x: x[:, 0], inputs)
    token["v"] = token["v"].at[1].set(jnp.nan)
    step = quick_jit(lambda token, state, active: kda_step(**token, state=state, **RAW, active=active))
    o, new = step(token, state, np.array([True, False, True]))
    assert np.all(np.isfinite(o))
    assert np.all(o[1] == 0)
    np.testing.assert_array_equal(new[1], state[1])
    assert not np.any(new[0] == state[0])


def test_remat_inside_a_scan_over_layers_changes_nothing(x64):
    inputs = make_inputs(1, 16, heads=1)
    layers = jax.tree.map(lambda x: jnp.stack([x, 0.5 * x]), {n: inputs[n] for n in ("A_log", "dt_bias", "g")})

    def layer(x, p):
        return x + kda(x, inputs["k"], x, beta=inputs["beta"], **p, **RAW), None

    def scanned(x, layers):
        return jnp.sum(jax.lax.scan(jax.checkpoint(layer), x, layers)[0] ** 2)

    def unrolled(x, layers):
        for i in range(2):
            x, _ = layer(x, {n: p[i] for n, p in layers.items()})
        return jnp.sum(x**2)

    got, expected = (quick_jit(jax.grad(f, (0, 1)))(inputs["v"], layers) for f in (scanned, unrolled))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12), got, expected)


def test_none_resolves_to_a_named_implementation():
    assert resolve_implementation(None, "no GPU") == "xla"
    assert resolve_implementation("pallas", None) == "pallas"
    assert resolve_implementation("reference", "no GPU") == "reference"
    with pytest.raises(ValueError, match="cannot run here: no GPU"):
        resolve_implementation("pallas", "no GPU")


def test_what_runs_is_known_from_dtype_and_head_dim():
    assert resolve_for(None, "bfloat16", 128) == "xla"  # no GPU here
    assert resolve_for("pallas_interpret", "bfloat16", 64) == "pallas_interpret"
    for dtype, head_dim, reason in (("bfloat16", 128, "GPU"), ("float32", 128, "bfloat16"), ("bfloat16", 32, "64 or")):
        with pytest.raises(ValueError, match=reason):
            resolve_for("pallas", dtype, head_dim)


REFUSALS = {
    "q has shape": dict(q=np.zeros((2, 8, 32))),
    "k has shape": dict(k=np.zeros((2, 8, 2, 4))),
    r"v has shape \(2, 7, 2, 16\), expected \[B, T, H, V\] = \(2, 8, 2, V\)": dict(v=np.zeros((2, 7, 2, 16))),
    "g has shape": dict(g=np.zeros((2, 8, 2))),
    "beta has shape": dict(beta=np.zeros((2, 8, 3))),
    "A_log has shape": dict(A_log=np.zeros(16)),
    r"dt_bias has shape \(32,\), expected \[H, K\] = \(2, 16\)": dict(dt_bias=np.zeros(32)),
    "initial_state has shape": dict(initial_state=np.zeros((2, 2, 16, 8))),
    "segment_ids has shape": dict(segment_ids=np.zeros((2, 9), int)),
    "segment_ids must be integers": dict(segment_ids=np.zeros((2, 8))),
    "chunk_size must be a positive multiple of 16": dict(chunk_size=40),
    r"lower_bound must be in \[-5, 0\), not -5.5": dict(lower_bound=-5.5),
    r"lower_bound must be in \[-5, 0\), not 0": dict(lower_bound=0.0),
    "unknown gate": dict(gate="sigmoid"),
    "takes no A_log": dict(gate="none"),
    "needs A_log": dict(A_log=None),
    "expected B = 1": dict(cu_seqlens=np.array([0, 8])),
    "not both": dict(cu_seqlens=np.array([0, 8]), segment_ids=np.ones((2, 8), int)),
    "unknown implementation": dict(implementation="fastest"),
    "state_interval must be a positive multiple of 64, not 96": dict(state_interval=96),
    "state_interval must be a positive multiple of 64, not 0": dict(state_interval=0),
}


@pytest.mark.parametrize("message", REFUSALS)
def test_wrong_arguments_are_refused_by_name(message):
    arguments = make_inputs(2, 8, dtype=np.float32) | RAW | REFUSALS[message]
    with pytest.raises(ValueError, match=message):
        kda(**arguments)


def test_states_at_borders_of_sequences_end_to_end_are_refused():
    inputs = make_inputs(1, 8, dtype=np.float32)
    with pytest.raises(ValueError, match="give each sequence a row of its own"):
        kda(**inputs, **RAW, cu_seqlens=np.array([0, 8]), state_interval=64)


def test_step_refuses_wrong_shapes():
    token = map_tokens(lambda x: x[:, 0], make_inputs(2, 1, dtype=np.float32))
    state = token.pop("initial_state")
    with pytest.raises(ValueError, match=r"state has shape \(2, 2, 16\), expected \[B, H, K, V\]"):
        kda_step(**token, state=state[..., 0], **RAW)
    with pytest.raises(ValueError, match="active has shape"):
        kda_step(**token, state=state, **RAW, active=np.ones(3, bool))
