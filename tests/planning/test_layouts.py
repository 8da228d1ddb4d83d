"""Which layouts there are, and which a job allows."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from stoker.jobs import AdamW, DiLoCo, Muon
from stoker.planning.model.search_space import layouts_of
from stoker.planning.multi_device import LayoutRules
from stoker.records import Coupling, Layout
from stoker.stepping.model import meta_model
from stoker.units import updates
from tests.planning.trials import NORMS, profile
from tests.stepping.layouts.conformance import gpt_job, tied_job

WHOLE = Coupling(kind="whole_group", group=32, causes=("the loss",), evidence="declared")


def rules(job_changes: dict[str, object] | None = None, **changes: object) -> LayoutRules:
    """Of a small GPT with a batch of 512."""
    job = dataclasses.replace(gpt_job(), **{"batch": 512, **(job_changes or {})})
    return LayoutRules(job=job, model=meta_model(job), profile=profile(**changes))


def test_layouts_of_two_lie_along_one_axis() -> None:
    """Replicas first; shards kept gathered or not, tensor groups with a divided sequence or not."""
    found = list(layouts_of(2))
    assert found[0] == Layout(replicas=2)
    assert set(found) == {
        Layout(replicas=2),
        Layout(shards=2),
        Layout(shards=2, reshard=False),
        Layout(tensor=2),
        Layout(tensor=2, sequence=True),
        Layout(experts=2),
        Layout(context=2),
        Layout(context=2, reshard=False),
        Layout(stages=2),
    }
    assert list(layouts_of(1)) == [Layout()]


def test_layouts_of_eight_have_at_most_three_axes_and_all_eight_processes() -> None:
    """Each once, those along one axis first."""
    found = list(layouts_of(8))
    assert len(found) == len(set(found))
    assert {one.world_size for one in found} == {8}
    axes = [len(one.divided) for one in found]
    assert axes == sorted(axes)
    assert max(axes) == 3
    assert Layout(replicas=4, stages=2) in found
    assert Layout(stages=2, shards=2, tensor=2, sequence=True) in found
    assert Layout(stages=4, replicas=2, shards=2, tensor=2) not in list(layouts_of(32))


@pytest.mark.parametrize("shared", [{}, {"replicas": 2}, {"shards": 2}, {"shards": 2, "sequence": True}])
def test_stages_may_have_tensor_groups(shared: dict[str, int]) -> None:
    """Of two blocks with an even number of heads; groups that do not divide them are refused as without stages."""
    assert rules().problem_with(Layout(stages=2, tensor=2, **shared)) is None
    problem = rules().problem_with(Layout(stages=2, tensor=8, **shared))
    assert problem == rules().problem_with(Layout(tensor=8, sequence="sequence" in shared))
    assert problem is not None


def test_a_model_is_asked_once_for_each_size_of_an_axis(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of products consist of a few sizes of each axis."""
    asked = list[Layout]()
    monkeypatch.setattr("stoker.planning.multi_device.model_problem", lambda _, layout: asked.append(layout))
    known = rules()
    for layout in layouts_of(32):
        known.problem_with(layout)
    assert len(asked) == len(set(asked))
    assert Layout(stages=2) in asked
    assert all(len(one.divided) == 1 for one in asked)


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
    problem = rules(**changes).problem_with(layout)
    assert problem is not None
    assert says in problem


def test_interleaved_stages_need_blocks_and_no_shards() -> None:
    """With the numbers; replicas and tensor groups go with them."""
    assert "2 stages of 2 chunks need 4 blocks at least" in (rules().problem_with(Layout(stages=2, chunks=2)) or "")
    deep = dataclasses.replace(rules(), model=meta_model(tied_job(layers=4)))
    for others in ({}, {"replicas": 2}, {"tensor": 2}):
        assert deep.problem_with(Layout(stages=2, chunks=2, **others)) is None
    problem = deep.problem_with(Layout(stages=2, chunks=2, shards=2))
    assert problem == "2 chunks in each stage do not go with shards: each would gather the weights of all"


def test_tensor_groups_are_as_large_as_the_links_reach() -> None:
    """Eight of a usual machine, four of one of four, and 16 of a rack's domain."""
    few, rack = (dataclasses.replace(rules(), tensor_devices=count) for count in (4, 72))
    assert "more than the 4 devices" in (few.problem_with(Layout(tensor=8)) or "")
    assert "devices of a node" not in (rack.problem_with(Layout(tensor=16)) or "")


def test_what_divides_is_legal() -> None:
    """Also parts of coupled groups, and a whole group on stages."""
    assert rules().problem_with(Layout(replicas=3)) is None
    assert rules(coupling=NORMS).problem_with(Layout(replicas=2)) is None
    assert rules(coupling=WHOLE).problem_with(Layout(stages=2)) is None
    assert rules(coupling=WHOLE).problem_with(Layout()) is None


@pytest.mark.slow
def test_the_job_may_object() -> None:
    """Optimisers with a closure need one process; sites, and optimisers of whole matrices, need whole models."""
    closure = rules({"optimizer": torch.optim.LBFGS})
    assert closure.problem_with(Layout(replicas=2)) == "LBFGS computes the loss again within its step"
    assert closure.problem_with(Layout()) is None
    sites = rules({"sync": DiLoCo(every=updates(10))})
    assert sites.problem_with(Layout(replicas=2)) is None
    assert "hold whole models" in (sites.problem_with(Layout(shards=2)) or "")
    matrices = rules({"optimizer": Muon(lr=1e-3, rest=AdamW(lr=1e-3))})
    assert matrices.problem_with(Layout(replicas=2)) is None
    assert "needs whole matrices, and shards hold parts" in (matrices.problem_with(Layout(shards=2)) or "")
    assert "1 samples for them" in (rules({"batch": 1}, batch=1).problem_with(Layout(stages=2)) or "")
