"""The source code of the interpreter's own standard library, as bytes: real text on every machine, without a network.

The text is all .py files of the library in the order of their paths, without tests, installed packages, files generated
when Python is built (they differ between machines), and links. Sample i is bytes [i*T, (i+1)*T) of its part, and its
target the same a byte later; the last 10 % of the bytes are for testing. The text, and therefore the fingerprint,
depends on the Python version. Shapes: B samples, T bytes of context.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, final

from stoker.data.arrays import ArraySource, Field, SplitName, digest_of
from stoker.errors import BadJob

if TYPE_CHECKING:
    import torch

    from stoker.data.arrays import Arrays

_LEFT_OUT = {"__pycache__", "dist-packages", "idle_test", "lib-dynload", "site-packages", "test", "tests"}
_GENERATED = ("_sysconfigdata", "config-")


@dataclass(frozen=True)
class SourceFile:
    """A file of the text: its path below the library's folder, with slashes, and its size [bytes]."""

    path: str
    num_bytes: int


class Corpus:
    """The library's text: files and length are found without reading them, `text` is read on first use.

    Not checked: that a file that kept its size has also kept its content.
    """

    def __init__(self, root: Path, limit_bytes: int | None = None) -> None:
        self.root = root
        self.limit_bytes = limit_bytes

    @cached_property
    def files(self) -> tuple[SourceFile, ...]:
        """The readable files, in order.

        Raises:
            BadJob: there are none, as in an interpreter that keeps its library in an archive.
        """
        files = tuple(sorted(_files_below(self.root), key=lambda file: file.path))
        if not files:
            raise BadJob(
                f"there are no .py files in {self.root}, where this Python's standard library should be",
                remedy="Use a Python that comes with its library as source, or another data source.",
            )
        return files

    @cached_property
    def num_bytes(self) -> int:
        """Length of the text, up to the limit [bytes]."""
        whole = sum(file.num_bytes for file in self.files)
        return whole if self.limit_bytes is None else min(whole, self.limit_bytes)

    @cached_property
    def text(self) -> torch.Tensor:
        """The text: uint8 [num_bytes].

        Raises:
            BadJob: a file cannot be read, or is no longer of the size it had.
        """
        import torch

        text = bytearray()
        for file in self.files:
            if len(text) >= self.num_bytes:
                break
            path = self.root / file.path
            try:
                content = path.read_bytes()
            except OSError as problem:
                raise BadJob(
                    f"{path} cannot be read: {problem.strerror}", remedy="Run the same command again."
                ) from problem
            if len(content) != file.num_bytes:
                raise BadJob(
                    f"{path} had {file.num_bytes:,} bytes a moment ago and has {len(content):,} now",
                    remedy="Run the same command again once nothing changes this Python.",
                )
            text += content
        return torch.frombuffer(text, dtype=torch.uint8)[: self.num_bytes]


@final
class PythonSource(ArraySource):
    """One part of the text in windows: bytes and next_bytes, uint8 [T], views of one text (prepared: int64)."""

    def __init__(self, part: SplitName, corpus: Corpus, context: int) -> None:
        fields = (Field("bytes", (context,), "uint8"), Field("next_bytes", (context,), "uint8"))
        super().__init__(f"python_source/{part}", fields, num_classes=256)
        self._part: SplitName = part
        self._corpus = corpus
        self._context = context

    def __len__(self) -> int:
        """Number of whole windows in this part.

        Raises:
            BadJob: there is not one.
        """
        start, stop = self._bounds()
        length = max(0, stop - start - 1) // self._context
        if length == 0:
            raise BadJob(
                f"{self.name} has {stop - start:,} bytes; one window and the byte after it take {self._context + 1:,}",
                remedy="Give a smaller context, or a larger limit_bytes.",
            )
        return length

    @property
    def fingerprint(self) -> str:
        """Digest of the interpreter's version, the files' paths and sizes, the part and its windows."""
        interpreter = f"{platform.python_implementation()} {platform.python_version()}"
        files = (f"{file.path} {file.num_bytes}" for file in self._corpus.files)
        return digest_of(self.name, self._context, self._corpus.num_bytes, interpreter, *files)

    def prepare(self, batch: Arrays) -> Arrays:
        """Bytes as int64, the dtype that embeddings and losses take."""
        return tuple(x_BT.long() for x_BT in batch)

    def _load(self) -> Arrays:
        start, _ = self._bounds()
        num_bytes = len(self) * self._context
        text = self._corpus.text
        inputs, targets = text[start : start + num_bytes], text[start + 1 : start + 1 + num_bytes]
        return inputs.view(-1, self._context), targets.view(-1, self._context)

    def _bounds(self) -> tuple[int, int]:
        """First byte of the part, and the byte after its last."""
        num_bytes = self._corpus.num_bytes
        cut = num_bytes * 9 // 10
        return (0, cut) if self._part == "train" else (cut, num_bytes)


def python_source(context: int = 256, limit_bytes: int | None = None) -> tuple[PythonSource, PythonSource]:
    """The training and test part of the standard library's source code, in windows of `context` bytes.

    Constructing them reads nothing; their length and fingerprint need the files' sizes, their samples the files.

    Args:
        context: bytes in a window, T.
        limit_bytes: use only so many bytes from the start of the text; all if None (about 12 MB in Python 3.11).

    Returns:
        Samples (bytes, next_bytes), both uint8 [T], prepared int64 [T]; windows tile the text and do not overlap.

    Raises:
        BadJob: `context` or `limit_bytes` is not positive.
    """
    for name, value in (("context", context), ("limit_bytes", limit_bytes)):
        if value is not None and value < 1:
            raise BadJob(f"python_source takes {name} >= 1, got {value}", remedy=f"Give a positive {name} [bytes].")
    corpus = Corpus(Path(os.__file__).parent, limit_bytes)  # where os is, the library is
    return PythonSource("train", corpus, context), PythonSource("test", corpus, context)


def _files_below(root: Path) -> Iterator[SourceFile]:
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _LEFT_OUT and not name.startswith(_GENERATED)]
        for name in names:
            path = Path(folder) / name
            if not name.endswith(".py") or name.startswith(_GENERATED) or path.is_symlink():
                continue
            try:
                num_bytes = path.stat().st_size
            except OSError:  # gone since it was listed
                continue
            if os.access(path, os.R_OK):
                yield SourceFile(path.relative_to(root).as_posix(), num_bytes)
