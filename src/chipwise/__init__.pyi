"""The public names: what `cw.` shows, and what types see. `__init__.py` reads this list."""

from . import (
    augment as augment,
    compile as compile,
    data as data,
    deploy as deploy,
    interop as interop,
    machine as machine,
    models as models,
    planner as planner,
    recipe as recipe,
    run as run,
    study as study,
)
from .base import errors as errors
from .data import Arrays as Arrays, PackedFolder as PackedFolder, datasets as datasets
from .data.pack.packing import pack as pack
from .deploy.evaluation import evaluate as evaluate
from .deploy.export import export as export
from .deploy.model import result as result
from .deploy.predictions import predict as predict
from .deploy.pretrained import pretrained as pretrained
from .explain.display import compare as compare, report as report
from .interop import equinox as equinox, keras as keras, linen as linen, nnx as nnx, torch as torch
from .machine.detect import simulate as simulate
from .planner.ask import plan as plan
from .recipe import losses as losses, metrics as metrics, schedules as schedules
from .recipe.check import check as check
from .recipe.optimizers import adam as adam, adamw as adamw, from_optax as from_optax, sgd as sgd
from .recipe.recipe import Recipe as Recipe
from .recipe.schedules import one_cycle as one_cycle
from .recipe.task import Sum as Sum, Task as Task
from .recipes.load import load as load
from .run.fit import fit as fit
from .run.on import On as On
from .run.stepper import Stepper as Stepper
from .run.training_loop import training as training
from .study import referee as referee
from .study.find_lr import find_lr as find_lr
from .study.sweep import sweep as sweep
from .study.transfer import transfer as transfer

__version__: str
