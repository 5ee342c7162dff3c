"""Traces in the form of Kineto, made event by event; times in microseconds."""

import gzip
import json


class MadeTrace:
    """One process with one device; events are added by hand."""

    def __init__(self, rank=0, ranks=1, device="NVIDIA H200", **header):
        self.events = []
        self.header = {"schemaVersion": 1, **header}
        if device:
            self.header["deviceProperties"] = [{"id": 0, "name": device, "totalGlobalMem": 150_000_000_000}]
        if ranks > 1:
            self.header["distributedInfo"] = {"backend": "nccl", "rank": rank, "world_size": ranks}
        self.number = 0

    def span(self, category, name, start, length, tid=1, pid=100, **args):
        event = {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid, "ts": start, "dur": length}
        self.events.append({**event, "args": args})

    def op(self, name, start, length, dims=(), types=(), tid=1):
        """An operator of the host; gives its number."""
        self.number += 1
        shapes = {"Input Dims": list(dims), "Input type": list(types)} if dims else {}
        self.span("cpu_op", name, start, length, tid, **{"External id": self.number}, **shapes)
        return self.number

    def kernel(self, name, called, start, length, op=-1, stream=7, kind="kernel", **args):
        """A kernel and the call that launched it."""
        self.number += 1
        joined = {"correlation": self.number, "External id": op}
        self.span("cuda_runtime", "cudaLaunchKernel", called, 2, **joined)
        self.span(kind, name, start, length, stream, 0, stream=stream, **joined, **args)

    def collective(self, op, called, start, length, elements=1_000_000, size=2, stream=13):
        self.kernel(
            f"ncclDevKernel_{op}_Sum_f32_RING_LL",
            called,
            start,
            length,
            stream=stream,
            **{
                "Collective name": op,
                "In msg nelems": elements,
                "Out msg nelems": elements,
                "Group size": size,
                "dtype": "Float",
                "Process Group Description": "default_pg",
                "Process Group Ranks": str(list(range(size))),
            },
        )

    def region(self, name, start, length):
        self.span("user_annotation", name, start, length)

    def text(self):
        return json.dumps({**self.header, "traceEvents": self.events}, indent=1)

    def save(self, path):
        text = self.text()
        if path.suffix == ".gz":
            path.write_bytes(gzip.compress(text.encode()))
        else:
            path.write_text(text)
        return path


def training(steps=3, rank=0, ranks=1, slow=1.0, late=0.0, **header):
    """Steps with a product of 400 us, two pointwise kernels, an all-reduce of 200 us of which half is hidden,
    and an optimizer of many kernels. `slow` stretches the product, and with it the step; the others of the
    job wait for it (`late`) in their all-reduce.
    """
    trace = MadeTrace(rank, ranks, **header)
    at = 1000.0
    for _ in range(steps):
        product = 400 * slow
        op = trace.op("aten::mm", at, 20, [[2048, 2048], [2048, 2048]], ["c10::BFloat16"] * 2)
        trace.kernel("nvjet_tst_128x256", at + 5, at + 20, product, op)
        trace.op("autograd::engine::evaluate_function: MmBackward0", at + 22, 20)
        trace.kernel("elementwise_kernel", at + 25, at + 20 + product, 50, trace.op("aten::mul", at + 24, 5))
        trace.kernel("elementwise_kernel", at + 31, at + 70 + product, 50, trace.op("aten::add", at + 30, 5))
        after = at + 120 + product
        if ranks > 1:
            trace.collective("allreduce", at + 40, after - 100, 200 + late)
            after += 100 + late
        for i in range(10):
            op = trace.op("aten::addcdiv_", after + 10 * i, 6)
            trace.kernel("elementwise_kernel", after + 10 * i + 2, after + 10 * i + 5, 5, op)
        trace.region("Optimizer.step#AdamW.step", after - 5, 110)
        at = after + 110
    return trace
