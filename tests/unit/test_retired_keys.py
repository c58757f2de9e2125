"""Files and checkpoints of earlier versions load: keys that are gone are named in one line with
what became of them, and a value that trained weights depend on is refused."""

import logging

import pytest
import yaml

from swinv2_moe.config import config_from_text, default_config, flatten, load, load_config
from swinv2_moe.errors import UserError


@pytest.fixture
def lines(caplog):
    """A function that returns the lines logged since its last call."""
    caplog.set_level(logging.WARNING)
    load._warn_once.cache_clear()

    def since():
        found = [record.getMessage() for record in caplog.records]
        caplog.clear()
        load._warn_once.cache_clear()
        return found

    return since


def nested(key, value):
    for name in reversed(key.split(".")):
        value = {name: value}
    return value


def another(value):
    """Another value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, str):
        return value + "x"
    if isinstance(value, list):
        return [item + 1 for item in value]
    return value + 1


@pytest.mark.parametrize("key", load.RETIRED)
def test_its_default_changes_nothing_and_is_reported_where_somebody_wrote_it(key, tmp_path, lines):
    value = load.RETIRED[key].default
    said = [f"{key} ({value!r}) is no key any more: {load.RETIRED[key].became}"]
    assert flatten(load_config(None, [key, str(value)])) == flatten(default_config())
    assert lines() == said
    file = tmp_path / "c.yaml"
    file.write_text(yaml.safe_dump(nested(key, value)))
    assert flatten(load_config(file)) == flatten(default_config())
    assert lines() == said
    text = yaml.safe_dump(nested(key, value))
    assert flatten(config_from_text(text, "run")) == flatten(default_config())
    assert lines() == []


@pytest.mark.parametrize("key", load.RETIRED)
def test_another_value_is_reported_or_refused(key, lines):
    retired = load.RETIRED[key]
    value = another(retired.default)
    text = yaml.safe_dump(nested(key, value))
    said = f"{key} ({value!r}) is no key any more: {retired.became}"
    if retired.shapes_weights:
        with pytest.raises(UserError) as caught:
            load_config(None, [key, str(value)])
        assert str(caught.value).startswith(f"{said}; commit ")
        with pytest.raises(UserError, match="run: its configuration cannot be used"):
            config_from_text(text, "run")
        return
    assert flatten(config_from_text(text, "run")) == flatten(default_config())
    assert lines() == [said]
    assert flatten(load_config(None, [key, str(value)])) == flatten(default_config())
    assert lines() == [said]


def test_old_values_are_read_in_their_old_type(monkeypatch, tmp_path):
    monkeypatch.setitem(load.RETIRED, "TRAIN.OLD", load.Retired(0.5, "it is 0.5", True))
    with pytest.raises(UserError, match=r"^--opts TRAIN\.OLD is 'much' \(str\), it must be of"):
        load_config(None, ["TRAIN.OLD", "much"])
    with pytest.raises(UserError, match=r"^TRAIN\.OLD \(1\.0\) is no key any more: it is 0\.5"):
        load_config(None, ["TRAIN.OLD", "1"])
    load_config(None, ["TRAIN.OLD", "0.5"])
