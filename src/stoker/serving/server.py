"""A server: one process, one event loop, models behind listeners for HTTP, gRPC and administration.

Listeners open first (alive, not ready), then models load. A shutdown goes the other way: the server is no longer ready,
the public listeners close and answer what they accepted, then the admin listeners, then the models.
`run` serves until a signal.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import prometheus_client
import uvloop

from stoker.devices import attached_cpu
from stoker.errors import BadArtifact, BadJob, ServiceError, StokerError
from stoker.records import EngineName, ServiceSettings, ServingPrecision, TensorSpec
from stoker.serving.access_log import AccessLog
from stoker.serving.listeners import GrpcListener, HttpListener, bind_all, read_tls
from stoker.serving.metrics import Metrics
from stoker.serving.repository.model_settings import parse_overrides
from stoker.serving.repository.repository import Repository, RepositoryOptions, RepositoryService
from stoker.serving.security import KeyFile
from stoker.serving.service import InFlight, RequestLimits, ServerContext
from stoker.units import MIB, format_bytes

_log = logging.getLogger(__name__)

LEAST_CLOSING_S = 1.0
"""Least time for the admin listeners, and for the models, to close, even if the grace is over [s]."""


class Server:
    """A service and its listeners, in the running event loop.

    Raises:
        BadJob: an option is invalid.
    """

    def __init__(self, options: ServerOptions) -> None:
        _check(options)
        self._options = options
        self._tls = read_tls(options.tls_certificate, options.tls_key)
        self._keys = None if options.api_keys is None else KeyFile(options.api_keys)
        self._admin_keys = None if options.admin_keys is None else KeyFile(options.admin_keys)
        self.metrics = Metrics()
        cpu = attached_cpu()
        shelf = RepositoryOptions(
            places=options.places,
            settings=options.settings,
            overrides=parse_overrides(options.overrides),
            cores=options.cores or cpu.cores,
            memory_bytes=cpu.memory_bytes,
        )
        self.repository = Repository(shelf, self.metrics)
        self.models = RepositoryService(self.repository, self.metrics)
        self._log: AccessLog | None = None
        if options.access_log is not None:
            self._log = log = AccessLog(None if options.access_log == "-" else Path(options.access_log))
            self.metrics.read(
                "access_log_dropped", "Lines of the access log not written.", lambda: log.dropped, is_total=True
            )
        self._public: dict[str, HttpListener | GrpcListener] = {}
        self._private: dict[str, HttpListener | GrpcListener] = {}
        self._watching: asyncio.Task[None] | None = None

    async def start(self) -> ServerStarted:
        """Open the listeners and load the models.

        Raises:
            ServiceError: a port is taken, or no model can be served (with `is_strict`: not every model).
            BadArtifact: there is no model.
        """
        try:
            await self._open_listeners()
            problems = await self.repository.open()
            self._judge(problems)
        except BaseException:
            await self.stop(0.0)
            raise
        self.models.is_open = True
        if self._options.watch_s is not None:
            self._watching = asyncio.get_running_loop().create_task(self.repository.watch(self._options.watch_s))
            self._watching.add_done_callback(_log_end_of_watch)
            self.metrics.read(
                "repository_look_age_seconds",
                "Since the models' directories were last looked at.",
                lambda: time.monotonic() - self.repository.looked_at_s,
            )
        models = tuple(
            ServedModel(
                name=name,
                version=served.version,
                engine=served.manifest.engine,
                precision=served.manifest.precision,
                inputs=served.manifest.inputs,
                outputs=served.manifest.outputs,
                settings=served.settings,
                load_s=served.load_s,
            )
            for name, model in self.repository.models.items()
            for _, served in sorted(model.served.items())
        )
        public, private = (
            {kind: listener.address for kind, listener in listeners.items()}
            for listeners in (self._public, self._private)
        )
        return ServerStarted(
            http=public.get("http"),
            grpc=public.get("grpc"),
            admin=private.get("http"),
            admin_grpc=private.get("grpc"),
            models=models,
            problems=problems,
            has_keys=self._keys is not None,
            has_tls=self._tls is not None,
        )

    async def stop(self, grace_s: float) -> int:
        """Answer what was accepted and release everything; number of HTTP requests [requests] left after `grace_s`."""
        self.models.is_stopping = True
        ends_s = time.monotonic() + grace_s
        if self._watching is not None:
            self._watching.cancel()
        closing = (listener.close(_seconds_left(ends_s)) for listener in self._public.values())
        unanswered = await asyncio.gather(*closing)
        for listener in self._private.values():
            await listener.close(LEAST_CLOSING_S)
        await self.repository.close(max(LEAST_CLOSING_S, _seconds_left(ends_s)))
        if self._log is not None:
            self._log.close()
        return sum(count for count in unanswered if count is not None)

    async def reload(self) -> None:
        """Reopen the access log, reread keys and certificate, scan the directories; SIGHUP calls this.

        A failing part does not stop the others.

        Raises:
            BadJob: files cannot be used; their earlier content still applies.
        """
        if self._log is not None:
            self._log.reopen()
        problems = []
        for files in (self._keys, self._admin_keys, self._tls):
            if files is not None:
                try:
                    files.read()
                except BadJob as error:
                    problems.append(error.message)
        await self.repository.look_around()
        if problems:
            raise BadJob("; ".join(problems))

    async def _open_listeners(self) -> None:
        """Bind every port before the first listener opens, so that a taken port stops the start at once."""
        options = self._options
        public, private = self._context(self._keys), self._context(self._admin_keys, is_admin=True)
        if options.grpc_port is not None:
            self._public["grpc"] = GrpcListener(options.host, options.grpc_port, public, self._tls)
        if options.admin_grpc_port is not None:
            self._private["grpc"] = GrpcListener(options.admin_host, options.admin_grpc_port, private, self._tls)
        http, admin = bind_all(
            (options.host, options.http_port, "http"), (options.admin_host, options.admin_port, "admin")
        )
        if http is not None:
            self._public["http"] = HttpListener(http, public, self._tls)
        if admin is not None:
            self._private["http"] = HttpListener(admin, private, self._tls)
        for listener in (*self._public.values(), *self._private.values()):
            await listener.opened()

    def _context(self, keys: KeyFile | None, *, is_admin: bool = False) -> ServerContext:
        options = self._options
        most_bytes = options.max_body_bytes
        if not is_admin:
            most_bytes = options.max_bodies_bytes or BODIES_AT_ONCE * options.max_body_bytes
        return ServerContext(
            service=self.models,
            authorize=None if keys is None else keys.authorize,
            log=self._log,
            metrics=self.metrics.document if is_admin else None,
            limits=RequestLimits(body_bytes=options.max_body_bytes),
            in_flight=InFlight(most_bytes),
            is_admin=is_admin,
        )

    def _judge(self, problems: Mapping[str, tuple[str, ...]]) -> None:
        """Refuse to start with too few models.

        Raises:
            BadArtifact: there is no model.
            ServiceError: no model serves; with `is_strict`: not every model serves.
        """
        places = ", ".join(map(str, self._options.places))
        if not self.repository.models:
            raise BadArtifact(
                f"there is no exported model in {places}",
                remedy="A model is a directory such as models/digits/1 with a manifest.json: `stoker export RUN -o "
                "models/digits` makes one.",
            )
        if problems and (self._options.is_strict or not any(model.served for model in self.repository.models.values())):
            reasons = "; ".join(f"{name}: {' '.join(why)}" for name, why in problems.items())
            remedies = [remedy for model in self.repository.models.values() for remedy in model.remedies]
            ways = [*dict.fromkeys(remedy.rstrip(".") for remedy in remedies)] or ["Export them again"]
            if self._options.is_strict:
                ways.append("or serve the others without --strict")
            raise ServiceError(
                f"{len(problems)} of {len(self.repository.models)} models cannot be served: {reasons}",
                remedy="; ".join(ways),
            )


def _check(options: ServerOptions) -> None:
    """Refuse options that contradict each other, or open more than intended."""
    if options.http_port is None and options.grpc_port is None:
        raise BadJob("a server needs a port: give --http-port, --grpc-port or both")
    has_admin = options.admin_port is not None or options.admin_grpc_port is not None
    try:
        is_loopback = ipaddress.ip_address(options.admin_host).is_loopback
    except ValueError:
        is_loopback = options.admin_host == "localhost"
    if has_admin and options.admin_keys is None and not is_loopback:
        raise BadJob(
            f"the admin port at {options.admin_host} would let everyone who reaches it unload models",
            remedy="Give --admin-keys FILE as well, or leave --admin-host at 127.0.0.1.",
        )
    for what, seconds in (("--watch", options.watch_s), ("--grace", options.grace_s)):
        if seconds is not None and not 0 <= seconds < float("inf"):
            raise BadJob(f"{what} {seconds}: wanted a number of seconds from 0")
    if options.max_bodies_bytes is not None and options.max_bodies_bytes < options.max_body_bytes:
        raise BadJob(
            f"--max-bodies {format_bytes(options.max_bodies_bytes)} has no room for a request of --max-body, "
            f"{format_bytes(options.max_body_bytes)}"
        )


def _log_end_of_watch(task: asyncio.Task[None]) -> None:
    """Log an end of the watch that is not a cancellation."""
    if not task.cancelled() and task.exception() is not None:
        _log.critical(
            "the watch of the models' directories has ended; new versions are served after a restart, or when asked",
            exc_info=task.exception(),
        )


def _seconds_left(ends_s: float) -> float:
    return max(0.0, ends_s - time.monotonic())


LOOPBACK = "127.0.0.1"
BODIES_AT_ONCE = 16
GRACE_S = 25.0
"""Time for answers at shutdown [s]; Kubernetes kills a container after 30 s, and closing takes the rest."""


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Options of a server. Port 0 is a free one that the system chooses, None means no such listener.

    `places` are models, or directories of models. `settings` of a model replace its `service.json`; `overrides` are
    such as `digits.max_batch_rows=16`. `watch_s` is the time between two scans of the directories; None: they are
    scanned on request. `grace_s` is how long a shutdown waits for answers. `access_log` is a file, `-` for standard
    error, None for none. `max_bodies_bytes` bounds the bodies of all requests in flight together; None:
    `BODIES_AT_ONCE` of the largest. With `is_strict` a model that cannot be served prevents the start.
    """

    places: tuple[Path, ...]
    settings: Mapping[str, ServiceSettings] = field(default_factory=dict)
    overrides: tuple[str, ...] = ()
    host: str = LOOPBACK
    http_port: int | None = 8000
    grpc_port: int | None = 8001
    admin_host: str = LOOPBACK
    admin_port: int | None = 8002
    admin_grpc_port: int | None = None
    api_keys: Path | None = None
    admin_keys: Path | None = None
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    max_body_bytes: int = 64 * MIB
    max_bodies_bytes: int | None = None
    watch_s: float | None = 1.0
    grace_s: float = GRACE_S
    access_log: str | None = None
    is_strict: bool = False
    cores: int | None = None


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """A version that serves."""

    name: str
    version: str
    engine: EngineName
    precision: ServingPrecision
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    settings: ServiceSettings
    load_s: float


@dataclass(frozen=True, kw_only=True)
class ServerStarted:
    """A running server: its addresses, its models, and why others are not served.

    Addresses are `http://127.0.0.1:8000`; gRPC's has no scheme. None: no such listener.
    """

    http: str | None
    grpc: str | None
    admin: str | None
    admin_grpc: str | None
    models: tuple[ServedModel, ...]
    problems: Mapping[str, tuple[str, ...]]
    has_keys: bool
    has_tls: bool


def run(options: ServerOptions, announce: Callable[[ServerStarted], None]) -> None:
    """Serve until SIGTERM or SIGINT, then finish what was accepted; a second signal ends the process at once.

    SIGHUP reopens the access log, rereads keys and certificate and scans the models' directories.

    Args:
        options: of the server.
        announce: called once the server is up.

    Raises:
        StokerError: it could not start; see `Server.start`.
        ServiceError: requests were left unanswered when the grace was over.
    """
    # Process-wide: the times when series began are not used.
    prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        unanswered = runner.run(_serve(options, announce))
    if unanswered:
        raise ServiceError(
            f"{unanswered} requests were still unanswered after {options.grace_s:g} s of grace",
            remedy="Give a longer --grace.",
        )


async def _serve(options: ServerOptions, announce: Callable[[ServerStarted], None]) -> int:
    stop, reload = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def stop_or_exit(number: int) -> None:
        if stop.is_set():  # by an earlier signal
            os._exit(128 + number)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):  # before anything else: a signal may come at any moment
        loop.add_signal_handler(number, stop_or_exit, number)
    loop.add_signal_handler(signal.SIGHUP, reload.set)
    server = Server(options)
    starting = loop.create_task(server.start())
    stopped = loop.create_task(stop.wait())
    await asyncio.wait({starting, stopped}, return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        starting.cancel()
        await asyncio.wait({starting})
        return 0
    announce(starting.result())
    reloading = loop.create_task(_reload(server, reload))
    await stopped
    reloading.cancel()
    return await server.stop(options.grace_s)


async def _reload(server: Server, asked: asyncio.Event) -> None:
    """Reload on each request; once for several requests during a reload or the start."""
    while True:
        await asked.wait()
        asked.clear()
        try:
            await server.reload()
        except StokerError as error:
            _log.warning("%s", error)
        except Exception:  # noqa: BLE001 - later signals must be handled too
            _log.exception("the reload failed")
