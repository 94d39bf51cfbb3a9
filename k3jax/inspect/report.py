"""A run directory as one HTML file: what is there is shown, what is missing or damaged is said.

Nothing is fetched when it is opened: styles and drawings are inline, and there is no script.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any, get_args

import jax
import numpy as np

from k3jax.checkpoint.store import CheckpointError, CheckpointStore
from k3jax.config import ConfigError, MeshConfig, Remat, RunConfig, from_dict, to_dict
from k3jax.data.loader import open_data
from k3jax.data.tokenizers import MEDIA_TOKEN
from k3jax.generate import Loaded, load
from k3jax.inspect.model import QUANTILES, depth_attention, gates, parameters, router
from k3jax.inspect.saved import saved_for_backward
from k3jax.inspect.svg import COLOURS, Series, heat_map, legend, line_chart, number
from k3jax.model.vision import Images
from k3jax.sharding import AXES, make_mesh
from k3jax.train import flops
from k3jax.train.batch import patch_rows, place_batch
from k3jax.train.metrics import read_records
from k3jax.train.optimizer import make_optimizer
from k3jax.train.placement import KINDS, placements
from k3jax.train.state import abstract_params, abstract_state

ROWS = 8
"""Sequences of held-out text that the last checkpoint is looked at with."""

Curves = list[tuple[str, str, list[tuple[str, str]]]]
# title, y label, [(kind and name of a record, label)]; update RMS and what else a run records follow
CURVES: Curves = [
    ("Loss", "nats per token", [("train/loss", "training"), ("eval/loss", "held out")]),
    ("Bits per byte", "bits per byte", [("train/bits_per_byte", "training"), ("eval/bits_per_byte", "held out")]),
    ("Gradient norm", "global norm", [("train/grad_norm", "gradient norm")]),
    ("Learning rate", "learning rate", [("train/learning_rate", "learning rate")]),
    ("Max violation", "busiest expert / mean − 1", [("train/max_violation", "max violation")]),
    ("Largest attention logit", "scaled logit", [("train/max_logit", "largest logit")]),
    ("Throughput", "tokens per second", [("train/tokens_per_second", "tokens/s")]),
    ("MFU", "share of the peak", [("train/mfu", "MFU")]),
]


class _Page:
    """The sections of a report, and what could not be shown."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.missing: list[str] = []

    def section(self, title: str, make: Callable[[], str | None]) -> None:
        """Adds what `make` returns; what it raises is said instead."""
        try:
            body = make()
        except Exception as error:  # whatever it is, it must not cost the other sections
            self.miss(title, error)
            return
        if body:
            self.parts.append(f"<section><h2>{escape(title)}</h2>{body}</section>")

    def miss(self, what: str, reason: Any) -> None:
        """Says that something is not shown."""
        self.missing.append(f"{what}: {' '.join(str(reason).split())[:400] or type(reason).__name__}")


def report(run_dir: str | Path) -> str:
    """The report of a run directory, as HTML.

    Raises:
        FileNotFoundError: no such directory.
    """
    run_dir = Path(run_dir)
    if not run_dir.is_dir():
        raise FileNotFoundError(f"no run directory {run_dir}; give the one of `train.py --run-dir`")
    page = _Page()
    config, saves = _checkpoints(run_dir, page)
    records = _records(run_dir / "metrics.jsonl", page, "curves")
    samples = _records(run_dir / "samples.jsonl", page, "samples")
    page.section("Curves", lambda: _curves(records))
    page.section("Samples", lambda: _samples(samples))
    page.section("Steps that were not finite", lambda: _nonfinite(run_dir))
    if config is not None:
        found = config
        page.section("Configuration", lambda: _configuration(found))
        page.section("Parameters", lambda: _parameters(found))
        page.section("Memory of a training step", lambda: _memory(found))
        _inside(run_dir, saves, page)
    page.section("Checkpoints", lambda: _table(["step", "on disk", "state"], saves) if saves else None)
    tiles = _tiles(config, records)
    missing = "".join(f"<li>{escape(line)}</li>" for line in page.missing)
    notice = f'<section class="notice"><h2>Not shown</h2><ul>{missing}</ul></section>' if missing else ""
    name = escape(run_dir.resolve().name)
    return (
        f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>{name}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_style()}</style></head><body><main><h1>{name}</h1>{tiles}{notice}{''.join(page.parts)}"
        "</main></body></html>\n"
    )


def _records(path: Path, page: _Page, what: str) -> list[dict[str, Any]]:
    """Whole records of a file, up to one that is cut off or damaged."""
    if not path.is_file():
        page.miss(what, f"there is no {path.name}")
        return []
    try:
        lines = len([line for line in path.read_text().splitlines() if line.strip()])
        found = [r for r in read_records(path) if isinstance(r, dict) and isinstance(r.get("step"), int)]
    except (OSError, UnicodeDecodeError) as error:
        page.miss(what, f"{path.name} cannot be read: {error}")
        return []
    if len(found) < lines:
        page.miss(what, f"{lines - len(found)} of {lines} lines of {path.name} are damaged or come after one that is")
    return found


def _checkpoints(run_dir: Path, page: _Page) -> tuple[RunConfig | None, list[list[str]]]:
    """The configuration of the newest checkpoint that can be read, and rows of (step, bytes, state), newest first."""
    what = "configuration, parameters, memory, a look inside"
    try:
        store = CheckpointStore(run_dir / "checkpoints", read_only=True)
    except CheckpointError as error:
        page.miss(what, error)
        return None, []
    config, rows = None, []
    try:
        for step in reversed(store.steps):
            state = "complete"
            try:
                read = from_dict(RunConfig, store.read_record(step).config)
                config = config or read
            except (CheckpointError, ConfigError, TypeError) as error:
                state = str(error)[:300]
            files = [p for p in (run_dir / "checkpoints" / str(step)).rglob("*") if p.is_file()]
            rows.append([str(step), _bytes(sum(p.stat().st_size for p in files)), state])
    finally:
        store.close()
    if config is None:
        page.miss(what, f"they need a checkpoint, and {'none of them can be read' if rows else 'there is none'}")
    return config, rows


def _inside(run_dir: Path, saves: Iterable[list[str]], page: _Page) -> None:
    """Sections of the newest checkpoint that can be read, on held-out text."""
    with jax.set_mesh(make_mesh(MeshConfig())):
        loaded = None
        for step in (int(row[0]) for row in saves):
            try:
                loaded = load(run_dir, step)
                break
            except Exception as error:
                page.miss(f"a look inside checkpoint {step}", error)
        if loaded is None:
            return
        try:
            batch = _held_out(loaded.config)
        except Exception as error:
            page.miss("expert balance, depth attention, gates: no held-out text", error)
            return
        valid = batch["segment_ids"] != 0
        told = f"Checkpoint {loaded.step}, {int(valid.sum()):,} tokens of held-out text."
        options = {"router_bias": loaded.router_bias, "images": Images.of(batch)}
        for title, make in (
            ("Experts", _experts),
            ("Attention over depth", _depth),
            ("Decay gates of KDA", _gates),
        ):
            page.section(title, lambda make=make: f"<p>{told}</p>{make(loaded, batch, options)}")


def _held_out(config: RunConfig) -> dict[str, jax.Array]:
    """At most `ROWS` rows of the first batch that an evaluation reads, [B, T]."""
    size = config.data.batch_size
    data = open_data(config.data, config.model.vocab_size, config.model.vision)
    own = np.unique(np.linspace(0, size - 1, min(ROWS, size)).astype(int)).tolist()
    alone = dataclasses.replace(
        config,
        mesh=MeshConfig(),
        data=dataclasses.replace(config.data, batch_size=len(own)),
        train=dataclasses.replace(config.train, accumulation=1),
    )
    mesh = jax.sharding.get_mesh()
    with data.validation_loader(1, own) as batches:
        batch = next(iter(batches))
    rows = patch_rows(alone, mesh, data.tokenizer.special_tokens[MEDIA_TOKEN])
    return {name: array[0] for name, array in place_batch(batch, 1, mesh, rows).items()}


def _curves(records: Sequence[dict[str, Any]]) -> str | None:
    series: dict[str, list[tuple[int, float]]] = {}
    for record in records:
        for name, value in record.items():
            if name not in ("kind", "step"):
                try:
                    series.setdefault(f"{record.get('kind')}/{name}", []).append((record["step"], float(value)))
                except (TypeError, ValueError):
                    continue
    groups = sorted(name for name in series if name.startswith("train/update_rms/"))
    rms = [
        ("Update RMS", "root mean square", [(n, n.removeprefix("train/update_rms/")) for n in groups[i : i + COLOURS]])
        for i in range(0, len(groups), COLOURS)
    ]
    figures = []
    for title, label, names in CURVES[:3] + rms + CURVES[3:]:
        lines = [_series(text, series[name]) for name, text in names if name in series]
        if any(np.isfinite(line.y).any() for line in lines):
            key = legend([line.label for line in lines])
            figures.append(f"<figure><figcaption>{title}</figcaption>{line_chart(lines, 'step', label)}{key}</figure>")
    bad = sorted({step for points in series.values() for step, value in points if not math.isfinite(value)})
    gaps = f"<p>Values that are not finite at {len(bad)} steps, the first {bad[0]:,}.</p>" if bad else ""
    return f'{gaps}<div class="figures">{"".join(figures)}</div>' if figures else None


def _series(label: str, points: Iterable[tuple[int, float]]) -> Series:
    x, y = np.array(sorted(points), np.float64).T
    return Series(label, x, y)


def _samples(samples: Sequence[dict[str, Any]]) -> str | None:
    if not samples:
        return None
    kept = list(samples) if len(samples) <= 6 else [samples[i] for i in np.linspace(0, len(samples) - 1, 6).astype(int)]
    told = f"<p>{len(kept)} of {len(samples)}.</p>" if len(kept) < len(samples) else ""
    out = []
    for sample in reversed(kept):
        prompt, text = str(sample.get("prompt", "")), str(sample.get("text", ""))
        rest = text.removeprefix(prompt)
        shown = f"<b>{escape(prompt)}</b>{escape(rest)}" if rest != text else escape(text)
        out.append(f"<h3>step {sample['step']:,}</h3><pre>{shown}</pre>")
    return told + "".join(out)


def _nonfinite(run_dir: Path) -> str | None:
    rows = []
    for path in sorted(run_dir.glob("nonfinite_step_*.json")):
        try:
            facts = json.loads(path.read_text())
            rows.append([str(facts["step"]), ", ".join(facts["nonfinite"]), ", ".join(facts["documents"].values())])
        except (ValueError, KeyError, AttributeError):
            rows.append([path.name, "cannot be read", ""])
    return _table(["step", "not finite", "documents of the batch"], rows) if rows else None


def _configuration(config: RunConfig) -> str:
    rows = [[name, default, value] for name, default, value in _differences(config)]
    whole = escape(json.dumps(to_dict(config), indent=1))
    return (
        "<p>What differs from the defaults; fields without one are always listed.</p>"
        + _table(["field", "default", "this run"], rows)
        + f"<details><summary>all fields</summary><pre>{whole}</pre></details>"
    )


def _differences(config: Any, prefix: str = "") -> Iterable[tuple[str, str, str]]:
    for field in dataclasses.fields(config):
        value, default = getattr(config, field.name), field.default
        if dataclasses.is_dataclass(value):
            yield from _differences(value, f"{prefix}{field.name}.")
            continue
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        if default is dataclasses.MISSING or value != default:
            yield prefix + field.name, "–" if default is dataclasses.MISSING else str(default), str(value)


def _parameters(config: RunConfig) -> str:
    rows = parameters(abstract_params(config.model), config.model)
    counts = flops.parameter_counts(config.model)
    lines = [
        [row.name, str(row.arrays), f"{row.count:,}", f"{100 * row.count / counts.total:.1f} %", _bytes(row.bytes)]
        for row in rows
    ]
    total = ["total", str(sum(r.arrays for r in rows)), f"{counts.total:,}", "", _bytes(sum(r.bytes for r in rows))]
    active = f"<p>{counts.active:,} serve a token, {counts.active_without_embedding:,} without the embedding.</p>"
    return active + _table(["mechanism", "arrays", "parameters", "share", "bytes"], [*lines, total], right=4)


def _memory(config: RunConfig) -> str:
    """State by kind, exact; what is kept for the backward pass, as traced."""
    mesh = jax.sharding.AbstractMesh(
        config.mesh.sizes, AXES, axis_types=(jax.sharding.AxisType.Explicit,) * len(config.mesh.sizes)
    )
    optimizer = make_optimizer(config.optimizer, abstract_params(config.model), config.train.steps)
    with jax.sharding.use_abstract_mesh(mesh):
        state = abstract_state(config.model, optimizer.transform, mesh, fsdp=config.mesh.fsdp)
    held: dict[str, int] = dict.fromkeys(KINDS, 0)
    for place in placements(state):
        held[place.kind] += place.bytes_per_device
    piped = config.mesh.pipe > 1
    out = f"<p>Bytes on one device. State is exact{', of all stages of the pipeline' if piped else ''}.</p>"
    out += _table(["state", "bytes"], [[kind, _bytes(n)] for kind, n in held.items()], right=1)
    if piped:
        return out
    presets = {remat: saved_for_backward(config, remat) for remat in _presets(config)}
    chosen = presets[config.train.remat]
    rows = [
        [remat + (" (this run)" if remat == config.train.remat else ""), _bytes(sum(row.bytes for row in saved))]
        for remat, saved in presets.items()
    ]
    out += (
        "<p>Kept between the forward and the backward pass of a micro-batch, as autodiff asks for it with the "
        "operations of this machine; XLA may keep less.</p>"
    )
    out += _table(["train.remat", "bytes"], rows, right=1)
    head = ["of", "array", "made in", "shape", "dtype", "arrays", "bytes"]
    lines = [
        [r.scope, r.name, r.source, "×".join(map(str, r.shape)), r.dtype, str(r.arrays), _bytes(r.bytes)]
        for r in chosen
    ]
    table = _table(head, lines[:60], right=2)
    return out + f"<details><summary>the largest with {escape(config.train.remat)}</summary>{table}</details>"


def _presets(config: RunConfig) -> list[Remat]:
    """Those that `train.remat_policy` allows."""
    legal: list[Remat] = []
    for remat in get_args(Remat):
        try:
            dataclasses.replace(config.train, remat=remat)
            legal.append(remat)
        except ConfigError:
            continue
    return legal


def _experts(loaded: Loaded, batch: dict[str, jax.Array], options: dict[str, Any]) -> str:
    found = router(loaded.model, batch["tokens"], batch["segment_ids"], **options)
    load = found.load / np.maximum(found.load.mean(1, keepdims=True), 1e-9)
    figure = heat_map(
        load,
        [str(layer) for layer in found.layers],
        [str(e) for e in range(load.shape[1])],
        x_label="expert",
        y_label="layer",
        unit="× the mean load",
        limits=(0.0, max(2.0, float(load.max()))),
    )
    rows = found.table()
    lines = [[number(value) for value in row.values()] for row in rows]
    caption = "Tokens sent to each expert"
    table = _table([name.replace("_", " ") for name in rows[0]], lines, right=len(rows[0]))
    return (
        f"<figure><figcaption>{caption}</figcaption>{figure}</figure>"
        "<p>Margins are gaps between the last expert that was picked and the first that was not.</p>" + table
    )


def _depth(loaded: Loaded, batch: dict[str, jax.Array], options: dict[str, Any]) -> str | None:
    if loaded.config.model.attn_res_block_size is None:
        return "<p>Plain residuals: nothing attends over depth.</p>"
    found = depth_attention(loaded.model, batch["tokens"], batch["segment_ids"], **options)
    figure = heat_map(
        found.weights, found.sublayers, found.sources, x_label="source", y_label="sublayer", unit="", limits=(0.0, 1.0)
    )
    caption = "Mean weight of each source; blank: not there yet"
    return f"<figure><figcaption>{caption}</figcaption>{figure}</figure>"


def _gates(loaded: Loaded, batch: dict[str, jax.Array], options: dict[str, Any]) -> str:
    if all(spec.mixer != "kda" for spec in loaded.config.model.layers):
        return "<p>There is no KDA layer.</p>"
    found = gates(loaded.model, batch["tokens"], batch["segment_ids"], **options)
    low, middle, high = (QUANTILES.index(q) for q in (0.1, 0.5, 0.9))
    layers, heads = [str(layer) for layer in found.layers], [str(h) for h in range(found.beta.shape[1])]
    axes = {"x_label": "head", "y_label": "layer"}
    figure = heat_map(found.half_life[..., middle], layers, heads, **axes, unit="tokens", log=True)
    head = ["layer", "half-life 10 %", "median", "90 %", "keeping", "forgetting", "β 10 %", "median", "90 %"]
    lines = [
        [layer]
        + [number(float(np.median(found.half_life[i, :, q]))) for q in (low, middle, high)]
        + [f"{100 * float(share[i].mean()):.1f} %" for share in (found.keeping, found.forgetting)]
        + [number(float(np.median(found.beta[i, :, q]))) for q in (low, middle, high)]
        for i, layer in enumerate(layers)
    ]
    return (
        f"<figure><figcaption>Median half-life of a channel of the state</figcaption>{figure}</figure>"
        "<p>Medians over heads of each quantile; half-lives in tokens. Keeping and forgetting: gates within 1 % of "
        "either end of their range.</p>" + _table(head, lines, right=len(head))
    )


def _tiles(config: RunConfig | None, records: Sequence[dict[str, Any]]) -> str:
    tiles: list[tuple[str, str]] = []
    steps = [r["step"] for r in records]
    if steps:
        of = f" of {config.train.steps:,}" if config is not None else ""
        tiles.append(("steps recorded", f"{max(steps):,}{of}"))
    held_out = [(r["step"], r["bits_per_byte"]) for r in records if r.get("kind") == "eval" and "bits_per_byte" in r]
    held_out = [(step, value) for step, value in held_out if isinstance(value, float)]
    if held_out:
        step, best = min(held_out, key=lambda pair: pair[1])
        tiles.append(("held-out bits per byte, last", f"{held_out[-1][1]:.3f}"))
        tiles.append((f"best, at step {step:,}", f"{best:.3f}"))
    speed = [r["tokens_per_second"] for r in records if isinstance(r.get("tokens_per_second"), float)]
    if speed:
        tiles.append(("tokens per second, last", number(speed[-1])))
    if config is not None:
        tiles.append(("parameters", number(flops.parameter_counts(config.model).total)))
    boxes = "".join(f"<div><b>{escape(value)}</b><span>{escape(name)}</span></div>" for name, value in tiles)
    return f'<div class="tiles">{boxes}</div>' if tiles else ""


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], right: int = 0) -> str:
    """A table whose last `right` columns hold numbers."""
    classes = ["" if i < len(head) - right else ' class="n"' for i in range(len(head))]
    top = "".join(f"<th{c}>{escape(name)}</th>" for name, c in zip(head, classes))
    body = "".join(
        "<tr>" + "".join(f"<td{c}>{escape(cell)}</td>" for cell, c in zip(row, classes)) + "</tr>" for row in rows
    )
    return f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def _bytes(count: int) -> str:
    for limit, unit in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= limit:
            return f"{count / limit:,.2f} {unit}"
    return f"{count} B"


_LIGHT = ("2a78d6", "eb6834", "1baf7a", "eda100", "e87ba4", "008300", "4a3aa7", "e34948")
_DARK = ("3987e5", "d95926", "199e70", "c98500", "d55181", "008300", "9085e9", "e66767")


def _colours(surface: str, text: str, muted: str, grid: str, axis: str, series: Sequence[str]) -> str:
    named = {"surface": surface, "text": text, "muted": muted, "grid": grid, "axis": axis}
    named |= {f"series-{i + 1}": colour for i, colour in enumerate(series)}
    return "".join(f"--{name}:#{colour};" for name, colour in named.items())


def _style() -> str:
    light = _colours("fcfcfb", "0b0b0b", "52514e", "e6e5de", "c3c2b7", _LIGHT)
    dark = _colours("1a1a19", "f4f4f2", "c3c2b7", "2f2f2d", "4a4a46", _DARK)
    lines = "".join(f".line.s{i}{{stroke:var(--series-{i})}}" for i in range(1, COLOURS + 1))
    fills = "".join(f".dot.s{i},.key.s{i}{{fill:var(--series-{i});background:var(--series-{i})}}" for i in range(1, 9))
    return (
        f":root{{color-scheme:light dark;{light}}}@media(prefers-color-scheme:dark){{:root{{{dark}}}}}"
        "body{margin:0;background:var(--surface);color:var(--text);font:15px/1.5 system-ui,sans-serif}"
        "main{max-width:1000px;margin:0 auto;padding:24px 20px 60px}h1{font-size:26px;margin:0 0 12px}"
        "h2{font-size:19px;margin:36px 0 8px}h3{font-size:14px;margin:14px 0 4px;color:var(--muted)}"
        "p{color:var(--muted);margin:4px 0 10px}section{border-top:1px solid var(--grid)}"
        ".tiles{display:flex;flex-wrap:wrap;gap:8px 36px;margin:8px 0 24px}.tiles div{display:flex;"
        "flex-direction:column}.tiles b{font-size:24px}.tiles span{color:var(--muted);font-size:13px}"
        ".notice{border:1px solid var(--axis);border-radius:6px;padding:0 16px 4px;margin-bottom:8px}"
        ".notice h2{margin:12px 0 4px}"
        ".figures{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(400px,100%),1fr));gap:18px 28px}"
        "figure{margin:8px 0}figcaption{font-weight:600;font-size:14px;margin-bottom:2px}"
        "svg{width:100%;height:auto;display:block}svg text{font:11px system-ui,sans-serif;fill:var(--muted)}"
        "svg .label{fill:var(--text)}path.grid{stroke:var(--grid);fill:none}"
        "path.axis{stroke:var(--axis);fill:none}.line{fill:none;stroke-width:1.75;stroke-linejoin:round}"
        f"{lines}{fills}.hit{{fill:transparent}}.hit:hover{{fill:var(--muted);fill-opacity:.35}}"
        ".cell{fill:var(--series-1)}rect.cell:hover{stroke:var(--text)}"
        ".legend{display:flex;flex-wrap:wrap;gap:2px 14px;font-size:12px;color:var(--muted);padding-left:48px}"
        ".key{display:inline-block;width:14px;height:3px;margin-right:5px;vertical-align:middle}"
        ".wide{overflow-x:auto}table{border-collapse:collapse;font-size:13px;margin:6px 0 14px}"
        "th,td{padding:3px 14px 3px 0;text-align:left;border-bottom:1px solid var(--grid);vertical-align:top}"
        "th{color:var(--muted);font-weight:500}.n{text-align:right;font-variant-numeric:tabular-nums}"
        "pre{overflow-x:auto;font-size:13px;padding:8px 12px;border:1px solid var(--grid);border-radius:6px;"
        "white-space:pre-wrap}summary{cursor:pointer;color:var(--muted)}"
    )
