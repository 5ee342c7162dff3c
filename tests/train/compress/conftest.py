"""Tensors here are small: a second thread would wait for a core longer than it works."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
