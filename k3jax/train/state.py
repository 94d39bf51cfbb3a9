"""What a training step carries: parameters, optimizer state, router biases, step, RNG."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import NamedSharding

from k3jax.config import ConfigError, ModelConfig, RunConfig
from k3jax.model.k3 import K3
from k3jax.sharding import shardings


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """The state of a run between two optimizer steps."""

    step: jax.Array  # int32 [], updates applied; a skipped step does not count
    params: K3  # leaves in config.model.param_dtype, some at least float32
    opt_state: optax.OptState
    router_bias: jax.Array  # float32 [MoE layers, experts]; follows the loads, gets no gradient
    rng: jax.Array  # uint32 [2], key data of the run


def init_params(config: ModelConfig, seed: int) -> K3:
    """A freshly initialised model; call it under `jit` or `eval_shape`."""
    return K3(config, rngs=nnx.Rngs(seed))


def abstract_params(config: ModelConfig) -> K3:
    """The model's tree of shapes and dtypes, without memory."""
    return jax.eval_shape(lambda: init_params(config, 0))


def _init(config: ModelConfig, optimizer: optax.GradientTransformation, seed: int) -> TrainState:
    return fresh_state(config, init_params(config, seed), optimizer, config.num_moe_layers, seed)


def fresh_state(
    config: ModelConfig, params: Any, optimizer: optax.GradientTransformation, num_moe_layers: int, seed: int
) -> TrainState:
    """The state that training starts from, of a model or of the part of one with `num_moe_layers`."""
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        opt_state=optimizer.init(params),
        router_bias=jnp.zeros((num_moe_layers, config.moe.num_experts), jnp.float32),
        rng=jax.random.key_data(jax.random.key(seed)),
    )


def abstract_state(
    config: ModelConfig,
    optimizer: optax.GradientTransformation,
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh,
    seed: int = 0,
    *,
    fsdp: bool = False,
    offload: bool = False,
) -> TrainState:
    """Shapes, dtypes and shardings (on the devices of `mesh`) of a `TrainState`, without memory.

    Optimizer state lies in its layout at rest, parameters do with `fsdp`; see `k3jax.sharding`. With `offload` it lies
    in pinned host memory, but for scalars. `mesh` is the one that is set; an abstract one will do to see what a mesh
    would hold (`k3jax.train.placement`).

    Raises:
        ConfigError: a bank of experts that `fsdp` cannot cut on this mesh.
    """
    return abstract_of(lambda: _init(config, optimizer, seed), mesh, fsdp=fsdp, offload=offload)


def abstract_of(
    init: Callable[[], TrainState],
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh,
    *,
    fsdp: bool = False,
    offload: bool = False,
) -> TrainState:
    """`abstract_state` of what `init` makes, whatever parameters that has."""
    shapes = jax.eval_shape(init)
    whole = shardings(shapes, mesh)
    places = dataclasses.replace(
        whole,
        params=shardings(shapes.params, mesh, at_rest=fsdp, strict=fsdp),
        opt_state=shardings(shapes.opt_state, mesh, at_rest=True),
    )
    if offload:
        places = dataclasses.replace(places, opt_state=jax.tree.map(_on_host, shapes.opt_state, places.opt_state))

    def with_sharding(leaf: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(with_sharding, shapes, places)


def _on_host(leaf: jax.ShapeDtypeStruct, place: NamedSharding) -> NamedSharding:
    return place.with_memory_kind("pinned_host") if leaf.ndim else place


def moved(opt_state: optax.OptState, space: jax.memory.Space) -> optax.OptState:
    """Optimizer state of `offload` between host and device, for use under `jit`; scalars never leave the device."""
    return jax.tree.map(lambda x: jax.device_put(x, space) if x.ndim else x, opt_state)


def check_host_memory(config: RunConfig, mesh: jax.sharding.Mesh) -> None:
    """Refuses a configuration that keeps arrays in pinned host memory on devices that have none.

    Raises:
        ConfigError: the message names the field.
    """
    fields = [f"train.remat_policy.{name}" for name, action in config.train.remat_policy.items() if action == "offload"]
    fields += ["optimizer.offload"] if config.optimizer.offload else []
    device = mesh.local_devices[0]
    kinds = [memory.kind for memory in device.addressable_memories()]
    if fields and "pinned_host" not in kinds:
        raise ConfigError(
            f"{', '.join(fields)} needs pinned host memory, which {device.device_kind} ({device.platform}) has not; it "
            f"has {', '.join(kinds)}"
        )


def create_state(
    config: ModelConfig,
    optimizer: optax.GradientTransformation,
    mesh: jax.sharding.Mesh,
    seed: int,
    *,
    fsdp: bool = False,
    offload: bool = False,
) -> TrainState:
    """A fresh `TrainState`, every array born in its place; arguments and errors of `abstract_state`."""
    return creator(config, optimizer, mesh, seed, fsdp=fsdp, offload=offload)()


def creator(
    config: ModelConfig,
    optimizer: optax.GradientTransformation,
    mesh: jax.sharding.Mesh,
    seed: int,
    *,
    fsdp: bool = False,
    offload: bool = False,
) -> jax.stages.Wrapped:
    """`create_state` as a jitted function without arguments: to compile it takes memory of no device, but time."""
    return creator_of(lambda: _init(config, optimizer, seed), mesh, fsdp=fsdp, offload=offload)


def creator_of(
    init: Callable[[], TrainState], mesh: jax.sharding.Mesh, *, fsdp: bool = False, offload: bool = False
) -> jax.stages.Wrapped:
    """A jitted function of what `init` makes, every array born in its place."""
    places = jax.tree.map(lambda leaf: leaf.sharding, abstract_of(init, mesh, fsdp=fsdp, offload=offload))
    # hundreds of small random draws that run once: a CPU compiles them six times as fast without optimising
    options = {"xla_backend_optimization_level": 0} if mesh.devices.flat[0].platform == "cpu" else None
    if math.prod(mesh.shape.values()) > 1:
        # left to the partitioner, each device draws its own slices; in Explicit mode it would draw everything and cut
        specs = jax.tree.map(lambda place: place.spec, places)
        init = cast(Any, jax.sharding.auto_axes)(init, axes=mesh.axis_names, out_sharding=specs)
    return jax.jit(init, out_shardings=places, compiler_options=options)


def model_part(state: Any) -> dict[str, Any]:
    """What generation needs, as the checkpoint item "model"."""
    return {"params": state.params, "router_bias": state.router_bias}


def training_part(state: Any) -> dict[str, Any]:
    """What only training needs, as the checkpoint item "training"."""
    return {"opt_state": state.opt_state, "step": state.step, "rng": state.rng}
