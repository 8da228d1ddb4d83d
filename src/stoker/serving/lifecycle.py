"""A server: one process, one event loop; models behind doors of HTTP, gRPC and administration.

Doors open first (alive, not ready), then models load. A shutdown goes the other way round: no longer ready, the public
doors close and answer what came in, then the admin door, then the models.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import time
from collections.abc import Mapping
from pathlib import Path

from stoker.devices import attached_cpu
from stoker.errors import BadArtifact, BadJob, ServiceError
from stoker.serving.access.keys import KeyFile
from stoker.serving.access.tls import read_tls
from stoker.serving.edge import Edge, Limits
from stoker.serving.in_flight import InFlight
from stoker.serving.listening import GrpcDoor, HttpDoor, bind_all
from stoker.serving.models import Models
from stoker.serving.observing.access_log import AccessLog
from stoker.serving.observing.metrics import Metrics
from stoker.serving.options import BODIES_AT_ONCE, ServedModel, ServerOptions, Started
from stoker.serving.repository.repository import Repository, Shelf
from stoker.serving.repository.settings import parse_overrides
from stoker.units import format_bytes

_log = logging.getLogger(__name__)

LEAST_CLOSING_S = 1.0
"""What the admin door and the models get of time to close each, however little is left of the grace."""


class Server:
    """A service and its doors, in the running event loop.

    Raises:
        BadJob: an option cannot be followed.
    """

    def __init__(self, options: ServerOptions) -> None:
        _check(options)
        self._options = options
        self._tls = read_tls(options.tls_certificate, options.tls_key)
        self._keys = None if options.api_keys is None else KeyFile(options.api_keys)
        self._admin_keys = None if options.admin_keys is None else KeyFile(options.admin_keys)
        self.metrics = Metrics()
        cpu = attached_cpu()
        shelf = Shelf(
            places=options.places,
            settings=options.settings,
            overrides=parse_overrides(options.overrides),
            cores=options.cores or cpu.cores,
            memory_bytes=cpu.memory_bytes,
        )
        self.repository = Repository(shelf, self.metrics)
        self.models = Models(self.repository, self.metrics)
        self._log = log = _access_log(options.access_log)
        if log is not None:
            self.metrics.read(
                "access_log_dropped", "Lines of the access log not written.", lambda: log.dropped, is_total=True
            )
        self._http: HttpDoor | None = None
        self._grpc: GrpcDoor | None = None
        self._admin: HttpDoor | None = None
        self._admin_grpc: GrpcDoor | None = None
        self._watching: asyncio.Task[None] | None = None

    async def start(self) -> Started:
        """Open the doors, load the models; what is up then.

        Raises:
            ServiceError: a port is taken, or no model could be served (with `is_strict`: not every one).
            BadArtifact: there is no model at all.
        """
        try:
            await self._open_doors()
            problems = await self.repository.open()
            self._judge(problems)
        except BaseException:
            await self.stop(0.0)
            raise
        self.models.is_open = True
        if self._options.watch_s is not None:
            self._watching = asyncio.get_running_loop().create_task(self.repository.watch(self._options.watch_s))
            self._watching.add_done_callback(_watch_ended)
            self.metrics.read(
                "repository_look_age_seconds", "Since the models' directories were last looked at.",
                lambda: time.monotonic() - self.repository.looked_at_s,
            )  # fmt: skip
        return self._started(problems)

    async def stop(self, grace_s: float) -> int:
        """Answer what was accepted and give everything back; how many HTTP requests `grace_s` was too short for."""
        self.models.is_stopping = True
        ends_s = time.monotonic() + grace_s
        if self._watching is not None:
            self._watching.cancel()
        unanswered, _ = await asyncio.gather(
            _nothing() if self._http is None else self._http.close(_left(ends_s)),
            _nothing() if self._grpc is None else self._grpc.close(_left(ends_s)),
        )
        for door in (self._admin, self._admin_grpc):
            if door is not None:
                await door.close(LEAST_CLOSING_S)
        await self.repository.close(max(LEAST_CLOSING_S, _left(ends_s)))
        if self._log is not None:
            self._log.close()
        return unanswered

    async def reload(self) -> None:
        """Reopen the access log, read keys and certificate again, look at the directories: what SIGHUP asks for.

        Each part is done whatever becomes of the others.

        Raises:
            BadJob: files cannot be used; what was read of them before still holds.
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

    async def _open_doors(self) -> None:
        """Bind every port before the first door opens, so that one that is taken stops everything at once."""
        options = self._options
        public, private = self._edge(self._keys), self._edge(self._admin_keys, is_admin=True)
        if options.grpc_port is not None:
            self._grpc = GrpcDoor(options.host, options.grpc_port, public, self._tls)
        if options.admin_grpc_port is not None:
            self._admin_grpc = GrpcDoor(options.admin_host, options.admin_grpc_port, private, self._tls)
        http, admin = bind_all(
            (options.host, options.http_port, "http"), (options.admin_host, options.admin_port, "admin")
        )
        if http is not None:
            self._http = HttpDoor(http, public, self._tls)
        if admin is not None:
            self._admin = HttpDoor(admin, private, self._tls)
        for door in self._doors():
            await door.opened()

    def _doors(self) -> tuple[HttpDoor | GrpcDoor, ...]:
        return tuple(door for door in (self._http, self._grpc, self._admin, self._admin_grpc) if door is not None)

    def _edge(self, keys: KeyFile | None, *, is_admin: bool = False) -> Edge:
        options = self._options
        return Edge(
            service=self.models,
            authorize=None if keys is None else keys.authorize,
            log=self._log,
            metrics=self.metrics.document if is_admin else None,
            limits=Limits(body_bytes=options.max_body_bytes),
            in_flight=InFlight(
                options.max_body_bytes
                if is_admin
                else options.max_bodies_bytes or BODIES_AT_ONCE * options.max_body_bytes
            ),
            is_admin=is_admin,
        )

    def _judge(self, problems: Mapping[str, tuple[str, ...]]) -> None:
        """Go on, or not, with the models that could be served.

        Raises:
            BadArtifact: there is none at all.
            ServiceError: none of them serves; with `is_strict`: not every one does.
        """
        places = ", ".join(map(str, self._options.places))
        if not self.repository.models:
            raise BadArtifact(
                f"there is no exported model in {places}",
                remedy="A model is a directory such as models/digits/1 with a manifest.json: `stoker export RUN -o "
                "models/digits` makes one.",
            )
        if problems and (self._options.is_strict or not any(model.served for model in self.repository.models.values())):
            reasons = "; ".join(f"{name}: {' '.join(said)}" for name, said in problems.items())
            raise ServiceError(
                f"{len(problems)} of {len(self.repository.models)} models cannot be served: {reasons}",
                remedy="Export them again, or serve the others without --strict." if self._options.is_strict else None,
            )

    def _started(self, problems: Mapping[str, tuple[str, ...]]) -> Started:
        return Started(
            http=None if self._http is None else self._http.address,
            grpc=None if self._grpc is None else self._grpc.address,
            admin=None if self._admin is None else self._admin.address,
            admin_grpc=None if self._admin_grpc is None else self._admin_grpc.address,
            models=tuple(
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
            ),
            problems=problems,
            has_keys=self._keys is not None,
            has_tls=self._tls is not None,
        )


def _check(options: ServerOptions) -> None:
    """Refuse what goes against itself, or opens more than was meant.

    Raises:
        BadJob: see above.
    """
    if options.http_port is None and options.grpc_port is None:
        raise BadJob("a server needs a door: give --http-port, --grpc-port or both")
    has_admin = options.admin_port is not None or options.admin_grpc_port is not None
    if has_admin and options.admin_keys is None and not _is_loopback(options.admin_host):
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


def _is_loopback(host: str) -> bool:
    """Whether an address can be reached from this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _access_log(where: str | None) -> AccessLog | None:
    if where is None:
        return None
    return AccessLog(None if where == "-" else Path(where))


def _watch_ended(task: asyncio.Task[None]) -> None:
    """The watch goes on until it is cancelled; should it end otherwise, say so."""
    if not task.cancelled() and task.exception() is not None:
        _log.critical(
            "the watch of the models' directories has ended; new versions are served after a restart, or when asked",
            exc_info=task.exception(),
        )


async def _nothing() -> int:
    """Close a door that is not there."""
    return 0


def _left(ends_s: float) -> float:
    return max(0.0, ends_s - time.monotonic())
