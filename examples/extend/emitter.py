"""An emitter: the task file of SkyPilot, which finds the machines, and starts torchrun on each of them.

    paceline --extend examples/extend/emitter.py plan llama3-8b --cluster 2xdgx-h100 --gbs 64 \
        --fix pp=1 --emit skypilot,torchrun -o run/
    sky launch run/task.yaml

In a program, `import emitter` is all; then `paceline.plan.emit.emit(planned, ["skypilot"], folder)`.
"""

from __future__ import annotations

from paceline.plan.emit import Emitter, Facts, register
from paceline.plan.emit.launch import command

#: devices of Paceline's catalog -> accelerators as SkyPilot calls them
ACCELERATORS = {"a100-sxm-40gb": "A100", "a100-sxm-80gb": "A100-80GB", "h100-sxm": "H100", "h200": "H200"}


def files(facts: Facts) -> dict[str, str]:
    """`task.yaml`, which runs the `train.py` of `--emit torchrun`."""
    facts.refuse("skypilot", pp=(1,))  # that script has no stages
    cluster = facts.cluster
    accelerator = ACCELERATORS.get(cluster.device.name, cluster.device.name)
    return {
        "task.yaml": f"""\
{facts.head()}name: {facts.model.replace("/", "-")}
num_nodes: {cluster.nodes}
workdir: .
resources:
  accelerators: {accelerator}:{cluster.node_devices}
run: |
  export HEAD=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)
  {command(facts, "train.py")}
"""
    }


register(Emitter(name="skypilot", title="a task of SkyPilot", files=files))
