from chipwise.atomic import replace_text
from chipwise.errors import DataError
from refusals import refused


def test_a_file_is_replaced_whole_in_folders_made_for_it(tmp_path):
    path = tmp_path / "a" / "b.txt"
    assert replace_text(path, "one\n", "page-unwritable") == path
    replace_text(path, "two\n", "page-unwritable")
    assert path.read_bytes() == b"two\n" and [p.name for p in path.parent.iterdir()] == ["b.txt"]


def test_what_cannot_be_written_says_where_to_write_instead(tmp_path):
    (tmp_path / "file").write_text("old")
    with refused(DataError, "picture-unwritable", path=tmp_path / "file" / "x", option="--picture"):
        replace_text(tmp_path / "file" / "x", "new", "picture-unwritable", option="--picture")
    assert (tmp_path / "file").read_text() == "old" and len(list(tmp_path.iterdir())) == 1
