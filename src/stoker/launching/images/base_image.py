"""An OCI image to build upon: an archive or a layout on this machine, read and checked, and the Python that it has."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from stoker.errors import BadJob
from stoker.records.codec import JSON

_LARGEST_JSON = 8 * 2**20
_BLOCK = 1 << 20
_INDEXES = ("application/vnd.oci.image.index.v1+json", "application/vnd.docker.distribution.manifest.list.v2+json")
_LAYER = "application/vnd.oci.image.layer.v1.tar"
_LAYERS = {
    "application/vnd.docker.image.rootfs.diff.tar.gzip": f"{_LAYER}+gzip",
    "application/vnd.docker.image.rootfs.diff.tar": _LAYER,
    f"{_LAYER}+gzip": f"{_LAYER}+gzip",
    _LAYER: _LAYER,
}
"""Types of layers that can be read, and the name of the same in OCI's words."""

_PYTHON = re.compile(r"(?P<prefix>.*/|)bin/python(?P<version>3\.\d+)$")
_PACKAGE = re.compile(
    r".*lib/python(?P<python>3(?:\.\d+)?)/(?:site|dist)-packages/(?P<name>[^/-]+)-(?P<version>[^/]+)\.dist-info/"
)
_WHITEOUT, _OPAQUE = ".wh.", ".wh..wh..opq"
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True)
class Blob:
    """A blob of a layout, by digest and size [bytes]; its media type in OCI's words."""

    digest: str
    num_bytes: int
    media_type: str


@dataclass(frozen=True, kw_only=True)
class BaseImage:
    """An image with Python.

    Attributes:
        layers, diff_ids: blobs as they are stored, and digests of what they unpack to.
        variables, user: environment variables of its configuration, and whom it runs as ("": root).
        python, python_version: path without the first slash, and `3.11`.
        packages: versions of the packages of that Python, by normalised name.
    """

    path: Path
    layers: tuple[Blob, ...]
    diff_ids: tuple[str, ...]
    history: tuple[JSON, ...]
    variables: dict[str, str]
    python: str
    python_version: str
    packages: dict[str, str] = field(default_factory=dict)
    user: str = ""

    @classmethod
    def read(cls, path: Path, architecture: str) -> BaseImage:
        """The image for `architecture` in an OCI archive or layout; all of its layers are looked through.

        Raises:
            BadJob: it is no such image, is damaged, or has no Python of at least 3.11; the sentence says which.
        """
        if not path.exists():
            raise BadJob(
                f"--base {path} is not there", remedy="`skopeo copy docker://IMAGE oci-archive:FILE` makes one."
            )
        with _opened(path) as layout:
            manifest = layout.manifest(architecture)
            config = layout.json(_blob(manifest["config"], path))
            layers = tuple(_layer(part, path) for part in manifest["layers"])
            names = list(visible(layout.names(blob) for blob in layers))
        settings = _dict_in(config, "config")
        pairs = _list_in(settings, "Env")
        variables = dict(pair.split("=", 1) for pair in pairs if isinstance(pair, str) and "=" in pair)
        python, version = _python_in(names, variables.get("PATH", ""), path)
        versions = [match for name in names if (match := _PACKAGE.match(f"/{name}"))]
        packages = {
            re.sub(r"[-_.]+", "-", match["name"]).lower(): match["version"]
            for match in versions
            if match["python"] in (version, "3")
        }
        diff_ids = tuple(str(digest) for digest in _list_in(_dict_in(config, "rootfs"), "diff_ids"))
        if len(diff_ids) != len(layers):
            raise BadJob(f"--base {path} is damaged: {len(layers)} layers, {len(diff_ids)} digests of them")
        return cls(
            path=path,
            layers=layers,
            diff_ids=diff_ids,
            history=tuple(_list_in(config, "history")),
            variables=variables,
            python=python,
            python_version=version,
            packages=packages,
            user=str(settings.get("User") or ""),
        )

    def copy(self, blob: Blob, into: IO[bytes]) -> None:
        """Write a blob's bytes.

        Raises:
            BadJob: they are not those of its digest.
        """
        with _opened(self.path) as layout, layout.open(blob) as content:
            digest = hashlib.sha256()
            while block := content.read(_BLOCK):
                digest.update(block)
                into.write(block)
        if f"sha256:{digest.hexdigest()}" != blob.digest:
            raise BadJob(f"--base {self.path} is damaged: a layer is not what its digest says ({blob.digest[:19]}…)")


def visible(layers: Iterable[Sequence[str]]) -> Iterable[str]:
    """Paths that are left of layers, the lowest first: a layer may hide files of those below it.

    >>> list(visible([["bin/python3.11", "opt/x"], ["bin/.wh.python3.11", "opt/.wh..wh..opq", "opt/y"]]))
    ['opt/y']

    Source: OCI Image Format 1.1, layer: whiteouts.
    """
    left: dict[str, None] = {}
    for names in layers:
        hidden, new = set[str](), dict[str, None]()
        for name in names:
            folder, _, last = name.rpartition("/")
            if not last.startswith(_WHITEOUT):
                new[name] = None
            else:
                hidden.add(folder if last == _OPAQUE else f"{folder}/{last.removeprefix(_WHITEOUT)}".lstrip("/"))
        left = {name: None for name in left if not hidden or hidden.isdisjoint(_lineage(name))} | new
    return left


def _lineage(path: str) -> set[str]:
    """A path and all folders above it, up to the root, which is ""."""
    parts = path.rstrip("/").split("/")
    return {"/".join(parts[:count]) for count in range(len(parts) + 1)}


class Layout:
    """An OCI layout, as a folder or as an archive; what is read of it is checked."""

    def __init__(self, path: Path, archive: tarfile.TarFile | None) -> None:
        self._path, self._archive = path, archive

    def manifest(self, architecture: str) -> dict[str, Any]:
        """The manifest of the image for an architecture."""
        with self._open("index.json") as file:
            index = self._parsed(file.read(_LARGEST_JSON))
        for _ in range(4):  # an index may point to an index
            parts = [part for part in _list_in(index, "manifests") if _fits(part, architecture)]
            if not parts:
                raise BadJob(f"--base {self._path} has no image for linux/{architecture}")
            if len({str(part.get("digest")) for part in parts}) > 1:
                raise BadJob(
                    f"--base {self._path} has {len(parts)} images",
                    remedy="Copy one of them: `skopeo copy oci:LAYOUT:TAG oci-archive:FILE`.",
                )
            found = self.json(_blob(parts[0], self._path))
            if found.get("mediaType", parts[0].get("mediaType")) not in _INDEXES:
                if not isinstance(found.get("layers"), list) or not isinstance(found.get("config"), dict):
                    raise BadJob(f"--base {self._path} is damaged: its manifest has no layers or no configuration")
                return found
            index = found
        raise BadJob(f"--base {self._path} is damaged: its indexes have no end")

    def json(self, blob: Blob) -> dict[str, Any]:
        """A blob of JSON, checked against its digest."""
        with self.open(blob) as file:
            content = file.read(_LARGEST_JSON)
        if f"sha256:{hashlib.sha256(content).hexdigest()}" != blob.digest:
            raise BadJob(f"--base {self._path} is damaged: {blob.digest[:19]}… is not what its digest says")
        return self._parsed(content)

    def names(self, blob: Blob) -> list[str]:
        """Paths of what is in a layer."""
        try:
            with self.open(blob) as file:
                stream = gzip.GzipFile(fileobj=file) if blob.media_type.endswith("+gzip") else file
                with tarfile.open(fileobj=stream, mode="r|") as tar:
                    return [f"{member.name.removeprefix('./')}{'/' if member.isdir() else ''}" for member in tar]
        except (tarfile.TarError, OSError, EOFError) as problem:
            raise BadJob(f"--base {self._path} is damaged: a layer cannot be read ({problem})") from problem

    def open(self, blob: Blob) -> IO[bytes]:
        """A blob's content, as a file."""
        return self._open(f"blobs/{blob.digest.replace(':', '/')}")

    def _open(self, name: str) -> IO[bytes]:
        try:
            if self._archive is None:
                return (self._path / name).open("rb")
            file = self._archive.extractfile(name)
        except (KeyError, OSError):
            file = None
        if file is None:
            hint = "`skopeo copy docker-archive:IN oci-archive:OUT` makes one of what `docker save` wrote."
            raise BadJob(f"--base {self._path} is no OCI archive or layout: it has no {name}", remedy=hint)
        return file

    def _parsed(self, content: bytes) -> dict[str, Any]:
        try:
            document = json.loads(content)
        except ValueError as problem:
            raise BadJob(f"--base {self._path} is damaged: {problem}") from problem
        if not isinstance(document, dict):
            raise BadJob(f"--base {self._path} is damaged: wanted a JSON object, found {str(document)[:40]}")
        return document


@contextmanager
def _opened(path: Path) -> Iterator[Layout]:
    if path.is_dir():
        yield Layout(path, None)
        return
    try:
        archive = tarfile.open(path)  # noqa: SIM115 - closed below
    except (tarfile.TarError, OSError, EOFError) as problem:
        raise BadJob(f"--base {path} is no OCI archive: {problem}") from problem
    with archive:
        yield Layout(path, archive)


def _dict_in(document: dict[str, Any], name: str) -> dict[str, Any]:
    """A part of a document that is to be an object; an empty one where it is none."""
    value = document.get(name)
    return value if isinstance(value, dict) else {}


def _list_in(document: dict[str, Any], name: str) -> list[Any]:
    """A part of a document that is to be a list; an empty one where it is none."""
    value = document.get(name)
    return value if isinstance(value, list) else []


def _blob(part: Any, path: Path) -> Blob:
    digest, size = (part.get("digest"), part.get("size")) if isinstance(part, dict) else (None, None)
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest) or not isinstance(size, int):
        raise BadJob(f"--base {path} is damaged: {str(part)[:60]} names no blob by a SHA-256")
    return Blob(digest=digest, num_bytes=size, media_type=str(part.get("mediaType", "")))


def _layer(part: Any, path: Path) -> Blob:
    blob = _blob(part, path)
    if blob.media_type not in _LAYERS:
        raise BadJob(
            f"--base {path} has a layer of the type {blob.media_type}, which cannot be read here",
            remedy="`skopeo copy --dest-compress-format gzip oci-archive:IN oci-archive:OUT` converts it.",
        )
    return Blob(digest=blob.digest, num_bytes=blob.num_bytes, media_type=_LAYERS[blob.media_type])


def _fits(part: Any, architecture: str) -> bool:
    if not isinstance(part, dict):
        return False
    platform = part.get("platform")
    if not isinstance(platform, dict):
        return platform is None
    return platform.get("os") == "linux" and platform.get("architecture") == architecture


def _python_in(names: list[str], path_variable: str, path: Path) -> tuple[str, str]:
    """The Python that `PATH` finds first: its path and version."""
    versions = {match[0]: match for name in names if (match := _PYTHON.match(name))}
    folders = [folder.strip("/") for folder in path_variable.split(":") if folder]
    recent = [match for match in versions.values() if int(match["version"].partition(".")[2]) >= 11]
    if not recent:
        older = (
            f"only Python {', '.join(sorted({match['version'] for match in versions.values()}))}"
            if versions
            else "no Python"
        )
        raise BadJob(
            f"--base {path} has {older}, and Stoker needs Python 3.11 or newer",
            remedy="Take an image with it, such as python:3.11-slim, or leave --base out.",
        )

    def order(match: re.Match[str]) -> tuple[int, str]:
        folder = match[0].rpartition("/")[0]
        return (folders.index(folder) if folder in folders else len(folders), match[0])

    best = min(recent, key=order)
    return best[0], best["version"]
