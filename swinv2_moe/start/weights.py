"""Which pretrained weights there are, and what they record of themselves: configuration, classes,
architecture."""

import os
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from safetensors import SafetensorError, safe_open
from yacs.config import CfgNode

from swinv2_moe.config import config_from_text
from swinv2_moe.errors import UserError, one_line
from swinv2_moe.files import MAX_YAML_CHARS, parse_json, read_bounded, read_json
from swinv2_moe.models.bundled import PACKAGED, PREFIX, bundled_file, packaged_file
from swinv2_moe.tables import in_words

T = TypeVar("T")
# Weights of timm that are looked for, the best first: their files in torch's cache, where timm
# without huggingface_hub puts them.
_BEST = {
    "swinv2_tiny_window8_256.ms_in1k": "swinv2_tiny_patch4_window8_256.pth",
    "tf_efficientnet_lite2.in1k": "tf_efficientnet_lite2-dcccb7df.pth",
}
_FIXED_SIZE = ("swinv2_tiny_window8_256.ms_in1k",)  # windows tile few sizes of image
_PACKAGED_AS = "tf_efficientnet_lite2.in1k"
_FEW, _MINUTES_FOR_FEW, _MINUTES = 200, 3.0, 10.0  # training pictures, TRAIN.MINUTES
_HUB_SECONDS = 5.0
_SHARE = 0.5  # of the minutes that a pass over the training pictures may take
_TIMED = 4  # pictures of a timed pass
_SMALLEST = 0.4  # the time of the smallest size of image that is tried, in units of the largest
_MAX_META = 1 << 28  # bytes of a checkpoint's meta.json


def trained_config(name: str) -> tuple[CfgNode, list[str]]:
    """The configuration that weights were trained with, and the names of their classes, empty if
    they are not known: of a run, of a checkpoint, or of a file of `convert-checkpoint export
    single`.

    Raises:
        UserError: there is no configuration.
    """
    path = Path(os.path.expanduser(name.removeprefix("local-dir:")))
    if name.startswith(PREFIX):
        path = bundled_file(name)
    where = f"MODEL.PRETRAINED {name}"
    if not path.exists() and not name.startswith("hf-hub:"):
        raise UserError(f"{where}: no such file or directory")
    try:
        text, class_names = _recorded(path)
    except (OSError, ValueError, SafetensorError, MemoryError) as error:
        raise UserError(f"{where}: cannot be read ({one_line(str(error))})") from error
    if text is None:
        named, _ = described(name)
        if named:
            raise UserError(
                f"{where}: is a {one_line(named)}; without --cfg only a dense model of timm can"
                " be used"
            )
        raise UserError(
            f"{where}: does not say what its model is; name a configuration by --cfg, or put"
            " timm's config.json beside it"
        )
    return config_from_text(text, where), class_names


def _recorded(path: Path) -> tuple[str | None, list[str]]:
    """The configuration, as YAML, and the names of the classes, as far as they are recorded."""
    content: dict[str, object] = {}
    if path.is_file() and path.suffix == ".safetensors":
        with safe_open(path, "np") as file:
            content |= file.metadata() or {}
        content["class_names"] = parse_json(str(content.get("class_names", "[]")))
    has_yaml = (path / "config.yaml").is_file()
    for meta in (path / "checkpoints" / "latest" / "meta.json", path / "meta.json"):
        if not meta.is_file():
            continue
        try:
            read = read_json(meta, _MAX_META)
        except (OSError, ValueError):
            if not has_yaml:
                raise
            continue  # a damaged checkpoint of a run, which may have others
        if isinstance(read, dict):
            content = read
    if has_yaml:
        content["config"] = read_bounded(path / "config.yaml", MAX_YAML_CHARS).decode()
    text, names = content.get("config"), content.get("class_names")
    if not isinstance(names, list) or not all(isinstance(one, str) for one in names):
        names = []
    return text if isinstance(text, str) else None, names


def described(name: str) -> tuple[str, list[str]]:
    """The architecture and the class names in a config.json of timm, in a folder or beside a file;
    empty without them."""
    path = Path(os.path.expanduser(name.removeprefix("local-dir:")))
    folder = path
    if path.is_file():
        folder = path.parent
    if not os.path.lexists(folder / "config.json"):
        return "", []
    from swinv2_moe.models.hub import label_names, read_timm_config  # imports torch

    content = read_timm_config(folder / "config.json")
    architecture = content.get("architecture")
    return architecture if isinstance(architecture, str) else "", label_names(content)


def best_weights(num_train: int, given: Mapping[str, object]) -> tuple[str, str]:
    """The best weights that this machine has or the hub gives at once: a value of
    MODEL.PRETRAINED, and why it is not a better one, as far as there is one.

    In this order: SwinV2-T and then EfficientNet-Lite2 of timm, from the caches of the hub and of
    torch or from the hub, if it gives them within 5 s (HF_HUB_OFFLINE=1: it is not asked);
    EfficientNet-Lite2 of the extra `teacher`; the package's own. On a CPU a pass over the training
    pictures must fit into half of TRAIN.MINUTES. Several processes take the package's own, since
    they might differ.

    Args:
        given: the keys that the user has set. With one of MODEL, it is the package's own.
    """
    own = f"{PREFIX}tiny"
    is_set = any(key.startswith(("MODEL.", "TRAIN.DISTILL.")) for key in given)
    if os.environ.get("WORLD_SIZE", "1") != "1" or is_set or given.get("DATA.CHANNELS", 3) != 3:
        return own, ""
    names = [one for one in _BEST if "DATA.IMG_SIZE" not in given or one not in _FIXED_SIZE]
    missing = [name for name in names if not is_cached(name)]
    downloaded = within(_HUB_SECONDS, download, missing)
    missing = [name for name in missing if name not in downloaded]
    places = {f"timm:{name}": name for name in names if name not in missing}
    if is_packaged():
        places[PACKAGED] = _PACKAGED_AS
    slow = []
    found = own
    for place, name in places.items():
        why = too_slow(name, num_train, given)
        if not why:
            found = place
            break
        slow.append(f"{place} is too slow, {why}")
    if missing and not found.startswith("timm:"):
        named = ", ".join(f"timm:{name}" for name in missing)
        slow.append(f"neither in a cache nor at once from the hub: {named}")
    return found, "; ".join(slow)


def minutes_for(num_train: int) -> float:
    """TRAIN.MINUTES on a CPU, if it is not given."""
    return _MINUTES_FOR_FEW if num_train < _FEW else _MINUTES


def is_packaged() -> bool:
    """Whether the package with weights is installed."""
    try:
        packaged_file("MODEL.PRETRAINED")
    except UserError:
        return False
    return True


def is_cached(name: str) -> bool:
    """Whether weights of timm in `_BEST` are on this machine."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(f"timm/{name}", "model.safetensors")
    return isinstance(found, str) or torch_cache(_BEST[name]).is_file()


def torch_cache(file: str) -> Path:
    """Where torch.hub keeps a file of weights."""
    cache = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    home = os.environ.get("TORCH_HOME", os.path.join(cache, "torch"))
    return Path(os.path.expanduser(home)) / "hub" / "checkpoints" / file


def download(name: str) -> None:
    """Bring weights of timm into the hub's cache. Raises URLError where there is no network, and
    any of huggingface_hub's errors."""
    from huggingface_hub import constants, hf_hub_download

    request = urllib.request.Request(constants.ENDPOINT, method="HEAD")
    # huggingface_hub would try again, for half a minute
    urllib.request.urlopen(request, timeout=_HUB_SECONDS).close()
    hf_hub_download(f"timm/{name}", "model.safetensors", etag_timeout=_HUB_SECONDS)


def within(seconds: float, work: Callable[[str], object], names: list[str]) -> list[str]:
    """The names for which `work` has ended without an error after so many seconds. What has not
    ended goes on until the program ends: a download then is in the cache for the next time."""
    from huggingface_hub import constants
    from huggingface_hub.utils import disable_progress_bars, logging

    if constants.HF_HUB_OFFLINE or not names:
        return []
    logging.set_verbosity_error()  # of retries
    disable_progress_bars()
    done: list[str] = []

    def run(name: str) -> None:
        try:
            work(name)
        except Exception:  # no connection, in one of many forms; the next best weights are taken
            return
        done.append(name)

    threads = [threading.Thread(target=run, args=(name,), daemon=True) for name in names]
    for thread in threads:
        thread.start()
    until = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    return list(done)


def too_slow(name: str, num_train: int, given: Mapping[str, object]) -> str:
    """Why a model of timm does not fit into the time, by a timed pass; "" if it does."""
    import torch

    minutes = given.get("TRAIN.MINUTES", minutes_for(num_train))
    assert isinstance(minutes, float)
    has_gpu = torch.cuda.is_available() and given.get("DEVICE") != "cpu"
    if not minutes or ("TRAIN.MINUTES" not in given and has_gpu):
        return ""
    seconds = seconds_of_a_picture(name) * num_train
    if seconds <= 60 * minutes * _SHARE:
        return ""
    return f"one pass over the pictures takes {in_words(seconds)}"


def seconds_of_a_picture(name: str) -> float:
    """Seconds of a forward pass of a model of timm on this CPU, with random weights, at the
    smallest size of image that is tried."""
    import timm
    import torch

    from swinv2_moe.models.timm_names import settings

    model = timm.create_model(name).eval()
    side = int(str(settings(name)["DATA.IMG_SIZE"]))
    images = torch.zeros(_TIMED, 3, side, side)
    with torch.inference_mode():
        for _ in range(2):  # the first pass also takes memory
            began = time.perf_counter()
            model(images)
    return _SMALLEST * (time.perf_counter() - began) / _TIMED
