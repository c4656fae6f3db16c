"""Random ways to run small models: what is recorded beside what the installed transformers keeps and peaks at.

    python tests/hugging_face/hf_sweep.py --number 100 --seed 0

prints every combination that is off by more than half a percent, or that either side refuses, and counts them.
"""

from __future__ import annotations

import argparse
import random
from typing import Any

from hf_families import CONFIGS
from hf_side_by_side import INSTALLED, errors

from bridge_memory import SpecError
from bridge_memory.spec.transformers import FAMILIES, TransformersSpec, family_of

CLOSE = 0.005


def draw(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """A family's config and a way to run it that the installed release has."""
    fails = {"deepseek_v2"} if INSTALLED >= (5, 0) else set()  # its group_limited_greedy, in transformers itself
    families = {name: FAMILIES[CONFIGS[name]["model_type"]] for name in sorted(CONFIGS) if name not in fails}
    there = [name for name, family in families.items() if family.since <= INSTALLED <= family.until]
    name = rng.choice(there)
    options: dict[str, Any] = {
        "batch": rng.choice([1, 2, 3]), "seq": rng.choice([64, 128, 192, 320]),
        "attn_implementation": rng.choice(["eager", "sdpa", "sdpa"]),
        "attention_mask": rng.choice(["ones", "ones", "padded", "none"]),
        "vocab_size": rng.choice([64, 640, 5000]), "tie_word_embeddings": rng.choice([False, True]),
    }
    kind, experts = CONFIGS[name]["model_type"], any("experts" in key for key in CONFIGS[name])
    family = family_of(kind, TransformersSpec(transformers_version=INSTALLED))
    if options["attn_implementation"] not in family.attention:
        options["attn_implementation"] = "eager"
    five = INSTALLED >= (5, 0)
    if five and options["attention_mask"] == "none":
        options["attention_mask"] = "ones"  # positions are looked at, which the meta device has not
    way = rng.choice(["bf16", "bf16", "autocast", "fp32"])
    if not (five and experts):  # grouped in bf16 alone
        options |= {"autocast": {"dtype": "fp32", "autocast": "bf16"}, "fp32": {"dtype": "fp32"}}.get(way, {})
    if rng.random() < 0.5:
        options |= {"gradient_checkpointing": True, "use_reentrant": rng.choice([False, True])}
    options |= {"keeps_outputs": True} if rng.random() < 0.2 else {}
    return name, options


def off(name: str, options: dict[str, Any]) -> tuple[float, float, float]:
    """Of what is retained and of both peaks: recorded over measured, less one."""
    options = dict(options)
    config = {**CONFIGS[name], **{key: options.pop(key) for key in ("vocab_size", "tie_word_embeddings")}}
    return errors(config, **options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--number", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    missed = failed = 0
    for number in range(args.number):
        name, options = draw(rng)
        try:
            found = off(name, options)
        except (SpecError, RuntimeError, AttributeError, NotImplementedError) as error:
            failed += 1
            print(f"{number}: {name}, {options}: {type(error).__name__}: {error}", flush=True)
            continue
        if max(map(abs, found)) >= CLOSE:
            missed += 1
            print(f"{number}: {name}, {options}:", *(f"{100 * x:+.2f}" for x in found), flush=True)
    print(f"{args.number} drawn, {missed} off by more than {100 * CLOSE} %, {failed} did not run")


if __name__ == "__main__":
    main()
