"""examples/*.ipynb run from top to bottom, and install nothing where chipwise is."""

import json
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.ipynb"))


def test_the_stories_are_there():
    assert len(EXAMPLES) == 4


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_a_notebook_is_clean_and_installs_only_where_chipwise_is_not(path):
    document = json.loads(path.read_text())
    code = [cell for cell in document["cells"] if cell["cell_type"] == "code"]
    assert document["nbformat"] == 4 and not any(cell["outputs"] or cell["execution_count"] for cell in code)
    first, *rest = ("".join(cell["source"]) for cell in code)
    condition, install = first.splitlines()[-2:]
    assert condition == 'if importlib.util.find_spec("chipwise") is None:'
    assert install.startswith('    %pip install --quiet "{FOLDER}') and not any(
        "%pip" in text for text in rest
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of the notebooks' own machinery
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_a_notebook_runs_from_top_to_bottom(path, tmp_path):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    if "torch" in path.stem:
        pytest.importorskip("torchax")
    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(notebook, timeout=900, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    pages = [output["data"]["text/html"] for output in shown if "text/html" in output.get("data", {})]
    assert pages and not any("<script" in page for page in pages)
