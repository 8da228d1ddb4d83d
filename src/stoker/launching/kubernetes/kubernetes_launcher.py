"""Kubernetes: `k8s:team/8xh100`, `k8s:context/team/2x4xa100`, `k8s:team/cpu`.

What: a Job for one pod, an Indexed Job for several nodes, a JobSet or TrainJob if asked for (`manifests.py`); the run's
directory is on a volume, so that pods can be lost. All objects but that volume's claim belong to the Job: one delete
takes them all.
Use when: the user's kubeconfig reaches a namespace. Needs there: an image with Python of at least 3.11, and a claim or
a StorageClass. With Kueue: `--place-option queue=NAME`.
Costs: for a start five to eight requests; for a look at the state two.
Does not do: make images (see `stoker image`); or distinguish GPUs that nodes' labels do not name.
"""

from __future__ import annotations

import importlib.util
import re
import secrets as random
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from stoker.devices import catalogue
from stoker.errors import NoDevice, PlaceFailed, PlaceUnreachable, StokerError, nearest
from stoker.launching.bundle import require_sendable, secret_values, sending_text
from stoker.launching.kubernetes import cluster_state
from stoker.launching.kubernetes.cluster_api import (
    AlreadyThere,
    ClusterApi,
    Object,
    as_yaml,
    connect,
    contexts,
    reference_to,
)
from stoker.launching.kubernetes.cluster_nodes import survey, wanted_pool
from stoker.launching.kubernetes.manifests import (
    APIS,
    HOSTS_VARIABLE,
    JOB,
    JOBSET,
    MASTER_VARIABLE,
    QUEUE_LABEL,
    RENDEZVOUS_PORT,
    TRAINJOB,
    Cluster,
    ClusterOptions,
    NodePool,
    RunObjects,
    placement,
    run_objects,
    selector,
)
from stoker.launching.kubernetes.pod_volume import RunVolume
from stoker.launching.launcher import (
    SHAPE,
    Handle,
    HostRanks,
    Launcher,
    LaunchTarget,
    Offer,
    Probe,
    Request,
    Submission,
    seen_now,
    utc_now,
)
from stoker.records.launch import ENDED, LaunchState

KUEUE, KUEUE_VISIBILITY = "kueue.x-k8s.io/v1beta1", "visibility.kueue.x-k8s.io/v1beta1"

_NAMESPACE = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_STOP_PATIENCE_S = 600.0
_HOST = "runs/{}/launch/host-0.json"
_TO_READ = "# To read: `stoker train` fills in tar files and Secrets, and holds the Job back until all is there.\n"
_OWNER, _RELEASED = "stoker/owner", "stoker/released"
"""Annotations of a Job: which run made it; that all it needs is there."""


_POD = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
"""Where a pod reads its namespace, which is the usual one for who works in it without a kubeconfig."""


def _pods_namespace() -> str:
    try:
        return _POD.read_text(encoding="utf-8").strip() or "default"
    except OSError:
        return "default"


class KubernetesLauncher(Launcher):
    """A namespace of a Kubernetes cluster."""

    kind = "k8s"
    syntax = "k8s:[[CONTEXT/]NAMESPACE][/[NODESx]COUNTxDEVICE]"
    options = ClusterOptions.names()
    runs_images = limits_time = True

    def parse(self, text: str) -> LaunchTarget:
        """Context, namespace and shape. Names of contexts may have slashes: the longest one that fits counts.

        Without a namespace it is the current context's. Without a count there is one process; without a device, it
        gets one of any kind that the nodes have.
        """
        rest, known, current = text.strip().rstrip("/"), dict[str, str](), ""
        if importlib.util.find_spec("kubernetes") is not None:
            known, current = contexts()
        context = max((name for name in known if rest.startswith(f"{name}/")), key=len, default="")
        parts = rest[len(context) + 1 if context else 0 :].split("/")
        match = SHAPE.fullmatch(parts[-1]) if len(parts) > 1 else None
        shape = parts.pop() if match is not None and (match[1] or _is_device(match[3])) else ""
        namespace = parts.pop()
        if not parts and not context and not namespace:
            namespace = known.get(current, "") or _pods_namespace()
        if (parts and context) or not _NAMESPACE.fullmatch(namespace):
            why = f" cannot be read: {'/'.join([*parts, namespace])!r} is no namespace"
            raise self.unreadable(text, "k8s:team/2x4xa100", why=why)
        context = context or "/".join(parts)
        if context and known and context not in known:
            raise NoDevice(
                f"--on k8s:{text}: the kubeconfig has no context {context!r}.",
                remedy=f"{nearest(context, known)} The form is {self.syntax}.",
            )
        return self.target(text, f"{context}/{namespace}", self.shape_in(text, shape) if shape else (1, 1, ""))

    def probe(self, target: LaunchTarget, options: Mapping[str, str]) -> Probe:
        """Version, permissions, nodes with the device, storage, Kueue's queue, asked of the API server alone."""
        settings, api = ClusterOptions.read(options), _api(target)
        cluster = _cluster(api)
        major, minor = cluster.version
        facts = {"cluster": api.host, "namespace": api.namespace, "Kubernetes": f"{major}.{minor}"}
        missing = _not_allowed(api, _needed(settings, target, cluster))
        if api.may("get", "namespaces") and api.find("Namespace", api.namespace) is None:
            return Probe(facts=facts, missing=(f"there is no namespace {api.namespace}",))
        nodes = survey(api)
        facts["nodes"] = nodes.in_words()
        pool = NodePool()
        try:
            pool = wanted_pool(nodes, target)
        except PlaceFailed as error:
            missing.append(error.message)
        missing += _storage(api, settings, facts)
        missing += _queue(api, settings, facts, cluster)
        for kind, group in (("jobset", JOBSET), ("trainjob", TRAINJOB)):
            facts[kind] = "there" if group in cluster.groups else "not installed"
            if settings.kind == kind and group not in cluster.groups:
                missing.append(f"kind={kind}: the cluster has none")
        if target.num_nodes > 1 and not cluster.has_indexed:
            missing.append(
                f"Kubernetes {major}.{minor} has no Indexed Jobs, which {target.num_nodes} nodes need (1.24)"
            )
        return Probe(
            facts=facts,
            missing=tuple(missing),
            device=target.device if target.device != "cpu" else "",
            cores=int(pool.cpus),
        )

    def offers(self, request: Request) -> tuple[Offer, ...]:
        """Kinds of nodes that can take the shape: at once where devices are free, else after an unknown time."""
        target, api = request.target, _api(request.target)
        settings = ClusterOptions.read(request.options)
        queued = _position(api, settings.queue) if settings.queue else ""
        offers = []
        for device, free in survey(api).free_for(target).items():
            waits = free is not None and free >= target.num_nodes and not queued
            known = (
                "the cluster does not show what runs on its nodes" if free is None else f"{free} nodes have room now"
            )
            offers.append(
                Offer(
                    text=f"k8s:{target.address.lstrip('/')}/{target.num_nodes}x{target.devices_each}x{device}",
                    num_nodes=target.num_nodes,
                    devices_each=target.devices_each,
                    device=device,
                    starts_in_s=0.0 if waits else None,
                    price_per_h=None,
                    why="; ".join(text for text in (known, queued) if text),
                )
            )
        return tuple(offers)

    def script(self, submission: Submission) -> str:
        """The manifests, as YAML; asks the cluster, where it answers, for its version and nodes."""
        settings, target = ClusterOptions.read(submission.options), submission.target
        cluster, pool, note = Cluster((1, 37), frozenset({JOBSET, TRAINJOB})), wanted_pool(None, target), ""
        try:
            api = _api(target)
            cluster, pool = _cluster(api), wanted_pool(survey(api), target)
        except (PlaceFailed, NoDevice) as error:
            note = f"# For Kubernetes 1.37 and the usual labels of nodes, since {error.message}\n"
        names = dict.fromkeys(submission.secrets, "") | ({"STOKER_SECRET": ""} if target.num_nodes > 1 else {})
        objects = run_objects(submission, settings, cluster, pool, names, submitted_at="(when it starts)")
        documents = [*([objects.claim] if objects.claim else []), *objects.owned, objects.owner]
        for document in documents:
            for key in document.get("binaryData", {}):
                document["binaryData"][key] = "(a tar file)"
            if document["kind"] == "Secret":
                document["stringData"] = dict.fromkeys(document.pop("data"), "(read when the run starts)")
        large = "".join(f"# sent through a pod: {b.name}, {b.num_bytes} bytes\n" for b in objects.to_send)
        return _TO_READ + note + large + as_yaml(documents)

    def start(self, submission: Submission, tell: Callable[[str], None]) -> Handle:
        """Make the claim, the Job (held back), what belongs to it, send what is large, and let the Job go."""
        settings, target, api = ClusterOptions.read(submission.options), submission.target, _api(submission.target)
        values = secret_values(submission.secrets)
        if target.num_nodes > 1:
            values["STOKER_SECRET"] = random.token_hex(32)
        pool = wanted_pool(survey(api), target)
        objects = run_objects(submission, settings, _cluster(api), pool, values, submitted_at=utc_now("milliseconds"))
        require_sendable(submission.bundles, submission.send_limit)
        handle = _handle(api, submission, settings, objects, pool)
        if (going := _make_room(api, objects, submission.owner)) is not None:
            return {**handle, "uid": going}
        made_claim = _make_claim(api, objects.claim)
        owner, kind = objects.owner, objects.owner["kind"]
        owner["metadata"]["annotations"][_OWNER] = submission.owner
        release, stored = _hold_back(owner), None
        try:
            stored = api.create(owner)
            reference = reference_to(stored)
            if made_claim:
                tell(
                    f"the run is saved on claim {objects.claim_name} of {settings.size}, which stays, and is paid for "
                    f"where storage is, until `kubectl -n {api.namespace} delete pvc {objects.claim_name}`"
                )
            tell(sending_text(submission.bundles, f"namespace {api.namespace}"))
            for thing in objects.owned:
                thing["metadata"]["ownerReferences"] = [reference]
                api.create(thing)
            sent = _send(api, objects, handle, reference, settings.data, tell) if objects.to_send else 0
            api.patch(kind, owner["metadata"]["name"], release, api=APIS[kind])
        except BaseException as error:
            if stored is not None or not isinstance(error, AlreadyThere):
                _undo(api, kind, owner["metadata"]["name"], objects.claim if made_claim else None)
            raise
        sent += sum(len(part) for thing in objects.owned for part in thing.get("binaryData", {}).values()) * 3 // 4
        return {**handle, "uid": stored["metadata"]["uid"], "sent_bytes": sent}

    def ranks(self, environ: Mapping[str, str]) -> HostRanks:
        """From the Job's completion index, and the variables of our own manifest."""
        hosts = int(environ.get(HOSTS_VARIABLE, "1"))
        return HostRanks(
            host=int(environ.get("JOB_COMPLETION_INDEX") or 0),
            num_hosts=hosts,
            master=environ.get(MASTER_VARIABLE, ""),
            port=RENDEZVOUS_PORT if hosts > 1 else 0,
        )

    def state(self, handle: Handle) -> LaunchState:
        """From the Job, its pods, and Kueue's Workload; `unknown` while the server does not answer."""
        try:
            api = _open(handle)
            owner = _owner(api, handle)
            if owner is None or owner["metadata"].get("uid") != handle.get("uid", owner["metadata"].get("uid")):
                why = "its Job is not there any more: stopped, or deleted after its end"
                return seen_now("stopped", why, f"{handle['kind']} {handle['name']}: not found")
            owner["kind"] = handle["kind"]
            pods = api.objects("Pod", selector(handle["name"], "training"))
            queue = (owner["metadata"].get("labels") or {}).get(QUEUE_LABEL, "")
            workload = _workload(api, owner) if queue and owner["spec"].get("suspend") else None
            position = _position(api, queue, workload["metadata"]["name"]) if workload is not None else ""
        except PlaceUnreachable as error:
            return seen_now("unknown", "the cluster does not answer", error.message)
        state = cluster_state.state_of(owner, pods, workload, position)
        if state.phase in ENDED:
            with suppress(StokerError):  # it may not be allowed: then the Secret goes with the Job
                _forget_secret(api, owner)
        if state.phase == "running":
            with suppress(StokerError):  # commands in pods may not be allowed, or the line be cut: then the pods count
                volume = RunVolume(api, handle["name"], handle["pod"], None)
                state = cluster_state.with_host(state, volume.read(_HOST.format(handle["run"]), 0, may_visit=False))
        if state.phase in {"queued", "starting", "requeued"} and not owner["spec"].get("suspend"):
            with suppress(StokerError):  # events may not be visible: then the state is all that is known
                state = cluster_state.with_warnings(state, owner, pods, api.warnings())
        return state

    def events(self, handle: Handle, offset: int) -> bytes:
        """The run's log from `offset` on; where no pod of the run is there, one for files alone reads it."""
        api = _open(handle)
        owner = _owner(api, handle)
        has_ended = owner is None or cluster_state.has_ended(owner)
        volume = RunVolume(api, handle["name"], handle["pod"], None if owner is None else reference_to(owner))
        return volume.read(f"runs/{handle['run']}/events.jsonl", offset, may_visit=has_ended)

    def stop(self, handle: Handle) -> None:
        """Note that the run is to stop, delete its Job, and wait until its pods have saved and left."""
        api = _open(handle)
        with suppress(StokerError):  # the pod may be gone, or commands in it not allowed: deleting is enough
            RunVolume(api, handle["name"], handle["pod"], None).touch(f"runs/{handle['run']}/launch/stop")
        api.delete(handle["kind"], handle["name"], api=APIS[handle["kind"]])
        until = time.monotonic() + _STOP_PATIENCE_S
        while remaining := api.objects("Pod", selector(handle["name"], "training")):
            if time.monotonic() > until:
                raise PlaceFailed(
                    f"Pod {remaining[0]['metadata']['name']} is still being ended after {_STOP_PATIENCE_S:g} s.",
                    remedy="Its node may be gone; ask again.",
                )
            time.sleep(0.5)

    def fetch(self, handle: Handle, into: Path) -> None:
        """The run's directory on the volume."""
        api = _open(handle)
        owner = _owner(api, handle)
        volume = RunVolume(api, handle["name"], handle["pod"], None if owner is None else reference_to(owner))
        try:
            volume.fetch(f"runs/{handle['run']}", into)
        finally:
            volume.leave()


def _needed(settings: ClusterOptions, target: LaunchTarget, cluster: Cluster) -> list[tuple[str, str, str]]:
    """Permissions that a run needs, as (verb, resource, group)."""
    group = {"job": JOB, "jobset": JOBSET, "trainjob": TRAINJOB}[settings.kind].partition("/")[0]
    needed = [(verb, f"{settings.kind}s", group) for verb in ("create", "get", "patch", "delete")]
    needed += [("create", resource, "") for resource in ("configmaps", "pods")]
    needed += [("create", "secrets", "")] if target.num_nodes > 1 else []  # of one node only for --secret
    needed += [(verb, "pods", "") for verb in ("get", "list", "delete")]
    # A command over a WebSocket is a GET, for which servers ask for `get`, and from 1.35 on for `create` too.
    needed += [(verb, "pods/exec", "") for verb in (("create", "get") if cluster.version >= (1, 35) else ("get",))]
    needed += [] if settings.claim else [("create", "persistentvolumeclaims", "")]
    return needed + ([("create", "services", "")] if target.num_nodes > 1 and settings.kind == "job" else [])


def _not_allowed(api: ClusterApi, needed: list[tuple[str, str, str]]) -> list[str]:
    """One sentence with all permissions that this login lacks, as for a Role's rules; none if it lacks none."""
    verbs: dict[str, list[str]] = {}
    for verb, resource, group in needed:
        if not api.may(verb, resource, group):
            verbs.setdefault(f"{resource}.{group}" if group else resource, []).append(verb)
    if not verbs:
        return []
    lacking = "; ".join(f"{', '.join(words)} {resource}" for resource, words in verbs.items())
    return [f"you may not {lacking} in namespace {api.namespace}: ask for a role that allows it"]


def _is_device(name: str) -> bool:
    """Whether the last word of `k8s:A/B`, without a count, is a device and no namespace."""
    return name in {"cpu", "gpu"} or bool(catalogue().find(name))


def _api(target: LaunchTarget) -> ClusterApi:
    return connect(*target.address.rsplit("/", 1))


def _open(handle: Handle) -> ClusterApi:
    return connect(handle["context"], handle["namespace"])


def _owner(api: ClusterApi, handle: Handle) -> Object | None:
    """The run's Job, JobSet or TrainJob; None if it is not there any more."""
    return api.find(handle["kind"], handle["name"], api=APIS[handle["kind"]])


def _cluster(api: ClusterApi) -> Cluster:
    return Cluster(api.version, api.groups)


def _storage(api: ClusterApi, settings: ClusterOptions, facts: dict[str, str]) -> list[str]:
    """Where the run's directory would be; what is missing for it."""
    if settings.claim:
        claim = api.find("PersistentVolumeClaim", settings.claim)
        facts["volume"] = f"claim {settings.claim}" + (f", {claim['status'].get('phase')}" if claim else "")
        return [] if claim else [f"there is no claim {settings.claim} in namespace {api.namespace}"]
    if not api.may("list", "storageclasses", "storage.k8s.io"):
        facts["volume"] = "a new claim; storage classes are not visible to you"
        return []
    classes = api.objects("StorageClass", api="storage.k8s.io/v1")
    names = [thing["metadata"]["name"] for thing in classes]
    mark = "storageclass.kubernetes.io/is-default-class"
    default = [t["metadata"]["name"] for t in classes if (t["metadata"].get("annotations") or {}).get(mark) == "true"]
    facts["volume"] = f"a new claim of {settings.size}; storage classes: {', '.join(names) or 'none'}"
    if settings.storage and settings.storage not in names:
        return [f"there is no StorageClass {settings.storage}, only {', '.join(names) or 'none'}"]
    if not settings.storage and not default:
        named = "name one with --place-option storage=NAME, or an existing claim with --place-option claim=NAME"
        return [f"the cluster has no default StorageClass for the run's volume: {named}"]
    return []


def _queue(api: ClusterApi, settings: ClusterOptions, facts: dict[str, str], cluster: Cluster) -> list[str]:
    """Kueue's queues here; what is missing."""
    if not any(group.startswith("kueue.x-k8s.io/") for group in cluster.groups):
        return ["--place-option queue: the cluster has no Kueue"] if settings.queue else []
    queues = {thing["metadata"]["name"]: thing for thing in api.objects("LocalQueue", api=KUEUE)}
    facts["Kueue"] = (
        "; ".join(
            f"queue {name}: {thing.get('status', {}).get('pendingWorkloads', 0)} waiting"
            for name, thing in queues.items()
        )
        or "no queue in this namespace"
    )
    if settings.queue and settings.queue not in queues:
        return [
            f"there is no LocalQueue {settings.queue} in namespace {api.namespace}, only {', '.join(queues) or 'none'}"
        ]
    return []


def _position(api: ClusterApi, queue: str, workload: str = "") -> str:
    """How far a workload, or the next one, is in Kueue's queue; "" where Kueue does not show it."""
    path = f"/apis/{KUEUE_VISIBILITY}/namespaces/{api.namespace}/localqueues/{queue}/pendingworkloads"
    try:
        waiting = api.ask("GET", path).get("items") or []
    except PlaceUnreachable:
        raise
    except PlaceFailed:  # the visibility API is an option of Kueue
        return ""
    for place in waiting:
        if place["metadata"]["name"] == workload:
            return f"place {place.get('positionInLocalQueue', 0) + 1} of {len(waiting)} in queue {queue}"
    return f"{len(waiting)} wait in queue {queue}" if waiting else ""


def _workload(api: ClusterApi, owner: Object) -> Object | None:
    """Kueue's Workload of a Job; None while there is none."""
    for workload in api.objects("Workload", api=KUEUE):
        for reference in workload["metadata"].get("ownerReferences") or []:
            if reference.get("uid") == owner["metadata"]["uid"]:
                return workload
    return None


def _handle(
    api: ClusterApi, submission: Submission, settings: ClusterOptions, objects: RunObjects, pool: NodePool
) -> Handle:
    return {
        "context": api.context,  # by name: the current one may be another when the run is asked for
        "namespace": api.namespace,
        "kind": objects.owner["kind"],
        "name": objects.owner["metadata"]["name"],
        "run": submission.run,
        "pod": {
            "image": submission.image,
            "claim": objects.claim_name,
            "root": settings.root,
            "pull_secret": settings.pull_secret,
            "user": settings.user,
            "placement": placement(pool),
        },
    }


def _hold_back(owner: Object) -> Object:
    """Change a manifest so that nothing starts yet; the patch that lets it go."""
    labels, spec = owner["metadata"]["labels"], owner["spec"]
    released: Object = {"metadata": {"annotations": {_RELEASED: "yes"}}}
    if (queue := labels.pop(QUEUE_LABEL, None)) is not None:
        released["metadata"]["labels"] = {QUEUE_LABEL: queue}
    elif "suspend" in spec:
        spec["suspend"] = True
        released["spec"] = {"suspend": False}
    else:
        released["spec"] = {"parallelism": spec["parallelism"]}
        spec["parallelism"] = 0
    return released


def _make_room(api: ClusterApi, objects: RunObjects, owner: str) -> str | None:
    """Remove an ended Job of the same run; the uid of one that is going on.

    Raises:
        PlaceFailed: the name is taken by something else.
    """
    kind, name = objects.owner["kind"], objects.owner["metadata"]["name"]
    there = api.find(kind, name, api=APIS[kind])
    if there is None:
        return None
    annotations = there["metadata"].get("annotations") or {}
    if annotations.get(_OWNER) != owner:
        raise PlaceFailed(
            f"{kind} {name} is in namespace {api.namespace} already, and "
            f"{annotations.get(_OWNER) or 'not made by Stoker'}.",
            remedy="Give the run another name: --run-dir runs/NAME.",
        )
    has_ended = cluster_state.has_ended(there)
    # A start that was killed before it let its Job go has left one that would wait for ever.
    if not has_ended and _RELEASED in annotations and not there["metadata"].get("deletionTimestamp"):
        return str(there["metadata"]["uid"])
    api.delete(kind, name, api=APIS[kind])
    RunVolume(api, name, {}, None).leave()
    until = time.monotonic() + _STOP_PATIENCE_S
    while api.find(kind, name, api=APIS[kind]) is not None or any(
        _listed(api, one, name) for one in ("Pod", "ConfigMap", "Secret", "Service")
    ):
        if time.monotonic() > until:
            raise PlaceFailed(f"{kind} {name} of an earlier start is still being deleted.", remedy="Ask again later.")
        time.sleep(0.5)
    return None


def _listed(api: ClusterApi, kind: str, name: str) -> list[Object]:
    """A run's objects of a kind; none where this login may not list them: then their names are found taken."""
    try:
        return api.objects(kind, selector(name))
    except PlaceUnreachable:
        raise
    except PlaceFailed:
        return []


def _make_claim(api: ClusterApi, claim: Object | None) -> bool:
    """Make the run's claim unless it is there, from an earlier start; whether it was made now."""
    if claim is None:
        return False
    try:
        api.create(claim)
    except AlreadyThere:
        return False
    return True


def _send(
    api: ClusterApi, objects: RunObjects, handle: Handle, reference: Object, data: str, tell: Callable[[str], None]
) -> int:
    """Send what is too large for ConfigMaps, unless the volume, or of data the folder `data`, has it; bytes sent."""
    volume, sent = RunVolume(api, handle["name"], handle["pod"], reference), 0
    try:
        for bundle in objects.to_send:
            tell(f"{bundle.name} goes through a pod, unless it is there")
            sent += bundle.num_bytes if volume.send(bundle, data) else 0
    finally:
        volume.leave()
    return sent


def _forget_secret(api: ClusterApi, owner: Object) -> None:
    """Delete the Secret of a Job that has ended."""
    secret = api.find("Secret", owner["metadata"]["name"])
    owners = (secret or {}).get("metadata", {}).get("ownerReferences") or []
    if any(reference.get("uid") == owner["metadata"]["uid"] for reference in owners):
        api.delete("Secret", owner["metadata"]["name"])


def _undo(api: ClusterApi, kind: str, name: str, claim: Object | None) -> None:
    """Delete what a start that failed has made; its error is raised, not one of this."""
    with suppress(StokerError):
        api.delete(kind, name, api=APIS[kind])
    if claim is not None:
        with suppress(StokerError):
            api.delete("PersistentVolumeClaim", claim["metadata"]["name"])


LAUNCHER = KubernetesLauncher()
