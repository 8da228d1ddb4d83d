"""Stoker: work out what a training job needs, train it at the limit of the device, and prove that it learned the same.

Names are loaded on first use, so that `import stoker` costs next to nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stoker import data, recipes, zoo
    from stoker.errors import BadJob, BadRun, DoesNotFit, NoDevice, RunFailed, StokerError
    from stoker.flow import (
        Run,
        compress,
        doctor,
        export,
        load,
        lr_range,
        plan,
        predict,
        prepare,
        profile,
        report,
        serve,
        train,
        tune,
        verify,
    )
    from stoker.jobs import EMA, SGD, Adam, AdamW, DiLoCo, Job, LocalSGD, Loss, Muon, holdout, sampling, schedules
    from stoker.jobs import more_optimizers as optimizers
    from stoker.jobs.averages import SWA
    from stoker.jobs.batch_size import auto
    from stoker.jobs.freezing import Freeze
    from stoker.jobs.metrics import probabilities
    from stoker.jobs.penalties import l1, l2
    from stoker.jobs.stopping import EarlyStopping, Target
    from stoker.jobs.token_batch import tokens
    from stoker.jobs.weights import Weights
    from stoker.loading import lengths, transforms
    from stoker.training import on
    from stoker.units import epochs, samples, seconds, updates

_HOMES = {
    "stoker.errors": ("BadJob", "BadRun", "DoesNotFit", "NoDevice", "RunFailed", "StokerError"),
    "stoker.flow": (
        "Run", "compress", "doctor", "export", "load", "lr_range", "plan", "predict", "prepare", "profile", "report",
        "serve", "train", "tune", "verify",
    ),
    "stoker.jobs.averages": ("SWA",),
    "stoker.jobs.batch_size": ("auto",),
    "stoker.jobs.freezing": ("Freeze",),
    "stoker.jobs.metrics": ("probabilities",),
    "stoker.jobs.penalties": ("l1", "l2"),
    "stoker.jobs.stopping": ("EarlyStopping", "Target"),
    "stoker.jobs.token_batch": ("tokens",),
    "stoker.jobs.weights": ("Weights",),
    "stoker.jobs": ("EMA", "SGD", "Adam", "AdamW", "DiLoCo", "Job", "LocalSGD", "Loss", "Muon", "holdout"),
    "stoker.training": ("on",),
    "stoker.units": ("epochs", "samples", "seconds", "updates"),
}  # fmt: skip
_MODULES = {
    "data": "stoker.data",
    "optimizers": "stoker.jobs.more_optimizers",
    "lengths": "stoker.loading.lengths",
    "recipes": "stoker.recipes",
    "sampling": "stoker.jobs.sampling",
    "schedules": "stoker.jobs.schedules",
    "transforms": "stoker.loading.transforms",
    "zoo": "stoker.zoo",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "EMA", "SGD", "SWA", "Adam", "AdamW", "BadJob", "BadRun", "DiLoCo", "DoesNotFit", "EarlyStopping", "Freeze", "Job",
    "LocalSGD", "Loss", "Muon", "NoDevice", "Run", "RunFailed", "StokerError", "Target", "Weights", "auto", "compress",
    "data", "doctor", "epochs", "export", "holdout", "l1", "l2", "lengths", "load", "lr_range", "on", "optimizers",
    "plan", "predict", "prepare", "probabilities", "profile", "recipes", "report", "samples", "sampling", "schedules",
    "seconds", "serve", "tokens", "train", "transforms", "tune", "updates", "verify", "zoo",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """The public name `name`, loaded now."""
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    if name in _HOME_OF:
        return getattr(importlib.import_module(_HOME_OF[name]), name)
    raise AttributeError(f"module 'stoker' has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names."""
    return sorted(__all__)
