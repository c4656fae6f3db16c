"""peft's adapter_config.json: what is read, and what is refused by name."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from bridge_memory import SpecError
from bridge_memory.cli import main
from bridge_memory.engines.peft import adapter_units
from bridge_memory.inventory.stack import chunk_units
from bridge_memory.readers.engines.peft import _KNOWN, DEFAULT_TARGETS
from bridge_memory.readers.engines.run import settings_from_files
from bridge_memory.readers.engines.settings import Specified
from bridge_memory.spec import ImplementationSpec, PeftSpec, PrecisionSpec, RunSpec
from bridge_memory.spec.layout import layout
from bridge_memory.spec.parts import DataParallelSpec
from bridge_memory.tapes.context import context_of


def read(folder: Path, **config: Any) -> dict[str, Any]:
    """Fields of the group ``peft``."""
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({"peft_type": "LORA", **config}))
    settings = settings_from_files(peft_config=str(path))
    settings.diagnostics.check()
    return settings.groups["peft"]


def test_linears_that_nobody_names_are_pefts_own_choice(tmp_path: Path) -> None:
    """``utils/constants.py``; a type that peft does not know is refused by it too."""
    path = tmp_path / "adapter_config.json"
    path.write_text('{"peft_type": "LORA", "r": 8}')
    for kind, targets in DEFAULT_TARGETS.items():
        settings = settings_from_files(peft_config=str(path), specified=Specified(model_type=kind))
        settings.diagnostics.check()
        assert settings.groups["peft"]["target_modules"] == targets
    with pytest.raises(SpecError, match="target_modules is missing, and peft knows none for qwen3_moe"):
        settings_from_files(peft_config=str(path), specified=Specified(model_type="qwen3_moe")).diagnostics.check()
    theirs = pytest.importorskip("peft.utils.constants").TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
    assert {kind: theirs[kind] for kind in DEFAULT_TARGETS} == {k: list(v) for k, v in DEFAULT_TARGETS.items()}
    assert "qwen3_moe" not in theirs


def test_what_is_read(tmp_path: Path) -> None:
    found = read(tmp_path, r=16, target_modules=["v_proj", "q_proj"], lora_alpha=32, use_dora=True, bias="none")
    assert found == {"scheme": "lora", "dim": 16, "target_modules": ("q_proj", "v_proj"), "use_dora": True}
    assert read(tmp_path, target_modules="all-linear") == {
        "scheme": "lora", "dim": 8, "target_modules": ("all-linear",)
    }  # fmt: skip


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"target_modules": ".*proj"}, "a regular expression"),
        ({"target_modules": ["self_attn.q_proj"]}, "the end of a full name"),
        ({"target_modules": ["q_proj"], "r": 0}, "r is 0"),
        ({"target_modules": ["q_proj"], "bias": "all"}, "bias is all"),
        ({"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, "modules_to_save trains other parameters"),
        ({"target_modules": ["q_proj"], "rank_pattern": {"q_proj": 4}}, "rank_pattern trains other parameters"),
        ({"target_modules": ["q_proj"], "peft_type": "IA3"}, "peft_type is IA3"),
        ({"target_modules": ["q_proj"], "rr": 3}, "rr is unknown"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_is_refused(tmp_path: Path, config: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError) as caught:
        read(tmp_path, **config)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_the_command_takes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    read(tmp_path, r=4, target_modules=["q_proj"])
    flags = ["estimate", "Qwen/Qwen2.5-0.5B", "--engine", "single", "--json"]
    assert main([*flags, "--peft-config", str(tmp_path / "adapter_config.json")]) == 0
    from_file = json.loads(capsys.readouterr().out)
    assert main([*flags, "--peft", "lora", "--lora-dim", "4", "--lora-target-modules", "q_proj"]) == 0
    assert from_file["stages"] == json.loads(capsys.readouterr().out)["stages"]


def test_peft_itself_knows_no_other_field() -> None:
    peft = pytest.importorskip("peft")
    assert {f.name for f in dataclasses.fields(peft.LoraConfig)} <= set(_KNOWN)


def test_parameters_are_those_of_peft(tmp_path: Path) -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    fields = read(tmp_path, r=6, target_modules=["q_proj", "v_proj", "down_proj"])
    run = RunSpec(
        model="Qwen/Qwen2.5-0.5B", data_parallel=DataParallelSpec(engine="single"), peft=PeftSpec(**fields),
        implementation=ImplementationSpec(transformer_impl="transformers"), precision=PrecisionSpec(),
    )  # fmt: skip
    shape = layout(run.model, run.parallel).shapes(run.model)[0][0]
    units = adapter_units(run, chunk_units(run.model, shape, context_of(run)))
    config = transformers.Qwen2Config(
        hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2,
        vocab_size=151936, tie_word_embeddings=True,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.Qwen2ForCausalLM(config)
        wrapped = peft.get_peft_model(model, peft.LoraConfig.from_pretrained(str(tmp_path)), low_cpu_mem_usage=True)
    trained = sum(p.numel() for p in wrapped.parameters() if p.requires_grad)
    assert sum(unit.times * unit.parameters.numel for unit in units) == trained
