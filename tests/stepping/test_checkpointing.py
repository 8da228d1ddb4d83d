"""Blocks computed twice: the same mathematics, less memory, and a refusal where it would be otherwise."""

from __future__ import annotations

import copy
import gc
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from stoker.errors import BadJob, DoesNotFit
from stoker.jobs import SGD, Job
from stoker.records import Coupling
from stoker.stepping import activation_checkpointing
from stoker.stepping.activation_checkpointing import checkpoint, num_blocks, repeated_blocks
from stoker.stepping.step import Step
from stoker.zoo import GPT, MLP, ResNet9
from tests.stepping.driving import SEPARABLE, are_equal, grouped, largest_difference, plan_of, train, trained
from tests.stepping.models import CLASSES, FEATURES, TOKENS, VOCAB, make_job, texts, vectors

WIDTH = 8
Norm = Callable[[int], nn.Module]


class Block(nn.Module):
    """A residual layer with a norm, and dropout by function."""

    def __init__(self, norm: Norm = nn.LayerNorm, dropout: float = 0.0) -> None:
        super().__init__()
        self.linear, self.norm, self.dropout = nn.Linear(WIDTH, WIDTH), norm(WIDTH), dropout
        self.tanh = nn.Tanh()

    def forward(self, x_BW: torch.Tensor) -> torch.Tensor:
        return x_BW + F.dropout(self.tanh(self.norm(self.linear(x_BW))), self.dropout, self.training)


def deep(make: Callable[[], nn.Module] = Block, count: int = 3) -> nn.Module:
    """A perceptron of `count` such blocks."""
    return nn.Sequential(nn.Linear(FEATURES, WIDTH), *[make() for _ in range(count)], nn.Linear(WIDTH, CLASSES))


def gpt(dropout: float = 0.0) -> nn.Module:
    """A transformer over `texts`."""
    return GPT(layers=3, width=8, heads=2, context=TOKENS, vocab=VOCAB, dropout=dropout)


def pictures(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs [N, 1, 8, 8] and labels [N]."""
    random = torch.Generator().manual_seed(3)
    return torch.randn(count, 1, 8, 8, generator=random), torch.randint(10, (count,), generator=random)


JOBS: dict[str, tuple[Job, Coupling]] = {
    "MLP": (make_job(deep, data=vectors(40)), SEPARABLE),
    "GPT": (make_job(gpt, data=texts(40), loss="token_cross_entropy"), SEPARABLE),
    "GPT with dropout": (make_job(lambda: gpt(0.3), data=texts(40), loss="token_cross_entropy"), SEPARABLE),
    "ResNet9": (make_job(lambda: ResNet9(width=2), data=pictures(36), batch=8), grouped(8)),
    "batch norm in groups": (
        make_job(lambda: deep(lambda: Block(nn.BatchNorm1d, 0.2)), data=vectors(40), coupling_group=4),
        grouped(4),
    ),
    "cumulative statistics": (
        make_job(lambda: deep(lambda: Block(lambda width: nn.BatchNorm1d(width, momentum=None)))),
        grouped(16),
    ),
}


@pytest.mark.parametrize(("count", "checkpointing"), [("one", "full"), ("all", "full"), ("all", "selective")])
@pytest.mark.parametrize("name", JOBS)
def test_checkpointing_learns_the_same(name: str, count: str, checkpointing: str) -> None:
    """Twelve updates in float64, some of ragged batches: weights, running statistics and their counts are bit-equal."""
    job, coupling = JOBS[name]
    blocks = 1 if count == "one" else num_blocks(job.model())
    ours = trained(job, job.batch, coupling, checkpointed_blocks=blocks, checkpointing=checkpointing)
    assert are_equal(ours, trained(job, job.batch, coupling))


@pytest.mark.parametrize("checkpointing", ["full", "selective"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", JOBS)
def test_gradients_are_bit_equal_in_every_precision(name: str, precision: str, checkpointing: str) -> None:
    """The second pass draws the same numbers and casts the same tensors as the first."""
    job, coupling = JOBS[name]
    checkpointed = {"checkpointed_blocks": num_blocks(job.model()), "checkpointing": checkpointing}
    steps = [Step(job, plan_of(job.batch, precision=precision, **how), coupling) for how in ({}, checkpointed)]
    for step in steps:
        train(job, step, 3)
    assert are_equal(*steps)


@pytest.mark.parametrize("micro_batch", [4, 5])
def test_micro_batches_of_checkpointed_blocks_add_up(micro_batch: int) -> None:
    """Accumulation with checkpointing is the whole batch without."""
    job, _ = JOBS["MLP"]
    ours = trained(job, micro_batch, checkpointed_blocks=3)
    assert largest_difference(ours, trained(job, 16)) < 1e-9


@pytest.mark.parametrize("micro_batch", [8, 16])
def test_groups_in_checkpointed_blocks_go_one_by_one(micro_batch: int) -> None:
    """Several groups in one micro-batch update the running statistics once each, in order."""
    job, coupling = JOBS["batch norm in groups"]
    ours = trained(job, micro_batch, coupling, checkpointed_blocks=3, dropout=False)
    assert largest_difference(ours, trained(job, 4, coupling, dropout=False)) < 1e-9


def test_dropout_is_silenced_in_both_passes() -> None:
    """Under the conditions of a proof nothing is drawn when blocks are computed again."""
    job, _ = JOBS["GPT with dropout"]
    ours = trained(job, 16, checkpointed_blocks=3, dropout=False)
    assert are_equal(ours, trained(job, 16, dropout=False))


def test_a_checkpointed_block_keeps_its_input_alone() -> None:
    """After the forward pass what a block computed inside is freed, and what goes from block to block is not."""
    model = deep()
    checkpoint(model, 2)
    inside: list[StorageWeakRef] = []
    between: list[StorageWeakRef] = []
    passes: list[nn.Module] = []
    for block in repeated_blocks(model):
        block.linear.register_forward_hook(lambda *given: passes.append(given[0]))
        block.tanh.register_forward_hook(lambda *given: inside.append(StorageWeakRef(given[2].untyped_storage())))
        block.register_forward_hook(lambda *given: between.append(StorageWeakRef(given[2].untyped_storage())))
    loss = model(vectors(16)[0]).sum()
    assert [reference.expired() for reference in inside] == [True, True, False]
    assert [reference.expired() for reference in between] == [False, False, False]
    loss.backward()
    assert [passes.count(block.linear) for block in repeated_blocks(model)] == [2, 2, 1]


class CountingOperations(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def counted(model: nn.Module, inputs: torch.Tensor) -> Counter[str]:
    """Operations of a forward and a backward pass."""
    with CountingOperations() as counting:
        model(inputs).sum().backward()
    return counting.counts


def test_selective_checkpointing_computes_no_product_twice() -> None:
    """Nor attention; but the norms and functions between them."""
    tokens = texts(4)[0]
    plain, selective, full = gpt(), gpt(), gpt()
    checkpoint(selective, 3, checkpointing="selective")
    checkpoint(full, 3)
    counts = [counted(model, tokens) for model in (plain, selective, full)]
    for name in ("addmm", "_scaled_dot_product_flash_attention_for_cpu"):
        assert counts[0][name] == counts[1][name] < counts[2][name]
    assert counts[0]["native_layer_norm"] + 6 == counts[1]["native_layer_norm"] == counts[2]["native_layer_norm"]


class InPlace(nn.Module):
    """A linear layer whose result is changed in place, so that what was kept of it is not what it gave."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x_BW: torch.Tensor) -> torch.Tensor:
        return x_BW + self.out(self.linear(x_BW).mul_(3.0).tanh())


def test_results_changed_in_place_are_computed_again() -> None:
    """Multiplied twice, they would be others."""
    job = make_job(lambda: deep(InPlace), data=vectors(40))
    ours = trained(job, 16, checkpointed_blocks=3, checkpointing="selective")
    assert are_equal(ours, trained(job, 16))


@torch.library.custom_op("stoker_tests::dropping_attention", mutates_args=())
def dropping_attention(values: torch.Tensor, dropout_p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Stands for a GPU's attention, which draws what it drops within; the mask is for its backward pass."""
    mask = (torch.rand_like(values) >= dropout_p) / (1 - dropout_p)
    return values * mask, mask


dropping_attention.register_autograd(
    lambda ctx, gradient, _: (gradient * ctx.saved_tensors[0], None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output[1]),
)


class Dropping(nn.Module):
    """Attention that drops, before dropout by function."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x_BW: torch.Tensor) -> torch.Tensor:
        attended_BW, _ = dropping_attention(self.linear(x_BW), 0.3)
        return x_BW + F.dropout(self.out(attended_BW), 0.3).tanh()


def test_attention_that_drops_draws_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else what is drawn after it in the second pass would be other numbers, and gradients those of other masks."""
    packet = torch.ops.stoker_tests.dropping_attention
    monkeypatch.setattr(activation_checkpointing, "_KEPT", activation_checkpointing._KEPT | {packet})
    job = make_job(lambda: deep(Dropping), data=vectors(40))
    ours = trained(job, 16, checkpointed_blocks=3, checkpointing="selective")
    assert are_equal(ours, trained(job, 16))


def test_a_graph_that_is_retained_uses_what_was_kept_twice() -> None:
    """Two backward passes give twice the gradient of one."""
    gradients = []
    for times in (1, 2):
        torch.manual_seed(0)
        model = deep()
        checkpoint(model, 3, checkpointing="selective")
        loss = model(vectors(16)[0]).square().sum()
        for time in range(times):
            loss.backward(retain_graph=time + 1 < times)
        gradients.append(model[0].weight.grad)
    assert torch.equal(2 * gradients[0], gradients[1])


def test_what_is_kept_is_freed_with_the_graph() -> None:
    """Without a backward pass, and without the garbage collector: nothing refers to itself."""
    model = gpt()
    checkpoint(model, 3, checkpointing="selective")
    kept: list[StorageWeakRef] = []
    for block in repeated_blocks(model):
        for layer in block.modules():
            if isinstance(layer, nn.Linear):
                layer.register_forward_hook(lambda *given: kept.append(StorageWeakRef(given[2].untyped_storage())))
    gc.disable()
    try:
        output = model(texts(4)[0])
        assert kept
        assert not any(reference.expired() for reference in kept)
        del output
        assert all(reference.expired() for reference in kept)
    finally:
        gc.enable()


def test_names_and_modules_stay() -> None:
    """Checkpoints of runs can be read under either plan, and a user's reference to a block is still that block."""
    model = deep()
    names, modules = list(model.state_dict()), list(model.modules())
    checkpoint(model, 3)
    assert list(model.state_dict()) == names
    assert all(one is other for one, other in zip(model.modules(), modules, strict=True))


def test_a_copy_is_checkpointed_on_its_own() -> None:
    """A copy computes with its own weights, not with those of the model it was copied from."""
    model = deep()
    checkpoint(model, 3)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    twin(vectors(4)[0]).sum().backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(float(block.linear.weight.grad.norm()) > 0 for block in repeated_blocks(twin))


def test_without_gradients_there_is_one_pass() -> None:
    """Evaluation computes each block once, and keeps nothing."""
    job, coupling = JOBS["MLP"]
    step = Step(job, plan_of(16, checkpointed_blocks=3), coupling)
    calls: list[nn.Module] = []
    for block in repeated_blocks(step.model):
        block.tanh.register_forward_hook(lambda *given: calls.append(given[0]))
    with step.evaluation() as measure:
        measure(vectors(16), 16)
    assert len(calls) == 3


@pytest.mark.parametrize(
    ("model", "have"), [(deep, "Sequential has 3 repeated blocks"), (lambda: MLP(FEATURES), "MLP has no repeated")]
)
def test_more_blocks_than_there_are_is_refused(model: Callable[[], nn.Module], have: str) -> None:
    """With both numbers, and what would do."""
    with pytest.raises(BadJob, match=f"checkpoints 4 blocks, but {have}") as caught:
        Step(make_job(model), plan_of(16, checkpointed_blocks=4), SEPARABLE)
    assert "checkpointed_blocks" in str(caught.value.remedy)


class Counting(Block):
    """Counts its passes in a buffer, which scales what comes out; keeps another that never changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("passes", torch.ones(()))
        self.register_buffer("constant", torch.full((), 0.5))

    def forward(self, x_BW: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        return super().forward(x_BW) * self.constant / self.passes


class Replacing(Counting):
    """The same with a new tensor for each pass."""

    def forward(self, x_BW: torch.Tensor) -> torch.Tensor:
        self.passes = self.passes + 1
        return Block.forward(self, x_BW) * self.constant / self.passes


def spectral() -> nn.Module:
    """A block whose weight is divided by its largest singular value, which every pass estimates a little better."""
    block = Block()
    nn.utils.parametrizations.spectral_norm(block.linear)
    return block


@pytest.mark.parametrize("block", [Counting, Replacing, spectral])
def test_buffers_change_once_whatever_they_are(block: Callable[[], nn.Module]) -> None:
    """The second pass begins with the buffers of the first, and leaves them as the first did."""
    job = make_job(lambda: deep(block), optimizer=SGD(lr=0.01))
    assert are_equal(trained(job, 16, checkpointed_blocks=3, updates=6), trained(job, 16, updates=6))


class Starting(Counting):
    """Leaves the buffer that scales what comes out alone in its first passes; `width` is how many scalars it has."""

    def __init__(self, width: int = 1) -> None:
        super().__init__()
        self.passes = torch.ones(width)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x_BW: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        if self.seen > 2:
            self.count()
        return Block.forward(self, x_BW) / self.passes[0]

    def count(self) -> None:
        """One pass more."""
        self.passes += 1


class StartingAnew(Starting):
    """The same with a new tensor for each pass."""

    def count(self) -> None:
        """One pass more."""
        self.passes = self.passes + 1


@pytest.mark.parametrize("block", [Starting, StartingAnew, lambda: StartingAnew(5000)])
def test_buffers_that_begin_to_change_later_change_once(block: Callable[[], nn.Module]) -> None:
    """A counter that starts after some updates: nothing that the first pass did says so."""
    job = make_job(lambda: deep(block), optimizer=SGD(lr=0.01))
    ours = trained(job, 16, checkpointed_blocks=3, updates=6)
    assert [float(block.passes[0]) for block in repeated_blocks(ours.model)] == [5.0] * 3
    assert are_equal(ours, trained(job, 16, updates=6))


def test_large_buffers_that_begin_to_change_later_are_found() -> None:
    """No copy was made of what it was before, so that the block cannot be computed again: it is refused, by name."""
    job = make_job(lambda: deep(lambda: Starting(5000)))
    trained(job, 16, checkpointed_blocks=3, updates=2)
    with pytest.raises(
        DoesNotFit, match=r"buffer 'passes' of the checkpointed block '1' was changed in place"
    ) as caught:
        trained(job, 16, checkpointed_blocks=3, updates=3)
    assert "checkpointed_blocks 0" in str(caught.value.remedy)


class Second(Block):
    """Changes its buffer in every other pass, as counted in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))
        self.count = 0

    def forward(self, x_BW: torch.Tensor) -> torch.Tensor:
        self.count += 1
        if self.count % 2 == 0:
            self.scale += 1
        return super().forward(x_BW) * self.scale


def test_buffers_that_only_the_second_pass_changes_are_found() -> None:
    """A count hidden in Python goes on in the second pass: it is refused, by name."""
    with pytest.raises(DoesNotFit, match=r"buffer 'scale' .* changed by the second forward pass and not by the first"):
        trained(make_job(lambda: deep(Second)), 16, checkpointed_blocks=3, updates=1)


class Elsewhere(Block):
    """Keeps nothing of its input, only of a multiple of it."""

    def forward(self, x_BW: torch.Tensor) -> torch.Tensor:
        return super().forward(0.5 * x_BW)


class Overwriting(nn.Module):
    """Adds each block's output to its input in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.blocks = nn.ModuleList(Elsewhere() for _ in range(2))

    def forward(self, x_BF: torch.Tensor) -> torch.Tensor:
        x_BW = self.first(x_BF)
        for block in self.blocks:
            x_BW += block(x_BW)
        return self.last(x_BW)


def test_inputs_changed_in_place_are_found() -> None:
    """A second pass over other inputs than the first one's would give another gradient: it is refused, by name."""
    job = make_job(Overwriting)
    trained(job, 16, updates=1)
    with pytest.raises(DoesNotFit, match=r"input of the checkpointed block 'blocks\.1' was changed in place"):
        trained(job, 16, checkpointed_blocks=2, updates=1)


class Caching(Block):
    """Keeps what it has seen, hidden in Python, and looks at all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.Tensor] = []

    def forward(self, x_BW: torch.Tensor) -> torch.Tensor:
        self.seen.append(x_BW.detach())
        return super().forward(x_BW) + self.linear(torch.cat(self.seen)).sum(0)


def test_blocks_with_hidden_state_are_found() -> None:
    """A cache that grows with every pass gives tensors of other shapes: that is reported, with what to do."""
    with pytest.raises(DoesNotFit, match="something else in its second forward pass") as caught:
        trained(make_job(lambda: deep(Caching)), 16, checkpointed_blocks=3, updates=1)
    assert "checkpointed_blocks 0" in str(caught.value.remedy)


class Structured(Block):
    """Takes a dict and a keyword, gives a tuple."""

    def forward(self, given: dict[str, Any], *, scale: torch.Tensor) -> tuple[dict[str, Any], str]:
        return {"x": super().forward(given["x"]) * scale, "kept": given["kept"]}, "told"


class Passing(nn.Module):
    """Passes structures between its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.scale = nn.Parameter(torch.ones(()))
        self.blocks = nn.ModuleList(Structured() for _ in range(3))

    def forward(self, x_BF: torch.Tensor) -> torch.Tensor:
        content: dict[str, Any] = {"x": self.first(x_BF), "kept": None}
        for block in self.blocks:
            content, said = block(content, scale=self.scale)
            assert said == "told"
        return self.last(content["x"])


def test_blocks_may_pass_structures() -> None:
    """Tensors in dicts, tuples and keywords get their gradients."""
    job = make_job(Passing)
    assert are_equal(trained(job, 16, checkpointed_blocks=3, updates=4), trained(job, 16, updates=4))


class Growing(nn.Module):
    """Passes all outputs so far to each block, in a list that it appends to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.blocks = nn.ModuleList(Dense() for _ in range(3))

    def forward(self, x_BF: torch.Tensor) -> torch.Tensor:
        outputs = [self.first(x_BF)]
        for block in self.blocks:
            outputs.append(block(outputs))
        return self.last(outputs[-1])


class Dense(Block):
    """Adds up all that came before."""

    def forward(self, outputs: list[torch.Tensor]) -> torch.Tensor:
        return super().forward(torch.stack(outputs).sum(0))


def test_lists_may_grow_after_a_block_has_read_them() -> None:
    """Each block is computed again from what it was given, not from what the list has become."""
    job = make_job(Growing)
    assert are_equal(trained(job, 16, checkpointed_blocks=3, updates=4), trained(job, 16, updates=4))


def test_autocast_keeps_no_casts_of_checkpointed_blocks_weights() -> None:
    """A kept cast would live until the end of the pass, though activations do not; outside of blocks it is kept."""
    seen: list[tuple[str, bool]] = []
    job = make_job(lambda: deep(count=2), data=vectors(8))
    step = Step(job, plan_of(8, precision="bf16", checkpointed_blocks=1), SEPARABLE)
    for name, module in (("checkpointed", step.model[1].linear), ("other", step.model[2].linear)):
        module.register_forward_hook(lambda *_, name=name: seen.append((name, torch.is_autocast_cache_enabled())))
    train(job, step, 1)
    assert seen == [("checkpointed", False), ("other", True), ("checkpointed", False)]
    assert torch.is_autocast_cache_enabled()
