"""Where the experts and routers of an upcycled model start: clusters of the dense model's tokens.

The tokens that reach an FFN, in a sample of training images, form as many clusters as the layer has
experts (spherical k-means). The router starts at their centroids, so that each expert begins with
the tokens of a cluster. Copies of the whole FFN keep the function. An expert with fewer hidden
units (MODEL.MOE.HIDDEN_RATIO below 1) gets those with the largest share in the output of its
cluster's tokens; then the function is kept in part.

Sources: Cluster-aware Upcycling, arXiv 2604.13508: spherical k-means and routers at centroids; its
truncated SVD of the experts and its loss are left out, since copies keep the function. Choice of
units by their activations: MoE Jetpack, arXiv 2406.04801, section 3.1 (importance-based weight
sampling), there for all experts alike.
"""

# T tokens, E experts, H hidden dim of an expert, M model dim

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_core import MoELayer, moe_layers
from swinv2_moe.data.build import Data, evaluation_loader
from swinv2_moe.data.section import DataConfig
from swinv2_moe.data.sources import Subset
from swinv2_moe.errors import UserError
from swinv2_moe.models import MoEModel, block_name
from swinv2_moe.train.routing import evenly_spaced, sample_tokens

IMAGES = 512  # of the sample
BATCH_SIZE = 8  # not the run's, which depends on the number of ranks; the sample does not
TOKENS = 8192  # of a layer


class Start(NamedTuple):
    """The start of a layer."""

    router: Tensor  # the values of its parameter with an entry for each expert
    units: Tensor | None  # [E, H] int64, the dense FFN's hidden units of each expert; None: all


def sample_images(config: DataConfig, data: Data) -> Iterator[Tensor]:
    """Batches of training images, evenly spaced, with the transform of evaluation."""
    source = data.train_loader.dataset.source
    subset = Subset(source, evenly_spaced(len(source), IMAGES))
    for batch in evaluation_loader(replace(config, batch_size=BATCH_SIZE), subset):
        yield batch.images[batch.targets >= 0]


def find_starts(
    dense: MoEModel, model: MoEModel, batches: Iterable[Tensor], seed: int
) -> dict[str, Start]:
    """The starts of the MoE layers of a model by name, from the dense model.

    Args:
        dense: the model without experts, with its weights.
        batches: images [B, C, S, S] on the device of `dense`.

    Raises:
        UserError: a layer has fewer tokens than experts.
    """
    layers = moe_layers(model)
    ffns = {name: dense.get_submodule(f"{block_name(name)}.mlp") for name in layers}
    tokens = sample_tokens(dense.eval(), ffns, batches, -(-TOKENS // IMAGES), seed)
    starts = {}
    for name, layer in layers.items():
        if len(tokens[name]) < layer.config.num_experts:
            raise UserError(
                f"MODEL.UPCYCLE is 'clusters': {name} has {layer.config.num_experts} experts and"
                f" only {len(tokens[name])} tokens in the sample"
            )
        starts[name] = start_of(layer, ffns[name].cpu(), tokens[name], seed)
    return starts


@torch.no_grad()
def start_of(layer: MoELayer, ffn: Any, tokens: Tensor, seed: int) -> Start:
    """The start of a layer, from tokens [T, M] of the dense `ffn` with fc1, act and fc2."""
    from sklearn.cluster import MiniBatchKMeans  # here, since its import is slow

    config = layer.config
    is_cosine = config.router == "cosine"
    features = tokens
    if is_cosine:
        features = layer.router.get_submodule("projector")(tokens)
    features = F.normalize(features, dim=1)
    kmeans = MiniBatchKMeans(config.num_experts, random_state=seed, n_init=3, batch_size=1024)
    kmeans.fit(features.numpy())
    centroids = F.normalize(torch.from_numpy(kmeans.cluster_centers_).to(features), dim=1)
    clusters = (features @ centroids.T).argmax(1)
    router = centroids.T
    if not is_cosine:
        # The logits of a token differ by 1 (standard deviation), as those of a random router do.
        router = centroids / (tokens @ centroids.T).std(1).mean().clamp(min=1e-6)
    units = None
    if config.hidden_dim < ffn.fc1.out_features:
        units = _units(ffn, tokens, clusters, config.num_experts, config.hidden_dim)
    return Start(router.contiguous(), units)


def _units(ffn: Any, tokens: Tensor, clusters: Tensor, num_experts: int, hidden_dim: int) -> Tensor:
    """For each cluster the hidden units with the largest share in its tokens' output: the mean of
    their squares, times the square of their column of fc2. int64 [E, H]."""
    shares = ffn.act(ffn.fc1(tokens)).square() * ffn.fc2.weight.square().sum(0)  # [T, units]
    units = []
    for e in range(num_experts):
        mine = shares[clusters == e]
        if not len(mine):
            mine = shares
        units.append(mine.mean(0).topk(hidden_dim).indices.sort().values)
    return torch.stack(units)


@torch.no_grad()
def set_routers(model: nn.Module, starts: dict[str, Start]) -> None:
    """Set the routers of layers, by name, to their starts."""
    layers = moe_layers(model)
    for name, start in starts.items():
        router = layers[name].router
        parameter = "weight"
        if layers[name].config.router == "cosine":
            parameter = "sim_matrix"
        router.get_parameter(parameter).copy_(start.router)
