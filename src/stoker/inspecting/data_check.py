"""The verb `stoker data check`: the faults of a data set as a document, a page, and a list of samples to leave out."""

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
"""Longer side of a picture in the page [pixels]; small ones are enlarged by whole factors."""


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
    """Find the faults of a data set, which is only read.

    Args:
        path: a folder of images or texts, a table, shards of WebDataset, IDX or NumPy files.
        options: what to look for.
        against: other data sets, whose samples must not be in this one.
        out: directory for `check.json`, `clean.json` and `report.html`; not within `path`.
        drop_suspects: leave suspects out as well.
        tell: called with the progress.

    Raises:
        BadJob: there is nothing to check, an option is invalid, `out` cannot be made, or no sample would be left.
        RunFailed: a process that decodes died.
    """
    options = options or CheckOptions()
    source, began = Path(path), time.monotonic()
    folder = None if out is None else Path(out)
    if folder is not None:  # before the check, which may take hours
        if source.is_dir() and folder.resolve().is_relative_to(source.resolve()):
            what = f"{folder} is within {source}"
            raise BadJob(what, remedy="Choose a directory elsewhere: the data are not touched.")
        try:
            make_directories(folder)
        except OSError as error:
            what = f"{folder} cannot be made: {error.strerror or error}"
            raise BadJob(what, remedy="Choose another directory.") from error
        if not folder.is_dir():
            raise BadJob(f"{folder} is a file", remedy="Choose a directory.")
    made_at = datetime.now(UTC).isoformat(timespec="seconds")
    workers = options.workers or len(usable_cpus())
    checked = check(source, list(map(Path, against)), options, workers=workers, tell=tell)
    document = DataCheck(
        source=str(path), kind=checked.kind, made_at=made_at, took_s=round(time.monotonic() - began, 3),
        against=tuple(map(str, against)), splits=checked.splits, columns=checked.columns, findings=checked.findings,
        notes=checked.notes, settings=to_json(options),
    )  # fmt: skip
    # Absolute, because the list is also used where training runs, in another working directory.
    clean = dataclasses.replace(clean_list(document, drop_suspects=drop_suspects),
                                source=str(source.expanduser().absolute()))  # fmt: skip
    if folder is not None:  # the page first, the list that training uses last
        pictures = {name: picture for name in pictured(document) if (picture := _thumbnail(checked, name))}
        write_atomic(folder / PAGE_FILE, render_data_page(document, clean, pictures))
        write_atomic(folder / CHECK_FILE, dumps(document))
        write_atomic(folder / CLEAN_FILE, dumps(clean))
    return CheckedData(document, clean)


def _thumbnail(checked: Checked, name: str) -> str:
    """A picture as a data URI; empty for a sample without pixels."""
    image = checked.picture(name)
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
