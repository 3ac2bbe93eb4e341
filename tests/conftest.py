"""Every test runs on the simulated NPU, with four devices."""

import pytest

from npu import simulator


@pytest.fixture(scope="session", autouse=True)
def simulated_npu() -> None:
    simulator.enable(devices=4)
