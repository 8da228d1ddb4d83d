"""What the pages of single runs are sent: a run's state, its series, its report's sections, and comparisons."""

from __future__ import annotations

import base64
import os
import statistics
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, TypeVar

from stoker.errors import BadRun, StokerError
from stoker.records import (
    JobSpec,
    Plan,
    Report,
)
from stoker.records.codec import JSON, Record
from stoker.records.run import ExampleSet, leaves
from stoker.reporting import run_documents
from stoker.reporting.folded_log import COLUMNS, Table
from stoker.reporting.run_sections import render_sections
from stoker.reporting.wording import short
from stoker.store.foreign_files import open_below, read_below
from stoker.store.run_files import ENVIRONMENT, EVENTS, PLAN, SPEC
from stoker.web.run_index import Row, read_json
from stoker.web.run_log import RunLog

R = TypeVar("R", bound=Record)

_MOST_BYTES = 64 * 2**20
_PREVIEW_LINES = 1500
_MOST_HTML = 4_000_000
PNG = b"\x89PNG\r\n\x1a\n"


def run_document(row: Row, log: RunLog) -> dict[str, JSON]:
    """What a run's page begins with; the stream goes on from `offset`."""
    decision = read_json(row.root, f"{row.name}/{PLAN.name}")
    with log.lock:
        read = {**_read_so_far(log), "num_damaged": log.num_damaged}
        return run_documents.run_document(row.document, log, decision) | read


def series_document(row: Row, log: RunLog, *, preview: Table | None, **asked: Any) -> dict[str, JSON]:
    """The run's series, as `run_documents.series_document` is asked for them, and how much of the log they are of."""
    price = row.document.get("price_per_h")
    with log.lock:
        found = run_documents.series_document(log, price_per_h=price, preview=preview, **asked)
        read = _read_so_far(log)
    return found | read | {"is_whole": read["is_whole"] and preview is None}


def _read_so_far(log: RunLog) -> dict[str, JSON]:
    """How much of a log was read, and which file it is."""
    return {
        "log": "" if log.identity is None else f"{log.identity[0]}.{log.identity[1]}",
        "offset": log.offset,
        "is_whole": log.is_whole,
        "read_share": log.offset / log.size if log.size else 1.0,
    }


def preview_of(row: Row) -> Table:
    """Progress of lines from all over a log that has not been read yet: enough to draw its shape."""
    table, sampled = Table(len(COLUMNS)), RunLog(row.root, row.name)
    with suppress(OSError):
        descriptor = open_below(row.root, f"{row.name}/{EVENTS}")
        try:
            size = os.fstat(descriptor).st_size
            lines: list[bytes] = []
            for number in range(_PREVIEW_LINES):
                parts = os.pread(descriptor, 2048, size * number // _PREVIEW_LINES).split(b"\n")
                lines += parts[1:2] if len(parts) > 2 else []
            sampled.take_progress(lines)
            table = sampled.progress
        finally:
            os.close(descriptor)
    return table


# -------------------------------------------------------------------------------------------------------- the sections


def report_of(row: Row, log: RunLog) -> Report:
    """All that a report of the run shows; its events are condensed, with the same sums.

    Raises:
        BadRun: a record is damaged.
    """
    with log.lock:
        events = log.events()
    return row.files.report_with(events)


def sections_html(row: Row, log: RunLog) -> str:
    """The report's sections as HTML.

    Raises:
        BadRun: a record is damaged, or so large that a browser should not be given it.
    """
    html = render_sections(report_of(row, log), examples_of(row))
    if len(html) > _MOST_HTML:
        raise BadRun(f"its records would be {len(html):,} characters of HTML; at most {_MOST_HTML:,} are shown")
    return html


def examples_of(row: Row) -> tuple[ExampleSet, ...]:
    """Samples of held-out sets with the final model's outputs; none where they cannot be read."""
    return tuple(one for one in row.files.read_examples() if all(map(_is_drawn, (*one.worst, *one.first))))


def confusion(row: Row) -> list[dict[str, JSON]]:
    """The run's confusion matrices; see `run_documents.confusion_document`."""
    return run_documents.confusion_document(examples_of(row))


def _is_drawn(example: object) -> bool:
    """Whether an example's pictures are PNG files: what stands in a `data:` address is base64 and nothing else."""
    for name in ("picture", "output_picture", "target_picture"):
        picture = getattr(example, name)
        if picture is not None:
            try:
                if not base64.b64decode(picture, validate=True).startswith(PNG):
                    return False
            except ValueError:
                return False
    return True


def picture_of(row: Row, log: RunLog, file: str) -> bytes:
    """A picture that the run logged.

    Raises:
        BadRun: the log names no such file, or it is no PNG.
    """
    if not any(image.content == file for image in log.images) or "/" in file:
        raise BadRun("the run logged no such picture")
    content = read_below(row.root, f"{row.name}/logged/{file}", _MOST_BYTES)
    if content is None or not content.startswith(PNG):
        raise BadRun("that picture is no PNG, or is gone")
    return content


# ------------------------------------------------------------------------------------------------------------- compare


def compare_document(rows: Sequence[Row]) -> dict[str, JSON]:
    """What differs between runs, by what it changes: what is learned, how it is executed, and where."""
    groups: dict[str, list[dict[str, JSON]]] = {"learned": [], "executed": [], "surroundings": []}
    problems: list[str] = []
    specs: list[JobSpec | None] = []
    for row in rows:
        try:
            specs.append(row.files.read(SPEC))
        except StokerError as problem:
            specs.append(None)
            problems.append(f"{row.document.get('name')}: {short(problem.message, 300)}")
    settings = [dict(leaves(_shown_settings(spec))) if spec else {} for spec in specs]
    plans: list[dict[str, str]] = []
    surroundings: list[dict[str, JSON]] = []
    for row in rows:
        plan = _chosen(row)
        plans.append({name.replace("_", " "): str(value) for name, value in vars(plan).items()} if plan else {})
        try:
            environment = row.files.read(ENVIRONMENT)
        except StokerError:
            environment = None
        surroundings.append(
            {}
            if environment is None
            else {
                "device": environment.device_model,
                "threads": environment.threads,
                "torch": environment.torch_version,
                "python": environment.python_version,
                "platform": environment.platform,
                **environment.libraries,
                **environment.flags,
            }
        )
    for group, tables in (("learned", settings), ("executed", plans), ("surroundings", surroundings)):
        for name in dict.fromkeys(name for table in tables for name in table):
            values = [_text(table[name]) if name in table else None for table in tables]
            if len(set(values)) > 1:
                groups[group].append({"name": short(name, 120), "values": values})
    return {
        "differences": {name: rows[:200] for name, rows in groups.items()},
        "problems": problems,
        "seeds": _over_seeds(rows, specs),
    }


def _chosen(row: Row) -> Plan | None:
    try:
        decision = row.files.read(PLAN)
    except StokerError:
        return None
    return decision.chosen.plan if decision is not None else None


def _shown_settings(spec: JobSpec) -> dict[str, JSON]:
    """What a reader compares of a spec: digests of code and data in short form."""
    return {
        "job": spec.name,
        "parameters": dict(spec.parameters),
        "settings": dict(spec.settings),
        "data": f"{spec.num_train:,} samples, {spec.data_fingerprint[:10]}",
        "first weights": spec.weights_digest[:10],
        "code": (spec.entry_digest or "none")[:10],
        "functions": {n: d[:10] for n, d in spec.functions.items()},
    }


def _text(value: JSON) -> str:
    return short(value if isinstance(value, str) else f"{value:g}" if isinstance(value, float) else str(value), 200)


def _over_seeds(rows: Sequence[Row], specs: Sequence[JobSpec | None]) -> list[dict[str, JSON]]:
    """Means and deviations of final metrics over runs that differ in nothing but the seed."""
    groups: dict[str, list[Row]] = {}
    for row, spec in zip(rows, specs, strict=True):
        if spec is not None and row.document.get("status") == "finished":
            shown = _shown_settings(spec) | {"first weights": "", "functions": ""}
            same = [(name, value) for name, value in leaves(shown) if name.rsplit(".", 1)[-1] != "seed"]
            groups.setdefault(repr(same), []).append(row)
    found = []
    for members in groups.values():
        metrics: dict[str, list[float]] = {}
        for row in members:
            for name, value in (row.document.get("metrics") or {}).items():
                if value is not None:
                    metrics.setdefault(name, []).append(value)
        if len(members) > 1:
            found.append(
                {
                    "runs": [row.document["name"] for row in members],
                    "metrics": [
                        [name, statistics.fmean(values), statistics.stdev(values), len(values)]
                        for name, values in metrics.items()
                        if len(values) > 1
                    ],
                }
            )
    return found
