"""What the documentation's site has beside `docs/`.

These are the commands, as the command line describes them, the fields of their JSON, as the schemas
do, and the examples and measurements that pages link to. MkDocs calls this (`hooks` in mkdocs.yml).

A page links to `../examples/own_task.py` as one reads it in the repository. On the site that is a page too.
`::: cw.fit` becomes the name's signature and docstring; `members:` below it names methods to show.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.structure.files import Files

ROOT = Path(__file__).parents[1]
_LINK = re.compile(r"\]\(((?:\.\./)+)(benchmarks|examples)/([^)#]*)")
_BACK = re.compile(r"\]\(((?:\.\./)+)docs/")
_NAME = re.compile(r"^::: cw\.(\S+)\n(?: +members: (.*)\n)?", re.MULTILINE)


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, "commands.md", content=commands()))
    files.append(File.generated(config, "json.md", content=json_fields()))
    pages = ROOT.joinpath("llms.txt").read_text(encoding="utf-8").replace("](docs/", "](")
    files.append(File.generated(config, "llms.txt", content=pages.replace(".md)", ".html)")))
    for folder, kinds in (("examples", ("py", "ipynb")), ("benchmarks", ("md", "html", "svg", "png"))):
        for path in sorted(p for kind in kinds for p in (ROOT / folder).rglob(f"*.{kind}")):
            name = path.relative_to(ROOT).as_posix()
            if path.suffix == ".py":
                text = f"# {path.name}\n\n```python\n{path.read_text(encoding='utf-8')}```\n"
                files.append(File.generated(config, f"{name}.md", content=text))
            else:
                files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links between `docs/` and its neighbours, as they lie on the site: there `docs/` is the root."""
    here = page.file.src_uri

    beside = here.startswith("benchmarks/")

    def neighbour(link: re.Match[str]) -> str:
        up, folder, name = link.groups()
        up = up if beside else up.removeprefix("../")
        return f"]({up}{folder}/{name}{'.md' if name.endswith('.py') else ''}"

    markdown = _LINK.sub(neighbour, markdown)
    if beside:
        return _BACK.sub(lambda link: f"]({link[1]}", markdown)
    return _NAME.sub(_described, markdown.replace("](../llms.txt)", "](llms.txt)"))


def _described(name: re.Match[str]) -> str:
    """What mkdocstrings reads, headed by the name that users type."""
    path, members = name.groups()
    options = [f"heading: cw.{path}", f"toc_label: '{path}'", *([f"members: {members}"] if members else [])]
    return "\n".join([f"::: chipwise.{path}", "    options:", *(f"      {o}" for o in options), "", ""])


def on_page_content(html: str, **_: Any) -> str:
    """Code and tables wider than a telephone scroll in boxes that the keyboard reaches (site.css)."""
    html = html.replace("<pre><span></span>", '<pre tabindex="0"><span></span>')
    html = html.replace("<table>", '<div class="scrolls" tabindex="0"><table>')
    return html.replace("</table>", "</table></div>")


def commands() -> str:
    """A page of every command's help, in the groups of the main one; then those that it leaves out."""
    import typer

    from chipwise.base.facts import fact
    from chipwise.cli import COMMANDS, UNLISTED, app

    group = typer.main.get_command(app())
    parent = typer.Context(group, info_name="chipwise")
    lines = ["# Commands", "", "`chipwise COMMAND --help` prints the same.", ""]
    parts = {str(fact(title)): names for title, names in COMMANDS.items()} | {"For other programs": UNLISTED}
    for title, names in parts.items():
        lines += [f"## {title}", ""]
        for name in names:
            context = typer.Context(group.commands[name], info_name=name, parent=parent)  # type: ignore[attr-defined]
            context.terminal_width = 96
            lines += [f"### {name}", "", "```", context.get_help(), "```", ""]
    return "\n".join(lines)


def json_fields() -> str:
    """A page of every document that `--json` prints, and its fields."""
    from chipwise.cli.skill import HERE

    lines = [
        "# JSON",
        "",
        "`chipwise skill SCHEMA` prints the JSON Schema of each, with the fields of its parts.",
        "",
    ]
    for file in sorted(HERE.joinpath("schemas").glob("*.json")):
        schema = json.loads(file.read_text(encoding="utf-8"))
        lines += [f"## {schema['$id']}", "", f"{schema['title']}.", "", "| field | content |", "|---|---|"]
        for name, field in schema["properties"].items():
            optional = "" if name in schema["required"] else " (not always there)"
            lines.append(f"| `{name}`{optional} | {field['description'].replace('|', '&#124;')} |")
        lines.append("")
    return "\n".join(lines)
