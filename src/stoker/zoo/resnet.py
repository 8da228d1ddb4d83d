"""ResNet-18, -34, -50, -101 and -152: residual networks of four stages.

Shapes: B images, C input channels, H height, W width, K classes; w the width of the first stage.
Layers: a 7 × 7 convolution of stride 2 and pooling (for small images: one of 3 × 3, no pooling); four stages of blocks,
the map halved and the channels doubled from each to the next; the mean over the map; linear(→ K). A block adds to its
input two 3 × 3 convolutions (depths 18 and 34), or one of 1 × 1, one of 3 × 3, which strides, and one of 1 × 1 to four
times the channels. Convolutions have no bias, BatchNorm after each, ReLU between them. Weights have the names of
torchvision's.
Parameters of the 1,000 classes at width 64: 11,689,512 (18), 21,797,672 (34), 25,557,032 (50), 44,549,160 (101),
60,192,808 (152). BatchNorm couples the samples of a batch.

Source: K. He et al., "Deep Residual Learning for Image Recognition" (2015), https://arxiv.org/abs/1512.03385. As in
torchvision, the 3 × 3 convolution of a bottleneck strides, not the first 1 × 1 (Nvidia's "v1.5").
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn

from stoker.errors import BadJob

_DEPTHS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}
_WITH_BOTTLENECKS = 50
_EXPANSION = 4


class ResNet(nn.Module):
    """x_BCHW to logits_BK.

    Args:
        depth: layers with weights: 18, 34, 50, 101 or 152.
        classes: K.
        in_channels: C.
        width: w, 64 as published.
        stem: how images come in: "large" begins with stride 4 in all, for images of some 200 pixels; "small" with
            stride 1, for those of 32.

    Raises:
        BadJob: there is no such depth or stem, or a size is not positive.
    """

    def __init__(
        self,
        depth: int = 50,
        classes: int = 1000,
        in_channels: int = 3,
        width: int = 64,
        stem: Literal["large", "small"] = "large",
    ) -> None:
        super().__init__()
        if depth not in _DEPTHS or stem not in ("large", "small"):
            raise BadJob(f'ResNet has depths {", ".join(map(str, _DEPTHS))} and stems "large" and "small", got {depth} '
                         f"and {stem!r}")  # fmt: skip
        if min(classes, in_channels, width) < 1:
            raise BadJob(f"ResNet takes sizes >= 1, got classes {classes}, in_channels {in_channels}, width {width}")
        is_small = stem == "small"
        self.conv1 = _convolution(in_channels, width, size=3 if is_small else 7, stride=1 if is_small else 2)
        self.bn1 = nn.BatchNorm2d(width)
        self.maxpool = nn.Identity() if is_small else nn.MaxPool2d(kernel_size=3, stride=2, padding=1)
        block = _Bottleneck if depth >= _WITH_BOTTLENECKS else _Basic
        channels, stages = width, []
        for number, count in enumerate(_DEPTHS[depth]):
            inner, blocks = width * 2**number, []
            for at in range(count):
                blocks.append(block(channels, inner, stride=2 if number and not at else 1))
                channels = blocks[-1].out_channels
            stages.append(nn.Sequential(*blocks))
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.fc = nn.Linear(channels, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        """Logits [B, K] of images [B, C, H, W]."""
        x_BCHW = self.maxpool(torch.relu(self.bn1(self.conv1(x_BCHW))))
        for stage in (self.layer1, self.layer2, self.layer3, self.layer4):
            x_BCHW = stage(x_BCHW)
        logits_BK: torch.Tensor = self.fc(x_BCHW.mean((2, 3)))
        return logits_BK


class _Basic(nn.Module):
    """Two 3 × 3 convolutions beside the way past them."""

    def __init__(self, channels: int, inner: int, stride: int) -> None:
        super().__init__()
        self.out_channels = inner
        self.conv1, self.bn1 = _convolution(channels, inner, size=3, stride=stride), nn.BatchNorm2d(inner)
        self.conv2, self.bn2 = _convolution(inner, inner, size=3), nn.BatchNorm2d(inner)
        self.downsample = _past(channels, inner, stride)

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        change_BCHW = torch.relu(self.bn1(self.conv1(x_BCHW)))
        change_BCHW = self.bn2(self.conv2(change_BCHW))
        past_BCHW = x_BCHW if self.downsample is None else self.downsample(x_BCHW)
        return torch.relu(change_BCHW + past_BCHW)


class _Bottleneck(nn.Module):
    """A 3 × 3 convolution on a fourth of the channels beside the way past it."""

    def __init__(self, channels: int, inner: int, stride: int) -> None:
        super().__init__()
        self.out_channels = _EXPANSION * inner
        self.conv1, self.bn1 = _convolution(channels, inner, size=1), nn.BatchNorm2d(inner)
        self.conv2, self.bn2 = _convolution(inner, inner, size=3, stride=stride), nn.BatchNorm2d(inner)
        self.conv3, self.bn3 = _convolution(inner, self.out_channels, size=1), nn.BatchNorm2d(self.out_channels)
        self.downsample = _past(channels, self.out_channels, stride)

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        change_BCHW = torch.relu(self.bn1(self.conv1(x_BCHW)))
        change_BCHW = torch.relu(self.bn2(self.conv2(change_BCHW)))
        change_BCHW = self.bn3(self.conv3(change_BCHW))
        past_BCHW = x_BCHW if self.downsample is None else self.downsample(x_BCHW)
        return torch.relu(change_BCHW + past_BCHW)


def _past(channels: int, out_channels: int, stride: int) -> nn.Sequential | None:
    """The way past a block; None where the input can be added as it is."""
    if channels == out_channels and stride == 1:
        return None
    return nn.Sequential(_convolution(channels, out_channels, size=1, stride=stride), nn.BatchNorm2d(out_channels))


def _convolution(channels: int, out_channels: int, *, size: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(channels, out_channels, kernel_size=size, stride=stride, padding=size // 2, bias=False)
