"""Cached decoding of a KDA layer: padding rows, and rows spread over devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from k3jax.config import MeshConfig, nano
from k3jax.model.kda import KDA, kda_cache
from k3jax.sharding import make_mesh


@pytest.fixture(scope="module")
def prefilled():
    """A layer, its cache after 5 tokens of 8 rows, and the next token."""
    config = nano()
    layer, cache = KDA(config, jax.random.key(0)), kda_cache(config, 8)
    shape = (8, 6, config.hidden_size)
    x = jax.random.normal(jax.random.key(1), shape).astype(config.dtype)
    _, cache = jax.jit(lambda layer, x, cache: layer(x, None, cache))(layer, x[:, :5], cache)
    return layer, x[:, 5:], cache


def decode(layer, x, ids, cache):
    return layer(x, ids, cache)


def test_a_padding_row_of_a_decoding_step_leaves_its_cache_alone(prefilled):
    layer, x, cache = prefilled
    y, new = jax.jit(decode)(layer, x, jnp.ones((8, 1), jnp.int32).at[2].set(0), cache)
    assert not np.asarray(y[2]).any()
    for name, value in cache.items():
        np.testing.assert_array_equal(new[name][2], value[2])
        assert (new[name][3] != value[3]).any()


def test_rows_on_eight_devices_decode_like_rows_on_one(prefilled):
    layer, x, cache = prefilled
    ids = jnp.ones((8, 1), jnp.int32)
    alone = jax.jit(decode)(layer, x, ids, cache)
    mesh = make_mesh(MeshConfig(data=8))
    with jax.set_mesh(mesh):
        rows = NamedSharding(mesh, P("data"))
        placed = jax.device_put((x, ids, cache), rows)
        layer = jax.device_put(layer, NamedSharding(mesh, P()))
        spread = jax.jit(decode)(layer, *placed)
    for a, b in zip(jax.tree.leaves(spread), jax.tree.leaves(alone), strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), atol=1e-5)
