"""Public fakes: a clock, a device, a failing disk, and a power cut at any disk operation; conformance classes."""

from stoker.testing.fakes import FakeClock, FaultyDisk, Loses, PowerCut, PowerCutAt, fake_device, operations_of
from stoker.testing.launcher_conformance import LauncherConformance, LiveLauncherConformance

__all__ = [
    "FakeClock",
    "FaultyDisk",
    "LauncherConformance",
    "LiveLauncherConformance",
    "Loses",
    "PowerCut",
    "PowerCutAt",
    "fake_device",
    "operations_of",
]
