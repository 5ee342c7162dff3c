"""The diagnosis of a trace, or of the traces of several ranks of one job."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from paceline.diagnose import host, kernels, network, roofline
from paceline.diagnose.activity import Activity
from paceline.diagnose.findings import Diagnosis, Finding
from paceline.readers import kineto
from paceline.readers.kineto import KinetoTrace

#: share of the step below which a finding is not worth a line
LEAST = 1e-3


def diagnose(*paths: Path | str) -> Diagnosis:
    """What the step in a trace spends its time on, and what to change; of several ranks, what one of them
    does
    and who waits for whom.
    """
    return of_traces(kineto.read_job(paths))


def of_traces(traces: Sequence[KinetoTrace]) -> Diagnosis:
    """The same of traces that were read."""
    activities = [Activity.of(trace) for trace in traces]
    met = network.meetings(activities)
    times = network.rank_times(activities, met)
    first, trace = activities[0], traces[0]
    device = roofline.device_of(trace.device)
    found = [*_of_rank(first, times[0].waits_s), *network.stragglers(activities, met)]
    kept = (finding for finding in found if finding.saves_s >= LEAST * first.step_s)
    return Diagnosis(
        paths=tuple(trace.path for trace in traces),
        device=trace.device,
        peaks_of=device.name if device is not None else "",
        rank=trace.rank,
        ranks=times,
        world=max(trace.ranks for trace in traces),
        step_s=first.step_s,
        steps=first.steps,
        found_by=first.found_by,
        busy_s=first.busy_s,
        kernel_s=sum(share.busy_s for share in first.shares),
        kernels=len(first.work),
        shares=first.shares,
        idle=first.idle,
        peak_allocated_bytes=int(trace.allocated.max(initial=0)),
        peak_reserved_bytes=int(trace.reserved.max(initial=0)),
        findings=tuple(sorted(kept, key=lambda finding: -finding.saves_s)),
        notes=tuple(_notes(first, traces)),
        left_out=dict(sum((Counter(trace.left_out) for trace in traces), Counter())),
    )


def _of_rank(activity: Activity, waits_s: float) -> Iterator[Finding]:
    yield from host.findings(activity)
    yield from network.exposed(activity, waits_s)
    yield from kernels.findings(activity)
    yield from roofline.findings(activity)


def _notes(activity: Activity, traces: Sequence[KinetoTrace]) -> Iterator[str]:
    """What the trace does not show, or shows otherwise than a run without a profiler."""
    trace = activity.trace
    if trace.recorded and activity.on_device:
        what = ", ".join(trace.recorded)
        yield f"the profiler recorded {what}: the host was slower than without it, kernels were not"
    if not activity.on_device:
        yield "no device in the trace: work is the own time of operators on the host"
    if not trace.inputs:
        yield (
            "no shapes were recorded (record_shapes=True): no roofline, and casts cannot be told from copies"
        )
    if trace.device and roofline.device_of(trace.device) is None:
        yield f"{trace.device} is not in the catalog: no roofline"
    if len(traces) < trace.ranks:
        yield (
            f"{len(traces)} of {trace.ranks} ranks were read: give the other traces too, to see who waits"
            " for whom"
        )
