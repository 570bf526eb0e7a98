"""Corpora: what counts as a document, and what is refused."""

import sysconfig
from pathlib import Path

import pytest

from hetero_megatron.data.corpus import Files
from hetero_megatron.errors import DataError


def test_the_standard_library_has_many_python_files_and_no_installed_package() -> None:
    corpus = Files.standard_library()
    assert len(corpus) > 400
    assert all(corpus.name(index).endswith(".py") for index in range(len(corpus)))
    assert not any("site-packages" in name or "__pycache__" in name for name in corpus.names)
    assert list(corpus.names) == sorted(corpus.names)


def test_a_document_is_the_file_and_its_size_is_known_without_reading() -> None:
    corpus = Files.standard_library()
    index = corpus.names.index("textwrap.py")
    content = (Path(sysconfig.get_path("stdlib")) / "textwrap.py").read_bytes()
    assert corpus.size(index) == len(content)
    assert corpus.read(index) == content


def test_a_folder_skips_empty_hidden_and_foreign_files(tmp_path: Path) -> None:
    for name in ("b.txt", "sub/a.txt", "site-packages/c.txt", ".git/d.txt", ".hidden.txt", "note.md"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    (tmp_path / "empty.txt").touch()
    assert Files.folder(tmp_path, (".txt",)).names == ("b.txt", "sub/a.txt")
    assert Files.folder(tmp_path).names == ("b.txt", "note.md", "sub/a.txt")


def test_listed_files_keep_their_order(tmp_path: Path) -> None:
    paths = [tmp_path / "z", tmp_path / "a"]
    for path in paths:
        path.write_text(path.name * 3)
    corpus = Files.listed(paths)
    assert [corpus.read(index) for index in range(len(corpus))] == [b"zzz", b"aaa"]


def test_a_missing_folder_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"corpus folder .*nowhere does not exist or is not a folder"):
        Files.folder(tmp_path / "nowhere")


def test_a_folder_without_documents_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    with pytest.raises(DataError, match="has no document: every file is missing, empty or excluded"):
        Files.folder(tmp_path)


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"corpus file .*gone\.txt does not exist or is not a file"):
        Files.listed([tmp_path / "gone.txt"])


def test_a_file_that_changed_since_opening_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("four")
    corpus = Files.folder(tmp_path)
    path.write_text("longer")
    with pytest.raises(DataError, match=r"has 6 bytes, but had 4 when the corpus was opened"):
        corpus.read(0)


def test_a_file_that_vanished_since_opening_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("four")
    corpus = Files.folder(tmp_path)
    path.unlink()
    with pytest.raises(DataError, match=r"document 0 .* cannot be read: No such file"):
        corpus.read(0)
