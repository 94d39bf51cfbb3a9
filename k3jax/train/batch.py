"""Host batches on the mesh, and which of their rows and images this process needs.

Images of a micro-batch are packed into rows of `data.images.patches` patches, which lie on all devices but those of
`context`, which share a row. How many rows there are is one of few numbers, each compiled for itself: none without
images, what the share of images asks for as a rule, and what every row of text full of images would need. In a single
process images go wherever there is least to do; of several processes each keeps those of its own rows of text, and the
number of rows is always the largest, since none knows what the others read.

Legend: M micro-batches, B sequences in one, T time, R rows of patches, P patches in one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from k3jax.config import RunConfig
from k3jax.data.patches import arrange, rows_needed, text_rows
from k3jax.sharding import spec

Batch = dict[str, jax.Array]
DEVICE_KEYS = ("tokens", "targets", "segment_ids", "loss_mask")
PATCH_KEYS = ("patches", "patch_item", "patch_position", "patch_grid", "patch_feature")
"""Of images, by row of patches; `media_index` comes with them, by token."""


@dataclass(frozen=True)
class PatchRows:
    """How the images of a micro-batch become rows of patches.

    Attributes:
        patches: P.
        choices: numbers of rows R that are compiled for, ascending.
        media_token: the token that an image's features stand for.
    """

    patches: int
    choices: tuple[int, ...]
    media_token: int
    merge: int
    patch_size: int

    @property
    def usual(self) -> int:
        return self.choices[0]


def patch_rows(config: RunConfig, mesh: jax.sharding.Mesh, media_token: int) -> PatchRows | None:
    """Of a run; None where it reads no images."""
    images, vision = config.data.images, config.model.vision
    if images.source is None or vision is None:
        return None
    sequences = config.data.batch_size // config.train.accumulation
    ways = math.prod(mesh.shape[axis] for axis in ("data", "expert", "tensor"))
    usual, most = (ways * math.ceil(n / ways) for n in (math.ceil(images.share * sequences), sequences))
    choices = (most,) if jax.process_count() > 1 else tuple(sorted({usual, most}))
    return PatchRows(images.patches, choices, media_token, vision.merge, vision.patch_size)


def _own_parts(mesh: jax.sharding.Mesh, axis: str = "batch") -> tuple[list[int], int]:
    """Of the equal parts that the mesh cuts an axis into: those on devices of this process, and how many all."""
    sharding = NamedSharding(mesh, spec(axis))
    ways = mesh.size // sharding.shard_shape((mesh.size,))[0]
    indices = sharding.addressable_devices_indices_map((ways,)).values()
    return sorted({index[0].indices(ways)[0] for index in indices if index is not None}), ways


def own_rows(batch_size: int, accumulation: int, mesh: jax.sharding.Mesh) -> list[int]:
    """Rows of a global batch [M·B, T] that devices of this process need, ascending; others may need them too."""
    parts, ways = _own_parts(mesh)
    return np.arange(batch_size).reshape(accumulation, ways, -1)[:, parts].ravel().tolist()


def place_batch(
    batch: dict[str, Any], accumulation: int, mesh: jax.sharding.Mesh, images: PatchRows | None = None
) -> Batch:
    """A host batch as device arrays [M, B, T], rows sharded over data × expert, time over context.

    Args:
        batch: the rows `own_rows` of the global batch, [M·B, T] in a single process.
        images: how its images are packed, into `PATCH_KEYS` [M, R, …] and `media_index` [M, B, T]; there are none where
            the batch has no image.

    Raises:
        DataError: images that do not fit in their rows.
    """
    arrays = {key: np.asarray(batch[key]) for key in DEVICE_KEYS}
    placed = {}
    if images is not None and (found := packed(batch, accumulation, mesh, images)) is not None:
        arrays["media_index"] = found.pop("media_index")
        placed = {key: _place(x, accumulation, mesh, "patch_row", "patch") for key, x in found.items()}
    return {key: _place(x, accumulation, mesh, "batch", "time") for key, x in arrays.items()} | placed


def _place(x: np.ndarray, accumulation: int, mesh: jax.sharding.Mesh, *axes: str) -> jax.Array:
    """[M·B, …], the rows of this process, as [M, B, …] cut by two logical axes."""
    sharding = NamedSharding(mesh, PartitionSpec(None, *spec(*axes)))
    parts, ways = _own_parts(mesh, axes[0])
    micro = x.reshape(accumulation, len(parts), -1, *x.shape[1:])
    rows = micro.shape[2]  # of one part

    def shard(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None
        first = parts.index(index[1].indices(ways * rows)[0] // rows)
        return micro[index[0], first, :, *index[2:]]

    return jax.make_array_from_callback((accumulation, ways * rows, *x.shape[1:]), sharding, shard)


def packed(
    batch: dict[str, Any], accumulation: int, mesh: jax.sharding.Mesh, images: PatchRows
) -> dict[str, np.ndarray] | None:
    """The images of this process's rows: `PATCH_KEYS` [M·R, …] and `media_index` [M·B, T]; None without any.

    Raises:
        DataError: images that do not fit in their rows.
    """
    items, tokens = batch["images"], np.asarray(batch["tokens"])
    alone = jax.process_count() == 1
    if alone and not any(items):
        return None
    parts, _ = _own_parts(mesh)
    groups = [0] if alone else parts  # whose images are packed together
    per_group = len(tokens) // (accumulation * len(groups))
    starts = range(0, len(tokens), per_group)
    rows = images.usual
    if alone:
        micro = [items[at : at + per_group] for at in starts]
        counts = [[len(item.patches) for row in part for item in row] for part in micro]
        rows = max(rows_needed(n, images.patches, images.choices, text_rows(part)) for n, part in zip(counts, micro))
    share = rows if alone else rows // _own_parts(mesh)[1]
    options = {"media_token": images.media_token, "merge": images.merge, "patch_size": images.patch_size}
    out: dict[str, list[np.ndarray]] = {}
    for number, at in enumerate(starts):
        part = slice(at, at + per_group)
        arrays = arrange(items[part], tokens[part], rows=share, patches=images.patches, **options)
        first = 0 if alone else groups[number % len(groups)] * share
        index = arrays["media_index"]
        arrays["media_index"] = np.where(index < 0, index, index + first * images.patches // images.merge**2)
        if not alone:  # a process may hold some of the slices of a part's rows only
            held, ways = _own_parts(mesh, "patch_row")
            size = rows // ways
            mine = [p for p in held if first <= p * size < first + share]
            for key in PATCH_KEYS:
                arrays[key] = np.concatenate([arrays[key][p * size - first : (p + 1) * size - first] for p in mine])
        for key, value in arrays.items():
            out.setdefault(key, []).append(value)
    return {key: np.concatenate(values) for key, values in out.items()}


def abstract_batch(
    config: RunConfig, mesh: jax.sharding.Mesh, images: PatchRows | None = None, rows: int = 0
) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and shardings of what `place_batch` returns, with `rows` rows of patches."""
    M = config.train.accumulation
    sequences, T = config.data.batch_size // M, config.data.sequence_length

    def shapes(axes: tuple[str, str]) -> Callable[..., jax.ShapeDtypeStruct]:
        sharding = NamedSharding(mesh, PartitionSpec(None, *spec(*axes)))
        return lambda shape, dtype=jnp.int32: jax.ShapeDtypeStruct((M, *shape), dtype, sharding=sharding)

    text = shapes(("batch", "time"))
    types = dict.fromkeys(DEVICE_KEYS, jnp.int32) | {"loss_mask": jnp.bool_}
    out = {key: text((sequences, T), types[key]) for key in DEVICE_KEYS}
    if images is None or not rows:
        return out
    P, of_patches = images.patches, shapes(("patch_row", "patch"))
    return out | {
        "media_index": text((sequences, T)),
        "patches": of_patches((rows, P, 3 * images.patch_size**2), jnp.uint8),
        "patch_item": of_patches((rows, P)),
        "patch_position": of_patches((rows, P, 3)),
        "patch_grid": of_patches((rows, P, 3)),
        "patch_feature": of_patches((rows, P // images.merge**2)),
    }


def rows_of(batch: Batch) -> int:
    """Rows of patches of a placed batch; 0 where it has no image."""
    return batch["patches"].shape[1] if "patches" in batch else 0
