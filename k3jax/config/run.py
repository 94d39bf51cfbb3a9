"""A training run: mesh, data, optimizer, and everything that happens around a step."""

from __future__ import annotations

import typing
from dataclasses import dataclass, field
from typing import Literal

from k3jax.config.checks import ConfigError, require, require_address, require_positive
from k3jax.config.model import DType, ModelConfig

Remat = Literal["none", "products", "sublayer", "layer", "block"]
RematAction = Literal["save", "fp8", "offload", "recompute"]
REMAT_NAMES = ("kda", "attention", "experts", "keys", "expert_weights", "operand")
ExpertFormat = Literal["plain", "mxfp4"]


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
        require_positive(self, "pipe", "data", "expert", "context", "tensor", "virtual")
        require(self.virtual == 1 or self.pipe > 1, f"mesh.virtual {self.virtual} needs mesh.pipe > 1")

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
        require_positive(self, "timeout", "heartbeat")
        if self.coordinator is not None:
            require_address("LaunchConfig.coordinator", self.coordinator)


@dataclass(frozen=True)
class ImagesConfig:
    """Documents with images, read beside the text. They need a model with a tower (`ModelConfig.vision`)."""

    source: str | None = None
    """None: no images. "digits" (lines of handwritten digits, needs scikit-learn), or a folder, file or glob of .jsonl,
    .parquet or .tar files."""
    share: float = 0.1
    """Of the rows of the training batches."""
    text_field: str = "text"
    """Of a record: its text, where each `<image>` stands for the next of its images; without one they come first."""
    image_field: str = "images"
    """Of a record: paths relative to its file (JSONL), or bytes or `{bytes, path}` (Parquet); one or a list."""
    patches: int = 1024
    """Most patches in one row of a batch, and of one image: a larger one is made smaller."""
    on_error: Literal["raise", "skip"] = "raise"
    """What happens with a document one of whose images cannot be read, or whose text asks for more or fewer than there
    are. Text that cannot be read ends the run either way."""

    def __post_init__(self) -> None:
        require_positive(self, "patches")
        require(0 < self.share <= 1, f"ImagesConfig.share must be in (0, 1], got {self.share}")


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
    images: ImagesConfig = field(default_factory=ImagesConfig)

    def __post_init__(self) -> None:
        require_positive(self, "batch_size", "virtual_shards")
        require(self.sequence_length >= 2, "DataConfig.sequence_length must be at least 2")
        require(0 < self.validation_percent < 100, "DataConfig.validation_percent must be in 1..99")
        require(self.min_bytes >= 0, "DataConfig.min_bytes must be ≥ 0")
        require(self.prefetch >= 0, "DataConfig.prefetch must be ≥ 0")


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
        require_positive(self, "learning_rate", "muon_ns_steps", "muon_rms")
        for name in ("muon_momentum", "adam_b1", "adam_b2"):
            require(
                0 <= getattr(self, name) < 1, f"OptimizerConfig.{name} must be in [0, 1), got {getattr(self, name)}"
            )
        require(self.weight_decay >= 0, "OptimizerConfig.weight_decay must be ≥ 0")
        require(self.clip_norm is None or self.clip_norm > 0, "OptimizerConfig.clip_norm must be positive or None")
        require(0 <= self.min_learning_rate_ratio <= 1, "OptimizerConfig.min_learning_rate_ratio must be in [0, 1]")
        require(0 <= self.warmup_ratio <= 1, "OptimizerConfig.warmup_ratio must be in [0, 1]")
        require(
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
        require(self.interval >= 0, f"PublishConfig.interval must be ≥ 0, got {self.interval}")
        require_positive(self, "keep")
        if self.address is not None:
            require_address("PublishConfig.address", self.address)


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
        require_positive(
            self,
            "steps",
            "accumulation",
            "loss_chunk",
            "log_interval",
            "checkpoint_interval",
            "keep_last",
        )
        require(self.eval_batches is None or self.eval_batches > 0, "TrainConfig.eval_batches must be positive or None")
        actions = typing.get_args(RematAction)
        for name, action in self.remat_policy.items():
            where = f"TrainConfig.remat_policy {name!r}: {action!r}"
            require(name in REMAT_NAMES, f"{where}: names are {', '.join(REMAT_NAMES)}")
            require(action in actions, f"{where}: legal are {', '.join(actions)}")
        legal = ", ".join(action for action in actions if action != "fp8")
        require(
            self.remat_policy.get("keys") != "fp8",
            f"TrainConfig.remat_policy 'keys': 'fp8' does not fit the log-sum-exp of the exact keys; legal: {legal}",
        )
        attention = self.remat_policy.get("attention", "recompute" if self.remat == "block" else "save")
        require(
            self.remat == "products" or self.remat_policy.get("operand") != "fp8" or attention == "recompute",
            f"TrainConfig.remat_policy 'operand': 'fp8' with remat {self.remat!r} computes queries again from rounded "
            "numbers, which do not fit what attention kept; use remat 'products', or 'attention': 'recompute' as well",
        )
        require(
            not self.remat_policy or self.remat != "none",
            "TrainConfig.remat_policy needs another remat than 'none', which keeps everything",
        )
        for name in ("skip_nonfinite", "eval_interval", "sample_interval", "sample_tokens", "z_loss"):
            require(getattr(self, name) >= 0, f"TrainConfig.{name} must be ≥ 0, got {getattr(self, name)}")
        require(self.keep_every is None or self.keep_every > 0, "TrainConfig.keep_every must be positive or None")
        require(
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
        require(batch % accumulation == 0, f"train.accumulation {accumulation} must divide data.batch_size {batch}")
        pipe, virtual = self.mesh.pipe, self.mesh.virtual
        require(
            virtual == 1 or accumulation % pipe == 0,
            f"train.accumulation {accumulation} must be a multiple of mesh.pipe {pipe} with mesh.virtual {virtual}: "
            "interleaved 1F1B takes micro-batches in groups of one a rank",
        )
        ways = self.mesh.data * self.mesh.expert
        micro = batch // accumulation
        whole = ways * accumulation
        near = sorted({max(batch // whole, 1) * whole, (batch // whole + 1) * whole})
        require(
            micro % ways == 0,
            f"data.batch_size {batch} must be a multiple of mesh data × expert × train.accumulation = {self.mesh.data} "
            f"× {self.mesh.expert} × {accumulation}, such as {' or '.join(map(str, near))}; else data × expert must "
            f"divide the {micro} sequences of a micro-batch",
        )
        self._check_images()
        moe = self.model.moe
        inputs = {"latent size": moe.latent_size or self.model.hidden_size, "model.moe.expert_size": moe.expert_size}
        for name, size in inputs.items():
            require(
                self.train.publish.experts == "plain" or size % 32 == 0,
                f"train.publish.experts 'mxfp4' has groups of 32 inputs, and the {name} is {size}; use 'plain'",
            )
        length, shards, tensor = self.data.sequence_length, self.mesh.context, self.mesh.tensor
        require(
            length % (shards * tensor) == 0,
            f"data.sequence_length {length} must be a multiple of mesh context × tensor = {shards} × {tensor}: between "
            "layers each device holds an equal part of a sequence",
        )
        shortest = self.model.kda.conv_size - 1
        require(
            shards == 1 or length // shards >= shortest,
            f"mesh.context {shards} leaves {length // shards} tokens of {length} on a device, and the convolution "
            f"looks {shortest} back; at most {length // max(shortest, 1)} shards",
        )

    def _check_images(self) -> None:
        images, vision = self.data.images, self.model.vision
        if images.source is None:
            return
        if vision is None:
            raise ConfigError(
                f"data.images.source {images.source!r} needs a model with a tower: give the model a VisionConfig, as "
                "configs/nano_vision.py does"
            )
        merge, context = vision.merge, self.mesh.context
        require(
            images.patches % (merge**2 * context) == 0,
            f"data.images.patches {images.patches} must be a multiple of {merge**2 * context}: a token is "
            f"{merge} × {merge} of them, and mesh.context {context} cuts a row of them",
        )
