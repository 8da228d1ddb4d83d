"""The traces that a plan is made from: which are kept for the next process, and which are not."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import stoker
from stoker.errors import BadJob
from stoker.jobs import load_job
from stoker.planning import job_traces
from stoker.planning.job_traces import TraceBook
from stoker.planning.model.trace_extrapolation import NotDerivable, derived
from stoker.planning.resolved_job import resolve_job
from stoker.profiling.tracing import fake_device, repetition
from stoker.records import Coupling, Trace, TraceSettings
from tests.flow.builders import blobs_job
from tests.flow.test_planning import JOBS

pytestmark = pytest.mark.usefixtures("place")

SEPARABLE = Coupling(kind="separable", group=None, causes=(), evidence="known")


def book() -> TraceBook:
    """As of a new process: of a job with a file, so that traces can be kept."""
    return TraceBook(resolve_job(*load_job(JOBS / "branches_on_values.py", {})), SEPARABLE)


def on_gpu(micro_batch: int) -> TraceSettings:
    """An update on a GPU of compute capability 9.0, which runs the kernels of 8.0."""
    return TraceSettings(target="cuda", capability="9.0", micro_batch=micro_batch)


def pretend_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A PyTorch without the hooks: a CPU stands in for a GPU."""
    monkeypatch.setattr(fake_device, "why_not_cuda", lambda: "this PyTorch has no hooks")


@pytest.mark.slow
def test_a_trace_where_a_cpu_stood_in_says_so_and_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced, derived or under another name; where the target can be pretended again, it is traced again."""
    with monkeypatch.context() as patched:
        pretend_nothing(patched)
        stood_in = book()
        assert [stood_in(on_gpu(size)).is_fallback for size in (2, 10)] == [True, True]
    traces = book()
    assert [traces(on_gpu(size)).is_fallback for size in (2, 10)] == [False, False]


@pytest.mark.slow
@pytest.mark.parametrize("on", ["h100", "2xh100"])
def test_a_forecast_says_that_a_cpu_stood_in_and_why(on: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On one device and on several; where the target was traced there is nothing to say."""
    said = "traced on a CPU in its place, which runs other kernels: this PyTorch has no hooks"
    assert said not in stoker.plan(blobs_job(), on=on).explanation
    pretend_nothing(monkeypatch)
    assert said in stoker.plan(blobs_job(), on=on).explanation


def test_a_trace_of_the_target_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """And found where the target could not be pretended any more."""
    made = book()(on_gpu(2))
    pretend_nothing(monkeypatch)
    assert book()(on_gpu(2)) == made


def test_a_trace_of_a_stand_in_and_one_of_the_target_give_no_third(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are of different devices, whatever their settings say."""
    small = book()(on_gpu(2))
    pretend_nothing(monkeypatch)
    job, _ = load_job(JOBS / "branches_on_values.py", {})
    large = TraceBook(resolve_job(job), SEPARABLE)(on_gpu(4))  # without a file: that of the target is not found
    assert large.is_fallback
    with pytest.raises(NotDerivable):
        derived(small, large, 10)


def test_a_micro_batch_is_derived_from_two_that_are_traced_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is made once for both; both are kept. Where one of them is asked for, the other is not made."""
    made: list[list[int]] = []

    def traces(*arguments: Any) -> Sequence[Trace]:
        made.append([settings.micro_batch for settings in arguments[3]])
        return repetition.traces_with_repetition(*arguments)

    monkeypatch.setattr(job_traces, "traces_with_repetition", traces)
    first = book()
    assert first(on_gpu(10)).settings.micro_batch == 10
    first(on_gpu(12))
    book()(on_gpu(10))  # of another process, which finds them
    assert made == [[2, 4]]
    unkept = TraceBook(resolve_job(blobs_job()), SEPARABLE)
    unkept(on_gpu(2))
    unkept(on_gpu(10))
    assert made == [[2, 4], [2], [4]]


def test_a_micro_batch_that_cannot_be_derived_is_traced_alone_under_other_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The small ones that others are derived from are traced once they are asked for."""
    made: list[list[int]] = []

    def traces(*arguments: Any) -> Sequence[Trace]:
        made.append([settings.micro_batch for settings in arguments[3]])
        return repetition.traces_with_repetition(*arguments)

    monkeypatch.setattr(job_traces, "traces_with_repetition", traces)
    job = blobs_job(
        model=lambda: stoker.zoo.GPT(layers=2, width=32, heads=2, context=16, vocab=11),  # two samples: 32 rows of 32
        data=(torch.zeros(32, 16, dtype=torch.int64),) * 2,
        loss="token_cross_entropy",
        **dict.fromkeys(("valid", "test")),
        metrics=[],
    )
    traces_of_job = TraceBook(resolve_job(job), SEPARABLE)
    in_bf16 = dataclasses.replace(on_gpu(1), precision="bf16")
    traces_of_job(on_gpu(1))
    traces_of_job(in_bf16)
    assert made == [[2, 4], [1], [1]]
    traces_of_job(dataclasses.replace(in_bf16, micro_batch=8))
    assert made == [[2, 4], [1], [1], [2, 4]]


class AtMostTwo(nn.Linear):
    """A model that takes two samples and no more."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if len(inputs) > 2:
            raise ValueError("more than two samples")
        return super().forward(inputs)


def test_a_micro_batch_can_be_traced_where_others_cannot() -> None:
    """Those that are derived from it and a larger one fail."""
    of_two = TraceBook(resolve_job(blobs_job(model=lambda: AtMostTwo(6, 2))), SEPARABLE)
    assert of_two(on_gpu(2)).operations
    with pytest.raises(BadJob, match="more than two samples"):
        of_two(on_gpu(10))


OF_LENGTHS = """
import stoker, torch
from pathlib import Path
from torch import nn

class Items(torch.utils.data.Dataset):
    lengths = list(map(int, Path(__file__).with_name("lengths.txt").read_text().split()))

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        return torch.ones(self.lengths[index]), torch.tensor(1.0)

class Total(nn.Linear):
    def forward(self, x):
        return super().forward(x.unsqueeze(-1)).sum((1, 2))

def job() -> stoker.Job:
    return stoker.Job(model=lambda: Total(1, 1), data=Items(), fields=stoker.Fields(collate=stoker.lengths.padded()),
                      loss="mse", batch=2, optimizer=stoker.SGD(lr=0.1), until=stoker.epochs(1))
"""


def test_longer_samples_under_the_same_job_file_are_traced_anew(tmp_path: Path) -> None:
    """The first sample is as long as before; the other one, which a batch is padded to, is longer."""
    path, lengths = tmp_path / "job.py", tmp_path / "lengths.txt"
    path.write_text(OF_LENGTHS, encoding="utf-8")
    read = []
    for words in ("4 4", "4 64"):
        lengths.write_text(words, encoding="utf-8")
        trace = TraceBook(resolve_job(*load_job(path, {})), SEPARABLE)(on_gpu(2))
        read.append(max(shape.numel for operation in trace.operations for shape in operation.inputs))
    assert read == [2 * 4, 2 * 64]
