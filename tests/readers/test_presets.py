"""What a user may call a model, and what happens when nothing is called that."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bridge_memory.readers import list_presets, model_from_hf_config, model_from_json_text, presets, resolve_model
from bridge_memory.readers.presets import preset_path
from bridge_memory.spec import SpecError

LLAMA = Path(preset_path("meta-llama/Meta-Llama-3-8B"))


def refusal(source: str) -> str:
    with pytest.raises(SpecError) as caught:
        resolve_model(source)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_every_preset_is_read_under_its_own_name() -> None:
    assert len(list_presets()) == 66
    for preset in list_presets():
        assert resolve_model(preset).name == preset


def test_case_and_a_missing_org_do_not_matter() -> None:
    full = resolve_model("deepseek-ai/DeepSeek-V3")
    assert resolve_model("DEEPSEEK-AI/deepseek-v3") == full
    assert resolve_model("deepseek-v3") == full


def test_a_bare_name_of_two_presets_lists_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presets, "list_presets", lambda: ["a/same", "b/same"])
    line = refusal("same")
    assert "a/same" in line and "b/same" in line


def test_a_path_is_a_file_or_a_folder_that_holds_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "my-llama"
    folder.mkdir()
    (folder / "config.json").write_text(LLAMA.read_text())
    layers = resolve_model("meta-llama/Meta-Llama-3-8B").layers
    for source in (folder, folder / "config.json"):
        model = resolve_model(str(source))
        assert (model.name, model.layers) == ("my-llama", layers)
    monkeypatch.chdir(tmp_path)
    assert resolve_model("my-llama").layers == layers


def test_json_text_is_a_config() -> None:
    assert model_from_json_text(LLAMA.read_text()).layers == resolve_model("Meta-Llama-3-8B").layers


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (LLAMA.read_text()[:200], ["not valid JSON", "line"]),
        ("", ["not valid JSON"]),
        ("[1, 2]", ["JSON object"]),
        ("[" * 100_000, ["not valid JSON"]),
        ('{"model_type": "llama", "hidden_size": ' + "9" * 5000 + "}", ["not valid JSON"]),
    ],
)
def test_broken_json_is_one_line(text: str, words: list[str]) -> None:
    with pytest.raises(SpecError) as caught:
        model_from_json_text(text)
    assert "\n" not in str(caught.value)
    assert all(word in str(caught.value) for word in words)


def test_what_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "binary.json").write_bytes(b"\xff\x00\x01\xfe")
    (tmp_path / "empty").mkdir()
    assert "text file" in refusal(str(tmp_path / "binary.json"))
    assert "config.json" in refusal(str(tmp_path / "empty"))
    assert "no file" in refusal(str(tmp_path / "absent.json"))
    assert "no file" in refusal("./absent")
    assert "empty" in refusal("  ")


def test_a_near_miss_is_answered_with_presets() -> None:
    assert "Qwen/Qwen3-30B-A3B" in refusal("qwen3-30b-a3")
    assert "bridge-memory models" in refusal("zzzzzz")


def test_the_shipped_configs_carry_no_quantization_and_no_remote_code() -> None:
    """They describe what is trained; an fp8 checkpoint's block scales are no part of it."""
    for preset in list_presets():
        config = json.loads(Path(preset_path(preset)).read_text())
        assert not {"quantization_config", "auto_map"} & set(config)


@pytest.mark.parametrize(
    ("name", "scaling", "yarn"),
    [
        ("openai/gpt-oss-120b", None, True), ("deepseek-ai/DeepSeek-V3", None, False),
        ("meta-llama/Llama-3.1-8B", None, False),
        ("Qwen/Qwen3-8B", {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, True),
    ],
)  # fmt: skip
def test_yarn_outside_of_latent_attention(name: str, scaling: dict[str, Any] | None, yarn: bool) -> None:
    """Bridge makes these models with ``position_embedding_type`` "yarn", and fuses no rotation then."""
    config = json.loads(Path(preset_path(name)).read_text(encoding="utf-8"))
    assert model_from_hf_config({**config, "rope_scaling": scaling} if scaling else config, name).yarn is yarn
