"""Golden answers: inputs, and what the exported model gave for them, in one safetensors file.

`in.NAME` and `out.NAME` are tensors as they are. Two types are written otherwise, as NumPy's side of the format cannot
hold them: strings are their bytes one after another, and beside them `in.NAME/lengths`: the length of each [bytes], in
the tensor's shape; bfloat16 numbers are their bits, as `in.NAME/bf16`.

Whether two answers to one request are the same answer.

One request in other forms: some of its samples, cut shorter, or filled up; and answers cut back.
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
        """All of them in one dict, as they are stored."""
        named = {f"{_INPUT}{name}": array for name, array in self.inputs.items()}
        named |= {f"{_OUTPUT}{name}": array for name, array in self.outputs.items()}
        stored: Arrays = {}
        for name, array in named.items():
            stored |= _stored(name, array)
        return stored

    def in_batches(self, sizes: Sequence[int]) -> Iterator[tuple[Arrays, Arrays]]:
        """Inputs and the answers expected, in batches of these sizes [rows]; rows repeat where there are fewer."""
        available = num_rows(self.inputs)
        for size in sizes:
            order = (np.arange(size) % available).tolist()
            yield rows(self.inputs, order), rows(self.outputs, order)

    def excess_in_batches(self, run: Callable[[Arrays], Arrays], tolerance: Tolerance, sizes: Sequence[int]) -> float:
        """The largest difference from these answers at any batch size, as a share of what is allowed; see `excess`.

        Raises:
            ServiceError: the engine could not answer.
        """
        return max((excess(run(asked), expected, tolerance) for asked, expected in self.in_batches(sizes)), default=0.0)


def served_sizes(most_rows: int) -> tuple[int, ...]:
    """Batch sizes [rows] at which a model that is served in batches of up to `most_rows` has to answer equally.

    Engines choose kernels by the number of rows: powers of two, an odd number, and the largest. A server asks the
    golden inputs again at the smallest and the largest of them before it takes a version.

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
        tensors = dict(_restored(name, array, stored) for name, array in stored.items() if not name.endswith(_LENGTHS))
    except (OSError, ValueError, KeyError, AttributeError, safetensors.SafetensorError) as error:
        # KeyError, AttributeError: a type that NumPy does not know
        raise BadArtifact(f"{path} cannot be read: {error}", remedy="Export the model again.") from error
    return Golden(_beginning_with(_INPUT, tensors), _beginning_with(_OUTPUT, tensors))


def _beginning_with(prefix: str, tensors: Arrays) -> Arrays:
    return {name.removeprefix(prefix): array for name, array in tensors.items() if name.startswith(prefix)}


def _stored(name: str, array: NDArray[Any]) -> Arrays:
    if array.dtype.hasobject:
        return _with_lengths(name, array)
    # Of other arrays the library would write the memory, not the content. (`ascontiguousarray` makes [1] of a number.)
    array = np.asarray(array, order="C")
    if array.dtype == dtype_of("BF16"):
        return {name + _BF16: array.view(np.uint16)}
    return {name: array}


def _restored(name: str, array: NDArray[Any], stored: Arrays) -> tuple[str, NDArray[Any]]:
    if name.endswith(_BF16):
        return name.removesuffix(_BF16), array.view(dtype_of("BF16"))
    return name, _strings(array, stored[name + _LENGTHS]) if name + _LENGTHS in stored else array


def _with_lengths(name: str, strings: NDArray[Any]) -> Arrays:
    each = [bytes(one) for one in strings.flat]
    lengths = np.array([len(one) for one in each], dtype=np.int64).reshape(strings.shape)
    return {name: np.frombuffer(b"".join(each), dtype=np.uint8), name + _LENGTHS: lengths}


def _strings(joined: NDArray[Any], lengths: NDArray[Any]) -> NDArray[Any]:
    if lengths.dtype != np.int64 or joined.dtype != np.uint8 or (lengths < 0).any() or lengths.sum() != joined.size:
        raise ValueError(f"the lengths of {lengths.size:,} strings are not those of {joined.size:,} bytes")
    ends = np.cumsum(lengths.reshape(-1))
    content, strings = joined.tobytes(), np.empty(lengths.size, dtype=object)
    for at, (end, length) in enumerate(zip(ends, lengths.reshape(-1), strict=True)):
        strings[at] = content[end - length : end]
    return strings.reshape(lengths.shape)


_FILLED, _APART = 1e4, 100.0
"""A value that is filled in is at least so large, and so many times as large as all others."""


def excess(found: Arrays, wanted: Arrays, tolerance: Tolerance) -> float:
    """The largest difference of any element as a share of what is allowed for it: at most 1, and they are the same.

    Infinite where an output is missing, has another shape, differs in a string or a whole number, which names something
    (the next class, or token, is another), or is NaN in one of them alone.

    >>> wanted = {"y": np.array([1.0, 2.0])}
    >>> round(excess({"y": np.array([1.0, 2.1])}, wanted, Tolerance(absolute=0.1, relative=0.05)), 6)
    0.5
    """
    return max(
        (
            math.inf if difference is None else _largest(difference, tolerance.absolute + tolerance.relative * size)
            for difference, size in _differences(found, wanted)
        ),
        default=0.0,
    )


def difference(found: Arrays, wanted: Arrays) -> float:
    """The largest difference of any element, as a share of its output's largest value; infinite as for `excess`.

    What a model fills in, such as -1e9 for classes that are masked, is no measure of the others, and left aside.

    >>> difference({"y": np.array([1.0, 2.5])}, {"y": np.array([1.0, 2.0])})
    0.25
    """
    worst = 0.0
    for apart, size in _differences(found, wanted):
        if apart is None:
            return math.inf
        scale = _scale(size)
        worst = max(worst, _largest(apart, np.asarray(scale if scale > 0 else 1.0)))
    return worst


def output_scales(outputs: Arrays) -> tuple[float, ...]:
    """The largest finite size of any number in each output, what is filled in aside; 0 of whole numbers and strings."""
    return tuple(_scale(size) for _, size in _differences(outputs, outputs))


def is_filled_in(sizes: NDArray[Any]) -> NDArray[np.bool_]:
    """Which of an output's values, of these sizes, a model fills in, such as -1e9 for classes that are masked.

    Where the largest occurs several times and nothing else comes near it, it says nothing of how large answers are.

    >>> filled_in(np.array([2.0, 1e9, 0.5, 1e9])).tolist()
    [False, True, False, True]
    """
    largest = float(sizes.max(initial=0.0))
    is_far = sizes >= largest / _APART
    is_alone = 1 < np.count_nonzero(is_far) < sizes.size and bool((sizes[is_far] == largest).all())
    return is_far if is_alone and largest >= _FILLED else np.zeros(sizes.shape, np.bool_)


def has_nan(outputs: Arrays) -> bool:
    """Whether any element is not a number."""
    return any(bool(np.isnan(_numbers(one)).any()) for one in outputs.values() if not one.dtype.hasobject)


def _differences(found: Arrays, wanted: Arrays) -> Iterator[tuple[NDArray[Any] | None, NDArray[Any]]]:
    """|found - wanted| and |wanted| of each output; the former is None where no number says how far they lie apart."""
    for name, right in wanted.items():
        left, nothing = found.get(name), np.zeros(0)
        if left is None or left.shape != right.shape or left.dtype != right.dtype:
            yield None, nothing
        elif right.dtype.hasobject or right.dtype.kind in "biu":
            yield (nothing if bool((left == right).all()) else None), nothing
        else:
            a, b = _numbers(left), _numbers(right)
            same = (a == b) | (np.isnan(a) & np.isnan(b))
            is_finite = np.isfinite(a) & np.isfinite(b)
            if not bool((same | is_finite).all()):
                yield None, nothing
                continue
            yield np.abs(np.subtract(a, b, where=is_finite, out=np.zeros_like(a))), np.abs(np.where(is_finite, b, 0))


def _scale(sizes: NDArray[Any]) -> float:
    return float(sizes[~is_filled_in(sizes)].max(initial=0.0))


def _numbers(array: NDArray[Any]) -> NDArray[Any]:
    return array.astype(np.float64)


def _largest(apart: NDArray[Any], allowed: NDArray[Any]) -> float:
    """The largest `apart / allowed`; what is equal is no difference, though nothing be allowed."""
    with np.errstate(divide="ignore", over="ignore"):  # by nothing, or next to nothing: infinitely far
        shares = np.divide(apart, allowed, where=apart > 0, out=np.zeros_like(apart))
    return float(shares.max(initial=0.0))


Sizes = Mapping[str, int]
"""Sizes of named dimensions, such as {"tokens": 12}."""


def rows(tensors: Arrays, chosen: slice | Sequence[int]) -> Arrays:
    """Some of the samples."""
    return {name: array[chosen] for name, array in tensors.items()}


def num_rows(tensors: Arrays) -> int:
    """How many samples."""
    return len(next(iter(tensors.values())))


def stacked(parts: Iterable[Arrays]) -> Arrays:
    """Samples of several requests in one."""
    each = list(parts)
    return {name: np.concatenate([part[name] for part in each]) for name in each[0]}


def sizes_of(tensors: Arrays, specs: Iterable[TensorSpec]) -> dict[str, int]:
    """The sizes that named dimensions have in these tensors, the batch's among them.

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
    return {spec.name: _cut(tensors[spec.name], spec, sizes) for spec in specs if spec.name in tensors}


def _cut(array: NDArray[Any], spec: TensorSpec, sizes: Sizes) -> NDArray[Any]:
    kept = (slice(sizes.get(dim)) if isinstance(dim, str) else slice(None) for dim in spec.shape)
    return array[(*kept, ...)]  # with `...` what has no dimensions stays an array


def filled(tensors: Arrays, specs: Iterable[TensorSpec], sizes: Sizes) -> Arrays:
    """Inputs filled up with their `pad` along named dimensions to these sizes; the batch, and unnamed ones, stay."""
    return {spec.name: _filled(tensors, spec, sizes) for spec in specs}


def _filled(tensors: Arrays, spec: TensorSpec, sizes: Sizes) -> NDArray[Any]:
    array = tensors[spec.name]
    shape = tuple(
        sizes.get(dim, size) if isinstance(dim, str) and dim != BATCH else size
        for dim, size in zip(spec.shape, array.shape, strict=True)
    )
    if shape == array.shape:
        return array
    full = np.full(shape, 0 if spec.pad is None else spec.pad, dtype=array.dtype)
    full[tuple(map(slice, array.shape))] = array
    return full
