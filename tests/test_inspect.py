"""What the tools of `k3jax.inspect` say, against other ways to compute it."""

import dataclasses
import json
import math
import re
import shutil
from html.parser import HTMLParser

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import micro

from k3jax import inspect
from k3jax.checkpoint.store import CheckpointStore, RunRecord
from k3jax.config import ConfigError, DataConfig, KDAConfig, MeshConfig, RunConfig, TrainConfig, to_dict
from k3jax.inspect import model as inspect_model
from k3jax.inspect import report as inspect_report
from k3jax.inspect import svg
from k3jax.inspect.__main__ import main as inspect_main
from k3jax.model.k3 import create
from k3jax.model.quantize import pack_experts
from k3jax.sharding import AXES, make_mesh, shardings
from k3jax.train import flops
from k3jax.train.metrics import MetricsLog
from k3jax.train.state import abstract_params


def small(**overrides):
    """Two blocks: KDA with a dense and an MoE layer, then MLA."""
    return micro(**{"num_layers": 3, "mla_layers": (2,), "vocab_size": 512} | overrides)


@jax.jit
def forward(model, tokens, segment_ids, bias):
    return model(tokens, segment_ids, router_bias=bias, return_aux=True, depth=model.config.attn_res_block_size)[1]


@pytest.fixture(scope="module")
def plain():
    """Without attention residuals."""
    return create(small(attn_res_block_size=None))


@pytest.fixture(scope="module")
def lively():
    """A model whose AttnRes queries and router biases are not zero, tokens with padding and two documents a row."""
    config = small()
    model = create(config)
    keys = iter(jax.random.split(jax.random.key(1), 999))

    def shake(path, leaf):
        return leaf + 0.3 * jax.random.normal(next(keys), leaf.shape) if "proj" in str(path[-2:]) else leaf

    model = jax.tree_util.tree_map_with_path(shake, model)
    rng = np.random.default_rng(0)
    tokens = jnp.asarray(rng.integers(0, 48, (4, 32)), jnp.int32)
    segment_ids = np.repeat([1, 2], 16)[None].repeat(4, 0)
    segment_ids[1, 25:] = 0
    bias = jnp.asarray(rng.normal(0, 0.05, (config.num_moe_layers, 8)), jnp.float32)
    return model, tokens, jnp.asarray(segment_ids, jnp.int32), bias


def test_parameters_by_mechanism_sum_to_the_counts_of_the_geometry(lively):
    rows = inspect.parameters(lively[0], small())
    counts = flops.parameter_counts(small()).by_mechanism
    assert {row.name: row.count for row in rows} == {name: n for name, n in counts.items() if n}
    assert all(row.bytes == 4 * row.count == row.bytes_per_device and not row.specs for row in rows)


def test_parameters_of_a_model_that_is_not_of_its_configuration_are_refused(lively):
    with pytest.raises(ConfigError, match="parameters of embedding"):
        inspect.parameters(lively[0], small(vocab_size=64))


def test_parameters_on_a_mesh_tell_what_a_device_holds():
    config, mesh = small(), jax.sharding.AbstractMesh((1, 2, 2, 1, 1), AXES)
    params = abstract_params(config)
    assert inspect.parameters(params, config)[0].bytes_per_device is None
    params = jax.tree.map(
        lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), params, shardings(params, mesh, at_rest=True)
    )
    rows = {row.name: row for row in inspect.parameters(params, config)}
    assert rows["routed_experts"].bytes == 4 * rows["routed_experts"].bytes_per_device
    assert all("expert" in str(spec) for spec in rows["routed_experts"].specs.values())


def test_parameters_held_as_codes_count_what_the_codes_stand_for():
    config = small(moe=dataclasses.replace(small().moe, expert_size=32, latent_size=32))
    model = jax.eval_shape(lambda params: pack_experts(params, "floor"), abstract_params(config))
    row = next(row for row in inspect.parameters(model, config) if row.name == "routed_experts")
    assert row.bytes == row.count * 17 // 32


def test_depth_attention_is_the_mean_over_tokens_that_count(lively):
    model, tokens, segment_ids, bias = lively
    found = inspect.depth_attention(model, tokens, segment_ids, router_bias=bias)
    aux = forward(model, tokens, segment_ids, bias)
    expected = np.asarray(aux.depth)[:, :, np.asarray(segment_ids) != 0].mean(-1)
    assert found.weights.shape == (len(found.sublayers), len(found.sources)) == (7, 3)
    there = ~np.isnan(found.weights)
    np.testing.assert_allclose(found.weights[there], expected[there], atol=1e-6)
    assert not expected[~there].any()
    np.testing.assert_allclose(np.nansum(found.weights, 1), 1, atol=1e-5)
    # of layer 2, the first of block 1: its attention sees no partial sum yet, its feed-forward does
    assert found.sublayers[4:6] == ("layer 2 mla", "layer 2 moe")
    assert np.isnan(found.weights).tolist() == [
        *[[False, True, True]],
        *[[False, True, False]] * 3,
        *[[False, False, True]],
        *[[False, False, False]] * 2,
    ]


def test_what_a_model_does_not_have_is_said(lively, plain):
    _, tokens, _, _ = lively
    with pytest.raises(ValueError, match="plain residuals"):
        inspect.depth_attention(plain, tokens)
    with pytest.raises(ValueError, match="padding"):
        inspect.router(lively[0], tokens, jnp.zeros_like(tokens))


def test_the_walk_over_layers_is_the_forward_pass(lively, plain):
    model, tokens, segment_ids, bias = lively
    for one in (model, plain):
        found = inspect.router(one, tokens, segment_ids, router_bias=bias)
        np.testing.assert_array_equal(found.load, forward(one, tokens, segment_ids, bias).load)
    assert found.layers == (1, 2)


def test_router_margins_are_gaps_of_sorted_biased_scores(lively):
    model, tokens, segment_ids, bias = lively
    found = inspect.router(model, tokens, segment_ids, router_bias=bias)
    view = list(inspect_model._layers(model, tokens, segment_ids, bias, None))[2]
    scores = 1 / (1 + np.exp(-np.asarray(view.ffn_input, np.float64) @ np.asarray(view.layer.ffn.router[...])))
    ordered = np.sort(scores + np.asarray(bias[1]), axis=-1)[..., ::-1]
    margin = np.where(np.asarray(segment_ids) != 0, ordered[..., 1] - ordered[..., 2], np.nan)
    np.testing.assert_allclose(found.margin[1], margin, atol=1e-6)
    np.testing.assert_allclose(found.max_violation, found.load.max(1) / found.load.mean(1) - 1, rtol=1e-6)
    assert found.table()[1]["bias_max"] == pytest.approx(float(bias[1].max()))


@pytest.mark.parametrize("gate", ["lower_bound", "softplus"])
def test_gates_are_those_that_the_recurrence_runs_with(lively, gate, monkeypatch):
    """The inputs of `kda` are caught where the layer calls it, and activated as the recurrence does."""
    from k3jax.model import kda as layer
    from k3jax.ops.kda.gates import Activation, activate

    config = small(num_layers=1, mla_layers=(), kda=KDAConfig(num_heads=2, head_dim=16, chunk_size=16, gate=gate))
    model, (_, tokens, segment_ids, _) = create(config), lively
    caught = {}

    def spy(q, k, v, g, beta, **options):
        how = Activation(options["gate"], options["lower_bound"], options["beta_is_logit"], True, 1.0)
        caught["values"] = activate(q, k, v, g, beta, options["A_log"], options["dt_bias"], how)[3:]
        return v

    view = next(inspect_model._layers(model, tokens, segment_ids, None, None))
    monkeypatch.setattr(layer, "kda", spy)
    view.layer.mixer(view.mixer_input, segment_ids, None)
    decay, beta = (np.asarray(a, np.float64)[np.asarray(segment_ids) != 0] for a in caught["values"])
    found = inspect.gates(model, tokens, segment_ids)
    for values, expected in ((found.log_decay[0], decay.transpose(1, 0, 2).reshape(2, -1)), (found.beta[0], beta.T)):
        np.testing.assert_allclose(values, np.quantile(expected, inspect.QUANTILES, axis=1).T, rtol=1e-4)
    middle = inspect.QUANTILES.index(0.5)
    np.testing.assert_allclose(0.5 ** (1 / found.half_life[0, :, middle]), np.exp(np.median(decay, (0, 2))), rtol=1e-5)
    rate = np.exp(np.asarray(view.layer.mixer.A_log[...], np.float64))[:, None]
    far = decay / -5 > 0.99 if gate == "lower_bound" else np.zeros_like(decay, bool)
    near = decay / -5 < 0.01 if gate == "lower_bound" else 1 - np.exp(decay / rate) < 0.01
    np.testing.assert_allclose(found.keeping[0], near.mean((0, 2)), atol=2e-3)
    np.testing.assert_allclose(found.forgetting[0], far.mean((0, 2)), atol=2e-3)


@pytest.mark.slow
def test_tools_agree_on_a_mesh(lively):
    model, tokens, segment_ids, bias = lively
    alone = inspect.gates(model, tokens, segment_ids), inspect.router(model, tokens, segment_ids, router_bias=bias)
    depth = inspect.depth_attention(model, tokens, segment_ids)
    with jax.set_mesh(make_mesh(MeshConfig(data=2, expert=2, tensor=2))):
        cut = jax.device_put(model, shardings(model, jax.sharding.get_mesh()))
        np.testing.assert_allclose(inspect.gates(cut, tokens, segment_ids).half_life, alone[0].half_life, rtol=1e-4)
        found = inspect.router(cut, tokens, segment_ids, router_bias=bias)
        np.testing.assert_array_equal(found.load, alone[1].load)
        np.testing.assert_allclose(inspect.depth_attention(cut, tokens, segment_ids).weights, depth.weights, atol=1e-5)


def run_config(**train) -> RunConfig:
    data = DataConfig(sequence_length=32, batch_size=4, min_bytes=0, virtual_shards=8, validation_percent=50)
    return RunConfig(model=small(), data=data, train=TrainConfig(**train))


def test_what_is_kept_for_the_backward_pass_has_its_name_and_size():
    """Each of these presets keeps less than the one before; of the names, "layer" keeps those of the kernels only."""
    kept = {remat: inspect.saved_for_backward(run_config(), remat) for remat in ("none", "layer", "block")}
    totals = [sum(row.bytes for row in rows) for rows in kept.values()]
    assert totals == sorted(totals, reverse=True)
    named = {name: [row for row in kept["layer"] if row.name == name] for name in ("kda", "experts", "operand")}
    assert [(row.shape, row.arrays, row.bytes) for row in named["kda"]] == [((4, 32, 2, 16), 2, 2 * 4 * 4 * 32 * 32)]
    assert [(row.shape, row.arrays) for row in named["experts"]] == [((4, 32, 16), 2)]
    assert not named["operand"]
    assert not [row for row in kept["block"] if row.name in ("kda", "experts", "operand")]
    assert {row.scope for row in kept["none"]} >= {"kda", "mla", "dense", "moe", "attn_res", "head", "parameters"}
    source = next(row.source for row in kept["layer"] if row.name == "kda")
    assert source.startswith("k3jax/model/kda.py:")


def test_residuals_on_a_mesh_are_those_of_one_device():
    config = run_config()
    mesh = dataclasses.replace(config, mesh=MeshConfig(data=2, context=2))
    rows = {row.name: row for row in inspect.saved_for_backward(mesh, "layer")}
    assert (rows["kda"].shape, rows["experts"].shape) == ((2, 16, 2, 16), (2, 16, 16))
    with pytest.raises(ConfigError, match="pipe"):
        inspect.saved_for_backward(dataclasses.replace(config, mesh=MeshConfig(pipe=2)))


@pytest.fixture(scope="module")
def run_dir(lively, tmp_path_factory):
    """A run of two checkpoints, with curves, a sample and a step that was not finite."""
    path = tmp_path_factory.mktemp("run")
    text = path / "text"
    text.mkdir()
    for i in range(12):
        (text / f"{i}.txt").write_text(f"document {i}: " + "all work and no play " * 12)
    config = run_config(steps=4)
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, source=str(text)), run_dir=str(path))
    store = CheckpointStore(path / "checkpoints")
    model = {"params": lively[0], "router_bias": lively[3]}
    record = RunRecord(to_dict(config), {}, {}, {})
    for step in (2, 4):
        store.save(step, model=model, training={"step": jnp.int32(step)}, record=record)
    store.close()
    log = MetricsLog(path, 0)
    for step in range(1, 5):
        rms = {"update_rms/adamw": 1e-3, "update_rms/muon_head": 0.2}
        values = {"loss": 5.0 / step, "bits_per_byte": 7.0 / step, "grad_norm": math.nan if step == 3 else 1.0} | rms
        log.write("train", step, values | {"tokens_per_second": 1234.5, "learning_rate": 1e-3, "max_violation": 0.5})
    log.write("eval", 4, {"loss": 1.5, "bits_per_byte": 2.0})
    log.write_sample(4, "def ", "def <b>&quot;")
    log.close()
    facts = {"step": 3, "nonfinite": ["grad_norm"], "documents": {"7": "seven.txt"}}
    (path / "nonfinite_step_3.json").write_text(json.dumps(facts))
    return path


class Balanced(HTMLParser):
    """Every tag is closed in order."""

    def __init__(self):
        super().__init__()
        self.open, self.headings = [], []

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "h2":
            self.headings.append(data)


def headings(html: str) -> list[str]:
    parser = Balanced()
    parser.feed(html)
    assert not parser.open
    return parser.headings


SECTIONS = ["Curves", "Samples", "Steps that were not finite", "Configuration", "Parameters"]
INSIDE = ["Experts", "Attention over depth", "Decay gates of KDA"]


def test_the_report_of_a_run_shows_everything_and_fetches_nothing(run_dir, tmp_path, monkeypatch):
    kept = inspect.Saved("kda", "operand", "k3jax/model/kda.py:7", (3, 4), "float32", 1, 3 << 20)
    monkeypatch.setattr(inspect_report, "saved_for_backward", lambda config, remat: [kept])
    out = tmp_path / "report.html"
    inspect_main(run_dir, out)
    html = out.read_text()
    assert headings(html) == [*SECTIONS, "Memory of a training step", *INSIDE, "Checkpoints"]
    assert not re.search(r"https?:|<script|<link|@import|url\(", html.replace("data:image/png", ""))
    assert "<b>def </b>&lt;b&gt;&amp;quot;" in html
    assert "Values that are not finite at 1 steps, the first 3." in html
    assert "seven.txt" in html
    assert html.count("3.00 MiB") == 6  # of each preset, and the array
    total = f"{flops.parameter_counts(small()).total:,}"
    assert total in html
    shown = re.sub("<details>.*?</details>", "", html, flags=re.DOTALL)
    assert "data.batch_size" in shown
    assert "data.seed" not in shown


def test_a_damaged_run_shows_what_is_left_and_says_what_is_not(run_dir, tmp_path, monkeypatch):
    def broken(config):
        raise RuntimeError("out of paper")

    monkeypatch.setattr(inspect_report, "_memory", broken)
    copy = tmp_path / "copy"
    shutil.copytree(run_dir, copy)
    shutil.rmtree(copy / "checkpoints" / "4" / "model")
    (copy / "samples.jsonl").unlink()
    with (copy / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')
    html = inspect_report.report(copy)
    assert headings(html) == ["Not shown", "Curves", *SECTIONS[2:], *INSIDE, "Checkpoints"]
    assert "Checkpoint 2, " in html
    for line in ("there is no samples.jsonl", "1 of 6 lines of metrics.jsonl", "out of paper", "inside checkpoint 4"):
        assert line in html


def test_directories_without_a_run_are_told_apart(tmp_path):
    html = inspect_report.report(tmp_path)
    assert headings(html) == ["Not shown"]
    assert "there is no metrics.jsonl" in html
    (tmp_path / "checkpoints" / "3").mkdir(parents=True)
    (tmp_path / "metrics.jsonl").write_bytes(b"\xff\xfe")
    assert "metrics.jsonl cannot be read" in inspect_report.report(tmp_path)
    with pytest.raises(FileNotFoundError, match="no run directory"):
        inspect_report.report(tmp_path / "none")


def test_lines_keep_spikes_and_leave_gaps():
    x, y = np.arange(5000.0), np.full(5000, 2.0)
    y[1234], y[3000:3100] = 90.0, np.nan
    drawn = svg.line_chart([svg.Series("loss", x, y)], "step", "nats")
    assert "nats, log" in drawn
    (path,) = re.findall(r'class="line s1" d="(.*?)"', drawn)
    assert path.count("M") == 2
    heights = [float(pair.split()[1]) for pair in re.split("[ML]", path)[1:]]
    assert min(heights) < 30 < 150 < max(heights)
    with pytest.raises(ValueError, match="nothing finite"):
        svg.line_chart([svg.Series("loss", x, y * np.nan)], "step", "nats")


def test_large_heat_maps_are_pictures():
    values = np.random.default_rng(0).random((92, 896))
    axes = {"x_label": "expert", "y_label": "layer", "unit": "×"}
    drawn = svg.heat_map(values, [str(i) for i in range(92)], [str(i) for i in range(896)], **axes)
    assert "data:image/png" in drawn
    assert len(drawn) < 2 * values.size
    assert svg.heat_map(values[:3, :2], ["a", "b", "c"], ["d", "e"], **axes).count("<title>") == 6


def test_ticks_are_round_and_inside():
    assert svg.ticks(0, 100) == [0, 25, 50, 75, 100]
    assert svg.ticks(-3, 7) == [-2.5, 0, 2.5, 5]
    assert [svg.number(v) for v in (0, 0.25, 12_000, 2.5e6, 4.2e-4)] == ["0", "0.25", "12k", "2.5M", "4.2e-4"]
