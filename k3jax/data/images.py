"""Images as MoonViT takes them: made smaller, zero-padded, cut into patches. Pixels stay bytes; the model scales them.

Sizes follow the released processor and never grow. It leaves the filter of the resize open: bicubic here, as in K2.5's.

    item = open_item("photo.jpg", "photo.jpg", moonvit())  # item.grid is (1, 36, 46) for 640 × 480 pixels
    ids = prompt(item, tokenizer, merge=2)                 # with <|media_pad|> once for each of item.features(2) = 414

    >>> from k3jax.config import moonvit
    >>> padded_grid(640, 480, moonvit())
    (36, 46)

Legend: t frames, h w rows and columns of patches, p pixels of a patch's side, H W pixels.
"""

from __future__ import annotations

import io
import math
import os
import stat
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import UInt8
from PIL import ExifTags, Image

from k3jax.config import VisionConfig
from k3jax.data.sources import DataError
from k3jax.data.tokenizers import MEDIA_TOKEN, Tokenizer

MAX_PATCHES = 65_536
MAX_FRAME_PATCHES = 16_384
"""Of each frame of a video."""
MAX_SIDE = 512
"""Patches."""
MAX_PIXELS = 89_478_485
"""Of a stored image; Pillow's own default, above which it suspects a decompression bomb."""

# Not every format of Pillow's: some run other programs (EPS).
_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF")
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
ImageSource = bytes | str | Path | Image.Image
"""An encoded image, its path, or one that Pillow has opened."""
_SQUARE, _WHITE, _GREY = 8, 255, 180


class ImageError(DataError):
    """An image that cannot be used; the message says which, and what is wrong."""


@dataclass(frozen=True)
class Item:
    """An image, or the frames of a piece of video that share their tokens.

    Attributes:
        patches: uint8 [t·h·w, 3·p·p], in the order (frame, row, column); each patch is (channel, row, column).
        grid: (t, h, w) in patches; h and w are multiples of the merge.
        size: (width, height) of the original in pixels, upright.
    """

    patches: UInt8[np.ndarray, "patches pixels"]
    grid: tuple[int, int, int]
    size: tuple[int, int]

    def features(self, merge: int) -> int:
        """Tokens it becomes; frames are averaged."""
        return self.grid[1] * self.grid[2] // merge**2


def resized_size(
    width: int, height: int, *, patch_size: int = 14, max_patches: float = MAX_PATCHES, max_side: int = MAX_SIDE
) -> tuple[int, int]:
    """(width, height) in pixels before padding, by the released rule: float64, truncated, never larger.

    `max_patches` is nominal: whole patches are counted, then padding adds some.
    """
    limit = max_side * patch_size
    patches = max(1, width // patch_size) * max(1, height // patch_size)
    scale = min(1.0, math.sqrt(max_patches / patches), limit / width, limit / height)
    return min(max(int(width * scale), 1), limit), min(max(int(height * scale), 1), limit)


def padded_grid(width: int, height: int, vision: VisionConfig) -> tuple[int, int]:
    """(h, w) in patches of an image padded to whole merge groups."""
    block = vision.patch_size * vision.merge
    return -(-height // block) * vision.merge, -(-width // block) * vision.merge


def fitted_size(width: int, height: int, vision: VisionConfig, budget: int) -> tuple[int, int]:
    """(width, height) in pixels before padding, such that the padded image has at most `budget` patches.

    The released rule with its limit lowered only as far as needed, so the proportions stay.

    Raises:
        DataError: `budget` is less than the patches of one token.
    """
    if budget < vision.merge**2:
        raise DataError(
            f"a budget of {budget} patches holds no image: one token takes {vision.merge**2} (VisionConfig.merge "
            f"{vision.merge} squared); raise data.images.patches"
        )

    def size(limit: float) -> tuple[int, int]:
        return resized_size(width, height, patch_size=vision.patch_size, max_patches=limit)

    def fits(limit: float) -> bool:
        return math.prod(padded_grid(*size(limit), vision)) <= budget

    low, high = 0.0, float(min(MAX_PATCHES, budget))
    if fits(high):
        return size(high)
    for _ in range(64):  # not whole numbers: a narrow image may need a limit below 1
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return size(low)


def open_item(source: ImageSource, where: str, vision: VisionConfig, budget: int | None = None) -> Item:
    """Decodes one image: JPEG, PNG, WebP, GIF, BMP, TIFF, PPM, JPEG 2000 or AVIF; of several frames the first.

    It is turned upright by its EXIF orientation. Transparent parts show a chessboard, which is laid under the resized
    image.

    Args:
        source: the encoded bytes, a path, or an opened image of any format and mode that has a range.
        where: names the image in errors.
        budget: most patches it may have; None leaves the released limits, which are nominal.

    Raises:
        ImageError: it cannot be read or decoded, is empty, too large, or of a pixel type without a known range.
        DataError: see `fitted_size`.
    """
    with _decoding(where):
        if isinstance(source, Image.Image):
            image = _upright(source, where)
        else:
            with Image.open(io.BytesIO(_read(source, where)), formats=_FORMATS) as stored:
                image = _upright(stored, where)
    if budget is None:
        size = resized_size(*image.size, patch_size=vision.patch_size)
    else:
        size = fitted_size(*image.size, vision, budget)
    return _item([image], size, vision)


def video_items(
    frames: Sequence[Image.Image], where: str, vision: VisionConfig, budget: int | None = None
) -> list[Item]:
    """Frames of equal size in pieces of at most `vision.max_frames`, all on one grid.

    Args:
        budget: most patches a piece may have; at most 16,384 for each frame, as without one.

    Raises:
        ImageError: no frames, frames of different sizes, one that cannot be decoded, or a budget that leaves a frame
            less than a token.
    """
    if not frames:
        raise ImageError(f"{where}: a video without frames")
    upright = []
    for number, frame in enumerate(frames):
        with _decoding(f"{where}, frame {number}"):
            upright.append(_upright(frame, f"{where}, frame {number}"))
        if upright[-1].size != upright[0].size:
            raise ImageError(
                f"{where}: frame {number} has {upright[-1].size} pixels, frame 0 {upright[0].size}; resize the frames "
                "of a video to one size"
            )
    length, least = min(vision.max_frames, len(frames)), vision.merge**2
    of_frame = MAX_FRAME_PATCHES if budget is None else min(budget // length, MAX_FRAME_PATCHES)
    if of_frame < least:
        raise ImageError(
            f"{where}: {length} frames share {budget} patches, and one takes at least {least}; raise "
            f"data.images.patches and data.sequence_length until an image may have {length * least}"
        )
    size = fitted_size(*upright[0].size, vision, of_frame)
    return [_item(upright[i : i + length], size, vision) for i in range(0, len(upright), length)]


def open_video(
    frames: Sequence[bytes | str | Path], where: str, vision: VisionConfig, budget: int | None = None
) -> list[Item]:
    """`video_items` of encoded frames or their paths.

    Raises:
        ImageError: see `open_item` and `video_items`.
    """
    opened = []
    for number, frame in enumerate(frames):
        name = f"{where}, frame {number}"
        data = io.BytesIO(_read(frame, name))
        with _decoding(name):
            opened.append(Image.open(data, formats=_FORMATS))
    return video_items(opened, where, vision, budget)


def patchify(pixels: UInt8[np.ndarray, "t H W 3"], patch_size: int) -> UInt8[np.ndarray, "patches pixels"]:
    """Patches in the order (frame, row, column), each flattened (channel, row, column): uint8 [t·h·w, 3·p·p]."""
    t, height, width, channels = pixels.shape
    h, w = height // patch_size, width // patch_size
    cut = pixels.reshape(t, h, patch_size, w, patch_size, channels)
    return cut.transpose(0, 1, 3, 5, 2, 4).reshape(t * h * w, channels * patch_size**2)


def prompt(item: Item, tokenizer: Tokenizer, merge: int) -> list[int]:
    """Token ids that stand for an image: its original size in words, and one `<|media_pad|>` for each feature."""
    width, height = item.size
    text = f"<|media_begin|>image {width}x{height}<|media_content|>{MEDIA_TOKEN}<|media_end|>"
    ids = tokenizer.encode(text, allow_special=True)
    pad = tokenizer.special_tokens[MEDIA_TOKEN]
    place = ids.index(pad)
    return ids[:place] + [pad] * item.features(merge) + ids[place + 1 :]


def _read(source: bytes | str | Path, where: str) -> bytes:
    if not isinstance(source, bytes):
        try:
            mode = os.stat(source).st_mode
            if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
                raise OSError(f"{source} is no file")  # a device or a pipe may never end
            source = Path(source).read_bytes()
        except (OSError, ValueError) as error:  # ValueError: a null byte in the path
            raise ImageError(f"{where}: image cannot be read: {error}") from error
    if not source:
        raise ImageError(f"{where}: image is empty (0 bytes)")
    return source


@contextmanager
def _decoding(where: str) -> Generator[None]:
    try:
        yield
    except ImageError:
        raise
    except Image.UnidentifiedImageError as error:
        raise ImageError(f"{where}: not an image in a known format ({', '.join(_FORMATS)})") from error
    except Exception as error:  # decoders of damaged files raise anything, SyntaxError and KeyError included
        raise ImageError(f"{where}: image cannot be decoded: {type(error).__name__}: {error}") from error


def _check_size(image: Image.Image, where: str) -> None:
    width, height = image.size
    if min(width, height) < 1:
        raise ImageError(f"{where}: image has no pixels ({width} × {height})")
    if width * height > MAX_PIXELS:
        raise ImageError(
            f"{where}: image has {width:,} × {height:,} pixels, more than {MAX_PIXELS:,}, as decompression bombs do; "
            "store it smaller"
        )


def _upright(image: Image.Image, where: str) -> Image.Image:
    """The first frame as it is meant to be seen, as RGB or RGBA."""
    _check_size(image, where)
    image.load()
    try:
        orientation = image.getexif().get(ExifTags.Base.Orientation)
    except Exception:  # metadata that cannot be read say nothing about the pixels
        orientation = None
    image = _eight_bits(image, where)
    return image.transpose(_UPRIGHT[orientation]) if orientation in _UPRIGHT else image


def _eight_bits(image: Image.Image, where: str) -> Image.Image:
    """RGBA if anything can be transparent, else RGB. Greys of 16 bits are scaled, where Pillow would clip them."""
    if image.mode == "F":
        raise ImageError(f"{where}: floating-point pixels have no known range; store the image with 8 or 16 bits")
    if image.mode.startswith("I"):
        grey = np.asarray(image).astype(np.int64)
        if grey.min() < 0 or grey.max() > 65_535:
            raise ImageError(f"{where}: 32-bit pixels have no known range; store the image with 8 or 16 bits")
        scaled = Image.fromarray(((grey + 128) // 257).astype(np.uint8))
        if isinstance(key := image.info.get("transparency"), int):
            scaled.putalpha(Image.fromarray(np.where(grey == key, 0, 255).astype(np.uint8)))
        image = scaled
    return image.convert("RGBA" if image.has_transparency_data else "RGB")


def _item(frames: Sequence[Image.Image], size: tuple[int, int], vision: VisionConfig) -> Item:
    h, w = padded_grid(*size, vision)
    pixels = np.zeros((len(frames), h * vision.patch_size, w * vision.patch_size, 3), np.uint8)
    for number, frame in enumerate(frames):
        pixels[number, : size[1], : size[0]] = _on_chessboard(frame.resize(size, Image.Resampling.BICUBIC))
    return Item(patchify(pixels, vision.patch_size), (len(frames), h, w), frames[0].size)


def _on_chessboard(image: Image.Image) -> np.ndarray:
    """uint8 [H, W, 3]"""
    if image.mode == "RGB":
        return np.asarray(image)
    rows, columns = (np.arange(side) // _SQUARE for side in reversed(image.size))
    board = np.where((rows[:, None] + columns) % 2, _GREY, _WHITE).astype(np.uint8)
    return np.asarray(Image.alpha_composite(Image.fromarray(board).convert("RGBA"), image).convert("RGB"))
