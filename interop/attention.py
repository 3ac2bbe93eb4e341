"""Packed attention for JAX arrays, executed on the NPU."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.core import Tracer
from jaxtyping import Array, Float

from interop.dlpack import view
from jaxattn import Segments, reference_attention
from jaxattn.validation import option_problems, resolve_options, segments_problems, sinks_problems
from npu.device import as_device
from npu.kernels import run
from npu.plan import make_plan
from npu.validation import Described, offsets_problems, packed_problems

# The one import of an experimental interface. On the CPU its buffers are XLA's own memory, inputs and outputs, so
# nothing is copied; the documented callbacks copy every argument and can deadlock while they do.
from jax.experimental.buffer_callback import buffer_callback  # isort: skip

Out = Float[Array, "Tq N Dv"]
Lse = Float[Array, "N Tq"]


@overload
def npu_packed_attention(
    q: Float[Array, "Tq N D"], k: Float[Array, "Tk K D"], v: Float[Array, "Tk K Dv"], segments: Segments, *,
    softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int | None, int | None] | None = None, softcap: float | None = None,
    sinks: Float[Array, " N"] | None = None, return_softmax_lse: Literal[False] = False,
    device: int | str | None = None,
) -> Out: ...  # fmt: skip
@overload
def npu_packed_attention(
    q: Float[Array, "Tq N D"], k: Float[Array, "Tk K D"], v: Float[Array, "Tk K Dv"], segments: Segments, *,
    softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int | None, int | None] | None = None, softcap: float | None = None,
    sinks: Float[Array, " N"] | None = None, return_softmax_lse: Literal[True],
    device: int | str | None = None,
) -> tuple[Out, Lse]: ...  # fmt: skip
def npu_packed_attention(
    q: Float[Array, "Tq N D"],
    k: Float[Array, "Tk K D"],
    v: Float[Array, "Tk K Dv"],
    segments: Segments,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    return_softmax_lse: bool = False,
    device: int | str | None = None,
) -> Out | tuple[Out, Lse]:
    """Attention inside each segment of a packed batch, by the fused kernel of an Ascend NPU.

    The signature and the answers of `jaxattn.reference_attention`, on another device: swap the function, nothing
    else. Works eagerly and under `jit`; host memory is shared with torch and never copied, each array crosses to the
    device once and the result comes back once. Differentiable in reverse mode; the gradient is that of the JAX
    specification, computed by JAX on the CPU.

    A NaN or Inf in q, k or v stays inside its segment and head group, where any row may become non-finite; the
    specification confines it to the rows that see it.

    Args:
        q: queries `[Tq, N, D]`, float16 or bfloat16.
        k: keys `[Tk, K, D]`, the dtype of q. `N` must be a multiple of `K`.
        v: values `[Tk, K, Dv]`, the dtype of q.
        segments: which rows belong together.
        softmax_scale, causal, window_size, sinks, return_softmax_lse: as in `jaxattn.reference_attention`.
        softcap: must be None; the kernel has none.
        device: the NPU, as an index or "npu:1"; None is torch's current NPU.

    Returns:
        out `[Tq, N, Dv]` in the dtype of q; with `return_softmax_lse=True` also lse, float32 `[N, Tq]`.

    Raises:
        ValueError: everything that is wrong with the call, one line each, at trace time. Offsets that are traced are
            checked when the program runs, where JAX raises jax.errors.JaxRuntimeError with the same text.
        NotImplementedError: what the kernel lacks, by name, and what to use instead.
        RuntimeError: there is no NPU, real or simulated.
    """
    described = [Described(tuple(np.shape(x)), str(getattr(x, "dtype", type(x).__name__))) for x in (q, k, v)]
    problems = packed_problems(*described)
    problems += option_problems(softmax_scale, causal, window_size, softcap, return_softmax_lse)
    if len(np.shape(q)) == 3:
        problems += sinks_problems(sinks, np.shape(q)[1])
    problems += segments_problems(segments, q, k)
    if problems:
        raise ValueError("\n".join(problems))
    if softcap is not None:
        raise NotImplementedError(
            f"`softcap`: {softcap}. The fused kernels of the NPU have no soft cap in packed layout. Use "
            f"jaxattn.reference_attention, or softcap=None."
        )
    make_plan(*(d.shape for d in described), described[0].dtype, (0,), (0,))  # what the kernel lacks, at trace time
    options = resolve_options(q.shape[2], softmax_scale, causal, window_size, None)
    call = _Call(options.softmax_scale, options.left, options.right, as_device(device).index)
    sinks = None if sinks is None else jnp.asarray(sinks)
    out, lse = _attention(call, q, k, v, sinks, segments.cu_seqlens_q, segments.cu_seqlens_k)
    return (out, lse) if return_softmax_lse else out


@dataclass(frozen=True)
class _Call:
    """What is fixed when a call is traced."""

    softmax_scale: float
    left: int | None
    right: int | None
    npu: int

    def on_the_npu(self, arrays: list[Any], into: list[torch.Tensor] | None) -> list[torch.Tensor]:
        """out and lse of host buffers `q, k, v, cu_seqlens_q, cu_seqlens_k[, sinks]`, on the host.

        Copied straight `into` the given tensors, or else into new ones. No JAX function may be called in here: this
        runs inside XLA, on any thread, where it could wait for itself.
        """
        q, k, v, cu_q, cu_k, *sinks = arrays
        offsets = [tuple(np.asarray(cu).tolist()) for cu in (cu_q, cu_k)]
        problems = offsets_problems("cu_seqlens_q", offsets[0], q.shape[0])
        problems += offsets_problems("cu_seqlens_k", offsets[1], k.shape[0])
        if problems:
            raise ValueError("\n".join(problems))
        plan = make_plan(
            q.shape, k.shape, v.shape, q.dtype.name, *offsets,
            softmax_scale=self.softmax_scale, left=self.left, right=self.right, return_softmax_lse=True,
        )  # fmt: skip
        with _own_state(self.npu):
            tensors = [view(x).to(f"npu:{self.npu}") for x in (q, k, v, *sinks)]
            out, lse = run(plan, *tensors[:3], sinks=tensors[3] if sinks else None, return_softmax_lse=True)
            assert lse is not None
            if into is None:
                return [out.cpu(), lse.cpu()]
            into[0].copy_(out)
            into[1].copy_(lse)
            return into


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(call: _Call, q: Any, k: Any, v: Any, sinks: Any, cu_q: Any, cu_k: Any) -> tuple[jax.Array, jax.Array]:
    (Tq, N, _), Dv = q.shape, v.shape[2]
    operands = [q, k, v, cu_q, cu_k] + ([] if sinks is None else [sinks])
    if all(_is_here(x) for x in operands):
        out, lse = call.on_the_npu([_settled(x) for x in operands], into=None)
        return jnp.from_dlpack(out), jnp.from_dlpack(lse)
    shapes = (jax.ShapeDtypeStruct((Tq, N, Dv), q.dtype), jax.ShapeDtypeStruct((N, Tq), jnp.float32))
    # "sequential": a batch is one call per element.
    return tuple(buffer_callback(_callback(call), shapes, vmap_method="sequential")(*operands))


def _forward(call: _Call, *operands: Any) -> tuple[tuple[jax.Array, jax.Array], tuple[Any, ...]]:
    return _attention(call, *operands), operands


def _backward(call: _Call, operands: tuple[Any, ...], cotangents: tuple[jax.Array, jax.Array]) -> tuple[Any, ...]:
    q, k, v, sinks, cu_q, cu_k = operands

    def specification(q: Any, k: Any, v: Any, sinks: Any) -> tuple[jax.Array, jax.Array]:
        return reference_attention(
            q, k, v, Segments._of(cu_q, cu_k),
            softmax_scale=call.softmax_scale, window_size=(call.left, call.right), sinks=sinks, return_softmax_lse=True,
        )  # fmt: skip

    return *jax.vjp(specification, q, k, v, sinks)[1](cotangents), None, None


_attention.defvjp(_forward, _backward)


@lru_cache(maxsize=256)  # a new function per call would be lowered again each time
def _callback(call: _Call) -> Callable[..., None]:
    def body(_context: Any, results: Any, *arrays: Any) -> None:
        call.on_the_npu(list(arrays), into=[view(result) for result in results])

    return body


@contextmanager
def _own_state(index: int) -> Iterator[None]:
    """torch's thread-local state as the call needs it: the thread may be XLA's, or one that its user has set up."""
    with torch.no_grad(), torch.autocast("npu", enabled=False), torch.npu.device(index):  # type: ignore[attr-defined]
        yield
        torch.npu.synchronize(index)  # type: ignore[attr-defined]


def _is_here(x: Any) -> bool:
    """True for numpy arrays, and for JAX arrays that lie, whole, in host memory."""
    if isinstance(x, Tracer):
        return False
    return isinstance(x, np.ndarray) or [d.platform for d in x.devices()] == ["cpu"]


def _settled(x: Any) -> Any:
    return x if isinstance(x, np.ndarray) else x.block_until_ready()
