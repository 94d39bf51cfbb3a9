"""Text documents with random access, in a stable order.

A source is the Python standard library ("stdlib"), a folder (read recursively), a file or a glob; `.jsonl` and
`.parquet` files give one document per record, every other file is UTF-8 text. Documents are ordered by relative path,
then by record, and are decoded when asked for: nothing but the index is kept in memory (Parquet row groups aside, see
`ParquetFile`). A text file over 2 MiB is cut at line ends into documents of 1 to 2 MiB, so that one big file can be
shuffled and held out in part.

    >>> from k3jax.data.sources import open_documents
    >>> documents = open_documents("stdlib")
    >>> train, validation = documents.split(validation_percent=5)
    >>> text = documents.text(int(train[0]))
"""

from __future__ import annotations

import glob
import hashlib
import json
import logging
import operator
import os
import sysconfig
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from threading import Lock
from typing import Any, Protocol

import numpy as np

_PIECE_BYTES = 1 << 20
_CHECKED_BYTES = 1 << 28
"""Text read and checked when a source is opened; a bigger source is checked as it is read."""
_ROW_GROUP_CACHE_BYTES = 1 << 30
_NOT_SOURCES = {"__pycache__", "site-packages", "dist-packages"}

logger = logging.getLogger(__name__)


class DataError(ValueError):
    """Data that cannot be used; the message says which file (and line), why, and what would help."""


class UnreadableError(DataError):
    """A file that cannot be opened or is not UTF-8."""


class File(Protocol):
    """One file of a source: `count` documents, `size` bytes on disk."""

    path: Path
    size: int
    count: int

    def texts(self) -> Iterator[str]: ...
    def name(self, record: int) -> str: ...


class _TextSource(File, Protocol):
    def read(self, record: int) -> str: ...


def read_bytes(path: Path, start: int, stop: int) -> bytes:
    try:
        with open(path, "rb") as file:
            file.seek(start)
            data = file.read(stop - start)
    except OSError as error:
        raise UnreadableError(f"{path} cannot be read: {error.strerror}") from error
    if len(data) != stop - start:
        raise DataError(f"{path} became shorter while in use: bytes {start}..{stop} are no longer all there")
    return data


def parse_object(data: bytes, where: Callable[[], str]) -> dict[str, Any]:
    """A JSON object; `where` names its place when it is none."""
    try:
        record = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where()}: not a JSON object ({error})") from error
    if not isinstance(record, dict):
        raise DataError(f"{where()}: not a JSON object but {type(record).__name__}")
    return record


def text_of(record: dict[str, Any], field: str, setting: str, where: Callable[[], str]) -> str:
    """The text in a JSON object's field, which the config calls `setting`."""
    text = record.get(field)
    if not isinstance(text, str):
        found = f"is {type(text).__name__}" if field in record else f"is missing; fields: {list(record)}"
        raise DataError(f"{where()}: field {field!r} ({setting}) must be text, it {found}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{where()}: lone surrogate in the text ({error})") from error
    return text


def _decode(data: bytes, path: Path, start: int) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UnreadableError(
            f"{path} is not UTF-8 text (byte {start + error.start}); "
            "convert it, or leave it out by giving data.source a glob such as 'folder/**/*.txt'"
        ) from error


class _TextFile:
    """A file of plain text: one document, or several of 1 to 2 MiB when it is long."""

    def __init__(self, path: Path, size: int):
        self.path, self.size = path, size
        self.count = max(1, size // _PIECE_BYTES) if size else 0

    def read(self, record: int) -> str:
        start, stop = self._border(record), self._border(record + 1)
        return _decode(read_bytes(self.path, start, stop), self.path, start)

    def texts(self) -> Iterator[str]:
        return map(self.read, range(self.count))

    def name(self, record: int) -> str:
        return f"#{record}" if self.count > 1 else ""

    def _border(self, record: int) -> int:
        """Byte where document `record` starts: after the first line end at or behind an even cut."""
        if record == 0 or record == self.count:
            return self.size if record else 0
        cut = record * self.size // self.count
        window = read_bytes(self.path, cut, min(cut + (1 << 16), self.size))
        line_end = window.find(b"\n")
        if line_end >= 0:
            return cut + line_end + 1
        # No line ends here: cut before the next byte that starts a UTF-8 sequence.
        return cut + next((i for i, byte in enumerate(window[:4]) if byte & 0xC0 != 0x80), 0)


class JsonlFile:
    """One JSON object per line; blank lines are skipped, every other line must hold the text field."""

    setting = "data.text_field"

    def __init__(self, path: Path, size: int, text_field: str):
        self.path, self.size, self.text_field = path, size, text_field
        self._borders = self._index()
        self.count = len(self._borders)

    def read(self, record: int) -> str:
        return self._parse(*self._line(record))[1]

    def texts(self) -> Iterator[str]:
        with open(self.path, "rb") as file:
            position = 0
            for line in file:
                if line.strip(b"\r\n"):
                    yield self._parse(line, position)[1]
                position += len(line)

    def name(self, record: int) -> str:
        return f":{self._line_number(int(self._borders[record][0]))}"

    def _index(self) -> np.ndarray:
        """Start and end byte of every line that is not blank: int64 [records, 2]."""
        ends, position = [np.zeros(0, np.int64)], 0
        while position < self.size:
            data = read_bytes(self.path, position, min(position + (1 << 24), self.size))
            ends.append(np.flatnonzero(np.frombuffer(data, np.uint8) == ord("\n")) + position)
            position += len(data)
        line_ends = np.concatenate([*ends, [self.size]])
        starts = np.concatenate([[0], line_ends[:-1] + 1])
        borders = np.stack([starts, line_ends], axis=1)[line_ends > starts]
        short = np.flatnonzero(borders[:, 1] - borders[:, 0] == 1)
        blank = [i for i in short if read_bytes(self.path, *(int(b) for b in borders[i])) == b"\r"]
        return np.delete(borders, blank, axis=0)

    def _line(self, record: int) -> tuple[bytes, int]:
        start, stop = (int(b) for b in self._borders[record])
        return read_bytes(self.path, start, stop), start

    def _parse(self, line: bytes, start: int) -> tuple[dict[str, Any], str]:
        """The object in a line and its text."""

        def where() -> str:
            return f"{self.path}:{self._line_number(start)}"

        record = parse_object(line, where)
        return record, text_of(record, self.text_field, self.setting, where)

    def _line_number(self, start: int) -> int:
        return read_bytes(self.path, 0, start).count(b"\n") + 1


class RowGroups:
    """Decoded Parquet row groups, the least recently used dropped first; shared by all files of a source."""

    def __init__(self, max_bytes: int):
        self._max_bytes, self._bytes, self._lock = max_bytes, 0, Lock()
        self._tables: OrderedDict[tuple[Path, int], Any] = OrderedDict()

    def get(self, file: ParquetFile, group: int) -> Any:
        key = (file.path, group)
        with self._lock:
            if key not in self._tables:
                table = file.decode(group)
                self._tables[key] = table
                self._bytes += table.nbytes
                while self._bytes > self._max_bytes and len(self._tables) > 1:
                    self._bytes -= self._tables.popitem(last=False)[1].nbytes
            self._tables.move_to_end(key)
            return self._tables[key]


class ParquetFile:
    """One row per document. A row is reached by decoding its row group, so a source of more than 1 GiB is read fast
    in random order only if its row groups are small (some thousand rows)."""

    setting = "data.text_field"

    def __init__(self, path: Path, size: int, text_field: str, groups: RowGroups):
        import pyarrow.parquet as pq  # half as slow to import as the whole of this room, and rarely needed

        self.path, self.size, self.text_field, self._groups = path, size, text_field, groups
        self._columns = [text_field]
        try:
            file = pq.ParquetFile(path)
        except (OSError, ValueError) as error:
            raise DataError(f"{path} is not a readable Parquet file: {error}") from error
        with file:
            self._schema = file.schema_arrow
            kind = self._kind(text_field, self.setting)
            if kind not in ("string", "large_string", "string_view"):
                raise DataError(f"{path}: column {text_field!r} must hold text, it holds {kind}")
            rows = [file.metadata.row_group(g).num_rows for g in range(file.num_row_groups)]
        self._starts = np.concatenate([[0], np.cumsum(rows, dtype=np.int64)])
        self.count = int(self._starts[-1])

    def _kind(self, column: str, setting: str) -> str:
        if column not in self._schema.names:
            raise DataError(f"{self.path} has no column {column!r} ({setting}); columns: {self._schema.names}")
        return str(self._schema.field(column).type)

    def decode(self, group: int) -> Any:
        """Table of the columns that are read."""
        import pyarrow.parquet as pq

        try:
            with pq.ParquetFile(self.path) as file:
                return file.read_row_group(group, columns=self._columns)
        except (OSError, ValueError) as error:
            raise DataError(f"{self.path}: row group {group} cannot be read: {error}") from error

    def _value(self, record: int, column: str) -> Any:
        group = int(np.searchsorted(self._starts, record, side="right")) - 1
        return self._groups.get(self, group).column(column)[record - int(self._starts[group])].as_py()

    def read(self, record: int) -> str:
        try:
            text = self._value(record, self.text_field)
        except UnicodeDecodeError as error:
            raise DataError(f"{self.path}, row {record}: column {self.text_field!r} is not UTF-8") from error
        if text is None:
            raise DataError(f"{self.path}, row {record}: column {self.text_field!r} is null")
        return text

    def texts(self) -> Iterator[str]:
        return map(self.read, range(self.count))

    def name(self, record: int) -> str:
        return f"[{record}]"


class FileRecords:
    """The records of a source's files in their order: what sources of text and of images share.

    Attributes:
        source: what was asked for ("stdlib", a path or a glob).
        files: relative path of each file, sorted.
        file_bytes: size of all files on disk.
        files_hash: SHA-256 over the relative paths and sizes of all files; names this source in logs and checkpoints.
    """

    def __init__(self, source: str, setting: str, files: dict[str, File]):
        self.source, self._setting = source, setting
        self.files = tuple(sorted(files))
        ordered = [files[name] for name in self.files]
        self._counts = [f.count for f in ordered]
        self._starts = np.concatenate([[0], np.cumsum(self._counts, dtype=np.int64)])
        self._names = [f.name for f in ordered]
        self.file_bytes = sum(f.size for f in ordered)
        listing = "".join(f"{name}\0{file.size}\n" for name, file in zip(self.files, ordered))
        self.files_hash = hashlib.sha256(listing.encode("utf-8", "surrogateescape")).hexdigest()

    def __len__(self) -> int:
        return int(self._starts[-1])

    def _locate(self, index: int) -> tuple[int, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"document {index} of {len(self)}")
        file = int(np.searchsorted(self._starts, index, side="right")) - 1
        return file, operator.index(index) - int(self._starts[file])

    def name(self, index: int) -> str:
        """Relative path of the document's file, with its place in it: `:line` (JSONL), `[row]` (Parquet), `#piece`
        (long text) or `#key` (tar)."""
        file, record = self._locate(index)
        return self.files[file] + self._names[file](record)

    def split(self, validation_percent: int) -> tuple[np.ndarray, np.ndarray]:
        """Indices of training and held-out documents, int64.

        Which side a document falls on depends on its relative path and its number within the file only, so adding
        files moves none. Training documents are in source order; held-out ones are in the order of their hash, so
        that their first few are a fair sample.

        Raises:
            DataError: one side is empty.
        """
        hashes = np.concatenate([record_hashes(name, count) for name, count in zip(self.files, self._counts)])
        held_out = hashes % np.uint64(100) < validation_percent
        train, validation = np.flatnonzero(~held_out), np.flatnonzero(held_out)
        for part, name, advice in ((train, "training", "lower"), (validation, "validation", "raise")):
            if not len(part):
                raise DataError(
                    f"no {name} documents: all {len(self)} of {self._setting} {self.source!r} fall on the other side; "
                    f"{advice} data.validation_percent ({validation_percent}) or use more files"
                )
        return train, validation[np.argsort(hashes[validation], kind="stable")]


class Documents(FileRecords):
    """The documents of a source. Made by `open_documents`.

    Attributes:
        text_bytes: UTF-8 bytes of text (beyond the first 256 MiB the size on disk is counted).
        skipped: files of the standard library left out because they are deliberately not UTF-8, or unreadable.
    """

    def __init__(self, source: str, root: Path, paths: list[Path], text_field: str, skip_unreadable: bool = False):
        groups = RowGroups(_ROW_GROUP_CACHE_BYTES)
        files = {p.relative_to(root).as_posix(): _open_file(p, text_field, groups) for p in paths}
        ordered = {name: files[name] for name in sorted(files) if files[name].count}
        self.text_bytes, self.skipped = check_texts(ordered, skip_unreadable)
        kept = {name: file for name, file in ordered.items() if name not in self.skipped}
        super().__init__(source, "data.source", {**kept})
        self._files = list(kept.values())

    def text(self, index: int) -> str:
        """The text of document `index`.

        Raises:
            DataError: its file or line has become unreadable, or lies beyond what was checked at opening and is bad.
        """
        file, record = self._locate(index)
        return self._files[file].read(record)


def record_hashes(name: str, count: int) -> np.ndarray:
    """uint64 [count]: SplitMix64 of (SHA-256 of the path) + record number; vectorised, as there may be many records."""
    digest = hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()
    x = np.arange(count, dtype=np.uint64) + np.uint64(int.from_bytes(digest[:8], "little"))
    x = x * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def file_size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error


def _open_file(path: Path, text_field: str, groups: RowGroups) -> _TextSource:
    size = file_size(path)
    if path.suffix == ".jsonl":
        return JsonlFile(path, size, text_field)
    if path.suffix == ".parquet":
        return ParquetFile(path, size, text_field, groups)
    return _TextFile(path, size)


def check_texts(files: Mapping[str, File], skip_unreadable: bool = False) -> tuple[int, tuple[str, ...]]:
    """Reads the first 256 MiB, so that bad input is refused before a run starts; returns bytes and skipped files."""
    text_bytes, skipped = 0, []
    for name, file in files.items():
        if text_bytes >= _CHECKED_BYTES:
            text_bytes += file.size
            continue
        try:
            text_bytes += sum(len(text.encode()) for text in file.texts())
        except UnreadableError:
            if not skip_unreadable:
                raise
            skipped.append(name)
    if skipped:
        logger.warning("skipped %d files that are not readable UTF-8 text: %s", len(skipped), ", ".join(skipped))
    return text_bytes, tuple(skipped)


def _walk(root: Path, excluded: set[str], suffix: str = "") -> list[Path]:
    """Files below `root` that are not hidden."""

    def refuse(error: OSError) -> None:
        raise DataError(f"{error.filename} cannot be read: {error.strerror}") from error

    paths = []
    for folder, subfolders, files in os.walk(root, onerror=refuse):
        subfolders[:] = [s for s in subfolders if s not in excluded and not s.startswith(".")]
        paths += [Path(folder, f) for f in files if f.endswith(suffix) and not f.startswith(".")]
    return [p for p in paths if p.is_file() or p.is_symlink()]


def find_files(source: str, setting: str, legal: str) -> tuple[Path, list[Path]]:
    """Root and files of a folder, a file or a glob; an error names the `setting` and what is `legal`."""
    path = Path(source).expanduser()
    if path.is_dir():
        return path, _walk(path, {"__pycache__"})
    if path.is_file():
        return path.parent, [path]
    if glob.has_magic(source):
        root = next(p for p in path.parents if not glob.has_magic(str(p)))
        found = [Path(p) for p in glob.glob(str(path), recursive=True)]
        return root, [p for p in found if p.is_file()]
    raise DataError(f"{setting} {source!r} does not exist; give {legal}")


def open_documents(source: str, text_field: str = "text", min_bytes: int = 0) -> Documents:
    """Opens a source of text and checks it.

    Args:
        source: "stdlib" (every .py file of the running Python's standard library, installed packages excluded), or
            a folder, file or glob. Hidden files and folders are left out.
        text_field: field of a JSONL record, column of a Parquet file.
        min_bytes: least amount of text that is accepted.

    Raises:
        DataError: nothing there, something unreadable or not UTF-8 (which file, which byte), a bad JSONL line (which
            line) or Parquet row, or too little text.
    """
    stdlib = source == "stdlib"
    if stdlib:
        root = Path(sysconfig.get_path("stdlib"))
        # Some distributions ship dangling links here.
        paths = [p for p in _walk(root, _NOT_SOURCES, suffix=".py") if p.is_file()]
    else:
        root, paths = find_files(source, "data.source", "'stdlib', or a folder, file or glob of text")
    documents = Documents(source, root, paths, text_field, skip_unreadable=stdlib) if paths else None
    if documents is None or documents.text_bytes == 0:
        raise DataError(f"data.source {source!r} holds no text ({len(paths)} files under {root})")
    if documents.text_bytes < min_bytes:
        raise DataError(
            f"data.source {source!r} holds {documents.text_bytes:,} bytes of text in {len(documents.files)} files, "
            f"data.min_bytes asks for {min_bytes:,}. Point data.source at a bigger folder; or lower data.min_bytes, "
            "knowing that a model learns so little text by heart"
        )
    return documents
