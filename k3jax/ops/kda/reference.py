"""KDA as its token recurrence: the definition that every other implementation is tested against.

Per head, with state S [K, V] and alpha_t = exp(g_t):

    S_t = (I - beta_t k_t k_t^T) Diag(alpha_t) S_{t-1} + beta_t k_t v_t^T,        o_t = S_t^T q_t

Shape suffixes: B batch, T time, S sequences, H heads, K key dim, V value dim.
"""

import jax
import jax.numpy as jnp
from jax import Array

from .borders import scan_with_borders
from .gates import Activation, activate
from .segments import document_starts, token_sequence


def recurrence_step(state_BHKV: Array, q: Array, k: Array, v: Array, g: Array, beta: Array) -> tuple[Array, Array]:
    """One token [B, H, ...] of activated inputs: the state decays, is corrected towards v at k, and is read by q."""
    state = jnp.exp(g)[..., None] * state_BHKV
    error_BHV = v - jnp.sum(k[..., None] * state, axis=-2)
    state = state + k[..., None] * (beta[..., None] * error_BHV)[..., None, :]
    return jnp.sum(q[..., None] * state, axis=-2), state


def kda_reference(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    A_log: Array | None,
    dt_bias: Array | None,
    initial_state: Array | None,
    segment_ids: Array | None,
    cu_seqlens: Array | None,
    how: Activation,
    state_interval: int | None = None,
) -> tuple[Array, Array, Array | None]:
    """`kda` for every argument, one token after the other. Returns (o [B, T, H, V], final state, states at borders)."""
    batch, length, heads, _ = q.shape
    real = None if segment_ids is None else segment_ids != 0
    sequence_T = None
    if cu_seqlens is not None:
        sequence_T = token_sequence(cu_seqlens, length)
        real = (sequence_T < cu_seqlens.shape[0] - 1)[None]
    inputs = activate(q, k, v, g, beta, A_log, dt_bias, how, real)
    if initial_state is None:
        rows = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
        initial_state = jnp.zeros((rows, heads, q.shape[-1], v.shape[-1]))
    # Adding what depends on no value gives the carry the sharding and the varying axes of the inputs.
    state = initial_state.astype(inputs[0].dtype) + jnp.zeros_like(
        inputs[1][:, 0, ..., None] * inputs[2][:, 0, :, None]
    )

    def rows_step(state, token):
        *inputs_t, start_B = token
        state = jnp.where(start_B[:, None, None, None], 0, state)
        o, state = recurrence_step(state, *inputs_t)
        return state, o

    def packed_step(states_SHKV, token):
        *inputs_t, s = token
        o, state = recurrence_step(states_SHKV[s][None], *inputs_t)
        return states_SHKV.at[s].set(state[0]), o

    borders = None
    by_token = [jnp.moveaxis(x, 1, 0) for x in inputs]
    if sequence_T is not None:
        state, o = jax.lax.scan(packed_step, state, (*by_token, jnp.minimum(sequence_T, state.shape[0] - 1)))
    else:
        starts = document_starts(jnp.ones((batch, length), jnp.int32) if segment_ids is None else segment_ids)
        tokens = (*by_token, starts.T)
        if state_interval is None:
            state, o = jax.lax.scan(rows_step, state, tokens)
        else:
            count = length // state_interval
            state, o, borders = scan_with_borders(rows_step, state, tokens, state_interval, count)
            borders = jnp.moveaxis(borders, 0, 1)
    return jnp.moveaxis(o, 0, 1).astype(v.dtype), state, borders
