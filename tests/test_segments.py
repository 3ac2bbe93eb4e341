"""Segments: offsets as a pytree."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxattn import Segments, draw
from jaxattn.mask import dense_mask


def test_lengths_and_offsets_say_the_same() -> None:
    a, b = Segments.from_lengths([3, 0, 2], [1, 4, 0]), Segments.from_cu_seqlens([0, 3, 3, 5], [0, 1, 5, 5])
    assert a.same_as(b)
    assert not a.same_as(Segments.from_lengths([3, 0, 2]))
    assert (a.num_segments, a.q_lengths.tolist(), a.k_lengths.tolist()) == (3, [3, 0, 2], [1, 4, 0])


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "int32", "int64", "uint64"])
@pytest.mark.parametrize("make", [np.array, jnp.array], ids=["numpy", "jax"])
def test_offsets_are_int32_whatever_came_in_and_do_not_wrap(make, dtype: str) -> None:
    with jax.enable_x64("64" in dtype):
        lengths = make([100, 100, 100], dtype=dtype)
    segments = Segments.from_lengths(lengths)
    assert isinstance(segments.cu_seqlens_q, np.ndarray)
    assert segments.cu_seqlens_q.dtype == np.int32
    assert segments.cu_seqlens_q.tolist() == [0, 100, 200, 300]
    traced = jax.jit(lambda n: Segments.from_lengths(n).cu_seqlens_q)(lengths)
    assert (traced.dtype, traced.tolist()) == (jnp.int32, [0, 100, 200, 300])


def test_num_segments_pads_with_empty_segments() -> None:
    assert Segments.from_lengths([2], num_segments=3).q_lengths.tolist() == [2, 0, 0]
    traced = jax.jit(lambda n: Segments.from_lengths(n, num_segments=3).cu_seqlens_k)(jnp.array([2]))
    assert traced.tolist() == [0, 2, 2, 2]


def test_host_offsets_stay_concrete_inside_jit() -> None:
    @jax.jit
    def inside():
        segments = Segments.from_lengths([3, 2])
        assert segments.is_concrete
        with pytest.raises(ValueError, match="the last offset is 5, past the 4 rows"):
            segments.check(4, 5)
        return segments

    assert inside().same_as(Segments.from_lengths([3, 2]))


def test_passes_through_transforms() -> None:
    one, two = Segments.from_lengths([3, 2]), Segments.from_lengths([1, 4])
    batch = jax.tree.map(lambda *leaves: jnp.stack(leaves), one, two)
    ids = jax.vmap(lambda s: s.q_ids(6))(batch)
    assert ids.tolist() == [[0, 0, 0, 1, 1, -1], [0, 1, 1, 1, 1, -1]]
    total, _ = jax.lax.scan(lambda c, s: (c + s.q_lengths, None), jnp.zeros(2, jnp.int32), batch)
    assert total.tolist() == [4, 6]
    spec = PartitionSpec("batch")
    mesh = jax.make_mesh((1,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,))
    shifted = jax.shard_map(lambda s: jax.vmap(lambda s: s.q_ids(6))(s), mesh=mesh, in_specs=spec, out_specs=spec)
    assert shifted(batch).tolist() == ids.tolist()
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(one)]
    assert paths == [".cu_seqlens_q", ".cu_seqlens_k"]
    assert jax.tree.map(lambda _: None, one) is not None
    assert "traced or batched" in repr(batch)


def test_immutable_without_hash_or_equality() -> None:
    segments = Segments.from_lengths([1])
    with pytest.raises(AttributeError, match="Segments are immutable"):
        segments.cu_seqlens_q = None
    with pytest.raises(TypeError, match="unhashable"):
        hash(segments)
    with pytest.raises(TypeError, match="same_as"):
        _ = segments == segments
    with pytest.raises(TypeError, match="from_lengths"):
        Segments()


def test_repr() -> None:
    assert repr(Segments.from_lengths([5, 3], [5, 0])) == "Segments(q=[5, 3], k=[5, 0])"
    assert repr(Segments.from_lengths(range(20))) == "Segments(q=[0, 1, 2, 3, 4, 5, 6, 7, ... 12 more], k=q)"


@pytest.mark.parametrize(
    ("segments", "options", "rows"),
    [
        (Segments.from_lengths([1], [5]), {"right": 0}, ["11111"]),
        (Segments.from_lengths([2], [5]), {"right": 0}, ["11110", "11111"]),
        (Segments.from_lengths([1, 3], [3, 2]), {"right": 0}, ["11100", "00000", "00010", "00011"]),
        (
            Segments.from_lengths([6]),
            {"left": 2, "right": 0},
            ["100000", "110000", "111000", "011100", "001110", "000111"],
        ),
        (Segments.from_lengths([2], [6]), {"left": 2, "right": 0}, ["001110", "000111"]),
        (Segments.from_lengths([2, 0, 2], [3, 2, 0]), {}, ["11100", "11100", "00000", "00000"]),
        (Segments.from_lengths([2]), {"left": 2**40, "right": 2**40}, ["11", "11"]),
    ],
)
def test_masks_worked_by_hand(segments: Segments, options: dict, rows: list[str]) -> None:
    mask = dense_mask(segments, len(rows), len(rows[0]), **options)
    assert ["".join("01"[x] for x in row) for row in mask.astype(int).tolist()] == rows


def test_drawings_worked_by_hand() -> None:
    assert draw(Segments.from_lengths([2], [5]), causal=True) == "k  0 1 2 3 4\nq0 x x x x .\nq1 x x x x x"
    tails = draw(Segments.from_lengths([2, 0, 1], [1, 2, 1]), 4, 5, window_size=(0, None)).splitlines()
    assert tails == [
        "k  0 | 1 2 | 3 | 4",
        "q0 x | . . | . | .",
        "q1 x | . . | . | .",
        "-- - | --- | - | -",
        "q2 . | . . | x | .",
        "-- - | --- | - | -",
        "q3 . | . . | . | .",
    ]
    assert draw(Segments.from_lengths([1], [11])).splitlines()[0] == "k   0  1  2  3  4  5  6  7  8  9 10"
    assert draw(Segments.from_lengths([])) == "k"
    assert draw(Segments.from_lengths([2], [0])) == "k\nq0\nq1"


def test_drawing_inside_jit_shows_offsets_of_the_host() -> None:
    drawn = []
    jax.jit(lambda x: drawn.append(draw(Segments.from_lengths([1]))) or x)(1.0)
    assert drawn == ["k  0\nq0 x"]


def test_copies_and_pickles() -> None:
    segments = Segments.from_lengths([3, 2], [1, 4])
    for copied in (copy.copy(segments), copy.deepcopy(segments), pickle.loads(pickle.dumps(segments))):
        assert copied.same_as(segments)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Segments.from_lengths([2, 1]),
        lambda: Segments.from_lengths([2, 1], num_segments=4),
        lambda: Segments.from_cu_seqlens(np.array([0, 2, 3], np.int32)),
        lambda: Segments.from_segment_ids([1, 1, 2]),
        lambda: Segments.from_position_ids([0, 1, 0]),
    ],
)
def test_offsets_cannot_be_written(make) -> None:
    segments = make()
    for offsets in (segments.cu_seqlens_q, segments.cu_seqlens_k):
        with pytest.raises(ValueError, match="read-only"):
            offsets[1] = 77


def test_the_callers_own_array_stays_writable() -> None:
    mine = np.array([0, 2, 3], np.int32)
    Segments.from_cu_seqlens(mine)
    mine[1] = 1
