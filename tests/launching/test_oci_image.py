"""Images of jobs: what is in them, that the same files make the same bytes, and what is refused."""

from __future__ import annotations

import contextlib
import errno
import gzip
import hashlib
import io
import json
import os
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.errors import BadJob
from stoker.jobs import Entry, load_job
from stoker.launching.bundle import TreeFile
from stoker.launching.images import oci_image
from stoker.launching.images.base_image import BaseImage, visible
from stoker.launching.images.oci_image import LAYER, ImageOptions, ImageRecord, build_image, is_secret, write_layer
from stoker.launching.images.shared_libraries import SystemLibraries, read_dynamic
from tests.flow.command import job_file, stoker_here

VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"


@pytest.fixture
def job(place: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Entry]:
    """A job whose environment is two small packages and Stoker."""
    monkeypatch.setattr(oci_image, "installed_closure", lambda names: {"stoker": "0.1.0", "mdurl": "1", "typer": "2"})
    path = job_file()
    return path, load_job(path, {"lr": "0.2"})[1]


def blobs_of(archive: Path) -> dict[str, bytes]:
    """Every file of an archive, by name."""
    with tarfile.open(archive) as tar:
        return {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]


def names_in(layer: bytes) -> dict[str, tarfile.TarInfo]:
    """What a layer holds."""
    with tarfile.open(fileobj=io.BytesIO(layer)) as tar:
        return {member.name: member for member in tar}


def manifest_of(files: dict[str, bytes]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Manifest and configuration, read from the index on, with every digest and size checked."""

    def blob(part: dict[str, Any]) -> bytes:
        content = files[f"blobs/{part['digest'].replace(':', '/')}"]
        assert f"sha256:{hashlib.sha256(content).hexdigest()}" == part["digest"]
        assert len(content) == part["size"]
        return content

    assert json.loads(files["oci-layout"]) == {"imageLayoutVersion": "1.0.0"}
    index = json.loads(files["index.json"])
    assert (index["schemaVersion"], index["mediaType"]) == (2, "application/vnd.oci.image.index.v1+json")
    (pointer,) = index["manifests"]
    manifest = json.loads(blob(pointer))
    assert manifest["mediaType"] == pointer["mediaType"] == "application/vnd.oci.image.manifest.v1+json"
    assert manifest["config"]["mediaType"] == "application/vnd.oci.image.config.v1+json"
    config = json.loads(blob(manifest["config"]))
    assert config["rootfs"]["type"] == "layers"
    assert len(config["history"]) == len(config["rootfs"]["diff_ids"]) == len(manifest["layers"])
    for part, diff_id in zip(manifest["layers"], config["rootfs"]["diff_ids"], strict=True):
        content = blob(part)
        unpacked = gzip.decompress(content) if part["mediaType"] == f"{LAYER}+gzip" else content
        assert f"sha256:{hashlib.sha256(unpacked).hexdigest()}" == diff_id
    return manifest, config


@pytest.mark.slow
def test_an_image_is_a_valid_layout_with_all_that_the_job_needs(job: tuple[Path, Entry], place: Path) -> None:
    """Digests, sizes and media types hold; Python, its libraries, packages, Stoker and the job are there; no times."""
    made = build_image(*job, place / "image.tar")
    files = blobs_of(place / "image.tar")
    manifest, config = manifest_of(files)
    assert all(part["mediaType"] == LAYER for part in manifest["layers"])
    assert (
        f"sha256:{hashlib.sha256(json.dumps(manifest, sort_keys=True, separators=(',', ':')).encode()).hexdigest()}"
        == (made.digest)
    )
    entries: dict[str, tarfile.TarInfo] = {}
    for part in manifest["layers"]:
        entries |= names_in(files[f"blobs/{part['digest'].replace(':', '/')}"])
    site = f"opt/stoker/lib/python{VERSION}/site-packages"
    programs = (f"opt/python/bin/python{VERSION}", f"opt/python/lib/python{VERSION}/os.py", "bin/sh")
    packages = (f"{site}/stoker/cli/main.py", f"{site}/mdurl/__init__.py", "opt/stoker/pyvenv.cfg")
    for path in (*programs, *packages, "job/blobs.py", "runs", "tmp"):
        assert path in entries, path
    assert any(path.endswith("libc.so.6") for path in entries)
    assert {(entry.mtime, entry.uid, entry.gid, entry.uname) for entry in entries.values()} == {(0, 0, 0, "")}
    assert not any(path.endswith(".pyc") or "direct_url" in path for path in entries)
    assert all(entries[parent.as_posix()].isdir() for path in entries for parent in list(Path(path).parents)[:-1])
    assert entries["runs"].mode == entries["tmp"].mode == 0o1777
    settings = config["config"]
    assert settings["Entrypoint"] == ["/opt/stoker/bin/python", "-m", "stoker"]
    assert settings["Cmd"] == ["train", "blobs.py", "--set", "lr=0.2"]
    assert "STOKER_RUNS=/runs" in settings["Env"]
    (for_docker,) = json.loads(files["manifest.json"])
    assert for_docker["RepoTags"] == [made.reference]
    assert all(name in files for name in (for_docker["Config"], *for_docker["Layers"]))


@pytest.mark.slow
def test_the_same_files_make_the_same_bytes(job: tuple[Path, Entry], place: Path) -> None:
    """Whatever the times and the name of the archive; another job changes its own layer alone."""
    base = ImageOptions(base=base_image(place / "base"))
    build_image(*job, place / "one.tar", base)
    os.utime("blobs.py", (1, 1))
    build_image(*job, place / "elsewhere" / "two.tar", base)
    assert (place / "one.tar").read_bytes() == (place / "elsewhere" / "two.tar").read_bytes()
    before = manifest_of(blobs_of(place / "one.tar"))[0]["layers"]
    path = job_file("settings.update(batch=8)")
    build_image(path, load_job(path, {})[1], place / "three.tar", base)
    after = manifest_of(blobs_of(place / "three.tar"))[0]["layers"]
    assert before[:-1] == after[:-1]
    assert before[-1] != after[-1]


@pytest.mark.parametrize("name", [".env", "conf/server.key", ".ssh/known_hosts", "id_ed25519", "aws/credentials"])
def test_secrets_are_refused_by_their_name(job: tuple[Path, Entry], place: Path, name: str) -> None:
    """The file is named, the remedy is too, and nothing is written."""
    path = place / "more" / name
    path.parent.mkdir(parents=True)
    path.write_text("TOKEN=1")
    with pytest.raises(BadJob, match=f"more/{name} looks like a secret"):
        build_image(*job, place / "image.tar", ImageOptions(include=(Path("more"),)))
    assert not list(place.glob("*.tar"))


def test_a_private_key_is_refused_by_its_content(job: tuple[Path, Entry], place: Path) -> None:
    """Under whatever name."""
    (place / "notes.txt").write_text("-----BEGIN OPENSSH PRIVATE KEY-----\n")
    with pytest.raises(BadJob, match=r"notes\.txt looks like a secret"):
        build_image(*job, place / "image.tar", ImageOptions(include=(Path("notes.txt"),)))
    assert not is_secret("data/tokens.json")


def base_image(
    folder: Path, *, python: str = f"usr/local/bin/python{VERSION}", damage: str = "", **changes: Any
) -> Path:
    """A small OCI layout: one compressed layer with Python, typer 99 and a file."""
    files = {
        python: b"",
        f"usr/local/lib/python{VERSION}/site-packages/typer-99.dist-info/METADATA": b"",
        "etc/x": b"1",
    }
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    layer = gzip.compress(stream.getvalue(), mtime=0)
    (folder / "blobs" / "sha256").mkdir(parents=True)

    def put(content: bytes, media_type: str) -> dict[str, Any]:
        digest = hashlib.sha256(content).hexdigest()
        stored = content[::-1] if media_type == damage else content
        if damage == "another layer" and media_type.endswith("gzip"):
            stored = gzip.compress(stream.getvalue(), mtime=1)
        (folder / "blobs" / "sha256" / digest).write_bytes(stored)
        return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(content)}

    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Env": ["PATH=/usr/local/bin:/usr/bin", "A=b"]},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(stream.getvalue()).hexdigest()}"]},
        "history": [{"created_by": "made by hand"}],
    }
    part = put(layer, changes.get("layer_type", f"{LAYER}+gzip"))
    config = changes.get("config", config)
    named = put(json.dumps(config).encode(), "application/vnd.oci.image.config.v1+json")
    manifest = {"schemaVersion": 2, "layers": [part], "config": named}
    manifest = changes.get("manifest", manifest)
    pointer = put(json.dumps(manifest).encode(), "application/vnd.oci.image.manifest.v1+json")
    pointer["platform"] = {"os": "linux", "architecture": changes.get("architecture", oci_image._architecture())}
    (folder / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [pointer]}))
    (folder / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    return folder


def as_archive(layout: Path) -> Path:
    """The same as an archive."""
    path = layout.with_suffix(".tar")
    with tarfile.open(path, "w") as tar:
        for file in sorted(layout.rglob("*")):
            if file.is_file():
                tar.add(file, file.relative_to(layout).as_posix())
    return path


@pytest.mark.slow
@pytest.mark.parametrize("as_file", [False, True])
def test_a_base_image_is_built_upon(job: tuple[Path, Entry], place: Path, as_file: bool) -> None:
    """Its layers stay as they are, its Python runs, what it lacks is added, and what differs is said."""
    layout = base_image(place / "base")
    options = ImageOptions(base=as_archive(layout) if as_file else layout)
    made = build_image(*job, place / "image.tar", options)
    files = blobs_of(place / "image.tar")
    manifest, config = manifest_of(files)
    assert made.layers[0].is_from_base
    assert [part["mediaType"] for part in manifest["layers"]] == [f"{LAYER}+gzip", LAYER, LAYER, LAYER]
    added = names_in(files[f"blobs/{manifest['layers'][1]['digest'].replace(':', '/')}"])
    assert any("/mdurl/" in name for name in added)
    assert not any("/typer/" in name for name in added)
    settings = config["config"]
    assert settings["Entrypoint"][0] == f"/usr/local/bin/python{VERSION}"
    assert {"A=b", f"PYTHONPATH=/opt/stoker/lib/python{VERSION}/site-packages"} <= set(settings["Env"])
    assert any("typer 99 (here 2)" in note for note in made.notes)
    assert config["history"][0] == {"created_by": "made by hand"}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"python": "usr/bin/perl"}, "has no Python"),
        ({"python": "usr/bin/python3.9"}, "only Python 3.9"),
        ({"architecture": "mips"}, "has no image for linux/"),
        ({"layer_type": f"{LAYER}+zstd"}, r"a layer of the type .*zstd"),
        ({"damage": f"{LAYER}+gzip"}, "is damaged"),
        ({"damage": "another layer"}, "is damaged: a layer is not what its digest says"),
        ({"damage": "application/vnd.oci.image.config.v1+json"}, "is damaged"),
        ({"damage": "application/vnd.oci.image.manifest.v1+json"}, "is damaged"),
    ],
)
def test_a_base_that_cannot_be_used_is_refused(
    job: tuple[Path, Entry], place: Path, settings: dict[str, Any], said: str
) -> None:
    """In one sentence, and nothing is left behind."""
    base = base_image(place / "base", **settings)
    with pytest.raises(BadJob, match=said):
        build_image(*job, place / "image.tar", ImageOptions(base=base))
    assert not [path for path in place.iterdir() if "image.tar" in path.name]


@pytest.mark.parametrize("document", ["[]", "{}", "7", "nonsense", '{"manifests": 3}', '{"manifests": [1, {}, null]}'])
def test_an_index_of_another_form_is_refused(job: tuple[Path, Entry], place: Path, document: str) -> None:
    """As an error that a user can act on, never as one of Python's."""
    base = base_image(place / "base")
    (base / "index.json").write_text(document)
    with pytest.raises(BadJob, match="--base"):
        build_image(*job, place / "image.tar", ImageOptions(base=base))


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=3),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["config", "rootfs", "diff_ids", "history", "Env", "layers", "digest", "size"]),
                inner,
                max_size=4,
            )
        ),
        max_leaves=8,
    )
)
def test_documents_of_any_form_are_read_or_refused(document: Any) -> None:
    """A manifest and a configuration from elsewhere raise nothing but the documented error."""
    for name in ("manifest", "config"):
        with tempfile.TemporaryDirectory() as folder:
            base = base_image(Path(folder) / "base", **{name: document})
            with contextlib.suppress(BadJob):
                BaseImage.read(base, oci_image._architecture())


@pytest.mark.parametrize("content", [b"", b"no archive at all", None])
def test_a_base_that_is_no_image_is_refused(job: tuple[Path, Entry], place: Path, content: bytes | None) -> None:
    """A file that is not there, no archive, or the archive of something else."""
    path = place / "base.tar"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(BadJob, match=r"base\.tar is (not there|no OCI archive)"):
        build_image(*job, place / "image.tar", ImageOptions(base=path))


def test_libraries_are_those_that_the_loader_would_take() -> None:
    """Of Python itself: the C library and the loader; a file that is none, or is cut off, asks for nothing."""
    section = read_dynamic(Path(sys.executable).resolve())
    assert "libc.so.6" in section.needed
    assert section.loader.startswith("/lib")
    libraries = SystemLibraries.needed_by(oci_image._python_files())
    assert libraries.missing == ()
    names = {Path(file.path).name for file in libraries.files}
    assert {"libc.so.6", Path(section.loader).name, "sh", "libz.so.1"} <= names


def test_a_damaged_library_asks_for_nothing(place: Path) -> None:
    """Whatever its bytes are after the first."""
    head = Path(sys.executable).resolve().read_bytes()[:4096]
    for size in (0, 5, 63, 64, 200, 4096):
        (place / "cut").write_bytes(head[:size])
        read_dynamic(place / "cut")
    (place / "cut").write_bytes(head[:6] + b"\xff" * 400)
    assert read_dynamic(place / "cut").needed == ()


@pytest.mark.slow
def test_the_command_says_what_is_in_it_and_how_to_run_it(job: tuple[Path, Entry], place: Path) -> None:
    """For people as a table, for programs as a record."""
    base = base_image(place / "base")
    outcome = stoker_here("image", "blobs.py", "-o", "out of here/image.tar", "--base", base, "--set", "lr=0.2")
    assert outcome.code == 0, outcome.err
    assert "podman load -i 'out of here/image.tar' && mkdir -p runs && podman run" in outcome.out
    document = json.loads(stoker_here("image", "blobs.py", "-o", "2.tar", "--base", base, "--json").out)
    assert document["record"] == ImageRecord.__name__
    assert document["command"] == ["train", "blobs.py"]
    assert stoker_here("image", "blobs.py", "--base", "nowhere").code == 2


def test_what_an_upper_layer_hides_is_not_there() -> None:
    """A package that the base removed again is one that it lacks, and so is a Python."""
    site = f"usr/local/lib/python{VERSION}/site-packages"
    below = [f"usr/local/bin/python{VERSION}", f"{site}/typer-99.dist-info/METADATA", "etc/", "etc/x", "etc/xy"]
    hidden = [f"{site}/.wh.typer-99.dist-info", "etc/.wh.x", "usr/local/bin/stoker"]
    assert list(visible([below, hidden])) == [below[0], "etc/", "etc/xy", "usr/local/bin/stoker"]
    assert list(visible([below, ["etc/.wh..wh..opq", "etc/new"]])) == [*below[:2], "etc/new"]
    assert list(visible([below, [".wh..wh..opq"]])) == []


def test_the_base_s_user_stays(job: tuple[Path, Entry], place: Path) -> None:
    """An image that does not run as root does not by what is added to it."""
    config = {"config": {"User": "1000:1000"}, "rootfs": {"diff_ids": ["sha256:0"]}}
    layout = base_image(place / "base", config=config)
    base = BaseImage.read(layout, oci_image._architecture())
    assert base.user == "1000:1000"
    made: Any = oci_image._config([], base, ["python"], ["train"], "blobs")
    assert made["config"]["User"] == "1000:1000"
    assert "User" not in oci_image._config([], None, [], [], "blobs")["config"]  # type: ignore[call-overload, operator, index]


def test_a_link_to_a_secret_is_one(job: tuple[Path, Entry], place: Path, tmp_path_factory: Any) -> None:
    """What travels is what it leads to, whatever its own name is; so does the history of a repository."""
    keys = tmp_path_factory.mktemp("home") / ".aws"
    keys.mkdir()
    (keys / "credentials").write_text("[default]\naws_secret_access_key = x\n")
    (place / "conf").mkdir()
    (place / "conf" / "settings.ini").symlink_to(keys / "credentials")
    with pytest.raises(BadJob, match=r"conf/settings\.ini looks like a secret"):
        build_image(*job, place / "image.tar", ImageOptions(include=(Path("conf"),)))
    (place / "src" / ".git").mkdir(parents=True)
    (place / "src" / ".git" / "config").write_text("url = https://me:token@host/x.git\n")
    with pytest.raises(BadJob, match=r"src/\.git/config looks like a secret"):
        build_image(*job, place / "image.tar", ImageOptions(include=(Path("src"),)))
    assert not (place / "image.tar").exists()


@pytest.mark.parametrize("content", [b"shorter", b"longer than it was when it was listed"])
def test_a_file_that_changes_meanwhile_is_refused(tmp_path: Path, content: bytes) -> None:
    """A layer never has a part of a file, or of the job another one than its name says; a full disk is said so."""
    path = tmp_path / "large.bin"
    path.write_bytes(b"as it was listed")
    file = oci_image._file("large.bin", path)
    path.write_bytes(content)
    with pytest.raises(BadJob, match=r"large\.bin was changed"):
        write_layer([file], io.BytesIO())

    path.write_bytes(b"a" * (2 << 20))
    file = TreeFile.of_file("large.bin", path)
    path.write_bytes(b"b" * (2 << 20))
    with pytest.raises(BadJob, match=r"large\.bin was changed"):
        write_layer([file], io.BytesIO())

    class Full(io.RawIOBase):
        def write(self, data: Any) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    path.write_bytes(b"x" * 100_000)
    with pytest.raises(OSError, match="No space left"):
        write_layer([oci_image._file("large.bin", path)], Full())  # type: ignore[arg-type]
