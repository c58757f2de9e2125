"""tests/ceilings.py names rooms that have grown, and ceilings that are too high."""

import pytest
from ceilings import FILE, ROOT, Ceiling, lowered, parsed, problems, raised, sizes
from chains import ConfigurationJourney, files_and_returns, forward_pass

TEXT = "# a comment: 3\nroom: 1000\nother room, words: 100  # a reason: two files\n"


def test_reads_the_numbers_and_the_reasons():
    ceilings = {"room": Ceiling(1000, ""), "other room, words": Ceiling(100, "a reason: two files")}
    assert parsed(TEXT) == ceilings


@pytest.mark.parametrize(
    ("measured", "says"),
    [
        ({"room": 1000}, []),
        ({"room": 1001}, ["room: 1001, at most 1000"]),
        ({"room": 969}, ["room: 969, far below its ceiling of 1000"]),
        ({}, ["room: has a ceiling in ceilings.txt, but does not exist"]),
        ({"room": 1000, "new": 1}, ["new: has no ceiling in ceilings.txt"]),
    ],
)
def test_names_what_does_not_fit(measured, says):
    found = problems(measured, {"room": Ceiling(1000, "")})
    assert len(found) == len(says)
    assert all(problem.startswith(start) for problem, start in zip(found, says, strict=True))


def test_a_ceiling_is_raised_with_a_new_reason():
    before = {"room": Ceiling(10, "old")}
    for now in (
        {"room": Ceiling(10, "old")},
        {"room": Ceiling(11, "new")},
        {"new": Ceiling(1, "")},
    ):
        assert raised(now, before) == []
    for reason in ("", "old"):
        [problem] = raised({"room": Ceiling(11, reason)}, before)
        assert problem.startswith("room: its ceiling was raised from 10 to 11")


def test_lowers_what_is_too_high_and_nothing_else():
    text = TEXT + "gone: 5\n"
    now = lowered(text, {"room": 900, "other room, words": 99})
    assert now == TEXT.replace("1000", "900")
    assert lowered(text, {"room": 1001, "other room, words": 101}) == TEXT


def test_counts_the_functions_of_a_pass():
    calls = forward_pass()
    names = {code.co_name for code in calls.functions}
    assert {"forward", "_forward", "make_plan"} <= names
    assert "moe_core/layer.py" in calls.files


def test_follows_the_configuration_from_file_to_file(tmp_path):
    """`train` hands it to `build` and to `Loop`, which keeps it and hands it to `build`, too."""
    files = {
        "run": "from app.build import build\nfrom app.loop import Loop\n"
        "def train(config: RunConfig):\n    build(config)\n    Loop(config).run()\n",
        "build": "def build(config: RunConfig): pass\n",
        "loop": "from app.build import build\nclass Loop:\n"
        "    def __init__(self, config: RunConfig): self.config = config\n"
        "    def run(self): build(self.config)\n",
        "section": "class RunConfig: pass\n",
    }
    for name, source in files.items():
        (tmp_path / "app").mkdir(exist_ok=True)
        (tmp_path / f"app/{name}.py").write_text(source)
    journey = ConfigurationJourney(tmp_path / "app")
    [start] = journey.functions["train"]
    journey.walk(start)
    assert journey.stays == [
        ("app/build.py", "build"),
        ("app/loop.py", "__init__"),
        ("app/build.py", "build"),
    ]
    visited, returns = files_and_returns(journey.stays)
    assert (len(visited), returns) == (2, 1)


def test_the_file_names_what_is_measured():
    """Without the chains, which take a run: `make lint` measures these, too."""
    measured = sizes(ROOT)
    found = problems(measured, parsed(FILE.read_text()))
    missing = [problem for problem in found if "no ceiling" in problem]
    assert missing == []
