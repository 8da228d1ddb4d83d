"""Whether an engine gives the answers that were stored with the model; what it is asked warms it up as well."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.artifacts import Golden
from stoker.artifacts.elements import Arrays
from stoker.engines import Engine
from stoker.errors import BadArtifact
from stoker.records import Manifest, Tolerance


def check_answers(engine: Engine, manifest: Manifest, golden: Golden, *, most_rows: int) -> None:
    """Ask for the golden rows as they are, the first alone, and repeated up to `most_rows`; compare every answer.

    Models that are not batched are asked once. Blocks; run it on a thread.

    Raises:
        BadArtifact: an answer is not within the manifest's tolerance, or its shape is another; numbers are named.
        ServiceError: the engine could not answer at all.
    """
    for inputs, wanted in _questions(manifest, golden, most_rows):
        rows = len(next(iter(inputs.values()), ())) if manifest.is_batched else 1
        found = engine.run(inputs)
        for name, array in wanted.items():
            if name not in found:
                raise BadArtifact(f"{manifest.name}: the engine gave no output {name!r}, the golden answers have one")
            _compare(found[name], array, manifest.tolerance, f"{manifest.name}: output {name!r} of {rows} rows")


def _questions(manifest: Manifest, golden: Golden, most_rows: int) -> Iterator[tuple[Arrays, Arrays]]:
    """Inputs to ask, with the answers wanted: the golden rows, one of them, and as many as a batch may have."""
    yield golden.inputs, golden.outputs
    if not manifest.is_batched:
        return
    rows = len(next(iter(golden.inputs.values())))
    for wanted in sorted({1, most_rows} - {rows}):
        order = np.arange(wanted) % rows
        yield _taken(golden.inputs, order), _taken(golden.outputs, order)


def _taken(arrays: Arrays, order: NDArray[Any]) -> Arrays:
    return {name: np.ascontiguousarray(array[order]) for name, array in arrays.items()}


def _compare(found: NDArray[Any], wanted: NDArray[Any], tolerance: Tolerance, what: str) -> None:
    """Raise unless `found` is `wanted` as far as the tolerance goes; NaN equals NaN."""
    if found.shape != wanted.shape:
        raise BadArtifact(f"{what} has the shape {found.shape}, the golden answer {wanted.shape}")
    if wanted.dtype.kind in "OSU":
        if not np.array_equal(found, wanted):
            raise BadArtifact(f"{what} is not the golden answer")
        return
    a, b = found.astype(np.float64), wanted.astype(np.float64)
    with np.errstate(invalid="ignore"):  # inf - inf is NaN, and counts as a difference unless both are the same
        excess = np.where((a == b) | (np.isnan(a) & np.isnan(b)), -np.inf, np.abs(a - b) - _allowed(b, tolerance))
    wrong = ~(excess <= 0)
    if wrong.any():
        place = np.unravel_index(int(np.argmax(np.where(wrong, np.nan_to_num(excess, nan=np.inf), -np.inf))), a.shape)
        raise BadArtifact(
            f"{what}: {int(wrong.sum())} of {a.size} elements are not the golden answer's; the worst is "
            f"{a[place]:.6g} where {b[place]:.6g} ± {_allowed(b[place], tolerance):.2g} was stored",
            remedy="The graph, or the engine's version or precision, is another than at export: export it again here.",
        )


def _allowed(wanted: Any, tolerance: Tolerance) -> Any:
    return tolerance.absolute + tolerance.relative * np.abs(wanted)
