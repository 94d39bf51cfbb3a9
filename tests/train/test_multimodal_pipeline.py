"""A step with images over a pipeline is the step of one device, wherever the tower runs."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest
from micro import TOKEN_BYTES, spread
from test_multimodal_step import MEDIA, batch_with_images, config_on
from test_sharded_step import assert_same_step

from k3jax.config import ImagesConfig, MeshConfig, RunConfig
from k3jax.sharding import make_mesh
from k3jax.train.batch import patch_rows, place_batch
from k3jax.train.optimizer import make_optimizer
from k3jax.train.pipeline import PipelineTrainer
from k3jax.train.state import abstract_params, create_state
from k3jax.train.step import make_eval_step, make_train_step


def config_of(mesh: MeshConfig, layers: int, **train: Any) -> RunConfig:
    config = config_on(mesh, **train)
    deep = dataclasses.replace(config.model, num_layers=layers, mla_layers=tuple(range(layers)))
    return dataclasses.replace(config, model=deep)


def keep_images(batch: dict[str, Any], rows: tuple[int, ...]) -> dict[str, Any]:
    """The batch with the images of these rows only."""
    for row in set(range(8)) - set(rows):
        batch["images"][row] = []
        batch["tokens"][row][batch["tokens"][row] == MEDIA] = 5
    return batch


BATCHES = {
    "mixed": (1, 4, 6, 7),  # micro-batches with many, few and no images
    "one": (7,),
    "none": (),
}


def batch_of(name: str) -> dict[str, Any]:
    return keep_images(batch_with_images(), BATCHES[name])


@functools.cache
def single(layers: int, name: str) -> tuple:
    """State before and after a step on one device, metrics, sums of an evaluation."""
    config = config_of(MeshConfig(), layers)
    with jax.enable_x64(True), jax.set_mesh(make_mesh(MeshConfig())):
        mesh = jax.sharding.get_mesh()
        optimizer = make_optimizer(config.optimizer, abstract_params(config.model), config.train.steps)
        state = spread(create_state(config.model, optimizer.transform, mesh, 0))
        batch = place_batch(batch_of(name), 1, mesh, patch_rows(config, mesh, MEDIA))
        after, metrics = jax.jit(make_train_step(config, optimizer, TOKEN_BYTES))(state, batch)
        scores = jax.jit(make_eval_step(config, TOKEN_BYTES))(state.params, state.router_bias, batch)
        return jax.device_get((state, after, metrics, scores))


def trainer_of(config: RunConfig) -> PipelineTrainer:
    mesh = jax.sharding.get_mesh()
    trainer = PipelineTrainer(config, mesh, TOKEN_BYTES, patch_rows(config, mesh, MEDIA))
    trainer.compile()
    return trainer


def check(trainer: PipelineTrainer, name: str) -> None:
    before, after, metrics, scores = single(trainer.config.model.num_layers, name)
    states, batch = trainer.parts(before), trainer.place(batch_of(name))
    found = trainer.evaluate(states, batch)
    for key, value in scores.items():
        np.testing.assert_allclose(found[key], value, rtol=1e-9, err_msg=key)
    states, found = trainer.step(states, batch)
    assert found.keys() == metrics.keys()
    assert_same_step((trainer.whole(states, after), found), (after, metrics), 1e-9)
    for part, like in zip(states, trainer.abstract, strict=True):
        for a, b in zip(jax.tree.leaves(part), jax.tree.leaves(like), strict=True):
            assert a.sharding.is_equivalent_to(b.sharding, a.ndim)


def programs(trainer: PipelineTrainer) -> list[set[str]]:
    """Names of the programs of chunk 0 and of every tower."""
    assert trainer.towers is not None
    return [set(trainer.chunks[0].programs), *(set(tower.programs) for tower in trainer.towers.ranks)]


@pytest.mark.slow  # two minutes from a cold cache; text on pipelines is in every run
def test_a_pipeline_takes_the_multimodal_step_of_one_device(x64):
    """Four micro-batches, the second one of text."""
    config = config_of(MeshConfig(pipe=2), 2, accumulation=4)
    with jax.set_mesh(make_mesh(config.mesh)):
        trainer = trainer_of(config)
        check(trainer, "mixed")
    homes = [[m for m, part in enumerate(batch) if "patches" in part] for batch in trainer.place(batch_of("mixed"))]
    assert homes == [[0, 3], [2]]
    assert "the tower runs on ranks 0 to 1" in trainer.describe()[1]


CASES: dict[str, tuple[MeshConfig, int, dict[str, Any]]] = {
    "pipe=2, data=2, fsdp": (MeshConfig(pipe=2, data=2, fsdp=True), 2, {"accumulation": 4}),
    "pipe=2, context=2": (MeshConfig(pipe=2, context=2), 2, {"accumulation": 2}),
    "pipe=4": (MeshConfig(pipe=4), 4, {"accumulation": 8, "remat": "none"}),
    "pipe=2, virtual=2": (MeshConfig(pipe=2, virtual=2), 4, {"accumulation": 4}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_every_pipeline_takes_the_multimodal_step_of_one_device(x64, name):
    mesh, layers, train = CASES[name]
    config = config_of(mesh, layers, **train)
    with jax.set_mesh(make_mesh(mesh)):
        check(trainer_of(config), "mixed")


@pytest.mark.slow
def test_rows_of_patches_are_compiled_for_when_they_occur(x64):
    config = config_of(MeshConfig(pipe=2), 2, accumulation=4)
    images = dataclasses.replace(config.data.images, patches=16)
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, images=images))
    passes = {"forward/1", "backward/1"}
    expected = [{"zeros", "forward", "backward"} | passes, {"zeros", "add"} | passes, {"zeros"} | passes]
    with jax.set_mesh(make_mesh(config.mesh)):
        trainer = trainer_of(config)
        for name in ("none", "one"):
            check(trainer, name)
            assert programs(trainer) == expected
        check(trainer, "mixed")  # 16, 0, 28 and 24 patches
    assert programs(trainer) == [names | {"forward/2", "backward/2"} for names in expected]
    assert [rank["tower"] > 0 for rank in trainer.memory()] == [True, True]


@pytest.mark.slow
def test_a_run_of_text_has_no_program_for_images(x64):
    config = config_of(MeshConfig(pipe=2), 2, accumulation=4)
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, images=ImagesConfig()))
    with jax.set_mesh(make_mesh(config.mesh)):
        mesh = jax.sharding.get_mesh()
        trainer = PipelineTrainer(config, mesh, TOKEN_BYTES, patch_rows(config, mesh, MEDIA))
        lowered = [set(chunk.lower()) for chunk in trainer.chunks]
    assert trainer.towers is None
    assert trainer.passes == trainer.chunks
    assert lowered == [{"zeros", "backward", "forward"}, {"zeros", "backward", "score"}]
