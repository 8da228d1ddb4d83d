"""A realistic run, as its events: an image classifier, whole, killed and resumed, failed, or young."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Sequence
from typing import Any

from stoker.records import (
    Candidate,
    Coupling,
    Decision,
    Device,
    Environment,
    Estimate,
    Event,
    Forecast,
    JobSpec,
    Launch,
    Plan,
    PlanSwitch,
    Rejection,
    Report,
    Run,
    RunStatus,
    to_json,
)
from stoker.records.codec import JSON

NAME = "fashion-resnet-3fa9c1"
START_S = 1_767_225_600.0
NUM_TRAIN, BATCH, EPOCHS = 54_000, 512, 6
TOTAL_SAMPLES = NUM_TRAIN * EPOCHS
UPDATES_PER_EPOCH = math.ceil(NUM_TRAIN / BATCH)
RATE = 1480.0
BASELINE_BYTES = 310 * 2**20

DATA = {
    "class": "indexed",
    "guarantee": "order computed from (seed, epoch, position)",
    "name": "fashion-mnist",
    "train": NUM_TRAIN,
    "valid": 6000,
    "test": 10_000,
}

PLAN = Plan(
    device="cpu",
    micro_batch=512,
    precision="bf16",
    memory_format="channels_last",
    optimizer_implementation="fused",
    threads=2,
)
DEVICE = Device(
    name="cpu",
    kind="cpu",
    model="AMD EPYC 9B14",
    cores=2,
    memory_bytes=8 * 2**30,
    fast_dtypes=("fp32", "bf16"),
)
ENVIRONMENT = Environment(
    device_model=DEVICE.model,
    device_kind="cpu",
    threads=2,
    torch_version="2.13.0+cpu",
    python_version="3.11.13",
    platform="Linux-6.1-x86_64",
    libraries={"numpy": "2.4.0"},
    flags={"deterministic_algorithms": "true"},
)
COUPLING = Coupling(
    kind="batch_norm",
    group=512,
    causes=("BatchNorm2d: stem.norm, layer1.norm, layer2.norm",),
    evidence="perturbing half the batch moved the other half's losses by up to 0.031",
)


def estimate(value: float, spread: float, unit: str) -> Estimate:
    """An estimate measured here, `spread` (a fraction) to either side."""
    return Estimate(value=value, low=value * (1 - spread), high=value * (1 + spread), unit=unit, basis="measured here")


def forecast(scale: float = 1.0) -> Forecast:
    """The forecast of a plan `scale` times as slow as the chosen one."""
    return Forecast(
        step_s=estimate(0.345 * scale, 0.06, "s"),
        samples_per_s=estimate(1484 / scale, 0.06, "samples/s"),
        evaluate_s=estimate(1.9 * scale, 0.2, "s"),
        checkpoint_s=estimate(0.012, 0.4, "s"),
        total_s=estimate(233.0 * scale, 0.08, "s"),
        peak_bytes=estimate(905 * 2**20, 0.1, "bytes"),
        total_samples=TOTAL_SAMPLES,
        total_updates=UPDATES_PER_EPOCH * EPOCHS,
        gradient_error=0.0041,
    )


def decision() -> Decision:
    """The planner's answer: bf16 channels-last, with three slower plans that fit and three that were rejected."""

    def other(scale: float, **changes: object) -> Candidate:
        return Candidate(
            device="cpu",
            memory_bytes=24 * 2**30,
            plan=dataclasses.replace(PLAN, **changes),
            forecast=forecast(scale),
            why=f"{scale:.2f}× the time",
        )

    return Decision(
        device="cpu",
        candidates=(
            Candidate(device="cpu", memory_bytes=24 * 2**30, plan=PLAN, forecast=forecast(), why="measured here"),
            other(1.12, memory_format="contiguous"),
            other(1.83, precision="fp32"),
            other(1.95, threads=1),
        ),
        rejected=(
            Rejection(
                device="cpu",
                plan=dataclasses.replace(PLAN, micro_batch=64),
                reason="cuts a BatchNorm group of 512 samples",
            ),
            Rejection(
                device="cpu",
                plan=dataclasses.replace(PLAN, precision="fp32"),
                reason="1.83x the time of the chosen plan",
            ),
            Rejection(
                device="cpu",
                plan=dataclasses.replace(PLAN, loader="workers", num_workers=1),
                reason="1.21x the time: the worker takes a core from the model",
            ),
        ),
        explanation=(
            "micro-batch 512: BatchNorm couples samples in groups of 512, so a group is never cut",
            "bf16: 1.8x as fast as fp32 here; its gradient differs by 0.4 % from fp32 on three batches (limit 2 %)",
            "channels-last: convolutions run 12 % faster than contiguous",
            "memory loader: 40.4 MiB of images fit in memory, no item is touched by Python",
            "checkpoint every 30 s: holds training up for 12 ms, 0.04 % of the time",
        ),
        took_s=6.4,
    )


def spec(name: str = "fashion-resnet", **settings: JSON) -> JobSpec:
    """What the job is; `settings` are changed ones."""
    return JobSpec(
        name=name,
        entry="train_me.py",
        entry_digest="5be1" * 16,
        parameters={"width": 64, "lr": 0.02, "epochs": EPOCHS},
        settings={
            "loss": "cross_entropy",
            "metrics": ["accuracy"],
            "optimizer": {"type": "SGD", "lr": 0.02, "momentum": 0.9, "nesterov": True},
            "schedule": {"type": "OneCycle", "peak_at": 0.3},
            "batch": BATCH,
            "until": {"type": "Duration", "value": EPOCHS, "unit": "epochs"},
            "augment": [{"type": "RandomShift", "pixels": 2}, {"type": "RandomFlip"}],
            "seed": 0,
            **settings,
        },
        data_class="indexed",
        data_fingerprint="c0ffee" * 8,
        num_train=NUM_TRAIN,
        weights_digest="ab12" * 16,
    )


def launched(**fields: Any) -> Launch:
    """The record of a run on `ssh:box`, with these fields."""
    about = {"run": "run", "place": "ssh:box", "kind": "ssh", "handle": {}, "identity": "1d", "code_digest": "c0de"}
    none = {"environment_digest": "", "arguments": (), "submitted_at": ""}
    return Launch(**about | none | fields)


def loss_at(samples: float, noise: random.Random) -> float:
    """A training loss such as image classifiers have."""
    return 0.17 + 2.1 * math.exp(-samples / 21_000) + noise.gauss(0, 0.012)


def accuracy_at(samples: float) -> float:
    """An accuracy on held-out data that rises to 93 % and slips at the very end."""
    rise = 0.935 - 0.22 * math.exp(-samples / 60_000)
    return rise - (0.0016 if samples >= TOTAL_SAMPLES else 0.0)


def one_cycle(progress: float) -> float:
    """The learning rate over a run."""
    return 0.02 * (progress / 0.3 if progress < 0.3 else 0.5 + 0.5 * math.cos(math.pi * (progress - 0.3) / 0.7))


@dataclasses.dataclass
class Teller:
    """Logs events of a run with a clock of its own: `wall_s` over the whole run, `split_s` since the last progress."""

    seed: int = 0
    at: float = START_S
    samples: int = 0
    rate: float = RATE
    events: list[Event] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.noise = random.Random(self.seed)
        self.split = dict.fromkeys(("data", "update", "evaluation", "checkpoint"), 0.0)
        self.wall_s = 0.8

    def spend(self, phase: str, seconds: float) -> None:
        self.split[phase] += seconds
        self.wall_s += seconds * 1.004

    def tell(self, kind: str, after_s: float = 0.0, **fields: JSON) -> None:
        self.at += after_s
        self.events.append(Event(kind=kind, at=self.at, fields=fields))

    def begin(self) -> None:
        chosen = decision().chosen
        self.tell(
            "planned",
            6.4,
            run=NAME,
            plan=to_json(chosen.plan),
            took_s=6.4,
            device=DEVICE.model,
            forecast=to_json(chosen.forecast),
            explanation=list(decision().explanation),
        )
        self.start()

    def start(self) -> None:
        self.tell(
            "started",
            0.5,
            samples=self.samples,
            total_samples=TOTAL_SAMPLES,
            data=DATA,
            level="same law",
            total_updates=UPDATES_PER_EPOCH * EPOCHS,
            environment=to_json(ENVIRONMENT),
            run=NAME,
        )

    def train(self, until: int, *, every: int = 3 * BATCH) -> None:
        """Progress once every `every` samples, evaluations at epochs' ends, a checkpoint every 45,000 samples."""
        while self.samples < until:
            before = self.samples
            epoch_end = (before // NUM_TRAIN + 1) * NUM_TRAIN
            self.samples = min(before + every, epoch_end, until)
            took = (self.samples - before) / (self.rate * (1 + self.noise.gauss(0, 0.02)))
            self.spend("update", took * 0.975)
            self.spend("data", took * 0.025)
            self.progress(self.samples - before, took)
            if before // 45_000 != self.samples // 45_000:
                self.checkpoint()
            if self.samples == epoch_end:
                self.evaluate("valid")

    def progress(self, num_samples: int, took: float) -> None:
        share = self.samples / TOTAL_SAMPLES
        split, self.split = self.split, dict.fromkeys(self.split, 0.0)
        self.tell(
            "progress",
            took,
            samples=self.samples,
            total_samples=TOTAL_SAMPLES,
            epoch=self.samples // NUM_TRAIN,
            updates=self.samples // BATCH,
            loss=loss_at(self.samples, self.noise),
            lr=one_cycle(share),
            samples_per_s=num_samples / took,
            wall_s=self.wall_s,
            eta_s=(TOTAL_SAMPLES - self.samples) / self.rate * 1.06,
            split_s=split,
            resident_bytes=int(BASELINE_BYTES + 2**20 * 880 * (1 - math.exp(-self.samples / 6000))),
        )

    def checkpoint(self) -> None:
        self.spend("checkpoint", 0.011)
        self.tell(
            "checkpointed",
            0.011,
            samples=self.samples,
            bytes=26_400_000,
            blocked_s=0.011,
            write_s=0.19,
            path=f"checkpoints/{self.samples:012d}",
        )

    def evaluate(self, split: str) -> None:
        took = 1.8 if split == "valid" else 3.1
        self.spend("evaluation", took)
        metrics = {"accuracy": accuracy_at(self.samples), "loss": 0.21 + 0.5 * math.exp(-self.samples / 60_000)}
        metrics = metrics if split == "valid" else {"accuracy": 0.92614, "loss": 0.2291}
        self.tell(
            "evaluated",
            took,
            split=split,
            samples=self.samples,
            metrics=metrics,
            took_s=took,
            best=split == "valid" and self.samples < TOTAL_SAMPLES,
        )

    def finish(self) -> None:
        self.evaluate("test")
        metrics = {"valid/accuracy": 0.9326, "valid/loss": 0.2156, "test/accuracy": 0.92614, "test/loss": 0.2291}
        self.tell(
            "finished",
            0.4,
            run=NAME,
            metrics=metrics,
            samples=self.samples,
            wall_s=self.wall_s,
            updates=UPDATES_PER_EPOCH * EPOCHS,
            peak_bytes=880 * 2**20,
            report=f"runs/{NAME}/report.html",
        )


def whole_run() -> list[Event]:
    """Events of a run that was never stopped."""
    teller = Teller()
    teller.begin()
    teller.train(TOTAL_SAMPLES)
    teller.finish()
    return teller.events


def on_gpu(events: Sequence[Event]) -> list[Event]:
    """The same events from a GPU, on which an eighth of the process's memory is allocated."""

    def there(event: Event) -> Event:
        allocated = {"allocated_bytes": event.fields["resident_bytes"] // 8}
        return dataclasses.replace(event, fields=event.fields | allocated)

    return [there(event) if event.kind == "progress" else event for event in events]


def killed_and_resumed() -> list[Event]:
    """Events of a run killed 25,000 samples after its last checkpoint, and continued an hour later."""
    first = Teller()
    first.begin()
    first.train(160_256)
    saved = [event for event in first.events if event.kind == "checkpointed"][-1]
    kept = [e for e in first.events if e.kind == "progress" and e.fields["samples"] <= saved.fields["samples"]][-1]
    second = Teller(seed=7, at=first.at + 3600, samples=saved.fields["samples"], rate=RATE * 0.93)
    second.wall_s = kept.fields["wall_s"]
    second.start()
    second.tell("resumed", 0.1, samples=second.samples, updates=second.samples // BATCH, checkpoint="000000135168")
    second.tell("warned", 2.0, message="another process is using 40 % of the CPU; throughput is 7 % below the forecast")
    second.train(TOTAL_SAMPLES)
    second.finish()
    return [*first.events, *second.events]


def failed_run() -> list[Event]:
    """Events of a run whose loss stopped being finite in its second epoch."""
    teller = Teller()
    teller.begin()
    teller.train(70_144)
    teller.tell("warned", 0.2, message="loss is nan at update 138 (70,656 samples)")
    return teller.events


def young_run() -> list[Event]:
    """Events of a run that has only just begun: one progress, no evaluation."""
    teller = Teller()
    teller.begin()
    teller.train(1536)
    return teller.events


def changed_plan(samples: int, **changes: object) -> PlanSwitch:
    """A change of the story's plan at a position [samples], which is that of an update."""
    plan = dataclasses.replace(PLAN, **changes)
    return PlanSwitch(
        update=-(-samples // 512), samples=samples, plan=plan, kind="changed", why="a neighbour holds a core"
    )


def report(
    events: Sequence[Event],
    *,
    name: str = NAME,
    status: RunStatus = "finished",
    failure: str | None = None,
    has_plan: bool = True,
) -> Report:
    """The report of a run with these `events`."""
    last = next((e for e in reversed(events) if e.kind in ("progress", "finished")), None)
    fields = last.fields if last else {}
    run = Run(
        name=name,
        status=status,
        created_at="2026-01-01T00:00:00+00:00",
        spec_digest=spec().digest(),
        total_samples=TOTAL_SAMPLES,
        metrics=fields.get("metrics", {}),
        samples=fields.get("samples", 0),
        updates=fields.get("updates", 0),
        wall_s=fields.get("wall_s", 0.0),
        failure=failure,
    )
    known = {"device": DEVICE, "environment": ENVIRONMENT, "coupling": COUPLING} if has_plan else {}
    nothing = {"device": None, "environment": None, "coupling": None}
    planned = decision() if has_plan else None
    return Report(run=run, spec=spec(), decision=planned, events=tuple(events), **(nothing | known))
