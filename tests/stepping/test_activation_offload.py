"""Inputs of checkpointed blocks on the host: the same bits, on a GPU that may be simulated."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import nn

from stoker.errors import DoesNotFit
from stoker.jobs import AdamW, Job
from stoker.records import Layout, Plan
from stoker.stepping.activation_checkpointing import checkpoint
from stoker.stepping.activation_offload import ActivationOffload, OffloadedInputs
from stoker.stepping.kept_inputs import in_new_containers
from stoker.stepping.step import Step
from stoker.training.snapshots import restore_snapshot, snapshot_of
from stoker.verifying.resume import first_difference, state_of
from stoker.zoo import GPT
from tests.stepping.driving import SEPARABLE, train
from tests.stepping.models import make_job, texts
from tests.stepping.residual_stack import ResidualStack


def gpt_job(layers: int = 4, dropout: float = 0.1) -> Job:
    """A GPT whose blocks drop; the last batch of an epoch has 7 samples of 16, some targets are ignored."""
    return make_job(
        lambda: GPT(layers=layers, width=64, heads=4, context=8, vocab=12, dropout=dropout),
        data=texts(55, masked=0.3),
        loss="token_cross_entropy",
        optimizer=AdamW(lr=1e-3),
        clip_norm=1.0,
        batch=16,
    )


def plan_on_gpu(**changed: Any) -> Plan:
    """A plan for the first GPU, with all blocks of `gpt_job` checkpointed."""
    settings = {"device": "cuda:0", "micro_batch": 16, "optimizer_implementation": "fused", "checkpointed_blocks": 4}
    return Plan(**settings | changed)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each block's inputs that are copied to the host, in the order of the passes."""
    sizes: list[int] = []
    kept = ActivationOffload.kept

    def watched(offload: ActivationOffload, name: str, content: Any, **named: Any) -> OffloadedInputs:
        inputs = kept(offload, name, content, **named)
        sizes.append(sum(one.host.nbytes for one in inputs._copied))
        return inputs

    monkeypatch.setattr(ActivationOffload, "kept", watched)
    return sizes


@pytest.mark.gpu
@pytest.mark.parametrize("micro_batch", [16, 5])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("optimizer_offload", ["none", "gradients"])
def test_it_is_the_same_to_the_bit(micro_batch: int, precision: Any, optimizer_offload: Any, sent: list[int]) -> None:
    """Weights, optimiser's state and losses, with dropout, clipped, whole or in micro-batches."""
    job, steps, losses = gpt_job(), [], []
    for is_offloaded in (False, True):
        assert not sent
        plan = plan_on_gpu(
            micro_batch=micro_batch,
            precision=precision,
            optimizer_offload=optimizer_offload,
            activation_offload=is_offloaded,
        )
        steps.append(Step(job, plan, SEPARABLE))
        losses.append(train(job, steps[-1], 8))
    assert losses[0] == losses[1]
    assert first_difference(*map(state_of, steps)) is None
    is_bf16 = precision == "bf16" and optimizer_offload != "none"  # under autocast what blocks pass on is fp32
    size = micro_batch * 8 * 64 * (2 if is_bf16 else 4)
    assert sent[:4] == [size, size, size, 0]
    assert not any(sent[3::4])


@pytest.mark.gpu
def test_a_state_goes_on_bit_for_bit_with_and_without_it() -> None:
    """Stopped under one plan, and gone on with under the other."""
    job = gpt_job()
    plan, plain = plan_on_gpu(activation_offload=True), plan_on_gpu()
    straight, stopped, resumed, without = (Step(job, each, SEPARABLE) for each in (plan, plan, plan, plain))
    train(job, straight, 8)
    train(job, stopped, 4)
    for step in (resumed, without):
        restore_snapshot(step, snapshot_of(stopped))
        train(job, step, 4, begin=4)
        assert first_difference(state_of(straight), state_of(step)) is None


def stack(blocks: int = 4, *, is_checkpointed: bool = True) -> tuple[ResidualStack, torch.Tensor]:
    """Equal blocks on the GPU, checkpointed with their inputs on the host or not; and a batch."""
    torch.manual_seed(0)
    model = ResidualStack(blocks, 64).to("cuda:0")
    checkpoint(model, blocks * is_checkpointed, offloaded_from=torch.device("cuda:0"))
    return model, torch.randn(512, 16, device="cuda:0")


@pytest.mark.gpu
def test_inputs_leave_the_device_and_come_back_one_block_ahead() -> None:
    """Of eight blocks one input and the output are left after the forward pass, and one of each in the backward one."""
    size = 512 * 64 * 4
    model, x = stack(8)
    gc.collect()
    before = torch.cuda.memory_allocated(0)
    held: list[int] = []
    for block in model.blocks:
        block.down.register_full_backward_pre_hook(lambda *_: held.append(torch.cuda.memory_allocated(0) - before))
    y = model(x)
    assert 2 * size <= torch.cuda.memory_allocated(0) - before < 2.5 * size
    y.sum().backward()
    gradients = [sum(p.nbytes for p in block.parameters()) * after for after, block in enumerate(model.blocks)]
    assert len(held) == 8  # before a block is computed again: its input is back, and there is the output's gradient
    for bytes_held, of_weights in zip(held, gradients, strict=True):
        assert 2 * size <= bytes_held - of_weights < 2.5 * size


@pytest.mark.gpu
def test_a_graph_that_is_retained_is_passed_twice() -> None:
    """The host's copies are there as long as the graph."""
    (model, x), (plain, _) = stack(), stack(is_checkpointed=False)
    y = model(x).square().mean()
    y.backward(retain_graph=True)
    y.backward()
    expected = plain(x).square().mean()
    expected.backward(retain_graph=True)
    expected.backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad)


class DecoderBlock(nn.Module):
    """x_BD + of(x_BD, memory_BD) * mask_BD."""

    def __init__(self) -> None:
        super().__init__()
        self.of = nn.Bilinear(32, 32, 32)

    def forward(self, x: torch.Tensor, *, memory: list[torch.Tensor], mask: torch.Tensor) -> torch.Tensor:
        """The output."""
        change: torch.Tensor = self.of(x, memory[0])
        return x + change * mask


class Decoder(nn.Module):
    """Blocks that get, besides what the one before gives, a result that all of them get, and a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(32, 32)
        self.blocks = nn.ModuleList(DecoderBlock() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The output."""
        memory, mask = [self.encoder(x)], torch.ones(512, 32, device=x.device)
        x = self.encoder(x)
        for block in self.blocks:
            x = block(x, memory=memory, mask=mask)
        return x


@pytest.mark.gpu
def test_what_several_blocks_get_and_masks_stay(sent: list[int]) -> None:
    """The first block sends its copy of the common result; later ones need not."""
    torch.manual_seed(0)
    model = Decoder().to("cuda:0")
    plain = copy.deepcopy(model)
    checkpoint(model, 4, offloaded_from=torch.device("cuda:0"))
    x = torch.randn(512, 32, device="cuda:0")
    for each in (model, plain):
        each(x).square().mean().backward()
    assert sent == [2 * x.nbytes, x.nbytes, x.nbytes, 0]
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)  # type: ignore[arg-type]


class InPlace(nn.Module):
    """Blocks after the first of which the stream is changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 32)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The output."""
        x = self.first(x)
        for block in self.blocks:
            x += block(x)
        return x


@pytest.mark.gpu
def test_an_input_that_changes_on_its_way_is_refused() -> None:
    """By the name of its block, before it is too late."""
    model = InPlace().to("cuda:0")
    checkpoint(model, 3, offloaded_from=torch.device("cuda:0"))
    with pytest.raises(DoesNotFit, match=r"an input of the checkpointed block 'blocks\.0' was changed in place"):
        model(torch.randn(512, 32, device="cuda:0"))


@pytest.mark.gpu
def test_an_input_that_changes_after_the_last_block_that_is_called_is_refused_in_the_backward_pass() -> None:
    """A model may leave out its last blocks: nothing looks at the inputs before they are used again."""
    x = torch.randn(512, 32, device="cuda:0", requires_grad=True) * 1
    kept = ActivationOffload(torch.device("cuda:0")).kept("a", ((x,), {}), is_last=False)
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(DoesNotFit, match="'a' was changed in place"):
        kept.again()


@pytest.mark.gpu
def test_a_tensor_that_a_block_gets_twice_comes_back_as_one(sent: list[int]) -> None:
    """As attention asks whether its query is its key; it is sent once."""
    offload = ActivationOffload(torch.device("cuda:0"))
    x = torch.randn(512, 32, device="cuda:0", requires_grad=True) * 1
    kept = offload.kept("a", ((x, x), {}), is_last=False)
    assert sent == [x.nbytes]
    offload.kept("b", ((), {}), is_last=True)
    (first, second), _ = kept.again()
    assert first is second
    assert first is not x
    assert torch.equal(first, x)


@pytest.mark.gpu
def test_views_with_holes_stay_and_other_strides_are_kept(sent: list[int]) -> None:
    """A transposed input comes back transposed, every second column not at all, since it would have no holes."""
    offload, device = ActivationOffload(torch.device("cuda:0")), "cuda:0"
    wide = torch.randn(128, 64, device=device, requires_grad=True) * 1
    kept = offload.kept("a", ((wide.t(), wide[:, ::2]), {"small": wide[0, :2]}), is_last=False)
    assert sent == [wide.nbytes]
    offload.kept("b", ((), {}), is_last=True)
    (transposed, half), named = kept.again()
    assert torch.equal(transposed, wide.t())
    assert transposed.stride() == (1, 64)
    assert transposed.data_ptr() != wide.data_ptr()
    assert half.data_ptr() == wide.data_ptr()
    assert named["small"].data_ptr() == wide.data_ptr()


@pytest.mark.gpu
def test_a_pass_that_is_given_up_leaves_nothing_to_wait_for() -> None:
    """What was coming back is waited for by the next pass; a copy of the model begins with nothing on its way."""
    model, x = stack()

    def give_up(*_: Any) -> None:
        raise RuntimeError("given up")

    def offload_of(stacked: ResidualStack) -> ActivationOffload:
        wrapped: Any = [block.forward for block in stacked.blocks]
        assert all(one.offload is wrapped[0].offload for one in wrapped)
        offload: ActivationOffload = wrapped[0].offload
        return offload

    offload, handle = offload_of(model), model.blocks[2].register_full_backward_hook(give_up)
    with pytest.raises(RuntimeError, match="given up"):
        model(x).sum().backward()
    handle.remove()
    assert offload.coming is not None
    assert offload_of(copy.deepcopy(model)).coming is None
    model.zero_grad()
    model(x).sum().backward()
    assert offload.coming is None
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.gpu
def test_passes_without_gradients_send_nothing(sent: list[int]) -> None:
    """As those of an evaluation."""
    model, x = stack()
    with torch.no_grad():
        model(x)
    assert not sent


def test_containers_are_new_and_the_rest_is_the_same() -> None:
    """Lists grow from block to block in a DenseNet."""
    one, two = torch.ones(2), torch.zeros(2)
    content = ([one, (two, "word")], {"key": one, "none": None})
    copied = in_new_containers(content, lambda tensor: tensor)
    content[0].append(two)
    assert len(copied[0]) == 2
    assert copied[0][0] is one
    assert copied[1] == {"key": one, "none": None}
    assert in_new_containers(content, torch.numel)[0] == [2, (2, "word"), 2]


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"device": "cpu"}, "for GPUs, and the plan's device is cpu"),
        ({"checkpointing": "selective"}, "for checkpointing full, .* this one is selective"),
        ({"checkpointed_blocks": 1}, "for checkpointed_blocks of 2 or more, and this plan has 1"),
        ({"checkpointed_blocks": 0}, "for checkpointed_blocks of 2 or more, and this plan has 0"),
        ({"compile": True}, "for plans that are not compiled"),
        ({"layout": Layout(shards=4)}, "one process, and the layout is 4 shards"),
    ],
)
def test_plans_that_it_does_not_go_with(changed: dict[str, Any], why: str) -> None:
    """Each is refused with a sentence."""
    with pytest.raises(ValueError, match=f"activation_offload is for {why.removeprefix('for ')}"):
        plan_on_gpu(activation_offload=True, **changed)


def test_a_plan_says_it_and_is_without_it_where_nothing_is_computed_twice() -> None:
    """In its line; and two plans of one job are known to need as much memory or more."""
    plan = plan_on_gpu(activation_offload=True)
    assert "inputs of blocks on the host · 4 checkpointed blocks" in plan.in_words()
    assert plan.uses_host_memory
    assert not plan.is_offloaded
    assert not plan.without_checkpointing().activation_offload
