"""Export a PyTorch module: its ONNX graph, PyTorch's own program, and its weights.

The module becomes a `Flat` (tensors in by position, a tuple of tensors out), is asked before anything is traced, then
traced with every named dimension left open. Stoker loads no program of PyTorch: in torch 2.13 `torch.export.load`
unpickles parts of its file (`torch/export/pt2_archive/_package.py`: `torch.load(…, weights_only=False)`,
`pickle.loads`) and evaluates sizes given as text (`sympy.sympify`), so an untrusted file could run code.
Source: PyTorch 2.13, `torch.onnx.export(dynamo=True)`, which uses `torch.export.export`.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import inspect
import logging
import re
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from numpy.typing import NDArray
from torch import nn

from stoker.activity import doing
from stoker.artifacts import Artifact, read_settings
from stoker.artifacts.dtypes import Arrays, dtype_of
from stoker.artifacts.golden import rows
from stoker.engines.base import cannot_run
from stoker.errors import BadArtifact, StokerError, first_line
from stoker.exporting import exact_operators, recurrent_layers
from stoker.exporting.proofs import (
    NUM_SAMPLES,
    Answer,
    Trial,
    contiguous,
    eight_samples,
    is_held,
    padded_specs,
    prove_alone,
    with_lengths,
)
from stoker.exporting.recurrent_layers import has_recurrence, is_own_program, whole_recurrences
from stoker.exporting.signature import About, input_specs, output_specs, ranges, require_varied
from stoker.exporting.version_writer import Exported, require_place, write_version
from stoker.records import BATCH, ArtifactSource, Proof, TensorSpec
from stoker.stepping.model import weights_digest

Inputs = torch.Tensor | Sequence[torch.Tensor] | Mapping[str, torch.Tensor]
"""Example inputs, first dimension samples: one, several by position, or by the names of `forward`'s arguments."""

_ORACLE = "PyTorch"
_BF16 = dtype_of("BF16")
_HALVES = (torch.float16, torch.bfloat16)


def export_module(module: nn.Module, inputs: Inputs, model: str | Path, about: About | None = None) -> Artifact:
    """Export a module as it is, in its mode, as the next version of a model.

    Args:
        module: takes tensors whose first dimension is the samples, and gives such tensors.
        inputs: at least two real examples; eight of them are asked, and four kept with their answers.
        model: the model's directory, such as `models/digits`.
        about: names, sizes and limits.

    Raises:
        BadArtifact: its answers depend on what else is in the batch, it cannot be traced, or no engine computes the
            same; with the numbers.
    """
    if isinstance(inputs, Mapping):
        named, call = dict(inputs), by_name(tuple(inputs))
    else:
        given = (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs)
        named, call = dict(zip(names_of_arguments(module, len(given)), given, strict=True)), by_position
    return export_call(module, call, {name: as_array(tensor) for name, tensor in named.items()}, Path(model), about)


def export_call(module: nn.Module, call: Call, samples: Arrays, model: Path, about: About | None = None) -> Artifact:
    """Export a module that is called through a function; see `export_module`.

    Args:
        module: whose weights are kept.
        call: takes the module and the inputs by position, and can be traced.
        samples: example inputs by name, in the order of `call`'s arguments.
        model: the model's directory.
        about: names, sizes and limits.

    Raises:
        BadArtifact: see `export_module`.
    """
    about = about or About()
    require_place(model)
    if module.training:  # a forward pass would change its running statistics
        module = copy.deepcopy(module)
    flat = Flat(module, call)
    inputs = input_specs(samples, about.dynamic)
    trial = Trial(
        samples=eight_samples(contiguous(samples)),
        inputs=inputs,
        dims=ranges(inputs, about.dims),
        most_rows=read_settings(model).max_batch_rows,
    )
    require_varied(trial)
    answer = _original(flat, trial)
    trial = with_lengths(trial, answer)
    outputs = output_specs(answer, trial)
    proof = _require_independent_samples(answer, trial, outputs, about.limit)
    inputs, padding = padded_specs(_ORACLE, answer, trial, outputs, about.pad, about.limit)
    with doing("tracing the model"):
        program = trace(flat, trial.samples, inputs)

    def write_files(directory: Path) -> None:
        with doing("writing the graph"):
            write_graph(program, directory / GRAPH, inputs, outputs)
        write_weights(module, directory / WEIGHTS)
        if not is_own_program(program):
            write_program(program, directory / PROGRAM)

    exported = Exported(
        about=about,
        graph=GRAPH,
        trial=trial.with_inputs(inputs),
        outputs=outputs,
        oracle=answer,
        oracle_name=_ORACLE,
        source=about.source or ArtifactSource(kind="module", name=type(module).__name__, digest=weights_digest(module)),
        proofs=(proof, *padding),
        remedy=_remedy_for_halves(module),
    )
    return write_version(model, exported, write_files)


def _remedy_for_halves(module: nn.Module) -> str:
    """The remedy if no engine agrees with a module that has weights of 16 bits; empty for others."""
    halves = sorted({str(tensor.dtype) for tensor in module.parameters() if tensor.dtype in _HALVES})
    if not halves:
        return ""
    return (
        f"It has weights in {' and '.join(halves)}, whose rounding engines do not repeat: export module.float(), "
        "and let `stoker compress` choose a shorter type."
    )


def _original(flat: Flat, trial: Trial) -> Answer:
    """The module as an answering function.

    Raises:
        BadArtifact: it cannot answer the example inputs, or does not return tensors.
    """
    tensors = [as_tensor(trial.samples[spec.name]) for spec in trial.inputs]
    parameter = next(flat.parameters(), None)
    try:
        with torch.no_grad():
            if parameter is not None:
                tensors = [tensor.to(parameter.device) for tensor in tensors]
            result = flat.call(*tensors)
    except StokerError:
        raise
    except Exception as error:  # a user's module may raise anything
        shapes = ", ".join(f"{spec.name} {list(trial.samples[spec.name].shape)}" for spec in trial.inputs)
        raise Untraceable(
            f"The model cannot answer the example inputs ({shapes}): {type(error).__name__}: {first_line(error)}",
            remedy="Give examples as the model takes them, samples first. Of a run Job(fields=stoker.Fields(inputs=…)) "
            "names what goes in; of one that is finished call stoker.export(stoker.load(RUN).model(), OUT, inputs=…).",
        ) from error
    return answering(flat, [spec.name for spec in trial.inputs], list(named_outputs(result)))


def _require_independent_samples(answer: Answer, trial: Trial, outputs: tuple[TensorSpec, ...], limit: float) -> Proof:
    """Prove that an answer does not depend on other samples of the batch.

    Raises:
        BadArtifact: it does, an output does not begin with the samples, or has the name of an input.
    """
    if stray := [spec for spec in outputs if spec.shape[:1] != (BATCH,)]:
        raise BadArtifact(
            f"The first dimension of the output {stray[0].name!r} {list(stray[0].shape)} is not the samples",
            remedy="Give each sample its answer; means over a batch cannot be served. What the loss alone needs may be "
            "returned `if self.training`; or call stoker.export(module, OUT, inputs=…) of a module around run.model().",
        )
    if shared := sorted({spec.name for spec in outputs} & {spec.name for spec in trial.inputs}):
        raise BadArtifact(
            f"The output {shared[0]!r} is named like an input, and a graph has one tensor of a name",
            remedy="Return it under another name.",
        )
    proof = prove_alone(_ORACLE, answer, trial, limit, (NUM_SAMPLES,))
    if not is_held(proof) and not _repeats(answer, trial, limit):
        raise BadArtifact(
            "The model answers the same samples differently from call to call",
            remedy="In evaluation mode it may draw nothing at random and count nothing: look for F.dropout without "
            "training=self.training, random numbers in `forward`, and buffers or attributes that every pass changes.",
        )
    if not is_held(proof):
        raise BadArtifact(
            f"A sample's answer depends on what else is in the batch: {proof.what} differ by {proof.error:.2g} of the "
            f"largest value, at most {limit:g} is allowed",
            remedy="Call `model.eval()` if it is in training mode; look for operations over dimension 0 otherwise.",
        )
    return proof


def _repeats(answer: Answer, trial: Trial, limit: float) -> bool:
    """Whether two calls with the same samples have the same answer, within `limit` of its largest value."""
    first, second = answer(trial.samples), answer(trial.samples)

    def is_near(one: NDArray[Any], other: NDArray[Any]) -> bool:
        largest = float(np.abs(np.nan_to_num(one, posinf=0, neginf=0)).max(initial=0))
        return np.allclose(one, other, rtol=0, atol=limit * largest, equal_nan=True)

    return all(is_near(array, second[name]) for name, array in first.items())


OPSET = 20
GRAPH, PROGRAM, WEIGHTS = "model.onnx", "model.pt2", "model.safetensors"
_MOST_INLINE_BYTES = 1_800_000_000
"""A protobuf file holds at most 2 GiB; larger weights go to `model.onnx.data`."""
_TRACED_SAMPLES = 3
"""1 would be traced as a fixed size, 2 is too often the size of other dimensions."""


_FIXED_SIZE = re.compile(
    r"L\['inputs'\]\[(\d+)\]\.size\(\)\[(\d+)\] as dynamic but your code specialized it .*\((\d+)\)"
)
"""PyTorch's words for a size of an input that was to vary, and is a number in the trace."""


class Untraceable(BadArtifact):
    """A model that cannot be run or traced in the way it is called."""


def trace(flat: Flat, samples: Arrays, inputs: tuple[TensorSpec, ...]) -> torch.export.ExportedProgram:
    """PyTorch's program of the model, every named dimension left open.

    Raises:
        BadArtifact: the model fixes a size, or cannot be traced.
    """
    few = rows(samples, slice(_TRACED_SAMPLES))
    tensors = tuple(as_tensor(few[spec.name]) for spec in inputs)
    dims = tuple(
        {axis: torch.export.Dim.DYNAMIC for axis, dim in enumerate(spec.shape) if isinstance(dim, str)}
        for spec in inputs
    )
    varies = any(isinstance(dim, str) and dim != BATCH for spec in inputs for dim in spec.shape)
    recurrences = whole_recurrences() if varies and has_recurrence(flat) else nullcontext()
    try:
        with _quiet(), torch.no_grad(), recurrences:
            program = torch.export.export(flat, tensors, dynamic_shapes=(dims,))
    except Exception as error:  # the exporter's errors have no common base, and user code may raise anything
        if fixed := _FIXED_SIZE.search(str(error)):
            name, axis = inputs[int(fixed[1])].name, fixed[2]
            raise Untraceable(
                f"The model cannot be exported: its code fixes dimension {axis} of {name!r} at {fixed[3]}",
                remedy=f"Write {name}.shape[{axis}] for len({name}) and int(…); no Python branches or loops over it.",
            ) from error
        raise _untraceable(error) from error
    program.example_inputs = None  # they would be stored as a pickle
    return program


def write_graph(
    program: torch.export.ExportedProgram, path: Path, inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...]
) -> None:
    """Write the ONNX graph with named inputs, outputs and dimensions.

    Raises:
        BadArtifact: an operator has no counterpart in ONNX, or onnxscript is not installed.
    """
    if importlib.util.find_spec("onnxscript") is None:
        raise BadArtifact("The package onnxscript is not installed here", remedy="pip install 'stoker[models]'")
    try:
        with _quiet():
            exported = torch.onnx.export(
                program,
                dynamo=True,
                opset_version=OPSET,
                verbose=False,
                input_names=[spec.name for spec in inputs],
                output_names=[spec.name for spec in outputs],
                custom_translation_table={
                    torch.ops.aten.embedding.default: _embedding,
                    **recurrent_layers.translations(),
                    **exact_operators.translations(),
                },
            )
    except Exception as error:  # as above
        raise _untraceable(error) from error
    assert exported is not None, "an export with dynamo=True returns its program"
    graph = exported.model.graph
    for values, specs in ((graph.inputs, inputs), (graph.outputs, outputs)):
        for value, spec in zip(values, specs, strict=True):
            named = {axis: dim for axis, dim in enumerate(spec.shape) if isinstance(dim, str)}
            if value.shape is not None:
                for axis, dim in named.items():
                    value.shape[axis] = dim
    for node in graph.all_nodes():  # stack traces, with paths of this machine
        node.metadata_props.clear()
    num_bytes = sum(tensor.nbytes for tensor in program.state_dict.values())
    exported.save(path, external_data=num_bytes > _MOST_INLINE_BYTES)


def _embedding(weight: Any, indices: Any, padding_idx: int = -1, scale_grad_by_freq: int = 0, sparse: int = 0) -> Any:
    """The ONNX nodes of `aten.embedding`, which has no negative indices; ONNX would count those from the table's end.

    They become indices beyond the table, which engines refuse.
    """
    del padding_idx, scale_grad_by_freq, sparse  # of gradients alone
    op = importlib.import_module("onnxscript").opset20
    zero = op.CastLike(op.Constant(value_int=0), indices)
    num_rows = op.CastLike(op.Constant(value_int=weight.shape[0]), indices)
    return op.Gather(weight, op.Where(op.Less(indices, zero), op.Sub(indices, num_rows), indices))


def write_weights(module: nn.Module, path: Path) -> None:
    """Write every parameter and buffer by name; tied ones are written twice."""
    weights = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in module.state_dict().items()}
    safetensors.torch.save_file(weights, path)


def write_program(program: torch.export.ExportedProgram, path: Path) -> None:
    """Write PyTorch's program without pickles, for `torch.export.load` elsewhere; Stoker never opens it."""
    with _quiet():
        torch.export.save(program, path)


def _untraceable(error: Exception) -> Untraceable:
    in_use = (value for frame, _ in traceback.walk_tb(error.__traceback__) for value in frame.f_locals.values())
    if any(isinstance(value, nn.utils.rnn.PackedSequence) for value in in_use):
        return Untraceable(
            "The model cannot be exported: it packs sequences (pack_padded_sequence), whose sizes depend on values",
            remedy="In evaluation let the recurrent layer run over the padded steps; a sample's last one is "
            "x[rows, lengths - 1].",
        )
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [first_line(error)]
    causes = [line for line in lines if "special" in line or "aten" in line or "data-dependent" in line]
    return Untraceable(
        f"The model cannot be exported: {type(error).__name__}: {(causes or lines)[0][:300]}",
        remedy="Write `forward` for any number of samples, without Python branches on the values of tensors.",
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the exporter's messages about itself, such as its own deprecations, and what it does not simplify."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


def answering(module: nn.Module, inputs: Sequence[str], outputs: Sequence[str]) -> Answer:
    """A module as an answering function: in its current mode, without gradients.

    Args:
        module: takes its inputs in the order of `inputs`, returns a tuple in the order of `outputs`.
        inputs: names of the inputs.
        outputs: names of the outputs.
    """
    parameter = next(module.parameters(), None)
    device = torch.device("cpu") if parameter is None else parameter.device

    def answer(arrays: Arrays) -> Arrays:
        try:
            with torch.no_grad():
                tensors = module(*(as_tensor(arrays[name]).to(device) for name in inputs))
        except Exception as error:  # the module is user code
            raise cannot_run("PyTorch", error) from error
        return {name: as_array(tensor) for name, tensor in zip(outputs, tensors, strict=True)}

    return answer


def as_tensor(array: NDArray[Any]) -> torch.Tensor:
    """The array as a tensor; shares memory if the array is writable and contiguous."""
    if not (array.flags.writeable and array.flags.c_contiguous):
        array = array.copy()
    if array.dtype == _BF16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def as_array(tensor: torch.Tensor) -> NDArray[Any]:
    """A copy of the tensor as an array."""
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().copy().view(_BF16)
    return tensor.numpy().copy()


Call = Callable[..., Any]
"""`call(module, *inputs)` returns the module's output."""


class Flat(nn.Module):
    """A module with tensors in by position and a tuple of tensors out, as exporters and engines take it."""

    def __init__(self, module: nn.Module, call: Call) -> None:
        super().__init__()
        self.train(module.training)
        self.module = module
        self._call = call

    def call(self, *inputs: torch.Tensor) -> Any:
        """The module's own output."""
        return self._call(self.module, *inputs)

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Every output, in the order of `named_outputs`."""
        return tuple(named_outputs(self.call(*inputs)).values())


def named_outputs(result: Any) -> dict[str, torch.Tensor]:
    """A module's outputs by name: `output`, `output_0` … of several, or the keys of a dict; None is left out.

    Raises:
        BadArtifact: an output is not a tensor.
    """
    if isinstance(result, torch.Tensor):
        return {"output": result}
    if isinstance(result, Mapping):
        named = {str(name): value for name, value in result.items()}
    elif isinstance(result, tuple | list):
        named = {f"output_{i}": value for i, value in enumerate(result)}
    else:
        raise BadArtifact(
            f"The model returns a {type(result).__name__}; an exported one gives tensors",
            remedy="Return a tensor, a tuple of tensors, or a dict of them.",
        )
    named = {name: value for name, value in named.items() if value is not None}
    for name, value in named.items():
        if not isinstance(value, torch.Tensor):
            raise BadArtifact(
                f"The model's output {name!r} is a {type(value).__name__}; an exported one gives tensors",
                remedy="Return a tensor, a tuple of tensors, or a dict of them.",
            )
    return named


def by_position(module: nn.Module, *inputs: torch.Tensor) -> Any:
    """Call a module with its inputs in order."""
    return module(*inputs)


def by_name(names: tuple[str, ...]) -> Call:
    """Call a module with keyword arguments of these names."""
    return lambda module, *inputs: module(**dict(zip(names, inputs, strict=True)))


def names_of_arguments(module: nn.Module, count: int) -> tuple[str, ...]:
    """Names of `forward`'s first arguments; `input_0` … where it does not name them."""
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(module.forward).parameters.values()
    named = [parameter.name for parameter in parameters if parameter.kind in positional][:count]
    if len(named) == count:
        return tuple(named)
    return ("input",) if count == 1 else tuple(f"input_{i}" for i in range(count))
