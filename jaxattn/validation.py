"""The checks that every implementation of packed attention makes before it computes anything."""

import operator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxattn.segments import Segments

DTYPES = ("float16", "bfloat16", "float32", "float64")


@dataclass(frozen=True)
class Options:
    """The options of one call, resolved to what an implementation needs: plain, hashable, without defaults.

    `left` and `right` are the reach in keys, inclusive, None for unlimited; `causal=True` is `right = 0`.
    """

    softmax_scale: float
    left: int | None
    right: int | None
    softcap: float | None


def check_call(
    q: Any,
    k: Any,
    v: Any,
    segments: Segments,
    *,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int | None, int | None] | None,
    softcap: float | None,
    sinks: Any,
    return_softmax_lse: bool,
) -> Options:
    """The options of a valid call, resolved.

    Raises:
        ValueError: everything that is wrong with the call, one line each, in a fixed order: rank, dtype, key/value
            shapes, query/key widths, heads, options, segments.
    """
    problems = array_problems(q, k, v)
    problems += option_problems(softmax_scale, causal, window_size, softcap, return_softmax_lse)
    if len(np.shape(q)) == 3:
        problems += sinks_problems(sinks, np.shape(q)[1])
    problems += segments_problems(segments, q, k)
    if problems:
        raise ValueError("\n".join(problems))
    return resolve_options(np.shape(q)[2], softmax_scale, causal, window_size, softcap)


def array_problems(q: Any, k: Any, v: Any) -> list[str]:
    """What is wrong with the shapes and dtypes of `q [Tq, N, D]`, `k [Tk, K, D]`, `v [Tk, K, Dv]`."""
    named = {"q": q, "k": k, "v": v}
    shapes = {name: tuple(np.shape(x)) for name, x in named.items()}
    found = [
        f"`{name}`: shape {shape}. Packed attention takes three axes, [tokens, heads, width], with no batch axis. "
        f"Lay the sequences end to end on the first axis."
        for name, shape in shapes.items()
        if len(shape) != 3
    ]
    dtypes = {name: str(getattr(x, "dtype", type(x).__name__)) for name, x in named.items()}
    if len(set(dtypes.values())) > 1:
        found.append(f"`q`, `k`, `v`: dtypes {', '.join(dtypes.values())}. They share one dtype. Cast with .astype.")
    elif dtypes["q"] == "float64" and not jax.config.jax_enable_x64:  # type: ignore[attr-defined]
        found.append(
            "`q`, `k`, `v`: dtype float64, and JAX's 64-bit types are off: they would become float32. Cast with .astype, "
            "or set jax_enable_x64."
        )
    elif dtypes["q"] not in DTYPES:
        found.append(f"`q`, `k`, `v`: dtype {dtypes['q']}. Supported are {', '.join(DTYPES)}. Cast with .astype.")
    if any(len(shape) != 3 for shape in shapes.values()):
        return found
    (_, N, D), (Tk, K, Dk), (Tv, Kv, _) = shapes["q"], shapes["k"], shapes["v"]
    if (Tk, K) != (Tv, Kv):
        found.append(
            f"`k`, `v`: {Tk} and {Tv} rows, {K} and {Kv} heads. Every key row has one value row per head. "
            f"Pass k and v of the same packing."
        )
    if Dk != D:
        found.append(f"`q`, `k`: head widths {D} and {Dk}. Their product needs equal widths. Project to one width.")
    return found + head_problems(N, K, D)


def head_problems(N: int, K: int, D: int) -> list[str]:
    """What is wrong with `N` query heads over `K` key/value heads of width `D`."""
    if 0 in (N, K, D):
        return [
            f"`q`, `k`: {N} query heads, {K} key/value heads, width {D}. Each must be at least 1. Check the shapes."
        ]
    if N % K:
        lower, upper = N - N % K, N - N % K + K
        use = f"{lower} or {upper}" if lower else f"{upper}"
        return [
            f"`q`: {N} query heads over {K} key/value heads leaves {N % K} over. Query heads must be a whole multiple "
            f"of key/value heads. Use {use} query heads."
        ]
    return []


def option_problems(
    softmax_scale: Any, causal: Any, window_size: Any, softcap: Any, return_softmax_lse: Any
) -> list[str]:
    """What is wrong with the options of the common signature."""
    found = []
    for name, value in (("softmax_scale", softmax_scale), ("softcap", softcap)):
        if value is None:
            continue
        if isinstance(value, Tracer):
            found.append(
                f"`{name}`: a traced value. It must be a Python or numpy number, known when the program is traced. "
                + ("Multiply q by it instead." if name == "softmax_scale" else "Make it a static argument.")
            )
        elif not _is_real(value) or not abs(value) <= np.finfo(np.float32).max:
            found.append(f"`{name}`: {value!r}. It must be a finite number (of float32) or None. Pass a float.")
        elif name == "softcap" and value <= 0:
            found.append(f"`softcap`: {value!r}. It must be greater than 0. Use None for no cap.")
    for name, value in (("causal", causal), ("return_softmax_lse", return_softmax_lse)):
        if not isinstance(value, bool | np.bool_):
            found.append(f"`{name}`: {_seen(value)}. It must be True or False. Pass a Python bool.")
    if window_size is not None:
        entries = list(window_size) if isinstance(window_size, tuple | list) else None
        if entries is None or len(entries) != 2 or not all(_is_reach(e) for e in entries):
            found.append(
                f"`window_size`: {_seen(window_size)}. It must be None or (left, right), each an int >= 0, or None or "
                f"-1 for unlimited. Use (4, 0) for the key itself and four before it."
            )
    return found


def sinks_problems(sinks: Any, N: int) -> list[str]:
    """What is wrong with `sinks`, which is None or floating `[N]`."""
    if sinks is None:
        return []
    sinks = sinks if hasattr(sinks, "dtype") else np.asarray(sinks)
    shape, dtype = tuple(sinks.shape), sinks.dtype
    if shape == (N,) and jnp.issubdtype(dtype, jnp.floating):
        return []
    return [f"`sinks`: shape {shape}, dtype {dtype}. It must be floating, one logit per query head: ({N},). Reshape."]


def segments_problems(segments: Any, q: Any, k: Any) -> list[str]:
    """What is wrong with `segments`, alone and for the rows of `q` and `k`."""
    if not isinstance(segments, Segments):
        return [f"`segments`: {_seen(segments)}. It must be Segments. Use Segments.from_cu_seqlens(cu_seqlens)."]
    rows = [np.shape(x)[0] if len(np.shape(x)) == 3 else None for x in (q, k)]
    return segments.problems(*rows)


def resolve_options(
    D: int,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int | None, int | None] | None,
    softcap: float | None,
) -> Options:
    """The meaning of valid options for heads of width `D`: the default scale is `D ** -0.5`."""
    left, right = (None if e is None or e == -1 else operator.index(e) for e in window_size or (None, None))
    return Options(
        softmax_scale=D**-0.5 if softmax_scale is None else float(softmax_scale),
        left=left,
        right=0 if causal else right,
        softcap=None if softcap is None else float(softcap),
    )


def offsets_are_broken(segments: Segments, Tq: int, Tk: int) -> jax.Array:
    """True, as a traced bool, when traced offsets break a rule: then every row of the answer is NaN."""
    broken = jnp.zeros((), bool)
    for cu, rows in ((segments.cu_seqlens_q, Tq), (segments.cu_seqlens_k, Tk)):
        cu = jnp.asarray(cu)
        broken |= (cu[0] != 0) | jnp.any(cu[1:] < cu[:-1]) | (cu[-1] > rows)
    return broken


def _is_real(value: Any) -> bool:
    # A concrete 0-d array is refused too: it would be a tracer inside jit, and the call would depend on where it runs.
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool | np.bool_)


def _is_reach(entry: Any) -> bool:
    if entry is None:
        return True
    return isinstance(entry, int | np.integer) and not isinstance(entry, bool | np.bool_) and int(entry) >= -1


def _seen(value: Any) -> str:
    return "a traced value" if isinstance(value, Tracer) else repr(value)
