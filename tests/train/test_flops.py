"""Parameter counts against the published totals, and operations against XLA's own count."""

import dataclasses
from functools import cache
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from k3jax.config import KDAConfig, MLAConfig, ModelConfig, MoEConfig, k3, nano, proxy
from k3jax.model.k3 import K3
from k3jax.train.flops import (
    KDA_CHUNK,
    flops_by_mechanism,
    flops_per_token,
    mfu,
    parameter_counts,
    peak_flops,
    stage_costs,
)

# Small, with one layer of each kind, so that nothing is scanned: XLA counts the body of a loop once.
UNROLLED = ModelConfig(
    vocab_size=1024,
    hidden_size=256,
    num_layers=2,
    mla_layers=(1,),
    dense_size=768,
    attn_res_block_size=2,
    kda=KDAConfig(num_heads=4, head_dim=32),
    mla=MLAConfig(
        num_heads=4, q_lora_rank=64, kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32
    ),
    moe=MoEConfig(num_experts=4, experts_per_token=2, expert_size=256, latent_size=128, implementation="dense"),
)
T = 64


def with_(model: ModelConfig, **changes) -> ModelConfig:
    """Changes of nested fields: `with_(model, kda__num_heads=8)`."""
    for name, value in changes.items():
        outer, _, inner = name.partition("__")
        model = dataclasses.replace(
            model, **{outer: dataclasses.replace(getattr(model, outer), **{inner: value}) if inner else value}
        )
    return model


@cache
def xla_flops(model: ModelConfig, backward: bool) -> float:
    """Operations per token of the compiled forward, or forward and backward, pass."""
    params = jax.eval_shape(lambda: K3(model, rngs=nnx.Rngs(0)))
    tokens = jax.ShapeDtypeStruct((1, T), jnp.int32)
    forward = lambda params, tokens: params(tokens).sum()  # noqa: E731
    cost = jax.jit(jax.value_and_grad(forward) if backward else forward).lower(params, tokens).compile().cost_analysis()
    return cost["flops"] / T


def expected_flops(model: ModelConfig) -> dict[str, int]:
    """Our count of what the unrolled program does: all experts on every token, attention over all T² pairs."""
    flops = flops_by_mechanism(model, 2 * T)
    flops["routed_experts"] = flops["routed_experts"] * model.moe.num_experts // model.moe.experts_per_token
    return flops


def test_published_totals_of_the_released_geometry():
    counts = parameter_counts(k3())
    assert counts.total == 2_779_484_393_568
    assert counts.active_without_embedding == 104_189_530_208
    assert counts.active == counts.active_without_embedding + 163_840 * 7168
    assert counts.by_mechanism["routed_experts"] == 2_722_740_830_208
    assert counts.by_mechanism["mla"] == 5_572_706_304
    assert counts.by_mechanism["kda"] == 30_618_088_704 - 69 * 32  # the release pads A_log


def test_totals_of_nano_and_proxy():
    assert parameter_counts(nano()).total == 3_092_296
    assert parameter_counts(proxy()).total == pytest.approx(1.74e9, rel=5e-3)
    assert parameter_counts(proxy()).active_without_embedding == pytest.approx(0.50e9, rel=1e-2)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"attn_res_block_size": None},
        {"kda__full_rank_output_gate": False},
        {"mla__q_lora_rank": None, "mla__output_gate": False},
        {"moe__latent_size": None, "moe__num_shared_experts": 0},
        {"moe__latent_norm": False, "num_dense_layers": 0},
    ],
)
def test_counts_equal_the_parameters_of_the_model(changes):
    model = with_(nano(), **changes)
    params = jax.eval_shape(lambda: K3(model, rngs=nnx.Rngs(0)))
    counts = parameter_counts(model)
    assert counts.total == sum(x.size for x in jax.tree.leaves(params))
    assert counts.total == sum(counts.by_mechanism.values())


def test_xla_counts_the_same_forward_and_backward_operations():
    """XLA adds elementwise work and leaves out the gradient of the embedding input: a few per cent."""
    expected = sum(expected_flops(UNROLLED).values())
    assert xla_flops(UNROLLED, backward=True) == pytest.approx(expected, rel=0.05)
    assert 1.0 <= xla_flops(UNROLLED, backward=False) / (expected / 3) < 1.05


def test_xla_counts_the_same_recurrence_in_one_chunk():
    """The products of one chunk, written as whole squares, so that each triangle counts twice; without the inverse."""
    C, K = KDA_CHUNK, 32

    def chunk(q, k, v, state):
        A, B = k @ k.T, q @ k.T
        v_new = A @ v - (A @ k) @ state
        return q @ state + B @ v_new, k.T @ v_new

    rows, state = jax.ShapeDtypeStruct((C, K), jnp.float32), jax.ShapeDtypeStruct((K, K), jnp.float32)
    xla = jax.jit(chunk).lower(rows, rows, rows, state).compile().cost_analysis()["flops"]
    model = with_(UNROLLED, kda__head_dim=K)  # one KDA layer
    ours = C * flops_by_mechanism(model, T)["kda_recurrence"] / (3 * model.kda.num_heads)
    triangles, inverse = 5 * C * C * K, C**3 / 3
    assert xla == pytest.approx(ours + triangles - inverse, rel=0.01)


@pytest.mark.parametrize(
    "change",
    [
        {"vocab_size": 2048},
        {"dense_size": 1536},
        {"moe__expert_size": 512},
        {"moe__latent_size": 256},
        {"kda__num_heads": 8},
        {"mla__num_heads": 8},
        {"mla__q_lora_rank": 128, "mla__kv_lora_rank": 128},
    ],
)
def test_xla_sees_the_same_growth_of_every_mechanism(change):
    """A wrong head count or field in one mechanism would drown in the total.

    The recurrence may do its useful work once more: upper triangles, tiles, decays.
    """
    larger, smaller = expected_flops(with_(UNROLLED, **change)), expected_flops(UNROLLED)
    ours = (sum(larger.values()) - sum(smaller.values())) / 3
    recurrence = (larger["kda_recurrence"] - smaller["kda_recurrence"]) / 3
    xla = xla_flops(with_(UNROLLED, **change), backward=False) - xla_flops(UNROLLED, backward=False)
    assert ours <= xla <= 1.03 * ours + recurrence


def test_published_formula_gives_the_known_cost_of_the_proxy():
    """6 × 0.503B + 4 layers · 6 · 12 · 320 · 2048 is 3.2 GFLOP; the recurrence adds 1.4 %."""
    flops = flops_by_mechanism(proxy(), 4096)
    assert flops["mla_attention"] == 4 * 6 * 12 * (192 + 128) * 4096 // 2
    assert sum(flops.values()) == pytest.approx(3.25e9, rel=2e-3)
    assert flops["kda_recurrence"] / flops_per_token(proxy(), 4096) == pytest.approx(0.014, rel=0.05)
    without = {k: v for k, v in flops.items() if k not in ("mla_attention", "kda_recurrence")}
    matrices = parameter_counts(proxy()).active_without_embedding
    assert sum(without.values()) == pytest.approx(6 * matrices, rel=2e-3)


def test_costs_of_layers_and_head_add_up():
    for model in (k3(), nano(), nano(num_dense_layers=9)):
        costs = stage_costs(model, 512)
        assert len(costs) == model.num_layers
        assert sum(costs) == flops_per_token(model, 512)


def test_only_attention_grows_with_the_sequence():
    short, long = (flops_by_mechanism(k3(), length) for length in (8192, 65536))
    assert {name for name in short if short[name] != long[name]} == {"mla_attention"}
    assert long["mla_attention"] == 8 * short["mla_attention"]


def fake_mesh(kind: str, count: int, platform: str = "gpu"):
    device = SimpleNamespace(device_kind=kind, platform=platform, process_index=0)
    return SimpleNamespace(devices=np.array([device] * count))


@pytest.mark.parametrize(
    ("kind", "teraflops"),
    [
        ("NVIDIA H200", 989.4),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H20", 148),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
        ("TPU v5 lite", 197),
    ],
)
def test_peak_of_known_devices(kind, teraflops):
    peak = peak_flops(fake_mesh(kind, 8))
    assert kind in peak.describe()
    assert peak.flops == pytest.approx(8 * teraflops * 1e12)


def test_peak_says_what_it_divides_by():
    assert "float32" in peak_flops(fake_mesh("NVIDIA H200", 1), "float32").describe()
    unknown = peak_flops(fake_mesh("Abacus 9000", 1))
    assert unknown.flops is None
    assert "Abacus 9000" in unknown.describe()
    assert mfu(1e3, 1e9, unknown) is None
    assert mfu(31.3e3, 3.19e9, peak_flops(fake_mesh("NVIDIA H200", 1))) == pytest.approx(0.101, rel=0.01)
    cpu = peak_flops(jax.make_mesh((8,), ("data",)))
    assert cpu.flops is not None
    assert 1e8 < cpu.flops < 1e14
    assert "measured" in cpu.describe()
