"""Every test runs on the simulated NPU, with four devices."""

import os

# Nearly every program here runs once, so what counts is how long it compiles. The answers are judged all the same.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0"

import pytest

from npu import simulator


@pytest.fixture(scope="session", autouse=True)
def simulated_npu() -> None:
    simulator.enable(devices=4)
