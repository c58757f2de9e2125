"""The quickstart compares a model with experts and the dense one, whatever --opts says."""

import swinv2_moe.train.run
from swinv2_moe.commands import quickstart

SUMMARY = {"val_top1": 50.0, "best_val_top1": 50.0, "parameters": 1, "active_macs": 1}
SUMMARY |= {"images_per_second": 1.0, "seconds": 1.0}


def test_opts_set_the_number_of_experts_but_not_of_the_dense_model(tmp_path, monkeypatch, capsys):
    trained = []

    def train(config, resume_command):
        trained.append(config.MODEL.MOE.NUM_EXPERTS)
        return SUMMARY

    monkeypatch.setattr(swinv2_moe.train.run, "train", train)
    arguments = ["quickstart", "--output", str(tmp_path / "out")]
    arguments += ["--opts", "MODEL.MOE.NUM_EXPERTS", "4"]
    monkeypatch.setattr("sys.argv", arguments)
    quickstart.main()
    assert trained == [4, 0]
    assert "4 experts" in capsys.readouterr().out


def test_a_second_quickstart_has_a_directory_of_its_own(tmp_path):
    made = [quickstart.make_first_free(tmp_path / "out").name for _ in range(3)]
    assert made == ["out", "out-2", "out-3"]
