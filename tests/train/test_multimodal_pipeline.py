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

from k3jax.config import MeshConfig, RunConfig
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


def test_a_pipeline_takes_the_multimodal_step_of_one_device(x64):
    """Four micro-batches: one row of patches, none, two, one."""
    config = config_of(MeshConfig(pipe=2), 2, accumulation=4)
    with jax.set_mesh(make_mesh(config.mesh)):
        trainer = trainer_of(config)
        check(trainer, "mixed")
