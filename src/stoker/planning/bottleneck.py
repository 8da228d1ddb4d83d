"""What bounds a run: from where its time went, what its updates do, and what the device reaches, to one sentence.

The part that takes the most training time bounds the run. The inside of an update is not measured while training: it is
forecast operation by operation and scaled to what updates took, and where the two lie too far apart the verdict is
"unknown". Planning is not counted: it is told in the plan.
"""

from __future__ import annotations

from collections.abc import Sequence

from stoker.planning.remedies import Remedy, RunTimes, best_remedy, remedies
from stoker.planning.update_bounds import UpdateBounds
from stoker.records import Achieved, Bottleneck, Bound, Ceilings, Device, Plan, Share
from stoker.units import format_count, format_seconds

FURTHEST = {"calibrated": 3.0}
_FURTHEST_UNMEASURED = 5.0
"""Where updates take this many times as long as forecast, or as short, the forecast does not say what bounds them. By
the forecast's basis: of a device whose operations were not measured, only the proportions are of use."""
_BESIDE: dict[str, Bound] = {"data": "data", "evaluation": "evaluation", "checkpoint": "checkpoints"}


def find_bottleneck(
    times: RunTimes,
    plan: Plan,
    device: Device,
    *,
    bounds: UpdateBounds | str,
    ceilings: Ceilings | None = None,
    considered: Sequence[Remedy] = (),
) -> Bottleneck:
    """What bounds the run, and the one change that would help most.

    Args:
        times: what the run showed.
        plan: how it was executed.
        device: what on.
        bounds: what its updates do, or why nobody knows.
        ceilings: what the device reaches, if that was measured.
        considered: changes whose effect on an update was forecast.
    """
    parts, why_unknown = _parts(times, bounds, is_cuda=device.kind == "cuda")
    whole = sum(parts.values())
    bound_by = max(parts, key=lambda part: parts[part]) if whole > 0 else "unknown"
    share = parts[bound_by] / whole if whole > 0 else 0.0
    achieved, mfu, problems = _utilisation(times, bounds, ceilings)
    best = best_remedy((*considered, *remedies(times, plan, device)), whole)
    return Bottleneck(
        bound_by=bound_by,
        sentence=_sentence(bound_by, share, why_unknown),
        shares=tuple(Share(what=what, value=s) for what, s in sorted(parts.items(), key=lambda one: -one[1]) if s > 0),
        achieved=achieved,
        mfu=mfu,
        evidence=_evidence(times, bounds, why_unknown, ceilings),
        advice=best.change if best is not None else _no_remedy(bound_by),
        gain=best.gain(whole) if best is not None else None,
        problems=problems,
    )


def _parts(times: RunTimes, bounds: UpdateBounds | str, *, is_cuda: bool) -> tuple[dict[Bound, float], str]:
    """Training time by what it waits for [s], and why the inside of updates is unknown, if it is."""
    split = times.split_s
    parts: dict[Bound, float] = {bound: split.get(phase, 0.0) for phase, bound in _BESIDE.items()}
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
    """Rates beside ceilings, the model FLOPs utilisation, and what cannot be true of them."""
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
    return (moved,), None, (_impossible(mfu),)


def _impossible(mfu: float) -> str:
    return (
        f"The model's FLOPs in the time they took come to {100 * mfu:.0f} % of what matrix products were measured to "
        "reach on this device. That cannot be, so no utilisation is given: measure again with `stoker doctor --fresh` "
        "while nothing else runs; if it stays so, the FLOPs are miscounted, which is a bug."
    )


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
            lines.append("arithmetic and memory are told apart by the profile of this run")
        if bounds.from_system_s > 0.05 * bounds.total_s:
            lines.append(
                f"{100 * bounds.from_system_s / bounds.total_s:.0f} % of an update goes to memory had from the system "
                "(page faults), counted as memory bandwidth"
            )
    if ceilings is None:
        lines.append("what this device reaches was not measured, so no utilisation is known: `stoker doctor` measures")
    else:
        lines.append(f"ceilings measured here on {ceilings.measured_at[:10]} with {_threads(ceilings)}")
    return tuple(lines)


def _threads(ceilings: Ceilings) -> str:
    return "1 thread" if ceilings.threads == 1 else f"{ceilings.threads} threads"


def _no_remedy(bound_by: Bound) -> str:
    """What to say where no change is known to help by as much as it is worth to speak of."""
    known = "No change known here would save 2 % of the training time"
    if bound_by in ("arithmetic", "memory bandwidth"):
        return f"{known}; for faster devices, see `stoker plan JOB --on all`."
    return f"{known}."
