"""A table of cases in one test: for hundreds of them, a test of each takes longer than what they show."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any


def each_of(
    cases: Iterable[Any], name: Callable[[Any], object] = str
) -> Callable[[Callable[..., None]], Callable[[], None]]:
    """A decorator by which a test of one case is a test of all: what fails is raised together, with its case's name.

    Marks are to stand above it.
    """
    known = tuple(cases)

    def decorated(test: Callable[..., None]) -> Callable[[], None]:
        def of_all() -> None:
            problems = []
            for case in known:
                try:
                    test(case)
                except Exception as problem:  # noqa: BLE001 - raised below
                    problem.add_note(f"in the case of {name(case)}")
                    problems.append(problem)
            if problems:
                raise ExceptionGroup(f"{len(problems)} of {len(known)} cases failed", problems)

        functools.update_wrapper(of_all, test, updated=())
        del of_all.__wrapped__  # type: ignore[attr-defined]  # pytest would take the case for a fixture
        return of_all

    return decorated
