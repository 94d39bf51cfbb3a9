"""The whole text model against vectors of an independent PyTorch implementation."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import GOLDEN, golden_cases, relmax
from safetensors.numpy import load_file

from k3jax.checkpoint import hf
from k3jax.checkpoint.hf_config import config_from_hf
from k3jax.checkpoint.layout import CheckpointFormatError

TINY = GOLDEN / "g9_checkpoint" / "tiny_k3"


@pytest.fixture(scope="module")
def tiny():
    return hf.load_hf(TINY)


def check_logits(logits, reference, valid=None):
    """Relative L2 below 1.5e-4 and maximum below 4e-3, where tokens are real."""
    keep = np.ones(reference.shape[:2], bool) if valid is None else valid
    error = (np.asarray(logits, np.float64) - reference)[keep]
    assert np.linalg.norm(error) / np.linalg.norm(reference[keep]) <= 1.5e-4
    assert np.max(np.abs(error)) <= 4e-3


@pytest.mark.parametrize("case", ["plain", "padded", "packed", "short_t3", "long"])
def test_text_logits_match_golden(golden, tiny, case):
    data, (model, bias) = golden("g7_text", case), tiny
    ids = data.get("in.doc_ids", data.get("in.attention_mask"))
    segment_ids = None if ids is None else jnp.asarray(ids, jnp.int32)
    logits = jax.jit(lambda m, t: m(t, segment_ids, router_bias=bias))(model, data["in.input_ids"])
    check_logits(logits, data["ref64.logits"], None if ids is None else ids != 0)


@pytest.mark.slow  # the layer test compares all three in every run
@pytest.mark.parametrize("implementation", ["dense", "blocked", "ragged"])
def test_text_logits_do_not_depend_on_the_expert_implementation(golden, implementation):
    data = golden("g7_text", "plain")
    config = config_from_hf(json.loads((TINY / "config.json").read_text()))
    model, bias = hf.load_hf(TINY, moe=replace(config.moe, implementation=implementation))
    check_logits(jax.jit(lambda m, t: m(t, router_bias=bias))(model, data["in.input_ids"]), data["ref64.logits"])


def test_model_without_attention_residuals_matches_golden(golden):
    data = golden("g7_text", "no_attn_res")
    tensors = {k: v for k, v in load_file(TINY / "model.safetensors").items() if "_res_" not in k}
    config = config_from_hf(json.loads((TINY / "config.json").read_text()), attn_res_block_size=None)
    model, bias = hf.from_hf(tensors, config)
    check_logits(jax.jit(lambda m, t: m(t, router_bias=bias))(model, data["in.input_ids"]), data["ref64.logits"])


def test_residual_stream_matches_golden(golden, tiny):
    data, (model, bias) = golden("g7_text", "plain"), tiny
    x, aux = jax.jit(lambda m, t: m.features(t, router_bias=bias, depth=True))(model, data["in.input_ids"])
    assert relmax(x, data["mid.final_norm"]) <= 1.5e-4
    np.testing.assert_allclose(np.sum(aux.depth, axis=1), 1.0, atol=1e-5)


def test_loss_and_every_gradient_match_golden(golden, tiny):
    data, (model, bias) = golden("g7_text", "plain"), tiny
    case = golden_cases("g7_text")["plain"]
    tokens, labels = jnp.asarray(data["in.input_ids"]), jnp.asarray(data["in.labels"])[:, 1:]

    def loss_fn(model):
        logp = jax.nn.log_softmax(model(tokens, router_bias=bias)[:, :-1])
        picked = jnp.take_along_axis(logp, jnp.maximum(labels, 0)[..., None], axis=-1)[..., 0]
        keep = labels != -100
        return -jnp.sum(jnp.where(keep, picked, 0)) / jnp.sum(keep)

    loss, grads = jax.jit(jax.value_and_grad(loss_fn))(model)
    assert abs(float(loss) - float(data["out.loss"][0])) <= 1e-4
    ours = {name: value for name, value in hf.to_hf(grads) if name.startswith("language_model.")}
    pad = json.loads((TINY / "config.json").read_text())["pad_token_id"]
    ours["language_model.model.embed_tokens.weight"] = ours["language_model.model.embed_tokens.weight"].copy()
    ours["language_model.model.embed_tokens.weight"][pad] = 0  # the peer's padding row gets no gradient
    names = case["grad_names"]
    norms = np.array([np.linalg.norm(ours[name]) for name in names])
    relative = np.abs(norms - data["grad_norm"]) / np.maximum(data["grad_norm"], 1e-12)
    assert set(ours) - set(names) == {
        f"language_model.model.layers.0.self_attention_res_{part}.weight" for part in ("proj", "norm")
    }
    assert relative.max() <= 1e-2, names[int(relative.argmax())]
    assert np.median(relative) <= 2e-3
    for key, value in data.items():
        if key.startswith("fullgrad."):
            name = key.removeprefix("fullgrad.")
            mine = ours[name][: value.size] if name.endswith("A_log") else ours[name]
            assert relmax(mine, value) <= 1e-2, name


def test_released_layout_round_trip_is_exact(tiny):
    model, _ = tiny
    reference = load_file(TINY / "model.safetensors")
    for name, value in hf.to_hf(model):
        np.testing.assert_array_equal(value, reference[name], err_msg=name)


def test_a_log_padding_is_not_read_and_its_values_are_per_head(tiny):
    tensors = load_file(TINY / "model.safetensors")
    name = "language_model.model.layers.1.self_attn.A_log"
    config = tiny[0].config
    changed = dict(tensors)
    changed[name] = tensors[name].copy()
    changed[name][config.kda.num_heads] = 1.0
    with pytest.raises(CheckpointFormatError, match="zero padding"):
        hf.from_hf(changed, config)
    changed[name] = tensors[name].copy()
    changed[name][0] += 1.0
    difference = hf.from_hf(changed, config)[0].layer(1).mixer.A_log[...] - tiny[0].layer(1).mixer.A_log[...]
    np.testing.assert_array_equal(np.asarray(difference) != 0, [True] + [False] * (config.kda.num_heads - 1))


def test_missing_and_misshapen_tensors_are_named(tiny):
    tensors = load_file(TINY / "model.safetensors")
    name = "language_model.model.layers.2.self_attn.q_proj.weight"
    with pytest.raises(CheckpointFormatError, match="layers.2.self_attn.q_proj"):
        hf.from_hf({k: v for k, v in tensors.items() if k != name}, tiny[0].config)
    with pytest.raises(CheckpointFormatError, match="layers.2.self_attn.q_proj"):
        hf.from_hf(tensors | {name: tensors[name][:-1]}, tiny[0].config)
