"""Convolutional networks: ResNet-18, -34, -50, -101 and -152, ResNet-9 for small images, and VGG-16.

Shapes: B images, C input channels, H height, W width, K classes; w the width of the first stage or convolution.
BatchNorm couples the samples of a batch.

ResNet: a 7 × 7 convolution of stride 2 and pooling (for small images: one of 3 × 3, no pooling); four stages of blocks,
the map halved and the channels doubled from each to the next; the mean over the map; linear(→ K). A block adds to its
input two 3 × 3 convolutions (depths 18 and 34), or one of 1 × 1, one of 3 × 3, which strides, and one of 1 × 1 to four
times the channels. Convolutions have no bias, BatchNorm after each, ReLU between them. Weights have the names of
torchvision's.
Parameters of the 1,000 classes at width 64: 11,689,512 (18), 21,797,672 (34), 25,557,032 (50), 44,549,160 (101),
60,192,808 (152).
Source: K. He et al., "Deep Residual Learning for Image Recognition" (2015), https://arxiv.org/abs/1512.03385. As in
torchvision, the 3 × 3 convolution of a bottleneck strides, not the first 1 × 1 (Nvidia's "v1.5").

ResNet-9: conv(C→w); conv(w→2w) and pool; residual(2w); conv(2w→4w) and pool; conv(4w→8w) and pool; residual(8w);
maximum over the map; linear(8w→K). A conv is 3 × 3 without bias, BatchNorm, ReLU; a residual adds two of them to its
input.
Parameters: 1602*w^2 + (9*C + 70 + 8*K)*w + K.
FLOPs to train on one sample, the convolutions and the linear layer alone, with A_0, …, A_3 pixels of the map after 0 to
3 poolings: 6 * (9 * ((C*w + 2*w^2)*A_0 + 16*w^2*A_1 + 32*w^2*A_2 + 128*w^2*A_3) + 8*w*K) - 18*C*w*A_0. A multiply and
an add count as two; forward once, backward once for the weights and once for the inputs, which the first conv spares.
Source: D. Page, "How to train your ResNet" (2018), parts 4 to 8. There the width is 64, the second residual block
follows the last pooling as here, and the logits are scaled by 1/8, which is left out here.

VGG-16: thirteen 3 × 3 convolutions in five groups, each followed by pooling, and three linear layers.

Shapes: B images, C input channels, H height, W width, K classes; w the width of the first group, h of hidden layers.
Layers: groups of 2, 2, 3, 3, 3 convolutions with w, 2w, 4w, 8w, 8w channels, ReLU after each; the last map averaged to
7 × 7; linear(392*w → h), linear(h → h), linear(h → K), ReLU and dropout between them. Weights have the names of
torchvision's.
Parameters: 9*C*w + 3591*w^2 + 66*w of the convolutions, (392*w + 1)*h + (h + 1)*h + (h + 1)*K of the others;
138,357,544 as published (w 64, h 4096, C 3, K 1000).
FLOPs to train on one image, with A_0, …, A_4 pixels of the map after 0 to 4 poolings: 6 * (9 * ((C*w + w^2)*A_0 +
6*w^2*A_1 + 40*w^2*A_2 + 160*w^2*A_3 + 192*w^2*A_4) + 392*w*h + h^2 + h*K) - 18*C*w*A_0. A multiply and an add count as
two; forward once, backward once for the weights and once for the inputs, which the first convolution spares.

Source: K. Simonyan, A. Zisserman, "Very Deep Convolutional Networks for Large-Scale Image Recognition" (2014),
https://arxiv.org/abs/1409.1556, configuration D; initialisation as in torchvision: K. He et al. (2015),
https://arxiv.org/abs/1502.01852, linear layers with deviation 0.01.
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
            raise BadJob(
                f'ResNet has depths {", ".join(map(str, _DEPTHS))} and stems "large" and "small", got {depth} '
                f"and {stem!r}"
            )
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
            for index in range(count):
                blocks.append(block(channels, inner, stride=2 if number and not index else 1))
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
    """Two 3 × 3 convolutions with a shortcut."""

    def __init__(self, channels: int, inner: int, stride: int) -> None:
        super().__init__()
        self.out_channels = inner
        self.conv1, self.bn1 = _convolution(channels, inner, size=3, stride=stride), nn.BatchNorm2d(inner)
        self.conv2, self.bn2 = _convolution(inner, inner, size=3), nn.BatchNorm2d(inner)
        self.downsample = _shortcut(channels, inner, stride)

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        change_BCHW = torch.relu(self.bn1(self.conv1(x_BCHW)))
        change_BCHW = self.bn2(self.conv2(change_BCHW))
        past_BCHW = x_BCHW if self.downsample is None else self.downsample(x_BCHW)
        return torch.relu(change_BCHW + past_BCHW)


class _Bottleneck(nn.Module):
    """A 3 × 3 convolution on a fourth of the channels, with a shortcut."""

    def __init__(self, channels: int, inner: int, stride: int) -> None:
        super().__init__()
        self.out_channels = _EXPANSION * inner
        self.conv1, self.bn1 = _convolution(channels, inner, size=1), nn.BatchNorm2d(inner)
        self.conv2, self.bn2 = _convolution(inner, inner, size=3, stride=stride), nn.BatchNorm2d(inner)
        self.conv3, self.bn3 = _convolution(inner, self.out_channels, size=1), nn.BatchNorm2d(self.out_channels)
        self.downsample = _shortcut(channels, self.out_channels, stride)

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        change_BCHW = torch.relu(self.bn1(self.conv1(x_BCHW)))
        change_BCHW = torch.relu(self.bn2(self.conv2(change_BCHW)))
        change_BCHW = self.bn3(self.conv3(change_BCHW))
        past_BCHW = x_BCHW if self.downsample is None else self.downsample(x_BCHW)
        return torch.relu(change_BCHW + past_BCHW)


def _shortcut(channels: int, out_channels: int, stride: int) -> nn.Sequential | None:
    """The shortcut's convolution; None where the input is added as it is."""
    if channels == out_channels and stride == 1:
        return None
    return nn.Sequential(_convolution(channels, out_channels, size=1, stride=stride), nn.BatchNorm2d(out_channels))


def _convolution(channels: int, out_channels: int, *, size: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(channels, out_channels, kernel_size=size, stride=stride, padding=size // 2, bias=False)


_POOLINGS = 3


class ResNet9(nn.Module):
    """x_BCHW to logits_BK; initialised as PyTorch's layers are.

    Args:
        width: w, channels after the first convolution.
        in_channels: C.
        classes: K.
        pools: number of poolings, from the first on; each halves height and width, rounding down. Three suit images
            from 16 pixels, two those of 8. Height and width must be at least 2**pools.

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


_GROUPS = (2, 2, 3, 3, 3)
_WIDEST = 8
_MAP = 7
_LEAST_PIXELS = 32


class VGG16(nn.Module):
    """x_BCHW to logits_BK; height and width at least 32.

    Args:
        classes: K.
        in_channels: C.
        width: w.
        hidden: h.
        dropout: share of the hidden layers' outputs set to zero in training.

    Raises:
        BadJob: a size is not positive, or `dropout` not in [0, 1).
    """

    def __init__(
        self, classes: int = 1000, in_channels: int = 3, width: int = 64, hidden: int = 4096, dropout: float = 0.5
    ) -> None:
        super().__init__()
        if min(classes, in_channels, width, hidden) < 1 or not 0 <= dropout < 1:
            raise BadJob(
                f"VGG16 takes sizes >= 1 and 0 <= dropout < 1, got classes {classes}, in_channels "
                f"{in_channels}, width {width}, hidden {hidden} and dropout {dropout}"
            )
        layers: list[nn.Module] = []
        channels = in_channels
        for group, count in enumerate(_GROUPS):
            following = width * min(2**group, _WIDEST)
            for _ in range(count):
                layers += [nn.Conv2d(channels, following, kernel_size=3, padding=1), nn.ReLU(inplace=True)]
                channels = following
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d(_MAP)
        self.classifier = nn.Sequential(
            nn.Linear(channels * _MAP * _MAP, hidden),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(hidden, hidden),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(hidden, classes),
        )
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.01)
            if isinstance(module, nn.Conv2d | nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        """Logits [B, K] of images [B, C, H, W].

        Raises:
            BadJob: images are too small for five poolings.
        """
        if min(x_BCHW.shape[-2:]) < _LEAST_PIXELS:
            raise BadJob(f"VGG16 takes images of {_LEAST_PIXELS} pixels and more, got {list(x_BCHW.shape[-2:])}")
        maps_BCHW = self.avgpool(self.features(x_BCHW))
        logits_BK: torch.Tensor = self.classifier(maps_BCHW.flatten(1))
        return logits_BK
