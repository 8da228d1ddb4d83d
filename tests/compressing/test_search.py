"""Searches with planted candidates: each fault is found by the gate that is there for it."""

import dataclasses
import math
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from stoker.artifacts import Artifact
from stoker.compressing import gates
from stoker.compressing import search as searching
from stoker.compressing.candidates import BuildContext, BuiltGraph, CompressionCandidate, GraphKind, explained
from stoker.compressing.contender import Examination
from stoker.compressing.rows import EvaluationRows
from stoker.compressing.scores import named
from stoker.compressing.search import CompressionSearch, begin_search, candidates_for
from stoker.engines import load
from stoker.errors import BadJob
from stoker.records.compression import CompressionTrial, Interval

Change = Callable[[onnx.ModelProto], None]


def planted(name: str, change: Change, precision: str = "int8") -> CompressionCandidate:
    """A candidate whose graph is the tiny model's, changed."""

    def make(context: BuildContext, directory: Path) -> BuiltGraph:
        model = onnx.load(context.source.graph_path)
        change(model)
        path = directory / "model.onnx"
        onnx.save(model, path)
        return BuiltGraph(path, (path,))

    return CompressionCandidate(name, "planted", "onnxruntime", precision, make)  # type: ignore[arg-type]


def replace_kernel(model: onnx.ModelProto, change: Callable[[np.ndarray], np.ndarray]) -> None:
    """Other weights."""
    for one in model.graph.initializer:
        if one.name == "kernel":
            one.CopyFrom(numpy_helper.from_array(change(numpy_helper.to_array(one)), "kernel"))


def garbage(model: onnx.ModelProto) -> None:
    """Equal weights near zero."""
    replace_kernel(model, np.zeros_like)


def swapped(model: onnx.ModelProto) -> None:
    """Weights of the wrong channels."""
    replace_kernel(model, lambda kernel: kernel[::-1])


def not_a_number(model: onnx.ModelProto) -> None:
    """A weight that is NaN."""
    replace_kernel(model, lambda kernel: np.where(kernel == kernel.max(), np.nan, kernel).astype(np.float32))


def couple_batch(model: onnx.ModelProto) -> None:
    """Answers and the largest of the whole batch: the order of a row's classes stays, and so does the metric."""
    model.graph.node[-1].output[0] = "own"
    model.graph.node.extend(
        [
            helper.make_node("ReduceMax", ["own"], ["largest"], keepdims=0),
            helper.make_node("Add", ["own", "largest"], ["logits"]),
        ]
    )


def other_above_eight(model: onnx.ModelProto) -> None:
    """Another answer in batches of more than eight rows, as of an engine that changes its kernel there."""
    model.graph.node[-1].output[0] = "own"
    model.graph.initializer.append(numpy_helper.from_array(np.array(8, np.int64), "eight"))
    model.graph.initializer.append(numpy_helper.from_array(np.array(0, np.int64), "first"))
    model.graph.node.extend(
        [
            helper.make_node("Shape", ["own"], ["shape"]),
            helper.make_node("Gather", ["shape", "first"], ["rows"]),
            helper.make_node("Greater", ["rows", "eight"], ["is_large"]),
            helper.make_node("Cast", ["is_large"], ["shift"], to=onnx.TensorProto.FLOAT),
            helper.make_node("Add", ["own", "shift"], ["logits"]),
        ]
    )


def nothing(model: onnx.ModelProto) -> None:
    """The same graph again."""


def blur(model: onnx.ModelProto) -> None:
    """One class's answers lowered: similar, but many rows change their class."""
    model.graph.node[-1].output[0] = "own"
    shift = np.array([[0.0, 0.2, -0.2]], np.float32)
    model.graph.initializer.append(numpy_helper.from_array(shift, "shift"))
    model.graph.node.append(helper.make_node("Add", ["own", "shift"], ["logits"]))


@pytest.fixture
def search(course: Examination, directory: Path) -> CompressionSearch:
    """A search that has asked the original."""
    return begin_search(course, directory, lambda line: None)


def tried(search: CompressionSearch, candidate: CompressionCandidate) -> CompressionTrial:
    """The record of a candidate that was rejected."""
    assert not search.consider(candidate)
    return search.rejected[-1]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (garbage, "computes something else"),
        (swapped, "for selection, 0.03 is allowed"),
        (not_a_number, "not finite"),
        (couple_batch, "depends on its batch"),
        (other_above_eight, "depends on its batch"),
        (blur, "for selection, 0.03 is allowed"),
        (nothing, "as fast as original"),
    ],
)
def test_each_fault_is_found_by_its_gate(search: CompressionSearch, change: Change, reason: str) -> None:
    """Silent garbage, NaN, answers that depend on neighbours, a lower metric, no gain: rejected with the reason."""
    found = tried(search, planted(change.__name__, change))
    assert reason in found.reason
    assert found.outcome == "rejected"
    assert found.gates == () or not found.gates[-1].passed


def test_a_candidate_that_cannot_be_made_or_loaded_leaves_the_search_going(search: CompressionSearch) -> None:
    """Whatever a library raises is a reason, not the end."""

    def raising(context: BuildContext, directory: Path) -> BuiltGraph:
        with explained("the quantiser"):
            raise KeyError("Unsupported operator Frobnicate")
        raise AssertionError

    def unloadable(context: BuildContext, directory: Path) -> BuiltGraph:
        path = directory / "model.onnx"
        path.write_bytes(b"no graph")
        return BuiltGraph(path, (path,))

    template = planted("bad", nothing)
    assert "Unsupported operator Frobnicate" in tried(search, dataclasses.replace(template, make=raising)).reason
    assert "cannot load" in tried(search, dataclasses.replace(template, name="worse", make=unloadable)).reason
    assert search.accept(0) is search.original


def test_without_time_candidates_are_left_out_and_the_original_stays(search: CompressionSearch) -> None:
    """A search whose time is over says what it left out, and still has a result."""
    search.started = -math.inf
    found = tried(search, planted("late", nothing))
    assert found.outcome == "left out"
    assert search.accept(0) is search.original


@pytest.mark.parametrize(("gain", "fastest"), [(0.9, "b"), (1.2, "a")])
def test_the_faster_is_chosen_among_those_that_hold(
    search: CompressionSearch, course: Examination, gain: float, fastest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Acceptance takes those whose bound keeps within what is allowed; a last race of these says which is faster."""
    told = Interval(value=gain, low=gain, high=gain)
    monkeypatch.setattr(searching, "gain_of", lambda races, confidence: told)
    good, better, worse = (planted(name, change) for name, change in (("a", nothing), ("b", nothing), ("c", blur)))
    for candidate, pace in ((good, 2.0), (better, 3.0), (worse, 4.0)):
        directory = search.directory / candidate.name
        directory.mkdir()
        made = candidate.make(search.context, directory)
        manifest, engine = course.load(candidate, made)
        trial = CompressionTrial(
            name=candidate.name,
            how="",
            engine="onnxruntime",
            precision="int8",
            outcome="rejected",
            reason="",
            pace=pace,
        )
        search.passed.append(type(search.original)(trial, manifest, made, engine, search.bar.scores, pace))
    chosen = search.accept(0)
    outcomes = {one.name: one.outcome for one in search.trials}
    assert chosen.trial.name == fastest
    assert outcomes == {"original": "reference", "a": "passed", "b": "passed", "c": "rejected"} | {fastest: "chosen"}
    assert chosen.trial.drop is not None
    assert chosen.trial.drop.high <= 0.03


def test_a_candidate_that_is_unlikely_to_be_accepted_is_repaired(
    search: CompressionSearch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It passed the selection by a hair: layers are put back, and the better one is a candidate of its own."""
    gain = Interval(value=2.0, low=1.9, high=2.1)
    monkeypatch.setattr(gates, "gain_of", lambda races, confidence: gain)
    monkeypatch.setattr(gates, "foreseen_bound", lambda *arguments: math.inf)
    search.course = dataclasses.replace(search.course, terms=dataclasses.replace(search.course.terms, seconds=1000.0))
    suited = candidates_for(GraphKind({"Conv": 1}), ("int8",), ("onnxruntime", "fp32"))
    plain = next(one for one in suited if one.name == "int8 plain")
    assert search.consider(plain)
    search.repair(plain)
    assert [one.trial.name for one in search.passed] == ["int8 plain", "int8 plain, 1 put back"]


def test_without_time_for_any_candidate_nothing_is_judged(search: CompressionSearch) -> None:
    """It says that nothing was tried, and how many seconds it takes; with something tried it goes on."""
    search.started -= 60
    search.consider(planted("late", nothing))
    with pytest.raises(BadJob, match=r"Nothing was tried: of --seconds 5 it took 6\d s") as refused:
        search.require_tried()
    assert re.search(r"Give --seconds (6|7)\d or more; all 1 candidates", refused.value.remedy or "")
    search.rejected.append(dataclasses.replace(search.rejected[0], outcome="rejected"))
    search.require_tried()


def test_latencies_agree_with_the_speed_up(search: CompressionSearch) -> None:
    """Whatever the machine does between two measurements: the table's columns and ratios are of the same rounds."""
    steps_s = np.random.default_rng(0).lognormal(math.log(1e-3), 1.0, 100_000)
    times_s = iter(search.course.clock() + np.cumsum(steps_s))
    search.course = dataclasses.replace(search.course, clock=lambda: float(next(times_s)))
    found = tried(search, planted("same", nothing))
    assert found.pace is not None
    original = search.original.trial.latency_s
    ratios = [original[size] / found.latency_s[size] for size in original]
    assert math.prod(ratios) ** (1 / len(ratios)) == pytest.approx(found.pace, rel=1e-6)


@pytest.mark.parametrize(
    ("max_drop", "reason"),
    [
        ("0.5%", "the targets are the original's own answers: its mse on them is 0, and 0.5% of that"),
        ("-1%", "wanted a positive number or share"),
        ("200%", "a drop of 100 % or more allows any candidate"),
    ],
)
def test_a_drop_that_cannot_be_kept_is_refused(
    course: Examination, images: Artifact, directory: Path, max_drop: str, reason: str
) -> None:
    """A share of an error of 0 is 0; a negative one cannot be; the whole allows anything."""
    (engine,) = load(images, threads=1)

    def owned(rows: EvaluationRows) -> EvaluationRows:
        return dataclasses.replace(rows, targets=engine.run(rows.inputs)["logits"])

    rows = course.material
    material = dataclasses.replace(rows, selection=owned(rows.selection), acceptance=owned(rows.acceptance))
    terms = dataclasses.replace(course.terms, max_drop=max_drop, batch_sizes=(1, len(rows.selection)))
    own = dataclasses.replace(course, material=material, metric=named("mse"), terms=terms)
    with pytest.raises(BadJob, match=reason):
        begin_search(own, directory, lambda line: None)


def test_without_targets_agreement_with_the_original_is_the_metric(course: Examination, directory: Path) -> None:
    """The original agrees with itself in every row; what changes the class of many rows is refused."""
    bare = {
        name: dataclasses.replace(getattr(course.material, name), targets=None)
        for name in ("calibration", "selection", "acceptance")
    }
    own = dataclasses.replace(course, material=dataclasses.replace(course.material, **bare), metric=named("agreement"))
    search = begin_search(own, directory, lambda line: None)
    assert (search.original.scores == 1).all()
    assert "logits: largest class" in search.notes[0]
    assert "for selection, 0.03 is allowed" in tried(search, planted("blur", blur)).reason
    assert "as fast as original" in tried(search, planted("nothing", nothing)).reason
    assert search.accept(0) is search.original


def test_too_few_rows_are_refused_before_anything_is_tried(course: Examination, directory: Path) -> None:
    """It says how many rows it takes."""
    few = dataclasses.replace(course, terms=dataclasses.replace(course.terms, max_drop="0.1%"))
    with pytest.raises(BadJob, match="it takes 4,093") as refused:
        begin_search(few, directory, lambda line: None)
    assert "Give 4,173 validation rows in all" in (refused.value.remedy or "")
