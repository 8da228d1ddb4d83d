"""From a module to files: the ONNX graph, PyTorch's own program, and the weights.

Source: PyTorch 2.13, `torch.onnx.export(dynamo=True)`, which goes by way of `torch.export.export`.
"""

from __future__ import annotations

import importlib.util
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import nn

from stoker.artifacts.elements import Arrays
from stoker.artifacts.variations import rows
from stoker.engines.torch_module import as_tensor
from stoker.errors import BadArtifact, first_line
from stoker.exporting.flat import Flat
from stoker.records import TensorSpec

OPSET = 20
GRAPH, PROGRAM, WEIGHTS = "model.onnx", "model.pt2", "model.safetensors"
_MOST_INLINE_BYTES = 1_800_000_000
"""A protobuf file ends at 2 GiB; beyond this the weights lie in `model.onnx.data` beside it."""
_TRACED_SAMPLES = 3
"""One would be taken for a fixed size, two is the width of too many other things."""


class Untraceable(BadArtifact):
    """A model that cannot be asked or traced in the way it is called."""


def trace(flat: Flat, samples: Arrays, inputs: tuple[TensorSpec, ...]) -> torch.export.ExportedProgram:
    """PyTorch's own program of the model, every named dimension left open.

    Raises:
        BadArtifact: the model fixes a size, or does what cannot be traced.
    """
    few = rows(samples, slice(_TRACED_SAMPLES))
    tensors = tuple(as_tensor(few[spec.name]) for spec in inputs)
    dims = tuple(
        {at: torch.export.Dim.DYNAMIC for at, dim in enumerate(spec.shape) if isinstance(dim, str)} for spec in inputs
    )
    try:
        with _quiet(), torch.no_grad():
            program = torch.export.export(flat, tensors, dynamic_shapes=(dims,))
    except Exception as error:  # the exporter's errors have no base of their own, and the model is anybody's code
        raise _untraceable(error) from error
    program.example_inputs = None  # they would be stored as a pickle
    return program


def write_graph(
    program: torch.export.ExportedProgram, path: Path, inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...]
) -> None:
    """Write the ONNX graph, its inputs and outputs named, and its dimensions too.

    Raises:
        BadArtifact: an operation has no counterpart in ONNX, or the exporter's library is not installed.
    """
    if importlib.util.find_spec("onnxscript") is None:
        raise BadArtifact("The package onnxscript is not installed here", remedy="pip install 'stoker[models]'")
    try:
        with _quiet():
            exported = torch.onnx.export(
                program, dynamo=True, opset_version=OPSET, verbose=False,
                input_names=[spec.name for spec in inputs], output_names=[spec.name for spec in outputs],
            )  # fmt: skip
    except Exception as error:  # as above
        raise _untraceable(error) from error
    assert exported is not None, "an export with dynamo=True returns its program"
    graph = exported.model.graph
    for values, specs in ((graph.inputs, inputs), (graph.outputs, outputs)):
        for value, spec in zip(values, specs, strict=True):
            _name_dims(value, spec)
    for node in graph.all_nodes():  # stack traces, with the paths of whoever exported
        node.metadata_props.clear()
    num_bytes = sum(tensor.nbytes for tensor in program.state_dict.values())
    exported.save(path, external_data=num_bytes > _MOST_INLINE_BYTES)


def write_weights(module: nn.Module, path: Path) -> None:
    """Write every parameter and buffer by name; tied ones are written twice."""
    weights = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in module.state_dict().items()}
    safetensors.torch.save_file(weights, path)


def write_program(program: torch.export.ExportedProgram, path: Path) -> None:
    """Write PyTorch's own program, without pickles in it, for `torch.export.load` elsewhere; Stoker never opens it."""
    with _quiet():
        torch.export.save(program, path)


def _name_dims(value: Any, spec: TensorSpec) -> None:
    if value.shape is None:
        return
    for at, dim in enumerate(spec.shape):
        if isinstance(dim, str):
            value.shape[at] = dim


def _untraceable(error: Exception) -> Untraceable:
    said = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in said if "special" in line or "aten" in line or "data-dependent" in line]
    return Untraceable(
        f"The model cannot be exported: {type(error).__name__}: {(telling or said or [first_line(error)])[0][:300]}",
        remedy="Write `forward` for any number of samples, without Python branches on the values of tensors.",
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what the exporter says about itself: deprecations of its own, packages it would also know."""
    logger = logging.getLogger("torch.onnx")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)
