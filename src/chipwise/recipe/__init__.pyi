from . import losses as losses, metrics as metrics, schedules as schedules
from .adaptive import (
    adadelta as adadelta,
    adagrad as adagrad,
    adamax as adamax,
    asgd as asgd,
    nadam as nadam,
    radam as radam,
    rmsprop as rmsprop,
    rprop as rprop,
)
from .check import Finding as Finding
from .freezing import freeze as freeze
from .low_rank import lora as lora
from .muon import muon as muon
from .optimizers import adam as adam, adamw as adamw, from_optax as from_optax, sgd as sgd
from .recipe import Recipe as Recipe, Validated as Validated
from .task import Sum as Sum, Task as Task
from .trust_ratio import lamb as lamb, lars as lars
from .wrappers import grouped as grouped, layerwise as layerwise
