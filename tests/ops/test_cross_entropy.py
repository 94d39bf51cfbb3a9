"""`k3jax.ops.cross_entropy`: chunks against full logits, and that the full logits never exist."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from k3jax.ops.cross_entropy import default_implementation, linear_cross_entropy

IMPLEMENTATIONS = ["reference", "chunked"]


def make(seed, B=2, T=21, D=6, V=17, dtype="float64"):
    rng = np.random.default_rng(seed)
    x, w = rng.standard_normal((B, T, D)).astype(jnp.dtype(dtype)), rng.standard_normal((D, V))
    return x, w, rng.integers(0, V, (B, T)).astype(np.int32), rng.random((B, T)) < 0.8


def loss_and_grads(x, w, targets, mask, z_loss=0.02, **options):
    """Loss, gradients and aux; the per-token losses take part in the gradient with weights of their own."""
    weights = np.random.default_rng(3).random(targets.shape)

    def loss(x, w, targets, mask):
        total, aux = linear_cross_entropy(x, w, targets, mask, z_loss=z_loss, **options)
        return 0.7 * total + jnp.sum(weights * aux.token_loss_BT), (total, aux)

    return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(x, w, targets, mask)


def assert_same(got, want, tolerance=1e-12):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("chunk", [1, 4, 7, 20, 21, 512])
def test_any_chunk_equals_full_logits_forward_and_in_every_gradient(x64, chunk):
    data = make(0)
    want = loss_and_grads(*data, implementation="reference")
    assert_same(loss_and_grads(*data, chunk=chunk, implementation="chunked"), want)


def test_a_single_token_and_fractional_weights(x64):
    x, w, targets, _ = make(1, T=1)
    mask = np.array([[0.25], [1.5]])
    want = loss_and_grads(x, w, targets, mask, implementation="reference")
    assert_same(loss_and_grads(x, w, targets, mask), want)
    assert float(want[0][1][1].tokens) == 1.75


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_terms_are_what_their_names_say(x64, implementation):
    x, w, targets, mask = make(2)
    total, aux = linear_cross_entropy(x, w, targets, mask, chunk=8, z_loss=0.1, implementation=implementation)
    logits = x @ w
    lse = np.log(np.exp(logits).sum(-1))
    nll = lse - np.take_along_axis(logits, targets[..., None], -1)[..., 0]
    np.testing.assert_allclose(aux.token_loss_BT, nll * mask)
    np.testing.assert_allclose(aux.z_sum, 0.1 * (lse**2 * mask).sum())
    np.testing.assert_allclose(total - aux.z_sum, (nll * mask).sum())
    assert aux.tokens == mask.sum()


@pytest.mark.parametrize("garbage", [1e30, np.nan])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_masked_tokens_contribute_exactly_nothing_whatever_they_hold(implementation, garbage):
    x, w, targets, mask = make(3, dtype="float32")
    w = w.astype(np.float32)
    clean = loss_and_grads(np.where(mask[..., None], x, 0), w, np.where(mask, targets, 0), mask)
    x[~mask], targets[~mask] = garbage, -7
    (value, (_, aux)), (dx, dw) = dirty = loss_and_grads(x, w, targets, mask)
    assert np.all(np.asarray(dx)[~mask] == 0)
    assert np.all(np.asarray(aux.token_loss_BT)[~mask] == 0)
    for a, b in zip(jax.tree.leaves(dirty), jax.tree.leaves(clean), strict=True):
        np.testing.assert_array_equal(a, b)
    nothing = loss_and_grads(x, w, targets, np.zeros_like(mask), implementation=implementation)
    assert all(np.all(np.asarray(leaf) == 0) for leaf in jax.tree.leaves(nothing))


def test_bfloat16_features_keep_float32_losses_and_weight_gradients(x64):
    x, w, targets, mask = make(4, T=256, D=64, V=300, dtype="bfloat16")
    w = (0.3 * w).astype(np.float32)
    got = loss_and_grads(x, w, targets, mask, chunk=16)
    rounded = w.astype(jnp.bfloat16).astype(np.float64)
    want = loss_and_grads(x.astype(np.float64), rounded, targets, mask, implementation="reference")
    (value, (total, _)), (dx, dw) = got
    assert (total.dtype, dx.dtype, dw.dtype) == (jnp.float32, jnp.bfloat16, jnp.float32)
    np.testing.assert_allclose(value, want[0][0], rtol=1e-6)
    for a, b, limit in ((dx, want[1][0], 4e-3), (dw, want[1][1], 4e-3)):
        a = np.asarray(a, np.float64)
        assert np.linalg.norm(a - b) < limit * np.linalg.norm(b)


def test_weight_gradient_does_not_lose_small_chunks(x64):
    """A bf16 sum over 256 chunks would stall once it is 256 times larger than what each adds."""
    x, w, targets, mask = make(5, B=1, T=1024, D=2, V=4, dtype="bfloat16")
    x, mask = np.ones_like(x), np.ones_like(mask)
    w = np.zeros((2, 4), jnp.bfloat16)
    (_, _), (_, dw) = loss_and_grads(x, w, np.zeros_like(targets), mask, chunk=4)
    (_, _), (_, want) = loss_and_grads(
        x.astype(np.float64), w.astype(np.float64), np.zeros_like(targets), mask, implementation="reference"
    )
    np.testing.assert_allclose(np.asarray(dw, np.float64), want, rtol=2**-8)


def largest_array(fn, *args) -> int:
    """Elements of the largest array in the compiled program."""
    text = jax.jit(fn).lower(*args).compile().as_text()
    return max(int(np.prod([int(n) for n in dims.split(",")])) for dims in re.findall(r"\w+\[([\d,]+)\]", text))


def test_full_logits_are_held_neither_forward_nor_backward():
    B, T, D, V, chunk = 2, 1000, 8, 512, 64
    shapes = [((B, T, D), jnp.float32), ((D, V), jnp.float32), ((B, T), jnp.int32), ((B, T), jnp.bool_)]
    args = [jax.ShapeDtypeStruct(*shape) for shape in shapes]

    def grads(implementation):
        loss = partial(linear_cross_entropy, chunk=chunk, implementation=implementation)
        return jax.grad(lambda *args: loss(*args)[0], (0, 1))

    assert largest_array(grads("reference"), *args) >= B * T * V
    assert largest_array(grads("chunked"), *args) <= B * chunk * V


def test_differentiating_the_sum_alone_takes_three_products_and_evaluating_it_one():
    x, w, targets, mask = make(9, dtype="float32")

    def products(fn, *args) -> int:
        return str(jax.make_jaxpr(fn)(*args)).count("dot_general[")

    run = lambda x, w: linear_cross_entropy(x, w, targets, mask, implementation="chunked")  # noqa: E731
    assert products(run, x, w) == 1
    assert products(jax.grad(run, (0, 1), has_aux=True), x, w) == 3
    with_tokens = lambda x, w: run(x, w)[0] + jnp.max(run(x, w)[1].token_loss_BT)  # noqa: E731
    assert products(jax.grad(with_tokens, (0, 1)), x, w) > 3


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("w_spec", [P(), P(None, "tensor")], ids=["replicated head", "vocabulary sharded"])
def test_sharding_batch_and_vocabulary_changes_nothing(x64, w_spec, implementation):
    x, w, targets, mask = make(6, B=8, V=16)
    want = loss_and_grads(x, w, targets, mask, implementation="reference")
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        place = lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec))  # noqa: E731
        data = (place(a, P("data")) for a in (targets, mask))
        got = loss_and_grads(place(x, P("data")), place(w, w_spec), *data, chunk=8, implementation=implementation)
    assert_same(got, want)
    (_, (total, aux)), (dx, dw) = got
    assert total.sharding.is_fully_replicated
    assert dx.sharding.spec[0] == aux.token_loss_BT.sharding.spec[0] == "data"
    assert dw.sharding.is_equivalent_to(NamedSharding(mesh, w_spec), 2)


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map_over_the_batch_changes_nothing(x64, check_vma):
    x, w, targets, mask = make(7, B=8)
    run = partial(linear_cross_entropy, chunk=8, z_loss=0.02)
    want = jax.jit(jax.value_and_grad(lambda x, w: run(x, w, targets, mask)[0], (0, 1)))(x, w)
    with jax.set_mesh(jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))):
        place = partial(jax.device_put, device=P("data"))
        specs = {"in_specs": (P("data"), P(), P("data"), P("data")), "out_specs": P("data"), "check_vma": check_vma}
        rows = jax.shard_map(lambda *args: run(*args)[0][None], **specs)
        loss = lambda x, w, targets, mask: jnp.sum(rows(x, w, targets, mask))  # noqa: E731
        got = jax.jit(jax.value_and_grad(loss, (0, 1)))(place(x), w, place(targets), place(mask))
    assert_same(got, want)


def test_bad_input_is_refused_with_the_reason():
    x, w, targets, mask = make(8, dtype="float32")
    for message, args, options in [
        ("must be", (x, w[1:], targets, mask), {}),
        ("must be", (x, w, targets[:, 1:], mask), {}),
        ("chunk must be positive", (x, w, targets, mask), {"chunk": 0}),
        ("'reference' or 'chunked'", (x, w, targets, mask), {"implementation": "xla"}),
    ]:
        with pytest.raises(ValueError, match=message):
            linear_cross_entropy(*args, **options)
    assert default_implementation() in IMPLEMENTATIONS
