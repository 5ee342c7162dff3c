"""What a script is held against: torch's own DistributedDataParallel, and other ways to train replicas, each
written out by hand.

Each takes the model and the optimizer and returns those of the loop, as `paceline.train.parallelize` does.
What has to happen when training ends stands in `endings`, in order.
"""

from types import MethodType

import torch
import torch.distributed as dist
from torch import nn

endings = []


def mean(tensors):
    """Every tensor becomes its mean over ranks."""
    for tensor in tensors:
        dist.all_reduce(tensor)
        tensor /= dist.get_world_size()


def stepping(optimizer, before, after):
    """Has `optimizer.step` call `before` and `after` round the update. It sees to torch's GradScaler itself:
    a rank whose gradients overflowed leaves out its own update and nothing else, so that all ranks go on in
    step with each other."""
    plain = optimizer.step

    def step(self):
        overflow = self.__dict__.pop("found_inf", None)
        scale = self.__dict__.pop("grad_scale", None)
        if scale is not None:
            for group in self.param_groups:
                for p in group["params"]:
                    p.grad /= scale
        before()
        if not overflow:
            plain()
        with torch.no_grad():
            after()
        if overflow is not None:  # the scaler takes them away
            self.found_inf, self.grad_scale = overflow, scale

    optimizer.step = MethodType(step, optimizer)
    optimizer._step_supports_amp_scaling = True


def nothing():
    pass


def ddp(model, optimizer):
    """torch's DistributedDataParallel."""
    return nn.parallel.DistributedDataParallel(model), optimizer


def summed_at_step(model, optimizer):
    """Gradients are averaged when a step begins, after whatever the user did to them."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]

    def average():
        for p in parameters:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        mean([p.grad for p in parameters])

    stepping(optimizer, average, nothing)
    return model, optimizer


def local(model, optimizer, period=5):
    """Parameters are averaged every `period` steps, and at the end."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    steps = [0]

    def average():
        with torch.no_grad():
            mean([p.data for p in parameters])

    def after():
        steps[0] += 1
        if steps[0] % period == 0:
            average()

    stepping(optimizer, nothing, after)
    endings.append(average)
    return model, optimizer


def post_local(model, optimizer, period=5, first=6):
    """Gradients are averaged in the first steps, parameters every `period` steps after them, and at the
    end.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    steps = [0]

    def average():
        with torch.no_grad():
            mean([p.data for p in parameters])

    def ready(p):
        if steps[0] < first:
            mean([p.grad])

    def after():
        steps[0] += 1
        if steps[0] >= first and (steps[0] - first) % period == 0:
            average()

    for p in parameters:
        p.register_post_accumulate_grad_hook(ready)
    stepping(optimizer, nothing, after)
    endings.append(average)
    return model, optimizer


def diloco(model, optimizer, period=5, rate=0.7, momentum=0.9):
    """Every `period` steps the mean drift of the replicas is the gradient of an SGD step with Nesterov
    momentum; at the end, the replicas are averaged."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    start = [p.detach().clone() for p in parameters]
    velocity = [torch.zeros_like(p) for p in parameters]
    steps = [0]

    def after():
        steps[0] += 1
        if steps[0] % period:
            return
        for p, begun, speed in zip(parameters, start, velocity, strict=True):
            drift = begun - p
            mean([drift])
            speed.mul_(momentum).add_(drift)
            begun -= rate * (drift + momentum * speed)
            p.copy_(begun)

    def average():
        with torch.no_grad():
            mean([p.data for p in parameters])

    stepping(optimizer, nothing, after)
    endings.append(average)
    return model, optimizer


def elastic(model, optimizer, period=5, pull=0.45):
    """Every `period` steps each replica and a common centre pull at each other."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    centre = [p.detach().clone() for p in parameters]
    steps = [0]

    def after():
        steps[0] += 1
        if steps[0] % period:
            return
        for p, middle in zip(parameters, centre, strict=True):
            move = pull * (p - middle)
            p -= move
            dist.all_reduce(move)
            middle += move

    stepping(optimizer, nothing, after)
    return model, optimizer


REFERENCES = {one.__name__: one for one in (ddp, summed_at_step, local, post_local, diloco, elastic)}
