"""A service on Kubernetes: `stoker serve … --on k8s:team --scale 0..4`, as Deployment, Service and autoscaler.

What: `stoker serve` in a Deployment with the probes that it answers, a Service in front of it, and replicas between
two bounds by the rows that wait in its queues. From one replica up: a ScaledObject of KEDA where Prometheus is named,
else a HorizontalPodAutoscaler. From zero: an HTTPScaledObject of KEDA's HTTP add-on, which holds requests while a pod
starts; a service that is not there has no queue to look at.
Use when: models are in the image, or on a volume that all replicas can read.
Costs: `/metrics` is on the admin port, which needs a key beyond its own machine: one is made, and kept in a Secret.
Source: Kubernetes 1.37 (apps/v1, autoscaling/v2), keda.sh/v1alpha1 2.20, http.keda.sh/v1alpha1, PodMonitor of the
Prometheus Operator.
"""

from __future__ import annotations

import re
import secrets as random
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from stoker.errors import BadSetting, PlaceFailed, StokerError
from stoker.launching import parse_target
from stoker.launching.kubernetes.cluster_api import ClusterApi, Object, connect, new_object, reference_to
from stoker.launching.kubernetes.manifests import MANAGER, SECURITY, labels, object_name, pod_rights, require_user
from stoker.launching.launcher import LaunchTarget, require_known

HTTP_PORT, GRPC_PORT, ADMIN_PORT = 8000, 8001, 8002
EVERYWHERE = "0.0.0.0"  # noqa: S104  # a pod's addresses, behind its Service
MODELS, KEYS = "/stoker-models", "/stoker-keys"
QUEUED_ROWS = 16
"""Rows that may wait in each replica before another one is added: half of the default `max_batch_rows`."""

GRACE_S, ENDPOINTS_S = 25, 5
"""Time for answers that are being computed; and, before it, for the Service's endpoints to forget the pod [s]."""

KEDA, KEDA_HTTP, MONITORING = "keda.sh/v1alpha1", "http.keda.sh/v1alpha1", "monitoring.coreos.com/v1"
CUSTOM_METRICS = "custom.metrics.k8s.io/"
_AUTOSCALERS = {"HorizontalPodAutoscaler": "autoscaling/v2", "ScaledObject": KEDA, "HTTPScaledObject": KEDA_HTTP}
DISRUPTIONS = "policy/v1"
_OPTIONS = ("name", "claim", "prometheus", "cpus", "memory", "account", "pull-secret", "user", "host")


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """A service's models and settings.

    Attributes:
        name: of all objects.
        models: paths in the image, or on the volume of the option `claim`.
        image: with Stoker and its extra `serve`.
        low, high: bounds of the number of replicas.
        overrides: settings, as for `--set`.
        options: `claim`, `prometheus` (address of a server), `cpus`, `memory`, `account`, `pull-secret`, `user`, `host`
            (name under which KEDA's HTTP add-on receives requests).
    """

    name: str
    models: tuple[str, ...]
    image: str
    low: int = 1
    high: int = 1
    overrides: tuple[str, ...] = ()
    options: Mapping[str, str] = field(default_factory=dict)


def read_scale(text: str) -> tuple[int, int]:
    """Bounds of a number of replicas.

    >>> read_scale("0..4"), read_scale("3")
    ((0, 4), (3, 3))

    Raises:
        BadSetting: it is no such text, or the bounds are the wrong way round.
    """
    match = re.fullmatch(r"(\d{1,4})(?:\.\.(\d{1,4}))?", text.strip())
    low, high = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
    if low > high or high < 1:
        raise BadSetting(f"--scale {text}: wanted replicas, such as 3, 1..8 or 0..4")
    return low, high


def deploy(
    models: Sequence[str],
    *,
    on: str,
    image: str,
    scale: str = "1",
    overrides: Sequence[str] = (),
    options: Mapping[str, str] | None = None,
    dry_run: bool = False,
) -> list[Object]:
    """Apply a service's objects; the same call again changes those that are there.

    Args:
        models: paths in the image, or on the volume.
        on: a namespace, such as `k8s:team`.
        image: container image.
        scale: replicas: `3`, `1..8`, `0..4`.
        overrides: settings of models, as for `--set`.
        options: of the place; see `Deployment`.
        dry_run: change nothing.

    Returns:
        The objects that were, or would be, applied. Of the Secret the key's value is left out.

    Raises:
        NoDevice: `on` names no namespace of a cluster.
        PlaceFailed: the cluster refuses, or cannot scale like that.
    """
    target, options = parse_target(on), dict(options or {})
    if target.kind != "k8s":
        raise PlaceFailed(f"A service cannot be started on {on}.", remedy="Services run on k8s:[[CONTEXT/]NAMESPACE].")
    low, high = read_scale(scale)
    name = object_name(
        options.get("name") or re.sub(r"[^a-z0-9-]+", "-", models[0].rstrip("/").rpartition("/")[2].lower())
    )
    deployment = Deployment(
        name=name, models=tuple(models), image=image, low=low, high=high, overrides=tuple(overrides), options=options
    )
    api = connect(*target.address.rsplit("/", 1))
    groups, budgets = api.groups, ("poddisruptionbudgets", DISRUPTIONS.partition("/")[0])
    if not all(api.may(verb, *budgets) for verb in ("create", "get", "patch")):  # it serves without one as well
        groups -= {DISRUPTIONS}
    objects = service_objects(deployment, target, groups)
    for made in objects:
        if "/" in made["apiVersion"] and made["apiVersion"] not in groups:
            raise PlaceFailed(
                f"The cluster has no {made['apiVersion']}, which a {made['kind']} needs.",
                remedy=f"Its version is too old to scale by itself: --scale {high}." if low < high else "Upgrade it.",
            )
    there = [api.find(thing["kind"], name, api=thing["apiVersion"]) for thing in objects]
    for ours, thing in zip(objects, there, strict=True):
        if thing and not _is_ours(thing):
            raise PlaceFailed(
                f"{ours['kind']} {name} is in namespace {api.namespace} already, and not made by Stoker.",
                remedy="Choose another name: --place-option name=NAME.",
            )
    if low < high and there[0] is not None:  # without the field the server would set 1, until the autoscaler looks
        now = int(there[0]["spec"].get("replicas", 1))
        objects[0]["spec"]["replicas"] = min(max(now, low), high)
    if not dry_run:
        _remove_autoscalers(api, name, besides={thing["kind"] for thing in objects})
        _apply(api, objects, is_new=there[0] is None)
    return [
        {**thing, "stringData": dict.fromkeys(thing["stringData"], "(a key)")} if "stringData" in thing else thing
        for thing in objects
    ]


def _is_ours(thing: Object) -> bool:
    return (thing["metadata"].get("labels") or {}).get("app.kubernetes.io/managed-by") == MANAGER


def _remove_autoscalers(api: ClusterApi, name: str, *, besides: set[str]) -> None:
    """Delete what scaled the service in another way before: it would go on, and set replicas against what is asked."""
    for kind, version in _AUTOSCALERS.items():
        if kind not in besides and version in api.groups:
            before = api.find(kind, name, api=version)
            if before is not None and _is_ours(before):
                api.delete(kind, name, api=version)


def _apply(api: ClusterApi, objects: Sequence[Object], *, is_new: bool) -> None:
    """Apply the Deployment, then what belongs to it; what a first start that fails has made is deleted."""
    owner, *owned = objects
    stored = api.apply(owner)
    reference = reference_to(stored)
    try:
        for thing in owned:
            name = thing["metadata"]["name"]
            if thing["kind"] == "Secret" and api.find("Secret", name) is not None:
                continue  # a new key would be another one than running pods have read
            api.apply({**thing, "metadata": {**thing["metadata"], "ownerReferences": [reference]}})
    except BaseException:
        if is_new:
            with suppress(StokerError):  # the first error is the one to report
                api.delete("Deployment", reference["name"], api="apps/v1")
        raise


def service_objects(deployment: Deployment, target: LaunchTarget, groups: frozenset[str]) -> list[Object]:
    """The objects of a service, its Deployment first; what the autoscaler is depends on the cluster's API groups.

    Raises:
        BadSetting: an option is unknown, or the user is no number.
        PlaceFailed: there is no image, or nothing could wake a service of no replicas.
    """
    require_known("a service", deployment.options, _OPTIONS)
    require_user(deployment.options.get("user", ""))
    if not deployment.image:
        raise PlaceFailed(
            "A pod needs a container image, and none was named.",
            remedy="--image NAME, with Stoker and its extra `serve`.",
        )
    name, namespace = deployment.name, target.address.rpartition("/")[2]
    about = {"name": name, "labels": labels(name, "serving")}
    key = f"metrics:{random.token_hex(16)}"
    keys = {"admin": f"{key}\n", "token": key.partition(":")[2]}
    objects: list[Object] = [
        _deployment(deployment, about),
        new_object("v1", "Secret", about, type="Opaque", stringData=keys),
        _service(about),
    ]
    if DISRUPTIONS in groups and deployment.high > 1:
        objects.append(_disruption_budget(about))
    if MONITORING in groups:
        objects.append(_pod_monitor(about))
    if deployment.low < deployment.high:
        objects.append(_autoscaler(deployment, about, namespace, groups))
    return objects


def _deployment(deployment: Deployment, about: Object) -> Object:
    options, name = deployment.options, deployment.name
    volumes: list[Object] = [
        {"name": "keys", "secret": {"secretName": name, "items": [{"key": "admin", "path": "admin"}]}}
    ]
    mounts: list[Object] = [{"name": "keys", "mountPath": KEYS, "readOnly": True}]
    models = deployment.models
    if claim := options.get("claim"):
        volumes.append({"name": "models", "persistentVolumeClaim": {"claimName": claim, "readOnly": True}})
        mounts.append({"name": "models", "mountPath": MODELS, "readOnly": True})
        models = tuple(f"{MODELS}/{path.lstrip('/')}" for path in models)
    own = {
        "--host": EVERYWHERE,
        "--http-port": HTTP_PORT,
        "--grpc-port": GRPC_PORT,
        "--admin-host": EVERYWHERE,
        "--admin-port": ADMIN_PORT,
        "--admin-keys": f"{KEYS}/admin",
        "--grace": GRACE_S,
    }
    command = ["python3", "-m", "stoker", "serve", *models, *(str(word) for pair in own.items() for word in pair)]
    command += [word for override in deployment.overrides for word in ("--set", override)]
    resources: Object = {"requests": {"cpu": options.get("cpus", "2"), "memory": options.get("memory", "2Gi")}}
    if memory := options.get("memory"):  # what models need is not known here: the default is no limit
        resources["limits"] = {"memory": memory}
    container = {
        "name": "serve",
        "image": deployment.image,
        "command": command,
        "ports": [
            {"name": "http", "containerPort": HTTP_PORT, "protocol": "TCP"},
            {"name": "grpc", "containerPort": GRPC_PORT, "protocol": "TCP"},
            {"name": "admin", "containerPort": ADMIN_PORT, "protocol": "TCP"},
        ],
        # Every model is loaded and answers its golden inputs before the server is ready: ten minutes at most.
        "startupProbe": _probe("ready", period_s=2, failures=300),
        "readinessProbe": _probe("ready", period_s=2, failures=2),
        "livenessProbe": _probe("live", period_s=10, failures=6),
        "lifecycle": {"preStop": {"exec": {"command": ["python3", "-c", f"import time; time.sleep({ENDPOINTS_S})"]}}},
        "resources": resources,
        "securityContext": SECURITY,
        "volumeMounts": mounts,
    }
    pod: Object = {
        "terminationGracePeriodSeconds": GRACE_S + ENDPOINTS_S + 5,
        **pod_rights(options.get("account", ""), options.get("pull-secret", ""), options.get("user", "")),
        "containers": [container],
        "volumes": volumes,
    }
    chosen = labels(name, "serving")
    # A node that goes takes as few replicas as can be. Whatever their number: another template would restart them all.
    spread = {"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway"}
    pod["topologySpreadConstraints"] = [{**spread, "labelSelector": {"matchLabels": chosen}}]
    spec: Object = {
        "selector": {"matchLabels": chosen},
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
        "template": {"metadata": {"labels": chosen}, "spec": pod},
    }
    if deployment.low == deployment.high:  # else the autoscaler's
        spec["replicas"] = deployment.low
    return new_object("apps/v1", "Deployment", about, spec=spec)


def _probe(what: str, *, period_s: int, failures: int) -> Object:
    return {
        "httpGet": {"path": f"/v2/health/{what}", "port": "http"},
        "periodSeconds": period_s,
        "failureThreshold": failures,
        "timeoutSeconds": 2,
    }


def _service(about: Object) -> Object:
    # Part of the key by which the server merges ports: older ones do not add the default when objects are applied.
    ports = [
        {"name": "http", "port": HTTP_PORT, "targetPort": "http", "protocol": "TCP"},
        {
            "name": "grpc",
            "port": GRPC_PORT,
            "targetPort": "grpc",
            "protocol": "TCP",
            "appProtocol": "kubernetes.io/h2c",
        },
    ]
    return new_object("v1", "Service", about, spec={"selector": about["labels"], "ports": ports})


def _disruption_budget(about: Object) -> Object:
    """Nodes that are drained take one replica after the other; of one replica alone it holds no drain up."""
    spec = {"maxUnavailable": 1, "selector": {"matchLabels": about["labels"]}}
    return new_object(DISRUPTIONS, "PodDisruptionBudget", about, spec=spec)


def _pod_monitor(about: Object) -> Object:
    endpoint = {
        "port": "admin",
        "path": "/metrics",
        "authorization": {"credentials": {"name": about["name"], "key": "token"}},
    }
    spec = {"selector": {"matchLabels": about["labels"]}, "podMetricsEndpoints": [endpoint]}
    return new_object(MONITORING, "PodMonitor", about, spec=spec)


def _autoscaler(deployment: Deployment, about: Object, namespace: str, groups: frozenset[str]) -> Object:
    name, options = deployment.name, deployment.options
    scaled = {"apiVersion": "apps/v1", "kind": "Deployment", "name": name}
    if deployment.low == 0:
        if KEDA_HTTP not in groups:
            raise PlaceFailed(
                "With 0 replicas nothing would wake the service: the cluster has no HTTP add-on of KEDA.",
                remedy=f"--scale 1..{deployment.high}, or install the add-on.",
            )
        spec: Object = {
            "hosts": [options.get("host") or f"{name}.{namespace}"],
            "scaleTargetRef": {**scaled, "service": name, "port": HTTP_PORT},
            "replicas": {"min": 0, "max": deployment.high},
            "scaledownPeriod": 300,
            "scalingMetric": {"concurrency": {"targetValue": QUEUED_ROWS}},
        }
        return new_object(KEDA_HTTP, "HTTPScaledObject", about, spec=spec)
    if (server := options.get("prometheus")) and KEDA in groups:
        query = f'sum(stoker_queue_rows{{namespace="{namespace}",pod=~"{name}-.*"}})'
        about_query = {"serverAddress": server, "query": query, "threshold": str(QUEUED_ROWS)}
        spec = {
            "scaleTargetRef": scaled,
            "minReplicaCount": deployment.low,
            "maxReplicaCount": deployment.high,
            "cooldownPeriod": 300,
            "triggers": [{"type": "prometheus", "metadata": about_query}],
        }
        return new_object(KEDA, "ScaledObject", about, spec=spec)
    metric: Object = {
        "type": "Resource",
        "resource": {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": 70}},
    }
    if any(group.startswith(CUSTOM_METRICS) for group in groups):
        metric = {
            "type": "Pods",
            "pods": {
                "metric": {"name": "stoker_queue_rows"},
                "target": {"type": "AverageValue", "averageValue": str(QUEUED_ROWS)},
            },
        }
    spec = {
        "scaleTargetRef": scaled,
        "minReplicas": deployment.low,
        "maxReplicas": deployment.high,
        "metrics": [metric],
    }
    return new_object("autoscaling/v2", "HorizontalPodAutoscaler", about, spec=spec)
