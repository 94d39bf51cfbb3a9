"""Gated multi-head latent attention without position encoding (report §2.2).

    q = W_qb rms(W_qa x) → [q_c ; q_r],   [c ; k_r] = W_kva x,   ĉ = rms(c),   k_h = [W_kb,h ĉ ; k_r],   v_h = W_vb,h ĉ
    y = W_o( softmax_causal( (nope + rope)^-½ q_h k_hᵀ ) v_h ⊙ sigmoid(W_g x) )

k_r is shared by all heads, neither rotated nor normed. Expanded for training and prefill; absorbed for one-token
decoding, where the cache holds [ĉ ; k_r] only.

Legend: B batch, T time, S cached tokens, D hidden, H heads, R latent rank, r shared key width, K nope width, V value.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from k3jax.config import ModelConfig
from k3jax.model import init
from k3jax.ops.attention import attention, mla_decode
from k3jax.ops.norms import rms_norm
from k3jax.ops.remat import checkpoint_name
from k3jax.sharding import batch_island, batch_max

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
        dtype = latent_BSR.dtype
        k_c = jnp.einsum("bsr,rhk->bshk", latent_BSR, self.k_b[...].astype(dtype))
        v = jnp.einsum("bsr,rhv->bshv", latent_BSR, self.v_b[...].astype(dtype))
        shared = jnp.broadcast_to(k_r_BSr[:, :, None], (*k_c.shape[:3], k_r_BSr.shape[-1]))
        return checkpoint_name(jnp.concatenate([k_c, shared.astype(dtype)], axis=-1), "keys"), v

    def __call__(
        self, x_BTD: jax.Array, segment_ids: jax.Array | None, cache: MLACache | None, offset: jax.Array | int = 0
    ) -> tuple[jax.Array, MLACache | None, jax.Array]:
        """Mixes `x_BTD` (the normed layer input) → y, the updated cache, and each head's largest logit [H].

        Args:
            offset: tokens already in the cache, which is written from there on.
        """
        dtype, mla = x_BTD.dtype, self.config.mla
        q = self._queries(x_BTD)
        kv = x_BTD @ self.kv_a[...].astype(dtype)
        latent = rms_norm(kv[..., : mla.kv_lora_rank], self.kv_a_norm[...], mla.lora_norm_eps)
        k_r = kv[..., mla.kv_lora_rank :]
        if cache is None:
            k, v = self._expand(latent, k_r)
            o, max_logit = batch_island(lambda data: self._attend(*data), (q, k, v, segment_ids), batched=(True,))
        else:
            cache = self._append(cache, latent, k_r, segment_ids, offset)
            o, max_logit = self._from_cache(q, cache, segment_ids, offset)
        if mla.output_gate:
            gate = jnp.einsum("btd,dhv->bthv", x_BTD, self.g_proj[...].astype(dtype))
            o = o.astype(dtype) * jax.nn.sigmoid(gate)
        o = checkpoint_name(o.astype(dtype), "operand")
        return jnp.einsum("bthv,hvd->btd", o, self.o_proj[...].astype(dtype)), cache, max_logit

    def _attend(self, q, k, v, segment_ids) -> tuple[jax.Array, jax.Array]:
        """Over the call's own tokens."""
        mla = self.config.mla
        scale, implementation = mla.qk_head_dim**-0.5, mla.implementation
        o, max_logit = attention(q, k, v, scale=scale, segment_ids=segment_ids, implementation=implementation)
        return o, batch_max(max_logit)

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
            k, v = self._expand(cache["latent"], cache["k_r"])
            return attention(
                q,
                k,
                v,
                scale=mla.qk_head_dim**-0.5,
                segment_ids=ids,
                kv_segment_ids=cache["segment_ids"],
                q_offset=offset,
                implementation="xla" if mla.implementation == "cudnn" else mla.implementation,
            )
        dtype = q.dtype
        q_c, q_r = q[:, 0, :, : mla.qk_nope_head_dim], q[:, 0, :, mla.qk_nope_head_dim :]
        absorbed = jnp.einsum("bhk,rhk->bhr", q_c, self.k_b[...].astype(dtype))
        valid = (jnp.arange(S) <= offset) & (cache["segment_ids"] == ids)
        context = mla_decode(absorbed, q_r, cache["latent"], cache["k_r"], scale=mla.qk_head_dim**-0.5, valid_BS=valid)
        o = jnp.einsum("bhr,rhv->bhv", context.astype(dtype), self.v_b[...].astype(dtype))
        return o[:, None], jnp.zeros(q.shape[2], jnp.float32)


def mla_cache(config: ModelConfig, batch: int, length: int, stack: tuple[int, ...] = ()) -> MLACache:
    """An empty cache of `length` tokens: normed latent [*stack, B, S, R], shared key [..., r], ids."""
    dtype, shape = jnp.dtype(config.dtype), (*stack, batch, length)
    return {
        "latent": jnp.zeros((*shape, config.mla.kv_lora_rank), dtype),
        "k_r": jnp.zeros((*shape, config.mla.qk_rope_head_dim), dtype),
        "segment_ids": jnp.zeros(shape, jnp.int32),
    }
