from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path

import pytest
import torch
from torch import nn

import stoker
from stoker.errors import BadJob
from stoker.loading.dataset_adapters import as_samples
from stoker.loading.datasets import Datasets
from stoker.planning.model.trace_extrapolation import expanded
from stoker.profiling.tracing.repetition import RepeatedBlocks, _kept, trace_with_repetition
from stoker.profiling.tracing.update import trace_update
from stoker.records import Coupling, Trace, TraceSettings
from stoker.zoo import GPT

D = 8
SEPARABLE = Coupling(kind="separable", group=None, causes=(), evidence="")
SETTINGS = TraceSettings(target="cpu", capability="", micro_batch=2)


class Block(nn.Module):
    """A layer that may know its number."""

    def __init__(self, number: int | None = None, dropout: float = 0.0) -> None:
        super().__init__()
        self.layer = nn.Linear(D, D)
        self.number = number
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BD: torch.Tensor) -> torch.Tensor:
        return x_BD + self.dropout(self.layer(x_BD).relu())


class Tower(nn.Module):
    """Blocks one after the other, and a layer on top."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(D, 1)

    def forward(self, x_BD: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x_BD = block(x_BD)
        return self.head(x_BD)


class CountedTower(Tower):
    """Knows how many blocks it has without looking."""

    def forward(self, x_BD: torch.Tensor) -> torch.Tensor:
        for place in range(8):
            x_BD = self.blocks[place](x_BD)
        return self.head(x_BD)


class MirroredTower(Tower):
    """Adds what the first block gave to what goes into the last, that of the second to the last but one, and so on."""

    def forward(self, x_BD: torch.Tensor) -> torch.Tensor:
        kept = []
        for place, block in enumerate(self.blocks):
            late = len(self.blocks) - 1 - place < place
            x_BD = block(x_BD.sin() + kept.pop().cos() if late else x_BD)
            kept.append(x_BD)
        return self.head(x_BD)


class GatheringTower(Tower):
    """Predicts from what all blocks give, together."""

    def forward(self, x_BD: torch.Tensor) -> torch.Tensor:
        given = []
        for block in self.blocks:
            x_BD = block(x_BD)
            given.append(x_BD)
        return self.head(self.gathered(given))

    def gathered(self, given: list[torch.Tensor]) -> object:
        return torch.stack(given).exp().mean(dim=0)


class Largest(nn.Module):
    """The largest of any number of inputs, of which nothing is learned."""

    @torch.no_grad()
    def forward(self, given: list[torch.Tensor]) -> torch.Tensor:
        return sum((x_BD.abs().max() for x_BD in given), torch.zeros(()))


class WatchedTower(GatheringTower):
    """Has a module that looks at what all blocks give."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__(blocks)
        self.largest = Largest()

    def gathered(self, given: list[torch.Tensor]) -> torch.Tensor:
        return given[-1] / self.largest(given)


class SummingTower(GatheringTower):
    """Predicts from the sum of what all blocks give."""

    def gathered(self, given: list[torch.Tensor]) -> torch.Tensor:
        return sum(given, torch.zeros(()))


def towers(num_blocks: int = 8, kind: type[Tower] = Tower) -> Tower:
    """A tower of equal blocks."""
    return kind([Block() for _ in range(num_blocks)])


def job_of(model, **settings) -> stoker.Job:
    """A job over a few vectors."""
    data = (torch.zeros(8, D), torch.zeros(8, 1))
    chosen = {"optimizer": stoker.AdamW(lr=1e-3)} | settings
    return stoker.Job(**{"model": model, "data": data, "loss": "mse", "batch": 4, "until": stoker.epochs(1)} | chosen)


def left_out_of(model: nn.Module, *, checkpointed: int = 0, **settings):
    """What is left out of a model, or None; the model is shortened."""
    blocks = RepeatedBlocks(job_of(lambda: model, **settings), checkpointed)
    assert blocks.shorten(model) is model
    return blocks.left_out


def traced(job: stoker.Job, trace=trace_with_repetition, **settings) -> Trace:
    """The job's update."""
    data = Datasets(train=as_samples(job.data, what="data"), held_out={}, test=None)
    return dataclasses.replace(trace(job, data, SEPARABLE, dataclasses.replace(SETTINGS, **settings)), took_s=0.0)


@pytest.mark.parametrize(
    ("num_blocks", "checkpointed", "kept", "copies"),
    [
        (32, 0, [0, 1, 30, 31], ((1, 28),)),
        (32, 32, [0, 1, 30, 31], ((1, 28),)),
        (32, 20, [0, 1, 18, 19, 20, 21, 30, 31], ((1, 16), (5, 8))),
        (32, 2, [0, 1, 2, 3, 30, 31], ((3, 26),)),
        (9, 7, [0, 1, 5, 6, 7, 8], ((1, 3),)),
        (6, 3, [0, 1, 2, 3, 4, 5], ()),
        (5, 0, [0, 1, 2, 3, 4], ()),
    ],
)
def test_first_and_last_stay_of_those_that_are_executed_alike(num_blocks, checkpointed, kept, copies):
    """Checkpointed blocks and the others are shortened separately; so few that nothing is gained are all kept."""
    assert _kept(num_blocks, checkpointed) == (kept, copies)
    assert len(kept) + sum(count for _, count in copies) == num_blocks


def test_a_shortened_model_has_four_blocks():
    """The list is cut in place; what is said of it is what was."""
    model = GPT(layers=9, width=8, heads=2, context=4, vocab=5)
    left_out = left_out_of(model)
    assert (left_out.module, left_out.num_blocks, left_out.traced, left_out.copies) == ("blocks", 9, 4, ((1, 5),))
    assert len(model.blocks) == 4


def test_blocks_may_know_their_number():
    """An attribute that counts the blocks does not make them different."""
    assert left_out_of(Tower([Block(number=7 + place) for place in range(8)])) is not None


@pytest.mark.parametrize(
    "blocks",
    [
        pytest.param([Block() for _ in range(5)], id="too few"),
        pytest.param([Block(dropout=0.1 * place) for place in range(8)], id="another rate each"),
        pytest.param([Block(number=place % 2) for place in range(8)], id="every other"),
        pytest.param([Block()] * 8, id="one block again and again"),
        pytest.param([*(Block() for _ in range(7)), nn.Linear(D, D)], id="another class"),
    ],
)
def test_blocks_that_differ_are_all_kept(blocks):
    """Nothing is left out, and the model is as it was."""
    model = Tower(blocks)
    assert left_out_of(model) is None
    assert len(model.blocks) == len(blocks)


def test_a_shared_weight_keeps_the_blocks():
    """A parameter that two blocks share has one gradient from both: they are not equal."""
    model = towers()
    model.blocks[3].layer.weight = model.blocks[4].layer.weight
    assert left_out_of(model) is None


def test_a_group_of_one_block_keeps_all():
    """An optimiser that treats one block differently needs it."""
    groups = {"blocks.7.*": {"lr": 0.1}}
    assert left_out_of(towers(), optimizer=stoker.AdamW(lr=1e-3, groups=groups)) is None
    groups = {"blocks.*.bias": {"lr": 0.1}}
    assert left_out_of(towers(), optimizer=stoker.AdamW(lr=1e-3, groups=groups)) is not None


def test_a_plan_that_checkpoints_other_blocks_keeps_all():
    """Where the list is not what checkpointing counts in, the number of checkpointed blocks would mean others."""
    two_towers = nn.Sequential(towers(num_blocks=8), *(Block() for _ in range(3)))
    assert left_out_of(two_towers, checkpointed=8) is None
    assert len(two_towers[0].blocks) == 8
    assert left_out_of(two_towers) is not None


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(CountedTower, id="fails when shortened"),
        pytest.param(MirroredTower, id="blocks do different things"),
        pytest.param(GatheringTower, id="all blocks go into one operation"),
        pytest.param(SummingTower, id="all blocks go into a sum"),
        pytest.param(WatchedTower, id="another module looks at all blocks"),
    ],
)
def test_models_that_do_not_repeat_are_traced_whole(kind):
    """Equal blocks in different uses: the trace is the one without shortening."""
    job = job_of(lambda: towers(kind=kind))
    trace = traced(job)
    assert trace.repetition is None
    assert trace == traced(job, trace_update)


def of_all_weights(model: nn.Module) -> torch.Tensor:
    """The sum of the squares of all weights."""
    return sum((weight.square().sum() for weight in model.parameters()), torch.zeros(()))


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"loss": stoker.Objective("mse", penalty=of_all_weights)}, id="a penalty"),
        pytest.param({"clip_norm": 1.0, "average": 0.9}, id="a norm and an average"),
        pytest.param({"optimizer": lambda parameters: torch.optim.Adagrad(parameters, 0.1)}, id="Adagrad"),
        pytest.param({"optimizer": lambda parameters: torch.optim.LBFGS(parameters, max_iter=2)}, id="a closure"),
    ],
)
def test_what_goes_over_all_weights_is_not_lost(settings):
    """Whether it is widened or the whole is traced: every storage and operation is there."""
    job = job_of(towers, **settings)
    whole, found = traced(job, trace_update), expanded(traced(job))
    names = [[trace.operations[one.operation].name for one in trace.occurrences] for trace in (whole, found)]
    assert names[0] == names[1]
    sizes = [[(e > 0, trace.storages[abs(e) - 1].num_bytes) for e in trace.events] for trace in (whole, found)]
    assert sizes[0] == sizes[1]


def test_what_is_wrong_with_a_model_is_told_of_the_whole():
    """A step that cannot be traced is refused as without shortening."""

    class Unsteady(Tower):
        def forward(self, x_BD: torch.Tensor) -> torch.Tensor:
            return super().forward(x_BD[x_BD[:, 0] > 0])

    with pytest.raises(BadJob, match=r"test_repetition\.py"):
        traced(job_of(lambda: towers(kind=Unsteady)))


@pytest.mark.slow  # weights of 32 GB are traced in test_update
def test_the_8b_example_is_traced_without_its_weights():
    """30 GiB of weights and as many gradients, without allocating them."""
    path = Path(__file__).parents[3] / "examples" / "llama8b.py"
    spec = importlib.util.spec_from_file_location("llama8b", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    trace = expanded(traced(module.job(), target="cuda", capability="9.0", precision="bf16", checkpointed_blocks=32))
    for category in ("parameter", "gradient"):
        num_bytes = sum(s.num_bytes for s in trace.storages if s.category == category)
        assert num_bytes == 4 * 8_030_261_248
    assert (
        len(
            {
                trace.modules[one.module].split(".")[1]
                for one in trace.occurrences
                if trace.modules[one.module].startswith("blocks.")
            }
        )
        == 32
    )
