"""Every mesh takes the step of one device, from state that lies where it should."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import relmax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from micro import TOKEN_BYTES, micro_config, micro_model, random_batch, spread

from k3jax.checkpoint.store import CheckpointStore, RunRecord, to_paths
from k3jax.config import ConfigError, DataConfig, KDAConfig, MeshConfig, MoEConfig, RunConfig, k3
from k3jax.sharding import AXES, make_mesh
from k3jax.train.batch import place_batch
from k3jax.train.optimizer import make_optimizer
from k3jax.train.placement import placement_lines, placements
from k3jax.train.state import (
    TrainState,
    abstract_params,
    abstract_state,
    check_host_memory,
    create_state,
    model_part,
    training_part,
)
from k3jax.train.step import make_train_step

CASES = {  # mesh, fields of `TrainConfig`
    "data=8": (MeshConfig(data=8), {}),
    "data=8, fsdp": (MeshConfig(data=8, fsdp=True), {"remat": "none"}),
    "data=8, fsdp, unrolled": (MeshConfig(data=8, fsdp=True), {"remat": "products", "unroll": True}),
    "data=4": (MeshConfig(data=4), {"remat": "sublayer"}),
    "data=4, fsdp, accumulated": (MeshConfig(data=4, fsdp=True), {"remat": "block", "accumulation": 2}),
    "data=2, expert=4, fsdp": (MeshConfig(data=2, expert=4, fsdp=True), {}),
    "context=4": (MeshConfig(context=4), {}),
    "tensor=2": (MeshConfig(tensor=2), {}),
    "expert=2, context=2, tensor=2": (MeshConfig(expert=2, context=2, tensor=2), {}),
    "data=2, context=2, tensor=2, fsdp": (MeshConfig(data=2, context=2, tensor=2, fsdp=True), {"accumulation": 2}),
    "data=4, offloaded": (
        MeshConfig(data=4),
        {"remat": "products", "remat_policy": {"kda": "offload", "operand": "offload", "experts": "recompute"}},
    ),
}
FAST = ("data=8", "data=2, expert=4, fsdp", "context=4", "tensor=2", "expert=2, context=2, tensor=2")


def config_on(mesh: MeshConfig, train: dict[str, Any] | None = None) -> RunConfig:
    """Two KDA layers in a loop and an MLA layer; experts and KDA heads that eight devices can hold whole, and two MLA
    heads that have to be cut elsewhere."""
    model = micro_model(
        num_layers=3,
        mla_layers=(2,),
        num_dense_layers=0,
        kda=KDAConfig(num_heads=8, head_dim=16, chunk_size=16),
        moe=MoEConfig(num_experts=8, experts_per_token=2, expert_size=16, latent_size=16, qb_bins=100),
        dtype="float64",
        param_dtype="float64",
    )
    return micro_config(
        "none",
        "none",
        model=model,
        train={"remat": "layer"} | (train or {}),
        data={"batch_size": 8},
        optimizer={"muon_ns_dtype": "float64"},
        mesh=mesh,
    )


def take_step(config: RunConfig) -> tuple[str, TrainState, TrainState, dict[str, jax.Array]]:
    """One step of `random_batch` on a mesh that is set: compiled program, states before and after, metrics."""
    mesh = jax.sharding.get_mesh()
    optimizer = make_optimizer(config.optimizer, abstract_params(config.model), config.train.steps)
    state = spread(create_state(config.model, optimizer.transform, mesh, 0, fsdp=config.mesh.fsdp))
    batch = place_batch(random_batch(config.data.batch_size), config.train.accumulation, mesh)
    step = jax.jit(make_train_step(config, optimizer, TOKEN_BYTES)).lower(state, batch).compile()
    return step.as_text(), state, *step(state, batch)


def leaves(tree) -> dict[str, np.ndarray]:
    flat = jax.tree_util.tree_leaves_with_path(to_paths(tree))
    return {jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf) for path, leaf in flat}


def assert_same_step(actual: tuple, expected: tuple, tolerance: float) -> None:
    """States and metrics. The first step's momentum and first moments are the gradients up to a constant, so every one
    of those is compared too."""
    (state, metrics), (other, other_metrics) = actual, expected
    ours, theirs = leaves(state), leaves(other)
    assert ours.keys() == theirs.keys()
    errors = {}
    for name, value in theirs.items():
        experts = name.split("/")[-1] in ("w1", "w2", "w3")  # one expert may be wrong where the largest is right
        pairs = [(ours[name][:, e], value[:, e]) for e in range(value.shape[1])] if experts else [(ours[name], value)]
        errors[name] = max(relmax(a, b) for a, b in pairs)
    assert max(errors.values()) <= tolerance, sorted(errors.items(), key=lambda item: -item[1])[:5]
    for name, value in other_metrics.items():
        rtol = max(tolerance, 1e-6) if value.dtype == np.float32 else tolerance
        np.testing.assert_allclose(metrics[name], value, rtol=rtol, err_msg=name)


@pytest.fixture(scope="module")
def single():
    with jax.enable_x64(True), jax.set_mesh(make_mesh(MeshConfig())):
        return jax.device_get(take_step(config_on(MeshConfig())))


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in FAST else pytest.mark.slow) for n in CASES])
def test_every_mesh_takes_the_step_of_one_device(x64, single, name):
    config = config_on(*CASES[name])
    with jax.set_mesh(make_mesh(config.mesh)):
        program, before, after, metrics = take_step(config)
    for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim)
    for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(single[1]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-14, atol=1e-15)  # born alike whatever the mesh
    assert_same_step((after, metrics), single[2:], 1e-9)
    if config.mesh.fsdp:  # the two layers of the loop gather their experts one after the other
        gathers = re.findall(r"= f64(\[[\d,]+\])\S* all-gather\(", program)
        assert "[8,16,16]" in gathers
        assert config.train.unroll or "[2,8,16,16]" not in gathers


def abstract_on(mesh: MeshConfig) -> TrainState:
    config = config_on(mesh)
    optimizer = make_optimizer(config.optimizer, abstract_params(config.model), config.train.steps)
    return abstract_state(config.model, optimizer.transform, jax.sharding.get_mesh(), fsdp=mesh.fsdp)


@pytest.mark.parametrize(
    ("saved", "restored"),
    [
        (MeshConfig(data=8, fsdp=True), MeshConfig(data=2, expert=4)),
        (MeshConfig(data=4), MeshConfig(data=8, fsdp=True)),
        (MeshConfig(data=8, fsdp=True), MeshConfig()),
        (MeshConfig(), MeshConfig(data=4, fsdp=True)),
    ],
    ids=["fsdp to zero-1", "zero-1 to fsdp", "fsdp to one device", "one device to fsdp"],
)
def test_a_checkpoint_of_one_mesh_restores_on_another(x64, tmp_path, saved, restored):
    rng = np.random.default_rng(0)
    with jax.set_mesh(make_mesh(saved)):
        state = jax.tree.map(
            lambda a: jax.device_put(rng.integers(0, 1000, a.shape).astype(a.dtype), a.sharding), abstract_on(saved)
        )
        store = CheckpointStore(tmp_path)
        store.save(1, model=model_part(state), training=training_part(state), record=RunRecord({}, {}, {}, {}))
        store.wait()
    with jax.set_mesh(make_mesh(restored)):
        like = abstract_on(restored)
        parts = (("model", model_part), ("training", training_part))
        for wanted, found, original in (
            (part(like), store.load(item, part(like), 1), part(state)) for item, part in parts
        ):
            for a, b, c in zip(*map(jax.tree.leaves, (wanted, found, original)), strict=True):
                assert a.sharding == b.sharding
                np.testing.assert_array_equal(b, c)
    store.close()


def test_state_is_cut_over_the_devices_and_the_table_says_how(x64):
    rows = {}
    for name in ("data=8", "data=8, fsdp"):
        mesh = CASES[name][0]
        with jax.set_mesh(make_mesh(mesh)):
            rows[name] = {(row.tensor, row.part): row for row in placements(abstract_on(mesh))}
    whole, cut = rows["data=8"], rows["data=8, fsdp"]
    bank, heads, lora = (
        f"segments/{name}" for name in ("0/runs/0/ffn/w1", "0/runs/0/mixer/q_proj", "1/runs/0/mixer/q_b")
    )
    for tensor, axes, spec in (
        (bank, ("layers", "expert", "latent", "expert_mlp"), P(None, ("data",), None, None)),
        (heads, ("layers", "embed", "heads", "kda_key"), P(None, None, ("data",), None)),
        (lora, ("layers", "lora", "heads", "qk"), P(None, ("data",), None, None)),  # two heads
    ):
        assert whole[tensor, ""].spec == P(*(None for _ in axes))
        assert cut[tensor, ""].axes == cut[tensor, "trace"].axes == axes
        assert cut[tensor, ""].spec == cut[tensor, "trace"].spec == whole[tensor, "trace"].spec == spec
        assert cut[tensor, ""].bytes_per_device * 8 == cut[tensor, ""].bytes
    for row in [*cut.values(), *(row for row in whole.values() if row.kind == "optimizer")]:
        if row.kind != "other":
            assert row.bytes_per_device * 8 == row.bytes or all(n % 8 for n in row.shape), row
    lines = placement_lines(list(cut.values()))
    (line,) = (line for line in lines if line.startswith(bank + " "))
    assert line.split() == [bank, "2×8×16×16", "layers", "expert", "latent", "expert_mlp"] + [
        *("(-,", "data,", "-,", "-)", f"{8 * 2 * 16 * 16:,}"),
        *("trace", "(-,", "data,", "-,", "-)", f"{8 * 2 * 16 * 16:,}"),
    ]
    total = sum(row.bytes_per_device for row in cut.values())
    assert lines[-1].split() == ["total", f"{total:,}", "bytes", "a", "device", "of"] + [
        f"{sum(row.bytes for row in cut.values()):,}"
    ]


def test_a_mesh_that_cannot_be_honoured_is_refused_with_what_is_legal():
    for mesh, message in (
        (MeshConfig(tensor=8), r"its axis 'heads' of 2 cannot be cut over mesh axis tensor = 8; legal are 1, 2"),
        (MeshConfig(expert=8), r"ffn/w1 \[1, 4, 16, 16\]: its axis 'expert' of 4 .* expert = 8; legal are 1, 2, 4"),
    ):
        config = micro_config("none", "none", data={"batch_size": 8})
        optimizer = make_optimizer(config.optimizer, abstract_params(config.model), 1)
        with jax.set_mesh(make_mesh(mesh)), pytest.raises(ConfigError, match=message):
            abstract_state(config.model, optimizer.transform, jax.sharding.get_mesh())
    for mesh, message in (
        (MeshConfig(context=3), "32 must be a multiple of mesh context × tensor = 3 × 1"),
        (MeshConfig(context=16), "context 16 leaves 2 tokens of 32 .* looks 3 back; at most 10 shards"),
    ):
        with pytest.raises(ConfigError, match=message):
            micro_config("none", "none", mesh=mesh)
    config = micro_config("none", "none", data={"batch_size": 8})  # four experts
    optimizer = make_optimizer(config.optimizer, abstract_params(config.model), 1)
    with jax.set_mesh(make_mesh(MeshConfig(data=2, expert=4))):
        mesh = jax.sharding.get_mesh()
        state = abstract_state(config.model, optimizer.transform, mesh)
        (row,) = (r for r in placements(state) if (r.tensor, r.part) == ("segments/0/runs/1/ffn/w1", "trace"))
        assert row.spec == P(None, "expert", None, "data")  # the next axis in the table
        with pytest.raises(
            ConfigError,
            match=r"ffn/w1 \[1, 4, 16, 16\]: its axis 'expert' of 4 .*expert 4 × data 2 = 8.* in 1, 2, 4, or",
        ):
            abstract_state(config.model, optimizer.transform, mesh, fsdp=True)


def test_the_released_geometry_is_laid_out_without_devices():
    mesh = jax.sharding.AbstractMesh((1, 2, 64, 1, 1), AXES, axis_types=(AxisType.Explicit,) * len(AXES))
    config = RunConfig(k3(), DataConfig(batch_size=128))
    with jax.sharding.use_abstract_mesh(mesh):
        optimizer = make_optimizer(config.optimizer, abstract_params(config.model), 1)
        rows = placements(abstract_state(config.model, optimizer.transform, mesh, fsdp=True))
    parameters = [row for row in rows if row.kind == "parameter"]
    assert sum(row.bytes for row in parameters) == 4 * 2_779_484_393_568
    whole = {row.tensor.split("/")[-1] for row in parameters if row.bytes_per_device == row.bytes}
    assert whole == {"A_log"}  # 96 numbers
    assert sum(row.bytes_per_device for row in parameters) < 1.001 * 4 * 2_779_484_393_568 / 128


@pytest.mark.parametrize(
    "mesh", [MeshConfig(data=4, fsdp=True), pytest.param(MeshConfig(), marks=pytest.mark.slow)], ids=["fsdp", "one"]
)
def test_optimizer_state_in_host_memory_takes_the_same_steps_bit_for_bit(tmp_path, mesh):
    """Also from a checkpoint, and over a step that is dropped."""

    def three_steps(offload: bool) -> tuple[TrainState, TrainState]:
        config = micro_config(
            "none",
            "none",
            model=micro_model(num_layers=1, mla_layers=(0,), num_dense_layers=0),
            optimizer={"offload": offload},
            mesh=mesh,
        )
        with jax.set_mesh(make_mesh(mesh)):
            here = jax.sharding.get_mesh()
            optimizer = make_optimizer(config.optimizer, abstract_params(config.model), 6)
            place = {"fsdp": mesh.fsdp, "offload": offload}
            like = abstract_state(config.model, optimizer.transform, here, **place)
            state = create_state(config.model, optimizer.transform, here, 0, **place)
            batch = place_batch(random_batch(config.data.batch_size), 1, here)
            step = (
                jax.jit(make_train_step(config, optimizer, TOKEN_BYTES), donate_argnums=0).lower(like, batch).compile()
            )
            state, metrics = step(state, batch)
            assert metrics["finite"]
            store = CheckpointStore(tmp_path / str(offload))
            store.save(1, model=model_part(state), training=training_part(state), record=RunRecord({}, {}, {}, {}))
            restored = store.load("training", training_part(like), 1)
            spoiled = dataclasses.replace(state, **restored, params=jax.tree.map(lambda x: x * jnp.nan, state.params))
            kept, metrics = step(spoiled, batch)
            assert not metrics["finite"]
            after, _ = step(dataclasses.replace(kept, **store.load("model", model_part(like), 1)), batch)
            store.close()
        return like, after

    (like, found), (_, expected) = three_steps(True), three_steps(False)
    for wanted, leaf in zip(jax.tree.leaves(like), jax.tree.leaves(found), strict=True):
        assert leaf.sharding.memory_kind == wanted.sharding.memory_kind
    kinds = {leaf.ndim > 0: leaf.sharding.memory_kind for leaf in jax.tree.leaves(found.opt_state)}
    assert kinds == {True: "pinned_host", False: "device"}
    assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(found.params)} == {"device"}
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)
    rows = placements(like)
    assert placement_lines(rows)[-2].startswith("on the host")
    assert all(row.on_host == (row.kind == "optimizer") for row in rows)


class NoHostMemory:
    """A mesh of devices that have one kind of memory."""

    platform, device_kind = "cpu", "cpu"
    local_devices = property(lambda self: [self])

    def addressable_memories(self):
        return [type("Memory", (), {"kind": "device"})]


def test_offloading_is_refused_where_there_is_no_pinned_host_memory():
    config = micro_config(
        "none",
        "none",
        optimizer={"offload": True},
        train={"remat": "layer", "remat_policy": {"kda": "offload", "experts": "fp8"}},
    )
    with jax.set_mesh(make_mesh(MeshConfig())):
        check_host_memory(config, jax.sharding.get_mesh())
    with pytest.raises(ConfigError, match=r"remat_policy.kda, optimizer.offload needs pinned .*; it has device"):
        check_host_memory(config, NoHostMemory())
    check_host_memory(micro_config("none", "none"), NoHostMemory())
