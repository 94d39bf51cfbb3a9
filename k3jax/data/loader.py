"""Batches of packed text whose order does not depend on the number of loading processes, and whose state is tiny.

Global step s is rows s·B … s·B + B - 1 of the line of rows that `k3jax.data.packing` defines; a process yields those
that its devices need, which several processes may. The state is the number of the next row and one cursor per virtual
shard. Restoring it seeks, it replays nothing, and may change the number of processes, the batch size and the sequence
length.

A process tokenises only the shards whose rows it yields. If `virtual_shards` is a multiple of the global batch size,
no shard holds rows of two places in the batch; otherwise the rows are the same but shared shards are tokenised by all
their readers.

With `data.images.source`, the fraction `data.images.share` of the virtual shards, and so of the rows, reads documents
with images, and batches have the key "images".

    >>> from k3jax.config import DataConfig
    >>> data = open_data(DataConfig(sequence_length=128, batch_size=4))
    >>> with data.train_loader() as loader:
    ...     batch = next(loader)      # tokens, targets, segment_ids, loss_mask, document_ids: [4, 128]
    ...     state = loader.get_state()
"""

from __future__ import annotations

import json
import math
import weakref
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import grain
import numpy as np
from grain.experimental import ThreadPrefetchIterDataset

from k3jax.config import DataConfig, VisionConfig
from k3jax.data.packing import (
    Batch,
    DocumentOrder,
    ImagePacker,
    ImageStore,
    Mixture,
    Packer,
    TokenStore,
    empty_batch,
    spread,
)
from k3jax.data.records import ImageSource, open_image_documents
from k3jax.data.sources import DataError, Documents, open_documents
from k3jax.data.tokenizers import Tokenizer, check_vocabulary, load_tokenizer

State = dict[str, Any]
_STATE_VERSION = 1
_SHORTEST_PROMPT = "<|media_begin|>image 9x9<|media_content|><|media_end|>"
_MORE_DIGITS = 8
"""That the longest has, a token each at most: five and five for an image of `MAX_PIXELS`."""


@dataclass(frozen=True)
class Rows:
    """What is read and by whom.

    Attributes:
        packer: makes one that stands at the first row.
        own: rows of each global batch that this process yields, ascending.
        identity: what a saved state must agree on with the loader that restores it.
        batches: after which the loader ends; None never.
        images: whether batches have images.
    """

    packer: Callable[[], Packer | Mixture]
    virtual_shards: int
    sequence_length: int
    batch_size: int
    own: tuple[int, ...]
    batches: int | None
    identity: dict[str, Any]
    images: bool

    def __post_init__(self) -> None:
        if list(self.own) != sorted(set(self.own)) or not set(self.own) <= set(range(self.batch_size)):
            raise DataError(f"rows {self.own} are not ascending rows of a batch of {self.batch_size}")

    def shards_from(self, first_row: int) -> np.ndarray:
        """bool [V]: shards that this process will ever read if batches start at `first_row`.

        Over all steps s, row first_row + s·B + j comes from every shard congruent to first_row + j modulo gcd(V, B).
        """
        period = math.gcd(self.virtual_shards, self.batch_size)
        classes = {(first_row + j) % period for j in self.own}
        return np.array([shard % period in classes for shard in range(self.virtual_shards)])


class _RowDataset(grain.IterDataset[Batch]):
    def __init__(self, rows: Rows):
        super().__init__()
        self._rows = rows

    def __iter__(self) -> _RowIterator:
        return _RowIterator(self._rows)


class _RowIterator(grain.DatasetIterator[Batch]):
    """Packs in the caller's thread. Its state holds an array, which prefetching copies faster than lists."""

    def __init__(self, rows: Rows):
        super().__init__()
        self._rows, self._packer = rows, rows.packer()
        self._next_row = 0
        self._mine = rows.shards_from(0)

    def __next__(self) -> Batch:
        self._assert_not_closed()
        rows, packer = self._rows, self._packer
        own = {row: place for place, row in enumerate(rows.own)}
        if rows.batches is not None and self._next_row >= rows.batches * rows.batch_size:
            raise StopIteration
        batch = empty_batch(len(own), rows.sequence_length, rows.images)
        for j in range(rows.batch_size):
            shard = (self._next_row + j) % rows.virtual_shards
            if j in own:
                packer.fill(shard, batch, own[j])
            elif self._mine[shard]:
                packer.skip(shard)
        self._next_row += rows.batch_size
        return batch

    def get_state(self) -> State:
        return {"next_row": self._next_row, "cursors": np.where(self._mine[:, None], self._packer.cursors, -1)}

    def set_state(self, state: State) -> None:
        mine = self._rows.shards_from(state["next_row"])
        if (unknown := np.flatnonzero(mine & (state["cursors"][:, 0] < 0))).size:
            raise DataError(
                f"the saved state has no cursor for {unknown.size} virtual shards that this process reads, "
                f"{unknown[0]} first: it was saved by one of several processes; pass the states of all of them through "
                "merge_states"
            )
        self._next_row, self._mine = state["next_row"], mine
        self._packer.seek(state["cursors"])


class Loader(grain.DatasetIterator[Batch]):
    """Iterator over batches, read ahead in a thread. Close it, or use it as a context manager.

    Implements grain's state methods and Orbax's stateful protocol: each process saves the cursors of the shards it
    reads, and restoring reads those of all processes, however many they were. The state is that of the last batch
    handed out; batches read ahead do not count.
    """

    def __init__(self, rows: Rows, prefetch: int):
        super().__init__(iter(ThreadPrefetchIterDataset(_RowDataset(rows), prefetch_buffer_size=prefetch)))
        self._identity, self._batch_size = rows.identity, rows.batch_size
        self._inner = list(self._parents)
        self._parents = ()
        # Also runs when the interpreter exits, before modules are torn down: grain's own __del__ would fail then.
        self._finalizer = weakref.finalize(self, _close_all, self._inner)

    def __next__(self) -> Batch:
        """The next batch, see `packing.empty_batch`; rows of this process only.

        Raises:
            DataError: a file has become unreadable or holds a bad record.
        """
        return next(self._reader())

    def get_state(self) -> State:
        """Plain JSON types: version, identity of the data, next global row, and per virtual shard [documents finished,
        tokens taken of the next one], None for shards that other processes read."""
        state = self._reader().get_state()
        cursors = [None if c[0] < 0 else c for c in state["cursors"].tolist()]
        return {"version": _STATE_VERSION, **self._identity, "next_row": state["next_row"], "cursors": cursors}

    def set_state(self, state: State) -> None:
        """Seeks. Sequence length, batch size and number of processes may differ from those that saved the state.

        Raises:
            DataError: the state is of other data, another tokenizer, seed or number of shards, or lacks cursors.
        """
        expected = {"version": _STATE_VERSION, **self._identity}
        names = [*expected, *(name for name in state if name not in expected and name not in ("next_row", "cursors"))]
        wrong = [
            f"{name}: saved {state.get(name)!r}, now {expected.get(name)!r}"
            for name in names
            if state.get(name) != expected.get(name)
        ]
        if wrong:
            raise DataError(f"the saved position is not one in this data; {'; '.join(wrong)}")
        cursors = np.array([c or (-1, -1) for c in state["cursors"]], np.int64)
        self._reader().set_state({"next_row": state["next_row"], "cursors": cursors})

    async def load(self, directory: Any) -> Awaitable[None]:
        """Orbax's stateful protocol; `save` is grain's, a file `process_I-of-N.json` for each process."""

        async def read() -> None:
            paths = sorted(directory.glob("process_*-of-*.json"))
            if not paths or any(not p.name.endswith(f"-of-{len(paths)}.json") for p in paths):
                raise DataError(f"{directory} lacks the loader state of some process; found {[p.name for p in paths]}")
            self.set_state(merge_states([json.loads(p.read_text()) for p in paths]))

        return read()

    def start_prefetch(self) -> None:
        """Starts reading ahead now, while a model is being restored for instance."""
        self._reader().start_prefetch()

    def close(self) -> None:
        """Stops the thread; the loader cannot be used any more. Closing twice does nothing."""
        self._closed = True
        self._finalizer()

    def _reader(self) -> grain.DatasetIterator[Batch]:
        self._assert_not_closed()
        return self._inner[0]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __str__(self) -> str:
        return f"Loader({self._identity['source']}, batch_size={self._batch_size})"


def _close_all(iterators: list[grain.DatasetIterator[Batch]]) -> None:
    while iterators:
        iterators.pop().close()


def merge_states(states: Iterable[State]) -> State:
    """The state of a whole job from those of its processes, for a job with another number of processes.

    Raises:
        DataError: the states are not of one step of one job.
    """
    first, *others = states
    merged = dict(first)
    for state in others:
        if {**state, "cursors": None} != {**first, "cursors": None}:
            raise DataError("loader states of different steps or different data cannot be merged")
        for mine, theirs in zip(merged["cursors"], state["cursors"]):
            if mine is not None and theirs is not None and mine != theirs:
                raise DataError(f"loader states disagree about a virtual shard: {mine} and {theirs}")
        merged["cursors"] = [b if a is None else a for a, b in zip(merged["cursors"], state["cursors"])]
    return merged


@dataclass(frozen=True)
class ImageData:
    """A source of documents with images and its split.

    Attributes:
        store: knows the budget of an image, and which documents were left out so far.
        train, validation: indices into `documents`, int64.
        shards: bool [V], virtual shards of training that read them.
    """

    documents: ImageSource
    store: ImageStore
    train: np.ndarray
    validation: np.ndarray
    shards: np.ndarray


@dataclass(frozen=True)
class TextData:
    """A source, a tokenizer and the split. Made by `open_data`.

    Attributes:
        train, validation: indices into `documents`, int64.
        images: what is read beside the text; None: nothing.
    """

    config: DataConfig
    documents: Documents
    tokenizer: Tokenizer
    store: TokenStore
    train: np.ndarray
    validation: np.ndarray
    images: ImageData | None = None

    def train_loader(self, own: Sequence[int] | None = None) -> Loader:
        """Endless shuffled training batches.

        Args:
            own: rows of each global batch that this process yields, ascending; None: all of them.

        Raises:
            DataError: rows that no batch has.
        """
        seed = self.config.seed
        order = DocumentOrder(self.train, seed)
        if self.images is None:
            return self._loader(order, self.config.virtual_shards, own)
        return self._mixed_loader(order, DocumentOrder(self.images.train, seed), self.images.shards, own)

    def validation_loader(self, num_batches: int | None = None, own: Sequence[int] | None = None) -> Loader:
        """The same batches every time: at most `num_batches`, or every held-out document exactly once.

        Each row of the batch reads its own documents on end. Rows that run out end in padding. With images, the first
        rows (`data.images.share` of them, at least one) read documents with images.
        """
        size = self.config.batch_size
        order = DocumentOrder(self.validation, seed=None, epochs=1)
        if self.images is None:
            return self._loader(order, size, own, num_batches)
        image_order = DocumentOrder(self.images.validation, seed=None, epochs=1)
        image_rows = np.arange(size) < max(1, round(self.config.images.share * size))
        return self._mixed_loader(order, image_order, image_rows, own, num_batches)

    def _mixed_loader(
        self,
        text: DocumentOrder,
        images: DocumentOrder,
        image_shards: np.ndarray,
        own: Sequence[int] | None,
        num_batches: int | None = None,
    ) -> Loader:
        config, data = self.config, self.images
        assert data is not None
        count, length = int(image_shards.sum()), config.sequence_length

        def packer() -> Mixture:
            texts = Packer(text, self.store.tokens, len(image_shards) - count, length)
            pictures = ImagePacker(images, data.store, count, length, config.images.patches, len(self.documents))
            return Mixture(texts, pictures, image_shards)

        identity = {
            "image_source": data.documents.files_hash,
            "image_documents": len(images.documents),
            "image_shards": count,
            "image_budget": data.store.budget,
            "image_tokens": data.store.geometry,
        }
        return self._loader(text, len(image_shards), own, num_batches, packer, identity)

    def _loader(
        self,
        order: DocumentOrder,
        virtual_shards: int,
        own: Sequence[int] | None,
        num_batches: int | None = None,
        mixture: Callable[[], Mixture] | None = None,
        image_identity: dict[str, Any] | None = None,
    ) -> Loader:
        config = self.config

        def text_packer() -> Packer:
            return Packer(order, self.store.tokens, virtual_shards, config.sequence_length)

        packer = mixture or text_packer
        identity = {
            "source": self.documents.files_hash,
            "documents": len(order.documents),
            "tokenizer": self.tokenizer.fingerprint,
            "seed": order.seed,
            "virtual_shards": virtual_shards,
        }
        rows = Rows(
            packer,
            virtual_shards,
            config.sequence_length,
            config.batch_size,
            tuple(range(config.batch_size) if own is None else map(int, own)),
            packer().rows_left(num_batches) if order.epochs is not None else None,
            identity | (image_identity or {}),
            images=mixture is not None,
        )
        return Loader(rows, config.prefetch)

    def name(self, document_id: int) -> str:
        """The document that a batch's `document_ids` call so."""
        behind = document_id - len(self.documents)
        if self.images is None or behind < 0:
            return self.documents.name(document_id)
        return self.images.documents.name(behind)

    def describe(self) -> dict[str, str | int]:
        """For the log at the start of a run; `skipped_image_documents` grows as bad ones are met."""
        described: dict[str, str | int] = {
            "source": self.documents.source,
            "files": len(self.documents.files),
            "files_hash": self.documents.files_hash[:16],
            "bytes": self.documents.text_bytes,
            "skipped_files": len(self.documents.skipped),
            "train_documents": len(self.train),
            "validation_documents": len(self.validation),
            "tokenizer": self.tokenizer.name,
            "tokenizer_vocab_size": self.tokenizer.vocab_size,
        }
        if (images := self.images) is not None:
            described |= {
                "image_source": images.documents.source,
                "image_files_hash": images.documents.files_hash[:16],
                "image_train_documents": len(images.train),
                "image_validation_documents": len(images.validation),
                "image_budget": images.store.budget,
                "image_shards": int(images.shards.sum()),
                "virtual_shards": len(images.shards),
                "skipped_image_documents": len(images.store.skipped),
            }
        return described


def open_data(config: DataConfig, vocab_size: int | None = None, vision: VisionConfig | None = None) -> TextData:
    """Opens source and tokenizer, checks both and splits; the documents with images too, if there are any.

    Args:
        vocab_size: the model's, to refuse a tokenizer that exceeds it.
        vision: the model's, which images need.

    Raises:
        DataError: anything wrong with the data, see `open_documents`, `open_image_documents`, `load_tokenizer` and
            `check_vocabulary`; images for which there is no tower, no room or no shard.
    """
    tokenizer = load_tokenizer(config.tokenizer)
    if vocab_size is not None:
        check_vocabulary(tokenizer, vocab_size)
    limits = None if config.images.source is None else _image_limits(config, tokenizer, vision)
    documents = open_documents(config.source, config.text_field, config.min_bytes)
    train, validation = documents.split(config.validation_percent)
    images = None
    if limits is not None:
        source = open_image_documents(config.images)
        store = ImageStore(source, tokenizer, limits.vision, limits.budget, config.images.on_error == "skip")
        images = ImageData(source, store, *source.split(config.validation_percent), limits.shards)
    return TextData(config, documents, tokenizer, TokenStore(documents, tokenizer), train, validation, images)


class _ImageLimits(NamedTuple):
    vision: VisionConfig
    budget: int
    """Most patches of an image: what a row of patches holds, and a row of tokens with the image's prompt."""
    shards: np.ndarray


def _image_limits(config: DataConfig, tokenizer: Tokenizer, vision: VisionConfig | None) -> _ImageLimits:
    images, length, total = config.images, config.sequence_length, config.virtual_shards
    if vision is None:
        raise DataError(
            f"data.images.source {images.source!r} needs a model with a vision tower: set model.vision, or "
            "data.images.source to None to train on text alone"
        )
    group = vision.merge**2
    if images.patches < group:
        raise DataError(f"data.images.patches {images.patches} holds no image: one token takes {group} patches")
    beside = len(tokenizer.encode(_SHORTEST_PROMPT, allow_special=True)) + _MORE_DIGITS
    if length <= beside:
        raise DataError(
            f"data.sequence_length {length} holds no image: beside its own tokens it takes up to {beside}; "
            f"set it to at least {beside + 1}"
        )
    count = round(images.share * total)
    if count == 0 or (count == total and images.share < 1):
        least = math.ceil(1 / min(images.share, 1 - images.share))
        raise DataError(
            f"data.images.share {images.share} of data.virtual_shards {total} is {'none' if not count else 'all'}; "
            f"raise data.virtual_shards to at least {least}"
        )
    return _ImageLimits(vision, min(images.patches, group * (length - beside)), spread(count, total))
