"""Notebooks for Kaggle and Colab: install, write the recipe's file, train into a folder that outlives the
session."""

from __future__ import annotations

import json
import shlex
from typing import Any

from ..words.facts import fact
from .job import Job

RUNS = {"kaggle": "/kaggle/working", "colab": "/content/drive/MyDrive/chipwise"}
_EARLIER = """\
# The output of an earlier session, added as this one's input, goes on.
import glob, os, shutil
run = {run!r}
for earlier in glob.glob("/kaggle/input/**/" + os.path.basename(run), recursive=True)[:1]:
    if not os.path.exists(run):
        shutil.copytree(earlier, run)
"""
_DRIVE = """\
# Google Drive keeps the run when the session ends.
from google.colab import drive
drive.mount("/content/drive")
"""


def notebook(where: str, job: Job) -> str:
    """The text of an `.ipynb` file (nbformat 4.5) for `where`, "kaggle" or "colab"."""
    run = f"{RUNS[where]}/{job.name}"
    cells = [_cell("markdown", "\n\n".join(map(str, [*job.about, fact(f"launch-notebook-{where}")])))]
    cells.append(_cell("code", f"%%bash\npip install --quiet {shlex.join(job.packages)}"))
    cells.append(_cell("code", _DRIVE if where == "colab" else _EARLIER.format(run=run)))
    if job.file is not None:
        cells.append(_cell("code", f"%%writefile {job.file.name}\n{job.file.read_text(encoding='utf-8')}"))
    cells.append(_cell("code", f"%%bash\n{shlex.join(job.train(run))}"))
    cells.append(_cell("code", f"%%bash\n{shlex.join(['chipwise', 'report', run])}"))
    numbered = [{**cell, "id": f"chipwise-{number}"} for number, cell in enumerate(cells)]
    accelerator = {"accelerator": job.target.chip.kind} if where == "colab" else {}
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    document = {
        "cells": numbered,
        "metadata": {"kernelspec": kernel, **accelerator},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


def _cell(kind: str, source: str) -> dict[str, Any]:
    code: dict[str, Any] = {"execution_count": None, "outputs": []} if kind == "code" else {}
    return {"cell_type": kind, "metadata": {}, "source": source.splitlines(keepends=True), **code}
