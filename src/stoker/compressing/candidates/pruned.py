"""Candidates made of a pruned network: its graph, in the forms that served the whole one best.

What: a network with fewer channels, trained on beside the whole one, takes the same inputs and answers in the same
shapes; whatever makes the whole one's graph faster is done to it as well.
Use when: there is a run to train on; see `compressing.pruning`.
Costs: as the form it is made in.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from stoker.compressing.candidates.base import Candidate, Made, Workshop


@dataclass(frozen=True)
class PrunedGraph:
    """A pruned network's graph; `record` is a file that tells how it was made, and goes where the graph goes."""

    name: str
    how: str
    graph: Path
    record: Path


def forms_of(pruned: PrunedGraph, candidates: Sequence[Candidate], paces: Mapping[str, float]) -> Iterator[Candidate]:
    """A pruned network in the fastest form so far that is not in 8 bits, and in the fastest in 8 bits.

    Args:
        pruned: the network.
        candidates: forms of the whole network, the most promising of each kind first.
        paces: how fast those were that passed, by name; where none of a kind did, its first is taken.
    """
    for is_reduced in (False, True):
        alike = [one for one in candidates if one.is_reduced is is_reduced]
        if alike:
            yield of_pruned(pruned, max(alike, key=lambda one: paces.get(one.name, 0.0)))


def of_pruned(pruned: PrunedGraph, form: Candidate) -> Candidate:
    """A candidate that does to the pruned network's graph what `form` does to the whole one's."""

    def make(workshop: Workshop, directory: Path) -> Made:
        made = form.make(dataclasses.replace(workshop, graph=pruned.graph), directory)
        return dataclasses.replace(made, beside=(*made.beside, pruned.record))

    return dataclasses.replace(
        form, name=f"{pruned.name}, {form.name}", how=f"{pruned.how}; {form.how}", make=make, is_pruned=True
    )
