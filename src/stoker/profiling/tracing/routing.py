"""Values of small integer tensors in a trace, under the assumption that a router spreads tokens evenly.

What: a mixture of experts sends each token to the experts with the highest scores, and the sizes of what follows depend
on them. In a trace scores have no values. Choices among E (`topk`, `argmax`, `sort`) get balanced ones: choice j of k
of row n is (n + j * (E // k)) mod E, so that each expert gets N * k / E of N * k rows. What is computed from known
values alone is computed for real, and answers questions about sizes: masks, counts, `nonzero`, `.tolist()`.
Use when: always; a model without choices has none. Costs: the real integers, of at most _MOST_ROUTED elements a tensor.
Not checked: that routing is balanced. Memory and arithmetic hardly depend on it, since experts together see N * k rows
however these are spread, unless each has a limited capacity; on several devices the fullest one decides.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch

from stoker.profiling.tracing.fake_device import is_fake, storage_key, unwatched
from stoker.profiling.tracing.operations import is_mutation, tensors_in, written_arguments

_MOST, _MOST_ROUTED = 2**20, 2**24
"""Elements of a tensor up to which its values are known: of what does not depend on routing, and of what does."""
_FACTORIES: dict[str, int | None] = {
    **dict.fromkeys(("arange", "full", "scalar_tensor")),
    **dict.fromkeys(("empty", "empty_like", "empty_strided", "new_empty", "zeros", "zeros_like", "new_zeros"), 0),
    **dict.fromkeys(("ones", "ones_like", "new_ones"), 1),
}
"""Operations that make tensors from sizes; the value they fill them with, None where that is an argument."""
GROUPED = frozenset({"_grouped_mm", "grouped_mm_fallback"})
"""Products of experts with as many rows each as were sent to it, whose time depends on the most."""
_CHOICES = {"topk": 1, "sort": 1, "argsort": 0, "argmax": 0, "max": 1}
"""Operations that choose along a dimension, and the place of the chosen indices among their results."""


class Routing:
    """The known values of fake tensors, by storage, and whether an answer rested on balanced routing."""

    def __init__(self) -> None:
        self.is_assumed = False
        self._values: dict[int, torch.Tensor] = {}
        self._routed: set[int] = set()
        self._watches: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def note(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        inputs: list[torch.Tensor],
        outputs: list[torch.Tensor],
        *,
        is_in_module: bool,
    ) -> None:
        """Follow an operation on `inputs` with fake results `outputs`; routers are in modules, unlike a loss."""
        if is_mutation(func):
            self._note_written(func, args, kwargs, inputs)
            return
        name = func.overloadpacket.__name__
        if not outputs or storage_key(outputs[0].untyped_storage()) in self._values:  # a view
            return
        if name in _CHOICES and len(outputs) > _CHOICES[name] and not self._knows_all(args):
            chosen = outputs[_CHOICES[name]]
            if is_in_module and chosen.numel() <= _MOST_ROUTED:
                self._learn(chosen, _balanced(name, func, args, kwargs, outputs), is_routed=True)
            return
        if name in _FACTORIES:
            if not outputs[0].is_floating_point() and outputs[0].numel() <= _MOST:
                value = _FACTORIES[name]
                if value is None:
                    self._compute(func, args, kwargs, outputs)
                else:
                    with unwatched():
                        self._learn(outputs[0], torch.full(outputs[0].shape, value, dtype=outputs[0].dtype))
        elif _is_computable(func) and self._knows_all(inputs):
            most = _MOST_ROUTED if self._is_routed(inputs) else _MOST
            if max(output.numel() for output in outputs) <= most:
                self._compute(func, args, kwargs, outputs)

    def scalar(self, tensor: torch.Tensor) -> bool | int | float | complex | None:
        """The value of a tensor of one element; None if it is unknown."""
        if not self._knows_all([tensor]):
            return None
        self.is_assumed |= self._is_routed([tensor])
        with unwatched():
            value: bool | int | float | complex = self._value(tensor).item()
        return value

    def sized(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The fake result of an operation whose size depends on values; None if these are unknown."""
        name = func.overloadpacket.__name__
        if name == "index":
            asked = [one for one in args[1] if one is not None and one.dtype in (torch.bool, torch.uint8)]
        else:
            asked = [args[1]] if name == "masked_select" else tensors_in((args, kwargs.values()))
        if not _is_computable(func) or not self._knows_all(asked):
            return None
        is_routed = self._is_routed(asked)
        self.is_assumed |= is_routed
        if name == "index":  # each mask becomes the indices of its elements
            indices: list[Any] = []
            for index in args[1]:
                is_mask = any(index is mask for mask in asked)
                if not is_mask:
                    indices.append(index)
                    continue
                with unwatched():
                    places = self._value(index).nonzero(as_tuple=True)
                indices += [self._made(place, index.device, is_routed=is_routed) for place in places]
            return func(args[0], indices, *args[2:], **kwargs)
        if name == "masked_select":
            with unwatched():
                shape = torch.broadcast_shapes(args[0].shape, args[1].shape)
                count = int(self._value(args[1]).broadcast_to(shape).sum())
            return args[0].new_empty(count)
        with unwatched():
            real = func(*_mapped(args, self._value), **_mapped(kwargs, self._value))
        results = tuple(self._made(one, asked[0].device, is_routed=is_routed) for one in tensors_in([real]))
        return results[0] if isinstance(real, torch.Tensor) else results

    def _made(self, real: torch.Tensor, device: torch.device, *, is_routed: bool) -> torch.Tensor:
        fake = torch.empty(real.shape, dtype=real.dtype, device=device)
        self._learn(fake, real, is_routed=is_routed)
        return fake

    def _note_written(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: list[torch.Tensor]
    ) -> None:
        written = written_arguments(func, args, kwargs)
        keys = [storage_key(tensor.untyped_storage()) for tensor in written]
        if not any(key in self._values for key in keys):
            return
        if _is_computable(func) and self._knows_all(inputs):
            if self._is_routed(inputs):
                self._routed.update(keys)
            with unwatched():
                func(*_mapped(args, self._value), **_mapped(kwargs, self._value))
        else:
            for key in keys:
                self._forget(key)

    def _compute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: list[torch.Tensor]) -> None:
        is_routed = self._is_routed(tensors_in((args, kwargs.values())))
        with unwatched():
            try:
                real = tensors_in([func(*_mapped(args, self._value), **_mapped(kwargs, self._value))])
            except NotImplementedError:  # a GPU's kernel that a CPU lacks, such as `histc` of whole numbers
                return
        for fake, one in zip(outputs, real, strict=True):
            self._learn(fake, one, is_routed=is_routed)

    def _learn(self, fake: torch.Tensor, real: torch.Tensor, *, is_routed: bool = False) -> None:
        storage = fake.untyped_storage()
        key = storage_key(storage)
        if not storage.nbytes() or real.numel() > _MOST_ROUTED:
            return
        with unwatched():
            count = storage.nbytes() // fake.element_size()
            values = (torch.empty if count == real.numel() else torch.zeros)(count, dtype=fake.dtype)
            values.as_strided(fake.size(), fake.stride(), fake.storage_offset()).copy_(real)
        self._values[key] = values
        if is_routed:
            self._routed.add(key)
        self._watches[key] = weakref.ref(storage, lambda _watch: self._forget(key))

    def _forget(self, key: int) -> None:
        self._values.pop(key, None)
        self._watches.pop(key, None)
        self._routed.discard(key)

    def _knows_all(self, values: Any) -> bool:
        tensors = tensors_in(values)
        return bool(tensors) and all(
            not is_fake(tensor)
            or not tensor.numel()
            or storage_key(tensor.untyped_storage()) in self._values
            or getattr(tensor, "constant", None) is not None
            for tensor in tensors
        )

    def _is_routed(self, tensors: list[torch.Tensor]) -> bool:
        return any(storage_key(tensor.untyped_storage()) in self._routed for tensor in tensors)

    def _value(self, value: Any) -> Any:
        """A real tensor of a fake one's values, which shares memory with its views; other arguments as on a CPU."""
        if isinstance(value, torch.device):
            return torch.device("cpu")
        if not isinstance(value, torch.Tensor) or not is_fake(value):
            return value
        known = self._values.get(storage_key(value.untyped_storage()))
        if known is None:
            constant = getattr(value, "constant", None)
            return torch.empty(value.shape, dtype=value.dtype) if constant is None else constant
        return known.view(value.dtype).as_strided(value.size(), value.stride(), value.storage_offset())


@functools.cache
def _is_computable(func: Any) -> bool:
    """Whether an operation of known values is computed for real: those of PyTorch without random numbers."""
    return func.namespace == "aten" and torch.Tag.nondeterministic_seeded not in func.tags


def _mapped(values: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(values, dict):
        return {key: _mapped(value, change) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return type(values)(_mapped(value, change) for value in values)
    return change(values)


def _balanced(
    name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: list[torch.Tensor]
) -> torch.Tensor:
    """Indices chosen in turn: of each row as many different ones as `outputs` have."""
    arguments = func._schema.arguments  # noqa: SLF001
    given = {argument.name: argument.default_value for argument in arguments if argument.default_value is not None}
    given |= {argument.name: value for argument, value in zip(arguments, args, strict=False)} | kwargs
    source, chosen = args[0], outputs[_CHOICES[name]]
    dim = given.get("dim")
    with unwatched():
        if dim is None or not source.dim():  # of all elements
            return torch.zeros(chosen.shape, dtype=torch.int64)
        num = max(1, source.shape[dim])
        shape = list(chosen.shape)
        if len(shape) < source.dim():
            shape.insert(dim % source.dim(), 1)
        count = shape.pop(dim) if shape else 1
        rows = torch.arange(max(1, torch.Size(shape).numel())).view(*shape, 1)
        indices = (rows + torch.arange(count) * max(1, num // max(1, count))) % num
        placed: torch.Tensor = indices.movedim(-1, dim).reshape(chosen.shape)
        return placed
