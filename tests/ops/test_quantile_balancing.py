"""Quantile balancing: convergence, the histogram against order statistics, and exact additivity."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from k3jax.ops.quantile_balancing import qb_exact, qb_histogram, qb_threshold, qb_update

E, K, BINS = 64, 4, 1000
histogram = jax.jit(partial(qb_histogram, bins=BINS), static_argnames=("experts_per_token", "bins"))
update = jax.jit(qb_update, static_argnames=("experts_per_token", "ema"))


def scores(seed: int, tokens: int, experts: int = E) -> jax.Array:
    """Sigmoid of a Gaussian whose mean differs by expert; the offsets are the same for every seed."""
    offset = 0.6 * jax.random.normal(jax.random.key(1000), (experts,))
    return jax.nn.sigmoid(jax.random.normal(jax.random.key(seed), (tokens, experts)) + offset)


def max_violation(scores_NE: jax.Array, bias_E: jax.Array, k: int) -> float:
    """Load of the busiest expert over the mean load, minus one."""
    chosen = jax.lax.top_k(scores_NE + bias_E, k)[1]
    load = np.bincount(np.asarray(chosen).ravel(), minlength=scores_NE.shape[-1])
    return load.max() / load.mean() - 1


def bias(seed: int, experts: int = E) -> jax.Array:
    return 0.1 * jax.random.normal(jax.random.key(seed), (experts,))


def test_one_update_balances_the_experts_and_the_rest_stays_at_the_sampling_noise():
    b = jnp.zeros(E)
    violation = []
    for step in range(12):
        s = scores(step, 8192)
        violation.append(max_violation(s, b, K))
        b = update(histogram(s, b, experts_per_token=K), b, experts_per_token=K)
    assert violation[0] == pytest.approx(5.8, abs=0.3)
    assert violation[1] <= 0.35
    assert all(0.05 <= v <= 0.25 for v in violation[2:])


def test_histogram_bias_is_within_one_bin_of_the_order_statistic_in_every_step():
    b = jnp.zeros(E)
    for step in range(12):
        s = scores(step, 8192)
        width = float(b.max() - b.min() + 2) / BINS
        exact = qb_exact(s, b, K)
        b = update(histogram(s, b, experts_per_token=K), b, experts_per_token=K)
        np.testing.assert_allclose(b, exact, atol=width, rtol=0)


@pytest.mark.parametrize(("tokens", "experts", "k"), [(37, 6, 2), (5, 16, 4), (1, 3, 1), (1000, 7, 3)])
def test_uneven_shares_stay_within_one_bin_of_the_order_statistic_before_centring(tokens, experts, k):
    s, b = scores(1, tokens, experts), bias(2, experts)
    width = float(b.max() - b.min() + 2) / BINS
    new = update(histogram(s, b, experts_per_token=k), b, experts_per_token=k)
    shift = qb_exact(s, b, k) - new
    # Centring moves all experts by the same amount, at most one more bin.
    np.testing.assert_allclose(shift - shift.mean(), 0, atol=width)
    assert abs(float(shift.mean())) <= width


def test_every_token_counts_once_for_every_expert_and_no_margin_needs_clamping():
    s, b = scores(3, 500), bias(4)
    h = histogram(s, b, experts_per_token=K)
    assert h.dtype == jnp.int32
    np.testing.assert_array_equal(h.sum(1), 500)
    margins = qb_threshold(s, b, K)[:, None] - s
    assert b.min() - 1 < margins.min()
    assert margins.max() < b.max() + 1


def test_the_exact_bias_admits_the_fair_share_of_tokens():
    s, b = scores(5, 4096), bias(6)
    share = 4096 * K // E
    margins = qb_threshold(s, b, K)[:, None] - s
    uncentred = jnp.sort(margins, axis=0)[share - 1]
    # Tokens for which the expert is itself the (k+1)-th all have the margin b_j: an atom that the share may fall on.
    assert ((margins < uncentred).sum(0) < share).all()
    assert ((margins <= uncentred).sum(0) >= share).all()
    np.testing.assert_allclose(qb_exact(s, b, K), uncentred - uncentred.mean(), atol=1e-6)


def test_permuting_the_experts_permutes_histogram_and_bias():
    s, b = scores(7, 1024), bias(8)
    order = jax.random.permutation(jax.random.key(9), E)
    h = histogram(s, b, experts_per_token=K)
    h_permuted = histogram(s[:, order], b[order], experts_per_token=K)
    np.testing.assert_array_equal(h_permuted, h[order])
    np.testing.assert_allclose(
        update(h_permuted, b[order], experts_per_token=K), update(h, b, experts_per_token=K)[order], atol=1e-6
    )


def test_four_micro_batches_count_exactly_what_one_batch_counts():
    s, b = scores(10, 1024), bias(11)
    parts = sum(histogram(part, b, experts_per_token=K) for part in jnp.split(s, 4))
    np.testing.assert_array_equal(parts, histogram(s, b, experts_per_token=K))


def test_sharded_tokens_count_exactly_what_one_device_counts():
    s, b = scores(12, 1024).reshape(16, 64, E), bias(13)
    mask = jax.random.bernoulli(jax.random.key(14), 0.9, (16, 64))
    whole = histogram(s, b, experts_per_token=K, mask_N=mask)
    mesh = jax.make_mesh((4, 2), ("data", "context"), axis_types=(AxisType.Explicit,) * 2)
    spec = PartitionSpec("data", "context")
    with jax.set_mesh(mesh):
        s, mask = jax.device_put((s, mask), NamedSharding(mesh, spec))
        global_view = histogram(s, b, experts_per_token=K, mask_N=mask)
        assert jax.typeof(global_view).sharding.spec == PartitionSpec(None, None)

        @jax.jit
        @partial(jax.shard_map, in_specs=(spec, PartitionSpec(), spec), out_specs=PartitionSpec())
        def per_device(s, b, mask):
            own = qb_histogram(s, b, experts_per_token=K, bins=BINS, mask_N=mask)
            return jax.lax.psum(own, ("data", "context"))

        local_view = per_device(s, b, mask)
    np.testing.assert_array_equal(global_view, whole)
    np.testing.assert_array_equal(local_view, whole)


def test_masked_tokens_do_not_count():
    s, b = scores(15, 600), bias(16)
    mask = jax.random.bernoulli(jax.random.key(17), 0.7, (600,))
    padding_rewritten = jnp.where(mask[:, None], s, 0.999)
    expected = histogram(s[np.asarray(mask)], b, experts_per_token=K)
    for padded in (s, padding_rewritten):
        np.testing.assert_array_equal(histogram(padded, b, experts_per_token=K, mask_N=mask), expected)


def test_no_counted_token_leaves_the_bias_alone():
    b = bias(18)
    h = histogram(scores(19, 32), b, experts_per_token=K, mask_N=jnp.zeros(32, bool))
    assert h.sum() == 0
    np.testing.assert_array_equal(update(h, b, experts_per_token=K), b)


def test_threshold_of_the_router_gives_the_same_histogram():
    s, b = scores(20, 256), bias(21)
    given = histogram(s, b, experts_per_token=K, alpha_N=qb_threshold(s, b, K))
    np.testing.assert_array_equal(given, histogram(s, b, experts_per_token=K))


def test_layers_update_independently():
    b = jnp.stack([bias(22), bias(23), bias(24)])
    h = jnp.stack([histogram(scores(25 + l, 512), b[l], experts_per_token=K) for l in range(3)])
    h = h.at[1].set(0)
    new = update(h, b, experts_per_token=K)
    assert new.dtype == jnp.float32
    np.testing.assert_array_equal(new[1], b[1])
    for l in (0, 2):
        np.testing.assert_allclose(new[l], update(h[l], b[l], experts_per_token=K), atol=1e-7)


def test_rank_is_exact_for_token_counts_beyond_float32_and_int32_products():
    """67M tokens × 16 of 896: m·k is close to the int32 range, 300M × 16 is beyond it."""
    for tokens in (67_108_863, 300_000_001):
        b = jnp.zeros(896)
        share = -(-tokens * 16 // 896)
        # Exactly the fair share lies in bin 10 and the rest in bin 500; one token fewer must push the quantile on.
        full = jnp.zeros((896, BINS), jnp.int32).at[:, 10].set(share).at[:, 500].set(tokens - share)
        h = full.at[0, 10].add(-1).at[0, 500].add(1)
        new = update(h, b, experts_per_token=16)
        assert float(new[0] - new[1]) > 0.9
        np.testing.assert_allclose(new[1:], new[1], atol=1e-6)


def test_ema_mixes_old_and_new_bias():
    s, b = scores(30, 512), bias(31) - bias(31).mean()
    h = histogram(s, b, experts_per_token=K)
    new = update(h, b, experts_per_token=K)
    np.testing.assert_allclose(update(h, b, experts_per_token=K, ema=0.75), 0.75 * b + 0.25 * new, atol=1e-6)


def test_histogram_is_counted_once_and_gives_no_gradient_under_remat_and_scan():
    x, b = jax.random.normal(jax.random.key(32), (64, E)), bias(33)

    def layer(x, weight):
        s = jax.nn.sigmoid(x * weight)
        return x + s, qb_histogram(s, b, experts_per_token=K, bins=BINS)

    def loss(weights, wrap):
        y, h = jax.lax.scan(wrap(layer), x, weights)
        return y.sum(), h

    weights = jnp.array([0.5, 1.0, 2.0])
    (_, plain), plain_grad = jax.jit(jax.value_and_grad(lambda w: loss(w, lambda f: f), has_aux=True))(weights)
    (_, remat), remat_grad = jax.jit(jax.value_and_grad(lambda w: loss(w, jax.checkpoint), has_aux=True))(weights)
    np.testing.assert_array_equal(plain.sum((1, 2)), 64 * E)
    np.testing.assert_array_equal(remat, plain)
    np.testing.assert_allclose(remat_grad, plain_grad, rtol=1e-6)


def test_later_tokens_cannot_change_an_earlier_route_of_the_same_step():
    s, b = scores(34, 128), bias(35)
    changed = s.at[64:].set(scores(36, 64))
    routes, routes_changed = (jax.lax.top_k(scores + b, K)[1] for scores in (s, changed))
    np.testing.assert_array_equal(routes[:64], routes_changed[:64])


def test_a_share_of_all_or_no_experts_is_refused():
    with pytest.raises(ValueError, match="experts_per_token"):
        qb_histogram(scores(37, 8), jnp.zeros(E), experts_per_token=E, bins=BINS)
