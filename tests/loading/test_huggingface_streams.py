"""Hugging Face's data sets in streaming mode, read by their own library."""

from __future__ import annotations

from typing import Any

from stoker.loading.samples import Samples
from stoker.loading.streams import as_stream, is_stream
from stoker.records import Position
from tests.loading.data import contents, source_of
from tests.optional import optional

datasets = optional("datasets")

SIZE = 23


def streamed(*, shuffles: bool = False) -> Any:
    """Rows of two columns in three shards, one after the other; their library may shuffle them."""
    rows = datasets.Dataset.from_dict({"x": [float(i) for i in range(SIZE)], "label": [i % 3 for i in range(SIZE)]})
    stream = rows.to_iterable_dataset(num_shards=3)
    return stream.shuffle(seed=5, buffer_size=7) if shuffles else stream


def samples_of(stream: Any) -> Samples:
    """The stream's samples."""
    assert is_stream(stream)
    return as_stream(stream, what="data", seed=1, length=SIZE)


def rows_of(batches: list[Any]) -> list[Any]:
    """The column x of batches."""
    return [batch["x"].tolist() for batch in batches]


def test_it_is_put_where_it_was_by_its_own_state() -> None:
    """At any update of two epochs, over the borders of shards and of epochs."""
    whole = rows_of(contents(source_of(samples_of(streamed()), 4), 0, 12))
    assert sorted(x for batch in whole[:6] for x in batch) == [float(i) for i in range(SIZE)]
    for stop in (1, 3, 6, 8):
        first = source_of(samples_of(streamed()), 4)
        list(first.batches(Position(), stop))
        assert first.reader.state is not None
        second = source_of(samples_of(streamed()), 4)
        second.reader.state = first.reader.state
        assert rows_of(contents(second, stop, 12)) == whole[stop:]


def test_shuffled_by_their_library_it_is_replayed() -> None:
    """Their state leaves out the buffer, so it is not used; each epoch has an order of its own, the same again."""
    samples = samples_of(streamed(shuffles=True))
    assert samples.data_class == "stream"
    whole = rows_of(contents(source_of(samples, 4), 0, 12))
    assert sorted(x for batch in whole[:6] for x in batch) == [float(i) for i in range(SIZE)]
    assert whole[:6] != whole[6:]
    assert rows_of(contents(source_of(samples_of(streamed(shuffles=True)), 4), 7, 12)) == whole[7:]
