"""Tutel's state dicts: its documented layout computes what our layer does; any number of ranks goes
there and back."""

# T tokens, E experts, W ranks, M model dim, H hidden dim

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_core import MoEConfig, MoELayer
from moe_core.tutel import count_tutel_experts, from_tutel, to_tutel

M, H = 12, 16


def tutel_state(
    experts: int, ranks: int, legacy: bool = False, gates: int = 1, cosine: bool = False
) -> list[dict]:
    """What Tutel's layer saves on each rank, below `moe.`, and a parameter of something else."""
    new = torch.Generator().manual_seed(experts * 100 + ranks)
    local, parts = max(experts // ranks, 1), max(ranks // experts, 1)
    bias = (1,) if legacy else ()
    shared = {"other.weight": torch.randn(3, generator=new)}
    for gate in range(gates):
        name = f"moe.gates.{gate}"
        if cosine:
            shared[f"{name}.cosine_projector.weight"] = torch.randn(256, M, generator=new)
            shared[f"{name}.cosine_projector.bias"] = torch.randn(256, generator=new)
            shared[f"{name}.sim_matrix"] = torch.randn(256, experts, generator=new)
            shared[f"{name}.temperature"] = torch.randn(1, generator=new)
        else:
            shared[f"{name}.wg.weight"] = torch.randn(experts, M, generator=new)
    if not legacy:
        shared["moe._num_global_experts"] = torch.tensor(experts)
    shapes = {"fc1_w": (H // parts, M), "fc1_bias": (*bias, H // parts), "fc2_w": (H // parts, M)}
    shapes["fc2_bias"] = (*bias, -(-M // parts))
    return [
        shared
        | {
            f"moe.experts.batched_{k}": torch.randn(local, *s, generator=new)
            for k, s in shapes.items()
        }
        for _ in range(ranks)
    ]


@pytest.mark.parametrize("cosine", [False, True])
def test_a_plain_computation_from_tutels_tensors_is_our_layer(cosine):
    state = tutel_state(experts=4, ranks=1, cosine=cosine)[0]
    router = "cosine" if cosine else "linear"
    layer = MoELayer(MoEConfig(M, H, 4, capacity_factor=0.0, activation="relu", router=router))
    ours = from_tutel([state])
    del ours["other.weight"]
    layer.load_state_dict({name.removeprefix("moe."): value for name, value in ours.items()})
    layer.double()
    x = torch.randn(20, M, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    gate = {k.removeprefix("moe.gates.0."): v.double() for k, v in state.items()}
    if cosine:
        projected = x @ gate["cosine_projector.weight"].T + gate["cosine_projector.bias"]
        logits = F.normalize(projected, dim=1) @ F.normalize(gate["sim_matrix"], dim=0)
        logits = logits * gate["temperature"].exp()
    else:
        logits = x @ gate["wg.weight"].T
    names = ("fc1_w", "fc1_bias", "fc2_w", "fc2_bias")
    w1, b1, w2, b2 = (state[f"moe.experts.batched_{name}"].double() for name in names)
    values, experts = logits.softmax(1).max(1)
    rows = []
    for token, value, e in zip(x, values, experts, strict=True):
        rows.append(value * ((token @ w1[e].T + b1[e]).relu() @ w2[e] + b2[e]))
    torch.testing.assert_close(layer(x)[0], torch.stack(rows))


@pytest.mark.parametrize(("experts", "ranks"), [(4, 2), (2, 8), (4, 4)])
def test_where_each_ranks_slice_goes(experts, ranks):
    states = tutel_state(experts, ranks)
    whole = from_tutel(states)
    for rank, state in enumerate(states):
        for theirs, ours in zip(
            ("fc1_w", "fc1_bias", "fc2_w", "fc2_bias"), ("w1", "b1", "w2", "b2"), strict=True
        ):
            piece, target = state[f"moe.experts.batched_{theirs}"], whole[f"moe.experts.{ours}"]
            if ranks > experts:
                parts, length = ranks // experts, piece.shape[1]
                own = slice(rank % parts * length, (rank % parts + 1) * length)
                assert torch.equal(target[rank // parts, own], piece[0])
            else:
                first = rank * experts // ranks
                assert torch.equal(target[first : first + experts // ranks], piece)


EXPERTS_AND_RANKS = [
    (e, w)
    for e in range(1, 7)
    for w in range(1, 65)
    if e % w == 0 or (w % e == 0 and H % (w // e) == 0)
]


@settings(max_examples=60)
@given(
    experts_and_ranks=st.sampled_from(EXPERTS_AND_RANKS),
    legacy=st.booleans(),
    gates=st.integers(1, 3),
    cosine=st.booleans(),
)
def test_there_and_back_is_equal_to_the_bit(experts_and_ranks, legacy, gates, cosine):
    experts, ranks = experts_and_ranks
    states = tutel_state(experts, ranks, legacy, gates, cosine)
    whole = from_tutel(states)
    shapes = [list(whole[f"moe.experts.{name}"].shape) for name in ("w1", "b1", "w2", "b2")]
    assert shapes == [[experts, H, M], [experts, H], [experts, H, M], [experts, M]]
    numbers = {name.split(".")[2] for name in whole if name.startswith("moe.router.")}
    if gates > 1:
        assert numbers == {str(number) for number in range(gates)}
    else:
        assert "0" not in numbers
    back = to_tutel(whole, ranks, legacy)
    is_padded = M % max(ranks // experts, 1) != 0
    for before, after in zip(states, back, strict=True):
        assert before.keys() == after.keys()
        for name in before:
            assert before[name].shape == after[name].shape
            if not (is_padded and name.endswith("fc2_bias")):  # what pads is no parameter
                assert torch.equal(before[name], after[name]), name
    again = from_tutel(back)
    assert again.keys() == whole.keys()
    assert all(torch.equal(again[name], whole[name]) for name in whole)


def test_names_at_the_top_level_and_of_other_modules():
    state = tutel_state(2, 1)[0]
    layer = {name.removeprefix("moe."): value for name, value in state.items()}
    layer["myexperts.w1"] = torch.zeros(1)
    ours = from_tutel([layer])
    assert set(ours) == {
        "other.weight",
        "myexperts.w1",
        "router.weight",
        *(f"experts.{n}" for n in ["w1", "b1", "w2", "b2"]),
    }
    assert to_tutel(ours)[0].keys() == layer.keys()


def test_absent_biases_become_zeros():
    state = from_tutel(tutel_state(2, 1))
    del state["moe.experts.b1"], state["moe.experts.b2"]
    theirs = to_tutel(state, 4)[3]
    assert torch.equal(theirs["moe.experts.batched_fc1_bias"], torch.zeros(1, H // 2))
    assert torch.equal(theirs["moe.experts.batched_fc2_bias"], torch.zeros(1, M // 2))


def break_state(states: list[dict], what: str) -> list[dict]:
    name = "moe.experts.batched_fc1_bias"
    if what == "missing":
        del states[1][name]
    elif what == "shape":
        states[1][name] = torch.zeros(2, H + 1)
    elif what == "dims":
        states[0][name] = torch.zeros(2, 3, H)
    elif what == "count":
        states[0]["moe._num_global_experts"] = torch.tensor(5)
    elif what == "float count":
        states[0]["moe._num_global_experts"] = torch.tensor(float("inf"))
    elif what == "many counts":
        states[0]["moe._num_global_experts"] = torch.ones(3)
    elif what == "twice":
        states[0]["moe.router.weight"] = torch.zeros(4, M)
    elif what == "no gate":
        del states[0]["moe.gates.0.wg.weight"], states[0]["moe._num_global_experts"]
    return states[:1] if what == "rank" else states


NOT_CLEAR = "moe: how many experts is not clear"


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("missing", r"rank 1 has no moe\.experts\.batched_fc1_bias"),
        ("shape", r"fc1_bias has shape \[2, 17\] on rank 1, \[2, 16\] on rank 0"),
        ("dims", r"rank 0: moe\.experts\.batched_fc1_bias has shape \[2, 3, 16\]"),
        ("count", rf"{NOT_CLEAR} \(gates\.0\.wg\.weight: 4, _num_global_experts: 5\)"),
        ("float count", rf"{NOT_CLEAR} .*_num_global_experts: inf"),
        ("many counts", rf"{NOT_CLEAR} .*_num_global_experts: \[3\]"),
        ("twice", r"both moe\.gates\.0\.wg\.weight and moe\.router\.weight are present"),
        ("no gate", rf"{NOT_CLEAR} \(neither gates nor _num_global_experts\)"),
        ("rank", r"1 ranks with 2 each do not make the 4 experts"),
    ],
)
def test_what_does_not_add_up_is_named(what, message):
    with pytest.raises(ValueError, match=message):
        from_tutel(break_state(tutel_state(4, 2), what))


@pytest.mark.parametrize(
    ("ranks", "message"),
    [(3, "do not divide over 3 ranks"), (0, r"num_ranks \(0\)"), (20, "by the 5 ranks")],
)
def test_ranks_that_do_not_divide(ranks, message):
    with pytest.raises(ValueError, match=message):
        to_tutel(from_tutel(tutel_state(4, 1)), ranks)


def test_counting_experts():
    first, second = tutel_state(4, 2)[0], tutel_state(2, 2, legacy=True, cosine=True)[0]
    both = first | {name.replace("moe.", "blocks.1.moe."): value for name, value in second.items()}
    assert count_tutel_experts(both) == {"moe": 4, "blocks.1.moe": 2}
    assert count_tutel_experts({"weight": torch.zeros(1)}) == {}
