"""The device catalog, and what the parser says about bad files."""

import tomllib
from importlib.resources import files

import pytest

from paceline.catalog import devices
from paceline.errors import SpecError, UnknownName
from paceline.spec import device as spec

NAMES = devices.names()
ALL = [devices.get(name) for name in NAMES]
REQUIRED = """
k20 k40 k80 p4 p40 p100-pcie p100-sxm v100-pcie-16gb v100-pcie-32gb v100-sxm-16gb v100-sxm-32gb t4 rtx3090
a100-pcie-40gb a100-pcie-80gb a100-sxm-40gb a100-sxm-80gb l4 l40s h100-pcie h100-sxm h100-96gb-hbm2e h200
gh200 gh200-144gb b200 gb200 mi100 mi210 mi250 mi250x mi300x tpu-v2 tpu-v3 tpu-v4 tpu-v5e tpu-v5p tpu-v7x
xeon-phi-knl haswell-cori
"""
ARCHITECTURES = {
    "nvidia": {"kepler", "pascal", "volta", "turing", "ampere", "ada", "hopper", "blackwell"},
    "amd": {"cdna1", "cdna2", "cdna3", "cdna4"},
    "google": {"tpu"},
    "intel": {"knl", "haswell"},
}
#: fp32 FLOP per clock of one SM, CU or core (AMD: of the matrix units)
FP32_PER_CLOCK = {
    "kepler": 384,
    "pascal": 256,
    "volta": 128,
    "turing": 128,
    "ampere": 256,
    "ada": 256,
    "hopper": 256,
    "blackwell": 256,
    "cdna1": 256,
    "cdna2": 256,
    "cdna3": 256,
    "cdna4": 256,
    "knl": 64,
    "haswell": 32,
}
GOOD = """\
name = "chip"
[peak]
bf16 = "2 PFLOP/s"
[memory]
size = "192 GB"
bandwidth = "8 TB/s"
"""


def parse(text):
    return spec.parse(text, "chip.toml", devices.get)


def text_of(name):
    return (files(devices) / f"{name}.toml").read_text(encoding="utf-8")


def test_required_devices_are_there():
    assert set(REQUIRED.split()) <= set(NAMES)


@pytest.mark.parametrize("device", ALL, ids=NAMES)
def test_facts_are_sourced(device):
    raw = tomllib.loads(text_of(device.name))
    used = set()
    for path, fact in device.facts.items():
        section, leaf = path.split(".")
        entry = raw[section][leaf]
        assert isinstance(entry, dict), f"{path} has no source"
        assert entry["source"] in raw["sources"], path
        assert fact.kind in spec.KINDS and fact.source.strip(), path
        used.add(entry["source"])
    assert used == set(raw["sources"]), "a source that no fact uses"


@pytest.mark.parametrize(("name", "device"), list(zip(NAMES, ALL, strict=True)), ids=NAMES)
def test_sane(name, device):
    peak = device.peak_flops
    assert device.name == name and device.title and device.year and device.aliases
    assert device.kind == {"google": "tpu", "intel": "cpu"}.get(device.vendor, "gpu")
    assert device.architecture in ARCHITECTURES[device.vendor]
    assert 10e9 <= device.memory_bandwidth_Bps <= 30e12
    assert 4e9 <= device.memory_bytes <= 1e12
    for narrow, wide in (
        ("fp16", "fp32"),
        ("bf16", "fp32"),
        ("tf32", "fp32"),
        ("fp8", "bf16"),
        ("fp4", "fp8"),
        ("fp32", "fp64"),
    ):
        if narrow in peak and wide in peak:
            assert peak[narrow] >= peak[wide], (narrow, wide)
    # a sparse figure would break the doubling
    if device.architecture in {"hopper", "blackwell", "cdna3", "cdna4"}:
        assert peak["fp8"] == pytest.approx(2 * peak["bf16"], rel=0.02)
        if "tf32" in peak:
            assert peak["bf16"] == pytest.approx(2 * peak["tf32"], rel=0.03)


@pytest.mark.parametrize(
    "device", [d for d in ALL if d.clock_hz and "fp32" in d.peak_flops], ids=lambda d: d.name
)
def test_fp32_follows_from_units_and_clock(device):
    rate = FP32_PER_CLOCK[device.architecture]
    if device.name.startswith(("a100", "p100")):  # 64 lanes in each SM, not 128
        rate //= 2
    assert device.peak_flops["fp32"] == pytest.approx(device.sm_count * rate * device.clock_hz, rel=0.03)


def test_aliases_are_unique():
    owner = {}
    for device in ALL:
        for alias in {devices.fold(alias) for alias in (device.name, *device.aliases)}:
            assert owner.setdefault(alias, device.name) == device.name, alias


@pytest.mark.parametrize(
    ("printed", "name"),
    [
        ("a100", "a100-sxm-80gb"),
        ("h100", "h100-sxm"),
        ("v100", "v100-sxm-16gb"),
        ("p100", "p100-sxm"),
        ("Tesla P100-PCIE-16GB", "p100-pcie"),
        ("Tesla_P100-PCIE-16GB", "p100-pcie"),
        ("P100-SXM2", "p100-sxm"),
        ("Tesla P4", "p4"),
        ("Tesla T4", "t4"),
        ("Tesla_V100-PCIE-32GB", "v100-pcie-32gb"),
        ("V100-SXM2-16GB", "v100-sxm-16gb"),
        ("RTX 3090", "rtx3090"),
        ("NVIDIA GeForce RTX 3090", "rtx3090"),
        ("NVIDIA A100-PCIE-40GB", "a100-pcie-40gb"),
        ("NVIDIA_A100_80GB_PCIe", "a100-pcie-80gb"),
        ("NVIDIA_A100-SXM4-40GB", "a100-sxm-40gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm-80gb"),
        ("a100_sxm4_80gb", "a100-sxm-80gb"),
        ("NVIDIA_L4", "l4"),
        ("NVIDIA_H100_80GB_HBM3", "h100-sxm"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("AMD_Instinct_MI100", "mi100"),
        ("AMD_Instinct_MI210", "mi210"),
        ("AMD_Instinct_MI250", "mi250"),
        ("TPU v5 lite", "tpu-v5e"),
    ],
)
def test_printed_names_resolve(printed, name):
    assert devices.get(printed).name == name


def test_halves_and_fallbacks():
    assert devices.get("k80").memory_bytes == 12 * 2**30 and devices.get("mi250x").memory_bytes == 64 * 2**30
    assert devices.get("p4").peak("fp16") == devices.get("p4").peak("fp32")
    assert devices.get("tpu-v3").peak("fp32") == 123e12
    assert devices.get("rtx3090").peak("fp16") == 71e12


def test_unknown_device_suggests():
    with pytest.raises(UnknownName, match="did you mean.*'h100-sxm'"):
        devices.get("h100-smx")


def test_like_inherits():
    device = parse('name = "mine"\nlike = "h100"\n[memory]\nsize = "192 GB"\n')
    base = devices.get("h100-sxm")
    assert (device.name, device.title, device.memory_bytes) == ("mine", "mine", 192e9)
    assert device.peak_flops == base.peak_flops and device.architecture == "hopper" and device.aliases == ()
    assert (
        device.facts["memory.size"].kind == "declared"
        and device.facts["peak.bf16"] == base.facts["peak.bf16"]
    )


def test_like_that_leads_nowhere(tmp_path):
    with pytest.raises(UnknownName, match="h100-sxm"):
        parse('like = "h100-sx"\n')
    loop = tmp_path / "loop.toml"
    loop.write_text(f'name = "loop"\nlike = "{loop.as_posix()}"\n')
    with pytest.raises(SpecError, match="line 2, like: .*leads back"):
        devices.get(str(loop))


def test_user_file(tmp_path):
    path = tmp_path / "chip.toml"
    path.write_text(GOOD)
    assert devices.get(str(path)).peak("fp16") == 2e15
    path.write_bytes(b'name = "\xff"')
    with pytest.raises(SpecError, match="not UTF-8"):
        devices.get(str(path))
    with pytest.raises(SpecError, match="absent.toml.*No such file"):
        devices.get(str(tmp_path / "absent.toml"))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('size = "192 GB"', 'size = "192 GB', r"not valid TOML: .*line 5"),
        ('name = "chip"', 'name = "chip"\nvendr = "me"', r"line 2, vendr: .*did you mean 'vendor'"),
        ("[memory]", "[memroy]", r"line 4, memroy: .*did you mean 'memory'"),
        ("bandwidth =", "bandwith =", r"line 6, memory.bandwith: .*allowed in \[memory\]: size, bandwidth"),
        ("bf16 =", "bf61 =", r"line 3, peak.bf61: unknown dtype.*bf16"),
        ('"192 GB"', '"-192 GB"', r"line 5, memory.size: must be above zero, got '-192 GB'"),
        ('"192 GB"', '"192 GHz"', r"line 5, memory.size: unknown unit 'GHz'"),
        ('"192 GB"', '"lots"', r"line 5, memory.size: cannot read 'lots'"),
        (
            '"192 GB"',
            '{ value = "1 GB", kind = "rumour" }',
            r"line 5, memory.size: kind 'rumour' is not one of measured,",
        ),
        ('"192 GB"', '{ size = "1 GB" }', r"line 5, memory.size: expected \{ value"),
        ('"192 GB"', '{ value = "1 GB", source = [] }', r"line 5, memory.size: source: expected a string"),
        ('bandwidth = "8 TB/s"\n', "", r"line 4, memory: missing memory.bandwidth.*like"),
        ('[memory]\nsize = "192 GB"\nbandwidth = "8 TB/s"\n', "", r"memory: missing memory.size"),
        ('[memory]\nsize = "192 GB"', '[memory] # stacked\nsize = "-1 GB"', r"line 5, memory.size"),
        ('[peak]\nbf16 = "2 PFLOP/s"\n', "", r"peak: missing: give at least one dtype"),
        ('name = "chip"', "name = 5", r"line 1, name: expected a string, got 5"),
        ('name = "chip"', 'aliases = "chip"', r"line 1, aliases: expected a list of strings"),
        ('name = "chip"', 'sources = "memory"', r"line 1, sources: expected a table"),
        ('name = "chip"', 'price = { hour = "2 GB" }', r"line 1, price.hour: unknown unit 'GB'"),
        (
            "[peak]",
            '[calibration]\nlaunch_s = "fast"\n[peak]',
            r"line 3, calibration.launch_s: expected a number",
        ),
    ],
)
def test_bad_input_names_line_and_key(old, new, message):
    assert old in GOOD
    with pytest.raises(SpecError, match="chip.toml: .*" + message):
        parse(GOOD.replace(old, new))
