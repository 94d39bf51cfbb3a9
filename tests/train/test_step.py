"""One step: splits of a batch change nothing, balancing acts a step later, non-finite updates are dropped."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from micro import TOKEN_BYTES, micro_config, micro_model, random_batch, spread

from k3jax.config import MeshConfig, RunConfig
from k3jax.ops.quantile_balancing import qb_update
from k3jax.sharding import make_mesh
from k3jax.train import step as step_module
from k3jax.train.batch import place_batch
from k3jax.train.optimizer import make_optimizer
from k3jax.train.state import TrainState, abstract_params, abstract_state, create_state
from k3jax.train.step import gradients, make_eval_step, make_train_step, max_violation

FLOAT64 = {"dtype": "float64", "param_dtype": "float64"}
NAN_LOSS, NAN_GRADIENT = 255, 254  # targets that spoil a batch of the `trained` fixture; in none of `random_batch`


@pytest.fixture
def mesh():
    mesh = make_mesh(MeshConfig())
    with jax.set_mesh(mesh):
        yield mesh


def build(config: RunConfig, mesh) -> tuple[TrainState, object]:
    optimizer = make_optimizer(config.optimizer, abstract_params(config.model), config.train.steps)
    return spread(create_state(config.model, optimizer.transform, mesh, 0)), optimizer


@pytest.fixture(scope="module")
def trained(text_folder, tmp_path_factory):
    """A state and a compiled step in two micro-batches, with a loss that some targets turn into NaN."""
    real = step_module.linear_cross_entropy

    def poisoned(x, w, targets, mask, **options):
        loss, aux = real(x, w, targets, mask, **options)
        loss = jnp.where(jnp.any(targets == NAN_LOSS), jnp.nan, loss)
        zero = jnp.where(jnp.any(targets == NAN_GRADIENT), jnp.sum(w[0] * 0), 1.0)
        return loss + (jnp.sqrt(zero) - jax.lax.stop_gradient(jnp.sqrt(zero))), aux  # value 0; slope infinite at 0

    config, mesh = micro_config(text_folder, tmp_path_factory.mktemp("step")), make_mesh(MeshConfig())
    with pytest.MonkeyPatch.context() as patch, jax.set_mesh(mesh):
        patch.setattr(step_module, "linear_cross_entropy", poisoned)
        state, optimizer = build(config, mesh)
        train_step = jax.jit(make_train_step(config, optimizer, TOKEN_BYTES)).lower(
            state, place_batch(random_batch(), 2, mesh)
        )
        return state, train_step.compile()


def test_one_batch_in_four_parts_gives_the_same_gradients_and_the_same_counts(micro_run, mesh, x64):
    config = micro_run(model=micro_model(**FLOAT64), train={"z_loss": 1e-3})
    state, batch = build(config, mesh)[0], random_batch()
    compute = jax.jit(functools.partial(gradients, config, token_bytes=TOKEN_BYTES))
    whole, sums = compute(state.params, state.router_bias, place_batch(batch, 1, mesh))
    split, split_sums = compute(state.params, state.router_bias, place_batch(batch, 4, mesh))
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(split)):
        np.testing.assert_allclose(b, a, rtol=1e-9, atol=1e-12)
    assert max(float(jnp.abs(a).max()) for a in jax.tree.leaves(whole)) > 1e-2
    for name in ("histogram", "load", "tokens", "bytes"):
        np.testing.assert_array_equal(getattr(split_sums, name), getattr(sums, name))
    for name in ("loss", "cross_entropy", "z_loss", "max_logit"):
        np.testing.assert_allclose(getattr(split_sums, name), getattr(sums, name), rtol=1e-12)


def test_the_new_bias_comes_from_the_batch_that_the_old_one_routed(trained, mesh):
    (state, train_step), batch = trained, random_batch()

    @jax.jit
    def forward(params, tokens, segment_ids, bias):
        return params.features(tokens, segment_ids, router_bias=bias, histogram=True)[1]

    aux = forward(state.params, batch["tokens"], batch["segment_ids"], state.router_bias)
    assert int(aux.histogram.sum()) == int((batch["segment_ids"] > 0).sum()) * 4  # each token once for each expert
    expected = qb_update(aux.histogram, state.router_bias, experts_per_token=2)
    assert float(jnp.abs(expected - state.router_bias).max()) > 1e-3
    new, metrics = train_step(state, place_batch(batch, 2, mesh))
    np.testing.assert_allclose(new.router_bias, expected, atol=1e-6)
    # the step itself was routed by the old bias
    np.testing.assert_allclose(metrics["max_violation"], max_violation(aux.load).max(), rtol=1e-6)
    rebiased = dataclasses.replace(state, router_bias=new.router_bias)
    assert float(train_step(rebiased, place_batch(batch, 2, mesh))[1]["loss"]) != float(metrics["loss"])


def test_evaluation_routes_with_the_biases_it_is_given_and_weighs_by_tokens(micro_run, mesh):
    config = micro_run(train={"z_loss": 0.1})
    state = build(config, mesh)[0]
    evaluate, batch = jax.jit(make_eval_step(config, TOKEN_BYTES)), random_batch()
    result = evaluate(state.params, state.router_bias, place_batch(batch, 2, mesh))
    logits = jax.jit(lambda params, *inputs, bias: params(*inputs, router_bias=bias))(
        state.params, batch["tokens"], batch["segment_ids"], bias=state.router_bias
    )
    nll = -jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.asarray(batch["targets"])[..., None], -1)[..., 0]
    np.testing.assert_allclose(result["nats"], jnp.sum(nll * batch["loss_mask"]), rtol=1e-5)
    assert int(result["tokens"]) == batch["loss_mask"].sum() == int(result["bytes"])
    unbiased = evaluate(state.params, jnp.zeros_like(state.router_bias), place_batch(batch, 2, mesh))
    assert float(unbiased["nats"]) != float(result["nats"])


@pytest.mark.parametrize("target", [NAN_LOSS, NAN_GRADIENT])
def test_a_step_that_is_not_finite_leaves_the_state_as_it_was(trained, mesh, target):
    (state, train_step), good, bad = trained, random_batch(), random_batch()
    bad["targets"] = np.where(bad["loss_mask"] & (np.arange(8) == 5)[:, None], target, bad["targets"]).astype(np.int32)
    same, metrics = train_step(state, place_batch(bad, 2, mesh))
    assert not metrics["finite"]
    assert bool(jnp.isfinite(metrics["loss"])) == (target == NAN_GRADIENT)
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(same)):
        np.testing.assert_array_equal(a, b)
    moved, metrics = train_step(same, place_batch(good, 2, mesh))
    assert metrics["finite"]
    assert int(moved.step) == 1
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(moved))


def test_a_batch_of_padding_changes_no_bias_and_stays_finite(trained, mesh):
    state, train_step = trained
    batch = {name: np.zeros_like(value) for name, value in random_batch().items()}
    new, metrics = train_step(state, place_batch(batch, 2, mesh))
    assert metrics["finite"]
    assert int(metrics["tokens"]) == 0
    assert float(metrics["grad_norm"]) == 0
    np.testing.assert_array_equal(new.router_bias, state.router_bias)


def test_abstract_state_describes_the_real_one(micro_run, mesh):
    config = micro_run()
    optimizer = make_optimizer(config.optimizer, abstract_params(config.model), config.train.steps)
    state = create_state(config.model, optimizer.transform, mesh, 0)
    abstract = abstract_state(config.model, optimizer.transform, mesh)
    assert jax.tree.structure(abstract) == jax.tree.structure(state)
    for a, b in zip(jax.tree.leaves(abstract), jax.tree.leaves(state)):
        assert (a.shape, a.dtype, a.sharding) == (b.shape, b.dtype, b.sharding)


def test_max_violation_is_the_share_above_the_mean():
    np.testing.assert_allclose(max_violation(jnp.array([[2, 2], [3, 1], [0, 0]])), [0.0, 0.5, 0.0])
