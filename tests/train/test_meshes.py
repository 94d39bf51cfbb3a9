"""The sweep over meshes: one step of a model of 33 layers on eight devices equals that of one device."""

import dataclasses

import jax
import numpy as np
import pytest
from micro import TOKEN_BYTES, border_batch, micro_config, micro_model, spread
from test_sharded_step import assert_same_step, leaves

from k3jax.config import KDAConfig, MeshConfig, MLAConfig, MoEConfig, RunConfig
from k3jax.sharding import make_mesh
from k3jax.train.batch import place_batch
from k3jax.train.optimizer import make_optimizer
from k3jax.train.state import TrainState, abstract_params, create_state
from k3jax.train.step import make_train_step

AXES = [{axis: size} for axis in ("data", "expert", "context", "tensor") for size in (2, 4, 8)]
TOGETHER = [
    {"expert": 4, "context": 2},
    {"data": 2, "context": 4},
    {"data": 2, "tensor": 4},
    {"context": 4, "tensor": 2},
    {"expert": 2, "context": 2, "tensor": 2},
    {"data": 2, "expert": 2, "tensor": 2},
    {"data": 2, "context": 2, "tensor": 2, "fsdp": True},
    {"data": 2, "expert": 2, "context": 2, "fsdp": True},
]
HALF = [{"data": 8}, {"expert": 8}, {"context": 8}, {"tensor": 8}, *TOGETHER[4:6]]
"""Also in float32."""


def named(mesh: dict) -> str:
    return ", ".join(f"{axis}={size}" for axis, size in mesh.items())


def mesh_test(mesh: MeshConfig, dtype: str) -> RunConfig:
    """8 heads of both kinds and 16 experts, for eight devices to share; 33 layers in blocks of four, scanned."""
    heads = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
    model = micro_model(
        hidden_size=64,
        num_layers=33,
        mla_layers=tuple(range(3, 33, 4)),
        attn_res_block_size=4,
        kda=KDAConfig(num_heads=8, head_dim=16, chunk_size=16),
        mla=MLAConfig(num_heads=8, **heads),
        moe=MoEConfig(num_experts=16, experts_per_token=2, expert_size=16, latent_size=32, qb_bins=100),
        dtype=dtype,
        param_dtype=dtype,
    )
    return micro_config(
        "none",
        "none",
        model=model,
        train={"remat": "layer"},
        data={"batch_size": 8, "sequence_length": 64},
        optimizer={"muon_ns_dtype": dtype},
        mesh=mesh,
    )


def saturated(state: TrainState) -> TrainState:
    """Every third KDA head forgets all at once, every third nothing."""

    def one(path: tuple, x: jax.Array) -> jax.Array:
        if "dt_bias" not in jax.tree_util.keystr(path):
            return x
        by = np.array([0.0, 30.0, -30.0])[np.arange(x.shape[-2]) % 3][:, None]
        return jax.device_put((np.asarray(x) + by).astype(x.dtype), x.sharding)

    return dataclasses.replace(state, params=jax.tree_util.tree_map_with_path(one, state.params))


def take_step(config: RunConfig) -> tuple[TrainState, dict]:
    with jax.set_mesh(mesh := make_mesh(config.mesh)):
        optimizer = make_optimizer(config.optimizer, abstract_params(config.model), config.train.steps)
        state = create_state(config.model, optimizer.transform, mesh, 0, fsdp=config.mesh.fsdp)
        step = jax.jit(make_train_step(config, optimizer, TOKEN_BYTES))
        return jax.device_get(step(saturated(spread(state)), place_batch(border_batch(), 1, mesh)))


@pytest.fixture(scope="module")
def single():
    with jax.enable_x64(True):
        return take_step(mesh_test(MeshConfig(), "float64"))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [*AXES, *TOGETHER], ids=named)
def test_a_step_in_float64_is_that_of_one_device(x64, single, mesh):
    assert_same_step(take_step(mesh_test(MeshConfig(**mesh), "float64")), single, 1e-9)


@pytest.fixture(scope="module")
def single_float32():
    return take_step(mesh_test(MeshConfig(), "float32"))


def moments(state: TrainState) -> dict[str, np.ndarray]:
    """The gradients, as the first step's momentum holds them."""
    return {name: np.asarray(a, np.float64) for name, a in leaves(state.opt_state).items() if "count" not in name}


@pytest.mark.slow
@pytest.mark.parametrize("mesh", HALF, ids=named)
def test_a_step_in_float32_rounds_no_more_than_three_times_as_much(single, single_float32, mesh):
    exact, alone = moments(single[0]), moments(single_float32[0])
    for name, ours in moments(take_step(mesh_test(MeshConfig(**mesh), "float32"))[0]).items():
        error, allowed = (np.max(np.abs(a - exact[name])) for a in (ours, alone[name]))
        # a leaf that one device happens to round well is held against float32's own step
        step = np.finfo(np.float32).eps * np.max(np.abs(exact[name]))
        assert error <= 3 * max(allowed, step), (name, error, allowed)
