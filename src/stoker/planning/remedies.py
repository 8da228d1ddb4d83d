"""Changes that would make a run faster, each with what it would save."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from stoker.records import Basis, Device, Estimate, Plan

WORTH_TELLING = 0.02
"""The least share of the training time that a change must save to be spoken of [fraction]."""
_FOR_LEARNING_OTHERWISE = 2.0
"""A change of what is learned is advised only where it saves this many times what the best other change does."""
_WORKERS_BESIDE_A_GPU = 4


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """One change, an imperative sentence, and the seconds of a run that it would save, in 8 cases of 10 low to high.

    `changes_job` says that something other than the execution changes: what is learned, or what is looked at meanwhile.
    """

    change: str
    saved_s: float
    low_s: float
    high_s: float
    basis: Basis
    changes_job: bool = False

    def gain(self, whole_s: float) -> Estimate:
        """The share of a training time of `whole_s` [s] that it saves [fraction]."""
        value = self.saved_s / whole_s
        low, high = min(self.low_s / whole_s, value), max(self.high_s / whole_s, value)
        return Estimate(value=value, low=low, high=min(high, 1.0), unit="of the training time", basis=self.basis)


@dataclass(frozen=True, kw_only=True)
class RunTimes:
    """What a run showed of its time.

    `split_s` is where it went [s]: `update`, `data`, `evaluation`, `checkpoint`. `updates` are those that it tells of.
    `samples_per_s` is the rate over updates and waiting for data, None where nothing was trained. `evaluations_s` are
    the single evaluations while training [s], those at the end left out.
    """

    split_s: Mapping[str, float]
    updates: int
    samples_per_update: float
    samples_per_s: float | None
    evaluations_s: Sequence[float] = ()
    num_checkpoints: int = 0

    @property
    def update_s(self) -> float | None:
        """One update, with waiting for its data [s]."""
        return self.samples_per_update / self.samples_per_s if self.samples_per_s else None


def best_remedy(known: Sequence[Remedy], whole_s: float) -> Remedy | None:
    """The change to advise for a run of `whole_s` of training time [s]; None where none is worth telling."""
    worth = sorted((one for one in known if one.saved_s > WORTH_TELLING * whole_s), key=lambda one: -one.saved_s)
    if not worth or whole_s <= 0:
        return None
    harmless = [one for one in worth if not one.changes_job]
    if harmless and worth[0].saved_s < _FOR_LEARNING_OTHERWISE * harmless[0].saved_s:
        return harmless[0]
    return worth[0]


def remedies(times: RunTimes, plan: Plan, device: Device) -> Iterator[Remedy]:
    """What follows from where the time went, whatever the model: loaders, evaluations, checkpoints."""
    split = times.split_s
    yield from _of_data(split.get("update", 0.0), split.get("data", 0.0), plan, device)
    for change, spent_s, count, changes_job in (
        ("Evaluate half as often: Job(evaluate_every=…).", sum(times.evaluations_s), len(times.evaluations_s), True),
        (f"Save half as often: `--checkpoint-every {2 * plan.checkpoint_every_s:g}`.", split.get("checkpoint", 0.0),
         times.num_checkpoints, False),
    ):  # fmt: skip
        if count >= 2:
            saved = spent_s * (count // 2) / count
            yield Remedy(
                change=change, saved_s=saved, low_s=0.8 * saved, high_s=1.2 * saved, basis="measured here",
                changes_job=changes_job,
            )  # fmt: skip


def _of_data(update_s: float, data_s: float, plan: Plan, device: Device) -> Iterator[Remedy]:
    """Ways to wait less for samples. How much fetching costs is known from the wait, and roughly."""
    if data_s <= 0:
        return
    cheaper = data_s / 2
    if plan.loader == "workers":
        # Fetching takes what an update and the wait for it take together, beside each other.
        cheaper = min(data_s, (update_s + data_s) / 2)
        if device.kind == "cuda":
            yield Remedy(
                change=f"Take {2 * plan.num_workers} loader workers instead of {plan.num_workers} (--plan), if the "
                "host has the cores.",
                saved_s=cheaper, low_s=0.0, high_s=data_s, basis="roofline",
            )  # fmt: skip
    if plan.loader == "inline":
        workers = device.cores if device.kind == "cpu" else _WORKERS_BESIDE_A_GPU
        beside = max(update_s, data_s / workers)
        if device.kind == "cpu":
            beside = max(beside, (update_s * plan.threads + data_s) / max(1, device.cores))
        saved = update_s + data_s - beside
        yield Remedy(
            change=f'Fetch samples in {workers} loader workers (--plan with loader "workers").',
            saved_s=saved, low_s=min(0.0, saved), high_s=data_s, basis="roofline",
        )  # fmt: skip
    if plan.loader in ("memory", "device"):
        return  # gathered from arrays: there is nothing to decode
    yield Remedy(
        change="Make a sample cheaper to fetch; at half the cost (decode once, keep arrays, augment whole batches by "
        "Job(augment=…)) the wait shrinks.",
        saved_s=cheaper, low_s=0.0, high_s=data_s, basis="roofline", changes_job=True,
    )  # fmt: skip
