"""Times of operations on a GPU, which need not be here.

What  Products by tiles and waves, convolutions as products, recurrent layers as products step after step, fused
      attention by its FLOPs, everything else by the bytes that cross memory; rates from the datasheet, or from a
      micro-benchmark of the device.
Use when  forecasting for a CUDA device.
Costs  Half a second to take in a micro-benchmark of a thousand points; then 0.1 ms per operation asked for.
Does not combine with  operations that work while others do: each is taken to have the device for itself.
Source  `tiles`, `bandwidth`, `power`, `datasheet`, `residuals` each name theirs.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from stoker.errors import NoDevice
from stoker.planning.time.calibration import Calibration, calibrate
from stoker.planning.time.datasheet import Shares, Sustained
from stoker.planning.time.power import PowerModel
from stoker.planning.time.roofs import kind_of, point_of, roof_seconds
from stoker.planning.time.tiles import TileShape
from stoker.records.hardware import Hardware
from stoker.records.trace import Operation

_GAP_S = 1.5e-6
"""Between two kernels of a stream, the next already queued [s]."""
_DATASHEET_ERRORS = {
    "product": 0.09, "batched product": 0.16, "convolution": 0.35, "attention": 0.25, "recurrent": 0.5,
    "row": 0.25, "stream": 0.1,
}  # fmt: skip
"""One standard deviation by kind, where only a datasheet is known [fraction]. From devices left out of the fit; of
attention and recurrent layers, judgements: nothing public measures them device by device."""
_DRIFT = 0.04
"""Between two boards of a model and two rooms they stand in [fraction]."""
_THROTTLED_DRIFT = 0.6
"""The same of a board that its power limit throttles, per share of the clock it loses: much depends on its cooling."""
_TENSOR_DRIFT = 0.08
"""Of tensor cores, of whose shapes nothing was measured here."""


@dataclass
class GpuTimes:
    """`OperationTimes` of a CUDA device."""

    sustained: Sustained
    calibration: Calibration
    _known: dict[tuple[object, ...], tuple[float, float]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        hardware: Hardware,
        shares: Shares | None = None,
        product: TileShape | None = None,
        batched: TileShape | None = None,
    ) -> GpuTimes:
        """The model of a device; shapes and shares are those shipped unless others are given.

        Raises:
            NoDevice: its datasheet lacks what no forecast can do without.
        """
        missing = [
            words
            for words, value in (
                ("memory bandwidth", hardware.bandwidth_bytes_per_s),
                ("number of multiprocessors", hardware.multiprocessors),
                ("peak rate of fp32", hardware.dense_flops.get("fp32")),
            )
            if not value
        ]
        if missing:
            raise NoDevice(
                f"The time on {hardware.device.name!r} cannot be forecast: its {' and '.join(missing)} is not known. "
                "Add it to the catalogue's row, or choose another device.",
            )
        known = {
            name: value for name, value in (("shares", shares), ("product", product), ("batched", batched)) if value
        }
        sustained = Sustained(hardware=hardware, power=PowerModel.of(hardware), **known)  # type: ignore[arg-type]
        return cls(sustained, calibrate(sustained))

    def seconds(self, operation: Operation) -> float:
        """Time on the device [s], queued behind others."""
        return self._time_and_error(operation)[0]

    def relative_error(self, operation: Operation) -> float:
        """One standard deviation of `seconds`, as a fraction of it."""
        return self._time_and_error(operation)[1]

    def _time_and_error(self, operation: Operation) -> tuple[float, float]:
        # Attributes may be lists, so that an operation as such is no key.
        key = (operation.name, operation.inputs, operation.outputs, operation.bytes_read, repr(operation.attributes))
        if key not in self._known:
            self._known[key] = self._forecast(operation)
        return self._known[key]

    def _forecast(self, operation: Operation) -> tuple[float, float]:
        kind, dtype = kind_of(operation)
        scales = self.calibration.scales(kind, dtype)
        seconds = roof_seconds(operation, kind, dtype, self.sustained, scales)
        if seconds == 0.0:
            return 0.0, 0.0
        residuals = self.calibration.residuals.get((kind, dtype))
        if residuals is None:
            return seconds + _GAP_S, float(np.hypot(_DATASHEET_ERRORS[kind], self._drift(dtype)))
        correction, error = residuals.at(point_of(operation, kind))
        return seconds * float(np.exp(correction)) + _GAP_S, float(np.hypot(error, self._drift(dtype)))

    def _drift(self, dtype: str) -> float:
        """What no micro-benchmark of single operations can tell [fraction]."""
        peak, is_tensor = self.sustained.peak_flops(dtype)
        lost = 1 - self.sustained.power.sustained_share(0.9 * peak, dtype if is_tensor else "fp32")
        unseen = _TENSOR_DRIFT if is_tensor and not self.calibration.residuals else 0.0
        return _DRIFT + _THROTTLED_DRIFT * lost + unseen
