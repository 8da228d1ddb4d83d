"""Two sites on a line of 100 Mbit/s and 50 ms: DiLoCo against lockstep, and against no network at all.

    python -m bench.many.slow_link [--rounds 6] [--updates 3000] [--only speed|diloco|lockstep|higher]

Two processes of one thread each in two network namespaces, joined by a `bench.many.relay`. First speed, in turns within
one run: both sites without a word to each other (and one of them while the other waits), DiLoCo, and lockstep
(DistributedDataParallel); samples/s of both together, by the slower of them, and bytes that the line carried. Then
learning: DiLoCo over the line, and lockstep in one process without it, which is the same mathematics, for equally many
samples; the loss of the shared weights on text held out. The bars are the issue's: 90 % of the speed without a network,
100 times fewer bytes than lockstep at equal samples, a loss within 2 %. Written to bench/results/. Needs root.
Sites learn with `rate="by_noise"`. "higher" is lockstep at the rate that each of them then has, so that what a better
rate does is not taken for what sites do. Bytes are those of all of the learning, where speed was measured too.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed import TCPStore

import stoker
from bench.forecast.registration import RESULTS
from bench.many.relay import ADDRESSES, CARD, Line, Relay, carried, why_not
from bench.train.results import document, read, save
from stoker.jobs import Job, Sync
from stoker.loading.batches import Batch, BatchSource
from stoker.loading.dataset_adapters import as_samples
from stoker.loading.datasets import datasets_of
from stoker.records import Coupling, Layout, Plan, Position
from stoker.stepping.step import Step
from stoker.stepping.world import ALONE, World, join, leave
from stoker.zoo import GPT

LINE = Line(bytes_per_s=100e6 / 8, delay_s=0.05)
LAYERS, WIDTH, CONTEXT, BATCH = 4, 128, 64, 32
UPDATES = 3000
INTERVAL, OVERLAP = 16, 4
EARLY = (stoker.updates(5), stoker.updates(200))
DILOCO = stoker.DiLoCo(every=stoker.updates(INTERVAL), overlap=OVERLAP, rate="by_noise", compress="int4", early=EARLY)
HIGHER = DILOCO.rate_factor(BATCH, BATCH // 2)
LOCKSTEP_UPDATES = 10
"""Of lockstep, in each round: enough of something that slow."""
KINDS = ("apart", "alone", "diloco", "lockstep")
HELD_OUT = 1024
PATIENCE_S = 180.0
PARTS = ("speed", "diloco", "lockstep", "higher")
BARS = {"speed": 0.9, "fewer_bytes": 100.0, "loss": 0.02}


def gpt() -> GPT:
    """The model: bytes in, bytes out."""
    return GPT(layers=LAYERS, width=WIDTH, heads=4, context=CONTEXT)


def job(sync: Sync | None, total: int, batch: int = BATCH, factor: float = 1.0) -> Job:
    """The GPT on windows of Python source, at `factor` times the rate."""
    return Job(
        model=gpt,
        data=stoker.data.python_source(CONTEXT)[0],
        loss="token_cross_entropy",
        optimizer=stoker.AdamW(lr=2e-3 * factor, weight_decay=0.1),
        schedule=stoker.schedules.warmup_cosine(warmup=0.1, final=0.05),
        clip_norm=1.0,
        batch=batch,
        until=stoker.updates(total),
        sync=sync,
    )


class Site:
    """A step, and the batches that are its own, without an end."""

    def __init__(self, sync: Sync | None, world: World, total: int, batch: int = BATCH, factor: float = 1.0) -> None:
        plan = Plan(device="cpu", micro_batch=batch, optimizer_implementation="fused", layout=world.layout)
        coupling = Coupling(kind="separable", group=None, causes=(), evidence="known")
        made = job(sync, total, batch, factor)
        self.step, self.total, self.made = Step(made, plan, coupling, world=world), total, 0
        data = datasets_of(made)
        pipeline = self.step.pipeline(data.train, augmented=True)
        source = BatchSource(data.train, pipeline, data.extent(made), made.seed, plan, split=self.step.split())
        self.batches: Iterator[Batch] = source.batches(Position(), total)
        self.losses: list[float] = []

    def train(self, updates: int) -> None:
        """Make so many updates more."""
        for _ in range(updates):
            loss = self.step.update(next(self.batches), self.made, self.made / self.total)
            self.made += 1
            self.losses.append(float(loss))


def held_out_loss(step: Step) -> float:
    """Mean loss a byte of the weights worth keeping, on windows evenly spread over the test part."""
    samples = as_samples(stoker.data.python_source(CONTEXT)[1], what="test")
    every = max(1, len(samples) // HELD_OUT)
    model = gpt()
    model.load_state_dict(step.kept_weights())
    indices = torch.arange(0, every * HELD_OUT, every).numpy()
    tokens, targets = samples.prepare(samples.fetch(indices, 0))
    with torch.no_grad():
        losses = [
            F.cross_entropy(model(x).flatten(0, 1), y.flatten())
            for x, y in zip(tokens.split(64), targets.split(64), strict=True)
        ]
    return float(torch.stack(losses).mean())


def in_turns(world: World, rounds: int, counts: Path) -> dict[str, list[dict[str, float]]]:
    """Seconds of this site and bytes of the line, for each kind in each round."""
    total = (rounds + 1) * INTERVAL + OVERLAP + 1
    sites = {
        "apart": Site(None, ALONE, 2 * total, BATCH // 2),
        "diloco": Site(replace(DILOCO, early=None), world, total),  # as most of a run is
        "lockstep": Site(None, world, total),
    }
    sites["alone"] = sites["apart"]
    for kind in ("apart", "diloco", "lockstep"):
        # From here on a round of DiLoCo's sends once, and takes over once, OVERLAP updates later.
        sites[kind].train(OVERLAP)
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    for turn in range(rounds):
        for kind in KINDS[turn % len(KINDS) :] + KINDS[: turn % len(KINDS)]:
            updates = LOCKSTEP_UPDATES if kind == "lockstep" else INTERVAL
            dist.barrier()
            before, started = carried(counts), time.perf_counter()
            if kind != "alone" or world.rank == 0:
                sites[kind].train(updates)
            seconds = time.perf_counter() - started
            dist.barrier()
            time.sleep(0.2)  # the last acknowledgements
            found[kind].append({"s": seconds, "bytes": carried(counts) - before, "updates": updates})
    return found


def over_the_line(world: World, updates: int, counts: Path) -> dict[str, Any]:
    """DiLoCo from the first update to the last."""
    site = Site(DILOCO, world, updates)
    dist.barrier()
    before, started = carried(counts), time.perf_counter()
    site.train(updates)
    site.step.settle()
    seconds = time.perf_counter() - started
    dist.barrier()
    num_bytes = carried(counts) - before
    digest = sum(float(one.double().sum()) for one in site.step.kept_weights().values())
    return {"s": seconds, "updates": updates, "bytes": num_bytes, "loss": held_out_loss(site.step), "weights": digest}


def at_a_site(arguments: argparse.Namespace) -> None:
    """What runs in a namespace; prints its findings as JSON."""
    os.environ["GLOO_SOCKET_IFNAME"] = CARD
    torch.set_num_threads(1)
    rank, counts = arguments.site, Path(arguments.counts)
    store = TCPStore(ADDRESSES[0], 7010, 2, is_master=rank == 0, timeout=timedelta(seconds=PATIENCE_S))
    world = join(Layout(replicas=2), rank, store, device=torch.device("cpu"), patience_s=PATIENCE_S)
    if arguments.only == "speed":
        found: Any = in_turns(world, arguments.rounds, counts)
    else:
        found = over_the_line(world, arguments.updates, counts)
    print(json.dumps(found))
    dist.barrier()
    leave()


def in_lockstep(updates: int, factor: float) -> dict[str, Any]:
    """What lockstep learns at `factor` times the rate, in one process without a network."""
    torch.set_num_threads(1)
    site = Site(None, ALONE, updates, factor=factor)
    started = time.perf_counter()
    site.train(updates)
    return {"s": time.perf_counter() - started, "loss": held_out_loss(site.step)}


def both(part: str, arguments: argparse.Namespace) -> list[Any]:
    """What the two sites found, on a line of their own."""
    with Relay(LINE) as relay, tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder) / f"{rank}.json" for rank in (0, 1)]
        sites = []
        for rank, output in enumerate(outputs):
            command = [
                sys.executable,
                "-m",
                "bench.many.slow_link",
                "--site",
                str(rank),
                "--only",
                part,
                "--counts",
                str(relay.counts),
                "--rounds",
                str(arguments.rounds),
                "--updates",
                str(arguments.updates),
            ]
            with output.open("wb") as file:
                sites.append(
                    subprocess.Popen(
                        relay.command(rank, *command), stdout=file, env={**os.environ, "OMP_NUM_THREADS": "1"}
                    )
                )
        try:
            codes = [site.wait(timeout=1200) for site in sites]
        finally:
            for site in sites:
                site.kill()
        if any(codes):
            raise SystemExit(f"sites ended with {codes}")
        return [json.loads(output.read_text(encoding="utf-8").splitlines()[-1]) for output in outputs]


def summary(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Samples/s and bytes a sample by kind, and ratios of them within each round."""
    rates: dict[str, list[float]] = {}
    for kind in KINDS:
        pairs = list(zip(one[kind], other[kind], strict=True))
        if kind == "alone":  # one site, as if the other were as fast
            rates[kind] = [BATCH * a["updates"] / a["s"] for a, _ in pairs]
        else:
            rates[kind] = [BATCH * a["updates"] / max(a["s"], b["s"]) for a, b in pairs]
    per_sample = {
        kind: statistics.median(a["bytes"] / (BATCH * a["updates"]) for a in one[kind])
        for kind in ("diloco", "lockstep")
    }
    ratio: Callable[[str, str], list[float]] = lambda a, b: sorted(  # noqa: E731 - of two names
        x / y for x, y in zip(rates[a], rates[b], strict=True)
    )
    return {
        "samples_per_s": {kind: statistics.median(values) for kind, values in rates.items()},
        "samples_per_s_of_rounds": rates,
        "diloco_over_apart": {"median": statistics.median(ratio("diloco", "apart")), "all": ratio("diloco", "apart")},
        "diloco_over_alone": {"median": statistics.median(ratio("diloco", "alone")), "all": ratio("diloco", "alone")},
        "lockstep_over_apart": {"median": statistics.median(ratio("lockstep", "apart"))},
        "bytes_per_sample": per_sample,
        "fewer_bytes": per_sample["lockstep"] / per_sample["diloco"],
    }


def verdict(found: dict[str, Any]) -> dict[str, Any]:
    """Where the bars are, and whether they hold, of the parts that were measured."""
    held: dict[str, Any] = {"bars": BARS}
    if "speed" in found:
        speed = found["speed"]
        held["speed"] = {kind: speed[f"diloco_over_{kind}"]["median"] for kind in ("apart", "alone")}
        held["fewer_bytes"] = speed["fewer_bytes"]
    if "diloco" in found and "lockstep" in found:
        one, other = found["diloco"]
        held["loss"] = one["loss"] / found["lockstep"]["loss"] - 1
        if "higher" in found:
            held["loss_beside_higher_rate"] = one["loss"] / found["higher"]["loss"] - 1
        if "speed" in found and "updates" in one:
            per_sample = one["bytes"] / (BATCH * one["updates"])
            held["fewer_bytes"] = found["speed"]["bytes_per_sample"]["lockstep"] / per_sample
        held["sites_are_equal"] = one["weights"] == other["weights"]
    return held


def main() -> None:
    """Measure, print and write the result; or be a site of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--updates", type=int, default=UPDATES)
    parser.add_argument("--only", choices=PARTS, help="measure this part, and keep the others of the same day")
    parser.add_argument("--site", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--counts", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.site is not None:
        at_a_site(arguments)
        return
    if (reason := why_not()) is not None:
        print(f"skipped: {reason}")
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the line is taken down on the way out
    head = document(
        "two sites on a line of 100 Mbit/s and 50 ms each way: DiLoCo, lockstep, and no network",
        f"python -m bench.many.slow_link --rounds {arguments.rounds} --updates {arguments.updates}",
        {"torch": torch.__version__, "stoker": version("stoker")},
    )
    path = RESULTS / f"slow_link_{head['date']}.json"
    found: dict[str, Any] = {
        **read(path),
        **head,
        "setting": f"one thread a site; GPT {LAYERS} x {WIDTH}, context {CONTEXT}, batch {BATCH} "
        "of both sites, fp32, AdamW, text of the standard library",
        "sync": str(DILOCO),
    }
    for part in PARTS if arguments.only is None else (arguments.only,):
        if part in ("lockstep", "higher"):
            found[part] = in_lockstep(arguments.updates, HIGHER if part == "higher" else 1.0)
        else:
            sites = both(part, arguments)
            found[part] = summary(*sites) if part == "speed" else sites
        found["verdict"] = verdict(found)
        save(path, found)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
