"""`paceline devices`, `clusters`, `frameworks`, `models`: what the catalog holds."""

from __future__ import annotations

from paceline.cli.options import Json, print_json, show


def devices_(*names: str, json_: Json = False) -> None:
    """List the catalog's devices, or every fact of those named, with sources."""
    from paceline.catalog import devices
    from paceline.report import catalog

    chosen = [devices.get(name) for name in (names or devices.names())]
    if json_:
        print_json([catalog.device_dict(d) for d in chosen])
    else:
        for view in [catalog.device_facts(d) for d in chosen] if names else [catalog.device_table(chosen)]:
            show(view)


def clusters_(*names: str, json_: Json = False) -> None:
    """List the catalog's clusters, or every fact of those named (such as 4xdgx-h100, or a .toml file), with
    sources.
    """
    from paceline.catalog import clusters
    from paceline.report import catalog

    chosen = [clusters.get(name) for name in (names or clusters.names())]
    if json_:
        print_json([catalog.cluster_dict(c) for c in chosen])
    else:
        for view in [catalog.cluster_facts(c) for c in chosen] if names else [catalog.cluster_table(chosen)]:
            show(view)


def frameworks_(*names: str, json_: Json = False) -> None:
    """List the catalog's frameworks, or every fact of those named (or of a .toml file): kernels, overlap,
    host, memory.
    """
    from paceline.catalog import frameworks
    from paceline.report import catalog

    chosen = [frameworks.get(name) for name in (names or frameworks.names())]
    if json_:
        print_json([catalog.framework_dict(found) for found in chosen])
    else:
        for view in (
            [catalog.framework_facts(f) for f in chosen] if names else [catalog.framework_table(chosen)]
        ):
            show(view)


def models_(*, json_: Json = False) -> None:
    """List the catalog's models, with parameter counts and sources."""
    from paceline.report import catalog

    if json_:
        print_json(catalog.model_dicts())
    else:
        show(catalog.model_table())
