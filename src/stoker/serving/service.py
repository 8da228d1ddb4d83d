"""The interface between the protocols (HTTP, gRPC) and the models: `Service`, its records, and the limits on requests.

Requests and responses are named tuples, which are made in a third of the time of frozen dataclasses.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from types import MappingProxyType
from typing import Literal, NamedTuple, Protocol

from stoker.artifacts.dtypes import Arrays
from stoker.records import Manifest
from stoker.records.codec import JSON
from stoker.serving.refusals import OverCapacity, Refusal
from stoker.units import GIB, KIB, MIB, format_bytes

Parameter = str | int | float | bool
"""Value of a request's or a response's parameter."""


@dataclass(frozen=True, kw_only=True)
class RequestedOutput:
    """An output that a request names; `classification` > 0: that many largest values, as `value:index:label`."""

    name: str
    classification: int = 0


class InferenceRequest(NamedTuple):
    """A decoded inference request; not yet checked against the model's inputs.

    `version` is empty for the model's default one, `outputs` for all. `deadline_s` counts from the request's arrival
    (`parameters.timeout`, in microseconds on the wire); `priority` is 1 for the most urgent, 0 for the default.
    `caller` is the name of its API key. `num_bytes` is the size of its body.
    """

    model: str
    inputs: Arrays
    version: str = ""
    id: str = ""
    outputs: tuple[RequestedOutput, ...] = ()
    deadline_s: float | None = None
    priority: int = 0
    caller: str = ""
    num_bytes: int = 0
    parameters: Mapping[str, Parameter] = MappingProxyType({})


class InferenceResponse(NamedTuple):
    """Answer to a request: the outputs it named, in its order; `labels` are class names of this version, by output."""

    model: str
    version: str
    id: str
    outputs: Arrays
    labels: Mapping[str, Sequence[str]] = MappingProxyType({})


ModelState = Literal["READY", "UNAVAILABLE", "LOADING", "UNLOADING"]


@dataclass(frozen=True, kw_only=True)
class RepositoryEntry:
    """A version of a model in the repository's index; `reason` says why it is not ready."""

    name: str
    version: str
    state: ModelState
    reason: str = ""


class Service(Protocol):
    """Models that answer requests. Methods raise `Refusal`: NotFound, BadRequest, QueueFull, Unavailable and others."""

    def is_ready(self) -> bool:
        """Whether every model that should be served is."""
        ...

    def is_model_ready(self, model: str, version: str = "") -> bool:
        """Whether it would answer now; raises NotFound if there is no such model."""
        ...

    def manifest(self, model: str, version: str = "") -> Manifest:
        """Its manifest; raises Unavailable while it is not loaded."""
        ...

    def versions(self, model: str) -> tuple[str, ...]:
        """The served versions, oldest first."""
        ...

    def config(self, model: str, version: str = "") -> JSON:
        """Its settings in the form of Triton's model configuration."""
        ...

    def statistics(self, model: str = "", version: str = "") -> list[JSON]:
        """Statistics of one version, all versions of a model, or all models, in the statistics extension's form."""
        ...

    def index(self, *, ready_only: bool = False) -> tuple[RepositoryEntry, ...]:
        """Every version in the repository and its state."""
        ...

    async def infer(self, request: InferenceRequest) -> InferenceResponse:
        """Answer a request; cancelling the task removes it from the queue if it is not yet computed."""
        ...

    def count_refusal(self, model: str, refusal: Refusal) -> None:
        """Count a request that was refused before `infer`: malformed, too large, or of a model that is not ready."""
        ...

    async def load(self, model: str, parameters: Mapping[str, Parameter] | None = None) -> None:
        """Load a model, or its newest version, and serve it once it passed its checks; the old one serves until then.

        `parameters` are those of the protocol's request (`config`: a model configuration as JSON text, whose
        `version_policy` chooses versions); raises BadRequest or Unsupported if they are invalid.
        """
        ...

    async def unload(self, model: str) -> None:
        """Stop serving a model; accepted requests are answered."""
        ...


RETRY_S = 1.0


class InFlight:
    """Bytes held for requests being received, queued or computed, and for answers until clients have read them.

    Each body has its own limit; this bounds their total, and the number of connections. Not thread-safe: it belongs to
    one event loop.
    """

    def __init__(self, most_bytes: int = GIB) -> None:
        self.most_bytes = most_bytes
        self.num_bytes = 0
        self.connections: Counter[str] = Counter()
        """Open connections of HTTP by the peer's address."""

    def connect(self, peer: str, *, most: int, most_of_peer: int) -> None:
        """Count a connection.

        Raises:
            OverCapacity: the limit for all peers, or for this one, is reached; it was not counted.
        """
        if self.connections.total() >= most or self.connections[peer] >= most_of_peer:
            raise OverCapacity(
                f"the server has {self.connections.total()} connections, {self.connections[peer]} of them yours; it "
                f"takes {most} and {most_of_peer} of one address: keep connections and use them again"
            )
        self.connections[peer] += 1

    def disconnect(self, peer: str) -> None:
        """Uncount a connection."""
        self.connections[peer] -= 1
        if not self.connections[peer]:
            del self.connections[peer]

    def take(self, num_bytes: int) -> None:
        """Count bytes, to be released by `give_back`.

        Raises:
            OverCapacity: the limit would be exceeded; they were not counted.
        """
        if self.num_bytes + num_bytes > self.most_bytes:
            raise OverCapacity(
                f"the server holds {format_bytes(self.num_bytes)} of requests, of {format_bytes(self.most_bytes)} that "
                "it may; ask again when others have been answered, or with fewer rows",
                retry_after_s=RETRY_S,
            )
        self.num_bytes += num_bytes

    def give_back(self, num_bytes: int) -> None:
        """Release bytes that were taken."""
        self.num_bytes -= num_bytes

    @contextmanager
    def taken(self, num_bytes: int) -> Iterator[None]:
        """Count bytes within the block.

        Raises:
            OverCapacity: see `take`.
        """
        self.take(num_bytes)
        try:
            yield
        finally:
            self.give_back(num_bytes)


@dataclass(frozen=True, kw_only=True)
class RequestLimits:
    """Limits on what a client sends, and on its time.

    `body_bytes` applies to a body before and after decompression, and to a gRPC message; `header_bytes` to headers and
    to trailers. Headers must arrive within `header_s`, a body or message within `body_s`. A client that reads an answer
    at less than `least_bytes_per_s` over `body_s` is dropped. For `linger_s` after a refused body, further data is read
    and discarded, so that the client can read the refusal. `connections` are of one HTTP listener, from all clients and
    from one address; gRPC's follow from the memory budget.
    """

    body_bytes: int = 64 * MIB
    header_bytes: int = 64 * KIB
    body_s: float = 60.0
    header_s: float = 20.0
    linger_s: float = 5.0
    least_bytes_per_s: int = 16 * KIB
    connections: int = 1024
    connections_of_peer: int = 512


@dataclass
class AccessEntry:
    """One request and its outcome, for the access log; filled in until the request ends.

    `status` is HTTP's, or gRPC's by name. Bytes are sizes of bodies on the wire. `reason` is a refusal's
    (`queue_full`), `error` its message; both are empty for an answer. Each request of a gRPC stream has an entry.
    """

    protocol: str
    method: str
    path: str
    status: int | str = ""
    seconds: float = 0.0
    model: str = ""
    version: str = ""
    id: str = ""
    caller: str = ""
    bytes_in: int = 0
    bytes_out: int = 0
    reason: str = ""
    error: str = ""


Authorize = Callable[[Mapping[str, str]], str]
"""The caller's name, from a request's headers (names in lower case) or gRPC metadata; raises Unauthorized."""


@dataclass(frozen=True, kw_only=True)
class ServerContext:
    """A service, and what a listener needs to offer it: keys, log, metrics, limits, clock.

    Without `authorize` no key is needed; health requests never need one. `metrics` gives a page and its content type.
    `log` must not block. `in_flight` counts the bodies of all requests to it. `is_admin` adds the repository's calls
    and the metrics.
    """

    service: Service
    authorize: Authorize | None = None
    log: Callable[[AccessEntry], None] | None = None
    metrics: Callable[[], tuple[bytes, str]] | None = None
    limits: RequestLimits = RequestLimits()
    in_flight: InFlight = field(default_factory=InFlight)
    is_admin: bool = False
    name: str = "stoker"
    version: str = version("stoker")
    clock: Callable[[], float] = time.perf_counter

    def finished(self, entry: AccessEntry, started: float) -> None:
        """Log a request that began at `started` on the clock [s]."""
        if self.log is not None:
            entry.seconds = self.clock() - started
            self.log(entry)
