"""Stable LatentMoE (report §2.3): experts in a latent of half the width, dropless, balanced by a selection bias.

    s = sigmoid(x W_r)   I = top-k(s + b)   p = s_I / Σ s_I   z = W_down x
    y = W_up rms( Σ_i p_i E_i(z) ) + Shared(x)               E_i = w2_i SiTU(w1_i z, w3_i z)

Legend: B batch, T time, D hidden, L latent, F expert width, E experts, K picked, N = B·T tokens, M dispatched rows.
"""

from __future__ import annotations

from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from k3jax.config import ModelConfig
from k3jax.model import init
from k3jax.model.mlp import MLP
from k3jax.ops.grouped_matmul import ExpertOptions, expert_mlp, group_layout, why_not_pallas
from k3jax.ops.mx import PackedMX, ScaleRule, fake_quant, unpacked
from k3jax.ops.norms import rms_norm
from k3jax.ops.quantile_balancing import qb_histogram
from k3jax.ops.remat import checkpoint_name
from k3jax.ops.router import Routing, route, router_logits
from k3jax.ops.situ import situ_glu
from k3jax.parallel.expert import expert_mlp_over_ranks
from k3jax.sharding import all_sum, axes_of, island, layout, place

Grouped = Literal["blocked", "ragged", "pallas"]


class RouterStats(NamedTuple):
    """What a MoE layer reports of one micro-batch, summed over its devices."""

    load: jax.Array  # [E] int32, tokens sent to each expert
    histogram: jax.Array  # [E, bins] int32, quantile-balancing margins; [E, 0] when not asked for


class LatentMoE(nnx.Module):
    """Routed experts in the latent plus shared experts: x [B, T, D] → [B, T, D]."""

    def __init__(self, config: ModelConfig, key: jax.Array):
        make, moe = init.Maker(config, key), config.moe
        D, E, F = config.hidden_size, moe.num_experts, moe.expert_size
        L = moe.latent_size or D
        self.config = config
        self.router = make("embed route", D, E)
        if moe.latent_size is not None:
            self.latent_down = make("embed latent", D, L)
            self.latent_up = make("latent embed", L, D)
            if moe.latent_norm:
                self.latent_norm = make("latent", L, init=init.ones)
        self.w1 = make("expert latent expert_mlp", E, L, F)
        self.w3 = make("expert latent expert_mlp", E, L, F)
        self.w2 = make("expert expert_mlp latent", E, F, L)
        if moe.num_shared_experts:
            self.shared = MLP(config, moe.num_shared_experts * F, make.key())

    def __call__(
        self,
        x_BTD: jax.Array,
        positions_BT: jax.Array,
        valid_BT: jax.Array,
        bias_E: jax.Array,
        histogram: bool,
    ) -> tuple[jax.Array, RouterStats]:
        """Routes and mixes `x_BTD` (normed); tokens with `valid_BT` False reach no routed expert and no statistic."""
        dtype, moe = x_BTD.dtype, self.config.moe
        z = x_BTD if moe.latent_size is None else x_BTD @ self.latent_down[...].astype(dtype)
        if self._activation_rule:
            z = fake_quant(z, format="mxfp8", scale_rule=self._activation_rule)
        tokens = layout(x_BTD)
        positions_BT, valid_BT = (place(a, *tokens[:2]) for a in (positions_BT, valid_BT))
        banks = tuple(w.get_value() for w in (self.w1, self.w3, self.w2))
        banks = tuple(w if isinstance(w, PackedMX) else w.astype(dtype) for w in banks)
        if resolve_moe(self.config) == "dense":
            banks = place(banks)
        routed, stats = island(
            partial(self._routed, axes_of(x_BTD), axes_of(jax.tree.leaves(banks)[0]), histogram),
            (x_BTD, z, positions_BT, valid_BT),
            bias_E,
            self.router[...],
            banks,
            out=(tokens, P()),
        )
        # a rematerialisation that keeps this name repeats no product of the experts but the first
        routed = checkpoint_name(routed, "experts")
        if moe.latent_size is not None:
            if moe.latent_norm:
                routed = checkpoint_name(rms_norm(routed, self.latent_norm[...], self.config.norm_eps), "operand")
            routed = routed @ self.latent_up[...].astype(dtype)
        return (routed + self.shared(x_BTD) if moe.num_shared_experts else routed), stats

    def _routed(
        self, token_axes: tuple[str, ...], ranks: tuple[str, ...], histogram: bool, tokens, bias_E, router_DE, experts
    ):
        """Of one device's tokens; the mesh axes that tokens and experts are cut over come first."""
        moe = self.config.moe
        x_BTD, z_BTL, positions_BT, valid_BT = tokens
        E, k = moe.num_experts, moe.experts_per_token
        z, valid = z_BTL.reshape(-1, z_BTL.shape[-1]), valid_BT.reshape(-1)
        routing = route(
            router_logits(x_BTD.reshape(-1, x_BTD.shape[-1]), router_DE),
            bias_E,
            positions_BT.reshape(-1),
            experts_per_token=k,
            activation=moe.router_activation,
            renormalize=moe.renormalize,
            scaling_factor=moe.routed_scaling_factor,
            num_groups=moe.num_groups,
            topk_groups=moe.topk_groups,
        )
        picked_NE = jnp.sum(jax.nn.one_hot(routing.experts_NK, E, dtype=jnp.int32), axis=1) * valid[:, None]
        bins = jnp.zeros((E, 0), jnp.int32)
        if histogram:
            with jax.named_scope("balancing"):
                bins = qb_histogram(
                    routing.scores_NE,
                    bias_E,
                    experts_per_token=k,
                    bins=moe.qb_bins,
                    mask_N=valid,
                    alpha_N=routing.threshold_N,
                )
        stats = RouterStats(all_sum(jnp.sum(picked_NE, axis=0), token_axes), all_sum(bins, token_axes))
        implementation = resolve_moe(self.config)
        if moe.implementation is None and isinstance(experts[0], PackedMX) and routing.experts_NK.size <= E:
            implementation = "blocked"  # which decodes the few experts that were picked
        if implementation == "dense":
            out = self._dense(z, routing, valid, experts)
        else:
            out = self._grouped(z, routing, valid, experts, implementation, ranks)
        return out.astype(z.dtype).reshape(z_BTL.shape), stats

    @property
    def _activation_rule(self) -> ScaleRule | None:
        return self.config.moe.qat_scale_rule if self.config.moe.qat == "w4a8" else None

    def _situ(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        return situ_glu(gate, up, self.config.situ_beta, self.config.situ_linear_beta)

    def _dense(self, z_NL, routing: Routing, valid_N, weights) -> jax.Array:
        """Every expert on every token, weighted by 0 where not picked: exact, simple, E/K times the work."""
        w1, w3, w2 = (unpacked(w, z_NL.dtype) for w in weights)
        wide = routing.weights_NK.dtype
        one_hot = jax.nn.one_hot(routing.experts_NK, w1.shape[0], dtype=wide)
        p_NE = jnp.einsum("nk,nke->ne", routing.weights_NK * valid_N[:, None], one_hot)
        hidden = self._situ(jnp.einsum("nl,elf->nef", z_NL, w1), jnp.einsum("nl,elf->nef", z_NL, w3))
        if self._activation_rule:
            hidden = fake_quant(hidden, format="mxfp8", scale_rule=self._activation_rule)
        y = jnp.einsum("nef,efl->nel", hidden, w2)
        return jnp.einsum("ne,nel->nl", p_NE, y.astype(wide))

    def _grouped(
        self, z_NL, routing: Routing, valid_N, weights, implementation: Grouped, ranks: tuple[str, ...]
    ) -> jax.Array:
        """Tokens sorted by expert; work proportional to what was routed."""
        w1, w3, w2 = weights
        align = _align(implementation, routing.experts_NK.size, self.config.moe.num_experts)
        betas = self.config.situ_beta, self.config.situ_linear_beta
        options = ExpertOptions(*betas, align, implementation, activation_rule=self._activation_rule)
        w13 = jax.tree.map(lambda *w: jnp.concatenate(w, axis=2), w1, w3)  # one pass together with their cast
        w13 = checkpoint_name(w13, "expert_weights")
        if ranks:
            picked = routing.experts_NK, routing.weights_NK, valid_N
            return expert_mlp_over_ranks(
                z_NL, w13, w2, *picked, options, axis=ranks[0], balance=self.config.moe.dispatch
            )
        valid_NK = jnp.broadcast_to(valid_N[:, None], routing.experts_NK.shape)
        groups = group_layout(routing.experts_NK, valid_NK, w1.shape[0], align)
        return expert_mlp(z_NL, w13, w2, routing.weights_NK, groups, options)


def _align(implementation: Grouped, slots: int, num_experts: int) -> int:
    """Rows that groups are padded to.

    "pallas" takes any, and stores groups that start at a multiple of 8 rows faster. A block of "blocked" belongs to one
    expert: a quarter of the mean group, as a power of two in 16..512. On an H200 blocks of 512 are twice as fast as
    blocks of 128 at 2,048 rows a group; with few tokens large blocks are mostly padding.
    """
    if implementation != "blocked":
        return 8 if implementation == "pallas" else 1
    return 1 << min(max((slots // num_experts // 4).bit_length() - 1, 4), 9)


def resolve_moe(config: ModelConfig) -> Literal["dense", "blocked", "ragged", "pallas"]:
    """The expert implementation that runs: what the config names, else "pallas" where it can run, else "blocked".

    Raises:
        ValueError: the config names "pallas", and it cannot run here.
    """
    moe = config.moe
    reason = why_not_pallas(jnp.dtype(config.dtype), moe.latent_size or config.hidden_size, moe.expert_size)
    if moe.implementation == "pallas" and reason:
        raise ValueError(f"moe.implementation 'pallas' cannot run: {reason}")
    return moe.implementation or ("blocked" if reason else "pallas")
