"""Packed attention for JAX arrays, executed on the NPU."""

from functools import partial
from typing import Any, Literal, NamedTuple, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float

from interop.callback import on_npu
from interop.derivatives import reverse_only
from interop.operations import Backward, Forward, Options
from interop.pending import raise_pending
from interop.varying import vary_over, varying_axes
from jaxattn import Segments, packed_attention
from jaxattn.validation import option_problems, resolve_options, segments_problems, sinks_problems
from npu.device import as_device, require
from npu.plan import make_plan
from npu.validation import Described, packed_problems

Out = Float[Array, "Tq N Dv"]
Lse = Float[Array, "N Tq"]

CHECKPOINT_NAMES = ("npu_packed_attention_out", "npu_packed_attention_lse")
"""The names of the results that the backward pass needs, for a policy of `jax.checkpoint`."""


@overload
def npu_packed_attention(
    q: Float[Array, "Tq N D"], k: Float[Array, "Tk K D"], v: Float[Array, "Tk K Dv"], segments: Segments, *,
    softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int | None, int | None] | None = None, softcap: float | None = None,
    sinks: Float[Array, " N"] | None = None, return_softmax_lse: Literal[False] = False,
    device: int | str | None = None, backward: Literal["npu", "jax"] = "npu",
) -> Out: ...  # fmt: skip
@overload
def npu_packed_attention(
    q: Float[Array, "Tq N D"], k: Float[Array, "Tk K D"], v: Float[Array, "Tk K Dv"], segments: Segments, *,
    softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int | None, int | None] | None = None, softcap: float | None = None,
    sinks: Float[Array, " N"] | None = None, return_softmax_lse: Literal[True],
    device: int | str | None = None, backward: Literal["npu", "jax"] = "npu",
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
    backward: Literal["npu", "jax"] = "npu",
) -> Out | tuple[Out, Lse]:
    """Attention inside each segment of a packed batch, by the fused kernels of an Ascend NPU.

    The signature and the answers of `jaxattn.packed_attention`, on another device: swap the function, nothing else.
    Host memory is shared with torch and never copied, each array crosses to the device once and each result comes back
    once. No device memory outlives a call: a backward pass brings its operands along again.

    ==================  ==============================================================================================
    transform           what happens
    ==================  ==============================================================================================
    `jit`               one call per call; programs run on JAX's CPU backend
    `grad`, `vjp`       a backward call, through out and lse; reverse mode, once
    `vmap`              one call for the whole batch; one per element with batched sinks, or k, v without the axis
    `checkpoint`        recomputes the call, unless the policy is
                        `jax.checkpoint_policies.save_only_these_names(*interop.CHECKPOINT_NAMES)`
    `shard_map`         each shard on its own NPU; errors in values wait for `interop.raise_pending`
    sharded, no         refused: JAX cannot divide a callback
    `shard_map`
    ==================  ==============================================================================================

    A NaN or Inf in q, k or v stays inside its segment and head group, where any row may become non-finite; the
    specification confines it to the rows that see it.

    Args:
        q: queries `[Tq, N, D]`, float16, bfloat16 or float32.
        k: keys `[Tk, K, D]`, the dtype of q. `N` must be a multiple of `K`.
        v: values `[Tk, K, Dv]`, the dtype of q.
        segments: which rows belong together.
        softmax_scale, causal, window_size, sinks, return_softmax_lse: as in `jaxattn.packed_attention`.
        softcap: must be None; the kernels have none.
        device: the NPU, as an index or "npu:1". None is the NPU with the number of the JAX CPU device that runs the
            call, among the devices of its process. A program that is compiled for one device is not told which: there
            None is the first NPU.
        backward: who computes gradients: "npu", the kernel; "jax", `jaxattn.packed_attention` on the CPU.

    Returns:
        out `[Tq, N, Dv]` in the dtype of q; with `return_softmax_lse=True` also lse, float32 `[N, Tq]`.

    Raises:
        ValueError: everything that is wrong with the call, one line each, at trace time. Offsets that are traced are
            checked when the program runs, where JAX raises jax.errors.JaxRuntimeError (or, for a program that has run
            before, ValueError) with the same text at the end.
        NotImplementedError: what the kernels lack, or the platform of the program, and what to use instead.
        TypeError: forward mode, or a second derivative.
        RuntimeError: there is no NPU, real or simulated.
    """
    raise_pending()
    described = [Described(tuple(np.shape(x)), str(getattr(x, "dtype", type(x).__name__))) for x in (q, k, v)]
    problems = packed_problems(*described)
    problems += option_problems(softmax_scale, causal, window_size, softcap, return_softmax_lse)
    if len(np.shape(q)) == 3:
        problems += sinks_problems(sinks, np.shape(q)[1])
    problems += segments_problems(segments, q, k)
    if backward not in ("npu", "jax"):
        problems.append(
            f'`backward`: {backward!r}. It must be "npu" or "jax". Use backward="jax" for gradients by JAX.'
        )
    if problems:
        raise ValueError("\n".join(problems))
    if softcap is not None:
        raise NotImplementedError(
            f"`softcap`: {softcap}. The fused kernels of the NPU have no soft cap in packed layout. Use "
            f"jaxattn.packed_attention, or softcap=None."
        )
    make_plan(*(d.shape for d in described), described[0].dtype, (0,), (0,))  # what the kernels lack, at trace time
    require()
    resolved = resolve_options(q.shape[2], softmax_scale, causal, window_size, None)
    npu = None if device is None else as_device(device).index
    options = Options(resolved.softmax_scale, resolved.left, resolved.right)
    call = _Call(options, npu, bool(return_softmax_lse), backward)
    arrays = (q, k, v) if sinks is None else (q, k, v, jnp.asarray(sinks))
    offsets = (segments.cu_seqlens_q, segments.cu_seqlens_k)
    axes = frozenset[str]().union(*(varying_axes(x) for x in (*arrays, *offsets)))
    results = _attention(call, _Operands(*(reverse_only(vary_over(x, axes)) for x in arrays)), *offsets)
    return results if return_softmax_lse else results[0]


class _Call(NamedTuple):
    """What is fixed when a call is traced."""

    options: Options
    npu: int | None
    with_lse: bool
    backward: Literal["npu", "jax"]


class _Operands(NamedTuple):
    """What a call is differentiated by."""

    q: Any
    k: Any
    v: Any
    sinks: Any = None


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(call: _Call, x: _Operands, cu_q: Any, cu_k: Any) -> tuple[Any, ...]:
    return _run(call, call.with_lse, x, cu_q, cu_k)


def _run(call: _Call, with_lse: bool, x: _Operands, cu_q: Any, cu_k: Any) -> tuple[Any, ...]:
    sinks = () if x.sinks is None else (x.sinks,)
    results = on_npu(Forward(call.options, with_lse), call.npu, *x[:3], cu_q, cu_k, *sinks)
    return tuple(vary_over(y, varying_axes(x.q)) for y in results)


def _forward(call: _Call, *perturbed: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    x, cu_q, cu_k = jax.tree.map(lambda p: p.value, perturbed, is_leaf=lambda p: hasattr(p, "perturbed"))
    for_kernel = call.backward == "npu"
    if for_kernel:
        make_plan(*(a.shape for a in x[:3]), x.q.dtype.name, (0,), (0,), gradient=True)  # what it lacks, at trace time
    results = _run(call, call.with_lse or for_kernel, x, cu_q, cu_k)
    # Named after the call, so that a policy of jax.checkpoint can keep them, and with them the call.
    results = tuple(checkpoint_name(y, name) for y, name in zip(results, CHECKPOINT_NAMES, strict=False))
    return results[: 1 + call.with_lse], (x, cu_q, cu_k, results if for_kernel else None)


def _backward(call: _Call, saved: tuple[Any, ...], cotangents: tuple[Any, ...]) -> tuple[Any, ...]:
    x, cu_q, cu_k, results = saved
    dout, *dlse = cotangents
    unused = isinstance(dout, SymbolicZero)
    dlse = [d for d in dlse if not isinstance(d, SymbolicZero)]
    if unused:
        dout = jnp.zeros(dout.shape, dout.dtype)
    if call.backward == "npu":
        dx = _by_kernel(call, x, cu_q, cu_k, results, dout, dlse)
    else:
        dx = _by_jax(call, x, cu_q, cu_k, dout, dlse)
    return dx, None, None


def _by_kernel(
    call: _Call, x: _Operands, cu_q: Any, cu_k: Any, results: tuple[Any, Any], dout: Any, dlse: list[Any]
) -> _Operands:
    sinks = [] if x.sinks is None else [x.sinks]
    operation = Backward(call.options, with_dlse=bool(dlse), with_sinks=bool(sinks))
    dq, dk, dv, *dsinks = on_npu(operation, call.npu, *x[:3], cu_q, cu_k, *results, dout, *dlse, *sinks)
    found = [dq, dk, dv, *(d.astype(s.dtype) for d, s in zip(dsinks, sinks, strict=True))]
    return _Operands(*(vary_over(d, varying_axes(x.q)) for d in found))


@partial(jax.jit, static_argnums=0)  # for eager gradients, which would compile every operation by itself
def _by_jax(call: _Call, x: _Operands, cu_q: Any, cu_k: Any, dout: Any, dlse: list[Any]) -> _Operands:
    def attention(x: _Operands) -> tuple[Any, ...]:
        out, lse = packed_attention(
            *x[:3],
            Segments._of(cu_q, cu_k),
            softmax_scale=call.options.softmax_scale,
            window_size=(call.options.left, call.options.right),
            sinks=x.sinks,
            return_softmax_lse=True,
        )
        return (out, lse) if dlse else (out,)

    _, pull = jax.vjp(attention, x)
    found: _Operands = pull((dout, *dlse))[0]
    return found


_attention.defvjp(_forward, _backward, symbolic_zeros=True)
