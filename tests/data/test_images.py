"""Claims about images: sizes, pixels, patches, and what is refused."""

import dataclasses
import io
import math
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageOps

from k3jax.config import VisionConfig, moonvit
from k3jax.data import images
from k3jax.data.images import (
    ImageError,
    Item,
    fitted_size,
    open_item,
    padded_grid,
    patchify,
    prompt,
    resized_size,
    video_items,
)
from k3jax.data.sources import DataError
from k3jax.data.tokenizers import load_tokenizer

RELEASED = moonvit()
SMALL = VisionConfig(hidden_size=8, num_layers=1, num_heads=1, head_dim=4, mlp_size=8, patch_size=4)


def encoded(image, format="PNG", **options):
    data = io.BytesIO()
    image.save(data, format, **options)
    return data.getvalue()


def noise(*shape, seed=0, high=256, dtype=np.uint8):
    return np.random.default_rng(seed).integers(0, high, shape, dtype)


def pixels(item, patch_size):
    """[t, H, W, 3]: a plain reading of the documented order."""
    t, h, w = item.grid
    out = np.zeros((t, h * patch_size, w * patch_size, 3), np.uint8)
    number = 0
    for frame in range(t):
        for row in range(h):
            for column in range(w):
                patch = item.patches[number].reshape(3, patch_size, patch_size)
                for y in range(patch_size):
                    for x in range(patch_size):
                        out[frame, row * patch_size + y, column * patch_size + x] = patch[:, y, x]
                number += 1
    assert number == len(item.patches)
    return out


def seen(data, vision=SMALL, budget=None):
    """The pixels of an encoded image whose sides are whole merge groups."""
    return pixels(open_item(data, "image", vision, budget), vision.patch_size)[0]


# Sizes


@pytest.mark.parametrize(
    ("width", "height", "tokens"),
    [(28, 28, 1), (3, 3, 1), (448, 448, 256), (100_000, 100, 256), (3585, 3585, 16_641), (1, 1, 1)],
)
def test_number_of_tokens_is_the_released_one(width, height, tokens):
    assert math.prod(padded_grid(*resized_size(width, height), RELEASED)) // 4 == tokens


def test_resize_keeps_both_released_limits():
    assert resized_size(3000, 2000) == (3000, 2000)
    assert resized_size(7168 * 2, 14) == (7168, 7)
    assert resized_size(1, 10**9) == (1, 7168)
    assert resized_size(10_000, 10_000) == (3585, 3585)  # counted as 714 × 714 patches, not 714.3
    assert resized_size(100, 100, patch_size=4, max_patches=16) == (16, 16)
    assert resized_size(1000, 4, patch_size=4, max_side=8) == (32, 1)


sides = st.one_of(st.integers(1, 300), st.integers(1, 200_000))


@given(sides, sides, st.integers(4, 70_000), st.sampled_from([RELEASED, SMALL, dataclasses.replace(SMALL, merge=1)]))
def test_budget_is_never_exceeded_and_nothing_grows(width, height, budget, vision):
    size = fitted_size(width, height, vision, budget)
    assert math.prod(padded_grid(*size, vision)) <= budget
    assert 1 <= size[0] <= width
    assert 1 <= size[1] <= height
    released = resized_size(width, height, patch_size=vision.patch_size, max_patches=min(65_536, budget))
    if math.prod(padded_grid(*released, vision)) <= budget:
        assert size == released


def test_budget_shrinks_no_more_than_it_must_and_in_proportion():
    assert fitted_size(3585, 3585, RELEASED, 65_536) == (3584, 3584)
    assert fitted_size(3585, 3585, RELEASED, 4 * 16_641) == (3585, 3585)
    assert fitted_size(30_000, 20_000, RELEASED, 10**6) == resized_size(30_000, 20_000)
    assert fitted_size(640, 480, RELEASED, 1024) == (504, 378)
    assert fitted_size(7000, 14, RELEASED, 4) == (28, 1)


def test_budget_below_one_token_is_refused():
    with pytest.raises(DataError, match=r"budget of 3 patches.*raise data.images.patches"):
        fitted_size(10, 10, RELEASED, 3)
    with pytest.raises(DataError, match="budget of 0"):
        open_item(encoded(Image.new("RGB", (8, 8))), "x", SMALL, budget=0)


# Pixels and patches


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3))
def test_patch_order_is_frame_row_column_then_channel_row_column(t, h, w, patch_size):
    frames = noise(t, h * patch_size, w * patch_size, 3)
    patches = patchify(frames, patch_size)
    assert patches.dtype == np.uint8
    np.testing.assert_array_equal(pixels(Item(patches, (t, h, w), (1, 1)), patch_size), frames)


def test_lossless_image_is_taken_to_the_pixel_and_padded_with_zeros(tmp_path):
    rgb = noise(10, 13, 3)
    path = tmp_path / "a.png"
    path.write_bytes(encoded(Image.fromarray(rgb)))
    for source in (path, str(path), path.read_bytes()):
        item = open_item(source, "a", SMALL)
        assert (item.grid, item.size, item.features(2)) == ((1, 4, 4), (13, 10), 4)
        out = pixels(item, 4)[0]
        np.testing.assert_array_equal(out[:10, :13], rgb)
        assert out.sum() == rgb.sum()


def test_resize_is_bicubic_and_budget_is_used():
    rgb = Image.fromarray(noise(64, 96, 3))
    item = open_item(encoded(rgb), "a", SMALL, budget=96)
    assert item.grid == (1, 8, 12)
    assert item.size == (96, 64)
    np.testing.assert_array_equal(pixels(item, 4)[0], rgb.resize((48, 32), Image.Resampling.BICUBIC))


def test_huge_and_tiny_images():
    assert open_item(encoded(Image.new("RGB", (1, 1), "red")), "a", RELEASED).grid == (1, 2, 2)
    wide = open_item(encoded(Image.new("L", (100_000, 100), 9)), "a", RELEASED)
    assert (wide.grid, wide.features(2), wide.size) == ((1, 2, 512), 256, (100_000, 100))
    expected = np.zeros((28, 7168, 3))
    expected[:7, :7167] = 9  # 100,000 · (7168 / 100,000) is less than 7168 in float64, and truncated
    np.testing.assert_array_equal(pixels(wide, 14)[0], expected)
    tall = open_item(encoded(Image.new("1", (2, 60_000), 1)), "a", RELEASED, budget=64)
    assert len(tall.patches) <= 64


GREY = noise(16, 8)
GREY3 = np.repeat(GREY[..., None], 3, axis=2)


@pytest.mark.parametrize(
    ("image", "format"),
    [
        (Image.fromarray(GREY), "PNG"),
        (Image.fromarray(GREY), "TIFF"),
        (Image.fromarray(GREY3), "BMP"),
        (Image.fromarray(GREY3), "PPM"),
        (Image.fromarray(GREY).convert("LA"), "PNG"),
        (Image.fromarray(GREY3).convert("RGBA"), "PNG"),
        (Image.fromarray(GREY).convert("P"), "GIF"),
        (Image.fromarray(GREY).convert("P"), "PNG"),
        (Image.fromarray(GREY.astype(np.uint16) * 257), "PNG"),
        (Image.fromarray(GREY.astype(np.uint16) * 257), "TIFF"),
        (Image.fromarray(GREY.astype(np.uint16) * 257), "PPM"),
        (Image.fromarray(GREY.astype(np.int32) * 257), "TIFF"),
    ],
    ids=lambda x: x if isinstance(x, str) else x.mode,
)
def test_all_modes_of_one_grey_picture_are_one_picture(image, format):
    np.testing.assert_array_equal(seen(encoded(image, format)), GREY3)


def test_sixteen_bits_are_rounded_to_eight():
    values = np.array([0, 128, 129, 255, 256, 32_767, 32_768, 65_406, 65_407, 65_535], np.uint16)
    out = seen(encoded(Image.fromarray(np.tile(values, (8, 1)))))
    assert out[0, : len(values), 0].tolist() == np.rint(values / 257).astype(int).tolist()


def test_one_bit_and_cmyk_and_palette():
    bits = noise(8, 8, high=2)
    np.testing.assert_array_equal(seen(encoded(Image.fromarray(bits * 255).convert("1")))[..., 1], bits * 255)
    cmyk = Image.new("CMYK", (8, 8), (0, 255, 255, 0))
    np.testing.assert_array_equal(seen(encoded(cmyk, "TIFF")), np.full((8, 8, 3), (255, 0, 0)))
    for other in (encoded(cmyk, "JPEG"), encoded(Image.new("YCbCr", (8, 8), (76, 85, 255)), "TIFF")):
        np.testing.assert_allclose(seen(other).astype(int), np.full((8, 8, 3), (255, 0, 0)), atol=3)
    colours = Image.fromarray(noise(8, 8, 3)).quantize(7)
    np.testing.assert_array_equal(seen(encoded(colours)), np.asarray(colours.convert("RGB")))


@pytest.mark.parametrize("format", ["WEBP", "AVIF", "JPEG2000", "JPEG"])
def test_other_formats_decode(format):
    out = seen(encoded(Image.new("RGB", (16, 8), (200, 30, 90)), format))
    np.testing.assert_allclose(out.astype(int), np.full((8, 16, 3), (200, 30, 90)), atol=4)


@pytest.mark.parametrize("format", ["GIF", "WEBP", "PNG", "TIFF"])
def test_of_several_frames_the_first_is_taken(format):
    frames = [Image.new("RGB", (8, 8), (c, c, c)) for c in (40, 200, 90)]
    out = seen(encoded(frames[0], format, save_all=True, append_images=frames[1:]))
    np.testing.assert_allclose(out.astype(int), 40, atol=2)


# Transparency


def chessboard(height, width):
    return np.array([[[180 if (y // 8 + x // 8) % 2 else 255] * 3 for x in range(width)] for y in range(height)])


def see_through(mode):
    if mode in ("RGBA", "LA"):
        return encoded(Image.new(mode, (96, 64), 0))
    image = Image.new(mode, (96, 64), 0)
    return encoded(image, "PNG", transparency=(0, 0, 0) if mode == "RGB" else 0)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "L", "RGB", "1", "I;16"])
def test_transparent_pixels_show_the_chessboard_laid_after_the_resize(mode):
    np.testing.assert_array_equal(seen(see_through(mode)), chessboard(64, 96))
    np.testing.assert_array_equal(seen(see_through(mode), budget=96), chessboard(32, 48))


def test_partly_transparent_pixels_are_mixed_and_padding_stays_zero():
    image = Image.new("RGBA", (12, 12), (100, 0, 0, 51))
    out = seen(encoded(image)).astype(int)
    expected = np.zeros((16, 16, 3))
    expected[:12, :12] = 0.8 * chessboard(12, 12) + 0.2 * np.array([100, 0, 0])
    np.testing.assert_allclose(out, expected, atol=0.51)


def test_colour_below_full_transparency_does_not_bleed_in():
    half = np.zeros((64, 64, 4), np.uint8)
    half[:, 32:] = (0, 200, 0, 255)
    half[:, :32] = (255, 0, 0, 0)  # red, but not to be seen
    out = seen(encoded(Image.fromarray(half)), budget=64)
    assert (out[..., 0] <= out[..., 2]).all()


# Orientation


@pytest.mark.parametrize("orientation", range(10))
@pytest.mark.parametrize("format", ["PNG", "TIFF", "WEBP"])
def test_images_are_turned_upright(orientation, format):
    image = Image.fromarray(noise(16, 24, 3))
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(image, format, exif=exif, **({"lossless": True} if format == "WEBP" else {}))
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    item = open_item(data, "a", SMALL)
    assert item.size == ((16, 24) if 5 <= orientation <= 8 else (24, 16))
    np.testing.assert_array_equal(pixels(item, 4)[0], np.asarray(expected))


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
@pytest.mark.parametrize("exif", [b"MM\0*\xff\xff\xff\xff", b"no TIFF header"])
def test_damaged_metadata_do_not_cost_the_image(exif):
    image = Image.fromarray(noise(16, 24, 3))
    data = encoded(image, exif=b"Exif\0\0" + exif)
    np.testing.assert_array_equal(seen(data), np.asarray(image))


# What is refused


def png_header(width, height):
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    end = struct.pack(">II", 0, zlib.crc32(b"IEND"))[:4] + b"IEND" + struct.pack(">I", zlib.crc32(b"IEND"))
    data = b"IDAT" + zlib.compress(b"\0" * 100)
    return (
        b"\x89PNG\r\n\x1a\n"
        + b"".join(struct.pack(">I", len(c) - 4) + c + struct.pack(">I", zlib.crc32(c)) for c in (header, data))
        + end
    )


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("size", [(9_460, 9_460), (14_000, 14_000), (10**9, 10**9)])
def test_decompression_bombs_are_refused_by_name_before_they_are_decoded(size):
    limit = Image.MAX_IMAGE_PIXELS
    with pytest.raises(ImageError, match=r"record 7: image.*bomb"):
        open_item(png_header(*size), "record 7", SMALL)
    assert limit == Image.MAX_IMAGE_PIXELS


@pytest.mark.filterwarnings("error")
def test_the_warning_about_a_bomb_as_an_error_is_named_too():
    with pytest.raises(ImageError, match=r"record 7: image.*bomb"):
        open_item(png_header(9_460, 9_460), "record 7", SMALL)


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
@pytest.mark.parametrize("format", ["PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF", "PPM", "AVIF", "JPEG2000"])
def test_a_truncated_file_is_refused_by_name_wherever_it_ends(format):
    data = encoded(Image.fromarray(noise(32, 32, 3)), format)
    for stop in (1, 4, 12, 20, 40, len(data) // 3, len(data) // 2, 3 * len(data) // 4):
        with pytest.raises(ImageError, match="^record 7: "):
            open_item(data[:stop], "record 7", SMALL)


@given(st.sampled_from(["PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF", "PPM"]), st.data())
@pytest.mark.filterwarnings("ignore")
def test_a_damaged_file_gives_an_image_or_an_image_error(format, draw):
    data = bytearray(encoded(Image.fromarray(noise(16, 16, 3)), format))
    for _ in range(draw.draw(st.integers(1, 8))):
        data[draw.draw(st.integers(0, len(data) - 1))] = draw.draw(st.integers(0, 255))
    try:
        item = open_item(bytes(data), "record 7", SMALL, budget=64)
    except ImageError as error:
        message = str(error)
    else:
        assert 0 < len(item.patches) <= 64
        return
    assert message.startswith("record 7: ")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (b"", "empty"),
        (b"not an image at all", "known format"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "known format"),
        ("missing.png", "No such file"),
        ("/", "directory"),
        ("a\0b", "null"),
        (b"P6 0 4 255\n", "known format"),
        (png_header(0, 4), "record 7: "),
        (encoded(Image.fromarray(np.ones((8, 8), np.float32)), "TIFF"), "floating-point"),
        (encoded(Image.fromarray(np.full((8, 8), 65_536, np.int32)), "TIFF"), "32-bit"),
        (encoded(Image.fromarray(np.full((8, 8), -1, np.int32)), "TIFF"), "32-bit"),
    ],
)
def test_what_is_no_image_is_refused_by_name_and_reason(source, message):
    with pytest.raises(ImageError, match=message) as error:
        open_item(source, "record 7", SMALL)
    assert str(error.value).startswith("record 7: ")


# Video and prompts


@pytest.mark.parametrize(("count", "frames"), [(1, [1]), (3, [3]), (4, [4]), (9, [4, 4, 1])])
def test_videos_become_pieces_of_frames_on_one_grid(count, frames):
    video = noise(count, 16, 24, 3)
    items = video_items([Image.fromarray(f) for f in video], "clip", SMALL)
    assert [item.grid for item in items] == [(t, 4, 6) for t in frames]
    assert {(item.size, item.features(2)) for item in items} == {((24, 16), 6)}
    np.testing.assert_array_equal(np.concatenate([pixels(item, 4) for item in items]), video)


def test_a_piece_of_video_keeps_its_budget_and_each_frame_the_released_limit():
    video = [Image.new("RGB", (80, 80))] * 5
    assert [item.grid for item in video_items(video, "clip", SMALL, budget=70)] == [(4, 4, 4), (1, 4, 4)]
    assert fitted_size(4000, 3000, RELEASED, images.MAX_FRAME_PATCHES) == (2054, 1540)
    assert video_items([Image.new("RGB", (4000, 3000))], "clip", RELEASED)[0].grid == (1, 110, 148)
    with pytest.raises(ImageError, match=r"clip: 4 frames share 15 patches, and one takes at least 4; .* have 16"):
        video_items(video, "clip", SMALL, budget=15)


def test_videos_that_are_refused(tmp_path):
    with pytest.raises(ImageError, match="clip: a video without frames"):
        video_items([], "clip", SMALL)
    with pytest.raises(ImageError, match=r"clip: frame 1 has \(9, 8\) pixels, frame 0 \(8, 8\)"):
        video_items([Image.new("RGB", (8, 8)), Image.new("RGB", (9, 8))], "clip", SMALL)
    half = Image.open(io.BytesIO(encoded(Image.fromarray(noise(32, 32, 3)))[:900]))
    with pytest.raises(ImageError, match="clip, frame 1: image cannot be decoded"):
        video_items([Image.new("RGB", (32, 32)), half], "clip", SMALL)


@pytest.mark.parametrize("name", ["bytes", "python8k"])
def test_prompt_tells_the_original_size_and_has_a_pad_for_each_feature(name):
    tokenizer = load_tokenizer(name)
    item = open_item(encoded(Image.new("RGB", (640, 480))), "a", RELEASED, budget=1024)
    ids = prompt(item, tokenizer, merge=2)
    pad = tokenizer.special_tokens["<|media_pad|>"]
    assert item.features(2) == 18 * 14
    assert ids.count(pad) == item.features(2)
    first = ids.index(pad)
    assert ids[first : first + item.features(2)] == [pad] * item.features(2)
    once = [*ids[:first], pad, *ids[first + item.features(2) :]]
    assert tokenizer.decode(once) == "<|media_begin|>image 640x480<|media_content|><|media_pad|><|media_end|>"
    assert once[0] == tokenizer.special_tokens["<|media_begin|>"]
    assert once[-1] == tokenizer.special_tokens["<|media_end|>"]
