"""Hardware as data: attached devices, the catalogue, prices, carbon, and the devices that `--on` means.

Never imports torch: describing a machine and planning for it load nothing heavy.
"""

from stoker.devices.catalogue import COLUMNS, Catalogue, CatalogueEntry, Cell, Citation, Column, DeviceKind, catalogue
from stoker.devices.cpu import CpuLoad, CpuSample, attached_cpu, load_between, sample_cpu, watch_cpu
from stoker.devices.detection import DeviceSurvey, TorchBuild, attached_devices, installed_torch, survey
from stoker.devices.hardware import cache_key, device_of, hardware_of
from stoker.devices.places import Place, find_devices, planned_devices, resolve_place
from stoker.devices.prices import (
    HOST_SHARE,
    PUE_DATA_CENTRE,
    PUE_HERE,
    Grid,
    PriceList,
    cheapest,
    grid_of,
    grids,
    price_list,
)

__all__ = [
    "COLUMNS",
    "HOST_SHARE",
    "PUE_DATA_CENTRE",
    "PUE_HERE",
    "Catalogue",
    "CatalogueEntry",
    "Cell",
    "Citation",
    "Column",
    "CpuLoad",
    "CpuSample",
    "DeviceKind",
    "DeviceSurvey",
    "Grid",
    "Place",
    "PriceList",
    "TorchBuild",
    "attached_cpu",
    "attached_devices",
    "cache_key",
    "catalogue",
    "cheapest",
    "device_of",
    "find_devices",
    "grid_of",
    "grids",
    "hardware_of",
    "installed_torch",
    "load_between",
    "planned_devices",
    "price_list",
    "resolve_place",
    "sample_cpu",
    "survey",
    "watch_cpu",
]
