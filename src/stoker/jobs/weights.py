"""Which weights a job's model starts from."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from stoker.errors import BadSetting

if TYPE_CHECKING:
    import torch

Source = str | os.PathLike[str] | Mapping[str, "torch.Tensor"]
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

    source: Source
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


def weights_of(given: Weights | Source) -> Weights:
    """What a job was given, as `Weights`; raises as that does."""
    return given if isinstance(given, Weights) else Weights(given)
