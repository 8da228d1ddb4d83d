"""Errors of a step: numbers that are not finite, memory that ran out, and the held-out set under evaluation."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from stoker.devices.cpu import attached_cpu
from stoker.devices.malloc import resident_bytes
from stoker.errors import BadJob, RunFailed


class NotFinite(RunFailed):
    """A loss, a gradient or a weight is infinite or not a number."""


def not_finite(what: str, value: float, update: int) -> NotFinite:
    """The error for update number `update` (from 0), in which `what` is `value`."""
    remedy = "Lower the learning rate, set clip_norm, or look for bad values in the data."
    if update == 0:
        remedy = "It is so before anything was learned: look at the data, the loss and the initial weights."
    return NotFinite(f"the {what} is {value} at update {update + 1}", remedy=remedy)


_MEMINFO = Path("/proc/meminfo")


_SHORTAGES = (
    "DefaultCPUAllocator",
    "CUDA error: out of memory",
    "STATUS_ALLOC_FAILED",
    "HOST_ALLOCATION_FAILED",
    "DEVICE_ALLOCATION_FAILED",
)
"""In messages of errors that have no class: of PyTorch's allocator on a CPU, of the CUDA driver, cuBLAS and cuDNN."""


def ran_out_of_memory(error: BaseException) -> bool:
    """Whether `error` is a failed allocation, on a GPU, by Python, or by PyTorch on a CPU."""
    # PyTorch's own class is for its allocator on GPUs only; the driver and libraries that allocate past it have none.
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(name in str(error) for name in _SHORTAGES)


def free_bytes(device: torch.device) -> int | None:
    """Free memory [bytes]; None where the system does not report it.

    On a GPU the driver's figure, without the unused memory that PyTorch's allocator holds. On a CPU the memory that is
    available without swapping (`MemAvailable`), at most what the limits of this process leave it: its control group's,
    and that on its address space (`ulimit -v`).
    """
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = _MEMINFO.read_text(encoding="ascii").splitlines()
        available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError, IndexError):
        return None
    left = attached_cpu().memory_bytes - resident_bytes()
    address_space = resource.getrlimit(resource.RLIMIT_AS)[0]
    if address_space != resource.RLIM_INFINITY:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        left = min(left, address_space - pages * resource.getpagesize())
    return min(available, max(0, left))


def reachable_bytes(device: torch.device) -> int | None:
    """Memory that this process holds or could allocate now [bytes]; None where the system does not report it."""
    free = free_bytes(device)
    if free is None:
        return None
    return free + (int(torch.cuda.memory_reserved(device)) if device.type == "cuda" else resident_bytes())


_BEGINS = "evaluating "


@contextmanager
def evaluating(split: str) -> Iterator[None]:
    """Makes errors name the set: Stoker's own in their message, others in a note for `held_out_set_in_words`."""
    try:
        yield
    except (BadJob, RunFailed) as problem:
        problem.message = f"{_BEGINS}{split}=…: {problem.message}"
        raise
    except Exception as problem:
        problem.add_note(f"{_BEGINS}{split}=…")
        raise


def held_out_set_in_words(problem: BaseException) -> str:
    """` evaluating test=…`, if the error occurred in an evaluation; else an empty text."""
    notes = getattr(problem, "__notes__", ())
    return next((f" {note}" for note in notes if note.startswith(_BEGINS)), "")


_TRY = "try: "


def suggest(problem: Exception, remedy: str) -> None:
    """Give an error of the user's code a remedy, which `remedy_in` finds."""
    problem.add_note(f"{_TRY}{remedy}")


def remedy_in(problem: Exception) -> str | None:
    """The remedy that `suggest` gave an error; None if there is none."""
    notes = (str(note) for note in getattr(problem, "__notes__", ()))
    return next((note.removeprefix(_TRY) for note in notes if note.startswith(_TRY)), None)
