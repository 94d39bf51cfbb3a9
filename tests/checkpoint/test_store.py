"""A checkpoint exists completely or not at all, and fits what it is loaded into or is refused by name."""

import contextlib
import dataclasses
import os
import resource
import shutil
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from k3jax.checkpoint import store as store_module
from k3jax.checkpoint.store import CheckpointError, CheckpointStore, RunRecord, from_paths, to_paths

RECORD = RunRecord(config={"a": {"b": 1}}, tokenizer={"name": "bytes"}, source={"bytes": 3}, data={"cursor": [1, 2]})


class Block(nnx.Module):
    def __init__(self, scale: float):
        self.weight = nnx.Param(jnp.full((4, 3), scale))
        self.norm = nnx.Param(jnp.ones(3))


class Toy(nnx.Module):
    def __init__(self, scale: float = 1.0):
        self.blocks = nnx.List([Block(scale), Block(2 * scale)])
        self.embed = nnx.Param(jnp.full((5, 4), scale))


@dataclasses.dataclass(frozen=True)
class Momentum:
    mu: dict
    count: jax.Array


jax.tree_util.register_dataclass(Momentum)


def abstract(tree):
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), tree)


def save(store: CheckpointStore, step: int, model, training=None) -> None:
    store.save(step, model=model, training={"step": jnp.int32(step)} if training is None else training, record=RECORD)


def assert_equal(a, b) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b)):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def test_paths_are_plain_names_and_round_trip():
    tree = {"params": Toy(), "opt": (Momentum({"w": jnp.ones(2)}, jnp.int32(3)), [None, jnp.zeros(1)])}
    paths = to_paths(tree)
    assert jax.tree.structure(paths["params"]) == jax.tree.structure(
        jax.tree.map(
            lambda x: x, {"blocks": {"0": {"norm": 0, "weight": 0}, "1": {"norm": 0, "weight": 0}}, "embed": 0}
        )
    )
    assert set(paths["opt"]) == {"0", "1"}
    assert set(paths["opt"]["0"]) == {"mu", "count"}
    assert_equal(from_paths(tree, paths), tree)


def test_saved_state_comes_back_bit_for_bit_with_its_record(tmp_path):
    model = {"params": Toy(0.1), "router_bias": jnp.arange(6.0).reshape(2, 3)}
    training = {"opt_state": Momentum({"w": jnp.array([1e-38, -0.0, jnp.inf])}, jnp.int32(7)), "step": jnp.int32(12)}
    store = CheckpointStore(tmp_path / "c")
    save(store, 12, model, training)
    store.close()

    store = CheckpointStore(tmp_path / "c", read_only=True)
    assert store.latest == 12
    assert store.read_record() == RECORD
    assert_equal(store.load("model", abstract(model)), model)
    assert_equal(store.load("training", abstract(training)), training)
    assert store.read_shapes("model")["params.blocks.0.weight"] == ((4, 3), "float32")
    store.close()


def test_restore_places_arrays_on_an_explicit_mesh(tmp_path):
    store = CheckpointStore(tmp_path / "c")
    save(store, 1, {"w": jnp.arange(32.0).reshape(16, 2)})
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        sharding = NamedSharding(mesh, PartitionSpec("data"))
        wanted = {"w": jax.ShapeDtypeStruct((16, 2), jnp.float32, sharding=sharding)}
        loaded = store.load("model", wanted)["w"]
        assert loaded.sharding == sharding
        assert str(jax.typeof(loaded)) == "float32[16@data,2]"
        save(store, 2, {"w": loaded})
    store.wait()
    np.testing.assert_array_equal(store.load("model", abstract({"w": loaded}), 2)["w"], np.arange(32.0).reshape(16, 2))
    store.close()


def test_a_save_is_not_disturbed_by_donating_the_arrays_at_once(tmp_path):
    increment = jax.jit(lambda x: x + 1, donate_argnums=0)
    store = CheckpointStore(tmp_path / "c", keep_last=9)
    x = jax.jit(lambda: jnp.zeros((500, 500)))()
    for step in range(4):
        save(store, step, {"x": x})
        for _ in range(3):
            x = increment(x)
    store.wait()
    for step in range(4):
        np.testing.assert_array_equal(store.load("model", abstract({"x": x}), step)["x"], 3 * step)
    store.close()


def test_another_models_checkpoint_is_refused_naming_the_arrays(tmp_path):
    store = CheckpointStore(tmp_path / "c")
    save(store, 1, {"a": jnp.ones((2, 3)), "b": jnp.ones(4)})
    store.wait()
    with pytest.raises(CheckpointError, match=r"a: float32\[2, 3\] stored, float32\[5, 3\] wanted") as error:
        store.load("model", abstract({"a": jnp.ones((5, 3)), "c": jnp.ones(4)}))
    assert "b: in the checkpoint only" in str(error.value)
    assert "c: not in the checkpoint" in str(error.value)
    wanted = abstract({"a": jnp.ones((2, 3), jnp.bfloat16), "b": jnp.ones(4)})
    with pytest.raises(CheckpointError, match="bfloat16"):
        store.load("model", wanted)
    assert store.load("model", wanted, cast=True)["a"].dtype == jnp.bfloat16
    store.close()


def test_missing_checkpoints_are_named(tmp_path):
    with pytest.raises(CheckpointError, match="does not exist"):
        CheckpointStore(tmp_path / "nothing", read_only=True)
    store = CheckpointStore(tmp_path / "c")
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        store.read_record()
    save(store, 3, {"a": jnp.ones(1)})
    with pytest.raises(CheckpointError, match=r"no checkpoint 4 in .*; has 3"):
        store.load("model", abstract({"a": jnp.ones(1)}), 4)
    store.close()


def test_a_damaged_checkpoint_is_named_with_the_way_out(tmp_path):
    store, model = CheckpointStore(tmp_path / "c"), {"a": jnp.arange(10_000.0)}
    for step in (1, 2):
        save(store, step, model)
    store.wait()
    way_out = r"c/2 cannot be read.*delete this directory to use another checkpoint \(there are 1\)"
    largest = max((f for f in (tmp_path / "c/2/model").rglob("*") if f.is_file()), key=lambda f: f.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)
    with pytest.raises(CheckpointError, match=way_out):
        store.load("model", abstract(model))
    store.close()
    record = tmp_path / "c/2/_CHECKPOINT_METADATA"
    record.write_text(record.read_text()[:100])
    store = CheckpointStore(tmp_path / "c")
    with pytest.raises(CheckpointError, match=way_out):
        store.read_record()
    shutil.rmtree(tmp_path / "c/2")
    store.close()
    store = CheckpointStore(tmp_path / "c")
    assert_equal(store.load("model", abstract(model)), model)
    store.close()


def test_a_save_that_does_not_fit_on_disk_is_one_message_and_leaves_the_checkpoint_before(tmp_path):
    store = CheckpointStore(tmp_path / "c")
    save(store, 1, {"a": jnp.ones(1)})
    store.wait()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        save(store, 2, {"a": jax.random.normal(jax.random.key(0), (20_000,))})
        with pytest.raises(CheckpointError, match="cannot save in .*too large"):
            store.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    with contextlib.suppress(CheckpointError):
        store.close()
    store = CheckpointStore(tmp_path / "c")
    assert store.steps == [1]
    store.close()


def test_the_newest_and_every_mth_are_kept(tmp_path):
    store = CheckpointStore(tmp_path / "c", keep_last=2, keep_every=4)
    for step in range(1, 11):
        save(store, step, {"a": jnp.ones(1)})
    store.wait()
    assert store.steps == [4, 8, 9, 10]
    store.close()
    assert sorted(int(p.name) for p in (tmp_path / "c").iterdir()) == [4, 8, 9, 10]


def test_saving_a_step_twice_keeps_the_first(tmp_path):
    store = CheckpointStore(tmp_path / "c")
    save(store, 1, {"a": jnp.ones(1)})
    save(store, 1, {"a": jnp.zeros(1)})
    store.wait()
    np.testing.assert_array_equal(store.load("model", abstract({"a": jnp.ones(1)}))["a"], 1)
    store.close()


def test_half_written_and_half_deleted_checkpoints_are_removed_on_opening(tmp_path):
    store = CheckpointStore(tmp_path / "c", keep_last=5)
    for step in (1, 2, 3):
        save(store, step, {"a": jnp.full(1, float(step))})
    store.close()
    # killed while writing 4: a temporary directory; killed while deleting 1: parts of a complete one
    shutil.copytree(tmp_path / "c" / "3", tmp_path / "c" / "4.orbax-checkpoint-tmp")
    (tmp_path / "c" / "4.orbax-checkpoint-tmp" / "_CHECKPOINT_METADATA").unlink()
    (tmp_path / "c" / "1" / "_CHECKPOINT_METADATA").unlink()
    shutil.rmtree(tmp_path / "c" / "1" / "training")

    store = CheckpointStore(tmp_path / "c", keep_last=2)
    assert store.steps == [2, 3]
    save(store, 4, {"a": jnp.full(1, 4.0)})
    store.wait()
    assert sorted(p.name for p in (tmp_path / "c").iterdir()) == ["3", "4"]
    assert store.steps == [3, 4]
    np.testing.assert_array_equal(store.load("model", abstract({"a": jnp.ones(1)}))["a"], 4)
    store.close()


KILLED_WHILE_SAVING = """
import os, signal, sys
import jax.numpy as jnp
from k3jax.checkpoint.store import CheckpointStore, RunRecord
store = CheckpointStore(sys.argv[1])
record = RunRecord({}, {}, {}, {})
store.save(1, model={"a": jnp.ones((500, 500))}, training={"b": jnp.ones(1)}, record=record)
store.wait()
store.save(2, model={"a": jnp.zeros((500, 500))}, training={"b": jnp.ones(1)}, record=record)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_process_killed_with_a_save_in_flight_leaves_the_checkpoint_before(tmp_path):
    process = subprocess.run([sys.executable, "-c", KILLED_WHILE_SAVING, str(tmp_path / "c")], env=os.environ)
    assert process.returncode == -signal.SIGKILL
    assert any("tmp" in p.name for p in (tmp_path / "c").iterdir()), "the save was over before the kill"
    reader = CheckpointStore(tmp_path / "c", read_only=True)
    assert reader.steps == [1]
    reader.close()
    store = CheckpointStore(tmp_path / "c")
    assert store.steps == [1]
    np.testing.assert_array_equal(store.load("model", abstract({"a": jnp.ones((500, 500))}))["a"], 1)
    save(store, 2, {"a": jnp.full((500, 500), 2.0)})
    store.close()
    assert sorted(p.name for p in (tmp_path / "c").iterdir()) == ["1", "2"]


def on(devices: int, spec: PartitionSpec) -> NamedSharding:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:devices]), ("data",), axis_types=(AxisType.Explicit,))
    return NamedSharding(mesh, spec)


def test_arrays_move_between_numbers_of_devices_and_dtypes_in_one_read(tmp_path):
    values = np.random.default_rng(0).standard_normal((16, 24)).astype(np.float32)
    places = [on(8, PartitionSpec("data")), on(4, PartitionSpec(None, "data")), on(1, PartitionSpec())]
    store = CheckpointStore(tmp_path / "c", keep_last=9)
    for step, source in enumerate(places):
        save(store, step, {"w": jax.device_put(values, source)})
        for target in places:
            for dtype in (jnp.float32, jnp.bfloat16):
                wanted = {"w": jax.ShapeDtypeStruct(values.shape, dtype, sharding=target)}
                loaded = store.load("model", wanted, step, cast=True)["w"]
                assert loaded.sharding == target
                np.testing.assert_array_equal(np.asarray(loaded), values.astype(dtype))
    store.close()


def test_one_item_is_restored_without_opening_the_others(tmp_path):
    store = CheckpointStore(tmp_path / "c")
    save(store, 1, {"a": jnp.arange(4.0)}, {"b": jnp.ones(3)})
    store.close()
    shutil.rmtree(tmp_path / "c" / "1" / "training")
    store = CheckpointStore(tmp_path / "c", read_only=True)
    np.testing.assert_array_equal(store.load("model", abstract({"a": jnp.ones(4)}))["a"], np.arange(4.0))
    store.close()


def test_shapes_and_record_are_read_without_the_arrays(tmp_path):
    store, model = CheckpointStore(tmp_path / "c"), {"a": jax.random.normal(jax.random.key(0), (600, 300))}
    save(store, 1, model)
    store.close()
    largest = max((f for f in (tmp_path / "c" / "1").rglob("*") if f.is_file()), key=lambda f: f.stat().st_size)
    data, third = bytearray(largest.read_bytes()), largest.stat().st_size // 3
    data[third : 2 * third] = bytes(third)
    largest.write_bytes(data)
    store = CheckpointStore(tmp_path / "c", read_only=True)
    assert store.read_shapes("model") == {"a": ((600, 300), "float32")}
    assert store.read_record() == RECORD
    with pytest.raises(CheckpointError, match="cannot be read"):
        store.load("model", abstract(model))
    store.close()


def test_a_second_directory_gets_every_checkpoint_and_stands_in_for_the_first(tmp_path):
    def opened(**options):
        return CheckpointStore(tmp_path / "near", copy=tmp_path / "far", keep_last=2, **options)

    store = opened()
    for step in (1, 2, 3):
        save(store, step, {"a": jnp.full(3, float(step))})
    store.close()
    for name in ("near", "far"):
        assert sorted(p.name for p in (tmp_path / name).iterdir()) == ["2", "3"]
    shutil.rmtree(tmp_path / "near" / "3")
    store = opened()
    assert store.steps == [2, 3]
    assert store.read_record(3) == RECORD
    assert store.read_shapes("model", 3) == {"a": ((3,), "float32")}
    np.testing.assert_array_equal(store.load("model", abstract({"a": jnp.ones(3)}))["a"], 3)
    save(store, 4, {"a": jnp.full(3, 4.0)})
    store.close()
    shutil.rmtree(tmp_path / "near")
    store = opened()
    np.testing.assert_array_equal(store.load("model", abstract({"a": jnp.ones(3)}))["a"], 4)
    with pytest.raises(CheckpointError, match=r"no checkpoint 9 in .*near; has none"):
        store.load("model", abstract({"a": jnp.ones(3)}), 9)
    store.close()


def test_what_is_read_at_a_time_is_bounded(tmp_path, monkeypatch):
    """Orbax asks for bytes before each shard that it reads; a shard larger than the bound is read alone."""
    from orbax.checkpoint._src.serialization import limits

    held, most, asked = 0, [0], []
    wait, release = limits.LimitInFlightBytes.wait_for_bytes, limits.LimitInFlightBytes.release_bytes

    async def counted_wait(self, size):
        nonlocal held
        asked.append((size, self.max_bytes))
        await wait(self, size)
        held += size
        most.append(held)

    async def counted_release(self, size):
        nonlocal held
        held -= size
        await release(self, size)

    monkeypatch.setattr(limits.LimitInFlightBytes, "wait_for_bytes", counted_wait)
    monkeypatch.setattr(limits.LimitInFlightBytes, "release_bytes", counted_release)
    monkeypatch.setattr(store_module, "RESTORE_BYTES", 200_000)
    model = {f"a{i}": jnp.full((100, 300), float(i)) for i in range(12)}  # 120,000 bytes each
    store = CheckpointStore(tmp_path / "c")
    save(store, 1, model)
    assert_equal(store.load("model", abstract(model)), model)
    assert len(asked) == 12
    assert max(most) == 120_000
    monkeypatch.setattr(store_module, "RESTORE_BYTES", 1000)
    assert_equal(store.load("model", abstract(model)), model)
    sharding = on(4, PartitionSpec("data"))
    wanted = {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for name, x in model.items()}
    save(store, 2, {name: jax.device_put(x, sharding) for name, x in model.items()})
    asked.clear()
    assert_equal(jax.device_get(store.load("model", wanted, 2)), jax.device_get(model))
    assert {size for size, _ in asked} == {30_000}
    assert {limit for _, limit in asked} == {30_001}
    store.close()


CYCLES = """
import gc, sys
import jax, jax.numpy as jnp
from k3jax.checkpoint.store import CheckpointStore, RunRecord

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

model = {f"w{i}": jax.random.normal(jax.random.key(i), (1024, 1024)) for i in range(16)}
place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
wanted = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), model)
store = CheckpointStore(sys.argv[1], copy=sys.argv[1] + "-copy")
for step in range(50):
    store.save(step, model=model, training={"step": jnp.int32(step)}, record=RunRecord({}, {}, {}, {}))
    model = store.load("model", wanted, step)
    gc.collect()
    print(resident(), flush=True)
store.close()
"""


@pytest.mark.slow
def test_fifty_saves_and_restores_leave_memory_flat(tmp_path):
    """The process grows by less than one checkpoint (64 MiB) from the second ten of fifty cycles to the last ten."""
    command = [sys.executable, "-c", CYCLES, str(tmp_path / "c")]
    done = subprocess.run(command, env=os.environ, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    sizes = [int(line) for line in done.stdout.split()]
    print("MiB after each cycle:", [size >> 20 for size in sizes])
    assert len(sizes) == 50
    assert np.median(sizes[40:]) - np.median(sizes[10:20]) < 64 << 20
