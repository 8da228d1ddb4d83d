"""`stoker image`: an OCI image of a job, made without a daemon, as an archive that Podman, Docker and Kubernetes take.

What: layers of the system's libraries, Python, the packages that the job uses (those of `environment_lock.py`), Stoker,
and the job with what it imports. With `--base` an image that has Python gives the system, and what it lacks is added.
Reproducible: the same files make the same bytes: sorted, without times, owners and bytecode. Layers are not compressed,
since compressors differ; a registry compresses what is pushed. A layer that did not change keeps its digest, and is not
pushed again.
Does not carry: data, environment variables, other files of the job unless `include` names them; files whose names say
that they are secrets are refused.
Use when: a place runs images. Costs: reading and writing each file once (1 GB for PyTorch on a CPU).
Source: OCI Image Format 1.1 (image-layout, manifest, config, layer); `manifest.json` is for Docker before version 25.
"""

from __future__ import annotations

import fnmatch
import hashlib
import importlib.metadata
import io
import json
import os
import platform
import re
import sys
import sysconfig
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import IO, Any, ClassVar, cast

from stoker.errors import BadJob
from stoker.jobs import Entry
from stoker.launching.bundle import TreeFile, code_bundle, stoker_bundle, tree_digest, work_folder
from stoker.launching.environment_lock import installed_closure
from stoker.launching.images.base_image import BaseImage
from stoker.launching.images.shared_libraries import SystemLibraries
from stoker.launching.launch import imported_modules
from stoker.launching.lines import HashedFile
from stoker.records.codec import JSON
from stoker.store import disk_errors
from stoker.store.files import disk, make_directories, written_aside

INDEX = "application/vnd.oci.image.index.v1+json"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar"

JOB_FOLDER, RUNS = "job", "runs"
"""Folders of the image: the job's files, which is the working directory; and runs, which a volume is mounted at."""

_PYTHON, _ENVIRONMENT = "opt/python", "opt/stoker"
_EPOCH = "1970-01-01T00:00:00Z"
_OWN_LAYER_BYTES = 64 * 2**20
_VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
_SITE = f"{_ENVIRONMENT}/lib/python{_VERSION}/site-packages"
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64", "ppc64le": "ppc64le", "s390x": "s390x"}
_STDLIB_LEFT_OUT = frozenset(
    (
        *("site-packages", "dist-packages", "__pycache__", "ensurepip"),
        *("test", "tests", "idle_test", "idlelib", "turtledemo", "tkinter"),
    )
)


_SECRETS = (
    *(".git", ".ssh", ".aws", ".gnupg", ".kube", ".docker", ".azure"),
    *(".netrc", "_netrc", ".pypirc", ".npmrc", ".git-credentials", ".htpasswd", ".pgpass", "kubeconfig"),
    *("*.pem", "*.key", "*.p12", "*.pfx", "*.jks", "*.keystore", "*.kdbx"),
    *("id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*"),
    *(".env", ".env.*", "secrets.*", "*.token", "credentials", "credentials.json", "service[-_]account*.json"),
)
"""Names of files and folders that hold secrets, as patterns."""


@dataclass(frozen=True, kw_only=True)
class ImageLayer:
    """A layer: what is in it, its digest and size [bytes]; `is_from_base`: it is the base image's, unchanged."""

    what: str
    digest: str
    diff_id: str
    num_bytes: int
    num_files: int = 0
    media_type: str = LAYER
    is_from_base: bool = False


@dataclass(frozen=True, kw_only=True)
class ImageRecord:
    """An image that was made.

    Attributes:
        path: the archive.
        reference: the name under which Podman and Docker load it.
        digest: of its manifest: what a registry knows it by.
        packages: versions of the packages in it, by name; those of a base image only where Stoker needs them.
        notes: what people should know: libraries that the driver has to give, versions of the base that differ.
    """

    schema: ClassVar[int] = 1

    path: str
    reference: str
    digest: str
    num_bytes: int
    layers: tuple[ImageLayer, ...]
    entrypoint: tuple[str, ...]
    command: tuple[str, ...]
    packages: dict[str, str]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ImageOptions:
    """The contents of an image in addition to the job.

    Attributes:
        base: an OCI archive or layout that has Python; None: this machine's Python and libraries.
        include: further files and folders of the job.
        packages: further distributions, by name, such as `pyarrow`.
        name: of the image; "": the job file's.
    """

    base: Path | None = None
    include: tuple[Path, ...] = ()
    packages: tuple[str, ...] = ()
    name: str = ""


def build_image(
    job_file: Path,
    entry: Entry,
    out: Path,
    options: ImageOptions | None = None,
    *,
    tell: Callable[[str], None] = lambda _: None,
) -> ImageRecord:
    """Write an image of a job to `out`, an archive; it is there as a whole or not at all.

    Args:
        job_file: the job file.
        entry: what was loaded of it, with its settings.
        out: the archive; its folder is made.
        options: what else is in it.
        tell: receives a line of text about each layer.

    Raises:
        BadJob: a file looks like a secret, is not there, or the base image has no Python or cannot be used.
        PlaceFailed: a package was installed from a folder, and cannot be had elsewhere.
        RunFailed: `out` cannot be written.
    """
    options = options or ImageOptions()
    root = work_folder(job_file)
    code = code_bundle(job_file, entry.sources, send=options.include)
    require_no_secrets((*code.files, *stoker_bundle().files), root)
    base = None if options.base is None else BaseImage.read(options.base, _architecture())
    packages = installed_closure({"stoker", *options.packages, *_owners_of(entry)})
    notes: list[str] = []
    contents = _environment(packages, notes) if base is None else _additions(base, packages, notes)
    contents += [
        ("Stoker", [*_below(_site_packages_of(base), stoker_bundle().files), _script(base)]),
        (f"the job {job_file.name}", [*_below(JOB_FOLDER, code.files), _folder(RUNS)]),
    ]
    slug = re.sub(r"[^a-z0-9._-]+", "-", (options.name or job_file.stem).lower()).strip("-._") or "job"
    reference = f"localhost/{slug}:{tree_digest(code.files)[:12]}"
    command = ("train", job_file.resolve().relative_to(root).as_posix(), *entry.setting_words)
    with disk_errors(out, "the image", option="-o FILE"):
        make_directories(out.parent)
        with written_aside(out) as aside, aside.open("wb") as file:
            archive = _Archive(file)
            layers = [] if base is None else _copied(base, archive, tell)
            for what, files in contents:
                tell(f"{what}: {len(files):,} files")
                layers.append(_written(what, files, archive))
            entrypoint = (_python_of(base), "-m", "stoker")
            config = _config(layers, base, entrypoint, command, slug)
            digest = _finish(archive, layers, config, reference)
            num_bytes = file.tell()
            file.flush()
            disk().sync(file.fileno())
    return ImageRecord(
        path=str(out),
        reference=reference,
        digest=digest,
        num_bytes=num_bytes,
        layers=tuple(layers),
        entrypoint=entrypoint,
        command=command,
        packages=packages,
        notes=tuple(notes),
    )


def is_secret(path: str) -> bool:
    """Whether a file's name, or that of a folder above it, says that it holds a secret.

    >>> [is_secret(path) for path in ("src/.env", "home/.ssh/config", "server.key", "keys.py", ".env.example")]
    [True, True, True, False, False]
    """
    parts = PurePosixPath(path).parts
    return not parts[-1].endswith((".example", ".template", ".sample", ".py")) and any(
        fnmatch.fnmatchcase(part.lower(), pattern) for part in parts for pattern in _SECRETS
    )


def require_no_secrets(files: Iterable[TreeFile], root: Path) -> None:
    """Refuse files that look like secrets, by their name, or because they begin as a private key does.

    A symbolic link below `root`, absolute, counts by the name of what it leads to as well: that is what travels.

    Raises:
        BadJob: there are some; they are named.
    """
    secrets = []
    for file in files:
        source = (root / file.path).resolve()
        names = (file.path, (source.relative_to(root) if source.is_relative_to(root) else source).as_posix())
        with file.open() if not file.link else io.BytesIO() as content:
            if any(map(is_secret, names)) or b"PRIVATE KEY-----" in content.read(1024):
                secrets.append(file.path)
    if secrets:
        more = f" and {len(secrets) - 5} more" if len(secrets) > 5 else ""
        raise BadJob(
            f"{', '.join(secrets[:5])}{more} looks like a secret, and anyone with the image could read it",
            remedy="Leave it out, and give it when the image runs: `podman run --env-file`, or a Secret in Kubernetes.",
        )


def _owners_of(entry: Entry) -> set[str]:
    """Distributions that the job's texts import, and of Stoker's optional ones those that making the job has loaded."""
    owners = importlib.metadata.packages_distributions()
    optional = {re.split(r"[^A-Za-z0-9._-]", text)[0].lower() for text in importlib.metadata.requires("stoker") or ()}
    names = {name for module in imported_modules(entry.sources.values()) for name in owners.get(module, ())}
    loaded = {name for module in {name.partition(".")[0] for name in sys.modules} for name in owners.get(module, ())}
    return names | {name for name in loaded if name.lower() in optional - _TOOLS}


_TOOLS = frozenset({"pytest", "hypothesis", "pytest-xdist", "ruff", "mypy", "import-linter", "pre-commit", "keras"})
"""Of Stoker's optional requirements those that no job needs by itself."""

_Contents = list[tuple[str, list[TreeFile]]]
"""Contents of layers: a name for people, and files by their path in the image."""


def _environment(packages: Mapping[str, str], notes: list[str]) -> _Contents:
    """This machine's Python, the libraries that it and the packages need, and the packages."""
    python = _python_files()
    by_package = {name: _package_files(name) for name in sorted(packages) if name != "stoker"}
    own = [file for files in by_package.values() for file in files]
    libraries = SystemLibraries.needed_by([*python, *own])
    if libraries.missing:
        notes.append(
            f"not here, so not in the image: {', '.join(libraries.missing)} (drivers give theirs when it runs)"
        )
    large = {
        name: files for name, files in by_package.items() if sum(file.num_bytes for file in files) > _OWN_LAYER_BYTES
    }
    small = [file for name, files in by_package.items() if name not in large for file in files]
    contents: _Contents = [
        ("the system's libraries", [*libraries.files, *_system_files()]),
        (f"Python {_VERSION}", python),
    ]
    contents += [(f"{name} {packages[name]}", _below(_SITE, files)) for name, files in large.items()]
    return [*contents, (f"{len(by_package) - len(large)} packages", _below(_SITE, small))]


def _additions(base: BaseImage, packages: Mapping[str, str], notes: list[str]) -> _Contents:
    """The packages that the base image lacks."""
    missing = [name for name in sorted(packages) if name != "stoker" and name not in base.packages]
    by_package = {name: _package_files(name) for name in missing}
    built = [name for name, files in by_package.items() if any(file.path.endswith(".so") for file in files)]
    if built and base.python_version != _VERSION:
        raise BadJob(
            f"{base.path} has Python {base.python_version} and lacks {', '.join(built)}, which are built for Python "
            f"{_VERSION} here",
            remedy=f"Take a base image with Python {_VERSION}, or one that has these packages.",
        )
    differing = [
        f"{name} {base.packages[name]} (here {version})"
        for name, version in sorted(packages.items())
        if name in base.packages and base.packages[name] != version
    ]
    if differing:
        notes.append(f"versions of the base differ, so the last bits may: {', '.join(differing)}")
    files = [file for package in by_package.values() for file in package]
    return [(f"{len(missing)} packages that the base lacks", _below(_site_packages_of(base), files))] if files else []


def _site_packages_of(base: BaseImage | None) -> str:
    return _SITE if base is None else f"{_ENVIRONMENT}/lib/python{base.python_version}/site-packages"


def _python_of(base: BaseImage | None) -> str:
    return f"/{_ENVIRONMENT}/bin/python" if base is None else f"/{base.python}"


def _python_files() -> list[TreeFile]:
    """The interpreter with its standard library, below `opt/python`, and the environment that points to it."""
    executable = Path(getattr(sys, "_base_executable", sys.executable)).resolve()
    binary = f"{_PYTHON}/bin/python{_VERSION}"
    files = [replace(_file(binary, executable), is_executable=True)]
    files += [TreeFile(path=f"{_PYTHON}/bin/{name}", link=f"python{_VERSION}") for name in ("python3", "python")]
    stdlib = Path(sysconfig.get_path("stdlib"))
    for folder, folders, names in os.walk(stdlib):
        folders[:] = sorted(name for name in folders if name not in _STDLIB_LEFT_OUT and not name.startswith("config-"))
        for name in sorted(names):
            path = Path(folder) / name
            if path.is_file() and not name.endswith((".pyc", ".a", ".exe")) and not name.startswith("_tkinter"):
                files.append(_file(f"{_PYTHON}/lib/python{_VERSION}/{path.relative_to(stdlib).as_posix()}", path))
    about = f"home = /{_PYTHON}/bin\ninclude-system-site-packages = false\nversion = {platform.python_version()}\n"
    files.append(TreeFile.of_bytes(f"{_ENVIRONMENT}/pyvenv.cfg", about.encode()))
    files += [
        TreeFile(path=f"{_ENVIRONMENT}/bin/{name}", link=f"../../python/bin/python{_VERSION}")
        for name in ("python", "python3", f"python{_VERSION}")
    ]
    return files


def _package_files(name: str) -> list[TreeFile]:
    """The files of an installed distribution below site-packages, without bytecode and what pip notes of a machine."""
    distribution = importlib.metadata.distribution(name)
    kept: dict[str, TreeFile] = {}
    for path in distribution.files or ():
        text = path.as_posix()
        is_note = path.name in ("REQUESTED", "direct_url.json", "RECORD") and ".dist-info" in path.parts[0]
        if text.startswith("..") or text.endswith(".pyc") or path.is_absolute() or is_note:
            continue
        source = Path(str(distribution.locate_file(path)))
        if source.is_file():
            kept[text] = _file(text, source)
    record = distribution.read_text("RECORD")
    about = next((path for path in kept if path.endswith(".dist-info/METADATA")), None)
    if record and about:
        lines = sorted(line for line in record.splitlines() if line.partition(",")[0] in kept)
        text = f"{about.rpartition('/')[0]}/RECORD"
        kept[text] = TreeFile.of_bytes(text, "".join(f"{line}\n" for line in lines).encode())
    return [kept[path] for path in sorted(kept)]


def _system_files() -> list[TreeFile]:
    """Files that programs expect of a system: users, names of services, certificates, a folder for temporary files."""
    texts = {
        "etc/passwd": "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/nonexistent:/bin/false\n",
        "etc/group": "root:x:0:\nnogroup:x:65534:\n",
        "etc/nsswitch.conf": "hosts: files dns\n",
    }
    files = [TreeFile.of_bytes(path, text.encode()) for path, text in texts.items()]
    certificates = Path("/etc/ssl/certs/ca-certificates.crt")
    if certificates.is_file():
        files.append(_file("etc/ssl/certs/ca-certificates.crt", certificates))
    return [*files, _folder("tmp"), TreeFile(path="root/", num_bytes=0)]


def _script(base: BaseImage | None) -> TreeFile:
    """The command `stoker`, for people in the container."""
    text = f"#!{_python_of(base)}\nfrom stoker.cli.main import main\n\nmain()\n"
    return replace(TreeFile.of_bytes(f"{_ENVIRONMENT}/bin/stoker", text.encode()), is_executable=True)


def _file(path: str, source: Path) -> TreeFile:
    """A file of this machine, which is read when its layer is written."""
    status = source.stat()
    return TreeFile(path=path, num_bytes=status.st_size, content=source, is_executable=bool(status.st_mode & 0o100))


def _folder(path: str) -> TreeFile:
    """An empty folder in which any user may write."""
    return TreeFile(path=f"{path}/", is_executable=True)


def _below(folder: str, files: Iterable[TreeFile]) -> list[TreeFile]:
    return [replace(file, path=f"{folder}/{file.path}") for file in files]


def _architecture() -> str:
    machine = platform.machine()
    return _ARCHITECTURES.get(machine, machine)


class _Hashing(io.RawIOBase):
    """A stream that hashes and counts what is written through it."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._digest, self.num_bytes = file, hashlib.sha256(), 0

    def write(self, data: Any) -> int:
        """Write all of `data`."""
        self._digest.update(data)
        self.num_bytes += len(data)
        self._file.write(data)
        return len(data)

    @property
    def digest(self) -> str:
        """`sha256:…` of what was written."""
        return f"sha256:{self._digest.hexdigest()}"


class _Archive:
    """An OCI layout as a tar archive, whose blobs are named by their digest after they were written."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._digests: set[str] = set()
        self.add("oci-layout", b'{"imageLayoutVersion": "1.0.0"}')

    def add(self, name: str, content: bytes) -> None:
        """A small file."""
        self._file.write(_header(name, len(content)) + content)
        self._pad(len(content))

    def blob(self, write: Callable[[IO[bytes]], object]) -> tuple[str, int]:
        """A blob that `write` writes; its digest and size [bytes]. One that is there already is dropped."""
        start = self._file.tell()
        self._file.write(bytes(tarfile.BLOCKSIZE))
        stream = _Hashing(self._file)
        write(stream)  # type: ignore[arg-type]  # a raw stream, for writing only
        self._pad(stream.num_bytes)
        end = self._file.tell()
        is_new = stream.digest not in self._digests
        self._digests.add(stream.digest)
        self._file.seek(start)
        if is_new:
            self._file.write(_header(f"blobs/{stream.digest.replace(':', '/')}", stream.num_bytes))
            self._file.seek(end)
        else:
            self._file.truncate()
        return stream.digest, stream.num_bytes

    def json(self, document: JSON) -> tuple[str, int]:
        """A blob of JSON."""
        return self.blob(lambda file: file.write(_dumps(document)))

    def close(self) -> None:
        """The archive's end."""
        self._file.write(bytes(2 * tarfile.BLOCKSIZE))

    def _pad(self, num_bytes: int) -> None:
        self._file.write(bytes(-num_bytes % tarfile.BLOCKSIZE))


def _dumps(document: JSON) -> bytes:
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()


def _header(name: str, num_bytes: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.mode = num_bytes, 0o644
    return info.tobuf(tarfile.GNU_FORMAT)


def _written(what: str, files: Sequence[TreeFile], archive: _Archive) -> ImageLayer:
    """A layer of files; the same files make the same bytes."""
    digest, num_bytes = archive.blob(lambda stream: write_layer(files, stream))
    return ImageLayer(what=what, digest=digest, diff_id=digest, num_bytes=num_bytes, num_files=len(files))


def write_layer(files: Iterable[TreeFile], stream: IO[bytes]) -> None:
    """Write files as a layer: sorted, each folder before what is in it, without times and owners.

    Raises:
        BadJob: a file changed since it was listed: its size, or where it was hashed its content.
        OSError: the stream cannot be written.
    """
    by_path = {file.path.rstrip("/"): file for file in files}
    with tarfile.open(fileobj=stream, mode="w|", format=tarfile.GNU_FORMAT) as tar:
        folders = {parent for path in by_path for parent in _parents(path)}
        for path in sorted({*by_path, *folders}):
            file = by_path.get(path)
            info = tarfile.TarInfo(path)
            if file is None or file.path.endswith("/"):
                info.type, info.mode = tarfile.DIRTYPE, 0o1777 if file is not None and file.is_executable else 0o755
                tar.addfile(info)
            elif file.link:
                info.type, info.linkname, info.mode = tarfile.SYMTYPE, file.link, 0o777
                tar.addfile(info)
            else:
                info.size, info.mode = file.num_bytes, 0o755 if file.is_executable else 0o644
                with file.open() as content:
                    hashed = HashedFile(content)
                    try:
                        tar.addfile(info, cast("IO[bytes]", hashed) if file.digest else content)
                        is_whole = not content.read(1) and file.digest in {"", hashed.digest()}
                    except OSError as problem:
                        if problem.errno is not None:  # of the disk; tarfile's own has none
                            raise
                        is_whole = False
                if not is_whole:
                    raise BadJob(
                        f"{file.path} was changed while the image was made", remedy="Run the same command again."
                    )


def _parents(path: str) -> Iterator[str]:
    return (parent.as_posix() for parent in PurePosixPath(path).parents if parent != PurePosixPath())


def _copied(base: BaseImage, archive: _Archive, tell: Callable[[str], None]) -> list[ImageLayer]:
    """The base's layers, as they are."""
    layers = []
    for number, (blob, diff_id) in enumerate(zip(base.layers, base.diff_ids, strict=True), start=1):
        tell(f"layer {number} of {len(base.layers)} of the base")
        digest, num_bytes = archive.blob(lambda stream, blob=blob: base.copy(blob, stream))  # type: ignore[misc]
        layers.append(
            ImageLayer(
                what=f"base, layer {number}",
                digest=digest,
                diff_id=diff_id,
                num_bytes=num_bytes,
                media_type=blob.media_type,
                is_from_base=True,
            )
        )
    return layers


def _config(
    layers: Sequence[ImageLayer], base: BaseImage | None, entrypoint: Sequence[str], command: Sequence[str], title: str
) -> dict[str, JSON]:
    """The image's configuration: how it is started, and what it is made of."""
    variables: dict[str, str] = {} if base is None else dict(base.variables)
    # Files have no times, so bytecode of another image must not be taken for theirs.
    contents = hashlib.sha256("".join(layer.diff_id for layer in layers).encode()).hexdigest()
    before = variables.get("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
    variables |= {
        "PATH": f"/{_ENVIRONMENT}/bin:{before}",
        "LANG": variables.get("LANG", "C.UTF-8"),
        "STOKER_RUNS": f"/{RUNS}",
        "STOKER_CACHE": f"/{RUNS}/.cache",
        "PYTHONPYCACHEPREFIX": f"/{RUNS}/.cache/bytecode-{contents[:16]}",
        "NVIDIA_VISIBLE_DEVICES": "all",
        "NVIDIA_DRIVER_CAPABILITIES": "compute,utility",
    }
    if base is not None:
        paths = [f"/{_site_packages_of(base)}", *filter(None, [variables.get("PYTHONPATH", "")])]
        variables["PYTHONPATH"] = ":".join(paths)
    history: list[JSON] = [] if base is None else list(base.history)
    made = (layer for layer in layers if not layer.is_from_base)
    history += [{"created": _EPOCH, "created_by": f"stoker image: {layer.what}"} for layer in made]
    version = importlib.metadata.version("stoker")
    return {
        "architecture": _architecture(),
        "os": "linux",
        "created": _EPOCH,
        "config": {
            "Env": [f"{name}={value}" for name, value in sorted(variables.items())],
            "Entrypoint": list(entrypoint),
            "Cmd": list(command),
            "WorkingDir": f"/{JOB_FOLDER}",
            "Labels": {"org.opencontainers.image.title": title, "stoker.version": version},
            **({} if base is None or not base.user else {"User": base.user}),
        },
        "rootfs": {"type": "layers", "diff_ids": [layer.diff_id for layer in layers]},
        "history": history,
    }


def _finish(archive: _Archive, layers: Sequence[ImageLayer], config: JSON, reference: str) -> str:
    """Write configuration, manifest and index; the manifest's digest."""
    digest, size = archive.json(config)
    parts: list[JSON] = [
        {"mediaType": layer.media_type, "digest": layer.digest, "size": layer.num_bytes} for layer in layers
    ]
    manifest: JSON = {
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "layers": parts,
        "config": {"mediaType": CONFIG, "digest": digest, "size": size},
    }
    named, length = archive.json(manifest)
    annotations: JSON = {
        "org.opencontainers.image.ref.name": reference,
        "io.containerd.image.name": reference,
    }
    pointer: JSON = {
        "mediaType": MANIFEST,
        "digest": named,
        "size": length,
        "annotations": annotations,
        "platform": {"architecture": _architecture(), "os": "linux"},
    }
    archive.add("index.json", _dumps({"schemaVersion": 2, "mediaType": INDEX, "manifests": [pointer]}))
    blobs: list[JSON] = [f"blobs/{layer.digest.replace(':', '/')}" for layer in layers]
    for_docker: JSON = [{"Config": f"blobs/{digest.replace(':', '/')}", "RepoTags": [reference], "Layers": blobs}]
    archive.add("manifest.json", _dumps(for_docker))
    archive.close()
    return named
