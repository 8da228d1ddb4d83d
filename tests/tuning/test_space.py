"""Spaces from words, files and mappings; what is wrong with one is said with its names and numbers."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.errors import BadJob
from stoker.records import dumps, loads
from stoker.records.study import Parameter
from stoker.tuning.space import as_text, describe_space, examples, grid, parse_space, points_of


def test_words_become_parameters() -> None:
    """Every kind of range, with and without steps, and choices of every plain type."""
    found = parse_space(
        "lr=log(1e-4,1e-1) drop=float(0,0.5,step=0.25) depth=int(2,6) width=logint(8, 256) "
        "kind=choice(sgd,adam) flag=choice(true,false) size=choice(16,0.5,none)"
    )
    assert [p.kind for p in found] == ["log", "float", "int", "logint", "choice", "choice", "choice"]
    assert (found[0].low, found[0].high) == (1e-4, 1e-1)
    assert found[1].step == 0.25
    assert [p.choices for p in found[4:]] == [("sgd", "adam"), (True, False), (16, 0.5, None)]


def test_words_may_come_in_several_texts_files_and_mappings(tmp_path: Path) -> None:
    """JSON, TOML, Python and words all mean the same."""
    words = parse_space(["lr=log(0.01,1)", "width=choice(16,32)"])
    file = tmp_path / "space.json"
    file.write_text(json.dumps({"lr": "log(0.01,1)", "width": [16, 32]}))
    toml = tmp_path / "space.toml"
    toml.write_text('lr = "log(0.01,1)"\nwidth = [16, 32]\n')
    made = Parameter(name="lr", kind="log", low=0.01, high=1)
    assert parse_space(file) == words == parse_space(str(toml)) == parse_space({"lr": made, "width": (16, 32)})


@pytest.mark.parametrize(
    ("space", "said"),
    [
        ("", "the space is empty"),
        ("lr=lgo(1e-4,1e-1)", "there is no 'lgo'. Did you mean 'log'?"),
        ("lr=log(1e-1,1e-4)", "the range from 0.1 to 0.0001 is empty"),
        ("lr=float(1,1)", "the range from 1 to 1 is empty"),
        ("lr=log(0,1)", "a logarithmic range must be above 0, got 0 to 1"),
        ("lr=float(0,inf)", "the ends of a range are numbers"),
        ("depth=int(2,6.5)", "wanted whole numbers"),
        ("depth=int(2,7,step=2)", "steps of 2 from 2 do not reach 7"),
        ("lr=log(1,2,step=1)", "a logarithmic range has no step"),
        ("lr=float(0,one)", "'one' is no number"),
        ("lr=float(0)", "wanted the two ends of a range"),
        ("lr=float(0,1,2)", "wanted the two ends of a range"),
        ("w=choice(16)", "at least two values, got 1"),
        ("w=choice(16,16)", "16 is there twice"),
        ("w=choice(1,2) w=int(1,2)", "has 'w' twice"),
        ("lr=log(1e-4,1e-1) oops", "'oops' is no part of a space"),
        ("lr=0.1", "'lr=0.1' is no part of a space"),
        ("nowhere.toml", "there is no file nowhere.toml"),
    ],
)
def test_what_is_wrong_is_said(space: str, said: str) -> None:
    """A typo, an empty range, a step that does not reach: with the numbers, and how it is written."""
    with pytest.raises(BadJob) as error:
        parse_space(space)
    assert said in str(error.value)


@pytest.mark.parametrize("value", [5, "five", {"low": 1}, [[1, 2], [3]]])
def test_a_value_that_is_no_range_is_refused(value: object) -> None:
    """In a mapping: a number alone, a text that is no call, an object, lists as choices."""
    with pytest.raises(BadJob):
        parse_space({"lr": value})


@given(st.floats(1e-6, 1e3, allow_nan=False), st.floats(1.001, 1e3), st.sampled_from(["float", "log", "int", "logint"]))
def test_a_parameter_is_written_as_it_is_read(low: float, factor: float, kind: str) -> None:
    """Words, and JSON, give back the parameter; points lie within it, in order, each once."""
    is_whole = kind in ("int", "logint")
    low = float(f"{low:.6g}")
    high = float(f"{low * factor:.6g}")
    if is_whole:
        low, high = float(math.ceil(low)), float(math.ceil(high) + 1)
    parameter = Parameter(name="p", kind=kind, low=low, high=high)
    assert parse_space(describe_space(parameter)) == (parameter,)
    assert loads(dumps(parameter), Parameter) == parameter
    points = points_of(parameter)
    assert list(points) == sorted(set(points))
    assert low * (1 - 1e-9) <= points[0] <= points[-1] <= high * (1 + 1e-9)


def test_a_grid_has_every_combination_once_and_mixed() -> None:
    """Points of choices and steps; another seed shuffles otherwise."""
    space = parse_space("a=choice(x,y) b=int(1,3) c=float(0,1,step=0.5)")
    points = grid(space, seed=0)
    assert len(points) == 2 * 3 * 3 == len({json.dumps(one) for one in points})
    assert points != grid(space, seed=1)
    assert sorted(map(str, points)) == sorted(map(str, grid(space, seed=1)))
    assert {one["c"] for one in points} == {0.0, 0.5, 1.0}


def test_a_grid_that_is_too_large_is_refused() -> None:
    """Five points of each of eight ranges are too many, and said to be."""
    with pytest.raises(BadJob, match="390,625 points"):
        grid(parse_space(" ".join(f"p{i}=float(0,1)" for i in range(8))), seed=0)


def test_examples_are_the_ends_and_the_middle_first() -> None:
    """The largest numbers come first, for they need the most memory; each configuration is there once."""
    space = parse_space("lr=log(0.01,1) width=choice(64,16,32)")
    assert examples(space, 3, seed=0) == ({"lr": 1.0, "width": 64}, {"lr": 0.01, "width": 16}, {"lr": 0.1, "width": 32})
    assert len(examples(space, 5, seed=0)) == 5
    assert examples(space, 5, seed=0) == examples(space, 5, seed=0)


def test_values_are_typed_as_on_a_command_line() -> None:
    """As `--set` takes them."""
    assert [as_text(value) for value in (None, True, 3, 0.5, "sgd")] == ["none", "true", "3", "0.5", "sgd"]
