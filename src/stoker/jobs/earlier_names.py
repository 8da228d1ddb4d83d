"""Earlier names of a Job's settings: still accepted, with a warning that has the present spelling.

The table below is the only place that knows them. Descriptions on disk keep these names as their keys
(`stoker.jobs.job_description`), so that runs of earlier versions are found.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import numbers
import types
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

from stoker.errors import BadJob, nearest
from stoker.jobs.averages import EMA, SWA
from stoker.jobs.evaluation_settings import Evaluation
from stoker.jobs.fields import Fields
from stoker.jobs.lengths import Arrangement
from stoker.jobs.objective import Objective

JobClass = TypeVar("JobClass")


class EarlierName(FutureWarning):
    """A setting of a Job was given or read by its earlier name."""


class Spelling(NamedTuple):
    """Where a setting stands now.

    With an `attribute` it is that of a group, the dataclass `kind`, in a field of Job; without one it is the field,
    which takes values of this `kind` among others.
    """

    field: str
    kind: Any
    attribute: str | None = None

    def __str__(self) -> str:
        """As it is written."""
        if self.attribute is None:
            return f"Job({self.field}=…)"
        first = "loss, " if self.kind is Objective else ""
        return f"Job({self.field}=stoker.{self.kind.__name__}({first}{self.attribute}=…))"

    def changed(self, name: str, value: Any, present: Any, *, is_open: bool) -> Any:
        """The value of the field where `value` is given by its earlier `name`; it is `present` without.

        Raises:
            BadJob: the value is of another kind; or it is given by both names, and not `is_open` to change.
        """
        both = f"Job({name}=…) is the earlier name of {self}, and both are given; leave {name} out"
        if self.attribute is not None:
            group = Objective(present) if self.kind is Objective and not isinstance(present, Objective) else present
            default = self.kind.__dataclass_fields__[self.attribute].default
            if not isinstance(group, self.kind) or not (is_open or getattr(group, self.attribute) == default):
                raise BadJob(both)
            return dataclasses.replace(group, **{self.attribute: value})
        if value is None:
            return None if is_open and isinstance(present, self.kind) else present
        if not isinstance(value, self.kind):
            raise BadJob(f"Job({name}=…): wanted stoker.{self.kind[0].__name__}(…), got {value!r}")
        if present is not None and not is_open:
            raise BadJob(both)
        return value

    def read(self, job: Any) -> Any:
        """The setting of a job."""
        value = job.objective if self.kind is Objective else getattr(job, self.field)
        if self.attribute is not None:
            return getattr(value, self.attribute)
        return value if isinstance(value, self.kind) else None


SPELLINGS = {
    "ema": Spelling("average", (EMA, numbers.Real)),
    "swa": Spelling("average", (SWA,)),
    "label_smoothing": Spelling("loss", Objective, "label_smoothing"),
    "loss_scope": Spelling("loss", Objective, "scope"),
    "penalty": Spelling("loss", Objective, "penalty"),
    "inputs": Spelling("fields", Fields, "inputs"),
    "target": Spelling("fields", Fields, "target"),
    "collate": Spelling("fields", Fields, "collate"),
    "lengths": Spelling("sampling", (Arrangement,)),
    "evaluate_every": Spelling("evaluation", Evaluation, "every"),
    "select": Spelling("evaluation", Evaluation, "select"),
    "keep_every": Spelling("evaluation", Evaluation, "keep_every"),
}
"""The present spelling of each earlier name."""


def accepts_earlier_names(job: type[JobClass]) -> type[JobClass]:
    """The dataclass `job`, made to take its settings, and to be asked for them, by their earlier names as well."""
    create: Callable[..., None] = job.__init__

    @functools.wraps(create)
    def init(self: Any, **given: Any) -> None:
        caller = inspect.currentframe()
        is_copy = caller is not None and caller.f_back is not None and _is_of(caller.f_back, "dataclasses")
        create(self, **_respelled(job, given, is_copy=is_copy))

    def read(self: Any, name: str) -> Any:
        if name not in SPELLINGS:
            raise AttributeError(f"a Job has no attribute {name!r}", name=name, obj=self)
        _warn(f"Job.{name}", SPELLINGS[name])
        return SPELLINGS[name].read(self)

    job.__init__, job.__getattr__ = init, read  # type: ignore[method-assign, attr-defined]  # unseen by type checkers
    return job


def _respelled(job: Any, given: Mapping[str, Any], *, is_copy: bool) -> dict[str, Any]:
    """The settings `given`, all by their present names; in a copy (`dataclasses.replace`) earlier ones take precedence.

    Raises:
        BadJob: there is no such setting, or it is given by both names.
    """
    fields = job.__dataclass_fields__
    present = {name: value for name, value in given.items() if name in fields}
    for name in given:
        if name in SPELLINGS:
            spelling = SPELLINGS[name]
            _warn(f"Job({name}=…)", spelling)
            before = present.get(spelling.field, fields[spelling.field].default)
            present[spelling.field] = spelling.changed(name, given[name], before, is_open=is_copy)
        elif name not in fields:
            raise BadJob(f"Job({name}=…): there is no such field. {nearest(name, fields)}")
    return present


def _is_of(frame: types.FrameType, *modules: str) -> bool:
    return frame.f_globals.get("__name__") in modules


_SAID: dict[str | tuple[str, type[Warning], int], int] = {}
"""Warnings given so far, as `warnings` keeps them: a job file that is loaded again and again does not repeat them."""


def _warn(earlier: str, spelling: Spelling) -> None:
    """Warn, at the line of the user's own code."""
    frame = inspect.currentframe()
    while frame is not None and _is_of(frame, __name__, "dataclasses"):
        frame = frame.f_back
    file, line = ("", 0) if frame is None else (frame.f_code.co_filename, frame.f_lineno)
    warnings.warn_explicit(f"{earlier} is now written {spelling}", EarlierName, file, line, registry=_SAID)
