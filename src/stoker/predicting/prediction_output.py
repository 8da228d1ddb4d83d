"""The output directory of a job: its record first, then each part, which appears complete or not at all.

```
out/job.json                            decides every bit of the rest
    predictions/part-00000.parquet      a finished part: each row's origin, kept columns, outputs and labels
    bad/part-00000.jsonl                its bad rows, until all parts are finished
    bad_rows.jsonl                      all of them
    summary.json                        written last
```
"""

from __future__ import annotations

import io
import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from stoker.artifacts.dtypes import dtype_of
from stoker.errors import BadJob, BadRun, StokerError
from stoker.predicting.batched_inference import RowOutputs, Values
from stoker.predicting.column_mapping import sample_shape
from stoker.predicting.row_source import SourceColumn, SourceRows
from stoker.records import Manifest, digest, dumps, loads
from stoker.records.codec import JSON, parsed, printable
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
    """The directory of one job. The caller makes sure that only one process at a time writes to it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.predictions = path / PREDICTIONS
        self.bad_rows = path / BAD_ROWS
        self._bad = path / BAD

    def is_fresh(self) -> bool:
        """True if it holds nothing that could be lost."""
        ours = {LOCK_FILE, HELD_FILE}
        return not self.path.exists() or all(path.name in ours or is_aside(path) for path in self.path.iterdir())

    def read_job(self) -> PredictionJob | None:
        """The job that was begun here, if any; raises BadRun if it cannot be read."""
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
        """Make missing directories, and remove half-written files of a killed process."""
        with _own_remedy(), disk_errors(self.path, "the predictions"):
            for place in (self.path, self.predictions, self._bad):
                make_directories(place)
                remove_leftovers(place)

    def done_parts(self, job: PredictionJob) -> list[int]:
        """Finished parts of this job: each row has outputs, or is among the bad ones."""
        digest = job_digest(job)
        return [number for number, part in enumerate(job.parts) if self._is_done(number, part.num_rows, digest)]

    def write_part(self, number: int, table: bytes, bad: Sequence[BadRow]) -> None:
        """Write a part: its bad rows first, so that a part with a table is complete.

        Raises:
            RunFailed: the disk is full, or cannot be written.
        """
        what = f"part {number}"
        with _own_remedy():
            if bad:
                lines = "".join(dumps(row, indent=None) + "\n" for row in bad)
                write_atomic(self._bad_path(number), lines, what=what)
            else:  # rows that an engine could not compute in an interrupted attempt
                self._bad_path(number).unlink(missing_ok=True)
            write_atomic(self._part_path(number), table, what=what)

    def num_bad(self, parts: Iterable[int]) -> int:
        """Number of bad rows in these parts [rows]."""
        return sum(len(read_lines(self._bad_path(number))) for number in parts)

    def common_reasons(self, parts: Iterable[int]) -> list[tuple[str, int]]:
        """The three most frequent reasons, each with the column, and their counts."""
        counts: Counter[str] = Counter()
        for number in parts:
            for line in read_lines(self._bad_path(number)):
                row = parsed(line)
                counts[f"{row['column']} {row['reason']}".strip()] += 1
        return counts.most_common(3)

    def merge_bad_rows(self, num_parts: int) -> None:
        """Write one file of all bad rows, in the order of the parts; empty if there are none."""
        content = b"".join(
            path.read_bytes() for number in range(num_parts) if (path := self._bad_path(number)).exists()
        )
        with _own_remedy():
            write_atomic(self.bad_rows, content)

    def finish(self, summary: PredictionSummary) -> None:
        """Write the summary, and remove the bad rows of single parts, which have been merged."""
        with _own_remedy():
            write_atomic(self.path / SUMMARY, dumps(summary))
            with disk_errors(self._bad, "the predictions"):
                if self._bad.exists():
                    remove_tree(self._bad)

    def read_summary(self, job: PredictionJob) -> PredictionSummary | None:
        """The summary of this job; None unless it is finished, and all its parts and bad rows are still there."""
        try:
            summary = loads((self.path / SUMMARY).read_bytes(), PredictionSummary)
        except (OSError, ValueError):
            return None
        digest = job_digest(job)
        rows = sum(self._num_answered(number, digest) or 0 for number in range(len(job.parts)))
        is_whole = (rows, len(read_lines(self.bad_rows))) == (summary.rows, summary.bad_rows)
        return summary if is_whole else None

    def _is_done(self, number: int, num_rows: int, job_digest: str) -> bool:
        answered = self._num_answered(number, job_digest)
        return answered is not None and answered + self.num_bad([number]) == num_rows

    def _num_answered(self, number: int, job_digest: str) -> int | None:
        """Number of rows in the table of a part by its footer [rows]; None if there is none, or of another job."""
        try:
            footer = pq.read_metadata(self._part_path(number))
        except (OSError, pa.ArrowException):
            return None
        metadata = footer.metadata or {}
        is_ours = metadata.get(JOB_KEY.encode()) == job_digest.encode()
        is_part = metadata.get(PART_KEY.encode()) == str(number).encode()
        return int(footer.num_rows) if is_ours and is_part else None

    def _part_path(self, number: int) -> Path:
        return self.predictions / f"part-{number:05d}.parquet"

    def _bad_path(self, number: int) -> Path:
        return self._bad / f"part-{number:05d}.jsonl"


def job_digest(job: PredictionJob) -> str:
    """Digest (hex) of everything that decides the bits of a job's parts: not of the time, nor of why it is cut so."""
    sources = tuple(replace(source, stamp="") for source in job.sources)
    return digest(replace(job, made_at="", basis="", sources=sources))


def next_free(path: Path) -> Path:
    """`path` if nothing is there, else the first of `path-2`, `path-3`, … of which that is true."""
    others = (path.with_name(f"{path.name}-{number}") for number in itertools.count(2))
    return next(place for place in itertools.chain((path,), others) if OutputDirectory(place).is_fresh())


@contextmanager
def _own_remedy() -> Iterator[None]:
    """The store's remedies name the options of a run that trains; here the place is chosen with -o."""
    try:
        yield
    except StokerError as error:
        error.remedy = str(error.remedy).replace(RUN_DIRECTORY, "-o DIR")
        raise


SOURCE, ROW, LABEL = "source", "row", "label"
"""Columns of every table: the file, the row in it (from 0); and the class that was found."""


def schema_of(manifest: Manifest, kept: Sequence[SourceColumn]) -> pa.Schema:
    """The columns of the output; kept ones of JSON are strings, since each row may hold another type.

    Raises:
        BadJob: two of them would have one name.
    """
    fields = [pa.field(SOURCE, pa.string()), pa.field(ROW, pa.int64())]
    fields += [pa.field(field.name, field.type or pa.string()) for field in kept]
    for spec in manifest.outputs:
        # Vectors are lists of fixed size, dimensions that vary are lists; BF16, which Parquet lacks, becomes FP32.
        if spec.datatype == "BYTES":
            kind = pa.binary()
        else:
            kind = pa.float32() if spec.datatype == "BF16" else pa.from_numpy_dtype(dtype_of(spec.datatype))
        for size in reversed(sample_shape(spec, manifest)):
            kind = pa.list_(kind, size) if isinstance(size, int) else pa.list_(kind)
        fields.append(pa.field(spec.name, kind))
    fields += [
        pa.field(column, pa.string()) for column in label_columns(manifest, [spec.name for spec in kept]).values()
    ]
    names = [field.name for field in fields]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise BadJob(
            f"The output would have two columns {twice[0]!r}",
            remedy=f"Leave it out of --keep; {SOURCE}, {ROW}, the outputs and their labels are always there.",
        )
    return pa.schema(fields)


def label_columns(manifest: Manifest, kept: Sequence[str]) -> dict[str, str]:
    """The outputs whose largest element names a class, and the column with its name.

    That is `label` where there is one such output and no other column is called so, else `OUTPUT_label`.
    """
    outputs = {spec.name: sample_shape(spec, manifest) for spec in manifest.outputs}
    labelled = [name for name, labels in manifest.labels.items() if outputs.get(name) == (len(labels),)]
    is_plain = len(labelled) == 1 and LABEL not in {*outputs, *kept}
    return {name: LABEL if is_plain else f"{name}_label" for name in labelled}


def table_of(
    rows: SourceRows, answers: RowOutputs, manifest: Manifest, schema: pa.Schema, keep: Sequence[str]
) -> pa.Table:
    """The table of a part, without its bad rows."""
    if rows.names is not None:  # a file for each row, see `SourceRows.origin`
        sources = pa.array([printable(rows.names[row]) for row in answers.rows], pa.string())
        numbers = pa.array([0] * len(answers.rows), pa.int64())
    else:
        sources = pa.repeat(pa.scalar(printable(rows.source), pa.string()), len(answers.rows))
        numbers = pa.array(rows.first_row + np.asarray(answers.rows, np.int64))
    arrays = {SOURCE: sources, ROW: numbers}
    for name in keep:
        kept, kind = rows.columns[name], schema.field(name).type
        if isinstance(kept, pa.Array):
            arrays[name] = kept.take(pa.array(answers.rows, pa.int64())).cast(kind)
        else:  # Python objects become text
            arrays[name] = pa.array([_text(kept[row]) for row in answers.rows], kind)
    for name, outputs in answers.outputs.items():
        arrays[name] = _output(outputs, schema.field(name).type)
    for name, column in label_columns(manifest, keep).items():
        labels = manifest.labels[name]
        by_row = _storable(np.asarray(answers.outputs[name])).reshape(-1, len(labels))
        has_nan = np.isnan(by_row).any(axis=1) if by_row.dtype.kind == "f" else np.zeros(len(by_row), np.bool_)
        arrays[column] = pa.array([labels[index] for index in by_row.argmax(axis=1)], pa.string(), mask=has_nan)
    return pa.Table.from_arrays([arrays[field.name] for field in schema], schema=schema)


def _text(value: JSON) -> str | None:
    """A kept value as text that is UTF-8: names as `printable`, half a surrogate pair inside of JSON as its escape."""
    if value is None or isinstance(value, str):
        return value and printable(value)
    return json.dumps(value, ensure_ascii=False).encode(errors="backslashreplace").decode()


def encode(table: pa.Table, metadata: Mapping[str, str]) -> bytes:
    """The table as a Parquet file; the same bytes for the same table and version of the library."""
    buffer = io.BytesIO()
    pq.write_table(table.replace_schema_metadata(dict(metadata)), buffer, compression="zstd")
    return buffer.getvalue()


def _output(values: Values, kind: pa.DataType) -> pa.Array:
    """An output of all rows as a column."""
    if isinstance(values, list):
        return pa.array([_storable(row).tolist() for row in values], kind)
    column = pa.array(_storable(values).reshape(-1))
    levels = []
    while pa.types.is_fixed_size_list(kind):
        levels.append(kind.list_size)
        kind = kind.value_type
    for size in reversed(levels):
        column = pa.FixedSizeListArray.from_arrays(column, size)
    return column


def _storable(values: NDArray[Any]) -> NDArray[Any]:
    return values.astype(np.float32) if values.dtype == dtype_of("BF16") else values
