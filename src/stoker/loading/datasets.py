"""The sets of samples of a job.

What the data call their samples.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from stoker.errors import BadJob
from stoker.jobs import Holdout, Job
from stoker.jobs.batch_size import AutoBatch, TokenBatch
from stoker.jobs.extent import Extent
from stoker.jobs.lengths import Bucketed, Packed
from stoker.loading.dataset_adapters import SourceSamples, as_samples
from stoker.loading.fields import Fields
from stoker.loading.labels import held_out_by_class, labels_of
from stoker.loading.lengths import BucketedSamples, PackedSamples, first_dimension, lengths_of
from stoker.loading.order import Indices
from stoker.loading.samples import RearrangedSamples, Samples, SampleSubset, hold_out, rows_of
from stoker.loading.sampling import DrawnSamples, sampled
from stoker.loading.streams import StreamSamples, as_stream, is_stream
from stoker.loading.token_batches import extent_of, in_token_batches

_LOOKED_AT = 64
"""Samples that are asked whether they are padded beyond their lengths."""


@dataclass(frozen=True)
class Datasets:
    """What a job trains on, chooses by, and is tested on; `note` is something the user should know about the data.

    `held_out` are the validation sets by split: none, `valid`, or several, `valid/NAME`.
    """

    train: Samples
    held_out: Mapping[str, Samples]
    test: Samples | None
    note: str | None = None

    @property
    def valid(self) -> Samples | None:
        """The validation set that chooses: the first."""
        return next(iter(self.held_out.values()), None)

    def fingerprint(self) -> str:
        """Of all sets."""
        sets = {"train": self.train, **self.held_out, "test": self.test}
        return "; ".join(f"{name} {samples.fingerprint()}" for name, samples in sets.items() if samples is not None)

    def extent(self, job: Job) -> Extent:
        """The shape of the job's run over these samples."""
        return extent_of(self.train, job)


def datasets_of(job: Job) -> Datasets:
    """The job's data as samples, the holdout set aside.

    Raises:
        BadJob: data of an unsupported kind, of mismatched lengths, or empty.
    """
    whole = _samples(job, job.data, "data")
    train, held_out = whole, dict[str, Samples]()
    for split, given in job.validation.items():
        if isinstance(given, Holdout):
            train, held_out[split] = _held_out(whole, given, job)
        else:
            held_out[split] = _samples(job, given, split)
    test = None if job.test is None else _samples(job, job.test, "test")
    _require_apart({"data": whole, **held_out, "test": test})
    note = getattr(job.data, "note", None)
    if isinstance(train, StreamSamples):
        _require_indexed(job)
    elif job.sampling is not None:
        train = sampled(train, whole, job)
    elif isinstance(job.batch, TokenBatch) and not isinstance(job.lengths, Packed):
        train = in_token_batches(train, whole, job)
    elif isinstance(job.lengths, Bucketed):
        lengths = rows_of(train, lengths_of(whole, job.lengths.length_of, "data"))
        train = BucketedSamples(train, lengths, job.batch, job.lengths.window)
    elif isinstance(job.lengths, Packed):
        return _packed(job, job.lengths, whole, Datasets(train, held_out, test, note))
    return Datasets(train, held_out, test, note)


def _samples(job: Job, data: Any, what: str) -> Samples:
    if is_stream(data):
        return as_stream(data, what=what, collate=job.collate, seed=job.seed, length=_whole_run(job, what))
    return as_samples(data, what=what, collate=job.collate, seed=job.seed)


def _whole_run(job: Job, what: str) -> int | None:
    """Samples of the whole run, where that is known: what training reads of a stream that does not say its length."""
    if what != "data" or job.until.unit not in ("samples", "updates"):
        return None
    updates = job.until.value / (job.batch if job.until.unit == "samples" else 1)
    return math.ceil(updates) * job.batch


def _held_out(whole: Samples, holdout: Holdout, job: Job) -> tuple[Samples, Samples]:
    if isinstance(whole, StreamSamples):
        raise BadJob("nothing can be held out of a stream, whose samples have no numbers",
                     remedy="Give valid=… data of its own.")  # fmt: skip
    if not holdout.stratify:
        return hold_out(whole, holdout)
    return held_out_by_class(whole, holdout, labels_of(whole, job, getattr(job.sampling, "targets", None)))


def _require_apart(sets: dict[str, Samples | None]) -> None:
    """Refuse one stream with a state as two sets: an evaluation would move the place that training reads on from.

    Raises:
        BadJob: there is one.
    """
    streams = {what: samples for what, samples in sets.items() if isinstance(samples, StreamSamples)}
    for (one, first), (other, second) in itertools.combinations(streams.items(), 2):
        if first.given.source is second.given.source and first.has_state:
            raise BadJob(
                f"{one} and {other} are one and the same stream, {first.name}, which has one state: reading one moves "
                "the other",
                remedy="Make a second one for it, with the same arguments.",
            )


def _require_indexed(job: Job) -> None:
    """Refuse what chooses samples by number, of a stream."""
    for name in ("sampling", "lengths"):
        if getattr(job, name) is not None:
            raise BadJob(f"Job({name}=…) chooses among all samples, and data is a stream",
                         remedy="Do it within the stream, or give data with __len__ and __getitem__.")  # fmt: skip
    if isinstance(job.batch, TokenBatch):
        raise BadJob(f"Job(batch={job.batch!r}) goes by the lengths of all samples, and data is a stream",
                     remedy="Give the batch as a number, or data with __len__ and __getitem__.")  # fmt: skip
    if isinstance(job.batch, AutoBatch):
        raise BadJob('Job(batch="auto") measures on samples from all over the data, and data is a stream',
                     remedy="Give the batch as a number.")  # fmt: skip


def _packed(job: Job, settings: Packed, whole: Samples, sets: Datasets) -> Datasets:
    """The sets with their samples packed into rows, each by its own lengths."""
    fields, length_of = Fields(job.inputs, job.target), settings.length_of
    lengths = lengths_of(whole, length_of, "data")

    def rows(samples: Samples, what: str) -> Samples:
        if isinstance(samples, StreamSamples):
            raise BadJob(f"{what} is a stream, and its samples are to be packed by length",
                         remedy="Give data with __len__ and __getitem__.")  # fmt: skip
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
    """Refuse to take another set's samples for as long as they are, where those of `data` are padded beyond."""
    few = np.arange(min(_LOOKED_AT, len(whole)), dtype=np.int64)
    if [first_dimension(sample) for sample in whole.items(few, 0)] != lengths[few].tolist():
        raise BadJob(
            f"packed(length_of=…) lists lengths of data, whose samples are padded beyond; of {what} nobody says them",
            remedy="Give length_of=… as a function of a sample, such as one that counts its attention mask.",
        )


def data_indices(samples: Samples, indices: Indices, epoch: int) -> Indices:
    """Where samples `indices` of `epoch` lie in the data that the user gave: of packed rows all that are in them."""
    if isinstance(samples, PackedSamples):
        members = [samples.members(int(row), epoch) for row in indices]
        return data_indices(samples.whole, np.concatenate([np.empty(0, np.int64), *members]), epoch)
    if isinstance(samples, DrawnSamples):
        return data_indices(samples.whole, samples.drawn(indices, epoch), epoch)
    if isinstance(samples, SampleSubset):
        return data_indices(samples.whole, samples.indices[indices], epoch)
    return data_indices(samples.whole, indices, epoch) if isinstance(samples, RearrangedSamples) else indices


def sample_name(samples: Samples, index: int) -> str:
    """The file, or file and row, that sample `index` lies in; empty where data have no names for samples."""
    if isinstance(samples, SampleSubset):
        return sample_name(samples.whole, int(samples.indices[index]))
    return samples.named(index) if isinstance(samples, SourceSamples) else ""
