"""A model's matrices divided among the processes of a tensor group, and what each layer then does.

Parameters that are divided become DTensors under their own names; modules and the model's own code stay. Whatever works
on divided features lies between a colwise layer and the rowwise one that ends it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.distributed.tensor.parallel.style import ParallelStyle
from torch.distributed.tensor.placement_types import _StridedShard

from stoker.errors import BadJob
from stoker.records import Layout
from stoker.stepping.layouts import collectives
from stoker.stepping.layouts.divided_layers import SEQUENCE, Columns, Embedding, Output, Region, Rows, piece_of
from stoker.stepping.layouts.draws import DROPOUTS, OwnDraws, may_draw
from stoker.stepping.layouts.tensor_plans import (
    Fused,
    Problem,
    Rule,
    Rules,
    divided_dimensions,
    first_problem,
    is_divided_by_vocabulary,
    rules_of,
)


@dataclass(eq=False)
class Divided:
    """How a model was divided.

    `output` is its output layer, where that is divided; `partial_names` are those of whole parameters of whose
    gradient each process has a part.
    """

    model: nn.Module
    group: dist.ProcessGroup
    output: Output | None = None
    partial_names: set[str] = field(default_factory=set)
    _owners: list[tuple[str, nn.Module, str]] | None = field(default=None, init=False)

    def parameters(self) -> list[nn.Parameter]:
        """All of them, as they are now: FSDP2 replaces them."""
        return [p for _, p in self.named()]

    def partial(self) -> list[nn.Parameter]:
        """Whole parameters whose gradients are parts of a sum."""
        return [p for name, p in self.named() if name in self.partial_names]

    def alike(self) -> list[nn.Parameter]:
        """Whole parameters whose gradients every process computes alike."""
        return [p for _, p in self.named_alike()]

    def named_alike(self) -> list[tuple[str, nn.Parameter]]:
        """As `alike`, with names."""
        return [(name, p) for name, p in self.named() if name not in self.partial_names and not self._is_divided(p)]

    def _is_divided(self, parameter: nn.Parameter) -> bool:
        names = parameter.device_mesh.mesh_dim_names if isinstance(parameter, DTensor) else None
        return names is not None and "tensor" in names

    def named(self) -> Iterator[tuple[str, nn.Parameter]]:
        """All parameters by name, as they are now."""
        if self._owners is None:
            self._owners = []
            for name, _ in self.model.named_parameters():
                owner, _, leaf = name.rpartition(".")
                self._owners.append((name, self.model.get_submodule(owner), leaf))
        for name, module, leaf in self._owners:
            yield name, getattr(module, leaf)


def split_matrices(model: nn.Module, mesh: DeviceMesh, *, sequence: bool = False) -> Divided:
    """Divide `model` in place among the processes of `mesh`, which all hold it whole and equal.

    Args:
        model: on its device. What divides data is put around it afterwards.
        mesh: of one dimension, called tensor.
        sequence: divide what lies between the matrices along the sequence.

    Raises:
        BadJob: no plan fits the model, or the group's size does not divide it.
    """
    problem = first_problem(model, Layout(tensor=mesh.size(), sequence=sequence))
    rules = problem or rules_of(model)
    if isinstance(rules, Problem):
        raise BadJob(rules.message, remedy=rules.remedy)
    return _Division(model, mesh, rules, sequence=sequence).made()


def beside(parameter: nn.Parameter) -> Shard | None:
    """Along which dimension shards divide a parameter, where it is not the first.

    Of the rows of fused matrices a process of the tensor group has several runs already.
    """
    is_fused = isinstance(parameter, DTensor) and any(isinstance(p, _StridedShard) for p in parameter.placements)
    return Shard(1) if is_fused else None


class _Division:
    """The work of `split_matrices`."""

    def __init__(self, model: nn.Module, mesh: DeviceMesh, rules: Rules, *, sequence: bool) -> None:
        self._model, self._mesh, self._rules, self._sequence = model, mesh, rules, sequence
        self._modules = dict(model.named_modules())
        self._names = {id(module): name for name, module in self._modules.items()}
        self._found = Divided(model, mesh.get_group())
        self._regions: dict[str, Region] = {}
        self._device = next(model.parameters()).device

    def made(self) -> Divided:
        """The model, divided."""
        self._note_partial()
        self._divide_parameters()
        for name, rule in self._rules.items():
            style = rule
            if isinstance(style, str | Fused):
                style = _Style(functools.partial(self._change, name, style))
            parallelize_module(self._model, self._mesh, {name: style})
        if self._sequence:
            first = next(name for name, rule in self._rules.items() if rule == "sequence")
            self._modules[first].register_forward_pre_hook(self._take_part, with_kwargs=True)
            self._draw_apart_along_sequence()
        return self._found

    def _change(self, name: str, rule: Rule, module: Any) -> None:
        """Let a module do what its rule says."""
        group, parts = self._mesh.get_group(), self._sequence
        if isinstance(rule, Fused) or rule == "colwise":
            module.forward = Columns(module, self._region(name), group, rule.parts if isinstance(rule, Fused) else 1)
        elif rule == "rowwise":
            module.forward = Rows(module, self._region(name), group, sequence=parts)
        elif rule == "embedding" and is_divided_by_vocabulary(module, group.size()):
            module.forward = Embedding(module, group)
        elif rule == "output" and is_divided_by_vocabulary(module, group.size()):
            self._found.output = module.forward = Output(module, self._mesh, sequence=parts)
        elif rule == "output" and parts:
            gather = lambda x: collectives.gathered(x, SEQUENCE, group, is_shared=False)  # noqa: E731 - one of two like it
            module.register_forward_pre_hook(_on_first_tensor(gather), with_kwargs=True)
        elif rule == "region" and parts:
            gather = lambda x: collectives.gathered(x, SEQUENCE, group, is_shared=True)  # noqa: E731 - see above
            module.register_forward_pre_hook(_on_first_tensor(gather), with_kwargs=True)
        elif rule == "region":
            module.register_forward_pre_hook(_on_first_tensor(lambda x: collectives.shared(x, group)), with_kwargs=True)

    def _region(self, name: str) -> Region:
        """What the layers of one parent share."""
        parent = name.rpartition(".")[0]
        if parent not in self._regions:
            module = self._modules[parent]
            draws = OwnDraws(self._mesh.get_local_rank(), len(self._regions), self._device)
            is_entered = self._rules.get(parent) == "region"
            self._regions[parent] = Region(module, draws if may_draw(module) else None, is_entered=is_entered)
        return self._regions[parent]

    def _note_partial(self) -> None:
        """Find the whole parameters that take part in some of the work only."""
        dimensions = divided_dimensions(self._model, self._mesh.size())
        for name, _ in self._model.named_parameters():
            owner = name.rpartition(".")[0]
            rule = self._rules.get(owner)
            around = {self._rules.get(one) for one in _prefixes(owner)}
            is_after_sum = rule == "rowwise" and name not in dimensions  # a bias
            is_inside = ("region" in around or "summed" in around) and not is_after_sum
            is_along = self._sequence and "sequence" in around
            if name not in dimensions and (is_inside or is_along or isinstance(rule, Fused)):
                self._found.partial_names.add(name)

    def _divide_parameters(self) -> None:
        """Replace parameters by their DTensors, one that several modules share in all of them."""
        made: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
        for name, dim in divided_dimensions(self._model, self._mesh.size()).items():
            owner, _, leaf = name.rpartition(".")
            module, rule = self._modules[owner], self._rules[owner]
            parameter: nn.Parameter = getattr(module, leaf)
            if id(parameter) not in made:
                parts = rule.parts if isinstance(rule, Fused) else 1
                made[id(parameter)] = parameter, _divided(parameter, self._mesh, dim, parts)
            setattr(module, leaf, made[id(parameter)][1])

    def _take_part(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """This process's part of the tokens, from the first block on."""
        group = self._mesh.get_group()

        def own(x: torch.Tensor) -> torch.Tensor:
            if x.dim() < 3 or x.shape[SEQUENCE] % group.size():
                raise BadJob(
                    f"{self._names[id(module)]} is given {list(x.shape)}: {group.size()} processes cannot divide its "
                    "tokens, dimension 1",
                    remedy="Use a layout with sequence=False, or windows of a length that divides.",
                )
            return collectives.part(x, SEQUENCE, group)

        return _on_first_tensor(own)(module, args, kwargs)

    def _draw_apart_along_sequence(self) -> None:
        """Dropout between the matrices, where each process has its own tokens."""
        regions = {name for name, rule in self._rules.items() if rule == "region"}
        for number, (name, module) in enumerate(self._modules.items()):
            around = set(_prefixes(name))
            is_along = any(self._rules.get(one) == "sequence" for one in around) and not around & regions
            if isinstance(module, DROPOUTS) and module.p > 0 and is_along:
                OwnDraws(self._mesh.get_local_rank(), -1 - number, self._device).throughout(module)


class _Style(ParallelStyle):
    """A change of a module in PyTorch's form, so that its own styles and ours stand in one plan."""

    def __init__(self, change: Callable[[nn.Module], None]) -> None:
        super().__init__()
        self._change = change

    def _apply(self, module: nn.Module, _device_mesh: DeviceMesh) -> nn.Module:
        self._change(module)
        return module


def _divided(parameter: nn.Parameter, mesh: DeviceMesh, dim: int, parts: int) -> nn.Parameter:
    """The DTensor of which each process holds an equal part along `dim`, of each of `parts` parts."""
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
    """A dotted name, and those of what is around it."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
