"""The seam between a run and the places that can execute it.

A kind of place is one file of this package with `LAUNCHER = SomeLauncher()`. It is found by listing the folder, and
tested by `stoker.testing.LauncherConformance`. Everything that all kinds share stands outside of it: what travels
(`bundle.py`, `environment_lock.py`), the stream of events and the way home (`follow.py`), money (`meter.py`).

What runs at the place is always the same command,

    STOKER_LAUNCHED=KIND python -m stoker train JOB --run-dir DIR --json …

so that a run there is a run as here: same records, same log, same exit codes (0 finished, 75 slice over, 130 stopped
after a save, others failed). A launcher restarts it after 75, 130 by preemption, and a lost host; never for another
exit code, and never because a question had no answer.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stoker.records.launch import LaunchState

Handle = dict[str, Any]
"""What finds a started run again, as JSON: a job id, a host and a directory; never a secret."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """What a word of `--on` means.

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
    """What was found at a place before anything was queued.

    `missing` are sentences: what the run needs and the place lacks, with the remedy; empty if it can start. `facts` are
    shown: Python, driver, devices and their memory, free disk, ports, whether all nodes see the run's directory, the
    clock's difference.
    """

    facts: dict[str, str]
    missing: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Offer:
    """A way to run the job at a place.

    Attributes:
        text: word of `--on` that takes this offer.
        starts_in_s: estimated wait until the start [s]; None: unknown.
        price_per_h: of all devices together; 0 where nothing is charged; None: unknown.
        price_source: who says so, and when.
        preempted_per_h: expected preemptions an hour; 0 where there are none.
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
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What an offer is asked for.

    Attributes:
        target: where, and in which shape.
        time_limit_s: longest time of the run [s], from the upper bound of its forecast and a save; None: unknown.
        disk_bytes: of code, data, environment and checkpoints.
    """

    target: Target
    time_limit_s: float | None = None
    disk_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Submission:
    """All that a launcher needs to start a run; it decides nothing about the run itself.

    Attributes:
        run: the run's name, and the name of the job at the platform.
        target: where.
        code: folder here with the files to send, relative paths as the job expects them.
        code_digest: SHA-256 of their contents; names the folder at the place, so that nothing is sent twice.
        job_file: the job file, relative to `code`.
        arguments: of `stoker train` after the job file, without `--run-dir`, `--json` and `--on`.
        environment: how Python is had there (see `environment_lock.py`).
        image: container image; "" for none.
        variables: environment variables to set there; names and values.
        secrets: names of environment variables whose values are read here at the start and sent apart from everything
            that is stored.
        data: digests of data sets and where they are here.
        time_limit_s: the job may take this long [s]; None: the place's default.
    """

    run: str
    target: Target
    code: Path
    code_digest: str
    job_file: str
    arguments: tuple[str, ...] = ()
    environment: dict[str, Any] = field(default_factory=dict)
    image: str = ""
    variables: dict[str, str] = field(default_factory=dict)
    secrets: tuple[str, ...] = ()
    data: dict[str, Path] = field(default_factory=dict)
    time_limit_s: float | None = None


class Launcher(abc.ABC):
    """A kind of place. Every method may be called from a new process: all state is in the handle and at the place.

    Methods raise `PlaceFailed` with one sentence and a remedy where the place refuses, and `PlaceUnreachable` where it
    does not answer: the caller then knows nothing, and does nothing.
    """

    kind: str
    """The word before the colon of `--on`."""
    syntax: str
    """Form of the words, for messages: `ssh:user@host[,host…][/4xa100]`."""

    @abc.abstractmethod
    def parse(self, text: str) -> Target:
        """The target of a word of `--on`, without its kind and colon.

        Raises:
            NoDevice: the word cannot be read; the remedy shows the syntax.
        """

    @abc.abstractmethod
    def probe(self, target: Target) -> Probe:
        """What is there, and what is missing; changes nothing at the place."""

    @abc.abstractmethod
    def offers(self, request: Request) -> tuple[Offer, ...]:
        """Ways to run a job there; none if no shape fits."""

    @abc.abstractmethod
    def script(self, submission: Submission) -> str:
        """What `start` would submit, as people read and keep it: a batch script, a manifest, commands."""

    @abc.abstractmethod
    def start(self, submission: Submission) -> Handle:
        """Send what is missing there and start the run; a submission that fails leaves nothing behind."""

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
