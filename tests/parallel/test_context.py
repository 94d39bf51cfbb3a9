"""Rows sharded over time compute what one device computes: outputs, states and every gradient."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from k3jax.ops.attention import attention
from k3jax.ops.attention.blockwise import two_pieces
from k3jax.ops.kda import kda
from k3jax.ops.short_conv import short_conv
from k3jax.parallel.context import attention_over_context, kda_over_context, short_conv_over_context

OPTIONS = {"gate": "lower_bound", "beta_is_logit": True, "qk_l2norm": True}
B, T, H, K = 2, 64, 2, 16


def packed(*lengths):
    """Ids [B, T]: documents of these lengths, then padding; the second row shifted by one token."""
    row = np.zeros(T, np.int32)
    for i, (start, stop) in enumerate(zip(np.cumsum((0, *lengths)), np.cumsum(lengths))):
        row[start:stop] = i + 1
    return np.stack([row, np.roll(row, 1)])


# with 8 shards of 8 tokens: borders on, just before and just after a shard's; documents of 1, 2 and 3 tokens; padding
IDS = {
    "one document": None,
    "on a border": packed(8, 16, 1, 2, 3, 26),
    "around borders": packed(7, 10, 14, 1, 24),
    "a shard of padding": np.stack([np.repeat([1, 0, 1, 2], [20, 20, 14, 10]), np.repeat([0, 3], [33, 31])]),
}


@pytest.fixture(scope="module")
def inputs():
    rng = np.random.default_rng(0)
    shapes = {n: (B, T, H, K) for n in ("q", "k", "v", "g")} | {"beta": (B, T, H)}
    shapes |= {"A_log": (H,), "dt_bias": (H, K), "initial_state": (B, H, K, K)}
    return {n: rng.normal(size=shape) for n, shape in shapes.items()}


def make_mesh(shards):
    return jax.make_mesh((shards,), ("context",), axis_types=(AxisType.Auto,))


SPECS = {n: P(None, "context") for n in ("q", "k", "v", "g", "beta")}


def on_one_device(inputs, ids, weights):
    o, state = kda(**inputs, segment_ids=ids, return_final_state=True, implementation="reference", **OPTIONS)
    return jnp.sum(o * weights) + jnp.sum(state**2), (o, state)


def sharded(inputs, ids, weights, shards):
    mesh = make_mesh(shards)
    time = P(None, "context")
    specs = {n: SPECS.get(n, P()) for n in inputs}

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(specs, time), out_specs=(time, P()))
    def run(inputs, ids):
        return kda_over_context(**inputs, segment_ids=ids, axis="context", implementation="xla", **OPTIONS)

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(specs,), out_specs=(time, P()))
    def run_whole(inputs):
        return kda_over_context(**inputs, axis="context", implementation="xla", **OPTIONS)

    o, state = run_whole(inputs) if ids is None else run(inputs, ids)
    return jnp.sum(o * weights) + jnp.sum(state**2), (o, state)


def assert_same(got, want, tolerance):
    def check(a, b):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(1.0, float(np.max(np.abs(b)))))

    jax.tree.map(check, jax.device_get(got), jax.device_get(want))


@pytest.mark.parametrize("name", IDS)
@pytest.mark.parametrize(
    "shards", [8, pytest.param(2, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)]
)
def test_kda_over_shards_of_time_is_kda(inputs, name, shards, x64):
    weights = np.random.default_rng(1).normal(size=(B, T, H, K))
    args = jax.tree.map(jnp.asarray, inputs), IDS[name], weights
    want = jax.jit(jax.value_and_grad(on_one_device, has_aux=True))(*args)
    got = jax.jit(jax.value_and_grad(functools.partial(sharded, shards=shards), has_aux=True))(*args)
    assert_same(got, want, 1e-9)


@pytest.mark.parametrize("bias", [30.0, -30.0])
def test_saturated_gates_pass_through_shards(inputs, bias, x64):
    """-5 a token forgets at once, 0 never does: neither is an approximation."""
    args = jax.tree.map(jnp.asarray, inputs | {"dt_bias": np.full((H, K), bias)})
    weights = np.ones((B, T, H, K))
    want = jax.jit(jax.value_and_grad(on_one_device, has_aux=True), static_argnums=1)(args, None, weights)
    got = jax.jit(jax.value_and_grad(functools.partial(sharded, shards=8), has_aux=True), static_argnums=1)(
        args, None, weights
    )
    assert_same(got, want, 1e-9)


def test_later_shards_leave_earlier_outputs_as_they_are_to_the_last_bit(inputs):
    args = {n: jnp.asarray(x, jnp.float32) for n, x in inputs.items()}
    run = jax.jit(lambda args: sharded(args, None, jnp.zeros(()), 8)[1][0])
    changed = args | {n: args[n].at[:, 43:].add(1.0) for n in ("q", "k", "v", "g", "beta")}
    np.testing.assert_array_equal(run(args)[:, :40], run(changed)[:, :40])


def test_one_gather_a_pass_whose_size_does_not_depend_on_time(inputs):
    args = {n: jnp.asarray(x, jnp.float32) for n, x in inputs.items()}
    hlo = jax.jit(lambda args: sharded(args, None, jnp.zeros(()), 8)[1]).lower(args).compile().as_text()
    gathered = [line for line in hlo.splitlines() if " all-gather(" in line or " all-gather-start(" in line]
    assert len(gathered) <= 2, gathered
    assert all(str(K) in line for line in gathered), gathered
    assert not any(f"{T}," in line.split(" all-gather")[0] for line in gathered), gathered


@pytest.mark.parametrize("name", IDS)
def test_the_convolution_looks_into_the_shard_before(name, x64):
    rng = np.random.default_rng(2)
    u, weight, ids = rng.normal(size=(B, T, 3, 4)), rng.normal(size=(3, 4, 4)), IDS[name]
    mesh, time = make_mesh(8), P(None, "context")

    def over_shards(u, weight):
        specs = (time, P()) if ids is None else (time, P(), time)
        run = functools.partial(short_conv_over_context, axis="context")
        return jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=time)(u, weight, *([] if ids is None else [ids]))

    def everything(f):
        return jax.jit(lambda u, w: jax.value_and_grad(lambda u, w: jnp.sum(f(u, w) ** 2), (0, 1))(u, w))(u, weight)

    assert_same(everything(over_shards), everything(lambda u, w: short_conv(u, w, ids)), 1e-10)


@pytest.mark.parametrize("block_size", [2, 8])
@pytest.mark.parametrize("shards", [2, 8])
@pytest.mark.parametrize("name", IDS)
def test_attention_over_gathered_latents_is_attention(name, shards, block_size, x64):
    rng = np.random.default_rng(3)
    q, latent = rng.normal(size=(B, T, H, 12)), rng.normal(size=(B, T, 10))
    to_k, to_v = rng.normal(size=(10, H, 12)), rng.normal(size=(10, H, 8))
    ids, time = IDS[name], P(None, "context")

    def expand(latent, to_k, to_v):
        return jnp.einsum("bsr,rhk->bshk", latent, to_k), jnp.einsum("bsr,rhv->bshv", latent, to_v)

    def whole(q, latent, to_k, to_v):
        o, peak = attention(q, *expand(latent, to_k, to_v), scale=0.3, segment_ids=ids, implementation="reference")
        return jnp.sum(o**2), (o, peak)

    def over_shards(q, latent, to_k, to_v):
        def run(q, latent, to_k, to_v, ids=None):
            make = lambda latent: expand(latent, to_k, to_v)  # noqa: E731
            options = {"scale": 0.3, "segment_ids": ids, "implementation": "xla", "block_size": block_size}
            return attention_over_context(q, (latent,), make, axis="context", **options)

        specs = (time, time, P(), P()) if ids is None else (time, time, P(), P(), time)
        sharded = jax.shard_map(run, mesh=make_mesh(shards), in_specs=specs, out_specs=(time, P()))
        o, peak = sharded(q, latent, to_k, to_v, *([] if ids is None else [ids]))
        return jnp.sum(o**2), (o, peak)

    args = q, latent, to_k, to_v
    got, want = (jax.jit(jax.value_and_grad(f, (0, 1, 2, 3), has_aux=True))(*args) for f in (over_shards, whole))
    assert_same(got, want, 1e-9)


@pytest.mark.parametrize(("pieces", "per_piece"), [(2, 1), (4, 3), (16, 2)])
def test_every_device_attends_to_as_many_blocks_and_to_all_that_its_queries_see(pieces, per_piece):
    pairs = two_pieces(pieces, per_piece)
    seen = set()
    for r, of_device in enumerate(pairs):
        first = np.asarray([r, pieces - 1 - r]) * per_piece
        mine = {(int(first[i // per_piece] + i % per_piece), int(j)) for i, j in of_device}
        assert len(mine) == len(of_device)
        seen |= mine
    blocks = pieces * per_piece
    assert seen == {(i, j) for i in range(blocks) for j in range(i + 1)}
    assert len(pairs) * pairs.shape[1] == len(seen)


def test_what_cannot_be_sharded_is_refused(inputs):
    args = {n: jnp.asarray(x, jnp.float32) for n, x in inputs.items() if n in SPECS}
    with pytest.raises(ValueError, match="V must equal K"):
        kda_over_context(**args | {"v": args["v"][..., :8]}, axis="context")
    with pytest.raises(ValueError, match="cu_seqlens"):
        kda_over_context(**args, axis="context", cu_seqlens=jnp.asarray([0, 64]))
    with pytest.raises(ValueError, match="fewer shards"):
        short_conv_over_context(jnp.zeros((1, 2, 3)), jnp.zeros((3, 4)), axis="context")
