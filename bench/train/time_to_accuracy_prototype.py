"""The recipe that `recipe="fast"` is held against, as a loop written by hand; fixed before Stoker's was chosen.

A whitened convolutional network after airbench (K. Jordan 2024, https://arxiv.org/abs/2404.00498) trained with Muon, in
three epochs to about 93 % of Fashion-MNIST's test images, in eight to about 94 %: bf16 autocast, channels last, one
tensor of images indexed by batch, memory kept by the allocator. Shapes: B images, C channels, H = W = 28.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from stoker.devices.malloc import apply_malloc

BATCH = 500
MEAN, STD = 0.2860, 0.3530
MOMENTUM, SMOOTHING, SHIFT = 0.6, 0.1, 1


@dataclass(frozen=True)
class Settings:
    """What differs by target: how long, and Muon's rate."""

    epochs: int
    lr: float


TARGETS = {"93": Settings(3, 0.06), "94": Settings(8, 0.12)}


class Net(nn.Module):
    """Frozen whitening with a trained bias, three groups of two convolutions, maximum, output; logits / 3."""

    def __init__(self, images_BCHW: torch.Tensor, widths: tuple[int, ...] = (32, 96, 192)) -> None:
        super().__init__()
        self.whitening = _whitening(images_BCHW)
        channels = (16, *widths)
        self.groups = nn.Sequential(nn.GELU(), *map(_group, channels, widths), nn.AdaptiveMaxPool2d(1), nn.Flatten())
        self.output = nn.Linear(widths[-1], 10, bias=False)

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        """Logits [B, 10]."""
        logits_BK: torch.Tensor = self.output(self.groups(self.whitening(x_BCHW)))
        return logits_BK / 3


def _group(channels: int, width: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels, width, 3, padding=1, bias=False),
        nn.MaxPool2d(2),
        nn.BatchNorm2d(width),
        nn.GELU(),
        nn.Conv2d(width, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.GELU(),
    )


def _whitening(images_BCHW: torch.Tensor) -> nn.Conv2d:
    """The eight strongest components of 3 x 3 patches, and their negatives."""
    layer = nn.Conv2d(1, 16, 3, padding=1)
    patches_NP = F.unfold(images_BCHW, 3).transpose(1, 2).reshape(-1, 9)
    patches_NP = patches_NP[torch.randperm(len(patches_NP))[:200_000]]
    variances, vectors = torch.linalg.eigh(patches_NP.T @ patches_NP / len(patches_NP))
    filters = (vectors / (variances + 1e-2).sqrt()).T.reshape(9, 1, 3, 3).flip(0)[:8]
    with torch.no_grad():
        layer.weight.copy_(torch.cat([filters, -filters]))
        layer.bias.zero_()
    layer.weight.requires_grad_(False)
    return layer


class Muon(torch.optim.Optimizer):
    """Each filter bank brought to norm sqrt(rows), then moved along its orthogonalised Nesterov momentum."""

    def __init__(self, parameters: list[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Move every filter bank."""
        for group in self.param_groups:
            for parameter in group["params"]:
                momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                momentum.mul_(MOMENTUM).add_(parameter.grad)
                ahead = parameter.grad.add(momentum, alpha=MOMENTUM)
                parameter.mul_(len(parameter) ** 0.5 / parameter.norm())
                parameter.add_(_orthogonal(ahead), alpha=-group["lr"])


def _orthogonal(gradient: torch.Tensor) -> torch.Tensor:
    matrix = gradient.reshape(len(gradient), -1)
    is_tall = matrix.shape[0] > matrix.shape[1]
    matrix = matrix.T if is_tall else matrix
    matrix = matrix / (matrix.norm() + 1e-7)
    for _ in range(3):
        gram = matrix @ matrix.T
        matrix = 3.4445 * matrix + (-4.7750 * gram + 2.0315 * gram @ gram) @ matrix
    return (matrix.T if is_tall else matrix).reshape(gradient.shape)


def rate(progress: float) -> float:
    """A factor of the learning rates: from 0.2 up to 1 over 15 % of the run, then down in a line."""
    return 0.2 + 0.8 * progress / 0.15 if progress < 0.15 else max(0.02, (1 - progress) / 0.85)


Images = tuple[torch.Tensor, torch.Tensor]
"""Images uint8 [N, 1, 28, 28] and labels [N]."""


def train(target: str, seed: int, threads: int, data: Images, test: Images) -> dict[str, float]:
    """Train to the end and test once: accuracy [fraction], seconds of the training loop by wall and by CPU."""
    settings = TARGETS[target]
    torch.manual_seed(seed)
    torch.set_num_threads(threads)
    apply_malloc("mapped")
    images, labels = data
    net = Net(_ready(images[:5000])).to(memory_format=torch.channels_last)
    optimizers = _optimizers(net, settings.lr)
    base = [[group["lr"] for group in one.param_groups] for one in optimizers]
    total = settings.epochs * (len(images) // BATCH)
    wall, cpu = time.perf_counter(), time.process_time()
    for update, chosen in enumerate(_order(len(images), settings.epochs)):
        for one, rates in zip(optimizers, base, strict=True):
            for group, own in zip(one.param_groups, rates, strict=True):
                group["lr"] = own * rate(update / total)
        x_BCHW = _ready(_augmented(images[chosen]))
        with torch.autocast("cpu", torch.bfloat16):
            logits_BK = net(x_BCHW)
        F.cross_entropy(logits_BK.float(), labels[chosen], label_smoothing=SMOOTHING).backward()
        for one in optimizers:
            one.step()
            one.zero_grad()
    took = {"train_wall_s": time.perf_counter() - wall, "train_cpu_s": time.process_time() - cpu}
    return {"accuracy": _accuracy(net, *test), **took}


def _optimizers(net: nn.Module, lr: float) -> list[torch.optim.Optimizer]:
    trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
    filters = [parameter for parameter in trained if parameter.dim() == 4]
    others = [parameter for parameter in trained if parameter.dim() != 4]
    return [Muon(filters, lr), torch.optim.SGD(others, 0.03, momentum=0.85, nesterov=True, fused=True)]


def _order(count: int, epochs: int) -> Iterator[torch.Tensor]:
    for _ in range(epochs):
        order = torch.randperm(count)
        yield from order[: count - count % BATCH].split(BATCH)


def _augmented(images_BCHW: torch.Tensor) -> torch.Tensor:
    """Half of the images mirrored, each moved by up to a pixel."""
    B, _, H, W = images_BCHW.shape
    x_BHW = torch.where(torch.rand(B, 1, 1, 1) < 0.5, images_BCHW.flip(-1), images_BCHW)[:, 0]
    padded_BHW = F.pad(x_BHW, (SHIFT,) * 4)
    corners = torch.randint(0, 2 * SHIFT + 1, (B, 2))
    rows, columns = (corners[:, axis : axis + 1] + torch.arange(size) for axis, size in enumerate((H, W)))
    places = (rows[:, :, None] * (W + 2 * SHIFT) + columns[:, None, :]).reshape(B, -1)
    return padded_BHW.reshape(B, -1).gather(1, places).view(B, 1, H, W)


def _ready(images_BCHW: torch.Tensor) -> torch.Tensor:
    scaled = images_BCHW.float().mul_(1 / (255 * STD)).sub_(MEAN / STD)
    return scaled.contiguous(memory_format=torch.channels_last)


@torch.no_grad()
def _accuracy(net: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    net.eval()
    with torch.autocast("cpu", torch.bfloat16):
        found = torch.cat([net(_ready(part)).argmax(1) for part in images.split(1000)])
    return float((found == labels).double().mean())
