"""The plan in force of a run: stored before it is used, and laid out for the processes that are there."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]  # missing from the stubs

import stoker
from stoker.errors import BadRun, DoesNotFit
from stoker.records import Coupling, Decision, Event, Layout, PlanSwitch, Position, to_json
from stoker.records.plan_schedule import PlanSchedule
from stoker.stepping.layouts.compatibility import micro_batch_problem
from stoker.store import CheckpointStore, RunDirectory
from stoker.training.elastic.rendezvous import Rendezvous
from stoker.training.plan_in_force import PlanInForce, Replanned, plan_for_layout
from tests.flow.builders import PLAN, Heard, blobs_job
from tests.planning.trials import candidate
from tests.store.builders import run_record, spec

NORMS = Coupling(kind="batch_norm", group=16, causes=("BatchNorm1d",), evidence="")
ALONE = Coupling(kind="separable", group=None, causes=(), evidence="")


@pytest.mark.parametrize(
    ("coupling", "micro_batch", "processes", "goes_on_with"),
    [
        (NORMS, 4, 1, 16),  # each of four took a quarter of a group
        (NORMS, 4, 3, 6),
        (NORMS, 4, 4, 4),
        (NORMS, 16, 2, 16),  # more than a part is legal
        (ALONE, 4, 1, 4),
        (ALONE, 4, 3, 4),
    ],
)
def test_a_micro_batch_becomes_as_large_as_coupled_samples_need(
    coupling: Coupling, micro_batch: int, processes: int, goes_on_with: int
) -> None:
    """And stays what it was where that is legal: what a run learns does not depend on who is left."""
    job, layout = blobs_job(), Layout(replicas=processes)
    found = plan_for_layout(layout, dataclasses.replace(PLAN, micro_batch=micro_batch), coupling, job)
    assert (found.micro_batch, found.layout) == (goes_on_with, layout)
    assert micro_batch_problem(coupling, found.micro_batch, job.batch, layout) is None


def test_sites_that_train_apart_keep_whole_groups() -> None:
    """Each of them is like one process: none takes a part of a group."""
    job = blobs_job(sync=stoker.DiLoCo(every=stoker.updates(5)))
    found = plan_for_layout(Layout(replicas=2), dataclasses.replace(PLAN, micro_batch=8), NORMS, job)
    assert found.micro_batch == 16


def begun(folder: Path, layout: Layout = Layout()) -> PlanInForce:  # noqa: B008 - a frozen record
    """A run that begins under PLAN in this layout."""
    chosen = dataclasses.replace(
        candidate("cpu", total_s=10.0, cost=None, is_here=True), plan=dataclasses.replace(PLAN, layout=layout)
    )
    decision = Decision(device="cpu", candidates=(chosen,), rejected=(), explanation=(), took_s=0.1)
    RunDirectory.create(folder / "run", run_record(spec()), spec(), decision=decision, coupling=ALONE)
    return PlanInForce.of(RunDirectory(folder / "run"))


def test_a_change_is_stored_and_the_forecast_stays(tmp_path: Path) -> None:
    """A resumed run reads the plan that was in force last; what the run began under is kept as well."""
    plans = begun(tmp_path)
    smaller = dataclasses.replace(PLAN, micro_batch=4)
    plans.change(Replanned(old=PLAN, new=smaller, why="memory"))
    again = PlanInForce.of(plans.directory)
    assert plans.plan == again.plan == smaller
    assert again.decision.chosen.forecast == plans.decision.chosen.forecast
    began = plans.directory.read_decision()
    assert began is not None
    assert began.chosen.plan == PLAN


@pytest.mark.parametrize(
    ("switches", "most"),
    [
        pytest.param([], 4, id="as it began"),
        pytest.param([("changed", 1)], 4, id="given up"),
        pytest.param([("changed", 1), ("trial", 1), ("settled", 1)], 4, id="given up, then trials of what was left"),
        pytest.param([("trial", 4), ("trial", 2), ("trial", 4), ("settled", 2)], 2, id="fewer are faster"),
        pytest.param([("changed", 1), ("trial", 2), ("trial", 1), ("settled", 1)], 1, id="all were tried again"),
        pytest.param([("trial", 2), ("settled", 2), ("changed", 1)], 2, id="given up of those chosen"),
    ],
)
def test_threads_that_were_given_up_can_be_taken_back(tmp_path: Path, switches: list, most: int) -> None:
    """A run that began beside a busy neighbour does not keep to what was left of the machine then."""
    plans = begun(tmp_path)
    plan = dataclasses.replace(plans.schedule.began, threads=4)
    plans.schedule = PlanSchedule(plan)
    for update, (kind, threads) in enumerate(switches):
        switched = dataclasses.replace(plan, threads=threads)
        plans.schedule = plans.schedule.then(PlanSwitch(update=update, samples=0, plan=switched, kind=kind, why=""))
    assert plans.most_threads == most


def test_a_plan_that_is_proposed_is_not_in_force_yet(tmp_path: Path) -> None:
    """It is stored for a resume; the processes agree on it when they meet."""
    plans = begun(tmp_path)
    plans.propose(Replanned(old=PLAN, new=dataclasses.replace(PLAN, micro_batch=4), why="memory"))
    assert plans.plan == PLAN
    assert PlanInForce.of(plans.directory).plan.micro_batch == 4


@pytest.mark.parametrize(
    ("deaths", "saved", "goes_on_with"), [(1, 6, 4), (2, 6, 16), (2, 7, 4)], ids=["once", "twice", "further"]
)
def test_a_candidate_is_left_out_after_two_deaths_without_a_checkpoint(
    deaths: int, saved: int, goes_on_with: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One may have been a power cut, and with a checkpoint beyond its first update a candidate does not kill."""
    plans, heard = begun(tmp_path), Heard()
    plans.switch(PlanSwitch(update=0, samples=0, plan=PLAN, kind="trial", why="begun under"))
    tried = dataclasses.replace(PLAN, micro_batch=4)
    plans.switch(PlanSwitch(update=6, samples=48, plan=tried, kind="trial", why="tried"))
    for _ in range(deaths - 1):  # a process resumes in the trial
        PlanInForce.of(plans.directory).try_again(Position(updates=6, samples=48))
    monkeypatch.setattr(CheckpointStore, "newest_position", lambda _: Position(updates=saved))
    again = PlanInForce.of(plans.directory)
    again.leave_out_deadly([heard])
    assert again.schedule.at(6).micro_batch == goes_on_with
    assert PlanInForce.of(plans.directory).schedule == again.schedule
    assert (again.schedule.switches[-1].left_out, len(heard)) == ((tried, 1) if goes_on_with == 16 else (None, 0))


@pytest.mark.parametrize(
    ("ends", "goes_on_with"),
    [
        (("stopped", "killed"), 4),
        (("stopped", "stopped"), 4),
        (("killed", "stopped", "killed"), 4),
        (("stopped", "killed", "killed"), 16),
    ],
)
def test_a_process_that_was_stopped_is_no_death(ends: tuple[str, ...], goes_on_with: int, tmp_path: Path) -> None:
    """A slice that is over, Ctrl-C and an error of the data say nothing of a candidate; two kills in a row do."""
    plans = begun(tmp_path)
    plans.switch(PlanSwitch(update=0, samples=0, plan=PLAN, kind="trial", why="begun under"))
    tried = dataclasses.replace(PLAN, micro_batch=4)
    plans.switch(PlanSwitch(update=6, samples=48, plan=tried, kind="trial", why="tried"))
    plans.directory.append_event(Event(kind="stopped", at=0.0, fields={"reason": "asked to stop"}))
    for end in ends:  # of processes that resume in the trial
        plans = PlanInForce.of(plans.directory)
        plans.leave_out_deadly([])
        plans.try_again(Position(updates=10, samples=80))
        plans.directory.append_event(Event(kind="progress", at=0.0))
        if end == "stopped":
            plans.directory.append_event(Event(kind="stopped", at=0.0, fields={"reason": "asked to stop"}))
    plans = PlanInForce.of(plans.directory)
    plans.leave_out_deadly([])
    assert plans.plan.micro_batch == goes_on_with


def test_a_run_without_a_plan_is_refused(tmp_path: Path) -> None:
    """A directory that has lost it cannot be continued."""
    RunDirectory.create(tmp_path / "run", run_record(spec()), spec())
    with pytest.raises(BadRun, match="has lost its plan"):
        PlanInForce.of(RunDirectory(tmp_path / "run"))


def test_processes_that_meet_go_on_under_one_plan(tmp_path: Path) -> None:
    """Rank 0 lays the plan that a rank needs out for those that met, stores it, and the others take it over."""
    store, job = HashStore(), blobs_job()
    notes = {"plan": to_json(dataclasses.replace(PLAN, micro_batch=4, layout=Layout(replicas=4))), "why": "memory"}
    first, second = (begun(tmp_path / str(rank), Layout(replicas=4)) for rank in range(2))
    change = first.agree(job, Rendezvous(number=2, rank=0, size=2, name="2", notes=notes), store)
    assert second.agree(job, Rendezvous(number=2, rank=1, size=2, name="2", notes=notes), store) is None
    assert change is not None
    assert (change.why, change.new) == ("memory", first.plan)
    assert first.plan == second.plan == dataclasses.replace(PLAN, micro_batch=4, layout=Layout(replicas=2))
    assert PlanInForce.of(first.directory).plan == first.plan
    assert PlanInForce.of(second.directory).plan.layout == Layout(replicas=4)


def test_a_layout_that_cannot_be_spread_over_those_that_met_is_refused(tmp_path: Path) -> None:
    """Two stages need two processes."""
    plans = begun(tmp_path, Layout(stages=2))
    with pytest.raises(DoesNotFit, match="cannot be spread over 1 processes"):
        plans.agree(blobs_job(), Rendezvous(number=2, rank=0, size=1, name="2"), HashStore())
