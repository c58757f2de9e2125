"""How a training of a detector starts: alone in its directory, and alike on all ranks."""

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from gloo_processes import ROOT, Processes

pytest.importorskip("mmdet", reason="needs the detection extra: make detection")

import torch
from detection_cases import make_data, tiny_config
from torch.utils.data import TensorDataset

from swinv2_moe.command import run_command
from swinv2_moe.detection import run
from swinv2_moe.errors import UserError
from swinv2_moe.train import checkpoint

CONFIG = ROOT / "configs/detection/shapes/mask_rcnn.py"
HOLD = (
    "import fcntl, sys; lock = open(sys.argv[1], 'a'); fcntl.lockf(lock, fcntl.LOCK_EX);"
    " print('held', flush=True)"
)


def test_a_second_training_looks_at_nothing(tmp_path, monkeypatch):
    config = tiny_config(make_data(tmp_path / "data"), tmp_path / "run")
    (tmp_path / "run").mkdir()
    looked = []
    monkeypatch.setattr(checkpoint, "find_checkpoint", lambda *args, **kwargs: looked.append(args))
    command = [sys.executable, "-c", f"{HOLD}; sys.stdin.read()", str(tmp_path / "run" / ".lock")]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(
            UserError, match=rf"^--output {tmp_path / 'run'}: another run is writing there$"
        ):
            run.train(config, "auto")
        other.stdin.close()
    assert looked == []
    assert os.listdir(tmp_path / "run") == [".lock"]


def train_at_own_rate(work_dir: Path) -> None:
    rank = os.environ["RANK"]
    options = [
        f"optim_wrapper.optimizer.lr=0.{rank}1",
        f"train_dataloader.dataset.dataset.data_root=/local/{rank}/",
    ]
    config = run.load_config(str(CONFIG), options, str(work_dir))
    run_command(lambda: run.train(config))


def test_ranks_with_different_configurations(tmp_path):
    ended = Processes(2, tmp_path, partial(train_at_own_rate, tmp_path / "run")).wait()
    assert [outcome.status for outcome in ended] == [2, 2], ended
    line = (
        "error: the ranks were started differently: optim_wrapper.optimizer.lr is 0.01 on rank 0,"
        " 0.11 on rank 1"
    )
    assert ended[0].err.splitlines()[-1] == line
    assert not (tmp_path / "run").exists()


def test_data_workers_outlive_ctrl_c():
    """It reaches all processes in the foreground; the run ends its workers itself."""
    sampler = {"type": "DefaultSampler", "shuffle": False}
    loader = run.MoERunner.build_dataloader(
        {
            "dataset": TensorDataset(torch.arange(40)),
            "sampler": sampler,
            "batch_size": 2,
            "num_workers": 2,
        },
        seed=0,
    )
    batches = iter(loader)
    for worker in batches._workers:
        os.kill(worker.pid, signal.SIGINT)
    assert len(list(batches)) == len(loader) == 20
