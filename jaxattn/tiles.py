"""Which tiles of the mask are computed: a plan with work proportional to the visible area.

A tile is some query rows times some keys from the first that these rows see. Small tiles waste less of their area on
hidden pairs, large ones run faster per pair; each run of query rows gets the size that is cheaper for it. The rows of
one tile may lie in several segments, and then it holds the keys of all of them.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

Rows = Int32[Array, " Tq"]


class Size(NamedTuple):
    """One size of tile: query rows, keys, how many are computed at once, and what one pair costs, measured."""

    rows: int
    keys: int
    batch: int
    cost: float

    @property
    def repeats(self) -> bool:
        """Whether one block of rows may need several tiles, one after another; a batch takes what fits in one."""
        return self.batch == 1


class Tiles(NamedTuple):
    """The blocks of query rows that are computed in one size.

    `block` lists their numbers (row // size.rows) in its first `used` entries and after that the number of a block
    past the last; `first` is the first key that each block of that many rows sees, `chunks` how many tiles it needs.
    """

    size: Size
    used: Int32[Array, ""]
    block: Int32[Array, " blocks+batch"]
    first: Int32[Array, " blocks+1"]
    chunks: Int32[Array, " blocks+1"]


def plan(lo: Rows, hi: Rows, sizes: tuple[Size, ...]) -> list[Tiles]:
    """The tiles that cover every visible pair once, at most one size for each run of the most rows that a size has.

    The sizes differ in rows, and the most rows are a multiple of all others and divide the length of `lo` and `hi`.
    """
    most = max(size.rows for size in sizes)
    blocks, costs = [], []
    for size in sizes:
        first, end = key_windows(lo, hi, size.rows)
        chunks = -(-(end - first) // size.keys)
        cost = chunks * (size.rows * size.keys * size.cost)
        cost = jnp.where((chunks <= 1) | size.repeats, cost, jnp.inf)
        costs.append(jnp.sum(cost.reshape(-1, most // size.rows), axis=1))
        blocks.append((first, chunks))
    cheapest = jnp.argmin(jnp.stack(costs), axis=0)

    tiles = []
    for s, (size, (first, chunks)) in enumerate(zip(sizes, blocks, strict=True)):
        here = jnp.repeat(cheapest == s, most // size.rows) & (chunks > 0)
        (block,) = jnp.nonzero(here, size=len(here) + size.batch, fill_value=len(here))
        first, chunks = (jnp.pad(x, (0, 1)) for x in (first, chunks))
        tiles.append(Tiles(size, jnp.sum(here, dtype=jnp.int32), block.astype(jnp.int32), first, chunks))
    return tiles


def key_windows(lo: Rows, hi: Rows, rows: int) -> tuple[Int32[Array, " blocks"], Int32[Array, " blocks"]]:
    """The first key that each block of query rows sees, and the one after the last: the same where it sees none."""
    lo, hi = lo.reshape(-1, rows), hi.reshape(-1, rows)
    end = jnp.max(hi, axis=1)
    return jnp.min(jnp.where(hi > lo, lo, end[:, None]), axis=1), end


def planned_area(tiles: list[Tiles]) -> Float[Array, ""]:
    """How many (query, key) pairs the tiles hold, hidden ones included."""
    area = jnp.zeros((), jnp.float32)
    for size, used, block, _, chunks in tiles:
        area += jnp.sum(jnp.where(jnp.arange(len(block)) < used, chunks[block], 0)) * size.rows * size.keys
    return area
