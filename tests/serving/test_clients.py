"""Clients that others wrote, against both edges over a fake service."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from stoker.serving.service import ServerContext
from tests.serving import clients
from tests.serving.clients import Subject
from tests.serving.fakes import DIGITS, FakeService, scores_of
from tests.serving.running import running


@pytest.fixture(scope="module")
def digits() -> Iterator[Subject]:
    """`digits`, with the admin's calls on the same port."""
    image = np.random.default_rng(0).standard_normal((2, 8, 8), np.float32)
    with running(ServerContext(service=FakeService(), is_admin=True)) as where:
        yield Subject(
            http=where.http,
            grpc=where.grpc,
            admin=where.http,
            grpc_admin=where.grpc,
            model="digits",
            inputs={"image": image},
            outputs={"scores": scores_of(image)},
            scores="scores",
            labels=DIGITS.labels["scores"],
        )


@pytest.mark.parametrize("scenario", [*clients.OVER_HTTP, clients.triton_http_classes, clients.triton_http_repository])
def test_over_http(digits: Subject, scenario: Callable[[Subject], None]) -> None:
    """Clients of HTTP get what they ask for."""
    scenario(digits)


@pytest.mark.parametrize("scenario", [*clients.OVER_GRPC, clients.triton_grpc_classes, clients.triton_grpc_repository])
def test_over_grpc(digits: Subject, scenario: Callable[[Subject], None]) -> None:
    """Clients of gRPC get what they ask for."""
    scenario(digits)


@pytest.mark.parametrize("scenario", [clients.triton_http_aio, clients.triton_grpc_aio])
def test_with_asyncio(digits: Subject, scenario: Callable[[Subject], object]) -> None:
    """So do those that run in a loop of their own."""
    asyncio.run(scenario(digits))


@pytest.mark.skipif("STOKER_KSERVE_PYTHON" not in os.environ, reason="STOKER_KSERVE_PYTHON names no Python with kserve")
def test_kserves_clients(digits: Subject) -> None:
    """KServe's REST and gRPC clients, in an environment of their own, get what they ask for."""
    told = clients.kserve(digits, os.environ["STOKER_KSERVE_PYTHON"])
    assert "infer binary" in told["rest"]
    assert "infer raw" in told["grpc"]
