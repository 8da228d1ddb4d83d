"""Parser for the subset of proto3 in our .proto files, into protobuf's description of a file.

It knows messages (also nested), enums, `repeated`, `map<string, …>`, `oneof`, and services; no imports, no options.
Anything else raises on import.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    ServiceDescriptorProto,
)

_TOKEN = re.compile(r'//[^\n]*|"[^"]*"|[\w.]+|[{}()<>=;,]')
_SCALARS = {
    name: FieldDescriptorProto.Type.Value(f"TYPE_{name.upper()}")
    for name in ("double", "float", "int64", "uint64", "int32", "uint32", "bool", "string", "bytes")
}
_REPEATED, _SINGLE = FieldDescriptorProto.LABEL_REPEATED, FieldDescriptorProto.LABEL_OPTIONAL


def parse(text: str, name: str) -> FileDescriptorProto:
    """The file's description, named `name`; types are resolved when it is added to a pool.

    >>> parse('package p; message A { repeated bool b = 1; }', 'a.proto').message_type[0].field[0].name
    'b'
    """
    return _Reader(text, name).file


class _Reader:
    """Reads the tokens once; each method reads what its keyword begins."""

    def __init__(self, text: str, name: str) -> None:
        self._tokens: list[str] = [token for token in _TOKEN.findall(text) if not token.startswith("//")]
        self._index = 0
        self.file = FileDescriptorProto(name=name, syntax="proto3")
        while self._index < len(self._tokens):
            match self._next():
                case "syntax":
                    self._expect("=", '"proto3"', ";")
                case "package":
                    self.file.package = self._next()
                    self._expect(";")
                case "message":
                    self._message(self.file.message_type.add())
                case "enum":
                    self._enum(self.file.enum_type.add())
                case "service":
                    self._service(self.file.service.add())
                case other:
                    raise ValueError(f"{name}: {other!r} begins nothing that is known here")

    def _next(self) -> str:
        self._index += 1
        return self._tokens[self._index - 1]

    def _expect(self, *tokens: str) -> None:
        for token in tokens:
            if (actual := self._next()) != token:
                raise ValueError(f"{self.file.name}: expected {token!r}, found {actual!r}")

    def _block(self) -> Iterator[str]:
        """The first token of each statement up to the closing brace."""
        self._expect("{")
        while (token := self._next()) != "}":
            yield token

    def _message(self, message: DescriptorProto) -> None:
        message.name = self._next()
        for token in self._block():
            match token:
                case "message":
                    self._message(message.nested_type.add())
                case "enum":
                    self._enum(message.enum_type.add())
                case "oneof":
                    message.oneof_decl.add(name=self._next())
                    for kind in self._block():
                        self._field(message, kind).oneof_index = len(message.oneof_decl) - 1
                case "map":
                    self._map(message)
                case "repeated":
                    self._field(message, self._next()).label = _REPEATED
                case kind:
                    self._field(message, kind)

    def _field(self, message: DescriptorProto, kind: str) -> FieldDescriptorProto:
        field = message.field.add(name=self._next(), label=_SINGLE)
        if kind in _SCALARS:
            field.type = _SCALARS[kind]
        else:
            field.type_name = kind
        self._expect("=")
        field.number = int(self._next())
        self._expect(";")
        return field

    def _map(self, message: DescriptorProto) -> None:
        """A map is a repeated message of key and value, nested and named for the field."""
        self._expect("<", "string", ",")
        value = self._next()
        self._expect(">")
        name = self._tokens[self._index].title().replace("_", "") + "Entry"
        self._field(message, name).label = _REPEATED
        entry = message.nested_type.add(name=name)
        entry.options.map_entry = True
        entry.field.add(name="key", number=1, label=_SINGLE, type=_SCALARS["string"])
        entry.field.add(name="value", number=2, label=_SINGLE, type_name=value)

    def _enum(self, enum: EnumDescriptorProto) -> None:
        enum.name = self._next()
        for name in self._block():
            self._expect("=")
            enum.value.add(name=name, number=int(self._next()))
            self._expect(";")

    def _service(self, service: ServiceDescriptorProto) -> None:
        service.name = self._next()
        for token in self._block():
            if token != "rpc":  # noqa: S105 - a token of the language
                raise ValueError(f"{self.file.name}: expected 'rpc', found {token!r}")
            method = service.method.add(name=self._next())
            method.input_type, method.client_streaming = self._side()
            self._expect("returns")
            method.output_type, method.server_streaming = self._side()
            self._expect("{", "}")

    def _side(self) -> tuple[str, bool]:
        """The message of a method's request or response, and whether it is a stream."""
        self._expect("(")
        kind = self._next()
        is_stream = kind == "stream"
        if is_stream:
            kind = self._next()
        self._expect(")")
        return kind, is_stream
