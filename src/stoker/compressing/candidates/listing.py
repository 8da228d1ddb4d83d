"""Which candidates suit a graph and a machine, cheap ones first."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

from stoker.compressing.candidates import onnxruntime, openvino
from stoker.compressing.candidates.base import Candidate
from stoker.compressing.graphs import GraphKind

FLOATS = (
    Candidate("fp32 openvino", "as it is", "openvino", "fp32", openvino.as_it_is),
    Candidate("fp32 onnxruntime", "as it is", "onnxruntime", "fp32", onnxruntime.as_it_is),
)
BF16 = Candidate("bf16 openvino", "computed in bf16, weights stored in fp16", "openvino", "bf16", openvino.halved)
SMOOTH = Candidate(
    "int8 smooth",
    "static, SmoothQuant, bias correction (NNCF)",
    "openvino",
    "int8",
    partial(openvino.quantised, style="smooth"),
)
STATIC = tuple(
    Candidate(f"int8 {style}", how, "openvino", "int8", partial(openvino.quantised, style=style))
    for style, how in (
        ("mixed", "static, extremes, zero points for activations, bias correction (NNCF)"),
        ("percentile", "static, extremes without outliers, bias correction (NNCF)"),
        ("min-max", "static, symmetric extremes, bias correction (NNCF)"),
    )
)
QDQ = tuple(
    Candidate(
        f"int8 qdq {calibration.lower()}",
        f"static, {calibration.lower()} calibration (ONNX Runtime)",
        "onnxruntime",
        "int8",
        partial(onnxruntime.static, calibration=calibration),
    )
    for calibration in ("MinMax", "Percentile", "Entropy")
)
DYNAMIC = Candidate(
    "int8 dynamic", "scales taken in each batch (ONNX Runtime)", "onnxruntime", "int8", onnxruntime.dynamic
)


def candidates_for(kind: GraphKind, fast_dtypes: Collection[str]) -> tuple[Candidate, ...]:
    """What to try, in this order.

    Args:
        kind: what the graph is made of; a quantised one is not quantised again, nor computed in bf16.
        fast_dtypes: what the device multiplies natively.
    """
    if kind.quantised:
        return FLOATS[1:]
    bf16 = (BF16,) if "bf16" in fast_dtypes else ()
    if not kind.heavy:
        return (*FLOATS, *bf16)
    int8 = (SMOOTH, *STATIC, DYNAMIC) if kind.has_attention else (*STATIC, DYNAMIC)
    return (*FLOATS, *bf16, *int8, *QDQ)
