"""TFRecord files of `tf.train.Example`, read at random without TensorFlow.

A record is its length (8 bytes), a checksum of the length, the content, and a checksum of the content. An index of
offsets is made once, which verifies the lengths; the content's checksum is verified whenever a record is read.
Source: https://www.tensorflow.org/tutorials/load_data/tfrecord, "TFRecords format details".
"""

from __future__ import annotations

import functools
import os
import struct
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, final

import numpy as np

from stoker.data.files.image_files import ImageForm, image_form
from stoker.data.files.sample_files import (
    Arrays,
    Clean,
    OpenFiles,
    Paths,
    indexed,
    left_out_of_files,
    require_known,
    shard_paths,
)
from stoker.data.files.source import IndexedSource, Labels, class_names, digest_of_parts, needs, require_choice
from stoker.errors import BadJob, nearest
from stoker.jobs.fields import TARGETS

_HEADER, _CHECKSUM = 12, 4
_MASK_DELTA = 0xA282EAD8

KINDS = ("image", "int64", "float32", "text", "bytes")
Kind = str | tuple[str, Sequence[int]]


@final
class TFRecord(IndexedSource):
    """Examples as dicts with the entries `features`."""

    reads_labels = True

    def __init__(
        self,
        paths: tuple[Path, ...],
        features: dict[str, tuple[str, tuple[int, ...]]],
        form: ImageForm,
        target: str | None,
        classes: tuple[str, ...],
        clean: Clean,
    ) -> None:
        name = paths[0].name if len(paths) == 1 else f"{paths[0].name} to {paths[-1].name}"
        super().__init__(name, classes=classes, target=target)
        self.paths = paths
        self.features = features
        self.form = form
        self._clean = clean
        self._files = OpenFiles(paths)

    @cached_property
    def _places(self) -> Arrays:
        """The shard, number, offset, length and stored checksum of every record [N]."""
        shards = [indexed(path, "tfrecord", records_of) for path in self.paths]
        counts = [len(shard["offset"]) for shard in shards]
        places = {name: np.concatenate([shard[name] for shard in shards]) for name in ("offset", "length", "checksum")}
        places["shard"] = np.repeat(np.arange(len(shards)), counts)
        places["number"] = np.concatenate([np.arange(count) for count in counts])
        dropped = left_out_of_files(self._clean, self.paths)
        if any(dropped):
            keep = np.array(
                [
                    str(number) not in dropped[shard]
                    for shard, number in zip(places["shard"].tolist(), places["number"].tolist(), strict=True)
                ],
                bool,
            )
            require_known(frozenset().union(*dropped), int((~keep).sum()), self.name)
            places = {name: array[keep] for name, array in places.items()}
        if not len(places["offset"]):
            raise BadJob(f"{self.paths[0]} has no records", remedy="Give files with at least one.")
        return places

    def __len__(self) -> int:
        """Number of records."""
        return len(self._places["offset"])

    @cached_property
    def fingerprint(self) -> str:
        """Digest of the records' lengths and stored checksums, and of how they are read."""
        content = [self._places[name].tobytes() for name in ("shard", "number", "length", "checksum")]
        digest = digest_of_parts(*content, repr(self.features), repr(self.form), self.classes)
        return f"{digest} (of the checksums of {len(self):,} records)"

    def sample(self, index: int) -> dict[str, Any]:
        """Record `index` with the requested features."""
        return self._read(index, self.features)

    def _read(self, index: int, features: Mapping[str, tuple[str, tuple[int, ...]]]) -> dict[str, Any]:
        places = {name: int(values[index]) for name, values in self._places.items()}
        try:
            content = self._files.read(places["shard"], places["offset"], places["length"])
            if masked_crc(content) != places["checksum"]:
                raise ValueError("its content does not have its checksum: it is damaged")
            with needs("protobuf"):
                stored = features_of(content)
            return {name: self._entry(stored, name, *kind) for name, kind in features.items()}
        except (OSError, ValueError) as error:
            raise BadJob(
                f"record {places['number']} of {self.paths[places['shard']]} cannot be read: {error}",
                remedy="Put a whole file in its place, and the same command goes on; or leave the record out with "
                "clean=…, which makes it another job.",
            ) from error

    def sample_id(self, index: int) -> str:
        """The file, and the record in it, from 0."""
        return f"{self.paths[int(self._places['shard'][index])].name}:{int(self._places['number'][index])}"

    @cached_property
    def _labels(self) -> Labels | None:
        """The target of every record, if it is one whole number; reads all records."""
        if self.target is None or self.features[str(self.target)] != ("int64", ()):
            return None
        name = str(self.target)
        only = {name: self.features[name]}
        return np.array([int(self._read(index, only)[name]) for index in range(len(self))], np.int64)

    def prepare(self, batch: Any) -> Any:
        """Images as the form says, the rest as it is."""
        return {
            name: self.form.prepare(entry) if self.features[name][0] == "image" else entry
            for name, entry in batch.items()
        }

    def _entry(self, stored: Mapping[str, Any], name: str, kind: str, shape: tuple[int, ...]) -> Any:
        import torch

        if name not in stored:
            raise ValueError(f"it has no feature {name!r}. {nearest(name, stored)}")
        stored_list = stored[name].WhichOneof("kind")
        expected = {"int64": "int64_list", "float32": "float_list"}.get(kind, "bytes_list")
        if stored_list != expected:
            raise ValueError(f"its feature {name!r} is a {stored_list or 'nothing'}, {kind!r} needs a {expected}")
        values = getattr(stored[name], stored_list).value
        if expected == "bytes_list":
            if len(values) != 1:
                raise ValueError(f"its feature {name!r} has {len(values)} values, {kind!r} is one")
            if kind == "image":
                return torch.from_numpy(self.form.decoded(values[0]))
            return values[0].decode() if kind == "text" else values[0]
        array = np.array(values, kind)
        if array.size != int(np.prod(shape)):
            raise ValueError(f"its feature {name!r} has {array.size} values, wanted the shape {list(shape)}")
        return torch.from_numpy(array.reshape(shape))


def tfrecord(  # noqa: PLR0913 - what can be said of records with images
    paths: Paths,
    features: Mapping[str, Kind],
    *,
    target: str | None = None,
    size: int | tuple[int, int] | None = None,
    channels: int = 3,
    resize: str = "stretch",
    mean: float | Sequence[float] | None = None,
    std: float | Sequence[float] | None = None,
    classes: Sequence[str] = (),
    clean: Clean = None,
) -> TFRecord:
    """The records of TFRecord files, in file order.

    Args:
        paths: `train-{00000..00127}-of-00128`, with `*`, or a list; not compressed.
        features: the kind of each by name: "image" (encoded), "int64", "float32", "text" or "bytes"; numbers with a
            shape are ("float32", (28, 28)).
        target: the feature that is the label, if it is called none of target, label, labels, y; name it to the Job too.
        size: of images, (height, width), or one number for both; without it all must have one size.
        channels: of images: 1, 3 or 4.
        resize: "stretch", "crop" or "pad".
        mean: subtracted from pixels from 0 to 1, for all channels or each; default 0.
        std: divisor after that; default 1.
        classes: names of the label's values, for reports.
        clean: a clean list of samples to leave out, as FILE:NUMBER.

    Raises:
        BadJob: a file is missing, compressed, cut off or damaged, or a feature is of an unknown kind.
    """
    form = image_form(size, channels, resize, mean, std)
    kinds = {name: _kind(name, given) for name, given in features.items()}
    if not kinds:
        raise BadJob("features={} leaves nothing of a record", remedy='As in features={"image": "image", ...}.')
    if target is not None and target not in kinds:
        raise BadJob(f"the target {target!r} is not among the features. {nearest(target, kinds)}")
    chosen = target or next((name for name in TARGETS if name in kinds), None)
    return TFRecord(shard_paths(paths), kinds, form, chosen, class_names(classes), clean)


def records_of(path: Path) -> Arrays:
    """Offset and length of every record's content [bytes], and the checksum stored after it: [N] each.

    Raises:
        BadJob: the file is cut off, or a length's checksum is wrong.
    """
    num_bytes = path.stat().st_size
    offsets: list[int] = []
    lengths: list[int] = []
    checksums: list[int] = []
    at = 0
    with path.open("rb", buffering=0) as file:
        while at < num_bytes:
            header = os.pread(file.fileno(), _HEADER, at)
            length = -1
            if len(header) == _HEADER:
                stated, checksum = struct.unpack("<QI", header)
                length = stated if masked_crc(header[:8]) == checksum else -1
            end = at + _HEADER + length
            if length < 0 or end + _CHECKSUM > num_bytes:
                what = "does not have its checksum" if length < 0 else f"ends after the file, of {num_bytes:,} bytes"
                raise BadJob(
                    f"record {len(offsets):,} of {path}, at byte {at:,}, {what}",
                    remedy="It is no TFRecord file, or damaged or cut off: fetch it again.",
                )
            offsets.append(at + _HEADER)
            lengths.append(length)
            checksums.append(struct.unpack("<I", os.pread(file.fileno(), _CHECKSUM, end))[0])
            at = end + _CHECKSUM
    return {
        "offset": np.array(offsets, np.int64),
        "length": np.array(lengths, np.int64),
        "checksum": np.array(checksums, np.int64),
    }


def masked_crc(content: bytes) -> int:
    """TFRecord's checksum [32 bits]: CRC-32C, rotated and offset, so that a CRC of data with CRCs stays strong."""
    with needs("google-crc32c"):
        import google_crc32c
    crc: int = google_crc32c.value(content)
    return (((crc >> 15) | (crc << 17)) + _MASK_DELTA) & 0xFFFFFFFF


def _kind(name: str, given: Kind) -> tuple[str, tuple[int, ...]]:
    kind, shape = (given, ()) if isinstance(given, str) else given
    require_choice(f"the kind of feature {name!r}", kind, KINDS)
    if shape and kind not in ("int64", "float32"):
        raise BadJob(f"feature {name!r} of kind {kind!r} has no shape of its own", remedy=f"Give {name!r}: {kind!r}.")
    return kind, tuple(shape)


def features_of(content: bytes) -> Mapping[str, Any]:
    """The features of an encoded Example by name.

    Raises:
        ValueError: the bytes are not an Example.
    """
    from google.protobuf.message import DecodeError

    try:
        example = _example_type().FromString(content)
    except DecodeError as error:
        raise ValueError(f"it is no tf.train.Example: {error}") from error
    features: Mapping[str, Any] = example.features.feature
    return features


def encoded(features: Mapping[str, list[int] | list[float] | list[bytes]]) -> bytes:
    """An encoded Example with these features: lists of integers, floats, or bytes."""
    example = _example_type()()
    for name, values in features.items():
        kinds: dict[type, str] = {int: "int64_list", float: "float_list", bytes: "bytes_list"}
        getattr(example.features.feature[name], kinds[type(values[0])]).value.extend(values)
    content: bytes = example.SerializeToString(deterministic=True)
    return content


@functools.cache
def _example_type() -> Any:
    """The message `tf.train.Example`, without TensorFlow.

    It has a package name of our own, because TensorFlow, if loaded too, registers its own. Source of field numbers and
    types: tensorflow/core/example/feature.proto and example.proto.
    """
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    field, package = descriptor_pb2.FieldDescriptorProto, "stoker.tfrecord"
    file = descriptor_pb2.FileDescriptorProto(name="stoker/tfrecord.proto", package=package, syntax="proto3")
    lists = (("BytesList", field.TYPE_BYTES), ("FloatList", field.TYPE_FLOAT), ("Int64List", field.TYPE_INT64))
    for name, kind in lists:
        file.message_type.add(name=name).field.add(name="value", number=1, type=kind, label=field.LABEL_REPEATED)
    feature = file.message_type.add(name="Feature")
    feature.oneof_decl.add(name="kind")
    kinds = zip(("bytes_list", "float_list", "int64_list"), lists, strict=True)
    for number, (name, (message, _)) in enumerate(kinds, 1):
        feature.field.add(
            name=name,
            number=number,
            type=field.TYPE_MESSAGE,
            label=field.LABEL_OPTIONAL,
            type_name=f".{package}.{message}",
            oneof_index=0,
        )
    features = file.message_type.add(name="Features")
    entry = features.nested_type.add(name="FeatureEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, type=field.TYPE_STRING, label=field.LABEL_OPTIONAL)
    entry.field.add(
        name="value", number=2, type=field.TYPE_MESSAGE, label=field.LABEL_OPTIONAL, type_name=f".{package}.Feature"
    )
    features.field.add(
        name="feature",
        number=1,
        type=field.TYPE_MESSAGE,
        label=field.LABEL_REPEATED,
        type_name=f".{package}.Features.FeatureEntry",
    )
    file.message_type.add(name="Example").field.add(
        name="features", number=1, type=field.TYPE_MESSAGE, label=field.LABEL_OPTIONAL, type_name=f".{package}.Features"
    )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{package}.Example"))
