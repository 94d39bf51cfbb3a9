"""Documents of text and images with random access, in a stable order.

A source is a folder (read recursively), a file or a glob of these, or "digits" (`k3jax.data.digits`):

- `.jsonl`: `{"text": "a <image> and a <image>", "images": ["a.png", "b.png"]}`, paths relative to the file;
- `.parquet`: a column of text and one of encoded images, each row bytes, `{bytes, path}`, or a list of these;
  in the list of either, a list within stands for the frames of a video, which become pieces of at most four frames;
- `.tar` (WebDataset's layout, not compressed): members that share a name up to its first dot are one document, its text
  in `x.txt` or the text field of `x.json`, its images `x.png`, `x.0.jpg`, `x.1.jpg`, … in that order.

Each `<image>` in a text stands for the next image or video; without one they come first. Only the index is kept in
memory; texts are checked when the source is opened, images when they are read.

    documents = open_image_documents(ImagesConfig(source="pictures/"))
    documents.content(0, moonvit(), budget=1024)  # ['a ', Item(…), ' and a ', Item(…)]
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from k3jax.config import ImagesConfig, VisionConfig
from k3jax.data.digits import DigitDocuments
from k3jax.data.images import ImageError, Item, open_item, open_video
from k3jax.data.sources import (
    DataError,
    File,
    FileRecords,
    JsonlFile,
    ParquetFile,
    RowGroups,
    check_texts,
    file_size,
    find_files,
    parse_object,
    read_bytes,
    text_of,
)

PLACEHOLDER = "<image>"
_SUFFIXES = (".jsonl", ".parquet", ".tar")
_IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm", ".jp2", ".avif")
_ROW_GROUP_CACHE_BYTES = 1 << 30
_TEXT_SETTING, _IMAGE_SETTING = "data.images.text_field", "data.images.image_field"

Stored = tuple[bytes | Path | list[bytes | Path], str]
"""An encoded image or its path, or those of the frames of a video, and its name in messages."""


class ImageSource(Protocol):
    """What the loader needs of a source of documents with images."""

    source: str
    files_hash: str

    def __len__(self) -> int: ...
    def name(self, index: int) -> str: ...
    def split(self, validation_percent: int) -> tuple[np.ndarray, np.ndarray]: ...
    def content(self, index: int, vision: VisionConfig, budget: int | None) -> list[str | Item]: ...


class _RecordFile(File, Protocol):
    def stored(self, record: int) -> tuple[str, list[Stored]]:
        """The text of a record and its images."""
        ...


def _stored(value: Any, folder: Path) -> list[Stored]:
    """The images that a field holds: a path, bytes, `{bytes, path}`, or a list of these and of lists of frames.

    Paths start in `folder`.
    """
    if value is None:
        return []
    if not isinstance(value, list):
        return [_image(value, folder)]
    return [_video(part, folder) if isinstance(part, list) else _image(part, folder) for part in value]


def _image(value: Any, folder: Path) -> tuple[bytes | Path, str]:
    path = data = None
    if isinstance(value, dict):
        path, data = value.get("path"), value.get("bytes")
    elif isinstance(value, str):
        path = value
    else:
        data = value
    if isinstance(data, bytes):
        return data, f" ({path})" if path else ""
    if data is None and isinstance(path, str):
        return folder / path, f" ({path})"
    wrong = path if data is None else data
    raise ImageError(
        f"an image, and a frame of a video, is a path, bytes or {{bytes, path}}, not {type(wrong).__name__}"
    )


def _video(frames: list[Any], folder: Path) -> Stored:
    return [_image(frame, folder)[0] for frame in frames], f" (video of {len(frames)} frames)"


class _JsonlRecords(JsonlFile):
    setting = _TEXT_SETTING

    def __init__(self, path: Path, size: int, text_field: str, image_field: str):
        super().__init__(path, size, text_field)
        self._image_field = image_field

    def _parse(self, line: bytes, start: int) -> tuple[dict[str, Any], str]:
        record, text = super()._parse(line, start)
        if self._image_field not in record:
            raise DataError(
                f"{self.path}:{self._line_number(start)}: field {self._image_field!r} ({_IMAGE_SETTING}) is missing; "
                f"fields: {list(record)} (a record without images has an empty list)"
            )
        return record, text

    def stored(self, record: int) -> tuple[str, list[Stored]]:
        fields, text = self._parse(*self._line(record))
        return text, _stored(fields[self._image_field], self.path.parent)


class _ParquetRecords(ParquetFile):
    setting = _TEXT_SETTING

    def __init__(self, path: Path, size: int, text_field: str, image_field: str, groups: RowGroups, texts: RowGroups):
        super().__init__(path, size, text_field, groups)
        kind = self._kind(image_field, _IMAGE_SETTING)
        if "binary" not in kind:
            raise DataError(f"{path}: column {image_field!r} ({_IMAGE_SETTING}) must hold bytes, it holds {kind}")
        self._image_field, self._columns = image_field, [text_field, image_field]
        self._texts = ParquetFile(path, size, text_field, texts)

    def texts(self) -> Iterator[str]:
        return self._texts.texts()

    def stored(self, record: int) -> tuple[str, list[Stored]]:
        return self.read(record), _stored(self._value(record, self._image_field), self.path.parent)


class _TarRecords:
    """Indexed once; a member is then read from its place in the file."""

    def __init__(self, path: Path, size: int, text_field: str):
        self.path, self.size, self._text_field = path, size, text_field
        self._samples: dict[str, dict[str, tuple[int, int]]] = {}
        try:
            with tarfile.open(path, "r:") as tar:
                for member in tar:
                    folder, slash, base = member.name.removeprefix("./").rpartition("/")
                    if member.isfile() and not base.startswith("."):
                        stem, _, extension = base.partition(".")
                        sample = self._samples.setdefault(folder + slash + stem, {})
                        sample[extension.lower()] = member.offset_data, member.offset_data + member.size
                end = tar.offset
        except (tarfile.TarError, OSError, EOFError) as error:
            raise DataError(f"{path} is not a whole, uncompressed tar file: {error}") from error
        # tarfile takes a damaged or missing header behind the first member for the end.
        if end + tarfile.BLOCKSIZE > size or any(read_bytes(path, end, end + tarfile.BLOCKSIZE)):
            raise DataError(f"{path} is cut off or damaged: at byte {end} there is neither a member nor the end mark")
        self._keys = list(self._samples)
        self.count = len(self._keys)

    def name(self, record: int) -> str:
        return f"#{self._keys[record]}"

    def texts(self) -> Iterator[str]:
        return map(self._text, range(self.count))

    def stored(self, record: int) -> tuple[str, list[Stored]]:
        sample = self._samples[self._keys[record]]
        names = sorted((e for e in sample if f".{e}".endswith(_IMAGE_SUFFIXES)), key=_number_first)
        return self._text(record), [(read_bytes(self.path, *sample[e]), f" (.{e})") for e in names]

    def _text(self, record: int) -> str:
        def where() -> str:
            return f"{self.path}{self.name(record)}"

        sample = self._samples[self._keys[record]]
        if "txt" in sample:
            try:
                return read_bytes(self.path, *sample["txt"]).decode()
            except UnicodeDecodeError as error:
                raise DataError(f"{where()}: its text is not UTF-8 ({error})") from error
        if "json" in sample:
            fields = parse_object(read_bytes(self.path, *sample["json"]), where)
            return text_of(fields, self._text_field, _TEXT_SETTING, where)
        raise DataError(f"{where()}: no text; members: {sorted(sample)}, a .txt or .json is needed")


def _number_first(extension: str) -> tuple[int, str]:
    number = extension.partition(".")[0]
    return int(number) if number.isdecimal() else -1, extension


class ImageDocuments(FileRecords):
    """The documents of a source of files, see the module. Made by `open_image_documents`."""

    def __init__(self, config: ImagesConfig, root: Path, paths: list[Path]):
        groups, texts = RowGroups(_ROW_GROUP_CACHE_BYTES), RowGroups(0)
        files: dict[str, _RecordFile] = {}
        for path in sorted(paths):
            file, size = path.relative_to(root).as_posix(), file_size(path)
            if path.suffix == ".jsonl":
                files[file] = _JsonlRecords(path, size, config.text_field, config.image_field)
            elif path.suffix == ".parquet":
                files[file] = _ParquetRecords(path, size, config.text_field, config.image_field, groups, texts)
            else:
                files[file] = _TarRecords(path, size, config.text_field)
        files = {name: files[name] for name in sorted(files) if files[name].count}
        check_texts(files)
        super().__init__(str(config.source), "data.images.source", {**files})
        self._files = list(files.values())

    def content(self, index: int, vision: VisionConfig, budget: int | None = None) -> list[str | Item]:
        """Texts and images of document `index` in their order; empty texts are left out.

        Args:
            budget: most patches of an image, see `open_item`.

        Raises:
            ImageError: an image is missing or cannot be used, or their number is not that of the placeholders.
            DataError: the record has become unreadable, or lies beyond what was checked at opening and is bad.
        """
        file, record = self._locate(index)
        where = f"{self._files[file].path}{self._files[file].name(record)}"
        try:
            text, images = self._files[file].stored(record)
        except ImageError as error:
            raise ImageError(f"{where}: {error}") from error
        pieces = between_images(text, len(images), where)
        parts: list[str | Item] = [pieces[0]]
        for number, ((image, name), piece) in enumerate(zip(images, pieces[1:]), 1):
            named = f"{where}, image {number}{name}"
            if isinstance(image, list):
                parts += open_video(image, named, vision, budget)
            else:
                parts.append(open_item(image, named, vision, budget))
            parts.append(piece)
        return [part for part in parts if part != ""]


def between_images(text: str, images: int, where: str) -> list[str]:
    """The `images` + 1 pieces of a text between its images, which come first where it holds no placeholder.

    Raises:
        ImageError: another number of placeholders.
    """
    pieces = text.split(PLACEHOLDER)
    if len(pieces) == 1:
        pieces = [""] * images + pieces
    if len(pieces) != images + 1:
        raise ImageError(
            f"{where}: {len(pieces) - 1} {PLACEHOLDER} in the text, {images} images; "
            f"there must be one for each image, or none at all"
        )
    return pieces


def open_image_documents(config: ImagesConfig) -> ImageSource:
    """Opens `config.source` and checks its texts.

    Raises:
        DataError: nothing there, a bad line, row or member (which), a tar file that is compressed or cut off, or
            scikit-learn missing for "digits".
    """
    if config.source == "digits":
        return DigitDocuments()
    legal = "'digits', or a folder, file or glob of .jsonl, .parquet or .tar files"
    root, found = find_files(str(config.source), "data.images.source", legal)
    paths = [p for p in found if p.suffix in _SUFFIXES]
    documents = ImageDocuments(config, root, paths) if paths else None
    if documents is None or not len(documents):
        raise DataError(f"data.images.source {config.source!r} holds no documents ({len(found)} files); give {legal}")
    return documents
