"""What a table means is declared, or all its cells say it. One cell that differs never changes the task."""

import os

import numpy as np
import pytest

from chipwise.base.errors import DataError, RecipeError
from chipwise.data.pack.pack_settings import PackSettings
from chipwise.data.pack.packing import Packing
from chipwise.data.pack.recognise import listing_of
from chipwise.data.pack.tables import read_table
from refusals import refused


def rows(*labels, heading="file,label"):
    """The text of a table with a row for each label."""
    return "".join(f"{row}\n" for row in [heading, *(f"{i}.jpg,{label}" for i, label in enumerate(labels))])


def read(tmp_path, text, **declared):
    path = tmp_path / "labels.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_table(path, PackSettings(**declared))


DECIMALS = ("1.5", "2.5", "4.0")


@pytest.mark.parametrize(
    ("labels", "declared", "found", "classes"),
    [
        (("cat", "ant"), None, [1, 0], ("ant", "cat")),
        (("10", "9"), None, [1, 0], ("9", "10")),
        (("007", "7"), None, [0, 1], ("007", "7")),
        (DECIMALS, None, [1.5, 2.5, 4], ()),
        (("1e-05", "0.5", "2E3"), None, [1e-5, 0.5, 2e3], ()),
        (("x|y", "y|z"), None, [[1, 1, 0], [0, 1, 1]], ("x", "y", "z")),
        (("x;y", "y; z"), None, [[1, 1, 0], [0, 1, 1]], ("x", "y", "z")),
        (("31", "2.5"), "numbers", [31, 2.5], ()),
        (("31", "27"), "numbers", [31, 27], ()),
        (("1.5", "2.5", "1.5"), "classes", [0, 1, 0], ("1.5", "2.5")),
        (("100", "1e5", "9"), "classes", [0, 1, 2], ("100", "1e5", "9")),
        (("nan", "flat bread"), "classes", [1, 0], ("flat bread", "nan")),
        (("salt; pepper", "salt"), "classes", [1, 0], ("salt", "salt; pepper")),
        (("a|b", "a"), "classes", [1, 0], ("a", "a|b")),
        (("a|b", "a", ""), "several", [[1, 1], [1, 0], [0, 0]], ("a", "b")),
        (('"a, b"', ' "c"'), None, [0, 1], ("a, b", "c")),
        (("caf\u00e9", "cafe\u0301"), None, [0, 0], ("caf\u00e9",)),
        (("1_0", "2_0"), None, [0, 1], ("1_0", "2_0")),
    ],
)
def test_what_labels_are(tmp_path, labels, declared, found, classes):
    made = read(tmp_path, rows(*labels), labels=declared)
    np.testing.assert_array_equal(made.labels, np.asarray(found, made.labels.dtype))
    assert made.classes == classes and (made.labels.dtype == np.float32) == (not classes)
    kind = "numbers" if not classes else "several classes each" if made.labels.ndim > 1 else "classes"
    shown = classes or (f"{min(found):g} to {max(found):g}",)
    about = made.read[0].numbers
    assert about | {"kind": kind, "values": shown} == about


@pytest.mark.parametrize(
    ("labels", "line", "given", "offered"),
    [
        (("1", "2", "nan", "3"), 4, "nan", ("numbers", "classes")),
        (("1", "2", "2.5"), 4, "2.5", ("numbers", "classes")),
        (("1", "2", "1e5"), 4, "1e5", ("numbers", "classes")),
        (("1", "2", "NA"), 4, "NA", ("numbers", "classes")),
        (("a1b", "2c7", "1e5"), 4, "1e5", ("numbers", "classes")),
        (("cat", "nan", "dog"), 3, "nan", ("numbers", "classes")),
        (("cat", "7", "dog"), 3, "7", ("numbers", "classes")),
        ((*DECIMALS, "N/A"), 5, "N/A", ("numbers", "classes")),
        ((*DECIMALS, "7"), 5, "7", ("numbers", "classes")),
        ((*DECIMALS, ""), 5, "", ("numbers", "classes")),
        (("cat", "dog", "dog|cat"), 4, "dog|cat", ("several", "classes")),
        (("cat", "dog", "salt; pepper"), 4, "salt; pepper", ("several", "classes")),
        (("a|b", "a|c", ""), 4, "", ("several", "classes")),
    ],
)
def test_one_cell_of_another_kind(tmp_path, labels, line, given, offered):
    with refused(DataError, "table-labels-mixed", line=line, given=given) as caught:
        read(tmp_path, rows(*labels))
    one, other = (f"--labels {name}" for name in offered)
    assert f"chipwise pack {tmp_path}/labels.csv DST {one}, or {other}." in str(caught.value)
    if given:
        assert len(read(tmp_path, rows(*labels), labels="classes").files) == len(labels)


@pytest.mark.parametrize(
    ("labels", "declared", "line", "given"),
    [
        ((*DECIMALS, "nan"), None, 5, "nan"),
        ((*DECIMALS, "-inf"), None, 5, "-inf"),
        ((*DECIMALS, "1e39"), None, 5, "1e39"),
        (('"1,5"', '"2,5"'), None, 2, "1,5"),
        ((*DECIMALS, "cat"), "numbers", 5, "cat"),
        ((*DECIMALS, "1_0"), "numbers", 5, "1_0"),
        (("cat", ""), "classes", 3, ""),
        (("a|b", "a;c"), "several", 3, "a;c"),
        (("cat", '"dog\n1.jpg,cat\n2.jpg,dog"'), None, 3, "dog\n1.jpg,cat\n2.jpg,dog"),
    ],
)
def test_cells_that_have_no_meaning(tmp_path, labels, declared, line, given):
    with refused(DataError, "table-row", line=line, given=given):
        read(tmp_path, rows(*labels), labels=declared)


@pytest.mark.parametrize("at", range(3))
@pytest.mark.parametrize("cell", ['"cat', '"cat" dog'])
def test_a_quote_that_is_open(tmp_path, at, cell):
    labels = ["cat", "dog", "cat"]
    labels[at] = cell
    with refused(DataError, "table-no-csv", line=at + 2):
        read(tmp_path, rows(*labels))


LABEL = {"columns": {"label": "label"}}


@pytest.mark.parametrize(
    ("heading", "row", "declared", "labels", "classes"),
    [
        ("file,x,y", "a.jpg,0,1", {}, [[0, 1]], ("x", "y")),
        ("file,x,y", "a.jpg,0,1", {"labels": "numbers"}, [[0, 1]], ()),
        ("file,x,y", "a.jpg,7,-2.5", {}, [[7, -2.5]], ()),
        (",file,label", "3,a.jpg,5", LABEL, [0], ("5",)),
        ("Unnamed: 0,file,label", "3,a.jpg,5", LABEL | {"labels": "numbers"}, [5], ()),
        ("id,file,label", "3,a.jpg,5", LABEL, [0], ("5",)),
        ("photo,species", "a.jpg,ant", {"columns": {"image": "photo"}}, [0], ("ant",)),
        ("file,width,label,year", "a.jpg,640,ant,1999", LABEL, [0], ("ant",)),
        ("file,split", "a.jpg,odd", {"columns": {"label": "split"}}, [0], ("odd",)),
    ],
)
def test_columns_that_are_read(tmp_path, heading, row, declared, labels, classes):
    found = read(tmp_path, f"{heading}\n{row}\n", **declared)
    assert found.files == ["a.jpg"] and found.splits is None
    assert found.labels.tolist() == labels and found.classes == classes


@pytest.mark.parametrize(
    "heading",
    [
        ",file,label",
        "Unnamed: 0,file,age",
        "id,file,label",
        "file,width,label",
        "file,label,",
        "photo,width,year",
        "0.jpg,1,2",
    ],
)
def test_headings_that_do_not_say_what_is_read(tmp_path, heading):
    """Where files are, or which of several columns is the label."""
    at = heading.split(",").index("file") if "file" in heading else 0
    cells = ["1", "1"]
    cells.insert(at, "a.jpg")
    with refused(DataError, "table-row", line=1, given=heading.split(",")) as caught:
        read(tmp_path, f"{heading}\n{','.join(cells)}\n")
    assert "--columns image=" in str(caught.value)


@pytest.mark.parametrize("heading", ["file,label,label", "file,x,x", "file,file,x"])
def test_columns_of_one_name(tmp_path, heading):
    with refused(DataError, "table-row", line=1, given=heading.split(",")):
        read(tmp_path, f"{heading}\na.jpg,1,1\n")


def test_a_table_without_a_heading(tmp_path):
    text = "0.jpg,cat\n1.jpg,dog\n"
    with refused(DataError, "table-row", line=1, given=["0.jpg", "cat"]) as caught:
        read(tmp_path, text)
    assert "--heading file,label" in str(caught.value)
    found = read(tmp_path, text, heading="file, label")
    assert found.files == ["0.jpg", "1.jpg"] and found.classes == ("cat", "dog")
    with refused(DataError, "table-row", line=1, given=["0.jpg", "cat"]):
        read(tmp_path, text, heading="file,label,split")


@pytest.mark.parametrize("name", ["", "Unnamed: 0"])
def test_a_column_that_numbers_the_rows_is_no_label(tmp_path, name):
    """As pandas writes its index, also where nothing else is there."""
    with refused(DataError, "table-row", line=1):
        read(tmp_path, f"{name},file\n0,a.jpg\n1,b.jpg\n")


def test_one_of_several_columns_that_is_neither(tmp_path):
    """A 2 among columns of 0 and 1."""
    text = "file,sun,snow\na.jpg,1,0\nb.jpg,1,2\n"
    with refused(DataError, "table-row", line=3, given="2"):
        read(tmp_path, text)
    with refused(DataError, "table-row", given=["sun", "snow"]):
        read(tmp_path, text, labels="classes")
    assert read(tmp_path, text, labels="numbers").labels.dtype == np.float32
    with refused(DataError, "table-row", line=3, given="2"):
        read(tmp_path, text, labels="several")


@pytest.mark.parametrize(
    ("name", "content", "found"),
    [
        ("a.csv", b"file;label\n0.png;c0\n", "a table separated by semicolons"),
        ("a b.csv", b'"file"\t"label"\n0.png\tc0\n', "a table separated by tabs"),
        ("a.tsv", b"file\tlabel\r\n0.png\tc0\r\n", "a table separated by tabs"),
        ("labels", b"image_id,label\n0.png,c0\n", "a table separated by commas"),
        ("a.csv", "file,label\n0.png,c0\n".encode("utf-16"), "UTF-16 text"),
        ("a.csv", b"\xfe\xff" + "file,label\n".encode("utf-16-be"), "UTF-16 text"),
        ("labels", "file,label\n0.png,c0\n".encode("utf-16"), "UTF-16 text"),
    ],
)
def test_tables_in_another_form_are_converted_as_is_said(tmp_path, name, content, found):
    path = tmp_path / name
    path.write_bytes(content)
    with refused(DataError, "table-form", path=path, found=found) as caught:
        listing_of(path)
    facts = caught.value.facts
    assert os.system(f"{facts['command']} < {facts['source']} > {facts['to']}") == 0
    (made,) = set(tmp_path.glob("*.csv")) - {path}
    assert read_table(made).files == ["0.png"] if b"0" in content else made.exists()


def test_other_files_are_no_tables(tmp_path):
    for number, content in enumerate((b"PK\x03\x04;,", b"Hello, world\n", b"", b"a;b\n")):
        (tmp_path / f"{number}.x").write_bytes(content)
        with refused(DataError, "pack-source-unknown"):
            listing_of(tmp_path / f"{number}.x")


def test_names_without_the_suffix_of_their_files(tmp_path):
    (tmp_path / "0.png").write_bytes(b"x")
    (tmp_path / "labels.csv").write_text("image_id,label\n0,c0\n1,c1\n")
    with refused(DataError, "table-names-no-suffix", name="0", ending=".png"):
        listing_of(tmp_path / "labels.csv")


def test_a_declaration_of_what_is_no_table(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n')
    (tmp_path / "folder").mkdir()
    for src in (tmp_path / "folder", tmp_path / "a.jsonl", [(np.zeros((2, 2, 3), np.uint8), 1)]):
        for declared in ({"labels": "numbers"}, {"heading": "file,label"}):
            with refused(RecipeError, "pack-table-option"):
                Packing(src, tmp_path / "out", **declared)
    with refused(RecipeError, "pack-option", given="--labels ages"):
        Packing(tmp_path, tmp_path / "out", labels="ages")
