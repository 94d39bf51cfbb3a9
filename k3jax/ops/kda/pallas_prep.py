"""First KDA kernel: everything a chunk of 64 tokens computes without its incoming state.

With G the running sum of the log-decay in the chunk, Q = scale·q and k normalised (Kimi Linear, arXiv 2510.26692):

    M_ij = β_i ⟨k_i e^{G_i−G_j}, k_j⟩ (j < i)      T = (I + M)⁻¹      A_ij = ⟨Q_i e^{G_i−G_j}, k_j⟩ (j ≤ i)
    W = T β (k e^G)      U = T β v      Qb = Q e^G      Kt = k e^{G_C−G}

A decay per channel must be split between the two operands of a product, around an anchor that all their tokens share.
Levels do that with exponents that are never positive: at level b the chunk is cut in blocks of b tokens, and the pairs
with the row in an odd block and the column in the even block before it are anchored at the border between the two.
Going to level 2b multiplies the rows of odd blocks by the decay over the block before, the columns of even blocks by
that over the block after. With a gate bounded by −5 the diagonal blocks of 16 tokens are one product more, anchored at
their start (e^80 is finite); any other gate goes down to level 1.

T is built by the same levels: T ← T − T M_b T, whose entries stay within [−1, 1], so that nearly parallel keys cost no
digits (a Neumann series over a block of 16 loses all of them).

One program is one warpgroup at one chunk of one head; a multiprocessor holds two, each with all the registers that
threads can have. (Three with fewer, loading ahead from chunk to chunk, were no faster on an H200.)
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from k3jax.ops.mosaic import COLUMN, ROW, Kit, along_columns, smem

from .gates import L2_EPS, Activation

CHUNK = 64
LEVELS = 6  # log2 of the chunk
TILE = 4  # log2 of the largest block that one anchor may serve under a gate bounded by -5
LOG2_E = 1.4426950408889634
# e^-100 is 0 in what it multiplies; a steeper decay would only take the digits of the sums that it enters.
STEEPEST = -100.0 * LOG2_E


# Under the bounded gate, operands anchored at the start of 16 tokens reach e^80; half of that is taken off one of them.
# (The constant also keeps a bare minus sign off products: the compiler moves it before the wait for wgmma, and the
# assembler then runs every wgmma of the kernel one at a time.)
ANCHOR = -58  # log2

# Pallas puts a barrier before and after every store to shared memory. Most are not needed here: a warp writes only rows
# that it alone reads, `Kit.all_warps` stands between a product and the first write to its operands, and a commit
# wherever one warp reads what another wrote.
COMPILER = plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True)
STRIP = 64  # channels that a warpgroup handles at a time; in `gradients`, all that it has
MARKS = 5  # rows of `Tokens.rows`


class Tokens(NamedTuple):
    """Which tokens of each chunk are real, belong together, read the incoming state and write to the outgoing one.

    Rows of `rows` [5, N] float32: document within the chunk, real, reads, writes, document again (of two loads of a row
    the compiler makes one, and seeks a layout to serve rows and columns in vain). `keeps` [N / 64] float32: 1 where the
    state passes through the chunk, 0 where a document ends in it.
    """

    rows: jax.Array
    keeps: jax.Array


class Prepared(NamedTuple):
    """What `prepare` returns: bfloat16 but for the decay. N tokens, H heads, 64 tokens a chunk."""

    w: jax.Array  # [H, N, K], −W
    q: jax.Array  # [H, N, K], Qb
    k: jax.Array  # [H, N, K], Kt
    u: jax.Array  # [H, N, V]
    a: jax.Array  # [H, N, 64]
    decay: jax.Array  # [H, N / 64, K] float32, e^{G_C}
    inverse: jax.Array  # [H, N, 64], T


def first_level(how: Activation) -> int:
    """log2 of the smallest blocks: under 16, levels replace the product over diagonal blocks of 16."""
    return TILE if how.gate == "lower_bound" else 0


def log2_gate(raw: jax.Array, rate: Any, bias: jax.Array | None, how: Activation) -> jax.Array:
    """Log-decay in units of ln 2 from the raw gate of a tile."""
    if how.gate == "none":
        return jnp.maximum(raw * LOG2_E, STEEPEST)
    if how.gate == "lower_bound":
        slope = rate * -LOG2_E
        z = raw * slope if bias is None else raw * slope + along_columns(bias * slope, raw.shape)
        return (how.lower_bound * LOG2_E) / (1.0 + jnp.exp2(z))
    z = raw if bias is None else raw + along_columns(bias, raw.shape)
    softplus = jnp.maximum(z, 0.0) * LOG2_E + jnp.log2(1.0 + jnp.exp2(jnp.abs(z) * -LOG2_E))
    return jnp.maximum(-rate * softplus, STEEPEST)


def block_of(i: jax.Array, shift) -> jax.Array:
    """Index of the block of 2^shift tokens that a token lies in."""
    return lax.shift_right_logical(i, lax.broadcast(jnp.int32(shift), i.shape))


def is_odd(i: jax.Array) -> jax.Array:
    return (i & 1) == 1


def same_block(shift):
    """Mask of the tokens of the row's block of 2^shift tokens."""
    return lambda r, c: block_of(r, shift) == block_of(c, shift)


def since_block(shift):
    """Mask of the tokens from the start of the row's block of 2^shift tokens to the row, inclusive."""
    return lambda r, c: same_block(shift)(r, c) & (r >= c)


def to_block_end(shift):
    """Mask of the tokens after the row, to the end of its block."""
    return lambda r, c: same_block(shift)(r, c) & (c > r)


def other_block(shift):
    """Mask of the block that its level pairs with the row's."""
    return lambda r, c: (block_of(r, shift) ^ 1) == block_of(c, shift)


def level_pairs(shift):
    """Mask of the (row, column) pairs of a level."""
    return lambda r, c: is_odd(block_of(r, shift)) & (block_of(c, shift) + 1 == block_of(r, shift))


class Loads:
    """Copies into shared memory, (source, target) by the name under which each is waited for."""

    def __init__(self, copies: dict[str, tuple[Any, Any]], barriers):
        self._copies, self._barriers = copies, barriers

    def start(self) -> None:
        for i, (source, target) in enumerate(self._copies.values()):
            plgpu.copy_gmem_to_smem(source, target, self._barriers.at[i])

    def wait(self, *names: str) -> None:
        for name in names:
            plgpu.barrier_wait(self._barriers.at[list(self._copies).index(name)])


class Tile:
    """What the kernels ask of the tokens of one chunk. `marks` is `Tokens.rows` in shared memory, or None."""

    def __init__(self, kit: Kit, marks):
        self._kit, self._marks = kit, marks

    def row_vector(self, ref) -> jax.Array:
        """[64], one value a row."""
        return self._kit.load(ref, ROW, optimized=False)

    def flagged(self, x: jax.Array, row: int) -> jax.Array:
        """Times a row of the marks: 2 reads the state, 3 writes it."""
        return x if self._marks is None else x * self._kit.along_rows(self.row_vector(self._marks.at[row]), x.shape)

    def real(self, x: jax.Array) -> jax.Array:
        """Zeros where no token is, whatever is there."""
        if self._marks is None:
            return x
        return jnp.where(self._kit.along_rows(self.row_vector(self._marks.at[1]), x.shape) > 0.5, x, 0.0)

    def indices(self, columns: int = CHUNK, offset: Any = 0) -> tuple[jax.Array, jax.Array]:
        shape = (CHUNK, columns)
        return self._kit.iota(shape, 0), self._kit.iota(shape, 1) + offset

    def allowed(self, mask: jax.Array, offset: Any = 0) -> jax.Array:
        """`mask` [64, columns from `offset`] without pairs of tokens of two documents."""
        if self._marks is None:
            return mask
        own = self.row_vector(self._marks.at[0])
        columns = pl.ds(offset, mask.shape[1])
        other = self._kit.load(self._marks.at[4, columns], COLUMN, optimized=False)
        return mask & (self._kit.along_rows(own, mask.shape) == self._kit.along_columns(other, mask.shape))

    def ones_where(self, mask, dtype: Any = jnp.float16, within_documents: bool = False) -> jax.Array:
        """[64, 64] in registers, the left operand of a product that sums over the tokens mask(row, column)."""
        picked = mask(*self.indices())
        return jnp.where(self.allowed(picked) if within_documents else picked, 1.0, 0.0).astype(dtype)


def inverse(kit: Kit, minus_m: jax.Array, zero: jax.Array, t_s, y_s) -> jax.Array:
    """(I + M)⁻¹ [64, 64] float32 from −M, strictly lower triangular; two tiles of scratch.

    Products are of float16: entries of M and T lie within [−1, 1].
    """
    shape = (CHUNK, CHUNK)
    r, c = kit.iota(shape, 0), kit.iota(shape, 1)

    def seen(shift):
        """What level `shift` sees of −M."""
        return jnp.where(level_pairs(shift)(r, c), minus_m, zero).astype(jnp.float16)

    t = jnp.where(r == c, 1.0, jnp.where(level_pairs(0)(r, c), minus_m, zero))
    for shift in range(1, LEVELS):
        t16 = t.astype(jnp.float16)
        kit.store(t_s, t16)
        plgpu.commit_smem()
        kit.store(y_s, kit.mm(shape, (seen(shift), t_s)).astype(jnp.float16))
        plgpu.commit_smem()
        t = kit.mm_acc(t, (t16, y_s))
    return t


def prepare(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    rate: jax.Array,
    bias: jax.Array,
    tokens: Tokens | None,
    how: Activation,
    *,
    interpret: bool = False,
) -> Prepared:
    """Run the kernel. N is a multiple of 64, K = V is 64 or 128.

    Args:
      q, k, v, g: [N, H, K] bfloat16.
      beta: [H, N] float32 in (0, 1), 0 where a token is not real.
      rate: [H] float32, e^A_log (ignored without a gate). bias: [H, K] float32.
    """
    n, heads, dim = q.shape
    kit = Kit(interpret)
    strip, square = (CHUNK, STRIP), (CHUNK, CHUNK)
    strips = [pl.ds(i, STRIP) for i in range(0, dim, STRIP)]
    bf16, f16, f32 = jnp.bfloat16, jnp.float16, jnp.float32
    marked = tokens is not None
    bounded = how.gate == "lower_bound"
    first = first_level(how)

    def body(q_g, k_g, v_g, g_g, b_g, rate_g, bias_g, *refs):
        rows_g: Any = None
        keeps_g: Any = None
        if marked:
            rows_g, keeps_g, *refs = refs
        w_g, qo_g, ko_g, u_g, a_g, decay_g, t_g, tiles, gates, last, small, full = refs
        qs, ks, xs, vs, a_s = (tiles[name] for name in "qkxva")
        g_raw, g16, (work, work2) = gates
        ones, t_s = last
        tile_i, h = lax.axis_index("t"), lax.axis_index("h")
        tokens_i = pl.ds(tile_i * CHUNK, CHUNK)
        tile = Tile(kit, small.get("marks"))

        def get(ref, at):
            return kit.load(ref.at[:, at]).astype(f32)

        def put(ref, at, value):
            kit.store(ref.at[:, at], value.astype(ref.dtype))

        copies = {
            "g": (g_g.at[tokens_i, h], g_raw),
            "q": (q_g.at[tokens_i, h], qs),
            "k": (k_g.at[tokens_i, h], ks),
            "v": (v_g.at[tokens_i, h], vs),
            "beta": (b_g.at[h, tokens_i], small["beta"]),
            "bias": (bias_g.at[h], small["bias"]),
        }
        if marked:
            copies["marks"] = rows_g.at[:, tokens_i], small["marks"]
        loads = Loads(copies, full)
        loads.start()

        # Gates.
        loads.wait("g", *small)
        rate_h = None if how.gate == "none" else rate_g[h]
        for at in strips:
            bias_v = None if how.gate == "none" else kit.load(small["bias"].at[at], COLUMN, optimized=False)
            put(g16, at, tile.real(log2_gate(tile.real(get(g_raw, at)), rate_h, bias_v, how)))
        kit.store(ones, kit.full(square, 1.0, f16))
        plgpu.commit_smem()

        def times(ref, at, factor):
            """In bfloat16: half the instructions, and one rounding more."""
            kit.store(ref.at[:, at], kit.load(ref.at[:, at]) * factor.astype(bf16))

        def sums(mask, at):
            return kit.mm(strip, (tile.ones_where(mask), g16.at[:, at]))

        # Queries and keys, anchored as the first level's scores want them; the latter times −β.
        beta = tile.row_vector(small["beta"])
        minus_beta = kit.along_rows(beta * -1.0, strip)
        # A zero that the compiler does not know: it would move selects between a value and 0 past the conversion to 16
        # bits, where they cost three times as much.
        zero = kit.along_rows(beta * 0.0, square)

        def norm(ref) -> Any:
            """One over each row's: the tensor cores square and add."""
            if not how.qk_l2norm:
                return 1.0
            r, c = tile.indices()
            squares = jnp.sum(jnp.where(r == c, kit.mm(square, (ref, kit.t(ref))), 0.0), axis=1)
            return kit.along_rows(lax.rsqrt(squares + L2_EPS), strip)

        loads.wait("q", "k")
        norm_q, norm_k = norm(qs) * how.scale, norm(ks)
        kit.all_warps()
        itself = []
        for at in strips:
            since = sums(since_block(first), at)
            up = jnp.exp2(since)
            x, y = tile.real(get(qs, at) * norm_q), tile.real(get(ks, at) * norm_k)
            if not bounded:
                itself.append(jnp.sum(x * y, axis=1))  # a token's pair with itself, which no level has
            put(qs, at, x * up)
            put(ks, at, y * up * minus_beta)
            put(xs, at, y * jnp.exp2(ANCHOR - since) if bounded else y)
        plgpu.commit_smem()

        # Scores, level by level: A and −M.
        def scores():
            sq, sk = kit.mm(square, (qs, kit.t(xs))), kit.mm(square, (ks, kit.t(xs)))
            kit.all_warps()
            return sq, sk

        if bounded:
            sq, sk = scores()
            r, c = tile.indices()
            same = tile.allowed(same_block(TILE)(r, c))
            a, m = jnp.where(same & (r >= c), sq, 0.0) * 2.0**-ANCHOR, jnp.where(same & (r > c), sk, 0.0) * 2.0**-ANCHOR
            for at in strips:
                times(xs, at, jnp.exp2(sums(same_block(TILE), at) - ANCHOR))
            plgpu.commit_smem()
        else:
            r, c = tile.indices()
            a = jnp.where(r == c, kit.along_rows(functools.reduce(jnp.add, itself), square), 0.0)
            m = jnp.zeros_like(a)

        def level(shift, scores_so_far):
            a, m = scores_so_far
            sq, sk = scores()
            pairs = tile.allowed(level_pairs(shift)(*tile.indices()))
            a, m = jnp.where(pairs, sq, a), jnp.where(pairs, sk, m)
            odd = (block_of(kit.iota(strip, 0), shift) & 1).astype(f32)  # decays are at most 1: a maximum selects
            for at in strips:
                factor = jnp.exp2(sums(other_block(shift), at))
                rows = jnp.maximum(factor, 1.0 - odd)
                put(qs, at, get(qs, at) * rows)
                put(ks, at, get(ks, at) * rows)
                times(xs, at, jnp.maximum(factor, odd))
            plgpu.commit_smem()
            return a, m

        if bounded:
            for shift in range(first, LEVELS):
                a, m = level(shift, (a, m))
        else:
            a, m = lax.fori_loop(first, LEVELS, level, (a, m))
        kit.store(a_s, a.astype(bf16))
        if marked:
            for at in strips:
                for ref, flag in ((qs, 2), (ks, 2), (xs, 3)):
                    put(ref, at, tile.flagged(get(ref, at), flag))

        # Decay over the chunk: with channels as rows it is one value a row.
        for at in strips:
            total = kit.mm((STRIP, 8), (kit.t(g16.at[:, at]), kit.t(ones.at[pl.ds(0, 8)])))
            decay = jnp.exp2(jnp.max(total, axis=1))
            decay_g[h, tile_i, at] = decay * keeps_g[tile_i] if marked else decay
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(qs, qo_g.at[h, tokens_i])
        plgpu.copy_smem_to_gmem(xs, ko_g.at[h, tokens_i])
        plgpu.copy_smem_to_gmem(a_s, a_g.at[h, tokens_i])

        # T, and with it W and U.
        t = inverse(kit, m, zero, work, work2).astype(bf16)
        kit.store(t_s, t)
        loads.wait("v")
        for at in strips:
            put(vs, at, tile.real(get(vs, at)) * kit.along_rows(beta, strip))
        plgpu.commit_smem()
        for at in strips:
            w, u = kit.mm(strip, (t, ks.at[:, at])), kit.mm(strip, (t, vs.at[:, at]))
            kit.all_warps()
            put(ks, at, w)
            put(vs, at, u)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(t_s, t_g.at[h, tokens_i])
        plgpu.copy_smem_to_gmem(ks, w_g.at[h, tokens_i])
        plgpu.copy_smem_to_gmem(vs, u_g.at[h, tokens_i])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def tokens_like(columns):
        return jax.ShapeDtypeStruct((heads, n, columns), bf16)

    wide = smem((CHUNK, dim), bf16)
    kernel = kit.kernel(
        body,
        out_type=[
            *[tokens_like(dim)] * 4,
            tokens_like(CHUNK),
            jax.ShapeDtypeStruct((heads, n // CHUNK, dim), f32),
            tokens_like(CHUNK),
        ],
        grid=(n // CHUNK, heads),
        grid_names=("t", "h"),
        num_threads=1,
        thread_name="wg",
        scratch_types=[
            {**dict.fromkeys("qkxv", wide), "a": smem(square, bf16)},
            kit.union(wide, smem((CHUNK, dim), f16), [smem(square, f16)] * 2),
            kit.union(smem(square, f16), smem(square, bf16)),
            {
                "beta": plgpu.SMEM((CHUNK,), f32),
                "bias": plgpu.SMEM((dim,), f32),
                **({"marks": plgpu.SMEM((MARKS, CHUNK), f32)} if marked else {}),
            },
            plgpu.Barrier(num_barriers=7 if marked else 6),
        ],
        compiler_params=COMPILER,
    )
    marks = (tokens.rows, tokens.keeps) if tokens is not None else ()
    return Prepared(*kernel(q, k, v, g, beta, rate, bias, *marks))
