"""Services on a cluster: their manifests against the schemas of Kubernetes 1.37, applied to a fake of it."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stoker.cli.serve import announce_deployment
from stoker.errors import BadSetting, PlaceFailed
from stoker.launching.kubernetes.kubernetes_service import Deployment, deploy, service_objects
from stoker.launching.launcher import LaunchTarget
from tests.optional import optional
from tests.places.kubernetes.cluster import kubeconfig

optional("kubernetes")
optional("kubernetes_validate")
optional("kubeflow_trainer_api")
fake = optional("tests.places.kubernetes.fake")

TEAM = LaunchTarget(text="k8s:team", kind="k8s", address="/team")
EVERYTHING = frozenset({"keda.sh/v1alpha1", "http.keda.sh/v1alpha1", "monitoring.coreos.com/v1", "policy/v1"})


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A cluster with KEDA, and a kubeconfig that names it."""
    server = fake.FakeCluster()
    file = tmp_path / "kubeconfig"
    file.write_text(json.dumps(kubeconfig(server.url, {"test": "token"})))
    monkeypatch.setenv("KUBECONFIG", str(file))
    yield server
    server.close()


def objects(groups: frozenset[str] = EVERYTHING, **changes: Any) -> dict[str, Any]:
    """A service's objects by kind."""
    fields: dict[str, Any] = {"name": "digits", "models": ("models/digits",), "image": "python:3.11"}
    return {thing["kind"]: thing for thing in service_objects(Deployment(**(fields | changes)), TEAM, groups)}


@pytest.mark.parametrize("scale", [(1, 1), (3, 3), (1, 8)])
@pytest.mark.parametrize("claim", ["", "models"])
def test_objects_are_what_the_current_schemas_accept(scale: tuple[int, int], claim: str) -> None:
    """Strictly: a field that 1.37 does not know fails."""
    options = {"claim": claim} if claim else {}
    for thing in objects(groups=frozenset({"policy/v1"}), low=scale[0], high=scale[1], options=options).values():
        fake.validate(thing)


def test_replicas_are_spread_and_leave_one_after_the_other() -> None:
    """Over nodes as far as there are any; a drain takes one at a time, and is never held up by a single one."""
    several = objects(low=1, high=4)
    pod = several["Deployment"]["spec"]["template"]
    (spread,) = pod["spec"]["topologySpreadConstraints"]
    assert (spread["topologyKey"], spread["whenUnsatisfiable"]) == ("kubernetes.io/hostname", "ScheduleAnyway")
    budget = several["PodDisruptionBudget"]["spec"]
    assert budget["maxUnavailable"] == 1
    for selector in (spread["labelSelector"], budget["selector"]):
        assert selector["matchLabels"].items() <= pod["metadata"]["labels"].items()
    assert "PodDisruptionBudget" not in objects()


def test_memory_is_limited_only_where_it_is_named() -> None:
    """How much models need is not known: under a limit that was guessed, a large one would be killed as it loads."""

    def memory(**options: str) -> tuple[str | None, str | None]:
        container = objects(options=options)["Deployment"]["spec"]["template"]["spec"]["containers"][0]
        resources = container["resources"]
        return resources["requests"]["memory"], resources.get("limits", {}).get("memory")

    assert memory() == ("2Gi", None)
    assert memory(memory="8Gi") == ("8Gi", "8Gi")


def test_another_scale_restarts_no_pod() -> None:
    """The pods' template is the same whatever their number."""
    templates = [
        objects(low=low, high=high)["Deployment"]["spec"]["template"] for low, high in ((1, 1), (3, 3), (1, 8), (0, 4))
    ]
    assert all(template == templates[0] for template in templates)


def test_a_login_that_may_make_no_budget_still_serves(cluster: Any) -> None:
    """The service is there without it."""
    deploy(["models/digits"], on="k8s:team", image="python:3.11", scale="2")
    assert "poddisruptionbudgets/digits" in cluster.names()
    cluster.forbidden.add(("create", "poddisruptionbudgets"))
    shown = deploy(["models/digits"], on="k8s:team", image="python:3.11", scale="2", dry_run=True)
    assert "PodDisruptionBudget" not in {thing["kind"] for thing in shown}


def test_probes_are_pages_of_the_server_that_need_no_key() -> None:
    """`stoker serve` answers each path of a probe, whatever asks."""
    from stoker.serving.http.application import _PAGES, WITHOUT_KEY

    container = objects()["Deployment"]["spec"]["template"]["spec"]["containers"][0]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        path = container[probe]["httpGet"]["path"]
        assert _PAGES[tuple(path.strip("/").split("/"))] in WITHOUT_KEY


def test_the_pod_s_command_is_one_of_the_command_line() -> None:
    """Every option in the manifest is an option of `stoker serve`."""
    import typer

    from stoker.cli.main import app

    options = {name for p in typer.main.get_command(app).commands["serve"].params for name in p.opts}  # type: ignore[attr-defined]
    container = objects(overrides=("threads=2",))["Deployment"]["spec"]["template"]["spec"]["containers"][0]
    assert container["command"][:4] == ["python3", "-m", "stoker", "serve"]
    assert {word for word in container["command"] if word.startswith("--")} <= options


def test_a_key_of_the_metrics_is_one_that_the_server_reads(tmp_path: Path) -> None:
    """The Secret's file is a file of `--admin-keys`, and its token is accepted by it."""
    from stoker.serving.security import KeyFile

    secret = objects()["Secret"]["stringData"]
    file = tmp_path / "admin"
    file.write_text(secret["admin"])
    assert KeyFile(file).authorize({"authorization": f"Bearer {secret['token']}"}) == "metrics"


def test_replicas_follow_the_rows_that_wait() -> None:
    """KEDA with Prometheus; the custom metrics API without; processor time where there is neither."""
    keda = objects(low=1, high=8, options={"prometheus": "http://prometheus:9090"})["ScaledObject"]["spec"]
    assert (keda["minReplicaCount"], keda["maxReplicaCount"]) == (1, 8)
    assert "stoker_queue_rows" in keda["triggers"][0]["metadata"]["query"]
    custom = objects(groups=frozenset({"custom.metrics.k8s.io/v1beta1"}), low=1, high=8)["HorizontalPodAutoscaler"]
    assert custom["spec"]["metrics"][0]["pods"]["metric"] == {"name": "stoker_queue_rows"}
    plain = objects(groups=frozenset(), low=1, high=8)["HorizontalPodAutoscaler"]
    assert plain["spec"]["metrics"][0]["resource"]["name"] == "cpu"
    fake.validate(custom)
    assert "replicas" not in objects(low=1, high=8)["Deployment"]["spec"]


def test_zero_replicas_need_something_that_wakes_them() -> None:
    """The HTTP add-on holds requests until then; without it the service would never start again."""
    spec = objects(low=0, high=4)["HTTPScaledObject"]["spec"]
    assert spec["replicas"] == {"min": 0, "max": 4}
    assert spec["hosts"] == ["digits.team"]
    with pytest.raises(PlaceFailed, match=r"nothing would wake the service.*\n--scale 1\.\.4"):
        objects(groups=frozenset({"keda.sh/v1alpha1"}), low=0, high=4)


@pytest.mark.parametrize("scale", ["4..1", "0", "-1", "1..", "many"])
def test_a_scale_that_cannot_be_meant_is_refused(cluster: Any, scale: str) -> None:
    """Before anything is asked of the cluster."""
    with pytest.raises(BadSetting, match="wanted replicas"):
        deploy(["models/digits"], on="k8s:team", image="python:3.11", scale=scale)
    assert cluster.requests == 0


def test_a_service_is_applied_and_changed_in_place(cluster: Any) -> None:
    """The same call again keeps Deployment and key, and changes the bounds, or what scales; one delete takes all."""

    def go(scale: str) -> None:
        deploy(["models/digits"], on="k8s:team", image="python:3.11", scale=scale)

    go("1..4")
    uid = cluster.objects["deployments", "digits"]["metadata"]["uid"]
    token = base64.b64decode(cluster.objects["secrets", "digits"]["data"]["token"])
    go("2..6")
    assert cluster.objects["deployments", "digits"]["metadata"]["uid"] == uid
    assert base64.b64decode(cluster.objects["secrets", "digits"]["data"]["token"]) == token
    assert cluster.objects["horizontalpodautoscalers", "digits"]["spec"]["maxReplicas"] == 6
    go("0..4")
    assert {"horizontalpodautoscalers/digits", "httpscaledobjects/digits"} & cluster.names() == {
        "httpscaledobjects/digits"
    }
    go("3")
    assert "httpscaledobjects/digits" not in cluster.names(), "it would go on to scale"
    assert cluster.objects["deployments", "digits"]["spec"]["replicas"] == 3
    cluster.answer("DELETE", "/apis/apps/v1/namespaces/team/deployments/digits", {}, None)
    assert cluster.names() == set()


def test_an_autoscaler_takes_over_from_where_replicas_are(cluster: Any) -> None:
    """Left out, the field would fall to 1 until the autoscaler looks, while requests come for five."""
    replicas = []
    for scale in ("5", "1..8", "1..3", "6..8"):
        deploy(["models/digits"], on="k8s:team", image="python:3.11", scale=scale)
        replicas.append(cluster.objects["deployments", "digits"]["spec"]["replicas"])
    assert replicas == [5, 5, 3, 6]


def test_an_api_that_the_cluster_lacks_is_said_before_anything_is_made(cluster: Any) -> None:
    """As autoscaling/v2 before 1.23."""
    cluster.groups = tuple(group for group in cluster.groups if group != "autoscaling/v2")
    with pytest.raises(PlaceFailed, match=r"no autoscaling/v2, which a HorizontalPodAutoscaler needs.*\n.*--scale 4"):
        deploy(["models/digits"], on="k8s:team", image="python:3.11", scale="1..4")
    assert cluster.names() == set()


def test_ports_have_the_whole_key_by_which_servers_merge_them() -> None:
    """A server before 1.21 refuses to apply a port without its protocol."""
    made = objects()
    ports = made["Service"]["spec"]["ports"]
    ports += made["Deployment"]["spec"]["template"]["spec"]["containers"][0]["ports"]
    assert {port["protocol"] for port in ports} == {"TCP"}


def test_a_dry_run_changes_nothing_and_shows_no_key(cluster: Any) -> None:
    """What would be applied is returned, but for the key."""
    shown = deploy(["models/digits"], on="k8s:team", image="python:3.11", dry_run=True)
    assert cluster.names() == set()
    assert [thing["kind"] for thing in shown] == ["Deployment", "Secret", "Service"]
    assert shown[1]["stringData"] == {"admin": "(a key)", "token": "(a key)"}


@pytest.mark.parametrize(("word", "where"), [("k8s:", "-n team"), ("k8s:test/team", "--context test -n team")])
def test_the_command_that_ends_a_service_names_where_it_is(
    cluster: Any, capsys: pytest.CaptureFixture[str], word: str, where: str
) -> None:
    """Also where the word leaves the namespace to the current context, or names a context."""
    shown = deploy(["models/digits"], on=word, image="python:3.11")
    announce_deployment(shown, on=word, dry_run=False, as_json=False)
    printed = capsys.readouterr().out
    assert f"kubectl {where} delete deployment digits" in printed
    assert "http://digits.team.svc:8000" in printed
    announce_deployment(shown, on=word, dry_run=True, as_json=False)
    assert "&id" not in capsys.readouterr().out, "people keep the manifests: no anchors"


def test_a_first_start_that_fails_leaves_nothing(cluster: Any) -> None:
    """The Service is refused: the Deployment and the Secret go again."""
    cluster.forbidden.add(("patch", "services"))
    with pytest.raises(PlaceFailed, match="cannot patch"):
        deploy(["models/digits"], on="k8s:team", image="python:3.11")
    cluster.settle()
    assert cluster.names() == set()


def test_a_deployment_of_somebody_else_is_left_alone(cluster: Any) -> None:
    """Its name is taken: one sentence, with the option that names another."""
    cluster.add("deployments", "digits", spec={})
    with pytest.raises(PlaceFailed, match=r"not made by Stoker.*\n.*name=NAME"):
        deploy(["models/digits"], on="k8s:team", image="python:3.11")
    assert cluster.names() == {"deployments/digits"}


@pytest.mark.parametrize("plural", ["services", "secrets"])
def test_an_object_of_somebody_else_is_not_taken_over(cluster: Any, plural: str) -> None:
    """A Service in front of other pods, or a Secret of theirs, would be changed by force: nothing is applied."""
    cluster.add(plural, "digits", spec={"selector": {"app": "other"}})
    with pytest.raises(PlaceFailed, match=r"(Service|Secret) digits is in namespace team already, and not made by"):
        deploy(["models/digits"], on="k8s:team", image="python:3.11")
    assert cluster.names() == {f"{plural}/digits"}
