"""Muon by block, AdamW for the rest, schedule, decay and QK-clip."""

import collections
import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from k3jax.config import ModelConfig, OptimizerConfig, moonvit, nano
from k3jax.train.optimizer import (
    GROUPS,
    LEAVES,
    make_optimizer,
    make_schedule,
    path_names,
    qk_clip,
    update_rms,
)
from k3jax.train.state import abstract_params

D, H, K, R, E, L, F, N = 24, 3, 8, 10, 4, 12, 20, 2
BLOCKS = {
    # name: (shape of one layer, axes of one block as (rows, columns), axes that count blocks)
    "q_proj": ((D, H, K), ((0,), (2,)), (1,)),
    "v_b": ((R, H, K), ((0,), (2,)), (1,)),
    "router": ((D, E), ((0,), (1,)), ()),
    "down": ((F, D), ((0,), (1,)), ()),
    "f_b": ((R, H, K), ((0,), (1, 2)), ()),
    "g_proj": ((D, H, K), ((0,), (1, 2)), ()),
    "o_proj": ((H, K, D), ((0, 1), (2,)), ()),
    "w1": ((E, L, F), ((1,), (2,)), (0,)),
    "w2": ((E, F, L), ((1,), (2,)), (0,)),
}
SPLIT = BLOCKS | {
    "g_proj": ((D, H, K), ((0,), (2,)), (1,)),
    "o_proj": ((H, K, D), ((1,), (2,)), (0,)),
}
PLAIN = OptimizerConfig(learning_rate=1.0, weight_decay=0.0, clip_norm=None, min_learning_rate_ratio=1.0)
"""Rate 1 from the first step on and nothing but the two update rules."""


def normal(seed: int, shape: tuple[int, ...]) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


def tree_of_normals(seed: int, like) -> dict:
    leaves, treedef = jax.tree.flatten(like)
    return jax.tree.unflatten(treedef, [normal(seed * 1000 + i, x.shape) for i, x in enumerate(leaves)])


def run(config: OptimizerConfig, params, grads: list, total_steps: int = 4):
    """Updates of every step, at fixed parameters."""
    transform = make_optimizer(config, params, total_steps).transform
    state, out = transform.init(params), []
    step = jax.jit(transform.update)
    for g in grads:
        updates, state = step(g, state, params)
        out.append(updates)
    return out


def plain_muon(grads: list[np.ndarray], rms: float = 0.2) -> list[np.ndarray]:
    """Moonlight's Muon on one matrix, written out (float64)."""
    momentum, out = np.zeros_like(grads[0], dtype=np.float64), []
    for g in np.asarray(grads, np.float64):
        momentum = 0.95 * momentum + g
        x = g + 0.95 * momentum
        x = x / np.linalg.norm(x)
        tall = x.shape[0] > x.shape[1]
        x = x.T if tall else x
        for _ in range(5):
            a = x @ x.T
            x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
        x = x.T if tall else x
        out.append(-rms * math.sqrt(max(x.shape)) * x)
    return out


def blocks_of(array: jax.Array, spec) -> list[np.ndarray]:
    """The 2-D blocks of one layer's leaf, by plain indexing."""
    _, (rows, cols), batch = spec
    x = np.transpose(np.asarray(array), (*batch, *rows, *cols))
    flat = x.reshape(-1, math.prod(array.shape[i] for i in rows), math.prod(array.shape[i] for i in cols))
    return list(flat)


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("split", [False, True])
def test_every_block_is_updated_as_a_lone_matrix_would_be(stacked, split):
    specs = SPLIT if split else BLOCKS
    lead = (N,) if stacked else ()
    params = {name: jnp.zeros(lead + spec[0]) for name, spec in specs.items()}
    grads = [tree_of_normals(step, params) for step in range(3)]
    updates = run(dataclasses.replace(PLAIN, muon_split_outputs=split), params, grads)
    for name, spec in specs.items():
        for layer in range(N if stacked else 1):
            pick = (lambda x: x[layer]) if stacked else (lambda x: x)  # noqa: B023
            per_step = [blocks_of(pick(g[name]), spec) for g in grads]
            ours = [blocks_of(pick(u[name]), spec) for u in updates]
            for block in range(len(per_step[0])):
                expected = plain_muon([g[block] for g in per_step])
                for step in range(3):
                    np.testing.assert_allclose(ours[step][block], expected[step], atol=2e-5, err_msg=name)


def test_update_rms_of_every_block_follows_from_its_own_dimensions():
    """0.2·lr times the RMS of the block's singular values, which Newton-Schulz leaves in about [0.7, 1.2]."""
    specs = {
        "q_proj": ((96, 4, 24), ((0,), (2,)), (1,)),  # tall
        "k_b": ((16, 4, 64), ((0,), (2,)), (1,)),  # wide
        "router": ((64, 64), ((0,), (1,)), ()),  # square
        "f_b": ((12, 4, 16), ((0,), (1, 2)), ()),
        "o_proj": ((4, 16, 96), ((0, 1), (2,)), ()),
        "w1": ((5, 32, 48), ((1,), (2,)), (0,)),
    }
    params = {name: jnp.zeros((N, *spec[0])) for name, spec in specs.items()}
    lr = 3e-3
    (updates,) = run(dataclasses.replace(PLAIN, learning_rate=lr), params, [tree_of_normals(1, params)])
    for name, spec in specs.items():
        for block in (b for layer in range(N) for b in blocks_of(updates[name][layer], spec)):
            rms = math.sqrt((block**2).mean())
            singular = np.linalg.svd(block, compute_uv=False) / (0.2 * lr * math.sqrt(max(block.shape)))
            assert rms == pytest.approx(0.2 * lr * math.sqrt((singular**2).mean()), rel=1e-4), name
            if (
                name != "router"
            ):  # a square Gaussian matrix has singular values near 0, which five iterations leave small
                assert singular.min() > 0.67, name
            assert singular.max() < 1.21, name


def test_bfloat16_newton_schulz_is_close_and_keeps_a_float32_momentum():
    params = {name: jnp.zeros((N, *spec[0])) for name, spec in BLOCKS.items() if name in ("q_proj", "w1")}
    grads = [tree_of_normals(7, params)]
    low = dataclasses.replace(PLAIN, muon_ns_dtype="bfloat16")
    state = make_optimizer(low, params, 4).transform.init(params)
    floats = [x for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.floating)]
    assert {x.dtype for x in floats} == {jnp.dtype("float32")}
    # One momentum per Muon parameter and nothing else of that size.
    assert sum(x.size for x in floats) == sum(x.size for x in jax.tree.leaves(params))
    (half,), (full,) = run(low, params, grads), run(PLAIN, params, grads)
    for name in params:
        assert half[name].dtype == jnp.float32
        error = jnp.linalg.norm(half[name] - full[name]) / jnp.linalg.norm(full[name])
        # The quintic's relative slope reaches 5 near a singular value of 1.2, so it amplifies bfloat16's 2^-8.
        assert error < 0.05, (name, error)


def test_a_block_without_gradient_gets_no_update():
    params = {"w1": jnp.zeros((E, L, F))}
    (updates,) = run(PLAIN, params, [{"w1": normal(1, (E, L, F)).at[2].set(0)}])
    assert not updates["w1"][2].any()
    assert updates["w1"][1].any()


def test_adamw_leaves_match_optax_adamw():
    params = {"embed": normal(1, (7, 5)), "b_proj": normal(2, (N, D, H)), "input_norm": normal(3, (N, D))}
    config = OptimizerConfig(learning_rate=1e-2, clip_norm=None)
    grads = [tree_of_normals(10 + i, params) for i in range(3)]
    reference = optax.adamw(
        make_schedule(config, 4),
        b1=0.9,
        b2=0.95,
        weight_decay=0.1,
        mask={"embed": True, "b_proj": True, "input_norm": False},
    )
    state = reference.init(params)
    for g, ours in zip(grads, run(config, params, grads)):
        expected, state = reference.update(g, state, params)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-9), ours, expected)


def test_weight_decay_is_decoupled_from_both_update_rules():
    params = {"router": normal(1, (D, E)), "embed": normal(2, (7, 5)), "input_norm": normal(3, (D,))}
    grads = [tree_of_normals(4, params)]
    (without,), (with_decay,) = (run(dataclasses.replace(PLAIN, weight_decay=w), params, grads) for w in (0.0, 0.1))
    difference = jax.tree.map(lambda a, b: a - b, with_decay, without)
    np.testing.assert_allclose(difference["router"], -0.1 * params["router"], atol=1e-6)
    np.testing.assert_allclose(difference["embed"], -0.1 * params["embed"], atol=1e-6)
    assert not difference["input_norm"].any()


def test_gradients_are_clipped_to_the_global_norm_before_anything_else():
    params = {"q_a": jnp.zeros((D, R)), "embed": jnp.zeros((7, 5))}
    big = jax.tree.map(lambda x: 100 * x, tree_of_normals(1, params))
    config = dataclasses.replace(PLAIN, clip_norm=1.0, adam_eps=1e-2)  # an eps that makes Adam's scale matter
    norm = optax.global_norm(big)
    (clipped,), (by_hand,) = (run(config, params, [g]) for g in (big, jax.tree.map(lambda x: x / norm, big)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), clipped, by_hand)


@pytest.mark.parametrize(("steps", "warmup"), [(1000, 10), (300, 3), (20, 1), (1, 1)])
def test_schedule_warms_up_over_one_percent_and_ends_at_the_minimum(steps, warmup):
    config = OptimizerConfig(learning_rate=2e-3, min_learning_rate_ratio=0.1)
    rates = np.array([float(make_schedule(config, steps)(jnp.asarray(i))) for i in {*range(12), steps // 2, steps - 1}])
    rate = dict(zip({*range(12), steps // 2, steps - 1}, rates))
    for i in range(min(warmup, steps)):
        assert rate[i] == pytest.approx(2e-3 * (i + 1) / warmup)
    if steps > 1:
        assert rate[steps - 1] == pytest.approx(2e-4)
        assert 2e-4 < rate[steps // 2] < 2e-3


def k3_shapes(model: ModelConfig, layers: int = 2) -> dict:
    """A parameter tree with every leaf name of the model: one stack of each mixer and each FFN."""
    d, kda, mla, moe = model.hidden_size, model.kda, model.mla, model.moe
    h, k, m = kda.num_heads, kda.head_dim, mla.num_heads
    assert mla.q_lora_rank is not None
    assert moe.latent_size is not None
    kda_leaves = {name: (d, h, k) for name in ("q_proj", "k_proj", "v_proj", "g_proj")}
    kda_leaves |= {name: (h, k, kda.conv_size) for name in ("q_conv", "k_conv", "v_conv")}
    kda_leaves |= {"f_a": (d, k), "f_b": (k, h, k), "b_proj": (d, h), "A_log": (h,), "dt_bias": (h, k)}
    kda_leaves |= {"o_norm": (k,), "o_proj": (h, k, d), "g_a": (d, k), "g_b": (k, h, k)}
    q, kv, v = mla.q_lora_rank, mla.kv_lora_rank, mla.v_head_dim
    mla_leaves = {"q_a": (d, q), "q_a_norm": (q,), "q_b": (q, m, mla.qk_head_dim), "q_proj": (d, m, mla.qk_head_dim)}
    mla_leaves |= {"kv_a": (d, kv + mla.qk_rope_head_dim), "kv_a_norm": (kv,), "k_b": (kv, m, mla.qk_nope_head_dim)}
    mla_leaves |= {"v_b": (kv, m, v), "g_proj": (d, m, v), "o_proj": (m, v, d)}
    mlp = lambda f: {"gate": (d, f), "up": (d, f), "down": (f, d)}  # noqa: E731
    e, l, f = moe.num_experts, moe.latent_size, moe.expert_size
    moe_leaves = {"router": (d, e), "latent_down": (d, l), "latent_norm": (l,), "latent_up": (l, d)}
    moe_leaves |= {"w1": (e, l, f), "w3": (e, l, f), "w2": (e, f, l), "shared": mlp(2 * f)}
    norms = {"input_norm": (d,), "post_norm": (d,)} | {r: {"norm": (d,), "proj": (d,)} for r in ("attn_res", "mlp_res")}

    is_shape = lambda x: isinstance(x, tuple)  # noqa: E731
    layer = [
        norms | {"mixer": kda_leaves, "ffn": mlp(model.dense_size)},
        norms | {"mixer": mla_leaves, "ffn": moe_leaves},
    ]
    runs = jax.tree.map(
        lambda s: jax.ShapeDtypeStruct((layers, *s), jnp.float32), dict(enumerate(layer)), is_leaf=is_shape
    )
    top = {"embed": (model.vocab_size, d), "lm_head": (d, model.vocab_size), "final_norm": (d,)}
    top |= {"output_res": {"norm": (d,), "proj": (d,)}}
    top = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s, jnp.float32), top, is_leaf=is_shape)
    return top | {"segments": {0: {"runs": runs}}}


def test_every_parameter_belongs_to_one_group():
    shapes = k3_shapes(nano())
    groups = make_optimizer(OptimizerConfig(), shapes, 100).groups
    by_group: dict[str, set[str]] = {g: set() for g in GROUPS}
    for path, group in jax.tree_util.tree_flatten_with_path(groups)[0]:
        by_group[group].add(path_names(path)[-1])
    assert by_group["muon_head"] == {"q_proj", "k_proj", "v_proj", "q_b", "k_b", "v_b"}
    assert by_group["muon_expert"] == {"w1", "w2", "w3"}
    tower = {"patch_embed": "adamw", "positions": "adamw", "fc0": "muon_matrix", "fc1": "muon_matrix"}
    assert set.union(*by_group.values()) == LEAVES.keys() - tower.keys()
    assert sum(map(len, by_group.values())) == len(LEAVES) - len(tower)
    vision = abstract_params(nano(vision=moonvit())).vision
    of_tower = jax.tree_util.tree_flatten_with_path(make_optimizer(OptimizerConfig(), vision, 100).groups)[0]
    groups_of_tower = {path_names(path)[-1]: group for path, group in of_tower}
    assert tower.items() <= groups_of_tower.items()
    assert {groups_of_tower[name] for name in ("q_proj", "k_proj", "v_proj")} == {"muon_head"}
    split = make_optimizer(OptimizerConfig(muon_split_outputs=True), shapes, 100).groups
    mixer = split["segments"][0]["runs"][0]["mixer"]
    assert {mixer["g_proj"], mixer["g_b"], mixer["o_proj"]} == {"muon_head"}


def test_unknown_parameters_and_wrong_ranks_are_refused_by_name():
    with pytest.raises(ValueError, match="'mixer/rotary'"):
        make_optimizer(OptimizerConfig(), {"mixer": {"rotary": jnp.zeros((3, 3))}}, 10)
    with pytest.raises(ValueError, match=r"'w1' has shape \(3, 3\)"):
        make_optimizer(OptimizerConfig(), {"w1": jnp.zeros((3, 3))}, 10)


def test_update_rms_is_reported_by_group():
    updates = {"a": jnp.full((2, 3), 2.0), "b": jnp.full((5,), -1.0), "c": jnp.zeros(5)}
    rms = update_rms(updates, {"a": "muon_matrix", "b": "adamw", "c": "adamw"})
    assert {k: float(v) for k, v in rms.items()} == pytest.approx({"adamw": math.sqrt(0.5), "muon_matrix": 2.0})


@pytest.mark.parametrize("sharded", [False, True])
def test_explicit_mesh_of_eight_gives_the_same_update(sharded):
    """With replicated parameters, and with expert stacks and heads laid out over devices."""
    shapes = {
        "w1": (N, 8, L, F),
        "q_proj": (N, D, 8, K),
        "o_proj": (N, H, K, D),
        "embed": (16, D),
        "input_norm": (N, D),
    }
    specs = {"w1": (None, "data"), "q_proj": (None, None, "data"), "embed": ("data",)} if sharded else {}
    params = {name: normal(i, shape) for i, (name, shape) in enumerate(shapes.items())}
    grads = [tree_of_normals(i, params) for i in range(2)]
    config = OptimizerConfig(learning_rate=1e-2)
    expected = run(config, params, grads)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        place = {name: NamedSharding(mesh, PartitionSpec(*specs.get(name, ()))) for name in params}
        params, *grads = (jax.device_put(tree, place) for tree in (params, *grads))
        actual = run(config, params, grads)
        for name in params:
            assert jax.typeof(actual[-1][name]).sharding.spec == jax.typeof(params[name]).sharding.spec, name
    for a, b in zip(actual, expected):
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-4, atol=1e-7), a, b)


COLLECTIVE = re.compile(r" (all-[\w-]+|reduce-scatter|collective-[\w-]+)\(")


def test_blocks_sharded_over_devices_are_updated_without_communication():
    """Heads and experts are independent blocks; an update that gathers them would cost more than Newton-Schulz."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    leaves = {
        "w1": (PartitionSpec(None, "data"), (N, 8, L, F)),
        "q_proj": (PartitionSpec(None, None, "data"), (N, D, 8, K)),
    }
    with jax.set_mesh(mesh):
        params = {
            name: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))
            for name, (spec, shape) in leaves.items()
        }
        transform = make_optimizer(dataclasses.replace(PLAIN, weight_decay=0.1), params, 4).transform
        state = jax.eval_shape(transform.init, params)
        program = jax.jit(transform.update).lower(params, state, params).compile().as_text()
    assert not COLLECTIVE.findall(program)


def computations(program: str) -> dict[str, str]:
    """Name → text of every computation of a compiled program."""
    found = re.findall(r"^(?:ENTRY )?%?([\w.-]+) \(.*?\{$(.*?)^\}", program, re.MULTILINE | re.DOTALL)
    return dict(found)


def reached_from(name: str, texts: dict[str, str]) -> str:
    """Text of a computation and of all that it calls."""
    seen, left = {name}, [name]
    while left:
        for other in re.findall(r"%([\w.-]+)", texts[left.pop()]):
            if other in texts and other not in seen:
                seen.add(other)
                left.append(other)
    return "".join(texts[n] for n in seen)


@pytest.mark.parametrize("shape", [(8,), (2, 4)], ids=["data=8", "data=2, expert=4"])
def test_newton_schulz_sees_whole_blocks_only_and_does_not_communicate(shape):
    """Blocks that are cut along rows, along columns, between blocks and not at all, in stacks and alone: the update is
    that of one device, and its loops (one per kind of block) hold products and no collective."""
    shapes = {
        "w1": (N, 8, L, F),  # between experts
        "q_proj": (N, D, 8, K),  # between heads
        "q_b": (N, 16, 5, K),  # five heads do not divide: cut in their rows; ten blocks, two to a device
        "o_proj": (N, 3, 8, D),  # cut in the inner of two row axes
        "f_a": (N, 24, 40),
        "kv_a": (24, 40),  # alone; goes with f_a
        "latent_up": (24, 40),  # alone, and cut in its columns
        "router": (9, 5, 7),  # nothing divides: whole everywhere
    }
    specs = {"w1": 1, "q_proj": 2, "q_b": 1, "o_proj": 2, "f_a": 1, "kv_a": 0, "latent_up": 1}
    config = OptimizerConfig(learning_rate=1e-2, muon_ns_dtype="float32")
    params = {name: normal(i, shape) for i, (name, shape) in enumerate(shapes.items())}
    grads = [tree_of_normals(i, params) for i in range(2)]
    expected = run(config, params, grads)
    names = ("data", "expert")[: len(shape)]
    mesh = jax.make_mesh(shape, names, axis_types=(AxisType.Explicit,) * len(names))
    with jax.set_mesh(mesh):
        place = {
            name: NamedSharding(
                mesh, PartitionSpec(*(None,) * specs[name], names) if name in specs else PartitionSpec()
            )
            for name in shapes
        }
        params, *grads = (jax.device_put(tree, place) for tree in (params, *grads))
        transform = make_optimizer(config, params, 4).transform
        program = jax.jit(transform.update).lower(grads[0], transform.init(params), params).compile().as_text()
        actual = run(config, params, grads)
    for a, b in zip(actual, expected):
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-7), a, b)
    texts = computations(program)
    loops = [reached_from(name, texts) for name in re.findall(r"while\(.*body=%?([\w.-]+)", program)]
    assert len([text for text in loops if " dot(" in text or "gemm" in text]) == 7
    assert not [text for text in loops if COLLECTIVE.search(text)]
    moves = collections.Counter(name for name in COLLECTIVE.findall(program) if name != "all-reduce")  # of the norm
    # pieces of four kinds of blocks to their owners and back; the routers, which every device holds, are gathered
    assert moves == {"all-to-all": 8, "all-gather": 1}


NOPE, ROPE, TAU = 8, 4, 5.0


def max_logits(mla: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """Largest causal attention logit per head [H] of one MLA layer on x [T, D]."""
    query = jnp.einsum(
        "td,dhc->thc", x @ mla["q_a"] if "q_a" in mla else x, mla["q_b"] if "q_b" in mla else mla["q_proj"]
    )
    latent, shared = jnp.split(x @ mla["kv_a"], [R], axis=-1)
    logits = jnp.einsum("thc,shc->hts", query[..., :NOPE], jnp.einsum("tr,rhc->thc", latent, mla["k_b"]))
    logits += jnp.einsum("thc,sc->hts", query[..., NOPE:], shared)
    causal = jnp.tril(jnp.ones((x.shape[0], x.shape[0]), bool))
    return jnp.where(causal, logits / math.sqrt(NOPE + ROPE), -jnp.inf).max((1, 2))


def mla_stack(seed: int, q_lora: bool) -> dict[str, jax.Array]:
    shapes = {"kv_a": (D, R + ROPE), "k_b": (R, H, NOPE), "v_b": (R, H, NOPE), "o_proj": (H, NOPE, D)}
    shapes |= {"q_a": (D, R), "q_b": (R, H, NOPE + ROPE)} if q_lora else {"q_proj": (D, H, NOPE + ROPE)}
    return {name: normal(seed + i, (N, *shape)) / math.sqrt(shape[0]) for i, (name, shape) in enumerate(shapes.items())}


@pytest.mark.parametrize("q_lora", [True, False])
def test_qk_clip_leaves_logits_at_the_threshold_and_quiet_heads_alone(q_lora):
    x = normal(1, (12, D))
    stack, single = mla_stack(10, q_lora), jax.tree.map(lambda w: w[0], mla_stack(20, q_lora))
    for mla, head in ((stack, 1), (single, 0)):  # one loud head in each
        mla["k_b"] = mla["k_b"].at[..., head, :].multiply(20.0)
    params = {"segments": [{"runs": [{"mixer": single}, {"mixer": stack}]}], "embed": normal(2, (3, 3))}
    layers = [single, *(jax.tree.map(lambda w: w[i], stack) for i in range(N))]  # noqa: B023
    before = jnp.stack([max_logits(mla, x) for mla in layers])
    assert (before > TAU).any()
    assert (before < TAU).any()
    order = jnp.array([2, 0, 1])  # layer order need not be tree order
    rows = {"segments/0/runs/0/mixer": 2, "segments/0/runs/1/mixer": np.array([0, 1])}
    clipped = qk_clip(params, jnp.zeros_like(before).at[order].set(before), TAU, rows)
    single_after, stack_after = (run["mixer"] for run in clipped["segments"][0]["runs"])
    layers = [single_after, *(jax.tree.map(lambda w: w[i], stack_after) for i in range(N))]  # noqa: B023
    after = jnp.stack([max_logits(mla, x) for mla in layers])
    np.testing.assert_allclose(after, jnp.minimum(before, TAU), rtol=1e-5)
    for name in ("kv_a", "v_b", "o_proj"):
        np.testing.assert_array_equal(stack_after[name], stack[name])
    np.testing.assert_array_equal(clipped["embed"], params["embed"])


def test_qk_clip_ignores_heads_without_a_usable_maximum():
    mla = mla_stack(10, True)
    logits = jnp.array([[jnp.nan, jnp.inf, -jnp.inf], [-3.0, 0.0, 1.0]])
    clipped = qk_clip({"mixer": mla}, logits, TAU, {"mixer": np.array([0, 1])})
    jax.tree.map(np.testing.assert_array_equal, clipped["mixer"], mla)
    with pytest.raises(ValueError, match="'ffn'"):
        qk_clip({"mixer": mla}, logits, TAU, {"ffn": 0})


def test_qk_clip_runs_with_heads_sharded_over_an_explicit_mesh():
    mla = {"q_b": normal(1, (N, R, 8, NOPE + ROPE)), "k_b": normal(2, (N, R, 8, NOPE))}
    logits = 10 * jnp.abs(normal(3, (3, 8)))
    rows = {"mixer": np.array([2, 0])}
    expected = qk_clip({"mixer": mla}, logits, TAU, rows)
    mesh = jax.make_mesh((8,), ("tensor",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        placed = jax.device_put(mla, NamedSharding(mesh, PartitionSpec(None, None, "tensor")))
        actual = jax.jit(lambda p, m: qk_clip({"mixer": p}, m, TAU, rows))(placed, logits)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), actual, expected)
