"""Recipes: settings of a Job that reach the same accuracy sooner, each from a publication. Off unless asked for.

A recipe is a function from a Job to a Job. Its settings are recorded with the run like any others. docs/recipes.md has
a card for each, with its measured gain.
"""

from stoker.recipes.fast_recipe import RECIPES, fast, resolved, whitened
from stoker.recipes.techniques import MirrorAveraged, ema, label_smoothing, mirror_averaged, muon, one_cycle
from stoker.zoo.airbench import Whitening

__all__ = [
    "RECIPES",
    "MirrorAveraged",
    "Whitening",
    "ema",
    "fast",
    "label_smoothing",
    "mirror_averaged",
    "muon",
    "one_cycle",
    "resolved",
    "whitened",
]
