"""Which candidates suit a graph and a machine, cheap ones first."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

from stoker.compressing.candidates import onnxruntime, openvino
from stoker.compressing.candidates.base import Candidate
from stoker.compressing.graphs import GraphKind
from stoker.records import EngineName, ServingPrecision

_STYLES: dict[openvino.Style, str] = {
    "smooth": "static, SmoothQuant, bias correction (NNCF)",
    "mixed": "static, extremes, zero points for activations, bias correction (NNCF)",
    "plain": "static, extremes, zero points for activations (NNCF)",
    "percentile": "static, extremes without outliers, bias correction (NNCF)",
    "min-max": "static, symmetric extremes, bias correction (NNCF)",
}
_HALVES: tuple[ServingPrecision, ...] = ("bf16", "fp16")
"""fp16 is finer than bf16 and ends at 65,504: what is larger becomes infinite, and the search refuses that."""
_EFFORTS: dict[onnxruntime.Calibration, float] = {"MinMax": 1.0, "Percentile": 4.0, "Entropy": 6.0}
"""Histograms of all activations take several times as long as their extremes."""


def candidates_for(
    kind: GraphKind, fast_dtypes: Collection[str], given: tuple[EngineName, ServingPrecision]
) -> tuple[Candidate, ...]:
    """What to try, in this order; the most promising in 8 bits is the first of those.

    Args:
        kind: what the graph is made of; a quantised one is not quantised again, nor computed in 16 bits.
        fast_dtypes: what the device multiplies natively.
        given: engine and precision of the model given, which is not tried again as it is.
    """
    others = tuple(one for one in _as_they_are() if (one.engine, one.precision) != given)
    if kind.quantised:
        return ()
    halves = tuple(_half(one) for one in _HALVES if one in fast_dtypes and given[1] == "fp32")
    if not kind.heavy:
        return (*halves, *others)
    styles = [style for style in _STYLES if style != "smooth" or kind.has_attention]
    # In convolutions, scales taken in each batch are slower than fp32.
    dynamic = () if kind.has_convolutions else (_dynamic(),)
    rest: ServingPrecision = "int8+bf16" if "bf16" in fast_dtypes else "int8"
    return (*halves, *others, *(_static(style, rest) for style in styles), *dynamic, *map(_qdq, _EFFORTS))


def as_given(given: tuple[EngineName, ServingPrecision]) -> tuple[Candidate, ...]:
    """The form that the model given is in, for other graphs than its own; none where no engine's is like it."""
    return tuple(one for one in _as_they_are() if (one.engine, one.precision) == given)


def _as_they_are() -> tuple[Candidate, ...]:
    return (
        Candidate("fp32 openvino", "as it is", "openvino", "fp32", openvino.as_it_is),
        Candidate("fp32 onnxruntime", "as it is", "onnxruntime", "fp32", onnxruntime.as_it_is),
    )


def _half(precision: ServingPrecision) -> Candidate:
    how = f"computed in {precision}, weights stored in fp16"
    return Candidate(f"{precision} openvino", how, "openvino", precision, openvino.halved)


def _static(style: openvino.Style, precision: ServingPrecision) -> Candidate:
    make = partial(openvino.quantised, style=style)
    return Candidate(f"int8 {style}", _STYLES[style], "openvino", precision, make)


def _dynamic() -> Candidate:
    how = "scales of activations taken in each batch (ONNX Runtime)"
    return Candidate("int8 dynamic", how, "onnxruntime", "int8", onnxruntime.dynamic)


def _qdq(calibration: onnxruntime.Calibration) -> Candidate:
    word = calibration.lower()
    make = partial(onnxruntime.static, calibration=calibration)
    how = f"static, {word} calibration (ONNX Runtime)"
    return Candidate(f"int8 qdq {word}", how, "onnxruntime", "int8", make, _EFFORTS[calibration])
