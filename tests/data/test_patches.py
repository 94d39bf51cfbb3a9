"""Claims about rows of patches."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3jax.data.images import Item, patchify
from k3jax.data.patches import arrange, assign, rows_needed, text_rows
from k3jax.data.sources import DataError

MEDIA, P = 99, 2
"""The media token; the patch size."""


@st.composite
def batches(draw):
    """(items of each text row with their pixels, tokens, merge)"""
    merge = draw(st.sampled_from([1, 2, 3]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    rows = []
    for _ in range(draw(st.integers(1, 3))):
        row = []
        for _ in range(draw(st.integers(0, 4))):
            t, h, w = draw(st.integers(1, 4)), *(merge * draw(st.integers(1, 3)) for _ in range(2))
            pixels = rng.integers(0, 256, (t, h * P, w * P, 3), np.uint8)
            row.append((Item(patchify(pixels, P), (t, h, w), (1, 1)), pixels))
        rows.append(row)
    length = 4 + max(sum(item.features(merge) for item, _ in row) for row in rows)
    tokens = rng.integers(0, 50, (len(rows), length))
    for line, row in zip(tokens, rows):
        media = sum(item.features(merge) for item, _ in row)
        line[rng.choice(length, media, replace=False)] = MEDIA  # not even side by side
    return rows, tokens, merge


def fitting_row(items, rows, merge):
    """A row that surely holds all."""
    return sum(len(item.patches) for row in items for item in row) // rows // merge**2 * merge**2 + 4 * 81 * merge**2


@given(batches(), st.integers(1, 3))
def test_every_media_token_finds_the_pixels_of_its_own_merge_group(batch, rows):
    with_pixels, tokens, merge = batch
    items = [[item for item, _ in row] for row in with_pixels]
    size = fitting_row(items, rows, merge)
    out = arrange(items, tokens, media_token=MEDIA, rows=rows, patches=size, merge=merge, patch_size=P)
    group, places = merge**2, size // merge**2
    np.testing.assert_array_equal(out["media_index"] >= 0, tokens == MEDIA)
    index = out["media_index"][out["media_index"] >= 0]
    assert len(set(index.tolist())) == len(index)
    used = 0
    for b, row in enumerate(with_pixels):
        media = iter(np.flatnonzero(tokens[b] == MEDIA))
        numbers = []
        for item, pixels in row:
            t, h, w = item.grid
            for y in range(0, h, merge):
                for x in range(0, w, merge):
                    r, place = divmod(int(out["media_index"][b, next(media)]), places)
                    groups = np.flatnonzero(out["patch_feature"][r] == place)
                    assert len(groups) == t
                    for frame, g in enumerate(groups):
                        for k in range(group):
                            i, j = y + k // merge, x + k % merge
                            patch = pixels[frame, i * P : (i + 1) * P, j * P : (j + 1) * P].transpose(2, 0, 1)
                            at = (r, g * group + k)
                            assert out["patches"][at].tolist() == patch.ravel().tolist()
                            assert out["patch_position"][at].tolist() == [frame, i, j]
                            assert out["patch_grid"][at].tolist() == [t, h, w]
                            numbers.append((r, int(out["patch_item"][at])))
                            used += 1
            assert len(set(numbers[-t * h * w :])) == 1  # an item lies in one row, under one number
        assert len(set(numbers)) == len(row)
        assert next(media, None) is None
    padding = out["patch_item"] == 0
    assert padding.sum() == rows * size - used
    assert not out["patches"][padding].any()
    assert not out["patch_position"][padding].any()
    assert (out["patch_grid"][padding] == 1).all()
    assert (out["patch_feature"][padding[:, ::group]] == places).all()
    for numbers in out["patch_item"]:
        filled = numbers[numbers > 0]
        assert sorted(set(filled.tolist())) == list(range(1, len(set(filled.tolist())) + 1))
        assert (np.diff(filled) >= 0).all()
        assert (numbers[: len(filled)] > 0).all()


def test_a_small_batch_written_out():
    item = Item(np.arange(8, dtype=np.uint8)[:, None].repeat(12, axis=1), (1, 2, 4), (8, 4))
    out = arrange([[], [item]], np.array([[1, 2, 3], [MEDIA, 1, MEDIA]]), **shape(rows=1, patches=12))
    assert out["patches"][0, :, 0].tolist() == [0, 1, 4, 5, 2, 3, 6, 7, 0, 0, 0, 0]
    assert out["patch_item"].tolist() == [[1] * 8 + [0] * 4]
    assert out["patch_feature"].tolist() == [[0, 1, 3]]
    assert out["media_index"].tolist() == [[-1, -1, -1], [0, -1, 1]]
    assert {name: (a.dtype.name, a.shape) for name, a in out.items()} == {
        "patches": ("uint8", (1, 12, 12)),
        "patch_item": ("int32", (1, 12)),
        "patch_position": ("int32", (1, 12, 3)),
        "patch_grid": ("int32", (1, 12, 3)),
        "patch_feature": ("int32", (1, 3)),
        "media_index": ("int32", (2, 3)),
    }


def shape(rows, patches):
    return {"media_token": MEDIA, "rows": rows, "patches": patches, "merge": 2, "patch_size": P}


def image(h, w, t=1):
    return Item(np.zeros((t * h * w, 3 * P**2), np.uint8), (t, h, w), (1, 1))


@pytest.mark.parametrize("media", [0, 1, 3])
def test_a_row_whose_media_tokens_are_not_those_of_its_images_is_refused(media):
    tokens = np.array([[MEDIA] * media + [1] * (4 - media)])
    with pytest.raises(DataError, match=f"row 0 has {media} media tokens.*its 1 images have 2 features"):
        arrange([[image(2, 4)]], tokens, **shape(rows=1, patches=8))


def test_images_that_do_not_fit_are_refused_with_sizes_and_advice():
    tokens = np.full((1, 6), MEDIA)
    with pytest.raises(DataError, match=r"1 images of 24 patches.*24, do not fit in 2 rows of 20.*data.images.patches"):
        arrange([[image(4, 6)]], tokens, **shape(rows=2, patches=20))
    with pytest.raises(DataError, match=r"3 images of 24 patches.*8, do not fit in 2 rows of 8"):
        arrange([[image(2, 4)] * 3], tokens, **shape(rows=2, patches=8))
    with pytest.raises(DataError, match="30 patches is not whole groups of 2 × 2; use a multiple of 4"):
        arrange([[image(2, 4)] * 3], tokens, **shape(rows=2, patches=30))
    with pytest.raises(DataError, match="images of 2 rows for 1"):
        arrange([[image(4, 6)], []], tokens, **shape(rows=2, patches=24))


@given(st.lists(st.integers(1, 20), max_size=12), st.integers(1, 4), st.integers(1, 60))
def test_items_are_assigned_within_the_capacity_and_balanced(counts, rows, capacity):
    out = assign(counts, rows, capacity)
    assert out == assign(list(counts), rows, capacity)
    load = [0] * rows
    if out is None:
        assert sum(counts) > (capacity - max(counts, default=0)) * rows  # some row was not full
    else:
        for row, count in zip(out, counts):
            load[row] += count
        assert max(load) <= capacity
        assert max(load) - min(load) <= max(counts, default=0)


def test_the_longest_go_first_to_the_least_loaded_row():
    assert assign([4, 16, 8, 4], rows=2, capacity=16) == [1, 0, 1, 1]
    assert assign([5, 5, 5], rows=3, capacity=5) == [0, 1, 2]
    assert assign([], rows=1, capacity=1) == []
    assert assign([5, 5, 5], rows=2, capacity=9) is None


@given(st.lists(st.lists(st.integers(1, 6), max_size=5), min_size=1, max_size=6))
def test_what_fits_in_rows_of_text_fits_in_as_many_rows_of_patches(rows):
    """Full ones too, which the longest first may miss."""
    items = [[Item(np.zeros((n, 1), np.uint8), (1, 1, n), (1, 1)) for n in row] for row in rows]
    counts, capacity = [n for row in rows for n in row], max(1, *map(sum, rows))
    out = assign(counts, len(rows), capacity, text_rows(items))
    assert out is not None
    assert len(out) == len(counts)
    assert all(sum(n for n, r in zip(counts, out) if r == row) <= capacity for row in range(len(rows)))
    assert rows_needed(counts, capacity, [len(rows)], text_rows(items)) == len(rows)


def test_full_rows_of_text_are_arranged_as_they_are():
    assert assign([3, 3, 2, 2, 2], rows=2, capacity=6) is None
    full = [[image(2, 6)] * 2, [image(2, 4)] * 3]
    tokens = np.full((2, 6), MEDIA)
    assert arrange(full, tokens, **shape(rows=2, patches=24))["patch_item"].all()


def test_rows_needed_is_the_smallest_choice():
    assert rows_needed([8, 8, 8], 16, [1, 2, 4]) == 2
    assert rows_needed([], 16, [0, 1]) == 0
    with pytest.raises(DataError, match="5 images of 40 patches.*8, do not fit in 2 rows of 16"):
        rows_needed([8] * 5, 16, [1, 2])
