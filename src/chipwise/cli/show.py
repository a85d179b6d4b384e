"""`chipwise show RECIPE`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import DataError, RecipeError
from . import options


def show(
    recipe: Annotated[str, typer.Argument(help="A built-in recipe (digits, mnist, ...) or path.py:name.")],
    examples: Annotated[int, typer.Option(min=1, metavar="N", help="Rows: training examples.")] = 8,
    copies: Annotated[int, typer.Option(min=0, metavar="N", help="Columns: epochs, from the first.")] = 8,
    out: Annotated[str | None, typer.Option(metavar="FILE.png", help="[NAME.png]")] = None,
    data: options.Data = None,
    synthetic: options.Synthetic = False,
    set_: options.Set = None,
) -> None:
    """Draw what a recipe does to its images, with the random keys of training.

    \b
    Examples:
      chipwise show cifar10-davidnet --out cifar.png
      chipwise show vit-s16 --data DIR --examples 4 --set seed=1
    """
    from PIL import Image

    from ..data.augment.gallery import gallery
    from ..recipe.settings import load

    made = load(recipe, set_ or (), data, synthetic)
    to = Path(out or f"{made.name}.png")
    if to.suffix.lower() not in Image.registered_extensions():
        raise RecipeError(
            f"--out {to}: '{to.suffix}' is no kind of picture; give a name such as {to.stem}.png."
        )
    page = gallery(made, examples, copies)
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        page.save(to)
    except OSError as error:
        reason = error.strerror or error
        raise DataError(
            f"{to}: the picture cannot be written there ({reason}). Give --out FILE.png."
        ) from None
    print(to)
