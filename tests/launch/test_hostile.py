"""Hostile text in every field of every job file: it is refused, or a parser finds it where it belongs."""

import json
import re
import shlex
from dataclasses import replace

import pytest
import yaml

from chipwise.base.errors import RecipeError
from chipwise.base.facts import fact
from chipwise.base.figures import printable
from chipwise.chips.targets import parse
from chipwise.launch.launch_job import LaunchJob, check
from chipwise.launch.places import PLACES, place, write

PLAIN = "plain"
CONTROL = ["\n", "\r", "\r\n", "\t", "\0", "\x07", "\x0b", "\x0c", "\x1b[2J", "\x7f", "\x85", "\x9b31m"]
CONTROL += ["\u2028", "\u2029", "\u200b", "\u202e", "\u2066", "\ufeff", "\uffff", "\udc80", "\U000e0001"]
HOSTILE = [f"a{c}b: c" for c in CONTROL] + [
    "a\nRUN touch /evil",
    "a\n- x: y",
    "a\n#SBATCH --time=1",
    "a\\\nb",
    "a\u2028key: value",
    "a\x85key: value",
    "'",
    '"',
    "'; touch evil; '",
    '"; touch evil; "',
    "$(touch evil)",
    "`touch evil`",
    "$HOME",
    "${HOME}",
    "$$(HOME)",
    "${{ run.args }}",
    "a ${{ env.HOME }}",
    "{x}",
    "{{ job }}",
    "{% raw %}",
    "{{ 7*7 }}",
    "!cat",
    "%run x",
    "?x",
    "*",
    "[a]",
    "~",
    "&a",
    "*a",
    "!!python/none",
    "@x",
    "|",
    "> x",
    "a # b",
    "a: b",
    "- a",
    "---",
    "null",
    "yes",
    "1e3",
    "<<EOF",
    "a \\",
    "\\",
    "\\n",
    "\U0001f600",
    "ü",
    "<img src=x onerror=alert(1)>",
    "<!-- x",
    "]]>",
    "[x](javascript:y)",
    "$x$",
    "%s%n",
    "a" * 400,
    " a ",
]
TARGETS = {
    "skypilot": "v5e-8", "slurm": "h100:16", "gcloud": "v5e-16", "docker": "t4",
    "kaggle": "t4:2", "colab": "t4", "dstack": "t4",
}  # fmt: skip


def job(where: str, field: str, text: str, folder) -> LaunchJob:
    file = folder / "recipe.py"
    one = LaunchJob(
        name="chipwise-digits", target=parse(TARGETS[where]), words=("digits", "--set", "a=1"),
        packages=("chipwise", "jax"), bucket="s3://my-runs/a" if where == "dstack" else "gs://my-runs/a",
        about=(fact("launch-price-unknown"),),
    )  # fmt: skip
    named = folder / (text.replace("/", "|")[:200] + ".py")
    if field == "file" and text.isprintable():
        named.write_text("recipe = 1\n")
    file.write_text("recipe = 1\n")
    return replace(one, **{
        "package": {"packages": (text, "jax")},
        "setting": {"words": ("digits", "--set", text)},
        "attribute": {"words": (f"{file}:{text}",), "file": file},
        "file": {"words": (f"{named}:recipe",), "file": named},
        "data": {"data": folder / text.replace("/", "|")[:200]} if place(where).sends else {},
        "about": {"about": (fact("launch-job", recipe=text, target="t4"),)},
    }.get(field, {field: text}))  # fmt: skip


def shell(text: str) -> list[str]:
    return shlex.split(text, comments=True)


def leaves(value):
    """A parsed document, with every command of it parsed too."""
    if isinstance(value, dict):
        return {key: leaves(item) for key, item in value.items()}
    if isinstance(value, list):
        return [leaves(item) for item in value]
    return shell(value) if isinstance(value, str) and "chipwise" in value and "\n" in value else value


def expanded(words: list[str]) -> list[str]:
    """The words of a container's command, as Kubernetes reads them."""
    words = [re.sub(r"\$(\$|\(\w+\))", lambda m: "$" if m[1] == "$" else "EXPANDED", word) for word in words]
    return shell(words[2]) if words[0] == "sh" else words


def parsed(name: str, text: str):
    if name.endswith((".yaml", ".yml")):
        document = leaves(yaml.safe_load(text))
        if "spec" in document:
            pod = document["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
            pod["containers"][0]["command"] = expanded(pod["containers"][0]["command"])
        return document
    if name.endswith(".Dockerfile"):
        lines = [line.split(" ", 1) for line in text.split("\n") if line and not line.startswith("#")]
        assert not any(line.endswith("\\") for line in text.split("\n"))
        return [(word, json.loads(rest) if rest[0] == "[" else shell(rest)) for word, rest in lines]
    if name.endswith(".ipynb"):
        document = json.loads(text)
        try:
            import nbformat
        except ImportError:
            pass
        else:
            nbformat.validate(nbformat.from_dict(document))
        return [cell(one["cell_type"], "".join(one["source"])) for one in document["cells"]]
    return shell(text), [line for line in text.split("\n") if line.startswith("#SBATCH")]


def cell(kind: str, source: str):
    if kind == "markdown":
        assert not re.search(r"(?<!\\)(?:\\\\)*[<>`$\[\]&]", source)
        return re.sub(r"\\([^\w\s])", r"\1", source)
    magic, _, body = source.partition("\n")
    if magic.startswith("%%writefile"):
        assert re.fullmatch(r"%%writefile [\w.-]+", magic)
    return (magic, shell(body)) if magic == "%%bash" else (magic.startswith("%%"), body)


@pytest.mark.slow
@pytest.mark.drawn
@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("field", ["package", "zone", "setting", "attribute", "file", "data", "about"])
def test_text_stays_text(where, field, tmp_path):
    plain = {n: parsed(n, t) for n, t in write(place(where), job(where, field, PLAIN, tmp_path)).items()}
    kept = 0
    for text in HOSTILE:
        one = job(where, field, text, tmp_path)
        try:
            check(one)
            files = write(place(where), one)
        except RecipeError as error:
            if error.code == "launch-dstack-text":
                assert where == "dstack" and ("${{" in text or "$$" in text)
                continue
            assert error.code in ("unprintable", "launch-file-name")
            assert field != "about" and (field == "file" or not text.isprintable())
            continue
        kept += 1
        assert where != "dstack" or "${{" not in text or field in ("zone", "data", "about")
        for name, written in files.items():
            assert same(parsed(name, written), plain[name], text, field), (text, name)
    assert kept > (20 if field != "file" else 2)


def same(found, plain, text: str, field: str) -> bool:
    """Whether two documents differ only where one has the hostile text and the other the plain one."""
    if isinstance(plain, dict):
        pairs = list(zip(found.items(), plain.items(), strict=False))
        return len(found) == len(plain) and all(
            same(a, b, text, field) and same(x, y, text, field) for (a, x), (b, y) in pairs
        )
    if isinstance(plain, list | tuple):
        return len(found) == len(plain) and all(
            same(a, b, text, field) for a, b in zip(found, plain, strict=True)
        )
    if not isinstance(plain, str):
        return found == plain
    name = text.replace("/", "|")[:200] if field in ("file", "data") else text
    forms = {name, printable(name), re.sub(r"[^\w.-]", "_", name)}
    return any(found == plain.replace(PLAIN, form) for form in forms)
