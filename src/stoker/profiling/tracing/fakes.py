"""Making fakes of real things: modules, optimisers and batches, without copying their memory."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from stoker.profiling.tracing.fake_device import Patches, fake_like, is_fake, unwatched
from stoker.profiling.tracing.operations import tensors_in

_SMALL = 2**16
"""Scalars up to which a tensor that a model makes of itself is computed for real."""


class Fakes:
    """Fakes on `device`, one for each real tensor."""

    def __init__(self, mode: FakeTensorMode, device: torch.device) -> None:
        self.mode, self.device = mode, device
        self._made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The fake of `tensor`, with its gradient; always the same one. Fakes on the device stand for themselves."""
        if is_fake(tensor) and tensor.device == self.device:
            return tensor
        if id(tensor) not in self._made:
            fake = fake_like(self.mode, tensor, self.device)
            self._made[id(tensor)] = tensor, fake  # the real one is kept, so that its id is not given away
            if tensor.is_leaf and tensor.grad is not None:
                fake.grad = self.of(tensor.grad)
        return self._made[id(tensor)][1]

    def in_place(self, module: nn.Module) -> nn.Module:
        """The same module, its parameters, buffers and other tensors replaced by fakes."""
        for part in module.modules():
            places: tuple[dict[str, Any], ...] = (part._parameters, part._buffers, vars(part))  # noqa: SLF001 - theirs
            for tensors in places:
                for name, tensor in tensors.items():
                    if isinstance(tensor, torch.Tensor):
                        tensors[name] = self.of(tensor)
        return module

    def forget_all_but(self, module: nn.Module) -> None:
        """Let go of the fakes that are not in `module`: of what was left out of it."""
        kept = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
        self._made = {key: made for key, made in self._made.items() if id(made[1]) in kept}

    def copy(self, value: Any) -> Any:
        """A deep copy in which every tensor is its fake."""
        with self.copying():
            return copy.deepcopy(value)

    @contextlib.contextmanager
    def copying(self, *, of_real: bool = True) -> Iterator[None]:
        """Within the block deep copies of fakes are fakes of their own, and if `of_real` those of real tensors too."""
        with Patches() as patches:
            for kind in (torch.Tensor, nn.Parameter):
                patches.put(kind, "__deepcopy__", self._deepcopy(kind.__deepcopy__, of_real=of_real))
            yield

    def _deepcopy(self, original: _DeepCopy, *, of_real: bool) -> _DeepCopy:
        def copied(tensor: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
            if id(tensor) in memo:
                return memo[id(tensor)]  # type: ignore[no-any-return]
            if not is_fake(tensor):
                return memo.setdefault(id(tensor), self.of(tensor)) if of_real else original(tensor, memo)
            clone = tensor.detach().clone().requires_grad_(tensor.requires_grad)
            is_parameter = isinstance(tensor, nn.Parameter)
            memo[id(tensor)] = nn.Parameter(clone, tensor.requires_grad) if is_parameter else clone
            return memo[id(tensor)]  # type: ignore[no-any-return]

        return copied


_DeepCopy = Callable[[torch.Tensor, dict[int, Any]], torch.Tensor]


class SmallForReal(TorchDispatchMode):
    """Within its block, small tensors made from nothing are real, and so is what is computed from them alone.

    A model may look at values while it is built, such as a list of dropout rates by `torch.linspace(…).tolist()`, and
    must find the right ones. Large tensors, its weights, stay fake.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operation, for real if it is small."""
        kwargs = kwargs or {}
        tensors = [*tensors_in((args, tuple(kwargs.values())))]
        is_real = not any(map(is_fake, tensors)) if tensors else _makes_small(args, kwargs)
        if not is_real or func.namespace == "prim":
            return func(*args, **kwargs)
        with unwatched():
            return func(*args, **kwargs)


def _makes_small(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether what makes a tensor from numbers, a size or a range, makes a small one on the host."""
    if torch.device(kwargs.get("device") or "cpu").type != "cpu":
        return False
    sizes = [args[0]] if args and isinstance(args[0], list | tuple) else [[arg] for arg in args]
    for size in sizes:
        count = 1
        for number in size:
            count *= max(1, int(number)) if isinstance(number, int) else 1
        if count > _SMALL:
            return False
    return True
