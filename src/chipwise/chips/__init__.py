"""Figures of chips, names of targets, and prices.

`chips.csv` has a row for each chip, and `prices.csv` one for each offer. `slices.csv` has the
topologies of TPU slices, `generations.csv` the figures of GPUs by compute capability, and
`product_rates.csv` the measured rates of matrix products. `cloud_names.csv` says which form of a
card a cloud means, and `figure_units.csv` labels the figures with their units.
"""

from .catalogue import (
    CHIPS as CHIPS,
    Chip as Chip,
    find as find,
    named as named,
    peak_flops_per_device as peak_flops_per_device,
)
from .prices import Price as Price, cheapest as cheapest, prices_for as prices_for
from .targets import Target as Target
