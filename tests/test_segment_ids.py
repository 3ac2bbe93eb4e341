"""Segments from ids and positions, and back: the same segments on the host and traced, judged by brute force."""

import time
import tracemalloc
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxattn import Segments, reference_attention
from jaxattn.mask import dense_mask
from jaxattn.testing.strategies import id_runs, segments

T = 8
few_ids = st.lists(st.integers(-1, 3), min_size=T, max_size=T)
quick = settings(deadline=None, max_examples=60, derandomize=True)


# By brute force: what every pair of rows must be.
def pairs_of_equal_ids(q: list[int], k: list[int], padding_id: int | None) -> list[list[bool]]:
    return [[i == j and i != padding_id for j in k] for i in q]


def without_empty(s: Segments) -> list[tuple[int, int]]:
    """The lengths of the segments that are not empty on both sides: what ids and positions can say."""
    return [(q, k) for q, k in zip(s.q_lengths.tolist(), s.k_lengths.tolist(), strict=True) if q or k]


def shared_ids(q: list[int], k: list[int], padding_id: int | None) -> list[int]:
    """The ids of q that k has too, in the order of q."""
    return [i for i in dict.fromkeys(q) if i in k and i != padding_id]


@settings(deadline=None, max_examples=500, derandomize=True)
@given(id_runs(4), id_runs(4), st.booleans(), st.one_of(st.none(), st.integers(-2, 4)))
def test_rows_see_each_other_exactly_when_their_ids_are_equal(q, k, same, padding_id) -> None:
    k = q if same else k

    def make() -> Segments:
        return Segments.from_segment_ids(q, None if same else k, padding_id=padding_id)

    if shared_ids(q, k, padding_id) != shared_ids(k, q, padding_id):
        with pytest.raises(ValueError, match="another order"):
            make()
        return
    s = make()
    assert s.cu_seqlens_q.dtype == s.cu_seqlens_k.dtype == np.int32
    s.check(len(q), len(k))
    q_ids, k_ids = s.q_ids(len(q)).tolist(), s.k_ids(len(k)).tolist()
    assert [[i == j >= 0 for j in k_ids] for i in q_ids] == pairs_of_equal_ids(q, k, padding_id)
    for given_ids, ids in ((q, q_ids), (k, k_ids)):  # every run is one segment
        assert [a == b for a, b in pairwise(ids)] == [a == b for a, b in pairwise(given_ids)]
    assert all(s.q_lengths + s.k_lengths)  # and nothing else is one


@jax.jit
def traced_pair(q, k):
    return Segments.from_segment_ids(q, k, padding_id=0, num_segments=5)


@jax.jit
def traced_alone(q):
    return Segments.from_segment_ids(q, padding_id=0, num_segments=5)


@settings(deadline=None, max_examples=300, derandomize=True)
@given(few_ids, few_ids, st.booleans(), st.booleans())
def test_traced_ids_give_what_host_ids_give_and_minus_one_where_those_are_refused(q, k, same, tidy) -> None:
    if tidy:
        q, k = sorted(q), sorted(k)
    got = traced_alone(np.array(q)) if same else traced_pair(np.array(q), np.array(k))
    try:
        want = Segments.from_segment_ids(q, None if same else k, padding_id=0, num_segments=5)
    except ValueError:
        assert set(got.cu_seqlens_q.tolist()) == set(got.cu_seqlens_k.tolist()) == {-1}
    else:
        assert got.same_as(want), (got, want)


@jax.jit
def traced_positions(q, k):
    return Segments.from_position_ids(q, k, num_segments=5)


@quick
@given(few_ids, few_ids)
def test_traced_positions_give_what_host_positions_give(q, k) -> None:
    got = traced_positions(np.array(q), np.array(k))
    try:
        want = Segments.from_position_ids(q, k, num_segments=5)
    except ValueError:
        assert set(got.cu_seqlens_q.tolist()) == {-1}
    else:
        assert got.same_as(want), (got, want)


@quick
@given(segments(5, 12, 9))
def test_round_trips_through_offsets_ids_and_positions(s: Segments) -> None:
    assert Segments.from_cu_seqlens(s.cu_seqlens_q, s.cu_seqlens_k).same_as(s)
    assert Segments.from_lengths(s.q_lengths, s.k_lengths).same_as(s)
    assert without_empty(Segments.from_segment_ids(s.q_ids(12), s.k_ids(9), padding_id=-1)) == without_empty(s)
    alone = Segments.from_lengths(s.q_lengths)
    assert without_empty(Segments.from_position_ids(alone.q_positions(12))) == without_empty(alone)
    assert without_empty(Segments.from_segment_ids(alone.k_ids(12), padding_id=-1)) == without_empty(alone)


@quick
@given(segments(5, 12, 9))
def test_ids_and_positions_by_brute_force(s: Segments) -> None:
    for cu, ids, positions, rows in (
        (s.cu_seqlens_q.tolist(), s.q_ids(12), s.q_positions(12), 12),
        (s.cu_seqlens_k.tolist(), s.k_ids(9), s.k_positions(9), 9),
    ):
        want = [(b, row - start) for b, (start, end) in enumerate(pairwise(cu)) for row in range(start, end)]
        want += [(-1, -1)] * (rows - cu[-1])
        assert list(zip(ids.tolist(), positions.tolist(), strict=True)) == want


def test_ids_of_empty_segments_and_tails() -> None:
    s = Segments.from_cu_seqlens([0, 3, 3, 5])
    assert s.q_ids(7).tolist() == [0, 0, 0, 2, 2, -1, -1]
    assert not dense_mask(s, 7, 7)[5:, 5:].any()  # the tail of q and the tail of k are no segment
    assert jax.jit(lambda s: s.q_ids(7))(s).tolist() == s.q_ids(7).tolist()
    assert jax.jit(lambda s: s.k_positions(7))(s).tolist() == [0, 1, 2, 0, 1, -1, -1]


def test_positions_restart_in_every_segment() -> None:
    assert Segments.from_segment_ids([1, 1, 1, 2, 2]).q_positions(5).tolist() == [0, 1, 2, 0, 1]


def test_a_segment_begins_where_the_position_does_not_increase_by_one() -> None:
    assert Segments.from_position_ids([2, 3, 4, 2, 3]).q_lengths.tolist() == [3, 2]
    assert Segments.from_position_ids([0, 0, 1, 3]).q_lengths.tolist() == [1, 2, 1]
    assert Segments.from_position_ids([0, 1, -1, -1]).q_lengths.tolist() == [2]


def test_padding_is_a_tail_at_the_end_and_two_one_sided_segments_elsewhere() -> None:
    s = Segments.from_segment_ids([0, 5, 5, 0, 0, 6, 0], padding_id=0)
    assert list(zip(s.q_lengths.tolist(), s.k_lengths.tolist(), strict=True)) == [
        (1, 0), (0, 1), (2, 2), (2, 0), (0, 2), (1, 1),
    ]  # fmt: skip
    assert Segments.from_segment_ids([-1, -1], padding_id=-1).num_segments == 0


def test_an_id_on_one_side_only_makes_a_one_sided_segment() -> None:
    s = Segments.from_segment_ids([3, 3, 9], [3, 4, 4, 9, 9])
    assert (s.q_lengths.tolist(), s.k_lengths.tolist()) == ([2, 0, 1], [1, 2, 2])


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "int32", "int64", "uint64"])
def test_ids_of_any_integer_dtype(dtype: str) -> None:
    ids = np.array([100, 100, 101, 0], dtype)
    assert Segments.from_segment_ids(ids, padding_id=0).q_lengths.tolist() == [2, 1]
    assert Segments.from_segment_ids(ids, padding_id=-1).q_lengths.tolist() == [2, 1, 1]  # no row can hold it
    assert Segments.from_segment_ids(ids, ids.astype(np.int64)).q_lengths.tolist() == [2, 1, 1]
    assert Segments.from_position_ids(np.array([126, 127, 0], dtype)).q_lengths.tolist() == [2, 1]


def test_an_unsigned_padding_id_does_not_wrap_when_traced() -> None:
    traced = jax.jit(lambda ids: Segments.from_segment_ids(ids, padding_id=-1, num_segments=2).q_lengths)
    assert traced(np.array([255, 255, 7], np.uint8)).tolist() == [2, 1]


@pytest.mark.parametrize("rows", [0, 4])
@pytest.mark.parametrize("num_segments", [0, 2])
def test_no_rows_or_no_segments(rows: int, num_segments: int) -> None:
    ids = np.full(rows, -1)
    want = [0] * (num_segments + 1)
    for make in (
        lambda ids: Segments.from_segment_ids(ids, padding_id=-1, num_segments=num_segments),
        lambda ids: Segments.from_position_ids(ids, num_segments=num_segments),
    ):
        assert make(ids).cu_seqlens_q.tolist() == want
        assert jax.jit(make)(ids).cu_seqlens_k.tolist() == want


def test_broken_traced_ids_make_the_attention_nan() -> None:
    @jax.jit
    def attend(ids):
        x = jnp.ones((4, 1, 2))
        return reference_attention(x, x, x, Segments.from_segment_ids(ids, num_segments=3), return_softmax_lse=True)

    assert all(bool(jnp.isfinite(x).all()) for x in attend(jnp.array([1, 1, 2, 2])))
    for broken in ([1, 2, 1, 1], [1, 2, 3, 4]):
        assert all(bool(jnp.isnan(x).all()) for x in attend(jnp.array(broken)))


def test_a_batch_of_ids_under_vmap() -> None:
    batch = jnp.array([[1, 1, 0, 0], [1, 2, 2, 0]])
    s = jax.jit(jax.vmap(lambda ids: Segments.from_segment_ids(ids, padding_id=0, num_segments=2)))(batch)
    assert s.cu_seqlens_q.tolist() == [[0, 2, 2], [0, 1, 3]]


def test_host_ids_stay_concrete_inside_jit() -> None:
    @jax.jit
    def inside():
        s = Segments.from_segment_ids([1, 1, 2])
        assert s.is_concrete
        assert Segments.from_segment_ids(s.q_ids(3)).is_concrete
        return s

    assert inside().same_as(Segments.from_lengths([2, 1]))


@pytest.mark.parametrize("length", [1_000_000, 100, 1], ids=["one segment", "segments of 100", "single tokens"])
def test_a_million_tokens_cost_time_and_memory_linear_in_them(length: int) -> None:
    rows = 1_000_000
    s = Segments.from_lengths(np.full(rows // length, length))
    tracemalloc.start()
    begin = time.perf_counter()
    ids = s.q_ids(rows)
    by_ids, by_positions = Segments.from_segment_ids(ids, ids.copy()), Segments.from_position_ids(s.q_positions(rows))
    seconds, peak = time.perf_counter() - begin, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert by_ids.same_as(s)
    assert by_positions.same_as(s)
    assert peak < 300 * rows, f"{peak / rows} bytes for each token"
    assert seconds < 20, "measured: 0.05 s for segments of 100, 0.7 s for single tokens"


def test_traced_ids_of_a_million_tokens_cost_memory_linear_in_them() -> None:
    rows = 1_000_000
    make = jax.jit(lambda q, k: Segments.from_segment_ids(q, k, padding_id=0, num_segments=1000))
    compiled = make.lower(*(jax.ShapeDtypeStruct((rows,), jnp.int32),) * 2).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 40 * rows
