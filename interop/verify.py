"""The case table on the NPU path, held against the float64 oracle and the JAX specification."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from interop.attention import npu_packed_attention
from jaxattn import Segments, reference_attention
from jaxattn.testing import CASES, Case, Comparison, compare, distance

DTYPES: tuple[Literal["float16"], Literal["bfloat16"]] = ("float16", "bfloat16")

# Every reference program runs once, so what counts is how long it compiles.
_COMPILED_ONCE: dict[str, bool | str | int | float] = {"xla_backend_optimization_level": 0}


@dataclass(frozen=True)
class Line:
    """One case in one dtype. Without a comparison the NPU path refused it, by name, in `refusal`."""

    case: str
    lengths: str
    dtype: str
    eager: Comparison | None = None
    jit: Comparison | None = None
    reference: Comparison | None = None
    ulps_from_reference: float = 0.0
    refusal: str = ""

    @property
    def verdict(self) -> Literal["pass", "fail", "refused"]:
        if self.refusal:
            return "refused"
        return "fail" if self.problems else "pass"

    @property
    def problems(self) -> tuple[str, ...]:
        """What is wrong, each sentence with the run it is about in front."""
        runs = {"NPU, eager": self.eager, "NPU, jit": self.jit, "reference": self.reference}
        return tuple(f"{name}: {text}" for name, c in runs.items() if c is not None for text in c.problems)


def verify(cases: tuple[Case, ...] = CASES, *, device: int | str | None = None) -> Iterator[Line]:
    """Run every case in float16 and bfloat16 and yield a line each, as it is done.

    Each is computed four times: by the NPU path eagerly and under `jit` with traced offsets, by the reference, and by
    the oracle in float64. The kernel's softcap refusal is the only one expected; any other exception comes through.
    """
    for case in cases:
        for dtype in DTYPES:
            yield _verify(case, dtype, device)


def _verify(case: Case, dtype: Literal["float16", "bfloat16"], device: int | str | None) -> Line:
    inputs = case.inputs(dtype)
    q, k, v = (jnp.asarray(x) for x in (inputs.q, inputs.k, inputs.v))
    sinks = None if inputs.sinks is None else jnp.asarray(inputs.sinks)

    def attend(
        attention: Callable[..., Any], q: Any, k: Any, v: Any, sinks: Any, segments: Segments
    ) -> tuple[jax.Array, jax.Array]:
        out, lse = attention(q, k, v, segments, sinks=sinks, return_softmax_lse=True, **case.options)
        return out, lse

    on_npu = partial(attend, partial(npu_packed_attention, device=device))
    on_cpu = partial(attend, reference_attention)
    operands = (q, k, v, sinks, case.segments)
    try:
        eager = _host(on_npu(*operands))
    except NotImplementedError as error:
        if case.softcap is None:
            raise
        return Line(case.name, case.lengths, dtype, refusal=str(error))
    jitted = _host(jax.jit(on_npu)(*operands))
    reference = _host(jax.jit(on_cpu, compiler_options=_COMPILED_ONCE)(*operands))
    return Line(
        case=case.name,
        lengths=case.lengths,
        dtype=dtype,
        eager=compare(case, dtype, *eager, arithmetic="kernel", poison="segment"),
        jit=compare(case, dtype, *jitted, arithmetic="kernel", poison="segment"),
        reference=compare(case, dtype, *reference),
        ulps_from_reference=distance(eager[0], reference[0], dtype),
    )


def _host(results: tuple[jax.Array, jax.Array]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    return np.asarray(results[0]), np.asarray(results[1])
