"""Lines: how commands and files reach a machine that runs or keeps a run: this one, or one behind SSH.

What: programs with arguments, bytes of files from an offset, and folders as a tar stream, over the user's own OpenSSH,
so that `~/.ssh/config`, agents, jump hosts and hardware keys work as they do by hand.
Use when: a launcher works on a machine with a shell. Needs there: a POSIX shell, GNU tar, find and coreutils.
Costs: one connection for each host (multiplexed, kept for `PERSIST_S` after the last command), then a few milliseconds
a command.
Does not do: passwords (BatchMode): it never waits for an invisible prompt.
Source: ssh_config(5), OpenSSH 9.2: ControlMaster, ControlPersist, BatchMode, ServerAliveInterval; ssh(1) on exit code
255.
"""

from __future__ import annotations

import abc
import getpass
import hashlib
import os
import re
import shlex
import shutil
import signal
import stat
import subprocess
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import IO, cast

from stoker.errors import BadJob, PlaceFailed, PlaceUnreachable
from stoker.launching.bundle import TreeFile
from stoker.launching.launcher import ASK_AGAIN, LEFT_THERE
from stoker.launching.start_up import LOOP_PROGRAM
from stoker.store.files import is_aside, written_aside
from stoker.units import format_bytes, format_seconds

CONFIG_VARIABLE = "STOKER_SSH_CONFIG"
"""Environment variable: a configuration file for ssh instead of `~/.ssh/config`."""

COMMAND_TIMEOUT_S = 60.0
CONNECT_TIMEOUT_S = 10
PERSIST_S = 60
"""How long a connection is kept after the last command [s]."""

ALIVE_INTERVAL_S, ALIVE_MOST = 5, 3
"""A silent line is given up after 15 s."""

_WHOLE = ".stoker-whole"
"""Last entry of a tree that is sent: without it the stream was cut."""

HOST_SCRIPT = f"""
export LC_ALL=C
loop={shlex.quote(LOOP_PROGRAM)}
echo "time $(date +%s.%N)"
echo "host $(hostname)"
for p in python3.11 python3.12 python3.13 python3.14 python3; do
    ! command -v $p >/dev/null 2>&1 || echo "python $($p -c 'import platform; print(platform.python_version())')" &
done
wait
for p in python3.11 python3.12 python3.13 python3.14; do
    command -v $p >/dev/null 2>&1 && s=$($p -c "$loop" 2>/dev/null) && echo "loop $s" && break
done
echo "cpu $(awk -F': ' '/model name/ {{print $2; exit}}' /proc/cpuinfo)"
"""
"""Begins a shell script by which a host says what it is: clock, name, Pythons and their speed, CPU; a word and a value
a line."""

_SSH_FAILED = 255
_TAR_ENDED = (0, 1, 2)
"""Exit codes after which tar has sent what it could read: all, all but files that changed, all but some files."""
_TIDY_UP_S = 10.0


@dataclass(frozen=True)
class Answer:
    """The result of a command: its exit code, standard output, and standard error as text."""

    code: int
    stdout: bytes
    stderr: str

    @property
    def text(self) -> str:
        """Standard output as text, without blanks at its ends."""
        return self.stdout.decode(errors="replace").strip()

    def last_line(self) -> str:
        """The last line of standard error, or of the output: what a failed command says."""
        said = [line for line in self.stderr.splitlines() if line.strip() and "Exiting with failure" not in line]
        lines = said or self.text.splitlines()
        return lines[-1].strip() if lines else f"exit code {self.code}"


class Line(abc.ABC):
    """How commands and files reach one machine. Any method may raise these errors.

    Raises:
        PlaceUnreachable: the machine does not answer, or not in time: nothing is known of what the command did.
        BadJob: a file here cannot be read, or was changed while it was sent.
        PlaceFailed: it refuses the login, is unknown, or cannot do what is asked.
    """

    name: str
    """The machine, for messages."""
    mark: bytes = b""
    """The beginning of a command's output; anything before it is a login shell's."""

    @abc.abstractmethod
    def command(self, argv: Sequence[str]) -> list[str]:
        """The program and arguments to start here for `argv` to run there."""

    def run(
        self, argv: Sequence[str], *, stdin: bytes = b"", timeout_s: float = COMMAND_TIMEOUT_S, check: bool = True
    ) -> Answer:
        """Run a program there and wait for its end.

        Args:
            argv: program and arguments; no shell sees them.
            stdin: bytes for its standard input: the place for secrets.
            timeout_s: longest time [s].
            check: raise PlaceFailed with its last line if the exit code is not 0.
        """
        try:
            # A group of its own: Ctrl-C in the terminal is for Stoker, not for a transfer that it may want to finish.
            ended = subprocess.run(
                self.command(argv), input=stdin, capture_output=True, timeout=timeout_s, check=False, process_group=0
            )
        except subprocess.TimeoutExpired:
            raise PlaceUnreachable(
                f"{self.name} gave no answer to `{argv[0]}` in {format_seconds(timeout_s)}",
                remedy=ASK_AGAIN,
            ) from None
        except FileNotFoundError as error:
            raise PlaceFailed(f"{error.filename} is not installed on this machine") from error
        has_begun = self.mark in ended.stdout
        own = ended.stdout.partition(self.mark)[2] if self.mark and has_begun else ended.stdout
        answer = Answer(ended.returncode, own, ended.stderr.decode(errors="replace"))
        self.require_line(answer)
        if answer.code != 0 and not has_begun:
            said = answer.text or answer.last_line()
            raise PlaceFailed(
                f"{self.name} runs no commands for this login: {said.splitlines()[-1]}",
                remedy="Its login shell there has to: try `ssh HOST true`, or log in as somebody else.",
            )
        if answer.code != 0 and check:
            command = "a script" if argv[0] == "sh" else f"`{shlex.join(argv)[:120]}`"
            raise PlaceFailed(f"{command} failed on {self.name}: {answer.last_line()}")
        return answer

    def shell(self, script: str, *arguments: str, timeout_s: float = COMMAND_TIMEOUT_S, check: bool = True) -> Answer:
        """Run a POSIX shell script there, with arguments `$1`, `$2`, …, which need no quoting."""
        return self.run(["sh", "-c", script, "sh", *arguments], timeout_s=timeout_s, check=check)

    def require_line(self, answer: Answer) -> None:  # noqa: B027 - this machine needs no line
        """Raise if an exit code says that the line itself failed."""

    def home(self) -> str:
        """Absolute path of the home directory there."""
        return self.shell("cd && pwd").text

    def absolute(self, path: str) -> str:
        """`path` there, made absolute from the home directory."""
        path = path.removeprefix("~/")
        return path if path.startswith("/") else f"{self.home()}/{path}"

    def read(self, path: str, offset: int = 0, most_bytes: int = 1 << 20) -> bytes:
        """Bytes of a file there from `offset` on, at most `most_bytes`; b"" if it is shorter, or not there."""
        script = '[ -e "$1" ] || exit 0; tail -c "+$2" -- "$1" | head -c "$3"'
        return self.shell(script, path, str(offset + 1), str(most_bytes)).stdout

    def write(self, path: str, content: bytes, *, mode: int = 0o644) -> None:
        """Replace a file there at once; its folder is made."""
        self.write_all({path: (content, mode)})

    def write_all(self, files: Mapping[str, tuple[bytes, int]], *, without: str = "") -> None:
        """Replace several files there by one command, each at once, and remove the file `without`.

        Args:
            files: content and mode by path.
            without: absolute path; "": none.
        """
        script = (
            'umask 077; [ -z "$1" ] || rm -f -- "$1" || exit 1; shift; while [ $# -gt 0 ]; do mkdir -p -- '
            '"$(dirname -- "$1")" && dd bs=1 count="$3" status=none > "$1.writing-$$" && chmod "$2" "$1.writing-$$" '
            '&& { [ "$(wc -c < "$1.writing-$$")" -eq "$3" ] || { echo "the transfer was cut" >&2; false; }; } '
            '&& mv -f -- "$1.writing-$$" "$1" || { rm -f -- "$1.writing-$$"; exit 1; }; shift 3; done'
        )
        about = [word for path, (content, mode) in files.items() for word in (path, f"{mode:o}", str(len(content)))]
        content = b"".join(content for content, _ in files.values())
        answer = self.run(["sh", "-c", script, "sh", without, *about], stdin=content, check=False)
        if answer.code != 0:
            raise self._unwritten(next(iter(files), without), answer)

    def exists(self, path: str) -> bool:
        """Whether a file or folder is there."""
        return self.run(["test", "-e", path], check=False).code == 0

    def send_tree(self, files: Iterable[TreeFile], into: str) -> None:
        """Make the folder `into` there from files; it is there as a whole or not at all.

        The stream is unpacked aside and renamed, so that a cut line or a full disk leaves nothing half. Nothing happens
        to a folder of that name which is there already.
        """
        script = (
            'set -e; mkdir -p -- "$(dirname -- "$1")"; aside="$1.writing-$$"; '
            'trap \'rm -rf -- "$aside" || :\' EXIT; trap "exit 1" HUP INT TERM PIPE; '
            'mkdir -- "$aside"; tar -xf - -C "$aside"; '
            f'[ -e "$aside/{_WHOLE}" ] || {{ echo "the transfer was cut" >&2; exit 1; }}; rm -- "$aside/{_WHOLE}"; '
            'mv -T -- "$aside" "$1" 2>/dev/null || [ -d "$1" ]'
        )
        # A pipe without a reader would block both sides.
        with tempfile.TemporaryFile() as complaints:
            process = subprocess.Popen(
                self.command(["sh", "-c", script, "sh", into]),
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=complaints,
                process_group=0,
            )
            with process, _killed_on_error(process):
                assert process.stdin is not None
                with suppress(BrokenPipeError):  # its exit code says why it ended
                    write_tar(files, process.stdin)
                with suppress(BrokenPipeError):
                    process.stdin.close()
            answer = Answer(process.returncode, b"", _text_of(complaints))
        self.require_line(answer)
        if answer.code != 0:
            raise self._unwritten(into, answer)

    def _unwritten(self, path: str, answer: Answer) -> PlaceFailed:
        """The error of a file or folder that could not be written, with the room there."""
        free = self.shell('df -Pk -- "$(dirname -- "$1")" | awk "END {print \\$4}"', path, check=False).text
        room = f" ({format_bytes(int(free) * 1024)} free)" if free.isdigit() else ""
        return PlaceFailed(
            f"{path} cannot be written on {self.name}{room}: {answer.last_line()}",
            remedy="Nothing half was left there; free some space, or give another --place-option root=FOLDER.",
        )

    def fetch_tree(self, folder: str, into: Path) -> int:
        """Copy the files below a folder there into `into`, but for `LEFT_THERE`; the number of files copied [files].

        A file of the same size and time of change is not copied again. Each is written aside and renamed. Only regular
        files come, and only under names that the listing gave: what a machine elsewhere sends cannot leave `into`.

        Args:
            folder: absolute path there.
            into: folder here; made if it is not there.
        """
        paths = sorted(self._to_fetch(folder, into))
        if not paths:
            return 0
        with tempfile.TemporaryFile() as names, tempfile.TemporaryFile() as complaints:
            names.write(b"\0".join(name.encode(errors="surrogateescape") for name in paths) + b"\0")
            names.seek(0)
            # A file that is removed or grows while tar reads makes its exit code 1 or 2: the next call brings it.
            tar = ["tar", "-C", folder, "--no-recursion", "--hard-dereference", "--null", "-cf", "-", "-T", "-"]
            process = subprocess.Popen(
                self.command(tar), stdin=names, stdout=subprocess.PIPE, stderr=complaints, process_group=0
            )
            with process, _killed_on_error(process):
                assert process.stdout is not None
                came: set[str] | None = None
                _skip_to(self.mark, process.stdout)
                try:
                    came = extract_tar(process.stdout, into, set(paths))
                except tarfile.ReadError:
                    process.kill()
            answer = Answer(process.returncode, b"", _text_of(complaints))
            self.require_line(answer)
        # A stream that ends between two files reads as a whole one.
        if came is None or answer.code not in _TAR_ENDED:
            raise PlaceUnreachable(
                f"the copy of {folder} from {self.name} was cut",
                remedy="The same command goes on from the files that came.",
            )
        if (missing := set(paths) - came) and (left := sorted(missing & self._to_fetch(folder, into))):
            raise PlaceFailed(
                f"{left[0]} did not come from {folder} on {self.name}: {answer.last_line()}",
                remedy="The same command fetches the rest.",
            )
        return len(came)

    def _to_fetch(self, folder: str, into: Path) -> set[str]:
        """Names of the files below a folder there that are not here, or not the same here."""
        listing = self.shell(
            '[ -d "$1" ] || exit 0; cd -- "$1" && find . -type f -printf "%P\\0%s\\0%T@\\0"', folder
        ).stdout
        fields = listing.decode(errors="surrogateescape").split("\0")
        there = zip(fields[0::3], fields[1::3], fields[2::3], strict=False)
        return files_to_copy({name: (int(size), int(float(at))) for name, size, at in there}, into)


class LocalLine(Line):
    """This machine: a scheduler's commands and a shared folder are here."""

    name = "this machine"

    def command(self, argv: Sequence[str]) -> list[str]:
        """The command itself."""
        return list(argv)


class SshLine(Line):
    """A machine behind the user's OpenSSH.

    Args:
        host: `host`, `user@host`, `user@host:port`, or a name of `~/.ssh/config`; an IPv6 address in brackets.

    Raises:
        PlaceFailed: the text names no host.
    """

    mark = b"stoker-answer:"

    def __init__(self, host: str) -> None:
        match = re.fullmatch(r"(?:([^@\s]+)@)?(\[[0-9a-fA-F:.]+(?:%\w+)?\]|[^@:\s/,-][^@:\s/,]*)(?::(\d{1,5}))?", host)
        if match is None:
            raise PlaceFailed(f"{host!r} names no host", remedy="Write user@host or user@host:port.")
        user, address, port = match.groups()
        self.name = host
        self.address = address.strip("[]")
        self._to = ["-l", user] if user else []
        self._to += ["-p", port] if port else []
        config = os.environ.get(CONFIG_VARIABLE)
        self._config = ["-F", config] if config else []

    def command(self, argv: Sequence[str]) -> list[str]:
        """`ssh` with the command quoted for the shell there, whatever that shell prints when it starts."""
        return [*self._ssh(), self.address, f"printf %s {self.mark.decode()} && exec {shlex.join(argv)}"]

    def close(self) -> None:
        """End the kept connection, if there is one."""
        subprocess.run([*self._ssh(), "-O", "exit", self.address], capture_output=True, check=False, timeout=10)

    def require_line(self, answer: Answer) -> None:
        """Raise for ssh's own exit code."""
        if answer.code == _SSH_FAILED:
            raise ssh_error(self.name, answer.stderr)
        if answer.code < 0:
            raise PlaceUnreachable(f"ssh to {self.name} was ended by {signal.Signals(-answer.code).name}")

    def _ssh(self) -> list[str]:
        stated = {
            "BatchMode": "yes",
            "ConnectTimeout": str(CONNECT_TIMEOUT_S),
            "ServerAliveInterval": str(ALIVE_INTERVAL_S),
            "ServerAliveCountMax": str(ALIVE_MOST),
            "ControlMaster": "auto",
            "ControlPersist": str(PERSIST_S),
            "ControlPath": f"{_control_folder()}/%C",
            "ForwardX11": "no",
            "LogLevel": "ERROR",
        }
        options = [word for name, value in stated.items() for word in ("-o", f"{name}={value}")]
        return ["ssh", "-T", *self._config, *options, *self._to]


def line_to(host: str) -> Line:
    """The line to a host: `""` and `localhost` without a user or port are this machine."""
    return LocalLine() if host in {"", "localhost"} else SshLine(host)


_SSH_SENTENCES = (
    (
        "permission denied",
        "{host} refuses the login: {line}",
        "`ssh {host}` has to work without a password: put your key there with `ssh-copy-id {host}` or start ssh-agent.",
    ),
    (
        "host key verification failed",
        "the key of {host} is not known here, or has changed",
        "Log in once by hand with `ssh {host}` and check its fingerprint.",
    ),
    ("could not resolve hostname", "there is no host {host}: {line}", "Check the name, or add it to ~/.ssh/config."),
    (
        "too many authentication failures",
        "{host} refuses the login: {line}",
        "Set IdentityFile and IdentitiesOnly for it in ~/.ssh/config.",
    ),
    ("bad configuration option", "~/.ssh/config cannot be used: {line}", "Mend that line."),
)


def ssh_error(host: str, stderr: str) -> PlaceFailed:
    """The error for what ssh said before it ended with 255.

    >>> type(ssh_error("box", "me@box: Permission denied (publickey).")).__name__
    'PlaceFailed'
    >>> type(ssh_error("box", "ssh: connect to host box port 22: Connection timed out")).__name__
    'PlaceUnreachable'
    """
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    for sign, message, remedy in _SSH_SENTENCES:
        reason = next((line for line in lines if sign in line.lower()), None)
        if reason is not None:
            return PlaceFailed(message.format(host=host, line=reason), remedy=remedy.format(host=host))
    said = lines[-1] if lines else "the connection was lost"
    return PlaceUnreachable(f"{host} cannot be reached: {said}", remedy=ASK_AGAIN)


def write_tar(files: Iterable[TreeFile], stream: IO[bytes]) -> None:
    """Write files as a tar stream whose last entry says that it is whole; times and owners are left out."""
    with tarfile.open(fileobj=stream, mode="w|", format=tarfile.PAX_FORMAT) as tar:
        for file in files:
            info = tarfile.TarInfo(file.path)
            info.mode = 0o755 if file.is_executable else 0o644
            if file.link:
                info.type, info.linkname = tarfile.SYMTYPE, file.link
                tar.addfile(info)
                continue
            info.size = file.num_bytes
            with file.open() as content:
                hashed = HashedFile(content)
                try:
                    tar.addfile(info, cast("IO[bytes]", hashed))
                except OSError as error:
                    if isinstance(error, BrokenPipeError):
                        raise
                    raise BadJob(f"{file.path} cannot be sent: {error}") from error
                if hashed.digest() != file.digest:
                    raise BadJob(
                        f"{file.path} was changed while it was sent", remedy="The same command sends it again."
                    )
        tar.addfile(tarfile.TarInfo(_WHOLE), BytesIO())


class HashedFile:
    """A file whose content is hashed as it is read."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._sha256 = file, hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        """The next bytes."""
        block = self._file.read(size)
        self._sha256.update(block)
        return block

    def digest(self) -> str:
        """SHA-256 (hex) of what was read."""
        return self._sha256.hexdigest()


def extract_tar(stream: IO[bytes], into: Path, paths: set[str]) -> set[str]:
    """Write the regular files of a tar stream that are wanted, each aside and renamed; their names."""
    written = set()
    with tarfile.open(fileobj=stream, mode="r|") as tar:
        for member in tar:
            name = member.name.removeprefix("./")
            content = tar.extractfile(member) if member.isreg() else None
            if content is None or name not in paths:
                continue
            target = into / name
            target.parent.mkdir(parents=True, exist_ok=True)
            with written_aside(target) as aside:
                with aside.open("wb") as file:
                    shutil.copyfileobj(content, file, 1 << 20)
                    file.flush()
                    os.fsync(file.fileno())
                os.utime(aside, (member.mtime, member.mtime))
            written.add(name)
    return written


def _skip_to(mark: bytes, stream: IO[bytes]) -> None:
    """Read up to the end of a mark, or all if it does not come."""
    seen = bytearray()
    while not seen.endswith(mark) and (byte := stream.read(1)):
        seen += byte


def _text_of(file: IO[bytes]) -> str:
    """The text that a program wrote to a temporary file."""
    file.seek(0)
    return file.read().decode(errors="replace")


def files_to_copy(there: Mapping[str, Sequence[int]], into: Path) -> set[str]:
    """The files to copy into `into`, of those that another machine lists with size [bytes] and time of change [s].

    Not those that are here and equal, that stay there, that are being written, or whose path leads out of the folder.
    """

    def is_here(name: str, about: Sequence[int]) -> bool:
        with suppress(OSError):
            status = (into / name).stat()
            return [status.st_size, int(status.st_mtime)] == list(about)
        return False

    return {
        name
        for name, about in there.items()
        if is_inside(name)
        and Path(name).parts[0] not in LEFT_THERE
        and not is_aside(Path(name))
        and not is_here(name, about)
    }


def is_inside(name: str) -> bool:
    """Whether a relative path that another machine names stays inside of the folder it is copied to."""
    return bool(name) and not name.startswith("/") and ".." not in Path(name).parts


@contextmanager
def _killed_on_error(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Within the block, an error ends the process, which may tidy up first: the block of Popen would wait for it."""
    try:
        yield
    except BaseException:
        with suppress(OSError):
            if process.stdin is not None:
                process.stdin.close()
        try:
            process.wait(_TIDY_UP_S)
        except subprocess.TimeoutExpired:
            process.kill()
        raise


def _control_folder() -> Path:
    """The folder of control sockets, open to this user alone; a short path, as sockets need.

    Raises:
        PlaceFailed: a folder of that name is another user's.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    folder = (
        Path(runtime) / "stoker-ssh"
        if runtime and len(runtime) < 40 and Path(runtime).is_dir()
        else (
            Path("/tmp") / f"stoker-ssh-{getpass.getuser()}"  # noqa: S108 - owner and mode are checked below
        )
    )
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise PlaceFailed(f"{folder} is not this user's alone", remedy="Remove it, or set XDG_RUNTIME_DIR.")
    return folder
