"""What both edges, HTTP and gRPC, are handed beside the service: limits, keys, a log, metrics, a clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version

from stoker.serving.in_flight import InFlight
from stoker.serving.service import Service
from stoker.units import KIB, MIB


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a client may send, and how long it may take to.

    `body_bytes` hold for a body before and after it was decompressed, and for a gRPC message; `header_bytes` for
    headers, and for trailers. `header_s` is how long headers may take to arrive, `body_s` a body or a message. A client
    that reads an answer at less than `least_bytes_per_s` over `body_s` is dropped. `linger_s` is how long what follows
    a refused body is read and thrown away, so that the client comes to read the refusal. `connections` are HTTP's on
    one door, of all clients and of one address; gRPC's follow from the memory budget.
    """

    body_bytes: int = 64 * MIB
    header_bytes: int = 64 * KIB
    body_s: float = 60.0
    header_s: float = 20.0
    linger_s: float = 5.0
    least_bytes_per_s: int = 16 * KIB
    connections: int = 1024
    connections_of_peer: int = 512


@dataclass(frozen=True, kw_only=True)
class Access:
    """One request and what became of it, for the access log.

    `status` is HTTP's, or gRPC's by name. Bytes are those of bodies, as they came over the wire. `reason` is a
    refusal's (`queue_full`), `error` its message; both are empty for an answer. Of a gRPC stream each request counts.
    """

    protocol: str
    method: str
    path: str
    status: int | str
    seconds: float
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
class Edge:
    """A service, and the terms on which an edge gives it to others.

    Without `authorize` everyone may ask; questions about health never need a key. `metrics` gives a page and its
    content type. `log` must not block; without one no records are made for it. `in_flight` counts the bodies of all
    requests to it. `is_admin` adds the repository's calls and the metrics.
    """

    service: Service
    authorize: Authorize | None = None
    log: Callable[[Access], None] | None = None
    metrics: Callable[[], tuple[bytes, str]] | None = None
    limits: Limits = Limits()
    in_flight: InFlight = field(default_factory=InFlight)
    is_admin: bool = False
    name: str = "stoker"
    version: str = version("stoker")
    clock: Callable[[], float] = time.perf_counter
