"""What a job's metrics are: names, functions, and objects that keep a state, such as those of torchmetrics.

A stateful metric has `update(output, target)`, `compute()` and `reset()`. It is known by these, so that nothing is
imported for it; evaluation works on copies. `{"f1": metric}` in place of a list gives names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from stoker.errors import BadSetting
from stoker.jobs.early_stopping import LOWER_IS_BETTER

_KEEPS_STATE = ("update", "compute", "reset")


@dataclass(frozen=True)
class Named:
    """A metric under a name of its own; for everything else it is the metric.

    `of_probabilities`: it is given the softmax of the scores (of a single logit the sigmoid) in their place.
    """

    name: str
    metric: Callable[..., Any]
    of_probabilities: bool = False

    @property
    def __name__(self) -> str:
        """The name, where a function has its own."""
        return self.name

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The metric, whose signature `inspect` takes."""
        return self.metric

    def __call__(self, *arguments: Any, **settings: Any) -> Any:
        """What the metric gives."""
        return self.metric(*arguments, **settings)

    def __getattr__(self, name: str) -> Any:
        """What the metric has; a name that is only looked up on the way to a copy is not asked of it."""
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.metric, name)


def listed(metrics: Sequence[str | Callable[..., Any]] | Mapping[str, Any]) -> Sequence[str | Callable[..., Any]]:
    """The metrics of a Job as a list.

    Raises:
        BadSetting: a mapping gives a known metric another name, or a metric is a class.
    """
    if not isinstance(metrics, Mapping):
        _require_instances(metrics if isinstance(metrics, list | tuple) else [metrics])
        return metrics
    _require_instances([*metrics.values()])
    for name, metric in metrics.items():
        if isinstance(metric, str) and metric != name:
            raise BadSetting(f"{metric!r} is a name already, and cannot be called {name!r}")
    return [_called(name, metric) if callable(metric) else metric for name, metric in metrics.items()]


def _require_instances(metrics: Sequence[object]) -> None:
    """Refuse classes, which can be called but have no state and no name of their own."""
    for metric in metrics:
        found = metric.metric if isinstance(metric, Named) else metric
        if isinstance(found, type):
            raise BadSetting(f"{found.__name__} is a class: give an instance, {found.__name__}(…)")


def probabilities(metric: Callable[..., Any], name: str | None = None) -> Named:
    """A metric with a state that is given probabilities: the softmax of the scores, or of one logit the sigmoid.

    For those of torchmetrics that take either: they look in each batch whether it has values outside [0, 1], so that
    what they make of scores depends on how the data are cut into batches.
    """
    return Named(metric_name(metric) if name is None else name, metric, of_probabilities=True)


def _called(name: str, metric: Callable[..., Any]) -> Named:
    """The metric under that name."""
    return replace(metric, name=name) if isinstance(metric, Named) else Named(name, metric)


def is_stateful(metric: object) -> bool:
    """Whether a metric keeps a state over batches; a class, which has to be made an object first, does not."""
    return not isinstance(metric, type) and all(callable(getattr(metric, name, None)) for name in _KEEPS_STATE)


def metric_name(metric: str | Callable[..., Any]) -> str:
    """What a metric is called in results."""
    return metric if isinstance(metric, str) else getattr(metric, "__name__", type(metric).__name__)


def says_lower_is_better(metric: object) -> bool | None:
    """Whether lower values of a metric are better; None where neither its name nor itself tells."""
    if isinstance(metric, str):
        return metric in LOWER_IS_BETTER
    if (lower := getattr(metric, "lower_is_better", None)) is not None:
        return bool(lower)
    higher = getattr(metric, "higher_is_better", None)
    return None if higher is None else not higher


def gives_one_number(metric: object) -> bool:
    """Whether a metric is known to give a single number: not one for each class, nor several by name."""
    if not is_stateful(metric):
        return True
    is_by_class = hasattr(metric, "average") and getattr(metric, "average", None) in (None, "none")
    return not is_by_class and getattr(metric, "higher_is_better", None) is not None


def direction_of(name: str, metrics: Sequence[str | Callable[..., Any]], given: bool | None) -> bool | None:  # noqa: FBT001 - a setting
    """Whether lower is better of the measure `name` (such as `loss`, `f1[3]`); None where nobody says."""
    if given is not None:
        return given
    if name == "loss":
        return True
    base = name.partition("[")[0]
    found = next((metric for metric in metrics if metric_name(metric) == base), None)
    return None if found is None else says_lower_is_better(found)
