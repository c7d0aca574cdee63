"""The card of an exported drafter: says what was measured, and only that."""

import dataclasses
import json

import pytest
import yaml

from configs.common import nano_drafter
from mimo_jax.train.card import CardFacts, Measured, write_card

FACTS = CardFacts(
    name="nano-dflash",
    target="mimo-nano",
    target_hash="00ff" * 8,
    drafter=nano_drafter(),
    num_parameters=787_712,
    data=["math: 1,200 prompts", "chat: 310 prompts"],
    num_steps=11_400,
    num_signals=None,
    sampling={"temperature": 0.8, "thinking": "off"},
    measured=[
        Measured("math", 0.0, 40, 5.6249, (0.904, 0.806)),
        Measured("chat", 1.0, 39, 1.667),
    ],
    provenance={
        "command": ["train.py", "--config", "c.py"],
        "revision": "abc",
        "date": "2026-11-30",
        "processor": "a processor",
        "packages": {"jax": "0.12.0"},
    },
)


def test_card_says_what_was_measured(tmp_path):
    text = write_card(tmp_path, FACTS).read_text()
    assert "| math | 0 | 40 | 5.62 | 0.90 0.81 |\n" in text
    assert "| chat | 1 | 39 | 1.67 | |\n" in text
    assert "| parameters | 787,712 |\n" in text
    assert "| context window of each layer | 128, 128 |\n" in text
    assert "it reads (their outputs, from 0) | 1, 2, 3, 4 |\n" in text
    assert "`" + "00ff" * 8 + "`" in text
    assert "- math: 1,200 prompts\n- chat: 310 prompts\n" in text
    assert "- 11,400 optimizer steps\n" in text
    assert '{"temperature": 0.8, "thinking": "off"}' in text
    assert "`train.py --config c.py` at revision abc" in text
    assert "(a processor, jax 0.12.0)" in text


def test_front_matter_is_yaml(tmp_path):
    text = write_card(tmp_path, FACTS).read_text()
    _, front, _ = text.split("---\n", 2)
    assert yaml.safe_load(front)["base_model"] == "mimo-nano"


def test_figures_stand_beside_the_card(tmp_path):
    write_card(tmp_path, FACTS)
    first, second = json.loads((tmp_path / "measured.json").read_text())
    assert first["accept_length"] == 5.6249
    assert second["acceptance"] == []


def test_counted_signals_are_told(tmp_path):
    facts = dataclasses.replace(FACTS, num_signals=10_123_456)
    assert ", 10,123,456 labelled slots\n" in write_card(tmp_path, facts).read_text()


def test_nothing_measured_is_no_card(tmp_path):
    with pytest.raises(ValueError, match="at least one measured accept length"):
        write_card(tmp_path, dataclasses.replace(FACTS, measured=[]))
    assert not (tmp_path / "README.md").exists()
