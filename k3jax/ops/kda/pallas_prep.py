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

One thread of control is one warpgroup; each owns 64 of the K channels.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from k3jax.ops.mosaic import COLUMN, ROW, Kit, along_columns, along_rows, smem

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
# that it alone reads, `Kit.all_warps` stands between a product and the first write to its operands, and `Team.sync`
# wherever warpgroups meet. They stay until the kernels have been run without them.
COMPILER = plgpu.CompilerParams(approx_math=True)
STRIP = 32  # channels that a warpgroup handles at a time: what its registers hold without spilling
# By head width: warpgroups that share a tile, and tiles of a program.
PREPARE_TEAM = {128: (2, 2), 64: (2, 1)}


class Tokens(NamedTuple):
    """Which tokens of each chunk are real, belong together, read the incoming state and write to the outgoing one.

    Rows of `rows` [4, N] float32: document within the chunk, real, reads, writes. `keeps` [N / 64] float32: 1 where the
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
    z = raw if bias is None else raw + along_columns(bias, raw.shape)
    if how.gate == "lower_bound":
        return (how.lower_bound * LOG2_E) / (1.0 + jnp.exp2(z * (rate * -LOG2_E)))
    softplus = jnp.maximum(z, 0.0) * LOG2_E + jnp.log2(1.0 + jnp.exp2(jnp.abs(z) * -LOG2_E))
    return jnp.maximum(-rate * softplus, STEEPEST)


def block_of(i: jax.Array, shift) -> jax.Array:
    """Index of the block of 2^shift tokens that a token lies in."""
    return lax.shift_right_logical(i, lax.broadcast(jnp.int32(shift), i.shape))


def is_odd(i: jax.Array) -> jax.Array:
    return (i & 1) == 1


def since_block(shift):
    """Mask of the tokens from the start of the row's block of 2^shift tokens to the row, inclusive."""
    return lambda r, c: (block_of(r, shift) == block_of(c, shift)) & (r >= c)


def to_block_end(shift):
    """Mask of the tokens after the row, to the end of its block."""
    return lambda r, c: (block_of(r, shift) == block_of(c, shift)) & (c > r)


def other_block(shift):
    """Mask of the block that its level pairs with the row's."""
    return lambda r, c: (block_of(r, shift) ^ 1) == block_of(c, shift)


def level_pairs(shift):
    """Mask of the (row, column) pairs of a level."""
    return lambda r, c: is_odd(block_of(r, shift)) & (block_of(c, shift) + 1 == block_of(r, shift))


class Scratch:
    """A kernel's shared memory by name, tiles [program's tiles, ...] seen at one of them.

    Each stage sees it at addresses of its own. Otherwise the compiler computes every address and descriptor of the
    kernel once, keeps them all in registers, and spills the tiles: `zero` [1] holds a 0 that it cannot know.
    """

    def __init__(self, named: dict[str, Any], index, zero):
        self._named, self._index, self._zero = named, index, zero
        self.move()

    def move(self) -> None:
        """To be called where a stage begins, and after a loop whose body called it."""
        at = self._index + self._zero[0]
        self.__dict__.update({name: ref.at[at] for name, ref in self._named.items()})

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


class Team:
    """The warpgroups that share a tile. They take turns at building masks in shared memory, in strips of columns.

    Masks are matrices of zeros and ones that wgmma reads from shared memory: kept in registers, they would leave no
    room for anything else.
    """

    def __init__(self, kit: Kit, wg, groups: int, meet, exchange, marks):
        """`exchange` [., groups, 64]: each warpgroup's part of sums over channels. `marks` [4, 64]: `Tokens.rows`."""
        self.kit, self.wg, self.groups, self.meet = kit, wg, groups, meet
        self._exchange, self._marks = exchange, marks

    def sync(self) -> None:
        """What each has written to shared memory is there for all, and for copies and wgmma."""
        plgpu.commit_smem()
        if self.groups > 1:
            plgpu.barrier_arrive(self.meet)
            plgpu.barrier_wait(self.meet)

    def only(self, wg: int, action) -> None:
        pl.when(self.wg == wg)(action) if self.groups > 1 else action()

    def row_vector(self, ref) -> jax.Array:
        """[64], one value a row."""
        return self.kit.load(ref, ROW, optimized=False)

    def exchanged(self, i: int) -> jax.Array:
        """Sum `i` over the channels of all warpgroups."""
        parts = (self.row_vector(self._exchange.at[i, j]) for j in range(1, self.groups))
        return sum(parts, self.row_vector(self._exchange.at[i, 0]))

    def real(self, x: jax.Array) -> jax.Array:
        """Zeros where no token is, whatever is there."""
        if self._marks is None:
            return x
        return jnp.where(along_rows(self.row_vector(self._marks.at[1]), x.shape) > 0.5, x, 0.0)

    def allowed(self, mask: jax.Array, columns: int, offset) -> jax.Array:
        """`mask` without pairs of tokens of two documents."""
        if self._marks is None:
            return mask
        own = self.row_vector(self._marks.at[0])
        other = self.kit.load(self._marks.at[0, pl.ds(offset, columns)], COLUMN, optimized=False)
        return mask & (along_rows(own, mask.shape) == along_columns(other, mask.shape))

    def indices(self, columns: int, offset=0) -> tuple[jax.Array, jax.Array]:
        shape = (CHUNK, columns)
        return self.kit.iota(shape, 0), self.kit.iota(shape, 1) + offset

    def share(self, *jobs) -> None:
        """Fill [64, 64] tiles: jobs (tile, values), with values(first column, number of columns) an array."""
        halves = [(ref, values, i) for ref, values in jobs for i in range(0, CHUNK, STRIP)]
        for j, (ref, values, i) in enumerate(halves):

            def fill(ref=ref, values=values, i=i):
                part = ref.at[:, pl.ds(i, STRIP)]
                self.kit.store(part, values(i, STRIP).astype(ref.dtype))

            self.only(j % self.groups, fill)

    def ones_where(self, mask):
        """Values for `share`: 1 where mask(row, column)."""
        return lambda i, columns: jnp.where(mask(*self.indices(columns, i)), 1.0, 0.0)

    def odd(self, shift) -> jax.Array:
        """[64, 32]: rows in odd blocks of 2^shift tokens."""
        return is_odd(block_of(self.kit.iota((CHUNK, STRIP), 0), shift))


def inverse(kit: Kit, m_ref, work, out) -> None:
    """`out` ← (I + M)⁻¹ in bfloat16 for strictly lower triangular M [64, 64] float16, by one warpgroup."""
    shape, half = (CHUNK, CHUNK), CHUNK // 2

    def block(shift, first) -> jax.Array:
        """32 columns of what level `shift` sees of −M."""
        pairs = level_pairs(shift)(kit.iota((CHUNK, half), 0), kit.iota((CHUNK, half), 1) + first)
        m = kit.load(m_ref.at[:, pl.ds(first, half)]).astype(jnp.float32)
        return jnp.where(pairs, -m, 0.0).astype(jnp.float16)

    def merge(shift, t):
        t16 = t.astype(jnp.float16)
        kit.store(work, t16)
        plgpu.commit_smem()
        y = kit.mm(shape, *((block(shift, i), work.at[pl.ds(i, half)]) for i in (0, half)))
        kit.all_warps()
        kit.store(work, y.astype(jnp.float16))
        plgpu.commit_smem()
        t = kit.mm_acc(t, (t16, work))
        kit.all_warps()
        return t

    identity = jnp.where(kit.iota(shape, 0) == kit.iota(shape, 1), 1.0, 0.0)
    kit.store(out, lax.fori_loop(0, LEVELS, merge, identity).astype(jnp.bfloat16))


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
    groups, tiles = PREPARE_TEAM[dim]
    width = dim // groups
    count = n // CHUNK * heads
    kit = Kit(interpret)
    strip, square = (CHUNK, STRIP), (CHUNK, CHUNK)
    slice_columns = CHUNK // groups  # columns of the score matrices that a warpgroup computes
    scores_shape = (CHUNK, slice_columns)
    bf16, f16, f32 = jnp.bfloat16, jnp.float16, jnp.float32
    marked = tokens is not None
    bounded = how.gate == "lower_bound"
    first = first_level(how)
    copies = 7 if marked else 6

    def body(*refs):
        program, thread = lax.axis_index("p"), lax.axis_index("wg")
        slot, wg = lax.div(thread, jnp.int32(groups)), lax.rem(thread, jnp.int32(groups))
        index = program * tiles + slot
        pl.when(index < count)(lambda: one_tile(index, slot, wg, *refs))

    def one_tile(index, slot, wg, q_g, k_g, v_g, g_g, b_g, rate_g, bias_g, zero_g, *refs):
        if marked:
            rows_g, keeps_g, *refs = refs
        w_g, qo_g, ko_g, u_g, a_g, decay_g, t_g, *refs = refs
        scratch, exchange, small, full, meet = refs
        named = dict(scratch["tiles"])
        named |= dict(zip(("g_raw", "g16"), scratch["gates"]))
        named |= dict(zip(("since_s", "a_s"), scratch["scores"]))
        named |= dict(zip(("end_s", "m_s"), scratch["strict scores"]))
        named |= dict(zip(("other_s", "work", "t_s"), scratch["inverse"]))
        s = Scratch(named, slot, zero_g)
        exchange, meet = exchange.at[slot], meet.at[slot]
        small = {name: ref.at[slot] for name, ref in small.items()}
        full = [full.at[slot * copies + i] for i in range(copies)]
        tile_i, h = lax.div(index, jnp.int32(heads)), lax.rem(index, jnp.int32(heads))
        team = Team(kit, wg, groups, meet, exchange, small.get("marks"))
        strips = [pl.ds(wg * width + i, STRIP) for i in range(0, width, STRIP)]
        sync = team.sync
        tokens_i = pl.ds(tile_i * CHUNK, CHUNK)
        part = pl.ds(wg * slice_columns, slice_columns)

        @functools.partial(team.only, 0)
        def _():
            tokens_of = [(g_g, s.g_raw), (q_g, s.qs), (k_g, s.ks), (v_g, s.vs)]
            pairs = [(source.at[tokens_i, h], target) for source, target in tokens_of]
            pairs += [(b_g.at[h, tokens_i], small["beta"]), (bias_g.at[h], small["bias"])]
            if marked:
                pairs.append((rows_g.at[:, tokens_i], small["marks"]))
            for (source, target), barrier in zip(pairs, full):
                plgpu.copy_gmem_to_smem(source, target, barrier)

        for barrier in full[4:]:
            plgpu.barrier_wait(barrier)

        row_vector, exchanged, real, allowed = team.row_vector, team.exchanged, team.real, team.allowed

        def get(ref, at):
            return kit.load(ref.at[:, at]).astype(f32)

        def put(ref, at, value):
            kit.store(ref.at[:, at], value.astype(ref.dtype))

        def sums(mask_ref, at):
            return kit.mm(strip, (mask_ref, s.g16.at[:, at]))

        # Gates, and each warpgroup's share of the norms.
        plgpu.barrier_wait(full[0])
        rate_h = None if how.gate == "none" else rate_g[h]
        for at in strips:
            bias_v = None if how.gate == "none" else kit.load(small["bias"].at[at], COLUMN, optimized=False)
            put(s.g16, at, real(log2_gate(real(get(s.g_raw, at)), rate_h, bias_v, how)))
        team.share(
            (s.since_s, team.ones_where(since_block(first))),
            (s.end_s, team.ones_where(to_block_end(first))),
            (s.other_s, team.ones_where(lambda r, c: r >= 0)),
        )
        plgpu.barrier_wait(full[1])
        plgpu.barrier_wait(full[2])
        if how.qk_l2norm:
            for i, ref in ((0, s.qs), (1, s.ks)):
                squares = [jnp.sum(jnp.square(real(get(ref, at))), axis=1) for at in strips]
                exchange[i, wg] = functools.reduce(jnp.add, squares)
        sync()

        s.move()

        # Decay over the chunk: with channels as rows it is one value a row.
        @pl.when(wg < dim // 64)
        def _():
            channels = pl.ds(wg * 64, 64)
            total = kit.mm((64, 8), (kit.t(s.g16.at[:, channels]), kit.t(s.other_s.at[pl.ds(0, 8)])))
            decay = jnp.exp2(jnp.max(total, axis=1))
            decay_g[h, tile_i, channels] = decay * keeps_g[tile_i] if marked else decay

        s.move()

        # Scores, level by level.
        def scores():
            other = kit.t(s.xs.at[part])
            return kit.mm(scores_shape, (s.qs, other)), kit.mm(scores_shape, (s.ks, other))

        offset = wg * slice_columns

        def normalised(ref, at, i):
            x = real(get(ref, at))
            return x * along_rows(lax.rsqrt(exchanged(i) + L2_EPS), strip) if how.qk_l2norm else x

        itself = []
        for at in strips:
            up = jnp.exp2(sums(s.since_s, at))
            x = normalised(s.qs, at, 0) * how.scale
            y = normalised(s.ks, at, 1)
            if not bounded:
                itself.append(jnp.sum(x * y, axis=1))  # a token's pair with itself, which no level has
            put(s.qs, at, x * up)
            put(s.ks, at, y * up)
            put(s.xs, at, y * jnp.exp2(ANCHOR - sums(s.since_s, at)) if bounded else y)
        if itself:
            exchange[2, wg] = functools.reduce(jnp.add, itself)
        sync()
        r, c = team.indices(slice_columns, offset)
        if bounded:
            sq, sk = scores()
            same = allowed(block_of(r, TILE) == block_of(c, TILE), slice_columns, offset)
            a, m = (jnp.where(same & mask, x * 2.0**-ANCHOR, 0.0) for mask, x in ((r >= c, sq), (r > c, sk)))
            sync()  # all have read the operands
            s.move()
            for at in strips:
                put(s.xs, at, get(s.xs, at) * jnp.exp2(sums(s.since_s, at) + sums(s.end_s, at) - ANCHOR))
        else:
            a = jnp.where(r == c, along_rows(exchanged(2), scores_shape), 0.0)
            m = a * 0.0

        def level(shift, scores_so_far):
            a, m = scores_so_far
            s.move()
            sync()
            team.share((s.other_s, team.ones_where(other_block(shift))))
            sq, sk = scores()
            pairs = allowed(level_pairs(shift)(*team.indices(slice_columns, offset)), slice_columns, offset)
            sync()  # all have read the operands
            s.move()
            for at in strips:
                factor, odd = jnp.exp2(sums(s.other_s, at)), team.odd(shift)
                put(s.qs, at, get(s.qs, at) * jnp.where(odd, factor, 1.0))
                put(s.ks, at, get(s.ks, at) * jnp.where(odd, factor, 1.0))
                put(s.xs, at, get(s.xs, at) * jnp.where(odd, 1.0, factor))
            return a + jnp.where(pairs, sq, 0.0), m + jnp.where(pairs, sk, 0.0)

        a, m = lax.fori_loop(first, LEVELS, level, (a, m))
        s.move()
        be = row_vector(small["beta"])
        kit.store(s.a_s.at[:, part], a.astype(bf16))
        kit.store(s.m_s.at[:, part], (m * along_rows(be, scores_shape)).astype(f16))
        if marked:
            for at in strips:
                for ref, flag in ((s.qs, 2), (s.ks, 2), (s.xs, 3)):
                    put(ref, at, get(ref, at) * along_rows(row_vector(small["marks"].at[flag]), strip))
        sync()

        @functools.partial(team.only, 0)
        def _():
            plgpu.copy_smem_to_gmem(s.qs, qo_g.at[h, tokens_i])
            plgpu.copy_smem_to_gmem(s.xs, ko_g.at[h, tokens_i])
            plgpu.copy_smem_to_gmem(s.a_s, a_g.at[h, tokens_i])
            inverse(kit, s.m_s, s.work, s.t_s)

        s.move()
        plgpu.barrier_wait(full[3])
        beta = along_rows(row_vector(small["beta"]), strip)
        for at in strips:
            put(s.ks, at, get(s.ks, at) * -beta)
            put(s.vs, at, real(get(s.vs, at)) * beta)
        sync()
        s.move()
        for at in strips:
            w, u = kit.mm(strip, (s.t_s, s.ks.at[:, at])), kit.mm(strip, (s.t_s, s.vs.at[:, at]))
            kit.all_warps()
            put(s.ks, at, w)
            put(s.vs, at, u)
        sync()

        @functools.partial(team.only, 0)
        def _():
            plgpu.copy_smem_to_gmem(s.t_s, t_g.at[h, tokens_i])
            plgpu.copy_smem_to_gmem(s.ks, w_g.at[h, tokens_i])
            plgpu.copy_smem_to_gmem(s.vs, u_g.at[h, tokens_i])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def tokens_like(columns):
        return jax.ShapeDtypeStruct((heads, n, columns), bf16)

    tile_of_tokens = smem((tiles, CHUNK, dim), bf16, STRIP)

    def mask(dtype, columns):
        return smem((tiles, *square), dtype, columns)

    kernel = kit.kernel(
        body,
        out_type=[
            *[tokens_like(dim)] * 4,
            tokens_like(CHUNK),
            jax.ShapeDtypeStruct((heads, n // CHUNK, dim), f32),
            tokens_like(CHUNK),
        ],
        grid=(-(-count // tiles),),
        grid_names=("p",),
        num_threads=groups * tiles,
        thread_name="wg",
        scratch_types=[
            {
                "tiles": {name: tile_of_tokens for name in ("qs", "ks", "xs", "vs")},
                "gates": kit.union(tile_of_tokens, smem((tiles, CHUNK, dim), f16, STRIP)),
                "scores": kit.union(mask(f16, STRIP), mask(bf16, slice_columns)),
                "strict scores": kit.union(mask(f16, STRIP), mask(f16, slice_columns)),
                "inverse": kit.union(mask(f16, STRIP), mask(f16, CHUNK // 2), mask(bf16, STRIP)),
            },
            plgpu.SMEM((tiles, 3, groups, CHUNK), f32),
            {
                "beta": plgpu.SMEM((tiles, CHUNK), f32),
                "bias": plgpu.SMEM((tiles, dim), f32),
                **({"marks": plgpu.SMEM((tiles, 4, CHUNK), f32)} if marked else {}),
            },
            plgpu.Barrier(num_barriers=copies * tiles),
            plgpu.Barrier(num_arrivals=groups, num_barriers=tiles),
        ],
        compiler_params=COMPILER,
    )
    marks = (tokens.rows, tokens.keeps) if marked else ()
    return Prepared(*kernel(q, k, v, g, beta, rate, bias, jnp.zeros(1, jnp.int32), *marks))
