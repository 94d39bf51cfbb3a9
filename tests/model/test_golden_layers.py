"""Layers against vectors of an independent PyTorch implementation, forward and every gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import config_of_case, fill, flat_arrays, golden_cases, read_mixer, relmax, shapes_of

from k3jax.checkpoint import layout
from k3jax.model.kda import KDA
from k3jax.model.mla import MLA
from k3jax.model.mlp import MLP
from k3jax.model.moe import LatentMoE
from k3jax.ops.attn_res import attn_res, mix, read_bank
from k3jax.ops.norms import rms_norm
from k3jax.ops.router import route
from k3jax.ops.situ import situ_glu


def check_layer(layer, apply, data, expected_grads, out_tol, grad_tol, valid=None):
    """out.y and every gradient of sum(y · w) against the golden arrays."""
    w, x = jnp.asarray(data["in.w"]), jnp.asarray(data["in.x"])
    keep = np.ones(w.shape[:2], bool) if valid is None else valid

    def loss(layer, x):
        y = jnp.where(keep[..., None], apply(layer, x), 0)
        return jnp.sum(y * w), y

    (_, y), (d_layer, d_x) = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(layer, x)
    assert relmax(y, np.where(keep[..., None], data["out.y"], 0)) <= out_tol
    assert relmax(d_x, data["grad.x"]) <= grad_tol
    ours = flat_arrays(d_layer)
    assert set(ours) == set(expected_grads)
    for name, value in expected_grads.items():
        assert relmax(ours[name], value) <= grad_tol, name


@pytest.mark.parametrize("case", golden_cases("g2_kda_layer"))
@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_kda_layer_matches_golden(golden, case, implementation):
    data, config = golden("g2_kda_layer", case), config_of_case(golden_cases("g2_kda_layer")[case])
    config = jax.tree_util.tree_map(lambda c: c, config)
    layer = KDA(_with_implementation(config, implementation), jax.random.key(0))
    entries, shapes = layout.kda_entries(config.kda), shapes_of(layer)
    layer = fill(layer, read_mixer(entries, shapes, data, "param"))
    ids = None
    if "in.attention_mask" in data:
        ids = data["in.attention_mask"].astype(np.int32)
    elif "in.cu_seqlens" in data:
        ids = np.repeat(np.arange(1, len(data["in.cu_seqlens"])), np.diff(data["in.cu_seqlens"]))[None].astype(np.int32)
    grads = read_mixer(entries, shapes, data, "grad")
    check_layer(layer, lambda m, x: m(x, ids, None)[0], data, grads, 3e-5, 1e-4, None if ids is None else ids != 0)


def _with_implementation(config, implementation):
    from dataclasses import replace

    return replace(config, kda=replace(config.kda, implementation=implementation))


def _mla_arrays(config, shapes, data, group):
    out = read_mixer(layout.mla_entries(config.mla), shapes, data, group)
    mla = config.mla
    joined = data[f"{group}.kv_b_proj.weight"].T.reshape(mla.kv_lora_rank, mla.num_heads, -1)
    return out | {"k_b": joined[..., : mla.qk_nope_head_dim], "v_b": joined[..., mla.qk_nope_head_dim :]}


@pytest.mark.parametrize("case", golden_cases("g3_mla"))
def test_mla_layer_matches_golden(golden, case):
    data, config = golden("g3_mla", case), config_of_case(golden_cases("g3_mla")[case])
    layer = MLA(config, jax.random.key(0))
    shapes = shapes_of(layer)
    layer = fill(layer, _mla_arrays(config, shapes, data, "param"))
    ids = data["in.doc_ids"].astype(np.int32) if "in.doc_ids" in data else None
    grads = _mla_arrays(config, shapes, data, "grad")
    check_layer(layer, lambda m, x: m(x, ids, None)[0], data, grads, 1e-5, 5e-5, None if ids is None else ids != 0)


@pytest.mark.parametrize("case", golden_cases("g4_attnres"))
def test_attention_residuals_match_golden(golden, case):
    data, spec = golden("g4_attnres", case), golden_cases("g4_attnres")[case]
    bank = jnp.asarray(data["in.block_residual"]).transpose(1, 0, 2)[:, None]
    prefix, w = jnp.asarray(data["in.prefix_sum"])[None], jnp.asarray(data["in.w"])[None]
    norm, proj = jnp.asarray(data["param.res_norm.weight"]), jnp.asarray(data["param.res_proj.weight"])[0]

    def direct(bank, prefix, norm, proj):
        mixed, weights = attn_res(bank, prefix, norm * proj, spec["eps"])
        return jnp.sum(mixed * w), (mixed, weights)

    def two_phase(bank, prefix, norm, proj):
        query = norm * proj
        (read,) = read_bank(bank, [query], spec["eps"])
        mixed, weights = mix(bank, read, prefix, query, spec["eps"])
        return jnp.sum(mixed * w), (mixed, weights)

    for fn in (direct, two_phase) if spec["prior_blocks"] else (direct,):
        (_, (mixed, weights)), grads = jax.value_and_grad(fn, argnums=(0, 1, 2, 3), has_aux=True)(
            bank, prefix, norm, proj
        )
        assert relmax(mixed[0], data["out.mixed"]) <= 1e-5
        assert relmax(weights[:, 0].T, data["mid.probs"]) <= 1e-5
        if not spec["prior_blocks"]:
            continue
        assert relmax(grads[0][:, 0].transpose(1, 0, 2), data["grad.block_residual"]) <= 1e-4
        assert relmax(grads[1][0], data["grad.prefix_sum"]) <= 1e-4
        assert relmax(grads[2], data["grad.res_norm.weight"]) <= 1e-4
        assert relmax(grads[3], data["grad.res_proj.weight"][0]) <= 1e-4


G5 = golden_cases("g5_moe")


@pytest.mark.parametrize("case", [c for c in G5 if c.startswith("situ")])
def test_situ_matches_golden(golden, case):
    data, spec = golden("g5_moe", case), G5[case]

    def loss(gate_up):
        y = situ_glu(*jnp.split(gate_up, 2, axis=-1), spec["beta"], spec["linear_beta"])
        return jnp.sum(y * data["in.w"]), y

    (_, y), grad = jax.value_and_grad(loss, has_aux=True)(jnp.asarray(data["in.gate_up"]))
    assert relmax(y, data["out.y"]) <= 1e-5
    assert relmax(grad, data["grad.gate_up"]) <= 5e-5


@pytest.mark.parametrize("case", [c for c in G5 if c.startswith("rmsnorm")])
def test_rms_norm_matches_golden(golden, case):
    data = golden("g5_moe", case)
    name = next(k for k in data if k.startswith("param."))

    def loss(x, weight):
        y = rms_norm(x, weight, G5[case]["eps"])
        return jnp.sum(y * data["in.w"]), y

    (_, y), grads = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(jnp.asarray(data["in.x"]), data[name])
    assert relmax(y, data["out.y"]) <= 1e-5
    assert relmax(grads[0], data["grad.x"]) <= 5e-5
    assert relmax(grads[1], data[name.replace("param", "grad")]) <= 5e-5


def test_dense_mlp_matches_golden(golden):
    data, config = golden("g5_moe", "dense_mlp"), config_of_case(G5["dense_mlp"])
    layer = MLP(config, config.dense_size, jax.random.key(0))
    entries, shapes = layout.mlp_entries("", "ffn"), shapes_of(layer)
    layer = fill(layer, read_mixer(entries, shapes, data, "param"))
    check_layer(layer, lambda m, x: m(x), data, read_mixer(entries, shapes, data, "grad"), 1e-5, 5e-5)


@pytest.mark.parametrize("case", [c for c in G5 if c.startswith("router")])
def test_router_matches_golden(golden, case):
    data, config = golden("g5_moe", case), config_of_case(G5[case])
    moe, x = config.moe, jnp.asarray(data["in.x"])
    weight = jnp.asarray(data[next(k for k in data if k.startswith("param.") and k.endswith("weight"))])
    bias = jnp.asarray(data[next(k for k in data if k.endswith("bias"))])

    def dense(x, weight):
        routing = route(
            x @ weight.T,
            bias,
            jnp.arange(x.shape[0]),
            experts_per_token=moe.experts_per_token,
            activation=moe.router_activation,
            renormalize=moe.renormalize,
            scaling_factor=moe.routed_scaling_factor,
            num_groups=moe.num_groups,
            topk_groups=moe.topk_groups,
        )
        one_hot = jax.nn.one_hot(routing.experts_NK, moe.num_experts)
        out = jnp.einsum("nk,nke->ne", routing.weights_NK, one_hot)
        return jnp.sum(out * data["in.w_dense"]), (out, routing.experts_NK)

    (_, (out, experts)), grads = jax.value_and_grad(dense, argnums=(0, 1), has_aux=True)(x, weight)
    np.testing.assert_array_equal(np.sort(experts, axis=-1), data["out.topk_ids_sorted"])
    assert relmax(out, data["out.dense_weights"]) <= 1e-5
    assert relmax(grads[0], data["grad.x"]) <= 5e-5
    assert relmax(grads[1], data[next(k for k in data if k.startswith("grad.") and k.endswith("weight"))]) <= 5e-5


@pytest.mark.parametrize("case", [c for c in G5 if c.startswith("moe")])
@pytest.mark.parametrize("implementation", ["dense", "blocked", "ragged"])
def test_latent_moe_matches_golden(golden, case, implementation):
    from dataclasses import replace

    data, config = golden("g5_moe", case), config_of_case(G5[case])
    config = replace(config, moe=replace(config.moe, implementation=implementation))
    layer = LatentMoE(config, jax.random.key(0))
    entries, shapes = layout.moe_entries(config.moe), shapes_of(layer)

    def arrays(group):
        out = read_mixer(entries, shapes, data, group)
        out["w1"], out["w3"] = np.split(data[f"{group}.experts.gate_and_up_projs"], 2, axis=-1)
        return out | {"w2": data[f"{group}.experts.down_projs"]}

    layer = fill(layer, arrays("param"))
    B, T = data["in.x"].shape[:2]
    valid = data["in.padding_mask"] == 0 if "in.padding_mask" in data else np.ones((B, T), bool)
    positions = jnp.broadcast_to(jnp.arange(T), (B, T))
    bias = jnp.asarray(data["param.gate.e_score_correction_bias"])

    def apply(layer, x):
        return layer(x, positions, jnp.asarray(valid), bias, False)[0]

    check_layer(layer, apply, data, arrays("grad"), 1e-5, 5e-5)
