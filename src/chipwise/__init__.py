"""Write the training once, as plain functions; run it unchanged on any number of devices.

`import chipwise as cw`. See the README for the contract in twenty lines.
"""

from .machine.threads import fix_pool as _fix_pool

_fix_pool()  # before anything starts JAX's CPU client, which reads it once

from .data import augment as augment
from .data import datasets as datasets
from .data.folder import ImageFolder as ImageFolder
from .data.pack.job import pack as pack
from .data.packed import PackedFolder as PackedFolder
from .data.sources import Arrays as Arrays
from .data.sources import Lazy as Lazy
from .engine.fit import evaluate as evaluate
from .engine.fit import fit as fit
from .engine.restore import restore_run as restore_run
from .engine.result import Result as Result
from .engine.stepper import Stepper as Stepper
from .errors import CheckpointError as CheckpointError
from .errors import ChipwiseError as ChipwiseError
from .errors import DataError as DataError
from .errors import DeviceError as DeviceError
from .errors import DivergedError as DivergedError
from .errors import RecipeError as RecipeError
from .errors import RunError as RunError
from .errors import Stopped as Stopped
from .interop import read as read
from .interop.nnx import functional as functional
from .machine.detect import detect as detect
from .machine.simulate import simulate as simulate
from .planner.planner import plan as plan
from .planner.plans import Plan as Plan
from .recipe import losses as losses
from .recipe import metrics as metrics
from .recipe.check import Finding as Finding
from .recipe.check import check as check
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
from .recipe.schedules import warmup as warmup
from .recipe.settings import load as load
from .recipe.task import Sum as Sum
from .recipe.task import Task as Task
from .study.document import Study as Study
from .study.find_batch import BatchSearch as BatchSearch
from .study.find_batch import find_batch as find_batch
from .study.find_lr import LrSearch as LrSearch
from .study.find_lr import find_lr as find_lr
from .study.move.transfer import Transfer as Transfer
from .study.move.transfer import transfer as transfer
from .study.sweep import sweep as sweep

__version__ = "0.1.0"
