"""Pictures unlike the rest in how they are stored: another mode, another size or shape, or of one colour."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.inspecting.pictures.reading import Survey
from stoker.inspecting.pictures.signatures import MODES
from stoker.inspecting.sources.splits import AGAINST
from stoker.records.cleaning import Fault, Finding

_MOST = 0.9
"""Share of the pictures that have to agree for the others to be odd."""

_MOST_Z = 6.0
_LEAST_DEVIATION = 0.05
"""Of the logarithm of area or aspect: pictures that hardly vary are not outliers for five per cent."""

_LEAST_SPREAD = 2


def outliers(survey: Survey) -> Iterator[Finding]:
    """Every odd picture; of the other data set none."""
    foreign = [code for code, name in enumerate(survey.split_names) if name == AGAINST]
    rows = np.flatnonzero(~np.isin(survey.splits, foreign))
    if not len(rows):
        return
    signatures = survey.signatures[rows]
    yield from _odd_modes(survey, rows, signatures)
    yield from _odd_sizes(survey, rows, signatures)
    for row in rows[signatures["spread"] <= _LEAST_SPREAD].tolist():
        yield _suspect(survey, row, "blank", "shows one colour", float(survey.signatures["spread"][row]))


def _odd_modes(survey: Survey, rows: NDArray[np.int64], signatures: NDArray[Any]) -> Iterator[Finding]:
    (usual, count), *_ = Counter(signatures["mode"].tolist()).most_common(1)
    if count < _MOST * len(rows):
        return
    for row in rows[signatures["mode"] != usual].tolist():
        mode = MODES[survey.signatures["mode"][row]]
        yield _suspect(survey, row, "mode", f"is {mode}; {count / len(rows):.1%} are {MODES[usual]}")


def _odd_sizes(survey: Survey, rows: NDArray[np.int64], signatures: NDArray[Any]) -> Iterator[Finding]:
    sizes = Counter(zip(signatures["width"].tolist(), signatures["height"].tolist(), strict=True))
    (usual, count), *_ = sizes.most_common(1)
    width, height = signatures["width"].astype(np.float64), signatures["height"].astype(np.float64)
    if count >= _MOST * len(rows):
        odd = (width != usual[0]) | (height != usual[1])
        scores = np.abs(np.log(width * height / (usual[0] * usual[1])))
        rest = f"{count / len(rows):.1%} are {usual[0]} × {usual[1]}"
    else:
        area, aspect = np.log(width * height), np.log(width / height)
        scores = np.maximum(_robust_z(area), _robust_z(aspect))
        odd = scores > _MOST_Z
        rest = f"the median is {np.median(width):.0f} × {np.median(height):.0f}"
    for place in np.flatnonzero(odd).tolist():
        detail = f"has {signatures['width'][place]} × {signatures['height'][place]} pixels; {rest}"
        yield _suspect(survey, int(rows[place]), "shape", detail, float(scores[place]))


def _robust_z(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Distances from the median in robust standard deviations (1.4826 × the median absolute deviation)."""
    away = np.abs(values - np.median(values))
    z: NDArray[np.float64] = away / max(1.4826 * float(np.median(away)), _LEAST_DEVIATION)
    return z


def _suspect(survey: Survey, row: int, fault: Fault, detail: str, measure: float | None = None) -> Finding:
    return Finding(fault=fault, gravity="suspect", id=survey.ids[row], where=survey.split_name(row), detail=detail,
                   measure=None if measure is None else round(measure, 4))  # fmt: skip
