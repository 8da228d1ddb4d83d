"""A Kubernetes cluster on this machine: etcd, the real kube-apiserver, its controllers, and the tests' kubelet."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.places.kubernetes.kubelet import Kubelets, Server, certificate, scratch

BUILD = Path(__file__).with_name("build.sh")
ADMIN, LIMITED = "token-of-admin", "token-of-somebody"


def why_not() -> str:
    """Why no cluster can be started here; "" if one can."""
    if os.geteuid() != 0:
        return "pods are processes in mount namespaces, which needs root"
    needed = ("unshare", "nsenter", "openssl", "chroot", "apt-get", "dpkg-source", "make")
    if missing := [program for program in needed if shutil.which(program) is None]:
        return f"not installed: {', '.join(missing)}"
    if subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode:
        return "mount namespaces are not allowed here"
    return ""


class Cluster:
    """A running cluster; `close` ends all of it.

    Attributes:
        kubeconfig: contexts `test` (administrator) and `limited` (nothing allowed), namespace `team`.
        kubelets: its nodes.
        disk: folder of the volume that a claim of StorageClass `disk` gets.
    """

    def __init__(self, nodes: dict[str, dict[str, str]]) -> None:
        programs = Path(subprocess.run([BUILD], check=True, stdout=subprocess.PIPE, text=True).stdout.strip())
        self.folder = scratch("stoker-cluster-")
        self.disk = self.folder / "disk"
        self._stack = ExitStack()
        try:
            self._start(programs, nodes)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End kubelets and servers."""
        self._stack.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _start(self, programs: Path, nodes: dict[str, dict[str, str]]) -> None:
        client, peer, secure = (_free_port() for _ in range(3))
        self._run(
            programs / "etcd",
            f"--data-dir={self.folder / 'etcd'}",
            "--unsafe-no-fsync",
            f"--listen-client-urls=http://127.0.0.1:{client}",
            f"--advertise-client-urls=http://127.0.0.1:{client}",
            f"--listen-peer-urls=http://127.0.0.1:{peer}",
            f"--initial-advertise-peer-urls=http://127.0.0.1:{peer}",
            f"--initial-cluster=default=http://127.0.0.1:{peer}",
        )
        key = self.folder / "service-account.pem"
        shown, shown_key = certificate(self.folder / "certs")
        subprocess.run(["openssl", "genrsa", "-out", key, "2048"], check=True, capture_output=True)
        (self.folder / "tokens").write_text(f"{ADMIN},admin,1,system:masters\n{LIMITED},somebody,2\n")
        self._api_server = self._run(
            programs / "kube-apiserver",
            f"--etcd-servers=http://127.0.0.1:{client}",
            f"--secure-port={secure}",
            "--bind-address=127.0.0.1",
            "--insecure-port=0",
            f"--cert-dir={self.folder / 'certs'}",
            f"--tls-cert-file={shown}",
            f"--tls-private-key-file={shown_key}",
            f"--service-account-key-file={key}",
            f"--service-account-signing-key-file={key}",
            "--service-account-issuer=https://test",
            f"--token-auth-file={self.folder / 'tokens'}",
            "--authorization-mode=RBAC",
            "--disable-admission-plugins=ServiceAccount,TaintNodesByCondition,DefaultTolerationSeconds",
            "--service-cluster-ip-range=10.96.0.0/24",
            "--kubelet-preferred-address-types=InternalIP",
            "--watch-cache=true",
            "--profiling=false",
        )
        self.url = f"https://127.0.0.1:{secure}"
        self.server = Server(self.url, ADMIN, shown)
        self._until_ready()
        self.kubeconfig = self.folder / "kubeconfig"
        logins = {"test": ADMIN, "limited": LIMITED}
        self.kubeconfig.write_text(json.dumps(kubeconfig(self.url, logins, authority=shown)))
        self._run(
            programs / "kube-controller-manager",
            f"--kubeconfig={self.kubeconfig}",
            "--leader-elect=false",
            "--port=0",
            "--secure-port=0",
            f"--service-account-private-key-file={key}",
            "--pvclaimbinder-sync-period=1s",
            "--node-monitor-grace-period=12s",
            "--node-monitor-period=2s",
            "--pod-eviction-timeout=2s",
            "--terminated-pod-gc-threshold=100",
        )
        self.server.ask("POST", "/api/v1/namespaces", {"metadata": {"name": "team"}})
        self.kubelets = Kubelets(self.server, self.folder / "pods", nodes)
        self._stack.callback(self.kubelets.close)
        self._add_disk()

    def kill_api_server(self) -> None:
        """The API server dies; what it knew is in etcd, and pods run on."""
        self._api_server.kill()
        self._api_server.wait()

    def restart_api_server(self) -> None:
        """It is there again, at the same address."""
        self._api_server = self._run(*self._api_server.args)
        self._until_ready()

    def _run(self, *command: object) -> subprocess.Popen[bytes]:
        program = Path(str(command[0])).name
        log = self._stack.enter_context((self.folder / f"{program}.log").open("ab"))
        process = subprocess.Popen([str(word) for word in command], stdout=log, stderr=log)
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        return process

    def _until_ready(self) -> None:
        until = time.monotonic() + 120
        while not self.server.is_ready():
            if time.monotonic() > until:
                raise RuntimeError((self.folder / "kube-apiserver.log").read_text()[-2000:])
            time.sleep(0.2)

    def _add_disk(self) -> None:
        self.server.ask(
            "POST",
            "/apis/storage.k8s.io/v1/storageclasses",
            {
                "metadata": {"name": "disk", "annotations": {"storageclass.kubernetes.io/is-default-class": "true"}},
                "provisioner": "kubernetes.io/no-provisioner",
            },
        )

    def add_volume(self, name: str) -> Path:
        """A volume of this machine's disk that the next claim is bound to; its folder."""
        folder = self.disk / name
        folder.mkdir(parents=True)
        self.server.ask(
            "POST",
            "/api/v1/persistentvolumes",
            {
                "metadata": {"name": name},
                "spec": {
                    "capacity": {"storage": "20Gi"},
                    "accessModes": ["ReadWriteOnce", "ReadWriteMany"],
                    "storageClassName": "disk",
                    "persistentVolumeReclaimPolicy": "Retain",
                    "hostPath": {"path": str(folder)},
                },
            },
        )
        return folder


def kubeconfig(
    url: str, tokens: dict[str, str], others: dict[str, str] | None = None, *, authority: Path | None = None
) -> dict[str, Any]:
    """A kubeconfig with a context for each token at `url`, and for others, by name, each at an address of its own."""
    servers = dict.fromkeys(tokens, url) | (others or {})
    shows = {} if authority is None else {"certificate-authority": str(authority)}
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": next(iter(tokens)),
        "clusters": [{"name": n, "cluster": {"server": u, **shows}} for n, u in servers.items()],
        "users": [{"name": name, "user": {"token": tokens.get(name, "none")}} for name in servers],
        "contexts": [{"name": n, "context": {"cluster": n, "user": n, "namespace": "team"}} for n in servers],
    }


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port
