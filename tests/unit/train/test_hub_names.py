"""MODEL.PRETRAINED timm:NAME and hf-hub:OWNER/NAME, with a cache in a temporary folder and without
a network."""

import shutil
from pathlib import Path

import pytest
import timm
import torch
from huggingface_hub import constants
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import save_file
from trainer_cases import make_trainer as make_rank_trainer

from moe_core import moe_layers
from swinv2_moe.convert.hub import export_hub
from swinv2_moe.errors import UserError
from swinv2_moe.models import hub
from swinv2_moe.models.hub import fetch_weights, is_hub_name, timm_config, windows_of_config
from swinv2_moe.start.initial import load_pretrained, settings_of_weights

TINY = "swinv2_tiny_window8_256.ms_in1k"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """huggingface_hub's cache: an empty folder; there is no connection."""
    directory = tmp_path / "cache"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(directory))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return directory


def snapshot(cache: Path, repository: str) -> Path:
    """The folder of a repository's files in the cache."""
    root = cache / f"models--{repository.replace('/', '--')}"
    commit = "0" * 40
    (root / "refs").mkdir(parents=True)
    (root / "refs" / "main").write_text(commit)
    directory = root / "snapshots" / commit
    directory.mkdir(parents=True)
    return directory


def test_names():
    for value in ("timm:swinv2_tiny", "hf-hub:me/mine"):
        assert is_hub_name(value)
        assert not is_hub_name(f"output/{value}")


def test_a_file_in_the_cache_needs_no_connection(cache):
    file = snapshot(cache, f"timm/{TINY}") / "model.safetensors"
    file.write_bytes(b"content")
    assert fetch_weights(f"timm:{TINY}") == file
    assert fetch_weights("timm:swinv2_tiny_window8_256") == file  # its default weights
    assert fetch_weights(f"hf-hub:timm/{TINY}") == file


def test_an_older_repository_has_a_pickle(cache):
    file = snapshot(cache, "me/old") / "pytorch_model.bin"
    file.write_bytes(b"content")
    assert fetch_weights("hf-hub:me/old") == file


def test_what_is_not_in_the_cache_is_downloaded(tmp_path, monkeypatch):
    asked = []

    def download(repository, file, revision=None, local_files_only=False):
        asked.append((repository, file, revision, local_files_only))
        if local_files_only:
            raise LocalEntryNotFoundError("not in the cache")
        return str(tmp_path / file)

    monkeypatch.setattr(hub, "hf_hub_download", download)
    assert fetch_weights("hf-hub:me/mine@v2") == tmp_path / "model.safetensors"
    assert asked[-1] == ("me/mine", "model.safetensors", "v2", False)


@pytest.mark.parametrize("name", ["test_vit.r160_in1k", "test_convnext2.r160_in1k"])
def test_a_run_starts_from_any_model_in_the_cache(cache, name, tmp_path, monkeypatch):
    """Dense and upcycled: in a first step they have the same loss, that of timm's model with the
    same classifier; images are prepared as timm says."""
    torch.manual_seed(0)
    dense = timm.create_model(name.partition(".")[0])
    with torch.no_grad():
        for parameter in dense.parameters():  # scales of layers start at 1e-6
            parameter.add_(0.1 * torch.randn_like(parameter))
    save_file(dense.state_dict(), snapshot(cache, f"timm/{name}") / "model.safetensors")
    images = torch.randn(3, 3, 64, 64)
    overlay = {"state_dict": dense.state_dict()}
    size = {"img_size": 64} if name.startswith("test_vit") else {}  # its positions are resized
    dense = timm.create_model(name, pretrained=True, pretrained_cfg_overlay=overlay, **size)
    expected = dense.eval().forward_features(images)
    keys = f"MODEL.TYPE timm MODEL.NAME {name} DATA.IMG_SIZE 64 MODEL.PRETRAINED timm:{name}"
    keys += " MODEL.CLASS_MAP new MODEL.MOE.BLOCKS []"
    experts = "MODEL.UPCYCLE weights MODEL.MOE.TOP_K 2 MODEL.MOE.NORMALIZE_GATES True"
    for more, count in (("MODEL.MOE.NUM_EXPERTS 0", 0), (experts, 2)):
        trainer = make_rank_trainer(0, 1, f"{keys} {more}")
        model = trainer.step.model.eval()
        load_pretrained(trainer.config.model, model, trainer.world, trainer.data.class_names)
        assert len(moe_layers(model)) == count
        # fp32: two experts' results are added in place of one
        found = model.forward_features(images)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_offline_the_message_says_what_to_do(cache):
    with pytest.raises(UserError) as caught:
        fetch_weights(f"timm:{TINY}")
    message = str(caught.value)
    assert message.startswith(f"MODEL.PRETRAINED timm:{TINY}: ")
    assert f"https://huggingface.co/timm/{TINY}/resolve/main/model.safetensors" in message
    assert f"copy models--timm--{TINY} from another machine's cache into {cache}" in message
    assert "\n" not in message


def test_names_that_cannot_be_used(cache):
    for name, message in (
        ("timm:swinv2_tiny_window8_265.ms_in1k", f"no such model; did you mean timm:{TINY}"),
        ("timm:swinv2_tiny_window8_256.nothing", "no such model"),
        ("timm:swin_moe_small_window12_192", "has no weights of it at the hub"),
        ("hf-hub:a/b/c", "hf-hub:a/b/c: its weights are not in the cache and cannot be downloaded"),
    ):
        with pytest.raises(UserError, match=message):
            fetch_weights(name)


def test_the_windows_of_timms_weights():
    name = "timm:swinv2_base_window12to16_192to256.ms_in22k_ft_in1k"
    vit = "timm:vit_tiny_patch16_224"
    for model, windows in ((name, [12, 12, 12, 6]), (f"timm:{TINY}", [8] * 4), (vit, [])):
        assert windows_of_config(timm_config(model)) == windows


def test_settings_that_are_not_in_the_cache_are_said(cache):
    directory = snapshot(cache, "me/mine")
    (directory / "model.safetensors").write_bytes(b"content")
    assert timm_config("hf-hub:me/mine") is None
    trained = settings_of_weights("hf-hub:me/mine", 4)
    assert trained.line.startswith("its config.json is not in the cache and cannot be downloaded")
    assert trained.values == {}
    (directory / "config.json").write_text('{"pretrained_cfg": {"mean": [')
    with pytest.raises(UserError, match=r"config\.json: does not describe the weights beside it"):
        settings_of_weights("hf-hub:me/mine", 4)


def load(make_trainer, name, keys=None):
    trainer = make_trainer({"MODEL.PRETRAINED": name} | (keys or {}))
    model, names = trainer.step.model, trainer.data.class_names
    load_pretrained(trainer.config.model, model, trainer.world, names)
    return model


def test_dense_weights_of_timm(cache, make_trainer):
    """timm's own class at the size of the tests, with another head."""
    size = {"img_size": 16, "patch_size": 2, "window_size": 4, "num_classes": 7}
    size |= {"embed_dim": 16, "depths": (1, 1, 1), "num_heads": (2, 4, 8)}
    dense = timm.create_model("swinv2_tiny_window8_256", **size)
    save_file(dense.state_dict(), snapshot(cache, "me/dense") / "model.safetensors")
    keys = {"MODEL.CLASS_MAP": "new", "MODEL.UPCYCLE": "weights"}
    model = load(make_trainer, "hf-hub:me/dense", keys)
    ffn = dense.layers[1].blocks[0].mlp
    experts = model.layers[1].blocks[0].mlp.moe.experts
    for expert in range(4):
        assert torch.equal(experts.w1[expert], ffn.fc1.weight)
    first, expected = (each.layers[0].blocks[0].mlp.fc1.weight for each in (model, dense))
    assert torch.equal(first, expected)
    with pytest.raises(UserError, match=r"head\.fc\.weight.*MODEL\.CLASS_MAP new"):
        load(make_trainer, "hf-hub:me/dense", keys | {"MODEL.CLASS_MAP": ""})


def test_other_windows_are_refused(cache, make_trainer):
    (snapshot(cache, f"timm/{TINY}") / "model.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match=r"windows of \[8, 8, 8, 8\].*PRETRAINED_WINDOW_SIZES"):
        load(make_trainer, f"timm:{TINY}")


def on_a_rank(rank, cache, source, calls):
    """A download makes the file of `source` appear in the cache, and leaves a line in `calls`."""

    def download(*args, **kwargs):
        if not kwargs.get("local_files_only"):
            with calls.open("a") as file:
                file.write(f"rank {rank}\n")
            shutil.copytree(source, snapshot(cache, "me/moe"), dirs_exist_ok=True)
        return original(*args, **kwargs | {"local_files_only": True})

    original = hub.hf_hub_download
    constants.HF_HUB_CACHE = str(cache)
    hub.hf_hub_download = download
    trainer = make_rank_trainer(rank, 2, "MODEL.PRETRAINED hf-hub:me/moe MODEL.MOE.NUM_EXPERTS 4")
    model = trainer.step.model
    load_pretrained(trainer.config.model, model, trainer.world, trainer.data.class_names)
    weights = timm.create_model(f"local-dir:{source}", pretrained=True)
    for name, layer in moe_layers(model).items():
        full = weights.get_submodule(name).experts
        part = slice(2 * rank, 2 * rank + 2)
        assert torch.equal(layer.experts.w1, full.w1[part])
        assert torch.equal(layer.experts.b2, full.b2[part])


def test_a_model_with_experts_on_one_rank_and_on_two(
    cache, make_trainer, save, run_processes, tmp_path
):
    """What `export hub` wrote. Of two ranks one downloads, and each has its own experts."""
    trainer = make_trainer({"SEED": 3})
    before = trainer.step.model.state_dict()
    exported = tmp_path / "exported"
    export_hub(save(trainer, tmp_path / "before"), exported)
    shutil.copytree(exported, snapshot(cache, "me/moe"), dirs_exist_ok=True)
    found = load(make_trainer, "hf-hub:me/moe").state_dict()
    assert all(torch.equal(found[name], before[name]) for name in before)
    run_processes(on_a_rank, 2, tmp_path / "other_cache", exported, tmp_path / "calls")
    assert (tmp_path / "calls").read_text() == "rank 0\n"
