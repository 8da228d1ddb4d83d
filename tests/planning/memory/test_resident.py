"""Resident memory of a process on a CPU."""

from __future__ import annotations

from stoker.planning.model.memory import MODELS, replayed, resident_peak
from tests.planning.memory.traces import operation, shaped, storage, trace_of

MIB = 1 << 20
STORAGES = [
    storage(30 * MIB, -1, None, "parameter"),
    storage(16 * MIB, 0, 2),
    storage(8 * MIB, 1, 1),
    storage(9 * MIB, 2, 2),
]


def test_mapped_needs_what_lives_and_what_libraries_take() -> None:
    """30 MiB of parameters and 25 of activations, on top of what was there."""
    found = resident_peak(trace_of(STORAGES, target="cpu"), "mapped", 200e6)
    expected = 200e6 + MODELS["mapped"].library_bytes + 55 * MIB
    assert expected <= found < expected + MIB


def test_default_needs_more_than_mapped() -> None:
    """Holes of the heap, and what is between tensors."""
    trace = trace_of(STORAGES, target="cpu")
    assert resident_peak(trace, "default", 200e6) > resident_peak(trace, "mapped", 200e6)


def test_of_an_lstms_workspace_a_third_is_written() -> None:
    """So the rest of it does not count as resident; of other tensors all does."""
    workspace = 40 * MIB
    layer = operation("mkldnn_rnn_layer", [shaped(4, 4)], [shaped(4, 4), shaped(workspace, dtype="uint8")])
    other = operation("relu", [shaped(4, 4)], [shaped(4, 4)])
    kept = [storage(workspace, 0, 1)]
    mapped = MODELS["mapped"]
    assert replayed(trace_of(kept, operations=[layer, other], target="cpu"), mapped) < 0.35 * workspace
    assert replayed(trace_of(kept, operations=[other, other], target="cpu"), mapped) > workspace
    # In a heap that keeps what it had, others have written the same pages before.
    assert replayed(trace_of(kept, operations=[layer, other], target="cpu"), MODELS["retained"]) > workspace
