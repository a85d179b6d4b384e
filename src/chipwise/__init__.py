"""Write the training once, as plain functions; run it unchanged on any number of devices.

`import chipwise as cw`. See the README for the contract in twenty lines. A name is loaded when it is first
used: importing the package alone starts nothing and loads nothing, not even JAX.
"""

import importlib as _importlib
import os as _os
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from .machine import absent as _absent

# On the CPU, XLA cuts a long matrix product among the threads of a pool and adds the parts, so its bits
# depend on the size of the pool: the larger of the cores and the simulated devices. Processes with 1 and
# with 8 devices then differ (measured: a product over 2,048 rows, on 2 cores). With one size they agree, and
# so do machines of 2 and of 8 cores; it costs no speed that could be measured. XLA reads the variable once,
# when its CPU client starts; what the user has set stays.
_os.environ.setdefault("NPROC", str(max(8, _os.cpu_count() or 1)))

_absent.leave_cuda_alone()
_absent.leave_libtpu_alone()

if _TYPE_CHECKING:
    from .data import augment as augment
    from .data import datasets as datasets
    from .data.folder import ImageFolder as ImageFolder
    from .data.pack.job import pack as pack
    from .data.packed import PackedFolder as PackedFolder
    from .data.sources import Arrays as Arrays
    from .data.sources import Lazy as Lazy
    from .deploy.export import Export as Export
    from .deploy.export import export as export
    from .deploy.features import features as features
    from .deploy.predict import Predictions as Predictions
    from .deploy.predict import predict as predict
    from .deploy.pretrained import Weights as Weights
    from .deploy.pretrained import pretrained as pretrained
    from .engine.checkpoint import restore_run as restore_run
    from .engine.evaluate import evaluate as evaluate
    from .engine.fit import fit as fit
    from .engine.on import On as On
    from .engine.result import Result as Result
    from .engine.stepper import Stepper as Stepper
    from .errors import CheckpointError as CheckpointError
    from .errors import ChipwiseError as ChipwiseError
    from .errors import DataError as DataError
    from .errors import DeviceError as DeviceError
    from .errors import DivergedError as DivergedError
    from .errors import HostLost as HostLost
    from .errors import RecipeError as RecipeError
    from .errors import RunError as RunError
    from .errors import Stopped as Stopped
    from .explain.notebook import compare as compare
    from .explain.notebook import report as report
    from .interop import equinox as equinox
    from .interop import keras as keras
    from .interop import linen as linen
    from .interop import nnx as nnx
    from .interop import read as read
    from .interop import torch as torch
    from .interop.nnx import functional as functional
    from .machine.detect import detect as detect
    from .machine.detect import simulate as simulate
    from .machine.hosts import hosts as hosts
    from .models.attention import attention as attention
    from .models.large import fsdp as fsdp
    from .models.remat import remat as remat
    from .planner.planner import plan as plan
    from .planner.plans import Plan as Plan
    from .recipe import losses as losses
    from .recipe import metrics as metrics
    from .recipe.around import grouped as grouped
    from .recipe.around import layerwise as layerwise
    from .recipe.around import lookahead as lookahead
    from .recipe.check import Finding as Finding
    from .recipe.check import check as check
    from .recipe.freezing import freeze as freeze
    from .recipe.optimizers import adam as adam
    from .recipe.optimizers import adamw as adamw
    from .recipe.optimizers import from_optax as from_optax
    from .recipe.optimizers import sgd as sgd
    from .recipe.recipe import Recipe as Recipe
    from .recipe.recipe import Validated as Validated
    from .recipe.schedules import constant as constant
    from .recipe.schedules import cosine as cosine
    from .recipe.schedules import exponential as exponential
    from .recipe.schedules import linear as linear
    from .recipe.schedules import one_cycle as one_cycle
    from .recipe.schedules import one_cycle_momentum as one_cycle_momentum
    from .recipe.schedules import piecewise as piecewise
    from .recipe.schedules import polynomial as polynomial
    from .recipe.schedules import warmup as warmup
    from .recipe.settings import load as load
    from .recipe.task import Sum as Sum
    from .recipe.task import Task as Task
    from .recipe.trust_ratio import lamb as lamb
    from .recipe.trust_ratio import lars as lars
    from .study.document import Study as Study
    from .study.find_batch import BatchSearch as BatchSearch
    from .study.find_batch import find_batch as find_batch
    from .study.find_lr import LrSearch as LrSearch
    from .study.find_lr import find_lr as find_lr
    from .study.sweep import sweep as sweep
    from .study.transfer import Transfer as Transfer
    from .study.transfer import transfer as transfer

__version__ = "0.1.0"

_NAMES = {
    ".data": "augment datasets",
    ".data.folder": "ImageFolder",
    ".data.pack.job": "pack",
    ".data.packed": "PackedFolder",
    ".data.sources": "Arrays Lazy",
    ".deploy.export": "Export export",
    ".deploy.features": "features",
    ".deploy.predict": "Predictions predict",
    ".deploy.pretrained": "Weights pretrained",
    ".engine.checkpoint": "restore_run",
    ".engine.evaluate": "evaluate",
    ".engine.fit": "fit",
    ".engine.on": "On",
    ".engine.result": "Result",
    ".engine.stepper": "Stepper",
    ".errors": "CheckpointError ChipwiseError DataError DeviceError DivergedError HostLost RecipeError "
    "RunError Stopped",
    ".explain.notebook": "compare report",
    ".interop": "equinox keras linen nnx read torch",
    ".interop.nnx": "functional",
    ".machine.detect": "detect simulate",
    ".machine.hosts": "hosts",
    ".models.attention": "attention",
    ".models.large": "fsdp",
    ".models.remat": "remat",
    ".planner.planner": "plan",
    ".planner.plans": "Plan",
    ".recipe": "losses metrics",
    ".recipe.around": "grouped layerwise lookahead",
    ".recipe.check": "Finding check",
    ".recipe.freezing": "freeze",
    ".recipe.optimizers": "adam adamw from_optax sgd",
    ".recipe.recipe": "Recipe Validated",
    ".recipe.schedules": "constant cosine exponential linear one_cycle one_cycle_momentum piecewise "
    "polynomial warmup",
    ".recipe.settings": "load",
    ".recipe.task": "Sum Task",
    ".recipe.trust_ratio": "lamb lars",
    ".study.document": "Study",
    ".study.find_batch": "BatchSearch find_batch",
    ".study.find_lr": "LrSearch find_lr",
    ".study.transfer": "Transfer transfer",
    ".study.sweep": "sweep",
}
"""The public names by the module that has them. A name that this module lacks is a module in it."""

_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> _Any:
    if name not in _MODULES:
        here = _importlib.import_module(__name__)  # for Python's "Did you mean"
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'", name=name, obj=here)
    module = _importlib.import_module(_MODULES[name], __name__)
    if not hasattr(module, name):
        _importlib.import_module(f"{_MODULES[name]}.{name}", __name__)
    globals()[name] = value = getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
