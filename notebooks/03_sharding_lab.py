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
# # A sharding lab on a laptop
#
# Eight devices that do not exist, and a K3 of four layers on them. Pick a mesh, then see
#
# 1. where each array lives,
# 2. what one training step sends between devices,
# 3. that it takes the very step of one device,
# 4. how MoonEP shares out rows when the router picks a few experts only.
#
# The same code runs on GPUs: take out the cell that asks for eight CPU devices.

# %%
import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
os.environ["JAX_PLATFORMS"] = "cpu"

import dataclasses
import math
import re
from collections import defaultdict

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from k3jax.config import DataConfig, KDAConfig, MeshConfig, MLAConfig, ModelConfig, MoEConfig, RunConfig
from k3jax.parallel.expert_plan import copy_slots, plan_at_home, plan_balanced
from k3jax.sharding import make_mesh
from k3jax.train.batch import place_batch
from k3jax.train.loop import use_compile_cache
from k3jax.train.optimizer import make_optimizer
from k3jax.train.placement import placement_lines, placements
from k3jax.train.state import abstract_params, abstract_state, create_state
from k3jax.train.step import make_train_step

use_compile_cache()
plt.rcParams.update({"figure.dpi": 110, "font.size": 9, "axes.spines.top": False, "axes.spines.right": False})

# %% [markdown]
# **Change this cell to try another mesh**, then run all. The axes are `data`, `expert`, `context` and `tensor`; their
# sizes multiply to at most eight. `fsdp=True` cuts the parameters too. A mesh that does not fit is refused with what
# would: try `tensor=3`.

# %%
MESH = MeshConfig(data=2, expert=2, context=2)

model = ModelConfig(
    vocab_size=256,
    hidden_size=64,
    num_layers=4,
    mla_layers=(3,),
    dense_size=128,
    attn_res_block_size=2,
    kda=KDAConfig(num_heads=8, head_dim=16, chunk_size=16),
    mla=MLAConfig(num_heads=8, q_lora_rank=32, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16),
    moe=MoEConfig(num_experts=16, experts_per_token=2, expert_size=32, latent_size=32, qb_bins=100),
)
config = RunConfig(model, DataConfig(batch_size=8, sequence_length=64), mesh=MESH)

# %% [markdown]
# ## 1. Where does each array live?
#
# Modules name what their axes mean; one table of rules says which mesh axis holds slices of them. Optimizer state is
# always cut over all devices, parameters at rest with `fsdp`.


# %%
def on(mesh_config):
    """The configuration, the mesh and the optimizer for a mesh."""
    run = dataclasses.replace(config, mesh=mesh_config)
    return run, make_mesh(mesh_config), make_optimizer(run.optimizer, abstract_params(run.model), 10)


run, mesh, optimizer = on(MESH)
with jax.set_mesh(mesh):
    rows = placements(abstract_state(run.model, optimizer.transform, mesh, fsdp=MESH.fsdp))
lines = placement_lines(rows)
print("\n".join([*lines[:24], "…", *lines[-4:]]))


# %%
def show(tensor: str) -> None:
    """The device that holds each slice of a parameter, along the two axes that are cut first."""
    (row,) = [row for row in rows if row.tensor == tensor and row.kind == "parameter"]
    sharding = jax.sharding.NamedSharding(mesh, row.spec)
    cut = [i for i, entry in enumerate(row.spec) if entry] or [0]
    place = np.zeros([row.shape[i] for i in (*cut, *[j for j in range(len(row.shape)) if j not in cut])[:2]])
    kept = [*cut, *[j for j in range(len(row.shape)) if j not in cut]][:2]
    for device, index in sharding.devices_indices_map(row.shape).items():
        place[tuple(index[i] for i in kept)] = device.id
    plt.imshow(place, aspect="auto", cmap="tab10", vmin=0, vmax=9, interpolation="nearest")
    plt.ylabel(row.axes[kept[0]])
    plt.xlabel(row.axes[kept[1]])
    plt.title(f"{tensor}\n{row.spec}")
    plt.colorbar(label="device (one of those with a copy)")


plt.figure(figsize=(9, 3))
plt.subplot(1, 2, 1)
show("segments/0/runs/1/ffn/w1")
plt.subplot(1, 2, 2)
show("segments/0/runs/1/mixer/q_proj")
plt.tight_layout()
plt.show()

# %% [markdown]
# ## 2. What does a step send?
#
# The compiled program lists its collectives. Bytes are those of each one's result on a device, times how often its loop
# runs is not counted: a program that scans layers names a collective once. On CPUs the experts' exchange is emulated by
# all-gathers; on GPUs it is `ragged-all-to-all`.

# %%
rng = np.random.default_rng(0)
segments = np.sort(rng.integers(1, 4, (8, 64)), axis=1).astype(np.int32)
tokens = rng.integers(0, 256, (8, 64)).astype(np.int32)
batch = {
    "tokens": tokens,
    "targets": np.roll(tokens, -1, axis=1),
    "segment_ids": segments,
    "loss_mask": np.diff(segments, axis=1, append=0) == 0,
}


def step_on(mesh_config):
    """The compiled step and what it makes of the batch, from the same seed whatever the mesh."""
    run, mesh, optimizer = on(mesh_config)
    with jax.set_mesh(mesh):
        state = create_state(run.model, optimizer.transform, mesh, 0, fsdp=mesh_config.fsdp)
        placed = place_batch(batch, 1, mesh)
        step = jax.jit(make_train_step(run, optimizer, np.ones(256, np.int32))).lower(state, placed).compile()
        return step, *jax.device_get(step(state, placed))


step, after, metrics = step_on(MESH)
SIZES = {"pred": 1, "bf16": 2, "f32": 4, "s32": 4, "u32": 4, "f64": 8}
sent = defaultdict(lambda: [0, 0])
kinds = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
for dtype, shape, kind in re.findall(rf"= \(?(\w+)\[([\d,]*)\][^=]* ({kinds})\(", step.as_text()):
    sent[kind][0] += 1
    sent[kind][1] += SIZES.get(dtype, 4) * math.prod(int(n) for n in shape.split(",") if n)
for kind, (count, size) in sorted(sent.items()):
    print(f"{kind:20} {count:4} in the program, {size / 1024:8.1f} KiB")

# %%
plt.figure(figsize=(6, 2.4))
plt.barh(list(sent), [size / 1024 for _, size in sent.values()])
plt.xlabel("KiB of results on one device")
plt.ylabel("collective")
plt.title(", ".join(f"{axis} {n}" for axis, n in mesh.shape.items() if n > 1) or "one device")
plt.show()

# %% [markdown]
# ## 3. Is it the same function?
#
# One optimizer step on one device, from the same seed and batch. In float32 the two differ by rounding alone; the tests
# repeat this in float64 to 1e-9 for every axis and for combinations.

# %%
_, alone, alone_metrics = step_on(MeshConfig())
print(f"loss {metrics['loss']:.7f} on the mesh, {alone_metrics['loss']:.7f} on one device")
apart = [
    float(np.max(np.abs(a - b)) / max(np.max(np.abs(b)), 1e-12))
    for a, b in zip(jax.tree.leaves(after.params), jax.tree.leaves(alone.params))
]
plt.figure(figsize=(6, 2.4))
plt.semilogy(sorted(apart), marker=".", lw=0)
plt.axhline(np.finfo(np.float32).eps, color="grey", lw=0.8, label="rounding of float32")
plt.xlabel("parameters, sorted")
plt.ylabel("largest difference\nover largest value")
plt.legend()
plt.show()
assert max(apart) < 1e-3, "the mesh computes another function"

# %% [markdown]
# ## 4. How does MoonEP share out rows?
#
# Each rank is home to a few experts. When the router prefers some, their ranks would compute more; MoonEP copies busy
# experts to others so that every rank computes the same number of rows, with shapes that never change.

# %%
RANKS, EXPERTS, PER_RANK = 8, 64, 1024
popularity = np.random.default_rng(1).dirichlet(np.full(EXPERTS, 0.15))
counts = np.stack([np.random.default_rng(r).multinomial(PER_RANK, popularity) for r in range(RANKS)])
figure, panels = plt.subplots(1, 2, figsize=(9, 2.8), sharey=True)
plans = {"at home": plan_at_home(jnp.asarray(counts)), "balanced (MoonEP)": plan_balanced(jnp.asarray(counts))}
for panel, (name, plan) in zip(panels, plans.items()):
    bottom = np.zeros(RANKS)
    for slot in range(plan.rows_RG.shape[1]):
        is_copy = slot >= EXPERTS // RANKS
        height = np.asarray(plan.rows_RG[:, slot])
        panel.bar(range(RANKS), height, bottom=bottom, color=f"C{1 if is_copy else 0}", edgecolor="white", lw=0.3)
        bottom += height
    panel.set_title(f"{name}: busiest rank {bottom.max():.0f} rows")
    panel.set_xlabel("rank")
panels[0].set_ylabel("rows (blue: experts at home, orange: copies)")
plt.show()
print(f"slots for copies on each rank: {copy_slots(EXPERTS, RANKS)}")
