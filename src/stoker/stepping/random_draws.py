"""Random draws inside a model or a loss: observed, silenced for proofs, and kept separate between processes.

`RandomDraws`. What: PyTorch's dispatcher names every operation that draws from a seeded generator; those are recorded,
and where asked for replaced by their average (a Bernoulli draw by its probability, so that dropout drops nothing).
Use when: ways of cutting a batch are compared with each other. Costs: 5 to 10 µs an operation.
Does not combine with: draws from Python's `random` or NumPy, which are not seen; operations that `_AVERAGES` lacks.
Source: https://docs.pytorch.org/docs/stable/notes/extending.html, "Extending all torch API with modes". The class is
in a private module: where it is gone nothing is seen or silenced, and proofs say that the model draws at random.

`OwnDraws`, `seed_stage_draws`. Generators are seeded before every micro-batch, with equal seeds in all processes that
hold the same samples. Where they work on different heads, tokens or layers, equal draws would drop the same positions
in each of them, which is another distribution than one process's. There draws are keyed by the process as well.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn

from stoker.loading.order import (
    device_generator,
    extended,
    python_generators,
    restore_python_generators,
    seed_torch,
)
from stoker.stepping.without_compiler import without_compiler

try:
    from torch.utils._python_dispatch import TorchDispatchMode
except ImportError:

    class TorchDispatchMode(contextlib.nullcontext):  # type: ignore[no-redef,type-arg]
        """Sees nothing."""


class RandomDraws(TorchDispatchMode):
    """Records which operations draw at random within it, and how coarse the arithmetic gets.

    `drawn` are the names of the operations that drew, `elements` how many numbers each drew in all (not counting
    dropout inside attention and recurrent layers); `coarsest` is the largest rounding step of any result [relative].
    With `silenced`, draws are replaced by constants. `pushed` instead sets the draws of the named operations to one
    `end` of their range, 0 or 1; see `HAS_ENDS`.
    """

    def __init__(self, *, silenced: bool = False, pushed: Collection[str] = (), end: int = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.silenced, self.pushed, self.end = silenced, pushed, end
        self.drawn: set[str] = set()
        self.elements: Counter[str] = Counter()
        self.coarsest = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operation of PyTorch."""
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            result = func(*args, **kwargs)
            if isinstance(result, torch.Tensor) and result.is_floating_point():
                self.coarsest = max(self.coarsest, torch.finfo(result.dtype).eps)
            return result
        name = func.overloadpacket.__name__
        parameters = func._schema.arguments  # noqa: SLF001 - the only place where an operation's parameters are named
        given = {parameter.name: parameter.default_value for parameter in parameters}
        given |= dict(zip(given, args, strict=False)) | kwargs
        if share := next((key for key in ("dropout_p", "dropout") if key in given), None):
            if given[share]:  # attention or a recurrent layer that drops a share of its values itself
                self.drawn.add(name)
            if self.silenced:
                given[share] = 0.0
            by_position = [given[parameter.name] for parameter in parameters if not parameter.kwarg_only]
            by_name = {parameter.name: given[parameter.name] for parameter in parameters if parameter.kwarg_only}
            return func(*by_position, **by_name)
        self.drawn.add(name)
        if self.silenced and name == "native_dropout":
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        result = func(*args, **kwargs)
        self.elements[name] += (result if isinstance(result, torch.Tensor) else result[0]).numel()
        if name in self.pushed:
            low, high = HAS_ENDS[name.removesuffix("_").removesuffix("_like")](given)
            return result.copy_(torch.as_tensor(high if self.end else low))
        if not self.silenced:
            return result
        average = _AVERAGES.get(name.removesuffix("_").removesuffix("_like"))
        if average is not None:
            value = average(given)
            _ = result.copy_(value) if isinstance(value, torch.Tensor) else result.fill_(value)
        return result


without_compiler(RandomDraws.__torch_dispatch__)

_AVERAGES: dict[str, Callable[[dict[str, Any]], float | torch.Tensor]] = {
    "bernoulli": lambda given: given["p"] if "p" in given else given["self"],
    "exponential": lambda given: 1 / given["lambd"],
    "multinomial": lambda _given: 0,
    "normal": lambda given: given["mean"],
    "rand": lambda _given: 0.5,
    "randint": lambda given: given.get("low", 0),
    "randn": lambda _given: 0.0,
    "random": lambda given: given.get("from") or 0,
    "randperm": lambda given: torch.arange(given["n"]),
    "uniform": lambda given: (given["from"] + given["to"]) / 2,
}
"""The constant in place of a draw, from the operation's arguments: the average, or the first choice if it has none."""
_STEP = 2.0**-24
HAS_ENDS: dict[str, Callable[[dict[str, Any]], tuple[Any, Any]]] = {
    "bernoulli": lambda given: (torch.as_tensor(_chance(given)) >= 1, torch.as_tensor(_chance(given)) > 0),
    "rand": lambda _given: (_STEP, 1 - _STEP),
    "randint": lambda given: (given.get("low", 0), given["high"] - 1),
    "uniform": lambda given: (given["from"] + _STEP, given["to"] - _STEP * abs(given["to"])),
}
"""The ends of the range of a draw. A draw that is compared with a probability, as where layers are left out, has an
effect at one of them, or never."""


def _chance(given: dict[str, Any]) -> Any:
    return given["p"] if "p" in given else given["self"]


DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def may_draw(module: nn.Module) -> bool:
    """Whether a module drops anything: a layer in it does, or it has an attribute called dropout above zero."""
    return any(
        isinstance(value, int | float) and value > 0
        for part in module.modules()
        for name, value in vars(part).items()
        if (name == "p" and isinstance(part, DROPOUTS)) or "dropout" in name
    )


def seed_stage_draws(place: int, device: torch.device) -> None:
    """Key all further draws of a micro-batch by the stage `place` too."""
    seed_torch(extended(torch.initial_seed(), place), device)


class OwnDraws:
    """Separate generator states between `begin` and `end`; afterwards the process's own continue.

    Args:
        place: rank of the process among those that pass the same samples.
        number: number of this object in its process.
        device: the process's.
    """

    def __init__(self, place: int, number: int, device: torch.device) -> None:
        self._place, self._number, self._device = place, number, device
        self._kept: list[torch.Tensor] | None = None

    def begin(self) -> None:
        """Save the generators' states, if they are not saved yet, and seed them."""
        if self._kept is None:
            self._kept = [generator.get_state() for generator in torch_generators(self._device)]
            seed_torch(extended(torch.initial_seed(), self._place, self._number), self._device)

    def end(self) -> None:
        """Restore the saved states, if any."""
        if self._kept is not None:
            kept, self._kept = self._kept, None
            for generator, state in zip(torch_generators(self._device), kept, strict=True):
                generator.set_state(state)

    def throughout(self, module: nn.Module) -> None:
        """Begin and end with each of a module's passes in training."""
        module.register_forward_pre_hook(lambda this, _: self.begin() if this.training else None)
        module.register_forward_hook(lambda *_: self.end(), always_call=True)


class GeneratorStates:
    """The states of Python's, NumPy's and PyTorch's generators, those of the CPU and of `device`."""

    def __init__(self, device: torch.device) -> None:
        self._of_torch = [(generator, generator.get_state()) for generator in torch_generators(device)]
        self._of_python = python_generators()

    def restore(self) -> None:
        """Put them back."""
        for generator, state in self._of_torch:
            generator.set_state(state)
        restore_python_generators(self._of_python)


def torch_generators(device: torch.device) -> list[torch.Generator]:
    """PyTorch's generators of the CPU and the device."""
    own = [device_generator(device)] if device.type == "cuda" else []
    return [torch.default_generator, *own]
