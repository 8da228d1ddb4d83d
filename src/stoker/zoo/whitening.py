"""A frozen first layer that whitens patches of images.

What: the principal components of the training images' patches, each scaled to unit variance, and their negatives.
Neighbouring pixels are nearly alike; after this layer channels are uncorrelated, and the layers above learn from the
first update on.
Use when: training from scratch, for few epochs. The filters have to be computed from the training data:
`stoker.recipes.whitened(job)` does that; before that the layer refuses to be used.
Costs: nothing; no gradient is computed for the layer or for what is below it.

Source: K. Jordan, "94% on CIFAR-10 in 3.29 seconds on a single GPU" (2024), https://arxiv.org/abs/2404.00498, section
3.1, after D. Page, "How to train your ResNet" (2018), part 8. There the bias is trained for the first epochs; here it
is left out, so that backward passes end above this layer.
Shapes: B images, C channels, H height, W width; P = C*k*k numbers in a patch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from stoker.errors import BadJob

_GRID = 2.0**-16
"""Filters are rounded to multiples of this, so that they do not depend on how a machine rounds."""


class Whitening(nn.Conv2d):
    """x_BCHW to [B, 2*components, H', W']; frozen, and without a bias.

    Args:
        in_channels: C.
        kernel_size: k, height and width of a patch.
        components: how many principal components to keep, the strongest first; None keeps all C*k*k.
        padding: as of a convolution.
        eps: added to variances before they are divided by: components weaker than this are left weak.

    Raises:
        BadJob: there are not so many components.
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
            raise BadJob(f"patches of {in_channels} x {kernel_size} x {kernel_size} have 1 to {most} principal "
                         f"components, got {components}")  # fmt: skip
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
        raise BadJob(f"the Whitening layer takes {layer.in_channels} channels of at least {k} x {k} pixels, "
                     f"the training images are {B} of [{C}, {H}, {W}]")  # fmt: skip
    images = images_BCHW.astype(np.float64)
    # Row p of `pixels` is pixel p of every patch: its shifted view of all images.
    pixels = [images[:, c, i : H - k + 1 + i, j : W - k + 1 + j].ravel()
              for c in range(C) for i in range(k) for j in range(k)]  # fmt: skip
    covariance_PP = np.array([[float(one @ other) for other in pixels] for one in pixels]) / pixels[0].size
    variances_P, vectors_PP = np.linalg.eigh(covariance_PP)
    chosen = slice(None, -layer.components - 1, -1)
    filters = (vectors_PP / np.sqrt(np.maximum(variances_P, 0) + layer.eps)).T[chosen]
    # An eigenvector's sign is anybody's choice: the largest entry is made positive.
    largest = np.take_along_axis(filters, np.abs(filters).argmax(1, keepdims=True), 1)
    rounded: npt.NDArray[np.float64] = np.round(filters * np.sign(largest) / _GRID) * _GRID
    return rounded.reshape(-1, C, k, k)
