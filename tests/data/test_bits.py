"""Claims about bits per byte."""

import gzip
import lzma
import math

import numpy as np
import pytest

from k3jax.config import DataConfig
from k3jax.data.bits import bits_per_byte, reference_bits_per_byte, sample_text, target_bytes
from k3jax.data.loader import open_data


@pytest.mark.parametrize("tokenizer", ["bytes", "python8k"])
def test_target_bytes_are_the_bytes_of_the_text_but_for_first_tokens(tmp_path, tokenizer):
    for i in range(12):
        (tmp_path / f"{i}.txt").write_text(f"def f{i}():\n    return 'ü' * {i}\n" * (i + 1))
    data = open_data(DataConfig(str(tmp_path), tokenizer=tokenizer, min_bytes=0, validation_percent=50, batch_size=2))
    with data.validation_loader() as loader:
        counted = sum(target_bytes(batch, data.tokenizer.token_bytes) for batch in loader)
    documents = [data.documents.text(int(i)) for i in data.validation]
    firsts = sum(len(data.tokenizer.id_bytes(data.tokenizer.encode(text)[0])) for text in documents)
    assert counted == sum(len(text.encode()) for text in documents) - firsts


def test_uniform_guessing_of_bytes_costs_eight_bits():
    assert bits_per_byte(total_nats=100 * math.log(256), total_bytes=100) == pytest.approx(8)


def test_reference_numbers_are_entropy_gzip_and_xz():
    text = bytes(range(256)) * 100
    got = reference_bits_per_byte(text)
    assert got["unigram"] == pytest.approx(8)
    assert got["gzip"] == 8 * len(gzip.compress(text, 9)) / len(text)
    assert got["xz"] == 8 * len(lzma.compress(text, preset=9)) / len(text)
    assert reference_bits_per_byte(b"aaaa")["unigram"] == 0
    with pytest.raises(ValueError, match="no text"):
        reference_bits_per_byte(b"")


def test_sample_is_the_documents_end_to_end_up_to_its_bound(tmp_path):
    for name, text in (("a", "one"), ("b", "zwei"), ("c", "drei")):
        (tmp_path / name).write_text(text)
    data = open_data(DataConfig(str(tmp_path), min_bytes=0, validation_percent=60))
    order = np.arange(3)
    assert sample_text(data.documents, order) == b"onezweidrei"
    assert sample_text(data.documents, order, max_bytes=5) == b"onezw"
