"""The simulated kernels take at most 1.3 times what torch's own attention takes, called by hand for every segment.

    python benchmarks/simulated_kernels.py [--rounds 15] [--threads 1]

Each line is one packing: the median times of both sides, measured alternately in one run, and their ratio. By hand is
`scaled_dot_product_attention` on CPU tensors of the same dtype, segment after segment, into one output. The last lines
have what torch's attention does not give, the lse or the training statistics, and no bound: their scores are computed
twice, once by torch for out and once for the statistics. Exit status 1 when a bounded ratio is above 1.3.
"""

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from npu import simulator

BOUND = 1.3
MIXED = tuple(max(1, 512 // rank) for rank in range(1, 33))


@dataclass(frozen=True)
class Packing:
    """One line: `lengths` of q and, unless given, of k; heads N and K; head width D."""

    name: str
    lengths: tuple[int, ...]
    k_lengths: tuple[int, ...] = ()
    heads: tuple[int, int] = (8, 8)
    width: int = 64
    dtype: torch.dtype = torch.float16
    causal: bool = False
    operator: str = "inference"
    statistics: bool = False


PACKINGS = (
    Packing("64 segments of 32", (32,) * 64),
    Packing("256 segments of 1 to 16", tuple(1 + 7 * i % 16 for i in range(256))),
    Packing("32 segments of Zipf lengths from 512", MIXED),
    Packing("the same, bfloat16", MIXED, dtype=torch.bfloat16),
    Packing("the same, causal", MIXED, causal=True),
    Packing("the same, grouped heads 8 over 2", MIXED, heads=(8, 2)),
    Packing("the same, width 128", MIXED, width=128),
    Packing("one segment of 1024", (1024,)),
    Packing("one segment of 1024, causal", (1024,), causal=True),
    Packing("256 queries, 1024 keys, causal", (256,) * 2, (1024,) * 2, causal=True),
    Packing("32 single queries, 512 keys each", (1,) * 32, (512,) * 32, causal=True),
    Packing("32 segments of Zipf lengths from 512, with lse", MIXED, statistics=True),
    Packing("the same, training, float16", MIXED, operator="training", statistics=True),
    Packing("the same, training, float32", MIXED, operator="training", statistics=True, dtype=torch.float32),
)


def by_hand(packing: Packing, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
    """torch's attention for every segment."""
    lengths_q, lengths_k = packing.lengths, packing.k_lengths or packing.lengths
    ends_q, ends_k = (torch.tensor([0, *x]).cumsum(0).tolist() for x in (lengths_q, lengths_k))

    def run() -> Tensor:
        out = torch.empty_like(q)
        for (q0, q1), (k0, k1) in zip(pairwise(ends_q), pairwise(ends_k), strict=True):
            Lq, Lk = q1 - q0, k1 - k0
            visible = None
            if packing.causal and 1 < Lq < Lk:
                visible = torch.ones(Lq, Lk, dtype=torch.bool).tril_(Lk - Lq)
            segment = [x[None].transpose(1, 2) for x in (q[q0:q1], k[k0:k1], v[k0:k1])]
            part = scaled_dot_product_attention(
                *segment, attn_mask=visible, is_causal=packing.causal and Lq == Lk, enable_gqa=True
            )
            out[q0:q1] = part[0].transpose(0, 1)
        return out

    return run


def simulated(packing: Packing, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
    """One call of the operator."""
    lengths_q, lengths_k = packing.lengths, packing.k_lengths or packing.lengths
    sums_q, sums_k = (torch.tensor(x).cumsum(0).tolist() for x in (lengths_q, lengths_k))
    N, K, D = *packing.heads, packing.width
    q, k, v = (x.to("npu:0") for x in (q, k, v))
    mask = torch.ones(2048, 2048, dtype=torch.bool).triu(1).to("npu:0") if packing.causal else None
    shared: dict[str, Any] = {"input_layout": "TND", "scale": D**-0.5, "sparse_mode": 3 if packing.causal else 0}
    if packing.operator == "training":
        lengths = {"actual_seq_qlen": sums_q, "actual_seq_kvlen": sums_k}
        return lambda: torch.ops.npu.npu_fusion_attention(q, k, v, N, atten_mask=mask, **lengths, **shared)[0]
    shared |= {"actual_seq_lengths": sums_q, "actual_seq_lengths_kv": sums_k, "softmax_lse_flag": packing.statistics}
    return lambda: torch.ops.npu.npu_fused_infer_attention_score(
        q, k, v, num_heads=N, num_key_value_heads=K, atten_mask=mask, **shared
    )[0]


def measure(packing: Packing, rounds: int) -> tuple[float, float]:
    """Median milliseconds by hand and simulated, taken in turns; both must give the same."""
    torch.manual_seed(0)
    Tq, Tk = sum(packing.lengths), sum(packing.k_lengths or packing.lengths)
    (N, K), D = packing.heads, packing.width
    q, k, v = (torch.randn(T, heads, D).to(packing.dtype) for T, heads in ((Tq, N), (Tk, K), (Tk, K)))
    sides = by_hand(packing, q, k, v), simulated(packing, q, k, v)
    torch.testing.assert_close(*(side().cpu().float() for side in sides), atol=0.02, rtol=0.02)
    times: tuple[list[float], list[float]] = [], []
    for _ in range(rounds):
        for side, taken in zip(sides, times, strict=True):
            start = time.perf_counter()
            side()
            taken.append(time.perf_counter() - start)
    return 1e3 * median(times[0]), 1e3 * median(times[1])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=15, help="measurements of each side")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    simulator.enable()
    slow = 0
    print(f"torch {torch.__version__}, {options.threads} threads, medians of {options.rounds}, milliseconds")
    for packing in PACKINGS:
        hand, ours = measure(packing, options.rounds)
        bounded = not packing.statistics
        slow += bounded and ours / hand > BOUND
        bound = f"at most {BOUND}" if bounded else "no bound"
        print(f"{packing.name:48} by hand {hand:8.2f}  simulated {ours:8.2f}  ratio {ours / hand:5.2f}  ({bound})")
    return int(slow > 0)


if __name__ == "__main__":
    sys.exit(main())
