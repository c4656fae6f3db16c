"""A world of the job's full size in one process: torch's fake process group, megatron-core's parallel state.

Groups have their sizes and ranks; communication does nothing. Everything is torn down afterwards, so that one process
can be many ranks of many layouts, one after the other.
"""

from __future__ import annotations

import logging
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from bridge_memory.rehearsal.imports import import_megatron_core
from bridge_memory.releases import release_in, release_words
from bridge_memory.spec import ParallelSpec, SpecError
from bridge_memory.spec.layout_string import parse_layout_string
from bridge_memory.spec.ranks import stage_of_rank

#: As in pyproject.toml; older releases have other token dispatchers.
OLDEST_RELEASE = (0, 13)
#: The newest release that the estimate was tested against, tensor by tensor.
NEWEST_RELEASE = (0, 19)


class RehearsalUnavailable(SpecError):
    """A SpecError: what a rehearsal needs is not installed, or this process cannot host one.

    Example:
        >>> from bridge_memory import RehearsalUnavailable, SpecError
        >>> issubclass(RehearsalUnavailable, SpecError)
        True
    """


#: How to install megatron-core and torch; this package is in no index.
INSTALL = "pip install '.[megatron]' in the folder of bridge-memory"


class NotBuildable(RehearsalUnavailable):
    """megatron-core's configuration cannot express this model or run."""


class StackRefusal(NotBuildable):
    """megatron-core or Transformer Engine refuses the run, or fails, although the estimate accepts it."""


#: Packages whose refusals are StackRefusal, and the errors that they raise on purpose or where sizes do not fit.
_STACK = {"megatron": "megatron-core", "transformer_engine": "Transformer Engine"}
_REFUSALS = (AssertionError, ValueError, NotImplementedError, RuntimeError)


@contextmanager
def refusals_named() -> Iterator[None]:
    """Raise StackRefusal, in one line, for an error of megatron-core or Transformer Engine in this block.

    A package that either imports and does not find raises RehearsalUnavailable. Errors of other code and of other kinds
    (a KeyError, say) propagate: they may be defects of the rehearsal.
    """
    try:
        yield
    except SpecError:
        raise
    except (*_REFUSALS, ImportError) as error:
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        # An error inside torch, or in a mode of the rehearsal that calls torch, belongs to torch's caller.
        frame = next((f for f in reversed(frames) if not _passes_on(f)), frames[-1])
        module = str(frame.f_globals.get("__name__"))
        package = _STACK.get(module.partition(".")[0])
        if package is None:
            raise
        said = " ".join(str(error).split()) or f"{type(error).__name__} without words"
        where = f"{package} ({module.rpartition('.')[2]}.py: {frame.f_code.co_name})"
        if isinstance(error, ImportError):
            raise RehearsalUnavailable(f"{where} needs what is not installed here: {said[:300]}") from error
        raise StackRefusal(f"{where} refuses this rank: {said[:300]}") from error


def _passes_on(frame: FrameType) -> bool:
    passing = frame.f_code.co_name in ("__torch_function__", "__torch_dispatch__")
    return passing or str(frame.f_globals.get("__name__")).partition(".")[0] == "torch"


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress warnings and log lines below ERROR: on import megatron-core logs every missing package."""
    level = logging.root.manager.disable
    logging.disable(max(level, logging.WARNING))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


def require_megatron() -> None:
    """Raise RehearsalUnavailable, in one line, when torch or megatron-core is not installed or is too old."""
    try:
        import torch  # noqa: F401

        import_megatron_core()
    except ImportError as missing:
        raise RehearsalUnavailable(
            f"rehearse runs the real megatron-core, and {missing.name or missing} is not installed; "
            f"install it: {INSTALL}"
        ) from None
    except (RuntimeError, OSError, AssertionError) as error:  # such as a Transformer Engine without its compiled half
        why = first_line(error)
        if "transformer-engine" in why or "transformer_engine" in why:
            why = (
                "Transformer Engine's Python is here without its compiled half, which is enough for --device cpu "
                "alone; install the other half or remove it: pip uninstall transformer_engine"
            )
        raise RehearsalUnavailable(
            f"rehearse runs the real megatron-core, which does not import here: {why[:200]}"
        ) from None
    here = installed_release()
    if here is not None and here < OLDEST_RELEASE:
        raise RehearsalUnavailable(
            f"rehearse needs megatron-core {release_words(OLDEST_RELEASE)} or later, not {release_words(here)}; "
            f"install it: {INSTALL}"
        )


def require_no_process_group() -> None:
    """Raise RehearsalUnavailable inside a real distributed job."""
    import torch.distributed as dist

    if dist.is_initialized():
        raise RehearsalUnavailable(
            "torch.distributed is already initialised in this process; run rehearse in a separate process"
        )


def first_line(error: Exception) -> str:
    """The first line of an error's message; the error's type where it has none."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def installed_release() -> tuple[int, int] | None:
    """(major, minor) of the imported megatron-core; None where its version has another form."""
    from megatron.core import __version__

    return release_in(__version__)


def newer_release() -> str:
    """A warning where the installed megatron-core is newer than ``NEWEST_RELEASE``; empty otherwise."""
    here = installed_release()
    if here is None or here <= NEWEST_RELEASE:
        return ""
    newest = release_words(NEWEST_RELEASE)
    return (
        f"megatron-core {release_words(here)} is newer than {newest}, the newest that the estimate was tested against"
    )


@contextmanager
def beyond_newest() -> Iterator[list[str]]:
    """Notes: a warning where the installed megatron-core is newer than ``NEWEST_RELEASE``. There an error in this block
    that is no SpecError raises RehearsalUnavailable, which says so."""
    newer = newer_release()
    try:
        yield [newer] if newer else []
    except SpecError:
        raise
    except Exception as error:
        if not newer:
            raise
        raise RehearsalUnavailable(
            f"{newer}, and this rank does not run without a GPU there ({first_line(error)[:120]}); "
            f"install the release that does: {INSTALL}"
        ) from error


@contextmanager
def fake_world(parallel: ParallelSpec, rank: int) -> Iterator[None]:
    """Be ``rank`` of the job inside this block. Raises RehearsalUnavailable inside a real distributed job."""
    require_megatron()
    import torch.distributed as dist
    from megatron.core import parallel_state
    from torch.testing._internal.distributed.fake_pg import FakeStore

    require_no_process_group()
    stage_of_rank(parallel, rank)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=parallel.world_size)
    try:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=parallel.tp,
            pipeline_model_parallel_size=parallel.pp,
            virtual_pipeline_model_parallel_size=virtual_stages(parallel),
            context_parallel_size=parallel.cp,
            expert_model_parallel_size=parallel.ep,
            expert_tensor_parallel_size=parallel.etp,
            num_distributed_optimizer_instances=parallel.num_distributed_optimizer_instances,
            create_gloo_process_groups=False,
        )
        yield
    finally:
        parallel_state.destroy_model_parallel()
        _reset_globals(parallel_state)
        dist.destroy_process_group()


def virtual_stages(parallel: ParallelSpec) -> int | None:
    """``virtual_pipeline_model_parallel_size`` for megatron-core: chunks per stage, None for one. A layout string sets
    it (``transformer_config.py: __post_init__``)."""
    chunks = parallel.vpp
    if parallel.pipeline_model_parallel_layout is not None:
        chunks = len(parse_layout_string(parallel.pipeline_model_parallel_layout)) // parallel.pp
    return chunks if chunks > 1 else None


def _reset_globals(parallel_state: object) -> None:
    """Reset the state that ``destroy_model_parallel`` does not reset (0.13 to 0.19)."""
    for name in ("_global_process_group_list", "_EMBEDDING_GLOBAL_RANKS", "_PIPELINE_GLOBAL_RANKS"):
        if hasattr(parallel_state, name):
            setattr(parallel_state, name, None)
    # Losses to log: the table of a model with many layers does not fit one with few.
    moe = sys.modules.get("megatron.core.transformer.moe.moe_utils")
    getattr(moe, "_MOE_LAYER_WISE_LOGGING_TRACKER", {}).clear()
    logging_of_0_18 = sys.modules.get("megatron.core.transformer.moe.moe_logging")
    getattr(logging_of_0_18, "destroy_moe_metrics_tracker", lambda: None)()
    mtp = sys.modules.get("megatron.core.transformer.multi_token_prediction")
    getattr(getattr(mtp, "MTPLossLoggingHelper", None), "tracker", {}).clear()
