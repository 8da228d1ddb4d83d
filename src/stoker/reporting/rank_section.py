"""All processes of a run in one view: which one the others wait for, what communication costs, how well they scale.

A blocked process waits for the last one to arrive, and then for the messages. Where processes share a clock, the last
one's arrival is read from it; else they are taken to continue at the same moment, so that the one that was blocked the
least arrived last. Of updates outside the sample only the sum is known; it is divided as in the sampled ones.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from stoker.layouts import all_axes
from stoker.records import Candidate, RankTimes, Report
from stoker.records.bottleneck import FIRST_IN_FULL
from stoker.reporting.pages import BarSegment
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
"""The parts of training and their labels, in the order they are shown."""

COLUMNS = dict(zip(LABELS, ("compute", "waiting", "communication", "optimiser", "data", "other"), strict=True))
"""The parts of training and the heads of their columns."""

_MOST_ROWS = 32
_IN_A_ROW = 3


def shown_stretch(report: Report) -> MergedRanks | None:
    """The longest stretch of the run that several processes trained together; None if there is none."""
    merged_stretches = [
        merged_ranks for merged_ranks in map(merged, stretches(report.ranks)) if merged_ranks is not None
    ]
    return max(merged_stretches, key=lambda stretch: stretch.ranks[0].times.updates, default=None)


def rank_lines(report: Report) -> list[str]:
    """As plain text: the verdict, and how far adding processes has paid; nothing for a run of one process."""
    found = shown_stretch(report)
    return [] if found is None else [found.sentence(), efficiency(found, report)]


def efficiency(merged_ranks: MergedRanks, report: Report) -> str:
    """How much of their time processes do work of their own, and how many times one process's rate they reach."""
    text = f"Processes do work of their own {100 * merged_ranks.busy:.0f} % of the training time."
    rate = next((row.measured for row in forecast_rows(report) if row.quantity == "throughput"), None)
    alone = _alone(report)
    if rate is None or alone is None or report.decision is None or not alone.forecast.samples_per_s.value:
        return text
    one, threads = alone.forecast.samples_per_s, alone.plan.threads
    times = rate / one.value
    text += f" The {merged_ranks.size} of them train {format_rate(rate)}, {times:.2f} times what is forecast for"
    known = f"({format_rate(one.value)}, {one.basis})"
    if alone.plan.device == "cpu" and threads != report.decision.chosen.plan.threads:
        return f"{text} one with {threads} threads {known}."
    return f"{text} one {known}: a scaling efficiency of {100 * times / merged_ranks.size:.0f} %."


def _alone(report: Report) -> Candidate | None:
    """The fastest plan for one process on the kind of device that was trained on; None if none was looked at."""
    if report.decision is None:
        return None
    kind = _kind(report.decision.chosen)
    ones = [
        candidate
        for candidate in report.decision.candidates
        if candidate.plan.layout.world_size == 1 and _kind(candidate) == kind
    ]
    return max(ones, key=lambda candidate: candidate.forecast.samples_per_s.value, default=None)


def _kind(candidate: Candidate) -> str:
    return candidate.plan.device.split(":")[0]


def mean_split(merged_ranks: MergedRanks) -> list[BarSegment]:
    """The parts of training, as the mean over processes; the legend of the pictures too."""
    seconds = {part: fmean(rank.parts_s.get(part, 0.0) for rank in merged_ranks.ranks) for part in LABELS}
    whole = sum(seconds.values()) or 1.0
    return [
        BarSegment(label, LANE_COLOURS[part], seconds[part], seconds[part] / whole)
        for part, label in LABELS.items()
        if seconds[part] > 0
    ]


def lane_pictures(merged_ranks: MergedRanks) -> list[LanePicture]:
    """A few updates in a row, and the one in which the others waited longest for the slowest."""
    drawn: list[LanePicture] = []
    if row := _in_a_row(merged_ranks.updates):
        first, last = row[0].update + 1, row[-1].update + 1
        drawn.append(lane_picture(f"Updates {first} to {last}" if last > first else f"Update {first}", row))
    longest = max(merged_ranks.regular, key=lambda update: update.waiting_s, default=None)
    if longest is not None and longest not in row:
        title = f"Update {longest.update + 1}, with the longest wait of those looked at: for rank {longest.slowest}"
        drawn.append(lane_picture(title, [longest]))
    return drawn


def _in_a_row(updates: Sequence[MergedUpdate]) -> Sequence[MergedUpdate]:
    """The last updates that follow each other without a gap, as many as are drawn; one if no two do."""
    for number in range(_IN_A_ROW, 0, -1):
        for start in range(len(updates) - number, -1, -1):
            row = updates[start : start + number]
            if row[-1].update - row[0].update == number - 1:
                return row
    return ()


def shown_ranks(merged_ranks: MergedRanks) -> Sequence[RankTotals]:
    """The rows of the table: each process, those that are slowest most often first where there are too many."""
    if len(merged_ranks.ranks) <= _MOST_ROWS:
        return merged_ranks.ranks
    return sorted(merged_ranks.ranks, key=lambda rank: -rank.slowest_in)[:_MOST_ROWS]


def rank_notes(merged_ranks: MergedRanks, report: Report) -> list[str]:
    """Notes that explain the section."""
    first, last = merged_ranks.ranks[0].times.first_update, merged_ranks.ranks[0].times.updates
    met = stretches(report.ranks)
    lines = []
    if len(met) > 1:
        lines.append(
            f"Processes met {len(met)} times, since some were lost or came; shown is the longest stretch, "
            f"{merged_ranks.size} processes from update {first + 1} to {first + last}."
        )
    lines.append(
        f"Shares are of training time, evaluations and checkpoints left out; who was the slowest is counted over "
        f"{len(merged_ranks.regular):,} updates that all processes kept in full. Where passes communicate within, a "
        "lane shows all of that after its own work."
    )
    plan = None if report.decision is None else report.decision.chosen.plan
    if plan is not None:
        names = {axis.name for axis in plan.layout.divided}
        lines += [axis.report_note for axis in all_axes() if axis.name in names and axis.report_note]
    if plan is not None and plan.device != "cpu" and not plan.layout.is_replicated:
        lines.append("On a GPU, communication within passes counts as compute here; a profile separates them.")
    if (doubt := max(rank.times.uncertainty_s for rank in merged_ranks.ranks)) > 0:
        lines.append(
            f"Clocks of different hosts agree to {format_seconds(doubt)} at the start: lanes may be shifted by that, "
            "waiting times do not depend on it."
        )
    if len(merged_ranks.ranks) > _MOST_ROWS:
        lines.append(f"{len(merged_ranks.ranks) - _MOST_ROWS} processes that were slowest less often are left out.")
    return lines


_LITTLE, _OFTEN = 0.02, 0.6
_NOT_TRAINING = frozenset({"evaluation", "checkpoint"})


@dataclass(frozen=True, kw_only=True)
class Lane:
    """One process in one update; moments and times in seconds, moments by the first process's clock."""

    rank: int
    began_s: float
    data_s: float
    compute_s: float
    exposed_s: float
    waiting_s: float
    optimiser_s: float

    @property
    def parts(self) -> tuple[tuple[str, float], ...]:
        """The parts of its time in order [s]."""
        return (
            ("data", self.data_s),
            ("compute", self.compute_s),
            ("waiting", self.waiting_s),
            ("exposed", self.exposed_s),
            ("optimiser", self.optimiser_s),
        )

    @property
    def start_s(self) -> float:
        """When it began to wait for its data [s]."""
        return self.began_s - self.data_s

    @property
    def took_s(self) -> float:
        """Time of the whole update [s]."""
        return sum(seconds for _, seconds in self.parts)


@dataclass(frozen=True, kw_only=True)
class MergedUpdate:
    """One update as all processes had it; `slowest` is the rank that the others waited for."""

    update: int
    lanes: tuple[Lane, ...]
    slowest: int

    @property
    def waiting_s(self) -> float:
        """Mean wait of the others for the slowest [s]."""
        return fmean(lane.waiting_s for lane in self.lanes if lane.rank != self.slowest)

    @property
    def took_s(self) -> float:
        """Mean time over processes [s]."""
        return fmean(lane.took_s for lane in self.lanes)


@dataclass(frozen=True, kw_only=True)
class RankTotals:
    """One process over the whole stretch [s]; in the fraction `slowest_in` of updates the others waited for it.

    `parts_s` has `exposed` and `waiting` in the place of `blocked`.
    """

    times: RankTimes
    parts_s: Mapping[str, float]
    slowest_in: float

    @property
    def training_s(self) -> float:
        """All its time but evaluations and checkpoints [s]."""
        return sum(seconds for part, seconds in self.parts_s.items() if part not in _NOT_TRAINING)

    @property
    def busy(self) -> float:
        """Share of its training time spent on work of its own, passes and the optimiser [0 to 1]."""
        own = self.parts_s.get("compute", 0.0) + self.parts_s.get("optimiser", 0.0)
        return own / self.training_s if self.training_s else 0.0

    def fraction(self, part: str) -> float:
        """Share of its training time that a part of training takes [0 to 1]."""
        return self.parts_s.get(part, 0.0) / self.training_s if self.training_s else 0.0


@dataclass(frozen=True, kw_only=True)
class MergedRanks:
    """All processes of one stretch of a run: from a meeting until one was lost or came, or to the end."""

    ranks: tuple[RankTotals, ...]
    updates: tuple[MergedUpdate, ...]

    @property
    def size(self) -> int:
        """Number of processes [processes]."""
        return self.ranks[0].times.size

    @property
    def busy(self) -> float:
        """Mean share of the training time that processes spent on work of their own [0 to 1]."""
        return fmean(rank.busy for rank in self.ranks)

    @property
    def regular(self) -> tuple[MergedUpdate, ...]:
        """The sampled updates after the first ones; all, if there are no others."""
        return _regular(self.updates, self.ranks[0].times.first_update)

    @property
    def slowest(self) -> RankTotals:
        """The process that the others waited for most often."""
        return max(self.ranks, key=lambda rank: rank.slowest_in)

    def sentence(self) -> str:
        """Whether a process holds the others up, which one, and what communication costs.

        `Rank 1 is the slowest in 83 % of the updates: the others wait 12 ms (9 %) for it.`
        """
        if not self.updates:
            return f"{self.size} processes trained together; of no update all of them kept their times."
        waiting, exposed = (fmean(update.fraction(part) for update in self.ranks) for part in ("waiting", "exposed"))
        talk = f"Communication that compute does not hide takes {100 * exposed:.0f} % of the training time."
        if waiting < _LITTLE:
            return f"No process holds the others up: they wait {100 * waiting:.1g} % of the time. {talk}"
        slowest = self.slowest
        share = f"in {100 * slowest.slowest_in:.0f} % of the updates"
        if slowest.slowest_in >= _OFTEN:
            its = [update for update in self.regular if update.slowest == slowest.times.rank]
            wait, whole = fmean(update.waiting_s for update in its), fmean(update.took_s for update in its)
            held = f"the others wait {format_seconds(wait)} ({100 * wait / whole:.0f} %) for it"
            return f"Rank {slowest.times.rank} is the slowest {share}: {held}. {talk}"
        return (
            f"The slowest changes from update to update (rank {slowest.times.rank} {share}); waiting for it takes "
            f"{100 * waiting:.0f} % of the training time. {talk}"
        )


def stretches(ranks: Sequence[RankTimes]) -> tuple[tuple[RankTimes, ...], ...]:
    """The records of processes by rendezvous, in order; within each by rank."""
    meetings: dict[float, list[RankTimes]] = {}
    for times in ranks:
        meetings.setdefault(times.began_at, []).append(times)
    return tuple(tuple(sorted(meetings[at], key=lambda times: times.rank)) for at in sorted(meetings))


def merged(stretch: Sequence[RankTimes]) -> MergedRanks | None:
    """One stretch put together; None for a process that was alone, or where not all have left their times."""
    if len(stretch) < 2 or len(stretch) != stretch[0].size:
        return None
    places = [{update: place for place, update in enumerate(times.sample.update)} for times in stretch]
    common = [update for update in stretch[0].sample.update if all(update in place for place in places)]
    updates = tuple(_merged_update(update, stretch, [place[update] for place in places]) for update in common)
    counted = _regular(updates, stretch[0].first_update)
    slowest = Counter(times.slowest for times in counted)
    return MergedRanks(
        ranks=tuple(
            _rank_totals(times, updates, counted, slowest[times.rank] / max(1, len(counted))) for times in stretch
        ),
        updates=updates,
    )


def _regular(updates: tuple[MergedUpdate, ...], first: int) -> tuple[MergedUpdate, ...]:
    return tuple(update for update in updates if update.update >= first + FIRST_IN_FULL) or updates


def _merged_update(update: int, stretch: Sequence[RankTimes], places: Sequence[int]) -> MergedUpdate:
    share_clock = all(times.uncertainty_s == 0 for times in stretch)
    blocked = [times.sample.blocked_s[place] for times, place in zip(stretch, places, strict=True)]
    computed = [times.sample.began_s[p] + times.sample.compute_s[p] for times, p in zip(stretch, places, strict=True)]
    arrived = computed if share_clock else [-seconds for seconds in blocked]
    last = max(arrived)
    waiting = [min(held, last - arrived_s) for held, arrived_s in zip(blocked, arrived, strict=True)]
    lanes = tuple(
        Lane(
            rank=times.rank,
            began_s=times.sample.began_s[place],
            data_s=times.sample.data_s[place],
            compute_s=times.sample.compute_s[place],
            waiting_s=wait,
            exposed_s=held - wait,
            optimiser_s=times.sample.optimiser_s[place],
        )
        for times, place, held, wait in zip(stretch, places, blocked, waiting, strict=True)
    )
    return MergedUpdate(update=update, lanes=lanes, slowest=stretch[arrived.index(last)].rank)


def _rank_totals(
    times: RankTimes, updates: Sequence[MergedUpdate], counted: Sequence[MergedUpdate], slowest_in: float
) -> RankTotals:
    """Sums of one process: what is known of each sampled update, and the rest parted as the regular ones are."""
    waiting, exposed = _waited(times.rank, updates)
    usual, talked = _waited(times.rank, counted)
    share = usual / (usual + talked) if usual + talked else 0.0
    parts = dict(times.parts_s)
    rest = max(0.0, parts.pop("blocked", 0.0) - waiting - exposed)
    parts |= {"waiting": waiting + share * rest, "exposed": exposed + (1 - share) * rest}
    return RankTotals(times=times, parts_s=parts, slowest_in=slowest_in)


def _waited(rank: int, updates: Sequence[MergedUpdate]) -> tuple[float, float]:
    """How long one process waited for the slowest in these updates, and for communication [s]."""
    own = [lane for update in updates for lane in update.lanes if lane.rank == rank]
    return sum(lane.waiting_s for lane in own), sum(lane.exposed_s for lane in own)


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
_WIDTH, _LABEL = 940, 70


@dataclass(frozen=True)
class LanePicture:
    """Updates on one axis of time, in pixels of the picture: a lane of (part, seconds, x, width) for each rank shown.

    `ticks` are (seconds, x); `words` stand in for it where it is not seen.
    """

    title: str
    words: str
    lanes: tuple[tuple[int, tuple[tuple[str, float, float, float], ...]], ...]
    ticks: tuple[tuple[float, float], ...]


def lane_picture(title: str, updates: Sequence[MergedUpdate]) -> LanePicture:
    """Updates that follow each other; of many processes a few."""
    ranks = _chosen([lane.rank for lane in updates[0].lanes], {update.slowest for update in updates})
    start = min(lane.start_s for update in updates for lane in update.lanes)
    span = max(lane.start_s + lane.took_s for update in updates for lane in update.lanes) - start or 1e-9
    scale = (_WIDTH - _LABEL - 10) / span
    texts = [
        f"update {update.update + 1} takes {format_seconds(update.took_s)}, "
        f"the others wait {format_seconds(update.waiting_s)} for rank {update.slowest}"
        for update in updates
    ]
    return LanePicture(
        title=title,
        words=f"{title}: {'; '.join(texts)}",
        lanes=tuple(
            (
                rank,
                tuple(
                    drawn
                    for update in updates
                    for lane in update.lanes
                    if lane.rank == rank
                    for drawn in _drawn(lane, start, scale)
                ),
            )
            for rank in ranks
        ),
        ticks=tuple((at_s, _LABEL + at_s * scale) for at_s in _ticks(span)),
    )


def _chosen(ranks: Sequence[int], needed: set[int]) -> list[int]:
    """All ranks, or the needed ones and others at equal distances."""
    if len(ranks) <= _MOST_LANES:
        return list(ranks)
    kept = sorted(needed)[: _MOST_LANES - 1]
    others = [rank for rank in ranks if rank not in kept]
    room = _MOST_LANES - len(kept)
    return sorted({*kept, *(others[place * len(others) // room] for place in range(room))})


def _drawn(lane: Lane, start_s: float, scale: float) -> Iterator[tuple[str, float, float, float]]:
    """The parts of one process in one update that can be seen, one after the other."""
    start = lane.start_s - start_s
    for part, seconds in lane.parts:
        if seconds * scale >= 0.2:
            yield part, seconds, _LABEL + start * scale, max(0.6, seconds * scale - 0.5)
        start += seconds


def _ticks(span_s: float) -> list[float]:
    """Between three and eight round times from 0 up to `span_s` [s]."""
    step = 10.0 ** math.floor(math.log10(span_s))
    while span_s / step < 3:
        step /= 2 if span_s / step >= 1.5 else 5
    return [number * step for number in range(int(span_s / step) + 1)]
