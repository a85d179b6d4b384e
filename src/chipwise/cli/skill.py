"""`chipwise skill`: a page for programs that type commands, and the schemas of their JSON output.

The page is the file `skill.md`. The schemas (JSON Schema 2020-12) are the files of `schemas/`.
"""

from __future__ import annotations

from pathlib import Path

from ..base import unknown
from .exit_codes import exit_codes
from .options import argument, taking

HERE = Path(__file__).parent


@taking
def skill(
    schema_: str | None = argument(
        "A document's `schema`: chipwise.plan/4.", "SCHEMA", default=None
    ),
) -> None:
    """Print a page for programs that type commands, or the JSON Schema of a command's --json.

    \b
    Examples:
      chipwise skill
      chipwise skill chipwise.plan/4
    """
    if schema_ is not None:
        print(schema(schema_))
        return
    print(HERE.joinpath("skill.md").read_text("utf-8") + exit_codes().replace("\b", "", 1))


def schema(name: str) -> str:
    """The JSON Schema of documents whose `schema` is `name`, such as "chipwise.plan/4".

    Raises `RecipeError` if there is none.
    """
    files = {
        f"chipwise.{f.stem.replace('-', '/')}": f
        for f in sorted(HERE.joinpath("schemas").glob("*.json"))
    }
    if name not in files:
        raise unknown("skill-schema", "schema", name, list(files))
    return files[name].read_text("utf-8").rstrip()
