"""Plans of a job that ran out of memory, as the planner meets them again."""

from __future__ import annotations

import numpy as np

from stoker.devices import Place
from stoker.flow.preparation import Prepared
from stoker.jobs.describe import describe_settings
from stoker.loading import map_tensors
from stoker.planning.remembered import telling
from stoker.records import digest
from stoker.records.out_of_memory import OutOfMemory
from stoker.store import cache_root
from stoker.store.out_of_memory import OutOfMemoryStore

_NOT_OF_MEMORY = frozenset({
    "until", "schedule", "evaluate_every", "select", "seed", "on_non_finite", "metrics",
})  # fmt: skip
"""Settings of a job that the memory of its updates does not depend on."""


def known_failures(prepared: Prepared, place: Place) -> tuple[OutOfMemory, ...]:
    """Plans of this job that ran out of memory on a device like this one, where that says something of it.

    Those of several processes say nothing: each of them held a part of the model, or had a part of the device.
    """
    store = OutOfMemoryStore(cache_root() / "calibration")
    if not store.path.exists():
        return ()
    known = store.read(device_model=place.device.model, job=memory_identity(prepared))
    return telling([one for one in known if one.plan.layout.world_size == 1], place.device.memory_bytes)


def memory_identity(prepared: Prepared) -> str:
    """What the memory of a job's updates depends on, as a digest: model, settings, and the form of a sample."""
    sample: list[str] = []
    one = prepared.data.train.fetch(np.zeros(1, dtype=np.int64), 0)
    map_tensors(one, lambda tensor: sample.append(f"{tensor.dtype} {tuple(tensor.shape)}"))
    state = [(name, f"{tensor.dtype} {tuple(tensor.shape)}") for name, tensor in prepared.model.state_dict().items()]
    settings = {key: value for key, value in describe_settings(prepared.job).items() if key not in _NOT_OF_MEMORY}
    return digest([type(prepared.model).__qualname__, repr(prepared.model), state, settings, sample])
