"""The agent: lends devices of its owner to a pool, all of them in one lease at a time, and replays what others claim.

What: one process. It measures the device, states its isolation, keeps its offer alive, accepts leases, runs their jobs
in isolation (`leased_job.py`), and in a thread makes blocks of other agents' runs again (`replay_check.py`). It goes on
without the control plane, and takes up its leases again after it was killed: the job then goes on from its last
checkpoint.
The owner's limits: price, hours, notice, idle only (load of others, or `stoker pool pause`), memory, cores, processes,
disk, time. The first SIGINT or SIGTERM gives notice and lets the job save; the second ends everything at once.

```
FOLDER/leases/LEASE/     box, run, output of a lease
       checks/ORDER/     what a replay needs
       paused            there while the owner wants the device back
       lock
```
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import json
import math
import os
import platform
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from stoker.devices import planned_devices, resolve_place
from stoker.devices.cpu import cpu_s_of
from stoker.errors import BadJob, BadRun, NoDevice, StokerError
from stoker.pool import events as on
from stoker.pool.bisection import Bisection, points
from stoker.pool.client import PoolClient, is_passing
from stoker.pool.escrow import credits_text
from stoker.pool.hardware_proof import HardwareProof, LocalDevice
from stoker.pool.isolation import (
    LEAST_FREE_BYTES,
    Host,
    IsolatedProcess,
    Isolation,
    Limits,
    remove_tree,
)
from stoker.pool.job_box import JobBox, PoolOrder, missing_packages
from stoker.pool.lease import BEAT_S, METERED, MOST_BLOCK_S
from stoker.pool.lease_replay import blocks_of, made_again, replay_lease
from stoker.pool.leased_job import LeasedJob
from stoker.pool.link_probe import MeasuredLink
from stoker.pool.owners_use import GpuWatch, LentGpu, OwnersUse, UploadQuota, gpu_links
from stoker.pool.probed_device import ProbedDevice
from stoker.pool.replay_check import supplied_states, traced_block
from stoker.pool.shown_lease import ShownLease
from stoker.records import Device
from stoker.records.codec import digest, printable
from stoker.store.disk_errors import disk_errors
from stoker.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from stoker.pool.contract.custody import Custody

OFFER_S = 120.0
"""An offer lapses so long after it was made last, unless it is made again [s]."""
_PAUSED, _LOCK, _SENT = "paused", "lock", "sent.json"
_MOST_TRIES = 3
_KEPT_BOXES = 4
_POLL_S = 0.5
_ANSWER_S = BEAT_S
"""Time for an answer to a request for work while a job runs [s]: the next beat does not wait for a line that hangs."""


@dataclass(frozen=True, kw_only=True)
class Lending:
    """What an owner lends, and on which terms.

    Attributes:
        name: of the offer.
        price_per_hour, cost_per_hour: asked for all devices together, and what an hour costs the owner
            [micro-credits].
        reclaim_s: notice before the device is taken back [s].
        when: `always`, or `idle`: only while others leave the machine alone.
        hours: from and to [hours of the day, UTC]; None: always.
        max_upload_bytes: of checkpoints and results, a day [bytes]; None: any.
        max_temperature_c: highest temperature of a lent GPU [°C]; None: any.
        min_s, max_s: shortest and longest lease [s].
        limits: of a job.
        devices: files below /dev that a job may use.
        num_devices: devices that are lent, all in one lease; of a CPU the processes that share it.
        gpus: numbers of the GPUs that are lent; none where it is a CPU.
        beat_s: time between beats [s].
        replays: whether blocks of others are replayed, for a fee.
        probes: whether the devices answer the pool's probes while nothing is leased; see `joint_probe`.
        most_bond: a lease that wants a larger one is refused [micro-credits]; None: the price of its longest time.
        longest_window_s: a lease whose bond could be held longer than that after its end is refused [s].
    """

    name: str
    price_per_hour: int
    cost_per_hour: int = 0
    reclaim_s: int = 120
    when: Literal["always", "idle"] = "always"
    hours: tuple[int, int] | None = None
    max_upload_bytes: int | None = None
    max_temperature_c: float | None = None
    min_s: int = 0
    max_s: int = 7 * 24 * 3600
    limits: Limits
    devices: tuple[str, ...] = ()
    num_devices: int = 1
    gpus: tuple[int, ...] = ()
    beat_s: float = 10.0
    replays: bool = True
    probes: bool = True
    most_bond: int | None = None
    longest_window_s: float = 24 * 3600.0


def lent_devices(word: str, attached: Sequence[Device]) -> tuple[Device, ...]:
    """The attached devices that a word means, as `--on` does: `here`, `cuda:1`, `8xh100`, `2xcpu`.

    Raises:
        NoDevice: one is not attached.
    """
    place, *others = planned_devices(word, attached)
    if others or not place.is_here:
        if place.count > 1:
            raise NoDevice(
                f"{word!r} asks for {place.count} devices that are not all attached to this machine.",
                remedy="`stoker doctor` shows what is.",
            )
        return (resolve_place(word, attached),)
    if place.device.kind == "cpu" or place.count == 1:
        return (place.device,) * place.count
    same = [one for one in attached if (one.kind, one.model) == (place.device.kind, place.device.model)]
    return tuple(same[: place.count])


def determinism_class(device: Device, num_devices: int = 1) -> str:
    """Digest of what has to be equal for two machines to compute equal bits (hex); threads are the plan's.

    Several GPUs sum in an order that their number, the links between them and NCCL decide. Processes on a CPU do so in
    the order of their ranks, on any machine.
    """
    flags = ""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                flags = " ".join(sorted(line.partition(":")[2].split()))
                break
    versions = {}
    for name in ("torch", "numpy", "stoker"):
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    variables = ("MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY")
    several = {} if device.kind == "cpu" or num_devices == 1 else {"links": _links(num_devices)}
    return digest(
        {
            **several,
            "device": device.model,
            "kind": device.kind,
            "driver": device.driver,
            "versions": versions,
            "python": platform.python_version(),
            "machine": platform.machine(),
            "flags": hashlib.sha256(flags.encode()).hexdigest(),
            "variables": {name: os.environ[name] for name in variables if name in os.environ},
        }
    )


def _links(num_devices: int) -> list[str]:
    """What decides in which order several GPUs sum; of a machine that does not say, its name: no other one's bits."""
    nccl = sorted(
        f"{one.name} {one.version}" for one in importlib.metadata.distributions() if one.name.startswith("nvidia-nccl")
    )
    return [str(num_devices), *nccl, gpu_links() or platform.node()]


def offered_bytes(lending: Lending, device: Device) -> int:
    """Memory that is offered of each device [bytes]: processes on a CPU share what a job may have."""
    if device.kind != "cpu":
        return device.memory_bytes
    return min(device.memory_bytes, lending.limits.memory_bytes) // lending.num_devices


def offer_of(
    lending: Lending,
    device: Device,
    isolation: Isolation,
    proof: HardwareProof | None,
    *,
    expires_s: float,
    payee: str = "",
    link: MeasuredLink | None = None,
) -> on.Offer:
    """The offer as it is signed; `payee`: address that a contract pays; `link`: to the pool."""
    link, count = link or MeasuredLink(), lending.num_devices
    measured = on.Measured(
        fp32_flop_per_s=0.0 if proof is None else proof.flop_per_s, cores=max(1, int(lending.limits.cores))
    )
    return on.Offer(
        offer_id=lending.name,
        device=on.OfferedDevice(
            kind=device.name,
            count=count,
            memory_bytes=offered_bytes(lending, device),
        ),
        measured=measured,
        determinism_class=determinism_class(device, count),
        isolation=isolation.name,  # type: ignore[arg-type]
        price_per_hour=lending.price_per_hour,
        cost_per_hour=lending.cost_per_hour,
        reclaim_s=lending.reclaim_s,
        hours=lending.hours,
        min_s=lending.min_s,
        max_s=lending.max_s,
        upload_bytes_per_s=link.upload_bytes_per_s,
        download_bytes_per_s=link.download_bytes_per_s,
        disk_bytes=lending.limits.disk_bytes,
        expires_s=expires_s,
        payee=payee,
    )


@dataclass
class Agent:
    """An agent at work.

    Args:
        client: of the pool, with the agent's key.
        lending: what is lent.
        device: which; of several the first.
        isolation: in which jobs run.
        folder: for everything on the disk.
        proof: what the device showed when it was measured.
        link: to the pool, where it was measured.
        tell: receives a line of text about what happens.
        job_type: its jobs.
        check_box: in which blocks of others are made again.
    """

    client: PoolClient
    lending: Lending
    device: Device
    isolation: Isolation
    folder: Path
    proof: HardwareProof | None = None
    link: MeasuredLink | None = None
    tell: Callable[[str], None] = lambda _: None
    job_type: type[LeasedJob] = LeasedJob
    open_device: Callable[[float | None], LocalDevice] = LocalDevice
    check_box: type[JobBox] = JobBox
    _job: LeasedJob | None = field(default=None, init=False)
    _offered_until: float = field(default=0.0, init=False)
    _check: threading.Thread | None = field(default=None, init=False)
    _checked: Counter[tuple[str, int, str]] = field(default_factory=Counter, init=False)
    _replaying: IsolatedProcess | None = field(default=None, init=False)
    _measuring: threading.Thread | None = field(default=None, init=False)
    _probed: list[ProbedDevice] = field(default_factory=list, init=False)
    _refused: set[str] = field(default_factory=set, init=False)
    _has_offered: bool = field(default=False, init=False)
    _asks_from: float = field(default=0.0, init=False)
    _may_work: bool = field(default=True, init=False)
    _has_adopted: bool = field(default=False, init=False)
    _said: str = field(default="", init=False)
    _stops: int = field(default=0, init=False)
    _news: threading.Event = field(default_factory=threading.Event, init=False)

    def __post_init__(self) -> None:
        lending, is_idle_only = self.lending, self.lending.when == "idle"
        watch, uploads = None, None
        if self.device.kind == "cuda" and (is_idle_only or lending.max_temperature_c is not None):
            pids = self._others_pids if is_idle_only else None
            gpus = [LentGpu(index) for index in lending.gpus or (self.device.index,)]
            watch = GpuWatch(*gpus, pids=pids, max_temperature_c=lending.max_temperature_c)
            watch.start()
        if lending.max_upload_bytes is not None:
            uploads = UploadQuota(self.folder / _SENT, lending.max_upload_bytes, lambda: self.client.sent_bytes)
        self._owner = OwnersUse(
            self.folder / _PAUSED, looks_at_load=is_idle_only, hours=lending.hours, uploads=uploads, gpu=watch
        )
        with disk_errors(self.folder, "the agent's folder", error=BadRun, option="--folder DIR"):
            for name in ("leases", "checks"):
                (self.folder / name).mkdir(parents=True, exist_ok=True)

    @property
    def host(self) -> Host:
        """Where jobs run."""
        return Host(isolation=self.isolation, limits=self.lending.limits, devices=self.lending.devices)

    @property
    def _public(self) -> str:
        return "" if self.client.key is None else self.client.key.public

    def stop(self) -> None:
        """The kill switch: the first time the job is given notice and saves; the second time it ends at once."""
        self._stops += 1
        if self._job is not None:
            if self._stops == 1:
                self._job.reclaim(self.lending.reclaim_s, "the agent stops")
            else:
                self._job.kill()

    def run(self) -> None:
        """Lend until `stop`.

        Raises:
            Refused: the pool does not take the offer; the text says why.
            BadRun: another agent works in the folder.
        """
        with disk_errors(self.folder, "the agent's folder", error=BadRun, option="--folder DIR"):
            held = (self.folder / _LOCK).open("w")
        with held:
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise BadRun(
                    f"another agent works in {self.folder}", remedy="Give this one a --folder of its own."
                ) from None
            self._run()

    def _run(self) -> None:
        try:
            while not self._stops or self._job is not None:
                self.step()
                self._news.wait(self._pause_s)
                self._news.clear()
        finally:
            self._stop_probes()
            with suppress(StokerError):
                self.client.post(on.Withdrawn(offer_id=self.lending.name))
            if self._job is not None:
                self._job.kill()

    @property
    def _pause_s(self) -> float:
        """Time until the next step [s]: none where the pool lets the agent wait for its answer."""
        is_asked = self._is_measuring or any(not one.is_over for one in self._probed)  # the pool answers at once then
        return min(_POLL_S, self.lending.beat_s / 4) if self._job or self._is_checking or is_asked else 0.0

    def step(self) -> None:
        """Do what is due, once.

        Raises:
            Refused, PlaceFailed: the pool did not take the first offer; later on it is asked again.
        """
        why = self._owner.is_back(self._others_cpu_s)
        if why and self._job is not None:
            self._job.reclaim(self.lending.reclaim_s, why)
        self._may_work = may_work = not why and not self._stops
        if not may_work:
            self._stop_probes()
            if self._replaying is not None:
                self._replaying.kill()
        try:
            if not self._has_adopted:
                self._adopt()
                self._has_adopted = True
            if may_work:
                self._keep_offer()
            elif self._offered_until and self._job is None:
                self._offered_until = 0.0
                self.client.post(on.Withdrawn(offer_id=self.lending.name))
            if self._job is None or time.monotonic() >= self._asks_from:
                lending, has_job = self.lending, self._job is not None
                self._asks_from = time.monotonic() + lending.beat_s
                work = self.client.work(
                    wait_s=0.0 if has_job else 2.0,
                    replays=lending.replays,
                    probes=lending.probes,
                    answer_s=_ANSWER_S if has_job else None,
                )
                self._take(work, may_work=may_work)
                self._said = ""
        except StokerError as problem:
            if not is_passing(problem) and self._job is None and not self._has_offered:
                raise
            self._say_once(f"the pool {'does not answer' if is_passing(problem) else 'refuses'}: {problem.message}")
            time.sleep(_POLL_S)
        if self._job is not None:
            self._job.tick()
            if self._job.is_over:
                self._job = None

    def _say_once(self, text: str) -> None:
        if text != self._said:
            self._said = text
            self.tell(text)

    @cached_property
    def _custody(self) -> Custody | None:
        """The pool's contract, with this agent's key of its chain; None: the pool's money is in its log."""
        rules = self.client.rules()
        if not rules.contract:
            return None
        from stoker.pool.contract.custody import Custody  # noqa: PLC0415 - an extra of its own

        return Custody.of_member(rules, self.client.address.key)

    def _keep_offer(self) -> None:
        now = time.monotonic()  # the clock of the day may be set back
        if now < self._offered_until - OFFER_S / 2:
            return
        offer = offer_of(
            self.lending,
            self.device,
            self.isolation,
            self.proof,
            expires_s=time.time() + OFFER_S,
            payee="" if self._custody is None else self._custody.address,
            link=self.link,
        )
        self.client.post(on.Offered(offer=offer))
        self._offered_until, self._has_offered = now + OFFER_S, True

    def _take(self, work: dict[str, Any], *, may_work: bool) -> None:
        """Take up what the pool has for this agent."""
        if self._job is not None and self._job.lease_id not in work["live"]:
            self._job.end("the lease has ended for the pool")
        elif self._job is not None and (by_s := work.get("leaving", {}).get(self._job.lease_id)):
            self._job.reclaim(max(0.0, by_s - time.time()), "the pool needs the device for a higher priority")
        for lease in work["leases"]:
            if may_work and self._job is None and lease.lease_id not in self._refused:
                self._stop_probes()
                self._accept(lease)
        if not may_work:
            return
        for search in work.get("searches", []):  # first: the other side waits, and so do those who are paid
            self._begin_check(self._answer, str(search["lease_id"]), int(search["block"]), str(search["verifier"]))
        for challenge in work["challenges"] if self.lending.replays else ():
            against = str(challenge.get("against", ""))
            self._begin_check(self._replay, str(challenge["lease_id"]), int(challenge["block"]), against)
        for link in work.get("links", ()):
            self._measure_link(str(link["other"]), str(link["name"]))
        for probe in work.get("probes", ()):
            is_mine = probe["offer_id"] == self.lending.name and probe["device"] < self.lending.num_devices
            if is_mine and self._job is None and not self._is_checking:
                self._answer_probe(str(probe["probe_id"]), int(probe["device"]))

    def _begin_check(self, check: Callable[[str, int, str], None], lease_id: str, block: int, key: str) -> None:
        """Begin a check in a thread, unless one is being made, or this one was tried often enough."""
        if not self._is_checking and self._checked[lease_id, block, key] < _MOST_TRIES:
            self._checked[lease_id, block, key] += 1
            self._stop_probes()
            self._check = threading.Thread(target=check, args=(lease_id, block, key), name="stoker-check", daemon=True)
            self._check.start()

    def _measure_link(self, other: str, name: str) -> None:
        """Measure the direct path to another agent in a thread, unless there is work to do."""
        peer = self.client.peer
        if peer is None or self._is_measuring or self._job is not None or self._is_checking:
            return

        def measure() -> None:
            link = peer.measured_link(other, name)
            with suppress(StokerError):  # the pool asks again
                self.client.post(
                    on.Linked(
                        other=other,
                        upload_bytes_per_s=link.upload_bytes_per_s,
                        download_bytes_per_s=link.download_bytes_per_s,
                        delay_s=link.delay_s,
                    )
                )

        self._measuring = threading.Thread(target=measure, name="stoker-link", daemon=True)
        self._measuring.start()

    def _answer_probe(self, probe_id: str, number: int) -> None:
        """Let a device answer a probe, within what a job may have of it."""
        lending = self.lending
        self._probed = [one for one in self._probed if not one.is_over]
        if len(self._probed) >= lending.num_devices or any(one.place == (probe_id, number) for one in self._probed):
            return
        name = f"cuda:{lending.gpus[number]}" if lending.gpus else self.device.torch_name
        self._probed.append(
            ProbedDevice(
                self.client,
                (probe_id, number),
                lending.name,
                torch_name=name,
                most_bytes=offered_bytes(lending, self.device),
                cores=None if lending.gpus else lending.limits.cores / lending.num_devices,
                tell=self.tell,
                open_device=self.open_device,
            )
        )

    def _stop_probes(self) -> None:
        for one in self._probed:
            one.stop()
        self._probed.clear()

    @property
    def _is_measuring(self) -> bool:
        return self._measuring is not None and self._measuring.is_alive()

    @property
    def _is_checking(self) -> bool:
        return self._check is not None and self._check.is_alive()

    def _accept(self, lease: ShownLease) -> None:
        """Accept a lease whose order this machine can run; refuse it with the reason otherwise."""
        lease_id, job = lease.lease_id, self._job_of(lease)
        try:
            self._require_fair(lease)
            order = job.read_order()
            self._require_possible(order)
            if order.num_devices != self.lending.num_devices:
                raise BadJob(f"it is for {order.num_devices} devices, and {self.lending.num_devices} are lent")
            _require_site(lease, order)
            if lease.check_fraction and order.block_s > MOST_BLOCK_S:
                raise BadJob(
                    f"it commits each {format_seconds(order.block_s)}, and what is not committed is not paid: "
                    f"{MOST_BLOCK_S} s at most"
                )
            if self._custody is not None:
                self._custody.put_up(lease)
            self.client.post(on.Accepted(lease_id=lease_id))
        except Exception as problem:  # whatever a renter sends, the agent goes on
            if is_passing(problem):
                raise
            reason = f"refused: {_said(problem)}"
            self._refused.add(lease_id)
            job.end(reason)
            with suppress(on.Refused):
                self.client.post(on.Closed(lease_id=lease_id, reason=printable(reason)[:900]))
            return
        self._job = job
        job.begin(order)

    def _require_fair(self, lease: ShownLease) -> None:
        """Refuse a lease whose work could stay unpaid, or whose bond could be held for long."""
        if lease.delegate != self.client.address.key:
            raise BadJob(
                "only the renter could co-sign beats, and unsigned ones are not paid: name the pool's key as delegate"
            )
        most = self.lending.most_bond
        if most is None:
            most = math.ceil(self.lending.max_s / 3600 * self.lending.price_per_hour)
        if lease.bond > most:
            raise BadJob(
                f"it wants a bond of {credits_text(lease.bond)}, this agent puts up {credits_text(most)} at most"
            )
        if lease.window_s > self.lending.longest_window_s:
            raise BadJob(
                f"its bond could be held for {format_seconds(lease.window_s)} after the end, this agent takes "
                f"{format_seconds(self.lending.longest_window_s)} at most"
            )

    def _require_possible(self, order: PoolOrder) -> None:
        missing, other = missing_packages(order)
        if missing:
            raise BadJob(f"the job needs {', '.join(missing[:5])}, which this agent does not have")
        if other:
            self.tell(f"the job was tried with other versions: {', '.join(other[:5])}")
        free = shutil.disk_usage(self.folder).free
        needed = self.lending.limits.disk_bytes + LEAST_FREE_BYTES
        if free < needed:
            raise BadJob(
                f"the disk of this agent is full: {format_bytes(free)} are free, {format_bytes(needed)} are needed"
            )

    def _adopt(self) -> None:
        """Take up a lease that this agent held before it was killed; what no lease is for is removed.

        Raises:
            StokerError: the pool does not say which lease that is.
        """
        held = {path.name for path in (self.folder / "leases").iterdir()}
        mine = self._public
        for one in self.client.leases(agent=mine, unsettled="1") if held else ():
            lease_id, is_mine = one.lease_id, one.agent == mine and one.state in METERED
            if lease_id not in held or not is_mine or self._job is not None:
                continue
            lease = self.client.lease(lease_id)
            job = self._job_of(lease)
            try:
                order = job.read_order()
                job.begin(
                    order,
                    beats=lease.beat_index + 1,
                    ran_s=lease.running_s,
                    samples=lease.samples,
                    blocks=blocks_of(lease, order),
                )
            except Exception as problem:
                if is_passing(problem):
                    raise
                self.tell(f"{lease_id}: cannot be taken up again: {problem}")
                continue
            held.discard(lease_id)
            self._job = job
            self.tell(f"{lease_id}: taken up again")
        for left in held:
            remove_tree(self.folder / "leases" / left)

    def _job_of(self, lease: ShownLease) -> LeasedJob:
        job = self.job_type(
            lease.lease_id,
            lease.order,
            self.folder / "leases" / lease.lease_id,
            self.client,
            host=self.host,
            beat_s=self.lending.beat_s,
            tell=self.tell,
            is_checked=lease.check_fraction > 0,
        )
        job.news = self._news.set
        return job

    def _others_cpu_s(self) -> float:
        """CPU time that the programs of others take here [s]."""
        replaying = self._replaying
        of_job = 0.0 if self._job is None else self._job.cpu_s
        of_replay = 0.0 if replaying is None else replaying.cpu_s
        return of_job + of_replay + cpu_s_of(one.pid for one in self._probed)

    def _others_pids(self) -> set[int]:
        """Processes of the programs of others."""
        replaying, job = self._replaying, self._job
        pids = {one.pid for one in self._probed} | (set() if job is None else job.pids)
        return pids if replaying is None else pids | replaying.pids

    def _began_replay(self, process: IsolatedProcess) -> None:
        self._replaying = process
        if not self._may_work:
            process.kill()

    def _replay(self, lease_id: str, block: int, against: str) -> None:
        """Make a block of another agent's run again, or as an arbiter one update of it, and say what came of it."""
        try:
            verdict = replay_lease(
                self.client,
                lease_id,
                block,
                against=against,
                folder=self.folder / "checks",
                host=replace(self.host, started=self._began_replay),
                own_class=determinism_class(self.device, self.lending.num_devices),
                box_type=self.check_box,
            )
            self.tell(f"{lease_id}: block {block} replayed: {verdict.why}")
            self._checked[lease_id, block, against] = _MOST_TRIES
            if verdict.equal is None:
                return
            made = "" if verdict.equal and not against else verdict.made
            record = json.dumps(
                {"lease_id": lease_id, "block": block, "equal": verdict.equal, "why": verdict.why, "made": made}
            ).encode()
            with suppress(on.Refused):  # a key without credits may not keep it there; the hash stands in the log
                self.client.put_blob(record)
            self.client.post(
                on.VerdictGiven(
                    lease_id=lease_id,
                    block=block,
                    verifier=self._public,
                    equal=verdict.equal,
                    evidence=hashlib.sha256(record).hexdigest(),
                    made=made,
                    begins=0 if verdict.equal or against else verdict.begins,
                    against=against,
                ),
                patience_s=60.0,
            )
        except Exception as problem:  # noqa: BLE001 - whatever was committed, the agent goes on
            self.tell(f"{lease_id}: block {block} could not be replayed: {_said(problem)}")
        finally:
            self._end_check()

    def _answer(self, lease_id: str, block: int, verifier: str) -> None:
        """State or supply this agent's states inside a block on which it and another one differ, or give up."""
        search = None
        try:
            search = self._asked_search(lease_id, block, verifier)
            if search is not None:
                self.client.post(self._states(lease_id, block, verifier, search), patience_s=60.0)
            self._checked[lease_id, block, verifier] = 0  # more may be asked
        except Exception as problem:  # noqa: BLE001 - whatever was committed, the agent goes on
            self.tell(f"{lease_id}: the states of block {block} could not be given: {_said(problem)}")
            is_last = self._checked[lease_id, block, verifier] >= _MOST_TRIES or isinstance(problem, on.Refused)
            if search is not None and is_last and not is_passing(problem):
                self._give_up(lease_id, block, verifier, search)
        finally:
            self._end_check()

    def _asked_search(self, lease_id: str, block: int, verifier: str) -> Bisection | None:
        """The search, if it waits for this agent: what the pool said of it may be a moment old."""
        lease = self.client.lease(lease_id)
        verdict, search = lease.searched(block, verifier)
        party = lease.party(self._public, verdict)
        is_open = lease.state == "disputed" and not verdict.dismissed
        return search if is_open and party is not None and search.waits_for(party) else None

    def _give_up(self, lease_id: str, block: int, verifier: str, search: Bisection) -> None:
        """Say that what was asked cannot be made, if it is still asked."""
        kind = on.Supplied if search.update else on.Traced
        with suppress(StokerError, ValueError):
            now = self._asked_search(lease_id, block, verifier)
            if now is not None and (now.low, now.high) == (search.low, search.high):
                self.client.post(kind(lease_id=lease_id, block=block, verifier=verifier))

    def _states(self, lease_id: str, block: int, verifier: str, search: Bisection) -> on.Body:
        """The digests that are asked for, or the states around the update that was found, which are sent."""
        with made_again(
            self.client,
            lease_id,
            block,
            folder=self.folder / "checks",
            host=replace(self.host, started=self._began_replay),
            box_type=self.check_box if verifier == self._public else self.job_type.box_type,
        ) as (_, making):
            if search.begin != making.begin:
                raise on.Refused(
                    f"the search is from update {search.begin:,} on, and block {block} begins after {making.begin:,}"
                )
            if search.update:
                # Through the pool, where any arbiter gets them.
                before, after = supplied_states(
                    making, search.update, lambda path: self.client.put_blob(path, through_pool=True)
                )
                self.tell(f"{lease_id}: the states around update {search.update:,} of block {block} are supplied")
                return on.Supplied(lease_id=lease_id, block=block, verifier=verifier, before=before[1], after=after[1])
            states = traced_block(making, points(search.low, search.high))
            self.tell(f"{lease_id}: {len(states)} states of block {block} are stated, up to update {search.high:,}")
            previous = making.block.previous if block == 0 else ""
            return on.Traced(lease_id=lease_id, block=block, verifier=verifier, states=states, previous=previous)

    def _end_check(self) -> None:
        self._replaying = None
        with suppress(OSError):
            boxes = sorted((self.folder / "checks").iterdir(), key=lambda path: path.stat().st_mtime)
            for old in boxes[:-_KEPT_BOXES]:
                remove_tree(old)


def _said(problem: Exception) -> str:
    return problem.message if isinstance(problem, StokerError) else repr(problem)


def _require_site(lease: ShownLease, order: PoolOrder) -> None:
    """Refuse an order of another site than the lease: it would wait for no gang, or not wait for its own."""
    of_order = f"of site {order.site}" if order.sites else "of no gang"
    of_lease = f"of site {lease.site}" if lease.gang else "of no gang"
    if of_order != of_lease:
        raise BadJob(f"its order is {of_order}, and the lease {of_lease}")
