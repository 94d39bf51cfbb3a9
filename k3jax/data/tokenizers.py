"""Tokenizers: plain bytes, and rank files in tiktoken's format (the format of K3's own vocabulary).

Both end in 256 special ids, laid out as in K3: the id is `base + offset`, base being the number of ordinary tokens
(163,584 in K3's file, 256 for bytes). Special names typed in a text are ordinary characters unless `allow_special`.

    >>> from k3jax.data.tokenizers import load_tokenizer
    >>> tokenizer = load_tokenizer("bytes")
    >>> tokenizer.encode("<|open|>")[:3], tokenizer.encode("<|open|>", allow_special=True)
    ([60, 124, 111], [259])
"""

from __future__ import annotations

import base64
import codecs
import hashlib
import operator
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol

import numpy as np
import tiktoken

from k3jax.data.sources import DataError

NUM_SPECIAL = 256
SPECIAL_OFFSETS = {
    "[BOS]": 0,
    "[EOS]": 1,
    "<|end_of_msg|>": 2,
    "<|open|>": 3,
    "<|close|>": 4,
    "<|sep|>": 5,
    "[start_header_id]": 6,
    "[end_header_id]": 7,
    "[EOT]": 9,
    "<|media_begin|>": 18,
    "<|media_content|>": 19,
    "<|media_end|>": 20,
    "<|media_pad|>": 21,
    "<osagent_mode>": 65,
    "[UNK]": 254,
    "[PAD]": 255,
}
"""Offset of each named special token from the first special id; the others are `<|reserved_token_ID|>`."""

MEDIA_TOKEN = "<|media_pad|>"
"""What stands in a prompt for each feature of an image."""

_MAX_PIECE = 400_000
_MAX_RUN = 25_000
_LONG_RUN = re.compile(rf"\s{{{_MAX_RUN + 1},}}|\S{{{_MAX_RUN + 1},}}")


def _pretokenizer() -> str:
    """K3's splitting rule as a regular expression with `&&` class intersection (Rust regex, Oniguruma).

    Han characters stand apart from all other letters; a word is an upper-case part and a lower-case part, either of
    which may be absent, and may take one character before it and an English contraction behind it.
    """
    caseless = r"\p{Lm}\p{Lo}\p{M}"
    upper = rf"[\p{{Lu}}\p{{Lt}}{caseless}&&[^\p{{Han}}]]"
    lower = rf"[\p{{Ll}}{caseless}&&[^\p{{Han}}]]"
    before = r"[^\r\n\p{L}\p{N}]?"
    contraction = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    return "|".join(
        [
            r"[\p{Han}]+",
            f"{before}{upper}*{lower}+{contraction}",
            f"{before}{upper}+{lower}*{contraction}",
            r"\p{N}{1,3}",
            r" ?[^\s\p{L}\p{N}]+[\r\n]*",
            r"\s*[\r\n]+",
            r"\s+(?!\S)",
            r"\s+",
        ]
    )


PRETOKENIZER = _pretokenizer()


class Tokenizer(Protocol):
    """What the rest of k3jax needs of a tokenizer. Ids are 0 ≤ id < vocab_size.

    Attributes:
        name: for messages and logs.
        fingerprint: changes whenever the ids of any text could; kept in checkpoints.
        token_bytes: int32 [vocab_size], UTF-8 bytes that each id stands for, 0 for special ids. Turns a loss in nats
            into bits per byte: total nats / ln 2 / sum of `token_bytes` over the same targets.
    """

    name: str
    fingerprint: str
    vocab_size: int
    bos_id: int
    eos_id: int
    pad_id: int
    special_tokens: dict[str, int]
    token_bytes: np.ndarray

    def encode(self, text: str, allow_special: bool = False) -> list[int]:
        """Ids of a text; with `allow_special`, names of special tokens in it become their ids."""
        ...

    def encode_array(self, text: str) -> np.ndarray:
        """Ids of a text without special tokens, [n] of an unsigned integer dtype: the loader's path."""
        ...

    def encode_segments(self, segments: Iterable[tuple[str, bool]]) -> list[int]:
        """Ids of (text, allow_special) segments, each encoded by itself: no token spans a border."""
        ...

    def id_bytes(self, token: int) -> bytes:
        """The bytes one id stands for; a special id gives its name."""
        ...

    def decode(self, tokens: Iterable[int]) -> str:
        """Text of ids; bytes that are no UTF-8 become U+FFFD."""
        ...


class _Special:
    """What both tokenizers share: special ids behind `base` ordinary ones, segments, decoding."""

    def __init__(self, name: str, base: int):
        self.name, self.base, self.vocab_size = name, base, base + NUM_SPECIAL
        self.bos_id, self.eos_id, self.pad_id = (base + SPECIAL_OFFSETS[n] for n in ("[BOS]", "[EOS]", "[PAD]"))
        names = {base + i: f"<|reserved_token_{base + i}|>" for i in range(NUM_SPECIAL)}
        names |= {base + offset: name for name, offset in SPECIAL_OFFSETS.items()}
        self._names = names
        self.special_tokens = {name: token for token, name in names.items()}

    def encode(self, text: str, allow_special: bool = False) -> list[int]:
        raise NotImplementedError

    def ordinary_bytes(self, token: int) -> bytes:
        raise NotImplementedError

    def encode_segments(self, segments: Iterable[tuple[str, bool]]) -> list[int]:
        return [token for text, allow_special in segments if text for token in self.encode(text, allow_special)]

    def id_bytes(self, token: int) -> bytes:
        token = operator.index(token)
        if not 0 <= token < self.vocab_size:
            raise DataError(
                f"token {token} is outside the vocabulary of tokenizer {self.name} (0..{self.vocab_size - 1})"
            )
        return self.ordinary_bytes(token) if token < self.base else self._names[token].encode()

    def decode(self, tokens: Iterable[int]) -> str:
        return b"".join(map(self.id_bytes, tokens)).decode("utf-8", "replace")


class ByteTokenizer(_Special):
    """One id per UTF-8 byte; vocabulary 512."""

    def __init__(self) -> None:
        super().__init__("bytes", 256)
        self.fingerprint = "bytes"
        self.token_bytes = np.repeat(np.array([1, 0], np.int32), [256, NUM_SPECIAL])
        self._special = re.compile("(" + "|".join(map(re.escape, self.special_tokens)) + ")")

    def encode(self, text: str, allow_special: bool = False) -> list[int]:
        if not allow_special:
            return list(_utf8(text))
        parts = self._special.split(text)
        return [
            t for part in parts for t in ([self.special_tokens[part]] if part in self.special_tokens else _utf8(part))
        ]

    def encode_array(self, text: str) -> np.ndarray:
        return np.frombuffer(_utf8(text), np.uint8)

    def ordinary_bytes(self, token: int) -> bytes:
        return bytes([token])


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "replace")  # a prompt may hold lone surrogates


class TiktokenTokenizer(_Special):
    """Byte-pair encoding by a rank file (lines of `base64-of-the-bytes rank`) with K3's pre-tokeniser.

    Like the released tokenizer it encodes 400,000 characters at a time and cuts runs of more than 25,000 characters
    with, or without, white space.

    Raises:
        DataError: a line that is no rank, a duplicate, a gap, or a missing single byte (which line).
    """

    def __init__(self, path: str | Path, name: str | None = None):
        path = Path(path)
        try:
            data = path.read_bytes()
        except OSError as error:
            raise DataError(f"rank file {path} cannot be read: {error.strerror}") from error
        ranks = parse_ranks(data, str(path))
        super().__init__(name or path.name, len(ranks))
        self.fingerprint = f"tiktoken:{hashlib.sha256(data).hexdigest()[:16]}"
        self.token_bytes = np.zeros(self.vocab_size, np.int32)
        for token, rank in ranks.items():
            self.token_bytes[rank] = len(token)
        self._allowed = set(self.special_tokens)
        self._encoding = tiktoken.Encoding(
            self.name,
            pat_str=PRETOKENIZER,
            mergeable_ranks=ranks,
            special_tokens=self.special_tokens,
            explicit_n_vocab=self.vocab_size,
        )

    def encode(self, text: str, allow_special: bool = False) -> list[int]:
        allowed = self._allowed if allow_special else set()
        pieces = [
            self._encoding.encode(p, allowed_special=allowed, disallowed_special=()) for p in guarded_pieces(text)
        ]
        return pieces[0] if len(pieces) == 1 else [token for piece in pieces for token in piece]

    def encode_array(self, text: str) -> np.ndarray:
        pieces = [self._encoding.encode_to_numpy(p, disallowed_special=()) for p in guarded_pieces(text)]
        return np.concatenate(pieces) if pieces else np.zeros(0, np.uint32)

    def ordinary_bytes(self, token: int) -> bytes:
        return self._encoding.decode_single_token_bytes(token)


def guarded_pieces(text: str) -> Iterator[str]:
    """Cuts a text into what tiktoken is given at once: at most 400,000 characters, and no run of more than 25,000
    white-space or non-white-space characters (tiktoken is quadratic, or overflows its stack, on longer ones)."""
    for start in range(0, len(text), _MAX_PIECE):
        piece = text[start : start + _MAX_PIECE]
        cut = 0
        for run in _LONG_RUN.finditer(piece) if len(piece) > _MAX_RUN else ():
            for border in range(run.start() + _MAX_RUN, run.end(), _MAX_RUN):
                yield piece[cut:border]
                cut = border
        yield piece[cut:]


def parse_ranks(data: bytes, where: str) -> dict[bytes, int]:
    """Ranks of a tiktoken file, checked: every rank 0..n-1 once, every token once, all 256 single bytes.

    Raises:
        DataError: which line is wrong, and how.
    """
    ranks: dict[bytes, int] = {}
    lines: dict[int, int] = {}
    for number, line in enumerate(data.splitlines(), 1):
        if not line.strip():
            continue
        try:
            encoded, digits = line.split()
            token, rank = base64.b64decode(encoded, validate=True), int(digits)
        except ValueError as error:
            raise DataError(f"{where}:{number}: expected 'base64 rank', found {line[:60]!r}") from error
        if not token or rank < 0:
            raise DataError(f"{where}:{number}: an empty token or a negative rank")
        if rank in lines:
            raise DataError(f"{where}:{number}: rank {rank} was already given in line {lines[rank]}")
        if token in ranks:
            raise DataError(f"{where}:{number}: token {token!r} was already given in line {lines[ranks[token]]}")
        ranks[token], lines[rank] = rank, number
    for expected, rank in enumerate(sorted(lines)):
        if rank != expected:
            raise DataError(f"{where}:{lines[rank]}: rank {rank} follows {expected - 1}; rank {expected} is missing")
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise DataError(f"{where}: no rank for {len(missing)} of the 256 single bytes, the first is 0x{missing[0]:02x}")
    return ranks


class StreamDecoder:
    """Decodes ids one by one; bytes of an unfinished UTF-8 sequence wait for the ids that complete it.

    >>> decoder = StreamDecoder(load_tokenizer("bytes"))
    >>> [decoder.feed(byte) for byte in "é".encode()], decoder.flush()
    (['', 'é'], '')
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token: int) -> str:
        """The text that has become complete with this id."""
        return self._decoder.decode(self._tokenizer.id_bytes(token))

    def flush(self) -> str:
        """What is left; an unfinished sequence becomes U+FFFD."""
        return self._decoder.decode(b"", final=True)


def load_tokenizer(name_or_path: str) -> Tokenizer:
    """ "bytes", "python8k" (8,192 ranks trained on Python source, shipped with k3jax), or a tiktoken rank file.

    A folder stands for the `tiktoken.model` in it, as in K3's checkpoint.

    Raises:
        DataError: no such file, or a bad rank file.
    """
    if name_or_path == "bytes":
        return ByteTokenizer()
    if name_or_path == "python8k":
        return TiktokenTokenizer(Path(__file__).with_name("python8k.tiktoken"), name="python8k")
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        path = path / "tiktoken.model"
    if not path.is_file():
        raise DataError(f"data.tokenizer {name_or_path!r} is neither 'bytes' nor 'python8k' nor an existing rank file")
    return TiktokenTokenizer(path)


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Refuses a tokenizer that could make ids beyond the model's embedding.

    Raises:
        DataError: `tokenizer.vocab_size` exceeds `vocab_size` (the model's).
    """
    if tokenizer.vocab_size > vocab_size:
        raise DataError(
            f"tokenizer {tokenizer.name} makes ids up to {tokenizer.vocab_size - 1} but model.vocab_size is "
            f"{vocab_size}; set model.vocab_size to at least {tokenizer.vocab_size} or choose another data.tokenizer"
        )


def check_tokens(tokens: np.ndarray | list[int], tokenizer: Tokenizer, vocab_size: int) -> None:
    """Refuses ids outside the model's vocabulary, in a prompt for instance.

    Raises:
        DataError: an id below 0 or at least `vocab_size`, with its position.
    """
    flat = np.asarray(tokens, np.int64).reshape(-1)
    bad = np.flatnonzero((flat < 0) | (flat >= vocab_size))
    if len(bad):
        raise DataError(
            f"token {flat[bad[0]]} at position {bad[0]} (tokenizer {tokenizer.name}, {tokenizer.vocab_size} ids) is "
            f"outside model.vocab_size {vocab_size}"
        )
