"""Taking whole channels out of a network: which can go, which should, and how what is left is made again."""

from stoker.compressing.pruning.cutting import CannotPrune
from stoker.compressing.pruning.distilling import Distillation, require_output
from stoker.compressing.pruning.pacing import Probe, next_ratio
from stoker.compressing.pruning.ranking import removed_at
from stoker.compressing.pruning.rebuilding import rebuilt
from stoker.compressing.pruning.scoring import scores_of
from stoker.compressing.pruning.soundness import prunable, sound_cut

__all__ = [
    "CannotPrune", "Distillation", "Probe", "next_ratio", "prunable", "rebuilt", "removed_at",
    "require_output", "scores_of", "sound_cut",
]  # fmt: skip
