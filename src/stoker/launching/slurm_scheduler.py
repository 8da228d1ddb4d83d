"""Answers of Slurm's commands as values: partitions, nodes and their GPUs, jobs, errors; nothing here runs a command.

Text is read, not JSON: `squeue --json` needs a plug-in that many clusters lack, and its fields changed with versions.
Source: sinfo(1), scontrol(1), sacct(1), sbatch(1) of Slurm 22.05 to 25.05.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from stoker.errors import PlaceFailed, PlaceUnreachable, nearest
from stoker.launching.launcher import ASK_AGAIN, is_model
from stoker.records.launch import LaunchPhase
from stoker.units import format_seconds

SINFO_FORMAT = "%P|%a|%l|%L|%s|%D|%c|%m|%T|%f|%G"
"""Of `sinfo -h -o`: partition, availability, longest and default time, sizes, nodes, CPUs, MiB, state, features, GPUs.
"""

_GPU = re.compile(r"gpu:(?:([^:(),]+):)?(\d+)(?![\w.])")
_DOWN = ("down", "drain", "fail", "maint", "unknown", "inval", "perfctrs", "power", "future")
_UNLIMITED = {"infinite", "unlimited", "n/a", ""}


def seconds_of(text: str) -> float | None:
    """Seconds of one of Slurm's durations; None: no limit, or none stated.

    >>> seconds_of("1-00:30:00"), seconds_of("10:00"), seconds_of("infinite")
    (88200.0, 600.0, None)
    """
    if text.strip().lower() in _UNLIMITED:
        return None
    days, dash, rest = text.strip().rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if dash:
        parts = [*parts, 0, 0][:3]  # days-hours[:minutes[:seconds]]
    elif len(parts) == 1:
        parts = [0, *parts, 0]  # minutes
    hours, minutes, seconds = ([0] * 3 + parts)[-3:]
    return float(int(days or 0) * 86400 + hours * 3600 + minutes * 60 + seconds)


def slurm_time(duration_s: float) -> str:
    """A duration for `--time`, rounded up to minutes, which Slurm counts in.

    >>> slurm_time(61), slurm_time(90000)
    ('00:02:00', '1-01:00:00')
    """
    days, minutes = divmod(max(1, math.ceil(duration_s / 60)), 24 * 60)
    hours = f"{minutes // 60:02d}:{minutes % 60:02d}:00"
    return f"{days}-{hours}" if days else hours


@dataclass(frozen=True, kw_only=True)
class NodeGroup:
    """Equal nodes of a partition.

    Attributes:
        count: nodes.
        cpus, memory_mib: of each.
        gpus: number on each by type; the type is "" where the cluster names none.
        state: in Slurm's words.
    """

    count: int
    cpus: int
    memory_mib: int
    state: str
    features: tuple[str, ...] = ()
    gpus: Mapping[str, int] = field(default_factory=dict)

    def num_gpus(self, gpu_type: str) -> int:
        """GPUs of a type on each node; of "" those of the commonest."""
        return self.gpus.get(gpu_type, 0) if gpu_type else max(self.gpus.values(), default=0)

    @property
    def is_usable(self) -> bool:
        """Whether jobs start there, now or later."""
        return not self.state.endswith("*") and not any(word in self.state.lower() for word in _DOWN)


@dataclass(frozen=True, kw_only=True)
class Partition:
    """A partition.

    Attributes:
        max_time_s, default_time_s: of its jobs [s]; None: none stated.
        max_nodes: of a job; None: no limit.
        preempt_mode, grace_s: what becomes of its jobs when others take their nodes, and their time to leave [s].
        tier: jobs of a higher tier take nodes from lower ones where preemption is by partition.
    """

    name: str
    is_default: bool = False
    is_up: bool = True
    max_time_s: float | None = None
    default_time_s: float | None = None
    max_nodes: int | None = None
    preempt_mode: str = ""
    grace_s: float = 0.0
    tier: int = 1
    groups: tuple[NodeGroup, ...] = ()

    @property
    def gpu_types(self) -> tuple[str, ...]:
        """Types of GPUs on usable nodes, each once; "" for GPUs without one."""
        return tuple(dict.fromkeys(name for group in self.groups if group.is_usable for name in group.gpus))

    def gpu_type(self, device: str) -> str | None:
        """How this cluster writes a model of GPU: "" for any (`gpu`, or where they have no names), None for none."""
        types = self.gpu_types
        if device == "gpu":
            return None if not types else types[0] if len(types) == 1 else ""
        exact = [name for name in types if name and is_model(name, device)]
        return exact[0] if exact else "" if "" in types else None

    def fitting(self, *, device: str, each: int) -> list[NodeGroup]:
        """Usable nodes with so many devices of a kind (`cpu`: any node; `gpu`: any GPU), the largest group first."""
        usable = [group for group in self.groups if group.is_usable]
        if device != "cpu":
            gpu_type = self.gpu_type(device)
            usable = [group for group in usable if gpu_type is not None and group.num_gpus(gpu_type) >= each]
        return sorted(usable, key=lambda group: -group.count)

    def why_not(self, *, device: str, each: int, num_nodes: int) -> str:
        """Why a shape can never run here, as a sentence; "" if it can."""
        if not self.is_up:
            return f"Partition {self.name} takes no jobs now."
        if self.max_nodes is not None and num_nodes > self.max_nodes:
            return f"Partition {self.name} allows {self.max_nodes} nodes a job; {num_nodes} are asked for."
        if device != "cpu" and self.gpu_type(device) is None:
            has = ", ".join(self.gpu_types) or "no GPUs"
            return f"Partition {self.name} has no {device}; it has {has}."
        count = sum(group.count for group in self.fitting(device=device, each=each))
        if count >= num_nodes:
            return ""
        if device == "cpu":
            return f"Partition {self.name} has {count} usable nodes; {num_nodes} are asked for."
        gpu_type = self.gpu_type(device) or ""
        usable = [group for group in self.groups if group.is_usable and group.num_gpus(gpu_type)]
        most = max((group.num_gpus(gpu_type) for group in usable), default=0)
        return (
            f"Partition {self.name} has {sum(group.count for group in usable)} nodes with at most {most} × "
            f"{gpu_type or 'GPU'} each; {num_nodes} with {each} each are asked for."
        )


def read_partitions(sinfo: str, details: str) -> dict[str, Partition]:
    """Partitions by name.

    Args:
        sinfo: output of `sinfo -h -o SINFO_FORMAT`.
        details: output of `scontrol show partition -o`.
    """
    more = {
        fields["PartitionName"]: fields
        for line in details.splitlines()
        if "PartitionName" in (fields := fields_of(line))
    }
    partitions: dict[str, Partition] = {}
    for line in sinfo.splitlines():
        parts = line.split("|", 10)
        if len(parts) < 11:
            continue
        label, available, longest, default, sizes, count, cpus, memory, state, features, gres = parts
        name, about = label.rstrip("*"), more.get(label.rstrip("*"), {})
        group = NodeGroup(
            count=int(count),
            cpus=_number(cpus),
            memory_mib=_number(memory),
            state=state,
            gpus=gpus_of(gres),
            features=tuple(word for word in features.split(",") if word not in {"", "(null)"}),
        )
        if name in partitions:
            before = partitions[name]
            partitions[name] = Partition(**{**vars(before), "groups": (*before.groups, group)})
            continue
        most = sizes.rpartition("-")[2]
        partitions[name] = Partition(
            name=name,
            is_default=label.endswith("*"),
            is_up=available == "up",
            max_time_s=seconds_of(longest),
            default_time_s=seconds_of(default),
            max_nodes=int(most) if most.isdigit() else None,
            preempt_mode=about.get("PreemptMode", ""),
            grace_s=float(_number(about.get("GraceTime", "0"))),
            tier=_number(about.get("PriorityTier", "1")),
            groups=(group,),
        )
    return partitions


def gpus_of(gres: str) -> dict[str, int]:
    """GPUs on a node by type.

    >>> gpus_of("gpu:a100:4(S:0-1),gpu:t4:2,nvme:1"), gpus_of("gpu:2"), gpus_of("(null)")
    ({'a100': 4, 't4': 2}, {'': 2}, {})
    """
    gpus: dict[str, int] = {}
    for kind, count in _GPU.findall(gres):
        gpus[kind] = gpus.get(kind, 0) + int(count)
    return gpus


def partition_named(name: str, partitions: Mapping[str, Partition], host: str) -> Partition:
    """A partition; "" is the default one.

    Raises:
        PlaceFailed: there is none; the nearest is named.
    """
    if name in partitions:
        return partitions[name]
    if name:
        raise PlaceFailed(f"there is no partition {name!r} on {host}", remedy=nearest(name, partitions))
    default = next((partition for partition in partitions.values() if partition.is_default), None)
    if default is None:
        raise PlaceFailed(f"{host} has no default partition", remedy=f"Name one: {', '.join(partitions)}.")
    return default


def fields_of(line: str) -> dict[str, str]:
    """`Key=value` fields of a line of scontrol, the first of each key; values end at the next blank.

    >>> fields_of("JobId=7 JobName=x JobState=PENDING Reason=Resources")["Reason"]
    'Resources'
    """
    fields: dict[str, str] = {}
    for word in line.split():
        key, equal, value = word.partition("=")
        if equal:
            fields.setdefault(key, value)
    return fields


@dataclass(frozen=True, kw_only=True)
class SlurmJob:
    """A job as the scheduler knows it.

    Attributes:
        state: in Slurm's words, without flags.
        reason: why it waits, or ended; "" for none.
        exit_code, signal: of the batch script.
        restarts: number of times it was requeued.
        starts_at: estimated or real start [s since 1970]; None: unknown.
        preempted_at: as text; "" if no other job takes its nodes.
        nodes: list of nodes; "" before it starts.
        line: evidence: what Slurm said, in short.
    """

    state: str
    reason: str = ""
    exit_code: int = 0
    signal: int = 0
    restarts: int = 0
    starts_at: float | None = None
    preempted_at: str = ""
    nodes: str = ""
    line: str = ""


_EVIDENCE = ("JobId", "JobState", "Reason", "Restarts", "ExitCode", "StartTime", "PreemptTime")


def read_job(text: str) -> SlurmJob | None:
    """The job in the output of `scontrol show job ID -o` with TZ=UTC; None if there is none in it."""
    line = next((line for line in text.splitlines() if line.startswith("JobId=")), None)
    if line is None:
        return None
    fields = fields_of(line)
    code, _, number = fields.get("ExitCode", "0:0").partition(":")
    preempted = fields.get("PreemptTime", "None")
    return SlurmJob(
        state=fields.get("JobState", ""),
        reason=_stated(fields.get("Reason", "")),
        exit_code=_number(code),
        signal=_number(number),
        restarts=_number(fields.get("Restarts", "0")),
        nodes=_stated(fields.get("NodeList", "")),
        starts_at=time_of(fields.get("StartTime", "")),
        preempted_at="" if preempted in {"None", "Unknown", "N/A"} else preempted,
        line=" ".join(f"{key}={fields[key]}" for key in _EVIDENCE if key in fields),
    )


def read_accounted_job(text: str) -> SlurmJob | None:
    """The job in the output of `sacct -n -X -P -D -o State,ExitCode,JobID`, a row for each start; None without rows."""
    rows = [line.split("|") for line in text.splitlines() if line.count("|") == 2]
    if not rows:
        return None
    state, exit_code, _ = rows[-1]
    code, _, number = exit_code.partition(":")
    return SlurmJob(
        state=state.split()[0] if state else "",
        exit_code=_number(code),
        signal=_number(number),
        restarts=len(rows) - 1,
        line=f"sacct: State={state} ExitCode={exit_code}",
    )


def time_of(text: str) -> float | None:
    """A time of Slurm's, in UTC, as seconds since 1970; None for Unknown or N/A."""
    try:
        return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()
    except ValueError:
        return None


_PHASES: dict[str, tuple[LaunchPhase, str]] = {
    "CONFIGURING": ("starting", "nodes are made ready"),
    "COMPLETED": ("finished", "trained to its end"),
    "CANCELLED": ("stopped", "cancelled by scancel"),
    "TIMEOUT": ("stopped", "the time limit ended it before it had left"),
    "DEADLINE": ("stopped", "its deadline ended it"),
    "PREEMPTED": ("stopped", "ended for a job of higher priority; this partition does not requeue"),
    "SUSPENDED": ("preempted", "suspended for another job; it goes on by itself"),
    "STOPPED": ("preempted", "suspended by a signal of Slurm"),
    "NODE_FAIL": ("lost", "a node failed"),
    "BOOT_FAIL": ("lost", "a node did not start"),
    "LAUNCH_FAILED": ("lost", "a node could not start it"),
    "OUT_OF_MEMORY": ("failed", "it took more memory than it had asked for"),
    "REVOKED": ("stopped", "a sibling of the job runs elsewhere"),
    "SPECIAL_EXIT": ("queued", "held after it was requeued: `scontrol release` lets it go on"),
    "REQUEUE_HOLD": ("queued", "held after it was requeued: `scontrol release` lets it go on"),
}
"""Phase and reason of states that say all; PENDING, RUNNING, COMPLETING and FAILED need more."""

_REASONS = {
    "None": "the scheduler has not looked at it yet",
    "Resources": "waits for nodes to become free",
    "Priority": "jobs of higher priority are before it",
    "BeginTime": "was requeued, and may start a little later",
    "Dependency": "waits for another job",
    "JobHeldUser": "is held: `scontrol release` lets it go on",
    "JobHeldAdmin": "is held by an administrator",
    "PartitionDown": "its partition takes no jobs now",
    "PartitionInactive": "its partition takes no jobs now",
    "PartitionTimeLimit": "asks for more time than its partition allows",
    "PartitionNodeLimit": "asks for more nodes than its partition allows",
    "PartitionConfig": "asks for more than its partition allows",
    "ReqNodeNotAvail": "the nodes that it needs are down or reserved",
    "NodeDown": "a node that it needs is down",
    "Reservation": "waits for its reservation",
    "BadConstraints": "no nodes have what it asks for",
    "AssocGrpGRES": "its account has its share of GPUs in use",
    "QOSMaxGRESPerUser": "this user has the GPUs in use that its QoS allows",
    "QOSMaxJobsPerUserLimit": "this user has as many jobs as its QoS allows",
    "InvalidAccount": "its account may not use this partition",
    "InvalidQOS": "its QoS may not use this partition",
}
_IO_SIGNAL = 53
"""The signal that slurmd reports for a job whose output it could not open. Source: slurm_errno.h, ESLURMD_IO_ERROR."""


def phase_of(job: SlurmJob) -> tuple[LaunchPhase, str]:
    """Phase and reason by the scheduler alone; of a running job `starting`, since Slurm does not know what it does."""
    if job.state == "PENDING":
        reason = job.reason or "None"
        text = _REASONS.get(reason) or _REASONS.get(reason.partition(",")[0]) or f"waits ({reason})"
        return ("requeued", f"{text}; start {job.restarts + 1}") if job.restarts else ("queued", text)
    if job.state in {"RUNNING", "SIGNALING", "STAGE_OUT", "RESIZING"}:
        if job.preempted_at:
            return "preempted", "a job of higher priority takes its nodes; it saves and leaves"
        return "starting", f"on {job.nodes}" if job.nodes else "on its nodes"
    if job.state == "COMPLETING":
        return "saving", "leaves its nodes"
    if job.state == "FAILED":
        if job.exit_code == 0 and job.signal == _IO_SIGNAL:
            return "failed", "the nodes do not see the run's directory: Slurm could not open the job's output there"
        if job.exit_code == STOPPED:
            return "stopped", "saved and left"
        return "failed", f"ended with exit code {job.exit_code}" + (f", signal {job.signal}" if job.signal else "")
    return _PHASES.get(job.state, ("unknown", f"Slurm says {job.state or 'nothing'}"))


STOPPED = 130
"""Exit code of a run that saved and left."""


_NO_ANSWER = (
    "unable to contact slurm controller",
    "socket timed out",
    "connection refused",
    "zero bytes were transmitted",
    "slurm_load",
    "munge",
    "authentication",
    "unable to establish",
    "communication connection failure",
    "slurm backup controller in standby",
    "protocol authentication",
)
_REFUSALS: tuple[tuple[str, str, str], ...] = (
    (
        "invalid account",
        "the account {account} may not use partition {partition}",
        "`sacctmgr show assoc user=$USER` lists yours; --place-option account=NAME.",
    ),
    ("invalid partition name", "there is no partition {partition!r}", "`sinfo -s` lists them."),
    ("invalid qos", "the QoS {qos} may not be used", "`sacctmgr show qos` lists them; --place-option qos=NAME."),
    ("invalid feature", "no node has the feature {constraint}", "`sinfo -o '%P %f'` lists them."),
    ("user's group not permitted", "this user may not use partition {partition}", "Name another partition."),
    (
        "requested node configuration is not available",
        "partition {partition} has no nodes with what is asked for",
        "`sinfo -o '%P %D %c %m %G'` lists what it has.",
    ),
    ("requested time limit is invalid", "the time limit is more than allowed", "Give less with --place-option time=…"),
    ("job violates accounting", "a limit of the account or QoS forbids the job", "Ask for less, or name another."),
    ("node count specification invalid", "partition {partition} allows no job of so many nodes", "Ask for fewer."),
    ("sinfo: not found", "Slurm's commands were not found", "Put them into PATH in ~/.bashrc there."),
    ("sbatch: not found", "Slurm's commands were not found", "Put them into PATH in ~/.bashrc there."),
)


def refusal(stderr: str, host: str, about: Mapping[str, str]) -> PlaceFailed:
    """The error for what a command of Slurm said when it failed.

    >>> refusal("sbatch: error: Batch job submission failed: Invalid qos specification", "this machine",
    ...         {"qos": "long"}).message
    'the QoS long may not be used on this machine: Invalid qos specification'
    """
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    said = " ".join(lines).lower()
    last = lines[-1].rpartition("error: ")[2].rpartition("failed: ")[2] if lines else "no reason was given"
    for sign, sentence, remedy in _REFUSALS:
        if sign in said:
            known = {"account": "(default)", "partition": "", "qos": "(default)", "constraint": "", **about}
            return PlaceFailed(f"{sentence.format(**known)} on {host}: {last}", remedy=remedy)
    if any(sign in said for sign in _NO_ANSWER):
        munge = next((line for line in lines if "munge" in line.lower()), "")
        what = "munge, which authenticates, does not answer" if munge else "slurmctld does not answer"
        return PlaceUnreachable(f"Slurm on {host}: {what}: {munge or last}", remedy=ASK_AGAIN)
    return PlaceFailed(f"Slurm on {host} refused: {last}")


def read_estimate(text: str) -> tuple[float, str] | None:
    """Start [s since 1970] and nodes by `sbatch --test-only` with TZ=UTC; None if it gave none."""
    match = re.search(r"to start at (\S+) using \d+ processors on (?:nodes )?(\S+)", text)
    when = time_of(match[1]) if match else None
    return (when, match[2]) if match and when is not None else None


def limits_text(partition: Partition) -> str:
    """The limits of a partition, as text."""
    longest = "no time limit" if partition.max_time_s is None else f"at most {format_seconds(partition.max_time_s)}"
    preempted = ""
    if partition.preempt_mode not in {"", "OFF"}:
        preempted = (
            f"; jobs may be preempted ({partition.preempt_mode.lower()}, {format_seconds(partition.grace_s)} to leave)"
        )
    return f"{longest}{preempted}"


def nodes_text(groups: Iterable[NodeGroup]) -> str:
    """Nodes in words: `2 × (4 CPUs, 5.9 GiB, 4 × a100) idle`."""
    return ", ".join(
        f"{group.count} × ({group.cpus} CPUs, {group.memory_mib / 1024:.1f} GiB"
        + "".join(f", {count} × {name or 'GPU'}" for name, count in group.gpus.items())
        + f") {group.state}"
        for group in groups
    )


def preempting(partition: Partition, partitions: Sequence[Partition]) -> list[str]:
    """Names of partitions whose jobs may take the nodes of this one's."""
    if partition.preempt_mode in {"", "OFF"}:
        return []
    return [one.name for one in partitions if one.tier > partition.tier]


def _number(text: str) -> int:
    digits = re.match(r"\d+", text.strip())
    return int(digits[0]) if digits else 0


def _stated(text: str) -> str:
    return "" if text in {"None", "(null)", "N/A"} else text
