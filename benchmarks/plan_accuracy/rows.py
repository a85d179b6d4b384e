"""Published training throughputs, each with its recipe and target.

`published.csv` has the measurements with their sources: those of others, and from row 260 those of
`benchmarks/gpu.py`, of steps of chipwise's own recipes. Its other columns:

- `row`: its number, which never changes.
- `use`: `fit` for a row that plans may be fitted to, `held-out` for one that is never used in a fit, `apart`
  for a program that cannot be a recipe, with the reason in `apart`; it is not predicted. All rows of one
  family from one source have the same `use`, but for those from 273 on: they were predicted before they were
  met, so they are held out even beside older rows of their source.
- `family`: of nets. `program`: the kernels of the measured program: `xla`; `library`, a framework that calls
  vendors' libraries operation by operation or with a few fused ones; `kernels`, with hand-written attention
  or layers.
- `clock`: what it covered: `steps`; `evaluation`, steps and evaluation; `run`, these and start-up and
  compilation; `wall`, more than steps, but what is not stated, so a correct prediction is above it.
- `recipe`, `settings`, `eval_every`, `on`: the arguments of `chipwise plan`, without `eval_every` an
  evaluation after each epoch. Recipe files are in `recipes/`, or begin with `examples/`.
- `throughput`: empty for a row that is to be predicted before it is met.

Counts are global; `n_chips` are chips, each of which may be two devices of JAX.
"""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from pathlib import Path

from chipwise.chips.targets import Target, parse
from chipwise.recipe.recipe import Recipe
from chipwise.recipes.load import load

FOLDER = Path(__file__).parent
PUBLISHED = FOLDER / "published.csv"
CIFAR = 50_000  # training images of an epoch


@dataclass(frozen=True)
class Row:
    """A line of `published.csv`."""

    row: int
    use: str
    family: str
    program: str
    clock: str
    recipe: str
    settings: tuple[str, ...]
    eval_every: str
    on: str
    model: str
    dataset_input_shape: str
    global_batch: str
    precision: str
    device: str
    n_chips: float
    throughput: float
    unit: str
    kind: str
    source: str
    note: str
    apart: str

    @property
    def target(self) -> Target:
        return parse(self.on)

    @property
    def chips(self) -> str:
        """ "TPU" or "GPU", for a row that is not apart."""
        return self.target.chip.kind

    @property
    def origin(self) -> str:
        """The site or repository of `source`, without the path in it."""
        return "/".join(re.split(r"[ @]", self.source)[0].split("/")[2:5])

    @property
    def spec(self) -> str:
        """The recipe as an argument of `chipwise plan`, from the repository's root."""
        own = ".py" in self.recipe and not self.recipe.startswith("examples/")
        return f"benchmarks/plan_accuracy/recipes/{self.recipe}" if own else self.recipe

    @property
    def exact(self) -> bool:
        """Whether devices are asked to add in a fixed order. Over the hosts of GPUs and on TPUs that is
        another algorithm than the measured programs', which add within a host or along the links of the slice
        first. If a device has several replicas, they are added in turn in any case."""
        if not self.on:
            return True
        if self.chips == "GPU":
            return self.target.hosts == 1
        groups = self.target.devices // int(self.values.get("shards", 1))
        return groups == 1 or groups != int(self.values["replicas"])

    @property
    def command(self) -> str:
        settings = "".join(f" --set {setting}" for setting in self.settings)
        how = "" if self.exact else " --no-exact"
        often = f" --eval-every {self.eval_every}" if self.eval_every else ""
        return f"chipwise plan {self.spec}{settings}{how}{often} --on {self.on}"

    @property
    def covered(self) -> tuple[str, ...]:
        """The parts of a planned run that the clock covered, in the names of `Plan.seconds`."""
        more = {"evaluation": ("evaluate",), "run": ("evaluate", "start", "compile")}
        return "train", *more.get(self.clock, ())

    def load(self) -> Recipe:
        """The recipe. Raises the errors of `chipwise plan` for its settings."""
        spec = self.spec
        return load(str(FOLDER.parents[1] / spec) if ".py" in spec else spec, self.settings)

    @property
    def batch(self) -> int:
        return int(self.values["batch"])

    @property
    def values(self) -> dict[str, str]:
        """The `settings` by name."""
        return dict(setting.split("=") for setting in self.settings)

    @property
    def measured(self) -> float:
        """Examples (images or sequences) a second, of all devices."""
        if self.unit in ("images/s", "sequences/s", "examples/s"):
            return self.throughput
        if self.unit.startswith("tokens/s"):
            length = int(re.findall(r"seq (\d+)", self.dataset_input_shape)[0])
            return self.throughput * (self.n_chips if self.unit.endswith("chip") else 1.0) / length
        epochs = re.fullmatch(r"seconds, (\d+) epochs.*", self.unit)
        assert epochs is not None, f"row {self.row}: {self.unit}"
        return CIFAR * int(epochs[1]) / self.throughput

    @property
    def seconds(self) -> float:
        """The seconds of a measured step."""
        return self.batch / self.measured


def rows(use: str | None = None, chips: str | None = None, unmet: bool = False) -> list[Row]:
    """The rows with one `use` and one kind of `chips`, "TPU" or "GPU"; by default all. `unmet`: also those
    without a throughput yet."""
    with PUBLISHED.open(newline="", encoding="utf-8") as file:
        made = [_row(cells) for cells in csv.DictReader(file) if cells["throughput"] or unmet]
    some = [row for row in made if use in (None, row.use)]
    return some if chips is None else [row for row in some if row.on and row.chips == chips]


def _row(cells: dict[str, str]) -> Row:
    typed = {
        "row": int(cells["row"]),
        "settings": tuple(cells["settings"].split()),
        "n_chips": float(cells["n_chips"]),
        "throughput": float(cells["throughput"] or "nan"),
    }
    return Row(**{**cells, **typed})  # type: ignore[arg-type]
