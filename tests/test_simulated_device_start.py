"""How the simulated NPU starts, when it stands aside, and what a process can do with it: in fresh processes."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

ATTEMPT = """
import torch
from npu import simulator
def attempt(**arguments):
    try: simulator.enable(**arguments)
    except (simulator.Unavailable, ValueError) as error: print(error)
    else: print("started")
"""


def run(code: str, *, extra_path: Path | None = None) -> list[str]:
    """The lines that a fresh interpreter prints for `code`; fails unless it ends well within two minutes."""
    lead = "" if extra_path is None else f"import sys; sys.path.insert(0, {str(extra_path)!r})\n"
    command = [sys.executable, "-W", "error", "-c", lead + code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture
def torch_npu(tmp_path: Path) -> Path:
    """A folder with a package called torch_npu, which ends the interpreter if it runs beside the simulator."""
    package = tmp_path / "torch_npu"
    package.mkdir()
    (package / "__init__.py").write_text(
        "import os, torch\nif hasattr(torch, 'npu'): os.abort()\ntorch.npu = object()\n"
    )
    return tmp_path


def test_import_changes_nothing() -> None:
    run(
        """
import torch
def state(): return torch._C._get_privateuse1_backend_name(), torch.Generator, torch.Stream, torch.UntypedStorage.__new__
before = state()
import npu, npu.simulator
assert state() == before and not hasattr(torch, "npu") and not npu.simulator.is_enabled()
"""
    )


def test_stands_aside_and_says_why() -> None:
    said = run(
        ATTEMPT
        + """
attempt(devices=0)
attempt(devices=128)
torch.npu = object()
attempt()
del torch.npu
library = torch.library.Library("npu", "DEF")
library.define("mine(Tensor x) -> Tensor")
attempt()
library._destroy()
ask, torch.accelerator.current_accelerator = torch.accelerator.current_accelerator, lambda check_available: torch.device("cuda")
attempt()
torch.accelerator.current_accelerator = ask
torch.utils.rename_privateuse1_backend("other")
attempt()
assert not simulator.is_enabled()
"""
    )
    room = "torch has room for 127 devices. Use a number from 1 to 127, such as 4."
    aside = "the simulated NPU stands aside: "
    assert said == [
        f"`devices`: 0. {room}",
        f"`devices`: 128. {room}",
        f"{aside}torch.npu exists already. Use a process in which nothing else defines it.",
        f"{aside}operators in npu:: are defined already (npu::mine and 0 more). Use a process without them.",
        f"{aside}torch found another accelerator, cuda, and supports one kind at a time. "
        "Hide it from the process, for CUDA with the environment variable CUDA_VISIBLE_DEVICES set to nothing.",
        f"{aside}another backend holds torch's PrivateUse1 device under the name 'other'. "
        "Use a process without that backend.",
    ]


def test_installed_torch_npu_goes_first_unless_forced_and_is_then_kept_out(torch_npu: Path) -> None:
    said = run(
        ATTEMPT
        + """
attempt()
attempt(force=True)
torch.zeros(1, device="npu")
import importlib.util
print(importlib.util.find_spec("torch_npu") is not None)
try: import torch_npu
except ImportError as error: print(error)
""",
        extra_path=torch_npu,
    )
    assert said == [
        "the simulated NPU stands aside: torch_npu is installed, so a real NPU may be meant. "
        "Import it and use the NPU, or call npu.simulator.enable(force=True) to simulate all the same.",
        "started",
        "True",
        "torch_npu cannot be imported: the simulated NPU runs in this process and holds torch's npu device, for good. "
        "Start a process without npu.simulator.enable() to use the real NPU.",
    ]


def test_imported_torch_npu_always_goes_first(torch_npu: Path) -> None:
    said = run("import torch_npu\n" + ATTEMPT + "attempt(force=True)", extra_path=torch_npu)
    assert said == [
        "the simulated NPU stands aside: torch_npu is imported, so this process works with real NPUs. "
        "Use them, or start a process that does not import torch_npu."
    ]


def test_absent_torch_npu_stays_absent() -> None:
    said = run(
        ATTEMPT
        + """
attempt()
import importlib.util
print(importlib.util.find_spec("torch_npu"))
try: import torch_npu
except ImportError as error: print(error)
"""
    )
    assert said == ["started", "None", "No module named 'torch_npu'"]


def test_changed_capsules_stop_the_start() -> None:
    first, second, name = run(
        ATTEMPT
        + """
real = torch._C._to_dlpack
torch._C._to_dlpack = lambda tensor: real(tensor.reshape(-1))  # another rank, as a changed layout would show
attempt()
attempt()
assert not hasattr(torch, "npu")
print(torch._C._get_privateuse1_backend_name())
"""
    )
    assert first == second
    assert name == "privateuseone"
    assert first == (
        f"the simulated NPU cannot run on torch {torch.__version__}: "
        "device type, device index and rank read as (1, 0, 1), not (1, 0, 2). "
        "It relies on how DLPack lays out capsules. Use torch 2.13, which it is tested with."
    )


def test_children_compute_and_threads_choose_their_device() -> None:
    run(
        """
from npu import simulator; simulator.enable(devices=2)
import os, threading, torch

there = torch.arange(4.0).to("npu:1")
child = os.fork()
if child == 0:
    x = torch.ones(4, device="npu:1", requires_grad=True)
    (x * there).sum().backward()
    os._exit(x.grad.tolist() != [0, 1, 2, 3])
assert os.waitpid(child, 0)[1] == 0

wrong = []
def work(index):
    torch.npu.set_device(index % 2)
    for _ in range(100):
        wrong.extend([index] * (torch.ones(2).to("npu").device.index != index % 2))
threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
[t.start() for t in threads]; [t.join() for t in threads]
assert not wrong
"""
    )
