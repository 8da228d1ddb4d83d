"""A fake of an API server of Kubernetes 1.37, with JobSet, Kubeflow's Trainer and Kueue, which obeys their rules.

What is sent is validated: by kubernetes-validate's schemas of 1.37, strictly, and by kubeflow-trainer-api's models; a
field that those do not know is refused, as `fieldValidation=Strict` does. Controllers are run by `settle`, and before
each answer: Indexed Jobs with podFailurePolicy and replacement of ended pods, suspension, JobSets, TrainJobs, Kueue's
workloads, garbage collection. Pods are run by the tests' kubelet, or moved by hand with `end_pod`.
"""

from __future__ import annotations

import base64
import copy
import json
import threading
import uuid
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import kubernetes_validate
from kubeflow_trainer_api.models import jobset_v1alpha2_job_set, trainer_v1alpha1_train_job

from tests.places.kubernetes.kubelet import Kubelets, Object, execute, now

GROUPS = (
    "batch/v1",
    "apps/v1",
    "autoscaling/v2",
    "policy/v1",
    "storage.k8s.io/v1",
    "authorization.k8s.io/v1",
    "jobset.x-k8s.io/v1alpha2",
    "trainer.kubeflow.org/v1alpha1",
    "kueue.x-k8s.io/v1beta1",
    "keda.sh/v1alpha1",
    "http.keda.sh/v1alpha1",
)
_CUSTOM = {
    "JobSet": jobset_v1alpha2_job_set.JobsetV1alpha2JobSet,
    "TrainJob": trainer_v1alpha1_train_job.TrainerV1alpha1TrainJob,
}
_KINDS = {
    "jobs": "Job",
    "jobsets": "JobSet",
    "trainjobs": "TrainJob",
    "pods": "Pod",
    "services": "Service",
    "nodes": "Node",
    "configmaps": "ConfigMap",
    "secrets": "Secret",
    "persistentvolumeclaims": "PersistentVolumeClaim",
    "persistentvolumes": "PersistentVolume",
    "deployments": "Deployment",
    "namespaces": "Namespace",
    "horizontalpodautoscalers": "HorizontalPodAutoscaler",
    "scaledobjects": "ScaledObject",
    "workloads": "Workload",
    "httpscaledobjects": "HTTPScaledObject",
    "storageclasses": "StorageClass",
    "localqueues": "LocalQueue",
    "poddisruptionbudgets": "PodDisruptionBudget",
    "events": "Event",
}
_GIVEN = {"nodes", "storageclasses", "namespaces", "localqueues", "persistentvolumes", "events"}
_INDEX = "batch.kubernetes.io/job-completion-index"
_QUEUE = "kueue.x-k8s.io/queue-name"


class Refused(Exception):
    """A refusal, as the server's Status says it."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code, self.reason = code, reason


class FakeCluster:
    """A cluster in this process.

    Attributes:
        objects: by (plural, name).
        forbidden: pairs (verb, plural) that are not allowed.
        quota: most devices of all Jobs' pods; None: no limit.
        refusal: why no pod is taken, as by Pod Security; "": they are.
        is_silent: the server accepts connections and answers with 504.
        requests: number of requests answered.
        kubelets: who runs its pods, for exec; None: none.
    """

    def __init__(self, *, version: str = "37", groups: tuple[str, ...] = GROUPS) -> None:
        self.version, self.groups = version, groups
        self.objects: dict[tuple[str, str], Object] = {}
        self.forbidden: set[tuple[str, str]] = set()
        self.quota: int | None = None
        self.refusal = ""
        self.is_silent = False
        self.requests = 0
        self.kubelets: Kubelets | None = None
        self._lock = threading.RLock()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        """Stop answering."""
        self._http.shutdown()
        self._http.server_close()

    def add(self, plural: str, name: str, **fields: Any) -> Object:
        """Put an object there as if a controller had made it."""
        about = {"name": name, "uid": str(uuid.uuid4()), "creationTimestamp": now(), "labels": {}, "namespace": "team"}
        stored = {"kind": _KINDS[plural], "metadata": about | fields.pop("metadata", {}), **fields}
        self.objects[plural, name] = stored
        return stored

    def add_node(self, name: str, labels: dict[str, str], gpus: int) -> None:
        """A node that is ready."""
        room = {"cpu": "96", "memory": "1000Gi", "nvidia.com/gpu": str(gpus)}
        ready = {"type": "Ready", "status": "True"}
        self.add(
            "nodes", name, metadata={"labels": labels}, spec={}, status={"allocatable": room, "conditions": [ready]}
        )

    def of(self, plural: str) -> list[Object]:
        """The objects of a kind."""
        return [thing for (kind, _), thing in sorted(self.objects.items()) if kind == plural]

    def names(self) -> set[str]:
        """`plural/name` of all objects that a run may leave."""
        return {f"{kind}/{name}" for kind, name in self.objects if kind not in _GIVEN}

    def end_pod(self, name: str, code: int, *, message: str = "", disrupted: str = "") -> None:
        """A pod's container ends; with `disrupted` as after an eviction."""
        pod = self.objects["pods", name]
        ended = {"exitCode": code, "reason": "Completed" if code == 0 else "Error", "message": message}
        status = pod.setdefault("status", {})
        status["phase"] = "Succeeded" if code == 0 else "Failed"
        status["containerStatuses"] = [{"name": "node", "state": {"terminated": ended}}]
        if disrupted:
            status.setdefault("conditions", []).append(
                {
                    "type": "DisruptionTarget",
                    "status": "True",
                    "reason": disrupted,
                    "message": "preempted by another pod",
                }
            )
        self.settle()

    def run_pod(self, name: str) -> None:
        """A pod's container runs."""
        self.objects["pods", name]["status"] = {
            "phase": "Running",
            "startTime": now(),
            "conditions": [{"type": "PodScheduled", "status": "True"}],
            "containerStatuses": [{"name": "node", "state": {"running": {}}}],
        }

    def admit(self) -> None:
        """Kueue admits all workloads."""
        for workload in self.of("workloads"):
            workload["status"] = {"conditions": [{"type": "QuotaReserved", "status": "True"}]}
            self._owner(workload)["spec"]["suspend"] = False
        self.settle()

    def preempt(self) -> None:
        """Kueue takes the place of all workloads for others."""
        for workload in self.of("workloads"):
            workload["status"] = {
                "conditions": [
                    {"type": "QuotaReserved", "status": "False", "message": "couldn't assign flavors"},
                    {
                        "type": "Evicted",
                        "status": "True",
                        "reason": "Preempted",
                        "message": "Preempted to accommodate one",
                    },
                ]
            }
            self._owner(workload)["spec"]["suspend"] = True
        self.settle()

    def _owner(self, thing: Object) -> Object:
        reference = thing["metadata"]["ownerReferences"][0]
        return next(one for one in self.objects.values() if one["metadata"]["uid"] == reference["uid"])

    def settle(self) -> None:
        """Run the controllers until nothing changes."""
        with self._lock:
            while True:
                before = json.dumps(self.objects_as_text(), sort_keys=True)
                self._collect_garbage()
                self._queue()
                for trainjob in self.of("trainjobs"):
                    self._train(trainjob)
                for jobset in self.of("jobsets"):
                    self._set_of_jobs(jobset)
                for job in self.of("jobs"):
                    self._job(job)
                self._bind()
                if json.dumps(self.objects_as_text(), sort_keys=True) == before:
                    return

    def objects_as_text(self) -> dict[str, Object]:
        """All objects under one key each."""
        return {f"{kind}/{name}": thing for (kind, name), thing in self.objects.items()}

    def _collect_garbage(self) -> None:
        uids = {thing["metadata"]["uid"] for thing in self.objects.values()}
        for (kind, name), thing in list(self.objects.items()):
            owners = thing["metadata"].get("ownerReferences") or []
            if owners and not any(owner["uid"] in uids for owner in owners):
                self._remove(kind, name)

    def _remove(self, plural: str, name: str, grace_s: int | None = None) -> None:
        thing = self.objects[plural, name]
        runs = plural == "pods" and thing.get("status", {}).get("phase") == "Running" and self.kubelets is not None
        if runs and grace_s != 0:
            thing["metadata"].setdefault("deletionTimestamp", now())
            thing["metadata"].setdefault(
                "deletionGracePeriodSeconds", thing["spec"].get("terminationGracePeriodSeconds", 30)
            )
        else:
            del self.objects[plural, name]

    def _queue(self) -> None:
        for plural in ("jobs", "jobsets", "trainjobs"):
            for thing in self.of(plural):
                about = thing["metadata"]
                name = f"workload-{about['name']}"
                if (
                    _QUEUE in about["labels"]
                    and not about.get("ownerReferences")
                    and ("workloads", name) not in self.objects
                ):
                    self.add(
                        "workloads",
                        name,
                        metadata={"ownerReferences": [_reference(thing)]},
                        spec={"queueName": about["labels"][_QUEUE]},
                        status={
                            "conditions": [{"type": "QuotaReserved", "status": "False", "message": "no quota is free"}]
                        },
                    )

    def _train(self, trainjob: Object) -> None:
        name, spec = trainjob["metadata"]["name"], trainjob["spec"]
        trainer = spec["trainer"]
        patch = spec["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"][0]
        patched = copy.deepcopy(patch["template"]["spec"]["template"])
        container = patched["spec"]["containers"][0] | {
            "image": trainer["image"],
            "command": trainer["command"],
            "env": trainer["env"],
            "resources": trainer.get("resourcesPerNode", {}),
        }
        patched["spec"]["containers"] = [container]
        job = {
            "completionMode": "Indexed",
            "parallelism": trainer["numNodes"],
            "completions": trainer["numNodes"],
            "backoffLimit": 0,
            "template": {**patched, "spec": {"restartPolicy": "Never", **patched["spec"]}},
        }
        if ("jobsets", name) not in self.objects:
            self.add(
                "jobsets",
                name,
                metadata={"ownerReferences": [_reference(trainjob)]},
                spec={"replicatedJobs": [{"name": "node", "replicas": 1, "template": {"spec": job}}]},
            )
        jobset = self.objects["jobsets", name]
        jobset["spec"]["suspend"] = spec.get("suspend", False)
        self._copy_end(jobset, trainjob, {"Completed": "Complete", "Failed": "Failed"})

    def _set_of_jobs(self, jobset: Object) -> None:
        name = jobset["metadata"]["name"]
        for replicated in jobset["spec"]["replicatedJobs"]:
            child = f"{name}-{replicated['name']}-0"
            spec = copy.deepcopy(replicated["template"]["spec"])
            spec["template"]["spec"]["subdomain"] = name
            if ("jobs", child) not in self.objects:
                self.add("jobs", child, metadata={"ownerReferences": [_reference(jobset)]}, spec=spec)
                self.add(
                    "services",
                    name,
                    metadata={"ownerReferences": [_reference(jobset)]},
                    spec={"clusterIP": "None", "selector": {}},
                )
            job = self.objects["jobs", child]
            job["spec"]["suspend"] = jobset["spec"].get("suspend", False)
            self._copy_end(job, jobset, {"Complete": "Completed", "Failed": "Failed"})

    def _copy_end(self, child: Object, parent: Object, names: dict[str, str]) -> None:
        for condition in child.get("status", {}).get("conditions") or []:
            if condition["type"] in names and not parent.get("status", {}).get("conditions"):
                parent.setdefault("status", {})["conditions"] = [condition | {"type": names[condition["type"]]}]

    def _job(self, job: Object) -> None:
        name, spec, status = job["metadata"]["name"], job["spec"], job.setdefault("status", {})
        if status.get("conditions"):
            return
        mine = [pod for pod in self.of("pods") if _controlled_by(pod, job)]
        if spec.get("suspend"):
            for pod in mine:
                self._remove("pods", pod["metadata"]["name"])
            return
        status.setdefault("startTime", now())
        for pod in mine:
            self._account(job, pod)
        if status.get("conditions"):
            return
        is_indexed = spec.get("completionMode") == "Indexed"
        done = {_index(pod) for pod in mine if pod.get("status", {}).get("phase") == "Succeeded"}
        if len(done) >= spec["completions"]:
            status["conditions"] = [{"type": "Complete", "status": "True"}]
            return
        # As with podReplacementPolicy Failed, the default with a podFailurePolicy: none beside one that is being ended.
        taken = done | {
            _index(pod) for pod in mine if pod.get("status", {}).get("phase") not in {"Failed", "Succeeded"}
        }
        for index in range(spec["parallelism"]):
            if index not in taken:
                self._make_pod(job, name, index, is_indexed=is_indexed)

    def _make_pod(self, job: Object, name: str, index: int, *, is_indexed: bool) -> None:
        if self.refusal:
            self._refuse_pod(job, name)
            return
        template = copy.deepcopy(job["spec"]["template"])
        labels = template.get("metadata", {}).get("labels", {}) | {"batch.kubernetes.io/job-name": name}
        about: Object = {
            "labels": labels,
            "ownerReferences": [_reference(job) | {"controller": True}],
            "annotations": {},
        }
        pod = self.add(
            "pods", f"{name}-{index}-{uuid.uuid4().hex[:5]}", metadata=about, spec=template["spec"], status={}
        )
        if is_indexed:
            about["annotations"][_INDEX] = str(index)
            pod["spec"]["hostname"] = f"{name}-{index}"
            pod["spec"]["containers"][0].setdefault("env", []).append(
                {"name": "JOB_COMPLETION_INDEX", "value": str(index)}
            )

    def _refuse_pod(self, job: Object, name: str) -> None:
        """An event says why a controller's pod is not taken."""
        message = f'Error creating: pods "{name}-x7k2p" is forbidden: {self.refusal}'
        if self.objects.get(("events", f"{name}.1"), {}).get("message") == message:
            return
        self.add(
            "events",
            f"{name}.1",
            type="Warning",
            reason="FailedCreate",
            message=message,
            involvedObject={"kind": "Job", "name": name, "uid": job["metadata"]["uid"]},
            lastTimestamp=now(),
        )

    def _account(self, job: Object, pod: Object) -> None:
        """Decide about a failed pod, once, by the podFailurePolicy."""
        if pod.get("status", {}).get("phase") != "Failed" or pod["metadata"].get("accounted"):
            return
        pod["metadata"]["accounted"] = True
        spec, status = job["spec"], job["status"]
        action = _action(spec.get("podFailurePolicy", {}).get("rules", []), pod)
        if action == "Ignore":
            return
        status["failed"] = status.get("failed", 0) + 1
        name = pod["metadata"]["name"]
        if action == "FailJob":
            status["conditions"] = [
                {
                    "type": "Failed",
                    "status": "True",
                    "reason": "PodFailurePolicy",
                    "message": f"Container node of pod {name}: FailJob rule",
                }
            ]
        elif status["failed"] > spec["backoffLimit"]:
            status["conditions"] = [{"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded"}]

    def _bind(self) -> None:
        """Bind claims to volumes, as far as there are any."""
        free = [v for v in self.of("persistentvolumes") if "claimRef" not in v["spec"]]
        for claim in self.of("persistentvolumeclaims"):
            if claim.get("status", {}).get("phase") != "Bound" and free:
                volume = free.pop()
                volume["spec"]["claimRef"] = {"name": claim["metadata"]["name"]}
                claim["spec"]["volumeName"], claim["status"] = volume["metadata"]["name"], {"phase": "Bound"}

    def answer(self, method: str, path: str, query: dict[str, str], body: Object | None) -> Object:
        """The answer to a request; raises Refused."""
        with self._lock:
            self.requests += 1
            if self.is_silent:
                raise Refused(504, "Timeout", "the server was unable to return a response in time")
            self.settle()
            answer = self._answer(method, path, query, body)
            self.settle()
            return copy.deepcopy(answer)

    def _answer(self, method: str, path: str, query: dict[str, str], body: Object | None) -> Object:
        if path == "/version":
            return {"major": "1", "minor": self.version}
        if path == "/apis":
            return {"groups": [{"versions": [{"groupVersion": group}]} for group in self.groups]}
        words = path.strip("/").split("/")
        words = words[2:] if words[0] == "api" else words[3:]
        if words[0] == "namespaces" and len(words) > 2:
            words = words[2:]
        plural, name, part = [*words, "", ""][:3]
        if plural == "selfsubjectaccessreviews":
            return self._review((body or {})["spec"]["resourceAttributes"])
        verb = {"GET": "get" if name else "list", "POST": "create", "PATCH": "patch", "DELETE": "delete"}[method]
        if (verb, plural) in self.forbidden:
            raise Refused(403, "Forbidden", f'{plural} is forbidden: User "somebody" cannot {verb} resource "{plural}"')
        if part in {"binding", "pendingworkloads"}:
            return self._part(part, name, body)
        if method == "POST":
            return self._create(plural, body or {}, is_dry="dryRun" in query)
        if not name:
            return {"items": [thing for thing in self.of(plural) if _selected(thing, query.get("labelSelector", ""))]}
        return self._one(method, (plural, name), query, body or {})

    def _review(self, asked: Object) -> Object:
        resource = "/".join(text for text in (asked["resource"], asked.get("subresource")) if text)
        return {"status": {"allowed": (asked["verb"], resource) not in self.forbidden}}

    def _part(self, part: str, name: str, body: Object | None) -> Object:
        if part == "pendingworkloads":
            places = [
                {"metadata": w["metadata"], "positionInLocalQueue": n} for n, w in enumerate(self.of("workloads"))
            ]
            return {"items": places}
        pod = self.objects["pods", name]
        pod["spec"]["nodeName"] = (body or {})["target"]["name"]
        pod.setdefault("status", {}).setdefault("conditions", []).append({"type": "PodScheduled", "status": "True"})
        return {}

    def _one(self, method: str, key: tuple[str, str], query: dict[str, str], body: Object) -> Object:
        if method == "PATCH" and "fieldManager" in query:
            if key not in self.objects:
                return self._create(key[0], body, is_dry=False)
            validate(body)
        if key not in self.objects:
            raise Refused(404, "NotFound", f'{key[0]} "{key[1]}" not found')
        thing = self.objects[key]
        if method == "PATCH":
            _merge(thing, body)
        elif method == "DELETE":
            self._remove(*key, body.get("gracePeriodSeconds"))
        return thing

    def _create(self, plural: str, manifest: Object, *, is_dry: bool) -> Object:
        name = manifest["metadata"]["name"]
        if plural not in {"nodes", "persistentvolumes"}:
            validate(manifest)
        if (plural, name) in self.objects:
            raise Refused(409, "AlreadyExists", f'{plural} "{name}" already exists')
        if self.quota is not None and plural == "jobs":
            limits = manifest["spec"]["template"]["spec"]["containers"][0].get("resources", {}).get("limits", {})
            asked = int(limits.get("nvidia.com/gpu", 0)) * manifest["spec"]["completions"]
            if asked > self.quota:
                raise Refused(
                    403,
                    "Forbidden",
                    f'jobs "{name}" is forbidden: exceeded quota: g, requested: {asked}, limited: {self.quota}',
                )
        manifest = copy.deepcopy(manifest)
        if plural == "secrets":
            texts = manifest.pop("stringData", {})
            sent = {key: base64.b64encode(text.encode()).decode() for key, text in texts.items()}
            manifest["data"] = manifest.get("data", {}) | sent
        fields = {key: value for key, value in manifest.items() if key not in {"kind", "metadata"}}
        stored = self.add(plural, name, metadata=manifest["metadata"], **fields)
        if is_dry:
            del self.objects[plural, name]
        return stored


def validate(manifest: Object) -> None:
    """Refuse what the current schemas do not know."""
    kind = manifest["kind"]
    try:
        if kind in _CUSTOM:
            kept = _CUSTOM[kind].from_dict(manifest).to_dict()
            if lost := list(_unknown(manifest, kept)):
                raise Refused(400, "BadRequest", f"strict decoding error: unknown field {lost}")
        elif kind not in {"ScaledObject", "HTTPScaledObject"}:  # CRDs of which no schema is published as a package
            kubernetes_validate.validate(manifest, "1.37", strict=True)
    except (ValueError, kubernetes_validate.ValidationError) as error:
        raise Refused(422, "Invalid", f"{kind} is invalid: {str(error)[:500]}") from error


def _unknown(sent: object, kept: object, path: str = "") -> Iterator[str]:
    if isinstance(sent, dict) and isinstance(kept, dict):
        for key, value in sent.items():
            if key not in kept and value not in ({}, [], None):
                yield f"{path}.{key}"
            elif key in kept:
                yield from _unknown(value, kept[key], f"{path}.{key}")
    elif isinstance(sent, list) and isinstance(kept, list):
        for number, (one, other) in enumerate(zip(sent, kept, strict=True)):
            yield from _unknown(one, other, f"{path}[{number}]")


def _action(rules: list[Object], pod: Object) -> str:
    """What the first matching rule of a podFailurePolicy says."""
    codes = [s["state"]["terminated"]["exitCode"] for s in pod["status"].get("containerStatuses", [])]
    conditions = {(c["type"], c["status"]) for c in pod["status"].get("conditions", [])}
    for rule in rules:
        if any((c["type"], c["status"]) in conditions for c in rule.get("onPodConditions", [])):
            return str(rule["action"])
        if (wanted := rule.get("onExitCodes")) is not None:
            inside = [code in wanted["values"] for code in codes if code != 0]
            if any(inside) if wanted["operator"] == "In" else any(not one for one in inside):
                return str(rule["action"])
    return "Count"


def _merge(thing: Object, change: Object) -> None:
    for key, value in change.items():
        if value is None:
            thing.pop(key, None)
        elif isinstance(value, dict) and isinstance(thing.get(key), dict):
            _merge(thing[key], value)
        else:
            thing[key] = value


def _selected(thing: Object, selector: str) -> bool:
    wanted = dict(part.split("=") for part in selector.split(",") if part)
    return wanted.items() <= (thing["metadata"].get("labels") or {}).items()


def _reference(thing: Object) -> Object:
    about = thing["metadata"]
    return {"apiVersion": "v1", "kind": thing["kind"], "name": about["name"], "uid": about["uid"]}


def _controlled_by(thing: Object, owner: Object) -> bool:
    """Whether `owner` runs it: what merely goes with its owner, as a pod for files does, is not a Job's pod."""
    references = thing["metadata"].get("ownerReferences") or []
    return any(r.get("controller") and r["uid"] == owner["metadata"]["uid"] for r in references)


def _index(pod: Object) -> int:
    return int((pod["metadata"].get("annotations") or {}).get(_INDEX, "0"))


def _handler(cluster: FakeCluster) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1  # headers and body in one packet

        def log_message(self, *_: object) -> None:
            """Nothing."""

        def respond(self) -> None:
            address = urlsplit(self.path)
            query = parse_qs(address.query)
            if address.path.endswith("/exec") and cluster.kubelets is not None:
                execute(self, cluster.kubelets.pod_named(address.path.split("/")[-2]), query["command"])
                return
            size = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(size)) if size else None
            code = 200
            try:
                answer = cluster.answer(self.command, address.path, {key: v[0] for key, v in query.items()}, body)
            except Refused as refusal:
                code = refusal.code
                answer = {"kind": "Status", "code": code, "reason": refusal.reason, "message": str(refusal)}
            data = json.dumps(answer).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = do_PATCH = do_DELETE = respond  # noqa: N815  # the protocol's names

    return Handler
