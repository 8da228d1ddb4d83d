"""Expert parallel: processes that share a batch hold different experts of a mixture, and send tokens to each other.

What: of E experts each of `experts` processes holds E / experts, whole or in shards. A router's choices decide where a
token goes: an all-to-all sends each token to the processes of its experts, another one brings the results back, which
are weighted and added up where the token came from. Gradients of experts are summed over the processes that hold the
same ones; all other parameters are sharded over all processes (`stepping/layouts/sharded.py`).
Use when: experts are most of the parameters, so that gathering all of them for each pass takes longer than sending
tokens. Costs: four all-to-alls of tokens x choices a layer in an update, six where it is recomputed, which nothing
hides, so the group should be joined by the fastest links; the fullest expert decides how long all wait.
A compiled block is compiled in parts, around the exchanges and between them, for any number of tokens received.
Does not combine with: replicas, tensor parallel, stages, Muon, selective checkpointing of compiled blocks; experts that
are not stacked.
Source: D. Lepikhin et al., "GShard", arXiv:2006.16668, section 3; S. Rajbhandari et al., arXiv:2201.05596, section 4.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from stoker.jobs import Job
from stoker.records import Layout, Plan
from stoker.records.profile import ModelParts
from stoker.stepping.distributed_tensors import collective
from stoker.stepping.layouts.base import LayoutExecution, PassOf, Strategy
from stoker.stepping.torch_compile import Compilation, Exchanging, compiled_part
from stoker.stepping.world import World

_ARGUMENTS = ("hidden_states", "top_k_index", "top_k_weights")
"""What a module of stacked experts takes, as those of transformers do: tokens [N, D], chosen experts [N, K], weights
[N, K]. It returns the weighted sums of the experts' outputs [N, D]."""


class ExpertExecution(LayoutExecution):
    """See `stoker.stepping.layouts.base.LayoutExecution`."""

    def parallelize(self, plan: Plan, model: nn.Module, world: World, job: Job) -> Strategy:
        """As `LayoutExecution.parallelize`; shards are within it."""
        from stoker.stepping.layouts.sharded import Sharded  # noqa: PLC0415 - FSDP2 takes long to import

        assert world.mesh is not None
        experts = list(expert_modules(model).values())
        for module in experts:
            _divide(module, world.mesh["experts"])
        return Sharded(model, world, precision=plan.precision, experts=experts)

    def model_problem(self, model: nn.Module, layout: Layout) -> str | None:
        """As `LayoutExecution.model_problem`."""
        size, found = layout.experts, expert_modules(model)
        if not found:
            return (
                f"{type(model).__name__} has no stacked experts: modules with a number `num_experts`, parameters with "
                f"so many rows each, and forward({', '.join(_ARGUMENTS)}), as those of transformers. Experts in a list "
                "are called one by one by the model's own code"
            )
        for name, module in found.items():
            if module.num_experts % size:
                return f"{name} has {module.num_experts} experts, which {size} processes do not divide"
        parameters = [parameter for module in found.values() for parameter in module.parameters()]
        owners = sum(
            any(own is one for one in parameters)
            for module in model.modules()
            for own in module.parameters(recurse=False)
        )
        return (
            None if owners == len(parameters) else f"{type(model).__name__} uses parameters of experts elsewhere, too"
        )

    def divided_parts(
        self, parts: ModelParts, model: nn.Module, layout: Layout, call: PassOf | None = None
    ) -> ModelParts:
        """As `LayoutExecution.divided_parts`: experts by their number."""
        names = {f"{name}.{own}" for name, module in expert_modules(model).items() for own in module.state_dict()}
        return dataclasses.replace(
            parts,
            parameters=tuple(
                dataclasses.replace(parameter, division=0) if parameter.name in names else parameter
                for parameter in parts.parameters
            ),
        )


EXECUTION = ExpertExecution()


def expert_modules(model: nn.Module) -> dict[str, Any]:
    """The modules of stacked experts of a model, by name."""
    return {name: module for name, module in model.named_modules() if _is_stacked(module)}


def _is_stacked(module: Any) -> bool:
    num = getattr(module, "num_experts", None)
    parameters = list(module.parameters())
    if not isinstance(num, int) or not parameters or any(not p.dim() or p.shape[0] != num for p in parameters):
        return False
    own = list(module.parameters(recurse=False))
    return len(own) == len(parameters) and tuple(inspect.signature(module.forward).parameters) == _ARGUMENTS


def _divide(module: Any, mesh: Any) -> None:
    """Keep this process's experts of a module, as parts of DTensors, and exchange tokens around its forward pass."""
    from torch.distributed.tensor import DTensor, Shard  # noqa: PLC0415 - slow to import

    for name, parameter in list(module.named_parameters(recurse=False)):
        part = parameter.detach().chunk(mesh.size())[mesh.get_local_rank()].clone()
        spread = DTensor.from_local(part, mesh, [Shard(0)], run_check=False)
        setattr(module, name, nn.Parameter(spread, requires_grad=parameter.requires_grad))
    module.num_experts //= mesh.size()
    module.forward = functools.wraps(module.forward)(_ExpertExchange(module, mesh.get_group()))


class _ExpertExchange(Exchanging):
    """What all experts together give tokens [N, D]: `_forward` is that of the experts here.

    S are this process's pairs of token and expert, R those here. Each process makes the same messages, whether tokens
    of its own or of others go to its experts or not.
    """

    def __init__(self, module: Any, group: dist.ProcessGroup) -> None:
        self._module, self._group = module, group
        self._forward, self._combined = module.forward, _combined

    def compile(self, compilation: Compilation) -> None:
        """As `Exchanging.compile`."""
        self._forward = compiled_part(self._forward, compilation, has_any_rows=True)
        self._combined = compiled_part(_combined, compilation)

    def uncompile(self) -> None:
        """As `Exchanging.uncompile`."""
        self._forward, self._combined = self._forward.uncompiled, _combined

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        choices, here, size = top_k_index.shape[1], self._module.num_experts, self._group.size()
        expert_S, order_S = top_k_index.flatten().sort(stable=True)
        sent_PE = expert_S.bincount(minlength=size * here).view(size, here)
        received_PE = torch.empty_like(sent_PE)
        dist.all_to_all_single(received_PE, sent_PE, group=self._group)
        sends, receives = torch.stack([sent_PE.sum(1), received_PE.sum(1)]).tolist()
        x_RD = exchanged(hidden_states[order_S // choices], sends, receives, self._group)
        expert_R = torch.arange(here, device=x_RD.device).repeat(size).repeat_interleave(received_PE.flatten())
        weight_R1 = torch.ones(len(x_RD), 1, dtype=top_k_weights.dtype, device=x_RD.device)
        with _local_parameters(self._module, x_RD.dtype):
            y_RD = self._forward(x_RD, expert_R.unsqueeze(1), weight_R1)
            # Plus zero: even if no expert here was chosen, gradients are sent back, and experts have some to sum.
            own = (one[:0].sum() for one in self._module.parameters(recurse=False))
            y_RD = y_RD + sum(own, x_RD[:0].sum())
        y_SD = exchanged(y_RD, receives, sends, self._group)
        return self._combined(y_SD, order_S, top_k_weights).to(hidden_states.dtype)


def _combined(y_SD: torch.Tensor, order_S: torch.Tensor, weights_NK: torch.Tensor) -> torch.Tensor:
    """The weighted sums of the results of each token's experts [N, D], which come in the order of the experts."""
    y_NKD = torch.empty_like(y_SD).index_copy(0, order_S, y_SD).view(*weights_NK.shape, -1)
    return (y_NKD * weights_NK.unsqueeze(-1)).sum(1)


@contextlib.contextmanager
def _local_parameters(module: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Within the block, the module's parameters are plain tensors: this process's experts, in the tokens' dtype."""
    held = dict(module._parameters)  # noqa: SLF001 - a plain tensor cannot be set in place of a parameter otherwise
    spread: dict[str, Any] = {name: parameter for name, parameter in held.items() if parameter is not None}
    module._parameters.update({name: each.to_local().to(dtype) for name, each in spread.items()})  # noqa: SLF001
    try:
        yield
    finally:
        module._parameters.update(held)  # noqa: SLF001


def exchanged(rows: torch.Tensor, sends: list[int], receives: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    """The rows received from the processes of a group, of which `sends` go to each in their order."""
    there = functools.partial(_all_to_all, sends=sends, receives=receives, group=group)
    back = functools.partial(_all_to_all, sends=receives, receives=sends, group=group)
    return collective(rows, there, back)


def _all_to_all(rows: torch.Tensor, sends: list[int], receives: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    received = rows.new_empty(sum(receives), *rows.shape[1:])
    dist.all_to_all_single(received, rows.contiguous(), receives, sends, group=group)  # gloo needs contiguous rows
    return received
