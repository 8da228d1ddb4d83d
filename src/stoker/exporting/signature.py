"""A model's signature, found by running it; and what the caller of an export adds to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from stoker.artifacts import datatype_of
from stoker.artifacts.dtypes import Arrays
from stoker.artifacts.golden import rows, sizes_of
from stoker.errors import BadArtifact, ServiceError
from stoker.exporting.proofs import BATCH_SIZES, LIMIT, Answer, Trial
from stoker.records import BATCH, ArtifactSource, Datatype, DynamicDim, InputColumn, TensorSpec

Dynamic = Mapping[str, Mapping[int, str]]
"""Names of dimensions that vary, other than the batch: {"input_ids": {1: "tokens"}}."""


def input_specs(samples: Arrays, dynamic: Dynamic) -> tuple[TensorSpec, ...]:
    """Input specs from examples and the names of dimensions that vary.

    Raises:
        BadArtifact: there is no such input or dimension, or the protocol has no such element type.
    """
    for name, dims in dynamic.items():
        count = samples[name].ndim if name in samples else 0
        if wrong := [dim for dim in dims if not 0 < dim < count]:
            raise BadArtifact(
                f"{name!r} has no dimension {wrong[0]} that could vary",
                remedy=f"Inputs are {', '.join(samples)}; dimensions count from 1, 0 is the batch.",
            )
    return tuple(
        TensorSpec(
            name=name,
            datatype=_datatype(name, samples),
            shape=(BATCH, *(dynamic.get(name, {}).get(axis, array.shape[axis]) for axis in range(1, array.ndim))),
        )
        for name, array in samples.items()
    )


def output_specs(answer: Answer, trial: Trial) -> tuple[TensorSpec, ...]:
    """Output specs from the answers to two requests that differ in every size that may vary.

    A dimension that varies unlike any input's gets a name of its own. Without a batch a size of 1 cannot be cut: if the
    model answers when it is doubled, an output size that changes then varies too.
    """
    fewer = rows(trial.samples, slice(BATCH_SIZES[1])) if trial.is_batched else trial.samples
    other = trial.cut(fewer)
    outputs, other_outputs = answer(trial.samples), answer(other)
    larger = _larger(answer, trial)
    sizes = sizes_of(trial.samples, trial.inputs), sizes_of(other, trial.inputs)
    specs: list[TensorSpec] = []
    for name, array in outputs.items():
        shape = _shape(name, (array.shape, other_outputs[name].shape), sizes)
        if name in larger and larger[name].ndim == len(shape):
            pairs = zip(shape, larger[name].shape, strict=True)
            shape = tuple(
                f"{name}_{axis}" if isinstance(dim, int) and dim != size else dim
                for axis, (dim, size) in enumerate(pairs)
            )
        specs.append(TensorSpec(name=name, datatype=_datatype(name, outputs), shape=shape))
    return tuple(specs)


def _larger(answer: Answer, trial: Trial) -> Arrays:
    """Answers with every named size of 1 doubled; empty if there is none, or the model cannot answer."""
    ones = {dim for dim, size in trial.sizes.items() if size == 1}
    if trial.is_batched or not ones:
        return {}
    doubled = dict(trial.samples)
    for spec in trial.inputs:
        for axis, dim in enumerate(spec.shape):
            if dim in ones:
                doubled[spec.name] = np.concatenate([doubled[spec.name]] * 2, axis=axis)
    try:
        return answer(doubled)
    except ServiceError:
        return {}


def _shape(
    name: str, shapes: tuple[Sequence[int], Sequence[int]], sizes: tuple[dict[str, int], dict[str, int]]
) -> tuple[int | str, ...]:
    """An output's shape: a size that changes as exactly one input dimension does has that dimension's name."""
    pairs = {dim: (size, sizes[1][dim]) for dim, size in sizes[0].items()}
    each = list(pairs.values())
    named = {pair: dim for dim, pair in pairs.items() if pair[0] != pair[1] and each.count(pair) == 1}
    dims: list[int | str] = []
    for axis, pair in enumerate(zip(*shapes, strict=True)):
        dim = named.get(pair, f"{name}_{axis}")
        if pair[0] == pair[1]:
            dims.append(pair[0])
        else:
            dims.append(f"{name}_{axis}" if dim == BATCH and axis > 0 else dim)
    return tuple(dims)


def require_varied(trial: Trial) -> None:
    """Refuse examples that show a named dimension at one size only.

    Raises:
        BadArtifact: a named dimension cannot be cut below its size in the examples.
    """
    for dim, size in trial.sizes.items():
        if trial.shorter[dim] >= size:
            raise BadArtifact(
                f"The dimension {dim!r} may vary, but the example inputs can only show it at {size}",
                remedy=f"Give examples in which it is at least {2 * size}, or allow it to be smaller.",
            )


def ranges(inputs: Sequence[TensorSpec], given: Sequence[DynamicDim]) -> tuple[DynamicDim, ...]:
    """Allowed sizes of the inputs' named dimensions: those given, or any."""
    known = {dim.name: dim for dim in given}
    names = dict.fromkeys(dim for spec in inputs for dim in spec.shape if isinstance(dim, str))
    return tuple(known.get(name, DynamicDim(name=name)) for name in names if name != BATCH)


def _datatype(name: str, tensors: Arrays) -> Datatype:
    try:
        return datatype_of(tensors[name].dtype)
    except KeyError as error:
        raise BadArtifact(
            f"{name!r} has elements of {tensors[name].dtype}, which the Open Inference Protocol has no name for"
        ) from error


@dataclass(frozen=True, kw_only=True)
class About:
    """Description of an exported model, and the dimensions that vary in it.

    Args:
        name: the model's (default: its directory's).
        dynamic: names of dimensions that vary, other than the batch: {"input_ids": {1: "tokens"}}.
        dims: allowed sizes of those, if not any.
        pad: padding values by input; None: proposed where there is an attention mask.
        labels: class names by output.
        columns: the columns of a table by the input that they are the elements of, with the words of categories.
        metrics: measured values, such as {"test/accuracy": 0.93}.
        source: origin of the model.
        notes: remarks for its users.
        takes_prepared: whether inputs are samples as a job's data source prepares them, or as it stores them.
        limit: largest allowed difference from the original's answers, relative to the largest value.
    """

    name: str | None = None
    dynamic: Dynamic = field(default_factory=dict)
    dims: Sequence[DynamicDim] = ()
    pad: Mapping[str, float] | None = None
    labels: Mapping[str, Sequence[str]] = field(default_factory=dict)
    columns: Mapping[str, Sequence[InputColumn]] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    source: ArtifactSource | None = None
    notes: Sequence[str] = ()
    takes_prepared: bool | None = None
    limit: float = LIMIT
