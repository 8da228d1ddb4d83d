"""A picture of updates as several processes had them: one lane each, coloured by what the process did."""

from __future__ import annotations

import math
from collections.abc import Sequence

from stoker.reporting.markup import Markup, escaped, joined
from stoker.reporting.merged_ranks import Lane, MergedUpdate
from stoker.units import format_seconds

LANE_COLOURS = {
    "compute": "ember",
    "waiting": "grey",
    "exposed": "violet",
    "optimiser": "teal",
    "data": "blue",
    "other": "muted",
}
"""The colour of each part of an update."""

_MOST_LANES = 8
_WIDTH, _LABEL, _LANE, _GAP, _TOP, _AXIS = 940, 70, 20, 6, 24, 26


def lanes_picture(title: str, updates: Sequence[MergedUpdate]) -> Markup:
    """Inline SVG of updates that follow each other, on one axis of time; of many processes a few."""
    ranks = _chosen([lane.rank for lane in updates[0].lanes], {one.slowest for one in updates})
    start = min(lane.start_s for one in updates for lane in one.lanes)
    span = max(lane.start_s + lane.took_s for one in updates for lane in one.lanes) - start or 1e-9
    scale = (_WIDTH - _LABEL - 10) / span
    shapes = [_text(0, 13, title, "ink", weight=600)]
    for row, rank in enumerate(ranks):
        y = _TOP + row * (_LANE + _GAP)
        shapes.append(_text(0, y + _LANE - 5, f"rank {rank}", "muted"))
        shapes += [_drawn(lane, y, start, scale) for one in updates for lane in one.lanes if lane.rank == rank]
    bottom = _TOP + len(ranks) * (_LANE + _GAP)
    shapes += [_tick(at, bottom, scale) for at in _ticks(span)]
    height = bottom + _AXIS
    words = f"{title}: {'; '.join(_in_words(one) for one in updates)}"
    head = f'<svg viewBox="0 0 {_WIDTH} {height}" style="display:block;width:100%;min-width:600px" role="img"'
    return Markup(f'{head} aria-label="{escaped(words)}">{joined(shapes)}</svg>')


def _chosen(ranks: Sequence[int], needed: set[int]) -> list[int]:
    """All ranks, or the needed ones and others at equal distances."""
    if len(ranks) <= _MOST_LANES:
        return list(ranks)
    kept = sorted(needed)[: _MOST_LANES - 1]
    others = [rank for rank in ranks if rank not in kept]
    room = _MOST_LANES - len(kept)
    return sorted({*kept, *(others[place * len(others) // room] for place in range(room))})


def _drawn(lane: Lane, y: float, start_s: float, scale: float) -> Markup:
    """The parts of one process in one update, one after the other."""
    at, shapes = lane.start_s - start_s, []
    for part, seconds in lane.parts:
        if seconds * scale >= 0.2:
            shapes.append(
                Markup(
                    f'<rect x="{_LABEL + at * scale:.1f}" y="{y}" width="{max(0.6, seconds * scale - 0.5):.1f}" '
                    f'height="{_LANE}" style="fill:var(--{LANE_COLOURS[part]})"><title>{escaped(part)} '
                    f"{escaped(format_seconds(seconds))}</title></rect>"
                )
            )
        at += seconds
    return joined(shapes)


def _ticks(span_s: float) -> list[float]:
    """Between three and eight round times from 0 up to `span_s` [s]."""
    step = 10.0 ** math.floor(math.log10(span_s))
    while span_s / step < 3:
        step /= 2 if span_s / step >= 1.5 else 5
    return [number * step for number in range(int(span_s / step) + 1)]


def _tick(at_s: float, y: float, scale: float) -> Markup:
    x = _LABEL + at_s * scale
    line = f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y}" y2="{y + 5}" style="stroke:var(--muted)"/>'
    words = format_seconds(at_s) if at_s else "0"
    anchor = "start" if at_s == 0 else "end" if x > _WIDTH - 30 else "middle"
    return joined([Markup(line), _text(x, y + 19, words, "muted", anchor=anchor)])


def _text(x: float, y: float, words: str, colour: str, *, weight: int = 400, anchor: str = "start") -> Markup:
    style = f"fill:var(--{colour});font-size:13px;font-weight:{weight}"
    return Markup(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" style="{style}">{escaped(words)}</text>')


def _in_words(one: MergedUpdate) -> str:
    held = f"the others wait {format_seconds(one.waiting_s)} for rank {one.slowest}"
    return f"update {one.update + 1} takes {format_seconds(one.took_s)}, {held}"
