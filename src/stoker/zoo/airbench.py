"""Airbench: a small convolutional network made to reach its accuracy in as few updates as possible.

Shapes: B images, C input channels, H height, W width, K classes; w_1, w_2, w_3 the widths; P = k*k*C values of a patch.
Layers: a frozen whitening of 2 × 2 patches (C → w_0 = 8*C channels) and GELU; then three times: 3 × 3 convolution
(w_{i-1} → w_i), pooling by 2, BatchNorm, GELU, 3 × 3 convolution (w_i → w_i), BatchNorm, GELU; maximum over the map; a
linear layer without bias, times 1/3. BatchNorm shifts, but does not scale.
Convolutions start as the identity on as many channels as they take.
Parameters, the 4*C*w_0 frozen ones and the w_i of each BatchNorm that stay 1 included:
4*C*w_0 + sum over i of (9*w_{i-1}*w_i + 9*w_i^2 + 4*w_i) + K*w_3.
FLOPs to train on one image, the convolutions and the linear layer alone, with A_0 = (H-1)*(W-1) pixels and A_i the map
after i poolings: 2*4*C*w_0*A_0 + 6*(9*sum(w_{i-1}*w_i*A_{i-1} + w_i^2*A_i) + K*w_3) - 18*w_0*w_1*A_0. A multiply and an
add count as two; forward once, backward once for the weights and once for the inputs, which the first one above the
frozen layer spares. BatchNorm couples the samples of a batch.

The whitening layer gives the principal components of the training images' patches, scaled to unit variance, and their
negatives. Neighbouring pixels are strongly correlated, its channels are not, so the layers above learn from the first
update on. `stoker.recipes.whitened(job)` computes its filters from the training data.

Source: K. Jordan, "94% on CIFAR-10 in 3.29 seconds on a single GPU" (2024), https://arxiv.org/abs/2404.00498; for
whitening its section 3.1, after D. Page, "How to train your ResNet" (2018), part 8. There the widths are 64, 256, 256,
the whitening layer has a bias that is trained for three epochs, and logits are 1/9 of the output layer's. Widths and
scale here suit 28 × 28 grey images and a few hundred updates; backward passes end above the whitening layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import nn

from stoker.errors import BadJob

_POOLINGS = 3
_STATISTICS_MOMENTUM = 0.4
"""Share of each batch in the running statistics: runs of a few hundred updates leave no time for PyTorch's 0.1."""

_LOGIT_SCALE = 1 / 3
"""Factor of the output layer's results: it keeps the first updates from overconfidence. 1/192 learned too slowly here:
91.6 % of validation images after two epochs, where 1/3 had 92.4 %.
"""


class Airbench(nn.Module):
    """x_BCHW to logits_BK; height and width at least 9. Train it with `recipe="fast"`, which fills its first layer.

    Args:
        widths: w_1, w_2, w_3, channels of the three groups.
        in_channels: C.
        classes: K.

    Raises:
        BadJob: a size is not positive, or there are not three widths.
    """

    def __init__(self, widths: Sequence[int] = (32, 96, 192), in_channels: int = 1, classes: int = 10) -> None:
        super().__init__()
        if len(widths) != _POOLINGS or min(*widths, in_channels, classes) < 1:
            raise BadJob(
                f"Airbench takes three widths and sizes >= 1, got widths {tuple(widths)}, "
                f"in_channels {in_channels} and classes {classes}"
            )
        self.whitening = Whitening(in_channels, kernel_size=2)
        self.groups = nn.Sequential(*(_Group(*pair) for pair in pairwise((self.whitening.out_channels, *widths))))
        self.head = nn.Linear(widths[-1], classes, bias=False)

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        """Logits [B, K] of images [B, C, H, W]."""
        features_BW = self.groups(F.gelu(self.whitening(x_BCHW))).amax((2, 3))
        logits_BK: torch.Tensor = self.head(features_BW)
        return logits_BK * _LOGIT_SCALE


class _Group(nn.Module):
    """Two convolutions, the first one's map halved."""

    def __init__(self, channels: int, out_channels: int) -> None:
        super().__init__()
        self.first, self.second = _convolution(channels, out_channels), _convolution(out_channels, out_channels)
        self.first_norm, self.second_norm = _norm(out_channels), _norm(out_channels)

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        x_BCHW = F.gelu(self.first_norm(F.max_pool2d(self.first(x_BCHW), 2)))
        return F.gelu(self.second_norm(self.second(x_BCHW)))


def _convolution(channels: int, out_channels: int) -> nn.Conv2d:
    convolution = nn.Conv2d(channels, out_channels, kernel_size=3, padding=1, bias=False)
    with torch.no_grad():
        nn.init.dirac_(convolution.weight[: min(channels, out_channels)])
    return convolution


def _norm(channels: int) -> nn.BatchNorm2d:
    norm = nn.BatchNorm2d(channels, momentum=_STATISTICS_MOMENTUM)
    norm.weight.requires_grad_(False)
    return norm


_GRID = 2.0**-16
"""Filters are rounded to multiples of this, so that they do not depend on how a machine rounds."""


class Whitening(nn.Conv2d):
    """x_BCHW to [B, 2*components, H', W']; frozen, and without a bias.

    Args:
        in_channels: C.
        kernel_size: k, height and width of a patch.
        components: number of principal components to keep, the strongest first; None keeps all C*k*k.
        padding: as of a convolution.
        eps: added to variances before the division; components weaker than this stay weak.

    Raises:
        BadJob: `components` exceeds C*k*k.
    """

    def __init__(
        self,
        in_channels: int = 1,
        kernel_size: int = 2,
        components: int | None = None,
        padding: int = 0,
        eps: float = 1e-2,
    ) -> None:
        most = in_channels * kernel_size**2
        components = most if components is None else components
        if not 1 <= components <= most:
            raise BadJob(
                f"patches of {in_channels} x {kernel_size} x {kernel_size} have 1 to {most} principal "
                f"components, got {components}"
            )
        super().__init__(in_channels, 2 * components, kernel_size, padding=padding, bias=False)
        self.weight.requires_grad_(False)
        self.components, self.eps, self.is_filled = components, eps, False

    def fill(self, filters: npt.NDArray[np.float64]) -> None:
        """Take over filters [components, C, k, k]; their negatives follow them."""
        both = np.concatenate([filters, -filters]).astype(np.float32)
        with torch.no_grad():
            self.weight.copy_(torch.tensor(both))
        self.is_filled = True

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        """The whitened patches."""
        if not self.is_filled:
            raise BadJob(
                "the model's Whitening layer has no filters: they are computed from the training data",
                remedy="Make the job with stoker.recipes.whitened(job), or with recipe='fast'.",
            )
        return super().forward(x_BCHW)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self.is_filled = True  # saved weights are those of a layer that was used


def whitening_filters(images_BCHW: npt.NDArray[Any], layer: Whitening) -> npt.NDArray[np.float64]:
    """The whitening filters [components, C, k, k] of these images' patches, strongest first.

    Patches are not centred: where the mean is not 0, it is a component like others.

    Raises:
        BadJob: the images have another number of channels, or are smaller than a patch.
    """
    B, C, H, W = images_BCHW.shape
    k = layer.kernel_size[0]
    if layer.in_channels != C or min(H, W) < k or not B:
        raise BadJob(
            f"the Whitening layer takes {layer.in_channels} channels of at least {k} x {k} pixels, "
            f"the training images are {B} of [{C}, {H}, {W}]"
        )
    images = images_BCHW.astype(np.float64)
    # Row p of `pixels` is pixel p of every patch: its shifted view of all images.
    pixels = [
        images[:, c, i : H - k + 1 + i, j : W - k + 1 + j].ravel() for c in range(C) for i in range(k) for j in range(k)
    ]
    covariance_PP = np.array([[float(row @ column) for column in pixels] for row in pixels]) / pixels[0].size
    variances_P, vectors_PP = np.linalg.eigh(covariance_PP)
    chosen = slice(None, -layer.components - 1, -1)
    filters = (vectors_PP / np.sqrt(np.maximum(variances_P, 0) + layer.eps)).T[chosen]
    # The sign of an eigenvector is arbitrary: the largest entry is made positive.
    largest = np.take_along_axis(filters, np.abs(filters).argmax(1, keepdims=True), 1)
    rounded: npt.NDArray[np.float64] = np.round(filters * np.sign(largest) / _GRID) * _GRID
    return rounded.reshape(-1, C, k, k)
