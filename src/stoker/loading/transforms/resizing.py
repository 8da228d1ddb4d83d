"""Progressive resizing: training begins with small images and ends with whole ones.

What: images are resized by a factor that grows with the share of the run's samples that are done: `initial_scale` at
first, then up in a line, then 1. Evaluation sees whole images.
Use when: a convolutional network, or one that takes images of any size, is trained from scratch.
Costs: the forward and backward pass takes time in proportion to the pixels; a captured plan is not possible, and a
compiled one is compiled for each size. Fine detail is learned late.
Does not combine with: models of one image size (a linear layer over all positions); targets that are images, unless the
loss scales outputs to them.
Sources: Howard 2018, fast.ai's DAWNBench entry, https://www.fast.ai/posts/2018-04-30-dawnbench-fastai.html; terms and
schedule as in MosaicML Composer's ProgressiveResizing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from stoker.errors import BadSetting
from stoker.jobs.numeric_settings import is_number, require_size
from stoker.loading.transforms.base import Draw, as_numbers, require_images, stored


@dataclass(frozen=True)
class ProgressiveResizing:
    """Resize images to a part of their height and width that grows over the run; bilinear, smoothed.

    Put it last in `Job(augment=…)`: the transforms before it then see whole images.

    Args:
        initial_scale: factor of height and width at first.
        delay_fraction: share of the run's samples before the images begin to grow.
        finetune_fraction: share of the run's samples at the end that are whole.
        size_increment: smaller sides are rounded to a multiple of this [pixels].

    Raises:
        BadSetting: a share is out of range, or both fractions are more than the run.

    >>> resizing = ProgressiveResizing(initial_scale=0.5)
    >>> [resizing.side(32, progress) for progress in (0, 0.5, 0.65, 0.8, 1)]
    [16, 16, 24, 32, 32]
    """

    initial_scale: float = 0.5
    delay_fraction: float = 0.5
    finetune_fraction: float = 0.2
    size_increment: int = 4

    def __post_init__(self) -> None:
        if not (is_number(self.initial_scale) and 0 < self.initial_scale <= 1):
            raise BadSetting(f"initial_scale is a factor of height and width, in (0, 1], got {self.initial_scale!r}")
        fractions = self.delay_fraction, self.finetune_fraction
        if not (all(is_number(fraction) and fraction >= 0 for fraction in fractions) and sum(fractions) <= 1):
            raise BadSetting(
                "delay_fraction and finetune_fraction are shares of the run, 0 or more and together at most 1, got "
                f"{self.delay_fraction!r} and {self.finetune_fraction!r}"
            )
        require_size("size_increment", "what smaller sides are a multiple of", self.size_increment)

    def scale(self, progress: float) -> float:
        """The factor of height and width when the share `progress` of the run's samples is done."""
        if progress >= 1 - self.finetune_fraction:
            return 1.0
        if progress <= self.delay_fraction:
            return self.initial_scale
        growing = (progress - self.delay_fraction) / (1 - self.delay_fraction - self.finetune_fraction)
        return self.initial_scale + (1 - self.initial_scale) * growing

    def side(self, whole: int, progress: float) -> int:
        """The length of a side that is `whole` pixels long in the data [pixels]."""
        scale = self.scale(progress)
        increments = max(1, round(whole * scale / self.size_increment))
        return whole if scale == 1 else min(whole, increments * self.size_increment)

    def __call__(self, x_BCHW: torch.Tensor, draw: Draw) -> torch.Tensor:
        """The images, smaller while the run is young."""
        require_images(x_BCHW, "ProgressiveResizing")
        size = tuple(self.side(whole, draw.progress) for whole in x_BCHW.shape[2:])
        if size == x_BCHW.shape[2:]:
            return x_BCHW
        numbers = as_numbers(x_BCHW, "ProgressiveResizing").contiguous()
        return stored(F.interpolate(numbers, size=size, mode="bilinear", antialias=True), x_BCHW.dtype)

    def relative_cost(self) -> float:
        """Mean number of pixels over the run, as a share of whole images'; sides are not rounded."""
        ramp = 1 - self.delay_fraction - self.finetune_fraction
        low = self.initial_scale
        return self.delay_fraction * low**2 + ramp * (1 + low + low**2) / 3 + self.finetune_fraction
