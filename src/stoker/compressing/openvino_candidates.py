"""Candidates that OpenVINO runs: in fp32, in bf16 or fp16, and in int8 as NNCF quantises.

What: int8 static quantisation after training. Scales of weights are per channel, those of activations per tensor, taken
from calibration rows; biases are corrected for the mean error. "SmoothQuant" first moves outliers of activations into
the weights, which transformers need.
Use when: the CPU has 8-bit dot products (VNNI, AMX), where it is 1.5 to 2 times as fast as bf16.
Costs: seconds; some accuracy, which the search measures.
Source: Nagel et al. 2021, https://arxiv.org/abs/2106.08295 (quantisation after training, bias correction); Xiao et al.
2022, https://arxiv.org/abs/2211.10438 (SmoothQuant); NNCF's documentation of `nncf.quantize`.

OpenVINO's own format, as small as it gets.

A small network's description (`model.xml`) takes a fifth of its weights in int8: layers' names, sizes that follow from
others, notes of the tools, indentation. The engine needs none of it.

Layers of an int8 graph put back: their activations are no longer quantised, their weights stay in 8 bits.

What: a quantised graph rounds activations at points before its layers. Each point is undone alone, and how much nearer
the answers come to the original's ranks it; then the first 1, 2, 4, … of the ranking are undone together, until the
metric is kept. Points that follow one another are taken together where there are more than time allows to ask singly.
Use when: int8 is fast enough and not good enough; often a few layers do all the damage.
Costs: an undone layer computes as the rest does, in fp32 or bf16.
Source: accuracy-aware quantisation as in NNCF's `quantize_with_accuracy_control`, which puts back weights as well and
asks the metric for each; the ranking by answers and the doubling are ours.
"""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal
from xml.etree import ElementTree as ET

from stoker.compressing.candidates import BuildContext, BuiltGraph, CannotBuild, explained
from stoker.engines import openvino_process

Style = Literal["mixed", "plain", "percentile", "min-max", "smooth"]
"""How scales are found: extremes, with a zero point for activations of either sign; the same without correcting biases;
extremes without outliers; symmetric extremes; after SmoothQuant."""


def as_it_is(workshop: BuildContext, directory: Path) -> BuiltGraph:
    """The graph in OpenVINO's own format."""
    with explained("OpenVINO"):
        return saved(read(workshop.graph_path), directory)


def halved(workshop: BuildContext, directory: Path) -> BuiltGraph:
    """The graph with its weights stored in fp16, which bf16 is computed from as well: half the size."""
    with explained("OpenVINO"):
        return saved(read(workshop.graph_path), directory, halve=True)


def quantised(workshop: BuildContext, directory: Path, style: Style) -> BuiltGraph:
    """The graph in int8."""
    with explained("NNCF"):
        return saved(quantised_model(workshop, style), directory)


def quantised_model(workshop: BuildContext, style: Style) -> Any:
    """The graph in int8, in memory.

    Raises:
        CannotMake: NNCF is not installed.
    """
    nncf = _nncf()
    rows = list(workshop.calibration_inputs())
    with _quietly(), openvino_process.signal_stack_kept():
        model = read(workshop.graph_path)
        return nncf.quantize(
            model, nncf.Dataset(rows), subset_size=len(rows), **_settings(nncf, style, sums_fit=workshop.sums_fit)
        )  # fmt: skip


def _settings(nncf: Any, style: Style, *, sums_fit: bool) -> dict[str, Any]:
    """What NNCF calls a style."""
    finer: dict[str, Any] = {"disable_bias_correction": style == "plain"}
    if sums_fit:
        finer["overflow_fix"] = nncf.OverflowFix.DISABLE
    if style == "percentile":
        sets = nncf.quantization.range_estimator.RangeEstimatorParametersSet
        finer["activations_range_estimator_params"] = sets.MEAN_NO_OUTLIERS_MINMAX
    preset = nncf.QuantizationPreset.PERFORMANCE if style == "min-max" else nncf.QuantizationPreset.MIXED
    return {
        "model_type": nncf.ModelType.TRANSFORMER if style == "smooth" else None,
        "preset": preset,
        "advanced_parameters": nncf.AdvancedQuantizationParameters(**finer),
    }


def _nncf() -> Any:
    openvino_process.withhold_telemetry()
    try:
        with _quietly():
            import nncf  # noqa: PLC0415 - an extra, which is loaded where it is used
    except ImportError as error:
        raise CannotBuild("nncf is not installed", remedy="pip install 'stoker[compress]'") from error
    return nncf


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Without the bars and notes that NNCF writes while it works."""
    logger = logging.getLogger("nncf")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)


_ENDS = frozenset({"Parameter", "Result"})


def openvino() -> Any:
    """The library.

    Raises:
        CannotMake: it is not installed.
    """
    openvino_process.withhold_telemetry()
    try:
        import openvino as library  # noqa: PLC0415 - an extra, which is loaded where it is used
        import openvino.passes  # noqa: PLC0415 - likewise; not loaded with the rest
    except ImportError as error:
        raise CannotBuild("openvino is not installed", remedy="pip install 'stoker[compress]'") from error
    return library


def read(path: Path) -> Any:
    """A graph in memory, with what follows from constants alone computed once and for all."""
    library = openvino()
    model = library.Core().read_model(path)
    passes = library.passes.Manager()
    passes.register_pass(library.passes.ConstantFolding())
    passes.run_passes(model)
    return model


def saved(model: Any, directory: Path, *, halve: bool = False) -> BuiltGraph:
    """Write `model.xml` and `model.bin`, with weights in fp16 if they are to be halved."""
    path = directory / "model.xml"
    openvino().save_model(model, path, compress_to_fp16=halve)
    ends = {name for port in (*model.inputs, *model.outputs) for name in port.get_names()}
    path.write_text(slimmed(path.read_text(encoding="utf-8"), ends), encoding="utf-8")
    return BuiltGraph(path, (path, path.with_suffix(".bin")))


def slimmed(xml: str, ends: Collection[str]) -> str:
    """The description without what the engine works out for itself; names of inputs and outputs, `ends`, stay."""
    net = ET.fromstring(xml)  # noqa: S314 - a graph of our own, or of an artifact that was verified
    for layer in net.iterfind("layers/layer"):
        if layer.get("type") not in _ENDS:
            layer.set("name", layer.get("id", ""))
        for port in layer.iterfind("input/port"):
            for dim in list(port):
                port.remove(dim)
        for port in layer.iterfind("output/port"):
            kept = [name for name in port.get("names", "").split(",") if name in ends]
            port.attrib.pop("names", None)
            if kept:
                port.set("names", ",".join(kept))
    for note in net.findall("rt_info"):
        net.remove(note)
    for element in net.iter():
        element.tail = None
        if element.text is not None and not element.text.strip():
            element.text = None
    return ET.tostring(net, encoding="unicode")


LayerGroup = tuple[str, ...]
"""Points that are undone together, by name."""


def points_of(graph: Path) -> tuple[str, ...]:
    """Where an int8 graph rounds activations, in the order of its layers."""
    with explained("OpenVINO"):
        return tuple(op.get_friendly_name() for op in _read(graph).get_ordered_ops() if _is_point(op))


def undone(graph: Path, directory: Path, points: Collection[str]) -> BuiltGraph:
    """The graph without rounding at these points, written to `directory`."""
    with explained("OpenVINO"):
        model = _read(graph)
        for op in model.get_ordered_ops():
            if _is_point(op) and op.get_friendly_name() in points:
                for reader in list(op.output(0).get_target_inputs()):
                    reader.replace_source_output(op.input_value(0))
        return saved(model, directory)


def grouped(points: Sequence[str], most: int) -> tuple[LayerGroup, ...]:
    """At most `most` groups of points, each of neighbours, of like sizes.

    >>> grouped(["a", "b", "c", "d", "e"], 2)
    (('a', 'b', 'c'), ('d', 'e'))
    """
    size = -(-len(points) // max(1, most))
    return tuple(tuple(points[at : at + size]) for at in range(0, len(points), size))


def shares(groups: Sequence[LayerGroup]) -> tuple[int, ...]:
    """How many groups to undo together in turn: 1, 2, 4, …, and never all of them.

    >>> shares([("a",)] * 6)
    (1, 2, 4)
    """
    doubled = (2**power for power in range(len(groups).bit_length()))
    return tuple(count for count in doubled if count < len(groups))


def _read(graph: Path) -> Any:
    return openvino().Core().read_model(graph)


def _is_point(op: Any) -> bool:
    return bool(op.get_type_name() == "FakeQuantize" and op.input_value(0).get_node().get_type_name() != "Constant")
