"""Claims about text sources."""

import json
import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from k3jax.data import sources
from k3jax.data.sources import DataError, open_documents


def texts(documents):
    return {documents.name(i): documents.text(i) for i in range(len(documents))}


def test_folder_is_read_recursively_in_order_of_relative_path(tmp_path):
    for name in ("b.txt", "a/z.py", "a/b/c.md", ".git/config", ".hidden", "__pycache__/x.pyc"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"text of {name}\n")
    (tmp_path / "empty.txt").touch()
    assert list(texts(open_documents(str(tmp_path))).items()) == [
        (name, f"text of {name}\n") for name in ("a/b/c.md", "a/z.py", "b.txt")
    ]


def test_glob_and_single_file(tmp_path):
    for name in ("x/1.txt", "x/2.py", "y/3.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert list(texts(open_documents(str(tmp_path / "**" / "*.txt")))) == ["x/1.txt", "y/3.txt"]
    assert texts(open_documents(str(tmp_path / "x" / "1.txt"))) == {"1.txt": "x/1.txt"}


def test_jsonl_records_are_documents_named_by_line(tmp_path):
    lines = ['{"text": "one"}', "", "\r", '{"text": "zwei ü\\n"}\r', '{"id": 3, "text": "3"}']
    (tmp_path / "d.jsonl").write_text("\n".join(lines))
    documents = open_documents(str(tmp_path))
    assert texts(documents) == {"d.jsonl:1": "one", "d.jsonl:4": "zwei ü\n", "d.jsonl:5": "3"}
    assert documents.text_bytes == len("onezwei ü\n3".encode())


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ('{"text": "cut of', "not a JSON object"),
        ("[1, 2]", "not a JSON object but list"),
        ("[" * 200_000, "not a JSON object"),
        ('{"content": "x"}', r"field 'text' \(data.text_field\) must be text, it is missing; fields: \['content'\]"),
        ('{"text": 7}', "it is int"),
        ('{"text": "\\ud800"}', "lone surrogate"),
    ],
)
def test_bad_jsonl_line_names_file_and_line(tmp_path, bad, reason):
    (tmp_path / "d.jsonl").write_text(f'{{"text": "ok"}}\n\n{bad}\n')
    with pytest.raises(DataError, match=rf"d\.jsonl:3: .*{reason}"):
        open_documents(str(tmp_path))


def test_bad_jsonl_line_beyond_what_is_checked_at_opening_names_its_line_when_read(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "_CHECKED_BYTES", 10)
    (tmp_path / "a.txt").write_text("more than ten bytes")
    (tmp_path / "d.jsonl").write_text('{"text": "ok"}\n{"text"\n')
    documents = open_documents(str(tmp_path))
    with pytest.raises(DataError, match=r"d\.jsonl:2"):
        documents.text(2)


def test_parquet_rows_are_documents_whatever_the_row_groups(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "_ROW_GROUP_CACHE_BYTES", 100)
    content = [f"document {i} " * (i + 1) for i in range(10)]
    pq.write_table(pa.table({"body": content, "id": range(10)}), tmp_path / "d.parquet", row_group_size=3)
    documents = open_documents(str(tmp_path), text_field="body")
    assert [documents.text(i) for i in reversed(range(10))] == content[::-1]
    assert documents.name(7) == "d.parquet[7]"


def test_bad_parquet_names_file_column_and_row(tmp_path):
    path = tmp_path / "d.parquet"
    pq.write_table(pa.table({"text": ["a", None], "id": [1, 2]}), path)
    with pytest.raises(DataError, match=r"d\.parquet, row 1: column 'text' is null"):
        open_documents(str(path))
    with pytest.raises(DataError, match=r"no column 'body'.*columns: \['text', 'id'\]"):
        open_documents(str(path), text_field="body")
    with pytest.raises(DataError, match="'id' must hold text, it holds int64"):
        open_documents(str(path), text_field="id")
    path.write_bytes(b"PAR1 not really")
    with pytest.raises(DataError, match=r"d\.parquet is not a readable Parquet file"):
        open_documents(str(path))


def test_text_that_is_not_utf8_is_refused_with_file_and_byte(tmp_path):
    (tmp_path / "good.txt").write_text("fine")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 au lait")
    with pytest.raises(DataError, match=r"latin\.txt is not UTF-8 text \(byte 3\)"):
        open_documents(str(tmp_path))


def test_too_little_or_no_text_is_refused_with_advice(tmp_path):
    with pytest.raises(DataError, match="does not exist; give 'stdlib'"):
        open_documents(str(tmp_path / "nowhere"))
    with pytest.raises(DataError, match="holds no text"):
        open_documents(str(tmp_path))
    (tmp_path / "empty.txt").touch()
    with pytest.raises(DataError, match="holds no text"):
        open_documents(str(tmp_path))
    (tmp_path / "a.txt").write_text("é" * 10)
    with pytest.raises(
        DataError, match=r"holds 20 bytes of text in 1 files, data.min_bytes asks for 21.*bigger folder"
    ):
        open_documents(str(tmp_path), min_bytes=21)
    assert open_documents(str(tmp_path), min_bytes=20).text_bytes == 20


def test_file_that_shrinks_while_in_use_is_an_error(tmp_path):
    (tmp_path / "a.txt").write_text("long enough")
    documents = open_documents(str(tmp_path))
    (tmp_path / "a.txt").write_text("short")
    with pytest.raises(DataError, match=r"a\.txt became shorter"):
        documents.text(0)


@pytest.mark.parametrize("line", ["a line of text, ü\n", "€"])
def test_long_text_file_is_cut_into_documents_that_add_up_to_it(tmp_path, monkeypatch, line):
    monkeypatch.setattr(sources, "_PIECE_BYTES", 1000)
    content = line * (5500 // len(line.encode()))
    (tmp_path / "a.txt").write_text(content)
    documents = open_documents(str(tmp_path))
    pieces = list(texts(documents).values())
    assert len(pieces) == 5
    assert "".join(pieces) == content
    assert list(texts(documents))[1] == "a.txt#1"
    if "\n" in line:
        assert all(piece.endswith("\n") for piece in pieces)


def test_split_is_complete_near_its_share_and_independent_of_other_files(tmp_path):
    def sides():
        documents = open_documents(str(tmp_path))
        train, validation = documents.split(validation_percent=10)
        assert sorted([*train, *validation]) == list(range(len(documents)))
        return {documents.name(int(i)) for i in train}, {documents.name(int(i)) for i in validation}

    (tmp_path / "m.jsonl").write_text("".join(json.dumps({"text": f"{i}"}) + "\n" for i in range(2000)))
    train, validation = sides()
    assert 150 < len(validation) < 250
    for i in range(20):
        (tmp_path / f"a{i}.txt").write_text("new")
    train_more, validation_more = sides()
    assert train < train_more
    assert validation <= validation_more


def test_split_with_an_empty_side_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("only one")
    with pytest.raises(DataError, match="no (validation|training) documents.*data.validation_percent"):
        open_documents(str(tmp_path)).split(5)


def test_files_hash_names_the_list_of_paths_and_sizes(tmp_path):
    (tmp_path / "a.txt").write_text("aaa")
    first = open_documents(str(tmp_path))
    assert open_documents(str(tmp_path)).files_hash == first.files_hash
    os.rename(tmp_path / "a.txt", tmp_path / "b.txt")
    renamed = open_documents(str(tmp_path)).files_hash
    (tmp_path / "b.txt").write_text("aaaa")
    assert len({first.files_hash, renamed, open_documents(str(tmp_path)).files_hash}) == 3


def test_stdlib_holds_python_files_only_and_counts_what_it_skips():
    documents = open_documents("stdlib", min_bytes=8_000_000)
    assert all(name.endswith(".py") and "-packages" not in name for name in documents.files)
    assert "ast.py" in documents.files
    assert not set(documents.skipped) & set(documents.files)
    assert sum(len(documents.text(i).encode()) for i in range(0, len(documents), 50)) > 0
    assert documents.text_bytes == documents.file_bytes
