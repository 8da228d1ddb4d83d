"""Models of the benchmark that the zoo does not have: an LSTM over bytes, and ResNet-50.

Shapes: B samples, T bytes, V vocabulary, D width; C channels, H height, W width of an image, K classes.
"""

from __future__ import annotations

import torch
from torch import nn


class ByteLSTM(nn.Module):
    """bytes_BT (int64) to logits_BTV: an embedding, stacked LSTM layers of the embedding's width, a linear layer."""

    def __init__(self, layers: int = 2, width: int = 256, vocab: int = 256) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.lstm = nn.LSTM(width, width, num_layers=layers, batch_first=True)
        self.head = nn.Linear(width, vocab)

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Logits [B, T, V] of the byte after each."""
        hidden_BTD, _ = self.lstm(self.tokens(tokens_BT))
        logits_BTV: torch.Tensor = self.head(hidden_BTD)
        return logits_BTV


class Scaled(nn.Module):
    """Pixels uint8 [B, C, H, W] to floats from -1 to 1, on whatever device they are."""

    def forward(self, pixels_BCHW: torch.Tensor) -> torch.Tensor:
        """The pixels, scaled."""
        return pixels_BCHW.float().mul_(2 / 255).sub_(1)


class ResNet50(nn.Module):
    """images_BCHW to logits_BK: bottleneck blocks 3, 4, 6, 3, the stride in their 3 x 3 convolution ("v1.5").

    Source: K. He et al., "Deep Residual Learning for Image Recognition", arXiv:1512.03385, table 1; the place of the
    stride is that of the implementations that are timed everywhere.
    """

    def __init__(self, classes: int = 1000, width: int = 64, depths: tuple[int, ...] = (3, 4, 6, 3)) -> None:
        super().__init__()
        layers: list[nn.Module] = [
            nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2, padding=1),
        ]
        channels = width
        for stage, depth in enumerate(depths):
            inner = width << stage
            for block in range(depth):
                layers.append(Bottleneck(channels, inner, stride=2 if stage and not block else 1))
                channels = 4 * inner
        self.layers = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))

    def forward(self, images_BCHW: torch.Tensor) -> torch.Tensor:
        """Logits [B, K]."""
        logits_BK: torch.Tensor = self.layers(images_BCHW)
        return logits_BK


class Bottleneck(nn.Module):
    """1 x 1, 3 x 3 and 1 x 1 convolutions added to the input; four times `inner` channels come out."""

    def __init__(self, channels: int, inner: int, *, stride: int) -> None:
        super().__init__()
        out = 4 * inner
        self.branch = nn.Sequential(
            nn.Conv2d(channels, inner, 1, bias=False),
            nn.BatchNorm2d(inner),
            nn.ReLU(inplace=True),
            nn.Conv2d(inner, inner, 3, stride=stride, padding=1, bias=False),
            nn.BatchNorm2d(inner),
            nn.ReLU(inplace=True),
            nn.Conv2d(inner, out, 1, bias=False),
            nn.BatchNorm2d(out),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or channels != out:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, out, 1, stride=stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        """The block's output [B, 4 * inner, H / stride, W / stride]."""
        out_BCHW: torch.Tensor = torch.relu(self.branch(x_BCHW) + self.shortcut(x_BCHW))
        return out_BCHW
