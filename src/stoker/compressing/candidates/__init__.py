"""Ways to make a graph smaller and faster: a file for each library or method, behind one record."""

from stoker.compressing.candidates.base import Candidate, CannotMake, Made, Workshop
from stoker.compressing.candidates.listing import as_given, candidates_for
from stoker.compressing.candidates.pruned import PrunedGraph, forms_of

__all__ = [
    "Candidate", "CannotMake", "Made", "PrunedGraph", "Workshop", "as_given", "candidates_for", "forms_of",
]  # fmt: skip
