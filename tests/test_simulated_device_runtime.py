"""What surrounds the simulated NPU's tensors: autograd, `torch.npu`, counters, memory, streams, random numbers,
compilation.
"""

import copy
import gc
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from npu import simulator

simulator.enable(devices=4)

X = torch.arange(12.0).reshape(3, 4)


@pytest.fixture(autouse=True)
def _leave_no_trace() -> Iterator[None]:
    yield
    torch.npu.set_device(0)


def leaf(device: str) -> Tensor:
    return X.clone().to(device).requires_grad_()


@pytest.mark.parametrize("device", ["npu:0", "npu:3"])
def test_gradients_stay_on_the_device_and_are_right(device: str) -> None:
    def run(x: Tensor) -> Tensor:
        y = x * 2
        y[1:, 1:].mul_(3)
        y.t()[0].add_(1)
        return (y.t() @ y).relu().sum()

    there, here = leaf(device), leaf("cpu")
    run(there).backward()
    run(here).backward()
    assert there.grad is not None
    assert there.grad.device == torch.device(device)
    assert torch.equal(there.grad.cpu(), here.grad)


def test_gradients_cross_devices_and_the_host() -> None:
    first, host = leaf("npu:1"), leaf("cpu")
    ((first.to("npu:3") * 2).cpu() * host).to("npu:0").sum().backward()
    assert (first.grad.device, host.grad.device) == (torch.device("npu:1"), torch.device("cpu"))
    assert torch.equal(first.grad.cpu(), 2 * X)
    assert torch.equal(host.grad, 2 * X)


def test_higher_gradients_hooks_and_checkpoints_on_another_device() -> None:
    inputs = [torch.randn(2, 3, dtype=torch.float64, device="npu:2", requires_grad=True) for _ in range(2)]
    assert torch.autograd.gradcheck(lambda a, b: (a @ b.t()).tanh(), inputs)
    assert torch.autograd.gradgradcheck(lambda a, b: (a @ b.t()).tanh(), inputs)
    x, seen = leaf("npu:1"), []
    y = x * 2
    y.register_hook(lambda grad: seen.append(grad.device))
    y.sum().backward()
    assert seen == [torch.device("npu:1")]
    for reentrant in (False, True):
        x = leaf("npu:1")
        checkpoint(lambda t: (t * t).sin(), x, use_reentrant=reentrant).sum().backward()
        assert torch.allclose(x.grad.cpu(), 2 * X * (X * X).cos(), atol=1e-5)


@pytest.mark.filterwarnings(
    "ignore:`torch.jit.script` is deprecated:DeprecationWarning"
)  # torch's own, on the first jvp
def test_transforms() -> None:
    device = X.to("npu:1")
    assert torch.equal(torch.func.vmap(lambda row: (row * 2).sum())(device).cpu(), (X * 2).sum(1))
    assert torch.equal(torch.func.grad(lambda t: (t * t).sum())(device).cpu(), 2 * X)
    _, tangent = torch.func.jvp(lambda t: (t * t).sum(), (device,), (torch.ones_like(device),))
    assert tangent.item() == 132


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop])
def test_optimizers_step_as_on_the_host(optimizer: type[torch.optim.Optimizer]) -> None:
    torch.manual_seed(0)
    host = nn.Linear(4, 4)
    device = nn.Linear(4, 4).to("npu:1")
    device.load_state_dict(host.state_dict())
    for module in (host, device):
        steps = optimizer(module.parameters(), lr=0.1)  # type: ignore[call-arg]
        for _ in range(3):
            steps.zero_grad()
            module(X.to(module.weight.device)).square().sum().backward()
            steps.step()
    torch.testing.assert_close(device.weight.cpu(), host.weight)


def test_autocast_lowers_products_and_raises_sums() -> None:
    device = X.to("npu")
    with torch.autocast("npu", dtype=torch.bfloat16):
        product = device @ device.t()
        assert product.dtype is torch.bfloat16
        assert product.sum().dtype is torch.float32
        assert (X @ X.t()).dtype is torch.float32
        assert (device.double() @ device.double().t()).dtype is torch.float64
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (device @ device.t()).dtype is torch.float32


def test_module_says_that_it_is_simulated() -> None:
    assert torch.npu.__simulated__ is True
    assert "simulated" in torch.npu.get_device_name()
    assert torch.npu.is_available()
    assert torch.npu.device_count() == 4


def test_current_device_belongs_to_the_thread() -> None:
    torch.npu.set_device(2)
    seen: list[int] = []
    thread = threading.Thread(target=lambda: seen.append(torch.npu.current_device()))
    thread.start()
    thread.join()
    assert (seen, torch.npu.current_device()) == ([0], 2)


def test_accelerator_speaks_of_the_same_devices() -> None:
    assert torch.accelerator.current_accelerator() == torch.device("npu")
    assert torch.accelerator.device_count() == 4
    torch.accelerator.set_device_index(2)
    assert torch.npu.current_device() == torch.accelerator.current_device_index() == 2
    with torch.accelerator.device_index(3):
        assert torch.zeros(1, device="npu").device.index == 3
    assert torch.accelerator.memory_allocated(1) == torch.npu.memory_allocated(1)
    torch.accelerator.synchronize()


def test_transfers_are_counted_by_device_direction_and_size() -> None:
    before = [simulator.counters(i) for i in range(2)]
    device = X.to("npu:0")  # 48 bytes
    device.half().to("npu:1").cpu()  # 24 bytes, twice
    device[:1].copy_(torch.ones(1, 4))  # 16 bytes
    device.to("cpu", non_blocking=True)
    device.clone()
    zero, one = (simulator.counters(i) - before[i] for i in range(2))
    assert zero == simulator.Counters(to_device=simulator.Traffic(2, 64), to_host=simulator.Traffic(1, 48))
    assert one == simulator.Counters(from_peer=simulator.Traffic(1, 24), to_host=simulator.Traffic(1, 24), syncs=1)


SYNCS = {
    "bool": (lambda x: bool(x[0, 0]), 1),
    "cpu": (lambda x: x.cpu(), 1),
    "item": (lambda x: x[0, 0].item(), 1),
    "mask": (lambda x: x[x > 3], 1),
    "nonzero": (lambda x: x.nonzero(), 1),
    "synchronize": (lambda x: torch.npu.synchronize(1), 1),
    "sum": (lambda x: x.sum(), 0),
    "tolist": (lambda x: x.tolist(), 1),
    "view": (lambda x: x[1:].t(), 0),
}


@pytest.mark.parametrize("name", SYNCS)
def test_waits_of_the_host_are_counted(name: str) -> None:
    call, want = SYNCS[name]
    x = X.to("npu:1")
    before = simulator.counters(1)
    call(x)
    assert (simulator.counters(1) - before).syncs == want


def test_counters_lose_nothing_between_threads() -> None:
    def work() -> None:
        for _ in range(200):
            X.to("npu:3").sum().item()

    gc.collect()
    in_use = torch.npu.memory_allocated(3)
    before = simulator.counters(3)
    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    spent = simulator.counters(3) - before
    assert (spent.to_device.count, spent.syncs) == (1600, 1600)
    assert torch.npu.memory_allocated(3) == in_use


def test_memory_is_exact() -> None:
    gc.collect()
    start = torch.npu.memory_allocated(2)
    torch.npu.reset_peak_memory_stats(2)
    assert torch.npu.max_memory_allocated(2) == start
    first = X.to("npu:2")
    second = first * 2
    view = second[1:]
    assert torch.npu.memory_allocated(2) == start + 96
    same = torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(first))
    first.add_(1)
    assert torch.npu.memory_allocated(2) == start + 96
    del first, second
    assert torch.npu.memory_allocated(2) == start + 96, "the view and the DLPack tensor hold both storages"
    del view, same
    assert torch.npu.memory_allocated(2) == start
    assert torch.npu.max_memory_allocated(2) == start + 96


def test_retagging_shares_memory_and_counts_it_once() -> None:
    from npu.simulator.tags import as_cpu, as_npu

    gc.collect()
    start = torch.npu.memory_allocated(2)
    device = as_npu(torch.zeros(3), 2)
    host = as_cpu(device)
    host[0] = 5
    again = as_npu(host, 2)
    assert again.tolist() == [5, 0, 0]
    assert torch.npu.memory_allocated(2) == start + 12
    del device, host, again
    assert torch.npu.memory_allocated(2) == start


def test_streams_and_events() -> None:
    for stream in (torch.npu.Stream(1), torch.Stream("npu:1")):
        assert isinstance(stream, torch.Stream)
        assert stream.device == torch.device("npu:1")
        with torch.npu.stream(stream):
            assert torch.npu.current_device() == 1
            assert torch.npu.current_stream() == stream
            with stream:  # again
                assert torch.npu.current_stream() == stream
        assert torch.npu.current_device() == 0
        assert torch.npu.current_stream(1) == torch.npu.default_stream(1) != stream
    start, end = (torch.Event("npu", enable_timing=True) for _ in range(2))
    with pytest.raises(ValueError, match="must be recorded"):
        start.elapsed_time(end)
    start.record()
    end.record(torch.npu.current_stream())
    assert start.elapsed_time(end) >= 0
    with pytest.raises(ValueError, match="enable_timing=True"):
        start.elapsed_time(torch.npu.Event())
    X.to("npu").record_stream(torch.npu.current_stream())
    assert torch.Stream("cpu").device.type == "cpu"


def test_generators_belong_to_their_device() -> None:
    generator = torch.Generator("npu:1").manual_seed(3)
    assert isinstance(generator, torch.Generator)
    assert generator.device == torch.device("npu:1")
    first = torch.randn(4, device="npu:1", generator=generator)
    assert torch.equal(first, torch.randn(4, device="npu:1", generator=generator.manual_seed(3)))
    for copied in (generator.clone_state(), copy.deepcopy(generator)):
        assert copied.device == torch.device("npu:1")
        assert torch.equal(copied.get_state(), generator.get_state())
    with pytest.raises(RuntimeError, match="Expected a 'npu' device type for generator but found 'cpu'"):
        torch.randn(4, device="npu:1", generator=torch.Generator())
    with pytest.raises(RuntimeError, match=r"^`generator`: a generator of npu:1 was given for work on npu:0\."):
        torch.randn(4, device="npu:0", generator=generator)
    assert isinstance(torch.default_generator, torch.Generator)
    assert torch.Generator().device.type == "cpu"


def test_seeds_and_forked_random_numbers() -> None:
    torch.manual_seed(5)
    with torch.random.fork_rng(devices=[0], device_type="npu"):
        inside = torch.rand(3, device="npu")
    assert torch.equal(inside, torch.rand(3, device="npu"))
    torch.npu.manual_seed(5)
    assert torch.equal(inside, torch.rand(3, device="npu"))


def test_second_enable() -> None:
    simulator.enable(devices=4)
    assert simulator.is_enabled()
    want = (
        r"^`devices`: 2 were asked for, the simulator runs with 4 since it was started\. "
        r"The number is fixed for the life of a process\. Use enable\(devices=4\) or a new process\.$"
    )
    with pytest.raises(RuntimeError, match=want):
        simulator.enable(devices=2)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_functions_see_the_device(backend: str) -> None:
    compiled = torch.compile(lambda t: (t * 2).relu() + t.to("npu:1").sum(), backend=backend, fullgraph=True)
    got = compiled(X.to("npu:1"))
    assert got.device == torch.device("npu:1")
    assert torch.equal(got.cpu(), X * 2 + 66)
