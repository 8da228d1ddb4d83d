"""The legal layouts of a job over so many devices: what divides what is known before anything is spent.

Of all products of axes those with at most two above one are looked at. GPipe is left out: with as many micro-batches it
waits as long as 1F1B, and holds more (Narayanan et al. 2021, arXiv:2104.04473, section 2.2).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from stoker.devices.links import NODE_DEVICES
from stoker.records import Layout, Profile

MOST_AXES = 2
"""Axes of a layout that may be above one."""

Problem = Callable[[Layout], str | None]
"""Why a layout does not go with the model; None where it does, or nobody can tell before it is tried."""


def _none_known(_layout: Layout) -> str | None:
    return None


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What layouts of a job have to keep.

    `alone` says why its updates cannot be spread at all (None: they can), `whole_copies` why every process must hold
    all of the model (None: it need not). `objection` is what those who divide models say of a layout that does so.
    """

    profile: Profile
    alone: str | None = None
    whole_copies: str | None = None
    objection: Problem = _none_known

    def problem_with(self, layout: Layout) -> str | None:
        """Why a layout is not legal, with the numbers and what would be; None where it is."""
        if layout.world_size == 1:
            return None
        checks = (lambda _: self.alone, self._copies, self._samples, self._tensor, self._divided)
        return next((problem for check in checks if (problem := check(layout)) is not None), None)

    def _copies(self, layout: Layout) -> str | None:
        """Of whole models."""
        return None if layout.is_replicated else self.whole_copies

    def _samples(self, layout: Layout) -> str | None:
        """Of parts of a batch."""
        profile = self.profile
        return layout.problem_with(profile.coupling, min(profile.batch, profile.num_train))

    def _tensor(self, layout: Layout) -> str | None:
        """Of tensor groups, which are of no use over slow links."""
        if layout.tensor > NODE_DEVICES:
            return f"{layout.tensor} tensor processes are more than the {NODE_DEVICES} devices of a node"
        return None

    def _divided(self, layout: Layout) -> str | None:
        """Of a model in parts."""
        return None if layout.is_replicated else self.objection(layout)


def layouts_of(count: int) -> Iterator[Layout]:
    """Layouts of `count` processes, the simplest first: along one axis, then along two."""
    names = ("replicas", "shards", "tensor", "stages")
    if count == 1:
        yield Layout()
        return
    for name in names:
        yield from _variants(Layout(**{name: count}))  # type: ignore[arg-type]  # each is a number
    for one, other in itertools.combinations(names, MOST_AXES):
        for first in range(2, count // 2 + 1):
            if count % first == 0:
                yield from _variants(Layout(**{one: first, other: count // first}))  # type: ignore[arg-type]


def _variants(layout: Layout) -> Iterator[Layout]:
    """A layout as it is, and with what its axes allow to choose."""
    sizes = {"replicas": layout.replicas, "shards": layout.shards, "tensor": layout.tensor, "stages": layout.stages}
    reshards = (True, False) if layout.shards > 1 else (True,)
    sequences = (False, True) if layout.tensor > 1 else (False,)
    for reshard, sequence in itertools.product(reshards, sequences):
        yield Layout(**sizes, reshard=reshard, sequence=sequence)  # type: ignore[arg-type]
