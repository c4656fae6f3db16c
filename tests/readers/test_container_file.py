"""A ConfigContainer as the YAML that Megatron Bridge writes: read without Bridge, and nothing in it is run."""

from __future__ import annotations

from pathlib import Path

import pytest

from bridge_memory.cli import main
from bridge_memory.estimation import estimate
from bridge_memory.readers.config_container import run_from_config_container
from bridge_memory.readers.container_file import container_from_file, container_from_recipe
from bridge_memory.spec import SpecError

#: As ``utils/yaml_utils.py`` writes a dataclass, a function, a dtype, an enum and a partial.
YAML = """\
_target_: megatron.bridge.training.config.ConfigContainer
model:
  _target_: megatron.bridge.models.gpt_provider.GPTModelProvider
  num_layers: 4
  hidden_size: 1024
  ffn_hidden_size: 4096
  num_attention_heads: 8
  num_query_groups: 8
  gated_linear_unit: true
  activation_func: {_target_: torch.nn.functional.silu, _call_: false}
  add_bias_linear: false
  normalization: RMSNorm
  position_embedding_type: rope
  seq_length: 2048
  vocab_size: 32000
  bf16: true
  params_dtype: {_target_: torch.bfloat16, _call_: false}
  hidden_dropout: 0.0
  attention_dropout: 0.0
  share_embeddings_and_output_weights: false
  tensor_model_parallel_size: 2
  pipeline_model_parallel_size: 2
  context_parallel_size: 1
  attention_backend: {_target_: megatron.core.transformer.enums.AttnBackend, _call_: true, _args_: [1]}
  transformer_layer_spec: {_target_: megatron.bridge.models.gpt_provider.default_layer_spec, _partial_: true}
train: {_target_: megatron.bridge.training.config.TrainingConfig, micro_batch_size: 1, global_batch_size: 16}
optimizer: {_target_: megatron.core.optimizer.OptimizerConfig, use_distributed_optimizer: true, optimizer: adam}
ddp: {grad_reduce_in_fp32: true, use_distributed_optimizer: true}
"""


def written(tmp_path: Path, text: str = YAML) -> str:
    path = tmp_path / "run_config.yaml"
    path.write_text(text)
    return str(path)


def test_a_container_is_read_from_yaml(tmp_path: Path) -> None:
    """The weights by hand: on each stage two layers of q, k, v and o (4 h h), the gated MLP (3 h f) and two norms, an
    embedding or an output layer (V h), over TP 2 but for the norms; the final norm is on the second stage."""
    run = run_from_config_container(container_from_file(written(tmp_path)), world_size=16)
    assert (run.parallel.tp, run.parallel.pp, run.parallel.data_parallel_size) == (2, 2, 4)
    h, f, v = 1024, 4096, 32000
    stage = (2 * (4 * h * h + 3 * h * f) + v * h) // 2 + 2 * 2 * h
    assert [s.parameters for s in estimate(run).stages] == [stage, stage + h]
    assert run.implementation.attention_backend == "flash"
    assert run.precision.params_dtype == "bf16" and run.num_microbatches == 4


def test_the_command_line_reads_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path)
    assert main(["estimate", "--container", path, "--num-gpus", "16", "--gpu", "H100", "--brief"]) == 0
    assert capsys.readouterr().out.startswith("FITS H100")
    for more, words in (
        (["Llama-3.1-8B"], "--container says everything that MODEL says"),
        (["--tp", "4"], "--tp is the container's"),
        (["--num-layers", "2"], "--num-layers is the container's"),
        (["--bridge-recipe", "x"], "give one of them"),
    ):
        assert main(["estimate", "--container", path, *more]) == 2
        assert words in capsys.readouterr().err
    search = ["search", "--container", path, "--num-gpus", "16", "--gpu", "H100", "--global-batch-size", "16"]
    assert main(search) == 2 and "name the MODEL" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not valid JSON"), ("- 1", "it holds a list"), ("model: 3", "has no model"), ("", "it holds nothing"),
        ("model: {_target_: 3}", "the name of a class"),
        ("model: {_target_: a.B, a: " + "{a: " * 60 + "1" + "}" * 61, "nested too deeply"),
        ("model: !!python/object/apply:os.system [echo]", "not valid YAML"), ("model: {num_layers: x}", "no _target_"),
        (YAML.replace("num_layers: 4", "num_layers: x"), "num_layers"),
        (YAML.replace("hidden_dropout: 0.0", "hidden_dropout: [1]"), "hidden_dropout"),
        (YAML.replace("num_layers: 4", "num_layers: 4\n  moe_n_hash_layers: x"), "moe_n_hash_layers"),
        (YAML.replace("num_layers: 4", "num_layers: 4\n  recompute_modules: 1.5"), "recompute_modules"),
        (YAML.replace("embedding_type: rope", "embedding_type: {a: 1}"), "position_embedding_type"),
        (YAML.replace("num_layers: 4", "num_layers: 4\n  hybrid_override_pattern: 1"), "hybrid_override_pattern"),
    ],
)  # fmt: skip
def test_what_is_no_container_is_refused_in_one_line(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        run_from_config_container(container_from_file(written(tmp_path, text)), world_size=16)


def test_nothing_that_a_file_names_is_imported(tmp_path: Path) -> None:
    text = YAML.replace("torch.nn.functional.silu", "no_such_package.silu")
    run = run_from_config_container(container_from_file(written(tmp_path, text)), world_size=16)
    assert run.model.num_layers == 4


def test_a_recipe_needs_megatron_bridge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bridge_memory.readers.container_file.RECIPES", "no_such_package.recipes")
    with pytest.raises(SpecError, match="needs Megatron Bridge"):
        container_from_recipe("llama3_8b")


def test_a_recipe_that_asks_for_blackwell_is_told_of_the_named_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys
    from types import ModuleType

    recipes = ModuleType("recipes_that_ask")
    asks = "deepseek_v4_supports_blackwell_fused_kernels"
    source = f"def {asks}():\n    return None\n\ndef small_config():\n    return [{asks}()]\n"
    exec(source, vars(recipes))
    monkeypatch.setitem(sys.modules, "recipes_that_ask", recipes)
    monkeypatch.setattr("bridge_memory.readers.container_file.RECIPES", "recipes_that_ask")
    found = [container_from_recipe("small", arch) for arch in ("blackwell", "hopper", None)]
    assert found == [[True], [False], [None]]


def test_a_recipe_by_its_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import sys
    from types import ModuleType

    recipes = ModuleType("some_recipes")
    recipes.small_pretrain_config = lambda: container_from_file(written(tmp_path))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "some_recipes", recipes)
    monkeypatch.setattr("bridge_memory.readers.container_file.RECIPES", "some_recipes")
    for name in ("small", "small_pretrain_config"):
        assert container_from_recipe(name).model.num_layers == 4
    with pytest.raises(SpecError, match="did you mean small_pretrain_config"):
        container_from_recipe("smal_pretrain")
