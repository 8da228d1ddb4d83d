"""Golden answers: stored inputs with the exported model's outputs, how to compare outputs, and how to resize requests.

The file is safetensors, with tensors `in.NAME` and `out.NAME`. Two types need another form, since NumPy's side of the
format lacks them: strings are concatenated bytes plus `in.NAME/lengths` (length of each [bytes], in the tensor's
shape); bfloat16 numbers are stored as their bits, under `in.NAME/bf16`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
from numpy.typing import NDArray
from safetensors.numpy import load_file

from stoker.artifacts.dtypes import Arrays, dtype_of
from stoker.errors import BadArtifact
from stoker.records import BATCH, TensorSpec, Tolerance

_ODD_ROWS = 3
_INPUT, _OUTPUT = "in.", "out."
_LENGTHS, _BF16 = "/lengths", "/bf16"


@dataclass(frozen=True)
class Golden:
    """Inputs of at least two samples, and the outputs that the exported model gave for them."""

    inputs: Arrays
    outputs: Arrays

    def as_tensors(self) -> Arrays:
        """All tensors in one dict, in the form that is stored."""
        named = {f"{_INPUT}{name}": array for name, array in self.inputs.items()}
        named |= {f"{_OUTPUT}{name}": array for name, array in self.outputs.items()}
        stored: Arrays = {}
        for name, array in named.items():
            if array.dtype.hasobject:
                elements = [bytes(element) for element in array.flat]
                lengths = np.array([len(element) for element in elements], dtype=np.int64)
                stored[name] = np.frombuffer(b"".join(elements), dtype=np.uint8)
                stored[name + _LENGTHS] = lengths.reshape(array.shape)
                continue
            # Of other arrays the library would write the memory, not the content. (`ascontiguousarray` makes a scalar
            # an array of one dimension.)
            array = np.asarray(array, order="C")  # noqa: PLW2901
            if array.dtype == dtype_of("BF16"):
                stored[name + _BF16] = array.view(np.uint16)
            else:
                stored[name] = array
        return stored

    def in_batches(self, sizes: Sequence[int]) -> Iterator[tuple[Arrays, Arrays]]:
        """Inputs and expected answers in batches of these sizes [rows]; rows repeat if there are fewer."""
        available = num_rows(self.inputs)
        for size in sizes:
            order = (np.arange(size) % available).tolist()
            yield rows(self.inputs, order), rows(self.outputs, order)

    def excess_in_batches(self, run: Callable[[Arrays], Arrays], tolerance: Tolerance, sizes: Sequence[int]) -> float:
        """Largest difference from these answers at any batch size, as a ratio to the tolerance [1]; see `excess`.

        Raises:
            ServiceError: the engine could not answer.
        """
        return max(
            (excess(run(inputs), expected, tolerance) for inputs, expected in self.in_batches(sizes)), default=0.0
        )


def served_sizes(most_rows: int) -> tuple[int, ...]:
    """Batch sizes [rows] at which a model served in batches of up to `most_rows` must give equal answers.

    Engines choose kernels by the number of rows: powers of two, an odd number, and the largest. Before a server accepts
    a version, it runs the golden inputs at the smallest and the largest of these sizes.

    >>> served_sizes(32), served_sizes(5)
    ((1, 2, 3, 4, 8, 16, 32), (1, 2, 3, 4, 5))
    """
    powers = (1 << power for power in range(most_rows.bit_length()))
    return tuple(sorted({*(size for size in (*powers, _ODD_ROWS) if size <= most_rows), most_rows}))


def read_golden(path: Path) -> Golden:
    """The golden answers in a file.

    Raises:
        BadArtifact: they cannot be read.
    """
    try:
        stored = load_file(path)
        tensors: Arrays = {}
        for name, array in stored.items():
            if name.endswith(_LENGTHS):
                continue
            if name.endswith(_BF16):
                tensors[name.removesuffix(_BF16)] = array.view(dtype_of("BF16"))
            elif name + _LENGTHS in stored:
                tensors[name] = _strings(array, stored[name + _LENGTHS])
            else:
                tensors[name] = array
    except (OSError, ValueError, KeyError, AttributeError, safetensors.SafetensorError) as error:
        # KeyError, AttributeError: a type that NumPy does not know
        raise BadArtifact(f"{path} cannot be read: {error}", remedy="Export the model again.") from error
    return Golden(_beginning_with(_INPUT, tensors), _beginning_with(_OUTPUT, tensors))


def _beginning_with(prefix: str, tensors: Arrays) -> Arrays:
    return {name.removeprefix(prefix): array for name, array in tensors.items() if name.startswith(prefix)}


def _strings(joined: NDArray[Any], lengths: NDArray[Any]) -> NDArray[Any]:
    if lengths.dtype != np.int64 or joined.dtype != np.uint8 or (lengths < 0).any() or lengths.sum() != joined.size:
        raise ValueError(f"the lengths of {lengths.size:,} strings are not those of {joined.size:,} bytes")
    ends = np.cumsum(lengths.reshape(-1))
    content, strings = joined.tobytes(), np.empty(lengths.size, dtype=object)
    for index, (end, length) in enumerate(zip(ends, lengths.reshape(-1), strict=True)):
        strings[index] = content[end - length : end]
    return strings.reshape(lengths.shape)


_FILLED, _FAR = 1e4, 100.0
"""Least size of a filled-in value, and its least ratio to all other values."""


def excess(outputs: Arrays, expected: Arrays, tolerance: Tolerance) -> float:
    """Largest difference of any element as a ratio to its tolerance [1]; answers are equal up to 1.

    Infinite if an output is missing, has another shape, differs in a string or a whole number (which names a class or a
    token), or is NaN on one side only.

    >>> expected = {"y": np.array([1.0, 2.0])}
    >>> round(excess({"y": np.array([1.0, 2.1])}, expected, Tolerance(absolute=0.1, relative=0.05)), 6)
    0.5
    """
    return max(
        (
            math.inf if difference is None else _largest(difference, tolerance.absolute + tolerance.relative * size)
            for difference, size in _differences(outputs, expected)
        ),
        default=0.0,
    )


def difference(outputs: Arrays, expected: Arrays) -> float:
    """Largest difference of any element, as a ratio to its output's largest value [1]; infinite as for `excess`.

    Values that a model fills in, such as -1e9 for masked classes, are excluded from the scale.

    >>> difference({"y": np.array([1.0, 2.5])}, {"y": np.array([1.0, 2.0])})
    0.25
    """
    worst = 0.0
    for errors, size in _differences(outputs, expected):
        if errors is None:
            return math.inf
        scale = _scale(size)
        worst = max(worst, _largest(errors, np.asarray(scale if scale > 0 else 1.0)))
    return worst


def output_scales(outputs: Arrays) -> tuple[float, ...]:
    """Largest finite magnitude in each output without filled-in values; 0 for whole numbers and strings."""
    return tuple(_scale(size) for _, size in _differences(outputs, outputs))


def is_filled_in(sizes: NDArray[Any]) -> NDArray[np.bool_]:
    """Mask of values, given their magnitudes, that a model filled in, such as -1e9 for masked classes.

    The largest value counts as filled in if it occurs several times and no other value comes near it.

    >>> is_filled_in(np.array([2.0, 1e9, 0.5, 1e9])).tolist()
    [False, True, False, True]
    """
    largest = float(sizes.max(initial=0.0))
    is_far = sizes >= largest / _FAR
    is_alone = 1 < np.count_nonzero(is_far) < sizes.size and bool((sizes[is_far] == largest).all())
    return is_far if is_alone and largest >= _FILLED else np.zeros(sizes.shape, np.bool_)


def takes_nan(golden: Golden) -> bool:
    """Whether inputs have NaN or infinities, so that the model is known to take them."""
    floats = (_numbers(array) for array in golden.inputs.values() if not array.dtype.hasobject)
    return not all(bool(np.isfinite(array).all()) for array in floats)


def nan_is_unproven(name: str) -> str:
    """The warning where a model is given NaN that was not exported with it: not every engine passes it on."""
    return (
        f"no example that {name} was exported with has NaN or infinities: to rows that do, an engine may answer "
        "numbers where PyTorch answers NaN; a ReLU in OpenVINO makes 0 of it"
    )


def has_nan(outputs: Arrays) -> bool:
    """Whether any element is not a number."""
    return any(bool(np.isnan(_numbers(array)).any()) for array in outputs.values() if not array.dtype.hasobject)


def _differences(outputs: Arrays, expected: Arrays) -> Iterator[tuple[NDArray[Any] | None, NDArray[Any]]]:
    """|found - expected| and |expected| of each output; the former is None if no number measures the difference."""
    for name, right in expected.items():
        left, nothing = outputs.get(name), np.zeros(0)
        if left is None or left.shape != right.shape or left.dtype != right.dtype:
            yield None, nothing
        elif right.dtype.hasobject or right.dtype.kind in "biu":
            yield (nothing if bool((left == right).all()) else None), nothing
        else:
            errors, size = absolute_differences(left, right), np.abs(_numbers(right))
            yield (None, nothing) if np.isinf(errors).any() else (errors, np.where(np.isfinite(size), size, 0))


def absolute_differences(one: NDArray[Any], other: NDArray[Any]) -> NDArray[np.float64]:
    """|one - other| of each number; 0 where both are NaN or the same infinity, infinite where only one is.

    >>> absolute_differences(np.array([1.0, np.nan, np.inf]), np.array([1.5, np.nan, 2.0])).tolist()
    [0.5, 0.0, inf]
    """
    a, b = _numbers(one), _numbers(other)
    with np.errstate(invalid="ignore", over="ignore"):
        errors = np.abs(a - b)
    errors = np.where(np.isnan(errors), np.inf, errors)  # `where`: of scalars too it gives an array
    return np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, errors)


def _scale(sizes: NDArray[Any]) -> float:
    return float(sizes[~is_filled_in(sizes)].max(initial=0.0))


def _numbers(array: NDArray[Any]) -> NDArray[Any]:
    return array.astype(np.float64)


def _largest(errors: NDArray[Any], allowed: NDArray[Any]) -> float:
    """Largest `errors / allowed`; equal elements give 0 even if nothing is allowed."""
    with np.errstate(divide="ignore", over="ignore"):  # allowed may be 0: infinite
        ratios = np.divide(errors, allowed, where=errors > 0, out=np.zeros_like(errors))
    return float(ratios.max(initial=0.0))


Sizes = Mapping[str, int]
"""Sizes of named dimensions, such as {"tokens": 12}."""


def rows(tensors: Arrays, chosen: slice | Sequence[int]) -> Arrays:
    """The chosen samples of every tensor."""
    return {name: array[chosen] for name, array in tensors.items()}


def num_rows(tensors: Arrays) -> int:
    """Number of samples [rows]."""
    return len(next(iter(tensors.values())))


def stacked(parts: Iterable[Arrays]) -> Arrays:
    """Samples of several requests in one."""
    parts = list(parts)
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def sizes_of(tensors: Arrays, specs: Iterable[TensorSpec]) -> dict[str, int]:
    """Sizes of the named dimensions in these tensors, including the batch.

    >>> spec = TensorSpec(name="ids", datatype="INT64", shape=("batch", "tokens"))
    >>> sizes_of({"ids": np.zeros((2, 5))}, [spec])
    {'batch': 2, 'tokens': 5}
    """
    pairs = itertools.chain.from_iterable(
        zip(spec.shape, tensors[spec.name].shape, strict=True) for spec in specs if spec.name in tensors
    )
    return {dim: size for dim, size in pairs if isinstance(dim, str)}


def cut(tensors: Arrays, specs: Iterable[TensorSpec], sizes: Sizes) -> Arrays:
    """Tensors with named dimensions cut back to these sizes; dimensions of other names stay."""
    result: Arrays = {}
    for spec in specs:
        if spec.name in tensors:
            kept = (slice(sizes.get(dim)) if isinstance(dim, str) else slice(None) for dim in spec.shape)
            result[spec.name] = tensors[spec.name][(*kept, ...)]  # `...`: a scalar stays an array
    return result


def filled(tensors: Arrays, specs: Iterable[TensorSpec], sizes: Sizes) -> Arrays:
    """Inputs filled up with their `pad` to these sizes of named dimensions; the batch and unnamed dimensions stay."""
    result: Arrays = {}
    for spec in specs:
        array = tensors[spec.name]
        shape = tuple(
            sizes.get(dim, size) if isinstance(dim, str) and dim != BATCH else size
            for dim, size in zip(spec.shape, array.shape, strict=True)
        )
        full = array
        if shape != array.shape:
            full = np.full(shape, 0 if spec.pad is None else spec.pad, dtype=array.dtype)
            full[tuple(map(slice, array.shape))] = array
        result[spec.name] = full
    return result
