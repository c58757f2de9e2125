"""Programs that import tutel run on the engine, through the directory that one command prints."""

import os
import re
import runpy
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from gloo_processes import ROOT, Processes
from PIL import Image

# Directories with Microsoft's Tutel and Swin-Transformer, for the slow tests.
SOURCE = os.environ.get("TUTEL_SOURCE", "")
SWIN_SOURCE = os.environ.get("SWIN_SOURCE", "")
PROGRAM = """
import torch
import tutel
from tutel import moe as tutel_moe, net, system
from tutel.experts.ffn import ExpertModule
from tutel.gates.top import Gate
from tutel.impls.communicate import simple_all_reduce
from tutel.impls.losses import gshard_loss
import tutel.impls.fast_dispatch

system.init_affinity_at_program_beginning()
env = system.init_data_model_parallel(backend="gloo")
assert simple_all_reduce is net.simple_all_reduce
layer = tutel_moe.moe_layer(
    gate_type={"type": "top", "k": 2},
    model_dim=8,
    experts={"type": "ffn", "num_experts_per_device": 2, "hidden_size_per_expert": 8},
    seeds=(1, env.global_rank + 1, 1),
)
assert isinstance(layer.experts, ExpertModule) and isinstance(layer.gates[0], Gate)
x = torch.linspace(-1, 1, 48).view(2, 3, 8) * (env.global_rank + 1)
total = net.simple_all_reduce(layer(x).abs().sum().detach())
env.dist_print(f"{env.global_size} ranks: {layer.num_global_experts} experts {float(total) > 0}")
try:
    import tutel.parted  # without a counterpart
except ModuleNotFoundError as error:
    assert str(error) == "No module named 'tutel.parted'"
else:
    raise AssertionError("tutel.parted was imported")
"""


@pytest.fixture(scope="module")
def shim(tmp_path_factory) -> str:
    """What `python -m moe_core.compat.tutel` prints."""
    module = partial(runpy.run_module, "moe_core.compat.tutel", run_name="__main__")
    (ended,) = Processes(1, tmp_path_factory.mktemp("printed"), module).wait()
    assert (ended.status, ended.err) == (0, "")
    return ended.out.strip()


def run_with_shim(shim: str, program: Path) -> None:
    sys.path.insert(0, shim)
    runpy.run_path(str(program), run_name="__main__")


def test_a_program_finds_tutel(shim, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    first, second = Processes(2, tmp_path, partial(run_with_shim, shim, program)).wait()
    assert first == (0, "2 ranks: 4 experts True\n", "")
    assert second == (0, "", "")


# Losses of steps 0 and 9 that Tutel's CPU build (commit ac0e51b) printed, at model_dim 64,
# hidden_size 64, batch 4 and 64 tokens, for the program, its further arguments and the ranks.
_HIDDEN = "--hidden_size 64"
_PLACES = "--l_aux_wt 0.1 --a2a_ffn_overlap_degree 4 --capacity_factor 0.7"
_SHARED = "--num_local_experts -2"
CLIENTS: list[tuple[str, str, int, tuple[float, float]]] = [
    ("helloworld.py", f"--top 1 {_HIDDEN}", 1, (4.83643, 4.68370)),
    ("helloworld.py", f"--top 2 {_HIDDEN}", 1, (5.33001, 5.12377)),
    ("helloworld.py", f"--top 1 --capacity_factor 0.5 {_HIDDEN}", 1, (4.75067, 4.68529)),
    ("helloworld.py", f"--top 2 --capacity_factor -0.5 {_HIDDEN}", 1, (4.84814, 4.69538)),
    ("helloworld.py", f"--dtype float64 {_HIDDEN}", 1, (5.33001, 5.12377)),
    ("helloworld.py", f"--expert_type llama_ffn {_HIDDEN}", 1, (4.15823, 4.15819)),
    ("helloworld.py", f"{_PLACES} {_HIDDEN}", 1, (4.98298, 4.81947)),
    ("helloworld_ddp_tutel.py", _HIDDEN, 1, (5.33001, 5.30922)),
    ("helloworld_switch.py", _HIDDEN, 1, (5.33001, 5.30922)),
    ("helloworld_custom_gate_expert.py", "", 1, (4.14253, 4.11970)),
    ("helloworld_custom_expert_sharded.py", "", 1, (4.15903, 4.11150)),
    ("helloworld.py", f"--top 1 --capacity_factor 0.5 {_HIDDEN}", 2, (4.44264, 4.38318)),
    ("helloworld.py", f"--top 2 {_HIDDEN}", 2, (5.27506, 4.88069)),
    ("helloworld.py", f"{_SHARED} {_HIDDEN}", 2, (5.82189, 4.77293)),
    ("helloworld_ddp_tutel.py", _HIDDEN, 2, (5.27506, 5.23483)),
    ("helloworld_custom_gate_expert.py", "", 2, (4.19087, 4.14096)),
    ("helloworld.py", f"{_SHARED} --top 1 {_HIDDEN}", 4, (5.20483, 4.56625)),
    ("helloworld.py", f"{_SHARED} --parallel_type model {_HIDDEN}", 4, (5.23543, 4.33708)),
    ("helloworld.py", f"{_SHARED} --parallel_type adaptive:0 {_HIDDEN}", 4, (5.23543, 4.33708)),
    ("helloworld.py", f"--top 2 --use_2dh {_HIDDEN}", 4, (5.26783, 4.65250)),
    ("helloworld_custom_expert_sharded.py", _SHARED, 4, (4.18808, 3.99890)),
    ("helloworld_switch.py", f"--num_local_experts -4 {_HIDDEN}", 4, (10.45581, 9.98261)),
    ("helloworld_ddp_tutel.py", _HIDDEN, 4, (5.26783, 5.20460)),
]


@pytest.mark.slow
@pytest.mark.skipif(not SOURCE, reason="TUTEL_SOURCE, Tutel's repository, is not set")
@pytest.mark.parametrize(("program", "arguments", "num_ranks", "losses"), CLIENTS)
def test_tutels_own_examples(shim, tmp_path, program, arguments, num_ranks, losses):
    file = Path(SOURCE) / "tutel" / "examples" / program
    sizes = "--batch_size 4 --num_tokens 64 --model_dim 64 --num_steps 10 --device cpu"
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    words += [f"--nproc_per_node={num_ranks}", str(file), *sizes.split(), *arguments.split()]
    path = os.pathsep.join([str(ROOT), shim])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    found = re.findall(r"STEP-\d+: loss = ([\d.]+)", done.stdout)
    assert (float(found[0]), float(found[9])) == pytest.approx(losses, abs=2e-5)


# Swin-Transformer's main_moe.py calls CUDA, and a timm of 2021. Python imports this file first.
START = """
import contextlib
import sys
import types

import timm.scheduler.cosine_lr
import torch
import torch.distributed

torch.Tensor.cuda = torch.nn.Module.cuda = lambda self, *args, **options: self
for name in ("set_device", "synchronize", "empty_cache", "manual_seed"):
    setattr(torch.cuda, name, lambda *args: None)
torch.cuda.max_memory_allocated = lambda *args: 0
torch.cuda.amp.autocast = lambda enabled: contextlib.nullcontext()


def replace(owner, name, make):
    setattr(owner, name, make(getattr(owner, name)))


replace(torch.distributed, "init_process_group", lambda f: lambda backend, **o: f("gloo", **o))
replace(
    torch.nn.parallel.DistributedDataParallel,
    "__init__",
    lambda f: lambda self, module, device_ids, **o: f(self, module, **o),
)
replace(
    timm.scheduler.cosine_lr.CosineLRScheduler,
    "__init__",
    lambda f: lambda self, *args, t_mul, **o: f(self, *args, cycle_mul=t_mul, **o),
)


class GradScaler:
    def scale(self, loss):
        return loss

    def unscale_(self, optimizer):
        pass

    def step(self, optimizer):
        optimizer.step()

    def update(self):
        pass

    def state_dict(self):
        return {"scale": 1.0}


torch.cuda.amp.GradScaler = GradScaler
sys.modules["termcolor"] = types.ModuleType("termcolor")
sys.modules["termcolor"].colored = lambda text, *args, **options: text
"""
# MLP_FC2_BIAS is off in every released configuration.
SWIN_MOE = """
DATA: {IMG_SIZE: 32, DATASET: imagenet, NUM_WORKERS: 0, PIN_MEMORY: False}
MODEL:
  TYPE: swin_moe
  NAME: tiny
  DROP_PATH_RATE: 0.0
  SWIN_MOE: {PATCH_SIZE: 4, EMBED_DIM: 16, DEPTHS: [1, 2], NUM_HEADS: [2, 4], WINDOW_SIZE: 4,
    PRETRAINED_WINDOW_SIZES: [0, 0], MLP_FC2_BIAS: False, MOE_BLOCKS: [[-1], [1]],
    NUM_LOCAL_EXPERTS: 2, AUX_LOSS_WEIGHT: 1.0}
TRAIN: {EPOCHS: 2, WARMUP_EPOCHS: 1, BASE_LR: 0.05, WARMUP_LR: 0.01, MIN_LR: 0.001, CLIP_GRAD: 3.0}
AUG: {MIXUP: 0.0, CUTMIX: 0.0}
TEST: {CROP: False}
PRINT_FREQ: 1
"""


@pytest.fixture(scope="module")
def noise(tmp_path_factory) -> Path:
    """Pictures of five classes, as folders."""
    folder, random = tmp_path_factory.mktemp("noise"), np.random.default_rng(0)
    for split, count in (("train", 16), ("val", 4)):
        for label in range(5):
            (folder / split / str(label)).mkdir(parents=True)
            for i in range(count):
                pixels = random.integers(0, 256, (32, 32, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / split / str(label) / f"{i}.png")
    return folder


# What the program prints with Tutel's CPU build (commit ac0e51b) and torch 2.11.0: the loss and the
# gradient's norm of the first and the last step.
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(
    not SWIN_SOURCE, reason="SWIN_SOURCE, Swin-Transformer's repository, is not set"
)
@pytest.mark.parametrize(
    ("num_ranks", "first", "last"),
    [(1, (6.9298, 1.2974), (6.5048, 2.6230)), (2, (6.8874, 0.9817), (6.5229, 2.3268))],
)
def test_swin_transformers_own_program(shim, noise, tmp_path, num_ranks, first, last):
    (tmp_path / "sitecustomize.py").write_text(START)
    (tmp_path / "tiny.yaml").write_text(SWIN_MOE)
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    words += [f"--nproc_per_node={num_ranks}", str(Path(SWIN_SOURCE) / "main_moe.py")]
    words += ["--cfg", "tiny.yaml", "--data-path", str(noise), "--batch-size", "8"]
    path = os.pathsep.join([str(tmp_path), str(ROOT), shim])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    found = re.findall(r"Train: .*\tloss ([\d.]+) .*grad_norm ([\d.]+)", done.stdout + done.stderr)
    assert len(found) == 20 // num_ranks
    steps = [tuple(map(float, step)) for step in found]
    # Printed with 4 decimals; sums in another order.
    assert steps[0] == pytest.approx(first, abs=2e-4)
    assert steps[-1] == pytest.approx(last, abs=2e-3)
