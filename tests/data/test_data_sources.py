from __future__ import annotations

import gzip
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from permission_stand_ins import unprivileged

from shoal.data import Corpus, DataConfig, prepare
from shoal.data.encoding import PIECE_BYTES, read_documents
from shoal.data.sources import find_files
from shoal.errors import DataError, MissingExtraError

Configure = Callable[..., DataConfig]


def documents_of(corpus: Corpus) -> set[bytes]:
    """The documents of a corpus of bytes, of which the last id is the end of a text."""
    *documents, rest = corpus.tokens.tobytes().split(b"\0")
    assert rest == b""
    return set(documents)


def test_a_text_file_is_read_as_its_bytes(tmp_path: Path, configure: Configure) -> None:
    (tmp_path / "poem").write_bytes(b"caf\xe9 and fish\r\n")
    assert documents_of(prepare(configure(tmp_path / "poem"))) == {b"caf\xe9 and fish\r\n"}


def test_a_folder_is_read_to_any_depth_in_the_order_of_its_paths(tmp_path: Path) -> None:
    for name in ["b.txt", "a/z.md", "a/c/x.py", "B.txt", "skip.png", ".hidden.txt", ".git/y.txt", "empty.py"]:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("" if "empty" in name else name)
    files = find_files([str(tmp_path)], [".txt", ".md", ".py"])
    assert [file.name for file in files] == ["B.txt", "a/c/x.py", "a/z.md", "b.txt"]


def test_the_suffixes_of_a_folder_can_be_chosen(tmp_path: Path, configure: Configure) -> None:
    (tmp_path / "a.c").write_text("int a;")
    (tmp_path / "b.txt").write_text("notes")
    assert documents_of(prepare(configure(tmp_path, suffixes=(".c",)))) == {b"int a;"}


def test_several_sources_are_read_one_after_another(tmp_path: Path, configure: Configure) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "one.txt").write_text("one")
    (tmp_path / "two.txt").write_text("two")
    (tmp_path / "three.jsonl").write_text('{"text": "three"}\n')
    sources = [tmp_path / name for name in ("folder", "two.txt", "three.jsonl")]
    assert documents_of(prepare(configure(sources))) == {b"one", b"two", b"three"}


def test_each_line_of_jsonl_is_a_document(tmp_path: Path, configure: Configure) -> None:
    rows = [{"body": text, "id": index} for index, text in enumerate(["one\ntwo", "fisch ß", ""])]
    (tmp_path / "a.jsonl").write_text("\n\n".join(json.dumps(row) for row in rows))
    corpus = prepare(configure(tmp_path / "a.jsonl", field="body"))
    assert documents_of(corpus) == {b"one\ntwo", "fisch ß".encode()}


def test_jsonl_may_begin_with_a_byte_order_mark_and_hold_bytes_that_are_not_utf_8(
    tmp_path: Path, configure: Configure
) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "caf\xe9"}\r\n')
    assert documents_of(prepare(configure(tmp_path / "a.jsonl"))) == {"caf\ufffd".encode()}


def test_each_row_of_parquet_is_a_document(tmp_path: Path, configure: Configure) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    texts = [f"row {row}" for row in range(3000)]
    table = pyarrow.table({"text": [*texts, None, ""], "n": list(range(3002))})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=700)
    assert documents_of(prepare(configure(tmp_path / "a.parquet"))) == {text.encode() for text in texts}


@pytest.mark.parametrize("dtype", ["uint8", "uint16", ">i4", "int64"])
def test_a_npy_file_is_read_as_ids(tmp_path: Path, configure: Configure, dtype: str) -> None:
    ids = np.arange(250, dtype=dtype)
    np.save(tmp_path / "ids.npy", ids)
    corpus = prepare(configure(tmp_path / "ids.npy", validation_fraction=0.1))
    assert isinstance(corpus.tokens, np.memmap)
    assert np.array_equal(corpus.tokens, ids)
    assert corpus.boundary(10) == 225  # validation is the tail


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "int32", "int64"])
def test_a_bin_file_is_read_as_ids_of_the_given_type(
    tmp_path: Path, configure: Configure, dtype: str
) -> None:
    ids = np.arange(50_000, 50_257).astype(dtype)
    ids.tofile(tmp_path / "ids.bin")
    corpus = prepare(configure(tmp_path / "ids.bin", dtype=dtype, tokenizer="ids:50257"))
    assert corpus.tokens.dtype == dtype
    assert np.array_equal(corpus.tokens, ids)


def test_the_tail_of_each_memory_map_is_validation(tmp_path: Path, configure: Configure) -> None:
    for name, first in (("a.npy", 0), ("b.npy", 100)):
        np.save(tmp_path / name, np.arange(first, first + 100))
    corpus = prepare(configure(tmp_path, suffixes=(".npy",), validation_fraction=0.2))
    parts = [range(80), range(100, 180), range(80, 100), range(180, 200)]
    assert corpus.tokens[np.arange(200)].tolist() == [one for part in parts for one in part]
    assert corpus.boundary(8) == 160


def test_the_standard_library_is_a_source_on_every_machine(configure: Configure) -> None:
    files = find_files(["stdlib"], [])
    names = [file.name for file in files]
    assert {"argparse.py", "json/decoder.py"} <= set(names)
    assert names == sorted(names)
    assert all(name.endswith(".py") for name in names)
    assert not any("site-packages" in name or "dist-packages" in name for name in names)
    corpus = prepare(configure("stdlib"))
    assert len(corpus.tokens) == sum(file.size + 1 for file in files)
    assert 0.01 < 1 - corpus.boundary(256) / len(corpus.tokens) < 0.15  # 5 % of documents, not of bytes


def test_a_long_file_is_read_in_pieces_that_end_with_a_line(tmp_path: Path) -> None:
    lines = [b"x" * (index % 5000) + b"\n" for index in range(3000)]
    (tmp_path / "long.txt").write_bytes(b"".join(lines) + b"no line end")
    [file] = find_files([str(tmp_path / "long.txt")], [])
    [document] = read_documents(file, "text")
    pieces = list(document.pieces)
    assert len(pieces) > 2
    assert all(piece.endswith(b"\n") for piece in pieces[:-1])
    assert max(map(len, pieces)) <= PIECE_BYTES + 5000
    assert b"".join(pieces) == (tmp_path / "long.txt").read_bytes()


# Bad input, by name


def test_a_missing_source_is_refused_with_the_nearest(tmp_path: Path, configure: Configure) -> None:
    (tmp_path / "corpus.txt").write_text("text")
    with pytest.raises(DataError, match=r"corpos\.txt' does not exist.*did you mean 'corpus\.txt'"):
        prepare(configure(tmp_path / "corpos.txt"))
    with pytest.raises(DataError, match="did you mean 'stdlib'"):
        prepare(configure("stdlb"))


def test_an_empty_file_is_refused(tmp_path: Path, configure: Configure) -> None:
    (tmp_path / "empty.txt").touch()
    with pytest.raises(DataError, match=r"empty\.txt' is empty"):
        prepare(configure(tmp_path / "empty.txt"))


def test_a_folder_with_nothing_to_read_is_refused_with_the_suffixes(
    tmp_path: Path, configure: Configure
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "photo.png").write_bytes(b"x")
    with pytest.raises(DataError, match="data") as caught:
        prepare(configure(tmp_path / "data"))
    assert ".jsonl" in caught.value.possible


def test_rows_without_any_text_are_refused(tmp_path: Path, configure: Configure) -> None:
    (tmp_path / "blank.jsonl").write_text('{"text": ""}\n')
    with pytest.raises(DataError, match=r"there is no text in .*blank\.jsonl"):
        prepare(configure(tmp_path / "blank.jsonl"))
    assert not list((tmp_path / "cache").glob("*.tmp"))


def test_a_pipe_is_refused(tmp_path: Path, configure: Configure) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="neither a file nor a folder"):
        prepare(configure(tmp_path / "pipe"))


@pytest.mark.parametrize("closed", ["file", "folder", "inner"])
def test_what_may_not_be_read_is_refused_by_name(
    public_path: Path, configure: Configure, closed: str
) -> None:
    inner = public_path / "folder" / "inner"
    inner.mkdir(parents=True)
    (inner / "secret.txt").write_text("secret")
    path = {"file": inner / "secret.txt", "folder": inner.parent, "inner": inner}[closed]
    path.chmod(0)
    source = path if closed == "file" else public_path / "folder"
    with unprivileged(), pytest.raises(DataError, match="cannot be read: Permission denied") as caught:
        prepare(configure(source, cache=public_path / "cache"))
    path.chmod(0o755)
    assert source.name in caught.value.given


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "line 2 of .* is not JSON"),
        ('{"txet": "a"}', "no text in the field 'text'.*did you mean 'txet'"),
        ('{"text": 5, "title": "a"}', "no text in the field 'text'"),
        ("[1, 2]", "no text in the field 'text'"),
        ("null", "no text in the field 'text'"),
    ],
)
def test_a_bad_line_of_jsonl_is_refused_by_its_number(
    tmp_path: Path, configure: Configure, line: str, complaint: str
) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "good"}\n' + line + "\n")
    with pytest.raises(DataError, match=complaint) as caught:
        prepare(configure(tmp_path / "a.jsonl"))
    assert "line 2" in caught.value.given


def test_bad_parquet_is_refused_by_name(tmp_path: Path, configure: Configure) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    (tmp_path / "a.parquet").write_text("not parquet at all")
    with pytest.raises(DataError, match=r"a\.parquet"):
        prepare(configure(tmp_path / "a.parquet"))
    parquet.write_table(pyarrow.table({"txt": ["a"], "text_length": [1]}), tmp_path / "b.parquet")
    with pytest.raises(DataError, match="did you mean 'txt'"):
        prepare(configure(tmp_path / "b.parquet"))


def test_parquet_without_the_package_names_the_extra(
    tmp_path: Path, configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.parquet").write_text("x")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtraError, match=r"shoal\[parquet\]"):
        prepare(configure(tmp_path / "a.parquet"))


@pytest.mark.parametrize(
    "array", [np.zeros((3, 4), dtype=int), np.zeros(5), np.array("text"), np.array([{}], dtype=object)]
)
def test_a_npy_file_that_holds_no_flat_integers_is_refused(
    tmp_path: Path, configure: Configure, array: np.ndarray
) -> None:
    np.save(tmp_path / "ids.npy", array)
    with pytest.raises(DataError, match=r"ids\.npy"):
        prepare(configure(tmp_path / "ids.npy"))


def test_a_file_that_is_not_npy_is_refused(tmp_path: Path, configure: Configure) -> None:
    (tmp_path / "ids.npy").write_text("just text")
    with pytest.raises(DataError, match=r"ids\.npy.*is not a \.npy file"):
        prepare(configure(tmp_path / "ids.npy"))


def test_a_bin_file_of_another_type_is_refused(tmp_path: Path, configure: Configure) -> None:
    (tmp_path / "ids.bin").write_bytes(b"12345")
    with pytest.raises(DataError, match=r"5 bytes long, which is not a whole number of uint16"):
        prepare(configure(tmp_path / "ids.bin"))


@pytest.mark.parametrize("wrong", [256, -1])
def test_an_id_that_the_tokenizer_does_not_have_is_refused(
    tmp_path: Path, configure: Configure, wrong: int
) -> None:
    np.save(tmp_path / "ids.npy", np.array([1, 2, wrong, 3]))
    with pytest.raises(DataError, match=f"holds the id {wrong}.*'bytes' has ids from 0 to 255"):
        prepare(configure(tmp_path / "ids.npy"))


def test_text_is_refused_by_a_tokenizer_of_ids(tmp_path: Path, configure: Configure) -> None:
    (tmp_path / "a.txt").write_text("1 2 3")
    with pytest.raises(DataError, match="does not read text"):
        prepare(configure(tmp_path / "a.txt", tokenizer="ids:10"))


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.txt.GZ", "a.zip"])
def test_a_compressed_file_is_not_read_as_text(tmp_path: Path, configure: Configure, name: str) -> None:
    (tmp_path / name).write_bytes(gzip.compress(b'{"text": "fish"}\n' * 99))
    with pytest.raises(DataError, match=f"{name}.*is compressed"):
        prepare(configure(tmp_path / name))


@pytest.mark.parametrize(
    ("name", "content", "place"),
    [
        ("a.txt", b"fish\ncaf\xe9 and fish\n", "its byte 8 is 0xe9"),
        ("a.md", "fish".encode("utf-16"), "its byte 0 is 0xff"),
        ("a.txt", "fish".encode("utf-16-le"), "its byte 1 is 0x00"),
        ("a.json", b'["caf\xe9"]', "its byte 5 is 0xe9"),
    ],
)
def test_prose_in_another_encoding_is_refused_by_name(
    tmp_path: Path, configure: Configure, name: str, content: bytes, place: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=f"{name}.*is no text in UTF-8: {place}"):
        prepare(configure(tmp_path / name))
