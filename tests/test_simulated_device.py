"""The simulated NPU is a device: its tensors live there, share nothing with the host, and do not mix with other
devices.
"""

import copy
import io
import pickle
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from npu import simulator

simulator.enable(devices=4)

X = torch.arange(12.0).reshape(3, 4)


@pytest.fixture(autouse=True)
def _leave_no_trace() -> Iterator[None]:
    yield
    torch.npu.set_device(0)
    torch.set_default_device(None)


def at(tensor: Tensor, index: int = 0) -> Tensor:
    """The tensor, which must be on npu:`index` and a plain tensor."""
    assert tensor.device == torch.device("npu", index)
    assert type(tensor) is torch.Tensor
    return tensor


FACTORIES: dict[str, Callable[[str], Tensor]] = {
    "arange": lambda device: torch.arange(5, device=device),
    "empty": lambda device: torch.empty(2, 3, device=device),
    "eye": lambda device: torch.eye(3, device=device),
    "full": lambda device: torch.full((2,), 3.0, device=device),
    "linspace": lambda device: torch.linspace(0, 1, 5, device=device),
    "ones": lambda device: torch.ones(2, device=device),
    "randn": lambda device: torch.randn(2, device=device),
    "randperm": lambda device: torch.randperm(5, device=device),
    "tensor": lambda device: torch.tensor([1, 2], device=device),
    "tril_indices": lambda device: torch.tril_indices(3, 3, device=device),
    "zeros": lambda device: torch.zeros(2, device=device),
}


@pytest.mark.parametrize("name", FACTORIES)
def test_factories_make_tensors_on_the_device_they_are_given(name: str) -> None:
    at(FACTORIES[name]("npu"))
    at(FACTORIES[name]("npu:2"), 2)


@pytest.mark.parametrize("name", FACTORIES)
def test_plain_npu_follows_the_current_device(name: str) -> None:
    torch.npu.set_device(3)
    at(FACTORIES[name]("npu"), 3)
    with torch.npu.device(1):
        at(FACTORIES[name]("npu"), 1)
    at(FACTORIES[name]("npu"), 3)


def test_to_follows_the_current_device() -> None:
    torch.npu.set_device(2)
    at(X.to("npu"), 2)
    at(X.npu(), 2)
    at(X.to("npu:1").to("npu"), 2)
    at(torch.as_tensor([1.0], device="npu"), 2)
    at(torch.func.vmap(lambda row: row.to("npu"))(X), 2)
    assert nn.Linear(2, 2).to("npu").weight.device.index == 2
    assert X.to("cpu") is X
    assert X.to(torch.float32) is X
    assert X.to("cpu", torch.float64).dtype is torch.float64


def test_like_factories_stay_on_the_device() -> None:
    a = torch.zeros(2, device="npu:1")
    for made in (torch.zeros_like(a), torch.randn_like(a), a.new_zeros(3), a.new_tensor([1.0]), a.clone()):
        at(made, 1)


def test_default_device() -> None:
    with torch.device("npu:1"):
        at(torch.zeros(2), 1)
        at(torch.tensor([1.0]) + 1, 1)
    torch.set_default_device("npu")
    at(torch.ones(2).sum())


def test_copies_share_nothing_with_the_host() -> None:
    host = X.clone()
    device = host.to("npu")
    device.add_(1)
    assert torch.equal(host, X)
    back = device.cpu()
    back.zero_()
    assert torch.equal(device.cpu(), X + 1)


def test_copies_between_devices_share_nothing() -> None:
    first = X.to("npu:0")
    second = at(first.to("npu:1"), 1)
    second.zero_()
    assert torch.equal(first.cpu(), X)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.complex64, torch.bits8]
)
def test_every_dtype_travels(dtype: torch.dtype) -> None:
    host = X.to(dtype) if dtype is not torch.bits8 else torch.arange(12, dtype=torch.uint8).view(torch.bits8)
    device = at(host.to("npu"))
    assert device.dtype is dtype
    assert torch.equal(device.cpu().view(torch.uint8), host.view(torch.uint8))


@pytest.mark.parametrize("shape", [(), (0,), (1, 3), (3, 1), (2, 0, 4)])
def test_strides_survive_the_way_there_and_back(shape: tuple[int, ...]) -> None:
    host = torch.empty_strided(shape, tuple(range(7, 7 + len(shape)))).fill_(1.0)
    assert torch.empty_strided(shape, host.stride(), device="npu").stride() == host.stride()
    assert host.to("npu").cpu().stride() == torch.empty_like(host).stride()


def test_views_share_storage_with_their_base() -> None:
    base = X.to("npu")
    view = base[1:, ::2]
    view.fill_(7)
    base.t()[0, 0] = 99
    want = X.clone()
    want[1:, ::2] = 7
    want[0, 0] = 99
    assert torch.equal(base.cpu(), want)
    assert base[1:]._base is base
    assert view.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()
    assert base.view(torch.int32).dtype is torch.int32


def test_lazy_conjugation_and_negation_travel() -> None:
    host = torch.randn(3, 4, dtype=torch.complex64)
    device = host.to("npu")
    assert torch.equal(device.conj().cpu(), host.conj())
    assert torch.equal(host.conj().to("npu").cpu(), host.conj())
    assert torch.equal(device.conj().imag.cpu(), host.conj().imag)
    torch.testing.assert_close((device @ device.mH).cpu(), host @ host.mH)


MIXTURES: dict[str, Callable[[Tensor, Tensor], object]] = {
    "add": lambda a, b: a + b,
    "cat": lambda a, b: torch.cat([a, b]),
    "convolution": lambda a, b: F.conv1d(a[None], b[None]),
    "in place": lambda a, b: a.mul_(b),
    "linear": lambda a, b: F.linear(a, b),
    "matmul": lambda a, b: a @ b.t(),
    "out": lambda a, b: torch.add(a, a, out=b),
    "where": lambda a, b: torch.where(a > 0, a, b),
}


@pytest.mark.parametrize("other", ["cpu", "npu:1"])
@pytest.mark.parametrize("name", MIXTURES)
def test_mixing_devices_raises_in_torchs_words(name: str, other: str) -> None:
    with pytest.raises(RuntimeError, match=f"at least two devices, npu:0 and {other}!"):
        MIXTURES[name](X.to("npu:0"), X.to(other))


def test_host_numbers_and_host_indices_may_mix() -> None:
    device = X.to("npu")
    assert torch.equal((device + torch.tensor(1.0)).cpu(), X + 1)
    assert torch.equal((2 - device).cpu(), 2 - X)
    assert torch.equal(device[torch.tensor([0, 2])].cpu(), X[[0, 2]])
    with pytest.raises(RuntimeError, match="at least two devices"):
        torch.zeros(()).add_(device[0, 0])


def test_host_code_cannot_read_the_device() -> None:
    device = X.to("npu")
    with pytest.raises(TypeError, match=r"can't convert npu:0 device type tensor to numpy"):
        device.numpy()
    with pytest.raises(TypeError, match=r"can't convert npu:0 device type tensor to numpy"):
        np.asarray(device)


def test_missing_devices_are_named() -> None:
    want = (
        r"^`device`: npu:9 was asked for\. This simulator has 4, the last is npu:3\. "
        r"Use one of these, or start a new process with npu\.simulator\.enable\(devices=10\)\.$"
    )
    for call in (lambda: torch.zeros(2, device="npu:9"), lambda: X.to("npu:9"), lambda: torch.npu.set_device(9)):
        with pytest.raises(RuntimeError, match=want):
            call()


def test_other_layouts_are_refused() -> None:
    want = "a simulated NPU holds plain strided tensors only"
    with pytest.raises(NotImplementedError, match=want):
        X.to("npu").to_sparse()
    with pytest.raises(NotImplementedError, match=want):
        X.to_sparse().to("npu")


def test_operators_without_a_cpu_kernel_say_so() -> None:
    q = torch.zeros(1, 1, 4, 8, device="npu")
    want = "^aten::_scaled_dot_product_efficient_attention: the simulated NPU runs the CPU's kernels, and torch .* none"
    with pytest.raises(NotImplementedError, match=want):
        torch.ops.aten._scaled_dot_product_efficient_attention(q, q, q, None, False)


def test_out_arguments_grow() -> None:
    device = X.to("npu")
    empty = torch.empty(0, device="npu")
    assert torch.add(device, device, out=empty) is empty
    assert torch.equal(empty.cpu(), X + X)
    transposed = torch.empty(4, 3, device="npu").t()
    torch.mul(device, 2, out=transposed)
    assert torch.equal(transposed.cpu(), X * 2)
    small = torch.empty(2, device="npu")
    with pytest.warns(UserWarning, match="An output with one or more elements was resized"):
        torch.add(device, device, out=small)
    assert torch.equal(small.cpu(), X + X)


def test_resize_keeps_the_first_elements() -> None:
    device = X.to("npu")
    assert torch.equal(device.resize_(2, 3).cpu(), torch.arange(6.0).reshape(2, 3))
    assert torch.equal(device.resize_(5, 5).cpu().view(-1)[:12], torch.arange(12.0))
    assert device.resize_(0).shape == (0,)


def test_resize_does_not_cut_the_tie_between_views() -> None:
    device = X.to("npu")
    view = device[1:]
    with pytest.raises(
        NotImplementedError, match=r"^resize_: \[5, 5\] needs 100 bytes, the 48 there are belong to several tensors\."
    ):
        device.resize_(5, 5)
    view.zero_()
    assert device.sum().item() == 6


def test_modules_move_and_answer_as_on_the_host() -> None:
    torch.manual_seed(0)
    convolutions = nn.Sequential(
        nn.ConvTranspose2d(3, 4, 3), nn.Conv2d(4, 4, 3, groups=2), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1)
    )
    for module, x in (
        (convolutions, torch.randn(2, 3, 8, 8)),
        (nn.LSTM(4, 5), torch.randn(3, 2, 4)),
        (nn.GRU(4, 5), torch.randn(3, 2, 4)),
        (nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0), torch.randn(3, 2, 4)),
    ):
        moved = copy.deepcopy(module).to("npu:1")
        results = []
        for on, given in ((module, x), (moved, x.to("npu:1"))):
            out = on(given)
            out = out[0] if isinstance(out, tuple) else out
            out.square().sum().backward()
            results.append([out, *(parameter.grad for parameter in on.parameters())])
        for want, got in zip(*results, strict=True):
            torch.testing.assert_close(got.cpu(), want, rtol=1e-4, atol=1e-5)  # other kernels, same formulas


def test_pickle_deepcopy_save_and_load() -> None:
    device = X.to("npu:1")
    assert torch.equal(at(pickle.loads(pickle.dumps(device)), 1).cpu(), X)
    clone = copy.deepcopy(device)
    clone.add_(1)
    assert torch.equal(device.cpu(), X)
    file = io.BytesIO()
    torch.save({"all": device, "tail": device[1:]}, file)
    file.seek(0)
    loaded = torch.load(file)
    at(loaded["all"], 1)[1, 0] = 77
    assert loaded["tail"][0, 0].item() == 77
    for place in ("cpu", "npu:0", "npu:3"):
        file.seek(0)
        assert torch.load(file, map_location=place)["all"].device == torch.device(place)


def test_storages() -> None:
    storage = X.to("npu:1").untyped_storage()
    assert (storage.device, storage.nbytes()) == (torch.device("npu:1"), 48)
    assert storage.cpu().device.type == "cpu"
    assert storage.npu(2).device.index == 2
    assert torch.UntypedStorage(16, device="npu:3").device.index == 3
    with pytest.raises(
        NotImplementedError, match=r"^UntypedStorage\.resize_: 0 bytes were asked for a storage on npu:1\. "
    ):
        storage.resize_(0)


def test_print_and_compare() -> None:
    device = X.to("npu")
    assert "device='npu:0'" in repr(device)
    assert f"{device.sum():.2f}" == "66.00"
    assert torch.equal(device, device.clone())
    assert not torch.equal(device, device + 1)
    assert device.tolist() == X.tolist()
    assert torch.equal(torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(device)).cpu(), X)


def test_pinned_memory() -> None:
    pinned = X.pin_memory()
    assert pinned.is_pinned()
    assert not X.is_pinned()
    assert torch.equal(pinned.to("npu", non_blocking=True).cpu(), X)
