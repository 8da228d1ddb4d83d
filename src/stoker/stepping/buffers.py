"""A model's buffers, kept and put back where a pass may have to be undone: 17 µs for the 24 of eight batch norms.

Not seen: large buffers written to past the version counter (`.data`).
"""

from __future__ import annotations

import torch
from torch import nn

SMALL_BYTES = 2**20
"""Buffers up to this size are copied each time: batch norm's are, and it does not count up their versions."""


class Buffers:
    """Copies of a model's buffers, which keep their memory addresses."""

    def __init__(self, model: nn.Module) -> None:
        self._slots = [(module, name) for module in model.modules() for name, _ in module.named_buffers(recurse=False)]
        self.are_there = bool(self._slots)
        self._tensors: list[torch.Tensor] = []
        self._small: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []
        """Buffers of one kind, and their copies: a GPU copies those of one dtype in one kernel."""
        self._large: list[_Large] = []

    @torch.no_grad()
    def keep(self) -> None:
        """Copy what may have changed since the last time."""
        now = [module._buffers[name] for module, name in self._slots]  # noqa: SLF001 - by `getattr` it takes three times as long
        tensors = [tensor for tensor in now if tensor is not None]
        if len(tensors) != len(self._tensors) or any(a is not b for a, b in zip(tensors, self._tensors, strict=True)):
            self._take(tensors)
        for originals, copies in self._small:
            torch._foreach_copy_(copies, originals)
        for large in self._large:
            large.keep()

    @torch.no_grad()
    def restore(self) -> bool:
        """Put back the tensors and their values; whether all had been kept."""
        for (module, name), tensor in zip(self._slots, self._tensors, strict=True):
            module._buffers[name] = tensor  # noqa: SLF001 - as above
        for originals, copies in self._small:
            torch._foreach_copy_(originals, copies)
        are_kept = [large.restore() for large in self._large]
        return all(are_kept)

    def _take(self, tensors: list[torch.Tensor]) -> None:
        """Let these be the buffers from now on: a model may replace one by another."""
        self._slots = [(module, name) for module, name in self._slots if module._buffers[name] is not None]  # noqa: SLF001
        self._tensors = tensors
        unique = list({id(tensor): tensor for tensor in tensors}.values())
        by_kind: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for tensor in unique:
            if tensor.nbytes <= SMALL_BYTES:
                by_kind.setdefault((tensor.device, tensor.dtype), []).append(tensor)
        self._small = [(of_kind, list(map(torch.empty_like, of_kind))) for of_kind in by_kind.values()]
        self._large = [_Large(tensor) for tensor in unique if tensor.nbytes > SMALL_BYTES]


class _Large:
    """A buffer that is copied only where its version counter has moved: most are constant tables."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self._version = _version(tensor)
        self._copy: torch.Tensor | None = tensor.clone()
        self._times = 0
        self._has_moved = False

    def keep(self) -> None:
        self._times += 1
        if _version(self._tensor) != self._version:
            self._version, self._has_moved = _version(self._tensor), True
            self._copy = self._tensor.clone() if self._copy is None else self._copy.copy_(self._tensor)
        elif self._times > 1 and not self._has_moved:
            self._copy = None  # constant so far: a second copy of it is not worth its memory

    def restore(self) -> bool:
        if _version(self._tensor) == self._version:
            return True
        if self._copy is None:
            return False
        self._tensor.copy_(self._copy)
        self._version, self._has_moved = _version(self._tensor), True
        return True


def _version(tensor: torch.Tensor) -> int:
    """Autograd's count of in-place changes of the tensor."""
    return tensor._version  # noqa: SLF001 - documented: https://docs.pytorch.org/docs/stable/notes/autograd.html
