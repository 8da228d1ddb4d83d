"""Which parameters a job leaves unchanged: always, or for the first part of a run.

What: a parameter whose name matches a shell pattern gets no gradient, optimiser state or weight decay until it is
thawed. The first matching pattern decides, as in the groups of an optimiser.
Use when: a pretrained model is fine-tuned, or a backbone should not change while a new head is still far off.
Costs: nothing; the backward pass stops at the first trained layer.
Does not combine with: thawing (not freezing for good) with `sync`, `Muon`, a batch still to be chosen, or a step of the
job's own.
Source: gradual unfreezing, Howard and Ruder 2018, https://arxiv.org/abs/1801.06146, section 3.3.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from stoker.errors import BadSetting
from stoker.jobs.run_length import Extent
from stoker.units import Duration

Patterns = Sequence[str] | Mapping[str, Duration | None]
"""Patterns of parameters frozen for good, or with a duration for each (None: for good)."""


@dataclass(frozen=True)
class Freeze:
    """Frozen parameters, by name.

    Args:
        patterns: `("embeddings.*", …)`, or `{"encoder.layer.0.*": stoker.epochs(2), "embeddings.*": None}`: the
            duration for each, None being for good. The first pattern that matches a name decides.
        statistics: of batch norms whose parameters are all frozen: "kept", the default, normalises by the running
            statistics, which do not change; "moving" updates them as in training. Dropout is not affected.
        but: patterns of exceptions, which are trained: `stoker.Freeze({"*": stoker.epochs(1)}, but=("head.*",))`.

    Raises:
        BadSetting: there is no pattern, one is not a text, or its duration is not one or is in seconds.
    """

    patterns: Patterns
    statistics: Literal["kept", "moving"] = "kept"
    but: Sequence[str] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "patterns", tuple(_checked(self.patterns).items()))
        if self.statistics not in ("kept", "moving"):
            raise BadSetting(f'statistics are "kept" or "moving", got {self.statistics!r}')
        but: object = self.but
        if isinstance(but, str) or not isinstance(but, Sequence) or not all(isinstance(name, str) for name in but):
            raise BadSetting(f"but is a list of patterns, got {but!r}")

    @property
    def durations(self) -> dict[str, Duration | None]:
        """Durations of freezing by pattern, in order; None is for good."""
        return _checked(self.patterns)

    @property
    def is_gradual(self) -> bool:
        """Whether anything thaws during training."""
        return any(duration is not None for duration in self.durations.values())

    @property
    def at_the_end(self) -> Freeze:
        """The same after everything with a duration has thawed."""
        return Thawed(self.patterns, self.statistics, self.but)

    def in_updates(self, extent: Extent) -> Freeze:
        """The same with durations in whole updates, for a run of this extent.

        >>> Freeze({"encoder.*": Duration(2, "epochs")}).in_updates(Extent(num_train=100, batch=32)).durations
        {'encoder.*': Duration(value=8.0, unit='updates')}
        """
        durations = {
            name: None if duration is None else Duration(float(extent.updates_in(duration)), "updates")
            for name, duration in self.durations.items()
        }
        return dataclasses.replace(self, patterns=durations)

    def release(self, name: str) -> float:
        """The first update, counted from 0, in which a parameter is trained [updates]; infinite if never.

        Durations have to be in updates.

        >>> some = Freeze({"encoder.0.*": None, "encoder.*": Duration(10, "updates")})
        >>> [some.release(name) for name in ("encoder.0.weight", "encoder.1.weight", "head.weight")]
        [inf, 10.0, 0.0]
        """
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in self.but):
            return 0.0
        for pattern, duration in self.durations.items():
            if fnmatch.fnmatchcase(name, pattern):
                return math.inf if duration is None else float(math.ceil(duration.value))
        return 0.0


class Thawed(Freeze):
    """A `Freeze` after everything with a duration has thawed."""

    @property
    def is_gradual(self) -> bool:
        """False: nothing is left to thaw."""
        return False

    def release(self, name: str) -> float:
        """Infinite for parameters frozen for good, else 0 [updates]."""
        return math.inf if math.isinf(super().release(name)) else 0.0


def freezing_of(given: Freeze | Patterns) -> Freeze:
    """A job's `freeze` as `Freeze`; raises as that does."""
    return given if isinstance(given, Freeze) else Freeze(given)


def _checked(patterns: object) -> dict[str, Duration | None]:
    """The patterns in order, each with its duration."""
    if isinstance(patterns, Mapping):
        pairs = list(patterns.items())
    elif isinstance(patterns, Sequence) and not isinstance(patterns, str):
        pairs = [item if isinstance(item, tuple) and len(item) == 2 else (item, None) for item in patterns]
    else:
        raise BadSetting(f"wanted a list of patterns, or a dict from patterns to durations, got {patterns!r}")
    if not pairs:
        raise BadSetting("there is no pattern")
    for pattern, duration in pairs:
        if not isinstance(pattern, str):
            raise BadSetting(f"a pattern is a text such as 'encoder.*', got {pattern!r}")
        if duration is not None and not isinstance(duration, Duration):
            raise BadSetting(
                f"{pattern!r} is frozen for a duration such as stoker.epochs(2), or None, got {duration!r}"
            )
        if duration is not None and duration.unit == "seconds":
            raise BadSetting(f"{pattern!r} thaws after epochs, samples or updates, not seconds")
    return dict(pairs)
