"""PostTraining: a trainer and an inference engine that take turns on the same GPUs, as a framework runs them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from math import lcm
from typing import Any

from bridge_memory.rollout.inference import InferenceSpec
from bridge_memory.spec import BatchSpec, ModelSpec, RunSpec, SpecError
from bridge_memory.spec.errors import show

#: Frameworks, in the words of their own documents.
FRAMEWORKS = {"verl": "verl", "nemo-rl": "NeMo-RL", "slime": "slime", "trl": "TRL", "ms-swift": "ms-swift"}
#: framework -> the functions that turn logits into log-probabilities (``ImplementationSpec.policy_loss``).
_LOSS = {"ms-swift": "trl"}


class Reference(str, Enum):
    """Where the reference policy's weights are."""

    NONE = "none"
    #: The policy without its adapters.
    ADAPTERS_OFF = "adapters off"
    #: A model of its own on the GPU, or one that is there for its pass only.
    GPU = "on the GPU"
    LOADED = "loaded for its pass"
    #: In host memory, of which a unit at a time is on the GPU.
    STREAMED = "streamed from the host"
    #: In host memory; takes the place of the policy's weights during its pass.
    SWAPPED = "swapped in from the host"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True, kw_only=True)
class Critic:
    """A value model that trains on the same GPUs."""

    #: Its layout and optimizer; its model has no output layer to the vocabulary.
    run: RunSpec
    tokens: int
    param_offload: bool = False
    optimizer_offload: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PostTraining:
    """A reinforcement-learning job whose trainer and inference engine share GPUs.

    Tokens are those of a micro batch before context parallelism divides them: one packed row, or with
    packed_sequences False rows of ``longest`` tokens.

    Raises:
        SpecError: fields contradict each other.
    """

    framework: str
    release: tuple[int, int]
    #: The policy's training step; its batch is replaced by each pass's.
    trainer: RunSpec
    engine: InferenceSpec
    #: Tokens of the longest prompt and response.
    longest: int
    update_tokens: int
    log_prob_tokens: int
    reference_tokens: int = 0
    #: Sequences of an update on a data-parallel rank, if known.
    update_sequences: int | None = None
    #: A micro batch holds no more than its tokens; else balancing may add up to a sequence.
    hard_limit: bool = True
    #: Micro batches are packed to a number of tokens; else they are a number of sequences.
    dynamic: bool = True
    update_entropy: bool = False
    log_prob_entropy: bool = False
    #: Old log-probabilities are computed by the trainer.
    log_probs: bool = True
    #: Tokens whose logits are processed at once; 0: all.
    chunk_size: int = 0
    fused_kernels: bool = False
    #: The model returns its logits as computed, not in fp32; and logits over the temperature are a new tensor.
    deferred_logits: bool = False
    rescaled_logits: bool = False
    param_offload: bool = False
    optimizer_offload: bool = False
    #: Passes without a backward run beside the optimizer's states, whether or not these rest on the GPU (NeMo-RL).
    passes_keep_optimizer: bool = False
    reference: Reference = Reference.NONE
    critic: Critic | None = None
    #: 0: the engine never sleeps; 1: it keeps its weights in host memory; 2: it drops them.
    sleep_level: int = 2
    #: vLLM runs in the trainer's process, whose allocator then counts its memory too.
    in_process: bool = False
    #: It validates: a rollout at the end of a step, or before the first.
    validates: bool = True
    #: Bytes through which weights are sent to the engine.
    bucket_bytes: int = 0
    #: GPUs of a node.
    gpus_per_node: int = 8
    assumptions: tuple[str, ...] = ()
    not_modelled: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.framework not in FRAMEWORKS:
            raise SpecError(f"framework ({show(self.framework)}) is none of {', '.join(FRAMEWORKS)}; give one")
        ranks = self.engine.tensor_parallel_size * self.engine.pipeline_parallel_size
        if self.engine.framework == "vllm":
            ranks *= self.engine.data_parallel_size
        world = self.trainer.parallel.world_size
        if world % ranks:
            raise SpecError(
                f"the engine's ranks ({ranks}: TP x PP x DP) do not divide the {world} GPUs; choose divisors"
            )
        for name in ("update_tokens", "log_prob_tokens", "longest"):
            if not 0 < getattr(self, name) < 2**28:
                raise SpecError(f"{name} ({getattr(self, name)}) is no number of tokens; give 1 or more")
        if self.dynamic and self.longest > min(self.update_tokens, self.log_prob_tokens):
            short = "update_tokens" if self.update_tokens < self.longest else "log_prob_tokens"
            raise SpecError(
                f"{short} ({getattr(self, short)}) holds no sequence of {self.longest} tokens (prompt and response); "
                "raise the token limit of a micro batch"
            )

    @property
    def model(self) -> ModelSpec:
        return self.trainer.model

    def with_(self, **fields: Any) -> PostTraining:
        """A copy with fields changed."""
        return replace(self, **fields)

    def with_trainer(self, trainer: RunSpec) -> PostTraining:
        """With another layout or other options of the trainer: limits of tokens are a GPU's, sequences of an update a
        data-parallel rank's."""
        old, new = self.trainer.parallel, trainer.parallel
        fields: dict[str, Any] = {}
        if self.dynamic:
            for name in ("update_tokens", "log_prob_tokens", "reference_tokens"):
                fields[name] = getattr(self, name) // old.cp * new.cp
        if self.update_sequences is not None:
            every = self.update_sequences * old.data_parallel_size
            fields["update_sequences"] = max(1, every // new.data_parallel_size)
        return self.with_(trainer=trainer, **fields)

    def with_share(self, share: float) -> PostTraining:
        """With this gpu_memory_utilization or mem_fraction_static."""
        field: dict[str, Any] = {self.share_name: share}
        return replace(self, engine=replace(self.engine, **field))

    @property
    def share_name(self) -> str:
        return "gpu_memory_utilization" if self.engine.framework == "vllm" else "mem_fraction_static"

    @property
    def of_megatron(self) -> bool:
        return not self.trainer.implementation.torch_layers

    def update_run(self, tokens: int | None = None) -> RunSpec:
        """The training step with micro batches of ``tokens``."""
        return self._run(self.trainer, tokens or self.update_tokens, self.update_entropy, forward_only=False)

    def log_prob_run(self, tokens: int | None = None) -> RunSpec:
        """The pass that computes old log-probabilities."""
        return self._run(self.trainer, tokens or self.log_prob_tokens, self.log_prob_entropy, forward_only=True)

    def reference_run(self, tokens: int | None = None) -> RunSpec:
        """The pass of the reference policy."""
        tokens = tokens or self.reference_tokens or self.log_prob_tokens
        return self._run(self.trainer, tokens, False, forward_only=True)

    def critic_run(self, *, forward_only: bool) -> RunSpec:
        """A step of the critic, or its pass. Its head gives one value a token: no logits."""
        assert self.critic is not None
        run = self.critic.run
        impl = replace(run.implementation, cross_entropy_loss_fusion=True, cross_entropy_fusion_impl="linear")
        if run.implementation.torch_layers:
            hf = replace(run.transformers, cut_cross_entropy=True)
            return self._batch(run.with_(transformers=hf), self.critic.tokens, forward_only)
        return self._batch(run.with_(implementation=impl), self.critic.tokens, forward_only)

    @property
    def rows_are_packed(self) -> bool:
        """Micro batches are a number of sequences without padding: of some length, at most ``longest`` each."""
        return not self.dynamic and self.trainer.batch.packed_sequences

    def worst(self, tokens: int) -> int:
        """The most tokens that balancing puts into a micro batch with this limit: a sequence more (up to verl 0.8).

        It balances work, 24576 l + l^2 of a sequence of l tokens, over as many micro batches as the tokens need
        (``utils/seqlen_balancing.py: rearrange_micro_batches``). Of 3,000 drawn batches none exceeded the limit by
        more than 0.36 of the longest sequence (``tests/rollout/test_against_verl.py``).
        """
        return tokens if self.hard_limit or not self.dynamic else tokens + self.longest

    def _run(self, run: RunSpec, tokens: int, entropy: bool, *, forward_only: bool) -> RunSpec:
        impl, hf = run.implementation, run.transformers
        fields: dict[str, Any] = {}
        if self.fused_kernels:
            if run.implementation.torch_layers:
                hf = replace(hf, cut_cross_entropy=True)
                if self.framework == "trl":
                    fields = {"policy_loss": "trl", "policy_forward_only": forward_only}
            else:
                fields = {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "linear"}
        else:
            fields = {
                "policy_loss": _LOSS.get(self.framework, self.framework),
                "policy_entropy": entropy,
                "policy_chunk_size": self.chunk_size,
                "policy_forward_only": forward_only, "policy_defers_fp32": self.deferred_logits,
                "policy_rescales": self.rescaled_logits,
            }  # fmt: skip
        run = run.with_(implementation=replace(impl, **fields), transformers=hf)
        return self._batch(run, tokens, forward_only)

    def _batch(self, run: RunSpec, tokens: int, forward_only: bool) -> RunSpec:
        """Rows are padded to a multiple of what tensor and context parallelism divide them by (verl
        ``models/mcore/util.py: preprocess_thd_engine``)."""
        parallel = run.parallel
        step = lcm(parallel.tp, 2 * parallel.cp if parallel.cp > 1 else 1)
        packed = run.batch.packed_sequences
        length, rows = (tokens, 1) if packed else (self.longest, max(1, tokens // self.longest))
        number: int | None = 1
        if not forward_only:
            number = self.update_sequences and max(1, -(-self.update_sequences * self.longest // tokens))
        batch = BatchSpec(
            seq_length=-(-length // step) * step,
            micro_batch_size=rows,
            packed_sequences=packed,
            global_batch_size=None if number is None else number * rows * parallel.data_parallel_size,
        )
        return run.with_(batch=batch)
