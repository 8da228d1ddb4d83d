"""What is asked: rows of an exported model's golden inputs, of a file, or made up; of one size or of many."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.artifacts import dtype_of
from stoker.artifacts.elements import Arrays
from stoker.errors import BadJob
from stoker.records import BATCH, TensorSpec

NUM_DRAWN = 64
"""Requests of different sizes that are drawn, and sent in turn."""


def from_file(path: Path) -> Arrays:
    """The arrays of a `.npz` file by name.

    Raises:
        BadJob: it cannot be read, or holds pickled objects.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except (OSError, ValueError, zipfile.BadZipFile, AttributeError) as error:
        raise BadJob(
            f"{path} cannot be read: {error}", remedy="Write it with numpy.savez(path, NAME=array, …)."
        ) from error


def made_up(specs: Sequence[TensorSpec], *, rows: int = 8, seed: int = 0) -> Arrays:
    """Inputs of the right form: floats drawn from the standard normal distribution, ones of any other type.

    Dimensions with a name get 16 elements, until `sized` gives them others. They say nothing of a model whose time
    depends on what it is given.
    """
    random = np.random.default_rng(seed)
    return {spec.name: _made_up(spec, rows, random) for spec in specs}


def _made_up(spec: TensorSpec, rows: int, random: np.random.Generator) -> NDArray[Any]:
    shape = tuple(rows if dim == BATCH else dim if isinstance(dim, int) else 16 for dim in spec.shape)
    if spec.datatype == "BYTES":
        return np.full(shape, b"1", dtype=object)
    drawn = random.standard_normal(shape) if spec.datatype in {"FP16", "BF16", "FP32", "FP64"} else np.ones(shape)
    return drawn.astype(dtype_of(spec.datatype))


def in_requests(arrays: Arrays, rows: int = 1) -> list[Arrays]:
    """The arrays cut into requests of so many rows; from the beginning again where there are too few.

    Raises:
        BadJob: `rows` is not positive, or arrays differ in how many rows they have.
    """
    if rows < 1:
        raise BadJob(f"--rows {rows}: wanted at least 1")
    sizes = {name: array.shape[:1] for name, array in arrays.items()}
    if len(set(sizes.values())) != 1 or () in sizes.values() or (0,) in sizes.values():
        raise BadJob(f"wanted inputs with equally many rows, at least one; their first dimensions are {sizes}")
    have = min(len(array) for array in arrays.values())
    starts = range(0, have - have % rows, rows) if have >= rows else range(1)
    return [
        {name: array.take(range(start, start + rows), axis=0, mode="wrap") for name, array in arrays.items()}
        for start in starts
    ]


def whole_requests(arrays: Arrays, specs: Sequence[TensorSpec], rows: int = 1) -> list[Arrays]:
    """Requests of a model without a batch: arrays of exactly its inputs' dimensions are one, of one more are many.

    Raises:
        BadJob: arrays are neither, or `rows` is not 1.
    """
    if rows != 1:
        raise BadJob(f"--rows {rows}: the model has no batch, and a request is one", remedy="Leave --rows out.")
    more = {spec.name: arrays[spec.name].ndim - len(spec.shape) for spec in specs}
    if set(more.values()) == {0}:
        return [arrays]
    counts = {array.shape[:1] for array in arrays.values()}
    if set(more.values()) != {1} or len(counts) != 1 or counts == {(0,)}:
        raise BadJob(
            "the model has no batch: wanted the whole inputs of one request, or of several, stacked: "
            + ", ".join(f"{spec.name} {list(spec.shape)} is {list(arrays[spec.name].shape)}" for spec in specs),
        )
    return [{name: array[at, ...] for name, array in arrays.items()} for at in range(counts.pop()[0])]


def sized(
    requests: Sequence[Arrays], specs: Sequence[TensorSpec], sizes: Mapping[str, Sequence[int]], *, seed: int = 0
) -> list[Arrays]:
    """As many requests as `NUM_DRAWN`, whose named dimensions have sizes drawn from `sizes`, all equally likely.

    A dimension is cut, or goes on from its beginning again. Without `sizes` the requests as they are.

    Raises:
        BadJob: the model has no dimension of such a name.
    """
    if not sizes:
        return list(requests)
    named = {dim for spec in specs for dim in spec.shape if isinstance(dim, str)} - {BATCH}
    if unknown := sizes.keys() - named:
        raise BadJob(f"--sizes: the model has no dimension {sorted(unknown)}; those that vary are {sorted(named)}")
    random = np.random.default_rng(seed)
    drawn = [{name: int(random.choice(options)) for name, options in sizes.items()} for _ in range(NUM_DRAWN)]
    by_name = {spec.name: spec for spec in specs}
    return [
        {name: _resized(array, by_name[name], wanted) for name, array in requests[number % len(requests)].items()}
        for number, wanted in enumerate(drawn)
    ]


def _resized(array: NDArray[Any], spec: TensorSpec, wanted: Mapping[str, int]) -> NDArray[Any]:
    for axis, dim in enumerate(spec.shape):
        if isinstance(dim, str) and dim in wanted:
            array = array.take(range(wanted[dim]), axis=axis, mode="wrap")
    return array


def sizes_of(word: str) -> dict[str, Sequence[int]]:
    """What `tokens=8-128` (all of them) or `tokens=8,16,64` (one of these) means.

    Raises:
        BadJob: it means neither.

    >>> sizes_of("tokens=8,16"), len(sizes_of("tokens=8-128")["tokens"])
    ({'tokens': (8, 16)}, 121)
    """
    name, _, text = word.partition("=")
    try:
        low, dash, high = text.partition("-")
        options: Sequence[int] = range(int(low), int(high) + 1) if dash else tuple(map(int, text.split(",")))
    except ValueError:
        options = ()
    if not name or not options or min(options) < 1:
        raise BadJob(f"--sizes {word}: wanted such as tokens=8-128 or tokens=16,64")
    return {name: options}
