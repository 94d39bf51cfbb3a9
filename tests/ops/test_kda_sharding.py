"""KDA on eight devices: inside `shard_map` with its checks on, and left to explicit sharding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from k3jax.ops.kda import kda

IDS = np.stack([np.repeat([0, 7, 0, 7, 3], [2, 9, 3, 4, 6]), np.repeat([1, 2], 12)] * 4).astype(np.int32)
SPECS = {n: P("data", None, "tensor") for n in ("q", "k", "v", "g", "beta")}
SPECS |= {"A_log": P("tensor"), "dt_bias": P("tensor"), "initial_state": P("tensor")}  # one state for all rows
OPTIONS = dict(gate="lower_bound", beta_is_logit=True, qk_l2norm=True, return_final_state=True)


@pytest.fixture(scope="module")
def inputs():
    rng = np.random.default_rng(0)
    shapes = {n: (8, 24, 2, 16) for n in ("q", "k", "v", "g")} | {"beta": (8, 24, 2)}
    shapes |= {"A_log": (2,), "dt_bias": (2, 16), "initial_state": (2, 16, 16)}
    return {n: rng.normal(size=shape).astype(np.float32) for n, shape in shapes.items()}


@pytest.fixture(scope="module")
def expected(inputs):
    return jax.device_get(jax.jit(jax.value_and_grad(functools.partial(loss, "reference")))(inputs, IDS))


def loss(implementation, inputs, ids):
    state = inputs["initial_state"]
    state = state + jnp.zeros_like(inputs["q"][:, 0, :, :, None])  # [B, H, K, V], sharded as q
    o, state = kda(**inputs | {"initial_state": state}, segment_ids=ids, implementation=implementation, **OPTIONS)
    return jnp.sum(o**2) + jnp.sum(state**2)


def place(mesh, inputs):
    inputs = {n: jax.device_put(x, NamedSharding(mesh, SPECS[n])) for n, x in inputs.items()}
    return inputs, jax.device_put(IDS, NamedSharding(mesh, P("data")))


def check(got, expected):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=2e-5 * np.max(np.abs(b))),
        jax.device_get(got),
        expected,
    )


@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.parametrize("shape", [(8, 1), (4, 2)])
def test_shard_map_with_its_checks_computes_the_same(inputs, expected, shape, implementation):
    mesh = jax.make_mesh(shape, ("data", "tensor"))
    with jax.set_mesh(mesh):

        def body(inputs, ids):
            value, gradients = jax.value_and_grad(functools.partial(loss, implementation))(inputs, ids)
            return jax.lax.psum(value, ("data", "tensor")), gradients

        mapped = jax.shard_map(body, in_specs=(SPECS, P("data")), out_specs=(P(), SPECS), check_vma=True)
        check(jax.jit(mapped)(*place(mesh, inputs)), expected)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_explicit_sharding_computes_the_same(inputs, expected, implementation):
    mesh = jax.make_mesh((4, 2), ("data", "tensor"))
    with jax.set_mesh(mesh):
        got = jax.jit(jax.value_and_grad(functools.partial(loss, implementation)))(*place(mesh, inputs))
        assert jax.typeof(got[1]["k"]).sharding.spec == P("data", None, "tensor", None)
        check(got, expected)


def test_packed_sequences_take_heads_sharded_over_devices(inputs):
    packed = {n: x[:1] if n in ("q", "k", "v", "g", "beta") else x for n, x in inputs.items()}
    packed["initial_state"] = np.stack([inputs["initial_state"]] * 3)
    ends = np.array([0, 5, 5, 22], np.int32)

    def loss(inputs, ends):
        o, state = kda(**inputs, cu_seqlens=ends, **OPTIONS)
        return jnp.sum(o**2) + jnp.sum(state**2)

    expected = jax.device_get(jax.jit(jax.value_and_grad(loss))(packed, ends))
    mesh = jax.make_mesh((4, 2), ("data", "tensor"))
    specs = {n: P(None, None, "tensor") if n in ("q", "k", "v", "g", "beta") else SPECS[n] for n in packed}
    specs["initial_state"] = P(None, "tensor")

    def body(inputs, ends):
        value, gradients = jax.value_and_grad(loss)(inputs, ends)
        return jax.lax.psum(value, "tensor"), gradients

    with jax.set_mesh(mesh):
        sharded = {n: jax.device_put(x, NamedSharding(mesh, specs[n])) for n, x in packed.items()}
        mapped = jax.shard_map(body, in_specs=(specs, P()), out_specs=(P(), specs), check_vma=True)
        check(jax.jit(mapped)(sharded, ends), expected)
        check(jax.jit(jax.value_and_grad(loss))(sharded, ends), expected)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_states_at_borders_are_sharded_as_the_rows_and_heads(implementation):
    rng = np.random.default_rng(1)
    inputs = {n: rng.normal(size=(8, 136, 2, 16)).astype(np.float32) for n in "qkvg"}
    inputs["beta"] = rng.normal(size=(8, 136, 2)).astype(np.float32)
    inputs["g"] = -np.abs(inputs["g"])

    @jax.jit
    def states(inputs):
        return kda(**inputs, beta_is_logit=True, qk_l2norm=True, state_interval=64, implementation=implementation)[1]

    expected = jax.device_get(states(inputs))
    mesh = jax.make_mesh((4, 2), ("data", "tensor"))
    with jax.set_mesh(mesh):
        sharded = {n: jax.device_put(x, NamedSharding(mesh, SPECS[n])) for n, x in inputs.items()}
        got = states(sharded)
        assert jax.typeof(got).sharding.spec == P("data", None, "tensor", None, None)
        check(got, expected)
        mapped = jax.shard_map(states, in_specs=({n: SPECS[n] for n in inputs},), out_specs=P("data", None, "tensor"))
        check(jax.jit(mapped)(sharded), expected)
