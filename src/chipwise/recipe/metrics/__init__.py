"""Metrics from sums: of the whole set, whatever the batch and the number of devices.

Each function takes what a loss has at hand, one replica's batch or a single example, and returns a
`cw.Sum`. The library adds those over examples, replicas, devices and batches, and only then divides,
or calls the sum's `finish`. So F1 is that of the set and not the mean of F1s of batches, which is
another number. `docs/metrics.md` has them in a table, with their sums and how to write one's own.
"""

from .classes import accuracy as accuracy
from .classes import confusion as confusion
from .classes import exact_match as exact_match
from .classes import f1 as f1
from .classes import hamming as hamming
from .classes import precision as precision
from .classes import recall as recall
from .language import perplexity as perplexity
from .regression import mae as mae
from .regression import mse as mse
from .regression import r2 as r2
from .regression import rmse as rmse
