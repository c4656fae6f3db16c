"""A ``torch.cuda.memory._dump_snapshot`` pickle: read without executing it, replayed to its peak, attributed.

The file is a dict of ``segments`` (what the allocator holds when the snapshot is taken) and ``device_traces`` (what it
did before, newest last, as far as the ring buffer goes back); see the docstring of ``torch.cuda.memory._snapshot``.
Blocks alive at the peak are given to components by the innermost of their stack frames that says something.
"""

from __future__ import annotations

import gc
import io
import os
import pickle
import pickletools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache
from typing import Any

from bridge_memory.components import Component, Part, Role, allocated
from bridge_memory.spec import SpecError, show
from bridge_memory.spec.errors import bounded

#: Bytes of a file, blocks in it, and characters of a frame's file (its end) and function (its beginning).
MOST_OF_A_SNAPSHOT = 2 << 30
MOST_BLOCKS = 2_000_000
LONGEST_NAME = 500

#: A stretch of what pickle writes of dicts, lists, numbers and text (``pickletools.opcodes``), but for long texts.
#: Tuples hold small numbers alone: Python hashes a key part by part, however often a tuple holds another twice.
_NUMBER = rb"(?:K.|M..|J....)"
_PLAIN = re.compile(
    rb"(?:" + _NUMBER + rb"{2}\x86|" + _NUMBER + rb"|[N\x88\x89]|G.{8}|\x8a(?:"
    + rb"|".join(rb"[\x%02x].{%d}" % (n, n) for n in range(17))
    + rb")|[\]})(aesu\x94.]|h.|j....|q.|r.{3}\0|\x95.{8}){1,4096}", re.DOTALL,
)  # fmt: skip
#: Opcode of a text -> bytes of the length before it.
_TEXTS = {0x8C: 1, ord("X"): 4, 0x8D: 8}
#: Opcodes that import or call.
_CODE = ("GLOBAL", "STACK_GLOBAL", "REDUCE", "BUILD", "INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "EXT1", "EXT2", "EXT4")


def _check_plain(data: bytes) -> None:
    """Raise SpecError for a pickle that makes more than plain data, or more of it than it has opcodes."""
    at = 2  # after the protocol
    while at < len(data):
        if width := _TEXTS.get(data[at]):
            at += 1 + width + int.from_bytes(data[at + 1 : at + 1 + width], "little")
        elif found := _PLAIN.match(data, at):
            at = found.end()
        else:
            opcode = next((code.name for code in pickletools.opcodes if ord(code.code) == data[at]), "no opcode")
            what = "holds code" if opcode in _CODE else "is malformed"
            raise SpecError(f"the snapshot {what} ({opcode}); give a file that torch.cuda.memory._dump_snapshot wrote")


class _NoCode(pickle.Unpickler):
    """Refuses code once more, whatever ``_check_plain`` takes for none."""

    def find_class(self, module: str, name: str) -> Any:
        raise SpecError("the snapshot holds code; give a file that torch.cuda.memory._dump_snapshot wrote")


@contextmanager
def _without_collections() -> Iterator[None]:
    """Python's collector looks at all lists again and again while millions are made, and finds nothing."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def is_snapshot(head: bytes) -> bool:
    """Whether bytes that begin so are a pickle."""
    return head[:1] == pickle.PROTO


def read_snapshot(data: bytes, path: str | os.PathLike[str]) -> dict[str, Any]:
    """The snapshot's dict, of what the file at ``path`` holds. Raises SpecError for a file that is something else, or
    holds code."""
    try:
        if data[:1] != pickle.PROTO:
            raise ValueError
        _check_plain(data)
        with _without_collections():
            value = _NoCode(io.BytesIO(data)).load()
    except SpecError:
        raise
    except Exception as error:
        raise SpecError(f"{path} is not a pickle ({type(error).__name__}); give a file of _dump_snapshot") from None
    if not isinstance(value, dict) or not isinstance(value.get("segments"), list):
        raise SpecError(f"{path} is not a memory snapshot (no segments); give a file of _dump_snapshot")
    return value


@dataclass(frozen=True, slots=True)
class Frame:
    filename: str
    name: str
    line: int

    def __str__(self) -> str:
        return f"{'/'.join(self.filename.split('/')[-3:])}:{self.line} {self.name}"


@dataclass(frozen=True, slots=True)
class Block:
    """One allocation that is alive: bytes given, and the frames that asked for it, innermost first."""

    size: int
    frames: tuple[Frame, ...]
    #: Whether the trace saw the allocation. If so, no frames mean a thread without Python: autograd's.
    traced: bool = True


@dataclass(frozen=True, slots=True)
class Alive:
    """Blocks alive at the peak of a snapshot, and bytes at its end."""

    device: int
    peak_bytes: int
    blocks: tuple[Block, ...]
    end_bytes: int
    #: Number of events of the trace, and of those after the peak.
    events: int
    events_after_peak: int
    #: (event, bytes allocated after it) over the trace, oldest first; thinned, but with the peak.
    curve: tuple[tuple[int, int], ...] = ()


def at_peak(snapshot: dict[str, Any], device: int | None = None) -> Alive:
    """The blocks alive at the peak, found by undoing the trace from its end.

    ``device``: None: the one with the most allocated bytes. Without a trace the end is the peak. Raises SpecError for
    an unknown device or a malformed snapshot.
    """
    try:
        return _at_peak(snapshot, device)
    except SpecError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError, RecursionError) as error:
        why = f"{type(error).__name__}: {bounded(str(error), 100)}"
        raise SpecError(f"the snapshot is malformed ({why}); give a file of _dump_snapshot") from None


def _at_peak(snapshot: dict[str, Any], device: int | None) -> Alive:
    ends: dict[int, dict[int, Block]] = {}
    frames = _Frames()
    if sum(len(segment["blocks"]) for segment in snapshot["segments"]) > MOST_BLOCKS:
        raise SpecError(f"the snapshot has more than {MOST_BLOCKS} blocks; give a file of _dump_snapshot")
    for segment in snapshot["segments"]:
        held = ends.setdefault(_whole(segment.get("device", 0)), {})
        address = _whole(segment["address"])
        for block in segment["blocks"]:
            start, size = _whole(block.get("address", address)), _whole(block["size"])
            if block["state"] == "active_allocated":
                held[start] = Block(size, frames.of(block), traced=False)
            address = start + size
    traces = snapshot.get("device_traces") or []
    if device is None:
        device = max(ends, key=lambda d: sum(b.size for b in ends[d].values()), default=0)
    if device not in ends and not (0 <= device < len(traces) and traces[device]):
        raise SpecError(f"device {device} is not in the snapshot; it has {sorted(ends)}")
    trace = traces[device] if 0 <= device < len(traces) else []
    for event in trace:
        if event["action"] in ("alloc", "free_requested"):
            _whole(event["addr"])
    seen = {event["addr"] for event in trace if event["action"] == "alloc"}
    end = {
        start: replace(block, traced=True) if start in seen else block
        for start, block in ends.get(device, {}).items()
    }
    alive = dict(end)
    end_bytes = total = sum(b.size for b in alive.values())

    # Which allocation a free belongs to: the last one before it at the same address.
    allocated_by: dict[int, int] = {}
    origin: dict[int, int] = {}
    for i, event in enumerate(trace):
        if event["action"] == "alloc":
            allocated_by[event["addr"]] = i
        elif event["action"] == "free_requested" and event["addr"] in allocated_by:
            origin[i] = allocated_by.pop(event["addr"])

    def undo(i: int) -> int:
        """Undo event ``i``; returns the change in bytes."""
        event = trace[i]
        if event["action"] == "alloc":
            gone = alive.pop(event["addr"], None)
            return -gone.size if gone else 0
        if event["action"] == "free_requested" and event["addr"] not in alive:
            source = trace[origin[i]] if i in origin else None
            size = allocated(_whole(event["size"]))  # requested bytes; segments hold the rounded size
            block = Block(size, frames.of(source) if source else (), traced=source is not None)
            alive[event["addr"]] = block
            return block.size
        return 0

    # First pass: find the peak. Second pass, from the end again: collect the blocks alive there.
    peak, peak_index = total, len(trace)
    totals = [total]
    for i in range(len(trace) - 1, -1, -1):
        total += undo(i)
        totals.append(total)
        if total > peak:
            peak, peak_index = total, i
    alive = dict(end)
    for i in range(len(trace) - 1, peak_index - 1, -1):
        undo(i)
    return Alive(
        device, peak, tuple(alive.values()), end_bytes, len(trace), len(trace) - peak_index, _thinned(totals[::-1])
    )


#: Points of a curve, about.
_POINTS = 1200


def _thinned(totals: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """(index, value) of the lowest and the highest value of each stretch, in order."""
    stretch = max(1, 2 * len(totals) // _POINTS)
    kept = set()
    for start in range(0, len(totals), stretch):
        places = range(start, min(start + stretch, len(totals)))
        kept |= {min(places, key=totals.__getitem__), max(places, key=totals.__getitem__)}
    return tuple((i, totals[i]) for i in sorted({0, *kept, len(totals) - 1}))


def _whole(value: object) -> int:
    """An address or a number of bytes. Raises ValueError."""
    if not isinstance(value, int) or not 0 <= value < 1 << 64:
        raise ValueError(f"{show(value)} is no size and no address")
    return value


class _Frames:
    """Stacks of a snapshot, each read once: blocks with the same stack share one object."""

    def __init__(self) -> None:
        self._stacks: dict[int, tuple[Frame, ...]] = {}
        self._frames: dict[int, Frame] = {}

    def of(self, holder: dict[str, Any]) -> tuple[Frame, ...]:
        """The frames of a block or an event. The snapshot must stay alive, so that ids are unique."""
        stack = holder.get("frames")
        if not stack and holder.get("history"):  # snapshots before torch 2.2 keep frames in a history
            stack = holder["history"][0].get("frames")
        if not stack:
            return ()
        if id(stack) not in self._stacks:
            self._stacks[id(stack)] = tuple(map(self._frame, stack))
        return self._stacks[id(stack)]

    def _frame(self, entry: dict[str, Any]) -> Frame:
        if id(entry) not in self._frames:
            filename, name, line = entry.get("filename", ""), entry.get("name", ""), entry.get("line", 0)
            if not isinstance(filename, str) or not isinstance(name, str):
                raise ValueError("a frame's filename and name must be text")
            number = line if isinstance(line, int) and abs(line) < 1 << 64 else 0
            self._frames[id(entry)] = Frame(filename[-LONGEST_NAME:], name[:LONGEST_NAME], number)
        return self._frames[id(entry)]


# ---------------------------------------------------------------------------------------------------------------
# Attribution
# ---------------------------------------------------------------------------------------------------------------


class Group(str, Enum):
    """Groups of memory besides the parts of ``components.Part``."""

    WEIGHTS = "weights and gradients"
    STATES = "optimizer states"
    TEMPORARIES = "temporaries of backward"
    CLIPPING = "gradient norm and clipping"
    OTHER = "other"
    UNATTRIBUTED = "unattributed"

    def __str__(self) -> str:
        return str(self.value)


@dataclass(frozen=True, slots=True)
class _Rule:
    """A frame whose file (and function) match belongs to ``group``."""

    group: Part | Group
    file: str
    function: str = ""


#: Tried for each frame from the innermost outwards; the first match wins. Files on every path
#: (tensor_parallel/layers.py, TE's linears in forward) have no rule, so that their caller decides. Source of the names:
#: megatron-core 0.16, Transformer Engine 2.x.
_RULES = tuple(
    _Rule(*rule)
    for rule in (
        (Group.STATES,
         r"(fused_adam|/adam|adamw|sgd|muon|/optimizer|distrib_optimizer|cpu_offloading/hybrid_optimizer)\.py$",
         r"(?!.*(zero_grad|clip)).*"),
        (Group.WEIGHTS, r"param_and_grad_buffer\.py$"),
        (Part.BATCH, r"(gpt_step|pretrain_gpt|vlm_step|training/utils/batch_utils|datasets/.*)\.py$"),
        (Part.WORKSPACE, r"(module/base|cpp_extensions/gemm)\.py$", r"get_(cublas_|multi_stream_)?.*workspace.*"),
        (Part.PIPELINE, r"p2p_communication\.py$"),
        (Part.ROTARY, r"(rotary_pos_embedding|yarn_rotary_pos_embedding|rope_utils)\.py$",
         r"(forward|get_.*|_.*)?(emb|freqs|cos_sin|forward).*"),
        (Part.LOSS, r"(fused_cross_entropy|cross_entropy|language_module|linear_cross_entropy)\.py$"),
        (Part.LOSS, r"(gpt_model|mamba_model)\.py$", r"_postprocess|forward"),
        (Part.EMBEDDING, r"(language_model_embedding|vocab_parallel_embedding)\.py$"),
        (Part.EMBEDDING, r"(gpt_model|mamba_model)\.py$", r"_preprocess"),
        (Part.EMBEDDING, r"tensor_parallel/layers\.py$", r"VocabParallelEmbedding.*"),
        (Part.MOE_SHARED_EXPERTS, r"shared_experts\.py$"),
        (Part.MOE_EXPERTS, r"(moe/experts|module/grouped_linear|grouped_mlp)\.py$"),
        (Part.MOE_ROUTER,
         r"(moe/router|moe/token_dispatcher|moe/moe_utils|fused_a2a|pytorch/permutation|triton/permutation)\.py$"),
        (Part.MOE, r"moe/moe_layer\.py$"),
        (Part.MLA, r"(multi_latent_attention|mla.*)\.py$"),
        (Part.ATTENTION, r"(transformer/.*attention|dot_product_attention.*|attention/.*|flash_attn.*)\.py$"),
        (Part.MLP, r"(transformer/mlp|layernorm_mlp|fused_bias_(swiglu|geglu|gelu))\.py$"),
        (Part.GATED_DELTA_NET, r"(ssm/gated_delta_net|fla/.*)\.py$"),
        (Part.MAMBA, r"(ssm/.*|mamba_ssm/.*|causal_conv1d/.*)\.py$"),
        (Part.FINAL_NORM, r"transformer_block\.py$", r"forward.*norm.*"),
        (Part.LAYER_INPUT, r"(transformer_layer|fused_bias_dropout|transformer_block|layernorm|rmsnorm)\.py$"),
        (Group.TEMPORARIES, r"(layernorm_linear|module/linear)\.py$", r"backward"),
        (Group.TEMPORARIES, r"autograd/graph\.py$"),
        (Group.CLIPPING, r"(clip_grads|/optimizer)\.py$"),
    )
)  # fmt: skip
_COMPILED = tuple((r.group, re.compile(r.file), re.compile(r.function) if r.function else None) for r in _RULES)


#: A group -> groups that take precedence where an outer frame matches them: an expert runs the files of an MLP, latent
#: attention those of attention.
_INSIDE: dict[Part | Group, tuple[Part, ...]] = {
    Part.MLP: (Part.MOE_EXPERTS, Part.MOE_SHARED_EXPERTS), Part.ATTENTION: (Part.MLA,)
}  # fmt: skip


def group_of(frames: Sequence[Frame], *, traced: bool = False) -> Part | Group:
    """The group of an allocation, or UNATTRIBUTED.

    ``traced``: the trace holds its allocation, so an empty stack means the autograd engine's own thread.
    """
    if traced and not frames:
        return Group.TEMPORARIES
    for frame in frames:
        if not frame.filename.endswith(".py"):
            continue
        # The constructor of any module allocates parameters.
        if frame.name in ("__init__", "reset_parameters") and "site-packages/torch/" not in frame.filename:
            return Group.WEIGHTS
        found = _rule(frame)
        if found is not None:
            callers = _INSIDE.get(found, ())
            return next((outer for outer in map(_rule, frames) if outer in callers and outer is not None), found)
    # Recorded C++ frames: the autograd engine runs backward without Python.
    return Group.TEMPORARIES if any("autograd::Engine" in frame.name for frame in frames) else Group.UNATTRIBUTED


@lru_cache(maxsize=1 << 16)
def _rule(frame: Frame) -> Part | Group | None:
    for group, file, function in _COMPILED:
        if file.search(frame.filename) and (function is None or function.fullmatch(frame.name)):
            return group
    return None


#: Parts of the inventory whose allocations have the same frames as another group.
_SEEN_AS: dict[Part, Part | Group] = {
    Part.RUNNING: Group.TEMPORARIES, Part.RECOMPUTED_INPUT: Part.LAYER_INPUT, Part.DISPATCHER: Part.MOE_ROUTER,
    Part.NONE: Group.OTHER,
}  # fmt: skip


def predicted_group(component: Component) -> Part | Group:
    """The group of a component of the inventory."""
    if component.role in (Role.WEIGHTS, Role.GRADIENTS):
        return Group.WEIGHTS
    if component.role is Role.OPTIMIZER:
        return Group.STATES
    return _SEEN_AS.get(component.part, component.part)


@dataclass(frozen=True, slots=True)
class GroupBytes:
    group: Part | Group
    measured: int
    predicted: int
    blocks: int


@dataclass(frozen=True, slots=True)
class Attribution:
    """The peak of a snapshot by group, largest first; ``unattributed``: frames that match no rule."""

    alive: Alive
    groups: tuple[GroupBytes, ...]
    #: (frames as text, bytes), largest first.
    unattributed: tuple[tuple[str, int], ...]

    @property
    def unattributed_bytes(self) -> int:
        return sum(g.measured for g in self.groups if g.group is Group.UNATTRIBUTED)

    @property
    def attributed_share(self) -> float:
        return 1.0 - self.unattributed_bytes / self.alive.peak_bytes if self.alive.peak_bytes else 1.0


def attribute(alive: Alive, components: Iterable[Component] = (), *, frames_shown: int = 4) -> Attribution:
    """Attribute every block alive at the peak to a group, with the bytes predicted for the group."""
    measured: Counter[Part | Group] = Counter()
    blocks: Counter[Part | Group] = Counter()
    rest: Counter[str] = Counter()
    # All blocks with the same stack have the same group.
    groups: dict[tuple[int, bool], tuple[Part | Group, str]] = {}
    for block in alive.blocks:
        stack = (id(block.frames), block.traced)
        if stack not in groups:
            text = " < ".join(_informative(block.frames, frames_shown)) or "(no frames recorded)"
            groups[stack] = group_of(block.frames, traced=block.traced), text
        group, text = groups[stack]
        measured[group] += block.size
        blocks[group] += 1
        if group is Group.UNATTRIBUTED:
            rest[text] += block.size
    predicted: Counter[Part | Group] = Counter()
    for component in components:
        predicted[predicted_group(component)] += component.bytes
    names = sorted(set(measured) | set(predicted), key=lambda g: (-measured[g], -predicted[g], g))
    return Attribution(
        alive,
        tuple(GroupBytes(g, measured[g], predicted[g], blocks[g]) for g in names if measured[g] or predicted[g]),
        tuple(rest.most_common()),
    )


def _informative(frames: Sequence[Frame], most: int) -> Iterator[str]:
    """Python frames outside of torch; without any, the innermost frames."""
    own = [f for f in frames if f.filename.endswith(".py") and "/torch/" not in f.filename]
    for frame in (own or list(frames))[:most]:
        yield str(frame)
