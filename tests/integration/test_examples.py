"""Examples of jobs name configurations and keys that exist, and directories that are mounted."""

import re
from pathlib import Path

import pytest
import yaml

from swinv2_moe.config import load_config

ROOT = Path(__file__).parents[2]
JOB = ROOT / "examples/kubernetes/train.yaml"


def test_the_kubernetes_job_trains():
    job = yaml.safe_load(JOB.read_text())
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert replicas["Master"]["template"] == replicas["Worker"]["template"]
    pod = replicas["Master"]["template"]["spec"]
    container = pod["containers"][0]
    assert container["command"] == ["torchrun", "-m", "swinv2_moe", "train"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == int(job["spec"]["nprocPerNode"])
    args = container["args"]
    split = args.index("--opts")
    options = dict(arg.removeprefix("--").split("=") for arg in args[:split])
    keys = [part for arg in args[split + 1 :] for part in arg.split("=")]
    config = load_config(options["cfg"], keys, data=options["data"])
    assert config.MODEL.MOE.NUM_EXPERTS == 32
    assert not container["image"].endswith(":latest")
    assert ":" in container["image"]
    assert pod["securityContext"]["runAsNonRoot"]
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    (memory,) = (volume for volume in pod["volumes"] if volume["name"] == "memory")
    assert memory["emptyDir"]["sizeLimit"] == "16Gi"
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert set(mounts) == {volume["name"] for volume in pod["volumes"]}
    (stage,) = pod["initContainers"]
    *_, source, local = stage["command"]
    assert (local, stage["volumeMounts"]) == (options["data"], container["volumeMounts"])
    assert stage["securityContext"] == container["securityContext"]
    for path in (options["data"], options["output"], source):
        assert any(path.startswith(mount + "/") for mount in mounts.values())
    ranks = 8 * sum(replica["replicas"] for replica in replicas.values())
    assert config.DATA.GLOBAL_BATCH_SIZE % ranks == 0


def test_the_image_has_a_version_and_no_root():
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    (base,) = (line for line in lines if line.startswith("FROM "))
    assert re.fullmatch(r"FROM python:3\.\d+\.\d+-slim-\w+", base)
    assert "USER 1000" in lines


@pytest.mark.parametrize("name", ["train", "seeds"])
def test_the_slurm_scripts_name_configurations(name):
    lines = (ROOT / f"examples/slurm/{name}.sbatch").read_text().splitlines()
    words = " ".join(line.lstrip("# ") for line in lines if line.startswith("#")).split()
    assert "--cfg" in words
    load_config(words[words.index("--cfg") + 1], ["DATA.PATH", "/data"])
