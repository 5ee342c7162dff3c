"""Measure this machine into a device file: its GPU, or the CPU where there is none.

    paceline calibrate --output this-machine.toml
    paceline predict resnet18 --batch 8 --device this-machine.toml

Three things are measured: what the machine can do (matrix products, memory), how long typical
operators take next to what the curves say of such a machine (`scale.GROUP`), and how long the host
takes to issue a small training step next to the host the constants come from (`host`). A GPU of the
catalog keeps its datasheet, on which its curves rest; only the factors are added.
"""

from __future__ import annotations

import datetime
import math
import os
import platform
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import geometric_mean

from paceline.catalog import architectures, devices
from paceline.cost.chip import chip
from paceline.cost.curves import curves_for
from paceline.cost.operators import times
from paceline.cost.pack import pack_ops
from paceline.errors import MissingExtra, SpecError, UnknownName
from paceline.predict.step import predict
from paceline.spec import device as spec
from paceline.spec.device import Device
from paceline.spec.workload import Op
from paceline.units import show

try:
    import torch
except ImportError:
    raise MissingExtra("torch", "torch", "calibrating this machine") from None
from torch import nn
from torch.nn import functional as F

from paceline.bench.clock import Clock
from paceline.bench.probes import probes
from paceline.capture import capture
from paceline.spec.vocabulary import Precision

#: shares of the time allowed: peaks and bandwidth, host; the rest goes to the operators
PEAK_SHARE, HOST_SHARE = 0.2, 0.1
#: probes there are, about; each gets its share of the time that is left, in rounds of which the better one
#: counts:
#: one thread that waits for a processor stalls all, and may do so for seconds
PROBES, ROUNDS = 90, 2
#: sides of the square products whose best rate is called the peak
SIDES = {"cpu": (256, 768, 1536), "cuda": (4096, 8192)}
#: share of the fp32 rate below which a precision is not the hardware's own
EMULATED = 0.5
#: processors that other work may keep busy before figures suffer
BUSY = 0.5
#: elements of the tensor that is copied to measure bandwidth
COPIED = {"cpu": 1 << 25, "cuda": 1 << 28}
#: what `_host` gives where the host's constants come from: they are of larger networks, and of a host that
#: feeds a GPU
REFERENCE_HOST = {"cpu": 1.0, "cuda": 0.47}
#: width, depth and batch of the small network whose steps the host bounds
SMALL_WIDTH, SMALL_DEPTH, SMALL_BATCH = 16, 12, 4


@dataclass(slots=True)
class _Sheet:
    """A device file in the making."""

    text: dict[str, str]
    #: TOML path -> value in SI units
    facts: dict[str, float] = field(default_factory=dict)
    calibration: dict[str, float] = field(default_factory=dict)

    def toml(self) -> str:
        source = f"paceline calibrate, torch {torch.__version__}, {datetime.date.today().isoformat()}"
        lines = [f"{key} = {_quoted(value)}" for key, value in self.text.items()]
        sections: dict[str, list[str]] = defaultdict(list)
        for path, value in self.facts.items():
            section, _, leaf = path.partition(".")
            sections[section].append(f'{leaf} = {{ value = {value:.6g}, kind = "measured", source = "m" }}')
        if sections:
            lines += ["", "[sources]", f"m = {_quoted(source)}"]
        for section, entries in sections.items():
            lines += ["", f"[{section}]", *entries]
        lines += ["", f"# {source}: measured over predicted", "[calibration]"]
        lines += [f"{_quoted(key)} = {value:.4g}" for key, value in sorted(self.calibration.items())]
        return "\n".join(lines) + "\n"

    def device(self) -> Device:
        return spec.parse(self.toml(), "calibration", devices.get)


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def calibrate(output: Path, seconds: float) -> str:
    """Measure this machine for about `seconds`, write the device file `output`, and say in short what was
    found.
    """
    if output.suffix != ".toml":
        raise SpecError(f"a device file must end in .toml, got {str(output)!r}")
    if not (seconds > 0 and math.isfinite(seconds)):
        raise SpecError(f"seconds must be a number above zero, got {seconds:g}")
    end = time.perf_counter() + seconds
    load = os.getloadavg()[0]
    _write(output, None)  # a place that cannot be written to should not cost the measuring first
    target = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sheet = _describe(output.stem, target)
    with _settings(target):
        clock = Clock(target)
        if "like" not in sheet.text:
            sheet.facts |= _capabilities(clock, seconds * PEAK_SHARE)
        sheet.calibration["host"] = _host(sheet.device(), clock, seconds * HOST_SHARE)
        sheet.calibration |= _scales(sheet.device(), clock, end)
    _write(output, sheet.toml())
    return _summary(output, sheet.device(), load)


@contextmanager
def _settings(target: torch.device) -> Iterator[None]:
    """fp32 means fp32, and convolutions take the fastest algorithm, as in the measurements behind the
    curves.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.backends.cudnn.flags(
            enabled=True, benchmark=target.type == "cuda", deterministic=False, allow_tf32=False
        ):
            yield
    finally:
        torch.set_float32_matmul_precision(before)


def _write(output: Path, text: str | None) -> None:
    """Put `text` into `output`, whole or not at all; None only tries whether that is possible."""
    draft = output.with_name(output.name + ".partial")
    try:
        if output.is_dir():
            raise IsADirectoryError(0, "it is a folder")
        draft.write_text(text or "", encoding="utf-8")
        if text is None:
            draft.unlink()
        else:
            draft.replace(output)
    except OSError as error:
        raise SpecError(f"cannot write {str(output)!r}: {error.strerror}") from None


# -- what the machine is -------------------------------------------------------------------------


def _describe(name: str, target: torch.device) -> _Sheet:
    """What the system says of the device; `like` names the catalog's entry where there is one."""
    if target.type == "cpu":
        return _describe_cpu(name)
    found = torch.cuda.get_device_properties(target)
    try:
        return _Sheet({"name": name, "title": found.name, "like": devices.get(found.name).name})
    except UnknownName:
        pass
    architecture = architectures.of_capability(found.major, found.minor)
    vendor = "amd" if torch.version.hip else "nvidia"
    facts = {
        "memory.size": found.total_memory,
        "chip.sms": found.multi_processor_count,
        "cache.l2": getattr(found, "L2_cache_size", 0),
    }
    return _Sheet(
        {"name": name, "title": found.name, "vendor": vendor, "architecture": architecture}, _known(facts)
    )


def _describe_cpu(name: str) -> _Sheet:
    info = _cpu_info()
    maker = info.get("vendor_id", "unknown")
    threads = torch.get_num_threads()
    title = (
        f"{info.get('model name') or platform.processor() or platform.machine()}, {threads}"
        f" thread{'s'[: threads > 1]}"
    )
    text = {
        "name": name,
        "title": title,
        "vendor": {"AuthenticAMD": "amd", "GenuineIntel": "intel"}.get(maker, maker),
        "architecture": platform.machine(),
        "kind": "cpu",
    }
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return _Sheet(
        text,
        _known(
            {
                "memory.size": memory,
                "chip.sms": threads,
                "chip.clock": float(info.get("cpu MHz", 0)) * 1e6,
                "cache.l2": _last_level_cache(),
            }
        ),
    )


def _known(facts: dict[str, float]) -> dict[str, float]:
    """Those the system knew."""
    return {path: value for path, value in facts.items() if value > 0}


def _cpu_info() -> dict[str, str]:
    """The first processor's lines of /proc/cpuinfo; empty where there is none."""
    try:
        lines = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
    except OSError:
        return {}
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}


def _last_level_cache() -> float:
    """Bytes of the largest cache; 0 where the system does not say."""
    sizes = [
        path.read_text().strip() for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    ]
    return max((float(size[:-1]) * 1024 for size in sizes if size.endswith("K")), default=0.0)


# -- what it can do ------------------------------------------------------------------------------


def _capabilities(clock: Clock, budget: float) -> dict[str, float]:
    """Peaks of matrix products and the bandwidth of memory, each the best that was seen."""
    kind = clock.target.type
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
    if kind == "cuda":
        dtypes |= {"tf32": torch.float32, "fp16": torch.float16}
    share = budget / (len(dtypes) + 1)
    facts: dict[str, float] = {}
    for name, dtype in dtypes.items():
        torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
        facts[f"peak.{name}"] = _peak(clock, dtype, share, facts.get("peak.fp32", 0.0))
    torch.set_float32_matmul_precision("highest")
    source = torch.ones(COPIED[kind], device=clock.target)
    copy = torch.empty_like(source)
    facts["memory.bandwidth"] = 2.0 * source.nbytes / clock.seconds(partial(copy.copy_, source), share)
    return facts


def _peak(clock: Clock, dtype: torch.dtype, budget: float, fp32: float) -> float:
    """The best rate of products of several sizes, FLOP/s."""
    sides, best = SIDES[clock.target.type], 0.0
    for side in sides:
        a, b = (torch.randn(side, side, device=clock.target).to(dtype) for _ in range(2))
        best = max(best, 2.0 * side**3 / clock.seconds(partial(F.linear, a, b), budget / len(sides)))
        if best < EMULATED * fp32:
            break  # larger ones would only take longer
    return best


def _host(device: Device, clock: Clock, budget: float) -> float:
    """Seconds of a step so small that the host bounds it, over what the host's constants give for the same
    step.
    """
    module = nn.Sequential(
        *(layer for _ in range(SMALL_DEPTH) for layer in (nn.Linear(SMALL_WIDTH, SMALL_WIDTH), nn.ReLU()))
    ).to(clock.target)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3, momentum=0.9, foreach=True)
    x = torch.zeros(SMALL_BATCH, SMALL_WIDTH, device=clock.target)

    def steps() -> None:
        for _ in range(5):
            optimizer.zero_grad()
            module(x).mean().backward()
            optimizer.step()
        if clock.target.type == "cuda":
            torch.cuda.synchronize()

    measured = Clock(torch.device("cpu")).seconds(steps, budget) / 5
    # captured last, for that leaves the module without data
    workload = capture((module, x, lambda y: y.mean()), batch=SMALL_BATCH, optimizer="sgd")
    return measured / predict(workload, device).host_s / REFERENCE_HOST[clock.target.type]


# -- how it departs from the curves --------------------------------------------------------------


def _scales(device: Device, clock: Clock, end: float) -> dict[str, float]:
    """Measured over predicted time, as a factor for each group, for each kind of operator, and for all the
    rest.
    """
    target, curves = chip(device), curves_for(device)
    dtypes = [
        dtype
        for dtype in (Precision.FP32, Precision.BF16)
        if device.peak(dtype) >= EMULATED * device.peak("fp32")
    ]
    least: dict[int, tuple[float, Op]] = {}
    for left in range(ROUNDS * PROBES, 0, -PROBES):
        if least and time.perf_counter() > end:
            break
        for number, probe in enumerate(probes(clock.target, dtypes)):
            measured = clock.seconds(probe.run, (end - time.perf_counter()) / max(1, left - number))
            least[number] = min(measured, least.get(number, (math.inf,))[0]), probe.op
    groups: dict[str, list[float]] = defaultdict(list)
    for measured, op in least.values():
        packed = pack_ops([op])
        group = packed.groups.names[0]
        groups[group].append(
            curves.scale_of(group) * measured / float(times(packed, target, curves).seconds[0])
        )
    kinds: dict[str, list[float]] = defaultdict(list)
    for group, values in groups.items():
        kinds[group.partition(".")[0]].append(geometric_mean(values))
    everything = {"": [geometric_mean(values) for values in kinds.values()], **kinds, **groups}
    return {f"scale.{name}": geometric_mean(values) for name, values in everything.items()}


def _summary(output: Path, device: Device, load: float) -> str:
    peaks = ", ".join(f"{dtype} {show(peak, 'flops')}" for dtype, peak in device.peak_flops.items())
    lines = [
        f"{output}: {device.title}",
        (
            f"  {peaks}; memory {show(device.memory_bytes, 'bytes')} at"
            f" {show(device.memory_bandwidth_Bps, 'bandwidth')}"
        ),
        (
            f"  host {device.calibration['host']:.2f} x the reference host's time per call;"
            f" {len(device.calibration) - 1} factors for operators"
        ),
        f"  use it: paceline predict MODEL --device {output}",
    ]
    if load > BUSY:
        lines.append(
            f"  other work kept {load:.1f} processors busy, which slows what is measured: calibrate again"
            " when the machine is idle"
        )
    return "\n".join(lines)
