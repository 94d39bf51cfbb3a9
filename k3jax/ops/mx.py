"""MXFP4 and MXFP8: groups of 32 numbers that share a power of two (OCP Microscaling Formats, v1.0).

    value = element · 2^(scale − 127)      element: E2M1 (MXFP4) or E4M3 (MXFP8)      scale: uint8, E8M0

    packed, scales = quantize(w, format="mxfp4", scale_rule="even", axis=-1)
    w_q = dequantize(packed, scales, jnp.bfloat16, format="mxfp4", axis=-1)

`quantize` and `dequantize` take NumPy arrays and return NumPy arrays without touching a device, or take and return JAX
arrays, under `jit` too: one definition, the same bits. The one exception: where a device flushes subnormal numbers (XLA
does on CPUs), |x| < 2^-126 reads as 0.

The exponent of a group's scale follows from its largest magnitude, a = m · 2^k with 1 ≤ m < 2, and the largest element
x = 6 or 448, of exponent 2 or 8. Rules differ in the m from which k − 2 (or k − 8) becomes one more:

    "floor"    never: floor(log2 a) − 2, the OCP text's. Numbers beyond x saturate.
    "ceil"     ceil(log2(a / x)): never saturates
    "even"     the exponent of a rounded to the element's precision, ties to even: m ≥ 1.75 (1.9375)
    "outlier"  floor(log2(a / x · 12/7)), for MXFP8 · 60/31: m ≥ 1.75 (1.8083); arXiv 2603.08713

Which of them made K3's released weights is not published. Exponents stay in −126 … 125 (119), so that no scale is
subnormal and nothing decodes to infinity in float32 or bfloat16; a group of zeros has −126. A group with NaN or
infinity has the scale 255, which decodes to NaN.
"""

from __future__ import annotations

import dataclasses
import math
from types import ModuleType
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from k3jax.ops.common import wide_dtype

Format = Literal["mxfp4", "mxfp8"]
ScaleRule = Literal["floor", "ceil", "even", "outlier"]

GROUP = 32
"""Elements that share a scale."""
_BIAS, _NAN = 127, 255  # of E8M0


class _Element(NamedTuple):
    """A sign, an exponent that counts from `min_exponent` (0 is subnormal) and a mantissa."""

    mantissa_bits: int
    min_exponent: int
    max_exponent: int
    largest: float
    sign: int  # bit
    per_byte: int
    outlier: float  # m from which the rule "outlier" takes the next exponent


_ELEMENTS: dict[Format, _Element] = {
    "mxfp4": _Element(1, 0, 2, 6.0, 8, 2, 7 / 4),
    "mxfp8": _Element(3, -6, 8, 448.0, 128, 1, 217 / 120),
}


def quantize(
    x: Any, *, format: Format, scale_rule: ScaleRule, axis: int = -1, source_scales: Any | None = None
) -> tuple[Any, Any]:
    """Codes and scales of `x`; elements are rounded to nearest, ties to even, and saturate.

    Args:
        x: [..., n, ...] of any float type, with n = `shape[axis]` a multiple of 32.
        axis: the one that groups lie along: the input dimension of a weight.
        source_scales: uint8 [..., n/32, ...] that `x` was decoded with. A group which they represent exactly keeps its
            scale, whatever the rule; so what was decoded and not changed is encoded to the bytes that it came from.

    Returns:
        packed: uint8, [..., n/2, ...] for "mxfp4", the even element in the low nibble; [..., n, ...] for "mxfp8".
        scales: uint8 [..., n/32, ...].

    Raises:
        ValueError: a size that is not a multiple of 32, an unknown format or rule, or scales of another shape.
    """
    element, xp = _element(format), _namespace(x)
    groups, axis = _grouped(x, axis)
    finite, exponent = _scale_exponent(groups, axis, element, scale_rule)
    codes, values = _round(groups, exponent, element)
    scales = xp.where(finite, exponent + _BIAS, _NAN)
    if source_scales is not None:
        source = xp.expand_dims(source_scales, axis + 1).astype(np.int32)
        if source.shape != scales.shape:
            expected = tuple(n for i, n in enumerate(scales.shape) if i != axis + 1)
            raise ValueError(f"source_scales must have shape {expected}, got {tuple(source_scales.shape)}")
        same_codes, values = _round(groups, source - _BIAS, element)
        same = xp.all(values == groups, axis=axis + 1, keepdims=True) & (source < _NAN)
        codes, scales = xp.where(same, same_codes, codes), xp.where(same, source, scales)
    codes = xp.where(scales == _NAN, 0, codes).astype(np.uint8)
    return pack(codes.reshape(x.shape), format=format, axis=axis), xp.squeeze(scales, axis + 1).astype(np.uint8)


def dequantize(packed: Any, scales: Any, dtype: Any = np.float32, *, format: Format, axis: int = -1) -> Any:
    """The numbers behind codes and scales: exact, but for what `dtype` cannot hold.

    float32 and bfloat16 hold every finite product of a code with a scale of 1 … 252 (MXFP8: 10 … 246); beyond that a
    product may overflow to infinity or be subnormal. Scale 255 gives NaN.

    Args:
        packed, scales: as `quantize` returns them.

    Returns:
        [..., n, ...] of `dtype`.

    Raises:
        ValueError: shapes that do not belong together, other dtypes than uint8, or an unknown format.
    """
    element, xp = _element(format), _namespace(packed)
    axis = axis % packed.ndim
    n = packed.shape[axis] * element.per_byte
    expected = (*packed.shape[:axis], n // GROUP, *packed.shape[axis + 1 :])
    if n % GROUP or tuple(scales.shape) != expected or {packed.dtype, scales.dtype} != {np.dtype(np.uint8)}:
        raise ValueError(
            f"packed {packed.dtype}{list(packed.shape)} and scales {scales.dtype}{list(scales.shape)} do not belong "
            f"together: {format} along axis {axis} has uint8 scales {list(expected)}"
        )
    values, axis = _grouped(_elements(packed, wide_dtype(dtype), format, axis), axis)
    scale = xp.expand_dims(scales, axis + 1).astype(np.int32)
    values = xp.where(scale == _NAN, np.nan, _times_power_of_two(values, scale - _BIAS))
    return values.astype(dtype).reshape(*packed.shape[:axis], n, *packed.shape[axis + 1 :])


def fake_quant(x: jax.Array, *, format: Format, scale_rule: ScaleRule, axis: int = -1) -> jax.Array:
    """`x` rounded to what `quantize` can represent, in its own dtype; the gradient passes straight through.

        fake_quant(x) = dequantize(*quantize(x))        ∂ fake_quant(x) / ∂x = 1, also where elements saturate

    Raises:
        ValueError: as `quantize`.
    """
    element = _element(format)

    @jax.custom_jvp
    def rounded(x: jax.Array) -> jax.Array:
        groups, at = _grouped(x, axis)
        finite, exponent = _scale_exponent(groups, at, element, scale_rule)
        return jnp.where(finite, _round(groups, exponent, element)[1], jnp.nan).astype(x.dtype).reshape(x.shape)

    rounded.defjvp(lambda primals, tangents: (rounded(*primals), *tangents))
    return rounded(x)


def pack(codes: Any, *, format: Format, axis: int = -1) -> Any:
    """Codes, one in a byte each, as they are stored: uint8 [..., n, ...] → [..., n/2, ...] for "mxfp4"."""
    if _element(format).per_byte == 1:
        return codes
    low, high = _pairs(codes, axis)
    return low | high << 4


def unpack(packed: Any, *, format: Format, axis: int = -1) -> Any:
    """Inverse of `pack`."""
    if _element(format).per_byte == 1:
        return packed
    xp, axis = _namespace(packed), axis % packed.ndim
    codes = xp.stack([packed & 15, packed >> 4], axis=axis + 1)
    return codes.reshape(*packed.shape[:axis], -1, *packed.shape[axis + 1 :])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedMX:
    """A weight kept as codes and scales, in place of an array [..., D, F] whose groups lie along D.

    Leading axes may be sliced, scanned and mapped over: both leaves have them.
    """

    codes: Any  # uint8 [..., D/2, F], or [..., D, F] for "mxfp8"
    scales: Any  # uint8 [..., D/32, F]
    format: Format = dataclasses.field(default="mxfp4", metadata={"static": True})

    @classmethod
    def of(cls, w: Any, *, scale_rule: ScaleRule, format: Format = "mxfp4") -> PackedMX:
        """`w` [..., D, F] quantised along D."""
        return cls(*quantize(w, format=format, scale_rule=scale_rule, axis=-2), format)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the array that this stands for."""
        *lead, rows, columns = self.scales.shape
        return (*lead, rows * GROUP, columns)

    @property
    def ndim(self) -> int:
        return self.scales.ndim

    def dequantize(self, dtype: Any) -> Any:
        """[..., D, F] of `dtype`."""
        return dequantize(self.codes, self.scales, dtype, format=self.format, axis=-2)


def unpacked(w: jax.Array | PackedMX, dtype: Any) -> jax.Array:
    """The array that a `PackedMX` stands for, in `dtype`; an array as it is."""
    return w.dequantize(dtype) if isinstance(w, PackedMX) else w


def _element(format: Format) -> _Element:
    if format not in _ELEMENTS:
        raise ValueError(f"format must be one of {', '.join(map(repr, _ELEMENTS))}, got {format!r}")
    return _ELEMENTS[format]


def _elements(packed: Any, dtype: Any, format: Format, axis: int) -> Any:
    """What the codes stand for without their scales: looked up by NumPy, computed on devices."""
    if isinstance(packed, jax.Array):
        return _computed(unpack(packed, format=format, axis=axis), dtype, _ELEMENTS[format])
    per_byte = _ELEMENTS[format].per_byte
    table = _computed(unpack(np.arange(256, dtype=np.uint8)[:, None], format=format), dtype, _ELEMENTS[format])
    values = np.moveaxis(table[packed], -1, axis + 1)
    return values.reshape(*packed.shape[:axis], packed.shape[axis] * per_byte, *packed.shape[axis + 1 :])


def _computed(codes: Any, dtype: Any, element: _Element) -> Any:
    xp, bits = _namespace(codes), element.mantissa_bits
    codes = codes.astype(np.int32)
    exponent = (codes & (element.sign - 1)) >> bits
    integer = (codes & ((1 << bits) - 1)) + xp.where(exponent > 0, 1 << bits, 0)
    magnitude = integer.astype(dtype) * _two_to_the(xp.maximum(exponent, 1) - 1 + element.min_exponent - bits, dtype)
    return xp.where(codes & element.sign != 0, -magnitude, magnitude)


def _namespace(x: Any) -> ModuleType:
    return jnp if isinstance(x, jax.Array) else np


def _grouped(x: Any, axis: int) -> tuple[Any, int]:
    """[..., n, ...] → [..., n/32, 32, ...] and the axis of the groups."""
    axis = axis % x.ndim
    if x.shape[axis] % GROUP:
        raise ValueError(f"axis {axis} of {list(x.shape)} must be a multiple of {GROUP}, the size of an MX group")
    return x.reshape(*x.shape[:axis], -1, GROUP, *x.shape[axis + 1 :]), axis


def _pairs(codes: Any, axis: int) -> tuple[Any, Any]:
    """Even and odd elements along an axis."""
    xp, axis = _namespace(codes), axis % codes.ndim
    pairs = codes.reshape(*codes.shape[:axis], -1, 2, *codes.shape[axis + 1 :])
    return tuple(xp.squeeze(half, axis + 1) for half in xp.split(pairs, 2, axis=axis + 1))  # type: ignore[return-value]


def _bits(x: Any) -> tuple[Any, int, int]:
    """|x| of float32 or float64 as integers, which are ordered as it is; mantissa bits and the exponent's bias."""
    info = np.finfo(x.dtype)
    integer = np.dtype(f"int{info.bits}")
    x = abs(x)
    bits = jax.lax.bitcast_convert_type(x, integer) if isinstance(x, jax.Array) else x.view(integer)
    return bits, info.nmant, 1 - info.minexp


def _two_to_the(power: Any, dtype: Any) -> Any:
    """2^power as a number of `dtype`, for powers of its normal numbers."""
    info = np.finfo(dtype)
    bits = (power.astype(f"int{info.bits}") + (1 - info.minexp)) << info.nmant
    return jax.lax.bitcast_convert_type(bits, dtype) if isinstance(bits, jax.Array) else bits.view(dtype)


def _times_power_of_two(x: Any, power: Any) -> Any:
    """x · 2^power, rounded once: the power may be one of subnormal numbers."""
    half = power >> 1
    return x * _two_to_the(half, x.dtype) * _two_to_the(power - half, x.dtype)


def _scale_exponent(groups: Any, axis: int, element: _Element, rule: ScaleRule) -> tuple[Any, Any]:
    """Whether a group is finite, and its scale's exponent (int32): [..., n/32, 32, ...] → [..., n/32, 1, ...].

    The exponents of |x| are read as integers after adding what lifts an m that a rule takes up over the next power.
    """
    xp = _namespace(groups)
    largest = xp.max(xp.abs(groups), axis=axis + 1, keepdims=True)
    bits, mantissa_bits, bias = _bits(largest.astype(wide_dtype(largest.dtype)))
    one = 1 << mantissa_bits
    fraction = element.largest / 2**element.max_exponent - 1
    lift = {
        "floor": 0,
        "ceil": one - int(fraction * one) - 1,
        "even": one >> (element.mantissa_bits + 1),
        "outlier": one - math.ceil((element.outlier - 1) * one),
    }
    if rule not in lift:
        raise ValueError(f"scale_rule must be one of {', '.join(map(repr, lift))}, got {rule!r}")
    exponent = ((bits + lift[rule]) >> mantissa_bits) - bias - element.max_exponent
    highest = _BIAS - element.max_exponent
    return xp.isfinite(largest), xp.clip(exponent, 1 - _BIAS, highest).astype(np.int32)


def _round(groups: Any, exponent: Any, element: _Element) -> tuple[Any, Any]:
    """Codes and the values behind them, for scales 2^exponent."""
    xp = _namespace(groups)
    x = groups.astype(wide_dtype(groups.dtype))
    magnitude = xp.fmin(_times_power_of_two(xp.abs(x), -exponent), element.largest)  # NaN too, without a warning
    bits, mantissa_bits, bias = _bits(magnitude)
    power = xp.maximum((bits >> mantissa_bits) - bias, element.min_exponent)
    integer = xp.rint(_times_power_of_two(magnitude, element.mantissa_bits - power))  # half to even
    # the mantissa's leading bit counts as one in the exponent; so does its carry when it rounds up to a power of two
    codes = ((power - element.min_exponent) << element.mantissa_bits) + integer.astype(power.dtype)
    codes = codes + xp.where(xp.signbit(x), element.sign, 0).astype(codes.dtype)
    values = _times_power_of_two(integer, power - element.mantissa_bits + exponent.astype(power.dtype))
    return codes, xp.copysign(values, x)
