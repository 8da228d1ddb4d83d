"""Ray clusters that people have: `ray:head:8265/4`, `ray:https://head/2xa100`, by the API of Ray's jobs.

What: a Ray job whose entry point is `logged_run`, placed by its resources on one node; or for several nodes, which see
one folder, `ray_nodes`, which has an actor on each. The files travel as its working directory, by digest. Only the
standard library is needed here: the API is HTTP and JSON (Ray's own client of it is 300 MB, and has to be of the
cluster's version). Use when: a cluster is there and its dashboard is reachable.
Costs: seconds of Ray's scheduling; the log is kept by Ray too, and read whole at each look.
Does not do: secrets. Ray keeps packages up to 500 MiB.
After the end of a run its directory comes home through the log of another small job on the same node, up to 1 GiB;
more than that, or from a node that is gone, through `--keep URL`.
Source: Ray 2.60, python/ray/dashboard/modules/job/job_head.py: the routes, and the fields of their answers.
"""

from __future__ import annotations

import hashlib
import http.client
import io
import json
import os
import re
import shlex
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from stoker.errors import PlaceFailed, PlaceUnreachable, first_line
from stoker.launching.environment_lock import EnvironmentLock
from stoker.launching.launcher import (
    Handle,
    Launcher,
    LaunchTarget,
    Offer,
    Probe,
    Request,
    Submission,
    seen_now,
    train_command,
    utc_now,
)
from stoker.launching.logged_run import (
    below_home,
    entrypoint,
    events_in,
    files_in,
    sent_files,
    state_in,
    write_files,
)
from stoker.records.codec import read_object
from stoker.records.launch import ENDED, LaunchState
from stoker.store.files import sha256_file
from stoker.units import format_bytes

_MOST_PACKAGE_BYTES = 500 * 2**20
_MOST_FETCHED_BYTES = 2**30
_TIMEOUT_S, _UPLOAD_TIMEOUT_S = 20.0, 600.0
_NO_ANSWER = frozenset({429, 502, 503, 504})
_LEAST_STOP_S = 60.0
"""Ray kills a job so long after it was asked to stop [s], at least; its own default is 3."""


class RayLauncher(Launcher):
    """A Ray cluster, by the address of its dashboard."""

    kind = "ray"
    syntax = "ray:[http[s]://]HEAD[:8265][/[NODES×][N×]cpu|here|DEVICE]"
    options = ("root", "cpus")

    def parse(self, text: str) -> LaunchTarget:
        """The dashboard's address, and the nodes and devices to use of each."""
        form = r"(?:(https?)://)?([A-Za-z0-9.-]+|\[[0-9a-fA-F:]+\])(?::(\d+))?(?:/([\w.×-]+))?"
        match = re.fullmatch(form, text.strip())
        if match is None:
            raise self.unreadable(text, "ray:head:8265/4")
        scheme, host, port, shape = match.groups()
        shape = f"{shape}xhere" if (shape or "").isdigit() else shape or "here"
        port = port or ("" if scheme == "https" else "8265")
        address = f"{scheme or 'http'}://{host}{f':{port}' if port else ''}"
        return self.target(text, address, self.shape_in(text, shape))

    def probe(self, target: LaunchTarget, options: Mapping[str, str]) -> Probe:
        """Version and nodes of the cluster, and whether as many as are asked for have the devices."""
        version = _json(target.address, "/api/version")
        nodes = _nodes(target.address)
        facts = {"Ray": str(version.get("ray_version", "unknown"))}
        for node in nodes:
            resources: dict[str, float] = node.get("resources_total", {})
            models = ", ".join(_models(node))
            facts[str(node.get("node_ip", "node"))] = (
                f"{resources.get('CPU', 0):g} CPUs, {resources.get('GPU', 0):g} GPUs {models}".rstrip() + ", "
                f"{format_bytes(resources.get('memory', 0))} of memory"
            )
        fitting = _node_for(nodes, target)
        is_enough = sum(_fits(node, target) for node in nodes) >= target.num_nodes
        missing = [] if is_enough else [_lacking(nodes, target)]
        best = fitting or (nodes[0] if nodes else {})
        total = best.get("resources_total", {})
        model = next(iter(_models(best)), "")
        return Probe(facts=facts, missing=tuple(missing), device=model, cores=int(total.get("CPU", 0)))

    def offers(self, request: Request) -> tuple[Offer, ...]:
        """The cluster as it is; whether a node is free now is known where Ray's autoscaler reports it."""
        target = request.target
        if sum(_fits(node, target) for node in _nodes(target.address)) < target.num_nodes:
            return ()
        status = _json(target.address, "/api/cluster_status").get("data", {}).get("clusterStatus") or {}
        usage = (status.get("loadMetricsReport") or {}).get("usageByNode") or {}
        name, needed = ("CPU", 1.0) if target.device == "cpu" else ("GPU", float(target.devices_each))
        free = [used[name][1] - used[name][0] for used in usage.values() if name in used]
        is_free = sum(amount >= needed for amount in free) >= target.num_nodes
        why = "Ray's autoscaler reports free nodes" if is_free else "Ray says nothing about when devices are free"
        source = "a cluster that is there: no price is known"
        return (Offer.of(target, starts_in_s=0.0 if is_free else None, price_source=source, why=why),)

    def script(self, submission: Submission) -> str:
        """The job as it is posted."""
        files = sum(len(bundle.files) for bundle in submission.bundles)
        size = format_bytes(sum(bundle.num_bytes for bundle in submission.bundles))
        job = _job(submission, {}, 1, "(now)")
        return (
            f"# runs: {train_command(submission)}\n"
            f"# working directory: {files} files, {size}; sent unless it is there\n"
            "# a GPU where a shape names none, and a GPU's name there, are filled in from the nodes when it is posted\n"
            f"# POST {submission.target.address}/api/jobs/\n{json.dumps(job, indent=2)}\n"
        )

    def start(self, submission: Submission, tell: Callable[[str], None]) -> Handle:
        """Send the working directory unless it is there, and post the job."""
        if submission.secrets:
            names = ", ".join(submission.secrets)
            raise PlaceFailed(
                f"Ray shows the variables of a job to all its users, so that {names} cannot be sent",
                remedy="Set them on the nodes of the place, and leave --secret out.",
            )
        address = submission.target.address
        jobs = [
            job for job in _get(address, "/api/jobs/") if (job.get("metadata") or {}).get("stoker") == submission.run
        ]
        going = [job for job in jobs if job["status"] in {"PENDING", "RUNNING"}]
        if any(job["metadata"].get("owner") != submission.owner for job in jobs):
            raise PlaceFailed(
                f"the cluster at {address} has a run {submission.run} of another owner",
                remedy="Give this one another name: --run-dir runs/NAME.",
            )
        if going:
            return _handle(submission, str(going[0]["submission_id"]), 0)
        sent, path = 0, f"/api/packages/gcs/{_package(submission)}"
        if _request(address, path, allow=(404,))[0] == 404:
            num_bytes = sum(bundle.num_bytes for bundle in submission.bundles)
            if num_bytes > _MOST_PACKAGE_BYTES:
                raise PlaceFailed(
                    f"Ray takes {format_bytes(_MOST_PACKAGE_BYTES)}, and {format_bytes(num_bytes)} would be sent",
                    remedy="Put the data where the nodes find them, and let the job read them there.",
                )
            tell(f"sending the working directory: {format_bytes(num_bytes)}")
            content = _zipped(submission)
            sent = len(content)
            _request(address, path, method="PUT", body=content, timeout_s=_UPLOAD_TIMEOUT_S)
        nodes, pinned = _nodes(address), dict[str, float]()
        is_on_one = submission.target.num_nodes == 1 and "--keep" not in submission.arguments
        if is_on_one and (last := _last_node(jobs)):  # its directory is on that node
            if kept := [node for node in nodes if node.get("node_ip") == last]:
                nodes, pinned = kept, {f"node:{last}": 0.001}
            else:
                tell(f"node {last}, where the run has been, is gone: without a shared disk it starts from zero")
        job = _job(submission, _node_for(nodes, submission.target), len(jobs) + 1, utc_now("milliseconds"))
        if pinned:
            job["entrypoint_resources"] = job.get("entrypoint_resources", {}) | pinned
        tell(f"posting the job {job['submission_id']}")
        _request(address, "/api/jobs/", method="POST", body=json.dumps(job).encode(), timeout_s=60.0)
        return _handle(submission, str(job["submission_id"]), sent)

    def state(self, handle: Handle) -> LaunchState:
        """By Ray's status of the job, and in it by what the run prints of itself."""
        info = _job_info(handle)
        if isinstance(info, LaunchState):
            return info
        status, message, said, unread = str(info["status"]), str(info.get("message") or ""), None, ""
        if status != "PENDING":
            try:
                said = state_in(_log(handle, allow=(404,)))
            except PlaceFailed as error:  # the node is gone, or does not answer
                unread = error.message
        if status == "RUNNING" and unread:
            return seen_now("unknown", "the log of the job cannot be read", unread)
        if status == "PENDING":
            return seen_now("queued", "waits for free resources", message)
        if status == "RUNNING":
            return said or seen_now("starting", "Ray prepares the environment", message)
        if said is not None and said.phase in ENDED:
            return said
        if status == "SUCCEEDED":
            return seen_now("finished", "trained to its end", unread or message, exit_code=0)
        if status == "STOPPED":
            return seen_now("stopped", "stopped before it said that it had saved", message)
        if info.get("driver_exit_code") is None or said is not None:  # else the run itself would have said its end
            return seen_now("lost", "Ray lost the job's process", message or str(info.get("error_type")))
        why = "the job failed, and its log cannot be read" if unread else "the job failed before the run began"
        return seen_now("failed", why, message, exit_code=int(info["driver_exit_code"]))

    def events(self, handle: Handle, offset: int) -> bytes:
        """The marked lines of the job's log."""
        return events_in(_log(handle), offset)

    def stop(self, handle: Handle) -> None:
        """Ray sends SIGTERM, and waits as long as the job's variables say."""
        _request(handle["url"], f"/api/jobs/{handle['job']}/stop", method="POST", allow=(404,))

    def fetch(self, handle: Handle, into: Path) -> None:
        """The run's directory, through the logs of jobs on the node where it ran."""
        info = _json(handle["url"], f"/api/jobs/{handle['job']}")
        node = _node_of(info)
        there = files_in(_helper_log(handle, node, "list", handle["directory"]))
        missing = {
            name: about
            for name, about in there.items()
            if not (into / name).is_file() or sha256_file(into / name) != about[0]
        }
        num_bytes = sum(size for _, size in missing.values())
        if num_bytes > _MOST_FETCHED_BYTES:
            most = format_bytes(_MOST_FETCHED_BYTES)
            raise PlaceFailed(
                f"{format_bytes(num_bytes)} would come through Ray's logs, which take {most}",
                remedy=f"Run with --keep URL; or copy {handle['directory']} from node {node}.",
            )
        if missing and (
            lost := write_files(_helper_log(handle, node, "send", handle["directory"], *missing), into, missing)
        ):
            raise PlaceFailed(f"{lost[0]} did not come as it is there", remedy="The same command fetches the rest.")


def _models(node: Mapping[str, Any]) -> list[str]:
    """Models of a node's devices, as Ray names them: `A100`."""
    resources: dict[str, float] = node.get("resources_total", {})
    return [name.partition(":")[2] for name in resources if name.startswith("accelerator_type:")]


def _model_of(node: Mapping[str, Any], device: str) -> str:
    """The node's model that a device means, as Ray spells it: `A100-80G` for `a100`; empty if it has none."""
    return next((name for name in _models(node) if re.match(rf"{re.escape(device)}(-|$)", name.lower())), "")


def _fits(node: Mapping[str, Any], target: LaunchTarget) -> bool:
    resources: dict[str, float] = node.get("resources_total", {})
    if target.device == "cpu" or (not target.device and target.devices_each == 1 and not resources.get("GPU")):
        return resources.get("CPU", 0) >= 1
    is_other = target.device and not _model_of(node, target.device)
    return not is_other and resources.get("GPU", 0) >= target.devices_each


def _node_for(nodes: Iterable[Mapping[str, Any]], target: LaunchTarget) -> Mapping[str, Any]:
    """The node whose resources a job asks for, empty if none fits: first the very model, then any GPU, then a CPU."""

    def rank(node: Mapping[str, Any]) -> tuple[bool, bool]:
        is_named = _model_of(node, target.device).lower() == target.device
        return is_named, target.device != "cpu" and "GPU" in node["resources_total"]

    return max((node for node in nodes if _fits(node, target)), key=rank, default={})


def _lacking(nodes: list[dict[str, Any]], target: LaunchTarget) -> str:
    most = max((node.get("resources_total", {}).get("GPU", 0) for node in nodes), default=0)
    fitting = sum(_fits(node, target) for node in nodes)
    few = f"only {fitting}" if fitting else "no node"
    return (
        f"{few} of {len(nodes)} has {target.devices_each} {target.device or 'GPU'} (the most GPUs on one: {most:g}"
        f"{f'; asked for: {target.num_nodes} nodes' if target.num_nodes > 1 else ''}): ask for fewer, or add a node"
    )


def _job(submission: Submission, node: Mapping[str, Any], number: int, submitted_at: str) -> dict[str, Any]:
    """The body of the request that posts the job; `node` fits it, and is empty where the cluster was not asked."""
    target, environment = submission.target, submission.environment
    stop_s = max(_LEAST_STOP_S, 4 * submission.save_s)
    runtime: dict[str, Any] = {
        "working_dir": f"gcs://{_package(submission)}",
        "env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": f"{stop_s:.0f}"},
    }
    if isinstance(environment, EnvironmentLock):
        runtime["pip"] = {"packages": list(environment.requirements), "pip_check": False}
    python = environment if isinstance(environment, str) else ""
    job: dict[str, Any] = {
        "submission_id": f"{submission.run}-{number}",
        "entrypoint": entrypoint(submission, shlex.quote(python or "python"), submitted_at),
        "runtime_env": runtime,
        "metadata": {"stoker": submission.run, "owner": submission.owner},
    }
    needed = _resources(submission, node)
    if target.num_nodes > 1:  # the driver itself needs Ray's own Python, and no device
        driver = ("stoker.launching.ray_nodes", str(target.num_nodes), json.dumps(needed), python)
        return {**job, "entrypoint": entrypoint(submission, "python", submitted_at, driver)}
    fields = {"CPU": "entrypoint_num_cpus", "GPU": "entrypoint_num_gpus"}
    job |= {fields[name]: amount for name, amount in needed.items() if name in fields}
    if others := {name: amount for name, amount in needed.items() if name not in fields}:
        job["entrypoint_resources"] = others
    return job


def _resources(submission: Submission, node: Mapping[str, Any]) -> dict[str, float]:
    """Ray's resources of each node of a run; `node` as for `_job`."""
    target, cpus = submission.target, submission.options.get("cpus")
    needed: dict[str, float] = {}
    if cpus or target.device == "cpu":
        needed["CPU"] = float(cpus or target.devices_each)
    if target.device == "cpu":
        return needed
    if target.device or target.devices_each > 1 or node.get("resources_total", {}).get("GPU"):
        needed["GPU"] = target.devices_each
    if target.device:
        model = _model_of(node, target.device) or target.device.upper()
        needed[f"accelerator_type:{model}"] = 0.001
    return needed


def _node_of(job: Mapping[str, Any]) -> str:
    """The address of the node where a job runs, or ran; empty where it never did."""
    agent = re.match(r"https?://(.+):\d+$", str(job.get("driver_agent_http_address") or ""))
    return agent[1] if agent else ""


def _last_node(jobs: Iterable[Mapping[str, Any]]) -> str:
    """The node of the newest of a run's jobs that had one; empty if none had."""
    ran = [job for job in jobs if _node_of(job)]
    newest = max(ran, key=lambda job: int(str(job["submission_id"]).rpartition("-")[2]), default={})
    return _node_of(newest)


def _handle(submission: Submission, job: str, sent_bytes: int) -> Handle:
    directory = f"{below_home(submission.root)}/runs/{submission.run}"
    return {"url": submission.target.address, "job": job, "directory": directory, "sent_bytes": sent_bytes}


def _package(submission: Submission) -> str:
    """The package's name, by what is in it."""
    about = [submission.run, submission.arguments, submission.job_file, dict(submission.variables), submission.expected]
    order = json.dumps(about)
    digests = "\n".join([*(bundle.digest for bundle in submission.bundles), order, submission.owner])
    return f"_ray_pkg_{hashlib.sha256(digests.encode()).hexdigest()[:40]}.zip"


def _zipped(submission: Submission) -> bytes:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, content in sent_files(submission):
            archive.writestr(path, content if isinstance(content, bytes) else content.read_bytes())
    return target.getvalue()


def _helper_log(handle: Handle, node: str, *words: str) -> bytes:
    """The log of a small job on the node of the run, once it has ended."""
    info = _json(handle["url"], f"/api/jobs/{handle['job']}")
    python = re.search(r'^PYTHONPATH="\$PWD/(\S+)" (.+?) -m ', str(info["entrypoint"]))
    if python is None:
        raise PlaceFailed(f"the job {handle['job']} is none of Stoker's")
    job = {
        "entrypoint": f'PYTHONPATH="$PWD/{python[1]}" {python[2]} -m stoker.launching.logged_run ' + shlex.join(words),
        "runtime_env": info["runtime_env"],
        "metadata": {"stoker_helper": handle["job"]},
        **({"entrypoint_resources": {f"node:{node}": 0.001}} if node else {}),
    }
    made = json.loads(_request(handle["url"], "/api/jobs/", method="POST", body=json.dumps(job).encode())[1])
    name, until = str(made["submission_id"]), time.monotonic() + _UPLOAD_TIMEOUT_S
    while (info := _json(handle["url"], f"/api/jobs/{name}"))["status"] in {"PENDING", "RUNNING"}:
        if time.monotonic() > until:
            raise PlaceFailed(f"the node {node} does not answer", remedy="The same command tries again.")
        time.sleep(0.3)
    log = _log({"url": handle["url"], "job": name})
    _request(handle["url"], f"/api/jobs/{name}", method="DELETE", allow=(404, 500))
    if info["status"] != "SUCCEEDED":
        raise PlaceFailed(
            f"the run's directory on {node} cannot be read: {info.get('message')}",
            remedy="If the node is gone, --keep URL would have had a copy.",
        )
    return log


def _job_info(handle: Handle) -> dict[str, Any] | LaunchState:
    """Ray's record of the job; or the state, where there is none or the cluster does not answer."""
    try:
        code, body = _request(handle["url"], f"/api/jobs/{handle['job']}", allow=(404,))
    except PlaceUnreachable as error:
        return seen_now("unknown", "the cluster does not answer", error.message)
    info = read_object(body)
    if code != 404 and {"status", "entrypoint"} <= info.keys():  # gateways have errors with a `status`, too
        return info
    if code == 404 and f"{handle['job']} does not exist".encode() in body:
        return seen_now("lost", "the cluster does not know the job any more: it was restarted", "404")
    # A proxy's, as its page of login.
    return seen_now("unknown", "the answer is not of Ray's dashboard", f"{code}: {body[:60]!r}")


def _log(handle: Handle, allow: tuple[int, ...] = (404, 500)) -> bytes:
    """All that the job printed; nothing where the answer is a status of `allow`."""
    code, body = _request(handle["url"], f"/api/jobs/{handle['job']}/logs", allow=allow, timeout_s=60.0)
    if code != 200:
        return b""
    if "logs" not in (answer := read_object(body)):  # of a proxy, as its page of login
        raise PlaceUnreachable(f"{handle['url']} gave an answer that is not of Ray's dashboard: {body[:60]!r}")
    return str(answer["logs"] or "").encode()


def _nodes(address: str) -> list[dict[str, Any]]:
    answer = _json(address, "/api/v0/nodes?detail=1&limit=10000")
    nodes: list[dict[str, Any]] = answer.get("data", {}).get("result", {}).get("result", [])
    return [node for node in nodes if node.get("state") == "ALIVE"]


def _json(address: str, path: str) -> dict[str, Any]:
    value = _get(address, path)
    if not isinstance(value, dict):
        raise PlaceFailed(f"{address}{path} is not Ray's dashboard: it answers with something else")
    return value


def _get(address: str, path: str) -> Any:
    body = _request(address, path)[1]
    try:
        return json.loads(body)
    except ValueError as error:
        raise PlaceFailed(
            f"{address} is not Ray's dashboard: it answers {body[:60]!r}",
            remedy="Give the dashboard's address, as `ray start` prints it.",
        ) from error


def _request(
    address: str,
    path: str,
    *,
    method: str = "GET",
    body: bytes | None = None,
    allow: tuple[int, ...] = (),
    timeout_s: float = _TIMEOUT_S,
) -> tuple[int, bytes]:
    """Status and body of an answer.

    Raises:
        PlaceFailed: the cluster refuses, with another status than those of `allow`.
        PlaceUnreachable: it does not answer, or says that it cannot now.
    """
    kind = "application/octet-stream" if method == "PUT" else "application/json"
    headers = {"Content-Type": kind}
    if token := os.environ.get("RAY_AUTH_TOKEN"):
        headers["Authorization"] = f"Bearer {token}"
    request = urllib.request.Request(f"{address}{path}", data=body, headers=headers, method=method)  # noqa: S310 - http(s)
    try:
        try:
            answer = urllib.request.urlopen(request, timeout=timeout_s)  # noqa: S310 - likewise
        except urllib.error.HTTPError as error:
            answer = error
        with answer:
            code, content = int(answer.status), answer.read()
    except (OSError, http.client.HTTPException) as error:  # the latter: an answer that breaks off
        reason = getattr(error, "reason", None)  # urllib's own text is "<urlopen error …>"
        raise PlaceUnreachable(
            f"{address} does not answer: {first_line(reason if isinstance(reason, BaseException) else error)}",
            remedy="Is it the dashboard's address, and can it be reached?",
        ) from error
    if code < 400 or code in allow:
        return code, content
    lines = content.decode(errors="replace").strip().splitlines()
    if code in _NO_ANSWER or (code == 500 and method == "GET"):
        raise PlaceUnreachable(f"{address} does not answer now ({code}): {lines[-1] if lines else 'no reason given'}")
    if code in {401, 403}:
        raise PlaceFailed(f"{address} refuses the login ({code})", remedy="Set RAY_AUTH_TOKEN to the cluster's token.")
    raise PlaceFailed(f"{address} refuses {method} {path} ({code}): {lines[-1] if lines else ''}")


LAUNCHER = RayLauncher()
