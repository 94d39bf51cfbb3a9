"""Reading and writing parts of tensors."""

import itertools
import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from k3jax.checkpoint.layout import CheckpointFormatError
from k3jax.checkpoint.safetensors_io import Reader, Writer, covering, read_header


def _ranges(shape):
    return itertools.product(*([(a, b) for a in range(n) for b in range(a + 1, n + 1)] for n in shape))


def test_every_part_of_a_tensor_is_read_and_no_byte_more(tmp_path):
    tensor = np.arange(3 * 4 * 2, dtype=np.int16).reshape(3, 4, 2)
    save_file({"before": np.ones(7, np.int8), "x": tensor}, tmp_path / "a.safetensors")
    info = read_header(tmp_path / "a.safetensors")["x"]
    reader = Reader()
    for ranges in _ranges(tensor.shape):
        already = reader.bytes_read
        got = reader.read("x", info, tensor.shape, ranges)
        np.testing.assert_array_equal(got, tensor[tuple(slice(*r) for r in ranges)])
        assert reader.bytes_read - already == got.nbytes
    reader.close()


def test_parts_are_written_in_any_order_and_the_library_reads_them(tmp_path):
    tensor = np.random.default_rng(0).standard_normal((4, 6)).astype(np.float32)
    writer = Writer(tmp_path, {"b.safetensors": {"x": ("F32", (4, 6)), "zeros": ("U8", (3,))}})
    for rows, columns in (((2, 4), (3, 6)), ((0, 2), (0, 6)), ((2, 4), (0, 3))):
        writer.write("x", (4, 6), (rows, columns), tensor[slice(*rows), slice(*columns)])
    writer.close()
    got = load_file(tmp_path / "b.safetensors")
    np.testing.assert_array_equal(got["x"], tensor)
    np.testing.assert_array_equal(got["zeros"], np.zeros(3, np.uint8))


def test_short_runs_are_read_with_their_neighbours_and_long_ones_alone():
    assert covering((100, 8192), ((3, 9), (0, 4096)), 2) == ((3, 9), (0, 4096))  # 8 KiB runs
    assert covering((100, 8192), ((3, 9), (64, 128)), 2) == ((3, 9), (0, 8192))
    assert covering((10, 4, 8), ((3, 9), (1, 2), (0, 8)), 2) == ((3, 9), (0, 4), (0, 8))


@pytest.mark.parametrize("keep", [3, 40, -1])
def test_a_file_cut_off_anywhere_is_refused_by_name(tmp_path, keep):
    path = tmp_path / "c.safetensors"
    save_file({"x": np.ones(5, np.float32), "y": np.ones(5, np.float32)}, path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointFormatError, match=r"c\.safetensors"):
        read_header(path)


@pytest.mark.parametrize(
    ("entry", "word"),
    [
        ({"data_offsets": [20, 40]}, "begins at byte"),  # where x is
        ({"data_offsets": [-8, 12]}, "y is not one of a tensor"),
        ({"data_offsets": ["0", "20"]}, "y is not one of a tensor"),
        ({"shape": ["a"]}, "y is not one of a tensor"),
        ({"dtype": ["F32"]}, "y is not one of a tensor"),
    ],
)
def test_a_header_of_overlapping_or_impossible_tensors_is_refused(tmp_path, entry, word):
    path = tmp_path / "d.safetensors"
    good = {"dtype": "F32", "shape": [5]}
    header = {"x": good | {"data_offsets": [20, 40]}, "y": good | {"data_offsets": [0, 20]} | entry}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(40))
    with pytest.raises(CheckpointFormatError, match=word):
        read_header(path)


def test_a_header_that_is_a_list_and_a_folder_are_refused(tmp_path):
    (tmp_path / "e.safetensors").write_bytes((3).to_bytes(8, "little") + b"[1]")
    with pytest.raises(CheckpointFormatError, match="no JSON object"):
        read_header(tmp_path / "e.safetensors")
    with pytest.raises(CheckpointFormatError, match="cannot be read"):
        read_header(tmp_path)
