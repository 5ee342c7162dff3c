"""What the ranks of `test_wire` run."""

import time

import torch
import torch.distributed as dist

from paceline.train.comm import Collective, Engine


def duplex(size=1 << 20, late=0.05, times=4):
    """Seconds of a gather of `size` bytes in which rank 1 comes late: what rank 0 has announced must not make
    one direction wait for the other.

    The least of a few: on a busy machine a single one may be held up.
    """

    def job():
        yield Collective("gather", [torch.zeros(size, dtype=torch.uint8)])

    with Engine(timeout_s=30) as engine:
        engine.submit("first", job()).wait()
        found = []
        for _ in range(times):
            dist.barrier()
            start = time.perf_counter()
            if dist.get_rank() == 1:
                time.sleep(late)
            engine.submit("second", job()).wait()
            dist.barrier()
            found.append(time.perf_counter() - start - late)
        return min(found)


def wired(strategies, steps=4):
    """Bytes that the interface sent per step, and those that the strategy counts; of two ranks."""
    import paceline.train as pt
    from paceline.train.record import sent_bytes

    out = []
    for name in strategies:
        torch.manual_seed(0)
        net = torch.nn.Linear(1024, 512, bias=False)
        net, opt = pt.parallelize(net, torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9), plan=name)
        x = torch.randn(8, 1024)
        for step in range(steps + 2):
            if step == 2:
                dist.barrier()
                before = sent_bytes()
            opt.zero_grad()
            net(x).square().sum().backward()
            opt.step()
        dist.barrier()
        sent = (sent_bytes() - before) / steps
        out.append((sent, pt.of(net).wire_bytes()))
        pt.close(net)
    return out
