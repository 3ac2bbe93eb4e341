"""Named packings that attention is known to get wrong somewhere, as data."""

from dataclasses import dataclass, field
from typing import Any, Literal

import ml_dtypes
import numpy as np

from jaxattn.segments import Segments

DTypeName = Literal["float16", "bfloat16", "float32", "float64"]

NUMPY_DTYPES: dict[str, Any] = {
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float32": np.float32,
    "float64": np.float64,
}


@dataclass(frozen=True)
class Poison:
    """One non-finite element: `array` is q, k, v or sinks; for sinks only `head` counts."""

    array: Literal["q", "k", "v", "sinks"]
    row: int
    head: int = 0
    value: float = float("nan")


@dataclass(frozen=True)
class Inputs:
    """The arrays of one case: numpy, host memory. `sinks` is float32 `[N]` or None."""

    q: np.ndarray[Any, Any]
    k: np.ndarray[Any, Any]
    v: np.ndarray[Any, Any]
    sinks: np.ndarray[Any, Any] | None


@dataclass(frozen=True)
class Case:
    """A packing and the options of one call. `k_lengths=None` means the lengths of q."""

    name: str
    q_lengths: tuple[int, ...]
    k_lengths: tuple[int, ...] | None = None
    q_tail: int = 0
    k_tail: int = 0
    heads: tuple[int, int] = (2, 2)
    """Query heads N and key/value heads K."""
    widths: tuple[int, int] = (64, 64)
    """Head widths D of q and k, Dv of v."""
    softmax_scale: float | None = None
    causal: bool = False
    window_size: tuple[int | None, int | None] | None = None
    softcap: float | None = None
    sinks: bool = False
    poison: tuple[Poison, ...] = ()
    gain: float = 1.0
    """Factor on q; larger means sharper softmax and larger scores."""
    value_by_head: bool = False
    """v is the number of its key/value head, so that out shows which head was read."""
    seed: int = field(default=0, compare=False)

    @property
    def segments(self) -> Segments:
        return Segments.from_lengths(self.q_lengths, self.k_lengths)

    @property
    def rows(self) -> tuple[int, int]:
        """Tq and Tk, tails included."""
        k_lengths = self.q_lengths if self.k_lengths is None else self.k_lengths
        return sum(self.q_lengths) + self.q_tail, sum(k_lengths) + self.k_tail

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments of the common signature, without sinks and `return_softmax_lse`."""
        return {
            "softmax_scale": self.softmax_scale,
            "causal": self.causal,
            "window_size": self.window_size,
            "softcap": self.softcap,
        }

    @property
    def lengths(self) -> str:
        """The lengths as text: `[5, 3]+2` (a tail of 2) when q and k agree, else `q:[5, 3] k:[2, 3]`."""
        k_lengths = self.q_lengths if self.k_lengths is None else self.k_lengths
        q, k = _short(self.q_lengths, self.q_tail), _short(k_lengths, self.k_tail)
        return q if q == k else f"q:{q} k:{k}"

    def inputs(self, dtype: DTypeName) -> Inputs:
        """Standard normal q, k, v in `dtype`, the same for every call; poison put in last."""
        rng = np.random.default_rng(self.seed)
        (Tq, Tk), (N, K), (D, Dv) = self.rows, self.heads, self.widths
        q = self.gain * rng.standard_normal((Tq, N, D))
        k = rng.standard_normal((Tk, K, D))
        v = rng.standard_normal((Tk, K, Dv))
        if self.value_by_head:
            v[:] = np.arange(K)[:, None]
        sinks = rng.standard_normal(N).astype(np.float32) if self.sinks else None
        arrays = {name: x.astype(NUMPY_DTYPES[dtype]) for name, x in (("q", q), ("k", k), ("v", v))}
        for p in self.poison:
            if p.array == "sinks":
                assert sinks is not None, f"case {self.name!r} poisons sinks that it does not have"
                sinks[p.head] = p.value
            else:
                arrays[p.array][p.row, p.head, 0] = p.value
        return Inputs(arrays["q"], arrays["k"], arrays["v"], sinks)

    def poisoned_segments(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Query rows and heads, bool `[Tq, N]`, that share a segment and a head group with a poisoned element.

        The specification lets poison reach exactly the rows that see it; an implementation may declare the weaker
        promise that it stays inside these.
        """
        (Tq, _), (N, K) = self.rows, self.heads
        reached = np.zeros((Tq, N), bool)
        cu = {"q": np.asarray(self.segments.cu_seqlens_q), "k": np.asarray(self.segments.cu_seqlens_k)}
        for p in self.poison:
            if p.array == "sinks":
                reached[: cu["q"][-1], p.head] = True
                continue
            group = p.head // (N // K) if p.array == "q" else p.head
            b = int(np.searchsorted(cu["q" if p.array == "q" else "k"], p.row, side="right")) - 1
            if b < len(self.q_lengths):
                reached[cu["q"][b] : cu["q"][b + 1], group * (N // K) : (group + 1) * (N // K)] = True
        return reached


def _short(lengths: tuple[int, ...], tail: int) -> str:
    shown = ", ".join(map(str, lengths)) if len(lengths) <= 6 else f"{len(lengths)} of sum {sum(lengths)}"
    return f"[{shown}]" + (f"+{tail}" if tail else "")


_ZIPF = tuple(max(1, 200 // rank) for rank in range(1, 25))

_INF = float("inf")
_SINKS = (Poison("sinks", 0, 1), Poison("sinks", 0, 2, _INF), Poison("sinks", 0, 3, -_INF))

CASES: tuple[Case, ...] = (
    Case("one segment", (9,)),
    Case("three segments of unequal length", (5, 3, 9)),
    Case("single tokens", (1, 1, 1, 1)),
    Case("one long among many short", (70, 1, 2, 1, 3, 1)),
    Case("lengths by Zipf's law, causal", _ZIPF, causal=True, heads=(4, 2)),
    Case("more keys than queries", (2, 3), (5, 7)),
    Case("more queries than keys", (5, 7), (2, 3)),
    Case("causal", (5, 3, 9), causal=True),
    Case("one query sees the whole cache", (1,), (5,), causal=True),
    Case("short query sees the end", (2,), (5,), causal=True),
    Case("rows before the first key are empty", (5,), (2,), causal=True),
    Case("alignment per segment, not by padded maximum", (1, 3), (3, 2), causal=True),
    Case("new tokens after caches of every length", (1, 1, 1, 4), (9, 4, 1, 10), causal=True),
    Case("segments empty on one side", (2, 0, 2), (3, 2, 0)),
    Case("one segment without keys, one without queries", (2, 0, 2), (0, 3, 2)),
    Case("segments empty on one side, causal", (2, 0, 4, 2), (3, 2, 0, 2), causal=True),
    Case("segments empty on both sides", (0, 3, 0, 0, 2, 0)),
    Case("no segments, only a tail", (), q_tail=3, k_tail=2),
    Case("nothing at all", ()),
    Case("every segment empty, rows in tails only", (0, 0), q_tail=3, k_tail=2, widths=(64, 32)),
    Case("queries without any key", (3, 2), (0, 0), widths=(64, 32)),
    Case("keys without any query", (0, 0), (3, 2)),
    Case("tails on both sides", (5, 2), q_tail=3, k_tail=4),
    Case("tails of different length, causal", (4, 2), (6, 1), q_tail=1, k_tail=5, causal=True),
    Case("window reaches back two", (6,), window_size=(2, 0)),
    Case("window on unequal lengths", (2,), (6,), window_size=(2, 0)),
    Case("window on both sides", (9, 4), window_size=(2, 1)),
    Case("window with one side unlimited", (7, 5), (9, 4), window_size=(None, 1)),
    Case("window unlimited on both sides, written as -1", (7, 5), (9, 4), window_size=(-1, -1)),
    Case("window ahead only", (6, 3), window_size=(0, 2)),
    Case("window on new tokens after a cache", (1, 3), (9, 8), causal=True, window_size=(3, None)),
    Case("window of one key", (4, 3), window_size=(0, 0)),
    Case("causal cuts the right side of a window", (8, 3), causal=True, window_size=(4, 3)),
    Case("window leaves leading rows empty", (9, 4), (3, 4), window_size=(1, 2)),
    Case("grouped heads repeat, they do not tile", (4,), heads=(4, 2), value_by_head=True),
    Case("grouped heads, unequal lengths, causal", (5, 8, 1), (7, 3, 4), heads=(8, 2), causal=True),
    Case("one key/value head", (6, 2), heads=(5, 1)),
    Case("head width 32 keeps its scale", (5, 3, 9), heads=(12, 12), widths=(32, 32)),
    Case("head width 80 keeps its scale", (6, 4), widths=(80, 80), causal=True),
    Case("head width 128", (17, 5), heads=(4, 2), widths=(128, 128)),
    Case("widths 192 and 128", (6, 5), widths=(192, 128), causal=True),
    Case("values narrower than keys", (6, 5), widths=(64, 16)),
    Case("values wider than keys", (6, 5), widths=(16, 64)),
    Case("head width 1", (4, 3), widths=(1, 1)),
    Case("scale given", (6, 5), softmax_scale=0.5),
    Case("scale of zero averages", (4, 2), softmax_scale=0.0),
    Case("scale below zero", (4, 2), softmax_scale=-0.25, causal=True),
    Case("large scores", (12, 9), gain=6.0),
    Case("softcap", (6, 5), softcap=2.0, causal=True),
    Case("sinks", (6, 5), sinks=True, heads=(4, 2)),
    Case("sinks in empty rows and tails", (5, 2), (2, 0), q_tail=2, causal=True, sinks=True),
    Case("sinks where no row sees a key", (2, 1), (0, 0), q_tail=1, sinks=True),
    Case("sinks under a window", (9, 4), (3, 4), window_size=(1, 0), sinks=True),
    Case("NaN in the tails", (5,), q_tail=3, k_tail=3, poison=(Poison("q", 6), Poison("k", 5), Poison("v", 7))),
    Case("NaN in another segment's value", (3, 2), poison=(Poison("v", 4),), causal=True),
    Case("Inf in another segment's key", (3, 4), poison=(Poison("k", 1, value=_INF),)),
    Case("NaN in one query", (3, 4), heads=(4, 2), poison=(Poison("q", 2, head=1),)),
    Case(
        "Inf in a query that sees no key", (5,), (2,), causal=True, poison=(Poison("q", 0, value=-_INF), Poison("q", 4))
    ),
    Case("Inf in a value of one head group", (5, 2), heads=(4, 2), causal=True, poison=(Poison("v", 3, 1, _INF),)),
    Case("NaN behind a window", (7,), window_size=(1, 1), poison=(Poison("k", 0), Poison("v", 6))),
    Case("NaN and Inf in sinks", (3, 1), (2, 0), q_tail=2, heads=(4, 2), sinks=True, poison=_SINKS),
    Case("NaN in keys without queries", (2, 0, 3), (2, 3, 3), poison=(Poison("k", 3), Poison("v", 4))),
)
