"""May the simulator start in this process, and what keeps a real NPU's package out once it runs."""

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

import torch


class Unavailable(RuntimeError):  # noqa: N818  (read as `except simulator.Unavailable`)
    """The simulator stands aside in this process. The message says why and what to do."""


def reason_to_stand_aside(*, force: bool) -> str | None:
    """Why the simulator must not start here, None when it may.

    With `force=True` an installed torch_npu is no reason, as long as it is not imported.
    """
    if not hasattr(torch._C, "_acc"):
        return f"torch {torch.__version__} lets no Python code register a device. Use torch 2.10 or newer."
    if "torch_npu" in sys.modules:
        return (
            "torch_npu is imported, so this process works with real NPUs. "
            "Use them, or start a process that does not import torch_npu."
        )
    name = torch._C._get_privateuse1_backend_name()
    if name != "privateuseone":
        return (
            f"another backend holds torch's PrivateUse1 device under the name {name!r}. "
            "Use a process without that backend."
        )
    if hasattr(torch, "npu"):
        return "torch.npu exists already. Use a process in which nothing else defines it."
    if not force and importlib.util.find_spec("torch_npu") is not None:
        return (
            "torch_npu is installed, so a real NPU may be meant. Import it and use the NPU, "
            "or call npu.simulator.enable(force=True) to simulate all the same."
        )
    defined = [each for each in torch._C._dispatch_get_all_op_names() if each.startswith("npu::")]
    if defined:
        return (
            f"operators in npu:: are defined already ({defined[0]} and {len(defined) - 1} more). "
            "Use a process without them."
        )
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        return (
            f"torch found another accelerator, {accelerator.type}, and supports one kind at a time. "
            "Hide it from the process, for CUDA with the environment variable CUDA_VISIBLE_DEVICES set to nothing."
        )
    return None


class _RefusesTorchNpu(MetaPathFinder, Loader):
    """Turns `import torch_npu`, which would abort the process over the taken device name, into an ImportError.

    Where torch_npu is not installed Python's own ModuleNotFoundError stands: finding it here would tell every library
    that asks `importlib.util.find_spec` that it is installed.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "torch_npu":
            return None
        for finder in sys.meta_path:
            if finder is not self and (spec := finder.find_spec(fullname, path, target)) is not None:
                return ModuleSpec(fullname, self, origin=spec.origin)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:  # noqa: ARG002
        raise ImportError(
            "torch_npu cannot be imported: the simulated NPU runs in this process and holds torch's npu device, "
            "for good. Start a process without npu.simulator.enable() to use the real NPU.",
            name="torch_npu",
        )

    def exec_module(self, module: ModuleType) -> None:
        """Never reached: `create_module` raises."""


def refuse_torch_npu() -> None:
    """From now on `import torch_npu` raises an ImportError that says why."""
    sys.meta_path.insert(0, _RefusesTorchNpu())
