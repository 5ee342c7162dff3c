"""Headline results of papers on training with many devices: time to train, speedup, efficiency.

Rows say in words what was used (hardware, network, batch); the rules here turn the words into a cluster and a
plan. What a row does not say is taken as usual for its hardware, and stated. Papers report whole jobs with
the frameworks of their year, so an error here holds that too: `WHY` says, paper by paper, what we know of it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from pathlib import Path

from paceline import api
from paceline.bench.validate.case import Case, PredictedValue, Row, csv_rows, find
from paceline.capture import capture
from paceline.catalog import clusters, devices, frameworks, models
from paceline.catalog.models import fold
from paceline.spec import synchronisation as synchronisations
from paceline.spec.cluster import Cluster, Tier
from paceline.spec.device import parse as parse_device
from paceline.spec.prediction import DistributedPrediction
from paceline.spec.synchronisation import Synchronisation
from paceline.spec.vocabulary import DeviceKind
from paceline.spec.workload import Workload

#: images of an epoch of ImageNet-1k
IMAGENET = 1_281_167
#: (words of a row's hardware, device, devices of a node)
HARDWARE: tuple[tuple[str, str, int], ...] = (
    ("minsky", "p100-sxm", 4),
    ("p100", "p100-sxm", 8),
    ("pascal gpus", "p100-pcie", 4),
    ("p40", "p40", 8),
    ("abci", "v100-sxm-16gb", 4),
    ("v100", "v100-sxm-16gb", 8),
    ("k20x", "k20x", 1),
    ("k80", "k80", 8),
    ("knl", "xeon-phi-knl", 1),
    ("haswell", "haswell-cori", 1),
    ("cori", "haswell-cori", 1),
)
#: (words of its network, kind of link, B/s of a node); where a row names none, what papers on that hardware
#: used
NETWORK: tuple[tuple[str, str, float], ...] = (
    ("fdr", "infiniband", 7e9),
    ("edr x2", "infiniband", 25e9),
    ("edr", "infiniband", 12.5e9),
    ("infiniband", "infiniband", 12.5e9),
    ("omni-path", "omnipath", 12.5e9),
    ("aries", "aries", 10.2e9),
    ("gemini", "aries", 6e9),
)
#: cores of one of Cori's nodes, and the clocks of one core alone and of all of them with AVX (Intel, Xeon E5
#: v3 specification update)
CORES, ONE_HZ, ALL_HZ = 32, 3.3e9, 1.9e9
#: by paper: what we know about an error. Rates per device are the published ones
WHY: tuple[tuple[str, str], ...] = (
    (
        "Goyal",
        (
            "138 images/s per P100 on 8 of them; TensorFlow of the same year reached 219"
            " (tf_cnn_benchmarks_2017), which our curves follow"
        ),
    ),
    (
        "Akiba",
        (
            "125 images/s per P100 over the whole job, evaluation and input included; no overlap assumed;"
            " network recalled"
        ),
    ),
    ("Cho", "156 images/s per P100 over the whole job; batch and network recalled"),
    (
        "You",
        (
            "47 images/s per KNL; our CPU curves were never measured on one, and assume that matrix units are"
            " fed from MCDRAM"
        ),
    ),
    (
        "Jia",
        (
            "AlexNet: 495 images/s per P40 of the 1,024, which reading and decoding images may bound; network"
            " recalled"
        ),
    ),
    (
        "Mikami",
        (
            "237 images/s per V100 over the whole job, two thirds of the rate of one; the batch grew during"
            " training, one size is assumed"
        ),
    ),
    (
        "Iandola",
        (
            "batch of the one-device baseline not stated; gradients went through host memory by MPI at an"
            " unknown rate, Gemini's is assumed"
        ),
    ),
    (
        "Lee",
        (
            "batch of the 8,192-core runs not in our source, one sample per node assumed; one core taken as"
            " 1/18 of a node (AVX clocks)"
        ),
    ),
    ("Horovod", "which Pascal GPU, and whether RoCE was used by GPUDirect, is not stated"),
    ("Keuper", "iteration times are rounded to one digit"),
    (
        "Wen",
        (
            "their performance model is not published in full: whether it overlaps, and how servers are"
            " placed, is assumed"
        ),
    ),
    (
        "fast.ai",
        (
            "sizes and epochs of its three phases recalled; input, evaluation and the start of each phase are"
            " not in a step"
        ),
    ),
)
#: results that are not in the file; figures from the papers' text, from memory
TERNGRAD = "Wen et al., TernGrad, NIPS 2017, section 6"
FAST_AI = "fast.ai, Training Imagenet in 18 minutes, 2018"
#: a GTX 1080 is the chip of a P4 at a higher clock and with faster memory (NVIDIA, GeForce GTX 1080 white
#: paper, 2016)
GTX_1080 = """
name = "gtx-1080"
like = "p4"
[peak]
fp32 = "8.87 TFLOP/s"
[memory]
size = "8 GiB"
bandwidth = "320 GB/s"
[chip]
clock = "1733 MHz"
tdp = "180 W"
"""
#: image side and epochs of the phases of fast.ai's run
PHASES = ((128, 14), (224, 18), (288, 3))
COLUMNS = (
    "case_id",
    "paper",
    "model",
    "hardware",
    "n_processors",
    "network",
    "global_batch",
    "epochs",
    "total_time_min",
    "speedup",
    "scaling_efficiency_pct",
    "speedup_baseline",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperSetup:
    """What a row runs: so many devices with so many samples each, beside a first point that efficiency and
    speedup refer to.
    """

    model: str
    precision: str
    device: str
    node_devices: int
    kind: str
    node_Bps: float
    count: int
    batch: int
    plan: str
    style: Synchronisation
    base_count: int = 1
    base_batch: int = 0
    #: what one unit of the baseline is, in devices
    base_share: float = 1.0


def literature(folder: Path, leave_out_device: bool) -> Iterator[Case] | None:
    """Cases of published/literature_scaling_results.csv."""
    path = find(folder / "published", "literature_scaling_results.csv")
    return chain((_case(row) for row in csv_rows(path, COLUMNS)), recalled()) if path is not None else None


def recalled() -> Iterator[Case]:
    """TernGrad's speedups by its own performance model, and fast.ai's eighteen minutes."""
    gtx = parse_device(GTX_1080, "gtx-1080", devices.get)
    ethernet = clusters.get("2x4xp4@1Gb/s/node")
    infiniband = clusters.get("128x4xp100-sxm@100Gb/s/node")

    def speedup(
        model: str, batch: int, where: Cluster, plain: str, ternary: str
    ) -> Callable[[], Mapping[str, PredictedValue]]:
        def predict() -> Mapping[str, PredictedValue]:
            before, after = (
                api.predict(_workload(model, batch, "fp32"), plan, where) for plan in (plain, ternary)
            )
            return {"speedup": _ratio(after, before, after.throughput / before.throughput)}

        return predict

    yield Case(
        name=f"{TERNGRAD}: AlexNet, 2 x 4 GTX 1080, 1 Gb/s and PCIe",
        device="gtx-1080",
        measured={"speedup": 3.04},
        predict=speedup("alexnet", 128, replace(ethernet, device=gtx), "ddp", "terngrad"),
    )
    yield Case(
        name=f"{TERNGRAD}: VggNet-A, 128 x 4 P100, 100 Gb/s and NVLink",
        device="p100-sxm",
        measured={"speedup": 2.0},
        predict=speedup("vgg11", 32, infiniband, "ps-sync", "ps-sync terngrad"),
    )
    yield Case(
        name=f"{FAST_AI}: ResNet-50, 128 V100 of AWS",
        device="v100-sxm-16gb",
        measured={"minutes": 18.0},
        predict=_phases,
    )


def _phases() -> Mapping[str, PredictedValue]:
    where = clusters.get("16x8xv100-sxm-16gb@25Gb/s/node")
    steps = [
        (api.predict(_workload("resnet50", 64, "amp_fp16", side), "compress=fp16", where), epochs)
        for side, epochs in PHASES
    ]
    value, low, high = (
        sum(epochs * IMAGENET / step.throughput * getattr(step, name) / step.step_s for step, epochs in steps)
        / 60
        for name in ("step_s", "step_s_low", "step_s_high")
    )
    return {"minutes": PredictedValue(value, low, high)}


def why(paper: str) -> str:
    """What is known about our error on a paper's rows."""
    return next((text for name, text in WHY if name.lower() in paper.lower()), "")


def _case(row: Row) -> Case:
    name = (
        f"{row['case_id']}: {row['paper']}, {row['model']}, {row['n_processors']}"
        f" {row.get('processor_unit') or ''}".strip()
    )
    found = setup(row)
    if isinstance(found, str):
        return Case(name=name, device=row["hardware"], skip=found)
    measured, predict = measures(row, found)
    if not measured:
        return Case(name=name, device=found.device, skip="no figure that a step predicts")
    return Case(name=name, device=found.device, measured=measured, predict=predict)


def setup(row: Row) -> PaperSetup | str:
    """The setup that a row's words mean; or why there is none."""
    model = fold(re.sub(r"\(.*?\)", "", row["model"]).strip().lower().replace("vgg-a", "vgg11"))
    known = next((name for name in models.names() if fold(name) == model), None)
    if known is None or models.get(known).image is None:
        return f"{row['model'].partition('(')[0].strip()} is not a vision model of the catalog"
    hardware, network = row["hardware"].lower(), (row["network"] or "").lower()
    device = next(((name, each) for word, name, each in HARDWARE if word in hardware), None)
    if device is None:
        return "hardware not in the catalog"
    link = _link(network, device[0])
    count = int(row["n_processors"]) // (CORES if (row.get("processor_unit") or "") == "core" else 1)
    if count > device[1] and link is None:
        return "network not stated"
    per = re.match(r"(\d+) per GPU", row["global_batch"] or "")
    whole = int(row["global_batch"]) if (row["global_batch"] or "").isdigit() else 0
    batch = 1 if "core" in (row.get("processor_unit") or "") else 32
    if per:
        batch = int(per[1])
    elif whole:
        batch = whole // count
    if batch < 1:
        return "fewer samples than devices"
    base = int(found[0]) if (found := re.findall(r"^(\d+)", row["speedup_baseline"] or "")) else 1
    paper = row["paper"].lower()
    strong = bool(row["speedup"])
    plan, style = _way(paper, device[0])
    return PaperSetup(
        model=known,
        precision="amp_fp16" if device[0].startswith("v100") else "fp32",
        device=device[0],
        node_devices=min(device[1], count),
        kind=link[0] if link else "pcie",
        node_Bps=link[1] if link else 0.0,
        count=count,
        batch=batch,
        plan=plan,
        style=style,
        base_count=1 if "core" in (row["speedup_baseline"] or "") else base,
        base_batch=min(32, batch * count) if strong else batch,
        base_share=1 / (CORES * ALL_HZ / ONE_HZ) if "core" in (row["speedup_baseline"] or "") else 1.0,
    )


def _link(network: str, device: str) -> tuple[str, float] | None:
    rate = re.search(r"(\d+)\s*gb", network)
    if rate:
        return (
            "roce" if "roce" in network or "infiniband" in network else "ethernet",
            int(rate[1]) * 1e9 / 8,
        )
    named = next(((kind, speed) for word, kind, speed in NETWORK if word in network), None)
    return named or (("infiniband", 12.5e9) if device.startswith("p100") else None)


def _way(paper: str, device: str) -> tuple[str, Synchronisation]:
    """The plan and the synchronisation of a paper."""
    ddp = synchronisations.DDP
    if "lee et al" in paper:
        return "overlap", synchronisations.get("own-core")
    if "jia" in paper or "mikami" in paper:
        return "compress=fp16", ddp
    if "iandola" in paper or "akiba" in paper or device == "xeon-phi-knl":
        return "", synchronisations.get("after-backward")
    return "", synchronisations.get("horovod") if "horovod" in paper else ddp


def measures(
    row: Row, found: PaperSetup
) -> tuple[dict[str, float], Callable[[], Mapping[str, PredictedValue]]]:
    """What was published of a row, by metric, and how to predict it."""
    measured: dict[str, float] = {}
    if row["total_time_min"] and row["epochs"] and row["epochs"] != "0":
        measured["minutes"] = float(row["total_time_min"])
    if row["scaling_efficiency_pct"]:
        measured["efficiency_pct"] = float(row["scaling_efficiency_pct"])
    if row["speedup"]:
        measured["speedup"] = float(row["speedup"])

    def predict() -> Mapping[str, PredictedValue]:
        step = run(found, found.count, found.batch, found.plan)
        out: dict[str, PredictedValue] = {}
        if "minutes" in measured:
            images = float(row["epochs"]) * IMAGENET
            out["minutes"] = _answer(step, images / step.throughput / 60)
        if "efficiency_pct" in measured or "speedup" in measured:
            base = run(found, found.base_count, found.base_batch, "" if found.base_count == 1 else found.plan)
            ratio = step.throughput / base.throughput
            out["efficiency_pct"] = _ratio(step, base, 100 * ratio * found.base_count / found.count)
            out["speedup"] = _ratio(step, base, ratio / found.base_share)
        return out

    return measured, predict


def _answer(step: DistributedPrediction, value: float) -> PredictedValue:
    return PredictedValue(
        value, value * step.step_s_low / step.step_s, value * step.step_s_high / step.step_s
    )


def _ratio(step: DistributedPrediction, base: DistributedPrediction, value: float) -> PredictedValue:
    """A ratio of two steps: what they have in common cancels, the rest of the wider interval stays."""
    spread = abs(math.log(step.step_s_high / step.step_s) - math.log(base.step_s_high / base.step_s)) + 0.1
    return PredictedValue(value, value * math.exp(-spread), value * math.exp(spread))


def run(found: PaperSetup, count: int, batch: int, plan: str) -> DistributedPrediction:
    """One step of a setup on so many devices."""
    usual = frameworks.get("tensorflow-1" if devices.get(found.device).kind == DeviceKind.GPU else "native")
    workload = _workload(found.model, batch, found.precision)
    return api.predict(workload, plan, cluster(found, count), framework=replace(usual, sync=found.style.name))


def cluster(found: PaperSetup, count: int) -> Cluster:
    """The cluster of a setup with so many devices."""
    each = min(found.node_devices, count)
    device = devices.get(found.device)
    tiers = [clusters.link(device, each)] if each > 1 else []
    if count > each:
        tiers.append(
            Tier(
                name="network",
                kind=found.kind,
                bandwidth_Bps=found.node_Bps,
                node_bandwidth_Bps=found.node_Bps,
            )
        )
    name = f"{count} x {found.device}"
    return Cluster(
        name=name,
        title=device.title,
        device=device,
        node_devices=each,
        nodes=max(1, count // each),
        tiers=tuple(tiers),
    )


@lru_cache(maxsize=64)
def _workload(model: str, batch: int, precision: str, image: int | None = None) -> Workload:
    return capture(model, batch=batch, precision=precision, optimizer="sgd", image=image)
