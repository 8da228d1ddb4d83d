"""Samples as bytes: what a sample is made of, its entries as arrays of a fixed type, and back.

A sample is a tensor, an array or a number, or tuples, lists and dicts of these, one in the other. Its form is stated
once for all samples; shapes may differ from sample to sample, types and numbers of dimensions may not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from stoker.errors import BadJob
from stoker.records.codec import JSON

Array: TypeAlias = npt.NDArray[Any]


@dataclass(frozen=True)
class Entry:
    """One array of a sample: `dtype` as NumPy spells it, and how many dimensions it has."""

    dtype: str
    num_dims: int


@dataclass(frozen=True)
class Layout:
    """The form of a sample: `form` is its tuples, lists and dicts with the numbers of `entries` in their places."""

    form: JSON
    entries: tuple[Entry, ...]

    def filled(self, entries: Sequence[Any]) -> Any:
        """A sample, or a batch, of its entries."""
        return _filled(self.form, entries)


def layout_of(sample: Any, what: str) -> Layout:
    """The form of a sample; `what` names it in errors.

    Raises:
        BadJob: something in it is no number, tensor or array.
    """
    found: list[Array] = []
    form = _form(sample, found, what)
    return Layout(form, tuple(Entry(array.dtype.str, array.ndim) for array in found))


def entries_of(sample: Any, layout: Layout, what: str) -> list[Array]:
    """The entries of a sample, contiguous, in the order of the layout.

    Raises:
        BadJob: the sample has another form.
    """
    found: list[Array] = []
    form = _form(sample, found, what)
    own = Layout(form, tuple(Entry(array.dtype.str, array.ndim) for array in found))
    if own != layout:
        raise BadJob(
            f"{what} is {_in_words(own)}, and the first one is {_in_words(layout)}",
            remedy="Make all samples of one form: convert types in the dataset (numbers too: 1 is no 1.0).",
        )
    return found


def _form(value: Any, found: list[Array], what: str) -> JSON:
    """The form of `value`; its entries go to the end of `found`."""
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise BadJob(f"{what} has keys that are no texts: {', '.join(map(repr, value))}")
        return {key: _form(item, found, f"{what}[{key!r}]") for key, item in value.items()}
    if isinstance(value, tuple | list):
        kind = "list" if isinstance(value, list) else "tuple"
        return [kind, *(_form(item, found, f"{what}[{place}]") for place, item in enumerate(value))]
    found.append(_array_of(value, what))
    return len(found) - 1


def _filled(form: JSON, entries: Sequence[Any]) -> Any:
    if isinstance(form, dict):
        return {key: _filled(item, entries) for key, item in form.items()}
    if isinstance(form, list):
        items = [_filled(item, entries) for item in form[1:]]
        return items if form[0] == "list" else tuple(items)
    return entries[form]


def _array_of(value: Any, what: str) -> Array:
    """An entry as an array; images of PIL channels first, as models take them."""
    if hasattr(value, "detach"):  # a tensor
        value = _of_tensor(value, what)
    elif hasattr(value, "getbands"):
        if value.mode.startswith("P"):
            raise BadJob(
                f"{what} is an image with a palette: its numbers are places in that, and no colours",
                remedy="Turn it into colours in the dataset: image.convert('RGB').",
            )
        value = np.asarray(value)
        value = value[None] if value.ndim == 2 else value.transpose(2, 0, 1)
    array = np.asarray(value)
    if array.dtype.kind not in "biufc":
        raise BadJob(
            f"{what} is a {type(value).__name__}, and a packed dataset holds numbers, tensors, arrays and images",
            remedy="Leave it out of the samples, or turn it into numbers (text into tokens).",
        )
    # As PyTorch's collate function makes batches of them: whole numbers in 64 bits, as NumPy has them by itself.
    return np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("=")).reshape(array.shape)


def _of_tensor(tensor: Any, what: str) -> Array:
    try:
        array: Array = tensor.detach().cpu().numpy()
    except TypeError as problem:
        raise BadJob(
            f"{what} is a tensor of {tensor.dtype}, which NumPy has no type for", remedy="Convert it to float32."
        ) from problem
    return array


def _in_words(layout: Layout) -> str:
    described = [f"{np.dtype(entry.dtype).name} of {entry.num_dims} dimensions" for entry in layout.entries]
    return f"{layout.filled(described)}"
