"""One check of one data set, whatever its kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from stoker.errors import BadJob
from stoker.inspecting.checked import Checked, Tell, in_order
from stoker.inspecting.classes import class_findings
from stoker.inspecting.options import CheckOptions
from stoker.inspecting.pictures.checking import check_pictures
from stoker.inspecting.sources.base import Found
from stoker.inspecting.sources.finding import FoundTables, find
from stoker.inspecting.tables.checking import ForeignTable, check_tables


def check(path: Path, against: Sequence[Path], options: CheckOptions, *, workers: int, tell: Tell) -> Checked:
    """Find what is wrong with the data at `path`, and what of it is also in `against`.

    Args:
        path: a file or a folder; it is only read.
        against: other data sets, of the same sort (with pixels, or of rows).
        options: what to look for.
        workers: processes that decode.
        tell: is told how far it is.

    Raises:
        BadJob: there is nothing to check, or an option does not fit.
        RunFailed: a process that decodes died.
    """
    found = find(path)
    others = [(str(one), find(one)) for one in against]
    if isinstance(found, Found):
        pictures = [(name, other) for name, other in others if isinstance(other, Found)]
        _agree(len(pictures), others, path)
        return check_pictures(found, pictures, options, workers, tell)
    tables = [
        ForeignTable(table, f"{name}/{table.name}" if table.name else name)
        for name, other in others if isinstance(other, FoundTables) for table in other.tables
    ]  # fmt: skip
    _agree(sum(isinstance(other, FoundTables) for _, other in others), others, path)
    checked = check_tables(found.kind, found.tables, tables, options, tell)
    early = [*found.findings, *class_findings((), found.empty_classes)]
    return replace(checked, findings=in_order([*early, *checked.findings]))


def _agree(same: int, others: Sequence[tuple[str, object]], path: Path) -> None:
    if same < len(others):
        raise BadJob(f"{path} cannot be held against {', '.join(name for name, _ in others)}: one of them has pixels, "
                     "the other rows")  # fmt: skip
