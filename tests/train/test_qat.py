"""Quantisation-aware training of the routed experts."""

import dataclasses
import math
import re
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from micro import TOKEN_BYTES, micro_config, micro_model, random_batch, spread
from test_sharded_step import assert_same_step, leaves

from k3jax.config import ConfigError, MeshConfig, MoEConfig
from k3jax.generate import generate_text, generate_tokens, load
from k3jax.model.k3 import create
from k3jax.model.quantize import pack_experts, quantized
from k3jax.ops.mx import GROUP, PackedMX, dequantize, quantize
from k3jax.sharding import make_mesh
from k3jax.train.batch import place_batch
from k3jax.train.loop import train
from k3jax.train.metrics import read_records
from k3jax.train.optimizer import make_optimizer
from k3jax.train.pipeline import PipelineTrainer
from k3jax.train.state import abstract_params, create_state
from k3jax.train.step import gradients, make_eval_step, make_train_step

RULE = "even"


def model_with(qat, dtype="float32", **overrides):
    moe = MoEConfig(
        num_experts=8, experts_per_token=2, expert_size=32, latent_size=32, qb_bins=100, qat=qat, qat_scale_rule=RULE
    )
    # MLA compiles fastest; two layers in a loop
    values = {"num_layers": 2, "mla_layers": (0, 1), "num_dense_layers": 0, "moe": moe} | overrides
    return micro_model(**values, dtype=dtype, param_dtype="float64" if dtype == "float64" else "float32")


def config_with(qat, mesh=None, dtype="float64", train=None, **overrides):
    return micro_config(
        "none",
        "none",
        model=model_with(qat, dtype, **overrides),
        train=train,
        data={"batch_size": 8},
        optimizer={"muon_ns_dtype": "float64" if dtype == "float64" else "float32"},
        mesh=mesh,
    )


def start(config):
    mesh = jax.sharding.get_mesh()
    optimizer = make_optimizer(config.optimizer, abstract_params(config.model), config.train.steps)
    state = spread(create_state(config.model, optimizer.transform, mesh, 0, fsdp=config.mesh.fsdp))
    return optimizer, state, place_batch(random_batch(8), config.train.accumulation, mesh)


def take_step(config):
    optimizer, state, batch = start(config)
    return jax.jit(make_train_step(config, optimizer, TOKEN_BYTES))(state, batch)


def gradients_of(config, params=None):
    _, state, batch = start(config)
    fn = jax.jit(lambda params, bias, batch: gradients(config, params, bias, batch, TOKEN_BYTES))
    return fn(params or state.params, state.router_bias, batch)


@pytest.fixture(autouse=True)
def one_device():
    with jax.set_mesh(make_mesh(MeshConfig())):
        yield


def test_only_routed_experts_are_rounded_and_exactly_as_the_codec_does():
    model = model_with("w4")
    params = create(model)
    before, after = leaves(params), leaves(quantized(params, model))
    changed = {name for name in before if not np.array_equal(before[name], after[name])}
    assert changed == {name for name in before if name.split("/")[-1] in ("w1", "w2", "w3") and "shared" not in name}
    assert len(changed) == 3
    for name in changed:
        codes = quantize(before[name], format="mxfp4", scale_rule=RULE, axis=-2)
        np.testing.assert_array_equal(after[name], dequantize(*codes, format="mxfp4", axis=-2))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_masters_get_the_gradient_at_the_rounded_weights(dtype):
    config, plain = config_with("w4", dtype=dtype), config_with(None, dtype=dtype)
    params = start(config)[1].params
    ours, sums = gradients_of(config)
    rounded = jax.tree.map(lambda w, p: w.astype(p.dtype), quantized(params, config.model), params)
    theirs, other = gradients_of(plain, rounded)
    ours, theirs, masters = leaves(ours), leaves(theirs), leaves(params)
    for name in masters:
        assert ours[name].dtype == masters[name].dtype == np.float32
        np.testing.assert_array_equal(ours[name], theirs[name], err_msg=name)
    assert sums.loss == other.loss


@pytest.mark.slow
def test_masters_are_never_made_from_codes():
    config = config_with("w4a8", dtype="float32")
    _, state, _ = start(config)
    after, _ = take_step(config)
    decayed = leaves(state.params)["segments/0/runs/0/ffn/w1"]
    master = leaves(after.params)["segments/0/runs/0/ffn/w1"]
    step = np.abs(master - decayed).max()
    assert step < 0.05 < np.abs(decayed).max()  # an optimizer step away, where rounding alone would be a third of it
    codes = quantize(decayed, format="mxfp4", scale_rule=RULE, axis=-2)
    assert np.abs(master - dequantize(*codes, format="mxfp4", axis=-2)).mean() > np.abs(master - decayed).mean()


def rounding(jaxpr, inside=False):
    """For every rounding to an integer in a program: whether it stands in a loop, and how many numbers it rounds."""
    found = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "round":
            found.append((inside, math.prod(eqn.outvars[0].aval.shape)))
        for value in jax.tree.leaves(tuple(eqn.params.values()), is_leaf=lambda v: hasattr(v, "eqns")):
            if hasattr(value, "eqns"):
                found += rounding(value, inside or eqn.primitive.name in ("scan", "while"))
    return found


@pytest.mark.parametrize("remat", ["none", "layer"])
def test_weights_are_rounded_once_a_step_whatever_the_micro_batches_and_remat(remat):
    config = config_with("w4", dtype="float32", train={"accumulation": 4, "remat": remat})
    _, state, batch = start(config)
    program = jax.make_jaxpr(lambda *args: gradients(config, *args, TOKEN_BYTES))(
        state.params, state.router_bias, batch
    )
    banks = [value.size for name, value in leaves(state.params).items() if name.split("/")[-1] in ("w1", "w2", "w3")]
    assert sorted(rounding(program.jaxpr)) == sorted((False, size) for size in banks)


@pytest.mark.parametrize(
    ("qat", "implementation"),
    [("w4", "blocked"), pytest.param("w4a8", "blocked", marks=pytest.mark.slow), ("w4a8", "dense")],
)
def test_the_forward_pass_of_training_is_that_of_the_codes(qat, implementation):
    model = model_with(qat)
    model = dataclasses.replace(model, moe=dataclasses.replace(model.moe, implementation=implementation))
    config = dataclasses.replace(config_with(qat, dtype="float32"), model=model)
    _, state, batch = start(config)
    packed = pack_experts(state.params, RULE)
    forward = jax.jit(lambda params, batch: params(batch["tokens"], batch["segment_ids"]))
    micro = jax.tree.map(lambda a: a[0], batch)
    trained = forward(quantized(state.params, model), micro)
    np.testing.assert_array_equal(forward(packed, micro), trained)
    assert np.abs(trained - forward(state.params, micro)).max() > 1e-3
    # the same loss in an evaluation of the masters and of the codes
    scored = jax.jit(make_eval_step(config, TOKEN_BYTES))(state.params, state.router_bias, batch)
    served = dataclasses.replace(config, model=dataclasses.replace(model, moe=dataclasses.replace(model.moe, qat=None)))
    if qat == "w4":
        by_codes = jax.jit(make_eval_step(served, TOKEN_BYTES))(packed, state.router_bias, batch)
        assert by_codes["nats"] == scored["nats"]


def test_activations_round_at_the_doors_of_the_experts_only():
    config = config_with("w4a8", dtype="float32", train={"unroll": True})
    _, state, batch = start(config)
    program = jax.make_jaxpr(make_eval_step(config, TOKEN_BYTES))(state.params, state.router_bias, batch)
    model, tokens = config.model, 8 * 32
    weights = {value.size for value in leaves(state.params).values()}
    rows = [size for _, size in rounding(program.jaxpr) if size not in weights]
    latent = tokens * model.moe.latent_size
    assert latent in rows
    assert all(size == latent or size % model.moe.expert_size == 0 and size > latent for size in rows)


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["sublayer", "block"])
def test_gradients_do_not_depend_on_remat_or_micro_batches(x64, remat):
    expected, sums = gradients_of(config_with("w4a8"))
    other, found = gradients_of(config_with("w4a8", train={"remat": remat, "accumulation": 2}))
    np.testing.assert_allclose(found.loss, sums.loss, rtol=1e-12)
    for (name, a), b in zip(leaves(other).items(), leaves(expected).values(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12 * np.abs(b).max(), err_msg=name)


MESHES = {
    "data=2, expert=4, fsdp": MeshConfig(data=2, expert=4, fsdp=True),
    "data=8, fsdp": MeshConfig(data=8, fsdp=True),
    "expert=2, context=2, tensor=2": MeshConfig(expert=2, context=2, tensor=2),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MESHES)
def test_every_mesh_takes_the_step_of_one_device(x64, name):
    heads = {"kda": dataclasses.replace(micro_model().kda, num_heads=8), "num_layers": 3, "mla_layers": (2,)}
    expected = jax.device_get(take_step(config_with("w4a8", **heads)))
    mesh = MESHES[name]
    with jax.set_mesh(make_mesh(mesh)):
        found = take_step(config_with("w4a8", mesh, **heads))
    assert_same_step(found, expected, 1e-9)


def test_each_device_rounds_what_it_holds_at_rest():
    config = config_with("w4", MESHES["data=2, expert=4, fsdp"], dtype="float32")
    expected = leaves(quantized(start(config_with("w4", dtype="float32"))[1].params, config.model))
    with jax.set_mesh(make_mesh(config.mesh)):
        params = start(config)[1].params
        rounded = jax.jit(partial(quantized, config=config.model)).lower(params).compile()
        assert not re.search("all-gather|all-reduce|all-to-all|collective-permute", rounded.as_text())
        for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(rounded(params)), strict=True):
            assert a.sharding.is_equivalent_to(b.sharding, a.ndim)
        for name, value in leaves(rounded(params)).items():
            np.testing.assert_array_equal(value, expected[name], err_msg=name)


@pytest.mark.slow
def test_a_pipeline_takes_the_step_of_one_device(x64):
    layers: dict = {"num_layers": 4, "mla_layers": tuple(range(4))}
    config = config_with("w4a8", **layers)
    optimizer, state, batch = start(config)
    before = jax.device_get(state)
    scores = jax.jit(make_eval_step(config, TOKEN_BYTES))(state.params, state.router_bias, batch)
    expected = jax.device_get(take_step(config))
    config = config_with("w4a8", MeshConfig(pipe=2), train={"accumulation": 4}, **layers)
    with jax.set_mesh(make_mesh(config.mesh)):
        trainer = PipelineTrainer(config, jax.sharding.get_mesh(), TOKEN_BYTES)
        trainer.compile()
        states, batch = trainer.parts(before), trainer.place(random_batch(8))
        np.testing.assert_allclose(trainer.evaluate(states, batch)["nats"], scores["nats"], rtol=1e-9)
        states, metrics = trainer.step(states, batch)
        assert_same_step((trainer.whole(states, expected[0]), metrics), expected, 1e-9)


def test_widths_that_groups_do_not_divide_are_refused():
    for field in ("expert_size", "latent_size"):
        with pytest.raises(ConfigError, match=f"moe.{field} 48 must be a multiple of 32, the size of an MX group"):
            model_with("w4", moe=MoEConfig(8, 2, **{"expert_size": 32, "latent_size": 32, "qat": "w4"} | {field: 48}))
    model = dataclasses.replace(model_with(None), hidden_size=48)
    with pytest.raises(ConfigError, match="hidden_size 48 must be"):
        dataclasses.replace(model, moe=dataclasses.replace(model.moe, latent_size=None, qat="w4"))


def test_groups_that_would_lie_on_two_devices_are_refused():
    model = model_with("w4")
    params = create(model)
    with jax.set_mesh(make_mesh(MeshConfig(data=2))):
        bank = params.segments[0].runs[0].ffn.w1
        cut = jax.device_put(bank, jax.P(None, None, "data"))
        with pytest.raises(ConfigError, match="is cut over mesh axes data along its input dimension"):
            quantized({"w1": cut}, model)
    assert bank.shape[-2] == GROUP


def test_packed_experts_take_a_quarter_of_bfloat16():
    params = create(model_with("w4"))
    packed = pack_experts(params, RULE)

    def banks(tree):
        layer = tree.segments[0].runs[0].ffn
        return [w.get_value() for w in (layer.w1, layer.w2, layer.w3)]

    for bank, codes in zip(banks(params), banks(packed)):
        assert isinstance(codes, PackedMX)
        assert sum(a.nbytes for a in jax.tree.leaves(codes)) == bank.size * 4.25 / 8
        assert codes.shape == bank.shape


@pytest.mark.slow
def test_a_run_trains_resumes_and_generates_from_codes(micro_run):
    moe = dataclasses.replace(model_with("w4a8").moe, num_experts=4)
    config = micro_run(model=micro_model(moe=moe), train={"eval_interval": 3, "sample_interval": 6, "sample_tokens": 4})
    mesh = jax.sharding.get_mesh()
    train(dataclasses.replace(config, train=dataclasses.replace(config.train, steps=4)), mesh)
    train(config, mesh, allow_config_change=True)
    assert all(
        np.isfinite(record["loss"])
        for record in read_records(Path(config.run_dir) / "metrics.jsonl")
        if "loss" in record
    )
    run = load(config.run_dir)
    assert isinstance(run.model.layer(1).ffn.w1.get_value(), PackedMX)
    assert generate_text(run.model, run.router_bias, run.tokenizer, "ab", max_tokens=4).startswith("ab")


@pytest.mark.slow
def test_generation_from_codes_equals_generation_from_their_numbers():
    model = model_with("w4a8")
    params = create(model, seed=1)
    bias = jnp.zeros((model.num_moe_layers, model.moe.num_experts))

    def tokens(model):
        return list(generate_tokens(model, bias, [5, 200, 33], max_tokens=5, temperature=0.0))

    assert tokens(pack_experts(params, RULE)) == tokens(jax.jit(partial(quantized, config=model))(params))
