"""A new layout is two files of one name, of which nothing else in the package knows."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

import stoker
import stoker.layouts
import stoker.stepping.layouts
from stoker.errors import BadJob
from stoker.layouts import all_axes, axes_of
from stoker.layouts.rules import layout_problem
from stoker.planning.explanation import describe_message
from stoker.planning.model import run_forecast
from stoker.planning.model.search_space import layouts_of
from stoker.planning.multi_device import LayoutRules
from stoker.records import Layout, MeshAxis, Plan, dumps, loads
from stoker.stepping.layouts.compatibility import require_legal, traits_of
from stoker.stepping.model import meta_model
from stoker.stepping.world import ALONE, World
from stoker.testing.ranks import on_ranks
from tests.planning.spreading import PARTS
from tests.planning.test_spread_forecast import ON_CPU, ByFlops, forecasts
from tests.planning.trials import profile
from tests.stepping.driving import SEPARABLE, largest_difference
from tests.stepping.layouts.conformance import Learned, gpt_job, largest_loss_difference, taught

_AXIS = '''
"""Mirrors: replicas in pairs, whose gradients are summed after the backward pass."""

from stoker.layouts.base import LayoutAxis, Traffic
from stoker.records import MeshAxis


class Mirrors(LayoutAxis):
    name = "mirrors"
    explanation = "pairs of processes hold the whole model each"
    added = MeshAxis(name="mirrors", size=1, shares_batch=True)
    report_note = "Mirrors are no replicas."

    def problem_with(self, layout, job):
        size = layout.group("mirrors")[0]
        if size % 2:
            return f"{size} mirrors are no pairs"
        if job.has_penalty:
            return "mirrors do not see Job(penalty=…)"
        return None if layout.world_size == size else f"mirrors go with no other axis, as in {layout.in_words()}"

    def traffic(self, update):
        sizes = (update.held.trained_bytes,)
        return [Traffic(what="mirrored gradients", collective="all-reduce", axis="mirrors", sizes=sizes, times=3)]

    def overhead_s(self, parts, layout, passes):
        return 5.0

    def message_bytes(self, parts, layout, *, is_on_cpu, gathered_share=1.0):
        return 10**9


AXIS = Mirrors()
'''

_EXECUTION = '''
"""Mirrors, executed by a sum of gradients after the backward pass."""

from stoker.stepping.layouts.base import GradientReducer, LayoutExecution


class MirrorExecution(LayoutExecution):
    def parallelize(self, plan, model, world, job):
        return GradientReducer(model, world)

    def model_problem(self, model, layout):
        return None if hasattr(model, "head") else "mirrors need a head"


EXECUTION = MirrorExecution()
'''

_PACKAGES = (stoker.layouts, stoker.stepping.layouts)


def mirrors(size: int = 2, **other: int) -> Layout:
    """A layout of so many mirrors."""
    return Layout(added=(MeshAxis(name="mirrors", size=size, shares_batch=True),), **other)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """The folders of the two files, outside the package."""
    made = []
    for name, text in (("rules", _AXIS), ("execution", _EXECUTION)):
        folder = tmp_path_factory.mktemp(name)
        (folder / "mirrors.py").write_text(text)
        made.append(str(folder))
    return made[0], made[1]


@pytest.fixture
def added(folders: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Both files in the package's folders."""
    for package, folder in zip(_PACKAGES, folders, strict=True):
        monkeypatch.setattr(package, "__path__", [*package.__path__, folder])


def test_an_added_layout_has_a_name_and_is_stored() -> None:
    """Also where nothing else is known of it: a report of such a run can be read."""
    layout = mirrors(4, tensor=2)
    assert layout.in_words() == "4 mirrors × 2-way tensor"
    assert loads(dumps(Plan(device="cpu", micro_batch=1, layout=layout)), Plan).layout == layout
    assert (layout.world_size, layout.data_size, layout.num_copies) == (8, 4, 4)
    assert [layout.data_rank(rank) for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert (layout.group("mirrors"), layout.group("tensor")) == ((4, 2), (2, 1))
    assert layout.resized(4) == mirrors(2, tensor=2)
    assert mirrors().is_replicated
    with pytest.raises(
        BadJob, match="no layout of mirrors here, only of replicas, shards, tensor, experts, stages, context"
    ) as caught:
        axes_of(layout)
    assert "replicas: each process holds the whole model" in (caught.value.remedy or "")


@pytest.mark.parametrize(
    ("axis", "says"),
    [
        (MeshAxis(name="mirrors", size=0), "mirrors must be from 1"),
        (MeshAxis(name="shards", size=2), "different names"),
    ],
)
def test_an_added_axis_is_checked_as_the_others(axis: MeshAxis, says: str) -> None:
    """Its size, and that its name is not taken."""
    with pytest.raises(ValueError, match=says):
        Layout(added=(axis,))


def test_without_its_files_it_is_not_searched() -> None:
    """The six axes of the package, the simplest first."""
    assert [axis.name for axis in all_axes()] == ["replicas", "shards", "tensor", "experts", "stages", "context"]
    assert mirrors() not in layouts_of(2)


@pytest.mark.usefixtures("added")
def test_an_added_layout_is_in_the_search_space() -> None:
    """By itself, and with each other axis; what it does not go with is refused by its own rule."""
    assert [axis.name for axis in all_axes()][-1] == "mirrors"
    assert list(layouts_of(2))[-1] == mirrors()
    assert mirrors(4, shards=2) in layouts_of(8)


@pytest.mark.usefixtures("added")
def test_an_added_layout_is_legal_by_its_own_rules() -> None:
    """For the planner and for a step; rules of all layouts hold too, and those of its execution on the model."""
    job = dataclasses.replace(gpt_job(), batch=512)
    rules = LayoutRules(job=job, model=meta_model(job), profile=profile())
    assert rules.problem_with(mirrors()) is None
    assert rules.problem_with(mirrors(3)) == "3 mirrors are no pairs"
    assert rules.problem_with(mirrors(tensor=2)) == "mirrors go with no other axis, as in 2 mirrors × 2-way tensor"
    assert "a batch of 512 samples" in (rules.problem_with(mirrors(1024)) or "")
    headless = dataclasses.replace(rules, model=torch.nn.Linear(2, 2))
    assert headless.problem_with(mirrors()) == "mirrors need a head"
    punished = dataclasses.replace(
        job,
        loss=stoker.Objective(
            job.objective.loss, penalty=lambda model: sum(p.square().sum() for p in model.parameters())
        ),
    )
    assert layout_problem(mirrors(), traits_of(punished)) == "mirrors do not see Job(penalty=…)"
    with pytest.raises(BadJob, match=r"2 mirrors: mirrors do not see Job\(penalty=…\)"):
        require_legal(punished, Plan(device="cpu", micro_batch=16, layout=mirrors()), SEPARABLE)


@pytest.mark.usefixtures("added")
def test_an_added_layout_is_forecast_by_its_own_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory, messages and time, next to those of replicas, which hold as much."""
    monkeypatch.setattr(run_forecast, "operation_times", lambda _hardware, **_: ByFlops())
    ours, replicas = forecasts(mirrors(), "cpu"), forecasts(Layout(replicas=2), "cpu")
    assert [one.what for one in ours.traffic(ON_CPU)] == ["loss and count", "mirrored gradients"]
    forecast = ours.forecast(ON_CPU)
    assert forecast.communication_bytes == 40 + 3 * PARTS.trained_bytes
    spread = ours.spread(ON_CPU)
    assert spread.overhead_s == 5.0
    assert spread.compute_s == pytest.approx(replicas.spread(ON_CPU).compute_s)
    assert forecast.step_s.value == pytest.approx(
        5.0 + spread.compute_s + 1e-9 * (40 + 3 * PARTS.trained_bytes), rel=1e-6
    )
    assert describe_message(spread.messages[-1]).startswith("mirrored gradients, ")
    difference = ours.needed_bytes(ON_CPU) - replicas.needed_bytes(ON_CPU)
    assert difference == pytest.approx(10**9, rel=0.01)
    assert ours.state(ON_CPU) == replicas.state(ON_CPU)


@pytest.mark.slow
@pytest.mark.usefixtures("added")
def test_an_added_layout_is_planned_with_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From end to end, without running anything."""
    monkeypatch.setenv("STOKER_CACHE", str(tmp_path))
    found = stoker.plan(gpt_job(), on="2xt4")
    by_layout = {one.plan.layout: one.forecast for one in found.candidates}
    assert by_layout[mirrors()].communication_bytes > 2 * (by_layout[Layout(replicas=2)].communication_bytes or 0)
    assert found.chosen.plan.layout != mirrors()


def one_update(world: World, layout: Layout, folders: tuple[str, str]) -> Learned:
    """What one update in float64 comes to in this process, to which the two files are added."""
    for package, folder in zip(_PACKAGES, folders, strict=True):
        package.__path__ = [*package.__path__, folder]
    return taught(world, gpt_job(), Plan(device="cpu", micro_batch=3, layout=layout), SEPARABLE, torch.float64, 1)


def test_an_added_layout_learns_what_one_process_learns(folders: tuple[str, str]) -> None:
    """Over two processes on gloo, each with its part of the batch."""
    alone = taught(ALONE, gpt_job(), Plan(device="cpu", micro_batch=3), SEPARABLE, torch.float64, 1)
    together = on_ranks(mirrors(), one_update, mirrors(), folders)
    for learned in together:
        assert largest_loss_difference(learned, alone) < 1e-12
        assert largest_difference(learned.weights, alone.weights) < 1e-12
    assert together[0].indices != together[1].indices
