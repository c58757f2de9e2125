"""How a training of a detector starts: alone in its directory, alike on all ranks, with limits and
classes that this package sets in its libraries; and how its tuners are logged."""

import copy
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from gloo_processes import ROOT, Processes

pytest.importorskip("mmdet", reason="needs the detection extra: make detection")

import torch
from detection_cases import make_data, tiny_config
from torch.utils.data import TensorDataset

from swinv2_moe.checkpoints import checkpoint
from swinv2_moe.commands.call import run_command
from swinv2_moe.data.build import Loader
from swinv2_moe.detection import run
from swinv2_moe.detection.hooks import TuningHook
from swinv2_moe.errors import UserError

CONFIG = ROOT / "configs/detection/shapes/mask_rcnn.py"
HOLD = (
    "import fcntl, sys; lock = open(sys.argv[1], 'a'); fcntl.lockf(lock, fcntl.LOCK_EX);"
    " print('held', flush=True)"
)


@pytest.mark.parametrize("detector", ["mask_rcnn", "cascade_mask_rcnn", "htc"])
def test_building_leaves_the_configuration_as_it_was(detector, tmp_path):
    """One rank alone counts parameters, before the ranks compare their configurations."""
    config = tiny_config(tmp_path, tmp_path / "run", detector)
    before = copy.deepcopy(config.to_dict())
    assert run.count_parameters(config)["trained"] > 0
    assert config.to_dict() == before


def test_a_second_training_looks_at_nothing(tmp_path, monkeypatch):
    config = tiny_config(make_data(tmp_path / "data"), tmp_path / "run")
    (tmp_path / "run").mkdir()
    looked = []
    monkeypatch.setattr(checkpoint, "find_checkpoint", lambda *args, **kwargs: looked.append(args))
    command = [sys.executable, "-c", f"{HOLD}; sys.stdin.read()", str(tmp_path / "run" / ".lock")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes, text=True) as other:
        assert other.stdout.readline() == "held\n"
        line = f"--output {tmp_path / 'run'}: another process is writing there"
        with pytest.raises(UserError, match=f"^{re.escape(line)}$"):
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


def test_data_come_from_the_loader_whose_workers_outlive_ctrl_c():
    """tests/unit/data/test_data_datasets.py has what its workers outlive."""
    sampler = {"type": "DefaultSampler", "shuffle": False}
    options = {"dataset": TensorDataset(torch.arange(4)), "sampler": sampler, "batch_size": 2}
    assert type(run.MoERunner.build_dataloader(options, seed=0)) is Loader
    # configurations have persistent workers, and a user may choose none
    without = options | {"num_workers": 0, "persistent_workers": True}
    assert len(run.MoERunner.build_dataloader(without, seed=0)) == 2


def test_sync_bn_on_the_cpus_of_several_processes_is_named():
    heads = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.SyncBatchNorm(2))
    runner = SimpleNamespace(distributed=True)
    with pytest.raises(UserError, match=r"norm_cfg of 1 is SyncBN, .*: train in one process, or"):
        run.MoERunner.wrap_model(runner, None, heads)


def test_opencv_decodes_no_more_pixels_than_the_rest_of_this_package():
    """OpenCV reads its limit when it is first imported: in a process of its own, where mmcv's
    operators, which take seconds, are missing."""
    code = """
import io, sys
sys.modules["mmcv.ops"] = None
import swinv2_moe.detection
import cv2, numpy, PIL.Image
for side in (100, 11_000):
    file = io.BytesIO()
    PIL.Image.new("1", (side, side)).save(file, "PNG")
    try:
        print(cv2.imdecode(numpy.frombuffer(file.getvalue(), numpy.uint8), 1).shape)
    except cv2.error:
        print("refused")
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["(100, 100, 3)", "refused"]


def test_tuners_decisions_are_logged():
    decided, lines = {"event": "decided", "layers": "M=8", "to": "r=0", "ms": 2.5}, []
    hook = TuningHook()
    hook.tuning = SimpleNamespace(take_events=lambda: [decided])
    runner = SimpleNamespace(logger=SimpleNamespace(info=lines.append))
    hook.after_train_iter(runner, 0)
    hook.after_val_epoch(runner)
    assert lines == ["M=8: r=0, 2.5 ms"] * 2
