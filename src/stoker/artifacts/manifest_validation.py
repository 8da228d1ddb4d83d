"""What a manifest cannot mean: it may come from anywhere, and is believed by engines and servers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import PurePosixPath, PureWindowsPath

from stoker.records import BATCH, Manifest, TensorSpec


def manifest_problem(manifest: Manifest) -> str | None:
    """The first thing that is wrong with a manifest, as the end of a sentence that begins with its path; or None."""
    return next((problem for problem in (*_files(manifest), *_tensors(manifest), *_numbers(manifest))), None)


def _files(manifest: Manifest) -> Iterator[str]:
    names = [one.name for one in manifest.files]
    for name in (manifest.graph, manifest.golden, *names):
        is_absolute = PurePosixPath(name).is_absolute() or bool(PureWindowsPath(name).anchor)
        if is_absolute or not name or "\0" in name or ".." in PurePosixPath(name.replace("\\", "/")).parts:
            yield f"names {name!r}, which is outside its directory"
    for name in (manifest.graph, manifest.golden):
        if name not in names:
            yield f"gives no digest of {name!r}"


def _tensors(manifest: Manifest) -> Iterator[str]:
    for what, specs in (("inputs", manifest.inputs), ("outputs", manifest.outputs)):
        if not specs:
            yield f"has no {what}"
        if len({spec.name for spec in specs}) < len(specs):
            yield f"has two {what} of one name"
        for spec in specs:
            yield from _shape(spec)
    for name in manifest.labels:
        if name not in {spec.name for spec in manifest.outputs}:
            yield f"has labels of {name!r}, which is no output"


def _shape(spec: TensorSpec) -> Iterator[str]:
    if any(dim == "" or (not isinstance(dim, str) and dim < 0) for dim in spec.shape):
        yield f"gives {spec.name!r} the shape {list(spec.shape)}"
    if BATCH in spec.shape[1:]:
        yield f"gives {spec.name!r} the shape {list(spec.shape)}: the batch comes first or not at all"


def _numbers(manifest: Manifest) -> Iterator[str]:
    for dim in manifest.dims:
        if dim.low < 0 or (dim.high is not None and dim.high < dim.low):
            yield f"lets {dim.name!r} go from {dim.low} to {dim.high}"
    for value in (manifest.tolerance.absolute, manifest.tolerance.relative):
        if not (math.isfinite(value) and value >= 0):
            yield f"allows answers to differ by {value}"
