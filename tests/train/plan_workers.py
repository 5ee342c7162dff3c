"""What is looked at on running strategies; reached as `plan_workers:NAME` with this folder on the path."""

import torch
from networks import decoder, token_loss

import paceline.train as pt
from paceline.errors import PacelineError
from paceline.train import memory


def _state(net):
    return net.blocks[0]._get_fsdp_state()._fsdp_param_group


#: name -> what is read from (model, optimizer, strategy)
SEEN = {
    "strategy": lambda net, opt, strategy: strategy.name,
    "ddp_bucket": lambda net, opt, strategy: strategy._passes.ddp.bucket_bytes_cap,
    "bucket_bytes": lambda net, opt, strategy: strategy.bucket_bytes,
    "pieces": lambda net, opt, strategy: [strategy.least_bytes, strategy.most_bytes],
    "scheme": lambda net, opt, strategy: strategy.scheme.to_dict(),
    "period": lambda net, opt, strategy: getattr(opt, "period", None) or strategy.period,
    "island": lambda net, opt, strategy: [
        strategy.island,
        strategy._inside and strategy._inside.passes.ddp.process_group.size(),
    ],
    "servers": lambda net, opt, strategy: len(opt._client.sizes),
    "staleness": lambda net, opt, strategy: [opt.policy.mode, opt.policy.staleness],
    "backup": lambda net, opt, strategy: [opt.policy.mode, opt.policy.backups],
    "codec": lambda net, opt, strategy: type(opt._client._links[0]._up).__name__,
    "mesh": lambda net, opt, strategy: list(_state(net).mesh_info.mesh.shape),
    "reshard": lambda net, opt, strategy: _state(net).post_forward_mesh_info is not None,
    "prefetch": lambda net, opt, strategy: len(net.blocks[0]._get_fsdp_state()._states_to_forward_prefetch),
    "split": lambda net, opt, strategy: net.blocks[0].attention.q.weight.to_local().shape[0],
    "matmul": lambda net, opt, strategy: torch.get_float32_matmul_precision(),
    "compiled": lambda net, opt, strategy: net.blocks[0]._compiled_call_impl is not None,
}


def logits(net, opt, strategy):
    _, ids = decoder()
    return str(net(ids).dtype)


def calls(net, opt, strategy):
    """Times that a block computes in one pass forward and backward."""
    count = []
    net.blocks[0].attention.register_forward_pre_hook(lambda *_: count.append(1))
    _, ids = decoder()
    token_loss(net(ids), ids).backward()
    return len(count)


def offloaded(net, opt, strategy):
    """Whether saved activations go to the host."""
    seen, plain = [], memory.save_on_cpu
    memory.save_on_cpu = lambda **options: (seen.append(1), plain(**options))[1]
    try:
        _, ids = decoder()
        token_loss(net(ids), ids).backward()
    finally:
        memory.save_on_cpu = plain
    return len(seen)


def first_step(net, opt, strategy):
    """The error of a loop that feeds 8 samples of 16 tokens in one pass."""
    _, ids = decoder()
    try:
        token_loss(net(ids), ids).backward()
        opt.step()
    except PacelineError as error:
        return str(error)
    return ""


SEEN |= {"logits": logits, "calls": calls, "offloaded": offloaded, "first_step": first_step}


def look(plan, seen):
    """What is seen of the running strategy of a plan; its refusal where it is not run."""
    net, _ = decoder()
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    before = torch.get_float32_matmul_precision()
    try:
        made, stepped = pt.parallelize(net, opt, plan=plan)
        found = {name: SEEN[name](made, stepped, pt.of(made)) for name in seen}
        pt.close(made)
    finally:
        torch.set_float32_matmul_precision(before)
    return found


def look_at_pipeline(plan, seen):
    """The same of a pipeline."""
    net, _ = decoder()
    runner = pt.Pipeline(net, lambda p: torch.optim.SGD(p, lr=0.1), plan, token_loss)
    read = {
        "stages": lambda: len(runner.stages),
        "schedule": lambda: type(runner._schedule).__name__,
        "micro_batches": lambda: runner._schedule._n_microbatches,
    }
    found = {name: read[name]() for name in seen}
    pt.close(runner)
    return found


def look_at_all(runs):
    """Each of several plans."""
    return [(look_at_pipeline if "pp=" in plan else look)(plan, seen) for plan, seen in runs]
