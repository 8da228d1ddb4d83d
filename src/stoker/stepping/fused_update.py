"""Fused optimiser steps, called without what `torch.optim` does in Python before each.

What: SGD, Adam and AdamW in PyTorch's fused kernels, on lists of tensors that are gathered once; counts of steps become
elements of one tensor, which are counted up at once. Use when: always, for Stoker's own optimisers in their fused
implementation; in small models the gathering takes as long as the kernel (docs/log.md). Costs: nothing; the kernels and
their arguments are PyTorch's own, so the results are the same bits, and the state stays the optimiser's.
Falls back to `optimizer.step()` where PyTorch lacks the kernels, a parameter has no gradient, or tensors of a group
differ in device or dtype. Of DTensors each process updates what it holds, since the kernels go element by element;
`optimizer.step()` would ask for every operation how to divide it, and cannot take plain tensors beside them.
Source: `torch/optim/{sgd,adam}.py` of PyTorch 2.13, `_fused_sgd` and `_fused_adam`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from stoker.stepping.distributed_tensors import all_local, is_spread
from stoker.stepping.graph_interpreter import below_autograd

Group = dict[str, Any]

_KERNELS = {
    torch.optim.SGD: getattr(torch, "_fused_sgd_", None),
    torch.optim.Adam: getattr(torch, "_fused_adam_", None),
    torch.optim.AdamW: getattr(torch, "_fused_adamw_", None),
}


def fused_update(optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
    """What makes the optimiser's step: its own `step`, or a shorter way to the same kernel."""
    kernel, is_decoupled = _KERNELS.get(type(optimizer)), type(optimizer) is torch.optim.AdamW
    if kernel is None or not all(_is_plain(group, is_decoupled=is_decoupled) for group in optimizer.param_groups):
        return optimizer.step
    if any(is_spread(parameter) for group in optimizer.param_groups for parameter in group["params"]):
        return _SpreadUpdate(optimizer, kernel)
    return _FusedUpdate(optimizer, kernel)


def _is_plain(group: Group, *, is_decoupled: bool) -> bool:
    special = ("amsgrad", "differentiable", "capturable")
    if "decoupled_weight_decay" in group and group["decoupled_weight_decay"] is not is_decoupled:
        return False
    return bool(group.get("fused")) and isinstance(group["lr"], float) and not any(group.get(key) for key in special)


@dataclass
class _Tensors:
    """A group's parameters and their state, in the kernel's order.

    `state` is momenta (SGD) or first moments; second moments and counts of steps are Adam's. Where `counts` is there,
    the counts are its elements.
    """

    parameters: list[torch.Tensor]
    state: list[torch.Tensor] = field(default_factory=list)
    second: list[torch.Tensor] = field(default_factory=list)
    steps: list[torch.Tensor] = field(default_factory=list)
    counts: torch.Tensor | None = None


class _FusedUpdate:
    """`optimizer.step()` for groups whose state is there; the optimiser's own makes the first step, and the state."""

    def __init__(self, optimizer: torch.optim.Optimizer, kernel: Callable[..., Any]) -> None:
        self._optimizer, self._kernel = optimizer, kernel
        self._is_sgd = type(optimizer) is torch.optim.SGD
        self._groups: list[_Tensors] | None = None

    def __call__(self) -> None:
        if self._groups is None or not self._is_current(self._groups):
            self._groups = self._gathered()
        if self._groups is None:  # the first step, which makes the state
            self._optimizer.step()
            self._groups = self._gathered()
            return
        gradients = [[p.grad for p in tensors.parameters] for tensors in self._groups]
        if any(gradient is None for each in gradients for gradient in each):
            self._optimizer.step()
            return
        call = _sgd if self._is_sgd else _adam
        with below_autograd():
            for group, tensors, each in zip(self._optimizer.param_groups, self._groups, gradients, strict=True):
                call(self._kernel, group, tensors, each)

    def _is_current(self, groups: list[_Tensors]) -> bool:
        """Whether the optimiser's state is still what was gathered: loading one replaces all its tensors."""
        first = next((tensors for tensors in groups if tensors.state), None)
        if first is None:
            return True
        name = "momentum_buffer" if self._is_sgd else "exp_avg"
        return self._optimizer.state[first.parameters[0]].get(name) is first.state[0]

    def _gathered(self) -> list[_Tensors] | None:
        """Each group's tensors; None while some state is missing, or where a group is of several dtypes or devices."""
        found: list[_Tensors] = []
        for group in self._optimizer.param_groups:
            tensors = self._of(group)
            if tensors is None or len({(p.device, p.dtype) for p in tensors.parameters}) > 1:
                return None
            found.append(tensors)
        for tensors in found:
            self._count_together(tensors)
        return found

    def _of(self, group: Group) -> _Tensors | None:
        parameters, state = list(group["params"]), self._optimizer.state
        if self._is_sgd and not group["momentum"]:
            return _Tensors(parameters)
        names = ("momentum_buffer",) if self._is_sgd else ("exp_avg", "exp_avg_sq", "step")
        if not all(isinstance(state[p].get(name), torch.Tensor) for p in parameters for name in names):
            return None
        columns = [[state[p][name] for p in parameters] for name in names]
        if self._is_sgd:
            return _Tensors(parameters, columns[0])
        return _Tensors(parameters, columns[0], columns[1], steps=columns[2])

    def _count_together(self, tensors: _Tensors) -> None:
        """Put a group's counts of steps into one tensor; a trace's are left as they are, for its blocks to be alike."""
        if not tensors.steps or any(type(one) is not torch.Tensor for one in tensors.steps):
            return
        tensors.counts = torch.stack(tensors.steps)
        tensors.steps = [*tensors.counts]
        for parameter, count in zip(tensors.parameters, tensors.steps, strict=True):
            self._optimizer.state[parameter]["step"] = count


class _SpreadUpdate:
    """`optimizer.step()` on this process's parts of parameters, gradients and state; makes state that is missing."""

    def __init__(self, optimizer: torch.optim.Optimizer, kernel: Callable[..., Any]) -> None:
        self._optimizer, self._kernel = optimizer, kernel
        self._is_sgd = type(optimizer) is torch.optim.SGD

    @torch.no_grad()
    def __call__(self) -> None:
        for group in self._optimizer.param_groups:
            alike: defaultdict[Any, list[torch.Tensor]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    alike[self._kind_of(parameter, group)].append(parameter)
            for (*_, is_first), parameters in alike.items():
                self._update(group, parameters, is_first=is_first)

    def _kind_of(self, parameter: torch.Tensor, group: Group) -> tuple[torch.device, torch.dtype, bool]:
        """Parameters alike in this can go through a kernel together; the last: an SGD's momentum begins with it."""
        if self._is_sgd and not group["momentum"]:
            return parameter.device, parameter.dtype, False
        state = self._optimizer.state[parameter]
        is_first = state.get("momentum_buffer" if self._is_sgd else "step") is None
        if is_first and self._is_sgd:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        elif is_first:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        return parameter.device, parameter.dtype, is_first and self._is_sgd

    def _update(self, group: Group, parameters: list[torch.Tensor], *, is_first: bool) -> None:
        own, gradients = all_local(parameters), all_local(p.grad for p in parameters if p.grad is not None)
        if self._is_sgd and not group["momentum"]:
            _sgd(self._kernel, group, _Tensors(own), gradients)
            return
        states = [self._optimizer.state[p] for p in parameters]
        if self._is_sgd:
            momenta = all_local(state["momentum_buffer"] for state in states)
            _sgd(self._kernel, group, _Tensors(own, momenta), gradients, is_first=is_first)
            return
        columns = [all_local(state[name] for state in states) for name in ("exp_avg", "exp_avg_sq", "step")]
        _adam(self._kernel, group, _Tensors(own, columns[0], columns[1], steps=columns[2]), gradients)


def _sgd(
    kernel: Callable[..., Any], group: Group, tensors: _Tensors, gradients: list[Any], *, is_first: bool = False
) -> None:
    kernel(
        tensors.parameters, gradients, tensors.state, weight_decay=group["weight_decay"], momentum=group["momentum"],
        lr=group["lr"], dampening=group["dampening"], nesterov=group["nesterov"], maximize=group["maximize"],
        is_first_step=is_first,
    )  # fmt: skip


def _adam(kernel: Callable[..., Any], group: Group, tensors: _Tensors, gradients: list[Any]) -> None:
    beta1, beta2 = group["betas"]
    if tensors.counts is None:
        torch._foreach_add_(tensors.steps, 1)
    else:
        tensors.counts.add_(1)
    kernel(
        tensors.parameters, gradients, tensors.state, tensors.second, [], tensors.steps, lr=group["lr"], beta1=beta1,
        beta2=beta2, weight_decay=group["weight_decay"], eps=group["eps"], amsgrad=False, maximize=group["maximize"],
    )  # fmt: skip
