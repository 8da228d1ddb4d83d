from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import stoker
from stoker.devices import attached_cpu
from stoker.errors import BadJob, BadRun, BadSetting, DoesNotFit, NoDevice, PlaceFailed, PlaceUnreachable
from stoker.launching import is_elsewhere, kinds, parse_target
from stoker.launching.kept_forecasts import keep_forecast, kept_forecast
from stoker.launching.launch import (
    data_paths,
    describe_launch,
    device_word,
    imported_modules,
    launch,
    time_limit,
    why_unknown,
)
from stoker.launching.launch_options import LaunchOptions
from stoker.launching.launcher import LaunchTarget, Probe, Submission
from stoker.launching.place_history import PlaceRun, lessons_of, place_history
from stoker.planning.resolved_job import resolve_job
from stoker.records import Event, LaunchState, dumps
from stoker.store import RunDirectory
from stoker.store.run_files import LAUNCH
from tests.flow.builders import PLAN, stopped_run
from tests.flow.command import BLOBS
from tests.launching.elsewhere import BEGAN_S, FINISHED, RUNNING, STOPPED, fake_place

__all__ = ["fake_place"]

JOB = """
import torch
from torch import nn
import stoker

def job(lr: float = 0.1) -> stoker.Job:
    data = (torch.zeros(8, 2), torch.zeros(8, dtype=torch.int64))
    return stoker.Job(model=lambda: nn.Linear(2, 2), data=data, loss="cross_entropy", optimizer=stoker.SGD(lr=lr),
                      batch=4, until=stoker.updates(2))
"""

THEIRS = LaunchOptions(env="theirs")


@pytest.fixture
def job(place: Path) -> Path:
    """A job file in the working directory."""
    path = place / "blobs.py"
    path.write_text(JOB)
    return path


@pytest.fixture
def started(fake_place: Any, monkeypatch: pytest.MonkeyPatch) -> list[Submission]:
    """Submissions that the fake place was given."""
    given: list[Submission] = []

    def start(submission: Submission, tell: Any) -> dict[str, Any]:
        given.append(submission)
        return {"directory": "/there", "sent_bytes": 7}

    monkeypatch.setattr(fake_place, "start", start)
    return given


def test_a_run_has_a_directory_here_from_the_beginning(job: Path, started: list[Submission]) -> None:
    """Its record says where it is, its copies say what was sent, and the place is given all that it needs."""
    launched = launch(job, on="fake:box", settings={"lr": 0.2}, options=THEIRS)
    directory, record = launched.directory, launched.directory.read_launch()
    assert launched.is_new
    assert directory.name.startswith("blobs-")
    assert record == launched.launch
    assert (record.place, record.kind, record.handle["directory"], record.sent_bytes) == (
        "fake:box",
        "fake",
        "/there",
        7,
    )
    assert (directory.path / "job" / "blobs.py").read_text() == JOB
    (submission,) = started
    assert submission.arguments == ("--set", "lr=0.2")
    assert submission.job_file == "blobs.py"
    assert submission.environment == "python3"
    assert submission.owner.endswith(str(directory.path.resolve()))


def test_the_same_command_finds_the_run_that_is_going_on(job: Path, started: list[Submission], fake_place: Any) -> None:
    """It is not started twice, and comments do not make it another; other settings do."""
    first = launch(job, on="fake:box", options=THEIRS)
    fake_place.answers = [RUNNING]
    job.write_text(JOB + "# a comment\n")
    again = launch(job, on="fake:box", options=THEIRS)
    assert not again.is_new
    assert again.directory == first.directory
    assert "is running at fake:box" in again.because
    other = launch(job, on="fake:box", settings={"lr": 0.5}, options=THEIRS)
    assert other.directory != first.directory
    assert len(started) == 2


def test_a_stopped_run_goes_on_and_a_finished_one_is_followed_by_another(
    job: Path, started: list[Submission], fake_place: Any
) -> None:
    """As `stoker train` does here: the name stays while a run is unfinished, and is numbered after that."""
    first = launch(job, on="fake:box", options=THEIRS)
    fake_place.answers = [STOPPED]
    second = launch(job, on="fake:box", options=THEIRS)
    assert second.is_new
    assert second.directory == first.directory
    assert [state.phase for state in second.launch.states] == ["queued", "stopped", "queued"]
    fake_place.answers = [FINISHED]
    third = launch(job, on="fake:box", options=THEIRS)
    assert third.directory.name == f"{first.directory.name}-2"
    assert "is finished" in third.because
    assert [one.run for one in started] == [first.directory.name, first.directory.name, third.directory.name]


def test_what_is_unknown_is_not_started_again(job: Path, started: list[Submission], fake_place: Any) -> None:
    """A place that does not answer may be training: the command says so and starts nothing."""
    launch(job, on="fake:box", options=THEIRS)
    fake_place.answers = [LaunchState(phase="unknown", why="no answer", evidence="squeue timed out")]
    with pytest.raises(PlaceUnreachable, match="squeue timed out"):
        launch(job, on="fake:box", options=THEIRS)
    assert len(started) == 1


def test_a_run_of_a_place_that_is_one_goes_on_at_any_target_of_it(
    job: Path, started: list[Submission], fake_place: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pool has what was committed, and not the machine that an offer names."""
    monkeypatch.setattr(type(fake_place), "is_one_place", True)
    first = launch(job, on="fake:box", options=THEIRS)
    fake_place.answers = [LaunchState(phase="running", why="training")]
    with pytest.raises(BadRun, match="does not move to fake:other by itself") as refused:
        launch(job, on="fake:other", options=THEIRS)
    assert f"`stoker stop {first.directory.name}`" in str(refused.value.remedy)
    assert not launch(job, on="fake:box", options=THEIRS).is_new
    fake_place.answers = [STOPPED]
    again = launch(job, on="fake:other", options=THEIRS)
    assert again.directory == first.directory
    assert again.launch.place == "fake:other"
    with pytest.raises(BadRun, match="is unfinished at fake:other"):
        launch(job, on="ssh:box", options=THEIRS)


def test_the_commit_and_uncommitted_changes_are_kept_here_and_travel_as_they_are(
    job: Path, started: list[Submission]
) -> None:
    """What is sent is the file as it is now; the patch that leads to it from the commit stays with the run here."""
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", job.name], ["commit", "-qm", "first"]):
        subprocess.run([*git, *words], check=True)
    clean = launch(job, on="fake:box", options=THEIRS)
    assert (len(clean.launch.commit), clean.launch.has_changes) == (40, False)
    assert not (clean.directory.path / "changes.diff").exists()
    job.write_text(JOB.replace("lr: float = 0.1", "lr: float = 0.3"))
    changed = launch(job, on="fake:box", options=THEIRS)
    assert (changed.launch.commit, changed.launch.has_changes) == (clean.launch.commit, True)
    assert "+def job(lr: float = 0.3)" in (changed.directory.path / "changes.diff").read_text()
    (sent,) = [file for file in started[-1].code.files if file.path == job.name]
    with sent.open() as content:
        assert b"lr: float = 0.3" in content.read()


def test_an_unfinished_run_is_not_started_at_another_place(
    job: Path, started: list[Submission], fake_place: Any
) -> None:
    """Its state is where it began; a new one has to be asked for."""
    first = launch(job, on="fake:box", options=THEIRS)
    with pytest.raises(BadRun, match="is unfinished at fake:box"):
        launch(job, on="fake:other", options=THEIRS)
    fake_place.answers = [STOPPED]
    assert launch(job, on="FAKE:box", options=THEIRS).directory == first.directory, "the same word, written otherwise"
    new = launch(job, on="fake:other", options=LaunchOptions(env="theirs", new=True))
    assert new.directory != first.directory


def test_a_run_that_went_on_here_is_not_continued_there(
    place: Path, started: list[Submission], fake_place: Any
) -> None:
    """What the place has is older: the record here says so, and the same command there is refused."""
    path = place / "blobs.py"
    path.write_text(BLOBS)
    first = launch(path, on="fake:box", options=THEIRS)
    job, entry = stoker.api.load_job(path, {})
    there = place / "there" / first.directory.name
    stopped_run(job, entry=entry, run_dir=there)
    shutil.copytree(there, first.directory.path, dirs_exist_ok=True)  # it comes home
    record = first.directory.read_launch()
    assert record is not None
    first.directory.write(LAUNCH, dataclasses.replace(record, states=(STOPPED,)))
    stopped_run(job, entry=entry, resume=first.directory.name, at_samples=160)
    record = first.directory.read_launch()
    assert record is not None
    assert record.continued_here_at
    fake_place.calls.clear()
    with pytest.raises(BadRun, match="was started at fake:box, and went on on this machine since") as refused:
        launch(path, on="fake:box", options=THEIRS)
    assert f"--resume {first.directory.name}" in str(refused.value.remedy)
    assert fake_place.calls == []
    assert launch(path, on="fake:box", options=dataclasses.replace(THEIRS, new=True)).directory != first.directory
    job_again = stoker.train(job, entry=entry, resume=first.directory.name, plan=PLAN, sink=lambda event: None)
    assert job_again.status == "finished"
    fake_place.answers = [STOPPED]
    assert launch(path, on="fake:box", options=THEIRS).directory.name.endswith("-2"), "the newest unfinished one"


@pytest.mark.parametrize("problem", ["missing", "start", "secret", "job"])
def test_what_fails_leaves_nothing(
    problem: str, job: Path, started: list[Submission], fake_place: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A place that lacks something or refuses, a secret that is not set, a job that cannot be made: no run is left."""
    options = THEIRS
    if problem == "missing":
        fake_place.probed = Probe(facts={}, missing=("box has no Python of at least 3.11: install one",))
    elif problem == "start":

        def refuse(*_: object) -> None:
            raise PlaceFailed("no such partition")

        monkeypatch.setattr(fake_place, "start", refuse)
    elif problem == "secret":
        options = LaunchOptions(env="theirs", secrets=("NOT_SET_HERE",))
    else:
        job.write_text("def job(): return 1\n")
    with pytest.raises((PlaceFailed, BadJob)):
        launch(job, on="fake:box", options=options)
    assert not (job.parent / "runs").exists() or list((job.parent / "runs").iterdir()) == []
    assert started == []


def test_a_name_that_is_taken_here_is_numbered(job: Path, started: list[Submission]) -> None:
    """Another run's directory is not touched; one that was named by the user is refused."""
    first = launch(job, on="fake:box", options=THEIRS).directory
    (first.path / "launch.json").unlink()
    (first.path / "mine.txt").touch()
    second = launch(job, on="fake:box", options=THEIRS).directory
    assert second.name == f"{first.name}-2"
    with pytest.raises(BadRun, match="holds"):
        launch(job, on="fake:box", options=LaunchOptions(env="theirs", run_dir=first.path))


def test_dry_run_asks_nobody(job: Path, started: list[Submission], fake_place: Any) -> None:
    """The script is made from what is here, with the limit that was given, and nothing is made of the run."""
    assert describe_launch(job, on="fake:box", options=THEIRS).startswith("run blobs-")
    limited = dataclasses.replace(THEIRS, time_limit_s=60.0)
    assert describe_launch(job, on="fake:box", options=limited).endswith(", at most 60 s\n")
    assert fake_place.calls == []
    assert not (job.parent / "runs").exists()


def test_the_program_that_trains_here_names_the_verb_for_elsewhere(place: Path) -> None:
    """`stoker.train` with a place elsewhere says what to call."""
    data = (torch.zeros(8, 2), torch.zeros(8, dtype=torch.int64))
    job = stoker.Job(
        model=torch.nn.Linear(2, 2),
        data=data,
        loss="cross_entropy",
        optimizer=stoker.SGD(lr=0.1),
        batch=4,
        until=stoker.updates(1),
    )
    with pytest.raises(NoDevice, match="is a place elsewhere") as refused:
        stoker.train(job, on="ssh:box")
    assert "stoker.launch(" in str(refused.value.remedy)


def test_words_of_devices_are_not_places() -> None:
    """The command line distinguishes them without importing a launcher."""
    for word in ("here", "cpu", "cuda:1", "2xhere", "8xh100", "2x8xh100", "cuda:0,cpu", "2xcpu"):
        assert not is_elsewhere(word), word
    for word in ("ssh:box", "slurm:", "slurm", "slurm/4xa100", "ssh", "k8s:team/8xh100", "nosuch:thing"):
        assert is_elsewhere(word), word
    assert parse_target("slurm/4xa100") == parse_target("slurm:/4xa100")
    assert "ssh" in kinds()


def test_files_of_sources_are_found(place: Path) -> None:
    """Tables, folders of images, parts and packed forms state their files; what is in Stoker's cache is left out."""
    (place / "a.csv").write_text("x,y\n1,2\n3,4\n5,6\n7,8\n")
    (place / "pictures").mkdir()
    table = stoker.data.csv(place / "a.csv", features=["x"], target="y")
    parts = table.split(valid=0.5, stratify=False)
    pictures = stoker.data.image_folder(place / "pictures", size=8)

    def found(**fields: Any) -> list[str]:
        job = stoker.Job(
            model=torch.nn.Linear(1, 1),
            loss="mse",
            optimizer=stoker.SGD(lr=0.1),
            batch=1,
            until=stoker.updates(1),
            **fields,
        )
        return [path.name for path in data_paths(job)]

    assert found(data=table) == ["a.csv"]
    assert found(data=parts.train, valid=parts.valid) == ["a.csv"]
    assert found(data=table, test=pictures) == ["a.csv", "pictures"]
    assert found(data=(np.zeros((4, 1)), np.zeros(4))) == []
    assert found(data=stoker.data.digits()[0]) == []


def test_modules_that_a_job_imports() -> None:
    """Also those inside functions; relative imports are the job's own."""
    text = "import numpy.linalg\nfrom torch import nn\nfrom . import nets\ndef f():\n    import einops\n"
    assert {"numpy", "torch", "einops"} <= imported_modules([text])
    assert "nets" not in imported_modules([text, "not python ("])


def test_a_forecast_is_made_only_for_devices_that_are_known() -> None:
    """By the word, or by what the probe found in the catalogue; else the place makes its own."""

    def word(device: str, found: str, cores: int = 8, nodes: int = 1, each: int = 1) -> str | None:
        target = LaunchTarget(text="x:y", kind="x", address="y", num_nodes=nodes, devices_each=each, device=device)
        return device_word(target, Probe(facts={}, device=found, cores=cores))

    assert word("a100-80", "", nodes=2, each=8) == "16xa100-80"
    assert word("", "NVIDIA H100 80GB HBM3", each=4) in {"4xh100", None}
    assert word("", "Some CPU 9000", cores=3) is None
    assert word("cpu", "") is None
    here = attached_cpu()
    assert word("cpu", here.model, cores=here.cores, each=2) == "2xcpu"
    assert word("", here.model, cores=here.cores) == "cpu"


def test_why_there_is_no_forecast_has_the_numbers() -> None:
    """A CPU of this very model is known here, but not with other cores or on several nodes."""
    here = attached_cpu()

    def why(device: str, found: str, cores: int, nodes: int = 1) -> str:
        target = LaunchTarget(text="x:y", kind="x", address="y", num_nodes=nodes, devices_each=1, device=device)
        return why_unknown(target, Probe(facts={}, device=found, cores=cores))

    assert why("", "Some CPU 9000", 3) == "Some CPU 9000 is not known here"
    ours = f"on CPUs it is for those of this machine, {here.cores} × {here.model}, and there are "
    assert why("cpu", here.model, here.cores + 1) == f"{ours}{here.cores + 1} × {here.model}"
    assert why("cpu", here.model, here.cores, nodes=2) == f"{ours}2 nodes of {here.cores} × {here.model}"


def test_the_time_limit_is_the_upper_bound_and_a_save(job: Path) -> None:
    """Never less than the run takes by its forecast, and room for a start and a checkpoint."""
    forecast = stoker.plan(stoker.api.load_job(job, {})[0], on="cpu").chosen.forecast
    assert time_limit(forecast) > forecast.total_s.high + forecast.checkpoint_s.high


def test_a_record_of_a_launch_reads_back(job: Path, started: list[Submission]) -> None:
    """What was written is JSON that anybody reads, and holds names of secrets only."""
    launched = launch(job, on="fake:box", options=LaunchOptions(env="theirs", max_cost=5.0, place={"price": "2.5"}))
    document = json.loads((launched.directory.path / "launch.json").read_text())
    assert document["record"] == "Launch"
    assert document["max_cost"] == 5.0
    assert RunDirectory(launched.directory.path).read_launch() == launched.launch


def test_a_price_is_not_an_option_of_the_place(
    job: Path, started: list[Submission], fake_place: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It prices the run, and a place that refuses unknown settings does not get it; one that knows it does."""
    probed: list[Any] = []

    def probe(target: LaunchTarget, options: Any) -> Probe:
        probed.append(options)
        return Probe(facts={})

    monkeypatch.setattr(fake_place, "probe", probe)
    options = LaunchOptions(env="theirs", max_cost=5.0, place={"price": "2.5", "root": "/shared"})
    assert launch(job, on="fake:box", options=options).launch.price_per_h == 2.5
    assert [dict(one) for one in (probed[0], started[0].options)] == [{"root": "/shared"}] * 2


def test_the_place_is_asked_while_the_job_is_read(
    job: Path, started: list[Submission], fake_place: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading the job waits here until the place has been asked; what it then says is raised as ever."""
    was_asked = threading.Event()

    def probe(target: LaunchTarget, options: Any) -> Probe:
        was_asked.set()
        raise PlaceUnreachable("box does not answer")

    def load(*given: Any) -> Any:
        assert was_asked.wait(60)
        return stoker.api.load_job(*given)

    monkeypatch.setattr(fake_place, "probe", probe)
    monkeypatch.setattr("stoker.launching.launch.load_job", load)
    with pytest.raises(PlaceUnreachable, match="box does not answer"):
        launch(job, on="fake:box", options=LaunchOptions(env="theirs"))
    assert started == []


def test_a_kept_forecast_is_of_the_same_data(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And of the same day; else it is made again."""
    made, entry = stoker.api.load_job(job, {})
    forecast = stoker.plan(made, on="cpu").chosen.forecast
    prepared = resolve_job(made, entry)
    keep_forecast(prepared, "l4", forecast)
    assert kept_forecast(made, entry, "l4") == forecast
    assert kept_forecast(made, entry, "h100") is None
    monkeypatch.setattr(type(prepared.data), "fingerprint", lambda self: "other")
    assert kept_forecast(made, entry, "l4") is None
    monkeypatch.undo()
    monkeypatch.setattr("stoker.launching.kept_forecasts.KEPT_S", -1.0)
    assert kept_forecast(made, entry, "l4") is None


def test_limits_are_of_the_run_and_not_of_a_start(
    job: Path, started: list[Submission], fake_place: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Money counts from the first start on, time from this command on; each start also gets a limit of its own."""
    monkeypatch.setattr(fake_place, "limits_time", True)
    forecast = stoker.plan(stoker.api.load_job(job, {})[0], on="cpu").chosen.forecast
    monkeypatch.setattr("stoker.launching.launch.forecast_there", lambda *_, **__: forecast)
    options = LaunchOptions(env="theirs", max_cost=5.0, place={"price": "2.5"})
    directory = launch(job, on="fake:box", options=options).directory
    assert started[0].most_held_s == 7200.0
    assert started[0].time_limit_s == pytest.approx(time_limit(forecast))
    assert started[0].save_s == forecast.checkpoint_s.high
    for kind, after_s in (("started", 0.0), ("progress", 3600.0), ("stopped", 3600.0)):
        directory.append_event(Event(kind=kind, at=BEGAN_S + after_s, fields={"samples": 4}))  # type: ignore[arg-type]
    fake_place.answers = [dataclasses.replace(STOPPED, at="2026-11-25T11:00:01+00:00")]
    launch(job, on="fake:box", options=options)
    assert started[1].most_held_s == pytest.approx(3600.0, abs=2)
    both = dataclasses.replace(options, time_limit_s=600.0)
    launch(job, on="fake:box", options=both)
    assert (started[2].most_held_s, started[2].time_limit_s) == (600.0, 600.0)
    with pytest.raises(PlaceFailed, match=r"has cost \$2\.50 of \$2\.51, so that nothing is left"):
        launch(job, on="fake:box", options=dataclasses.replace(options, max_cost=2.51))
    assert len(started) == 3


@pytest.mark.parametrize("limit", [{"time_limit_s": 43_200.0}, {"max_cost": 5.0, "place": {"price": "2.5"}}])
def test_a_limit_that_was_given_needs_no_forecast(
    job: Path, started: list[Submission], fake_place: Any, monkeypatch: pytest.MonkeyPatch, limit: dict[str, Any]
) -> None:
    """Nothing is planned here for the time of a save alone, which could be refused: what the log shows is enough."""

    def refuse(*_: object, **__: object) -> None:
        raise DoesNotFit("no layout fits")

    monkeypatch.setattr("stoker.launching.launch.plan", refuse)
    fake_place.probed = Probe(facts={}, device=attached_cpu().model, cores=attached_cpu().cores)
    options, told = dataclasses.replace(THEIRS, **limit), list[str]()
    directory = launch(job, on="fake:box", options=options, tell=told.append).directory
    assert (started[0].save_s, told) == (30.0, ["asking fake:box"])
    assert started[0].time_limit_s == started[0].most_held_s
    saved: dict[str, Any] = {"samples": 4, "blocked_s": 1.0, "write_s": 199.0}
    for kind, after_s, fields in (("started", 0.0, {}), ("checkpointed", 300.0, saved), ("stopped", 301.0, {})):
        directory.append_event(Event(kind=kind, at=BEGAN_S + after_s, fields=fields))  # type: ignore[arg-type]
    fake_place.answers = [dataclasses.replace(STOPPED, at="2026-11-25T10:05:02+00:00")]
    launch(job, on="fake:box", options=options)
    assert started[1].save_s == 200.0


def test_what_a_start_that_was_not_followed_has_cost_counts(
    job: Path, started: list[Submission], fake_place: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its log says so, which is brought first: until it was asked on Monday it held nothing; unread, nothing starts."""
    options = LaunchOptions(env="theirs", max_cost=5.0, place={"price": "2.5"})
    directory = launch(job, on="fake:box", options=options).directory
    log = "".join(
        dumps(Event(kind=kind, at=BEGAN_S + after_s, fields={"samples": 4}), indent=None) + "\n"  # type: ignore[arg-type]
        for kind, after_s in (("started", 0.0), ("progress", 3590.0), ("stopped", 3600.0))
    )
    fake_place.answers = [dataclasses.replace(STOPPED, at="2026-11-28T10:00:00+00:00")]
    fake_place.cut_for = 1
    with pytest.raises(PlaceUnreachable, match=r"what blobs-\w+ has cost is not known, .* cannot be reached"):
        launch(job, on="fake:box", options=options)
    assert len(started) == 1
    monkeypatch.setattr(fake_place, "events", lambda handle, offset: log.encode()[offset:][:100])
    launch(job, on="fake:box", options=options)
    assert started[1].most_held_s == pytest.approx(3600.0)
    with pytest.raises(PlaceFailed, match=r"has cost \$2\.50 of \$2\.51"):
        launch(job, on="fake:box", options=dataclasses.replace(options, max_cost=2.51))
    assert directory.events_path.read_text() == log


def test_a_log_that_is_gone_is_told_and_refuses_no_start(
    job: Path, started: list[Submission], fake_place: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asking again would not bring it back; a place that has forgotten the job answers with nothing."""
    options, told = LaunchOptions(env="theirs", max_cost=5.0, place={"price": "2.5"}), list[str]()
    launch(job, on="fake:box", options=options)
    fake_place.answers = [STOPPED]

    def gone(*_: object) -> bytes:
        raise PlaceFailed("the claim is not there any more")

    for events, why in ((gone, "cannot be read: the claim is not"), (lambda *_: b"", "holds nothing of it")):
        told.clear()
        monkeypatch.setattr(fake_place, "events", events)
        launch(job, on="fake:box", options=options, tell=told.append)
        assert [line for line in told if "is not known, and does not count" in line and why in line]
    assert [one.most_held_s for one in started] == [7200.0] * 3


def test_other_limits_are_refused_for_a_run_that_is_going_on(
    job: Path, started: list[Submission], fake_place: Any
) -> None:
    """The place keeps those that it was given; the same ones, or none, find the run as ever."""
    options = LaunchOptions(env="theirs", max_cost=5.0, place={"price": "2.5"}, time_limit_s=600.0)
    launch(job, on="fake:box", options=options)
    fake_place.answers = [RUNNING]
    cheaper, shorter = dataclasses.replace(options, max_cost=2.0), dataclasses.replace(options, time_limit_s=60.0)
    for name, other in (("--max-cost", cheaper), ("--time-limit", shorter)):
        with pytest.raises(BadRun, match=rf"is running at fake:box, .* with that {name}: its limits stay") as refused:
            launch(job, on="fake:box", options=other)
        assert "stoker stop blobs-" in str(refused.value.remedy)
    for found in (options, THEIRS):
        assert not launch(job, on="fake:box", options=found).is_new
    assert len(started) == 1


def test_a_place_that_is_silent_at_the_first_launch_has_nothing_running(job: Path, started: list[Submission]) -> None:
    """The remedy does not speak of a run there, since there is none."""
    with pytest.raises(PlaceUnreachable, match="gone cannot be reached") as silent:
        launch(job, on="fake:gone", options=THEIRS)
    assert silent.value.remedy == "Nothing was started; the same command tries again."
    assert started == []


def test_an_option_that_a_place_does_not_know_is_refused(job: Path, started: list[Submission]) -> None:
    """It would be ignored, which misleads; the nearest is named."""
    for call in (launch, describe_launch):
        with pytest.raises(BadSetting, match="--place-option: fake has no option 'rot'") as refused:
            call(job, on="fake:box", options=LaunchOptions(env="theirs", place={"rot": "/shared"}))
        assert "'root'" in str(refused.value.remedy)
    assert started == []


def test_an_image_is_refused_where_none_is_run(job: Path, started: list[Submission]) -> None:
    """An option that would be ignored is not taken."""
    for call in (launch, describe_launch):
        with pytest.raises(BadJob, match="--image me/image:1: fake runs no container images"):
            call(job, on="fake:box", options=LaunchOptions(env="theirs", image="me/image:1"))
    assert started == []


def test_a_python_that_is_named_is_not_looked_for(
    job: Path, started: list[Submission], fake_place: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A place that would miss its own Python hears which one is meant."""
    heard: list[Any] = []
    monkeypatch.setattr(fake_place, "options", ("root", "python"))
    monkeypatch.setattr(fake_place, "probe", lambda target, options: heard.append(options) or Probe(facts={}))
    launch(job, on="fake:box", options=LaunchOptions(env="/opt/conda/bin/python"))
    assert heard == [{"python": "/opt/conda/bin/python"}]


def test_the_time_limit_allows_for_what_the_place_has_shown(job: Path) -> None:
    """Starts that took ten minutes there, and runs that took half as long again as forecast, are allowed for."""
    forecast = stoker.plan(stoker.api.load_job(job, {})[0], on="cpu").chosen.forecast
    for number in range(2):
        place_history().append(
            PlaceRun(
                place="fake:slow",
                word="fake:slow",
                run=f"r{number}",
                at="2026-11-25T10:00:00+00:00",
                startup_s=300.0 * (number + 1),
                forecast_s=100.0,
                measured_s=150.0,
            )
        )
    longer_s = time_limit(forecast, lessons_of("fake:slow")) - time_limit(forecast)
    assert longer_s == pytest.approx(600.0 - 120.0 + 0.5 * forecast.total_s.high)
