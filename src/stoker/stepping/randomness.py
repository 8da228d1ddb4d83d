"""Random draws inside a model or a loss: seen operation by operation, and silenced for proofs.

What: PyTorch's dispatcher names every operation that draws from a seeded generator; here those are noted, and where
asked for replaced by what they draw on average (a Bernoulli draw by its probability, so that dropout drops nothing).
Use when: ways of cutting a batch are compared with each other. Costs: 5 to 10 µs an operation.
Does not combine with: draws from Python's `random` or NumPy, which pass unseen; operations that `_AVERAGES` lacks.
Source: https://docs.pytorch.org/docs/stable/notes/extending.html, "Extending all torch API with modes". The class lies
in a private module: where it is gone nothing is seen or silenced, and proofs say that the model draws at random.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Collection
from typing import Any

import torch

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
