"""`cw.models.remat`: the values that a function keeps for its gradient. All else is computed again.

The blocks of `chipwise.models` mark their values by the names of MaxText (AI-Hypercomputer/maxtext,
`configs/base.yml`):

| name | value |
|---|---|
| `query_proj`, `key_proj`, `value_proj` | queries, keys and values, after rotary positions |
| `context` | what attention made of them, and what its kernel keeps for its gradient |
| `out_proj` | the product of `context` that is added to the block's input |
| `attended` | on GPUs, the sum of the block's input and attention, in GPT-2, ViT and BERT |
| `mlpwi` | the hidden layer before its activation; if gated, `mlpwi_0` (the gate), `mlpwi_1` |
| `summed` | on GPUs, in BERT, the sum that its block's last norm takes |
| `mlpwo` | what the hidden layer adds to the block's input |

Outside of a remat a mark has no effect: the compiled program is the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from ..base import unknown
from ..base.annotations import as_annotated
from .attention import saveable
from .attention_mask import SAVED

POLICIES = (
    "everything_saveable",
    "nothing_saveable",
    "dots_saveable",
    "dots_with_no_batch_dims_saveable",
)
"""The names of policies in `jax.checkpoint_policies`."""


@as_annotated
def remat(
    function: Callable[..., Any],
    policy: str | Sequence[str] = "dots_with_no_batch_dims_saveable",
    *,
    prevent_cse: bool = True,
) -> Callable[..., Any]:
    """`function` with `jax.checkpoint`: its gradient recomputes what `policy` does not save.

    *Arguments:*

    - `policy`: a name of `jax.checkpoint_policies`. `"nothing_saveable"` saves only the arguments.
      `"dots_with_no_batch_dims_saveable"` also saves products with parameters, and
      `"dots_saveable"` all products. The last two also save the outputs of `cw.models.attention`'s
      kernels. Or the names of the values to save, as a list or joined by `+`, such as
      `"query_proj+context"`. Blocks of chipwise mark `query_proj`, `key_proj`, `value_proj`,
      `context` (the outputs of attention's kernel), `out_proj`, `mlpwi` (of gated layers `mlpwi_0`
      and `mlpwi_1`) and `mlpwo`. Your own functions mark values by
      `jax.ad_checkpoint.checkpoint_name`.
    - `prevent_cse`: use False inside a loop, where it is not needed.

    *Returns* a function that, when called, raises `RecipeError` for a policy that is none of these.
    """
    if isinstance(policy, str) and policy in POLICIES:
        chosen = getattr(jax.checkpoint_policies, policy)
        if policy.startswith("dots"):
            chosen = jax.checkpoint_policies.save_from_both_policies(chosen, saveable)
        return jax.checkpoint(function, policy=chosen, prevent_cse=prevent_cse)
    names = policy.split("+") if isinstance(policy, str) else list(policy)
    chosen = jax.checkpoint_policies.save_only_these_names(*names)
    if SAVED in names:
        chosen = jax.checkpoint_policies.save_from_both_policies(chosen, saveable)
    kept = jax.checkpoint(function, policy=chosen, prevent_cse=prevent_cse)

    @functools.wraps(function)
    def checked(*args: Any, **options: Any) -> Any:
        known = sorted(_marked(jax.make_jaxpr(function)(*args, **options).jaxpr))
        for name in names:
            if name not in known:
                raise unknown(
                    "remat-policy",
                    "value or policy of jax.checkpoint_policies",
                    name,
                    (*known, *POLICIES),
                )
        return kept(*args, **options)

    return checked


def _marked(jaxpr: Any) -> set[str]:
    """The names of the marked values in a program."""
    made = [equation for one in inside(jaxpr) for equation in one.eqns]
    names = {equation.params["name"] for equation in made if equation.primitive.name == "name"}
    return names | {SAVED for equation in made if saveable(equation.primitive, **equation.params)}


def inside(jaxpr: Any) -> Iterator[Any]:
    """The jaxpr, and all jaxprs that its operations call."""
    yield jaxpr
    for equation in jaxpr.eqns:
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from inside(inner)
