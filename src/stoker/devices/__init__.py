"""Hardware as data: attached devices, the catalogue, prices, carbon, and the devices that `--on` means.

Never imports torch: describing a machine and planning for it load nothing heavy.
"""

from stoker.devices.catalogue import COLUMNS, Catalogue, CatalogueEntry, Cell, catalogue
from stoker.devices.cpu import CpuLoad, attached_cpu, load_between, sample_cpu, watch_cpu
from stoker.devices.detection import TorchBuild, attached_devices, installed_torch, survey
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
