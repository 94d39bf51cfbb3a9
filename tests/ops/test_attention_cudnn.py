"""Attention on cuDNN: what surrounds its kernels, on a CPU with stand-ins for them; the kernels on a GPU."""

from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from k3jax.ops.attention import attention, blockwise, cudnn, fused, max_logit_pass, peak, resolve_implementation
from k3jax.ops.mosaic import h200_mesh

WIDTHS = {"key_width": 192, "value_width": 128}


def runs(lengths, T):
    """[1, T] documents of these lengths from 1 on (negative: padding), the rest padding."""
    ids, number = [], 0
    for n in lengths:
        number += n > 0
        ids += [number if n > 0 else 0] * abs(n)
    return np.array([(ids + [0] * T)[:T]], np.int32)


def make(seed, B, T, H=2, K=24, V=16, dtype="float32", spread=1.0):
    rng = np.random.default_rng(seed)
    shapes = (B, T, H, K), (B, T, H, K), (B, T, H, V)
    return tuple((spread * rng.standard_normal(shape)).astype(jnp.dtype(dtype)) for shape in shapes)


def value_and_grads(run, arrays):
    def both(arrays, d_o):
        o, pullback = jax.vjp(run, *arrays)
        return o, *pullback(d_o.astype(o.dtype))

    d_o = np.random.default_rng(9).standard_normal((*arrays[0].shape[:3], arrays[2].shape[-1]))
    return jax.tree.map(np.asarray, jax.jit(both)(arrays, d_o))


def relative(a, b):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return np.linalg.norm(a - b) / np.linalg.norm(b)


def stand_in_mask(q, k, lengths):
    T, S = q.shape[1], k.shape[1]
    if lengths is None:
        return jnp.tril(jnp.ones((1, 1, T, S), bool))
    (q_length, kv_length), rows = lengths, jnp.arange(T)
    return (rows[:, None] < q_length[:, None, None, None]) & (jnp.arange(S) < kv_length[:, None, None, None])


def stand_in_forward(q, k, v, *, scale, lengths=None):
    """As cuDNN, with NaN where its output is unspecified."""
    logits = jnp.where(stand_in_mask(q, k, lengths), jnp.einsum("bthk,bshk->bhts", q, k) * scale, -jnp.inf)
    lse = jax.nn.logsumexp(logits, axis=-1)
    o = jnp.einsum("bhts,bshv->bthv", jnp.exp(logits - lse[..., None]), v)
    return o.astype(v.dtype), jnp.where(jnp.isneginf(lse), jnp.nan, lse)


def stand_in_backward(q, k, v, o, lse, d_o, *, scale, lengths=None):
    mask = stand_in_mask(q, k, lengths)
    p = jnp.where(mask, jnp.exp(jnp.einsum("bthk,bshk->bhts", q, k) * scale - lse[..., None]), 0)
    delta = jnp.einsum("bthv,bthv->bht", o, d_o)[..., None]
    ds = p * (jnp.einsum("bthv,bshv->bhts", d_o, v) - delta) * scale
    used_q, used_k = (jnp.any(mask, axis=axis)[:, 0] for axis in (-1, -2))
    dq, dk = jnp.einsum("bhts,bshk->bthk", ds, k), jnp.einsum("bhts,bthk->bshk", ds, q)
    dv = jnp.einsum("bhts,bthv->bshv", p, d_o)
    nan = lambda used, x: jnp.where(used[..., None, None], x, jnp.nan)  # noqa: E731
    return nan(used_q, dq), nan(used_k, dk), nan(used_k, dv)


@pytest.fixture
def stand_ins(monkeypatch):
    monkeypatch.setattr(cudnn, "refusal", lambda *_: None)
    monkeypatch.setattr(cudnn, "forward", stand_in_forward)
    monkeypatch.setattr(cudnn, "backward", stand_in_backward)


DOCUMENTS = [
    ([64], 64),
    ([200], 200),  # one document, several levels
    ([1] * 37, 37),  # as many documents as tokens
    ([5, 1, 15, 16, 17, 2, 63, 64, 65, 31], 300),
    ([-3, 20, -2, 50, -40, 9], 131),  # padding before, between and after
    ([], 40),  # nothing but padding
    ([7], 7),
]


@pytest.mark.parametrize(("lengths", "T"), DOCUMENTS)
@pytest.mark.parametrize("tile", [8, 24, 512])
def test_squares_and_tiles_add_up_to_document_attention(x64, stand_ins, lengths, T, tile):
    ids = np.concatenate([runs(lengths, T), runs([T], T), runs([T // 2, T], T)])
    arrays = make(T, 3, T, dtype="float64")
    run = partial(attention, scale=0.3, segment_ids=ids, return_max_logit=False)
    got = value_and_grads(lambda *x: run(*x, implementation="cudnn", block_size=tile)[0], arrays)
    want = value_and_grads(lambda *x: run(*x, implementation="reference")[0], arrays)
    for a, b in zip(got, want):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-11 * max(1, np.abs(b).max(initial=0)))
        assert np.all(a[ids == 0] == 0)


@pytest.mark.parametrize("odd", ["padding inside a document", "a document that comes back", "decreasing ids"])
def test_documents_that_are_not_runs_are_exact_too(x64, stand_ins, odd):
    ids = runs([13, 20, 15], 48)
    if odd == "padding inside a document":
        ids[0, 20] = 0
    elif odd == "a document that comes back":
        ids[ids == 3] = 1
    else:
        ids = np.where(ids > 0, 4 - ids, 0)
    assert not fused.are_runs(ids)
    arrays = make(3, 1, 48, dtype="float64")
    run = partial(attention, scale=0.3, segment_ids=ids, return_max_logit=False)
    got = value_and_grads(lambda *x: run(*x, implementation="cudnn", block_size=8)[0], arrays)
    for a, b in zip(got, value_and_grads(lambda *x: run(*x, implementation="reference")[0], arrays)):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-11 * np.abs(b).max())


def test_runs_are_recognised():
    assert all(bool(fused.are_runs(runs(lengths, T))) for lengths, T in DOCUMENTS)
    assert fused.are_runs(np.array([[2, 2, 5, 0, 9, 9], [0, 0, 7, 7, 8, 0]], np.int32))
    assert not fused.are_runs(np.array([[1, 1, 2, 2], [1, 2, 1, 1]], np.int32))


@pytest.mark.parametrize("T", [1, 2, 100, 128, 129, 300, 4096, 5000])
def test_tiles_cover_the_row_with_little_to_spare(T):
    plan = fused.split(1.0, T, 128)
    covered = plan.tile << plan.levels
    assert plan.tile <= 128
    assert plan.tile % 8 == 0
    assert T <= covered < T + (8 << plan.levels)


def test_no_square_of_the_sequence_length_with_documents(stand_ins, monkeypatch):
    """Squares are cuDNN's own: nothing outside its kernels grows faster than T · tile."""
    calls = []

    def forward(q, k, v, **options):
        calls.append(q.shape)
        return jnp.zeros((*q.shape[:3], v.shape[-1]), q.dtype), jnp.zeros((q.shape[0], q.shape[2], q.shape[1]))

    monkeypatch.setattr(cudnn, "forward", forward)
    T, tile = 4096, 128
    run = partial(fused._forward, fused.split(1.0, T, tile))
    arrays = [jax.ShapeDtypeStruct((1, T, 1, 8), jnp.bfloat16)] * 3
    jaxpr = jax.make_jaxpr(run)(*arrays, jax.ShapeDtypeStruct((1, T), jnp.int32))
    assert max(int(np.prod(v.aval.shape)) for eqn in jaxpr.eqns for v in eqn.outvars) <= T * tile
    assert [shape[:2] for shape in calls] == [(16, 128), (8, 256), (4, 512), (2, 1024), (1, 2048)]


@pytest.mark.parametrize("T", [1, 7, 40, 97])
@pytest.mark.parametrize("documents", [False, True])
def test_pass_for_the_largest_logit_equals_the_reference(T, documents):
    q, k, v = make(T, 2, T, dtype="bfloat16", spread=3.0)
    ids = np.concatenate([runs([5, 1, 30, -4, 20], T), runs([-T], T)]) if documents else None
    want = attention(q, k, v, scale=0.7, segment_ids=ids, implementation="reference")[1]
    got = jnp.max(blockwise.largest_logit(q, k, ids, 0.7, 16), axis=0)
    np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize("T", [64, 128, 290])
@pytest.mark.parametrize("documents", [False, True])
def test_kernel_for_the_largest_logit_equals_the_blocks(T, documents):
    q, k, _ = make(T, 2, T, K=64, dtype="bfloat16", spread=3.0)
    q, k = -np.abs(q), np.abs(k)  # a hidden pair or one of the filling would be the largest
    ids = np.concatenate([runs([5, 1, 130, -4, 100], T), runs([-T], T)]) if documents else None
    want = blockwise.largest_logit(q, k, ids, 0.7, 64)
    got = jax.jit(partial(peak.largest_logit, scale=0.7, interpret=True))(q, k, ids)
    np.testing.assert_allclose(got, want, rtol=1e-6)


def test_kernel_for_the_largest_logit_lowers_for_hopper():
    arrays = [jax.ShapeDtypeStruct((2, 700, 3, 192), jnp.bfloat16)] * 2 + [jax.ShapeDtypeStruct((2, 700), jnp.int32)]
    with jax.sharding.use_abstract_mesh(h200_mesh()):
        text = (
            jax.jit(partial(peak.largest_logit, scale=0.7)).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
        )
    assert "mosaic_gpu" in text


@pytest.mark.parametrize(
    ("reason", "dtype", "width"), [("bfloat16", "float32", 192), ("multiple of 64", "bfloat16", 96)]
)
def test_kernel_for_the_largest_logit_says_what_it_does_not_take(reason, dtype, width):
    assert reason in str(peak.refusal(dtype, width))
    assert max_logit_pass(dtype, width) == "xla"


def test_largest_logit_does_not_count_hidden_pairs(stand_ins):
    q, k, v = (-1 - np.abs(make(1, 1, 40)[0]), 1 + np.abs(make(2, 1, 40)[0]), make(3, 1, 40)[2])
    ids = runs([-2, 11, 20], 40)
    want = attention(q, k, v, scale=1.0, segment_ids=ids, implementation="reference")[1]
    assert np.all(want < -12)
    np.testing.assert_allclose(attention(q, k, v, scale=1.0, segment_ids=ids, implementation="cudnn")[1], want, 1e-6)
    nothing = attention(q, k, v, scale=1.0, segment_ids=np.zeros_like(ids), implementation="cudnn")[1]
    assert np.all(np.isneginf(nothing))


def test_largest_logit_is_computed_only_when_asked_for(stand_ins, monkeypatch):
    run = partial(attention, *make(1, 1, 16), scale=1.0, implementation="cudnn")
    assert np.all(np.isfinite(run()[1]))
    monkeypatch.setattr(blockwise, "largest_logit", lambda *_: pytest.fail("computed"))
    assert np.all(np.isneginf(run(return_max_logit=False)[1]))


@pytest.mark.parametrize("read", [True, False])
def test_a_largest_logit_that_nobody_reads_is_not_computed(stand_ins, monkeypatch, read):
    """Through layers, remat, gradients and micro-batches, as in a training step."""

    def layer(x, w):
        q = x @ w
        o, peak = attention(q, q, q, scale=1.0, implementation="cudnn")
        return x + o.astype(x.dtype), jnp.max(peak)

    def loss(ws, x):
        x, peaks = jax.lax.scan(jax.checkpoint(layer, prevent_cse=False), x, ws)
        return jnp.sum(x**2), jnp.max(peaks)

    def step(ws, batches):
        def micro(total, x):
            grads, peak = jax.grad(loss, has_aux=True)(ws, x)
            return (total[0] + grads, jnp.maximum(total[1], peak)), None

        grads, peak = jax.lax.scan(micro, (jnp.zeros_like(ws), jnp.float32(-jnp.inf)), batches)[0]
        return (grads, peak) if read else grads

    monkeypatch.setattr(blockwise, "largest_logit", lambda q, *_, **__: jnp.sum(jnp.cbrt(q), (1, 3)))
    text = jax.jit(step).lower(jnp.ones((3, 8, 8)), jnp.ones((2, 1, 16, 2, 8))).compile().as_text()
    assert ("cbrt" in text) == read


def hopper(monkeypatch, capability="9.0", version=91002, kind="NVIDIA H200"):
    device = SimpleNamespace(platform="gpu", device_kind=kind, compute_capability=capability)
    monkeypatch.setattr(cudnn.jax, "devices", lambda: [device])
    monkeypatch.setattr(cudnn.private, "check_cudnn_version", lambda: version)


def test_without_a_gpu_cudnn_is_refused_and_nothing_named_runs_xla():
    assert resolve_implementation(dtype="bfloat16", **WIDTHS) == "xla"
    with pytest.raises(ValueError, match="'cudnn' cannot run: it needs an NVIDIA GPU, the first device is 'cpu'"):
        resolve_implementation("cudnn", dtype="bfloat16", **WIDTHS)
    with pytest.raises(ValueError, match="needs an NVIDIA GPU"):
        attention(*make(1, 1, 8, dtype="bfloat16"), scale=1.0, implementation="cudnn")


@pytest.mark.parametrize(
    ("reason", "machine", "inputs"),
    [
        ("compute capability 9.0 .* this GPU has 8.0", {"capability": "8.0"}, {}),
        ("needs an NVIDIA GPU", {"kind": "AMD Instinct MI300X"}, {}),
        ("must be bfloat16, they are float32", {}, {"dtype": "float32"}),
        ("multiples of 8, they are 12", {}, {"key_width": 12, "value_width": 8}),
        ("v width ≤ q, k width ≤ 256", {}, {"key_width": 320}),
        ("v width ≤ q, k width ≤ 256", {}, {"key_width": 64}),
        ("same tokens", {}, {"self_attention": False}),
    ],
)
def test_refusals_name_the_condition(monkeypatch, reason, machine, inputs):
    hopper(monkeypatch, **machine)
    inputs = {"dtype": "bfloat16", **WIDTHS} | inputs
    with pytest.raises(ValueError, match=reason):
        resolve_implementation("cudnn", **inputs)
    assert resolve_implementation(**inputs) == "xla"
    assert resolve_implementation("reference", **inputs) == "reference"


def test_missing_cudnn_and_moved_entry_are_refused(monkeypatch):
    hopper(monkeypatch)
    assert resolve_implementation(dtype="bfloat16", **WIDTHS) == "cudnn"

    def missing():
        raise RuntimeError("cuDNN is not detected.")

    monkeypatch.setattr(cudnn.private, "check_cudnn_version", missing)
    assert "no cuDNN" in str(cudnn.refusal("bfloat16", 192, 128))
    monkeypatch.setattr(cudnn, "private", None)
    assert "where this version of k3jax looks" in str(cudnn.refusal("bfloat16", 192, 128))


def test_offsets_and_other_keys_stay_off_cudnn(stand_ins):
    q, k, v = make(1, 1, 8)
    for options in ({"q_offset": 1}, {"q_offset": jnp.array(0)}):
        with pytest.raises(ValueError, match="same tokens"):
            attention(q, k, v, scale=1.0, implementation="cudnn", **options)
        assert attention(q, k, v, scale=1.0, **options)[0].shape == (1, 8, 2, 16)
    with pytest.raises(ValueError, match="same tokens"):
        attention(q[:, :4], k, v, scale=1.0, implementation="cudnn")


def lowered(monkeypatch, version, ids):
    hopper(monkeypatch, version=version)
    monkeypatch.setattr(cudnn.private, "check_compute_capability", lambda _: True)
    monkeypatch.setattr(cudnn.private, "is_cuda_compute_capability_equal", lambda _: False)
    run = partial(attention, scale=192**-0.5, segment_ids=ids, implementation="cudnn", return_max_logit=False)
    grad = jax.grad(lambda *x: jnp.sum(run(*x)[0] ** 2), (0, 1, 2))
    arrays = [jax.ShapeDtypeStruct((2, 512, 3, n), jnp.bfloat16) for n in (192, 192, 128)]
    return jax.jit(grad).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(("version", "width"), [(91002, 128), (90800, 192)])
def test_lowers_for_cuda_with_narrow_values_where_cudnn_has_them(monkeypatch, version, width):
    text = lowered(monkeypatch, version, None)
    calls = [line for line in text.splitlines() if "@__cudnn$fmhaSoftmax" in line]
    assert len(calls) == 2
    assert all("CAUSAL" in line and "PADDING" not in line for line in calls)
    assert all(f"2x512x3x{width}xbf16" in line and "2x3x512xf32" in line for line in calls)


def test_documents_lower_to_rectangles(monkeypatch):
    text = lowered(monkeypatch, 91002, jnp.ones((2, 512), jnp.int32))
    calls = [line for line in text.splitlines() if "@__cudnn$fmhaSoftmax" in line]
    assert len(calls) == 4
    assert all("PADDING" in line and "CAUSAL" not in line for line in calls)


@pytest.mark.parametrize("checked", [True, False])
def test_rows_on_several_devices_change_nothing(x64, stand_ins, checked):
    arrays = make(2, 8, 40, dtype="float64")
    ids = np.concatenate([runs([5, 20, 9], 40), runs([40], 40), runs([3, -1, 30], 40), runs([], 40)] * 2)
    ids[5, 7] = 0  # one device's documents are not runs
    loss = lambda q, k, v, ids: jnp.sum(  # noqa: E731
        attention(q, k, v, scale=0.3, segment_ids=ids, block_size=8, implementation="cudnn")[0] ** 2
    )
    want = jax.jit(jax.grad(loss, (0, 1, 2)))(*arrays, ids)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        sharded = [jax.device_put(x, P("data")) for x in (*arrays, ids)]
        rows = jax.shard_map(lambda *x: loss(*x)[None], in_specs=P("data"), out_specs=P("data"), check_vma=checked)
        got = jax.jit(jax.grad(lambda *x: jnp.sum(rows(*x)), (0, 1, 2)))(*sharded)
    for a, b in zip(got, want):
        np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-12)


@pytest.mark.gpu
@pytest.mark.parametrize(("lengths", "T"), [(None, 256), (None, 300), *DOCUMENTS])
def test_cudnn_equals_the_reference_on_a_gpu(lengths, T):
    arrays = make(T, 2, T, H=3, K=192, V=128, dtype="bfloat16")
    ids = None if lengths is None else np.concatenate([runs(lengths, T), runs([T // 3, T], T)])
    run = partial(attention, scale=192**-0.5, segment_ids=ids)
    wide = tuple(x.astype(np.float32) for x in arrays)
    want = value_and_grads(lambda *x: run(*x, implementation="reference")[0], wide)
    got = value_and_grads(lambda *x: run(*x, implementation="cudnn")[0], arrays)
    for a, b in zip(got, want):
        assert np.all(np.isfinite(np.asarray(a, np.float32)))
        assert relative(a, b) < 1e-2
        if ids is not None:
            assert np.all(np.asarray(a, np.float32)[ids == 0] == 0)
    peaks = [run(*arrays, implementation=name)[1] for name in ("cudnn", "reference")]
    np.testing.assert_allclose(*peaks, rtol=1e-6)
