"""One of the processes that measure their links together: `python -m stoker.profiling.link_worker`, see `links`.

Method: messages of each size go several times, how often all agree on beforehand, and count by their mean without the
slowest tenth on the process that took the longest: an update has many of them and takes as long as their sum.
Arithmetic is timed on the first process while the others wait, and then on all at once: processes on one CPU share its
caches, its memory and its clock. What of a message passes beside arithmetic is what both at once take less than one
after the other. On a CPU a message that all stop for takes longer in training than one after another does: processes
come to it at different moments, and the threads that carry it wake up on cores at work. That is what turns of both
take longer than arithmetic alone and messages as timed here, together.
"""

from __future__ import annotations

import functools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]  # missing from the stubs

SIZES: tuple[int, ...] = (4, 1 << 12, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26)
"""Of messages [bytes]."""

_SLICE_S, _MOST_CALLS, _LONGEST_S = 0.12, 40, 0.4
"""What each size takes [s], in at most so many calls; after one that takes longer than that, none larger is tried."""
_BESIDE_BYTES = 1 << 24
_PATIENCE = timedelta(seconds=120)
_ROUNDS = 5
_MEETING_BYTES, _MEETINGS = 1 << 20, 10
_ARITHMETIC_S: tuple[float, ...] = (1e-3, 4e-3, 16e-3)
"""Between messages that all stop for [s]: layers of a tensor group, blocks of small and of larger models."""
# PyTorch 2.13 has new names for these, and warns of the old ones.
_GATHER: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_SCATTER: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def measure(device: torch.device) -> dict[str, Any]:
    """Links and company of this process, a member of a process group in which all others call this too."""
    found: dict[str, Any] = {"collectives": dict(_collectives(device)), "slowdown": {}, "overlap": 0.9, "waits": []}
    if device.type == "cpu":
        found["slowdown"] = _slowdown()
        found["waits"] = [(seconds, _wait_s(seconds)) for seconds in _ARITHMETIC_S]
    found["overlap"] = _overlap(device)
    return found


def _collectives(device: torch.device) -> Iterator[tuple[str, list[tuple[int, float]]]]:
    """Sizes and times of each collective."""
    size = dist.get_world_size()
    for name, prepare in _CALLS.items():
        if name == "point-to-point" and size < 2:
            continue
        points: list[tuple[int, float]] = []
        for num_bytes in SIZES:
            count = max(1, num_bytes // 4)
            count = count if name in ("all-reduce", "point-to-point") else -(-count // size) * size
            call = prepare(torch.ones(count, device=device))
            seconds = _agreed(_usual, call, device)
            points.append((count * 4, seconds / (2 if name == "point-to-point" else 1)))
            if seconds > _LONGEST_S:
                break
        yield name, points


def _all_gather(whole: torch.Tensor) -> Callable[[], object]:
    part = whole.view(dist.get_world_size(), -1)[0].clone()
    return lambda: _GATHER(whole, part)


def _reduce_scatter(whole: torch.Tensor) -> Callable[[], object]:
    part = whole.view(dist.get_world_size(), -1)[0].clone()
    return lambda: _SCATTER(part, whole)


def _all_to_all(whole: torch.Tensor) -> Callable[[], object]:
    received = torch.empty_like(whole)
    return lambda: dist.all_to_all_single(received, whole)


def _there_and_back(whole: torch.Tensor) -> Callable[[], object]:
    """Between the first two processes; the others do nothing."""
    rank = dist.get_rank()

    def call() -> None:
        if rank == 0:
            dist.send(whole, 1)
            dist.recv(whole, 1)
        elif rank == 1:
            dist.recv(whole, 0)
            dist.send(whole, 0)

    return call


_CALLS: dict[str, Callable[[torch.Tensor], Callable[[], object]]] = {
    "all-reduce": lambda whole: lambda: dist.all_reduce(whole, op=dist.ReduceOp.MAX),
    "all-gather": _all_gather,
    "reduce-scatter": _reduce_scatter,
    "all-to-all": _all_to_all,
    "point-to-point": _there_and_back,
}


def _agreed(count: Callable[[list[float]], float], call: Callable[[], object], device: torch.device) -> float:
    """The time of a call that all make equally often, counted so, on the process where it took the longest [s]."""
    call()
    first = _largest(_timed(call, device), device)
    calls = max(3, min(_MOST_CALLS, int(_SLICE_S / max(first, 1e-6))))
    return _largest(count([_timed(call, device) for _ in range(calls)]), device)


_agreed_median = functools.partial(_agreed, statistics.median)


def _usual(times: list[float]) -> float:
    """The mean without the slowest tenth: times are of two kinds, with and without a wait for a core."""
    return statistics.fmean(sorted(times)[: math.ceil(0.9 * len(times))])


def _timed(call: Callable[[], object], device: torch.device) -> float:
    started = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


def _largest(seconds: float, device: torch.device) -> float:
    """The largest of what the processes say."""
    said = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(said, op=dist.ReduceOp.MAX)
    return float(said)


def _slowdown() -> dict[str, float]:
    """How much longer arithmetic takes where all compute than where the first process does alone, by what bounds it."""
    a, b = torch.ones(384, 384), torch.ones(384, 384)
    source, target = torch.ones(1 << 22), torch.ones(1 << 22)
    works: dict[str, Callable[[], object]] = {
        "arithmetic": lambda: torch.mm(a, b), "memory": lambda: torch.add(source, target, out=target),
    }  # fmt: skip
    cpu = torch.device("cpu")
    alone: dict[str, list[float]] = {name: [] for name in works}
    together: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(_ROUNDS):
        for name, work in works.items():
            dist.barrier()
            if dist.get_rank() == 0:
                alone[name].append(_for_a_while(work))
            dist.barrier()
            together[name].append(_for_a_while(work))
    if dist.get_rank() == 0:
        ratios = {name: statistics.median(together[name]) / statistics.median(alone[name]) for name in works}
    else:
        ratios = dict.fromkeys(works, 1.0)
    return {name: max(1.0, _largest(ratio, cpu)) for name, ratio in ratios.items()}


def _for_a_while(work: Callable[[], object], seconds: float = 0.06) -> float:
    """The median time of a call over some time [s]."""
    times, started = [], time.perf_counter()
    while time.perf_counter() - started < seconds:
        begun = time.perf_counter()
        work()
        times.append(time.perf_counter() - begun)
    return statistics.median(times)


def _wait_s(arithmetic_s: float) -> float:
    """What a message takes longer where every process comes to it from so much arithmetic [s].

    By means, since an update has many of them and takes as long as their sum.
    """
    cpu, a, b = torch.device("cpu"), torch.ones(384, 384), torch.ones(384, 384)
    message = _all_gather(torch.ones(_MEETING_BYTES // 4))
    calls = max(1, round(arithmetic_s / _agreed_median(lambda: torch.mm(a, b), cpu)))

    def arithmetic() -> None:
        for _ in range(calls):
            torch.mm(a, b)

    def turn() -> None:
        arithmetic()
        message()

    message_s = _agreed(_usual, message, cpu)
    return max(0.0, statistics.median(_mean(turn) - _mean(arithmetic) - message_s for _ in range(_ROUNDS)))


def _mean(work: Callable[[], object]) -> float:
    """The mean time of a call among `_MEETINGS` in a row, on the process that takes the longest for all [s]."""
    dist.barrier()
    started = time.perf_counter()
    for _ in range(_MEETINGS):
        work()
    return _largest((time.perf_counter() - started) / _MEETINGS, torch.device("cpu"))


def _overlap(device: torch.device) -> float:
    """Which share of a message passes beside arithmetic [0 to 1]."""
    message = torch.ones(_BESIDE_BYTES // 4, device=device)
    size = 384 if device.type == "cpu" else 4096
    a, b = torch.ones(size, size, device=device), torch.ones(size, size, device=device)
    message_s = _agreed_median(lambda: dist.all_reduce(message, op=dist.ReduceOp.MAX), device)
    each_s = _agreed_median(lambda: torch.mm(a, b), device)
    calls = max(1, round(message_s / each_s))

    def arithmetic() -> None:
        for _ in range(calls):
            torch.mm(a, b)

    def both() -> None:
        work = dist.all_reduce(message, op=dist.ReduceOp.MAX, async_op=True)
        arithmetic()
        work.wait()

    arithmetic_s, both_s = _agreed_median(arithmetic, device), _agreed_median(both, device)
    saved = (message_s + arithmetic_s - both_s) / min(message_s, arithmetic_s)
    return min(1.0, max(0.0, saved))


def main(arguments: Sequence[str]) -> None:
    """Meet the others, measure, and leave what was found in a file.

    Args:
        arguments: rank, number of processes, kind of device, threads, the folder to meet in.
    """
    rank, size, kind, threads, folder = arguments
    torch.set_num_threads(int(threads))
    device = torch.device("cpu") if kind == "cpu" else torch.device("cuda", int(rank))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store = FileStore(str(Path(folder) / "store"), int(size))
    backend = "gloo" if device.type == "cpu" else "nccl"
    dist.init_process_group(backend, store=store, rank=int(rank), world_size=int(size), timeout=_PATIENCE)
    found = measure(device)
    if int(rank) == 0:
        (Path(folder) / "found.json").write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
