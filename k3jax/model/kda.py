"""The KDA layer (report §2.1): projections, short convolution, gates, the recurrence, gated norm, output.

Legend: B batch, T time, D hidden, H heads, K head dim (keys and values), W convolution taps.
"""

from __future__ import annotations

from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from k3jax.config import KDAConfig, ModelConfig
from k3jax.model import init
from k3jax.ops.kda import kda
from k3jax.ops.kda.decode import Weights, kda_decode
from k3jax.ops.norms import gated_rms_norm
from k3jax.ops.remat import checkpoint_name
from k3jax.ops.short_conv import conv_tail, short_conv
from k3jax.parallel.context import kda_over_context, short_conv_over_context
from k3jax.sharding import axes_of, contract, island, layout, place, whole_sequence

KDACache = dict[str, jax.Array]
TAILS = ("q_tail", "k_tail", "v_tail")


def beside_kda(config: KDAConfig) -> Literal["xla"] | None:
    """The `implementation` argument of decoding, the convolution and the gated norm: plain JAX when KDA is asked to be
    plain JAX, else each picks what runs."""
    return "xla" if config.implementation in ("xla", "reference") else None


class KDA(nnx.Module):
    """Kimi Delta Attention mixer: x [B, T, D] → [B, T, D]."""

    def __init__(self, config: ModelConfig, key: jax.Array):
        make = init.Maker(config, key)
        D, H, K, W = config.hidden_size, config.kda.num_heads, config.kda.head_dim, config.kda.conv_size
        self.config = config
        self.q_proj = make("embed heads kda_key", D, H, K)
        self.k_proj = make("embed heads kda_key", D, H, K)
        self.v_proj = make("embed heads kda_value", D, H, K)
        self.q_conv = make("heads kda_key conv", H, K, W, init=init.conv_uniform, wide=True)
        self.k_conv = make("heads kda_key conv", H, K, W, init=init.conv_uniform, wide=True)
        self.v_conv = make("heads kda_value conv", H, K, W, init=init.conv_uniform, wide=True)
        self.f_a = make("embed lora", D, K)
        self.f_b = make("lora heads kda_key", K, H, K)
        self.b_proj = make("embed heads", D, H)
        if config.kda.full_rank_output_gate:
            self.g_proj = make("embed heads kda_value", D, H, K)
        else:
            self.g_a = make("embed lora", D, K)
            self.g_b = make("lora heads kda_value", K, H, K)
        self.A_log = make("heads", H, init=init.zeros, wide=True)
        self.dt_bias = make("heads kda_key", H, K, init=init.mamba_dt_bias, wide=True)
        self.o_norm = make("kda_value", K, init=init.ones, wide=True)
        self.o_proj = make("heads kda_value embed", H, K, D)

    def _output_gate(self, x_BTD: jax.Array) -> jax.Array:
        if self.config.kda.full_rank_output_gate:
            return jnp.einsum("btd,dhk->bthk", x_BTD, self.g_proj[...].astype(x_BTD.dtype))
        low = x_BTD @ self.g_a[...].astype(x_BTD.dtype)
        return jnp.einsum("btr,rhk->bthk", low, self.g_b[...].astype(x_BTD.dtype))

    def __call__(
        self, x_BTD: jax.Array, segment_ids: jax.Array | None, cache: KDACache | None
    ) -> tuple[jax.Array, KDACache | None]:
        """Mixes `x_BTD` (the normed layer input); with a cache, continues it and returns it updated."""
        dtype, config, residual = x_BTD.dtype, self.config.kda, x_BTD
        x_BTD = whole_sequence(x_BTD)

        def project(w: nnx.Param) -> jax.Array:
            return jnp.einsum("btd,dhk->bthk", x_BTD, w[...].astype(dtype))

        q, k, v = project(self.q_proj), project(self.k_proj), project(self.v_proj)
        g = jnp.einsum("btr,rhk->bthk", x_BTD @ self.f_a[...].astype(dtype), self.f_b[...].astype(dtype))
        beta = x_BTD @ self.b_proj[...].astype(dtype)
        o_proj = self.o_proj[...].astype(dtype)
        if cache is not None:  # heads as those of the tokens
            batch, _, heads, _ = layout(q)
            tails = {name: place(cache[name], batch, None, heads) for name in TAILS}
            cache = {"state": place(cache["state"], batch, heads), **tails}
        if cache is not None and x_BTD.shape[1] == 1:
            o, cache = self._decode((q, k, v, g, beta, self._output_gate(x_BTD)), segment_ids, cache)
            return contract("bthk,hkd->btd", o, o_proj, residual), cache
        gates = {"A_log": self.A_log[...], "dt_bias": self.dt_bias[...]}
        data, taps = (q, k, v, g, beta, segment_ids), (self.q_conv[...], self.k_conv[...], self.v_conv[...])
        if cache is None:
            o = island(partial(self._mix, axes_of(q, 1)), data, taps, gates, out=layout(q))
        else:
            o, cache = island(self._continue, data, taps, gates, cache, out=(layout(q), jax.tree.map(layout, cache)))
        norm = partial(gated_rms_norm, eps=self.config.norm_eps, implementation=beside_kda(config))
        o = island(norm, o, self.o_norm[...], self._output_gate(x_BTD), out=layout(o))
        return contract("bthk,hkd->btd", checkpoint_name(o, "operand"), o_proj, residual), cache

    def _options(self, gates: dict) -> dict:
        """Arguments of `kda`."""
        config = self.config.kda
        options = {"gate": config.gate, "lower_bound": config.gate_lower_bound, "beta_is_logit": True}
        options |= {"qk_l2norm": True, "chunk_size": config.chunk_size, "implementation": config.implementation}
        return gates | options

    def _mix(self, context: tuple[str, ...], data: tuple, taps: tuple, gates: dict) -> jax.Array:
        q, k, v, g, beta, segment_ids = data
        if context:
            conv = partial(short_conv_over_context, axis=context[0])
        else:
            conv = partial(short_conv, implementation=beside_kda(self.config.kda))
        q, k, v = checkpoint_name(tuple(conv(u, w, segment_ids) for u, w in zip((q, k, v), taps)), "operand")
        options = self._options(gates) | {"segment_ids": segment_ids}
        if context:
            o, _ = kda_over_context(q, k, v, g, beta, axis=context[0], **options)
        else:
            o = kda(q, k, v, g, beta, **options)
        assert isinstance(o, jax.Array)
        return checkpoint_name(o, "kda")

    def _decode(self, token: tuple, segment_ids: jax.Array | None, cache: KDACache) -> tuple[jax.Array, KDACache]:
        """The normed and gated output of one token a row; a row of padding leaves its cache as it is."""
        config = self.config.kda

        def step(token, segment_ids, cache, weights: Weights):
            slots = jnp.arange(token[0].shape[0], dtype=jnp.int32)
            if segment_ids is not None:
                slots = jnp.where(segment_ids[:, 0] != 0, slots, -1)
            q, k, v, g, beta, output_gate = (x[:, 0] for x in token)
            q_tail, k_tail, v_tail = (cache[name] for name in TAILS)
            y, state, tails = kda_decode(
                q,
                k,
                v,
                g,
                beta,
                output_gate,
                cache["state"],
                (q_tail, k_tail, v_tail),
                slots,
                weights,
                gate=config.gate,
                lower_bound=config.gate_lower_bound,
                norm_eps=self.config.norm_eps,
                implementation=beside_kda(config),
            )
            return y[:, None], {"state": state, **dict(zip(TAILS, tails))}

        parameters = (self.q_conv, self.k_conv, self.v_conv, self.A_log, self.dt_bias, self.o_norm)
        weights = Weights(*(p[...] for p in parameters))
        out = (layout(token[0]), jax.tree.map(layout, cache))
        return island(step, token, segment_ids, cache, weights, out=out)

    def _continue(self, data: tuple, taps: tuple, gates: dict, cache: KDACache) -> tuple[jax.Array, KDACache]:
        """Prefill of more than one token from a cache of state and convolution tails."""
        q, k, v, g, beta, segment_ids = data
        new: KDACache = {}
        convolved: list[jax.Array] = []
        for name, u, w in zip(TAILS, (q, k, v), taps):
            convolved.append(short_conv(u, w, segment_ids, cache[name], beside_kda(self.config.kda)))
            new[name] = conv_tail(u, w.shape[-1], segment_ids, cache[name])
        options = self._options(gates) | {"segment_ids": segment_ids}
        q, k, v = convolved
        o, new["state"] = kda(q, k, v, g, beta, initial_state=cache["state"], return_final_state=True, **options)
        return o, new


def kda_cache(config: ModelConfig, batch: int, stack: tuple[int, ...] = ()) -> KDACache:
    """An empty cache: state [*stack, B, H, K, K] (at least float32) and three tails [*stack, B, W−1, H, K]."""
    H, K, W = config.kda.num_heads, config.kda.head_dim, config.kda.conv_size
    dtype = jnp.dtype(config.dtype)
    tails = {name: jnp.zeros((*stack, batch, W - 1, H, K), dtype) for name in TAILS}
    return {"state": jnp.zeros((*stack, batch, H, K, K), jnp.promote_types(dtype, jnp.float32)), **tails}
