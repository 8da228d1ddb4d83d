"""Load tests of a model's service: one that runs already, or one that is started here for the test."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from stoker import artifacts, serving
from stoker.artifacts import Artifact
from stoker.devices import attached_cpu, sample_cpu
from stoker.devices.cpu import cpu_s_of, others_cores
from stoker.errors import BadJob, ServiceError
from stoker.loadtesting.http_connection import Address, address_of
from stoker.loadtesting.inference_requests import (
    from_file,
    in_requests,
    infer_payload,
    input_specs,
    made_up,
    sized,
    whole_requests,
)
from stoker.loadtesting.measurement import LoadTarget, at_rate, greet, with_callers
from stoker.loadtesting.server_process import served_in_child
from stoker.loadtesting.serving_limit import SettingsSearch, highest_rate, probe_seconds
from stoker.records import BATCH, ServiceSettings
from stoker.records.service import LoadMeasurement, Objective, ServingLimit, SettingsTrial
from stoker.serving.repository import model_settings
from stoker.serving.repository.discovery import find_models

MOST_CALLERS = 900
"""Limit on connections: `select` handles 1024 files."""

_FIRST_RATE = 0.7
_CAPACITY_S = 2.0


@dataclass(frozen=True, kw_only=True)
class Load:
    """The requests of a load test.

    Args:
        inputs: a `.npz` file of arrays with rows; None: the model's golden inputs, or random ones if there are none.
        rows: samples in each request.
        sizes: of named dimensions, drawn for each request; see `stoker.loadtesting.inference_requests.sizes_of`.
        connections: the most connections at once.
        headers: sent with each request, such as an API key.
        is_constant: whether requests are sent at equal distances instead of at random times.
    """

    inputs: Path | None = None
    rows: int = 1
    sizes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    connections: int = 128
    headers: Mapping[str, str] = field(default_factory=dict)
    is_constant: bool = False


def bench_serve(
    models: Path,
    objective: Objective,
    *,
    model: str = "",
    seconds: float = 180.0,
    load: Load | None = None,
    writes: bool = True,
    on_trial: Callable[[SettingsTrial], None] = lambda _: None,
) -> ServingLimit:
    """Find the highest rate a model's service holds here, and the settings that hold it.

    Args:
        models: a model (`models/digits`) or a directory of models.
        objective: the latency to hold, such as `p99=20ms`.
        model: name of the model, if there are several.
        seconds: time limit of the search [s].
        load: the requests.
        writes: whether to write the settings to the model's `service.json`, which `stoker serve` loads.
        on_trial: called with each trial when it ends.

    Raises:
        BadArtifact: there is no such model.
        BadJob: the inputs cannot be used.
        ServiceError: the service does not come up, or does not answer.
    """
    directory, artifact = _chosen(models, model)
    load = load or Load()
    machine = attached_cpu()
    cores = machine.cores or 1
    before, began = sample_cpu(), time.monotonic()
    # The defaults of a server, where settings are searched; others stay.
    plain = ServiceSettings()
    untuned = replace(
        artifacts.read_settings(directory),
        instances=None,
        threads=None,
        max_batch_rows=plain.max_batch_rows,
        max_delay_s=plain.max_delay_s,
        basis="",
    )
    limit = SettingsSearch(
        start=lambda settings: _served(directory, artifact, settings, load, objective),
        objective=objective,
        default=model_settings.sized(untuned, cores),
        cores=cores,
        seconds=seconds,
        on_trial=on_trial,
    ).run(model=directory.resolve().name, machine=f"{machine.model}, {cores} cores")
    after = sample_cpu()
    others = others_cores(before, after, time.monotonic() - began) if before and after else 0.0
    limit = replace(limit, others_cores=others)
    if not writes or limit.chosen.rate == 0.0 or limit.chosen.settings is None:
        return limit
    artifacts.write_settings(directory, replace(limit.chosen.settings, basis=basis(limit, artifact)))
    return replace(limit, written_to=str(directory / artifacts.SETTINGS))


def measure_models(
    models: Path,
    *,
    rate: float | None,
    callers: int | None,
    seconds: float,
    model: str = "",
    objective: Objective | None = None,
    load: Load | None = None,
) -> LoadMeasurement:
    """One measurement of a model's service, started here with its current settings; see `measure_url`."""
    _require_one(rate, callers)
    directory, artifact = _chosen(models, model)
    load = load or Load()
    with _served(directory, artifact, artifacts.read_settings(directory), load, objective) as target:
        return _measured(target, rate=rate, callers=callers, seconds=seconds)


def measure_url(
    url: str,
    model: str,
    *,
    rate: float | None,
    callers: int | None,
    seconds: float,
    objective: Objective | None = None,
    load: Load | None = None,
) -> LoadMeasurement:
    """One measurement of a running server: at `rate` [requests/s], or with `callers` that wait for their answers.

    Raises:
        BadJob: neither or both are given, or the URL or the inputs cannot be used.
        ServiceError: the server does not answer, or refuses the request.
    """
    _require_one(rate, callers)
    load = load or Load()
    target = _target(address_of(url), model, None, load, objective)
    return _measured(target, rate=rate, callers=callers, seconds=seconds)


def highest_rate_of_url(
    url: str, model: str, objective: Objective, *, seconds: float, load: Load | None = None
) -> SettingsTrial:
    """The highest rate that a running server holds within the objective.

    Raises:
        BadJob: the URL or the inputs cannot be used.
        ServiceError: the server does not answer, or refuses the request.
    """
    load = load or Load()
    target = _target(address_of(url), model, None, load, objective)
    greet(target)
    ends = time.monotonic() + seconds
    capacity = with_callers(target, min(32, load.connections), min(_CAPACITY_S, seconds / 8))
    seeds = itertools.count(1)
    highest = highest_rate(
        lambda rate, duration_s: at_rate(target, rate, duration_s, cuts=True, seed=next(seeds)),
        first=_FIRST_RATE * max(1.0, capacity.throughput),
        seconds_at=lambda rate: probe_seconds(
            rate, objective.q, shortest_s=min(2.0, seconds / 8), longest_s=max(2.0, seconds / 8)
        ),
        has_time=lambda needed: ends - time.monotonic() >= needed,
    )
    return SettingsTrial(settings=None, rate=highest.rate, why=highest.why, tried=(capacity, *highest.tried))


def basis(limit: ServingLimit, artifact: Artifact) -> str:
    """How settings were measured, in a sentence for `service.json`."""
    day = datetime.now(UTC).date().isoformat()
    libraries = ", ".join(f"{name} {number}" for name, number in artifact.manifest.libraries.items())
    return (
        f"{limit.chosen.rate:.4g} requests/s within {limit.objective} on {limit.machine}, {day}, "
        f"by stoker bench-serve; {limit.chosen.why}; "
        f"version {artifact.version}, {artifact.manifest.engine} {artifact.manifest.precision}"
        + (f", exported with {libraries}" if libraries else "")
    )


def _measured(target: LoadTarget, *, rate: float | None, callers: int | None, seconds: float) -> LoadMeasurement:
    greet(target)
    if rate is not None:
        return at_rate(target, rate, seconds)
    assert callers is not None
    return with_callers(target, callers, seconds)


def _require_one(rate: float | None, callers: int | None) -> None:
    if (rate is None) == (callers is None):
        raise BadJob("a measurement needs a rate or a number of callers, not both", remedy="Give --rate or --callers.")
    if callers is not None and not 1 <= callers <= MOST_CALLERS:
        raise BadJob(f"--callers {callers}: wanted 1 to {MOST_CALLERS}")


def _chosen(models: Path, name: str) -> tuple[Path, Artifact]:
    """A model's directory and its newest version."""
    by_name = find_models((models,)).models
    if not by_name:
        artifacts.read(models)  # raises with what is missing
    if not name and len(by_name) > 1:
        raise BadJob(f"{models} has several models: {', '.join(by_name)}", remedy=f"Add --model {next(iter(by_name))}.")
    name = name or next(iter(by_name))
    if name not in by_name:
        raise BadJob(f"{models} has no model {name!r}, but {', '.join(by_name)}", remedy="Name one of these.")
    return by_name[name], artifacts.read(by_name[name])


@contextmanager
def _served(
    directory: Path, artifact: Artifact, settings: ServiceSettings, load: Load, objective: Objective | None
) -> Iterator[LoadTarget]:
    """The model in a new server process, on a free port of the loopback address."""
    name = directory.resolve().name
    options = serving.server.ServerOptions(
        places=(directory,),
        settings={name: settings},
        http_port=0,
        grpc_port=None,
        admin_port=None,
        watch_s=None,
        grace_s=2.0,
        is_strict=True,
    )
    with served_in_child(serving.server.run, options) as (started, pid):
        if started.http is None:
            raise ServiceError("the service has no HTTP port")
        target = _target(address_of(started.http), name, artifact, load, objective)
        yield replace(target, cpu_s=lambda: cpu_s_of([pid]))


def _target(
    address: Address, model: str, artifact: Artifact | None, load: Load, objective: Objective | None
) -> LoadTarget:
    specs = input_specs(address, model, load.headers) if artifact is None else artifact.manifest.inputs
    if load.inputs is not None:
        arrays = from_file(load.inputs)
    else:
        arrays = made_up(specs) if artifact is None else artifact.golden().inputs
    if wrong := {spec.name for spec in specs} ^ arrays.keys():
        raise BadJob(f"the inputs do not fit the model: {sorted(wrong)}; it takes {[spec.name for spec in specs]}")
    is_batched = all(spec.shape[:1] == (BATCH,) for spec in specs) if artifact is None else artifact.manifest.is_batched
    requests = in_requests(arrays, load.rows) if is_batched else whole_requests(arrays, specs, load.rows)
    payloads = [
        infer_payload(address, model, request, headers=load.headers) for request in sized(requests, specs, load.sizes)
    ]
    return LoadTarget(
        address, payloads, connections=load.connections, is_constant=load.is_constant, objective=objective
    )
