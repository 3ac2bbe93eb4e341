"""Python processes that tests start, with a number of JAX CPU devices and a hard time limit."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def start(*arguments: str, devices: int = 1, cores: str | None = None) -> subprocess.Popen[str]:
    """`python *arguments` in the root of the repository, on the named cores ("0", "0,1") or on all."""
    environment = os.environ | {
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "JAX_PLATFORMS": "cpu",
    }
    pinned = [] if cores is None else ["taskset", "-c", cores]
    return subprocess.Popen(
        [*pinned, sys.executable, *arguments], cwd=ROOT, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def finish(process: subprocess.Popen[str], *, seconds: int = 240, returncode: int = 0) -> str:
    """What it printed. Fails unless it ends in time and with `returncode`."""
    try:
        printed, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        printed, _ = process.communicate()
        raise AssertionError(f"after {seconds} s it hangs:\n{printed}") from None
    assert process.returncode == returncode, printed
    return printed
