"""The verbs and public names of Stoker, each loaded on first use: `import stoker` costs next to nothing.

The imports below are the only list. Type checkers read them as they stand. At run time they are not executed: a name
is looked up in them when it is first used, and only the module that it comes from is imported. Names of the first block
are `stoker.NAME`; those of the second block serve the command line and programs that build on Stoker.
"""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

from stoker.imports import collector_paused, import_name, listed_imports

if TYPE_CHECKING:  # stoker.NAME
    from stoker import data as data
    from stoker import recipes as recipes
    from stoker import zoo as zoo
    from stoker.compressing.compress import compress as compress
    from stoker.errors import BadJob as BadJob
    from stoker.errors import BadRun as BadRun
    from stoker.errors import DoesNotFit as DoesNotFit
    from stoker.errors import NoDevice as NoDevice
    from stoker.errors import PlaceFailed as PlaceFailed
    from stoker.errors import PlaceUnreachable as PlaceUnreachable
    from stoker.errors import RunFailed as RunFailed
    from stoker.errors import StokerError as StokerError
    from stoker.exporting.export import export as export
    from stoker.jobs import optimizers as optimizers
    from stoker.jobs import sampling as sampling
    from stoker.jobs import schedules as schedules
    from stoker.jobs.averages import EMA as EMA
    from stoker.jobs.averages import SWA as SWA
    from stoker.jobs.batch_size import auto as auto
    from stoker.jobs.batch_size import tokens as tokens
    from stoker.jobs.early_stopping import EarlyStopping as EarlyStopping
    from stoker.jobs.early_stopping import Target as Target
    from stoker.jobs.evaluation_settings import Evaluation as Evaluation
    from stoker.jobs.fields import Fields as Fields
    from stoker.jobs.freezing import Freeze as Freeze
    from stoker.jobs.initial_weights import Weights as Weights
    from stoker.jobs.job import Job as Job
    from stoker.jobs.job import Loss as Loss
    from stoker.jobs.job import holdout as holdout
    from stoker.jobs.metrics import probabilities as probabilities
    from stoker.jobs.objective import Objective as Objective
    from stoker.jobs.objective import SelectiveBackprop as SelectiveBackprop
    from stoker.jobs.optimizers import SGD as SGD
    from stoker.jobs.optimizers import Adam as Adam
    from stoker.jobs.optimizers import AdamW as AdamW
    from stoker.jobs.optimizers import Muon as Muon
    from stoker.jobs.regularization import l1 as l1
    from stoker.jobs.regularization import l2 as l2
    from stoker.jobs.sync import DiLoCo as DiLoCo
    from stoker.jobs.sync import LocalSGD as LocalSGD
    from stoker.launching.launch import launch as launch
    from stoker.launching.launch_options import LaunchOptions as LaunchOptions
    from stoker.loading import lengths as lengths
    from stoker.loading import transforms as transforms
    from stoker.planning.decision import plan as plan
    from stoker.planning.step_profile import profile as profile
    from stoker.predicting.prediction import predict as predict
    from stoker.profiling.diagnosis import doctor as doctor
    from stoker.serving.serve import serve as serve
    from stoker.training.hooks import on as on
    from stoker.training.logged_values import log as log
    from stoker.training.own_loop import prepare as prepare
    from stoker.training.run_handle import Run as Run
    from stoker.training.run_handle import load as load
    from stoker.training.run_handle import report as report
    from stoker.training.train import train as train
    from stoker.tuning.lr_range_test import lr_range as lr_range
    from stoker.tuning.tune import tune as tune
    from stoker.units import epochs as epochs
    from stoker.units import samples as samples
    from stoker.units import seconds as seconds
    from stoker.units import updates as updates
    from stoker.verifying.exactness_contract import verify as verify

if TYPE_CHECKING:  # further verbs and records
    from stoker.data.reading.array_files import npz_arrays as npz_arrays
    from stoker.devices import attached_cpu as attached_cpu
    from stoker.devices import attached_devices as attached_devices
    from stoker.devices import resolve_place as resolve_place
    from stoker.exporting import About as About
    from stoker.inspecting import CheckOptions as CheckOptions
    from stoker.inspecting.data_check import check_data as check_data
    from stoker.jobs import load_job as load_job
    from stoker.launching.follow import Follower as Follower
    from stoker.launching.images.oci_image import ImageOptions as ImageOptions
    from stoker.launching.images.oci_image import build_image as build_image
    from stoker.launching.known_places import ask_places as ask_places
    from stoker.launching.known_places import fetch_run as fetch_run
    from stoker.launching.known_places import find_launched as find_launched
    from stoker.launching.known_places import find_launched_or_run as find_launched_or_run
    from stoker.launching.known_places import launcher_of_run as launcher_of_run
    from stoker.launching.known_places import place_kinds as place_kinds
    from stoker.launching.known_places import runs_elsewhere as runs_elsewhere
    from stoker.launching.kubernetes.kubernetes_service import deploy as deploy
    from stoker.launching.launch import describe_launch as describe_launch
    from stoker.launching.launch_options import PlaceQuestion as PlaceQuestion
    from stoker.launching.meter import spent_of as spent_of
    from stoker.launching.place_offers import compare_places as compare_places
    from stoker.loadtesting import load_test as load_test
    from stoker.loadtesting.inference_requests import sizes_of as sizes_of
    from stoker.loadtesting.load_test import bench_serve as bench_serve
    from stoker.planning.model.objectives import PlanLimits as PlanLimits
    from stoker.planning.multi_device import links_between as links_between
    from stoker.planning.step_profile import StepProfile as StepProfile
    from stoker.predicting.prediction_request import PredictOptions as PredictOptions
    from stoker.reporting.data_page import FAULTS as FAULTS
    from stoker.reporting.display import choose_display as choose_display
    from stoker.reporting.display import waiting as waiting
    from stoker.reporting.event_text import exact_setting as exact_setting
    from stoker.reporting.event_text import format_settings as format_settings
    from stoker.reporting.launch_text import spent_words as spent_words
    from stoker.reporting.side_by_side import render_side_by_side as render_side_by_side
    from stoker.reporting.summary import summary_lines as summary_lines
    from stoker.serving.access_log import LineWriter as LineWriter
    from stoker.serving.serve import require_libraries as require_libraries
    from stoker.serving.serve import rollback as rollback
    from stoker.store import runs_root as runs_root
    from stoker.store import write_atomic as write_atomic
    from stoker.tracking.base import require_tracker as require_tracker
    from stoker.tracking.run_tracking import Sent as Sent
    from stoker.tracking.run_tracking import track as track
    from stoker.training.own_loop import OwnLoop as OwnLoop
    from stoker.training.train import take_part_in as take_part_in
    from stoker.tuning.study_directory import Study as Study
    from stoker.tuning.tune import TuneOptions as TuneOptions
    from stoker.tuning.tune import study as study


@functools.cache
def _modules_by_name() -> tuple[dict[str, str], dict[str, str]]:
    """The module that each name of the two blocks comes from."""
    public, further = listed_imports(__file__)
    return public, further


def public_names() -> list[str]:
    """The names that `stoker` itself offers."""
    return sorted(_modules_by_name()[0])


def load_name(name: str) -> Any:
    """The verb, record or module `name`, imported now.

    Raises:
        KeyError: no such name is in the lists above.
    """
    public, further = _modules_by_name()
    module = (public | further)[name]
    if module in sys.modules and name in vars(sys.modules[module]):
        return vars(sys.modules[module])[name]
    with collector_paused():
        return import_name(module, name)


def __getattr__(name: str) -> Any:
    """A name of the lists above, loaded now."""
    try:
        value = globals()[name] = load_name(name)
    except KeyError:
        raise AttributeError(f"module 'stoker.api' has no attribute {name!r}") from None
    return value


def __dir__() -> list[str]:
    """All names."""
    public, further = _modules_by_name()
    return sorted(public | further)
