"""Sites that train apart and come together after an interval: the shared weights, and when they move.

What: after each interval the pseudo-gradient of a fragment (the shared weights less a site's own) is sent to all sites;
its mean, weighted by the samples that each site trained on, is the gradient of an outer SGD on the shared weights,
which every site then takes over. With overlap it is taken over a fixed number of updates later. Everything that is
shared is computed by every site from the same bytes in the same order, so on equal hardware it is equal bit for bit.
Use when, costs, does not combine with: see `stoker.jobs.sync`. Beside parameters, running statistics of batch norms are
averaged, with the first fragment. The inner optimiser's state stays on its site, and so do other buffers.
Sources: as in `stoker.jobs.sync`. Unlike DiLoCo's, the samples are not sorted by site: each takes its part of every
batch, in the order that one process would.

What all sites hold alike: the shared weights, their momentum, and which exchanges are due.

After which updates each fragment is sent: pure arithmetic, the same on every site.

Which samples of a batch each site takes: parts in proportion to speed, made of whole groups. Pure arithmetic.

All sites make equally many updates, so the order of the samples, the schedule and the number of updates stay what they
are; a slower site has fewer samples in each. (Asynchronous local SGD gives it fewer updates instead: Liu et al. 2024,
https://arxiv.org/abs/2401.09135, section 5.)
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from stoker.errors import BadJob, RunFailed
from stoker.jobs import SGD, Job
from stoker.jobs.sync import Sync
from stoker.loading.batches import Batch, Pass, Split
from stoker.records import Coupling
from stoker.stepping.diloco_exchange import (
    MessageFormat,
    PendingExchange,
    RunningStatistics,
    SiteNote,
    SiteProgress,
    codec_of,
    fragments_of,
)
from stoker.stepping.world import SIGNALS, World


@dataclass(frozen=True)
class Exchanged:
    """An exchange that was taken over: after which update, of which fragment, and what the sites did before it.

    `loss` is the mean over the samples of all sites since the fragment's last exchange, each before its own update;
    `speeds` are samples/s of each site while it was at work, 0 where it did nothing; `num_bytes` is what this site
    sent.
    """

    update: int
    fragment: int
    samples: int
    loss: float
    speeds: tuple[float, ...]
    num_bytes: int


class OuterOptimizer:
    """Brings the sites of `world` together, as `sync` says; each site's Step has one.

    Args:
        sync: the job's.
        job: what is trained.
        coupling: what the probe found of it.
        model: on its device, with the same weights on every site.
        world: a replica for each site.
        clock: seconds that pass, for the speeds that sites tell each other.

    Raises:
        BadJob: the interval is too short for its fragments or overlap, or a batch has fewer groups of coupled samples
            than there are sites.
    """

    def __init__(
        self,
        sync: Sync,
        job: Job,
        coupling: Coupling,
        model: nn.Module,
        world: World,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.sync, self._calendar = sync, ExchangeSchedule.of(sync, job.batch)
        self._model, self._world, self._clock = model, world, clock
        self._batch, self._group = job.batch, coupling.group
        self._fragments = fragments_of((p for p in model.parameters() if p.requires_grad), sync.fragments)
        start = [fragment.read() for fragment in self._fragments]
        self._statistics = RunningStatistics(model, start[0].dtype, start[0].device)
        self.shared = SharedWeights(sync.outer_optimizer, start, self._statistics.read())
        sizes = [self.shared.statistics.numel()] + [0] * (sync.fragments - 1)
        self._forms = [
            MessageFormat(codec_of(sync.compress), size, one.numel(), one.dtype)
            for size, one in zip(sizes, start, strict=True)
        ]
        self._done = SiteProgress(0, 0.0, torch.zeros((), dtype=torch.float64, device=start[0].device))
        self._done_before = [self._done] * sync.fragments
        self._sendings: dict[int, PendingExchange] = {}
        self._left_at = clock()
        self.shares = self._equal_shares()
        """Each site's samples of a batch; to be the same on every site, and changed between two batches only."""
        self.latest: Exchanged | None = None
        self.last_loss = torch.zeros((), device=start[0].device)
        """The mean loss of this site's last update."""
        self.sent_bytes = 0
        """What this site has sent so far, without what the network adds."""

    def split(self) -> Split:
        """What of each batch this site takes."""
        if self._num_sites == 1:
            return Split()
        return SiteSplit(self._world.data_rank, self._num_sites, self._group, shares=self.shares)

    @property
    def rate_factor(self) -> float:
        """What the job's learning rate is multiplied by on this site."""
        return self.sync.rate_factor(self._batch, self.shares[self._world.data_rank])

    @torch.no_grad()
    def after(self, update: int, samples: int, loss: torch.Tensor) -> None:
        """Take note of update number `update` on `samples` of this site's, of mean `loss`, and exchange what is due.

        Raises:
            RuntimeError: another site does not answer, or is gone. The update is made: carry `state` over to the next
                world, and go on by `regroup`.
            RunFailed: what a site sent is not finite.
        """
        now = self._clock()
        done = self._done
        loss_sum = done.loss_sum + loss.detach().double() * samples if samples else done.loss_sum
        self._done = SiteProgress(done.samples + samples, done.seconds + now - self._left_at, loss_sum)
        self.shared.update, self.last_loss = update, loss.detach()
        self._world.signals.hear(torch.zeros(len(SIGNALS)))
        self._advance()
        self._left_at = self._clock()

    @torch.no_grad()
    def settle(self) -> None:
        """Bring all sites together now, whatever the interval: when training ends, and nowhere else.

        Raises:
            RuntimeError, RunFailed: as `after`.
        """
        shared = self.shared
        for fragment in self._under_way():
            self._take_over(fragment)
        for fragment in range(len(self._fragments)):
            if shared.sent[fragment] != shared.update:
                self._send(fragment, due=shared.update)
        for fragment in self._under_way():
            self._take_over(fragment)
        self._adopt()

    @torch.no_grad()
    def begin_at_weights(self) -> None:
        """Let the shared weights be the model's, which are the same on every site; before the first update."""
        for start, fragment in zip(self.shared.start, self._fragments, strict=True):
            start.copy_(fragment.read())
        self.shared.statistics.copy_(self._statistics.read())

    @torch.no_grad()
    def weights(self) -> dict[str, torch.Tensor]:
        """The model's state with the shared weights: the same on every site, and the ones worth keeping."""
        shared = self.shared
        rows = {id(p): torch.empty(p.numel(), dtype=p.dtype, device=p.device)
                for p in self._model.parameters() if p.requires_grad}  # fmt: skip
        for fragment, start in zip(self._fragments, shared.start, strict=True):
            fragment.into(rows, start)
        rows |= self._statistics.parted(shared.statistics)
        live = self._model.state_dict(keep_vars=True)
        return {
            name: rows[id(one)].view(one.shape).to(one.dtype) if id(one) in rows else one.detach().clone()
            for name, one in live.items()
        }

    def state(self) -> dict[str, Any]:
        """What a checkpoint needs beside model and inner optimiser: `shared`, and `site`, which is this site's own."""
        messages = {str(fragment): sending.message for fragment, sending in self._sendings.items()}
        before = [one.state() for one in self._done_before]
        return {
            "shared": self.shared.state(),
            "site": {"messages": messages, "done": self._done.state(), "before": before},
        }

    @torch.no_grad()
    def load(self, state: dict[str, Any]) -> None:
        """Go on from what `state` gave, after model and inner optimiser; what was on its way is sent again.

        Every site does this at once. One whose own part is missing takes over the shared weights.

        Raises:
            ValueError: the state is of another model, or of another number of fragments.
            RuntimeError: as `after`.
        """
        self._send_again(self._put_back(state))
        self._left_at = self._clock()

    @torch.no_grad()
    def regroup(self, carried: dict[str, Any] | None) -> None:
        """Go on with the sites of this world, after model and inner optimiser; all of them call this.

        The shared weights are those of the site that is furthest. What was on its way is sent again, by those that are
        as far; the others begin from the shared weights, and what they did since counts for nothing.

        Args:
            carried: the `state` of this site in the world before; None: it was not there.

        Raises:
            RuntimeError, RunFailed: as `after`.
        """
        messages = {} if carried is None else self._put_back(carried)
        applied = NEVER if carried is None else self.shared.applied
        self._follow_furthest(applied)
        if applied < self.shared.applied:
            self._begin_anew()
            messages = {}
        self._send_again(messages)
        self._advance()
        self._left_at = self._clock()

    def _put_back(self, state: dict[str, Any]) -> dict[int, torch.Tensor]:
        """Take over what `state` gave; the messages of this site that were on their way, by fragment."""
        self.shared.load(state["shared"])
        site = state.get("site")
        if site is None:
            self._begin_anew()
            return {}
        device = self._done.loss_sum.device
        self._done, *self._done_before = (SiteProgress.of(one, device) for one in (site["done"], *site["before"]))
        return {int(number): message.to(device) for number, message in site["messages"].items()}

    @property
    def _num_sites(self) -> int:
        return self._world.layout.data_size

    def _equal_shares(self) -> tuple[int, ...]:
        return site_shares((1.0,) * self._num_sites, self._batch, self._group or 1)

    def _under_way(self) -> list[int]:
        return sorted(self._sendings)

    def _is_due(self, fragment: int) -> bool:
        """Whether an interval of the fragment has just ended."""
        last = self.shared.update
        return self._calendar.is_due(fragment, last + 1) and self.shared.sent[fragment] != last

    def _advance(self) -> None:
        """Take over what is due, send what is due; without overlap the one follows the other at once."""
        self._take_over_due()
        for fragment in range(len(self._fragments)):
            if self._is_due(fragment):
                self._send(fragment, due=self.shared.update + self.sync.overlap)
        self._take_over_due()

    def _take_over_due(self) -> None:
        for fragment in self._under_way():
            if self.shared.due[fragment] <= self.shared.update:
                self._take_over(fragment)

    def _send(self, fragment: int, due: int) -> None:
        self._put_on_its_way(fragment, self._message(fragment))
        self.shared.sent[fragment], self.shared.due[fragment] = self.shared.update, due
        self._done_before[fragment] = self._done

    def _message(self, fragment: int) -> torch.Tensor:
        """What this site has to tell of a fragment."""
        values = self.shared.start[fragment] - self._fragments[fragment].read()
        statistics = self._statistics.read()[: self._forms[fragment].num_statistics]
        done = self._done.since(self._done_before[fragment])
        note = torch.cat([done, self._world.signals.words(done)])
        return self._forms[fragment].pack(note, statistics, values)

    def _put_on_its_way(self, fragment: int, message: torch.Tensor) -> None:
        self._sendings[fragment] = PendingExchange(message, self._world)
        self.sent_bytes += (self._num_sites - 1) * message.numel()

    def _send_again(self, messages: dict[int, torch.Tensor]) -> None:
        """Put on its way what the calendar says is; what this site has not said yet, it says now."""
        self._sendings.clear()
        for fragment, due in enumerate(self.shared.due):
            if due != NEVER:
                if fragment not in messages:
                    messages[fragment] = self._message(fragment)
                    self._done_before[fragment] = self._done
                self._put_on_its_way(fragment, messages[fragment])

    def _begin_anew(self) -> None:
        """Take over the shared weights; what was done until now counts for nothing."""
        self._adopt()
        self._done_before = [self._done] * len(self._fragments)

    def _follow_furthest(self, applied: int) -> None:
        """Take over what is shared from the site that is furthest; nothing long is sent where all are as far.

        `applied` is how many exchanges this site has taken over; NEVER where it has just come.
        """
        shared, group = self.shared, self._world.data
        if group is None:
            return
        device = self._done.loss_sum.device
        mine = torch.tensor([applied, shared.update], dtype=torch.int64, device=device)
        found = [torch.empty_like(mine) for _ in range(self._num_sites)]
        dist.all_gather(found, mine, group=group)
        places = [tuple(one.tolist()) for one in found]
        source = places.index(max(places))
        dates = torch.tensor(shared.calendar(), dtype=torch.int64, device=device)
        dist.broadcast(dates, group=group, group_src=source)
        shared.set_calendar(dates.tolist())
        if len({number for number, _ in places}) > 1:
            for tensor in shared.tensors():
                dist.broadcast(tensor, group=group, group_src=source)

    def _take_over(self, fragment: int) -> None:
        """Wait for what was sent, move the shared weights, and take them over."""
        messages = self._sendings[fragment].received()
        form, shared = self._forms[fragment], self.shared
        notes = [form.note(message) for message in messages]
        samples = sum(note.samples for note in notes)
        gradient, statistics = torch.zeros_like(shared.start[fragment]), torch.zeros_like(shared.statistics)
        for site, (message, note) in enumerate(zip(messages, notes, strict=True)):
            if note.samples:
                weight = note.samples / samples
                gradient.add_(_finite(form.values(message), site, shared.update), alpha=weight)
                if form.num_statistics:
                    statistics.add_(form.statistics(message), alpha=weight)
        if samples:
            shared.step(fragment, gradient)
            if form.num_statistics:
                shared.statistics.copy_(statistics)
        self._merge(fragment)
        del self._sendings[fragment]
        shared.due[fragment] = NEVER
        shared.applied += 1
        self._note(fragment, notes, int(samples), messages[0].numel())

    def _merge(self, fragment: int) -> None:
        """Take over a fragment's shared weights, but for the share that is kept for updates made meanwhile."""
        shared, keep = self.shared, self.sync.keep if self.sync.overlap else 0.0
        place = self._fragments[fragment]
        place.write(torch.lerp(shared.start[fragment], place.read(), keep) if keep else shared.start[fragment])
        if self._forms[fragment].num_statistics:
            statistics = self._statistics
            statistics.write(torch.lerp(shared.statistics, statistics.read(), keep) if keep else shared.statistics)

    def _adopt(self) -> None:
        """Take over all shared weights as they are."""
        for fragment, start in zip(self._fragments, self.shared.start, strict=True):
            fragment.write(start)
        self._statistics.write(self.shared.statistics)

    def _note(self, fragment: int, notes: list[SiteNote], samples: int, num_bytes: int) -> None:
        self._world.signals.hear(
            torch.tensor([sum(all_say) for all_say in zip(*(n.signals for n in notes), strict=True)])
        )
        self.latest = Exchanged(
            update=self.shared.update,
            fragment=fragment,
            samples=samples,
            loss=sum(note.loss_sum for note in notes) / samples if samples else 0.0,
            speeds=tuple(note.speed for note in notes),
            num_bytes=(self._num_sites - 1) * num_bytes,
        )


def _finite(values: torch.Tensor, site: int, update: int) -> torch.Tensor:
    if not bool(values.isfinite().all()):
        raise RunFailed(
            f"what site {site} learned up to update {update + 1} is not finite",
            remedy="Lower the learning rate or set clip_norm; the last checkpoint is intact.",
        )
    return values


NEVER = -1
"""In place of an update, of which 0 is the first."""


class SharedWeights:
    """The shared weights by fragment, each a row of numbers, and what moves them.

    Args:
        settings: of the outer optimiser.
        start: each fragment's weights to begin with.
        statistics: running statistics of batch norms to begin with.
    """

    def __init__(self, settings: SGD, start: Sequence[torch.Tensor], statistics: torch.Tensor) -> None:
        self._settings = settings
        self.start = list(start)
        self.momentum = [torch.zeros_like(one) for one in start]
        self.statistics = statistics
        self.update = NEVER
        """The last update that was made."""
        self.applied = 0
        """Exchanges that were taken over."""
        self.sent = [NEVER] * len(self.start)
        """After which update each fragment was last sent."""
        self.due = [NEVER] * len(self.start)
        """After which update what is on its way is to be taken over."""

    def step(self, fragment: int, gradient: torch.Tensor) -> None:
        """Move a fragment's shared weights: SGD as `torch.optim.SGD`, in the row's own dtype."""
        rate, momentum = self._settings.lr, self._settings.momentum
        velocity = self.momentum[fragment].mul_(momentum).add_(gradient)
        direction = gradient.add(velocity, alpha=momentum) if self._settings.nesterov else velocity
        self.start[fragment].add_(direction, alpha=-rate)

    def tensors(self) -> list[torch.Tensor]:
        """All of it that is long, in one order on every site."""
        return [*self.start, *self.momentum, self.statistics]

    def calendar(self) -> list[int]:
        """All of it that is dates, in one order on every site."""
        return [self.update, self.applied, *self.sent, *self.due]

    def set_calendar(self, dates: Sequence[int]) -> None:
        """Take over what `calendar` gave."""
        count = len(self.start)
        self.update, self.applied = dates[0], dates[1]
        self.sent, self.due = list(dates[2 : 2 + count]), list(dates[2 + count :])

    def state(self) -> dict[str, Any]:
        """Copies of all of it."""
        return {"tensors": [one.clone() for one in self.tensors()], "calendar": self.calendar()}

    def load(self, state: dict[str, Any]) -> None:
        """Take over what `state` gave.

        Raises:
            ValueError: it is of another model, or of another number of fragments.
        """
        here, there = self.tensors(), state["tensors"]
        if [one.numel() for one in here] != [one.numel() for one in there]:
            sizes = [sum(one.numel() for one in some) for some in (here, there)]
            raise ValueError(f"shared weights and momenta of {len(here)} parts with {sizes[0]} numbers cannot be had "
                             f"from {len(there)} parts with {sizes[1]}")  # fmt: skip
        for mine, theirs in zip(here, there, strict=True):
            mine.copy_(theirs)
        self.set_calendar(state["calendar"])


@dataclass(frozen=True)
class ExchangeSchedule:
    """Fragments take turns within an interval [updates], and within a shorter one for the first updates of a run."""

    fragments: int
    interval: int
    early_interval: int
    early_updates: int

    @classmethod
    def of(cls, sync: Sync, batch: int) -> ExchangeSchedule:
        """As a job says, whose updates are of `batch` samples.

        Raises:
            BadJob: an interval is too short for its fragments or overlap.
        """
        return cls(sync.fragments, sync.interval(batch), *sync.early_interval(batch))

    def is_due(self, fragment: int, updates: int) -> bool:
        """Whether an interval of the fragment ends when so many updates are made.

        >>> calendar = Calendar(fragments=2, interval=8, early_interval=4, early_updates=8)
        >>> [updates for updates in range(1, 30) if calendar.is_due(0, updates)]
        [4, 8, 16, 24]
        >>> [updates for updates in range(1, 30) if calendar.is_due(1, updates)]
        [2, 6, 12, 20, 28]
        """
        if updates <= 0:
            return False
        if updates <= self.early_updates:
            return (updates - self._turn(fragment, self.early_interval)) % self.early_interval == 0
        return (updates - self.early_updates - self._turn(fragment, self.interval)) % self.interval == 0

    def _turn(self, fragment: int, interval: int) -> int:
        """How far into an interval the fragment has its turn."""
        return fragment * interval // self.fragments


def site_shares(speeds: Sequence[float], batch: int, group: int = 1) -> tuple[int, ...]:
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
