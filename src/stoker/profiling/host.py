"""What Python and autograd take besides the operations themselves: measured on layers too small to compute anything."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

from stoker.jobs import AdamW, Job
from stoker.loading import BatchSource, datasets_of
from stoker.records import Coupling, Plan, Position
from stoker.stepping import Step
from stoker.units import epochs

_ATEN = torch.ops.aten
_FEW, _MANY = 4, 24
_READINGS = 16
_WIDTH, _ROWS = 16, 2
_PARAMETERS_OF_BLOCK = 4
_OPERATIONS_OF_TINY_UPDATE = 14
"""Forward: product, log-softmax, loss. Backward: as many, a sum, a product. Division, finiteness, the optimiser."""


def host_seconds(clock: Callable[[], float] = time.perf_counter) -> dict[str, float]:
    """Seconds by `forward` and `backward` for each operation, `optimizer` for each parameter, `update` for each update.

    Of blocks of layers so narrow that nothing is computed, few and many: the difference is what a block costs. What its
    operations cost when they are called directly is taken off.
    """
    few, many = _Blocks(_FEW), _Blocks(_MANY)
    forward_calls, backward_calls = _forward_calls(), _backward_calls()
    num_forward, num_backward = len(forward_calls), len(backward_calls)

    def of_block(prepare: Callable[[_Blocks], Callable[[], object]]) -> float:
        more, less = (_median(lambda one=one: prepare(one), clock) for one in (many, few))  # type: ignore[misc]
        return (more - less) / (_MANY - _FEW)

    direct_forward = _median(lambda: _all_of(forward_calls), clock) / num_forward
    direct_backward = _median(lambda: _all_of(backward_calls), clock) / num_backward
    forward = max(0.0, of_block(lambda blocks: blocks.forward) / num_forward - direct_forward)
    backward = max(0.0, of_block(_Blocks.prepared_backward) / num_backward - direct_backward)
    optimizer = max(0.0, of_block(lambda blocks: blocks.optimizer.step) / _PARAMETERS_OF_BLOCK)
    counted = _OPERATIONS_OF_TINY_UPDATE * (direct_forward + (forward + backward) / 2) + 2 * optimizer
    tiny = _tiny_update()
    update = max(0.0, _median(lambda: tiny, clock) - counted)
    return {"forward": forward, "backward": backward, "optimizer": optimizer, "update": update}


class _Blocks:
    """Blocks of a linear layer, a layer norm and a GELU."""

    def __init__(self, count: int) -> None:
        blocks = [(nn.Linear(_WIDTH, _WIDTH), nn.LayerNorm(_WIDTH), nn.GELU()) for _ in range(count)]
        self._model = nn.Sequential(*(layer for block in blocks for layer in block))
        self._input = torch.ones(_ROWS, _WIDTH)
        self.optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-9, fused=True)
        self.prepared_backward()()

    def forward(self) -> torch.Tensor:
        output: torch.Tensor = self._model(self._input)
        return output

    def prepared_backward(self) -> Callable[[], object]:
        for parameter in self._model.parameters():
            parameter.grad = None
        return self.forward().sum().backward


def _forward_calls() -> list[Callable[[], object]]:
    x, weight, row = torch.ones(_ROWS, _WIDTH), torch.ones(_WIDTH, _WIDTH), torch.ones(_WIDTH)
    return [
        lambda: _ATEN.addmm.default(row, x, weight),
        lambda: _ATEN.native_layer_norm.default(x, [_WIDTH], row, row, 1e-5),
        lambda: _ATEN.gelu.default(x),
    ]


def _backward_calls() -> list[Callable[[], object]]:
    x, weight, row = torch.ones(_ROWS, _WIDTH), torch.ones(_WIDTH, _WIDTH), torch.ones(_WIDTH)
    each = torch.ones(_ROWS, 1)
    mask = [True, True, True]
    return [
        lambda: _ATEN.gelu_backward.default(x, x),
        lambda: _ATEN.native_layer_norm_backward.default(x, x, [_WIDTH], each, each, row, row, mask),
        lambda: _ATEN.mm.default(x, weight),
        lambda: _ATEN.mm.default(x.t(), x),
        lambda: _ATEN.sum.dim_IntList(x, [0], True),
    ]


def _all_of(calls: list[Callable[[], object]]) -> Callable[[], object]:
    def run() -> None:
        for call in calls:
            call()

    return run


def _tiny_update() -> Callable[[], object]:
    """An update of Stoker's own step, of a model of two parameters."""
    inputs, targets = torch.ones(_ROWS, _WIDTH), torch.zeros(_ROWS, dtype=torch.int64)
    job = Job(
        model=lambda: nn.Linear(_WIDTH, 2),
        data=(inputs, targets),
        loss="cross_entropy",
        optimizer=AdamW(lr=1e-9),
        batch=_ROWS,
        until=epochs(1),
    )
    plan = Plan(device="cpu", micro_batch=_ROWS, threads=torch.get_num_threads(), optimizer_implementation="fused")
    step = Step(job, plan, Coupling(kind="separable", group=None, causes=(), evidence="known"))
    data = datasets_of(job)
    source = BatchSource(data.train, step.pipeline(data.train, augmented=True), data.extent(job), job.seed, plan)
    batch = next(source.batches(Position(), 1))
    step.update(batch, 0, 0.0)
    step.update(batch, 0, 0.0)
    return lambda: step.update(batch, 0, 0.0)


def _median(prepare: Callable[[], Callable[[], object]], clock: Callable[[], float]) -> float:
    """Median time of what `prepare` returns [s], which is prepared anew for each reading."""
    readings = []
    for _ in range(_READINGS):
        run = prepare()
        started = clock()
        run()
        readings.append(clock() - started)
    # Kernels and caches are warmed up by the first.
    return statistics.median(readings[1:])
