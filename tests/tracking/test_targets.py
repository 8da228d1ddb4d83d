import csv
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from stoker.errors import BadJob
from stoker.tracking.base import MetricPoint, RunDescription, TrackerTarget, parse_tracker


def about(folder: Path) -> RunDescription:
    """A run that was made at second 100."""
    return RunDescription(run="r", job="job", folder=folder, created_at=100.0, parameters={"lr": "0.1", "note": "a|b"})


POINTS = [
    MetricPoint(samples=64, at=101.0, values={"train/loss": 0.5}),
    MetricPoint(samples=128, at=102.0, values={"train/loss": 0.25, "valid/accuracy": 0.75}),
]


@pytest.mark.parametrize(
    ("word", "problem"),
    [("tensorbord", "tensorboard"), ("mlflow=", "no place"), ("", "there is no tracker")],
)
def test_a_word_that_names_no_tracker_is_refused(word: str, problem: str) -> None:
    """The near names are reported."""
    with pytest.raises(BadJob) as refused:
        parse_tracker(word)
    assert problem in f"{refused.value.message} {refused.value.remedy}"


def test_a_gateway_of_prometheus_speaks_http() -> None:
    """Anything else would be a folder called `s3:`, or an error in a thread of the run."""
    with pytest.raises(BadJob, match="no address of a Pushgateway"):
        parse_tracker("prometheus=s3://bucket/metrics")
    assert parse_tracker("prometheus=http://gateway:9091").where == "http://gateway:9091"


def test_a_home_is_found_where_the_shell_leaves_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """`csv=~/x` reaches a command as it is written: a folder called `~` is not what anyone means."""
    monkeypatch.setenv("HOME", "/home/me")
    assert parse_tracker("csv=~/metrics").where == "/home/me/metrics"


def test_a_table_at_a_url_is_refused() -> None:
    """It would become a folder called `s3:`."""
    with pytest.raises(BadJob, match="names a URL"):
        parse_tracker("csv=s3://bucket/metrics")


def test_tensorboard_is_given_a_url_as_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A path would make one slash of two, and a folder here of what is far away."""
    tensorboardx = pytest.importorskip("tensorboardX", reason="tensorboardX is not installed")
    from stoker.tracking import tensorboard_tracker

    asked: list[str] = []

    class Writer:
        def __init__(self, logdir: str, **_: object) -> None:
            asked.append(logdir)

        def add_text(self, *_: object) -> None:
            """Nothing is written."""

    assert tensorboard_tracker.SummaryWriter is tensorboardx.SummaryWriter
    monkeypatch.setattr(tensorboard_tracker, "SummaryWriter", Writer)
    first = parse_tracker("tensorboard=s3://bucket/runs").open(about(tmp_path), None)
    parse_tracker("tensorboard=s3://bucket/runs").open(about(tmp_path), first.id)
    assert asked == ["s3://bucket/runs/r"] * 2


@pytest.mark.parametrize("name", ["csv", "tensorboard"])
def test_a_folder_that_cannot_be_made_is_told_before_a_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file in its place, or no right to write there; a place that can be made is not made yet."""
    (tmp_path / "file").touch()
    with pytest.raises(BadJob, match="file is a file"):
        TrackerTarget(name, str(tmp_path / "file" / "below")).require_writable()
    TrackerTarget(name, str(tmp_path / "new" / "one")).require_writable()
    assert not (tmp_path / "new").exists()
    TrackerTarget(name).require_writable()
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(BadJob, match=f"cannot be made: {tmp_path} cannot be written to"):
        TrackerTarget(name, str(tmp_path / "new" / "one")).require_writable()
    with pytest.raises(BadJob, match="which cannot be written to"):
        TrackerTarget(name, str(tmp_path)).require_writable()


def test_a_csv_file_goes_on_where_it_was_when_a_column_comes_to_it(tmp_path: Path) -> None:
    """Each point is a line; a measure that appears later is a column for all, empty before."""
    first = TrackerTarget("csv").open(about(tmp_path), None)
    first.log(POINTS[:1])
    second = TrackerTarget("csv").open(about(tmp_path), first.id)
    second.log(POINTS[1:])
    with (tmp_path / "metrics.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["samples"] for row in rows] == ["64", "128"]
    assert [row["seconds"] for row in rows] == ["1.000", "2.000"]
    assert [(row["train/loss"], row["valid/accuracy"]) for row in rows] == [("0.5", ""), ("0.25", "0.75")]


def test_tensorboard_shows_the_run(tmp_path: Path) -> None:
    """TensorBoard's own reader finds every value at its samples, of both processes of a continued run."""
    pytest.importorskip("tensorboardX", reason="tensorboardX is not installed")
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="TensorBoard, which reads it, is not installed"
    )
    first = TrackerTarget("tensorboard").open(about(tmp_path), None)
    first.log(POINTS[:1])
    first.close()
    second = TrackerTarget("tensorboard").open(about(tmp_path), first.id)
    second.log(POINTS[1:])
    second.end("finished", [])
    second.close()
    found = accumulator.EventAccumulator(first.where)
    found.Reload()
    assert [(one.step, one.value) for one in found.Scalars("train/loss")] == [(64, 0.5), (128, 0.25)]
    assert [(one.step, one.value) for one in found.Scalars("valid/accuracy")] == [(128, 0.75)]


def test_tensorboard_hides_what_a_resumed_run_makes_again(tmp_path: Path) -> None:
    """TensorBoard's own reader finds each position once, with the later value."""
    pytest.importorskip("tensorboardX", reason="tensorboardX is not installed")
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="TensorBoard, which reads it, is not installed"
    )
    tracker = TrackerTarget("tensorboard").open(about(tmp_path), None)
    tracker.log(POINTS)
    tracker.go_back(64)
    tracker.log([MetricPoint(samples=128, at=1003.0, values={"train/loss": 0.125})])
    tracker.close()
    found = accumulator.EventAccumulator(tracker.where)
    found.Reload()
    assert [(one.step, one.value) for one in found.Scalars("train/loss")] == [(64, 0.5), (128, 0.125)]


@pytest.mark.filterwarnings("ignore:.*loader strategy is deprecated")  # between two of its own dependencies
def test_mlflow_shows_the_run(tmp_path: Path) -> None:
    """MLflow's own client finds settings, values over samples, the status and the report in a local store."""
    pytest.importorskip("mlflow", reason="mlflow is not installed")
    from mlflow.tracking import MlflowClient

    store = f"sqlite:///{tmp_path / 'ml.db'}"
    first = TrackerTarget("mlflow", store).open(about(tmp_path), None)
    first.log(POINTS[:1])
    second = TrackerTarget("mlflow", store).open(about(tmp_path), first.id)
    second.log(POINTS[1:])
    second.end("finished", [])
    client = MlflowClient(tracking_uri=store)
    run = client.get_run(first.id)
    assert (run.info.status, run.info.run_name, run.data.params["lr"]) == ("FINISHED", "r", "0.1")
    assert [(one.step, one.value) for one in client.get_metric_history(first.id, "train/loss")] == [
        (64, 0.5),
        (128, 0.25),
    ]


def test_weights_and_biases_has_the_run_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file it would upload, read with its own messages, has the settings, and values with their samples."""
    pytest.importorskip("wandb", reason="wandb is not installed")
    from wandb.proto.wandb_internal_pb2 import Record

    monkeypatch.setenv("WANDB_MODE", "offline")
    tracker = TrackerTarget("wandb", "project").open(about(tmp_path), None)
    tracker.log(POINTS)
    tracker.end("finished", [])
    tracker.close()
    (file,) = tmp_path.rglob("*.wandb")
    records = [Record.FromString(one) for one in stored_records(file.read_bytes())]
    rows = [
        {item.key or item.nested_key[0]: json.loads(item.value_json) for item in one.history.item}
        for one in records
        if one.WhichOneof("record_type") == "history"
    ]
    assert [(row["samples"], row["train/loss"]) for row in rows] == [(64, 0.5), (128, 0.25)]
    (run,) = [one.run for one in records if one.WhichOneof("record_type") == "run"]
    assert (run.display_name, run.project) == ("r", "project")
    assert {item.key: json.loads(item.value_json) for item in run.config.update}["lr"] == "0.1"


def test_trackio_has_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """Its own reader finds settings and values at their samples, of both processes; standard output stays the run's."""
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    trackio = pytest.importorskip("trackio", reason="trackio is not installed")
    from trackio.sqlite_storage import SQLiteStorage

    first = TrackerTarget("trackio", "project").open(about(tmp_path), None)
    first.log(POINTS[:1])
    first.close()
    second = TrackerTarget("trackio", "project").open(about(tmp_path), first.id)
    second.log(POINTS[1:])
    second.end("finished", [])
    second.close()
    (run,) = trackio.Api().runs("project")
    assert (run.name, run.config["lr"]) == ("r", "0.1")
    assert [(row["step"], row["train/loss"]) for row in SQLiteStorage.get_logs("project", "r")] == [
        (64, 0.5),
        (128, 0.25),
    ]
    assert capsys.readouterr().out == ""


def stored_records(content: bytes) -> Iterator[bytes]:
    """The records in a log of LevelDB's format, after W&B's own 7 bytes: blocks of 32 KiB, cut records in parts."""
    at, parts = 7, b""
    while at + 7 <= len(content):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        length, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        parts += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""
