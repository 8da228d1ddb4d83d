"""The launcher against a fake of Kubernetes 1.37, JobSet, Kubeflow's Trainer and Kueue that obeys their schemas."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from stoker.errors import BadSetting, NoDevice, PlaceFailed, PlaceUnreachable
from stoker.launching.at_place import LIMIT_OVER
from stoker.launching.bundle import Bundle, TreeFile
from stoker.launching.environment_lock import EnvironmentLock
from stoker.launching.kubernetes import cluster_api, kubernetes_launcher, pod_start, pod_volume
from stoker.launching.kubernetes.cluster_api import ClusterApi, dropped
from stoker.launching.kubernetes.cluster_state import with_host
from stoker.launching.kubernetes.kubernetes_launcher import LAUNCHER
from stoker.launching.kubernetes.manifests import EXIT_AGAIN, _tar_gz, labels
from stoker.launching.launcher import HostRanks, Request, Submission
from stoker.launching.lines import Answer, LocalLine
from stoker.launching.shipment import PYTHON_CHECK
from stoker.records import LaunchState
from stoker.testing import LauncherConformance
from tests.optional import optional
from tests.places.kubernetes.cluster import kubeconfig

optional("kubernetes")
optional("kubernetes_validate")
optional("kubeflow_trainer_api")
fake = optional("tests.places.kubernetes.fake")

H100 = {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A cluster with two nodes of 8 H100, a default StorageClass, a queue, and a kubeconfig that names it."""
    server = fake.FakeCluster()
    server.add_node("n1", H100, 8)
    server.add_node("n2", H100, 8)
    server.add("namespaces", "team")
    server.add("localqueues", "users", status={"pendingWorkloads": 3})
    server.add(
        "storageclasses", "disk", metadata={"annotations": {"storageclass.kubernetes.io/is-default-class": "true"}}
    )
    file = tmp_path / "kubeconfig"
    file.write_text(
        json.dumps(kubeconfig(server.url, {"test": "token", "eu/west": "token"}, {"gone": "https://127.0.0.1:9"}))
    )
    monkeypatch.setenv("KUBECONFIG", str(file))
    yield server
    server.close()


@pytest.mark.usefixtures("cluster")
class TestConformance(LauncherConformance):
    launcher = LAUNCHER
    words: ClassVar[dict[str, tuple[int, int, str]]] = {
        "team/cpu": (1, 1, "cpu"),
        "team/2x8xh100": (2, 8, "h100"),
        "eu/west/team/4xh100": (1, 4, "h100"),
    }
    bad_words = ("Team/8xh100", "team/0xh100", "eu/west/more/team", "team/8x")
    environments: ClassVar[list[dict[str, str]]] = [
        {},
        {"JOB_COMPLETION_INDEX": "1", "STOKER_HOSTS": "2", "STOKER_MASTER": "job-0.job"},
    ]
    unreachable: ClassVar[dict[str, Any] | None] = {
        "context": "gone",
        "namespace": "team",
        "kind": "Job",
        "name": "job",
        "run": "job",
        "uid": "1",
    }
    client = ("kubernetes", "yaml")

    def submission(self, word: str, **changes: Any) -> Submission:
        """With an image, which a pod needs."""
        return super().submission(word, **({"image": "python:3.11"} | changes))


def submission(word: str = "team/8xh100", **changes: Any) -> Submission:
    """A run with two small bundles."""
    code = Bundle(kind="code", name="job.py", files=(TreeFile.of_bytes("job.py", b"print(1)\n"),))
    stoker = Bundle(kind="stoker", name="Stoker", files=(TreeFile.of_bytes("stoker/__init__.py", b""),))
    fields: dict[str, Any] = {
        "run": "job-ac1f4a",
        "target": LAUNCHER.parse(word),
        "code": code,
        "stoker": stoker,
        "job_file": "job.py",
        "image": "python:3.11",
        "time_limit_s": 3600.2,
        "save_s": 5.0,
        "owner": "me@here:/runs/job-ac1f4a",
    }
    return Submission(**(fields | changes))


def start(**changes: Any) -> dict[str, Any]:
    """The handle of a started run."""
    return LAUNCHER.start(submission(**changes), lambda text: None)


def job_of(cluster: Any, name: str = "job-ac1f4a") -> Any:
    """The Job as it was sent."""
    return cluster.objects["jobs", name]


def test_words_name_context_namespace_and_shape(cluster: Any) -> None:
    """A context's name may have slashes; the last word is a shape if it has a count or names a device."""

    def read(text: str) -> tuple[str, int, int, str]:
        target = LAUNCHER.parse(text)
        return target.address, target.num_nodes, target.devices_each, target.device

    assert read("team") == ("/team", 1, 1, "")
    assert read("team/8xh100") == ("/team", 1, 8, "h100")
    assert read("team/2x4xa100") == ("/team", 2, 4, "a100")
    assert read("team/cpu") == ("/team", 1, 1, "cpu")
    assert read("") == ("/team", 1, 1, "")  # of the current context
    assert read("/2x4xa100") == ("/team", 2, 4, "a100")
    assert read("test/team") == ("test/team", 1, 1, "")
    assert read("eu/west/team/2x8xh100") == ("eu/west/team", 2, 8, "h100")


@pytest.mark.parametrize("text", ["team//8xh100", "Team/8xh100", "team/0xh100", "eu/west/more/team", "team/8x"])
def test_a_word_that_cannot_be_read_shows_the_form(cluster: Any, text: str) -> None:
    """The remedy has the syntax."""
    with pytest.raises(NoDevice) as caught:
        LAUNCHER.parse(text)
    assert "k8s:[[CONTEXT/]NAMESPACE]" in str(caught.value)


def test_an_unknown_context_names_the_nearest(cluster: Any) -> None:
    """A context that the kubeconfig has not is refused before anything is asked."""
    with pytest.raises(NoDevice, match=r"no context 'tset'.*\n.*'test'"):
        LAUNCHER.parse("tset/team/8xh100")
    assert cluster.requests == 0


def test_in_a_pod_the_namespace_is_its_own(cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no kubeconfig that says another."""
    (tmp_path / "namespace").write_text("research\n")
    monkeypatch.setattr(kubernetes_launcher, "_POD", tmp_path / "namespace")
    monkeypatch.setattr(kubernetes_launcher, "contexts", lambda: ({}, ""))
    assert LAUNCHER.parse("").address == "/research"
    monkeypatch.setattr(kubernetes_launcher, "_POD", tmp_path / "none")
    assert LAUNCHER.parse("").address == "/default"


def test_a_run_stays_with_the_cluster_it_was_started_in(cluster: Any, tmp_path: Path) -> None:
    """`kubectl config use-context` after the start does not make another cluster, which has no such run, answer."""
    handle = start()
    assert handle["context"] == "test"
    file = tmp_path / "kubeconfig"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"current-context": "gone"}))
    assert LAUNCHER.state(handle).phase in {"queued", "starting"}


def test_one_pod_is_a_job_with_all_that_belongs_to_it(cluster: Any) -> None:
    """One node: a plain Job, released once its ConfigMap is there; the claim alone has no owner."""
    handle = start()
    job = job_of(cluster)
    assert cluster.names() >= {
        "jobs/job-ac1f4a",
        "configmaps/job-ac1f4a-sent-0",
        "persistentvolumeclaims/job-ac1f4a-run",
    }
    assert job["spec"]["suspend"] is False
    assert "completionMode" not in job["spec"]
    pod = job["spec"]["template"]["spec"]
    assert pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "8"
    assert pod["activeDeadlineSeconds"] == 3601
    assert pod["terminationGracePeriodSeconds"] == 35
    assert "owner" not in str(cluster.objects["persistentvolumeclaims", "job-ac1f4a-run"]["metadata"])
    owner = cluster.objects["configmaps", "job-ac1f4a-sent-0"]["metadata"]["ownerReferences"][0]
    assert owner["uid"] == job["metadata"]["uid"] == handle["uid"]
    assert LAUNCHER.state(handle).phase == "queued"


def test_the_pod_gets_its_share_of_a_node(cluster: Any) -> None:
    """Half a node's devices, and 0.9 of half its cores and memory; and only nodes of that kind."""
    start(word="team/4xh100")
    pod = job_of(cluster)["spec"]["template"]["spec"]
    assert pod["containers"][0]["resources"]["requests"]["cpu"] == "43"
    terms = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert terms[0]["matchExpressions"] == [
        {"key": "nvidia.com/gpu.product", "operator": "In", "values": ["NVIDIA-H100-80GB-HBM3"]}
    ]


def test_a_mirror_in_the_container_is_refused(cluster: Any) -> None:
    """It would go with the pod; the run's volume stays, and so does a bucket."""
    with pytest.raises(PlaceFailed, match=r"takes its disk with it.*\n.*a folder below /stoker"):
        start(arguments=("--keep", "file:///mnt/runs"))
    assert cluster.names() == set()
    start(arguments=("--keep", "file:///stoker/kept"))
    start(run="job-2", arguments=("--keep", "s3://bucket/runs"))


def test_a_claim_that_is_made_is_said_with_how_it_goes(cluster: Any) -> None:
    """It costs money until it is deleted, which nothing of the run does; one that was there is the user's own."""
    told: list[str] = []
    LAUNCHER.start(submission(), told.append)
    assert any("kubectl -n team delete pvc job-ac1f4a-run" in text for text in told)
    cluster.add("persistentvolumeclaims", "mine")
    told.clear()
    LAUNCHER.start(submission(run="job-2", options={"claim": "mine"}), told.append)
    assert not any("delete pvc" in text for text in told)


def test_the_pod_is_held_to_its_memory(cluster: Any) -> None:
    """It is ended with a reason before the node runs out, and so is what loaders hand over in shared memory."""
    start(word="team/4xh100")
    pod = job_of(cluster)["spec"]["template"]["spec"]
    resources = pod["containers"][0]["resources"]
    shared = next(volume for volume in pod["volumes"] if volume["name"] == "shared")
    assert resources["limits"]["memory"] == resources["requests"]["memory"] == shared["emptyDir"]["sizeLimit"]
    assert "cpu" not in resources["limits"], "a limit would slow it down where cores are free"


@pytest.mark.parametrize("kind", ["job", "jobset", "trainjob"])
def test_pods_of_a_user_are_what_pod_security_calls_restricted(cluster: Any, kind: str) -> None:
    """Whichever controller makes them, and the pod for files too: no root, no rights to gain, the volume is theirs."""
    handle = start(options={"kind": kind, "user": "1000:100"})
    cluster.settle()
    files = pod_volume.visitor("job-files", "job", handle["pod"], None)
    fake.validate(files)
    for pod in (cluster.of("pods")[0], files):
        security = pod["spec"]["securityContext"]
        assert security["runAsNonRoot"] is True
        assert (security["runAsUser"], security["runAsGroup"], security["fsGroup"]) == (1000, 100, 100)
        container = pod["spec"]["containers"][0]["securityContext"]
        assert container["allowPrivilegeEscalation"] is False
        assert container["capabilities"] == {"drop": ["ALL"]}
        assert container["seccompProfile"] == {"type": "RuntimeDefault"}
    environ = {e["name"]: e.get("value") for e in cluster.of("pods")[0]["spec"]["containers"][0]["env"]}
    assert environ["HOME"] == "/stoker", "a number without a name has no home directory"


@pytest.mark.parametrize("user", ["0", "root", "1000:", "-1", "1000:wheel"])
def test_a_user_that_is_root_or_no_number_is_refused(cluster: Any, user: str) -> None:
    """Before anything is made."""
    with pytest.raises(BadSetting, match="wanted the number of a user other than root"):
        start(options={"user": user})
    assert cluster.names() == set()


@pytest.mark.parametrize("kind", ["job", "jobset"])
def test_an_ended_run_leaves_the_cluster_after_a_week(cluster: Any, kind: str) -> None:
    """With the megabytes of its ConfigMaps; the set of Jobs decides, and not the Job in it."""
    start(options={"kind": kind})
    spec = cluster.objects[f"{kind}s", "job-ac1f4a"]["spec"]
    assert spec["ttlSecondsAfterFinished"] == 7 * 24 * 3600
    if kind == "jobset":
        assert "ttlSecondsAfterFinished" not in spec["replicatedJobs"][0]["template"]["spec"]


def test_no_clock_of_the_platform_fails_a_trainjob(cluster: Any) -> None:
    """Its deadline would end it as failed; that of a Job's pod lets another pod go on."""
    start(options={"kind": "trainjob"}, time_limit_s=60.0)
    assert "activeDeadlineSeconds" not in cluster.objects["trainjobs", "job-ac1f4a"]["spec"]


@pytest.mark.parametrize("kind", ["job", "jobset", "trainjob"])
@pytest.mark.parametrize(
    ("refusal", "remedy"),
    [
        ("failed quota: mem: must specify requests.memory", "--place-option memory="),
        ('violates PodSecurity "restricted:latest": runAsNonRoot != true', "--place-option user="),
        ("exceeded quota: pods, requested: pods=1, used: pods=4, limited: pods=4", "once others have ended"),
    ],
)
def test_a_pod_that_the_cluster_refuses_is_said_with_the_remedy(
    cluster: Any, kind: str, refusal: str, remedy: str
) -> None:
    """There is no pod and no condition then: an event alone has the reason, and it goes once a pod is taken."""
    cluster.refusal = refusal
    handle = start(options={"kind": kind})
    state = LAUNCHER.state(handle)
    assert (state.phase, refusal in state.why, remedy in state.why) == ("queued", True, True)
    assert "FailedCreate" in state.evidence
    cluster.forbidden.add(("list", "events"))
    assert LAUNCHER.state(handle).why == "no pod was made yet"
    cluster.forbidden.clear()
    cluster.refusal = ""
    cluster.settle()
    for event in cluster.of("events"):
        event["lastTimestamp"] = "2026-11-25T10:00:00Z"
    assert "refuses" not in LAUNCHER.state(handle).why


def test_a_volume_that_cannot_be_mounted_is_said_once_it_is_no_accident(cluster: Any) -> None:
    """A disk that is just being attached says the same once or twice; of other pods nothing is said."""
    handle = start()
    name = cluster.of("pods")[0]["metadata"]["name"]
    cluster.objects["pods", name]["status"] = {"conditions": [{"type": "PodScheduled", "status": "True"}]}

    def says(count: int, whose: str) -> str:
        cluster.add(
            "events",
            "mount",
            type="Warning",
            reason="FailedMount",
            message="Unable to attach or mount volumes: timed out",
            involvedObject={"kind": "Pod", "name": whose},
            count=count,
            lastTimestamp="2100-01-01T00:00:00Z",
        )
        return str(LAUNCHER.state(handle).why)

    assert "timed out" not in says(2, name)
    assert "timed out" not in says(9, "other")
    assert "cannot begin, and is tried again: Unable to attach" in says(3, name)


def test_several_nodes_are_an_indexed_job_behind_a_headless_service(cluster: Any) -> None:
    """Each pod knows its host by its index, and host 0 by the Service's name; a secret lets only them meet."""
    start(word="team/2x8xh100")
    cluster.settle()
    job, service = job_of(cluster), cluster.objects["services", "job-ac1f4a"]
    assert job["spec"]["completionMode"] == "Indexed"
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"].items() <= job["spec"]["template"]["metadata"]["labels"].items()
    assert "STOKER_SECRET" in cluster.objects["secrets", "job-ac1f4a"]["data"]
    pod = cluster.of("pods")[1]
    environ = {entry["name"]: entry.get("value", "") for entry in pod["spec"]["containers"][0]["env"]}
    assert LAUNCHER.ranks(environ) == HostRanks(
        host=1,
        num_hosts=2,
        master=f"{cluster.of('pods')[0]['spec']['hostname']}.{pod['spec']['subdomain']}",
        port=29400,
    )


@pytest.mark.parametrize(("code", "again"), [(130, True), (75, True), (4, False), (2, False), (137, False)])
def test_exit_codes_decide_whether_another_pod_follows(cluster: Any, code: int, again: bool) -> None:
    """130 (saved, asked to leave) and 75 (slice over) go on; all others fail the Job, which then names its reason."""
    handle = start()
    first = cluster.of("pods")[0]["metadata"]["name"]
    cluster.end_pod(first, code, message=json.dumps({"phase": "failed", "why": "no such column", "evidence": "x.csv"}))
    state = LAUNCHER.state(handle)
    assert (len(cluster.of("pods")) == 2) is again
    assert state.phase == ("requeued" if again else "failed")
    if not again:
        assert (state.exit_code, state.why) == (code, "no such column")
        assert "x.csv" in state.evidence


def test_disruptions_are_never_counted(cluster: Any) -> None:
    """Ten evicted pods in a row, killed without saving, are followed by an eleventh."""
    handle = start()
    for _ in range(10):
        name = next(p["metadata"]["name"] for p in cluster.of("pods") if not p.get("status", {}).get("phase"))
        cluster.end_pod(name, 137, disrupted="EvictionByEvictionAPI")
    state = LAUNCHER.state(handle)
    assert (state.phase, state.restarts) == ("requeued", 10)


def test_states_name_their_reason(cluster: Any) -> None:
    """Unschedulable, pulling, stuck, running, being ended, done: each with the condition or status that says so."""
    handle = start()
    pod = cluster.of("pods")[0]
    name = pod["metadata"]["name"]

    def seen(**status: Any) -> tuple[str, str]:
        pod["status"] = status
        state = LAUNCHER.state(handle)
        assert state.evidence
        assert state.at
        return state.phase, state.why

    unschedulable = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "Unschedulable",
        "message": "Insufficient gpu",
    }
    placed = {"type": "PodScheduled", "status": "True"}
    pull = {"name": "node", "state": {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}}
    assert seen(phase="Pending", conditions=[unschedulable]) == ("queued", "Insufficient gpu")
    assert seen(phase="Pending", conditions=[placed])[0] == "starting"
    assert seen(phase="Pending", conditions=[placed], containerStatuses=[pull]) == (
        "starting",
        "stuck, and tried again: no such image",
    )
    assert seen(phase="Unknown")[0] == "unknown"
    cluster.run_pod(name)
    assert LAUNCHER.state(handle).phase == "running"
    pod["metadata"]["deletionTimestamp"] = "2026-11-25T00:00:00Z"
    assert LAUNCHER.state(handle).phase == "saving"
    cluster.end_pod(name, 0)
    assert LAUNCHER.state(handle).phase == "finished"


def test_a_container_that_runs_is_no_run_yet() -> None:
    """What the run says of itself decides: nothing yet, an earlier pod's last words, training, saving."""
    running = LaunchState(phase="running", why="all its pods run")

    def phase(**host: Any) -> str:
        return with_host(running, json.dumps(host).encode() if host else b"").phase

    assert phase() == "starting"
    assert phase(phase="preempted", why="saved and left") == "starting"
    assert phase(phase="running", why="training", samples=64) == "running"
    assert phase(phase="saving", why="asked to save and leave") == "saving"
    assert "64 samples" in with_host(running, b'{"phase": "running", "why": "training", "samples": 64}').why


def test_a_silent_server_is_unknown_and_nothing_is_done(cluster: Any) -> None:
    """25 time-outs of a healthy run's server: 25 times unknown, and not one object changed."""
    handle = start()
    before = json.dumps(cluster.objects_as_text(), sort_keys=True)
    cluster.is_silent = True
    assert {LAUNCHER.state(handle).phase for _ in range(25)} == {"unknown"}
    with pytest.raises(PlaceUnreachable):
        start()
    cluster.is_silent = False
    assert json.dumps(cluster.objects_as_text(), sort_keys=True) == before


def test_an_image_without_python_is_said_so(cluster: Any) -> None:
    """What the container runtime says becomes a sentence."""
    handle = start()
    pod = cluster.of("pods")[0]
    cluster.end_pod(pod["metadata"]["name"], 128)
    pod["status"]["containerStatuses"][0]["state"]["terminated"] |= {
        "reason": "StartError",
        "message": 'exec: "python3": executable file not found in $PATH',
        "finishedAt": "2026-11-25T10:00:00Z",
    }
    state = LAUNCHER.state(handle)
    assert state.at == "2026-11-25T10:00:00Z", "its devices were given back then, whenever it is asked"
    assert (state.phase, state.why) == ("failed", "the image has no python3")


def test_stop_leaves_no_object_but_the_volume(cluster: Any) -> None:
    """One delete takes Job, pods, ConfigMaps, Secret and Service; the run's files stay on its claim."""
    handle = start(word="team/2x8xh100")
    LAUNCHER.stop(handle)
    assert cluster.names() == {"persistentvolumeclaims/job-ac1f4a-run"}
    assert LAUNCHER.state(handle).phase == "stopped"


def test_a_secret_travels_in_the_secret_alone(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its value is in no other object, nor in the handle or the printed manifests."""
    monkeypatch.setenv("API_KEY", "hunter22")
    handle = start(secrets=("API_KEY",))
    others = {key: value for key, value in cluster.objects_as_text().items() if not key.startswith("secrets/")}
    assert "hunter22" not in json.dumps(others) + json.dumps(handle)
    assert "hunter22" not in LAUNCHER.script(submission(secrets=("API_KEY",)))
    assert "API_KEY" in json.dumps(job_of(cluster)["spec"])


def test_the_secret_goes_when_the_run_has_ended(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not before; one of that name which the Job does not own stays."""
    monkeypatch.setenv("API_KEY", "hunter22")
    handle = start(secrets=("API_KEY",))
    assert LAUNCHER.state(handle).phase not in {"finished", "failed"}
    (secret,) = cluster.of("secrets")
    cluster.end_pod(cluster.of("pods")[0]["metadata"]["name"], 0)
    theirs = cluster.objects["secrets", "job-ac1f4a"] = {**secret, "metadata": {"name": "job-ac1f4a", "uid": "other"}}
    assert LAUNCHER.state(handle).phase == "finished"
    assert cluster.of("secrets") == [theirs]
    cluster.objects["secrets", "job-ac1f4a"] = secret
    assert LAUNCHER.state(handle).phase == "finished"
    assert cluster.of("secrets") == []


def test_the_same_run_is_not_started_twice_and_an_ended_one_makes_room(cluster: Any) -> None:
    """A Job of this run that is going is kept; one that ended is replaced; the claim is used again."""
    first = start()
    assert start()["uid"] == first["uid"]
    cluster.end_pod(cluster.of("pods")[0]["metadata"]["name"], 4)
    second = start()
    assert second["uid"] != first["uid"]
    assert LAUNCHER.state(first).phase == "stopped"
    assert LAUNCHER.state(second).phase == "queued"


def test_what_a_killed_start_left_is_replaced(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Job that was never let go would wait for ever: the next start deletes it, and makes another."""
    patch = ClusterApi.patch
    monkeypatch.setattr(ClusterApi, "patch", lambda *_, **__: {})
    held = start()
    assert job_of(cluster)["spec"]["suspend"] is True
    monkeypatch.setattr(ClusterApi, "patch", patch)
    again = start()
    assert again["uid"] != held["uid"]
    assert job_of(cluster)["spec"]["suspend"] is False


def test_a_name_that_collides_is_refused_and_left_alone(cluster: Any) -> None:
    """A Job of that name which somebody else made is not touched, and nothing is left behind."""
    cluster.add("jobs", "job-ac1f4a", spec={"suspend": True, "completions": 1, "parallelism": 1})
    with pytest.raises(PlaceFailed, match="already, and not made by Stoker"):
        start()
    assert cluster.names() == {"jobs/job-ac1f4a"}


def test_a_start_that_fails_half_way_leaves_nothing(cluster: Any) -> None:
    """The Secret is refused after the Job was made: Job, ConfigMap and claim are deleted again."""
    cluster.forbidden.add(("create", "secrets"))
    with pytest.raises(PlaceFailed, match="cannot create resource"):
        start(word="team/2x8xh100")
    cluster.settle()
    assert cluster.names() == set()


def test_an_exceeded_quota_is_one_sentence(cluster: Any) -> None:
    """The server's own numbers, with a remedy, and nothing left."""
    cluster.quota = 4
    with pytest.raises(PlaceFailed, match=r"quota does not allow it.*requested: 8, limited: 4") as caught:
        start()
    assert caught.value.remedy
    assert cluster.names() == set()


def test_fields_that_a_server_drops_are_an_error(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that stores a Job without its podFailurePolicy would lose runs: it is refused, and deleted."""
    create = cluster._create

    def drop(plural: str, manifest: Any, *, is_dry: bool) -> Any:
        stored = create(plural, manifest, is_dry=is_dry)
        stored.get("spec", {}).pop("podFailurePolicy", None)
        return stored

    monkeypatch.setattr(cluster, "_create", drop)
    with pytest.raises(PlaceFailed, match=r"dropped fields of the Job: spec\.podFailurePolicy"):
        start()
    cluster.settle()
    assert cluster.names() == set()


@pytest.mark.parametrize("kind", ["jobset", "trainjob"])
def test_a_jobset_or_trainjob_runs_the_same_pods(cluster: Any, kind: str) -> None:
    """Both come down to an Indexed Job whose pods have the volume, what was sent, and each other's name."""
    handle = start(word="team/2x8xh100", options={"kind": kind})
    cluster.settle()
    pods = cluster.of("pods")
    assert [pod["metadata"]["labels"]["app.kubernetes.io/instance"] for pod in pods] == ["job-ac1f4a"] * 2
    environ = {entry["name"]: entry.get("value", "") for entry in pods[0]["spec"]["containers"][0]["env"]}
    assert environ["STOKER_MASTER"] == f"{pods[0]['spec']['hostname']}.{pods[0]['spec']['subdomain']}"
    assert [mount["mountPath"] for mount in pods[0]["spec"]["containers"][0]["volumeMounts"]][:2] == [
        "/stoker",
        "/stoker-sent",
    ]
    for pod in pods:
        cluster.run_pod(pod["metadata"]["name"])
    assert LAUNCHER.state(handle).phase == "running"
    for pod in pods:
        cluster.end_pod(pod["metadata"]["name"], 0)
    assert LAUNCHER.state(handle).phase == "finished"
    LAUNCHER.stop(handle)
    assert cluster.names() == {"persistentvolumeclaims/job-ac1f4a-run"}


@pytest.mark.parametrize("kind", ["job", "jobset", "trainjob"])
def test_kueue_decides_when_a_run_starts(cluster: Any, kind: str) -> None:
    """The queue's label comes last; the place in the queue is shown; an evicted run is preempted, and comes back."""
    handle = start(options={"queue": "users", "kind": kind})
    state = LAUNCHER.state(handle)
    assert (state.phase, state.why) == ("queued", "place 1 of 1 in queue users; no quota is free")
    assert cluster.of("pods") == []
    cluster.admit()
    cluster.run_pod(cluster.of("pods")[0]["metadata"]["name"])
    assert LAUNCHER.state(handle).phase == "running"
    cluster.preempt()
    state = LAUNCHER.state(handle)
    assert (state.phase, cluster.of("pods")) == ("preempted", [])
    assert "Preempted to accommodate" in state.why
    cluster.admit()
    assert len(cluster.of("pods")) == 1


def test_the_probe_says_what_is_missing(cluster: Any) -> None:
    """Permissions by the server's own review, the device, the claim, the queue, the controller: one sentence each."""
    good = LAUNCHER.probe(LAUNCHER.parse("team/2x8xh100"), {"queue": "users", "kind": "jobset"})
    assert good.missing == ()
    assert good.facts["nodes"] == "2 with 8 h100"
    assert good.facts["Kueue"] == "queue users: 3 waiting"
    cluster.forbidden |= {("create", "jobs"), ("get", "pods/exec")}
    cluster.groups = tuple(group for group in cluster.groups if "jobset" not in group)
    bad = LAUNCHER.probe(LAUNCHER.parse("team/16xh100"), {"queue": "none", "kind": "jobset", "claim": "gone"})
    text = "\n".join(bad.missing)
    for part in (
        "you may not get pods/exec in namespace team",
        "no node has 16 h100, the largest has 8",
        "no claim gone",
        "no LocalQueue none",
        "kind=jobset",
    ):
        assert part in text
    assert len(bad.missing) == 5
    assert "jobs in namespace" not in "\n".join(LAUNCHER.probe(LAUNCHER.parse("team/cpu"), {"kind": "jobset"}).missing)
    cluster.forbidden |= {("patch", "jobs"), ("create", "persistentvolumeclaims"), ("create", "services")}
    several = "\n".join(LAUNCHER.probe(LAUNCHER.parse("team/2x8xh100"), {}).missing)
    for what in ("create, patch jobs.batch", "create persistentvolumeclaims", "create services"):
        assert what in several
    assert several.count("ask for a role") == 1
    cluster.forbidden = {("create", "secrets")}
    assert LAUNCHER.probe(LAUNCHER.parse("team/8xh100"), {}).missing == (), "many may make none, and one pod needs none"
    assert "create secrets" in LAUNCHER.probe(LAUNCHER.parse("team/2x8xh100"), {}).missing[0]


@pytest.mark.parametrize(("version", "needs_create"), [("34", False), ("35", True)])
def test_a_command_in_a_pod_needs_what_the_version_asks_for(cluster: Any, version: str, needs_create: bool) -> None:
    """Before 1.35 a WebSocket is opened by whoever may `get`: a role without `create` is no reason to refuse."""
    cluster.version = version
    cluster.forbidden.add(("create", "pods/exec"))
    missing = LAUNCHER.probe(LAUNCHER.parse("team/8xh100"), {}).missing
    assert bool(missing) == needs_create
    assert all("create pods/exec" in sentence for sentence in missing)


def test_a_missing_namespace_is_named(cluster: Any) -> None:
    """It is found before anything is made."""
    assert LAUNCHER.probe(LAUNCHER.parse("nowhere/8xh100"), {}).missing == ("there is no namespace nowhere",)


def test_a_device_that_no_node_has_is_refused_with_those_that_are_there(cluster: Any) -> None:
    """Nothing is made for a run that no node could take."""
    with pytest.raises(PlaceFailed, match="no node of the cluster has b200; there are: 2 with 8 h100"):
        start(word="team/8xb200")
    assert cluster.names() == set()


def test_without_permission_to_see_nodes_the_label_of_feature_discovery_is_asked_for(cluster: Any) -> None:
    """The kind is still asked for, by the names that drivers give it."""
    cluster.forbidden.add(("list", "nodes"))
    start(word="team/8xa100-80")
    affinity = job_of(cluster)["spec"]["template"]["spec"]["affinity"]
    assert "NVIDIA-A100-SXM4-80GB" in json.dumps(affinity)


def test_offers_count_nodes_with_room(cluster: Any) -> None:
    """Two nodes are free: at once; a pod that holds half a node's devices leaves one; a queue makes it unknown."""

    def offer(word: str, **options: str) -> Any:
        return LAUNCHER.offers(Request(target=LAUNCHER.parse(word), options=options))[0]

    assert offer("team/2x8xh100").starts_in_s == 0
    cluster.add(
        "pods", "other", spec={"nodeName": "n1", "containers": [{"resources": {"limits": {"nvidia.com/gpu": "4"}}}]}
    )
    assert offer("team/2x8xh100").starts_in_s is None
    assert offer("team/1x8xh100").starts_in_s == 0
    assert "1 nodes have room now" in offer("team/8xh100").why
    assert offer("team/2x8xb200".replace("b200", "h100"), queue="users").starts_in_s is None
    assert LAUNCHER.offers(Request(target=LAUNCHER.parse("team/8xb200"))) == ()


def test_printed_manifests_are_those_that_are_sent(cluster: Any) -> None:
    """`--dry-run` makes no object, and its YAML is what the schemas of 1.37 accept."""
    import yaml

    text = LAUNCHER.script(
        submission(word="team/2x8xh100", environment=EnvironmentLock(python="3.11", requirements=()))
    )
    assert "&id" not in text, "people read and keep it: no anchors"
    assert cluster.names() == set()
    documents = list(yaml.safe_load_all(text))
    assert [document["kind"] for document in documents] == [
        "PersistentVolumeClaim",
        "ConfigMap",
        "Secret",
        "Service",
        "Job",
    ]
    for document in documents[2:]:
        fake.validate(document)
    assert "STOKER_SECRET: (read when" in text
    assert text.startswith("# To read:")
    assert "\n    def " in text or "\n    import json\n" in text, "a program's lines are lines"
    absent = LAUNCHER.script(submission(word="team/8xb200"))
    assert "since no node of the cluster has b200" in absent
    assert "no cluster was asked" not in absent


def test_a_kubeconfig_that_is_not_there_is_named(cluster: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A word of the environment may have a typing error."""
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfg"))
    with pytest.raises(NoDevice, match=r"There is no kubeconfig .*/kubeconfg, so"):
        ClusterApi("", "team")


def test_an_unknown_option_names_the_nearest(cluster: Any) -> None:
    """Nothing is asked of the cluster."""
    with pytest.raises(BadSetting, match=r"no option 'quee'\n.*'queue'"):
        start(options={"quee": "users"})
    assert cluster.requests == 0


def test_a_missing_image_is_said_before_anything_is_made(cluster: Any) -> None:
    """The remedy is the option."""
    with pytest.raises(PlaceFailed, match=r"container image.*\n--image"):
        start(image="")
    assert cluster.names() == set()


def test_large_code_is_cut_into_several_config_maps(cluster: Any) -> None:
    """What does not compress below a ConfigMap's limit is spread; all parts are mounted in one folder."""
    import random

    noise = random.Random(0).randbytes(1_500_000)
    code = Bundle(kind="code", name="job.py", files=(TreeFile.of_bytes("job.py", noise),))
    start(code=code)
    maps = cluster.of("configmaps")
    assert len(maps) >= 2
    assert all(len(json.dumps(one)) < 1.45e6 for one in maps)
    sources = job_of(cluster)["spec"]["template"]["spec"]["volumes"][1]["projected"]["sources"]
    assert [source["configMap"]["name"] for source in sources] == [one["metadata"]["name"] for one in maps]


def test_an_older_server_gets_only_what_it_knows(cluster: Any) -> None:
    """Kubernetes 1.20: held back by parallelism 0, no podFailurePolicy, and no several nodes."""
    cluster.version = "20+"
    handle = start()
    assert "podFailurePolicy" not in job_of(cluster)["spec"]
    assert job_of(cluster)["spec"]["parallelism"] == 1
    LAUNCHER.stop(handle)
    with pytest.raises(PlaceFailed, match=r"1\.20 has no Indexed Jobs"):
        start(word="team/2x8xh100")


def test_a_run_whose_limit_is_over_is_stopped_and_not_failed(cluster: Any) -> None:
    """Its exit code starts no other pod; the Job has failed for Kubernetes, and the run has saved and left."""
    handle = start(most_held_s=7200.0)
    order = json.loads(cluster.objects["configmaps", "job-ac1f4a-sent-0"]["data"]["start.json"])["order"]
    assert json.loads(order)["most_held_s"] == 7200.0
    why = "devices were held for 1 h 58 min of 2 h, the limit: saved and left"
    said = json.dumps({"phase": "stopped", "why": why, "evidence": ""})
    cluster.end_pod(cluster.of("pods")[0]["metadata"]["name"], LIMIT_OVER, message=said)
    state = LAUNCHER.state(handle)
    assert (len(cluster.of("pods")), state.phase, state.exit_code, state.why) == (1, "stopped", LIMIT_OVER, why)


@pytest.mark.parametrize(
    ("status", "error"),
    [
        ({"status": "Failure", "details": {"causes": [{"reason": "ExitCode", "message": "137"}]}}, PlaceUnreachable),
        ({"status": "Failure", "message": "container not found"}, PlaceUnreachable),
        ({"status": "Failure", "message": 'exec: "python3": executable file not found in $PATH'}, PlaceFailed),
    ],
)
def test_a_pod_that_ends_while_it_is_asked_is_asked_again(status: dict[str, Any], error: type[PlaceFailed]) -> None:
    """A follower goes on after the first two, as after a line that was cut; no program stays no program."""
    with pytest.raises(PlaceFailed) as refused:
        cluster_api._exit_code(status, "job-x")
    assert type(refused.value) is error


def test_the_pod_of_a_node_that_died_is_not_asked(cluster: Any) -> None:
    """It says that it runs for as long as its node is gone; the pod that goes on is asked, or one for files alone."""
    about = {"labels": labels("job", "training")}
    running = {"phase": "Running", "containerStatuses": [{"name": "node", "state": {"running": {}}}]}
    cluster.add(
        "pods", "job-a", metadata={**about, "deletionTimestamp": "2026-11-26T10:00:00Z"}, spec={}, status=running
    )
    volume = pod_volume.RunVolume(ClusterApi("", "team"), "job", {}, None)
    assert volume.running_pod() == ""
    cluster.add("pods", "job-b", metadata=about, spec={}, status=running)
    assert volume.running_pod() == "job-b"


def test_a_pod_for_files_that_is_always_deleted_is_not_waited_for_for_ever(
    cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by the garbage collector, where its Job is gone: the wait ends with a sentence."""
    monkeypatch.setattr(pod_volume, "_PATIENCE_S", 0.2)
    monkeypatch.setattr(pod_volume, "_POLL_S", 0.01)
    cluster.add("persistentvolumeclaims", "run")
    gone = {"apiVersion": "batch/v1", "kind": "Job", "name": "job", "uid": "gone"}
    volume = pod_volume.RunVolume(ClusterApi("", "team"), "job", {"image": "python:3.11", "claim": "run"}, gone)
    with pytest.raises(PlaceUnreachable, match="does not start: it is deleted as soon as it is made"):
        volume.read("runs/job/events.jsonl", 0)
    assert ("pods", "job-files") not in cluster.objects


def test_an_ended_run_makes_room_whoever_looked_at_its_files(cluster: Any) -> None:
    """A pod that read the volume after the Job was gone has no owner: it holds up no start; lists are optional."""
    handle = start()
    cluster.end_pod(cluster.of("pods")[0]["metadata"]["name"], 4)
    about = {"name": "job-ac1f4a-files", "labels": labels("job-ac1f4a", "files")}
    cluster.add("pods", "job-ac1f4a-files", metadata=about, spec={"containers": []})
    cluster.forbidden |= {("list", "secrets"), ("list", "configmaps")}
    assert start()["uid"] != handle["uid"]
    assert ("pods", "job-ac1f4a-files") not in cluster.objects


def test_a_claim_that_is_gone_is_said_at_once(cluster: Any) -> None:
    """No pod waits five minutes for a volume that does not come back."""
    handle = start()
    LAUNCHER.stop(handle)
    del cluster.objects["persistentvolumeclaims", "job-ac1f4a-run"]
    with pytest.raises(PlaceFailed, match="claim job-ac1f4a-run, which held the run's directory, is not there") as gone:
        LAUNCHER.events(handle, 0)
    assert not isinstance(gone.value, PlaceUnreachable)
    assert not cluster.names()


def test_something_else_than_an_api_server_is_no_answer(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy's page of login says nothing of the run; a kubeconfig that is no YAML is one sentence."""
    handle = start()
    monkeypatch.setattr(ClusterApi, "_request", lambda *_: b"<html>Sign in</html>")
    state = LAUNCHER.state(handle)
    assert state.phase == "unknown"
    assert "is no API server: b'<html>Sign in" in state.evidence
    Path(os.environ["KUBECONFIG"]).write_text("clusters: [")
    with pytest.raises(PlaceFailed, match="The kubeconfig is no YAML"):
        LAUNCHER.parse("team/cpu")


def test_a_named_item_that_a_server_drops_is_seen() -> None:
    """Another one in its place does not hide it."""
    sent = {"volumes": [{"name": "run", "emptyDir": {}}, {"name": "sent"}]}
    assert list(dropped(sent, {"volumes": [{"name": "run", "emptyDir": {}}, {"name": "token"}]})) == ["volumes[1]"]
    assert list(dropped(sent, {"volumes": [{"name": "sent"}, {"name": "run", "emptyDir": {}}]})) == []


class LocalPod:
    """An API whose one pod runs commands on this machine."""

    def __init__(self) -> None:
        self.commands: list[list[str]] = []

    def find(self, kind: str, name: str) -> Any:
        return {"metadata": {"name": name}, "status": {"phase": "Running"}}

    def execute(self, pod: str, command: list[str], *, stdin: Any = (), **_: Any) -> Answer:
        self.commands.append(command[3:])
        done = subprocess.run([sys.executable, *command[1:]], input=b"".join(stdin), capture_output=True, check=False)
        return Answer(done.returncode, done.stdout, done.stderr.decode())

    def stream(self, pod: str, command: list[str], *, stdin: Any = (), **_: Any) -> Any:
        answer = self.execute(pod, command, stdin=stdin)
        return iter([(1, answer.stdout), (2, answer.stderr.encode()), (3, str(answer.code).encode())])


def test_a_copy_that_broke_is_not_taken_for_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To tar a stream that ends between two files is whole: the exit code says whether it is, or why it is not."""
    monkeypatch.setattr(pod_volume, "MOUNT", str(tmp_path))
    monkeypatch.setattr(pod_volume.RunVolume, "running_pod", lambda *_: "job-x")
    (tmp_path / "run").mkdir()
    for name in ("a", "b"):
        (tmp_path / "run" / name).write_text(name)
    api: Any = LocalPod()
    volume, here, whole = pod_volume.RunVolume(api, "job", {}, None), tmp_path / "here", api.stream
    monkeypatch.setattr(api, "stream", lambda *a, **k: iter([(1, next(whole(*a, **k))[1][:2048])]))
    with pytest.raises(PlaceUnreachable, match="The copy of run from pod job-x was cut"):
        volume.fetch("run", here)
    assert [path.name for path in here.iterdir()] == ["a"]

    def after_the_volume_is_gone(*words: Any, **stdin: Any) -> Any:
        (tmp_path / "run").rename(tmp_path / "gone")
        try:
            return whole(*words, **stdin)
        finally:
            (tmp_path / "gone").rename(tmp_path / "run")

    monkeypatch.setattr(api, "stream", after_the_volume_is_gone)
    with pytest.raises(PlaceUnreachable, match="The copy of run from pod job-x was cut"):
        volume.fetch("run", here)
    denied = [(2, b"PermissionError: [Errno 13] Permission denied: '/stoker/run/b'\n"), (3, b"1")]
    monkeypatch.setattr(api, "stream", lambda *_, **__: iter(denied))
    with pytest.raises(PlaceFailed, match=r"run did not come whole .*: PermissionError: .*/run/b") as failed:
        volume.fetch("run", here)
    assert not isinstance(failed.value, PlaceUnreachable)
    monkeypatch.setattr(api, "stream", whole)
    volume.fetch("run", here)
    assert (here / "b").read_text() == "b"


def test_data_are_looked_for_in_the_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the folder that `data` names, by name and digest; else they are sent; what was changed since is not used."""
    monkeypatch.setattr(pod_volume, "MOUNT", str(tmp_path / "volume"))
    files = tuple(TreeFile.of_bytes(name, name.encode()) for name in ("a.csv", "b.csv"))
    whole = Bundle(kind="data", name="digits", files=files)
    one = Bundle(kind="data", name="a.csv", files=files[:1])
    api: Any = LocalPod()
    volume = pod_volume.RunVolume(api, "job", {}, None)
    LocalLine().send_tree(whole.files, f"{tmp_path}/sets/digits")
    for bundle, data in ((whole, tmp_path / "sets"), (one, tmp_path / "sets" / "digits")):
        folder = tmp_path / "volume" / bundle.folder
        assert not volume.send(bundle, str(data))
        assert folder.readlink() == tmp_path / "sets" / "digits"
        assert not volume.send(bundle), "the link holds"
    (tmp_path / "sets" / "digits" / "a.csv").write_text("changed")
    assert volume.send(whole, str(tmp_path / "sets"))
    assert not (tmp_path / "volume" / whole.folder).is_symlink()
    assert (tmp_path / "volume" / whole.folder / "a.csv").read_bytes() == b"a.csv"
    assert not volume.send(whole)
    assert (tmp_path / "sets" / "digits" / "a.csv").read_text() == "changed"
    more = Bundle(kind="data", name="digits", files=files[1:])
    assert volume.send(more, str(tmp_path / "sets")), "a folder that holds more is other data"


def sent(folder: Path, bundle: Bundle, **changes: Any) -> Path:
    """What is mounted in a training container: orders, and the bundle in one part."""
    mounted = folder / "sent"
    mounted.mkdir()
    (mounted / "part").write_bytes(_tar_gz(bundle))
    orders = {
        "root": str(folder / "volume"),
        "run": "runs/job",
        "folders": {bundle.folder: ["part"]},
        "stoker": "stoker/x",
        "order": "{}",
        "lock": "",
        "python": "false",
        "patience_s": 1,
        "expected": [],
        "message": str(folder / "said"),
    }
    (mounted / "start.json").write_text(json.dumps(orders | changes))
    return mounted


def test_what_was_sent_is_unpacked_whole_or_not_at_all(tmp_path: Path) -> None:
    """Links to data lead out of the folder on every Python; a damaged part leaves nothing on the volume."""
    link = TreeFile(path="digits", link="../../data/1")
    bundle = Bundle(kind="code", name="job.py", files=(TreeFile.of_bytes("job.py", b"x = 1"), link))
    mounted = sent(tmp_path, bundle)
    folder = tmp_path / "volume" / bundle.folder
    (mounted / "cut").write_bytes((mounted / "part").read_bytes()[:-30])
    with pytest.raises((EOFError, pod_start.CannotStart)):
        pod_start.unpack(folder, [mounted / "cut"])
    assert list(folder.parent.iterdir()) == []
    pod_start.unpack(folder, [mounted / "part"])
    assert (folder / "digits").readlink() == Path("../../data/1")
    folder.parent.chmod(0o500)
    try:
        if os.getuid() != 0:  # root may write anywhere
            with pytest.raises(pod_start.CannotStart, match=r"cannot be written on the volume.*user=UID"):
                pod_start.unpack(folder.with_name("other"), [mounted / "part"])
    finally:
        folder.parent.chmod(0o700)


def test_an_image_whose_python_lacks_packages_says_which(tmp_path: Path) -> None:
    """Before the run begins: with what it lacks, and how to have it."""
    bundle = Bundle(kind="code", name="job.py", files=(TreeFile.of_bytes("job.py", b"x = 1"),))
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S -I "$@"\n')  # without any installed package
    bare.chmod(0o755)
    for python, why in ((str(bare), "has no torch, numpy"), ("/no/python", "the image has no /no/python")):
        folder = tmp_path / why.replace("/", "-")
        folder.mkdir()
        mounted = sent(folder, bundle, python=python, check=PYTHON_CHECK)
        ended = subprocess.run(
            [sys.executable, pod_start.__file__, str(mounted)], capture_output=True, text=True, check=False
        )
        assert ended.returncode == pod_start.NO_PACKAGES
        assert why in ended.stderr
        assert "--env lock" in ended.stderr
    pod_start.require_packages(sys.executable, PYTHON_CHECK)


def test_a_volume_that_is_full_says_how_to_have_a_larger_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the option of the claim that is made for the run."""
    mounted = sent(tmp_path, Bundle(kind="code", name="job.py", files=(TreeFile.of_bytes("job.py", b"x = 1"),)))

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tarfile.TarFile, "extractall", full)
    with pytest.raises(pod_start.CannotStart, match=r"No space left.*--place-option size=") as caught:
        pod_start.unpack(tmp_path / "volume/code/1", [mounted / "part"])
    assert caught.value.code == pod_start.CANNOT_WRITE


def test_a_volume_on_which_the_run_s_own_folder_cannot_be_written_says_so(tmp_path: Path) -> None:
    """As where an earlier pod was another user's: one sentence, and the exit code of a volume."""
    mounted = sent(tmp_path, Bundle(kind="code", name="job.py", files=(TreeFile.of_bytes("job.py", b"x = 1"),)))
    orders = json.loads((mounted / "start.json").read_text())
    folder = Path(orders["root"]) / orders["run"]
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.write_text("no folder")
    ended = subprocess.run(
        [sys.executable, pod_start.__file__, str(mounted)], capture_output=True, text=True, check=False
    )
    assert ended.returncode == pod_start.CANNOT_WRITE
    assert ended.stderr.startswith(f"{folder}/launch cannot be written on the volume")
    assert "Traceback" not in ended.stderr


def test_a_pod_that_is_ended_before_its_run_begins_goes_on_elsewhere(tmp_path: Path) -> None:
    """The first process of a container ignores SIGTERM unless it says otherwise; its exit code asks for another pod."""
    slow = tmp_path / "python"
    slow.write_text(f"#!/bin/sh\n: > {tmp_path}/installs\nexec sleep 60\n")
    slow.chmod(0o755)
    bundle = Bundle(kind="code", name="job.py", files=(TreeFile.of_bytes("job.py", b"x = 1"),))
    mounted = sent(tmp_path, bundle, lock="{}", python=str(slow))
    with subprocess.Popen([sys.executable, pod_start.__file__, str(mounted)]) as pod:
        until = time.monotonic() + 60
        while not (tmp_path / "installs").exists() and time.monotonic() < until:
            time.sleep(0.02)
        pod.terminate()
        assert pod.wait(60) in EXIT_AGAIN
