"""docs/feed.md's example of a data set that somebody has."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "feed.md"


@pytest.mark.slow
def test_the_example_of_a_data_set_with_the_batch_hook_trains(capsys):
    (example,) = re.findall(r"```python\n(import.*?)```", PAGE.read_text(), re.DOTALL)
    exec(compile(example, "feed.md", "exec"), {})
    assert float(capsys.readouterr().out.split()[-1]) > 0.9
