"""Candidates that ONNX Runtime runs: in fp32, in int8 with fixed scales, and in int8 with scales taken per batch.

What: QDQ graphs (QuantizeLinear and DequantizeLinear around each operator), weights per channel, activations as
calibrated: by their extremes, or by a percentile or the entropy of their histogram.
Use when: OpenVINO cannot read the graph, or a GPU is meant.
Costs: seconds. Scales taken per batch ("dynamic") make an answer depend on its neighbours, which the search refuses
where it shows.
Source: ONNX Runtime's documentation, "Quantize ONNX models".
"""

from __future__ import annotations

import contextlib
import io
import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from stoker.compressing.candidates import BuildContext, BuiltGraph, CannotBuild, explained

CalibrationMethod = Literal["MinMax", "Percentile", "Entropy"]


def as_it_is(workshop: BuildContext, directory: Path) -> BuiltGraph:
    """The graph as it is."""
    onnx = _onnx()
    with explained("ONNX"):
        path = directory / "model.onnx"
        onnx.save(onnx.load(workshop.graph_path), path)
        return BuiltGraph(path, (path,))


def dynamic(workshop: BuildContext, directory: Path) -> BuiltGraph:
    """Weights in int8, activations quantised by their extremes in each batch."""
    tools = _tools()
    path = directory / "model.onnx"
    with explained("ONNX Runtime's quantiser"), _quietly(), _prepared(workshop) as graph:
        tools.quantize_dynamic(graph, path, per_channel=True, weight_type=tools.QuantType.QInt8)
    return BuiltGraph(path, (path,))


def static(workshop: BuildContext, directory: Path, calibration: CalibrationMethod) -> BuiltGraph:
    """Weights and activations in int8, scales as calibrated."""
    tools = _tools()
    path = directory / "model.onnx"
    with explained("ONNX Runtime's quantiser"), _quietly(), _prepared(workshop) as graph:
        tools.quantize_static(
            graph,
            path,
            _Reader(workshop),
            quant_format=tools.QuantFormat.QDQ,
            per_channel=True,
            activation_type=tools.QuantType.QUInt8,
            weight_type=tools.QuantType.QInt8,
            calibrate_method=tools.CalibrationMethod[calibration],
        )
    return BuiltGraph(path, (path,))


class _Reader:
    """Calibration rows, in the form that ONNX Runtime asks for."""

    def __init__(self, workshop: BuildContext) -> None:
        self._rows = workshop.calibration_inputs()

    def get_next(self) -> Any:
        """The next row's inputs; None at the end."""
        return next(self._rows, None)

    def __iter__(self) -> _Reader:
        return self

    def __next__(self) -> Any:
        return next(self._rows)


def _tools() -> Any:
    try:
        from onnxruntime import quantization  # noqa: PLC0415 - an extra, which is loaded where it is used
    except ImportError as error:
        raise CannotBuild(
            "onnxruntime's quantiser is not installed", remedy="pip install 'stoker[compress]'"
        ) from error
    return quantization


def _onnx() -> Any:
    try:
        import onnx  # noqa: PLC0415 - an extra, which is loaded where it is used
    except ImportError as error:
        raise CannotBuild("onnx is not installed", remedy="pip install 'stoker[compress]'") from error
    return onnx


@contextlib.contextmanager
def _prepared(workshop: BuildContext) -> Iterator[Path]:
    """The graph optimised, with shapes inferred: what the quantisers want."""
    with tempfile.TemporaryDirectory() as aside:
        path = Path(aside) / "prepared.onnx"
        _tools().quant_pre_process(str(workshop.graph_path), str(path), skip_symbolic_shape=True)
        yield path


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Without the advice that the quantiser logs and prints."""
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.disable(logging.NOTSET)
