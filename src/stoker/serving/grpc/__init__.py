"""The protocol over gRPC: Triton's superset of it, and gRPC's health check."""

from stoker.serving.grpc.server import server

__all__ = ["server"]
