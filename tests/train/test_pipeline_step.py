"""A step over a pipeline is the step of one device: gradients, state and metrics, on every mesh."""

import dataclasses
import functools
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from micro import TOKEN_BYTES, micro_config, micro_model, random_batch, spread
from test_sharded_step import assert_same_step

from k3jax.config import ConfigError, DataConfig, MeshConfig, ModelConfig, MoEConfig, RunConfig, TrainConfig, k3
from k3jax.parallel.pipeline import gpipe, local_bytes
from k3jax.sharding import make_mesh
from k3jax.train.batch import place_batch
from k3jax.train.loop import train
from k3jax.train.metrics import read_records
from k3jax.train.optimizer import make_optimizer
from k3jax.train.pipeline import PipelineTrainer
from k3jax.train.state import TrainState, abstract_params, abstract_state, create_state
from k3jax.train.step import make_eval_step, make_train_step


def layered(num_layers: int, mla_layers: Iterable[int], block: int, **overrides: Any) -> ModelConfig:
    moe = MoEConfig(num_experts=8, experts_per_token=2, expert_size=16, latent_size=16, qb_bins=100)
    values = {"num_layers": num_layers, "mla_layers": tuple(mla_layers), "attn_res_block_size": block, "moe": moe}
    return micro_model(**values | overrides)


MODELS = {
    "small": layered(4, range(4), 2, num_dense_layers=0),  # compiles fastest
    "mixed": layered(9, (1, 3, 5, 7, 8), 6),  # KDA, MLA, …; stages of two or four layers are cut inside blocks
    "deep": layered(9, range(9), 4),  # the last block has one layer
}


def config_on(mesh: MeshConfig, model: ModelConfig, **train: Any) -> RunConfig:
    model = dataclasses.replace(model, dtype="float64", param_dtype="float64")
    return micro_config(
        "none",
        "none",
        model=model,
        train={"remat": "layer", "z_loss": 1e-3} | train,
        data={"batch_size": 8},
        optimizer={"muon_ns_dtype": "float64", "qk_clip_threshold": 0.05},  # so low that it acts
        mesh=mesh,
    )


def on_one_device(model: ModelConfig) -> tuple[TrainState, TrainState, dict, dict]:
    """State before and after a step of `random_batch`, metrics, sums of an evaluation."""
    config = config_on(MeshConfig(), model)
    with jax.enable_x64(True), jax.set_mesh(make_mesh(MeshConfig())):
        mesh = jax.sharding.get_mesh()
        optimizer = make_optimizer(config.optimizer, abstract_params(config.model), config.train.steps)
        state = spread(create_state(config.model, optimizer.transform, mesh, 0))
        batch = place_batch(random_batch(8), 1, mesh)
        after, metrics = jax.jit(make_train_step(config, optimizer, TOKEN_BYTES))(state, batch)
        scores = jax.jit(make_eval_step(config, TOKEN_BYTES))(state.params, state.router_bias, batch)
        return jax.device_get((state, after, metrics, scores))


@functools.cache
def single(name: str) -> tuple:
    return on_one_device(MODELS[name])


def check(config: RunConfig, expected: tuple) -> PipelineTrainer:
    before, after, metrics, scores = expected
    with jax.set_mesh(make_mesh(config.mesh)):
        trainer = PipelineTrainer(config, jax.sharding.get_mesh(), TOKEN_BYTES)
        trainer.compile()
        states, batch = trainer.parts(before), trainer.place(random_batch(8))
        found = trainer.evaluate(states, batch)
        for name, value in scores.items():
            np.testing.assert_allclose(found[name], value, rtol=1e-9, err_msg=name)
        states, found = trainer.step(states, batch)
        for part, like in zip(states, trainer.abstract, strict=True):
            for a, b in zip(jax.tree.leaves(part), jax.tree.leaves(like), strict=True):
                assert a.sharding.is_equivalent_to(b.sharding, a.ndim)
    assert found.keys() == metrics.keys()
    assert_same_step((trainer.whole(states, after), found), (after, metrics), 1e-9)
    return trainer


def test_stages_cut_inside_blocks_take_the_step_of_one_device(x64):
    """Two ranks of two stages each, in blocks of two layers."""
    trainer = check(config_on(MeshConfig(pipe=2, virtual=2), MODELS["small"], accumulation=2), single("small"))
    assert trainer.stages.bounds == ((0, 1), (1, 2), (2, 3), (3, 4))
    # a loss that is not finite on the last rank leaves the state of every rank as it was
    before = single("small")[0]
    broken = dataclasses.replace(before, params=jax.tree.map(np.copy, before.params))
    broken.params.embed[...] = np.full_like(broken.params.embed[...], np.nan)
    states, metrics = trainer.step(trainer.parts(broken), trainer.place(random_batch(8)))
    assert not metrics["finite"]
    for a, b in zip(jax.tree.leaves(trainer.whole(states, broken)), jax.tree.leaves(broken), strict=True):
        np.testing.assert_array_equal(a, b)


CASES: dict[str, tuple[str, MeshConfig, dict[str, Any]]] = {
    "pipe=2": ("mixed", MeshConfig(pipe=2), {"accumulation": 8}),
    "pipe=4": ("mixed", MeshConfig(pipe=4), {"accumulation": 4, "remat": "block"}),
    "pipe=8": ("deep", MeshConfig(pipe=8), {"accumulation": 4, "unroll": True, "remat": "products"}),
    "pipe=2, virtual=4": ("deep", MeshConfig(pipe=2, virtual=4), {"accumulation": 4, "remat": "none"}),
    "pipe=2, data=2": ("mixed", MeshConfig(pipe=2, data=2), {"accumulation": 4}),
    "pipe=2, data=2, expert=2, fsdp": (
        "deep",
        MeshConfig(pipe=2, data=2, expert=2, fsdp=True),
        {"accumulation": 2, "remat": "sublayer"},
    ),
    "pipe=4, expert=2": ("deep", MeshConfig(pipe=4, expert=2), {"accumulation": 4}),
    "pipe=2, tensor=2, data=2": ("deep", MeshConfig(pipe=2, tensor=2, data=2), {"accumulation": 2}),
    "pipe=2, expert=2, context=2": ("mixed", MeshConfig(pipe=2, expert=2, context=2), {"accumulation": 2}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_every_pipeline_takes_the_step_of_one_device(x64, name):
    model, mesh, train = CASES[name]
    trainer = check(config_on(mesh, MODELS[model], **train), single(model))
    for chunk in trainer.chunks:  # a device adds up its slice of the gradients
        grads = chunk.taken_type[0]
        whole = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(grads))
        assert local_bytes(grads) <= whole / (mesh.data * mesh.expert * mesh.context * mesh.tensor) * 1.1
    if name == "pipe=2, virtual=4":  # blocks are sent once
        layout, x = trainer.layout, 2 * 32 * 32 * 8
        cached = sum(1 + len(layout.sent(chunk)) for chunk in range(1, layout.chunks))
        naive = sum(1 + len(layout.read(chunk)) for chunk in range(1, layout.chunks))
        assert trainer.traffic.sent == 2 * 4 * cached * x  # of four micro-batches, and as many cotangents
        assert (cached, naive) == (9, 18)


@pytest.mark.slow
def test_a_pipeline_without_attention_residuals_takes_the_step_of_one_device(x64):
    plain = dataclasses.replace(MODELS["small"], attn_res_block_size=None)
    check(config_on(MeshConfig(pipe=4), plain, accumulation=4), on_one_device(plain))


def untrained(mesh: MeshConfig, **train: Any) -> PipelineTrainer:
    return PipelineTrainer(config_on(mesh, MODELS["mixed"], **train), make_mesh(mesh), TOKEN_BYTES)


def abstract_whole() -> TrainState:
    config = config_on(MeshConfig(), MODELS["mixed"])
    with jax.set_mesh(make_mesh(MeshConfig())):
        optimizer = make_optimizer(config.optimizer, abstract_params(config.model), config.train.steps)
        return abstract_state(config.model, optimizer.transform, jax.sharding.get_mesh())


@pytest.mark.parametrize(
    "mesh", [MeshConfig(pipe=2, virtual=2, data=2, fsdp=True), MeshConfig(pipe=4)], ids=["virtual, fsdp", "pipe=4"]
)
def test_a_state_goes_into_parts_and_back(x64, mesh):
    rng = np.random.default_rng(0)
    like = abstract_whole()
    whole = jax.tree.map(lambda a: rng.integers(0, 10**6, a.shape).astype(a.dtype), like)
    trainer = untrained(mesh, accumulation=2)
    parts = trainer.parts(whole)
    for part, abstract in zip(parts, trainer.abstract, strict=True):
        for a, b in zip(jax.tree.leaves(part), jax.tree.leaves(abstract), strict=True):
            assert (a.sharding, a.shape, a.dtype) == (b.sharding, b.shape, b.dtype)
    back = trainer.whole(parts, like)
    for a, b in zip(jax.tree.leaves(back), jax.tree.leaves(whole), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_every_rank_is_born_with_the_numbers_of_one_device(x64):
    trainer = untrained(MeshConfig(pipe=2, virtual=2, data=2), accumulation=2)
    config = config_on(MeshConfig(), MODELS["mixed"])
    with jax.set_mesh(make_mesh(MeshConfig())):
        optimizer = make_optimizer(config.optimizer, abstract_params(config.model), config.train.steps)
        expected = create_state(config.model, optimizer.transform, jax.sharding.get_mesh(), 0)
    found = trainer.whole(trainer.create(), expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-14, atol=1e-15)


def test_a_pipeline_that_cannot_be_is_refused_with_what_is_legal():
    with pytest.raises(ConfigError, match=r"10 stages: 9 layers .* legal are 1 to 5 stages"):
        untrained(MeshConfig(pipe=2, virtual=5), accumulation=2)
    with pytest.raises(ConfigError, match=r"train\.accumulation 1 must be a multiple of mesh\.pipe 2"):
        config_on(MeshConfig(pipe=2, virtual=2), MODELS["mixed"])
    with pytest.raises(ConfigError, match=r"mesh\.virtual 2 needs mesh\.pipe > 1"):
        MeshConfig(virtual=2)


@pytest.mark.slow
def test_1f1b_holds_less_than_gpipe_and_not_more_with_more_micro_batches(x64):
    before, peaks = single("small")[0], {}
    for count, rows in ((4, 4), (8, 8)):
        config = config_on(MeshConfig(pipe=4), MODELS["small"], accumulation=count)
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, batch_size=rows))
        with jax.set_mesh(make_mesh(config.mesh)):
            trainer = PipelineTrainer(config, jax.sharding.get_mesh(), TOKEN_BYTES)
            trainer.compile()
            for name, schedule in (("1f1b", None), ("gpipe", gpipe(4, 1, count))):
                trainer.step(trainer.parts(before), trainer.place(random_batch(rows)), schedule)
                peaks[name, count] = trainer.memory()
                assert trainer.traffic.live == [0] * 4
    total = {key: [sum(rank.values()) for rank in found] for key, found in peaks.items()}
    assert total["1f1b", 8] == total["1f1b", 4]
    x = 1 * 32 * 32 * 8  # a partial sum or row of a micro-batch
    waiting = {key: [rank["waiting"] for rank in found] for key, found in peaks.items()}
    assert waiting["1f1b", 8] == [2 * x, 10 * x, 9 * x, 7 * x]
    assert waiting["gpipe", 8] == [2 * x, 18 * x, 19 * x, 25 * x]
    for rank in range(1, 4):  # the first one's inputs are tokens
        assert total["gpipe", 8][rank] - total["1f1b", 8][rank] >= 8 * x


@pytest.mark.slow
def test_a_run_goes_on_with_the_same_losses_from_mesh_to_mesh(micro_run, tmp_path, capsys):
    """Eight devices, four, two, one and eight again; every run evaluates and samples."""
    options = {"eval_interval": 3, "sample_interval": 6, "sample_tokens": 4, "accumulation": 2, "steps": 10}
    first = micro_run(
        model=MODELS["small"], mesh=MeshConfig(pipe=2, virtual=2, data=2), train=options | {"keep_last": 9}
    )
    with jax.set_mesh(make_mesh(first.mesh)):
        train(first, jax.sharding.get_mesh())
    assert "pipeline    2 ranks × 2 stages: layers 0-0 | 1-1 | 2-2 | 3-3; 2 micro-batches" in capsys.readouterr().out
    expected = read_records(Path(first.run_dir) / "metrics.jsonl")
    last, meshes = first, (MeshConfig(pipe=4), MeshConfig(expert=2), MeshConfig(), MeshConfig(pipe=2, expert=2))
    for step, mesh in zip((2, 4, 6, 8), meshes):
        config = dataclasses.replace(first, mesh=mesh, run_dir=str(tmp_path / f"from_{step}"))
        shutil.copytree(last.run_dir, config.run_dir)
        for later in range(step + 2, 11, 2):
            shutil.rmtree(Path(config.run_dir) / "checkpoints" / str(later))
        with jax.set_mesh(make_mesh(mesh)):
            with pytest.raises(ConfigError, match=r"mesh\."):
                train(config, jax.sharding.get_mesh())
            train(config, jax.sharding.get_mesh(), allow_config_change=True)
        found = read_records(Path(config.run_dir) / "metrics.jsonl")
        assert [(r["kind"], r["step"]) for r in found] == [(r["kind"], r["step"]) for r in expected]
        for a, b in zip(found, expected):
            assert a["loss"] == pytest.approx(b["loss"], rel=1e-4), (mesh, a["kind"], a["step"])
        last = config
    assert "sample" in capsys.readouterr().out


@pytest.mark.slow
def test_the_released_geometry_is_cut_into_twenty_four_stages():
    config = RunConfig(
        k3(), DataConfig(batch_size=64), MeshConfig(pipe=8, virtual=3), train=TrainConfig(accumulation=64)
    )
    trainer = PipelineTrainer(config, make_mesh(config.mesh), TOKEN_BYTES)
    assert trainer.describe()[0].startswith("pipeline    8 ranks × 3 stages: layers 0-3 | 4-7 | 8-11 | ")
    assert trainer.stages.bounds[-1] == (92, 93)
    sizes = [sum(leaf.size for leaf in jax.tree.leaves(part.params)) for part in trainer.abstract]
    assert sum(sizes) == 2_779_484_393_568
    assert sum(len(trainer.stages.moe_layers(rank)) for rank in range(8)) == 92
    hops = [(len(trainer.layout.sent(chunk)), len(trainer.layout.read(chunk))) for chunk in range(24)]
    assert tuple(map(sum, zip(*hops))) == (
        49,
        100,
    )  # blocks that travel, and would if every stage were sent all it reads
