"""What encoding and decoding 100 MB of gradients takes with each compressor, beside a copy of the same
tensor.

    python benchmarks/encoders.py                          # this machine's processor, or its GPU
    python benchmarks/encoders.py --output encoders.jsonl  # a line per compressor besides the table
    python benchmarks/encoders.py --only terngrad,dgc --elements 5000000 --threads 1

Encoding includes what ranks agree on first; decoding is of what two ranks sent. Fused results are first
compared with the plain reference on a smaller gradient. Times are the least of five medians; on a GPU, of the
device, with launches hidden (but not where a method waits for a count).
"""

from __future__ import annotations

import argparse
import json
import math
from typing import Any

import torch
from torch import Tensor

from paceline.bench.clock import Clock
from paceline.spec.compression import SCHEMES
from paceline.train.compress import Compressor, Round, kernels, lockstep, make
from paceline.train.compress.local import carry_out

TURNS = 5


def agrees(name: str, device: torch.device) -> str:
    """How fused steps compare with plain ones: "bits", "close" or "NO"; float sums are regrouped, so that
    scales may differ in the last bit.
    """
    teams = [[make(name, rank=r, world=2, fused=fused) for r in range(2)] for fused in (True, False)]
    draw = torch.Generator(device).manual_seed(1)
    same, close = True, True
    for _ in range(2):
        grads = [torch.randn(1003, 997, device=device, generator=draw) for _ in range(2)]
        one, other = (lockstep(team, "w", grads)[0] for team in teams)
        same &= torch.equal(one, other)
        # an element on the edge between two codes may fall to either side
        close &= float((one - other).abs().gt(1e-5 * (1 + other.abs())).float().mean()) < 1e-4
        for compressor in (*teams[0], *teams[1]):
            compressor.end_step()
    if same:
        return "bits"
    return "close" if close else "NO"


def encode(compressor: Compressor, grad: Tensor) -> list[Round]:
    """All rounds of one rank, its own contribution standing in for the others'."""
    if compressor.name == "powersgd":
        first = Round("sum", compressor.encode("w", grad))
        second = compressor.continued("w", [first.payload], grad)  # type: ignore[attr-defined]
        return [first, Round("sum", second)]
    shared = compressor.prepare("w", grad)
    return [
        Round(
            "gather" if compressor.collective == "all_gather" else "sum", compressor.encode("w", grad, shared)
        )
    ]


def measure(name: str, grad: Tensor, clock: Clock, budget: float) -> dict[str, Any]:
    """Seconds of each part and of a copy, in turns: the least of several medians, since others may use the
    machine meanwhile.
    """
    compressor = make(name, world=2)
    out, space = torch.empty_like(grad), torch.empty_like(grad)
    last = encode(compressor, grad)[-1]
    arrived = carry_out([last, last])
    pending = dict(compressor._pending)

    def decode() -> None:
        compressor._pending.update(pending)
        compressor.decode("w", arrived, out)

    runs = (lambda: encode(compressor, grad), decode, lambda: space.copy_(grad))
    turns = [[clock.seconds(run, budget / TURNS) for run in runs] for _ in range(TURNS)]
    encoding, decoding, copy = (min(column) for column in zip(*turns, strict=True))
    return {
        "scheme": name,
        "elements": grad.numel(),
        "bytes": 4 * grad.numel(),
        "wire_bytes": compressor.wire_bytes(grad.shape),
        "encode_s": encoding,
        "decode_s": decoding,
        "copy_s": copy,
        "encode_per_copy": encoding / copy,
        "decode_per_copy": decoding / copy,
        "backend": kernels.backend(grad.view(-1)),
        "ranks": 2,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--elements", type=int, default=25_000_000, help="of the gradient, as a nearly square matrix"
    )
    parser.add_argument("--only", default=",".join(SCHEMES), help="compressors, with commas between them")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=0, help="of the processor; 0: as torch has it")
    parser.add_argument("--budget", type=float, default=1.0, help="seconds for each time, about")
    parser.add_argument("--output", default="", help="file for lines of JSON")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    place = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"host, {torch.get_num_threads()} threads"
    )
    side = math.isqrt(options.elements)
    grad = torch.randn(side, options.elements // side, device=device)
    clock, lines = Clock(device), []
    print(f"{4 * grad.numel() / 1e6:.0f} MB of gradients on {place}, torch {torch.__version__}")
    print(
        f"{'':10}{'wire MB':>10}{'encode ms':>11}{'decode ms':>11}{'copy ms':>9}"
        f"{'encode/copy':>13}{'decode/copy':>13}"
        "  as reference"
    )
    for name in options.only.split(","):
        agreement = agrees(name, device)
        row = measure(name, grad, clock, options.budget)
        lines.append(json.dumps({**row, "agrees": agreement, "device": place, "torch": torch.__version__}))
        print(
            f"{name:10}{row['wire_bytes'] / 1e6:10.3f}{row['encode_s'] * 1e3:11.3f}"
            f"{row['decode_s'] * 1e3:11.3f}{row['copy_s'] * 1e3:9.3f}"
            f"{row['encode_per_copy']:13.2f}{row['decode_per_copy']:13.2f}"
            f"  {agreement}",
            flush=True,
        )
    if options.output:
        with open(options.output, "w", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
