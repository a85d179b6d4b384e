"""Plans to fine-tune published models, on chips that one may own or rent: does it fit, how long, how dear.

    python benchmarks/published_models.py > benchmarks/published_models.md

`published_models/NAME/config.json` has what each model's `config.json` on https://huggingface.co states of
its sizes. A row is a plan of 1,000 steps: all weights, and adapters of rank 16. Nothing was measured.
"""

import time
from pathlib import Path

import jax

import chipwise as cw
from chipwise.base.errors import ChipwiseError
from chipwise.base.figures import byte_size, dollars, duration
from chipwise.deploy.fine_tuning import fine_tuning
from chipwise.planner.plans import Plan

FOLDER = Path(__file__).with_suffix("").relative_to(Path.cwd())
MODELS = {
    "Qwen3-0.6B": (None, 16),
    "Llama-3.2-1B": (None, 16),
    "Qwen3-8B": (None, 16),
    "bert-base-uncased": (None,),
    "vit-base-patch16-224": (None,),
    "gemma-3-270m": (None,),
}
"""The rank of the adapters of each plan. None trains all weights."""
TARGETS = ["t4", "rtx-3060", "rtx-4090", "v5e-8", "a100", "h100", "h100:8"]

ABOUT = """# Fine-tuning published models, planned

`python benchmarks/published_models.py`: JAX {jax}, 2 CPU cores without accelerator. A cell has the
memory of one device, the time of 1,000 steps with start and compilation, and the cheapest price on
demand. `no` has the memory that is needed, and the largest batch that fits. *First* is the time until
the first plan, *all* until the last, beside other work. Plans of adapters count the sums of an evaluation.
"""


def cell(plan: Plan) -> str:
    """The memory of a device, the wall time and the cheapest price of a plan, or the batch that fits."""
    if not plan.runs:
        largest = f", fits {plan.largest_batch}" if plan.largest_batch else ""
        needed = f"{byte_size(plan.memory.needed)}" if plan.memory else str(plan.problem)
        return f"no: {needed}{largest}"
    cheapest = plan.cheapest()
    price = f", {dollars(cheapest.usd.value)}" if cheapest else ""
    return f"{byte_size(plan.memory.needed)}, {duration(plan.wall_seconds.value)}{price}"


def main() -> None:
    print(ABOUT.format(jax=jax.__version__))
    print(f"| model | trained | {' | '.join(TARGETS)} | first | all |\n|{'---|' * (len(TARGETS) + 4)}")
    for name, ranks in MODELS.items():
        for rank in ranks:
            trained = "all" if rank is None else f"rank {rank}"
            began, ready = time.perf_counter(), []
            try:
                recipe = fine_tuning(str(FOLDER / name), rank=rank)
                plans = cw.plan(recipe, on=TARGETS, ready=lambda _: ready.append(time.perf_counter()))
            except ChipwiseError as error:
                print(f"| {name} | {trained} | {error}{' |' * (len(TARGETS) + 2)}", flush=True)
                continue
            cells = " | ".join(map(cell, plans))
            first, last = (f"{end - began:.0f} s" for end in (ready[0], ready[-1]))
            print(f"| {name} | {trained} | {cells} | {first} | {last} |", flush=True)


if __name__ == "__main__":
    main()
