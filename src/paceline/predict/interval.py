"""How far off an answer may be: every spread that a 90 % interval is made of, of time and of memory.

Operators of one group err together and those of different groups apart; on top come the device, the
framework, the family of the model, and the host, which varies from run to run:

    time of the device   sigma^2 = sum over groups of (share * group)^2 + framework^2 + device^2 + family^2
    step of one device   sigma^2 = (device share * sigma)^2 + (host share * host)^2
    step of many         sigma^2 = (computing share * groups)^2 + (exposed share * network)^2
                                   + (0.3 * bubble share)^2 + framework^2 + device^2 + family^2

All are standard deviations of the logarithm. Each says what it was estimated on (`paceline validate` scores
the rows that are named, with these very intervals); what was never measured has a spread of its own and is
named in the answer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from paceline.cost.collectives import sigma
from paceline.cost.curves import Curves
from paceline.sim.mesh import Mesh
from paceline.spec.device import Device
from paceline.spec.framework import Framework
from paceline.spec.prediction import Evidence, Memory

#: half-width of a 90 % interval in standard deviations
Z90 = 1.645


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A standard deviation of the logarithm, and what it was estimated on."""

    sigma: float
    source: str
    #: architectures with precisions of which it was estimated ("hopper fp8"); empty: it does not depend on
    #: them
    on: frozenset[str] = frozenset()
    #: what was never measured, where this is the spread of something that was not
    unmeasured: str = ""


def _spread(sigma: float, source: str, on: str = "") -> Spread:
    return Spread(sigma=sigma, source=source, on=frozenset(filter(None, on.split(", "))))


# -- operators -------------------------------------------------------------------------------------

#: of one group of operators, by cross-validation over the operators and steps of the H200 and of timm's
#: models
GROUP = _spread(0.095, "h200_steps: whole models left out")
#: the same on a device whose groups have the curves of others
STRANGE_GROUP = _spread(0.15, "timm_train_rtx3090")
#: of one group in a transformer by its sizes, whose products are few and large
LARGE_GROUP = _spread(0.05, "megatron_gpt, dgxc_benchmarking_llm")
#: of the host's time per operator
HOST = _spread(0.19, "h200_steps that wait for the host")
#: of seconds in which stages wait for one another
BUBBLE_SHARE = 0.3

# -- devices ---------------------------------------------------------------------------------------

#: with curves of its own, or calibrated where it stands
OWN_CURVES = _spread(0.0, "its own operators")
#: with the curves of its architecture
LIKE_DEVICE = _spread(0.08, "neusight_fp32_training: devices left out")
NEW_DEVICE = Spread(
    sigma=0.15, source="kernels: architectures left out", unmeasured="operators of architecture {}"
)
CPU_DEVICE = _spread(0.35, "benchmarks/this_machine.py")
#: with curves of GPUs, scaled by peaks, bandwidth and lanes
TPU = _spread(0.25, "tpu_recipes_ironwood, misc_published_training")

# -- frameworks ------------------------------------------------------------------------------------

#: of captured modules
MODULE_FRAMEWORKS: Mapping[str, Spread] = {
    "torch": _spread(0.033, "h200_steps"),
    "torch-1": _spread(0.08, "timm_train_rtx3090"),
    "transformers-2023": _spread(0.085, "neusight_fp32_training"),
    "tensorflow-1": _spread(0.13, "tf_cnn_benchmarks_2017"),
    "tensorflow-1-server": _spread(0.13, "tf_cnn_benchmarks_2017"),
    "nvidia-torch": _spread(0.15, "dle_training_throughput"),
    "nvidia-tensorflow": _spread(0.15, "dle_training_throughput"),
    "nvidia-mxnet": _spread(0.15, "dle_training_throughput"),
    "nvidia-paddle": _spread(0.15, "dle_training_throughput"),
}
#: of transformers by their sizes; older and eager frameworks vary more
TRANSFORMER_FRAMEWORKS: Mapping[str, Spread] = {
    "megatron-2021": _spread(0.02, "megatron_gpt", "ampere fp16, volta fp16"),
    "megatron-2022": _spread(0.02, "megatron_gpt", "ampere fp16"),
    "megatron-deepspeed": _spread(0.12, "vtrain_a100_multi, vtrain_a100_single", "ampere fp16, ampere bf16"),
    "deepspeed-zero3": _spread(0.2, "misc_published_training", "ampere fp16"),
    "deepspeed": _spread(0.2, "misc_published_training", "ampere fp16"),
    "bigscience": _spread(0.1, "bloom_prequel_a100_topologies", "ampere bf16, ampere fp16"),
    "llm-foundry": _spread(0.075, "llmfoundry_mpt_throughput", "ampere bf16, hopper bf16"),
    "torch": _spread(0.12, "torchtitan_llama", "ampere bf16, hopper bf16, hopper fp8"),
    "torch-compile": _spread(0.12, "torchtitan_llama", "hopper bf16, hopper fp8"),
    "torch-compile-2024": _spread(0.12, "torchtitan_llama", "hopper bf16, hopper fp8"),
    "nanogpt": _spread(0.2, "misc_published_training", "ampere bf16"),
    "jax": _spread(0.2, "jax_toolbox", "ampere bf16, hopper bf16, hopper fp8"),
    "nemo": _spread(
        0.1,
        "nemo_megatron_bridge, dgxc_benchmarking_llm",
        "hopper bf16, hopper fp8, blackwell bf16, blackwell fp8, blackwell fp4",
    ),
    "nemo-2024": _spread(0.08, "nemo_megatron_bridge", "hopper fp8"),
    "megatron-bridge": _spread(
        0.1, "nemo_megatron_bridge", "hopper bf16, hopper fp8, blackwell bf16, blackwell fp8"
    ),
    "megatron-bridge-2026": _spread(0.1, "nemo_megatron_bridge", "blackwell fp8"),
    "nvidia-mlperf": _spread(0.16, "mlperf_llm_runs", "hopper fp8, blackwell fp8, ada fp8"),
    "megatron-core": _spread(0.04, "simumax_b200_measured", "blackwell bf16"),
    "llm.c": _spread(0.12, "misc_published_training", "ampere bf16, hopper bf16"),
    "meta-4d": _spread(0.15, "misc_published_training", "hopper bf16"),
}
#: of a framework that the plan does not name: as sources differ from one another
UNNAMED_FRAMEWORK = _spread(0.2, "sources of all sets, each with another's framework")
NEW_FRAMEWORK = Spread(sigma=0.2, source=UNNAMED_FRAMEWORK.source, unmeasured="steps of framework {}")

# -- models ----------------------------------------------------------------------------------------

#: of mixtures of experts, whose routing, kernels and overlap change with every release
EXPERTS = _spread(0.17, "nemo_megatron_bridge: rows of experts")
NEW_PRECISION = Spread(sigma=0.15, source="fp8 rows beside bf16 rows of one source", unmeasured="steps in {}")

# -- memory ----------------------------------------------------------------------------------------

#: of allocated bytes where lifetimes are captured and workspaces are not
CAPTURED_MEMORY = _spread(0.03, "h200_steps")
#: where activations are counted by formula
COUNTED_MEMORY = _spread(0.044, "bloom_prequel_a100_topologies, torchtitan_llama, simumax_b200_measured")


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """The spreads that concern one prediction."""

    group: Spread
    #: those that all groups have in common, with what each is of
    common: tuple[tuple[str, Spread], ...]
    host: Spread = HOST

    def group_sigma(self, spent: Mapping[str, float]) -> float:
        """Of what groups of operators err apart from one another, given the seconds of each group."""
        return self.group.sigma * math.hypot(*spent.values()) / (sum(spent.values()) or 1.0)

    def common_sigma(self) -> float:
        """Of what all of a step has in common."""
        return math.sqrt(sum(spread.sigma**2 for _, spread in self.common))

    def device_sigma(self, spent: Mapping[str, float]) -> float:
        """Of device time, given the seconds of each group."""
        return math.hypot(self.group_sigma(spent), self.common_sigma())

    def step_sigma(
        self, spent: Mapping[str, float], exposed: float, network: float, bubble: float, limit: float = 0.0
    ) -> float:
        """Of a step on many devices, given the seconds of each group of operators, and the shares of the step
        that are exposed communication, with the network's spread, and bubble.

        `limit` is what is not known of the power limit (`cost.operators.power_sigma`).
        """
        groups = math.hypot(self.group_sigma(spent), limit)
        return math.hypot(
            (1 - exposed) * groups, exposed * network, BUBBLE_SHARE * bubble, self.common_sigma()
        )

    def evidence(self) -> Iterator[Evidence]:
        """What the interval is as wide as it is for, widest first; what was never measured says so."""
        for what, spread in sorted(self.common, key=lambda pair: -pair[1].sigma):
            if spread.unmeasured:
                yield Evidence(
                    what=f"never measured: {spread.unmeasured.format(what)}",
                    kind="guessed",
                    source=spread.source,
                    sigma=spread.sigma,
                )
            elif spread.sigma:
                yield Evidence(
                    what=f"interval, {what}: {100 * spread.sigma:.0f} %",
                    kind="measured",
                    source=spread.source,
                    sigma=spread.sigma,
                )


def module_errors(device: Device, curves: Curves, framework: Framework) -> Errors:
    """Of a captured module on a device; frameworks that only exchange gradients differently are as PyTorch is
    on one device.
    """
    known = MODULE_FRAMEWORKS.get(framework.name)
    usual = MODULE_FRAMEWORKS["torch"] if framework.host_scale == 1.0 else NEW_FRAMEWORK
    group = STRANGE_GROUP if framework.name == "torch-1" else GROUP
    where = device.architecture if _new(curves, device) else device.name
    return Errors(group=group, common=((where, _device(device, curves)), (framework.name, known or usual)))


def transformer_errors(
    device: Device, curves: Curves, framework: Framework, *, named: bool, precision: str, experts: bool
) -> Errors:
    """Of a transformer by its sizes; `named` says whether the user named the framework, or took what is
    usual.
    """
    known = TRANSFORMER_FRAMEWORKS.get(framework.name)
    found = UNNAMED_FRAMEWORK if not named else known or NEW_FRAMEWORK
    common = [(framework.name, found)]
    measured = known.on if known is not None else frozenset()
    if not any(pair.startswith(f"{device.architecture} ") for pair in measured):
        common.append((device.architecture if _new(curves, device) else device.name, _device(device, curves)))
    elif f"{device.architecture} {precision}" not in measured and precision in ("fp8", "fp4"):
        common.append((f"{precision} on {device.architecture} with {framework.name}", NEW_PRECISION))
    if experts:
        common.append(("experts", EXPERTS))
    return Errors(group=min(LARGE_GROUP, found, key=lambda spread: spread.sigma), common=tuple(common))


def _device(device: Device, curves: Curves) -> Spread:
    """Of the operators of a device: least with curves of its own, most where another architecture's
    stand in.
    """
    if device.kind in ("cpu", "tpu"):
        return CPU_DEVICE if device.kind == "cpu" else TPU
    if device.calibration or curves.name == device.name or device.name in curves.devices:
        return OWN_CURVES
    return NEW_DEVICE if _new(curves, device) else LIKE_DEVICE


def _new(curves: Curves, device: Device) -> bool:
    """Whether another architecture's curves stand in for a device's."""
    return curves.name not in (device.name, device.architecture) and device.kind != "cpu"


def network_sigma(mesh: Mesh, size: float, axes: Iterable[str]) -> float:
    """Of collectives of so many bytes over some axes of a mesh: the widest."""
    groups = [group for group in map(mesh.group, axes) if group.size > 1]
    return max((float(sigma(size, group, mesh.cluster, mesh.library)) for group in groups), default=0.0)


def bounded(memory: Memory, spread: Spread) -> Memory:
    """Memory with the 90 % interval of what is allocated and of what is reserved."""
    peak_low, peak_high = around(memory.peak_bytes, spread.sigma)
    reserved_low, reserved_high = around(memory.reserved_bytes, spread.sigma)
    return replace(
        memory,
        peak_low_bytes=int(peak_low),
        peak_high_bytes=int(peak_high),
        reserved_low_bytes=int(reserved_low),
        reserved_high_bytes=int(reserved_high),
    )


def around(value: float, sigma: float) -> tuple[float, float]:
    """The 90 % interval of a value whose logarithm has this standard deviation."""
    return value * math.exp(-Z90 * sigma), value * math.exp(Z90 * sigma)
