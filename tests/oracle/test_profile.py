"""Platform files: what the built-in one says, how names are found, and one clear error for everything that is wrong."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from k3port.errors import K3Error, UsageError
from k3port.oracle import profile as module
from k3port.oracle.profile import builtin_file, check_kernels, get_profile, load_entries, load_profiles
from k3port.oracle.schema import FEATURES, SCHEMA, unsourced
from k3port.plugins import make_registry

PLATFORMS = (
    "b200 b300 cpu dgx-spark gb200-nvl72 gb300-nvl72 h100 h200 mi300x mi325x mi350x mi355x mi450 rtx-pro-6000"
).split()

Write = Callable[..., Path]


def faults(file: Path, *more: Path) -> list[str]:
    """The faults of user files, without the folder in front."""
    with pytest.raises(UsageError) as caught:
        load_profiles((file, *more))
    return [reason.replace(f"{file.parent}/", "") for reason in caught.value.reasons]


# --- the built-in file


def test_the_platforms() -> None:
    assert sorted(load_profiles()) == PLATFORMS


@pytest.mark.parametrize("name", PLATFORMS)
def test_a_platform_is_complete(name: str) -> None:
    p = get_profile(name)
    target = p.target()
    assert (target.platform, target.device.vendor, target.device.arch) == (name, p.vendor, p.arch)
    assert target.device.source == "profile"
    assert target.packages == p.packages
    assert target.features <= set(FEATURES)
    if name == "cpu":
        assert (p.activations, target.device.memory_bytes) == ("float32", 0)
        return
    assert p.activations == "bfloat16"
    assert min(p.memory_bytes, p.memory_bytes_per_s, p.lds_bytes, p.compute_units, p.interconnect_bytes_per_s) > 0
    assert 0.5 < p.usable_share < 1
    assert p.domain_gpus >= 1 and p.gpus_per_node >= 1
    assert p.packages["triton"] and set(p.runtime) == {"cuda" if p.vendor == "nvidia" else "rocm"}
    assert p.native_fp4 == ("fp4" in p.peak_tflops)


def test_a_few_values_that_must_not_drift() -> None:
    h200, mi300x, mi355x = map(get_profile, ("h200", "mi300x", "mi355x"))
    assert (h200.arch, h200.memory_bytes, h200.lds_bytes, h200.fp8) == ("sm_90", 141 * 10**9, 227 * 1024, "e4m3fn")
    assert (mi300x.arch, mi300x.lds_bytes, mi300x.fp8, mi300x.native_fp4) == ("gfx942", 65536, "e4m3fnuz", False)
    assert (mi355x.arch, mi355x.lds_bytes, mi355x.fp8, mi355x.native_fp4) == ("gfx950", 163840, "e4m3fn", True)
    assert "mnnvl" in get_profile("gb300").features and "mnnvl" not in get_profile("b300").features
    assert get_profile("gb200").domain_gpus == 72 and get_profile("gb200").gpus_per_node == 4
    assert (get_profile("h100").memory_bytes, get_profile("h100").usable_share) == (80 * 10**9, 0.9)


def test_which_nodes_hold_the_weights() -> None:
    """About 1.5 TB of weights on one node of 8, as people have reported."""
    nodes = [p for p in load_profiles().values() if p.gpus_per_node == 8]
    holds = {p.name for p in nodes if 8 * p.memory_bytes * p.usable_share > 1.5e12}
    assert holds == {"b300", "mi325x", "mi350x", "mi355x"}


def test_every_number_names_its_source() -> None:
    assert [line for entry in load_entries(builtin_file()) for line in unsourced(entry)] == []


def test_a_number_without_a_source_is_found(write: Write) -> None:
    text = (
        "platforms:\n  x:\n    extends: h200\n    lds_bytes: 1\n    memory: {bytes: 2, usable_share: 0.5}\n"
        '    packages: {triton: "3.7.0"}\n    native_fp4: true\n'
        '    sources: {memory.bytes: "measured: here"}\n'
    )
    (entry,) = load_entries(write(text))
    assert [line.rpartition(" ")[2] for line in unsourced(entry)] == [
        "x.lds_bytes",
        "x.memory.usable_share",
        "x.packages.triton",
    ]


def test_kernel_names_exist() -> None:
    assert check_kernels(load_profiles().values(), make_registry(entry_points=False).kernels) == []


def test_loading_is_quick_and_imports_no_torch() -> None:
    times = []
    for _ in range(3):
        module._load.cache_clear()
        begin = time.perf_counter()
        load_profiles()
        times.append(time.perf_counter() - begin)
    assert min(times) < 0.05
    code = "import sys; from k3port.oracle.profile import load_profiles; load_profiles(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=builtin_file().parent)
    assert done.stdout == "False\n", done.stderr


# --- names


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("mi355", "mi355x"), ("MI355X", "mi355x"), ("mi350", "mi350x"), ("mi325", "mi325x"), ("mi300", "mi300x"),
        ("gb200", "gb200-nvl72"), ("GB300", "gb300-nvl72"), ("GB200 NVL72", "gb200-nvl72"), ("spark", "dgx-spark"),
        ("mi455x", "mi450"), ("rtx_pro_6000", "rtx-pro-6000"), ("gfx1250", "mi450"), ("sm_121", "dgx-spark"),
        ("sm120", "rtx-pro-6000"), ("CPU", "cpu"),
    ],
)  # fmt: skip
def test_b21_aliases_of_platforms(text: str, name: str) -> None:
    assert get_profile(text).name == name


@pytest.mark.parametrize(("text", "arch"), [("mi355", "gfx950"), ("mi350", "gfx950"), ("mi325", "gfx942")])
def test_b21_aliases_lead_to_the_right_architecture(text: str, arch: str) -> None:
    assert get_profile(text).arch == arch


@pytest.mark.parametrize(
    ("arch", "names"),
    [
        ("gfx950", "mi350x and mi355x"), ("gfx942", "mi300x and mi325x"), ("sm_100", "b200 and gb200-nvl72"),
        ("sm_90", "h100 and h200"),
    ],
)  # fmt: skip
def test_b21_an_architecture_of_several_platforms_is_not_guessed(arch: str, names: str) -> None:
    with pytest.raises(UsageError) as caught:
        get_profile(arch)
    assert names in caught.value.message and names.partition(" ")[0] in caught.value.hint


@pytest.mark.parametrize(("text", "near"), [("mi35x", "mi355"), ("h20", "h200"), ("gb20", "gb200")])
def test_b21_an_unknown_platform_names_the_nearest_and_all(text: str, near: str) -> None:
    with pytest.raises(UsageError) as caught:
        get_profile(text)
    assert repr(text) in caught.value.message and near in caught.value.hint
    assert all(name in caught.value.hint for name in PLATFORMS)


def test_nothing_is_near_to_nonsense() -> None:
    with pytest.raises(UsageError) as caught:
        get_profile("zzzz")
    assert "did you mean" not in caught.value.hint


# --- user files


def test_a_user_file_extends_a_platform(write: Write) -> None:
    file = write(
        "platforms:\n  lab-mi355:\n    extends: mi355x\n    aliases: [lab]\n"
        '    packages: {Amd_AITER: null, triton: "3.9.0"}\n    memory: {usable_share: 0.8}\n'
        "    features: [xgmi]\n    disable: {rocm.aiter_mla_asm: wrong here}\n"
    )
    own, base = get_profile("LAB", (file,)), get_profile("mi355x")
    assert (own.arch, own.memory_bytes, own.product) == (base.arch, base.memory_bytes, base.product)
    assert own.usable_share == 0.8 and own.features == {"xgmi"}
    assert own.packages["triton"] == "3.9.0" and own.packages["fla-core"] == base.packages["fla-core"]
    assert own.target().disabled == {"rocm.aiter_mla_asm": "wrong here"}
    assert own.sources["memory.bytes"] == base.sources["memory.bytes"]
    assert own.sources["memory.usable_share"] == f"set in {file}:7"
    assert own.aliases == ("lab",) and get_profile("mi355", (file,)) == base


def test_null_removes_an_inherited_value(write: Write) -> None:
    file = write("platforms:\n  x:\n    extends: mi355x\n    packages: {amd-aiter: null}\n    validated: null\n")
    own = get_profile("x", (file,))
    assert "amd-aiter" not in own.packages and own.packages["triton"]
    assert own.validated == {} and not [path for path in own.sources if path.startswith("validated")]


def test_a_user_platform_of_its_own(write: Write) -> None:
    file = write("platforms:\n  new: {vendor: amd, arch: gfx90a, activations: bfloat16}\n")
    assert get_profile("gfx90a", (file,)).name == "new"
    assert sorted(load_profiles((file,))) == sorted([*PLATFORMS, "new"])


def test_a_family_is_no_platform(write: Write) -> None:
    file = write("families:\n  old: {extends: gfx942}\nplatforms:\n  new: {extends: old}\n")
    assert get_profile("new", (file,)).arch == "gfx942"
    with pytest.raises(UsageError):
        get_profile("old", (file,))


def test_own_files_may_build_on_each_other(write: Write) -> None:
    first = write("platforms:\n  one: {extends: h200, gpus_per_node: 4}\n", "one.yaml")
    second = write("platforms:\n  two: {extends: one}\n", "two.yaml")
    assert get_profile("two", (second, first)).gpus_per_node == 4


CASES = {
    "an unknown key": (
        "platforms:\n  x:\n    extends: h200\n    lds_byte: 1\n",
        ["own.yaml:5: x: unknown key lds_byte; did you mean lds_bytes?"],
    ),
    "an unknown inner key": (
        "platforms:\n  x:\n    extends: h200\n    memory:\n      byte: 1\n",
        ["own.yaml:6: x.memory: unknown key byte; did you mean bytes?"],
    ),
    "an unknown section": (
        "platform:\n  x: {extends: h200}\n",
        ["own.yaml:2: unknown key platform; did you mean platforms?"],
    ),
    "an unknown op": (
        "platforms:\n  x:\n    extends: h200\n    kernels: {mla_atend: [a.b]}\n",
        ["own.yaml:5: x.kernels: unknown key mla_atend; did you mean mla_attend?"],
    ),
    "an unknown feature": (
        "platforms:\n  x:\n    extends: h200\n    features: [nvlink, multicst]\n",
        ["did you mean multicast?"],
    ),
    "an unknown source": (
        'platforms:\n  x:\n    extends: h200\n    lds_bytes: 1\n    sources: {lds_byte: "measured: here"}\n',
        ["own.yaml:6: x.sources.lds_byte: no such key; did you mean lds_bytes?"],
    ),
    "a source without a kind": (
        "platforms:\n  x:\n    extends: h200\n    lds_bytes: 1\n    sources: {lds_bytes: the web}\n",
        ["own.yaml:6: x.sources.lds_bytes = 'the web': expected a kind and a source"],
    ),
    "a duplicate key": (
        "platforms:\n  x:\n    extends: h200\n    lds_bytes: 1\n    lds_bytes: 2\n",
        ["own.yaml:6: x.lds_bytes is a duplicate, first in line 5"],
    ),
    "a duplicate platform": (
        "platforms:\n  x: {extends: h200}\n  y: {extends: h200}\n  x: {extends: h100}\n",
        ["own.yaml:5: platforms.x is a duplicate, first in line 3"],
    ),
    "a wrong type": (
        "platforms:\n  x:\n    extends: h200\n    lds_bytes: many\n",
        ["own.yaml:5: x.lds_bytes = 'many': expected a positive whole number"],
    ),
    "true is no number": (
        "platforms:\n  x:\n    extends: h200\n    compute_units: yes\n",
        ["own.yaml:5: x.compute_units = True: expected a positive whole number"],
    ),
    "a share above one": (
        "platforms:\n  x:\n    extends: h200\n    memory: {usable_share: 90}\n",
        ["own.yaml:5: x.memory.usable_share = 90: expected a number above 0 and at most 1"],
    ),
    "a version that YAML reads as a number": (
        "platforms:\n  x:\n    extends: h200\n    runtime: {cuda: 12.8}\n",
        ['own.yaml:5: x.runtime.cuda = 12.8: expected a version in quotes, such as "3.7.0"'],
    ),
    "a range that is none": (
        "platforms:\n  x:\n    extends: h200\n    validated: {triton: newest}\n",
        ["own.yaml:5: x.validated.triton = 'newest': expected a range of versions"],
    ),
    "a value instead of a mapping": (
        "platforms:\n  x:\n    extends: h200\n    memory: 5\n",
        ["own.yaml:5: x.memory = 5: expected keys and values"],
    ),
    "a mapping instead of a value": (
        "platforms:\n  x:\n    extends: h200\n    arch: {a: b}\n",
        ["own.yaml:5: x.arch = a mapping: expected text"],
    ),
    "an unknown vendor": (
        "platforms:\n  x: {vendor: nvida, arch: y, activations: float32}\n",
        ["own.yaml:3: x.vendor = 'nvida': expected one of cpu, nvidia, amd; did you mean nvidia?"],
    ),
    "an unknown base": (
        "platforms:\n  x: {extends: h20}\n",
        ["own.yaml:3: x.extends: no platform 'h20'; did you mean h200?"],
    ),
    "itself as base": ("platforms:\n  x: {extends: x}\n", ["own.yaml:3: x.extends: a circle: x -> x"]),
    "a circle": (
        "platforms:\n  x: {extends: y}\n  y: {extends: x}\n",
        ["own.yaml:4: y.extends: a circle: x -> y -> x", "own.yaml:3: x.extends: a circle: y -> x -> y"],
    ),
    "missing keys": ("platforms:\n  x: {vendor: amd}\n", ["own.yaml:3: x: arch and activations missing"]),
    "an entry that is no mapping": ("platforms:\n  x: 5\n", ["own.yaml:3: x: expected keys and values"]),
    "no entries": ("platforms: [x]\n", ["own.yaml:2: platforms: expected entries by name"]),
}  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), CASES.values(), ids=CASES)
def test_a_fault_has_its_line(write: Write, text: str, expected: list[str]) -> None:
    found = faults(write(text))
    for wanted in expected:
        assert any(wanted in line for line in found), found
    assert len(found) == len(expected), found


def test_all_faults_come_together(write: Write) -> None:
    first = write("platforms:\n  x: {extends: nowhere}\n  y: {extends: h200, lds: 1}\n", "a.yaml")
    second = write("platforms:\n  z: {extends: h200, wavefront: 0}\n", "b.yaml")
    with pytest.raises(UsageError) as caught:
        load_profiles((first, second))
    assert [reason.partition(": ")[0] for reason in caught.value.reasons] == [
        f"{first}:3", f"{first}:4", f"{second}:3",
    ]  # fmt: skip
    assert caught.value.message == f"{first} and {second} have 3 faults"


@pytest.mark.parametrize("schema", ["schema: 1\n", "", "schema: two\n"])
def test_another_schema(write: Write, schema: str) -> None:
    found = faults(write("platforms:\n  x: {extends: h200}\n", schema=schema))
    assert found[0].startswith(f"own.yaml:1: schema: expected {SCHEMA}, found ")


def test_b12_two_files_with_one_name_are_both_named(write: Write) -> None:
    first = write("platforms:\n  lab: {extends: h200}\n", "a.yaml")
    second = write("platforms:\n  # below\n  lab: {extends: h100}\n", "b.yaml")
    assert faults(second, first) == ["a.yaml:3: lab is already defined in b.yaml:4"]
    (fault,) = faults(write("platforms:\n  h200: {extends: h100}\n"))
    assert fault.startswith(f"own.yaml:3: h200 is already defined in {builtin_file()}:")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("  x: {extends: h200, aliases: [mi355]}", "x.aliases: mi355 is already an alias of mi355x in "),
        ("  x: {extends: h200, aliases: [MI355X]}", "x.aliases: MI355X is already the name mi355x in "),
        ("  MI-355X: {extends: h200}", "MI-355X reads like mi355x in "),
    ],
)
def test_names_and_aliases_must_not_read_the_same(write: Write, text: str, expected: str) -> None:
    (fault,) = faults(write(f"platforms:\n{text}\n"))
    assert expected in fault and fault.startswith("own.yaml:3: ") and str(builtin_file()) in fault


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"schema: 2\nplatforms:\n  x: {extends: h200\n  y: 1\n", "line "),
        (b"schema: 2\nplatforms:\n\t- x\n", "line 3: "),
        (b"\xff\xfe\x00", "not UTF-8 text"),
    ],
)
def test_a_file_that_is_not_yaml(tmp_path: Path, content: bytes, reason: str) -> None:
    file = tmp_path / "own.yaml"
    file.write_bytes(content)
    with pytest.raises(UsageError) as caught:
        load_profiles((file,))
    assert caught.value.message == f"{file} is not valid YAML"
    assert caught.value.reasons[0].startswith(reason)


@pytest.mark.parametrize("content", ["", "- x\n", "x\n"])
def test_a_file_of_another_kind(write: Write, content: str) -> None:
    assert faults(write(content, schema="")) == [
        f"own.yaml:1: not a platform file: expected schema: {SCHEMA} and platforms:"
    ]


def test_a_file_that_is_absent_or_a_folder(tmp_path: Path) -> None:
    for file, reason in ((tmp_path / "none.yaml", "No such file or directory"), (tmp_path, "Is a directory")):
        with pytest.raises(UsageError) as caught:
            load_profiles((file,))
        assert caught.value.message == f"cannot read {file}" and caught.value.reasons == (reason,)


def test_a_damaged_built_in_file_is_no_fault_of_the_user(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write("platforms:\n  x: {vendor: no}\n")
    monkeypatch.setattr(module, "builtin_file", lambda: file)
    with pytest.raises(K3Error) as caught:
        load_profiles()
    assert not isinstance(caught.value, UsageError)
    assert caught.value.hint == "reinstall k3port"
