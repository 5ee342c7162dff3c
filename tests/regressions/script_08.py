"""A training script that ends without `pt.close`.

The first argument says how it ends, the others name the strategies that it has used, all alive at its end.
Its last line is the time at which it had nothing left to do, in seconds of the system's clock.
"""

import sys
import time

import torch
import torch.distributed as dist

import paceline.train as pt


def network(width=300):
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(20, width), torch.nn.Tanh(), torch.nn.Linear(width, 4))


def backward(net, optimizer, step):
    x = torch.randn(8, 20, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
    optimizer.zero_grad()
    net(x).square().mean().backward()


def train(plan):
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    net, optimizer = pt.parallelize(net, optimizer, plan=plan)
    for step in range(3):
        backward(net, optimizer, step)
        optimizer.step()
    return net, optimizer


def main(how, plans):
    dist.init_process_group("gloo")
    trained = {plan: train(plan) for plan in plans}
    if how == "pending":  # a pass whose gradients no step takes
        for net, optimizer in trained.values():
            backward(net, optimizer, 3)
    if how != "nothing":
        dist.destroy_process_group()
    if how == "goes on":  # what was on its way comes, and the optimizer gets the whole of its state back
        for plan, (net, optimizer) in trained.items():
            print("sum", plan, sum(float(value.double().sum()) for value in net.state_dict().values()))
            pt.close(net)
            print("state", plan, len(optimizer.state_dict()["state"]))
    print("done", time.time(), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
