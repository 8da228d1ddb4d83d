"""VGG-16: thirteen 3 × 3 convolutions in five groups, each followed by pooling, and three linear layers.

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

import torch
from torch import nn

from stoker.errors import BadJob

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
            raise BadJob(f"VGG16 takes sizes >= 1 and 0 <= dropout < 1, got classes {classes}, in_channels "
                         f"{in_channels}, width {width}, hidden {hidden} and dropout {dropout}")  # fmt: skip
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
            nn.Linear(channels * _MAP * _MAP, hidden), nn.ReLU(inplace=True), nn.Dropout(dropout),
            nn.Linear(hidden, hidden), nn.ReLU(inplace=True), nn.Dropout(dropout),
            nn.Linear(hidden, classes),
        )  # fmt: skip
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
