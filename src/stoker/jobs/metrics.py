"""A job's metrics: names, functions, and objects that keep a state, such as torchmetrics'.

A stateful metric has `update(output, target)`, `compute()` and `reset()`; it is recognised by these, so that nothing is
imported for it. Evaluation works on copies. `{"f1": metric}` in place of a list gives names.
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
    """A metric with a name; otherwise it behaves as the metric.

    `of_probabilities`: it takes probabilities instead of the scores; see `probabilities`.
    """

    name: str
    metric: Callable[..., Any]
    of_probabilities: bool = False

    @property
    def __name__(self) -> str:
        """The name, as a function has it."""
        return self.name

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The metric, whose signature `inspect` uses."""
        return self.metric

    def __call__(self, *arguments: Any, **settings: Any) -> Any:
        """Call the metric."""
        return self.metric(*arguments, **settings)

    def __getattr__(self, name: str) -> Any:
        """An attribute of the metric; special names, which copying looks up, are not passed on."""
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
    named: list[str | Callable[..., Any]] = []
    for name, metric in metrics.items():
        if isinstance(metric, Named):
            named.append(replace(metric, name=name))
        else:
            named.append(metric if isinstance(metric, str) else Named(name, metric))
    return named


def _require_instances(metrics: Sequence[object]) -> None:
    """Refuse classes, which can be called but have no state."""
    for metric in metrics:
        inner = metric.metric if isinstance(metric, Named) else metric
        if isinstance(inner, type):
            raise BadSetting(f"{inner.__name__} is a class: give an instance, {inner.__name__}(…)")


def probabilities(metric: Callable[..., Any], name: str | None = None) -> Named:
    """A stateful metric of probabilities: the softmax of the scores; of one logit, or of labels, the sigmoid.

    Scores are of labels if the job's loss is a binary cross-entropy of logits, if the metric has `num_labels` (as
    torchmetrics' Multilabel…), or if targets are whole numbers or booleans of the output's shape.

    For metrics of torchmetrics that take either: they check in each batch for values outside [0, 1], so that with
    scores the result depends on how the data are cut into batches.

    Args:
        metric: an object with a state, such as a metric of torchmetrics.
        name: its name in results; None: the metric's own.
    """
    return Named(metric_name(metric) if name is None else name, metric, of_probabilities=True)


def is_stateful(metric: object) -> bool:
    """Whether a metric keeps a state over batches; a class, which is not an instance yet, does not."""
    return not isinstance(metric, type) and all(callable(getattr(metric, name, None)) for name in _KEEPS_STATE)


def metric_name(metric: str | Callable[..., Any]) -> str:
    """A metric's name in results."""
    return metric if isinstance(metric, str) else getattr(metric, "__name__", type(metric).__name__)


def says_lower_is_better(metric: object) -> bool | None:
    """Whether lower values of a metric are better; None if that is not known."""
    if isinstance(metric, str):
        return metric in LOWER_IS_BETTER
    if (lower := getattr(metric, "lower_is_better", None)) is not None:
        return bool(lower)
    higher = getattr(metric, "higher_is_better", None)
    return None if higher is None else not higher


def gives_one_number(metric: object) -> bool:
    """Whether a metric is known to give a single number, not one per class or several by name.

    One with a state is, if it says which numbers are better.
    """
    if not is_stateful(metric):
        return True
    is_by_class = hasattr(metric, "average") and getattr(metric, "average", None) in (None, "none")
    return not is_by_class and says_lower_is_better(metric) is not None


def direction_of(name: str, metrics: Sequence[str | Callable[..., Any]], given: bool | None) -> bool | None:  # noqa: FBT001 - a setting
    """Whether lower is better for the measure `name` (such as `loss`, `f1[3]`); None if that is not known."""
    if given is not None:
        return given
    if name == "loss":
        return True
    base = name.partition("[")[0]
    own = next((metric for metric in metrics if metric_name(metric) == base), None)
    return None if own is None else says_lower_is_better(own)
