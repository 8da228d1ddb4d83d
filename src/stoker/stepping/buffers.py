"""A model's buffers, kept and put back where a pass may have to be undone: 17 µs for the 24 of eight batch norms.

With them go frozen parameters that passes change, such as those of a momentum encoder or a mean teacher; which these
are is seen in a run's first updates (`FrozenWatch`).

Not seen: large buffers written to past the version counter (`.data`); frozen parameters that begin to change later.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from stoker.stepping.distributed_tensors import as_real, local

SMALL_BYTES = 2**20
"""Buffers up to this size are copied each time: batch norm's are, and it does not count up their versions."""


class Buffers:
    """Copies of a model's buffers, which keep their memory addresses."""

    def __init__(self, model: nn.Module) -> None:
        self._slots = [(module, name) for module in model.modules() for name, _ in module.named_buffers(recurse=False)]
        self._tensors: list[torch.Tensor] = []
        self._small: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []
        """Buffers of one kind, and their copies: a GPU copies those of one dtype in one kernel."""
        self._large: list[_Large] = []
        self._frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
        self._moving: list[tuple[nn.Parameter, torch.Tensor]] = []

    @property
    def are_there(self) -> bool:
        """Whether there is anything to keep."""
        return bool(self._slots or (self._frozen and len(_MOVING)))

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
        if self._frozen and len(_MOVING):  # which may have those of other models, too
            moving = [frozen for frozen in self._frozen if frozen in _MOVING]
            if len(moving) != len(self._moving):
                self._moving = [(frozen, torch.empty_like(frozen)) for frozen in moving]
        for parameter, copy in self._moving:
            copy.copy_(parameter)

    @torch.no_grad()
    def restore(self) -> bool:
        """Put back the tensors and their values; whether all had been kept."""
        for (module, name), tensor in zip(self._slots, self._tensors, strict=True):
            module._buffers[name] = tensor  # noqa: SLF001 - as above
        for originals, copies in self._small:
            torch._foreach_copy_(originals, copies)
        are_kept = [large.restore() for large in self._large]
        for parameter, copy in self._moving:
            parameter.copy_(copy)
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


_MOVING = WeakTensorKeyDictionary()
"""Frozen parameters that were seen to change in a pass."""

_NUM_MARKED = 1024
"""Elements of a parameter that are looked at, evenly spaced: a pass that follows weights changes all."""
_ROUNDING = 8
"""Change of an element up to which it may be rounding [units in the last place]: a norm is a sum and a root."""
_LOOKS = 4
"""Updates before which a run's frozen parameters are looked at."""


def marks_of(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Some elements of each parameter [n], copied; of special tensors none."""
    marks: list[torch.Tensor] = []
    for parameter in parameters:
        tensor = local(parameter.detach())
        if not _is_plain(tensor):
            marks.append(torch.empty(0))
            continue
        flat = as_real(tensor).reshape(-1)
        marks.append(flat[:: max(1, flat.numel() // _NUM_MARKED)].clone())
    return marks


def writes_to(parameters: Iterable[torch.Tensor]) -> list[tuple[int, int]]:
    """The address of each parameter's memory, and autograd's count of writes to it; of special tensors zeros."""
    return [(p.data_ptr(), _version(p)) if _is_plain(p.detach()) else (0, 0) for p in parameters]


def _is_plain(tensor: torch.Tensor) -> bool:
    is_usual = type(tensor) is torch.Tensor and tensor.layout == torch.strided and not tensor.is_quantized
    return is_usual and not tensor.is_meta and tensor.numel() > 0


def have_changed(before: Sequence[torch.Tensor], after: Sequence[torch.Tensor]) -> list[bool]:
    """Whether each parameter has changed between two times of `marks_of`, by more than rounding.

    Weights that are normalised in place are so again with each pass, and their last bits change.
    """
    return [_has_changed(one, other) for one, other in zip(before, after, strict=True)]


def _has_changed(before: torch.Tensor, after: torch.Tensor) -> bool:
    if before.shape != after.shape or torch.equal(before, after):
        return before.shape != after.shape
    if not before.is_floating_point():
        return True
    rounding = _ROUNDING * torch.finfo(before.dtype).eps
    return not torch.allclose(before.double(), after.double(), rtol=rounding, atol=0, equal_nan=True)


class FrozenWatch:
    """Finds the frozen parameters of a model that change from update to update, in its first ones; `Buffers` keep them.

    The optimiser does not move them: a pass does, in which they follow others.
    """

    def __init__(self, model: nn.Module) -> None:
        self._frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
        self._left = _LOOKS if self._frozen else 0
        self._marks: list[torch.Tensor] = []

    def look(self) -> None:
        """Look at them before an update."""
        if not self._left:
            return
        self._left -= 1
        for parameter in self._changed():
            _MOVING[parameter] = True
        self._marks = marks_of(self._frozen)

    def has_unkept(self) -> bool:
        """Whether one has changed since the last look that is not known to: no copy is kept of it."""
        return bool(self._left) and any(parameter not in _MOVING for parameter in self._changed())

    def _changed(self) -> list[nn.Parameter]:
        if not self._marks:
            return []
        changed = have_changed(self._marks, marks_of(self._frozen))
        return [p for p, is_changed in zip(self._frozen, changed, strict=True) if is_changed and not p.requires_grad]
