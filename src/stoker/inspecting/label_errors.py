"""Labels that the neighbours of a picture contradict.

What: the ten nearest neighbours among at most 10,000 pictures, by small pixels after principal components; a label is
    suspect if at least eight of them have the same other label.
Use when: pictures of a class are similar at 16 × 16 pixels. This is measured: if neighbours do not predict most labels,
    nothing is reported.
Costs: one product of all pictures with the references.
Source: D. Wilson, "Asymptotic Properties of Nearest Neighbor Rules Using Edited Data", 1972 (edited neighbours, with a
    majority of three; ours needs eight of ten, to accuse few).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stoker.inspecting.findings import AGAINST, Tell, groups_of
from stoker.inspecting.image_signatures import ImageSurvey
from stoker.records.data_check import Finding

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
            fault="suspect-label", gravity="suspect", id=survey.ids[row], where=survey.split_name(row),
            beside=tuple(survey.ids[near] for near in verdicts.nearest[place].tolist()),
            detail=f"is labelled {survey.label(row)}; {verdicts.votes[place]} of its {_NEIGHBOURS} nearest are {other}",
            measure=float(verdicts.votes[place]),
        )  # fmt: skip


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
