"""Candidates for ONNX Runtime: fp32, int8 with fixed scales, and int8 with scales taken per batch.

What: QDQ graphs (QuantizeLinear and DequantizeLinear around each operator), weights per channel, activations calibrated
by their extremes, or by a percentile or the entropy of their histogram.
Use when: OpenVINO cannot read the graph, or the target is a GPU.
Costs: seconds. With scales taken per batch ("dynamic") an answer depends on its neighbours; the search rejects it where
that shows.
Source: ONNX Runtime's documentation, "Quantize ONNX models".
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from stoker.compressing.candidates import BuildContext, BuiltGraph, explained, library, quietly

CalibrationMethod = Literal["MinMax", "Percentile", "Entropy"]


def as_it_is(context: BuildContext, directory: Path) -> BuiltGraph:
    """The graph as it is."""
    onnx = library("onnx")
    with explained("ONNX"):
        path = directory / "model.onnx"
        onnx.save(onnx.load(context.graph_path), path)
        return BuiltGraph(path, (path,))


def dynamic(context: BuildContext, directory: Path) -> BuiltGraph:
    """Weights in int8, activations quantised by their extremes in each batch."""
    tools = library("onnxruntime.quantization")
    path = directory / "model.onnx"
    with explained("ONNX Runtime's quantiser"), quietly(), _prepared(context) as graph:
        tools.quantize_dynamic(
            graph, path, per_channel=True, weight_type=tools.QuantType.QInt8, reduce_range=not context.sums_fit
        )
    return BuiltGraph(path, (path,))


def static(context: BuildContext, directory: Path, calibration: CalibrationMethod) -> BuiltGraph:
    """Weights and activations in int8, scales as calibrated."""
    tools = library("onnxruntime.quantization")
    path = directory / "model.onnx"
    with explained("ONNX Runtime's quantiser"), quietly(), _prepared(context) as graph:
        tools.quantize_static(
            graph,
            path,
            _Reader(context),
            quant_format=tools.QuantFormat.QDQ,
            per_channel=True,
            activation_type=tools.QuantType.QUInt8,
            weight_type=tools.QuantType.QInt8,
            reduce_range=not context.sums_fit,
            calibrate_method=tools.CalibrationMethod[calibration],
        )
    return BuiltGraph(path, (path,))


class _Reader:
    """Calibration rows for ONNX Runtime (`CalibrationDataReader`)."""

    def __init__(self, context: BuildContext) -> None:
        self._rows = context.calibration_inputs()

    def get_next(self) -> Any:
        """The next row's inputs; None at the end."""
        return next(self._rows, None)

    def __iter__(self) -> _Reader:
        return self

    def __next__(self) -> Any:
        return next(self._rows)


@contextlib.contextmanager
def _prepared(context: BuildContext) -> Iterator[Path]:
    """The graph optimised and with inferred shapes, as the quantisers need it."""
    with tempfile.TemporaryDirectory() as aside:
        path = Path(aside) / "prepared.onnx"
        library("onnxruntime.quantization").quant_pre_process(
            str(context.graph_path), str(path), skip_symbolic_shape=True
        )
        _forget_shapes_of_weights(path)
        yield path


def _forget_shapes_of_weights(path: Path) -> None:
    """Remove the shapes noted of weights: the quantiser of dynamic graphs transposes weights and leaves the notes."""
    onnx = library("onnx")
    model = onnx.load(path)
    weights = {weight.name for weight in model.graph.initializer}
    kept = [value for value in model.graph.value_info if value.name not in weights]
    del model.graph.value_info[:]
    model.graph.value_info.extend(kept)
    onnx.save(model, path)
