"""Rows out of a file: arrays of an .npz, or columns of a Parquet table."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.compressing import Rows
from stoker.errors import BadJob, first_line
from stoker.records import Manifest

TARGETS = ("target", "targets", "label", "labels", "y")


def read_rows(path: Path, manifest: Manifest) -> Rows:
    """Inputs by the manifest's names, and the target if there is one.

    Raises:
        BadJob: no such file, of another kind, or without an input.
    """
    if not path.is_file():
        raise BadJob(f"there is no {path}")
    try:
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files}
        elif path.suffix == ".parquet":
            arrays = _columns(path)
        else:
            raise BadJob(f"{path} is neither .npz nor .parquet")
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise BadJob(f"{path} cannot be read: {first_line(error)}") from error
    names = [spec.name for spec in manifest.inputs]
    if missing := [name for name in names if name not in arrays]:
        raise BadJob(f"{path} has no {missing[0]!r}, which the model takes; it has {', '.join(sorted(arrays))}")
    target = next((arrays[name] for name in TARGETS if name in arrays and name not in names), None)
    return Rows({name: arrays[name] for name in names}, target)


def _columns(path: Path) -> dict[str, NDArray[Any]]:
    try:
        import pyarrow.parquet as pq  # noqa: PLC0415 - an extra, which is loaded where it is used
    except ImportError as error:
        raise BadJob("pyarrow is not installed", remedy="pip install 'stoker[predict]'") from error
    table = pq.read_table(path)
    return {name: np.asarray(table.column(name).to_pylist()) for name in table.column_names}
