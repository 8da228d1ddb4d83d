from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Optional, Union

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.errors import BadJob
from stoker.jobs.job_file import parse_settings, values_of
from tests.records.strategies import TEXT

if TYPE_CHECKING:
    from nowhere import Job

OPTIONAL = Optional[int]  # noqa: UP045 - the older spelling, which many files have
EITHER = Union[int, float]  # noqa: UP007 - likewise


def taking(hint: Any, default: Any = None) -> Callable[..., Any]:
    """A job function with one setting `x` of this type."""

    def job(x=default):
        return x

    job.__annotations__ = {} if hint is None else {"x": hint}
    return job


@pytest.mark.parametrize(
    ("hint", "text", "value"),
    [
        (int, "64", 64),
        (int, "-3", -3),
        (float, "0.5", 0.5),
        (float, "1e-3", 0.001),
        (float, "5", 5.0),
        (str, "5", "5"),
        (str, "", ""),
        (Path, "data/x", Path("data/x")),
        (bool, "true", True),
        (bool, "No", False),
        (bool, "1", True),
        (Literal["sgd", "adam"], "adam", "adam"),
        (Literal[0, 1, 2], "0", 0),
        (Literal["a", 3], "3", 3),
        (OPTIONAL, "none", None),
        (OPTIONAL, "7", 7),
        (int | None, "None", None),
        (str | None, "x", "x"),
        (EITHER, "0.5", 0.5),
        (int | float, "2", 2),
        (str | int, "5", 5),
        (str | int, "five", "five"),
        (tuple[int, int], "[3, 4]", (3, 4)),
        (tuple[float, ...], "[1, 2.5]", (1.0, 2.5)),
        (tuple, "[1, [2]]", (1, [2])),
        (list[str], '["a", "b"]', ["a", "b"]),
        (Sequence[int], "[1]", [1]),
        (list, "[]", []),
        (dict[str, float], '{"a": 1}', {"a": 1.0}),
        (Mapping[str, int | None], '{"a": null}', {"a": None}),
        (tuple[tuple[int, int], ...], "[[1, 2], [3, 4]]", ((1, 2), (3, 4))),
        (list[Path], '["a"]', [Path("a")]),
    ],
)
def test_texts_become_values_of_the_hinted_type(hint: Any, text: str, value: Any) -> None:
    """What is typed arrives as what the function asks for, of exactly that type."""
    found = parse_settings(taking(hint), {"x": text}, "job.py")["x"]
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("hint", "text", "problem"),
    [
        (int, "6.5", "--set x=6.5: wanted a whole number"),
        (int, "many", "--set x=many: wanted a whole number"),
        (float, "fast", "--set x=fast: wanted a number"),
        (bool, "maybe", "--set x=maybe: wanted true or false"),
        (Literal["sgd", "adam"], "adma", "--set x=adma: Did you mean 'adam'?"),
        (Literal[1, 2], "3", "--set x=3: Known: 1, 2."),
        (int | None, "x", "--set x=x: wanted a whole number or none"),
        (tuple[int, int], "[3]", "wanted tuple[int, int] written as JSON"),
        (tuple[int, int], "[3, 4, 5]", "wanted tuple[int, int] written as JSON"),
        (tuple[int, ...], '["a"]', "wanted tuple[int, ...] written as JSON"),
        (tuple[int, ...], "5", "wanted tuple[int, ...] written as JSON"),
        (list[int], "5", "wanted list[int] written as JSON"),
        (list[int], "[true]", "wanted list[int] written as JSON"),
        (list, "{", "wanted list written as JSON"),
        (dict[str, int], "[1]", "wanted dict[str, int] written as JSON"),
        (Decimal, "1", "wanted a Decimal, which cannot be given as text"),
    ],
)
def test_a_text_of_another_type_is_refused(hint: Any, text: str, problem: str) -> None:
    """The error repeats what was typed and says what was wanted, or the nearest choice."""
    with pytest.raises(BadJob, match=re.escape(problem)):
        parse_settings(taking(hint), {"x": text}, "job.py")


@pytest.mark.parametrize(
    ("default", "text", "value"),
    [
        (3, "4", 4),
        (0.5, "4", 4.0),
        (True, "false", False),
        ("a", "4", "4"),
        ((1, 2), "[3]", (3,)),
        (None, "4", "4"),
        (Path("a"), "b", Path("b")),
    ],
)
def test_without_a_hint_the_default_tells_the_type(default: Any, text: str, value: Any) -> None:
    """A function without annotations works as well."""
    found = parse_settings(taking(None, default), {"x": text}, "job.py")["x"]
    assert found == value
    assert type(found) is type(value)


def test_a_hint_that_cannot_be_evaluated_does_not_spoil_the_others() -> None:
    """A name known to the type checker alone, such as the return type's, leaves each other hint in force."""

    def job(lr: float = 1, job: Job | None = None) -> Job:
        return lr

    assert parse_settings(job, {"lr": "0.5"}, "job.py") == {"lr": 0.5}


def test_an_unknown_setting_is_answered_with_the_nearest() -> None:
    """A typing error is an error, not a setting without effect."""

    def job(width: int = 64, *, lr: float = 0.1, **rest):
        return width, lr, rest

    with pytest.raises(
        BadJob, match=r"job.py: job\(\) has no setting 'widht'. Did you mean 'width'\? Known: lr, width."
    ):
        parse_settings(job, {"widht": "3"}, "job.py")
    with pytest.raises(BadJob, match="has no setting 'rest'"):
        parse_settings(job, {"rest": "3"}, "job.py")


def test_a_setting_without_default_must_be_given() -> None:
    """The error says how."""

    def job(path: str, width: int = 64):
        return path, width

    with pytest.raises(BadJob, match="setting 'path' has no default\nGive it: --set path=VALUE"):
        parse_settings(job, {"width": "3"}, "job.py")
    assert parse_settings(job, {"path": "x"}, "job.py") == {"path": "x"}


def test_values_are_those_given_and_the_defaults() -> None:
    """All of them, as JSON; a default that could not be typed belongs to the file's text."""

    def job(width: int = 64, sizes=(1, 2), where=Path("a"), kind=Decimal, **rest):
        return width, sizes, where, kind, rest

    assert values_of(job, {"width": 32}) == {"width": 32, "sizes": [1, 2], "where": "a"}


@given(st.integers(), st.floats(allow_nan=False), TEXT, st.lists(st.integers()))
def test_values_written_as_text_are_read_back(count: int, rate: float, word: str, sizes: list[int]) -> None:
    """A run's settings, kept as JSON, load the same job again."""

    def job(count: int, rate: float, word: str, sizes: tuple[int, ...]):
        return count, rate, word, sizes

    texts = {"count": str(count), "rate": repr(rate), "word": word, "sizes": str(sizes)}
    arguments = parse_settings(job, texts, "job.py")
    assert arguments == {"count": count, "rate": rate, "word": word, "sizes": tuple(sizes)}
    assert values_of(job, arguments) == {"count": count, "rate": rate, "word": word, "sizes": sizes}
