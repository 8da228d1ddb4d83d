"""Our messages against those that Triton's client was generated from."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from tritonclient.grpc import service_pb2

from stoker.serving.grpc import inference_pb2, messages

_THEIRS = service_pb2.DESCRIPTOR


def _of(message: Descriptor) -> Iterator[Descriptor]:
    """A message and every one that is in it or in its fields."""
    seen: dict[str, Descriptor] = {}
    waiting = [message]
    while waiting:
        one = waiting.pop()
        if one.full_name not in seen:
            seen[one.full_name] = one
            waiting += [field.message_type for field in one.fields if field.message_type]
    yield from seen.values()


def _look(field: FieldDescriptor) -> tuple[object, ...]:
    """What of a field decides how it is written."""
    return field.number, field.type, field.is_repeated, field.containing_oneof and field.containing_oneof.name


@pytest.mark.parametrize("method", [method.name for method in messages.INFERENCE.methods])
def test_messages_are_written_as_tritons_are(method: str) -> None:
    """Every field of ours is theirs: name, number, type, and which choice it belongs to."""
    ours = messages.INFERENCE.methods_by_name[method]
    theirs = _THEIRS.services_by_name["GRPCInferenceService"].methods_by_name[method]
    assert (ours.client_streaming, ours.server_streaming) == (theirs.client_streaming, theirs.server_streaming)
    for our_side, their_side in ((ours.input_type, theirs.input_type), (ours.output_type, theirs.output_type)):
        known = {message.full_name: message for message in _of(their_side)}
        for message in _of(our_side):
            for field in message.fields:
                assert _look(field) == _look(known[message.full_name].fields_by_name[field.name])
                if field.enum_type:
                    their_enum = known[message.full_name].fields_by_name[field.name].enum_type
                    assert field.enum_type.values_by_name.keys() <= their_enum.values_by_name.keys()
                    for value in field.enum_type.values:
                        assert value.number == their_enum.values_by_name[value.name].number


@pytest.mark.parametrize(
    "name", ["ModelInferRequest", "ModelInferResponse", "InferParameter", "InferTensorContents", "ModelStatistics"]
)
def test_nothing_of_an_inference_is_missing(name: str) -> None:
    """Requests and answers have every field that theirs have; statistics but for memory and decoupled responses."""
    ours = {field.name for field in getattr(inference_pb2, name).DESCRIPTOR.fields}
    theirs = {field.name for field in _THEIRS.message_types_by_name[name].fields}
    assert theirs - ours <= {"memory_usage", "response_stats"}


def test_both_are_in_one_process() -> None:
    """Ours and theirs have the same full names, and each reads what the other wrote."""
    theirs = service_pb2.ModelInferRequest(model_name="m", id="1")
    theirs.parameters["priority"].uint64_param = 2**63
    ours = inference_pb2.ModelInferRequest.FromString(theirs.SerializeToString())
    assert ours.parameters["priority"].uint64_param == 2**63
    assert service_pb2.ModelInferRequest.FromString(ours.SerializeToString()) == theirs


@pytest.mark.parametrize("name", ["inference", "health"])
def test_the_generated_files_belong_to_the_proto_files(name: str, tmp_path: Path) -> None:
    """Generating them again gives the committed files: neither was edited without `make protos`."""
    pytest.importorskip("grpc_tools", reason="grpcio-tools is not installed; `make` installs it")
    folder = Path(messages.__file__).parent
    arguments = ["--proto_path", str(folder), "--python_out", str(tmp_path), str(folder / f"{name}.proto")]
    subprocess.run([sys.executable, "-m", "grpc_tools.protoc", *arguments], check=True)
    generated = (tmp_path / f"{name}_pb2.py").read_text()
    assert "_descriptor_pool.Default()" in generated
    own_pool = generated.replace("_descriptor_pool.Default()", "_descriptor_pool.DescriptorPool()")
    assert (folder / f"{name}_pb2.py").read_text() == own_pool
