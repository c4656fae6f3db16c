"""Bytes of Megatron Bridge's own import of small checkpoints, beside those that are predicted.

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
