"""Text to tokens on disk: the same files for any number of workers and interruptions."""

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from hetero_megatron.data.corpus import Files
from hetero_megatron.data.line_files import LineFiles
from hetero_megatron.data.part import unwritable
from hetero_megatron.data.prepare import Progress, fingerprint, prepare
from hetero_megatron.data.prepared import Sidecar, open_prepared
from hetero_megatron.data.records import Reader
from hetero_megatron.data.saved import open_saved
from hetero_megatron.data.tables import ParquetFiles
from hetero_megatron.data.tokenizer import ByteTokenizer
from hetero_megatron.data.whole_files import WholeFiles
from hetero_megatron.errors import DataError
from tests.data.test_tables import parquet, saved

TEXTS = [f"document {number} " + "x" * (number * 7 % 40) for number in range(60)]
OUTPUTS = ("bin", "idx", "json", "origins")


def corpus(path: Path, texts: list[str] = TEXTS) -> LineFiles:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return LineFiles((str(path),), "json")


def contents(prefix: Path) -> list[bytes]:
    return [Path(f"{prefix}.{suffix}").read_bytes() for suffix in OUTPUTS]


def quiet(text: str) -> None:
    """Say nothing."""


def test_documents_come_in_the_order_of_the_source_whatever_the_workers_and_parts(tmp_path: Path) -> None:
    reader = corpus(tmp_path / "c.jsonl")
    found = []
    for name, workers, size in (("a", 1, 10**6), ("b", 1, 100), ("c", 3, 100), ("d", 2, 30)):
        prepare(reader, ByteTokenizer(), tmp_path / name, workers=workers, shard_bytes=size, say=quiet)
        found.append(contents(tmp_path / name))
    assert found[1:] == found[:-1]
    documents = open_prepared(tmp_path / "c", 257)
    assert [ByteTokenizer().decode(documents.tokens(index)).decode() for index in range(60)] == TEXTS
    assert not list(tmp_path.glob("*.parts"))


def test_a_document_is_named_by_its_line_also_behind_empty_and_bad_ones(tmp_path: Path) -> None:
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    first.write_text('{"text": ""}\n{"text": "one"}\n\n{"text": 5}\n{"text": "two"}\n')
    second.write_text('{"text": null}\n{"text": "three"}\n')
    reader = LineFiles((str(first), str(second)), "json")
    made = prepare(reader, ByteTokenizer(), tmp_path / "out", "skip", shard_bytes=16, say=quiet)
    documents = open_prepared(tmp_path / "out", 257)
    names = [documents.name(index) for index in range(3)]
    assert names == [f"{first} line 2", f"{first} line 5", f"{second} line 2"]
    counts = made.counts
    assert (counts.documents, counts.tokens, counts.empty, counts.bad) == (3, 14, 2, 2)
    assert str(counts).startswith("3 documents, 14 tokens; left out: 2 empty, 2 bad (the first: ")
    assert [(file.name, file.documents) for file in made.files] == [(str(first), 2), (str(second), 1)]


def test_whole_files_are_documents_with_their_names(tmp_path: Path) -> None:
    for number in range(7):
        (tmp_path / f"{number}.txt").write_text(f"text {number}")
    reader = WholeFiles(Files.folder(tmp_path, (".txt",)))
    for size in (1, 15, 1000):
        prepare(reader, ByteTokenizer(), tmp_path / f"out{size}", shard_bytes=size, say=quiet)
        documents = open_prepared(tmp_path / f"out{size}", 257)
        assert [documents.name(index) for index in range(7)] == [str(tmp_path / f"{n}.txt") for n in range(7)]


def test_parts_are_a_mebibyte_of_small_corpora(tmp_path: Path) -> None:
    reader = corpus(tmp_path / "c.jsonl", ["x" * 2**19] * 5)
    seen: list[Progress] = []
    prepare(reader, ByteTokenizer(), tmp_path / "out", workers=1, say=quiet, progress=seen.append)
    assert len({each.done for each in seen}) >= 3


@pytest.mark.parametrize("kind", ["parquet", "saved"])
def test_tables_become_tokens_with_rows_as_names(tmp_path: Path, kind: str) -> None:
    columns = {"text": ["" if number in (3, 17) else text for number, text in enumerate(TEXTS)]}
    reader: Reader = (
        ParquetFiles(
            (parquet(tmp_path / "c.parquet", columns, 7), parquet(tmp_path / "d.parquet", columns, 9))
        )
        if kind == "parquet"
        else open_saved(saved(tmp_path / "c.parquet", columns), "train", "text")
    )
    made = prepare(reader, ByteTokenizer(), tmp_path / "out", workers=3, shard_bytes=300, say=quiet)
    documents = open_prepared(tmp_path / "out", 257)
    kept = [(number, text) for number, text in enumerate(columns["text"]) if text]
    wanted = [(f"{tmp_path / 'c.parquet'} row {number} (counted from 0)", text) for number, text in kept]
    if kind == "parquet":
        wanted += [(name.replace("c.parquet", "d.parquet"), text) for name, text in wanted]
    names = [documents.name(index) for index in range(len(documents.lengths))]
    texts = [
        ByteTokenizer().decode(documents.tokens(index)).decode() for index in range(len(documents.lengths))
    ]
    assert list(zip(names, texts, strict=True)) == wanted
    assert made.counts.empty == (4 if kind == "parquet" else 2)


def test_progress_reaches_the_size_of_the_source(tmp_path: Path) -> None:
    seen: list[Progress] = []
    reader = corpus(tmp_path / "c.jsonl")
    made = prepare(
        reader, ByteTokenizer(), tmp_path / "out", workers=2, shard_bytes=500, say=quiet, progress=seen.append
    )
    size = (tmp_path / "c.jsonl").stat().st_size
    assert seen[-1] == Progress(size, size, 60, made.counts.tokens)
    assert [each.done for each in seen] == sorted(each.done for each in seen)


def test_what_is_there_already_is_not_made_again(tmp_path: Path) -> None:
    reader = corpus(tmp_path / "c.jsonl")
    made = prepare(reader, ByteTokenizer(), tmp_path / "out", say=quiet)
    before = (tmp_path / "out.bin").stat().st_mtime_ns
    assert prepare(reader, ByteTokenizer(), tmp_path / "out", say=quiet) == made
    assert (tmp_path / "out.bin").stat().st_mtime_ns == before


def test_another_source_policy_or_time_of_change_has_another_fingerprint(tmp_path: Path) -> None:
    reader = corpus(tmp_path / "c.jsonl")
    marks = {fingerprint(reader, ByteTokenizer(), "stop"), fingerprint(reader, ByteTokenizer(), "skip")}
    marks.add(fingerprint(LineFiles(reader.paths, "json", "body"), ByteTokenizer(), "stop"))
    os.utime(tmp_path / "c.jsonl", (1, 1))
    marks.add(fingerprint(reader, ByteTokenizer(), "stop"))
    assert len(marks) == 4


def test_another_corpus_is_not_replaced_unless_asked(tmp_path: Path) -> None:
    prepare(corpus(tmp_path / "a.jsonl"), ByteTokenizer(), tmp_path / "out", say=quiet)
    other = corpus(tmp_path / "b.jsonl", ["other"])
    with pytest.raises(
        DataError, match=r"out\.bin exists and was made from another source .* or overwrite it"
    ):
        prepare(other, ByteTokenizer(), tmp_path / "out", say=quiet)
    assert prepare(other, ByteTokenizer(), tmp_path / "out", say=quiet, overwrite=True).counts.documents == 1
    (tmp_path / "out.json").unlink()
    with pytest.raises(DataError, match=r"out\.bin exists and is not ours; choose another output"):
        prepare(other, ByteTokenizer(), tmp_path / "out", say=quiet)


RUN = """
import sys, time
from hetero_megatron.data.line_files import LineFiles
from hetero_megatron.data.prepare import prepare
from hetero_megatron.data.tokenizer import ByteTokenizer

class Slow(ByteTokenizer):
    def encode(self, document):
        time.sleep({seconds})
        return super().encode(document)

prepare(LineFiles((sys.argv[1],), "json"), Slow(), sys.argv[2], workers=2, shard_bytes=300)
"""


def run(source: Path, output: Path, seconds: float) -> "subprocess.Popen[str]":
    script = textwrap.dedent(RUN).format(seconds=seconds)
    return subprocess.Popen([sys.executable, "-c", script, source, output], stdout=subprocess.PIPE, text=True)


def test_a_preparation_that_was_killed_goes_on_and_gives_the_same_files(tmp_path: Path) -> None:
    reader = corpus(tmp_path / "c.jsonl")
    prepare(reader, ByteTokenizer(), tmp_path / "whole", shard_bytes=300, say=quiet)
    killed = run(tmp_path / "c.jsonl", tmp_path / "out", 0.02)
    parts = tmp_path / "out.parts"
    deadline = time.monotonic() + 30
    while len(list(parts.glob("*.json"))) < 2:
        assert time.monotonic() < deadline, "no part was finished"
        time.sleep(0.005)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    done = {
        path.name: path.stat().st_mtime_ns
        for path in parts.glob("*.ids")
        if path.with_suffix(".json").exists()
    }
    assert 2 <= len(done) < len(reader.shards(300))
    assert not (tmp_path / "out.bin").exists()
    said: list[str] = []
    prepare(reader, ByteTokenizer(), tmp_path / "out", shard_bytes=300, say=said.append)
    assert said == [
        f"{tmp_path / 'c.jsonl'}: {len(done)} of {len(reader.shards(300))} parts are there from an earlier attempt"
    ]
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert not parts.exists()


def test_parts_that_are_kept_are_not_made_again_and_damaged_ones_are(tmp_path: Path) -> None:
    reader = corpus(tmp_path / "c.jsonl", [*TEXTS, "\ud800"])
    with pytest.raises(DataError, match="line 61 is not valid Unicode"):
        prepare(reader, ByteTokenizer(), tmp_path / "out", workers=1, shard_bytes=300, say=quiet)
    parts = tmp_path / "out.parts"
    marks = sorted(parts.glob("*.json"))
    assert len(marks) > 5
    marks[0].with_suffix(".ids").write_bytes(b"cut")
    marks[1].write_text("{}")
    marks[2].write_text("")
    said: list[str] = []
    with pytest.raises(DataError, match="line 61"):
        prepare(reader, ByteTokenizer(), tmp_path / "out", workers=1, shard_bytes=300, say=said.append)
    assert f"{len(marks) - 3} of {len(marks) + 1} parts are there" in said[0]


def test_parts_of_another_source_are_thrown_away(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="line 61"):
        prepare(
            corpus(tmp_path / "c.jsonl", [*TEXTS, "\ud800"]),
            ByteTokenizer(),
            tmp_path / "out",
            shard_bytes=300,
        )
    said: list[str] = []
    other = corpus(tmp_path / "c.jsonl", list(reversed(TEXTS)))
    prepare(other, ByteTokenizer(), tmp_path / "out", shard_bytes=300, say=said.append)
    assert said == []
    assert (
        open_prepared(tmp_path / "out", 257).tokens(0).tolist() == ByteTokenizer().encode(TEXTS[-1]).tolist()
    )


def test_a_source_that_changes_meanwhile_is_refused(tmp_path: Path) -> None:
    reader = corpus(tmp_path / "c.jsonl")

    def change(progress: Progress) -> None:
        os.utime(tmp_path / "c.jsonl", (1, 1))

    with pytest.raises(
        DataError, match=r"c\.jsonl changed while it was turned into tokens; run the same command"
    ):
        prepare(reader, ByteTokenizer(), tmp_path / "out", say=quiet, progress=change)
    assert not (tmp_path / "out.bin").exists()


def test_a_source_that_is_gone_is_refused(tmp_path: Path) -> None:
    reader = corpus(tmp_path / "c.jsonl")
    (tmp_path / "c.jsonl").unlink()
    with pytest.raises(DataError, match=r"c\.jsonl cannot be read: No such file"):
        prepare(reader, ByteTokenizer(), tmp_path / "out", say=quiet)


def test_a_second_process_waits_and_takes_what_the_first_has_made(tmp_path: Path) -> None:
    reader = corpus(tmp_path / "c.jsonl")
    parts = tmp_path / "out.parts"
    parts.mkdir()
    said: list[str] = []
    with (parts / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        other = threading.Thread(
            target=lambda: prepare(reader, ByteTokenizer(), tmp_path / "out", say=said.append)
        )
        other.start()
        deadline = time.monotonic() + 10
        while not said:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        prepare(reader, ByteTokenizer(), tmp_path / "first", say=quiet)
        for suffix in OUTPUTS:
            os.replace(tmp_path / f"first.{suffix}", tmp_path / f"out.{suffix}")
        before = (tmp_path / "out.bin").stat().st_mtime_ns
        (parts / "lock").unlink()
    other.join()
    assert said == [f"waiting for another process that prepares {tmp_path / 'out'}"]
    assert (tmp_path / "out.bin").stat().st_mtime_ns == before


def test_many_processes_that_want_the_same_pair_make_it_once_and_leave_nothing_behind(tmp_path: Path) -> None:
    reader = corpus(tmp_path / "c.jsonl")
    (tmp_path / "out").mkdir()
    pids = []
    for _ in range(4):
        pid = os.fork()
        if not pid:
            code = 1
            try:
                made = prepare(
                    reader, ByteTokenizer(), tmp_path / "out" / "o", workers=1, shard_bytes=900, say=quiet
                )
                code = 0 if made.counts.documents == 60 else 2
            finally:
                os._exit(code)
        pids.append(pid)
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids] == [0] * 4
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "o.bin",
        "o.idx",
        "o.json",
        "o.origins",
    ]


def test_a_folder_that_cannot_be_written_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"file.* cannot be written: (Not a directory|File exists)"):
        prepare(corpus(tmp_path / "c.jsonl"), ByteTokenizer(), tmp_path / "file" / "out", say=quiet)


@pytest.mark.parametrize("limit", [1000, 3500])
def test_a_full_disk_is_told_and_finished_parts_are_kept(tmp_path: Path, limit: int) -> None:
    """A limit of file sizes stands for a full disk: parts are smaller than the second limit, the whole is not."""
    corpus(tmp_path / "c.jsonl")
    script = textwrap.dedent("""
        import resource, signal, sys
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]), int(sys.argv[3])))
        from hetero_megatron.data.line_files import LineFiles
        from hetero_megatron.data.prepare import prepare
        from hetero_megatron.data.tokenizer import ByteTokenizer
        from hetero_megatron.errors import DataError
        try:
            prepare(LineFiles((sys.argv[1],), "json"), ByteTokenizer(), sys.argv[2], workers=1, shard_bytes=1500)
        except DataError as error:
            print(error)
    """)
    ended = subprocess.run(
        [sys.executable, "-c", script, tmp_path / "c.jsonl", tmp_path / "out", str(limit)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "cannot be written: File too large. Finished parts are kept" in ended.stdout, ended
    assert ("out.bin cannot" if limit > 3000 else "000000.ids cannot") in ended.stdout
    assert not (tmp_path / "out.bin").exists()
    assert not list(tmp_path.glob("*.tmp"))
    assert (len(list((tmp_path / "out.parts").glob("*.json"))) > 1) == (limit > 3000)
    made = prepare(corpus(tmp_path / "c.jsonl"), ByteTokenizer(), tmp_path / "out", say=quiet)
    assert made.counts.documents == 60


def test_no_space_left_is_told_by_name() -> None:
    error = unwritable(Path("out.parts/000001.ids"), OSError(errno.ENOSPC, "No space left on device"))
    assert str(error).startswith(
        "out.parts/000001.ids cannot be written: No space left on device. Finished parts are"
    )


def test_a_damaged_json_is_refused_and_a_foreign_one_passed_over(tmp_path: Path) -> None:
    prepare(corpus(tmp_path / "c.jsonl"), ByteTokenizer(), tmp_path / "out", say=quiet)
    path = tmp_path / "out.json"
    value = json.loads(path.read_text())
    path.write_text(json.dumps({**value, "files": 3}))
    with pytest.raises(
        DataError, match=r"out\.json is damaged .*; remove it together with its \.bin and \.idx"
    ):
        Sidecar.of(tmp_path / "out")
    path.write_text('{"some": "thing"}')
    assert Sidecar.of(tmp_path / "out") is None
    assert open_prepared(tmp_path / "out", 257).name(3) == f"{tmp_path / 'out.bin'} document 3"


def test_a_pair_that_is_not_the_one_of_its_json_is_refused(tmp_path: Path) -> None:
    prepare(corpus(tmp_path / "c.jsonl"), ByteTokenizer(), tmp_path / "out", say=quiet)
    prepare(corpus(tmp_path / "d.jsonl", ["a"]), ByteTokenizer(), tmp_path / "other", say=quiet)
    for suffix in ("bin", "idx"):
        os.replace(tmp_path / f"other.{suffix}", tmp_path / f"out.{suffix}")
    with pytest.raises(
        DataError, match=r"out\.bin has 4 bytes and 1 documents, but .*out\.json belongs to one of"
    ):
        open_prepared(tmp_path / "out", 257)


def test_without_origins_documents_have_numbers(tmp_path: Path) -> None:
    prepare(corpus(tmp_path / "c.jsonl"), ByteTokenizer(), tmp_path / "out", say=quiet)
    (tmp_path / "out.origins").unlink()
    assert open_prepared(tmp_path / "out", 257).name(3) == f"{tmp_path / 'out.bin'} document 3"
