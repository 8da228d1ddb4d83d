"""`stoker data check`: what is wrong with a data set, as a document, a page, and a list of what to leave out."""

from __future__ import annotations

import base64
import dataclasses
import io
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from stoker.devices.cpu import usable_cpus
from stoker.errors import BadJob
from stoker.inspecting import Checked, CheckOptions, Tell, check, clean_list
from stoker.records import CleanList, dumps, to_json
from stoker.records.data_check import DataCheck
from stoker.reporting.data_page import pictured, render_data_page
from stoker.store.files import make_directories, write_atomic

CHECK_FILE, CLEAN_FILE, PAGE_FILE = "check.json", "clean.json", "report.html"

_THUMBNAIL = 112
"""Pixels of the longer side of a picture in the page; small ones are enlarged by whole factors."""


@dataclass(frozen=True)
class CheckedData:
    """A check, and the samples it would leave out."""

    check: DataCheck
    clean: CleanList


def check_data(
    path: str | Path,
    options: CheckOptions | None = None,
    *,
    against: Sequence[str | Path] = (),
    out: str | Path | None = None,
    drop_suspects: bool = False,
    tell: Tell = lambda _what, _done, _total: None,
) -> CheckedData:
    """Find what is wrong with a data set; it is only read.

    Args:
        path: a folder of images or texts, a table, shards of WebDataset, IDX or NumPy files.
        options: what to look for.
        against: other data sets, whose samples must not be in this one.
        out: directory for `check.json`, `clean.json` and `report.html`; not within `path`.
        drop_suspects: leave suspects out as well.
        tell: is told how far it is.

    Raises:
        BadJob: there is nothing to check, an option does not fit, `out` cannot be made, or nothing would be left.
        RunFailed: a process that decodes died.
    """
    asked = options or CheckOptions()
    source, began = Path(path), time.monotonic()
    if out is not None:
        _check_outside(Path(out), source)
        _make(Path(out))
    made_at = datetime.now(UTC).isoformat(timespec="seconds")
    found = check(source, [Path(one) for one in against], asked, workers=asked.workers or len(usable_cpus()), tell=tell)
    document = DataCheck(
        source=str(path), kind=found.kind, made_at=made_at, took_s=round(time.monotonic() - began, 3),
        against=tuple(map(str, against)), splits=found.splits, columns=found.columns, findings=found.findings,
        notes=found.notes, settings=to_json(asked),
    )  # fmt: skip
    listed = clean_list(document, drop_suspects=drop_suspects)
    # A list is used wherever training runs, and there a relative path would be of another folder.
    checked = CheckedData(document, dataclasses.replace(listed, source=str(source.expanduser().absolute())))
    if out is not None:
        _write(Path(out), checked, found)
    return checked


def _check_outside(out: Path, source: Path) -> None:
    if source.is_dir() and out.resolve().is_relative_to(source.resolve()):
        raise BadJob(f"{out} is within {source}", remedy="Choose a directory elsewhere: the data are not touched.")


def _make(out: Path) -> None:
    """Make the directory before anything is looked at, which may take hours."""
    try:
        make_directories(out)
    except OSError as error:
        raise BadJob(f"{out} cannot be made: {error.strerror or error}", remedy="Choose another directory.") from error
    if not out.is_dir():
        raise BadJob(f"{out} is a file", remedy="Choose a directory.")


def _write(out: Path, checked: CheckedData, found: Checked) -> None:
    """The page first, the list that is to be used last."""
    pictures = {name: picture for name in pictured(checked.check) if (picture := _thumbnail(found, name))}
    write_atomic(out / PAGE_FILE, render_data_page(checked.check, checked.clean, pictures))
    write_atomic(out / CHECK_FILE, dumps(checked.check))
    write_atomic(out / CLEAN_FILE, dumps(checked.clean))


def _thumbnail(found: Checked, name: str) -> str:
    """A picture as a data URI; empty for a sample without pixels."""
    image = found.picture(name)
    if image is None:
        return ""
    if max(image.size) > _THUMBNAIL:
        image.thumbnail((_THUMBNAIL, _THUMBNAIL))
    content = io.BytesIO()
    if image.width * image.height <= 64 * 64:
        image.save(content, "PNG", optimize=True)
        return f"data:image/png;base64,{base64.b64encode(content.getvalue()).decode()}"
    image.save(content, "JPEG", quality=80)
    return f"data:image/jpeg;base64,{base64.b64encode(content.getvalue()).decode()}"
