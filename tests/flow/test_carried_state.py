"""A state carried from batch to batch, as in truncated back-propagation through time."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import stoker
from stoker.records import Layout, Plan
from stoker.store.run_files import COUPLING
from tests.flow.builders import Heard, Stopping, assert_equal_weights

ROWS, STEPS, CHUNKS, VOCAB = 4, 5, 12, 11
WHOLE = Plan(device="cpu", micro_batch=ROWS)


class Carrying(nn.Module):
    """A language model whose state goes on from batch to batch: row r of each batch follows row r of the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.cell, self.head = (
            nn.Embedding(VOCAB, 8),
            nn.GRU(8, 8, batch_first=True),
            nn.Linear(8, VOCAB),
        )
        self.register_buffer("state_1BD", torch.zeros(1, ROWS, 8))

    def forward(self, tokens: torch.Tensor, is_first: torch.Tensor) -> torch.Tensor:
        """Logits [B, T, V] of tokens [B, T]; in evaluation each chunk begins at a state of zeros."""
        if not self.training:
            return self.head(self.cell(self.embedding(tokens))[0])
        began_1BD = self.state_1BD * (1 - is_first)[None, :, None]
        out_BTD, ended_1BD = self.cell(self.embedding(tokens), began_1BD)
        self.state_1BD.copy_(ended_1BD.detach())
        return self.head(out_BTD)


def text() -> torch.Tensor:
    """Tokens in which each depends on those before."""
    noise = torch.randint(0, 3, (ROWS * CHUNKS * STEPS + 1,), generator=torch.Generator().manual_seed(0))
    return noise.cumsum(0) % VOCAB


def in_rows(tokens: torch.Tensor) -> torch.Tensor:
    """Chunks [chunks * rows, steps]: row r of every batch of `ROWS` goes on where row r of the one before ended."""
    return tokens.view(ROWS, CHUNKS, STEPS).transpose(0, 1).reshape(CHUNKS * ROWS, STEPS)


def carrying_job(**changes: object) -> stoker.Job:
    """Three epochs over one text in four rows."""
    tokens = text()
    data = {
        "tokens": in_rows(tokens[:-1]),
        "is_first": (torch.arange(CHUNKS * ROWS) < ROWS).float(),
        "target": in_rows(tokens[1:]),
    }
    settings = {
        "model": Carrying,
        "data": data,
        "valid": data,
        "fields": stoker.Fields(inputs=["tokens", "is_first"]),
        "batch": ROWS,
        "sampling": stoker.sampling.in_order(),
        "loss": stoker.Objective("token_cross_entropy", scope="batch"),
        "optimizer": stoker.SGD(lr=0.5),
        "clip_norm": 0.25,
        "until": stoker.epochs(3),
    }
    return stoker.Job(**(settings | changes))


def by_hand(job: stoker.Job) -> dict[str, torch.Tensor]:
    """The usual loop: a hidden state that is detached after each chunk, and zeros at the start of an epoch."""
    from stoker.stepping.model import build_model

    model, tokens = build_model(job), text()
    rows, targets = tokens[:-1].view(ROWS, -1), tokens[1:].view(ROWS, -1)
    optimizer = torch.optim.SGD(list(model.parameters()), lr=0.5)
    for _ in range(3):
        hidden = torch.zeros(1, ROWS, 8)
        for start in range(0, CHUNKS * STEPS, STEPS):
            optimizer.zero_grad()
            out, hidden = model.cell(model.embedding(rows[:, start : start + STEPS]), hidden.detach())
            target = targets[:, start : start + STEPS]
            F.cross_entropy(model.head(out).transpose(1, 2), target).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            optimizer.step()
    return {name: tensor.detach() for name, tensor in model.named_parameters()}


def test_a_state_that_is_carried_is_that_of_a_loop_by_hand() -> None:
    """Weights after three epochs, evaluated in between; a batch goes on where the last one ended, and is never cut."""
    job = carrying_job(evaluation=stoker.Evaluation(select="last", every=stoker.updates(5)))
    run = stoker.train(job, plan=WHOLE, sink=Heard())
    expected = by_hand(job)
    weights = run.weights()
    assert max(float((weights[name] - tensor).abs().max()) for name, tensor in expected.items()) < 1e-5
    coupling = run.directory.read(COUPLING)
    assert coupling is not None
    assert (coupling.kind, coupling.group) == ("whole_group", ROWS)
    for plan in (Plan(device="cpu", micro_batch=1), Plan(device="cpu", micro_batch=2, layout=Layout(replicas=2))):
        with pytest.raises(stoker.BadJob):
            stoker.train(job, plan=plan, sink=Heard(), new=True)


@pytest.mark.slow
def test_a_state_that_is_carried_is_kept_with_a_checkpoint() -> None:
    """A run that was stopped within an epoch ends at the same bits."""
    job = carrying_job(evaluation=stoker.Evaluation(every=stoker.updates(5)), until=stoker.epochs(4))

    stopped = stoker.train(job, plan=WHOLE, sink=Stopping(60), run_dir="stopped")
    assert stopped.status == "unfinished"
    heard = Heard()
    again = stoker.train(job, plan=WHOLE, sink=heard, run_dir="stopped")
    whole = stoker.train(job, plan=WHOLE, sink=Heard(), run_dir="whole")
    assert heard.of("resumed")[0]["samples"] % (CHUNKS * ROWS)
    assert_equal_weights(again, whole)
    assert again.metrics == whole.metrics


def test_a_state_that_is_carried_is_planned_whole() -> None:
    """The planner's own choice is a batch that is not cut either."""
    assert stoker.plan(carrying_job()).chosen.plan.micro_batch == ROWS


def test_a_holdout_of_what_is_taken_in_order_is_refused() -> None:
    """It would leave gaps, and rows would follow others than their own."""
    with pytest.raises(stoker.BadJob, match="gaps in the order"):
        carrying_job(valid=stoker.holdout(0.1))
