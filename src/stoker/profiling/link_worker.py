"""One of the processes that measure their links together: `python -m stoker.profiling.link_worker`, see `links`.

Method: each message is sent several times, as often as all processes agree, and counts by its mean without the slowest
tenth on the slowest process: an update has many messages and takes as long as their sum. Slowdown: arithmetic is timed
on the first process while the others wait, and then on all at once, since processes on one CPU share its caches, memory
and clock. Overlap: both at once take less time than one after the other by the hidden part of a message. Waits: on a
CPU a blocking message takes longer in training than in a loop, since processes reach it at different moments and the
threads that carry it wake up on busy cores. The excess is measured by alternating messages with arithmetic.
"""

from __future__ import annotations

import functools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]  # missing from the stubs

SIZES: tuple[int, ...] = (4, 1 << 12, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26)
"""Sizes of messages [bytes]."""

_SLICE_S, _MOST_CALLS, _LONGEST_S = 0.12, 40, 0.4
"""Time for each size [s], its largest number of calls, and the longest call [s] before a larger size is tried."""
_OVERLAPPED_BYTES = 1 << 24
_PATIENCE = timedelta(seconds=120)
_ROUNDS = 5
_MEETING_BYTES, _MEETINGS = 1 << 20, 10
_ARITHMETIC_S: tuple[float, ...] = (1e-3, 4e-3, 16e-3)
"""Times between blocking messages [s]: layers of a tensor group, blocks of small and of larger models."""
# PyTorch 2.13 has new names for these, and warns of the old ones.
_GATHER: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_SCATTER: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def measure(device: torch.device) -> dict[str, Any]:
    """Collectives, slowdown, overlap and waits, measured in a process group in which all processes call this."""
    size = dist.get_world_size()
    collectives: dict[str, list[tuple[int, float]]] = {}
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
        collectives[name] = points
    slowdown, waits = {}, []
    if device.type == "cpu":
        slowdown = _slowdown()
        waits = [(seconds, _wait_s(seconds)) for seconds in _ARITHMETIC_S]
    return {"collectives": collectives, "slowdown": slowdown, "overlap": _overlap(device), "waits": waits}


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
    """Time of a call on the slowest process [s]; all make it equally often, and `count` reduces the times."""
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
    """The largest value over the processes."""
    largest = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return float(largest)


def _slowdown() -> dict[str, float]:
    """Time of work on all processes at once over its time on the first one alone [1], for each bound."""
    a, b = torch.ones(384, 384), torch.ones(384, 384)
    source, target = torch.ones(1 << 22), torch.ones(1 << 22)
    works: dict[str, Callable[[], object]] = {
        "arithmetic": lambda: torch.mm(a, b),
        "memory": lambda: torch.add(source, target, out=target),
    }
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


_WHILE_S = 0.06


def _for_a_while(work: Callable[[], object]) -> float:
    """The median time of a call over some time [s]."""
    times, started = [], time.perf_counter()
    while time.perf_counter() - started < _WHILE_S:
        begun = time.perf_counter()
        work()
        times.append(time.perf_counter() - begun)
    return statistics.median(times)


def _wait_s(arithmetic_s: float) -> float:
    """Extra time of a message after `arithmetic_s` of arithmetic on each process [s].

    By means, since an update has many messages and takes as long as their sum.
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
    """Mean time of a call among `_MEETINGS` in a row, on the slowest process [s]."""
    dist.barrier()
    started = time.perf_counter()
    for _ in range(_MEETINGS):
        work()
    return _largest((time.perf_counter() - started) / _MEETINGS, torch.device("cpu"))


def _overlap(device: torch.device) -> float:
    """Share of a message that overlaps with arithmetic [0 to 1]."""
    message = torch.ones(_OVERLAPPED_BYTES // 4, device=device)
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
    """Join the process group, measure, and write the result to a file.

    Args:
        arguments: rank, number of processes, kind of device, threads, shared folder.
    """
    rank, size, kind, threads, folder = arguments
    torch.set_num_threads(int(threads))
    device = torch.device("cpu") if kind == "cpu" else torch.device("cuda", int(rank))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store = FileStore(str(Path(folder) / "store"), int(size))
    backend = "gloo" if device.type == "cpu" else "nccl"
    dist.init_process_group(backend, store=store, rank=int(rank), world_size=int(size), timeout=_PATIENCE)
    links = measure(device)
    if int(rank) == 0:
        (Path(folder) / "found.json").write_text(json.dumps(links), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
