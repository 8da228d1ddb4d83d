"""The objective of a Job: its loss, with what is added to it or changes how it is meant."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

from stoker.errors import BadSetting
from stoker.jobs.numeric_settings import is_number, plain_number


@dataclass(frozen=True)
class Objective:
    """A loss with settings of its own: `Job(loss=stoker.Objective("cross_entropy", label_smoothing=0.1))`.

    Args:
        loss: a name or a function, as `Job(loss=…)` takes it.
        label_smoothing: share of the target spread over all classes (the two cross-entropies).
        scope: "batch" declares a loss over the whole batch, such as a contrastive one.
        penalty: a function of the model, added to the loss once per update.

    Raises:
        BadSetting: a setting is of the wrong type or out of range.
    """

    loss: str | Callable[..., Any] | None = None
    _: KW_ONLY
    label_smoothing: float = 0.0
    scope: Literal["sample", "batch"] = "sample"
    penalty: Callable[[Any], Any] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "label_smoothing", plain_number(self.label_smoothing))
        if not (is_number(self.label_smoothing) and 0 <= self.label_smoothing < 1):
            raise BadSetting(f"Objective(label_smoothing=…): wanted a share in [0, 1), got {self.label_smoothing!r}")
        if self.scope not in ("sample", "batch"):
            raise BadSetting(f'Objective(scope=…): wanted "sample" or "batch", got {self.scope!r}')
        if not (self.penalty is None or callable(self.penalty)):
            given = type(self.penalty).__name__
            raise BadSetting(f"Objective(penalty=…): wanted a function of the model, got a {given}")
