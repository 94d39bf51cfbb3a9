"""States at borders inside a row, for caches of prefixes."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

Tree = Any


def scan_with_borders(
    step: Callable[[Tree, Tree], tuple[Tree, Tree]], carry: Tree, inputs: Tree, every: int, count: int
) -> tuple[Tree, Tree, Tree]:
    """`lax.scan` that also returns `count` carries, those after each `every` steps, stacked.

    A scan over scans: keeping the carry of every step and dropping most would take `every` times the memory.
    """
    split = every * count
    grouped = jax.tree.map(lambda x: x[:split].reshape(count, every, *x.shape[1:]), inputs)

    def group(carry, inputs):
        carry, outputs = jax.lax.scan(step, carry, inputs)
        return carry, (outputs, carry)

    carry, (outputs, borders) = jax.lax.scan(group, carry, grouped)
    carry, rest = jax.lax.scan(step, carry, jax.tree.map(lambda x: x[split:], inputs))

    def joined(x, rest):
        return jnp.concatenate([x.reshape(split, *x.shape[2:]), rest])

    return carry, jax.tree.map(joined, outputs, rest), borders


@jax.custom_vjp
def refuse_gradient(states: Array) -> Array:
    """`states`, of which no gradient can be taken; one of what was computed beside them still can."""
    return states


def _refuse(_, d_states):
    raise NotImplementedError(
        "kda: the states of state_interval have no gradient but with implementation='reference'; "
        "stop it (jax.lax.stop_gradient), or take the final state of a shorter row (return_final_state)"
    )


refuse_gradient.defvjp(lambda states: (states, None), _refuse)
