"""From a short trial to a forecast of the whole run."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from stoker.planning.checkpointing import saving
from stoker.records import Estimate, Forecast, Measurement, Profile

_DRIFT = 0.10
"""Share by which a machine's speed drifts between a trial and the run, beyond the trial's own spread (shared cores)."""


@dataclass(frozen=True)
class Extents:
    """How much there is to do: samples, updates, evaluations (that of the weights kept, at the end, included)."""

    total_samples: int
    total_updates: int
    evaluations: int


def forecast(measured: Measurement, profile: Profile, extents: Extents) -> Forecast:
    """What the run will need if the device goes on as in the trial.

    A plan that was compiled in the trial is not compiled again: what that took is told, and no part of the total.
    """
    update_s = _from_samples(measured.update_s)
    per_sample = update_s.scaled(1 / measured.samples_per_update)
    evaluated = extents.evaluations * profile.num_valid + profile.num_test
    evaluate_s = _around(measured.evaluate_s_per_sample * max(profile.num_valid, profile.num_test), _DRIFT, "s")
    training = per_sample.scaled(extents.total_samples, "s")
    unsaved = training.value + measured.evaluate_s_per_sample * evaluated
    saved = saving(
        measured.plan, measured.state_bytes, training_s=training.value, unsaved_s=unsaved,
        evaluations=extents.evaluations,
    )  # fmt: skip
    total = unsaved + saved.total_s
    spread = (training.low / training.value, training.high / training.value)
    return Forecast(
        step_s=update_s,
        samples_per_s=Estimate(
            value=1 / per_sample.value, low=1 / per_sample.high, high=1 / per_sample.low, unit="samples/s",
            basis="measured here",
        ),
        evaluate_s=evaluate_s,
        checkpoint_s=saved.one,
        total_s=Estimate(value=total, low=total * spread[0], high=total * spread[1], unit="s", basis="measured here"),
        peak_bytes=_around(float(taken_bytes(measured)), 0.15, "bytes"),
        total_samples=extents.total_samples,
        total_updates=extents.total_updates,
        evaluations=extents.evaluations,
        gradient_error=measured.gradient_error,
        compile_s=_around(measured.compile_s, 0.5, "s") if measured.compile_s else None,
        checkpoint_every_s=saved.every_s,
        lost_s=saved.lost_s,
    )  # fmt: skip


def taken_bytes(measured: Measurement) -> int:
    """What a run under a plan that was tried takes of the device's memory at its peak [bytes].

    A checkpoint is written from a copy while training goes on; on a GPU the copy is the host's.
    """
    return measured.peak_bytes + (measured.state_bytes if measured.plan.device == "cpu" else 0)


def samples_per_s(measured: Measurement) -> float:
    """Samples trained on in a second, by the median update of a trial."""
    return measured.samples_per_update / statistics.median(measured.update_s)


def pace(measured: Measurement) -> float:
    """Seconds a sample, from the faster half of the trial: noise only ever adds time."""
    times = sorted(measured.update_s)
    return statistics.mean(times[: max(1, len(times) // 2)]) / measured.samples_per_update


def _from_samples(times_s: tuple[float, ...]) -> Estimate:
    """The median of single updates, between its quartiles widened by drift."""
    middle = statistics.median(times_s)
    # Inclusive: the other method reaches beyond the data, of two times even below zero.
    quartiles = statistics.quantiles(times_s, n=4, method="inclusive") if len(times_s) > 1 else [middle] * 3
    low, high = min(quartiles[0], middle) * (1 - _DRIFT), max(quartiles[2], middle) * (1 + _DRIFT)
    return Estimate(value=middle, low=low, high=high, unit="s", basis="measured here")


def _around(value: float, share: float, unit: str) -> Estimate:
    return Estimate(value=value, low=value * (1 - share), high=value * (1 + share), unit=unit, basis="measured here")
