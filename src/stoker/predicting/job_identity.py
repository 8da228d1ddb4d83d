"""The identity of a job: digests of its files, and the differences of a command's settings and files from it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass

from stoker.errors import BadJob
from stoker.predicting.column_mapping import Columns
from stoker.predicting.row_source import RowSource
from stoker.records.codec import printable
from stoker.records.prediction import PixelSettings, PredictionJob, PredictionPart, PredictionSource
from stoker.store import sha256_file


@dataclass(frozen=True, kw_only=True)
class RequestedSettings:
    """A command's settings; None leaves a choice to the job, and takes a begun job's value."""

    model: str
    version: int
    model_digest: str
    columns: Columns
    keep: tuple[str, ...]
    pixels: PixelSettings
    allow_nan: bool
    batch_rows: int | None
    part_rows: int | None
    threads: int | None


def stamp_of(source: RowSource) -> str:
    """Digest of names, sizes and times of change of a source's files, which are not read."""
    digest = hashlib.sha256()
    for path in source.files():
        status = path.stat()
        digest.update(
            f"{os.path.relpath(path, source.path)}\0{status.st_size}\0{status.st_mtime_ns}\n".encode(
                errors="surrogateescape"
            )
        )
    return digest.hexdigest()


def content_digest(source: RowSource) -> str:
    """SHA-256 of a source's content; for several files, of their names and digests."""
    files = source.files()
    if len(files) == 1:
        return sha256_file(files[0])
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"{os.path.relpath(path, source.path)}\0{sha256_file(path)}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()


def cut(
    sources: Sequence[RowSource], part_rows: int
) -> tuple[tuple[PredictionSource, ...], tuple[PredictionPart, ...]]:
    """The sources as they are now, read once, and the parts they are cut into.

    Raises:
        BadJob: one of them cannot be read, or changes during this.
    """
    described: list[PredictionSource] = []
    parts: list[PredictionPart] = []
    for number, source in enumerate(sources):
        stamp = stamp_of(source)
        extent = source.extent(part_rows)
        sha256 = content_digest(source)
        if stamp_of(source) != stamp:
            raise BadJob(f"{source.path} changes while it is read", remedy="Wait until it is written to its end.")
        described.append(
            PredictionSource(
                path=str(source.path),
                format=source.format,
                num_rows=extent.num_rows,
                num_bytes=_num_bytes(source),
                sha256=sha256,
                stamp=stamp,
            )
        )
        for index, offset in enumerate(extent.offsets):
            first = index * part_rows
            num_rows = min(part_rows, extent.num_rows - first)
            parts.append(PredictionPart(source=number, first_row=first, num_rows=num_rows, offset=offset))
    return tuple(described), tuple(parts)


def _num_bytes(source: RowSource) -> int:
    return sum(path.stat().st_size for path in source.files())


def differences(job: PredictionJob, asked: RequestedSettings, sources: Sequence[RowSource]) -> tuple[str, ...]:
    """The differences of a command from the begun job, a line each; empty if it continues that job."""
    pairs = {
        "the model": (f"{job.model} {job.version}", f"{asked.model} {asked.version}"),
        "the model's digest": (job.model_digest[:12], asked.model_digest[:12]),
        "the columns": (_shown(job.columns), _shown(asked.columns)),
        "--keep": (", ".join(job.keep), ", ".join(asked.keep)),
        "--pixels": (job.pixels.values, asked.pixels.values),
        "--resize": (job.pixels.resize, asked.pixels.resize),
        "--allow-nan": (job.allow_nan, asked.allow_nan),
        "--batch": (job.batch_rows, asked.batch_rows or job.batch_rows),
        "--part-rows": (job.part_rows, asked.part_rows or job.part_rows),
        "--threads": (job.threads, asked.threads or job.threads),
    }
    lines = [f"{what}: was {was or 'none'}, is {now or 'none'}" for what, (was, now) in pairs.items() if was != now]
    before = {source.path: source for source in job.sources}  # a record's names are printable
    after = {printable(str(source.path)): source for source in sources}
    lines += [f"{path} is no longer asked for" for path in before if path not in after]
    lines += [f"{path} is new" for path in after if path not in before]
    if not lines and list(before) != list(after):
        lines.append("the files come in another order")
    lines += [_change(before[path], source) for path, source in after.items() if path in before]
    return tuple(filter(None, lines))


def _shown(columns: Columns) -> str:
    short = {
        name: names[0] if len(names) == 1 else f"{names[0]}, … {names[-1]} ({len(names)})"
        for name, names in columns.items()
    }
    return "; ".join(f"{name}={short[name]}" for name in sorted(short))


def _change(before: PredictionSource, source: RowSource) -> str:
    """How a source has changed; its content is read only if its files look changed."""
    if before.format != source.format:
        return f"{before.path}: was {before.format}, is {source.format}"
    if stamp_of(source) == before.stamp or content_digest(source) == before.sha256:
        return ""
    num_bytes = _num_bytes(source)
    sizes = f" ({before.num_bytes:,} bytes then, {num_bytes:,} now)" if num_bytes != before.num_bytes else ""
    return f"{before.path}: its content has changed{sizes}"
