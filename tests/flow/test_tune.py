"""`stoker tune` with real runs: proposed, pruned, killed, continued, shared, shown."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import stoker
from stoker import api
from stoker.errors import BadJob, BadRun, RunFailed
from stoker.records.study import StudyEvent
from stoker.store import CheckpointStore
from stoker.tuning.processes import TrialReading, TrialRequest, TrialSlot
from stoker.tuning.space import examples, parse_space
from stoker.tuning.trials import JobSource, TrainTrial
from tests.flow.builders import PLAN, blobs_job
from tests.flow.command import Running, job_file, plan_file, stoker_here

pytest.importorskip("optuna")

SPACE = "lr=log(1e-3,1) width=choice(4,8,16)"


def blobs(lr: float = 0.1, width: int = 8, epochs: float = 3) -> stoker.Job:
    """A job as a function of its settings."""
    return blobs_job(optimizer=stoker.SGD(lr=lr), until=stoker.epochs(epochs))


def tuned(job: Any = blobs, space: Any = SPACE, **options: Any) -> api.Study:
    """A study in this process, all under one plan."""
    known = {"trials": 3, "plan": PLAN, "planned": 0, "in_processes": False}
    return stoker.tune(job, space, **(known | options))


def test_trials_are_real_runs_in_the_study() -> None:
    """Each has a directory with its record, events and weights; the best one is at hand; the test set is not used."""
    study = tuned(job_file())
    assert len(study.trials) == 3
    best = study.run()
    assert best.path == study.path / study.best.run
    assert best.metrics["valid/accuracy"] == study.best.value
    assert not any(name.startswith("test/") for name in best.metrics)
    assert best.directory.read_spec().parameters["width"] == study.best.parameters["width"]
    assert best.model() is not None
    assert study.page_path.is_file()
    assert study.best.samples == best.record.samples == 240
    assert study.best.value == max(
        one.value for one in study.trials if one.state == "finished" and one.value is not None
    )


@pytest.mark.slow
def test_the_same_call_finds_a_study_that_is_done_and_more_trials_go_on() -> None:
    """Nothing is trained again."""
    first = tuned(trials=2)
    again = tuned(trials=2)
    assert again.path == first.path
    assert again.trials == first.trials
    more = tuned(trials=3)
    assert len(more.trials) == 3
    by_number = {one.number: one for one in more.trials}
    assert all(by_number[one.number] == one for one in first.trials)


@pytest.mark.slow
def test_time_runs_from_the_call_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking at the job took longer than there is: no trial begins, and the same call without a limit trains them."""
    clock = iter([0.0, 61.0])
    heard: list[StudyEvent] = []
    with monkeypatch.context() as slow:
        slow.setattr("stoker.tuning.tune.time", SimpleNamespace(monotonic=lambda: next(clock), time=time.time))
        assert tuned(seconds=60.0, sink=heard.append).trials == ()
    assert heard[-2].fields["message"].startswith("the time is up: 0 of 3 trials have ended")
    assert len(tuned().trials) == 3


@pytest.mark.slow
def test_two_studies_of_one_seed_are_equal() -> None:
    """Settings, values and curves."""
    one, other = tuned(study="one", trials=3), tuned(study="other", trials=3)
    assert [(t.parameters, t.value, t.curve, t.state) for t in one.trials] == [
        (t.parameters, t.value, t.curve, t.state) for t in other.trials
    ]


OTHER_RULES: list[tuple[dict[str, Any], str]] = [
    ({"space": "lr=log(1e-3,2)"}, "space: "),
    ({"sampler": "random"}, "sampler: tpe there, random here"),
    ({"seed": 1}, "seed: 0 there, 1 here"),
    ({"fixed": {"epochs": "2"}}, "settings: "),
    ({"objective": "loss"}, "objective: accuracy there, loss here"),
]


@pytest.mark.slow
def test_a_study_is_not_continued_under_another_rule() -> None:
    """What differs is listed: space, sampler, seed, settings of all, objective."""
    tuned(study="mine", trials=1)
    for changes, said in OTHER_RULES:
        with pytest.raises(BadRun) as error:
            tuned(**({"space": SPACE, "study": "mine", "trials": 2} | changes))
        assert said in error.value.message


@pytest.mark.slow
def test_a_study_is_not_continued_when_its_job_has_changed() -> None:
    """Its trials would not compare."""
    tuned(job_file(), trials=1)
    with pytest.raises(BadRun, match="has changed since the study began"):
        tuned(job_file('settings["batch"] = 20'), trials=2)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"space": "widht=choice(4,8)"}, "Did you mean 'width'?"),
        ({"fixed": {"lr": 0.1}}, "'lr' is set and searched at once"),
        ({"sampler": "tpee"}, "Did you mean 'tpe'?"),
        ({"pruner": "ahsa"}, "Did you mean 'asha'?"),
        ({"objective": "valid/acuracy"}, "Did you mean 'valid/accuracy'?"),
        ({"objective": "test/accuracy"}, "is not tested by it any more"),
        ({"trials": 0}, "wanted a number from 1 on"),
        ({"parallel": 0, "in_processes": True}, "wanted auto"),
        ({"parallel": 2}, "parallel=2 needs processes"),
        ({"trails": 3}, "Did you mean 'trials'?"),
        ({"seconds": -1.0}, "wanted a time above 0"),
        ({"dry_run": True}, "--dry-run stops at the forecast, and --planned 0 leaves that out"),
        ({"job": lambda lr, width: blobs_job(valid=None)}, "has no valid data"),
        ({"job": lambda lr, width: 5}, "returned a int, wanted a stoker.Job"),
        ({"job": lambda lr, width: 1 / 0}, "raised ZeroDivisionError"),
    ],
    ids=[
        "typo",
        "twice",
        "sampler",
        "pruner",
        "objective",
        "test",
        "trials",
        "parallel",
        "processes",
        "option",
        "time",
        "no forecast",
        "no valid",
        "no job",
        "raises",
    ],
)
def test_what_is_wrong_is_said_before_anything_is_written(options: dict[str, Any], said: str) -> None:
    """A typo with the near name; nothing is left behind."""
    with pytest.raises(BadJob) as error:
        tuned(**options)
    assert said in str(error.value)
    assert not Path("runs").exists()


@pytest.mark.slow
def test_a_study_is_not_continued_when_its_data_have_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor would its trials then."""
    tuned(study="mine", trials=1)
    path = Path("runs/mine/study.json")
    kept = json.loads(path.read_text("utf-8"))
    path.write_text(json.dumps(kept | {"data_fingerprint": "of others"}), "utf-8")
    with pytest.raises(BadRun, match="The data of mine have changed since the study began"):
        tuned(study="mine", trials=2)
    path.write_text(json.dumps(kept), "utf-8")
    assert len(tuned(study="mine", trials=2).trials) == 2


@pytest.mark.slow
def test_a_study_whose_first_configuration_cannot_be_made_goes_on_all_the_same() -> None:
    """It could begin, for others can: the largest width is refused by the job."""

    def narrow(width: int) -> stoker.Job:
        if width > 8:
            raise BadJob("too wide")
        return blobs()

    options: dict[str, Any] = {"space": "width=choice(4,8,16)", "sampler": "grid", "pruner": "none", "study": "mine"}
    first = tuned(narrow, **(options | {"trials": 1, "planned": 3}))
    assert [one.problem for one in first.forecast.planned] == ["too wide", "", ""]  # type: ignore[union-attr]
    assert sorted(one.state for one in tuned(narrow, **options).trials) == ["failed", "finished", "finished"]


class Hits:
    """A metric with a state, as torchmetrics has them: it says itself that more is better."""

    higher_is_better = True

    def reset(self) -> None:
        """Forget all."""
        self.right = self.seen = 0

    __init__ = reset

    def update(self, output: torch.Tensor, target: torch.Tensor) -> None:
        """See a batch."""
        self.right += int((output.argmax(1) == target).sum())
        self.seen += len(target)

    def compute(self) -> torch.Tensor:
        """The share that is right."""
        return torch.tensor(self.right / self.seen)

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """That of one batch."""
        self.update(output, target)
        return self.compute()


def counted(lr: float, width: int) -> stoker.Job:
    """A job whose best checkpoint is chosen by that metric."""
    return blobs_job(optimizer=stoker.SGD(lr=lr), metrics=[Hits()])


@pytest.mark.slow
def test_a_metric_that_says_itself_which_way_is_better_is_searched_by() -> None:
    """Without an objective a study goes by what chooses a run's best checkpoint; asked for by name it is the same."""
    study = tuned(counted, trials=1)
    assert (study.result.settings.objective, study.result.settings.higher_is_better) == ("valid/Hits", True)
    assert study.best.value == study.run().metrics["valid/Hits"]
    assert tuned(counted, trials=1, objective="Hits", study="named").result.settings.higher_is_better


def test_a_setting_that_a_job_file_does_not_take_is_named() -> None:
    """In the job file's own words; a value that it refuses is reported where it was given."""
    with pytest.raises(BadJob, match="Did you mean 'width'"):
        tuned(job_file(), space="widht=choice(4,8)")
    with pytest.raises(BadJob, match="--space width: the value few: wanted a whole number"):
        tuned(job_file(), space="width=choice(none,few)")
    with pytest.raises(BadJob, match="--set epochs=many: wanted a number"):
        tuned(job_file(), fixed={"epochs": "many"})


def test_a_diverged_trial_is_pruned_and_the_study_goes_on() -> None:
    """A rate so high that the loss is no number is a bad setting, not a mistake."""
    study = tuned(space="lr=choice(0.1,1e30)", sampler="grid", pruner="none", trials=2)
    states = {one.parameters["lr"]: (one.state, one.reason.partition(":")[0]) for one in study.trials}
    assert states == {0.1: ("finished", ""), 1e30: ("pruned", "diverged")}


def test_a_trial_that_does_not_fit_is_pruned_as_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the planner's words."""
    from stoker.errors import DoesNotFit

    def refuse(*_: Any, **__: Any) -> None:
        raise DoesNotFit("the weights take 3 TiB")

    monkeypatch.setattr("stoker.training.train.train", refuse)
    study = tuned(trials=2)
    assert [(one.state, one.reason) for one in study.trials] == [
        ("pruned", "out of memory: the weights take 3 TiB")
    ] * 2


def test_a_page_that_cannot_be_drawn_costs_no_study(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is reported, and the trials are there."""

    def broken(_: object) -> str:
        raise ZeroDivisionError("a figure of nothing")

    monkeypatch.setattr("stoker.reporting.study_page.render_study", broken)
    heard: list[StudyEvent] = []
    assert len(tuned(trials=1, sink=heard.append).trials) == 1
    told = [event.fields["message"] for event in heard if event.kind == "warned"]
    assert told == ["the study's page could not be written: a figure of nothing"]


def test_three_failures_alike_end_the_study_with_the_error() -> None:
    """What is wrong is the job; the page is written all the same."""
    failing = job_file('settings["loss"] = lambda output, target: {}["no such thing"]')
    with pytest.raises(RunFailed, match="3 trials in a row failed with the same error"):
        tuned(failing, study="failing", trials=10)
    assert Path("runs/failing/study.html").is_file()
    assert [one.state for one in api.study("failing").trials] == ["failed"] * 3


def test_a_killed_trial_goes_on_from_its_checkpoint() -> None:
    """The run that was cut off in the middle is continued, and the finished one is not trained again."""
    trial = TrainTrial(source=JobSource(function=blobs), plan=dataclasses.replace(PLAN, checkpoint_every_s=1e-6))
    request = TrialRequest(number=0, parameters={"lr": 0.1}, directory=Path("runs/t/trials/0000"))
    heard: list[TrialReading] = []

    def stops_at_80(reading: TrialReading) -> bool:
        heard.append(reading)
        return reading.samples == 80

    assert trial(request, TrialSlot(on="cpu"), stops_at_80).kind == "stopped"
    ending = trial(request, TrialSlot(on="cpu"), lambda reading: bool(heard.append(reading)))
    assert (ending.kind, ending.samples) == ("finished", 240)
    assert [reading.samples for reading in heard] == [80, 80, 160, 240]  # whether the first was acted on is not known
    kept = trial(request, TrialSlot(on="cpu"), lambda reading: bool(heard.append(reading)))
    assert kept == ending
    assert [reading.samples for reading in heard[4:]] == [80, 160, 240]  # all is told to a study that knows of none
    knowing = dataclasses.replace(request, reported_samples=240)
    assert trial(knowing, TrialSlot(on="cpu"), lambda reading: bool(heard.append(reading))) == ending
    assert [reading.samples for reading in heard[7:]] == [240]


def test_a_dry_run_forecasts_and_writes_nothing() -> None:
    """Time with an interval, what each planned configuration needs, what is assumed."""
    heard: list[StudyEvent] = []
    study = tuned(job_file(), planned=2, dry_run=True, sink=heard.append)
    assert [event.kind for event in heard] == ["looking", "forecast"]
    assert study.trials == ()
    assert study.forecast is not None
    assert study.forecast.total_s is not None
    assert study.forecast.total_s.low > 0
    assert [one.parameters["width"] for one in study.forecast.planned] == [16, 4]
    assert all(one.peak_bytes is not None and one.total_samples == 240 for one in study.forecast.planned)
    assert not Path("runs").exists()


@pytest.mark.slow
def test_trials_in_processes_are_forecast_packed_and_shown() -> None:
    """The command from forecast to table: as many at once as there are cores, each in a process of its own."""
    arguments = ["tune", job_file(), "--space", SPACE, "--trials", "2", "--plan", plan_file(), "--planned", "1"]
    outcome = stoker_here(*arguments, "--parallel", "auto", "--json")
    assert outcome.code == 0
    assert [event["event"] for event in outcome.events][:3] == ["looking", "forecast", "packed"]
    assert len(outcome.of("ended")) == 2
    assert outcome.of("done")[0]["trials"] == 2
    shown = stoker_here("tune", "--show", "tune-blobs")
    assert shown.code == 0
    assert "train the best: stoker train" in shown.out
    document = json.loads(stoker_here("tune", "--show", "tune-blobs", "--json").out)
    assert document["best"]["number"] == outcome.of("done")[0]["best"]["trial"]
    assert len(document["trials"]) == 2


@pytest.mark.slow
def test_a_study_that_is_killed_loses_only_what_was_in_flight() -> None:
    """SIGKILL while a trial trains: the same command takes it up from its checkpoint, and the others stand."""
    slow = job_file(
        "import time\nslowly = lambda model: time.sleep(0.01) or sum(p.sum() for p in model.parameters()) * 0\n"
        "settings['loss'] = stoker.Objective(settings['loss'], penalty=slowly)"
    )
    arguments: list[str | Path] = [
        "tune",
        slow,
        "--space",
        SPACE,
        "--trials",
        "2",
        "--pruner",
        "none",
        "--plan",
        plan_file(),
        "--planned",
        "0",
        "--set",
        "epochs=12",
    ]
    with Running(*arguments) as first:
        first.until("ended")
        begun = first.until("began")
        _wait_for_a_checkpoint(Path("runs") / _only_study() / begun["run"])
        first.process.kill()
        assert first.process.wait() == -signal.SIGKILL
        before = {one.number: one for one in api.study(_only_study()).result.trials}
    assert [before[0].state, before[1].state] == ["finished", "running"]
    outcome = stoker_here(*arguments, "--json")
    assert outcome.code == 0
    assert [event["trial"] for event in outcome.of("resumed")] == [1]
    after = {one.number: one for one in api.study(_only_study()).result.trials}
    assert after[0] == before[0]
    assert [one.state for one in after.values()] == ["finished"] * 2
    run = api.study(_only_study()).run(1)
    assert [event.kind for event in run.directory.read_events()].count("resumed") == 1


def _only_study() -> str:
    (found,) = (one.name for one in Path("runs").iterdir() if (one / "study.json").exists())
    return found


def _wait_for_a_checkpoint(run: Path) -> None:
    deadline = time.monotonic() + 60
    while not CheckpointStore(run / "checkpoints").names():
        assert time.monotonic() < deadline, "no checkpoint"
        time.sleep(0.02)


HOLDER = """
import pathlib, sys
from stoker.store import RunLock

RunLock(pathlib.Path(sys.argv[1])).acquire()
print("held", flush=True)
sys.stdin.read()
"""


def test_a_trial_that_is_still_being_saved_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the process that lives on after its study was killed, however long; then it is trained, and has not failed."""
    request = TrialRequest(number=0, parameters={"lr": 0.1}, directory=Path("runs/t/trials/0000"))
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, request.directory], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as saving:
        assert saving.stdout is not None
        assert saving.stdout.readline() == b"held\n"

        def ends(_pause_s: float) -> None:
            saving.kill()
            saving.wait()

        monkeypatch.setattr("stoker.tuning.trials._LOCK_S", -1.0)
        monkeypatch.setattr("stoker.tuning.trials.time", SimpleNamespace(monotonic=time.monotonic, sleep=ends))
        trial = TrainTrial(source=JobSource(function=blobs), plan=PLAN)
        try:
            assert trial(request, TrialSlot(on="cpu"), lambda _: False).kind == "finished"
        finally:
            saving.kill()


def test_a_second_process_in_the_same_study_is_refused() -> None:
    """Who has it is named, and how several work on one."""
    study = tuned(study="mine", trials=1)
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, study.path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=dict(os.environ)
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(BadRun) as error:
            tuned(study="mine", trials=2)
        other.kill()
    assert f"mine is in use by process {other.pid}" in error.value.message
    assert "--storage" in str(error.value.remedy)


@pytest.mark.slow
def test_two_machines_share_a_study_in_one_database(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has its own runs; the trials are one study's; another space under that name is refused."""
    url = f"sqlite:///{Path('shared.db').absolute()}"
    monkeypatch.setenv("STOKER_RUNS", "here")
    first = tuned(study="both", storage=url, trials=2)
    monkeypatch.setenv("STOKER_RUNS", "there")
    second = tuned(study="both", storage=url, trials=3)
    assert len(first.trials) == 2
    assert sorted(one.number for one in second.trials) == [0, 1, 2]
    assert [path.name for path in Path("there/both/trials").iterdir()] == ["0002"]
    monkeypatch.setenv("STOKER_RUNS", "elsewhere")
    with pytest.raises(BadRun, match="has another study called both: its space differs"):
        tuned(study="both", storage=url, space="lr=log(1e-3,3) width=choice(4,8,16)")


@pytest.mark.slow
def test_interrupted_in_this_process_a_study_goes_on_later() -> None:
    """Ctrl-C: the run is saved, the study ends, and the same call takes the trial up."""

    def interrupts(event: StudyEvent) -> None:
        if event.kind == "began" and event.fields["trial"] == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tuned(sink=interrupts, study="mine")
    heard: list[StudyEvent] = []
    study = tuned(sink=heard.append, study="mine")
    assert [event.fields["trial"] for event in heard if event.kind == "resumed"] == [1]
    assert len(study.trials) == 3


@pytest.mark.slow
def test_a_study_that_is_not_there_is_told_with_the_near_ones() -> None:
    """By name, by the start of a name, by path."""
    study = tuned(study="mine", trials=1)
    assert api.study("mi").name == "mine"
    assert api.study(study.path).trials == study.trials
    with pytest.raises(BadRun, match="Did you mean 'mine'"):
        api.study("mien")


def test_the_example_takes_every_setting_of_its_space() -> None:
    """`examples/tune_me.toml` names parameters of `examples/tune_me.py`, and their ends make jobs."""
    folder = Path(__file__).parents[2] / "examples"
    source = JobSource(path=folder / "tune_me.py", fixed={"epochs": "1"})
    for parameters in examples(parse_space(folder / "tune_me.toml"), 3, seed=0):
        job, entry = source.make(parameters)
        assert job.batch == parameters["batch"]
        assert entry is not None
        assert entry.parameters["lr"] == parameters["lr"]
