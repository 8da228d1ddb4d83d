"""The bottleneck of a run: from where its time went, what its updates do and what the device reaches, to one sentence.

The part with the most training time is the bottleneck; planning is not counted. The inside of an update is not measured
while training: it is forecast per operation and scaled to the measured update. If the two differ too much, the
verdict is "unknown".

An operation counts as arithmetic if its FLOPs take longer at the device's rate than its bytes at its bandwidth
(the roofline: Williams, Waterman and Patterson, CACM 2009), else as memory bandwidth; in both cases with its forecast
time, which for small operations is far above the roof. On a CPU, the least time of an operation counts as the host's.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from stoker.planning.model.compiled_graphs import kernel_shares
from stoker.planning.model.gpu_roofline import flops_by_dtype
from stoker.planning.model.update_time import OperationTimes, UpdateTime, UpdateWork, moving_by
from stoker.records import (
    Achieved,
    Basis,
    Bottleneck,
    Bound,
    Ceilings,
    Device,
    Estimate,
    Hardware,
    KernelTable,
    Operation,
    Plan,
    Share,
)
from stoker.units import format_count, format_seconds

FURTHEST = {"calibrated": 3.0}
_FURTHEST_UNMEASURED = 5.0
"""Largest ratio of measured to forecast update time, either way, for which the forecast is used; by the forecast's
basis. On a device whose operations were not measured, only the proportions are of use."""
_OUTSIDE_UPDATES: dict[str, Bound] = {"data": "data", "evaluation": "evaluation", "checkpoint": "checkpoints"}


def find_bottleneck(
    times: RunTimes,
    plan: Plan,
    device: Device,
    *,
    bounds: UpdateBounds | str,
    ceilings: Ceilings | None = None,
    considered: Sequence[Remedy] = (),
) -> Bottleneck:
    """The bottleneck of a run, and the one change that would help most.

    Args:
        times: measured times of the run.
        plan: how it was executed.
        device: where.
        bounds: an update by what it waits for, or why that is unknown.
        ceilings: rates that the device reaches, if measured.
        considered: changes whose effect on an update was forecast.
    """
    parts, why_unknown = _parts(times, bounds, is_cuda=device.kind == "cuda")
    whole = sum(parts.values())
    bound_by = max(parts, key=lambda part: parts[part]) if whole > 0 else "unknown"
    share = parts[bound_by] / whole if whole > 0 else 0.0
    achieved, mfu, problems = _utilisation(times, bounds, ceilings)
    best = best_remedy((*considered, *remedies(times, plan, device)), whole)
    advice = "No change known here would save 2 % of the training time"
    if bound_by in ("arithmetic", "memory bandwidth"):
        advice += "; for faster devices, see `stoker plan JOB --on all`"
    return Bottleneck(
        bound_by=bound_by,
        sentence=_sentence(bound_by, share, why_unknown),
        shares=tuple(Share(what=what, value=s) for what, s in sorted(parts.items(), key=lambda one: -one[1]) if s > 0),
        achieved=achieved,
        mfu=mfu,
        evidence=_evidence(times, bounds, why_unknown, ceilings),
        advice=best.change if best is not None else f"{advice}.",
        gain=best.gain(whole) if best is not None else None,
        problems=problems,
    )


def _parts(times: RunTimes, bounds: UpdateBounds | str, *, is_cuda: bool) -> tuple[dict[Bound, float], str]:
    """Training time by what it waits for [s], and why the inside of updates is unknown ("" if it is known)."""
    split = times.split_s
    parts: dict[Bound, float] = {bound: split.get(phase, 0.0) for phase, bound in _OUTSIDE_UPDATES.items()}
    updates_s = split.get("update", 0.0)
    if isinstance(bounds, str):
        return {**parts, "unknown": updates_s}, bounds
    forecast_s = bounds.total_s * times.updates
    if is_cuda:
        # The host fetches samples while the GPU works: only what the GPU cannot have been busy with is waiting.
        waiting_s = max(0.0, min(parts["data"], updates_s + parts["data"] - forecast_s))
        updates_s, parts["data"] = updates_s + parts["data"] - waiting_s, waiting_s
    furthest = FURTHEST.get(bounds.basis, _FURTHEST_UNMEASURED)
    if not forecast_s > 0 or not 1 / furthest <= updates_s / forecast_s <= furthest:
        measured = format_seconds(updates_s / times.updates) if times.updates else "unknown"
        why = f"an update takes {measured}, its operations were forecast to take {format_seconds(bounds.total_s)}"
        why += "; something else may have held the device" if updates_s > forecast_s else ""
        return {**parts, "unknown": updates_s}, why
    scale = updates_s / bounds.total_s
    return {**parts, **{bound: seconds * scale for bound, seconds in bounds.seconds.items()}}, ""


def _utilisation(
    times: RunTimes, bounds: UpdateBounds | str, ceilings: Ceilings | None
) -> tuple[tuple[Achieved, ...], float | None, tuple[str, ...]]:
    """Rates with their ceilings, the model FLOPs utilisation, and a problem if it exceeds 1."""
    update_s = times.update_s
    if isinstance(bounds, str) or update_s is None:
        return (), None, ()
    rates = ceilings.gemm_flops if ceilings is not None else {}
    achieved = [
        Achieved(what=f"{dtype} arithmetic", value=flops / update_s, unit="FLOP/s", ceiling=rates.get(dtype))
        for dtype, flops in sorted(bounds.flops.items(), key=lambda one: -one[1])
    ]
    bandwidth = ceilings.copy_bytes_per_s if ceilings is not None else None
    moved = Achieved(what="memory traffic", value=bounds.num_bytes / update_s, unit="bytes/s", ceiling=bandwidth)
    if not rates or any(dtype not in rates for dtype in bounds.model_flops) or not bounds.model_flops:
        return (*achieved, moved), None, ()
    mfu = sum(flops / rates[dtype] for dtype, flops in bounds.model_flops.items()) / update_s
    if mfu <= 1:
        return (*achieved, moved), mfu, ()
    problem = (
        f"The model's FLOPs in the time they took come to {100 * mfu:.0f} % of what matrix products were measured to "
        "reach on this device. That cannot be, so no utilisation is given: measure again with `stoker doctor --fresh` "
        "while nothing else runs; if it stays so, the FLOPs are miscounted, which is a bug."
    )
    return (moved,), None, (problem,)


def _sentence(bound_by: Bound, share: float, why_unknown: str) -> str:
    taken = f"{100 * share:.0f} % of the training time" + ("" if share >= 0.5 else ", more than anything else")
    words: dict[Bound, str] = {
        "data": f"Data bound this run: waiting for samples takes {taken}.",
        "host launch": f"The host bounds this run: Python, autograd and starting operations take {taken}.",
        "memory bandwidth": f"Memory bandwidth bounds this run: moving tensors through memory takes {taken}.",
        "arithmetic": f"Arithmetic bounds this run: products and convolutions take {taken}.",
        "copies": f"Copies bound this run: batches on their way to the device take {taken}.",
        "checkpoints": f"Checkpoints bound this run: standing still for them takes {taken}.",
        "evaluation": f"Evaluation bounds this run: it takes {taken}.",
        "unknown": f"What bounds this run is unknown: updates take {taken}, and {why_unknown}.",
    }
    return words[bound_by]


def _evidence(
    times: RunTimes, bounds: UpdateBounds | str, why_unknown: str, ceilings: Ceilings | None
) -> tuple[str, ...]:
    lines: list[str] = []
    if why_unknown and isinstance(bounds, str):
        lines.append(f"the inside of updates is unknown: {why_unknown}")
    if not isinstance(bounds, str) and times.updates:
        measured_s = times.split_s.get("update", 0.0) / times.updates
        num = format_count(round(bounds.num_operations))
        forecast = f"{format_seconds(bounds.total_s)} ({bounds.basis})"
        lines.append(f"an update takes {format_seconds(measured_s)}; its {num} operations were forecast at {forecast}")
        if bounds.is_profiled:
            lines.append("the profile of this run separates arithmetic from memory")
        if bounds.from_system_s > 0.05 * bounds.total_s:
            lines.append(
                f"{100 * bounds.from_system_s / bounds.total_s:.0f} % of an update goes to memory had from the system "
                "(page faults), counted as memory bandwidth"
            )
    if ceilings is None:
        lines.append("what this device reaches was not measured, so no utilisation is known: `stoker doctor` measures")
    else:
        threads = "1 thread" if ceilings.threads == 1 else f"{ceilings.threads} threads"
        lines.append(f"ceilings measured here on {ceilings.measured_at[:10]} with {threads}")
    return tuple(lines)


_START_S = 4e-6
"""Least time of an operation on a CPU that was not measured [s]."""
_UNKNOWN_FLOPS_PER_BYTE = 10.0
"""Ridge point if rates or bandwidth are unknown; today's devices have 5 to 300 in their fastest dtype."""
_PHASES = ("gradient", "forward", "backward", "update")
_PRODUCT = re.compile(r"mm$|conv|attention|dot$|linear|lstm|gru")
_FROM_SYSTEM, _CROSSING = "memory had from the system", "the batch's way to the device"
"""Their names in `UpdateTime.shares`."""


@dataclass(frozen=True, kw_only=True)
class UpdateBounds:
    """The forecast of one update by what it waits for.

    `seconds` is the split [s]; of memory bandwidth, `from_system_s` are page faults. `flops` are executed ones by
    dtype, `model_flops` those without recomputation, `num_bytes` the bytes that operations read and write.
    `is_profiled`: arithmetic and memory are split by a profile of the run, not by forecast.
    """

    seconds: Mapping[Bound, float]
    flops: Mapping[str, float]
    model_flops: Mapping[str, float]
    num_bytes: float
    num_operations: float
    from_system_s: float
    basis: Basis
    is_profiled: bool = False

    @property
    def total_s(self) -> float:
        """Time of the update [s]."""
        return sum(self.seconds.values())


def update_bounds(
    work: UpdateWork,
    update: UpdateTime,
    times: OperationTimes,
    hardware: Hardware,
    ceilings: Ceilings | None = None,
    *,
    without_recomputation: UpdateWork | None = None,
    precision: str = "fp32",
    is_compiled: bool = False,
) -> UpdateBounds:
    """Split the forecast of an update by what it waits for.

    Args:
        work: the update's operations.
        update: its time, from `update_time` for the same work, times and hardware.
        times: of the device's operations.
        hardware: the device.
        ceilings: rates that it reaches, if measured; else the datasheet decides which roof an operation is under.
        without_recomputation: the same update without activation checkpointing (None: there is none).
        precision: the plan's; `tf32` is traced as fp32.
        is_compiled: elementwise chains are one kernel each.
    """
    operations = work.trace.operations
    left = [1.0] * len(operations)  # mean share of each operation's time that compiling leaves
    if is_compiled:
        each_s = [times.seconds(operation) for operation in operations]
        shares = kernel_shares(work.trace, each_s, moving_by(times, work.trace), work.chains)
        kept: defaultdict[int, list[float]] = defaultdict(list)
        for one, (of_time, _) in zip(work.trace.occurrences, shares, strict=True):
            kept[one.operation].append(of_time)
        left = [sum(kept[index]) / len(kept[index]) if kept[index] else 1.0 for index in range(len(operations))]
    executed = [(operations[index], count * left[index]) for index, _, _, count in work.counts]
    seconds: defaultdict[Bound, float] = defaultdict(float)
    start_s = 0.0  # of an operation's own time, the host's; a GPU's operations do not wait for it in theirs
    if hardware.device.kind != "cuda":
        start_s = hardware.benchmark.launch_s if hardware.benchmark is not None else _START_S
    for operation, count in executed:
        each = times.seconds(operation)
        started = min(start_s, each)
        seconds["host launch"] += count * started
        seconds[_roof(operation, hardware, ceilings, precision)] += count * (each - started)
    from_system_s, crossing_s = _named(update.shares, _FROM_SYSTEM), _named(update.shares, _CROSSING)
    # The rest of the update is Python, autograd, and a GPU's wait for operations that the host has not started yet.
    of_host = update.step_s.value - sum(seconds.values()) - from_system_s - crossing_s
    seconds["host launch"] += max(0.0, of_host)
    seconds["memory bandwidth"] += from_system_s
    seconds["copies"] += crossing_s
    once = without_recomputation or work
    return UpdateBounds(
        seconds=dict(seconds),
        flops=_flops(work, precision),
        model_flops=_flops(once, precision),
        num_bytes=sum((one.bytes_read + one.bytes_written) * count for one, count in executed),
        num_operations=sum(count for _, count in executed),
        from_system_s=from_system_s,
        basis=update.step_s.basis,
    )


def as_profiled(bounds: UpdateBounds, table: KernelTable) -> UpdateBounds:
    """The bounds with arithmetic and memory in proportion to the times of operations in a profile.

    Products, convolutions, attention and recurrent layers count as arithmetic, all else within updates as memory.
    """
    within = [one for one in table.kernels if one.phase in _PHASES and not one.operation.endswith("Backward0")]
    products_s = sum(table.seconds(one) for one in within if _PRODUCT.search(one.operation))
    whole_s = sum(table.seconds(one) for one in within)
    if whole_s <= 0:
        return bounds
    arithmetic, memory = (bounds.seconds.get(bound, 0.0) for bound in ("arithmetic", "memory bandwidth"))
    share, busy_s = products_s / whole_s, arithmetic + memory
    seconds: dict[Bound, float] = {"arithmetic": busy_s * share, "memory bandwidth": busy_s * (1 - share)}
    return replace(bounds, seconds={**bounds.seconds, **seconds}, is_profiled=True)


def _roof(operation: Operation, hardware: Hardware, ceilings: Ceilings | None, precision: str) -> Bound:
    """The bound of an operation."""
    if not operation.flops:
        return "memory bandwidth"
    (dtype,) = _in_their_dtype(flops_by_dtype([(operation, 1.0)]), precision)
    rates = {**hardware.dense_flops, **(ceilings.gemm_flops if ceilings is not None else {})}
    bandwidth = ceilings.copy_bytes_per_s if ceilings is not None else hardware.bandwidth_bytes_per_s
    rate = rates.get(dtype, rates.get("fp32"))
    flops_per_byte = rate / bandwidth if rate and bandwidth else _UNKNOWN_FLOPS_PER_BYTE
    num_bytes = operation.bytes_read + operation.bytes_written
    return "arithmetic" if operation.flops >= flops_per_byte * num_bytes else "memory bandwidth"


def _flops(work: UpdateWork, precision: str) -> dict[str, float]:
    operations = work.trace.operations
    return _in_their_dtype(flops_by_dtype((operations[index], count) for index, _, _, count in work.counts), precision)


def _in_their_dtype(flops: Mapping[str, float], precision: str) -> dict[str, float]:
    """FLOPs by the dtype they are computed in: `tf32` is traced as fp32."""
    return {precision if dtype == "fp32" and precision == "tf32" else dtype: count for dtype, count in flops.items()}


def _named(shares: Sequence[Share], what: str) -> float:
    """A share by its name; 0 if it is too small to be listed."""
    return sum(share.value for share in shares if share.what == what)


LEAST_SHARE = 0.02
"""Least share of the training time that a change must save to be advised [fraction]."""
_FOR_LEARNING_OTHERWISE = 2.0
"""A change of what is learned is advised only if it saves this many times as much as the best other change."""
_WORKERS_FOR_A_GPU = 4


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """One change, an imperative sentence, and the seconds of a run that it saves, in 8 cases of 10 low to high.

    `changes_job`: it changes more than the execution, such as what is learned or evaluated.
    """

    change: str
    saved_s: float
    low_s: float
    high_s: float
    basis: Basis
    changes_job: bool = False

    def gain(self, whole_s: float) -> Estimate:
        """Share of a training time of `whole_s` [s] that it saves [fraction]."""
        value = self.saved_s / whole_s
        low, high = min(self.low_s / whole_s, value), max(self.high_s / whole_s, value)
        return Estimate(value=value, low=low, high=min(high, 1.0), unit="of the training time", basis=self.basis)


@dataclass(frozen=True, kw_only=True)
class RunTimes:
    """Measured times of a run.

    `split_s` is time by phase [s]: `update`, `data`, `evaluation`, `checkpoint`. `updates` is their number.
    `samples_per_s` is the rate over updates and waiting for data, None if nothing was trained. `evaluations_s` are the
    single evaluations while training [s], without those at the end.
    """

    split_s: Mapping[str, float]
    updates: int
    samples_per_update: float
    samples_per_s: float | None
    evaluations_s: Sequence[float] = ()
    num_checkpoints: int = 0

    @property
    def update_s(self) -> float | None:
        """Time of one update, with waiting for its data [s]."""
        return self.samples_per_update / self.samples_per_s if self.samples_per_s else None


def best_remedy(known: Sequence[Remedy], whole_s: float) -> Remedy | None:
    """The change to advise for a run of `whole_s` of training time [s]; None if none saves enough."""
    worth = sorted((r for r in known if r.saved_s > LEAST_SHARE * whole_s), key=lambda remedy: -remedy.saved_s)
    if not worth or whole_s <= 0:
        return None
    harmless = [remedy for remedy in worth if not remedy.changes_job]
    if harmless and worth[0].saved_s < _FOR_LEARNING_OTHERWISE * harmless[0].saved_s:
        return harmless[0]
    return worth[0]


def remedies(times: RunTimes, plan: Plan, device: Device) -> Iterator[Remedy]:
    """Remedies that do not depend on the model: loaders, evaluations, checkpoints."""
    split = times.split_s
    yield from _of_data(split.get("update", 0.0), split.get("data", 0.0), plan, device)
    every_s = plan.checkpoint_every_s
    # The others were of best evaluations and of the end, which an interval does not change.
    at_intervals = sum(split.values()) // every_s if every_s > 0 else times.num_checkpoints
    for change, spent_s, count, fewer, changes_job in (
        (
            "Evaluate half as often: Job(evaluation=stoker.Evaluation(every=…)).",
            sum(times.evaluations_s),
            len(times.evaluations_s),
            len(times.evaluations_s) // 2,
            True,
        ),
        (
            f"Save half as often: `--checkpoint-every {2 * every_s:g}`.",
            split.get("checkpoint", 0.0),
            times.num_checkpoints,
            min(times.num_checkpoints, int(at_intervals)) // 2,
            False,
        ),
    ):
        if fewer > 0:
            saved = spent_s * fewer / count
            yield Remedy(
                change=change,
                saved_s=saved,
                low_s=0.8 * saved,
                high_s=1.2 * saved,
                basis="measured here",
                changes_job=changes_job,
            )


def _of_data(update_s: float, data_s: float, plan: Plan, device: Device) -> Iterator[Remedy]:
    """Ways to wait less for samples. The cost of fetching is estimated from the wait."""
    if data_s <= 0:
        return
    cheaper = data_s / 2
    if plan.loader == "workers":
        # Fetching overlaps with the update, and takes as long as the update and the wait together.
        cheaper = min(data_s, (update_s + data_s) / 2)
        if device.kind == "cuda":
            yield Remedy(
                change=f"Take {2 * plan.num_workers} loader workers instead of {plan.num_workers} (--plan), if the "
                "host has the cores.",
                saved_s=cheaper,
                low_s=0.0,
                high_s=data_s,
                basis="roofline",
            )
    if plan.loader == "inline":
        workers = device.cores if device.kind == "cpu" else _WORKERS_FOR_A_GPU
        overlapped_s = max(update_s, data_s / workers)
        if device.kind == "cpu":
            overlapped_s = max(overlapped_s, (update_s * plan.threads + data_s) / max(1, device.cores))
        saved = update_s + data_s - overlapped_s
        yield Remedy(
            change=f'Fetch samples in {workers} loader workers (--plan with loader "workers").',
            saved_s=saved,
            low_s=min(0.0, saved),
            high_s=data_s,
            basis="roofline",
        )
    if plan.loader in ("memory", "device"):
        return  # gathered from arrays: there is nothing to decode
    yield Remedy(
        change="Make a sample cheaper to fetch; at half the cost (decode once, keep arrays, augment whole batches by "
        "Job(augment=…)) the wait shrinks.",
        saved_s=cheaper,
        low_s=0.0,
        high_s=data_s,
        basis="roofline",
        changes_job=True,
    )
