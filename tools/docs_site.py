"""What the documentation's site has beside `docs/`: the commands, as the command line describes them, and the
examples and measurements that pages link to. MkDocs calls this (`hooks` in mkdocs.yml).

A page links to `../examples/own_task.py` as one reads it in the repository. On the site that is a page too.
`::: cw.fit` becomes the name's signature and docstring; `members:` below it names methods to show.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
_LINK = re.compile(r"\]\(((?:\.\./)+)(benchmarks|examples)/([^)#]*)")
_BACK = re.compile(r"\]\(((?:\.\./)+)docs/")
_NAME = re.compile(r"^::: cw\.(\S+)\n(?: +members: (.*)\n)?", re.MULTILINE)


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages."""
    files.append(File.generated(config, "commands.md", content=commands()))
    pages = ROOT.joinpath("llms.txt").read_text(encoding="utf-8").replace("](docs/", "](")
    files.append(File.generated(config, "llms.txt", content=pages.replace(".md)", ".html)")))
    for folder, kinds in (("examples", ("py",)), ("benchmarks", ("md", "html", "svg", "png"))):
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

    def neighbour(link: re.Match[str]) -> str:
        up, folder, name = link.groups()
        return f"]({up.removeprefix('../')}{folder}/{name}{'.md' if name.endswith('.py') else ''}"

    if here.startswith("benchmarks/"):
        return _BACK.sub(lambda link: f"]({link[1]}", markdown)
    return _NAME.sub(_described, _LINK.sub(neighbour, markdown))


def _described(name: re.Match[str]) -> str:
    """What mkdocstrings reads, headed by the name that users type."""
    path, members = name.groups()
    options = [f"heading: cw.{path}", f"toc_label: '{path}'", *([f"members: {members}"] if members else [])]
    return "\n".join([f"::: chipwise.{path}", "    options:", *(f"      {o}" for o in options), "", ""])


def on_page_content(html: str, **_: Any) -> str:
    """Code wider than a telephone scrolls in its own box, which the keyboard reaches (see site.css)."""
    return html.replace("<pre><span></span>", '<pre tabindex="0"><span></span>')


def commands() -> str:
    """A page of every command's help, in the groups of the main one."""
    import typer

    from chipwise.cli import GROUPS, app
    from chipwise.words.facts import fact

    group = typer.main.get_command(app())
    parent = typer.Context(group, info_name="chipwise")
    lines = ["# Commands", "", "`chipwise COMMAND --help` prints the same.", ""]
    for title, names in GROUPS.items():
        lines += [f"## {fact(title)}", ""]
        for name in names:
            context = typer.Context(group.commands[name], info_name=name, parent=parent)  # type: ignore[attr-defined]
            context.terminal_width = 96
            lines += [f"### {name}", "", "```", context.get_help(), "```", ""]
    return "\n".join(lines)
