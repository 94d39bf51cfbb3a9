"""Gated multi-head latent attention without position encoding (report §2.2).

    q = W_qb rms(W_qa x) → [q_c ; q_r],   [c ; k_r] = W_kva x,   ĉ = rms(c),   k_h = [W_kb,h ĉ ; k_r],   v_h = W_vb,h ĉ
    y = W_o( softmax_causal( (nope + rope)^-½ q_h k_hᵀ ) v_h ⊙ sigmoid(W_g x) )

k_r is shared by all heads, neither rotated nor normed. Expanded for training and prefill; absorbed for one-token
decoding, where the cache holds [ĉ ; k_r] only.

Legend: B batch, T time, S cached tokens, D hidden, H heads, R latent rank, r shared key width, K nope width, V value.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from k3jax.config import ModelConfig
from k3jax.model import init
from k3jax.ops.attention import attention, mla_decode
from k3jax.ops.norms import rms_norm
from k3jax.parallel.context import attention_over_context
from k3jax.sharding import all_max, axes_of, contract, island, layout, place, place_like, whole_sequence

MLACache = dict[str, jax.Array]


class MLA(nnx.Module):
    """Gated MLA mixer: x [B, T, D] → [B, T, D]."""

    def __init__(self, config: ModelConfig, key: jax.Array):
        make, mla = init.Maker(config, key), config.mla
        D, H, R = config.hidden_size, mla.num_heads, mla.kv_lora_rank
        self.config = config
        if mla.q_lora_rank is None:
            self.q_proj = make("embed heads qk", D, H, mla.qk_head_dim)
        else:
            self.q_a = make("embed lora", D, mla.q_lora_rank)
            self.q_a_norm = make("lora", mla.q_lora_rank, init=init.ones)
            self.q_b = make("lora heads qk", mla.q_lora_rank, H, mla.qk_head_dim)
        self.kv_a = make("embed lora", D, R + mla.qk_rope_head_dim)
        self.kv_a_norm = make("lora", R, init=init.ones)
        self.k_b = make("lora heads qk", R, H, mla.qk_nope_head_dim)
        self.v_b = make("lora heads v", R, H, mla.v_head_dim)
        if mla.output_gate:
            self.g_proj = make("embed heads v", D, H, mla.v_head_dim)
        self.o_proj = make("heads v embed", H, mla.v_head_dim, D)

    def _queries(self, x_BTD: jax.Array) -> jax.Array:
        dtype = x_BTD.dtype
        if self.config.mla.q_lora_rank is None:
            return jnp.einsum("btd,dhk->bthk", x_BTD, self.q_proj[...].astype(dtype))
        low = rms_norm(x_BTD @ self.q_a[...].astype(dtype), self.q_a_norm[...], self.config.mla.lora_norm_eps)
        return jnp.einsum("btr,rhk->bthk", low, self.q_b[...].astype(dtype))

    def _expand(self, latent_BSR: jax.Array, k_r_BSr: jax.Array) -> tuple[jax.Array, jax.Array]:
        return _expanded((self.k_b[...], self.v_b[...]), latent_BSR, k_r_BSr)

    def __call__(
        self, x_BTD: jax.Array, segment_ids: jax.Array | None, cache: MLACache | None, offset: jax.Array | int = 0
    ) -> tuple[jax.Array, MLACache | None, jax.Array]:
        """Mixes `x_BTD` (the normed layer input) → y, the updated cache, and each head's largest logit [H].

        Args:
            offset: tokens already in the cache, which is written from there on.
        """
        dtype, mla, residual = x_BTD.dtype, self.config.mla, x_BTD
        x_BTD = whole_sequence(x_BTD)
        q = self._queries(x_BTD)
        kv = x_BTD @ self.kv_a[...].astype(dtype)
        latent = rms_norm(kv[..., : mla.kv_lora_rank], self.kv_a_norm[...], mla.lora_norm_eps)
        k_r = kv[..., mla.kv_lora_rank :]
        if cache is None:
            o, max_logit = self._attend(q, latent, k_r, segment_ids)
        else:
            cache = self._append(cache, latent, k_r, segment_ids, offset)
            o, max_logit = self._from_cache(q, cache, segment_ids, offset)
        if mla.output_gate:
            gate = jnp.einsum("btd,dhv->bthv", x_BTD, self.g_proj[...].astype(dtype))
            o = o.astype(dtype) * jax.nn.sigmoid(gate)
        o = checkpoint_name(o.astype(dtype), "operand")
        return contract("bthv,hvd->btd", o, self.o_proj[...].astype(dtype), residual), cache, max_logit

    def _attend(self, q, latent, k_r, segment_ids) -> tuple[jax.Array, jax.Array]:
        """Over the call's own tokens."""
        mla, tokens, heads = self.config.mla, axes_of(q, 0, 1), axes_of(q, 2)
        options = {"scale": mla.qk_head_dim**-0.5, "implementation": mla.implementation}
        out = (P(*layout(q)[:3]), P(heads or None))
        if context := axes_of(q, 1):

            def shard(q, latents, weights, segment_ids):
                expand = partial(_expanded, weights)
                o, max_logit = attention_over_context(
                    q, latents, expand, axis=context[0], segment_ids=segment_ids, **options
                )
                return o, all_max(max_logit, tokens)

            weights = (self.k_b[...], self.v_b[...])
            o, max_logit = island(shard, q, (latent, k_r), weights, segment_ids, out=out)
        else:

            def row(q, k, v, segment_ids):
                o, max_logit = attention(q, k, v, segment_ids=segment_ids, **options)
                return o, all_max(max_logit, tokens)

            o, max_logit = island(row, q, *self._expand(latent, k_r), segment_ids, out=out)
        return o, place(max_logit)

    @staticmethod
    def _append(cache: MLACache, latent, k_r, segment_ids, offset) -> MLACache:
        ids = jnp.ones(latent.shape[:2], jnp.int32) if segment_ids is None else segment_ids
        new = {"latent": latent, "k_r": k_r, "segment_ids": ids}
        return {
            name: jax.lax.dynamic_update_slice_in_dim(cache[name], value.astype(cache[name].dtype), offset, axis=1)
            for name, value in new.items()
        }

    def _from_cache(self, q, cache: MLACache, segment_ids, offset) -> tuple[jax.Array, jax.Array]:
        """Attention over the cache: absorbed for one query a row, expanded for a longer prefill."""
        mla, S = self.config.mla, cache["latent"].shape[1]
        ids = jnp.ones(q.shape[:2], jnp.int32) if segment_ids is None else segment_ids
        if q.shape[1] > 1:
            options = {"scale": mla.qk_head_dim**-0.5}
            options["implementation"] = "xla" if mla.implementation == "cudnn" else mla.implementation

            def prefill(q, k, v, ids, kv_ids, offset):
                return attention(q, k, v, segment_ids=ids, kv_segment_ids=kv_ids, q_offset=offset, **options)

            args = (q, *self._expand(cache["latent"], cache["k_r"]), ids, cache["segment_ids"], jnp.asarray(offset))
            o, max_logit = island(prefill, *args, out=(layout(q), P(axes_of(q, 2) or None)))
            return o, place(max_logit)
        dtype = q.dtype
        q_c, q_r = q[:, 0, :, : mla.qk_nope_head_dim], q[:, 0, :, mla.qk_nope_head_dim :]
        absorbed = jnp.einsum("bhk,rhk->bhr", q_c, self.k_b[...].astype(dtype))
        valid = (jnp.arange(S) <= offset) & (cache["segment_ids"] == ids)
        context = mla_decode(absorbed, q_r, cache["latent"], cache["k_r"], scale=mla.qk_head_dim**-0.5, valid_BS=valid)
        o = jnp.einsum("bhr,rhv->bhv", context.astype(dtype), self.v_b[...].astype(dtype))
        return o[:, None], jnp.zeros(q.shape[2], jnp.float32)


def _expanded(weights: tuple[jax.Array, jax.Array], latent_BSR: jax.Array, k_r_BSr: jax.Array):
    """Keys [B, S, H, K + r] and values [B, S, H, V] of latents."""
    dtype = latent_BSR.dtype
    k_b, v_b = (w.astype(dtype) for w in weights)
    k_c, v = jnp.einsum("bsr,rhk->bshk", latent_BSR, k_b), jnp.einsum("bsr,rhv->bshv", latent_BSR, v_b)
    shared = jnp.broadcast_to(k_r_BSr[:, :, None].astype(dtype), (*k_c.shape[:3], k_r_BSr.shape[-1]))
    shared = place_like(shared, k_c)
    return checkpoint_name(jnp.concatenate([k_c, shared], axis=-1), "operand"), v


def mla_cache(config: ModelConfig, batch: int, length: int, stack: tuple[int, ...] = ()) -> MLACache:
    """An empty cache of `length` tokens: normed latent [*stack, B, S, R], shared key [..., r], ids."""
    dtype, shape = jnp.dtype(config.dtype), (*stack, batch, length)
    return {
        "latent": jnp.zeros((*shape, config.mla.kv_lora_rank), dtype),
        "k_r": jnp.zeros((*shape, config.mla.qk_rope_head_dim), dtype),
        "segment_ids": jnp.zeros(shape, jnp.int32),
    }
