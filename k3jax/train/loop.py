"""The training loop: what happens around a step.

    with jax.set_mesh(mesh): train(config, mesh)

    RUN_DIR/checkpoints/               see `k3jax.checkpoint.store`
    RUN_DIR/metrics.jsonl, samples.jsonl, tensorboard/
    RUN_DIR/nonfinite_step_N.json      what was known of a step that gave NaN or infinity
    RUN_DIR/profile/                   trace of train.profile_steps

The same call resumes from the last complete checkpoint and goes on bit for bit as if it had never stopped. The host
runs one step ahead of what it has read: metrics of step i are fetched while the device computes step i + 1. That is
safe because the device itself refuses a non-finite update, and everything is fetched before a checkpoint is written.

Several processes run the same loop in step: all save, evaluate and sample, each reads its rows of the batch, and
process 0 alone prints and writes files of its own (`k3jax.parallel.launch`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import numpy as np

from k3jax.checkpoint.publish import Publisher
from k3jax.checkpoint.store import CheckpointStore, RunRecord
from k3jax.checkpoint.version import snapshot
from k3jax.config import ConfigError, RunConfig, to_dict
from k3jax.data.bits import bits_per_byte
from k3jax.data.loader import Loader, TextData, merge_states, open_data
from k3jax.data.sources import DataError
from k3jax.data.tokenizers import MEDIA_TOKEN
from k3jax.model.k3 import K3
from k3jax.model.quantize import served
from k3jax.parallel.launch import StopVote, exchange, is_first, require_same, together
from k3jax.train import flops
from k3jax.train.batch import Batch, abstract_batch, own_rows, patch_rows, place_batch, rows_of
from k3jax.train.metrics import Clock, Display, MetricsLog, count, duration, read_records, step_line, to_json
from k3jax.train.optimizer import make_optimizer
from k3jax.train.pipeline import PipelineTrainer
from k3jax.train.placement import placement_lines, placements
from k3jax.train.report import References, implementations, start_report, summary_table
from k3jax.train.resume import check_resume, claimed
from k3jax.train.stages import on_host
from k3jax.train.state import (
    abstract_params,
    abstract_state,
    check_host_memory,
    create_state,
    model_part,
    training_part,
)
from k3jax.train.step import compiler_options, make_eval_step, make_train_step


class NonFiniteError(RuntimeError):
    """A step gave NaN or infinity and the budget of train.skip_nonfinite is spent."""


def use_compile_cache() -> Path:
    """Keeps compiled programs between runs: in JAX_COMPILATION_CACHE_DIR, else in the user's cache folder."""
    directory = jax.config.jax_compilation_cache_dir
    if directory is None:
        directory = os.path.join(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "k3jax", "jax")
        jax.config.update("jax_compilation_cache_dir", directory)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    return Path(directory)


class StopRequest:
    """SIGTERM and SIGINT ask for a stop after the step that runs; a second one stops at once."""

    def __init__(self) -> None:
        self.signal: str | None = None

    @contextlib.contextmanager
    def installed(self) -> Generator[StopRequest]:
        """Handles the signals inside the block (only Python's main thread may)."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        before = {number: signal.signal(number, self._ask) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal = signal.Signals(number).name


@dataclasses.dataclass(frozen=True)
class _Pending:
    """A step whose metrics are still on the device."""

    step: int
    metrics: dict[str, jax.Array]
    document_ids: np.ndarray  # of this process's rows
    tower_flops: int  # of this process's images
    stop: jax.Array | None  # `StopVote`, of several processes


@dataclasses.dataclass(frozen=True)
class Watch:
    """Looks at a model while it trains: before the first step of a call of `train`, every `interval` steps, at the end.

    `see(step, model, router_bias)` has the parameters of a `TrainState` and float32 [MoE layers, E], valid until it
    returns: the next step reuses their memory. metrics.jsonl is written up to that step. What it raises ends the run.
    Of several processes each calls it; with `mesh.pipe` the model is on the first rank.
    """

    see: Callable[[int, K3, jax.Array], None]
    interval: int = 1

    def __post_init__(self) -> None:
        if self.interval < 1:
            raise ValueError(f"Watch.interval must be positive, got {self.interval}")


def train(
    config: RunConfig,
    mesh: jax.sharding.Mesh,
    *,
    allow_config_change: bool = False,
    watch: Watch | None = None,
    quiet: bool = False,
) -> None:
    """Trains `config`, from its last checkpoint if its run directory has one; returns when done or asked to stop.

    Args:
        mesh: the mesh that is set (`jax.set_mesh`).
        allow_config_change: go on from a checkpoint although fields that change the result differ.
        watch: a look at the model from time to time, as a notebook's plots.
        quiet: print nothing; files of the run are written all the same.

    Raises:
        ConfigError: the configuration changed since the checkpoint, cannot be honoured, or is another in some process.
        DataError: no usable text.
        CheckpointError: the checkpoint is of another model.
        LaunchError: another process found no usable text.
        NonFiniteError: see there.
    """
    if "float64" in (config.model.dtype, config.model.param_dtype) and not jax.config.jax_enable_x64:
        raise ConfigError("float64 needs JAX_ENABLE_X64=1 in the environment; jax would compute in float32 without it")
    check_host_memory(config, mesh)
    implementations(config)  # what is named and cannot run is refused before anything is read or compiled
    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(StopRequest().installed())
        with together("start"):
            data = open_data(config.data, config.model.vocab_size, config.model.vision)
            if is_first():
                stack.enter_context(claimed(Path(config.run_dir)))
        images = "" if data.images is None else data.images.documents.files_hash
        require_same({"configuration": to_dict(config), "list of data files": data.documents.files_hash + images})
        display = Display(config.train.steps, quiet=quiet or not is_first())
        stack.callback(display.close)
        store = CheckpointStore(
            Path(config.run_dir) / "checkpoints",
            copy=config.train.checkpoint_copy,
            keep_last=config.train.keep_last,
            keep_every=config.train.keep_every,
        )
        stack.callback(store.close)
        require_same({"newest checkpoint": store.latest})
        own = own_rows(config.data.batch_size, config.train.accumulation, mesh)
        loader = stack.enter_context(data.train_loader(own))
        run = _Run(config, mesh, data, loader, store, display, stop, watch)
        run.restore(allow_config_change)
        stack.callback(run.close)
        run.run()


class _Run:
    """One run between `restore` and `close`."""

    def __init__(
        self,
        config: RunConfig,
        mesh: jax.sharding.Mesh,
        data: TextData,
        loader: Loader,
        store: CheckpointStore,
        display: Display,
        stop: StopRequest,
        watch: Watch | None,
    ) -> None:
        self.start = time.perf_counter()
        self.config, self.mesh, self.data, self.loader = config, mesh, data, loader
        self.store, self.display, self.stop, self.watch = store, display, stop, watch
        self.run_dir = Path(config.run_dir)
        self.optimizer = make_optimizer(config.optimizer, abstract_params(config.model), config.train.steps)
        self.images = patch_rows(config, mesh, data.tokenizer.special_tokens[MEDIA_TOKEN])
        self.pipeline: PipelineTrainer | None = None
        if config.mesh.pipe > 1:
            self.pipeline = PipelineTrainer(config, mesh, data.tokenizer.token_bytes, self.images)
        self.train_steps: dict[int, Any] = {}
        self.eval_steps: dict[int, Any] = {}
        """Compiled, by rows of patches."""
        self.eval_batches: list[dict[str, Any]] = []
        if config.train.eval_interval:
            own = own_rows(config.data.batch_size, config.train.accumulation, mesh)
            with data.validation_loader(config.train.eval_batches, own) as batches:
                self.eval_batches = list(batches)
            if not any(exchange(any(bool(batch["loss_mask"].any()) for batch in self.eval_batches))):
                raise DataError(
                    f"the held-out documents of data.source {config.data.source!r} hold nothing to predict; "
                    "raise data.validation_percent, use more text, or set train.eval_interval to 0"
                )
        self.pending: deque[_Pending] = deque()
        self.clock, self.profiling = Clock(), False
        self.tokens_per_step = config.data.batch_size * config.data.sequence_length
        self.flops_per_token = flops.flops_per_token(config.model, config.data.sequence_length)
        self.peak = flops.peak_flops(mesh, config.model.dtype)
        self.references = References(data) if is_first() else None  # after the peak, which a CPU measures
        self.vote = StopVote(mesh) if jax.process_count() > 1 else None
        self.stopped: str | None = None
        publish = config.train.publish
        self.publisher: Publisher | None = None
        if publish.interval:
            default = None if publish.address else self.run_dir / "published"
            self.publisher = Publisher(publish.directory or default, keep=publish.keep, address=publish.address)

    def record(self) -> RunRecord:
        """What a checkpoint written now says beside its arrays."""
        tokenizer, documents = self.data.tokenizer, self.data.documents
        return RunRecord(
            config=to_dict(self.config),
            tokenizer={"fingerprint": tokenizer.fingerprint, "vocab_size": tokenizer.vocab_size},
            source={"files_hash": documents.files_hash, "bytes": documents.text_bytes},
            data=merge_states(exchange(self.loader.get_state())),
        )

    def restore(self, allow_config_change: bool) -> None:
        """Reads the last checkpoint, if there is one, and says what will run."""
        config, latest = self.config, self.store.latest
        self.placement = {"fsdp": config.mesh.fsdp, "offload": config.optimizer.offload}
        self.like = abstract_state(config.model, self.optimizer.transform, self.mesh, **self.placement)
        self.step, self.skipped = latest or 0, 0
        changes: list[str] = []
        if latest is not None:
            saved = self.store.read_record(latest)
            changes = check_resume(saved, self.record(), self._path(latest), allow_config_change)
            like = self.like if self.pipeline is None else on_host(self.like)
            model = self.store.load("model", model_part(like), latest)
            training = self.store.load("training", training_part(like), latest)
            whole = dataclasses.replace(like, **model, **training)
            self.state: Any = whole if self.pipeline is None else self.pipeline.parts(whole)
            self.loader.set_state(saved.data)
            self.skipped = latest - int(whole.step)
        lines = start_report(config, self.mesh, self.data, self.peak)
        if self.pipeline is not None:
            lines += self.pipeline.describe()
        elif self.mesh.size > 1:
            lines += placement_lines(placements(self.like))
        for line in lines:
            self.display.print(line)
        if latest is not None:
            self.display.print(f"resuming    from {self._path(latest)}")
            for line in changes:
                self.display.print(f"  changed {line}")
        self.log = MetricsLog(self.run_dir, self.step) if is_first() else None

    def _path(self, step: int) -> str:
        return str(self.store.directory / str(step))

    def run(self) -> None:
        """Steps until the end of the run or a request to stop."""
        if self.step < self.config.train.steps:
            self._prepare()
            self._see()
        first = self.step
        self.clock.resume()
        while self.step < self.config.train.steps and self._stopped() is None:
            self._advance()
        self._collect(0)
        if self.step < self.config.train.steps:
            if self.step > first:
                self._save()
            self.store.wait()
            self.display.print(
                f"{self._stopped()}: stopped after step {self.step}; the same command goes on from there"
            )
            return
        self.store.wait()
        self._summary(self.step - first)

    def _stopped(self) -> str | None:
        """The signal that asked this run to stop; of several processes, what all of them know by now."""
        return self.stop.signal if self.vote is None else self.stopped

    def _prepare(self) -> None:
        """Compiles the training step beside everything else that comes before the first step.

        Compiled ahead of time, a later change of shape or sharding is an error and not a silent wait.
        """
        begin, config = time.perf_counter(), self.config
        self.display.print("compiling   the step …")
        if self.pipeline is not None:
            self.pipeline.compile()
            if self.step == 0:
                self.state = self.pipeline.create()
                self._evaluate()
            self._compiled(begin)
            return
        usual = 0 if self.images is None else self.images.usual
        with ThreadPoolExecutor(1) as pool:
            compiling = pool.submit(self._compile_train_step, usual)
            if self.step == 0:
                self.state = create_state(
                    config.model, self.optimizer.transform, self.mesh, config.train.seed, **self.placement
                )
                self._evaluate()
            compiling.result()
        self._compiled(begin)

    def _compile_train_step(self, rows: int) -> Any:
        """The training step for batches with so many rows of patches."""
        if rows not in self.train_steps:
            config = self.config
            with jax.set_mesh(self.mesh):  # a mesh is set for one thread
                batch = abstract_batch(config, self.mesh, self.images, rows)
                step = make_train_step(config, self.optimizer, self.data.tokenizer.token_bytes)
                jitted = jax.jit(step, donate_argnums=0, compiler_options=compiler_options(self.mesh))
                self.train_steps[rows] = jitted.lower(self.like, batch).compile()
        return self.train_steps[rows]

    def _eval_step(self, batch: Batch) -> dict[str, jax.Array]:
        params, bias, rows = self.state.params, self.state.router_bias, rows_of(batch)
        if rows not in self.eval_steps:
            jitted = jax.jit(make_eval_step(self.config, self.data.tokenizer.token_bytes))
            self.eval_steps[rows] = jitted.lower(params, bias, batch).compile()
        return self.eval_steps[rows](params, bias, batch)

    def _place(self, batch: dict[str, Any]) -> Batch:
        return place_batch(batch, self.config.train.accumulation, self.mesh, self.images)

    def _compiled(self, begin: float) -> None:
        took = duration(time.perf_counter() - begin)
        self.display.print(f"compiled    after {took} (cache: {jax.config.jax_compilation_cache_dir})")

    def _advance(self) -> None:
        """One step, and whatever is due after it."""
        train, step = self.config.train, self.step + 1
        if train.profile_steps and step == train.profile_steps[0]:
            self._collect(0)
            if is_first():
                jax.profiler.start_trace(str(self.run_dir / "profile"))
                self.profiling = True
        batch = next(self.loader)
        with jax.profiler.StepTraceAnnotation("train", step_num=step):
            if self.pipeline is not None:
                self.state, metrics = self.pipeline.step(self.state, self.pipeline.place(batch))
            else:
                placed = self._place(batch)
                train_step = self._compile_train_step(rows_of(placed))
                self.state, metrics = train_step(self.state, placed)
        self.step = step
        stop = self.vote.cast(self.stop.signal) if self.vote else None
        tower = flops.tower_flops(self.config.model, [i.grid for row in batch.get("images", ()) for i in row])
        self.pending.append(_Pending(step, metrics, batch["document_ids"], tower, stop))
        self._collect(1)
        if train.profile_steps and step == train.profile_steps[1]:
            self._stop_profile()

        last = step == train.steps
        periodic = (
            (train.eval_interval, self._evaluate),
            (train.sample_interval, self._sample),
            (train.publish.interval, self._publish),
            (self.watch.interval if self.watch else 0, self._see),
            (train.checkpoint_interval, self._save),
        )
        due = [action for interval, action in periodic if interval and (last or step % interval == 0)]
        if due:
            self._collect(0)
            self.clock.pause()
            for action in due:
                action()
            self.clock.resume()

    def _collect(self, keep: int) -> None:
        """Reads the metrics of all steps but the newest `keep`."""
        while len(self.pending) > keep:
            pending = self.pending.popleft()
            values = {name: value.item() for name, value in jax.device_get(pending.metrics).items()}
            self.clock.tick()
            dropped = not values.pop("finite")
            if dropped or not np.isfinite([v for n, v in values.items() if n.startswith("update_rms/")]).all():
                self._nonfinite(pending, values, dropped)
            if pending.stop is not None:
                self.stopped = self.stopped or StopVote.name(int(pending.stop))
            self._report(pending.step, values, pending.tower_flops)

    def _report(self, step: int, values: dict[str, float], tower_flops: int) -> None:
        """Writes and shows the metrics of one step."""
        if self.log is None:
            return
        if self.clock.rate:
            values["tokens_per_second"] = self.tokens_per_step / self.clock.rate
            per_token = self.flops_per_token + tower_flops * jax.process_count() / self.tokens_per_step
            utilisation = flops.mfu(values["tokens_per_second"], per_token, self.peak)
            if utilisation is not None:
                values["mfu"] = utilisation
        train = self.config.train
        keep_line = step % train.log_interval == 0 or step == train.steps
        if keep_line:
            self.log.write("train", step, values)
        line = step_line(step, train.steps, values, self.clock.eta(train.steps - step))
        self.display.step(step, line, keep=keep_line)
        if self.references and (line := self.references.news()) is not None:
            self.display.print(f"held-out text in bits/byte: {line}")

    def _stop_profile(self) -> None:
        if self.profiling:
            self._collect(0)
            jax.profiler.stop_trace()
            self.profiling = False
            self.display.print(f"profile     in {self.run_dir / 'profile'}")

    def _nonfinite(self, pending: _Pending, values: dict[str, float], dropped: bool) -> None:
        """Writes down what is known of a step that is not finite, and stops unless it may be skipped.

        `dropped`: the device kept the old state. Otherwise the optimizer made NaN of a finite gradient, and it is lost.
        """
        self.skipped += 1
        budget = self.config.train.skip_nonfinite
        terms = [n for n in ("cross_entropy", "z_loss", "grad_norm") if not np.isfinite(values[n])]
        terms += [n for n, v in values.items() if n.startswith("update_rms/") and not np.isfinite(v)]
        ids = sorted(set().union(*exchange(np.unique(pending.document_ids).tolist())) - {-1})
        path = self.run_dir / f"nonfinite_step_{pending.step}.json"
        facts = {
            "step": pending.step,
            "nonfinite": terms,
            "metrics": values,
            "documents": {str(i): self.data.name(i) for i in ids},
            "skipped": self.skipped,
            "skip_nonfinite": budget,
        }
        if is_first():
            path.write_text(json.dumps(to_json(facts), indent=1))
        message = (
            f"step {pending.step} is not finite: {', '.join(terms)} (loss {values['loss']}, gradient norm "
            f"{values['grad_norm']}); documents in {path}"
        )
        if self.skipped > budget or not dropped:
            raise NonFiniteError(
                f"{message}. The last good checkpoint is step {self.store.latest or 'none'}; "
                + (f"train.skip_nonfinite ({budget}) allows no more such steps" if dropped else "the state is lost")
            )
        self.display.print(f"skipped: {message} ({self.skipped} of {budget})")

    def _evaluate(self) -> None:
        """Loss on the held-out text, with frozen router biases."""
        if not self.config.train.eval_interval:
            return
        if self.pipeline is not None:
            sums = [self.pipeline.evaluate(self.state, self.pipeline.place(b)) for b in self.eval_batches]
        else:
            sums = [self._eval_step(self._place(batch)) for batch in self.eval_batches]
        nats, tokens, size = (sum(float(s[name]) for s in sums) for name in ("nats", "tokens", "bytes"))
        values = {"loss": nats / tokens, "bits_per_byte": bits_per_byte(nats, int(size))}
        if self.log:
            self.log.write("eval", self.step, values)
        self.display.print(
            f"step {self.step}: held-out loss {values['loss']:.4f}, bits/byte {values['bits_per_byte']:.4f} "
            f"({count(tokens)} tokens)"
        )

    def _sample(self) -> None:
        """Prints and records a continuation of train.sample_prompt."""
        from k3jax.generate import generate_text  # it imports the store and more; notebooks load it first

        train, (params, bias, mesh) = self.config.train, self._model()
        rng = self.state.rng if self.pipeline is None else self.state[0].rng
        with jax.set_mesh(mesh):
            key = jax.random.fold_in(jax.random.wrap_key_data(rng), self.step)
            text = generate_text(
                served(params, self.config.model),
                bias,
                self.data.tokenizer,
                train.sample_prompt,
                max_tokens=train.sample_tokens,
                seed=int(jax.random.bits(key) >> 1),
            )
        if self.log:
            self.log.write_sample(self.step, train.sample_prompt, text)
        self.display.print(f"step {self.step}: sample\n" + "\n".join(f"  │ {line}" for line in text.splitlines()))

    def _model(self) -> tuple[Any, jax.Array, jax.sharding.Mesh]:
        """Parameters, router biases, and the mesh that they are on; of a pipeline its first rank's."""
        if self.pipeline is None:
            return self.state.params, self.state.router_bias, self.mesh
        return *self.pipeline.model(self.state), self.pipeline.meshes[0]

    def _see(self) -> None:
        """Lets the watch look at the model."""
        if self.watch is not None:
            params, bias, mesh = self._model()
            with jax.set_mesh(mesh):
                self.watch.see(self.step, params, bias)

    def _publish(self) -> None:
        """Publishes the weights after this step; its metrics have been read, so they are known to be finite."""
        assert self.publisher is not None
        params, bias, mesh = self._model()
        prompt = self.data.tokenizer.encode(self.config.train.sample_prompt) or [self.data.tokenizer.bos_id]
        with jax.set_mesh(mesh):
            self.publisher.publish(snapshot(params, bias, version=self.step, config=self.config, prompt=prompt))

    def _save(self) -> None:
        """Starts an asynchronous save; all metrics up to here have been read, so the state is known to be finite."""
        whole = self.state if self.pipeline is None else self.pipeline.whole(self.state, self.like)
        self.store.save(self.step, model=model_part(whole), training=training_part(whole), record=self.record())

    def _summary(self, steps: int) -> None:
        if self.references is None:
            return
        evals = [r for r in read_records(self.run_dir / "metrics.jsonl") if r["kind"] == "eval"]
        rows: list[tuple[str, Any]] = [
            ("run", self.run_dir),
            ("steps", f"{self.step:,} ({steps:,} now, {self.skipped} skipped)"),
            ("tokens", f"{self.step * self.tokens_per_step:,}"),
        ]
        if steps:
            speed = self.tokens_per_step * self.clock.steps / self.clock.seconds
            rows += [
                ("time", f"{duration(time.perf_counter() - self.start)}, training {duration(self.clock.seconds)}"),
                ("speed", f"{count(speed)} tokens/s"),
            ]
            utilisation = flops.mfu(speed, self.flops_per_token, self.peak)
            if utilisation is not None:
                rows.append(("MFU", f"{100 * utilisation:.1f} % of {self.peak.describe()}"))
        memory = self.mesh.devices.flat[0].memory_stats() or {}
        if "peak_bytes_in_use" in memory:
            rows.append(("peak memory", f"{memory['peak_bytes_in_use'] / 2**30:.2f} GiB a device"))
        if evals:
            rows.append(("held-out bits/byte", f"{evals[0]['bits_per_byte']:.3f} → {evals[-1]['bits_per_byte']:.3f}"))
            rows.append(("  of compressors", self.references.wait(60.0)))
        if self.data.images is not None and (skipped := self.data.images.store.skipped):
            rows.append(("bad documents", f"{len(skipped)} with images left out, {next(iter(skipped.values()))} first"))
        rows.append(("checkpoint", self._path(self.step)))
        self.display.print(summary_table(rows))

    def close(self) -> None:
        self._stop_profile()
        if self.publisher:
            self.publisher.close()
        if self.log:
            self.log.close()
