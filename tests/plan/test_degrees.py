"""Every degree that `spec/plan.py` declares is searched, placed, counted, and trained or refused by name."""

from dataclasses import fields, replace

import pytest

from paceline.catalog import clusters
from paceline.errors import PlanError
from paceline.plan import general
from paceline.plan.space import Limits, Space
from paceline.predict.memory import communicators
from paceline.sim.mesh import Mesh
from paceline.spec import trained
from paceline.spec.plan import SHARED, SPREAD, Degrees, Plan, meshes, problems

DEGREES = [field.name for field in fields(Degrees)]


def test_meshes_use_all_devices_and_differ():
    found = meshes(12)
    assert len(found) == len({*found}) and {*DEGREES} == {"dp", *SPREAD, *SHARED}
    assert all(Plan(**vars(mesh)).ranks == 12 for mesh in found)


def test_every_mesh_that_can_run_is_searched(mixed):
    where = clusters.get("1xdgx-a100")
    searched = {
        block.mesh for block in Space(mixed, (where,), 16, 8192, Limits.of(["framework=torch"])).blocks
    }
    plans = {mesh: Plan(**vars(mesh), gbs=16, mbs=1, seq=8192) for mesh in meshes(where.device_count)}
    runs = {mesh for mesh, plan in plans.items() if not any(problems(plan, where.device_count, mixed))}
    assert {mesh for mesh in runs if mesh.pp <= mixed.layers} == searched


@pytest.mark.parametrize("name", DEGREES)
def test_a_degree_is_known_everywhere(name, tiny, mixed):
    where = clusters.get("2xdgx-a100")
    spaces = [Space(model, (where,), 32, 8192, Limits.of(["framework=torch"])) for model in (tiny, mixed)]
    assert len({getattr(block.mesh, name) for space in spaces for block in space.blocks}) > 1
    plan = replace(Plan(gbs=32, mbs=1, seq=8192, dp=1), **{name: 2})
    assert Mesh(plan, where).group(name).size == 2 and communicators(plan) > communicators(
        replace(plan, **{name: 1})
    )
    if trained.TRAINED[name] == "refused":
        with pytest.raises(PlanError, match=f"{name}=2 is predicted but not run"):
            trained.refuse(plan)
    assert (name in general.REFUSED) == (name not in ("dp", "pp"))
