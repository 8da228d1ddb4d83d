from __future__ import annotations

import io
import subprocess
import tarfile
from pathlib import Path
from typing import IO

import pytest

from stoker.errors import BadJob, PlaceFailed, PlaceUnreachable
from stoker.launching import lines
from stoker.launching.bundle import TreeFile
from stoker.launching.lines import LocalLine, SshLine, line_to, write_tar
from tests.launching.fake_ssh import fake_ssh

__all__ = ["fake_ssh"]

TREE = [
    TreeFile.of_bytes("job.py", b"print(1)\n"),
    TreeFile.of_bytes("deep/er/x'y z.txt", b"x" * 70_000),
    TreeFile(path="data/train.csv", link="../../data/train.csv"),
]


def test_a_tree_arrives_as_it_was(tmp_path: Path) -> None:
    """Names with blanks and quotes, folders, links: what is sent is what is there."""
    into = tmp_path / "there" / "code"
    LocalLine().send_tree(TREE, str(into))
    assert (into / "job.py").read_bytes() == b"print(1)\n"
    assert (into / "deep/er/x'y z.txt").read_bytes() == b"x" * 70_000
    assert (into / "data/train.csv").readlink() == Path("../../data/train.csv")
    assert sorted(path.name for path in into.parent.iterdir()) == ["code"]
    assert sorted(path.name for path in into.iterdir()) == ["data", "deep", "job.py"]


def test_a_cut_transfer_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream that ends between two files is a valid archive to tar, and is refused all the same."""

    def cut(files: list[TreeFile], stream: IO[bytes]) -> None:
        whole = io.BytesIO()
        write_tar(files[:1], whole)
        stream.write(whole.getvalue()[:1024])  # one header and its content

    monkeypatch.setattr(lines, "write_tar", cut)
    with pytest.raises(PlaceFailed, match="the transfer was cut"):
        LocalLine().send_tree(TREE, str(tmp_path / "there" / "code"))
    assert list((tmp_path / "there").iterdir()) == []


def test_a_file_that_changes_while_it_is_sent_is_refused(tmp_path: Path) -> None:
    """A file under a digest there has that digest: a large file that was changed since it was hashed is not sent."""
    source = tmp_path / "big.bin"
    source.write_bytes(b"a" * (2 << 20))
    file = TreeFile.of_file("big.bin", source)
    for content in (b"b" * (2 << 20), b"a" * 100):
        source.write_bytes(content)
        with pytest.raises(BadJob, match=r"big.bin (was changed|cannot be sent)"):
            LocalLine().send_tree([file], str(tmp_path / "there" / "data"))
        assert not list((tmp_path / "there").glob("*"))
    small = tmp_path / "small.py"
    small.write_text("x = 1")
    file = TreeFile.of_file("small.py", small)
    small.write_text("x = 2, and more")
    LocalLine().send_tree([file], str(tmp_path / "there" / "code"))
    assert (tmp_path / "there" / "code" / "small.py").read_text() == "x = 1"


def test_a_tree_that_is_there_is_kept(tmp_path: Path) -> None:
    """Two senders of one digest: the second finds the first one's folder, and neither fails."""
    into = tmp_path / "code"
    LocalLine().send_tree(TREE, str(into))
    (into / "mark").touch()
    LocalLine().send_tree(TREE, str(into))
    assert (into / "mark").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["code"]


def test_only_files_that_differ_are_fetched(tmp_path: Path) -> None:
    """A second fetch copies what changed; what is left out, or being written, stays there."""
    there, here = tmp_path / "there", tmp_path / "here"
    (there / "checkpoints").mkdir(parents=True)
    for name in ("run.json", "checkpoints/a", "lock", ".writing-x-1-01234567"):
        (there / name).write_text(name)
    line = LocalLine()
    assert line.fetch_tree(str(there), here) == 2
    assert line.fetch_tree(str(there), here) == 0
    (there / "run.json").write_text("changed")
    assert line.fetch_tree(str(there), here) == 1
    assert (here / "run.json").read_text() == "changed"
    assert sorted(path.name for path in here.iterdir()) == ["checkpoints", "run.json"]


@pytest.mark.parametrize(
    ("script", "error", "message"),
    [
        ('"$@" | head -c 1024; exit 137', PlaceUnreachable, "the copy of .* was cut"),  # tar was killed
        ('shift; exec tar --exclude=b "$@"', PlaceFailed, r"b did not come from .*: exit code 0"),
        ('rm "$3/b"; exec "$@"', None, ""),
    ],
)
def test_a_copy_without_all_that_is_there_is_not_taken_for_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, error: type[PlaceFailed] | None, message: str
) -> None:
    """To tar a stream that ends between two files is whole; a file that is removed in between is no loss."""
    there, here = tmp_path / "there", tmp_path / "here"
    there.mkdir()
    for name in ("a", "b", "c"):
        (there / name).write_text(name)
    (there / "linked").hardlink_to(there / "a")
    command = LocalLine.command

    def with_script(self: LocalLine, argv: list[str]) -> list[str]:
        return ["sh", "-c", script, "sh", *argv] if argv[0] == "tar" else command(self, argv)

    with monkeypatch.context() as patch:
        patch.setattr(LocalLine, "command", with_script)
        if error is None:
            assert LocalLine().fetch_tree(str(there), here) == 3
            return
        with pytest.raises(error, match=message) as failed:
            LocalLine().fetch_tree(str(there), here)
        assert type(failed.value) is error
    assert (here / "a").read_text() == "a"
    LocalLine().fetch_tree(str(there), here)
    assert {path.name: path.read_text() for path in here.iterdir()} == {"a": "a", "b": "b", "c": "c", "linked": "a"}


def test_more_complaints_than_a_pipe_holds_block_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of tar on a disk that cannot be written, a line for each of many files: all is sent and fetched."""
    loud = "head -c 1000000 /dev/zero | tr '\\0' x >&2; "
    command = LocalLine.command

    def complaining(self: LocalLine, argv: list[str]) -> list[str]:
        return ["timeout", "20", "sh", "-c", f'{loud}exec "$@"', "sh", *command(self, argv)]

    monkeypatch.setattr(LocalLine, "command", complaining)
    tree = [*TREE, TreeFile.of_bytes("big.bin", b"x" * 1_000_000)]
    LocalLine().send_tree(tree, str(tmp_path / "there"))
    assert LocalLine().fetch_tree(str(tmp_path / "there"), tmp_path / "here") == 3


def test_what_a_place_sends_stays_in_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hostile archive with names outside, links and names that were not requested writes none of them."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for name in ("../outside", "/tmp/stoker-outside", "unasked", "good"):  # noqa: S108 - a name that is refused
            info = tarfile.TarInfo(name)
            info.size = 2
            tar.addfile(info, io.BytesIO(b"ok"))
        link = tarfile.TarInfo("good")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    archive.seek(0)
    assert lines.extract_tar(archive, tmp_path / "here", {"good", "../outside"} & {"good"}) == {"good"}
    assert [path.name for path in (tmp_path / "here").iterdir()] == ["good"]
    assert not (tmp_path / "outside").exists()
    assert not lines.is_inside("../outside")
    assert not lines.is_inside("/etc/passwd")


def test_bytes_are_read_from_an_offset(tmp_path: Path) -> None:
    """A log is read on from where it was read to, in pieces, and a file that is not there is empty."""
    log = tmp_path / "events.jsonl"
    log.write_bytes(bytes(range(256)) * 10)
    line = LocalLine()
    assert line.read(str(log), 2500) == log.read_bytes()[2500:]
    assert line.read(str(log), 10, 5) == bytes(range(10, 15))
    assert line.read(str(log), 99_999) == b""
    assert line.read(str(tmp_path / "none")) == b""


def test_a_file_is_replaced_at_once(tmp_path: Path) -> None:
    """Its folder is made, and nothing else is left there."""
    LocalLine().write(str(tmp_path / "a" / "order.json"), b"{}", mode=0o600)
    assert (tmp_path / "a" / "order.json").read_bytes() == b"{}"
    assert (tmp_path / "a" / "order.json").stat().st_mode & 0o777 == 0o600
    assert len(list((tmp_path / "a").iterdir())) == 1


def test_arguments_are_quoted_for_the_shell_there(fake_ssh: Path) -> None:
    """No argument is read by a shell, whatever is in it."""
    words = ["a b", "$HOME", "'", '"; rm -rf /', "`id`", ""]
    answer = SshLine("me@box:2222").run(["printf", "%s|", *words])
    assert answer.stdout.decode() == "".join(f"{word}|" for word in words)


def test_what_a_login_shell_prints_is_no_answer(fake_ssh: Path, tmp_path: Path) -> None:
    """As an `echo` in ~/.bashrc does: neither paths, files nor whole folders have it."""
    line, there = SshLine("loud"), tmp_path / "there"
    assert line.home() == str(tmp_path)
    line.send_tree(TREE, str(there))
    assert line.read(str(there / "job.py")) == b"print(1)\n"
    assert line.read(str(there / "none")) == b""
    assert line.run(["false"], check=False).last_line() == "exit code 1"
    assert line.fetch_tree(str(there), tmp_path / "here") == 2
    assert (tmp_path / "here/job.py").read_text() == "print(1)\n"


def test_host_user_and_port_of_a_word() -> None:
    """The parts of a word become ssh's options, and what names no host is refused."""
    command = SshLine("me@box:2222").command(["true"])
    assert command[command.index("-l") + 1] == "me"
    assert command[command.index("-p") + 1] == "2222"
    assert command[-2:] == ["box", "printf %s stoker-answer: && exec true"]
    assert SshLine("[fe80::1%eth0]:22").command(["true"])[-2] == "fe80::1%eth0"
    for bad in ("-oProxyCommand=touch /tmp/x", "me@", "a b", "box:port", ""):
        with pytest.raises(PlaceFailed, match="names no host"):
            SshLine(bad)
    assert isinstance(line_to(""), LocalLine)


def test_a_refusal_and_silence_are_told_apart(fake_ssh: Path) -> None:
    """Who is refused mends the login; who hears nothing knows nothing."""
    with pytest.raises(PlaceUnreachable, match=r"gone cannot be reached: .*timed out"):
        SshLine("gone").run(["true"])
    with pytest.raises(PlaceFailed, match="closed refuses the login") as refused:
        SshLine("closed").run(["true"])
    assert not isinstance(refused.value, PlaceUnreachable)
    with pytest.raises(PlaceUnreachable):
        SshLine("gone").send_tree(TREE, "/nowhere")
    with pytest.raises(PlaceFailed, match="failed on box"):
        SshLine("box").run(["false"])
    with pytest.raises(PlaceFailed, match=r"^a script failed on box: sh: .*no-such-program: .*not found$"):
        SshLine("box").shell("no-such-program\nexit 3")
    for check in (True, False):
        with pytest.raises(PlaceFailed, match=r"^nologin runs no commands for this login: This account is currently"):
            SshLine("nologin").run(["true"], check=check)


def test_no_answer_in_time_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that takes too long says nothing about what it did."""

    def late(*_: object, **__: object) -> None:
        raise subprocess.TimeoutExpired("ssh", 1)

    monkeypatch.setattr(subprocess, "run", late)
    with pytest.raises(PlaceUnreachable, match="no answer"):
        LocalLine().run(["true"], timeout_s=1)


def test_a_file_that_cannot_be_written_is_named_with_the_room(tmp_path: Path) -> None:
    """What the system says of it is the reason."""
    (tmp_path / "file").touch()
    with pytest.raises(PlaceFailed, match=r"/file/order.json cannot be written on .* \(.* free\): mkdir: ") as refused:
        LocalLine().write(f"{tmp_path}/file/order.json", b"{}")
    assert "root=FOLDER" in str(refused.value.remedy)


def test_several_files_are_replaced_by_one_command(fake_ssh: Path, tmp_path: Path) -> None:
    """Bytes as they are, each with its mode; another file is removed; a cut line replaces nothing."""
    line, stop = SshLine("box"), tmp_path / "stop"
    stop.touch()
    first, second, empty = (str(tmp_path / "new folder" / name) for name in ("a", "b", "c"))
    line.write_all(
        {first: (b"1\0\n\n", 0o600), second: (b"2" * 100_000, 0o644), empty: (b"", 0o644)}, without=str(stop)
    )
    assert len(fake_ssh.read_text().splitlines()) == 1
    assert [Path(path).read_bytes() for path in (first, second, empty)] == [b"1\0\n\n", b"2" * 100_000, b""]
    assert Path(first).stat().st_mode & 0o777 == 0o600
    assert not stop.exists()
    command = line.command
    line.command = lambda argv: command([*argv[:-1], "100001"])  # type: ignore[method-assign]
    with pytest.raises(PlaceFailed, match="the transfer was cut"):
        line.write(second, b"3" * 100)
    assert Path(second).read_bytes() == b"2" * 100_000
    assert sorted(path.name for path in (tmp_path / "new folder").iterdir()) == ["a", "b", "c"]
