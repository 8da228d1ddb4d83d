"""The seam between a run and the places that can execute it.

A kind of place is one file of this package with `LAUNCHER = SomeLauncher()`. It is found by listing the folder, and
tested by `stoker.testing.LauncherConformance`. Everything that all kinds share stands outside of it: what travels
(`bundle.py`, `environment_lock.py`), the stream of events and the way home (`follow.py`), money (`meter.py`).

What runs at the place is always the same program, once on each host,

    python -m stoker.launching.at_place run DIR

which starts this host's ranks, each `STOKER_LAUNCHED=KIND python -m stoker train JOB --run-dir DIR --json …`: a run
there is a run as here, with the same records, log and exit codes (0 finished, 75 slice over, 130 stopped after a save,
others failed). It is restarted after 75, 130 by preemption, and a lost host; never for another exit code, and never
because a question had no answer.
"""

from __future__ import annotations

import abc
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Literal

from stoker.errors import BadSetting, NoDevice, PlaceFailed, nearest
from stoker.records.launch import LaunchPhase, LaunchState

if TYPE_CHECKING:
    from stoker.jobs import Entry, Job
    from stoker.launching.bundle import Bundle
    from stoker.launching.environment_lock import EnvironmentLock

Handle = dict[str, Any]
"""Identification of a started run, as JSON: a job id, a host and a directory; never a secret."""


@dataclass(frozen=True, kw_only=True)
class LaunchTarget:
    """The target that a word of `--on` names.

    Attributes:
        text: the word, such as `slurm:gpu/2x4xa100`.
        kind: the word's part before the first colon.
        address: how the place is reached: `user@host,host2`, `login@host:partition`, `context/namespace`, …
        num_nodes, devices_each: shape of the job; one process a device.
        device: model by a name of the catalogue, or `cpu`; "" if the word leaves it open.
        options: further settings of the word, such as `spot`.
    """

    text: str
    kind: str
    address: str
    num_nodes: int = 1
    devices_each: int = 1
    device: str = ""
    options: frozenset[str] = frozenset()

    @property
    def num_devices(self) -> int:
        """Devices of the whole job."""
        return self.num_nodes * self.devices_each


@dataclass(frozen=True, kw_only=True)
class Probe:
    """The resources of a place before anything was queued.

    `missing` are sentences: what the run needs and the place lacks, with the remedy; empty if it can start. `facts` are
    shown: Python, driver, devices and their memory, free disk, ports, whether all nodes see the run's directory, the
    clock's difference.

    `device` is the model of each device as the place names it, "" if that is unknown; `cores` those of a host's CPU, 0
    if unknown: what a forecast is made for.

    `place` is kind and address where the word leaves them open, as `slurm:gpu` for `slurm:`; "" where it does not.

    `loop_s` is `start_up.loop_s` of a host [s]; 0 if unknown.
    """

    facts: dict[str, str]
    missing: tuple[str, ...] = ()
    device: str = ""
    cores: int = 0
    place: str = ""
    loop_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Offer:
    """A way to run the job at a place.

    Attributes:
        text: word of `--on` that takes this offer.
        starts_in_s: estimated wait until the start [s]; None: unknown.
        price_per_h: of all devices together; 0 where nothing is charged; None: unknown.
        price_source: who says so, and when.
        preempted_per_h: expected preemptions an hour; 0 where there are none.
        is_rented: a machine is taken for the run: `starts_in_s` is a judgement, for which earlier runs count more, is
            charged, and follows each preemption.
        why: what the estimates rest on.
    """

    text: str
    num_nodes: int
    devices_each: int
    device: str
    starts_in_s: float | None = None
    price_per_h: float | None = None
    currency: str = "USD"
    price_source: str = ""
    preempted_per_h: float = 0.0
    is_rented: bool = False
    why: str = ""

    @classmethod
    def of(cls, target: LaunchTarget, **more: Any) -> Offer:
        """A way to run the job in just the shape of the target; `more` are further fields of it."""
        return cls(
            text=target.text,
            num_nodes=target.num_nodes,
            devices_each=target.devices_each,
            device=target.device,
            **more,
        )


@dataclass(frozen=True, kw_only=True)
class Request:
    """A request for offers.

    Attributes:
        target: where, and in which shape.
        time_limit_s: longest time of the run [s], from the upper bound of its forecast and a save; None: unknown.
        options: of `--place-option`.
    """

    target: LaunchTarget
    time_limit_s: float | None = None
    options: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Submission:
    """All that a launcher needs to start a run; it decides nothing about the run itself.

    Attributes:
        run: the run's name, and the name of the job at the platform.
        target: where.
        code: the job file, what it imports, and links to its data, as a folder; its digest names it at the place, so
            that nothing is sent twice. Commands run in that folder.
        stoker: this Stoker, a folder for PYTHONPATH, so that both ends write the same records.
        data: files and folders that `code` links to, each by its digest.
        expected: absolute paths of data that the place has to have, since they are outside of the job's folder.
        job_file: the job file, relative to `code`.
        arguments: of `stoker train` after the job file, without `--run-dir`, `--json` and `--on`.
        environment: the lock to install there; or the Python there to use, a path or a name (`python3`).
        image: container image; "" for none.
        variables: environment variables to set there; names and values.
        secrets: names of environment variables whose values are read here at the start (`secret_values`) and sent
            separately from everything that is stored.
        time_limit_s: one start of the job may take this long [s], from the upper bound of the forecast and a save;
            None: the place's default.
        most_held_s: the run may hold devices this long [s], over all its starts; None: no limit.
        save_s: forecast time of a save [s]: the notice that a run needs before it is ended.
        owner: machine and directory of the run here, which distinguishes it from another's run of the same name.
        send_limit: no more than this is sent [bytes].
        max_cost: no more than this is spent, where the place itself keeps to it [USD]; None: no limit.
        options: of `--place-option`. All launchers know `root`: folder of code, environments and runs at the place
            (default: `.stoker` in the home directory there).
        earlier: handle of the run's last start, which this one continues; empty: there is none.
    """

    run: str
    target: LaunchTarget
    code: Bundle
    stoker: Bundle
    data: tuple[Bundle, ...] = ()
    expected: tuple[str, ...] = ()
    job_file: str
    arguments: tuple[str, ...] = ()
    environment: EnvironmentLock | str = "python3"
    image: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)
    secrets: tuple[str, ...] = ()
    time_limit_s: float | None = None
    most_held_s: float | None = None
    save_s: float = 30.0
    owner: str = ""
    send_limit: float = 10 * 2.0**30
    max_cost: float | None = None
    options: Mapping[str, str] = field(default_factory=dict)
    earlier: Mapping[str, Any] = field(default_factory=dict)

    @property
    def bundles(self) -> tuple[Bundle, ...]:
        """All folders that are sent."""
        return (*self.data, self.stoker, self.code)

    @property
    def root(self) -> str:
        """Folder for everything of Stoker at the place; relative to the home directory there, unless absolute."""
        return self.options.get("root", ROOT)


ROOT = ".stoker"

LEFT_THERE = ("lock", "lock.held", "lock.taking", "started.json", "launch.json")
"""Files of a run's directory that stay at the place: its locks, and what says where the run was started there."""

ASK_AGAIN = "The same command asks again; nothing is ended because of it."


def notice_s(save_s: float, limit_s: float | None = None) -> float:
    """Time before a limit at which a run is asked to save and leave [s]: twice a save and half a minute.

    At least a minute, but at most half of the limit: else nothing would be trained.

    >>> notice_s(10.0), notice_s(100.0), notice_s(10.0, 90.0)
    (60.0, 230.0, 45.0)
    """
    notice = max(60.0, 2 * save_s + 30)
    return notice if limit_s is None else min(notice, limit_s / 2)


SHAPE = re.compile(r"(?:(\d+)[x×])?(?:(\d+)[x×])?([A-Za-z][A-Za-z0-9._-]*)")
"""A shape of a job: `a100`, `4xa100`, `2x4xa100`."""


def is_model(name: str, device: str) -> bool:
    """Whether a place's name of a GPU means a device; a memory that only one of them states does not matter.

    >>> is_model("nvidia_a100_80gb_pcie", "a100"), is_model("A100-SXM4-40GB", "a100-40g"), is_model("a100", "a10")
    (True, True, False)
    >>> is_model("NVIDIA A10G", "a10"), is_model("NVIDIA A10", "a10g"), is_model("NVIDIA A10G", "a10g")
    (False, False, True)
    """
    has, pieces = _pieces(name), _pieces(device)
    return bool(pieces) and (pieces <= has or (has <= pieces and any(piece.isdigit() for piece in has)))


def _pieces(name: str) -> set[str]:
    """Words and numbers of a GPU's name, without its vendor's: `A100-SXM4-40GB` has a, 100, sxm, 4, 40.

    Letters after a number belong to it: `A10G` has a, 10g.
    """
    plain = re.sub(r"nvidia|geforce|tesla|instinct|amd", "", name.lower())
    plain = re.sub(r"(?<![a-z0-9])(\d+)gb?(?![a-z0-9])", r"\1", plain)  # memory
    return set(re.findall(r"[a-z]+|\d+[a-z]*", re.sub(r"(?<=\d)(ti|super)(?![a-z])", r" \1", plain)))


def require_known(what: str, options: Iterable[str], known: Sequence[str]) -> None:
    """Refuse names of `--place-option` that a place, or a service, does not know; an option that is ignored misleads.

    Raises:
        BadSetting: one is unknown; the nearest is named.
    """
    for name in options:
        if name not in known:
            raise BadSetting(f"{what} has no option {name!r}", remedy=nearest(name, known))


def require_lasting_keep(submission: Submission, lasting: str = "") -> None:
    """Refuse a `--keep` that is a folder of a machine which takes its disk with it: the run would be lost with it.

    Args:
        submission: of the run.
        lasting: a folder there that stays; "": there is none.

    Raises:
        PlaceFailed: it is such a folder.
    """
    if "--keep" not in submission.arguments[:-1]:
        return
    url = submission.arguments[submission.arguments.index("--keep") + 1]
    scheme, separator, path = url.partition("://")
    if separator and scheme not in {"file", "local"}:
        return
    if lasting and PurePosixPath(path or url).is_relative_to(lasting):
        return
    folder = f"; or a folder below {lasting}" if lasting else ""
    raise PlaceFailed(
        f"--keep {url} would be a folder of the machine at {submission.target.text}, which takes its disk with it.",
        remedy=f"Give the URL of a bucket, such as s3://bucket/runs{folder}.",
    )


def train_command(submission: Submission, *more: str) -> str:
    """The command that runs there, for a comment of a script: a setting of several lines stays in it."""
    command = ["stoker", "train", submission.job_file, *submission.arguments, *more]
    return shlex.join(command).replace("\n", "\n#     ")


def utc_now(timespec: Literal["seconds", "milliseconds"] = "seconds") -> str:
    """This moment, ISO 8601 in UTC."""
    return datetime.now(UTC).isoformat(timespec=timespec)


def seen_now(phase: LaunchPhase, why: str, evidence: str = "", **more: Any) -> LaunchState:
    """A state that was seen at this moment; `more` are further fields of it."""
    return LaunchState(phase=phase, why=why, evidence=evidence, at=utc_now(), **more)


@dataclass(frozen=True, kw_only=True)
class HostRanks:
    """Which ranks this host starts: as many on each host, numbered host after host.

    Attributes:
        host: number of this host, from 0.
        num_hosts: hosts of the run.
        master: name or address of host 0, by which the others reach it; unused with one host.
        port: free port of host 0 in which ranks meet; 0 with one host.
        attempt: distinguishes restarts of all ranks by the scheduler.
        addresses: of the hosts, in their order, which then try to reach each other before ranks start; () elsewhere.
    """

    host: int = 0
    num_hosts: int = 1
    master: str = ""
    port: int = 0
    attempt: str = "0"
    addresses: tuple[str, ...] = ()


class Launcher(abc.ABC):
    """A kind of place. Every method may be called from a new process: all state is in the handle and at the place.

    Methods raise `PlaceFailed` with one sentence and a remedy where the place refuses, and `PlaceUnreachable` where it
    does not answer: the caller then knows nothing, and does nothing.
    """

    kind: str
    """The word before the colon of `--on`."""
    syntax: str
    """Form of the words, for messages: `ssh:user@host[,host…][/4xa100]`."""
    options: Sequence[str] = ("root", "data")
    """Names of `--place-option` that it knows, but for `price`, which is the meter's."""
    runs_images: bool = False
    """Whether it runs container images."""
    limits_time: bool = False
    """Whether the place wants to know how long a job may take: then a forecast is made before it is submitted."""
    is_one_place: bool = False
    """Whether a run may go on at any target of this kind: what it has saved is on none of the machines alone."""

    @abc.abstractmethod
    def parse(self, text: str) -> LaunchTarget:
        """The target of a word of `--on`, without its kind and colon.

        Raises:
            NoDevice: the word cannot be read; the remedy shows the syntax.
        """

    def unreadable(self, text: str, example: str = "", *, why: str = " cannot be read") -> NoDevice:
        """The error for a word, of which `text` follows the kind and colon; `example` is a word as it should be."""
        form = f"The form is {self.syntax}{f', as in {example}' if example else ''}."
        return NoDevice(f"--on {self.kind}:{text}{why}.", remedy=form)

    def shape_in(self, text: str, shape: str, *, one_node: str = "") -> tuple[int, int, str]:
        """Nodes, devices on each, and the device in small letters ("" for `here`) of a shape such as `2x4xa100`.

        Args:
            text: the word that it is a part of, without its kind and colon.
            shape: the part.
            one_node: what to do instead of asking for several nodes; "" where there are several.

        Raises:
            NoDevice: it is no shape, asks for nothing, or for several nodes where there is one.
        """
        match = SHAPE.fullmatch(shape)
        if match is None:
            raise self.unreadable(text, why=f" cannot be read: {shape!r} is no shape")
        first, second, device = match[1], match[2], match[3].lower()
        nodes, each = (int(first), int(second)) if second else (1, int(first or 1))
        if 0 in {nodes, each}:
            raise self.unreadable(text, why=" asks for no device")
        if nodes > 1 and one_node:
            raise NoDevice(f"--on {self.kind}:{text} asks for {nodes} nodes.", remedy=one_node)
        return nodes, each, "" if device == "here" else device

    def target(
        self, text: str, address: str, shape: tuple[int, int, str], options: frozenset[str] = frozenset()
    ) -> LaunchTarget:
        """The target of a word, of which `text` follows the kind and colon; `shape` is as of `shape_in`."""
        nodes, each, device = shape
        return LaunchTarget(
            text=f"{self.kind}:{text}",
            kind=self.kind,
            address=address,
            num_nodes=nodes,
            devices_each=each,
            device=device,
            options=options,
        )

    @abc.abstractmethod
    def probe(self, target: LaunchTarget, options: Mapping[str, str]) -> Probe:
        """The resources of the place, and what is missing; changes nothing there."""

    @abc.abstractmethod
    def offers(self, request: Request) -> tuple[Offer, ...]:
        """Ways to run a job there; none if no shape fits."""

    def with_forecasts(self, job: Job, entry: Entry, submission: Submission, tell: Callable[[str], None]) -> Submission:
        """The submission with what the place has to know of the job to choose among its machines; here, as it is."""
        return submission

    @abc.abstractmethod
    def script(self, submission: Submission) -> str:
        """The submission of `start` in readable form: a batch script, a manifest, commands."""

    @abc.abstractmethod
    def start(self, submission: Submission, tell: Callable[[str], None]) -> Handle:
        """Send what is missing there and start the run; a submission that fails leaves nothing behind.

        `tell` receives a line of text about each step that takes time.

        A run of that name and owner that is going there already is not started twice: its handle is returned.
        """

    def ranks(self, environ: Mapping[str, str]) -> HostRanks:
        """At the place: which ranks this host starts, from the scheduler's variables; all of them where it is alone.

        Called by `at_place` alone, which our own script started: nothing is guessed from variables elsewhere. Imports
        neither torch nor the launcher's client library. Here from the variables of launchers that start the hosts
        themselves.
        """
        return HostRanks(
            host=int(environ.get("STOKER_HOST", "0")),
            num_hosts=int(environ.get("STOKER_HOSTS", "1")),
            master=environ.get("STOKER_MASTER", ""),
            port=int(environ.get("STOKER_PORT", "0")),
        )

    @abc.abstractmethod
    def state(self, handle: Handle) -> LaunchState:
        """The state, by evidence of the place or of the run's own log; `unknown` if there is none now."""

    @abc.abstractmethod
    def events(self, handle: Handle, offset: int) -> bytes:
        """Bytes of the run's `events.jsonl` from `offset` on; b"" if there are none yet."""

    @abc.abstractmethod
    def stop(self, handle: Handle) -> None:
        """Ask the run to save and leave; after that nothing of it is queued or restarted."""

    @abc.abstractmethod
    def fetch(self, handle: Handle, into: Path) -> None:
        """Copy the run's directory into `into`; files that are there and equal are not copied again."""
