"""Several threads on two devices for ten seconds: no wrong value, no leak."""

import gc
import threading
import time

import torch

from npu import fused_infer_attention_varlen, fusion_attention_varlen

SECONDS = 10
LENGTHS = (1, 7, 0, 20, 4)


def attend(device: str, seed: int) -> list[torch.Tensor]:
    """Forward by both operators and the gradients of one, back on the host."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(sum(LENGTHS), 2, 64, generator=generator).half().to(device) for _ in range(3))
    cu = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0)], dtype=torch.int32).to(device)
    out = fused_infer_attention_varlen(q, k, v, cu, cu, causal=True)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    fusion_attention_varlen(*leaves, cu, cu, window_size=(3, 0)).float().square().sum().backward()
    assert out.device == torch.device(device)
    return [out.cpu(), *(leaf.grad.cpu() for leaf in leaves)]


def test_threads_on_two_devices() -> None:
    wanted = {seed: attend("npu:0", seed) for seed in range(4)}
    attend("npu:1", 0)  # each device keeps its triangle from the first call on
    gc.collect()
    before = [torch.npu.memory_allocated(i) for i in range(2)]
    end, rounds, errors = time.monotonic() + SECONDS, [0] * 4, []

    def work(thread: int) -> None:
        try:
            while time.monotonic() < end:
                seed = (thread + rounds[thread]) % 4
                got = attend(f"npu:{thread % 2}", seed)
                assert all(torch.equal(a, b) for a, b in zip(got, wanted[seed], strict=True)), (thread, seed)
                rounds[thread] += 1
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS + 60)
    assert not errors, errors[0]
    assert min(rounds) >= 10
    gc.collect()
    assert [torch.npu.memory_allocated(i) for i in range(2)] == before
