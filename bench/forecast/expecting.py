"""What the planner forecasts of cases, made as it makes them for a user, but from whole traces alone."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from bench.forecast.jobs import JOBS, Size
from bench.forecast.verify_cases import Case
from stoker.errors import StokerError
from stoker.loading.datasets import datasets_of
from stoker.planning.model.objectives import energy_kwh
from stoker.planning.model.run_forecast import Extents, Needs, TracedForecasts
from stoker.planning.model.workspaces import context_bytes
from stoker.profiling.job_profile import job_profile
from stoker.profiling.tracing.update import trace_update
from stoker.records import Coupling, Estimate, Forecast, Hardware, Trace, TraceSettings
from stoker.stepping.coupling import coupling_by_types
from stoker.stepping.model import meta_model

_JOULES_PER_KWH = 3.6e6


@dataclass(frozen=True, kw_only=True)
class Expected:
    """Forecasts of a case, with the device's micro-benchmark and from its datasheet; `error` where there is none.

    `energy_j` is that of one update of the device alone, None where nobody knows what it draws.
    """

    schema: ClassVar[int] = 1
    case: Case
    coupling: Coupling
    calibrated: Forecast | None = None
    datasheet: Forecast | None = None
    energy_j: Estimate | None = None
    took_s: float = 0.0
    error: str | None = None


class Forecaster:
    """Forecasts of one job's plans.

    Coupling is told from the types of its modules, which is right for these jobs: a probe would pass them through the
    host, which takes minutes next to a GPU. `held_bytes` is what a process holds before it trains; on a CPU it is part
    of the peak.
    """

    def __init__(self, name: str, size: Size, held_bytes: int = 0) -> None:
        self._held_bytes = held_bytes
        self._job = JOBS[size][name]()
        self._data, self._model = datasets_of(self._job), meta_model(self._job)
        self.coupling = coupling_by_types(self._job, self._model, "told by types in this benchmark")
        self._needs = Needs(functools.cache(self._traced))

    def on(self, hardware: Hardware) -> TracedForecasts:
        """Forecasts of plans on a device that is here."""
        facts = job_profile(self._job, self._data, self.coupling, self._model, device_kind=hardware.device.kind)
        return TracedForecasts(
            facts, lambda _threads: hardware, self._needs, self._extents, held_bytes=self._held_bytes
        )

    def _traced(self, settings: TraceSettings) -> Trace:
        return trace_update(self._job, self._data, self.coupling, settings)

    def _extents(self, _samples_per_s: float) -> Extents:
        updates = self._data.extent(self._job).updates_in(self._job.until)
        return Extents(total_samples=updates * self._job.batch, total_updates=updates, evaluations=0)


def expected(cases: Sequence[Case], hardware: Hardware, held_bytes: int) -> Iterator[Expected]:
    """Forecasts of cases; those of one job follow each other and share its traces."""
    forecaster, name = None, ""
    for case in cases:
        if forecaster is None or case.job != name:
            forecaster, name = Forecaster(case.job, case.size, held_bytes), case.job
        yield _expected(case, forecaster, hardware)


def probability_it_fits(case: Case, hardware: Hardware, caps_bytes: Sequence[int]) -> list[float]:
    """How sure the planner is that a plan fits into so many bytes for PyTorch, the driver's context not counted."""
    forecaster, context = Forecaster(case.job, case.size), int(context_bytes().value)
    capped = [dataclasses.replace(hardware.device, memory_bytes=cap + context) for cap in caps_bytes]
    return [
        forecaster.on(dataclasses.replace(hardware, device=device)).probability_it_fits(case.plan) for device in capped
    ]


def _expected(case: Case, forecaster: Forecaster, hardware: Hardware) -> Expected:
    started = time.perf_counter()
    unmeasured = dataclasses.replace(hardware, benchmark=None)
    try:
        calibrated, datasheet = (forecaster.on(one).forecast(case.plan) for one in (hardware, unmeasured))
        power_w = forecaster.on(hardware).update(case.plan).power_w
    except Exception as problem:  # noqa: BLE001 - on a device never seen, one case is not to cost the others
        error = str(problem) if isinstance(problem, StokerError) else f"{type(problem).__name__}: {problem}"
        return Expected(case=case, coupling=forecaster.coupling, error=error)
    energy = None if power_w is None else energy_kwh(power_w, calibrated.step_s, pue=1.0).scaled(_JOULES_PER_KWH, "J")
    return Expected(
        case=case,
        coupling=forecaster.coupling,
        calibrated=calibrated,
        datasheet=datasheet,
        energy_j=energy,
        took_s=time.perf_counter() - started,
    )
