"""Captured passes: the same weights as ordinary ones, and no wrong ones without a word."""

from __future__ import annotations

import contextlib
import functools
import random

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import stoker
from stoker.devices import attached_cpu
from stoker.errors import RunFailed
from stoker.loading.batches import BatchSource
from stoker.loading.datasets import datasets_of
from stoker.records import Coupling, Plan, Position
from stoker.stepping import capture, graph_interpreter
from stoker.stepping.step import Step
from stoker.testing.simulated_gpu import is_simulated
from tests.stepping.models import Normalised, Teacher, make_job

SEPARABLE = Coupling(kind="separable", group=None, causes=(), evidence="known")
BATCH = 8


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 12), nn.ReLU(), nn.Dropout(0.2), nn.Linear(12, 3))


def _convolutional() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(24, 3))


def _squares(model: nn.Module) -> torch.Tensor:
    return sum(parameter.square().sum() for parameter in model.parameters())


def _job(model=_mlp, **settings) -> stoker.Job:
    generator = torch.Generator().manual_seed(0)
    data = (torch.rand((36, 1, 4, 4), generator=generator), torch.randint(0, 3, (36,), generator=generator))
    given = {
        "model": model,
        "data": data,
        "loss": "cross_entropy",
        "optimizer": stoker.SGD(lr=0.1, momentum=0.9),
        "batch": BATCH,
        "until": stoker.epochs(2),
        **settings,
    }
    return stoker.Job(**given)


def _trained(job: stoker.Job, updates: int, device: str = "cpu", **settings) -> Step:
    plan = Plan(device=device, micro_batch=BATCH, **settings)
    data = datasets_of(job)
    step = Step(job, plan, SEPARABLE)
    source = BatchSource(data.train, step.pipeline(data.train, augmented=True), data.extent(job), job.seed, plan)
    for update, batch in enumerate(source.batches(Position(), updates)):
        step.update(batch, update, update / updates)
    return step


def test_what_recording_takes_is_not_kept_by_the_heap(monkeypatch) -> None:
    """The pass is recorded and first compared in a renewed heap that is kept small, and repeated outside of it."""
    is_small, told = [False], []

    @contextlib.contextmanager
    def kept_small():
        is_small[0] = True
        yield
        is_small[0] = False

    ordinary = capture.CapturedPass._pass

    def noting(self: capture.CapturedPass, content: object) -> object:
        told.append(is_small[0])
        return ordinary(self, content)

    monkeypatch.setattr(capture.CapturedPass, "_pass", noting)
    monkeypatch.setattr(capture, "heap_kept_small", kept_small)
    monkeypatch.setattr(capture, "renew_heap", lambda: told.append("renewed"))
    _trained(_job(), 3, captured=True)
    assert told == ["renewed", True, True, False]  # recorded, compared, and compared again at every thousandth update


def _states_differ(one: Step, other: Step) -> list[str]:
    theirs = other.model.state_dict()
    return [name for name, value in one.model.state_dict().items() if not torch.equal(value, theirs[name])]


@pytest.mark.parametrize("settings", [{}, {"precision": "bf16"}, {"memory_format": "channels_last"}])
@pytest.mark.parametrize(
    "job",
    [
        _job(),
        _job(_convolutional),
        _job(clip_norm=0.1, loss=stoker.Objective("cross_entropy", penalty=_squares)),
        _job(loss="mse", data=(torch.rand(36, 1, 4, 4), torch.rand(36, 3))),
        _job(optimizer=stoker.AdamW(lr=1e-2), loss=stoker.Objective("cross_entropy", label_smoothing=0.1), average=0.9),
    ],
    ids=["dropout", "batch norm", "clipped", "regression", "adam"],
)
def test_weights_and_buffers_are_those_of_ordinary_passes(job, settings) -> None:
    """Over two epochs with a smaller last batch, draws inside the model and running statistics: the same bits."""
    assert not _states_differ(_trained(job, 10, captured=True, **settings), _trained(job, 10, **settings))


def test_without_pytorchs_interpreter_operations_are_called_from_python(monkeypatch) -> None:
    """Its builder is not public: the same weights once it is gone."""
    job = _job()
    ours = _trained(job, 10, captured=True)
    monkeypatch.setattr(graph_interpreter, "_IS_THERE", False)
    assert not _states_differ(ours, _trained(job, 10, captured=True))


def test_what_stands_for_nothing_is_not_repeated() -> None:
    """A matrix transposed twice, as gradients of linear layers are, and `detach`; one transposed once stays."""
    graph = make_fx(lambda x: (x.t().t().detach() * 2, x.t() + 1))(torch.randn(2, 3))
    capture._simplify(graph)
    targets = [node.target for node in graph.graph.nodes]
    assert targets.count(torch.ops.aten.t.default) == 1
    assert torch.ops.aten.detach.default not in targets
    x = torch.randn(2, 3)
    doubled, more = graph(x)
    assert torch.equal(doubled, 2 * x)
    assert torch.equal(more, x.t() + 1)


def test_ignored_targets_are_not_counted() -> None:
    """The count of valid targets follows the values of each batch, which the capture saw only once."""
    generator = torch.Generator().manual_seed(1)
    targets = torch.randint(0, 3, (36,), generator=generator)
    targets[::3] = -100
    job = _job(data=(torch.rand((36, 1, 4, 4), generator=generator), targets))
    ours, plain = (_trained(job, 10, captured=captured) for captured in (True, False))
    for name, value in ours.model.state_dict().items():
        torch.testing.assert_close(value, plain.model.state_dict()[name], rtol=1e-5, atol=1e-7)


class _Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.linear(x.flatten(1))
        return out if out.sum() > 0 else -out


class _Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.passes = nn.Linear(16, 3), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        return self.linear(x.flatten(1))


class _Drawing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.flatten(1)) * random.random()


@pytest.mark.parametrize("model", ["_Branching", "_Counting", "_Drawing", "_Replacing"])
def test_a_model_whose_path_may_change_is_refused(model) -> None:
    """Branches on values, state in Python, other generators: said at the first update, with the remedy."""
    with pytest.raises(RunFailed, match="cannot be captured") as problem:
        _trained(_job(globals()[model]), 1, captured=True)
    assert "captured false" in str(problem.value.remedy)


class _Annealed:
    """A loss that counts its calls and weighs a term by the count."""

    calls = 0

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        entropy = nn.functional.cross_entropy(output, target, reduction="none")
        return entropy + min(1.0, self.calls / 10_000) * output.square().mean(1)


PASSES = 0


def _counting_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    global PASSES  # noqa: PLW0603 - as users do
    PASSES += 1
    return nn.functional.cross_entropy(output, target, reduction="none") * (1 + PASSES)


def test_a_loss_that_changes_values_is_refused_and_left_as_it_was() -> None:
    """In attributes of its own, or outside it: recording them would fix the loss at its first value."""
    annealed = _Annealed()
    for loss in (annealed, _counting_loss):
        with pytest.raises(RunFailed, match="cannot be captured: the model or the loss changes Python values"):
            _trained(_job(loss=loss), 1, captured=True)
    assert (annealed.calls, PASSES) == (0, 0)


class _CountingLater(_Counting):
    """It counts its passes once `starts` is set."""

    starts = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += self.starts
        return self.linear(x.flatten(1))


def test_a_model_that_changes_values_later_is_found_when_passes_are_compared() -> None:
    """Its gradient is the ordinary one, but what it counts would no longer be counted."""
    step = _trained(_job(_CountingLater), 3, captured=True)
    step.check()
    step.model.starts = True
    with pytest.raises(RunFailed, match="changes Python values"):
        step.check()
    assert step.model.passes == 0


class _Recurrent(nn.Module):
    """oneDNN's LSTM keeps what its backward pass reads only where gradients are enabled."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(4, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.lstm(x.squeeze(1))[0][:, -1])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_an_lstm_is_repeated_below_autograd(precision) -> None:
    """Interpreted, gradients stay enabled, so that its backward pass finds what it reads."""
    if precision == "bf16" and "bf16" not in attached_cpu().fast_dtypes:
        pytest.skip("oneDNN has no bf16 LSTM on this CPU, in plain PyTorch either")
    captured = _trained(_job(_Recurrent), 5, captured=True, precision=precision)
    assert not _states_differ(captured, _trained(_job(_Recurrent), 5, precision=precision))


def test_what_cannot_be_repeated_is_refused(monkeypatch) -> None:
    """An operation that fails when it is repeated is a pass that cannot be captured, not an error of the user's."""
    monkeypatch.setattr(graph_interpreter, "below_autograd", torch.no_grad)
    monkeypatch.setattr(graph_interpreter, "_IS_THERE", False)
    with pytest.raises(RunFailed, match="cannot be captured"):
        _trained(_job(_Recurrent), 5, captured=True, precision="bf16")


def test_a_branch_on_values_is_told_with_its_line() -> None:
    """In words about the model, not about PyTorch's tracing."""
    with pytest.raises(RunFailed, match=r"depends on the values of a tensor, at test_capture\.py:\d+ \(`return out if"):
        _trained(_job(_Branching), 1, captured=True)


@pytest.mark.parametrize("every", [3, 1000])
def test_what_changes_later_is_found(monkeypatch, every: int) -> None:
    """A factor outside the model, which the capture saw as it was at first: now and then, and before a checkpoint."""
    monkeypatch.setattr(capture, "CHECK_EVERY", every)
    factor = [1.0]

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x.flatten(1)) * factor[0]

    job = _job(Scaled, schedule=lambda progress: factor.__setitem__(0, 1 + progress) or 1.0)
    with pytest.raises(RunFailed, match=r"at update \d+ the captured pass is"):
        _trained(job, 8, captured=True).check()


class _Replacing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 3)
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().flatten(1).mean(0)
        return self.linear(x.flatten(1))


def test_plain_values_of_a_batch_are_part_of_its_form() -> None:
    """A count in Python, which would be a constant of the captured pass: such batches are passed as usual."""
    generator = torch.Generator().manual_seed(0)
    items = [(torch.rand(16, generator=generator), number % 3) for number in range(36)]

    def collate(samples):
        inputs, targets = zip(*samples, strict=True)
        weight = 1.0 + sum(targets) % 5
        return {"x": torch.stack(inputs), "y": torch.tensor(targets), "weight": weight}

    def loss(model, batch):
        total = nn.functional.cross_entropy(model(batch["x"]), batch["y"], reduction="sum")
        return stoker.Loss(total * batch["weight"], len(batch["y"]))

    job = _job(lambda: nn.Linear(16, 3), data=items, loss=loss, fields=stoker.Fields(collate=collate))
    ours, plain = (_trained(job, 10, captured=captured, loader="inline") for captured in (True, False))
    assert not _states_differ(ours, plain)


def test_draws_of_an_augmentation_and_of_the_model_follow_each_other() -> None:
    """As uncaptured: the model's masks are not the augmentation's numbers once more."""
    job = _job(augment=[lambda x, _draw: x + 0.1 * torch.rand(x.shape)])
    assert not _states_differ(_trained(job, 10, captured=True), _trained(job, 10))


def test_no_more_than_a_micro_batch_is_captured() -> None:
    """A larger batch goes through the model in micro-batches, also in the pass that would be recorded."""
    job = _job()
    plan, data = Plan(device="cpu", micro_batch=BATCH // 2, captured=True), datasets_of(job)
    step, sizes = Step(job, plan, SEPARABLE), set[int]()
    step.model.register_forward_hook(lambda _module, inputs, _output: sizes.add(len(inputs[0])))
    source = BatchSource(data.train, step.pipeline(data.train, augmented=True), data.extent(job), job.seed, plan)
    for update, batch in enumerate(source.batches(Position(), 2)):
        step.update(batch, update, 0.0)
    assert sizes == {BATCH // 2}


def test_a_captured_plan_neither_compiles_nor_checkpoints() -> None:
    """Each of them passes in a way of its own."""
    with pytest.raises(ValueError, match="captured"):
        Plan(device="cpu", micro_batch=1, captured=True, compile=True)
    with pytest.raises(ValueError, match="captured"):
        Plan(device="cpu", micro_batch=1, captured=True, checkpointed_blocks=1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; torch sees none")
def test_a_cuda_graph_gives_the_weights_of_ordinary_passes() -> None:
    """Seeds reach the draws inside a graph, and each batch its inputs."""
    ours, plain = (_trained(_job(_convolutional), 10, "cuda:0", captured=captured) for captured in (True, False))
    for name, value in ours.model.state_dict().items():
        torch.testing.assert_close(value, plain.model.state_dict()[name], rtol=1e-4, atol=1e-6)


class _Masked(nn.Module):
    """Asks the GPU how many rows a mask has."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 3)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        rows = images.flatten(1)
        return self.layer(rows[rows.sum(1) > -1])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available() or is_simulated(), reason="needs a GPU that is waited for")
def test_what_waits_for_a_gpu_is_refused_before_a_capture_begins() -> None:
    """A capture that fails would leave the allocator and the generators of the process unusable."""
    with pytest.raises(RunFailed, match="cannot be captured"):
        _trained(_job(_Masked), 1, "cuda:0", captured=True)
    torch.cuda.empty_cache()
    assert torch.rand(9, device="cuda:0").sum() > 0
    _trained(_job(_mlp), 3, "cuda:0", captured=True)


@pytest.mark.parametrize("is_copy", [False, True])
@pytest.mark.parametrize("rebinds", [False, True])
def test_a_pass_that_moves_parameters_is_not_captured(is_copy: bool, rebinds: bool) -> None:
    """Those of a teacher, which recording the pass and comparing it would move once more each.

    Nor where it begins as a copy, and the first pass moves it by nothing; new values would be recorded as constants.
    """
    model = functools.partial(Teacher, rebinds=rebinds, is_copy=is_copy)
    with pytest.raises(RunFailed, match="cannot be captured: the model or the loss changes parameters"):
        _trained(make_job(model, batch=BATCH), 1, captured=True)


def test_a_pass_that_normalises_parameters_is_captured() -> None:
    """Once more changes nothing."""
    job = make_job(Normalised, batch=BATCH)
    captured, ordinary = (_trained(job, 5, captured=captured).model.state_dict() for captured in (True, False))
    for name, tensor in ordinary.items():
        torch.testing.assert_close(captured[name], tensor)


def test_a_pass_with_hooks_after_accumulation_is_not_captured() -> None:
    """What is repeated gives gradients back without accumulating them, so that no such hook is called."""

    def clip(parameter: torch.Tensor) -> None:
        parameter.grad.clamp_(-0.01, 0.01)

    def clipped() -> nn.Module:
        model = _mlp()
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(clip)
        return model

    with pytest.raises(RunFailed, match="cannot be captured: a parameter has a hook after accumulation"):
        _trained(_job(clipped), 1, captured=True)
