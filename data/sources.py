"""From what a recipe says of its corpora to documents that training reads (paper §8, data)."""

import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from hetero_megatron.data.byte_documents import ByteDocuments
from hetero_megatron.data.corpus import Files
from hetero_megatron.data.documents import Documents, Source, Stream
from hetero_megatron.data.formats import Format, format_of, open_files, open_reader
from hetero_megatron.data.prepare import Progress, fingerprint, no_progress, prepare
from hetero_megatron.data.prepared import open_prepared
from hetero_megatron.data.records import Policy, Reader
from hetero_megatron.data.text_stream import TextStream
from hetero_megatron.data.token_check import CheckedStream
from hetero_megatron.data.tokenizer import Tokenizer
from hetero_megatron.data.tokenizer_files import open_tokenizer
from hetero_megatron.errors import DataError

Shown: TypeAlias = Callable[[str], AbstractContextManager[Callable[[Progress], None]]]
"""Something that shows progress under a title, such as a bar, and how it is told."""


@dataclass(frozen=True, slots=True)
class SourceSettings:
    """One source: paths of one kind (none: the standard library's files), and its share of the tokens."""

    paths: tuple[str, ...] = ()
    format: Format = "auto"
    weight: float = 1.0
    suffixes: tuple[str, ...] = ()
    text_key: str = "text"
    split: str = "train"
    config: str | None = None
    stream: bool = False

    @property
    def told(self) -> str:
        """Its name in messages."""
        if not self.paths:
            return "the standard library"
        return self.paths[0] if len(self.paths) == 1 else f"{self.paths[0]} and {len(self.paths) - 1} more"

    @property
    def tokenized(self) -> bool:
        """Whether it is tokens already; a path that tells nothing is text."""
        try:
            return "megatron" in (
                self.format,
                self.format == "auto" and self.paths and format_of(self.paths[0]),
            )
        except DataError:
            return False


@dataclass(frozen=True, slots=True)
class CorpusSettings:
    """All sources of a corpus, and how their text becomes tokens."""

    sources: tuple[SourceSettings, ...]
    tokenizer: str = "byte"
    bad_documents: Policy = "stop"


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Refuse a tokenizer with more entries than the model; a model may have more.

    Raises:
        DataError: naming both sizes.
    """
    if tokenizer.vocab_size > vocab_size:
        raise DataError(
            f"tokenizer {tokenizer.name} has ids up to {tokenizer.vocab_size - 1}, so it needs model.vocab_size "
            f"{tokenizer.vocab_size} or more, and the model's is {vocab_size}"
        )


def no_bar(title: str) -> AbstractContextManager[Callable[[Progress], None]]:
    """Show nothing."""
    return nullcontext(no_progress)


def open_sources(
    settings: CorpusSettings,
    vocab_size: int,
    cache: Path,
    say: Callable[[str], None],
    shown: Shown = no_bar,
    workers: int | None = None,
) -> list[Source]:
    """Documents of every source, all ids below `vocab_size`. Called once, before ranks are forked.

    Files under the byte tokenizer are read as they are asked for. Other text is turned into tokens once, into `cache`,
    from where it is read memory-mapped; or, where a source says `stream`, as it comes.

    Raises:
        DataError: a source or the tokenizer cannot be used, or they do not fit the vocabulary.
    """
    tokenizer = None
    if not all(source.tokenized for source in settings.sources):
        tokenizer = open_tokenizer(settings.tokenizer)
        check_vocabulary(tokenizer, vocab_size)
    found: list[Source] = []
    for source in settings.sources:
        if source.tokenized:
            found.append(Source(_tokenized(source, vocab_size), source.weight))
        else:
            assert tokenizer is not None, "a source of text was not seen above"
            opener = _Opener(
                source, tokenizer, settings.bad_documents, vocab_size, cache, say, shown, workers
            )
            found.append(Source(opener.open(), source.weight))
    return found


def _tokenized(source: SourceSettings, vocab_size: int) -> Documents:
    if source.stream:
        raise DataError(f"source {source.told} is tokenized already and read in any order; drop stream")
    if len(source.paths) != 1:
        raise DataError(f"source {source.told}: each .bin/.idx pair is a source of its own")
    return open_prepared(source.paths[0], vocab_size)


@dataclass(frozen=True, slots=True)
class _Opener:
    source: SourceSettings
    tokenizer: Tokenizer
    policy: Policy
    vocab_size: int
    cache: Path
    say: Callable[[str], None]
    shown: Shown
    workers: int | None

    def open(self) -> Documents | Stream:
        files = self._files()
        if files is not None and self.tokenizer.fingerprint == "byte" and not self.source.stream:
            return ByteDocuments(files)
        reader = self._reader()
        if self.source.stream:
            return CheckedStream(TextStream(reader, self.tokenizer, self.policy), self.vocab_size)
        prefix = self.cache / cache_name(self.source.told, fingerprint(reader, self.tokenizer, self.policy))
        title = f"{self.source.told} to tokens of {self.tokenizer.name}"
        with self.shown(title) as progress:
            made = prepare(
                reader,
                self.tokenizer,
                prefix,
                self.policy,
                workers=self.workers,
                say=self.say,
                progress=progress,
            )
        self.say(f"{self.source.told}, in {prefix}.bin: {made.counts}")
        return open_prepared(prefix, self.vocab_size)

    def _files(self) -> Files | None:
        """The files, if each is a document."""
        source = self.source
        if not source.paths:
            return Files.standard_library()
        if source.format == "files" or (source.format == "auto" and format_of(source.paths[0]) == "files"):
            return open_files(source.paths, source.suffixes)
        return None

    def _reader(self) -> Reader:
        source = self.source
        if not source.paths:
            return open_reader([Files.standard_library().root], "files", suffixes=(".py",))
        return open_reader(
            source.paths,
            source.format,
            suffixes=source.suffixes,
            text_key=source.text_key,
            split=source.split,
            config=source.config,
            stream=source.stream,
        )


def cache_name(told: str, mark: str) -> str:
    """The name of a prepared source in the cache: readable, and another one for every fingerprint."""
    stem = re.sub(r"[^\w.-]+", "-", Path(told.split(" and ")[0]).name.split(".")[0]).strip("-") or "corpus"
    return f"{stem[:40]}-{mark[:16]}"
