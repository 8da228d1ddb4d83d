"""ResNet-9: a small residual CNN that reaches high accuracy on small images in a few epochs.

Shapes: B samples, C input channels, H height, W width, K classes; w the width.
Layers: conv(C→w); conv(w→2w) and pool; residual(2w); conv(2w→4w) and pool; conv(4w→8w) and pool; residual(8w); maximum
over the map; linear(8w→K). A conv is 3 × 3 without bias, BatchNorm, ReLU; a residual adds two of them to its input.
Parameters: 1602*w^2 + (9*C + 70 + 8*K)*w + K.
FLOPs to train on one sample, the convolutions and the linear layer alone, with A_0, …, A_3 pixels of the map after 0 to
3 poolings: 6 * (9 * ((C*w + 2*w^2)*A_0 + 16*w^2*A_1 + 32*w^2*A_2 + 128*w^2*A_3) + 8*w*K) - 18*C*w*A_0. A multiply and
an add count as two; forward once, backward once for the weights and once for the inputs, which the first conv spares.
BatchNorm couples the samples of a batch.

Source: D. Page, "How to train your ResNet" (2018), parts 4 to 8. There the width is 64, the second residual block
follows the last pooling as here, and the logits are scaled by 1/8, which this one leaves out.
"""

from __future__ import annotations

import torch
from torch import nn

from stoker.errors import BadJob

_POOLINGS = 3


class ResNet9(nn.Module):
    """x_BCHW to logits_BK; initialised as PyTorch's layers are.

    Args:
        width: w, channels after the first convolution.
        in_channels: C.
        classes: K.
        pools: how many of the three poolings to do, from the first on; each halves height and width, rounding down.
            Three suit images from 16 pixels, two those of 8. Height and width must be at least 2**pools.

    Raises:
        BadJob: a size is not positive, or `pools` not in 0..3.
    """

    def __init__(self, width: int = 16, in_channels: int = 1, classes: int = 10, pools: int = _POOLINGS) -> None:
        super().__init__()
        if min(width, in_channels, classes) < 1 or not 0 <= pools <= _POOLINGS:
            raise BadJob(
                f"ResNet9 takes sizes >= 1 and 0 <= pools <= {_POOLINGS}, got width {width}, "
                f"in_channels {in_channels}, classes {classes} and pools {pools}"
            )
        self.layers = nn.Sequential(
            _conv(in_channels, width),
            _conv(width, 2 * width, pool=pools >= 1),
            _Residual(2 * width),
            _conv(2 * width, 4 * width, pool=pools >= 2),
            _conv(4 * width, 8 * width, pool=pools >= 3),
            _Residual(8 * width),
            nn.AdaptiveMaxPool2d(1),
            nn.Flatten(),
            nn.Linear(8 * width, classes),
        )

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        """Logits [B, K] of images [B, C, H, W]."""
        logits_BK: torch.Tensor = self.layers(x_BCHW)
        return logits_BK


class _Residual(nn.Module):
    """The input and two convolutions of it, added."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(_conv(channels, channels), _conv(channels, channels))

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        branch_BCHW: torch.Tensor = self.branch(x_BCHW)
        return x_BCHW + branch_BCHW


def _conv(channels: int, out_channels: int, *, pool: bool = False) -> nn.Sequential:
    """Convolution, BatchNorm, ReLU, and pooling if asked for."""
    layers: list[nn.Module] = [
        nn.Conv2d(channels, out_channels, kernel_size=3, padding=1, bias=False),
        nn.BatchNorm2d(out_channels),
        nn.ReLU(inplace=True),
    ]
    if pool:
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers)
