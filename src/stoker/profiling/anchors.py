"""How fast a CPU is at this moment: the same few calls every time, in a fraction of a second.

The speed of a machine that is shared changes from minute to minute, by more than forecasts may be off. Times of
operations are measured once, by `micro_benchmark`, and anchors beside them; anchors measured again later say how much
longer the same work takes now. Their memory is little, so that they leave the process no larger than before.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from stoker.profiling import thread_count

TURNS = 12
"""Of all anchors, one measurement: about half a second."""
_SLICE_S = 4e-3
_SIZE, _ROWS, _WIDTH = 384, 2048, 512
_TINY_CALLS = 40

Run = Callable[[], object]
Turn = Mapping[str, float]
"""Mean time of a call of each anchor [s], of one turn."""


class Anchors:
    """Products, what moves memory, rows and calls of next to nothing, with their memory (about 20 MiB)."""

    def __init__(self) -> None:
        a, b, out = (torch.full((_SIZE, _SIZE), 0.5) for _ in range(3))
        narrow = [tensor.bfloat16() for tensor in (a, b, out)]
        images, kernel = torch.full((8, 32, 28, 28), 0.5), torch.full((32, 32, 3, 3), 0.5)
        x, y, result = (torch.full((_ROWS, _WIDTH), 0.5) for _ in range(3))
        tiny = torch.full((64,), 0.5)
        self._runs: dict[str, Run] = {
            "product in fp32": functools.partial(torch.mm, a, b, out=out),
            "product in bf16": functools.partial(torch.mm, narrow[0], narrow[1], out=narrow[2]),
            "convolution": functools.partial(torch.conv2d, images, kernel, padding=1),
            "sum of two": functools.partial(torch.add, x, y, out=result),
            "exponential of each": functools.partial(torch.exp, x, out=result),
            "softmax of rows": functools.partial(torch.softmax, x, -1, out=result),
            "norm of rows": functools.partial(torch.layer_norm, x, [_WIDTH]),
            "calls of next to nothing": functools.partial(_repeat, functools.partial(torch.neg, tiny, out=tiny)),
        }
        for run in self._runs.values():
            run()

    def turn(self, clock: Callable[[], float]) -> Turn:
        """Each anchor over and over for a slice of time; what disturbs it counts, as it does in updates."""
        with torch.inference_mode():
            return {name: _mean_seconds(run, clock) for name, run in self._runs.items()}


def measure_anchors(
    *, threads: int, turns: int = TURNS, clock: Callable[[], float] = time.perf_counter
) -> tuple[Turn, ...]:
    """Times of all anchors, turn by turn; PyTorch's threads are as before afterwards.

    Args:
        threads: threads PyTorch computes with.
        turns: how many.
        clock: reads seconds.
    """
    with thread_count.threads(threads):
        anchors = Anchors()
        return tuple(anchors.turn(clock) for _ in range(turns))


def usual(turns: Sequence[Turn]) -> dict[str, float]:
    """The median of each anchor over turns [s]."""
    return {name: statistics.median(turn[name] for turn in turns) for name in turns[0]} if turns else {}


def _mean_seconds(run: Run, clock: Callable[[], float]) -> float:
    started = now = clock()
    calls = 0
    while calls == 0 or now - started < _SLICE_S:
        run()
        calls += 1
        now = clock()
    return max((now - started) / calls, 1e-9)


def _repeat(run: Run) -> None:
    for _ in range(_TINY_CALLS):
        run()
