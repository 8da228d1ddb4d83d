"""Fakes of modules, optimisers and batches without their memory, and fake answers to questions about values."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from stoker.errors import BadJob
from stoker.profiling.tracing.fake_device import Patches, fake_like, is_fake, unwatched
from stoker.profiling.tracing.operations import tensors_in
from stoker.stepping.without_compiler import without_compiler

_SMALL = 2**16
"""Scalars up to which a tensor that a model makes of itself is computed for real."""


class Fakes:
    """Fakes on `device`, one for each real tensor."""

    def __init__(self, mode: FakeTensorMode, device: torch.device) -> None:
        self.mode, self.device = mode, device
        self._made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The fake of `tensor`, with its gradient; always the same one. A fake on the device is its own fake."""
        if is_fake(tensor) and tensor.device == self.device:
            return tensor
        if id(tensor) not in self._made:
            fake = fake_like(self.mode, tensor, self.device)
            self._made[id(tensor)] = tensor, fake  # the real one is kept, so that its id is not reused
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
        """Drop the fakes that are not in `module`."""
        kept = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
        self._made = {key: made for key, made in self._made.items() if id(made[1]) in kept}

    def copy(self, value: Any) -> Any:
        """A deep copy in which every tensor is its fake."""
        with self.copying():
            return copy.deepcopy(value)

    @contextlib.contextmanager
    def copying(self, *, of_real: bool = True) -> Iterator[None]:
        """Within the block, deep copies of fakes are new fakes, and if `of_real` so are copies of real tensors."""
        with Patches() as patches:
            for kind in (torch.Tensor, nn.Parameter):
                patches.put(kind, "__deepcopy__", self._deepcopy(kind.__deepcopy__, of_real=of_real))
            yield

    @contextlib.contextmanager
    def building(self) -> Iterator[None]:
        """The block makes a model: small tensors are real, and its weights, which have no values, are not drawn."""
        with Patches() as patches, self.copying(of_real=False), SmallForReal():  # type: ignore[no-untyped-call]
            for name, function in list(vars(nn.init).items()):
                if name.endswith("_") and not name.startswith("_") and callable(function):
                    patches.put(nn.init, name, _unless_fake(function))
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


def _unless_fake(initialise: Callable[..., Any]) -> Callable[..., Any]:
    """A function of `torch.nn.init` that leaves a fake as it is."""

    def unless_fake(*args: Any, **kwargs: Any) -> Any:
        tensor = args[0] if args else kwargs.get("tensor")
        return tensor if isinstance(tensor, torch.Tensor) and is_fake(tensor) else initialise(*args, **kwargs)

    return unless_fake


class SmallForReal(TorchDispatchMode):
    """Within its block, small tensors made from numbers are real, and so are results computed from them alone.

    A model may read values while it is built, such as a list of dropout rates by `torch.linspace(…).tolist()`. Large
    tensors, its weights, stay fake.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operation, for real if it is small."""
        kwargs = kwargs or {}
        tensors = tensors_in((args, tuple(kwargs.values())))
        is_real = not any(map(is_fake, tensors)) if tensors else _makes_small(args, kwargs)
        if not is_real or func.namespace == "prim":
            return func(*args, **kwargs)
        with unwatched():
            return func(*args, **kwargs)


without_compiler(SmallForReal.__torch_dispatch__)


def _makes_small(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a factory called with numbers, a size or a range makes a small tensor on the host."""
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


Hints = Mapping[str, int]
"""Data-dependent sizes by the line they come from: `{"train_me.py:42": 128}`."""

NO_HINTS: Hints = {}


class FakeAnswers:
    """Answers to questions about values in one trace, which are not computed.

    A loss read by `.item()` is 0.0, a whole number 1, `any` is false and `all` is true. Data-dependent sizes cannot be
    guessed: for a step function the user gives a hint, the number of elements at that line; a Job has no hints (None).
    `lines_of_numbers` are the lines that asked for whole numbers without a hint.
    """

    def __init__(self, hints: Hints | None = NO_HINTS) -> None:
        self.hints = NO_HINTS if hints is None else hints
        self._can_be_given = hints is not None
        self.number = 1
        self.lines_of_numbers: set[str] = set()

    def value(self, func: Any, args: tuple[Any, ...], line: str, *, is_all: bool) -> Any:
        """The answer to a question about a tensor's values.

        Raises:
            BadJob: a question other than for one scalar.
        """
        name = func.overloadpacket.__name__
        if name == "equal":
            return True
        if name != "_local_scalar_dense":
            raise self._asks_for_hint(name, line)
        dtype = args[0].dtype
        if dtype == torch.bool:
            return is_all
        if dtype.is_floating_point or dtype.is_complex:
            return 0.0
        if line in self.hints:
            return self.hints[line]
        if not line.startswith("stoker/"):
            self.lines_of_numbers.add(line)
        return self.number

    def result(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], line: str) -> Any:
        """The result of an operation with a data-dependent size, which is the hint for `line`.

        Raises:
            BadJob: there is no hint, or the operation is not known.
        """
        name = func.overloadpacket.__name__
        make = _OF_SIZE.get(name)
        if line not in self.hints or make is None:
            raise self._asks_for_hint(name, line)
        return make(func, args, kwargs, self.hints[line])

    def _asks_for_hint(self, name: str, line: str) -> BadJob:
        where = line or "an unknown line"
        remedy = (
            self.remedy("Say how large it gets", where, "the number of elements there")
            if name in _OF_SIZE
            else "Rewrite that line so that shapes do not depend on values, for instance with torch.where."
        )
        return BadJob(f"`{name}` at {where} has a result whose size depends on the data", remedy=remedy)

    def remedy(self, ask: str, line: str, what: str) -> str:
        """The remedy for a data-dependent size: give the hint that `ask` asks for, the number `what`, or avoid it."""
        if self._can_be_given:
            return f'{ask}: hints={{"{line}": 128}}, {what}.'
        return (
            "On one attached device (`--on here`), a job like this is planned by trials. To forecast it for others or "
            "for several, rewrite that line so that sizes do not depend on the data, for instance with torch.where."
        )


def _index(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], size: int) -> Any:
    """Each mask among the indices becomes as many index tensors as it has dimensions."""
    indices: list[torch.Tensor | None] = []
    for index in args[1]:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            indices += [torch.empty(size, dtype=torch.int64, device=index.device) for _ in range(index.dim())]
        else:
            indices.append(index)
    return func(args[0], indices, *args[2:], **kwargs)


def _unique(_func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any], size: int) -> tuple[torch.Tensor, ...]:
    values = torch.empty(size, dtype=args[0].dtype, device=args[0].device)
    inverse = torch.empty(args[0].shape, dtype=torch.int64, device=args[0].device)
    return values, inverse, torch.empty(size, dtype=torch.int64, device=args[0].device)


_OF_SIZE: dict[str, Callable[[Any, tuple[Any, ...], dict[str, Any], int], Any]] = {
    "_unique2": _unique,
    "index": _index,
    "masked_select": lambda _, args, __, size: torch.empty(size, dtype=args[0].dtype, device=args[0].device),
    "nonzero": lambda _, args, __, n: torch.empty(n, args[0].dim(), dtype=torch.int64, device=args[0].device),
    "repeat_interleave": lambda _, args, __, size: torch.empty(size, dtype=torch.int64, device=args[0].device),
}
"""Operations whose results can be made in a given size."""
