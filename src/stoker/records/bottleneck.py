"""What bounds a run, what shows it, and the one change that would help most."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from stoker.records.estimate import Estimate
from stoker.records.plan import Share

Bound = Literal[
    "data", "host launch", "memory bandwidth", "arithmetic", "copies", "checkpoints", "evaluation", "unknown"
]
"""What a run waits for most: samples; the host, which starts operations; bytes to cross the device's memory; products;
the batch to cross to the device; checkpoints; evaluations; or nobody knows."""


@dataclass(frozen=True, kw_only=True)
class Achieved:
    """A rate that training reached, in `unit` (`FLOP/s` or `bytes/s`), beside what the device reaches at nothing else.

    `ceiling` is measured on this device, never a datasheet's; None where it was not measured.
    """

    what: str
    value: float
    unit: str
    ceiling: float | None = None

    @property
    def fraction(self) -> float | None:
        """Of the ceiling; None where that is not known."""
        return self.value / self.ceiling if self.ceiling else None


@dataclass(frozen=True, kw_only=True)
class Bottleneck:
    """What bounds a run, in one `sentence`.

    `shares` are the training time [s] by what it waited for, the largest first: those of an update's inside are
    forecast for its operations and scaled to what updates took. `mfu` is the share of time that the model's own
    arithmetic would take at the measured ceilings, recomputation left out [fraction]; None where it is not known, or
    would be above 1.
    `advice` is the change that would help most, `gain` the share of the training time that it would save [fraction]
    (None: nobody knows). `problems` are figures that cannot be true, in words.
    """

    schema: ClassVar[int] = 1
    bound_by: Bound
    sentence: str
    shares: tuple[Share, ...]
    achieved: tuple[Achieved, ...]
    mfu: float | None
    evidence: tuple[str, ...]
    advice: str
    gain: Estimate | None
    problems: tuple[str, ...] = ()
