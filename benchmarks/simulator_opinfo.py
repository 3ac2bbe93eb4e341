"""How much of torch runs on the simulated NPU: torch's own operator samples there, against the CPU.

    python benchmarks/simulator_opinfo.py [--workers 2] [--backward] [OPERATOR ...]

Takes every operator of `torch.testing`'s table that has float32 samples, runs all samples on npu:1 and on the CPU
from the same seed, and prints each operator that is refused with NotImplementedError, wrong or crashing,
then the counts. With `--backward` the gradients of the float inputs are compared too. Exit status
1 when a value is wrong or the interpreter crashes.

Operators run in child processes, a few dozen each, so that a crash takes along only the operator that caused it.
"""

import argparse
import json
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

VERDICTS = ("right", "unsampled", "refused", "wrong", "crash")
SECONDS_EACH = 120
CHUNK = 40
DEVICE = "npu:1"  # not the current device, so that a result on the wrong one is seen

# Their results are whatever memory held: only shape, strides, dtype and device can be compared.
UNDEFINED = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
# Makes a tensor on the default device unless told otherwise.
FACTORIES = {"arange", "linspace", "logspace"}
# The device uses another formula than the CPU, with results of the same values in another order of memory.
OTHER_STRIDES = {"nn.functional.scaled_dot_product_attention"}
# torch wants the places to split at on the host, wherever the data is.
ON_HOST = {"tensor_split"}


def table() -> dict[str, Any]:
    """torch's operator samples by name, those that have float32."""
    import torch

    try:
        from torch.testing._internal.common_methods_invocations import op_db
    except ModuleNotFoundError as error:
        sys.exit(
            f"torch's operator samples need the package {error.name}, which is not installed. "
            f"Install it for this script: pip install {error.name}"
        )
    return {op.full_name: op for op in op_db if op.supports_dtype(torch.float32, "cpu")}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "operators", nargs="*", metavar="OPERATOR", help="names as torch's table has them; all when left out"
    )
    parser.add_argument("--workers", type=int, default=2, help="child processes at a time")
    parser.add_argument("--backward", action="store_true", help="compare gradients too")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        run_here(options.operators, backward=options.backward)
        return 0
    known = table()
    if unknown := [name for name in options.operators if name not in known]:
        sys.exit(f"no operator of torch's table with float32 samples is called {', '.join(unknown)}.")
    names = options.operators or sorted(known)
    chunks = [names[i :: max(1, len(names) // CHUNK)] for i in range(max(1, len(names) // CHUNK))]
    with ThreadPoolExecutor(options.workers) as pool:
        results = [
            each
            for chunk in pool.map(lambda chunk: list(run_apart(chunk, backward=options.backward)), chunks)
            for each in chunk
        ]
    for name, verdict, detail in sorted(results, key=lambda each: (VERDICTS.index(each[1]), each[0])):
        if verdict != "right":
            print(f"{verdict:8} {name}: {detail}")
    counts = Counter(verdict for _, verdict, _ in results)
    print(f"{len(results)} operators: " + ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS))
    return int(counts["wrong"] + counts["crash"] > 0)


def run_apart(names: list[str], *, backward: bool) -> Iterator[tuple[str, str, str]]:
    """Verdicts from child processes. A child says which operator it starts, so a silent end names the one to blame."""
    left = list(names)
    while left:
        command = [sys.executable, __file__, "--child", *(["--backward"] if backward else []), *left]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as child:
            assert child.stdout is not None
            running = None
            for line in child.stdout:
                name, verdict, detail = json.loads(line)
                if verdict == "start":
                    running = name
                else:
                    running = None
                    left.remove(name)
                    yield name, verdict, detail
        if child.returncode == 0 and not left:
            return
        if running is None:
            sys.exit(f"the child for {left[0]} ended with status {child.returncode}. Run it with --child to see why.")
        left.remove(running)
        yield running, "crash", f"the interpreter ended with status {child.returncode}"


def run_here(names: list[str], *, backward: bool) -> None:
    """Prints a JSON line before and after each operator."""
    import faulthandler

    import torch

    from npu import simulator

    warnings.simplefilter("ignore")
    ops = table()
    simulator.enable(devices=2)
    torch.set_num_threads(1)
    for name in names:
        print(json.dumps([name, "start", ""]), flush=True)
        faulthandler.dump_traceback_later(SECONDS_EACH, exit=True)  # a hang counts as a crash
        verdict, detail = judge(ops[name], backward=backward)
        faulthandler.cancel_dump_traceback_later()
        print(json.dumps([name, verdict, detail[:200]]), flush=True)


def judge(op: Any, *, backward: bool) -> tuple[str, str]:
    """The verdict on one operator, from all of its samples, and what was seen."""
    import torch

    torch.manual_seed(0)
    samples = list(op.sample_inputs("cpu", torch.float32, requires_grad=False))
    ran = 0
    for sample in samples:
        kwargs = {"device": "cpu", **sample.kwargs} if op.name in FACTORIES else sample.kwargs
        values = (sample.input, sample.args, kwargs)
        # Some arguments take no gradient; then the values alone are compared.
        for grads in (True, False) if backward and op.supports_autograd else (False,):
            try:
                wanted = call(op, copied(values, "cpu", grads), grads)
            except Exception:
                continue
            break
        else:
            continue  # a sample that the CPU refuses says nothing about the device
        try:
            x, args, kwargs = copied(values, DEVICE, grads)
            got = call(op, (x, sample.args if op.name in ON_HOST else args, kwargs), grads)
            compare(op.name, wanted, got)
        except NotImplementedError as error:
            return "refused", str(error).split("\n")[0]
        except Exception as error:
            return "wrong", f"{type(error).__name__}: {str(error).strip()}".replace("\n", " ")
        ran += 1
    return ("right", f"{ran} samples") if ran else ("unsampled", "the CPU refuses every sample")


def call(op: Any, values: Any, grads: bool) -> Any:
    import torch
    from torch.utils._pytree import tree_leaves

    x, args, kwargs = values
    torch.manual_seed(1)
    out = op.op(x, *args, **kwargs)
    if not grads:
        return out
    outs = [
        t
        for t in tree_leaves(out)
        if isinstance(t, torch.Tensor) and t.requires_grad and (t.is_floating_point() or t.is_complex())
    ]
    ins = [t for t in tree_leaves(values) if isinstance(t, torch.Tensor) and t.requires_grad]
    found = (
        torch.autograd.grad(outs, ins, [torch.ones_like(t) for t in outs], allow_unused=True) if outs and ins else ()
    )
    return out, found


def copied(values: Any, device: str, grads: bool) -> Any:
    """Fresh copies of all tensors on `device`; devices named in the arguments become `device`."""
    import torch
    from torch.utils._pytree import tree_map

    def copy(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            fresh = value.detach().clone().to(device)
            return fresh.requires_grad_(grads and (value.is_floating_point() or value.is_complex()))
        if isinstance(value, torch.device) or value == "cpu":
            return torch.device(device)
        return value

    return tree_map(copy, values)


def compare(name: str, wanted: Any, got: Any) -> None:
    """AssertionError unless both have the same structure, and tensors the same shape, dtype, place and values."""
    import torch
    from torch.utils._pytree import tree_flatten

    left, left_form = tree_flatten(wanted)
    right, right_form = tree_flatten(got)
    assert left_form == right_form, f"structure {right_form}, not {left_form}"
    for a, b in zip(left, right, strict=True):
        if not isinstance(a, torch.Tensor):
            assert a == b or a != a or isinstance(a, torch.device), f"{b}, not {a}"
            continue
        assert b.device == torch.device(DEVICE), f"result on {b.device}"
        if a.layout is torch.strided and name not in OTHER_STRIDES:
            assert a.stride() == b.stride(), f"strides {b.stride()}, not {a.stride()}"
        if name in UNDEFINED:
            assert (a.shape, a.dtype) == (b.shape, b.dtype), f"{b.dtype} {b.shape}"
            continue
        torch.testing.assert_close(b.cpu(), a, rtol=1e-5, atol=2e-5, equal_nan=True)


if __name__ == "__main__":
    sys.exit(main())
