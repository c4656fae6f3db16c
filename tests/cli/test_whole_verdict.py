"""The verdict of ``estimate`` is by the whole job, and every output says the same."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from bridge_memory import ParallelSpec, RunSpec, estimate, whole_job
from bridge_memory.cli import main
from bridge_memory.verdict import fits

_ORDER = ("fits", "tight", "unknown", "does not fit")
_WORDS = {"fits": "FITS", "tight": "TIGHT on", "unknown": "UNKNOWN for", "does not fit": "DOES NOT FIT"}


def _drawn(seed: int) -> tuple[str, int, int, str]:
    draw = random.Random(seed)
    tensor = draw.choice((1, 2, 4))
    model = draw.choice(("Qwen/Qwen3-8B", "meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.1-8B"))
    return model, tensor, tensor * draw.choice((1, 2, 4)), draw.choice(("H100", "H200", "B200", "A100-40GB"))


@pytest.mark.parametrize("seed", range(6))
def test_text_json_and_exit_code_follow_the_worse_of_step_and_job(
    seed: int, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    model, tensor, world, gpu = _drawn(seed)
    flags = ["estimate", model, "--tp", str(tensor), "--num-gpus", str(world), "--gpu", gpu, "--phases"]
    run = RunSpec(model=model, parallel=ParallelSpec(world_size=world, tensor_model_parallel_size=tensor))
    job = whole_job(run, gpu)
    code = main([*flags, "--format", "json", "--require-fit"])
    found = json.loads(capsys.readouterr().out)
    step = found["fits"][0]["verdict"]
    expected = max(step, str(job.verdict), key=_ORDER.index)
    assert found["verdict"]["answer"] == expected
    assert found["job"]["verdict"] == str(job.verdict)
    assert found["verdict"][expected.replace(" ", "_")] == [found["fits"][0]["gpu"]]
    assert code == (3 if expected in ("unknown", "does not fit") else 0)
    assert main(flags) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert found["verdict"]["words"] in text
    assert found["verdict"]["words"].startswith(_WORDS[expected])
    if expected != step:
        assert f"; the step alone: {_WORDS[step]}" in text and str(job.tightest.phase) in found["verdict"]["words"]


def test_a_resume_that_does_not_fit_is_not_announced_as_fitting(capsys: pytest.CaptureFixture[str]) -> None:
    cases = []
    for gpu in ("H100", "H200", "B200"):
        for world in (1, 2, 4, 8):
            for model in ("Qwen/Qwen3-8B", "meta-llama/Llama-3.1-8B", "Qwen/Qwen3-14B"):
                run = RunSpec(model=model, parallel=ParallelSpec(world_size=world)).with_fields(megatron_core=(0, 18))
                if fits(estimate(run), [gpu])[0].fits and str(whole_job(run, gpu).verdict) == "does not fit":
                    cases.append((model, world, gpu))
    assert cases
    for model, world, gpu in cases:
        flags = ["estimate", model, "--num-gpus", str(world), "--gpu", gpu, "--brief", "--require-fit"]
        flags += ["--megatron-core", "0.18"]
        assert main(flags) == 3
        assert capsys.readouterr().out.startswith(f"DOES NOT FIT {gpu}: resume")
        assert main([*flags, "--no-phases"]) == 0
        assert not capsys.readouterr().out.startswith("DOES NOT FIT")


@pytest.mark.parametrize("seed", range(4))
def test_each_of_several_gpus_has_the_verdict_that_it_has_alone(
    seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the common ones have where none is named, and in text."""
    model, tensor, world, _ = _drawn(seed)
    flags = ["estimate", model, "--tp", str(tensor), "--num-gpus", str(world)]
    lists = ("fits", "tight", "unknown", "does_not_fit")
    main([*flags, "--json"])
    common = json.loads(capsys.readouterr().out)["verdict"]
    cards = [card for name in lists for card in common[name]]
    assert len(cards) > 3
    alone = {name: [] for name in lists}
    for card in cards:
        main([*flags, "--gpu", card, "--json"])
        alone[json.loads(capsys.readouterr().out)["verdict"]["answer"].replace(" ", "_")].append(card)
    assert alone == {name: common[name] for name in lists}
    main([*flags, "--gpu", ",".join(cards), "--json", "--require-fit"])
    assert {name: json.loads(text)["verdict"][name] for text in [capsys.readouterr().out] for name in lists} == alone
    main([*flags, "--gpu", ",".join(cards)])
    text = " ".join(capsys.readouterr().out.split())
    for name, found in alone.items():
        if found:
            words = text.split(_WORDS[name.replace("_", " ")].split()[0], 1)[1].split(";")[0]
            assert all(card in words for card in found)
