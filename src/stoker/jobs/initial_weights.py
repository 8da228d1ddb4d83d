"""Which weights a job's model starts from.

Putting the weights that a job starts from into its model; settings in `stoker.jobs.initial_weights`.
"""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import nn

from stoker.errors import BadJob, BadSetting

WeightsSource = str | os.PathLike[str] | Mapping[str, torch.Tensor]
"""A safetensors file, a folder of them, or tensors by name."""

_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


@dataclass(frozen=True, eq=False)
class Weights:
    """Weights that a model takes over before it is trained.

    Every parameter and buffer of the model has to be there, with its shape, but for those that stay `fresh`; and every
    tensor there has to be taken, but for those that are `unused`. What goes wrong is said with the names.

    Args:
        source: a safetensors file; a folder of them, such as a model's from the Hugging Face hub; or tensors by name,
            such as those of `stoker.load(RUN).weights()`.
        fresh: patterns of names in the model that keep the values they were made with, whatever the source has, such
            as `("classifier.*",)`.
        unused: patterns of names in the source that are left where they are, such as `("pooler.*",)`.
        prefix: taken off the names in the source, where they begin with it: `"bert."`.

    Raises:
        BadSetting: the source is a pickle, which runs code when it is opened; it, or a list of patterns, is something
            else.
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
    """What a job was given, as `Weights`; raises as that does."""
    return given if isinstance(given, Weights) else Weights(given)


_NAMED_AT_MOST = 4


def load_initial_weights(model: nn.Module, weights: Weights) -> None:
    """Copy `weights` into the parameters and buffers of `model`, in its own types.

    Raises:
        BadJob: the source cannot be read, or it and the model are not made for each other; with names and shapes.
    """
    given, state = _without_prefix(_tensors_of(weights.source), weights.prefix), model.state_dict(keep_vars=True)
    theirs = {name: tensor for name, tensor in given.items() if not _matches_any(name, weights.unused)}
    mine = {name: tensor for name, tensor in state.items() if not _matches_any(name, weights.fresh)}
    _require_patterns_match(weights.fresh, state, "fresh")
    _require_patterns_match(weights.unused, given, "unused")
    there = {id(tensor) for name, tensor in mine.items() if name in theirs}  # a tied one is stored under one name
    _require_none(
        [f"{name} {list(tensor.shape)}" for name, tensor in mine.items() if id(tensor) not in there],
        f"of {type(model).__name__} are not in its initial weights",
        "Name those that shall stay as they were made: stoker.Weights(…, fresh=(…,)).",
    )
    _require_none(
        [name for name in theirs if name not in state],
        f"in the initial weights have no place in {type(model).__name__}",
        "Name those that are not wanted: stoker.Weights(…, unused=(…,)); or a prefix to take off: prefix=….",
    )
    _require_none(
        [f"{name} {list(theirs[name].shape)} for {list(tensor.shape)}" for name, tensor in mine.items()
         if name in theirs and theirs[name].shape != tensor.shape],
        "in the initial weights are of another shape",
        "Give the model the sizes it was trained with, or keep those as they were made: fresh=(…,).",
    )  # fmt: skip
    taken = [name for name in mine if name in theirs]
    _require_equal_where_tied({name: mine[name] for name in taken}, theirs)
    with torch.no_grad():
        for name in taken:
            mine[name].copy_(theirs[name])


def _without_prefix(tensors: Mapping[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        short = name.removeprefix(prefix)
        if short in found:
            raise BadJob(f"the initial weights have both {prefix}{short} and {short}, one name without the prefix "
                         f"{prefix!r}", remedy="Give the one part's tensors alone: Job(init={…}).")  # fmt: skip
        found[short] = tensor
    return found


def _require_equal_where_tied(mine: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> None:
    """Refuse two different tensors for one: which of them it would be is chance."""
    first: dict[int, str] = {}
    for name, tensor in mine.items():
        other = first.setdefault(id(tensor), name)
        if not torch.equal(*(theirs[one].to(tensor.dtype) for one in (name, other))):
            raise BadJob(
                f"{other} and {name} are one tensor in the model, and two different ones in its initial weights",
                remedy=f"Leave one of them out, as by stoker.Weights(…, unused=({name!r},)), or untie the model.",
            )


def _tensors_of(source: Any) -> Mapping[str, torch.Tensor]:
    if isinstance(source, Mapping):
        if stray := [name for name, tensor in source.items() if not isinstance(tensor, torch.Tensor)]:
            raise BadJob(f"Job(init=…): {stray[0]!r} is a {type(source[stray[0]]).__name__}, wanted tensors by name")
        return source
    files = _files_of(Path(os.fspath(source)))
    found: dict[str, torch.Tensor] = {}
    for file in files:
        try:
            tensors = safetensors.torch.load_file(file)
        except (OSError, safetensors.SafetensorError) as error:
            raise BadJob(f"Job(init=…): {file} cannot be read as safetensors: {error}") from error
        if twice := sorted(found.keys() & tensors.keys()):
            raise BadJob(f"Job(init=…): {file} and another file beside it both hold {twice[0]}",
                         remedy="Give the file that is meant, not its folder.")  # fmt: skip
        found |= tensors
    return found


def _files_of(path: Path) -> list[Path]:
    """A file, or all files with weights in a folder: large models come in several."""
    if path.is_file():
        return [path]
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else []
    if not files:
        what = "has no safetensors file in it" if path.is_dir() else "is not there"
        raise BadJob(f"Job(init=…): {path} {what}", remedy="Give a .safetensors file, or a folder of them.")
    return files


def _matches_any(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _require_patterns_match(patterns: Sequence[str], names: Iterable[str], what: str) -> None:
    known = list(names)
    for pattern in patterns:
        if not fnmatch.filter(known, pattern):
            raise BadJob(f"Weights({what}=…): {pattern!r} matches none of {len(known)} names, such as {known[-1]!r}")


def _require_none(names: list[str], problem: str, remedy: str) -> None:
    if names:
        more = f" and {len(names) - _NAMED_AT_MOST} more" if len(names) > _NAMED_AT_MOST else ""
        raise BadJob(f"{', '.join(names[:_NAMED_AT_MOST])}{more} {problem}", remedy=remedy)
