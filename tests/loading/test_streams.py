from __future__ import annotations

import copy
import os
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import stoker
from stoker.errors import BadJob
from stoker.jobs.fields import Fields
from stoker.loading.batches import BatchSource, InputPipeline, Split, in_order
from stoker.loading.datasets import datasets_of
from stoker.loading.streams import StreamSamples, as_stream, is_stream
from stoker.records import Position
from tests.loading.data import contents, source_of
from tests.loading.streams import Counted, Drawing, Sized, Stateful

KINDS = [Sized, Drawing, Stateful]


class Failing(Sized):
    """One that cannot be read beyond its fifth sample."""

    def __iter__(self):
        yield from range(5)
        raise OSError("the line went dead")


class Tensors(Stateful):
    """Its state is no JSON."""

    def state_dict(self):
        return {"at": torch.tensor(self.at)}

    def load_state_dict(self, state):
        self.at = int(state["at"])


class BufferShuffledExamplesIterable:
    """What the data sets of Hugging Face read from when they are shuffled."""

    ex_iterable = None


class Shuffling(Stateful):
    """Its state leaves out what is in its buffer."""

    _ex_iterable = BufferShuffledExamplesIterable()


def samples_of(kind: type[Sized], size: int, buffer: int | None = None) -> StreamSamples:
    """A stream's samples, with a seed."""
    data = kind(size) if buffer is None else stoker.data.shuffled(kind(size), buffer=buffer)
    return as_stream(data, what="data", seed=7)


def job_of(data: Any, **changes: Any) -> stoker.Job:
    """A job on this stream."""
    settings_: dict[str, Any] = {
        "model": lambda: nn.Linear(1, 1),
        "data": data,
        "loss": "mse",
        "optimizer": stoker.SGD(lr=0.1),
        "batch": 4,
        "until": stoker.epochs(1),
    }
    return stoker.Job(**(settings_ | changes))


def inputs(found: list[Any]) -> list[Any]:
    """The inputs of batches, as lists."""
    return [content[0].tolist() for content in found]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=20, deadline=None)
@given(
    size=st.integers(1, 23),
    batch=st.integers(1, 9),
    start=st.integers(0, 12),
    buffer=st.one_of(st.none(), st.integers(1, 30)),
)
def test_batches_from_any_position_are_those_of_the_whole_stream(
    kind: type[Sized], size: int, batch: int, start: int, buffer: int | None
) -> None:
    """A run that is resumed reads what it would have read, what the stream draws at random included."""
    whole = inputs(contents(source_of(samples_of(kind, size, buffer), batch), 0, start + 3))
    assert inputs(contents(source_of(samples_of(kind, size, buffer), batch), start, start + 3)) == whole[start:]


@pytest.mark.parametrize("buffer", [None, 1, 5])
@settings(max_examples=20, deadline=None)
@given(size=st.integers(1, 23), batch=st.integers(1, 9), stop=st.integers(0, 12))
def test_what_can_be_sought_goes_on_from_its_state_and_reads_nothing_again(
    buffer: int | None, size: int, batch: int, stop: int
) -> None:
    """The state kept after any batch leads to those that follow; shuffled blocks are read from where they begin."""
    whole = inputs(contents(source_of(samples_of(Stateful, size, buffer), batch), 0, stop + 4))
    first = source_of(samples_of(Stateful, size, buffer), batch)
    for _ in zip(range(stop), first.batches(Position(), stop + 9)):  # noqa: B905 - left off in the middle
        pass
    samples = samples_of(Stateful, size, buffer)
    second = source_of(samples, batch)
    second.reader.state = first.reader.state
    assert inputs(contents(second, stop, stop + 4)) == whole[stop:]
    if stop and (stop * batch) % size and batch <= size and size % batch == 0:
        begun = stop * batch % size
        within = begun if buffer is None else begun // buffer * buffer
        epochs_to_come = (begun + 4 * batch - 1) // size
        assert samples.given.source.reads <= size - within + epochs_to_come * size


def test_a_state_counts_more_than_where_a_reader_is() -> None:
    """The first sample may have been looked at before a run goes on in the same epoch."""
    first, samples = samples_of(Stateful, 20), samples_of(Stateful, 20)
    first.fetch(np.array([15]), 0)
    samples.fetch(np.array([0]), 0)
    samples.seek(first.state())
    assert samples.fetch(np.array([16]), 0)[1].tolist() == [16]
    assert samples.given.source.reads == 2


@pytest.mark.parametrize(("epoch", "place"), [(1, 3), (0, 9), (2, 0)])
def test_what_lies_before_the_state_is_read_from_the_beginning(epoch: int, place: int) -> None:
    """A state is of one epoch and of what follows it there; asked for anything else, the stream is read again."""
    first = samples_of(Stateful, 12)
    first.fetch(np.array([6]), 1)
    samples = samples_of(Stateful, 12)
    samples.seek(first.state())
    expected = samples_of(Stateful, 12).fetch(np.array([place]), epoch)
    assert [one.tolist() for one in samples.fetch(np.array([place]), epoch)] == [one.tolist() for one in expected]


@given(st.integers(1, 30), st.integers(1, 12), st.integers(1, 40))
@settings(max_examples=30, deadline=None)
def test_an_epoch_has_every_sample_once_however_it_is_shuffled(size: int, batch: int, buffer: int) -> None:
    """And no batch has samples of two epochs; a sample stays within its block."""
    samples = samples_of(Sized, size, buffer)
    source = source_of(samples, batch)
    found: dict[int, list[int]] = {0: [], 1: []}
    for one in source.batches(Position(), 2 * source.extent.updates_per_epoch):
        found[one.epoch] += [int(value) for value in one.cut(0, one.size)[0][:, 0]]
    for order in found.values():
        assert sorted(order) == list(range(size))
        assert all(value // buffer == place // buffer for place, value in enumerate(order))
    if size > 12 and buffer > 12:
        assert found[0] != found[1]


@pytest.mark.parametrize("kind", [Drawing, Stateful])
def test_a_worker_reads_what_the_training_process_reads(kind: type[Sized]) -> None:
    """And reports its position: the state kept after a batch is the same, though the worker has read ahead."""
    found = []
    for loader in ("inline", "workers"):
        source = source_of(samples_of(kind, 17, 5), 4, loader)
        object.__setattr__(source, "plan", copy.copy(source.plan))
        object.__setattr__(source.plan, "num_workers", int(loader == "workers"))
        batches = source.batches(Position(), 7)
        found.append([(one.cut(0, one.size)[0].tolist(), source.reader.state) for one in batches])
    assert found[0] == found[1]
    assert (found[0][0][1] is None) == (kind is Drawing)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15, deadline=None)
@given(size=st.integers(1, 20), batch=st.integers(1, 9), parts=st.integers(2, 3), group=st.sampled_from([None, 2]))
def test_several_processes_read_it_all_and_take_their_shares(
    kind: type[Sized], size: int, batch: int, parts: int, group: int | None
) -> None:
    """Together their batches are those of one process."""
    whole = [content[0] for content in contents(source_of(samples_of(kind, size), batch), 0, 5)]
    shares = []
    for part in range(parts):
        source = source_of(samples_of(kind, size), batch)
        object.__setattr__(source, "split", Split(part, parts, group))
        shares.append(source.batches(Position(), 5))
    for expected, *batches in zip(whole, *shares, strict=True):
        together = torch.empty_like(expected)
        for one in batches:
            places = [place for span in one.split.spans(one.whole_size) for place in span]
            together[places] = one.cut(0, one.size)[0][: len(places)]
        assert torch.equal(together, expected)


def test_a_stream_is_evaluated_in_its_own_order() -> None:
    """As `valid` or `test`, read from the beginning each time."""
    samples = samples_of(Sized, 10)
    pipeline = InputPipeline(torch.device("cpu"), Fields(), samples.prepare)
    for _ in range(2):
        batches = list(in_order(samples, pipeline, 4))
        assert [int(i) for one in batches for i in one.cut(0, one.size)[0][:, 0]] == list(range(10))
    assert samples.given.source.reads == 20


def test_each_epoch_is_told_to_the_stream() -> None:
    """A stream that shuffles by epoch knows which one it is read for."""
    samples = samples_of(Drawing, 6)
    epochs = inputs(contents(source_of(samples, 6), 0, 3))
    assert samples.given.source.epochs == [0, 1, 2]
    assert len({str(epoch) for epoch in epochs}) == 3


def test_a_few_samples_are_had_in_any_order_without_reading_on() -> None:
    """What planning looks at costs its own samples, not the stream."""
    samples = samples_of(Sized, 10**9)
    assert samples.num_at_hand == 64
    content = samples.fetch(np.array([5, 0, 63, 5]), 0)
    assert content[1].tolist() == [25, 0, 63**2, 25]
    samples.fingerprint()
    samples.fetch(np.arange(8), 0)
    assert samples.given.source.reads == 64 + 16 + 8


def test_a_fingerprint_tells_content_length_and_blocks_apart() -> None:
    """Other data are another job."""
    prints = [
        samples.fingerprint()
        for samples in (samples_of(Sized, 20), samples_of(Sized, 21), samples_of(Sized, 20, 4), samples_of(Drawing, 20))
    ]
    assert len(set(prints)) == 4
    assert samples_of(Sized, 20).fingerprint() == prints[0]
    assert prints[0].endswith("(of the first 16 items)")


@pytest.mark.parametrize(
    ("kind", "data_class"),
    [(Sized, "stream"), (Drawing, "stream"), (Stateful, "seekable"), (Tensors, "stream"), (Shuffling, "stream")],
)
def test_only_a_state_that_can_be_kept_and_is_whole_makes_it_seekable(kind: type[Sized], data_class: str) -> None:
    """A state that is no JSON, or that leaves samples out, is worth nothing: then it is replayed."""
    samples = samples_of(kind, 8)
    assert samples.data_class == data_class
    source = source_of(samples, 4)
    list(source.batches(Position(), 1))
    assert (source.reader.kept() == {}) == (data_class == "stream")


class Counting(Stateful):
    """Its state is JSON until it has read three samples: then it has numbers for keys, which JSON makes texts of."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "seen": dict.fromkeys(range(3, self.at), True)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        assert all(isinstance(key, int) for key in state["seen"])


@pytest.mark.parametrize("buffer", [None, 2])
@pytest.mark.parametrize("done", [1, 2, 3])
def test_from_where_a_state_is_no_json_later_on_the_stream_is_replayed(done: int, buffer: int | None) -> None:
    """It does not come back as another: what was read since it could be kept is read again."""
    whole = contents(source_of(samples_of(Counting, 8, buffer), 2), 0, 4)
    source = source_of(samples_of(Counting, 8, buffer), 2)
    list(source.batches(Position(), done))
    again = source_of(samples_of(Counting, 8, buffer), 2)
    again.reader.state = source.reader.state
    rest = contents(again, done, 4)
    assert [batch[0].tolist() for batch in rest] == [batch[0].tolist() for batch in whole[done:]]


@pytest.mark.parametrize("kind", [Stateful, Tensors])
def test_every_epoch_begins_where_the_source_was_first_seen(kind: type[Sized]) -> None:
    """A source that goes on where it was is put back, for an epoch and for another job of the same source."""
    data = kind(6)
    for _ in range(2):
        samples = as_stream(data, what="data")
        batches = contents(source_of(samples, 4), 0, 3)
        assert [batch[1].tolist() for batch in batches] == [[0, 1, 2, 3], [4, 5], [0, 1, 2, 3]]


@pytest.mark.parametrize(("kind", "is_refused"), [(Stateful, True), (Tensors, True), (Sized, False)])
def test_one_stream_with_a_state_is_not_read_for_two_sets(kind: type[Sized], is_refused: bool) -> None:
    """An evaluation would put it back to its beginning, and training would read on from there."""
    data = kind(8)
    job = stoker.Job(
        model=lambda: nn.Linear(2, 1),
        data=data,
        valid=stoker.data.stream(data, length=4),
        loss="mse",
        optimizer=stoker.SGD(lr=0.1),
        batch=2,
        until=stoker.epochs(1),
    )
    if not is_refused:
        assert datasets_of(job).valid is not None
        return
    with pytest.raises(BadJob, match="data and valid are one and the same stream"):
        datasets_of(job)
    assert datasets_of(replace(job, valid=kind(4))).valid is not None


def test_a_reader_is_not_used_in_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forked worker shares the files its parent has open, and where they are."""
    samples = samples_of(Sized, 5)
    samples.fetch(np.arange(2), 0)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert samples.fetch(np.array([2]), 0)[1].tolist() == [4]
    assert samples.given.source.reads == 2 + 3


@pytest.mark.parametrize(
    ("until", "length"), [(stoker.samples(10), 12), (stoker.updates(5), 20), (stoker.updates(4.5), 20)]
)
def test_of_an_endless_stream_the_run_takes_what_it_needs(until: Any, length: int) -> None:
    """Without a length the whole run is one epoch; an epoch that was stated is what it is."""
    assert len(datasets_of(job_of(Counted(1000), until=until)).train) == length
    assert len(datasets_of(job_of(stoker.data.stream(Counted(1000), length=50), until=until)).train) == 50
    assert len(datasets_of(job_of(Sized(30), until=until)).train) == 30


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data": Counted(9)}, "data is a stream that does not say how many samples it has"),
        (
            {"data": Counted(9), "until": stoker.seconds(5)},
            "data is a stream that does not say how many samples it has",
        ),
        ({"valid": Counted(9)}, "valid is a stream that does not say how many samples it has"),
        ({"data": iter(range(9))}, "data: a .*iterator cannot be read from its beginning again and again"),
        ({"data": (i for i in range(9))}, "data: a generator cannot be read from its beginning again and again"),
        ({"data": torch.utils.data.DataLoader(Sized(9))}, "data is a DataLoader"),
        ({"data": Sized(0)}, "data has no samples"),
        ({"valid": stoker.holdout(0.5)}, "nothing can be held out of a stream"),
        ({"sampling": stoker.sampling.balanced()}, r"Job\(sampling=…\) chooses among all samples"),
        ({"sampling": stoker.lengths.packed(8)}, r"Job\(sampling=…\) chooses among all samples"),
        ({"batch": "auto"}, "measures on samples from all over the data"),
    ],
)
def test_what_does_not_go_with_a_stream_is_said(changes: dict[str, Any], words: str) -> None:
    """Before anything is spent, with what to do."""
    with pytest.raises(BadJob, match=words) as caught:
        datasets_of(job_of(**({"data": Sized(9)} | changes)))
    assert caught.value.remedy


@pytest.mark.parametrize("buffer", [None, 4])
def test_a_stream_that_ends_early_says_after_how_many(buffer: int | None) -> None:
    """Training neither begins the next epoch early nor pads."""
    source = stoker.data.StreamSource(Counted(10), 13, buffer)
    with pytest.raises(BadJob, match="the stream Counted ended after 10 samples of epoch 1; 13 were to be read"):
        contents(source_of(as_stream(source, what="data"), 4), 0, 4)


@pytest.mark.parametrize("kind", [Counted, Drawing, Stateful])
@pytest.mark.parametrize("buffer", [None, 4])
def test_a_stream_of_unknown_length_is_read_again_where_it_ends(kind: type[Any], buffer: int | None) -> None:
    """A run of 33 samples goes over its 10 more than three times; from a batch in the middle on as from the first."""

    class Unsized(kind):  # type: ignore[misc]
        __len__ = None

    def source() -> BatchSource:
        return source_of(as_stream(stoker.data.StreamSource(Unsized(10), None, buffer), what="data", length=33), 4)

    whole = contents(source(), 0, 9)
    seen = torch.cat([batch[0][:, 0] for batch in whole]).tolist()
    assert sorted(seen) == sorted([*range(10), *range(10), *range(10), *range(3)] if buffer is None else seen)
    assert len(seen) == 33
    assert set(seen) == set(range(10))
    for start in (2, 5, 8):
        for ours, theirs in zip(contents(source(), start, 9), whole[start:], strict=True):
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_a_stream_of_unknown_length_without_samples_ends_the_run() -> None:
    """It is not read again for ever."""

    class Empty(Counted):
        def __iter__(self) -> Any:
            return iter(())

    with pytest.raises(BadJob, match="the stream Empty ended after 0 samples"):
        contents(source_of(as_stream(Empty(0), what="data", length=33), 4), 0, 9)


def test_a_stream_that_raises_is_named_with_the_sample() -> None:
    """The samples before it are trained on."""
    source = source_of(samples_of(Failing, 9), 2)
    batches = source.batches(Position(), 4)
    assert [next(batches).size, next(batches).size] == [2, 2]
    with pytest.raises(BadJob, match="sample 5 of the stream Failing raised OSError: the line went dead"):
        next(batches)


@pytest.mark.parametrize("data", [[1, 2], (torch.ones(3),), {"x": torch.ones(3)}, {1, 2}, "text", torch.ones(2), 7])
def test_what_has_numbers_is_no_stream(data: Any) -> None:
    """Arrays, lists and containers are as they were."""
    assert not is_stream(data)
