"""Golden answers: inputs, and what the exported model gave for them, in one safetensors file.

`in.NAME` and `out.NAME` are tensors as they are. Two types are written otherwise, as NumPy's side of the format cannot
hold them: strings are their bytes one after another, and beside them `in.NAME/lengths`: the length of each [bytes], in
the tensor's shape; bfloat16 numbers are their bits, as `in.NAME/bf16`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
from numpy.typing import NDArray
from safetensors.numpy import load_file

from stoker.artifacts.answers import excess
from stoker.artifacts.elements import Arrays, dtype_of
from stoker.artifacts.variations import num_rows, rows
from stoker.errors import BadArtifact
from stoker.records import Tolerance

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
