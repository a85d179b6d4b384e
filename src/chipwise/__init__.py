"""Write the training once, as plain functions; run it unchanged on any number of devices.

`import chipwise as cw`. See the README for the contract in twenty lines.
"""

from .devices.threads import fix_pool as _fix_pool

_fix_pool()  # before anything starts JAX's CPU client, which reads it once

from . import losses as losses
from . import metrics as metrics
from .check import Finding as Finding
from .check import check as check
from .devices.detect import detect as detect
from .devices.simulate import simulate as simulate
from .errors import CheckpointError as CheckpointError
from .errors import ChipwiseError as ChipwiseError
from .errors import DataError as DataError
from .errors import DeviceError as DeviceError
from .errors import DivergedError as DivergedError
from .errors import RecipeError as RecipeError
from .errors import RunError as RunError
from .errors import Stopped as Stopped
from .feed import augment as augment
from .feed import datasets as datasets
from .feed.folder import ImageFolder as ImageFolder
from .feed.packed import PackedFolder as PackedFolder
from .feed.sources import Arrays as Arrays
from .feed.sources import Lazy as Lazy
from .find.batch import BatchSearch as BatchSearch
from .find.batch import find_batch as find_batch
from .find.lr import LrSearch as LrSearch
from .find.lr import find_lr as find_lr
from .interop.nnx import functional as functional
from .packing.job import pack as pack
from .plan.planner import plan as plan
from .plan.plans import Plan as Plan
from .recipe import Recipe as Recipe
from .recipe import Validated as Validated
from .schedules import constant as constant
from .schedules import cosine as cosine
from .schedules import exponential as exponential
from .schedules import linear as linear
from .schedules import one_cycle as one_cycle
from .schedules import one_cycle_momentum as one_cycle_momentum
from .schedules import piecewise as piecewise
from .schedules import warmup as warmup
from .settings import load as load
from .study.document import Study as Study
from .study.sweep import sweep as sweep
from .task import Sum as Sum
from .task import Task as Task
from .train.loop import evaluate as evaluate
from .train.loop import fit as fit
from .train.optim import adam as adam
from .train.optim import adamw as adamw
from .train.optim import from_optax as from_optax
from .train.optim import sgd as sgd
from .train.restore import restore_run as restore_run
from .train.result import Result as Result
from .train.stepper import Stepper as Stepper
from .transfer import read as read
from .transfer.transfer import Transfer as Transfer
from .transfer.transfer import transfer as transfer

__version__ = "0.1.0"
