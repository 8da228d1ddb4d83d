"""Isolation of a stranger's program on an owner's machine: what it may see, and how much it may take.

What: a program gets folders that are named, no network, no home, no other processes, no devices but those that are
named, and no capabilities. Its memory, processes, disk, cores and time are limited; a program that goes over one is
ended, and the reason is kept. Three kinds, each asked at the start whether it works here:

- `gvisor`: `runsc` answers the program's system calls itself, in user space; the host's kernel sees few of them.
- `podman`: rootless containers, with the filter of system calls that Podman has.
- `bubblewrap`: namespaces and our own filter of system calls (`system_call_filter.py`); the host's kernel answers.

Use when: whatever comes from a stranger runs. There is no kind without isolation. Costs: 0.04 s a start (bubblewrap),
0.2 s (gVisor), and what gVisor takes for each system call.
Does not do: hide the program or its data from the owner: who has root on a machine reads all that runs there. It does
not protect against errors of the kernel (bubblewrap, podman) or of runsc, of the CPU, or of a GPU's driver, which all
kinds share with the owner where a GPU is lent.
"""

from __future__ import annotations

import abc
import errno
import functools
import hashlib
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO

from stoker.devices.cpu import cpu_s_of, process_stat
from stoker.errors import NoDevice, PlaceFailed, nearest
from stoker.pool.control_group import ControlGroup, joining
from stoker.pool.system_call_filter import MACHINE, filter_program
from stoker.units import format_bytes, format_seconds

LEAST_FREE_BYTES = 1 << 30
"""Disk that is left to the owner, whatever a program's quota says [bytes]."""
HOST_FULL = "the disk of this machine is full"
"""How `IsolatedProcess.exceeded` begins where it is no fault of the program."""
_OWNERS_ERRORS = frozenset(
    (
        *(errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS),
        *(errno.ENOMEM, errno.EAGAIN, errno.EMFILE, errno.ENFILE),
    )
)
"""What an owner's disk, memory or limits lack; a program's files have other errors."""

FIRST_USER, NUM_USERS = 61_000, 1000
"""Where the agent is root, programs run under user numbers of this range, which belong to no account."""

_NOBODY = 65_534
_LOOK_S, _MOST_LOOK_S = 0.2, 1.0
"""Time between two looks at what a program takes: as long as it needs to write what it still may, within these [s]."""
_FASTEST_WRITE = 4 << 30
"""What a program writes at most [bytes/s]."""
_PIPE_S = 5.0
_MOST_OUTPUT_BYTES = 1 << 24
_MOST_INCOMPLETE_LOOKS = 25
_MOST_ENTRIES = 200_000
_TMP_SHARE = 8
_BEYOND = 1 << 62
_SYSTEM = (
    "/etc/ld.so.cache",
    "/etc/ld.so.conf",
    "/etc/ld.so.conf.d",
    "/etc/alternatives",
    "/etc/localtime",
    "/sys/devices/system/cpu",
    "/sys/devices/system/node",
)
"""What the loader reads, and where libraries see how many CPUs there are: without it PyTorch takes its slowest code."""
_PROBE_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a program may take.

    Attributes:
        memory_bytes: of all its processes together, temporary files included [bytes].
        cores: share of the CPUs.
        processes: processes and threads.
        disk_bytes: of what it writes [bytes].
        time_s: until it is ended [s].
    """

    memory_bytes: int
    cores: float
    processes: int = 512
    disk_bytes: int = 10 << 30
    time_s: float = 86_400.0


@dataclass(frozen=True, kw_only=True)
class Program:
    """A program with all that it may see.

    Attributes:
        argv: the command, as paths inside.
        readable, writable: folders and files by their path inside; what is writable is a folder.
        folder: working directory inside.
        environment: all variables that it has.
        devices: files below /dev.
    """

    argv: tuple[str, ...]
    readable: Mapping[str, Path] = field(default_factory=dict)
    writable: Mapping[str, Path] = field(default_factory=dict)
    folder: str = "/"
    environment: Mapping[str, str] = field(default_factory=dict)
    devices: tuple[str, ...] = ()
    limits: Limits


class IsolatedProcess:
    """A program that runs in isolation, and what watches its limits.

    Attributes:
        exceeded: the limit that ended it, as a sentence; "" for none.
    """

    def __init__(
        self, process: subprocess.Popen[bytes], program: Program, group: ControlGroup | None, most_output_bytes: int = 0
    ) -> None:
        self._process, self._program, self._group = process, program, group
        self._began = time.monotonic()
        self._incomplete_looks, self._pause_s = 0, _LOOK_S
        self.exceeded = ""
        self._stdout, self._stderr = (
            None if pipe is None else _Tail(pipe, most_output_bytes) for pipe in (process.stdout, process.stderr)
        )
        self._watcher = threading.Thread(target=self._watch, name="stoker-isolation", daemon=True)
        self._watcher.start()

    @property
    def pid(self) -> int:
        """The process on this machine that ends with the program."""
        return self._process.pid

    @property
    def stdout(self) -> bytes:
        """The end of its standard output, as far as it is kept."""
        return b"" if self._stdout is None else self._stdout.content

    @property
    def stderr(self) -> bytes:
        """The end of its standard error, as far as it is kept."""
        return b"" if self._stderr is None else self._stderr.content

    @property
    def pids(self) -> set[int]:
        """Its present processes, by their numbers on this machine."""
        return self._group.members() if self._group is not None else _descendants(self._process.pid)

    @property
    def cpu_s(self) -> float:
        """CPU time of its present processes [s]."""
        return cpu_s_of(self.pids)

    def poll(self) -> int | None:
        """Exit code; None while it runs."""
        return self._process.poll()

    def wait(self, timeout_s: float | None = None) -> int:
        """Wait for the end; the exit code.

        Raises:
            TimeoutError: it still runs.
        """
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"it still runs after {timeout_s:g} s") from None
        self._watcher.join()
        for tail in (self._stdout, self._stderr):
            if tail is not None:
                tail.join(_PIPE_S)
        return code

    def kill(self) -> None:
        """End it now, with every process it started."""
        with suppress(ProcessLookupError):
            self._process.kill()
        if self._group is not None:
            self._group.kill()

    def _watch(self) -> None:
        while self._process.poll() is None:
            try:
                sentence = self._over_limit()
            except Exception as problem:  # noqa: BLE001 - what cannot be watched does not run on unwatched
                sentence = f"it cannot be watched: {problem!r}"
            if sentence:
                self.exceeded = sentence
                self.kill()
                break
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(self._pause_s)
        self._process.wait()
        if self._group is not None:
            if not self.exceeded and self._group.memory_failures():
                self.exceeded = f"it needs more than {format_bytes(self._program.limits.memory_bytes)} of memory"
            self._group.remove()

    def _over_limit(self) -> str:
        limits = self._program.limits
        if time.monotonic() - self._began > limits.time_s:
            return f"it runs for more than {format_seconds(limits.time_s)}"
        members = self.pids
        if self._group is None and resident_bytes(members) > limits.memory_bytes:
            return f"it needs more than {format_bytes(limits.memory_bytes)} of memory"
        if self._group is None and len(members) > limits.processes:
            return f"it has more than {limits.processes} processes"
        folders = tuple(self._program.writable.values())
        counts = [disk_bytes(folder) for folder in folders]
        written = sum(count for count, _ in counts) + unlinked_bytes(members, folders)
        if written > limits.disk_bytes:
            return f"it writes more than {format_bytes(limits.disk_bytes)}"
        self._incomplete_looks = 0 if all(is_whole for _, is_whole in counts) else self._incomplete_looks + 1
        if self._incomplete_looks > _MOST_INCOMPLETE_LOOKS:  # what moves all the time hides what is in it
            return "it moves its folders so fast that what it writes cannot be counted"
        try:
            free = min((shutil.disk_usage(folder).free for folder in folders), default=LEAST_FREE_BYTES)
        except FileNotFoundError:
            return "its folder was removed"
        if free < LEAST_FREE_BYTES:
            return f"{HOST_FULL}: {format_bytes(free)} are free"
        room = min(limits.disk_bytes - written, free - LEAST_FREE_BYTES)
        self._pause_s = pause_s(0 if self._group is None or self._incomplete_looks else room)
        return ""


def pause_s(room_bytes: int) -> float:
    """How long a program need not be looked at that may write so much more, and whose memory the kernel counts [s].

    >>> [pause_s(room << 30) for room in (0, 2, 10)]
    [0.2, 0.5, 1.0]
    """
    return min(_MOST_LOOK_S, max(_LOOK_S, room_bytes / _FASTEST_WRITE))


class _Tail(threading.Thread):
    """Reads a pipe to its end and keeps the last bytes: what a program prints takes no disk, and little memory."""

    def __init__(self, pipe: IO[bytes], most_bytes: int) -> None:
        super().__init__(name="stoker-output", daemon=True)
        self._pipe, self._most = pipe, most_bytes
        self._kept = bytearray()
        self.start()

    def run(self) -> None:
        """Read."""
        with self._pipe:
            while part := os.read(self._pipe.fileno(), 1 << 16):
                self._kept += part
                if len(self._kept) > 2 * self._most:
                    del self._kept[: -self._most]

    @property
    def content(self) -> bytes:
        """What is kept."""
        return bytes(self._kept[-self._most :])


class Isolation(abc.ABC):
    """A kind of isolation. `name` is what an offer says; `text` is what the owner and the renter read."""

    name: str
    text: str
    lends_devices: bool = True
    limits_itself: bool = False
    """Whether limits of each process are set inside: its own processes outside of it need more."""
    own_processes, own_bytes = 8, 16 << 20
    """What the isolation itself needs within the limits of the whole: processes, memory [bytes]."""

    @abc.abstractmethod
    def problem(self) -> str | None:
        """Why it cannot be used here, without trying it; None if it may."""

    def user_inside(self, program: Program) -> int:
        """The user number that a program has, as it sees it itself."""
        if os.getuid() != 0:
            return _NOBODY
        folder = next(iter(program.writable.values()), None)
        return FIRST_USER if folder is None else user_of(folder)

    @abc.abstractmethod
    def command(
        self, program: Program, aside: Path, stack: ExitStack, *, is_grouped: bool
    ) -> tuple[list[str], list[int]]:
        """The command on this machine and the file descriptors it inherits.

        Args:
            program: what runs.
            aside: folder for its own files.
            stack: closed after the program's end.
            is_grouped: whether a control group counts its memory.
        """

    def start(
        self,
        program: Program,
        *,
        stdin: IO[bytes] | int = subprocess.DEVNULL,
        most_output_bytes: int = 0,
    ) -> IsolatedProcess:
        """Start a program; it ends with the thread that called this.

        Args:
            program: what runs.
            stdin: what it reads.
            most_output_bytes: of its standard output and error so many of the last bytes are kept each.

        Raises:
            PlaceFailed: the disk has no room for its quota, or it cannot be started.
        """
        for folder in program.writable.values():
            free = shutil.disk_usage(folder).free
            if free - program.limits.disk_bytes < LEAST_FREE_BYTES:
                raise PlaceFailed(
                    f"{folder} has {format_bytes(free)} free; the job may write "
                    f"{format_bytes(program.limits.disk_bytes)}, and {format_bytes(LEAST_FREE_BYTES)} are left to you",
                    remedy="Free some space, or offer less: --disk 2GiB.",
                )
        limits, output = program.limits, subprocess.PIPE if most_output_bytes else subprocess.DEVNULL
        group = ControlGroup.make(
            f"stoker-{uuid.uuid4().hex[:12]}",
            cores=limits.cores,
            memory_bytes=limits.memory_bytes + self.own_bytes,
            processes=limits.processes + self.own_processes,
        )
        aside = Path(tempfile.mkdtemp(prefix="stoker-isolation-"))
        with ExitStack() as stack:
            stack.callback(shutil.rmtree, aside, ignore_errors=True)
            aside.chmod(0o755)
            if os.getuid() == 0:
                for folder in program.writable.values():
                    give_to(folder, user_of(folder))
            command, descriptors = self.command(program, aside, stack, is_grouped=group is not None)
            try:
                process = subprocess.Popen(
                    [*joining(group), *self._limited(limits, group), *command],
                    stdin=stdin,
                    stdout=output,
                    stderr=output,
                    bufsize=0,
                    pass_fds=descriptors,
                    cwd="/",
                    env={"PATH": os.defpath},
                    start_new_session=True,
                )
            except OSError as error:
                if group is not None:
                    group.remove()
                raise PlaceFailed(f"{self.name} cannot be started: {error}") from error
            started = IsolatedProcess(process, program, group, most_output_bytes)
            kept = stack.pop_all()
        threading.Thread(target=_closed_after, args=(process, kept), name="stoker-isolation-end", daemon=True).start()
        return started

    def _limited(self, limits: Limits, group: ControlGroup | None) -> list[str]:
        """Limits of each process: files, no core dumps; last in line for the CPU, first where memory runs out."""
        words = ["setpriv", "--pdeathsig", "KILL", "--", "prlimit", "--core=0", "--nofile=4096"]
        if not self.limits_itself:
            words.append(f"--fsize={limits.disk_bytes}")
            if group is None:
                words.append(f"--data={limits.memory_bytes}")
            if group is None and os.getuid() != 0:  # counted for the whole user
                words.append(f"--nproc={limits.processes + _processes_of_user()}")
        return [*words, "--", "nice", "-n", "10", *(["choom", "-n", "1000", "--"] if shutil.which("choom") else [])]

    def run(
        self,
        program: Program,
        *,
        stdin: bytes = b"",
        timeout_s: float = _PROBE_S,
        started: Callable[[IsolatedProcess], None] = lambda _: None,
    ) -> tuple[int, bytes, bytes]:
        """Run a program to its end: exit code, standard output and error; the last 16 MiB of each are kept.

        `started` receives the program, which it may end.
        """
        with tempfile.TemporaryFile() as given:
            given.write(stdin)
            given.seek(0)
            process = self.start(program, stdin=given, most_output_bytes=_MOST_OUTPUT_BYTES)
        started(process)
        try:
            code = process.wait(timeout_s)
        except TimeoutError:
            process.kill()
            code = process.wait()
        return code, process.stdout, process.stderr + (f"\n{process.exceeded}".encode() if process.exceeded else b"")

    def trial(self) -> str | None:
        """Why it does not isolate here, found by running a program in it; None if it does."""
        if problem := self.problem():
            return problem
        limits = Limits(memory_bytes=1 << 28, cores=1, disk_bytes=1 << 24, time_s=_PROBE_S)
        script = (
            '[ $(id -u) = "$USER_INSIDE" ] && [ ! -e "$HOST_HOME" ] && ! touch /usr/x 2>/dev/null && '
            '[ $(grep -c : /proc/net/dev) -le 1 ] && ! kill -0 "$HOST_PID" 2>/dev/null && echo isolated'
        )
        variables = {"PATH": "/usr/bin:/bin", "HOST_HOME": f"{Path.home()}/.bashrc", "HOST_PID": str(os.getpid())}
        program = Program(argv=("/bin/sh", "-c", script), limits=limits)
        variables["USER_INSIDE"] = str(self.user_inside(program))
        try:
            code, out, err = self.run(replace(program, environment=variables))
        except PlaceFailed as error:
            return error.message
        if code == 0 and out.strip() == b"isolated":
            return None
        said = err.decode(errors="replace").strip().splitlines()
        return f"a trial of {self.name} failed (exit code {code}): {said[-1] if said else 'something was reachable'}"


class Bubblewrap(Isolation):
    """Namespaces by `bwrap`, with our own filter of system calls."""

    name = "bubblewrap"
    text = "namespaces and a filter of system calls; the host's kernel answers the rest"

    def problem(self) -> str | None:
        """Why it cannot be used here."""
        if os.uname().machine != MACHINE:
            return f"its filter of system calls is for {MACHINE}, and this machine is {os.uname().machine}"
        return _missing("bwrap", packages="bubblewrap util-linux")

    def command(
        self, program: Program, aside: Path, stack: ExitStack, *, is_grouped: bool
    ) -> tuple[list[str], list[int]]:
        """`bwrap` with all that the program sees."""
        rules = aside / "filter.bpf"
        rules.write_bytes(filter_program(has_hidden_memory=is_grouped))
        descriptor = os.open(rules, os.O_RDONLY)
        stack.callback(os.close, descriptor)
        limits, is_root = program.limits, os.getuid() == 0
        words = [
            *("bwrap", "--die-with-parent", "--new-session", "--clearenv", "--hostname", "stoker"),
            *("--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"),
            *("--cap-drop", "ALL", "--seccomp", str(descriptor)),
        ]
        if is_root:  # real user numbers, so that the kernel's checks of owners and its counts hold
            for name in ("CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP"):
                words += ["--cap-add", name]
        else:
            words += ["--unshare-user", "--uid", str(_NOBODY), "--gid", str(_NOBODY)]
        shown = {**_system_paths(), **program.readable}
        parents = {str(parent) for inside in (*shown, *program.writable) for parent in Path(inside).parents}
        words += ["--ro-bind", "/usr", "/usr"]
        for path in map(Path, ("/bin", "/sbin", "/lib", "/lib32", "/lib64")):
            if path.exists():
                words += (
                    ["--symlink", str(path.readlink()), str(path)]
                    if path.is_symlink()
                    else ["--ro-bind", str(path), str(path)]
                )
        small = str(max(1 << 20, limits.memory_bytes // _TMP_SHARE))
        words += ["--proc", "/proc", "--dev", "/dev"]
        for device in program.devices:
            words += ["--dev-bind-try", device, device]
        for folder in ("/tmp", "/dev/shm"):  # noqa: S108 - those inside
            words += ["--perms", "1777", "--size", small, "--tmpfs", folder]
        # After these folders: what is shown may lie below them. Without a mode bubblewrap makes them its own.
        for parent in sorted(parents - {"/", "/usr", "/etc/alternatives", "/tmp", "/dev", "/dev/shm"}):  # noqa: S108 - inside
            words += ["--perms", "0755", "--dir", parent]
        words += ["--remount-ro", "/dev"]
        for inside, path in sorted(shown.items()):
            words += ["--ro-bind", str(path), inside]
        for inside, path in sorted(program.writable.items()):
            words += ["--bind", str(path), inside]
        words += ["--chdir", program.folder, "--"]
        if is_root:
            user = str(self.user_inside(program))
            words += ["/usr/bin/setpriv", "--reuid", user, "--regid", user, "--clear-groups"]
            words += ["--no-new-privs", "--bounding-set=-all", "--inh-caps=-all", "--"]
        # Its variables come last: a loader's or a path among them would act on programs that still have rights.
        words += ["/usr/bin/env", "-i", "--", *(f"{name}={value}" for name, value in program.environment.items())]
        return [*words, *program.argv], [descriptor]


class Gvisor(Isolation):
    """gVisor's `runsc`: a kernel in user space between the program and the host's."""

    name = "gvisor"
    text = "gVisor answers system calls in user space; the host's kernel sees few of them"
    lends_devices = False
    limits_itself = True
    own_processes, own_bytes = 256, 256 << 20

    def user_inside(self, program: Program) -> int:
        """Where the agent is no root, the number 0 stands for its own user, and for no rights beyond that."""
        return super().user_inside(program) if os.getuid() == 0 else 0

    def problem(self) -> str | None:
        """Why it cannot be used here."""
        return _missing("runsc", packages="runsc util-linux")

    def command(
        self, program: Program, aside: Path, stack: ExitStack, *, is_grouped: bool
    ) -> tuple[list[str], list[int]]:
        """`runsc run` of a bundle whose root file system is empty but for what the program sees."""
        if program.devices:
            raise PlaceFailed(
                f"gVisor lends no devices here, and {', '.join(program.devices)} are asked for",
                remedy="Offer with --isolation podman or bubblewrap.",
            )
        rootfs, state = aside / "root", aside / "state"
        state.mkdir()
        user = self.user_inside(program)
        mounts = [
            _mount("proc", "/proc", "proc"),
            _mount("tmpfs", "/tmp", "tmpfs", "mode=1777"),  # noqa: S108 - inside
            _mount("tmpfs", "/dev/shm", "tmpfs", "mode=1777"),  # noqa: S108
        ]
        for inside, path in sorted(_root_of(program).items()):
            mounts.append(_mount(str(path), inside, "bind", "ro", "rbind"))
        for inside, path in sorted(program.writable.items()):
            mounts.append(_mount(str(path), inside, "bind", "rw", "rbind"))
        for mount in mounts:  # an empty root needs the places of its mounts
            _make_place(rootfs, str(mount["destination"]), Path(str(mount["source"])))
        limits = program.limits
        config = {
            "ociVersion": "1.0.2",
            "process": {
                "user": {"uid": user, "gid": user},
                "args": list(program.argv),
                "cwd": program.folder,
                "env": [f"{name}={value}" for name, value in program.environment.items()],
                "noNewPrivileges": True,
                "capabilities": {"bounding": [], "effective": [], "permitted": []},
                "rlimits": [
                    {"type": "RLIMIT_NPROC", "hard": limits.processes, "soft": limits.processes},
                    {"type": "RLIMIT_NOFILE", "hard": 4096, "soft": 4096},
                    {"type": "RLIMIT_FSIZE", "hard": limits.disk_bytes, "soft": limits.disk_bytes},
                ],
            },
            "root": {"path": str(rootfs), "readonly": True},
            "hostname": "stoker",
            "mounts": mounts,
            "linux": {"namespaces": [{"type": kind} for kind in ("pid", "network", "ipc", "uts", "mount")]},
        }
        (aside / "config.json").write_text(json.dumps(config))
        words = ["runsc", "--root", str(state), "--platform", "ptrace", "--network", "none", "--ignore-cgroups"]
        if os.getuid() != 0:
            words.append("--rootless")
        return [*words, "run", "--bundle", str(aside), f"stoker-{aside.name[-8:]}"], []


class Podman(Isolation):
    """Rootless Podman, without an image: its root is empty but for what the program sees."""

    name = "podman"
    text = "a rootless container: namespaces, subordinate user numbers, Podman's filter of system calls"
    limits_itself = True

    def problem(self) -> str | None:
        """Why it cannot be used here."""
        if (problem := _missing("podman", "newuidmap", packages="podman uidmap util-linux")) is not None:
            return problem
        return "rootless Podman needs an ordinary user, and this is root" if os.getuid() == 0 else None

    def trial(self) -> str | None:
        """As for all kinds; and its limits hold, which Podman leaves out without a word where it cannot set them."""
        if self.problem() is None:
            _remove_left_containers()
        if problem := super().trial():
            return problem
        limits = Limits(memory_bytes=1 << 28, cores=1, processes=64, disk_bytes=1 << 24, time_s=_PROBE_S)
        files = ("/sys/fs/cgroup/pids.max", "/sys/fs/cgroup/memory.max")
        _, out, _ = self.run(Program(argv=("/bin/cat", *files), limits=limits))
        if len(out.split()) == len(files) and all(word.isdigit() for word in out.split()):
            return None
        return "limits of memory and processes do not hold: control groups are not delegated to this user"

    def command(
        self, program: Program, aside: Path, stack: ExitStack, *, is_grouped: bool
    ) -> tuple[list[str], list[int]]:
        """`podman run` on an empty root."""
        rootfs, limits = aside / "root", program.limits
        name = f"{_container_prefix(os.getpid())}{aside.name[-8:]}"
        small = f"/tmp:size={max(1 << 20, limits.memory_bytes // _TMP_SHARE)}"  # noqa: S108 - inside
        words = [
            *("env", f"HOME={Path.home()}", f"XDG_RUNTIME_DIR={os.environ.get('XDG_RUNTIME_DIR', '')}"),
            *("podman", "run", "--rm", "-i", "--name", name, "--hostname", "stoker", "--workdir", program.folder),
            *("--network", "none", "--read-only", "--tmpfs", small, "--env-host=false"),
            *("--cap-drop", "all", "--security-opt", "no-new-privileges"),
            *("--user", "65534:65534", "--userns", "keep-id:uid=65534,gid=65534"),
            *("--pids-limit", str(limits.processes), "--memory", str(limits.memory_bytes), "--cpus", str(limits.cores)),
        ]
        for mode, shown in (("ro", _root_of(program)), ("rw", program.writable)):
            for inside, path in sorted(shown.items()):
                _make_place(rootfs, inside, path)
                words += ["-v", f"{path}:{inside}:{mode}"]
        for device in program.devices:
            words += ["--device", device]
        for name_, value in program.environment.items():
            words += ["-e", f"{name_}={value}"]
        stack.callback(subprocess.run, ["podman", "rm", "-f", "-t", "0", name], capture_output=True, check=False)
        return [*words, "--rootfs", str(rootfs), *program.argv], []


def _container_prefix(pid: int) -> str:
    """What names of a process's containers begin with; another process of that number began at another tick."""
    began = next(iter(process_stat(pid)[19:]), "gone")
    return f"stoker-{pid}-{began}-"


def _remove_left_containers() -> None:
    """Remove containers whose agent was killed: Podman's keep running without their client."""
    command = ["podman", "ps", "--all", "--filter", "name=^stoker-", "--format", "{{.Names}}"]
    listed = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()
    for name in listed:
        parts = name.split("-")
        if len(parts) == 4 and parts[1].isdigit() and not name.startswith(_container_prefix(int(parts[1]))):
            subprocess.run(["podman", "rm", "-f", "-t", "0", name], capture_output=True, check=False)


KINDS: tuple[Isolation, ...] = (Gvisor(), Podman(), Bubblewrap())
"""All kinds, the strongest first."""


@dataclass(frozen=True, kw_only=True)
class Host:
    """Where an agent runs programs of others: kind of isolation, limits of each, and files below /dev that it lends.

    `started` receives each program that `run` runs.
    """

    isolation: Isolation
    limits: Limits
    devices: tuple[str, ...] = ()
    started: Callable[[IsolatedProcess], None] = lambda _: None

    def run(self, program: Program) -> tuple[int, bytes, bytes]:
        """Run a program to its end, which `started` may bring about; see `Isolation.run`."""
        return self.isolation.run(program, timeout_s=self.limits.time_s, started=self.started)


def best_isolation(name: str = "best", devices: Sequence[str] = ()) -> Isolation:
    """The strongest kind that was tried here with success and lends these files below /dev, or the named one.

    Raises:
        NoDevice: there is none, or the named one does not work: a stranger's program does not run here.
    """
    kinds = {kind.name: kind for kind in KINDS}
    if name != "best" and name not in kinds:
        raise NoDevice(f"--isolation {name}: there is no such kind.", remedy=nearest(name, [*kinds, "best"]))
    problems = []
    for kind in kinds.values() if name == "best" else (kinds[name],):
        lacks = f"it lends no devices here, and {', '.join(devices)} are lent" if devices else ""
        problem = lacks if lacks and not kind.lends_devices else kind.trial()
        if problem is None:
            return kind
        problems.append(f"{kind.name}: {problem}")
    raise NoDevice(
        f"Nothing here can isolate a stranger's program: {'; '.join(problems)}.",
        remedy="Install one of them; a job from elsewhere is never run as a plain process.",
    )


def user_of(folder: Path) -> int:
    """The user number, of the range for isolated programs, that a folder's program runs under."""
    owner = folder.stat().st_uid
    if FIRST_USER <= owner < FIRST_USER + NUM_USERS:
        return owner
    return FIRST_USER + int(hashlib.sha256(os.fsencode(folder.resolve())).hexdigest(), 16) % NUM_USERS


def give_to(folder: Path, user: int) -> None:
    """Make a folder and all in it belong to a user number; links are not followed."""
    os.chown(folder, user, user)
    for below, folders, files in os.walk(folder):
        for name in (*folders, *files):
            os.chown(Path(below) / name, user, user, follow_symlinks=False)


def disk_bytes(folder: Path) -> tuple[int, bool]:
    """What a folder takes on the disk [bytes], and whether all of it was seen: some may be moved during the look.

    Links are not followed; each entry counts at least 4 KiB. More entries than 200,000, a path that is too long for the
    kernel, or a folder that its program has closed to the owner: 1 << 62.
    """
    total, waiting, entries, is_whole = 0, [os.fspath(folder)], 0, True
    while waiting:
        try:
            with os.scandir(waiting.pop()) as found:
                for entry in found:
                    try:
                        status = entry.stat(follow_symlinks=False)
                    except FileNotFoundError:
                        is_whole = False
                        continue
                    total += max(4096, status.st_blocks * 512)
                    if stat.S_ISDIR(status.st_mode):
                        waiting.append(entry.path)
                    entries += 1
                    if entries > _MOST_ENTRIES:
                        return _BEYOND, True
        except (FileNotFoundError, NotADirectoryError):
            is_whole = False
        except OSError:
            return _BEYOND, True
    return total, is_whole


def is_owners(problem: OSError) -> bool:
    """Whether an error is trouble of the owner's machine, which says nothing about a program."""
    return problem.errno in _OWNERS_ERRORS


def remove_tree(folder: Path) -> None:
    """Remove a folder with what a program made of it, of any depth and closed to its owner or not.

    Links are not followed. What cannot be removed is left.
    """
    if os.getuid() != 0:
        subprocess.run(["chmod", "-R", "u+rwx", "--", folder], capture_output=True, check=False)
    subprocess.run(["rm", "-rf", "--one-file-system", "--", folder], capture_output=True, check=False)


def unlinked_bytes(pids: Iterable[int], folders: Sequence[Path]) -> int:
    """Disk that processes hold by files which have no name any more [bytes]."""
    devices = {folder.stat().st_dev for folder in folders if folder.exists()}
    held: dict[tuple[int, int], int] = {}
    for pid in pids:
        with suppress(OSError):
            for path in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    status = path.stat()
                    if status.st_nlink == 0 and stat.S_ISREG(status.st_mode) and status.st_dev in devices:
                        held[status.st_dev, status.st_ino] = status.st_blocks * 512
    return sum(held.values())


def resident_bytes(pids: Iterable[int]) -> int:
    """Memory that processes hold together [bytes]; what they share is counted for each."""
    total = 0
    for pid in pids:
        with suppress(OSError, IndexError, ValueError):
            total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
    return total


def _descendants(pid: int) -> set[int]:
    """A process and all that descend from it."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            for parent in process_stat(int(path.name))[1:2]:
                children.setdefault(int(parent), []).append(int(path.name))
    found, waiting = set[int](), [pid]
    while waiting:
        one = waiting.pop()
        found.add(one)
        waiting += children.get(one, [])
    return found


@functools.cache
def _system_paths() -> dict[str, Path]:
    """What every Python program needs of this machine besides /usr: the loader's files, and this interpreter."""
    paths = [path for path in map(Path, _SYSTEM) if path.exists()]
    paths += [Path(prefix) for prefix in dict.fromkeys((sys.base_prefix, sys.prefix)) if not prefix.startswith("/usr")]
    paths += [Path(sys.executable).resolve().parents[1]]
    return {str(path): path for path in paths if not str(path).startswith("/usr") and str(path) != "/"}


def _root_of(program: Program) -> dict[str, Path]:
    """All that a program may read of a root that is empty otherwise, by the path inside."""
    merged = {f"/{name}": Path(f"/{name}").resolve() for name in ("bin", "sbin", "lib", "lib64")}
    system = {inside: path for inside, path in merged.items() if path.is_dir()}
    return {"/usr": Path("/usr"), **_system_paths(), **program.readable, **system}


def _missing(*programs: str, packages: str) -> str | None:
    """That programs, or those by which each process is limited, are not here, and which packages have them."""
    missing = [program for program in (*programs, "prlimit", "setpriv") if shutil.which(program) is None]
    return f"there is no {', '.join(missing)}: apt-get install {packages}" if missing else None


def _processes_of_user() -> int:
    count = 0
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            with suppress(OSError):
                if path.stat().st_uid == os.getuid():
                    count += sum(1 for _ in (path / "task").iterdir())
    return count


def _mount(source: str, inside: str, kind: str, *options: str) -> dict[str, object]:
    return {"source": source, "destination": inside, "type": kind, "options": list(options)}


def _make_place(rootfs: Path, inside: str, source: Path) -> None:
    """Make the empty folder or file that something is mounted on."""
    place = rootfs / inside.lstrip("/")
    if source.is_file():
        place.parent.mkdir(parents=True, exist_ok=True)
        place.touch()
    else:
        place.mkdir(parents=True, exist_ok=True)


def _closed_after(process: subprocess.Popen[bytes], stack: ExitStack) -> None:
    """Tidy up once a process has ended."""
    process.wait()
    stack.close()
