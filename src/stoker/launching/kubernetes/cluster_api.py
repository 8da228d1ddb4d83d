"""A Kubernetes API server as the launcher asks it: objects as JSON, commands in pods, and answers as Stoker's errors.

What: the user's own kubeconfig (contexts, certificates, login plugins) through the official client; objects stay plain
dictionaries, as in a manifest.
Costs: one request an answer, given up after `TIMEOUT_S`; nothing is retried here.
Source: Kubernetes API conventions (Status, `reason`), and the WebSocket protocol of exec, v4.channel.k8s.io.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import quote, urlencode

from stoker.errors import NoDevice, PlaceFailed, PlaceUnreachable, first_line, nearest
from stoker.launching.lines import Answer

Object = dict[str, Any]
"""A Kubernetes object, as in a manifest."""

TIMEOUT_S = 20.0
_CHUNK = 64 * 2**10
"""Bytes of a message to a command's standard input."""
_KILLED = 137
"""Exit code of a command that went with its container."""

_CLUSTER_WIDE = frozenset({"Namespace", "Node", "StorageClass", "SelfSubjectAccessReview"})
_NO_ANSWER = frozenset({429, 500, 502, 503, 504})
"""Statuses of a server, or a proxy before it, that could not work on a question."""


class NotThere(PlaceFailed):
    """The object that was asked for does not exist."""


class AlreadyThere(PlaceFailed):
    """An object of that name exists."""


def new_object(api: str, kind: str, metadata: Object, **fields: Any) -> Object:
    """An object as `kubectl apply` takes it."""
    return {"apiVersion": api, "kind": kind, "metadata": metadata, **fields}


def as_yaml(objects: Iterable[Object]) -> str:
    """Objects as people read them: a text of several lines line by line, and everything where it belongs."""
    import yaml  # noqa: PLC0415  # comes with the extra

    def text(dumper: Any, value: str) -> Any:
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)

    readable: Any = type("Readable", (yaml.SafeDumper,), {"ignore_aliases": lambda *_: True})  # no anchors
    readable.add_representer(str, text)
    manifests: str = yaml.dump_all(objects, Dumper=readable, sort_keys=False, width=120)
    return manifests


def reference_to(stored: Object) -> Object:
    """The owner reference that makes another object belong to this one."""
    about = stored["metadata"]
    return {"apiVersion": stored["apiVersion"], "kind": stored["kind"], "name": about["name"], "uid": about["uid"]}


def contexts() -> tuple[dict[str, str], str]:
    """Contexts of the kubeconfig with their namespaces, by name, and the current one; empty where there is no file.

    Raises:
        PlaceFailed: it cannot be read.
    """
    from kubernetes.config import ConfigException, kube_config  # noqa: PLC0415  # an extra
    from yaml import YAMLError  # noqa: PLC0415  # the client's

    try:
        listed, current = kube_config.list_kube_config_contexts(_config_file())
    except (ConfigException, OSError):
        return {}, ""
    except YAMLError as error:
        raise PlaceFailed(
            f"The kubeconfig is no YAML: {first_line(error)}", remedy="`kubectl config view` has to work first."
        ) from error
    return {c["name"]: c["context"].get("namespace") or "default" for c in listed}, current["name"] if current else ""


def connect(context: str, namespace: str) -> ClusterApi:
    """A namespace of a cluster; asks nothing yet.

    Raises:
        PlaceFailed: the client library is not installed; or as `ClusterApi`.
        NoDevice: as `ClusterApi`.
    """
    if importlib.util.find_spec("kubernetes") is None:
        raise PlaceFailed(
            "Kubernetes needs its client, which is not installed.", remedy="pip install 'stoker[kubernetes]'"
        )
    return ClusterApi(context, namespace)


def _config_file() -> str | None:
    """The kubeconfig as it is named now; the client's default was read when it was imported."""
    return os.environ.get("KUBECONFIG")


class ClusterApi:
    """One namespace of one cluster; `context` is its name in the kubeconfig, "" where there is no file.

    Every method may raise:

    Raises:
        PlaceUnreachable: the server does not answer, or says that it cannot now: nothing is known.
        NotThere: the object is not there.
        AlreadyThere: an object of that name exists.
        PlaceFailed: the server refuses; the message is its own.
    """

    def __init__(self, context: str, namespace: str) -> None:
        """Read the kubeconfig; asks nothing yet.

        Args:
            context: of the kubeconfig; "": the current one.
            namespace: where all objects are.

        Raises:
            NoDevice: there is no kubeconfig, or no such context.
            PlaceFailed: the login it describes cannot be used.
        """
        from kubernetes import client  # noqa: PLC0415  # an extra
        from kubernetes.config import ConfigException, load_incluster_config, load_kube_config  # noqa: PLC0415

        known, current = contexts()
        if context and context not in known:
            raise NoDevice(f"The kubeconfig has no context {context!r}.", remedy=nearest(context, known))
        settings = client.Configuration()
        try:
            if known:
                load_kube_config(
                    _config_file(), context=context or None, client_configuration=settings, persist_config=False
                )
            else:
                load_incluster_config(client_configuration=settings)
        except ConfigException as error:
            if not known:
                named = _config_file()
                raise NoDevice(
                    f"There is no kubeconfig{f' {named}' if named else ''}, so no cluster is known.",
                    remedy="Set KUBECONFIG, or log in to the cluster: `kubectl get pods` has to work.",
                ) from error
            raise PlaceFailed(
                f"The kubeconfig cannot be used: {first_line(error)}", remedy="`kubectl get pods` has to work first."
            ) from error
        settings.retries = False
        self.context = context or current
        self.namespace = namespace
        self.host: str = settings.host
        self._client = client.ApiClient(settings)

    def __repr__(self) -> str:
        return f"ClusterApi({self.host}, {self.namespace!r})"

    def get(self, kind: str, name: str, *, api: str = "v1") -> Object:
        """An object."""
        return self.ask("GET", self.path(api, kind, name))

    def find(self, kind: str, name: str, *, api: str = "v1") -> Object | None:
        """An object; None if it is not there."""
        try:
            return self.get(kind, name, api=api)
        except NotThere:
            return None

    def objects(self, kind: str, selector: str = "", *, api: str = "v1") -> list[Object]:
        """The objects of a kind with these labels."""
        query = {"labelSelector": selector} if selector else {}
        items: list[Object] = self.ask("GET", self.path(api, kind), query=query).get("items", [])
        return items

    def warnings(self) -> list[Object]:
        """The Warning events of the namespace, the oldest first; the server keeps them for an hour."""
        query = {"fieldSelector": "type=Warning"}
        items: list[Object] = self.ask("GET", self.path("v1", "Event"), query=query).get("items", [])
        return sorted(items, key=lambda event: event.get("lastTimestamp") or event.get("eventTime") or "")

    def create(self, manifest: Object) -> Object:
        """Create an object; returns it as the server stored it.

        The server is asked to refuse fields that it does not know (from 1.25 on), and what it stored is compared with
        what was sent: see `dropped`.

        Raises:
            PlaceFailed: the server kept the object without some of its fields; it is deleted again.
        """
        path, query = self.path(manifest["apiVersion"], manifest["kind"]), {"fieldValidation": "Strict"}
        stored = self.ask("POST", path, manifest, query=query)
        if lost := list(dropped(manifest, stored)):
            self.delete(manifest["kind"], manifest["metadata"]["name"], api=manifest["apiVersion"])
            raise PlaceFailed(
                f"The cluster dropped fields of the {manifest['kind']}: {', '.join(lost)}.",
                remedy="Its version does not know them, or an admission webhook took them out.",
            )
        return stored

    def patch(self, kind: str, name: str, change: Object, *, api: str = "v1") -> Object:
        """Change fields of an object by a merge patch."""
        return self.ask("PATCH", self.path(api, kind, name), change, content_type="application/merge-patch+json")

    def apply(self, manifest: Object) -> Object:
        """Create an object, or change the fields of it that are Stoker's (server-side apply)."""
        path = self.path(manifest["apiVersion"], manifest["kind"], manifest["metadata"]["name"])
        query = {"fieldManager": "stoker", "force": "true"}
        return self.ask("PATCH", path, manifest, query=query, content_type="application/apply-patch+yaml")

    def delete(self, kind: str, name: str, *, api: str = "v1") -> None:
        """Delete an object and, after it, what it owns; nothing happens if it is not there."""
        body = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Background"}
        try:
            self.ask("DELETE", self.path(api, kind, name), body)
        except NotThere:
            return

    def path(self, api: str, kind: str, name: str = "") -> str:
        """Path of a kind's objects, or of one, on the server."""
        group = f"/api/{api}" if "/" not in api else f"/apis/{api}"
        where = "" if kind in _CLUSTER_WIDE else f"/namespaces/{quote(self.namespace)}"
        plural = kind.lower() + ("es" if kind.endswith("s") else "s")  # of all kinds that are asked for here
        return f"{group}{where}/{plural}" + (f"/{quote(name)}" if name else "")

    def ask(
        self,
        method: str,
        path: str,
        body: Object | None = None,
        *,
        query: Mapping[str, str] | None = None,
        content_type: str = "application/json",
    ) -> Object:
        """The answer to one request, as JSON."""
        data = self._request(method, path, body, query or {}, content_type)
        try:
            answer: Object = json.loads(data or b"{}")
        except ValueError as error:  # a proxy's page of login, say
            raise PlaceUnreachable(
                f"What answers at {self.host} is no API server: {data[:60]!r}", remedy="`kubectl get pods` has to work."
            ) from error
        return answer

    def _request(
        self, method: str, path: str, body: Object | None, query: Mapping[str, str], content_type: str
    ) -> bytes:
        from kubernetes.client.exceptions import ApiException  # noqa: PLC0415  # an extra
        from urllib3.exceptions import HTTPError  # noqa: PLC0415  # the client's

        url = f"{self.host}{path}" + (f"?{urlencode(query)}" if query else "")
        headers = {"Accept": "application/json, */*", "Content-Type": content_type, **self._login()}
        try:
            response = self._client.rest_client.request(
                method, url, headers=headers, body=body, _request_timeout=(TIMEOUT_S / 2, TIMEOUT_S)
            )
            data: bytes = response.read() or b""
        except ApiException as error:
            raise self._refusal(error.status, error.body or str(error.reason)) from error
        except (HTTPError, OSError) as error:
            raise PlaceUnreachable(f"The cluster at {self.host} does not answer: {first_line(error)}") from error
        if not 200 <= response.status < 300:
            raise self._refusal(response.status, data)
        return data

    def _login(self) -> dict[str, str]:
        headers: dict[str, str] = {}
        self._client.update_params_for_auth(headers, [], ["BearerToken"], "", "", None)
        return headers

    def _refusal(self, status: int | None, body: str | bytes) -> PlaceFailed:
        """The error of the server's answer, in its own words."""
        try:
            about = json.loads(body)
            message, reason = str(about["message"]), str(about.get("reason", ""))
        except (ValueError, TypeError, KeyError):
            message = (body.decode(errors="replace") if isinstance(body, bytes) else body).strip()[:300]
            reason = ""
        if not status or (status in _NO_ANSWER):
            return PlaceUnreachable(
                f"The cluster at {self.host} cannot answer now ({status or 'no status'}): {message}"
            )
        if status == 401:
            return PlaceFailed(
                f"The cluster at {self.host} does not accept the login: {message}.",
                remedy="`kubectl get pods` has to work first.",
            )
        if status == 404:
            return NotThere(message)
        if status == 409 and reason == "AlreadyExists":
            return AlreadyThere(message)
        if status == 403 and "exceeded quota" in message:
            return PlaceFailed(
                f"The namespace's quota does not allow it: {message}",
                remedy="Ask for fewer devices, or wait until others end.",
            )
        if status == 403:
            return PlaceFailed(message, remedy="Ask for a role that allows it; `stoker places` says what a run needs.")
        return PlaceFailed(message)

    def execute(
        self, pod: str, command: list[str], *, stdin: Iterable[bytes] = (), timeout_s: float = 60.0, container: str = ""
    ) -> Answer:
        """Run a command in a pod's container.

        Its standard input is closed by no message of the protocol's version 4: the command has to know how many bytes
        it reads.

        Args:
            pod: name.
            command: program and arguments.
            stdin: what it reads.
            timeout_s: the longest silence [s].
            container: name; "": the first.

        Raises:
            PlaceUnreachable: the line broke, or was silent too long.
            PlaceFailed: the pod's node refuses.
        """
        chunks = [*self.stream(pod, command, stdin=stdin, timeout_s=timeout_s, container=container)]
        code = next((int(data) for channel, data in chunks if channel == 3), None)
        if code is None:
            raise PlaceUnreachable(f"The line to pod {pod} broke before its command ended.")
        stdout = b"".join(data for channel, data in chunks if channel == 1)
        stderr = b"".join(data for channel, data in chunks if channel == 2)
        return Answer(code, stdout, stderr.decode(errors="replace"))

    def stream(
        self, pod: str, command: list[str], *, stdin: Iterable[bytes] = (), timeout_s: float = 60.0, container: str = ""
    ) -> Iterator[tuple[int, bytes]]:
        """The output of a command in a pod, as it comes: (1, output), (2, error), at last (3, its exit code as text).

        Raises as `execute`.
        """
        from kubernetes.client.exceptions import ApiException  # noqa: PLC0415  # an extra
        from kubernetes.stream import ws_client  # noqa: PLC0415  # an extra
        from websocket import WebSocketException  # noqa: PLC0415  # the client's

        query = [("command", word) for word in command] + [("stdout", "true"), ("stderr", "true")]
        query += ([("stdin", "true")] if stdin else []) + ([("container", container)] if container else [])
        try:
            line = ws_client.websocket_call(
                self._client.configuration,
                "GET",
                f"{self.host}{self.path('v1', 'Pod', pod)}/exec",
                query_params=query,
                headers=self._login(),
                capture_all=False,
                binary=True,
                _preload_content=False,
            )
        except ApiException as error:
            said = str(error.reason)
            if refused := re.match(r"Handshake status (40\d)", said):
                raise PlaceFailed(
                    f"The cluster allows no command in pod {pod} ({refused[1]}).",
                    remedy="Ask for a role that may create and get pods/exec.",
                ) from error
            raise PlaceUnreachable(f"No line to pod {pod}: {first_line(Exception(said))}") from error
        try:
            for part in stdin:
                for start in range(0, len(part), _CHUNK):
                    line.write_stdin(part[start : start + _CHUNK])
            yield from _frames(line, pod, timeout_s)
        except (WebSocketException, OSError) as error:
            raise PlaceUnreachable(f"The line to pod {pod} broke: {first_line(error)}") from error
        finally:
            with suppress(WebSocketException, OSError):  # the other end may have gone first
                line.close()
            line.sock.shutdown()  # of a line that the server closed, `close` leaves the socket open

    @functools.cached_property
    def version(self) -> tuple[int, int]:
        """The server's version, such as (1, 34)."""
        about = self.ask("GET", "/version")
        return int(about["major"]), int("".join(c for c in about["minor"] if c.isdigit()))

    @functools.cached_property
    def groups(self) -> frozenset[str]:
        """The API groups and versions that the server has, such as `jobset.x-k8s.io/v1alpha2`."""
        listed = self.ask("GET", "/apis").get("groups", [])
        return frozenset(version["groupVersion"] for group in listed for version in group["versions"])

    def may(self, verb: str, resource: str, group: str = "") -> bool:
        """Whether this login may do something here, by the server's own review (SelfSubjectAccessReview)."""
        resource, _, subresource = resource.partition("/")
        attributes = {"namespace": self.namespace, "verb": verb, "resource": resource, "group": group}
        if subresource:
            attributes["subresource"] = subresource
        api = "authorization.k8s.io/v1"
        review = {"apiVersion": api, "kind": "SelfSubjectAccessReview", "spec": {"resourceAttributes": attributes}}
        return bool(self.ask("POST", self.path(api, "SelfSubjectAccessReview"), review)["status"]["allowed"])


def dropped(sent: object, stored: object, path: str = "") -> Iterator[str]:
    """Paths of fields that were sent and are not in what was stored.

    Values may differ: servers normalise quantities, and webhooks may change them.

    >>> list(dropped({"spec": {"suspend": True, "parallelism": 1}}, {"spec": {"parallelism": 1}}))
    ['spec.suspend']
    """
    if isinstance(sent, dict):
        there = stored if isinstance(stored, dict) else {}
        for key, value in sent.items():
            where = f"{path}.{key}" if path else str(key)
            if key in there:
                yield from dropped(value, there[key], where)
            elif value not in (None, "", [], {}):
                yield where
    elif isinstance(sent, list):
        items = stored if isinstance(stored, list) else []
        named = {item["name"]: item for item in items if isinstance(item, dict) and "name" in item}
        for index, value in enumerate(sent):
            name = value.get("name") if isinstance(value, dict) else None
            there_item = named.get(name) if name is not None else items[index] if index < len(items) else None
            if there_item is None:
                yield f"{path}[{index}]"
            else:
                yield from dropped(value, there_item, f"{path}[{index}]")


def _frames(line: Any, pod: str, timeout_s: float) -> Iterator[tuple[int, bytes]]:
    """Data of the channels as it comes, and at last the exit code."""
    heard = time.monotonic()
    while True:
        is_open = line.is_open()
        if is_open:
            line.update(timeout=1.0)
        for channel in (1, 2):
            if data := line.read_channel(channel):
                heard = time.monotonic()
                yield channel, data
        if status := line.read_channel(3):
            for channel in (1, 2):  # what came in while the other channels were read
                if data := line.read_channel(channel):
                    yield channel, data
            yield 3, str(_exit_code(json.loads(status), pod)).encode()
            return
        if not is_open:
            return
        if time.monotonic() - heard > timeout_s:
            raise PlaceUnreachable(f"The line to pod {pod} was silent for {timeout_s:g} s.")


def _exit_code(status: Object, pod: str) -> int:
    """The exit code in a Status of exec.

    Raises:
        PlaceFailed: the container has no such program.
        PlaceUnreachable: the container ended before the command did, or before it began.
    """
    if status.get("status") == "Success":
        return 0
    causes = status.get("details", {}).get("causes", [])
    code = next((int(c["message"]) for c in causes if c.get("reason") == "ExitCode"), None)
    if code is not None and code != _KILLED:
        return code
    why = "its container ended" if code == _KILLED else status.get("message", "no reason given")
    if "executable file not found" in why or "no such file" in why:
        raise PlaceFailed(f"Pod {pod} cannot run a command: {why}")
    raise PlaceUnreachable(f"Pod {pod} could not run a command to its end: {why}")
