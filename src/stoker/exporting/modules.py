"""Exporting a live module."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from stoker.artifacts import Artifact, read_settings
from stoker.artifacts.elements import Arrays
from stoker.engines.torch_module import TorchModule, as_array, as_tensor
from stoker.errors import BadArtifact, StokerError, first_line
from stoker.exporting.about import About
from stoker.exporting.checking import Answer, is_held, prove_alone
from stoker.exporting.flat import Call, Flat, by_name, by_position, named_outputs, names_of_arguments
from stoker.exporting.padding import padded_specs
from stoker.exporting.signature import input_specs, output_specs, ranges, require_varied
from stoker.exporting.torch_graph import (
    GRAPH,
    PROGRAM,
    WEIGHTS,
    Untraceable,
    trace,
    write_graph,
    write_program,
    write_weights,
)
from stoker.exporting.trial import NUM_SAMPLES, Trial, contiguous, eight
from stoker.exporting.writing import Exported, require_place, write_version
from stoker.records import BATCH, ArtifactSource, Proof, TensorSpec
from stoker.stepping import weights_digest

Inputs = torch.Tensor | Sequence[torch.Tensor] | Mapping[str, torch.Tensor]
"""Example inputs, first dimension samples: one, several by position, or by the names of `forward`'s arguments."""

_ORACLE = "PyTorch"


def export_module(module: nn.Module, inputs: Inputs, model: str | Path, about: About | None = None) -> Artifact:
    """Export a module as it is, in its mode, as the next version of a model.

    Args:
        module: takes tensors whose first dimension is the samples, and gives such tensors.
        inputs: examples, real ones and at least two: eight of them are asked, and four kept with their answers.
        model: the model's directory, such as `models/digits`.
        about: what else is known.

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
    """Export a module that is called in another way than by its arguments alone; see `export_module`.

    Args:
        module: whose weights are kept.
        call: takes the module and the inputs by position, and can be traced.
        samples: example inputs by name, in the order of `call`'s arguments.
        model: the model's directory.
        about: what else is known.

    Raises:
        BadArtifact: see `export_module`.
    """
    about = about or About()
    require_place(model)
    if module.training:  # asking it would move its running statistics
        module = copy.deepcopy(module)
    flat = Flat(module, call)
    inputs = input_specs(samples, about.dynamic)
    trial = Trial(
        samples=eight(contiguous(samples)),
        inputs=inputs,
        dims=ranges([dim for spec in inputs for dim in spec.shape if isinstance(dim, str)], about.dims),
        most_rows=read_settings(model).max_batch_rows,
    )
    require_varied(trial)
    answer = _original(flat, trial)
    outputs = output_specs(answer, trial)
    proofs = _of_the_original(answer, trial, outputs, about.limit)
    inputs, padding = padded_specs(_ORACLE, answer, trial, outputs, about.pad, about.limit)
    program = trace(flat, trial.samples, inputs)

    def write_files(directory: Path) -> None:
        write_graph(program, directory / GRAPH, inputs, outputs)
        write_weights(module, directory / WEIGHTS)
        write_program(program, directory / PROGRAM)

    exported = Exported(
        name=about.name or model.name,
        graph=GRAPH,
        inputs=inputs,
        outputs=outputs,
        dims=trial.dims,
        oracle=answer,
        oracle_name=_ORACLE,
        trial=trial.with_inputs(inputs),
        source=about.source or ArtifactSource(kind="module", name=type(module).__name__, digest=weights_digest(module)),
        labels={name: tuple(classes) for name, classes in about.labels.items()},
        metrics=about.metrics,
        proofs=(*proofs, *padding),
        limit=about.limit,
    )
    return write_version(model, exported, write_files)


def _original(flat: Flat, trial: Trial) -> Answer:
    """How to ask the module itself.

    Raises:
        BadArtifact: it cannot answer the example inputs, or returns what is no tensor.
    """
    tensors = [as_tensor(trial.samples[spec.name]) for spec in trial.inputs]
    parameter = next(flat.parameters(), None)
    try:
        with torch.no_grad():
            found = flat.call(*(one if parameter is None else one.to(parameter.device) for one in tensors))
    except StokerError:
        raise
    except Exception as error:  # the module is anybody's code
        shapes = ", ".join(f"{spec.name} {list(trial.samples[spec.name].shape)}" for spec in trial.inputs)
        raise Untraceable(
            f"The model cannot answer the example inputs ({shapes}): {type(error).__name__}: {first_line(error)}",
            remedy="Give examples as the model takes them, samples first.",
        ) from error
    return TorchModule(flat, [spec.name for spec in trial.inputs], list(named_outputs(found))).run


def _of_the_original(answer: Answer, trial: Trial, outputs: tuple[TensorSpec, ...], limit: float) -> tuple[Proof, ...]:
    """What must hold before anything is traced: outputs have samples and names of their own, and ignore neighbours.

    Raises:
        BadArtifact: it does not hold.
    """
    if stray := [spec for spec in outputs if spec.shape[:1] != (BATCH,)]:
        raise BadArtifact(
            f"The first dimension of the output {stray[0].name!r} {list(stray[0].shape)} is not the samples",
            remedy="Give each sample its answer; means over a batch cannot be served.",
        )
    if shared := sorted({spec.name for spec in outputs} & {spec.name for spec in trial.inputs}):
        raise BadArtifact(
            f"The output {shared[0]!r} is named like an input, and a graph has one tensor of a name",
            remedy="Return it under another name.",
        )
    proof = prove_alone(_ORACLE, answer, trial, limit, (NUM_SAMPLES,))
    if not is_held(proof):
        raise BadArtifact(
            f"A sample's answer depends on what else is in the batch: {proof.what} differ by {proof.error:.2g} of the "
            f"largest value, at most {limit:g} is allowed",
            remedy="Call `model.eval()` if it is in training mode; look for operations over dimension 0 otherwise.",
        )
    return (proof,)
