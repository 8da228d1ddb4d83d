"""A run's volume on Kubernetes, as seen from here: through a pod of the run while one runs, else through a small one.

What: reading the log by offset, sending bundles that are too large for ConfigMaps, and fetching the run's directory.
Costs: a command in a pod; where none runs, a pod of the run's image without devices is started, and deleted after use
or by its deadline.
"""

from __future__ import annotations

import json
import tarfile
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, cast

from stoker.errors import PlaceFailed, PlaceUnreachable
from stoker.launching.bundle import Bundle
from stoker.launching.kubernetes import pod_files
from stoker.launching.kubernetes.cluster_api import AlreadyThere, ClusterApi, Object, new_object
from stoker.launching.kubernetes.cluster_state import ending_of, host_of, state_of
from stoker.launching.kubernetes.manifests import CONTAINER, MOUNT, SECURITY, labels, pod_rights, run_volume, selector
from stoker.launching.lines import Answer, extract_tar, files_to_copy, write_tar

VISITOR_LIFE_S = 900
"""A pod that was started for files alone ends after so long [s]."""

_POLL_S, _PATIENCE_S = 0.5, 300.0
_HASH_TIMEOUT_S = 3600.0


class RunVolume:
    """The volume of one run.

    Args:
        api: the cluster.
        name: of the run's objects.
        pod: fields of a pod that mounts the volume under `MOUNT`: `image`, `claim`, `root`, `placement`.
        owner: reference to the run's Job, so that a pod left behind goes with it; None: there is none any more.
    """

    def __init__(self, api: ClusterApi, name: str, pod: Object, owner: Object | None) -> None:
        self._api, self._name, self._pod, self._owner = api, name, pod, owner

    def running_pod(self) -> str:
        """The name of the run's own pod of host 0, if it runs; else "".

        A terminating pod does not count: one of a dead node stays in that state while the pod that replaced it runs.
        """
        for pod in self._api.objects("Pod", selector(self._name, "training")):
            ready = [s for s in pod.get("status", {}).get("containerStatuses") or [] if "running" in s.get("state", {})]
            if host_of(pod) == 0 and ready and "deletionTimestamp" not in pod["metadata"]:
                return str(pod["metadata"]["name"])
        return ""

    def read(self, path: str, offset: int, *, most_bytes: int = 1 << 20, may_visit: bool = True) -> bytes:
        """Bytes of a file from `offset` on; b"" if it is not there, or no pod runs and none may be started."""
        pod = self.running_pod() or (self._visit() if may_visit else "")
        return self._run(pod, "read", f"{MOUNT}/{path}", str(offset), str(most_bytes)).stdout if pod else b""

    def touch(self, path: str) -> None:
        """Make an empty file, if a pod of the run is there to do it."""
        if pod := self.running_pod():
            self._run(pod, "touch", f"{MOUNT}/{path}")

    def send(self, bundle: Bundle, data: str = "") -> bool:
        """Make a bundle's folder on the volume, whole or not at all; False if it was there.

        Of data it may also be in the folder `data` of the container.
        """
        pod, folder = self._visit(), f"{MOUNT}/{bundle.folder}"
        command, stdin = ["has", folder], tuple[bytes, ...]()
        if bundle.kind == "data":
            files = {file.path: file.digest for file in bundle.files}
            stdin = (json.dumps({"name": bundle.name, "files": files}).encode(),)
            command = ["link", folder, data, str(len(stdin[0]))]
        if self._run(pod, *command, stdin=stdin, timeout_s=_HASH_TIMEOUT_S).stdout.strip() == b"1":
            return False
        self._run(pod, "unpack", folder, stdin=_tar_stream(bundle), timeout_s=600.0)
        return True

    def fetch(self, folder: str, into: Path) -> None:
        """Copy a folder's files; those of the same size and time of change here are left."""
        pod = self.running_pod() or self._visit()
        listed = self._run(pod, "list", f"{MOUNT}/{folder}").stdout
        try:
            paths = files_to_copy(json.loads(listed), into)
        except (ValueError, TypeError, AttributeError) as error:
            raise PlaceFailed(
                f"Pod {pod} lists no files: {listed[:60]!r}",
                remedy="Does the image's python3 print something of its own?",
            ) from error
        if not paths:
            return
        names = json.dumps(sorted(paths)).encode()
        command = [*_PROGRAM, "pack", f"{MOUNT}/{folder}", str(len(names))]
        stream = _Stream(self._api.stream(pod, command, stdin=[names], container=CONTAINER))
        try:  # none of what was just listed: the pod ended in between, and the volume with it
            is_cut = not extract_tar(cast("IO[bytes]", stream), into, paths)
        except tarfile.ReadError:
            is_cut = True
        stream.end()
        if stream.code is None or (is_cut and stream.code == 0):
            raise PlaceUnreachable(
                f"The copy of {folder} from pod {pod} was cut.",
                remedy="The same command goes on from the files that came.",
            )
        if stream.code != 0:
            said = Answer(stream.code, b"", stream.errors.decode(errors="replace")).last_line()
            raise PlaceFailed(
                f"{folder} did not come whole from pod {pod}: {said}", remedy="The same command fetches the rest."
            )

    def leave(self) -> None:
        """Delete the pod that was started for files, if there is one."""
        self._api.delete("Pod", self._visitor_name)

    @property
    def _visitor_name(self) -> str:
        return f"{self._name}-files"

    def _run(
        self, pod: str, *words: str, stdin: Iterator[bytes] | tuple[bytes, ...] = (), timeout_s: float = 60.0
    ) -> Answer:
        output = self._api.execute(pod, [*_PROGRAM, *words], stdin=stdin, timeout_s=timeout_s, container=CONTAINER)
        if output.code != 0:
            raise PlaceFailed(f"{words[1]} cannot be used in pod {pod}: {output.last_line()}")
        return output

    def _require_claim(self) -> None:
        """Raise PlaceFailed if the volume is gone: a pod that wants it would wait for it for ever."""
        claim = self._pod["claim"]
        try:
            volume_claim = self._api.find("PersistentVolumeClaim", claim)
        except PlaceUnreachable:
            raise
        except PlaceFailed:  # this login may not look: then the pod shows it
            return
        if volume_claim is None:
            raise PlaceFailed(
                f"The claim {claim}, which held the run's directory, is not there any more.",
                remedy="What was fetched before is here; --new starts another run.",
            )

    def _visit(self) -> str:
        """The name of a running pod that was started for files alone."""
        until, why = time.monotonic() + _PATIENCE_S, "it is deleted as soon as it is made"
        while True:
            pod = self._api.find("Pod", self._visitor_name)
            if pod is None:
                self._require_claim()
                with suppress(AlreadyThere):
                    self._api.create(visitor(self._visitor_name, self._name, self._pod, self._owner))
            else:
                phase = pod.get("status", {}).get("phase")
                if phase == "Running" and "deletionTimestamp" not in pod["metadata"]:
                    return self._visitor_name
                if _is_old(pod):
                    self.leave()
                elif phase in {"Failed", "Succeeded"}:
                    _, why, _ = ending_of(pod)
                    self.leave()
                    raise PlaceFailed(f"Pod {self._visitor_name}, which reads the volume, ended: {why}.")
                why = state_of({"kind": "Pod", "metadata": pod["metadata"], "spec": {}}, [pod]).why
            if time.monotonic() > until:
                self.leave()
                raise PlaceUnreachable(f"Pod {self._visitor_name}, which reads the volume, does not start: {why}.")
            time.sleep(_POLL_S)


def _is_old(pod: Object) -> bool:
    """Whether a pod for files is over because its time was: left behind by an earlier question."""
    status: Object = pod.get("status", {})
    return bool(status.get("reason") == "DeadlineExceeded" or status.get("phase") == "Succeeded")


def visitor(pod_name: str, name: str, about: Object, owner: Object | None) -> Object:
    """A pod with the run's volume and no device, which ends by itself."""
    metadata: Object = {"name": pod_name, "labels": labels(name, "files")}
    if owner is not None:
        metadata["ownerReferences"] = [owner]
    volume, mount = run_volume(about["claim"], about.get("root", ""))
    container = {
        "name": CONTAINER,
        "image": about["image"],
        "volumeMounts": [mount],
        "command": ["python3", "-c", f"import time; time.sleep({VISITOR_LIFE_S})"],
        "resources": {"requests": {"cpu": "100m", "memory": "64Mi"}, "limits": {"memory": "512Mi"}},
        "securityContext": SECURITY,
    }
    spec: Object = {
        "restartPolicy": "Never",
        "activeDeadlineSeconds": VISITOR_LIFE_S,
        "terminationGracePeriodSeconds": 0,
        **pod_rights(pull_secret=about.get("pull_secret", ""), user=about.get("user", "")),
        "containers": [container],
        "volumes": [volume],
        **about.get("placement", {}),
    }
    return new_object("v1", "Pod", metadata, spec=spec)


_PROGRAM = ["python3", "-c", Path(pod_files.__file__).read_text(encoding="utf-8")]


class _Stream:
    """Standard output of a stream as a file that tarfile reads.

    Attributes:
        code: the command's exit code; None: it has not come.
        errors: its standard error.
    """

    def __init__(self, chunks: Iterator[tuple[int, bytes]]) -> None:
        self._chunks, self._rest = chunks, b""
        self.code: int | None = None
        self.errors = b""

    def read(self, size: int) -> bytes:
        """The next `size` bytes; fewer at the end."""
        while len(self._rest) < size and (chunk := next(self._chunks, None)) is not None:
            if chunk[0] == 1:
                self._rest += chunk[1]
            elif chunk[0] == 2:
                self.errors += chunk[1]
            else:
                self.code = int(chunk[1])
        data, self._rest = self._rest[:size], self._rest[size:]
        return data

    def end(self) -> None:
        """Read what is left, so that `code` is known: an archive that ends between two files reads as a whole one."""
        while self.read(1 << 20):
            pass


def _tar_stream(bundle: Bundle) -> Iterator[bytes]:
    """A bundle as an uncompressed tar file, in pieces."""
    with tempfile.TemporaryFile() as spool:
        write_tar(bundle.files, spool)
        spool.seek(0)
        while piece := spool.read(1 << 20):
            yield piece
