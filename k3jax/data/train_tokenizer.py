"""Trains a byte-level BPE on the training documents of a source and writes it as a tiktoken rank file.

    python -m k3jax.data.train_tokenizer --source stdlib --vocab 8192 --out python8k.tiktoken

Uses K3's pre-tokeniser. Held-out documents are not looked at. Needs the `tokenizer` extra.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable
from pathlib import Path

import tyro
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

from k3jax.config import DataConfig
from k3jax.data.sources import DataError, open_documents
from k3jax.data.tokenizers import PRETOKENIZER


def train_ranks(texts: Iterable[str], vocab: int) -> list[bytes]:
    """Tokens in the order of their rank; the first 256 are the single bytes.

    Raises:
        DataError: fewer than 256 ranks asked for, or too little text for so many.
    """
    if vocab < 256:
        raise DataError(f"a vocabulary of {vocab} has no room for the 256 single bytes")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRETOKENIZER), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab, initial_alphabet=alphabet, special_tokens=[], show_progress=True)
    tokenizer.train_from_iterator(texts, trainer)
    ids = tokenizer.get_vocab()
    if len(ids) != vocab:
        raise DataError(f"the text gives only {len(ids)} of {vocab} ranks; use more text or a smaller vocabulary")
    byte_of = _byte_of_character()
    return [bytes(byte_of[c] for c in token) for token in sorted(ids, key=ids.__getitem__)]


def _byte_of_character() -> dict[str, int]:
    """Inverse of the byte-level alphabet: printable Latin-1 stands for itself, the other bytes for U+0100 onwards."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(rest)}


def write_ranks(tokens: list[bytes], out: Path) -> None:
    """Writes lines of `base64 rank`."""
    lines = (base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens))
    out.write_bytes(b"".join(lines))


def main(
    out: Path,
    source: str = "stdlib",
    vocab: int = 8192,
    text_field: str = "text",
    validation_percent: int = DataConfig.validation_percent,
) -> None:
    """Trains a byte-level BPE and writes a tiktoken rank file.

    Args:
        out: rank file to write.
        source: "stdlib", or a folder, file or glob of text, JSONL or Parquet files.
        vocab: number of ranks.
        text_field: field of a JSONL record, column of a Parquet file.
        validation_percent: share of documents held out, as in the run that will use the tokenizer.
    """
    documents = open_documents(source, text_field)
    train, _ = documents.split(validation_percent)
    tokens = train_ranks((documents.text(int(i)) for i in train), vocab)
    write_ranks(tokens, out)
    print(f"{out}: {len(tokens)} ranks from {len(train)} documents (files hash {documents.files_hash[:16]})")


if __name__ == "__main__":
    tyro.cli(main)
