"""Claims about order, packing, state and life of the loader."""

import asyncio
import dataclasses
import itertools
import json
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from orbax.checkpoint.experimental import v1 as ocp

from k3jax.config import DataConfig
from k3jax.data.loader import merge_states, open_data
from k3jax.data.packing import DocumentOrder, Packer
from k3jax.data.sources import DataError

EOS = 257


@pytest.fixture
def corpus(tmp_path):
    """Forty-odd training documents, 0 to 90 bytes each and one much longer; a config that reads them."""
    rng = np.random.default_rng(0)
    lengths = [0, 1, 700, *rng.integers(2, 90, 45)]
    letters = np.array(list("abcdefghij\n é"))
    lines = [json.dumps({"text": "".join(rng.choice(letters, n))}) for n in lengths]
    (tmp_path / "d.jsonl").write_text("\n".join(lines))
    return DataConfig(
        source=str(tmp_path), min_bytes=0, virtual_shards=8, batch_size=4, sequence_length=32, validation_percent=10
    )


def take(loader, n):
    return list(itertools.islice(loader, n))


def assert_same(a, b):
    assert len(a) == len(b)
    for x, y in zip(a, b):
        assert x.keys() == y.keys()
        for name in x:
            np.testing.assert_array_equal(x[name], y[name], err_msg=name)


def part(config, index, count):
    """Rows of process `index` of `count` that cut the batch evenly."""
    rows = config.batch_size // count
    return range(index * rows, (index + 1) * rows)


def glue(parts):
    """Global batches from those of all processes."""
    return [{name: np.concatenate([p[name] for p in step]) for name in step[0]} for step in zip(*parts)]


def naive_rows(data, shards, length, rows):
    """The rows as their definition reads: each shard one long list of tokens, cut every `length`."""
    order = DocumentOrder(data.train, data.config.seed)
    streams = []
    for shard in range(shards):
        stream = []
        for k in itertools.count():
            if len(stream) >= length * (rows // shards + 1):
                break
            doc = order.at(shard + k * shards)
            tokens = [*data.documents.text(doc).encode(), EOS]
            stream += [(token, doc, k, following) for token, following in zip(tokens, [*tokens[1:], None])]
        streams.append(stream)
    for r in range(rows):
        turn = r // shards
        part = streams[r % shards][turn * length : (turn + 1) * length]
        first = part[0][2]
        yield {
            "tokens": [t for t, *_ in part],
            "document_ids": [d for _, d, *_ in part],
            "segment_ids": [k - first + 1 for _, _, k, _ in part],
            "targets": [f or 0 for *_, f in part],
            "loss_mask": [f is not None for *_, f in part],
        }


@pytest.mark.parametrize(("shards", "batch", "length"), [(8, 4, 32), (8, 6, 7), (3, 8, 50), (1, 1, 2), (256, 2, 16)])
def test_rows_are_those_of_the_definition(corpus, shards, batch, length):
    config = dataclasses.replace(corpus, virtual_shards=shards, batch_size=batch, sequence_length=length)
    data = open_data(config)
    with data.train_loader() as loader:
        batches = take(loader, 30)
    rows = [{name: b[name][j].tolist() for name in b} for b in batches for j in range(batch)]
    assert rows == list(naive_rows(data, shards, length, len(rows)))
    assert {name: str(a.dtype) for name, a in batches[0].items()} == {
        "tokens": "int32",
        "targets": "int32",
        "segment_ids": "int32",
        "loss_mask": "bool",
        "document_ids": "int32",
    }


def test_order_is_a_pure_function_of_seed_and_position():
    documents = np.arange(100, 1100)

    def epoch(seed, e):
        order = DocumentOrder(documents, seed)
        return [order.at(e * 1000 + i) for i in range(1000)]

    assert epoch(0, 0) == epoch(0, 0)
    assert len({tuple(epoch(seed, e)) for seed in range(3) for e in range(3)}) == 9
    for seed, e in ((0, 0), (7, 10**9)):
        assert sorted(epoch(seed, e)) == documents.tolist()


def test_order_is_the_same_in_every_release():
    # Checkpoints hold positions in this order: a change would silently repeat and drop documents on resume.
    order = DocumentOrder(np.arange(1000), seed=0)
    assert [order.at(i) for i in (0, 1, 2, 999, 1000, 10**6)] == [4, 946, 212, 801, 920, 947]


def test_every_document_comes_once_an_epoch_and_whole(corpus):
    data = open_data(corpus)
    packer = Packer(DocumentOrder(data.train, seed=3, epochs=2), data.store.tokens, corpus.virtual_shards, 32)
    rows = packer.rows_left(most=None) * corpus.virtual_shards
    config = dataclasses.replace(corpus, seed=3, batch_size=corpus.virtual_shards)
    with dataclasses.replace(data, config=config).train_loader() as loader:
        batches = take(loader, rows // config.batch_size)
    seen = {int(i): [] for i in data.train}
    for row in range(config.batch_size):
        tokens = np.concatenate([b["tokens"][row] for b in batches])
        ids = np.concatenate([b["document_ids"][row] for b in batches])
        ends = np.flatnonzero(tokens == EOS) + 1
        for start, end in zip([0, *ends], ends):
            assert len(set(ids[start:end])) == 1
            seen[int(ids[start])].append(bytes(tokens[start : end - 1].tolist()).decode())
    for document, texts in seen.items():
        assert len(texts) >= 2
        assert set(texts) == {data.documents.text(document)}


def test_masked_targets_stay_within_their_document_and_padding_is_marked(corpus):
    data = open_data(corpus)
    with data.train_loader() as train, data.validation_loader() as validation:
        for batch in [*take(train, 40), *validation]:
            mask, segments = batch["loss_mask"], batch["segment_ids"]
            assert not mask[batch["tokens"] == EOS].any()
            inside = mask[:, :-1]
            np.testing.assert_array_equal(batch["targets"][:, :-1][inside], batch["tokens"][:, 1:][inside])
            np.testing.assert_array_equal(segments[:, :-1][inside], segments[:, 1:][inside])
            assert not batch["targets"][~mask].any()
            np.testing.assert_array_equal(segments == 0, batch["document_ids"] == -1)
            assert not mask[segments == 0].any()
            np.testing.assert_array_equal(np.diff(segments)[segments[:, 1:] > 0] >= 0, True)


@pytest.mark.parametrize("prefetch", [0, 1, 5])
def test_resume_in_mid_epoch_equals_the_uninterrupted_run(corpus, prefetch):
    data = open_data(dataclasses.replace(corpus, prefetch=prefetch))
    with data.train_loader() as loader:
        take(loader, 13)
        state = json.loads(json.dumps(loader.get_state()))
        expected = take(loader, 25)
    with data.train_loader() as loader:
        take(loader, 3)
        loader.set_state(state)
        assert loader.get_state() == state
        assert_same(take(loader, 25), expected)


@pytest.mark.parametrize("batch", [4, 12])
def test_processes_together_yield_the_rows_of_one(corpus, batch):
    data = open_data(dataclasses.replace(corpus, batch_size=batch))
    with data.train_loader() as loader:
        expected = take(loader, 20)
    parts = []
    for i in range(4):
        with data.train_loader(part(data.config, i, 4)) as loader:
            parts.append(take(loader, 20))
    assert_same(glue(parts), expected)


@pytest.mark.parametrize("batch", [4, 12])
def test_number_of_processes_may_change_in_mid_run(corpus, batch):
    data = open_data(dataclasses.replace(corpus, batch_size=batch))
    with data.train_loader() as loader:
        expected = take(loader, 30)
    got, state = [], None
    for processes in (1, 4, 2):
        parts, states = [], []
        for i in range(processes):
            with data.train_loader(part(data.config, i, processes)) as loader:
                if state:
                    loader.set_state(state)
                parts.append(take(loader, 10))
                states.append(loader.get_state())
        got += glue(parts)
        state = merge_states(states)
    assert_same(got, expected)


def test_batch_size_may_change_in_mid_run(corpus):
    data = open_data(corpus)
    with data.train_loader() as loader:
        expected = take(loader, 9)
        state = loader.get_state()
        expected += take(loader, 3)
    wider = dataclasses.replace(data, config=dataclasses.replace(corpus, batch_size=12))
    parts = []
    for i in range(2):
        with wider.train_loader(part(wider.config, i, 2)) as loader:
            loader.set_state(state)
            parts.append(take(loader, 1))
    np.testing.assert_array_equal(
        glue(parts)[0]["tokens"], np.concatenate([b["tokens"] for b in expected[9:]]), strict=True
    )


def test_sequence_length_may_change_in_mid_run_without_losing_a_token(corpus):
    config = dataclasses.replace(corpus, batch_size=corpus.virtual_shards)
    data = open_data(config)
    with data.train_loader() as loader:
        streams = np.concatenate([b["tokens"] for b in take(loader, 20)], axis=1)
    with data.train_loader() as loader:
        first = take(loader, 5)
        state = loader.get_state()
    longer = dataclasses.replace(data, config=dataclasses.replace(config, sequence_length=96))
    with longer.train_loader() as loader:
        loader.set_state(state)
        rest = take(loader, 5)
    np.testing.assert_array_equal(np.concatenate([b["tokens"] for b in first + rest], axis=1), streams)


def test_restoring_replays_nothing(corpus, monkeypatch):
    data = open_data(dataclasses.replace(corpus, prefetch=0))
    read = []
    original = data.store.tokens
    monkeypatch.setattr(data.store, "tokens", lambda i: read.append(i) or original(i))
    with data.train_loader() as loader:
        state = loader.get_state()
        state["cursors"] = [[10**12, 0]] * corpus.virtual_shards
        state["next_row"] = 10**12
        loader.set_state(state)
        assert not read
        batch = next(loader)
    assert len(read) <= (batch["segment_ids"].max(axis=1) + 1).sum()


def test_a_state_of_other_data_is_refused_by_what_differs(corpus, tmp_path):
    data = open_data(corpus)
    with data.train_loader() as loader:
        take(loader, 2)
        state = loader.get_state()
    for change, name in (
        ({"seed": 1}, "seed: saved 0, now 1"),
        ({"virtual_shards": 4}, "virtual_shards: saved 8, now 4"),
    ):
        with open_data(dataclasses.replace(corpus, **change)).train_loader() as loader:
            with pytest.raises(DataError, match=name):
                loader.set_state(state)
    with open_data(dataclasses.replace(corpus, tokenizer="python8k")).train_loader() as loader:
        with pytest.raises(DataError, match="tokenizer: saved 'bytes', now 'tiktoken:"):
            loader.set_state(state)
    (tmp_path / "more.txt").write_text("new text")
    with open_data(corpus).train_loader() as loader, pytest.raises(DataError, match="source: saved"):
        loader.set_state(state)


def test_the_state_of_one_of_several_processes_is_refused_until_merged(corpus):
    data = open_data(corpus)
    states = []
    for i in range(2):
        with data.train_loader(part(corpus, i, 2)) as loader:
            take(loader, i + 3)
            states.append(loader.get_state())
    with data.train_loader() as loader, pytest.raises(DataError, match="no cursor for 4 virtual shards.*merge_states"):
        loader.set_state(states[0])
    with pytest.raises(DataError, match="different steps"):
        merge_states(states)


def test_orbax_saves_and_restores_the_loader(corpus, tmp_path):
    data = open_data(corpus)
    with data.train_loader() as loader:
        take(loader, 7)
        ocp.save_checkpointables(tmp_path / "checkpoint", {"data": loader})
        expected = take(loader, 5)
    with data.train_loader() as loader:
        ocp.load_checkpointables(tmp_path / "checkpoint", {"data": loader})
        assert_same(take(loader, 5), expected)


def test_loading_reads_the_states_of_all_processes_that_saved(corpus, tmp_path):
    data = open_data(corpus)
    folder = tmp_path / "saved"
    folder.mkdir()
    for i in range(2):
        with data.train_loader(part(corpus, i, 2)) as loader:
            take(loader, 5)
            (folder / f"process_{i}-of-2.json").write_text(json.dumps(loader.get_state()))

    async def load(loader):
        await (await loader.load(folder))

    with data.train_loader() as loader:
        expected = take(loader, 8)[5:]
    with data.train_loader() as loader:
        asyncio.run(load(loader))
        assert_same(take(loader, 3), expected)
        (folder / "process_1-of-2.json").unlink()
        with pytest.raises(DataError, match="lacks the loader state of some process"):
            asyncio.run(load(loader))


def test_more_shards_than_documents_read_later_epochs(corpus, tmp_path):
    for path in tmp_path.iterdir():
        path.unlink()
    for i in range(9):
        (tmp_path / f"{i}.txt").write_text(f"document {i}")
    data = open_data(dataclasses.replace(corpus, virtual_shards=64, validation_percent=30))
    with data.train_loader() as loader:
        batches = take(loader, 17)
    assert set(np.concatenate([b["document_ids"][:, 0] for b in batches])) <= set(data.train)
    assert all(b["loss_mask"].any(axis=1).all() for b in batches)


def test_validation_is_the_same_every_time_and_covers_each_document_once(corpus):
    data = open_data(corpus)

    def read(n=None):
        with data.validation_loader(n) as loader:
            return list(loader)

    whole = read()
    assert_same(read(), whole)
    assert_same(read(3), whole[:3])
    assert_same(read(10**6), whole)
    real = np.concatenate([b["segment_ids"].reshape(-1) > 0 for b in whole])
    assert real.sum() == sum(len(data.documents.text(int(i)).encode()) + 1 for i in data.validation)
    ids = np.concatenate([b["document_ids"].reshape(-1) for b in whole])
    assert set(ids) - {-1} == set(data.validation.tolist())
    parts = []
    for i in range(2):
        with data.validation_loader(None, part(corpus, i, 2)) as loader:
            parts.append(list(loader))
    assert_same(glue(parts), whole)


def test_rows_that_no_batch_has_are_refused(corpus):
    for rows in ((4,), (-1,), (1, 0), (2, 2)):
        with pytest.raises(DataError, match="not ascending rows of a batch of 4"):
            open_data(corpus).train_loader(rows)


def test_scattered_rows_that_processes_share_are_those_of_the_whole_batch(corpus):
    """What gradient accumulation and a mesh with more axes than data ask for."""
    data = open_data(dataclasses.replace(corpus, batch_size=6))
    shares = [(0, 1, 3, 4), (2, 5), (0, 1, 3, 4)]
    with data.train_loader() as loader:
        expected = take(loader, 12)
    states = []
    for own in shares:
        with data.train_loader(own) as loader:
            assert_same(take(loader, 7), [{name: a[list(own)] for name, a in b.items()} for b in expected[:7]])
            states.append(loader.get_state())
    with data.train_loader() as loader:
        loader.set_state(merge_states(states))
        assert_same(take(loader, 5), expected[7:])


def test_tokenizer_beyond_the_model_is_refused_when_data_are_opened(corpus):
    with pytest.raises(DataError, match="tokenizer bytes .* model.vocab_size is 300"):
        open_data(corpus, vocab_size=300)


def test_bad_record_met_while_reading_ahead_reaches_the_caller(corpus, tmp_path):
    data = open_data(corpus)
    lines = (tmp_path / "d.jsonl").read_text().split("\n")
    (tmp_path / "d.jsonl").write_text("\n".join("?" * len(line.encode()) for line in lines))
    with data.train_loader() as loader, pytest.raises(DataError, match=r"d\.jsonl:\d+: not a JSON object"):
        take(loader, 100)


def test_closing_stops_the_thread_and_may_be_repeated(corpus):
    before = threading.active_count()
    loader = open_data(corpus).train_loader()
    next(loader)
    assert threading.active_count() == before + 1
    loader.close()
    loader.close()
    assert threading.active_count() == before
    with pytest.raises(ValueError, match="closed"):
        next(loader)


@pytest.mark.parametrize("end", ["", "raise RuntimeError('crash')", "sys.exit(3)"])
def test_a_program_that_forgets_to_close_ends_at_once_and_quietly(corpus, end):
    program = (
        "import sys; from k3jax.config import DataConfig; from k3jax.data.loader import open_data\n"
        f"data = open_data(DataConfig(source={corpus.source!r}, min_bytes=0, virtual_shards=8))\n"
        "loader, validation = data.train_loader(), data.validation_loader()\n"
        f"next(loader), next(validation); print('read', flush=True)\n{end}\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=-1, stderr=-1, text=True) as process:
        assert process.stdout.readline() == "read\n"
        start = time.monotonic()
        _, errors = process.communicate(timeout=60)
    assert time.monotonic() - start < 10
    assert "Exception ignored" not in errors
    assert ("Traceback" in errors) == ("raise" in end)
