"""A loss, a gradient or a weight that is infinite or not a number: the error by which recovery tells it from others.

Memory that could not be had: how it is recognised, and how much there is.

Which held-out set was evaluated when something went wrong: else the mistake is looked for in the training data.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from stoker.devices.cpu import attached_cpu
from stoker.devices.malloc import resident_bytes
from stoker.errors import BadJob, RunFailed


class NotFinite(RunFailed):
    """Training met a number that is not finite."""


def not_finite(what: str, value: float, update: int) -> NotFinite:
    """The error for update number `update` (from 0), in which `what` is `value`."""
    remedy = "Lower the learning rate, set clip_norm, or look for bad values in the data."
    if update == 0:
        remedy = "It is so before anything was learned: look at the data, the loss and the initial weights."
    return NotFinite(f"the {what} is {value} at update {update + 1}", remedy=remedy)


_MEMINFO = Path("/proc/meminfo")


def ran_out_of_memory(error: BaseException) -> bool:
    """Whether `error` is of memory that could not be had, on a GPU, by Python, or by PyTorch on a CPU."""
    # PyTorch 2.13 has a class of its own for GPUs only; on a CPU it is a RuntimeError which names the allocator.
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator" in str(error)


def free_bytes(device: torch.device) -> int | None:
    """Memory that nobody holds now [bytes]; None where the system does not tell.

    On a GPU the driver's figure; what PyTorch's allocator holds and does not use is not in it. On a CPU what the kernel
    could give without swapping (`MemAvailable`), and no more than the limits of this process leave it: its control
    group's, and that on its address space (`ulimit -v`).
    """
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = _MEMINFO.read_text(encoding="ascii").splitlines()
        available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError, IndexError):
        return None
    left = min(attached_cpu().memory_bytes - resident_bytes(), _address_space_left())
    return min(available, max(0, left))


def _address_space_left() -> int:
    """What the limit on this process's address space leaves it [bytes]; very much where there is none."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return sys.maxsize
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    return limit - pages * resource.getpagesize()


def reachable_bytes(device: torch.device) -> int | None:
    """Memory that this process holds or could get now [bytes]; None where the system does not tell."""
    free = free_bytes(device)
    if free is None:
        return None
    return free + (int(torch.cuda.memory_reserved(device)) if device.type == "cuda" else resident_bytes())


_BEGINS = "evaluating "


@contextmanager
def evaluating(split: str) -> Iterator[None]:
    """Within the block errors name the set: Stoker's own in their message, others in a note for `set_in_words`."""
    try:
        yield
    except (BadJob, RunFailed) as problem:
        problem.message = f"{_BEGINS}{split}=…: {problem.message}"
        raise
    except Exception as problem:
        problem.add_note(f"{_BEGINS}{split}=…")
        raise


def held_out_set_in_words(problem: BaseException) -> str:
    """` evaluating test=…`, if that is where an error came from; else nothing."""
    notes = getattr(problem, "__notes__", ())
    return next((f" {note}" for note in notes if note.startswith(_BEGINS)), "")
