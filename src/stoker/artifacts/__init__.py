"""A model on disk: one directory per version, with graph, weights, golden answers and a manifest; no pickle."""

from stoker.artifacts.directory import (
    MANIFEST,
    SETTINGS,
    Artifact,
    publish,
    read,
    read_settings,
    version_number,
    versions,
    write_settings,
)
from stoker.artifacts.dtypes import Arrays, datatype_of, dtype_of
from stoker.artifacts.golden import Golden, difference, excess, served_sizes
