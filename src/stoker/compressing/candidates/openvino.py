"""Candidates that OpenVINO runs: in fp32, in bf16 or fp16, and in int8 as NNCF quantises.

What: int8 static quantisation after training. Scales of weights are per channel, those of activations per tensor, taken
from calibration rows; biases are corrected for the mean error. "SmoothQuant" first moves outliers of activations into
the weights, which transformers need.
Use when: the CPU has 8-bit dot products (VNNI, AMX), where it is 1.5 to 2 times as fast as bf16.
Costs: seconds; some accuracy, which the search measures.
Source: Nagel et al. 2021, https://arxiv.org/abs/2106.08295 (quantisation after training, bias correction); Xiao et al.
2022, https://arxiv.org/abs/2211.10438 (SmoothQuant); NNCF's documentation of `nncf.quantize`.
"""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from stoker.compressing.candidates.base import CannotMake, Made, Workshop, explained
from stoker.compressing.candidates.ir import read, saved
from stoker.engines import signal_stack, telemetry

Style = Literal["mixed", "plain", "percentile", "min-max", "smooth"]
"""How scales are found: extremes, with a zero point for activations of either sign; the same without correcting biases;
extremes without outliers; symmetric extremes; after SmoothQuant."""


def as_it_is(workshop: Workshop, directory: Path) -> Made:
    """The graph in OpenVINO's own format."""
    with explained("OpenVINO"):
        return saved(read(workshop.graph_path), directory)


def halved(workshop: Workshop, directory: Path) -> Made:
    """The graph with its weights stored in fp16, which bf16 is computed from as well: half the size."""
    with explained("OpenVINO"):
        return saved(read(workshop.graph_path), directory, halve=True)


def quantised(workshop: Workshop, directory: Path, style: Style) -> Made:
    """The graph in int8."""
    with explained("NNCF"):
        return saved(quantised_model(workshop, style), directory)


def quantised_model(workshop: Workshop, style: Style) -> Any:
    """The graph in int8, in memory.

    Raises:
        CannotMake: NNCF is not installed.
    """
    nncf = _nncf()
    rows = list(workshop.calibration_inputs())
    with _quietly(), signal_stack.kept():
        model = read(workshop.graph_path)
        return nncf.quantize(
            model, nncf.Dataset(rows), subset_size=len(rows), **_settings(nncf, style, sums_fit=workshop.sums_fit)
        )  # fmt: skip


def _settings(nncf: Any, style: Style, *, sums_fit: bool) -> dict[str, Any]:
    """What NNCF calls a style."""
    finer: dict[str, Any] = {"disable_bias_correction": style == "plain"}
    if sums_fit:
        finer["overflow_fix"] = nncf.OverflowFix.DISABLE
    if style == "percentile":
        sets = nncf.quantization.range_estimator.RangeEstimatorParametersSet
        finer["activations_range_estimator_params"] = sets.MEAN_NO_OUTLIERS_MINMAX
    preset = nncf.QuantizationPreset.PERFORMANCE if style == "min-max" else nncf.QuantizationPreset.MIXED
    return {
        "model_type": nncf.ModelType.TRANSFORMER if style == "smooth" else None,
        "preset": preset,
        "advanced_parameters": nncf.AdvancedQuantizationParameters(**finer),
    }


def _nncf() -> Any:
    telemetry.withhold()
    try:
        with _quietly():
            import nncf  # noqa: PLC0415 - an extra, which is loaded where it is used
    except ImportError as error:
        raise CannotMake("nncf is not installed", remedy="pip install 'stoker[compress]'") from error
    return nncf


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Without the bars and notes that NNCF writes while it works."""
    logger = logging.getLogger("nncf")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)
