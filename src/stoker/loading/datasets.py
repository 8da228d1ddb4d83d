"""The three sets of samples of a job."""

from __future__ import annotations

from dataclasses import dataclass

from stoker.jobs import Holdout, Job
from stoker.jobs.extent import Extent
from stoker.loading.samples import Samples, as_samples, hold_out


@dataclass(frozen=True)
class Datasets:
    """What a job trains on, chooses by, and is tested on; `note` is something the user should know about the data."""

    train: Samples
    valid: Samples | None
    test: Samples | None
    note: str | None = None

    def fingerprint(self) -> str:
        """Of all three sets."""
        sets = {"train": self.train, "valid": self.valid, "test": self.test}
        return "; ".join(f"{name} {samples.fingerprint()}" for name, samples in sets.items() if samples is not None)

    def extent(self, job: Job) -> Extent:
        """The shape of the job's run over these samples."""
        return Extent(len(self.train), job.batch)


def datasets_of(job: Job) -> Datasets:
    """The job's data as samples, the holdout set aside.

    Raises:
        BadJob: data of an unsupported kind, of mismatched lengths, or empty.
    """
    train = as_samples(job.data, what="data", collate=job.collate, seed=job.seed)
    valid: Samples | None = None
    if isinstance(job.valid, Holdout):
        train, valid = hold_out(train, job.valid)
    elif job.valid is not None:
        valid = as_samples(job.valid, what="valid", collate=job.collate, seed=job.seed)
    test = None if job.test is None else as_samples(job.test, what="test", collate=job.collate, seed=job.seed)
    return Datasets(train, valid, test, note=getattr(job.data, "note", None))
