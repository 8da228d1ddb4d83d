"""Clouds by SkyPilot: `sky:any/l4:spot`, `sky:aws/8xh100`, as managed jobs that SkyPilot provisions and recovers.

What: the offers of SkyPilot's catalogue, which `stoker plan` ranks by the money or the time until the run is finished.
The cheapest few machines with the devices that were chosen go to SkyPilot in that order, which takes the first that it
can have. A preempted machine is replaced by SkyPilot, and the run goes on from its mirror, since the disks of such
machines go with them: at `--keep URL`, or without it in a bucket that SkyPilot makes and mounts. Exit codes 75 and 130
mean "start again".
Use when: SkyPilot is installed here and has credentials of a cloud. Costs: SkyPilot's controller, a small machine.
Does not do: several nodes (their processes would need a shared disk).
SkyPilot's command line is called, in JSON where it has it; its Python is not imported: it has many requirements, and
an API server of its version. Source: SkyPilot 0.14.1, sky/client/cli/command.py, sky/utils/schemas.py (a task's
YAML), sky/jobs/state.py (states), sky/catalog/common.py (where catalogues are), sky/data/storage.py and
sky/utils/controller_utils.py (buckets, which `sky jobs launch` makes before it submits the job).
"""

from __future__ import annotations

import csv
import hashlib
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from stoker.devices import catalogue
from stoker.errors import NoDevice, PlaceFailed, PlaceUnreachable, nearest
from stoker.launching.bundle import secret_values
from stoker.launching.environment_lock import EnvironmentLock
from stoker.launching.launcher import (
    Handle,
    Launcher,
    LaunchTarget,
    Offer,
    Probe,
    Request,
    Submission,
    require_lasting_keep,
    seen_now,
    train_command,
    utc_now,
)
from stoker.launching.logged_run import (
    ONE_NODE,
    entrypoint,
    events_in,
    sent_files,
    state_in,
)
from stoker.records.launch import ENDED, LaunchPhase, LaunchState
from stoker.store.remote_runs import RemoteRuns, bring_home
from stoker.units import format_money, format_seconds

STARTING_S = 300.0
"""Time from the request of a machine to the run's start [s]: a judgement; earlier runs of the place replace it."""
PREEMPTED_PER_H = 0.05
"""Preemptions of a spot machine an hour: an assumption, since no cloud states it; a twentieth, so one in 20 hours."""
_MOST_ALTERNATIVES = 8
_TIMEOUT_S, _LAUNCH_TIMEOUT_S = 120.0, 1800.0
_MOUNT = "/stoker-runs"
"""Folder of a machine on which the bucket is that SkyPilot makes."""


@dataclass(frozen=True, kw_only=True)
class ObjectStore:
    """A kind of bucket that SkyPilot makes and mounts, and that is read here by a plain URL.

    Attributes:
        cloud: SkyPilot's name of the cloud, in small letters.
        store: its name in a task.
        scheme: of the URL.
        package: reads such URLs here.
    """

    cloud: str
    store: str
    scheme: str
    package: str


_STORES = (
    ObjectStore(cloud="aws", store="s3", scheme="s3", package="s3fs"),
    ObjectStore(cloud="gcp", store="gcs", scheme="gs", package="gcsfs"),
)


@dataclass(frozen=True, kw_only=True)
class CloudOffer:
    """A machine of SkyPilot's catalogue: `count` devices of a model.

    Attributes:
        price_per_h: of the machine [USD].
        is_spot: it may be taken away at any time.
    """

    cloud: str
    region: str
    instance: str
    device: str
    count: int
    price_per_h: float
    is_spot: bool


def read_catalogue(folder: Path, *, clouds: Sequence[str] = ()) -> tuple[tuple[CloudOffer, ...], str]:
    """The offers with accelerators of SkyPilot's catalogue files, and their age in words.

    Args:
        folder: with `CLOUD/vms.csv`, as SkyPilot keeps it: `~/.sky/catalogs/v8`.
        clouds: only these; empty: all.

    Raises:
        PlaceFailed: there is no catalogue, or a file is none.
    """
    there = sorted(folder.glob("*/vms.csv"))
    paths = [path for path in there if not clouds or path.parent.name in clouds]
    if not paths:
        asked = f" of {', '.join(clouds)}" if clouds else ""
        known = f"{nearest(clouds[0], [path.parent.name for path in there])} " if clouds and there else ""
        raise PlaceFailed(
            f"SkyPilot has no catalogue{asked} in {folder}",
            remedy=f"{known}`sky gpus list` fetches it; `sky check` says which clouds are enabled.",
        )
    entries: list[CloudOffer] = []
    for path in paths:
        try:
            with path.open(newline="", encoding="utf-8") as file:
                entries += [offer for row in csv.DictReader(file) for offer in _offers_of(path.parent.name, row)]
        except (ValueError, KeyError, csv.Error) as problem:
            raise PlaceFailed(
                f"{path} is no catalogue of SkyPilot: {problem}", remedy="Delete it; SkyPilot fetches it again."
            ) from problem
    oldest = min(path.stat().st_mtime for path in paths)
    return tuple(entries), f"SkyPilot's catalogue of {datetime.fromtimestamp(oldest, UTC):%Y-%m-%d}"


def _offers_of(cloud: str, row: Mapping[str, str]) -> list[CloudOffer]:
    """On demand and spot, as far as the row has prices; none without an accelerator."""
    count = float(row["AcceleratorCount"] or 0)
    if not row["AcceleratorName"] or count < 1:
        return []
    offers = []
    for column, is_spot in (("Price", False), ("SpotPrice", True)):
        price = float(row.get(column) or "nan")
        if math.isfinite(price) and price > 0:
            offers.append(
                CloudOffer(
                    cloud=cloud,
                    region=row.get("Region", ""),
                    instance=row["InstanceType"],
                    device=device_name(row["AcceleratorName"]),
                    count=int(count),
                    price_per_h=price,
                    is_spot=is_spot,
                )
            )
    return offers


def device_name(name: str) -> str:
    """SkyPilot's name of a device as Stoker's catalogue writes it; one that is not in it in small letters.

    >>> [device_name(name) for name in ("H100", "A100-80GB", "A100", "RTX4090", "Trainium")]
    ['h100', 'a100-80', 'a100-40', 'rtx-4090', 'trainium']
    """
    entries = catalogue().find("a100-40" if name.lower() == "a100" else name)
    return entries[0].name if len(entries) == 1 else name.lower()


class SkyLauncher(Launcher):
    """Clouds that SkyPilot has credentials of."""

    kind = "sky"
    syntax = "sky:CLOUD|any/[N×]DEVICE[:spot]"
    options = ("root",)

    def parse(self, text: str) -> LaunchTarget:
        """The cloud, and the devices of one machine."""
        match = re.fullmatch(r"([a-z]+)(?:/([\w.×-]+))?((?::[a-z]+)*)", text.strip())
        options = frozenset(match[3].split(":")[1:]) if match else frozenset()
        if match is None:
            raise self.unreadable(text, "sky:any/l4:spot")
        if unknown := sorted(options - {"spot"}):
            raise NoDevice(f"--on sky:{text}: {unknown[0]!r} is no option.", remedy=nearest(unknown[0], ["spot"]))
        nodes, each, device = self.shape_in(text, match[2] or "here", one_node=ONE_NODE)
        return self.target(text, match[1], (nodes, each, device_name(device) if device else ""), options)

    def probe(self, target: LaunchTarget, options: Mapping[str, str]) -> Probe:
        """SkyPilot's version, its enabled clouds, and the cheapest machine with the devices."""
        version = _sky("--version").strip()
        offers = self._fitting(target)
        facts = {"SkyPilot": version.rpartition(" ")[2]}
        if not offers:
            return Probe(facts=facts, missing=(_nothing_for(target),))
        best = offers[0]
        facts["cheapest"] = f"{best.cloud} {best.region}, {best.instance}: {format_money(best.price_per_h)} an hour"
        return Probe(facts=facts, device=best.device)

    def offers(self, request: Request) -> tuple[Offer, ...]:
        """The word itself, at the highest price that SkyPilot may take; then the cheapest machine of each cloud."""
        target = request.target
        _, source = _catalogue(target)
        fitting = self._fitting(target)
        if not fitting:
            return ()

        def offer(machine: CloudOffer, text: str, source: str) -> Offer:
            return Offer(
                text=text,
                num_nodes=1,
                devices_each=machine.count,
                device=machine.device,
                starts_in_s=STARTING_S,
                price_per_h=machine.price_per_h,
                price_source=f"{source}: {machine.instance} in {machine.region}",
                preempted_per_h=PREEMPTED_PER_H if machine.is_spot else 0.0,
                is_rented=True,
                why=f"{format_seconds(STARTING_S)} for a machine is a judgement; whether there is one is not known",
            )

        kinds: dict[tuple[str, int, str], CloudOffer] = {}
        for machine in fitting:
            kinds.setdefault((machine.device, machine.count, machine.cloud), machine)
        alternatives = fitting[:_MOST_ALTERNATIVES]
        listed = [offer(alternatives[-1], target.text, f"{source}, the dearest of {len(alternatives)}")]
        for machine in kinds.values():
            text = f"sky:{machine.cloud}/{machine.count}x{machine.device}{':spot' if machine.is_spot else ''}"
            listed.append(offer(machine, text, source))
        return tuple(listed if target.device else listed[1:])

    def script(self, submission: Submission) -> str:
        """The task that SkyPilot gets: JSON, which is YAML."""
        command, choice = shlex.join(["sky", *_launch_words(submission, "TASK.yaml")]), ""
        submission, _, store = self._with_mirror(submission, is_asked=False)
        if store is not None:
            choice = f"# the store of the bucket is filled in from `sky check`: {store.store} where it can be had\n"
        task = json.dumps(self._task(submission, Path("FOLDER"), "(now)", store), indent=2)
        return f"# {command}\n# runs: {train_command(submission)}\n{choice}{task}\n"

    def start(self, submission: Submission, tell: Callable[[str], None]) -> Handle:
        """Launch the managed job; one of that name that is going is found instead."""
        if submission.expected:
            raise PlaceFailed(
                f"{submission.expected[0]} is outside of the job's folder, and no machine of a cloud has it",
                remedy="Move it below the job's folder, so that it is sent.",
            )
        submission, keep, store = self._with_mirror(submission)
        name = _job_name(submission)
        record = _record(name)
        handle: Handle = {"job": name, "keep": keep, "sent_bytes": 0}
        if record is not None and record["status"] not in _OVER:
            return handle
        if store is not None:
            tell(
                f"no --keep: checkpoints go to {keep}, a bucket that SkyPilot makes: a preemption or `stoker stop` "
                "loses what was trained since the last one, and it is paid for until `sky storage delete "
                f"{_bucket_name(submission)}`"
            )
        secrets = secret_values(submission.secrets)
        with tempfile.TemporaryDirectory(prefix="stoker-sky-") as folder:
            sent = Path(folder) / "sent"
            for path, content in sent_files(submission):
                target = sent / path
                target.parent.mkdir(parents=True, exist_ok=True)
                if isinstance(content, bytes):
                    target.write_bytes(content)
                else:
                    shutil.copyfile(content, target)
            task = Path(folder) / "task.yaml"
            task.write_text(json.dumps(self._task(submission, sent, utc_now("milliseconds"), store)))
            handle["sent_bytes"] = sum(file.stat().st_size for file in sent.rglob("*") if file.is_file())
            tell("SkyPilot looks for a machine")
            _sky(*_launch_words(submission, str(task)), variables=secrets, timeout_s=_LAUNCH_TIMEOUT_S)
        return handle

    def state(self, handle: Handle) -> LaunchState:
        """By SkyPilot's state of the job, and while it runs by what the run prints of itself."""
        try:
            record = _record(handle["job"])
            if record is None:
                return seen_now("lost", "SkyPilot does not know the job", handle["job"])
            status = str(record["status"])
            said = state_in(_log(handle)) if status not in {"PENDING", "STARTING", "RECOVERING"} else None
        except PlaceUnreachable as error:
            return seen_now("unknown", "SkyPilot does not answer", error.message)
        detail = str(record.get("failure_reason") or record.get("details") or "")
        evidence, restarts = f"{status}: {detail}" if detail else status, int(record.get("recovery_count") or 0)
        if status == "RUNNING" and said is not None and said.phase not in ENDED:
            return LaunchState(phase=said.phase, why=said.why, evidence=said.evidence, restarts=restarts, at=said.at)
        if status.startswith("FAILED") and said is not None and said.phase in ENDED:
            return said
        phase, why = _PHASES.get(status, ("failed", "the job failed"))
        state, ended_s = seen_now(phase, why, evidence, restarts=restarts), record.get("end_at")
        if phase in ENDED and isinstance(ended_s, int | float):
            return replace(state, at=datetime.fromtimestamp(ended_s, UTC).isoformat(timespec="seconds"))
        return state

    def events(self, handle: Handle, offset: int) -> bytes:
        """The marked lines of the job's log; after a recovery it begins with what the mirror had."""
        return events_in(_log(handle), offset)

    def stop(self, handle: Handle) -> None:
        """SkyPilot ends the job and its machine; the mirror has the last checkpoint."""
        _sky("jobs", "cancel", "-y", "-n", handle["job"])

    def fetch(self, handle: Handle, into: Path) -> None:
        """The run's directory, from its mirror."""
        with tempfile.TemporaryDirectory(prefix="stoker-sky-") as folder:
            said: list[str] = []
            bring_home(RemoteRuns.open(handle["keep"]), Path(folder) / into.name, said.append, family=False)
            for path in sorted(file for file in Path(folder).rglob("*") if file.is_file()):
                target = into / path.relative_to(Path(folder) / into.name)
                target.parent.mkdir(parents=True, exist_ok=True)
                if not target.exists() or target.read_bytes() != path.read_bytes():
                    shutil.move(path, target)

    def _fitting(self, target: LaunchTarget) -> list[CloudOffer]:
        """The offers that a word allows, cheapest first."""
        offers, _ = _catalogue(target)
        is_spot = "spot" in target.options
        fitting = [
            offer
            for offer in offers
            if offer.is_spot == is_spot and offer.count == target.devices_each and target.device in {"", offer.device}
        ]
        return sorted(fitting, key=lambda offer: (offer.price_per_h, offer.cloud, offer.region, offer.instance))

    def _with_mirror(
        self, submission: Submission, *, is_asked: bool = True
    ) -> tuple[Submission, str, ObjectStore | None]:
        """The submission with a mirror, its URL here, and the store of the bucket that SkyPilot makes for it.

        A run that goes on keeps the mirror that it had. `is_asked`: ask SkyPilot which stores it may use.

        Raises:
            PlaceFailed: SkyPilot may make no bucket that can be read from here.
        """
        arguments, before = submission.arguments, str(submission.earlier.get("keep", ""))
        if "--keep" in arguments[:-1]:
            require_lasting_keep(submission)
            return submission, arguments[arguments.index("--keep") + 1], None
        urls = {f"{store.scheme}://{_bucket_name(submission)}": store for store in _STORES}
        if before and before not in urls:
            return replace(submission, arguments=(*arguments, "--keep", before)), before, None
        store = urls[before] if before else self._store(submission, is_asked=is_asked)
        mounted = replace(submission, arguments=(*arguments, "--keep", f"file://{_MOUNT}"))
        return mounted, f"{store.scheme}://{_bucket_name(submission)}", store

    def _store(self, submission: Submission, *, is_asked: bool) -> ObjectStore:
        """The kind of the bucket: of the one that is there, or else of the first machine whose cloud may have it."""
        clouds = [offer.cloud for offer in self._fitting(submission.target)[:_MOST_ALTERNATIVES]]
        stores = sorted(_STORES, key=lambda store: clouds.index(store.cloud) if store.cloud in clouds else len(clouds))
        if not is_asked:
            return stores[0]
        there = _stores_of(_bucket_name(submission))  # of an earlier start whose record is not here: another is empty
        stores = [store for store in stores if store.store.upper() in there] or stores
        enabled = _storage_clouds()
        if not (allowed := [store for store in stores if store.cloud in enabled]):
            raise PlaceFailed(
                "a machine of a cloud takes its disk with it, and SkyPilot has no storage of "
                f"{' or '.join(store.cloud for store in stores)} for the run's checkpoints (`sky check`)",
                remedy="Give --keep URL, such as s3://bucket/runs: checkpoints go there, and the run goes on from it.",
            )
        if not (read := [store for store in allowed if find_spec(store.package)]):
            raise PlaceFailed(
                f"the run would come home from {allowed[0].scheme}://…, for which {allowed[0].package} is missing here",
                remedy=f"pip install {allowed[0].package}; or give --keep URL.",
            )
        return read[0]

    def _task(self, submission: Submission, sent: Path, submitted_at: str, store: ObjectStore | None) -> dict[str, Any]:
        """The task: where to look for a machine, in order, what makes the environment, and what runs.

        With `store`, SkyPilot makes a bucket of the run, or takes it if it is there, and mounts it.
        """
        target, environment = submission.target, submission.environment
        offers = self._fitting(target)[:_MOST_ALTERNATIVES]
        if not offers:
            raise PlaceFailed(_nothing_for(target), remedy="`sky gpus list` shows all.")
        recovery = {"strategy": "EAGER_NEXT_REGION", "max_restarts_on_errors": 0, "recover_on_exit_codes": [75, 130]}
        machines = [
            {
                "infra": f"{offer.cloud}/{offer.region}",
                "instance_type": offer.instance,
                "use_spot": offer.is_spot,
                "job_recovery": recovery,
            }
            for offer in offers
        ]
        python, setup = "python3", ""
        if isinstance(environment, EnvironmentLock):
            folder = f"$HOME/{environment.folder(environment.python)}"
            python = f'"{folder}/bin/python"'
            setup = (
                f'set -e\n[ -e "{folder}/complete" ] && exit 0\npython3 -m venv "{folder}"\n{python} -m pip install -q '
            )
            setup += f'{shlex.join(environment.requirements)}\ntouch "{folder}/complete"\n'
        elif environment:
            python = shlex.quote(environment)
        bucket = {} if store is None else {"name": _bucket_name(submission), "store": store.store, "mode": "MOUNT"}
        return {
            "name": _job_name(submission),
            "workdir": str(sent),
            "resources": {"ordered": machines},
            **({"file_mounts": {_MOUNT: bucket}} if bucket else {}),
            "envs": dict(submission.variables),
            "setup": setup,
            "run": entrypoint(submission, python, submitted_at),
        }


_PHASES: dict[str, tuple[LaunchPhase, str]] = {
    "PENDING": ("queued", "SkyPilot's controller has others before it"),
    "STARTING": ("queued", "SkyPilot looks for a machine"),  # perhaps for hours, in which none is paid for
    "RUNNING": ("starting", "the machine is there; the run has not said anything yet"),
    "RECOVERING": ("preempted", "the machine is gone, and SkyPilot looks for another"),
    "WINDING_DOWN": ("saving", "SkyPilot gives the machine back"),
    "CANCELLING": ("saving", "SkyPilot ends the job"),
    "CANCELLED": ("stopped", "cancelled; the mirror has the last checkpoint"),
    "SUCCEEDED": ("finished", "trained to its end"),
    "FAILED_NO_RESOURCE": ("failed", "no cloud had such a machine"),
    "FAILED_SETUP": ("failed", "the environment could not be made"),
    "FAILED_PRECHECKS": ("failed", "SkyPilot refuses the task"),
    "FAILED_CONTROLLER": ("lost", "SkyPilot's controller failed"),
}
"""Phases by SkyPilot's states; others are failures."""

_OVER = frozenset({"SUCCEEDED", "CANCELLED", "FAILED", *(status for status in _PHASES if status.startswith("FAILED_"))})


def _bucket_name(submission: Submission) -> str:
    """Name of the bucket that SkyPilot makes for a run: valid at every cloud, where names are global."""
    return f"stoker-{hashlib.sha256(_job_name(submission).encode()).hexdigest()[:24]}"


def _job_name(submission: Submission) -> str:
    """The job's name, by which it is found again: equal runs of two owners at one server have different ones."""
    return f"{submission.run}-{hashlib.sha256(submission.owner.encode()).hexdigest()[:8]}"


def _launch_words(submission: Submission, task: str) -> list[str]:
    secrets = [word for name in submission.secrets for word in ("--secret", name)]
    return ["jobs", "launch", "-y", "-d", "-n", _job_name(submission), *secrets, task]


def _nothing_for(target: LaunchTarget) -> str:
    """Why no machine fits a word, with the numbers of such devices or the devices that there are."""
    is_spot = "spot" in target.options
    offers = [offer for offer in _catalogue(target)[0] if offer.is_spot == is_spot]
    kind, where = "spot machine" if is_spot else "machine", "" if target.address == "any" else f" of {target.address}"
    if counts := sorted({offer.count for offer in offers if offer.device == target.device}):
        there = f"it has {', '.join(map(str, counts))} × {target.device}"
    elif offers:
        there = nearest(target.device, {offer.device for offer in offers}).rstrip(".")
    else:
        there = f"it has no {kind}{where} at all"
    return f"SkyPilot's catalogue has no {kind} for {target.text}: {there}"


def _catalogue(target: LaunchTarget) -> tuple[tuple[CloudOffer, ...], str]:
    home = Path(os.environ.get("SKY_RUNTIME_DIR") or Path.home()) / ".sky" / "catalogs"
    versions = sorted(home.glob("v*"), key=lambda path: int(re.sub(r"\D", "", path.name) or 0))
    if not versions and shutil.which("sky") is None:
        raise _not_installed()
    clouds = () if target.address == "any" else (target.address,)
    return read_catalogue(versions[-1] if versions else home / "v8", clouds=clouds)


def _record(name: str) -> dict[str, Any] | None:
    """SkyPilot's newest managed job of that name; None if there is none."""
    try:
        text = _sky("jobs", "queue", "--all", "--refresh", "--output", "json")
    except PlaceFailed as problem:
        if re.search(r"sky-jobs-controller\S* does not exist", problem.message):  # before the first job, or taken down
            return None
        raise
    with _readable("sky jobs queue", text):
        found = re.search(r"^\[", text, re.MULTILINE)  # after what it says of its controller
        records = json.loads(text[found.start() :]) if found else []
        named = [record for record in records if record.get("job_name") == name]
    return max(named, key=lambda record: int(record.get("job_id") or 0), default=None)


def _storage_clouds() -> set[str]:
    """Clouds in which SkyPilot may make buckets, in small letters."""
    text = _sky("check", "--output", "json")
    with _readable("sky check", text):
        spaces: dict[str, dict[str, list[str]]] = json.loads(text[text.index("{") :])
        clouds = [cloud for space in spaces.values() for cloud in space.items()]
        return {name.lower() for name, capabilities in clouds if "storage" in capabilities}


@contextmanager
def _readable(command: str, text: str) -> Iterator[None]:
    """Errors of reading what a command printed as one that names it.

    Raises:
        PlaceFailed: it is not what is read in the block.
    """
    try:
        yield
    except (ValueError, AttributeError, TypeError) as error:
        raise PlaceFailed(
            f"`{command}` answers with something else than JSON: {text[:80]!r}", remedy="Stoker knows SkyPilot 0.14."
        ) from error


def _stores_of(bucket: str) -> set[str]:
    """The stores in which SkyPilot has made a bucket of that name, in capitals; none where there is none.

    Its list is a table for people: columns are separated by two spaces, and the third is the store.
    """
    rows = (re.split(r"\s{2,}", row.strip()) for row in _sky("storage", "ls").splitlines())
    return {store for row in rows if row[0] == bucket and len(row) > 2 for store in row[2].split(", ")}


def _log(handle: Handle) -> bytes:
    try:
        return _sky("jobs", "logs", "--no-follow", "-n", handle["job"]).encode()
    except PlaceUnreachable:
        raise
    except PlaceFailed:  # no machine yet, or none any more
        return b""


def _sky(*words: str, variables: Mapping[str, str] | None = None, timeout_s: float = _TIMEOUT_S) -> str:
    """The output of a command of SkyPilot.

    Raises:
        PlaceFailed: SkyPilot is missing, or refuses.
        PlaceUnreachable: it does not end in time, or its server does not answer.
    """
    try:
        done = subprocess.run(
            ["sky", *words],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            stdin=subprocess.DEVNULL,
            check=False,
            env={**os.environ, **(variables or {})},
        )
    except FileNotFoundError as error:
        raise _not_installed() from error
    except subprocess.TimeoutExpired as error:
        raise PlaceUnreachable(f"`sky {words[0]} {words[1]}` did not end in {format_seconds(timeout_s)}") from error
    output, errors = (re.sub(r"\x1b\[[0-9;]*m", "", text) for text in (done.stdout, done.stderr))
    if done.returncode == 0:
        return output
    lines = [line.strip() for line in (errors.strip() or output).splitlines() if line.strip()]
    last = re.sub(r"^sky\.exceptions\.\w+: ", "", lines[-1]) if lines else f"exit code {done.returncode}"
    if re.search(r"connect|API server|timed? ?out", last, re.IGNORECASE):
        raise PlaceUnreachable(f"SkyPilot's server does not answer: {last}", remedy="`sky api info` says more.")
    raise PlaceFailed(f"SkyPilot: {last}", remedy="`sky check` says which clouds are enabled, and why others are not.")


def _not_installed() -> PlaceFailed:
    return PlaceFailed(
        "SkyPilot is not installed here: there is no command `sky`",
        remedy="pip install 'skypilot[aws]' (or gcp, azure, lambda, …) in an environment of its own, "
        "put its `sky` on the PATH, then `sky check`.",
    )


LAUNCHER = SkyLauncher()
