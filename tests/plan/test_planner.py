"""The planner: sizes that are published, memory that was measured, traffic by hand, meshes that are refused."""

import dataclasses
import json
import math
import time

import jax
import pytest
from jax.sharding import AxisType
from micro import micro_config, micro_model

from k3jax.config import ConfigError, DataConfig, ImagesConfig, MeshConfig, RunConfig, TrainConfig, k3
from k3jax.plan import plan, predict, search, sizes
from k3jax.plan.__main__ import main, parse_mesh
from k3jax.plan.chips import chip, load_chips
from k3jax.plan.layout import Work, leaves, muon_blocks, refusals, stages, units
from k3jax.plan.memory import in_flight
from k3jax.plan.roofline import group_ranks
from k3jax.plan.traffic import rows_between
from k3jax.sharding import AXES
from k3jax.train import flops
from k3jax.train.config_file import load_config
from k3jax.train.optimizer import make_optimizer
from k3jax.train.placement import placements
from k3jax.train.state import abstract_params, abstract_state

GIB = 2**30


def k3_config(batch: int = 16_384, micro_batches: int = 32, **train) -> RunConfig:
    config = load_config("configs/k3.py")
    return dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, batch_size=batch),
        train=dataclasses.replace(config.train, accumulation=micro_batches, **train),
    )


def proxy_config(batch: int = 4, **train) -> RunConfig:
    config = load_config("configs/proxy.py")
    data = dataclasses.replace(config.data, batch_size=batch)
    return dataclasses.replace(config, data=data, train=dataclasses.replace(config.train, **train))


def test_sizes_of_the_release_are_reproduced():
    found = sizes(k3(), 8192)
    exact = {
        "layers, KDA": 69,
        "layers, MLA": 24,
        "parameters": 2_779_484_393_568,
        "parameters, routed experts": 2_722_740_830_208,
        "bytes, published checkpoint with vision": 1_560_860_324_864,
        "AttnRes sources of the last mix": 9,
        "bytes, MLA cache of a token in bfloat16": 27_648,
    }
    assert {name: found[name] for name in exact} == exact
    stated = {  # three or four digits
        "parameters, elsewhere": 56.7e9,
        "parameters, active for a token (without the embedding)": 104.2e9,
        "parameters, one KDA layer's mixer": 443.7e6,
        "parameters, one MLA layer's mixer": 232.2e6,
        "parameters, one routed expert": 33.03e6,
        "bytes, weights in bfloat16": 5.56e12,
        "bytes, float32 masters and momentum": 22.2e12,
        "bytes, KDA state of a sequence in float32": 434e6,
        "bytes, KDA state of a sequence in bfloat16": 217e6,
        "bytes, convolution state of a sequence in bfloat16": 15.3e6,
        "bytes, one AttnRes block of 64k tokens in bfloat16": 0.94e9,
        "FLOPs, a token, forward and backward": 6 * 104.19e9 + 24 * 6 * 96 * (192 + 128) * 8192 / 2 + 2.8e9,
    }
    for name, value in stated.items():
        assert found[name] == pytest.approx(value, rel=3e-3), name


@pytest.mark.parametrize(
    ("train", "batch", "gib"),
    [
        ({}, 4, 38.2),  # measured on an H200
        ({}, 8, 50.8),  # compiled for one, like the next ones
        ({"remat": "none", "unroll": True}, 4, 39.8),
        ({"remat": "products", "unroll": True}, 4, 32.9),
        ({"remat": "block"}, 4, 39.7),
    ],
)
def test_memory_of_the_proxy_is_within_15_percent(train, batch, gib):
    found = {
        row["kind"]: row["gib"] for row in predict(proxy_config(batch, **({"remat": "layer", "unroll": False} | train)))
    }
    assert found["arguments"] == pytest.approx(13.36, abs=0.01)
    assert found["peak"] == pytest.approx(gib, rel=0.15)


@pytest.mark.parametrize(("fsdp", "arguments", "gib"), [(False, 9.93, 36.8), (True, 6.68, 27.8)])
def test_memory_of_the_proxy_on_two_devices_is_within_15_percent(fsdp, arguments, gib):
    found = {
        row["kind"]: row["gib"]
        for row in predict(proxy_config(8, remat="layer", unroll=False), MeshConfig(data=2, fsdp=fsdp))
    }
    assert found["arguments"] == pytest.approx(arguments, abs=0.01)
    assert found["peak"] == pytest.approx(gib, rel=0.15)  # compiled for two H200s


def test_operations_are_those_of_mfu():
    result = plan(k3_config(), MeshConfig(pipe=8, data=16, expert=32))
    model, tokens = result.config.model, 16_384 * 8192
    assert result.flops_per_token == flops.flops_per_token(model, 8192)
    assert result.flops_per_device == result.flops_per_token * tokens / 4096
    assert result.mfu == pytest.approx(
        flops.mfu(tokens / result.time.predicted, result.flops_per_token, flops.Peak(4096 * 989.4e12, ""))
    )


def test_newton_schulz_takes_half_of_symmetric_products_where_the_kernel_runs():
    config = proxy_config()

    def flops_on(chip, **optimizer):
        changed = dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, **optimizer))
        return plan(changed, chip=chip).newton_schulz_flops

    full = flops_on("B200")
    assert full == pytest.approx(40e12, rel=0.02)
    assert full == flops_on("H200", muon_ns_implementation="xla") == flops_on("H200", muon_ns_dtype="float32")
    expected = 0.0
    for blocks in muon_blocks(leaves(config), config.mesh, stages(config.model, 1)[0]):
        rows, columns = sorted((blocks.rows, blocks.columns))
        tiles = rows // 128 * (rows // 128 + 1) // 2
        taken = rows % 128 == columns % 128 == 0 and rows >= 256
        one = 2 * tiles * 128**2 * (rows + columns) + 2 * rows**2 * columns if taken else 6 * rows**2 * columns
        expected += 5 * blocks.count * one
    assert flops_on("H200") == expected == pytest.approx(0.72 * full, rel=0.03)  # 6 × 6 tiles: 21 of 36
    assert (
        plan(config, chip="H200").time.optimizer
        < plan(config, chip=dataclasses.replace(chip("H200"), compute_capability="")).time.optimizer
    )


@pytest.mark.parametrize(
    ("mesh", "share"), [(MeshConfig(), 1), (MeshConfig(expert=4), 4), (MeshConfig(data=2, expert=2, fsdp=True), 4)]
)
def test_quantised_experts_are_held_beside_their_masters(mesh, share):
    config = dataclasses.replace(proxy_config(), data=dataclasses.replace(proxy_config().data, batch_size=8))
    model = dataclasses.replace(config.model, moe=dataclasses.replace(config.model.moe, qat="w4"))
    plain = plan(config, mesh).memory.phases
    found = plan(dataclasses.replace(config, model=model), mesh).memory.phases
    banks = flops.parameter_counts(model).by_mechanism["routed_experts"]
    for phase, kinds in found.items():
        assert kinds["quantised"] == (0 if phase == "optimizer" else 2 * banks / share)
        assert plain[phase]["quantised"] == 0
        assert kinds["parameters"] == plain[phase]["parameters"]
    assert found["optimizer"] == plain["optimizer"]


def test_the_whole_model_is_planned_in_seconds_and_says_what_is_an_estimate():
    begin = time.process_time()
    result = plan(k3_config(), MeshConfig(pipe=8, data=16, expert=32))
    rows = result.rows()
    assert time.process_time() - begin < 30
    assert {row.section for row in rows} >= {
        "memory of a device",
        "activations by remat preset",
        "MoonEP buffers",
        "memory by stage",
        "operations of a token",
        "time of a step",
    }
    assert {row.known for row in rows} == {"exact", "estimate", "fitted", "data sheet"}
    assert result.table()[0] == dataclasses.asdict(rows[0])
    assert [row.name for row in rows if row.section == "activations by remat preset"] == [
        *("none", "products", "sublayer", "layer", "block")
    ]
    assert "(estimates)" in str(result)
    banks = 92 * 896 * 33_030_144 // 32  # over the stages, the experts of one rank
    bytes_of_parameters = sum(m.phases["backward"]["parameters"] for m in result.memories)
    assert bytes_of_parameters == 4 * (banks + 2_779_484_393_568 - 2_722_740_830_208)


def test_what_is_exact_is_what_the_trainer_would_place():
    config = proxy_config(8)
    for mesh in (MeshConfig(data=8), MeshConfig(data=8, fsdp=True)):
        abstract = jax.sharding.AbstractMesh(mesh.sizes, AXES, axis_types=(AxisType.Explicit,) * len(AXES))
        with jax.sharding.use_abstract_mesh(abstract):
            optimizer = make_optimizer(config.optimizer, abstract_params(config.model), 1)
            rows = placements(abstract_state(config.model, optimizer.transform, abstract, fsdp=mesh.fsdp))
        kinds = plan(config, mesh).memory.kinds
        assert kinds["parameters"] == sum(row.bytes_per_device for row in rows if row.kind == "parameter")
        assert kinds["optimizer"] == sum(row.bytes_per_device for row in rows if row.kind == "optimizer")


def traffic(result, stage: int = 0) -> dict[str, float]:
    """Bytes by what they are."""
    found: dict[str, float] = {}
    for c in result.traffic[stage]:
        found[c.what] = found.get(c.what, 0.0) + c.total
    return found


def micro(mesh: MeshConfig, **train) -> RunConfig:
    """Two KDA and two MLA layers, eight experts, eight heads; 4 sequences of 32 on each device of the batch."""
    model = micro_model(num_layers=4, mla_layers=(1, 3), num_dense_layers=0)
    heads = {"kda": dataclasses.replace(model.kda, num_heads=8), "mla": dataclasses.replace(model.mla, num_heads=8)}
    model = dataclasses.replace(model, moe=dataclasses.replace(model.moe, num_experts=8), **heads)
    batch = 4 * mesh.data * mesh.expert * train.get("accumulation", 1)
    return micro_config("none", "none", model=model, train=train, data={"batch_size": batch}, mesh=mesh)


def test_bytes_of_expert_parallelism_are_those_of_the_formula():
    found = traffic(plan(micro(MeshConfig(expert=4), accumulation=2, remat="layer")))
    layers, micro_batches, rows, copies = 4, 2, 4 * 32 * 2, math.ceil(8 * 3 / 16)
    assert found["rows of experts"] == layers * micro_batches * (2 + 3) * rows * 16 * 4
    assert found["copied experts (at most)"] * 3 / 4 == layers * micro_batches * 2 * copies * 3 * 16 * 16 * 4
    assert found["gradients of copies (at most)"] * 2 == found["copied experts (at most)"]
    repeated = traffic(plan(micro(MeshConfig(expert=4), accumulation=2, remat="block")))
    assert repeated["rows of experts"] == found["rows of experts"] * 7 / 5


def test_bytes_of_tensor_and_context_parallelism_are_those_of_the_formula():
    found = traffic(plan(micro(MeshConfig(tensor=2), remat="none")))
    stream = 4 * 32 * 32 * 4
    assert found["stream into sublayers"] == found["stream out of sublayers"] == 2 * 4 * 2 * stream
    assert found["stream into the head"] == stream
    found = traffic(plan(micro(MeshConfig(context=4), remat="none")))
    assert found["KDA state maps"] == 2 * 2 * (4 * 4) * 8 * 16 * (16 + 16) * 4  # forward and backward
    assert found["convolution halos"] == 2 * 2 * 4 * 3 * (3 * 8 * 16) * 4
    assert found["MLA latents"] == found["gradients of MLA latents"] == 2 * 4 * 32 * (8 + 8) * 4


def test_a_pipeline_sends_every_block_to_each_stage_once():
    model = k3()
    chunks = [stage.chunks[0] for stage in stages(model, 8)]
    assert [len(chunk) for chunk in chunks] == [12] * 7 + [9]
    assert rows_between(model, chunks, 8) == [1, 2, 3, 4, 5, 6, 7]
    # with virtual stages a device keeps the blocks of its chunk before: it gets only what the others closed since
    parts = stages(model, 4, 2)
    in_order = [parts[c % 4].chunks[c // 4] for c in range(8)]
    assert in_order == chunks
    assert rows_between(model, in_order, 4) == [1, 2, 3, 3, 3, 3, 3]
    result = plan(k3_config(), MeshConfig(pipe=8, data=16, expert=32))
    row = 8192 * 7168 * 2
    assert traffic(result, 3)["partial sums and blocks, to the next stage"] == 32 * 5 * row
    assert traffic(result, 3)["their gradients, to the stage before"] == 32 * 4 * row
    assert result.time.bubble == pytest.approx(7 / 39)
    assert [in_flight(stage, 8, 32) for stage in result.stages] == [8, 7, 6, 5, 4, 3, 2, 1]
    assert [in_flight(stage, 4, 32) for stage in parts] == [11, 9, 7, 5]
    # one micro-batch's layers, whatever waits: only inputs of chunks do
    kept, twice = (plan(k3_config(), MeshConfig(pipe=p, data=16, expert=32)).memories[1].activations for p in (8, 4))
    assert twice["layer"] - 3 * row == 2 * (kept["layer"] - 7 * row)
    assert plan(k3_config(), MeshConfig(pipe=4, data=16, expert=32), virtual=2).time.bubble == pytest.approx(3 / 67)


def test_what_the_tower_costs_is_said_not_to_be_counted():
    config, words = load_config("configs/nano_vision.py"), "tower's work on images is not counted"
    assert words in str(plan(config, MeshConfig(data=2)))
    assert "copies outside stage 0" in str(plan(config, MeshConfig(pipe=2)))
    text = dataclasses.replace(config, data=dataclasses.replace(config.data, images=ImagesConfig()))
    assert words not in str(plan(text, MeshConfig()))


def test_groups_know_which_links_they_use():
    mesh = MeshConfig(pipe=2, data=4, expert=8)
    assert group_ranks(mesh, ("expert",), 8) == (8, 1)
    assert group_ranks(mesh, ("data",), 8) == (1, 4)
    assert group_ranks(mesh, ("data", "expert"), 8) == (8, 4)
    assert group_ranks(mesh, ("data", "expert"), 72) == (32, 1)


@pytest.mark.parametrize(
    ("mesh", "virtual", "micro_batches", "reason"),
    [
        (MeshConfig(tensor=5), 1, 1, r"tensor 5 does not divide the KDA heads: 96; legal are 1, 2, 4, 8, 16, 32"),
        (MeshConfig(expert=48, data=2), 1, 1, r"expert 48 does not divide the 896 experts; legal are 1, 2, 4, 7, 8"),
        (MeshConfig(data=16, expert=32, fsdp=True), 1, 1, r"896 experts over .* = 512 devices; legal are .* 448, 896"),
        (MeshConfig(context=3), 1, 1, r"context 3 × tensor 1 = 3 does not divide 8192 tokens.*legal are .* 4, 8, 16"),
        (MeshConfig(context=4096), 1, 1, r"2 tokens a shard.* looks 3 back"),
        (MeshConfig(pipe=25), 1, 32, r"25 stages: the 93 layers have 24 periods of 4 .*legal are .* 1\.\.24"),
        (MeshConfig(pipe=8), 4, 32, r"= 32 stages"),
        (MeshConfig(pipe=8), 2, 4, r"groups of pipe 8, and there are 4; legal are multiples of 8"),
        (MeshConfig(), 2, 1, r"virtual 2 stages need pipe > 1"),
        (MeshConfig(data=512), 1, 64, r"16384 sequences in 64 micro-batches.*legal are micro-batches in 1, 2, .* 32"),
        (MeshConfig(data=3), 1, 1, r"do not divide over data 3 .* legal are batches that are multiples of 3"),
    ],
)
def test_a_mesh_that_cannot_be_honoured_is_refused_with_what_is_legal(mesh, virtual, micro_batches, reason):
    with pytest.raises(ConfigError, match=reason):
        plan(k3_config(micro_batches=micro_batches), mesh, virtual=virtual)


def test_search_ranks_legal_meshes_and_those_that_fit_come_first():
    config = proxy_config(16)
    found = search(config, 8)
    assert len(found) > 20
    for candidate in found:
        assert math.prod(candidate.mesh.sizes) == 8
        work = Work(16, 4096, candidate.micro_batches)
        assert not refusals(config.model, candidate.mesh, work, candidate.virtual)
    assert {c.mesh.tensor for c in found} == {1, 2, 4}  # twelve heads
    assert max(c.mesh.pipe * c.virtual for c in found) <= len(units(config.model)) == 4
    fits = [c.plan.fits for c in found]
    assert fits == sorted(fits, reverse=True)
    times = [c.plan.time.predicted for c in found if c.plan.fits]
    assert times == sorted(times)


def test_search_says_what_lacks_least_when_nothing_fits(tmp_path, capsys):
    table = tmp_path / "chips.toml"
    table.write_text("[H200]\nmemory_gib = 8.0\n")
    assert main(["configs/proxy.py", "--batch", "16", "--search", "2", "--chips", str(table)]) == 0
    out = capsys.readouterr().out
    assert "0 legal meshes fit in 7.5 GiB" in out
    assert "none fits; these lack least" in out
    with pytest.raises(ConfigError, match="no mesh of 7 devices is legal for 16 sequences"):
        search(dataclasses.replace(proxy_config(16), train=TrainConfig(accumulation=16)), 7)


def test_chips_can_be_edited(tmp_path):
    assert set(load_chips()) == {"H100", "H200", "B200", "GB200"}
    for name, found in load_chips().items():
        assert found.flops in [peak for word, peak in flops.PEAKS if word == name]
    table = tmp_path / "chips.toml"
    table.write_text("[H200]\nnetwork_gb_s = 25.0\n[efficiency]\nmatmul = 0.5\n")
    found = chip("H200", table)
    assert (found.network_gb_s, found.efficiency.matmul, found.memory_tb_s) == (25.0, 0.5, 4.8)
    slower = plan(proxy_config(), chip="H200", chips_file=table).time
    assert slower.predicted > plan(proxy_config()).time.predicted
    assert slower.bound == plan(proxy_config()).time.bound
    for text, message in (
        ("[H200]\nmemory = 1.0\n", "unknown memory"),
        ("[new]\nbf16_tflops = 1.0\n", "missing domain, link_gb_s"),
        ("[H200]\ndomain = 0\n", "domain must be positive"),
        ("[efficiency]\nlink = 2.0\n", r"efficiency.link must be in \(0, 1\]"),
        ("nonsense", "cannot read"),
    ):
        table.write_text(text)
        with pytest.raises(ConfigError, match=message):
            load_chips(table)
    with pytest.raises(ConfigError, match="unknown chip 'H300'; there are H100, H200"):
        chip("H300")


def test_the_command_line(capsys):
    assert parse_mesh("pipe=8, data=16,fsdp") == MeshConfig(pipe=8, data=16, fsdp=True)
    with pytest.raises(ConfigError, match="'pipes=8' is not one of pipe=N"):
        parse_mesh("pipes=8")
    arguments = ["configs/k3.py", "--mesh", "pipe=8,data=16,expert=32", "--batch", "16384", "--micro-batches", "32"]
    assert main([*arguments, "--chip", "GB200", "--sizes"]) == 0
    out = capsys.readouterr().out
    assert "4096 × GB200: pipe 8, data 16, expert 32" in out
    assert "2,779,484,393,568" in out
    assert main([*arguments, "--json"]) == 0
    assert {"section", "name", "value", "unit", "known", "note"} == set(json.loads(capsys.readouterr().out)[0])
    assert main(["configs/k3.py", "--mesh", "tensor=5"]) == 2
    assert "tensor 5 does not divide" in capsys.readouterr().err
    assert main(["--mesh", "data=2"]) == 2


def test_more_tokens_on_a_device_need_more_and_presets_keep_less_and_less():
    def backward(batch: int, sequence: int) -> float:
        config = RunConfig(
            k3(), DataConfig(batch_size=batch, sequence_length=sequence), train=TrainConfig(remat="layer")
        )
        return sum(plan(config).memory.phases["backward"].values())

    assert backward(2, 4096) > backward(1, 4096)
    assert backward(1, 8192) > backward(1, 4096)
    kept = plan(proxy_config()).memory.activations
    assert kept["none"] > kept["products"] > kept["sublayer"] > kept["layer"] > kept["block"]
