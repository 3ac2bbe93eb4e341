"""Lists of sequences and padded batches, laid end to end on one token axis, and back.

Leaves that are numpy stay numpy, unless a traced mask decides where their rows go; jax leaves stay jax.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Bool, PyTree

from jaxattn.segments import Segments

Mask = Bool[np.ndarray | jax.Array, "B L"]


def pack(
    sequences: Sequence[PyTree], *, total: int | None = None, num_segments: int | None = None
) -> tuple[PyTree, Segments]:
    """The sequences end to end, and the segments that they are.

    A sequence is an array of tokens `[L, ...]` or a pytree of such arrays of one length, for example
    `{"ids": [L], "embeddings": [L, 64]}`. Sequences may be empty. For queries and keys of different length, pack each
    and join the two with `Segments.from_cu_seqlens(a.cu_seqlens_q, b.cu_seqlens_q)`.

    Args:
        sequences: at least one; all of one structure, and each leaf of one dtype and shape but for its length.
        total: rows of the result, a tail of zeros included; None means no tail. With `total` and `num_segments` the
            result has one shape for every list, so a jitted function of it compiles once.
        num_segments: pad the segments with empty ones up to this count.

    Raises:
        ValueError: everything that is wrong with the call, one line each.

    >>> pack([np.array([1, 2]), np.array([3])], total=4)
    (array([1, 2, 3, 0]), Segments(q=[2, 1], k=q))
    """
    lengths, problems = _lengths(sequences)
    if not problems:
        problems = _total_problems(total, sum(lengths))
    if problems:
        raise ValueError("\n".join(problems))
    tail = 0 if total is None else total - sum(lengths)

    def join(*leaves: Any) -> Any:
        xp = np if all(isinstance(x, np.ndarray) for x in leaves) else jnp
        return xp.concatenate([*leaves, xp.zeros((tail, *leaves[0].shape[1:]), leaves[0].dtype)])

    return jax.tree.map(join, *sequences), Segments.from_lengths(lengths, num_segments=num_segments)


def unpack(packed: PyTree, segments: Segments) -> list[PyTree]:
    """The sequences of a packed pytree, one per query segment, empty ones included; the tail is left out.

    Args:
        packed: arrays `[T, ...]`, for example the result of attention.
        segments: concrete offsets; the lengths of the results are shapes.

    Raises:
        ValueError: offsets that are traced or reach past `T`.

    >>> unpack(np.arange(4), Segments.from_lengths([2, 0, 1]))
    [array([0, 1]), array([], dtype=int64), array([2])]
    """
    T, problems = _rows("packed", packed, 1)
    if not segments.is_concrete:
        problems.append(
            "`segments`: traced offsets. The lengths of the results are shapes. Unpack outside of jit, or use unpack_padded."
        )
    elif not problems:
        problems = segments.problems()
        if not problems and segments.cu_seqlens_q[-1] > T[0]:
            problems.append(
                f"`packed`: {T[0]} rows for offsets up to {segments.cu_seqlens_q[-1]}. The query segments lie in its rows. "
                f"Pass the segments of this batch."
            )
    if problems:
        raise ValueError("\n".join(problems))
    cu = [int(c) for c in segments.cu_seqlens_q]
    return [jax.tree.map(lambda x, a=a, b=b: x[a:b], packed) for a, b in pairwise(cu)]


def pack_padded(batch: PyTree, mask: Mask, *, total: int | None = None) -> tuple[PyTree, Segments]:
    """The tokens of a padded batch end to end, and the segments that its rows are.

    Works under `jit`, `vmap` and `grad` with a static `total`: what lies past the tokens is a tail of zeros. Padding
    is never read: a NaN there reaches nothing, and its gradient is 0.

    Args:
        batch: arrays `[B, L, ...]`, an array or a pytree of them.
        mask: bool `[B, L]`, True for a token. Padding may lie anywhere, on the left and between tokens as well; the
            tokens of a row keep their order.
        total: rows of the result; None means as many as there are tokens. A traced mask requires it; `B * L` always
            suffices.

    Raises:
        ValueError: everything that is wrong with the call, one line each; a `total` that is too small too. A traced
            mask cannot be counted: where it has more tokens than `total`, floating leaves are NaN, and the offsets
            reach past the rows, which makes every row of the attention NaN.

    >>> pack_padded(np.array([[1, 2, 0], [0, 3, 0]]), np.array([[True, True, False], [False, True, False]]))
    (array([1, 2, 3]), Segments(q=[2, 1], k=q))
    """
    shape, problems = _rows("batch", batch, 2)
    problems += _mask_problems(mask, shape)
    traced = isinstance(mask, Tracer)
    if traced and total is None:
        problems.append(
            f"`total`: None with a traced mask. The rows of the result are a shape. Pass a number of rows; "
            f"{shape[0] * shape[1]} hold any mask of this batch."
        )
    if not problems:
        problems = _total_problems(total, None if traced else int(np.sum(mask)))
    if problems:
        raise ValueError("\n".join(problems))
    mask = mask if traced else np.asarray(mask)
    slots = mask.size
    index: Any
    if traced:
        (index,) = jnp.nonzero(mask.reshape(slots), size=total, fill_value=slots)
    else:
        index = np.flatnonzero(mask)
        index = np.pad(index, (0, 0 if total is None else total - len(index)), constant_values=slots)
    too_many = mask.sum() > index.shape[0] if traced else None
    packed = jax.tree.map(lambda x: _take(x.reshape(slots, *x.shape[2:]), index, index < slots, 0, too_many), batch)
    return packed, Segments.from_lengths(mask.sum(axis=1))


def unpack_padded(packed: PyTree, mask: Mask, *, fill: float = 0) -> PyTree:
    """The padded batch `[B, L, ...]` whose tokens, where `mask` is True, are the rows of `packed` in order.

    The inverse of `pack_padded`, with the same mask. Works under `jit`, `vmap` and `grad`.

    Args:
        packed: arrays `[T, ...]`, an array or a pytree of them; rows after the tokens are not read.
        mask: bool `[B, L]`, True for a token.
        fill: what padding becomes, in the dtype of each leaf.

    Raises:
        ValueError: a mask with more tokens than `T`, a `fill` that a leaf cannot hold. A traced mask cannot be counted: floating leaves are NaN then.

    >>> unpack_padded(np.array([1, 2, 3]), np.array([[True, True, False], [False, True, False]]), fill=-1)
    array([[ 1,  2, -1],
           [-1,  3, -1]])
    """
    rows, problems = _rows("packed", packed, 1)
    problems += _mask_problems(mask, None)
    traced = isinstance(mask, Tracer)
    if not problems and not traced and (count := int(np.sum(mask))) > rows[0]:
        problems.append(
            f"`mask`: {count} tokens for the {rows[0]} rows of `packed`. Every token has a row. Pass the mask that the "
            f"batch was packed with."
        )
    problems += _fill_problems(fill, packed)
    if problems:
        raise ValueError("\n".join(problems))
    mask = mask if traced else np.asarray(mask)
    flat = mask.reshape(mask.size)
    index = flat.cumsum() - 1
    too_many = mask.sum() > rows[0] if traced else None
    return jax.tree.map(lambda x: _take(x, index, flat, fill, too_many).reshape(*mask.shape, *x.shape[1:]), packed)


def _take(x: Any, index: Any, valid: Any, fill: float, too_many: Any) -> Any:
    """The rows of `x` at `index` where `valid`, else `fill`; NaN everywhere if `too_many` and floating."""
    xp: Any = np if isinstance(x, np.ndarray) and isinstance(index, np.ndarray) else jnp
    filling = np.asarray(fill).astype(x.dtype)
    if x.shape[0] == 0:
        taken = xp.full((index.shape[0], *x.shape[1:]), filling)
    else:
        rows = xp.asarray(x)[xp.clip(index, 0, x.shape[0] - 1)]
        taken = xp.where(valid.reshape(-1, *(1,) * (x.ndim - 1)), rows, filling)
    if too_many is not None and jnp.issubdtype(x.dtype, jnp.inexact):
        taken = jnp.where(too_many, jnp.nan, taken)
    return taken


def _lengths(sequences: Any) -> tuple[list[int], list[str]]:
    """The length of every sequence, and what is wrong with them."""
    if len(sequences) == 0:
        return [], ["`sequences`: none. Their structure, dtypes and shapes are those of the result. Pass at least one."]
    lengths, problems = [], []
    kind = None
    for i, sequence in enumerate(sequences):
        rows, found = _rows(f"sequences[{i}]", sequence, 1)
        problems += found
        if found:
            continue
        leaves, structure = jax.tree.flatten(sequence)
        this = structure, [(str(x.dtype), tuple(x.shape[1:])) for x in leaves]
        kind = this if kind is None else kind
        if this != kind:
            problems.append(
                f"`sequences[{i}]`: {_described(*this)} after {_described(*kind)}. All have one structure, and each leaf "
                f"one dtype and shape but for its length. Convert them first."
            )
        lengths.append(rows[0])
    return lengths, problems


def _rows(name: str, tree: Any, axes: int) -> tuple[tuple[int, ...], list[str]]:
    """The first `axes` axes, which all leaves share, and what is wrong with the leaves."""
    what = "tokens on the first axis" if axes == 1 else "a batch axis and tokens on the second"
    leaves = jax.tree.leaves(tree)
    if not leaves:
        return (0,) * axes, [f"`{name}`: no arrays. Every leaf is an array with {what}. Pass at least one."]
    for x in leaves:
        if not isinstance(x, np.ndarray | jax.Array) or x.ndim < axes:
            seen = f"shape {tuple(x.shape)}" if isinstance(x, np.ndarray | jax.Array) else f"a leaf {x!r}"
            return (0,) * axes, [f"`{name}`: {seen}. Every leaf is an array with {what}. Use numpy.asarray or reshape."]
    shapes = list(dict.fromkeys(tuple(x.shape[:axes]) for x in leaves))
    if len(shapes) > 1:
        seen = " and ".join(str(s[0] if axes == 1 else s) for s in shapes)
        return shapes[0], [f"`{name}`: leaves of {seen} tokens. All leaves share the token axis. Pass one length."]
    return shapes[0], []


def _mask_problems(mask: Any, shape: tuple[int, ...] | None) -> list[str]:
    """What is wrong with a mask over a batch of leading shape `shape`, None for any."""
    if not isinstance(mask, np.ndarray | jax.Array) or mask.dtype != bool or mask.ndim != 2:
        seen = f"{mask.dtype}{list(mask.shape)}" if isinstance(mask, np.ndarray | jax.Array) else repr(mask)
        return [f"`mask`: {seen}. It is a bool array [B, L], True for a token. Use mask.astype(bool)."]
    if shape is not None and tuple(mask.shape) != shape:
        return [
            f"`mask`: shape {tuple(mask.shape)} for a batch of {shape}. It has an entry for every slot of the batch. "
            f"Pass the mask of this batch."
        ]
    return []


def _total_problems(total: Any, count: int | None) -> list[str]:
    """What is wrong with `total` rows for `count` tokens, None for a count that is not known yet."""
    if total is None:
        return []
    if isinstance(total, bool) or not isinstance(total, int) or total < 0:
        return [f"`total`: {total!r}. It is a number of rows, known when the program is traced. Pass an int >= 0."]
    if count is not None and count > total:
        return [f"`total`: {total} rows for {count} tokens. Nothing is dropped. Use total={count} or more."]
    return []


def _fill_problems(fill: Any, tree: Any) -> list[str]:
    """The dtypes of the leaves that cannot hold `fill`. Rounding is no problem, wrapping and overflow are."""
    found: dict[str, None] = {}
    for dtype in (x.dtype for x in jax.tree.leaves(tree) if isinstance(x, np.ndarray | jax.Array)):
        with np.errstate(all="ignore"):
            held = np.asarray(fill).astype(dtype)
        rounds = jnp.issubdtype(dtype, jnp.inexact) and np.isfinite(held) == np.isfinite(fill)
        if not rounds and held != fill:
            found[f"`fill`: {fill!r} for {dtype}. Every leaf must be able to hold it. Unpack the leaves apart."] = None
    return list(found)


def _described(structure: Any, leaves: list[tuple[str, tuple[int, ...]]]) -> str:
    shapes = ", ".join(f"{dtype}[L{''.join(f', {n}' for n in shape)}]" for dtype, shape in leaves)
    return shapes if len(leaves) == 1 else f"{structure} of {shapes}"
