"""Files of lines: every line once whatever the parts, named by file and line, foreign files refused by name."""

import gzip
import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_megatron.data.line_files import LineFiles
from hetero_megatron.data.records import Counts, Policy, texts
from hetero_megatron.errors import DataError


def read(reader: LineFiles, policy: Policy = "stop", size: int = 2**20) -> tuple[list[str], Counts]:
    counts = Counts()
    return [text for shard in reader.shards(size) for _, text in texts(reader, shard, policy, counts)], counts


def jsonl(path: Path, rows: list[object]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("size", [1, 7, 20, 64, 10000])
@pytest.mark.parametrize("ending", ["\n", "\r\n"])
@pytest.mark.parametrize("last", [True, False])
def test_every_line_comes_once_and_in_order_whatever_the_size_of_parts(
    tmp_path: Path, size: int, ending: str, last: bool
) -> None:
    wanted = [f"{'long ' * (number % 5)}\u2028{number} ☃" for number in range(20)]
    text = ending.join(json.dumps({"text": each}, ensure_ascii=False) for each in wanted) + ending * last
    (tmp_path / "c.jsonl").write_bytes(text.encode())
    reader = LineFiles((str(tmp_path / "c.jsonl"),), "json")
    assert read(reader, size=size)[0] == wanted
    assert sum(shard.size for shard in reader.shards(size)) == len(text.encode())


@given(
    content=st.lists(st.sampled_from([b"a", b"bc", b"\n", b"\r\n", b" "])).map(b"".join),
    size=st.integers(1, 9),
)
def test_lines_keep_their_numbers_whatever_the_size_of_parts(content: bytes, size: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "c.txt"
        path.write_bytes(content)
        reader = LineFiles((str(path),), "text")
        found = [
            (reader.before(part) + raw.place, raw.text)
            for part in reader.shards(size)
            for raw in reader.read(part)
        ]
    lines = content.split(b"\n")
    wanted = lines if lines[-1] else lines[:-1]
    assert found == list(enumerate(line.removesuffix(b"\r") for line in wanted))


def test_several_files_are_read_one_after_another(tmp_path: Path) -> None:
    paths = tuple(jsonl(tmp_path / f"{name}.jsonl", [{"text": name}]) for name in "ba")
    assert read(LineFiles(paths, "json"))[0] == ["b", "a"]


def test_a_line_of_text_is_a_document_and_blank_ones_are_empty(tmp_path: Path) -> None:
    (tmp_path / "c.txt").write_bytes(b"\xef\xbb\xbfone\n\n two \r\nthree")
    found, counts = read(LineFiles((str(tmp_path / "c.txt"),), "text"))
    assert found == ["one", " two ", "three"]
    assert counts.empty == 1


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_an_array_of_objects_is_read_too(tmp_path: Path, suffix: str) -> None:
    content = b'\xef\xbb\xbf [\n{"text": "a"},\n{"text": "b"}\n]'
    path = tmp_path / f"c.json{suffix}"
    path.write_bytes(gzip.compress(content) if suffix else content)
    assert read(LineFiles((str(path),), "json"))[0] == ["a", "b"]


def test_a_compressed_file_is_read_as_one_part(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl.gz"
    path.write_bytes(gzip.compress(b"".join(b'{"text": "%d"}\n' % number for number in range(100))))
    reader = LineFiles((str(path),), "json")
    assert len(reader.shards(10)) == 1
    assert read(reader)[0] == [str(number) for number in range(100)]


def test_another_key_can_hold_the_text(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "c.jsonl", [{"body": "x", "text": None}])
    assert read(LineFiles((path,), "json", "body"))[0] == ["x"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "cut off', r"line 4 is not JSON: Unterminated string"),
        ("17", r'line 4 is a number \(17\), not an object with the key "text" \(text_key\)'),
        ("[" * 20000, r"line 4 is not JSON: maximum recursion"),
        ('{"text": 1' + "0" * 5000 + "}", r"line 4 is not JSON: Exceeds the limit"),
        (
            '{"text": "\\ud800"}',
            r"line 4 is not valid Unicode: character 1 of the text is half of a pair, U\+D800",
        ),
    ],
)
@pytest.mark.parametrize("size", [16, 10**6])
def test_a_bad_line_is_refused_by_number_or_left_out(
    tmp_path: Path, line: str, message: str, size: int
) -> None:
    good = '{"text": "good"}\n'
    (tmp_path / "c.jsonl").write_text(good * 2 + "\n" + line + "\n" + good)
    reader = LineFiles((str(tmp_path / "c.jsonl"),), "json")
    with pytest.raises(DataError, match=r"c\.jsonl " + message):
        read(reader, size=size)
    found, counts = read(reader, "skip", size)
    assert found == ["good"] * 3
    assert (counts.bad, counts.empty) == (1, 1)
    assert counts.first_bad.startswith(f"{tmp_path}/c.jsonl line 4 is")


def test_half_a_pair_is_replaced_if_asked(tmp_path: Path) -> None:
    (tmp_path / "c.jsonl").write_text('{"text": "a\\ud800b"}\n')
    found, counts = read(LineFiles((str(tmp_path / "c.jsonl"),), "json"), "replace")
    assert found == ["a\ufffdb"]
    assert counts.replaced == 1


def test_invalid_bytes_in_a_line_without_text_stay_bad(tmp_path: Path) -> None:
    (tmp_path / "c.jsonl").write_bytes(b'{"body": "\xff"}\n{"text": "a"}\n')
    found, counts = read(LineFiles((str(tmp_path / "c.jsonl"),), "json"), "replace")
    assert found == ["a"]
    assert "byte 11 of it is FF" in counts.first_bad
    assert 'there is no column "text"' in counts.first_bad


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            gzip.compress(b"x"),
            r"is a gzip file, and UTF-8 text was expected; name it .*c\.jsonl\.gz, or unpack it",
        ),
        (b"\x28\xb5\x2f\xfd....", "is a Zstandard file"),
        (b"PK\x03\x04....", "is a zip file"),
        (b"PAR1....", "is a parquet file, .* name it .parquet"),
        (
            '{"text": "a"}'.encode("utf-16"),
            r"is UTF-16 text \(it starts with FF FE\), .*; convert it to UTF-8",
        ),
        (b"\xfe\xff" + "{}".encode("utf-16-be"), r"is UTF-16 text \(it starts with FE FF\)"),
        ('{"text": "a"}'.encode("utf-16-le"), "is UTF-16 or UTF-32 text without a mark"),
    ],
)
def test_a_file_that_is_something_else_is_refused_by_name(
    tmp_path: Path, content: bytes, message: str
) -> None:
    (tmp_path / "c.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=r"c\.jsonl " + message):
        LineFiles((str(tmp_path / "c.jsonl"),), "json")


def test_damaged_compressed_files_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl.gz"
    path.write_text('{"text": "a"}')
    with pytest.raises(
        DataError, match=r"c\.jsonl\.gz is no gzip file, or a damaged one: Not a gzipped file"
    ):
        LineFiles((str(path),), "json")
    whole = gzip.compress(b'{"text": "a"}\n' * 100000, 1)
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"c\.jsonl\.gz is a damaged or incomplete gzip file"):
        read(LineFiles((str(path),), "json"))


def test_damaged_arrays_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    path.write_text('[{"text": "a"}')
    with pytest.raises(DataError, match=r"c\.json starts as a JSON array, but is not JSON"):
        read(LineFiles((str(path),), "json"))
    path.write_bytes(b'[{"text": "\xff"}]')
    with pytest.raises(
        DataError, match=r"c\.json is not UTF-8: byte 12 of it is FF; a JSON array is read whole"
    ):
        read(LineFiles((str(path),), "json"))
    path.write_text('[{"text": "a"}, 5]')
    with pytest.raises(DataError, match=r"c\.json element 1 \(counted from 0\) is a number \(5\)"):
        read(LineFiles((str(path),), "json"))


def test_a_file_that_is_gone_is_refused_by_name(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "c.jsonl", [{"text": "a"}])
    reader = LineFiles((path,), "json")
    shards = reader.shards(100)
    Path(path).unlink()
    with pytest.raises(DataError, match=r"c\.jsonl cannot be read: No such file"):
        list(reader.read(shards[0]))
    with pytest.raises(DataError, match=r"c\.jsonl cannot be read: No such file"):
        LineFiles((path,), "json")
