"""The state of a run on Kubernetes, from its Job (or JobSet, TrainJob), its pods, and its place in Kueue's queue.

Plain values in, a LaunchState out: a phase, its reason, and the condition or status that says so. Nothing here asks a
server.
Source: batch/v1 JobStatus and pod status of Kubernetes 1.37; conditions of JobSet, TrainJob and Kueue's Workload.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from stoker.launching.at_place import LIMIT_OVER
from stoker.launching.kubernetes.cluster_api import Object
from stoker.launching.kubernetes.manifests import CONTAINER, EXIT_AGAIN
from stoker.launching.launcher import seen_now
from stoker.records.codec import read_object
from stoker.records.launch import LaunchPhase, LaunchState

_STUCK = frozenset(
    (
        *("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"),
        *("CreateContainerConfigError", "CreateContainerError", "RunContainerError"),
    )
)
"""Reasons for which a container waits that do not pass by themselves."""


_REFUSED = "FailedCreate"
"""Reason of the event of a controller whose pod the API server does not take."""

_SHORT_OF = frozenset({"FailedMount", "FailedAttachVolume", "FailedCreatePodSandBox"})
"""Reasons of events of a pod whose container cannot begin."""

_SEEN_OFTEN = 3
"""From so many repetitions on they count: a volume that is just being attached says the same once or twice."""

_REMEDIES = (
    ("must specify", "give --place-option memory=AMOUNT and cpus=N"),
    ("violates PodSecurity", "give --place-option user=UID, a user other than root"),
    ("exceeded quota", "it starts once others have ended, or ask for less"),
)
"""What to do about a refused pod, by a part of the refusal."""


def condition(thing: Object, kind: str) -> dict[str, Any] | None:
    """A condition of an object that is true; None if there is none."""
    for entry in thing.get("status", {}).get("conditions") or []:
        if entry.get("type") == kind and entry.get("status") == "True":
            match: dict[str, Any] = entry
            return match
    return None


def has_ended(owner: Object) -> bool:
    """Whether a Job, JobSet or TrainJob is done or has failed."""
    return any(condition(owner, kind) for kind in ("Complete", "Completed", "Failed"))


def state_of(owner: Object, pods: Sequence[Object], workload: Object | None = None, position: str = "") -> LaunchState:
    """The state of a run.

    Args:
        owner: Job, JobSet or TrainJob.
        pods: those of the run that the server still has.
        workload: of Kueue, if the run is queued there.
        position: in Kueue's queue, in words; "": not known.
    """
    pods = sorted(pods, key=lambda pod: pod["metadata"].get("creationTimestamp") or "")
    restarts = _restarts(owner, pods)
    live = [pod for pod in pods if pod.get("status", {}).get("phase") in (None, "Pending", "Running", "Unknown")]
    if (done := condition(owner, "Complete") or condition(owner, "Completed")) is not None:
        state = _at_its_end(seen_now("finished", "trained to its end", _evidence(owner, done), exit_code=0), pods)
    elif (failed := condition(owner, "Failed")) is not None:
        state = _at_its_end(_failed(owner, pods, failed), pods)
    elif owner["spec"].get("suspend") or owner["spec"].get("parallelism") == 0:
        state = _suspended(owner, workload, position)
    elif live:
        state = _live(live, was_started=restarts > 0)
    else:
        state = _between(owner, pods)
    return replace(state, restarts=restarts)


def with_host(state: LaunchState, host: bytes) -> LaunchState:
    """A state that says `running`, as the run itself sees it.

    Args:
        state: from the pods.
        host: `launch/host-0.json` of the run's directory; b"" if it is not there yet.
    """
    said = read_object(host.decode(errors="replace"))
    phase = said.get("phase", "starting")
    if phase in {"running", "saving"}:
        return replace(state, phase=phase, why=f"{said['why']}, {said.get('samples', 0):,} samples so far")
    # What an earlier pod left, or nothing yet: this pod's container has only begun.
    return replace(state, phase="starting", why="the container runs, and the run in it starts")


def with_warnings(state: LaunchState, owner: Object, pods: Sequence[Object], warnings: Sequence[Object]) -> LaunchState:
    """A state of a run that has not begun, with the newest reason that events give for it.

    A Job whose pods the server refuses (quota, Pod Security, an admission webhook) has no pod and no condition: only an
    event says so.

    Args:
        state: from objects and pods.
        owner: Job, JobSet or TrainJob.
        pods: those of the run that the server still has.
        warnings: Warning events of the namespace, the oldest first.
    """
    name = owner["metadata"]["name"]
    names = {pod["metadata"]["name"] for pod in pods}
    since = max((pod["metadata"].get("creationTimestamp") or "" for pod in pods), default="")
    since = max(since, owner["metadata"].get("creationTimestamp") or "")
    for event in reversed(warnings):
        about, reason, message = event.get("involvedObject", {}), event.get("reason"), event.get("message", "").strip()
        kind, whose = about.get("kind"), str(about.get("name"))
        if (event.get("lastTimestamp") or event.get("eventTime") or "") < since:
            return state  # of an earlier start, or before the newest pod was made
        if reason == _REFUSED and (whose == name or (kind == "Job" and whose.startswith(f"{name}-{CONTAINER}-"))):
            remedy = next((remedy for part, remedy in _REMEDIES if part in message), "")
            why = f"the cluster refuses its pod, and is asked again: {message.removeprefix('Error creating: ')}"
            why += f"; {remedy}" if remedy else ""
            return replace(state, why=why, evidence=f"{kind} {whose}: {reason}")
        if reason in _SHORT_OF and whose in names and (event.get("count") or 1) >= _SEEN_OFTEN:
            why = f"its container cannot begin, and is tried again: {message}"
            return replace(state, why=why, evidence=f"Pod {whose}: {reason}")
    return state


def _evidence(thing: Object, entry: dict[str, Any]) -> str:
    said = ": ".join(text for text in (entry.get("reason", ""), entry.get("message", "")) if text)
    return f"{thing.get('kind', 'Pod')} {thing['metadata']['name']}: {entry['type']}" + (f" ({said})" if said else "")


def _restarts(owner: Object, pods: Sequence[Object]) -> int:
    """Pods after the first of each host, that this server still knows of [count]."""
    hosts = {host_of(pod) for pod in pods}
    return max(len(pods) - len(hosts), int(owner.get("status", {}).get("restarts") or 0), 0)


def host_of(pod: Object) -> int:
    """The number of the host that a pod of a run is."""
    annotations = pod["metadata"].get("annotations") or {}
    return int(annotations.get("batch.kubernetes.io/job-completion-index", "0"))


def _terminated(pod: Object) -> dict[str, Any] | None:
    """How a pod's container ended; None if it did not, or never started."""
    for status in pod.get("status", {}).get("containerStatuses") or []:
        if (ended := status.get("state", {}).get("terminated")) is not None:
            terminated: dict[str, Any] = ended
            return terminated
    return None


def ending_of(pod: Object) -> tuple[int | None, str, str]:
    """Exit code, reason in words, and evidence, of a pod that ended."""
    name, status = pod["metadata"]["name"], pod.get("status", {})
    ended = _terminated(pod)
    if ended is None:
        why = status.get("message") or status.get("reason") or "the pod ended before its container started"
        return None, str(why), f"Pod {name}: {status.get('phase')}"
    code, reason, message = ended.get("exitCode"), ended.get("reason") or "", (ended.get("message") or "").strip()
    evidence = f"Pod {name}: exit code {code}" + (f", {reason}" if reason else "")
    if reason in {"StartError", "ContainerCannotRun"} and "executable file not found" in message:
        return code, "the image has no python3", f"{evidence}: {message}"
    if reason == "OOMKilled":
        return code, "the container ran out of its memory limit", evidence
    said = read_object(message)
    if said.get("why"):
        detail = said.get("evidence") or said["why"]
        return code, str(said["why"]), f"{evidence}: {detail}"
    return code, message.splitlines()[-1] if message else f"exit code {code}", evidence


def _at_its_end(state: LaunchState, pods: Sequence[Object]) -> LaunchState:
    """The state with the moment at which the last pod gave its devices back, as far as one says so."""
    ends = [str(ended["finishedAt"]) for pod in pods if (ended := _terminated(pod)) and ended.get("finishedAt")]
    return replace(state, at=max(ends, default=state.at))


def _failed(owner: Object, pods: Sequence[Object], failed: dict[str, Any]) -> LaunchState:
    ended = [pod for pod in pods if pod.get("status", {}).get("phase") == "Failed"]
    final = [pod for pod in ended if (_terminated(pod) or {}).get("exitCode") not in EXIT_AGAIN] or ended
    if not final:
        why = failed.get("message") or failed.get("reason") or "the Job failed"
        return seen_now("failed", str(why), _evidence(owner, failed))
    code, why, evidence = ending_of(final[-1])
    if code == LIMIT_OVER:
        return seen_now("stopped", why, evidence, exit_code=code)
    return seen_now("failed", why, f"{evidence}; {_evidence(owner, failed)}", exit_code=code)


def _suspended(owner: Object, workload: Object | None, position: str) -> LaunchState:
    name = f"{owner['kind']} {owner['metadata']['name']}: suspended"
    if workload is None:
        return seen_now("queued", "it is suspended: what it needs is being sent, or a user suspended it", name)
    evicted = condition(workload, "Evicted")
    if evicted is not None and condition(workload, "QuotaReserved") is None:
        why = f"Kueue took its place: {evicted.get('message') or evicted.get('reason')}"
        return seen_now("preempted", why, _evidence({"kind": "Workload", **workload}, evicted))
    pending = [c for c in workload.get("status", {}).get("conditions") or [] if c.get("type") == "QuotaReserved"]
    said = pending[0].get("message", "") if pending else "Kueue has not looked at it yet"
    return seen_now("queued", "; ".join(text for text in (position, said) if text), name)


def _between(owner: Object, pods: Sequence[Object]) -> LaunchState:
    """No pod lives, and the Job is neither done nor failed."""
    if not pods:
        return seen_now("queued", "no pod was made yet", f"{owner['kind']} {owner['metadata']['name']}: no pods")
    last = pods[-1]
    code, why, evidence = ending_of(last)
    if (disrupted := condition(last, "DisruptionTarget")) is not None:
        return seen_now(
            "preempted",
            f"its pod was ended: {disrupted.get('message') or disrupted.get('reason')}",
            _evidence({"kind": "Pod", **last}, disrupted),
            exit_code=code,
        )
    if code in EXIT_AGAIN:
        return seen_now("requeued", f"{why}; another pod follows", evidence, exit_code=code)
    if code == 0:
        return seen_now("running", "a host is done; the Job has not said so yet", evidence)
    return seen_now("requeued", f"{why}; the Job decides whether another pod follows", evidence, exit_code=code)


def _live(live: Sequence[Object], *, was_started: bool) -> LaunchState:
    """Some pods live: the one that is least far says how the run is."""
    for pod in live:
        name, status = pod["metadata"]["name"], pod.get("status", {})
        if (lost := status.get("reason") == "NodeLost") or status.get("phase") == "Unknown":
            why = "the node of its pod does not answer" if lost else "the state of its pod is not known"
            return seen_now("unknown", why, f"Pod {name}: {status.get('reason') or 'Unknown'}")
    leaving = [pod for pod in live if pod["metadata"].get("deletionTimestamp")]
    staying = [pod for pod in live if pod not in leaving]
    if leaving and not staying:
        return seen_now(
            "saving",
            "its pod was asked to end, and saves",
            f"Pod {leaving[0]['metadata']['name']}: being deleted at {leaving[0]['metadata']['deletionTimestamp']}",
        )
    waiting = [pod for pod in staying if pod.get("status", {}).get("phase") != "Running"]
    if not waiting:
        pod = staying[0]
        since = pod.get("status", {}).get("startTime", "")
        return seen_now("running", "all its pods run", f"Pod {pod['metadata']['name']}: Running since {since}")
    return _waiting(waiting[0], was_started=was_started)


def _waiting(pod: Object, *, was_started: bool) -> LaunchState:
    """Why a pod has not begun; `was_started`: the run had begun before."""
    name, status = pod["metadata"]["name"], pod.get("status", {})
    scheduled = next((c for c in status.get("conditions") or [] if c.get("type") == "PodScheduled"), None)
    if scheduled is None or scheduled.get("status") != "True":
        said = (scheduled or {}).get("message") or "no node was chosen yet"
        phase: LaunchPhase = "requeued" if was_started else "queued"
        return seen_now(phase, str(said), f"Pod {name}: {(scheduled or {}).get('reason') or 'Pending'}")
    for container in status.get("containerStatuses") or []:
        held = container.get("state", {}).get("waiting") or {}
        if held.get("reason") in _STUCK:
            return seen_now(
                "starting",
                f"stuck, and tried again: {held.get('message') or held['reason']}",
                f"Pod {name}: {held['reason']}",
            )
    return seen_now("starting", "the image is pulled, volumes are mounted", f"Pod {name}: ContainerCreating")
