"""The cost of checkpoints in a run: each is copied between two updates, and written while training goes on.

Every process copies and writes its own part: shards divide the state, and replicas take turns with its tensors. The
forecast rests on the rates below; once a run has saved, its own measurements replace them (`stoker.training.loop`).
Measured on 2026-11-22 on two shared cores with an ordinary disk, the median of 20 checkpoints of a model of 100 kB:
2.2 ms of waiting (0.9 ms the least) and 39 ms of writing, flushed and renamed (7 ms the least). Nothing was measured on
GPUs.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from stoker.devices import hardware
from stoker.devices.cluster import NODE_DEVICES
from stoker.devices.hardware import checkpoint_interval_s, lost_s, mtbf_h
from stoker.records import Decision, Estimate, Plan
from stoker.units import format_seconds

ONCE_S = 2e-3
"""Fixed time that training waits for a checkpoint [s]: gathering the state, a folder, a thread to write it."""

CPU_COPY_BYTES_PER_S = 2e9
"""Copying a state within a CPU's memory, to new pages [bytes/s]; a floor, measured on two cores."""

LINK_SHARE = 0.2
"""Share of the host link's catalogue rate that a copy to memory that is not pinned reaches: a judgement."""

UNKNOWN_LINK_BYTES_PER_S = 15.75e9
"""The host link of a GPU without one in the catalogue [bytes/s]: PCIe 3.0 x16, one way."""

WRITING_ONCE_S = 20e-3
"""Fixed time of writing a checkpoint, files and folders made durable [s]."""

DISK_BYTES_PER_S = {"cpu": 500e6, "cuda": 2e9}
"""Write rate of a machine's disk [bytes/s], by kind of device: an SATA drive, and one NVMe drive; assumptions."""

_HOPELESS = 1000.0
"""Failures that cost more than so many times the run are forecast as that: it would not end."""

LEAST_LOST_SHARE = 0.01
"""Failures are part of a forecast if they are expected to cost at least this share of it."""


@dataclass(frozen=True, kw_only=True)
class Saving:
    """Cost of checkpoints and failures in a run.

    `every_s` is the time between two checkpoints, not counting those of evaluations; `number` of them are saved, each
    of which holds training up for `one`; `lost_s` is the expected loss to failures, None if it is too little to matter.
    """

    every_s: float
    number: float
    one: Estimate
    lost_s: float | None

    @property
    def total_s(self) -> float:
        """Time of all checkpoints and failures [s]."""
        return self.number * self.one.value + (self.lost_s or 0.0)


def saving(
    plan: Plan,
    saved_bytes: float,
    *,
    training_s: float,
    unsaved_s: float,
    evaluations: int,
    link_bytes_per_s: float | None = None,
    machine_devices: int = NODE_DEVICES,
    restart_s: float | None = None,
) -> Saving:
    """Cost of checkpoints and failures in a run under `plan`.

    Args:
        plan: has the checkpoint interval, or the failure rate of its devices, and their number.
        saved_bytes: largest number of bytes that one process writes.
        training_s: updates alone [s].
        unsaved_s: all but checkpoints [s].
        evaluations: number of evaluations; each may be followed by a checkpoint.
        link_bytes_per_s: of a GPU to its host, one way; None if unknown.
        machine_devices: devices of one machine, which share its disk.
        restart_s: time to go on after a failure; None: by the number of machines.
    """
    kind = "cpu" if plan.device == "cpu" else "cuda"
    devices = plan.layout.world_size
    copying_s = ONCE_S + saved_bytes / copy_bytes_per_s(kind, link_bytes_per_s)
    moved_s = min(devices, machine_devices) * saved_bytes / DISK_BYTES_PER_S[kind]
    writing_s, mtbf_s = WRITING_ONCE_S + moved_s, 3600 * mtbf_h(kind, plan.device_mtbf_h) / devices
    every_s = plan.checkpoint_every_s
    if plan.device_mtbf_h is not None:
        every_s = checkpoint_interval_s(copying_s, writing_s, mtbf_s)
    number = evaluations + training_s / every_s
    # A checkpoint saved before the last one is written waits for that, at most for all of its writing.
    waiting_s = max(0.0, writing_s - max(0.0, unsaved_s / number))
    one = Estimate(
        value=copying_s + waiting_s, low=copying_s / 3, high=3 * copying_s + writing_s, unit="s", basis="roofline"
    )
    restart_s = hardware.restart_s(devices, machine_devices) if restart_s is None else restart_s
    lost = min(lost_s(unsaved_s, every_s, restart_s + moved_s, mtbf_s), _HOPELESS * unsaved_s)
    matters = lost >= LEAST_LOST_SHARE * unsaved_s
    return Saving(every_s=every_s, number=number, one=one, lost_s=lost if matters else None)


def copy_bytes_per_s(kind: str, link_bytes_per_s: float | None) -> float:
    """Rate of copying a state to the memory that it is written from [bytes/s]."""
    return CPU_COPY_BYTES_PER_S if kind == "cpu" else LINK_SHARE * (link_bytes_per_s or UNKNOWN_LINK_BYTES_PER_S)


def settled(decision: Decision) -> Decision:
    """The decision with the checkpoint interval of its forecasts in its plans, and a line on it for several devices."""
    candidates = []
    for candidate in decision.candidates:
        every_s, plan = candidate.forecast.checkpoint_every_s, candidate.plan
        if plan.device_mtbf_h is not None and every_s is not None:
            plan = dataclasses.replace(plan, checkpoint_every_s=every_s)
        candidates.append(dataclasses.replace(candidate, plan=plan))
    plan, forecast, lines = candidates[0].plan, candidates[0].forecast, decision.explanation
    each_h, devices = plan.device_mtbf_h, plan.layout.world_size
    if each_h is not None and devices > 1:
        line = (
            f"checkpoints: every {format_seconds(plan.checkpoint_every_s)}, each holding training up for "
            f"{format_seconds(forecast.checkpoint_s.value)} by forecast, until the run has measured it; one of "
            f"{devices:,} devices fails in {format_seconds(3600 * each_h / devices)}, if each does once in "
            f"{each_h:,.0f} h (--device-mtbf)"
        )
        if forecast.lost_s is not None:
            useful = 1 - forecast.lost_s / forecast.total_s.value
            line += (
                f", which costs {format_seconds(forecast.lost_s)} of the run: time and money to finish include it, "
                f"goodput {useful:.1%}"
            )
        lines = (*lines, line)
    return dataclasses.replace(decision, candidates=tuple(candidates), explanation=lines)
