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
# # What changes inside K3 while it learns?
#
# A small K3 is trained in this notebook, and looked into every few steps while it runs:
#
# 1. does the loss fall,
# 2. do all experts get work (quantile balancing), and what would happen without the balancing,
# 3. which depths do the sublayers read (attention residuals),
# 4. how large is a step of the optimizer, and where do the bounds bind?
#
# `k3jax.train.loop.train` is the trainer behind `train.py`; a `Watch` is called between two of its steps.

# %%
import dataclasses
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from IPython.display import display

import k3jax
from k3jax import inspect
from k3jax.config import DataConfig, MeshConfig, OptimizerConfig, RunConfig, TrainConfig
from k3jax.data.loader import open_data
from k3jax.sharding import make_mesh
from k3jax.train.loop import Watch, train, use_compile_cache
from k3jax.train.metrics import read_records
from k3jax.train.optimizer import GROUPS

use_compile_cache()  # compiled programs are kept between runs, so only the first run of this notebook is slow
plt.rcParams.update({"figure.dpi": 110, "font.size": 9, "axes.spines.top": False, "axes.spines.right": False})

# %% [markdown]
# **Change this cell to try something else**, then run all. A learning rate ten times as high, one expert a token, a
# block size of 1 (every layer is a source of its own) or no `CLIP_NORM` are worth a look. `model = k3jax.nano()`
# is the model of `make train`: five times the parameters, ten times the time.

# %%
STEPS, LOOK_EVERY = 80, 10
LEARNING_RATE = 3e-3
CLIP_NORM: float | None = 1.0
EXPERTS, EXPERTS_PER_TOKEN = 8, 2
BLOCK_SIZE = 2

base = k3jax.nano(hidden_size=64, num_layers=4, mla_layers=(1, 3), num_dense_layers=0, attn_res_block_size=BLOCK_SIZE)
model = dataclasses.replace(
    base,
    kda=dataclasses.replace(base.kda, num_heads=2),
    mla=dataclasses.replace(base.mla, num_heads=2),
    moe=dataclasses.replace(base.moe, num_experts=EXPERTS, experts_per_token=EXPERTS_PER_TOKEN, qb_bins=200),
)

# %% [markdown]
# ## What a look takes down
#
# The held-out text is the same at every look. Loads are counted twice: with the biases that quantile balancing has set,
# and with biases of zero. Both choose with the same scores, so the difference is what the biases do.

# %%
config = RunConfig(
    model,
    DataConfig(sequence_length=128, batch_size=4),
    optimizer=OptimizerConfig(learning_rate=LEARNING_RATE, clip_norm=CLIP_NORM),
    train=TrainConfig(
        steps=STEPS,
        log_interval=1,
        eval_interval=0,
        sample_interval=0,
        checkpoint_interval=STEPS,
    ),
    run_dir=tempfile.mkdtemp(prefix="k3jax-"),
)
with open_data(config.data, model.vocab_size).validation_loader(1) as batches:
    batch = next(iter(batches))
tokens, segment_ids = jnp.asarray(batch["tokens"]), jnp.asarray(batch["segment_ids"])
looks: dict[int, dict] = {}


def look(step: int, params: k3jax.K3, router_bias: jax.Array) -> None:
    """Adds a look at the model to `looks` and draws all of them."""
    with_bias, without = (
        inspect.router(params, tokens, segment_ids, router_bias=bias)
        for bias in (router_bias, jnp.zeros_like(router_bias))
    )
    depth = inspect.depth_attention(params, tokens, segment_ids, router_bias=router_bias)
    looks[step] = {"with": with_bias, "without": without, "depth": depth}
    figure.update(draw())


# %% [markdown]
# ## Training, live
#
# The figure is drawn again at every look. Upper right: each column is a look, each row an expert of the last layer.
# Lower left: the weights of the present moment; they begin uniform, because all queries begin at zero. Lower middle:
# the update of each group of parameters, divided by the learning rate.


# %%
def draw() -> plt.Figure:
    """What is known so far."""
    records = read_records(Path(config.run_dir) / "metrics.jsonl")
    fig, axes = plt.subplots(2, 3, figsize=(11, 6), layout="constrained")
    (loss, balance, loads), (depths, sizes, norms) = axes

    def curve(axis: plt.Axes, name: str, label: str, by: str | None = None) -> None:
        found = [(r["step"], float(r[name]) / (r[by] if by else 1)) for r in records]
        axis.plot(*np.array(found or [(np.nan, np.nan)]).T, label=label)

    curve(loss, "loss", "each batch is new text")
    loss.axhline(np.log(256), color="0.6", linestyle=":", label="any byte, equally likely")
    loss.set(title="1 · Loss", ylabel="nats per token (a byte)", ylim=(0, None))

    steps = list(looks)
    for name, style in (("with", "C0.-"), ("without", "C1.--")):
        worst = [100 * one[name].max_violation.max() for one in looks.values()]
        balance.plot(steps, worst, style, label=f"{name} the biases")
    balance.set(title="2 · Balance of the experts", ylabel="busiest expert above the mean (%)", ylim=(0, None))

    share = np.stack([one["with"].load[-1] / one["with"].load[-1].mean() for one in looks.values()], axis=1)
    image = loads.imshow(share, aspect="auto", cmap="RdBu_r", vmin=0, vmax=2, interpolation="nearest")
    loads.set_xticks(range(0, len(steps), 2), steps[::2])
    loads.set(title=f"2 · Loads in layer {model.num_layers - 1}", ylabel="expert", yticks=range(EXPERTS))
    fig.colorbar(image, ax=loads, label="load / mean")

    now = looks[steps[-1]]["depth"]
    image = depths.imshow(now.weights, aspect="auto", vmin=0, vmax=1, cmap=colours)
    depths.set_xticks(range(len(now.sources)), now.sources, rotation=30, ha="right")
    depths.set_yticks(range(len(now.sublayers)), [name.removeprefix("layer ") for name in now.sublayers])
    depths.set(title=f"3 · Depth attention, step {steps[-1]}", ylabel="layer and sublayer")
    fig.colorbar(image, ax=depths, label="mean weight")

    for group in GROUPS:
        curve(sizes, f"update_rms/{group}", group.replace("_", ", "), by="learning_rate")
    sizes.set(title="4 · Update RMS", ylabel="update RMS / learning rate", ylim=(0, None))

    curve(norms, "grad_norm", "gradient norm")
    if CLIP_NORM is not None:
        norms.axhline(CLIP_NORM, color="black", linestyle=":", label="clipped to")
    curve(norms, "max_logit", "largest attention logit")
    norms.set(title="4 · What the bounds see", ylabel="norm, logit", yscale="log")

    for axis in (loss, balance, sizes, norms):
        axis.set(xlim=(0, STEPS), xlabel="step")
        if axis.get_legend_handles_labels()[0]:
            axis.legend(frameon=False, fontsize=7)
    loads.set_xlabel("step")
    plt.close(fig)  # shown by the handle, not a second time at the end of the cell
    return fig


colours = plt.get_cmap("viridis").with_extremes(bad="0.85")
figure = display({"text/plain": "compiling the step …"}, raw=True, display_id=True)
mesh = make_mesh(MeshConfig())
with jax.set_mesh(mesh):
    train(config, mesh, watch=Watch(look, LOOK_EVERY), quiet=True)

# %% [markdown]
# ## What changed?
#
# The loss first finds which bytes are frequent, then which follow which; until then experts and depths have little to
# choose by.

# %%
first, last = looks[0], looks[STEPS]
losses = [r["loss"] for r in read_records(Path(config.run_dir) / "metrics.jsonl")]
print(f"1  loss {losses[0]:.2f} → {np.mean(losses[-10:]):.2f} nats a byte")
for name in ("with", "without"):
    idle = sum(row["idle_experts"] for row in last[name].table())
    worst = last[name].max_violation.max()
    print(f"2  {name:7} the biases the busiest expert has {1 + worst:.2f} × its share, {idle} experts are idle")


def from_uniform(weights: np.ndarray) -> np.ndarray:
    """Share of the weight of each sublayer that is elsewhere than in a uniform mix of its sources."""
    uniform = 1 / np.isfinite(weights).sum(1, keepdims=True)
    return 0.5 * np.nansum(np.abs(weights - uniform), axis=1)


moved = from_uniform(last["depth"].weights)
farthest = last["depth"].sublayers[moved.argmax()]
print(f"3  {moved.mean():.0%} of the weight over depth has moved, most of it in {farthest} ({moved.max():.0%})")

fig, axes = plt.subplots(1, 3, figsize=(11, 3), layout="constrained")
experts, width = np.arange(EXPERTS), 0.4
for offset, name, colour in ((-width / 2, "with", "C0"), (width / 2, "without", "C1")):
    load = last[name].load[-1]
    axes[0].bar(experts + offset, load / load.mean(), width, color=colour, label=f"{name} the biases")
axes[0].axhline(1, color="black", linestyle=":", linewidth=1)
axes[0].set(title=f"2 · Loads in layer {model.num_layers - 1} at the end", xlabel="expert", ylabel="load / mean")
axes[0].legend(frameon=False, fontsize=7)
for source, label in enumerate(last["depth"].sources):
    axes[1].plot(list(looks), [one["depth"].weights[-1, source] for one in looks.values()], ".-", label=label)
axes[1].set(title="3 · What the output reads", xlabel="step", ylabel="mean weight", ylim=(0, None))
axes[1].legend(frameon=False, fontsize=7)
for kind, mark in (("mixer", "o"), ("feed-forward", "s")):
    rows = range(kind != "mixer", 2 * model.num_layers, 2)
    axes[2].plot([row // 2 for row in rows], 100 * moved[list(rows)], mark, mfc="none", label=kind)
axes[2].set(title="3 · Moved from a uniform mix", xlabel="layer", ylabel="weight moved (%)", ylim=(0, None))
axes[2].set_xticks(range(model.num_layers))
axes[2].legend(frameon=False, fontsize=7)
plt.show()

# %% [markdown]
# The curves of the optimizer say what binds. An update of Muon has nearly the same RMS at every step, whatever the
# gradient: an orthogonal block would have 0.2, and Newton-Schulz stops a little before. AdamW begins with the sign of
# the gradient, an RMS near 1, and slows down as gradients of different steps disagree. Where the gradient norm is above
# the dotted line the gradient was shortened; both hardly notice, since neither keeps its length. QK-clip would act on
# an attention logit above 100.
#
# The whole model, and a report of the same kind for any run: `make train`, then `python -m k3jax.inspect runs/nano`.
