"""A study as it goes on: who is next, who stops, what is kept, and what a killed one loses."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from stoker.errors import BadJob, RunFailed
from stoker.records.study import StudyTrial
from stoker.store.files import read_record
from stoker.store.run_files import TRIAL
from stoker.tuning.conductor import Conductor
from stoker.tuning.processes import Judge, TrialReading, TrialRequest, TrialResult, TrialSlot
from stoker.tuning.study_database import importance, read_trials
from tests.tuning.builders import STEP, TOTAL, Told, branin, conducted, conductor, learning_branin, settings


def trials_of(conductor: Conductor) -> tuple[StudyTrial, ...]:
    """The trials as records."""
    return read_trials(conductor._study)


@pytest.mark.slow
def test_every_trial_is_kept_with_what_it_took(tmp_path: Path) -> None:
    """Settings, value, curve, samples, time and place of each."""
    found = trials_of(conducted(tmp_path, settings(), trials=3))
    assert [one.number for one in found] == [0, 1, 2]
    for one in found:
        assert one.state == "finished"
        assert one.value == pytest.approx(branin(**one.parameters), abs=0.2)
        assert (one.samples, one.wall_s, one.run) == (TOTAL, 2.7, f"trials/{one.number:04}")
        assert [samples for samples, _ in one.curve] == list(range(STEP, TOTAL + 1, STEP))


@pytest.mark.parametrize("sampler", ["random", "tpe", "gp", "grid"])
def test_the_same_seed_proposes_the_same(sampler: str) -> None:
    """One after another, a study repeats; another seed is another study."""
    pytest.importorskip("scipy")
    seen = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        study = settings(sampler=sampler, pruner="asha", seed=seed, name=name)
        seen.append([(t.parameters, t.value, t.state) for t in trials_of(conducted(None, study, trials=13))])
    assert seen[0] == seen[1]
    assert seen[0] != seen[2]
    assert len({str(parameters) for parameters, _, _ in seen[0]}) == 13


@pytest.mark.parametrize(
    ("sampler", "trials"), [("random", 5), ("tpe", 14), pytest.param("grid", 14, marks=pytest.mark.slow)]
)
def test_a_study_that_is_cut_off_proposes_what_it_would_have(tmp_path: Path, sampler: str, trials: int) -> None:
    """Opened again after some trials, as by a process that took over, it is the study that was never cut."""
    study = settings(sampler=sampler, pruner="asha")
    whole = trials_of(conducted(None, study, trials=trials))
    for count in (1, trials // 2, trials):
        cut = conducted(tmp_path, study, trials=count)
    assert [(t.parameters, t.value) for t in trials_of(cut)] == [(t.parameters, t.value) for t in whole]


def test_asha_gives_up_what_is_worse_and_counts_samples() -> None:
    """Most trials end at a rung; none at a place that is no rung; the best is finished."""
    found = trials_of(conducted(None, settings(pruner="asha"), trials=30))
    pruned = [one for one in found if one.state == "pruned"]
    assert len(pruned) > 15
    assert {one.samples for one in pruned} <= {300, 900}
    assert all(one.reason == f"asha at {one.samples:,} samples" for one in pruned)
    finished = [one for one in found if one.state == "finished"]
    assert min(finished, key=lambda one: one.value).samples == TOTAL
    assert sum(one.samples for one in found) < 0.5 * 30 * TOTAL


def test_a_trial_that_was_given_up_says_so_in_its_run(tmp_path: Path) -> None:
    """Its own record says that it is unfinished; a disk that is full costs a warning, not the study."""

    def learning(request: TrialRequest, slot: TrialSlot, judge: Judge) -> TrialResult:
        request.directory.mkdir(parents=True)
        if request.number == 0:
            (request.directory / TRIAL.name).mkdir()  # where it cannot be written
        return learning_branin(request, slot, judge)

    told = Told()
    found = trials_of(conducted(tmp_path, settings(pruner="asha"), trials=12, run_trial=learning, tell=told))
    assert [one.state for one in found].count("pruned") > 2
    for trial in found[1:]:
        kept = read_record(tmp_path / trial.run / TRIAL.name, StudyTrial, remedy="")
        assert kept == trial
    assert len(told.of("warned")) == 1
    (tmp_path / found[1].run / TRIAL.name).unlink()  # as where a kill came before it was written
    conducted(tmp_path, settings(pruner="asha"), trials=12, run_trial=learning)
    assert read_record(tmp_path / found[1].run / TRIAL.name, StudyTrial, remedy="") == found[1]


@pytest.mark.parametrize("pruner", ["median", "hyperband"])
def test_the_other_pruners_prune(pruner: str) -> None:
    """Some are given up, and some are finished."""
    states = [one.state for one in trials_of(conducted(None, settings(pruner=pruner), trials=25))]
    assert states.count("pruned") > 2
    assert states.count("finished") > 2


def learning_by_batches(request: TrialRequest, slot: TrialSlot, judge: Judge) -> TrialResult:
    """A trial evaluated at the first update that ends an interval of 500 samples."""
    batch = int(request.parameters["batch"])
    for samples in (math.ceil(end / batch) * batch for end in range(500, TOTAL, 500)):
        if judge(TrialReading(samples=samples, total_samples=TOTAL, metrics={"loss": batch + 1 / samples})):
            return TrialResult(kind="stopped", samples=samples)
    return TrialResult(kind="finished", metrics={"loss": float(batch)}, samples=TOTAL)


@pytest.mark.parametrize(
    ("pruner", "space", "warnings"),
    [
        ("median", "batch=choice(32,48,80)", 1),
        ("median", "batch=int(32,256)", 1),
        ("median", "batch=choice(50,100,250)", 0),
        ("asha", "batch=choice(32,48,80)", 0),
    ],
)
def test_a_median_of_evaluations_at_other_samples_is_warned_of(pruner: str, space: str, warnings: int) -> None:
    """Once: trials of different batches are evaluated at different samples, so the pruner compares few of them."""
    told = Told()
    conducted(None, settings(space, pruner=pruner), learning_by_batches, trials=20, tell=told)
    assert len(told.of("warned")) == warnings
    assert all("whole epochs" in fields["message"] for fields in told.of("warned"))


def test_a_grid_ends_when_each_point_was_tried() -> None:
    """However many trials are asked for."""
    study = settings("x=float(-5,10,step=5) y=choice(0,5)", sampler="grid")
    found = trials_of(conducted(None, study, trials=100))
    assert len(found) == 8 == len({str(one.parameters) for one in found})


class Dies(Exception):
    """The process of a study is killed."""


def dying_at(samples: int, numbers: set[int]) -> object:
    """A trial that dies with its study at so many samples, if its number is among these."""

    def run(request: TrialRequest, slot: TrialSlot, judge: Judge) -> TrialResult:
        def heard(reading: TrialReading) -> bool:
            if request.number in numbers and reading.samples > samples:
                raise Dies
            return judge(reading)

        return learning_branin(request, slot, heard)

    return run


@pytest.mark.slow
def test_a_killed_study_takes_up_what_was_in_flight(tmp_path: Path) -> None:
    """The trial keeps its number, its settings and its place; it goes on before a new one begins."""
    with pytest.raises(Dies):
        conducted(tmp_path, settings(), run_trial=dying_at(500, {2}), trials=5)
    told = Told()
    found = trials_of(conducted(tmp_path, settings(), trials=5, tell=told))
    assert [event.fields["trial"] for event in told if event.kind in ("began", "resumed")] == [2, 3, 4]
    assert told.of("resumed")[0]["run"] == "trials/0002"
    assert [one.state for one in found] == ["finished"] * 5
    assert told.of("resumed")[0]["parameters"] == found[2].parameters


@pytest.mark.parametrize("storage", ["", "shared"])
def test_a_study_of_its_own_is_taken_up_under_another_name_of_the_host(tmp_path: Path, storage: str) -> None:
    """A container has another name each time, and a directory may be moved; in a shared database it is another's."""
    url = f"sqlite:///{tmp_path / 'shared.db'}" if storage else ""
    study = settings(storage=url)
    with pytest.raises(Dies):
        conducted(tmp_path, study, run_trial=dying_at(500, {1}), trials=3, worker="host-1:runs/study")
    found = conducted(tmp_path, study, trials=3, worker="host-2:runs/study")
    assert [one.state for one in trials_of(found)] == ["finished", "running" if storage else "finished", "finished"]


@pytest.mark.parametrize("storage", ["", "shared"])
def test_a_trial_whose_process_died_before_it_signed_is_taken_up(tmp_path: Path, storage: str) -> None:
    """In the study's own file it can be no one else's; in a shared database it may be, and is left alone."""
    url = f"sqlite:///{tmp_path / 'shared.db'}" if storage else ""
    first = conductor(tmp_path, settings(storage=url))
    first._study.ask()
    request = conductor(tmp_path, settings(storage=url), worker="other").next_request()
    assert request is not None
    wanted = conductor(None, settings()).next_request()
    assert wanted is not None
    assert request.number == (1 if storage else 0)
    assert (request.parameters == wanted.parameters) == (not storage)


@pytest.mark.slow
def test_what_was_given_up_when_the_study_died_is_not_run_again(tmp_path: Path) -> None:
    """Pruned, but not yet informed: its end is noted, and the study goes on."""

    def dies_after_the_verdict(request: TrialRequest, slot: TrialSlot, judge: Judge) -> TrialResult:
        ending = learning_branin(request, slot, judge)
        if ending.kind == "stopped":
            raise Dies
        return ending

    with pytest.raises(Dies):
        conducted(tmp_path, settings(pruner="asha"), run_trial=dies_after_the_verdict, trials=9)
    told = Told()
    conducted(tmp_path, settings(pruner="asha"), trials=9, tell=told)
    assert told.of("resumed") == []
    assert told[0].kind == "ended"
    assert told[0].fields["state"] == "pruned"


def failing(kind: str, words: str) -> object:
    """Trials that end so."""
    return lambda request, slot, judge: TrialResult(kind=kind, words=words.format(request.number), samples=7)


@pytest.mark.parametrize("kind", ["out of memory", "diverged"])
def test_no_memory_and_no_numbers_are_pruned_with_the_reason(kind: str) -> None:
    """They are what such settings lead to, so the study goes on however many there are."""
    found = trials_of(conducted(None, settings(), run_trial=failing(kind, "too wide"), trials=5))
    assert [(one.state, one.reason, one.samples) for one in found] == [("pruned", f"{kind}: too wide", 7)] * 5


def test_three_failures_alike_in_a_row_end_the_study() -> None:
    """Numbers may differ; what is wrong is reported, and what is done is kept."""
    found = conducted(None, settings(), run_trial=failing("failed", "no file part-{}.npy"), trials=10)
    assert isinstance(found.problem, RunFailed)
    assert "3 trials in a row failed with the same error: no file part-2.npy" in found.problem.message
    assert [one.state for one in trials_of(found)] == ["failed"] * 3


def test_failures_of_other_kinds_do_not_end_the_study() -> None:
    """Two equal ones, another one, two equal ones: the study goes on."""
    kinds = ["a fails", "a fails", "b fails", "a fails", "a fails", "b fails"]

    def run(request: TrialRequest, slot: TrialSlot, judge: Judge) -> TrialResult:
        return TrialResult(kind="failed", words=kinds[request.number])

    found = conducted(None, settings(), run_trial=run, trials=6)
    assert found.problem is None
    assert [one.reason for one in trials_of(found)] == kinds


def test_an_objective_that_is_not_measured_is_named() -> None:
    """At the first evaluation, with what is measured; the trial is left to be continued."""
    found = conducted_until_stopped("valid/accuracy")
    assert isinstance(found.problem, BadJob)
    assert "valid/loss" in found.problem.message


def conducted_until_stopped(objective: str) -> Conductor:
    """A study whose trials are asked to stop."""
    found = conductor(None, settings(objective=objective))
    request = found.next_request()
    assert request is not None
    assert found.judge(request.number, TrialReading(samples=10, total_samples=TOTAL, metrics={"loss": 1.0}))
    found.ended(request.number, TrialResult(kind="stopped", samples=10))
    assert found.next_request() is None
    return found


def test_a_value_that_is_no_number_is_pruned() -> None:
    """As a trial that diverged without anybody noticing."""

    def run(request: TrialRequest, slot: TrialSlot, judge: Judge) -> TrialResult:
        return TrialResult(kind="finished", metrics={"loss": math.nan}, samples=5)

    (found,) = trials_of(conducted(None, settings(), run_trial=run, trials=1))
    assert (found.state, found.reason) == ("pruned", "diverged: valid/loss is not a number")


def test_an_evaluation_that_is_no_number_is_not_called_the_rules_choice() -> None:
    """The rule gives such a trial up at its first evaluation, and the user learns why."""

    def run(request: TrialRequest, slot: TrialSlot, judge: Judge) -> TrialResult:
        assert judge(TrialReading(samples=300, total_samples=TOTAL, metrics={"loss": math.nan}))
        return TrialResult(kind="stopped", samples=300)

    (found,) = trials_of(conducted(None, settings(pruner="asha"), run_trial=run, trials=1))
    assert (found.state, found.reason) == ("pruned", "diverged: valid/loss is not a number")


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_when_time_is_up_trials_stop_and_are_left_to_go_on(tmp_path: Path) -> None:
    """What runs is asked to stop, nothing begins, and the next call takes it up."""
    clock = Clock()
    found = conductor(tmp_path, settings(), seconds=60, clock=clock)
    request = found.next_request()
    assert request is not None
    reading = TrialReading(samples=100, total_samples=TOTAL, metrics={"loss": 3.0})
    assert not found.judge(request.number, reading)
    clock.now = 61.0
    assert found.seconds_left == 0.0
    assert found.judge(request.number, reading)
    found.ended(request.number, TrialResult(kind="stopped", samples=150))
    assert found.next_request() is None
    again = conductor(tmp_path, settings()).next_request()
    assert again is not None
    assert (again.number, again.parameters) == (request.number, request.parameters)


def test_two_workers_share_one_study(tmp_path: Path) -> None:
    """In one database each trial has one number and one worker; none takes up the other's."""
    url = f"sqlite:///{tmp_path / 'shared.db'}"
    places = [tmp_path / "one", tmp_path / "two"]
    workers = [conductor(place, settings(storage=url), trials=6, worker=place.name) for place in places]
    requests = [workers[index % 2].next_request() for index in range(6)]
    assert [request.number for request in requests if request] == list(range(6))
    assert workers[0].next_request() is None
    assert requests[1] is not None
    assert requests[1].directory == places[1] / "trials" / "0001"
    anew = conductor(places[0], settings(storage=url), trials=6, worker="one")
    taken = [anew.next_request() for _ in range(4)]
    assert [None if one is None else one.number for one in taken] == [0, 2, 4, None]


def test_two_workers_that_begin_at_once_do_not_try_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both saw as many trials when they asked; the one with the later number gets its proposal."""
    url = f"sqlite:///{tmp_path / 'shared.db'}"
    one, other = (conductor(tmp_path, settings(storage=url), worker=name) for name in ("one", "other"))
    first, ask = list[TrialRequest | None](), other._study.ask

    def asks_late() -> object:
        first.append(one.next_request())
        return ask()

    monkeypatch.setattr(other._study, "ask", asks_late)
    begun = [other.next_request(), *first][::-1]
    alone = conductor(None, settings())
    wanted = [alone.next_request() for _ in range(2)]
    assert [(found.number, found.parameters) for found in begun if found is not None] == [
        (found.number, found.parameters) for found in wanted if found is not None
    ]


def test_what_mattered_is_told_when_enough_is_finished() -> None:
    """A setting that does nothing has the smallest share; too few trials have none."""
    space = "x=float(-5,10) idle=float(0,1)"

    def run(request: TrialRequest, slot: TrialSlot, judge: Judge) -> TrialResult:
        return TrialResult(kind="finished", metrics={"loss": request.parameters["x"] ** 2}, samples=1)

    few = conducted(None, settings(space), run_trial=run, trials=4)
    assert importance(few._study) == {}
    shares = importance(conducted(None, settings(space), run_trial=run, trials=40)._study)
    assert shares["x"] > 0.8
    assert sum(shares.values()) == pytest.approx(1)
