"""Arrays cross between JAX and torch without a copy when asked, and never share memory when not."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from interop import npu_packed_attention, to_jax, to_torch
from interop.dlpack import view, view_by_numpy
from jaxattn import Segments
from npu.simulator import counters

DTYPES = [
    "bool", "int8", "int16", "int32", "uint8", "uint16", "uint32", "float16", "bfloat16", "float32", "complex64",
    "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu",
]  # fmt: skip


def sample(dtype: str, shape: tuple[int, ...] = (3, 4)) -> jax.Array:
    return (jnp.arange(np.prod(shape, dtype=int)).reshape(shape) % 2).astype(dtype)


@pytest.mark.parametrize("shape", [(3, 4), (), (0, 4)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_shared_dtype_makes_the_round_trip(dtype: str, shape: tuple[int, ...]) -> None:
    array = sample(dtype, shape)
    for copy in (True, False, None):
        tensor = to_torch(array, copy=copy)
        assert (str(tensor.dtype), tuple(tensor.shape)) == (f"torch.{dtype}", shape)
        back = to_jax(tensor, copy=True)
        assert back.dtype == array.dtype
        np.testing.assert_array_equal(np.asarray(back), np.asarray(array))


@pytest.mark.parametrize("dtype", DTYPES)
def test_both_ways_of_looking_at_a_buffer_agree(dtype: str) -> None:
    array = sample(dtype)
    one, other = view(array), view_by_numpy(array)
    assert one.dtype == other.dtype
    assert one.data_ptr() == other.data_ptr() == array.unsafe_buffer_pointer()


def test_writing_to_what_the_default_returns_changes_nothing_else() -> None:
    array = jnp.zeros(64)
    to_torch(array).fill_(1)
    assert not array.any()
    tensor = torch.zeros(64)
    result = to_jax(tensor)
    tensor.fill_(1)
    assert not result.any()


def test_sharing_by_name_is_the_same_memory() -> None:
    array = jnp.zeros(64)
    assert to_torch(array, copy=False).data_ptr() == array.unsafe_buffer_pointer()
    tensor = torch.zeros(64)
    assert to_jax(tensor, copy=False).unsafe_buffer_pointer() == tensor.data_ptr()


def test_strided_tensors_are_copied_or_refused() -> None:
    base = torch.arange(24.0).reshape(4, 6)
    for strided in (base.T, base[:, ::2], base[:1].expand(3, 6), base[1:, 1:]):
        np.testing.assert_array_equal(np.asarray(to_jax(strided)), strided.numpy())
        np.testing.assert_array_equal(np.asarray(to_jax(strided, copy=None)), strided.numpy())
        with pytest.raises(ValueError, match="JAX shares contiguous memory at a multiple of 64 bytes"):
            to_jax(strided, copy=False)


def test_pinned_memory_is_copied_or_refused() -> None:
    pinned = torch.arange(4.0).pin_memory()
    for copy in (True, None):
        assert to_jax(pinned, copy=copy).tolist() == [0, 1, 2, 3]
    with pytest.raises(
        ValueError, match=r", pinned\. JAX shares contiguous memory at a multiple of 64 bytes, not pinned"
    ):
        to_jax(pinned, copy=False)


def test_jax_still_ignores_its_own_copy_argument() -> None:
    # The reason why what must be owned is copied on torch's side. When this fails, that can be left to jax.
    tensor = torch.zeros(64)
    assert jax.dlpack.from_dlpack(tensor, copy=True).unsafe_buffer_pointer() == tensor.data_ptr()


def deleted() -> jax.Array:
    array = jnp.zeros(3)
    array.delete()
    return array


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda: jax.jit(to_torch)(jnp.zeros(3)), "a traced value. It has no memory while a function is traced"),
        (lambda: to_torch(deleted()), "its memory was deleted, or donated"),
        (lambda: to_torch(jax.random.key(0)), "dtype key<fry>. torch has no keys. Use jax.random.key_data"),
        (lambda: to_torch(jnp.zeros(3, jnp.int4)), "dtype int4 does not cross to torch. Cast it with .astype"),
        (lambda: to_torch(np.zeros(3)), "ndarray. It must be a jax.Array"),
        (lambda: to_torch(jnp.zeros(3), copy=1), "`copy`: 1. It must be True, False or None"),
        (lambda: to_jax(torch.zeros(3, requires_grad=True)), "requires grad. JAX would drop the graph"),
        (lambda: to_jax(torch.zeros(3, dtype=torch.float64)), "torch.float64, and JAX's 64-bit types are off"),
        (lambda: to_jax(torch.tensor([2**31 + 5]), narrow=True), "torch.int64 values that do not fit int32"),
        (lambda: to_jax(torch.zeros(3, device="meta")), "it has no memory"),
        (lambda: to_jax(torch.zeros(3).to_sparse()), "layout torch.sparse_coo"),
        (lambda: to_jax(torch.zeros(3).to("npu:0"), copy=False), "on npu:0. JAX cannot see that memory"),
        (lambda: to_jax(torch.zeros(3, dtype=torch.complex64).conj(), copy=False), "a lazy conjugate or negation"),
    ],
)
def test_what_cannot_cross_is_refused_with_the_way_out(make, line: str) -> None:
    with pytest.raises(ValueError, match=re.escape(line)):
        make()


def test_lazy_negation_keeps_its_sign_and_npu_tensors_come_home() -> None:
    tensor = torch.tensor([1 + 2j]).conj().imag
    assert tensor.is_neg()
    assert to_jax(tensor).tolist() == [-2.0]
    assert to_jax(torch.arange(3.0).to("npu:2")).tolist() == [0, 1, 2]
    assert to_jax(torch.tensor([5]), narrow=True).dtype == jnp.int32


@pytest.mark.parametrize("with_lse", [False, True], ids=["out", "out and lse"])
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_each_array_crosses_the_border_once_and_host_memory_is_not_copied(
    jit: bool, with_lse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from interop import callback, operations

    q, k, v = (sample("float16", (6, 2, 64)) + i for i in range(3))
    seen = []

    def watched(buffer):
        seen.append(view(buffer))
        return seen[-1]

    monkeypatch.setattr(operations, "view", watched)
    monkeypatch.setattr(callback, "view", watched)
    run = jax.jit(npu_packed_attention, static_argnames="return_softmax_lse") if jit else npu_packed_attention
    segments = Segments.from_lengths([2, 4])
    before = counters(0)
    results = run(q, k, v, segments, return_softmax_lse=with_lse)
    results = jax.block_until_ready(results if with_lse else (results,))
    spent = counters(0) - before
    assert [x.unsafe_buffer_pointer() for x in (q, k, v)] == [t.data_ptr() for t in seen[:3]]
    assert (spent.to_device.count, spent.to_device.nbytes) == (3, q.nbytes + k.nbytes + v.nbytes)
    assert (spent.to_host.count, spent.to_host.nbytes) == (len(results), sum(x.nbytes for x in results))
    if jit:  # the results were written straight into JAX's own outputs
        assert [x.unsafe_buffer_pointer() for x in results] == [t.data_ptr() for t in seen[3:]]
