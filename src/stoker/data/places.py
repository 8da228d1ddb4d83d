"""Where the files of a data set are: folders looked through in order, and a public home to download from."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from stoker.data.idx import IdxFile, verified
from stoker.errors import BadJob
from stoker.store import cache_root, write_atomic

_TOLERANCE_BYTES = 2**16
"""What a gzip file may have over its content, which is all that its size is checked against while it is fetched."""


@dataclass(frozen=True)
class Patience:
    """How long a download may keep quiet, and how long it may take altogether [s]."""

    silence_s: float = 30.0
    total_s: float = 900.0


@dataclass(frozen=True)
class Places:
    """Folders that may hold a data set's files, in order of preference; downloads from `home` go to `cache`.

    A folder counts if it holds all files that are asked for, each gzipped or not. `home` is a URL without a final
    slash; the files there are gzipped. `remedy` says how a user gets the files otherwise.
    """

    folders: tuple[Path, ...]
    cache: Path
    home: str
    remedy: str

    def find(self, names: Sequence[str]) -> tuple[Path, ...] | None:
        """The files `names`, all from the first folder that holds them all; None if none does."""
        for folder in self.folders:
            found = [_present(folder, name) for name in names]
            if all(found):
                return tuple(path for path in found if path is not None)
        return None

    def download(self, files: Sequence[IdxFile], patience: Patience) -> None:
        """Fetch the files that the cache lacks; each appears there whole and verified, or not at all.

        Raises:
            BadJob: the home cannot be reached in time, sends something else, or the cache cannot be written.
        """
        for file in files:
            if _present(self.cache, file.name) is None:
                self._download(file, patience)

    def _download(self, file: IdxFile, patience: Patience) -> None:
        from stoker.data.downloading import fetch  # what it imports takes longer than all the rest here

        url = f"{self.home}/{file.name}.gz"
        at_most = file.num_bytes + _TOLERANCE_BYTES
        try:
            stored = fetch(url, at_most_bytes=at_most, silence_s=patience.silence_s, total_s=patience.total_s)
        except OSError as problem:
            looked = ", ".join(str(folder) for folder in self.folders)
            raise BadJob(
                f"{file.name} (or .gz) is in none of {looked}; and {url} gave {problem}", remedy=self.remedy
            ) from problem
        verified(stored, file, where=f"what {url} sent", remedy=f"Nothing of it was kept. {self.remedy}")
        path = self.cache / f"{file.name}.gz"
        try:
            self.cache.mkdir(parents=True, exist_ok=True)
        except OSError as problem:
            raise BadJob(
                f"the folder {self.cache} for downloads cannot be made: {problem.strerror or problem}",
                remedy=f"Set STOKER_CACHE to a folder that can be written. {self.remedy}",
            ) from problem
        write_atomic(path, stored, what=f"the download {path.name}", error=BadJob)


def places_of(
    dataset: str,
    *,
    root: Path | None,
    below: Sequence[str],
    installed: Path,
    home: str,
    remedy: str,
    environ: Mapping[str, str] = os.environ,
) -> Places:
    """Where `dataset` may be: `root`, `$STOKER_DATA` (itself, or `below` it), Stoker's cache, `installed`.

    Reads the environment but no disk.
    """
    cache = cache_root(environ) / dataset
    given = environ.get("STOKER_DATA")
    shared = Path(given).expanduser() if given else None
    in_shared = () if shared is None else (shared, *(shared / folder for folder in below))
    # Absolute from the start: a job may be made in one folder and its data be read in another.
    in_root = () if root is None else (root.expanduser().absolute(),)
    return Places((*in_root, *in_shared, cache, installed), cache, home, remedy)


def _present(folder: Path, name: str) -> Path | None:
    """The file in the folder, unpacked rather than gzipped where both are there."""
    try:
        return next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)
    except OSError:  # a folder one may not look into holds nothing for us
        return None
