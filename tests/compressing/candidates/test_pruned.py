"""A pruned network is tried in the forms that served the whole one best, and takes its record along."""

from pathlib import Path

import pytest

from stoker.artifacts import Artifact
from stoker.compressing import search as searching
from stoker.compressing.candidates import (
    BuildContext,
    BuiltGraph,
    CompressionCandidate,
    GraphKind,
    PrunedGraph,
    forms_of,
)
from stoker.compressing.rows import EvaluationRows
from stoker.compressing.search import CompressionSearch, as_given, begin_search, candidates_for, run_search
from stoker.testing.tiny_models import tiny_inputs

KIND = GraphKind({"Conv": 1})


@pytest.fixture
def network(tmp_path: Path) -> PrunedGraph:
    """A network whose graph is one line."""
    for name in ("small.onnx", "pruning.json"):
        (tmp_path / name).write_text(name)
    return PrunedGraph("pruned 2×", "half of it", tmp_path / "small.onnx", tmp_path / "pruning.json")


def copied(context: BuildContext, directory: Path) -> BuiltGraph:
    """The context's graph, copied."""
    path = directory / "model.onnx"
    path.write_bytes(context.graph_path.read_bytes())
    return BuiltGraph(path, (path,))


def test_its_own_graph_is_made_and_its_record_goes_along(
    images: Artifact, network: PrunedGraph, tmp_path: Path
) -> None:
    """Where the form would make the whole network's graph; the record does not count as its size."""
    form = CompressionCandidate("plain", "copied", "onnxruntime", "fp32", copied)
    (candidate,) = forms_of(network, [form], {})
    made = candidate.make(BuildContext(images, EvaluationRows(tiny_inputs("images", rows=2))), tmp_path)
    assert made.graph.read_text() == "small.onnx"
    assert made.extra_files == (network.record,)
    assert made.num_bytes == len("small.onnx")
    assert candidate.name == "pruned 2×, plain"
    assert candidate.is_lossy
    assert not candidate.is_reduced
    assert not form.is_lossy


def test_the_fastest_form_of_each_kind_is_taken(network: PrunedGraph) -> None:
    """The fastest that passed; where none did, the most promising; the form of the model given is one of them."""
    given = ("openvino", "fp32")
    candidates = (*as_given(given), *candidates_for(KIND, (), given))

    def names(paces: dict[str, float]) -> list[str]:
        return [one.name.removeprefix("pruned 2×, ") for one in forms_of(network, candidates, paces)]

    assert names({"fp32 openvino": 1.0, "int8 plain": 3.0, "int8 mixed": 2.0}) == ["fp32 openvino", "int8 plain"]
    assert names({"fp32 openvino": 1.0, "fp32 onnxruntime": 1.2}) == ["fp32 onnxruntime", "int8 mixed"]
    assert names({}) == ["fp32 openvino", "int8 mixed"]


def test_pruned_networks_come_right_after_the_first_in_8_bits(
    course: searching.Examination, directory: Path, network: PrunedGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They took longest to make, and shall not be what there was no time for."""
    search, tried = begin_search(course, directory, lambda line: None), list[str]()

    def consider(self: CompressionSearch, candidate: CompressionCandidate) -> bool:
        tried.append(candidate.name)
        return False

    monkeypatch.setattr(CompressionSearch, "consider", consider)
    run_search(search, KIND, ("bf16", "int8"), [network])
    first = next(at for at, name in enumerate(tried) if name.startswith("pruned"))
    assert [name for name in tried if name.startswith("pruned")] == [
        "pruned 2×, fp32 onnxruntime",
        "pruned 2×, int8 mixed",
    ]
    assert tried[:first] == ["bf16 openvino", "fp32 openvino", "int8 mixed"]
    assert len(tried) == len(set(tried)) == len(candidates_for(KIND, ("bf16", "int8"), ("onnxruntime", "fp32"))) + 2
    tried.clear()
    run_search(search, GraphKind({"Conv": 1, "QuantizeLinear": 1}), ("bf16", "int8"), [])
    assert tried == []
