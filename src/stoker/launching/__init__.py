"""Runs executed elsewhere: hosts, Slurm, Kubernetes, Ray, clouds; one seam, one file for each kind of place.

A file with an object `LAUNCHER`, here, in a folder of a kind, or in `stoker/pool`, is a kind of place; the folders are
listed, nothing else names them. The kind is the word in `kind = "…"` of the file, read from its text: the command line
distinguishes a place from a device without importing any launcher.
"""

from __future__ import annotations

import functools
import importlib
import re
from pathlib import Path
from typing import TYPE_CHECKING

from stoker.errors import NoDevice, nearest

if TYPE_CHECKING:
    from stoker.launching.launcher import Launcher, LaunchTarget

_OBJECT = "\nLAUNCHER = "
_POOL_PACKAGE = "pool"
"""A package above this one that holds a kind of place as well."""
_KIND = re.compile(r'^    kind = "([a-z0-9]+)"', re.MULTILINE)


def kinds() -> dict[str, str]:
    """Kinds of places and the module that knows each, by name; imports none of them."""
    return dict(_kinds_in(tuple(__path__)))


@functools.cache
def _kinds_in(paths: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    kinds = {}
    root = __name__.rpartition(".")[0]
    for package in map(Path, paths):
        for name, folder in ((__name__, package), (f"{root}.{_POOL_PACKAGE}", package.parent / _POOL_PACKAGE)):
            for file in sorted((*folder.glob("*.py"), *folder.glob("*/*.py"))):
                text = file.read_text(encoding="utf-8")
                if _OBJECT in text and (kind := _KIND.search(text)):
                    kinds[kind[1]] = ".".join((name, *file.relative_to(folder).with_suffix("").parts))
    return tuple(kinds.items())


def is_elsewhere(word: str) -> bool:
    """Whether a word of `--on` names a place elsewhere: `ssh:box` does; `here`, `cuda:0` and `2xcpu` do not.

    A kind alone is one, with its colon or without: `slurm`, `pool/cpu`. A word with a colon whose kind is unknown
    counts as one, so that `launcher_of` can name the nearest.

    >>> is_elsewhere("ssh:box"), is_elsewhere("slurm"), is_elsewhere("cuda:0"), is_elsewhere("8xh100")
    (True, True, False, False)
    """
    if _kind_and_rest(word)[0] in kinds():
        return True
    kind, colon, _ = word.strip().partition(":")
    return bool(colon) and re.fullmatch(r"(\d+x)*(cuda|mps|xpu|cpu)", kind) is None


def launcher_of(kind: str) -> Launcher:
    """The launcher of a kind of place.

    Raises:
        NoDevice: there is no such kind; the nearest is named.
    """
    modules = kinds()
    if kind not in modules:
        raise NoDevice(
            f"--on {kind}:… names no kind of place.",
            remedy=f"{nearest(kind, modules)} Devices here have no colon but for cuda:N.",
        )
    launcher: Launcher = importlib.import_module(modules[kind]).LAUNCHER
    return launcher


def parse_target(word: str) -> LaunchTarget:
    """The target of a whole word of `--on`, such as `ssh:me@box/2xcpu`.

    Raises:
        NoDevice: the kind is unknown, or the rest cannot be read.
    """
    kind, rest = _kind_and_rest(word)
    return launcher_of(kind).parse(rest)


def _kind_and_rest(word: str) -> tuple[str, str]:
    """The kind of a word of `--on`, and what its launcher reads: `slurm/cpu` is `slurm` and `/cpu`."""
    kind, colon, rest = word.strip().partition(":")
    name, slash, shape = kind.partition("/")
    if not colon and name.lower() in kinds():
        return name.lower(), f"{slash}{shape}"
    return kind.lower(), rest
