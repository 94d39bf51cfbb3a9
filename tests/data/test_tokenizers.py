"""Claims about tokenizers."""

import base64
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3jax.data.sources import DataError, open_documents
from k3jax.data.tokenizers import (
    SPECIAL_OFFSETS,
    ByteTokenizer,
    StreamDecoder,
    TiktokenTokenizer,
    check_tokens,
    check_vocabulary,
    guarded_pieces,
    load_tokenizer,
    parse_ranks,
)
from k3jax.data.train_tokenizer import train_ranks, write_ranks

CHAT = json.loads((Path(__file__).parent.parent / "golden" / "g10_chat" / "segments.json").read_text())
TOKENIZERS = {name: load_tokenizer(name) for name in ("bytes", "python8k")}
any_tokenizer = pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS.keys())


def rank_lines(extra=()):
    return [base64.b64encode(token).decode() + f" {rank}" for rank, token in enumerate([*BYTES, *extra])]


BYTES = [bytes([b]) for b in range(256)]


@any_tokenizer
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_survives_encoding_and_decoding(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode_array(text).tolist() == ids
    assert all(token < tokenizer.vocab_size - 256 for token in ids)
    assert tokenizer.token_bytes[ids].sum() == len(text.encode())


@any_tokenizer
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_streamed_decoding_never_breaks_a_character_and_equals_decoding_at_once(tokenizer, text):
    decoder = StreamDecoder(tokenizer)
    parts = [decoder.feed(token) for token in tokenizer.encode(text)]
    assert "".join(parts) + decoder.flush() == text
    assert all(part in text for part in parts)


@any_tokenizer
def test_bytes_that_are_no_text_decode_to_replacement_characters(tokenizer):
    ids = (
        tokenizer.encode("€uro")[1:]
        if tokenizer.name == "bytes"
        else [*tokenizer.encode("€")[:1], *tokenizer.encode("x")]
    )
    decoder = StreamDecoder(tokenizer)
    assert "\ufffd" in tokenizer.decode(ids)
    assert "".join(map(decoder.feed, ids)) + decoder.flush() == tokenizer.decode(ids)


@any_tokenizer
def test_special_ids_have_k3s_offsets(tokenizer):
    base = tokenizer.vocab_size - 256
    for name, offset in SPECIAL_OFFSETS.items():
        assert tokenizer.encode(name, allow_special=True) == [base + offset]
        assert tokenizer.decode([base + offset]) == name
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (base, base + 1, base + 255)
    assert tokenizer.encode(f"a<|reserved_token_{base + 8}|>b", allow_special=True)[1] == base + 8
    assert not tokenizer.token_bytes[base:].any()
    assert len(tokenizer.special_tokens) == 256


def test_a_rank_file_of_k3s_size_gives_the_released_special_ids(tmp_path):
    tokens = [*BYTES, *(b"%06d" % i for i in range(163_584 - 256))]
    path = tmp_path / "tiktoken.model"
    write_ranks(tokens, path)
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer.vocab_size == 163_840
    released = {
        "[BOS]": 163584,
        "[EOS]": 163585,
        "<|end_of_msg|>": 163586,
        "<|open|>": 163587,
        "<|close|>": 163588,
        "<|sep|>": 163589,
        "[start_header_id]": 163590,
        "[end_header_id]": 163591,
        "<|reserved_token_163592|>": 163592,
        "[EOT]": 163593,
        "<|media_begin|>": 163602,
        "<|media_content|>": 163603,
        "<|media_end|>": 163604,
        "<|media_pad|>": 163605,
        "<osagent_mode>": 163649,
        "[UNK]": 163838,
        "[PAD]": 163839,
    }
    assert {name: tokenizer.special_tokens[name] for name in released} == released


@any_tokenizer
@pytest.mark.parametrize("case", CHAT)
def test_chat_segments_encode_one_by_one_and_round_trip(tokenizer, case):
    segments = [(text, special) for text, special in CHAT[case]["segments"]]
    ids = tokenizer.encode_segments(segments)
    assert tokenizer.decode(ids) == CHAT[case]["text"]
    assert ids == [token for text, special in segments for token in tokenizer.encode(text, special)]
    specials = [token for token in ids if token >= tokenizer.vocab_size - 256]
    controls = ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")
    inside = sum(text.count("<|media_") for text, special in segments if special and text not in controls)
    assert len(specials) == sum(text in controls for text, special in segments if special) + inside


@any_tokenizer
def test_special_names_typed_by_a_user_are_ordinary_tokens(tokenizer):
    ids = tokenizer.encode_segments([("<|open|>", True), ("literal <|open|> and [EOS]", False), ("", False)])
    assert ids[0] == tokenizer.special_tokens["<|open|>"]
    assert max(ids[1:]) < tokenizer.vocab_size - 256


def test_segments_are_never_merged_across_their_border():
    tokenizer = TOKENIZERS["python8k"]
    assert tokenizer.encode_segments([("impo", False), ("rt", False)]) != tokenizer.encode("import")
    assert tokenizer.encode_segments([("", True), ("import", False), ("", False)]) == tokenizer.encode("import")


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("你好hello世界", ["你好", "hello", "世界"]),
        ("HTTPServer's it'Ll", ["HTTPServer's", " it'Ll"]),
        ("getValueOf", ["get", "Value", "Of"]),
        ("1234567", ["123", "456", "7"]),
        ("x = (1)\n\n  y", ["x", " =", " (", "1", ")\n\n", " ", " y"]),
        ("a \n \n  ", ["a", " \n \n", "  "]),
        ("naïve ǅungla", ["naïve", " ǅungla"]),
    ],
)
def test_pretokenizer_splits_as_documented(tmp_path, text, pieces):
    # A vocabulary that holds each wanted piece, but also every longer neighbour pair, tells pieces apart from merges.
    runs = {p.encode() for p in pieces} | {(a + b).encode() for a, b in zip(pieces, pieces[1:])}
    prefixes = {run[:n] for run in runs for n in range(2, len(run) + 1)}
    write_ranks([*BYTES, *sorted(prefixes, key=lambda t: (len(t), t))], tmp_path / "r")
    tokenizer = TiktokenTokenizer(tmp_path / "r")
    assert [tokenizer.decode([token]) for token in tokenizer.encode(text)] == pieces


def test_long_runs_and_long_texts_are_cut_and_still_round_trip():
    texts = ["x" * 60_000 + " " * 30_000 + "y", "word " * 100_000, "a" * 25_000 + "b c"]
    for text in texts:
        pieces = list(guarded_pieces(text))
        assert "".join(pieces) == text
        assert max(map(len, pieces)) <= 400_000
        assert TOKENIZERS["python8k"].decode(TOKENIZERS["python8k"].encode(text)) == text
    assert [len(p) for p in guarded_pieces(texts[0])] == [25_000, 25_000, 35_000, 5_001]
    assert [len(p) for p in guarded_pieces(texts[1])] == [400_000, 100_000]
    assert list(guarded_pieces("")) == []


def test_python8k_has_8192_ranks_and_compresses_python_more_than_threefold():
    tokenizer, documents = TOKENIZERS["python8k"], open_documents("stdlib")
    assert tokenizer.vocab_size == 8192 + 256
    text = "".join(documents.text(int(i)) for i in documents.split(5)[1][:20])
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    print(f"python8k on held-out standard library: {len(text.encode()) / len(ids):.2f} bytes per token")
    assert len(text.encode()) / len(ids) > 3


def test_trained_ranks_are_a_valid_rank_file_with_the_frequent_words(tmp_path):
    tokens = train_ranks(["def frequent(word):\n    return word\n" * 50, "你好" * 20], vocab=285)
    write_ranks(tokens, tmp_path / "r")
    tokenizer = TiktokenTokenizer(tmp_path / "r")
    assert tokenizer.vocab_size == 285 + 256
    assert len(tokenizer.encode(" frequent")) == 1
    assert len(tokenizer.encode("你好")) < len("你好".encode())
    with pytest.raises(DataError, match="gives only"):
        train_ranks(["abc"], vocab=5000)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda lines: lines[:100] + ["!!! 100"] + lines[101:], r"r:101: expected 'base64 rank', found b'!!! 100'"),
        (lambda lines: lines[:100] + ["YQ=="] + lines[101:], "r:101: expected"),
        (lambda lines: lines[:100] + ["YQ== x"] + lines[101:], "r:101: expected"),
        (lambda lines: [*lines, "YWI= 7"], "r:257: rank 7 was already given in line 8"),
        (lambda lines: [*lines, "YQ== 256"], r"r:257: token b'a' was already given in line 98"),
        (lambda lines: [*lines, "YWI= 260"], "r:257: rank 260 follows 255; rank 256 is missing"),
        (lambda lines: [*lines[:255], "YWI= 255"], "r: no rank for 1 of the 256 single bytes, the first is 0xff"),
    ],
)
def test_bad_rank_file_is_refused_with_its_line(damage, message):
    lines = rank_lines()
    assert len(parse_ranks("\n".join(lines).encode(), "r")) == 256
    with pytest.raises(DataError, match=message):
        parse_ranks("\n".join(damage(lines)).encode(), "r")


def test_unknown_tokenizer_is_refused():
    with pytest.raises(DataError, match="'wordpiece' is neither 'bytes' nor 'python8k' nor an existing rank file"):
        load_tokenizer("wordpiece")


def test_tokens_outside_the_vocabulary_are_refused_by_name():
    tokenizer = ByteTokenizer()
    check_vocabulary(tokenizer, 512)
    with pytest.raises(DataError, match="tokenizer bytes makes ids up to 511 but model.vocab_size is 256"):
        check_vocabulary(tokenizer, 256)
    check_tokens([0, 511], tokenizer, 512)
    with pytest.raises(DataError, match=r"token 512 at position 3 \(tokenizer bytes.*outside model.vocab_size 512"):
        check_tokens(np.array([[0, 1], [2, 512]]), tokenizer, 512)
    with pytest.raises(DataError, match="token -1 at position 0"):
        check_tokens([-1], tokenizer, 512)
    with pytest.raises(DataError, match="token 512 is outside the vocabulary of tokenizer bytes"):
        tokenizer.decode([512])
