"""Kimi Delta Attention (KDA): a delta-rule recurrence with a decay per channel.

Source: Kimi Linear (arXiv 2510.26692) and the Kimi K3 report (arXiv 2607.24653). Example:

    o = kda(q, k, v, g, b, A_log=A_log, dt_bias=dt_bias, gate="lower_bound", beta_is_logit=True, qk_l2norm=True)
"""

from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike, DTypeLike

from .chunkwise import kda_chunkwise
from .gates import Activation, Gate, activate
from .intra import TILE
from .pallas import CHUNK, kda_pallas, unavailable, unsupported
from .reference import kda_reference, recurrence_step

__all__ = ["Implementation", "kda", "kda_step", "resolve_for", "resolve_implementation"]

Implementation = Literal["reference", "xla", "pallas", "pallas_interpret"]


def resolve_implementation(implementation: Implementation | None, why_not_pallas: str | None) -> Implementation:
    """The implementation that runs when `implementation` is asked for; None is "pallas" where it can run, else "xla".

    Raises:
      ValueError: the name is unknown, or the kernels were named and cannot run because of `why_not_pallas`.
    """
    if implementation is None:
        return "xla" if why_not_pallas else "pallas"
    if implementation not in get_args(Implementation):
        raise ValueError(f"kda: unknown implementation {implementation!r}; there are {get_args(Implementation)}")
    if implementation.startswith("pallas") and why_not_pallas:
        raise ValueError(f"kda: implementation={implementation!r} cannot run here: {why_not_pallas}")
    return implementation


def resolve_for(implementation: Implementation | None, dtype: DTypeLike, head_dim: int) -> Implementation:
    """`resolve_implementation` for q, k, v and g of this dtype, K = V = `head_dim`, and beta as a logit.

    Raises:
      ValueError: as `resolve_implementation`.
    """
    x = jax.ShapeDtypeStruct((1, 1, 1, head_dim), dtype)
    how = _activation("none", -5.0, True, True, None, head_dim)
    why_not = unsupported if implementation == "pallas_interpret" else unavailable
    return resolve_implementation(implementation, why_not(x, x, x, x, how))


def kda(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    *,
    A_log: Array | None = None,
    dt_bias: Array | None = None,
    gate: Gate = "none",
    lower_bound: float = -5.0,
    beta_is_logit: bool = False,
    qk_l2norm: bool = False,
    scale: float | None = None,
    initial_state: Array | None = None,
    segment_ids: Array | None = None,
    cu_seqlens: ArrayLike | None = None,
    return_final_state: bool = False,
    state_interval: int | None = None,
    chunk_size: int = 64,
    implementation: Implementation | None = None,
) -> Array | tuple[Array, ...]:
    """Run KDA over whole sequences: `S <- Diag(e^g) S; S <- S + beta k (v - S^T k)^T; o = scale * S^T q` per head.

    Args:
      q, k: [B, T, H, K].
      v: [B, T, H, V].
      g: [B, T, H, K], the log-decay (never above 0), or the raw gate when `gate` is not "none".
      beta: [B, T, H], in (0, 1), or its logit when `beta_is_logit`.
      A_log: [H], log of the gate's rate per head. Needed by and only for a gate.
      dt_bias: [H, K], added to the raw gate. Only for a gate.
      gate: "lower_bound" (Kimi K3): `g = lower_bound * sigmoid(e^A_log (g + dt_bias))`; "softplus" (Kimi Linear):
        `g = -e^A_log softplus(g + dt_bias)`.
      lower_bound: in [-5, 0): 16 steps of -5 are what float32 can hold in one exponent.
      qk_l2norm: divide q and k by the root of their sum of squares plus 1e-6.
      scale: multiplies q, after its normalisation. Default K^-0.5.
      initial_state: [B, H, K, V], of the first document of each row ([S, H, K, V] with `cu_seqlens`). Default zeros.
      segment_ids: [B, T] int, the document of each token. A new id resets the state. 0 is padding: it freezes the
        state, its output is 0 and its gradients are 0; an id that goes on after padding goes on with its state.
      cu_seqlens: [S + 1] int, from 0: S sequences packed end to end in one row (B = 1, no `segment_ids`), sequence s
        being tokens cu_seqlens[s] to cu_seqlens[s + 1]; length 0 is allowed. Tokens past the last one are padding.
      return_final_state: also return the state after the last real token of each row (of each sequence).
      state_interval: also return the states after every so many tokens of each row, for a cache of prefixes: a positive
        multiple of 64, not with `cu_seqlens`. After padding it is the state that the padding froze. They have no
        gradient but with "reference": asking for one is refused.
      chunk_size: tokens per chunk of the chunkwise form, a multiple of 16. Changes speed, not results.
      implementation: "reference" (token by token), "xla" (chunkwise), "pallas" (kernels for Hopper GPUs: bfloat16 q, k
        and v, K = V = 64 or 128, beta as a logit; their chunks are of 64 tokens), "pallas_interpret" (the same kernels
        run by Pallas's interpreter, on any device, for tests). None is "pallas" where it can run, else "xla".

    Returns:
      o [B, T, H, V] in the dtype of v, alone or as the first of a tuple with what was asked for, in at least float32:
      `return_final_state` adds the state [B or S, H, K, V], and then `state_interval` the states
      [B, floor(T / state_interval), H, K, V], the i-th being that after token (i + 1) * state_interval.
      Gates, norms, sums of decay and state are at least float32. Matrix products take bfloat16 operands when q, k
      and v are all bfloat16, and accumulate in float32.

    Raises:
      ValueError: an argument has the wrong shape or value, arguments exclude each other, or the named implementation
        cannot run them here.
      NotImplementedError: a gradient is taken through the states of `state_interval`, but for "reference".
    """
    _check_inputs(q, k, v, g, beta, A_log, dt_bias, gate, "BTHKV")
    how = _activation(gate, lower_bound, beta_is_logit, qk_l2norm, scale, q.shape[-1])
    why_not = unsupported if implementation == "pallas_interpret" else unavailable
    chosen = resolve_implementation(implementation, why_not(q, k, v, g, how))
    rows = q.shape[0]
    if cu_seqlens is not None:
        cu_seqlens = jnp.asarray(cu_seqlens)
        rows = _checked_sequences(cu_seqlens, segment_ids, q.shape[0])
    if segment_ids is not None:
        _expect("segment_ids", segment_ids, q.shape[:2], "[B, T]")
        _expect_integers("segment_ids", segment_ids)
    if initial_state is not None:
        _expect("initial_state", initial_state, (rows, *q.shape[2:], v.shape[-1]), "[B or S, H, K, V]")
    if chunk_size < TILE or chunk_size % TILE:
        raise ValueError(f"kda: chunk_size must be a positive multiple of {TILE}, not {chunk_size}")
    if state_interval is not None:
        _check_interval(state_interval, cu_seqlens)
    args = (q, k, v, g, beta, A_log, dt_bias, initial_state, segment_ids, cu_seqlens, how)
    if chosen == "reference":
        o, state, states = kda_reference(*args, state_interval)
    elif chosen == "xla":
        o, state, states = kda_chunkwise(*args, chunk_size, state_interval)
    else:
        o, state, states = kda_pallas(*args, state_interval, interpret=chosen == "pallas_interpret")
    asked = (state,) * return_final_state + (() if states is None else (states,))
    return (o, *asked) if asked else o


def kda_step(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    state: Array,
    *,
    A_log: Array | None = None,
    dt_bias: Array | None = None,
    gate: Gate = "none",
    lower_bound: float = -5.0,
    beta_is_logit: bool = False,
    qk_l2norm: bool = False,
    scale: float | None = None,
    active: Array | None = None,
) -> tuple[Array, Array]:
    """One token per sequence, for decoding: `kda` without its T axis.

    Args:
      q, k, g: [B, H, K]; v: [B, H, V]; beta: [B, H]; the rest as in `kda`.
      state: [B, H, K, V] before the token, as `kda` or `kda_step` returned it.
      active: [B] bool; the state of a row that is not active stays as it is, and its output is 0.

    Returns:
      (o [B, H, V] in the dtype of v, state [B, H, K, V] after the token, in at least float32).

    Raises:
      ValueError: as `kda`.
    """
    _check_inputs(q, k, v, g, beta, A_log, dt_bias, gate, "BHKV")
    how = _activation(gate, lower_bound, beta_is_logit, qk_l2norm, scale, q.shape[-1])
    _expect("state", state, (*q.shape, v.shape[-1]), "[B, H, K, V]")
    if active is not None:
        _expect("active", active, q.shape[:1], "[B]")
    inputs = activate(q, k, v, g, beta, A_log, dt_bias, how, active)
    o, new_state = recurrence_step(state.astype(jnp.promote_types(state.dtype, inputs[0].dtype)), *inputs)
    return o.astype(v.dtype), new_state


def _expect(name: str, x: Array, shape: tuple[int, ...], axes: str) -> None:
    if tuple(x.shape) != shape:
        raise ValueError(f"kda: {name} has shape {tuple(x.shape)}, expected {axes} = {shape}")


def _expect_integers(name: str, x: Array) -> None:
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise ValueError(f"kda: {name} must be integers, not {x.dtype}")


def _checked_sequences(cu_seqlens: Array, segment_ids: Array | None, batch: int) -> int:
    """The number of sequences."""
    if segment_ids is not None:
        raise ValueError("kda: give cu_seqlens or segment_ids, not both")
    if batch != 1:
        raise ValueError(f"kda: cu_seqlens packs all sequences in one row, but q has B = {batch}; expected B = 1")
    if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 2:
        raise ValueError(f"kda: cu_seqlens has shape {cu_seqlens.shape}, expected [S + 1] with S >= 1")
    _expect_integers("cu_seqlens", cu_seqlens)
    return cu_seqlens.shape[0] - 1


def _check_interval(state_interval: int, cu_seqlens: Array | None) -> None:
    if state_interval < CHUNK or state_interval % CHUNK:
        raise ValueError(f"kda: state_interval must be a positive multiple of {CHUNK}, not {state_interval}")
    if cu_seqlens is not None:
        raise ValueError(
            "kda: state_interval counts from the start of each row, and cu_seqlens packs several sequences in one; "
            "give each sequence a row of its own"
        )


def _check_inputs(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    A_log: Array | None,
    dt_bias: Array | None,
    gate: Gate,
    axes: str,
) -> None:
    """Check what `kda` and `kda_step` share; `axes` names the axes of q and then V."""
    tokens, names = ", ".join(axes[:-2]), "[" + ", ".join(axes[:-1]) + "]"
    if q.ndim != len(axes) - 1 or 0 in q.shape:
        raise ValueError(f"kda: q has shape {tuple(q.shape)}, expected {names}, no axis empty")
    _expect("k", k, q.shape, names)
    _expect("g", g, q.shape, names)
    if v.ndim != q.ndim or v.shape[:-1] != q.shape[:-1] or v.shape[-1] == 0:
        expected = ", ".join(map(str, q.shape[:-1]))
        raise ValueError(f"kda: v has shape {tuple(v.shape)}, expected [{tokens}, V] = ({expected}, V)")
    _expect("beta", beta, q.shape[:-1], f"[{tokens}]")
    if gate not in get_args(Gate):
        raise ValueError(f"kda: unknown gate {gate!r}; there are {get_args(Gate)}")
    if (A_log is None) != (gate == "none"):
        raise ValueError(f"kda: gate={gate!r} {'takes no' if gate == 'none' else 'needs'} A_log")
    if gate == "none" and dt_bias is not None:
        raise ValueError("kda: gate='none' takes no dt_bias")
    if A_log is not None:
        _expect("A_log", A_log, q.shape[-2:-1], "[H]")
    if dt_bias is not None:
        _expect("dt_bias", dt_bias, q.shape[-2:], "[H, K]")


def _activation(
    gate: Gate, lower_bound: float, beta_is_logit: bool, qk_l2norm: bool, scale: float | None, key_dim: int
) -> Activation:
    if not -5.0 <= lower_bound < 0.0:
        raise ValueError(f"kda: lower_bound must be in [-5, 0), not {lower_bound}")
    scale = key_dim**-0.5 if scale is None else float(scale)
    return Activation(gate, float(lower_bound), beta_is_logit, qk_l2norm, scale)
