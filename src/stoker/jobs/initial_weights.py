"""The weights that a job's model starts from: the setting, and loading them into the model."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stoker.errors import BadJob, BadSetting

if TYPE_CHECKING:
    import torch
    from torch import nn

WeightsSource = str | os.PathLike[str] | Mapping[str, "torch.Tensor"]
"""A safetensors file, a folder of them, or tensors by name."""

_MOST_NAMED = 4
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


@dataclass(frozen=True, eq=False)
class Weights:
    """Weights that are loaded into a model before training.

    The source must have every parameter and buffer of the model, with its shape, except those that stay `fresh`; and
    the model must take every tensor of the source, except `unused` ones.

    Args:
        source: a safetensors file; a folder of them, such as a model's from the Hugging Face hub; or tensors by name,
            such as those of `stoker.load(RUN).weights()`.
        fresh: patterns of names in the model that keep their own initial values, such as `("classifier.*",)`.
        unused: patterns of names in the source that are not loaded, such as `("pooler.*",)`.
        prefix: removed from names in the source that begin with it: `"bert."`.

    Raises:
        BadSetting: the source is a pickle, which may run code when it is opened; or a setting has the wrong type.
    """

    source: WeightsSource
    fresh: Sequence[str] = ()
    unused: Sequence[str] = ()
    prefix: str = ""

    def __post_init__(self) -> None:
        source: object = self.source
        if not isinstance(source, str | os.PathLike | Mapping):
            raise BadSetting(
                f"wanted a safetensors file, a folder of them or tensors by name, got {type(source).__name__}"
            )
        if not isinstance(source, Mapping) and Path(source).suffix in _PICKLES:
            raise BadSetting(
                f"{Path(source).name} is a pickle, which may run code when it is opened; write its tensors once with "
                "safetensors.torch.save_file(torch.load(path, weights_only=True), 'weights.safetensors')"
            )
        for name in ("fresh", "unused"):
            patterns: object = getattr(self, name)
            if isinstance(patterns, str) or not isinstance(patterns, Sequence):
                raise BadSetting(f"{name} is a list of patterns, got {patterns!r}")


def as_weights(given: Weights | WeightsSource) -> Weights:
    """A job's `init` as `Weights`; raises as that does."""
    return given if isinstance(given, Weights) else Weights(given)


def load_initial_weights(model: nn.Module, weights: Weights) -> None:
    """Copy `weights` into the parameters and buffers of `model`, in its own dtypes.

    Raises:
        BadJob: the source cannot be read, or does not match the model; with names and shapes.
    """
    import torch  # noqa: PLC0415 - a job's settings are imported without torch

    source = _without_prefix(_tensors_of(weights.source), weights.prefix)
    state = model.state_dict(keep_vars=True)
    stored = {name: tensor for name, tensor in source.items() if not _matches_any(name, weights.unused)}
    own = {name: tensor for name, tensor in state.items() if not _matches_any(name, weights.fresh)}
    _require_patterns_match(weights.fresh, state, "fresh")
    _require_patterns_match(weights.unused, source, "unused")
    present = {id(tensor) for name, tensor in own.items() if name in stored}  # a tied tensor is stored under one name
    _require_none(
        [f"{name} {list(tensor.shape)}" for name, tensor in own.items() if id(tensor) not in present],
        f"of {type(model).__name__} are not in its initial weights",
        "Name those that shall stay as they were made: stoker.Weights(…, fresh=(…,)).",
    )
    _require_none(
        [name for name in stored if name not in state],
        f"in the initial weights have no place in {type(model).__name__}",
        "Name those that are not wanted: stoker.Weights(…, unused=(…,)); or a prefix to take off: prefix=….",
    )
    pairs = {name: (tensor, stored[name]) for name, tensor in own.items() if name in stored}
    _require_none(
        [f"{name} {list(b.shape)} for {list(a.shape)}" for name, (a, b) in pairs.items() if a.shape != b.shape],
        "in the initial weights are of another shape",
        "Give the model the sizes it was trained with, or keep those as they were made: fresh=(…,).",
    )
    first: dict[int, str] = {}
    for name, (tensor, value) in pairs.items():
        other = first.setdefault(id(tensor), name)
        if not torch.equal(value.to(tensor.dtype), stored[other].to(tensor.dtype)):
            raise BadJob(
                f"{other} and {name} are one tensor in the model, and two different ones in its initial weights",
                remedy=f"Leave one of them out, as by stoker.Weights(…, unused=({name!r},)), or untie the model.",
            )
    with torch.no_grad():
        for tensor, value in pairs.values():
            tensor.copy_(value)


def _without_prefix(tensors: Mapping[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    renamed: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        short = name.removeprefix(prefix)
        if short in renamed:
            raise BadJob(
                f"the initial weights have both {prefix}{short} and {short}, one name without the prefix {prefix!r}",
                remedy="Give the one part's tensors alone: Job(init={…}).",
            )
        renamed[short] = tensor
    return renamed


def _tensors_of(source: Any) -> Mapping[str, torch.Tensor]:
    import safetensors.torch  # noqa: PLC0415 - a job's settings are imported without torch
    import torch  # noqa: PLC0415 - likewise

    if isinstance(source, Mapping):
        if stray := [name for name, tensor in source.items() if not isinstance(tensor, torch.Tensor)]:
            raise BadJob(f"Job(init=…): {stray[0]!r} is a {type(source[stray[0]]).__name__}, wanted tensors by name")
        return source
    path = Path(os.fspath(source))
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))  # large models come in several
    if not files:
        problem = "has no safetensors file in it" if path.is_dir() else "is not there"
        raise BadJob(f"Job(init=…): {path} {problem}", remedy="Give a .safetensors file, or a folder of them.")
    loaded: dict[str, torch.Tensor] = {}
    for file in files:
        try:
            tensors = safetensors.torch.load_file(file)
        except (OSError, safetensors.SafetensorError) as error:
            raise BadJob(f"Job(init=…): {file} cannot be read as safetensors: {error}") from error
        if twice := sorted(loaded.keys() & tensors.keys()):
            raise BadJob(
                f"Job(init=…): {file} and another file in its folder both contain {twice[0]}",
                remedy="Give the file, not its folder.",
            )
        loaded |= tensors
    return loaded


def _matches_any(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _require_patterns_match(patterns: Sequence[str], names: Iterable[str], what: str) -> None:
    known = list(names)
    for pattern in patterns:
        if not fnmatch.filter(known, pattern):
            raise BadJob(f"Weights({what}=…): {pattern!r} matches none of {len(known)} names, such as {known[-1]!r}")


def _require_none(names: list[str], problem: str, remedy: str) -> None:
    if names:
        more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
        raise BadJob(f"{', '.join(names[:_MOST_NAMED])}{more} {problem}", remedy=remedy)
