"""Stoker: work out what a training job needs, train it at the limit of the device, and prove that it learned the same.

Names are loaded on first use, so that `import stoker` costs next to nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stoker import data, recipes, zoo
    from stoker.errors import BadJob, BadRun, DoesNotFit, NoDevice, RunFailed, StokerError
    from stoker.flow import Run, doctor, export, load, lr_range, plan, prepare, profile, report, train, verify
    from stoker.jobs import EMA, SGD, Adam, AdamW, DiLoCo, Job, LocalSGD, Loss, Muon, holdout, schedules
    from stoker.jobs.batch_size import auto
    from stoker.loading import transforms
    from stoker.units import epochs, samples, seconds, updates

_HOMES = {
    "stoker.errors": ("BadJob", "BadRun", "DoesNotFit", "NoDevice", "RunFailed", "StokerError"),
    "stoker.flow": (
        "Run", "doctor", "export", "load", "lr_range", "plan", "prepare", "profile", "report", "train", "verify",
    ),
    "stoker.jobs.batch_size": ("auto",),
    "stoker.jobs": ("EMA", "SGD", "Adam", "AdamW", "DiLoCo", "Job", "LocalSGD", "Loss", "Muon", "holdout"),
    "stoker.units": ("epochs", "samples", "seconds", "updates"),
}  # fmt: skip
_MODULES = {
    "data": "stoker.data",
    "recipes": "stoker.recipes",
    "schedules": "stoker.jobs.schedules",
    "transforms": "stoker.loading.transforms",
    "zoo": "stoker.zoo",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "EMA", "SGD", "Adam", "AdamW", "BadJob", "BadRun", "DiLoCo", "DoesNotFit", "Job", "LocalSGD", "Loss", "Muon",
    "NoDevice", "Run", "RunFailed", "StokerError", "auto", "data", "doctor", "epochs", "export", "holdout", "load",
    "lr_range", "plan", "prepare", "profile", "recipes", "report", "samples", "schedules", "seconds", "train",
    "transforms", "updates", "verify", "zoo",
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
