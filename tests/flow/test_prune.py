"""Prune end to end: from a run to a published version whose network is smaller."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import stoker
from stoker.artifacts import read
from stoker.compressing import examining
from stoker.engines import load
from stoker.flow import pruning as pruning_flow
from stoker.flow.fine_tuning import pruned_model
from stoker.flow.pruning import Pruner
from stoker.records import loads
from stoker.records.compression import Compression, Interval
from stoker.records.pruning import Cut, Pruning
from stoker.testing.models import tiny_artifact
from tests.flow.command import stoker_here
from tests.flow.test_export import DIGITS, plan_file

SIZES = ("compress", "models/digits", "--max-drop", "60%", "--threads", "1", "--batch", "4", "--seconds", "8", "--json")


def by_size(pruner: Pruner, cut: Cut, directory: Path) -> Interval:
    """How much faster a cut counts as: by the channels it takes, so that no outcome hangs on the clock."""
    del pruner, directory
    kept = sum(len(part.kept) for part in cut.kept)
    whole = sum(part.shape[part.dim] for part in cut.kept)
    value = whole / kept
    return Interval(value=value, low=0.98 * value, high=1.02 * value)


@pytest.fixture
def digits(monkeypatch: pytest.MonkeyPatch) -> stoker.Run:
    """A short run on digits, exported; one speed is asked for, and every candidate counts as twice as fast."""
    monkeypatch.setattr(pruning_flow, "TARGETS", (1.5,))
    monkeypatch.setattr(pruning_flow, "_speed_up", by_size)
    gain = Interval(value=2.0, low=1.9, high=2.1)
    monkeypatch.setattr(examining, "gain_of", lambda races, confidence: gain)
    monkeypatch.setattr(examining, "LEAST_LIKENESS", -1.0)  # hardly trained, they agree on little
    Path("digits.py").write_text(DIGITS.replace("holdout(0.1)", "holdout(0.4)").replace("width=2", "width=8"))
    assert stoker_here("train", "digits.py", "--plan", plan_file()).code == 0
    assert stoker_here("export", "latest", "-o", "models/digits").code == 0
    return stoker.load("latest")


def test_a_pruned_network_is_trained_judged_and_published(digits: stoker.Run) -> None:
    """It passes the gates of every candidate; its record lies with the version, and makes the same network again."""
    outcome = stoker_here(*SIZES, "--prune", "--fine-tune", "0.2")
    assert outcome.code == 0, outcome.err
    record = loads(json.dumps(json.loads(outcome.out)["compression"]), Compression)
    names = [one.name for one in record.trials]
    assert [name for name in names if name.startswith("pruned 1.5×, int8")], names
    assert record.chosen.startswith("pruned 1.5×")
    version = read("models/digits")
    version.verify()
    pruning = loads((version.path / "pruning.json").read_text(), Pruning)
    assert pruning.speed_up.value >= 1.5
    run = stoker.load(pruning.run)
    assert run.status == "finished"
    assert pruning.source.name == digits.name
    small = pruned_model(run)
    assert sum(p.numel() for p in small.parameters()) < sum(p.numel() for p in digits.model().parameters())
    (engine,) = load(version, threads=1)
    asked = version.golden().inputs
    samples = stoker.data.digits()[1]
    prepared = samples.prepare((_tensor(asked["image"]), _tensor(np.zeros(len(asked["image"])))))[0]
    said, wanted = engine.run(asked)["output"], small(prepared).detach().numpy()
    assert np.abs(said - wanted).max() < 0.2 * np.abs(wanted).max()
    again = stoker_here(*SIZES[:1], "models/digits/1", *SIZES[2:], "--prune", "--fine-tune", "0.2")
    assert again.code == 0, again.err
    assert loads((read("models/digits").path / "pruning.json").read_text(), Pruning) == pruning, "decided once"
    assert len(list(Path("runs").glob("*-pruned-*"))) == 1


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


def test_a_network_without_channels_to_spare_is_tried_as_it_is(
    digits: stoker.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A speed that is not to be had is told of; the search goes on without."""
    del digits
    monkeypatch.setattr(pruning_flow, "TARGETS", (50.0,))
    outcome = stoker_here(*SIZES[:-1], "--prune")
    assert outcome.code == 0, outcome.err
    assert "50× is not to be had" in outcome.err
    assert "pruned" not in outcome.out


def _tensor(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array)
