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
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from stoker.errors import BadJob, BadSetting
from stoker.jobs.optimizers import OMIT_FROM_SPEC, SGD
from stoker.units import Duration

Compression = Literal["int8", "int4", "none"]
"""What is sent of each element: an 8-bit integer, with a scale for every 1,024 of them, or all of it."""

Rate = Literal["as_given", "by_noise"]
"""What a site's learning rate is: the job's, or more, since a part of the batch has a noisier gradient."""

MUCH_MOMENTUM = 0.5
"""An outer momentum from which on a short run is warned of."""

PUBLISHED = SGD(lr=0.7, momentum=0.9, nesterov=True)
"""DiLoCo's outer optimiser: Douillard et al. 2023, table 5, for 128 exchanges of 500 updates."""

ENOUGH_EXCHANGES = 100
"""With fewer exchanges in a run, a momentum of 0.9 goes too far: see docs/slow-links.md for what it costs."""

_SHORT = ((50, SGD(lr=1.0)), (ENOUGH_EXCHANGES, SGD(lr=1.0, momentum=0.4, nesterov=True)))
"""In place of PUBLISHED in runs of fewer exchanges without overlap; the first is the average of the sites' weights."""

Early = tuple[Duration, Duration]
"""An interval, and how long it is the one that goes."""


def _is_counted(given: object) -> bool:
    return isinstance(given, Duration) and given.unit in ("updates", "samples")


def _is_early(given: object) -> bool:
    return isinstance(given, tuple) and len(given) == 2 and all(map(_is_counted, given))


def _whole_updates(length: Duration, batch: int) -> int:
    """A duration in updates of `batch` samples, rounded up; at least 1."""
    return max(1, math.ceil(length.value if length.unit == "updates" else length.value / batch))


@dataclass(frozen=True, kw_only=True)
class Sync:
    """What all ways of coming together have; see `DiLoCo` and `LocalSGD`.

    Raises:
        BadSetting: a setting is out of range, or of another type.
    """

    every: Duration
    outer: SGD | None
    compress: Compression
    fragments: int
    overlap: int
    keep: float
    rate: Rate
    early: Early | None

    def __post_init__(self) -> None:
        if not _is_counted(self.every):
            raise BadSetting(f"every is stoker.updates(50) or stoker.samples(25_600), say; got {self.every!r}")
        if self.early is not None and not _is_early(self.early):
            raise BadSetting(
                "early is an interval and how long it goes for: (stoker.updates(4), stoker.updates(300)); "
                f"got {self.early!r}"
            )
        outer: object = self.outer_optimizer
        if not isinstance(outer, SGD):
            raise BadSetting(f"outer is a stoker.SGD, got a {type(outer).__name__}")
        if outer.weight_decay or outer.dampening or outer.groups:
            raise BadSetting(
                "outer has a rate, momentum and nesterov; weight decay, dampening and groups are inner ones"
            )
        if not 0 <= outer.momentum < 1:
            raise BadSetting(f"the outer momentum lies in [0, 1), got {outer.momentum}")
        if self.compress not in get_args(Compression):
            raise BadSetting(f"compress is one of {', '.join(get_args(Compression))}, got {self.compress!r}")
        for name, least in (("fragments", 1), ("overlap", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise BadSetting(f"{name} is a whole number, {least} or more, got {value!r}")
        if not 0 <= self.keep < 1:
            raise BadSetting(f"keep is a share in [0, 1), got {self.keep!r}")
        if self.rate not in ("as_given", "by_noise"):
            raise BadSetting(f'rate is "as_given" or "by_noise", got {self.rate!r}')

    @property
    def outer_optimizer(self) -> SGD:
        """What moves the shared weights: the one that was given, or the published one."""
        return PUBLISHED if self.outer is None else self.outer

    def exchanges(self, batch: int, num_updates: int) -> int:
        """How often all weights are exchanged in a run of so many updates, but for the end.

        >>> from stoker.units import updates
        >>> DiLoCo(every=updates(10)).exchanges(64, 70)
        7
        >>> DiLoCo(every=updates(10), early=(updates(2), updates(20))).exchanges(64, 70)
        15
        """
        early_interval, early_updates = self.early_interval(batch)
        early = min(num_updates, early_updates)
        return early // early_interval + (num_updates - early) // self.interval(batch)

    def for_run(self, batch: int, num_updates: int) -> tuple[Sync, str | None]:
        """The same with its outer optimiser settled for a run of so many updates, and what the user should know.

        Where none was given, it is the published one; in runs of fewer than ENOUGH_EXCHANGES without overlap one with
        less momentum, or none, which has not the time to come to rest there.
        """
        count = self.exchanges(batch, num_updates)
        is_short = self.outer is None and count < ENOUGH_EXCHANGES and not self.overlap
        chosen = self
        if self.outer is None:
            outer = next(one for fewer, one in _SHORT if count < fewer) if is_short else PUBLISHED
            chosen = replace(self, outer=outer)
        if count >= ENOUGH_EXCHANGES or (
            count > 0 and not is_short and chosen.outer_optimizer.momentum < MUCH_MOMENTUM
        ):
            return chosen, None
        words = (
            f"this run has {count} exchange{'' if count == 1 else 's'} between sites before its end ({num_updates} "
            f"updates, one after every {self.interval(batch)})"
        )
        remedy = "more often with a smaller every=… or early=…"
        if count == 0:
            return chosen, f"{words}: each site trains for itself. Come together {remedy}"
        words += (
            f". DiLoCo's outer momentum of 0.9 is published for 128 (arXiv:2311.08105) and overshoots in runs of fewer "
            f"than {ENOUGH_EXCHANGES}: without overlap a loss 10 % above lockstep's was measured after 7, 14 % after 16"
        )
        if is_short:
            taken = chosen.outer_optimizer
            settings = f"lr={taken.lr:g}" + (f", momentum={taken.momentum:g}, nesterov=True" if taken.momentum else "")
            return chosen, f"{words}. outer was not given: stoker.SGD({settings}) is taken, which ended 1 to 3 % above"
        return (
            chosen,
            f"{words}. outer=stoker.SGD(lr=1.0) without overlap takes their average; or come together {remedy}",
        )

    def interval(self, batch: int) -> int:
        """Updates from one exchange to the next, where an update is of `batch` samples; samples are rounded up to it.

        >>> from stoker.units import samples
        >>> LocalSGD(every=samples(1000)).interval(64)
        16

        Raises:
            BadJob: there are more fragments than that, or an exchange would outlast it.
        """
        return self._checked(_whole_updates(self.every, batch))

    def early_interval(self, batch: int) -> tuple[int, int]:
        """Updates from one exchange to the next at first, and for how many updates, which are whole intervals.

        >>> from stoker.units import updates
        >>> LocalSGD(every=updates(16), early=(updates(4), updates(90))).early_interval(64)
        (4, 92)

        Raises:
            BadJob: as `interval`, or that is longer than the later ones are.
        """
        if self.early is None:
            return self.interval(batch), 0
        interval, length = (_whole_updates(one, batch) for one in self.early)
        if interval > self.interval(batch):
            raise BadJob(
                f"early exchanges, every {interval} updates, are further apart than later ones, every "
                f"{self.interval(batch)}",
                remedy="Use a shorter interval at first: sites grow apart fastest then.",
            )
        return self._checked(interval), interval * math.ceil(length / interval)

    def _checked(self, interval: int) -> int:
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

    def rate_factor(self, batch: int, part: int) -> float:
        """What the job's learning rate is multiplied by on a site that takes `part` samples of each batch.

        An optimiser that divides by the gradient's root mean square makes updates of one length. Where noise is most of
        that, of n times fewer samples the gradient is sqrt(n) times noisier, and an update goes 1/sqrt(n) as far the
        way that all samples agree on. Sites that are averaged then learn as with a rate sqrt(n) times lower. The factor
        undoes it, and leaves the noise of the average what it is in lockstep: the square-root rule of Malladi et al.
        2022, https://arxiv.org/abs/2205.10287, read backwards. Gradients without noise need none.

        >>> from stoker.units import updates
        >>> DiLoCo(every=updates(16), rate="by_noise").rate_factor(32, 8)
        2.0
        """
        return math.sqrt(batch / part) if self.rate == "by_noise" else 1.0


@dataclass(frozen=True, kw_only=True)
class DiLoCo(Sync):
    """Sites come together by an outer optimiser, whose gradient is how far they went on average.

    Args:
        every: how many updates each site makes between two exchanges: `stoker.updates(50)`; or samples of all sites
            together, rounded up to whole updates.
        outer: the optimiser of the shared weights; None: SGD(lr=0.7, momentum=0.9, nesterov=True) as published. In runs
            of fewer than 100 exchanges without overlap, which that is not for, SGD(lr=1.0, momentum=0.4,
            nesterov=True), and of fewer than 50 the average of the sites, SGD(lr=1.0).
        compress: "int8" sends a quarter of the bytes; an element is off by at most 1/254 of the largest one of its
            1,024. "int4" sends an eighth of them: at most 1/14 of the largest one of its 128. "none" sends all.
        fragments: into so many equal parts the parameters are cut, which take turns: the same bytes in all, but spread
            evenly over time.
        overlap: an exchange may take so many updates; its result is taken over just then, whether it was there sooner
            or has to be waited for, so that a run does not depend on the link. 0: sites wait at once.
        keep: with `overlap`, this share of a site's own weights stays in what it takes over, for the updates it made
            meanwhile.
        rate: "by_noise" multiplies the job's learning rate on each site by sqrt(batch / the site's part of it), for
            inner optimisers whose updates are as long whatever the gradient's size (Adam and its kin). See
            `rate_factor`.
        early: an interval and how long it goes: `(stoker.updates(4), stoker.updates(300))` comes together after every 4
            updates for the first 300, when sites grow apart fastest; the second is rounded up to whole intervals.

    Raises:
        BadSetting: a setting is out of range, or `outer` is no stoker.SGD.
    """

    outer: SGD | None = None
    compress: Compression = "int8"
    fragments: int = 1
    overlap: int = 0
    keep: float = 0.5
    rate: Rate = field(default="as_given", metadata=OMIT_FROM_SPEC)
    early: Early | None = field(default=None, metadata=OMIT_FROM_SPEC)


@dataclass(frozen=True, kw_only=True)
class LocalSGD(Sync):
    """Sites come together by taking over the average of their weights.

    Args:
        every: how many updates each site makes between two exchanges: `stoker.updates(50)`; or samples of all sites
            together, rounded up to whole updates.
        rate, early: as `DiLoCo`'s.

    Raises:
        BadSetting: the interval is neither in updates nor in samples.
    """

    outer: SGD | None = field(default=SGD(lr=1.0), init=False)
    compress: Compression = field(default="none", init=False)
    fragments: int = field(default=1, init=False)
    overlap: int = field(default=0, init=False)
    keep: float = field(default=0.0, init=False)
    rate: Rate = field(default="as_given", metadata=OMIT_FROM_SPEC)
    early: Early | None = field(default=None, metadata=OMIT_FROM_SPEC)
