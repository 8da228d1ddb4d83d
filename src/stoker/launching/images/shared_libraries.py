"""The system's shared libraries that programs need, found as the dynamic loader finds them: for an image without base.

What: the names that ELF files ask for (`DT_NEEDED`), looked for in their own run paths and in the loader's folders, and
so on for what was found. Libraries that lie among the files themselves, as in wheels, stay where they are.
Costs: reading the head and the dynamic section of each library: under a second for PyTorch and its requirements.
Source: System V ABI, chapter 5 (dynamic section); ld.so(8) on the order of folders.
"""

from __future__ import annotations

import glob
import os
import shutil
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from stoker.launching.bundle import TreeFile

_ALWAYS = ("libgcc_s.so.1", "libnss_files.so.2", "libnss_dns.so.2", "libresolv.so.2")
"""Libraries that glibc loads by name while a program runs."""

_LOAD, _DYNAMIC, _INTERPRETER = 1, 2, 3
_NEEDED, _STRINGS, _RPATH, _RUNPATH = 1, 5, 15, 29
_MOST_BYTES = 2**24
_FROM_DRIVER = ("libcuda.so", "libnvidia-", "libnvcuvid.so")


@dataclass(frozen=True)
class DynamicSection:
    """Requests of an ELF file to the loader: libraries, folders to look in, and the loader itself ("" in libraries)."""

    needed: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()
    loader: str = ""


@dataclass(frozen=True, kw_only=True)
class SystemLibraries:
    """Libraries, the loader and a shell, as files of an image; names of libraries that were not found."""

    files: tuple[TreeFile, ...]
    missing: tuple[str, ...] = ()

    @classmethod
    def needed_by(cls, files: Sequence[TreeFile]) -> SystemLibraries:
        """The files of this machine that programs and libraries among `files` need.

        All are put into the folder of the C library, where the loader looks without a cache.
        """
        own = {PurePosixPath(file.path).name for file in files}
        shell = shutil.which("sh")
        waiting = [file.content for file in files if isinstance(file.content, Path) and _may_be_elf(file)]
        waiting += [Path(shell)] if shell else []
        needed: dict[str, Path] = {}
        loaders: set[str] = set()
        missing: set[str] = set()
        folders = loader_folders()
        queue = [(name, ()) for name in _ALWAYS if _find(name, (), folders) is not None]
        while waiting or queue:
            if waiting:
                path = waiting.pop()
                section = read_dynamic(path)
                origin = str(path.resolve().parent)
                paths = tuple(
                    folder.replace("$ORIGIN", origin).replace("${ORIGIN}", origin) for folder in section.folders
                )
                loaders |= {section.loader} - {""}
                queue += [(name, paths) for name in section.needed]  # type: ignore[misc]
                continue
            name, paths = queue.pop()
            if name in needed or name in own or name in missing or any(name == Path(loader).name for loader in loaders):
                continue
            library = _find(name, paths, folders)
            if library is None:
                missing.add(name)
            else:
                needed[name] = library
                waiting.append(library)
        home = needed["libc.so.6"].parent.as_posix().lstrip("/") if "libc.so.6" in needed else "usr/lib"
        libraries = [_copy(f"{home}/{name}", path) for name, path in sorted(needed.items())]
        programs = [_copy(loader.lstrip("/"), Path(loader)) for loader in sorted(loaders)]
        programs += [_copy("bin/sh", Path(shell))] if shell else []
        return cls(
            files=(*libraries, *(replace(file, is_executable=True) for file in programs)),
            missing=tuple(sorted(name for name in missing if not name.startswith(_FROM_DRIVER))),
        )


def loader_folders() -> tuple[str, ...]:
    """The folders in which the dynamic loader looks: those of its configuration, then its own."""
    folders: list[str] = []
    waiting = ["/etc/ld.so.conf"]
    while waiting:
        try:
            lines = Path(waiting.pop(0)).read_text(encoding="utf-8").splitlines()
        except OSError:
            continue
        for line in (line.partition("#")[0].strip() for line in lines):
            if line.startswith("include "):
                waiting += sorted(glob.glob(os.path.join("/etc", line.removeprefix("include ").strip())))  # noqa: PTH118, PTH207
            elif line:
                folders.append(line)
    machine = os.uname().machine
    own = (f"/lib/{machine}-linux-gnu", f"/usr/lib/{machine}-linux-gnu", "/lib64", "/usr/lib64", "/lib", "/usr/lib")
    return tuple(dict.fromkeys((*own, *folders)))


def read_dynamic(path: Path) -> DynamicSection:
    """The dynamic section of an ELF file of 64 bits, little-endian; an empty one where it is none, or is damaged."""
    try:
        with path.open("rb") as file:
            head = file.read(64)
            if head[:6] != b"\x7fELF\x02\x01":
                return DynamicSection()
            offset, size, count = struct.unpack_from("<Q", head, 32)[0], *struct.unpack_from("<HH", head, 54)
            file.seek(offset)
            table = file.read(size * count)
            segments = [struct.unpack_from("<IIQQQQ", table, size * number) for number in range(count)]

            def at(position: int, length: int) -> bytes:
                file.seek(position)
                return file.read(min(length, _MOST_BYTES))

            loader = next(
                (
                    at(segment[2], segment[5]).rstrip(b"\0").decode()
                    for segment in segments
                    if segment[0] == _INTERPRETER
                ),
                "",
            )
            dynamic = next((at(segment[2], segment[5]) for segment in segments if segment[0] == _DYNAMIC), b"")
            entries = [struct.unpack_from("<qQ", dynamic, place) for place in range(0, len(dynamic) - 15, 16)]
            address = next((value for tag, value in entries if tag == _STRINGS), None)
            loaded = [segment for segment in segments if segment[0] == _LOAD]
            home = next(
                (
                    segment
                    for segment in loaded
                    if address is not None and segment[3] <= address < segment[3] + segment[5]
                ),
                None,
            )
            if address is None or home is None:
                return DynamicSection(loader=loader)
            strings = home[2] + address - home[3]

            def text(index: int) -> str:
                return at(strings + index, 4096).partition(b"\0")[0].decode(errors="replace")

            return DynamicSection(
                needed=tuple(text(value) for tag, value in entries if tag == _NEEDED),
                folders=tuple(
                    folder
                    for tag, value in entries
                    if tag in (_RPATH, _RUNPATH)
                    for folder in text(value).split(":")
                    if folder
                ),
                loader=loader,
            )
    except (OSError, OverflowError, ValueError, struct.error):
        return DynamicSection()


def _may_be_elf(file: TreeFile) -> bool:
    return ".so" in PurePosixPath(file.path).name or file.is_executable


def _find(name: str, own: Iterable[str], folders: Iterable[str]) -> Path | None:
    return next((path for folder in (*own, *folders) if (path := Path(folder) / name).is_file()), None)


def _copy(path: str, source: Path) -> TreeFile:
    return TreeFile(path=path, num_bytes=source.stat().st_size, content=source)
