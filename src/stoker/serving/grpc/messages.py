"""gRPC messages decoded to requests, and encoded from responses.

Their classes are generated from inference.proto and health.proto by protobuf's compiler (`make protos`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Any

import numpy as np
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass
from numpy.typing import NDArray

from stoker.artifacts.dtypes import Arrays, datatype_of, dtype_of, to_raw
from stoker.records import Datatype
from stoker.serving import protocol
from stoker.serving.grpc import health_pb2, inference_pb2
from stoker.serving.protocol import BINARY_ONLY, checked_shape, datatype_named, from_raw
from stoker.serving.refusals import BadRequest, TooLarge
from stoker.serving.service import InferenceRequest, InferenceResponse, Parameter, RequestedOutput
from stoker.units import KIB

INFERENCE = inference_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"]
HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"]


def request_class(method: MethodDescriptor) -> Any:
    """The class of a method's request."""
    return GetMessageClass(method.input_type)


def response_class(method: MethodDescriptor) -> Any:
    """The class of a method's response."""
    return GetMessageClass(method.output_type)


Message = Any
"""An instance of one of the protocol's messages."""

_CONTENTS: dict[Datatype, str] = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}
"""The field of InferTensorContents with a datatype's elements."""


SMALL_BYTES = 64 * KIB
"""Size up to which a message is parsed and decoded at once, whatever is in it."""
MOST_FIELDS = 1000
"""Limit on the fields of a larger message and of its tensors, without typed contents: an empty tensor of two bytes
takes a hundred in memory."""
TYPED_TIMES = 16
"""Memory of typed contents as a multiple of their bytes: a number of one byte takes eight as parsed, and as decoded."""
_AT_ONCE = 16_384

_RAW = inference_pb2.ModelInferRequest.RAW_INPUT_CONTENTS_FIELD_NUMBER
_TENSORS = frozenset(
    {inference_pb2.ModelInferRequest.INPUTS_FIELD_NUMBER, inference_pb2.ModelInferRequest.OUTPUTS_FIELD_NUMBER}
)


def typed_memory(raw: bytes) -> int:
    """Memory for what is parsed and decoded from a message besides its raw contents [bytes]; 0 if that is small.

    Raises:
        TooLarge: it has too many fields to be parsed.
    """
    if len(raw) <= SMALL_BYTES:
        return 0
    fields = list(islice(_fields(raw, 0, len(raw)), MOST_FIELDS + 1))
    inner = chain.from_iterable(_fields(raw, start, end) for number, start, end in fields if number in _TENSORS)
    if len(fields) + sum(1 for _ in islice(inner, MOST_FIELDS)) > MOST_FIELDS:
        raise TooLarge(
            f"the message has more than {MOST_FIELDS:,} fields in itself and its tensors; send fewer inputs, outputs "
            "and parameters"
        )
    other = len(raw) - sum(end - start for number, start, end in fields if number == _RAW)
    return TYPED_TIMES * other if other > SMALL_BYTES else 0


def _fields(raw: bytes, start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Number, start and end of each field of a message; ends where it is malformed, which parsing finds."""
    sizes = {1: 8, 3: 0, 4: 0, 5: 4}  # by wire type; groups are unknown fields, and so are those in them
    while start < end:
        tag, start = _varint(raw, start)
        kind = tag & 7
        if kind == 0:
            size = _varint(raw, start)[1] - start
        elif kind == 2:
            size, start = _varint(raw, start)
        elif kind in sizes:
            size = sizes[kind]
        else:
            return
        yield tag >> 3, start, min(start + size, end)
        start += size


def _varint(raw: bytes, start: int) -> tuple[int, int]:
    """A number of variable length, and its end; the end of all bytes if it is malformed."""
    number = 0
    for index, byte in enumerate(raw[start : start + 10]):
        number |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return number, start + index + 1
    return number, len(raw)


Parse = Callable[[bytes], Any]
"""Parses a message from its bytes."""


def parsed(raw: bytes, parse: Parse) -> Message:
    """The message in these bytes.

    Raises:
        BadRequest: they are not that message.
    """
    try:
        return parse(raw)
    except DecodeError as error:
        raise BadRequest(f"the message is not the method's: {error}") from error


def decode(asked: Message, *, caller: str = "", time_left_s: float | None = None) -> InferenceRequest:
    """The request in a ModelInferRequest; raw inputs are views of its bytes.

    The deadline is the earlier of the parameter `timeout` and gRPC's own (`time_left_s`).

    Raises:
        BadRequest: it is malformed; whether it fits the model is not checked here.
        Unsupported: it needs shared memory or sequences.
    """
    parameters = parameters_of(asked.parameters)
    deadline_s, priority = protocol.urgency(parameters)
    if time_left_s is not None:
        deadline_s = max(0.0, time_left_s if deadline_s is None else min(deadline_s, time_left_s))
    raw = asked.raw_input_contents
    return InferenceRequest(
        model=asked.model_name,
        version=asked.model_version,
        id=asked.id,
        inputs=_inputs(asked.inputs, list(raw)),
        outputs=_outputs(asked.outputs),
        deadline_s=deadline_s,
        priority=priority,
        caller=caller,
        num_bytes=sum(map(len, raw)) if raw else asked.ByteSize(),
        parameters=parameters,
    )


def encode(response: InferenceResponse) -> Message:
    """A ModelInferResponse with raw contents."""
    answer = inference_pb2.ModelInferResponse(model_name=response.model, model_version=response.version, id=response.id)
    for name, array in response.outputs.items():
        answer.outputs.add(name=name, datatype=datatype_of(array.dtype), shape=array.shape)
        answer.raw_output_contents.append(bytes(to_raw(array)))
    return answer


def parameters_of(given: Any) -> dict[str, Parameter]:
    """Values of a map of InferParameter, without unset ones."""
    if not given:
        return {}
    chosen = {name: value.WhichOneof("parameter_choice") for name, value in given.items()}
    return {name: getattr(given[name], choice) for name, choice in chosen.items() if choice}


def _inputs(described: Any, raw: list[bytes]) -> Arrays:
    """Inputs by name, from the raw contents if there are any, else from each input's own."""
    if raw and len(raw) != len(described):
        raise BadRequest(f"the request has {len(described)} inputs and raw contents of {len(raw)}")
    arrays: Arrays = {}
    for index, given in enumerate(described):
        tensor = f"input {given.name!r}"
        if given.name in arrays:
            raise BadRequest(f"{tensor} is given twice")
        if given.parameters:
            protocol.refuse_shared_memory(parameters_of(given.parameters), tensor)
        datatype, shape = datatype_named(given.datatype, tensor), checked_shape(given.shape, tensor)
        if not raw:
            arrays[given.name] = _typed(given.contents, datatype, shape, tensor)
            continue
        if given.HasField("contents"):
            raise BadRequest(f"{tensor} has contents besides the raw ones; one of them has to go")
        arrays[given.name] = from_raw(raw[index], datatype, shape, tensor)
    return arrays


def _typed(contents: Any, datatype: Datatype, shape: tuple[int, ...], tensor: str) -> NDArray[Any]:
    """A tensor from the field of its datatype."""
    if datatype in BINARY_ONLY:
        raise BadRequest(f"{tensor} is {datatype}, for which there is no typed field; send raw_input_contents")
    field = _CONTENTS[datatype]
    filled = [descriptor.name for descriptor, _ in contents.ListFields()]
    elements = math.prod(shape)
    values = getattr(contents, field)
    if len(values) != elements or any(name != field for name in filled):
        filled_fields = ", ".join(f"{len(getattr(contents, name))} in {name}" for name in filled) or "none"
        raise BadRequest(f"{tensor} is {datatype} {list(shape)}, {elements} values in {field}; found {filled_fields}")
    array = np.empty(elements, dtype_of(datatype))
    try:
        for start in range(0, elements, _AT_ONCE):  # in between other threads run
            array[start : start + _AT_ONCE] = np.array(values[start : start + _AT_ONCE], array.dtype)
    except OverflowError as error:
        raise BadRequest(f"{tensor} is {datatype} and has a value that does not fit: {error}") from error
    return array.reshape(shape)


def _outputs(described: Any) -> tuple[RequestedOutput, ...]:
    outputs: dict[str, RequestedOutput] = {}
    for given in described:
        where = f"output {given.name!r}"
        if given.name in outputs:
            raise BadRequest(f"{where} is asked for twice")
        own = parameters_of(given.parameters)
        protocol.refuse_shared_memory(own, where)
        num_classes = protocol.whole_parameter(own, "classification", where)
        outputs[given.name] = RequestedOutput(name=given.name, classification=num_classes)
    return tuple(outputs.values())
