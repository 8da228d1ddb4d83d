"""Where the loss of sites that train apart comes from, one cause at a time.

    python -m bench.many.site_losses [--size small|slow_link] [--cases NAME …] [--updates N] [--seed N]
    python -m bench.many.site_losses --exchanges 7 16 62 150 --cases …    runs of so many exchanges, one every 16

DiLoCo written by hand: all sites take turns in one process, each a row of weights with an AdamW of its own, without
network and without Stoker's code for it, so that things can be tried that Stoker does not have (averaging the
optimiser's moments, say). Otherwise the job of `bench.many.slow_link`, or a smaller one of the same kind. The loss is
that of the shared weights on text held out. Each case is written to bench/results/ when it is done.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import stoker
from bench.forecast.registration import RESULTS
from bench.train.results import document, read, save
from stoker.loading.dataset_adapters import as_samples
from stoker.loading.order import EpochOrder
from stoker.loading.samples import Samples
from stoker.stepping.diloco_exchange import CODECS
from stoker.zoo import GPT

SITES, BATCH, HELD_OUT = 2, 32, 1024
SCHEDULE = stoker.schedules.warmup_cosine(warmup=0.1, final=0.05)


@dataclass(frozen=True)
class Size:
    """A model, its learning rate in lockstep, how long it trains, and the seed of weights and order."""

    layers: int
    width: int
    context: int
    rate: float
    updates: int
    seed: int = 0


SIZES = {
    "small": Size(layers=2, width=32, context=32, rate=4e-3, updates=1000),
    "slow_link": Size(layers=4, width=128, context=64, rate=2e-3, updates=3000),
}


@dataclass(frozen=True)
class Case:
    """How sites come together: after `every` updates, 0: never apart; `rate` times the size's learning rate.

    For the first `early` share of the run after `early_every` updates instead. `outer` is the outer rate and its
    momentum (Nesterov's). `averaged`: the inner optimiser's moments are averaged with the weights.
    """

    every: int = 16
    rate: float = 1.0
    overlap: int = 0
    outer: tuple[float, float] = (1.0, 0.0)
    is_int8: bool = False
    carries: bool = False
    """Taken over is the correction alone, against all of a site's own updates meanwhile; else half of each."""
    averaged: bool = False
    early: float = 0.0
    early_every: int = 4


HIGHER, LOWER = 1.4, 0.7
"""Times and over the square root of the number of sites, roundly."""
PUBLISHED = (0.7, 0.9)
CASES = {
    "lockstep": Case(every=0),
    "lockstep, rate x 0.7": Case(every=0, rate=LOWER),
    "lockstep, rate x 1.4": Case(every=0, rate=HIGHER),
    "averaged every update": Case(every=1),
    "averaged every update, rate x 1.4": Case(every=1, rate=HIGHER),
    "averaged": Case(),
    "averaged, rate x 1.4": Case(rate=HIGHER),
    "averaged, rate x 1.4, moments too": Case(rate=HIGHER, averaged=True),
    "averaged, rate x 1.4, every 4 in the first fifth": Case(rate=HIGHER, early=0.2),
    "averaged, outer rate 1.4": Case(outer=(1.4, 0.0)),
    "averaged, overlap 4, correction carried": Case(overlap=4, carries=True, is_int8=True),
    "averaged, overlap 4, correction carried, rate x 1.4": Case(overlap=4, carries=True, rate=HIGHER),
    "outer 1.0 and 0.4, rate x 1.4": Case(outer=(1.0, 0.4), rate=HIGHER),
    "outer 0.7 and 0.9, rate x 1.4": Case(outer=PUBLISHED, rate=HIGHER),
    "outer 0.7 and 0.9, overlap 4": Case(outer=PUBLISHED, overlap=4, is_int8=True),
    "outer 0.7 and 0.9, overlap 4, fp32": Case(outer=PUBLISHED, overlap=4),
    "outer 0.7 and 0.9, overlap 4, rate x 1.4": Case(outer=PUBLISHED, overlap=4, is_int8=True, rate=HIGHER),
    "outer 0.7 and 0.9, overlap 3, rate x 1.4, every 4 in the first fifth": Case(
        outer=PUBLISHED, overlap=3, is_int8=True, rate=HIGHER, early=0.2
    ),
    "outer 0.7 and 0.9, overlap 5, rate x 1.4, every 20, 6 in the first 8 %": Case(
        outer=PUBLISHED, overlap=5, is_int8=True, rate=HIGHER, every=20, early=0.08, early_every=6
    ),
    "lockstep, rate x 2": Case(every=0, rate=2.0),
    "outer 0.7 and 0.9, overlap 4, rate x 2": Case(outer=PUBLISHED, overlap=4, is_int8=True, rate=2.0),
    "outer 0.7 and 0.9": Case(outer=PUBLISHED),
    "outer 1.0 and 0.4": Case(outer=(1.0, 0.4)),
    "outer 1.0 and 0.8, overlap 4, rate x 1.4": Case(outer=(1.0, 0.8), overlap=4, is_int8=True, rate=HIGHER),
}


class Row:
    """A model whose parameters and gradients are views of one row each, and its AdamW."""

    def __init__(self, size: Size, rate: float) -> None:
        torch.manual_seed(size.seed)
        self.model = GPT(layers=size.layers, width=size.width, heads=4, context=size.context)
        self.weights = nn.utils.parameters_to_vector(self.model.parameters()).detach().clone()
        self.gradient = torch.zeros_like(self.weights)
        at = 0
        for parameter in self.model.parameters():
            end = at + parameter.numel()
            parameter.data = self.weights[at:end].view(parameter.shape)
            parameter.grad = self.gradient[at:end].view(parameter.shape)
            at = end
        whole = nn.Parameter(self.weights)
        whole.data, whole.grad = self.weights, self.gradient
        self.optimizer = torch.optim.AdamW([whole], lr=rate, weight_decay=0.1, fused=True)
        self.moments = self.optimizer.state[whole]

    def update(self, tokens: torch.Tensor, targets: torch.Tensor, rate: float) -> None:
        """Make an update on these, with the gradient clipped to a norm of 1."""
        self.gradient.zero_()
        torch.autograd.backward(F.cross_entropy(self.model(tokens).flatten(0, 1), targets.flatten()))
        norm = self.gradient.norm()
        if norm > 1:
            self.gradient.mul_(1 / (norm + 1e-6))
        self.optimizer.param_groups[0]["lr"] = rate
        self.optimizer.step()


class Sites:
    """Rows that come together as a case says."""

    def __init__(self, size: Size, case: Case) -> None:
        self.case, self.rate = case, size.rate * case.rate
        self.rows = [Row(size, self.rate) for _ in range(SITES if case.every else 1)]
        self.start = self.rows[0].weights.clone()
        self.velocity = torch.zeros_like(self.start)
        self.codec = CODECS["int8" if case.is_int8 else "none"]
        self.since, self.exchanges = 0, 0
        self.under_way: tuple[int, list[torch.Tensor]] | None = None

    def update(self, number: int, progress: float, tokens: torch.Tensor, targets: torch.Tensor) -> None:
        """Each row's update on its part of the batch, and what is due of coming together."""
        parts = zip(self.rows, tokens.chunk(len(self.rows)), targets.chunk(len(self.rows)), strict=True)
        for row, x, y in parts:
            row.update(x, y, self.rate * SCHEDULE(progress))
        if not self.case.every:
            return
        if self.under_way is not None and self.under_way[0] <= number:
            self.take_over()
        self.since += 1
        if self.since >= (self.case.early_every if progress < self.case.early else self.case.every):
            self.since, self.under_way = 0, (number + self.case.overlap, self.away())
            if not self.case.overlap:
                self.take_over()

    def away(self) -> list[torch.Tensor]:
        """How far each row is from what is shared, as the others hear it."""
        found = [self.start - row.weights for row in self.rows]
        return [self.codec.decode(self.codec.encode(one), one.numel(), one.dtype) for one in found]

    def take_over(self) -> None:
        """Move what is shared by what was sent, and take it over."""
        assert self.under_way is not None
        _, away = self.under_way
        sent = [self.start - one for one in away]
        self.move(away)
        self.under_way, self.exchanges = None, self.exchanges + 1
        for row, own in zip(self.rows, sent, strict=True):
            if not self.case.overlap:
                row.weights.copy_(self.start)
            elif self.case.carries:
                row.weights.add_(self.start - own)
            else:
                row.weights.lerp_(self.start, 0.5)
        if self.case.averaged:
            for name in ("exp_avg", "exp_avg_sq"):
                mean = torch.stack([row.moments[name] for row in self.rows]).mean(0)
                for row in self.rows:
                    row.moments[name].copy_(mean)

    def move(self, away: list[torch.Tensor]) -> None:
        """The outer optimiser's step on what is shared."""
        rate, momentum = self.case.outer
        gradient = torch.stack(away).mean(0)
        self.velocity.mul_(momentum).add_(gradient)
        self.start.add_(gradient + momentum * self.velocity, alpha=-rate)

    def end(self) -> torch.Tensor:
        """The weights that are kept."""
        if not self.case.every:
            return self.rows[0].weights
        if self.under_way is not None:
            self.take_over()
        self.move([self.start - row.weights for row in self.rows])
        return self.start


def held_out_loss(size: Size, weights: torch.Tensor, samples: Samples) -> float:
    """Mean loss a byte, on windows evenly spread over the test part."""
    model = GPT(layers=size.layers, width=size.width, heads=4, context=size.context)
    nn.utils.vector_to_parameters(weights, model.parameters())
    every = max(1, len(samples) // HELD_OUT)
    tokens, targets = samples.prepare(samples.fetch(torch.arange(0, every * HELD_OUT, every).numpy(), 0))
    with torch.no_grad():
        losses = [
            F.cross_entropy(model(x).flatten(0, 1), y.flatten())
            for x, y in zip(tokens.split(64), targets.split(64), strict=True)
        ]
    return float(torch.stack(losses).mean())


def learned(size: Size, case: Case) -> dict[str, Any]:
    """What a case comes to, in samples of one epoch that are in the order of the job's."""
    train, test = (as_samples(part, what="text") for part in stoker.data.python_source(size.context))
    order, sites, started = EpochOrder(len(train), size.seed), Sites(size, case), time.perf_counter()
    for number in range(size.updates):
        indices = order.indices(0, number * BATCH, (number + 1) * BATCH)
        tokens, targets = train.prepare(train.fetch(indices, 0))
        sites.update(number, number / size.updates, tokens, targets)
    loss = held_out_loss(size, sites.end(), test)
    seconds = round(time.perf_counter() - started)
    return {"loss": loss, "exchanges": sites.exchanges, "s": seconds, "case": asdict(case)}


def main() -> None:
    """Train once in each case, and write what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="NAME")
    parser.add_argument("--updates", type=int)
    parser.add_argument("--exchanges", type=int, nargs="+", help="instead of updates: runs of so many exchanges")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    size = SIZES[arguments.size]
    lengths = [16 * count for count in arguments.exchanges or ()] or [arguments.updates or size.updates]
    head = document(
        "loss of two sites that train apart, one change at a time, against lockstep at equal samples",
        "python -m bench.many.site_losses --size small, or slow_link; --updates, --seed",
        {"torch": torch.__version__, "stoker": version("stoker")},
    )
    path = RESULTS / f"site_losses_{head['date']}.json"
    for updates, name in itertools.product(lengths, arguments.cases):
        size = replace(size, updates=updates, seed=arguments.seed)
        setting = f"GPT {size.layers} x {size.width}, context {size.context}, rate {size.rate:g}, {updates} updates"
        setting += f", seed {size.seed}" if size.seed else ""
        found = learned(size, CASES[name])
        print(f"{setting}: {name}: {found['loss']:.4f}", flush=True)
        kept: dict[str, Any] = {**read(path), **head}
        kept["losses"] = {**kept.get("losses", {})}
        kept["losses"][setting] = {**kept["losses"].get(setting, {}), name: found}
        save(path, kept)
    print(json.dumps(read(path), indent=1))


if __name__ == "__main__":
    main()
