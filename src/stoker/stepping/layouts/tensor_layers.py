"""Layers whose matrices are divided among the processes of a tensor group, and the collectives within them.

Divided parameters become DTensors under their own names; modules and the model's own code stay. Divided features exist
between a colwise layer and the rowwise one that ends it.
Through the collectives gradients flow backwards. All that is sent or received is contiguous: gloo silently takes wrong
values from other tensors.
Source: M. Shoeybi et al., "Megatron-LM", arXiv:1909.08053, section 3 (f and g); V. Korthikanti et al., "Reducing
Activation Recomputation in Large Transformer Models", arXiv:2205.05198, section 4.2.2 (along the sequence).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.distributed.tensor.parallel.style import ParallelStyle
from torch.distributed.tensor.placement_types import _StridedShard

from stoker.errors import BadJob
from stoker.records import Layout
from stoker.stepping.distributed_tensors import collective
from stoker.stepping.layouts.tensor_plans import (
    Fused,
    Rule,
    Rules,
    TensorPlanProblem,
    divided_dimensions,
    first_problem,
    is_divided_by_vocabulary,
    rules_of,
)
from stoker.stepping.random_draws import DROPOUTS, OwnDraws, may_draw


@dataclass(eq=False)
class DividedModel:
    """A divided model.

    `output` is its output layer, where that is divided; `partial_names` name the whole parameters whose gradient is a
    sum over the processes.
    """

    model: nn.Module
    group: dist.ProcessGroup
    output: ParallelOutput | None = None
    partial_names: set[str] = field(default_factory=set)
    _owners: list[tuple[str, nn.Module, str]] | None = field(default=None, init=False)

    def parameters(self) -> list[nn.Parameter]:
        """All current parameters: FSDP2 replaces them."""
        return [p for _, p in self.named()]

    def partial(self) -> list[nn.Parameter]:
        """Whole parameters whose gradients are parts of a sum."""
        return [p for name, p in self.named() if name in self.partial_names]

    def replicated(self) -> list[nn.Parameter]:
        """Whole parameters whose gradients are equal in every process."""
        return [p for _, p in self.named_replicated()]

    def named_replicated(self) -> list[tuple[str, nn.Parameter]]:
        """As `replicated`, with names."""
        whole: list[tuple[str, nn.Parameter]] = []
        for name, parameter in self.named():
            axes = parameter.device_mesh.mesh_dim_names if isinstance(parameter, DTensor) else None
            if name not in self.partial_names and "tensor" not in (axes or ()):
                whole.append((name, parameter))
        return whole

    def named(self) -> Iterator[tuple[str, nn.Parameter]]:
        """All current parameters by name."""
        if self._owners is None:
            self._owners = []
            for name, _ in self.model.named_parameters():
                owner, _, leaf = name.rpartition(".")
                self._owners.append((name, self.model.get_submodule(owner), leaf))
        for name, module, leaf in self._owners:
            yield name, getattr(module, leaf)


def split_matrices(
    model: nn.Module, mesh: DeviceMesh, *, sequence: bool = False, absent: Collection[str] = ()
) -> DividedModel:
    """Divide `model` in place among the processes of `mesh`, which all hold the same of it, and equal.

    Args:
        model: on its device. Data parallelism is added afterwards.
        mesh: of one dimension, called tensor.
        sequence: divide the activations between the matrices along the sequence.
        absent: names of parameters that other stages hold: modules of which nothing else is here stay as they are. The
            whole model has been checked by `first_problem`.

    Raises:
        BadJob: no plan fits the model, or the group's size does not divide it.
    """
    problem = None if absent else first_problem(model, Layout(tensor=mesh.size(), sequence=sequence))
    rules = problem or rules_of(model)
    if isinstance(rules, TensorPlanProblem):
        raise BadJob(rules.message, remedy=rules.remedy)
    return _Division(model, mesh, rules, sequence=sequence, absent=absent).made()


def shard_dim_within_tensor_group(parameter: nn.Parameter) -> Shard | None:
    """The dimension along which shards divide a parameter, where it is not the first.

    A process of the tensor group already has several runs of the rows of fused matrices.
    """
    is_fused = isinstance(parameter, DTensor) and any(isinstance(p, _StridedShard) for p in parameter.placements)
    return Shard(1) if is_fused else None


class _Division:
    """The work of `split_matrices`."""

    def __init__(
        self, model: nn.Module, mesh: DeviceMesh, rules: Rules, *, sequence: bool, absent: Collection[str]
    ) -> None:
        self._model, self._mesh, self._sequence = model, mesh, sequence
        self._modules = dict(model.named_modules())
        self._first_along = next((name for name, rule in rules.items() if rule == "sequence"), None)
        lacking = {prefix for name in absent for prefix in _prefixes(name.rpartition(".")[0])}
        held = {name for name, module in self._modules.items() if any(True for _ in module.parameters())}
        self._rules = {name: rule for name, rule in rules.items() if name in held or name not in lacking}
        self._names = {id(module): name for name, module in self._modules.items()}
        self._found = DividedModel(model, mesh.get_group())
        self._regions: dict[str, ParallelRegion] = {}
        self._device = next(model.parameters()).device

    def made(self) -> DividedModel:
        """The model, divided."""
        self._note_partial()
        self._divide_parameters()
        for name, rule in self._rules.items():
            style = rule
            if isinstance(style, str | Fused):
                style = _Style(functools.partial(self._change, name, style))
            parallelize_module(self._model, self._mesh, {name: style})
        if self._sequence:
            if self._first_along in self._rules:  # later stages are given their part
                self._modules[self._first_along].register_forward_pre_hook(self._take_part, with_kwargs=True)
            self._separate_draws_along_sequence()
        return self._found

    def _change(self, name: str, rule: Rule, module: Any) -> None:
        """Apply a rule to a module."""
        group, parts = self._mesh.get_group(), self._sequence
        if isinstance(rule, Fused) or rule == "colwise":
            module.forward = ColumnParallel(
                module, self._region(name), group, rule.parts if isinstance(rule, Fused) else 1
            )
        elif rule == "rowwise":
            module.forward = RowParallel(module, self._region(name), group, sequence=parts)
        elif rule == "embedding" and is_divided_by_vocabulary(module, group.size()):
            module.forward = ParallelEmbedding(module, group)
        elif rule == "output" and is_divided_by_vocabulary(module, group.size()):
            self._found.output = module.forward = ParallelOutput(module, self._mesh, sequence=parts)
        elif rule == "output" and parts:
            gather = lambda x: gather_from_group(x, SEQUENCE, group, is_shared=False)  # noqa: E731 - one of two like it
            module.register_forward_pre_hook(_on_first_tensor(gather), with_kwargs=True)
        elif rule == "region" and parts:
            gather = lambda x: gather_from_group(x, SEQUENCE, group, is_shared=True)  # noqa: E731 - see above
            module.register_forward_pre_hook(_on_first_tensor(gather), with_kwargs=True)
        elif rule == "region":
            module.register_forward_pre_hook(_on_first_tensor(lambda x: copy_to_group(x, group)), with_kwargs=True)

    def _region(self, name: str) -> ParallelRegion:
        """The region that the layers of one parent share."""
        parent = name.rpartition(".")[0]
        if parent not in self._regions:
            module = self._modules[parent]
            draws = OwnDraws(self._mesh.get_local_rank(), len(self._regions), self._device)
            is_entered = self._rules.get(parent) == "region"
            self._regions[parent] = ParallelRegion(module, draws if may_draw(module) else None, is_entered=is_entered)
        return self._regions[parent]

    def _note_partial(self) -> None:
        """Record the whole parameters that take part in some of the work only."""
        dimensions = divided_dimensions(self._model, self._mesh.size())
        for name, _ in self._model.named_parameters():
            owner = name.rpartition(".")[0]
            rule = self._rules.get(owner)
            around = {self._rules.get(prefix) for prefix in _prefixes(owner)}
            is_after_sum = rule == "rowwise" and name not in dimensions  # a bias
            is_inside = ("region" in around or "summed" in around) and not is_after_sum
            is_along = self._sequence and "sequence" in around
            if name not in dimensions and (is_inside or is_along or isinstance(rule, Fused)):
                self._found.partial_names.add(name)

    def _divide_parameters(self) -> None:
        """Replace parameters by DTensors; a parameter that several modules share, in all of them."""
        made: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
        for name, dim in divided_dimensions(self._model, self._mesh.size()).items():
            owner, _, leaf = name.rpartition(".")
            if owner not in self._rules:
                continue
            module, rule = self._modules[owner], self._rules[owner]
            parameter: nn.Parameter = getattr(module, leaf)
            if id(parameter) not in made:
                parts = rule.parts if isinstance(rule, Fused) else 1
                made[id(parameter)] = parameter, _divided(parameter, self._mesh, dim, parts)
            setattr(module, leaf, made[id(parameter)][1])

    def _take_part(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Keep this process's part of the tokens, from the first block on."""
        group = self._mesh.get_group()

        def own(x: torch.Tensor) -> torch.Tensor:
            if x.dim() < 3 or x.shape[SEQUENCE] % group.size():
                raise BadJob(
                    f"{self._names[id(module)]} is given {list(x.shape)}: {group.size()} processes cannot divide its "
                    "tokens, dimension 1",
                    remedy="Use a layout with sequence=False, or windows of a length that divides.",
                )
            return scatter_to_group(x, SEQUENCE, group)

        return _on_first_tensor(own)(module, args, kwargs)

    def _separate_draws_along_sequence(self) -> None:
        """Give dropout between the matrices draws of its own, where each process has its own tokens."""
        regions = {name for name, rule in self._rules.items() if rule == "region"}
        for number, (name, module) in enumerate(self._modules.items()):
            around = set(_prefixes(name))
            is_along = any(self._rules.get(name) == "sequence" for name in around) and not around & regions
            if isinstance(module, DROPOUTS) and module.p > 0 and is_along:
                OwnDraws(self._mesh.get_local_rank(), -1 - number, self._device).throughout(module)


class _Style(ParallelStyle):
    """A change of a module as a ParallelStyle, so that PyTorch's styles and ours can be in one plan."""

    def __init__(self, change: Callable[[nn.Module], None]) -> None:
        super().__init__()
        self._change = change

    def _apply(self, module: nn.Module, _device_mesh: DeviceMesh) -> nn.Module:
        self._change(module)
        return module


def _divided(parameter: nn.Parameter, mesh: DeviceMesh, dim: int, parts: int) -> nn.Parameter:
    """A DTensor with an equal share along `dim` in each process, of each of `parts` parts."""
    with torch.no_grad():
        piece = piece_of(parameter, dim, parts, mesh.size(), mesh.get_local_rank()).clone(
            memory_format=torch.contiguous_format
        )
        placement = Shard(dim) if parts == 1 else _StridedShard(dim, split_factor=parts)
        whole = DTensor.from_local(
            piece, mesh, [placement], run_check=False, shape=parameter.shape, stride=parameter.stride()
        )
    return nn.Parameter(whole, requires_grad=parameter.requires_grad)


def _on_first_tensor(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    """A hook that changes a module's first argument; where all are named, the first one that is a tensor."""

    def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (change(args[0]), *args[1:]), kwargs
        name = next(key for key, value in kwargs.items() if isinstance(value, torch.Tensor))
        return args, {**kwargs, name: change(kwargs[name])}

    return hook


def _prefixes(name: str) -> list[str]:
    """A dotted name, and the names of the modules around it."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts) + 1)]


SEQUENCE = 1
"""The dimension of tokens: activations are [B, T, D]."""


class ParallelRegion:
    """The part of a module between its colwise and rowwise layers: divided features, and random draws of its own.

    Where the module is not a "region" itself, its colwise layers share their input: one sum of gradients for all.
    """

    def __init__(self, module: nn.Module, draws: OwnDraws | None, *, is_entered: bool) -> None:
        self._module, self._draws, self._is_entered = module, draws, is_entered
        self._shared: tuple[torch.Tensor, torch.Tensor] | None = None
        module.register_forward_hook(lambda *_: self.end(), always_call=True)

    def enter(self, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        """The input of a colwise layer."""
        if self._draws is not None and self._module.training:
            self._draws.begin()
        if self._is_entered:
            return x
        if self._shared is None or self._shared[0] is not x:
            self._shared = x, copy_to_group(x, group)
        return self._shared[1]

    def end(self) -> None:
        """Leave the region: features are whole again."""
        self._shared = None
        if self._draws is not None:
            self._draws.end()


class ColumnParallel:
    """A linear layer that computes this process's features of all."""

    def __init__(self, module: nn.Linear, region: ParallelRegion, group: dist.ProcessGroup, parts: int) -> None:
        self._module, self._region, self._group, self._parts = module, region, group, parts

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Features [..., D / tensor] of [..., D']."""
        bias: torch.Tensor | None = self._module.bias
        if bias is not None and not isinstance(bias, DTensor):
            bias = piece_of(bias, 0, self._parts, self._group.size(), self._group.rank())
        return F.linear(self._region.enter(x, self._group), own_part(self._module.weight), own_part(bias))


class RowParallel:
    """A linear layer over this process's features, summed over all processes'; the bias is added once, after that."""

    def __init__(self, module: nn.Linear, region: ParallelRegion, group: dist.ProcessGroup, *, sequence: bool) -> None:
        self._module, self._region, self._group, self._leaves_parts = module, region, group, sequence

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[..., D'] of [..., D / tensor]; of this process's tokens where the sequence is divided."""
        out = F.linear(x, own_part(self._module.weight))
        self._region.end()
        if self._leaves_parts:
            out = reduce_scatter_to_group(out, SEQUENCE, self._group)
        else:
            out = reduce_from_group(out, self._group)
        bias: torch.Tensor | None = self._module.bias
        return out if bias is None else out + bias.to(out.dtype)


class ParallelEmbedding:
    """A table of which this process holds some rows: other tokens give zeros, and the processes' results are summed."""

    def __init__(self, module: nn.Embedding, group: dist.ProcessGroup) -> None:
        self._module, self._group = module, group

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        """Rows [..., D] of tokens [...]."""
        module, rows = self._module, self._module.num_embeddings // self._group.size()
        own = tokens - rows * self._group.rank()
        is_elsewhere = (own < 0) | (own >= rows)
        padding = None if module.padding_idx is None else module.padding_idx - rows * self._group.rank()
        if padding is not None and not 0 <= padding < rows:
            padding = None
        rows_here = F.embedding(own.masked_fill(is_elsewhere, 0), own_part(module.weight), padding)
        return reduce_from_group(rows_here.masked_fill(is_elsewhere.unsqueeze(-1), 0), self._group)


class ParallelOutput:
    """The output layer, divided by vocabulary: gathers logits, unless the loss takes them divided."""

    def __init__(self, module: nn.Linear, mesh: DeviceMesh, *, sequence: bool) -> None:
        self._module, self._mesh, self._group = module, mesh, mesh.get_group()
        self._has_parts = sequence
        self.keeps_divided = False

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Logits [..., V], or the DTensor of them divided by V."""
        group, is_divided = self._group, self._has_parts
        x = gather_from_group(x, SEQUENCE, group, is_shared=True) if is_divided else copy_to_group(x, group)
        logits = F.linear(x, own_part(self._module.weight), own_part(self._module.bias))
        if self.keeps_divided:
            divided: torch.Tensor = DTensor.from_local(logits, self._mesh, [Shard(logits.dim() - 1)], run_check=False)
            return divided
        return gather_from_group(logits, -1, group, is_shared=False)


def piece_of(tensor: torch.Tensor, dim: int, parts: int, size: int, rank: int) -> torch.Tensor:
    """Part `rank` of `size` along `dim`, of each of `parts` parts."""
    pieces: tuple[torch.Tensor, ...] = tensor.unflatten(dim, (parts, -1)).chunk(size, dim + 1)
    return pieces[rank].flatten(dim, dim + 1)


def own_part(tensor: torch.Tensor | None) -> Any:
    """This process's part of a DTensor, with its gradient; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


Group = dist.ProcessGroup

# The names since PyTorch 2.13, which warns about the earlier ones.
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def copy_to_group(x: torch.Tensor, group: Group) -> torch.Tensor:
    """`x` itself, of which each process uses a part: its gradient is the sum over the processes."""
    return collective(x, lambda own: own.view_as(own), lambda gradient: _sum(gradient, group))


def reduce_from_group(x: torch.Tensor, group: Group) -> torch.Tensor:
    """The sum over the processes, each of which uses it in the same way."""
    return collective(x, lambda own: _sum(own, group), lambda gradient: gradient)


def gather_from_group(x: torch.Tensor, dim: int, group: Group, *, is_shared: bool) -> torch.Tensor:
    """The processes' parts put together along `dim`.

    With `is_shared` each process uses it in its own way, so that the gradient is a sum over them; otherwise all do the
    same, and each takes its part of the gradient.
    """
    take = _scatter_sum if is_shared else _own
    return collective(x, lambda own: _gather(own, dim, group), lambda gradient: take(gradient, dim, group))


def scatter_to_group(x: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
    """This process's part along `dim`, which the number of processes divides, of what all of them have."""
    return collective(x, lambda whole: _own(whole, dim, group), lambda gradient: _gather(gradient, dim, group))


def reduce_scatter_to_group(x: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
    """This process's part along `dim`, which the number of processes divides, of the sum over them."""
    return collective(x, lambda own: _scatter_sum(own, dim, group), lambda gradient: _gather(gradient, dim, group))


def _sum(x: torch.Tensor, group: Group) -> torch.Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def _own(x: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
    return x.chunk(group.size(), dim)[group.rank()].clone(memory_format=torch.contiguous_format)


def _gather(x: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
    mine = x.movedim(dim, 0).contiguous()
    found = mine.new_empty((group.size() * mine.shape[0], *mine.shape[1:]))
    _ALL_GATHER(found, mine, group=group)
    return found.movedim(0, dim).contiguous()


def _scatter_sum(x: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
    whole = x.movedim(dim, 0).contiguous()
    found = whole.new_empty((whole.shape[0] // group.size(), *whole.shape[1:]))
    _REDUCE_SCATTER(found, whole, group=group)
    return found.movedim(0, dim).contiguous()
