"""Random draws inside a model or a loss: seen operation by operation, and silenced for proofs.

What: PyTorch's dispatcher names every operation that draws from a seeded generator; here those are noted, and where
asked for replaced by what they draw on average (a Bernoulli draw by its probability, so that dropout drops nothing).
Use when: ways of cutting a batch are compared with each other. Costs: 5 to 10 µs an operation.
Does not combine with: draws from Python's `random` or NumPy, which pass unseen; operations that `_AVERAGES` lacks.
Source: https://docs.pytorch.org/docs/stable/notes/extending.html, "Extending all torch API with modes". The class lies
in a private module: where it is gone nothing is seen or silenced, and proofs say that the model draws at random.

Random draws of processes that work on different parts of one sample: each has its own.

Generators are seeded before every micro-batch, alike in all processes that hold the same samples. Where they work on
different heads, tokens or layers, the same draws would fall on different things: dropout would then drop the same
places in each of them, which is another law than one process's. There draws are keyed by the process as well.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn

from stoker.loading.randomness import extended, seed_torch

try:
    from torch.utils._python_dispatch import TorchDispatchMode
except ImportError:

    class TorchDispatchMode(contextlib.nullcontext):  # type: ignore[no-redef,type-arg]
        """Sees nothing."""


class RandomDraws(TorchDispatchMode):
    """Within its block, notes which operations draw at random, and how coarse the arithmetic gets.

    `drawn` are the names of the operations that drew, `elements` how many numbers each drew in all (not counting
    dropout inside attention and recurrent layers); `coarsest` is the largest rounding step of any result [relative].
    With `silenced`, draws are replaced by constants. Instead, `pushed` sets those of the operations named to one `end`
    of what they can draw, 0 or 1; see `HAS_ENDS`.
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
        if torch.Tag.nondeterministic_seeded in func.tags:
            return self._random(func, args, kwargs or {})
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.is_floating_point():
            self.coarsest = max(self.coarsest, torch.finfo(result.dtype).eps)
        return result

    def _random(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = func.overloadpacket.__name__
        parameters = func._schema.arguments  # noqa: SLF001 - the only place where an operation's parameters are named
        given = {parameter.name: parameter.default_value for parameter in parameters}
        given |= dict(zip(given, args, strict=False)) | kwargs
        if share := next((key for key in ("dropout_p", "dropout") if key in given), None):
            return self._with_dropout_inside(func, name, given, share)
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

    def _with_dropout_inside(self, func: Any, name: str, given: dict[str, Any], share: str) -> Any:
        """Run attention or a recurrent layer that drops a share of its values itself."""
        if given[share]:
            self.drawn.add(name)
        if self.silenced:
            given[share] = 0.0
        parameters = func._schema.arguments  # noqa: SLF001 - likewise
        by_place = [given[parameter.name] for parameter in parameters if not parameter.kwarg_only]
        by_name = {parameter.name: given[parameter.name] for parameter in parameters if parameter.kwarg_only}
        return func(*by_place, **by_name)


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
"""What stands for a draw, from the operation's arguments: the average, or the first choice where there is none."""
_STEP = 2.0**-24
HAS_ENDS: dict[str, Callable[[dict[str, Any]], tuple[Any, Any]]] = {
    "bernoulli": lambda given: (torch.as_tensor(_chance(given)) >= 1, torch.as_tensor(_chance(given)) > 0),
    "rand": lambda _given: (_STEP, 1 - _STEP),
    "randint": lambda given: (given.get("low", 0), given["high"] - 1),
    "uniform": lambda given: (given["from"] + _STEP, given["to"] - _STEP * abs(given["to"])),
}
"""The ends of what can be drawn. A draw that is compared with a chance, as where layers are left out, moves something
at one of them, or never."""


def _chance(given: dict[str, Any]) -> Any:
    return given["p"] if "p" in given else given["self"]


DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def may_draw(module: nn.Module) -> bool:
    """Whether a module drops anything: a layer in it does, or it has an attribute called dropout above zero."""
    return any(
        isinstance(value, int | float) and value > 0
        for one in module.modules()
        for name, value in vars(one).items()
        if (name == "p" and isinstance(one, DROPOUTS)) or "dropout" in name
    )


def seed_stage_draws(place: int, device: torch.device) -> None:
    """Key all further draws of a micro-batch by `place` too."""
    seed_torch(extended(torch.initial_seed(), place), device)


class OwnDraws:
    """Other generators than the process's, between `begin` and `end`; outside of them these run on as they did.

    Args:
        place: of the process among those that pass the same samples.
        number: of this object in its process.
        device: the process's.
    """

    def __init__(self, place: int, number: int, device: torch.device) -> None:
        self._place, self._number, self._device = place, number, device
        self._kept: list[torch.Tensor] | None = None

    def begin(self) -> None:
        """Set generators aside, if they are not yet."""
        if self._kept is None:
            self._kept = [one.get_state() for one in torch_generators(self._device)]
            seed_torch(extended(torch.initial_seed(), self._place, self._number), self._device)

    def end(self) -> None:
        """Put them back, if they are set aside."""
        if self._kept is not None:
            kept, self._kept = self._kept, None
            for generator, state in zip(torch_generators(self._device), kept, strict=True):
                generator.set_state(state)

    def throughout(self, module: nn.Module) -> None:
        """Begin and end with each of a module's passes in training."""
        module.register_forward_pre_hook(lambda this, _: self.begin() if this.training else None)
        module.register_forward_hook(lambda *_: self.end(), always_call=True)


def torch_generators(device: torch.device) -> list[torch.Generator]:
    """PyTorch's own for the CPU, and the device's."""
    own = [torch.cuda.default_generators[device.index or 0]] if device.type == "cuda" else []
    return [torch.default_generator, *own]
