"""Recipes: settings of a Job that reach the same accuracy sooner, each from a publication. Off unless asked for.

A recipe is a function from a Job to a Job: what it sets is there to be read, and goes into the run's record like any
other setting. docs/recipes.md has a card for each, with what it gave here.
"""

from stoker.recipes.fast_recipe import RECIPES, fast, resolved, whitened
from stoker.recipes.techniques import MirrorAveraged, ema, label_smoothing, mirror_averaged, muon, one_cycle
from stoker.zoo.airbench import Whitening

__all__ = [
    "RECIPES", "MirrorAveraged", "Whitening", "ema", "fast", "label_smoothing", "mirror_averaged", "muon", "one_cycle",
    "resolved", "whitened",
]  # fmt: skip
