"""`python enter.py NAMESPACE GROUP COMMAND...`: runs a command inside a host; GROUP is `-` where CPUs are not
limited.

Run by path, not by name, so that starting a rank does not import the package twice.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path


def main(arguments: list[str]) -> None:
    """Joins the group, enters the namespace, becomes the command."""
    namespace, group, *command = arguments
    # only the file beside this one: the package's own __init__ would import what a host does not need
    spec = importlib.util.spec_from_file_location("system", Path(__file__).with_name("system.py"))
    assert spec is not None and spec.loader is not None
    system = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(system)
    system.die_with_parent()
    if group != "-":
        (Path(group) / "cgroup.procs").write_text(str(os.getpid()))
    system.enter(namespace)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
