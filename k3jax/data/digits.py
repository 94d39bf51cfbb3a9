"""Lines of handwritten digits with what they say: a small task that a model can only do by looking.

The digits are the 1,797 of scikit-learn (8 × 8 pixels, UCI "Optical Recognition of Handwritten Digits"), doubled to
16 × 16, dark on light, each moved by up to a pixel. Document i is a line of 1 to 4 of them drawn by a hash of i. Every
fifth digit image is kept for held-out documents, so these show no image that training does.

    >>> from k3jax.config import moonvit
    >>> image, text = DigitDocuments().content(0, moonvit(), budget=None)
    >>> text
    '15'
"""

from __future__ import annotations

import functools
import hashlib
import io

import numpy as np
from PIL import Image

from k3jax.config import VisionConfig
from k3jax.data.images import Item, open_item
from k3jax.data.sources import DataError, record_hashes

TRAIN_DOCUMENTS, HELD_OUT_DOCUMENTS = 20_000, 1_000
MAX_DIGITS = 4
_VERSION = 1
"""To be raised with any change of the documents: it is part of their hash."""


@functools.cache
def _digits() -> tuple[np.ndarray, np.ndarray]:
    """Pixels uint8 [1797, 8, 8], 0 (paper) to 16 (ink), and labels [1797]."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise DataError(
            "data.images.source 'digits' reads the digits of scikit-learn: pip install 'k3jax[digits]'"
        ) from error
    pixels, labels = load_digits(return_X_y=True)
    return pixels.reshape(-1, 8, 8).astype(np.uint8), np.asarray(labels)


@functools.cache
def _images(held_out: bool) -> np.ndarray:
    """Numbers of the digit images of one side."""
    order = np.argsort(record_hashes("digits", len(_digits()[1])), kind="stable")
    cut = len(order) * 4 // 5
    return np.sort(order[cut:] if held_out else order[:cut])


def _line(rng: np.random.Generator, held_out: bool, length: int) -> tuple[np.ndarray, str]:
    """Pixels uint8 [16, 16·length] of a line, and what it says."""
    pixels, labels = _digits()
    chosen = rng.choice(_images(held_out), length)
    cells = []
    for digit in chosen:
        large = np.pad(np.kron(pixels[digit], np.ones((2, 2), np.uint8)), 1)
        y, x = rng.integers(0, 3, 2)
        cells.append(large[y : y + 16, x : x + 16])
    ink = np.concatenate(cells, axis=1)
    return 255 - (ink.astype(np.int32) * 255 // 16).astype(np.uint8), "".join(str(labels[d]) for d in chosen)


def lines(held_out: bool, count: int, digits: int = 3, seed: int = 0) -> list[tuple[np.ndarray, str]]:
    """Lines to test a model with: pixels uint8 [16, 16·digits] and label, `count` times.

    Args:
        held_out: of digit images that no training document shows, else of those that they do.

    Raises:
        DataError: scikit-learn is not installed.
    """
    rng = np.random.default_rng([seed, held_out])
    return [_line(rng, held_out, digits) for _ in range(count)]


class DigitDocuments:
    """20,000 documents to train on and 1,000 held out: an image of 1 to 4 digits, then the digits as text.

    Raises:
        DataError: scikit-learn is not installed.
    """

    source = "digits"

    def __init__(self) -> None:
        pixels, labels = _digits()
        self.files_hash = hashlib.sha256(bytes([_VERSION]) + pixels.tobytes() + labels.tobytes()).hexdigest()

    def __len__(self) -> int:
        return TRAIN_DOCUMENTS + HELD_OUT_DOCUMENTS

    def name(self, index: int) -> str:
        return f"digits[{index}]"

    def split(self, validation_percent: int) -> tuple[np.ndarray, np.ndarray]:
        """The last 1,000 are held out, whatever the percentage: they alone show the images kept for them."""
        return np.arange(TRAIN_DOCUMENTS), np.arange(TRAIN_DOCUMENTS, len(self))

    def line(self, index: int) -> tuple[np.ndarray, str]:
        """Pixels uint8 [16, 16·n] and label of document `index`."""
        if not 0 <= index < len(self):
            raise IndexError(f"document {index} of {len(self)}")
        rng = np.random.default_rng([_VERSION, index])
        return _line(rng, index >= TRAIN_DOCUMENTS, int(rng.integers(1, MAX_DIGITS + 1)))

    def content(self, index: int, vision: VisionConfig, budget: int | None = None) -> list[str | Item]:
        """The image and its caption, see `ImageDocuments.content`."""
        pixels, label = self.line(index)
        return [open_item(encode_png(pixels), self.name(index), vision, budget), label]


def encode_png(pixels: np.ndarray) -> bytes:
    """A PNG file of grey [H, W] or RGB [H, W, 3] pixels, uint8."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()
