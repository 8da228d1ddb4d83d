"""Devices, their measured ceilings, their prices, and the environment of a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from stoker.records import codec

Precision = Literal["fp32", "tf32", "bf16", "fp16", "fp8", "fp64"]
"""Precisions of a plan: plain fp32, tf32 products, bf16 over fp32 weights and reductions (autocast, or under shards
parameters gathered in bf16), autocast fp16 with a loss scale, bf16 with products of linear layers in fp8, or plain fp64
for models whose weights are in float64, which nothing reduces."""
FULL_PRECISIONS = ("fp32", "fp64")
"""The precisions that compute as the model is written."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """An attached device.

    `fast_dtypes` are the dtypes that its matrix units multiply natively, without "unknown" ones; `memory_bytes` is the
    memory that a process may use (for a CPU: the smaller of physical memory and the container's limit);
    `compute_capability` is an NVIDIA GPU's, such as `8.9`, by its driver, empty if unknown.
    """

    schema: ClassVar[int] = 1
    name: str
    kind: Literal["cpu", "cuda"]
    index: int = 0
    model: str
    cores: int
    memory_bytes: int
    fast_dtypes: tuple[str, ...]
    driver: str = "unknown"
    compute_capability: str = ""

    @property
    def torch_name(self) -> str:
        """Its name in PyTorch: `cpu` or `cuda:0`."""
        return "cpu" if self.kind == "cpu" else f"cuda:{self.index}"


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """Measured rates of a device: matrix products [FLOP/s] by dtype, and bandwidths [bytes/s].

    `copy_bytes_per_s` counts bytes read plus bytes written; `host_to_device_bytes_per_s` is None on a CPU.
    """

    schema: ClassVar[int] = 1
    device: Device
    threads: int
    gemm_flops: dict[str, float]
    copy_bytes_per_s: float
    fresh_copy_bytes_per_s: float
    host_to_device_bytes_per_s: float | None
    took_s: float
    measured_at: str
    torch_version: str


@dataclass(frozen=True, kw_only=True)
class Environment:
    """The determinism class of a run: with equal environments and equal plans, runs are bit-equal."""

    schema: ClassVar[int] = 1
    device_model: str
    device_kind: str
    threads: int
    torch_version: str
    python_version: str
    platform: str
    libraries: dict[str, str] = field(default_factory=dict)
    flags: dict[str, str] = field(default_factory=dict)

    def digest(self) -> str:
        """Short name of this class (12 hex digits)."""
        return codec.digest(self)[:12]


@dataclass(frozen=True, kw_only=True)
class Price:
    """Price of one device for one hour [USD], with its host; `seen_on` is an ISO date, None if the source has none.

    `device` is a name of the catalogue. `most_devices` are rented together at most, since the provider's machines have
    no network to train over, or belong to different people (None: no limit is known). `is_stale` marks prices too old,
    or of a source without a date.
    """

    schema: ClassVar[int] = 1
    device: str
    provider: str
    usd_per_hour: float
    market: Literal["on demand", "spot"]
    source: str
    seen_on: str | None
    region: str = ""
    note: str = ""
    is_stale: bool = False
    most_devices: int | None = None
