"""`k3jax.ops.attention`: both implementations against each other, and what callers rely on."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from k3jax.ops.attention import attention, mla_decode, resolve_implementation

IMPLEMENTATIONS = ["reference", "xla"]


def make(seed, B, T, S, H=2, K=12, V=8, dtype="float64", spread=1.0):
    rng = np.random.default_rng(seed)
    shapes = (B, T, H, K), (B, S, H, K), (B, S, H, V)
    return tuple((spread * rng.standard_normal(shape)).astype(jnp.dtype(dtype)) for shape in shapes)


def packed_ids(seed, B, T):
    """Documents of random length from 1, each row with padding at its end and some in its middle."""
    rng = np.random.default_rng(seed)
    ids = 1 + np.cumsum(rng.random((B, T)) < 0.15, axis=1)
    ids[rng.random((B, T)) < 0.05] = 0
    ids[:, T - T // 8 :] = 0
    return ids.astype(np.int32)


def value_and_grads(run, arrays, d_o=None):
    def all_outputs(arrays, d_o):
        (o, peak), pullback = jax.vjp(run, *arrays)
        return o, peak, *pullback((d_o.astype(o.dtype), jnp.ones_like(peak)))

    if d_o is None:
        d_o = np.random.default_rng(9).standard_normal((*arrays[0].shape[:3], arrays[2].shape[-1]))
    return jax.tree.map(np.asarray, jax.jit(all_outputs)(arrays, d_o))


def assert_same(got, want, tolerance=1e-11):
    for name, a, b in zip(("o", "max_logit", "dq", "dk", "dv"), got, want):
        limit = 1e-6 if name == "max_logit" else tolerance
        np.testing.assert_array_equal(np.isneginf(a), np.isneginf(b), err_msg=name)
        finite = ~np.isneginf(b)
        scale = max(1.0, np.abs(b[finite]).max(initial=0))
        np.testing.assert_allclose(a[finite], b[finite], rtol=0, atol=limit * scale, err_msg=name)


@pytest.mark.parametrize(
    ("T", "S", "q_offset", "ids", "block_size"),
    [
        (1, 1, 0, False, 512),
        (37, 37, 0, False, 512),
        (37, 37, 0, True, 16),
        (64, 64, 0, True, 16),
        (50, 50, 0, False, 7),
        (13, 40, 27, False, 8),
        (13, 40, 10, False, 8),  # a block of keys begins at the last query of a block
        (9, 21, jnp.array([3, 12]), False, 4),
        (9, 21, jnp.array(7), False, 4),
        (1, 33, jnp.array([0, 32]), False, 8),
    ],
)
def test_blocks_match_the_reference_forward_and_in_every_gradient(x64, T, S, q_offset, ids, block_size):
    arrays = make(T, 2, T, S)
    segment_ids = packed_ids(T, 2, T) if ids else None
    run = partial(attention, scale=0.3, segment_ids=segment_ids, q_offset=q_offset, block_size=block_size)
    got = value_and_grads(partial(run, implementation="xla"), arrays)
    assert_same(got, value_and_grads(partial(run, implementation="reference"), arrays))


def test_cached_keys_may_carry_their_own_documents(x64):
    q, k, v = make(0, 2, 6, 20)
    kv_ids = packed_ids(1, 2, 20)
    options = {"scale": 0.3, "segment_ids": kv_ids[:, 9:15], "kv_segment_ids": kv_ids, "q_offset": 9}
    got, want = (
        value_and_grads(partial(attention, **options, block_size=4, implementation=name), (q, k, v))
        for name in ("xla", "reference")
    )
    assert_same(got, want)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_weights_are_the_softmax_over_visible_keys(x64, implementation):
    q, k, v = make(3, 2, 11, 11)
    ids = np.array([[1, 1, 1, 2, 2, 2, 2, 3, 3, 0, 0], [4, 4, 0, 4, 4, 4, 4, 4, 4, 4, 4]])
    run = partial(attention, scale=0.5, segment_ids=ids, implementation=implementation, block_size=4)
    o, peak = jax.tree.map(np.asarray, jax.jit(run)(q, k, v))
    largest = np.full(2, -np.inf)
    for b in range(2):
        for t in range(11):
            seen = [s for s in range(t + 1) if ids[b, s] == ids[b, t] != 0]
            for h in range(2):
                logits = 0.5 * np.array([q[b, t, h] @ k[b, s, h] for s in seen])
                weights = np.exp(logits) / np.exp(logits).sum()
                want = sum((p * v[b, s, h] for p, s in zip(weights, seen)), np.zeros(8))
                np.testing.assert_allclose(o[b, t, h], want, atol=1e-12)
                largest[h] = max(largest[h], logits.max(initial=-np.inf))
    np.testing.assert_allclose(peak, largest, rtol=1e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_packed_documents_equal_separate_documents(x64, implementation):
    lengths = [5, 11, 5, 11]
    q, k, v = make(4, 1, 32, 32)
    ids = np.repeat(np.arange(1, 5), lengths)[None].astype(np.int32)
    run = partial(attention, scale=0.3, implementation=implementation, block_size=8)
    o, peak, dq, dk, dv = value_and_grads(partial(run, segment_ids=ids), (q, k, v))
    d_o = np.random.default_rng(9).standard_normal(o.shape)
    start, peaks = 0, []
    for length in lengths:
        part = slice(start, start + length)
        separate = value_and_grads(run, (q[:, part], k[:, part], v[:, part]), d_o[:, part])
        assert_same((o[:, part], separate[1], dq[:, part], dk[:, part], dv[:, part]), separate)
        peaks.append(separate[1])
        start += length
    np.testing.assert_array_equal(peak, np.max(peaks, axis=0))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_padding_outputs_exactly_zero_and_gets_no_gradient(implementation):
    arrays = make(5, 3, 24, 24, dtype="float32", spread=30.0)
    ids = packed_ids(5, 3, 24)
    ids[1] = 0
    run = partial(attention, scale=1.0, segment_ids=ids, implementation=implementation, block_size=8)
    o, peak, dq, dk, dv = value_and_grads(run, arrays)
    for x in (o, dq, dk, dv):
        assert np.all(np.isfinite(x))
        assert np.all(x[ids == 0] == 0)
    all_padding = value_and_grads(partial(run, segment_ids=np.zeros_like(ids)), arrays)
    assert all(np.all(x == 0) for x in (all_padding[0], *all_padding[2:]))
    assert np.all(np.isneginf(all_padding[1]))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_changed_suffix_leaves_the_prefix_bitwise_the_same(implementation, dtype):
    q, k, v = make(6, 2, 40, 40, dtype=dtype)
    run = jax.jit(partial(attention, scale=0.3, implementation=implementation, block_size=16))
    before = np.asarray(run(q, k, v)[0])
    for cut in (1, 15, 16, 33):
        factor = np.where(np.arange(40) < cut, 1, -50).astype(q.dtype)[:, None, None]
        changed = np.asarray(run(q * factor, k * factor, v * factor)[0])
        np.testing.assert_array_equal(before[:, :cut], changed[:, :cut])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_prefix_sends_no_gradient_to_the_suffix(implementation):
    arrays = make(6, 2, 40, 40, dtype="float32")
    d_o = np.where(np.arange(40) < 15, 1.0, 0.0)[:, None, None] * np.ones((2, 40, 2, 8))
    run = partial(attention, scale=0.3, implementation=implementation, block_size=16)
    assert all(np.all(d[:, 15:] == 0) for d in value_and_grads(run, arrays, d_o)[2:])


def test_filling_up_blocks_does_not_raise_the_largest_logit():
    q, k, v = make(14, 2, 10, 10, dtype="float32")
    q, k = -1 - np.abs(q), 1 + np.abs(k)
    for ids in (None, np.ones((2, 10), np.int32)):
        peaks = [
            attention(q, k, v, scale=1.0, segment_ids=ids, implementation=name, block_size=4)[1]
            for name in IMPLEMENTATIONS
        ]
        assert np.all(peaks[0] < -12)
        np.testing.assert_allclose(*peaks, rtol=1e-6)


def test_large_logits_stay_finite():
    arrays = make(7, 1, 48, 48, dtype="float32", spread=300.0)
    for implementation in IMPLEMENTATIONS:
        run = partial(attention, scale=1.0, implementation=implementation, block_size=16)
        assert all(np.all(np.isfinite(x)) for x in value_and_grads(run, arrays))


def test_bfloat16_stays_within_its_rounding(x64):
    exact = make(8, 2, 96, 96, K=192, V=128)
    run = partial(attention, scale=192**-0.5, block_size=32)
    rounded = tuple(x.astype(jnp.bfloat16) for x in exact)
    want = value_and_grads(partial(run, implementation="reference"), tuple(x.astype(np.float64) for x in rounded))
    got = value_and_grads(partial(run, implementation="xla"), rounded)
    assert got[0].dtype == jnp.float32
    assert all(d.dtype == jnp.bfloat16 for d in got[2:])
    for a, b in zip(got, want):
        error = np.linalg.norm(np.asarray(a, np.float64) - np.asarray(b)) / np.linalg.norm(b)
        assert error < 6e-3


def largest_array(fn, *args) -> int:
    """Elements of the largest array in the compiled program."""
    text = jax.jit(fn).lower(*args).compile().as_text()
    return max(int(np.prod([int(n) for n in dims.split(",")])) for dims in re.findall(r"\w+\[([\d,]+)\]", text))


def test_no_square_of_the_sequence_length_is_held_forward_or_backward():
    T, block = 2048, 256
    arrays = [jax.ShapeDtypeStruct((1, T, 1, n), jnp.float32) for n in (12, 12, 8)]

    def grads(implementation):
        run = partial(attention, scale=0.3, implementation=implementation, block_size=block)
        return jax.grad(lambda *x: jnp.sum(run(*x)[0]), argnums=(0, 1, 2))

    assert largest_array(grads("reference"), *arrays) >= T * T
    assert largest_array(grads("xla"), *arrays) <= max(block * block, T * 12)


def test_trace_does_not_grow_with_the_number_of_blocks():
    def size(T):
        arrays = [jax.ShapeDtypeStruct((1, T, 1, 8), jnp.float32)] * 3
        run = jax.grad(lambda *x: jnp.sum(attention(*x, scale=1.0, block_size=64)[0]))
        return len(jax.jit(run).lower(*arrays).as_text().splitlines())

    assert size(8192) == size(256)


def test_gradients_survive_scan_and_remat(x64):
    q, k, v = make(10, 2, 20, 20, K=8)

    def layers(q, k, v, wrap):
        def body(x, _):
            return x + attention(x, k, v, scale=0.3, block_size=8)[0], None

        return jnp.sum(jax.lax.scan(wrap(body), q, length=3)[0] ** 2)

    plain, remat = (
        jax.jit(jax.grad(partial(layers, wrap=w), (0, 1, 2)))(q, k, v) for w in (lambda f: f, jax.checkpoint)
    )
    for a, b in zip(plain, remat):
        np.testing.assert_allclose(a, b, rtol=1e-12)


@pytest.mark.parametrize("how", ["explicit", "shard_map", "shard_map_unchecked"])
def test_batch_sharding_changes_nothing(x64, how):
    arrays, ids = make(11, 8, 20, 20), packed_ids(11, 8, 20)
    run = partial(attention, scale=0.3, block_size=8)
    loss = lambda q, k, v, ids: jnp.sum(run(q, k, v, segment_ids=ids)[0] ** 2)  # noqa: E731
    want = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(*arrays, ids)
    peak = jax.jit(run)(*arrays, segment_ids=ids)[1]
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        sharded = [jax.device_put(x, P("data")) for x in (*arrays, ids)]
        if how == "explicit":
            assert jax.typeof(jax.jit(run)(*sharded[:3])[0]).sharding.spec[0] == "data"
            np.testing.assert_array_equal(jax.jit(lambda *x: run(*x[:3], segment_ids=x[3])[1])(*sharded), peak)
        else:
            inner, checked = loss, how == "shard_map"

            def loss(*x):
                rows = lambda *x: inner(*x)[None]  # noqa: E731
                specs = {"in_specs": P("data"), "out_specs": P("data"), "check_vma": checked}
                return jnp.sum(jax.shard_map(rows, **specs)(*x))

        got = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(*sharded)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
            np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-12)


def test_absorbed_decode_equals_the_last_row_of_expanded_attention(x64):
    B, S, H, R, r, K, V = 3, 19, 4, 10, 3, 6, 5
    rng = np.random.default_rng(12)
    latent, k_r, k_up, v_up, q_c, q_r = (
        rng.standard_normal(shape) for shape in [(B, S, R), (B, S, r), (R, H, K), (R, H, V), (B, 1, H, K), (B, 1, H, r)]
    )
    offset = np.array([0, 7, 18])
    shared = np.broadcast_to(k_r[:, :, None], (B, S, H, r))
    keys = np.concatenate([np.einsum("bsr,rhk->bshk", latent, k_up), shared], axis=-1)
    values = np.einsum("bsr,rhv->bshv", latent, v_up)
    want, _ = jax.jit(partial(attention, scale=0.3, q_offset=offset))(np.concatenate([q_c, q_r], -1), keys, values)
    absorbed = np.einsum("bhk,rhk->bhr", q_c[:, 0], k_up)
    decode = jax.jit(partial(mla_decode, scale=0.3, valid_BS=np.arange(S) <= offset[:, None]))
    context = np.asarray(decode(absorbed, q_r[:, 0], latent, k_r))
    np.testing.assert_allclose(np.einsum("bhr,rhv->bhv", context, v_up), want[:, 0], atol=1e-12)


def test_decode_over_an_empty_cache_gives_zero():
    ones = jnp.ones
    context = mla_decode(
        ones((1, 2, 4)), ones((1, 2, 0)), ones((1, 3, 4)), ones((1, 3, 0)), scale=1.0, valid_BS=jnp.zeros((1, 3), bool)
    )
    assert np.all(np.asarray(context) == 0)


def test_bad_input_is_refused_with_the_reason():
    q, k, v = make(13, 2, 6, 9, dtype="float32")
    ids = jnp.ones((2, 6), jnp.int32)
    for message, arrays, options in [
        ("must be", (q, k[:, :, :1], v), {}),
        ("one dtype", (q, k.astype(jnp.bfloat16), v), {}),
        ("kv_segment_ids must be given", (q, k, v), {"segment_ids": ids}),
        ("without segment_ids", (q, k, v), {"kv_segment_ids": ids}),
        ("segment_ids must be", (q, k, v), {"segment_ids": ids[:, 1:], "kv_segment_ids": ids}),
        ("block_size", (q, k, v), {"block_size": 0}),
        ("one of 'reference', 'xla', 'cudnn'", (q, k, v), {"implementation": "pallas"}),
    ]:
        with pytest.raises(ValueError, match=message):
            attention(*arrays, scale=1.0, **options)
    assert resolve_implementation(dtype="float32", key_width=12, value_width=8) in IMPLEMENTATIONS


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_attention_in_both_directions_sees_all_of_its_document(x64, implementation):
    arrays, ids = make(3, 2, 37, 37), packed_ids(3, 2, 37)
    run = partial(
        attention, scale=0.3, segment_ids=jnp.asarray(ids), causal=False, implementation=implementation, block_size=16
    )

    def plain(q, k, v):
        same = (ids[:, :, None] == ids[:, None]) & (ids[:, :, None] != 0)
        logits = jnp.where(same[:, None], jnp.einsum("bthk,bshk->bhts", q, k) * 0.3, -1e30)
        o = jnp.einsum("bhts,bshv->bthv", jax.nn.softmax(logits, axis=-1), v)
        return jnp.where((ids != 0)[..., None, None], o, 0), jax.lax.stop_gradient(jnp.max(logits, axis=(0, 2, 3)))

    assert_same(value_and_grads(run, arrays), value_and_grads(plain, arrays))
