"""Compress end to end, as people use it."""

import json
from pathlib import Path

import numpy as np
import onnx
import pytest

from stoker.artifacts import Artifact, difference, read
from stoker.compressing import gates, onnxruntime_candidates
from stoker.compressing.candidates import BuildContext
from stoker.compressing.rows import EvaluationRows
from stoker.engines import load
from stoker.records import loads
from stoker.records.compression import Compression, Interval
from stoker.serving.repository.version_loader import check_answers
from stoker.testing.tiny_models import tiny_artifact, tiny_inputs
from tests.flow.command import stoker_here
from tests.flow.test_export import DIGITS, plan_file

METRIC = '''\
import numpy as np


def metric(outputs, targets):
    """A hit a row."""
    return outputs.argmax(axis=1) == targets
'''


@pytest.fixture
def model(place: Path) -> Artifact:
    """A tiny model of images, rows for it, and a metric in a file."""
    artifact = tiny_artifact("models", kind="images")
    (engine,) = load(artifact, threads=1)
    inputs = tiny_inputs("images", rows=900, seed=5)
    target = engine.run(inputs)["logits"].argmax(axis=1)
    np.savez("rows.npz", target=target, **inputs)
    Path("hits.py").write_text(METRIC)
    return artifact


@pytest.fixture
def twice_as_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every candidate counts as twice as fast as its rival, so that no outcome hangs on the clock."""
    gain = Interval(value=2.0, low=1.9, high=2.1)
    monkeypatch.setattr(gates, "gain_of", lambda races, confidence: gain)


def compress(*options: str, target: str = "models/tiny"):
    """The command with rows and a metric from files."""
    return stoker_here(
        "compress",
        target,
        "--data",
        "rows.npz",
        "--metric",
        "hits.py",
        "--max-drop",
        "2%",
        "--seconds",
        "6",
        "--batch",
        "1",
        "--batch",
        "4",
        "--threads",
        "1",
        *options,
    )


@pytest.mark.usefixtures("twice_as_fast")
def test_the_best_that_holds_becomes_the_next_version(model: Artifact) -> None:
    """Its manifest says where it came from, its golden answers are its own, its record has each trial's reason."""
    outcome = compress("--json")
    assert outcome.code == 0, outcome.err
    record = loads(json.dumps(json.loads(outcome.out)["compression"]), Compression)
    assert all(one.reason for one in record.trials)
    assert record.rows.acceptance > record.rows.selection > 0
    found = read("models/tiny")
    assert found.version == model.version + 1
    assert (found.manifest.source.kind, found.manifest.source.digest) == ("artifact", model.digest)
    assert loads((found.path / "compression.json").read_text(), Compression).chosen == record.chosen
    found.verify()
    golden, (engine,) = found.golden(), load(found, threads=1)
    for most_rows in range(1, 33):  # what a server asks before it takes a version
        check_answers(engine, found.manifest, golden, most_rows=most_rows)
    assert difference(golden.outputs, model.golden().outputs) < 0.2


@pytest.mark.slow
def test_without_a_gain_nothing_is_written(model: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every candidate has its reason in the table, and the model stays as it was."""
    monkeypatch.setattr(gates, "LEAST_GAIN_LOSSLESS", 1e9)
    monkeypatch.setattr(gates, "LEAST_GAIN_LOSSY", 1e9)
    outcome = compress()
    assert outcome.code == 0, outcome.err
    assert read("models/tiny").version == model.version
    for expected in ("Nothing was better than the original", "wanted more than", "int8 plain", "rejected", "original"):
        assert expected in outcome.out


def test_a_quantised_model_is_not_quantised_again(model: Artifact) -> None:
    """It says so, and tries nothing."""
    rows = EvaluationRows(tiny_inputs("images", rows=8))
    onnxruntime_candidates.static(BuildContext(model, rows), model.path, "MinMax")
    changed = onnx.load(model.path / "model.onnx")
    assert any(node.op_type == "QuantizeLinear" for node in changed.graph.node)
    Path("imported.onnx").write_bytes((model.path / "model.onnx").read_bytes())
    exported = stoker_here("export", "imported.onnx", "-o", "models/quantised")
    assert exported.code == 0, exported.err
    outcome = compress("--json", target="models/quantised")
    assert outcome.code == 0, outcome.err
    record = json.loads(outcome.out)["compression"]
    assert "already quantised" in record["notes"][0]
    assert [one["name"] for one in record["trials"]] == ["original"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--data", "none.npz"), "there is no none.npz"),
        (("--data", "short.npz"), "it takes"),
        (("--data", "other.npz"), "has no 'image'"),
        (("--data", "wide.npz"), "the model takes ['batch', 1, 8, 8]"),
        (("--data", "broken.npz"), "cannot be read"),
        (("--metric", "none.py"), "there is no none.py"),
        (("--metric", "acuracy"), "'accuracy'"),
        (("--metric", "raises.py"), "raised ZeroDivisionError"),
        (("--metric", "mean.py"), "gave scores of shape"),
        (("--metric", "empty.py"), "has no function `metric`"),
        (("--max-drop", "some"), "wanted a positive number"),
        (("--max-drop", "200%"), "allows any candidate"),
        (
            ("--data", "bare.npz", "--metric", "accuracy"),
            "no array or column 'target', which the metric accuracy needs",
        ),
        (("--seconds", "0"), "wanted a positive number"),
        (("--batch", "0"), "batch sizes are 1 or more"),
        (("--keep-all", "models"), "models is not empty"),
        (("--set", "epochs=1"), "--set is for the job of --job"),
        (("--job", "a_job.py", "--set", "epoch=1"), "'epoch'"),
        (("--job", "digits_job.py"), "--job and --data both say where rows come from"),
    ],
)
@pytest.mark.usefixtures("model")
def test_bad_input_is_answered_with_what_is_wrong(options: tuple[str, ...], says: str) -> None:
    """Exit code 2, a sentence that helps, and no version written."""
    image = tiny_inputs("images", rows=900)["image"]
    np.savez("short.npz", image=image[:60], target=np.zeros(60, np.int64))
    np.savez("other.npz", picture=image)
    np.savez("wide.npz", image=image.reshape(225, 1, 16, 16), target=np.zeros(225, np.int64))
    np.savez("bare.npz", image=image)
    Path("broken.npz").write_bytes(b"PK no archive")
    Path("raises.py").write_text("def metric(outputs, targets):\n    return 1 / 0\n")
    Path("mean.py").write_text("def metric(outputs, targets):\n    return (outputs.argmax(1) == targets).mean()\n")
    Path("empty.py").write_text("")
    Path("a_job.py").write_text("def job(epochs=1.0):\n    raise AssertionError\n")
    Path("digits_job.py").write_text(DIGITS)
    outcome = compress(*options)
    assert (outcome.code, says in " ".join(outcome.err.split())) == (2, True), outcome.err
    assert read("models/tiny").version == 1


@pytest.mark.slow
@pytest.mark.usefixtures("twice_as_fast")
def test_rows_without_a_target_are_judged_by_agreement(model: Artifact) -> None:
    """The new version says so: the metric by its name, and in words what it means for the output."""
    np.savez("bare.npz", **tiny_inputs("images", rows=900, seed=5))
    outcome = stoker_here(
        "compress",
        str(model.path.parent),
        "--data",
        "bare.npz",
        "--max-drop",
        "2%",
        "--seconds",
        "6",
        "--batch",
        "1",
        "--threads",
        "1",
    )
    assert outcome.code == 0, outcome.err
    assert "judged by agreement with the answers of version 1" in " ".join(outcome.out.split())
    found = read("models/tiny")
    assert found.version == 2
    assert 0.98 <= found.manifest.metrics["agreement"] <= 1
    assert any("agreement with the answers of version 1" in note for note in found.manifest.notes)


def test_a_model_made_elsewhere_needs_rows(model: Artifact) -> None:
    """Without its job there is no data: the remedy names the options."""
    outcome = stoker_here("compress", "models/tiny")
    assert outcome.code == 2
    assert "--data FILE" in outcome.err


GROWING = """\
import numpy as np
import torch
from torch import nn

import stoker


def job():
    stored = np.load("points.npy")
    points, target = torch.from_numpy(stored), torch.from_numpy((stored.sum(1) > 0).astype(np.int64))
    return stoker.Job(
        model=lambda: nn.Linear(6, 2), data=(points, target), valid=stoker.holdout(0.2), loss="cross_entropy",
        metrics=["accuracy"], optimizer=stoker.SGD(lr=0.1), batch=16, until=stoker.epochs(1), name="growing",
    )
"""


@pytest.mark.slow
def test_data_that_grew_since_the_run_accept_nothing(place: Path) -> None:
    """Another holdout has rows that the model was trained on: an export notes it, compress refuses or takes --job."""
    draw = np.random.default_rng(0).standard_normal((120, 6)).astype(np.float32)
    np.save("points.npy", draw[:100])
    Path("growing.py").write_text(GROWING)
    assert stoker_here("train", "growing.py", "--plan", plan_file()).code == 0
    assert stoker_here("export", "latest", "-o", "models/growing").code == 0
    assert read("models/growing").manifest.notes == ()
    np.save("points.npy", draw)
    assert stoker_here("export", "latest", "-o", "models/growing").code == 0
    (note,) = read("models/growing").manifest.notes
    assert "the data changed since growing" in note
    outcome = stoker_here("compress", "models/growing")
    assert outcome.code == 2
    assert "the data changed since growing" in outcome.err
    assert "--data FILE" in outcome.err
    given = stoker_here("compress", "models/growing", "--job", "growing.py")
    assert "the data changed" not in given.err
    assert "17 rows for acceptance" in " ".join(given.err.split())


@pytest.mark.usefixtures("twice_as_fast")
@pytest.mark.slow
def test_a_run_brings_its_own_rows_and_metric(place: Path) -> None:
    """Rows are the job's, stored as bytes; the metric is its first, and the original has the accuracy of the run."""
    Path("digits.py").write_text(DIGITS.replace("holdout(0.1)", "holdout(0.4)"))
    assert stoker_here("train", "digits.py", "--plan", plan_file()).code == 0
    assert stoker_here("export", "latest", "-o", "models/digits").code == 0
    outcome = stoker_here(
        "compress", "models/digits", "--max-drop", "2%", "--seconds", "3", "--threads", "1", "--batch", "8", "--json"
    )
    assert outcome.code == 0, outcome.err
    record = loads(json.dumps(json.loads(outcome.out)["compression"]), Compression)
    assert record.metric == "accuracy"
    assert abs(record.baseline - read("models/digits/1").manifest.metrics["valid/accuracy"]) < 0.1
    assert 0 < record.rows.calibration <= 300
