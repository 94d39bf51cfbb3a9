"""The KDA kernels run by Pallas's interpreter against the token recurrence, and lowered for an H200 without one."""

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.ops import mosaic
from k3jax.ops.kda import kda, pallas
from k3jax.ops.kda.pallas_prep import Prepared
from k3jax.ops.kda.pallas_scan import Borders, scan
from k3jax.ops.mosaic import h200_mesh
from k3jax.ops.remat import checkpoint_name, policy

OPTIONS = {"beta_is_logit": True, "qk_l2norm": True, "return_final_state": True}
KERNELS = {"gate": "lower_bound", "implementation": "pallas_interpret"}
TOKENS = ("q", "k", "v", "g", "beta")  # the inputs with a T axis
TOLERANCE = 1e-2  # relative L2 on every output and gradient, of bfloat16 kernels against a float32 recurrence


def draw(batch, length, heads, dim, *, rows=None, bias=-6.0, seed=0):
    """Raw inputs and cotangents; `bias` shifts the gates: 0 forgets in a few tokens, -6 in hundreds."""
    rng = np.random.default_rng(seed)
    rows = rows or batch

    def normal(*shape, dtype=jnp.bfloat16, scale=1.0):
        return jnp.asarray(rng.normal(size=shape) * scale, dtype)

    args = {name: normal(batch, length, heads, dim) for name in ("q", "k", "v", "g")}
    args["beta"] = normal(batch, length, heads)
    args["A_log"] = jnp.asarray(rng.uniform(size=heads), jnp.float32)
    args["dt_bias"] = jnp.asarray(rng.uniform(size=(heads, dim)) + bias, jnp.float32)
    args["initial_state"] = normal(rows, heads, dim, dim, dtype=jnp.float32, scale=0.2)
    cotangents = normal(batch, length, heads, dim), normal(rows, heads, dim, dim, dtype=jnp.float32, scale=0.2)
    return args, cotangents


def run(args, cotangents, implementation, **options):
    """Outputs and gradients by name."""

    def f(args):
        return kda(**args, **OPTIONS, implementation=implementation, **options)

    def everything(args):
        (o, state), vjp = jax.vjp(f, args)
        d_o, d_state = cotangents
        return {"o": o, "state": state} | vjp((d_o.astype(o.dtype), d_state))[0]

    return jax.jit(everything)(args)


def widened(args):
    return {name: x.astype(jnp.float32) for name, x in args.items()}


def assert_close(got, want, args=None, tolerance=TOLERANCE):
    """Relative L2. With `args`, the gradient of A_log is held against the root sum square of what it sums.

    It is one number a head, over terms of both signs: they may cancel, their errors do not.
    """
    for name, reference in want.items():
        size = jnp.linalg.norm(reference)
        if name == "A_log" and args is not None:
            terms = want["g"] * (1 + jnp.abs(args["g"].astype(jnp.float32) + args["dt_bias"]))
            size = jnp.maximum(size, jnp.linalg.norm(terms))
        error = jnp.linalg.norm(got[name].astype(jnp.float32) - reference) / (size + 1e-20)
        assert error <= tolerance, f"{name}: relative L2 error {error:.1e}"


def ids(*pairs):
    """Segment ids [1, T] from (id, length) pairs."""
    return jnp.asarray(np.concatenate([np.full(n, i) for i, n in pairs])[None], jnp.int32)


PACKED = ids((1, 15), (2, 17), (0, 7), (2, 8), (3, 1), (4, 63), (5, 2), (0, 20))
CASES = {
    "head width 128, packed documents": ((1, 133, 1, 128), {"gate": "lower_bound", "segment_ids": PACKED}, {}),
    "rows that end inside a chunk, steep gates": ((2, 67, 1, 64), {"gate": "lower_bound"}, {"bias": 0.0}),
    "one token": ((1, 1, 2, 64), {"gate": "lower_bound"}, {}),
    "one chunk, slow gates": ((1, 64, 1, 64), {"gate": "lower_bound"}, {}),
    "softplus gate": ((1, 133, 1, 64), {"gate": "softplus", "segment_ids": PACKED}, {}),
    "softplus gate, steep, width 128": ((1, 64, 1, 128), {"gate": "softplus"}, {"bias": 3.0}),
}
SLOW_CASES = tuple(CASES)[2:]


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n in SLOW_CASES else ()) for n in CASES])
def test_outputs_and_gradients_are_those_of_the_recurrence(name):
    shape, options, drawing = CASES[name]
    args, cotangents = draw(*shape, **drawing)
    want = run(widened(args), cotangents, "reference", **options)
    assert_close(run(args, cotangents, "pallas_interpret", **options), want, args)


@pytest.mark.slow
def test_sequences_end_to_end_have_states_of_their_own():
    cu_seqlens = jnp.asarray([0, 0, 16, 81, 82, 140], jnp.int32)
    args, cotangents = draw(1, 150, 1, 64, rows=5)
    options = {"gate": "lower_bound", "cu_seqlens": cu_seqlens}
    want = run(widened(args), cotangents, "reference", **options)
    got = run(args, cotangents, "pallas_interpret", **options)
    assert_close(got, want, args)
    np.testing.assert_array_equal(got["state"][0], args["initial_state"][0])  # of the empty sequence
    assert not np.any(got["o"][:, 140:])


@pytest.mark.slow
@pytest.mark.parametrize("documents", [False, True])
def test_segments_run_side_by_side_change_nothing(monkeypatch, documents):
    monkeypatch.setattr(pallas, "MIN_SEGMENTS", 2)
    monkeypatch.setattr(pallas, "MIN_SEGMENT_CHUNKS", 1)
    assert pallas.segments_of(1, 1, 4) == 4
    args, cotangents = draw(1, 256, 1, 64, seed=3)
    options = {"gate": "lower_bound", "segment_ids": ids((1, 150), (2, 50), (3, 56)) if documents else None}
    want = run(widened(args), cotangents, "reference", **options)
    jax.clear_caches()  # the number of segments is no argument of the jitted function
    assert_close(run(args, cotangents, "pallas_interpret", **options), want, args)


@pytest.mark.slow
def test_saturated_gates_and_nearly_parallel_keys_cost_no_more_digits_than_in_plain_jax():
    args, cotangents = draw(1, 64, 2, 64, seed=1)
    gate = jnp.where(jnp.arange(2)[:, None] == 0, 30.0, -30.0)  # -5 a token in one head, none in the other
    args["g"] = jnp.broadcast_to(gate, args["g"].shape).astype(jnp.bfloat16)
    args["k"] = (args["k"][:, :1] + 0.1 * args["k"]).astype(jnp.bfloat16)
    args["beta"] = jnp.full_like(args["beta"], 6.0)
    want = run(widened(args), cotangents, "reference", gate="lower_bound")
    got = run(args, cotangents, "pallas_interpret", gate="lower_bound")
    plain = run(args, cotangents, "xla", gate="lower_bound")
    assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in got.values())
    for name in ("o", "state", "q", "k", "v", "beta", "initial_state"):  # saturated gates have no gradient to compare
        error, bound = (jnp.linalg.norm(x[name].astype(jnp.float32) - want[name]) for x in (got, plain))
        assert error <= 1.5 * bound, name


def test_later_tokens_leave_earlier_outputs_as_they_are_to_the_last_bit():
    args, _ = draw(1, 128, 1, 64, bias=0.0)
    changed = {name: x.at[:, 41:].set(-x[:, 41:]) for name, x in args.items() if name in ("q", "k", "v", "g", "beta")}
    f = jax.jit(lambda args: kda(**args, **OPTIONS, gate="lower_bound", implementation="pallas_interpret")[0])
    np.testing.assert_array_equal(f(args)[:, :41], f(args | changed)[:, :41])


@pytest.mark.slow
def test_padding_is_inert_whatever_it_holds():
    args, cotangents = draw(1, 64, 1, 64)
    segment_ids = ids((1, 30), (0, 9), (1, 11), (0, 14))
    hole = segment_ids == 0
    poisoned = {n: jnp.where(hole[..., None, None], jnp.nan, args[n]) for n in ("q", "k", "v", "g")}
    poisoned["beta"] = jnp.where(hole[..., None], jnp.nan, args["beta"])
    options = {"gate": "lower_bound", "segment_ids": segment_ids}
    got = run(args | poisoned, cotangents, "pallas_interpret", **options)
    want = run(args, cotangents, "pallas_interpret", **options)
    for name in want:
        np.testing.assert_array_equal(got[name], want[name])
    assert not np.any(got["o"][hole])
    assert not np.any(got["k"][hole])


def prefixes(args, options, lengths):
    """Final states of the first tokens of each row, by the kernels, stacked as `state_interval` does."""
    states = []
    for n in lengths:
        prefix = {name: x[:, :n] if name in TOKENS else x for name, x in args.items()}
        documents = {name: x[:, :n] for name, x in options.items() if name == "segment_ids"}
        f = jax.jit(lambda prefix, documents: kda(**prefix, **OPTIONS, **KERNELS | documents)[1])
        states.append(f(prefix, documents))
    return jnp.stack(states, axis=1)


def with_states(args, options, interval):
    f = jax.jit(lambda args, options: kda(**args, **OPTIONS, **KERNELS | options, state_interval=interval))
    return f(args, options)


@pytest.mark.parametrize("documents", [None, ids((1, 70), (2, 58), (0, 20), (2, 44))])
def test_states_at_borders_are_final_states_of_the_prefixes(documents):
    args, _ = draw(1, 192, 1, 64)
    options = {} if documents is None else {"segment_ids": documents}
    _, final, states = with_states(args, options, 64)
    assert states.shape == (1, 3, 1, 64, 64)
    assert states.dtype == jnp.float32
    np.testing.assert_array_equal(states[:, 2], final)
    np.testing.assert_allclose(states[:, :2], prefixes(args, options, (64, 128)), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("batch", "heads", "dim"), [(2, 2, 64), (1, 1, 128)])
def test_states_at_borders_of_rows_that_end_between_them(batch, heads, dim):
    args, _ = draw(batch, 250, heads, dim)
    plain = jax.jit(lambda args: kda(**args, **OPTIONS, **KERNELS))(args)
    *outputs, states = with_states(args, {}, 128)  # the second border lies in padding
    assert states.shape == (batch, 1, heads, dim, dim)
    np.testing.assert_allclose(states, prefixes(args, {}, (128,)), rtol=1e-5, atol=1e-6)
    for got, expected in zip(outputs, plain):
        np.testing.assert_array_equal(got, expected)
    assert with_states(args, {}, 256)[2].shape == (batch, 0, heads, dim, dim)


@pytest.mark.slow
def test_states_at_borders_of_segments_run_side_by_side(monkeypatch):
    monkeypatch.setattr(pallas, "MIN_SEGMENTS", 2)
    monkeypatch.setattr(pallas, "MIN_SEGMENT_CHUNKS", 1)
    args, _ = draw(2, 256, 1, 64, seed=4)
    want = jax.jit(
        lambda args: kda(**args, **OPTIONS, gate="lower_bound", implementation="reference", state_interval=128)[2]
    )(widened(args))
    jax.clear_caches()  # the number of segments is no argument of the jitted function
    assert pallas.segments_of(2, 1, 4) == 4
    got = with_states(args, {}, 128)[2]
    jax.clear_caches()
    assert_close({"states": got}, {"states": want})


def test_the_scan_that_writes_states_at_borders_lowers_for_an_h200_without_one():
    def like(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype)

    tile, square, state = like(2, 512, 128), like(2, 512, 64), like(2, 2, 128, 128, dtype=jnp.float32)
    prepared = Prepared(tile, tile, tile, tile, square, like(2, 8, 128, dtype=jnp.float32), square)

    def borders(prepared, initial, runs):
        return scan(prepared, initial, runs, borders=Borders(row=4, interval=1)).borders

    with jax.sharding.use_abstract_mesh(h200_mesh()):
        traced = jax.jit(borders).trace(prepared, state, like(2, 2, dtype=jnp.int32))
        lowered = traced.lower(lowering_platforms=("cuda",))
    assert lowered.out_info.shape == (2, 4, 2, 128, 128)
    assert "mosaic_gpu" in lowered.as_text()


def test_a_gradient_through_states_at_borders_is_refused():
    args, _ = draw(1, 64, 1, 64)

    def total(args, index):
        return jnp.sum(kda(**args, **OPTIONS, **KERNELS, state_interval=64)[index].astype(jnp.float32))

    with pytest.raises(NotImplementedError, match="states of state_interval have no gradient"):
        jax.eval_shape(lambda args: jax.grad(total)(args, 2), args)
    jax.eval_shape(lambda args: jax.grad(total)(args, 1), args)


def launches_in(jaxpr):
    """Of kernels, by a jaxpr and all that it calls."""
    launches = 0
    for eqn in jaxpr.eqns:
        inner = jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "jaxpr"))
        launches += eqn.primitive.name == "mpmd_map"
        launches += sum(launches_in(getattr(x, "jaxpr", x)) for x in inner if hasattr(x, "eqns"))
    return launches


def test_rematerialisation_that_keeps_kernels_looks_for_no_state_of_a_segment_again(monkeypatch):
    monkeypatch.setattr(pallas, "MIN_SEGMENTS", 2)
    monkeypatch.setattr(pallas, "MIN_SEGMENT_CHUNKS", 1)
    jax.clear_caches()  # the number of segments is no argument of the jitted function
    how = pallas.Activation("none", -5.0, True, True, 1.0)
    tokens, beta = (jax.ShapeDtypeStruct((1, 256, 1, *dim), jnp.bfloat16) for dim in ((64,), ()))

    def loss(q, k, v, g, beta):
        o = pallas.kda_pallas(q, k, v, g, beta, None, None, None, None, None, how)[0]
        return jnp.sum(jnp.sin(checkpoint_name(o, "kda").astype(jnp.float32)))  # as the layer names it

    def launches(policy):
        gradient = jax.grad(jax.checkpoint(loss, policy=policy), argnums=range(5))
        with jax.sharding.use_abstract_mesh(h200_mesh()):
            return launches_in(jax.make_jaxpr(gradient)(*[tokens] * 4, beta).jaxpr)

    policies = jax.checkpoint_policies
    once, kept, all_again = (
        launches(policy)
        for policy in (
            policies.everything_saveable,
            policy({"kda": "save"}),
            policies.nothing_saveable,
        )
    )
    assert 0 < kept == once
    assert all_again == once + 4  # the per-chunk terms, the transitions, the local states, and the outputs
    jax.clear_caches()


@pytest.mark.parametrize(
    ("shape", "gate", "packed"),
    [
        ((4, 4096, 12, 128), "lower_bound", True),
        pytest.param((1, 65536, 8, 128), "lower_bound", False, marks=pytest.mark.slow),
        pytest.param((1, 256, 2, 64), "softplus", True, marks=pytest.mark.slow),
    ],
)
def test_forward_and_backward_lower_for_an_h200_without_one(shape, gate, packed):
    batch, length, heads, dim = shape
    how = dict(gate=gate, lower_bound=-5.0, beta_is_logit=True, qk_l2norm=True, scale=dim**-0.5)
    tokens = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    beta = jax.ShapeDtypeStruct(shape[:3], jnp.bfloat16)
    per_head, per_channel = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((heads,), (heads, dim)))
    segment_ids = jax.ShapeDtypeStruct((batch, length), jnp.int32)

    def loss(q, k, v, g, beta, A_log, dt_bias, segment_ids):
        documents = segment_ids if packed else None
        activation = pallas.Activation(**how)
        o, *_ = pallas.kda_pallas(q, k, v, g, beta, A_log, dt_bias, None, documents, None, activation)
        return jnp.sum(o.astype(jnp.float32))

    with jax.sharding.use_abstract_mesh(h200_mesh()):
        grad = jax.jit(jax.value_and_grad(loss, argnums=range(7)))
        lowered = grad.trace(*[tokens] * 4, beta, per_head, per_channel, segment_ids).lower(
            lowering_platforms=("cuda",)
        )
    assert lowered.as_text().count("mosaic_gpu") >= 6


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"q": jnp.zeros((1, 8, 1, 64), jnp.float32)}, "must be bfloat16"),
        ({"v": jnp.zeros((1, 8, 1, 32), jnp.bfloat16)}, "K = V must be 64 or 128"),
        ({"g": jnp.zeros((1, 8, 1, 64), jnp.float32)}, "must be bfloat16"),
        ({"beta_is_logit": False}, "beta must be a logit"),
    ],
)
def test_what_the_kernels_cannot_run_is_refused_with_the_reason(change, reason):
    args, _ = draw(1, 8, 1, 64)
    options = {"beta_is_logit": True, "gate": "lower_bound"} | args | {"initial_state": None} | change
    with pytest.raises(ValueError, match=reason):
        kda(**options, implementation="pallas_interpret")


def test_naming_the_kernels_where_there_is_no_hopper_gpu_is_refused():
    args, _ = draw(1, 8, 1, 64)
    with pytest.raises(ValueError, match="compute capability 9.0"):
        kda(**args, **OPTIONS, gate="lower_bound", implementation="pallas")


@pytest.mark.slow
def test_warpgroups_do_not_race(monkeypatch):
    monkeypatch.setattr(mosaic, "INTERPRETER", plgpu.InterpretGPUParams(detect_races=True))
    jax.clear_caches()
    args, cotangents = draw(1, 128, 1, 128)
    options = {"gate": "lower_bound", "segment_ids": ids((1, 90), (2, 38))}
    want = run(widened(args), cotangents, "reference", **options)
    assert_close(run(args, cotangents, "pallas_interpret", **options), want, args)


@pytest.mark.gpu
@pytest.mark.parametrize("bias", [0.0, -6.0])
@pytest.mark.parametrize("heads", [1, 5])
@pytest.mark.parametrize("packed", [False, True])
def test_the_compiled_kernels_agree_with_the_recurrence_and_repeat_to_the_last_bit(packed, heads, bias):
    lengths = (15, 17, 1, 63, 64, 65, 2, 128, 70)
    documents = ids(*enumerate(lengths, 1)) if packed else None
    args, cotangents = draw(1, sum(lengths), heads, 128, bias=bias)
    options = {"gate": "lower_bound", "segment_ids": documents}
    with jax.default_matmul_precision("highest"):
        want = run(widened(args), cotangents, "reference", **options)
    got, again = (run(args, cotangents, "pallas", **options) for _ in range(2))
    assert_close(got, want, args)
    for name in got:
        np.testing.assert_array_equal(got[name], again[name])
