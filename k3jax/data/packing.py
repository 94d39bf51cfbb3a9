"""Documents into rows of a fixed length, by virtual shards that each keep one cursor.

All documents of all epochs form one endless line: position `e * D + i` is the i-th of D documents in the order of epoch
e, a pseudo-random permutation whose every value is computed in O(1) from (seed, e). The document at position p belongs
to virtual shard p mod V. A shard packs its documents end to end, each followed by EOS, and cuts the stream every
`sequence_length` tokens; global row r is the next row of shard r mod V. So the rows do not depend on who computes them,
and a cursor of two numbers per shard (documents finished, tokens taken of the next one) says all about the past.
Every token is input once, and target once unless it is the first of its document.

Documents with images have shards of their own, spread evenly over the line of shards (`Mixture`). There a row also ends
before an image that does not fit in it whole (`ImagePacker`); the rest of it is padding.

Legend: B rows, T sequence length, V virtual shards.
"""

from __future__ import annotations

import functools
import logging
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
from grain.experimental import index_shuffle

from k3jax.config import VisionConfig
from k3jax.data.images import ImageError, Item, prompt
from k3jax.data.records import ImageSource
from k3jax.data.sources import DataError, Documents
from k3jax.data.tokenizers import MEDIA_TOKEN, Tokenizer

Batch = dict[str, Any]
"""Arrays by name, see `empty_batch`; "images" is a list."""

logger = logging.getLogger(__name__)


def empty_batch(rows: int, sequence_length: int, images: bool = False) -> Batch:
    """A batch of padding.

    Returns:
        tokens [B,T] int32; targets [B,T] int32, the next token, 0 where masked; segment_ids [B,T] int32, documents
        numbered from 1 in each row, 0 = padding; loss_mask [B,T] bool, True where the target is the next token of the
        same document, and no place of an image's feature; document_ids [B,T] int32, index in `Documents`, those of
        documents with images behind them, -1 = padding; with `images`, "images": of each row the `Item`s in the order
        of their tokens.
    """
    shape = (rows, sequence_length)
    batch: Batch = {
        "tokens": np.zeros(shape, np.int32),
        "targets": np.zeros(shape, np.int32),
        "segment_ids": np.zeros(shape, np.int32),
        "loss_mask": np.zeros(shape, np.bool_),
        "document_ids": np.full(shape, -1, np.int32),
    }
    if images:
        batch["images"] = [[] for _ in range(rows)]
    return batch


@dataclass(frozen=True)
class DocumentOrder:
    """Which document stands at which position of the endless line.

    Attributes:
        documents: indices into `Documents`, int [D].
        seed: of the permutation of each epoch; None keeps the given order.
        epochs: after which the line ends; None never.
    """

    documents: np.ndarray
    seed: int | None
    epochs: int | None = None

    def at(self, position: int) -> int | None:
        """Index of the document at `position`, None behind the end. O(1), a pure function of (seed, position)."""
        epoch, index = divmod(position, len(self.documents))
        if self.epochs is not None and epoch >= self.epochs:
            return None
        if self.seed is not None:
            seed = _epoch_seed(self.seed, epoch)
            index = index_shuffle(index, max_index=len(self.documents) - 1, seed=seed, rounds=4)
        return int(self.documents[index])


@functools.lru_cache(maxsize=64)
def _epoch_seed(seed: int, epoch: int) -> int:
    """32 bits from both; seed + epoch would make epoch 1 of seed 0 the same as epoch 0 of seed 1."""
    return zlib.crc32(f"{seed}/{epoch}".encode())


class TokenStore:
    """Tokens of each document, EOS at the end, tokenised once as long as the cache has room.

    The cache keeps what came first and drops nothing: documents are visited in turn, each once an epoch, where dropping
    the least recently used would lose every hit as soon as the data outgrow the cache.
    """

    def __init__(self, documents: Documents, tokenizer: Tokenizer, cache_bytes: int = 1 << 28):
        self._documents, self._tokenizer, self._free = documents, tokenizer, cache_bytes
        self._dtype = np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.int32
        self._cache: dict[int, np.ndarray] = {}

    def tokens(self, document: int) -> np.ndarray:
        """[n+1] of uint16 or int32: the document's tokens and EOS."""
        cached = self._cache.get(document)
        if cached is not None:
            return cached
        ids = self._tokenizer.encode_array(self._documents.text(document))
        tokens = np.full(len(ids) + 1, self._tokenizer.eos_id, self._dtype)
        tokens[:-1] = ids
        if tokens.nbytes <= self._free:
            self._free -= tokens.nbytes
            self._cache[document] = tokens
        return tokens


class Placed(NamedTuple):
    """An image and the tokens that stand for it."""

    start: int
    stop: int
    item: Item


class Content(NamedTuple):
    """Tokens [n+1] of a document, EOS at the end, and its images in their order. A bad document has no tokens."""

    tokens: np.ndarray
    images: tuple[Placed, ...] = ()

    @property
    def nbytes(self) -> int:
        return self.tokens.nbytes + sum(image.item.patches.nbytes for image in self.images)


class _Part(NamedTuple):
    """What a row takes of one document."""

    index: int
    content: Content
    taken: int
    length: int


class ImageStore:
    """Tokens and images of each document, decoded once as long as the cache has room; see `TokenStore`.

    Attributes:
        budget: most patches of an image: what a row of patches holds and a row of tokens with the image's prompt.
        geometry: how an image becomes tokens, for what a saved position must agree on.
        skipped: names of the documents met so far that were left out because of an image, by index.
    """

    def __init__(
        self,
        documents: ImageSource,
        tokenizer: Tokenizer,
        vision: VisionConfig,
        budget: int,
        skip_bad: bool,
        cache_bytes: int = 1 << 28,
    ):
        self._documents, self._tokenizer, self._vision = documents, tokenizer, vision
        self.budget, self._skip_bad, self._free = budget, skip_bad, cache_bytes
        self.geometry = f"patch {vision.patch_size}, merge {vision.merge}"
        self.pad_id = tokenizer.special_tokens[MEDIA_TOKEN]
        self._cache: dict[int, Content] = {}
        self._lock = Lock()
        self.skipped: dict[int, str] = {}

    def content(self, document: int) -> Content:
        """The document's tokens and images; no tokens if it is bad and bad ones are left out.

        Raises:
            ImageError: an image cannot be used, and bad documents are not left out.
            DataError: its file has become unreadable, or holds a bad record.
        """
        cached = self._cache.get(document)
        if cached is not None:
            return cached
        try:
            content = self._read(document)
        except ImageError as error:
            if not self._skip_bad:
                advice = "data.images.on_error 'skip' leaves such documents out"
                raise ImageError(f"{error}; {advice}") from error
            content = Content(np.zeros(0, np.int32))
            self.skipped[document] = name = self._documents.name(document)
            logger.warning("left out %s, bad document number %d: %s", name, len(self.skipped), error)
        with self._lock:
            if content.nbytes <= self._free:
                self._free -= content.nbytes
                self._cache[document] = content
        return content

    def tokens(self, document: int) -> np.ndarray:
        return self.content(document).tokens

    def _read(self, document: int) -> Content:
        tokens: list[int] = []
        images = []
        for part in self._documents.content(document, self._vision, self.budget):
            if isinstance(part, str):
                tokens += self._tokenizer.encode(part)
            else:
                start = len(tokens)
                tokens += prompt(part, self._tokenizer, self._vision.merge)
                images.append(Placed(start, len(tokens), part))
        return Content(np.array([*tokens, self._tokenizer.eos_id], np.int32), tuple(images))


class Packer:
    """Cuts the streams of the virtual shards into rows.

    Attributes:
        cursors: int64 [V,2]; of each shard the number of documents finished, and of tokens taken of the next one.
    """

    def __init__(
        self, order: DocumentOrder, tokens: Callable[[int], np.ndarray], virtual_shards: int, sequence_length: int
    ):
        self._order, self._tokens = order, tokens
        self.virtual_shards, self.sequence_length = virtual_shards, sequence_length
        self.cursors = np.zeros((virtual_shards, 2), np.int64)
        self._open: dict[int, tuple[int, Content]] = {}

    def seek(self, cursors: np.ndarray) -> None:
        """Continues from other cursors, [V,2]; documents are opened when their shard is read next."""
        self.cursors = cursors.astype(np.int64)
        self._open.clear()

    def document(self, shard: int) -> tuple[int, Content] | None:
        """The document under the shard's cursor: its index and content; None behind the end."""
        if shard not in self._open:
            finished, taken = (int(c) for c in self.cursors[shard])
            index = self._order.at(shard + finished * self.virtual_shards)
            if index is None:
                return None
            content = self._content(index)
            # none: it has become a bad document, which is passed over
            if 0 < len(content.tokens) <= taken or any(image.start < taken < image.stop for image in content.images):
                raise DataError(
                    f"the cursor of virtual shard {shard} is {taken} tokens into document {index}, which has only "
                    f"{len(content.tokens)}, or an image there: the data or the tokenizer is not that of the checkpoint"
                )
            self._open[shard] = index, content
        return self._open[shard]

    def fill(self, shard: int, batch: Batch, row: int) -> None:
        """Writes the shard's next row into `batch`; what is left behind the last document stays padding."""
        column = 0
        for segment, part in enumerate(self._row(shard), 1):
            self._write(part, batch, row, column, segment)
            column += part.length

    def skip(self, shard: int) -> None:
        """Passes over the shard's next row, which another process yields."""
        for _ in self._row(shard):
            pass

    def _content(self, index: int) -> Content:
        return Content(self._tokens(index))

    def _row(self, shard: int) -> Iterator[_Part]:
        """The parts of documents that make the shard's next row; moves the cursor past them."""
        left = self.sequence_length
        while left and (current := self.document(shard)) is not None:
            index, content = current
            taken = int(self.cursors[shard, 1])
            part = _Part(index, content, taken, min(len(content.tokens) - taken, left))
            yield part
            left -= part.length
            self._advance(shard, taken + part.length, len(content.tokens))

    def _write(self, part: _Part, batch: Batch, row: int, column: int, segment: int) -> None:
        index, (tokens, _), taken, n = part
        targets = min(n, len(tokens) - taken - 1)  # EOS predicts nothing
        batch["tokens"][row, column : column + n] = tokens[taken : taken + n]
        batch["targets"][row, column : column + targets] = tokens[taken + 1 : taken + 1 + targets]
        batch["loss_mask"][row, column : column + targets] = True
        batch["segment_ids"][row, column : column + n] = segment
        batch["document_ids"][row, column : column + n] = index

    def _advance(self, shard: int, taken: int, length: int) -> None:
        if taken < length:
            self.cursors[shard, 1] = taken
        else:
            self.cursors[shard] = self.cursors[shard, 0] + 1, 0
            del self._open[shard]

    def rows_left(self, most: int | None) -> int:
        """Rows of the longest shard of a finite order; counting stops at `most`.

        With `most` None, every document is tokenised.
        """
        longest = 0
        for shard in range(self.virtual_shards):
            length, position = 0, shard
            while (index := self._order.at(position)) is not None:
                length += len(self._tokens(index))
                position += self.virtual_shards
                if most is not None and length >= most * self.sequence_length:
                    return most
            longest = max(longest, -(-length // self.sequence_length))
        return longest


class ImagePacker(Packer):
    """Rows of documents with images. No row has more than `patches` patches, and none cuts an image's tokens.

    Args:
        first_id: of the documents in `document_ids`.
    """

    def __init__(
        self,
        order: DocumentOrder,
        store: ImageStore,
        virtual_shards: int,
        sequence_length: int,
        patches: int,
        first_id: int,
    ):
        super().__init__(order, store.tokens, virtual_shards, sequence_length)
        self._store, self._patches, self._first_id = store, patches, first_id

    def document(self, shard: int) -> tuple[int, Content] | None:
        """As in `Packer`; bad documents, which have no tokens, are passed over.

        Raises:
            DataError: every document is bad.
        """
        passed = 0
        while (current := super().document(shard)) is not None and not len(current[1].tokens):
            self._advance(shard, 0, 0)
            passed += 1
            if passed == len(self._order.documents):
                self._refuse_if_all_bad()
        return current

    def rows_left(self, most: int | None) -> int:
        """As in `Packer`, from the start; every document up to there is decoded.

        Raises:
            DataError: every document is bad.
        """
        counter = ImagePacker(
            self._order, self._store, self.virtual_shards, self.sequence_length, self._patches, self._first_id
        )
        longest = 0
        for shard in range(self.virtual_shards):
            rows = 0
            while counter.document(shard) is not None:
                if rows == most:
                    return rows
                counter.skip(shard)
                rows += 1
            longest = max(longest, rows)
        if not longest:
            self._refuse_if_all_bad()
        return longest

    def _refuse_if_all_bad(self) -> None:
        documents = [int(i) for i in self._order.documents]
        if not any(len(self._store.tokens(i)) for i in documents):
            raise DataError(
                f"each of {len(documents)} documents with images is bad, {self._store.skipped[documents[0]]} first; "
                "data.images.on_error 'raise' stops at the first and says why"
            )

    def _content(self, index: int) -> Content:
        return self._store.content(index)

    def _row(self, shard: int) -> Iterator[_Part]:
        left, patches = self.sequence_length, self._patches
        while left and (current := self.document(shard)) is not None:
            index, content = current
            taken = int(self.cursors[shard, 1])
            stop, full = min(len(content.tokens), taken + left), False
            for image in content.images:
                if taken <= image.start < stop:
                    patches -= len(image.item.patches)
                    if image.stop > stop or patches < 0:
                        stop, full = image.start, True
            if stop > taken:
                yield _Part(index, content, taken, stop - taken)
                left -= stop - taken
                self._advance(shard, stop, len(content.tokens))
            elif left == self.sequence_length:
                raise DataError(
                    f"an image of document {index} does not fit in an empty row of {self.sequence_length} tokens and "
                    f"{self._patches} patches: open the data with this sequence length"
                )
            if full:
                return

    def _write(self, part: _Part, batch: Batch, row: int, column: int, segment: int) -> None:
        super()._write(part, batch, row, column, segment)
        here = slice(column, column + part.length)
        batch["document_ids"][row, here] += self._first_id
        features = here.start + np.flatnonzero(batch["targets"][row, here] == self._store.pad_id)
        batch["targets"][row, features] = 0
        batch["loss_mask"][row, features] = False
        end = part.taken + part.length
        batch["images"][row] += [image.item for image in part.content.images if part.taken <= image.start < end]


def spread(count: int, total: int) -> np.ndarray:
    """bool [total], `count` of them True: n neighbours, cyclically, hold n·count/total of these rounded up or down."""
    return np.diff(np.arange(total + 1) * count // total) > 0


class Mixture:
    """Shards of text and shards of documents with images in one line, with the interface of `Packer`.

    The documents of either kind are dealt out to the shards of their kind alone.

    Args:
        image_shards: bool [V].
    """

    def __init__(self, text: Packer, images: ImagePacker, image_shards: np.ndarray):
        self._text, self._images, self._is_image = text, images, image_shards
        self._number = np.where(image_shards, np.cumsum(image_shards), np.cumsum(~image_shards)) - 1
        self.virtual_shards = len(image_shards)

    @property
    def cursors(self) -> np.ndarray:
        cursors = np.zeros((self.virtual_shards, 2), np.int64)
        cursors[self._is_image], cursors[~self._is_image] = self._images.cursors, self._text.cursors
        return cursors

    def seek(self, cursors: np.ndarray) -> None:
        self._images.seek(cursors[self._is_image])
        self._text.seek(cursors[~self._is_image])

    def fill(self, shard: int, batch: Batch, row: int) -> None:
        self._of(shard).fill(int(self._number[shard]), batch, row)

    def skip(self, shard: int) -> None:
        self._of(shard).skip(int(self._number[shard]))

    def rows_left(self, most: int | None) -> int:
        return max(self._text.rows_left(most), self._images.rows_left(most))

    def _of(self, shard: int) -> Packer:
        return self._images if self._is_image[shard] else self._text
