"""The messages of the protocol as classes, made from our .proto files when this is imported.

They live in a pool of their own, so that a client's generated messages of the same names can be in the same process.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

from stoker.serving.grpc.proto_file import parse

_POOL = DescriptorPool()


def _service(file: str, name: str) -> ServiceDescriptor:
    text = files(__package__).joinpath(file).read_text(encoding="utf-8")
    _POOL.Add(parse(text, f"stoker/{file}"))
    return _POOL.FindServiceByName(name)


INFERENCE = _service("inference.proto", "inference.GRPCInferenceService")
HEALTH = _service("health.proto", "grpc.health.v1.Health")


def message(name: str) -> Any:
    """The class of one of the protocol's messages: `message("ModelInferRequest")`."""
    return GetMessageClass(_POOL.FindMessageTypeByName(f"inference.{name}"))


def taken(method: MethodDescriptor) -> Any:
    """The class of what a method takes."""
    return GetMessageClass(method.input_type)


def given(method: MethodDescriptor) -> Any:
    """The class of what a method gives."""
    return GetMessageClass(method.output_type)
