"""Reports of runs made by hand, and what stands out in them."""

import run_folders as runs
from chipwise.explain.report.run_report import report


def whole(tmp_path, rows=None, **changes):
    """The document of a finished run."""
    rows = runs.usual() if rows is None else rows
    recipe = changes.pop("recipe", {})
    return report(runs.write(tmp_path / "run", rows, runs.finished(rows, **changes), [200], **recipe))


def codes(facts):
    return [told["code"] for told in facts]


def found(document, code):
    """The one finding of that code; `None` where it did not stand out."""
    of_code = [finding for finding in document["advice"] if finding["code"] == code]
    assert len(of_code) <= 1
    return of_code[0] if of_code else None


def typed(finding):
    """The commands and settings that a finding says to try."""
    return [told["command"] for told in finding["try"] if told["code"] == "try-command"]
