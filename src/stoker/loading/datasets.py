"""The training, validation and test sets of a job, and the names of their samples in the user's data."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from stoker.data.files.source import IndexedSource
from stoker.errors import BadJob
from stoker.jobs import Holdout, Job
from stoker.jobs.batch_size import AutoBatch, TokenBatch
from stoker.jobs.lengths import Bucketed, Packed
from stoker.jobs.run_length import Extent
from stoker.jobs.sampling import Sampling
from stoker.loading.dataset_adapters import SourceSamples, as_samples
from stoker.loading.lengths import BucketedOrder, PackedSamples, collate_of, first_dimension, lengths_of
from stoker.loading.order import Indices
from stoker.loading.samples import (
    ItemSamples,
    OrderedSamples,
    RearrangedSamples,
    Samples,
    SampleSubset,
    hold_out,
    rows_of,
)
from stoker.loading.sampling import DrawnSamples, held_out_by_class, labels_of, sampled
from stoker.loading.streams import StreamSamples, as_stream, is_stream
from stoker.loading.token_batches import extent_of, in_token_batches
from stoker.records import InputColumns

_LOOKED_AT = 64
"""Samples checked for padding beyond their lengths."""


@dataclass(frozen=True)
class Datasets:
    """The sets of a job; `note` is a remark about the data for the user.

    `held_out` are the validation sets by split: none, `valid`, or several, `valid/NAME`.
    """

    train: Samples
    held_out: Mapping[str, Samples]
    test: Samples | None
    note: str | None = None

    @property
    def valid(self) -> Samples | None:
        """The first validation set, by which models are selected."""
        return next(iter(self.held_out.values()), None)

    def fingerprint(self) -> str:
        """The fingerprints of all sets."""
        sets = {"train": self.train, **self.held_out, "test": self.test}
        return "; ".join(f"{name} {samples.fingerprint()}" for name, samples in sets.items() if samples is not None)

    def were_of(self, fingerprint: str) -> bool:
        """Whether a run with this fingerprint of its data had these sets; a trial trains without the test set."""
        return fingerprint in (self.fingerprint(), replace(self, test=None).fingerprint())

    def extent(self, job: Job) -> Extent:
        """The shape of the job's run over these samples."""
        return extent_of(self.train, job)


def datasets_of(job: Job) -> Datasets:
    """The job's data as samples, the holdout set aside.

    Raises:
        BadJob: data of an unsupported kind, of mismatched lengths, or empty.
    """
    if is_stream(job.data):
        _require_indexed(job)
    whole = _samples(job, job.data, "data")
    train, held_out = whole, dict[str, Samples]()
    for split, given in job.validation.items():
        if not isinstance(given, Holdout):
            held_out[split] = _samples(job, given, split)
        elif isinstance(whole, StreamSamples):
            raise BadJob(
                "nothing can be held out of a stream, whose samples have no numbers",
                remedy="Give valid=… data of its own.",
            )
        elif given.stratify:
            labels = labels_of(whole, job, getattr(job.sampling, "targets", None))
            train, held_out[split] = held_out_by_class(whole, given, labels)
        else:
            train, held_out[split] = hold_out(whole, given)
    test = None if job.test is None else _samples(job, job.test, "test")
    _require_separate_streams({"data": whole, **held_out, "test": test})
    notes = [getattr(job.data, "note", None), *_require_one_encoding({"data": whole, **held_out, "test": test})]
    if isinstance(whole, SourceSamples) and any(isinstance(given, Holdout) for given in job.validation.values()):
        notes.append(whole.source.note_on_parts)
    note = "; ".join(filter(None, notes)) or None
    if isinstance(job.sampling, Sampling):
        train = sampled(train, whole, job)
    elif isinstance(job.batch, TokenBatch) and not isinstance(job.sampling, Packed):
        train = in_token_batches(train, whole, job)
    elif isinstance(job.sampling, Bucketed):
        lengths = rows_of(train, lengths_of(whole, job.sampling.length_of, "data"))
        order = partial(BucketedOrder, lengths, job.batch_size, job.sampling.window)
        train = OrderedSamples(train, "bucketed", order)
    elif isinstance(job.sampling, Packed):
        return _packed(job, job.sampling, whole, Datasets(train, held_out, test, note))
    return Datasets(train, held_out, test, note)


def input_columns_of(job: Job) -> InputColumns | None:
    """The columns of a table that the job's samples are read from; None without one, or where collate= remakes them."""
    if not isinstance(job.data, IndexedSource) or job.fields.collate is not None:
        return None
    entries = {str(entry): columns for entry, columns in job.data.input_columns.items()}
    return InputColumns(entries=entries) if entries else None


def _samples(job: Job, data: Any, what: str) -> Samples:
    if not is_stream(data):
        return as_samples(data, what=what, collate=collate_of(job), seed=job.seed)
    length = None
    if what == "data" and job.until.unit in ("samples", "updates"):  # then the samples of the whole run are known
        updates = job.until.value / (job.batch_size if job.until.unit == "samples" else 1)
        length = math.ceil(updates) * job.batch_size
    return as_stream(data, what=what, collate=collate_of(job), seed=job.seed, length=length)


def _require_separate_streams(sets: dict[str, Samples | None]) -> None:
    """Raise BadJob if a stream with a state is in two sets: evaluation would move the position of training."""
    streams = {what: samples for what, samples in sets.items() if isinstance(samples, StreamSamples)}
    for (name, first), (other_name, second) in itertools.combinations(streams.items(), 2):
        if first.given.source is second.given.source and first.has_state:
            raise BadJob(
                f"{name} and {other_name} are one and the same stream, {first.name}, which has one state: reading one "
                "moves the other",
                remedy="Make a second one for it, with the same arguments.",
            )


def _require_one_encoding(sets: dict[str, Samples | None]) -> list[str]:
    """Raise BadJob if a number stands for something else in another set than in `data`.

    A set may lack some numbers. If it has more, or if no class of it has a name that one of `data` has, as where the
    digits of two sets are written in two ways or folders are no labels at all, that is a note.
    """
    encodings = {what: _encoding_of(samples) for what, samples in sets.items()}
    data = encodings.pop("data")
    notes: list[str] = []
    for what, encoding in encodings.items():
        for name, meanings in encoding.items():
            learned = data.get(name, {})
            different = [index for index in sorted(meanings.keys() & learned) if meanings[index] != learned[index]]
            if different:
                index = different[0]
                place = f"{name} {index}" if len(learned) > 1 else name
                problem = f"{place} is {meanings[index]!r} in {what} and {learned[index]!r} in data"
                if name == "class" and "target" not in encoding and not {*meanings.values()} & {*learned.values()}:
                    notes.append(f"{problem}; they are taken for the same")
                    continue
                raise BadJob(
                    f"{problem}, so that the model would be judged by other numbers than it learned",
                    remedy="Give both the same: a table like=TABLE, that of data; images the classes=SOURCE.classes, "
                    "mean and std of data; a dataset as those of torchvision a target_transform to those of data.",
                )
            more = sorted(meanings.keys() - learned)
            if learned and more:
                notes.append(f"{name} {more[0]} of {what}, {meanings[more[0]]!r}, is not in data")
    return notes


def _encoding_of(samples: Samples | None) -> Mapping[str, Mapping[int, object]]:
    """The meaning of the numbers in samples, where their source, or a dataset as those of torchvision, states it."""
    if isinstance(samples, SourceSamples):
        return {name: dict(enumerate(meanings)) for name, meanings in samples.source.encoding.items()}
    dataset = samples.dataset if isinstance(samples, ItemSamples) else None
    numbers = getattr(dataset, "class_to_idx", None)
    if not isinstance(numbers, Mapping) or getattr(dataset, "target_transform", None) is not None:
        return {}
    names = {number: name for name, number in numbers.items() if isinstance(number, int)}
    return {"class": names} if len(names) == len(numbers) else {}


def _require_indexed(job: Job) -> None:
    """Raise BadJob for settings that choose samples by number, which a stream has not."""
    if job.sampling is not None:
        raise BadJob(
            "Job(sampling=…) chooses among all samples, and data is a stream",
            remedy="Do it within the stream, or give data with __len__ and __getitem__.",
        )
    if isinstance(job.batch, TokenBatch):
        raise BadJob(
            f"Job(batch={job.batch!r}) goes by the lengths of all samples, and data is a stream",
            remedy="Give the batch as a number, or data with __len__ and __getitem__.",
        )
    if isinstance(job.batch, AutoBatch):
        raise BadJob(
            'Job(batch="auto") measures on samples from all over the data, and data is a stream',
            remedy="Give the batch as a number.",
        )


def _packed(job: Job, settings: Packed, whole: Samples, sets: Datasets) -> Datasets:
    """The sets with their samples packed into rows, each by its own lengths."""
    fields, length_of = job.fields, settings.length_of
    lengths = lengths_of(whole, length_of, "data")

    def rows(samples: Samples, what: str) -> Samples:
        if isinstance(samples, StreamSamples):
            raise BadJob(
                f"{what} is a stream, and its samples are to be packed by length",
                remedy="Give data with __len__ and __getitem__.",
            )
        if what == "data" or isinstance(job.validation.get(what), Holdout):
            return PackedSamples(samples, rows_of(samples, lengths), settings, fields, job.seed)
        is_listed = length_of is not None and not callable(length_of)
        if is_listed:
            _require_unpadded(whole, lengths, what)
        own = lengths_of(samples, None if is_listed else length_of, what)
        return PackedSamples(samples, own, settings, fields, job.seed)

    held_out = {split: rows(samples, split) for split, samples in sets.held_out.items()}
    test = None if sets.test is None else rows(sets.test, "test")
    return Datasets(rows(sets.train, "data"), held_out, test, sets.note)


def _require_unpadded(whole: Samples, lengths: Indices, what: str) -> None:
    """Raise BadJob if samples of `data` are padded beyond their listed lengths: then those of `what` are unknown."""
    few = np.arange(min(_LOOKED_AT, len(whole)), dtype=np.int64)
    if [first_dimension(sample) for sample in whole.items(few, 0)] != lengths[few].tolist():
        raise BadJob(
            f"packed(length_of=…) lists lengths of data, whose samples are padded beyond; those of {what} are unknown",
            remedy="Give length_of=… as a function of a sample, such as one that counts its attention mask.",
        )


def data_indices(samples: Samples, indices: Indices, epoch: int) -> Indices:
    """Indices in the user's data of samples `indices` of `epoch`; for packed rows, of all their members."""
    if isinstance(samples, PackedSamples):
        members = [samples.members(int(row), epoch) for row in indices]
        return data_indices(samples.whole, np.concatenate([np.empty(0, np.int64), *members]), epoch)
    if isinstance(samples, DrawnSamples):
        return data_indices(samples.whole, samples.drawn(indices, epoch), epoch)
    if isinstance(samples, SampleSubset):
        return data_indices(samples.whole, samples.indices[indices], epoch)
    return data_indices(samples.whole, indices, epoch) if isinstance(samples, RearrangedSamples) else indices


def sample_name(samples: Samples, index: int) -> str:
    """The file, or file and row, of sample `index`; empty where data have no names for samples."""
    if isinstance(samples, SampleSubset):
        return sample_name(samples.whole, int(samples.indices[index]))
    return samples.named(index) if isinstance(samples, SourceSamples) else ""
