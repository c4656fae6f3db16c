"""InferenceMemory: what an inference engine holds, awake and asleep, and how many tokens its cache has."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil
from typing import NamedTuple

from bridge_memory.cards.generations import AMD
from bridge_memory.cards.gpu import Gpu
from bridge_memory.components import GIB, Provenance
from bridge_memory.outside.amount import Amount, Range, exactly, total
from bridge_memory.rollout.inference import beside, defaults, graphs, kv_sglang, kv_vllm, profile, rules
from bridge_memory.rollout.inference.layer_cache import Kind, layer_caches, layers_of_stage
from bridge_memory.rollout.inference.lora import lora_amount
from bridge_memory.rollout.inference.spec import InferenceSpec
from bridge_memory.rollout.inference.weights import weight_amount
from bridge_memory.spec import SpecError
from bridge_memory.spec.errors import finite, show

NOTHING = Range(0, 0)
TITLES = {"vllm": "vLLM", "sglang": "SGLang"}
#: What can be put to sleep and woken by itself: vLLM's tags are the first two (``device_allocator: DEFERRABLE_TAGS``),
#: SGLang's all three (``constants.py: GPU_MEMORY_ALL_TYPES``).
TAGS = ("weights", "kv_cache", "cuda_graph")


COMMUNICATION = "communication"


class Held(NamedTuple):
    """An amount, and the tag with which it sleeps: one of ``TAGS``; "engine": with all of vLLM's pool; and "step": only
    while a step runs. Others never sleep: "" is there from the process's start, ``COMMUNICATION`` from the first
    collective, "late" from the first step."""

    amount: Amount
    tag: str


class Asleep(NamedTuple):
    """What is left on the GPU, and the copies in host memory, of one rank."""

    components: tuple[Amount, ...]
    host: tuple[Amount, ...]

    @property
    def total(self) -> Range:
        """Bytes on the GPU."""
        return total(self.components)

    @property
    def host_bytes(self) -> Range:
        return total(self.host)


@dataclass(frozen=True, slots=True)
class InferenceMemory:
    """The fullest rank of an engine on one card.

    Ranges hold what kernels and the driver decide. ``least`` of a capacity is what is sure to be there.

    Example:
        >>> from bridge_memory import find_gpu, resolve_model
        >>> from bridge_memory.rollout.inference import InferenceSpec, inference_memory
        >>> found = inference_memory(InferenceSpec(model=resolve_model("Qwen/Qwen3-4B")), find_gpu("A100-80GB"))
        >>> found.kv_bytes_per_token, found.starts
        (147456, True)
    """

    spec: InferenceSpec
    gpu: Gpu
    #: What other processes hold at the engine's start.
    other_bytes: Range
    held: tuple[Held, ...]
    #: Bytes that the engine gives to its KV cache.
    available: Range
    #: vLLM: blocks. SGLang: pages.
    num_blocks: Range
    #: Tokens of a block or page.
    block_size: int
    #: Bytes of one more token of a long sequence in all layers that keep it, on this rank.
    kv_bytes_per_token: int
    #: Tokens that the engine reports at its start: vLLM's "GPU KV cache size", SGLang's max_total_num_tokens.
    kv_tokens: Range
    #: Sequences that run at once at most: max_num_seqs, and what SGLang's tables and states hold.
    max_sequences: Range
    #: Whether it starts for sure; whether it can.
    starts: bool
    may_start: bool
    #: Why not, in one line; "" if ``starts``. It begins with "free memory" where a smaller share of the card helps.
    why_not: str

    @property
    def components(self) -> tuple[Amount, ...]:
        """All of it while a step runs at its limits."""
        return tuple(one.amount for one in self.held if one.amount.most)

    @property
    def total(self) -> Range:
        """Bytes on the GPU while a step runs at its limits.

        Not the sum of the components' ranges: the cache takes what the others leave of the budget.
        """
        if self.spec.framework == "vllm":
            inside = [one.amount for one in self.held if _inside(self.spec, one)]
            rest = total(one.amount for one in self.held if not _inside(self.spec, one))
            if self.spec.kv_cache_memory_bytes is not None:
                return Range(total(inside).least + rest.least, total(inside).most + rest.most)
            budget = self._budget()
            if not rules.OTHERS_BESIDE_BUDGET(self.spec.release_numbers):
                budget -= self.other_bytes.least
            least = total(inside).least
            return Range(least + rest.least, max(least, budget) + rest.most)
        found = total(self.components)
        fraction = defaults.mem_fraction_static(self.spec, self.gpu)
        # Weights and cache together have the fraction of what the others and the process itself leave.
        share = fraction * (self.gpu.capacity_bytes - self.other_bytes.least)
        own = total(one.amount for one in self.held if one.tag in ("", COMMUNICATION)).most * (1 - fraction)
        rest = total(one.amount for one in self.held if one.tag in ("step", "late", "cuda_graph"))
        most = int(share + own) + rest.most + self._named("request tables").most
        return Range(found.least, min(found.most, max(found.least, most)))

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What the numbers rest on beyond the spec, one sentence each."""
        spec, found = self.spec, []
        title, release = TITLES[spec.framework], spec.release_numbers
        first, last = rules.READ[spec.framework]
        if not first <= release <= last:
            near = first if release < first else last
            near_words, asked = rules.words(near), rules.words(release)
            found.append(f"the rules of {title} {near_words} stand for {asked}, which was not read")
        if spec.framework == "sglang" and spec.data_parallel_size > 1 and not spec.dp_attention:
            found.append("data-parallel replicas of SGLang are separate processes; one of them is counted")
        if spec.model.mtp_num_layers:
            found.append("MTP layers are not loaded, since speculative decoding is not modelled")
        if spec.model.encoders:
            found.append("modality encoders: their weights alone, whole on a rank or divided")
        if self.gpu.vendor == AMD:
            found.append("communicators, kernels and workspaces on AMD cards are those of NVIDIA's")
        return tuple(found)

    @property
    def kv(self) -> Amount:
        return self._named("KV cache")

    @property
    def weights(self) -> Amount:
        return self._named("weights")

    def in_torch_asleep(self, level: int) -> Range:
        """Of what is left on the GPU asleep: what torch's allocator has, beside the pool that sleeps."""
        own = {one.name for one in (*beside.process(self.gpu), beside.loaded_late())}
        own |= {one.amount.name for one in self.held if one.tag == COMMUNICATION}
        return total(one for one in self.asleep(level).components if one.name not in own)

    def concurrent_sequences(self, length: int) -> Range:
        """Whole sequences of ``length`` tokens that fit into the cache at once, least and most. The engine runs no more
        than ``max_sequences`` of them.

        Raises:
            SpecError: ``length`` is not positive.
        """
        if type(length) is not int or length < 1:
            raise SpecError(f"length ({show(length)}) is not a positive number of tokens; give one")
        found = [_sequences(self, blocks, length) for blocks in self.num_blocks]
        return Range(*found)

    def asleep(self, level: int = 1, tags: Collection[str] | None = None) -> Asleep:
        """After the engine went to sleep.

        Args:
            level: 1: weights to host memory; 2: weights dropped. SGLang: 1 with enable_weights_cpu_backup, else 2.
            tags: SGLang: what sleeps, of ``TAGS``; None: all that can. vLLM puts all to sleep.

        Returns:
            What is left on this rank, and copies on the host.

        Raises:
            SpecError: the level or a tag does not exist, or the engine was started without sleep.
        """
        if level not in (1, 2) or type(level) is not int:
            raise SpecError(f"level ({show(level)}) of sleep is neither 1 nor 2; give one")
        if not self.spec.sleep_mode:
            raise SpecError("sleep_mode (False) keeps the engine awake; give sleep_mode=True")
        asleep = self._tags(tags, TAGS)
        gone = {tag for tag in asleep if tag != "cuda_graph" or self.spec.sleep_cuda_graphs}
        if self.spec.framework == "vllm":
            gone |= {"engine"}
        left = tuple(one.amount for one in self.held if one.tag not in gone | {"step"} and one.amount.most)
        return Asleep(left, tuple(self._host(level, gone)))

    def awake(self, tags: Collection[str], level: int = 1) -> Asleep:
        """After a wake-up of some ``tags`` alone, from sleep: before the others wake.

        vLLM wakes all that has no tag of its own with the first (``device_allocator/cumem.py: wake_up``).
        """
        woken = self._tags(tags, ())
        before = self.asleep(level)
        sleeps = {one.amount.name for one in self.held} - {one.name for one in before.components}
        tagged = {*woken, "engine"} if woken else set()
        back = [one for one in self.held if one.amount.name in sleeps and one.tag in tagged and one.amount.most]
        host = before.host if "weights" not in woken else ()
        order = [one.amount for one in self.held if one.amount in before.components or one in back]
        return Asleep(tuple(order), host)

    def at_utilization(self, utilization: float) -> InferenceMemory:
        """The same engine with another gpu_memory_utilization, or mem_fraction_static."""
        return inference_memory(_with(self.spec, utilization), self.gpu, other_bytes=self.other_bytes)

    def utilization_for(self, kv_tokens: int) -> float:
        """The smallest utilization (vLLM) or mem_fraction_static (SGLang) whose cache has ``kv_tokens`` for sure.

        To a ten-thousandth. SGLang's recurrent states are whole: tokens can fall by less than one's bytes where the
        share grows, and this is then one of the smallest.

        Raises:
            SpecError: the card cannot hold them.
        """
        if type(kv_tokens) is not int or kv_tokens < 1:
            raise SpecError(f"kv_tokens ({show(kv_tokens)}) is not a positive number of tokens; give one")
        low, high = 0, 10_000
        if self._tokens_at(high) < kv_tokens:
            raise SpecError(
                f"kv_tokens ({kv_tokens}) do not fit on {self.gpu.name}: at most {max(0, self._tokens_at(high))} do; "
                f"give fewer, or more ranks"
            )
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._tokens_at(middle) >= kv_tokens else (middle, high)
        return high / 10_000

    def _tokens_at(self, step: int) -> int:
        return self.at_utilization(step / 10_000).kv_tokens.least if step else 0

    def _budget(self) -> int:
        return ceil(self.gpu.capacity_bytes * defaults.gpu_memory_utilization(self.spec))

    def _named(self, name: str) -> Amount:
        return next((one.amount for one in self.held if one.amount.name == name), exactly(name, 0))

    def _tags(self, tags: Collection[str] | None, usual: tuple[str, ...]) -> tuple[str, ...]:
        if tags is None:
            return usual
        for tag in [tags] if isinstance(tags, str) else tags:
            if tag not in TAGS:
                raise SpecError(f"tag {show(tag)} is none of {', '.join(TAGS)}; give some of them")
        return tuple(tags) if not isinstance(tags, str) else (tags,)

    def _host(self, level: int, gone: set[str]) -> list[Amount]:
        """Pinned copies. torch's allocator of pinned memory takes powers of two (runs 140 to 142): up to twice."""
        found = []
        if level == 1 and "weights" in gone:
            least, most = self.weights.least, 2 * self.weights.most
            if self.spec.framework == "sglang":
                most = self.weights.most  # torch_memory_saver copies with cudaMallocHost
            found.append(Amount("weights on the host", least, most, Provenance.FORMULA,
                                "device_allocator/cumem.py: sleep; runs 140 to 142"))  # fmt: skip
        if self.spec.sleep_cuda_graphs and "cuda_graph" in gone:
            graph = self._named("CUDA graphs")
            found.append(Amount("CUDA graphs on the host", 0, 2 * graph.most, graph.provenance, graph.source))
        return found


def inference_memory(spec: InferenceSpec, gpu: Gpu, *, other_bytes: Range = NOTHING) -> InferenceMemory:
    """What an engine holds on its fullest rank.

    Args:
        spec: The engine.
        gpu: Its card.
        other_bytes: Bytes that other processes hold on the card at the engine's start, least and most.

    Returns:
        Components, the KV cache's capacity, and whether the engine starts.

    Raises:
        SpecError: sizes that do not divide, or a model without a known cache.

    Example:
        >>> from bridge_memory import find_gpu, resolve_model
        >>> spec = InferenceSpec(model=resolve_model("meta-llama/Llama-3.1-8B"), gpu_memory_utilization=0.5)
        >>> found = inference_memory(spec, find_gpu("H100"), other_bytes=Range(10 << 30, 12 << 30))
        >>> 100_000 < found.kv_tokens.least < found.kv_tokens.most < 250_000
        True
    """
    _check_other(other_bytes)
    plain = _plain(spec)
    stages = [_stage(plain, gpu, stage) for stage in range(spec.pipeline_parallel_size)]
    build = _vllm if spec.framework == "vllm" else _sglang
    return build(spec, plain, gpu, other_bytes, stages)


def _check_other(other: Range) -> None:
    if not (isinstance(other, tuple) and len(other) == 2 and all(type(one) is int for one in other)):
        raise SpecError(f"other_bytes ({show(other)}) is not a range of two whole numbers of bytes; give Range(a, b)")
    if not 0 <= other[0] <= other[1]:
        raise SpecError(f"other_bytes ({show(other)}) does not rise from 0; give Range(least, most)")


def _with(spec: InferenceSpec, utilization: float) -> InferenceSpec:
    if not finite(utilization):
        raise SpecError(f"utilization ({show(utilization)}) is not a number; give one above 0 and at most 1")
    if spec.framework == "vllm":
        return replace(spec, gpu_memory_utilization=utilization, kv_cache_memory_bytes=None)
    return replace(spec, mem_fraction_static=utilization)


class _Stage(NamedTuple):
    """What a rank of a stage holds without its cache."""

    place: int
    held: tuple[Held, ...]

    def sum_of(self, *tags: str) -> Range:
        return total(one.amount for one in self.held if one.tag in tags)


def _plain(spec: InferenceSpec) -> InferenceSpec:
    """Without its share of the card, so that what does not depend on it is computed once (``lru_cache``)."""
    if (spec.gpu_memory_utilization, spec.mem_fraction_static, spec.kv_cache_memory_bytes) == (None, None, None):
        return spec
    return replace(spec, gpu_memory_utilization=None, mem_fraction_static=None, kv_cache_memory_bytes=None)


@lru_cache(maxsize=512)
def _stage(spec: InferenceSpec, gpu: Gpu, stage: int) -> _Stage:
    held = [
        Held(weight_amount(spec, stage), "weights"),
        Held(profile.rotary_tables(spec), "weights"),
        Held(lora_amount(spec, stage), "weights"),
        Held(profile.headroom(spec, gpu, stage), "step"),
    ]
    if spec.framework == "vllm":
        size = kv_vllm.block_size(spec, gpu)
        groups = len(kv_vllm.plan(spec, gpu, stage).groups)
        state = profile.request_state(spec, gpu, stage, -(-spec.length // size), groups)
        held.append(Held(state, "engine" if rules.RUNTIME_SLEEPS(spec.release_numbers) else "late"))
    else:
        held.append(Held(graphs.graph_tables(spec, gpu, kv_sglang.page_size(spec, gpu)), "cuda_graph"))
    held.append(Held(graphs.graph_amount(spec, gpu, stage), "cuda_graph"))
    held.append(Held(profile.sparse_buffers(spec, gpu), "late"))
    held.append(Held(beside.workspaces(spec, gpu), "late"))
    held.append(Held(beside.loaded_late(), "late"))
    held += [Held(one, "") for one in beside.process(gpu)]
    held += [Held(one, COMMUNICATION) for one in beside.communicators(spec, gpu)]
    return _Stage(stage, tuple(held))


@lru_cache(maxsize=512)
def _kv_bytes_per_token(spec: InferenceSpec, stage: int) -> int:
    """Bytes of one more token of a long sequence: windows and states do not grow."""
    caches = layer_caches(spec, layers_of_stage(spec, stage))
    windows = spec.framework == "sglang" and not spec.model.model_type.startswith(kv_sglang.HYBRID_WINDOWS)
    keeps = (Kind.FULL, Kind.LATENT, *((Kind.SLIDING,) if windows else ()))
    return sum(one.nbytes for one in caches if one.kind in keeps)


def _inside(spec: InferenceSpec, held: Held) -> bool:
    """Whether vLLM takes an amount out of its budget."""
    release = spec.release_numbers
    if held.tag == "cuda_graph":
        return rules.GRAPHS_INSIDE_BUDGET(release)
    if held.tag == COMMUNICATION:
        return not rules.NCCL_BESIDE_BUDGET(release)
    return held.tag != "" or not rules.OTHERS_BESIDE_BUDGET(release)


def _vllm(
    spec: InferenceSpec, plain: InferenceSpec, gpu: Gpu, other: Range, stages: list[_Stage]
) -> InferenceMemory:
    requested = ceil(gpu.capacity_bytes * defaults.gpu_memory_utilization(spec))
    plans = [kv_vllm.plan(plain, gpu, one.place) for one in stages]
    spaces, blocks = [], []
    for one, plan in zip(stages, plans, strict=True):
        taken = total(held.amount for held in one.held if _inside(plain, held))
        if not rules.OTHERS_BESIDE_BUDGET(spec.release_numbers):
            taken = total([taken, Range(*other)])
        space = Range(requested - taken.most, requested - taken.least)
        if spec.kv_cache_memory_bytes is not None:
            space = Range(spec.kv_cache_memory_bytes, spec.kv_cache_memory_bytes)
        spaces.append(space)
        blocks.append(Range(*(max(0, one) // plan.block_bytes if plan.block_bytes else 1 for one in space)))
    number = Range(min(one.least for one in blocks), min(one.most for one in blocks))
    # The fullest rank has the least left: its weights are the most.
    fullest = min(range(len(stages)), key=lambda place: spaces[place].least)
    stage, plan, space = stages[fullest], plans[fullest], spaces[fullest]
    kv = Amount("KV cache", number.least * plan.block_bytes, number.most * plan.block_bytes, Provenance.FORMULA,
                "v1/core/kv_cache_planning.py: get_kv_cache_configs")  # fmt: skip
    held = (stage.held[0], Held(kv, "kv_cache"), *stage.held[1:])
    needed = kv_vllm.blocks_of(plain, gpu, spec.length)
    tokens = Range(*(kv_vllm.reported_tokens(plain, gpu, one) for one in number))
    own = stage.sum_of("", COMMUNICATION)
    free = Range(gpu.capacity_bytes - other.most - own.most, gpu.capacity_bytes - other.least - own.least)
    why = [""] * 2
    taken = total(one.amount for one in stage.held if one.tag not in ("", COMMUNICATION))
    for place, (unclaimed, count, rest, claimed) in enumerate(
        ((free.least, number.least, space.least, taken.most), (free.most, number.most, space.most, taken.least))
    ):
        if spec.kv_cache_memory_bytes is None and unclaimed < requested:
            why[place] = (
                f"free memory ({max(0, unclaimed) / GIB:.2f} GiB) is less than gpu_memory_utilization asks for "
                f"({requested / GIB:.2f} GiB)"
            )
        elif count * plan.block_bytes + claimed > unclaimed:
            why[place] = (
                f"free memory ({max(0, unclaimed) / GIB:.2f} GiB) is less than weights, KV cache and a step take "
                f"({(count * plan.block_bytes + claimed) / GIB:.2f} GiB)"
            )
        elif rest <= 0:
            why[place] = f"nothing is left for the KV cache ({rest / GIB:.2f} GiB)"
        elif plan.block_bytes and count - 1 < needed:
            why[place] = (f"one sequence of {spec.length} tokens needs {needed} blocks, and {max(0, count - 1)} of "
                          f"{count} can be used")  # fmt: skip
    return InferenceMemory(
        spec, gpu, Range(*other), held, space, number, kv_vllm.block_size(plain, gpu),
        _kv_bytes_per_token(plain, fullest), tokens, Range(*(defaults.max_num_seqs(spec, gpu),) * 2), not why[0],
        not why[1], why[0],
    )  # fmt: skip


def _sglang(
    spec: InferenceSpec, plain: InferenceSpec, gpu: Gpu, other: Range, stages: list[_Stage]
) -> InferenceMemory:
    fraction, page = defaults.mem_fraction_static(spec, gpu), kv_sglang.page_size(plain, gpu)
    own = stages[0].sum_of("", COMMUNICATION)
    before = Range(gpu.capacity_bytes - other.most - own.most, gpu.capacity_bytes - other.least - own.least)
    spaces, sizes = [], []
    for one in stages:
        taken = one.sum_of("weights")
        # Free after weights less the slack, which is a share of what was free before.
        space = Range(
            int(before.least - taken.most - before.least * (1 - fraction)),
            int(before.most - taken.least - before.most * (1 - fraction)),
        )
        spaces.append(space)
        found = kv_sglang.pools(plain, one.place)
        sizes.append([kv_sglang.sizes(plain, gpu, found, max(0, rest), page) for rest in space])
    tokens = Range(min(low.tokens for low, _ in sizes), min(high.tokens for _, high in sizes))
    fullest = min(range(len(stages)), key=lambda place: spaces[place].least)
    stage, space = stages[fullest], spaces[fullest]
    pool = kv_sglang.pools(plain, fullest)
    nbytes = [
        kv_sglang.bytes_of(pool, kv_sglang.shrunk(plain, pool, size, least, page), page)
        for size, least in zip(sizes[fullest], tokens, strict=True)
    ]
    kv = Amount("KV cache", nbytes[0], nbytes[1], Provenance.FORMULA,
                "mem_cache/kv_cache_configurator.py; pool_configurator.py")  # fmt: skip
    requests = Range(*(kv_sglang.most_requests(plain, pool, size) for size in sizes[fullest]))
    table = profile.token_table(plain, requests)
    held = (stage.held[0], Held(kv, "kv_cache"), Held(table, "kv_cache"), *stage.held[1:])
    slack = [int(one * (1 - fraction)) for one in before]
    rest = total([stage.sum_of("step", "cuda_graph", "late"), table])
    why = [""] * 2
    for place, (room, share, count, needs, most) in enumerate((
        (space.least, slack[0], tokens.least, rest.most, requests.least),
        (space.most, slack[1], tokens.most, rest.least, requests.most),
    )):  # fmt: skip
        if room <= 0 or count <= 0:
            why[place] = (
                f"weights leave nothing for the KV cache ({room / GIB:.2f} GiB) at mem_fraction_static {fraction}"
            )
        elif most <= 0:
            why[place] = f"the cache of recurrent states is too small for one sequence ({room / GIB:.2f} GiB in all)"
        elif share < needs:
            why[place] = (
                f"free memory beside mem_fraction_static {fraction} ({share / GIB:.2f} GiB) is less than graphs and a "
                f"step take ({needs / GIB:.2f} GiB)"
            )
    return InferenceMemory(
        spec, gpu, Range(*other), held, space, Range(tokens.least // page, tokens.most // page), page,
        _kv_bytes_per_token(plain, fullest), tokens, requests, not why[0], not why[1], why[0],
    )  # fmt: skip


def _sequences(memory: InferenceMemory, blocks: int, length: int) -> int:
    """Whole sequences in ``blocks``; vLLM keeps one block as null."""
    spec, gpu = _plain(memory.spec), memory.gpu
    if spec.framework == "vllm":
        each = kv_vllm.blocks_of(spec, gpu, length)
        return max(0, blocks - 1) // each if each else 0
    fit = blocks // -(-length // memory.block_size)
    recurrent = any(one.kind is Kind.STATE for one in layer_caches(spec, range(spec.model.num_layers)))
    return min(fit, memory.max_sequences[blocks != memory.num_blocks.least]) if recurrent else fit


class KvCapacity(NamedTuple):
    """What some bytes of KV cache are on each rank."""

    #: vLLM: blocks; SGLang: pages.
    num_blocks: int
    #: Tokens of a block or page.
    block_size: int
    #: Tokens that the engine reports.
    kv_tokens: int
    #: Bytes of the cache on each stage's ranks.
    nbytes: tuple[int, ...]


def kv_capacity(spec: InferenceSpec, gpu: Gpu, available_bytes: int) -> KvCapacity:
    """The cache that an engine makes of ``available_bytes`` on every rank, exactly.

    Args:
        spec: The engine.
        gpu: Its card, which decides block sizes.
        available_bytes: vLLM's "Available KV cache memory"; SGLang's free memory less its slack.

    Returns:
        Blocks, tokens, bytes.

    Example:
        >>> from bridge_memory import find_gpu, resolve_model
        >>> kv_capacity(InferenceSpec(model=resolve_model("Qwen/Qwen3-4B")), find_gpu("A100"), 23_106_994_176).kv_tokens
        156688
    """
    if type(available_bytes) is not int or available_bytes < 0:
        raise SpecError(f"available_bytes ({show(available_bytes)}) is not a number of bytes; give 0 or more")
    spec = _plain(spec)
    stages = range(spec.pipeline_parallel_size)
    if spec.framework == "vllm":
        plans = [kv_vllm.plan(spec, gpu, stage) for stage in stages]
        blocks = min(available_bytes // plan.block_bytes if plan.block_bytes else 1 for plan in plans)
        tokens = kv_vllm.reported_tokens(spec, gpu, blocks)
        return KvCapacity(
            blocks, kv_vllm.block_size(spec, gpu), tokens, tuple(blocks * plan.block_bytes for plan in plans)
        )
    page = kv_sglang.page_size(spec, gpu)
    pools = [kv_sglang.pools(spec, stage) for stage in stages]
    found = [kv_sglang.sizes(spec, gpu, pool, available_bytes, page) for pool in pools]
    tokens = min(one.tokens for one in found)
    found = [kv_sglang.shrunk(spec, pool, one, tokens, page) for pool, one in zip(pools, found, strict=True)]
    nbytes = tuple(kv_sglang.bytes_of(pool, size, page) for pool, size in zip(pools, found, strict=True))
    return KvCapacity(tokens // page, page, tokens, nbytes)
