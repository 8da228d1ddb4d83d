"""What layers do whose matrices are divided among the processes of a tensor group; see `matrices.py`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from stoker.stepping.layouts import collectives
from stoker.stepping.layouts.draws import OwnDraws

SEQUENCE = 1
"""The dimension of tokens: activations are [B, T, D]."""


class Region:
    """What lies between the colwise and the rowwise layers of one module: divided features, and draws of their own.

    Where the module is no "region" itself, its colwise layers share what they are given: one sum of gradients for all.
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
            self._shared = x, collectives.shared(x, group)
        return self._shared[1]

    def end(self) -> None:
        """Features are whole again."""
        self._shared = None
        if self._draws is not None:
            self._draws.end()


class Columns:
    """A linear layer that computes this process's features of all."""

    def __init__(self, module: nn.Linear, region: Region, group: dist.ProcessGroup, parts: int) -> None:
        self._module, self._region, self._group, self._parts = module, region, group, parts

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Features [..., D / tensor] of [..., D']."""
        bias: torch.Tensor | None = self._module.bias
        if bias is not None and not isinstance(bias, DTensor):
            bias = piece_of(bias, 0, self._parts, self._group.size(), self._group.rank())
        return F.linear(self._region.enter(x, self._group), own_part(self._module.weight), own_part(bias))


class Rows:
    """A linear layer over this process's features, summed over all processes'; the bias is added once, after that."""

    def __init__(self, module: nn.Linear, region: Region, group: dist.ProcessGroup, *, sequence: bool) -> None:
        self._module, self._region, self._group, self._leaves_parts = module, region, group, sequence

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[..., D'] of [..., D / tensor]; of this process's tokens where the sequence is divided."""
        out = F.linear(x, own_part(self._module.weight))
        self._region.end()
        if self._leaves_parts:
            out = collectives.part_of_sum(out, SEQUENCE, self._group)
        else:
            out = collectives.summed(out, self._group)
        bias: torch.Tensor | None = self._module.bias
        return out if bias is None else out + bias.to(out.dtype)


class Embedding:
    """A table of which this process holds some rows: of other tokens it finds zeros, and all are added up."""

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
        found = F.embedding(own.masked_fill(is_elsewhere, 0), own_part(module.weight), padding)
        return collectives.summed(found.masked_fill(is_elsewhere.unsqueeze(-1), 0), self._group)


class Output:
    """The output layer, divided by vocabulary: gathers logits, unless the loss takes them divided."""

    def __init__(self, module: nn.Linear, mesh: DeviceMesh, *, sequence: bool) -> None:
        self._module, self._mesh, self._group = module, mesh, mesh.get_group()
        self._has_parts = sequence
        self.keeps_divided = False

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Logits [..., V], or the DTensor of them divided by V."""
        group = self._group
        if self._has_parts:
            x = collectives.gathered(x, SEQUENCE, group, is_shared=True)
        else:
            x = collectives.shared(x, group)
        logits = F.linear(x, own_part(self._module.weight), own_part(self._module.bias))
        if self.keeps_divided:
            divided: torch.Tensor = DTensor.from_local(logits, self._mesh, [Shard(logits.dim() - 1)], run_check=False)
            return divided
        return collectives.gathered(logits, -1, group, is_shared=False)


def piece_of(tensor: torch.Tensor, dim: int, parts: int, size: int, rank: int) -> torch.Tensor:
    """Part `rank` of `size` along `dim`, of each of `parts` parts."""
    pieces: tuple[torch.Tensor, ...] = tensor.unflatten(dim, (parts, -1)).chunk(size, dim + 1)
    return pieces[rank].flatten(dim, dim + 1)


def own_part(tensor: torch.Tensor | None) -> Any:
    """This process's part of a DTensor, with its gradient; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
