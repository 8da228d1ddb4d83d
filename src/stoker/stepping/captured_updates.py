"""Several updates of a captured pass in one call: passes and fused optimiser steps in turn, without Python between.

What: the operations of a captured pass and of the optimiser's kernel, `LENGTH` times over, as one list for PyTorch's
own interpreter; the same operations in the same order, so the same bits. A loss that is not finite, or a lack of
memory, leaves that update and those after it undone: each kernel asks for it before it moves anything, and a loss is
noted only after its kernel. Use when: updates take a millisecond or less, so that Python around them is a tenth of
the time. Costs: milliseconds, once; the inputs of `LENGTH` batches. Does not combine with: a pass that draws random
numbers, or has buffers, which would have to be put back; clipping, penalties, averages, augmentation, hooks that see
every update, several processes. There, updates are made one by one.
Source: `found_inf` of PyTorch's fused kernels, `aten/src/ATen/native/cpu/FusedAdamKernel.cpp` and `FusedSGDKernel.cpp`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch

from stoker.loading.batches import Batch
from stoker.stepping.capture import CapturedPass
from stoker.stepping.fused_update import FusedUpdate, Group, Tensors
from stoker.stepping.graph_interpreter import NOT_EXPRESSIBLE, Repeat, Script

LENGTH = 4
"""Updates in one call; 8 give nothing more. It divides the intervals of sweeps and of checks of captured passes."""

_aten = torch.ops.aten
_KERNELS: dict[type[torch.optim.Optimizer], Any] = {
    torch.optim.SGD: _aten._fused_sgd_.default,
    torch.optim.Adam: _aten._fused_adam_.default,
    torch.optim.AdamW: _aten._fused_adamw_.default,
}


class CapturedUpdates:
    """`LENGTH` updates of `optimizer` by `update`, on gradients of `captured`; rebuilt after a change."""

    def __init__(self, captured: CapturedPass, update: FusedUpdate, optimizer: torch.optim.Optimizer) -> None:
        self.captured, self._update, self._optimizer = captured, update, optimizer
        self._call: Repeat | None = None
        self._made_of: tuple[object, ...] = ()
        self._kept: tuple[object, ...] = ()
        self._state = torch.zeros(())
        """0 while all losses of a call were finite, then NaN."""
        self._losses = torch.zeros(LENGTH, dtype=torch.float64)

    def __call__(self, batches: Sequence[Batch], first: int, rates: Sequence[Sequence[float]]) -> list[float]:
        """Make updates from number `first` on, at the learning rates of each group for each of them.

        Returns the mean losses of the updates that were made; none where they cannot be made in one call.
        """
        graph, groups = self.captured.graph, self._update.groups()
        if graph is None or groups is None:
            return []
        settings = [[value for key, value in group.items() if key not in ("params", "lr")] for group in self._groups]
        made_of = id(graph), id(groups), settings  # both are alive: `_built` keeps them
        if self._made_of != made_of:
            self._made_of, self._call = made_of, None
            with contextlib.suppress(*NOT_EXPRESSIBLE):
                self._call = self._built(graph, groups)
        if self._call is None:
            return []
        inputs = []
        for update, batch in enumerate(batches, first):
            leaves = self.captured.inputs(batch, update)
            if leaves is None:
                return []
            inputs.append(leaves)
        self._state.zero_()
        self._losses.fill_(math.nan)
        with contextlib.suppress(RuntimeError):  # raised again by the update that is then made by itself
            self._call(*itertools.chain.from_iterable(inputs), *itertools.chain.from_iterable(rates))
        return list(itertools.takewhile(math.isfinite, self._losses.tolist()))

    @property
    def _groups(self) -> list[Group]:
        return self._optimizer.param_groups

    def _built(self, graph: torch.fx.GraphModule, groups: list[Tensors]) -> Repeat | None:
        """The call; None where some draw is random, or some parameter has no gradient."""
        self._kept = graph, groups
        targets = [node.target for node in graph.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]  # noqa: SLF001 - has no public name
        if any(torch.Tag.nondeterministic_seeded in target.tags for target in targets):
            return None
        script = Script(graph, times=LENGTH, num_floats=LENGTH * len(groups))
        state, is_bad, rates = script.kept(self._state), script.kept(torch.zeros(())), iter(script.floats)
        call = functools.partial(script.called, _KERNELS[type(self._optimizer)], found_inf=is_bad)
        for index in range(LENGTH):
            mean, *values = script.appended()
            gradients = self.captured.gradients(values)
            script.called(_aten.add_.Tensor, state, mean, alpha=0)
            (is_finite,) = script.called(_aten.eq.Tensor, state, state)
            script.called(_aten.copy_.default, is_bad, *script.called(_aten.ne.Tensor, state, state))
            for group, tensors in zip(self._groups, groups, strict=True):
                if any(parameter not in gradients for parameter in tensors.parameters):
                    return None
                if tensors.counts is not None:
                    script.called(_aten.add_.Tensor, script.kept(tensors.counts), is_finite)
                elif tensors.steps:
                    return None
                columns = tensors.parameters, tensors.state, tensors.second, tensors.steps
                kept = Tensors(*([script.kept(tensor) for tensor in column] for column in columns))
                of_group = [gradients[parameter] for parameter in tensors.parameters]
                self._update.call(call, {**group, "lr": next(rates)}, kept, of_group)
            script.called(_aten.copy_.default, script.kept(self._losses[index]), mean)
        return script.returning([state])
