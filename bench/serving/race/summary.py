"""What the cells add up to: throughput against others at equal callers and equal p99, and against the bare engine."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from bench.serving.race.turns import CALLERS, OPEN, p99_of, rate_of
from bench.train.intervals import ratio_of
from stoker.records.codec import JSON

OURS = "stoker"
TODAY = "fastapi-eager"

Points = Mapping[int, tuple[float, float]]
"""Throughput [answers/s] and p99 [s] by the number of callers."""


def throughput_at(points: Points, p99_s: float) -> float:
    """The highest throughput within a p99: between two of our points by the logarithm of the p99, else the best below.

    0 where even the least loaded point is slower.

    >>> round(throughput_at({1: (100.0, 0.01), 4: (300.0, 0.04)}, 0.02))
    200
    """
    inside = sorted((p99, rate) for rate, p99 in points.values() if p99 <= p99_s)
    if not inside:
        return 0.0
    best = max(rate for _, rate in inside)
    beyond = sorted((p99, rate) for rate, p99 in points.values() if p99 > p99_s and math.isfinite(p99) and rate > best)
    if not beyond:
        return best
    (p99_low, low), (p99_high, high) = max(inside, key=lambda point: point[1]), beyond[0]
    share = math.log(p99_s / p99_low) / math.log(p99_high / p99_low)
    return low + share * (high - low)


Loops = Mapping[str, Sequence[Mapping[str, float]]]
"""Of `workload/contender` and each round: samples/s of the engine alone, by layout and batch."""


def summary(cells: Mapping[str, JSON], bare: Loops, rounds: int) -> dict[str, JSON]:
    """Of each workload: points of every contender, ratios of ours to each and to the best of them, open-loop rates."""
    return {workload: _of_workload(workload, cells, bare, rounds) for workload in _names(cells, 0)}


def lines(found: Mapping[str, JSON]) -> list[str]:
    """The summary as a table of text: each contender's throughput and p99, then how ours compares."""
    told: list[str] = []
    for workload, one in found.items():
        told += [
            f"{workload}: the engine of {name} alone gives {statistics.median(rates):.0f} samples/s"
            for name, rates in one["engine alone, samples/s"].items()
            if rates
        ]
        for name, rounds in one["points"].items():
            points = [
                f"{c}: {_middle(rounds, str(c), 'per_s'):6.0f}/s {1e3 * _middle(rounds, str(c), 'p99_s'):6.1f} ms"
                for c in CALLERS
            ]
            held = [rate for rate in one["open"].get(name, []) if rate is not None]
            told.append(f"  {name:18} {'   '.join(points)}   open {max(held, default=0.0):6.0f}/s")
        for key, ratios in one.items():
            if key.endswith("best peer at equal p99"):
                told.append(
                    f"  {key}: " + ", ".join(f"{c}: {value:.2f}" for c, value in ratios.items() if value is not None)
                )
            if key.endswith("/ engine alone") and ratios:
                told.append(f"  {key}: {ratios['median']:.2f} ({ratios['low']:.2f} to {ratios['high']:.2f})")
    return told


def _middle(rounds: Sequence[JSON], callers: str, what: str) -> float:
    """The median over the rounds that have it; NaN if none has."""
    values = [points[callers][what] for points in rounds if callers in points]
    return statistics.median(values) if values else math.nan


def _of_workload(workload: str, cells: Mapping[str, JSON], bare: Loops, rounds: int) -> dict[str, JSON]:
    names = _names(cells, 1)
    by_round = {name: [_points(cells, workload, name, number) for number in range(rounds)] for name in names}
    ours = {name: points for name, points in by_round.items() if name.startswith(OURS)}
    others = [name for name in names if not name.startswith(OURS)]
    peers = [name for name in others if name != TODAY]
    alone = {name: [max(loop.values()) for loop in bare.get(f"{workload}/{name}", ())][:rounds] for name in ours}
    found: dict[str, JSON] = {
        "points": {name: _told(points) for name, points in by_round.items() if any(points)},
        "open": {name: [_open(cells, workload, name, number) for number in range(rounds)] for name in names},
        "engine alone, samples/s": alone,
    }
    for name, mine in ours.items():
        found[f"{name} / others"] = {
            other: {
                "at equal callers": {c: _ratio(mine, by_round[other], c) for c in CALLERS},
                "at equal p99": {c: _at_equal_p99(mine, by_round[other], c) for c in CALLERS},
            }
            for other in others
        }
        found[f"{name} / best peer at equal p99"] = {
            c: min(
                (ratio["median"] for peer in peers if (ratio := _at_equal_p99(mine, by_round[peer], c))), default=None
            )
            for c in CALLERS
        }
        top = [max((rate for rate, _ in points.values()), default=None) for points in mine[: len(alone[name])]]
        ratio = ratio_of([[rate] for rate in top], [[rate] for rate in alone[name]])
        found[f"{name} / engine alone"] = None if ratio is None else asdict(ratio)
    return found


def _points(cells: Mapping[str, JSON], workload: str, name: str, number: int) -> dict[int, tuple[float, float]]:
    start = f"{workload}/{name}/round {number}/"
    found = {
        int(key.rpartition("/")[2]): cell
        for key, cell in cells.items()
        if key.startswith(start) and not key.endswith(OPEN)
    }
    return {callers: (rate_of(cell), p99_of(cell)) for callers, cell in found.items() if rate_of(cell) > 0}


def _open(cells: Mapping[str, JSON], workload: str, name: str, number: int) -> float | None:
    """The highest rate held in the open loop [requests/s]."""
    start = f"{workload}/{name}/round {number}/"
    held = [cell.get("rate") for key, cell in cells.items() if key.startswith(start) and key.endswith(OPEN)]
    return held[0] if held else None


def _ratio(mine: Sequence[Points], theirs: Sequence[Points], callers: int) -> JSON:
    """Ours over theirs with as many callers."""
    found = ratio_of(
        [[points.get(callers, (None,))[0]] for points in mine], [[points.get(callers, (None,))[0]] for points in theirs]
    )
    return None if found is None else asdict(found)


def _at_equal_p99(mine: Sequence[Points], theirs: Sequence[Points], callers: int) -> JSON:
    """Our throughput within the p99 that they had with so many callers, over theirs; 0 where we are never so fast."""
    ours_at, theirs_at = [], []
    for my_points, their_points in zip(mine, theirs, strict=True):
        rate, p99_s = their_points.get(callers, (None, math.inf))
        ours_at.append([throughput_at(my_points, p99_s) if my_points and rate else None])
        theirs_at.append([rate])
    found = ratio_of(ours_at, theirs_at)
    return None if found is None else asdict(found)


def _told(rounds: Sequence[Points]) -> JSON:
    return [{str(c): {"per_s": rate, "p99_s": p99} for c, (rate, p99) in points.items()} for points in rounds]


def _names(cells: Mapping[str, JSON], place: int) -> list[str]:
    return list(dict.fromkeys(key.split("/")[place] for key in cells))
