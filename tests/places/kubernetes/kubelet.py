"""A kubelet of the tests: registers nodes, places pods, runs them as processes, reports, serves logs and exec.

A container is a process of this machine in a mount namespace of its own, on an overlay of the root directory, with its
volumes where the pod mounts them. Images: `python` has this Python on its PATH, any other has nothing. What a kubelet
and a scheduler do and a run can notice is done: binding by resources and affinity, waiting for ConfigMaps, Secrets and
claims, SIGTERM and the grace period, activeDeadlineSeconds, termination messages, evictions, and nodes that die.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import signal
import socket
import ssl
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import urllib3

Object = dict[str, Any]

_SET_UP = """
set -e
mount -t tmpfs tmpfs "$1"
mkdir "$1/upper" "$1/work" "$1/root"
mount -t overlay overlay -o lowerdir=/,upperdir="$1/upper",workdir="$1/work" "$1/root"
mount --bind /proc "$1/root/proc"
# Not open to all and sticky: there not even root may write to a device of another owner (fs.protected_regular).
mount -t tmpfs -o mode=755 tmpfs "$1/root/dev"
for device in null zero random urandom full; do
    touch "$1/root/dev/$device"; mount --bind "/dev/$device" "$1/root/dev/$device"
done
mkdir "$1/root/dev/shm"; : > "$1/root/dev/termination-log"; ln -s /proc/self/fd "$1/root/dev/fd"
mkdir "$1/root/message"; mount --bind "$2" "$1/root/message"
rm "$1/root/dev/termination-log"; ln -s /message/termination-log "$1/root/dev/termination-log"
[ -z "$3" ] || printf '%s\\n' "$3" >> "$1/root/etc/hosts"
root="$1/root"; shift 3
while [ "$1" != -- ]; do
    mkdir -p "$root$2"; mount --bind "$1" "$root$2"; [ "$3" = rw ] || mount -o remount,ro,bind "$root$2"; shift 3
done
shift
exec chroot "$root" "$@"
"""
"""Arguments: a folder for the mounts, one for the message, a line of hosts, (from, to, mode)…, --, the command."""


def now() -> str:
    """The time as Kubernetes writes it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class Server:
    """An API server, asked as an administrator; `authority` is the certificate that it has to show."""

    def __init__(self, url: str, token: str, authority: Path | None = None) -> None:
        self.url = url
        self._headers = {"Authorization": f"Bearer {token}"}
        self._pool = urllib3.PoolManager(ca_certs=authority and str(authority), maxsize=16, retries=False)

    def is_ready(self) -> bool:
        """Whether it answers, and says that it is ready."""
        try:
            answer = self._pool.request("GET", f"{self.url}/readyz", headers=self._headers, timeout=2.0)
        except urllib3.exceptions.HTTPError:  # it does not listen yet
            return False
        return bool(answer.status == 200)

    def ask(self, method: str, path: str, body: Object | None = None, kind: str = "application/json") -> Object:
        """The answer as JSON; raises LookupError for 404 and 409, RuntimeError for other refusals."""
        answer = self._pool.request(
            method,
            self.url + path,
            headers={**self._headers, "Content-Type": kind},
            body=None if body is None else json.dumps(body),
            timeout=60.0,
        )
        if answer.status in {404, 409}:
            raise LookupError(answer.data.decode())
        if answer.status >= 300:
            raise RuntimeError(f"{method} {path}: {answer.status} {answer.data.decode()[:400]}")
        found: Object = json.loads(answer.data)
        return found

    def close(self) -> None:
        """Close the connections."""
        self._pool.clear()

    def merge(self, path: str, change: Object) -> Object:
        """Patch an object."""
        return self.ask("PATCH", path, change, "application/merge-patch+json")


class Pod:
    """A pod on a node: its process, and its orders."""

    def __init__(self, manifest: Object, server: Server, folder: Path) -> None:
        self.manifest, self._server, self.folder = manifest, server, folder
        self.about, self.spec = manifest["metadata"], manifest["spec"]
        self.path = f"/api/v1/namespaces/{self.about['namespace']}/pods/{self.about['name']}"
        self.process: subprocess.Popen[bytes] | None = None
        self.started = 0.0
        self.kill_at: float | None = None
        self.reason = ""
        self.is_reported = False

    @property
    def container(self) -> Object:
        """The only container that is run."""
        found: Object = self.spec["containers"][0]
        return found

    def start(self) -> None:
        """Mount and start, or leave it waiting with the reason."""
        try:
            mounts = self._mounts()
            environment = self._environment()
        except LookupError as error:
            self._report("Pending", {"waiting": {"reason": "ContainerCreating", "message": str(error)[:200]}})
            return
        command = [*self.container["command"], *self.container.get("args", [])]
        path = os.pathsep.join([str(Path(sys.executable).parent), "/usr/bin", "/bin"])
        image = self.container["image"]
        if image.startswith("missing"):
            message = f'Back-off pulling image "{image}"'
            self._report("Pending", {"waiting": {"reason": "ImagePullBackOff", "message": message}})
            return
        if not image.startswith("python") or shutil.which(command[0], path=path) is None:
            message = f'exec: "{command[0]}": executable file not found in $PATH: unknown'
            self._report("Failed", {"terminated": {"exitCode": 128, "reason": "StartError", "message": message}})
            self.is_reported = True
            return
        for part in ("mounts", "message"):
            (self.folder / part).mkdir(parents=True, exist_ok=True)
        flat = [word for mount in mounts for word in mount]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [
                    "unshare",
                    "-m",
                    "--propagation",
                    "private",
                    "sh",
                    "-c",
                    _SET_UP,
                    "sh",
                    str(self.folder / "mounts"),
                    str(self.folder / "message"),
                    self._hosts(),
                    *flat,
                    "--",
                    *command,
                ],
                env={"PATH": path + ":/usr/sbin:/sbin", "HOME": "/root", **environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.started = time.monotonic()
        self._report("Running", {"running": {"startedAt": now()}})

    def _mounts(self) -> list[tuple[str, str, str]]:
        sources = {volume["name"]: self._volume(volume) for volume in self.spec.get("volumes") or []}
        mounts = []
        for mount in self.container.get("volumeMounts") or []:
            source = sources[mount["name"]] / mount.get("subPath", "")
            source.mkdir(parents=True, exist_ok=True)
            mounts.append((str(source), mount["mountPath"], "ro" if mount.get("readOnly") else "rw"))
        return mounts

    def _volume(self, volume: Object) -> Path:
        """The folder of a volume; LookupError while something it needs is not there."""
        space = f"/api/v1/namespaces/{self.about['namespace']}"
        if "persistentVolumeClaim" in volume:
            name = volume["persistentVolumeClaim"]["claimName"]
            claim = self._server.ask("GET", f"{space}/persistentvolumeclaims/{name}")
            if claim["status"].get("phase") != "Bound":
                raise LookupError(f"persistentvolumeclaim {name} is not bound")
            disk = self._server.ask("GET", f"/api/v1/persistentvolumes/{claim['spec']['volumeName']}")
            return Path(disk["spec"]["hostPath"]["path"])
        folder = self.folder / f"volume-{volume['name']}"
        folder.mkdir(parents=True, exist_ok=True)
        for source in volume.get("projected", {}).get("sources", []):
            found = self._server.ask("GET", f"{space}/configmaps/{source['configMap']['name']}")
            for name, text in (found.get("data") or {}).items():
                (folder / name).write_text(text)
            for name, text in (found.get("binaryData") or {}).items():
                (folder / name).write_bytes(base64.b64decode(text))
        return folder

    def _environment(self) -> dict[str, str]:
        values = {}
        for entry in self.container.get("env") or []:
            source = entry.get("valueFrom") or {}
            if "secretKeyRef" in source:
                space = f"/api/v1/namespaces/{self.about['namespace']}"
                secret = self._server.ask("GET", f"{space}/secrets/{source['secretKeyRef']['name']}")
                values[entry["name"]] = base64.b64decode(secret["data"][source["secretKeyRef"]["key"]]).decode()
            elif "fieldRef" in source:
                key = source["fieldRef"]["fieldPath"].partition("['")[2].rstrip("]'")
                values[entry["name"]] = self.about["annotations"][key]
            else:
                values[entry["name"]] = entry.get("value", "")
        return values

    def _hosts(self) -> str:
        """A line for /etc/hosts with what a headless Service would resolve."""
        name = self.spec.get("subdomain")
        if not name:
            return ""
        service = self._server.ask("GET", f"/api/v1/namespaces/{self.about['namespace']}/services/{name}")
        wanted = service["spec"]["selector"]
        assert service["spec"]["clusterIP"] == "None"
        assert wanted.items() <= self.about["labels"].items()
        stem = self.spec["hostname"].rpartition("-")[0]
        return f"127.0.0.1 {' '.join(f'{stem}-{number}.{name}' for number in range(8))}"

    def look(self, manifest: Object) -> None:
        """Do what is due: report an end, pass on a request to end, kill after the grace period."""
        self.manifest, self.about = manifest, manifest["metadata"]
        deadline = self.spec.get("activeDeadlineSeconds")
        if self.process is None and not self.is_reported and not self.about.get("deletionTimestamp"):
            self.start()
        elif self.process is not None and self.process.poll() is None:
            if self.kill_at is None and self.about.get("deletionTimestamp"):
                self._ask_to_end(self.about.get("deletionGracePeriodSeconds", 30))
            elif self.kill_at is None and deadline and time.monotonic() - self.started > deadline:
                self.reason = "DeadlineExceeded"
                self._ask_to_end(self.spec.get("terminationGracePeriodSeconds", 30))
            elif self.kill_at is not None and time.monotonic() > self.kill_at:
                self.kill()
        if self.process is not None and self.process.poll() is not None and not self.is_reported:
            self._report_end(self.process.returncode)
        if self.about.get("deletionTimestamp") and (self.process is None or self.is_reported):
            body = {
                "apiVersion": "v1",
                "kind": "DeleteOptions",
                "gracePeriodSeconds": 0,
                "preconditions": {"uid": self.about["uid"]},
            }
            self._server.ask("DELETE", self.path, body)

    def _ask_to_end(self, grace_s: float) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        self.kill_at = time.monotonic() + grace_s

    def kill(self) -> None:
        """End all processes of the pod."""
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def _report_end(self, code: int) -> None:
        message = self.folder / "message" / "termination-log"
        text = message.read_text() if message.exists() else ""
        if not text and code and self.container.get("terminationMessagePolicy") == "FallbackToLogsOnError":
            text = (self.folder / "log").read_text(errors="replace")[-2000:]
        ended = {
            "exitCode": code if code >= 0 else 128 - code,
            "reason": "Completed" if code == 0 else "Error",
            "message": text,
            "finishedAt": now(),
        }
        self._report("Succeeded" if code == 0 and not self.reason else "Failed", {"terminated": ended})
        self.is_reported = True

    def _report(self, phase: str, state: Object) -> None:
        ready = "True" if phase == "Running" else "False"
        kept = [c for c in self.manifest.get("status", {}).get("conditions", []) if c["type"] != "Ready"]
        status: Object = {
            "phase": phase,
            "podIP": "127.0.0.1",
            "hostIP": "127.0.0.1",
            "conditions": [*kept, {"type": "Ready", "status": ready, "lastTransitionTime": now()}],
            "containerStatuses": [
                {
                    "name": self.container["name"],
                    "image": self.container["image"],
                    "imageID": "",
                    "ready": ready == "True",
                    "restartCount": 0,
                    "state": state,
                }
            ],
        }
        if phase == "Running":
            status["startTime"] = now()
        if self.reason:
            status["reason"] = self.reason
        self._server.merge(f"{self.path}/status", {"status": status})


class Kubelets:
    """Nodes of a cluster, and its scheduler, in one thread.

    Args:
        server: the cluster.
        folder: for pods.
        nodes: labels of each node by its name; `gpus=N` in the labels gives it so many devices.
    """

    def __init__(self, server: Server, folder: Path, nodes: dict[str, dict[str, str]]) -> None:
        self.server, self._folder = server, folder
        self.pods: dict[str, Pod] = {}
        self.dead: set[str] = set()
        self._nodes = nodes
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*certificate(folder))
        self._http.socket = context.wrap_socket(self._http.socket, server_side=True)
        threading.Thread(target=self._http.serve_forever, daemon=True).start()
        for name, labels in nodes.items():
            self._register(name, dict(labels))
        self._stop = threading.Event()
        self._problem: BaseException | None = None
        self._thread = threading.Thread(target=self._loop, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End all pods, and the thread; raises what ended the thread early."""
        self._stop.set()
        self._thread.join()
        self._http.shutdown()
        self._http.server_close()
        self.server.close()
        for pod in self.pods.values():
            pod.kill()
        if self._problem is not None:
            raise self._problem

    def lose(self, node: str) -> None:
        """A node dies: its processes are gone, and it reports nothing any more."""
        self.dead.add(node)
        for pod in self.pods.values():
            if pod.spec["nodeName"] == node:
                pod.kill()

    def _register(self, name: str, labels: dict[str, str]) -> None:
        gpus = labels.pop("gpus", "0")
        room = {"cpu": "64", "memory": "256Gi", "pods": "110", "nvidia.com/gpu": gpus}
        self.server.ask(
            "POST",
            "/api/v1/nodes",
            {
                "apiVersion": "v1",
                "kind": "Node",
                "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name, **labels}},
            },
        )
        self.server.merge(f"/api/v1/nodes/{name}", {"spec": {"taints": None}})
        self.server.merge(
            f"/api/v1/nodes/{name}/status",
            {
                "status": {
                    "capacity": room,
                    "allocatable": room,
                    "addresses": [
                        {"type": "InternalIP", "address": "127.0.0.1"},
                        {"type": "Hostname", "address": name},
                    ],
                    "daemonEndpoints": {"kubeletEndpoint": {"Port": self._http.server_address[1]}},
                    "conditions": [
                        {"type": "Ready", "status": "True", "reason": "KubeletReady", "lastHeartbeatTime": now()}
                    ],
                }
            },
        )

    def _loop(self) -> None:
        beat = 0.0
        try:
            while not self._stop.wait(0.1):
                with suppress(urllib3.exceptions.HTTPError):  # the server is away: pods run on, and are reported later
                    if time.monotonic() > beat:
                        beat = time.monotonic() + 5
                        self._heartbeat()
                    for manifest in self.server.ask("GET", "/api/v1/pods")["items"]:
                        self._look(manifest)
        except BaseException as error:  # noqa: BLE001  # raised by close
            self._problem = error

    def _heartbeat(self) -> None:
        for name in self._nodes.keys() - self.dead:
            self.server.merge(
                f"/api/v1/nodes/{name}/status",
                {
                    "status": {
                        "conditions": [
                            {"type": "Ready", "status": "True", "reason": "Ready", "lastHeartbeatTime": now()}
                        ]
                    }
                },
            )

    def _look(self, manifest: Object) -> None:
        uid, node = manifest["metadata"]["uid"], manifest["spec"].get("nodeName")
        try:
            if node is None:
                if not manifest["metadata"].get("deletionTimestamp"):
                    self._schedule(manifest)
            elif node not in self.dead:
                if uid not in self.pods:
                    if manifest.get("status", {}).get("phase") not in {None, "Pending"}:
                        return
                    self.pods[uid] = Pod(manifest, self.server, self._folder / uid)
                self.pods[uid].look(manifest)
        except LookupError:
            return  # it is gone meanwhile, or changed: the next look sees it

    def _schedule(self, manifest: Object) -> None:
        about, spec = manifest["metadata"], manifest["spec"]
        path = f"/api/v1/namespaces/{about['namespace']}/pods/{about['name']}"
        reasons = []
        for node in self.server.ask("GET", "/api/v1/nodes")["items"]:
            why = self._unfit(node, spec)
            if not why:
                target = {"apiVersion": "v1", "kind": "Node", "name": node["metadata"]["name"]}
                self.server.ask(
                    "POST",
                    f"{path}/binding",
                    {"apiVersion": "v1", "kind": "Binding", "target": target, "metadata": {"name": about["name"]}},
                )
                return
            reasons.append(why)
        message = f"0/{len(reasons)} nodes are available: {', '.join(sorted(set(reasons)))}."
        condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
        known = manifest.get("status", {}).get("conditions") or []
        if not any(c.get("message") == message for c in known):
            self.server.merge(f"{path}/status", {"status": {"conditions": [condition]}})

    def _unfit(self, node: Object, spec: Object) -> str:
        name, labels = node["metadata"]["name"], node["metadata"]["labels"]
        if node["spec"].get("unschedulable") or name in self.dead:
            return "node(s) were unschedulable"
        affinity = (
            spec.get("affinity", {}).get("nodeAffinity", {}).get("requiredDuringSchedulingIgnoredDuringExecution", {})
        )
        for term in affinity.get("nodeSelectorTerms", []):
            for rule in term["matchExpressions"]:
                if labels.get(rule["key"]) not in rule["values"]:
                    return "node(s) didn't match Pod's node affinity"
        used = sum(
            _gpus(pod.spec)
            for pod in self.pods.values()
            if pod.spec["nodeName"] == name and pod.process and pod.process.poll() is None
        )
        if _gpus(spec) + used > int(node["status"]["allocatable"]["nvidia.com/gpu"]):
            return "Insufficient nvidia.com/gpu"
        return ""

    def pod_named(self, name: str) -> Pod:
        """The newest pod of that name."""
        return [pod for pod in self.pods.values() if pod.about["name"] == name][-1]


def _gpus(spec: Object) -> int:
    limits = spec["containers"][0].get("resources", {}).get("limits") or {}
    return int(limits.get("nvidia.com/gpu", 0))


def certificate(folder: Path) -> tuple[Path, Path]:
    """A self-signed certificate for 127.0.0.1, and its key."""
    folder.mkdir(parents=True, exist_ok=True)
    certificate, key = folder / "cert.pem", folder / "key.pem"
    if not certificate.exists():
        subprocess.run(
            [
                "openssl",
                "req",
                "-x509",
                "-newkey",
                "ec",
                "-pkeyopt",
                "ec_paramgen_curve:prime256v1",
                "-nodes",
                "-days",
                "2",
                "-subj",
                "/CN=127.0.0.1",
                "-addext",
                "subjectAltName=IP:127.0.0.1",
                "-keyout",
                key,
                "-out",
                certificate,
            ],
            check=True,
            capture_output=True,
        )
    return certificate, key


def _handler(kubelets: Kubelets) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            """Nothing."""

        def do_GET(self) -> None:  # the protocol's name
            serve(self, kubelets.pod_named)

        do_POST = do_GET  # noqa: N815  # likewise

    return Handler


def serve(handler: BaseHTTPRequestHandler, pod_named: Callable[[str], Pod]) -> None:
    """Answer /containerLogs/NS/POD/C and /exec/NS/POD/C, as a kubelet does."""
    address = urlsplit(handler.path)
    _, what, _, name, *_ = address.path.split("/")
    query = parse_qs(address.query)
    if what == "containerLogs":
        lines = (pod_named(name).folder / "log").read_bytes().splitlines(keepends=True)
        data = b"".join(lines[-int(query.get("tailLines", ["1000000"])[0]) :])
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)
    else:
        execute(handler, pod_named(name), query["command"])


def execute(handler: BaseHTTPRequestHandler, pod: Pod, command: list[str]) -> None:
    """Run a command in a pod, over a WebSocket of v4.channel.k8s.io."""
    offered = handler.headers["Sec-WebSocket-Protocol"]
    assert "v4.channel.k8s.io" in offered, offered
    key = handler.headers["Sec-WebSocket-Key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
    handler.send_response(101)
    handler.send_header("Upgrade", "websocket")
    handler.send_header("Connection", "Upgrade")
    handler.send_header("Sec-WebSocket-Accept", base64.b64encode(hashlib.sha1(key.encode()).digest()).decode())  # noqa: S324
    handler.send_header("Sec-WebSocket-Protocol", "v4.channel.k8s.io")
    handler.end_headers()
    handler.wfile.flush()
    handler.close_connection = True
    line = handler.connection
    sending = threading.Lock()

    def send(channel: int, data: bytes, opcode: int = 2) -> None:
        body = bytes([channel]) + data if opcode == 2 else data
        size = bytes([len(body)]) if len(body) < 126 else b"\x7f" + struct.pack(">Q", len(body))
        with sending:
            line.sendall(bytes([0x80 | opcode]) + size + body)

    if pod.process is None or pod.process.poll() is not None:
        failure = {"status": "Failure", "message": "container not found", "reason": "InternalError"}
        send(3, json.dumps(failure).encode())
        return
    process = subprocess.Popen(
        ["nsenter", "-t", str(pod.process.pid), "-m", "--root", "--wd", *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"},
    )

    def pump(channel: int, stream: Any) -> None:
        while data := stream.read1(1 << 16):
            send(channel, data)

    pumps = [threading.Thread(target=pump, args=pair) for pair in ((1, process.stdout), (2, process.stderr))]
    for thread in pumps:
        thread.start()
    threading.Thread(target=_feed, args=(handler.rfile, process), daemon=True).start()
    for thread in pumps:
        thread.join()
    code = process.wait()
    if code and pod.process.poll() is not None:
        code = 137  # the container ended, and took the command along
    for stream in (process.stdin, process.stdout, process.stderr):
        with suppress(OSError):
            stream.close()
    status: Object = {"status": "Success"}
    if code:
        cause = {"reason": "ExitCode", "message": str(code)}
        status = {"status": "Failure", "reason": "NonZeroExitCode", "details": {"causes": [cause]}}
    send(3, json.dumps(status).encode())
    send(0, b"\x03\xe8", opcode=8)
    line.shutdown(socket.SHUT_WR)


def _feed(stream: Any, process: subprocess.Popen[bytes]) -> None:
    """Hand a client's frames on to the command's standard input, until either of them is gone."""
    with suppress(OSError, ValueError):
        _feed_frames(stream, process)


def _feed_frames(stream: Any, process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    while len(head := stream.read(2)) == 2:
        size = head[1] & 0x7F
        if size == 126:
            size = struct.unpack(">H", stream.read(2))[0]
        elif size == 127:
            size = struct.unpack(">Q", stream.read(8))[0]
        mask = stream.read(4)
        data = stream.read(size)
        data = (int.from_bytes(data, "big") ^ int.from_bytes((mask * (size // 4 + 1))[:size], "big")).to_bytes(
            size, "big"
        )
        if head[0] & 0x0F == 8:
            break
        if data[:1] == b"\x00":
            process.stdin.write(data[1:])
            process.stdin.flush()


def scratch(prefix: str) -> Path:
    """A folder for pods, outside of what tests clean up while pods may still write."""
    return Path(tempfile.mkdtemp(prefix=prefix))
