"""Hardware as data: what is attached here, what the catalogue knows, and what the words of `--on` mean.

Never imports torch: a machine is described, and a plan made for it, without loading anything heavy.
"""

from stoker.devices.catalogue import Catalogue, CatalogueEntry, Cell, Source, catalogue
from stoker.devices.detection import Survey, attached_devices, survey
from stoker.devices.identity import cache_key
from stoker.devices.load import CpuLoad, CpuSample, load_between, sample_cpu, watch_cpu
from stoker.devices.places import resolve_place
from stoker.devices.torch_build import TorchBuild, installed_torch

__all__ = [
    "Catalogue", "CatalogueEntry", "Cell", "CpuLoad", "CpuSample", "Source", "Survey", "TorchBuild", "attached_devices",
    "cache_key", "catalogue", "installed_torch", "load_between", "resolve_place", "sample_cpu", "survey", "watch_cpu",
]  # fmt: skip
