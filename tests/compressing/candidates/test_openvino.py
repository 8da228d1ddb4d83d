"""Graphs that NNCF and OpenVINO make, of a model of one convolution."""

from pathlib import Path

import numpy as np
import openvino
import pytest

from stoker.compressing.candidates import BuildContext, CompressionCandidate, GraphKind, kind_of
from stoker.compressing.contender import Examination, likeness
from stoker.compressing.openvino_candidates import points_of, slimmed, undone
from stoker.compressing.search import candidates_for
from stoker.devices import attached_cpu


def candidate(name: str) -> CompressionCandidate:
    """One of those that suit any network."""
    fast = tuple({*attached_cpu().fast_dtypes, "int8"} - {"fp32"})  # in bf16 only where this CPU computes in it
    everything = candidates_for(GraphKind({"Conv": 1}), fast, ("onnxruntime", "fp32"))
    return next(one for one in everything if one.name == name)


def likeness_of(name: str, course: Examination, directory: Path) -> float:
    """The similarity of the candidate's answers to the original's."""
    made = candidate(name).make(BuildContext(course.source, course.material.calibration), directory)
    _, engine = course.load(candidate(name), made)
    original = course.engine_of(course.source.manifest, course.source.graph_path)
    rows = course.material.selection
    return likeness(course.answers(engine, rows), course.answers(original, rows))


@pytest.mark.parametrize("name", ["fp32 openvino", "int8 plain", "int8 percentile", "int8 qdq minmax"])
def test_candidates_compute_what_the_original_does(name: str, course: Examination, directory: Path) -> None:
    """Within rounding to 8 bits."""
    assert likeness_of(name, course, directory) > 0.99


def test_undoing_every_point_brings_the_answers_back(course: Examination, directory: Path) -> None:
    """Without rounding of activations only that of the weights is left, and the graph still runs."""
    made = candidate("int8 plain").make(BuildContext(course.source, course.material.calibration), directory)
    points = points_of(made.graph)
    assert points
    (directory / "undone").mkdir()
    back = undone(made.graph, directory / "undone", points)
    assert points_of(back.graph) == ()
    rows = course.material.selection
    wanted = course.answers(course.engine_of(course.source.manifest, course.source.graph_path), rows)["logits"]
    errors = []
    for graph in (made.graph, back.graph):
        engine = course.load(candidate("int8 plain"), type(made)(graph, (graph,)))[1]
        errors.append(float(np.square(course.answers(engine, rows)["logits"] - wanted).mean()))
    assert errors[1] < errors[0]


def test_a_slim_description_is_the_same_model(course: Examination, directory: Path) -> None:
    """Names, sizes and notes that follow from the rest are left out; inputs and outputs keep theirs."""
    core = openvino.Core()
    model = core.read_model(course.source.graph_path)
    openvino.save_model(model, directory / "whole.xml", compress_to_fp16=False)
    whole = (directory / "whole.xml").read_text()
    slim = slimmed(whole, {"image", "logits"})
    (directory / "whole.xml").write_text(slim)
    assert len(slim) < 0.8 * len(whole)
    asked = course.material.selection.inputs["image"]
    before, after = (core.compile_model(one, "CPU")(asked) for one in (model, directory / "whole.xml"))
    assert np.array_equal(before["logits"], after["logits"])


def test_an_int8_graph_in_either_format_is_noticed(course: Examination, directory: Path) -> None:
    """What OpenVINO quantised, and what ONNX Runtime did, is not quantised again."""
    context = BuildContext(course.source, course.material.calibration)
    for name in ("int8 plain", "int8 qdq minmax"):
        (directory / name).mkdir()
        assert kind_of(candidate(name).make(context, directory / name).graph).quantised
