"""Released Swin-MoE files to checkpoints and back: every layout of ranks and experts, and the
published sizes."""

from pathlib import Path

import pytest
import torch
from released_files import make_released, place, write_released

from swinv2_moe.checkpoints.checkpoint import load_weights, open_checkpoint
from swinv2_moe.config import load_config, model_config
from swinv2_moe.convert import layouts
from swinv2_moe.convert.files import Sources, find_sources, read_states
from swinv2_moe.models import build_model
from swinv2_moe.models.weights import compare

IN22K = Path(__file__).parents[3] / "configs" / "in22k"
PUBLISHED = [  # configuration, ranks it was released for
    ("small_window12_192_8expert", 32),
    ("small_window12_192_32expert", 32),
    ("small_window12_192_32expert_cosine", 32),
    ("base_window12_192_32expert_cosine", 32),
]
BUFFERS = ("relative_coords_table", "relative_position_index", "attn_mask")


def assert_same(first: dict, second: dict) -> None:
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


def weights(file: Path) -> dict:
    return torch.load(file, weights_only=True)["model"]


def placed(released, config):
    return place(released, build_model(model_config(config), 5)).eval()


def parameters(state: dict) -> dict:
    return {name: value for name, value in state.items() if not name.endswith(BUFFERS)}


@pytest.mark.parametrize(
    ("experts", "ranks", "ending"),
    [(4, 4, ""), (4, 2, ".rank0"), (4, 1, ".master"), (4, 8, ""), (2, 8, ".rank7"), (1, 4, "")],
)
def test_an_imported_model_computes_what_the_released_weights_do(
    experts, ranks, ending, imported, make_config, load, images, tmp_path
):
    config = make_config("MODEL.MOE.NUM_EXPERTS", experts)
    released = make_released(config, ranks, 5)
    stem = write_released(released, tmp_path / "x.pth")
    new = imported("swin-moe", f"{stem}{ending}", "MODEL.MOE.NUM_EXPERTS", experts)
    model, expected = load(new, config), placed(released, config)
    assert_same(model.state_dict(), expected.state_dict())
    assert torch.equal(model(images), expected(images))


@pytest.mark.parametrize(
    ("legacy", "router", "bias"),
    [(False, "linear", False), (True, "cosine", False), (False, "cosine", True)],
)
@pytest.mark.parametrize("ranks", [2, 8])
def test_other_forms_of_biases_and_gates(
    legacy, router, bias, ranks, imported, exported, make_config, load, images, tmp_path
):
    opts = ["MODEL.MOE.ROUTER", router, "MODEL.MOE.OUTPUT_BIAS", bias]
    config = make_config(*opts)
    released = make_released(config, ranks, 5, legacy, bias)
    stem = write_released(released, tmp_path / "x.pth")
    new = imported("swin-moe", stem, *opts)
    model, expected = load(new, config), placed(released, config)
    assert_same(model.state_dict(), expected.state_dict())
    assert torch.equal(model(images), expected(images))
    newer = [] if legacy else ["--newer"]
    exported("swin-moe", new, tmp_path / "y.pth", "--ranks", ranks, *newer)
    for ending in ("master", *(f"rank{rank}" for rank in range(ranks))):
        theirs, ours = (weights(tmp_path / f"{name}.pth.{ending}") for name in "xy")
        assert_same(parameters(theirs), ours)


def test_a_global_file_is_one_whole_model(imported, exported, make_config, load, tmp_path):
    config = make_config()
    released = make_released(config, 1, 5)
    torch.save({"model": released.master | released.ranks[0]}, tmp_path / "x.pth.global")
    for i, source in enumerate(("x.pth", "x.pth.global")):
        new = imported("swin-moe", tmp_path / source, name=f"new{i}")
        assert_same(load(new, config).state_dict(), placed(released, config).state_dict())
    exported("swin-moe", new, tmp_path / "y.pth")
    back = weights(tmp_path / "y.pth.global")
    assert_same(back, parameters(released.master | released.ranks[0]))
    names = ["new0", "new1", "x.pth.global", "y.pth.global"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def test_rank_files_may_hold_the_whole_model_each(imported, make_config, load, tmp_path):
    config = make_config()
    released = make_released(config, 2, 5)
    for rank, state in enumerate(released.ranks):
        torch.save({"model": released.master | state}, tmp_path / f"x.pth.rank{rank}")
    new = imported("swin-moe", tmp_path / "x.pth")
    assert_same(load(new, config).state_dict(), placed(released, config).state_dict())


@pytest.mark.parametrize("ranks", [1, 4, 16])
def test_ours_to_theirs_to_ours(ranks, imported, exported, make_config, tmp_path):
    stem = write_released(make_released(make_config(), 2, 5), tmp_path / "x.pth")
    ours = imported("swin-moe", stem, name="ours")
    theirs = exported("swin-moe", ours, tmp_path / "sub" / "y.pth", "--ranks", ranks)
    names = sorted(path.name for path in theirs.parent.iterdir())
    assert names == sorted(["y.pth.master", *(f"y.pth.rank{rank}" for rank in range(ranks))])
    again = imported("swin-moe", theirs, name="again")
    files = sorted(path.relative_to(ours) for path in ours.rglob("*.safetensors"))
    assert len(files) == 1 + 3 * 4
    for file in files:
        assert (ours / file).read_bytes() == (again / file).read_bytes()
    # no file is larger than what it holds
    file = Path(f"{theirs}.rank0")
    held = sum(tensor.nbytes for tensor in weights(file).values())
    assert file.stat().st_size < held + 10_000


@pytest.mark.parametrize(("name", "ranks"), PUBLISHED)
def test_published_sizes_name_by_name(name, ranks):
    config = load_config(IN22K / f"swin_moe_{name}.yaml")
    with torch.device("meta"):
        model = build_model(model_config(config), 21841)
    released = make_released(config, ranks, 21841, device="meta")
    whole = [released.master | state for state in released.ranks]
    states = layouts.with_project_names("swin-moe", whole)
    files = [Path(f"x.pth.rank{rank}") for rank in range(ranks)]
    state = layouts.joined(states, model, Sources(Path("x.pth"), files))
    assert compare(model.state_dict(), state) == ""
    back = layouts.split("swin-moe", state, ranks, legacy=True)
    theirs = parameters(released.master | released.ranks[-1])
    shapes = {name: value.shape for name, value in theirs.items()}
    assert {name: value.shape for name, value in back[-1].items()} == shapes


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_published_small_with_8_experts_on_32_ranks(convert, exported, tmp_path):
    name = "swin_moe_small_window12_192_8expert.yaml"
    config = load_config(IN22K / name)
    released = make_released(config, 32, 21841)
    stem = write_released(released, tmp_path / "x.pth")
    arguments = [stem, "--cfg", IN22K / name, "--output", tmp_path / "new"]
    assert convert("import", "swin-moe", *arguments)[::2] == (0, "")
    model, expected = (build_model(model_config(config), 21841).eval() for _ in range(2))
    load_weights(open_checkpoint(tmp_path / "new"), model)
    place(released, expected)
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(173.3e6, abs=0.05e6)
    image = torch.randn(1, 3, 192, 192)
    with torch.no_grad():
        assert torch.equal(model(image), expected(image))
    exported("swin-moe", tmp_path / "new", tmp_path / "y.pth", "--ranks", 32)
    before, after = (read_states(find_sources(tmp_path / name)) for name in ("x.pth", "y.pth"))
    for first, second in zip(before, after, strict=True):
        assert_same(parameters(first), second)
