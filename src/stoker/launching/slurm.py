"""Slurm: `slurm:gpu/2x4xa100`, `slurm:me@login:gpu/4xa100`, `slurm:` for the default partition.

What: a batch job of one task a node; each watches its node's ranks (`at_place.py`). The batch shell, which is outside
of the run, requeues the job after a slice and after a run that saved before a preemption or the time limit: Slurm
itself takes a run that left in time for an ended one. `--time` comes from the forecast, and the notice before it from a
save.
Use when: a login node's commands are here or behind SSH, and the nodes see the folder of runs
(`--place-option root=/shared/stoker`). Costs: a few commands at the login node for each question; none in between.
Does not do: heterogeneous jobs, job arrays, several clusters, container images.
Source: sbatch(1), srun(1), scontrol(1), slurm.conf(5) of Slurm 22.05; what a preemption and a time limit do to the
batch shell was tried on it (docs/places/slurm.md).
"""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from stoker.errors import BadSetting, NoDevice, PlaceFailed, PlaceUnreachable, StokerError
from stoker.launching.at_place import LIMIT_OVER, HostState, combined, newest_events, noting_full_disk
from stoker.launching.bundle import secret_values
from stoker.launching.launcher import (
    Handle,
    HostRanks,
    Launcher,
    LaunchTarget,
    Offer,
    Probe,
    Request,
    Submission,
    notice_s,
    require_known,
    seen_now,
    train_command,
    utc_now,
)
from stoker.launching.lines import HOST_SCRIPT, Answer, Line, line_to
from stoker.launching.shipment import Shipped, look, order_file, secrets_input, ship
from stoker.launching.slurm_scheduler import (
    SINFO_FORMAT,
    Partition,
    SlurmJob,
    limits_text,
    nodes_text,
    partition_named,
    phase_of,
    preempting,
    read_accounted_job,
    read_estimate,
    read_job,
    read_partitions,
    refusal,
    seconds_of,
    slurm_time,
)
from stoker.records.codec import loads
from stoker.records.launch import ENDED, LaunchState
from stoker.units import format_seconds

_PASSED_ON = ("account", "qos", "constraint", "reservation", "mem")
_DEFAULTS = {
    "account": ("SBATCH_ACCOUNT",),
    "qos": ("SBATCH_QOS",),
    "constraint": ("SBATCH_CONSTRAINT",),
    "reservation": ("SBATCH_RESERVATION",),
    "mem": ("SBATCH_MEM_PER_NODE", "SBATCH_MEM_PER_CPU", "SBATCH_MEM_PER_GPU"),
    "wckey": ("SBATCH_WCKEY",),
}
"""The user's variables that sbatch may see, by the option that each stands for. sbatch lets a variable win over the
script: one is left out where its option is stated, and all others (partition, GPUs, time, signal, requeue) always."""

QUESTION_TIMEOUT_S = 30.0
"""Longest wait for an answer of Slurm's commands [s]; slurmctld of a large cluster is slow at times."""

PROBE_WAIT_S, PROBE_TIMEOUT_S = 15, 90.0
COMMENT_EVERY_S = 60.0
_SILENT_S, _STOP_PATIENCE_MIN = 120.0, 2
_FIRST_PORT, _NUM_PORTS = 15_000, 15_000
"""Ports in which ranks meet: below those that systems give to outgoing connections, from 32768 on."""

_PREFIX = 'export LC_ALL=C TZ=UTC PATH="$PATH:/usr/local/bin:/opt/slurm/bin:/usr/local/slurm/bin"\n'
_MARK = "==="
"""Begins the lines between the answers of several commands; no line of a record begins like that."""


class SlurmLauncher(Launcher):
    """A Slurm cluster whose commands are on this machine, or on a login node."""

    kind = "slurm"
    syntax = "slurm:[[login@]host:][partition][/[nodes×][devices×]DEVICE][:option=value,…]"
    options = ("account", "qos", "constraint", "reservation", "time", "cpus", "mem", "root", "data")
    limits_time = True

    def parse(self, text: str) -> LaunchTarget:
        """The login node, the partition and the shape: nodes, devices on each, their kind."""
        where, slash, rest = text.strip().partition("/")
        shape, colon, options = rest.partition(":")
        host, has_host, partition = where.rpartition(":")
        if not has_host and "@" in where:
            host, partition = where, ""
        if not re.fullmatch(r"[\w.-]*", partition):
            raise self.unreadable(text, "slurm:gpu/2x4xa100")
        chosen = frozenset(word.strip() for word in options.split(",")) if colon else frozenset()
        read = self.shape_in(text, shape) if slash else (1, 1, "")
        target = self.target(text, f"{host}:{partition}", read, chosen)
        try:
            _options(target, {})
            _line(target)
        except StokerError as error:
            raise NoDevice(f"--on slurm:{text}: {error.message}.", remedy=error.remedy) from error
        return target

    def probe(self, target: LaunchTarget, options: Mapping[str, str]) -> Probe:
        """The scheduler's data on the partition, and its nodes' if they are free for a step of seconds."""
        line, stated = _line(target), _options(target, options)
        cluster = _ask_cluster(line, "")
        partition = cluster.partition(target)
        shape = Shape.of(target, partition, stated)
        facts = {
            "Slurm": f"{cluster.version} on {line.name}",
            "partition": f"{partition.name}: {limits_text(partition)}",
            "nodes": nodes_text(partition.groups),
        }
        if others := preempting(partition, list(cluster.partitions.values())):
            facts["preemption"] = f"jobs of {', '.join(others)} take its nodes; saved, requeued, continued"
        why = partition.why_not(device=shape.device, each=target.devices_each, num_nodes=target.num_nodes)
        if why:
            return Probe(facts=facts, missing=(why + _elsewhere(cluster, target),))
        root = line.absolute(stated.get("root", ".stoker"))
        answer = _ask_nodes(line, shape, root)
        if answer.code == _UNWRITABLE:
            why = f"{root} cannot be written on {line.name} ({answer.last_line()}): give --place-option root=FOLDER"
            return Probe(facts=facts, missing=(why,))
        if answer.code != 0:
            facts["asked"] = f"only the scheduler, since no step could start at once: {answer.last_line()}"
            return Probe(facts=facts, device=shape.model, cores=shape.cpus, place=_place(target, partition))
        reports = _reports(answer.text)
        missing = _missing_on_nodes(reports, root, shape)
        first = reports[0] if reports else {}
        for name in ("python", "driver", "gpu", "disk"):
            if values := sorted({report[name] for report in reports if report.get(name)}):
                facts[name] = ", ".join(values)
        facts["asked"] = ", ".join(sorted(report.get("host", "?") for report in reports))
        identifier = first.get("cpu", "") if shape.device == "cpu" else first.get("gpu", "").partition(" (")[0]
        device = identifier or shape.model
        return Probe(
            facts=facts,
            missing=tuple(missing),
            device=device,
            cores=shape.cpus,
            place=_place(target, partition),
            loop_s=max((float(report.get("loop", "0")) for report in reports), default=0.0),
        )

    def offers(self, request: Request) -> tuple[Offer, ...]:
        """The partitions that have the shape, each with the start that the scheduler estimates for it."""
        target = request.target
        line, stated = _line(target), _options(target, request.options)
        cluster = _ask_cluster(line, "")
        _, named = _address(target)
        candidates = (
            [cluster.partition(target)]
            if named
            else [partition for partition in cluster.partitions.values() if partition.is_up]
        )
        candidates.sort(key=lambda partition: not partition.is_default)
        shapes = []
        for partition in candidates:
            devices = [target.device] if target.device else [name or "gpu" for name in partition.gpu_types] or ["cpu"]
            for device in devices:
                whole = replace(target, device=device)
                if not partition.why_not(device=device, each=target.devices_each, num_nodes=target.num_nodes):
                    shapes.append((partition, Shape.of(whole, partition, stated, request.time_limit_s)))
        if not shapes:
            return ()
        questions = "\n".join(
            f"echo '{_MARK}'; echo '#!/bin/sh' | sbatch --test-only {shlex.join(shape.flags())} 2>&1"
            for _, shape in shapes
        )
        answers = _parts(_slurm(line, f"date +%s\n{questions}\nexit 0", {}))
        now = float(answers[0].strip() or 0)
        result = []
        for (partition, shape), answer in zip(shapes, answers[1:], strict=True):
            estimate = read_estimate(answer)
            if "allocation failure" in answer or "error:" in answer:
                continue  # this user may not use it
            others = preempting(partition, list(cluster.partitions.values()))
            why = [
                "estimated by sbatch --test-only" if estimate else "the scheduler gives no estimate",
                limits_text(partition),
            ]
            why += [f"jobs of {', '.join(others)} may take its nodes"] if others else []
            why += [f"up to {shape.slices} starts, of which each saves and continues"] if shape.slices > 1 else []
            result.append(
                Offer(
                    text=f"{_place(target, partition)}/{_shape_text(target, shape.device)}",
                    num_nodes=target.num_nodes,
                    devices_each=target.devices_each,
                    device=shape.device,
                    starts_in_s=None if estimate is None else max(0.0, estimate[0] - now),
                    price_source="Slurm states no price",
                    why="; ".join(why),
                )
            )
        return tuple(result)

    def script(self, submission: Submission) -> str:
        """The batch script; what the cluster has to be asked for (CPUs, the name of a GPU there) is left to `start`."""
        stated = _options(submission.target, submission.options)
        shape = Shape.of(submission.target, None, stated, submission.time_limit_s, submission.save_s)
        return batch_script(submission, Shipped.of(submission, submission.root), shape)

    def start(self, submission: Submission, tell: Callable[[str], None]) -> Handle:
        """Check the request against the partition, send, and submit the batch script."""
        target = submission.target
        line, stated = _line(target), _options(target, submission.options)
        _require_plain(submission)
        cluster = _ask_cluster(line, submission.run)
        partition = cluster.partition(target)
        shape = Shape.of(target, partition, stated, submission.time_limit_s, submission.save_s)
        if why := partition.why_not(device=shape.device, each=target.devices_each, num_nodes=target.num_nodes):
            raise PlaceFailed(why.rstrip("."), remedy=_elsewhere(cluster, target).strip() or "Ask for less.")
        directory = f"{line.absolute(submission.root)}/runs/{submission.run}"
        if cluster.jobs:
            return _going_on(line, cluster.jobs, directory, submission)
        submission = replace(submission, target=replace(target, device=shape.device))
        began = utc_now("milliseconds")
        shipped = ship(line, submission, look(line, submission), tell=tell)
        handle: Handle = {
            "host": _address(target)[0],
            "directory": directory,
            "root": shipped.root,
            "run": submission.run,
            "submitted_at": began,
            "owner": submission.owner,
            "sent_bytes": shipped.sent_bytes,
        }
        values = secret_values(submission.secrets) | {"STOKER_SECRET": secrets.token_hex(32)}
        try:
            order = order_file(submission, shipped, is_requeued=True, submitted_at=began)
            files = {
                "order.json": order,
                "batch.sh": batch_script(submission, shipped, shape).encode(),
                "handle.json": json.dumps(handle).encode(),
            }
            own = {f"{directory}/launch/{name}": (content, 0o644) for name, content in files.items()}
            line.write_all({_secrets_path(handle): (secrets_input(values), 0o600), **own})
            defaults = [name for option, names in _DEFAULTS.items() if option not in shape.more for name in names]
            answer = _slurm(line, _SUBMIT, {**stated, "partition": partition.name}, directory, *defaults)
        except PlaceUnreachable:
            raise  # it may have been submitted: the same command finds it by its name
        except StokerError:
            line.shell(_FORGET, directory, _secrets_path(handle), check=False)
            raise
        handle["job"] = answer.text.partition(";")[0]
        limit = "" if shape.time_s is None else f", limit {slurm_time(shape.time_s)}"
        tell(f"job {handle['job']} in partition {partition.name}{limit}")
        return handle

    def ranks(self, environ: Mapping[str, str]) -> HostRanks:
        """From the step's variables and those of the batch script.

        Raises:
            PlaceFailed: this is no task of the batch script.
        """
        try:
            job, restarts = int(environ["SLURM_JOB_ID"]), int(environ.get("SLURM_RESTART_COUNT") or 0)
            return HostRanks(
                host=int(environ["SLURM_NODEID"]),
                num_hosts=int(environ["SLURM_STEP_NUM_NODES"]),
                master=environ["STOKER_MASTER"],
                port=meeting_port(job, restarts),
                attempt=str(restarts),
                addresses=tuple(environ.get("STOKER_ADDRESSES", "").split()),
            )
        except KeyError as error:
            raise PlaceFailed(f"{error.args[0]} is not set", remedy="Submit launch/batch.sh with sbatch.") from error

    def state(self, handle: Handle) -> LaunchState:
        """The scheduler's state, made precise by the files of the run's hosts; `unknown` if there is no answer."""
        line = line_to(handle["host"])
        try:
            about = (handle["job"], handle["directory"], _secrets_path(handle))
            answer = line.shell(_PREFIX + _STATE, *about, timeout_s=QUESTION_TIMEOUT_S)
            parts = _parts(answer)
            said, now, hosts = parts[0], float(parts[1].strip()), parts[2:-1]
            job = read_job(said)
            if job is None and "invalid job id" not in said.lower():
                raise refusal(said, line.name, {})
            if job is None:
                job = read_accounted_job(line.shell(_PREFIX + _ACCOUNTED, handle["job"], check=False).text)
        except (PlaceFailed, ValueError, IndexError) as error:
            why = error.message if isinstance(error, PlaceFailed) else f"an answer that cannot be read: {error}"
            return seen_now("unknown", "Slurm gave no answer", why)
        flags = parts[-1].split()
        state = state_of(job, _host_states(hosts, handle["submitted_at"]), is_stopped="stop" in flags, now=now)
        if state.phase in ENDED and "secrets" in flags:
            with suppress(PlaceFailed):
                line.run(["rm", "-f", "--", _secrets_path(handle)])
        free = re.search(r"^free (\d+)$", parts[-1], re.MULTILINE)
        return noting_full_disk(state, handle["directory"], int(free[1]) * 1024) if free else state

    def events(self, handle: Handle, offset: int) -> bytes:
        """The run's log from `offset` on."""
        return line_to(handle["host"]).read(f"{handle['directory']}/events.jsonl", offset)

    def stop(self, handle: Handle) -> None:
        """Cancel the job if it waits, ask it to save if it runs; asked again two minutes later, cancel it."""
        line = line_to(handle["host"])
        _slurm(line, _STOP, {}, handle["job"], handle["directory"], _secrets_path(handle))

    def fetch(self, handle: Handle, into: Path) -> None:
        """The run's directory, but for locks and what says where it was started there."""
        line_to(handle["host"]).fetch_tree(handle["directory"], into)


_STATE = f"""
scontrol show job "$1" -o 2>&1
echo "{_MARK}$(date +%s)"
for f in "$2"/launch/host-*.json; do [ -e "$f" ] && echo "{_MARK}" && cat "$f" && echo; done
echo "{_MARK}"
[ -e "$2/launch/stop" ] && echo stop
[ -e "$3" ] && echo secrets
df -Pk -- "$2" 2>/dev/null | awk 'END {{print "free " $4}}'
exit 0
"""
_ACCOUNTED = 'sacct -n -X -P -D -j "$1" -o State,ExitCode,JobID'
_STOP = f"""
mkdir -p "$2/launch" || exit
if [ -n "$(find "$2/launch/stop" -mmin +{_STOP_PATIENCE_MIN} 2>/dev/null)" ]; then
    said=$(scancel "$1" 2>&1); code=$?
else
    [ -e "$2/launch/stop" ] || : > "$2/launch/stop"
    said=$(scancel --state=PENDING "$1" 2>&1 && scancel --state=SUSPENDED "$1" 2>&1 && scancel --signal=TERM "$1" 2>&1)
    code=$?
fi
case "$said" in *"Invalid job id"*|*"already completing"*|*"already completed"*) code=0;; esac
[ $code = 0 ] || {{ echo "$said" >&2; exit $code; }}
[ -n "$(squeue -h -j "$1" -o %i 2>/dev/null)" ] || rm -f -- "$3"
exit 0
"""
_SUBMIT = """
cd -- "$1" && rm -f launch/stop || exit
shift; defaults=$*
# sbatch hands its whole environment to the job: it gets what it needs itself, and this user's defaults for it.
set -- HOME="$HOME" USER="$(id -un)" LOGNAME="$(id -un)" PATH="$PATH"
for name in SLURM_CONF SLURM_CONF_SERVER SLURM_JWT LD_LIBRARY_PATH $defaults; do
    eval "[ -z \\"\\${$name}\\" ] || set -- \\"\\$@\\" \\"$name=\\${$name}\\""
done
env -i "$@" sbatch --parsable launch/batch.sh
"""
_FORGET = """
rm -f -- "$2" "$1/launch/batch.sh" "$1/launch/handle.json"
[ -e "$1/run.json" ] || { rm -f -- "$1/launch/order.json" "$1/launch/stop"; rmdir -- "$1/launch" "$1"; }
"""
_CLUSTER = f"""
sinfo -h -o '{SINFO_FORMAT}' || exit
echo "{_MARK}"; scontrol show partition -o || exit
echo "{_MARK}"; [ -z "$1" ] || squeue -h -u "$(id -un)" -n "$1" -o '%i|%T|%Z' || exit
echo "{_MARK}"; scontrol show config | sed -n 's/^SLURM_VERSION *= *//p'
"""
_NODE = (
    HOST_SCRIPT
    + """
[ -e "$1" ] && echo "sees yes"
echo "disk $(df -Pk -- "$(dirname -- "$1")" 2>/dev/null | awk 'END {printf "%d", $4 / 1048576}') GiB free"
command -v nvidia-smi >/dev/null 2>&1 &&
    nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader,nounits 2>/dev/null |
    awk -F', ' '{printf "gpu %s (%.0f GiB)\\ndriver %s\\n", $1, $2 / 1024, $3}'
exit 0
"""
)
_UNWRITABLE = 77
_ASK_NODES = f"""
folder=$1; shift
while [ ! -d "$folder" ]; do folder=$(dirname -- "$folder"); done
seen=$(mktemp "$folder/.stoker-seen-XXXXXX") || exit {_UNWRITABLE}
trap 'rm -f -- "$seen"' EXIT
script=$1; shift
srun --quiet --label "$@" sh -c "$script" sh "$seen"
"""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A job's request to a partition, in Slurm's options.

    Attributes:
        device: `cpu`, a GPU as the request names it, or `gpu` for any.
        model: the GPU as the cluster names it; "" for a CPU, or if there is no name.
        gres: for `--gres`; "" for a CPU.
        cpus: CPUs of each node; 0: the cluster's default.
        time_s: longest time of one start [s]; None: the partition's default.
        notice_s: time before its end at which the run is asked to save [s].
        slices: number of starts that the whole time takes, which is an upper bound.
        more: further options by name, as Slurm names them.
    """

    partition: str
    num_nodes: int
    device: str
    model: str = ""
    gres: str = ""
    cpus: int = 0
    time_s: float | None = None
    notice_s: float
    slices: int = 1
    more: Mapping[str, str]

    @classmethod
    def of(
        cls,
        target: LaunchTarget,
        partition: Partition | None,
        options: Mapping[str, str],
        time_limit_s: float | None = None,
        save_s: float = 30.0,
    ) -> Shape:
        """The shape of a target in a partition; None: what only the cluster knows is left open."""
        device = target.device or ("cpu" if partition is not None and not partition.gpu_types else "gpu")
        model, cpus = ("" if device in {"cpu", "gpu"} else device), _count(options.get("cpus", "0"), "cpus")
        if partition is not None and device != "cpu":
            model = partition.gpu_type(device) or ""
        groups = partition.fitting(device=device, each=target.devices_each) if partition is not None else []
        if not cpus and groups:
            # A GPU brings its share of the node's CPUs; a CPU is the whole node.
            all_gpus = max(1, sum(groups[0].gpus.values()))
            cpus = groups[0].cpus if device == "cpu" else max(1, groups[0].cpus * target.devices_each // all_gpus)
        stated = seconds_of(options["time"]) if "time" in options else None
        whole = stated or time_limit_s
        longest = partition.max_time_s if partition is not None else None
        time_s = whole if longest is None or whole is None else min(whole, longest)
        limit = time_s or (partition.default_time_s or longest if partition is not None else None)
        notice = notice_s(save_s, None if limit is None else math.ceil(limit / 60) * 60)
        usable = None if time_s is None else max(1.0, time_s - notice)
        return cls(
            partition=partition.name if partition is not None else _address(target)[1],
            num_nodes=target.num_nodes,
            device=device,
            model=model,
            cpus=cpus,
            time_s=time_s,
            notice_s=notice,
            gres="" if device == "cpu" else ":".join(filter(None, ("gpu", model, str(target.devices_each)))),
            slices=1 if usable is None or whole is None or whole <= (time_s or whole) else math.ceil(whole / usable),
            more={name: options[name] for name in _PASSED_ON if name in options},
        )

    def flags(self) -> list[str]:
        """Options of sbatch and srun that say it, but for what only a batch job has."""
        options = [f"--partition={self.partition}"] if self.partition else []
        options += [f"--nodes={self.num_nodes}", "--ntasks-per-node=1"]
        options += [f"--cpus-per-task={self.cpus}"] if self.cpus else []
        options += [f"--gres={self.gres}"] if self.gres else []
        options += [f"--time={slurm_time(self.time_s)}"] if self.time_s is not None else []
        return [*options, *(f"--{name}={value}" for name, value in self.more.items())]


def batch_script(submission: Submission, shipped: Shipped, shape: Shape) -> str:
    """The batch script of a run, for people as well."""
    target, directory = submission.target, shipped.directory
    options = [f"--job-name={submission.run}", *shape.flags()]
    options += [
        "--requeue",
        "--open-mode=append",
        f"--signal=TERM@{shape.notice_s:.0f}",
        f"--chdir={directory}",
        f"--output={directory}/launch/slurm-%j.log",
    ]
    notes = [
        f"the run is asked to save {format_seconds(shape.notice_s)} before the time limit; another start continues it"
    ]
    if shape.slices > 1:
        longest = format_seconds(shape.time_s or 0)
        notes.append(f"jobs of the partition end after {longest}: up to {shape.slices} starts are forecast")
    if not shape.cpus:
        notes.append("CPUs of each node, and a GPU's name there, are filled in from sinfo when it is submitted")
    # A line of a setting is a comment too: sbatch reads no #SBATCH behind the first command.
    command = train_command(submission, "--run-dir", directory)
    step = f"--ntasks-per-node=1 {f'--cpus-per-task={shape.cpus} ' if shape.cpus else ''}--cpu-bind=none"
    return "\n".join(
        [
            "#!/bin/bash",
            f"# {submission.run} on {_shape_text(target, shape.device)}, submitted by Stoker. Each node runs",
            f"#     {command}",
            *(f"#SBATCH {option}" for option in options),
            *(f"# {note}" for note in notes),
            "",
            f"run={shlex.quote(directory)}",
            f"python={shlex.quote(shipped.python)}",
            f"secrets={shlex.quote(_secrets_path({'root': shipped.root, 'run': submission.run}))}",
            f"export PYTHONPATH={shlex.quote(shipped.stoker)}",
            _BATCH.format(step=step, comment_every=f"{COMMENT_EVERY_S:.0f}").rstrip(),
            "",
        ]
    )


_BATCH = """
unset SLURM_JWT  # of the login node, for the submission: it would be over before the job asks to be requeued

# Ranks meet on the first node; the port follows from the number of the job.
STOKER_ADDRESSES=$(for node in $(scontrol show hostnames "$SLURM_JOB_NODELIST"); do
    scontrol show node "$node" | sed -n 's/.*NodeAddr=\\([^ ]*\\).*/\\1/p'
done)
STOKER_MASTER=$(echo "$STOKER_ADDRESSES" | head -n 1)
export STOKER_MASTER STOKER_ADDRESSES

# How far it is, for `squeue -o %k`.
"$python" -m stoker.launching.slurm comment "$run" {comment_every} > /dev/null 2>&1 &
comment=$!

[ -e "$run/launch/stop" ] && {{ rm -f "$secrets"; exit 130; }}
[ -e "$secrets" ] || secrets=/dev/null
srun {step} --kill-on-bad-exit=0 --wait=0 \\
    "$python" -m stoker.launching.at_place run "$run" --secrets < "$secrets"
code=$?
kill $comment 2> /dev/null

# 75: a slice is over, or ranks were lost. 130, and 143 before it had begun to train: it saved before a preemption or
# the time limit. Slurm requeues neither by itself. scancel ends this shell before it gets here.
if [ $code = 75 ] || [ $code = 130 ] || [ $code = 143 ]; then
    for attempt in $(seq 60); do
        [ -e "$run/launch/stop" ] && break
        scontrol requeue "$SLURM_JOB_ID" && sleep 300
        sleep 5
    done
fi
[ "$secrets" = /dev/null ] || rm -f "$secrets"
exit $code
"""


@dataclass(frozen=True, kw_only=True)
class _Cluster:
    """The scheduler's data: its partitions, and this user's jobs of a name as (number, state, directory)."""

    host: str
    version: str
    partitions: Mapping[str, Partition]
    jobs: tuple[tuple[str, str, str], ...]

    def partition(self, target: LaunchTarget) -> Partition:
        """The partition that a target names, or the default one; raises PlaceFailed."""
        return partition_named(_address(target)[1], self.partitions, self.host)


def _ask_cluster(line: Line, run: str) -> _Cluster:
    answer = _slurm(line, _CLUSTER, {}, run)
    sinfo, details, jobs, version = _parts(answer)
    rows = [tuple(row.split("|", 2)) for row in jobs.split("\n") if row.count("|") >= 2]
    return _Cluster(
        host=line.name,
        version=version.strip(),
        partitions=read_partitions(sinfo, details),
        jobs=tuple((number, state, folder) for number, state, folder in rows),
    )


def _slurm(line: Line, script: str, about: Mapping[str, str], *arguments: str) -> Answer:
    """Run a script of Slurm's commands; raises what they say if it fails."""
    answer = line.shell(_PREFIX + script, *arguments, timeout_s=QUESTION_TIMEOUT_S, check=False)
    if answer.code != 0:
        raise refusal(answer.stderr or answer.text, line.name, about)
    return answer


def _parts(answer: Answer) -> list[str]:
    """The text before, between and after the marks, which begin lines."""
    return re.split(f"^{_MARK}", answer.text, flags=re.MULTILINE)


def _ask_nodes(line: Line, shape: Shape, root: str) -> Answer:
    """Facts of as many nodes as the job needs, from a step that starts at once or not at all."""
    whole = replace(shape, time_s=60.0, cpus=1, gres=re.sub(r"\d+$", "1", shape.gres))
    flags = [*whole.flags(), f"--immediate={PROBE_WAIT_S}", "--job-name=stoker-probe"]
    return line.shell(_PREFIX + _ASK_NODES, root, _NODE, *flags, timeout_s=PROBE_TIMEOUT_S, check=False)


def _reports(text: str) -> list[dict[str, str]]:
    """Each node's answers by word, of a repeated word the first; lines begin with the number of the task."""
    reports: dict[str, dict[str, str]] = {}
    for row in text.splitlines():
        task, _, rest = row.partition(": ")
        word, _, value = rest.partition(" ")
        reports.setdefault(task.strip(), {}).setdefault(word, value.strip())
    return list(reports.values())


def _missing_on_nodes(reports: Sequence[Mapping[str, str]], root: str, shape: Shape) -> list[str]:
    blind = [report.get("host", "?") for report in reports if report.get("sees") != "yes"]
    missing = []
    if blind:
        missing.append(
            f"{', '.join(sorted(set(blind)))} of partition {shape.partition} does not see {root}: give a folder that "
            "the login node and the nodes share, --place-option root=/shared/stoker"
        )
    return missing


def state_of(job: SlurmJob | None, hosts: Sequence[HostState], *, is_stopped: bool, now: float) -> LaunchState:
    """One state of the scheduler's word and the run's own.

    Args:
        job: None: Slurm knows no such job any more, and nothing accounted for it.
        hosts: what the run's hosts wrote.
        is_stopped: the user asked the run to stop.
        now: time at the login node [s since 1970].
    """
    own = combined(hosts) if hosts else None
    if job is None:
        if own is not None and own.phase in ENDED:
            return replace(own, at=utc_now())
        if own is not None and now - (own.at_s or 0.0) < _SILENT_S:
            return seen_now(
                "unknown",
                "Slurm does not know the job, and its hosts gave a sign of life",
                f"last sign of life {own.at}",
            )
        evidence = "Invalid job id" + (f"; last sign of life {own.at}" if own is not None else "; no host ever wrote")
        return seen_now("lost", "Slurm does not know the job any more", evidence)
    phase, why = phase_of(job)
    evidence, code = job.line, None
    # Restart counts identify starts where clocks differ; times do where a start ended before its hosts wrote anything.
    is_of_this_start = own is not None and (
        own.restarts >= job.restarts or job.starts_at is None or (own.at_s or 0.0) >= job.starts_at - 1
    )
    if phase == "starting" and own is not None and is_of_this_start and own.phase not in ENDED:
        phase, why = own.phase, f"{own.why}, {why}" if own.phase == "starting" else own.why
    if phase in {"starting", "running"} and is_stopped:
        phase, why = "saving", "asked to save and leave"
    if phase in ENDED:
        # A host that left for another start says less than the one for which there is none.
        own = combined([host for host in hosts if host.phase != "requeued"] or hosts) if hosts else None
        code = job.exit_code if job.state in {"COMPLETED", "FAILED"} else None
        if own is not None and (own.exit_code == LIMIT_OVER or (phase == "failed" and own.phase in {"failed", "lost"})):
            phase, why, evidence = own.phase, own.why, f"{job.line}: {own.evidence}" if own.evidence else job.line
        elif phase == "stopped" and is_stopped:
            why = "saved and left, as asked" if code else "stopped, as asked"
    starts = max(0.0, job.starts_at - now) if job.starts_at is not None and phase in {"queued", "requeued"} else None
    has_begun = job.starts_at is not None and phase not in {"queued", "requeued"}
    began_at = datetime.fromtimestamp(job.starts_at or 0, UTC).isoformat() if has_begun else ""
    state = seen_now(phase, why, evidence, exit_code=code, starts_in_s=starts, restarts=job.restarts, began_at=began_at)
    # The time of an end is when the hosts released their devices, and not when it was requested.
    return replace(state, at=max(host.at for host in hosts)) if phase in ENDED and hosts else state


def _host_states(texts: Sequence[str], submitted_at: str) -> list[HostState]:
    states = []
    for text in texts:
        with suppress(ValueError):  # being written
            state = loads(text.strip(), HostState)
            if state.submitted_at == submitted_at:
                states.append(state)
    return states


def meeting_port(job: int, restarts: int) -> int:
    """The port in which a job's ranks meet: another one in each start, whose predecessor may linger."""
    return _FIRST_PORT + (job * 7 + restarts) % _NUM_PORTS


def _going_on(line: Line, jobs: Sequence[tuple[str, str, str]], directory: str, submission: Submission) -> Handle:
    """The handle of a run that is queued or runs already; raises PlaceFailed if the job is another one's."""
    text = line.read(f"{directory}/launch/handle.json")
    own = [number for number, _, folder in jobs if folder == directory]
    with suppress(ValueError):
        handle: Handle = json.loads(text or b"{}")
        if own and handle.get("owner") == submission.owner:
            return {**handle, "job": own[0]}
    number, state, folder = jobs[0]
    raise PlaceFailed(
        f"a job named {submission.run} is in the queue of {line.name} already: job {number}, {state}, of {folder}",
        remedy=f"`scancel {number}` ends it; or give this run another name: --run-dir runs/NAME.",
    )


def _options(target: LaunchTarget, given: Mapping[str, str]) -> dict[str, str]:
    """Options of the word and of `--place-option`, which counts more.

    Raises:
        BadSetting: one is unknown, or its value cannot be one.
    """
    options = {name: value for name, _, value in (word.partition("=") for word in target.options)} | dict(given)
    require_known("Slurm", options, SlurmLauncher.options)
    for name, value in options.items():
        if not re.fullmatch(r"[\w.,:&|@*+/~()\[\]-]+", value):
            raise BadSetting(f"option {name}={value!r} cannot be a value for Slurm")
    if "time" in options:
        try:
            seconds_of(options["time"])
        except ValueError:
            remedy = "Write hours:minutes:seconds, or days-hours:minutes:seconds."
            raise BadSetting(f"option time={options['time']!r} is no time", remedy=remedy) from None
    return options


def _require_plain(submission: Submission) -> None:
    """Refuse names that a batch script could not state."""
    for what, text in (("the run's name", submission.run), ("root", submission.root)):
        if not re.fullmatch(r"[\w./+@~-]+", text):
            raise PlaceFailed(
                f"{what} {text!r} has characters that a batch script cannot state",
                remedy="Use letters, digits, dots, dashes and underscores.",
            )


def _elsewhere(cluster: _Cluster, target: LaunchTarget) -> str:
    """Partitions that have the shape, as a remedy."""
    fits = [
        partition.name
        for partition in cluster.partitions.values()
        if not partition.why_not(device=target.device or "cpu", each=target.devices_each, num_nodes=target.num_nodes)
    ]
    return f" It fits in partition {', '.join(fits)}." if fits else ""


def _place(target: LaunchTarget, partition: Partition) -> str:
    """Kind, login node and partition, also where the word leaves the partition open."""
    host, _ = _address(target)
    return f"slurm:{f'{host}:' if host else ''}{partition.name}"


def _shape_text(target: LaunchTarget, device: str) -> str:
    """The part of a word behind the place: nodes, devices, options."""
    nodes = f"{target.num_nodes}x" if target.num_nodes > 1 else ""
    each = f"{target.devices_each}x" if target.devices_each > 1 or target.num_nodes > 1 else ""
    options = ",".join(sorted(target.options))
    return f"{nodes}{each}{device}{f':{options}' if options else ''}"


def _address(target: LaunchTarget) -> tuple[str, str]:
    """Login node ("" for this machine) and partition ("" for the default)."""
    host, _, partition = target.address.rpartition(":")
    return host, partition


def _line(target: LaunchTarget) -> Line:
    return line_to(_address(target)[0])


def _secrets_path(handle: Handle) -> str:
    """Outside of the run's directory, which is copied home."""
    return f"{handle['root']}/secrets/{handle['run']}.json"


def _count(text: str, what: str) -> int:
    if not text.isdigit():
        raise BadSetting(f"option {what}={text!r} is no number")
    return int(text)


def progress_text(events: Path) -> str:
    """How far a run is, from the end of its log: `37 %, 12 of 32 samples, loss 0.12, 40 s to go`; "" if unknown."""
    for event in newest_events(events, "progress"):
        with suppress(ValueError, KeyError, TypeError):
            fields = event["fields"]
            done, whole, eta = int(fields["samples"]), int(fields["total_samples"]), fields.get("eta_s")
            left = f", {format_seconds(eta)} to go" if isinstance(eta, int | float) else ""
            loss = float(fields["loss"])
            return f"{100 * done // max(1, whole)} %, {done:,} of {whole:,} samples, loss {loss:.4g}{left}"
    return ""


def main(arguments: Sequence[str]) -> None:
    """`comment DIR SECONDS`: keep the job's comment at the run's progress, until this process is ended."""
    directory, every_s, sent = Path(arguments[1]), float(arguments[2]), ""
    while True:
        text = progress_text(directory / "events.jsonl")
        if text not in {"", sent}:
            sent = text
            with suppress(OSError, subprocess.TimeoutExpired):
                subprocess.run(
                    ["scontrol", "update", f"jobid={os.environ['SLURM_JOB_ID']}", f"comment={text}"],
                    stdin=subprocess.DEVNULL,
                    check=False,
                    timeout=QUESTION_TIMEOUT_S,
                )
        time.sleep(every_s)


LAUNCHER = SlurmLauncher()

if __name__ == "__main__":
    main(sys.argv[1:])
