"""Bytes of Megatron Bridge's own import and resume of small checkpoints, beside those that are predicted.

It runs in a separate process, with Transformer Engine's Python in front of Megatron Bridge 0.6 on the path.
"""

from __future__ import annotations

from bridge_child import answers_of


def test_an_import_holds_what_is_predicted() -> None:
    answers = answers_of("bridge_import.py")
    assert len(answers) >= 11
    assert {name: a["error"] for name, a in answers.items() if "error" in a} == {}
    # Router biases and scales are in no amount.
    both = {name: a["bytes"] for name, a in answers.items()}
    assert {name: found for name, found in both.items() if abs(found[0] - found[1]) > 0.001 * found[1]} == {}


def test_a_resume_holds_fp32_moments_once_with_bridges_loader_and_twice_without() -> None:
    answers = answers_of("bridge_resume.py")
    assert len(answers) >= 7
    assert {name: a["error"] for name, a in answers.items() if "error" in a} == {}
    off = {
        f"{name}, {how}": found for name, a in answers.items() for how, found in a.items()
        if not found[0] * 0.999 <= found[2] <= found[1] * 1.001
    }  # fmt: skip
    assert off == {}
    copies = {name for name, a in answers.items() if a["copied"][2] > 1.05 * a["adopted"][2]}
    assert copies == {"one GPU", "DP 2", "fp32", "whole states", "experts, EDP 2"}
