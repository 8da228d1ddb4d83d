from __future__ import annotations

import pytest

from stoker.serving.grpc.proto_file import parse

TEXT = """
// A file.
syntax = "proto3";
package p.q;
service S { rpc Do(stream A) returns (A.B) {} }
message A {
  message B { repeated int64 shape = 2; }
  enum Kind { NONE = 0; SOME = 3; }
  map<string, B> named_parts = 1;
  oneof choice { bool yes = 4; Kind kind = 5; }
  B plain = 6;
}
"""


def test_every_construct_is_read() -> None:
    """Messages in messages, enums, repeated fields, maps, choices and streams, with their numbers."""
    file = parse(TEXT, "a.proto")
    (message,) = file.message_type
    (method,) = file.service[0].method
    assert (file.package, file.syntax) == ("p.q", "proto3")
    assert [(field.name, field.number) for field in message.field] == [
        ("named_parts", 1), ("yes", 4), ("kind", 5), ("plain", 6),
    ]  # fmt: skip
    assert [field.HasField("oneof_index") for field in message.field] == [False, True, True, False]
    assert [nested.name for nested in message.nested_type] == ["B", "NamedPartsEntry"]
    assert message.nested_type[1].options.map_entry
    assert [(value.name, value.number) for value in message.enum_type[0].value] == [("NONE", 0), ("SOME", 3)]
    assert (method.client_streaming, method.server_streaming) == (True, False)
    assert (method.input_type, method.output_type) == ("A", "A.B")


@pytest.mark.parametrize(
    "text", ['syntax = "proto2";', "import other;", "service S { option x = 1; }", "message A { string b 1; }"]
)
def test_what_is_not_known_is_an_error(text: str) -> None:
    """A file in another part of the language would otherwise be read as something else."""
    with pytest.raises(ValueError, match=r"a\.proto"):
        parse(text, "a.proto")
