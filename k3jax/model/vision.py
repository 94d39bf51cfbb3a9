"""MoonViT-V2 and its projector: patches of images and short videos → rows of the embedding sequence.

    e = W_patch patch + positions(row, column) + time(frame)
    x ← x + W_o Attn( rms(x) );   x ← x + W_1 gelu_tanh( W_0 rms(x) )       for every block
    feature = rms( W_1 gelu( W_0 [ mean over frames of 2 × 2 neighbours of rms(x), side by side ] ) )

Items of any size are packed in rows of a fixed length and see only themselves, in both directions. Queries and keys are
turned by column (even pairs) and row (odd pairs). The temporal part is a fixed sinusoid, added where an item has more
than one frame. After the released tower as public ports describe it; the report trains it from scratch.

Rows of patches lie on all devices of the mesh but for "context", which cuts them: keys and values are then gathered.

Legend: R rows of patches, P patches in one, G = P / merge² groups in one, D width of the tower, H heads, K head dim,
B batch, T time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from k3jax.config import ModelConfig, VisionConfig
from k3jax.model import init
from k3jax.ops.attention import attention
from k3jax.ops.common import wide
from k3jax.ops.norms import rms_norm
from k3jax.ops.rotary import rotate_pairs
from k3jax.sharding import axes_of, gathered, island, layout, place

_WAVELENGTH = 10_000.0


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Images:
    """Patches packed in rows, and the tokens that they become; made by `k3jax.data.patches.arrange`.

    The patches of an item stand in one row, frame by frame, and in a frame merge group by merge group.
    """

    patches: jax.Array
    """[R, P, 3·patch²]: pixels (channel, row, column), as uint8 or in [−1, 1]."""
    item: jax.Array
    """[R, P] int32: number of the item within the row, from 1; 0 = padding."""
    position: jax.Array
    """[R, P, 3] int32: frame, row and column in the item."""
    grid: jax.Array
    """[R, P, 3] int32: frames, rows and columns of the item."""
    feature: jax.Array
    """[R, G] int32: place among the features of the row that a group adds to; G = padding."""
    index: jax.Array
    """[B, T] int32: row · G + place of the feature that stands for a token; −1: the token's own embedding."""

    @classmethod
    def of(cls, arrays: Mapping[str, jax.Array]) -> Images | None:
        """From the arrays of a batch; None where it has no patches."""
        if "patches" not in arrays:
            return None
        item, position, grid, feature = (arrays[f"patch_{name}"] for name in ("item", "position", "grid", "feature"))
        return cls(arrays["patches"], item, position, grid, feature, arrays["media_index"])


def require_tower(vision: VisionConfig | None) -> VisionConfig:
    """The configuration of a model's tower.

    Raises:
        ValueError: there is none.
    """
    if vision is None:
        raise ValueError("this model takes no images: its config has no `vision` (see `k3jax.config.VisionConfig`)")
    return vision


class VisionBlock(nnx.Module):
    """One pre-norm block of the tower: x [R, P, D] → [R, P, D]."""

    def __init__(self, config: ModelConfig, vision: VisionConfig, key: jax.Array):
        make = init.Maker(config, key)
        D, H, K, F = vision.hidden_size, vision.num_heads, vision.head_dim, vision.mlp_size
        self.vision = vision
        self.input_norm, self.post_norm = (make("embed", D, init=init.ones) for _ in range(2))
        self.q_proj, self.k_proj, self.v_proj = (make("embed vision_heads kda_key", D, H, K) for _ in range(3))
        self.o_proj = make("vision_heads kda_key embed", H, K, D)
        self.fc0, self.fc1 = make("embed vision_mlp", D, F), make("vision_mlp embed", F, D)

    def __call__(self, x_RPD: jax.Array, item_RP: jax.Array, angles: jax.Array) -> jax.Array:
        """`angles` [R, P, K/2] turn queries and keys."""
        dtype, eps = x_RPD.dtype, self.vision.norm_eps
        y = rms_norm(x_RPD, self.input_norm[...], eps)
        q, k, v = (
            jnp.einsum("rpd,dhk->rphk", y, w[...].astype(dtype)) for w in (self.q_proj, self.k_proj, self.v_proj)
        )
        o = _attend(rotate_pairs(q, angles), rotate_pairs(k, angles), v, item_RP)
        x_RPD += jnp.einsum("rphk,hkd->rpd", o.astype(dtype), self.o_proj[...].astype(dtype))
        y = rms_norm(x_RPD, self.post_norm[...], eps) @ self.fc0[...].astype(dtype)
        return x_RPD + jax.nn.gelu(y, approximate=True) @ self.fc1[...].astype(dtype)


class Projector(nnx.Module):
    """Merged patches [..., merge² · D] → features of the text model's width; the exact GELU here."""

    def __init__(self, config: ModelConfig, vision: VisionConfig, key: jax.Array):
        make, width = init.Maker(config, key), vision.merged_size
        self.vision = vision
        self.fc0, self.fc1 = (
            make("vision_mlp vision_mlp", width, width),
            make("vision_mlp embed", width, config.hidden_size),
        )
        self.post_norm = make("embed", config.hidden_size, init=init.ones)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = jax.nn.gelu(x @ self.fc0[...].astype(x.dtype), approximate=False) @ self.fc1[...].astype(x.dtype)
        return rms_norm(y, self.post_norm[...], self.vision.projector_norm_eps)


class Vision(nnx.Module):
    """Tower and projector: `Images` → features [R, G, hidden size of the text model] in the compute dtype."""

    def __init__(self, config: ModelConfig, key: jax.Array):
        assert config.vision is not None
        make, vision = init.Maker(config, key), config.vision
        self.config = config
        self.patch_embed = make("pixels embed", 3 * vision.patch_size**2, vision.hidden_size)
        self.positions = make("pixels pixels embed", *vision.position_grid, vision.hidden_size)
        keys = jax.random.split(make.key(), vision.num_layers)
        self.blocks = jax.vmap(partial(VisionBlock, config, vision))(keys)
        self.final_norm = make("embed", vision.hidden_size, init=init.ones)
        self.projector = Projector(config, vision, make.key())

    def __call__(self, images: Images, *, remat: bool = False) -> jax.Array:
        """Features of the groups of every row; those of padding are unspecified.

        Args:
            remat: keep only the input of every block for the backward pass.
        """
        return self.project(self.encode(images, remat=remat), images)

    def encode(self, images: Images, *, remat: bool = False) -> jax.Array:
        """The tower alone: the normed stream of every patch [R, P, D]."""
        x, vision = self.embed(images), self._vision
        angles = rotary_angles(images.position, vision.head_dim)

        def block(x: jax.Array, block: VisionBlock) -> tuple[jax.Array, None]:
            return gathered(block)(x, images.item, angles), None

        x, _ = jax.lax.scan(jax.checkpoint(block) if remat else block, x, self.blocks)
        return rms_norm(x, gathered(self.final_norm)[...], vision.norm_eps)

    def embed(self, images: Images) -> jax.Array:
        """What the first block reads [R, P, D]: patches with positions and time."""
        dtype = jnp.dtype(self.config.dtype)
        pixels = images.patches
        if pixels.dtype == jnp.uint8:
            pixels = pixels.astype(jnp.float32) * (2 / 255) - 1
        x = pixels.astype(dtype) @ gathered(self.patch_embed)[...].astype(dtype)
        table = gathered(self.positions)[...]
        where = table_positions(table, images.position, images.grid) + time_vectors(
            images.position[..., 0], images.grid[..., 0], table.shape[-1], jnp.promote_types(table.dtype, jnp.float32)
        )
        return x + where.astype(dtype)

    def project(self, x_RPD: jax.Array, images: Images) -> jax.Array:
        """Merge and projector: the tower's result → [R, G, hidden size of the text model]."""
        return gathered(self.projector)(merged(x_RPD, images, self._vision.merge))

    @property
    def _vision(self) -> VisionConfig:
        assert self.config.vision is not None
        return self.config.vision


def table_positions(table: jax.Array, position_RP3: jax.Array, grid_RP3: jax.Array) -> jax.Array:
    """The table [rows, columns, D] resized to each item's grid, at each patch → [R, P, D] in at least float32.

    Bilinear with half-pixel centres and no antialiasing; a grid of the table's own size reads it as it is.
    """
    rows, columns, D = table.shape
    wide = jnp.promote_types(table.dtype, jnp.float32)
    flat = table.reshape(rows * columns, D).astype(wide)

    def taps(axis: int, size: int) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
        at = (position_RP3[..., axis].astype(wide) + 0.5) * (size / grid_RP3[..., axis].astype(wide)) - 0.5
        at = jnp.clip(at, 0, size - 1)
        low = jnp.floor(at)
        share, low = at - low, low.astype(jnp.int32)
        return (low, 1 - share), (jnp.minimum(low + 1, size - 1), share)

    out = _beside(position_RP3)
    parts = [
        flat.at[row * columns + column].get(out_sharding=out) * (row_share * column_share)[..., None]
        for row, row_share in taps(1, rows)
        for column, column_share in taps(2, columns)
    ]
    return parts[0] + parts[1] + parts[2] + parts[3]


def time_vectors(frame_RP: jax.Array, frames_RP: jax.Array, width: int, dtype) -> jax.Array:
    """[sin(τω) | cos(τω)] of each patch's frame τ, ω_i = 10000^(−2i/width); 0 in items of one frame → [R, P, width]."""
    omega = _WAVELENGTH ** (-jnp.arange(width // 2, dtype=dtype) / (width // 2))
    angle = frame_RP[..., None].astype(dtype) * omega
    return jnp.where((frames_RP > 1)[..., None], jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=-1), 0)


def rotary_angles(position_RP3: jax.Array, head_dim: int) -> jax.Array:
    """Angle of each pair of a head's elements [R, P, K/2]: pairs 2i by column, 2i + 1 by row, · 10000^(−4i/K)."""
    dtype = jnp.promote_types(jnp.float32, jnp.result_type(float))
    omega = _WAVELENGTH ** (-4 * jnp.arange(head_dim // 4, dtype=dtype) / head_dim)
    column, row = (position_RP3[..., axis, None].astype(dtype) * omega for axis in (2, 1))
    return jnp.stack([column, row], axis=-1).reshape(*position_RP3.shape[:2], head_dim // 2)


def _attend(q: jax.Array, k: jax.Array, v: jax.Array, item_RP: jax.Array) -> jax.Array:
    """Attention in both directions within items [R, P, H, K], in at least float32."""
    context, scale = axes_of(q, 1), q.shape[-1] ** -0.5

    def shard(q, k, v, item):
        k, v, kv_item = (jax.lax.all_gather(x, context, axis=1, tiled=True) if context else x for x in (k, v, item))
        return attention(
            q, k, v, scale=scale, segment_ids=item, kv_segment_ids=kv_item, causal=False, return_max_logit=False
        )[0]

    return island(shard, q, k, v, item_RP, out=layout(q))


def merged(x_RPD: jax.Array, images: Images, merge: int) -> jax.Array:
    """Groups of merge² patches side by side, averaged over the frames of their item → [R, G, merge² · D]."""
    (_, patches, D), m = x_RPD.shape, merge * merge
    places, context = patches // m + 1, axes_of(x_RPD, 1)  # the last for padding

    def shard(x: jax.Array, frames: jax.Array, feature: jax.Array) -> jax.Array:
        groups = wide(x).reshape(len(x), -1, m * D) / frames[:, ::m, None]
        add_up = partial(jax.ops.segment_sum, num_segments=places)
        total = jax.vmap(add_up)(groups, feature)[:, :-1]
        return jax.lax.psum_scatter(total, context[0], scatter_dimension=1, tiled=True) if context else total

    return island(shard, x_RPD, images.grid[..., 0], images.feature, out=layout(x_RPD)).astype(x_RPD.dtype)


def _beside(x: jax.Array) -> NamedSharding:
    """Sharding of an array whose first two axes are those of `x`, and its third whole."""
    sharding = jax.typeof(x).sharding
    return NamedSharding(sharding.mesh, P(*sharding.spec[:2], None))


def insert(x_BTD: jax.Array, features_RGD: jax.Array, index_BT: jax.Array) -> jax.Array:
    """Embeddings with the features of images where `index_BT` ≥ 0, in the layout of `x_BTD`."""
    flat = place(features_RGD).reshape(-1, features_RGD.shape[-1])  # few beside the tokens, and wanted anywhere
    index = place(index_BT, *layout(x_BTD)[:2])
    taken = flat.at[jnp.maximum(index, 0)].get(out_sharding=_beside(x_BTD))
    return jnp.where((index >= 0)[..., None], taken.astype(x_BTD.dtype), x_BTD)
