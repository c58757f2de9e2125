"""Released Swin-MoE files to checkpoints and back: every layout of ranks and experts, and the
published sizes."""

from pathlib import Path

import pytest
import torch
from released_files import make_released, place, write_released

from swinv2_moe.config import load_config, model_config
from swinv2_moe.convert import layouts
from swinv2_moe.convert.files import Sources, find_sources, read_states
from swinv2_moe.models import build_model
from swinv2_moe.models.weights import compare
from swinv2_moe.train.checkpoint import load_weights, open_checkpoint

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


def parameters(state: dict) -> dict:
    return {name: value for name, value in state.items() if not name.endswith(BUFFERS)}


@pytest.mark.parametrize(
    ("experts", "ranks", "ending"),
    [(4, 4, ""), (4, 2, ".rank0"), (4, 1, ".master"), (4, 8, ""), (2, 8, ".rank7"), (1, 4, "")],
)
def test_an_imported_model_computes_what_the_released_weights_do(
    experts, ranks, ending, convert, cfg, make_config, load, images, tmp_path
):
    config = make_config("MODEL.MOE.NUM_EXPERTS", experts)
    released = make_released(config, ranks, 5)
    stem = write_released(released, tmp_path / "x.pth")
    arguments = [
        f"{stem}{ending}",
        *cfg("MODEL.MOE.NUM_EXPERTS", experts),
        "--output",
        tmp_path / "new",
    ]
    assert convert("import", "swin-moe", *arguments)[::2] == (0, "")
    model, expected = (
        load(tmp_path / "new", config),
        place(released, build_model(model_config(config), 5)).eval(),
    )
    assert_same(model.state_dict(), expected.state_dict())
    assert torch.equal(model(images), expected(images))


@pytest.mark.parametrize(
    ("legacy", "router", "bias"),
    [(False, "linear", False), (True, "cosine", False), (False, "cosine", True)],
)
@pytest.mark.parametrize("ranks", [2, 8])
def test_other_forms_of_biases_and_gates(
    legacy, router, bias, ranks, convert, cfg, make_config, load, images, tmp_path
):
    opts = ["MODEL.MOE.ROUTER", router, "MODEL.MOE.OUTPUT_BIAS", bias]
    config = make_config(*opts)
    released = make_released(config, ranks, 5, legacy, bias)
    stem = write_released(released, tmp_path / "x.pth")
    assert (
        convert("import", "swin-moe", stem, *cfg(*opts), "--output", tmp_path / "new").status == 0
    )
    model, expected = (
        load(tmp_path / "new", config),
        place(released, build_model(model_config(config), 5)).eval(),
    )
    assert_same(model.state_dict(), expected.state_dict())
    assert torch.equal(model(images), expected(images))
    newer = [] if legacy else ["--newer"]
    exported = ["--ranks", ranks, *newer, "--output", tmp_path / "y.pth"]
    assert convert("export", "swin-moe", tmp_path / "new", *exported)[::2] == (0, "")
    for ending in ("master", *(f"rank{rank}" for rank in range(ranks))):
        theirs, ours = (
            torch.load(f"{tmp_path}/{name}.pth.{ending}", weights_only=True)["model"]
            for name in "xy"
        )
        assert_same(parameters(theirs), ours)


def test_a_global_file_is_one_whole_model(convert, cfg, make_config, load, tmp_path):
    config = make_config()
    released = make_released(config, 1, 5)
    torch.save({"model": released.master | released.ranks[0]}, tmp_path / "x.pth.global")
    for i, source in enumerate(("x.pth", "x.pth.global")):
        new = tmp_path / f"new{i}"
        assert convert("import", "swin-moe", tmp_path / source, *cfg(), "--output", new).status == 0
        assert_same(
            load(new, config).state_dict(),
            place(released, build_model(model_config(config), 5)).state_dict(),
        )
    assert convert("export", "swin-moe", new, "--output", tmp_path / "y.pth").status == 0
    back = torch.load(tmp_path / "y.pth.global", weights_only=True)["model"]
    assert_same(back, parameters(released.master | released.ranks[0]))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "new0",
        "new1",
        "x.pth.global",
        "y.pth.global",
    ]


def test_rank_files_may_hold_the_whole_model_each(convert, cfg, make_config, load, tmp_path):
    config = make_config()
    released = make_released(config, 2, 5)
    for rank, state in enumerate(released.ranks):
        torch.save({"model": released.master | state}, tmp_path / f"x.pth.rank{rank}")
    assert (
        convert(
            "import", "swin-moe", tmp_path / "x.pth", *cfg(), "--output", tmp_path / "new"
        ).status
        == 0
    )
    assert_same(
        load(tmp_path / "new", config).state_dict(),
        place(released, build_model(model_config(config), 5)).state_dict(),
    )


@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 16])
def test_ours_to_theirs_to_ours(ranks, convert, cfg, make_config, tmp_path):
    stem = write_released(make_released(make_config(), 2, 5), tmp_path / "x.pth")
    assert convert("import", "swin-moe", stem, *cfg(), "--output", tmp_path / "ours").status == 0
    exported = ["--ranks", ranks, "--output", tmp_path / "sub" / "y.pth"]
    assert convert("export", "swin-moe", tmp_path / "ours", *exported)[::2] == (0, "")
    names = sorted(path.name for path in (tmp_path / "sub").iterdir())
    assert names == sorted(["y.pth.master", *(f"y.pth.rank{rank}" for rank in range(ranks))])
    again = [tmp_path / "sub" / "y.pth", *cfg(), "--output", tmp_path / "again"]
    assert convert("import", "swin-moe", *again).status == 0
    files = sorted(
        path.relative_to(tmp_path / "ours") for path in (tmp_path / "ours").rglob("*.safetensors")
    )
    assert len(files) == 1 + 3 * 4
    for file in files:
        assert (tmp_path / "ours" / file).read_bytes() == (tmp_path / "again" / file).read_bytes()


def test_exported_files_are_no_larger_than_what_they_hold(convert, cfg, make_config, tmp_path):
    stem = write_released(make_released(make_config(), 1, 5), tmp_path / "x.pth")
    assert convert("import", "swin-moe", stem, *cfg(), "--output", tmp_path / "ours").status == 0
    assert (
        convert(
            "export", "swin-moe", tmp_path / "ours", "--ranks", 4, "--output", tmp_path / "y.pth"
        ).status
        == 0
    )
    held = sum(
        v.nbytes for v in torch.load(tmp_path / "y.pth.rank0", weights_only=True)["model"].values()
    )
    assert (tmp_path / "y.pth.rank0").stat().st_size < held + 10_000


@pytest.mark.parametrize(("name", "ranks"), PUBLISHED)
def test_published_sizes_name_by_name(name, ranks):
    config = load_config(IN22K / f"swin_moe_{name}.yaml")
    with torch.device("meta"):
        model = build_model(model_config(config), 21841)
    released = make_released(config, ranks, 21841, device="meta")
    states = layouts.with_project_names(
        "swin-moe", [released.master | state for state in released.ranks]
    )
    state = layouts.joined(
        states, model, Sources(Path("x.pth"), [Path(f"x.pth.rank{r}") for r in range(ranks)])
    )
    assert compare(model.state_dict(), state) == ""
    back = layouts.split("swin-moe", state, ranks, legacy=True)
    theirs = parameters(released.master | released.ranks[-1])
    assert {k: list(v.shape) for k, v in back[-1].items()} == {
        k: list(v.shape) for k, v in theirs.items()
    }


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_published_small_with_8_experts_on_32_ranks(convert, tmp_path):
    name = "swin_moe_small_window12_192_8expert.yaml"
    config = load_config(IN22K / name)
    released = make_released(config, 32, 21841)
    stem = write_released(released, tmp_path / "x.pth")
    assert convert("import", "swin-moe", stem, "--cfg", IN22K / name, "--output", tmp_path / "new")[
        ::2
    ] == (0, "")
    model, expected = (build_model(model_config(config), 21841).eval() for _ in range(2))
    load_weights(open_checkpoint(tmp_path / "new"), model)
    place(released, expected)
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(173.3e6, abs=0.05e6)
    image = torch.randn(1, 3, 192, 192)
    with torch.no_grad():
        assert torch.equal(model(image), expected(image))
    assert (
        convert(
            "export", "swin-moe", tmp_path / "new", "--ranks", 32, "--output", tmp_path / "y.pth"
        ).status
        == 0
    )
    for first, second in zip(
        *(read_states(find_sources(tmp_path / x)) for x in ("x.pth", "y.pth")), strict=True
    ):
        assert_same(parameters(first), second)
