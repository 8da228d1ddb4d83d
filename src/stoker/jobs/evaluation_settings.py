"""Evaluation of a Job on its `valid` data: how often, and which of the evaluated weights a run keeps."""

from __future__ import annotations

from dataclasses import dataclass

from stoker.errors import BadSetting
from stoker.units import Duration, epochs


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """How often `valid` is evaluated, and which of the evaluated weights a run keeps.

    Args:
        every: epochs, samples or updates between two evaluations; there is always one at the end too.
        select: which weights the run keeps: those "best" on `valid` by the first metric, the "last", or those best by
            the measure named here, such as "valid/unseen/accuracy".
        keep_every: how often the evaluated weights are kept for good, in addition to the checkpoints, of which only the
            last ones stay: `stoker.epochs(5)`. `run.kept()` lists them, `run.model(at=stoker.epochs(5))` loads them.

    Raises:
        BadSetting: an interval is no number of epochs, samples or updates.
    """

    every: Duration = epochs(1)
    select: str = "best"
    keep_every: Duration | None = None

    def __post_init__(self) -> None:
        for name, value in (("every", self.every), ("keep_every", self.keep_every)):
            is_left_out = name == "keep_every" and value is None
            if not (is_left_out or (isinstance(value, Duration) and value.unit != "seconds")):
                raise BadSetting(f"Evaluation({name}=…): wanted epochs, samples or updates, got {value!r}")
