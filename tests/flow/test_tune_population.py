"""`stoker tune --sampler pbt` with real runs: handed on, taken over, cut off, refused, shown."""

from __future__ import annotations

import functools
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import stoker
from stoker import api
from stoker.errors import BadJob, BadRun
from stoker.records.study import StudyEvent, StudyTrial
from stoker.store import CheckpointStore
from stoker.tuning.processes import TrialReading, TrialRequest, TrialSlot
from stoker.tuning.trials import JobSource, TrainTrial
from tests.flow.builders import PLAN, assert_equal_weights, blobs_job, stopped_run
from tests.flow.command import stoker_here

pytest.importorskip("optuna")

SPACE = "lr=log(1e-3,1) momentum=float(0,0.9)"
EPOCHS, HALF = 4, 160
"""Of a run, and its samples up to the evaluation in the middle."""


def blobs(lr: float = 0.1, momentum: float = 0.9, **changes: Any) -> stoker.Job:
    """A job as a function of its settings, without a test set, as trials have none; it keeps its last weights."""
    known: dict[str, Any] = {
        "until": stoker.epochs(EPOCHS),
        "test": None,
        "evaluation": stoker.Evaluation(select="last"),
    }
    return blobs_job(**({"optimizer": stoker.SGD(lr=lr, momentum=momentum)} | known | changes))


def trained(job: Any = blobs, **options: Any) -> api.Study:
    """A population of four in this process, in two intervals, all under one plan."""
    known = {
        "space": SPACE,
        "sampler": "pbt",
        "trials": 4,
        "intervals": 2,
        "objective": "loss",
        "plan": PLAN,
        "planned": 0,
        "in_processes": False,
        "study": "herd",
    }
    return stoker.tune(job, **(known | options))


@pytest.fixture(scope="module")
def herd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[api.Study]:
    """A population that was never cut off; its directory is where runs are, whatever a test makes of that."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STOKER_RUNS", str(tmp_path_factory.mktemp("herd")))
        yield trained()


def told(study: api.Study) -> list[object]:
    """What of each trial must not depend on whether the study was cut off."""
    found = sorted(study.trials, key=lambda one: one.number)
    return [(one.number, one.state, one.parameters, one.parent, one.value, one.curve, one.samples) for one in found]


def of_last_interval(study: api.Study, *, is_taken: bool) -> StudyTrial:
    """A trial that went on from another member, or from its own."""
    return next(one for one in study.trials if one.parent is not None and (one.parent % 4 != one.member) is is_taken)


def test_a_member_that_nobody_replaces_is_an_uninterrupted_run(herd: api.Study) -> None:
    """Bit for bit: that its run was handed on in the middle changes neither weights nor evaluations."""
    assert sum(one.samples for one in herd.trials) == 4 * EPOCHS * 80
    kept = of_last_interval(herd, is_taken=False)
    alone = stoker.train(blobs(**kept.parameters), plan=PLAN, run_dir="alone", sink=lambda _: None)
    assert_equal_weights(herd.run(kept.number), alone)
    heard = [event.fields for event in alone.directory.read_events() if event.kind == "evaluated"]
    curve = [point for one in herd.result.lineage(kept.number) for point in one.curve]
    assert curve == [(one["samples"], one["metrics"]["loss"]) for one in heard]


def test_a_lineage_is_trained_again_by_hand_from_its_records(herd: api.Study) -> None:
    """The parent up to where it handed on, then a fork of it under the settings of the child: the same weights."""
    child = of_last_interval(herd, is_taken=True)
    parent, _ = herd.result.lineage(child.number)
    assert herd.run(child.number).record.forked_from == f"herd/{parent.run}"
    assert child.parameters != parent.parameters
    first = stopped_run(blobs(**parent.parameters), at_samples=HALF, run_dir="first")
    assert first.record.samples == parent.samples
    second = stoker.train(blobs(**child.parameters), plan=PLAN, run_dir="second", fork="first", sink=lambda _: None)
    assert_equal_weights(herd.run(child.number), second)


@pytest.mark.slow
def test_a_population_that_is_cut_off_goes_on_as_if_it_were_not(
    herd: api.Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within an interval, between two of them, and at the end, one after another."""
    monkeypatch.setenv("STOKER_RUNS", "cut")
    for moment in (("ended", 2), ("began", 4), ("ended", 7)):
        with pytest.raises(KeyboardInterrupt):
            trained(sink=functools.partial(_interrupts, moment))
    assert told(trained()) == told(herd)


def _interrupts(moment: tuple[str, int], event: StudyEvent) -> None:
    if (event.kind, event.fields.get("trial", event.fields.get("number"))) == moment:
        raise KeyboardInterrupt


def test_a_population_is_not_continued_with_other_members(herd: api.Study, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is replaced depends on how many they are; the same request finds it done."""
    monkeypatch.setenv("STOKER_RUNS", str(herd.path.parent))
    with pytest.raises(BadRun, match="members: 4 there, 5 here"):
        trained(trials=5)
    with pytest.raises(BadRun, match="intervals: 2 there, 3 here"):
        trained(intervals=3)
    assert trained(intervals=None).trials == herd.trials


def test_the_command_and_the_page_show_how_the_best_came_about(
    herd: api.Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The settings of its ancestors, and whose run has its weights."""
    monkeypatch.setenv("STOKER_RUNS", str(herd.path.parent))
    shown = stoker_here("tune", "--show", "herd")
    assert "the best came about by lr=" in shown.out
    assert f"its model: the run herd/{herd.best.run}" in shown.out
    assert "How the best came about" in herd.page_path.read_text(encoding="utf-8")
    assert herd.run().model(blobs()) is not None


UPDATES = {"made": 0, "interrupted": -1}
"""Of the runs below; kept here, for a loss's own state is part of what a job is."""


def interrupting_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The cross-entropy of each sample; in one update the process is asked to stop, as when its study is killed.

    It is called while a job is made ready too, when signals have no handler yet; that is not counted.
    """
    if torch.is_grad_enabled() and signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        UPDATES["made"] += 1
        if UPDATES["made"] == UPDATES["interrupted"]:
            signal.raise_signal(signal.SIGTERM)
    return nn.functional.cross_entropy(output, target, reduction="none")


def interrupted_blobs() -> stoker.Job:
    """A job with that loss, judged by it."""
    return blobs(loss=interrupting_loss, metrics=())


@pytest.mark.parametrize("update", [4, 10, 11], ids=["early", "the last", "after the last"])
def test_wherever_a_trial_is_stopped_it_hands_on_the_same(update: int) -> None:
    """Also in the update of its last evaluation, whose judge is gone: that is judged when the trial is taken up."""
    ends: list[tuple[int, bytes]] = []
    for name, at in (("whole", -1), ("cut", update)):
        UPDATES.update(made=0, interrupted=at)
        trial = TrainTrial(source=JobSource(function=interrupted_blobs), plan=PLAN)
        request = TrialRequest(number=0, parameters={}, directory=Path(f"runs/{name}/trials/0000"))
        heard: list[int] = []

        def judge(reading: TrialReading, heard: list[int] = heard) -> bool:
            heard.append(reading.samples)
            return reading.samples >= HALF

        ending = trial(request, TrialSlot(on="cpu"), judge)
        if ending.samples <= HALF:
            heard.clear()
            ending = trial(request, TrialSlot(on="cpu"), judge)
        assert ending.kind == "stopped"
        assert heard[-1] == HALF
        newest = CheckpointStore(request.directory / "checkpoints").newest()
        assert newest is not None
        ends.append((newest[1].position.samples, (newest[0] / "model.safetensors").read_bytes()))
    assert ends[0] == ends[1]


OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"trials": 3}, "wanted 4 at least"),
    ({"intervals": 1}, "--intervals 1: wanted 2 at least"),
    ({"intervals": 9}, "each ends at an evaluation, and a run has 4"),
    ({"pruner": "asha"}, "a population replaces its worst members itself"),
    ({"storage": "sqlite:///some.db"}, "take over each other's checkpoints"),
    ({"sampler": "tpe"}, "--intervals 2 is for a population"),
]

SPACES: list[tuple[str, str]] = [
    ("width=choice(4,8)", "width changes the model's weights"),
    ("batch=choice(16,20)", "batch changes Job(batch=…)"),
    ("data=choice(100,110)", "data changes the data"),
    ("epochs=int(3,6)", "epochs changes Job(until=…)"),
    ("kind=choice(sgd,adam)", "kind changes the kind of optimiser"),
]

JOBS: list[tuple[dict[str, Any], str]] = [
    ({"until": stoker.seconds(1)}, "counted in samples"),
    ({"stop": [stoker.EarlyStopping(patience=stoker.epochs(2))]}, "its patience would count"),
    ({"schedule": stoker.schedules.plateau("loss", patience=stoker.epochs(1))}, "it would count evaluations"),
    ({"average": stoker.SWA()}, "its average would be of several"),
    ({"optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1)}, "only Stoker's take new settings"),
]


@pytest.mark.parametrize(("options", "said"), OPTIONS, ids=[said for _, said in OPTIONS])
def test_options_that_a_population_cannot_have_are_refused(
    options: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is written."""
    monkeypatch.setenv("STOKER_RUNS", "runs")
    with pytest.raises(BadJob) as error:
        trained(**options)
    assert said in str(error.value)
    assert not Path("runs").exists()


def searched(
    width: int = 8, batch: int = 16, data: int = 100, epochs: int = 4, kind: str = "sgd", dropout: float = 0.1
) -> stoker.Job:
    """A job with settings of which one can change in the middle of a run."""
    optimizers = {"sgd": stoker.SGD(lr=0.1), "adam": stoker.Adam(lr=0.1)}
    points = blobs_job().data
    return blobs(
        model=lambda: nn.Sequential(nn.Linear(6, width), nn.Dropout(dropout), nn.Linear(width, 2)),
        batch=batch,
        data=tuple(torch.cat([part, part[: data - 100]]) for part in points),
        until=stoker.epochs(epochs),
        optimizer=optimizers[kind],
    )


@pytest.mark.parametrize(("space", "said"), SPACES, ids=[space for space, _ in SPACES])
def test_what_cannot_change_in_the_middle_of_a_run_is_refused(space: str, said: str) -> None:
    """With what it changes, and where to give it instead."""
    with pytest.raises(BadJob) as error:
        trained(searched, study="other", space=f"{space} dropout=float(0,0.5)")
    assert f"{said}, which cannot change in the middle of a run" in str(error.value)
    assert "--sampler tpe" in str(error.value)


@pytest.mark.parametrize(("changes", "said"), JOBS, ids=[said for _, said in JOBS])
def test_a_job_in_which_something_goes_over_a_whole_run_is_refused(changes: dict[str, Any], said: str) -> None:
    """What several members would share unnoticed."""
    with pytest.raises(BadJob, match=said):
        trained(lambda lr: blobs(lr, **changes), study="other", space="lr=log(1e-3,1)")
