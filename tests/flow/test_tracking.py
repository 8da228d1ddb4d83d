import csv
import json
import threading
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import stoker
from stoker.cli.main import app
from stoker.tracking.run_tracking import RunUpload


def silence(_: object) -> None:
    """A sink that shows nothing."""


def a_job() -> stoker.Job:
    """A line through the digits."""
    train, _ = stoker.data.digits()
    return stoker.Job(
        model=lambda: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10)),
        data=train,
        valid=stoker.holdout(0.1),
        loss="cross_entropy",
        metrics=["accuracy"],
        optimizer=stoker.SGD(lr=0.1),
        batch=256,
        until=stoker.epochs(2),
        name="digits",
    )


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> stoker.Run:
    """A short run that a CSV file followed."""
    monkeypatch.setenv("STOKER_RUNS", str(tmp_path / "runs"))
    return stoker.train(a_job(), on="cpu", sink=silence, track=["csv"])


def test_a_tracker_that_follows_has_everything_when_the_run_ends(run: stoker.Run) -> None:
    """Evaluations and final metrics are there, and the last of them is what the run says."""
    with (run.path / "tracking" / "metrics.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    accuracies = [float(row["valid/accuracy"]) for row in rows if row["valid/accuracy"]]
    assert len(accuracies) == 2
    assert float(rows[-1]["final/valid/accuracy"]) == run.metrics["valid/accuracy"]
    assert json.loads((run.path / "tracking" / "csv.json").read_text("utf-8"))["sent_bytes"] == (
        run.directory.events_path.stat().st_size
    )


@pytest.mark.slow
def test_a_run_that_is_over_can_be_sent_exported_and_drawn(run: stoker.Run, tmp_path: Path) -> None:
    """The commands say what they did; sending again sends nothing."""
    folder = tmp_path / "there"
    sent = [
        json.loads(CliRunner().invoke(app, ["runs", "track", run.name, "--to", to, "--json"]).stdout)["events"]
        for to in ("csv", f"csv={folder}", f"csv={folder}")
    ]
    assert sent[0] == 0  # it was followed while it trained
    assert sent[1] > 2
    assert sent[2] == 0
    assert (folder / f"{run.name}.csv").is_file()
    table, page = tmp_path / "m.csv", tmp_path / "runs.html"
    assert CliRunner().invoke(app, ["runs", "export", run.name, "-o", str(table)]).exit_code == 0
    assert table.read_text("utf-8").startswith("samples,seconds,")
    assert CliRunner().invoke(app, ["runs", "plot", run.name, run.name, "-o", str(page)]).exit_code == 0
    assert "Over training time" in page.read_text("utf-8")


def test_a_run_that_fails_at_once_says_why_though_it_is_tracked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It leaves nothing, a table included; its own error is reported, not that its log is gone."""
    monkeypatch.setenv("STOKER_RUNS", str(tmp_path / "runs"))

    sent, send = threading.Event(), RunUpload.send

    def sends(self: RunUpload) -> int:
        found = send(self)
        sent.set()
        return found

    def breaks(*_: object) -> None:
        assert sent.wait(timeout=60)
        raise stoker.RunFailed("the first update broke")

    monkeypatch.setattr(RunUpload, "send", sends)
    monkeypatch.setattr("stoker.training.loop.Loop.run", breaks)
    with pytest.raises(stoker.RunFailed, match="the first update broke"):
        stoker.train(a_job(), on="cpu", sink=silence, track=["csv"])
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_tracker_with_a_typo_is_refused_before_anything_is_spent(tmp_path: Path) -> None:
    """No run is left behind."""
    with pytest.raises(stoker.BadJob, match="there is no tracker 'tensorbord'"):
        stoker.train(a_job(), run_dir=tmp_path / "run", sink=silence, track=["tensorbord"])
    assert not (tmp_path / "run").exists()


def test_runs_are_listed_by_what_came_of_them(run: stoker.Run) -> None:
    """Conditions, columns and sorting reach the table; a name that no run has is an error of the user's."""
    listed = CliRunner().invoke(app, ["runs", "--where", "valid/accuracy>0 batch=256", "--columns", "lr", "--json"])
    assert [one["run"]["name"] for one in json.loads(listed.stdout)["runs"]] == [run.name]
    assert json.loads(CliRunner().invoke(app, ["runs", "--where", "batch=1", "--json"]).stdout) == {"runs": []}
    assert CliRunner().invoke(app, ["runs", "--where", "bach=256"]).exit_code == stoker.BadJob.exit_code
