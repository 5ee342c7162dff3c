"""What the ranks of `test_22_stores_run_no_code` run."""

import contextlib
from pathlib import Path

import torch

import paceline.train as pt


def opened():
    """Files and sockets of this process."""
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # another thread has just closed it
            yield str(descriptor.readlink())


def listening():
    """Ports of IPv4 and IPv6 on which this process waits for connections from other machines."""
    own = set(opened())
    found = []
    for table, nowhere in (("tcp", "00000000"), ("tcp6", 32 * "0")):
        for line in Path("/proc/self/net", table).read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            address, port = local.split(":")
            if state == "0A" and address == nowhere and f"socket:[{inode}]" in own:
                found.append(int(port, 16))
    return found


def ports(plan):
    """Those that are open while a model is trained."""
    model = torch.nn.Linear(4, 2)
    model, optimizer = pt.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1), plan=plan)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    found = listening()
    pt.close(model)
    return found
