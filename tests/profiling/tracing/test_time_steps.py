from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from stoker.jobs import SGD, Job
from stoker.loading.datasets import datasets_of
from stoker.planning.model.trace_extrapolation import expanded
from stoker.profiling.tracing.repetition import labels_of, trace_with_repetition
from stoker.profiling.tracing.storages import Recording, TracedLoop
from stoker.profiling.tracing.update import trace_update
from stoker.records import Occurrence, Trace
from stoker.records.trace import NotPeriodic
from stoker.zoo import RecurrentClassifier, RecurrentLM
from tests.planning.test_expansion import comparable
from tests.profiling.tracing.jobs import SEPARABLE, make_job, settings

V, D = 16, 8
STEPS = 10
"""The fewest of which some are left out."""


class Layer(nn.Module):
    """A recurrent layer between an embedding and a head; what of its results is used is for `used` to say."""

    def __init__(self, layer: nn.RNNBase, used: Callable[[Any], torch.Tensor] = lambda found: found[0]) -> None:
        super().__init__()
        self.embedding, self.layer, self.used = nn.Embedding(V, D), layer, used
        width = (layer.proj_size or layer.hidden_size) * (2 if layer.bidirectional else 1)
        self.head = nn.Linear(width, V)

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        return self.head(self.used(self.layer(self.embedding(tokens_BT))))


class LearnedState(Layer):
    """Starts from a state that is learned, of as many layers as there are steps."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.embedding, self.layer, self.head = (
            nn.Embedding(V, D),
            nn.GRU(D, D, STEPS, batch_first=True),
            nn.Linear(D, V),
        )
        self.state = nn.Parameter(torch.zeros(STEPS, 1, D))

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        state = self.state.expand(-1, tokens_BT.shape[0], -1).contiguous()
        return self.head(self.layer(self.embedding(tokens_BT), state)[0])


class TwoSpeeds(Layer):
    """Reads all tokens, and then every other output of that."""

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        all_BTD, _ = self.layer(self.embedding(tokens_BT))
        half_BTD, _ = self.layer(all_BTD[:, ::2])
        return self.head(all_BTD + half_BTD.repeat_interleave(2, dim=1))


class Twice(Layer):
    """Reads the tokens, and then what it made of them, from the state it ended with."""

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        read_BTD, state = self.layer(self.embedding(tokens_BT))
        return self.head(self.layer(read_BTD, state)[0])


class Recomputed(Layer):
    """Keeps nothing of its layer for the backward pass, and runs it again there."""

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        return self.head(checkpoint(self.layer, self.embedding(tokens_BT), use_reentrant=False)[0])


def job_with(model: Callable[[], nn.Module], *, steps: int = STEPS, of_class: bool = False) -> Job:
    """A job over a few tokens."""
    tokens = torch.zeros(16, steps, dtype=torch.int64)
    wanted = tokens[:, 0].contiguous() if of_class else tokens
    loss = "cross_entropy" if of_class else "token_cross_entropy"
    return make_job(model, (tokens, wanted), loss=loss, optimizer=SGD(lr=0.1))  # whose steps are few operations


def cut_trace(job: Job) -> Trace:
    """The job's update traced with its time steps traced once."""
    return trace_with_repetition(job, datasets_of(job), SEPARABLE, settings(micro_batch=2))


def both(job: Job, **changed: object) -> tuple[Trace, Trace]:
    """The job's update traced whole, and with its time steps traced once."""
    chosen = settings(**({"micro_batch": 2} | changed))
    data = datasets_of(job)
    return trace_update(job, data, SEPARABLE, chosen), trace_with_repetition(job, data, SEPARABLE, chosen)


def layer(kind: type[nn.RNNBase], *, used: Callable[[Any], torch.Tensor] | None = None, **given: Any) -> Any:
    """What makes a model of one such layer."""
    chosen = {} if used is None else {"used": used}
    return lambda: Layer(kind(D, D, batch_first=True, **given), **chosen)


MODELS = {
    "two layers": lambda: RecurrentLM("gru", 2, D, V, dropout=0.1),
    "tied": lambda: RecurrentLM("gru", 1, D, V, tied=True),
    "both ways": layer(nn.GRU, bidirectional=True),
    "relu": layer(nn.RNN, nonlinearity="relu"),
    "tanh, both ways, two layers": layer(nn.RNN, num_layers=2, bidirectional=True),
    "no biases": layer(nn.GRU, bias=False),
    "an LSTM that projects": layer(nn.LSTM, proj_size=4),
    "a learned state": LearnedState,
    "twice": lambda: Twice(nn.GRU(D, D, batch_first=True)),
}


_SLOW = ("relu", "tanh, both ways, two layers", "no biases", "twice", "a learned state")  # others but for a setting


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in _SLOW else ()) for name in MODELS]
)
def test_steps_left_out_are_put_back(name):
    """Six steps are traced; with the others in their places the trace is the one of all steps, event for event."""
    whole, cut = both(job_with(MODELS[name]))
    assert cut.repetition is not None
    assert len(cut.occurrences) < len(whole.occurrences)
    assert comparable(expanded(cut)) == comparable(whole)


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param({"precision": "bf16"}, id="bf16", marks=pytest.mark.slow),
        pytest.param({"parts": 2}, id="two micro-batches", marks=pytest.mark.slow),
        pytest.param({"optimizer_implementation": "foreach", "parts": 2, "precision": "bf16"}, id="all at once"),
    ],
)
def test_steps_are_put_back_however_an_update_is_executed(changed):
    """Casts of autocast, and loops of several micro-batches, are as in the trace of all steps."""
    whole, cut = both(job_with(MODELS["two layers"]), **changed)
    assert cut.repetition is not None
    assert comparable(expanded(cut)) == comparable(whole)


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(lambda: RecurrentClassifier("gru", 1, D, V, V), id="the mean of the outputs"),
        pytest.param(layer(nn.GRU, used=lambda found: found[0][:, -1]), id="the last output"),
        pytest.param(layer(nn.GRU, used=lambda found: found[1][-1]), id="the last state"),
    ],
)
def test_what_is_made_of_all_steps_is_as_large_as_ever(model):
    """What comes after a loop sees the outputs of all steps, and its gradient reaches them."""
    whole, cut = both(job_with(model, of_class=True))
    assert cut.repetition is not None
    assert comparable(expanded(cut)) == comparable(whole)


def test_a_trace_is_no_longer_for_more_steps():
    """What is traced goes with the layers, not with the steps."""
    short, long = (cut_trace(job_with(MODELS["tied"], steps=steps)) for steps in (10, 14))
    assert len(short.occurrences) == len(long.occurrences)
    assert (short.repetition.num_blocks, long.repetition.num_blocks) == (10, 14)


def test_loops_of_another_length_are_run_in_full():
    """Two lengths in one update: the first is cut, the other is as ever."""
    whole, cut = both(job_with(lambda: TwoSpeeds(nn.GRU(D, D, batch_first=True)), steps=2 * STEPS))
    assert cut.repetition is not None
    assert comparable(expanded(cut)) == comparable(whole)


@pytest.mark.parametrize(
    ("model", "steps"),
    [
        pytest.param(MODELS["tied"], 9, id="few steps"),
        pytest.param(lambda: Recomputed(nn.GRU(D, D, batch_first=True)), STEPS, id="computed again, but for the end"),
        pytest.param(lambda: RecurrentLM("lstm", 1, D, V), STEPS, id="oneDNN's LSTM"),
    ],
)
def test_other_layers_are_traced_whole(model, steps):
    """Where nothing is gained or steps may differ, nothing is left out."""
    whole, found = both(job_with(model, steps=steps))
    assert found.repetition is None
    assert comparable(found) == comparable(whole)


def test_real_layers_are_as_before():
    """After a trace PyTorch runs recurrent layers as ever."""
    gru, x = nn.GRU(D, D), torch.randn(12, 2, D, requires_grad=True)
    before = gru(x)[0]
    both(job_with(MODELS["tied"]))
    after = gru(x)[0]
    assert torch.equal(before, after)
    assert type(after.grad_fn) is type(before.grad_fn)


def recording_of(num_operations: int, nodes: Sequence[int]) -> Recording:
    """A loop of so many operations, and what comes after it."""
    one = Occurrence(operation=0, phase="forward", part=0, module=0, source=0)
    loop = TracedLoop(start=0, stop=num_operations, node=-1)
    return Recording(occurrences=[one] * len(nodes), nodes=list(nodes), loops=[loop])


def test_operations_of_a_loop_are_shared_out_among_its_steps():
    """The first step may do more; backward, the node that is running gives the step."""
    recording = recording_of(14, [*range(14), 14, 13, 12, 11, 4, 3, 0, -1])
    assert labels_of(recording) == [0, 0, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, None, 5, 5, 4, 1, 0, 0, None]


def test_a_loop_of_fewer_operations_than_steps_is_refused():
    """It is unknown which operation belongs to which step."""
    with pytest.raises(NotPeriodic, match="5 operations are not 6 steps"):
        labels_of(recording_of(5, range(5)))
