"""Run a function in several processes of one world, for tests."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]  # missing from the stubs

from stoker.records import Layout
from stoker.stepping.world import World, join, leave
from stoker.testing.simulated_gpu import simulate_gpus

_PRELOADED = [
    "stoker.testing.ranks",
    "stoker.stepping.step",
    "stoker.loading.datasets",
    "stoker.zoo",
    "torch._dynamo",
    "stoker.stepping.layouts.sharded",
    "stoker.stepping.layouts.tensor_parallel",
    "stoker.stepping.layouts.pipeline",
]
"""Imported before forking. PyTorch imports the last one, of 800 modules, at an optimiser's first step."""
_OF_TESTS = ("pytest", "hypothesis")
"""Imported before forking where this process has imported them: each rank imports the module of the test."""
PATIENCE_S = 60.0
"""Longest wait of one process for another [s]: tests share their cores."""


class RankFailed(AssertionError):
    """A process raised: its rank and its traceback."""


def on_ranks(layout: Layout, function: Callable[..., Any], *arguments: Any, kind: str = "cpu") -> list[Any]:
    """Results of `function(world, *arguments)` in each process of the layout, by rank.

    Its device is the CPU, or of the kind `cuda` the GPU of the rank's number, which is simulated where this process has
    simulated ones.

    The processes are forked from one that has imported PyTorch and computed nothing, and have one thread each. The
    function, its arguments and results are pickled, so the function is one of a module.

    Raises:
        RankFailed: a process raised, or died; the others are ended.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*_PRELOADED, *(name for name in _OF_TESTS if name in sys.modules)])
    with tempfile.TemporaryDirectory(prefix="stoker-ranks-") as folder:
        processes, ends = [], []
        for rank in range(layout.world_size):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(
                target=_run,
                args=(layout, rank, Path(folder), sender, kind, function, arguments),
                daemon=True,
            )
            process.start()
            sender.close()
            processes.append(process)
            ends.append(receiver)
        try:
            results = _collected(ends, processes, Path(folder))
            for process in processes:  # each ends by itself, and writes what it measured, as coverage does
                process.join(PATIENCE_S)
            return results
        finally:
            for process in processes:
                process.kill()
                process.join()


def _collected(ends: list[Any], processes: list[Any], folder: Path) -> list[Any]:
    """The result from each pipe; raises at the first failure."""
    results: dict[int, Any] = {}
    while len(results) < len(ends):
        ready: list[Any] = wait([end for rank, end in enumerate(ends) if rank not in results])
        for end in ready:
            rank = ends.index(end)
            try:
                is_good, value = pickle.loads(end.recv_bytes())  # noqa: S301 - our own
            except EOFError:
                processes[rank].join(PATIENCE_S)
                stacks = _stacks_file(folder, rank).read_text(encoding="utf-8", errors="replace")
                raise RankFailed(f"rank {rank} died, exit code {processes[rank].exitcode}\n{stacks}") from None
            if not is_good:
                raise RankFailed(f"rank {rank}:\n{value}")
            results[rank] = value
    return [results[rank] for rank in sorted(results)]


def _stacks_file(folder: Path, rank: int) -> Path:
    """Where a process that a signal ends leaves the stacks of its threads."""
    return folder / f"stacks-{rank}.txt"


def _run(
    layout: Layout,
    rank: int,
    folder: Path,
    end: Connection,
    kind: str,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    stacks = _stacks_file(folder, rank).open("w", encoding="utf-8")
    faulthandler.enable(stacks)
    try:
        if kind == "cuda" and torch.version.cuda is None:
            simulate_gpus(layout.world_size)
        device = torch.device("cpu") if kind == "cpu" else torch.device(kind, rank)
        if kind == "cuda":
            torch.cuda.set_device(device)
        world = World()
        if layout.world_size > 1:
            file_store = FileStore(str(folder / "store"), layout.world_size)
            file_store.set_timeout(timedelta(seconds=PATIENCE_S))
            world = join(layout, rank, file_store, device=device, patience_s=PATIENCE_S)
        value = function(world, *arguments)
        # Not by `send`, which passes tensors as handles of files that end with this process.
        end.send_bytes(pickle.dumps((True, value)))
        if dist.is_initialized():
            dist.barrier()  # keeps this process alive while others still send to it
        leave()
    except BaseException:  # noqa: BLE001 - reported to the parent
        end.send_bytes(pickle.dumps((False, traceback.format_exc())))
