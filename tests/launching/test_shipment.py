"""Data that a place has already."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest

from stoker.errors import PlaceFailed
from stoker.launching.bundle import Bundle, TreeFile
from stoker.launching.environment_lock import EnvironmentLock
from stoker.launching.kubernetes import pod_files
from stoker.launching.launcher import LaunchTarget, Submission
from stoker.launching.lines import LocalLine
from stoker.launching.shipment import look, ship

SET = Bundle(
    kind="data", name="digits", files=(TreeFile.of_bytes("a.csv", b"1,2\n"), TreeFile.of_bytes("b.csv", b"3,4\n"))
)
ONE = Bundle(kind="data", name="a.csv", files=SET.files[:1])


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The home directory at the place, with the set in `sets/digits`."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("STOKER_DATA", raising=False)
    monkeypatch.setattr("stoker.launching.shipment._their_python", lambda *_: "/usr/bin/python3")
    LocalLine().send_tree(SET.files, f"{tmp_path}/sets/digits")
    return tmp_path


def shipped(home: Path, bundle: Bundle, **options: str) -> Path:
    """Send a run with that data; its folder at the place."""
    code, stoker = (Bundle(kind=kind, name=kind, files=()) for kind in ("code", "stoker"))
    target = LaunchTarget(text="ssh:box", kind="ssh", address="box")
    submission = Submission(
        run="blobs", target=target, code=code, stoker=stoker, data=(bundle,), job_file="blobs.py", options=options
    )
    ship(LocalLine(), submission, look(LocalLine(), submission))
    return home / ".stoker" / bundle.folder


def test_data_below_a_relative_folder_are_linked(home: Path) -> None:
    """The link holds: it is absolute, and one file is found among others; a broken one is mended."""
    (home / "sets" / "digits" / "__pycache__").mkdir()
    (home / "sets" / "digits" / "__pycache__" / "x.pyc").touch()
    for bundle in (SET, ONE):
        (home / ".stoker" / "data").mkdir(parents=True, exist_ok=True)
        (home / ".stoker" / bundle.folder).symlink_to("sets/digits")
        folder = shipped(home, bundle, data="sets" if bundle is SET else "sets/digits")
        assert folder.readlink() == home / "sets" / "digits"
        assert (folder / "a.csv").read_bytes() == b"1,2\n"


def test_a_folder_that_holds_more_is_other_data(home: Path) -> None:
    """A picture folder with further pictures has another digest, so the one here is sent."""
    (home / "sets" / "digits" / "c.csv").write_text("5,6")
    folder = shipped(home, SET, data=str(home / "sets"))
    assert not folder.is_symlink()
    assert sorted(path.name for path in folder.iterdir()) == ["a.csv", "b.csv"]


def test_files_in_linked_folders_count(home: Path) -> None:
    """At the place as here, by a shell and in a pod: an equal set with links is found, and one with more is not."""
    parts = Bundle(kind="data", name="digits", files=(*SET.files, TreeFile.of_bytes("part/c.csv", b"5,6\n")))
    (home / "disk" / "part").mkdir(parents=True)
    (home / "disk" / "part" / "c.csv").write_text("5,6\n")
    (home / "sets" / "digits" / "part").symlink_to(home / "disk" / "part")
    for bundle in (parts, SET):
        wanted = {"name": bundle.name, "files": {file.path: file.digest for file in bundle.files}}
        assert pod_files._holds(home / "sets" / "digits", wanted) == (bundle is parts)
        assert shipped(home, bundle, data="sets").is_symlink() == (bundle is parts)


def test_linked_data_that_were_changed_are_not_used(home: Path) -> None:
    """They are looked at at every start, also where the option is not given again."""
    folder = shipped(home, SET, data="sets")
    assert shipped(home, SET).is_symlink()
    (home / "sets" / "digits" / "a.csv").write_text("9,9\n")
    shipped(home, SET)
    assert not folder.is_symlink()
    assert (folder / "a.csv").read_bytes() == b"1,2\n"
    assert (home / "sets" / "digits" / "a.csv").read_text() == "9,9\n"
    assert sorted(path.name for path in folder.parent.iterdir()) == [folder.name]


@pytest.mark.parametrize(("name", "content"), [("launch/order.json", '{"record": "Other"}'), ("run.json", "{torn")])
def test_a_record_there_that_cannot_be_used_is_refused_in_words(home: Path, name: str, content: str) -> None:
    """Damaged, or another version's: not a ValueError, and not overwritten."""
    path = home / ".stoker" / "runs" / "blobs" / name
    path.parent.mkdir(parents=True)
    path.write_text(content)
    with pytest.raises(PlaceFailed, match=r"cannot be used|of that name"):
        shipped(home, SET)
    assert path.read_text() == content


def test_one_look_says_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records, bundles, missing data, room, and whether a Python can be used: in one command, which changes nothing."""
    monkeypatch.setenv("HOME", str(tmp_path))
    code, stoker = (Bundle(kind=kind, name=kind, files=()) for kind in ("code", "stoker"))
    target, lock = (
        LaunchTarget(text="ssh:box", kind="ssh", address="box"),
        EnvironmentLock(python="3.11", requirements=()),
    )
    about = Submission(
        run="blobs",
        target=target,
        code=code,
        stoker=stoker,
        data=(SET,),
        job_file="blobs.py",
        environment=lock,
        expected=(str(tmp_path / "a b"), str(tmp_path / "gone")),
    )
    found = look(LocalLine(), about)
    assert (found.root, found.records, found.bundles, found.is_ready) == (f"{tmp_path}/.stoker", {}, frozenset(), False)
    assert not (tmp_path / ".stoker").exists()
    (tmp_path / "a b").touch()
    launch = tmp_path / ".stoker" / "runs" / "blobs" / "launch"
    launch.mkdir(parents=True)
    (launch / "order.json").write_bytes(b'{"a":\n"\xff"}\n')
    LocalLine().send_tree(SET.files, f"{tmp_path}/.stoker/{SET.folder}")
    ready = tmp_path / ".stoker" / lock.folder("3.11")
    ready.mkdir(parents=True)
    (ready / "complete").touch()
    found = look(LocalLine(), about)
    assert found.records == {"launch/order.json": b'{"a":\n"\xff"}\n'}
    assert found.bundles == {f"{tmp_path}/.stoker/{SET.folder}"}
    assert found.missing == (str(tmp_path / "gone"),)
    assert found.is_ready
    assert found.python is None
    assert found.free_bytes > 0
    for python, said in ((sys.executable, ""), ("nosuchpython", "there is no nosuchpython")):
        answer = look(LocalLine(), dataclasses.replace(about, environment=python)).python
        assert answer is not None
        assert (answer.code == 0, answer.stderr) == (not said, said)
    (launch / "order.json").unlink()
    theirs = dataclasses.replace(about, environment="nosuchpython", expected=())
    found = look(LocalLine(), theirs)
    with pytest.raises(PlaceFailed, match="in its own environment: there is no nosuchpython"):
        ship(LocalLine(), theirs, found)
    assert not (tmp_path / ".stoker" / code.folder).exists()
