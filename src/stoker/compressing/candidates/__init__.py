"""Ways to make a graph smaller and faster: a file for each library or method, behind one record."""

from stoker.compressing.candidates.base import Candidate, CannotMake, Made, Workshop
from stoker.compressing.candidates.listing import candidates_for

__all__ = ["Candidate", "CannotMake", "Made", "Workshop", "candidates_for"]
