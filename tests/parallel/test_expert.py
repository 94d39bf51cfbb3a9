"""Experts on several ranks compute what one device computes: outputs and every gradient, for any routing."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from k3jax.ops.grouped_matmul import ExpertOptions, expert_mlp, group_layout
from k3jax.parallel.expert import exchange, expert_mlp_over_ranks
from k3jax.parallel.expert_plan import Slices

N, K, E, L, F = 64, 4, 16, 6, 5  # N tokens in all
ROUTINGS = ("random", "skewed", "one rank", "one expert", "empty experts", "padding", "all padding")


def routing(name):
    """Picked experts [N, K], different ones for each token but under "one expert", and which tokens are real."""
    rng = np.random.default_rng(3)
    scores = rng.normal(size=(N, E))
    if name in ("skewed", "padding"):
        scores += 4 * rng.dirichlet(np.full(E, 0.3)) * E
    if name == "one rank":
        scores[:, 4:8] += 100  # of one rank's experts with 2 and 4 ranks, of two with 8
    if name == "empty experts":
        scores[:, ::3] -= 100
    experts = np.argsort(-scores, axis=1)[:, :K]
    if name == "one expert":
        experts[:] = 5
    valid = np.ones(N, bool)
    if name == "padding":
        valid = rng.random(N) < 0.6
        valid[8:24] = False  # whole ranks of padding
    if name == "all padding":
        valid[:] = False
    return experts.astype(np.int32), valid


def inputs(dtype=np.float64):
    rng = np.random.default_rng(0)
    shapes = {"z": (N, L), "w1": (E, L, F), "w3": (E, L, F), "w2": (E, F, L), "weights": (N, K)}
    return {n: jnp.asarray(rng.normal(size=shape), dtype) for n, shape in shapes.items()}


def make_mesh(ranks, data=1):
    return jax.make_mesh((data, ranks), ("data", "expert"), axis_types=(AxisType.Auto,) * 2)


OPTIONS = ExpertOptions(4.0, 25.0, align=1, implementation="ragged")


def on_one_device(args, experts, valid, options=OPTIONS):
    valid = jnp.broadcast_to(valid[:, None], experts.shape)
    layout = group_layout(experts, valid, E, options.align)
    w13 = jnp.concatenate([args["w1"], args["w3"]], axis=2)
    return expert_mlp(args["z"], w13, args["w2"], args["weights"], layout, options)


def over_ranks(args, experts, valid, ranks, balance="balanced", options=OPTIONS, data=1, transport=None):
    tokens = P(("data", "expert"))
    specs = (tokens, P("expert"), P("expert"), tokens, tokens, tokens)

    @functools.partial(jax.shard_map, mesh=make_mesh(ranks, data), in_specs=specs, out_specs=tokens)
    def run(z, w13, w2, experts, weights, valid):
        return expert_mlp_over_ranks(
            z, w13, w2, experts, weights, valid, options, axis="expert", balance=balance, transport=transport
        )

    w13 = jnp.concatenate([args["w1"], args["w3"]], axis=2)
    return run(args["z"], w13, args["w2"], experts, args["weights"], valid)


def with_gradients(f, args, *rest):
    """Output and gradients of a sum that weighs every output differently."""
    weigh = np.random.default_rng(1).normal(size=(N, L))

    def loss(args, *rest):
        out = f(args, *rest)
        return jnp.sum(out * weigh), out

    return jax.jit(jax.value_and_grad(loss, has_aux=True))(args, *rest)


def assert_same(got, want, tolerance):
    def close(a, b):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(1.0, float(np.max(np.abs(b)))))

    jax.tree.map(close, jax.device_get(got), jax.device_get(want))


@functools.cache
def compiled(balance, ranks, align, implementation, data):
    """One program for all routings."""
    weigh = np.random.default_rng(1).normal(size=(N, L))
    chosen = OPTIONS._replace(align=align, implementation=implementation)

    def loss(args, experts, valid):
        out = over_ranks(args, experts, valid, ranks, balance, chosen, data)
        return jnp.sum(out * weigh), out

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("balance", ["balanced", "home"])
@pytest.mark.parametrize(
    ("ranks", "align", "implementation", "data"),
    [
        (2, 4, "blocked", 1),
        (8, 1, "ragged", 1),
        pytest.param(4, 1, "ragged", 1, marks=pytest.mark.slow),
        pytest.param(4, 1, "ragged", 2, marks=pytest.mark.slow),
        pytest.param(8, 8, "blocked", 1, marks=pytest.mark.slow),
    ],
)
def test_any_routing_equals_one_device(name, balance, ranks, align, implementation, data, x64):
    if name == "one expert" and balance == "home":
        pytest.skip("a token that picks one expert twice has no place in the worst case of the ordinary dispatch")
    args, (experts, valid) = inputs(), routing(name)
    want = with_gradients(on_one_device, args, experts, valid)
    run = compiled(balance, ranks, align, implementation, data)
    got = run(args, experts, valid)
    assert_same(got, want, 1e-9)
    _, grads = got
    used = np.bincount(experts[valid].reshape(-1), minlength=E) > 0
    for leaf in ("w1", "w2", "w3"):
        assert not np.asarray(grads[leaf])[~used].any(), "an expert without tokens has a gradient of exactly 0"
    assert not np.asarray(grads["z"])[~valid].any()
    assert run._cache_size() == 1, "new routings compile nothing"


@pytest.mark.parametrize("balance", ["balanced", "home"])
def test_one_rank_is_one_device_to_the_last_bit(balance):
    args, (experts, valid) = inputs(np.float32), routing("skewed")
    want = with_gradients(on_one_device, args, experts, valid)
    got = with_gradients(functools.partial(over_ranks, ranks=1, balance=balance), args, experts, valid)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(got), jax.device_get(want))


def test_padding_tokens_may_hold_anything():
    args, (experts, valid) = inputs(np.float32), routing("padding")
    want = with_gradients(functools.partial(over_ranks, ranks=4), args, experts, valid)
    bad = args | {n: jnp.where(valid[:, None], args[n], jnp.nan) for n in ("z", "weights")}
    got = with_gradients(functools.partial(over_ranks, ranks=4), bad, experts, valid)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(got), jax.device_get(want))


def test_gradients_of_wide_weights_are_sums_in_float32():
    """bfloat16 tokens, float32 weights: a gradient of parts from several ranks isn't rounded to bfloat16 at the end."""
    args, (experts, valid) = inputs(np.float32), routing("one expert")
    args["z"] = args["z"].astype(jnp.bfloat16)
    _, got = with_gradients(functools.partial(over_ranks, ranks=4), args, experts, valid)
    narrow = {n: x if n == "weights" else x.astype(jnp.bfloat16) for n, x in args.items()}
    _, want = with_gradients(on_one_device, narrow, experts, valid)
    for leaf in ("w1", "w3", "w2"):
        assert got[leaf].dtype == jnp.float32
        grad = np.asarray(got[leaf])
        assert (grad != np.asarray(jnp.asarray(grad, jnp.bfloat16), np.float32)).any()
        np.testing.assert_allclose(grad, want[leaf].astype(np.float32), rtol=0, atol=0.02 * np.abs(grad).max())


def test_the_backward_pass_keeps_no_row_of_another_rank(x64):
    args, (experts, valid) = inputs(), routing("random")
    pull = jax.eval_shape(lambda args: jax.vjp(lambda args: over_ranks(args, experts, valid, 4), args)[1], args)
    kept = sorted(x.shape for x in jax.tree.leaves(pull) if x.dtype == jnp.float64)
    assert kept == sorted([(N, L), (N, K), (E, L, 2 * F), (E, F, L)])


def test_what_is_sent_again_is_not_kept_by_the_compiler_instead():
    """Both passes send the same rows, weights and experts: merged, they would live from the one to the other."""
    args, (experts, valid) = inputs(np.float32), routing("random")
    run = jax.jit(jax.grad(lambda args: jnp.sum(over_ranks(args, experts, valid, 4) ** 2)))
    hlo = run.lower(args).compile().as_text()
    forward = 1 + 2 + 2 + 1  # counts; tokens and router weights; two matrices' copies; outputs
    backward = 2 + 2 + 1 + 2 + 2  # the same again; gradients of outputs, of tokens and router weights, of copies
    assert hlo.count(" all-gather(") == forward + backward


def test_slices_travel_and_return():
    """Rank 0 sends its rows 1 and 2 to rank 1 and row 0 to itself; rank 1 row 2 to rank 0."""
    size = np.zeros((2, 2, 2), np.int32)
    at_sender, at_receiver = size.copy(), size.copy()
    size[0, 1, 1], at_sender[0, 1, 1], at_receiver[0, 1, 1] = 2, 1, 2
    size[0, 0, 0], at_sender[0, 0, 0], at_receiver[0, 0, 0] = 1, 0, 3
    size[1, 0, 0], at_sender[1, 0, 0], at_receiver[1, 0, 0] = 1, 2, 0
    slices = Slices(*map(jnp.asarray, (size, at_sender, at_receiver)))
    x = jnp.asarray([1, 2, 3, 4, 5, 6])

    @jax.jit
    @functools.partial(
        jax.shard_map, mesh=make_mesh(2), in_specs=P("expert"), out_specs=(P("expert"), P("expert")), check_vma=False
    )
    def run(x):
        there = exchange(x, slices, 4, axis="expert")
        return there, exchange(there, slices.back(), 3, axis="expert")

    there, back = run(x)
    np.testing.assert_array_equal(there, [6, 0, 0, 1, 0, 0, 2, 3])
    np.testing.assert_array_equal(back, [1, 2, 3, 0, 0, 6])


def test_a_step_moves_nothing_to_the_host():
    args, (experts, valid) = inputs(np.float32), routing("random")
    run = jax.jit(jax.grad(lambda args: jnp.sum(over_ranks(args, experts, valid, 4))))
    hlo = run.lower(args).compile().as_text()
    assert not any(word in hlo for word in ("outfeed", "infeed", " send(", "callback"))


@pytest.mark.parametrize("balance", ["balanced", "home"])
def test_rows_and_copies_travel_by_ragged_all_to_all_on_a_gpu(balance):
    """XLA lacks it on CPUs: here it is only lowered, which a GPU's own test must follow."""
    args, (experts, valid) = inputs(np.float32), routing("random")
    run = jax.jit(jax.grad(lambda args: jnp.sum(over_ranks(args, experts, valid, 4, balance, transport="ragged"))))
    text = run.trace(args).lower(lowering_platforms=("cuda",)).as_text()
    # tokens and router weights go; in the backward pass also gradients of outputs, and two gradients come back.
    # The forward's own output is not asked for. Of two matrices the copies are fetched and their gradients returned
    there, copies = 5, 4 * (balance == "balanced")
    assert text.count("@ragged_all_to_all") == there + copies


@pytest.mark.gpu
@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("balance", ["balanced", "home"])
def test_ragged_all_to_all_carries_what_the_emulation_carries(name, balance):
    ranks = min(jax.device_count(), 8)
    if ranks < 2:
        pytest.skip("needs two GPUs")
    if name == "one expert" and balance == "home":
        pytest.skip("a token that picks one expert twice has no place in the worst case of the ordinary dispatch")
    args, (experts, valid) = inputs(np.float32), routing(name)

    def by(transport):
        run = functools.partial(over_ranks, ranks=ranks, balance=balance, transport=transport)
        return jax.device_get(with_gradients(run, args, experts, valid))

    assert_same(by("ragged"), by("gathered"), 1e-5)


def test_unknown_names_are_refused():
    args, (experts, valid) = inputs(np.float32), routing("random")
    with pytest.raises(ValueError, match="balance must be one of"):
        over_ranks(args, experts, valid, 2, balance="even")
    with pytest.raises(ValueError, match="transport must be one of"):
        exchange(args["z"], Slices(*[jnp.zeros((1, 1, 1), jnp.int32)] * 3), 4, axis="expert", transport="pigeon")
