"""DiLoCo and local SGD: sites train on their own and exchange pseudo-gradients after an interval.

What: after each interval the pseudo-gradient of a fragment (the shared weights less a site's own) is sent to all sites;
its mean, weighted by the samples that each site trained on, is the gradient of an outer SGD on the shared weights,
which every site then takes over. With overlap that happens a fixed number of updates later. Every site computes the
shared values from the same bytes in the same order, so on equal hardware they are equal bit for bit.
Use when, costs, does not combine with: see `stoker.jobs.sync`. Running statistics of batch norms are averaged with the
first fragment; the inner optimiser's state and other buffers stay on their site.
Sources: as in `stoker.jobs.sync`. Unlike DiLoCo's, the samples are not sorted by site: each takes its part of every
batch, in the order that one process would. All sites make equally many updates, so the order of the samples, the
schedule and the number of updates stay what they are; a slower site can have fewer samples in each. (Asynchronous local
SGD gives it fewer updates instead: Liu et al. 2024, https://arxiv.org/abs/2401.09135, section 5.)
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
    CODECS,
    MessageFormat,
    PendingExchange,
    RunningStatistics,
    SiteProgress,
    fragments_of,
)
from stoker.stepping.layouts.base import Strategy
from stoker.stepping.message_folder import BadMessage, PendingFiles
from stoker.stepping.update_rule import UpdateRule
from stoker.stepping.weight_averaging import SavedWeights
from stoker.stepping.world import SIGNALS, World


@dataclass(frozen=True)
class Exchanged:
    """A completed exchange: its update and fragment, and the training of the sites since the fragment's last one.

    `loss` is the mean over the samples of all sites, each before its own update; `speeds` are each site's while it was
    at work [samples/s], 0 where it did nothing; `num_bytes` is what this site sent [bytes].
    """

    update: int
    fragment: int
    samples: int
    loss: float
    speeds: tuple[float, ...]
    num_bytes: int


class OuterOptimizer:
    """Moves the shared weights of the sites of `world`, as `sync` says; each site's Step has one.

    Args:
        sync: the job's.
        job: the job that is trained.
        coupling: the coupling of its samples.
        model: on its device, with the same weights on every site.
        world: a replica for each site.
        clock: time [s], for the speeds that sites report to each other.

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
        self.sync, self._calendar = sync, ExchangeSchedule.of(sync, job.batch_size)
        self._model, self._world = model, world
        # Messages in files hold no times, so that a site that is made again sends the same bytes.
        self._clock = clock if world.messages is None else lambda: 0.0
        self._batch, self._group = job.batch_size, coupling.group
        self._fragments = fragments_of((p for p in model.parameters() if p.requires_grad), sync.fragments)
        start = [fragment.read() for fragment in self._fragments]
        self._statistics = RunningStatistics(model, start[0].dtype, start[0].device)
        self.shared = SharedWeights(sync.outer_optimizer, start, self._statistics.read())
        sizes = [self.shared.statistics.numel()] + [0] * (sync.fragments - 1)
        self._forms = [
            MessageFormat(CODECS[sync.compress], size, weights.numel(), weights.dtype)
            for size, weights in zip(sizes, start, strict=True)
        ]
        self._done = SiteProgress(0, 0.0, torch.zeros((), dtype=torch.float64, device=start[0].device))
        self._done_before = [self._done] * sync.fragments
        self._sendings: dict[int, PendingExchange | PendingFiles] = {}
        self._needed: dict[int, int] = {}
        self._left_at = self._clock()
        self.shares = site_shares((1.0,) * self._num_sites, self._batch, self._group or 1)
        """Each site's samples of a batch; equal on every site, and changed between two batches only."""
        self.latest: Exchanged | None = None
        self.last_loss = torch.zeros((), device=start[0].device)
        """The mean loss of this site's last update."""
        self.sent_bytes = 0
        """Bytes that this site has sent so far, without the network's own."""

    def split(self) -> Split:
        """This site's part of each batch."""
        if self._num_sites == 1:
            return Split()
        return SiteSplit(self._world.site, self._num_sites, self._group, shares=self.shares)

    @property
    def rate_factor(self) -> float:
        """Factor of the job's learning rate on this site [1]."""
        return self.sync.rate_factor(self._batch, self.shares[self._world.site])

    @torch.no_grad()
    def after(self, update: int, samples: int, loss: torch.Tensor) -> None:
        """Record update number `update` on `samples` of this site's, of mean `loss`, and make the exchanges due.

        Raises:
            RuntimeError: another site does not answer, or is gone. The update is made: carry `state` over to the next
                world, and go on by `regroup`.
            RunFailed: a site sent values that are not finite.
        """
        now = self._clock()
        done = self._done
        loss_sum = done.loss_sum + loss.detach().double() * samples if samples else done.loss_sum
        self._done = SiteProgress(done.samples + samples, done.seconds + now - self._left_at, loss_sum)
        self.shared.update, self.last_loss = update, loss.detach()
        self._world.signals.receive(torch.zeros(len(SIGNALS)))
        self._advance()
        self._left_at = self._clock()

    @torch.no_grad()
    def settle(self) -> None:
        """Bring all sites together now, whatever the interval: when training ends, and nowhere else.

        Raises:
            RuntimeError, RunFailed: as `after`.
        """
        shared = self.shared
        for fragment in sorted(self._sendings):
            self._take_over(fragment)
        for fragment in range(len(self._fragments)):
            if shared.sent[fragment] != shared.update:
                self._send(fragment, due=shared.update)
        for fragment in sorted(self._sendings):
            self._take_over(fragment)
        self._adopt()

    @torch.no_grad()
    def begin_at_weights(self) -> None:
        """Set the shared weights to the model's, which are equal on every site; before the first update."""
        for start, fragment in zip(self.shared.start, self._fragments, strict=True):
            start.copy_(fragment.read())
        self.shared.statistics.copy_(self._statistics.read())

    @torch.no_grad()
    def weights(self) -> dict[str, torch.Tensor]:
        """The model's state with the shared weights: equal on every site, and kept in checkpoints."""
        shared = self.shared
        trained = [p for p in self._model.parameters() if p.requires_grad]
        rows = {id(p): torch.empty(p.numel(), dtype=p.dtype, device=p.device) for p in trained}
        for fragment, start in zip(self._fragments, shared.start, strict=True):
            fragment.into(rows, start)
        rows |= self._statistics.parted(shared.statistics)
        live = self._model.state_dict(keep_vars=True)
        return {
            name: rows[id(held)].view(held.shape).to(held.dtype) if id(held) in rows else held.detach().clone()
            for name, held in live.items()
        }

    def state(self) -> dict[str, Any]:
        """The part of a checkpoint besides model and inner optimiser: `shared`, and this site's own `site`."""
        messages = {str(fragment): sending.message for fragment, sending in self._sendings.items()}
        before = [progress.state() for progress in self._done_before]
        made = self.shared.update + 1
        self._needed[made] = min([made, *(self.shared.sent[fragment] for fragment in self._sendings)])
        return {
            "shared": self.shared.state(),
            "site": {"messages": messages, "done": self._done.state(), "before": before, **self._place},
        }

    @property
    def _place(self) -> dict[str, list[int]]:
        """Which site's state this is, where each has checkpoints of its own."""
        return {} if self._world.messages is None else {"place": [self._world.site, self._num_sites]}

    def saved(self, num_updates: int) -> None:
        """Note that a checkpoint after so many updates is on the disk: what none needs any more is deleted.

        Messages since the checkpoint before are kept: the newest one may be found damaged.
        """
        known = sorted(updates for updates in self._needed if updates <= num_updates)
        if self._world.messages is not None and len(known) > 1:
            self._world.messages.needs_from(self._needed[known[-2]])
        for updates in known[:-2]:
            del self._needed[updates]

    @torch.no_grad()
    def load(self, state: dict[str, Any]) -> None:
        """Restore `state`, after model and inner optimiser; pending messages are sent again.

        Collective. A site whose own part is missing takes over the shared weights.

        Raises:
            ValueError: the state is of another model, another number of fragments, or another site.
            RuntimeError: as `after`.
        """
        self._send_again(self._put_back(state))
        self._left_at = self._clock()

    @torch.no_grad()
    def regroup(self, carried: dict[str, Any] | None) -> None:
        """Go on with the sites of this world, after model and inner optimiser; collective.

        The shared weights are those of the most advanced site. Sites that are equally advanced send pending messages
        again; the others begin from the shared weights, and their training since does not count.

        Args:
            carried: the `state` of this site in the world before; None: it was not part of it.

        Raises:
            RuntimeError, RunFailed: as `after`.
        """
        messages = {} if carried is None else self._put_back(carried)
        applied = NEVER if carried is None else self.shared.applied
        self._follow_most_advanced(applied)
        if applied < self.shared.applied:
            self._restart_from_shared()
            messages = {}
        self._send_again(messages)
        self._advance()
        self._left_at = self._clock()

    def _put_back(self, state: dict[str, Any]) -> dict[int, torch.Tensor]:
        """Restore `state`; returns the pending messages of this site, by fragment, without their signals."""
        site = state.get("site")
        there, here = (site or {}).get("place"), self._place.get("place")
        if there != here:
            texts = [
                "no site with a folder of messages" if at is None else f"site {at[0]} of {at[1]}"
                for at in (there, here)
            ]
            raise ValueError(f"it is of {texts[0]}, and this is {texts[1]}")
        self.shared.load(state["shared"])
        if site is None:
            self._restart_from_shared()
            return {}
        device = self._done.loss_sum.device
        self._done, *self._done_before = (SiteProgress.of(done, device) for done in (site["done"], *site["before"]))
        return {
            int(number): self._forms[int(number)].without_signals(message.to(device))
            for number, message in site["messages"].items()
        }

    @property
    def _num_sites(self) -> int:
        return self._world.num_sites

    def _advance(self) -> None:
        """Complete and begin the exchanges that are due; without overlap an exchange ends as soon as it begins."""
        self._take_over_due()
        last = self.shared.update
        for fragment in range(len(self._fragments)):
            if self._calendar.is_due(fragment, last + 1) and self.shared.sent[fragment] != last:
                self._send(fragment, due=last + self.sync.overlap)
        self._take_over_due()

    def _take_over_due(self) -> None:
        for fragment in sorted(self._sendings):
            if self.shared.due[fragment] <= self.shared.update:
                self._take_over(fragment)

    def _send(self, fragment: int, due: int) -> None:
        self.shared.sent[fragment], self.shared.due[fragment] = self.shared.update, due
        self._put_on_its_way(fragment, self._message(fragment))
        self._done_before[fragment] = self._done

    def _message(self, fragment: int) -> torch.Tensor:
        """This site's message about a fragment."""
        values = self.shared.start[fragment] - self._fragments[fragment].read()
        statistics = self._statistics.read()[: self._forms[fragment].num_statistics]
        done = self._done.since(self._done_before[fragment])
        note = torch.cat([done, self._world.signals.outgoing(done)])
        return self._forms[fragment].pack(note, statistics, values)

    def _put_on_its_way(self, fragment: int, message: torch.Tensor) -> None:
        folder, update = self._world.messages, self.shared.sent[fragment]
        self._sendings[fragment] = (
            PendingExchange(message, self._world) if folder is None else folder.send(update, fragment, message)
        )
        self.sent_bytes += (self._num_sites - 1) * message.numel()

    def _send_again(self, messages: dict[int, torch.Tensor]) -> None:
        """Send again the messages that the schedule says are pending; those that this site lacks are made now."""
        self._sendings.clear()
        for fragment, due in enumerate(self.shared.due):
            if due != NEVER:
                if fragment not in messages:
                    messages[fragment] = self._message(fragment)
                    self._done_before[fragment] = self._done
                self._put_on_its_way(fragment, messages[fragment])

    def _restart_from_shared(self) -> None:
        """Take over the shared weights; the training since the last exchange does not count."""
        self._adopt()
        self._done_before = [self._done] * len(self._fragments)

    def _follow_most_advanced(self, applied: int) -> None:
        """Take over the shared state of the most advanced site; tensors are sent only where sites differ.

        `applied` is the number of exchanges that this site has taken over; NEVER where it has just joined.
        """
        shared, group = self.shared, self._world.data
        if group is None:
            return
        device = self._done.loss_sum.device
        mine = torch.tensor([applied, shared.update], dtype=torch.int64, device=device)
        gathered = [torch.empty_like(mine) for _ in range(self._num_sites)]
        dist.all_gather(gathered, mine, group=group)
        positions = [tuple(position.tolist()) for position in gathered]
        source = positions.index(max(positions))
        dates = torch.tensor(shared.calendar(), dtype=torch.int64, device=device)
        dist.broadcast(dates, group=group, group_src=source)
        shared.set_calendar(dates.tolist())
        if len({number for number, _ in positions}) > 1:
            for tensor in shared.tensors():
                dist.broadcast(tensor, group=group, group_src=source)

    def _take_over(self, fragment: int) -> None:
        """Wait for the sites' messages, move the shared weights, and take them over."""
        messages = self._sendings[fragment].received()
        form, shared = self._forms[fragment], self.shared
        notes = [form.note(message) for message in messages]
        samples = sum(note.samples for note in notes)
        gradient, statistics = torch.zeros_like(shared.start[fragment]), torch.zeros_like(shared.statistics)
        for site, (message, note) in enumerate(zip(messages, notes, strict=True)):
            values, theirs = form.values(message), form.statistics(message)
            is_finite = bool(values.isfinite().all()) and bool(theirs.isfinite().all())
            if note.samples and not (is_finite and 0 < note.samples < math.inf):
                error = RunFailed if site == self._world.site else BadMessage
                raise error(
                    f"what site {site} learned up to update {shared.update + 1} is not finite",
                    remedy="Lower the learning rate or set clip_norm; the last checkpoint is intact.",
                )
            if note.samples:
                gradient.add_(values, alpha=note.samples / samples)
                if form.num_statistics:
                    statistics.add_(theirs, alpha=note.samples / samples)
        if samples:
            shared.step(fragment, gradient)
            if form.num_statistics:
                shared.statistics.copy_(statistics)
        keep = self.sync.keep if self.sync.overlap else 0.0  # share of the site's own weights
        own, own_statistics = self._fragments[fragment], self._statistics
        own.write(torch.lerp(shared.start[fragment], own.read(), keep) if keep else shared.start[fragment])
        if form.num_statistics:
            mixed = torch.lerp(shared.statistics, own_statistics.read(), keep) if keep else shared.statistics
            own_statistics.write(mixed)
        del self._sendings[fragment]
        shared.due[fragment] = NEVER
        shared.applied += 1
        signals = [sum(of_sites) for of_sites in zip(*(note.signals for note in notes), strict=True)]
        self._world.signals.receive(torch.tensor(signals))
        self.latest = Exchanged(
            update=shared.update,
            fragment=fragment,
            samples=int(samples),
            loss=sum(note.loss_sum for note in notes) / int(samples) if int(samples) else 0.0,
            speeds=tuple(note.speed for note in notes),
            num_bytes=(self._num_sites - 1) * messages[0].numel(),
        )

    def _adopt(self) -> None:
        """Take over all shared weights as they are."""
        for fragment, start in zip(self._fragments, self.shared.start, strict=True):
            fragment.write(start)
        self._statistics.write(self.shared.statistics)


class SiteUpdate(UpdateRule):
    """An update of a site's own part of the batch; none where the site has no sample of a ragged batch.

    Args:
        rule: how the site's own update moves its weights.
        outer: moves the shared weights.
    """

    def __init__(self, rule: UpdateRule, outer: OuterOptimizer) -> None:
        self._rule, self._outer = rule, outer

    @property
    def rate_factor(self) -> float:
        """As `UpdateRule`."""
        return self._outer.rate_factor

    def __call__(self, batch: Batch, update: int) -> torch.Tensor:
        """As `UpdateRule`."""
        self.is_moving = True
        if not samples_here(batch):
            return self._outer.last_loss
        try:
            return self._rule(batch, update)
        finally:
            self.is_moving = self._rule.is_moving


class SiteWeights(SavedWeights):
    """The weights that all sites share, as of the last exchange; exchanges follow the updates."""

    def __init__(self, model: nn.Module, outer: OuterOptimizer) -> None:
        super().__init__(model)
        self.outer = self._outer = outer

    def follow(self, batch: Batch, update: int, loss: torch.Tensor) -> None:
        """As `SavedWeights`.

        Raises:
            RuntimeError, RunFailed: as `OuterOptimizer.after`.
        """
        self._outer.after(update, samples_here(batch), loss)

    def weights(self) -> dict[str, torch.Tensor]:
        """As `SavedWeights`."""
        return self._outer.weights()

    def whole(self, strategy: Strategy) -> dict[str, torch.Tensor]:
        """As `SavedWeights`."""
        del strategy
        return self._outer.weights()

    def begin_at_model(self) -> None:
        """As `SavedWeights`."""
        self._outer.begin_at_weights()

    def settle(self) -> None:
        """Exchange for the last time.

        Raises:
            RuntimeError, RunFailed: as `OuterOptimizer.settle`.
        """
        self._outer.settle()


NEVER = -1
"""Stands for "no update yet"; the first one is 0."""


class SharedWeights:
    """The shared weights by fragment, each a row of numbers, with their momentum and the exchanges that are due.

    Args:
        settings: of the outer optimiser.
        start: each fragment's weights to begin with.
        statistics: running statistics of batch norms to begin with.
    """

    def __init__(self, settings: SGD, start: Sequence[torch.Tensor], statistics: torch.Tensor) -> None:
        self._settings = settings
        self.start = list(start)
        self.momentum = [torch.zeros_like(weights) for weights in start]
        self.statistics = statistics
        self.update = NEVER
        """The last update."""
        self.applied = 0
        """Number of exchanges taken over."""
        self.sent = [NEVER] * len(self.start)
        """The update after which each fragment was last sent."""
        self.due = [NEVER] * len(self.start)
        """The update after which each fragment's pending message is to be taken over."""

    def step(self, fragment: int, gradient: torch.Tensor) -> None:
        """Move a fragment's shared weights: SGD as `torch.optim.SGD`, in the row's own dtype."""
        rate, momentum = self._settings.lr, self._settings.momentum
        velocity = self.momentum[fragment].mul_(momentum).add_(gradient)
        direction = gradient.add(velocity, alpha=momentum) if self._settings.nesterov else velocity
        self.start[fragment].add_(direction, alpha=-rate)

    def tensors(self) -> list[torch.Tensor]:
        """All tensors, in one order on every site."""
        return [*self.start, *self.momentum, self.statistics]

    def calendar(self) -> list[int]:
        """All update numbers and counts, in one order on every site."""
        return [self.update, self.applied, *self.sent, *self.due]

    def set_calendar(self, dates: Sequence[int]) -> None:
        """Restore `calendar`."""
        count = len(self.start)
        self.update, self.applied = dates[0], dates[1]
        self.sent, self.due = list(dates[2 : 2 + count]), list(dates[2 + count :])

    def state(self) -> dict[str, Any]:
        """A copy of everything."""
        return {"tensors": [tensor.clone() for tensor in self.tensors()], "calendar": self.calendar()}

    def load(self, state: dict[str, Any]) -> None:
        """Restore `state`.

        Raises:
            ValueError: it is of another model, or of another number of fragments.
        """
        own, saved = self.tensors(), state["tensors"]
        sizes, saved_sizes = ([tensor.numel() for tensor in tensors] for tensors in (own, saved))
        if sizes != saved_sizes:
            raise ValueError(
                f"shared weights and momenta of {len(own)} parts with {sum(sizes)} numbers cannot be had "
                f"from {len(saved)} parts with {sum(saved_sizes)}"
            )
        for tensor, value in zip(own, saved, strict=True):
            tensor.copy_(value)
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
        """The schedule of a job whose updates are of `batch` samples.

        Raises:
            BadJob: an interval is too short for its fragments or overlap.
        """
        return cls(sync.fragments, sync.interval(batch), *sync.early_interval(batch))

    def is_due(self, fragment: int, updates: int) -> bool:
        """Whether an interval of the fragment ends after that many updates.

        >>> calendar = ExchangeSchedule(fragments=2, interval=8, early_interval=4, early_updates=8)
        >>> [updates for updates in range(1, 30) if calendar.is_due(0, updates)]
        [4, 8, 16, 24]
        >>> [updates for updates in range(1, 30) if calendar.is_due(1, updates)]
        [2, 6, 12, 20, 28]
        """
        if updates <= 0:
            return False
        interval = self.interval
        if updates <= self.early_updates:
            interval = self.early_interval
        else:
            updates -= self.early_updates
        return (updates - fragment * interval // self.fragments) % interval == 0


def site_shares(speeds: Sequence[float], batch: int, group: int = 1) -> tuple[int, ...]:
    """Samples of a batch for each site, in proportion to its speed.

    Whole groups of coupled samples, at least one for each site; the rest goes to the largest remainders, the first of
    equal ones. The end of the batch may cut the last group short. Deterministic, so sites that know each other's speeds
    agree without a message.

    >>> site_shares([100.0, 50.0], 30)
    (20, 10)
    >>> site_shares([100.0, 90.0], 30, group=10)
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
    """The part of each batch of site number `part`: a run of whole groups, as long as its share.

    Sites do not communicate within an update, so unlike other parts of a batch they need not pass equally often.
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
        """As `Split.passes`, but as few as possible; one that does not count where this site has no sample."""
        (span,) = self.spans(size)
        if not span:
            return (Pass(0, 1, 0, counts=False),)
        cuts = range(0, len(span), micro_batch)
        return tuple(Pass(cut, min(cut + micro_batch, len(span)), span.start + cut) for cut in cuts)


def samples_here(batch: Batch) -> int:
    """Number of a batch's samples that this process trains on [samples]; 0 although it then holds one."""
    return sum(map(len, batch.split.spans(batch.whole_size)))
