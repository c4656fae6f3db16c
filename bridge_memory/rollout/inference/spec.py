"""InferenceSpec: an inference engine (vLLM or SGLang) as its command line describes it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from bridge_memory.rollout.inference.rules import DEFAULT_RELEASES, FRAMEWORKS, Release, parse_release
from bridge_memory.spec import CompressedAttentionSpec, ModelSpec, SpecError
from bridge_memory.spec.errors import divide, finite, show

#: Bytes of an element of weights and activations.
DTYPES = {"bfloat16": 2, "float16": 2, "float32": 4}
#: Formats of weights. "fp8": one scale a tensor. "fp8_blockwise": one fp32 scale for 128 x 128 weights, as DeepSeek-V3
#: is published. "mxfp4": experts alone, as gpt-oss is published.
QUANTIZATIONS = ("fp8", "fp8_blockwise", "mxfp4")
#: framework -> formats of the KV cache. vLLM: ``vllm/config/cache.py: CacheDType``; those of one hardware are left out.
CACHE_DTYPES = {
    "vllm": (
        "auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_ds_mla",
        "fp8_per_token_head", "int8_per_token_head", "int4_per_token_head",
    ),
    "sglang": ("auto", "bfloat16", "fp8_e4m3", "fp8_e5m2"),
}  # fmt: skip
STATE_DTYPES = {"auto": 0, "float32": 4, "bfloat16": 2, "float16": 2}


class NotModelled(NamedTuple):
    """Something an engine can do that holds memory and is not counted here."""

    name: str
    why: str


#: What no field stands for. A reader that meets one of these lists it.
NOT_MODELLED = (
    NotModelled("speculative decoding", "draft weights, their KV cache and the graphs of several tokens a sequence"),
    NotModelled("prefill and decode context parallelism", "KV caches sharded over positions"),
    NotModelled("KV offload and KV connectors", "buffers of the connector and of host transfers"),
    NotModelled("multimodal inputs", "the encoder's profile run and its cache; only its weights are counted"),
    NotModelled("weight offload (cpu_offload_gb)", "weights in host memory and their staging buffers"),
    NotModelled("expert load balancing (EPLB)", "redundant experts and the buffers that move them"),
    NotModelled("expandable segments with sleep", "vLLM's pool then frees nothing (run 128)"),
    NotModelled("expert all-to-all kernels (DeepEP, PPLX, NIXL)", "their device buffers"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceSpec:
    """An inference engine. Fields that are None take the release's default.

    Fields of one framework alone name it; giving them to the other is refused.

    Raises:
        SpecError: a value that the engine would refuse, or that is not modelled.

    Example:
        >>> from bridge_memory import resolve_model
        >>> spec = InferenceSpec(model=resolve_model("Qwen/Qwen3-8B"), framework="sglang", tensor_parallel_size=2)
        >>> spec.release_numbers
        (0, 5, 23)
    """

    model: ModelSpec
    #: One of ``FRAMEWORKS``.
    framework: str = "vllm"
    #: "0.33.0"; "": today's.
    release: str = ""
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    #: vLLM's data_parallel_size, SGLang's dp_size.
    data_parallel_size: int = 1
    #: SGLang's enable_dp_attention: attention runs on tensor_parallel_size / data_parallel_size ranks, experts on all.
    dp_attention: bool = False
    #: vLLM's enable_expert_parallel (over TP x DP), or SGLang's ep_size; True: over all ranks that share experts.
    expert_parallel: bool | int = False
    dtype: str = "bfloat16"
    #: None or one of ``QUANTIZATIONS``.
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    #: vLLM: share of the card's memory. SGLang: None.
    gpu_memory_utilization: float | None = None
    #: SGLang: share of the memory that is free before weights are loaded. vLLM: None.
    mem_fraction_static: float | None = None
    #: vLLM: bytes of the KV cache, instead of gpu_memory_utilization.
    kv_cache_memory_bytes: int | None = None
    #: vLLM's max_model_len, SGLang's context_length.
    max_model_len: int | None = None
    #: vLLM's max_num_seqs, SGLang's max_running_requests.
    max_num_seqs: int | None = None
    #: vLLM: tokens of a step at most.
    max_num_batched_tokens: int | None = None
    #: SGLang: tokens of a prefill at most.
    chunked_prefill_size: int | None = None
    #: vLLM's block_size, SGLang's page_size, in tokens.
    block_size: int | None = None
    #: SGLang's max_total_tokens: no larger KV cache than this.
    max_total_tokens: int | None = None
    #: vLLM's enforce_eager, SGLang's disable_cuda_graph.
    enforce_eager: bool = False
    #: vLLM's cudagraph_capture_sizes (tokens), SGLang's cuda_graph_bs (sequences).
    cuda_graph_sizes: tuple[int, ...] | None = None
    #: vLLM's enable_prefix_caching; False is SGLang's disable_radix_cache. Moves memory of recurrent layers.
    enable_prefix_caching: bool = True
    #: vLLM's enable_sleep_mode, SGLang's enable_memory_saver.
    sleep_mode: bool = True
    #: vLLM's sleep_mode_offload_cudagraph, SGLang's SGLANG_MEMORY_SAVER_CUDA_GRAPH: graphs sleep too.
    sleep_cuda_graphs: bool = False
    #: vLLM's async_scheduling; False is SGLang's disable_overlap_schedule.
    async_scheduling: bool = True
    #: Bytes of recurrent states: vLLM's mamba_ssm_cache_dtype, SGLang's mamba_ssm_dtype.
    mamba_ssm_cache_dtype: str = "auto"
    #: SGLang: memory of recurrent states over memory of the KV cache.
    mamba_full_memory_ratio: float | None = None
    #: SGLang: tokens of sliding-window layers over tokens of full attention.
    swa_full_tokens_ratio: float | None = None
    #: Adapters that the engine holds at once, and their largest rank; 0: no LoRA.
    max_loras: int = 0
    max_lora_rank: int = 16
    #: Started as a server (``vllm serve``, verl's and NeMo-RL's engines); False: vLLM's ``LLM`` class, whose
    #: max_num_batched_tokens is larger by default.
    served: bool = True

    def __post_init__(self) -> None:
        self._check_types()
        if self.framework not in FRAMEWORKS:
            raise SpecError(f"framework ({show(self.framework)}) is none of {', '.join(FRAMEWORKS)}; give one")
        self._check_words()
        self._check_framework()
        self._check_model()
        self._check_ranks()
        self._check_shares()

    @property
    def release_numbers(self) -> Release:
        return parse_release(self.release) if self.release else DEFAULT_RELEASES[self.framework]

    @property
    def element_bytes(self) -> int:
        """Bytes of an element of activations."""
        return DTYPES[self.dtype]

    @property
    def attention_tp(self) -> int:
        """Ranks that share the heads of one sequence."""
        if self.framework == "sglang" and self.dp_attention:
            return self.tensor_parallel_size // self.data_parallel_size
        return self.tensor_parallel_size

    @property
    def expert_ranks(self) -> int:
        """Ranks over which the experts of a layer are divided, whole or in slices.

        vLLM flattens data and tensor parallelism for experts (``fused_moe/config.py: FusedMoEParallelConfig.make``).
        """
        if self.framework == "vllm":
            return self.tensor_parallel_size * self.data_parallel_size
        return self.tensor_parallel_size

    @property
    def expert_parallel_size(self) -> int:
        """Ranks over which whole experts are divided; experts are sliced over ``expert_ranks`` by this."""
        if self.expert_parallel is True:
            return self.expert_ranks
        return int(self.expert_parallel) or 1

    @property
    def length(self) -> int:
        """Tokens of the longest sequence."""
        return self.max_model_len or self.model.max_position_embeddings

    def _check_types(self) -> None:
        if type(self.model) is not ModelSpec:
            raise SpecError(f"model ({show(self.model)}) is not a ModelSpec; give one, from resolve_model")
        for f in fields(self):
            if f.name == "model":
                continue
            value: Any = getattr(self, f.name)
            kind = str(f.type).partition(" | None")[0]
            if (value is None and str(f.type).endswith("None")) or (
                f.name == "expert_parallel" and type(value) in (bool, int)
            ):
                continue
            give = {"int": "an integer", "bool": "True or False", "str": "a string", "float": "a number"}.get(kind)
            right = {
                "int": type(value) is int, "bool": type(value) is bool, "str": type(value) is str,
                "float": finite(value), "tuple[int, ...]": _sizes(value), "bool | int": False,
            }[kind]  # fmt: skip
            if not right:
                raise SpecError(f"{f.name} ({show(value)}) is not {give or 'a tuple of positive integers'}; give one")
            if kind == "int" and value < (0 if f.name == "max_loras" else 1):
                raise SpecError(f"{f.name} ({value}) is not positive; give 1 or more")

    def _check_words(self) -> None:
        for name, known in (
            ("dtype", tuple(DTYPES)), ("quantization", QUANTIZATIONS), ("mamba_ssm_cache_dtype", tuple(STATE_DTYPES)),
            ("kv_cache_dtype", CACHE_DTYPES[self.framework]),
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and value not in known:
                raise SpecError(f"{name} ({show(value)}) is not modelled; give one of {', '.join(known)}")
        if self.release:
            parse_release(self.release)

    def _check_framework(self) -> None:
        """Fields of the other framework."""
        others = {
            "vllm": ("mem_fraction_static", "chunked_prefill_size", "max_total_tokens", "mamba_full_memory_ratio",
                     "swa_full_tokens_ratio"),
            "sglang": ("gpu_memory_utilization", "kv_cache_memory_bytes", "max_num_batched_tokens"),
        }[self.framework]  # fmt: skip
        for name in others:
            if getattr(self, name) is not None:
                other = "SGLang" if self.framework == "vllm" else "vLLM"
                raise SpecError(f"{name} ({show(getattr(self, name))}) is an option of {other}; leave it out")
        if self.framework == "vllm" and self.dp_attention:
            raise SpecError("dp_attention (True) is an option of SGLang; give data_parallel_size alone")

    def _check_model(self) -> None:
        for layer in dict.fromkeys(self.model.layers):
            if isinstance(layer.mixer, CompressedAttentionSpec):
                raise SpecError("compressed attention (DeepSeek-V4) is not modelled in an inference engine; choose "
                                "another model")  # fmt: skip
        if not self.length:
            raise SpecError(
                "max_model_len (None) is unknown: the model's config has no max_position_embeddings; give it"
            )

    def _check_ranks(self) -> None:
        if self.pipeline_parallel_size > self.model.num_layers:
            raise SpecError(
                f"pipeline_parallel_size ({self.pipeline_parallel_size}) is larger than the model's "
                f"{self.model.num_layers} layers; give at most {self.model.num_layers}"
            )
        if self.dp_attention and self.tensor_parallel_size % self.data_parallel_size:
            raise SpecError(
                f"tensor_parallel_size ({self.tensor_parallel_size}) is not divisible by data_parallel_size "
                f"({self.data_parallel_size}), which dp_attention asks for; give a multiple"
            )
        if self.expert_parallel is not True and self.expert_ranks % self.expert_parallel_size:
            raise SpecError(
                f"expert_parallel ({self.expert_parallel}) does not divide the {self.expert_ranks} ranks that share "
                f"experts; give a divisor"
            )
        if self.framework == "vllm" and self.expert_parallel_size not in (1, self.expert_ranks):
            raise SpecError(
                f"expert_parallel ({self.expert_parallel}) is neither 1 nor all {self.expert_ranks} ranks, which is "
                f"what vLLM's enable_expert_parallel means; give True or False"
            )

    def _check_shares(self) -> None:
        for name, most in (("gpu_memory_utilization", 1.0), ("mem_fraction_static", 1.0),
                           ("swa_full_tokens_ratio", 1.0), ("mamba_full_memory_ratio", 1e3)):  # fmt: skip
            value = getattr(self, name)
            if value is not None and not 0 < value <= most:
                raise SpecError(f"{name} ({show(value)}) is not above 0 and at most {most:g}; give such a share")


def shared(number: int, ranks: int, what: str, by: str = "tensor_parallel_size") -> int:
    """``number`` over ``ranks``; raises SpecError where it does not divide."""
    return divide(number, ranks, what, by, f"give a divisor of {number} as {by}")


def kv_heads(groups: int, ranks: int) -> int:
    """KV heads of one of ``ranks`` ranks: copied where there are fewer heads (``linear.py: QKVParallelLinear``)."""
    if ranks >= groups:
        divide(ranks, groups, "tensor_parallel_size", "num_key_value_heads", f"give a multiple of {groups}")
        return 1
    return shared(groups, ranks, "num_key_value_heads")


def _sizes(value: object) -> bool:
    return type(value) is tuple and bool(value) and all(type(one) is int and one > 0 for one in value)
