"""Items into rows of patches of a fixed length: several items share a row, an item lies in one row.

    >>> assign([4, 16, 8, 4], rows=2, capacity=16)
    [1, 0, 1, 1]

Legend: B rows of text, T tokens, R rows of patches, P patches of a row, m patches of a merge group (merge²), p pixels.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from k3jax.data.images import Item
from k3jax.data.sources import DataError


def assign(counts: Sequence[int], rows: int, capacity: int, texts: Sequence[int] = ()) -> list[int] | None:
    """The row of each item: the longest first, each to the least loaded row. None if they do not fit.

    Args:
        texts: the row of text of each item. Items may fit so where the longest first do not.
    """
    load, out = [0] * rows, [0] * len(counts)
    for item in sorted(range(len(counts)), key=lambda i: -counts[i]):
        row = min(range(rows), key=load.__getitem__)
        load[row] += counts[item]
        if load[row] > capacity:
            return _by_text(counts, rows, capacity, texts)
        out[item] = row
    return out


def _by_text(counts: Sequence[int], rows: int, capacity: int, texts: Sequence[int]) -> list[int] | None:
    load: dict[int, int] = {}
    for row, count in zip(texts, counts):
        load[row] = load.get(row, 0) + count
    fits = load and max(load) < rows and max(load.values()) <= capacity
    return list(texts) if fits else None


def text_rows(items: Sequence[Sequence[Item]]) -> list[int]:
    """The row of text of each item, as `assign` takes them."""
    return [row for row, of_row in enumerate(items) for _ in of_row]


def rows_needed(counts: Sequence[int], capacity: int, choices: Sequence[int], texts: Sequence[int] = ()) -> int:
    """The first of `choices` (ascending numbers of rows) for which `assign` succeeds.

    Raises:
        DataError: none does.
    """
    for rows in choices:
        if assign(counts, rows, capacity, texts) is not None:
            return rows
    raise _does_not_fit(counts, max(choices), capacity)


def _does_not_fit(counts: Sequence[int], rows: int, capacity: int) -> DataError:
    return DataError(
        f"{len(counts)} images of {sum(counts)} patches, the largest of {max(counts)}, do not fit in {rows} rows of "
        f"{capacity} patches; raise data.images.patches, or the rows, or make images smaller"
    )


def arrange(
    items: Sequence[Sequence[Item]],
    tokens: np.ndarray,
    *,
    media_token: int,
    rows: int,
    patches: int,
    merge: int,
    patch_size: int,
) -> dict[str, np.ndarray]:
    """The patches of a batch, and which feature stands for which token.

    The patches of an item are ordered (frame, merge group, row in the group, column in the group), so m consecutive
    ones are a group. The groups of one place in all frames of an item share a feature.

    Args:
        items: of each row of text, in the order of its media tokens.
        tokens: [B, T] integers.
        rows, patches: R and P.

    Returns:
        patches: uint8 [R, P, 3·p·p], 0 = padding.
        patch_item: int32 [R, P], items numbered from 1 in each row; 0 = padding.
        patch_position: int32 [R, P, 3], (frame, row, column).
        patch_grid: int32 [R, P, 3], (t, h, w) of the item; ones = padding.
        patch_feature: int32 [R, P/m], place among the features of its row that a group is added into; P/m = padding.
        media_index: int32 [B, T], row · (P/m) + place of the feature that replaces a token's embedding; -1 = none.

    Raises:
        DataError: P is not whole groups; `items` are not of B rows; a row has not as many media tokens as its items
            have features; or the items do not fit.
    """
    group = merge**2
    flat = [item for row in items for item in row]
    if patches % group:
        raise DataError(
            f"a row of {patches} patches is not whole groups of {merge} × {merge}; use a multiple of {group}"
        )
    if len(items) != len(tokens):
        raise DataError(f"images of {len(items)} rows for {len(tokens)} rows of tokens")
    counts = [len(item.patches) for item in flat]
    row_of = assign(counts, rows, patches, text_rows(items))
    if row_of is None:
        raise _does_not_fit(counts, rows, patches)

    places = patches // group
    out = {
        "patches": np.zeros((rows, patches, 3 * patch_size**2), np.uint8),
        "patch_item": np.zeros((rows, patches), np.int32),
        "patch_position": np.zeros((rows, patches, 3), np.int32),
        "patch_grid": np.ones((rows, patches, 3), np.int32),
        "patch_feature": np.full((rows, places), places, np.int32),
        "media_index": np.full(tokens.shape, -1, np.int32),
    }
    used, features = [0] * rows, [0] * rows
    numbers = [0] * rows
    indices = []
    for item, row in zip(flat, row_of):
        t, h, w = item.grid
        order = np.arange(t * h * w).reshape(t, h // merge, merge, w // merge, merge).transpose(0, 1, 3, 2, 4).ravel()
        here, new = slice(used[row], used[row] + len(order)), item.features(merge)
        feature = features[row] + np.arange(new)
        numbers[row] += 1
        out["patches"][row, here] = item.patches[order]
        out["patch_item"][row, here] = numbers[row]
        out["patch_position"][row, here] = np.stack(np.unravel_index(order, item.grid), axis=-1)
        out["patch_grid"][row, here] = item.grid
        out["patch_feature"][row, here.start // group : here.stop // group] = np.tile(feature, t)
        indices.append(row * places + feature)
        used[row], features[row] = here.stop, features[row] + new

    start = 0
    for b, of_row in enumerate(items):
        media = np.flatnonzero(tokens[b] == media_token)
        mine = indices[start : start + len(of_row)]
        start += len(of_row)
        if len(media) != sum(map(len, mine)):
            raise DataError(
                f"row {b} has {len(media)} media tokens (id {media_token}), its {len(of_row)} images have "
                f"{sum(map(len, mine))} features"
            )
        if mine:
            out["media_index"][b, media] = np.concatenate(mine)
    return out
