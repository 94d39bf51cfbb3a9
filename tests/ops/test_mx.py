"""MXFP4 and MXFP8: codes, scales, rounding, and what NumPy and JAX make of the same numbers."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from k3jax.ops.mx import PackedMX, dequantize, fake_quant, pack, quantize, unpack

FORMATS = ("mxfp4", "mxfp8")
RULES = ("floor", "ceil", "even", "outlier")
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
E2M1 = np.concatenate([E2M1, -E2M1])
E4M3 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
LARGEST = {"mxfp4": 6.0, "mxfp8": 448.0}
DEVICES = pytest.mark.parametrize("of", [np.asarray, jnp.asarray], ids=["numpy", "jax"])


def bits(x):
    return np.asarray(x, np.float32).view(np.int32)


def gaussian_groups(seed=0, shape=(64, 256)):
    """Groups of widely different sizes."""
    rng = np.random.default_rng(seed)
    sizes = np.exp(rng.uniform(-12, 12, (shape[0], shape[1] // 32, 1)))
    return (rng.normal(size=(shape[0], shape[1] // 32, 32)) * sizes).reshape(shape).astype(np.float32)


@DEVICES
def test_golden_codec(golden, of):
    data = golden("g9_checkpoint", "mxfp4_codec")
    values = dequantize(of(data["in.packed"]), of(data["in.scale"]), format="mxfp4")
    np.testing.assert_array_equal(bits(values), bits(data["out.values"]))
    codes, scales = data["in.all_bytes_packed"], data["in.all_bytes_scale"]
    rows = [i for i in range(16) if i not in (1, 2) or of is np.asarray]  # 1 and 2 are subnormal in part
    for dtype, expected in ((np.float32, "out.all_bytes"), (ml_dtypes.bfloat16, "out.all_bytes_bf16_as_f32")):
        values = dequantize(of(codes), of(scales), dtype, format="mxfp4")
        assert values.dtype == dtype
        np.testing.assert_array_equal(bits(values)[rows], bits(data[expected])[rows])


def test_golden_experts_decode_and_encode_to_their_own_bytes(golden):
    # packed by the generator of the vectors with the rule "floor"
    data = golden("g9_checkpoint", "mxfp4_logits_and_dequant")
    weights = [values for name, values in data.items() if name.startswith("deq.")]
    assert len(weights) == 9
    for w in weights:
        packed, scales = quantize(w, format="mxfp4", scale_rule="floor")
        np.testing.assert_array_equal(bits(dequantize(packed, scales, format="mxfp4")), bits(w))


@DEVICES
def test_known_answer_and_order_of_nibbles(of):
    packed, scales = np.zeros((1, 16), np.uint8), np.full((1, 1), 128, np.uint8)
    packed[0, 0] = 0x72
    values = np.asarray(dequantize(of(packed), of(scales), format="mxfp4"))
    assert values[0, :3].tolist() == [2.0, 12.0, 0.0]


@DEVICES
def test_all_codes_under_all_scales(of):
    scales = np.arange(256, dtype=np.uint8)[:, None]
    for format, table in (("mxfp4", np.tile(E2M1, 2)), ("mxfp8", E4M3)):
        codes = np.broadcast_to(np.arange(len(table), dtype=np.uint8), (256, len(table)))
        per_row = np.repeat(scales, len(table) // 32, axis=1)
        codes = codes & 15 if format == "mxfp4" else codes & ~np.uint8(codes & 127 == 127)  # E4M3's own NaNs
        table = table[codes[0]]
        with np.errstate(over="ignore"):
            values = dequantize(of(pack(codes, format=format)), of(per_row), format=format)
            exact = table.astype(np.float64) * 2.0 ** (scales.astype(np.float64) - 127)
            expected = np.where(scales == 255, np.nan, exact).astype(np.float32)
        held = np.abs(expected) >= np.finfo(np.float32).tiny  # XLA may flush what is smaller on CPUs
        held |= (expected == 0) | np.isnan(expected) | (of is np.asarray)
        np.testing.assert_array_equal(np.asarray(values)[held], expected[held])
        inner = slice(1, 253) if format == "mxfp4" else slice(10, 247)
        rows = of(pack(codes, format=format))[inner], of(per_row)[inner]
        narrow = dequantize(*rows, jnp.bfloat16, format=format)
        same = np.asarray(narrow).astype(np.float32) == expected[inner]
        assert same[held[inner]].all()


@pytest.mark.parametrize("format", FORMATS)
def test_every_code_survives_a_round_trip(format):
    codes = np.arange(256, dtype=np.uint8)
    codes = np.tile(codes[:16], 2) if format == "mxfp4" else codes[codes & 127 != 127]
    codes = np.resize(codes, -(-len(codes) // 32) * 32)[None]
    scales = np.full((1, codes.size // 32), 100, np.uint8)
    packed = pack(codes, format=format)
    np.testing.assert_array_equal(unpack(packed, format=format), codes)
    for rule in RULES:
        values = dequantize(packed, scales, format=format)
        again = quantize(values, format=format, scale_rule=rule, source_scales=scales)
        np.testing.assert_array_equal(again[0], packed)
        np.testing.assert_array_equal(again[1], scales)


@DEVICES
def test_ties_go_to_the_even_code(of):
    points = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5]
    expected = [0, 1, 1, 2, 2, 4, 4]
    x = np.zeros((1, 32), np.float32)
    x[0, :7], x[0, 7:14], x[0, 14] = points, np.negative(points), 6
    packed, scales = quantize(of(x), format="mxfp4", scale_rule="floor")
    values = np.asarray(dequantize(packed, scales, format="mxfp4"))[0]
    assert values[:7].tolist() == expected
    assert values[7:14].tolist() == [-v for v in expected]
    assert np.signbit(values[7])  # -0.25 becomes −0, code 8
    points = np.float32(points)
    x[0, :7], x[0, 7:14] = np.nextafter(points, np.float32(0)), np.nextafter(points, np.float32(9))
    rounded = np.asarray(dequantize(*quantize(of(x), format="mxfp4", scale_rule="floor"), format="mxfp4"))[0]
    assert rounded[:7].tolist() == [0, 0.5, 1, 1.5, 2, 3, 4]
    assert rounded[7:14].tolist() == [0.5, 1, 1.5, 2, 3, 4, 6]


@DEVICES
def test_mxfp8_rounds_as_e4m3_does(of):
    # a group of every neighbour, tie and point between of E4M3, under the scale 1 (largest 448, exponent 8)
    grid = np.unique(np.abs(E4M3[np.isfinite(E4M3)]))
    ties = (grid[1:] + grid[:-1]) / 2
    x = np.concatenate([grid, ties, np.nextafter(ties, 0), np.nextafter(ties, np.float32(500))])
    x = np.concatenate([x, -x]).astype(np.float32)
    x = np.resize(x, -(-len(x) // 31) * 31).reshape(-1, 31)
    x = np.concatenate([x, np.full((len(x), 1), 448, np.float32)], axis=1)
    packed, scales = quantize(of(x), format="mxfp8", scale_rule="floor")
    assert (np.asarray(scales) == 127).all()
    np.testing.assert_array_equal(np.asarray(packed), x.astype(ml_dtypes.float8_e4m3fn).view(np.uint8))


@pytest.mark.parametrize("format", FORMATS)
def test_scale_rules_are_their_formulas(format):
    x = gaussian_groups()
    a = np.abs(x).reshape(64, 8, 32).max(-1).astype(np.float64)
    largest, emax, mantissa = (6, 2, 1) if format == "mxfp4" else (448, 8, 3)
    k = np.floor(np.log2(a))
    ratio = 12 / 7 if format == "mxfp4" else 60 / 31
    expected = {
        "floor": k - emax,
        "ceil": np.ceil(np.log2(a / largest)),
        "even": np.floor(np.log2(np.rint(a / 2**k * 2**mantissa) / 2**mantissa * 2**k)) - emax,
        "outlier": np.floor(np.log2(a / largest * ratio)),
    }
    for rule, exponent in expected.items():
        np.testing.assert_array_equal(quantize(x, format=format, scale_rule=rule)[1], exponent + 127, err_msg=rule)


@pytest.mark.parametrize(
    ("format", "rule", "last", "first"),
    [
        # the largest magnitude that still has the scale 1, and the smallest that has 2
        ("mxfp4", "floor", None, 8),
        ("mxfp4", "ceil", 6, None),
        ("mxfp4", "even", None, 7),
        ("mxfp4", "outlier", None, 7),
        ("mxfp8", "floor", None, 512),
        ("mxfp8", "ceil", 448, None),
        ("mxfp8", "even", None, 496),
        ("mxfp8", "outlier", None, 256 * 217 / 120),
    ],
)
def test_scale_rules_at_their_thresholds(format, rule, last, first):
    if first is not None:
        rounded = np.float32(first)
        first = rounded if float(rounded) >= first else np.nextafter(rounded, np.float32(np.inf))
    last = np.nextafter(first, np.float32(0)) if last is None else np.float32(last)
    first = np.nextafter(last, np.float32(np.inf)) if first is None else first
    for largest, scale in ((last, 127), (first, 128)):
        group = np.zeros(32, np.float32)
        group[5] = -largest
        assert quantize(group, format=format, scale_rule=rule)[1].tolist() == [scale]


def test_only_ceil_never_saturates_and_the_others_are_idempotent():
    x = gaussian_groups(1)
    largest = np.abs(x).reshape(64, 8, 32).max(-1)
    for format in FORMATS:
        for rule in RULES:
            packed, scales = quantize(x, format=format, scale_rule=rule)
            values = dequantize(packed, scales, format=format)
            clipped = largest > LARGEST[format] * 2.0 ** (scales.astype(np.float64) - 127)
            assert clipped.any() == (rule != "ceil"), (format, rule)
            again = quantize(values, format=format, scale_rule=rule)
            np.testing.assert_array_equal(dequantize(*again, format=format), values)
            # these may halve a scale and double the codes, of the same numbers
            if rule != "ceil" and (format, rule) != ("mxfp8", "outlier"):
                np.testing.assert_array_equal(again[0], packed)
                np.testing.assert_array_equal(again[1], scales)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("format", FORMATS)
def test_error_is_half_a_step_and_no_neighbour_is_nearer(format, rule):
    x = gaussian_groups(2)
    packed, scales = quantize(x, format=format, scale_rule=rule)
    values = dequantize(packed, scales, format=format).astype(np.float64)
    scale = np.repeat(2.0 ** (scales.astype(np.float64) - 127), 32, axis=1)
    grid = E2M1 if format == "mxfp4" else E4M3[np.isfinite(E4M3)]
    nearest = np.min(np.abs(x[..., None] - scale[..., None] * grid), axis=-1)
    np.testing.assert_array_equal(np.abs(x - values), nearest)


@DEVICES
@pytest.mark.parametrize("format", FORMATS)
def test_groups_of_zeros_nan_infinity_and_the_ends_of_the_range(format, of):
    x = np.zeros((6, 32), np.float32)
    x[0, 3] = -0.0
    x[1, 4], x[2, 4], x[3, 4] = np.nan, np.inf, -np.inf
    x[4] = np.finfo(np.float32).max
    x[5, :2] = np.finfo(np.float32).tiny, 0
    for rule in RULES:
        packed, scales = quantize(of(x), format=format, scale_rule=rule)
        values = np.asarray(dequantize(packed, scales, format=format))
        scales = np.asarray(scales)[:, 0]
        assert scales[0] == 1
        assert (values[0] == 0).all()
        assert np.signbit(values[0, 3])
        assert (scales[1:4] == 255).all()
        assert not np.asarray(packed)[1:4].any()
        assert np.isnan(values[1:4]).all()
        assert np.isfinite(values[4]).all()
        assert (values[4] == {"mxfp4": 1.5, "mxfp8": 1.75}[format] * 2.0**127).all()
        assert scales[5] == 1
        assert values[5, 0] == x[5, 0]


def test_subnormal_groups_on_the_host():
    x = np.zeros((1, 32), np.float32)
    x[0, :3] = 2.0**-127, 2.0**-128, -(2.0**-149)
    for format in FORMATS:
        packed, scales = quantize(x, format=format, scale_rule="even")
        values = dequantize(packed, scales, format=format)
        assert scales.tolist() == [[1]]
        assert values[0, 0] == x[0, 0]
        assert values[0, 1] == (0 if format == "mxfp4" else x[0, 1])  # a tie between 0 and 2^-127
        assert values[0, 2] == 0


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("rule", RULES)
def test_numpy_jax_and_fake_quant_agree_to_the_bit(format, rule):
    for dtype in (np.float32, ml_dtypes.bfloat16):
        x = gaussian_groups(3).astype(dtype)
        host = quantize(x, format=format, scale_rule=rule)
        on_device = jax.jit(lambda x: quantize(x, format=format, scale_rule=rule))(jnp.asarray(x))
        for a, b in zip(host, on_device):
            assert isinstance(a, np.ndarray)
            np.testing.assert_array_equal(a, b)
        values = dequantize(*host, dtype, format=format)
        faked = jax.jit(lambda x: fake_quant(x, format=format, scale_rule=rule))(jnp.asarray(x))
        assert faked.dtype == dtype
        np.testing.assert_array_equal(bits(values), bits(faked))
        np.testing.assert_array_equal(bits(dequantize(*on_device, dtype, format=format)), bits(values))


def test_float64_is_not_narrowed(x64):
    x = np.zeros(32)
    x[0], x[1] = 6, 1.25 + 1e-12  # in float32 a tie
    for of in (np.asarray, jnp.asarray):
        codes, scales = quantize(of(x), format="mxfp4", scale_rule="floor")
        assert dequantize(codes, scales, np.float64, format="mxfp4")[1] == 1.5


@pytest.mark.parametrize("format", FORMATS)
def test_groups_lie_along_the_axis_that_is_named(format):
    x = gaussian_groups(4, (64, 96))
    for of in (np.asarray, jnp.asarray):
        for rule in RULES:
            along = quantize(of(x.T), format=format, scale_rule=rule, axis=-2)
            rows = quantize(of(x), format=format, scale_rule=rule)
            for a, b in zip(along, rows):
                np.testing.assert_array_equal(np.asarray(a).T, b)
            np.testing.assert_array_equal(
                np.asarray(dequantize(*along, format=format, axis=0)).T, dequantize(*rows, format=format)
            )
        faked = fake_quant(jnp.asarray(x.T), format=format, scale_rule="even", axis=0)
        np.testing.assert_array_equal(faked.T, fake_quant(jnp.asarray(x), format=format, scale_rule="even"))


@DEVICES
def test_untouched_groups_keep_their_source_scales(of):
    rng = np.random.default_rng(5)
    packed = rng.integers(0, 256, (32, 64), np.uint8)
    scales = rng.integers(90, 150, (32, 4), np.uint8)
    packed[0, :16] = 0x11  # largest code 0.5: every rule would choose another scale
    packed[1, :16] = 0x80  # zeros of both signs
    w = dequantize(of(packed), of(scales), jnp.bfloat16, format="mxfp4")
    for rule in RULES:
        again = quantize(w, format="mxfp4", scale_rule=rule, source_scales=of(scales))
        np.testing.assert_array_equal(again[0], packed)
        np.testing.assert_array_equal(again[1], scales)
    changed = np.asarray(w).astype(np.float32)
    changed[2, 40] *= 1.01  # one group of 128
    codes, kept = quantize(of(changed), format="mxfp4", scale_rule="ceil", source_scales=of(scales))
    fresh = quantize(of(changed), format="mxfp4", scale_rule="ceil")
    touched = np.zeros((32, 4), bool)
    touched[2, 1] = True
    np.testing.assert_array_equal(kept, np.where(touched, fresh[1], scales))
    np.testing.assert_array_equal(codes, np.where(np.repeat(touched, 16, axis=1), fresh[0], packed))


@pytest.mark.parametrize("format", FORMATS)
def test_gradient_passes_straight_through(format):
    rng = np.random.default_rng(6)
    x, cotangent = (jnp.asarray(rng.normal(size=(4, 64)) * 10, jnp.float32) for _ in range(2))
    y, pull = jax.vjp(lambda x: fake_quant(x, format=format, scale_rule="floor"), x)
    assert (y != x).any()
    np.testing.assert_array_equal(pull(cotangent)[0], cotangent)
    _, tangent = jax.jvp(lambda x: fake_quant(x, format=format, scale_rule="floor"), (x,), (cotangent,))
    np.testing.assert_array_equal(tangent, cotangent)


def test_packed_weights_stand_for_an_array():
    w = gaussian_groups(7, (64, 32)).reshape(2, 32, 32)
    for of in (np.asarray, jnp.asarray):
        packed = PackedMX.of(of(w), scale_rule="even")
        assert (packed.shape, packed.codes.shape, packed.scales.shape) == (w.shape, (2, 16, 32), (2, 1, 32))
        expected = fake_quant(jnp.asarray(w), format="mxfp4", scale_rule="even", axis=1)
        np.testing.assert_array_equal(packed.dequantize(np.float32), expected)
    one = jax.lax.map(lambda bank: bank.dequantize(jnp.float32), packed)
    np.testing.assert_array_equal(one, expected)


def test_what_cannot_be_quantised_is_refused():
    x = np.zeros((4, 48), np.float32)
    with pytest.raises(ValueError, match="axis 1 of .4, 48. must be a multiple of 32"):
        quantize(x, format="mxfp4", scale_rule="even")
    with pytest.raises(ValueError, match="scale_rule must be one of 'floor', 'ceil', 'even', 'outlier', got 'round'"):
        quantize(x[:, :32], format="mxfp4", scale_rule="round")
    with pytest.raises(ValueError, match="format must be one of 'mxfp4', 'mxfp8', got 'nvfp4'"):
        quantize(x[:, :32], format="nvfp4", scale_rule="even")
    with pytest.raises(ValueError, match=r"source_scales must have shape \(4, 1\), got \(4, 2\)"):
        quantize(x[:, :32], format="mxfp4", scale_rule="even", source_scales=np.zeros((4, 2), np.uint8))
    codes, scales = quantize(x[:, :32], format="mxfp4", scale_rule="even")
    for wrong in ((codes, scales.T), (codes.astype(np.int8), scales), (codes[:, :8], scales)):
        with pytest.raises(ValueError, match="do not belong together: mxfp4 along axis 1 has uint8 scales"):
            dequantize(*wrong, format="mxfp4")
