"""Training over a pipeline of stages: what `train.step` and `train.state` are for one mesh.

    trainer = PipelineTrainer(config, mesh, token_bytes, patch_rows(config, mesh, media_token))
    trainer.compile()
    state = trainer.create()  # a `TrainState` for every rank, on its submesh
    state, metrics = trainer.step(state, trainer.place(batch))

Every rank holds the parameters, optimizer state and router biases of its chunks; `k3jax.parallel.pipeline` says who
computes what when. A forward pass keeps only the inputs of a chunk; the backward pass computes the chunk again, and
within it what `train.remat` says. Gradients are sums, of which each device adds up its slice (ZeRO-2 inside the
pipeline), until the last micro-batch is done. Then token count, loss and the squares of gradients go round the ranks as
scalars, and each updates its own. Images are the business of `k3jax.train.towers`.

Legend: M micro-batches, B sequences in one, T time, D hidden.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from k3jax.config import ConfigError, RunConfig
from k3jax.model.decoder import Options
from k3jax.model.k3 import K3, Stage, collect, describe
from k3jax.model.plan import blocks_pushed, cut_layers
from k3jax.model.quantize import quantized
from k3jax.model.vision import insert
from k3jax.parallel.pipeline import (
    Executor,
    Layout,
    Schedule,
    StagePrograms,
    Traffic,
    bubble,
    local_bytes,
    one_f_one_b,
    send,
    timeline,
)
from k3jax.sharding import rank_meshes, shardings, spec, to_rest
from k3jax.train.batch import DEVICE_KEYS, Batch, PatchRows
from k3jax.train.flops import stage_costs
from k3jax.train.optimizer import make_optimizer, update_squares
from k3jax.train.placement import placement_lines, placements
from k3jax.train.stages import Stages, chunk_name, from_whole, to_whole
from k3jax.train.state import TrainState, abstract_of, abstract_params, creator_of, fresh_state
from k3jax.train.step import (
    Metrics,
    Sums,
    apply_gradients,
    compiler_options,
    head_sums,
    kept_if,
    loss_metrics,
    max_violation,
    mla_rows,
)
from k3jax.train.towers import Towers, features_type, pass_name, with_tower, without_tower

Tree = Any
RankStates = tuple[TrainState, ...]
RankBatches = tuple[tuple[Batch, ...], ...]
"""By rank and micro-batch: arrays [B, T], those that the rank's stages need."""


class PipelineTrainer:
    """The programs of all stages of a run, and the calls that the training loop makes.

    Args:
        images: how images are packed, of a run that reads some.

    Raises:
        ConfigError: more stages than the layers can be cut into, or several processes.
    """

    def __init__(
        self, config: RunConfig, mesh: jax.sharding.Mesh, token_bytes: np.ndarray, images: PatchRows | None = None
    ) -> None:
        if jax.process_count() > 1:
            raise ConfigError(
                "mesh.pipe > 1 needs all its devices in one process so far; use mesh.data between processes"
            )
        if config.optimizer.offload:
            raise ConfigError("optimizer.offload is not available with mesh.pipe > 1; mesh.data cuts optimizer state")
        model, ranks, virtual = config.model, config.mesh.pipe, config.mesh.virtual
        bounds = cut_layers(model, ranks * virtual, stage_costs(model, config.data.sequence_length))
        self.config, self.stages, self.images = config, Stages(model, ranks, bounds), images
        self.layout = Layout(ranks, tuple(blocks_pushed(model, *stage) for stage in bounds))
        self.schedule = one_f_one_b(ranks, virtual, config.train.accumulation)
        self.ticks = timeline(self.schedule)
        self.meshes = rank_meshes(mesh)
        self.programs: dict[str, Any] = {}
        self.ranks = [_Rank(self, rank, np.asarray(token_bytes, np.int32)) for rank in range(ranks)]
        self.chunks = [self.ranks[self.layout.rank(c)].chunks[c] for c in range(self.layout.chunks)]
        self.towers: Towers | None = None
        self.passes: list[StagePrograms] = [*self.chunks]
        if images is not None:
            vision = cast(Any, self.ranks[0].abstract.params)[chunk_name(0)].vision
            self.passes[0] = self.towers = Towers(config, self.meshes, images, self.chunks[0], vision)

    def describe(self) -> list[str]:
        """Lines for the log: stages, micro-batches, bubble, and what lies on each rank."""
        config = self.config
        layers = " | ".join(f"{start}-{stop - 1}" for start, stop in self.stages.bounds)
        lines = [
            f"pipeline    {config.mesh.pipe} ranks × {config.mesh.virtual} stages: layers {layers}; "
            f"{config.train.accumulation} micro-batches in 1F1B, ranks wait {100 * bubble(self.schedule):.0f} %"
        ]
        if self.towers is not None:
            lines.append(self.towers.describe())
        for number, part in enumerate(self.abstract):
            lines += [f"rank {number} of the pipeline", *placement_lines(placements(part))]
        return lines

    @property
    def abstract(self) -> RankStates:
        """Shapes, dtypes and shardings of the state."""
        return tuple(rank.abstract for rank in self.ranks)

    def create(self) -> RankStates:
        """A fresh state: the numbers of one on a single device."""
        return tuple(rank.create() for rank in self.ranks)

    def compile(self, *, fresh: bool = False) -> None:
        """Compiles every program, several at a time; with `fresh` also what `create` runs."""
        last, lowered = self.ranks[-1], []
        for chunk in self.chunks:
            lowered += [(chunk.programs, name, program) for name, program in chunk.lower().items()]
        taken = [chunk.taken_type for chunk in self.chunks]
        sums = taken[-1][1]
        if self.towers is not None:
            lowered += self.towers.lower()
            taken[0] = (with_tower(taken[0][0], self.towers.gradients_type), taken[0][1])
        for rank in self.ranks:
            mine = {chunk_name(c): taken[c] for c in rank.chunks}
            lowered += [(rank.programs, name, program) for name, program in rank.lower(mine, sums).items()]
            if fresh:
                with jax.set_mesh(rank.mesh):
                    creator = creator_of(rank._init, rank.mesh, fsdp=self.config.mesh.fsdp)
                    lowered.append((rank.programs, "create", creator.lower()))
        with jax.set_mesh(last.mesh):
            squares, reports = ([_on(last.whole, r.types[i]) for r in self.ranks] for i in range(2))
            lowered.append((self.programs, "metrics", jax.jit(self._metrics).lower(sums, squares, reports)))
        with ThreadPoolExecutor() as pool:
            compiled = pool.map(lambda item: item[2].compile(), lowered)
            for (programs, name, _), program in zip(lowered, compiled):
                programs[name] = program

    def place(self, batch: dict[str, Any]) -> RankBatches:
        """A host batch [M·B, T] where the stages need it: tokens on the first, targets on the last.

        Raises:
            DataError: images that do not fit in their rows.
        """
        count = self.config.train.accumulation
        micro = {key: np.split(batch[key], count) for key in DEVICE_KEYS}

        def place(rank: _Rank, m: int) -> Batch:
            return {key: jax.device_put(micro[key][m], rank.tokens) for key in rank.batch_keys}

        placed = tuple(tuple(place(rank, m) for m in range(count)) for rank in self.ranks)
        if self.towers is not None:
            self.towers.place(batch, placed)
        return placed

    def memory(self) -> list[dict[str, int]]:
        """For each rank what one of its devices held at most in the last step, in bytes: state, gradients, what waits
        between passes (`Traffic.peak`), the temporaries of the program that has the most, and with images the tower."""
        found = [rank.memory() | {"waiting": peak} for rank, peak in zip(self.ranks, self.traffic.peak)]
        for rank, tower in zip(found, self.towers.memory() if self.towers is not None else []):
            rank |= tower | {"temporary": max(rank["temporary"], tower["temporary"])}
        return found

    def step(
        self, states: RankStates, batches: RankBatches, schedule: Schedule | None = None
    ) -> tuple[RankStates, Metrics]:
        """One step, as of `make_train_step`; the states are given up.

        Args:
            schedule: another order of the same operations.
        """
        taken = self.gradients(states, batches, schedule)
        sums, last = taken[-1][1], self.ranks[-1]
        mine = [{chunk_name(c): taken[c] for c in rank.chunks} for rank in self.ranks]
        totals = [send((sums.tokens, sums.loss), rank.whole) for rank in self.ranks]
        squares = [rank.programs["square"](part, tokens) for rank, part, (tokens, _) in zip(self.ranks, mine, totals)]
        new, reports = [], []
        for rank, state, part, total in zip(self.ranks, states, mine, totals):
            here = [send(square, rank.whole) for square in squares]
            updated, report = rank.programs["update"](state, part, here, *total)
            new.append(updated)
            reports.append(send(report, last.whole))
        return tuple(new), self.programs["metrics"](sums, [send(square, last.whole) for square in squares], reports)

    def gradients(
        self, states: RankStates, batches: RankBatches, schedule: Schedule | None = None
    ) -> list[tuple[Stage, Sums]]:
        """For every chunk the gradients of the *summed* loss, at rest, and its sums over the batch."""
        self._load(states, batches, train=True)
        executor = Executor(self.layout, self.passes, [rank.residual.sharding for rank in self.ranks])
        executor.run(timeline(schedule) if schedule else self.ticks)
        self.traffic: Traffic = executor.traffic
        taken = [chunk.unload() for chunk in self.chunks]
        if self.towers is not None:
            taken[0] = (with_tower(taken[0][0], self.towers.unload()), taken[0][1])
        return taken

    def evaluate(self, states: RankStates, batches: RankBatches) -> dict[str, np.ndarray]:
        """Sums over the targets that count, as of `make_eval_step`."""
        self._load(states, batches, train=False)
        executor = Executor(self.layout, self.passes, [rank.residual.sharding for rank in self.ranks])
        scores = [self.chunks[-1].score(m, *executor.run_forward(m)) for m in range(len(batches[0]))]
        for chunk in self.chunks:
            chunk.unload()
        if self.towers is not None:
            self.towers.clear()
        return {name: np.sum([jax.device_get(score[name]) for score in scores], axis=0) for name in scores[0]}

    def _load(self, states: RankStates, batches: RankBatches, *, train: bool) -> None:
        if self.towers is not None:
            self.towers.load(cast(Any, states[0].params)[chunk_name(0)].vision, batches, train=train)
        for rank, state, batch in zip(self.ranks, states, batches):
            for chunk in rank.chunks.values():
                chunk.load(state, batch)

    def _metrics(self, sums: Sums, squares: list[jax.Array], reports: list[Tree]) -> Metrics:
        """Metrics of a step from those of the ranks."""
        metrics = loss_metrics(sums) | {
            "grad_norm": _norm(squares),
            "max_violation": jnp.max(jnp.stack([report["max_violation"] for report in reports])),
            "learning_rate": reports[-1]["learning_rate"],
            "finite": reports[-1]["finite"],
        }
        if self.config.optimizer.qk_clip_threshold is not None:
            metrics["max_logit"] = jnp.max(jnp.stack([report["max_logit"] for report in reports]))
        for group in sorted({group for rank in self.ranks for group in rank.sizes}):
            total = sum(report["squares"][group] for report in reports if group in report["squares"])
            size = sum(rank.sizes.get(group, 0) for rank in self.ranks)
            metrics[f"update_rms/{group}"] = jnp.sqrt(total / size)
        return metrics

    def whole(self, states: RankStates, like: Tree) -> Tree:
        """See `stages.to_whole`."""
        return to_whole(self.stages, states, like)

    def parts(self, whole: TrainState) -> RankStates:
        """See `stages.from_whole`."""
        return from_whole(self.stages, whole, self.abstract)

    def model(self, states: RankStates) -> tuple[K3, jax.Array]:
        """The whole model and its router biases on the devices of the first rank, to sample with `meshes[0]` set."""
        model = self.config.model
        bias = jax.ShapeDtypeStruct((model.num_moe_layers, model.moe.num_experts), jnp.float32)
        like = {"params": abstract_params(model), "router_bias": bias}
        with jax.set_mesh(self.meshes[0]):
            places = shardings(like, self.meshes[0])
        whole = jax.tree.map(jax.device_put, self.whole(states, like), places)
        return whole["params"], whole["router_bias"]


class _Rank:
    """What one rank holds, and its programs besides the passes of its chunks."""

    def __init__(self, trainer: PipelineTrainer, number: int, token_bytes: np.ndarray) -> None:
        config, stages = trainer.config, trainer.stages
        self.images = trainer.images
        self.config, self.mesh = config, trainer.meshes[number]
        self.bounds = {chunk_name(c): stages.bounds[c] for c in stages.chunks(number)}
        self.num_moe_layers = len(stages.moe_layers(number))
        self.rows = mla_rows(config.model, {f"{name}/": bounds for name, bounds in self.bounds.items()})
        first, last = number == 0, number == stages.ranks - 1
        self.batch_keys = ("tokens",) * first + ("segment_ids",) + ("targets", "loss_mask") * last
        shape = (config.data.batch_size // config.train.accumulation, config.data.sequence_length)
        self.whole = NamedSharding(self.mesh, P())
        with jax.set_mesh(self.mesh):
            tokens, residual = spec("batch", "time"), spec("batch", "sequence", None)
            self.optimizer = make_optimizer(config.optimizer, jax.eval_shape(self._params), config.train.steps)
            self.abstract = abstract_of(self._init, self.mesh, fsdp=config.mesh.fsdp)
        self.tokens = NamedSharding(self.mesh, tokens)
        self.residual = jax.ShapeDtypeStruct(
            (*shape, config.model.hidden_size),
            jnp.dtype(config.model.dtype),
            sharding=NamedSharding(self.mesh, residual),
        )
        types = dict.fromkeys(self.batch_keys, jnp.int32)
        types |= {key: jnp.bool_ for key in types if key == "loss_mask"}
        self.batch = {k: jax.ShapeDtypeStruct(shape, dtype, sharding=self.tokens) for k, dtype in types.items()}
        self.programs: dict[str, Any] = {}
        self.sizes: dict[str, int] = {}
        """Parameters by optimizer group."""
        for leaf, group in zip(jax.tree.leaves(self.abstract.params), jax.tree.leaves(self.optimizer.groups)):
            self.sizes[group] = self.sizes.get(group, 0) + leaf.size
        self.chunks = {c: _Chunk(trainer.layout, c, self, token_bytes) for c in stages.chunks(number)}

    def _params(self) -> dict[str, Stage]:
        seed = self.config.train.seed
        return {name: Stage(self.config.model, *b, rngs=nnx.Rngs(seed)) for name, b in self.bounds.items()}

    def _init(self) -> TrainState:
        return fresh_state(
            self.config.model, self._params(), self.optimizer.transform, self.num_moe_layers, self.config.train.seed
        )

    def create(self) -> TrainState:
        compiled = self.programs.pop("create", None)
        with jax.set_mesh(self.mesh):
            return (compiled or creator_of(self._init, self.mesh, fsdp=self.config.mesh.fsdp))()

    def lower(self, taken: dict[str, tuple[Stage, Sums]], sums: Sums) -> dict[str, Any]:
        """The programs.

        Args:
            taken: types of gradients and sums by chunk.
            sums: those of the last chunk.
        """
        with jax.set_mesh(self.mesh):
            tokens, loss = _on(self.whole, (sums.tokens, sums.loss))
            square = jax.jit(_squares).lower(taken, tokens)
            squares = [_on(self.whole, square.out_info)] * self.config.mesh.pipe
            options = compiler_options(self.mesh)
            update = jax.jit(self._update, donate_argnums=0, compiler_options=options).lower(
                self.abstract, taken, squares, tokens, loss
            )
        self.types = (square.out_info, update.out_info[1])
        """Of the square, and of what an update says of itself."""
        return {"square": square, "update": update}

    def memory(self) -> dict[str, int]:
        """See `PipelineTrainer.memory`."""
        programs = [program for owner in (self, *self.chunks.values()) for program in owner.programs.values()]
        temporary = max(program.memory_analysis().temp_size_in_bytes for program in programs)
        taken = [chunk.taken_type for chunk in self.chunks.values()]
        return {"state": local_bytes(self.abstract), "gradients": local_bytes(taken), "temporary": temporary}

    def _update(
        self,
        state: TrainState,
        taken: dict[str, tuple[Stage, Sums]],
        squares: list[jax.Array],
        tokens: jax.Array,
        loss: jax.Array,
    ) -> tuple[TrainState, Tree]:
        """New state, and what the metrics need of it.

        Args:
            squares: of the gradients of every rank.
            tokens, loss: sums over the batch.
        """
        parts = [sums for _, sums in taken.values()]
        sums = dataclasses.replace(
            parts[0],
            load=jnp.concatenate([part.load for part in parts]),
            histogram=jnp.concatenate([part.histogram for part in parts]),
            max_logit=jnp.concatenate([part.max_logit for part in parts]),
        )
        norm = _norm(squares)
        new, updates = apply_gradients(
            self.config, self.optimizer, self.rows, state, _mean(taken, tokens), sums, grad_norm=norm
        )
        finite = jnp.isfinite(loss) & jnp.isfinite(norm)
        report = {
            "squares": {group: square for group, (square, _) in update_squares(updates, self.optimizer.groups).items()},
            "max_violation": jnp.max(max_violation(sums.load), initial=0.0),
            "max_logit": jnp.max(sums.max_logit, initial=-jnp.inf),
            "learning_rate": jnp.asarray(self.optimizer.schedule(state.step)),
            "finite": finite,
        }
        return kept_if(finite, new, state), report


class _Chunk:
    """The passes of one chunk (`StagePrograms`), for the micro-batches that are loaded."""

    def __init__(self, layout: Layout, number: int, rank: _Rank, token_bytes: np.ndarray) -> None:
        self.layout, self.number, self.rank, self.token_bytes = layout, number, rank, token_bytes
        self.config, self.name = rank.config, chunk_name(number)
        self.programs: dict[str, Any] = {}
        self.first, self.last = number == 0, number == layout.chunks - 1
        stages = cast(Any, rank.abstract.params)
        start = sum(len(stages[chunk_name(c)].moe_layers) for c in range(number % layout.ranks, number, layout.ranks))
        self.bias_rows = slice(start, start + len(stages[self.name].moe_layers))
        self.images = rank.images if self.first else None

    def lower(self) -> dict[str, Any]:
        """The programs, those of the first chunk also for the usual number of rows of patches."""
        rank, first = self.rank, {}
        self._stage_type = self._stage(rank.abstract)
        if self.config.model.moe.qat:
            with jax.set_mesh(rank.mesh):
                first["quantize"] = jax.jit(partial(quantized, config=self.config.model)).lower(self._stage_type)
            self._stage_type = jax.tree.map(
                lambda s, q: s.update(dtype=q.dtype), self._stage_type, first["quantize"].out_info
            )
        with jax.set_mesh(rank.mesh):
            self.taken_type = jax.eval_shape(self._pass, *self._types())[2]
            first["zeros"] = jax.jit(partial(_zeros, self.taken_type)).lower()
        passes = ("backward", "score" if self.last else "forward")
        counts = (0,) if self.images is None else (0, self.images.usual)
        return first | {pass_name(kind, count): self.lower_pass(kind, count) for kind in passes for count in counts}

    def lower_pass(self, kind: str, patch_rows: int = 0) -> Any:
        """A pass, of the first chunk with so many rows of patches."""
        *inputs, d_partial, d_pushed = self._types(patch_rows)
        options = compiler_options(self.rank.mesh)
        with jax.set_mesh(self.rank.mesh):
            if kind != "backward":
                fn = self._scores if kind == "score" else self._outputs
                return jax.jit(fn, compiler_options=options).lower(*inputs)
            # what has a result of its shape to be written over
            donated = ("d_first", "taken") if inputs[-1] is None else ("partial", "d_first", "taken")
            layout, x = self.layout, self.rank.residual
            d_rows = tuple((x,) * layout.contributions(self.number, row) for row in layout.read(self.number))
            d_first, d_more = tuple(d[:1] for d in d_rows), tuple(d[1:] for d in d_rows)
            backward = jax.jit(self._add_pass, donate_argnames=donated, compiler_options=options)
            return backward.lower(*inputs, d_partial, d_pushed, d_first, d_more, self.taken_type)

    def _types(self, patch_rows: int = 0) -> tuple:
        """Of the arguments of `_pass`."""
        rank, layout, x = self.rank, self.layout, self.rank.residual
        batch, partial = rank.batch, None if self.first else x
        if self.images is not None and patch_rows:
            batch = batch | {"media_index": batch["tokens"]}
            partial = features_type(self.config, rank.mesh, self.images, patch_rows)
        pushes = layout.pushes[self.number]
        d_pushed = () if self.last else tuple((x,) * layout.contributions(self.number, row) for row in pushes)
        rows = (x,) * len(layout.read(self.number))
        bias = rank.abstract.router_bias
        return self._stage_type, bias, batch, rows, partial, None if self.last else x, d_pushed

    def _stage(self, state: TrainState) -> Stage:
        """What the passes differentiate; the tower is not part of it where images are read."""
        stage = cast(Any, state.params)[self.name]
        return stage if self.images is None else without_tower(stage)

    def load(self, state: TrainState, batch: Sequence[Batch]) -> None:
        """What the next calls work on."""
        stage = self._stage(state)
        if self.config.model.moe.qat:
            stage = self.programs["quantize"](stage)
        self._held = (stage, state.router_bias)
        keys = {*self.rank.batch} if self.images is None else {*self.rank.batch, "media_index"}
        self._batch = [{key: x for key, x in micro.items() if key in keys} for micro in batch]
        self._taken = None

    def unload(self) -> Any:
        """Gradients and sums of the backward passes since `load`."""
        taken = self._taken
        del self._held, self._batch, self._taken
        return taken

    def forward(self, micro: int, rows: tuple, partial: Any) -> tuple[Any, tuple]:
        return self._program("forward", partial)(*self._held, self._batch[micro], rows, partial)

    def backward(self, micro: int, rows: tuple, partial: Any, d_partial: Any, d_pushed: tuple, d_rows: tuple) -> Any:
        first, more = tuple(d[:1] for d in d_rows), tuple(d[1:] for d in d_rows)
        taken = self.programs["zeros"]() if self._taken is None else self._taken
        *cotangents, self._taken = self._program("backward", partial)(
            *self._held, self._batch[micro], rows, partial, d_partial, d_pushed, first, more, taken
        )
        return cotangents

    def _program(self, kind: str, partial: Any) -> Any:
        count = 0 if self.images is None or partial is None else len(partial)
        name = pass_name(kind, count)
        if name not in self.programs:  # more rows of patches than usual
            self.programs[name] = self.lower_pass(kind, count).compile()
        return self.programs[name]

    def score(self, micro: int, rows: tuple, partial: Any) -> Metrics:
        return self.programs["score"](*self._held, self._batch[micro], rows, partial)

    def _outputs(self, stage: Stage, bias: jax.Array, batch: Batch, rows: tuple, partial: Any) -> tuple[Any, tuple]:
        partial, bank, _ = self._run(stage, bias, batch, rows, partial)
        return partial, bank[len(rows) :]

    def _run(self, stage: Stage, bias: jax.Array, batch: Batch, rows: tuple, partial: Any) -> tuple[Any, tuple, Any]:
        """Partial sum, bank and per-layer outputs after the chunk."""
        train, ids = self.config.train, batch["segment_ids"]
        policy = tuple(train.remat_policy.items())
        options = Options(remat=train.remat, remat_policy=policy, unroll=train.unroll, histogram=True)
        start = stage.embedded(batch["tokens"]) if self.first else partial
        if self.first and partial is not None:
            start = insert(start, partial, batch["media_index"])
        (partial, bank), outs = stage.run((start, rows), describe(ids, ids, None), bias[self.bias_rows], options)
        return partial, bank, outs

    def _loss(self, stage, bias, batch, rows, partial, *, train: bool) -> tuple[jax.Array, Sums]:
        partial, bank, outs = self._run(stage, bias, batch, rows, partial)
        x, _ = stage.output(partial, bank, Options())
        aux, table = collect(stage, outs), jnp.asarray(self.token_bytes)
        return head_sums(self.config, stage, x, aux, batch, table, train=train)

    def _scores(self, stage: Stage, bias: jax.Array, batch: Batch, rows: tuple, partial: Any) -> Metrics:
        _, sums = self._loss(stage, bias, batch, rows, partial, train=False)
        return {"nats": sums.cross_entropy, "tokens": sums.tokens, "bytes": sums.bytes}

    def _pass(self, stage: Stage, bias, batch: Batch, rows: tuple, partial, d_partial, d_pushed: tuple) -> Any:
        """Cotangents of partial sum and rows, and (gradients at rest, sums) of one micro-batch."""

        def outputs(stage: Stage, rows: tuple, partial: Any) -> tuple[Any, Sums]:
            if self.last:
                return self._loss(stage, bias, batch, rows, partial, train=True)
            partial, bank, outs = self._run(stage, bias, batch, rows, partial)
            aux, none = collect(stage, outs), jnp.zeros((), jnp.int32)
            sums = Sums(*(none,) * 5, load=aux.load, histogram=aux.histogram, max_logit=aux.max_logit)
            return (partial, bank[len(rows) :]), sums

        out, pull, sums = jax.vjp(outputs, stage, rows, partial, has_aux=True)
        cotangents = jnp.ones_like(out) if self.last else (d_partial, tuple(sum(parts) for parts in d_pushed))
        d_stage, d_rows, d_partial = pull(cotangents)
        d_stage = jax.tree.map(lambda g: g.astype(self.config.model.param_dtype), d_stage)
        return d_partial, d_rows, (to_rest(d_stage), sums)

    def _add_pass(
        self, stage, bias, batch, rows, partial, d_partial, d_pushed, d_first: tuple, d_more: tuple, taken: Any
    ) -> Any:
        """`_pass` added to what was there: cotangents of the rows from later chunks, gradients and sums."""
        d_partial, d_rows, (grads, sums) = self._pass(stage, bias, batch, rows, partial, d_partial, d_pushed)
        d_rows = tuple(sum((*first, *more), d_row) for d_row, first, more in zip(d_rows, d_first, d_more))
        return d_partial, d_rows, (jax.tree.map(jnp.add, taken[0], grads), taken[1].add(sums))


def _zeros(types: tuple[Stage, Sums]) -> tuple[Stage, Sums]:
    grads, sums = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype, out_sharding=s.sharding), types)
    return grads, dataclasses.replace(sums, max_logit=jnp.full_like(sums.max_logit, -jnp.inf))


def _mean(taken: dict[str, tuple[Stage, Sums]], tokens: jax.Array) -> dict[str, Stage]:
    """Gradients of the mean loss from those of the sum."""
    count = jnp.maximum(tokens, 1)  # a batch of padding has gradients 0, not 0/0
    return {name: jax.tree.map(lambda g: g / count.astype(g.dtype), grads) for name, (grads, _) in taken.items()}


def _squares(taken: dict[str, tuple[Stage, Sums]], tokens: jax.Array) -> jax.Array:
    """Sum of squares of the gradients of the mean loss."""
    return cast(jax.Array, sum(jnp.sum(jnp.square(g)) for g in jax.tree.leaves(_mean(taken, tokens))))


def _norm(squares: Sequence[jax.Array]) -> jax.Array:
    return jnp.sqrt(sum(squares))


def _on(sharding: NamedSharding, tree: Tree) -> Tree:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)
