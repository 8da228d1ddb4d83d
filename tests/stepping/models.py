"""Small models whose samples are coupled in every way we know of, and models whose samples are not."""

from __future__ import annotations

import copy
import math
import random
import time
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from stoker.jobs import SGD, Job, Loss
from stoker.loading.datasets import datasets_of
from stoker.loading.samples import Samples
from stoker.units import updates

FEATURES, CLASSES, TOKENS, VOCAB = 6, 4, 8, 12


def vectors(count: int = 64, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs [N, FEATURES] and labels [N]."""
    random = torch.Generator().manual_seed(seed)
    return torch.randn(count, FEATURES, generator=random), torch.randint(CLASSES, (count,), generator=random)


def images(count: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs [N, 1, 6, 6] and labels [N]."""
    random = torch.Generator().manual_seed(1)
    return torch.randn(count, 1, 6, 6, generator=random), torch.randint(CLASSES, (count,), generator=random)


def texts(count: int = 64, *, masked: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [N, TOKENS] and the next ones; the last few targets of a share of the samples are ignored."""
    random = torch.Generator().manual_seed(2)
    tokens = torch.randint(VOCAB, (count, TOKENS + 1), generator=random)
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].clone()
    for index in range(round(masked * count)):
        targets[index, 2 + index % (TOKENS - 2) :] = -100
    return inputs, targets


def make_job(model: Callable[[], nn.Module], **changed: object) -> Job:
    """A job over `vectors` whose settings are replaced by `changed`."""
    given = {
        "data": vectors(),
        "loss": "cross_entropy",
        "optimizer": SGD(lr=0.1),
        "batch": 16,
        "until": updates(30),
    }
    return Job(model=model, **{**given, **changed})  # type: ignore[arg-type]


def samples_of(job: Job) -> Samples:
    """The job's training samples."""
    return datasets_of(job).train


def mlp(*, width: int = 16, norm: Callable[[int], nn.Module] | None = None, dropout: float = 0.0) -> nn.Module:
    """A perceptron of one hidden layer."""
    layers = [nn.Linear(FEATURES, width), norm(width) if norm else nn.Identity(), nn.Tanh(), nn.Dropout(dropout)]
    return nn.Sequential(*layers, nn.Linear(width, CLASSES))


def cnn(norm: Callable[[int], nn.Module] = lambda _: nn.Identity()) -> nn.Module:
    """Two convolutions over `images`."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        norm(4),
        nn.ReLU(),
        nn.Conv2d(4, 8, 3, stride=2),
        norm(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, CLASSES),
    )


class OwnBackward(nn.Module):
    """A small network whose backward pass is changed by a hook of a value within it."""

    def __init__(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, 8), nn.Linear(8, CLASSES)
        self._change = change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        if hidden.requires_grad:
            hidden.register_hook(self._change)
        output: torch.Tensor = self.last(hidden)
        return output


def noisy_backward(width: int) -> nn.Module:
    """A layer whose weight's gradient gets noise."""
    layer = nn.Linear(width, CLASSES)
    layer.weight.register_hook(lambda gradient: gradient + torch.randn_like(gradient))
    return layer


def refuse_above(limit: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """A hook that passes gradients on, and raises where one is larger than `limit`."""

    def checked(gradient: torch.Tensor) -> torch.Tensor:
        if gradient.abs().max() > limit:
            raise ValueError("the gradient explodes")
        return gradient

    return checked


def hooked_mlp(register: str) -> nn.Module:
    """A network with a hook of its first weight that clips its gradient."""

    def clip(value: torch.Tensor) -> torch.Tensor | None:
        if register == "register_hook":
            return value.clamp(-0.01, 0.01)
        assert value.grad is not None
        value.grad.clamp_(-0.01, 0.01)
        return None

    model = mlp()
    getattr(next(model.parameters()), register)(clip)
    return model


class FunctionalDropout(nn.Module):
    """Drops by function, where no module shows it; draws noise for its inputs as well."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, 16), nn.Linear(16, CLASSES)

    def forward(self, x_BF: torch.Tensor) -> torch.Tensor:
        x_BF = x_BF + 0.1 * torch.randn_like(x_BF) * torch.rand(x_BF.shape[0], 1)
        return self.last(F.dropout(torch.relu(self.first(x_BF)), 0.3, self.training))


class FrozenNorm(nn.Module):
    """Keeps its batch norm in evaluation mode whatever mode the model is in, as in fine-tuning."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Linear(8, CLASSES)

    def train(self, mode: bool = True) -> FrozenNorm:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x_BF: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.norm(self.first(x_BF))))


class Recurrent(nn.Module):
    """An LSTM whose first state is made in the forward pass, in PyTorch's default type."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.last = nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB)
        self.lstm = nn.LSTM(8, 8, num_layers=2, batch_first=True, dropout=0.2)

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        start = torch.zeros(2, len(tokens_BT), 8)
        return self.last(self.lstm(self.embedding(tokens_BT), (start, start))[0])


class Twice(nn.Module):
    """One batch norm that every pass goes through twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(FEATURES, 8), nn.Linear(8, 8), nn.Linear(8, CLASSES)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x_BF: torch.Tensor) -> torch.Tensor:
        h_BH = torch.relu(self.norm(self.first(x_BF)))
        return self.last(torch.relu(self.norm(self.middle(h_BH))))


class NormOfTokens(nn.Module):
    """A batch norm over tokens, flattened with the batch first, or with time first."""

    def __init__(self, *, time_first: bool) -> None:
        super().__init__()
        self.embedding, self.norm, self.last = nn.Embedding(VOCAB, 8), nn.BatchNorm1d(8), nn.Linear(8, VOCAB)
        self.time_first = time_first

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        x_BTD = self.embedding(tokens_BT)
        x_XTD = x_BTD.transpose(0, 1) if self.time_first else x_BTD
        normed = self.norm(x_XTD.flatten(0, 1)).view(x_XTD.shape)
        return self.last(normed.transpose(0, 1) if self.time_first else normed)


class BatchAttention(nn.Module):
    """Samples attend to each other."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, 8), nn.Linear(8, CLASSES)

    def forward(self, x_BF: torch.Tensor) -> torch.Tensor:
        h_BH = self.first(x_BF)
        return self.last(h_BH + torch.softmax(h_BH @ h_BH.T, 1) @ h_BH)


class Gated(nn.Module):
    """A part behind a gate that begins as zero, so that at the initial weights nothing of it shows."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.gate, self.last = inner, nn.Parameter(torch.zeros(())), nn.Linear(FEATURES, CLASSES)

    def forward(self, x_BF: torch.Tensor) -> torch.Tensor:
        return self.last(x_BF) + self.gate * self.inner(x_BF)


class MixtureOfExperts(nn.Module):
    """Top-1 token choice with a capacity of ceil(factor * tokens / experts): an expert's overflow is dropped.

    Source: W. Fedus, B. Zoph, N. Shazeer, "Switch Transformers" (2021), section 2.2, without its auxiliary loss.
    """

    def __init__(self, width: int = 8, experts: int = 4, factor: float = 1.0) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(experts))
        self.factor = factor

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        x_ND = x_BTD.flatten(0, -2)
        capacity = math.ceil(self.factor * len(x_ND) / len(self.experts))
        gate_N, chosen_N = torch.softmax(self.router(x_ND), 1).max(1)
        parts_ND = torch.zeros_like(x_ND)
        for index, expert in enumerate(self.experts):
            rows = (chosen_N == index).nonzero()[:capacity, 0]
            parts_ND = parts_ND.index_add(0, rows, expert(x_ND[rows]) * gate_N[rows, None])
        return (x_ND + parts_ND).view(x_BTD.shape)


def moe(factor: float = 1.0) -> nn.Module:
    """A language model of one mixture of experts."""
    return nn.Sequential(nn.Embedding(VOCAB, 8), MixtureOfExperts(factor=factor), nn.Linear(8, VOCAB))


class Queue(nn.Module):
    """Keeps the mean of the last batch, hidden in Python, and adds it to the next one's inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(FEATURES, CLASSES)
        self.seen = torch.zeros(FEATURES)

    def forward(self, x_BF: torch.Tensor) -> torch.Tensor:
        output = self.last(x_BF + self.seen.to(x_BF.dtype))
        self.seen = x_BF.detach().mean(0)
        return output


class Counter(nn.Module):
    """A buffer that counts passes and moves nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(FEATURES, CLASSES)
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))

    def forward(self, x_BF: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        return self.last(x_BF)


class Unkept(nn.Module):
    """Two buffers outside the state dict: one counts passes, the other is a table that the first pass fills."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(FEATURES, CLASSES)
        self.register_buffer("passes", torch.zeros(()), persistent=False)
        self.register_buffer("table", torch.zeros(FEATURES), persistent=False)

    def forward(self, x_BF: torch.Tensor) -> torch.Tensor:
        self.passes, self.table = self.passes + 1, torch.ones(FEATURES)
        return self.last(x_BF) * (1 + self.passes.to(x_BF.dtype))


class MadeLater(nn.Module):
    """Registers a table in its first pass, after another buffer; neither is in the state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(FEATURES, CLASSES)
        self.register_buffer("factor", torch.ones(()), persistent=False)

    def forward(self, x_BF: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "table"):
            self.register_buffer("table", torch.ones(FEATURES), persistent=False)
        return self.last(x_BF * self.table * self.factor.to(x_BF.dtype))


class SharedDraw(nn.Module):
    """Leaves its layer out by one draw for the whole batch, as torchvision's StochasticDepth(mode="batch")."""

    def __init__(self, drop: float = 0.3) -> None:
        super().__init__()
        self.drop = drop

    def forward(self, x_BF: torch.Tensor) -> torch.Tensor:
        keep = torch.empty([1] * x_BF.dim(), dtype=x_BF.dtype).bernoulli_(1 - self.drop)
        return x_BF * keep / (1 - self.drop)


class LayerDrop(nn.Module):
    """Draws whether to leave its layer out, also where the chance is nothing, as layers of Hugging Face's BART do."""

    def __init__(self, drop: float) -> None:
        super().__init__()
        self.drop, self.first, self.last = drop, nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, CLASSES)

    def forward(self, x_BF: torch.Tensor) -> torch.Tensor:
        is_left_out = float(torch.rand([])) < self.drop
        return self.last(F.dropout(x_BF if is_left_out else self.first(x_BF), 0.2))


class WeightDrop(nn.Linear):
    """Drops weights, the same for all samples of a batch (DropConnect)."""

    def forward(self, x_BF: torch.Tensor) -> torch.Tensor:
        return F.linear(x_BF, F.dropout(self.weight, 0.3), self.bias)


class DrawForEach(nn.Linear):
    """Draws for one sample after the other in a loop."""

    def forward(self, x_BF: torch.Tensor) -> torch.Tensor:
        return super().forward(torch.stack([x_F + 0.1 * torch.randn(x_F.shape) for x_F in x_BF]))


class Counted(nn.Module):
    """Counts passes, or samples, in a plain number, which matters after a thousand."""

    def __init__(self, *, by_sample: bool = False) -> None:
        super().__init__()
        self.last, self.by_sample, self.counts = nn.Linear(FEATURES, CLASSES), by_sample, {"seen": 0}

    def forward(self, x_BF: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.counts["seen"] += len(x_BF) if self.by_sample else 1
        return self.last(x_BF) * (1.0 if self.counts["seen"] < 1000 else 2.0)


class Evaluations(nn.Module):
    """Counts its passes in a plain number, as functions of a differential equation do; `reads` may look at it."""

    def __init__(self, reads: Callable[[Evaluations, torch.Tensor], object] = lambda *_: None) -> None:
        super().__init__()
        self.last, self.nfe, self.reads = nn.Linear(FEATURES, CLASSES), 0, reads

    def forward(self, x_BF: torch.Tensor) -> torch.Tensor:
        """Logits [B, classes]."""
        if self.training:
            self.nfe += 1
        output_BC: torch.Tensor = self.last(x_BF)
        self.reads(self, output_BC)
        return output_BC


class Notes(nn.Module):
    """Keeps its last activations and the time of its last pass, and reads neither."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.norm = (
            nn.Linear(FEATURES, CLASSES),
            nn.utils.parametrizations.weight_norm(nn.Linear(FEATURES, FEATURES)),
        )

    def forward(self, x_BF: torch.Tensor) -> torch.Tensor:
        self.hidden, self.at, self.size = self.norm(x_BF), time.perf_counter(), len(x_BF)
        self.shown = self.hidden.detach()
        return self.last(self.hidden)


class Memory(nn.Module):
    """Keeps a moving mean of its inputs in a plain attribute, and moves by it."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.mean = nn.Linear(FEATURES, CLASSES), [torch.zeros(FEATURES)]

    def forward(self, x_BF: torch.Tensor) -> torch.Tensor:
        self.mean = [0.9 * self.mean[0] + 0.1 * x_BF.detach().mean(0)]
        return self.last(x_BF - self.mean[0].to(x_BF.dtype))


class Limited(nn.Module):
    """Passes on the first samples of a batch, and nothing of those beyond its capacity."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity, self.last = capacity, nn.Linear(FEATURES, CLASSES)

    def forward(self, x_BF: torch.Tensor) -> torch.Tensor:
        return self.last(x_BF * (torch.arange(len(x_BF)) < self.capacity).to(x_BF.dtype)[:, None])


class ComplexNet(nn.Module):
    """A layer of complex weights, whose imaginary part matters."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.3 * torch.randn(FEATURES, 8, dtype=torch.complex64))
        self.last = nn.Linear(8, CLASSES)

    def forward(self, x_BF: torch.Tensor) -> torch.Tensor:
        return self.last((x_BF.to(self.weight.dtype) @ self.weight).abs())


class OwnGenerator(nn.Module):
    """Draws noise from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(FEATURES, CLASSES)
        self.random = torch.Generator().manual_seed(0)

    def forward(self, x_BF: torch.Tensor) -> torch.Tensor:
        return self.last(x_BF + torch.randn(x_BF.shape, generator=self.random, dtype=x_BF.dtype))


class DrawsElsewhere(nn.Module):
    """Scales its output by draws from Python's and NumPy's global generators."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(FEATURES, CLASSES)

    def forward(self, x_BF: torch.Tensor) -> torch.Tensor:
        return self.last(x_BF) * (1 + 0.1 * random.random() * np.random.rand())  # noqa: NPY002 - as users do


class Moody(nn.Module):
    """Scales its output by chance, from a generator that the system seeds."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(FEATURES, CLASSES)
        self.chance = random.SystemRandom()

    def forward(self, x_BF: torch.Tensor) -> torch.Tensor:
        return self.last(x_BF) * (1 + 0.1 * self.chance.random())


class Logarithmic(nn.Module):
    """Takes the logarithm of weights that begin just above zero."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.scale = nn.Linear(FEATURES, CLASSES), nn.Parameter(torch.full((CLASSES,), 1e-3))

    def forward(self, x_BF: torch.Tensor) -> torch.Tensor:
        return self.first(x_BF) * self.scale.log()


class MixedUp(nn.Module):
    """Adds a little of another sample of the batch to each, drawn at random."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(FEATURES, CLASSES)

    def forward(self, x_BF: torch.Tensor) -> torch.Tensor:
        return self.last(0.9 * x_BF + 0.1 * x_BF[torch.randperm(len(x_BF))])


class FixedBatch(nn.Module):
    """Takes batches of one size only."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.last = size, nn.Linear(FEATURES, CLASSES)

    def forward(self, x_BF: torch.Tensor) -> torch.Tensor:
        return self.last(x_BF.view(self.size, FEATURES))


def info_nce(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Each sample is to find its own noisy copy among those of the batch (van den Oord et al. 2018)."""
    inputs, _ = batch
    one, two = model(inputs), model(inputs + 0.1)
    return F.cross_entropy(one @ two.T, torch.arange(len(inputs)))


def token_mean(output_BTV: torch.Tensor, target_BT: torch.Tensor) -> torch.Tensor:
    """A scalar: the mean over the valid tokens of whatever it is given."""
    return F.cross_entropy(output_BTV.flatten(0, 1), target_BT.flatten(), ignore_index=-100)


def sample_mean(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A scalar: the mean over samples."""
    return F.cross_entropy(output, target)


def gradient_penalty(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> Loss:
    """Cross-entropy, and how far the norm of the derivative by each input is from one."""
    inputs, target = batch
    inputs = inputs.detach().requires_grad_()
    output = model(inputs)
    (slope_BF,) = torch.autograd.grad(output.sum(), inputs, create_graph=True)
    return Loss(
        F.cross_entropy(output, target, reduction="sum") + (slope_BF.norm(dim=1) - 1).square().sum(), len(target)
    )


def mean_as_sum(output: torch.Tensor, target: torch.Tensor) -> Loss:
    """A mean that claims to be a sum over one."""
    return Loss(F.cross_entropy(output, target), 1)


def weighted_by_batch(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Hard samples weigh more, compared with the batch's mean."""
    each = F.cross_entropy(output, target, reduction="none")
    return each * (each / each.mean()).detach()


def gradient_weighted_by_batch(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A loss whose value is separable and whose gradient is not."""
    each = F.cross_entropy(output, target, reduction="none")
    weighted = each * (each / each.mean()).detach()
    return each.detach() + weighted - weighted.detach()


def normalised_penalty(output: torch.Tensor, target: torch.Tensor) -> Loss:
    """A penalty that every micro-batch would add again."""
    return Loss(F.cross_entropy(output, target, reduction="sum") + 0.5, len(target))


class Teacher(nn.Module):
    """A network, and one whose parameters follow its own with each pass in training, as a mean teacher's do."""

    def __init__(self, *, rebinds: bool = False, is_copy: bool = False) -> None:
        super().__init__()
        self.student, self.rebinds = mlp(), rebinds
        self.teacher = (copy.deepcopy(self.student) if is_copy else mlp()).requires_grad_(False)

    def forward(self, x_BF: torch.Tensor) -> torch.Tensor:
        """Logits [B, classes]: of the student in training, of the teacher in evaluation."""
        if not self.training:
            return self.teacher(x_BF)
        with torch.no_grad():
            for slow, fast in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                if self.rebinds:
                    slow.data = 0.9 * slow.data + 0.1 * fast.data
                else:
                    slow.lerp_(fast, 0.1)
        return self.student(x_BF)


class Normalised(nn.Module):
    """Rows of the last weight are brought to length 1 before they are used: of many, some are off by a last bit."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.prototypes = mlp(), nn.Linear(CLASSES, 300, bias=False)

    def forward(self, x_BF: torch.Tensor) -> torch.Tensor:
        """Logits [B, classes]."""
        with torch.no_grad():
            self.prototypes.weight.copy_(nn.functional.normalize(self.prototypes.weight, dim=1))
        return self.prototypes(self.body(x_BF))
