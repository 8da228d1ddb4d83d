"""The commands for runs elsewhere: what they print, their exit codes, and that runs come home as if they were here."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import stoker
from stoker.errors import PlaceUnreachable
from stoker.jobs import load_job
from stoker.launching.known_places import find_launched_or_run
from stoker.launching.launcher import Probe
from stoker.records import LaunchState
from stoker.store import RunLock
from stoker.training.run_handle import keep_sources
from tests.flow.command import job_file, plan_file, stoker_here
from tests.launching.elsewhere import FINISHED, RUNNING, STOPPED, Elsewhere, fake_place

__all__ = ["fake_place"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a finished run."""
    folder = tmp_path_factory.mktemp("there")
    with contextlib.chdir(folder):
        outcome = stoker_here("train", job_file(), "--plan", plan_file(), "--run-dir", "blobs-1a2b3c")
    assert outcome.code == 0, outcome.err
    return folder / "blobs-1a2b3c"


@pytest.fixture
def run(place: Path, fake_place: Any, trained: Path) -> Elsewhere:
    """A run that is executed in a folder, and has finished there; the copy of its job here was made at its launch."""
    run = Elsewhere.make(place, fake_place, price_per_h=36.0, max_cost=50.0)
    shutil.copytree(trained, run.there, dirs_exist_ok=True)
    keep_sources(run.here, load_job(job_file(), {})[1])
    fake_place.answers = [FINISHED]
    return run


@pytest.mark.slow
def test_a_run_comes_home_and_is_a_run_as_any_other(run: Elsewhere) -> None:
    """`runs`, `report`, `runs diff`, `runs export`, `export` and `stoker.load` work on it."""
    outcome = stoker_here("attach", "blobs")
    assert outcome.code == 0, outcome.err
    assert "finished at fake:box: trained to its end" in outcome.err
    assert f"here: runs/{run.here.name}" in outcome.err
    assert run.here.name in stoker_here("runs").out
    assert "executed at fake:box" in stoker_here("report", run.here.name).out
    assert "executed at" in run.here.report_path.read_text()
    loaded = stoker.load(run.here.name)
    assert loaded.metrics == stoker.load(run.there).metrics
    assert loaded.model() is not None
    assert "the same" in stoker_here("runs", "diff", run.here.name, str(run.there)).out
    assert stoker_here("runs", "export", run.here.name).code == 0
    assert Path("metrics.csv").read_text().count("\n") > 3
    assert stoker_here("export", run.here.name, "-o", "models/x").code == 0


def test_logs_are_the_events(run: Elsewhere) -> None:
    """For people in words, for programs as JSON; of a run here too."""
    text = stoker_here("logs", run.here.name)
    assert text.code == 0
    assert "finished" in text.out
    lines = stoker_here("logs", run.here.name, "-f", "--json").out.splitlines()
    documents = [json.loads(line) for line in lines]
    assert documents[-1]["event"] == "ended"
    assert documents[-1]["is_home"] is True
    assert "finished" in [document["event"] for document in documents]
    assert "started" in [
        json.loads(line)["event"] for line in stoker_here("logs", str(run.there), "--json").out.splitlines()
    ]
    assert stoker_here("logs", str(run.there), "-f").code == 2


def test_a_whole_name_here_comes_before_the_start_of_one_elsewhere(run: Elsewhere, trained: Path) -> None:
    """Of two, the one whose name the user wrote; the start alone still finds what is elsewhere."""
    shutil.copytree(trained, run.here.path.parent / "blobs")
    assert find_launched_or_run("blobs").name == "blobs"
    assert find_launched_or_run("blobs-").name == run.here.name


def test_runs_elsewhere_are_listed_as_last_seen(run: Elsewhere) -> None:
    """With phase, place, how far, time to go and money, until they are home."""
    run.log("progress", 0, samples=50, total_samples=200, eta_s=90.0)
    (run.there / "events.jsonl").rename(run.here.events_path)
    run.launcher.answers = [RUNNING]
    stoker_here("logs", run.here.name)
    shown = stoker_here("runs").out
    for expected in (run.here.name, "running", "fake:box", "25 %", "1 min 30 s", "$"):
        assert expected in shown
    (document,) = json.loads(stoker_here("runs", "--json").out)["elsewhere"]
    assert (document["phase"], document["share"], document["eta_s"]) == ("running", 0.25, 90.0)


def test_stop_waits_until_the_run_has_left(run: Elsewhere) -> None:
    """And fetches it; what was shown before is not shown again."""
    run.launcher.answers, run.launcher.after_stop = [RUNNING], [STOPPED]
    outcome = stoker_here("stop", run.here.name)
    assert outcome.code == 0
    assert "saved and left, as asked" in outcome.err
    assert run.launcher.calls.count("stop") == 1
    assert stoker_here("stop", run.here.name).code == 0
    assert run.launcher.calls.count("stop") == 1
    with RunLock(run.here.path):  # so that it cannot be fetched
        outcome = stoker_here("stop", run.here.name)
    assert outcome.code == 4
    assert "not fetched: " in outcome.err


@pytest.mark.parametrize(("phase", "exit_code", "code"), [("failed", 3, 3), ("failed", 1, 4), ("lost", None, 4)])
def test_the_exit_code_is_the_runs(run: Elsewhere, phase: Any, exit_code: int | None, code: int) -> None:
    """With the evidence, and where its output is."""
    run.launcher.answers = [LaunchState(phase=phase, why="it ended", evidence="CUDA died", exit_code=exit_code)]
    outcome = stoker_here("attach", run.here.name)
    assert outcome.code == code
    assert f"{phase}: it ended: CUDA died" in outcome.err


def test_fetch_brings_what_is_there_now(run: Elsewhere) -> None:
    """The run goes on; without an answer nothing changes, and the error says so."""
    run.launcher.answers = [RUNNING]
    assert "finished" in stoker_here("fetch", run.here.name).out
    document = json.loads(stoker_here("fetch", run.here.name, "--json").out)
    assert document["run"]["status"] == "finished"

    def refuse(handle: Any, into: Path) -> None:
        raise PlaceUnreachable("box cannot be reached: no route")

    run.launcher.fetch = refuse
    outcome = stoker_here("fetch", run.here.name)
    del run.launcher.fetch
    assert (outcome.code, "no route" in outcome.err) == (4, True)


def test_a_run_that_goes_on_elsewhere_is_not_continued_here(run: Elsewhere) -> None:
    """Two machines would train it; once it was stopped there, it may go on here."""
    run.launcher.answers = [RUNNING]
    stoker_here("fetch", run.here.name)
    outcome = stoker_here("train", "blobs.py", "--resume", run.here.name)
    assert outcome.code == 2
    assert f"`stoker stop {run.here.name}`" in outcome.err
    run.launcher.after_stop = [STOPPED]
    stoker_here("stop", run.here.name)
    assert "is finished: there is nothing to resume" in stoker_here("train", "blobs.py", "--resume", run.here.name).err


def test_places_are_asked(run: Elsewhere) -> None:
    """Those used before, or those that are named: what they have, what they lack, whether they answer."""
    listed = stoker_here("places")
    assert listed.code == 0
    for expected in ("fake:name[/[N×]DEVICE]", "fake:box", "python 3.11"):
        assert expected in listed.out
    assert "◐" not in listed.out.partition("\n\n●")[0]
    run.launcher.probed = Probe(facts={}, missing=("box has no disk",))
    named = stoker_here("places", "fake:box").out
    assert named.lstrip().startswith("place")  # the kinds of places were not asked for
    assert "◐  fake:box" in named
    outcome = stoker_here("places", "fake:box", "fake:gone", "--json")
    assert outcome.code == 4
    there, gone = json.loads(outcome.out)["places"]
    assert (there["can_start"], there["missing"]) == (False, ["box has no disk"])
    assert (gone["is_reachable"], gone["problem"]) == (False, "gone cannot be reached: no route")
    assert stoker_here("places", "fake:!").code == 2


@pytest.mark.parametrize("command", ["attach", "stop", "fetch"])
def test_a_run_that_is_not_elsewhere_is_refused(run: Elsewhere, command: str) -> None:
    """An unknown name with the near ones; a run that is executed here as what it is."""
    outcome = stoker_here(command, run.here.name + "x")
    assert outcome.code == 2
    assert f"Did you mean '{run.here.name}'" in outcome.err
    assert "is executed here" in stoker_here(command, str(run.there)).err
