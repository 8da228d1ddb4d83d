"""What is allowed of answers after an export."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from stoker.artifacts import excess
from stoker.artifacts.dtypes import Arrays
from stoker.engines import Graph
from stoker.engines.base import not_installed
from stoker.errors import BadArtifact
from stoker.exporting import proofs
from stoker.exporting.proofs import Trial, prove, tolerance_of
from stoker.records import Proof, TensorSpec

BOXES, SCORES = np.linspace(0, 640, 12, dtype=np.float32).reshape(3, 4), np.array([0.9, 0.5, 0.1], np.float32)


def measured(error: float) -> list[Proof]:
    """What an engine was found to differ by."""
    return [Proof(what="an engine", error=error, limit=1e-3)]


@pytest.mark.parametrize(("error", "share"), [(1e-7, 1e-4), (3e-5, 3e-4), (9e-4, 1e-3)])
def test_one_output_allows_a_share_of_its_largest_answer(error: float, share: float) -> None:
    """Ten times what was measured, between the floor and the limit."""
    found = tolerance_of(measured(error), {"y": BOXES}, 1e-3)
    assert found.relative == pytest.approx(share)
    assert found.absolute == pytest.approx(640 * share)


def test_an_output_of_large_numbers_allows_nothing_to_one_of_small_ones() -> None:
    """Boxes in pixels, and scores: a score that is off by 0.02 is not the same answer, rounding of a box is."""
    answers = {"boxes": BOXES, "scores": SCORES}
    tolerance = tolerance_of(measured(5e-7), answers, 1e-3)
    assert excess({**answers, "scores": SCORES + np.float32(0.02)}, answers, tolerance) > 1
    assert excess({**answers, "boxes": BOXES + np.float32(640 * 5e-7)}, answers, tolerance) < 1


def test_what_is_filled_in_allows_nothing_to_the_others() -> None:
    """Logits of masked classes of -1e9 are no scale of those that count; class numbers have none."""
    logits = np.array([[1.5, -1e9, 0.5], [-1e9, 2.0, 0.1]], np.float32)
    answers = {"logits": logits, "best": np.array([0, 40_000])}
    tolerance = tolerance_of(measured(1e-6), answers, 1e-3)
    assert tolerance.absolute == pytest.approx(2e-4)
    assert excess({**answers, "logits": logits + np.float32(0.01)}, answers, tolerance) > 1
    assert excess({**answers, "best": np.array([0, 40_001])}, answers, tolerance) > 1


class Doubling:
    """An engine that doubles its input, and is off by `shift` in batches of more than `above` rows."""

    def __init__(self, above: int, shift: float) -> None:
        self.above, self.shift = above, np.float32(shift)

    def run(self, inputs: Arrays) -> Arrays:
        return {"y": 2 * inputs["x"] + self.shift * (len(inputs["x"]) > self.above)}

    def close(self) -> None:
        """Nothing."""


def proven(
    monkeypatch: pytest.MonkeyPatch,
    most_rows: int,
    load_graph: Callable[[str, Graph], tuple[Doubling]] | None = None,
    **engines: Doubling,
) -> proofs.Proven:
    """What comes of an export to these engines, served in batches of up to `most_rows`."""
    monkeypatch.setattr(proofs, "load_graph", load_graph or (lambda name, graph: (engines[name],)))
    spec = TensorSpec(name="x", datatype="FP32", shape=("batch", 4))
    samples = {"x": np.random.default_rng(0).standard_normal((8, 4)).astype(np.float32)}
    trial = Trial(samples=samples, inputs=(spec,), most_rows=most_rows)
    graph = Graph(path=Path("model.onnx"), precision="fp32", inputs=(spec,), outputs=(spec,))
    golden = {"x": samples["x"][:4]}
    return prove(graph, Doubling(0, 0.0).run, "PyTorch", trial, golden, 1e-3)


def test_without_any_engine_the_model_is_not_called_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is missing is named, with what to install."""

    def missing(name: str, _: Graph) -> tuple[Doubling]:
        raise not_installed(name)

    with pytest.raises(BadArtifact, match=r"No engine .* is installed here, of openvino, onnxruntime") as caught:
        proven(monkeypatch, 8, load_graph=missing)
    assert caught.value.remedy == "pip install 'stoker[serve]'"


@pytest.mark.parametrize(("most_rows", "engine"), [(8, "openvino"), (32, "onnxruntime"), (48, "onnxruntime")])
def test_an_engine_is_proved_at_the_batch_sizes_that_are_served(
    monkeypatch: pytest.MonkeyPatch, most_rows: int, engine: str
) -> None:
    """One that changes its answers above 16 rows is taken where at most 8 are served, and nowhere else."""
    found = proven(monkeypatch, most_rows, openvino=Doubling(16, 0.5), onnxruntime=Doubling(0, 0.0))
    assert found.engine == engine
    assert any(one.what.endswith(": among 32") for one in found.proofs) == (engine == "onnxruntime")


def test_what_no_engine_answers_alike_in_served_batches_is_not_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server would refuse the version; the error says at which size."""
    with pytest.raises(BadArtifact, match="among 32"):
        proven(monkeypatch, 32, openvino=Doubling(16, 0.5), onnxruntime=Doubling(31, 0.5))


def test_golden_answers_hold_within_the_tolerance_in_served_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """What every engine deviates by at 32 rows is in the tolerance that a server asks them with."""
    found = proven(monkeypatch, 32, openvino=Doubling(16, 5e-4), onnxruntime=Doubling(0, 0.0))
    assert found.engine == "openvino"
    assert found.tolerance.absolute > 5e-4
