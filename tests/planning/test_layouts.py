"""Which layouts there are, and which a job allows."""

from __future__ import annotations

import pytest

from stoker.planning.model.search_space import LayoutRules, layouts_of
from stoker.records import Coupling, Layout
from tests.planning.trials import NORMS, profile

WHOLE = Coupling(kind="whole_group", group=32, causes=("the loss",), evidence="declared")


def terms(**changes: object) -> LayoutRules:
    """Of a job with a batch of 512."""
    return LayoutRules(profile=profile(**changes))


def test_layouts_of_two_lie_along_one_axis() -> None:
    """Replicas first; shards kept gathered or not, tensor groups with a divided sequence or not."""
    found = list(layouts_of(2))
    assert found[0] == Layout(replicas=2)
    assert set(found) == {
        Layout(replicas=2), Layout(shards=2), Layout(shards=2, reshard=False), Layout(tensor=2),
        Layout(tensor=2, sequence=True), Layout(stages=2),
    }  # fmt: skip
    assert list(layouts_of(1)) == [Layout()]


def test_layouts_of_eight_have_at_most_two_axes_and_all_eight_processes() -> None:
    """Each once, those along one axis first."""
    found = list(layouts_of(8))
    assert len(found) == len(set(found))
    assert {one.world_size for one in found} == {8}
    axes = [sum(size > 1 for size in (one.replicas, one.shards, one.tensor, one.stages)) for one in found]
    assert axes == sorted(axes)
    assert max(axes) == 2
    assert Layout(replicas=4, stages=2) in found
    assert Layout(replicas=2, shards=2, tensor=2) not in found


@pytest.mark.parametrize(
    ("changes", "layout", "says"),
    [
        ({"batch": 4}, Layout(replicas=8), "8 processes cannot take parts of a batch of 4 samples: at most 4 can"),
        ({"num_train": 3}, Layout(shards=4), "a batch of 3 samples"),
        ({"coupling": WHOLE}, Layout(replicas=2), "groups of 32 by the loss, which one process has to see whole"),
        ({"coupling": NORMS}, Layout(replicas=128), "a group of 64 coupled samples: at most 64 can"),
        ({}, Layout(tensor=16), "more than the 8 devices of a node"),
    ],
)
def test_what_does_not_divide_is_said_with_its_numbers(changes: dict[str, object], layout: Layout, says: str) -> None:
    """Which number, and what would."""
    problem = terms(**changes).problem_with(layout)
    assert problem is not None
    assert says in problem


def test_what_divides_is_legal() -> None:
    """Also parts of coupled groups, and a whole group on stages."""
    assert terms().problem_with(Layout(replicas=3)) is None
    assert terms(coupling=NORMS).problem_with(Layout(replicas=2)) is None
    assert terms(coupling=WHOLE).problem_with(Layout(stages=2)) is None
    assert terms(coupling=WHOLE).problem_with(Layout()) is None


def test_others_may_object() -> None:
    """What cannot be spread at all, and what those say who divide models."""
    alone = LayoutRules(profile=profile(), alone="it makes its updates itself")
    assert alone.problem_with(Layout(replicas=2)) == "it makes its updates itself"
    assert alone.problem_with(Layout()) is None
    asked = LayoutRules(profile=profile(), objection=lambda one: f"{one.tensor} heads, {one.stages} ends")
    assert asked.problem_with(Layout(tensor=2)) == "2 heads, 1 ends"
    assert asked.problem_with(Layout(stages=2)) == "1 heads, 2 ends"
    assert asked.problem_with(Layout(replicas=2)) is None
    apart = LayoutRules(profile=profile(), whole_copies="sites hold whole models")
    assert apart.problem_with(Layout(replicas=2)) is None
    assert apart.problem_with(Layout(shards=2)) == "sites hold whole models"
