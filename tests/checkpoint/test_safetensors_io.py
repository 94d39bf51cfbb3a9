"""Reading and writing parts of tensors."""

import itertools

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
