"""Facts about generations of chips, and what is said of one that nobody has described."""

from dataclasses import replace

import pytest

import paceline as pl
from paceline.catalog import architectures, clusters, devices
from paceline.cost.curves import curves_for, named
from paceline.cost.power import rule
from paceline.errors import SpecError
from paceline.spec import architecture as spec
from paceline.spec.vocabulary import DeviceKind

KNOWN = devices.get("h100-sxm")
STRANGE = replace(KNOWN, name="x100", architecture="rubin")


def test_every_number_says_how_it_is_known():
    for one in architectures.known().values():
        assert one.title and all(fact.source for fact in one.facts.values()), one.name
        assert not one.similar or (one.similar_source and architectures.get(one.similar).product_J)
        assert not one.curves or named(one.curves) is not None


def test_every_gpu_of_the_catalog_has_an_architecture_with_a_file():
    used = {one.architecture for name in devices.names() if (one := devices.get(name)).kind is DeviceKind.GPU}
    assert used <= set(architectures.known())


@pytest.mark.parametrize(
    ("capability", "name"),
    [((9, 0), "hopper"), ((8, 0), "ampere"), ((8, 9), "ada"), ((12, 0), "blackwell"), ((99, 0), "generic")],
)
def test_capabilities(capability, name):
    assert architectures.of_capability(*capability) == name


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('titel = "x"', "did you mean 'title'"),
        ("[energy]\nvectr = '9 pJ'", "line 2, energy.vectr: unknown key 'vectr'; allowed: energy.vector"),
        ("[network]\nnvls = -1", "above zero"),
    ],
)
def test_mistakes_are_one_line(text, says):
    with pytest.raises(SpecError, match=says) as error:
        spec.parse(text, "mine.toml")
    assert "\n" not in str(error.value)


def test_an_unknown_architecture_says_what_stands_in():
    instead = curves_for(STRANGE)
    assert instead.name == "hopper" and instead.matrix == curves_for(KNOWN).matrix
    assert instead.source.startswith("hopper stands in for rubin, which has no curves of its own; ")
    assert "stands in" not in curves_for(KNOWN).source
    assert curves_for(devices.get("l4")).source.startswith("ampere stands in for ada")
    power = rule(STRANGE)
    assert power.flop_J is None and power.kind == "guessed" and "rubin" in power.source


def test_an_unknown_architecture_has_a_wider_interval():
    workload = pl.capture("resnet18", batch=64)
    node = clusters.get("1xdgx-h100")
    plan = "fsdp framework=torch-compile"
    pairs = [
        [pl.predict(workload, device=device) for device in (KNOWN, STRANGE)],
        [
            pl.predict("gpt3-1.3b", plan=plan, cluster=replace(node, device=device))
            for device in (KNOWN, STRANGE)
        ],
    ]
    for known, strange in pairs:
        assert strange.step_s_high / strange.step_s > 1.05 * known.step_s_high / known.step_s
        said = [f"{one.what}: {one.source}" for one in strange.provenance]
        assert any("hopper stands in for rubin" in text for text in said)
        assert any("never measured: operators of architecture rubin" in text for text in said)
