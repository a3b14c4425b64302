"""Every test with a `device` runs on each device there is."""

from __future__ import annotations

from collections.abc import Iterator

import hypothesis
import pytest
import torch

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]

# The same examples every time, however slow the machine.
hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True)
hypothesis.settings.load_profile("repeatable")


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.fixture
def own_accelerator() -> Iterator[None]:
    """Accelerate keeps one precision for the whole process: none before a test, and none after."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
