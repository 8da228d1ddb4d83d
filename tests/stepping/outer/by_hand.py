"""DiLoCo written once more, in one process, without any of Stoker's code for it: what it is held against."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn

from stoker.jobs.sync import Sync
from stoker.loading.datasets import datasets_of
from stoker.loading.order import EpochOrder
from stoker.stepping.model import build_model
from tests.stepping.outer.sites import UPDATES, gpt_job


class ByHand:
    """Two sites and what they share [N], in float64 and uncompressed; they exchange every `interval` updates."""

    def __init__(self, sync: Sync, interval: int, sites: int = 2) -> None:
        self.sync, self.interval, self.job = sync, interval, gpt_job(sync)
        model = build_model(self.job).double()
        self.workers = [copy.deepcopy(model) for _ in range(sites)]
        rate = self.job.optimizer.lr * (sites**0.5 if sync.rate == "by_noise" else 1)
        self.inner = [torch.optim.AdamW(worker.parameters(), lr=rate) for worker in self.workers]
        self.start = vector(model)
        self.velocity = torch.zeros_like(self.start)
        count = sync.fragments
        self.edges = [len(self.start) * number // count for number in range(count + 1)]
        self.samples = [[0] * sites for _ in range(count)]
        self.waiting: list[tuple[int, int, torch.Tensor]] = []
        self.sent = [-1] * count

    def trained(self) -> torch.Tensor:
        """The shared weights after UPDATES updates and a last exchange of what was not just exchanged."""
        for update in range(UPDATES):
            self.updates_of(update)
            self.take_over(update)
            for fragment in range(self.sync.fragments):
                early, length = (int(one.value) for one in self.sync.early) if self.sync.early else (1, 0)
                interval, since = (early, 0) if update < length else (self.interval, length)
                if (update + 1 - since - fragment * interval // self.sync.fragments) % interval == 0:
                    self.send(fragment, update)
            self.take_over(update)
        self.take_over(10**9)
        for fragment in range(self.sync.fragments):
            if self.sent[fragment] != UPDATES - 1:
                self.send(fragment, UPDATES - 1)
        self.take_over(10**9)
        return self.start

    def updates_of(self, update: int) -> None:
        """Each site's own update on its part of the batch, if it has one."""
        extent = datasets_of(self.job).extent(self.job)
        where = extent.position(update)
        order = EpochOrder(extent.num_train, self.job.seed)
        batch = order.indices(where.epoch, where.cursor, where.cursor + extent.batch_at(where))
        sites = len(self.workers)
        for site, (worker, optimizer) in enumerate(zip(self.workers, self.inner, strict=True)):
            mine = torch.as_tensor(batch[len(batch) * site // sites : len(batch) * (site + 1) // sites])
            if len(mine):
                optimizer.zero_grad()
                tokens, targets = (tensor[mine] for tensor in self.job.data)
                logits = worker(tokens)
                F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100).backward()
                nn.utils.clip_grad_norm_(worker.parameters(), 1.0)
                optimizer.step()
            for counts in self.samples:
                counts[site] += len(mine)

    def send(self, fragment: int, update: int) -> None:
        """The mean of how far the sites are from the shared weights, by samples."""
        weights = torch.tensor(self.samples[fragment], dtype=torch.float64)
        away = torch.stack([self.start - vector(worker) for worker in self.workers])
        mean = (weights / weights.sum()) @ away
        self.waiting.append((update + self.sync.overlap, fragment, mean))
        self.sent[fragment], self.samples[fragment] = update, [0] * len(self.workers)

    def take_over(self, update: int) -> None:
        """Nesterov's step on the shared weights, and its result into the sites', of what is due."""
        outer, keep = self.sync.outer_optimizer, self.sync.keep if self.sync.overlap else 0.0
        for one in [waiting for waiting in self.waiting if waiting[0] <= update]:
            self.waiting.remove(one)
            _, fragment, mean = one
            span = slice(self.edges[fragment], self.edges[fragment + 1])
            self.velocity[span] = outer.momentum * self.velocity[span] + mean[span]
            ahead = mean[span] + outer.momentum * self.velocity[span]
            self.start[span] -= outer.lr * (ahead if outer.nesterov else self.velocity[span])
            for worker in self.workers:
                own = vector(worker)
                own[span] = keep * own[span] + (1 - keep) * self.start[span]
                nn.utils.vector_to_parameters(own, worker.parameters())


def vector(model: nn.Module) -> torch.Tensor:
    """A copy of all parameters [N]."""
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()
