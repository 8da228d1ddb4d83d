"""Runs on Kubernetes: a real API server 1.20 with its controllers, and a fake of 1.37; pods are processes here.

The real server knows plain Jobs and custom resources; what is newer (Indexed Jobs, podFailurePolicy, JobSet, TrainJob,
Kueue) runs on the fake, which obeys their schemas and rules.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from stoker.errors import PlaceFailed, PlaceUnreachable
from stoker.launching.bundle import Bundle, TreeFile, stoker_bundle
from stoker.launching.kubernetes.cluster_api import ClusterApi, dropped
from stoker.launching.kubernetes.kubernetes_launcher import LAUNCHER, _api, _cluster, _needed
from stoker.launching.kubernetes.kubernetes_service import deploy
from stoker.launching.kubernetes.manifests import ClusterOptions
from stoker.launching.launch import LaunchedRun, launch
from stoker.launching.launch_options import LaunchOptions
from stoker.launching.launcher import Submission
from stoker.records import ENDED, LaunchState
from stoker.testing import LiveLauncherConformance
from tests.optional import optional
from tests.places.kubernetes.cluster import Cluster, kubeconfig, why_not
from tests.places.kubernetes.kubelet import Kubelets, Server, scratch

optional("kubernetes")

pytestmark = [pytest.mark.places, pytest.mark.skipif(bool(why_not()), reason=why_not() or "it can be run")]
PATIENCE_S = 300.0
ROOT = Path(__file__).parents[2]
PLAN = "pinned.json"
NODES: dict[str, dict[str, str]] = {"n1": {}, "n2": {}}

JOB = """
import time
import torch
from torch import nn
import stoker

class Slow(torch.utils.data.Dataset):
    def __init__(self, pause_s):
        self.pause_s = pause_s
        draw = torch.Generator().manual_seed(1)
        self.inputs, self.targets = torch.randn(256, 8, generator=draw), torch.randint(0, 3, (256,), generator=draw)
    def __len__(self):
        return 256
    def __getitem__(self, index):
        time.sleep(self.pause_s)
        return self.inputs[index], self.targets[index]
    @property
    def fingerprint(self):
        return "slow"

def job(epochs: float = 6, pause_s: float = 0.01) -> stoker.Job:
    return stoker.Job(model=lambda: nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3)), data=Slow(pause_s),
                      loss="cross_entropy", optimizer=stoker.SGD(lr=0.05, momentum=0.9), batch=16,
                      until=stoker.epochs(epochs), seed=3)
"""


@pytest.fixture(scope="module")
def real() -> Iterator[Cluster]:
    """A real API server, its controllers, and two nodes."""
    cluster = Cluster(NODES)
    yield cluster
    cluster.close()


@pytest.fixture
def cluster(real: Cluster, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """The real cluster with a volume for the test's claim, and all nodes in use again."""
    monkeypatch.setenv("KUBECONFIG", str(real.kubeconfig))
    real.add_volume(f"volume-{abs(hash(request.node.name))}-{time.monotonic_ns()}")
    yield real
    for node in NODES:
        real.server.merge(f"/api/v1/nodes/{node}", {"spec": {"unschedulable": None}})
    for path in ("/apis/batch/v1/namespaces/team/jobs", "/api/v1/namespaces/team/persistentvolumeclaims"):
        background = {"kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": "Background"}
        real.server.ask("DELETE", path, background)  # of a test that failed: the next one has the same names
        until(lambda path=path: not real.server.ask("GET", path)["items"], "an empty namespace")


@pytest.fixture
def modern(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The fake of 1.37 with the tests' kubelet."""
    with modern_place() as server:
        monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig))
        yield server


@contextmanager
def modern_place() -> Iterator[Any]:
    """The fake of 1.37, two nodes, one volume."""
    fake = optional("tests.places.kubernetes.fake")
    server, folder = fake.FakeCluster(), scratch("stoker-fake-")
    server.kubeconfig = folder / "kubeconfig"
    server.kubeconfig.write_text(json.dumps(kubeconfig(server.url, {"test": "token"})))
    server.disk = folder / "disk"
    server.disk.mkdir()
    server.add("namespaces", "team")
    default = {"storageclass.kubernetes.io/is-default-class": "true"}
    server.add("storageclasses", "disk", metadata={"annotations": default})
    server.add("persistentvolumes", "disk", spec={"hostPath": {"path": str(server.disk)}})
    server.kubelets = Kubelets(Server(server.url, "token"), folder, NODES)
    try:
        yield server
    finally:
        server.kubelets.close()
        server.close()


@pytest.fixture
def job(place: Path) -> Path:
    """A job whose samples take a stated time, and a plan for it, so that a run elsewhere and one here have the same."""
    path = place / "slow.py"
    path.write_text(JOB)
    made = stoker("plan", path.name, "--threads", "1", "--set", "pause_s=0", "--json")
    (place / PLAN).write_bytes(made.stdout)
    return path


def stoker(*words: str) -> subprocess.CompletedProcess[bytes]:
    """A command of Stoker here."""
    environ = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, "-m", "stoker", *words], check=True, capture_output=True, env=environ)


def start(job: Path, word: str = "k8s:team/cpu", *, settings: dict[str, Any] | None = None, **more: Any) -> LaunchedRun:
    """A run, started with one thread and a checkpoint each second."""
    fields: dict[str, Any] = {
        "env": "theirs",
        "image": "python:here",
        "arguments": ("--threads", "1", "--checkpoint-every", "1"),
        "variables": {"OMP_NUM_THREADS": "1", "STOKER_CACHE": str(Path.cwd() / "cache")},
        "time_limit_s": 3600.0,
        "plan": Path(PLAN),
    }
    return launch(job, on=word, settings=settings, options=LaunchOptions(**(fields | more)))


def until(condition: Callable[[], Any], what: str) -> Any:
    """What `condition` gives once it is true."""
    end = time.monotonic() + PATIENCE_S
    while not (result := condition()):
        assert time.monotonic() < end, f"waited {PATIENCE_S:g} s for {what}"
        time.sleep(0.2)
    return result


def ended(run: LaunchedRun) -> LaunchState:
    """The state at the end."""
    state: LaunchState = until(lambda: (s := LAUNCHER.state(run.launch.handle)).phase in ENDED and s, "the end")
    return state


def log_of(run: LaunchedRun) -> bytes:
    """The run's log; b"" while its pod does not answer, as one that is about to end."""
    with suppress(PlaceUnreachable):
        return LAUNCHER.events(run.launch.handle, 0)
    return b""


def has_saved(run: LaunchedRun) -> bool:
    """Whether a checkpoint was written."""
    return b'"checkpointed"' in log_of(run)


def pods_of(run: LaunchedRun) -> list[str]:
    """Names of the run's pods that are not over."""
    api = ClusterApi("", "team")
    pods = api.objects("Pod", selector_of(run))
    return [
        p["metadata"]["name"]
        for p in pods
        if p.get("status", {}).get("phase") in {"Pending", "Running"} and "deletionTimestamp" not in p["metadata"]
    ]


def selector_of(run: LaunchedRun) -> str:
    """Label selector of a run's own pods."""
    return f"app.kubernetes.io/instance={run.launch.handle['name']},app.kubernetes.io/component=training"


def left(run: LaunchedRun) -> list[str]:
    """All objects of a run but its claim."""
    api, name = ClusterApi("", "team"), run.launch.handle["name"]
    kinds = [("Job", "batch/v1"), ("Pod", "v1"), ("ConfigMap", "v1"), ("Secret", "v1"), ("Service", "v1")]
    return [
        f"{kind} {thing['metadata']['name']}"
        for kind, version in kinds
        for thing in api.objects(kind, f"app.kubernetes.io/instance={name}", api=version)
    ]


def is_fetched(run: LaunchedRun) -> bool:
    """Fetch the run's directory; whether the place answered: a follower asks again as well."""
    try:
        LAUNCHER.fetch(run.launch.handle, run.directory.path)
    except PlaceUnreachable:
        return False
    return True


def weights(folder: Path) -> dict[str, Any]:
    """The final weights of a run's directory."""
    return load_file(folder / "model.safetensors")


def assert_equal_to_an_unbroken_run(run: LaunchedRun, job: Path) -> None:
    """The run, fetched, has the bits of the same run here, never stopped; and it was stopped, and went on."""
    until(lambda: is_fetched(run), "the run's directory")
    events = [json.loads(line) for line in (run.directory.path / "events.jsonl").read_text().splitlines()]
    assert any(event["kind"] == "resumed" and event["fields"]["samples"] > 0 for event in events)
    stoker("train", job.name, "--threads", "1", "--run-dir", "here", "--json", "--plan", PLAN, "--set", "pause_s=0")
    ours, theirs = weights(Path("here")), weights(run.directory.path)
    assert ours.keys() == theirs.keys()
    assert all(ours[name].equal(theirs[name]) for name in ours)


class TestOnTheRealServer(LiveLauncherConformance):
    launcher = LAUNCHER

    @contextmanager
    def place(self, folder: Path) -> Iterator[Submission]:
        """The real cluster, and a job of about a minute."""
        cluster = Cluster(NODES)
        try:
            cluster.add_volume("volume")
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("KUBECONFIG", str(cluster.kubeconfig))
                yield submission(folder)
        finally:
            cluster.close()

    def until(self, handle: dict[str, Any], *phases: str) -> Iterator[LaunchState]:
        """States, twice a second."""
        yield from states(handle, *phases)


class TestOnTheFake(TestOnTheRealServer):
    @contextmanager
    def place(self, folder: Path) -> Iterator[Submission]:
        """The fake of the current version."""
        with modern_place() as server, pytest.MonkeyPatch.context() as patch:
            patch.setenv("KUBECONFIG", str(server.kubeconfig))
            yield submission(folder)


def submission(folder: Path) -> Submission:
    """A run of about a minute."""
    code = Bundle(kind="code", name="slow.py", files=(TreeFile.of_bytes("slow.py", JOB.encode()),))
    return Submission(
        run="slow-1a2b3c",
        target=LAUNCHER.parse("team/cpu"),
        stoker=stoker_bundle(),
        job_file="slow.py",
        code=code,
        arguments=("--set", "epochs=20", "--threads", "1"),
        image="python:here",
        owner="me@here:/slow-1a2b3c",
        variables={"STOKER_CACHE": str(folder / "cache")},
    )


def states(handle: dict[str, Any], *phases: str) -> Iterator[LaunchState]:
    """States of a run, up to one of `phases`."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        state = LAUNCHER.state(handle)
        yield state
        if state.phase in phases:
            return
        time.sleep(0.5)
    raise AssertionError(f"no phase of {phases} within {PATIENCE_S:g} s; the last: {state}")


def test_a_deleted_pod_is_followed_by_one_that_goes_on_bit_equal(cluster: Cluster, job: Path) -> None:
    """`kubectl delete pod` twice: each time the run saves, and the next pod continues; the weights are the same."""
    run = start(job)
    for _ in range(2):
        before = log_of(run).count(b'"checkpointed"')
        until(lambda before=before: log_of(run).count(b'"checkpointed"') > before, "a save")
        ClusterApi("", "team").delete("Pod", pods_of(run)[0])
        until(lambda: LAUNCHER.state(run.launch.handle).phase == "running", "the next pod")
    assert ended(run).phase == "finished"
    assert_equal_to_an_unbroken_run(run, job)
    LAUNCHER.stop(run.launch.handle)
    until(lambda: left(run) == [], "the garbage collector")


def test_a_drained_node_hands_the_run_to_another_one(cluster: Cluster, job: Path) -> None:
    """Cordon and evict, as `kubectl drain` does: the run goes on elsewhere, bit-equal."""
    run = start(job)
    until(lambda: has_saved(run), "a checkpoint")
    name = pods_of(run)[0]
    path = f"/api/v1/namespaces/team/pods/{name}"
    node = cluster.server.ask("GET", path)["spec"]["nodeName"]
    cluster.server.merge(f"/api/v1/nodes/{node}", {"spec": {"unschedulable": True}})
    cluster.server.ask(
        "POST", f"{path}/eviction", {"apiVersion": "policy/v1beta1", "kind": "Eviction", "metadata": {"name": name}}
    )
    assert ended(run).phase == "finished"
    pod = cluster.kubelets.pods[list(cluster.kubelets.pods)[-1]]
    assert pod.spec["nodeName"] != node
    assert_equal_to_an_unbroken_run(run, job)
    LAUNCHER.stop(run.launch.handle)


def test_the_real_server_keeps_every_field(cluster: Cluster, job: Path) -> None:
    """Each object of a run, as the server stores it, has all that was sent; and a custom resource travels whole."""
    run = start(job, settings={"epochs": 50})
    api = ClusterApi("", "team")
    text = LAUNCHER.script(submission(Path.cwd()))
    import yaml

    compared: list[str] = []
    for sent in yaml.safe_load_all(text):
        name = sent["metadata"]["name"].replace("slow-1a2b3c", run.launch.handle["name"])
        stored = api.find(sent["kind"], name, api=sent["apiVersion"])
        if sent["kind"] == "PersistentVolumeClaim":
            assert stored is not None
        if stored is None:
            continue  # a part more or less of what travels
        compared.append(sent["kind"])
        sent.pop("binaryData", None)
        assert list(dropped({**sent, "metadata": {}}, stored)) == []
    assert {"PersistentVolumeClaim", "ConfigMap", "Job"} <= set(compared)
    LAUNCHER.stop(run.launch.handle)


def test_stopped_and_started_again_the_same_run_goes_on(cluster: Cluster, job: Path) -> None:
    """Stop saves and leaves nothing but the claim; the same command continues from there."""
    run = start(job)
    until(lambda: has_saved(run), "a checkpoint")
    LAUNCHER.stop(run.launch.handle)
    until(lambda: left(run) == [], "the garbage collector")
    assert LAUNCHER.state(run.launch.handle).phase == "stopped"
    again = start(job)
    assert again.directory == run.directory
    assert ended(again).phase == "finished"
    assert_equal_to_an_unbroken_run(again, job)
    LAUNCHER.stop(again.launch.handle)


def test_an_image_without_python_fails_in_words(cluster: Cluster, job: Path) -> None:
    """On a server without podFailurePolicy the Job tries again; the reason is there from the first time on."""
    run = start(job, image="empty:1")
    state = until(lambda: "no python3" in (s := LAUNCHER.state(run.launch.handle)).why and s, "the reason")
    assert "executable file not found" in state.evidence
    LAUNCHER.stop(run.launch.handle)
    until(lambda: left(run) == [], "the garbage collector")


def test_an_image_that_cannot_be_pulled_is_said(cluster: Cluster, job: Path) -> None:
    """It is tried again by the platform, so the run is starting, with the reason."""
    run = start(job, image="missing:1")
    state = until(lambda: "stuck" in (s := LAUNCHER.state(run.launch.handle)).why and s, "the reason")
    assert (state.phase, "missing:1" in state.why) == ("starting", True)
    LAUNCHER.stop(run.launch.handle)


def test_a_quota_that_is_exceeded_leaves_nothing(cluster: Cluster, job: Path) -> None:
    """The server's own sentence, and no object of the run."""
    quotas = "/api/v1/namespaces/team/resourcequotas"
    cluster.server.ask("POST", quotas, {"metadata": {"name": "none"}, "spec": {"hard": {"count/jobs.batch": "0"}}})
    try:
        until(
            lambda: cluster.server.ask("GET", f"{quotas}/none").get("status", {}).get("used"), "the quota's controller"
        )
        with pytest.raises(PlaceFailed, match="quota does not allow it"):
            start(job)
    finally:
        cluster.server.ask("DELETE", f"{quotas}/none")
    api = ClusterApi("", "team")
    until(lambda: not api.objects("ConfigMap", "app.kubernetes.io/managed-by=stoker"), "the garbage collector")
    assert not [c for c in api.objects("PersistentVolumeClaim") if c["status"].get("phase") != "Bound"]


def test_a_quota_that_refuses_pods_is_said_until_it_lets_them_in(cluster: Cluster, job: Path) -> None:
    """The Job is taken and its pods are not: the server's own sentence with the remedy; the run starts after it."""
    quotas = "/api/v1/namespaces/team/resourcequotas"
    hard = {"requests.memory": "10Gi"}
    cluster.server.ask("POST", quotas, {"metadata": {"name": "memory"}, "spec": {"hard": hard}})
    try:
        run = start(job, settings={"epochs": 1, "pause_s": 0})
        state = until(
            lambda: (s := LAUNCHER.state(run.launch.handle)).why.startswith("the cluster refuses") and s, "why"
        )
        assert state.phase == "queued"
        assert "must specify requests.memory" in state.why
        assert "--place-option memory=" in state.why
    finally:
        cluster.server.ask("DELETE", f"{quotas}/memory")
    assert ended(run).phase == "finished"
    LAUNCHER.stop(run.launch.handle)


def test_an_api_server_that_is_killed_and_comes_back_ends_no_run(cluster: Cluster, job: Path) -> None:
    """While it is away the run is unknown, and trains; afterwards it is as it was, and finishes in its first pod."""
    run = start(job)
    until(lambda: has_saved(run), "a checkpoint")
    pods = pods_of(run)
    cluster.kill_api_server()
    try:
        assert LAUNCHER.state(run.launch.handle).phase == "unknown"
        with pytest.raises(PlaceUnreachable):
            LAUNCHER.events(run.launch.handle, 0)
    finally:
        cluster.restart_api_server()
    state = ended(run)
    assert (state.phase, state.restarts) == ("finished", 0)
    assert pods == [p["metadata"]["name"] for p in ClusterApi("", "team").objects("Pod", selector_of(run))]
    LAUNCHER.stop(run.launch.handle)


def test_a_service_is_applied_by_the_real_server(cluster: Cluster) -> None:
    """Deployment, Secret and Service; the same call again changes them and restarts no pod; one delete takes all."""
    pods = "app.kubernetes.io/instance=digits,app.kubernetes.io/component=serving"
    for replicas in (2, 1):
        deploy(["models/digits"], on="k8s:team", image="missing:1", scale=str(replicas))
        until(lambda n=replicas: len(ClusterApi("", "team").objects("Pod", pods)) == n, "its pods")
    api = ClusterApi("", "team")
    assert len(api.ask("GET", "/apis/apps/v1/namespaces/team/replicasets")["items"]) == 1
    assert [port["protocol"] for port in api.get("Service", "digits")["spec"]["ports"]] == ["TCP", "TCP"]
    api.delete("Deployment", "digits", api="apps/v1")
    until(lambda: api.find("Service", "digits") is None and api.find("Secret", "digits") is None, "the collector")


def test_somebody_who_may_nothing_is_told_what_is_missing(cluster: Cluster, job: Path) -> None:
    """By the server's own review of each permission; nothing is sent."""
    probe = LAUNCHER.probe(LAUNCHER.parse("limited/team/cpu"), {})
    (sentence,) = probe.missing
    assert "create, get, patch, delete jobs.batch; create configmaps" in sentence
    with pytest.raises(PlaceFailed, match=r"may not create, get, patch, delete jobs\.batch"):
        start(job, "k8s:limited/team/cpu")


def test_the_permissions_that_are_asked_for_are_enough(cluster: Cluster, job: Path) -> None:
    """A login that may do these things alone starts a run, follows it, and brings it home."""
    target = LAUNCHER.parse("team/cpu")
    rules = [
        {"apiGroups": [group], "resources": [resource], "verbs": [verb]}
        for verb, resource, group in _needed(ClusterOptions(), target, _cluster(_api(target)))
    ]
    access, name = "/apis/rbac.authorization.k8s.io/v1/namespaces/team", {"metadata": {"name": "runs"}}
    group = "rbac.authorization.k8s.io"
    cluster.server.ask("POST", f"{access}/roles", {**name, "rules": rules})
    bound = {"subjects": [{"kind": "User", "name": "somebody", "apiGroup": group}]}
    role = {"roleRef": {"kind": "Role", "name": "runs", "apiGroup": group}}
    cluster.server.ask("POST", f"{access}/rolebindings", {**name, **bound, **role})
    try:
        run = start(job, "k8s:limited/team/cpu")
        until(lambda: has_saved(run), "a checkpoint, by a command in its pod")
        LAUNCHER.fetch(run.launch.handle, run.directory.path)
        LAUNCHER.stop(run.launch.handle)
    finally:
        for kind in ("rolebindings", "roles"):
            cluster.server.ask("DELETE", f"{access}/{kind}/runs")


def test_a_custom_resource_is_made_and_deleted_by_the_real_server(cluster: Cluster, job: Path) -> None:
    """A JobSet on a server that has its CRD: stored whole, held back, let go, and gone with all that belongs to it."""
    cluster.server.ask(
        "POST",
        "/apis/apiextensions.k8s.io/v1/customresourcedefinitions",
        {
            "metadata": {"name": "jobsets.jobset.x-k8s.io"},
            "spec": {
                "group": "jobset.x-k8s.io",
                "scope": "Namespaced",
                "names": {"plural": "jobsets", "singular": "jobset", "kind": "JobSet", "listKind": "JobSetList"},
                "versions": [
                    {
                        "name": "v1alpha2",
                        "served": True,
                        "storage": True,
                        "schema": {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}},
                    }
                ],
            },
        },
    )
    api = ClusterApi("", "team")
    until(lambda: "jobset.x-k8s.io/v1alpha2" in ClusterApi("", "team").groups, "the CRD")
    run = start(job, place={"kind": "jobset"})
    stored = api.get("JobSet", run.launch.handle["name"], api="jobset.x-k8s.io/v1alpha2")
    assert stored["spec"]["suspend"] is False
    assert LAUNCHER.state(run.launch.handle).phase == "queued"
    LAUNCHER.stop(run.launch.handle)
    until(lambda: left(run) == [], "the garbage collector")


def test_a_node_that_dies_loses_no_run(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its processes are gone and it says nothing more: the node's controller gives the pod up, the next one goes on."""
    cluster = Cluster(NODES)
    try:
        monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig))
        cluster.add_volume("volume")
        run = start(job)
        until(lambda: has_saved(run), "a checkpoint")
        pod = cluster.kubelets.pod_named(pods_of(run)[0])
        cluster.kubelets.lose(pod.spec["nodeName"])
        assert ended(run).phase == "finished"
        assert_equal_to_an_unbroken_run(run, job)
    finally:
        cluster.close()


def test_two_nodes_train_one_run_and_a_lost_pod_joins_again(modern: Any, job: Path) -> None:
    """An Indexed Job on the fake: both pods meet by the Service's name; one is evicted, and the run goes on."""
    run = start(job, "k8s:team/2x1xcpu", settings={"epochs": 12}, plan=None)
    until(lambda: has_saved(run), "a checkpoint")
    pod = next(
        p
        for p in modern.of("pods")
        if p["metadata"]["annotations"].get("batch.kubernetes.io/job-completion-index") == "1"
    )
    pod["status"]["conditions"].append(
        {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}
    )
    modern.answer("DELETE", f"/api/v1/namespaces/team/pods/{pod['metadata']['name']}", {}, None)
    assert ended(run).phase == "finished"
    assert b'"resumed"' in until(lambda: log_of(run), "the log")
    LAUNCHER.stop(run.launch.handle)
    until(
        lambda: modern.names() == {"persistentvolumeclaims/slow-" + run.directory.name.split("-")[1] + "-run"},
        "the end",
    )


@pytest.mark.parametrize("kind", ["jobset", "trainjob"])
def test_a_jobset_or_trainjob_trains(modern: Any, job: Path, kind: str) -> None:
    """The same pods under other controllers, by way of Kueue."""
    modern.add("localqueues", "users")
    run = start(job, settings={"epochs": 2, "pause_s": 0}, place={"kind": kind, "queue": "users"})
    assert LAUNCHER.state(run.launch.handle).phase == "queued"
    modern.admit()
    assert ended(run).phase == "finished"
    until(lambda: is_fetched(run), "the run's directory")
    assert run.directory.read_run().status == "finished"


def test_what_is_too_large_for_config_maps_goes_through_a_pod(modern: Any, job: Path, place: Path) -> None:
    """8 MB that do not compress: sent into the volume by a pod of the run's image, once."""
    import random

    (place / "noise.bin").write_bytes(random.Random(0).randbytes(8_000_000))
    run = start(job, settings={"epochs": 2, "pause_s": 0}, send=(place / "noise.bin",))
    assert ended(run).phase == "finished"
    found = list(modern.disk.rglob("noise.bin"))
    assert [path.stat().st_size for path in found] == [8_000_000]
    assert not any("files" in name for name in modern.names())
