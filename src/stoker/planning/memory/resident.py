"""What the whole process takes of a machine's memory while it trains on a CPU, at its peak.

The peak is what the process has before training (interpreter, libraries, data in memory: measured where the plan is
made), plus what malloc holds for the tensors (its replay over the first updates), plus what libraries take once
training begins: their code as it is first run, buffers of MKL and oneDNN, kernels compiled on the fly. Under `mapped`
the replay is all there is to malloc. Under `default` small allocations, which no trace shows, lie between tensors and
keep the heap from closing its holes; that share is fitted, and differs by a tenth between runs of the same job, since
the system places the heap at random.

Constants are fitted on the calibration set of `bench/forecast/resident_memory.py`; its held-out set tells the error.
"""

from __future__ import annotations

from dataclasses import dataclass

from stoker.planning.memory.system_malloc import DEFAULT, MAPPED, RETAINED, MallocSettings, SystemMalloc
from stoker.planning.memory.timeline import timeline_of
from stoker.records.plan import Malloc
from stoker.records.trace import Trace


@dataclass(frozen=True, kw_only=True)
class ResidentModel:
    """From a replay of malloc to what training adds to resident memory: `library_bytes + factor × replayed`.

    `written` is the share of an LSTM's workspace that is resident: what it writes of a fresh mapping, all of it where
    it lies in a heap that others have written before.
    """

    malloc: MallocSettings
    library_bytes: float
    factor: float
    written: float


PARTLY_WRITTEN = 0.3
"""Share of an LSTM's workspace that is ever written, and so resident: gates and states, 4 to 5 of 15 parts. Measured
0.25 to 0.34 on single layers."""

MODELS: dict[Malloc, ResidentModel] = {
    "retained": ResidentModel(malloc=RETAINED, library_bytes=98e6, factor=1.18, written=1.0),
    "default": ResidentModel(malloc=DEFAULT, library_bytes=98e6, factor=1.18, written=PARTLY_WRITTEN),
    "mapped": ResidentModel(malloc=MAPPED, library_bytes=98e6, factor=1.0, written=PARTLY_WRITTEN),
}
"""By a plan's malloc setting; measured on one x86-64 machine under PyTorch 2.13 and glibc 2.36."""

_UPDATES = 3
"""Replayed updates: in the first the optimiser makes its state, and malloc learns what is large."""


def resident_peak(trace: Trace, malloc: Malloc, baseline_bytes: float, *, micro_batches: int | None = None) -> float:
    """The most the process will take of the machine's memory [bytes].

    Args:
        trace: one update on a CPU, repeated blocks all there.
        malloc: the plan's setting.
        baseline_bytes: what the process takes before training, the data in memory included
            (`stoker.devices.malloc.resident_bytes`). Where it has trained before, libraries have had theirs already,
            and the forecast is too high by `ResidentModel.library_bytes` at most.
        micro_batches: those of an update; None: as many as were traced.
    """
    model = MODELS[malloc]
    added = model.factor * replayed(trace, model, micro_batches=micro_batches)
    return baseline_bytes + model.library_bytes + added


def replayed(trace: Trace, model: ResidentModel, *, micro_batches: int | None = None) -> int:
    """The most malloc takes of the system over the first updates [bytes]."""
    timeline = timeline_of(trace, micro_batches=micro_batches)
    malloc = SystemMalloc(model.malloc)
    sizes = list(timeline.sizes)
    for index in _workspaces(trace):
        sizes[index] = round(sizes[index] * model.written)
    events = [i + 1 for i in timeline.before]
    events += timeline.first
    events += timeline.later * (_UPDATES - 1)
    blocks = [0] * len(sizes)
    for event in events:
        index = abs(event) - 1
        if event > 0:
            blocks[index] = malloc.malloc(sizes[index])
        else:
            malloc.free(blocks[index])
    return malloc.peak_resident


def _workspaces(trace: Trace) -> list[int]:
    """Storages that LSTM layers keep for their backward pass, beside their outputs."""
    found = []
    for index, storage in enumerate(trace.storages):
        operation = trace.operations[trace.occurrences[storage.born].operation] if storage.born >= 0 else None
        if operation is not None and operation.name == "mkldnn_rnn_layer":
            outputs = operation.outputs
            if any(one.dtype == "uint8" and one.numel == storage.num_bytes for one in outputs):
                found.append(index)
    return found
