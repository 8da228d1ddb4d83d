"""A planner's world without a device: facts of a job, and trials whose times come from a table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stoker.planning import Extents, Search
from stoker.records import Coupling, Device, Measurement, Plan, Profile

SEPARABLE = Coupling(kind="separable", group=None, causes=(), evidence="probed")
NORMS = Coupling(kind="batch_norm", group=64, causes=("5 BatchNorm2d",), evidence="probed")

CPU = Device(name="cpu", kind="cpu", model="a CPU", cores=4, memory_bytes=8 * 2**30, fast_dtypes=("fp32", "bf16"))
OLD_CPU = Device(name="cpu", kind="cpu", model="an old CPU", cores=1, memory_bytes=2**30, fast_dtypes=("fp32",))
GPU = Device(name="gpu", kind="cuda", model="H200", cores=132, memory_bytes=139 * 2**30, fast_dtypes=("fp32", "bf16"))


def profile(**changes: Any) -> Profile:
    """A convolutional network over images in memory, with changes."""
    facts = {
        "num_train": 54_000, "num_valid": 6_000, "num_test": 10_000, "batch": 512, "parameters": 10**6,
        "parameter_bytes": 4 * 10**6, "saved_bytes_per_sample": 10**6, "has_convolutions": True, "is_in_memory": True,
        "optimizer_implementations": ("fused", "default"), "coupling": SEPARABLE,
    }  # fmt: skip
    return Profile(**facts | changes)


def measurement(plan: Plan, update_s: float | tuple[float, ...], **changes: Any) -> Measurement:
    """What a trial of `plan` found: the same time for every update, unless several are given."""
    found = {
        "plan": plan, "samples_per_update": 512, "evaluate_s_per_sample": 1e-4, "peak_bytes": 2**30,
        "update_s": (update_s,) * 5 if isinstance(update_s, float) else update_s, "state_bytes": 2 * 10**7,
        "took_s": 0.0,
    }  # fmt: skip
    return Measurement(**found | changes)


def extents(_measured: Measurement) -> Extents:
    """Five epochs."""
    return Extents(total_samples=270_000, total_updates=530, evaluations=5)


def run(search: Search, trial: Callable[[Plan], Measurement | str], at_most: int = 200) -> list[Plan]:
    """Try what the search asks for until it is done, and return that; a trial that gives a text is a rejection."""
    tried: list[Plan] = []
    while (plan := search.next_plan()) is not None:
        tried.append(plan)
        assert len(tried) <= at_most, "the search does not end"
        found = trial(plan)
        if isinstance(found, str):
            search.reject(plan, found)
        else:
            search.record(found)
    return tried
