"""What checkpoints take of a run: each is copied between two updates, and written while training goes on.

Every process copies and writes what is its to write: shards divide the state, and replicas take turns with its tensors.
The forecast rests on what is said of rates below; once a run has saved, its own measurements take their place
(`stoker.training.loop`). Measured on 2026-11-22 on two shared cores with a disk of the usual kind, the median of 20
checkpoints of a model of 100 kB: 2.2 ms of waiting (0.9 ms the least) and 39 ms of writing, flushed and renamed (7 ms
the least). Nothing here was measured on GPUs.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from stoker.devices.failure_rates import checkpoint_interval_s, lost_s, mtbf_h
from stoker.devices.interconnects import NODE_DEVICES
from stoker.records import Candidate, Decision, Estimate, Plan
from stoker.units import format_seconds

ONCE_S = 2e-3
"""What training waits for however small the state is: gathering it, a folder, a thread to write it [s]."""

CPU_COPY_BYTES_PER_S = 2e9
"""Copying a state within a CPU's memory, to pages that are new; a floor, measured on two cores."""

LINK_SHARE = 0.2
"""Of the host link's rate in the catalogue, what a copy to memory that is not pinned reaches: a judgement."""

UNKNOWN_LINK_BYTES_PER_S = 15.75e9
"""The host link of a GPU whose row has none: PCIe 3.0 x16, one way."""

WRITING_ONCE_S = 20e-3
"""Writing a checkpoint: files and folders made durable, whatever their size [s]."""

DISK_BYTES_PER_S = {"cpu": 500e6, "cuda": 2e9}
"""What the disk of a machine takes in [bytes/s], by kind of device: an SATA drive, and one NVMe drive; assumptions."""

RESTART_S = 60.0
"""Until processes are there again after a failure [s], beside reading the state back: a judgement."""

LEAST_LOST_SHARE = 0.01
"""Failures are part of a forecast where they are expected to cost at least this share of it."""


@dataclass(frozen=True, kw_only=True)
class Saving:
    """What checkpoints and failures take of a run.

    `every_s` is the time from one checkpoint to the next, besides those of evaluations; `number` of them are saved,
    each of which holds training up for `one`; `lost_s` is expected to be lost to failures, None where that is too
    little to matter.
    """

    every_s: float
    number: float
    one: Estimate
    lost_s: float | None

    @property
    def total_s(self) -> float:
        """All of it [s]."""
        return self.number * self.one.value + (self.lost_s or 0.0)


def saving(
    plan: Plan,
    saved_bytes: float,
    *,
    training_s: float,
    unsaved_s: float,
    evaluations: int,
    link_bytes_per_s: float | None = None,
) -> Saving:
    """What checkpoints and failures take of a run under `plan`.

    Args:
        plan: says how often they are saved, or at which rate its devices fail, and how many there are.
        saved_bytes: what the process writes that has the most to write.
        training_s: updates alone [s].
        unsaved_s: all but checkpoints [s].
        evaluations: each of which may be followed by a checkpoint.
        link_bytes_per_s: of a GPU to its host, one way; None where it is not known.
    """
    kind = "cpu" if plan.device == "cpu" else "cuda"
    devices = plan.layout.world_size
    copying_s = ONCE_S + saved_bytes / copy_bytes_per_s(kind, link_bytes_per_s)
    moved_s = min(devices, NODE_DEVICES) * saved_bytes / DISK_BYTES_PER_S[kind]  # devices of a machine share its disk
    writing_s, mtbf_s = WRITING_ONCE_S + moved_s, 3600 * mtbf_h(kind, plan.device_mtbf_h) / devices
    every_s = plan.checkpoint_every_s
    if plan.device_mtbf_h is not None:
        every_s = checkpoint_interval_s(copying_s, writing_s, mtbf_s)
    number = evaluations + training_s / every_s
    one = _estimate(copying_s, writing_s, unsaved_s / number)
    lost = lost_s(unsaved_s, every_s, RESTART_S + moved_s, mtbf_s)
    matters = lost >= LEAST_LOST_SHARE * unsaved_s
    return Saving(every_s=every_s, number=number, one=one, lost_s=lost if matters else None)


def copy_bytes_per_s(kind: str, link_bytes_per_s: float | None) -> float:
    """What copying a state to where it is written from reaches [bytes/s]."""
    return CPU_COPY_BYTES_PER_S if kind == "cpu" else LINK_SHARE * (link_bytes_per_s or UNKNOWN_LINK_BYTES_PER_S)


def _estimate(copying_s: float, writing_s: float, apart_s: float) -> Estimate:
    """What one checkpoint holds training up for [s].

    Saved sooner than the one before is written, it waits for that; at most for all of its writing.
    """
    value = copying_s + max(0.0, writing_s - max(0.0, apart_s))
    return Estimate(value=value, low=copying_s / 3, high=3 * copying_s + writing_s, unit="s", basis="roofline")


def settled(decision: Decision) -> Decision:
    """The decision with the time between checkpoints that its forecasts rest on in its plans, and a line on it."""
    candidates = tuple(map(_with_interval, decision.candidates))
    chosen, lines = candidates[0], decision.explanation
    if chosen.plan.device_mtbf_h is not None and chosen.plan.layout.world_size > 1:
        lines = (*lines, _in_words(chosen))
    return dataclasses.replace(decision, candidates=candidates, explanation=lines)


def _with_interval(candidate: Candidate) -> Candidate:
    every_s = candidate.forecast.checkpoint_every_s
    if candidate.plan.device_mtbf_h is None or every_s is None:
        return candidate
    return dataclasses.replace(candidate, plan=dataclasses.replace(candidate.plan, checkpoint_every_s=every_s))


def _in_words(candidate: Candidate) -> str:
    """On what the interval rests."""
    plan, forecast, each_h = candidate.plan, candidate.forecast, candidate.plan.device_mtbf_h or 0.0
    devices = plan.layout.world_size
    words = (
        f"checkpoints: every {format_seconds(plan.checkpoint_every_s)}, each holding training up for "
        f"{format_seconds(forecast.checkpoint_s.value)} by forecast, until the run has measured it; one of "
        f"{devices:,} devices fails in {format_seconds(3600 * each_h / devices)}, if each does once in {each_h:,.0f} h "
        "(--device-mtbf)"
    )
    return words if forecast.lost_s is None else f"{words}, which costs {format_seconds(forecast.lost_s)} of the run"
