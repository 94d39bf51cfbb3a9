"""Documents into rows of a fixed length, by virtual shards that each keep one cursor.

All documents of all epochs form one endless line: position `e * D + i` is the i-th of D documents in the order of epoch
e, a pseudo-random permutation whose every value is computed in O(1) from (seed, e). The document at position p belongs
to virtual shard p mod V. A shard packs its documents end to end, each followed by EOS, and cuts the stream every
`sequence_length` tokens; global row r is the next row of shard r mod V. So the rows do not depend on who computes them,
and a cursor of two numbers per shard (documents finished, tokens taken of the next one) says all about the past.
Every token is input once, and target once unless it is the first of its document.

Legend: B rows, T sequence length, V virtual shards.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from grain.experimental import index_shuffle

from k3jax.data.sources import DataError, Documents
from k3jax.data.tokenizers import Tokenizer

Batch = dict[str, np.ndarray]


def empty_batch(rows: int, sequence_length: int) -> Batch:
    """A batch of padding.

    Returns:
        tokens [B,T] int32; targets [B,T] int32, the next token, 0 where masked; segment_ids [B,T] int32, documents
        numbered from 1 in each row, 0 = padding; loss_mask [B,T] bool, True where the target is the next token of the
        same document; document_ids [B,T] int32, index in `Documents`, -1 = padding.
    """
    shape = (rows, sequence_length)
    return {
        "tokens": np.zeros(shape, np.int32),
        "targets": np.zeros(shape, np.int32),
        "segment_ids": np.zeros(shape, np.int32),
        "loss_mask": np.zeros(shape, np.bool_),
        "document_ids": np.full(shape, -1, np.int32),
    }


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
        self._open: dict[int, tuple[int, np.ndarray]] = {}

    def seek(self, cursors: np.ndarray) -> None:
        """Continues from other cursors, [V,2]; documents are opened when their shard is read next."""
        self.cursors = cursors.astype(np.int64)
        self._open.clear()

    def document(self, shard: int) -> tuple[int, np.ndarray] | None:
        """The document under the shard's cursor: its index and all its tokens; None behind the end."""
        if shard not in self._open:
            finished, taken = (int(c) for c in self.cursors[shard])
            index = self._order.at(shard + finished * self.virtual_shards)
            if index is None:
                return None
            tokens = self._tokens(index)
            if taken >= len(tokens):
                raise DataError(
                    f"the cursor of virtual shard {shard} is {taken} tokens into document {index}, which has only "
                    f"{len(tokens)}: the data or the tokenizer is not that of the checkpoint"
                )
            self._open[shard] = index, tokens
        return self._open[shard]

    def fill(self, shard: int, batch: Batch, row: int) -> None:
        """Writes the shard's next row into `batch`; what is left behind the last document stays padding."""
        T = self.sequence_length
        column, segment = 0, 0
        while column < T and (current := self.document(shard)) is not None:
            index, tokens = current
            taken = int(self.cursors[shard, 1])
            n = min(len(tokens) - taken, T - column)
            targets = min(n, len(tokens) - taken - 1)  # EOS predicts nothing
            segment += 1
            batch["tokens"][row, column : column + n] = tokens[taken : taken + n]
            batch["targets"][row, column : column + targets] = tokens[taken + 1 : taken + 1 + targets]
            batch["loss_mask"][row, column : column + targets] = True
            batch["segment_ids"][row, column : column + n] = segment
            batch["document_ids"][row, column : column + n] = index
            column += n
            self._advance(shard, taken + n, len(tokens))

    def skip(self, shard: int) -> None:
        """Passes over the shard's next row, which another process yields."""
        left = self.sequence_length
        while left and (current := self.document(shard)) is not None:
            tokens = current[1]
            taken = int(self.cursors[shard, 1])
            n = min(len(tokens) - taken, left)
            left -= n
            self._advance(shard, taken + n, len(tokens))

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
