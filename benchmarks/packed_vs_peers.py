"""How fast `packed_attention` is next to what else JAX and torch offer on this machine's CPU.

    python benchmarks/packed_vs_peers.py            a named subset, at most 15 minutes
    python benchmarks/packed_vs_peers.py --all      every combination
    python benchmarks/packed_vs_peers.py --rows zipf

Peers: `jax.nn.dot_product_attention` and `flax.nnx.dot_product_attention` with the block-diagonal mask as a matrix,
torch `scaled_dot_product_attention` with that matrix, and once per segment. Every row times all of them in turns and
prints medians, so a ratio holds on a noisy machine where a time does not. GFLOP/s count useful work only:
4 * visible pairs * N * D forward, 3.5 times that forward and backward. Dense peers run up to T=8192; above, their
memory is computed: N * T * T scores of 4 bytes, twice for forward and backward.
"""

import argparse
import time
from collections.abc import Callable
from itertools import product
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx

from jaxattn import Segments, packed_attention
from jaxattn.mask import dense_mask, key_intervals

N, D = 8, 64
DENSE_MAX = 8192
MIXES = ("one long", "16 equal", "128 short", "zipf")
MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window 256": {"causal": True, "window_size": (256, 0)},
}
TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Row(NamedTuple):
    """One line of the table."""

    T: int
    mix: str
    mask: str
    dtype: str
    backward: bool

    def __str__(self) -> str:
        return f"T={self.T} {self.mix} {self.mask} {self.dtype} {'fwd+bwd' if self.backward else 'fwd'}"


SUBSET = (
    Row(2048, "16 equal", "full", "float32", False),
    Row(2048, "16 equal", "full", "bfloat16", False),
    Row(2048, "128 short", "full", "float32", False),
    Row(2048, "zipf", "causal", "float32", False),
    Row(8192, "zipf", "causal", "float32", False),
    Row(8192, "zipf", "causal", "bfloat16", False),
    Row(8192, "one long", "causal", "float32", False),
    Row(2048, "16 equal", "full", "float32", True),
    Row(2048, "16 equal", "full", "bfloat16", True),
    Row(2048, "zipf", "causal", "float32", True),
    Row(8192, "zipf", "causal", "float32", True),
    Row(8192, "zipf", "causal", "bfloat16", True),
    Row(16384, "16 equal", "causal", "float32", True),
)


def lengths_of(mix: str, T: int) -> list[int]:
    """Segment lengths that sum to T; "zipf" is proportional to 1 / rank over 64 segments, in a fixed random order."""
    if mix != "zipf":
        count = {"one long": 1, "16 equal": 16, "128 short": 128}[mix]
        return [T // count] * count
    weights = 1 / np.arange(1, 65)
    lengths = np.floor(weights / weights.sum() * T).astype(int)
    lengths[0] += T - lengths.sum()
    return np.random.default_rng(0).permutation(lengths).tolist()


def reach_of(mask: str) -> tuple[int | None, int | None]:
    return {"full": (None, None), "causal": (None, 0), "window 256": (256, 0)}[mask]


def visible_pairs(lengths: list[int], mask: str) -> int:
    left, right = reach_of(mask)
    lo, hi = key_intervals(Segments.from_lengths(lengths), sum(lengths), sum(lengths), left=left, right=right)
    return int(np.asarray(hi - lo).astype(np.int64).sum())


def with_gradients(attend: Callable[..., jax.Array]) -> Callable[..., Any]:
    def both(q: jax.Array, k: jax.Array, v: jax.Array, *rest: Any) -> Any:
        out, vjp = jax.vjp(lambda *x: attend(*x, *rest), q, k, v)
        return out, vjp(q)

    return both


def torch_call(attend: Callable[..., torch.Tensor], arrays: list[torch.Tensor], backward: bool) -> None:
    if not backward:
        with torch.no_grad():
            attend(*arrays)
        return
    leaves = [x.detach().requires_grad_() for x in arrays]
    torch.autograd.grad(attend(*leaves), leaves, arrays[0])


def contestants(row: Row, lengths: list[int]) -> tuple[dict[str, Callable[[], Any]], str]:
    """What is timed, by name, and what the compiler says of ours."""
    rng = np.random.default_rng(0)
    host = [rng.standard_normal((row.T, N, D)).astype(np.float32) for _ in range(3)]
    q, k, v = (jnp.asarray(x, row.dtype) for x in host)
    tensors = [torch.tensor(x, dtype=TORCH_DTYPES[row.dtype]) for x in host]
    segments = jax.tree.map(jnp.asarray, Segments.from_lengths(lengths))

    def compiled(attend: Callable[..., Any], *args: Any) -> tuple[Callable[[], Any], Any, float]:
        start = time.perf_counter()
        program = jax.jit(with_gradients(attend) if row.backward else attend).lower(*args).compile()
        taken = time.perf_counter() - start
        return lambda: jax.block_until_ready(program(*args)), program.memory_analysis(), taken

    def ours(q: jax.Array, k: jax.Array, v: jax.Array, segments: Segments) -> jax.Array:
        return packed_attention(q, k, v, segments, **MASKS[row.mask])

    runs: dict[str, Callable[[], Any]] = {}
    runs["ours"], memory, seconds = compiled(ours, q, k, v, segments)
    megabytes = memory.temp_size_in_bytes / 1e6
    note = f"compiled in {seconds:.1f} s, temporaries {megabytes:.0f} MB, dense "

    def per_segment(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        parts = zip(*(x.split(lengths) for x in (q, k, v)), strict=True)
        attend = torch.nn.functional.scaled_dot_product_attention
        heads_first = ([x.transpose(0, 1)[None] for x in part] for part in parts)
        return torch.cat([attend(*x, is_causal=row.mask == "causal")[0].transpose(0, 1) for x in heads_first])

    if row.mask != "window 256":  # torch takes a window as a matrix only
        runs["torch per segment"] = lambda: torch_call(per_segment, tensors, row.backward)

    if row.T > DENSE_MAX:
        return runs, note + f"{N * row.T**2 * 4 * (2 if row.backward else 1) / 1e6:.0f} MB (computed)"
    left, right = reach_of(row.mask)
    mask = dense_mask(segments, row.T, row.T, left=left, right=right)

    def dense_of(peer: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        return lambda q, k, v, mask: peer(q[None], k[None], v[None], mask=mask[None, None])[0]

    runs["jax.nn dense"], memory, _ = compiled(dense_of(jax.nn.dot_product_attention), q, k, v, mask)
    runs["flax dense"], _, _ = compiled(dense_of(nnx.dot_product_attention), q, k, v, mask)
    torch_mask = torch.tensor(np.asarray(mask))

    def torch_dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        heads_first = (x.transpose(0, 1)[None] for x in (q, k, v))
        attend = torch.nn.functional.scaled_dot_product_attention
        return attend(*heads_first, attn_mask=torch_mask)[0].transpose(0, 1)

    runs["torch dense"] = lambda: torch_call(torch_dense, tensors, row.backward)
    dense_megabytes = memory.temp_size_in_bytes / 1e6
    return runs, note + f"{dense_megabytes:.0f} MB ({dense_megabytes / megabytes:.0f} x)"


def medians(runs: dict[str, Callable[[], Any]], repeats: int, seconds: float) -> dict[str, float]:
    """The median time of each, taken in turns, after one untimed run each; fewer turns when time runs out."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    end = time.perf_counter() + seconds
    for turn in range(repeats):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
        if turn > 0 and time.perf_counter() > end:
            break
    return {name: float(np.median(t)) for name, t in times.items()}


def matmul_peak(dtype: str) -> float:
    """GFLOP/s of a square matmul of this dtype with float32 output: what the machine can do."""
    x = jnp.ones((2048, 2048), dtype)
    program = jax.jit(lambda x: jnp.matmul(x, x, preferred_element_type=jnp.float32)).lower(x).compile()
    taken = medians({"matmul": lambda: jax.block_until_ready(program(x))}, 7, 10)["matmul"]
    return 2 * 2048**3 / taken / 1e9


def scaling(seconds: float) -> None:
    """Prints what doubling T costs at a fixed segment length, and a window against full causal."""

    def timed(*cases: tuple[list[int], str]) -> list[float]:
        runs = {
            str(i): contestants(Row(sum(n), "", mask, "float32", False), n)[0]["ours"]
            for i, (n, mask) in enumerate(cases)
        }
        return list(medians(runs, 5, seconds).values())

    for length in (64, 512):
        once, twice = timed(([length] * (4096 // length), "causal"), ([length] * (8192 // length), "causal"))
        print(f"segments of {length}: T=8192 costs {twice / once:.2f} x T=4096 (2 is due)")
    window, full = timed(([16384], "window 256"), ([16384], "causal"))
    print(f"one segment of 16384: window 256 costs 1/{full / window:.1f} of full causal (at most 1/10)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="every combination instead of the named subset")
    parser.add_argument("--rows", default="", help="only rows whose name holds this text")
    parser.add_argument("--repeats", type=int, default=7, help="turns per row at most (default 7)")
    parser.add_argument("--seconds", type=float, default=25, help="after which a row takes no more turns (default 25)")
    args = parser.parse_args()
    every = product((2048, 8192, 16384), MIXES, MASKS, TORCH_DTYPES, (False, True))
    rows = [Row(*row) for row in every] if args.all else list(SUBSET)
    peaks = {dtype: matmul_peak(dtype) for dtype in TORCH_DTYPES}
    print("matmul peak, GFLOP/s: " + ", ".join(f"{dtype} {peak:.0f}" for dtype, peak in peaks.items()))
    for row in rows:
        if args.rows not in str(row):
            continue
        lengths = lengths_of(row.mix, row.T)
        runs, note = contestants(row, lengths)
        taken = medians(runs, args.repeats, args.seconds)
        speed = 4 * visible_pairs(lengths, row.mask) * N * D * (3.5 if row.backward else 1) / taken["ours"] / 1e9
        print(
            f"{row}: {1e3 * taken['ours']:.1f} ms, {speed:.1f} GFLOP/s, {speed / peaks[row.dtype]:.0%} of peak; {note}"
        )
        for name, peer in taken.items():
            if name != "ours":
                print(f"    {peer / taken['ours']:6.2f} x the speed of {name}", flush=True)
    if not args.rows:
        scaling(args.seconds)


if __name__ == "__main__":
    main()
