"""Programs against torch itself: the same collectives, in the same order, of the same sizes, over the same
group.
"""

import contextlib

import pytest

from paceline.catalog import clusters
from paceline.predict import simulated
from paceline.predict.distributed import TransformerStep
from paceline.predict.sizes import Sizes
from paceline.sim.program import COMPUTE
from paceline.spec.plan import Plan, resolve
from paceline.spec.transformer import Transformer

torch = pytest.importorskip("torch", reason="compares with what torch sends")

RANKS = 4
GPT = Transformer(name="gpt", layers=3, hidden=64, heads=4, ffn=256, vocab=256, context=16, seq=16)
LLAMA = Transformer(
    name="llama",
    layers=3,
    hidden=64,
    heads=4,
    ffn=256,
    vocab=256,
    gated=True,
    norm="rms",
    positions="rotary",
    tied=False,
    bias=False,
    seq=16,
)


def step(model, text):
    cluster = clusters.get(f"{RANKS}xh100-sxm")
    plan = resolve(Plan.parse(f"fp32 framework=torch seq=16 mbs=2 {text}"), cluster.device_count, model)
    return TransformerStep.of(model, cluster, plan, None, None)


def simulation(model, text):
    return simulated.simulation(step(model, text))


def pieces(model, text):
    return Sizes(step(model, text))


def ours(model, text, role=0):
    return [(op, round(size), axis) for op, size, axis in simulation(model, text).program.collectives(role)]


@contextlib.contextmanager
def ranks(rank=0):
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=RANKS)
    try:
        yield
    finally:
        dist.destroy_process_group()


def small_gpt():
    from paceline.catalog.models.gpt import gpt

    return gpt(batch=2, seq=16, width=64, depth=3, heads=4, vocab=256, context=16)


def small_llama():
    from paceline.catalog.models.llama import llama

    return llama(batch=2, seq=16, width=64, depth=3, heads=4, inner=256, vocab=256)


def recorded(run):
    """(operation, bytes of its largest tensor) of every collective that `run` dispatches."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    names = {
        "_allgather_base_": "all_gather",
        "_reduce_scatter_base_": "reduce_scatter",
        "allreduce_": "all_reduce",
        "all_reduce": "all_reduce",
        "all_gather_into_tensor": "all_gather",
        "reduce_scatter_tensor": "reduce_scatter",
    }
    out = []

    class Log(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            name = function.name().rpartition("::")[2]
            if function.namespace in ("c10d", "_c10d_functional") and name in names:
                tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
                parts = RANKS if name == "all_gather_into_tensor" else 1  # it is given one rank's part only
                out.append((names[name], parts * max(t.numel() * t.element_size() for t in tensors)))
            return function(*args, **(kwargs or {}))

    with Log():
        run()
    return out


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("build", "model"), [(small_gpt, GPT), (small_llama, LLAMA)])
@pytest.mark.parametrize("kib", [4, 64, 200, 4096])
def test_ddp(build, model, kib):
    """Buckets as the reducer makes them once it knows in which order gradients become ready."""
    from torch.nn.parallel import DistributedDataParallel

    seen = []

    def note(_, bucket):
        seen.append(("all_reduce", bucket.buffer().numel() * bucket.buffer().element_size(), "dp"))
        done = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    with ranks():
        net, inputs, loss = build()
        wrapped = DistributedDataParallel(net, bucket_cap_mb=kib / 1024)
        wrapped.register_comm_hook(None, note)
        for _ in range(2):
            seen.clear()
            loss(wrapped(*inputs)).backward()
    assert seen and ours(model, f"ddp bucket={kib * 1024}B") == seen


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("build", "model"), [(small_gpt, GPT), (small_llama, LLAMA)])
@pytest.mark.parametrize("reshard", [True, False])
def test_fsdp(build, model, reshard):
    from torch.distributed.fsdp import fully_shard

    with ranks():
        net, inputs, loss = build()
        for block in net.blocks:
            fully_shard(block, reshard_after_forward=reshard)
        fully_shard(net)
        loss(net(*inputs)).backward()  # the first pass learns the order for the next one's prefetching
        seen = recorded(lambda: loss(net(*inputs)).backward())
    assert ours(model, f"fsdp {'' if reshard else 'no-reshard'}") == [
        (op, size, "shard") for op, size in seen
    ]


@pytest.mark.filterwarnings("ignore")
def test_tensor_parallel():
    """The layers; embedding, head and loss, which torch leaves whole here, are Megatron's."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        parallelize_module,
    )

    whole = (Replicate(),)
    with ranks():
        net, inputs, loss = small_llama()
        mesh = init_device_mesh("cpu", (RANKS,))
        for block in net.blocks:
            parallelize_module(
                block,
                mesh,
                {
                    "attention": PrepareModuleInput(
                        input_layouts=(*whole, None, None), desired_input_layouts=(*whole, None, None)
                    ),
                    **{f"attention.{name}": ColwiseParallel() for name in "qkv"},
                    "attention.out": RowwiseParallel(),
                    "feed": PrepareModuleInput(input_layouts=whole, desired_input_layouts=whole),
                    "feed.gate": ColwiseParallel(),
                    "feed.up": ColwiseParallel(),
                    "feed.down": RowwiseParallel(),
                },
            )
        forward, backward = [], []
        forward += recorded(lambda: backward.append(loss(net(*inputs))))
        backward = recorded(backward[0].backward)
    made = pieces(LLAMA, f"tp={RANKS}")
    for way, seen in (("forward", forward), ("backward", backward)):
        layer = [
            (op, round(size))
            for op, size, axis in made.piece(f"layer.{way}").body.collectives()
            if axis == "tp"
        ]
        assert seen and layer * LLAMA.layers == seen


@pytest.mark.filterwarnings("ignore")
def test_sequence_parallel():
    """Tokens are gathered before a column-parallel product and scattered after a row-parallel one; torch
    keeps the gathered input.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    part, whole = Shard(1), Replicate()
    with ranks():
        net, inputs, loss = small_llama()
        mesh = init_device_mesh("cpu", (RANKS,))
        for block in net.blocks:
            parallelize_module(
                block,
                mesh,
                {
                    "norm1": SequenceParallel(),
                    "norm2": SequenceParallel(),
                    "attention": PrepareModuleInput(
                        input_layouts=(part, None, None), desired_input_layouts=(whole, None, None)
                    ),
                    **{f"attention.{name}": ColwiseParallel() for name in "qkv"},
                    "attention.out": RowwiseParallel(output_layouts=part),
                    "feed": PrepareModuleInput(input_layouts=(part,), desired_input_layouts=(whole,)),
                    "feed.gate": ColwiseParallel(),
                    "feed.up": ColwiseParallel(),
                    "feed.down": RowwiseParallel(output_layouts=part),
                },
            )
        parallelize_module(
            net,
            mesh,
            {
                "embed": RowwiseParallel(input_layouts=whole, output_layouts=part),
                "norm": SequenceParallel(),
                "head": ColwiseParallel(input_layouts=part, output_layouts=whole),
            },
        )
        passes = []
        forward = recorded(lambda: passes.append(loss(net(*inputs))))
        backward = recorded(passes[0].backward)
    made = pieces(LLAMA, f"tp={RANKS} sp")
    assert forward and backward
    for way, seen, ends in (("forward", forward, 3), ("backward", backward, 2)):
        layer = [
            (op, round(size))
            for op, size, axis in made.piece(f"layer.{way}").body.collectives()
            if axis == "tp"
        ]
        # of the ends: the embedding's parts are summed, the head's input gathered (and its logits, in the
        # forward pass)
        inner = seen[1 : len(seen) - ends + 1]
        assert layer * LLAMA.layers == inner


@pytest.mark.parametrize(
    ("schedule", "name", "vpp"),
    [
        ("interleaved", "ScheduleInterleaved1F1B", 2),
        ("looped-bfs", "ScheduleLoopedBFS", 2),
        ("zb-h1", "ScheduleInterleavedZeroBubble", 1),
        ("zb-v", "ScheduleZBVZeroBubble", 2),
        ("dualpipev", "ScheduleDualPipeV", 2),
    ],
)
def test_pipeline_transfers(schedule, name, vpp):
    """What each rank sends, in torch's own order of actions with communication."""
    from torch.distributed.pipelining import PipelineStage, schedules

    from paceline.spec import schedules as orders

    micro_batches, model = (
        2 * RANKS,
        Transformer(name="deep", layers=8, hidden=64, heads=4, ffn=256, vocab=256, seq=16),
    )
    with ranks():
        stages = [
            PipelineStage(torch.nn.Linear(2, 2), c, RANKS * vpp, torch.device("cpu"))
            for c in orders.get(schedule).chunks_of(0, RANKS, vpp)
        ]
        lists = getattr(schedules, name)(
            stages, micro_batches, loss_fn=torch.nn.MSELoss()
        ).pipeline_order_with_comms
    words = f"pp={RANKS} {schedule} gbs={2 * micro_batches}" + (
        f" vpp={vpp}" if schedule in ("interleaved", "looped-bfs") else ""
    )
    program = simulation(model, words).program
    for rank in range(RANKS):
        sends = [
            (str(a.computation_type.value)[-1], a.microbatch_index)
            for a in lists[rank]
            if "SEND" in a.computation_type.value
        ]
        sent, passed = [], ("", -1)
        for task, number in enumerate(program.label.tolist()):
            label = program.labels[number]
            if program.streams[program.stream[task]] == (rank, COMPUTE):
                if label.op == "send_recv":
                    assert label.size == 2 * 16 * 64 * 4 and label.axis == "pp"
                    sent.append(passed)
                elif label.part in ("forward", "backward"):
                    passed = label.part[0].upper(), int(program.micro_batch[task])
        assert sends and sent == sends, (schedule, rank)
