"""The optimizer: Muon per head, per expert or per matrix, AdamW for the rest, and QK-clip.

`make_optimizer` decides by the name of every parameter (`LEAVES`) and refuses names that it does not know. A Muon leaf
is a stack of matrix blocks; Newton-Schulz and the RMS rule see one block at a time. The letters of a layout say what
each axis of the leaf is: r and c are rows and columns of the block (several axes of a letter are flattened together), b
counts independent blocks. A stack of layers adds one more b axis in front, so stacked and single layers train alike.

    g_t  clipped to the global norm
    Muon   M ← 0.95 M + g,  U = g + 0.95 M,  u = 0.2·sqrt(max(rows, cols))·NewtonSchulz(U)     (Moonlight §2.2)
    AdamW  u = m̂ / (sqrt(v̂) + eps)
    W ← W − lr·(u + 0.1 W)        the 0.1 only where `Leaf.decay` says so

On a mesh, Newton-Schulz runs on whole blocks, each on one device. Experts and heads that are cut between blocks stay
where they are. Of all other blocks of one shape (matrices of a stack of layers, lone matrices) each device owns a
share: it receives the pieces of those, and sends pieces of the update back, as the report's distributed Muon does.
The update is that of one device to rounding.

Sources: the report (per-head Muon on Q, K and V, weight decay 0.1, cosine with 1 % warm-up, QK-clip kept from K2);
everything else after Moonlight (arXiv 2502.16982), since the report gives no other numbers.

Shape suffixes: M MLA layers, N layers of a stack, H heads, R LoRA rank, C nope + rope.
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax

from k3jax.config import OptimizerConfig
from k3jax.ops.newton_schulz import newton_schulz, normalized, resolve_implementation
from k3jax.sharding import axes_of, parallel_axes

LARGE = 2**25
"""Entries of a leaf whose blocks are not joined with those of others for the Newton-Schulz kernel."""

Group = Literal["muon_head", "muon_matrix", "muon_expert", "adamw"]
GROUPS: tuple[Group, ...] = ("muon_head", "muon_matrix", "muon_expert", "adamw")


@dataclass(frozen=True)
class Leaf:
    """How one parameter is trained. `layout` is empty for AdamW; see the module's first lines."""

    group: Group
    layout: str = ""
    decay: bool = True


_HEAD, _EXPERT, _MATRIX = Leaf("muon_head", "rbc"), Leaf("muon_expert", "brc"), Leaf("muon_matrix", "rc")
_ADAMW, _NO_DECAY = Leaf("adamw"), Leaf("adamw", decay=False)

# Moonlight decays all it trains. Gains, pseudo-queries and gate constants (A_log, dt_bias) are left out here: their
# zero is no neutral point (a gain of 0 mutes a layer). Whatever multiplies activations decays, under AdamW too.
LEAVES: Mapping[str, Leaf] = (
    dict.fromkeys(("q_proj", "k_proj", "v_proj", "q_b", "k_b", "v_b"), _HEAD)
    | dict.fromkeys(("w1", "w2", "w3"), _EXPERT)
    | dict.fromkeys(("q_a", "kv_a", "f_a", "g_a", "router", "latent_down", "latent_up", "gate", "up", "down"), _MATRIX)
    | dict.fromkeys(("fc0", "fc1"), _MATRIX)
    | dict.fromkeys(("f_b", "g_b", "g_proj"), Leaf("muon_matrix", "rcc"))
    | {"o_proj": Leaf("muon_matrix", "rrc")}
    | dict.fromkeys(("embed", "lm_head", "patch_embed", "positions", "q_conv", "k_conv", "v_conv", "b_proj"), _ADAMW)
    | dict.fromkeys(("norm", "input_norm", "post_norm", "final_norm", "o_norm"), _NO_DECAY)
    | dict.fromkeys(("q_a_norm", "kv_a_norm", "latent_norm", "proj", "A_log", "dt_bias"), _NO_DECAY)
)
_SPLIT_OUTPUTS: Mapping[str, Leaf] = {
    "g_proj": _HEAD,
    "g_b": _HEAD,
    "o_proj": Leaf("muon_head", "brc"),
}


@dataclass(frozen=True)
class Optimizer:
    """What the trainer needs: the transformation, its learning rate by step, and the group of every parameter."""

    transform: optax.GradientTransformation
    schedule: optax.Schedule
    groups: Any
    """Tree of `Group` names with the structure of the parameters."""


def make_optimizer(config: OptimizerConfig, params: Any, total_steps: int) -> Optimizer:
    """Builds the optimizer for a tree of parameters (arrays or shapes).

    Raises:
        ValueError: a parameter whose name is not in `LEAVES`, or whose rank does not fit its layout.
    """
    leaves = jax.tree_util.tree_map_with_path(lambda path, x: _leaf(path, x, config), params)
    groups = jax.tree.map(lambda leaf: leaf.group, leaves)
    muon = optax.chain(
        optax.trace(config.muon_momentum, nesterov=True),
        optax.stateless(lambda updates, _: _orthogonalize_tree(updates, config)),
    )
    adam = optax.scale_by_adam(config.adam_b1, config.adam_b2, config.adam_eps)
    schedule = make_schedule(config, total_steps)
    transform = optax.chain(
        optax.identity() if config.clip_norm is None else _clip_by_global_norm(config.clip_norm),
        # a K3 tree is callable itself, so optax would call it for the labels: hence the functions
        optax.partition({group: adam if group == "adamw" else muon for group in GROUPS}, lambda _: groups),
        optax.add_decayed_weights(config.weight_decay, lambda _: jax.tree.map(lambda leaf: leaf.decay, leaves)),
        optax.scale_by_learning_rate(schedule),
    )
    return Optimizer(transform, schedule, groups)


def _clip_by_global_norm(max_norm: float) -> optax.GradientTransformationExtraArgs:
    """`optax.clip_by_global_norm`; `update(…, grad_norm=…)` tells the norm where the gradients are a part of all."""

    def update(updates: Any, state: Any, params: Any = None, *, grad_norm: Any = None, **_: Any) -> tuple[Any, Any]:
        norm = optax.tree.norm(updates) if grad_norm is None else grad_norm
        clip = lambda t: jnp.where(norm < max_norm, t, t / norm.astype(t.dtype) * max_norm)  # noqa: E731
        return jax.tree.map(clip, updates), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def make_schedule(config: OptimizerConfig, total_steps: int) -> optax.Schedule:
    """Learning rate by step: linear over the first `warmup_ratio` (at least one step), then a cosine.

    The peak is reached at the last step of the warm-up and the minimum at step `total_steps` − 1; no step has rate 0.
    """
    warmup = max(1, round(config.warmup_ratio * total_steps))
    peak = config.learning_rate
    return optax.join_schedules(
        [
            lambda step: peak * (step + 1) / warmup,
            optax.cosine_decay_schedule(peak, max(1, total_steps - warmup), config.min_learning_rate_ratio),
        ],
        [warmup - 1],
    )


def update_squares(updates: Any, groups: Any) -> dict[str, tuple[jax.Array, int]]:
    """Sum of squares of an update (a float32 scalar) and its size by group (the groups that occur)."""
    squares: dict[str, list[tuple[jax.Array, int]]] = {}
    for update, group in zip(jax.tree.leaves(updates), jax.tree.leaves(groups), strict=True):
        squares.setdefault(group, []).append((jnp.sum(jnp.square(update.astype(jnp.float32))), update.size))
    totals = ((group, cast(jax.Array, sum(s for s, _ in found)), found) for group, found in sorted(squares.items()))
    return {group: (total, sum(n for _, n in found)) for group, total, found in totals}


def update_rms(updates: Any, groups: Any) -> dict[str, jax.Array]:
    """Root mean square of an update by group (the groups that occur), as float32 scalars."""
    return {group: jnp.sqrt(square / size) for group, (square, size) in update_squares(updates, groups).items()}


def qk_clip(params: Any, max_logit_MH: jax.Array, threshold: float, rows: Mapping[str, Any]) -> Any:
    """Scales the query and key weights of MLA heads whose largest logit passed `threshold` (K2, arXiv 2507.20534).

    With gamma = min(1, threshold / max logit), the nope parts of query and key get sqrt(gamma) each and the rope part
    of the query gets gamma, because its key is shared by all heads and stays as it is. All logits of the head shrink
    by gamma. A head whose largest logit is not finite (or not positive) is left alone.

    Args:
        params: the whole tree, after the update.
        max_logit_MH: largest scaled logit of the step by MLA layer and head, over the whole global batch.
        threshold: tau, positive.
        rows: path of each MLA module ("segments/0/runs/1/mixer") → its rows of `max_logit_MH`: one index, or for a
            stack of N layers the N indices in the order of the stack.

    Raises:
        ValueError: a path of `rows` without `k_b` and one of `q_b`, `q_proj`.
    """
    flat, treedef = jax.tree_util.tree_flatten_with_path(params)
    place = {"/".join(path_names(path)): i for i, (path, _) in enumerate(flat)}
    leaves = [leaf for _, leaf in flat]
    for module, row in rows.items():
        key = place.get(f"{module}/k_b")
        query = place.get(f"{module}/q_b", place.get(f"{module}/q_proj"))
        if key is None or query is None:
            raise ValueError(f"QK-clip: no MLA query and key weights under {module!r}")
        logit_NH = max_logit_MH[np.asarray(row)]
        clipped = jnp.isfinite(logit_NH) & (logit_NH > threshold)
        gamma = jnp.where(clipped, threshold / jnp.where(clipped, logit_NH, threshold), 1.0)[..., None, :, None]
        nope = leaves[key].shape[-1]
        is_nope_C = jnp.arange(leaves[query].shape[-1]) < nope
        leaves[key] = (leaves[key] * jnp.sqrt(gamma)).astype(leaves[key].dtype)
        leaves[query] = (leaves[query] * jnp.where(is_nope_C, jnp.sqrt(gamma), gamma)).astype(leaves[query].dtype)
    return jax.tree.unflatten(treedef, leaves)


def path_names(path: tuple[Any, ...]) -> list[str]:
    """A key path as names; the `.value` level of Flax variables is left out."""
    parts = [jax.tree_util.keystr((key,), simple=True) for key in path]
    return parts[:-1] if parts[-1] == "value" else parts


def _leaf(path: tuple[Any, ...], x: Any, config: OptimizerConfig) -> Leaf:
    where = "/".join(path_names(path))
    name = path_names(path)[-1]
    leaf = (config.muon_split_outputs and _SPLIT_OUTPUTS.get(name)) or LEAVES.get(name)
    if leaf is None:
        raise ValueError(
            f"the optimizer does not know how to train parameter {where!r} {tuple(x.shape)}: name it in LEAVES"
        )
    if leaf.layout and x.ndim - len(leaf.layout) not in (0, 1):
        raise ValueError(
            f"parameter {where!r} has shape {tuple(x.shape)}; Muon expects {len(leaf.layout)} axes ({leaf.layout}), "
            "or one more in front for a stack of layers"
        )
    return leaf


@dataclass(frozen=True)
class _Blocks:
    """Leaves whose blocks have one shape and are cut alike: Newton-Schulz runs on all of them at once."""

    layouts: tuple[str, ...]
    shape: tuple[int, int]
    """Rows and columns of a whole block."""
    cuts: tuple[tuple[Literal["r", "c", ""], tuple[str, ...]], ...]
    """How blocks are cut: "r" or "c" with the mesh axes that cut their rows or columns; "" with the mesh axes that hold
    equal copies. Cuts between blocks need nothing and are not here."""


def _orthogonalize_tree(updates: Any, config: OptimizerConfig) -> Any:
    flat, treedef = jax.tree_util.tree_flatten_with_path(updates)
    layouts = [_leaf(path, update, config).layout.rjust(update.ndim, "b") for path, update in flat]
    devices = parallel_axes()
    together: dict[Any, list[int]] = {}
    for i, ((_, update), layout) in enumerate(zip(flat, layouts)):
        shape, cuts = _block_shape(update, layout), _cuts(update, layout, devices)
        # XLA wants all blocks of a shape in one call; the kernel does not, and joining takes time and memory
        implementation = resolve_implementation(config.muon_ns_implementation, shape, config.muon_ns_dtype)
        alone = implementation == "pallas" and not cuts and update.size > LARGE
        together.setdefault((shape, cuts, i if alone else None), []).append(i)
    out: list[Any] = [None] * len(flat)
    for (shape, cuts, _), members in together.items():
        group = _Blocks(tuple(layouts[i] for i in members), shape, cuts)
        orthogonalize = functools.partial(_orthogonalize, group=group, config=config)
        arrays = [flat[i][1] for i in members]
        if devices:
            specs = [jax.typeof(update).sharding.spec for update in arrays]
            # check_vma=False: what is whole everywhere is so because all devices gather the same blocks
            orthogonalize = jax.shard_map(orthogonalize, in_specs=(specs,), out_specs=specs, check_vma=False)
        for i, result in zip(members, orthogonalize(arrays)):
            out[i] = result
    return jax.tree.unflatten(treedef, out)


def _cuts(update: jax.Array, layout: str, devices: tuple[str, ...]) -> Any:
    """`_Blocks.cuts` of a leaf."""
    cuts = [(letter, axes_of(update, i)) for i, letter in enumerate(layout) if axes_of(update, i)]
    copies = tuple(axis for axis in devices if axis not in axes_of(update))
    return (*((letter, over) for letter, over in cuts if letter != "b"), *([("", copies)] if copies else []))


def _block_shape(update: jax.Array, layout: str) -> tuple[int, int]:
    rows, columns = (math.prod(n for n, axis in zip(update.shape, layout) if axis == letter) for letter in "rc")
    return rows, columns


def _orthogonalize(updates: list[jax.Array], group: _Blocks, config: OptimizerConfig) -> list[jax.Array]:
    """Newton-Schulz on every block of leaves (on a mesh: of each device's parts), all at once, scaled so that an
    orthogonal block has RMS `muon_rms`. It only ever sees whole blocks: those that are cut go to owners and back."""
    orders = [[axis for letter in "brc" for axis, a in enumerate(layout) if a == letter] for layout in group.layouts]
    shapes = [[update.shape[axis] for axis in order] for update, order in zip(updates, orders)]
    parts = []
    for update, order, layout in zip(updates, orders, group.layouts):
        part = jnp.transpose(update.astype(config.muon_ns_dtype), order)
        part = part.reshape(-1, *_block_shape(update, layout))
        parts.append(part if group.cuts else normalized(part))
    ends = np.cumsum([len(part) for part in parts])[:-1].tolist()
    blocks = jnp.concatenate(parts) if len(parts) > 1 else parts[0]
    counts = []
    for cut in group.cuts:
        counts.append(len(blocks))
        blocks = _to_owners(blocks, *cut)
    blocks = normalized(blocks) if group.cuts else blocks
    blocks, scale = newton_schulz(blocks, config.muon_ns_steps, config.muon_ns_implementation)
    for cut, count in zip(reversed(group.cuts), reversed(counts)):
        blocks = _from_owners(blocks, *cut)[:count]
    scale *= config.muon_rms * math.sqrt(max(group.shape))
    out = []
    for update, order, shape, y in zip(updates, orders, shapes, jnp.split(blocks, ends) if ends else [blocks]):
        orthogonal = jnp.transpose(y.reshape(shape), np.argsort(order).tolist())
        out.append(orthogonal.astype(update.dtype) * scale)
    return out


def _to_owners(blocks: jax.Array, cut: Literal["r", "c", ""], devices: tuple[str, ...]) -> jax.Array:
    """Pieces of all blocks [n, rows, columns] → wholer blocks of this device's share of them, zeros to fill up.

    The pieces of a block that is cut along the inner of two flattened axes come together in another order. That
    permutes its rows or columns, which Newton-Schulz commutes with, and the way back undoes it.
    """
    ways = math.prod(jax.lax.axis_size(axis) for axis in devices)
    share = -(-len(blocks) // ways)
    blocks = jnp.pad(blocks, ((0, share * ways - len(blocks)), (0, 0), (0, 0)))
    if not cut:
        return jax.lax.dynamic_slice_in_dim(blocks, jax.lax.axis_index(devices) * share, share)
    return jax.lax.all_to_all(blocks, devices, 0, "brc".index(cut), tiled=True)


def _from_owners(blocks: jax.Array, cut: Literal["r", "c", ""], devices: tuple[str, ...]) -> jax.Array:
    """Inverse of `_to_owners`; the filling stays."""
    if not cut:
        return jax.lax.all_gather(blocks, devices, tiled=True)
    return jax.lax.all_to_all(blocks, devices, "brc".index(cut), 0, tiled=True)
