"""Making an exported model smaller and faster, with proof of accuracy and speed."""

from stoker.compressing.candidates import PrunedGraph
from stoker.compressing.contender import Course, Terms
from stoker.compressing.rows import Material, Rows, check_fit, dealt
from stoker.compressing.scores import NAMES, Metric, named
from stoker.compressing.whole import Compressed, Prune, Surroundings, compress

__all__ = [
    "NAMES",
    "Compressed",
    "Course",
    "Material",
    "Metric",
    "Prune",
    "PrunedGraph",
    "Rows",
    "Surroundings",
    "Terms",
    "check_fit",
    "compress",
    "dealt",
    "named",
]
