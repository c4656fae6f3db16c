"""KV capacity as vLLM's and SGLang's own Python computes it, on the CPU, from the files of their wheels.

    pip download --no-deps --python-version 3.12 --only-binary=:all: vllm==0.33.0 sglang==0.5.23
    unzip -q vllm-*.whl '*.py' -d vllm && unzip -q sglang-*.whl '*.py' -d sglang
    python scripts/maintain/inference_kv.py --vllm vllm --sglang sglang -o tests/data/rollout/kv_capacity.json

Needs torch (CPU) and numpy. Neither package is installed: the modules that compute are loaded from their files, and all
that they import beside these is replaced by names without meaning. What the two packages read from a model's config is
read here from the same config.json (``bridge_memory/readers/presets``); sizes are theirs from there on:

- vLLM: ``Attention.get_kv_cache_spec``, ``Platform._align_hybrid_block_size``, ``MambaStateShapeCalculator``,
  ``get_global_kv_cache_groups``, ``get_kv_cache_configs``, ``get_kv_cache_capacity``.
- SGLang: ``KVCacheConfigurator._handle_max_mamba_cache``, ``create_memory_pool_configurator`` and
  ``calculate_pool_sizes``, ``Mamba2StateShape``, ``handle_gpu_memory_settings``.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.abc
import importlib.util
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PRESETS = ROOT / "bridge_memory" / "readers" / "presets"
GIB = 1 << 30

VLLM = frozenset(
    f"vllm.{name}"
    for name in (
        "v1.kv_cache_interface", "v1.kv_cache_layout", "v1.kv_cache_spec_registry", "v1.core.kv_cache_planning",
        "v1.core.kv_cache_config_builder", "v1.core.kv_cache_utils", "v1.core.single_type_kv_cache_manager",
        "utils.math_utils", "utils.torch_utils",
        "utils.import_utils", "utils.mem_constants", "utils.torch_version",
        "v1.attention.backends.registry", "v1.attention.backend", "platforms.interface",
        "model_executor.layers.mamba.mamba_utils", "model_executor.layers.attention.attention",
        "model_executor.layers.attention.mla_attention", "distributed.utils", "v1.attention.backends.triton_attn",
        "config.vllm", "engine.arg_utils", "model_executor.models.deepseek_v2",
    )
)  # fmt: skip
SGLANG = frozenset(
    f"sglang.srt.{name}"
    for name in (
        "model_executor.pool_configurator", "mem_cache.kv_cache_configurator", "configs.mamba_utils",
        "distributed.utils", "mem_cache.allocation_sizing", "arg_groups.memory_hook", "arg_groups.cuda_graph_hook",
        "model_executor.cuda_graph_config", "utils.math_utils",
    )
)  # fmt: skip


#: Libraries that the real modules import and whose results they do not use here.
ABSENT = ("msgspec",)


class _Kind(type):
    def __new__(cls, name: str, bases: Any, values: Any, **options: Any) -> _Kind:
        return super().__new__(cls, name, bases, values)

    def __init__(cls, name: str, bases: Any, values: Any, **options: Any) -> None:
        super().__init__(name, bases, values)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing()


class Nothing(metaclass=_Kind):
    """Stands for any name: a base class, a decorator, a value."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) else Nothing()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing()

    def __bool__(self) -> bool:
        return False

    def __iter__(self) -> Iterator[Any]:
        return iter(())


class Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Modules of ``package`` in ``folder``: those of ``real`` from their files, others without meaning."""

    def __init__(self, folder: Path, package: str, real: frozenset[str]) -> None:
        self.folder, self.package, self.real = folder, package, real

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name.partition(".")[0] not in (self.package, *ABSENT):
            return None
        if name in self.real:
            file = self.folder / (name.replace(".", "/") + ".py")
            return importlib.util.spec_from_file_location(name, file)
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = ModuleType(spec.name)
        module.__path__ = []
        stand_ins: dict[str, Any] = {}

        def get(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            if name not in stand_ins:
                found = f"{spec.name}.{name}"
                if found in self.real:
                    return importlib.import_module(found)
                stand_ins[name] = logger if name == "init_logger" else type(name, (Nothing,), {})
            return stand_ins[name]

        module.__getattr__ = get  # type: ignore[method-assign]
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass


def logger(*args: Any) -> Any:
    return Nothing()


@contextmanager
def stubbed(folder: Path, package: str, real: frozenset[str]) -> Iterator[None]:
    """``package`` is importable inside."""
    finder = Stubs(folder, package, real)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.partition(".")[0] in (package, *ABSENT)]:
            del sys.modules[name]


def real(name: str) -> Any:
    """A module, of which any name may be replaced."""
    return importlib.import_module(name)


#: What DeepSeek-V3.2's config has beside DeepSeek-V3's.
SPARSE = {"model_type": "deepseek_v32", "index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048}


def config_of(preset: str, sparse: bool = False) -> dict[str, Any]:
    """A preset's config.json; ``sparse``: with an indexer."""
    found: dict[str, Any] = json.loads((PRESETS / f"{preset.replace('/', '__')}.json").read_text())
    return {**found, **SPARSE} if sparse else found


class Layers:
    """What both packages read from a config: kinds of layers and their sizes."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = c = config
        self.number = c["num_hidden_layers"]
        self.mla = "kv_lora_rank" in c
        self.kv_heads = c.get("num_key_value_heads") or c["num_attention_heads"]
        heads = c["num_attention_heads"]
        self.head_size = c.get("head_dim") or c.get("attention_head_dim") or c["hidden_size"] // heads
        self.window = c.get("sliding_window") or 0
        self.kinds = self._kinds()

    def _kinds(self) -> list[str]:
        c = self.config
        if pattern := c.get("hybrid_override_pattern"):
            return [{"M": "state", "*": "full"}.get(letter, "none") for letter in pattern]
        if interval := c.get("full_attention_interval"):
            return ["full" if (i + 1) % interval == 0 else "state" for i in range(self.number)]
        if types := c.get("layer_types"):
            return ["sliding" if one == "sliding_attention" else "full" for one in types]
        if c["model_type"] == "gemma2":  # even layers have the window (transformers: Gemma2Config.layer_types)
            return ["full" if i % 2 else "sliding" for i in range(self.number)]
        if pattern := c.get("sliding_window_pattern"):
            return ["full" if (i + 1) % pattern == 0 else "sliding" for i in range(self.number)]
        # One window for all layers: Mistral, Phi-3 (vLLM ``Attention.__init__``: cache_config.sliding_window).
        return ["sliding" if self.window and c.get("use_sliding_window", True) else "full"] * self.number

    def state_sizes(self) -> dict[str, int]:
        """Arguments of a Mamba-2 or gated delta net state: the same names in both packages."""
        c = self.config
        if "linear_num_value_heads" in c:
            return {
                "intermediate_size": c["linear_value_head_dim"] * c["linear_num_value_heads"],
                "n_groups": c["linear_num_key_heads"], "num_heads": c["linear_num_value_heads"],
                "head_dim": c["linear_value_head_dim"], "state_size": c["linear_key_head_dim"],
                "conv_kernel": c["linear_conv_kernel_dim"],
            }  # fmt: skip
        return {
            "intermediate_size": c["mamba_num_heads"] * c["mamba_head_dim"], "n_groups": c["n_groups"],
            "num_heads": c["mamba_num_heads"], "head_dim": c["mamba_head_dim"], "state_size": c["ssm_state_size"],
            "conv_kernel": c["conv_kernel"],
        }  # fmt: skip


class Vllm:
    """vLLM's calculators."""

    def __init__(self) -> None:
        import torch

        self.torch = torch
        torch_utils = real("vllm.utils.torch_utils")
        torch_utils.direct_register_custom_op = lambda *args, **kwargs: None
        self.planning = real("vllm.v1.core.kv_cache_planning")
        self.utils = real("vllm.v1.core.kv_cache_utils")
        self.interface = real("vllm.v1.kv_cache_interface")
        self.layout = real("vllm.v1.kv_cache_layout").KVCacheLayout.LBNHC
        self.backend = real("vllm.v1.attention.backend")
        self.platform = real("vllm.platforms.interface")
        self.attention = real("vllm.model_executor.layers.attention.attention")
        self.mla = real("vllm.model_executor.layers.attention.mla_attention")
        self.mamba = real("vllm.model_executor.layers.mamba.mamba_utils")
        self.mamba.envs.VLLM_SSM_CONV_STATE_LAYOUT = None
        self.indices = real("vllm.distributed.utils")
        self.indices.envs.VLLM_PP_LAYER_PARTITION = None
        self.mamba.divide = self.indices.divide
        self.cache = real("vllm.config.cache")
        self.cache.get_kv_cache_dtype_handler = lambda name: None
        builder = real("vllm.v1.core.kv_cache_config_builder")
        builder.get_kv_cache_config_builder = lambda config: self.planning.DefaultKVCacheConfigBuilder()

    def backend_of(self, sizes: list[Any], packs: bool) -> Any:
        """A backend that takes blocks of ``sizes``; ``packs``: Triton's, with a scale beside each head."""
        multiple, torch = self.backend.MultipleOf, self.torch
        found = [multiple(one[1]) if isinstance(one, tuple) else one for one in sizes]
        triton = real("vllm.v1.attention.backends.triton_attn").TritonAttentionBackend
        customize = triton.customize_spec if packs else (lambda spec: spec)

        def supports(size: int) -> bool:
            return any(size % one.base == 0 if isinstance(one, multiple) else size == one for one in found)

        return SimpleNamespace(
            get_supported_kernel_block_sizes=lambda spec=None: found, customize_spec=customize, is_mla=lambda: False,
            supports_block_size=supports, get_name=lambda: "backend", torch=torch,
            get_preferred_block_size=lambda default: default if supports(default) else min(
                one.base if isinstance(one, multiple) else one for one in found),
        )  # fmt: skip

    def case(self, case: dict[str, Any]) -> dict[str, Any]:
        """blocks, block size, tokens and concurrency; or why the engine refuses."""
        layers = Layers(config_of(case["model"], case["sparse"]))
        tp, pp = case["tp"], case["pp"]
        dtype = self.torch.bfloat16
        quantised = case["kv_cache_dtype"] != "auto"
        cached = self.torch.uint8 if quantised else dtype
        batches = 2 if pp == 1 else pp + 1
        align = case["prefix_caching"]
        length = case["max_model_len"]
        kv_heads = max(1, layers.kv_heads // tp)
        head = layers.config["kv_lora_rank"] + layers.config["qk_rope_head_dim"] if layers.mla else layers.head_size
        backend = self.backend_of(
            [tuple(one) if isinstance(one, list) else one for one in case["kernel_blocks"]],
            case["kv_cache_dtype"].endswith("per_token_head"),
        )
        cache = SimpleNamespace(
            block_size=case["block_size"] or 16, user_specified_block_size=bool(case["block_size"]),
            cache_dtype=case["kv_cache_dtype"], enable_prefix_caching=align,
            mamba_cache_mode="align" if align else "none", mamba_page_size_padded=None, skip_page_size_padded=None,
            mamba_block_size=16 if align else length, kv_cache_dtype_skip_layers=[], num_gpu_blocks_override=None,
            prefix_cache_retention_interval=None, get_resolved_kv_cache_layout=lambda: self.layout,
            mamba_cache_dtype="auto", mamba_ssm_cache_dtype=case["state_dtype"], use_replayssm=False,
        )  # fmt: skip
        model = SimpleNamespace(
            use_mla=layers.mla, dtype=dtype, max_model_len=length, original_max_model_len=length,
            get_num_kv_heads=lambda parallel: kv_heads, get_head_size=lambda: head, architecture="", hf_config=None,
            is_hybrid="state" in layers.kinds, supports_kv_cache_grouping=False,
        )  # fmt: skip
        config = SimpleNamespace(
            cache_config=cache, model_config=model,
            parallel_config=SimpleNamespace(
                tensor_parallel_size=tp, pipeline_parallel_size=pp, decode_context_parallel_size=1
            ),
            scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
            attention_config=SimpleNamespace(hisparse_config=None), speculative_config=None,
            num_prefill_lookahead_tokens=0, num_speculative_tokens=0,
            max_in_flight_tokens=batches * case["max_num_batched_tokens"],
        )  # fmt: skip
        self._align(config, backend, layers)
        workers = [dict(self._specs(config, backend, layers, range(*self.indices.get_pp_indices(
            layers.number, rank, pp)), cached)) for rank in range(pp)]  # fmt: skip
        groups = self.planning.get_global_kv_cache_groups(config, workers)
        try:
            found = self.planning.get_kv_cache_configs(config, workers, [case["available_bytes"]] * pp, groups)
        except ValueError as refusal:
            return {"refused": str(refusal).split(".")[0][:40]}
        tokens, concurrency = self.utils.get_kv_cache_capacity(config, found[0])
        return {
            "num_blocks": found[0].num_blocks, "block_size": cache.block_size, "kv_tokens": tokens,
            "concurrency": concurrency, "groups": len(found[0].kv_cache_groups),
            "bytes": [max((tensor.size for tensor in one.kv_cache_tensors), default=0) for one in found],
        }  # fmt: skip

    def _align(self, config: Any, backend: Any, layers: Layers) -> None:
        """``Platform.update_block_size_for_backend``."""
        state = self._state(config, layers) if "state" in layers.kinds else None
        model = SimpleNamespace(
            get_mamba_state_shape_from_config=lambda config: state[0] if state else (),
            get_mamba_state_dtype_from_config=lambda config: state[1] if state else (),
        )
        models = real("vllm.model_executor.models")
        models.ModelRegistry.resolve_model_cls = lambda *args, **kwargs: (model, "")
        abstract = real("vllm.model_executor.layers.mamba.abstract")
        abstract.get_mamba_prefill_checkpoint_alignment = lambda config: None
        vllm = real("vllm.config.vllm")

        @contextmanager
        def current(config: Any) -> Iterator[None]:
            yield

        vllm.set_current_vllm_config = current
        self.cache.CacheConfig.DEFAULT_BLOCK_SIZE = 16

        class Platform(self.platform.Platform):  # type: ignore[misc, name-defined]
            @classmethod
            def _find_non_ssm_backends(cls, config: Any) -> list[Any]:
                return [backend]

        Platform.update_block_size_for_backend(config)

    def _state(self, config: Any, layers: Layers) -> tuple[Any, Any]:
        sizes, tp = layers.state_sizes(), config.parallel_config.tensor_parallel_size
        shapes, dtypes = self.mamba.MambaStateShapeCalculator, self.mamba.MambaStateDtypeCalculator
        cache = config.cache_config
        kind = (config.model_config.dtype, cache.mamba_cache_dtype, cache.mamba_ssm_cache_dtype)
        c = layers.config
        if "linear_num_value_heads" in c:
            shape = shapes.gated_delta_net_state_shape(
                tp, c["linear_num_key_heads"], c["linear_num_value_heads"], c["linear_key_head_dim"],
                c["linear_value_head_dim"], c["linear_conv_kernel_dim"],
            )  # fmt: skip
            return shape, dtypes.gated_delta_net_state_dtype(*kind)
        return shapes.mamba2_state_shape(tp_world_size=tp, **sizes), dtypes.mamba2_state_dtype(*kind)

    def _specs(
        self, config: Any, backend: Any, layers: Layers, here: range, cached: Any
    ) -> Iterator[tuple[str, Any]]:
        for place in here:
            kind = layers.kinds[place]
            if kind == "none":
                continue
            if kind == "state":
                shape, dtypes = self._state(config, layers)
                spec = self.interface.MambaSpec(
                    shapes=shape, dtypes=dtypes, block_size=config.cache_config.mamba_block_size,
                    page_size_padded=config.cache_config.mamba_page_size_padded,
                    mamba_cache_mode=config.cache_config.mamba_cache_mode,
                )  # fmt: skip
            elif layers.mla:
                layer = SimpleNamespace(
                    kv_cache_dtype=config.cache_config.cache_dtype, head_size=config.model_config.get_head_size(),
                    sliding_window=None, topk_buffer_width=None, indexer=None, non_causal_multi_token_decode=False,
                )  # fmt: skip
                spec = self.mla.MLAAttention.get_kv_cache_spec(layer, config)
                if index := layers.config.get("index_head_dim"):
                    keys = self._index_keys(index, config)
                    yield f"layers.{place}.indexer", keys
            else:
                layer = SimpleNamespace(
                    attn_type=self.attention.AttentionType.DECODER, kv_cache_dtype=config.cache_config.cache_dtype,
                    num_kv_heads=config.model_config.get_num_kv_heads(None), head_size=layers.head_size,
                    head_size_v=layers.head_size, kv_cache_torch_dtype=cached, attn_backend=backend,
                    sliding_window=layers.window if kind == "sliding" else None,
                )  # fmt: skip
                spec = backend.customize_spec(self.attention.Attention.get_kv_cache_spec(layer, config))
            yield f"layers.{place}", spec


    def _index_keys(self, head_dim: int, config: Any) -> Any:
        """The cache of an indexer's keys, with a scale of 4 bytes for 128 values (``deepseek_v2.py: Indexer``)."""
        cache = real("vllm.model_executor.models.deepseek_v2").DeepseekV32IndexerCache
        layer = SimpleNamespace(
            head_dim=head_dim + head_dim // 128 * 4, dtype=self.torch.uint8, cache_config=config.cache_config
        )
        return cache.get_kv_cache_spec(layer, config)

    def defaults(self, case: dict[str, Any]) -> dict[str, Any]:
        """Tokens and sequences of a step by card, and the sizes of graphs (``get_batch_defaults``,
        ``_set_cudagraph_sizes``)."""
        arguments, config = real("vllm.engine.arg_utils"), real("vllm.config.vllm")
        usage = real("vllm.usage.usage_lib")
        usage.UsageContext = SimpleNamespace(LLM_CLASS="llm", OPENAI_API_SERVER="server")
        platform = SimpleNamespace(
            get_device_total_memory=lambda: case["bytes"], get_device_name=lambda: case["card"],
            is_device_capability=lambda capability: False, is_tpu=lambda: False, is_cpu=lambda: False,
            is_device_capability_family=lambda family: family == 100 and case["card"] in ("B200", "GB200"),
            is_xpu=lambda: False, is_rocm=lambda: False,
        )  # fmt: skip
        arguments.current_platform = platform
        real("vllm.platforms").current_platform = platform
        tokens, sequences = arguments.EngineArgs.get_batch_defaults(1)
        kind = "server" if case["served"] else "llm"
        step, most = case["max_num_batched_tokens"] or tokens[kind], case["max_num_seqs"] or sequences[kind]
        modes = SimpleNamespace(NONE="none")
        config.CUDAGraphMode = modes
        compilation = SimpleNamespace(
            cudagraph_mode="full_and_piecewise", max_cudagraph_capture_size=None, cudagraph_capture_sizes=None,
            post_init_cudagraph_sizes=lambda: None,
        )  # fmt: skip
        itself = SimpleNamespace(
            model_config=SimpleNamespace(enforce_eager=False), compilation_config=compilation,
            scheduler_config=SimpleNamespace(max_num_seqs=most, max_num_batched_tokens=step),
            uniform_decode_query_len=1, speculative_config=None, performance_mode="balanced",
        )  # fmt: skip
        config.VllmConfig._set_cudagraph_sizes(itself)
        return {"max_num_batched_tokens": step, "max_num_seqs": most, "sizes": compilation.cudagraph_capture_sizes}


DEFAULTS_USUAL = {"served": True, "max_num_batched_tokens": None, "max_num_seqs": None}
#: Cards with their bytes as torch counts them.
DEFAULTS_CARDS = {"H100": 84_942_979_072, "NVIDIA A100-SXM4-80GB": 85_094_825_984, "H200": 150_109_880_320,
                  "B200": 191_504_908_288, "NVIDIA GeForce RTX 4090": 25_386_352_640}  # fmt: skip
DEFAULTS_CASES: tuple[dict[str, Any], ...] = (
    {}, {"served": False}, {"max_num_seqs": 100}, {"max_num_seqs": 1000, "max_num_batched_tokens": 300},
    {"max_num_seqs": 33, "max_num_batched_tokens": 50}, {"max_num_seqs": 3},
)  # fmt: skip


FLASH = [["multiple", 16]]
#: Models and what of the command line moves their caches; each with several sizes of memory.
VLLM_CASES: tuple[dict[str, Any], ...] = (
    {"model": "meta-llama/Llama-2-7b-hf"},
    {"model": "meta-llama/Llama-2-7b-hf", "tp": 4, "max_model_len": 4000},
    {"model": "Qwen/Qwen3-4B"},
    {"model": "Qwen/Qwen3-4B", "tp": 16, "kv_cache_dtype": "fp8"},
    {"model": "Qwen/Qwen2.5-0.5B", "kv_cache_dtype": "int8_per_token_head"},
    {"model": "meta-llama/Llama-3.1-70B", "tp": 4, "pp": 3, "kv_cache_dtype": "fp8_e5m2", "block_size": 32},
    {"model": "meta-llama/Llama-3.1-8B", "kv_cache_dtype": "int4_per_token_head", "block_size": 128},
    {"model": "meta-llama/Llama-3.1-8B", "kv_cache_dtype": "fp8_per_token_head", "pp": 5},
    {"model": "Qwen/Qwen3-30B-A3B", "tp": 8},
    {"model": "mistralai/Mistral-7B-v0.1", "max_num_batched_tokens": 2048, "max_model_len": 32768},
    {"model": "microsoft/Phi-3-mini-4k-instruct", "tp": 2, "max_model_len": 4096},
    {"model": "deepseek-ai/DeepSeek-V3", "tp": 8},
    {"model": "deepseek-ai/DeepSeek-V2-Lite", "pp": 4, "block_size": 64},
    {"model": "deepseek-ai/DeepSeek-V3", "tp": 8, "kv_cache_dtype": "fp8", "kernel_blocks": [64]},
    {"model": "moonshotai/Kimi-K2-Instruct", "tp": 8, "kernel_blocks": [32, 64]},
    {"model": "deepseek-ai/DeepSeek-V3", "sparse": True, "tp": 8, "kernel_blocks": [["multiple", 64]]},
    {"model": "deepseek-ai/DeepSeek-V3", "sparse": True, "tp": 8, "pp": 2, "kernel_blocks": [["multiple", 64]],
     "kv_cache_dtype": "fp8_ds_mla"},
    {"model": "openai/gpt-oss-20b"},
    {"model": "openai/gpt-oss-120b", "tp": 4, "pp": 2, "max_num_batched_tokens": 16384},
    {"model": "openai/gpt-oss-20b", "kv_cache_dtype": "fp8", "tp": 2, "max_model_len": 5000},
    {"model": "google/gemma-3-12b-pt", "max_model_len": 32768},
    {"model": "google/gemma-3-27b-pt", "tp": 2, "block_size": 32, "max_num_batched_tokens": 2048},
    {"model": "google/gemma-3-12b-pt", "pp": 3, "kv_cache_dtype": "fp8"},
    {"model": "google/gemma-2-9b", "max_num_batched_tokens": 1024, "max_model_len": 8192},
    {"model": "Qwen/Qwen3-Next-80B-A3B-Instruct", "tp": 4},
    {"model": "Qwen/Qwen3-Next-80B-A3B-Instruct", "tp": 2, "prefix_caching": False},
    {"model": "Qwen/Qwen3-Next-80B-A3B-Instruct", "tp": 8, "kv_cache_dtype": "fp8", "state_dtype": "float32"},
    {"model": "Qwen/Qwen3-Next-80B-A3B-Instruct", "tp": 4, "pp": 2, "block_size": 64},
    {"model": "nvidia/Nemotron-H-56B-Base-8K", "tp": 4, "state_dtype": "float32", "max_model_len": 8192},
    {"model": "nvidia/Nemotron-H-56B-Base-8K", "tp": 8, "state_dtype": "bfloat16", "max_model_len": 8192},
    {"model": "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "state_dtype": "float32"},
    {"model": "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "tp": 2, "pp": 2, "state_dtype": "float32",
     "prefix_caching": False},
)  # fmt: skip
VLLM_USUAL = {
    "sparse": False,
    "tp": 1, "pp": 1, "kv_cache_dtype": "auto", "block_size": None, "kernel_blocks": FLASH, "prefix_caching": True,
    "max_model_len": 16384, "max_num_batched_tokens": 8192, "state_dtype": "auto",
}  # fmt: skip
#: Bytes: odd, even, little.
MEMORY = (21_520_123_457, 5 * GIB + 12_345, 64 * GIB, 300_000_000)


def vllm_rows() -> list[dict[str, Any]]:
    engine = Vllm()
    rows = []
    for given in VLLM_CASES:
        for available in MEMORY:
            case = {**VLLM_USUAL, **given, "available_bytes": available}
            rows.append({**given, "available_bytes": available, "found": engine.case(case)})
    return rows


def default_rows() -> list[dict[str, Any]]:
    engine = Vllm()
    rows = []
    for given in DEFAULTS_CASES:
        for card, nbytes in DEFAULTS_CARDS.items():
            case = {**DEFAULTS_USUAL, **given, "card": card, "bytes": nbytes}
            rows.append({**given, "card": card, "bytes": nbytes, "found": engine.defaults(case)})
    return rows


class Sglang:
    """SGLang's calculators."""

    def __init__(self) -> None:
        import torch

        self.torch = torch
        self.pools = real("sglang.srt.model_executor.pool_configurator")
        self.kv = real("sglang.srt.mem_cache.kv_cache_configurator")
        self.mamba = real("sglang.srt.configs.mamba_utils")
        self.memory_hook = real("sglang.srt.arg_groups.memory_hook")
        self.graph_hook = real("sglang.srt.arg_groups.cuda_graph_hook")
        self.graph_config = real("sglang.srt.model_executor.cuda_graph_config")
        self.indices = real("sglang.srt.distributed.utils")
        self.pools.compute_page_shard_scratch_bytes = lambda *args, **kwargs: 0
        qsa = real("sglang.srt.layers.attention.qsa.config")
        qsa.parse_qsa_profile = lambda config: None
        for module in (self.pools, self.kv):
            for name in ("is_minimax_sparse", "is_deepseek_v4", "is_float4_e2m1fn_x2"):
                setattr(module, name, lambda *args: False)
            module.is_deepseek_dsa = lambda config: hasattr(config, "index_head_dim")
            module.DSATokenToKVPool = SimpleNamespace(
                quant_block_size=128, index_k_with_scale_buffer_dtype=torch.uint8, rope_storage_dtype=torch.bfloat16
            )
        self.pools.get_dsa_index_head_dim = lambda config: config.index_head_dim
        self.pools.get_dsa_index_kpool = lambda config: 1
        self.pools.ceil_div = lambda number, by: -(-number // by)
        self.kv._is_hip = self.pools._is_npu = False
        self.pools.dsa_layer_skips_topk = lambda config, layer: False
        utils = real("sglang.srt.layers.cp.utils")
        utils.get_glm_dsa_cp_layer_shard_info = lambda kvc: (0, 1)
        utils.get_glm_dsa_layer_split_effective_num_layers = lambda kvc, number: number
        self.pools._dflash_draft_cell_size = lambda kvc: 0
        default = (Path(self.pools.__file__).parents[1] / "environ.py").read_text()
        interval = int(default.split("SGLANG_SWA_EVICTION_INTERVAL = EnvInt(")[1].split(")")[0])
        self.pools.envs = SimpleNamespace(
            SGLANG_SWA_EVICTION_INTERVAL=SimpleNamespace(get=lambda: interval),
            SGLANG_NPU_ENABLE_SPARSE_KV_OFFLOAD=SimpleNamespace(get=lambda: False),
        )
        self.pools.ceil_align = lambda number, multiple: -(-number // multiple) * multiple
        self.pools.AttentionArch = SimpleNamespace(MLA="mla", MHA="mha")
        self.mamba.divide = self.indices.divide
        self.mamba.envs = SimpleNamespace(
            SGLANG_MAMBA_CONV_DTYPE=SimpleNamespace(get=lambda: "bfloat16"),
            SGLANG_MAMBA_SSM_DTYPE=SimpleNamespace(get=lambda: None),
        )
        self.kv.get_pp_indices = self.indices.get_pp_indices

    def case(self, case: dict[str, Any]) -> dict[str, Any]:
        """Tokens of each pool on the stage with the fewest, and states."""
        layers = Layers(config_of(case["model"], case["sparse"]))
        found = [self._stage(case, layers, stage) for stage in range(case["pp"])]
        sizes = [one for one in found if one is not None]
        if len(sizes) < len(found):
            return {"refused": "no memory"}
        fewest = min(one["kv_tokens"] for one in sizes)  # ``_apply_token_constraints``: the least of the stages
        return {"kv_tokens": fewest, "stages": found}

    def _stage(self, case: dict[str, Any], layers: Layers, stage: int) -> dict[str, Any] | None:
        tp, pp = case["tp"], case["pp"]
        first, beyond = self.indices.get_pp_indices(layers.number, stage, pp)
        dtype = {"auto": self.torch.bfloat16, "bfloat16": self.torch.bfloat16, "fp8_e4m3": self.torch.float8_e4m3fn,
                 "fp8_e5m2": self.torch.float8_e5m2}[case["kv_cache_dtype"]]  # fmt: skip
        heads = max(1, layers.kv_heads // tp)
        c = layers.config
        model = SimpleNamespace(
            get_num_kv_heads=lambda *args: heads, get_swa_num_kv_heads=lambda *args: heads,
            hf_config=SimpleNamespace(**({"index_head_dim": 128} if case["sparse"] else {})),
            head_dim=layers.head_size, v_head_dim=layers.head_size, swa_head_dim=layers.head_size,
            swa_v_head_dim=layers.head_size, context_len=case["context_length"], num_hidden_layers=layers.number,
            kv_lora_rank=c.get("kv_lora_rank"), qk_rope_head_dim=c.get("qk_rope_head_dim"),
            attention_arch="mla" if layers.mla else "mha", is_multimodal=False, quantization=None,
        )  # fmt: skip
        hybrid = case["hybrid_swa"]

        def of(kind: str) -> list[int]:
            return [i for i in range(layers.number) if layers.kinds[i] == kind]

        def here(kind: str) -> list[int]:
            return [i for i in of(kind) if first <= i < beyond]

        mamba = None
        if "state" in layers.kinds:
            shape = self.mamba.Mamba2StateShape.create(tp_world_size=tp, **layers.state_sizes())
            params = self.mamba.Mamba2CacheParams(
                shape=shape, layers=of("state"), dtype=self.mamba.mamba2_state_dtype(None)
            )
            mamba = SimpleNamespace(full_attention_layer_ids=of("full"), mamba2_cache_params=params)
        self.pools.mambaish_config = lambda config: mamba
        schedule = SimpleNamespace(
            swa_full_tokens_ratio=case["swa_full_tokens_ratio"], max_total_tokens=None, page_size=case["page_size"],
            max_running_requests=case["max_running_requests"], max_mamba_cache_size=None,
            mamba_full_memory_ratio=case["mamba_full_memory_ratio"], chunked_prefill_size=8192,
            disable_overlap_schedule=False, prefill_max_requests=None, mem_fraction_static=0.5,
        )  # fmt: skip
        memory = SimpleNamespace(
            enable_unified_memory=False, enable_hisparse=False, disable_radix_cache=not case["radix_cache"],
            enable_hierarchical_cache=False, enable_unified_cache_external_linker=False,
        )
        context = SimpleNamespace(override=lambda why, **values: vars(schedule).update(values))
        bags = {
            "get_parallel": SimpleNamespace(attn_tp_size=tp, attn_dcp_size=1, pp_size=1),
            "get_schedule": schedule, "get_memory": memory, "get_context": context,
            "get_disagg": SimpleNamespace(disaggregation_mode="null", enable_pd_role_switch=False),
            "get_spec": SimpleNamespace(speculative_algorithm=None, speculative_num_draft_tokens=None),
            "get_exec": SimpleNamespace(mamba=SimpleNamespace(
                enable_linear_replayssm_spec=False, enable_mamba_extra_buffer=True,
                enable_mamba_extra_buffer_lazy=False),
                kernel=SimpleNamespace(dsa_prefill_backend="flashmla_sparse", dsa_decode_backend="flashmla_kv")),
            "get_model": SimpleNamespace(qsa_indexer_dtype=None),
        }  # fmt: skip
        for module in (self.pools, self.kv):
            for name, bag in bags.items():
                setattr(module, name, lambda bag=bag: bag)
        none = SimpleNamespace(is_none=lambda: True, is_eagle=lambda: False, is_standalone=lambda: False,
                               is_dflash_family=lambda: False)  # fmt: skip
        kvc = SimpleNamespace(
            kv_cache_dtype_str=case["kv_cache_dtype"], model_config=model, kv_cache_dtype=dtype, pp_size=pp,
            layer_info=SimpleNamespace(
                start_layer=first, end_layer=beyond, num_effective_layers=beyond - first,
                full_attention_layer_ids=here("full"), swa_attention_layer_ids=here("sliding"),
            ),
            server_args=SimpleNamespace(enable_hisparse=False), use_mla_backend=layers.mla, spec_algorithm=none,
            is_draft_worker=False, is_hybrid_swa=hybrid, sliding_window_size=layers.window or None,
            page_size=case["page_size"], device="cpu", attn_dp_size=1, mambaish_config=mamba, hybrid_gdn_config=None,
            hybrid_kda_config=None, fused_entry_bytes=lambda name: None, extra_mamba_cache_bytes_per_req=0,
        )  # fmt: skip
        kvc._calculate_mamba_ratio = lambda: self.kv.KVCacheConfigurator._calculate_mamba_ratio(kvc)
        rest = case["available_bytes"] / GIB
        try:
            if mamba is not None:
                rest = self.kv.KVCacheConfigurator._handle_max_mamba_cache(kvc, rest)
            configurator = self.pools.create_memory_pool_configurator(kvc)
            config = configurator.calculate_pool_sizes(int(rest * GIB), case["page_size"])
        except (RuntimeError, ValueError):
            return None
        return {
            "kv_tokens": config.max_total_num_tokens, "sliding_tokens": config.swa_max_total_num_tokens,
            "states": schedule.max_mamba_cache_size,
        }  # fmt: skip

    def fraction(self, case: dict[str, Any]) -> dict[str, Any]:
        """What ``handle_gpu_memory_settings`` makes of a card: its share, sizes of graphs and of a prefill."""
        hook, graphs = self.memory_hook, self.graph_hook
        config = self.graph_config.default_cuda_graph_config()
        arguments = SimpleNamespace(
            device="cuda", cuda_graph_config=config, chunked_prefill_size=case["chunked_prefill_size"],
            tp_size=case["tp"], pp_size=case["pp"], max_running_requests=case["max_running_requests"],
            attn_dp_size=case["attn_dp"], disaggregation_mode="null", mem_fraction_static=None, max_total_tokens=None,
            language_only=False, language_model_only=False, model_path="", max_prefill_tokens=16384,
            moe_a2a_backend="none", enable_symm_mem=False, disable_cuda_graph_padding=False,
            speculative_algorithm=None,
        )  # fmt: skip
        # Its default asks whether this machine has CUDA.
        captured = not (case["pp"] > 1 or case["disable_cuda_graph"])
        config.prefill.backend = getattr(self.graph_config.Backend, "BREAKABLE" if captured else "DISABLED")
        if case["disable_cuda_graph"]:
            config.decode.backend = self.graph_config.Backend.DISABLED
        for module in (hook, graphs):
            module.resolving_view = module.resolved_view = lambda found: found
            module.declare_resolution = lambda found, who, **values: found.__dict__.update(values)
            module.use_mla_backend = lambda found: case["mla"]
            module.model_config_of = lambda found: SimpleNamespace(is_multimodal=False)
            module.post_capture_kv_sizing_planned = lambda found: False
            module.get_device_memory_capacity = lambda device: case["mib"]
            module.attn_dp_enabled_of = lambda found: found.attn_dp_size > 1
            module.get_platform = lambda: SimpleNamespace(is_xpu=False)
        hook.handle_gpu_memory_settings(arguments)
        return {
            "mem_fraction_static": arguments.mem_fraction_static,
            "chunked_prefill_size": arguments.chunked_prefill_size,
            "decode": list(arguments.cuda_graph_config.decode.bs),
            "prefill": list(arguments.cuda_graph_config.prefill.bs),
        }


SGLANG_CASES: tuple[dict[str, Any], ...] = (
    {"model": "meta-llama/Llama-2-7b-hf"},
    {"model": "meta-llama/Llama-3.1-70B", "tp": 8},
    {"model": "Qwen/Qwen3-4B", "page_size": 64, "kv_cache_dtype": "fp8_e4m3"},
    {"model": "Qwen/Qwen3-30B-A3B", "tp": 16, "pp": 3, "page_size": 128, "kv_cache_dtype": "fp8_e5m2"},
    {"model": "mistralai/Mistral-7B-v0.1"},
    {"model": "google/gemma-3-12b-pt", "tp": 2},
    {"model": "deepseek-ai/DeepSeek-V3", "tp": 8},
    {"model": "deepseek-ai/DeepSeek-V2-Lite", "pp": 4, "page_size": 64, "kv_cache_dtype": "fp8_e4m3"},
    {"model": "deepseek-ai/DeepSeek-V3", "sparse": True, "tp": 8, "page_size": 64, "kv_cache_dtype": "bfloat16"},
    {"model": "deepseek-ai/DeepSeek-V3", "sparse": True, "tp": 8, "pp": 2, "page_size": 64,
     "kv_cache_dtype": "fp8_e4m3"},
    {"model": "openai/gpt-oss-20b", "hybrid_swa": True},
    {"model": "openai/gpt-oss-120b", "hybrid_swa": True, "tp": 4, "page_size": 64, "swa_full_tokens_ratio": 0.15},
    {"model": "openai/gpt-oss-120b", "hybrid_swa": True, "pp": 5, "page_size": 128},
    {"model": "openai/gpt-oss-20b", "hybrid_swa": True, "radix_cache": False, "max_running_requests": 64},
    {"model": "Qwen/Qwen3-Next-80B-A3B-Instruct", "tp": 4},
    {"model": "Qwen/Qwen3-Next-80B-A3B-Instruct", "tp": 2, "pp": 5, "page_size": 64, "mamba_full_memory_ratio": 0.4},
    {"model": "Qwen/Qwen3-Next-80B-A3B-Instruct", "tp": 8, "radix_cache": False, "max_running_requests": 48},
    {"model": "nvidia/Nemotron-H-56B-Base-8K", "tp": 4},
    {"model": "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "tp": 16, "kv_cache_dtype": "fp8_e4m3"},
)
SGLANG_USUAL = {
    "sparse": False,
    "tp": 1, "pp": 1, "kv_cache_dtype": "auto", "page_size": 1, "context_length": 16384, "hybrid_swa": False,
    "swa_full_tokens_ratio": 0.8, "mamba_full_memory_ratio": 0.9, "radix_cache": True, "max_running_requests": None,
}  # fmt: skip
#: MiB as torch counts a T4, an RTX 4090, an A100 40GB, an A100 80GB, an H100, an H200 and a B200.
CARDS = (15_095, 24_207, 40_442, 81_154, 81_009, 143_167, 182_633)
FRACTION_CASES: tuple[dict[str, Any], ...] = (
    {}, {"tp": 8}, {"tp": 8, "mla": True}, {"tp": 2, "pp": 4}, {"chunked_prefill_size": 32768},
    {"max_running_requests": 100}, {"disable_cuda_graph": True}, {"tp": 8, "attn_dp": 8},
)  # fmt: skip
FRACTION_USUAL = {"tp": 1, "pp": 1, "mla": False, "chunked_prefill_size": None, "max_running_requests": None,
                  "disable_cuda_graph": False, "attn_dp": 1}  # fmt: skip


def sglang_rows() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    engine = Sglang()
    capacity = []
    for given in SGLANG_CASES:
        for available in MEMORY:
            case = {**SGLANG_USUAL, **given, "available_bytes": available}
            capacity.append({**given, "available_bytes": available, "found": engine.case(case)})
    fractions = []
    for given in FRACTION_CASES:
        for mib in CARDS:
            case = {**FRACTION_USUAL, **given, "mib": mib}
            fractions.append({**given, "mib": mib, "found": engine.fraction(case)})
    return capacity, fractions


def tables(vllm: Path | None, sglang: Path | None) -> dict[str, Any]:
    """Every table: ``usual`` values, and rows with what differs from them and what was found."""
    found: dict[str, Any] = {}
    if vllm:
        with stubbed(vllm, "vllm", VLLM):
            found["vllm"] = {"release": "0.33.0", "usual": VLLM_USUAL, "rows": vllm_rows()}
            found["vllm_defaults"] = {"release": "0.33.0", "usual": DEFAULTS_USUAL, "rows": default_rows()}
    if sglang:
        with stubbed(sglang, "sglang", SGLANG):
            capacity, fractions = sglang_rows()
        found["sglang"] = {"release": "0.5.23", "usual": SGLANG_USUAL, "rows": capacity}
        found["sglang_memory"] = {"release": "0.5.23", "usual": FRACTION_USUAL, "rows": fractions}
    return found


def as_text(found: dict[str, Any]) -> str:
    """JSON, a row a line."""
    parts = []
    for name, table in found.items():
        rows = ",\n".join("  " + json.dumps(row) for row in table["rows"])
        head = {key: value for key, value in table.items() if key != "rows"}
        parts.append(f'"{name}": {json.dumps(head)[:-1]}, "rows": [\n{rows}\n]}}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--vllm", type=Path, help="folder with the wheel's vllm/")
    parser.add_argument("--sglang", type=Path, help="folder with the wheel's sglang/")
    parser.add_argument("-o", "--output", type=Path, help="file; else standard output")
    options = parser.parse_args()
    text = as_text(tables(options.vllm, options.sglang))
    if options.output:
        options.output.write_text(text)
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
