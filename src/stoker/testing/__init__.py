"""Public fakes: a clock, a device, a failing disk, and a power cut at any disk operation."""

from stoker.testing.disk_faults import FaultyDisk, Loses, PowerCut, PowerCutAt, operations_of
from stoker.testing.fakes import FakeClock, fake_device

__all__ = ["FakeClock", "FaultyDisk", "Loses", "PowerCut", "PowerCutAt", "fake_device", "operations_of"]
