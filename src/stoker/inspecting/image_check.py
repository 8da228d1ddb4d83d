"""The check of data with pixels: repeated pictures, odd ones, near duplicates, and labels.

Equal pixels are duplicates within a split, leaks between splits, or contradictions if their labels differ. Odd pictures
have another mode, size or shape than the rest, or show one colour.

Labels that the neighbours of a picture contradict:
What: the ten nearest neighbours among at most 10,000 pictures, by small pixels after principal components; a label is
    suspect if at least eight of them have the same other label.
Use when: pictures of a class are similar at 16 × 16 pixels. This is measured: if neighbours do not predict most labels,
    nothing is reported.
Costs: one product of all pictures with the references.
Source: D. Wilson, "Asymptotic Properties of Nearest Neighbor Rules Using Edited Data", 1972 (edited neighbours, with a
    majority of three; ours needs eight of ten, to accuse few).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from stoker.errors import BadJob
from stoker.inspecting.findings import (
    AGAINST,
    Checked,
    CheckOptions,
    Tell,
    class_findings,
    groups_of,
    in_order,
    in_order_of_use,
    rank,
)
from stoker.inspecting.image_signatures import MODES, ImageSurvey, Unreadable, survey
from stoker.inspecting.image_sources import FoundImages, SampleUnit, StoredSample
from stoker.inspecting.near_duplicates import near_findings, near_pairs
from stoker.records.data_check import Fault, Finding


@dataclass(frozen=True)
class ForeignUnit:
    """A unit of another data set: its split is `against`, and its samples are named after that data set."""

    unit: SampleUnit
    source: str
    split: str = AGAINST

    def __len__(self) -> int:
        """Number of samples."""
        return len(self.unit)

    def item(self, index: int) -> StoredSample:
        """Sample `index`."""
        item = self.unit.item(index)
        return replace(item, id=f"{self.source}/{item.id}")


def check_pictures(
    images: FoundImages, against: Sequence[tuple[str, FoundImages]], options: CheckOptions, workers: int, tell: Tell
) -> Checked:
    """Decode all samples and compare them.

    Raises:
        BadJob: there is nothing to check.
        RunFailed: a decoding process died.
    """
    others = [ForeignUnit(unit, source) for source, other in against for unit in other.units]
    if not images.units and not images.findings and not images.empty_classes:
        raise BadJob("There is no image to check")
    seen = survey([*images.units, *others], workers, tell)
    findings = [*images.findings, *(finding for finding in seen.findings if finding.where != AGAINST)]
    facts = seen.facts()
    findings += class_findings(facts, images.empty_classes)
    for row in (seen.labels < 0).nonzero()[0].tolist() if seen.classes else ():
        if seen.split_name(row) != AGAINST:
            findings.append(
                Finding(
                    fault="unlabelled",
                    gravity="fault",
                    id=seen.ids[row],
                    where=seen.split_name(row),
                    detail="has no label, others have one",
                )
            )
    findings += [*copies(seen), *outliers(seen)]
    notes = [f"{len(seen):,} samples were decoded to their end; equal pixels are found by their SHA-256"]
    explained = {finding.id for finding in findings if finding.fault in {"duplicate", "leak", "contradiction"}}
    if options.near:
        near = near_pairs(seen, options.least_correlation, tell)
        findings += [
            finding
            for finding in near_findings(seen, near.pairs)
            if finding.where != AGAINST and finding.id not in explained
        ]
        notes.append(near.note())
    if options.labels:
        accused, note = suspects(seen, tell)
        findings += [finding for finding in accused if finding.id not in explained]
        notes.append(note)
    ours = in_order_of_use(split for split in facts if split.name != AGAINST)
    rows: dict[str, int] = {}

    def picture(name: str) -> Image.Image | None:
        if not rows:
            rows.update({sample: row for row, sample in enumerate(seen.ids)})
        try:
            return seen.picture(rows[name]) if name in rows else None
        except Unreadable:
            return None

    return Checked(kind=images.kind, splits=ours, findings=in_order(findings), notes=tuple(notes), picture=picture)


_MOST_NAMED_COPIES = 5


def copies(survey: ImageSurvey) -> Iterator[Finding]:
    """Findings about repeated pictures, except those of the other data set."""

    def order(row: int) -> tuple[int, int, bool, int]:
        """The first copy is kept: of the split that measures, then one with a label, then the first."""
        return -rank(survey.split_name(row)), int(survey.splits[row]), survey.label(row) is None, row

    _, groups = groups_of(survey.signatures["content"])
    for group in groups:
        rows = sorted(group.tolist(), key=order)
        labels = {survey.label(row) for row in rows} - {None}
        findings = _contradictions(survey, rows) if len(labels) > 1 else _repetitions(survey, rows)
        yield from (finding for finding in findings if finding.where != AGAINST)


def _contradictions(survey: ImageSurvey, rows: list[int]) -> Iterator[Finding]:
    """Every copy, because the right label is not known."""
    labels = " and ".join(sorted({str(survey.label(row)) for row in rows}))
    for row in rows:
        others = tuple(survey.ids[other] for other in rows if other != row)[:_MOST_NAMED_COPIES]
        yield Finding(
            fault="contradiction",
            gravity="fault",
            id=survey.ids[row],
            where=survey.split_name(row),
            related=others,
            detail=f"is labelled {survey.label(row)}; equal pixels are labelled {labels}",
        )


def _repetitions(survey: ImageSurvey, rows: list[int]) -> Iterator[Finding]:
    """All but the first."""
    kept, home = rows[0], survey.splits[rows[0]]
    for row in rows[1:]:
        is_leak = survey.splits[row] != home
        detail = f"has the pixels of {survey.ids[kept]}" + (f" in {survey.split_name(kept)}" if is_leak else "")
        yield Finding(
            fault="leak" if is_leak else "duplicate",
            gravity="fault",
            id=survey.ids[row],
            where=survey.split_name(row),
            related=(survey.ids[kept],),
            detail=detail,
        )


_MOST = 0.9
"""Share of the pictures that have to agree for the others to be odd [0 to 1]."""

_MOST_Z = 6.0
_LEAST_DEVIATION = 0.05
"""Least robust deviation of the logarithm of area or aspect: five per cent makes no outlier in uniform pictures."""

_LEAST_SPREAD = 2


def outliers(survey: ImageSurvey) -> Iterator[Finding]:
    """Every odd picture, except those of the other data set."""
    foreign = [code for code, name in enumerate(survey.split_names) if name == AGAINST]
    rows = np.flatnonzero(~np.isin(survey.splits, foreign))
    if not len(rows):
        return
    signatures = survey.signatures[rows]
    (usual_mode, count), *_ = Counter(signatures["mode"].tolist()).most_common(1)
    if count >= _MOST * len(rows):
        for row in rows[signatures["mode"] != usual_mode].tolist():
            mode = MODES[survey.signatures["mode"][row]]
            yield _suspect(survey, row, "mode", f"is {mode}; {count / len(rows):.1%} are {MODES[usual_mode]}")
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
    for row in rows[signatures["spread"] <= _LEAST_SPREAD].tolist():
        yield _suspect(survey, row, "blank", "shows one colour", float(survey.signatures["spread"][row]))


def _robust_z(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Distances from the median in robust standard deviations (1.4826 × the median absolute deviation)."""
    away = np.abs(values - np.median(values))
    z: NDArray[np.float64] = away / max(1.4826 * float(np.median(away)), _LEAST_DEVIATION)
    return z


def _suspect(survey: ImageSurvey, row: int, fault: Fault, detail: str, measure: float | None = None) -> Finding:
    return Finding(
        fault=fault,
        gravity="suspect",
        id=survey.ids[row],
        where=survey.split_name(row),
        detail=detail,
        measure=None if measure is None else round(measure, 4),
    )


_NEIGHBOURS = 10
_AGREEING = 8
_MOST_REFERENCES = 10_000
_COMPONENTS = 32
_BLOCK = 1024
_FEWEST = 50
"""Number of labelled pictures below which there are too few neighbours."""

LEAST_ACCURACY = 0.75
"""Share of labels, on average over classes, that neighbours must predict for their votes to count [0 to 1]."""


@dataclass(frozen=True)
class Verdicts:
    """Votes of each labelled picture's neighbours: the row, the favoured label, the votes for it, the nearest three."""

    rows: NDArray[np.int64]
    favoured: NDArray[np.int32]
    votes: NDArray[np.int32]
    nearest: NDArray[np.int64]
    own: NDArray[np.int32]

    @property
    def accuracy(self) -> float:
        """Share of the labels that the neighbours predict, averaged over classes [0 to 1].

        Classes with fewer pictures than neighbours are left out, unless all are so small.
        """
        counts = np.bincount(self.own)
        predicted = np.bincount(self.own, weights=self.favoured == self.own)
        is_large = counts >= min(_NEIGHBOURS, counts.max())
        return float((predicted[is_large] / counts[is_large]).mean())


def suspects(survey: ImageSurvey, tell: Tell) -> tuple[list[Finding], str]:
    """Samples whose label their neighbours contradict, most votes first; and a note for the report."""
    foreign = [code for code, name in enumerate(survey.split_names) if name == AGAINST]
    rows = np.flatnonzero((survey.labels >= 0) & ~np.isin(survey.splits, foreign))
    if len(rows) < _FEWEST or len(np.unique(survey.labels[rows])) < 2:
        return [], "labels were not held against neighbours: fewer than 50 labelled pictures, or one class"
    verdicts = ask(survey, rows, tell)
    note = f"neighbours by small pixels tell {verdicts.accuracy:.1%} of the labels, on average over classes"
    if verdicts.accuracy < LEAST_ACCURACY:
        return [], f"{note}, too few to contradict any"
    return sorted(_label_findings(survey, verdicts), key=lambda finding: -(finding.measure or 0)), note


def ask(survey: ImageSurvey, rows: NDArray[np.int64], tell: Tell) -> Verdicts:
    """The votes of the nearest neighbours of each of `rows`, without the picture itself and its copies."""
    features = _features(survey.signatures)
    references = _references(survey, rows)
    points, squares = features[references], (features[references] ** 2).sum(axis=1)
    labels, own = survey.labels[references], survey.labels[rows]
    favoured, votes = np.empty(len(rows), np.int32), np.empty(len(rows), np.int32)
    nearest = np.empty((len(rows), 3), np.int64)
    count = min(_NEIGHBOURS, len(references) - 1)
    for start in range(0, len(rows), _BLOCK):
        block = slice(start, start + _BLOCK)
        asked = features[rows[block]]
        far = squares - 2 * (asked @ points.T) + (asked**2).sum(axis=1, keepdims=True)
        far[far < 1e-3] = np.inf  # itself, and pictures with its pixels
        near = np.argpartition(far, count - 1, axis=1)[:, :count]
        near = np.take_along_axis(near, np.argsort(np.take_along_axis(far, near, axis=1), axis=1), axis=1)
        favoured[block], votes[block] = _counted(labels[near], len(survey.classes))
        nearest[block] = np.resize(references[near[:, :3]], (len(near), 3))
        tell("asking neighbours", min(start + _BLOCK, len(rows)), len(rows))
    return Verdicts(rows, favoured, votes, nearest, own)


def _counted(labels_NK: NDArray[np.int32], num_classes: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The label with the most votes of each row of neighbours, and its votes."""
    votes_NC = np.zeros((len(labels_NK), num_classes), np.int64)
    np.add.at(votes_NC, (np.arange(len(labels_NK))[:, None], labels_NK), 1)
    favoured = votes_NC.argmax(axis=1)
    return favoured, votes_NC[np.arange(len(labels_NK)), favoured]


def _label_findings(survey: ImageSurvey, verdicts: Verdicts) -> Iterator[Finding]:
    accused = np.flatnonzero((verdicts.votes >= _AGREEING) & (verdicts.favoured != verdicts.own))
    for place in accused.tolist():
        row, other = int(verdicts.rows[place]), survey.classes[verdicts.favoured[place]]
        yield Finding(
            fault="suspect-label",
            gravity="suspect",
            id=survey.ids[row],
            where=survey.split_name(row),
            related=tuple(survey.ids[near] for near in verdicts.nearest[place].tolist()),
            detail=f"is labelled {survey.label(row)}; {verdicts.votes[place]} of its {_NEIGHBOURS} nearest are {other}",
            measure=float(verdicts.votes[place]),
        )


def _references(survey: ImageSurvey, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Rows that may be neighbours: one of each content, at most `_MOST_REFERENCES`, those with the smallest digests."""
    first, _ = groups_of(survey.signatures["content"][rows])
    chosen = rows[first]
    if len(chosen) <= _MOST_REFERENCES:
        return chosen
    digests = np.ascontiguousarray(survey.signatures["content"][chosen, :8]).view(np.uint64).reshape(-1)
    kept: NDArray[np.int64] = np.sort(chosen[np.argsort(digests, kind="stable")[:_MOST_REFERENCES]])
    return kept


def _features(signatures: NDArray[np.void]) -> NDArray[np.float32]:
    """Small pixels along their principal components [N, at most 32]."""
    step = max(1, len(signatures) // _MOST_REFERENCES)
    sample = _flat(signatures[::step])
    mean = sample.mean(axis=0)
    covariance = (sample - mean).T @ (sample - mean)
    _, vectors = np.linalg.eigh(covariance.astype(np.float64))
    axes = vectors[:, ::-1][:, :_COMPONENTS].astype(np.float32)
    features = np.empty((len(signatures), axes.shape[1]), np.float32)
    for start in range(0, len(signatures), 16 * _BLOCK):
        block = slice(start, start + 16 * _BLOCK)
        features[block] = (_flat(signatures[block]) - mean) @ axes
    return features


def _flat(signatures: NDArray[np.void]) -> NDArray[np.float32]:
    grey = signatures["grey"].reshape(len(signatures), -1)
    colour = signatures["colour"].reshape(len(signatures), -1)
    return np.concatenate([grey, colour], axis=1).astype(np.float32) / np.float32(255)
