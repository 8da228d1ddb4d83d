"""Prune end to end: from a run to a published version whose network is smaller."""

import dataclasses
import functools
import json
from pathlib import Path

import numpy as np
import pytest
import torch

import stoker
from stoker.artifacts import difference, read
from stoker.compressing import distillation, gates, search
from stoker.compressing import pruning as pruning_flow
from stoker.compressing.source_job import Pruner
from stoker.engines import load
from stoker.records import loads
from stoker.records.compression import Compression, Cut, Interval, Pruning
from stoker.testing.tiny_models import tiny_artifact
from tests.flow.builders import PLAN
from tests.flow.command import stoker_here
from tests.flow.test_export import DIGITS, plan_file

COMMAND = ("compress", "models/digits", "--max-drop", "60%", "--threads", "1", "--batch", "4", "--seconds", "60")


def by_size(pruner: Pruner, cut: Cut, directory: Path) -> Interval:
    """How much faster a cut counts as: by the channels it takes, so that no outcome hangs on the clock."""
    del pruner, directory
    kept = sum(len(part.kept) for part in cut.kept)
    whole = sum(part.shape[part.dim] for part in cut.kept)
    value = whole / kept
    return Interval(value=value, low=0.98 * value, high=1.02 * value)


@pytest.fixture
def digits(monkeypatch: pytest.MonkeyPatch) -> stoker.Run:
    """A short run on digits, exported; nothing but pruned networks is tried.

    What is pruned counts as twice as fast, and is trained under a plan that is given.
    """
    gain = Interval(value=2.0, low=1.9, high=2.1)
    monkeypatch.setattr(gates, "gain_of", lambda races, confidence: gain)
    monkeypatch.setattr(gates, "LEAST_LIKENESS", -1.0)  # hardly trained, they agree on little
    monkeypatch.setattr(search, "candidates_for", lambda *_arguments: ())
    monkeypatch.setattr(pruning_flow, "_speed_up", by_size)
    monkeypatch.setattr(distillation, "train", functools.partial(stoker.train, plan=PLAN))
    Path("digits.py").write_text(DIGITS.replace("holdout(0.1)", "holdout(0.4)").replace("width=2", "width=8"))
    assert stoker_here("train", "digits.py", "--plan", plan_file()).code == 0
    assert stoker_here("export", "latest", "-o", "models/digits").code == 0
    return stoker.load("latest")


@pytest.mark.slow  # the whole of it; its parts are tested in tests/compressing
def test_a_pruned_network_is_trained_judged_and_published(digits: stoker.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """It passes the gates of every candidate; its record is in the version, and makes the same network again.

    The run that trained it is exported like any other.

    A speed that is not to be had is left out.
    """
    monkeypatch.setattr(pruning_flow, "TARGETS", (1.5, 50.0))
    outcome = stoker_here(*COMMAND, "--json", "--prune", "--fine-tune", "0.2")
    assert outcome.code == 0, outcome.err
    record = loads(json.dumps(json.loads(outcome.out)["compression"]), Compression)
    assert [one.name for one in record.trials] == ["original", "pruned 1.5×, fp32 openvino"]
    assert record.chosen == "pruned 1.5×, fp32 openvino", record.trials[1].reason
    version = read("models/digits")
    version.verify()
    pruning = loads((version.path / "pruning.json").read_text(), Pruning)
    assert pruning.speed_up.value >= 1.5
    assert pruning.source.name == digits.name
    run = stoker.load(pruning.run)
    assert run.status == "finished"
    small = run.model()
    assert sum(p.numel() for p in small.parameters()) < sum(p.numel() for p in digits.model().parameters())
    (engine,) = load(version, threads=1)
    asked = version.golden().inputs
    images = stoker.data.digits()[1].prepare((torch.from_numpy(asked["image"]), torch.zeros(len(asked["image"]))))[0]
    with torch.no_grad():
        wanted = {"output": small(images).numpy()}
    assert difference(engine.run(asked), wanted) < 1e-3
    kept = loads((digits.path / "pruned" / "1.5x.json").read_text(), Pruning)
    assert dataclasses.replace(kept, run=run.name) == pruning
    exported = stoker_here("export", run.name, "-o", "models/small")
    assert exported.code == 0, exported.err
    (again,) = load(read("models/small"), threads=1)
    assert difference(again.run(asked), wanted) < 1e-3


def test_a_model_that_came_from_elsewhere_is_not_pruned(place: Path) -> None:
    """There is no job to train it by; a number of epochs without --prune means nothing."""
    artifact = tiny_artifact(place / "models", kind="images")
    rows = {"image": np.zeros((900, 1, 8, 8), np.float32)}
    np.savez("rows.npz", target=np.arange(900) % 3, **rows)
    given = ("compress", str(artifact.path.parent), "--data", "rows.npz", "--metric", "accuracy", "--max-drop", "20%")
    outcome = stoker_here(*given, "--prune")
    assert outcome.code == 2
    assert "was not exported from a run" in outcome.err
    assert "no job to train it by" in " ".join(outcome.err.split())
    for wrong, says in (("0", "positive number of epochs"), ("1", "--prune as well")):
        outcome = stoker_here(*given, "--fine-tune", wrong, *(("--prune",) if wrong == "0" else ()))
        assert (outcome.code, says in outcome.err) == (2, True), outcome.err
