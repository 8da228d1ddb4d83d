"""Functions run in several processes at once, as members of one world: for tests and proofs."""

from __future__ import annotations

import multiprocessing
import os
import pickle
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

_PRELOADED = ["stoker.testing.ranks", "stoker.stepping", "torch._dynamo"]
"""What members are forked with. PyTorch imports the last, of 800 modules, at an optimiser's first step."""
PATIENCE_S = 60.0
"""Longest that one process waits for another [s]: tests share their cores."""


class RankFailed(AssertionError):
    """What a process raised, with its traceback, under its rank."""


def on_ranks(layout: Layout, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What `function(world, *arguments)` returns in each process of the layout, by rank.

    The processes are forked from one that has imported PyTorch and computed nothing, and have one thread each.
    Function, arguments and results go between processes, so the function is one of a module.

    Raises:
        RankFailed: a process raised; the others are ended.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    with tempfile.TemporaryDirectory(prefix="stoker-ranks-") as folder:
        processes, ends = [], []
        for rank in range(layout.world_size):
            mine, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_run, args=(layout, rank, str(Path(folder) / "store"), theirs, function, arguments), daemon=True
            )
            process.start()
            theirs.close()
            processes.append(process)
            ends.append(mine)
        try:
            return _collected(ends)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _collected(ends: list[Any]) -> list[Any]:
    """What came out of each pipe, the first failure at once."""
    results: dict[int, Any] = {}
    waiting = dict(enumerate(ends))
    while waiting:
        ready: list[Any] = wait(list(waiting.values()))
        for end in ready:
            rank = next(number for number, one in waiting.items() if one is end)
            del waiting[rank]
            try:
                is_good, value = pickle.loads(end.recv_bytes())  # noqa: S301 - our own
            except EOFError:
                raise RankFailed(f"rank {rank} died without a word") from None
            if not is_good:
                raise RankFailed(f"rank {rank}:\n{value}")
            results[rank] = value
    return [results[rank] for rank in sorted(results)]


def _run(
    layout: Layout, rank: int, store: str, end: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    try:
        world = World() if layout.world_size == 1 else _joined(layout, rank, store)
        value = function(world, *arguments)
        # Not by `send`, by which tensors would go as handles of files that end with this process.
        end.send_bytes(pickle.dumps((True, value)))
        if dist.is_initialized():
            dist.barrier()  # nobody leaves while others still talk to it
        leave()
    except BaseException:  # noqa: BLE001 - told to whoever asked for the processes
        end.send_bytes(pickle.dumps((False, traceback.format_exc())))


def _joined(layout: Layout, rank: int, store: str) -> World:
    meeting = FileStore(store, layout.world_size)
    meeting.set_timeout(timedelta(seconds=PATIENCE_S))
    return join(layout, rank, meeting, device=torch.device("cpu"), patience_s=PATIENCE_S)
