"""What a model takes and gives, as its manifest says it: found by asking, not by believing its graph.

What whoever exports knows of a model beside its weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.artifacts import datatype_of
from stoker.artifacts.dtypes import Arrays
from stoker.artifacts.golden import cut, rows, sizes_of
from stoker.errors import BadArtifact, ServiceError
from stoker.exporting.proofs import BATCH_SIZES, LIMIT, Answer, Trial
from stoker.records import BATCH, ArtifactSource, Datatype, DynamicDim, TensorSpec

Dynamic = Mapping[str, Mapping[int, str]]
"""Names of dimensions that vary beside the batch: {"input_ids": {1: "tokens"}}."""


def input_specs(samples: Arrays, dynamic: Dynamic) -> tuple[TensorSpec, ...]:
    """What a model takes, from examples and the names of what varies.

    Raises:
        BadArtifact: a name is of no input or no dimension, or an element's type is not in the protocol.
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
            shape=(BATCH, *(dynamic.get(name, {}).get(at, array.shape[at]) for at in range(1, array.ndim))),
        )
        for name, array in samples.items()
    )


def output_specs(answer: Answer, trial: Trial) -> tuple[TensorSpec, ...]:
    """What a model gives, from its answers to two requests that differ in every size that may vary.

    A dimension that varies otherwise than an input's gets a name of its own. Without a batch a size of 1 cannot be cut;
    where the model answers twice of it, an output that changes then varies too.
    """
    fewer = rows(trial.samples, slice(BATCH_SIZES[1])) if trial.is_batched else trial.samples
    other = cut(fewer, trial.inputs, trial.shorter)
    found, again = answer(trial.samples), answer(other)
    larger = _larger(answer, trial)
    sizes_of_both = sizes_of(trial.samples, trial.inputs), sizes_of(other, trial.inputs)
    return tuple(
        TensorSpec(
            name=name,
            datatype=_datatype(name, found),
            shape=_varied(name, _shape(name, (array.shape, again[name].shape), sizes_of_both), larger.get(name)),
        )
        for name, array in found.items()
    )


def _larger(answer: Answer, trial: Trial) -> Arrays:
    """Answers with every named size of 1 doubled; none where there is none, or the model cannot answer that."""
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


def _varied(name: str, shape: tuple[int | str, ...], other: NDArray[Any] | None) -> tuple[int | str, ...]:
    """A shape in which the sizes that another answer has otherwise are named."""
    if other is None or other.ndim != len(shape):
        return shape
    return tuple(
        f"{name}_{axis}" if isinstance(dim, int) and dim != size else dim
        for axis, (dim, size) in enumerate(zip(shape, other.shape, strict=True))
    )


def _shape(
    name: str, shapes: tuple[Sequence[int], Sequence[int]], sizes: tuple[dict[str, int], dict[str, int]]
) -> tuple[int | str, ...]:
    pairs = [(sizes[0][dim], sizes[1][dim]) for dim in sizes[0]]
    named = {
        pair: dim for pair, dim in zip(pairs, sizes[0], strict=True) if pair[0] != pair[1] and pairs.count(pair) == 1
    }
    dims: list[int | str] = []
    for at, pair in enumerate(zip(*shapes, strict=True)):
        dim = named.get(pair, f"{name}_{at}")
        is_misplaced = dim == BATCH and at > 0
        dims.append(pair[0] if pair[0] == pair[1] else f"{name}_{at}" if is_misplaced else dim)
    return tuple(dims)


def require_varied(trial: Trial) -> None:
    """Refuse examples in which what may vary cannot be varied.

    Raises:
        BadArtifact: a named dimension has one size in the examples, and is not allowed to be smaller.
    """
    for dim, size in trial.sizes.items():
        if trial.shorter[dim] >= size:
            raise BadArtifact(
                f"The dimension {dim!r} may vary, but the example inputs can only show it at {size}",
                remedy=f"Give examples in which it is at least {2 * size}, or allow it to be smaller.",
            )


def ranges(names: Sequence[str], given: Sequence[DynamicDim]) -> tuple[DynamicDim, ...]:
    """The sizes that named dimensions may have: those given, or any."""
    known = {dim.name: dim for dim in given}
    return tuple(known.get(name, DynamicDim(name=name)) for name in dict.fromkeys(names) if name != BATCH)


def _datatype(name: str, tensors: Arrays) -> Datatype:
    try:
        return datatype_of(tensors[name].dtype)
    except KeyError as error:
        raise BadArtifact(
            f"{name!r} has elements of {tensors[name].dtype}, which the Open Inference Protocol has no name for"
        ) from error


@dataclass(frozen=True, kw_only=True)
class About:
    """What an export says of a model, and what may vary in it.

    Args:
        name: the model's (default: its directory's).
        dynamic: names of dimensions that vary beside the batch, by input and place: {"input_ids": {1: "tokens"}}.
        dims: the sizes that those may have, where not any.
        pad: what inputs are filled up with along them; None: proposed where there is an attention mask.
        labels: names of the classes of an output.
        metrics: what was measured of the model, such as {"test/accuracy": 0.93}.
        source: where it came from.
        limit: the most that answers may differ from the original's, as a share of the largest.
    """

    name: str | None = None
    dynamic: Dynamic = field(default_factory=dict)
    dims: Sequence[DynamicDim] = ()
    pad: Mapping[str, float] | None = None
    labels: Mapping[str, Sequence[str]] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    source: ArtifactSource | None = None
    limit: float = LIMIT
