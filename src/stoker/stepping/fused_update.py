"""Fused optimiser steps, called without what `torch.optim` does in Python before each.

What: SGD, Adam and AdamW in PyTorch's fused kernels, on lists of tensors that are gathered once; counts of steps become
elements of one tensor, which are counted up at once. Use when: always, for Stoker's own optimisers in their fused
implementation; in small models the gathering takes as long as the kernel (docs/log.md). Costs: nothing; the kernels and
their arguments are PyTorch's own, so the results are the same bits, and the state stays the optimiser's.
Falls back to `optimizer.step()` where PyTorch lacks the kernels, a parameter has no gradient, or tensors of a group
differ in device or dtype; but of SGD, whose own step cannot mix parameters with and without a momentum, each kind of
parameters goes through the kernel. Of DTensors each process updates what it holds, since the kernels go element by
element; `optimizer.step()` would dispatch every operation, and cannot mix plain tensors with DTensors.
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


def kernel_of(optimizer: torch.optim.Optimizer) -> Callable[..., Any] | None:
    """The kernel that takes the place of the optimiser's own step; None where that has to be called."""
    kernel, is_decoupled = _KERNELS.get(type(optimizer)), type(optimizer) is torch.optim.AdamW
    for group in optimizer.param_groups if kernel is not None else ():
        is_plain = bool(group.get("fused")) and isinstance(group["lr"], float)
        if not is_plain or any(group.get(key) for key in ("amsgrad", "differentiable", "capturable")):
            return None
        if group.get("decoupled_weight_decay", is_decoupled) is not is_decoupled:
            return None
    return kernel


def fused_update(optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
    """A function that makes the optimiser's step: its own `step`, or a shorter way to the same kernel."""
    kernel = kernel_of(optimizer)
    if kernel is None:
        return optimizer.step
    if any(is_spread(parameter) for group in optimizer.param_groups for parameter in group["params"]):
        return _UpdateByKind(optimizer, kernel)
    return FusedUpdate(optimizer, kernel)


@dataclass
class Tensors:
    """A group's parameters and their state, in the kernel's order.

    `state` is momenta (SGD) or first moments; second moments and counts of steps are Adam's. The counts are the
    elements of `counts` where that is set.
    """

    parameters: list[torch.Tensor]
    state: list[torch.Tensor] = field(default_factory=list)
    second: list[torch.Tensor] = field(default_factory=list)
    steps: list[torch.Tensor] = field(default_factory=list)
    counts: torch.Tensor | None = field(default=None, init=False)


class FusedUpdate:
    """`optimizer.step()` for groups that have state; another form makes the first step, and the state."""

    def __init__(self, optimizer: torch.optim.Optimizer, kernel: Callable[..., Any]) -> None:
        self._optimizer, self._kernel = optimizer, kernel
        self._is_sgd = type(optimizer) is torch.optim.SGD
        self.call = _sgd if self._is_sgd else _adam
        """Calls a kernel on a group's settings, tensors and gradients; steps have been counted."""
        self._with_gaps = _UpdateByKind(optimizer, kernel) if self._is_sgd else optimizer.step
        self._groups: list[Tensors] | None = None

    def __call__(self) -> None:
        """Make the step."""
        groups = self.groups()
        if groups is None:  # the first step, which makes the state
            self._with_gaps()
            return
        gradients = [[p.grad for p in tensors.parameters] for tensors in groups]
        if any(gradient is None for of_group in gradients for gradient in of_group):
            self._with_gaps()
            return
        with below_autograd():
            for group, tensors, of_group in zip(self._optimizer.param_groups, groups, gradients, strict=True):
                if tensors.counts is None and tensors.steps:
                    torch._foreach_add_(tensors.steps, 1)
                elif tensors.counts is not None:
                    tensors.counts.add_(1)
                self.call(self._kernel, group, tensors, of_group)

    def groups(self) -> list[Tensors] | None:
        """Each group's tensors; None where there is no state yet, or not for a kernel."""
        if self._groups is None or not self._is_current(self._groups):
            self._groups = self._gathered()
        return self._groups

    def _is_current(self, groups: list[Tensors]) -> bool:
        """Whether the optimiser's state is still what was gathered: loading one replaces all its tensors."""
        first = next((tensors for tensors in groups if tensors.state), None)
        if first is None:
            return True
        name = "momentum_buffer" if self._is_sgd else "exp_avg"
        return self._optimizer.state[first.parameters[0]].get(name) is first.state[0]

    def _gathered(self) -> list[Tensors] | None:
        """Each group's tensors; None while some state is missing, or where a group has several dtypes or devices."""
        groups: list[Tensors] = []
        state = self._optimizer.state
        for group in self._optimizer.param_groups:
            parameters, names = list(group["params"]), _state_names(group, is_sgd=self._is_sgd)
            if not all(isinstance(state[p].get(name), torch.Tensor) for p in parameters for name in names):
                return None
            if len({(p.device, p.dtype) for p in parameters}) > 1:
                return None
            groups.append(Tensors(parameters, *([state[p][name] for p in parameters] for name in names)))
        for tensors in groups:
            # The counts of steps of a group become one tensor; a trace's are left, so that its blocks stay equal.
            if tensors.steps and all(type(step) is torch.Tensor for step in tensors.steps):
                tensors.counts = torch.stack(tensors.steps)
                tensors.steps = [*tensors.counts]
                for parameter, count in zip(tensors.parameters, tensors.steps, strict=True):
                    state[parameter]["step"] = count
        return groups


class _UpdateByKind:
    """`optimizer.step()` by device, dtype and presence of state, on this process's parts; makes missing state."""

    def __init__(self, optimizer: torch.optim.Optimizer, kernel: Callable[..., Any]) -> None:
        self._optimizer, self._kernel = optimizer, kernel
        self._is_sgd = type(optimizer) is torch.optim.SGD

    @torch.no_grad()
    def __call__(self) -> None:
        for group in self._optimizer.param_groups:
            by_kind: defaultdict[Any, list[torch.Tensor]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_kind[self._kind_of(parameter, group)].append(parameter)
            for (*_, is_first), parameters in by_kind.items():
                own, gradients = all_local(parameters), all_local(p.grad for p in parameters if p.grad is not None)
                names = _state_names(group, is_sgd=self._is_sgd)  # of none, no state is looked up, which would make it
                columns = (all_local(self._optimizer.state[p][name] for p in parameters) for name in names)
                tensors = Tensors(own, *columns)
                if self._is_sgd:
                    _sgd(self._kernel, group, tensors, gradients, is_first=is_first)
                else:
                    torch._foreach_add_(tensors.steps, 1)
                    _adam(self._kernel, group, tensors, gradients)

    def _kind_of(self, parameter: torch.Tensor, group: Group) -> tuple[torch.device, torch.dtype, bool]:
        """Parameters of one kind can go through a kernel together; the last: an SGD's momentum begins with it."""
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


def _state_names(group: Group, *, is_sgd: bool) -> list[str]:
    """Names of a parameter's tensors of state, in the kernel's order."""
    if is_sgd:
        return ["momentum_buffer"] if group["momentum"] else []
    return ["exp_avg", "exp_avg_sq", "step"]


def _sgd(
    kernel: Callable[..., Any], group: Group, tensors: Tensors, gradients: list[Any], *, is_first: bool = False
) -> None:
    kernel(
        tensors.parameters,
        gradients,
        tensors.state,
        weight_decay=group["weight_decay"],
        momentum=group["momentum"],
        lr=group["lr"],
        dampening=group["dampening"],
        nesterov=group["nesterov"],
        maximize=group["maximize"],
        is_first_step=is_first,
    )


def _adam(kernel: Callable[..., Any], group: Group, tensors: Tensors, gradients: list[Any]) -> None:
    beta1, beta2 = group["betas"]
    kernel(
        tensors.parameters,
        gradients,
        tensors.state,
        tensors.second,
        [],
        tensors.steps,
        lr=group["lr"],
        beta1=beta1,
        beta2=beta2,
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        amsgrad=False,
        maximize=group["maximize"],
    )
