"""One call of gRPC: its caller, its deadline, its refusal, its line in the log."""

from __future__ import annotations

import logging
import math

import grpc
from grpc.aio import ServicerContext

from stoker.errors import StokerError
from stoker.serving.edge import Access, Edge
from stoker.serving.grpc.answering import WITHOUT_KEY
from stoker.serving.problems import Failed, Refusal

_logger = logging.getLogger(__name__)


def caller_of(edge: Edge, method: str, context: ServicerContext) -> str:
    """The caller's name; empty where no key is needed.

    Raises:
        Unauthorized: its metadata has no key, or an unknown one.
    """
    if edge.authorize is None or method in WITHOUT_KEY:
        return ""
    metadata = context.invocation_metadata() or ()
    return edge.authorize({name: value for name, value in metadata if isinstance(value, str)})


def as_refusal(error: BaseException, method: str) -> Refusal:
    """What to say of an error; one that nobody foresaw goes to the program's log and not to the caller."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, StokerError):
        return Failed(str(error))
    _logger.error("%s failed", method, exc_info=error)
    return Failed("the server failed in answering this; its log says how")


async def abort(context: ServicerContext, refused: Refusal) -> None:
    """End the call with the refusal's status; when to try again is in the trailing metadata `retry-after` [s]."""
    trailing: tuple[tuple[str, str], ...] = ()
    if refused.retry_after_s is not None:
        trailing = (("retry-after", str(max(1, math.ceil(refused.retry_after_s)))),)
    await context.abort(grpc.StatusCode[refused.grpc_status], str(refused), trailing)


class Entry:
    """A line of the log that is being gathered, from the start of a request to its end."""

    def __init__(self, edge: Edge, method: str) -> None:
        self._edge = edge
        self._method = method
        self._started = edge.clock()
        self.model = self.version = self.id = self.caller = ""
        self.bytes_in = 0

    def done(self, *, bytes_out: int = 0, refused: Refusal | None = None, status: str = "OK") -> None:
        """Write it: what was answered, or why not."""
        if self._edge.log is None:
            return
        self._edge.log(
            Access(
                protocol="grpc",
                method=self._method,
                path=f"/inference.GRPCInferenceService/{self._method}",
                model=self.model,
                version=self.version,
                status=status if refused is None else refused.grpc_status,
                bytes_in=self.bytes_in,
                bytes_out=bytes_out,
                seconds=self._edge.clock() - self._started,
                caller=self.caller,
                id=self.id,
                reason="" if refused is None else refused.reason,
                error="" if refused is None else str(refused),
            )
        )
