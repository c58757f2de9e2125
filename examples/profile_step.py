"""What a training step spends its time in: operators, memory, FLOPs.

    python examples/profile_step.py

Takes noise in place of images. Routing, experts and window attention are operators of their own:
`moe_core::route`, `moe_core::moe_ffn`, `swinv2_moe::window_attention`, and the same names with
`_backward`. Writes step.json, which https://ui.perfetto.dev opens.
"""

import time

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

import moe_core
from swinv2_moe.config import data_config, load_config, model_config
from swinv2_moe.models import build_model

config = load_config("imagenette_96", ["DATA.DATASET", "digits"])  # or a file
classes, batch_size, size = 10, 16, data_config(config).img_size
device = "cuda" if torch.cuda.is_available() else "cpu"
model = build_model(model_config(config), classes).to(device).train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
images = torch.randn(batch_size, 3, size, size, device=device)
labels = torch.randint(classes, (batch_size,), device=device)


def step():
    with moe_core.step(model, torch.bfloat16), torch.autocast(device, torch.bfloat16):
        torch.nn.functional.cross_entropy(model(images), labels).backward()
    moe_core.finish_gradients(model, max_norm=5.0)
    optimizer.step()
    optimizer.zero_grad()


def seconds(function, repeats=5):
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return sorted(times)[repeats // 2]


step()  # compiles kernels
with FlopCounterMode(display=False) as counter:
    step()
for operator, flops in counter.get_flop_counts()["Global"].items():
    print(f"{flops / 1e9:10.3f} GFLOP  {operator}")

activities = [ProfilerActivity.CPU]
if device == "cuda":
    activities.append(ProfilerActivity.CUDA)
with profile(activities=activities, profile_memory=True) as profiler:
    step()
print(profiler.key_averages().table(sort_by=f"self_{device}_time_total", row_limit=20))
profiler.export_chrome_trace("step.json")  # open it in https://ui.perfetto.dev

side = 8192 if device == "cuda" else 2048
matrix = torch.randn(side, side, device=device, dtype=torch.bfloat16)
peak = 2 * side**3 / seconds(lambda: matrix @ matrix)
rate = counter.get_total_flops() / seconds(step)
print(f"{rate / 1e9:,.0f} GFLOP/s, {rate / peak:.1%} of a large matrix product")
