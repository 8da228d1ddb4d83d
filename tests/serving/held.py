"""Both edges in a process of their own, whose resident memory a test can look at; ends with its standard input."""

from __future__ import annotations

import sys

from stoker.serving.refusals import Unauthorized
from stoker.serving.service import InferenceRequest, InFlight, RequestLimits, ServerContext
from tests.serving.fakes import FakeService
from tests.serving.running import running

MIB = 2**20
BODY_BYTES, BUDGET_BYTES = 4 * MIB, 16 * MIB


def authorize(headers: object) -> str:
    """No key is known, where one is sent."""
    if isinstance(headers, dict) and "x-api-key" in headers:
        raise Unauthorized("the API key is not known to this server")
    return ""


class Forgets(list[InferenceRequest]):
    """Requests that are not kept."""

    def append(self, _request: InferenceRequest) -> None:
        """Forget it."""


def main() -> None:
    """Serve."""
    limits = RequestLimits(body_bytes=BODY_BYTES, body_s=20.0, connections=200, connections_of_peer=150)
    edge = ServerContext(
        service=FakeService(requests=Forgets()), limits=limits, in_flight=InFlight(BUDGET_BYTES), authorize=authorize
    )
    with running(edge) as where:
        print(where.http, where.grpc, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
