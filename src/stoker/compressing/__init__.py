"""Making an exported model smaller and faster, with proof of accuracy and speed."""

from stoker.compressing.contender import Terms
from stoker.compressing.rows import Material, Rows, check_fit, dealt
from stoker.compressing.scores import Metric, named
from stoker.compressing.whole import Compressed, Surroundings, compress

__all__ = [
    "Compressed",
    "Material",
    "Metric",
    "Rows",
    "Surroundings",
    "Terms",
    "check_fit",
    "compress",
    "dealt",
    "named",
]
