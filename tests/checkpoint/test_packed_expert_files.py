"""Directories whose experts are MXFP4: values, logits, and the same bytes back."""

import contextlib
import dataclasses
import json

import jax
import ml_dtypes
import numpy as np
import pytest
from released import LM, PACKED, TINY, assert_same_tensors, changed, read, values_of

import k3jax
from k3jax.checkpoint import export, load
from k3jax.checkpoint.layout import CheckpointFormatError
from k3jax.checkpoint.load import load_pretrained
from k3jax.checkpoint.preflight import preflight
from k3jax.config import MeshConfig
from k3jax.model.quantize import pack_experts
from k3jax.ops.mx import PackedMX
from k3jax.sharding import make_mesh, shardings

GOLDEN = PACKED.parent
EXPERT = LM + "model.layers.{}.block_sparse_moe.experts.{}.{}"
FLOATS = {"dtype": "float32", "param_dtype": "float32"}


def dequantised(packed: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """What the format says, in numpy, sharing nothing with the codec."""
    magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    codes = np.stack([packed & 15, packed >> 4], -1).reshape(len(packed), -1)
    values = magnitudes[codes & 7] * np.where(codes & 8, -1.0, 1.0)
    return (values * np.repeat(2.0 ** (scale.astype(int) - 127), 32, axis=1)).astype(np.float32)


def experts_of(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {
        name.removesuffix("_packed"): dequantised(value, tensors[name.removesuffix("_packed") + "_scale"])
        for name, value in tensors.items()
        if name.endswith("_packed")
    }


@pytest.fixture(scope="module")
def golden_logits():
    return dict(np.load(GOLDEN / "mxfp4_logits_and_dequant.npz"))


@pytest.fixture(scope="module")
def packed():
    return load_pretrained(PACKED, **FLOATS)


def test_decoded_experts_are_the_golden_ones(packed, golden_logits):
    names = json.loads((GOLDEN / "mxfp4_names.json").read_text())
    mine = {}
    for layer in range(1, 9):
        ffn = packed.model.layer(layer).ffn
        for w in ("w1", "w2", "w3"):
            for expert, value in enumerate(np.asarray(getattr(ffn, w)[...])):
                mine[EXPERT.format(layer, expert, w) + ".weight"] = value.T
    assert sorted(mine) == sorted(names)
    for name, value in golden_logits.items():
        if name.startswith("deq."):
            np.testing.assert_array_equal(mine[name.removeprefix("deq.")], value)
    np.testing.assert_allclose([mine[n].sum() for n in names], golden_logits["deq_sum"], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose([np.abs(mine[n]).sum() for n in names], golden_logits["deq_abs_sum"], rtol=1e-5)
    for name, value in experts_of(read(PACKED)).items():
        np.testing.assert_array_equal(mine[name], value)


def test_logits_of_the_packed_checkpoint_match_golden(packed, golden_logits):
    run = jax.jit(lambda m, t: m(t, router_bias=packed.router_bias))
    error = np.asarray(run(packed.model, golden_logits["in.input_ids"]), np.float64) - golden_logits["ref64.logits"]
    assert np.linalg.norm(error) / np.linalg.norm(golden_logits["ref64.logits"]) <= 1.5e-4
    assert np.max(np.abs(error)) <= 4e-3


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_untouched_packed_experts_come_back_with_the_same_bytes(tmp_path, dtype):
    got = load_pretrained(PACKED, param_dtype=dtype)
    k3jax.export_pretrained(got.model, got.router_bias, tmp_path / "x", like=PACKED)
    assert_same_tensors(read(tmp_path / "x"), read(PACKED))
    assert values_of(tmp_path / "x") == values_of(PACKED)


def test_source_scales_are_kept_where_values_did_not_change(tmp_path):
    """A group whose largest code is 3 is what another rule made: ours would halve its scale."""
    name = EXPERT.format(3, 5, "w1") + ".weight"

    def change(tensors):
        codes = tensors[name + "_packed"] = tensors[name + "_packed"].copy()
        codes[:] = np.where(np.arange(16) % 2, 0x25, 0xD1)

    source = changed(PACKED, tmp_path / "source", change)
    got = load_pretrained(source, **FLOATS)
    k3jax.export_pretrained(got.model, got.router_bias, tmp_path / "same", like=source)
    before = read(source)
    assert_same_tensors(read(tmp_path / "same"), before)

    (segment, run, place) = next(
        (i, j, numbers.index(3))
        for i, plan in enumerate(got.model.plans)
        for j, (_, numbers) in enumerate(plan.run_layers())
        if 3 in numbers
    )
    w1 = got.model.segments[segment].runs[run].ffn.w1
    w1[...] = w1[...].at[place, 5, 7, 11].multiply(1.01)  # one input of output 11
    k3jax.export_pretrained(got.model, got.router_bias, tmp_path / "other", like=source)
    after = read(tmp_path / "other")
    row = after[name + "_packed"][11:12], after[name + "_scale"][11:12]
    assert row[1] == before[name + "_scale"][11] - 1
    np.testing.assert_allclose(dequantised(*row)[0], np.asarray(w1[place, 5, :, 11]), rtol=0.02)
    for part in ("_packed", "_scale"):
        after[name + part][11] = before[name + part][11]
    assert_same_tensors(after, before)


def test_plain_experts_become_packed_ones_and_back(tmp_path):
    got = load_pretrained(PACKED)
    k3jax.export_pretrained(got.model, got.router_bias, tmp_path / "plain", like=PACKED, experts="plain")
    plain = read(tmp_path / "plain")
    assert "quantization_config" not in values_of(tmp_path / "plain")["text_config"]
    for name, value in experts_of(read(PACKED)).items():
        assert plain[name].dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(plain[name].astype(np.float32), value)
    again = load_pretrained(tmp_path / "plain")
    k3jax.export_pretrained(again.model, again.router_bias, tmp_path / "y", like=tmp_path / "plain", experts="mxfp4")
    assert preflight(tmp_path / "y").packed
    for name, value in experts_of(read(tmp_path / "y")).items():
        np.testing.assert_array_equal(value, plain[name].astype(np.float32))


@pytest.mark.parametrize("fsdp", [False, True])
def test_packed_experts_land_in_shards_and_leave_them(monkeypatch, packed, tmp_path, fsdp):
    monkeypatch.setattr(load, "_STAGE", 64 << 10)
    monkeypatch.setattr(export, "_STAGE", 64 << 10)
    with jax.set_mesh(make_mesh(MeshConfig(data=2, expert=4, fsdp=fsdp))):
        got = load_pretrained(PACKED, fsdp=fsdp, **FLOATS)
        for a, b in zip(jax.tree.leaves(got.model), jax.tree.leaves(packed.model)):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
        k3jax.export_pretrained(got.model, got.router_bias, tmp_path / "x", like=PACKED)
    assert_same_tensors(read(tmp_path / "x"), read(PACKED))


def _scale(value: int, zero: bool = False):
    name = EXPERT.format(2, 3, "w2") + ".weight"

    def change(tensors):
        scale = tensors[name + "_scale"] = tensors[name + "_scale"].copy()
        scale[5, 0] = value
        if zero:
            codes = tensors[name + "_packed"] = tensors[name + "_packed"].copy()
            codes[5, :16] = 0x80

    return change


def test_scales_that_mean_nan_or_lose_bits_are_named(tmp_path):
    name = EXPERT.format(2, 3, "w2").replace(".", r"\.")
    with pytest.raises(CheckpointFormatError, match=rf"\.safetensors: {name}\.weight_scale holds NaN"):
        load_pretrained(changed(PACKED, tmp_path / "nan", _scale(255)))
    with pytest.raises(CheckpointFormatError, match=rf"\.safetensors: {name}\.weight_packed has values below"):
        load_pretrained(changed(PACKED, tmp_path / "tiny", _scale(1)))
    for scale in (253, 254):
        with pytest.raises(CheckpointFormatError, match=rf"\.safetensors: {name}\.weight_packed has values of 2\^128"):
            load_pretrained(changed(PACKED, tmp_path / f"{scale}", _scale(scale)))
    zeros = changed(PACKED, tmp_path / "zeros", _scale(0, zero=True))
    got = load_pretrained(zeros)
    k3jax.export_pretrained(got.model, got.router_bias, tmp_path / "x", like=zeros)
    assert_same_tensors(read(tmp_path / "x"), read(zeros))


@pytest.mark.parametrize(("scale", "code"), [(252, 7), (253, 5), (254, 3)])
def test_the_largest_values_that_are_finite_load(tmp_path, scale, code):
    name = EXPERT.format(2, 3, "w2") + ".weight"

    def change(tensors):
        _scale(scale)(tensors)
        codes = tensors[name + "_packed"] = tensors[name + "_packed"].copy()
        codes[5, :16] = code | code << 4

    directory = changed(PACKED, tmp_path / "x", change)
    got = load_pretrained(directory)
    k3jax.export_pretrained(got.model, got.router_bias, tmp_path / "y", like=directory)
    assert_same_tensors(read(tmp_path / "y"), read(directory))


@pytest.mark.parametrize("mesh", [None, MeshConfig(expert=2)])
def test_experts_that_are_held_as_codes_are_exported(tmp_path, packed, mesh):
    """As `k3jax.load` gives them after quantisation-aware training."""
    with jax.set_mesh(make_mesh(mesh)) if mesh else contextlib.nullcontext():
        got = load_pretrained(PACKED) if mesh else packed
        held = pack_experts(got.model, "even")
        k3jax.export_pretrained(held, got.router_bias, tmp_path / "codes", like=PACKED)
        k3jax.export_pretrained(held, got.router_bias, tmp_path / "plain", like=PACKED, experts="plain")
    assert_same_tensors(read(tmp_path / "codes"), read(PACKED))
    plain = read(tmp_path / "plain")
    for name, value in experts_of(read(PACKED)).items():
        np.testing.assert_array_equal(plain[name].astype(np.float32), value)


def banks_of(model) -> dict[str, PackedMX | jax.Array]:
    return {
        f"{layer}.{w}": getattr(model.layer(layer).ffn, w).get_value()
        for layer in range(1, 9)
        for w in ("w1", "w2", "w3")
    }


def assert_same_codes(model, tensors) -> None:
    for name, bank in banks_of(model).items():
        layer, w = name.split(".")
        assert isinstance(bank, PackedMX)
        for expert in range(bank.shape[0]):
            stem = EXPERT.format(layer, expert, w) + ".weight"
            np.testing.assert_array_equal(np.asarray(bank.codes)[expert].T, tensors[stem + "_packed"])
            np.testing.assert_array_equal(np.asarray(bank.scales)[expert].T, tensors[stem + "_scale"])


MESHES = {
    "one device": None,
    "expert 8": MeshConfig(expert=8),
    "data 2, expert 4, fsdp": MeshConfig(data=2, expert=4, fsdp=True),
}


@pytest.mark.parametrize(
    ("mesh", "staged"),
    [
        ("one device", False),
        ("expert 8", False),
        ("data 2, expert 4, fsdp", True),
        pytest.param("one device", True, marks=pytest.mark.slow),
        pytest.param("expert 8", True, marks=pytest.mark.slow),
        pytest.param("data 2, expert 4, fsdp", False, marks=pytest.mark.slow),
    ],
)
def test_experts_stay_codes_from_file_to_file(monkeypatch, tmp_path, mesh, staged):
    """Byte for byte, also as on devices that have memory of their own; nothing is ever decoded."""

    def never(*_, **__):
        raise AssertionError("a plain copy")

    made = []
    monkeypatch.setattr(load, "dequantize", never)
    monkeypatch.setattr(export, "dequantize", never)
    monkeypatch.setattr(
        load, "_empty", lambda shape, dtype, make=load._empty: made.append(make(shape, dtype)) or made[-1]
    )
    if staged:
        for module in (load, export):
            monkeypatch.setattr(module, "_in_place", lambda: False)
            monkeypatch.setattr(module, "_STAGE", 64 << 10)
    config = MESHES[mesh]
    with jax.set_mesh(make_mesh(config)) if config else contextlib.nullcontext():
        fsdp = bool(config and config.fsdp)
        got = load_pretrained(PACKED, experts="packed", fsdp=fsdp)
        assert_same_codes(got.model, read(PACKED))
        if config:
            places = shardings(got.model, jax.sharding.get_mesh(), at_rest=fsdp)
            assert [x.sharding for x in jax.tree.leaves(got.model)] == jax.tree.leaves(places)
        k3jax.export_pretrained(got.model, got.router_bias, tmp_path / "x", like=PACKED)
        k3jax.export_pretrained(got.model, got.router_bias, tmp_path / "y", experts="mxfp4")
    assert_same_tensors(read(tmp_path / "x"), read(PACKED))
    experts = {name: value for name, value in read(PACKED).items() if name.endswith(("_packed", "_scale"))}
    assert_same_tensors({name: value for name, value in read(tmp_path / "y").items() if name in experts}, experts)
    if not staged:
        numbers = sum(np.prod(bank.shape) for bank in banks_of(got.model).values())
        assert sum(a.nbytes for a in made if a.dtype == np.uint8) == numbers * 17 // 32  # 4.25 bits each


def test_a_device_holds_a_quarter_of_bfloat16():
    with jax.set_mesh(make_mesh(MeshConfig(expert=8))):
        plain, codes = (load_pretrained(PACKED, experts=experts).model for experts in ("plain", "packed"))

    def held(model):
        found = {device: 0 for device in jax.devices()}
        for segment in model.segments:
            for run in segment.runs:
                for w in ("w1", "w2", "w3"):
                    for array in jax.tree.leaves(getattr(run.ffn, w)) if hasattr(run.ffn, w) else ():
                        for shard in array.addressable_shards:
                            found[shard.device] += shard.data.nbytes
        return np.array(list(found.values()))

    np.testing.assert_array_equal(held(codes) / held(plain), 4.25 / 16)


SLOW_ON_MESHES = [pytest.param(name, marks=pytest.mark.slow) if mesh else name for name, mesh in MESHES.items()]


@pytest.mark.parametrize("mesh", SLOW_ON_MESHES)
def test_codes_compute_what_their_numbers_do(golden_logits, mesh):
    """To the bit in float32: both multiply the same numbers in the same order. With XLA's optimisations off, as
    elsewhere in these tests, they are 2e-5 apart on a mesh."""
    config = MESHES[mesh]
    tokens = np.resize(golden_logits["in.input_ids"], (8, 16))
    with jax.set_mesh(make_mesh(config)) if config else contextlib.nullcontext():
        fsdp = bool(config and config.fsdp)
        plain, codes = (load_pretrained(PACKED, experts=e, fsdp=fsdp, **FLOATS) for e in ("plain", "packed"))
        if config:
            tokens = jax.device_put(tokens, jax.P(("data", "expert")))
        optimised = {"xla_backend_optimization_level": 3} if config else None
        run = jax.jit(lambda model, bias: model(tokens, router_bias=bias), compiler_options=optimised)
        np.testing.assert_array_equal(run(codes.model, codes.router_bias), run(plain.model, plain.router_bias))


def test_plain_experts_are_not_quantised_on_the_way():
    with pytest.raises(
        CheckpointFormatError, match=r"tiny_k3 holds plain experts.*export with experts=\"mxfp4\" first"
    ):
        load_pretrained(TINY, experts="packed")


def test_codes_take_the_scales_of_like_where_they_are_exact(tmp_path):
    """Codes of our rule, and a source whose groups that reach 3 at most have twice the scale."""

    def change(tensors):
        name = EXPERT.format(3, 5, "w1") + ".weight_packed"
        codes = tensors[name] = tensors[name].copy()
        codes[:] = np.where(np.arange(16) % 2, 0x25, 0xD1)

    source = changed(PACKED, tmp_path / "source", change)
    packed = pack_experts(load_pretrained(source).model, "even")
    first = load_pretrained(source, experts="packed")
    assert (np.asarray(banks_of(packed)["3.w1"].scales)[5] < np.asarray(banks_of(first.model)["3.w1"].scales)[5]).all()
    k3jax.export_pretrained(packed, first.router_bias, tmp_path / "x", like=source)
    assert_same_tensors(read(tmp_path / "x"), read(source))
    w1 = next(
        run.ffn.w1 for segment in first.model.segments for run in segment.runs if hasattr(run.ffn, "w1")
    )  # the first expert of the first MoE layer
    bank = w1.get_value()
    w1.set_value(dataclasses.replace(bank, scales=bank.scales.at[0, 0, 0, 0].set(255)))
    with pytest.raises(CheckpointFormatError, match="holds NaN"):
        k3jax.export_pretrained(first.model, first.router_bias, tmp_path / "y", like=source)


def test_experts_whose_inputs_are_no_groups_are_not_packed(tmp_path):
    nano = k3jax.nano()
    model = k3jax.create(dataclasses.replace(nano, moe=dataclasses.replace(nano.moe, expert_size=48)))
    bias = np.zeros((nano.num_moe_layers, nano.moe.num_experts), np.float32)
    with pytest.raises(CheckpointFormatError, match="48 inputs are no multiple of 32"):
        k3jax.export_pretrained(model, jax.numpy.asarray(bias), tmp_path / "x", experts="mxfp4")
    assert not list(tmp_path.iterdir())
