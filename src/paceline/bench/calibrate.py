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
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.catalog import devices
from paceline.cost.chip import chip
from paceline.cost.curves import curves_for
from paceline.cost.host import default_host, issue_times
from paceline.cost.operators import times
from paceline.cost.pack import pack_ops
from paceline.errors import MissingExtra, SpecError, UnknownName
from paceline.spec import device as spec
from paceline.spec.device import Device
from paceline.units import show

if TYPE_CHECKING:
    import torch

#: shares of the time allowed: peaks and bandwidth, host; the rest goes to the operators
PEAK_SHARE, HOST_SHARE = 0.2, 0.1
#: probes there are, about; each gets its share of the time
PROBES = 90
#: seconds that one sample of a short operator lasts, so that the clock's own cost does not show
SAMPLE_S = 2e-4
#: seconds that issuing one call takes a slow host, about
ISSUE_S = 2e-4
#: sides of the square products whose best rate is called the peak
SIDES = {"cpu": (256, 768, 1024, 1536), "cuda": (4096, 8192)}
#: share of the fp32 rate below which a precision is not the hardware's own
EMULATED = 0.5
#: elements of the tensor that is copied to measure bandwidth
COPIED = {"cpu": 1 << 25, "cuda": 1 << 28}
#: width and depth of the small network whose steps the host bounds
SMALL_WIDTH, SMALL_DEPTH = 16, 12
#: major compute capability, or both parts of it -> architecture of the catalog
CAPABILITIES = {"3": "kepler", "5": "maxwell", "6": "pascal", "7.0": "volta", "7.5": "turing", "8": "ampere", "8.9": "ada", "9": "hopper",
                "10": "blackwell", "12": "blackwell"}


@dataclass(slots=True)
class _Sheet:
    """A device file in the making."""

    text: dict[str, str]
    #: TOML path -> value in SI units
    facts: dict[str, float] = field(default_factory=dict)
    calibration: dict[str, float] = field(default_factory=dict)
    source: str = ""

    def toml(self) -> str:
        lines = [f"{key} = {_quoted(value)}" for key, value in self.text.items()]
        if self.facts:
            lines += ["", "[sources]", f"m = {_quoted(self.source)}"]
        sections: dict[str, list[str]] = defaultdict(list)
        for path, value in self.facts.items():
            section, _, leaf = path.partition(".")
            sections[section].append(f'{leaf} = {{ value = {value:.6g}, kind = "measured", source = "m" }}')
        for section, entries in sections.items():
            lines += ["", f"[{section}]", *entries]
        if self.calibration:
            lines += ["", f"# {self.source}: measured over predicted", "[calibration]"]
            lines += [f"{_quoted(key)} = {value:.4g}" for key, value in sorted(self.calibration.items())]
        return "\n".join(lines) + "\n"

    def device(self) -> Device:
        return spec.parse(self.toml(), "calibration", devices.get)


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def calibrate(output: Path, seconds: float) -> str:
    """Measure this machine for about `seconds`, write the device file `output`, and say in short what was found."""
    if output.suffix != ".toml":
        raise SpecError(f"a device file must end in .toml, got {str(output)!r}")
    if not (seconds > 0 and math.isfinite(seconds)):
        raise SpecError(f"seconds must be a number above zero, got {seconds:g}")
    _write(output, None)  # a place that cannot be written to should not cost the measuring first
    try:
        import torch
    except ImportError:
        raise MissingExtra("torch", "torch", "calibrating this machine") from None
    target = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sheet = _describe(output.stem, target)
    with _settings(target):
        clock = _Clock(target)
        if "like" not in sheet.text:
            _capabilities(sheet, clock, seconds * PEAK_SHARE)
        sheet.calibration["host"] = _host(clock, seconds * HOST_SHARE)
        sheet.calibration |= _scales(sheet.device(), clock, seconds * (1 - PEAK_SHARE - HOST_SHARE))
    device = sheet.device()
    _write(output, sheet.toml())
    return _summary(output, device)


@contextmanager
def _settings(target: torch.device) -> Iterator[None]:
    """fp32 means fp32, and convolutions take the fastest algorithm, as in the measurements behind the curves."""
    import torch

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        if target.type == "cuda":
            with torch.backends.cudnn.flags(enabled=True, benchmark=True, deterministic=False, allow_tf32=False):
                yield
        else:
            yield
    finally:
        torch.set_float32_matmul_precision(before)


def _write(output: Path, text: str | None) -> None:
    """Put `text` into `output`, whole or not at all; None only tries whether that is possible."""
    draft = output.with_name(output.name + ".partial")
    try:
        draft.write_text(text or "", encoding="utf-8")
        if text is None:
            draft.unlink()
        else:
            draft.replace(output)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise SpecError(f"cannot write {str(output)!r}: {error.strerror}") from None


# -- time ----------------------------------------------------------------------------------------


class _Clock:
    """Times calls on one device."""

    def __init__(self, target: torch.device) -> None:
        self.target = target
        if target.type == "cuda":
            import torch

            self.filler = torch.zeros(4096, 4096, device=target)
            self.filler_s = 0.0  # none is needed yet
            self.filler_s = min(self._events(lambda: self.filler @ self.filler, 1) for _ in range(3))

    def seconds(self, run: Callable[[], Any], budget: float) -> list[float]:
        """Seconds per call, a sample each, taken for about `budget`; at least two samples after a first call."""
        end = time.perf_counter() + budget
        run()
        once = self._sample(run, 1)
        calls = max(1, min(100, round(SAMPLE_S / max(once, 1e-9))))
        samples = [once] if calls == 1 else []
        while len(samples) < 2 or (len(samples) < 200 and time.perf_counter() < end):
            samples.append(self._sample(run, calls) / calls)
        return samples

    def typical(self, run: Callable[[], Any], budget: float) -> float:
        """The lower quartile: what else runs on the machine only ever adds."""
        return float(np.quantile(self.seconds(run, budget), 0.25))

    def _sample(self, run: Callable[[], Any], calls: int) -> float:
        if self.target.type == "cuda":
            return self._events(run, calls)
        start = time.perf_counter()
        for _ in range(calls):
            run()
        return time.perf_counter() - start

    def _events(self, run: Callable[[], Any], calls: int) -> float:
        """Device seconds. Products ahead of the calls keep the device busy for as long as the host takes to issue them."""
        import torch

        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        for _ in range(math.ceil(calls * ISSUE_S / self.filler_s) if self.filler_s else 0):
            torch.mm(self.filler, self.filler)
        start.record()
        for _ in range(calls):
            run()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3


# -- what the machine is -------------------------------------------------------------------------


def _describe(name: str, target: torch.device) -> _Sheet:
    """What the system says of the device; `like` names the catalog's entry where there is one."""
    import torch

    source = f"paceline calibrate, torch {torch.__version__}, {datetime.date.today().isoformat()}"
    if target.type == "cpu":
        return _describe_cpu(name, source)
    found = torch.cuda.get_device_properties(target)
    major, both = str(found.major), f"{found.major}.{found.minor}"
    vendor = "amd" if torch.version.hip else "nvidia"
    text = {"name": name, "title": found.name, "vendor": vendor, "architecture": CAPABILITIES.get(both) or CAPABILITIES.get(major) or "generic"}
    try:
        return _Sheet({"name": name, "title": found.name, "like": devices.get(found.name).name}, source=source)
    except UnknownName:
        pass
    facts = {"memory.size": found.total_memory, "chip.sms": found.multi_processor_count, "cache.l2": getattr(found, "L2_cache_size", 0)}
    return _Sheet(text, {path: float(value) for path, value in facts.items() if value > 0}, source=source)


def _describe_cpu(name: str, source: str) -> _Sheet:
    import torch

    info = _cpu_info()
    vendor = {"AuthenticAMD": "amd", "GenuineIntel": "intel"}.get(info.get("vendor_id", ""), info.get("vendor_id", "unknown"))
    threads = torch.get_num_threads()
    title = f"{info.get('model name') or platform.processor() or platform.machine()}, {threads} thread{'s'[: threads > 1]}"
    sheet = _Sheet({"name": name, "title": title, "vendor": vendor, "architecture": platform.machine(), "kind": "cpu"}, source=source)
    sheet.facts["memory.size"] = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    sheet.facts["chip.sms"] = float(threads)
    if "cpu MHz" in info:
        sheet.facts["chip.clock"] = float(info["cpu MHz"]) * 1e6
    cache = _last_level_cache()
    if cache:
        sheet.facts["cache.l2"] = cache
    return sheet


def _cpu_info() -> dict[str, str]:
    """The first processor's lines of /proc/cpuinfo; empty where there is none."""
    try:
        lines = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
    except OSError:
        return {}
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}


def _last_level_cache() -> float:
    """Bytes of the largest cache; 0 where the system does not say."""
    folder = Path("/sys/devices/system/cpu/cpu0/cache")
    sizes = [path.read_text().strip() for path in folder.glob("index*/size")]
    return max((float(size[:-1]) * 1024 for size in sizes if size.endswith("K")), default=0.0)


# -- what it can do ------------------------------------------------------------------------------


def _capabilities(sheet: _Sheet, clock: _Clock, budget: float) -> None:
    """Peaks of matrix products and the bandwidth of memory, each the best that was seen; the time of a tiny operator."""
    import torch

    kind = clock.target.type
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
    if kind == "cuda":
        dtypes |= {"tf32": torch.float32, "fp16": torch.float16}
    share = budget / (len(dtypes) + 2)
    for name, dtype in dtypes.items():
        torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
        sheet.facts[f"peak.{name}"] = _peak(clock, dtype, share, sheet.facts.get("peak.fp32", 0.0))
    torch.set_float32_matmul_precision("highest")
    source = torch.ones(COPIED[kind], device=clock.target)
    copy = torch.empty_like(source)
    sheet.facts["memory.bandwidth"] = 2.0 * source.nbytes / min(clock.seconds(lambda: copy.copy_(source), share))
    tiny = torch.zeros(1, device=clock.target)
    sheet.facts["chip.launch"] = clock.typical(lambda: tiny + tiny, share)


def _peak(clock: _Clock, dtype: torch.dtype, budget: float, fp32: float) -> float:
    """The best rate of products of several sizes, FLOP/s."""
    import torch
    from torch.nn.functional import linear

    sides, best = SIDES[clock.target.type], 0.0
    for side in sides:
        a, b = (torch.randn(side, side, device=clock.target).to(dtype) for _ in range(2))
        best = max(best, 2.0 * side**3 / min(clock.seconds(partial(linear, a, b), budget / len(sides))))
        if best < EMULATED * fp32:
            break  # larger ones would only take longer
    return best


def _host(clock: _Clock, budget: float) -> float:
    """Seconds of a step so small that the host bounds it, over what the host's constants give for the same step."""
    import torch
    from torch import nn

    from paceline.capture import capture

    def network() -> nn.Module:
        return nn.Sequential(*(layer for _ in range(SMALL_DEPTH) for layer in (nn.Linear(SMALL_WIDTH, SMALL_WIDTH), nn.ReLU())))

    workload = capture((network(), torch.zeros(4, SMALL_WIDTH), lambda y: y.mean()), batch=4, optimizer="sgd")
    issue = issue_times(workload, default_host())
    predicted = sum(float(np.sum(issue[i])) for i in workload.order)
    module = network().to(clock.target)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3, momentum=0.9, foreach=True)
    x = torch.zeros(4, SMALL_WIDTH, device=clock.target)

    def step() -> None:
        optimizer.zero_grad()
        module(x).mean().backward()
        optimizer.step()

    step()
    samples: list[float] = []
    end = time.perf_counter() + budget
    while len(samples) < 5 or time.perf_counter() < end:
        start = time.perf_counter()
        for _ in range(5):
            step()
        if clock.target.type == "cuda":
            torch.cuda.synchronize()
        samples.append((time.perf_counter() - start) / 5)
    return statistics.quantiles(samples, n=4)[0] / predicted


# -- how it departs from the curves --------------------------------------------------------------


def _scales(device: Device, clock: _Clock, budget: float) -> dict[str, float]:
    """Measured over predicted time, as a factor for each group, for each kind of operator, and for all the rest."""
    from paceline.bench.probes import probes

    target, curves = chip(device), curves_for(device)
    ratios: dict[str, list[float]] = defaultdict(list)
    dtypes = [dtype for dtype in ("fp32", "bf16") if device.peak(dtype) >= EMULATED * device.peak("fp32")]
    for probe in probes(clock.target, dtypes):
        packed = pack_ops([probe.op])
        predicted = float(times(packed, target, curves).seconds[0])
        group = packed.groups[0]
        ratios[group].append(curves.scale_of(group) * clock.typical(probe.run, budget / PROBES) / predicted)
    groups = {group: _middle(values) for group, values in ratios.items()}
    families: dict[str, list[float]] = defaultdict(list)
    for group, value in groups.items():
        families[group.partition(".")[0]].append(value)
    kinds = {family: _middle(values) for family, values in families.items()}
    named = {**kinds, **groups, "": _middle(list(kinds.values()))}
    return {f"scale.{group}": value for group, value in named.items()}


def _middle(values: list[float]) -> float:
    return statistics.geometric_mean(values)


def _summary(output: Path, device: Device) -> str:
    peaks = ", ".join(f"{dtype} {show(peak, 'flops')}" for dtype, peak in device.peak_flops.items() if f"peak.{dtype}" in device.facts)
    factors = len([key for key in device.calibration if key.startswith("scale.")])
    return "\n".join((
        f"{output}: {device.title}",
        f"  {peaks}; memory {show(device.memory_bytes, 'bytes')} at {show(device.memory_bandwidth_Bps, 'bandwidth')}",
        f"  host {device.calibration['host']:.2f} x the reference host's time per call; {factors} factors for operators",
        f"  use it: paceline predict MODEL --device {output}",
    ))
