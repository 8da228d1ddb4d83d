"""Sites that train apart and come together after an interval: the shared weights, and when they move.

What: after each interval the pseudo-gradient of a fragment (the shared weights less a site's own) is sent to all sites;
its mean, weighted by the samples that each site trained on, is the gradient of an outer SGD on the shared weights,
which every site then takes over. With overlap it is taken over a fixed number of updates later. Everything that is
shared is computed by every site from the same bytes in the same order, so on equal hardware it is equal bit for bit.
Use when, costs, does not combine with: see `stoker.jobs.sync`. Beside parameters, running statistics of batch norms are
averaged, with the first fragment. The inner optimiser's state stays on its site, and so do other buffers.
Sources: as in `stoker.jobs.sync`. Unlike DiLoCo's, the samples are not sorted by site: each takes its part of every
batch, in the order that one process would.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from stoker.errors import RunFailed
from stoker.jobs import Job
from stoker.jobs.sync import Sync
from stoker.loading import Split
from stoker.records import Coupling
from stoker.stepping.outer.calendar import Calendar
from stoker.stepping.outer.compression import codec_of
from stoker.stepping.outer.exchange import Done, Form, Note, Sending
from stoker.stepping.outer.flat import fragments_of
from stoker.stepping.outer.shared import NEVER, Shared
from stoker.stepping.outer.shares import SiteSplit, shares
from stoker.stepping.outer.statistics import Statistics
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


class Outer:
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
        self.sync, self._calendar = sync, Calendar.of(sync, job.batch)
        self._model, self._world, self._clock = model, world, clock
        self._batch, self._group = job.batch, coupling.group
        self._fragments = fragments_of((p for p in model.parameters() if p.requires_grad), sync.fragments)
        start = [fragment.read() for fragment in self._fragments]
        self._statistics = Statistics(model, start[0].dtype, start[0].device)
        self.shared = Shared(sync.outer_optimizer, start, self._statistics.read())
        sizes = [self.shared.statistics.numel()] + [0] * (sync.fragments - 1)
        self._forms = [
            Form(codec_of(sync.compress), size, one.numel(), one.dtype) for size, one in zip(sizes, start, strict=True)
        ]
        self._done = Done(0, 0.0, torch.zeros((), dtype=torch.float64, device=start[0].device))
        self._done_before = [self._done] * sync.fragments
        self._sendings: dict[int, Sending] = {}
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
        self._done = Done(done.samples + samples, done.seconds + now - self._left_at, loss_sum)
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
        self._done, *self._done_before = (Done.of(one, device) for one in (site["done"], *site["before"]))
        return {int(number): message.to(device) for number, message in site["messages"].items()}

    @property
    def _num_sites(self) -> int:
        return self._world.layout.data_size

    def _equal_shares(self) -> tuple[int, ...]:
        return shares((1.0,) * self._num_sites, self._batch, self._group or 1)

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
        self._sendings[fragment] = Sending(message, self._world)
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

    def _note(self, fragment: int, notes: list[Note], samples: int, num_bytes: int) -> None:
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
