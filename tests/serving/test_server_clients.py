"""Clients that others wrote, against the whole server over an exported model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from stoker.testing.tiny_models import tiny_artifact
from tests.serving import clients
from tests.serving.asking import ask, question, running
from tests.serving.clients import Subject

KEY = "a-key-of-many-letters"


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    """A labelled model behind a server with keys on both its sides."""
    folder = tmp_path_factory.mktemp("served")
    artifact = tiny_artifact(folder / "models", name="digits")
    golden = artifact.golden()
    (folder / "keys").write_text(f"tests:{KEY}\n")
    with running(folder / "models", admin_grpc_port=0, api_keys=folder / "keys", admin_keys=folder / "keys") as up:
        assert up.started.grpc is not None
        assert up.started.admin_grpc is not None
        yield Subject(
            http=str(up.started.http).removeprefix("http://"),
            admin=str(up.started.admin).removeprefix("http://"),
            grpc=up.started.grpc,
            grpc_admin=up.started.admin_grpc,
            model="digits",
            inputs=golden.inputs,
            outputs=golden.outputs,
            scores="y",
            labels=artifact.manifest.labels["y"],
            key=KEY,
        )


@pytest.mark.parametrize("scenario", [*clients.OVER_HTTP, clients.triton_http_classes, clients.triton_http_repository])
def test_clients_of_http(subject: Subject, scenario: Callable[[Subject], None]) -> None:
    """`tritonclient.http` and `curl` get from exported models what they ask for."""
    scenario(subject)


@pytest.mark.parametrize("scenario", [*clients.OVER_GRPC, clients.triton_grpc_classes, clients.triton_grpc_repository])
def test_clients_of_grpc(subject: Subject, scenario: Callable[[Subject], None]) -> None:
    """So does `tritonclient.grpc`."""
    scenario(subject)


@pytest.mark.parametrize("scenario", [clients.triton_http_aio, clients.triton_grpc_aio])
def test_clients_in_a_loop(subject: Subject, scenario: Callable[[Subject], Any]) -> None:
    """So do those for asyncio."""
    asyncio.run(scenario(subject))


def test_requests_need_a_key(subject: Subject) -> None:
    """Without a key, or with another, there is no answer; health needs none."""
    url = f"http://{subject.http}/v2/models/digits"
    for headers in ({}, {"X_API_Key": "another-key-of-letters"}, {"Authorization": "Basic abc"}):
        status, answer = ask(f"{url}/infer", question(), **headers)
        assert (status, set(answer)) == (401, {"error"})
    assert ask(f"{url}/infer", question(), X_API_Key=KEY)[0] == 200
    assert ask(f"http://{subject.http}/v2/health/ready")[0] == 200
    assert ask(f"http://{subject.admin}/v2/repository/index", {})[0] == 401
