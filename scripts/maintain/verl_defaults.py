"""Write ``bridge_memory/rollout/sources/verl_defaults.json``: the options of verl's trainers with their defaults, from
the composed configurations that its wheels carry (``trainer/config/_generated_ppo_*trainer.yaml``).

    pip download --no-deps verl==0.9.1 -d wheels
    python scripts/maintain/verl_defaults.py wheels/verl-*.whl

Values are kept as they stand there, interpolations included: ``sources/hydra.py`` resolves them when overrides are in.
"""

from __future__ import annotations

import argparse
import json
import zipfile
from pathlib import Path
from typing import Any

TARGET = Path(__file__).parents[2] / "bridge_memory/rollout/sources/verl_defaults.json"
CONFIGS = {"fsdp": "_generated_ppo_trainer.yaml", "megatron": "_generated_ppo_megatron_trainer.yaml"}
#: Sections that decide memory; the rest of a configuration is data sets, rewards, loggers and profilers.
SECTIONS = ("actor_rollout_ref", "critic", "algorithm", "trainer", "data")
#: Parts of them that do not.
LEFT_OUT = (
    "profiler",
    "trace",
    "prometheus",
    "checkpoint",
    "_target_",
    "policy_loss",
    "agent",
    "multi_turn",
    "val_kwargs",
)


def flat(prefix: str, value: Any) -> dict[str, Any]:
    """Dotted names -> values; empty tables stay."""
    if not isinstance(value, dict) or not value:
        return {prefix: value}
    found: dict[str, Any] = {}
    for key, item in value.items():
        if key not in LEFT_OUT:
            found |= flat(f"{prefix}.{key}" if prefix else key, item)
    return found


def options(wheel: str) -> dict[str, dict[str, Any]]:
    """Trainer -> its options."""
    import yaml

    found = {}
    with zipfile.ZipFile(wheel) as archive:
        for name, path in CONFIGS.items():
            config = yaml.safe_load(archive.read(f"verl/trainer/config/{path}"))
            found[name] = flat("", {section: config[section] for section in SECTIONS})
    return found


def main(wheels: list[str]) -> None:
    """One wheel a release; of several patch releases the last."""
    releases = {}
    for wheel in sorted(wheels):
        release = ".".join(Path(wheel).name.split("-")[1].split(".")[:2])
        both = options(wheel)
        shared = {key: value for key, value in both["fsdp"].items() if both["megatron"].get(key, ...) == value}
        releases[release] = {
            "shared": shared,
            **{name: {k: v for k, v in of.items() if k not in shared} for name, of in both.items()},
        }
    TARGET.write_text(json.dumps(releases, indent=0, sort_keys=True) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheels", nargs="+", metavar="WHEEL", help="wheels of verl")
    main(parser.parse_args().wheels)
