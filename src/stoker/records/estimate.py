"""An estimate: a value, its interval, its unit and its basis."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

Basis = Literal["measured here", "calibrated", "roofline", "datasheet", "unknown"]


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """`value` in `unit`, between `low` and `high` in 8 cases of 10, resting on `basis`."""

    schema: ClassVar[int] = 1
    value: float
    low: float
    high: float
    unit: str
    basis: Basis

    def __post_init__(self) -> None:
        if not self.low <= self.value <= self.high:
            raise ValueError(f"an estimate lies within its interval, got {self.low} <= {self.value} <= {self.high}")

    def scaled(self, factor: float, unit: str | None = None) -> Estimate:
        """The estimate of `factor` times the quantity."""
        ends = sorted((self.low * factor, self.high * factor))
        return Estimate(value=self.value * factor, low=ends[0], high=ends[1], unit=unit or self.unit, basis=self.basis)
