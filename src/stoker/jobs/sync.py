"""How replicas that are joined by slow links come together: settings, carried out in `stepping/outer/`.

What: each replica, called a site here, takes its part of every batch and makes updates of its own, without a word to
the others; after an interval all take over what they have learned on average. That changes what is learned, so it
belongs to the Job.
Use when: one update is shorter than summing its gradients over the link. Costs: two copies of the parameters on each
site; a somewhat higher loss the longer the interval and the more the sites. Does not combine with: an average of the
weights (`ema`), a step of the job's own, skipping or rolling back updates, layouts other than replicas, samples that
are coupled over more of a batch than one site takes.
Sources: local SGD, Stich 2018, https://arxiv.org/abs/1805.09767; DiLoCo, Douillard et al. 2023,
https://arxiv.org/abs/2311.08105; fragments and overlap, Douillard et al. 2025, https://arxiv.org/abs/2501.18512.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from stoker.errors import BadJob
from stoker.jobs.optimizers import SGD
from stoker.units import Duration

Compression = Literal["int8", "none"]
"""What is sent of each element: an 8-bit integer, with a scale for every 1,024 of them, or all of it."""


@dataclass(frozen=True, kw_only=True)
class Sync:
    """What all ways of coming together have; see `DiLoCo` and `LocalSGD`.

    Raises:
        ValueError: a setting is out of range.
        TypeError: a setting is of another type.
    """

    every: Duration
    outer: SGD
    compress: Compression
    fragments: int
    overlap: int
    keep: float

    def __post_init__(self) -> None:
        every: object = self.every
        if not isinstance(every, Duration) or every.unit not in ("updates", "samples"):
            raise ValueError(f"every is stoker.updates(50) or stoker.samples(25_600), say; got {every!r}")
        outer: object = self.outer
        if not isinstance(outer, SGD):
            raise TypeError(f"outer is a stoker.SGD, got a {type(outer).__name__}")
        if outer.weight_decay or outer.dampening or outer.groups:
            raise ValueError(
                "outer has a rate, momentum and nesterov; weight decay, dampening and groups are inner ones"
            )
        if not 0 <= outer.momentum < 1:
            raise ValueError(f"the outer momentum lies in [0, 1), got {outer.momentum}")
        if self.compress not in ("int8", "none"):
            raise ValueError(f'compress is "int8" or "none", got {self.compress!r}')
        for name, least in (("fragments", 1), ("overlap", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name} is a whole number, {least} or more, got {value!r}")
        if not 0 <= self.keep < 1:
            raise ValueError(f"keep is a share in [0, 1), got {self.keep!r}")

    def interval(self, batch: int) -> int:
        """Updates from one exchange to the next, where an update is of `batch` samples; samples are rounded up to it.

        >>> LocalSGD(every=Duration(1000, "samples")).interval(64)
        16

        Raises:
            BadJob: there are more fragments than that, or an exchange would outlast it.
        """
        length = self.every.value if self.every.unit == "updates" else self.every.value / batch
        interval = max(1, math.ceil(length))
        if self.fragments > interval:
            raise BadJob(
                f"{self.fragments} fragments cannot take turns within {interval} updates",
                remedy=f"Use at most {interval} fragments, or come together less often.",
            )
        if self.overlap >= interval:
            raise BadJob(
                f"an exchange that goes on for {self.overlap} updates is not over when the next one begins, after "
                f"{interval}",
                remedy=f"Use an overlap of at most {interval - 1} updates, or come together less often.",
            )
        return interval


@dataclass(frozen=True, kw_only=True)
class DiLoCo(Sync):
    """Sites come together by an outer optimiser, whose gradient is how far they went on average.

    Args:
        every: how many updates each site makes between two exchanges: `stoker.updates(50)`; or samples of all sites
            together, rounded up to whole updates.
        outer: the optimiser of the shared weights: SGD, with Nesterov's momentum as published.
        compress: "int8" sends a quarter of the bytes; an element is off by at most 1/254 of the largest one of its
            1,024. "none" sends all.
        fragments: into so many equal parts the parameters are cut, which take turns: the same bytes in all, but spread
            evenly over time.
        overlap: an exchange may take so many updates; its result is taken over just then, whether it was there sooner
            or has to be waited for, so that a run does not depend on the link. 0: sites wait at once.
        keep: with `overlap`, this share of a site's own weights stays in what it takes over, for the updates it made
            meanwhile.

    Raises:
        ValueError: a setting is out of range.
        TypeError: `outer` is no stoker.SGD.
    """

    outer: SGD = field(default=SGD(lr=0.7, momentum=0.9, nesterov=True))
    compress: Compression = "int8"
    fragments: int = 1
    overlap: int = 0
    keep: float = 0.5


@dataclass(frozen=True, kw_only=True)
class LocalSGD(Sync):
    """Sites come together by taking over the average of their weights.

    Args:
        every: how many updates each site makes between two exchanges: `stoker.updates(50)`; or samples of all sites
            together, rounded up to whole updates.

    Raises:
        ValueError: the interval is neither in updates nor in samples.
    """

    outer: SGD = field(default=SGD(lr=1.0), init=False)
    compress: Compression = field(default="none", init=False)
    fragments: int = field(default=1, init=False)
    overlap: int = field(default=0, init=False)
    keep: float = field(default=0.0, init=False)
