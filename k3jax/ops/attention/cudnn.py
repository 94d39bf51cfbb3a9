"""The fused attention of cuDNN, forward and backward, behind one guarded entry.

`jax.nn.dot_product_attention` refuses values narrower than keys and hides the logarithm of the softmax sum, so this
calls the functions that it is built on. They are private to jax: everything that depends on them is in this file.

Two kernels are used, both without any mask in memory:

* causal, all T queries over all T keys;
* a rectangle: the first n queries of each row over its first m keys, none of them hidden.

Sequence packing (`q_offsets`) is not: XLA gives keys and values one array of offsets, and queries and outputs one,
counted in elements of the *key* width, so that with narrower values it reads and writes the wrong tokens; and it holds
softmax statistics of [documents, H, T].

Legend: B rows, T queries, S keys, H heads, K key width, V value width.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import jax
import jax.numpy as jnp


def _find() -> Any:
    try:
        return importlib.import_module("jax._src.cudnn.fused_attention_stablehlo")
    except ImportError:  # a jax that has moved it: `refusal` says so
        return None


private = _find()
MAX_WIDTH = 256
NARROW = (192, 128)  # the one pair of different widths that is known to work forward and backward
NARROW_VERSION = 91000  # cuDNN 9.10


def _score_mod() -> dict[str, None]:
    """A parameter that the backward primitive has from jax 0.12 on."""
    parameters = inspect.signature(private.dot_product_attention).parameters
    return {"score_mod": None} if "score_mod" in parameters else {}


def cudnn_version() -> int:
    """9.10.2 is 91002; 0 without cuDNN."""
    try:
        return private.check_cudnn_version() if private else 0
    except RuntimeError:
        return 0


def compute_capability() -> tuple[int, ...] | None:
    """Of the first device; None if that is no NVIDIA GPU."""
    device = jax.devices()[0]
    if device.platform != "gpu" or "nvidia" not in device.device_kind.lower():
        return None
    return tuple(int(part) for part in str(device.compute_capability).split("."))


def refusal(dtype: Any, key_width: int, value_width: int) -> str | None:
    """Why cuDNN cannot run here on inputs of this type and these widths; None if it can."""
    capability = compute_capability()
    if capability is None:
        return f"it needs an NVIDIA GPU, the first device is {jax.devices()[0].device_kind!r}"
    if capability < (9, 0):
        return f"it needs compute capability 9.0 (Hopper) or newer, this GPU has {'.'.join(map(str, capability))}"
    if private is None:
        return f"jax {jax.__version__} has no cuDNN attention where this version of k3jax looks for it"
    if not cudnn_version():
        return "this jaxlib finds no cuDNN"
    if jnp.dtype(dtype) != jnp.bfloat16:
        return f"q, k and v must be bfloat16, they are {jnp.dtype(dtype).name}"
    if key_width % 8 or value_width % 8:
        return f"widths must be multiples of 8, they are {key_width} (q, k) and {value_width} (v)"
    if not value_width <= key_width <= MAX_WIDTH:
        return f"needs v width ≤ q, k width ≤ {MAX_WIDTH}, they are {value_width} and {key_width}"
    return None


def pads_values(key_width: int, value_width: int) -> bool:
    """Whether v must be filled up to the width of q and k, at a cost in time."""
    native = (key_width, value_width) == NARROW and cudnn_version() >= NARROW_VERSION
    return key_width != value_width and not native


def _widen(x: jax.Array, width: int) -> jax.Array:
    return jnp.pad(x, ((0, 0),) * 3 + ((0, width - x.shape[-1]),))


def _mask(lengths: tuple[jax.Array, jax.Array] | None):
    return private.MaskType.CAUSAL if lengths is None else private.MaskType.PADDING


def forward(
    q_BTHK: jax.Array,
    k_BSHK: jax.Array,
    v_BSHV: jax.Array,
    *,
    scale: float,
    lengths: tuple[jax.Array, jax.Array] | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Softmax attention: causal without `lengths`, else a rectangle.

    Args:
        lengths: ([B], [B]) int32, queries and keys of each row that take part, each at least 1: zero gives NaN before
            cuDNN 9.25. What comes out for the others is unspecified.

    Returns:
        o [B, T, H, V] bfloat16; log Σ exp of each query's scaled logits [B, H, T] float32.
    """
    K, V = q_BTHK.shape[-1], v_BSHV.shape[-1]
    if pads_values(K, V):
        v_BSHV = _widen(v_BSHV, K)
    q_length, kv_length = lengths or (None, None)
    o, lse = private.dot_product_attention(
        q_BTHK,
        k_BSHK,
        v_BSHV,
        q_seqlen=q_length,
        kv_seqlen=kv_length,
        scale=scale,
        mask_type=_mask(lengths),
        return_residual=True,
    )
    return o[..., :V], lse


def backward(
    q_BTHK: jax.Array,
    k_BSHK: jax.Array,
    v_BSHV: jax.Array,
    o_BTHV: jax.Array,
    lse_BHT: jax.Array,
    d_o_BTHV: jax.Array,
    *,
    scale: float,
    lengths: tuple[jax.Array, jax.Array] | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of q, k and v, bfloat16.

    `o` and `lse` may belong to a softmax over more keys than are given: the gradients are then what these keys
    contribute, so that the parts of a split softmax add up.

    XLA asks cuDNN for its deterministic algorithm only under `--xla_gpu_deterministic_ops=true` or
    `--xla_gpu_exclude_nondeterministic_ops=true`; without, two runs may differ in their last bits.
    """
    K, V = q_BTHK.shape[-1], v_BSHV.shape[-1]
    if pads_values(K, V):
        v_BSHV, o_BTHV, d_o_BTHV = (_widen(x, K) for x in (v_BSHV, o_BTHV, d_o_BTHV))
    unused = jnp.zeros(0, q_BTHK.dtype)
    q_length, kv_length = lengths or (unused, unused)
    # bias, lengths, offsets of packed queries and keys, page tables of keys and values
    options = (unused, q_length, kv_length, unused, unused, unused, unused)
    dq, dk, dv = private._dot_product_attention_bwd_p_wrapper.bind(
        q_BTHK,
        k_BSHK,
        v_BSHV,
        *options,
        lse_BHT,
        o_BTHV,
        d_o_BTHV,
        scale=scale,
        seed=42,
        dropout_rate=0.0,
        variadic_args=(False, False),
        mask_type=_mask(lengths),
        layout=private.AttentionLayout.BTNH.value,
        sliding_window_length=None,
        **_score_mod(),
    )
    return dq, dk, dv[..., :V]
