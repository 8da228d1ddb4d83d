"""The message `tf.train.Example`, without TensorFlow. Imports protobuf: import it when the first record is read.

The message has a package name of our own, because TensorFlow, if loaded too, registers its own. Source of field
numbers and types: tensorflow/core/example/feature.proto and example.proto.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

_Field = descriptor_pb2.FieldDescriptorProto
_PACKAGE = "stoker.tfrecord"


def features_of(content: bytes) -> Mapping[str, Any]:
    """The features of an encoded Example by name.

    Raises:
        ValueError: the bytes are not an Example.
    """
    try:
        example = _Example.FromString(content)
    except DecodeError as error:
        raise ValueError(f"it is no tf.train.Example: {error}") from error
    found: Mapping[str, Any] = example.features.feature
    return found


def encoded(features: Mapping[str, list[int] | list[float] | list[bytes]]) -> bytes:
    """An encoded Example with these features: lists of integers, floats, or bytes."""
    example = _Example()
    for name, values in features.items():
        kinds: dict[type, str] = {int: "int64_list", float: "float_list", bytes: "bytes_list"}
        getattr(example.features.feature[name], kinds[type(values[0])]).value.extend(values)
    content: bytes = example.SerializeToString(deterministic=True)
    return content


def _described() -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto(name="stoker/tfrecord.proto", package=_PACKAGE, syntax="proto3")
    lists = (("BytesList", _Field.TYPE_BYTES), ("FloatList", _Field.TYPE_FLOAT), ("Int64List", _Field.TYPE_INT64))
    for name, kind in lists:
        file.message_type.add(name=name).field.add(name="value", number=1, type=kind, label=_Field.LABEL_REPEATED)
    feature = file.message_type.add(name="Feature")
    feature.oneof_decl.add(name="kind")
    kinds = zip(("bytes_list", "float_list", "int64_list"), lists, strict=True)
    for number, (name, (message, _)) in enumerate(kinds, 1):
        feature.field.add(name=name, number=number, type=_Field.TYPE_MESSAGE, label=_Field.LABEL_OPTIONAL,
                          type_name=f".{_PACKAGE}.{message}", oneof_index=0)  # fmt: skip
    features = file.message_type.add(name="Features")
    entry = features.nested_type.add(name="FeatureEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, type=_Field.TYPE_STRING, label=_Field.LABEL_OPTIONAL)
    entry.field.add(name="value", number=2, type=_Field.TYPE_MESSAGE, label=_Field.LABEL_OPTIONAL,
                    type_name=f".{_PACKAGE}.Feature")  # fmt: skip
    features.field.add(name="feature", number=1, type=_Field.TYPE_MESSAGE, label=_Field.LABEL_REPEATED,
                       type_name=f".{_PACKAGE}.Features.FeatureEntry")  # fmt: skip
    file.message_type.add(name="Example").field.add(
        name="features", number=1, type=_Field.TYPE_MESSAGE, label=_Field.LABEL_OPTIONAL,
        type_name=f".{_PACKAGE}.Features",
    )  # fmt: skip
    return file


_pool = descriptor_pool.DescriptorPool()
_pool.Add(_described())
_Example: Any = message_factory.GetMessageClass(_pool.FindMessageTypeByName(f"{_PACKAGE}.Example"))
