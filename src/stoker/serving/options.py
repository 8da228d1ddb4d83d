"""What a server is told, and what it tells once it is up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from stoker.records import EngineName, ServiceSettings, ServingPrecision, TensorSpec
from stoker.units import MIB

LOOPBACK = "127.0.0.1"
BODIES_AT_ONCE = 16
GRACE_S = 25.0
"""Below the 30 s after which Kubernetes kills a container that was told to stop: what is left is for closing."""


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """How to serve. Ports of 0 are free ones that the system chooses; None leaves that door out.

    `places` are models, or directories of models. `settings` of a model stand in for its `service.json`; `overrides`
    are words such as `digits.max_batch_rows=16`. `watch_s` is the time between two looks at the directories, None: they
    are looked at when asked. `grace_s` is how long a shutdown waits for answers. `access_log` is a file, `-` for
    standard error, None for none. `max_bodies_bytes` bounds the bodies of all requests under way together, None: at
    `BODIES_AT_ONCE` of the largest. With `is_strict` a model that cannot be served stops the server from starting.
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
    """A version that serves, and how."""

    name: str
    version: str
    engine: EngineName
    precision: ServingPrecision
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    settings: ServiceSettings
    load_s: float


@dataclass(frozen=True, kw_only=True)
class Started:
    """A server that is up: its doors, its models, and why others are not served.

    Addresses are `http://127.0.0.1:8000`; gRPC's has no scheme. None: there is no such door.
    """

    http: str | None
    grpc: str | None
    admin: str | None
    admin_grpc: str | None
    models: tuple[ServedModel, ...]
    problems: Mapping[str, tuple[str, ...]]
    has_keys: bool
    has_tls: bool
