"""Import and export of directories in the released layout."""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from helpers import micro
from released import LM, TINY, assert_same_tensors, changed, read, values_of, write

import k3jax
from k3jax.checkpoint import export, hf, load
from k3jax.checkpoint.hf_config import check_stored, config_from_hf, config_to_hf
from k3jax.checkpoint.layout import CheckpointFormatError
from k3jax.checkpoint.load import load_pretrained
from k3jax.checkpoint.preflight import preflight
from k3jax.config import MeshConfig, moonvit, nano
from k3jax.sharding import make_mesh, shardings

MESHES = {
    "one": None,
    "used": MeshConfig(data=2, expert=2),
    "rest": MeshConfig(data=2, expert=4, fsdp=True),
}


def on(mesh):
    return contextlib.nullcontext() if mesh is None else jax.set_mesh(make_mesh(mesh))


def assert_equal_models(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.fixture(scope="module")
def tiny():
    return hf.load_hf(TINY)


@pytest.mark.parametrize("mesh", MESHES)
def test_import_places_the_same_values_on_every_mesh(tiny, mesh):
    with on(MESHES[mesh]):
        fsdp = mesh == "rest"
        got = k3jax.load_pretrained(TINY, fsdp=fsdp)
        if MESHES[mesh] is not None:
            places = shardings(got.model, jax.sharding.get_mesh(), at_rest=fsdp)
            for leaf, place in zip(jax.tree.leaves(got.model), jax.tree.leaves(places)):
                assert leaf.sharding == place
        assert_equal_models(got.model, tiny[0])
        np.testing.assert_array_equal(got.router_bias, tiny[1])


@pytest.fixture(scope="module")
def small():
    """A fresh model and its router biases."""
    return k3jax.create(micro()), jnp.arange(32.0).reshape(4, 8)


@pytest.fixture
def staged(monkeypatch):
    """As on devices that have memory of their own, with little staging."""
    for module in (load, export):
        monkeypatch.setattr(module, "_in_place", lambda: False)
        monkeypatch.setattr(module, "_STAGE", 8 << 10)


@pytest.mark.parametrize("mesh", [pytest.param("one", marks=pytest.mark.slow), "rest"])
def test_staged_pieces_make_the_same_arrays_and_files(staged, small, tmp_path, mesh):
    model, bias = small
    config = model.config
    with on(MESHES[mesh]):
        if MESHES[mesh] is not None:
            model = jax.device_put(model, shardings(model, jax.sharding.get_mesh(), at_rest=True))
        k3jax.export_pretrained(model, bias, tmp_path / "x", dtype="float32")
        got = load_pretrained(tmp_path / "x", fsdp=mesh == "rest", kda=config.kda, moe=config.moe)
        assert_equal_models(got.model, model)
        np.testing.assert_array_equal(got.router_bias, bias)


def test_a_process_reads_only_what_its_devices_hold(monkeypatch):
    """A process with one device of eight, which hold different experts, reads an eighth of the experts."""
    checkpoint = preflight(TINY)
    with on(MeshConfig(expert=8)):
        found = next(leaf for leaf in checkpoint.leaves if leaf.path.endswith("ffn.w1"))
        shape = (*found.stack, *(found.held[axis] for axis in found.order))
        place = jax.sharding.NamedSharding(jax.sharding.get_mesh(), jax.sharding.PartitionSpec(None, "expert"))
        (ranges, devices), *_ = load._shards(place, shape).items()
        assert len(devices) == 1
        with load._Importer(checkpoint, None) as importer:
            part = load._Part(ranges, np.empty(place.shard_shape(shape), np.float32))
            load.settle(importer._fill(found, {ranges: part}))
            assert importer.reader.bytes_read == part.array.nbytes == np.prod(shape) * 4 / 8


def test_untouched_export_has_the_same_bytes(tmp_path):
    got = load_pretrained(TINY)
    k3jax.export_pretrained(got.model, got.router_bias, tmp_path / "x", like=TINY, max_shard_bytes=400_000)
    assert_same_tensors(read(tmp_path / "x"), read(TINY))
    assert values_of(tmp_path / "x") == values_of(TINY)
    files = list((tmp_path / "x").glob("*.safetensors"))
    assert len(files) > 5
    assert all(file.stat().st_size < 500_000 for file in files)


def test_without_its_tower_a_model_is_one_of_text_and_its_export_has_the_tower_of_the_source(tmp_path):
    got = load_pretrained(TINY, vision=None)
    assert not hasattr(got.model, "vision")
    k3jax.export_pretrained(got.model, got.router_bias, tmp_path / "x", like=TINY)
    assert_same_tensors(read(tmp_path / "x"), read(TINY))


def test_a_tower_without_a_source_is_exported_with_its_configuration(tmp_path):
    got = load_pretrained(TINY)
    k3jax.export_pretrained(got.model, got.router_bias, tmp_path / "x", dtype="float32")
    assert_same_tensors(read(tmp_path / "x"), read(TINY))
    assert preflight(tmp_path / "x").config == preflight(TINY).config


@pytest.mark.parametrize("like", [None, TINY])
def test_a_model_whose_config_json_would_say_something_else_is_not_exported(tmp_path, like):
    config = preflight(TINY).config
    vision, mla = config.vision, config.mla
    for change, word in (
        ({"vision": dataclasses.replace(vision, norm_eps=1e-5)}, r"model\.vision\.norm_eps is 1e-05, a reader takes"),
        ({"mla": dataclasses.replace(mla, lora_norm_eps=1e-3)}, r"model\.mla\.lora_norm_eps"),
    ):
        other = load_pretrained(TINY, **change)
        with pytest.raises(CheckpointFormatError, match=word):
            k3jax.export_pretrained(other.model, other.router_bias, tmp_path / "x", like=like)
    assert not list(tmp_path.iterdir())


def test_export_without_a_source_has_the_releases_names_dtypes_and_padding(small, tmp_path):
    model, bias = small
    k3jax.export_pretrained(model, bias, tmp_path / "x")
    tensors = read(tmp_path / "x")
    a_log = tensors[LM + "model.layers.0.self_attn.A_log"]
    assert a_log.shape == (128,)
    assert a_log.dtype == np.float32
    assert not a_log[2:].any()
    assert tensors[LM + "lm_head.weight"].dtype == ml_dtypes.bfloat16
    assert tensors[LM + "model.layers.1.block_sparse_moe.gate.e_score_correction_bias"].dtype == np.float32
    again = load_pretrained(tmp_path / "x", param_dtype="float32", dtype="float32", kda=model.config.kda).model
    for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(model)):
        wide = b.astype(jnp.bfloat16).astype(jnp.float32)
        assert np.array_equal(a, b) or np.array_equal(a, wide)


def test_the_import_of_an_import_keeps_float32_where_the_release_has_it(small, tmp_path):
    model, bias = small
    k3jax.export_pretrained(model, bias, tmp_path / "x")
    got = load_pretrained(tmp_path / "x", kda=model.config.kda)
    assert got.model.config.param_dtype == "bfloat16"
    k3jax.export_pretrained(got.model, got.router_bias, tmp_path / "y", like=tmp_path / "x")
    assert_same_tensors(read(tmp_path / "y"), read(tmp_path / "x"))


def _put(name, place, value):
    def change(tensors):
        tensors[name] = tensors[name].copy()
        tensors[name].reshape(-1)[place] = value

    return change


BAD = LM + "model.layers.{}."
SPOILT = {
    "self_attn.o_proj.weight": np.nan,
    "block_sparse_moe.experts.7.w2.weight": -np.inf,
    "self_attn.dt_bias": np.nan,
}


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"situ_beta": None},
        {"situ_linear_beta": None},
        {"attn_res_block_size": None},
        {"vision": moonvit()},
        {"kda": {"gate": "softplus", "gate_lower_bound": -3.0}},
        {"moe": {"latent_size": None}},
    ],
    ids=str,
)
@pytest.mark.parametrize("linear", [False, True])
def test_a_config_json_says_what_a_model_computes(change, linear):
    """What it has no field for has no say there."""
    config = nano()
    if linear:
        kda = dataclasses.replace(config.kda, gate="softplus", full_rank_output_gate=False)
        mla, moe = dataclasses.replace(config.mla, output_gate=False), dataclasses.replace(config.moe, latent_size=None)
        config = dataclasses.replace(config, kda=kda, mla=mla, moe=moe, attn_res_block_size=None, situ_beta=None)
    for name, value in change.items():
        value = dataclasses.replace(getattr(config, name), **value) if isinstance(value, dict) else value
        config = dataclasses.replace(config, **{name: value})
    check_stored(config, config_from_hf(config_to_hf(config, "float32")))


@pytest.mark.parametrize("name", ["vision_tower.encoder.blocks.0.wqkv.weight", "mm_projector.proj.2.weight"])
def test_nan_in_a_tower_is_named_and_a_model_of_text_does_not_mind(tmp_path, name):
    def spoil(tensors):
        tensors[name] = tensors[name].copy()
        tensors[name].reshape(-1)[-1] = np.nan

    directory = changed(TINY, tmp_path / "x", spoil)
    with pytest.raises(CheckpointFormatError, match=rf"safetensors: {name} holds NaN"):
        load_pretrained(directory)
    assert load_pretrained(directory, vision=None).model.config.vision is None


@pytest.mark.parametrize("name", SPOILT)
def test_weights_that_are_not_finite_are_named_with_their_file(tmp_path, name):
    value, name = SPOILT[name], BAD.format(5) + name
    with pytest.raises(CheckpointFormatError) as caught:
        load_pretrained(changed(TINY, tmp_path / "x", _put(name, 17, value)))
    assert name in str(caught.value)
    assert ".safetensors" in str(caught.value)
    assert "NaN" in str(caught.value)


def test_padding_of_a_log_that_is_not_zero_is_named(tmp_path):
    name = BAD.format(5) + "self_attn.A_log"
    with pytest.raises(CheckpointFormatError, match=r"\.safetensors: .*layers\.5\.self_attn\.A_log.*padding"):
        load_pretrained(changed(TINY, tmp_path / "x", _put(name, 127, 1e-3)))


def test_a_file_that_shrinks_after_the_preflight_is_named(tmp_path):
    directory = changed(TINY, tmp_path / "x", lambda tensors: None)
    checkpoint = preflight(directory)
    (file, *_) = sorted(directory.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    with load._Importer(checkpoint, None) as importer, pytest.raises(CheckpointFormatError, match=file.name):
        _ = [importer.begin(found, place, jnp.float32)() for found in checkpoint.leaves]


def test_overrides_that_change_shapes_are_refused():
    with pytest.raises(CheckpointFormatError, match="shapes"):
        load_pretrained(TINY, hidden_size=32)


def test_export_is_complete_or_absent(tmp_path):
    got = load_pretrained(TINY)
    broken = jax.tree.map(lambda a: a, got.model)
    broken.final_norm[...] = broken.final_norm[...].at[3].set(jnp.nan)
    with pytest.raises(CheckpointFormatError, match=r"model\.norm\.weight.*NaN"):
        k3jax.export_pretrained(broken, got.router_bias, tmp_path / "x", like=TINY)
    assert list(tmp_path.iterdir()) == []
    k3jax.export_pretrained(got.model, got.router_bias, tmp_path / "x", like=TINY)
    with pytest.raises(FileExistsError):
        k3jax.export_pretrained(got.model, got.router_bias, tmp_path / "x", like=TINY)


def test_export_like_another_geometry_is_refused(small, tmp_path):
    with pytest.raises(CheckpointFormatError, match="geometry"):
        k3jax.export_pretrained(*small, tmp_path / "x", like=TINY)


def kimi_linear(rng) -> tuple[dict, dict[str, np.ndarray]]:
    """Config and tensors of a tiny Kimi-Linear: names as in its public ports, bfloat16 beside float32."""
    D, H, K, E, F, V = 32, 2, 16, 8, 16, 48
    values = {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "dtype": "bfloat16",
        "first_k_dense_replace": 1,
        "hidden_act": "silu",
        "hidden_size": D,
        "intermediate_size": 40,
        "kv_lora_rank": 12,
        "linear_attn_config": {
            "full_attn_layers": [4],
            "head_dim": K,
            "kda_layers": [1, 2, 3],
            "num_heads": H,
            "short_conv_kernel_size": 4,
        },
        "mla_use_nope": True,
        "moe_intermediate_size": F,
        "moe_layer_freq": 1,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "num_attention_heads": H,
        "num_expert_group": 1,
        "num_experts": E,
        "num_experts_per_token": 2,
        "num_hidden_layers": 4,
        "num_nextn_predict_layers": 0,
        "num_shared_experts": 1,
        "q_lora_rank": None,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "routed_scaling_factor": 2.446,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "v_head_dim": 6,
        "vocab_size": V,
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (V, D), "model.norm": (D,), "lm_head": (V, D)}
    wide: dict[str, tuple[int, ...]] = {}
    for l in range(4):
        p, a = f"model.layers.{l}.", f"model.layers.{l}.self_attn."
        shapes |= {p + "input_layernorm": (D,), p + "post_attention_layernorm": (D,)}
        if l == 3:
            shapes |= {a + "q_proj": (H * 12, D), a + "kv_a_proj_with_mqa": (16, D), a + "kv_a_layernorm": (12,)}
            shapes |= {a + "kv_b_proj": (H * 14, 12), a + "o_proj": (D, H * 6)}
        else:
            shapes |= {f"{a}{x}_proj": (H * K, D) for x in "qkv"} | {a + "o_proj": (D, H * K), a + "b_proj": (H, D)}
            shapes |= {a + f"{x}_a_proj": (K, D) for x in "fg"} | {a + f"{x}_b_proj": (H * K, K) for x in "fg"}
            wide |= {f"{a}{x}_conv1d.weight": (H * K, 1, 4) for x in "qkv"}
            wide |= {a + "A_log": (1, 1, H, 1), a + "dt_bias": (H * K,), a + "o_norm.weight": (K,)}
        m = p + ("block_sparse_moe." if l else "mlp.")
        if l:
            shapes |= {f"{m}experts.{e}.{w}": (F, D) for e in range(E) for w in ("w1", "w3")}
            shapes |= {f"{m}experts.{e}.w2": (D, F) for e in range(E)} | {m + "gate": (E, D)}
            wide[m + "gate.e_score_correction_bias"] = (E,)
        s, width = (m + "shared_experts.", F) if l else (m, 40)
        shapes |= {s + "gate_proj": (width, D), s + "up_proj": (width, D), s + "down_proj": (D, width)}
    tensors = {f"{n}.weight": rng.standard_normal(s).astype(ml_dtypes.bfloat16) for n, s in shapes.items()}
    return values, tensors | {name: rng.standard_normal(s).astype(np.float32) for name, s in wide.items()}


def test_kimi_linear_loads_through_the_same_door_and_goes_back(tmp_path):
    values, tensors = kimi_linear(np.random.default_rng(0))
    directory = write(tmp_path / "x", tensors, values)
    got = load_pretrained(directory, dtype="float32")
    config, layer = got.model.config, got.model.layer(1)
    assert (config.kda.gate, config.kda.full_rank_output_gate) == ("softplus", False)
    assert (config.attn_res_block_size, config.situ_beta, config.situ_linear_beta) == (None, None, None)
    assert (config.mla.q_lora_rank, config.mla.output_gate, config.moe.latent_size) == (None, False, None)
    assert config.moe.routed_scaling_factor == 2.446
    name = "model.layers.1.self_attn."
    np.testing.assert_array_equal(layer.mixer.A_log[...], tensors[name + "A_log"].reshape(-1))
    np.testing.assert_array_equal(layer.mixer.g_b[...].reshape(16, -1), tensors[name + "g_b_proj.weight"].T)
    logits = jax.jit(lambda m, t: m(t, router_bias=got.router_bias))(got.model, jnp.arange(8)[None])
    assert np.all(np.isfinite(logits))
    k3jax.export_pretrained(got.model, got.router_bias, tmp_path / "like", like=directory)
    assert_same_tensors(read(tmp_path / "like"), tensors)
    k3jax.export_pretrained(got.model, got.router_bias, tmp_path / "y")
    assert "text_config" not in values_of(tmp_path / "y")
    again = load_pretrained(tmp_path / "y", dtype="float32")
    assert again.model.config == config
    assert_equal_models(again.model, got.model)


def test_swiglu_is_silu_times_up_with_its_gradients():
    from k3jax.ops.situ import situ_glu, situ_glu_backward

    gate, up, d = jax.random.normal(jax.random.key(0), (3, 5, 4))
    want = jax.nn.silu(gate) * up
    np.testing.assert_allclose(situ_glu(gate, up, None, None), want, rtol=1e-6)
    _, pull = jax.vjp(lambda g, u: jax.nn.silu(g) * u, gate, up)
    out, d_gate, d_up, _ = situ_glu_backward(gate, up, d, jnp.ones(5), None, None)
    for got, value in zip((out, d_gate, d_up), (want, *pull(d))):
        np.testing.assert_allclose(got, value, rtol=1e-5, atol=1e-6)


def test_host_memory_beyond_the_arrays_is_bounded(tmp_path):
    from benchmarks import import_weights as bench

    config = micro(vocab_size=120_000, hidden_size=256, param_dtype="bfloat16")
    directory = tmp_path / "x"
    directory.mkdir()
    files = bench.write_checkpoint(config, directory, 40 << 20)
    assert sum(file.stat().st_size for file in files) > 115 << 20
    row = bench.measure(directory, files, warm=True)
    assert row["beyond_gib"] * bench.GIB < 100 << 20  # four threads hold 16 MiB each
