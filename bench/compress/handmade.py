"""Candidates made by hand with the libraries alone: what `stoker compress` is held against.

They are made before the search, with settings that a careful user of OpenVINO and NNCF would try.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import nncf
import numpy as np
import openvino

from stoker.artifacts.dtypes import Arrays

Answer = Callable[[Arrays], Arrays]


def models(graph: Path, rows: list[Arrays], *, is_transformer: bool) -> dict[str, tuple[Any, str]]:
    """Models in memory, and the precision of what is not quantised, by name."""
    core = openvino.Core()

    def quantised(**settings: Any) -> Any:
        return nncf.quantize(core.read_model(graph), nncf.Dataset(rows), subset_size=len(rows), **settings)

    found = {"fp32": (core.read_model(graph), "f32"), "bf16": (core.read_model(graph), "bf16")}
    minmax = quantised()
    mixed = quantised(preset=nncf.QuantizationPreset.MIXED)
    found |= {"int8 min-max": (minmax, "f32"), "int8 mixed": (mixed, "f32")}
    if is_transformer:
        smooth = quantised(model_type=nncf.ModelType.TRANSFORMER)
        found |= {"int8 smooth": (smooth, "f32"), "int8 smooth, rest bf16": (smooth, "bf16")}
    return found


def answering(model: Any, hint: str, outputs: Mapping[str, int]) -> Answer:
    """A compiled model on one thread."""
    settings = {
        "INFERENCE_PRECISION_HINT": hint,
        "INFERENCE_NUM_THREADS": 1,
        "NUM_STREAMS": 1,
        "ENABLE_CPU_PINNING": False,
    }
    compiled = openvino.Core().compile_model(model, "CPU", settings)
    request = compiled.create_infer_request()

    def answer(inputs: Arrays) -> Arrays:
        found = request.infer(inputs)
        return {name: np.array(found[at]) for name, at in outputs.items()}

    return answer


class Hand:
    """A model made by hand, in the form of an engine."""

    def __init__(self, answer: Answer) -> None:
        self.run = answer

    def close(self) -> None:
        """Nothing to give back."""


def clock() -> float:
    """Seconds."""
    return time.perf_counter()
