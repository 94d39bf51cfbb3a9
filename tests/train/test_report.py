"""What a run says at its start about what runs."""

import dataclasses

import jax
import pytest
from micro import micro_config, micro_model

from k3jax.config import ConfigError, DataConfig, OptimizerConfig, RunConfig, proxy
from k3jax.ops import gated_norm_gpu, mosaic, newton_schulz, short_conv_gpu
from k3jax.ops.attention import cudnn, peak
from k3jax.ops.kda import decode, pallas
from k3jax.train import loop
from k3jax.train.report import implementations

OPS = {"kda", "kda, decoding", "short convolution", "gated norm", "attention", "largest logit", "experts"} | {
    "attention residuals",
    "cross-entropy",
    "newton-schulz",
}


def test_every_op_is_named(tmp_path):
    assert implementations(micro_config(tmp_path, tmp_path)) == dict.fromkeys(OPS, "xla") | {
        "kda": "xla (chunks of 16)",
        "largest logit": "with attention",
        "experts": "blocked",
        "cross-entropy": "chunked (512 tokens)",
        "newton-schulz": "xla (float32; of the experts, 16 × 16)",
    }
    plain = micro_config(tmp_path, tmp_path, model=micro_model(attn_res_block_size=None))
    assert implementations(plain)["attention residuals"] == "none (plain residuals)"


def test_kernels_are_named_where_they_run(monkeypatch):
    for module in (mosaic, decode, pallas, gated_norm_gpu, newton_schulz, short_conv_gpu):
        monkeypatch.setattr(module, "why_not_here", lambda: None)
    monkeypatch.setattr(cudnn, "refusal", lambda *_: None)
    monkeypatch.setattr(peak, "refusal", lambda *_: None)
    muon = OptimizerConfig(muon_ns_dtype="bfloat16")
    config = RunConfig(proxy(), DataConfig(sequence_length=4096, batch_size=4), optimizer=muon)
    assert implementations(config) == dict.fromkeys(OPS, "pallas") | {
        "attention": "cudnn",
        "largest logit": "mosaic",
        "attention residuals": "xla forward, pallas backward",
        "cross-entropy": "chunked (512 tokens)",
        "newton-schulz": "pallas (bfloat16; of the experts, 768 × 768)",
    }
    short = dataclasses.replace(config, data=DataConfig(sequence_length=60, batch_size=4))
    assert implementations(short)["short convolution"] == "xla"
    asked_for = dataclasses.replace(proxy().kda, implementation="pallas")
    assert implementations(dataclasses.replace(config, model=proxy(kda=asked_for)))["kda"] == "pallas"
    named = dataclasses.replace(proxy().kda, implementation="xla")
    plain = implementations(dataclasses.replace(config, model=proxy(kda=named)))
    assert {plain[op] for op in ("kda, decoding", "short convolution", "gated norm")} == {"xla"}


@pytest.mark.parametrize(
    ("part", "name"), [("kda", "pallas"), ("mla", "cudnn"), ("moe", "pallas")], ids=["kda", "attention", "experts"]
)
def test_an_implementation_that_cannot_run_stops_the_run_at_once(tmp_path, part, name):
    model = micro_model()
    model = dataclasses.replace(model, **{part: dataclasses.replace(getattr(model, part), implementation=name)})
    mesh = jax.make_mesh((1,), ("data",))
    with pytest.raises(ConfigError, match=f"{name}'? cannot run"):
        loop.train(micro_config(tmp_path / "none", tmp_path / "run", model=model), mesh)
    assert not (tmp_path / "run").exists()
