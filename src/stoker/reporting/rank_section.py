"""All processes of a run in one view: who waits for whom, what communication costs, how far adding them has paid."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from stoker.records import Candidate, Report
from stoker.reporting.bar import Segment, stacked_bar
from stoker.reporting.lanes import LANE_COLOURS, lanes_picture
from stoker.reporting.markup import Markup, element, escaped, section, table
from stoker.reporting.merged_ranks import MergedRanks, MergedUpdate, RankTotals, merged, stretches
from stoker.reporting.summary import forecast_rows
from stoker.units import format_rate, format_seconds

LABELS = {
    "compute": "forward and backward",
    "waiting": "waiting for the slowest",
    "exposed": "communication not hidden",
    "optimiser": "optimiser",
    "data": "waiting for data",
    "other": "other",
}
"""The parts of training and what people call them, in the order they are shown."""

_HEADS = ("compute", "waiting", "communication", "optimiser", "data", "other")
_MOST_ROWS = 32
_IN_A_ROW = 3


def shown_stretch(report: Report) -> MergedRanks | None:
    """The longest stretch of the run that several processes trained together; None if there is none."""
    found = [one for one in map(merged, stretches(report.ranks)) if one is not None]
    return max(found, key=lambda one: one.ranks[0].times.updates, default=None)


def rank_lines(report: Report) -> list[str]:
    """As plain text: the verdict, and how far adding processes has paid; nothing for a run of one process."""
    found = shown_stretch(report)
    return [] if found is None else [found.sentence(), efficiency(found, report)]


def efficiency(found: MergedRanks, report: Report) -> str:
    """How much of their time processes do work of their own, and how many times one process's rate they reach."""
    words = f"Processes do work of their own {100 * found.busy:.0f} % of the training time."
    rate, alone = _measured(report), _alone(report)
    if rate is None or alone is None or report.decision is None or not alone.forecast.samples_per_s.value:
        return words
    one, threads = alone.forecast.samples_per_s, alone.plan.threads
    times = rate / one.value
    words += f" The {found.size} of them train {format_rate(rate)}, {times:.2f} times what is forecast for"
    known = f"({format_rate(one.value)}, {one.basis})"
    if alone.plan.device == "cpu" and threads != report.decision.chosen.plan.threads:
        return f"{words} one with {threads} threads {known}."
    return f"{words} one {known}: a scaling efficiency of {100 * times / found.size:.0f} %."


def ranks_together(report: Report) -> Markup:
    """The section; nothing for a run of one process."""
    found = shown_stretch(report)
    if found is None:
        return Markup("")
    content = [
        element("p", element("strong", escaped(found.sentence())), css="level"),
        element("p", escaped(efficiency(found, report)), style="margin-bottom:14px"),
        _mean_split(found),
        *(element("div", picture, css="scroll", style="margin-top:18px") for picture in _pictures(found)),
        element("div", _totals(found), style="margin-top:18px;white-space:nowrap"),
        *(element("p", escaped(note), css="note") for note in _notes(found, report)),
    ]
    return section("Ranks", *content)


def _measured(report: Report) -> float | None:
    """Samples/s of all processes together, while training."""
    return next((row.measured for row in forecast_rows(report) if row.quantity == "throughput"), None)


def _alone(report: Report) -> Candidate | None:
    """The fastest plan for one process on the kind of device that was trained on; None if none was looked at."""
    if report.decision is None:
        return None
    kind = _kind(report.decision.chosen)
    ones = [one for one in report.decision.candidates if one.plan.layout.world_size == 1 and _kind(one) == kind]
    return max(ones, key=lambda one: one.forecast.samples_per_s.value, default=None)


def _kind(candidate: Candidate) -> str:
    return candidate.plan.device.split(":")[0]


def _mean_split(found: MergedRanks) -> Markup:
    """The parts of training, as the mean over processes; the legend of the pictures too."""
    seconds = {part: fmean(one.parts_s.get(part, 0.0) for one in found.ranks) for part in LABELS}
    whole = sum(seconds.values()) or 1.0
    return stacked_bar(
        [
            Segment(label, LANE_COLOURS[part], seconds[part], seconds[part] / whole)
            for part, label in LABELS.items()
            if seconds[part] > 0
        ]
    )


def _pictures(found: MergedRanks) -> list[Markup]:
    """A few updates in a row, and the one in which the others waited longest for the slowest."""
    drawn: list[Markup] = []
    if row := _in_a_row(found.updates):
        first, last = row[0].update + 1, row[-1].update + 1
        drawn.append(lanes_picture(f"Updates {first} to {last}" if last > first else f"Update {first}", row))
    longest = max(found.regular, key=lambda one: one.waiting_s, default=None)
    if longest is not None and longest not in row:
        title = f"Update {longest.update + 1}, with the longest wait of those looked at: for rank {longest.slowest}"
        drawn.append(lanes_picture(title, [longest]))
    return drawn


def _in_a_row(updates: Sequence[MergedUpdate]) -> Sequence[MergedUpdate]:
    """The last updates that follow each other without a gap, as many as are drawn; one if no two do."""
    for number in range(_IN_A_ROW, 0, -1):
        for start in range(len(updates) - number, -1, -1):
            row = updates[start : start + number]
            if row[-1].update - row[0].update == number - 1:
                return row
    return ()


def _totals(found: MergedRanks) -> Markup:
    """A row for each process, the slowest first where there are too many."""
    shown = list(found.ranks)
    if len(shown) > _MOST_ROWS:
        shown = sorted(shown, key=lambda one: -one.slowest_in)[:_MOST_ROWS]
    head = ("rank", *_HEADS, "evaluation, checkpoints", "the slowest in")
    return table(head, [_cells(one) for one in shown])


def _cells(one: RankTotals) -> Sequence[Markup]:
    apart = one.parts_s.get("evaluation", 0.0) + one.parts_s.get("checkpoint", 0.0)
    parts = [
        element("span", escaped(f"{100 * one.fraction(part):.1f} %"), title=format_seconds(one.parts_s.get(part, 0.0)))
        for part in LABELS
    ]
    return (
        escaped(f"{one.times.rank}: worker {one.times.worker} on {one.times.host}"),
        *parts,
        escaped(format_seconds(apart)),
        escaped(f"{100 * one.slowest_in:.0f} % of updates"),
    )


def _notes(found: MergedRanks, report: Report) -> list[str]:
    first, last = found.ranks[0].times.first_update, found.ranks[0].times.updates
    met = stretches(report.ranks)
    lines = []
    if len(met) > 1:
        lines.append(
            f"Processes met {len(met)} times, since some were lost or came; shown is the longest stretch, "
            f"{found.size} processes from update {first + 1} to {first + last}."
        )
    lines.append(
        f"Shares are of training time, evaluations and checkpoints left out; who was the slowest is counted over "
        f"{len(found.regular):,} updates that all processes kept in full. Where passes communicate within, a lane "
        "shows all of that after its own work."
    )
    lines += _what_is_not_seen(report)
    if (doubt := max(one.times.uncertainty_s for one in found.ranks)) > 0:
        lines.append(
            f"Clocks of different hosts agree to {format_seconds(doubt)} at the start: lanes may be shifted by that, "
            "waiting times do not depend on it."
        )
    if len(found.ranks) > _MOST_ROWS:
        lines.append(f"{len(found.ranks) - _MOST_ROWS} processes that were slowest less often are left out.")
    return lines


def _what_is_not_seen(report: Report) -> list[str]:
    """What the numbers hide under this plan's layout and device."""
    if report.decision is None:
        return []
    plan, lines = report.decision.chosen.plan, []
    if plan.layout.stages > 1:
        lines.append("Communication includes the bubble: the time in which a stage has no micro-batch to work on.")
    if plan.device != "cpu" and not plan.layout.is_replicated:
        lines.append("On a GPU, communication within passes counts as compute here; a profile tells them apart.")
    return lines
