"""Which samples of a batch each site takes: parts in proportion to speed, made of whole groups. Pure arithmetic.

All sites make equally many updates, so the order of the samples, the schedule and the number of updates stay what they
are; a slower site has fewer samples in each. (Asynchronous local SGD gives it fewer updates instead: Liu et al. 2024,
https://arxiv.org/abs/2401.09135, section 5.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from stoker.errors import BadJob
from stoker.loading import Batch, Pass, Split


def shares(speeds: Sequence[float], batch: int, group: int = 1) -> tuple[int, ...]:
    """Samples of a batch for each site, in proportion to its speed.

    Whole groups of coupled samples; one at least for each; what is left over goes to the largest remainders, the first
    of equal ones. The last group may be cut short by the end of the batch. The same numbers give the same shares, so
    sites that know each other's speeds agree without a word.

    >>> shares([100.0, 50.0], 30)
    (20, 10)
    >>> shares([100.0, 90.0], 30, group=10)
    (20, 10)

    Args:
        speeds: of each site [samples/s]; 0 where nothing was measured, which counts as the mean of the others.
        batch: samples of all sites together.
        group: samples that belong together.

    Raises:
        BadJob: there are fewer groups than sites.
    """
    groups = math.ceil(batch / group)
    if groups < len(speeds):
        what = f"{batch} samples" if group == 1 else f"{groups} groups of {group} coupled samples"
        raise BadJob(
            f"a batch of {what} cannot be shared by {len(speeds)} sites: each needs whole ones",
            remedy=f"Use at most {groups} sites, a larger batch or a smaller coupling_group, which are changes of Job.",
        )
    known = [speed for speed in speeds if speed > 0] or [1.0]
    filled = [speed if speed > 0 else sum(known) / len(known) for speed in speeds]
    quotas = [groups * speed / sum(filled) for speed in filled]
    counts = [math.floor(quota) for quota in quotas]
    by_remainder = sorted(range(len(counts)), key=lambda site: counts[site] - quotas[site])
    for site in by_remainder[: groups - sum(counts)]:
        counts[site] += 1
    while min(counts) == 0:
        counts[counts.index(max(counts))] -= 1
        counts[counts.index(0)] += 1
    edges = [min(batch, group * edge) for edge in accumulate(counts, initial=0)]
    return tuple(after - before for before, after in pairwise(edges))


@dataclass(frozen=True)
class SiteSplit(Split):
    """What site number `part` takes of each batch: a run of whole groups, as long as its share.

    Unlike other parts of a batch, sites do nothing together within an update, so they need not pass equally often.
    """

    shares: tuple[int, ...] = ()
    """Each site's samples of a whole batch; empty: equal ones."""

    def spans(self, size: int) -> tuple[range, ...]:
        """As `Split.spans`; one range, which may be empty where `size` is less than a batch.

        >>> SiteSplit(1, 2, group=4).spans(16)
        (range(8, 16),)
        >>> SiteSplit(0, 2, shares=(20, 10)).spans(15)
        (range(0, 10),)
        """
        group, given = self.group or 1, self.shares or (1,) * self.parts
        groups = math.ceil(size / group)
        before, through = sum(given[: self.part]), sum(given[: self.part + 1])
        first, last = (min(size, group * (groups * edge // sum(given))) for edge in (before, through))
        return (range(first, last),)

    def passes(self, size: int, micro_batch: int) -> tuple[Pass, ...]:
        """As `Split.passes`, but as few as it takes; one that counts nothing where no sample is this site's."""
        (span,) = self.spans(size)
        if not span:
            return (Pass(0, 1, 0, counts=False),)
        cuts = range(0, len(span), micro_batch)
        return tuple(Pass(at, min(at + micro_batch, len(span)), span.start + at) for at in cuts)


def samples_here(batch: Batch) -> int:
    """How many of a batch's samples this process trains on; one that has none holds one all the same."""
    return sum(map(len, batch.split.spans(batch.whole_size)))
