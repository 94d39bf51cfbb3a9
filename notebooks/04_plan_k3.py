# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     notebook_metadata_filter: -jupytext.text_representation.jupytext_version
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Can I train the 2.78T model on N GPUs?
#
# `k3jax.plan` counts what a training step would cost on a mesh that you do not have: nothing is allocated and no device
# is touched. What binds,
#
# 1. memory: which bytes are on the fullest device?
# 2. time: operations, communication, waiting?
# 3. which knob helps: a larger expert axis, remat, virtual stages, cutting parameters?
# 4. and the question of the title, for several N.
#
# Parameters, optimizer state and operations are exact; the rest is an estimate, with shares of the chip's peaks that
# were measured where there was something to measure (`k3jax/plan/chips.toml`).

# %%
import dataclasses
import itertools
from collections import defaultdict
from pathlib import Path

import jax
import matplotlib.pyplot as plt

from k3jax.config import ConfigError, MeshConfig
from k3jax.plan import Plan, plan
from k3jax.plan.roofline import seconds
from k3jax.train.config_file import load_config
from k3jax.train.flops import flops_by_mechanism

jax.config.update("jax_platforms", "cpu")  # a plan needs no accelerator, and should not hold one
plt.rcParams.update({"figure.dpi": 110, "font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
GIB = 2**30

# %% [markdown]
# **Change this cell to try something else**, then run all. Chips: H100, H200, B200, GB200. The batch is in sequences of
# 8,192 tokens (the report does not give that of K3's training). A mesh that cannot be honoured is refused with what
# would be legal: try `expert=256`.

# %%
CHIP = "H200"
MESH = MeshConfig(pipe=8, data=4, expert=32)
BATCH, REMAT, VIRTUAL = 8192, "layer", 1
DEVICES = 128, 256, 512, 1024, 2048, 4096

root = next(folder for folder in (Path.cwd(), *Path.cwd().parents) if (folder / "configs" / "k3.py").exists())
released = load_config(root / "configs" / "k3.py")


def on(mesh: MeshConfig = MESH, *, remat: str = REMAT, virtual: int = VIRTUAL) -> Plan:
    """The plan with micro-batches of one sequence on a device."""
    micro_batches = BATCH // (mesh.data * mesh.expert)
    config = dataclasses.replace(
        released,
        data=dataclasses.replace(released.data, batch_size=BATCH),
        train=dataclasses.replace(released.train, accumulation=micro_batches, remat=remat),
    )
    return plan(config, mesh, chip=CHIP, virtual=virtual)


def axes_of(mesh: MeshConfig) -> str:
    sizes = zip(("pipe", "data", "expert", "context", "tensor"), mesh.sizes)
    return " × ".join(f"{axis} {n}" for axis, n in sizes if n > 1) + ", fsdp" * mesh.fsdp


chosen = on()
print(f"{chosen.devices} × {CHIP}: {axes_of(MESH)}; {BATCH * released.data.sequence_length / 1e6:.0f}M tokens a step")
print(f"{chosen.memory.peak / GIB:.0f} of {chosen.chip.memory_bytes / GIB:.0f} GiB: {'fits' if chosen.fits else 'NO'}")
print(f"{chosen.time.predicted:.0f} s a step, {chosen.mfu:.1%} MFU")

# %% [markdown]
# ## 1 · Which bytes?
#
# A step peaks in its backward pass, at the loss or in the optimizer. `bank` are the blocks of attention residuals that
# pass through the pipeline, `experts` MoonEP's buffers, `working` what one layer needs while it is computed again,
# `packing` the gaps that XLA leaves (fitted). `print(chosen)` is the whole report.

# %%
KINDS = ("parameters", "optimizer", "balancing", "gradients", "activations", "bank", "experts", "working", "packing")
COLOURS = dict(zip(KINDS, plt.get_cmap("tab10").colors))


def stack(axis: plt.Axes, names: list[str], bars: list[dict[str, float]], colours: dict, unit: float) -> None:
    """Horizontal stacked bars, the first on top."""
    left = [0.0] * len(bars)
    smallest = 0.005 * max(sum(bar.values()) for bar in bars)
    for kind, colour in colours.items():
        values = [bar.get(kind, 0) for bar in bars]
        if max(values) > smallest:
            axis.barh(names, [x / unit for x in values], left=left, color=colour, label=kind)
        left = [a + x / unit for a, x in zip(left, values)]
    if not axis.yaxis_inverted():
        axis.invert_yaxis()


def available(axis: plt.Axes) -> None:
    axis.axvline(chosen.chip.memory_bytes / GIB, color="black", linestyle=":", label=f"{CHIP} has")
    axis.set_xlabel("GiB on a device")


fig, axes = plt.subplots(1, 2, figsize=(10, 3), layout="constrained")
phases = chosen.memory.phases
stack(axes[0], list(phases), list(phases.values()), COLOURS, GIB)
axes[0].set(title=f"by phase, stage {chosen.memory.stage}", ylabel="phase")
stage_names = [f"{m.stage}: {s.layers[0]}–{s.layers[-1]}" for m, s in zip(chosen.memories, chosen.stages)]
stack(axes[1], stage_names, [m.kinds for m in chosen.memories], COLOURS, GIB)
axes[1].set(title="by stage, at its peak", ylabel="stage: layers")
for axis in axes:
    available(axis)
fig.legend(*axes[1].get_legend_handles_labels(), loc="outside lower center", ncols=6, frameon=False, fontsize=8)
plt.show()

# %% [markdown]
# ## 2 · Which seconds?
#
# Two times are given: the roofline bound, with every peak reached and all communication behind computation, and the
# predicted one with realistic shares of the peaks and nothing hidden. Between them lies what overlap can win.


# %%
def parts(found: Plan) -> dict[str, float]:
    """Predicted seconds of a step on the slowest stage."""
    time = found.time
    out = {"computation": time.compute, "communication": time.communication, "optimizer": time.optimizer}
    return out | {"pipeline bubble": time.predicted - sum(out.values())}


operations = flops_by_mechanism(released.model, released.data.sequence_length)
sent = defaultdict(float)
for collective in chosen.traffic[chosen.memory.stage]:
    name = f"{' × '.join(collective.axes)}: {collective.what}"
    sent[name] += seconds(collective, MESH, chosen.chip, ideal=False)
sent = dict(sorted(sent.items(), key=lambda item: -item[1])[:7])

PARTS = dict(zip(parts(chosen), ("C0", "C1", "C2", "0.75")))
fig = plt.figure(figsize=(10, 4.6), layout="constrained")
grid = fig.add_gridspec(2, 2, height_ratios=[1, 2.4])
axis = fig.add_subplot(grid[0, :])
stack(axis, ["a step"], [parts(chosen)], PARTS, 1)
axis.axvline(chosen.time.bound, color="black", linestyle=":", label="roofline bound")
axis.set(xlabel="seconds", title=f"{axes_of(MESH)}: {chosen.time.predicted:.0f} s a step")
axis.legend(frameon=False, ncols=5, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.45))
axis = fig.add_subplot(grid[1, 0])
names = sorted(operations, key=operations.get)
axis.barh([name.replace("_", " ") for name in names], [operations[name] / 1e9 for name in names], color="C0")
axis.set(xlabel="GFLOP a token, forward and backward", title="computation (exact)")
axis = fig.add_subplot(grid[1, 1])
axis.barh(list(sent)[::-1], list(sent.values())[::-1], color="C1")
axis.set(xlabel="seconds a step, if not hidden", title=f"communication, stage {chosen.memory.stage}")
plt.show()

# %% [markdown]
# ## 3 · Which knob?
#
# Each group turns one knob of the mesh above, with the same number of GPUs and the same batch; ✗ does not fit. A larger
# expert axis holds fewer experts on a device, and their gradients are summed over fewer. Remat buys activations with
# computation, but "block" holds all of an AttnRes block while it is computed again. Virtual stages shrink the bubble
# where they divide the 24 units of layers evenly: two on each of eight ranks do not. `fsdp` cuts parameters and
# gradients, and sends them for every micro-batch.

# %%
knobs: dict[str, Plan] = {}


def turn(name: str, mesh: MeshConfig = MESH, **options) -> None:
    """Adds a plan, or says why there is none."""
    try:
        knobs[name] = on(mesh, **options)
    except ConfigError as error:
        print(f"{name}: {str(error).splitlines()[-1].strip()}")


ranks = MESH.data * MESH.expert
for expert in (e for e in (16, 32, 64, 128) if ranks % e == 0):
    turn(f"expert {expert}", dataclasses.replace(MESH, data=ranks // expert, expert=expert))
for preset in ("none", "products", "sublayer", "layer", "block"):
    turn(f"remat {preset}", remat=preset)
for stages in (1, 2, 3):
    turn(f"{stages} virtual stage{'s' * (stages > 1)}", virtual=stages)
for cut in (False, True):
    turn(f"fsdp {'yes' if cut else 'no'}", dataclasses.replace(MESH, fsdp=cut))

fig, axes = plt.subplots(1, 2, figsize=(10, 4.8), sharey=True, layout="constrained")
labels = [f"{name} {'✓' if found.fits else '✗'}" for name, found in knobs.items()]
stack(axes[0], labels, [found.memory.kinds for found in knobs.values()], COLOURS, GIB)
available(axes[0])
stack(axes[1], labels, [parts(found) for found in knobs.values()], PARTS, 1)
axes[1].plot([found.time.bound for found in knobs.values()], labels, "k|", label="roofline bound")
axes[1].set_xlabel("seconds a step")
axes[0].legend(frameon=False, fontsize=7, ncols=5, loc="lower center", bbox_to_anchor=(0.45, 1))
axes[1].legend(frameon=False, fontsize=7, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1))
plt.show()

# %% [markdown]
# ## 4 · On how many GPUs?
#
# A small search over pipeline, expert and data axes, virtual stages and `fsdp`, remat as above. `k3jax.plan.search` (or
# `python -m k3jax.plan configs/k3.py --search 1024`) tries `context` and `tensor` too. `fsdp` cuts the 896 experts over
# data × expert, which must divide them; so of 2,048 GPUs a pipeline of eight cannot have it, nor need it.


# %%
def meshes(devices: int) -> list[tuple[MeshConfig, int]]:
    """(mesh, virtual stages) to try."""
    tried = itertools.product((1, 2, 4, 8), (16, 32, 64, 128), (False, True), (1, 3))
    return [
        (MeshConfig(pipe, devices // (pipe * expert), expert, fsdp=fsdp), virtual)
        for pipe, expert, fsdp, virtual in tried
        if devices % (pipe * expert) == 0 and (pipe > 1 or virtual == 1)
    ]


results: dict[int, list[Plan]] = {}
for devices in DEVICES:
    results[devices] = []
    for mesh, virtual in meshes(devices):
        try:
            results[devices].append(on(mesh, virtual=virtual))
        except ConfigError:
            continue
best = {
    devices: min(tried, key=lambda p: (not p.fits, p.time.predicted if p.fits else p.memory.peak))
    for devices, tried in results.items()
}
for devices, found in best.items():
    mesh = found.config.mesh
    verdict = (
        f"{found.time.predicted:6.0f} s a step, {found.mfu:5.1%} MFU, bubble {found.time.bubble:5.1%}"
        if found.fits
        else f"no: {found.memory.peak / GIB:.0f} GiB at least"
    )
    print(f"{devices:5} {CHIP}  {axes_of(mesh):40} {found.virtual} virtual  {verdict}")

# %%
fig, axes = plt.subplots(1, 2, figsize=(10, 3.2), layout="constrained")
tokens = BATCH * released.data.sequence_length
for devices, tried in results.items():
    for found in tried:
        colour = "C0" if found.fits else "0.8"
        axes[0].plot(devices, found.memory.peak / GIB, ".", color=colour)
        axes[1].plot(devices, tokens / found.time.predicted, ".", color=colour)
axes[0].axhline(chosen.chip.memory_bytes / GIB, color="black", linestyle=":", label=f"{CHIP} has")
fitting = {devices: found for devices, found in best.items() if found.fits}
axes[1].plot(list(fitting), [tokens / f.time.predicted for f in fitting.values()], color="C0", label="best that fits")
axes[0].set(ylabel="GiB on the fullest device", title="memory of every mesh tried")
axes[1].set(ylabel="tokens a second (predicted)", title="speed (grey: does not fit)")
for axis in axes:
    axis.set(xscale="log", yscale="log", xlabel=f"{CHIP} GPUs")
    axis.set_xticks(DEVICES, DEVICES, minor=False)
    axis.minorticks_off()
    axis.legend(frameon=False)
plt.show()
if fitting:
    print(f"at least {min(fitting)} of the numbers tried; a trillion tokens there take ", end="")
    print(f"{1e12 / tokens * fitting[min(fitting)].time.predicted / 86400:,.0f} days")
