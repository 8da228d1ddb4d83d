"""Which plan of a run made which updates, and what each gave: a row for each plan, with a strip of the samples."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from stoker.records import Event, Plan, Report, from_json
from stoker.reporting.history import (
    PlanStretch,
    live_history,
    number,
    of_kind,
    plans_in_force,
    samples_done,
    settled_switch,
)
from stoker.reporting.summary import training_speed
from stoker.reporting.wording import plan_in_difference

WIDTH = 300.0
"""Width of a strip [pixels]."""

_TRIALS_WIDTH = 0.6
"""Least share of a strip for the samples in which plans were tried, which are few of the run's [0 to 1]."""

_NARROWEST = 2.5
"""Width of the shortest stretch [pixels]."""


@dataclass(frozen=True)
class PlanRow:
    """A plan: by what it settles differently from the one that most was trained under, and in full.

    `blocks` are where it was in force, as (left, width) in its strip [pixels]; `update_s` is the time of one of its
    updates [s], None where it was not measured; `ratio` is that over the kept plan's [1]; `share` is that of the
    samples [0 to 1]. `is_kept`: it is the plan that the run settled on, or else the last one.
    """

    words: str
    in_full: str
    blocks: tuple[tuple[float, float], ...]
    update_s: float | None
    ratio: float | None
    share: float
    remark: str
    is_kept: bool


@dataclass(frozen=True)
class PlanStrip:
    """The rows, the kept plan first; `mark` is where trials end in each strip [pixels], after `tried` samples."""

    rows: tuple[PlanRow, ...]
    mark: float | None
    tried: float
    total: float


def plan_strip(report: Report) -> PlanStrip | None:
    """The plans of a run; None for a run that was made under one from beginning to end."""
    stretches = plans_in_force(report)
    if len({stretch.plan.in_words() for stretch in stretches}) < 2:
        return None
    total = max(float(samples_done(report)), stretches[-1].start, 1.0)
    ends = [*(stretch.start for stretch in stretches[1:]), total]
    tried = max((end for stretch, end in zip(stretches, ends, strict=True) if stretch.is_trial), default=0.0)
    split = WIDTH if tried >= total else WIDTH * max(_TRIALS_WIDTH, tried / total) if tried else 0.0

    def x(position: float) -> float:
        if position <= tried:
            return split * position / tried if tried else 0.0
        return split + (WIDTH - split) * (position - tried) / (total - tried)

    times, mostly = _update_times(report, stretches), max(stretches, key=lambda stretch: stretch.share).plan
    settled = settled_switch(report)
    kept = stretches[-1].plan.in_words() if settled is None else settled.plan.in_words()
    remarks, reference = dict(_remarks(report, stretches)), times.get(kept)
    rows = []
    for words, plan in {stretch.plan.in_words(): stretch.plan for stretch in stretches}.items():
        mine = [(s, end) for s, end in zip(stretches, ends, strict=True) if s.plan.in_words() == words]
        update_s = times.get(words)
        rows.append(
            PlanRow(
                words="the plan above" if words == mostly.in_words() else plan_in_difference(plan, mostly),
                in_full=words,
                blocks=tuple((x(s.start), max(_NARROWEST, x(end) - x(s.start))) for s, end in mine),
                update_s=update_s,
                ratio=update_s / reference if update_s and reference else None,
                share=sum(s.share for s, _ in mine),
                remark=remarks.get(words, ""),
                is_kept=words == kept,
            )
        )
    rows.sort(key=lambda row: (not row.is_kept, row.update_s or float("inf")))
    return PlanStrip(tuple(rows), split if 0 < tried < total else None, tried, total)


def _update_times(report: Report, stretches: tuple[PlanStretch, ...]) -> dict[str, float]:
    """Time of an update of each plan [s]: as its turns were timed, else by the progress made under it alone."""
    events = live_history(report.events)
    started, before = of_kind(events, "started"), 0.0
    inside: dict[str, list[Event]] = {}
    for event in of_kind(events, "progress"):
        position = number(event, "samples") or 0.0
        under = [stretch for stretch in stretches if stretch.start <= before][-1:]
        if under and not any(before < stretch.start < position for stretch in stretches):
            inside.setdefault(under[0].plan.in_words(), []).append(event)
        before = position
    times = {words: training_speed([*started, *medians])[0] for words, medians in inside.items()}
    for settled in of_kind(events, "settled"):
        for timed in settled.fields.get("timed") or ():
            times[from_json(timed["plan"], Plan).in_words()] = float(timed["update_s"])
    return {words: update_s for words, update_s in times.items() if update_s}


def _remarks(report: Report, stretches: tuple[PlanStretch, ...]) -> Iterator[tuple[str, str]]:
    """(plan, why it stands here), the most important last: begun under, changed to, left out, settled on."""
    yield stretches[0].plan.in_words(), "begun under"
    switches = report.schedule.switches if report.schedule is not None else ()
    for switch in sorted(switches, key=lambda stretch: ("trial", "changed", "left out", "settled").index(stretch.kind)):
        words = (switch.left_out or switch.plan).in_words()
        if switch.left_out is not None:
            yield words, f"left out: {switch.why.removeprefix(f'{words} is left out: ')}"
        elif switch.kind != "trial":
            yield words, f"settled: {switch.why}" if switch.kind == "settled" else switch.why
