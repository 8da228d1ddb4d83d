"""Whether a model may be given a part of each sample's tokens: followed by shapes on the meta device, call by call.

A model that sees 1/P of the tokens makes the same calls of PyTorch's functions as one that sees all of them, and every
tensor either has the same shape or one dimension that is 1/P as long. What is refused is a call whose shapes say that
tokens meet in it (a sum over the sequence, a pair of each token with each), one that is known to mix neighbours (a
convolution, a cumulative sum), and anything that depends on the number of tokens in another way. Attention by
`scaled_dot_product_attention` is exchanged between processes. Positions are calls that count tokens from 0:
`arange(T)`, and `table[:T]` of a tensor without tokens; they are known by their place in the model's code.

Not seen by shapes: a function that keeps shapes and mixes tokens all the same. `stepping/layouts/context.py` therefore
compares values of short samples too, before the first update.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from stoker.errors import first_line
from stoker.loading.fields import Content, map_tensors, tensors_of
from stoker.stepping.kept_inputs import in_new_containers
from stoker.stepping.model import on_meta

TOKENS = 1
"""The dimension of tokens in a batch: entries are [B, T, ...]."""

Site = tuple[CodeType, int]
"""A call in the model's code: the function's code and the instruction."""

ATTENTION = functional.scaled_dot_product_attention
_SLICE, _NARROWS = torch.Tensor.__getitem__, (torch.Tensor.narrow, torch.narrow)

_MIXES = frozenset(
    [
        "conv1d",
        "conv2d",
        "conv3d",
        "conv_transpose1d",
        "conv_transpose2d",
        "conv_tbc",
        "cumsum",
        "cumsum_",
        "cumprod",
        "cummax",
        "cummin",
        "logcumsumexp",
        "flip",
        "fliplr",
        "flipud",
        "roll",
        "diff",
        "gru",
        "lstm",
        "rnn_tanh",
        "rnn_relu",
        "batch_norm",
        "group_norm",
        "instance_norm",
        "interpolate",
        "unfold",
        "avg_pool1d",
        "max_pool1d",
        "adaptive_avg_pool1d",
        "adaptive_max_pool1d",
        "max_pool1d_with_indices",
        "sort",
        "argsort",
    ]
)
"""Functions that keep the number of tokens, or a share of it, and mix them."""
_DRAWS = frozenset(
    [
        "rand",
        "randn",
        "randint",
        "randperm",
        "bernoulli",
        "bernoulli_",
        "normal",
        "normal_",
        "uniform_",
        "exponential_",
        "rand_like",
        "randn_like",
        "dropout",
        "alpha_dropout",
        "multinomial",
    ]
)
_DRAWS_OF_CHANNELS = frozenset(["dropout1d", "dropout2d", "dropout3d", "feature_dropout", "feature_alpha_dropout"])
_CONSTANTS = frozenset(
    [
        "zeros",
        "ones",
        "empty",
        "full",
        "new_zeros",
        "new_ones",
        "new_empty",
        "new_full",
        "new_tensor",
        "tensor",
        "as_tensor",
    ]
)
_UNSET = frozenset(["empty", "empty_like", "new_empty"])
"""Functions whose result has no values yet."""


@dataclass(frozen=True)
class Call:
    """A call of a function of PyTorch that gives tensors: its name, module, shapes, place, and arguments if a position.

    `is_known`: of positions alone, whose values are known. `numbers` are the fractions among its arguments, and what it
    finds out of positions as one number.
    """

    name: str
    module: str
    inputs: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...]
    site: Site | None = None
    arguments: tuple[Any, ...] = ()
    is_attention: bool = False
    has_mask: bool = False
    is_known: bool = False
    numbers: tuple[float, ...] = ()

    @property
    def in_words(self) -> str:
        """`conv1d in Conv1d 'blocks.0.mix'`."""
        return f"{self.name} in {self.module}" if self.module else self.name


@dataclass
class Positions:
    """The calls that count tokens, and the part of each sample that is here: part number `part` of `length` tokens."""

    sites: frozenset[Site] = frozenset()
    part: int = 0
    length: int = 0

    def shifted(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call that counts this part's tokens, so that it counts from the part's first token."""
        offset = self.part * self.length
        if func is torch.arange:
            start, end = _bounds(args, kwargs)
            named = {key: value for key, value in kwargs.items() if key not in ("start", "end")}
            return (start + offset, end + offset), named
        if func in _NARROWS:
            tensor, dim, start, length = _named(args, kwargs, ("input", "dim", "start", "length"))
            return (tensor, dim, start + offset, length), {}
        tensor, index = args
        moved = [
            slice(offset, offset + self.length) if _counts(one, self.length) else one
            for one in (index if isinstance(index, tuple) else (index,))
        ]
        return (tensor, tuple(moved)), kwargs


Recorder = Callable[[str, str, Any], None]
"""Is given a call's name, its module, and its result."""


@dataclass
class Modules:
    """The modules whose forward passes are under way, as text."""

    stack: list[str] = field(default_factory=list)

    @property
    def innermost(self) -> str:
        """`Conv1d 'blocks.0.mix'`; empty outside of all."""
        return self.stack[-1] if self.stack else ""

    @contextlib.contextmanager
    def followed(self, model: nn.Module) -> Iterator[Modules]:
        """Within the block the modules of `model` are followed."""

        def entering(words: str) -> Callable[..., None]:
            return lambda *_: self.stack.append(words)

        handles = []
        for name, module in model.named_modules():
            words = f"{type(module).__name__} {name!r}" if name else type(module).__name__
            handles.append(module.register_forward_pre_hook(entering(words)))
            handles.append(module.register_forward_hook(lambda *_: self.stack.pop() and None, always_call=True))
        try:
            yield self
        finally:
            self.stack.clear()
            for handle in handles:
                handle.remove()


class _Calls(TorchFunctionMode):
    """Records calls, on tensors without values; those of `arange` alone have values, which a model may read."""

    def __init__(self, modules: Modules) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self._modules = modules

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.arange:
            kwargs["device"] = "cpu"
        given = tensors_of((args, kwargs))
        is_known = func is torch.arange or (bool(given) and all(tensor.device.type == "cpu" for tensor in given))
        if given and not is_known:
            args, kwargs = _without_values(args), _without_values(kwargs)
        result = func(*args, **kwargs)
        outputs = shapes_in(result)
        if outputs:
            is_position = is_counting(func)
            self.calls.append(
                Call(
                    name_of(func),
                    self._modules.innermost,
                    shapes_in((args, tuple(kwargs.values()))),
                    outputs,
                    site_of(sys._getframe(1)) if is_position else None,  # noqa: SLF001 - the only way to the caller
                    _numbers(func, args, kwargs) if is_position else (),
                    is_attention=func is ATTENTION,
                    is_known=is_known,
                    numbers=_fractions((args, tuple(kwargs.values()))) + (_only_number(result) if is_known else ()),
                    has_mask=func is ATTENTION
                    and _named(args, kwargs, ("query", "key", "value", "attn_mask"))[3] is not None,
                )
            )
        return result


class TokenFollower:
    """Follows passes of a model on batches of fewer tokens, each once for all numbers of processes.

    Args:
        call: calls the model with a batch.
        model: it is copied to the meta device.
        content: a batch, of which shapes and dtypes are used.
    """

    def __init__(self, call: Callable[[nn.Module, Content], Any], model: nn.Module, content: Content) -> None:
        self._call, self._outline, self._content = call, on_meta(model), content
        self._passes: dict[int, list[Call] | Exception] = {}

    def sites(self, parts: int) -> frozenset[Site] | str:
        """The calls of the model that count tokens; or, as text, why it cannot be given a part of each sample's tokens.

        Args:
            parts: the number of processes that divide the tokens of each sample [1].
        """
        length = num_tokens(self._content)
        if isinstance(length, str):
            return length
        if length % (2 * parts):
            return (
                f"samples have {length} tokens, which {parts} processes do not divide into two equal parts each: "
                f"a multiple of {2 * parts} can be divided"
            )
        short = min(length, shortest(parts))
        runs: list[list[Call]] = []
        for tokens in dict.fromkeys((length, length // parts, short, short // parts)):
            calls = self._calls(tokens)
            if isinstance(calls, Exception):
                what = "its values are read" if tokens == length else f"it does not take {tokens} tokens"
                return (
                    f"{type(self._outline).__name__} cannot be followed on {tokens} of {length} tokens, {what}: "
                    f"{type(calls).__name__}: {first_line(calls)}"
                )
            runs.append(calls)
        whole, part = runs[0], runs[1]
        for other in runs[1:]:
            if (problem := _differing(whole, other, length)) is not None:
                return problem
        return _sites(whole, part, length, parts)

    def _calls(self, tokens: int) -> list[Call] | Exception:
        """The calls of a pass of two samples of so many tokens, or what the model raises."""
        if tokens not in self._passes:
            try:
                self._passes[tokens] = _calls(self._call, self._outline, self._content, tokens)
            except Exception as error:  # noqa: BLE001 - whatever the model raises on tensors without values
                self._passes[tokens] = error.with_traceback(None)
        return self._passes[tokens]


def shortest(parts: int) -> int:
    """Number of tokens of samples whose values are compared [1]."""
    return 4 * parts


def num_tokens(content: Content) -> int | str:
    """Number of tokens of each sample of a batch [1]; or why it cannot be divided, as text."""
    shapes = shapes_in(content)
    lengths = {shape[TOKENS] if len(shape) > TOKENS else 0 for shape in shapes}
    if len(lengths) != 1 or 0 in lengths:
        texts = ", ".join(str(list(shape)) for shape in shapes) or "none"
        return f"each entry of a batch, the target too, has the same tokens in dimension {TOKENS}; they are {texts}"
    return lengths.pop()


def _calls(call: Callable[[nn.Module, Content], Any], outline: nn.Module, content: Content, tokens: int) -> list[Call]:
    """The calls of a pass of two samples of so many tokens."""

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty(2, tokens, *tensor.shape[2:], dtype=tensor.dtype, device="meta")

    given, modules = map_tensors(content, fake), Modules()
    recorder = _Calls(modules)
    with torch.no_grad(), modules.followed(outline), recorder:
        call(outline, given)
    return recorder.calls


def _differing(whole: Sequence[Call], other: Sequence[Call], length: int) -> str | None:
    """Why a model does something else with another number of tokens; None if it does the same."""
    for one, two in zip(whole, other, strict=False):
        if (one.name, one.module, len(one.inputs), len(one.outputs)) != (
            two.name,
            two.module,
            len(two.inputs),
            len(two.outputs),
        ):
            return (
                f"the model does not do the same with each number of tokens: {one.in_words} with {length}, "
                f"{two.in_words} with fewer"
            )
    if len(whole) != len(other):
        longer = max(whole, other, key=len)
        return (
            f"the model makes {len(whole)} calls with {length} tokens and {len(other)} with fewer, as loops over "
            f"tokens do: {longer[min(len(whole), len(other))].in_words}"
        )
    return None


def _sites(whole: Sequence[Call], part: Sequence[Call], length: int, parts: int) -> frozenset[Site] | str:
    counting: set[Site] = set()
    others: set[Site] = set()
    for one, two in zip(whole, part, strict=True):
        problem = _problem(one, two, length, parts)
        if problem is not None:
            return f"{one.in_words} {problem}"
        if one.site is not None:
            is_position = _is_position(one, two, length, parts)
            (counting if is_position else others).add(one.site)
            if not is_position and not _has_tokens(one.inputs, two.inputs) and _has_tokens(one.outputs, two.outputs):
                return f"{one.in_words} makes values for each token that do not count from 0"
    if both := counting & others:
        code, _ = next(iter(both))
        return f"{code.co_name} (line {code.co_firstlineno} of {code.co_filename}) counts tokens, and other things too"
    return frozenset(counting)


def _problem(one: Call, two: Call, length: int, parts: int) -> str | None:
    """Why a call cannot be made of a part of the tokens, as the end of a sentence; None if it may be."""
    if one.numbers != two.numbers:
        return f"is given numbers that depend on how many tokens there are: {one.numbers} and {two.numbers}"
    if one.is_known and two.is_known:  # of few tokens, their values are compared
        return None
    if one.name in _MIXES:
        return "mixes tokens with those next to them"
    if one.name in _DRAWS_OF_CHANNELS:
        return "drops values of a sample's tokens together"
    shapes = (*zip(one.inputs, two.inputs, strict=True), *zip(one.outputs, two.outputs, strict=True))
    for before, after in shapes:
        if len(before) != len(after) or any(a not in (b, b * parts) for a, b in zip(before, after, strict=True)):
            return f"has {list(before)} elements with {length} tokens, and {list(after)} with 1 / {parts} of them"
    if one.is_attention:
        return _attention_problem(one, two, length, parts)
    if any(_num_of_tokens(a, b) > 1 for a, b in zip(one.outputs, two.outputs, strict=True)):
        return "pairs each token with each, as attention by products does: use scaled_dot_product_attention"
    has_tokens, gives_tokens = _has_tokens(one.inputs, two.inputs), _has_tokens(one.outputs, two.outputs)
    if one.name in _DRAWS:
        is_shared = "draws once for all tokens of a sample, and each part would have a draw of its own"
        return None if gives_tokens else is_shared
    if has_tokens and not gives_tokens and one.name not in _CONSTANTS:
        return "takes tokens together: its result has no dimension of tokens"
    is_made = not has_tokens and gives_tokens and one.site is None
    if is_made and one.name not in _CONSTANTS and not one.name.startswith("expand"):
        return "makes values for each token"
    return None


def _attention_problem(one: Call, two: Call, length: int, parts: int) -> str | None:
    queries, keys = ((before[-2], after[-2]) for before, after in zip(one.inputs[:2], two.inputs[:2], strict=True))
    if one.has_mask:
        return "has a mask of its own: only causal attention (is_causal) and attention to all tokens are divided"
    if not (queries == keys == (length, length // parts)):
        return f"attends from {queries[0]} to {keys[0]} places, where samples have {length} tokens"
    return None


def _is_position(one: Call, two: Call, length: int, parts: int) -> bool:
    """Whether a call counts tokens from 0: the same of a part, but for the number."""
    if _has_tokens(one.inputs, two.inputs) or len(one.arguments) != len(two.arguments):
        return False
    pairs = [(a, b) for a, b in zip(one.arguments, two.arguments, strict=True) if a != b]
    return bool(pairs) and all(a == (0, length) and b == (0, length // parts) for a, b in pairs)


def _has_tokens(one: Sequence[tuple[int, ...]], two: Sequence[tuple[int, ...]]) -> bool:
    return any(_num_of_tokens(a, b) for a, b in zip(one, two, strict=True))


def _num_of_tokens(one: tuple[int, ...], two: tuple[int, ...]) -> int:
    """Number of dimensions that grow with the number of tokens."""
    return sum(a != b for a, b in zip(one, two, strict=True))


def is_counting(func: Any) -> bool:
    """Whether a function can count tokens."""
    return func is torch.arange or func is _SLICE or func in _NARROWS


def name_of(func: Any) -> str:
    """A function's name."""
    return str(getattr(func, "__name__", func))


def site_of(frame: Any) -> Site:
    """The call that a frame is at."""
    return frame.f_code, frame.f_lasti


def has_values(name: str) -> bool:
    """Whether the result of a function of that name has values."""
    return name not in _UNSET


def _without_values(value: Any) -> Any:
    """A call's arguments on the meta device."""
    return in_new_containers(value, lambda tensor: tensor.to("meta"))


def _fractions(value: Any) -> tuple[float, ...]:
    """The fractions among a call's arguments, in order."""
    if isinstance(value, float):
        return (value,)
    return tuple(number for item in value for number in _fractions(item)) if type(value) in (tuple, list) else ()


def _only_number(result: Any) -> tuple[float, ...]:
    """The number that a result is; none if it is several."""
    is_one = isinstance(result, torch.Tensor) and not result.is_meta and result.numel() == 1
    return (float(result),) if is_one else ()


def shapes_in(value: Any) -> tuple[tuple[int, ...], ...]:
    """Shapes of the tensors in a value, in order."""
    return tuple(tuple(tensor.shape) for tensor in tensors_of(value))


def _numbers(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """What a call counts, as (first, number) for each dimension it does, and other things as they are."""
    if func is torch.arange:
        start, end = _bounds(args, kwargs)
        step = kwargs.get("step", args[2] if len(args) > 2 else 1)
        return ((start, end), step)
    if func in _NARROWS:
        _, dim, start, length = _named(args, kwargs, ("input", "dim", "start", "length"))
        return (dim, (start, length))
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    return tuple(
        (one.start or 0, one.stop) if isinstance(one, slice) and one.step in (None, 1) else str(type(one))
        for one in index
    )


def _counts(index: Any, length: int) -> bool:
    return isinstance(index, slice) and not index.start and index.stop == length and index.step in (None, 1)


def _bounds(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Start and end of an `arange`."""
    if "end" in kwargs:
        return kwargs.get("start", args[0] if args else 0), kwargs["end"]
    return (kwargs.get("start", 0), args[0]) if len(args) == 1 else (args[0], args[1])


def _named(args: tuple[Any, ...], kwargs: dict[str, Any], names: Sequence[str]) -> list[Any]:
    """Arguments by their names, None where one is not given."""
    return [args[place] if place < len(args) else kwargs.get(name) for place, name in enumerate(names)]
