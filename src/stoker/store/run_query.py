"""Select runs by their settings and results: `status=finished lr<0.1 valid/accuracy>0.9`.

What can be named: `name`, `job`, `status`, `samples`, `updates`, `wall_s`, `created`; a final metric (`test/accuracy`);
a parameter of the job's function, or a setting by its dotted path (`optimizer.lr`, `batch`). The last part of a path or
of a metric is enough where it means one thing.
"""

from __future__ import annotations

import difflib
import functools
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stoker.errors import BadJob
from stoker.records import JobSpec, Run
from stoker.records.run import leaves

Value = str | float

_TERM = re.compile(r"^(?P<name>[^=<>!~]+)(?P<operator>!=|<=|>=|==?|<|>|~)(?P<wanted>.*)$")
_COMPARE: Mapping[str, Callable[[Any, Any], Any]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


@dataclass(frozen=True)
class Term:
    """One condition: a name, `=`, `!=`, `<`, `<=`, `>`, `>=` or `~` (contains), and what is wanted."""

    name: str
    operator: str
    wanted: str

    def holds(self, value: Value | None) -> bool:
        """Whether it holds of a run that has this value under the name; of one that lacks it only `!=` does."""
        if value is None:
            return self.operator == "!="
        if self.operator == "~":
            return self.wanted.lower() in str(value).lower()
        number = _number(self.wanted)
        if self.operator in ("=", "!="):
            mine = _number(str(value))
            if number is None or mine is None:  # texts; yes and no may be written as in Python
                is_equal = value == (self.wanted.lower() if value in ("true", "false") else self.wanted)
            else:
                is_equal = math.isclose(mine, number) or (math.isnan(mine) and math.isnan(number))
            return is_equal == (self.operator == "=")
        if isinstance(value, float) and number is not None:
            return bool(_COMPARE[self.operator](value, number))
        # Texts have an order too, which for `created` is that of time.
        return not isinstance(value, float) and number is None and bool(_COMPARE[self.operator](value, self.wanted))


def terms_of(words: str) -> tuple[Term, ...]:
    """The conditions in a line of words, all of which are to hold.

    >>> terms_of("status=finished lr<=1e-3")
    (Term(name='status', operator='=', wanted='finished'), Term(name='lr', operator='<=', wanted='1e-3'))

    Raises:
        BadJob: a word is no condition, or compares with something that is no number.
    """
    terms = []
    for word in words.split():
        match = _TERM.match(word)
        if match is None or not match["wanted"]:
            raise BadJob(f"{word!r} is no condition", remedy="Write them like status=finished lr<0.1 name~cnn.")
        terms.append(Term(match["name"], match["operator"].replace("==", "="), match["wanted"]))
    return tuple(terms)


def values_of(run: Run, spec: JobSpec) -> dict[str, Value]:
    """Everything a run can be chosen by, by its full name."""
    values: dict[str, Value] = {
        "name": run.name,
        "job": spec.name,
        "status": run.status,
        "created": run.created_at,
        "samples": float(run.samples),
        "updates": float(run.updates),
        "wall_s": run.wall_s,
    }
    values.update(run.metrics)
    for group in (spec.parameters, spec.settings):
        for name, value in leaves(dict(group)):
            if isinstance(value, bool):
                values.setdefault(name, str(value).lower())
            elif isinstance(value, str | int | float):
                values.setdefault(name, value if isinstance(value, str) else float(value))
    return values


def selected_ids(values: Mapping[str, Mapping[str, Value]], *, where: str = "", sort: str | None = None) -> list[str]:
    """As `selected`, of what runs can be chosen by, by their ids; raises likewise."""
    ids, columns = list(values), list(values.values())
    return [ids[index] for index in _chosen(columns, where=where, sort=sort)]


def selected(
    runs: Sequence[tuple[Path, Run, JobSpec]], *, where: str = "", sort: str | None = None, names: Sequence[str] = ()
) -> list[tuple[Path, Run, JobSpec]]:
    """The runs of which all conditions hold, in the order they came in or by `sort`; `-NAME` is from the highest down.

    Runs that lack what they are sorted by, or have it as no number (NaN), come last.

    Raises:
        BadJob: a condition cannot be read, or a name (of `names` too) means nothing in any run.
    """
    values = [values_of(run, spec) for _, run, spec in runs]
    return [runs[index] for index in _chosen(values, where=where, sort=sort, names=names)]


def _chosen(
    values: Sequence[Mapping[str, Value]], *, where: str, sort: str | None, names: Sequence[str] = ()
) -> list[int]:
    """Which of the runs, in order; see `selected`."""
    terms, by = terms_of(where), (sort or "").removeprefix("-")
    columns = {
        name: [value_of(name, named) for named in values] for name in {by, *(term.name for term in terms)} if name
    }
    for term in terms:
        is_number = any(isinstance(value, float) for value in columns[term.name])
        if term.operator in _COMPARE and is_number and _number(term.wanted) is None:
            raise BadJob(
                f"{term.name} is a number, and {term.wanted!r} is none", remedy=f"Write {term.name}{term.operator}0.1."
            )
    require_known([*(term.name for term in terms), *names, *((by,) if by else ())], values)
    kept = [index for index in range(len(values)) if all(term.holds(columns[term.name][index]) for term in terms)]
    if not by:
        return kept
    keys = columns[by]
    known = [index for index in kept if _has_order(keys[index])]
    is_number = all(isinstance(keys[index], float) for index in known)
    known.sort(
        key=lambda index: keys[index] if is_number else str(keys[index]),  # type: ignore[arg-type,return-value]
        reverse=(sort or "").startswith("-"),
    )
    return [*known, *(index for index in kept if not _has_order(keys[index]))]


def _has_order(value: Value | None) -> bool:
    """Whether a value is less or more than others; a metric that is not a number (NaN) is neither."""
    return value is not None and not (isinstance(value, float) and math.isnan(value))


def value_of(name: str, values: Mapping[str, Value]) -> Value | None:
    """The value of a run under a name, or under the only one that ends with it; None where there is none."""
    meanings = list(_meanings(name, values).values())
    return meanings[0] if len(set(map(str, meanings))) == 1 else None  # by their text, for NaN equals nothing


def require_known(names: Sequence[str], runs: Sequence[Mapping[str, Value]]) -> None:
    """Nothing where every name means something in some run, and one thing in all of them.

    Raises:
        BadJob: one means nothing in any of them, and the near ones are named; or several things in one, such as the
            accuracy on two splits, or in one run what it does not mean in another.
    """
    for name in names if runs else ():
        meant = [meanings for values in runs if (meanings := _meanings(name, values))]
        if not meant:
            known = dict.fromkeys(name for values in runs for name in values)
            near = difflib.get_close_matches(name, {*known, *(_last(full) for full in known)}, n=5)
            raise BadJob(
                f"no run has {name!r}",
                remedy=f"Like it: {', '.join(near)}." if near else "`stoker runs --json` shows what runs have.",
            )
        measures = [measured for meanings in meant if (measured := {full for full in meanings if "/" in full})]
        is_one = all(value_of(name, meanings) is not None for meanings in meant)
        if not is_one or (measures and not set.intersection(*measures)):
            several = ", ".join(dict.fromkeys(full for meanings in meant for full in meanings))
            raise BadJob(f"{name!r} means several things", remedy=f"Write one of {several}.")


def _meanings(name: str, values: Mapping[str, Value]) -> dict[str, Value]:
    """The values that a name can mean in a run: the one of that name, else all whose names end with it."""
    if name in values:
        return {name: values[name]}
    return {full: value for full, value in values.items() if _last(full) == name}


@functools.lru_cache(maxsize=4096)
def _last(full: str) -> str:
    """The last part of a path or of a metric."""
    return re.split(r"[./]", full)[-1]


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None
