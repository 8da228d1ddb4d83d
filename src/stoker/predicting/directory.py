"""Where a job's rows go: its record first, then each part as a whole or not at all.

```
out/job.json                            what decides every bit of the rest
    predictions/part-00000.parquet      a part that is done
    bad/part-00000.jsonl                its bad rows, until all is done
    bad_rows.jsonl                      all of them
    summary.json                        written last
```
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from stoker.errors import BadRun, StokerError
from stoker.records import digest, dumps, loads
from stoker.records.prediction import BadRow, PredictionJob, PredictionSummary
from stoker.store import disk_errors, read_lines, write_atomic
from stoker.store.disk_errors import RUN_DIRECTORY
from stoker.store.files import is_aside, make_directories, remove_leftovers, remove_tree
from stoker.store.locks import HELD_FILE, LOCK_FILE

JOB, SUMMARY, BAD_ROWS = "job.json", "summary.json", "bad_rows.jsonl"
PREDICTIONS, BAD = "predictions", "bad"
JOB_KEY, PART_KEY = "stoker.job", "stoker.part"
"""Keys of a part's metadata: the digest of its job (`job_digest`), and its number."""


class OutputDirectory:
    """The directory of one job; one process at a time writes to it, which the caller sees to."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.predictions = path / PREDICTIONS
        self.bad_rows = path / BAD_ROWS
        self._bad = path / BAD

    def is_fresh(self) -> bool:
        """Whether nothing is in it that could be lost."""
        ours = {LOCK_FILE, HELD_FILE}
        return not self.path.exists() or all(one.name in ours or is_aside(one) for one in self.path.iterdir())

    def read_job(self) -> PredictionJob | None:
        """The job that was begun here, if any.

        Raises:
            BadRun: it cannot be read, or there are other things.
        """
        try:
            return loads((self.path / JOB).read_bytes(), PredictionJob)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise BadRun(f"{self.path / JOB} cannot be read: {error}", remedy="Start over with --new.") from error

    def begin(self, job: PredictionJob) -> None:
        """Write the job down."""
        with _own_remedy(), disk_errors(self.path, "the predictions", error=BadRun):
            make_directories(self.path)
            write_atomic(self.path / JOB, dumps(job), error=BadRun)

    def tidy(self) -> None:
        """Make what is missing, and remove what a killed process left half-written."""
        with _own_remedy(), disk_errors(self.path, "the predictions"):
            for place in (self.path, self.predictions, self._bad):
                make_directories(place)
                remove_leftovers(place)

    def done_parts(self, job: PredictionJob) -> list[int]:
        """Parts that are there, whole, and of this job: each of its rows was answered, or is among its bad ones."""
        wanted = job_digest(job)
        return [number for number, part in enumerate(job.parts) if self._is_done(number, part.num_rows, wanted)]

    def write_part(self, number: int, table: bytes, bad: Sequence[BadRow]) -> None:
        """Keep a part: its bad rows first, so that where its table is, all of it is.

        Raises:
            RunFailed: the disk is full, or cannot be written.
        """
        what = f"part {number}"
        with _own_remedy():
            if bad:
                lines = "".join(json.dumps(asdict(one), ensure_ascii=False) + "\n" for one in bad)
                write_atomic(self._bad_path(number), lines.encode("utf-8", "surrogateescape"), what=what)
            else:  # rows that an engine could not compute the last time, which was cut off, are bad no more
                self._bad_path(number).unlink(missing_ok=True)
            write_atomic(self._part_path(number), table, what=what)

    def num_bad(self, parts: Iterable[int]) -> int:
        """Bad rows in these parts."""
        return sum(len(read_lines(self._bad_path(number))) for number in parts)

    def common_reasons(self, parts: Iterable[int], most: int = 3) -> list[tuple[str, int]]:
        """The commonest reasons, each with the column, and how often they occur."""
        counts: Counter[str] = Counter()
        for number in parts:
            for line in read_lines(self._bad_path(number)):
                row = json.loads(line)
                counts[f"{row['column']} {row['reason']}".strip()] += 1
        return counts.most_common(most)

    def merge_bad_rows(self, num_parts: int) -> None:
        """One file of all bad rows, in the order of the parts; empty where there are none."""
        content = b"".join(
            path.read_bytes() for number in range(num_parts) if (path := self._bad_path(number)).exists()
        )
        with _own_remedy():
            write_atomic(self.bad_rows, content)

    def finish(self, summary: PredictionSummary) -> None:
        """Write the summary; the bad rows of single parts are in the whole file by now."""
        with _own_remedy():
            write_atomic(self.path / SUMMARY, dumps(summary))
            with disk_errors(self._bad, "the predictions"):
                if self._bad.exists():
                    remove_tree(self._bad)

    def read_summary(self) -> PredictionSummary | None:
        """What came of a job that is done."""
        try:
            return loads((self.path / SUMMARY).read_bytes(), PredictionSummary)
        except (OSError, ValueError):
            return None

    def _is_done(self, number: int, num_rows: int, job_digest: str) -> bool:
        try:
            found = pq.read_metadata(self._part_path(number))
        except (OSError, pa.ArrowException):
            return False
        metadata = found.metadata or {}
        is_ours = metadata.get(JOB_KEY.encode()) == job_digest.encode()
        is_it = metadata.get(PART_KEY.encode()) == str(number).encode()
        return is_ours and is_it and found.num_rows + self.num_bad([number]) == num_rows

    def _part_path(self, number: int) -> Path:
        return self.predictions / f"part-{number:05d}.parquet"

    def _bad_path(self, number: int) -> Path:
        return self._bad / f"part-{number:05d}.jsonl"


def job_digest(job: PredictionJob) -> str:
    """Digest (hex) of what decides the bits of a job's parts; when it was begun, and why it is cut up so, do not."""
    sources = tuple(replace(source, stamp="") for source in job.sources)
    return digest(replace(job, made_at="", basis="", sources=sources))


def next_free(path: Path) -> Path:
    """`path` if nothing is there, else the first of `path-2`, `path-3`, … of which that is true."""
    candidates = _numbered(path)
    return next(one for one in candidates if OutputDirectory(one).is_fresh())


def _numbered(path: Path) -> Iterator[Path]:
    yield path
    number = 2
    while True:
        yield path.with_name(f"{path.name}-{number}")
        number += 1


@contextmanager
def _own_remedy() -> Iterator[None]:
    """The store's remedies name the options of a run that trains; here the place is chosen with -o."""
    try:
        yield
    except StokerError as error:
        error.remedy = str(error.remedy).replace(RUN_DIRECTORY, "-o DIR")
        raise
