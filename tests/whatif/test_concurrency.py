"""Work and depth of captured networks, against sums and longest paths computed here; forms and their ends."""

import json
import math
from functools import cache

import pytest
import torch
from torch import nn

import paceline as pl
from paceline.catalog import clusters
from paceline.cli import main
from paceline.cost.operator_depth import operator_work_depth
from paceline.errors import SpecError
from paceline.whatif.concurrency import concurrency
from paceline.whatif.critical_path import folded, longest, nodes, one_after_another
from paceline.whatif.layer_chain import chain_of_layers
from paceline.whatif.parallel_ends import SCALES, FormDegrees, link, step_shape

MODELS = {
    "vgg11": {"batch": 2, "image": 64},
    "resnet18": {"batch": 4, "image": 64},
    "googlenet": {"batch": 2},
    "gpt2-124m": {"batch": 2, "seq": 64},
    "lstm-650": {"batch": 3},
    "dlrm-small": {"batch": 16},
    "mixtral-8x7b": {"batch": 1, "seq": 32},
}


@cache
def captured(name):
    return pl.capture(name, fold=False, **MODELS[name])


def longest_path(workload, phases):
    """The longest path by relaxation over all edges from writers of a tensor to later readers of it."""
    ops = [op for index in workload.order for op in workload.segments[index].ops if op.phase in phases]
    writers = {}
    edges = []
    for here, op in enumerate(ops):
        edges += [(there, here) for tensor in set(op.sources) for there in writers.get(tensor, ())]
        for tensor in op.results:
            writers.setdefault(tensor, []).append(here)
    gradients = [here for here, op in enumerate(ops) if op.phase != "optimizer"]
    updates = [here for here, op in enumerate(ops) if op.phase == "optimizer"]
    own = [operator_work_depth(op).depth for op in ops]
    ends = list(own)
    following = {}
    for there, here in edges:
        following.setdefault(there, []).append(here)
    pending = set(range(len(ops)))
    while pending:
        changed = set()
        for there in pending:
            for here in following.get(there, ()):
                if ends[there] + own[here] > ends[here]:
                    ends[here] = ends[there] + own[here]
                    changed.add(here)
        pending = changed
    last = max((ends[here] for here in gradients), default=0.0)
    update = max((ends[here] for here in updates), default=0.0)
    return last + update


@pytest.mark.parametrize("name", MODELS)
def test_captured_graph_has_the_sum_of_work_and_the_longest_path(name):
    workload = captured(name)
    found = concurrency(workload)
    phases = {
        "forward": ("forward",),
        "backward": ("backward", "recompute"),
        "step": ("forward", "backward", "recompute", "optimizer"),
    }
    for part in (found.forward, found.backward, found.step):
        chosen = [
            operator_work_depth(op).work
            for index in workload.order
            for op in workload.segments[index].ops
            if op.phase in phases[part.name]
        ]
        assert part.work == pytest.approx(math.fsum(chosen), rel=1e-12)
        assert part.depth == longest_path(workload, phases[part.name])
        assert sum(depth for _, depth in part.chain) == part.depth
    assert found.step.work == pytest.approx(
        found.forward.work
        + found.backward.work
        + sum(kind.forward_work for kind in found.kinds if kind.name == "update")
    )
    assert max(found.forward.depth, found.backward.depth) < found.step.depth
    assert found.step.depth <= found.forward.depth + found.backward.depth + 10


def counted(module, image, batch):
    """Multiply-adds of the convolutions and linear layers of a module, from its shapes."""
    total = 0

    def note(layer, inputs, output):
        nonlocal total
        per_output = layer.weight[0].numel()
        total += output.numel() * per_output

    kinds = (nn.Conv2d, nn.Linear)
    hooks = [m.register_forward_hook(note) for m in module.modules() if isinstance(m, kinds)]
    module(torch.empty(batch, 3, image, image, device="meta"))
    for hook in hooks:
        hook.remove()
    return total


@pytest.mark.parametrize("name", ["vgg11", "resnet18"])
def test_products_are_those_of_the_modules(name):
    from paceline.capture.resolve import resolve
    from paceline.catalog import models

    job, _ = resolve(name, seq=None, **MODELS[name])
    found = concurrency(captured(name))
    products = sum(
        kind.forward_work for kind in found.kinds if kind.name in ("convolution", "fully connected")
    )
    assert products == counted(job.module.to("meta").eval(), MODELS[name]["image"], MODELS[name]["batch"])
    assert models.get(name)


def log(n):
    return math.ceil(math.log2(n))


def test_depth_of_resnet18_by_hand():
    batch, image = 4, 64

    def conv(c_in, kernel):
        return log(c_in) + 2 * log(kernel)

    def norm(side):
        return 2 * log(batch * side * side) + 4

    side = image // 2
    depth = conv(3, 7) + norm(side) + 1 + 2 * log(3)
    c_in, side = 64, image // 4
    for stage, channels in enumerate((64, 128, 256, 512)):
        side //= 2 if stage else 1
        for block in range(2):
            first = 64 if not stage else channels // 2
            depth += conv(first if block == 0 else channels, 3) + norm(side) + 1
            depth += conv(channels, 3) + norm(side) + 1 + 1
        c_in = channels
    depth += log(side * side) or 1
    depth += log(c_in)
    depth += 2 * log(1000) + 3  # log-softmax
    depth += 1 + log(batch)  # the loss: a value of each row, and their mean
    assert concurrency(captured("resnet18")).forward.depth == depth


def test_branches_run_side_by_side():
    """Four branches of an inception module cost the depth of the deepest."""

    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.arms = nn.ModuleList(nn.Conv2d(16, 8, side, padding=side // 2) for side in (1, 3, 5))

        def forward(self, x):
            return torch.cat([arm(x) for arm in self.arms], 1)

    workload = pl.capture((Branches(), (torch.empty(2, 16, 8, 8),), torch.sum))
    found = concurrency(workload)
    arm = log(16) + 2 * log(5) + 1  # the deepest, and its bias
    assert found.forward.depth == arm + 1 + log(2 * 24 * 8 * 8)
    assert found.forward.work > found.kinds[0].forward_work


def test_recurrent_and_attention_layers_are_there():
    kinds = {kind.name: kind for kind in concurrency(captured("lstm-650")).kinds}
    assert kinds["recurrent"].forward_depth == (35 + 2 - 1) * (log(1300) + 5)
    kinds = {kind.name: kind for kind in concurrency(captured("gpt2-124m")).kinds}
    assert kinds["attention"].operators == 12
    assert kinds["attention"].forward_depth == log(64) + 3 * log(64) + 3


def test_a_gather_waits_for_what_it_gathers():
    """The gradient of a picked token reaches all of the sequence: the chain does not break at a slice."""

    class Pick(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 4)

        def forward(self, x):
            hidden = self.first(x)
            return self.last(hidden[:, 0]) + self.last(hidden[:, torch.tensor([1])].squeeze(1))

    workload = pl.capture((Pick(), (torch.empty(2, 8, 16),), torch.sum))
    forward, backward = (longest(nodes(workload, (phase,))) for phase in ("forward", "backward"))
    # two layers, the gather between them and the bias
    assert [node.op.name for node in forward.operators][:3] == ["aten.addmm", "aten.index", "aten.addmm"]
    # through the last layer, into a part of the sequence, over its tokens
    assert backward.depth == 2 + 1 + 1 + 4
    again = type(workload).from_dict(json.loads(json.dumps(workload.to_dict())))
    assert again.to_dict() == workload.to_dict()
    assert longest(nodes(again)).depth == longest(nodes(workload)).depth


@pytest.mark.parametrize("name", ["gpt2-124m", "mixtral-8x7b"])
def test_a_folded_workload_gives_an_upper_bound(name):
    small = pl.capture(name, **MODELS[name])
    assert folded(small) and not folded(captured(name))
    exact, bound = concurrency(captured(name)), concurrency(small)
    assert bound.folded and not exact.folded
    assert bound.forward.work == pytest.approx(exact.forward.work)
    assert bound.step.work == pytest.approx(exact.step.work)
    for part in ("forward", "step"):
        assert exact.to_dict()[part]["depth"] <= bound.to_dict()[part]["depth"]
        assert bound.to_dict()[part]["depth"] <= 1.2 * exact.to_dict()[part]["depth"]
    assert one_after_another(captured(name), ("forward",)).depth == exact.forward.depth


def test_depth_grows_with_the_logarithm_of_the_batch():
    small, large = (concurrency(pl.capture("vgg11", batch=batch, image=64)) for batch in (2, 64))
    assert large.forward.work == pytest.approx(32 * small.forward.work, rel=1e-3)
    assert 0 <= large.forward.depth - small.forward.depth <= 5
    assert large.step.parallelism > 20 * small.step.parallelism


def test_algorithms_of_convolutions():
    found = {choice.algorithm: choice for choice in concurrency(captured("vgg11")).convolutions}
    kinds = {kind.name: kind for kind in concurrency(captured("vgg11")).kinds}
    for name in ("direct", "im2col"):
        assert found[name].forward_work == kinds["convolution"].forward_work
        assert found[name].backward_work == kinds["convolution"].backward_work
        assert found[name].forward_depth == found["direct"].forward_depth
    assert found["Winograd F(2x2)"].fits == 8 and found["FFT"].fits == 8
    assert found["Winograd F(2x2)"].forward_depth > found["direct"].forward_depth
    assert found["Winograd F(2x2)"].backward_work < found["direct"].backward_work
    small = {choice.algorithm: choice for choice in concurrency(captured("googlenet")).convolutions}
    assert small["FFT"].fits < small["direct"].fits
    assert not concurrency(captured("gpt2-124m")).convolutions


# -- forms of parallelism and their ends -----------------------------------------------------------


@pytest.fixture(scope="module")
def found():
    return concurrency(captured("vgg11"), clusters.get("4xdgx-h100"))


def test_forms(found):
    forms = {form.name: form for form in found.forms}
    parameters = sum(parameter.numel for parameter in captured("vgg11").parameters)
    assert forms["data"].most == 2 and forms["data"].bytes_two == pytest.approx(4 * parameters)
    assert forms["model"].most == 4096 and "64 ranks" in forms["model"].limit
    assert forms["pipeline"].most == 11
    assert forms["hybrid"].most == 2 * 4096 * 11
    # eleven layers, 32-bit outputs and inputs, half of each kept
    layers = list(chain_of_layers(nodes(captured("vgg11"))))
    cut = [layer for layer in layers if layer.width]
    assert [layer.width for layer in cut] == [64, 128, 256, 256, 512, 512, 512, 512, 4096, 4096, 1000]
    assert cut[0].output_bytes == 4 * 2 * 64 * 64 * 64 and cut[0].input_bytes == 4 * 2 * 3 * 64 * 64
    assert cut[-1].output_bytes == 4 * 2 * 1000
    expected = sum(layer.output_bytes + 2 * layer.input_bytes for layer in cut) / 2
    assert forms["model"].bytes_two == pytest.approx(expected)


def test_what_crosses_a_cut_is_what_the_next_layer_reads():
    layers = list(chain_of_layers(nodes(captured("vgg11"))))
    for layer in layers[1:]:
        if layer.width and layer.name.startswith("features"):
            assert layer.cut_bytes == layer.input_bytes


def test_ends(found):
    ends = {(end.form, end.hardware): end for end in found.ends}
    assert len(ends) == 4 * len(SCALES)
    assert ends["data", "network x10"].stops == "the batch"
    for end in ends.values():
        alone, seconds = end.curve[0][1], dict(end.curve)[end.ranks]
        assert end.speedup == pytest.approx(alone / seconds)
        assert end.speedup >= end.ranks / 2
    for form in ("data", "model", "pipeline", "hybrid"):
        assert ends[form, "network x10"].ranks >= ends[form, "today"].ranks
        assert ends[form, "device x10"].ranks <= ends[form, "today"].ranks
        assert ends["hybrid", "today"].speedup >= ends[form, "today"].speedup * (1 - 1e-9)


def test_end_of_data_parallelism_by_hand():
    """Where the all-reduce takes as long as the computation of a rank."""
    workload = pl.capture("vgg11", batch=1024, image=64)
    cluster = clusters.get("64xp100-node-10gbe")
    layers = list(chain_of_layers(nodes(workload)))
    alone = sum(layer.seconds(cluster.device) for layer in layers)
    bandwidth, latency = link(cluster, 8)
    ranks = 1
    while ranks < 1024:
        bandwidth, latency = link(cluster, 2 * ranks)
        others = (2 * ranks - 1) / (2 * ranks)
        messages = 2 * log(2 * ranks) * latency
        sending = 2 * others * 4 * workload.parameter_count / bandwidth + messages
        if alone / (2 * ranks) < sending:
            break
        ranks *= 2
    end = next(end for end in concurrency(workload, cluster).ends if end.form == "data")
    assert end.ranks == ranks and end.stops == "communication"


def test_hybrid_with_one_form_is_that_form():
    workload, cluster = captured("resnet18"), clusters.get("2xdgx-a100")
    shape = step_shape(workload, list(chain_of_layers(nodes(workload))), cluster)
    alone = shape.compute_s(FormDegrees())
    assert shape.compute_s(FormDegrees(data=4)) == pytest.approx(alone / 4)
    assert shape.compute_s(FormDegrees(model=2)) == pytest.approx(alone / 2)
    assert shape.compute_s(FormDegrees(stages=2)) >= alone / 2 * 5 / 4
    assert sum(one.bytes for one in shape.sending(FormDegrees())) == 0


def test_link_is_the_innermost_that_joins_the_ranks():
    cluster = clusters.get("4xdgx-h100")
    inside, outside = link(cluster, 8), link(cluster, 16)
    assert inside[0] > outside[0]
    assert link(cluster, 10**6) == outside


# -- command line ----------------------------------------------------------------------------------


def run(capsys, *words):
    with pytest.raises(SystemExit) as stopped:
        main(["analyze", *words])
    assert stopped.value.code == 0
    return capsys.readouterr().out


def test_devices_that_the_step_fills(found):
    device = clusters.get("4xdgx-h100").device
    lanes = device.peak("fp32") / 2 / device.clock_hz
    assert found.devices_filled == pytest.approx(found.step.work / found.step.depth / lanes)
    assert concurrency(captured("vgg11")).devices_filled is None


def test_command(capsys, tmp_path):
    page = tmp_path / "c.html"
    words = ("resnet18", "--batch", "4", "--image", "64", "--concurrency")
    text = run(capsys, *words, "--cluster", "2xdgx-a100", "--html", str(page))
    for word in ("average parallelism", "batch norm", "Winograd", "pipeline", "both x10"):
        assert word in text
    assert "<svg" in page.read_text() and "log scale" in page.read_text()
    data = json.loads(run(capsys, *words, "--json"))
    assert data["step"]["parallelism"] == data["step"]["work"] / data["step"]["depth"]
    assert data["ends"] == [] and len(data["layers"]) > 30


def test_saved_workload(capsys, tmp_path):
    saved = tmp_path / "gpt2.json"
    pl.capture("gpt2-124m", batch=1, seq=32).save(saved)
    assert "upper bounds" in run(capsys, str(saved), "--concurrency")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["resnet18"], "say what to look at: --concurrency"),
        (["resnte18", "--concurrency"], "did you mean 'resnet18'"),
        (["resnet18", "--concurrency", "--compile"], "--compile fuses the operators"),
        (["resnet18", "--concurrency", "--cluster", "dgx-h10"], "did you mean 'dgx-h100'"),
        (["missing.json", "--concurrency"], "cannot read workload 'missing.json'"),
    ],
)
def test_bad_input(capsys, words, message):
    with pytest.raises(SystemExit) as stopped:
        main(["analyze", *words])
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_fused_workloads_are_refused():
    compiled = pl.capture("resnet18", batch=2, image=64, compile=True)
    with pytest.raises(SpecError, match="captured with --compile"):
        concurrency(compiled)
