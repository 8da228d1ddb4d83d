"""The whole story: Job → Profile → Plan → Run → Report, and from a Run to an answer.

Each verb is a few calls into the stages, and only here is their order known. Names are loaded on first use: a server
of exported models starts without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stoker.flow.compressing import compress
    from stoker.flow.decision import plan
    from stoker.flow.diagnosis import doctor
    from stoker.flow.exporting import export
    from stoker.flow.inspecting import check_data
    from stoker.flow.loadtesting import bench_serve
    from stoker.flow.members import take_part_in
    from stoker.flow.own_loop import OwnLoop, prepare
    from stoker.flow.predicting import predict
    from stoker.flow.profiles import StepProfile, profile
    from stoker.flow.range_test import lr_range
    from stoker.flow.running import train
    from stoker.flow.runs import Run, load, report
    from stoker.flow.serving import rollback, serve
    from stoker.flow.studies import Study
    from stoker.flow.tracking import Sent, track
    from stoker.flow.tune_options import TuneOptions
    from stoker.flow.tuning import study, tune
    from stoker.flow.verification import verify

_HOME_OF = {
    "OwnLoop": "own_loop", "Run": "runs", "StepProfile": "profiles",
    "bench_serve": "loadtesting", "check_data": "inspecting", "compress": "compressing", "doctor": "diagnosis",
    "export": "exporting", "load": "runs",
    "lr_range": "range_test", "plan": "decision", "predict": "predicting", "prepare": "own_loop",
    "profile": "profiles", "report": "runs", "rollback": "serving", "serve": "serving",
    "take_part_in": "members", "train": "running",
    "verify": "verification",
    "Study": "studies", "TuneOptions": "tune_options", "study": "tuning", "tune": "tuning",
    "Sent": "tracking", "track": "tracking",
}  # fmt: skip

__all__ = [
    "OwnLoop", "Run", "Sent", "StepProfile", "Study", "TuneOptions", "bench_serve", "check_data", "compress",
    "doctor", "export", "load", "lr_range", "plan", "predict", "prepare", "profile", "report", "rollback", "serve",
    "study", "take_part_in", "track", "train", "tune", "verify",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """The verb or record `name`, loaded now."""
    if name in _HOME_OF:
        return getattr(importlib.import_module(f"stoker.flow.{_HOME_OF[name]}"), name)
    raise AttributeError(f"module 'stoker.flow' has no attribute {name!r}")
