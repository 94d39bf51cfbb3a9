"""What policies by name keep, and how exact it is."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from k3jax.ops.remat import checkpoint_name, dequantize, policy, quantize

ACTIONS = ("save", "fp8", "offload", "recompute")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("width", [1, 64, 128, 300])
def test_fp8_is_within_its_bound_of_every_element(dtype, width):
    rng = np.random.default_rng(0)
    x = (
        rng.standard_normal((5, 3, width))
        * 10.0 ** rng.integers(-30, 30, (5, 3, 1))
        * 10.0 ** -rng.uniform(0, 6, width)
    )
    x[0, 0] = 0
    x = jnp.asarray(x, dtype)
    values, scales = quantize(x)
    assert values.dtype == jnp.float8_e4m3fn
    assert values.shape == x.shape
    assert scales.shape == (5, 3, -(-width // 128))
    exact, rounded = (np.asarray(a, np.float64) for a in (x, dequantize(values, scales, "float32")))
    blocks = np.split(exact, range(128, width, 128), axis=-1)
    largest = np.concatenate([np.broadcast_to(abs(b).max(-1, keepdims=True), b.shape) for b in blocks], -1)
    bound = np.maximum(2.0**-4 * abs(exact), largest * 2.0**-10 / 448)
    assert (abs(rounded - exact) <= 1.001 * bound).all()
    assert (abs(rounded - exact).max(-1) > 0)[1:].all() or width == 1
    assert not rounded[0, 0].any()


def stack(weights, x, chosen):
    """A scan over layers of two products, whose hidden part is named."""

    def layer(x, w):
        hidden = checkpoint_name(jnp.tanh(x @ w), "hidden")
        level = checkpoint_name(jnp.sum(hidden**2, axis=-1, keepdims=True), "hidden", exact=True)
        return jnp.sin(hidden @ w.T) / (1 + level), None

    layer = jax.checkpoint(layer, policy=policy({"hidden": chosen} if chosen else {}), prevent_cse=False)
    return jnp.sum(jax.lax.scan(layer, x, weights)[0] ** 2)


@pytest.fixture(scope="module")
def inputs():
    rng = np.random.default_rng(0)
    return jnp.asarray(rng.standard_normal((3, 200, 200)) * 0.07, "float32"), jnp.asarray(
        rng.standard_normal((4, 200)), "float32"
    )


@pytest.mark.parametrize("action", ACTIONS)
def test_every_policy_leaves_the_loss_alone_and_all_but_fp8_the_gradients(inputs, action):
    gradient = jax.jit(jax.value_and_grad(stack), static_argnums=2)
    loss, expected = gradient(*inputs, None)
    other, found = gradient(*inputs, action)
    assert other == loss
    error = float(jnp.max(jnp.abs(found - expected)) / jnp.max(jnp.abs(expected)))
    if action == "fp8":
        assert 1e-4 < error < 2.0**-4
    else:
        assert error < 1e-6


def kept(inputs, action) -> str:
    """What the forward loop hands to the backward loop of a gradient, as types."""
    (program,) = [
        eqn.params["jaxpr"]
        for eqn in jax.make_jaxpr(jax.grad(stack), static_argnums=2)(*inputs, action).eqns
        if eqn.primitive.name == "scan" and not eqn.params["reverse"]
    ]
    return " ".join(str(aval) for aval in program.out_avals[1:])


def test_policies_keep_what_they_say(inputs):
    # the layer's input and weights are kept by all
    assert "float8_e4m3fn[4,200]" in kept(inputs, "fp8")
    assert "float32[4,2]" in kept(inputs, "fp8")  # scales
    assert "float32[4,1]" in kept(inputs, "fp8")  # what is exact
    assert kept(inputs, "offload").count("<host>") == 2
    whole = kept(inputs, "save").count("float32[4,200]")
    for action in ("fp8", "offload", "recompute"):
        assert kept(inputs, action).count("float32[4,200]") == whole - 1, action
    assert "float32[4,1]" not in kept(inputs, "recompute")


def test_offloading_moves_to_pinned_memory_and_back_on_a_gpu(inputs):
    lowered = jax.jit(jax.grad(stack), static_argnums=2).trace(*inputs, "offload").lower(lowering_platforms=("cuda",))
    moves = [line for line in lowered.as_text().splitlines() if "annotate_device_placement" in line]
    assert sum("pinned_host" in line for line in moves) == 2
    assert len(moves) == 4


def test_fp8_is_what_the_backward_pass_reads(inputs):
    """The gradient by hand: one layer, its hidden part replaced by what FP8 makes of it wherever it is linearised."""
    w, x = inputs[0][0], inputs[1]

    def after(hidden, w):
        return jnp.sum(jnp.sin(hidden @ w.T) ** 2)

    def whole(w, x):
        return after(checkpoint_name(jnp.tanh(x @ w), "hidden"), w)

    found = jax.grad(jax.checkpoint(whole, policy=policy({"hidden": "fp8"})))(w, x)
    rounded = dequantize(*quantize(jnp.tanh(x @ w)), "float32")
    d_hidden, d_w = jax.grad(after, argnums=(0, 1))(rounded, w)
    expected = d_w + x.T @ (d_hidden * (1 - jnp.tanh(x @ w) ** 2))
    np.testing.assert_allclose(found, expected, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("width", [256, 200])  # 200: shorter blocks than on one device
def test_fp8_of_an_array_cut_over_devices_stays_where_it_is(width):
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(AxisType.Explicit,) * 2, devices=jax.devices()[:4])
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal(shape).astype("float32") * 0.3 for shape in ((4, 32), (32, width)))

    def loss(w, x, cut=None):
        hidden = checkpoint_name(jnp.tanh(jnp.einsum("bd,df->bf", x, w, out_sharding=cut)), "hidden")
        return jnp.sum(jnp.sin(hidden) ** 2)

    def gradient(policy_of, w, x, cut=None):
        rematerialised = jax.checkpoint(functools.partial(loss, cut=cut), policy=policy(policy_of))
        return jax.jit(jax.value_and_grad(rematerialised))(w, x)

    expected_loss, expected = gradient({"hidden": "fp8"}, w, x)
    exact = gradient({}, w, x)[1]
    with jax.set_mesh(mesh):
        cut_w, cut_x = jax.device_put(w, P(None, "tensor")), jax.device_put(x, P("data"))
        found_loss, found = gradient({"hidden": "fp8"}, cut_w, cut_x, P("data", "tensor"))
    assert found.sharding.spec == P(None, "tensor")
    np.testing.assert_allclose(found_loss, expected_loss, rtol=1e-6)
    if width == 256:
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    else:
        assert 1e-4 < np.abs(found - exact).max() / np.abs(exact).max() < 2.0**-3


def test_fp8_keeps_arrays_of_one_shape_apart():
    rng = np.random.default_rng(0)
    x, y, z = (jnp.asarray(rng.standard_normal((3, 40)), "float32") for _ in range(3))

    def product(x, y, z):
        a, b, c = checkpoint_name((jnp.sin(x), jnp.sin(y), jnp.sin(z)), "factor")
        return jnp.sum(a * b * c)

    found = jax.grad(jax.checkpoint(product, policy=policy({"factor": "fp8"})), argnums=(0, 1, 2))(x, y, z)
    expected = jax.grad(product, argnums=(0, 1, 2))(x, y, z)
    for a, b in zip(found, expected):
        np.testing.assert_allclose(a, b, rtol=(1 + 2**-4) ** 2 - 1, atol=1e-3)  # two rounded factors
        assert np.abs(a - b).max() > 1e-4
