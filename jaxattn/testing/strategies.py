"""Hypothesis strategies for packings, of fixed shapes, so that one compilation serves every example.

hypothesis is imported by this module only; `import jaxattn.testing` does not need it.
"""

from typing import Any

from hypothesis import strategies as st

from jaxattn.segments import Segments


def lengths(num_segments: int, rows: int) -> st.SearchStrategy[list[int]]:
    """Lengths of exactly `num_segments` segments that fit into `rows`; what is left over is a tail.

    Empty segments, single tokens, one huge segment among tiny ones, and all or nothing come up often.
    """
    if num_segments == 0:
        return st.just([])
    cuts = st.lists(st.integers(0, rows), min_size=num_segments, max_size=num_segments).map(sorted)
    anything = cuts.map(lambda ends: [end - start for start, end in zip([0, *ends], ends, strict=False)])
    single = st.integers(0, min(num_segments, rows)).map(lambda n: [1] * n + [0] * (num_segments - n))
    return st.one_of(anything, single, _one_huge(num_segments, rows))


@st.composite
def _one_huge(draw: st.DrawFn, num_segments: int, rows: int) -> list[int]:
    chosen, left = [], rows
    for _ in range(num_segments - 1):
        chosen.append(draw(st.integers(0, min(2, left))))
        left -= chosen[-1]
    chosen.insert(draw(st.integers(0, num_segments - 1)), left - draw(st.integers(0, min(2, left))))
    return chosen


def segments(num_segments: int, Tq: int, Tk: int | None = None) -> st.SearchStrategy[Segments]:
    """Segments of `num_segments` that fit into `Tq` query and `Tk` key rows; `Tk=None`: the same on both sides."""
    if Tk is None:
        return lengths(num_segments, Tq).map(Segments.from_lengths)
    return st.builds(Segments.from_lengths, lengths(num_segments, Tq), lengths(num_segments, Tk))


def windows(rows: int) -> st.SearchStrategy[tuple[int | None, int | None] | None]:
    """A valid `window_size`: none, both sides, or one side unlimited; reaches up to `rows`."""
    reach = st.one_of(st.none(), st.just(-1), st.integers(0, rows))
    return st.one_of(st.none(), st.tuples(reach, reach))


def options(rows: int) -> st.SearchStrategy[dict[str, Any]]:
    """Keyword arguments of the common signature that decide what is visible."""
    return st.fixed_dictionaries({"causal": st.booleans(), "window_size": windows(rows)})


@st.composite
def id_runs(draw: st.DrawFn, num_runs: int, longest: int = 3) -> list[int]:
    """Ids for every row in up to `num_runs` runs of distinct ids, in any order: mostly few small ones, so that two
    draws share some, negative and large ones included."""
    names = st.one_of(st.integers(-2, 4), st.sampled_from([-(2**31), 2**31 - 1]))
    ids = draw(st.lists(names, max_size=num_runs, unique=True))
    return [i for i in ids for _ in range(draw(st.integers(1, longest)))]
