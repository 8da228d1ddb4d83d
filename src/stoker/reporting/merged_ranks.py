"""What all processes noted of their time, put together: who waited for whom, and what communication cost.

A process that is blocked waits for the last one to get as far as itself, and then for the messages. Where processes
share a clock, the last one's arrival is read from it; else they are taken to go on at the same moment, so that who was
blocked the least has come last. Of updates that are not in the sample only the sum is known, and parted as it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from stoker.records import RankTimes
from stoker.records.rank_times import FIRST_IN_FULL
from stoker.units import format_seconds

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
        """What it did, in order, and for how long."""
        return (
            ("data", self.data_s), ("compute", self.compute_s), ("waiting", self.waiting_s),
            ("exposed", self.exposed_s), ("optimiser", self.optimiser_s),
        )  # fmt: skip

    @property
    def start_s(self) -> float:
        """When it began to wait for its data."""
        return self.began_s - self.data_s

    @property
    def took_s(self) -> float:
        """Of the whole update."""
        return sum(seconds for _, seconds in self.parts)


@dataclass(frozen=True, kw_only=True)
class MergedUpdate:
    """One update as all processes had it; `slowest` is the rank that the others waited for."""

    update: int
    lanes: tuple[Lane, ...]
    slowest: int

    @property
    def waiting_s(self) -> float:
        """The mean wait of the others for the slowest."""
        return fmean(lane.waiting_s for lane in self.lanes if lane.rank != self.slowest)

    @property
    def took_s(self) -> float:
        """The mean time over processes."""
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
        """All its time but evaluations and checkpoints."""
        return sum(seconds for part, seconds in self.parts_s.items() if part not in _NOT_TRAINING)

    @property
    def busy(self) -> float:
        """Fraction of its training time in which it did work of its own: passes and the optimiser."""
        own = self.parts_s.get("compute", 0.0) + self.parts_s.get("optimiser", 0.0)
        return own / self.training_s if self.training_s else 0.0

    def fraction(self, part: str) -> float:
        """Of its training time, for a part of training."""
        return self.parts_s.get(part, 0.0) / self.training_s if self.training_s else 0.0


@dataclass(frozen=True, kw_only=True)
class MergedRanks:
    """All processes of one stretch of a run: from a meeting until one was lost or came, or to the end."""

    ranks: tuple[RankTotals, ...]
    updates: tuple[MergedUpdate, ...]

    @property
    def size(self) -> int:
        """Number of processes."""
        return self.ranks[0].times.size

    @property
    def busy(self) -> float:
        """Mean fraction of the training time in which processes did work of their own."""
        return fmean(one.busy for one in self.ranks)

    @property
    def regular(self) -> tuple[MergedUpdate, ...]:
        """The sampled updates after the first ones; all, if there are no others."""
        return _regular(self.updates, self.ranks[0].times.first_update)

    @property
    def slowest(self) -> RankTotals:
        """The process that the others waited for most often."""
        return max(self.ranks, key=lambda one: one.slowest_in)

    def sentence(self) -> str:
        """Whether a process holds the others up, which one, and what communication costs.

        `Rank 1 is the slowest in 83 % of the updates: the others wait 12 ms (9 %) for it.`
        """
        if not self.updates:
            return f"{self.size} processes trained together; of no update all of them kept their times."
        waiting, exposed = (fmean(one.fraction(part) for one in self.ranks) for part in ("waiting", "exposed"))
        talk = f"Communication that compute does not hide takes {100 * exposed:.0f} % of the training time."
        if waiting < _LITTLE:
            return f"No process holds the others up: they wait {100 * waiting:.1g} % of the time. {talk}"
        slowest = self.slowest
        share = f"in {100 * slowest.slowest_in:.0f} % of the updates"
        if slowest.slowest_in >= _OFTEN:
            its = [one for one in self.regular if one.slowest == slowest.times.rank]
            wait, whole = fmean(one.waiting_s for one in its), fmean(one.took_s for one in its)
            held = f"the others wait {format_seconds(wait)} ({100 * wait / whole:.0f} %) for it"
            return f"Rank {slowest.times.rank} is the slowest {share}: {held}. {talk}"
        return (
            f"The slowest changes from update to update (rank {slowest.times.rank} {share}); waiting for it takes "
            f"{100 * waiting:.0f} % of the training time. {talk}"
        )


def stretches(ranks: Sequence[RankTimes]) -> tuple[tuple[RankTimes, ...], ...]:
    """What processes noted, by meeting, in the order in which they met; within each by rank."""
    meetings: dict[float, list[RankTimes]] = {}
    for one in ranks:
        meetings.setdefault(one.began_at, []).append(one)
    return tuple(tuple(sorted(meetings[at], key=lambda one: one.rank)) for at in sorted(meetings))


def merged(stretch: Sequence[RankTimes]) -> MergedRanks | None:
    """One stretch put together; None for a process that was alone, or where not all have left their times."""
    if len(stretch) < 2 or len(stretch) != stretch[0].size:
        return None
    updates = _merged_updates(stretch)
    counted = _regular(updates, stretch[0].first_update)
    slowest = Counter(one.slowest for one in counted)
    return MergedRanks(
        ranks=tuple(_totals(one, updates, counted, slowest[one.rank] / max(1, len(counted))) for one in stretch),
        updates=updates,
    )


def _regular(updates: tuple[MergedUpdate, ...], first: int) -> tuple[MergedUpdate, ...]:
    return tuple(one for one in updates if one.update >= first + FIRST_IN_FULL) or updates


def _merged_updates(stretch: Sequence[RankTimes]) -> tuple[MergedUpdate, ...]:
    """The updates that all processes have in their samples."""
    places = [{update: place for place, update in enumerate(one.sample.update)} for one in stretch]
    common = [update for update in stretch[0].sample.update if all(update in place for place in places)]
    return tuple(_merged_update(update, stretch, [place[update] for place in places]) for update in common)


def _merged_update(update: int, stretch: Sequence[RankTimes], places: Sequence[int]) -> MergedUpdate:
    share_clock = all(one.uncertainty_s == 0 for one in stretch)
    blocked = [one.sample.blocked_s[place] for one, place in zip(stretch, places, strict=True)]
    computed = [one.sample.began_s[p] + one.sample.compute_s[p] for one, p in zip(stretch, places, strict=True)]
    arrived = computed if share_clock else [-seconds for seconds in blocked]
    last = max(arrived)
    waiting = [min(held, last - at) for held, at in zip(blocked, arrived, strict=True)]
    lanes = tuple(
        Lane(
            rank=one.rank, began_s=one.sample.began_s[place], data_s=one.sample.data_s[place],
            compute_s=one.sample.compute_s[place], waiting_s=wait, exposed_s=held - wait,
            optimiser_s=one.sample.optimiser_s[place],
        )
        for one, place, held, wait in zip(stretch, places, blocked, waiting, strict=True)
    )  # fmt: skip
    return MergedUpdate(update=update, lanes=lanes, slowest=stretch[arrived.index(last)].rank)


def _totals(
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
    own = [lane for one in updates for lane in one.lanes if lane.rank == rank]
    return sum(lane.waiting_s for lane in own), sum(lane.exposed_s for lane in own)
