"""Claims about rows of documents with images: packing, mixing, state, and what happens with bad ones."""

import dataclasses
import itertools
import json
import logging

import numpy as np
import pytest

from k3jax.config import DataConfig, ImagesConfig, VisionConfig
from k3jax.data.digits import encode_png
from k3jax.data.images import ImageError, prompt
from k3jax.data.loader import merge_states, open_data
from k3jax.data.packing import DocumentOrder, ImagePacker, empty_batch, spread
from k3jax.data.sources import DataError

VISION = VisionConfig(hidden_size=8, num_layers=1, num_heads=1, head_dim=8, mlp_size=8, patch_size=4)
EOS, PAD = 257, 256 + 21


@pytest.fixture
def corpus(tmp_path):
    """Some sixty documents with 0 to 4 images of 1 to 24 tokens, text beside them; a config that reads a third."""
    rng = np.random.default_rng(1)
    (tmp_path / "text").mkdir()
    (tmp_path / "pictures").mkdir()
    lengths = [0, 1, 300, *rng.integers(2, 90, 57)]
    lines = [json.dumps({"text": "".join(rng.choice(list("abcdef "), n))}) for n in lengths]
    (tmp_path / "text" / "d.jsonl").write_text("\n".join(lines))
    for i in range(12):
        height, width = rng.integers(3, 33, 2)
        (tmp_path / "pictures" / f"{i}.png").write_bytes(encode_png(rng.integers(0, 255, (height, width), np.uint8)))
    records = []
    for i in range(60):
        images = [f"{k}.png" for k in rng.integers(0, 12, i % 5)]
        words = ["".join(rng.choice(list("uvwxyz"), n)) for n in rng.integers(0, 40, len(images) + 1)]
        records.append({"text": f"{i} " + "<image>".join(words), "images": images})
    (tmp_path / "pictures" / "d.jsonl").write_text("\n".join(map(json.dumps, records)))
    return DataConfig(
        source=str(tmp_path / "text"),
        min_bytes=0,
        virtual_shards=12,
        batch_size=4,
        sequence_length=64,
        validation_percent=10,
        images=ImagesConfig(source=str(tmp_path / "pictures" / "d.jsonl"), share=1 / 3, patches=100),
    )


def opened(config, **images):
    return open_data(dataclasses.replace(config, images=dataclasses.replace(config.images, **images)), vision=VISION)


def take(loader, n):
    return list(itertools.islice(loader, n))


def assert_same(a, b):
    assert len(a) == len(b)
    for x, y in zip(a, b):
        assert x.keys() == y.keys()
        for name in x.keys() - {"images"}:
            np.testing.assert_array_equal(x[name], y[name], err_msg=name)
        assert [len(row) for row in x["images"]] == [len(row) for row in y["images"]]
        for one, other in zip(itertools.chain(*x["images"]), itertools.chain(*y["images"])):
            assert (one.grid, one.size) == (other.grid, other.size)
            np.testing.assert_array_equal(one.patches, other.patches)


def rows_of(batches):
    """Each row by itself, in the order of the line."""
    for batch in batches:
        for j, images in enumerate(batch["images"]):
            yield {name: array[j] for name, array in batch.items() if name != "images"} | {"images": images}


def streams(batches, size):
    """Tokens, ids and images of the rows at each place of the batch on end, padding left out."""
    for j in range(size):
        tokens, ids = (np.concatenate([b[name][j] for b in batches]) for name in ("tokens", "document_ids"))
        yield tokens[ids >= 0], ids[ids >= 0], list(itertools.chain(*(b["images"][j] for b in batches)))


def expected(data, document):
    """Tokens of an image document and its images, as the definition reads."""
    tokens, images = [], []
    for part in data.images.documents.content(document, VISION, data.images.store.budget):
        if isinstance(part, str):
            tokens += list(part.encode())
        else:
            tokens += prompt(part, data.tokenizer, VISION.merge)
            images.append(part)
    return [*tokens, EOS], images


@pytest.mark.parametrize("patches", [16, 48, 100])
def test_rows_hold_whole_images_within_the_budget_and_no_target_is_a_feature(corpus, patches):
    data = opened(corpus, patches=patches)
    with data.train_loader() as loader:
        rows = list(rows_of(take(loader, 60)))
    ended_early = 0
    for row in rows:
        tokens, mask, segments = row["tokens"], row["loss_mask"], row["segment_ids"]
        features = [item.features(VISION.merge) for item in row["images"]]
        media = tokens == PAD
        runs = np.flatnonzero(np.diff(np.r_[False, media, False])).reshape(-1, 2)
        assert (runs[:, 1] - runs[:, 0]).tolist() == features  # each in one row, in order
        assert np.isin(tokens[runs[:, 1]], 256 + 20).all()  # and its prompt too
        assert (tokens == 256 + 18).sum() == len(features)
        assert sum(len(item.patches) for item in row["images"]) <= patches
        assert not (row["targets"] == PAD).any()
        assert not row["targets"][~mask].any()
        length = int((segments > 0).sum())
        assert length
        assert (segments[:length] > 0).all()
        np.testing.assert_array_equal(row["document_ids"] < 0, segments == 0)
        last = length - 1
        inside = (segments[:last] == segments[1:length]) & (tokens[1:length] != PAD)
        np.testing.assert_array_equal(mask[:last], inside)
        np.testing.assert_array_equal(row["targets"][:last][inside], tokens[1:length][inside])
        assert not mask[length:].any()
        assert mask[last] == (tokens[last] != EOS)
        if length < len(tokens) and mask[last]:
            assert row["targets"][last] == 256 + 18  # the image that did not fit
        ended_early += length < len(tokens)
    assert ended_early


def test_a_row_ends_only_where_the_next_image_does_not_fit(corpus):
    data = opened(corpus, share=1)
    shards = corpus.virtual_shards
    order = DocumentOrder(data.images.train, corpus.seed)
    packer = ImagePacker(order, data.images.store, shards, 64, 100, first_id=0)
    short = 0
    for _ in range(60):
        batch = empty_batch(1, 64, images=True)
        packer.fill(0, batch, 0)
        length = int((batch["segment_ids"] > 0).sum())
        finished, taken = packer.cursors[0]
        content = data.images.store.content(order.at(int(finished) * shards))
        if length < 64:
            following = next(image for image in content.images if image.start >= taken)
            assert following.start == taken
            used = sum(len(item.patches) for item in batch["images"][0])
            assert length + following.stop - following.start > 64 or used + len(following.item.patches) > 100
            short += 1
    assert 0 < short < 60


@pytest.mark.parametrize("share", [1 / 3, 1])
def test_every_document_comes_once_an_epoch_and_whole(corpus, share):
    """Of either kind, although the shards of a kind are scattered; ids of image documents follow those of texts."""
    config = dataclasses.replace(corpus, batch_size=corpus.virtual_shards)
    data = opened(config, share=share)
    with data.train_loader() as loader:
        batches = take(loader, 40)
    kinds = {True: [], False: []}
    for place, (tokens, ids, images) in enumerate(streams(batches, config.batch_size)):
        ends = np.flatnonzero(tokens == EOS) + 1
        documents = []
        for start, end in zip([0, *ends], ends):
            document = int(ids[start])
            assert (ids[start:end] == document).all()
            documents.append(document)
            if data.images.shards[place]:
                want, items = expected(data, document - len(data.documents))
                for item in items:
                    np.testing.assert_array_equal(images.pop(0).patches, item.patches)
            else:
                want = [*data.documents.text(document).encode(), EOS]
            assert tokens[start:end].tolist() == want
        kinds[bool(data.images.shards[place])].append(documents)
    for is_image, of_shards in kinds.items():
        if not of_shards:
            assert share == 1
            continue
        line = [d for turn in zip(*of_shards) for d in turn]
        members = data.images.train + len(data.documents) if is_image else data.train
        assert len(line) >= len(members)
        assert sorted(line[: len(members)]) == members.tolist()


@pytest.mark.parametrize(("count", "total"), [(1, 12), (4, 12), (26, 256), (77, 256), (255, 256), (256, 256)])
def test_shards_of_images_are_spread_evenly(count, total):
    line = spread(count, total)
    assert line.sum() == count
    for window in (1, 3, 8, 32):
        sums = np.convolve(np.tile(line, 1 + -(-window // total))[: total + window - 1], np.ones(window, int), "valid")
        assert sums.min() >= window * count // total
        assert sums.max() <= -(-window * count // total)


@pytest.mark.parametrize(("share", "batch", "of_12"), [(1 / 3, 6, 4), (0.25, 4, 3), (0.5, 4, 6), (1, 4, 12)])
def test_the_share_of_rows_is_exact_and_every_batch_has_its_own(corpus, share, batch, of_12):
    data = opened(dataclasses.replace(corpus, batch_size=batch), share=share)
    with data.train_loader() as loader:
        batches = take(loader, 24 // batch)
    of_images = [int((b["document_ids"][:, 0] >= len(data.documents)).sum()) for b in batches]
    assert sum(of_images) == 2 * of_12
    assert set(of_images) == {batch * of_12 // 12}
    assert data.describe()["image_shards"] == of_12


def test_resume_at_every_batch_equals_the_uninterrupted_run(corpus):
    with opened(corpus).train_loader() as loader:
        batches, states = [], []
        for _ in range(28):
            states.append(json.loads(json.dumps(loader.get_state())))
            batches.append(next(loader))
    for step, state in enumerate(states[:25]):
        assert_same(take_from(opened(corpus), state, 3), batches[step : step + 3])


def test_sequence_length_may_change_as_long_as_images_keep_their_size(corpus):
    config = dataclasses.replace(corpus, batch_size=corpus.virtual_shards)
    with opened(config).train_loader() as loader:
        whole = list(streams(take(loader, 20), 12))
    with opened(config).train_loader() as loader:
        first, state = take(loader, 5), loader.get_state()
    rest = take_from(opened(dataclasses.replace(config, sequence_length=96)), state, 5)
    for (tokens, *_), (before, *_), (after, *_) in zip(whole, streams(first, 12), streams(rest, 12)):
        both = np.concatenate([before, after])
        np.testing.assert_array_equal(both, tokens[: len(both)])
    with opened(dataclasses.replace(config, sequence_length=32)).train_loader() as loader:
        with pytest.raises(DataError, match="image_budget: saved 100, now 48"):
            loader.set_state(state)


def take_from(data, state, n):
    with data.train_loader() as loader:
        loader.set_state(state)
        return take(loader, n)


@pytest.mark.parametrize("batch", [4, 8])
def test_processes_together_yield_the_rows_of_one_and_their_number_may_change(corpus, batch):
    data = opened(dataclasses.replace(corpus, batch_size=batch))
    with data.train_loader() as loader:
        whole = take(loader, 20)
    got, state = [], None
    for processes in (2, 1, 4):
        parts, states = [], []
        for i in range(processes):
            rows = batch // processes
            with opened(data.config).train_loader(range(i * rows, (i + 1) * rows)) as loader:
                if state:
                    loader.set_state(state)
                parts.append(take(loader, 6))
                states.append(loader.get_state())
        for step in zip(*parts):
            glued = {name: np.concatenate([p[name] for p in step]) for name in step[0] if name != "images"}
            got.append(glued | {"images": [row for p in step for row in p["images"]]})
        state = merge_states(states)
    assert_same(got, whole[:18])


def test_validation_reads_each_held_out_document_once_images_in_the_first_rows(corpus):
    for share, rows in ((1 / 3, 1), (0.5, 2), (1, 4)):
        data = opened(corpus, share=share)
        with data.validation_loader() as loader:
            whole = list(loader)
        with data.validation_loader(2) as loader:
            assert_same(list(loader), whole[:2])
        seen = []
        for place, (tokens, ids, _) in enumerate(streams(whole, corpus.batch_size)):
            of_images = ids >= len(data.documents)
            assert of_images.all() if place < rows else not of_images.any()
            seen += ids[tokens == EOS].tolist()
        held_out = [*(data.images.validation + len(data.documents)), *(data.validation if rows < 4 else [])]
        assert sorted(seen) == sorted(held_out)
        parts = []
        for own in ((0, 1), (2, 3)):
            with data.validation_loader(None, own) as loader:
                parts.append(list(loader))
        for step, batch in zip(zip(*parts), whole, strict=True):
            np.testing.assert_array_equal(np.concatenate([p["tokens"] for p in step]), batch["tokens"])


def test_text_alone_has_no_images_and_the_state_it_had(corpus):
    config = dataclasses.replace(corpus, images=ImagesConfig())
    data = open_data(config)
    with data.train_loader() as loader:
        batch = next(loader)
        state = loader.get_state()
    assert batch.keys() == {"tokens", "targets", "segment_ids", "loss_mask", "document_ids"}
    assert state.keys() == {
        "version", "source", "documents", "tokenizer", "seed", "virtual_shards", "next_row", "cursors"
    }  # fmt: skip
    assert not any("image" in name for name in data.describe())


def test_a_position_of_other_images_is_refused_by_what_differs(corpus, tmp_path):
    data = opened(corpus)
    with data.train_loader() as loader:
        take(loader, 2)
        state = loader.get_state()
    text = open_data(dataclasses.replace(corpus, images=ImagesConfig()))
    with text.train_loader() as loader:
        take(loader, 2)
        state_of_text = loader.get_state()
        with pytest.raises(DataError, match="image_source: saved '.*', now None"):
            loader.set_state(state)
    with data.train_loader() as loader, pytest.raises(DataError, match="image_source: saved None"):
        loader.set_state(state_of_text)
    for change, name in (
        ({"share": 0.5}, "image_shards: saved 4, now 6"),
        ({"patches": 48}, "image_budget: saved 100"),
    ):
        with opened(corpus, **change).train_loader() as loader, pytest.raises(DataError, match=name):
            loader.set_state(state)
    with (tmp_path / "pictures" / "d.jsonl").open("a") as file:
        file.write('\n{"text": "one more", "images": []}')
    with opened(corpus).train_loader() as loader, pytest.raises(DataError, match="image_source: saved '"):
        loader.set_state(state)


def test_an_image_with_more_tokens_than_a_row_is_made_smaller(corpus, tmp_path):
    (tmp_path / "pictures" / "0.png").write_bytes(encode_png(np.zeros((120, 120), np.uint8)))
    data = opened(dataclasses.replace(corpus, sequence_length=32), share=1, patches=1000)
    assert data.images.store.budget == 4 * (32 - 20)
    with data.train_loader() as loader:
        rows = list(rows_of(take(loader, 40)))
    assert any(item.size == (120, 120) for row in rows for item in row["images"])
    for row in rows:
        assert (row["tokens"] == PAD).sum() == sum(item.features(2) for item in row["images"])


@pytest.fixture
def damaged(corpus, tmp_path):
    """The corpus with an image that is none and one that is missing, and which documents are good."""
    (tmp_path / "pictures" / "3.png").write_bytes(b"no image")
    (tmp_path / "pictures" / "5.png").unlink()
    lines = (tmp_path / "pictures" / "d.jsonl").read_text().splitlines()
    good = [i for i, line in enumerate(lines) if not {"3.png", "5.png"} & set(json.loads(line)["images"])]
    assert 10 < len(good) < 50
    return corpus, good


def test_a_bad_image_ends_the_run_by_name_where_errors_raise(damaged):
    with opened(damaged[0]).train_loader() as loader, pytest.raises(ImageError, match=r"d\.jsonl:\d+, image \d \([35]"):
        take(loader, 100)


def test_documents_with_bad_images_are_left_out_counted_and_logged_once(damaged, caplog):
    corpus, good = damaged
    data = opened(corpus, on_error="skip")
    with caplog.at_level(logging.WARNING), data.train_loader() as loader:
        batches = take(loader, 150)
    bad = set(data.images.train.tolist()) - set(good)
    read = set(np.concatenate([b["document_ids"].reshape(-1) for b in batches]).tolist())
    assert {i - len(data.documents) for i in read if i >= len(data.documents)} == set(data.images.train) - bad
    assert data.describe()["skipped_image_documents"] == len(bad)
    assert set(data.images.store.skipped.values()) == {data.images.documents.name(i) for i in bad}
    assert len(caplog.records) == len(bad)
    assert all("left out d.jsonl:" in record.getMessage() for record in caplog.records)
    for first in (0, 7):
        fresh = opened(corpus, on_error="skip")
        with fresh.train_loader() as loader:
            for _ in range(first):
                next(loader)
            state = loader.get_state()
        assert_same(take_from(opened(corpus, on_error="skip"), state, 20), batches[first : first + 20])


def test_a_run_goes_on_past_a_document_that_went_bad_in_its_middle(corpus, tmp_path):
    data = opened(corpus, share=1, on_error="skip")
    with data.train_loader() as loader:
        states = []
        for _ in range(20):
            take(loader, 1)
            states.append(loader.get_state())
    for i in range(12):
        (tmp_path / "pictures" / f"{i}.png").unlink()
    position = [max(taken for _, taken in state["cursors"]) for state in states]
    assert any(position)
    for state in states:
        for batch in take_from(opened(corpus, share=1, on_error="skip"), state, 4):
            assert not any(batch["images"])
            assert (batch["segment_ids"] > 0).all()


def test_a_position_inside_an_image_is_refused(corpus):
    data = opened(corpus, share=1)
    packer = ImagePacker(DocumentOrder(data.images.train, None), data.images.store, 1, 64, 100, first_id=0)
    document = next(i for i, d in enumerate(data.images.train) if data.images.store.content(int(d)).images)
    image = data.images.store.content(int(data.images.train[document])).images[0]
    for taken in (image.start + 1, image.stop - 1):
        packer.seek(np.array([[document, taken]]))
        with pytest.raises(DataError, match="tokens into document .* an image there: the data or the tokenizer is not"):
            packer.skip(0)
    packer.seek(np.array([[document, image.start]]))
    packer.skip(0)


@pytest.mark.parametrize("tokenizer", ["bytes", "python8k"])
def test_the_shortest_rows_hold_an_image_of_any_size(corpus, tmp_path, tokenizer):
    """Numbers that take many tokens; one token less is refused."""
    config = dataclasses.replace(corpus, tokenizer=tokenizer, sequence_length=8)
    with pytest.raises(DataError, match="at least") as refused:
        opened(config, share=1)
    config = dataclasses.replace(config, sequence_length=int(str(refused.value).split()[-1]))
    sizes = [(888, 998), (1, 44388), (9983, 888)]
    for i, (height, width) in enumerate(sizes):
        (tmp_path / "pictures" / f"{i}.png").write_bytes(encode_png(np.zeros((height, width), np.uint8)))
    records = [json.dumps({"text": "", "images": [f"{i % 3}.png"]}) for i in range(30)]
    (tmp_path / "pictures" / "d.jsonl").write_text("\n".join(records))
    with opened(config, share=1).train_loader() as loader:
        shown = {item.size for row in rows_of(take(loader, 12)) for item in row["images"]}
    assert shown == {(width, height) for height, width in sizes}


def test_ids_of_a_batch_name_documents_of_either_kind(corpus):
    data = opened(corpus)
    with data.train_loader() as loader:
        ids = np.unique(np.concatenate([b["document_ids"].ravel() for b in take(loader, 30)]))
    names = {data.name(int(i)) for i in ids if i >= 0}
    count = len(data.documents)
    assert names == {data.documents.name(i) for i in ids if 0 <= i < count} | {
        data.images.documents.name(i - count) for i in ids if i >= count
    }


def test_if_every_document_is_bad_loading_ends(corpus, tmp_path):
    lines = [json.dumps({"text": "<image><image>", "images": ["0.png"]}) for _ in range(30)]
    (tmp_path / "pictures" / "d.jsonl").write_text("\n".join(lines))
    data = opened(corpus, on_error="skip")
    with (
        data.train_loader() as loader,
        pytest.raises(DataError, match=r"each of \d+ documents with images is bad, d\.j"),
    ):
        take(loader, 3)
    with pytest.raises(DataError, match="is bad"):
        data.validation_loader(3)


def test_the_cache_of_images_keeps_to_its_bytes_and_changes_no_row(corpus, monkeypatch):
    data = opened(corpus)
    with data.train_loader() as loader:
        batches = take(loader, 30)
    store = data.images.store
    assert sum(content.nbytes for content in store._cache.values()) == (1 << 28) - store._free
    tight = opened(corpus)
    tight.images.store._free = 5000
    with tight.train_loader() as loader:
        assert_same(take(loader, 30), batches)
    assert 0 < sum(content.nbytes for content in tight.images.store._cache.values()) <= 5000


def test_what_cannot_be_is_refused_before_anything_is_read(corpus):
    with pytest.raises(DataError, match="needs a model with a vision tower: set model.vision"):
        open_data(corpus)
    for change, images, reason in (
        ({"sequence_length": 20}, {}, "sequence_length 20 holds no image.*at least 21"),
        ({}, {"patches": 3}, "patches 3 holds no image: one token takes 4"),
        (
            {},
            {"share": 0.01},
            "share 0.01 of data.virtual_shards 12 is none; raise data.virtual_shards to at least 100",
        ),
        ({}, {"share": 0.99}, "is all; raise data.virtual_shards to at least 10"),
    ):
        with pytest.raises(DataError, match=reason):
            opened(dataclasses.replace(corpus, **change), **images)


def test_digits_load_beside_text(corpus):
    data = opened(corpus, source="digits")
    with data.train_loader() as loader, data.validation_loader(2) as validation:
        batches, held_out = take(loader, 6), list(validation)
    for batch in batches:
        assert sum(map(len, batch["images"])) >= 1
    documents = np.unique(np.concatenate([b["document_ids"][0] for b in held_out]))
    assert (documents[documents >= 0] >= len(data.documents) + 20_000).all()
