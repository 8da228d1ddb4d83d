from __future__ import annotations

import copy
import math
import random
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from stoker.errors import BadJob
from stoker.jobs import Job, Loss, holdout
from stoker.jobs.fields import Fields
from stoker.jobs.objective import Objective
from stoker.loading.fields import not_by_sample
from stoker.loading.samples import Samples
from stoker.records import Coupling, Position
from stoker.stepping.coupling import (
    Agreement,
    at_first,
    compare_parts,
    coupling_by_types,
    find_coupling,
    unprobed,
)
from stoker.stepping.losses import TrainingObjective
from stoker.stepping.model import meta_model
from stoker.stepping.probe import CouplingProbe, probe_samples, working_probe
from stoker.stepping.step import Step
from stoker.zoo import GPT
from tests.stepping import models
from tests.stepping.driving import largest_difference, plan_of, source_of, train
from tests.stepping.models import (
    CLASSES,
    FEATURES,
    TOKENS,
    VOCAB,
    cnn,
    images,
    make_job,
    mlp,
    moe,
    sample_mean,
    samples_of,
    texts,
    token_mean,
    vectors,
)


def probed(job: Job) -> Coupling:
    """What the probe finds of a job."""
    return find_coupling(job, samples_of(job))


def weighted_by_class(weights: list[float]) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """A mean over samples by the weights of their classes, of unknown origin."""

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        weight = torch.tensor(weights, dtype=output.dtype)
        return nn.functional.cross_entropy(output, target, weight=weight)

    return loss


class LabelledItems(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """Samples by number, with their labels in `targets`."""

    def __init__(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        self.inputs, self.targets = inputs, targets.tolist()

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.inputs[index], self.targets[index]


class Unlabelled(LabelledItems):
    """The same, and the labels are in no attribute of a known name."""

    def __init__(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        self.inputs, self.pairs = inputs, targets.tolist()

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.inputs[index], self.pairs[index]


def gpt(dropout: float = 0.0) -> nn.Module:
    """A transformer of one block."""
    return GPT(layers=1, width=8, heads=2, context=TOKENS, vocab=VOCAB, dropout=dropout)


def text_job(model: object, **changed: object) -> Job:
    """A job over `texts`."""
    return make_job(model, **{"data": texts(), "loss": "token_cross_entropy", **changed})  # type: ignore[arg-type]


SEPARABLE = {
    "mlp": lambda: make_job(mlp),
    "layer norm": lambda: make_job(lambda: mlp(norm=nn.LayerNorm)),
    "cnn": lambda: make_job(cnn, data=images()),
    "group norm": lambda: make_job(lambda: cnn(lambda width: nn.GroupNorm(2, width)), data=images()),
    "instance norm": lambda: make_job(lambda: cnn(nn.InstanceNorm2d), data=images()),
    "frozen batch norm": lambda: make_job(models.FrozenNorm),
    "gpt": lambda: text_job(gpt),
    "gpt with dropout": lambda: text_job(lambda: gpt(0.2)),
    "gpt with masked tokens": lambda: text_job(gpt, data=texts(masked=0.5)),
    "lstm with a state in the default type": lambda: text_job(models.Recurrent),
    "mixture of experts with room for all": lambda: text_job(lambda: moe(factor=4.0)),
    "nn.Dropout": lambda: make_job(lambda: mlp(dropout=0.3)),
    "F.dropout and noise": lambda: make_job(models.FunctionalDropout),
    "scalar mean over samples": lambda: make_job(mlp, loss=sample_mean),
    "scalar mean of squares": lambda: make_job(
        lambda: nn.Linear(6, 6), data=(vectors()[0], vectors()[0]), loss=lambda out, y: (out - y).square().mean()
    ),
    "token mean without masks": lambda: text_job(gpt, loss=token_mean),
    "a gradient penalty": lambda: make_job(mlp, loss=models.gradient_penalty),
    "a gradient reversed on its way": lambda: make_job(lambda: models.OwnBackward(lambda gradient: -0.3 * gradient)),
    "a buffer that the first pass makes": lambda: make_job(models.MadeLater),
    "complex weights": lambda: make_job(models.ComplexNet),
    "a chance of nothing, drawn for a batch": lambda: make_job(lambda: models.LayerDrop(0.0)),
    "a draw for each in a loop": lambda: make_job(lambda: models.DrawForEach(FEATURES, CLASSES)),
    "a count of samples in Python": lambda: make_job(lambda: models.Counted(by_sample=True)),
    "notes that nothing reads": lambda: make_job(models.Notes),
    "class weights, per sample": lambda: make_job(
        mlp, loss=nn.CrossEntropyLoss(reduction="none", weight=torch.tensor([1.0, 2.0, 3.0, 4.0]))
    ),
}


@pytest.mark.parametrize("name", SEPARABLE)
def test_separable_jobs_are_cleared(name: str) -> None:
    """Whatever works on each sample by itself is separable, random draws and masks included."""
    coupling = probed(SEPARABLE[name]())
    assert (coupling.kind, coupling.group, coupling.causes) == ("separable", None, ())
    assert "agree with the whole's" in coupling.evidence


BATCH_NORM = {
    "in a cnn": (lambda: make_job(lambda: cnn(nn.BatchNorm2d), data=images()), 16, "2 BatchNorm2d"),
    "with groups": (lambda: make_job(lambda: mlp(norm=nn.BatchNorm1d), coupling_group=4), 4, "1 BatchNorm1d"),
    "passed twice": (lambda: make_job(models.Twice), 16, "1 BatchNorm1d"),
    "over flattened tokens": (
        lambda: text_job(lambda: models.NormOfTokens(time_first=False), coupling_group=4),
        4,
        "1 BatchNorm1d",
    ),
    "behind a gate that begins as zero": (
        lambda: make_job(lambda: models.Gated(mlp(norm=nn.BatchNorm1d))),
        16,
        "1 BatchNorm1d",
    ),
    "with a scalar mean over samples": (
        lambda: make_job(lambda: mlp(norm=nn.BatchNorm1d), loss=sample_mean),
        16,
        "1 BatchNorm1d",
    ),
}


@pytest.mark.parametrize("name", BATCH_NORM)
def test_batch_norm_is_found_and_counted(name: str) -> None:
    """Batch statistics are recognised as such, so that micro-batches of several groups stay legal."""
    make, group, cause = BATCH_NORM[name]
    coupling = probed(make())
    assert (coupling.kind, coupling.group, coupling.causes) == ("batch_norm", group, (cause,))


CHANGED_ON_ITS_WAY = "the backward pass: a hook or function clips or normalises gradients within it, or adds to them"
COUPLED = {
    "batch attention": (lambda: make_job(models.BatchAttention), "the model (BatchAttention)"),
    "attention behind a gate that begins as zero": (
        lambda: make_job(lambda: models.Gated(models.BatchAttention())),
        "BatchAttention 'inner'",
    ),
    "capacity 1.0": (lambda: text_job(moe), "MixtureOfExperts '1'"),
    "capacity 2.0": (lambda: text_job(lambda: moe(2.0)), "MixtureOfExperts '1'"),
    "capacity 3.0, which only copies of a sample exceed": (lambda: text_job(lambda: moe(3.0)), "MixtureOfExperts '1'"),
    "InfoNCE": (lambda: make_job(mlp, loss=models.info_nce), "the loss: its scalar is not a mean over samples"),
    "declared": (lambda: make_job(mlp, loss=Objective(models.info_nce, scope="batch")), "the loss"),
    "weighted by the batch's mean": (lambda: make_job(mlp, loss=models.weighted_by_batch), "the loss"),
    "weighted in its gradient alone": (
        lambda: make_job(mlp, loss=models.gradient_weighted_by_batch),
        "the gradient of the model or of the loss",
    ),
    "a gradient clipped on its way": (
        lambda: make_job(lambda: models.OwnBackward(lambda gradient: gradient.clamp(-1, 1))),
        CHANGED_ON_ITS_WAY,
    ),
    "a gradient normalised on its way": (
        lambda: make_job(lambda: models.OwnBackward(lambda gradient: gradient / gradient.norm(dim=1, keepdim=True))),
        CHANGED_ON_ITS_WAY,
    ),
    "noise in a gradient": (
        lambda: make_job(lambda: models.OwnBackward(lambda gradient: gradient + torch.randn_like(gradient))),
        CHANGED_ON_ITS_WAY,
    ),
    "the same behind dropout": (
        lambda: make_job(lambda: nn.Sequential(mlp(dropout=0.5), models.noisy_backward(CLASSES))),
        CHANGED_ON_ITS_WAY,
    ),
    "a gradient refused on its way if it is large": (
        lambda: make_job(lambda: models.OwnBackward(models.refuse_above(100.0))),
        "the backward pass: a hook or function refuses large gradients",
    ),
    "a gradient refused on its way": (
        lambda: make_job(lambda: models.OwnBackward(models.refuse_above(0.0))),
        "the backward pass",
    ),
    "a gradient clipped by its parameter's hook": (
        lambda: make_job(lambda: models.hooked_mlp("register_hook")),
        CHANGED_ON_ITS_WAY,
    ),
    "the same of a given module": (lambda: make_job(models.hooked_mlp("register_hook")), CHANGED_ON_ITS_WAY),
    "a gradient clipped after accumulation": (
        lambda: make_job(lambda: models.hooked_mlp("register_post_accumulate_grad_hook")),
        "the hook of 0.weight",
    ),
    "a mean that claims to be a sum": (lambda: make_job(mlp, loss=models.mean_as_sum), "the loss"),
    "the same under functional dropout": (
        lambda: make_job(models.FunctionalDropout, loss=models.mean_as_sum),
        "the loss",
    ),
    "a penalty in every sum": (lambda: make_job(mlp, loss=models.normalised_penalty), "the loss"),
    "mixing inside the model": (lambda: make_job(models.MixedUp), "the model (MixedUp)"),
    "mixing in the augmentation": (
        lambda: make_job(cnn, data=images(), augment=[lambda x, draw: x + 0.1 * x.flip(0)]),
        "the augmentation or preparation of inputs",
    ),
    "state hidden in Python": (
        lambda: make_job(models.Queue),
        "the attribute 'seen' of Queue, which every pass changes",
    ),
    "a count of passes in Python": (
        lambda: make_job(models.Counted),
        "the attribute 'counts' of Counted, which every pass changes",
    ),
    "one draw for a batch": (
        lambda: make_job(lambda: nn.Sequential(mlp(dropout=0.1), models.SharedDraw())),
        "a random draw that a batch shares (bernoulli_ in SharedDraw '1')",
    ),
    "one draw for a layer": (
        lambda: make_job(lambda: models.LayerDrop(0.05)),
        "a random draw that a batch shares (rand in LayerDrop)",
    ),
    "dropped weights": (
        lambda: make_job(lambda: models.WeightDrop(FEATURES, CLASSES)),
        "a random draw that a batch shares (bernoulli_ in WeightDrop)",
    ),
    "one draw of Python's for a batch": (
        lambda: make_job(models.DrawsElsewhere),
        "a random draw from Python's or NumPy's generator that a batch shares",
    ),
    "a capacity above the rounds' batches": (
        lambda: make_job(lambda: models.Limited(12)),
        "something in the model or the loss that shows in larger batches only",
    ),
    "spectral norm": (
        lambda: make_job(lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(6, 4))),
        "the model: a pass changes it",
    ),
    "a counter of passes": (
        lambda: make_job(models.Counter),
        "the buffer 'passes' of Counter, which every pass changes",
    ),
    "running statistics of samples": (
        lambda: make_job(lambda: cnn(lambda width: nn.InstanceNorm2d(width, track_running_stats=True)), data=images()),
        "the buffer '1.running_mean' of InstanceNorm2d, which every pass changes",
    ),
    "a fixed batch": (
        lambda: make_job(lambda: models.FixedBatch(16)),
        "the model or the loss: it takes only batches of 16 samples",
    ),
    "batch statistics in evaluation too": (
        lambda: make_job(lambda: mlp(norm=lambda width: nn.BatchNorm1d(width, track_running_stats=False))),
        "BatchNorm1d '1'",
    ),
}


@pytest.mark.parametrize("name", COUPLED)
def test_coupling_is_found_and_named(name: str) -> None:
    """Whatever mixes samples, keeps state between passes or does not add up is named, and leaves one micro-batch."""
    make, cause = COUPLED[name]
    coupling = probed(make())
    assert (coupling.kind, coupling.group, coupling.causes) == ("whole_group", 16, (cause,))
    assert coupling.legal_micro_batches(16) == (16,)


@pytest.mark.parametrize("masked", [0.5, 2 / 512])
def test_a_mean_over_tokens_is_told_as_such(masked: float) -> None:
    """A scalar mean over valid tokens is named, also where only two samples of many have masked tokens."""
    coupling = probed(text_job(gpt, data=texts(512, masked=masked), loss=token_mean))
    assert coupling.kind == "whole_group"
    assert coupling.causes[0].startswith("the loss: its scalar is a mean over valid tokens, of which groups")


def test_a_mean_by_class_weight_is_told_from_a_batch_loss() -> None:
    """A scalar divided by anything that differs between samples is recognised by how the means of groups combine."""
    (cause,) = probed(make_job(mlp, loss=weighted_by_class([1.0, 2.0, 3.0, 4.0]))).causes
    assert "of which samples have different amounts" in cause


@pytest.mark.parametrize("batch", [2, 16, 64])
@pytest.mark.parametrize("order", ["input first", "target first", "by item"])
@pytest.mark.parametrize("rare", [0.01, 0.003])
def test_a_mean_by_class_weight_is_found_however_rare_the_class(batch: int, order: str, rare: float) -> None:
    """Two classes, of which one is rare, in a loss that is not recognised: no composition of halves hides it."""
    inputs, _ = vectors(1000)
    targets = (torch.arange(1000) % round(1 / rare) == 7).long()
    loss = weighted_by_class([1.0, 50.0, 1.0, 1.0])
    job = make_job(mlp, data=(inputs, targets), loss=loss, batch=batch)
    if order == "target first":
        job = replace(job, data=(targets, inputs), fields=Fields(inputs=1, target=0))
    elif order == "by item":
        job = replace(job, data=LabelledItems(inputs, targets))
    coupling = probed(job)
    assert coupling.kind == "whole_group"
    assert coupling.causes[0].startswith("the loss")


@pytest.mark.parametrize("heavy", range(10))
def test_a_weight_of_any_one_class_is_found(heavy: int) -> None:
    """Of ten classes of unequal sizes, whichever of them it is."""
    inputs, _ = vectors(1000)
    targets = torch.full((1000,), 9)
    targets[:30:3] = torch.arange(10)
    weights = [50.0 if number == heavy else 1.0 for number in range(10)]
    job = make_job(lambda: nn.Linear(FEATURES, 10), data=(inputs, targets), loss=weighted_by_class(weights), batch=4)
    assert probed(job).kind == "whole_group"


@pytest.mark.parametrize(("is_slow", "largest"), [(True, 2), (False, 12)])
def test_a_slow_model_is_given_no_larger_batch_for_its_classes(is_slow: bool, largest: int) -> None:
    """Its activations of four rounds at once may not fit; the rarest class is still compared."""
    inputs, _ = vectors(1000)
    targets = torch.arange(1000) % 9
    targets[7] = 9
    sizes: list[int] = []

    def compared(heaviest: float) -> Agreement:
        loss = weighted_by_class([*[1.0] * 9, heaviest])

        def noting(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            sizes.append(len(output))
            return loss(output, target)

        job = make_job(lambda: nn.Linear(FEATURES, 10), data=(inputs, targets), loss=noting, batch=16)
        probe = working_probe(job, samples_of(job))
        probe = replace(probe, sizes=(1, 1), rounds=2, first=None) if is_slow else probe
        assert probe.is_slow == is_slow
        sizes.clear()
        return compare_parts(probe)

    assert compared(1.0).problem is None
    assert max(sizes) == largest
    assert compared(50.0).problem is not None


def test_a_parts_gradient_is_dropped_before_the_next_one_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a large model three of them in float64 would be the peak of a run's memory."""
    gradient_of, seen, alive = CouplingProbe.gradient_of, list[weakref.ref[torch.Tensor]](), list[int]()

    def noting(*arguments: Any, **named: Any) -> Any:
        alive.append(sum(tensor() is not None for tensor in seen))
        value, gradient = gradient_of(*arguments, **named)
        seen.extend(map(weakref.ref, gradient))
        return value, gradient

    monkeypatch.setattr(CouplingProbe, "gradient_of", noting)
    job = make_job(lambda: nn.Linear(FEATURES, 10))
    assert compare_parts(working_probe(job, samples_of(job))).problem is None
    assert alive[:3] == [0, 2, 2]  # when a multiple of the loss is begun, and the first part: the whole's alone
    assert len(alive) > 4
    assert not any(alive[3::3])  # of each whole batch and its two parts, when the second part begins


def test_a_mean_by_a_weight_among_the_samples_is_found() -> None:
    """A third entry weighs two samples of a thousand, and the target is not the last."""
    inputs, targets = vectors(1000)
    weights = torch.ones(1000)
    weights[[411, 732]] = 9.0

    def weighted(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        x_BF, y_B, w_B = batch
        return (w_B * nn.functional.cross_entropy(model(x_BF), y_B, reduction="none")).sum() / w_B.sum()

    assert probed(make_job(mlp, data=(inputs, targets, weights), loss=weighted)).kind == "whole_group"


@pytest.mark.parametrize("ignored", [-100, 3])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("kind", ["module", "function", "likelihood"])
def test_weighted_means_of_pytorch_are_sums_and_counts(kind: str, smoothing: float, ignored: int) -> None:
    """Its cross-entropies leave samples separable, and their sum over their count is what PyTorch gives for all."""
    weight = torch.tensor([1.0, 50.0, 3.0, 0.5], dtype=torch.float64)
    settings = {"weight": weight, "ignore_index": ignored}
    model = mlp
    if kind == "module":
        loss: Any = nn.CrossEntropyLoss(**settings, label_smoothing=smoothing)
    elif kind == "function":
        loss = partial(nn.functional.cross_entropy, **settings, label_smoothing=smoothing)
    else:
        loss, model = nn.NLLLoss(**settings), lambda: nn.Sequential(mlp(), nn.LogSoftmax(1))
    inputs, targets = vectors()
    targets[::5] = ignored
    coupling = probed(make_job(model, data=(inputs, targets), loss=loss))
    assert coupling.kind == "separable", coupling
    net = model().double()
    objective = TrainingObjective(make_job(model, loss=loss), dtype=torch.float64)
    value = objective.loss(net, (inputs.double(), targets), 64)
    torch.testing.assert_close(value.sum / value.count, loss(net(inputs.double()), targets))


def test_an_own_kind_of_a_loss_of_pytorch_is_taken_as_it_is() -> None:
    """What overrides `forward` is probed like any other, and so is what sums by itself."""

    class Doubled(nn.CrossEntropyLoss):
        def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:  # noqa: A002 - as PyTorch's
            return 2 * super().forward(input, target)

    assert probed(make_job(mlp, loss=Doubled(weight=torch.tensor([1.0, 2.0, 3.0, 4.0])))).kind == "whole_group"
    assert probed(make_job(mlp, loss=nn.CrossEntropyLoss(reduction="sum"))).kind == "whole_group"


@pytest.mark.parametrize("form", ["in memory", "items", "items held out"])
def test_the_pool_has_classes_that_few_samples_have(form: str) -> None:
    """One sample of 20,000, where the data or a dataset's attribute tell its class."""
    inputs, targets = torch.zeros(20_000, 1), torch.zeros(20_000, dtype=torch.int64)
    targets[12_345] = 1
    job = make_job(mlp, data=(inputs, targets) if form == "in memory" else LabelledItems(inputs, targets))
    if form == "items held out":
        job = replace(job, valid=holdout(0.001))
    assert probe_samples(job, samples_of(job), torch.float64).content[1].sum() == 1


@pytest.mark.parametrize(
    "labels",
    [["cat", "dog"], [{"boxes": 1}] * 64, [*[0] * 63, None], [[0], [1, 2]], torch.zeros(64, 2), 3],
    ids=["names of classes", "dicts", "one unknown", "ragged", "two a sample", "a number"],
)
@pytest.mark.parametrize("valid", [None, holdout(0.25)], ids=["whole", "held out"])
def test_labels_of_a_dataset_that_are_no_class_of_each_sample_are_left_alone(labels: Any, valid: Any) -> None:
    """An attribute of that name may hold anything; samples are then drawn as without it."""
    data = Unlabelled(*vectors())
    job = make_job(mlp, data=data, valid=valid)
    expected = probe_samples(job, samples_of(job), torch.float64).indices
    data.labels = labels  # type: ignore[attr-defined]
    assert probe_samples(job, samples_of(job), torch.float64).indices.tolist() == expected.tolist()


def test_a_property_of_a_dataset_is_not_read_for_its_labels() -> None:
    """It may decode every sample, or raise."""

    class Decoding(Unlabelled):
        @property
        def labels(self) -> list[int]:
            raise OSError("every file is read for these")

    job = make_job(mlp, data=Decoding(*vectors()))
    assert len(probe_samples(job, samples_of(job), torch.float64)) == 64


def test_every_cause_is_named() -> None:
    """Batch norm and a mean over tokens at once are both reported, and leave one micro-batch."""
    job = text_job(lambda: models.NormOfTokens(time_first=False), data=texts(masked=0.5), loss=token_mean)
    coupling = probed(job)
    assert coupling.kind == "whole_group"
    assert coupling.causes[0] == "1 BatchNorm1d"
    assert "mean over valid tokens" in coupling.causes[1]


@pytest.mark.parametrize(
    ("model", "data", "loss", "why"),
    [
        (models.Twice, vectors(), "cross_entropy", "the order of groups matters"),
        (lambda: models.NormOfTokens(time_first=True), texts(), "token_cross_entropy", "not what they are alone"),
    ],
    ids=["passed twice", "time first"],
)
def test_groups_that_one_micro_batch_cannot_hold_apart_go_alone(
    model: object, data: object, loss: str, why: str
) -> None:
    """Batch norm whose groups cannot be distinguished, or whose statistics need their order, takes one at a time."""
    coupling = probed(make_job(model, data=data, loss=loss, coupling_group=4))  # type: ignore[arg-type]
    assert (coupling.kind, coupling.group) == ("whole_group", 4)
    assert why in coupling.evidence


def test_a_capacity_that_the_tried_batches_stay_below_is_not_seen() -> None:
    """The probe's limit: a capacity exceeded only by batches of nearly one token; the evidence says what was tried."""

    class OneTokenOnly(nn.Module):
        """Drops tokens of an expert only where nearly all tokens of a batch choose it."""

        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.experts = nn.Embedding(VOCAB, 8), models.MixtureOfExperts(factor=3.9)
            self.last = nn.Linear(8, VOCAB)

        def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
            return self.last(self.experts(self.embedding(tokens_BT)))

    varied = torch.arange(64 * (TOKENS + 1)).reshape(64, -1) % VOCAB  # every sample uses many tokens
    coupling = probed(text_job(OneTokenOnly, data=(varied[:, :-1], varied[:, 1:])))
    assert coupling.kind == "separable"
    assert "4 rounds of 4 samples, float64" in coupling.evidence


def test_batch_norm_with_a_loss_that_does_not_add_up_goes_whole() -> None:
    """Where batch statistics are not all that is wrong, several groups in a micro-batch are not legal."""
    coupling = probed(make_job(lambda: mlp(norm=nn.BatchNorm1d), loss=models.mean_as_sum))
    assert (coupling.kind, coupling.causes) == ("whole_group", ("1 BatchNorm1d", "the loss"))


def test_model_that_does_not_repeat_itself_is_coupled() -> None:
    """Of a model whose loss changes from call to call nothing can be known."""
    coupling = probed(make_job(models.Moody))
    assert coupling.kind == "whole_group"
    assert "generators of its own" in coupling.causes[0]


def test_draws_that_cannot_be_silenced_leave_the_parts_uncompared() -> None:
    """Of a model that draws from Python for each sample the mixed difference is compared, and no more is said."""

    class ForEach(nn.Linear):
        def forward(self, x_BF: torch.Tensor) -> torch.Tensor:
            return super().forward(x_BF) * torch.tensor([[random.random()] for _ in x_BF], dtype=x_BF.dtype)

    coupling = probed(make_job(lambda: ForEach(FEATURES, CLASSES)))
    assert coupling.kind == "separable"
    assert "parts were not compared with the whole" in coupling.evidence


def test_part_that_is_not_finite_does_not_add_up() -> None:
    """A loss that only whole batches keep finite is not additive."""

    def last_of_a_kind(output: torch.Tensor, target: torch.Tensor) -> Loss:
        return Loss(output.sum() * (1.0 if len(output) == 8 else float("nan")), len(output))

    coupling = probed(make_job(mlp, loss=last_of_a_kind))
    assert (coupling.kind, coupling.causes) == ("whole_group", ("the loss",))


def test_noise_that_breaks_the_loss_is_left_out() -> None:
    """A model whose weights must stay positive is probed at its initial ones."""
    job = make_job(models.Logarithmic)
    noisy, initial = working_probe(job, samples_of(job)).models
    assert noisy is initial
    assert "agree with the whole's" in probed(job).evidence


@pytest.mark.parametrize("count", [2, 3, 5, 64])
def test_exchanged_halves_differ(count: int) -> None:
    """However few samples there are, every comparison puts other samples in a half's place."""
    job = make_job(mlp, data=vectors(count))
    pool = probe_samples(job, samples_of(job), torch.float64)
    for sizes in ((1, 1), (4, 4), (2, 3)):
        for quad in islice(pool.quads(sizes, 0), 12):
            assert quad.first.tolist() != quad.other_first.tolist()
            assert quad.second.tolist() != quad.other_second.tolist()


class CarriedState(nn.Module):
    """A recurrent layer whose state goes on in the next batch, as a tuple that is not there before the first."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(models.FEATURES, 3)
        self.state: tuple[torch.Tensor, torch.Tensor] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Steps [T, FEATURES] of one sequence to scores [T, 3]."""
        y, (hidden, cell) = self.layer(x, self.state)
        self.state = hidden.detach(), cell.detach()
        return torch.as_tensor(y)


def test_state_that_the_first_pass_makes_is_named_before_a_run_that_begins_at_once() -> None:
    """It is looked for after a pass, and in tuples too: the run would say that its resume is bit-equal."""
    job = make_job(CarriedState)
    for look in (at_first, find_coupling):
        assert look(job, samples_of(job)).unsaved == ("the attribute 'state' of CarriedState",)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (mlp, ()),
        (models.Counted, ()),
        (models.Notes, ()),
        (models.Counter, ()),
        (models.Queue, ("the attribute 'seen' of Queue",)),
        (models.Memory, ("the attribute 'mean' of Memory",)),
    ],
)
def test_state_that_no_checkpoint_holds_is_named(make: object, expected: tuple[str, ...]) -> None:
    """Tensors in attributes that the next pass reads; not plain numbers, which are kept, nor what is only noted."""
    assert probed(make_job(make)).unsaved == expected  # type: ignore[arg-type]


def test_the_largest_batch_that_was_tried_is_said() -> None:
    """The job's own where that is cheap."""
    coupling = probed(make_job(mlp))
    assert coupling.tried == 16
    assert "and a batch of 16" in coupling.evidence


def test_the_model_is_made_once_for_the_probe() -> None:
    """However many attempts it takes."""
    made: list[int] = []

    def make() -> nn.Module:
        made.append(1)
        return nn.Linear(5, 4)

    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        probed(make_job(make))
    assert len(made) == 1


def test_two_samples_are_enough() -> None:
    """Coupling shows even where there are no more samples than one exchange needs."""
    job = make_job(lambda: mlp(norm=nn.BatchNorm1d), data=vectors(2), batch=2)
    assert probed(job).kind == "batch_norm"


@pytest.mark.parametrize("changed", [{"batch": 1}, {"data": vectors(1)}], ids=["batch of one", "one sample"])
def test_an_update_of_one_sample_is_separable(changed: dict[str, object]) -> None:
    """Where no two samples ever meet, there is nothing to couple."""
    assert probed(make_job(lambda: cnn(nn.BatchNorm2d), **{"data": images(), **changed})).kind == "separable"


def test_loss_that_is_never_finite_is_coupled() -> None:
    """A loss of which nothing can be said is not taken for separable."""
    coupling = probed(make_job(mlp, loss=lambda output, target: output.sum(1) * float("nan")))
    assert coupling.kind == "whole_group"
    assert "finite in none" in coupling.evidence


def test_models_in_fp32_arithmetic_are_judged_by_its_rounding() -> None:
    """Layers in fp32 inside a model of float64 are separable, and batch attention inside one is found."""

    class InFloat(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner, self.last = inner.float(), nn.Linear(4, 4)

        def _apply(self, function: object, *args: object) -> InFloat:
            super()._apply(function, *args)
            self.inner.float()
            return self

        def forward(self, x_BF: torch.Tensor) -> torch.Tensor:
            return self.last(self.inner(x_BF.float()).to(self.last.weight.dtype))

    assert probed(make_job(lambda: InFloat(mlp()))).kind == "separable"
    assert probed(make_job(lambda: InFloat(models.BatchAttention()))).causes == ("BatchAttention 'inner'",)


def test_model_that_insists_on_fp32_is_probed_in_it() -> None:
    """A model with tensors of a fixed type is probed in fp32 instead of refused."""

    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(6, 4)

        def forward(self, x_BF: torch.Tensor) -> torch.Tensor:
            return self.last(x_BF) @ torch.eye(4, dtype=torch.float32)

    coupling = probed(make_job(Fixed))
    assert coupling.kind == "separable"
    assert "float32" in coupling.evidence


BEFORE_THE_FIRST_UPDATE = pytest.mark.parametrize("check", [find_coupling, at_first])


@BEFORE_THE_FIRST_UPDATE
@pytest.mark.parametrize(
    ("count", "batch", "group"), [(17, 16, None), (16, 5, 4), (21, 10, 4)], ids=["rest", "every batch", "rest's rest"]
)
def test_group_of_one_sample_is_refused_before_training(
    count: int, batch: int, group: int | None, check: Callable[[Job, Samples], object]
) -> None:
    """Batch norm over vectors cannot take statistics of one sample: said at once, not at the end of an epoch."""
    job = make_job(lambda: mlp(norm=nn.BatchNorm1d), data=vectors(count), batch=batch, coupling_group=group)
    with pytest.raises(BadJob, match=f"{count} samples in batches of {batch}.* leave 1 at the end"):
        check(job, samples_of(job))


@BEFORE_THE_FIRST_UPDATE
def test_fixed_batch_refuses_a_ragged_epoch(check: Callable[[Job, Samples], object]) -> None:
    """A model of one batch size is refused where the last batch of an epoch is smaller."""
    job = make_job(lambda: models.FixedBatch(48), batch=48)
    with pytest.raises(BadJob, match="64 samples in batches of 48 leave 16 at the end"):
        check(job, samples_of(job))


@BEFORE_THE_FIRST_UPDATE
def test_what_the_model_raises_is_passed_on(check: Callable[[Job, Samples], object]) -> None:
    """Where no attempt works, the user sees what the model itself raised."""
    job = make_job(lambda: nn.Linear(5, 4))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        check(job, samples_of(job))


@BEFORE_THE_FIRST_UPDATE
def test_sample_that_cannot_be_fetched_is_the_jobs_fault(check: Callable[[Job, Samples], object]) -> None:
    """Data that raise are reported as such."""

    class Broken(torch.utils.data.Dataset[object]):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> object:
            raise OSError("the file is gone")

    job = make_job(mlp, data=Broken())
    with pytest.raises(BadJob, match="the file is gone"):
        check(job, samples_of(job))


def test_a_usable_job_is_looked_at_in_few_passes() -> None:
    """Ten samples at most go through the model before the first update, in the type that it is trained in."""
    seen: list[tuple[int, torch.dtype]] = []

    class Watched(nn.Linear):
        def forward(self, x_BF: torch.Tensor) -> torch.Tensor:
            seen.append((len(x_BF), self.weight.dtype))
            return super().forward(x_BF)

    for dtype in (torch.float32, torch.float64):
        job = make_job(lambda dtype=dtype: Watched(FEATURES, CLASSES).to(dtype))
        assert at_first(job, samples_of(job)).notices == ()
        assert seen == [(8, dtype)]
        seen.clear()


def test_a_job_of_any_type_is_usable() -> None:
    """Whatever the probe can tell the coupling of can be trained: a fixed batch, one sample, a module of no copies."""
    for job in (make_job(lambda: models.FixedBatch(16)), make_job(mlp, batch=1), make_job(models.Moody)):
        assert at_first(job, samples_of(job)).notices == ()


def test_probabilities_for_scores_are_noticed_before_the_first_update() -> None:
    """The probable mistake that `find_coupling` names."""
    job = make_job(lambda: nn.Sequential(mlp(), nn.Softmax(1)))
    (notice,) = at_first(job, samples_of(job)).notices
    assert "ends in softmax" in notice
    assert probed(job).notices == (notice,)


def test_entries_that_nothing_is_given_are_noticed() -> None:
    """A mask between input and target, which by default goes nowhere; not where the job names its inputs."""
    inputs, labels = vectors()
    data = (inputs, torch.ones_like(inputs), labels)
    for given in (data, list(zip(*data, strict=True))):
        job = make_job(mlp, data=given)
        (notice,) = at_first(job, samples_of(job)).notices
        assert "entry 1 of the samples' 3 is not used" in notice
    for named in (make_job(mlp, data=data, fields=Fields(inputs=0)), make_job(mlp, data=data, loss=of_batch)):
        assert at_first(named, samples_of(named)).notices == ()


def of_batch(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> Loss:
    """A loss that is handed all entries."""
    losses = nn.functional.cross_entropy(model(batch[0]), batch[-1], reduction="none")
    return Loss(losses.sum(), len(losses))


@pytest.mark.parametrize("check", [find_coupling, at_first])
def test_buffers_that_no_checkpoint_holds_are_named(check: Callable[[Job, Samples], Coupling]) -> None:
    """A buffer that is not persistent and counts passes; not a table that the first pass fills, nor a kept buffer."""
    job = make_job(models.Unkept)
    assert check(job, samples_of(job)).unsaved == ("the buffer 'passes' of Unkept (persistent=False)",)
    for model in (models.Counter, models.MadeLater):
        kept = make_job(model)
        assert check(kept, samples_of(kept)).unsaved == ()


@pytest.mark.parametrize("rebinds", [False, True])
def test_parameters_that_each_pass_moves_keep_a_batch_whole(rebinds: bool) -> None:
    """No buffer has changed, and no loss: parts of a batch would move a mean teacher as often as there are parts."""
    found = probed(make_job(partial(models.Teacher, rebinds=rebinds)))
    assert (found.kind, found.group) == ("whole_group", 16)
    assert found.causes == ("the parameter 'teacher.0.weight', which each pass changes",)


def test_parameters_that_are_normalised_in_place_leave_samples_separable() -> None:
    """The second part of a batch finds them as the first has left them."""
    assert probed(make_job(models.Normalised)).kind == "separable"


def test_a_count_that_nothing_reads_leaves_samples_separable() -> None:
    """As functions of differential equations keep one; it counts passes, however many samples they have."""
    assert probed(make_job(models.Evaluations)).kind == "separable"


READS: dict[str, Callable[..., object]] = {
    "compared": lambda model, _: model.nfe > 1000,
    "every so many": lambda model, _: isinstance(model.nfe, int) and model.nfe % 100,
    "a range": lambda model, _: range(model.nfe),
    "a factor": lambda model, x_BC: x_BC * model.nfe,
    "a summand": lambda model, x_BC: x_BC + model.nfe,
    "an argument": lambda model, x_BC: torch.full_like(x_BC, model.nfe),
    "in evaluation": lambda model, _: model.training or f"{model.nfe}",
    "kept": lambda model, _: setattr(model, "last_seen", [model.nfe]),
    "backward": lambda model, x_BC: x_BC.requires_grad and x_BC.register_hook(lambda above: above * (model.nfe > -1)),
}


@pytest.mark.parametrize("way", READS)
def test_a_count_that_is_read_keeps_a_batch_whole(way: str) -> None:
    """Also where it moves nothing as yet: what it will do after a thousand passes no probe can see."""
    coupling = probed(make_job(partial(models.Evaluations, READS[way])))
    assert coupling.kind == "whole_group"
    assert "which every pass changes" in coupling.causes[0]


def test_tensors_in_attributes_are_named_before_the_first_update() -> None:
    """A run that begins at once is told, too, that a pass hands a tensor to the next which no checkpoint holds."""
    job = make_job(models.Queue)
    assert at_first(job, samples_of(job)).unsaved == ("the attribute 'seen' of Queue",)


@pytest.mark.parametrize("loss", [nn.BCELoss(), partial(nn.functional.binary_cross_entropy, reduction="none")])
def test_probabilities_that_an_accuracy_of_logits_would_all_count_as_positive_are_noticed(loss) -> None:
    """None is below 0; of logits nothing is said."""
    inputs, labels = vectors()

    def notices(last: nn.Module, loss) -> list[str]:
        model = lambda: nn.Sequential(nn.Linear(FEATURES, 1), last, nn.Flatten(0))  # noqa: E731
        job = make_job(model, data=(inputs, (labels > 0).float()), loss=loss, metrics=["binary_accuracy"])
        return [
            notice for notice in at_first(job, samples_of(job)).notices if "binary_accuracy counts logits" in notice
        ]

    class OfLogits(nn.BCELoss):
        def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:  # noqa: A002 - as the base has it
            return super().forward(input.sigmoid(), target)

    assert len(notices(nn.Sigmoid(), loss)) == 1
    assert notices(nn.Identity(), "binary_cross_entropy") == []
    assert notices(nn.Identity(), OfLogits()) == []


@pytest.mark.parametrize("reduction", ["sum", "mean", "none"])
def test_a_scalar_that_is_a_sum_over_the_batch_is_noticed(reduction: str) -> None:
    """What is reported of held-out data would depend on the size of the batches that they are evaluated in."""
    inputs, labels = vectors()

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return nn.functional.mse_loss(model(batch[0])[:, 0], batch[1], reduction=reduction)

    data = (inputs, labels.float())
    job = make_job(mlp, data=data, valid=data, loss=loss, metrics=[])
    assert ["sum over a batch" in notice for notice in at_first(job, samples_of(job)).notices] == [True] * (
        reduction == "sum"
    )


def test_an_infinite_mean_is_taken_for_no_sum() -> None:
    """Infinite losses of two halves add up to that of the whole, whatever they are."""
    inputs, labels = vectors()

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return (model(batch[0]) ** 2).mean() + math.inf

    job = make_job(mlp, data=(inputs, labels), valid=(inputs, labels), loss=loss, metrics=[])
    assert at_first(job, samples_of(job)).notices == ()


def test_labels_that_an_accuracy_would_count_as_wrong_are_noticed() -> None:
    """A function that leaves 255 out does not say so, unless by its ignore_index."""
    inputs, labels = vectors()
    labels = labels.where(torch.arange(len(labels)) % 3 > 0, 255)

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output, target, ignore_index=255)

    for metrics, is_noticed in ((["accuracy"], True), ([lambda o, _: o.mean(1)], False)):
        job = make_job(mlp, data=(inputs, labels), loss=loss, metrics=metrics)
        notices = at_first(job, samples_of(job)).notices
        named = ["such as 255, and accuracy counts them as wrong" in notice for notice in notices]
        assert named == [True] * is_noticed
    loss.ignore_index = 255  # type: ignore[attr-defined]
    job = make_job(mlp, data=(inputs, labels), loss=loss, metrics=["accuracy"])
    assert at_first(job, samples_of(job)).notices == ()


class InAList(nn.Module):
    """A network whose first layer PyTorch does not see."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.last = [nn.Linear(FEATURES, 8)], nn.Linear(8, CLASSES)

    def forward(self, x_BF: torch.Tensor) -> torch.Tensor:
        return self.last(self.layers[0](x_BF).relu())


def test_tensors_that_will_not_be_trained_are_noticed() -> None:
    """Modules in a list, and tensors that a loss has of its own; not inputs that derivatives are taken of."""
    (notice,) = at_first(make_job(InAList), samples_of(make_job(InAList))).notices
    assert "2 tensors that are no parameters of InAList (of shape [" in notice
    scale = torch.zeros((), requires_grad=True)

    def scaled(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output, target, reduction="none") * scale.exp()

    (notice,) = at_first(make_job(mlp, loss=scaled), samples_of(make_job(mlp, loss=scaled))).notices
    assert "1 tensors that are no parameters of Sequential (of shape [])" in notice

    def smooth(model: Any, batch: Any) -> Loss:
        inputs = batch[0].requires_grad_()
        output = model(inputs)
        (slope,) = torch.autograd.grad(output.sum(), inputs, create_graph=True)
        return Loss(slope.square().sum() + output.square().sum(), len(output))

    assert at_first(make_job(mlp, loss=smooth), samples_of(make_job(mlp, loss=smooth))).notices == ()


@pytest.mark.parametrize("group", [None, 4])
def test_a_group_goes_whole_until_samples_are_compared(group: int | None) -> None:
    """One micro-batch is legal, and it is so under the coupling that is found later; a declared one is reported."""
    for make in (mlp, lambda: mlp(norm=nn.BatchNorm1d), models.BatchAttention):
        job = make_job(make, coupling_group=group)
        assumed = unprobed(job)
        (size,) = assumed.legal_micro_batches(16)
        assert (assumed.kind, size) == ("whole_group", group or 16)
        assert probed(job).problem_with(size, 16) is None
        assert "not been compared" in assumed.evidence
    assert "declared" in unprobed(make_job(mlp, loss=Objective("cross_entropy", scope="batch"))).evidence


def test_the_probe_leaves_the_job_as_it_was() -> None:
    """A module given as the model keeps its weights, buffers and mode."""
    module = mlp(norm=nn.BatchNorm1d).eval()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    probed(make_job(module))
    assert not module.training
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())


def test_the_probe_finds_the_same_again() -> None:
    """Samples, weights and draws of the probe are keyed: two probes of one job agree in every figure."""
    assert probed(text_job(moe)) == probed(text_job(moe))


def by_types(job: Job) -> Coupling:
    """What is known of a model that is too large to be run."""
    return coupling_by_types(job, meta_model(job), "its weights take 4 TiB")


def test_without_a_probe_batch_norm_couples_a_batch_or_a_group() -> None:
    """The norms are counted on the outline, and the evidence says that nothing was run."""
    job = make_job(lambda: mlp(norm=nn.BatchNorm1d))
    found = by_types(job)
    assert (found.kind, found.group, found.causes) == ("batch_norm", 16, ("1 BatchNorm1d",))
    assert "not probed: its weights take 4 TiB" in found.evidence
    assert by_types(make_job(job.model, coupling_group=4)).group == 4


def test_without_a_probe_other_models_are_taken_to_be_separable() -> None:
    """As far as types tell."""
    found = by_types(make_job(lambda: mlp(norm=nn.LayerNorm)))
    assert (found.kind, found.group, found.causes) == ("separable", None, ())
    assert "by the types of its modules only" in found.evidence


def test_without_a_probe_a_declared_coupling_counts() -> None:
    """A loss over the batch couples, whatever the modules are."""
    found = by_types(make_job(mlp, loss=Objective("cross_entropy", scope="batch")))
    assert (found.kind, found.causes) == ("whole_group", ("the loss",))


@pytest.mark.parametrize("norm", [nn.BatchNorm1d, nn.LayerNorm])
def test_types_and_probe_agree_on_ordinary_models(norm: type[nn.Module]) -> None:
    """Where both can be had, kind and group are the same."""
    job = make_job(lambda: mlp(norm=norm))
    told, found = by_types(job), probed(job)
    assert (told.kind, told.group, told.causes) == (found.kind, found.group, found.causes)


@pytest.mark.parametrize(("width", "expected"), [(8, {1}), (100_000, {3})], ids=["light", "heavy"])
@pytest.mark.parametrize("check", [find_coupling, at_first])
def test_a_light_model_is_probed_on_one_thread(
    width: int, expected: set[int], check: Callable[[Job, Samples], object]
) -> None:
    """Threads that wait for each other cost more than they save; a model of much work has all, and so have others."""
    seen: set[int] = set()

    class Watched(nn.Linear):
        def forward(self, x_BF: torch.Tensor) -> torch.Tensor:
            seen.add(torch.get_num_threads())
            return super().forward(x_BF[:, :FEATURES])

    inputs, targets = vectors()
    job = make_job(lambda: Watched(FEATURES, width), data=(inputs.repeat(1, 4000), targets))
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        check(job, samples_of(job))
        assert (seen, torch.get_num_threads()) == (expected, 3)
    finally:
        torch.set_num_threads(before)


class Graphs(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Graphs without edges: 1 to 5 nodes [N, 3], and their number of nodes."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        nodes = torch.arange(3.0 * (1 + index % 5)).reshape(-1, 3)
        return nodes, torch.tensor(float(len(nodes)))


def end_to_end(graphs: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The nodes of all graphs in one tensor, with the graph of each node."""
    nodes, sizes = zip(*graphs, strict=True)
    graph = torch.repeat_interleave(torch.arange(len(nodes)), torch.tensor([len(own) for own in nodes]))
    return {"nodes": torch.cat(nodes), "graph": graph, "size": torch.stack(sizes)}


def of_graphs(model: nn.Module, batch: dict[str, torch.Tensor]) -> Loss:
    """Squared errors of the sums over each graph's nodes."""
    sums = torch.zeros(len(batch["size"]), 1, dtype=batch["size"].dtype).index_add(
        0, batch["graph"], model(batch["nodes"])
    )
    return Loss((sums[:, 0] - batch["size"]).square().sum(), len(sums))


def test_batches_that_a_collate_function_makes_of_graphs_go_whole() -> None:
    """They have no row for each graph, so a part of one would have the nodes of all: what is not by sample is named."""
    job = make_job(lambda: nn.Linear(3, 1), data=Graphs(), loss=of_graphs, fields=Fields(collate=end_to_end))
    for look in (find_coupling, at_first):
        found = look(job, samples_of(job))
        assert (found.kind, found.group) == ("whole_group", 16)
        assert found.causes == ("the collate function",)
        assert found.evidence == "its batches cannot be cut: 'nodes', 'graph' have not one row for each sample"
    with pytest.raises(BadJob, match=r"coupling_group=4.* cannot be cut: 'nodes', 'graph' have not one row"):
        find_coupling(replace(job, coupling_group=4), samples_of(job))
    stepwise = Step(job, plan_of(16), found, dtype=torch.float64)
    model = copy.deepcopy(stepwise.model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(job, stepwise, 5)  # the third of 8 graphs
    for batch in islice(source_of(job, stepwise).batches(Position(), 5), 5):
        optimizer.zero_grad()
        loss = of_graphs(model, batch.cut(0, batch.size))
        (loss.sum / loss.count).backward()
        optimizer.step()
    assert largest_difference(stepwise, model.state_dict()) < 1e-9


@pytest.mark.parametrize(
    "collate",
    [
        lambda items: {"x": nn.utils.rnn.pad_sequence([x for x, _ in items], batch_first=True), "y": len(items)},
        lambda items: ([x for x, _ in items], torch.stack([y for _, y in items])),
        lambda items: (torch.stack([x[0] for x, _ in items]), [{"all": x} for x, _ in items], torch.ones(3)),
    ],
    ids=["padded", "lists", "shared"],
)
def test_batches_with_a_row_or_an_item_for_each_sample_are_none_of_these(collate: Any) -> None:
    """Padded tensors, lists of tensors of any length, and what all samples share are cut."""
    job = make_job(lambda: nn.Linear(3, 1), data=Graphs(), loss=of_graphs, fields=Fields(collate=collate))
    few, more = (samples_of(job).fetch(np.arange(count), 0) for count in (7, 8))
    assert not not_by_sample(few, 7, more, 8)


def test_what_grows_by_padding_alone_stays_whole_in_parts() -> None:
    """A mask [T, T] and positions [T] beside samples [B, T] fit every part of the batch; nodes of graphs do not."""
    few, more = (
        {"ids": torch.zeros(size, length), "mask": torch.zeros(length, length), "at": torch.zeros(length)}
        for size, length in ((7, 12), (8, 15))
    )
    assert not_by_sample(few, 7, more, 8) == []
    few["nodes"], more["nodes"] = torch.zeros(30, 12), torch.zeros(34, 15)
    assert not_by_sample(few, 7, more, 8) == ["'nodes'"]


def test_batches_with_the_time_first_are_not_by_sample() -> None:
    """Sequences padded as recurrent layers take them by default: the first dimension is the longest one's."""
    few, more = (torch.zeros(time, count, 2) for time, count in ((5, 7), (6, 8)))
    assert not_by_sample((few, torch.zeros(7)), 7, (more, torch.zeros(8)), 8) == ["0"]
