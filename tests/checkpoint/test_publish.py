"""A consumer serves whole versions that proved right, or the one before, whatever happens to others."""

import dataclasses
import json
import socket
import threading
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import micro

from k3jax.checkpoint import stream
from k3jax.checkpoint.publish import Directory, Follower, Publisher, Source, Stream
from k3jax.checkpoint.store import flat_paths
from k3jax.checkpoint.version import Manifest, PublicationError, PublishedWeights, checksum, snapshot
from k3jax.config import ConfigError, MeshConfig, MoEConfig, PublishConfig, RunConfig, TrainConfig
from k3jax.model.k3 import create
from k3jax.model.quantize import pack_experts, quantized
from k3jax.ops.mx import quantize
from k3jax.sharding import make_mesh, shardings

CONFIG = RunConfig(micro(num_layers=2, mla_layers=(1,)))
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


@lru_cache
def weights(version: int, config: RunConfig = CONFIG) -> PublishedWeights:
    model = create(config.model, seed=version)
    bias = jnp.full((config.model.num_moe_layers, config.model.moe.num_experts), 0.01 * version)
    return snapshot(model, bias, version=version, config=config, prompt=PROMPT)


def changed(published: PublishedWeights, **manifest) -> PublishedWeights:
    return dataclasses.replace(published, manifest=dataclasses.replace(published.manifest, **manifest))


def assert_serves(follower: Follower, version: int) -> None:
    """All of that version, and none of another."""
    served = follower.current
    assert served is not None
    assert served.version == version
    arrays = flat_paths({"params": served.model, "router_bias": served.router_bias})
    assert arrays.keys() == weights(version).arrays.keys()
    for path, value in arrays.items():
        np.testing.assert_array_equal(np.asarray(value), np.asarray(weights(version).arrays[path]), err_msg=path)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.uint8, jnp.int32])
def test_a_checksum_sees_every_bit_and_no_sharding(dtype):
    values = jax.random.normal(jax.random.key(0), (16, 6)).astype(dtype)
    mesh = make_mesh(MeshConfig(data=4, tensor=2))
    with jax.set_mesh(mesh):
        sums = [
            np.asarray(jax.jit(checksum)(jax.device_put(values, jax.sharding.NamedSharding(mesh, spec))))
            for spec in (jax.P(), jax.P("data"), jax.P("data", "tensor"), jax.P(None, ("tensor",)))
        ]
    for other in sums[1:]:
        np.testing.assert_array_equal(other, sums[0])
    raw = np.asarray(values)
    for flip in range(0, raw.nbytes * 8, 7):
        flipped = raw.copy()
        flipped.reshape(-1).view(np.uint8)[flip // 8] ^= 1 << flip % 8
        assert (np.asarray(jax.jit(checksum)(flipped))[0] != sums[0][0]).all()
    assert (np.asarray(checksum(values[::-1])) != sums[0]).all()
    assert (np.asarray(checksum(values.reshape(6, 16))) == sums[0]).all()


def test_a_snapshot_outlives_weights_that_are_donated():
    model, bias = create(CONFIG.model, seed=5), jnp.zeros((CONFIG.model.num_moe_layers, 8))
    taken = snapshot(model, bias, version=1, config=CONFIG, prompt=PROMPT)
    jax.block_until_ready(jax.jit(lambda m: jax.tree.map(lambda x: x * 2, m), donate_argnums=0)(model))
    Follower().take(taken)


def test_weights_go_from_mesh_to_mesh_in_one_process():
    train, serve = make_mesh(MeshConfig(data=2, expert=2, tensor=2, fsdp=True)), make_mesh(MeshConfig(expert=4))
    model = create(CONFIG.model, seed=1)
    with jax.set_mesh(train):
        placed = jax.device_put(model, shardings(model, train, at_rest=True))
        bias = jax.device_put(jnp.full((1, 8), 0.01), jax.sharding.NamedSharding(train, jax.P()))
        sharded = snapshot(placed, bias, version=1, config=CONFIG, prompt=PROMPT)
    follower = Follower(mesh=serve)
    follower.take(sharded)
    assert_serves(follower, 1)
    bank = follower.current.model.segments[0].runs[1].ffn.w1[...]
    assert bank.sharding.mesh.shape["expert"] == 4
    assert bank.sharding.spec[1] == ("expert",) or bank.sharding.spec[1] == "expert"
    assert sharded.manifest.tensors == weights(1).manifest.tensors


@pytest.fixture(params=["directory", "stream"])
def offer(request, tmp_path):
    """A publisher and a follower of it, whose reports are in `follower.said`."""
    if request.param == "directory":
        publisher = Publisher(tmp_path / "p", keep=2)
        source = Directory(tmp_path / "p")
    else:
        publisher = Publisher(None, address="127.0.0.1:0")
        source = Stream(publisher.address)
    follower = follow(source)
    yield publisher, follower
    publisher.close()
    source.close()


def follow(source: Source | None = None) -> Follower:
    said: list[str] = []
    follower = Follower(source, report=said.append)
    follower.said = said
    return follower


def put(publisher: Publisher, version: int, published=None) -> None:
    publisher.publish(published or weights(version))
    publisher.wait()


def test_a_follower_takes_each_newer_version_once(offer):
    publisher, follower = offer
    assert not follower.poll()
    assert follower.current is None
    put(publisher, 1)
    assert follower.poll()
    assert_serves(follower, 1)
    assert not follower.poll()
    for version in (2, 3, 4):
        put(publisher, version)
    assert follower.poll()
    assert_serves(follower, 4)
    assert not follower.poll()
    assert follower.said == ["nothing is published there yet"]


def test_the_directory_keeps_the_newest(tmp_path):
    publisher = Publisher(tmp_path / "p", keep=2)
    for version in (1, 2, 3):
        put(publisher, version)
    publisher.close()
    assert sorted(p.name for p in (tmp_path / "p").iterdir()) == ["2", "3"]


def test_versions_are_restored_on_another_mesh(offer):
    publisher, follower = offer
    put(publisher, 1)
    elsewhere = Follower(follower._source, mesh=make_mesh(MeshConfig(expert=4, tensor=2)))
    assert elsewhere.poll()
    assert_serves(elsewhere, 1)
    assert elsewhere.current.model.lm_head[...].sharding.mesh.shape["tensor"] == 2


def test_nobody_there_yet_is_said_once_and_waited_for(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for source in (Directory(tmp_path / "p"), Stream(f"127.0.0.1:{port}")):
        follower = follow(source)
        assert not follower.poll()
        assert not follower.poll()
        assert len(follower.said) == 1
    publisher = Publisher(tmp_path / "p", address=f"127.0.0.1:{port}")
    for source in (Directory(tmp_path / "p"), Stream(f"127.0.0.1:{port}")):  # a run's own directory has none either
        follower = follow(source)
        assert not follower.poll()
        assert follower.said == ["nothing is published there yet"]
    put(publisher, 1)
    for source in (Directory(tmp_path / "p"), Stream(f"127.0.0.1:{port}")):
        assert follow(source).poll()
        source.close()
    publisher.close()


@pytest.mark.parametrize("part", ["manifest", "array"])
def test_a_byte_that_changes_on_disk_is_refused_and_the_next_version_taken(tmp_path, part):
    publisher, follower = Publisher(tmp_path / "p", keep=3), follow(Directory(tmp_path / "p"))
    put(publisher, 1)
    assert follower.poll()
    put(publisher, 2)
    files = [f for f in (tmp_path / "p" / "2").rglob("*") if f.is_file()]
    file = max(files, key=lambda f: f.stat().st_size)
    if part == "manifest":
        file = tmp_path / "p" / "2" / "_CHECKPOINT_METADATA"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 16
    file.write_bytes(data)
    assert not follower.poll()
    assert "version 2 is not taken" in follower.said[0]
    assert_serves(follower, 1)
    late = follow(Directory(tmp_path / "p"))
    assert late.poll()  # falls back to what is whole
    assert_serves(late, 1)
    put(publisher, 3)
    assert follower.poll()
    assert_serves(follower, 3)
    publisher.close()


def test_a_byte_that_changes_on_the_way_is_refused_and_pulled_again(monkeypatch):
    publisher = Publisher(None, address="127.0.0.1:0")
    follower, real = follow(Stream(publisher.address)), stream._receive
    put(publisher, 1)

    def receive(source, leaves):
        arrays = real(source, leaves)
        if leaves:
            arrays[-1].reshape(-1).view(np.uint8)[-1] ^= 1
        return arrays

    with monkeypatch.context() as patch:
        patch.setattr(stream, "_receive", receive)
        assert not follower.poll()
    assert "wrong checksum of" in follower.said[0]
    assert follower.current is None
    assert follower.poll()
    assert_serves(follower, 1)
    publisher.close()


def test_a_publisher_that_dies_within_a_stream_costs_its_consumer_nothing(monkeypatch):
    publisher, real, sent = Publisher(None, address="127.0.0.1:0"), stream._bytes, []
    follower = follow(Stream(publisher.address))
    put(publisher, 1)
    assert follower.poll()
    put(publisher, 2)

    def dies(array):
        if threading.current_thread().name.startswith("k3jax.stream"):
            sent.append(array)
            if len(sent) == 20:
                raise OSError("killed")
        return real(array)

    with monkeypatch.context() as patch:
        patch.setattr(stream, "_bytes", dies)
        assert not follower.poll()
    assert len(sent) == 20
    assert "the stream ended early" in follower.said[0]
    assert_serves(follower, 1)
    assert follower.poll()
    assert_serves(follower, 2)
    publisher.close()


def test_consumers_that_die_or_talk_nonsense_cost_the_others_nothing():
    publisher = Publisher(None, address="127.0.0.1:0")
    put(publisher, 1)
    for request in (b'{"want": 1}\n', b"GET / HTTP/1.1\r\n\r\n", b"\0" * 5000, b"[]\n", b""):
        with socket.create_connection(stream._split(publisher.address)) as connection:
            connection.sendall(request)
            connection.shutdown(socket.SHUT_WR)
            connection.recv(1000)
    follower = follow(Stream(publisher.address))
    assert follower.poll()
    assert_serves(follower, 1)
    publisher.close()


def test_a_version_that_was_replaced_before_it_is_pulled_is_not_mixed(monkeypatch):
    publisher = Publisher(None, address="127.0.0.1:0")
    follower, real = follow(Stream(publisher.address)), stream._asked
    put(publisher, 1)

    def asked(address, want):
        if want == 1:
            put(publisher, 2)
        return real(address, want)

    monkeypatch.setattr(stream, "_asked", asked)
    assert not follower.poll()
    assert "version 1 is not on offer any more" in follower.said[0]
    assert follower.poll()
    assert_serves(follower, 2)
    publisher.close()


def test_no_more_than_two_buckets_are_held(monkeypatch):
    publisher = Publisher(None, address="127.0.0.1:0")
    put(publisher, 1)
    held, most, lock = 0, [0], threading.Lock()
    receive, placed = stream._receive, stream._placed

    def count(by):
        nonlocal held
        with lock:
            held += by
            most.append(held)

    def receive_counted(source, leaves):
        count(bool(leaves))
        return receive(source, leaves)

    def placed_counted(*args):
        out = placed(*args)
        count(-1)
        return out

    monkeypatch.setattr(stream, "BUCKET_BYTES", 4096)
    monkeypatch.setattr(stream, "_receive", receive_counted)
    monkeypatch.setattr(stream, "_placed", placed_counted)
    follower = follow(Stream(publisher.address))
    assert follower.poll()
    assert_serves(follower, 1)
    assert len(most) > 20
    assert max(most) == 2
    publisher.close()


def test_half_written_and_half_deleted_versions_are_not_there(tmp_path):
    publisher, follower = Publisher(tmp_path / "p", keep=3), follow(Directory(tmp_path / "p"))
    put(publisher, 1)
    put(publisher, 2)
    publisher.close()
    (tmp_path / "p" / "2").rename(tmp_path / "p" / "2.orbax-checkpoint-tmp")
    assert follower.poll()
    assert_serves(follower, 1)
    (tmp_path / "p" / "2.orbax-checkpoint-tmp").rename(tmp_path / "p" / "2")
    (tmp_path / "p" / "2" / "_CHECKPOINT_METADATA").unlink()
    assert not follower.poll()
    assert_serves(follower, 1)


def tensors(**changes) -> dict:
    """Those of version 1, with other facts of the router biases."""
    found = weights(1).manifest.tensors
    return found | {"router_bias": dataclasses.replace(found["router_bias"], **changes)}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda m: {"tensors": {"router_bias": m.tensors["router_bias"]}}, "params.embed: missing"),
        (lambda m: {"tensors": tensors() | {"more": m.tensors["router_bias"]}}, "more: unexpected"),
        (lambda m: {"tensors": tensors(shape=(8, 1))}, r"router_bias: float32\[8, 1\], wanted float32\[1, 8\]"),
        (lambda m: {"tensors": tensors(dtype="bfloat16")}, "router_bias: bfloat16"),
        (lambda m: {"tensors": tensors(checksum="0" * 16)}, r"wrong checksum of router_bias \(1 of"),
        (lambda m: {"log_probs": tuple(x - 0.01 for x in m.log_probs)}, "differ from the trainer's by 0.01"),
        (lambda m: {"log_probs": (float("nan"),) * 63}, "differ from the trainer's by nan"),
        (lambda m: {"prompt": (1,)}, "canary: 1 tokens"),
        (lambda m: {"config": m.config | {"trian": {}}}, "did you mean train"),
    ],
)
def test_what_is_not_as_its_manifest_says_is_refused(wrong, message):
    follower = follow()
    follower.take(weights(1))
    with pytest.raises(PublicationError, match=message):
        follower.take(changed(weights(1), version=2, **wrong(weights(1).manifest)))
    assert_serves(follower, 1)


def test_another_model_is_not_swapped_in():
    follower = follow()
    follower.take(weights(1))
    other = RunConfig(dataclasses.replace(CONFIG.model, situ_beta=3.0))
    with pytest.raises(PublicationError, match="another model"):
        follower.take(weights(2, other))
    assert_serves(follower, 1)


def test_weights_that_are_not_finite_are_not_published():
    model = jax.tree.map(lambda x: x * jnp.nan, create(CONFIG.model, seed=5))
    with pytest.raises(PublicationError, match="not finite"):
        snapshot(model, jnp.zeros((1, 8)), version=1, config=CONFIG, prompt=PROMPT)


@pytest.mark.parametrize("text", ["{}", "[]", '{"format": 2}', '{"format": 1, "tensors": 3}'])
def test_nonsense_is_no_manifest(text):
    with pytest.raises(PublicationError, match="manifest"):
        Manifest.from_json(json.loads(text))
    assert Manifest.from_json(json.loads(json.dumps(weights(1).manifest.to_json()))) == weights(1).manifest


def test_an_address_in_use_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError, match="cannot listen at"):
        Publisher(None, address=f"127.0.0.1:{taken.getsockname()[1]}")
    with pytest.raises(ConfigError, match="HOST:PORT"):
        TrainConfig(publish=PublishConfig(address="7000"))


def test_a_follower_in_the_background_swaps_whole_versions(tmp_path):
    publisher, follower = Publisher(tmp_path / "p"), follow(Directory(tmp_path / "p"))
    with follower.following(0.02):
        for version in (1, 2, 3):
            put(publisher, version)
            seen = 0
            while seen < version:
                served = follower.current
                if served is not None:
                    seen = served.version
                    assert float(served.router_bias[0, 0]) == pytest.approx(0.01 * seen)
    assert_serves(follower, 3)
    publisher.close()


QUANTIZED = RunConfig(
    micro(num_layers=2, mla_layers=(1,), moe=MoEConfig(8, 2, expert_size=32, latent_size=32, qb_bins=100)),
    train=TrainConfig(publish=PublishConfig(experts="mxfp4")),
)


def test_experts_are_quantised_on_the_way_and_served_as_they_were_checked(offer):
    publisher, follower = offer
    published = weights(1, QUANTIZED)
    model = create(QUANTIZED.model, seed=1)
    put(publisher, 1, published)
    train, serve = make_mesh(MeshConfig(expert=2, data=2)), make_mesh(MeshConfig(expert=4))
    with jax.set_mesh(train):
        placed = jax.device_put(model, shardings(model, train, at_rest=True))
        bias = jax.device_put(jnp.full((1, 8), 0.01), jax.sharding.NamedSharding(train, jax.P()))
        sharded = snapshot(placed, bias, version=1, config=QUANTIZED, prompt=PROMPT)
    assert sharded.manifest.tensors == published.manifest.tensors
    apart = Follower(mesh=serve)
    apart.take(sharded)
    assert follower.poll()
    packed = quantize(np.asarray(model.segments[0].runs[1].ffn.w1[...]), format="mxfp4", scale_rule="outlier", axis=-2)
    for served in (follower.current, apart.current):
        bank = served.model.segments[0].runs[1].ffn.w1.get_value()
        np.testing.assert_array_equal(np.asarray(bank.codes), packed[0])
        np.testing.assert_array_equal(np.asarray(bank.scales), packed[1])
        expected = flat_paths(pack_experts(model, "outlier"))
        for path, x in flat_paths(served.model).items():
            np.testing.assert_array_equal(np.asarray(x), np.asarray(expected[path]), err_msg=path)


def test_a_run_that_trains_quantised_experts_is_served_as_it_computes():
    for experts in ("plain", "mxfp4"):
        moe = dataclasses.replace(QUANTIZED.model.moe, qat="w4")
        config = dataclasses.replace(
            QUANTIZED,
            model=dataclasses.replace(QUANTIZED.model, moe=moe),
            train=TrainConfig(publish=PublishConfig(experts=experts)),
        )
        follower = follow()
        follower.take(weights(1, config))
        model = create(config.model, seed=1)
        tokens, bias = jnp.arange(16)[None], follower.current.router_bias
        forward = jax.jit(lambda model: model(tokens, router_bias=bias))  # noqa: B023 - used at once
        trained = forward(jax.jit(partial(quantized, config=config.model))(model))
        np.testing.assert_array_equal(np.asarray(forward(follower.current.model)), np.asarray(trained))


def test_experts_that_do_not_make_groups_are_refused_early():
    with pytest.raises(ConfigError, match="groups of 32 inputs, and the latent size is 16"):
        dataclasses.replace(CONFIG, train=QUANTIZED.train)
