"""A small picture of one forecast: its interval as a bar, its value as a tick, the measured value as a dot."""

from __future__ import annotations

from stoker.records import Estimate
from stoker.reporting.markup import Markup, escaped
from stoker.reporting.wording import format_interval, format_quantity

WIDTH, HEIGHT, MARGIN = 150, 22, 8


def interval_strip(forecast: Estimate, measured: float | None) -> Markup:
    """Inline SVG; the scale spans the interval and the measured value, a dot outside the bar is hollow."""
    ends = [forecast.low, forecast.high, *([] if measured is None else [measured])]
    low, high = min(ends), max(ends)
    pad = (high - low) * 0.12 or max(abs(high), 1e-12)
    low, high = low - pad, high + pad

    def x(value: float) -> float:
        return MARGIN + (value - low) / (high - low) * (WIDTH - 2 * MARGIN)

    left, right, middle = x(forecast.low), x(forecast.high), HEIGHT / 2
    width, tick = max(2.0, right - left), x(forecast.value)
    shapes = [
        f'<line class="track" x1="{MARGIN}" x2="{WIDTH - MARGIN}" y1="{middle}" y2="{middle}"/>',
        f'<rect class="interval" x="{left:.1f}" width="{width:.1f}" y="{middle - 5}" height="10" rx="3"/>',
        f'<line class="tick" x1="{tick:.1f}" x2="{tick:.1f}" y1="{middle - 7}" y2="{middle + 7}"/>',
    ]
    words = f"forecast {format_quantity(forecast.value, forecast.unit)} ({format_interval(forecast)})"
    if measured is not None:
        place = "in" if forecast.low <= measured <= forecast.high else "out"
        shapes.append(f'<circle class="dot {place}" cx="{x(measured):.1f}" cy="{middle}" r="4.5"/>')
        words += f", measured {format_quantity(measured, forecast.unit)}"
    head = f'<svg class="strip" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" role="img"'
    return Markup(f'{head} aria-label="{escaped(words)}">{"".join(shapes)}</svg>')
