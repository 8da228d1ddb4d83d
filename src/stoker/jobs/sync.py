"""How replicas on slow links are synchronised: settings, carried out in `stepping/diloco.py`.

What: each replica, called a site here, takes its part of every batch and makes updates of its own, without
communication; after an interval all sites take over their average progress. That changes what is learned, so it belongs
to the Job.
Use when: one update is shorter than summing its gradients over the link.
Costs: two copies of the parameters on each site; a somewhat higher loss with longer intervals and more sites.
Does not combine with: an average of the weights (`average`), a step of the job's own, skipping or rolling back updates,
layouts other than replicas, samples that are coupled over more of a batch than one site takes.
Sources: local SGD, Stich 2018, https://arxiv.org/abs/1805.09767; DiLoCo, Douillard et al. 2023,
https://arxiv.org/abs/2311.08105; fragments and overlap, Douillard et al. 2025, https://arxiv.org/abs/2501.18512.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from stoker.errors import BadJob, BadSetting
from stoker.jobs.optimizers import SGD
from stoker.units import Duration

Compression = Literal["int8", "int4", "none"]
"""Format of the elements on the link: integers of 8 bits, with a scale for every 1,024, or of 4; or unchanged."""

Rate = Literal["as_given", "by_noise"]
"""A site's learning rate: the job's, or a higher one, since a part of the batch has a noisier gradient."""

MUCH_MOMENTUM = 0.5
"""Least outer momentum for which a short run gets a warning."""

PUBLISHED = SGD(lr=0.7, momentum=0.9, nesterov=True)
"""DiLoCo's outer optimiser: Douillard et al. 2023, table 5, for 128 exchanges of 500 updates."""

ENOUGH_EXCHANGES = 100
"""With fewer exchanges in a run, a momentum of 0.9 overshoots: docs/slow-links.md has the cost."""

_SHORT = ((50, SGD(lr=1.0)), (ENOUGH_EXCHANGES, SGD(lr=1.0, momentum=0.4, nesterov=True)))
"""Instead of PUBLISHED in runs of fewer exchanges without overlap; the first is the average of the sites' weights."""

Early = tuple[Duration, Duration]
"""A shorter interval at first, and how long it applies."""


def _is_counted(given: object) -> bool:
    return isinstance(given, Duration) and given.unit in ("updates", "samples")


def _whole_updates(length: Duration, batch: int) -> int:
    """A duration in updates of `batch` samples, rounded up, at least 1 [updates]."""
    return max(1, math.ceil(length.value if length.unit == "updates" else length.value / batch))


@dataclass(frozen=True, kw_only=True)
class Sync:
    """Base of `DiLoCo` and `LocalSGD`.

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
        early: object = self.early
        is_early = isinstance(early, tuple) and len(early) == 2 and all(map(_is_counted, early))
        if early is not None and not is_early:
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
            raise BadSetting(f"the outer momentum must be in [0, 1), got {outer.momentum}")
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
        """Optimiser of the shared weights: the given one, or the published one."""
        return PUBLISHED if self.outer is None else self.outer

    def exchanges(self, batch: int, num_updates: int) -> int:
        """Number of exchanges of all weights in a run of `num_updates`, before the one at its end.

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
        """The same with its outer optimiser chosen for a run of `num_updates`, and a warning for the user, or None.

        If none was given, it is the published one; in runs of fewer than ENOUGH_EXCHANGES without overlap one with less
        momentum, or none, since momentum has no time to settle.
        """
        count = self.exchanges(batch, num_updates)
        is_short = self.outer is None and count < ENOUGH_EXCHANGES and not self.overlap
        chosen = self
        if self.outer is None:
            outer = next(optimizer for fewer, optimizer in _SHORT if count < fewer) if is_short else PUBLISHED
            chosen = replace(self, outer=outer)
        has_little_momentum = not is_short and chosen.outer_optimizer.momentum < MUCH_MOMENTUM
        if count >= ENOUGH_EXCHANGES or (count > 0 and has_little_momentum):
            return chosen, None
        warning = (
            f"this run has {count} exchange{'' if count == 1 else 's'} between sites before its end ({num_updates} "
            f"updates, one after every {self.interval(batch)})"
        )
        remedy = "more often with a smaller every=… or early=…"
        if count == 0:
            return chosen, f"{warning}: each site trains for itself. Come together {remedy}"
        warning += (
            f". DiLoCo's outer momentum of 0.9 is published for 128 (arXiv:2311.08105) and overshoots in runs of fewer "
            f"than {ENOUGH_EXCHANGES}: without overlap a loss 10 % above lockstep's was measured after 7, 14 % after 16"
        )
        if is_short:
            outer = chosen.outer_optimizer
            momentum = f", momentum={outer.momentum:g}, nesterov=True" if outer.momentum else ""
            taken = f"stoker.SGD(lr={outer.lr:g}{momentum})"
            return chosen, f"{warning}. outer was not given: {taken} is taken, which ended 1 to 3 % above"
        advice = f"outer=stoker.SGD(lr=1.0) without overlap takes their average; or come together {remedy}"
        return chosen, f"{warning}. {advice}"

    def interval(self, batch: int) -> int:
        """Updates from one exchange to the next, with `batch` samples each, rounded up [updates].

        >>> from stoker.units import samples
        >>> LocalSGD(every=samples(1000)).interval(64)
        16

        Raises:
            BadJob: there are more fragments than that, or an exchange takes longer.
        """
        return self._checked(_whole_updates(self.every, batch))

    def early_interval(self, batch: int) -> tuple[int, int]:
        """The early interval, and how long it applies in whole intervals, both [updates].

        >>> from stoker.units import updates
        >>> LocalSGD(every=updates(16), early=(updates(4), updates(90))).early_interval(64)
        (4, 92)

        Raises:
            BadJob: as `interval`, or it is longer than the later interval.
        """
        if self.early is None:
            return self.interval(batch), 0
        interval, length = (_whole_updates(duration, batch) for duration in self.early)
        if interval > self.interval(batch):
            raise BadJob(
                f"early exchanges, every {interval} updates, are rarer than later ones, every {self.interval(batch)}",
                remedy="Use a shorter interval at first: sites diverge fastest then.",
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
        """Factor of the job's learning rate on a site that takes `part` samples of each batch [1].

        An optimiser that divides by the gradient's root mean square makes updates of constant length. If most of the
        gradient is noise, that of n times fewer samples is sqrt(n) times noisier, and an update moves 1/sqrt(n) as far
        in the direction that all samples share. Averaged sites then learn as with a rate sqrt(n) times lower. The
        factor compensates, and the noise of the average is that of lockstep training: the square-root rule of Malladi
        et al. 2022, https://arxiv.org/abs/2205.10287, in reverse. Gradients without noise need no factor.

        >>> from stoker.units import updates
        >>> DiLoCo(every=updates(16), rate="by_noise").rate_factor(32, 8)
        2.0
        """
        return math.sqrt(batch / part) if self.rate == "by_noise" else 1.0


@dataclass(frozen=True, kw_only=True)
class DiLoCo(Sync):
    """Synchronise by an outer optimiser, whose gradient is the sites' average change.

    Args:
        every: updates of each site between two exchanges: `stoker.updates(50)`; or samples of all sites together,
            rounded up to whole updates.
        outer: the optimiser of the shared weights; None: SGD(lr=0.7, momentum=0.9, nesterov=True) as published. In runs
            of fewer than 100 exchanges without overlap instead SGD(lr=1.0, momentum=0.4, nesterov=True), and of fewer
            than 50 the average of the sites, SGD(lr=1.0).
        compress: "int8" sends a quarter of the bytes; an element is off by at most 1/254 of the largest one of its
            1,024. "int4" sends an eighth of them: at most 1/14 of the largest one of its 128. "none" sends all.
        fragments: number of equal parts of the parameters, which are exchanged in turn: the same bytes, but spread
            evenly over time.
        overlap: number of updates that an exchange may take; its result is applied exactly then, even if it arrives
            sooner or has to be waited for, so that a run does not depend on the link. 0: sites wait at once.
        keep: with `overlap`, share of a site's own weights in the result that it applies, for its updates during the
            exchange.
        rate: "by_noise" multiplies the job's learning rate on each site by sqrt(batch / the site's part of it), for
            inner optimisers whose updates do not depend on the gradient's size (such as Adam). See `rate_factor`.
        early: a shorter interval at first, and how long it applies: `(stoker.updates(4), stoker.updates(300))`
            exchanges after every 4 updates for the first 300, when sites diverge fastest; the second is rounded up to
            whole intervals.

    Raises:
        BadSetting: a setting is out of range, or `outer` is not a stoker.SGD.
    """

    outer: SGD | None = None
    compress: Compression = "int8"
    fragments: int = 1
    overlap: int = 0
    keep: float = 0.5
    rate: Rate = "as_given"
    early: Early | None = None


@dataclass(frozen=True, kw_only=True)
class LocalSGD(Sync):
    """Synchronise by taking the average of the sites' weights.

    Args:
        every: updates of each site between two exchanges: `stoker.updates(50)`; or samples of all sites together,
            rounded up to whole updates.
        rate, early: as `DiLoCo`'s.

    Raises:
        BadSetting: the interval is neither in updates nor in samples.
    """

    outer: SGD | None = field(default=SGD(lr=1.0), init=False)
    compress: Compression = field(default="none", init=False)
    fragments: int = field(default=1, init=False)
    overlap: int = field(default=0, init=False)
    keep: float = field(default=0.0, init=False)
    rate: Rate = "as_given"
    early: Early | None = None
