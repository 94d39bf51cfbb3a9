"""A training step with images: every mesh takes the step of one device."""

from typing import Any

import jax
import numpy as np
import pytest
from micro import TOKEN_BYTES, micro_config, micro_model, random_batch, spread
from test_sharded_step import assert_same_step, leaves

from k3jax.config import ConfigError, ImagesConfig, MeshConfig, MoEConfig, RunConfig, VisionConfig
from k3jax.data.images import Item
from k3jax.sharding import make_mesh
from k3jax.train.batch import patch_rows, place_batch, rows_of
from k3jax.train.optimizer import make_optimizer
from k3jax.train.state import abstract_params, create_state
from k3jax.train.step import make_eval_step, make_train_step

MEDIA = 300
GRIDS = ((1, 4, 4), (1, 2, 6), (2, 2, 4), (1, 2, 2))
VISION = VisionConfig(
    hidden_size=16, num_layers=2, num_heads=2, head_dim=8, mlp_size=24, patch_size=2, position_grid=(4, 4)
)


def config_on(mesh: MeshConfig, **train: Any) -> RunConfig:
    model = micro_model(
        num_dense_layers=0,
        moe=MoEConfig(num_experts=8, experts_per_token=2, expert_size=16, latent_size=16, qb_bins=100),
        dtype="float64",
        param_dtype="float64",
        vision=VISION,
    )
    return micro_config(
        "none",
        "none",
        model=model,
        train={"remat": "layer"} | train,
        data={"batch_size": 8, "images": ImagesConfig(source="none", patches=32, share=0.25)},
        optimizer={"muon_ns_dtype": "float64"},
        mesh=mesh,
    )


def batch_with_images() -> dict[str, Any]:
    """`random_batch` with images in half of its rows: alone, two in a row, on the border of a shard of time."""
    batch, rng = random_batch(8), np.random.default_rng(7)
    batch["images"] = [[] for _ in range(8)]
    for row, places in {1: [(3, 0)], 4: [(0, 1), (9, 2)], 6: [(14, 0), (20, 3)], 7: [(1, 3)]}.items():
        for start, kind in places:
            t, h, w = GRIDS[kind]
            count = h * w // 4
            patches = rng.integers(0, 256, (t * h * w, 12), dtype=np.uint8)
            batch["images"][row].append(Item(patches, (t, h, w), (2 * w, 2 * h)))
            batch["tokens"][row, start : start + count] = MEDIA
            batch["segment_ids"][row, start : start + count] = batch["segment_ids"][row, start] or 1
            batch["loss_mask"][row, max(start - 1, 0) : start + count - 1] = False
    return batch


def take_step(config: RunConfig) -> tuple:
    mesh = jax.sharding.get_mesh()
    optimizer = make_optimizer(config.optimizer, abstract_params(config.model), config.train.steps)
    state = spread(create_state(config.model, optimizer.transform, mesh, 0, fsdp=config.mesh.fsdp))
    batch = place_batch(batch_with_images(), config.train.accumulation, mesh, patch_rows(config, mesh, MEDIA))
    assert rows_of(batch) > 0
    scores = jax.jit(make_eval_step(config, TOKEN_BYTES))(state.params, state.router_bias, batch)
    return state, *jax.jit(make_train_step(config, optimizer, TOKEN_BYTES))(state, batch), scores


@pytest.fixture(scope="module")
def single():
    with jax.enable_x64(True), jax.set_mesh(make_mesh(MeshConfig())):
        return jax.device_get(take_step(config_on(MeshConfig())))


CASES = {
    "data=8": (MeshConfig(data=8), {}),
    "context=4": (MeshConfig(context=4), {}),
    "accumulated": (MeshConfig(), {"accumulation": 4}),
    "tensor=2": (MeshConfig(tensor=2), {"remat": "none"}),
    "data=2, expert=2, context=2, fsdp": (MeshConfig(data=2, expert=2, context=2, fsdp=True), {"accumulation": 2}),
    "data=2, tensor=2, context=2": (MeshConfig(data=2, tensor=2, context=2), {}),
}
FAST = ("context=4",)


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in FAST else pytest.mark.slow) for n in CASES])
def test_every_mesh_takes_the_multimodal_step_of_one_device(x64, single, name):
    mesh, train = CASES[name]
    config = config_on(mesh, **train)
    with jax.set_mesh(make_mesh(config.mesh)):
        _, after, metrics, scores = take_step(config)
    assert_same_step((after, metrics), single[1:3], 1e-9)
    for key, value in single[3].items():
        np.testing.assert_allclose(scores[key], value, rtol=1e-9)


@pytest.mark.parametrize(
    ("vision", "mesh", "patches", "message"),
    [(None, MeshConfig(), 32, "needs a model with a tower"), (VISION, MeshConfig(context=4), 24, "multiple of 16")],
)
def test_images_that_a_run_cannot_have_are_refused(vision, mesh, patches, message):
    images = ImagesConfig(source="digits", patches=patches)
    with pytest.raises(ConfigError, match=message):
        micro_config("none", "none", model=micro_model(vision=vision), mesh=mesh, data={"images": images})


def test_the_tower_learns_from_the_loss_of_the_text(single):
    before, after = leaves(single[0].params), leaves(single[1].params)
    tower = [name for name in before if "vision" in name]
    assert len(tower) == 14
    assert all(np.any(before[name] != after[name]) for name in tower)


def test_a_batch_without_images_is_a_batch_of_text():
    with jax.set_mesh(make_mesh(MeshConfig())) as _:
        mesh = jax.sharding.get_mesh()
        config = config_on(MeshConfig())
        batch = random_batch(8) | {"images": [[] for _ in range(8)]}
        placed = place_batch(batch, 1, mesh, patch_rows(config, mesh, MEDIA))
    assert placed.keys() == {"tokens", "targets", "segment_ids", "loss_mask"}


def test_rows_of_patches_follow_the_images():
    with jax.set_mesh(make_mesh(MeshConfig(data=2))):
        mesh = jax.sharding.get_mesh()
        rows, batch = patch_rows(config_on(MeshConfig(data=2)), mesh, MEDIA), batch_with_images()
        assert rows is not None
        assert rows.choices == (2, 8)
        assert rows_of(place_batch(batch, 1, mesh, rows)) == 8  # 88 patches in rows of 32
        for row in (4, 6):
            batch["images"][row] = []
            batch["tokens"][row] = 0
        assert rows_of(place_batch(batch, 1, mesh, rows)) == 2
