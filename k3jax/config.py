"""Frozen configuration of a run: model, mesh, data, optimizer, training.

Every class validates where it is made, so a wrong value is refused at the line that wrote it. The whole
`RunConfig` is saved verbatim in every checkpoint (`to_dict`) and read back with `from_dict`, which refuses
unknown names and says the nearest valid one.

    >>> from k3jax.config import nano
    >>> nano().num_layers
    9
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from dataclasses import dataclass, field
from typing import Any, Literal

Mixer = Literal["kda", "mla"]
Ffn = Literal["dense", "moe"]
Remat = Literal["none", "products", "sublayer", "layer", "block"]
RematAction = Literal["save", "fp8", "offload", "recompute"]
REMAT_NAMES = ("kda", "attention", "experts", "keys", "expert_weights", "operand")
DType = Literal["float32", "bfloat16", "float64"]
ExpertFormat = Literal["plain", "mxfp4"]
ScaleRule = Literal["floor", "ceil", "even", "outlier"]


class ConfigError(ValueError):
    """A configuration that cannot be honoured; the message says which field, why, and what would be legal."""


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def _require_positive(obj: Any, *names: str) -> None:
    for name in names:
        value = getattr(obj, name)
        positive = isinstance(value, (int, float)) and value > 0
        _require(positive, f"{type(obj).__name__}.{name} must be positive, got {value!r}")


def _require_address(name: str, value: str) -> None:
    host, _, port = value.rpartition(":")
    legal = bool(host) and port.isdigit() and 0 < int(port) < 1 << 16
    _require(legal, f"{name} must be HOST:PORT, got {value!r}")


@dataclass(frozen=True)
class KDAConfig:
    """Kimi Delta Attention (report §2.1). Key and value head dims are both `head_dim`."""

    num_heads: int
    head_dim: int
    conv_size: int = 4
    gate: Literal["lower_bound", "softplus"] = "lower_bound"
    gate_lower_bound: float = -5.0
    full_rank_output_gate: bool = True
    """False gives Kimi-Linear's low-rank output gate (rank `head_dim`)."""
    chunk_size: int = 64
    implementation: Literal["reference", "xla", "pallas"] | None = None
    """Of the recurrence; None is "pallas" where it can run (Hopper GPUs), else "xla". Naming one of the first two also
    keeps decoding, the short convolution and the gated norm in plain JAX; they pick for themselves otherwise."""

    def __post_init__(self) -> None:
        _require_positive(self, "num_heads", "head_dim")
        _require(self.conv_size >= 2, f"KDAConfig.conv_size must be at least 2, got {self.conv_size}")
        _require(
            -5.0 <= self.gate_lower_bound < 0,
            "KDAConfig.gate_lower_bound must be in [-5, 0): tiles of 16 tokens hold exp(±80) only",
        )
        _require(
            self.chunk_size % 16 == 0 and self.chunk_size > 0,
            f"KDAConfig.chunk_size must be a multiple of 16, got {self.chunk_size}",
        )


@dataclass(frozen=True)
class MLAConfig:
    """Gated multi-head latent attention without position encoding."""

    num_heads: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    """Width of the shared key part. The name is inherited; nothing is rotated."""
    v_head_dim: int
    q_lora_rank: int | None = None
    output_gate: bool = True
    lora_norm_eps: float = 1e-6
    implementation: Literal["reference", "xla", "cudnn"] | None = None
    """Of attention. With a cache (generation) "cudnn" is "xla": its queries are not the keys' tokens."""

    def __post_init__(self) -> None:
        _require_positive(self, "num_heads", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim")
        _require(self.qk_rope_head_dim >= 0, "MLAConfig.qk_rope_head_dim must be ≥ 0")
        _require(self.q_lora_rank is None or self.q_lora_rank > 0, "MLAConfig.q_lora_rank must be positive or None")

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim


@dataclass(frozen=True)
class MoEConfig:
    """Stable LatentMoE. `latent_size` None runs the experts on the full hidden state."""

    num_experts: int
    experts_per_token: int
    expert_size: int
    latent_size: int | None
    num_shared_experts: int = 2
    router_activation: Literal["sigmoid", "softmax"] = "sigmoid"
    renormalize: bool = True
    routed_scaling_factor: float = 1.0
    num_groups: int = 1
    topk_groups: int = 1
    latent_norm: bool = True
    qb_bins: int = 1000
    """Bins of the quantile-balancing histogram."""
    implementation: Literal["dense", "blocked", "ragged", "pallas"] | None = None
    """How experts multiply; None picks "pallas" (Hopper GPUs, 16-bit compute) where it runs, else "blocked"."""
    dispatch: Literal["balanced", "home"] = "balanced"
    """How rows travel on a mesh with expert > 1: "balanced" (MoonEP) lets every rank compute the same number and copies
    busy experts for it; "home" sends all rows of an expert to its home, with room for the worst case."""
    qat: Literal["w4", "w4a8"] | None = None
    """Quantisation-aware training of routed experts: "w4" computes with weights rounded to MXFP4, "w4a8" also rounds
    what enters their products to MXFP8. The unrounded weights are trained. Generation from such a run holds codes."""
    qat_scale_rule: ScaleRule = "outlier"
    """How a group of 32 gets its scale (`k3jax.ops.mx`); the default has the least squared error in both formats."""

    def __post_init__(self) -> None:
        _require_positive(
            self, "num_experts", "experts_per_token", "expert_size", "num_groups", "topk_groups", "qb_bins"
        )
        _require(self.experts_per_token < self.num_experts, "MoEConfig.experts_per_token must be below num_experts")
        _require(self.num_experts % self.num_groups == 0, "MoEConfig.num_groups must divide num_experts")
        _require(self.topk_groups <= self.num_groups, "MoEConfig.topk_groups must be ≤ num_groups")
        selectable = self.topk_groups * (self.num_experts // self.num_groups)
        _require(
            self.experts_per_token < selectable,  # quantile balancing reads the first expert that is not taken
            f"MoEConfig.experts_per_token must be below the {selectable} experts in topk_groups groups",
        )
        _require(self.num_shared_experts >= 0, "MoEConfig.num_shared_experts must be ≥ 0")


@dataclass(frozen=True)
class LayerSpec:
    """What one decoder layer is made of."""

    mixer: Mixer
    ffn: Ffn


@dataclass(frozen=True)
class ModelConfig:
    """Geometry and numerics of a K3 text model. Layer numbers are 0-based (the released config counts from 1)."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    mla_layers: tuple[int, ...]
    dense_size: int
    kda: KDAConfig
    mla: MLAConfig
    moe: MoEConfig
    num_dense_layers: int = 1
    attn_res_block_size: int | None = 12
    """Decoder layers in an AttnRes block; None turns attention residuals off (plain pre-norm residuals)."""
    situ_beta: float | None = 4.0
    """None: SwiGLU's SiLU instead of SiTU's bounded gate (Kimi-Linear, with `situ_linear_beta` None)."""
    situ_linear_beta: float | None = 25.0
    norm_eps: float = 1e-5
    init_std: float = 0.02
    dtype: DType = "float32"
    """Compute dtype of matrix products and of the residual stream."""
    param_dtype: DType = "float32"
    """Of parameters; gates, short convolutions and output norm of KDA are at least float32."""

    def __post_init__(self) -> None:
        _require_positive(self, "vocab_size", "hidden_size", "num_layers", "dense_size", "norm_eps")
        wrong = [l for l in self.mla_layers if not 0 <= l < self.num_layers]
        _require(
            not wrong,
            f"ModelConfig.mla_layers {wrong} are outside 0..{self.num_layers - 1} (layer numbers are 0-based)",
        )
        _require(
            tuple(sorted(set(self.mla_layers))) == tuple(self.mla_layers),
            "ModelConfig.mla_layers must be sorted and without repeats",
        )
        _require(0 <= self.num_dense_layers <= self.num_layers, "ModelConfig.num_dense_layers must be in 0..num_layers")
        _require(
            self.attn_res_block_size is None or self.attn_res_block_size > 0,
            "ModelConfig.attn_res_block_size must be positive or None",
        )
        inputs = (
            ("moe.latent_size", self.moe.latent_size) if self.moe.latent_size else ("hidden_size", self.hidden_size)
        )
        for name, width in (inputs, ("moe.expert_size", self.moe.expert_size)):
            _require(
                self.moe.qat is None or width % 32 == 0,
                f"ModelConfig.{name} {width} must be a multiple of 32, the size of an MX group, for moe.qat",
            )

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        mla = set(self.mla_layers)
        return tuple(
            LayerSpec("mla" if l in mla else "kda", "dense" if l < self.num_dense_layers else "moe")
            for l in range(self.num_layers)
        )

    @property
    def num_moe_layers(self) -> int:
        return self.num_layers - self.num_dense_layers

    @property
    def num_blocks(self) -> int:
        """AttnRes blocks; 1 when attention residuals are off."""
        return 1 if self.attn_res_block_size is None else math.ceil(self.num_layers / self.attn_res_block_size)


@dataclass(frozen=True)
class MeshConfig:
    """Sizes of the mesh axes.

    Tokens are sharded over data × expert (batch) and context (time, in contiguous parts). `expert` also holds different
    experts on each device, `tensor` different heads, columns of the dense and shared feed-forwards and words of the
    vocabulary, and cuts the residual stream between layers along time. Optimizer state is cut over all of the mesh
    (ZeRO-1).
    """

    pipe: int = 1
    """Ranks of a pipeline; each holds mesh.virtual stages of consecutive layers. Its micro-batches are those of
    train.accumulation."""
    data: int = 1
    expert: int = 1
    context: int = 1
    tensor: int = 1
    fsdp: bool = False
    """Cut the parameters over all of the mesh too; each layer gathers its own when it runs. With train.remat "none" or
    "products" the backward pass keeps what was gathered; "sublayer" and "layer" gather again, "block" once a block."""
    virtual: int = 1
    """Stages of the model that each rank of `pipe` holds (interleaved 1F1B): a smaller bubble, more transfers."""

    def __post_init__(self) -> None:
        _require_positive(self, "pipe", "data", "expert", "context", "tensor", "virtual")
        _require(self.virtual == 1 or self.pipe > 1, f"mesh.virtual {self.virtual} needs mesh.pipe > 1")

    @property
    def sizes(self) -> tuple[int, ...]:
        return (self.pipe, self.data, self.expert, self.context, self.tensor)


@dataclass(frozen=True)
class LaunchConfig:
    """How the processes of one run find each other; of a call, not of the run, so no checkpoint holds it.

    Who a process is comes from the environment that torchrun or `srun` gives it (`k3jax.parallel.launch`).
    """

    mode: Literal["gpu", "node"] | None = None
    """A process for each GPU, or one for all GPUs of a node; None: for each GPU where a node has several processes."""
    coordinator: str | None = None
    """HOST:PORT where process 0 listens; None: MASTER_ADDR:MASTER_PORT, or the first node of the Slurm step."""
    timeout: int = 300
    """Seconds in which all processes must have come."""
    heartbeat: int = 100
    """Seconds after which the others end when a process is gone or hangs."""

    def __post_init__(self) -> None:
        _require_positive(self, "timeout", "heartbeat")
        if self.coordinator is not None:
            _require_address("LaunchConfig.coordinator", self.coordinator)


@dataclass(frozen=True)
class DataConfig:
    """Where text comes from, how it becomes tokens, and how documents are packed."""

    source: str = "stdlib"
    """"stdlib" (Python's own source files), or a folder, file or glob of text, .jsonl or .parquet files."""
    text_field: str = "text"
    """Field of a JSONL record or column of a Parquet file."""
    tokenizer: str = "bytes"
    """"bytes", "python8k" (a tiktoken rank file shipped with k3jax), or the path of a tiktoken-format rank file."""
    sequence_length: int = 256
    batch_size: int = 8
    """Sequences per optimizer step over the whole mesh, gradient accumulation included."""
    validation_percent: int = 5
    """Files (or records) whose stable hash falls below this percentage are held out."""
    min_bytes: int = 8_000_000
    seed: int = 0
    virtual_shards: int = 256
    prefetch: int = 8

    def __post_init__(self) -> None:
        _require_positive(self, "batch_size", "virtual_shards")
        _require(self.sequence_length >= 2, "DataConfig.sequence_length must be at least 2")
        _require(0 < self.validation_percent < 100, "DataConfig.validation_percent must be in 1..99")
        _require(self.min_bytes >= 0, "DataConfig.min_bytes must be ≥ 0")
        _require(self.prefetch >= 0, "DataConfig.prefetch must be ≥ 0")


@dataclass(frozen=True)
class OptimizerConfig:
    """Per-head Muon with AdamW for the rest, cosine schedule, QK-clip."""

    learning_rate: float = 2e-3
    min_learning_rate_ratio: float = 0.1
    warmup_ratio: float = 0.01
    weight_decay: float = 0.1
    muon_momentum: float = 0.95
    muon_ns_steps: int = 5
    muon_ns_dtype: DType = "float32"
    muon_ns_implementation: Literal["xla", "pallas"] | None = None
    """Of the iteration in bfloat16; None: the kernel where it runs (Hopper), for blocks whose shape it takes."""
    muon_rms: float = 0.2
    """Target RMS of a Muon update before the learning rate (Moonlight's match to AdamW)."""
    muon_split_outputs: bool = False
    """Orthogonalise g_proj and o_proj per head too. The report names only Q, K and V."""
    adam_b1: float = 0.9
    adam_b2: float = 0.95
    adam_eps: float = 1e-8
    clip_norm: float | None = 1.0
    qk_clip_threshold: float | None = 100.0
    offload: bool = False
    """Keep the optimizer's state in pinned host memory between steps. The same step; it moves in and out each time."""

    def __post_init__(self) -> None:
        _require_positive(self, "learning_rate", "muon_ns_steps", "muon_rms")
        for name in ("muon_momentum", "adam_b1", "adam_b2"):
            _require(
                0 <= getattr(self, name) < 1, f"OptimizerConfig.{name} must be in [0, 1), got {getattr(self, name)}"
            )
        _require(self.weight_decay >= 0, "OptimizerConfig.weight_decay must be ≥ 0")
        _require(self.clip_norm is None or self.clip_norm > 0, "OptimizerConfig.clip_norm must be positive or None")
        _require(0 <= self.min_learning_rate_ratio <= 1, "OptimizerConfig.min_learning_rate_ratio must be in [0, 1]")
        _require(0 <= self.warmup_ratio <= 1, "OptimizerConfig.warmup_ratio must be in [0, 1]")
        _require(
            self.qk_clip_threshold is None or self.qk_clip_threshold > 0,
            "OptimizerConfig.qk_clip_threshold must be positive or None",
        )


@dataclass(frozen=True)
class PublishConfig:
    """Versions of the weights for others to follow while the run goes on (`k3jax.checkpoint.publish`)."""

    interval: int = 0
    """Steps between versions; also at the end. 0: none are published."""
    directory: str | None = None
    """Where versions are written; None: `published` in the run directory, or nowhere if there is an address."""
    keep: int = 2
    """Newest versions that the directory keeps; a consumer that takes longer to read one starts again."""
    address: str | None = None
    """HOST:PORT where the newest version is sent to everyone who asks, from a copy in host memory; of one process."""
    experts: ExpertFormat = "plain"
    """How routed experts are published: as they are, or quantised on the way, by `model.moe.qat_scale_rule`."""

    def __post_init__(self) -> None:
        _require(self.interval >= 0, f"PublishConfig.interval must be ≥ 0, got {self.interval}")
        _require_positive(self, "keep")
        if self.address is not None:
            _require_address("PublishConfig.address", self.address)


@dataclass(frozen=True)
class TrainConfig:
    """Length of a run and everything that happens around a step."""

    steps: int = 1000
    accumulation: int = 1
    """Micro-batches per optimizer step; must divide data.batch_size. With M, P ranks of a pipeline with V stages each
    wait (P − 1) / (V · M + P − 1) of the time."""
    remat: Remat = "none"
    """What the forward pass keeps for the backward pass, from most to least: "none" all that autodiff asks for;
    "products" of every layer what goes into and comes out of its matrix products, KDA, attention and the experts;
    "sublayer" and "layer" the input of every sublayer or layer, and the results of KDA, attention and the experts;
    "block" the input of every AttnRes block. The rest is computed a second time."""
    remat_policy: dict[str, RematAction] = field(default_factory=dict, hash=False)
    """What the preset does otherwise with the arrays of a name: {"kda": "offload", "operand": "fp8"}, on the command
    line `--train.remat-policy kda offload operand fp8`.

    Names: what KDA, attention and the experts return ("kda", "attention", "experts"), the keys of MLA ("keys"), the
    experts' weights as they are multiplied ("expert_weights"), and other factors of matrix products ("operand").
    "save" keeps them, "fp8" in E4M3 with a scale for every 128 elements (gradients are then those at the rounded
    values; the loss is not touched), "offload" in pinned host memory, "recompute" not at all. See `k3jax.ops.remat`.

    What attention keeps for its backward pass belongs to exact queries and keys: "keys" cannot be "fp8", and where
    queries are computed again from an "operand" in "fp8" (all presets but "products"), "attention" has to be too."""
    unroll: bool = False
    """Layers one after the other instead of in loops over stacks: their weights, what they keep and their gradients are
    not copied in and out of the stacks. Compile time then grows with the number of layers."""
    loss_chunk: int = 512
    """Tokens per sequence whose logits exist at once."""
    z_loss: float = 0.0
    seed: int = 0
    log_interval: int = 10
    """Steps between records in metrics.jsonl (and printed lines where there is no terminal)."""
    eval_interval: int = 100
    """Steps between evaluations; also at the start and at the end. 0: never."""
    eval_batches: int | None = 16
    """Batches of held-out text an evaluation reads; None: all of it."""
    sample_interval: int = 100
    """Steps between generated samples; also at the end. 0: never."""
    sample_prompt: str = "def "
    sample_tokens: int = 64
    checkpoint_interval: int = 100
    """Steps between checkpoints; also at the end and on SIGTERM or SIGINT."""
    keep_last: int = 2
    """Newest checkpoints that are kept."""
    keep_every: int | None = None
    """Checkpoints at multiples of this step are kept for good."""
    checkpoint_copy: str | None = None
    """A second directory that gets every checkpoint too, any path that Orbax takes. What the first lacks is
    read from it. A save waits until the one before is complete in both."""
    publish: PublishConfig = field(default_factory=PublishConfig)
    skip_nonfinite: int = 0
    """Non-finite steps that may be skipped (the update is dropped) before the run stops."""
    profile_steps: tuple[int, int] | None = None
    """First and last step of a jax.profiler trace, written under the run directory."""

    def __post_init__(self) -> None:
        _require_positive(
            self,
            "steps",
            "accumulation",
            "loss_chunk",
            "log_interval",
            "checkpoint_interval",
            "keep_last",
        )
        _require(
            self.eval_batches is None or self.eval_batches > 0, "TrainConfig.eval_batches must be positive or None"
        )
        actions = typing.get_args(RematAction)
        for name, action in self.remat_policy.items():
            where = f"TrainConfig.remat_policy {name!r}: {action!r}"
            _require(name in REMAT_NAMES, f"{where}: names are {', '.join(REMAT_NAMES)}")
            _require(action in actions, f"{where}: legal are {', '.join(actions)}")
        legal = ", ".join(action for action in actions if action != "fp8")
        _require(
            self.remat_policy.get("keys") != "fp8",
            f"TrainConfig.remat_policy 'keys': 'fp8' does not fit the log-sum-exp of the exact keys; legal: {legal}",
        )
        attention = self.remat_policy.get("attention", "recompute" if self.remat == "block" else "save")
        _require(
            self.remat == "products" or self.remat_policy.get("operand") != "fp8" or attention == "recompute",
            f"TrainConfig.remat_policy 'operand': 'fp8' with remat {self.remat!r} computes queries again from rounded "
            "numbers, which do not fit what attention kept; use remat 'products', or 'attention': 'recompute' as well",
        )
        _require(
            not self.remat_policy or self.remat != "none",
            "TrainConfig.remat_policy needs another remat than 'none', which keeps everything",
        )
        for name in ("skip_nonfinite", "eval_interval", "sample_interval", "sample_tokens", "z_loss"):
            _require(getattr(self, name) >= 0, f"TrainConfig.{name} must be ≥ 0, got {getattr(self, name)}")
        _require(self.keep_every is None or self.keep_every > 0, "TrainConfig.keep_every must be positive or None")
        _require(
            self.profile_steps is None
            or (len(self.profile_steps) == 2 and 1 <= self.profile_steps[0] <= self.profile_steps[1]),
            f"TrainConfig.profile_steps must be first and last step, got {self.profile_steps}",
        )


@dataclass(frozen=True)
class RunConfig:
    """One training run."""

    model: ModelConfig
    data: DataConfig = field(default_factory=DataConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    run_dir: str = "runs/run"

    def __post_init__(self) -> None:
        batch, accumulation = self.data.batch_size, self.train.accumulation
        _require(batch % accumulation == 0, f"train.accumulation {accumulation} must divide data.batch_size {batch}")
        pipe, virtual = self.mesh.pipe, self.mesh.virtual
        _require(
            virtual == 1 or accumulation % pipe == 0,
            f"train.accumulation {accumulation} must be a multiple of mesh.pipe {pipe} with mesh.virtual {virtual}: "
            "interleaved 1F1B takes micro-batches in groups of one a rank",
        )
        ways = self.mesh.data * self.mesh.expert
        micro = batch // accumulation
        _require(
            micro % ways == 0, f"a micro-batch of {micro} sequences cannot be split over data × expert = {ways} devices"
        )
        moe = self.model.moe
        inputs = {"latent size": moe.latent_size or self.model.hidden_size, "model.moe.expert_size": moe.expert_size}
        for name, size in inputs.items():
            _require(
                self.train.publish.experts == "plain" or size % 32 == 0,
                f"train.publish.experts 'mxfp4' has groups of 32 inputs, and the {name} is {size}; use 'plain'",
            )
        length, shards, tensor = self.data.sequence_length, self.mesh.context, self.mesh.tensor
        _require(
            length % (shards * tensor) == 0,
            f"data.sequence_length {length} must be a multiple of mesh context × tensor = {shards} × {tensor}: between "
            "layers each device holds an equal part of a sequence",
        )
        shortest = self.model.kda.conv_size - 1
        _require(
            shards == 1 or length // shards >= shortest,
            f"mesh.context {shards} leaves {length // shards} tokens of {length} on a device, and the convolution "
            f"looks {shortest} back; at most {length // max(shortest, 1)} shards",
        )


def to_dict(config: Any) -> dict[str, Any]:
    """A configuration as plain JSON types (tuples become lists)."""
    return {f.name: _plain(getattr(config, f.name)) for f in dataclasses.fields(config)}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return to_dict(value)
    if isinstance(value, dict):
        return dict(value)
    return list(value) if isinstance(value, tuple) else value


def from_dict[T](cls: type[T], values: dict[str, Any], where: str = "") -> T:
    """Inverse of `to_dict`.

    Raises:
        ConfigError: an unknown name (with the nearest valid one), a missing field or a wrong type.
    """
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for name in values:
        if name not in fields:
            near = difflib.get_close_matches(name, fields, n=1)
            raise ConfigError(
                f"unknown config field {where}{name}"
                + (f"; did you mean {where}{near[0]}?" if near else f"; fields are {', '.join(fields)}")
            )
    missing = [
        n
        for n, f in fields.items()
        if n not in values and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]
    _require(not missing, f"config fields missing: {', '.join(where + m for m in missing)}")
    return cls(**{name: _typed(hints[name], value, where + name) for name, value in values.items()})


def _typed(hint: Any, value: Any, where: str) -> Any:
    if dataclasses.is_dataclass(hint):
        _require(isinstance(value, dict), f"{where} must be a mapping of fields, got {value!r}")
        return from_dict(typing.cast(type, hint), value, where + ".")
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        for option in (a for a in args if a is not type(None)):
            try:
                return _typed(option, value, where)
            except ConfigError:
                continue
        raise ConfigError(f"{where} must be {hint}, got {value!r}")
    if origin is tuple:
        _require(isinstance(value, (list, tuple)), f"{where} must be a list, got {value!r}")
        return tuple(_typed(args[0], v, where) for v in value)
    if origin is dict:
        _require(isinstance(value, dict), f"{where} must be a mapping, got {value!r}")
        return {_typed(args[0], k, where): _typed(args[1], v, f"{where}.{k}") for k, v in value.items()}
    if origin is Literal:
        _require(value in args, f"{where} must be one of {', '.join(map(repr, args))}, got {value!r}")
        return value
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    _require(
        isinstance(value, hint) and not (hint is int and isinstance(value, bool)),
        f"{where} must be {hint.__name__}, got {value!r}",
    )
    return value


def diff(old: RunConfig, new: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Fields that differ, by dotted name: `{"optimizer.learning_rate": (old, new)}`."""
    return diff_dicts(to_dict(old), to_dict(new))


def diff_dicts(old: dict[str, Any], new: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """`diff` of two configurations in the form of `to_dict`; a field that one of them lacks counts as None."""

    def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
        out: dict[str, Any] = {}
        for name, value in values.items():
            out.update(flatten(value, prefix + name + ".") if isinstance(value, dict) else {prefix + name: value})
        return out

    a, b = flatten(old), flatten(new)
    return {name: (a.get(name), b.get(name)) for name in sorted(a | b) if a.get(name) != b.get(name)}


def _mla_layers(num_layers: int, period: int = 4) -> tuple[int, ...]:
    """Every fourth layer, and the last one whatever its number."""
    return tuple(sorted({*range(period - 1, num_layers, period), num_layers - 1}))


def nano(**overrides: Any) -> ModelConfig:
    """TINY-9: nine layers with the tail of the release, byte vocabulary; 3,092,296 trained parameters."""
    base = ModelConfig(
        vocab_size=512,
        hidden_size=128,
        num_layers=9,
        mla_layers=_mla_layers(9),
        dense_size=256,
        attn_res_block_size=4,
        kda=KDAConfig(num_heads=4, head_dim=32, chunk_size=16),  # the fastest on a CPU
        mla=MLAConfig(
            num_heads=4, q_lora_rank=48, kv_lora_rank=32, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32
        ),
        moe=MoEConfig(num_experts=16, experts_per_token=4, expert_size=64, latent_size=64),
    )
    return dataclasses.replace(base, **overrides)


def proxy(**overrides: Any) -> ModelConfig:
    """One-GPU proxy: 1.74B parameters, 0.50B active without the embedding."""
    base = ModelConfig(
        vocab_size=32_768,
        hidden_size=1536,
        num_layers=13,
        mla_layers=_mla_layers(13),
        dense_size=6144,
        attn_res_block_size=4,
        kda=KDAConfig(num_heads=12, head_dim=128),
        mla=MLAConfig(
            num_heads=12,
            q_lora_rank=384,
            kv_lora_rank=256,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
        ),
        moe=MoEConfig(num_experts=64, experts_per_token=8, expert_size=768, latent_size=768),
        dtype="bfloat16",
    )
    return dataclasses.replace(base, **overrides)


def k3(**overrides: Any) -> ModelConfig:
    """The released geometry: 2,779,484,393,568 trained text parameters."""
    base = ModelConfig(
        vocab_size=163_840,
        hidden_size=7168,
        num_layers=93,
        mla_layers=_mla_layers(93),
        dense_size=33_792,
        attn_res_block_size=12,
        kda=KDAConfig(num_heads=96, head_dim=128),
        mla=MLAConfig(
            num_heads=96,
            q_lora_rank=1536,
            kv_lora_rank=512,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
        ),
        moe=MoEConfig(num_experts=896, experts_per_token=16, expert_size=3072, latent_size=3584),
        dtype="bfloat16",
    )
    return dataclasses.replace(base, **overrides)
