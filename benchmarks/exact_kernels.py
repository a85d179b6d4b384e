"""The predicted cost of exact programs on absent GPUs: products and steps, exact and not.

    python benchmarks/exact_kernels.py > benchmarks/exact_kernels.md      # needs chipwise[plan]

Exact programs do without Triton's products and atomic sums, whose bits depend on tuning and timing. Both are
compiled by the chip's own compiler, and timed as in plans: by efficiencies, so kernels that are slower than
their bytes and FLOPs suggest are not detected.
"""

import jax

import chipwise as cw
from chipwise.recipes.load import load

CASES = (("cifar10-davidnet", "f16"), ("vit-s16", "f16"), ("gpt2-124m", "f16"))
PRODUCTS = ("matmul", "convolution", "attention")


def figures(name, precision, target, exact):
    """Milliseconds of a step's costliest products, and of the step."""
    recipe = load(name, [f"precision={precision}", "replicas=1", "batch=64"], synthetic=True)
    (plan,) = cw.plan(recipe, on=[target], exact=exact)
    if plan.step_seconds is None:
        return plan.problem.code, plan.problem.code
    products = sum(kernel.seconds for kernel in plan.kernels if kernel.kind in PRODUCTS)
    return 1e3 * products, 1e3 * plan.step_seconds.value


def main():
    print("# Exact kernels\n")
    print("Milliseconds of a step of 64 examples on one GPU, by `chipwise plan`: the products among its")
    print(f"costliest kernels, and all of it. `python benchmarks/exact_kernels.py`, JAX {jax.__version__}.")
    print(
        "Times come from efficiencies: kernels slower than their bytes and FLOPs suggest are not detected.\n"
    )
    print("| recipe | target | products, exact | free | ratio | step, exact | free | ratio |")
    print("|---|---|---|---|---|---|---|---|")
    for name, precision in CASES:
        for target in ("a100", "t4"):
            pairs = [figures(name, precision, target, exact) for exact in (True, False)]
            cells = []
            for exact, free in zip(*pairs, strict=True):
                known = isinstance(exact, float) and isinstance(free, float)
                ratio = f"{exact / free:.3f}" if known else "-"
                cells += [f"{x:.1f}" if isinstance(x, float) else str(x) for x in (exact, free)] + [ratio]
            print(f"| {name}, {precision} | {target} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
