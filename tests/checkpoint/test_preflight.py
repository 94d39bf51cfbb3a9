"""Whether a directory is what its config.json promises, before any tensor is read."""

import json
import os
import time

import ml_dtypes
import numpy as np
import pytest
from released import INDEX, LM, PACKED, TINY, changed, copied, read, values_of, write

from k3jax.checkpoint.hf_config import config_from_hf
from k3jax.checkpoint.layout import CheckpointFormatError
from k3jax.checkpoint.preflight import preflight
from k3jax.config import ConfigError

LAYER = LM + "model.layers.{}."


def test_golden_directories_pass():
    plain, packed = preflight(TINY), preflight(PACKED)
    assert not plain.packed
    assert packed.packed
    assert plain.config.param_dtype == "float32"
    assert packed.config.param_dtype == "bfloat16"
    assert sum(len(set(one.names())) for one in packed.leaves if one.of_tower) == 18 + 2 * 2  # wqkv is three of ours
    assert any("vision" in line for line in packed.lines())


def test_every_mismatch_is_reported_at_once(tmp_path):
    missing = LAYER.format(2) + "self_attn.q_proj.weight"
    misshapen = LAYER.format(1) + "block_sparse_moe.experts.3.w1.weight"
    wrong = LM + "model.norm.weight"

    def change(tensors):
        del tensors[missing]
        tensors["vision_tower.extra.weight"] = np.ones(3, np.float32)
        tensors[misshapen] = tensors[misshapen][:-1]
        tensors[wrong] = tensors[wrong].astype(np.float16)
        del tensors["mm_projector.post_norm.weight"]

    with pytest.raises(CheckpointFormatError) as caught:
        preflight(changed(TINY, tmp_path / "x", change))
    for word in (missing, misshapen, wrong, "vision_tower.extra", "mm_projector.post_norm", "F16", ".safetensors"):
        assert word in str(caught.value)
    assert len(caught.value.problems) == 5


def test_a_missing_and_a_truncated_shard_are_named_with_a_tensor_of_theirs(tmp_path):
    directory = copied(PACKED, tmp_path / "x")
    first, second, _ = sorted(directory.glob("*.safetensors"))
    first.unlink()
    os.truncate(second, second.stat().st_size - 1)
    with pytest.raises(CheckpointFormatError) as caught:
        preflight(directory)
    lost, cut = caught.value.problems
    assert first.name in lost
    assert "does not exist" in lost
    assert LM in lost
    assert second.name in cut
    assert "truncated" in cut


def test_another_geometry_is_refused(tmp_path):
    values = values_of(TINY)
    values["text_config"]["hidden_size"] = values["vision_config"]["text_hidden_size"] = 32
    with pytest.raises(CheckpointFormatError, match=r"embed_tokens.weight: shape \[160, 64\].*expected \[160, 32\]"):
        preflight(write(tmp_path / "x", read(TINY), values))


def test_a_tensor_in_another_file_than_the_index_says_is_named(tmp_path):
    directory = copied(PACKED, tmp_path / "x")
    index = json.loads((directory / INDEX).read_text())
    name = next(iter(index["weight_map"]))
    files = sorted(set(index["weight_map"].values()) - {index["weight_map"][name]})
    index["weight_map"][name] = files[0]
    (directory / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointFormatError, match=name):
        preflight(directory)


@pytest.mark.parametrize(
    ("field", "value"),
    [("format", "nvfp4-pack-quantized"), ("num_bits", 8), ("group_size", 16), ("quant_method", "fp8")],
)
def test_unknown_quantisation_is_refused_by_field(tmp_path, field, value):
    values = values_of(PACKED)
    declared = values["text_config"]["quantization_config"]
    weights = declared["config_groups"]["group_0"]["weights"]
    (weights if field in weights else declared)[field] = value
    directory = copied(PACKED, tmp_path / "x")
    (directory / "config.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointFormatError, match=f"{field}.* is {value!r}"):
        preflight(directory)


@pytest.mark.parametrize("declared", ["mxfp4", {"config_groups": [1]}, {"config_groups": {"group_0": "x"}}])
def test_a_quantisation_of_the_wrong_types_is_refused(tmp_path, declared):
    values = values_of(PACKED)
    values["text_config"]["quantization_config"] = declared
    directory = copied(PACKED, tmp_path / "x")
    (directory / "config.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointFormatError, match="quantization_config is none that can be read"):
        preflight(directory)


@pytest.mark.parametrize("field", ["text_config", "linear_attn_config", "vision_config"])
def test_a_config_with_null_for_an_object_is_refused(tmp_path, field):
    values = values_of(PACKED)
    (values if field in values else values["text_config"])[field] = None
    directory = copied(PACKED, tmp_path / "x")
    (directory / "config.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointFormatError, match=r"config\.json"):
        preflight(directory)


@pytest.mark.parametrize("weight_map", [None, ["a"], {"x": 3}, {"x": None}])
def test_an_index_of_the_wrong_types_is_refused(tmp_path, weight_map):
    directory = copied(PACKED, tmp_path / "x")
    (directory / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointFormatError, match="weight_map does not give"):
        preflight(directory)


def test_packed_tensors_without_a_word_in_the_config_are_refused(tmp_path):
    values = values_of(PACKED)
    del values["text_config"]["quantization_config"]
    directory = copied(PACKED, tmp_path / "x")
    (directory / "config.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointFormatError, match="quantization_config"):
        preflight(directory)


def test_other_floats_than_the_releases_need_a_word(tmp_path):
    def change(tensors):
        for name in tensors:
            tensors[name] = tensors[name].astype(ml_dtypes.bfloat16)

    directory = changed(TINY, tmp_path / "x", change)
    with pytest.raises(CheckpointFormatError, match="dtype BF16"):
        preflight(directory)
    preflight(directory, any_float=True)


@pytest.mark.parametrize(
    ("field", "value", "word"),
    [("hidden_act", "gelu", "hidden_act"), ("mla_use_nope", False, "mla_use_nope"), ("vocab_size", None, "vocab_size")],
)
def test_a_config_that_the_model_does_not_implement_is_refused(tmp_path, field, value, word):
    values = values_of(TINY)
    text = values["text_config"]
    if field == "hidden_act":
        del text["activation_situ_beta"]
    text.pop(field, None) if value is None else text.update({field: value})
    with pytest.raises(CheckpointFormatError, match=word):
        preflight(write(tmp_path / "x", read(TINY), values))


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("merge_kernel_size", ([], 2, [2, 3], [2.0, 2.0], None)),
        ("vt_num_attention_heads", (0, -1, "2", 2.5)),
        ("patch_size", (0, 1.5, "14", True, None)),
        ("init_pos_emb_width", (0, 4.0, float("nan"))),
        ("projector_ln_eps", (0, "x", [], None, float("nan"))),
        ("vt_hidden_size", (15, 1.0)),
        ("vt_num_hidden_layers", (-1, 2.0, [])),
        ("activation_func", ("relu", None)),
    ],
)
def test_every_wrong_field_of_a_tower_is_refused(field, values):
    for value in values:
        config = values_of(TINY)
        config["vision_config"][field] = value
        with pytest.raises((CheckpointFormatError, ConfigError)):
            config_from_hf(config)


@pytest.mark.parametrize(
    ("field", "value"), [("vocab_size", 160.0), ("rms_norm_eps", "x"), ("num_hidden_layers", True)]
)
def test_a_field_of_the_text_model_has_its_type(field, value):
    config = values_of(TINY)
    config["text_config"][field] = value
    with pytest.raises((CheckpointFormatError, ConfigError)):
        config_from_hf(config)


def _released_tensors() -> dict[str, tuple[str, tuple[int, ...]]]:
    """Names, dtypes and shapes of the release, written down from its description and not from `layout`."""
    D, H, P, E, L, F, S = 7168, 96, 12288, 896, 3584, 3072, 6144
    out: dict[str, tuple[str, tuple[int, ...]]] = {}
    for l in range(93):
        p, a = f"{LM}model.layers.{l}.", f"{LM}model.layers.{l}.self_attn."
        for name in ("input_layernorm", "post_attention_layernorm", "self_attention_res_norm", "mlp_res_norm"):
            out[f"{p}{name}.weight"] = ("BF16", (D,))
        for name in ("self_attention_res_proj", "mlp_res_proj"):
            out[f"{p}{name}.weight"] = ("BF16", (1, D))
        matrices = {"g_proj": (P, D), "o_proj": (D, P)}
        if l % 4 == 3 or l == 92:
            matrices |= {"q_a_proj": (1536, D), "q_b_proj": (18432, 1536), "kv_a_proj_with_mqa": (576, D)}
            matrices |= {"kv_b_proj": (24576, 512), "q_a_layernorm": (1536,), "kv_a_layernorm": (512,)}
        else:
            matrices |= {f"{x}_proj": (P, D) for x in "qkv"} | {
                "f_a_proj": (128, D),
                "f_b_proj": (P, 128),
                "b_proj": (H, D),
            }
            out |= {f"{a}{x}_conv1d.weight": ("F32", (P, 1, 4)) for x in "qkv"}
            out |= {a + "A_log": ("F32", (128,)), a + "dt_bias": ("F32", (P,)), a + "o_norm.weight": ("F32", (128,))}
        out |= {f"{a}{name}.weight": ("BF16", shape) for name, shape in matrices.items()}
        m = p + ("block_sparse_moe." if l else "mlp.")
        shared, width = (m + "shared_experts.", S) if l else (m, 33792)
        out |= {f"{shared}{x}_proj.weight": ("BF16", (width, D)) for x in ("gate", "up")}
        out[shared + "down_proj.weight"] = ("BF16", (D, width))
        if l:
            out[m + "gate.weight"] = ("BF16", (E, D))
            out[m + "gate.e_score_correction_bias"] = ("F32", (E,))
            out[m + "routed_expert_down_proj.weight"] = ("BF16", (L, D))
            out[m + "routed_expert_norm.weight"] = ("BF16", (L,))
            out[m + "routed_expert_up_proj.weight"] = ("BF16", (D, L))
            for e in range(E):
                for w, rows, columns in (("w1", F, L), ("w2", L, F), ("w3", F, L)):
                    out[f"{m}experts.{e}.{w}.weight_packed"] = ("U8", (rows, columns // 2))
                    out[f"{m}experts.{e}.{w}.weight_scale"] = ("U8", (rows, columns // 32))
    for name in ("embed_tokens", "lm_head"):
        out[LM + ("model." if name == "embed_tokens" else "") + name + ".weight"] = ("BF16", (163840, D))
    out[LM + "model.norm.weight"] = out[LM + "model.output_attn_res_norm.weight"] = ("BF16", (D,))
    out[LM + "model.output_attn_res_proj.weight"] = ("BF16", (1, D))
    tower = "vision_tower."
    vision = {tower + "patch_embed.proj": (1024, 3, 14, 14), tower + "patch_embed.pos_emb": (64, 64, 1024)}
    vision |= {tower + "encoder.final_layernorm": (1024,), "mm_projector.post_norm": (D,)}
    vision |= {"mm_projector.proj.0": (4096, 4096), "mm_projector.proj.2": (D, 4096)}
    for i in range(27):
        b = f"{tower}encoder.blocks.{i}."
        vision |= {b + "norm0": (1024,), b + "norm1": (1024,), b + "wqkv": (4608, 1024), b + "wo": (1024, 1536)}
        vision |= {b + "mlp.fc0": (4096, 1024), b + "mlp.fc1": (1024, 4096)}
    return out | {name + ".weight": ("BF16", shape) for name, shape in vision.items()}


def _released_config() -> dict:
    values = values_of(PACKED)
    text = values["text_config"]
    text |= {"vocab_size": 163840, "hidden_size": 7168, "num_hidden_layers": 93, "intermediate_size": 33792}
    text |= {"attn_res_block_size": 12, "num_experts": 896, "num_experts_per_token": 16, "moe_intermediate_size": 3072}
    text |= {"routed_expert_hidden_size": 3584, "num_attention_heads": 96, "q_lora_rank": 1536, "kv_lora_rank": 512}
    text |= {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    full = [*range(4, 93, 4), 93]
    text["linear_attn_config"] |= {"full_attn_layers": full, "head_dim": 128, "num_heads": 96}
    text["linear_attn_config"]["kda_layers"] = [l for l in range(1, 94) if l not in full]
    values["vision_config"] |= {"patch_size": 14, "vt_hidden_size": 1024, "vt_intermediate_size": 4096}
    values["vision_config"] |= {
        "qkv_hidden_size": 1536,
        "vt_num_hidden_layers": 27,
        "vt_num_attention_heads": 12,
        "text_hidden_size": 7168,
    }
    values["vision_config"] |= {"mm_hidden_size": 1024, "init_pos_emb_height": 64, "init_pos_emb_width": 64}
    return values


@pytest.mark.slow
def test_the_full_geometry_preflights_in_under_thirty_seconds(tmp_path):
    """497,220 tensors in 96 files that are as long as the release's, and hold nothing."""
    tensors = _released_tensors()
    sizes = {"U8": 1, "BF16": 2, "F32": 4}
    files: dict[str, dict] = {}
    for name in tensors:
        words = name.split(".")
        number = int(words[3]) + 1 if "layers" in words else 94 if name.startswith(LM) else 95 + ("vision" in name)
        files.setdefault(f"model-{number:05}-of-000096.safetensors", {})[name] = tensors[name]
    total = 0
    for file, held in files.items():
        at, header = 0, {}
        for name, (dtype, shape) in held.items():
            end = at + sizes[dtype] * int(np.prod(shape))
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, end]}
            at = end
        text = json.dumps(header).encode()
        with (tmp_path / file).open("wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            out.truncate(8 + len(text) + at)
        total += at
    assert len(tensors) == 497_220
    assert total == 1_560_860_324_864
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {n: f for f, held in files.items() for n in held}}))
    (tmp_path / "config.json").write_text(json.dumps(_released_config()))
    begin = time.perf_counter()
    found = preflight(tmp_path)
    seconds = time.perf_counter() - begin
    print(f"{seconds:.1f} s")
    assert seconds < 30
    assert found.total_bytes == total
    assert found.packed
    assert len({name for one in found.leaves if one.of_tower for name in one.names()}) == 168
