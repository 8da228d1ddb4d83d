"""Candidates for OpenVINO: fp32, bf16 or fp16, int8 as NNCF quantises, and int8 with some layers put back.

What: int8 static quantisation after training. Scales of weights are per channel, those of activations per tensor, taken
from calibration rows; biases are corrected for the mean error. SmoothQuant first moves outliers of activations into the
weights, which transformers need.
Use when: the CPU has 8-bit dot products (VNNI, AMX), where it is 1.5 to 2 times as fast as bf16.
Costs: seconds; some accuracy, which the search measures.
Source: Nagel et al. 2021, https://arxiv.org/abs/2106.08295 (quantisation after training, bias correction); Xiao et al.
2022, https://arxiv.org/abs/2211.10438 (SmoothQuant); NNCF's documentation of `nncf.quantize`.

Putting layers back: a quantised graph rounds activations at points before its layers. Each point, or group of
neighbouring points, is undone alone and ranked by how much nearer the answers come to the original's; then the first 1,
2, 4, … of the ranking are undone together, until the metric is kept. Their layers then compute in fp32 or bf16; weights
stay in 8 bits. Source: NNCF's `quantize_with_accuracy_control`, which puts back weights as well and measures the metric
for each; the ranking by answers and the doubling are ours.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Literal
from xml.etree import ElementTree as ET

from stoker.compressing.candidates import BuildContext, BuiltGraph, explained, library, quietly
from stoker.engines.openvino import signal_stack_kept, withhold_telemetry

Style = Literal["mixed", "plain", "percentile", "min-max", "smooth"]
"""How scales are found: extremes, with a zero point for activations of either sign; the same without bias correction;
extremes without outliers; symmetric extremes; after SmoothQuant."""


def as_it_is(context: BuildContext, directory: Path) -> BuiltGraph:
    """The graph in OpenVINO's own format."""
    with explained("OpenVINO"):
        return saved(read(context.graph_path), directory)


def halved(context: BuildContext, directory: Path) -> BuiltGraph:
    """The graph with its weights stored in fp16, also for bf16: half the size."""
    with explained("OpenVINO"):
        return saved(read(context.graph_path), directory, halve=True)


def quantised(context: BuildContext, directory: Path, style: Style) -> BuiltGraph:
    """The graph in int8."""
    with explained("NNCF"):
        nncf = _loaded("nncf")
        presets = nncf.QuantizationPreset
        advanced: dict[str, Any] = {"disable_bias_correction": style == "plain"}
        if context.sums_fit:
            advanced["overflow_fix"] = nncf.OverflowFix.DISABLE
        if style == "percentile":
            sets = nncf.quantization.range_estimator.RangeEstimatorParametersSet
            advanced["activations_range_estimator_params"] = sets.MEAN_NO_OUTLIERS_MINMAX
        rows = list(context.calibration_inputs())
        with quietly(), signal_stack_kept():
            model = nncf.quantize(
                read(context.graph_path),
                nncf.Dataset(rows),
                subset_size=len(rows),
                model_type=nncf.ModelType.TRANSFORMER if style == "smooth" else None,
                preset=presets.PERFORMANCE if style == "min-max" else presets.MIXED,
                advanced_parameters=nncf.AdvancedQuantizationParameters(**advanced),
            )
        return saved(model, directory)


def _loaded(name: str) -> Any:
    """OpenVINO, or NNCF, which uses it; neither sends reports of their use."""
    withhold_telemetry()
    with quietly():
        return library(name)


def read(path: Path) -> Any:
    """A graph in memory, with constants folded."""
    model = _loaded("openvino").Core().read_model(path)
    passes = _loaded("openvino.passes")  # not loaded with the rest
    manager = passes.Manager()
    manager.register_pass(passes.ConstantFolding())
    manager.run_passes(model)
    return model


def saved(model: Any, directory: Path, *, halve: bool = False) -> BuiltGraph:
    """Write `model.xml` and `model.bin`, with weights in fp16 if `halve`."""
    path = directory / "model.xml"
    _loaded("openvino").save_model(model, path, compress_to_fp16=halve)
    ends = {name for port in (*model.inputs, *model.outputs) for name in port.get_names()}
    path.write_text(slimmed(path.read_text(encoding="utf-8"), ends), encoding="utf-8")
    return BuiltGraph(path, (path, path.with_suffix(".bin")))


def slimmed(xml: str, ends: Collection[str]) -> str:
    """A description (`model.xml`) without what the engine does not need; names of inputs and outputs, `ends`, stay.

    A small network's description is a fifth the size of its int8 weights: layers' names, inferred sizes, notes of the
    tools, indentation.
    """
    net = ET.fromstring(xml)  # noqa: S314 - a graph of our own, or of an artifact that was verified
    for layer in net.iterfind("layers/layer"):
        if layer.get("type") not in {"Parameter", "Result"}:
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
    """The points at which an int8 graph rounds activations, in the order of its layers."""
    with explained("OpenVINO"):
        model = _loaded("openvino").Core().read_model(graph)
        return tuple(op.get_friendly_name() for op in model.get_ordered_ops() if _is_point(op))


def undone(graph: Path, directory: Path, points: Collection[str]) -> BuiltGraph:
    """The graph without rounding at these points, written to `directory`."""
    with explained("OpenVINO"):
        model = _loaded("openvino").Core().read_model(graph)
        for op in model.get_ordered_ops():
            if _is_point(op) and op.get_friendly_name() in points:
                for reader in list(op.output(0).get_target_inputs()):
                    reader.replace_source_output(op.input_value(0))
        return saved(model, directory)


def grouped(points: Sequence[str], most: int) -> tuple[LayerGroup, ...]:
    """At most `most` groups of neighbouring points, of equal size but for the last.

    >>> grouped(["a", "b", "c", "d", "e"], 2)
    (('a', 'b', 'c'), ('d', 'e'))
    """
    size = -(-len(points) // max(1, most))
    return tuple(tuple(points[start : start + size]) for start in range(0, len(points), size))


def shares(groups: Sequence[LayerGroup]) -> tuple[int, ...]:
    """How many groups to undo together in turn: 1, 2, 4, …, and never all of them.

    >>> shares([("a",)] * 6)
    (1, 2, 4)
    """
    doubled = (2**power for power in range(len(groups).bit_length()))
    return tuple(count for count in doubled if count < len(groups))


def _is_point(op: Any) -> bool:
    return bool(op.get_type_name() == "FakeQuantize" and op.input_value(0).get_node().get_type_name() != "Constant")
