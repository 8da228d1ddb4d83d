"""A model on disk: versions of a directory each, with a graph, weights, golden answers and a manifest; no pickle."""

from stoker.artifacts.answers import difference, excess
from stoker.artifacts.directory import MANIFEST, Artifact, publish, read, version_number, versions
from stoker.artifacts.elements import Arrays, datatype_of, dtype_of
from stoker.artifacts.golden import Golden, served_sizes
from stoker.artifacts.settings import SETTINGS, read_settings, write_settings

__all__ = [
    "MANIFEST", "SETTINGS", "Arrays", "Artifact", "Golden", "datatype_of", "difference", "dtype_of", "excess",
    "publish", "read", "read_settings", "served_sizes", "version_number", "versions", "write_settings",
]  # fmt: skip
