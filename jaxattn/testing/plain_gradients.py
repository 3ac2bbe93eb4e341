"""Gradients in the arithmetic of fused attention kernels, written plainly: what rounding alone does to right ones."""

import numpy as np
from jaxtyping import Float

from jaxattn.testing.cases import NUMPY_DTYPES, Case, DTypeName, Inputs
from jaxattn.testing.compare import plain_kernel_run, visible_keys
from jaxattn.testing.gradient_oracle import Gradients


def plain_kernel_gradients(
    case: Case,
    inputs: Inputs,
    dtype: DTypeName,
    d_out: Float[np.ndarray, "Tq N Dv"],
    d_lse: Float[np.ndarray, "N Tq"],
) -> Gradients:
    """dq, dk and dv of a case without softcap, as float64.

    Scores, weights and sums in float32; out, the cotangent of lse, the weights and the gradients of the scores rounded
    to `dtype` before they meet another matrix; one rounding at the end. Poison is not contained. Cotangents of rows
    that see nothing are not read.
    """
    q, k, v, d_out = (np.asarray(x, np.float32) for x in (inputs.q, inputs.k, inputs.v, d_out))
    (_, N, D), K = q.shape, k.shape[1]
    scale = np.float32(D**-0.5 if case.softmax_scale is None else case.softmax_scale)
    out = plain_kernel_run(case, inputs, dtype).astype(np.float32)

    def rounded(x: np.ndarray) -> np.ndarray:
        return x.astype(NUMPY_DTYPES[dtype]).astype(np.float32)

    dq, dk, dv = np.zeros(q.shape, np.float32), np.zeros(k.shape, np.float32), np.zeros(v.shape, np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        seen = [(row, keys) for row, keys in enumerate(visible_keys(case)) if len(keys)]
        for row, keys in seen:
            for h in range(N):
                g = h // (N // K)
                key, value = k[keys.start : keys.stop, g], v[keys.start : keys.stop, g]
                s = scale * (key @ q[row, h])
                logits = s if inputs.sinks is None else np.append(s, inputs.sinks[h])
                lse = logits.max() + np.log(np.exp(logits - logits.max()).sum())
                p = np.exp(s - lse)
                pull = d_out[row, h] @ out[row, h] - rounded(np.asarray(d_lse[h, row]))
                ds = rounded(p * (value @ d_out[row, h] - pull))
                dq[row, h] = scale * (ds @ key)
                dk[keys.start : keys.stop, g] += scale * np.outer(ds, q[row, h])
                dv[keys.start : keys.stop, g] += np.outer(rounded(p), d_out[row, h])
    q64, k64, v64 = (rounded(x).astype(np.float64) for x in (dq, dk, dv))
    return Gradients(q64, k64, v64, None)
