"""Public fakes: a clock, a device, a disk that fails, and power that is cut at any operation on the disk."""

from stoker.testing.clock import FakeClock
from stoker.testing.device import fake_device
from stoker.testing.faulty_disk import FaultyDisk
from stoker.testing.power_cut import Loses, PowerCut, PowerCutAt, operations_of

__all__ = ["FakeClock", "FaultyDisk", "Loses", "PowerCut", "PowerCutAt", "fake_device", "operations_of"]
