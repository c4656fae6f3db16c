"""The server's five tools: estimate, explain, whatif, search, compare, by the ``mcp`` package (extra ``mcp``).

Each tool runs the command of its name and returns its JSON, shortened to what answers a question; a refusal of the
command is the tool's error, word for word. Arguments are typed and named as the command's flags.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any, Literal, ParamSpec

from mcp.server.mcpserver import MCPServer
from mcp.types import CallToolResult, TextContent
from pydantic import BaseModel, ConfigDict, Field

from bridge_memory import __version__
from bridge_memory.mcp_server.commands import MOST_SECONDS, answer, check_flags, check_seconds
from bridge_memory.spec import SpecError, show
from bridge_memory.spec.parts import ENGINES

#: Components that an estimate's peak is explained by; rows of tables; bytes of a log that is passed as text.
_LARGEST, _ROWS, _LONGEST_LOG = 10, 20, 4 << 20

_INSTRUCTIONS = """\
bridge-memory predicts the GPU memory of training runs without a GPU: Megatron-LM, Megatron Bridge, NeMo, verl, PyTorch
DDP and FSDP, DeepSpeed ZeRO. Ask `estimate` whether a run fits and which pipeline stage is the fullest; `explain` which
tensors take the memory of a stage; `whatif` what one change frees and costs; `search` which layouts fit and are fast;
`compare` how a log, journal or snapshot of the run differs from the prediction. Figures that end in _bytes are bytes of
one GPU; people read GiB (2**30 bytes). A verdict is "fits", "tight", "does not fit" or "unknown": say which, and list
what is not modelled. An error names the field and the fix: change that argument and ask again."""

if TYPE_CHECKING:
    Engine = str
else:  # the names, for the schema of the tools' arguments
    Engine = Literal[tuple(ENGINES)]


class Run(BaseModel):
    """A training run, as far as it differs from the defaults. Give `model`, `megatron_args` or `bridge_recipe`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = Field(None, description="an embedded model such as deepseek-ai/DeepSeek-V3 (or a part of its "
                              "name), or the path of a Hugging Face config.json")  # fmt: skip
    megatron_args: str | None = Field(None, description="Megatron-LM's arguments as one string, or a file with them")
    bridge_recipe: str | None = Field(None, description="a recipe function of the installed Megatron Bridge")
    num_gpus: int | None = Field(None, description="GPUs of the job; the data-parallel size follows")
    engine: Engine | None = Field(None, description="who keeps model state over data-parallel ranks (default: "
                                  "megatron_ddp); fsdp2, zero3 and others train Hugging Face's layers")  # fmt: skip
    tp: int | None = Field(None, description="tensor-parallel size")
    pp: int | None = Field(None, description="pipeline-parallel size")
    vpp: int | None = Field(None, description="virtual chunks a pipeline stage")
    cp: int | None = Field(None, description="context-parallel size")
    ep: int | None = Field(None, description="expert-parallel size")
    etp: int | None = Field(None, description="tensor-parallel size inside experts (default: tp)")
    seq_length: int | None = Field(None, description="tokens per sequence (default: 4096)")
    micro_batch_size: int | None = None
    global_batch_size: int | None = Field(None, description="sequences per step, over the whole job")
    num_layers: int | None = Field(None, description="decoder layers in place of the model's own number")
    num_layers_in_first_pipeline_stage: int | None = None
    num_layers_in_last_pipeline_stage: int | None = None
    pipeline_model_parallel_layout: str | None = Field(None, description='such as "Et*3|(tt|)*29,m|L"')
    precision: Literal["bf16", "fp16", "fp32"] | None = None
    fp8: Literal["hybrid", "e4m3"] | None = None
    fp8_recipe: Literal["delayed", "tensorwise", "blockwise", "mxfp8"] | None = None
    optimizer: str | None = Field(None, description="adam (default), sgd, muon; torch's adamw, adamw_8bit, ...")
    optimizer_cpu_offload: bool | None = None
    use_distributed_optimizer: bool | None = None
    peft: Literal["none", "lora"] | None = None
    recompute_granularity: Literal["full", "selective"] | None = None
    recompute_method: Literal["uniform", "block"] | None = None
    recompute_num_layers: int | None = None
    recompute_modules: list[str] | None = Field(None, description="core_attn, moe_act, layernorm, mla_up_proj, mlp, "
                                                "moe, shared_experts, mhc")  # fmt: skip
    gradient_checkpointing: bool | None = Field(None, description="of Hugging Face's layers")
    moe_token_dispatcher_type: Literal["alltoall", "allgather", "flex"] | None = None
    megatron_core: str | None = Field(None, description='the release whose rules hold, such as "0.19"')
    flags: list[str] = Field([], description="any other flags of `bridge-memory estimate --help`, one word each, such "
                             'as ["--fsdp-param-dtype", "bf16"]')  # fmt: skip

    def words(self) -> list[str]:
        """The words of the command line. Raises SpecError."""
        if self.model is not None and self.model.startswith("-"):
            raise SpecError(f"model ({show(self.model)}) is a flag; give a model, and flags in `flags`")
        check_flags(self.flags)
        words = [] if self.model is None else [self.model]
        for name in type(self).model_fields:
            value = getattr(self, name)
            if name in ("model", "flags") or value is None:
                continue
            flag = "--" + name.replace("_", "-")
            if isinstance(value, bool):
                words.append(flag if value else flag.replace("--", "--no-", 1))
            else:
                words.append(f"{flag}={','.join(value) if isinstance(value, list) else value}")
        return [*words, *self.flags]


Gpu = Annotated[str, Field(description="a GPU such as H100, A100-80GB, B200 (several: H100,B200, for estimate alone)")]
Seconds = Annotated[float, Field(description=f"the answer must be there in this time (at most {MOST_SECONDS:g} s)")]
Asked = dict[str, Any]
P = ParamSpec("P")

server = MCPServer("bridge-memory", instructions=_INSTRUCTIONS, version=__version__, log_level="WARNING")


def _tool(function: Callable[P, Awaitable[Asked]]) -> Callable[P, Awaitable[Asked | CallToolResult]]:
    """Register a tool whose refusals (SpecError) are its errors, word for word."""

    @wraps(function)
    async def called(*args: P.args, **kwargs: P.kwargs) -> Asked | CallToolResult:
        try:
            return await function(*args, **kwargs)
        except SpecError as error:
            return CallToolResult(content=[TextContent(type="text", text=str(error))], is_error=True)

    server.add_tool(called)
    return called


async def _asked(words: Sequence[str], seconds: float) -> Any:
    """The command's JSON. Raises SpecError."""
    check_seconds(seconds)
    return await answer(words, seconds=seconds)


def _of_gpu(gpu: str | None) -> list[str]:
    return [] if gpu is None else [f"--gpu={gpu}"]


def _largest(components: Sequence[Asked]) -> list[Asked]:
    """The largest components, and the sum of the others."""
    ordered = sorted(components, key=lambda c: -c["bytes"])
    shown = [{key: c[key] for key in ("name", "bytes", "role", "provenance", "shard")} for c in ordered[:_LARGEST]]
    rest = sum(c["bytes"] for c in ordered[_LARGEST:])
    return [*shown, {"name": f"{len(ordered) - _LARGEST} smaller ones", "bytes": rest}] if rest else shown


@_tool
async def estimate(run: Run, gpu: Gpu | None = None, timeout_seconds: Seconds = 60.0) -> Asked:
    """Predict the memory of every pipeline stage of a training run, and whether it fits a GPU.

    Returns the verdict in words with the accuracy of predictions of such runs, the bytes of every stage (weights,
    gradients, optimizer, activations, peak), the largest components of the fullest stage, what decides the peak
    (options without effect, assumptions, releases), assumptions, and features that are not modelled.
    """
    found = await _asked(["estimate", *run.words(), *_of_gpu(gpu)], timeout_seconds)
    fullest = next(s for s in found["stages"] if s["stage"] == found["peak"]["stage"])
    sizes = ("stage", "num_layers", "parameters", "in_flight_microbatches")
    stages = [
        {key: value for key, value in s.items() if key in sizes or key.endswith("_bytes") or key.startswith("peak_")}
        for s in found["stages"]
    ]
    keys = ("model", "parallelism", "run", "decisive", "fits", "assumptions", "not_modelled")
    return {
        "verdict": found["verdict"], "peak": found["peak"], "stages": stages,
        "largest_components": _largest(fullest["components"]), **{key: found[key] for key in keys},
    }  # fmt: skip


@_tool
async def explain(run: Run, stage: int = 0, tensors: bool = False, timeout_seconds: Seconds = 60.0) -> Asked:
    """Say which components make the memory of one pipeline stage at its peak, each with its bytes and its basis.

    `tensors`: also each parameter and each tensor that the stage's layers save for backward.
    """
    words = ["estimate", *run.words(), f"--stage={stage}", *(["-v"] if tensors else [])]
    found = await _asked(words, timeout_seconds)
    (shown,) = found["stages"]
    return {"stage": shown, "assumptions": found["assumptions"], "not_modelled": found["not_modelled"]}


@_tool
async def whatif(
    run: Run, gpu: Gpu | None = None, pairs: bool = False, target_gib: float | None = None,
    timeout_seconds: Seconds = 60.0,
) -> Asked:  # fmt: skip
    """Say what each single change of a run frees, in bytes of the fullest stage, and what it costs in step time.

    `pairs`: also pairs of changes. `target_gib`: the cheapest changes with which no stage exceeds so many GiB.
    """
    target = [] if target_gib is None else [f"--target-gib={target_gib}"]
    words = ["whatif", *run.words(), *_of_gpu(gpu), *(["--pairs"] if pairs else []), *target, f"--top={_ROWS}"]
    found: Asked = await _asked(words, timeout_seconds)
    return found


@_tool
async def search(
    run: Run, gpu: Gpu, vary: list[str] | None = None, headroom_gib: float = 0.0, top: int = 10,
    timeout_seconds: Seconds = 120.0,
) -> Asked:  # fmt: skip
    """Find the layouts of a model on `num_gpus` GPUs that fit a GPU, the fastest by predicted step time first.

    Sizes that `run` gives stay; the others vary. flags ["--engine", "any"] searches DDP, FSDP and ZeRO too.
    `vary`: only these axes (tp, pp, vpp, cp, ep, etp, mbs, split, recompute). `headroom_gib`: GiB that stay free beside
    the margin.
    """
    axes = [] if vary is None else [f"--vary={','.join(vary)}"]
    words = ["search", *run.words(), *_of_gpu(gpu), *axes, f"--headroom={headroom_gib}", f"--top={top}"]
    found: Asked = await _asked(words, timeout_seconds)
    found["best"] = found["best"][:top]
    return {key: value for key, value in found.items() if key != "front"}


@_tool
async def compare(
    measured: Annotated[str, Field(description="path of a log, journal or CUDA memory snapshot, or the log's text")],
    run: Run | None = None, timeout_seconds: Seconds = 60.0,
) -> Asked:  # fmt: skip
    """Compare what a training run measured with its prediction, stage by stage: measured minus predicted bytes.

    `run` may be left out where the log holds the run's Megatron arguments.
    """
    words = run.words() if run is not None else []
    if "\n" not in measured and os.path.exists(measured):
        found: Asked = await _asked(["compare", os.path.abspath(measured), *words], timeout_seconds)
        return found
    if len(measured) > _LONGEST_LOG:
        raise SpecError(f"measured holds {len(measured)} characters; give the log's last {_LONGEST_LOG}, or its path")
    if "\n" not in measured and len(measured) < 256:
        raise SpecError(f"measured ({show(measured)}) is no file; give the path of a log, or its text")
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "train.log")
        with open(path, "w", encoding="utf-8") as file:
            file.write(measured)
        try:
            found = await _asked(["compare", path, *words], timeout_seconds)
        except SpecError as error:
            raise SpecError(str(error).replace(path, "measured")) from None
    return {**found, "measured": "text"}
