"""The objective of a Job: its loss, with what is added to it or changes how it is meant."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

from stoker.errors import BadSetting
from stoker.jobs.numeric_settings import is_number, is_whole, plain_number


@dataclass(frozen=True)
class SelectiveBackprop:
    """Take the gradient of the samples with the highest losses alone; `stepping/selective_backprop.py` has its card.

    Args:
        keep: share of an optimiser batch that is kept.
        start: share of the run before the first selected update.
        end: share of the run after which updates take whole batches again.
        interrupt: every so many updates, one takes its whole batch; 0: none does.

    Raises:
        BadSetting: a setting is of the wrong type or out of range.
    """

    keep: float = 0.5
    start: float = 0.5
    end: float = 0.9
    interrupt: int = 2

    def __post_init__(self) -> None:
        if not (is_number(self.keep) and 0 < self.keep <= 1):
            raise BadSetting(f"keep is the share of a batch that is kept, in (0, 1], got {self.keep!r}")
        if not (is_number(self.start) and is_number(self.end) and 0 <= self.start < self.end <= 1):
            raise BadSetting(
                f"start and end are shares of the run, 0 <= start < end <= 1, got {self.start!r} and {self.end!r}"
            )
        if not (is_whole(self.interrupt) and self.interrupt >= 0):
            raise BadSetting(f"interrupt is a number of updates, 0 or more, got {self.interrupt!r}")

    def relative_cost(self) -> float:
        """Mean time of an update over the run, as a share of one of a whole batch; forward is a third of it."""
        selected = (self.end - self.start) * (1 - 1 / self.interrupt if self.interrupt else 1)
        return 1 - selected * (1 - (1 / 3 + self.keep))


@dataclass(frozen=True)
class Objective:
    """A loss with settings of its own: `Job(loss=stoker.Objective("cross_entropy", label_smoothing=0.1))`.

    Args:
        loss: a name or a function, as `Job(loss=…)` takes it.
        label_smoothing: share of the target spread over all classes (the two cross-entropies).
        scope: "batch" declares a loss over the whole batch, such as a contrastive one.
        penalty: a function of the model, added to the loss once per update.
        stochastic_depth: probability that the last residual block is skipped for a sample in training; block l of L
            has that times l / L.
        selective_backprop: `stoker.SelectiveBackprop(…)`: the loss of an update is that of its hardest samples.

    Raises:
        BadSetting: a setting is of the wrong type or out of range.
    """

    loss: str | Callable[..., Any] | None = None
    _: KW_ONLY
    label_smoothing: float = 0.0
    scope: Literal["sample", "batch"] = "sample"
    penalty: Callable[[Any], Any] | None = None
    stochastic_depth: float = 0.0
    selective_backprop: SelectiveBackprop | None = None

    def __post_init__(self) -> None:
        for name in ("label_smoothing", "stochastic_depth"):
            object.__setattr__(self, name, plain_number(getattr(self, name)))
        if not (is_number(self.label_smoothing) and 0 <= self.label_smoothing < 1):
            raise BadSetting(f"Objective(label_smoothing=…): wanted a share in [0, 1), got {self.label_smoothing!r}")
        if self.scope not in ("sample", "batch"):
            raise BadSetting(f'Objective(scope=…): wanted "sample" or "batch", got {self.scope!r}')
        if not (self.penalty is None or callable(self.penalty)):
            given = type(self.penalty).__name__
            raise BadSetting(f"Objective(penalty=…): wanted a function of the model, got a {given}")
        if not (is_number(self.stochastic_depth) and 0 <= self.stochastic_depth < 1):
            raise BadSetting(f"Objective(stochastic_depth=…): wanted a rate in [0, 1), got {self.stochastic_depth!r}")
        if not isinstance(self.selective_backprop, SelectiveBackprop | None):
            message = f"stoker.SelectiveBackprop(…), got {self.selective_backprop!r}"
            raise BadSetting(f"Objective(selective_backprop=…): wanted {message}")


def objective_checks(job: Any) -> Iterator[tuple[str, bool, str]]:
    """Checks of Objective(…) with the other settings: the field, whether it is valid, and the problem if not."""
    objective = job.objective
    if objective.stochastic_depth:
        yield "loss", job.step is None, "Objective(stochastic_depth=…) does not go with a step of the job's own"
    if objective.selective_backprop is None:
        return
    selective = "Objective(selective_backprop=…)"
    for other in ("mix", "step", "sync"):
        yield "loss", getattr(job, other) is None, f"{selective} does not go with {other}: leave one of them out"
    is_by_sample = objective.scope == "sample" and objective.loss not in ("own", "token_cross_entropy")
    yield "loss", is_by_sample, f"{selective} compares the losses of samples; {objective.loss!r} gives none of each"
