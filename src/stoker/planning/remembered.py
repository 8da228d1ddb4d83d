"""Forecasts that heed what happened: a plan of this job that ran out of memory here is not proposed again."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Sequence

from stoker.errors import StokerError
from stoker.planning.ranking import Forecasts
from stoker.records import Candidate, Forecast, Plan
from stoker.records.out_of_memory import OutOfMemory

LEAST_SHARE = 0.5
"""Where a process had less than this share of its device, what ran out says nothing of the device itself."""


def telling(failures: Sequence[OutOfMemory], memory_bytes: int) -> tuple[OutOfMemory, ...]:
    """Those failures that say something of a device with so much memory [bytes]; all of them if it is unknown (0)."""
    return tuple(one for one in failures
                 if one.reachable_bytes is None or one.reachable_bytes >= LEAST_SHARE * memory_bytes)  # fmt: skip


def not_ruled_out(candidates: Sequence[Candidate], failures: Sequence[OutOfMemory]) -> tuple[Candidate, ...]:
    """Those candidates that need less than each plan that ran out of memory, on one account at least."""
    return tuple(c for c in candidates if not any(one.rules_out(c.plan) for one in failures))


class HeedingForecasts:
    """The same forecasts, except that what needs as much as a plan that ran out of memory does not fit.

    Args:
        forecasts: of plans on one device.
        failures: of the same job on such a device.
        torch_name: what PyTorch calls the device.
    """

    def __init__(self, forecasts: Forecasts, failures: Sequence[OutOfMemory], torch_name: str) -> None:
        self._forecasts, self._failures = forecasts, failures
        self._too_much = math.inf
        for one in failures:
            with contextlib.suppress(StokerError):  # a plan that cannot be traced any more still rules out others
                needed = forecasts.needed_bytes(dataclasses.replace(one.plan, device=torch_name))
                self._too_much = min(self._too_much, needed)

    def probability_it_fits(self, plan: Plan) -> float:
        """That the device's memory is enough: 0 where it was not."""
        if any(one.rules_out(plan) for one in self._failures) or self.needed_bytes(plan) >= self._too_much:
            return 0.0
        return self._forecasts.probability_it_fits(plan)

    def needed_bytes(self, plan: Plan) -> float:
        """Memory [bytes]."""
        return self._forecasts.needed_bytes(plan)

    def forecast(self, plan: Plan) -> Forecast:
        """All of it."""
        return dataclasses.replace(self._forecasts.forecast(plan), probability_it_fits=self.probability_it_fits(plan))
