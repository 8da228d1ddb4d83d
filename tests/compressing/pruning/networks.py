"""Small networks in which channels belong together in different ways."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional

IMAGES = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))


def ask(model: nn.Module) -> Sequence[torch.Tensor]:
    """What a network says of four images."""
    return (model(IMAGES),)


def made(kind: type[nn.Module]) -> nn.Module:
    """A network with random weights and running statistics, in evaluation mode."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = kind()
        for layer in model.modules():
            if isinstance(layer, nn.BatchNorm2d):
                nn.init.uniform_(layer.weight, 0.5, 1.5)
                nn.init.normal_(layer.bias)
                assert layer.running_mean is not None
                assert layer.running_var is not None
                layer.running_mean.normal_()
                layer.running_var.uniform_(0.5, 2.0)
    return model.eval()


class Residual(nn.Module):
    """What a layer gives is added to what it takes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 16, 3, padding=1)
        self.inner = nn.Conv2d(16, 24, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(24)
        self.outer = nn.Conv2d(24, 16, 3, padding=1)
        self.head = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores of five classes."""
        x = torch.relu(self.first(x))
        x = x + self.outer(torch.relu(self.norm(self.inner(x))))
        return self.head(x.mean((2, 3)))


class Concatenated(nn.Module):
    """A layer takes what two others give, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 16, 3, padding=1)
        self.second = nn.Conv2d(16, 24, 3, padding=1)
        self.third = nn.Conv2d(40, 16, 1)
        self.head = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores of five classes."""
        first = torch.relu(self.first(x))
        both = torch.cat([first, torch.sigmoid(self.second(first))], 1)
        return self.head(functional.adaptive_max_pool2d(self.third(both), 1).flatten(1))


class Depthwise(nn.Module):
    """A layer has a kernel for each channel, and one flattens places into features."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 16, 3, padding=1)
        self.depthwise = nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.norm = nn.BatchNorm2d(16)
        self.point = nn.Conv2d(16, 32, 1, bias=False)
        self.head = nn.Linear(32 * 4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores of five classes."""
        x = self.point(torch.relu(self.norm(self.depthwise(functional.gelu(self.first(x))))))
        return self.head(functional.adaptive_avg_pool2d(x, 2).flatten(1))


class Tied(nn.Module):
    """Two layers share one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.again = nn.Linear(64, 16), nn.Linear(64, 16)
        self.again.weight = self.inner.weight
        self.head = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores of five classes."""
        x = x.flatten(1)
        return self.head(torch.relu(self.inner(x)) + torch.relu(self.again(x)))


class Transformer(nn.Module):
    """Attention over rows of the image, whose heads and norms count channels, and a layer that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Linear(8, 16), nn.LayerNorm(16)
        self.q, self.k, self.v, self.out = (nn.Linear(16, 16) for _ in range(4))
        self.wide, self.narrow = nn.Linear(16, 64), nn.Linear(64, 16)
        self.head = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores of five classes."""
        x = self.embed(x.squeeze(1))
        q, k, v = (layer(self.norm(x)).unflatten(2, (4, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        x = x + self.out(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        x = x + self.narrow(functional.gelu(self.wide(self.norm(x))))
        return self.head(x.mean(1))


class Grouped(nn.Module):
    """A convolution in two groups, which must lose as many each."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 16, 3, padding=1)
        self.grouped = nn.Conv2d(16, 16, 3, padding=1, groups=2)
        self.last = nn.Conv2d(16, 24, 1)
        self.head = nn.Linear(24, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores of five classes."""
        x = torch.relu(self.last(torch.relu(self.grouped(torch.relu(self.first(x))))))
        return self.head(x.mean((2, 3)))


class Counting(nn.Module):
    """Its code counts on the number of channels."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 16, 3, padding=1)
        self.last = nn.Conv2d(4, 8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores of eight classes."""
        x = self.first(x)
        return self.last(x.unflatten(1, (4, -1)).mean(2)).mean((2, 3))
