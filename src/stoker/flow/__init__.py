"""The whole story: Job → Profile → Plan → Run → Report.

Each verb is a few calls into the stages, and only here is their order known.
"""

from stoker.flow.decision import plan
from stoker.flow.diagnosis import doctor
from stoker.flow.members import take_part_in
from stoker.flow.own_loop import OwnLoop, prepare
from stoker.flow.profiles import StepProfile, profile
from stoker.flow.range_test import lr_range
from stoker.flow.running import train
from stoker.flow.runs import Run, load, report
from stoker.flow.verification import verify

__all__ = [
    "OwnLoop", "Run", "StepProfile", "doctor", "load", "lr_range", "plan", "prepare", "profile", "report",
    "take_part_in", "train", "verify",
]  # fmt: skip
