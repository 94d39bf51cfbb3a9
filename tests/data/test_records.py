"""Claims about sources of documents with images."""

import io
import json
import sys
import tarfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from k3jax.config import ImagesConfig, VisionConfig
from k3jax.data import digits, sources
from k3jax.data.images import ImageError, Item, open_item
from k3jax.data.records import open_image_documents
from k3jax.data.sources import DataError

VISION = VisionConfig(hidden_size=8, num_layers=1, num_heads=1, head_dim=8, mlp_size=8, patch_size=4)


def png(colour, width=8, height=8):
    return digits.encode_png(np.full((height, width, 3), colour, np.uint8))


def opened(path, **settings):
    return open_image_documents(ImagesConfig(source=str(path), **settings))


def read(documents, index, budget=None):
    """A document with each image as its colour."""
    parts = documents.content(index, VISION, budget)
    return [int(p.patches[0, 0]) if isinstance(p, Item) else p for p in parts]


def everything(documents):
    return {documents.name(i): read(documents, i) for i in range(len(documents))}


def write_lines(path, *records):
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in records))


def write_tar(path, members, mode="w"):
    with tarfile.open(path, mode) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


def test_jsonl_paths_are_relative_to_the_file_and_images_stand_at_their_placeholders(tmp_path):
    (tmp_path / "a" / "p").mkdir(parents=True)
    for name, colour in (("1.png", 10), ("p/2.png", 20)):
        (tmp_path / "a" / name).write_bytes(png(colour))
    write_lines(
        tmp_path / "a" / "d.jsonl",
        {"text": "x <image> y<image>", "images": ["1.png", "p/2.png"]},
        "",
        {"text": "behind", "images": "1.png"},
        {"text": "<image><image>z", "images": ["p/2.png", "1.png"]},
        {"text": "no image", "images": []},
        {"text": "none either", "images": None},
        {"text": "", "images": ["1.png", "p/2.png"]},
    )
    assert everything(opened(tmp_path)) == {
        "a/d.jsonl:1": ["x ", 10, " y", 20],
        "a/d.jsonl:3": [10, "behind"],
        "a/d.jsonl:4": [20, 10, "z"],
        "a/d.jsonl:5": ["no image"],
        "a/d.jsonl:6": ["none either"],
        "a/d.jsonl:7": [10, 20],
    }


@pytest.mark.parametrize("kind", ["bytes", "struct", "list of bytes", "list of structs"])
def test_parquet_holds_bytes_or_structs_or_lists_of_them(tmp_path, kind):
    def cell(colours):
        images = [{"bytes": png(c), "path": f"{c}.png"} if "struct" in kind else png(c) for c in colours]
        return images if "list" in kind else images[0]

    rows = [[10], [20]] + ([[30, 40], []] if "list" in kind else [])
    table = pa.table({"caption": [f"row {i}" for i in range(len(rows))], "image": [cell(r) for r in rows]})
    pq.write_table(table, tmp_path / "d.parquet", row_group_size=3)
    documents = opened(tmp_path, text_field="caption", image_field="image")
    assert everything(documents) == {f"d.parquet[{i}]": [*row, f"row {i}"] for i, row in enumerate(rows)}


def test_a_parquet_struct_without_bytes_is_a_path_beside_the_file(tmp_path):
    (tmp_path / "1.png").write_bytes(png(70))
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    images = pa.array([{"bytes": None, "path": "1.png"}, {"bytes": png(3), "path": None}, None], kind)
    pq.write_table(pa.table({"text": ["t", "u", "v"], "images": images}), tmp_path / "d.parquet")
    assert list(everything(opened(tmp_path)).values()) == [[70, "t"], [3, "u"], ["v"]]


def test_tar_members_of_one_key_are_a_document_with_images_in_the_order_of_their_numbers(tmp_path):
    members = [
        ("b/x.2.png", png(2)),
        ("b/x.10.png", png(10)),
        ("b/x.txt", "<image>ü<image>".encode()),
        ("b/x.cls", b"7"),
        ("./y.json", json.dumps({"text": "why"}).encode()),
        ("./y.png", png(9)),
        ("._y.png", b"of a Mac"),
        ("z.png", png(5)),
        ("z.txt", b"wins"),
        ("z.json", b"{}"),
    ]
    write_tar(tmp_path / "d.tar", members)
    assert everything(opened(tmp_path)) == {
        "d.tar#b/x": [2, "ü", 10],
        "d.tar#y": [9, "why"],
        "d.tar#z": [5, "wins"],
    }


def test_lists_of_frames_are_videos_in_pieces_of_at_most_four(tmp_path):
    for colour in range(1, 7):
        (tmp_path / f"{colour}.png").write_bytes(png(colour))
    frames = [f"{colour}.png" for colour in range(1, 6)]
    write_lines(tmp_path / "d.jsonl", {"text": "a <image> b <image>", "images": [frames, "6.png"]})
    first, second, *rest = opened(tmp_path / "d.jsonl").content(0, VISION)[1:]
    assert (first.grid, second.grid) == ((4, 2, 2), (1, 2, 2))
    assert [int(first.patches[4 * frame, 0]) for frame in range(4)] == [1, 2, 3, 4]
    assert int(second.patches[0, 0]) == 5
    assert (rest[0], int(rest[1].patches[0, 0])) == (" b ", 6)
    write_lines(tmp_path / "d.jsonl", {"text": "", "images": [["1.png", "gone.png"]]})
    with pytest.raises(ImageError, match=r"d\.jsonl:1, image 1 \(video of 2 frames\), frame 1"):
        opened(tmp_path / "d.jsonl").content(0, VISION)


def test_sources_are_found_like_those_of_text_and_split_by_the_same_rule(tmp_path):
    for name in ("b/1.jsonl", "a.jsonl", ".hidden/x.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write_lines(tmp_path / name, *({"text": f"{name} {i}", "images": []} for i in range(60)))
    (tmp_path / "photo.png").write_bytes(png(1))
    folder, one = opened(tmp_path), opened(tmp_path / "a.jsonl")
    assert folder.files == ("a.jsonl", "b/1.jsonl")
    assert opened(tmp_path / "**" / "1.jsonl").files == ("b/1.jsonl",)
    assert one.files_hash != folder.files_hash
    text = sources.open_documents(str(tmp_path / "*.jsonl"))
    for mine, theirs in zip(one.split(20), text.split(20)):
        np.testing.assert_array_equal(mine, theirs)
    for part, whole in zip(one.split(20), folder.split(20)):
        assert set(part) == {i for i in whole if i < 60}


def test_an_image_over_the_budget_is_made_smaller(tmp_path):
    (tmp_path / "1.png").write_bytes(png(9, 80, 40))
    write_lines(tmp_path / "d.jsonl", {"text": "", "images": ["1.png"]})
    (item,) = opened(tmp_path).content(0, VISION, 24)
    assert len(item.patches) <= 24
    assert item.size == (80, 40)


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"text": "t", "images": ["missing.png"]}, r"image 1 \(missing\.png\)"),
        ({"text": "t", "images": ["good.png", "broken.png"]}, r"image 2 \(broken\.png\)"),
        ({"text": "t", "images": ["text.png"]}, r"image 1 \(text\.png\)"),
        ({"text": "<image> <image>", "images": ["good.png"]}, "2 <image> in the text, 1 images"),
        ({"text": "<image>", "images": []}, "1 <image> in the text, 0 images"),
        ({"text": "t", "images": [7]}, "not int"),
        ({"text": "t", "images": [{"url": "x"}]}, "not NoneType"),
        ({"text": "t", "images": ["good.png", None]}, "not NoneType"),
        ({"text": "t", "images": [{"bytes": "good.png"}]}, "not str"),
        ({"text": "t", "images": {"bytes": 7, "path": "good.png"}}, "not int"),
        ({"text": "t", "images": [["good.png", None]]}, "not NoneType"),
        ({"text": "t", "images": [[["good.png"]]]}, "a frame of a video, is .* not list"),
        ({"text": "t", "images": [["good.png"], []]}, r"image 2 \(video of 0 frames\)"),
        ({"text": "t", "images": ["."]}, r"image 1 \(\.\): image cannot be read: .* directory"),
        ({"text": "t", "images": ["/dev/zero"]}, "image cannot be read: /dev/zero is no file"),
    ],
)
def test_an_image_that_cannot_be_read_is_named_by_file_line_and_place(tmp_path, record, reason):
    (tmp_path / "good.png").write_bytes(png(1))
    noise = np.random.default_rng(0).integers(0, 255, (40, 40, 3), np.uint8)
    (tmp_path / "broken.png").write_bytes(digits.encode_png(noise)[:900])
    (tmp_path / "text.png").write_text("not an image")
    write_lines(tmp_path / "d.jsonl", {"text": "fine", "images": ["good.png"]}, record)
    documents = opened(tmp_path)
    assert read(documents, 0) == [1, "fine"]
    with pytest.raises(ImageError, match=rf"d\.jsonl:2.*{reason}"):
        documents.content(1, VISION)


def test_a_bad_image_in_parquet_and_tar_is_named_by_row_and_key(tmp_path):
    pq.write_table(pa.table({"text": ["t", "u"], "images": [png(1), b"?"]}), tmp_path / "d.parquet")
    write_tar(tmp_path / "e.tar", [("k.txt", b"t"), ("k.0.png", png(1)), ("k.1.png", b"")])
    documents = opened(tmp_path)
    with pytest.raises(ImageError, match=r"d\.parquet\[1\], image 1"):
        documents.content(1, VISION)
    with pytest.raises(ImageError, match=r"e\.tar#k, image 2 \(\.1\.png\)"):
        documents.content(2, VISION)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "not a JSON object"),
        ('{"images": []}', r"field 'text' \(data\.images\.text_field\) must be text"),
        ('{"text": "t"}', r"field 'images' \(data\.images\.image_field\) is missing; fields: \['text'\]"),
    ],
)
def test_a_bad_line_is_refused_when_the_source_is_opened_even_if_bad_images_are_skipped(tmp_path, line, reason):
    write_lines(tmp_path / "d.jsonl", {"text": "t", "images": []}, line)
    for on_error in ("raise", "skip"):
        with pytest.raises(DataError, match=rf"d\.jsonl:2: .*{reason}"):
            opened(tmp_path, on_error=on_error)


def test_bad_columns_are_refused_when_the_source_is_opened(tmp_path):
    table = pa.table({"text": ["t"], "images": [png(1)], "number": [3]})
    pq.write_table(table, tmp_path / "d.parquet")
    for settings, reason in (
        ({"text_field": "t"}, r"no column 't' \(data\.images\.text_field\)"),
        ({"image_field": "i"}, r"no column 'i' \(data\.images\.image_field\); columns: \['text', 'images', 'number'\]"),
        ({"image_field": "number"}, "'number' .* must hold bytes, it holds int64"),
    ):
        with pytest.raises(DataError, match=reason):
            opened(tmp_path, **settings)


def test_a_damaged_tar_is_refused_by_name_when_it_is_opened(tmp_path):
    path = tmp_path / "d.tar"
    members = [("a.txt", b"t"), ("a.png", np.random.default_rng(0).bytes(3000))]
    write_tar(path, members)
    whole = path.read_bytes()
    for length in (700, 1024, 1400, 2600, 4608, 5000):
        path.write_bytes(whole[:length])
        with pytest.raises(DataError, match=r"d\.tar"):
            opened(path)
    write_tar(path, members, "w:gz")
    with pytest.raises(DataError, match=r"d\.tar is not a whole, uncompressed tar file"):
        opened(path)
    write_tar(path, [("a.txt", b"t"), ("b.png", png(1))])
    with pytest.raises(DataError, match=r"d\.tar#b: no text; members: \['png'\]"):
        opened(path)


def test_a_source_without_documents_is_refused_with_what_is_legal(tmp_path):
    (tmp_path / "photo.png").write_bytes(png(1))
    for path in (tmp_path, tmp_path / "photo.png", tmp_path / "nothing"):
        with pytest.raises(DataError, match=r"data\.images\.source .*'digits', or a folder, file or glob of \.jsonl"):
            opened(path)


def test_digit_documents_are_the_same_every_time_and_show_what_they_say():
    documents = opened("digits")
    train, held_out = documents.split(5)
    assert len(documents) == 21_000
    assert sorted([*train, *held_out]) == list(range(21_000))
    lengths = set()
    for i in (*range(20), 20_999):
        (image, caption), (pixels, label) = documents.content(i, VISION), documents.line(i)
        assert caption == label
        assert label.isdecimal()
        assert image.size == (16 * len(label), 16)
        again = open_item(digits.encode_png(digits.DigitDocuments().line(i)[0]), "", VISION)
        np.testing.assert_array_equal(image.patches, again.patches)
        assert pixels[0].mean() > 128  # dark on light
        lengths.add(len(label))
    assert lengths == {1, 2, 3, 4}
    assert len({documents.line(i)[0].tobytes() for i in range(500)}) > 490


def shown(line):
    """The inner 4 × 4 pixels of the digits in a line, once for each shift that may have been theirs."""
    for cell in np.split(255 - line, line.shape[1] // 16, axis=1):
        padded = np.pad(cell, 1)
        for y in range(3):
            for x in range(3):
                yield padded[y + 4 : y + 12 : 2, x + 4 : x + 12 : 2].tobytes()


def test_held_out_digits_are_never_shown_in_training():
    numbers = {side: digits._images(side) for side in (False, True)}
    assert len(numbers[True]) == 360
    assert sorted(np.concatenate(list(numbers.values()))) == list(range(1797))
    ink = (digits._digits()[0][:, 2:6, 2:6].astype(np.int32) * 255 // 16).astype(np.uint8)
    inner = {side: {ink[i].tobytes() for i in numbers[side]} for side in numbers}
    documents = opened("digits")
    for side in (False, True):
        lines = [documents.line(20_000 * side + i)[0] for i in range(60)]
        lines += [pixels for pixels, _ in digits.lines(side, count=60)]
        for line in lines:
            seen = set(shown(line))
            assert seen & inner[side]
            assert not seen & (inner[not side] - inner[side])


def test_lines_to_evaluate_with_depend_on_seed_and_side():
    def content(**arguments):
        return [(p.tobytes(), label) for p, label in digits.lines(count=20, **arguments)]

    assert content(held_out=True) == content(held_out=True)
    assert content(held_out=True) != content(held_out=True, seed=1)
    assert content(held_out=True) != content(held_out=False)
    pixels, label = digits.lines(held_out=True, count=1, digits=5)[0]
    assert (pixels.shape, pixels.dtype, len(label)) == ((16, 80), np.uint8, 5)


def test_without_scikit_learn_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    digits._digits.cache_clear()
    with pytest.raises(DataError, match=r"pip install 'k3jax\[digits\]'"):
        opened("digits")


def test_png_round_trip():
    pixels = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
    np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(digits.encode_png(pixels)))), pixels)
