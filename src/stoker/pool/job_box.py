"""An order for a run on another owner's machine, and the box in which that machine executes it.

What: `PoolOrder` is what a renter signs for: code, Stoker and data as a tree of blobs, the job file and its settings.
`JobBox` is a folder of the agent with that tree, which a job may only read, and the run's directory, which it may
write. Training and replays run in the same box, under the same paths, in isolation.
The environment is the agent's own: a box has no network to install from. `missing_packages` says before anything starts
what the job needs and the agent lacks.

```
FOLDER/box/code, stoker, data      as sent; inside /stoker
       runs/NAME/                  inside /runs/NAME
       aside/                      copies on their way out
```
"""

from __future__ import annotations

import importlib.metadata
import itertools
import math
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import ClassVar

from stoker.errors import BadJob, BadRun, PlaceFailed, StokerError
from stoker.launching.at_place import LaunchOrder
from stoker.launching.environment_lock import EnvironmentLock
from stoker.launching.launcher import Submission
from stoker.pool.blob_tree import TreeLimits, pack_bundles, unpack
from stoker.pool.events import MOST_DEVICES, MOST_SITES
from stoker.pool.isolation import Host, Program, is_owners, remove_tree
from stoker.records.codec import dumps, loads
from stoker.store.foreign_files import parts_below, read_below
from stoker.units import parse_memory

KIND = "pool"
INSIDE, RUNS_INSIDE = "/stoker", "/runs"
MESSAGES = "launch/messages"
"""Where the messages between sites are, in a run's directory."""

MOST_ORDER_BYTES = 4 << 20
MOST_MESSAGE_BYTES = 8 << 30
"""Largest file of a message that is copied out of a box [bytes]."""
_MOST_NOTE_BYTES = 64
_FOR_TENSORS = 0.8
"""Share of a job's memory that its plan may use: the rest is for Python and its libraries [0 to 1]."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,199}")


@dataclass(frozen=True, kw_only=True)
class PoolOrder:
    """What an agent is to run; its SHA-256 stands in the lease.

    Attributes:
        run: name of the run.
        tree: SHA-256 of the tree of code, Stoker and data.
        code, stoker: their folders in the tree.
        job_file: relative to `code`.
        arguments: of `stoker train` after the job file.
        variables: environment variables.
        requirements: versions that the job was tried with (`numpy==2.3.1`).
        device: `cpu`, or `here` for what the agent lends.
        num_devices: devices that the run is spread over, a process each.
        site, sites: which site of a gang it is, from 0, of how many; 0 sites: it is none.
        block_s: time between checkpoints, each of which ends a block [s].
        resume: SHA-256 of the tree of the block to go on from; "" for the beginning. resume_seal: key of its file.
        resume_head: head of the chain there; resume_block, resume_update: where it is.
    """

    schema: ClassVar[int] = 2

    run: str
    tree: str
    code: str
    stoker: str
    job_file: str
    arguments: tuple[str, ...] = ()
    variables: dict[str, str] = field(default_factory=dict)
    requirements: tuple[str, ...] = ()
    device: str = "here"
    num_devices: int = 1
    site: int = 0
    sites: int = 0
    block_s: float = 60.0
    resume: str = ""
    resume_seal: str = ""
    resume_head: str = ""
    resume_block: int = 0
    resume_update: int = 0

    @property
    def begin(self) -> int:
        """Updates before the order's first block: those of the block that it goes on from [updates]."""
        return self.resume_update if self.resume else 0

    def __post_init__(self) -> None:
        if _NAME.fullmatch(self.run) is None:
            raise ValueError(f"run: {self.run[:100]!r} is no name")
        for folder in (self.code, self.stoker, self.job_file):
            if folder.startswith("/") or ".." in folder.split("/"):
                raise ValueError(f"{folder[:100]!r} leads out of the box")
        for name in self.variables:
            if _VARIABLE.fullmatch(name) is None:
                raise ValueError(f"variables: {name[:100]!r} is no name of an environment variable")
        if not 1 <= self.num_devices <= MOST_DEVICES:
            raise ValueError(f"num_devices {self.num_devices}: wanted 1 to {MOST_DEVICES}")
        if self.sites and not (0 <= self.site < self.sites <= MOST_SITES and self.num_devices == 1):
            raise ValueError(f"site {self.site} of {self.sites}: wanted {MOST_SITES} at most, of one device each")
        if not 0 < self.block_s < math.inf:
            raise ValueError(f"block_s {self.block_s}: wanted more than 0")
        texts = (self.code, self.stoker, self.job_file, self.device, *self.arguments, *self.variables.values())
        for text in texts:
            if "\0" in text or text != text.encode(errors="replace").decode():
                raise ValueError(f"{text[:100]!r} cannot be a word of a command")


def order_of(submission: Submission, put: Callable[[Path], str], aside: Path, *, block_s: float) -> PoolOrder:
    """Store what a submission sends, and return the order.

    Args:
        submission: what to run.
        put: stores a file as a blob; its SHA-256.
        aside: where the file is written first.
        block_s: time between checkpoints [s].

    Raises:
        BadJob: it asks for what an agent does not do.
    """
    if submission.secrets:
        raise BadJob(
            f"the secrets {', '.join(submission.secrets)} would be readable by the owner of the machine, whatever the "
            "isolation: who has root there reads every job",
            remedy="Leave --secret out; put what needs it into data before, or run where you trust the machine.",
        )
    if submission.image:
        raise BadJob("--image: agents run jobs in their own environment", remedy="Leave it out.")
    if submission.expected:
        raise BadJob(
            f"{submission.expected[0]} is outside of the job's folder, and an agent does not have it",
            remedy="Move it below the job's folder, so that it is sent.",
        )
    lock = submission.environment
    try:
        pack_bundles((*submission.data, submission.stoker, submission.code), aside)
        tree = put(aside)
    finally:
        aside.unlink(missing_ok=True)
    return PoolOrder(
        run=submission.run,
        tree=tree,
        code=submission.code.folder,
        stoker=submission.stoker.folder,
        job_file=submission.job_file,
        arguments=submission.arguments,
        variables=dict(submission.variables),
        requirements=lock.requirements if isinstance(lock, EnvironmentLock) else (),
        device="cpu" if submission.target.device == "cpu" else "here",
        num_devices=submission.target.num_devices,
        block_s=block_s,
    )


def missing_packages(order: PoolOrder) -> tuple[list[str], list[str]]:
    """Packages of an order that this environment lacks, and those that it has in another version."""
    missing, other = [], []
    for requirement in order.requirements:
        name, _, version = requirement.partition("==")
        try:
            here = importlib.metadata.version(name).partition("+")[0]
        except (importlib.metadata.PackageNotFoundError, ValueError):  # "" is no name at all
            missing.append(requirement)
            continue
        if here != version:
            other.append(f"{requirement} (here {here})")
    return missing, other


@dataclass(frozen=True)
class JobBox:
    """The folder in which a run of an order is executed or replayed."""

    folder: Path
    order: PoolOrder

    @classmethod
    def make(cls, folder: Path, order: PoolOrder, fetch: Callable[[str], Path], limits: TreeLimits) -> JobBox:
        """Write what was sent; an existing folder is replaced.

        Raises:
            BadRun: what was sent is too large, is not what its digests say, or leads out of the box.
            PlaceFailed: the job needs a package that is not installed here.
        """
        missing, _ = missing_packages(order)
        if missing:
            raise PlaceFailed(
                f"the job needs {', '.join(missing[:5])}, and this agent does not have it",
                remedy="Choose an agent that does, or leave the package out.",
            )
        box = cls(folder, order)
        if not (folder / "box.json").exists():
            remove_tree(folder / "box")
            folder.mkdir(parents=True, exist_ok=True)
            unpack(fetch(order.tree), folder / "box", limits)
            (folder / "box.json").write_text(dumps(order))
        for below in (box.run, box.aside):
            below.mkdir(parents=True, exist_ok=True)
        return box

    @property
    def run(self) -> Path:
        """The run's directory."""
        return self.folder / "runs" / self.order.run

    @property
    def aside(self) -> Path:
        """Folder for copies."""
        return self.folder / "aside"

    def training(self, host: Host) -> Program:
        """The program that trains the run, or goes on with it; its order is written first."""
        order = self.order
        # A GPU's own memory is the job's alone; the host's is what limits the job on a CPU.
        most_bytes = math.inf if host.devices else _FOR_TENSORS * host.limits.memory_bytes
        if (asked := value_of(order.arguments, "--memory")) is not None:
            most_bytes = min(most_bytes, parse_memory(asked))
        memory = () if math.isinf(most_bytes) else ("--memory", f"{int(most_bytes) >> 20}MiB")
        self.remove_word("stop")
        self.remove_word("host-0.json")
        self.write_word(
            "order.json",
            dumps(
                LaunchOrder(
                    run=order.run,
                    kind=KIND,
                    code=f"{INSIDE}/{order.code}",
                    job_file=order.job_file,
                    arguments=(
                        *order.arguments,
                        "--checkpoint-every",
                        f"{order.block_s:g}",
                        *memory,
                        *self._site,
                    ),
                    device=order.device,
                    ranks_each=order.num_devices,
                    are_ranks_fixed=order.num_devices > 1,
                    variables=dict(order.variables),
                    pythonpath=f"{INSIDE}/{order.stoker}",
                    submitted_at=datetime.now(UTC).isoformat(timespec="seconds"),
                )
            ).encode(),
        )
        argv = (sys.executable, "-m", "stoker.launching.at_place", "run", f"{RUNS_INSIDE}/{order.run}")
        return self._program(argv, self.run, host)

    @property
    def _site(self) -> tuple[str, ...]:
        """Options of a job that is one of several sites."""
        order = self.order
        if not order.sites:
            return ()
        return ("--site", f"{order.site}/{order.sites}", "--exchange", f"{RUNS_INSIDE}/{order.run}/{MESSAGES}")

    def message_names(self) -> list[str]:
        """Names of the files in the folder of messages."""
        with self._messages(self.run) as folder, os.scandir(folder) as entries:
            return [entry.name for entry in entries]

    def needs_from(self) -> int:
        """The first update whose messages the job still needs, by its own note; 0: it has written none."""
        note = read_below(self.run, f"{MESSAGES}/{self.order.site:04d}.needs", _MOST_NOTE_BYTES) or b""
        return int(note) if note.isdigit() else 0

    def copy_message(self, name: str, target: Path, most_bytes: int = MOST_MESSAGE_BYTES) -> bool:
        """Copy a file there to `target`, which the job cannot write to; whether it is there.

        Raises:
            BadRun: the job has put something else in its place, or it is larger than `most_bytes`.
            OSError: `target` cannot be written.
        """
        with target.open("wb") as file:
            try:
                file.writelines(parts_below(self.run, f"{MESSAGES}/{name}", most_bytes))
            except FileNotFoundError:
                return False
        return True

    def write_message(self, name: str, source: Path, run: Path | None = None) -> None:
        """Copy `source` there, seen when it is complete; `run`: a copy of the run's directory.

        Raises:
            OSError: the job has replaced the folder, or the disk is full.
        """
        with self._messages(self.run if run is None else run) as folder:
            aside, flags = f".carried-{name}", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
            with suppress(FileNotFoundError):
                os.unlink(aside, dir_fd=folder)
            with os.fdopen(os.open(aside, flags, 0o644, dir_fd=folder), "wb") as file, source.open("rb") as content:
                shutil.copyfileobj(content, file)
            os.replace(aside, name, src_dir_fd=folder, dst_dir_fd=folder)

    def remove_message(self, name: str) -> None:
        """Remove a file there, if it is still there."""
        with self._messages(self.run) as folder, suppress(FileNotFoundError):
            os.unlink(name, dir_fd=folder)

    @contextmanager
    def _messages(self, run: Path) -> Iterator[int]:
        """A descriptor of the folder of messages itself."""
        with self._launch(run) as launch:
            with suppress(FileExistsError):
                os.mkdir("messages", dir_fd=launch)
            folder = os.open("messages", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=launch)
            try:
                yield folder
            finally:
                os.close(folder)

    def write_word(self, name: str, content: bytes = b"") -> None:
        """Write a file of `launch/` in the run's directory, where the job may have put links in its place.

        Raises:
            BadRun: the job has replaced the folder.
            PlaceFailed: the disk is full, or fails otherwise.
        """
        with self._launch() as folder:
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=folder)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
            with os.fdopen(os.open(name, flags, 0o644, dir_fd=folder), "wb") as file:
                file.write(content)

    def remove_word(self, name: str) -> None:
        """Remove a file of `launch/`, if it is there."""
        with self._launch() as folder, suppress(FileNotFoundError):
            os.unlink(name, dir_fd=folder)

    @contextmanager
    def _launch(self, of_run: Path | None = None) -> Iterator[int]:
        """A descriptor of `launch/` itself, and of no link that stands there."""
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
        run = os.open(self.run if of_run is None else of_run, flags)
        try:
            with suppress(FileExistsError):
                os.mkdir("launch", dir_fd=run)
            folder = os.open("launch", flags, dir_fd=run)
        except OSError as error:
            raise _launch_problem(error, "the job has put something else in the place of launch/") from error
        finally:
            os.close(run)
        try:
            yield folder
        except OSError as error:
            raise _launch_problem(error, "the job has closed launch/, or put a folder into it") from error
        finally:
            os.close(folder)

    def replay(self, run: Path, until: int, host: Host, *, at: Sequence[int] = ()) -> Program:
        """The program that makes updates up to `until` again in `run`, a copy of the run's directory.

        `at`: updates after which the digest of the state is printed as well.
        """
        order = self.order
        settings = [word for option, value in pairs_of(order.arguments) for word in (option, value)]
        is_alone = order.num_devices == 1
        argv = (
            sys.executable,
            "-m",
            "stoker.verifying.replay" if is_alone else "stoker.verifying.replay_ranks",
            f"{RUNS_INSIDE}/{order.run}",
            f"{INSIDE}/{order.code}/{order.job_file}",
            *(() if is_alone else ("--ranks", str(order.num_devices))),
            "--until",
            str(until),
            *(["--at", ",".join(map(str, at))] if at else []),
            *self._site,
            *settings,
        )
        return self._program(argv, run, host)

    def _program(self, argv: tuple[str, ...], run: Path, host: Host) -> Program:
        order, cores = self.order, max(1, int(host.limits.cores))
        environment = {
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "HOME": "/tmp",  # noqa: S108
            "USER": "stoker",
            "LOGNAME": "stoker",
            "LANG": "C.UTF-8",
            "TMPDIR": "/tmp",  # noqa: S108
            "STOKER_CACHE": "/tmp/stoker",  # noqa: S108 - inside
            "PYTHONPATH": f"{INSIDE}/{order.stoker}",
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": str(cores),
            "GLOO_SOCKET_IFNAME": "",  # the loopback's IPv4 address: of an interface gVisor names either family first
            **order.variables,
        }
        return Program(
            argv=argv,
            readable={INSIDE: self.folder / "box"},
            writable={f"{RUNS_INSIDE}/{order.run}": run},
            folder=f"{INSIDE}/{order.code}",
            environment=environment,
            devices=host.devices,
            limits=host.limits,
        )


def _launch_problem(error: OSError, what: str) -> StokerError:
    """Why `launch/` cannot be written: this machine's disk, or what the job did there."""
    if is_owners(error):
        return PlaceFailed(f"launch/ of the run cannot be written here: {error.strerror}")
    return BadRun(f"{what}: {error.strerror}")


def value_of(arguments: Sequence[str], option: str) -> str | None:
    """The value of an option among the arguments of `stoker train`, the last one; None: it is not there."""
    return next((value for word, value in reversed([*itertools.pairwise(arguments)]) if word == option), None)


def pairs_of(arguments: Sequence[str]) -> list[tuple[str, str]]:
    """The settings among the arguments of `stoker train`, such as `("--set", "lr=0.1")`."""
    return [(option, value) for option, value in itertools.pairwise(arguments) if option == "--set"]


def read_order(content: bytes) -> PoolOrder:
    """An order from its blob.

    Raises:
        BadJob: it is none, or leads out of its box.
    """
    try:
        return loads(content, PoolOrder)
    except ValueError as problem:
        raise BadJob(f"the order cannot be read: {problem}") from problem
