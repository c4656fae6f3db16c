"""Against the real Megatron Bridge, 0.3.1 or 0.6.2: its CallbackManager, its recipes' containers, its ``training_log``;
and against Megatron-LM's own report, which the wheels of megatron-core 0.17 and later ship."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from bridge_stubs import require_bridge
from small_jobs import megatron_lm_args

from bridge_memory.calibration import journal
from bridge_memory.calibration.records import ReportRecord, RunRecord
from bridge_memory.live import MemoryReport, install, uninstall
from bridge_memory.live.cuda import Reading

GIB = 1 << 30


def reading(rank: int, stage: int) -> Reading:
    return Reading(rank, stage, 50 * GIB, 60 * GIB, 64 * GIB, 64 * GIB, 80 * GIB, 66 * GIB)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A validated container of Bridge's own Llama-3-8B recipe in a job of one process (gloo)."""
    require_bridge()
    import sys

    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
    import torch
    from bridge_recipes import bridge_on_cpu, build
    from megatron.bridge.training.config import runtime_config_update
    from megatron.bridge.training.state import GlobalState
    from megatron.core import parallel_state
    from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free.getsockname()[1]))
    torch.distributed.init_process_group("gloo", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    folder = tmp_path_factory.mktemp("bridge")
    with bridge_on_cpu() as recipes:
        config = build(recipes.llama3_8b_pretrain_config)
        config.model.context_parallel_size = 1
        config.model.sequence_parallel, config.model.recompute_granularity = True, "selective"
        config.model.finalize = lambda: None  # sequence parallelism wants TP > 1; the printed line wants it on
        config.train.global_batch_size, config.train.micro_batch_size = 4, 1
        config.train.train_iters = 10
        config.scheduler.lr_warmup_iters = 2
        config.logger.log_interval = 2
        config.logger.tensorboard_dir = str(folder / "tensorboard")
        config.model.apply_rope_fusion = False
        runtime_config_update(config)
    state = GlobalState()
    state._cfg = config  # the setter installs signal handlers
    init_num_microbatches_calculator(0, None, 4, 1, 1)
    yield SimpleNamespace(config=config, state=state, folder=folder)
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


def test_the_real_callback_manager_fires_our_events(job: Any, capsys: pytest.CaptureFixture[str]) -> None:
    from megatron.bridge.training.callbacks import CallbackContext, normalize_callbacks

    path = job.folder / "callback.jsonl"
    manager = normalize_callbacks([MemoryReport(path, read=reading)])
    assert manager is not None
    assert {e for e in manager.events if manager.has_callbacks(e)} == {
        "on_train_start", "on_train_step_start", "on_train_step_end", "on_train_end",
        "on_eval_start", "on_eval_end", "on_test_start", "on_test_end",
    }  # fmt: skip

    def fire(event: str, **more: Any) -> None:
        manager.fire(event, CallbackContext(state=job.state, model=[], user_state=manager.user_state, **more))

    job.state.train_state.step = 0
    fire("on_train_start")
    for step in range(6):
        job.state.train_state.step = step
        fire("on_train_step_end", loss_dict={}, skipped_iter=step == 1)
    fire("on_train_end")
    iterations = [(r.iteration, r.moment) for r in journal.read(path) if isinstance(r, ReportRecord)]
    # Iteration 2 was skipped (a loss scale that overflowed): the second optimizer step is iteration 3.
    assert iterations == [(0, "model built"), (1, "after step 1"), (3, "steady"), (4, "steady"), (6, "steady")]
    out = capsys.readouterr().out
    assert out.count("Theoretical memory footprints:") == 1
    # A table until the second optimizer step, then a line a report.
    assert out.count("GPU memory by pipeline stage") == 3 and out.count("GPU memory at iteration ") == 2

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    job.state.tensorboard_logger.flush()
    events = EventAccumulator(job.config.logger.tensorboard_dir)
    events.Reload()
    values = {s.step: s.value for s in events.Scalars("memory/stage_0/max_allocated_gib")}
    assert values == {0: 60.0, 1: 60.0, 3: 60.0, 4: 60.0, 6: 60.0}


@pytest.mark.parametrize("resumed", [False, True], ids=("pretrained", "resumed"))
def test_the_phases_of_bridges_loop(
    job: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resumed: bool
) -> None:
    """Events in the order of ``training/train.py``: evaluation at step 2 of 4, saves at 2 and 4, and the final
    validation after training is over. Truth by the allocator's own account."""
    from allocator import Allocator
    from megatron.bridge.training.callbacks import CallbackContext, normalize_callbacks

    gpu = Allocator()
    manager = normalize_callbacks([MemoryReport(tmp_path / "r.jsonl", read=gpu.read, emit=lambda text: None)])
    checkpoint = SimpleNamespace(
        save="somewhere", save_interval=2, load=None, finetune=False, pretrained_checkpoint=None if resumed else "there"
    )
    monkeypatch.setattr(job.config, "checkpoint", checkpoint)
    monkeypatch.setattr(job.config.train, "train_iters", 4 + 10 * resumed)
    assert manager is not None

    def fire(event: str, **more: Any) -> None:
        manager.fire(event, CallbackContext(state=job.state, model=[], user_state=manager.user_state, **more))

    first = 10 * resumed
    job.state.train_state.step = first
    with gpu.phase("build + load"):
        gpu.use(40, keep=10)
    fire("on_train_start")
    for step in range(first, first + 4):
        job.state.train_state.step = step
        fire("on_train_step_start")
        with gpu.phase("first step" if step == first else "training"):
            gpu.use(20 if step == first else 34, keep=5 * (step == first))
        fire("on_train_step_end", loss_dict={}, skipped_iter=False)
        job.state.train_state.step = step + 1
        if step == first + 1:
            fire("on_eval_start")
            with gpu.phase("evaluation"):
                gpu.use(3)
            fire("on_eval_end")
        if step in (first + 1, first + 3):
            with gpu.phase("save"):
                gpu.use(1)
    fire("on_train_end")
    fire("on_eval_start")
    with gpu.phase("evaluation"):
        gpu.use(4)
    fire("on_eval_end")
    job.state.train_state.step = 0
    _, found = journal.phases((tmp_path / "r.jsonl").read_text().splitlines())
    assert found is not None
    start = ("build", "resume" if resumed else "load")
    assert [(phase.phases, phase.times) for phase in found.phases] == [
        (start, 1), (("first step",), 1), (("training",), 2), (("evaluation",), 2), (("save",), 3),
    ]  # fmt: skip
    for phase, name in zip(found.phases, ("build + load", "first step", "training", "evaluation", "save"), strict=True):
        gpu.holds(phase, name)
    # A save allocates little, so the range is narrow although training went higher.
    save = found.phases[-1].allocated
    assert save is not None and save[1] is not None and save[1] - save[0] <= 2 * GIB


def test_no_event_is_claimed_that_changes_how_bridge_sets_up(job: Any) -> None:
    """From 0.6 on a callback of ``on_data_init_start`` makes setup refuse ``num_epochs`` (``training/setup.py``)."""
    from megatron.bridge.training.callbacks import normalize_callbacks

    manager = normalize_callbacks([MemoryReport(None, read=reading)])
    assert manager is not None
    for event in ("on_data_init_start", "on_checkpoint_save"):
        assert not manager.has_callbacks(event)


def test_the_allocators_settings_of_the_container_are_taken(job: Any, tmp_path: Path) -> None:
    """Recipes of 0.6 set them in ``env_vars``, which Bridge exports before training."""
    theirs = getattr(job.config, "env_vars", None) or {}
    if "PYTORCH_CUDA_ALLOC_CONF" not in theirs:
        pytest.skip("this release has no env_vars")
    report = MemoryReport(tmp_path / "report.jsonl", read=reading, emit=lambda text: None)
    report.on_train_start(SimpleNamespace(state=job.state))
    run = next(iter(journal.read(tmp_path / "report.jsonl")))
    assert isinstance(run, RunRecord) and run.machine is not None
    grows = "expandable_segments:True" in theirs["PYTORCH_CUDA_ALLOC_CONF"]
    assert run.machine["facts"]["expandable_segments"]["value"] == str(grows)
    assert run.model and run.predicted


@pytest.fixture
def training_log(job: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """``training_log`` of one iteration on a CPU: (whether memory is reported again, what was printed)."""
    import torch
    from megatron.bridge.training.utils import train_utils

    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *a: None)
    group = torch.distributed.group.WORLD
    groups = SimpleNamespace(mp=group, dp=group, dp_cp=group, tp=group, pp=group)
    monkeypatch.setattr(train_utils, "get_pg_collection", lambda model: groups)

    def log(iteration: int = 2) -> tuple[bool, str]:
        job.state.train_state.step = iteration
        job.state.timers("interval-time", log_level=0).start(barrier=False)
        again = train_utils.training_log(
            loss_dict={}, total_loss_dict={}, learning_rate=1e-4, decoupled_learning_rate=None, loss_scale=1.0,
            report_memory_flag=True, skipped_iter=0, grad_norm=None, params_norm=None, num_zeros_in_grad=None,
            config=job.config, global_state=job.state, history_wct=[], model=[],
        )  # fmt: skip
        job.state.timers("interval-time").stop()
        return again, capsys.readouterr().out

    return log


def test_the_real_training_log_calls_our_report(job: Any, training_log: Any, tmp_path: Path) -> None:
    """The same step with and without ours: Bridge's lines are the same, the table is new, and nothing is left
    behind."""
    from megatron.bridge.training.utils import train_utils

    theirs = train_utils.report_memory, train_utils.report_theoretical_memory

    def memory_lines(text: str) -> list[str]:
        words = ("Theoretical memory", "Number of", "Activation memory", "[Rank 0] (after", "Total number")
        return [line for line in text.splitlines() if line.startswith(words)]

    again, before = training_log()
    assert again is False
    with install(tmp_path / "report.jsonl", read=reading) as installed:
        assert "megatron.bridge.training.utils.train_utils.report_memory" in installed.patched
        _, during = training_log()
    uninstall()
    assert (train_utils.report_memory, train_utils.report_theoretical_memory) == theirs
    _, after = training_log()
    assert "total=" in "".join(memory_lines(before))
    assert memory_lines(during) == memory_lines(before) == memory_lines(after)
    assert "GPU memory by pipeline stage" in during and "GPU memory by pipeline stage" not in before + after
    report = list(journal.read(tmp_path / "report.jsonl"))[-1]
    assert isinstance(report, ReportRecord) and report.stages[0].allocated == 50 * GIB


def test_the_table_comes_once_though_bridge_reports_to_the_second_iteration(
    job: Any, training_log: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job.config.logger, "log_interval", 1)
    printed, iteration, again = "", 0, True
    with install(None, read=reading):
        while again:
            iteration += 1
            again, text = training_log(iteration)
            printed += text
    assert printed.count("Theoretical memory footprints:") == iteration <= 2
    assert printed.count("GPU memory by pipeline stage") == 1


def test_where_bridges_line_is_not_the_runs_memory_a_line_of_ours_says_so(
    job: Any, training_log: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bridge takes an MTP depth for one more layer, and counts no gate but SwiGLU's; its line stays."""
    from megatron.bridge.training.utils import theoretical_memory_utils as theirs

    if not hasattr(theirs, "estimate_training_memory"):
        pytest.skip("megatron-bridge is older than 0.6: the remarks are on other closed forms")
    with install(None, read=reading):
        _, printed = training_log()
    assert "On Megatron Bridge's line" not in printed
    monkeypatch.setattr(job.config.model, "activation_func", max)
    _, alone = training_log()
    with install(None, read=reading):
        _, printed = training_log()
    line = next(line for line in alone.splitlines() if line.startswith("Theoretical memory"))
    assert line in printed.splitlines()
    assert "On Megatron Bridge's line: the gate of a gated unit other than SwiGLU is not counted" in printed


def test_megatron_lms_own_report_prints_and_returns_what_it_did(
    job: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its release decides: 0.17 and later print activations and a total, and return the three figures."""
    usage = pytest.importorskip("megatron.training.theoretical_memory_usage")
    args = megatron_lm_args(
        hybrid_layer_pattern=None, multi_latent_attention=False, mtp_num_layers=None, num_experts=8,
        moe_layer_freq=1, moe_ffn_hidden_size=1024, moe_router_topk=2, moe_shared_expert_intermediate_size=None,
        moe_latent_size=None, expert_tensor_parallel_size=2, virtual_pipeline_model_parallel_size=None,
    )  # fmt: skip
    alone = usage.report_theoretical_memory(args, num_microbatches=8, verbose=True)
    printed = capsys.readouterr().out
    assert len(alone) == 3 and alone[2] == alone[0] + alone[1] and "total=" in printed
    with install(tmp_path / "report.jsonl", read=reading) as installed:
        assert "megatron.training.theoretical_memory_usage.report_theoretical_memory" in installed.patched
        assert usage.report_theoretical_memory(args, num_microbatches=8, verbose=True) == alone
        assert capsys.readouterr().out == printed
        hybrid = megatron_lm_args(hybrid_layer_pattern="M*M-")
        assert usage.report_theoretical_memory(hybrid) is None
        assert "not yet supported" in capsys.readouterr().out
