"""Manifests of a run on Kubernetes: plain values in, objects as `kubectl apply` takes them out.

What: a Job where one pod is enough, an Indexed Job with a headless Service for several, a JobSet or a TrainJob if asked
for; ConfigMaps with what travels, a Secret, a claim of a volume for the run's directory. One pod a node, one process a
device.
Rules that keep a run: restartPolicy Never and podFailurePolicy: what a disruption, exit 130 (saved, asked to leave) or
75 (slice over, a rank killed) ended is started again and not counted; any other failure fails the Job.
`activeDeadlineSeconds` is the pod's, from the forecast's upper bound: the Job's own clock would run while it waits for
a node.
Source: Kubernetes 1.37 (batch/v1, core/v1), jobset.x-k8s.io/v1alpha2, trainer.kubeflow.org/v1alpha1, and
kueue.x-k8s.io's labels; the tests validate against their schemas.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stoker.errors import BadSetting, PlaceFailed
from stoker.launching.at_place import LaunchOrder
from stoker.launching.bundle import Bundle
from stoker.launching.kubernetes import pod_start
from stoker.launching.kubernetes.cluster_api import Object, new_object
from stoker.launching.launcher import ROOT, Submission, require_known, require_lasting_keep
from stoker.launching.lines import write_tar
from stoker.launching.shipment import PYTHON_CHECK
from stoker.records.codec import dumps

MOUNT, SENT, MESSAGE = "/stoker", "/stoker-sent", "/dev/termination-log"
"""Where the run's volume, what was sent, and the termination message are in a container."""

SHARED_MEMORY = "/dev/shm"  # noqa: S108  # not a file of ours: where loader processes hand over batches

PART_BYTES, MOST_PARTS = 1_000_000, 4
"""A ConfigMap holds 1 MiB; a run sends at most so many of them, and larger bundles through a pod."""

RENDEZVOUS_PORT = 29_400
HOSTS_VARIABLE, MASTER_VARIABLE = "STOKER_HOSTS", "STOKER_MASTER"
DEFAULT_SIZE = "20Gi"
CONTAINER = "node"
"""The name that Kubeflow's runtimes give to the training container."""

EXIT_AGAIN = (75, 130)
"""Exit codes after which the run goes on: a slice is over, or a rank was killed; saved and left, as asked."""

MANAGER = "stoker"
QUEUE_LABEL, PRIORITY_LABEL = "kueue.x-k8s.io/queue-name", "kueue.x-k8s.io/priority-class"
JOB, JOBSET, TRAINJOB = "batch/v1", "jobset.x-k8s.io/v1alpha2", "trainer.kubeflow.org/v1alpha1"
APIS = {"Job": JOB, "JobSet": JOBSET, "TrainJob": TRAINJOB}

SECURITY = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}
"""Security context of every container of Stoker; with a user that is not root, Pod Security's `restricted` takes it."""

_KEPT_S = 7 * 24 * 3600
"""A Job that has ended is deleted after so long [s], with the ConfigMaps that it owns: etcd holds them all."""

_GRACE_MORE_S = 30
"""A pod that is ended has the forecast time of a save and so much more [s]."""


@dataclass(frozen=True)
class ClusterOptions:
    """Options of a cluster: `--place-option NAME=VALUE`.

    Attributes:
        claim: an existing PersistentVolumeClaim for code, runs and environments; "": one is made for the run.
        storage: its StorageClass; "": the cluster's default.
        size: its size.
        root: folder on the volume.
        data: folder in the container, of the image or below `MOUNT`, where data may lie already.
        queue, priority: of Kueue: LocalQueue, WorkloadPriorityClass.
        kind: `job`, `jobset`, or `trainjob`.
        runtime: ClusterTrainingRuntime of a TrainJob.
        cpus, memory: of a pod; "": its share of the node.
        account: service account of the pods.
        pull_secret: Secret for the image's registry.
        user: UID or UID:GID of the pods' processes and owner of the volume; "": the image's user.
    """

    claim: str = ""
    storage: str = ""
    size: str = DEFAULT_SIZE
    root: str = ""
    data: str = ""
    queue: str = ""
    priority: str = ""
    kind: str = "job"
    runtime: str = "torch-distributed"
    cpus: str = ""
    memory: str = ""
    account: str = ""
    pull_secret: str = ""
    user: str = ""

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The options' names."""
        return tuple(name.replace("_", "-") for name in cls.__dataclass_fields__)

    @classmethod
    def read(cls, options: Mapping[str, str]) -> ClusterOptions:
        """The options by name.

        Raises:
            BadSetting: a name or a kind is unknown, or the user is no number.
        """
        require_known("Kubernetes", options, cls.names())
        read = cls(**{name.replace("-", "_"): value for name, value in options.items()})
        if read.kind not in {"job", "jobset", "trainjob"}:
            raise BadSetting(f"--place-option kind={read.kind}: job, jobset or trainjob")
        require_user(read.user)
        if read.root == ROOT:
            return cls(**{**read.__dict__, "root": ""})
        return read


def require_user(user: str) -> None:
    """Refuse an option `user` that is no UID or UID:GID, or root: a pod is refused by the cluster much later.

    Raises:
        BadSetting: it is neither "" nor such numbers.
    """
    if user and re.fullmatch(r"[1-9]\d{0,9}(:\d{1,10})?", user) is None:
        raise BadSetting(f"--place-option user={user}: wanted the number of a user other than root, as in 1000:100")


@dataclass(frozen=True)
class NodePool:
    """Nodes with a kind of device, and what a pod gets of one.

    Attributes:
        resource: of the device plugin, `nvidia.com/gpu`; "" for CPUs.
        label, values: node label that names the kind, and its values; "": any node that has the resource.
        cpus: CPU cores of a pod; 0: not stated.
        memory_bytes: of a pod; 0: not stated.
    """

    resource: str = ""
    label: str = ""
    values: tuple[str, ...] = ()
    cpus: float = 0
    memory_bytes: int = 0


@dataclass(frozen=True)
class Cluster:
    """Facts on which manifests depend: the server's version, and installed extensions."""

    version: tuple[int, int]
    groups: frozenset[str] = frozenset()

    @property
    def has_suspend(self) -> bool:
        """Jobs can be created suspended (1.24; before by a feature gate)."""
        return self.version >= (1, 24)

    @property
    def has_indexed(self) -> bool:
        """Jobs have numbered pods with host names (1.24)."""
        return self.version >= (1, 24)

    @property
    def has_failure_policy(self) -> bool:
        """Jobs tell exit codes and disruptions from failures (1.26)."""
        return self.version >= (1, 26)

    @property
    def forgets_jobs(self) -> bool:
        """Jobs that have ended can be deleted after a time (1.23)."""
        return self.version >= (1, 23)


@dataclass(frozen=True)
class RunObjects:
    """All objects of a run.

    Attributes:
        owner: Job, JobSet or TrainJob: deleting it deletes all others but the claim.
        owned: ConfigMaps, Secret, Service.
        claim: PersistentVolumeClaim to make; None if it exists.
        to_send: bundles that are too large for ConfigMaps.
        claim_name: of the run's volume.
    """

    owner: Object
    owned: tuple[Object, ...]
    claim: Object | None
    to_send: tuple[Bundle, ...] = field(default=())
    claim_name: str = ""


def object_name(run: str) -> str:
    """A run's name as a DNS label of at most 52 characters, which leaves room for what controllers add.

    >>> object_name("digits-ac1f4a-2"), object_name("7_Zwerge.Lauf")
    ('digits-ac1f4a-2', 'run-7-zwerge-lauf-f8d3')
    """
    name = re.sub(r"[^a-z0-9-]+", "-", run.lower()).strip("-")
    if not name[:1].isalpha():
        name = f"run-{name}"
    if name == run and len(name) <= 52:
        return name
    return f"{name[:47].rstrip('-')}-{hashlib.sha256(run.encode()).hexdigest()[:4]}"


def run_objects(
    submission: Submission,
    options: ClusterOptions,
    cluster: Cluster,
    pool: NodePool,
    secrets: Mapping[str, str],
    *,
    submitted_at: str,
) -> RunObjects:
    """The objects of a run.

    Args:
        submission: what to run.
        options: of the place.
        cluster: version and API groups.
        pool: nodes to run on.
        secrets: values by name, for the Secret.
        submitted_at: distinguishes this start from earlier ones of the run; ISO 8601.

    Raises:
        PlaceFailed: there is no image, or this cluster has not what the shape needs.
    """
    if not submission.image:
        raise PlaceFailed(
            "A pod needs a container image, and none was named.",
            remedy="--image NAME, with Python 3.11 or later and PyTorch.",
        )
    require_lasting_keep(submission, MOUNT)
    name, target = object_name(submission.run), submission.target
    _require_kind(options.kind, target.num_nodes, cluster)
    claim_name = options.claim or f"{name}-run"
    folders, parts, to_send = _packed((submission.stoker, submission.code, *submission.data))
    order = LaunchOrder.of(
        submission,
        f"{MOUNT}/{submission.code.folder}",
        f"{MOUNT}/{submission.stoker.folder}",
        # Ranks of several nodes lose each other with an error's exit code; and older servers count every exit code.
        is_requeued=target.num_nodes == 1 and cluster.has_failure_policy,
        submitted_at=submitted_at,
    )
    start = {
        "root": MOUNT,
        "run": f"runs/{submission.run}",
        "folders": folders,
        "stoker": submission.stoker.folder,
        "order": dumps(order),
        "message": MESSAGE,
        "lock": "" if isinstance(submission.environment, str) else dumps(submission.environment),
        "python": submission.environment if isinstance(submission.environment, str) else "python3",
        "check": PYTHON_CHECK,
        "patience_s": grace_s(submission) + 60,
        "expected": list(submission.expected),
    }
    start_text = Path(pod_start.__file__).read_text(encoding="utf-8")
    texts = {"start.py": start_text, "start.json": json.dumps(start, indent=1)}
    maps = _config_maps(name, parts, texts)
    owned = [*maps]
    if secrets:
        data = {key: _base64(value.encode()) for key, value in secrets.items()}
        owned.append(new_object("v1", "Secret", _metadata(name), type="Opaque", data=data))
    if target.num_nodes > 1 and options.kind == "job":
        owned.append(_headless_service(name))
    pod = _pod(submission, options, pool, name, claim_name, [m["metadata"]["name"] for m in maps], secrets)
    job = _job_spec(pod, target.num_nodes, cluster)
    owner = new_object(APIS["Job"], "Job", _metadata(name), spec=job)
    if options.kind == "jobset":
        owner = _jobset(name, job)
    elif options.kind == "trainjob":
        owner = _trainjob(name, submission, options, pod, pool)
    owner["metadata"]["annotations"] = {"stoker/run": submission.run, "stoker/place": target.text}
    if options.queue:
        owner["metadata"]["labels"][QUEUE_LABEL] = options.queue
        owner["spec"]["suspend"] = True
        if options.priority:
            owner["metadata"]["labels"][PRIORITY_LABEL] = options.priority
    claim = None if options.claim else _claim(name, claim_name, options, several=target.num_nodes > 1)
    return RunObjects(owner, tuple(owned), claim, to_send, claim_name)


def _require_kind(kind: str, num_nodes: int, cluster: Cluster) -> None:
    version = ".".join(map(str, cluster.version))
    if kind == "jobset" and JOBSET not in cluster.groups:
        raise PlaceFailed("The cluster has no JobSet controller.", remedy="Leave out kind=jobset, or install JobSet.")
    if kind == "trainjob" and TRAINJOB not in cluster.groups:
        raise PlaceFailed("The cluster has no Kubeflow Trainer.", remedy="Leave out kind=trainjob, or install it.")
    if num_nodes > 1 and not cluster.has_indexed:
        raise PlaceFailed(
            f"Kubernetes {version} has no Indexed Jobs, which {num_nodes} nodes need (1.24).",
            remedy="Ask for one node.",
        )


def _packed(bundles: Sequence[Bundle]) -> tuple[dict[str, list[str]], dict[str, bytes], tuple[Bundle, ...]]:
    """Parts for ConfigMaps by folder, their contents by name, and the bundles that are too large for them."""
    folders: dict[str, list[str]] = {}
    parts: dict[str, bytes] = {}
    to_send = []
    for bundle in bundles:
        whole = _tar_gz(bundle) if bundle.num_bytes < 20 * MOST_PARTS * PART_BYTES else None
        pieces = [] if whole is None else [whole[i : i + PART_BYTES] for i in range(0, len(whole), PART_BYTES)]
        if whole is None or len(parts) + len(pieces) > MOST_PARTS:
            folders[bundle.folder] = []
            to_send.append(bundle)
            continue
        names = [f"{bundle.kind}-{bundle.digest[:8]}.tar.gz.{number}" for number in range(len(pieces))]
        folders[bundle.folder] = names
        parts.update(zip(names, pieces, strict=True))
    return folders, parts, tuple(to_send)


def _tar_gz(bundle: Bundle) -> bytes:
    """A bundle as a compressed tar file; equal bundles give equal bytes."""
    whole = io.BytesIO()
    write_tar(bundle.files, whole)
    return gzip.compress(whole.getvalue(), mtime=0)


def _config_maps(name: str, parts: Mapping[str, bytes], texts: Mapping[str, str]) -> list[Object]:
    """One ConfigMap with the texts and the first part, one more for each further part."""
    packed: list[dict[str, bytes]] = [{}]
    room = PART_BYTES - sum(map(len, texts.values()))
    for part, data in parts.items():
        if len(data) > room:
            packed.append({})
            room = PART_BYTES
        packed[-1][part] = data
        room -= len(data)
    return [
        new_object("v1", "ConfigMap", _metadata(f"{name}-sent-{number}", name), immutable=True)
        | ({"data": dict(texts)} if number == 0 else {})
        | ({"binaryData": {key: _base64(part) for key, part in data.items()}} if data else {})
        for number, data in enumerate(packed)
    ]


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _metadata(name: str, instance: str = "") -> Object:
    return {"name": name, "labels": labels(instance or name)}


def labels(instance: str, component: str = "training") -> dict[str, str]:
    """The recommended labels of an object."""
    return {
        "app.kubernetes.io/name": "stoker",
        "app.kubernetes.io/instance": instance,
        "app.kubernetes.io/component": component,
        "app.kubernetes.io/managed-by": MANAGER,
    }


def selector(instance: str, component: str = "") -> str:
    """Label selector of all objects of a run or a service, or of one component of it."""
    all_of_it = f"app.kubernetes.io/instance={instance},app.kubernetes.io/managed-by={MANAGER}"
    return f"{all_of_it},app.kubernetes.io/component={component}" if component else all_of_it


def _headless_service(name: str) -> Object:
    spec = {
        "clusterIP": "None",
        "selector": labels(name),
        "publishNotReadyAddresses": True,
        "ports": [{"name": "rendezvous", "port": RENDEZVOUS_PORT}],
    }
    return new_object("v1", "Service", _metadata(name), spec=spec)


def _claim(name: str, claim_name: str, options: ClusterOptions, *, several: bool) -> Object:
    spec: Object = {
        "accessModes": ["ReadWriteMany" if several else "ReadWriteOnce"],
        "resources": {"requests": {"storage": options.size}},
    }
    if options.storage:
        spec["storageClassName"] = options.storage
    return new_object("v1", "PersistentVolumeClaim", _metadata(claim_name, name), spec=spec)


def grace_s(submission: Submission) -> int:
    """Notice that a pod has before it is killed [s]."""
    return math.ceil(submission.save_s) + _GRACE_MORE_S


def _pod(
    submission: Submission,
    options: ClusterOptions,
    pool: NodePool,
    name: str,
    claim: str,
    maps: Sequence[str],
    secrets: Mapping[str, str],
) -> Object:
    """The pod template of a run."""
    target = submission.target
    master = {
        "job": f"{name}-0.{name}",
        "jobset": f"{name}-node-0-0.{name}",
        "trainjob": f"{name}-node-0-0.{name}",
    }[options.kind]
    env = [
        {"name": HOSTS_VARIABLE, "value": str(target.num_nodes)},
        *([{"name": MASTER_VARIABLE, "value": master}] if target.num_nodes > 1 else []),
        *({"name": key, "valueFrom": {"secretKeyRef": {"name": name, "key": key}}} for key in secrets),
    ]
    if options.user:
        # A number that the image's /etc/passwd does not have has neither a name nor a home directory.
        env += [{"name": "HOME", "value": MOUNT}, {"name": "USER", "value": MANAGER}]
    volume, mount = run_volume(claim, options.root)
    resources = _resources(target.devices_each, options, pool)
    memory = resources.get("limits", {}).get("memory")
    container = {
        "name": CONTAINER,
        "image": submission.image,
        "command": ["python3", f"{SENT}/start.py", SENT],
        "env": env,
        "resources": resources,
        "terminationMessagePath": MESSAGE,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": SECURITY,
        "volumeMounts": [
            mount,
            {"name": "sent", "mountPath": SENT, "readOnly": True},
            {"name": "shared", "mountPath": SHARED_MEMORY},
        ],
    }
    spec: Object = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": grace_s(submission),
        **pod_rights(options.account, options.pull_secret, options.user),
        "containers": [container],
        "volumes": [
            volume,
            {"name": "sent", "projected": {"sources": [{"configMap": {"name": m}} for m in maps]}},
            # The default of 64 MB is too little for loader processes that hand over batches in shared memory.
            {"name": "shared", "emptyDir": {"medium": "Memory"} | ({"sizeLimit": memory} if memory else {})},
        ],
        **placement(pool),
    }
    if submission.time_limit_s is not None:
        spec["activeDeadlineSeconds"] = math.ceil(submission.time_limit_s)
    if target.num_nodes > 1 and options.kind == "job":
        spec["subdomain"] = name
    return {"metadata": {"labels": labels(name)}, "spec": spec}


def run_volume(claim: str, root: str) -> tuple[Object, Object]:
    """The run's volume in a pod, and where it is mounted: a claim, or the folder `root` of it."""
    mount = {"name": "run", "mountPath": MOUNT} | ({"subPath": root} if root else {})
    return {"name": "run", "persistentVolumeClaim": {"claimName": claim}}, mount


def pod_rights(account: str = "", pull_secret: str = "", user: str = "") -> Object:
    """Fields of every pod of Stoker: no token of the cluster without an account, no addresses of other services.

    With `user` its processes are that user's, and so are the files of its volumes.
    """
    fields: Object = {"automountServiceAccountToken": bool(account), "enableServiceLinks": False}
    if user:
        uid, _, gid = user.partition(":")
        fields["securityContext"] = {
            "runAsNonRoot": True,
            "runAsUser": int(uid),
            "runAsGroup": int(gid or uid),
            "fsGroup": int(gid or uid),
            "fsGroupChangePolicy": "OnRootMismatch",
        }
    if account:
        fields["serviceAccountName"] = account
    if pull_secret:
        fields["imagePullSecrets"] = [{"name": pull_secret}]
    return fields


def placement(pool: NodePool) -> Object:
    """Fields of a pod that bring it to the nodes of a pool: affinity by label, toleration of the devices' taint."""
    fields: Object = {}
    if pool.label:
        term = {"matchExpressions": [{"key": pool.label, "operator": "In", "values": list(pool.values)}]}
        required = {"nodeSelectorTerms": [term]}
        fields["affinity"] = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}
    if pool.resource:
        fields["tolerations"] = [{"key": pool.resource, "operator": "Exists", "effect": "NoSchedule"}]
    return fields


def _resources(devices: int, options: ClusterOptions, pool: NodePool) -> Object:
    requests: dict[str, str] = {}
    if options.cpus or pool.cpus:
        requests["cpu"] = options.cpus or f"{pool.cpus:g}"
    if options.memory or pool.memory_bytes:
        requests["memory"] = options.memory or str(pool.memory_bytes)
    limits = {pool.resource: str(devices)} if pool.resource else {}
    if "memory" in requests:  # beyond it the run is ended with a reason, and not whichever pod the node picks
        limits["memory"] = requests["memory"]
    return {key: amounts for key, amounts in (("requests", requests), ("limits", limits)) if amounts}


def _job_spec(pod: Object, num_nodes: int, cluster: Cluster) -> Object:
    spec: Object = {
        "parallelism": num_nodes,
        "completions": num_nodes,
        "template": pod,
        "backoffLimit": 3 if cluster.has_failure_policy else 6,
    }
    if cluster.has_suspend:
        spec["suspend"] = False
    if cluster.forgets_jobs:
        spec["ttlSecondsAfterFinished"] = _KEPT_S
    if num_nodes > 1:
        spec["completionMode"] = "Indexed"
    if cluster.has_failure_policy:
        codes: dict[str, Any] = {"containerName": CONTAINER, "values": list(EXIT_AGAIN)}
        spec["podFailurePolicy"] = {
            "rules": [
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                {"action": "Ignore", "onExitCodes": {**codes, "operator": "In"}},
                {"action": "FailJob", "onExitCodes": {**codes, "operator": "NotIn"}},
            ]
        }
    return spec


def _jobset(name: str, job: Object) -> Object:
    inner = {key: value for key, value in job.items() if key not in {"suspend", "ttlSecondsAfterFinished"}}
    template = {"metadata": {"labels": labels(name)}, "spec": {"completionMode": "Indexed", **inner}}
    spec = {
        "suspend": False,
        "ttlSecondsAfterFinished": _KEPT_S,
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "replicatedJobs": [{"name": CONTAINER, "replicas": 1, "template": template}],
    }
    return new_object(APIS["JobSet"], "JobSet", _metadata(name), spec=spec)


def _trainjob(name: str, submission: Submission, options: ClusterOptions, pod: Object, pool: NodePool) -> Object:
    """A TrainJob: container by `trainer`, what a pod needs beyond it by a patch of the runtime's template.

    It has no `activeDeadlineSeconds`, which would fail the TrainJob; a pod of a Job saves, and another one follows.
    """
    container, spec = pod["spec"]["containers"][0], pod["spec"]
    kept = (
        "affinity",
        "tolerations",
        "volumes",
        "serviceAccountName",
        "imagePullSecrets",
        "securityContext",
        "terminationGracePeriodSeconds",
    )
    patched: Object = {key: spec[key] for key in kept if key in spec}
    kept_of_container = ("name", "volumeMounts", "securityContext")
    patched["containers"] = [{key: container[key] for key in kept_of_container}]
    job = {
        "name": CONTAINER,
        "template": {"spec": {"template": {"metadata": {"labels": labels(name)}, "spec": patched}}},
    }
    trainer: Object = {
        "image": submission.image,
        "command": container["command"],
        "env": container["env"],
        "numNodes": submission.target.num_nodes,
    }
    if resources := _resources(submission.target.devices_each, options, pool):
        trainer["resourcesPerNode"] = resources
    job_spec: Object = {
        "suspend": False,
        "runtimeRef": {
            "apiGroup": TRAINJOB.partition("/")[0],
            "kind": "ClusterTrainingRuntime",
            "name": options.runtime,
        },
        "trainer": trainer,
        "runtimePatches": [
            {"manager": "stoker/launcher", "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [job]}}}},
        ],
    }
    return new_object(APIS["TrainJob"], "TrainJob", _metadata(name), spec=job_spec)
