"""Files with the speed of a machine: written, read, and refused in one line."""

import json
from dataclasses import replace

import pytest

from moe_core.parallel import PROFILES, calibrate
from swinv2_moe.errors import UserError
from swinv2_moe.measure.cluster import load_profile, machine_named, save_profile


def test_a_profile_is_read_as_it_was_written(tmp_path):
    file = tmp_path / "machine.json"
    links = PROFILES["h100"]
    measured = replace(calibrate(None, 1, "cpu"), intra=links.intra, inter=links.inter)
    for machine in (links, measured):  # the memory of a CPU is not known
        save_profile(machine, file)
        assert load_profile(file) == machine
        assert machine_named(str(file)) == machine


def test_links_with_a_delay_and_older_files_without(tmp_path):
    file = tmp_path / "machine.json"
    machine = PROFILES["h100"]
    delayed = replace(machine, inter=replace(machine.inter, delay=1e-3))
    save_profile(delayed, file)
    assert load_profile(file) == delayed
    file.write_text(changed())
    assert load_profile(file).inter.delay == 0


def changed(**values) -> str:
    link = {"latency": 1e-6, "bandwidth": 1e9}
    profile = {"name": "a", "intra": link, "inter": link, "flops": 1e12, "flops_fp32": 1e12}
    profile |= {"memory_bandwidth": 1e11, "kernel_overhead": 1e-6, "memory": None}
    return json.dumps(profile | values)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "Expecting value"),
        ("[" * 50_000, "nested too deeply"),
        ("[]", "the profile is a list, it must be an object"),
        ("{}", "the profile/name is missing"),
        (changed(flops=0), "the profile/flops is 0, it must be a positive number"),
        (changed(flops=True), "the profile/flops is True"),
        (changed(memory=float("nan")), "the profile/memory is nan"),
        (changed(inter={"latency": 1e-6}), "the profile/inter/bandwidth is missing"),
        (changed(intra={"latency": -1, "bandwidth": 1}), "the profile/intra/latency is -1"),
        (
            changed(inter={"latency": 1, "bandwidth": 1, "delay": -1}),
            "the profile/inter/delay is -1, it must be a number of at least 0",
        ),
        (changed(name="a\n\x1b[2J"), "a printable name of 1 to 80 characters"),
        (changed(name="x" * 70_000), "larger than 65,536 bytes"),
    ],
)
def test_another_file_is_refused(content, message, tmp_path):
    file = tmp_path / "machine.json"
    file.write_text(content)
    with pytest.raises(UserError) as error:
        load_profile(file)
    assert str(error.value).startswith(f"--profile {file}: ")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_that_is_not_there():
    with pytest.raises(UserError, match=r"--profile none\.json: cannot be read \(No such file"):
        machine_named("none.json")
