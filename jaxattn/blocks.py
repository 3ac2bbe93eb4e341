"""Attention over key intervals, tile by tile: the forward loops, and the backward loops that are its derivative."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import sequential_vmap
from jaxtyping import Array, Bool, Float, Int32

from jaxattn.tiles import Rows, Size, Tiles, plan
from jaxattn.validation import Options

# Measured: larger tiles gain nothing on a CPU and waste more on short segments. The last is for rows that have little
# in common, such as one new token each after long caches, where any block of rows would hold the keys of all of them.
Sizes = tuple[Size, ...]
SIZES: Sizes = (Size(64, 128, 4, 1.4), Size(128, 256, 1, 1.0), Size(1, 256, 1, 8.0))
_MOST_ROWS = max(size.rows for size in SIZES)
_MOST_KEYS = max(size.keys for size in SIZES)


def attend_blocks(
    q: Float[Array, "Tq N D"], k: Float[Array, "Tk K D"], v: Float[Array, "Tk K Dv"], lo: Rows, hi: Rows,
    options: Options,
) -> tuple[Float[Array, "Tq N Dv"], Float[Array, "N Tq"]]:  # fmt: skip
    """out and lse of finite q, k, v where query row i sees the key rows `lo[i] : hi[i]`, both in the accumulation dtype.

    Rows that see nothing give 0 in both.
    """
    (Tq, N, _), (Tk, K, Dv) = q.shape, v.shape
    if Tq == 0 or Tk == 0:
        accumulate = jnp.promote_types(q.dtype, jnp.float32)
        return jnp.zeros((Tq, N, Dv), accumulate), jnp.zeros((N, Tq), accumulate)
    # Heads come first and lengths are padded, so that every tile is one slice of one size: whole blocks of queries, one
    # more of empty rows for tiles that are left over in a batch, and keys for a window that ends at the last one.
    rows = -Tq % _MOST_ROWS + _MOST_ROWS
    q = jnp.pad(q.reshape(Tq, K, N // K, -1).transpose(1, 2, 0, 3), ((0, 0), (0, 0), (0, rows), (0, 0)))
    k, v = (jnp.pad(x.transpose(1, 0, 2), ((0, 0), (0, _MOST_KEYS), (0, 0))) for x in (k, v))
    lo, hi = (jnp.pad(x, (0, rows)) for x in (lo, hi))
    sizes = SIZES[:1] if Tk <= SIZES[0].keys else SIZES  # what fits in one tile needs no other size
    out, lse = _attend(options, sizes, q, k, v, lo, hi)
    return out[:, :, :Tq].transpose(2, 0, 1, 3).reshape(Tq, N, Dv), lse[:, :, :Tq].reshape(N, Tq)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(options: Options, sizes: Sizes, q: Array, k: Array, v: Array, lo: Rows, hi: Rows) -> tuple[Array, Array]:
    # One example after another under vmap: loops whose bounds differ between examples would otherwise run to the
    # longest, and copy what they carry in every round.
    out, lse = sequential_vmap(partial(_forward, options, sizes))(q, k, v, lo, hi)
    return out, lse


def _attend_fwd(options: Options, sizes: Sizes, *args: Array) -> tuple[tuple[Array, Array], tuple[Array, ...]]:
    out, lse = _attend(options, sizes, *args)
    return (out, lse), (*args, out, lse)


def _attend_bwd(options: Options, sizes: Sizes, saved: tuple[Array, ...], cotangents: tuple[Array, Array]) -> Any:
    dq, dk, dv = sequential_vmap(partial(_backward, options, sizes))(*saved, *cotangents)
    return dq, dk, dv, None, None


_attend.defvjp(_attend_fwd, _attend_bwd)


def _forward(options: Options, sizes: Sizes, q: Array, k: Array, v: Array, lo: Rows, hi: Rows) -> tuple[Array, Array]:
    K, G, Tq, D = q.shape
    Dv = v.shape[2]
    dtype = jnp.promote_types(q.dtype, jnp.float32)
    zero = _zero_of(dtype, q, k, v, lo, hi)
    narrow, (q, k, v) = q.dtype, (_as_bits(x) for x in (q, k, v))

    def batch(tiles: Tiles, n: Array, whole: tuple[Array, Array]) -> tuple[Array, Array]:
        size = tiles.size
        block = lax.dynamic_slice_in_dim(tiles.block, n * size.batch, size.batch)
        row, first = block * size.rows, tiles.first[block]
        q_tile = _as_floats(_take(q, row, size.rows), narrow).reshape(size.batch, K, G * size.rows, D)
        lo_tile, hi_tile = (jnp.tile(_take(x, row, size.rows), G) for x in (lo, hi))

        def tile(c: Array | int, state: tuple[Array, Array, Array] | None) -> tuple[Array, Array, Array]:
            key = first + c * size.keys
            s, _ = _scores("pkrd,pkjd->pkrj", q_tile, _as_floats(_take(k, key, size.keys), narrow), options)
            s = jnp.where(_visible(lo_tile, hi_tile, key, size.keys), s, -jnp.inf)
            top = jnp.max(s, axis=-1, keepdims=True)
            if state is not None:
                top = jnp.maximum(top, state[0])
            # While the maximum is -inf (nothing seen yet) it counts as 0, or -inf - -inf would be NaN.
            shift = jnp.where(top == -jnp.inf, 0, top)
            p = jnp.exp(s - shift)
            total = jnp.sum(p, axis=-1, keepdims=True)
            out = _dot("pkrj,pkjd->pkrd", p, _as_floats(_take(v, key, size.keys), narrow).astype(dtype))
            if state is not None:
                fade = jnp.exp(state[0] - shift)
                total, out = state[1] * fade + total, state[2] * fade + out
            return top, total, out

        if size.repeats:
            shape = 1, K, G * size.rows
            start = tuple(jnp.full((*shape, n), x, dtype) + zero for n, x in ((1, -jnp.inf), (1, 0), (Dv, 0)))
            top, total, out = lax.fori_loop(0, tiles.chunks[block[0]], tile, start)
        else:
            top, total, out = tile(0, None)
        empty = (hi_tile <= lo_tile)[:, None, :, None]
        out = out / jnp.where(empty, 1, total)
        lse = jnp.where(empty, 0, top) + jnp.log(jnp.where(empty, 1, total))
        out, lse = (x.reshape(size.batch, K, G, size.rows, -1) for x in (out, lse))
        return _put(whole[0], out, row), _put(whole[1], lse, row)

    whole = jnp.zeros((K, G, Tq, Dv), dtype) + zero, jnp.zeros((K, G, Tq, 1), dtype) + zero
    for tiles in plan(lo[:-_MOST_ROWS], hi[:-_MOST_ROWS], sizes):
        whole = lax.fori_loop(0, -(-tiles.used // tiles.size.batch), partial(batch, tiles), whole)
    return whole


def _backward(
    options: Options, sizes: Sizes, q: Array, k: Array, v: Array, lo: Rows, hi: Rows,
    out: Array, lse: Array, d_out: Array, d_lse: Array,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """dq, dk, dv from the cotangents of out and lse.

    With p = exp(s - lse): out = sum p v, so dv = p d_out and dp = <d_out, v>. Both out and lse depend on s,
    ds = p (dp - sum(p dp) + d_lse), and sum(p dp) over the keys is <d_out, out>.
    """
    dtype = d_out.dtype
    K, G, _, D = q.shape
    zero = _zero_of(dtype, q, k, v, lo, hi, d_out, d_lse)
    delta = _row_sums(d_out, out, zero) - d_lse
    narrow, (q, k, v) = q.dtype, (_as_bits(x) for x in (q, k, v))

    def batch(tiles: Tiles, n: Array, whole: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        size = tiles.size
        block = lax.dynamic_slice_in_dim(tiles.block, n * size.batch, size.batch)
        row, first = block * size.rows, tiles.first[block]
        q_tile, d_out_tile, lse_tile, delta_tile = (
            _take(x, row, size.rows).reshape(size.batch, K, G * size.rows, -1) for x in (q, d_out, lse, delta)
        )
        q_tile = _as_floats(q_tile, narrow)
        lo_tile, hi_tile = (jnp.tile(_take(x, row, size.rows), G) for x in (lo, hi))
        lse_tile, delta_tile = lse_tile.mT, delta_tile.mT

        # Keys are rows and queries columns here: four of the five products then read the weights as they lie.
        def tile(key: Array) -> tuple[Array, Array, Array]:
            k_tile = _as_floats(_take(k, key, size.keys), narrow)
            visible = _visible(lo_tile, hi_tile, key, size.keys).mT
            s, slope = _scores("pkjd,pkrd->pkjr", k_tile, q_tile, options)
            p = jnp.where(visible, jnp.exp(s - lse_tile), 0)
            dp = _dot("pkjd,pkrd->pkjr", _as_floats(_take(v, key, size.keys), narrow).astype(dtype), d_out_tile)
            ds = p * (dp - delta_tile)
            ds = jnp.where(visible, ds if slope is None else ds * slope, 0)
            return (
                _dot("pkjd,pkjr->pkdr", k_tile.astype(dtype), ds),
                _dot("pkjr,pkrd->pkjd", ds, q_tile.astype(dtype)),
                _dot("pkjr,pkrd->pkjd", p, d_out_tile),
            )

        def next_tile(c: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            key = first + c * size.keys
            dq, dk, dv = tile(key)
            return state[0] + dq, _add(state[1], dk, key), _add(state[2], dv, key)

        if size.repeats:
            start = jnp.zeros((1, K, D, G * size.rows), dtype) + zero, *whole[1:]
            dq, dk, dv = lax.fori_loop(0, tiles.chunks[block[0]], next_tile, start)
        else:
            dq, dk, dv = tile(first)
            dk, dv = _add(whole[1], dk, first), _add(whole[2], dv, first)
        return _put(whole[0], dq.mT.reshape(size.batch, K, G, size.rows, D), row), dk, dv

    whole = tuple(jnp.zeros(x.shape, dtype) + zero for x in (q, k, v))
    if q.shape == out.shape:
        # dq takes the memory of `out`, which is not read again: rows that no tile holds are 0 in both.
        whole = out, *whole[1:]
    for tiles in plan(lo[:-_MOST_ROWS], hi[:-_MOST_ROWS], sizes):
        whole = lax.fori_loop(0, -(-tiles.used // tiles.size.batch), partial(batch, tiles), whole)
    dq, dk, dv = whole
    scale = options.softmax_scale
    return (dq * scale).astype(narrow), (dk * scale).astype(narrow), dv.astype(narrow)


def _scores(axes: str, a: Array, b: Array, options: Options) -> tuple[Array, Array | None]:
    """The scores of a tile before masking, and the factor that softcap puts on their derivative."""
    s = options.softmax_scale * _dot(axes, a, b)
    if options.softcap is None:
        return s, None
    t = jnp.tanh(s / options.softcap)
    return options.softcap * t, 1 - t * t


def _visible(lo: Array, hi: Array, key: Array, keys: int) -> Bool[Array, "p 1 r k"]:
    row = key[:, None, None] + jnp.arange(keys, dtype=jnp.int32)
    return ((lo[..., None] <= row) & (row < hi[..., None]))[:, None]


def _dot(axes: str, a: Array, b: Array) -> Array:
    return jnp.einsum(axes, a, b, precision="highest", preferred_element_type=jnp.promote_types(a.dtype, jnp.float32))


# Rows are the only axis of offsets, and the last but one of everything else.
def _take(x: Array, rows: Int32[Array, " p"], size: int) -> Array:
    return jnp.stack([lax.dynamic_slice_in_dim(x, row, size, axis=max(x.ndim - 2, 0)) for row in rows])


def _put(x: Array, tiles: Array, rows: Int32[Array, " p"]) -> Array:
    for tile, row in zip(tiles, rows, strict=True):
        x = lax.dynamic_update_slice_in_dim(x, tile, row, axis=x.ndim - 2)
    return x


def _add(x: Array, tiles: Array, rows: Int32[Array, " p"]) -> Array:
    for tile, row in zip(tiles, rows, strict=True):
        old = lax.dynamic_slice_in_dim(x, row, tile.shape[-2], axis=x.ndim - 2)
        x = lax.dynamic_update_slice_in_dim(x, old + tile, row, axis=x.ndim - 2)
    return x


def _as_bits(x: Array) -> Array:
    """`x` as integers when it is narrow: XLA on the CPU makes float32 of a whole 16-bit array that a loop slices."""
    return lax.bitcast_convert_type(x, jnp.uint16) if x.dtype.itemsize == 2 else x


def _as_floats(x: Array, dtype: Any) -> Array:
    return lax.bitcast_convert_type(x, dtype) if x.dtype == jnp.uint16 else x


def _row_sums(a: Array, b: Array, zero: Array) -> Array:
    """The sums of `a * b` over the last axis, in blocks: in one piece XLA on the CPU is several times slower."""

    def block(i: Array, sums: Array) -> Array:
        x, y = (lax.dynamic_slice_in_dim(x, i * _MOST_ROWS, _MOST_ROWS, axis=2) for x in (a, b))
        total = jnp.sum(x * y, axis=-1, keepdims=True)
        return lax.dynamic_update_slice_in_dim(sums, total, i * _MOST_ROWS, axis=2)

    sums: Array = lax.fori_loop(0, a.shape[2] // _MOST_ROWS, block, jnp.zeros((*a.shape[:3], 1), a.dtype) + zero)
    return sums


def _zero_of(dtype: Any, *arrays: Array) -> Array:
    """0, typed as varying over the mesh axes that `arrays` vary over, as what a loop carries must be in shard_map."""
    return sum((jnp.sum(x[:0]).astype(dtype) for x in arrays), jnp.zeros((), dtype))
