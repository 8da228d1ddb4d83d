"""The classification extension: an output's largest values as strings `value:index:label`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.serving.problems import BadRequest
from stoker.serving.service import Request, Response
from stoker.serving.wire.tensors import strings

MOST_CLASSES = 16_384
"""Strings that are written for an output; they are made one by one, while all other requests wait."""


def classify(response: Response, request: Request, labels: Mapping[str, Sequence[str]]) -> Response:
    """The response with each output that is wanted as classes turned into them: BYTES [batch, k].

    `labels` are those of the model's outputs (`Manifest.labels`). The first dimension is the batch, unless there is no
    other; equal values come in the order of their indices, and what is no number comes last.

    Raises:
        BadRequest: classes of a BYTES output are wanted, or more than `MOST_CLASSES`.
    """
    wanted = {one.name: one.classification for one in request.outputs if one.classification}
    if not wanted:
        return response
    outputs = {
        name: _top(array, wanted[name], labels.get(name, ()), name) if name in wanted else array
        for name, array in response.outputs.items()
    }
    return response._replace(outputs=outputs)


def _top(array: NDArray[Any], most: int, labels: Sequence[str], name: str) -> NDArray[Any]:
    if array.dtype.kind in "OSU":
        raise BadRequest(f"output {name!r} is BYTES; only numbers have largest values, so ask without classification")
    rows = array.reshape(array.shape[0], -1) if array.ndim > 1 else array.reshape(1, -1)
    most = min(most, rows.shape[1])
    if len(rows) * most > MOST_CLASSES:
        raise BadRequest(
            f"output {name!r} would be {len(rows) * most:,} classes, at most {MOST_CLASSES:,} are written; ask for "
            "fewer, or for the numbers as binary data"
        )
    elements = [_class(row[index], int(index), labels) for row in rows for index in _largest(row, most)]
    return strings(elements).reshape((rows.shape[0], most) if array.ndim > 1 else (most,))


def _largest(row: NDArray[Any], most: int) -> NDArray[np.intp]:
    """Indices of the largest values, so many, from the largest on; equal values in the order of their indices."""
    if row.dtype.kind not in "biu":
        row = np.where(np.isnan(row), -np.inf, row)
    indices = np.arange(len(row))
    if 0 < most < len(row):  # of many classes a few are wanted: only these are sorted
        indices = indices[row >= np.partition(row, len(row) - most)[len(row) - most]]
    chosen = row[indices]
    return indices[len(chosen) - 1 - np.argsort(chosen[::-1], kind="stable")[::-1]][:most]


def _class(value: Any, index: int, labels: Sequence[str]) -> bytes:
    label = f":{labels[index]}" if index < len(labels) else ""
    return f"{value}:{index}{label}".encode()
