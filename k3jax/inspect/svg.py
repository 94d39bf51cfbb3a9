"""Line charts and heat maps as inline SVG, without a library.

Colours are CSS variables of the page (`k3jax.inspect.report`), so that one drawing serves light and dark.
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np
from PIL import Image

COLOURS = 8
"""Series that have a colour of their own, `--series-1` …"""
_POINTS = 240  # that a line is drawn with, pairs of lowest and highest
_HOVER = 60  # points that tell their value under the pointer
_CELLS = 6000  # of a heat map that are drawn one by one


@dataclass(frozen=True)
class Series:
    """One line: finite or not, x ascending."""

    label: str
    x: np.ndarray
    y: np.ndarray


def number(value: float) -> str:
    """`31300` → `31.3k`, `0.00042` → `4.2e-4`."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else str(value)
    for limit, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / min(limit, 1e3 if unit == 'k' else limit):.4g}{unit}"
    if abs(value) < 1e-3:
        mantissa, exponent = f"{value:.3g}".split("e") if "e" in f"{value:.3g}" else f"{value:.2e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{value:.4g}"


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Round numbers in [low, high], about `count` of them."""
    step = (high - low) / count
    power = 10.0 ** math.floor(math.log10(step))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= step * 0.999)
    return [i * step for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    decades = range(math.floor(low), math.ceil(high) + 1)
    fine = [d + math.log10(m) for d in decades for m in ((1, 2, 5) if high - low < 2 else (1,))]
    found = [t for t in fine if low - 1e-9 <= t <= high + 1e-9]
    return found[:: max(1, math.ceil(len(found) / 5))]


def _thinned(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The lowest and highest point of each of `_POINTS` / 2 stretches: spikes stay."""
    if len(x) <= _POINTS:
        return x, y
    kept: list[int] = []
    for part in np.array_split(np.arange(len(x)), _POINTS // 2):
        values = y[part]
        finite = part[np.isfinite(values)]
        kept += [part[0]] if not len(finite) else [finite[np.argmin(y[finite])], finite[np.argmax(y[finite])]]
    index = np.unique(kept)
    return x[index], y[index]


def line_chart(series: Sequence[Series], x_label: str, y_label: str, *, size: tuple[int, int] = (440, 230)) -> str:
    """Lines over a common x axis.

    A logarithmic y axis where all values are positive and span a factor of 30; the label then says so. What is not
    finite leaves a gap.

    Raises:
        ValueError: no finite value at all.
    """
    finite = [s.y[np.isfinite(s.y)] for s in series]
    values = np.concatenate(finite) if finite else np.zeros(0)
    if not len(values):
        raise ValueError("nothing finite to draw")
    width, height, left, right, top, bottom = *size, 66, 14, 10, 40
    logarithmic = values.min() > 0 and values.max() > 30 * values.min()
    low, high = (float(f(np.log10(values) if logarithmic else values)) for f in (np.min, np.max))
    margin = 0.05 * (high - low) or abs(high) * 0.1 or 1.0
    low, high = low - margin * (low != 0 or logarithmic), high + margin
    x_low, x_high = (float(f(f(s.x) for s in series)) for f in (min, max))
    x_high = x_high if x_high > x_low else x_low + 1

    def px(x: float) -> float:
        return round(left + (x - x_low) / (x_high - x_low) * (width - left - right), 1)

    def py(y: float) -> float:
        return round(height - bottom - (y - low) / (high - low) * (height - top - bottom), 1)

    out = [f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(y_label)} over {escape(x_label)}">']
    for t in _log_ticks(low, high) if logarithmic else ticks(low, high):
        text = number(10**t if logarithmic else t)
        out.append(f'<path class="grid" d="M{left} {py(t)}H{width - right}"/>')
        out.append(f'<text class="tick" x="{left - 6}" y="{py(t) + 3.5}" text-anchor="end">{text}</text>')
    for t in ticks(x_low, x_high):
        out.append(f'<path class="axis" d="M{px(t)} {height - bottom}v4"/>')
        out.append(f'<text class="tick" x="{px(t)}" y="{height - bottom + 16}" text-anchor="middle">{number(t)}</text>')
    out.append(f'<path class="axis" d="M{left} {height - bottom}H{width - right}"/>')
    out.append(
        f'<text class="label" x="{(left + width - right) / 2}" y="{height - 5}" text-anchor="middle">'
        f"{escape(x_label)}</text>"
    )
    turned = f'transform="translate(12 {(top + height - bottom) / 2}) rotate(-90)" text-anchor="middle"'
    out.append(f'<text class="label" {turned}>{escape(y_label)}{", log" if logarithmic else ""}</text>')
    for i, one in enumerate(series):
        x, y = _thinned(one.x, one.y)
        points = [(px(a), py(math.log10(b) if logarithmic else b)) if math.isfinite(b) else None for a, b in zip(x, y)]
        out.append(_line(points, i % COLOURS + 1))
        for j in range(0, len(x), math.ceil(len(x) / _HOVER)):
            if (point := points[j]) is not None:
                at = f'cx="{point[0]}" cy="{point[1]}"'
                told = f"{one.label}: {number(float(y[j]))} at {x_label} {number(float(x[j]))}"
                out.append(f'<circle class="dot s{i % COLOURS + 1}" {at} r="3"/>' if len(x) == 1 else "")
                out.append(f'<circle class="hit" {at} r="6">{_title(told)}</circle>')
    return "".join(out) + "</svg>"


def _line(points: list[tuple[float, float] | None], colour: int) -> str:
    path, pen = "", "M"
    for point in points:
        path += "" if point is None else f"{pen}{point[0]} {point[1]}"
        pen = "M" if point is None else "L"
    return f'<path class="line s{colour}" d="{path}"/>'


def _title(text: str) -> str:
    return f"<title>{escape(text)}</title>"


def legend(labels: Sequence[str]) -> str:
    """Names of the lines with their colours; nothing for one line."""
    if len(labels) < 2:
        return ""
    keys = "".join(f'<span><i class="key s{i % COLOURS + 1}"></i>{escape(n)}</span>' for i, n in enumerate(labels))
    return f'<div class="legend">{keys}</div>'


def heat_map(
    values: np.ndarray,
    rows: Sequence[str],
    columns: Sequence[str],
    *,
    x_label: str,
    y_label: str,
    unit: str,
    limits: tuple[float, float] | None = None,
    log: bool = False,
) -> str:
    """A matrix [rows, columns] in shades of one colour, with its scale beneath; NaN stays blank, infinite is darkest.

    Args:
        unit: of the values, for the scale.
        limits: values of the lightest and the darkest shade; None: the extremes.
        log: shades by the logarithm.

    Raises:
        ValueError: no finite value, or with `log` one that is not positive.
    """
    values = np.asarray(values, np.float64)
    finite = values[np.isfinite(values)]
    if not len(finite) or (log and finite.min() <= 0):
        raise ValueError("nothing to draw: no finite value, or a logarithm of what is not positive")
    low, high = limits or (float(finite.min()), float(finite.max()))
    scale = (lambda v: np.log(v)) if log else (lambda v: v)
    span = scale(high) - scale(low) or 1.0
    with np.errstate(divide="ignore"):
        shade = np.clip((scale(values) - scale(low)) / span, 0, 1) * 0.95 + 0.05
    R, C = values.shape
    left = 14 + max(26, 6.2 * max(len(name) for name in rows))
    widest = 5.8 * max(len(name) for name in columns) + 8
    cell_w, cell_h = min(max(46.0, widest), max(640 / C, 1.0)), min(20.0, max(520 / R, 3.0))
    right, bottom = left + C * cell_w, R * cell_h + 4
    width, height = max(right + 12, left + 260), bottom + 84
    out = [f'<svg viewBox="0 0 {width:.0f} {height:.0f}" style="max-width:{width:.0f}px" role="img">']
    if R * C > _CELLS:
        out.append(_picture(shade, left, 4, C * cell_w, R * cell_h))
    else:
        gap = 1 if cell_w > 5 and cell_h > 5 else 0
        for r in range(R):
            for c in range(C):
                if not np.isnan(values[r, c]):
                    told = _title(f"{rows[r]}, {x_label} {columns[c]}: {number(values[r, c])} {unit}")
                    out.append(
                        f'<rect class="cell" x="{left + c * cell_w:.1f}" y="{4 + r * cell_h:.1f}" '
                        f'width="{cell_w - gap:.1f}" height="{cell_h - gap:.1f}" '
                        f'fill-opacity="{shade[r, c]:.2f}">{told}</rect>'
                    )
    every = math.ceil(R * 11 / (R * cell_h))
    for r in range(0, R, every):
        y = 4 + (r + 0.5) * cell_h + 3.5
        out.append(f'<text class="tick" x="{left - 5:.1f}" y="{y:.1f}" text-anchor="end">{escape(rows[r])}</text>')
    every = math.ceil(widest / (cell_w + 1))
    for c in range(0, C, every):
        x = left + (c + 0.5) * cell_w
        out.append(
            f'<text class="tick" x="{x:.1f}" y="{bottom + 13:.1f}" text-anchor="middle">{escape(columns[c])}</text>'
        )
    out.append(f'<text class="label" x="{left:.1f}" y="{bottom + 31:.1f}">{escape(x_label)}</text>')
    out.append(
        f'<text class="label" transform="translate(10 {bottom / 2:.1f}) rotate(-90)" text-anchor="middle">'
        f"{escape(y_label)}</text>"
    )
    return "".join(out) + _scale(left, bottom + 44, low, high, unit, log) + "</svg>"


def _scale(x: float, y: float, low: float, high: float, unit: str, log: bool) -> str:
    """The shades, and which values the lightest and darkest have."""
    steps = "".join(
        f'<rect class="cell" x="{x + 12 * i:.1f}" y="{y:.1f}" width="12" height="10" fill-opacity="{shade:.2f}"/>'
        for i, shade in enumerate(np.linspace(0.05, 1, 14))
    )
    text = f"{unit}{' (log)' if log else ''}"
    return (
        f'{steps}<text class="tick" x="{x:.1f}" y="{y + 24:.1f}">{number(low)}</text>'
        f'<text class="tick" x="{x + 168:.1f}" y="{y + 24:.1f}" text-anchor="end">{number(high)}</text>'
        f'<text class="label" x="{x + 176:.1f}" y="{y + 9:.1f}">{escape(text)}</text>'
    )


def _picture(shade: np.ndarray, x: float, y: float, width: float, height: float) -> str:
    """Cells as a picture whose opacity is their shade."""
    alpha = np.round(255 * np.nan_to_num(shade)).astype(np.uint8)
    pixels = np.dstack([np.full_like(alpha, v) for v in (57, 135, 229)] + [alpha])
    buffer = io.BytesIO()
    Image.fromarray(pixels, "RGBA").save(buffer, "PNG", optimize=True)
    data = base64.b64encode(buffer.getvalue()).decode()
    return (
        f'<image x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" preserveAspectRatio="none" '
        f'style="image-rendering:pixelated" href="data:image/png;base64,{data}"/>'
    )
