"""What Python and autograd take besides the operations themselves: measured on layers too small to compute anything."""

# ruff: noqa: SLF001 - some operations of ATen have such names

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from stoker.jobs import AdamW, Job
from stoker.loading import BatchSource, datasets_of
from stoker.records import Coupling, Plan, Position
from stoker.stepping import Step
from stoker.stepping.fused_update import fused_update
from stoker.units import epochs

_ATEN = torch.ops.aten
_FEW, _MANY = 4, 24
_ROUNDS = 32
_WARMING = 4
_WIDTH, _ROWS, _CLASSES = 16, 2, 2
_SUM, _NO_LABEL = 2, -100
"""As ATen has them: a loss that is summed, and the label that counts for nothing."""
_PARAMETERS_OF_BLOCK = 4
_OPERATIONS_OF_TINY_PASS = 4
"""Forward: product, log-softmax, loss and a look at the labels. Backward: as many, with two of the product's."""


def host_seconds(clock: Callable[[], float] = time.perf_counter) -> dict[str, float]:
    """Seconds by `forward` and `backward` for each operation, `optimizer` for each parameter, `update` for each update.

    Of blocks of layers so narrow that nothing is computed, few and many: the difference is what a block costs. What its
    operations cost when they are called directly is taken off.
    """
    few, many = _Blocks(_FEW), _Blocks(_MANY)
    forward_calls, backward_calls = _forward_calls(), _backward_calls()
    tiny_update, tiny_calls = _tiny_update(), _tiny_calls()
    readings = _readings(
        {
            "few forward": lambda: few.forward,
            "many forward": lambda: many.forward,
            "few backward": few.prepared_backward,
            "many backward": many.prepared_backward,
            "few optimizer": lambda: few.update,
            "many optimizer": lambda: many.update,
            "direct forward": lambda: _warm(forward_calls),
            "direct backward": lambda: _warm(backward_calls),
            "direct update": lambda: _warm(tiny_calls),
            "update": lambda: _warm([tiny_update]),
        },
        clock,
    )

    def of_block(phase: str) -> float:
        """From pairs of readings that lie side by side, so that a busy moment is in both."""
        pairs = zip(readings[f"many {phase}"], readings[f"few {phase}"], strict=True)
        return statistics.median(more - less for more, less in pairs) / (_MANY - _FEW)

    forward, backward = (
        max(0.0, (of_block(phase) - statistics.median(readings[f"direct {phase}"])) / len(calls))
        for phase, calls in (("forward", forward_calls), ("backward", backward_calls))
    )
    optimizer = max(0.0, of_block("optimizer") / _PARAMETERS_OF_BLOCK)
    counted = statistics.median(readings["direct update"]) + _OPERATIONS_OF_TINY_PASS * (forward + backward)
    update = max(0.0, statistics.median(readings["update"]) - counted)
    return {"forward": forward, "backward": backward, "optimizer": optimizer, "update": update}


class _Blocks:
    """Blocks of a linear layer, a layer norm and a GELU."""

    def __init__(self, count: int) -> None:
        blocks = [(nn.Linear(_WIDTH, _WIDTH), nn.LayerNorm(_WIDTH), nn.GELU()) for _ in range(count)]
        self._model = nn.Sequential(*(layer for block in blocks for layer in block))
        self._input = torch.ones(_ROWS, _WIDTH)
        self.update = fused_update(torch.optim.AdamW(self._model.parameters(), lr=1e-9, fused=True))
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


def _tiny_calls() -> list[Callable[[], object]]:
    """The operations of `_tiny_update`, called directly."""
    x, weight, bias = torch.ones(_ROWS, _WIDTH), torch.ones(_WIDTH, _CLASSES), torch.ones(_CLASSES)
    labels, scalar, logits = torch.zeros(_ROWS, dtype=torch.int64), torch.ones(()), torch.ones(_ROWS, _CLASSES)
    layer = nn.Linear(_WIDTH, _CLASSES)
    for parameter in layer.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return [
        lambda: _ATEN.addmm.default(bias, x, weight),
        lambda: _ATEN._log_softmax.default(logits, 1, False),
        lambda: _ATEN.nll_loss_forward.default(logits, labels, None, _SUM, _NO_LABEL),
        lambda: _ATEN.min.default(labels),
        lambda: _ATEN.nll_loss_backward.default(scalar, logits, labels, None, _SUM, _NO_LABEL, scalar),
        lambda: _ATEN._log_softmax_backward_data.default(logits, logits, 1, torch.float32),
        lambda: _ATEN.mm.default(logits.t(), x),
        lambda: _ATEN.sum.dim_IntList(logits, [0], True),
        lambda: _ATEN.div.Tensor(scalar, scalar),
        fused_update(torch.optim.AdamW(layer.parameters(), lr=1e-9, fused=True)),
    ]


def _warm(calls: Sequence[Callable[[], object]]) -> Callable[[], None]:
    """All calls, whose code is in the caches already: as the micro-benchmark times operations, and updates follow."""

    def run() -> None:
        for call in calls:
            call()

    for _ in range(_WARMING):
        run()
    return run


def _tiny_update() -> Callable[[], object]:
    """An update of Stoker's own step, of a model of two parameters."""
    inputs, targets = torch.ones(_ROWS, _WIDTH), torch.zeros(_ROWS, dtype=torch.int64)
    job = Job(
        model=lambda: nn.Linear(_WIDTH, _CLASSES),
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


def _readings(
    prepares: Mapping[str, Callable[[], Callable[[], object]]], clock: Callable[[], float]
) -> dict[str, list[float]]:
    """Times of what each of `prepares` returns [s], which is prepared anew for each; all take turns."""
    readings: dict[str, list[float]] = {name: [] for name in prepares}
    for _ in range(_ROUNDS + 1):
        for name, prepare in prepares.items():
            run = prepare()
            started = clock()
            run()
            readings[name].append(clock() - started)
    # Kernels and caches are warmed up by the first.
    return {name: several[1:] for name, several in readings.items()}
