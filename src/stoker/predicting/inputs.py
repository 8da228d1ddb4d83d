"""What one row has to hold for each input of a model."""

from __future__ import annotations

import math
from dataclasses import dataclass

from stoker.records import BATCH, Datatype, DynamicDim, Manifest, TensorSpec

_CHANNELS = (1, 3)


@dataclass(frozen=True)
class ImageShape:
    """An input that images fit: channels, and the size where it is fixed [pixels]."""

    channels: int
    height: int | None
    width: int | None
    channels_last: bool
    has_channel_dim: bool


@dataclass(frozen=True)
class Input:
    """An input as one row fills it: its shape without the batch; named dimensions lie within `dims`."""

    name: str
    datatype: Datatype
    shape: tuple[int | str, ...]
    pad: float | None
    dims: tuple[DynamicDim, ...] = ()

    @property
    def count(self) -> int | None:
        """Elements of a row; None where rows may differ."""
        sizes = [size for size in self.shape if isinstance(size, int)]
        return math.prod(sizes) if len(sizes) == len(self.shape) else None

    @property
    def image(self) -> ImageShape | None:
        """How an image fits, None where it does not, or where it could be taken in two ways."""
        if len(self.shape) == 2:
            return ImageShape(1, _fixed(self.shape[0]), _fixed(self.shape[1]), False, False)
        if len(self.shape) != 3 or (self.shape[0] in _CHANNELS) == (self.shape[2] in _CHANNELS):
            return None
        if self.shape[0] in _CHANNELS:
            channels, height, width = self.shape
        else:
            height, width, channels = self.shape
        is_last = self.shape[0] not in _CHANNELS
        return ImageShape(int(channels), _fixed(height), _fixed(width), is_last, True)

    def __str__(self) -> str:
        """For messages: `image FP32 [1, 28, 28]`."""
        return f"{self.name} {self.datatype} [{', '.join(map(str, self.shape))}]"


def inputs_of(manifest: Manifest) -> tuple[Input, ...]:
    """The inputs of a model, as rows fill them."""
    return tuple(_input_of(spec, manifest) for spec in manifest.inputs)


def sample_shape(spec: TensorSpec, manifest: Manifest) -> tuple[int | str, ...]:
    """The shape of what belongs to one row."""
    return spec.shape[1:] if manifest.is_batched else spec.shape


def most_rows(manifest: Manifest) -> int | None:
    """The largest batch that the model takes; None without a limit."""
    if not manifest.is_batched:
        return 1
    return next((dim.high for dim in manifest.dims if dim.name == BATCH), None)


def _input_of(spec: TensorSpec, manifest: Manifest) -> Input:
    shape = sample_shape(spec, manifest)
    dims = tuple(dim for dim in manifest.dims if dim.name in shape)
    return Input(spec.name, spec.datatype, shape, spec.pad, dims)


def _fixed(size: int | str) -> int | None:
    return size if isinstance(size, int) else None
