"""The OpenAPI document of the page's API."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from bridge_memory.report.json import SCHEMA_PATH

_TEXT = {"type": "string"}
_WHOLE = {"type": "integer"}
_REAL = {"type": "number"}
_YES = {"type": "boolean"}
_ANY_VALUE = {"description": "an option's value", "type": ["string", "number", "boolean", "array", "null"],
              "items": _TEXT}  # fmt: skip
_OPTIONS = {"type": "object", "additionalProperties": _ANY_VALUE,
            "description": "option (GET /api/options) -> value; in a change, null removes an option"}  # fmt: skip


def _object(required: dict[str, Any], optional: dict[str, Any] | None = None, more: bool = False) -> dict[str, Any]:
    return {
        "type": "object", "properties": {**required, **(optional or {})}, "required": list(required),
        "additionalProperties": more,
    }  # fmt: skip


def _ref(name: str) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{name}"}


def _many(of: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": of}


def _or_null(of: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [of, {"type": "null"}]}


_OPTION = _object(
    {
        "name": _TEXT, "field": _TEXT, "called": _TEXT, "group": _TEXT, "choices": _many(_TEXT), "help": _TEXT,
        "kind": {"enum": ["integer", "number", "switch", "choice", "names", "text", "release"]}, "default": _ANY_VALUE,
    }
)  # fmt: skip
_SCHEMAS: dict[str, Any] = {
    "Question": _object(
        {},
        {
            "model": {**_TEXT, "description": "a preset, or a Hub id if the server was started with --hub"},
            "config": {**_TEXT, "description": "the text of a config.json, instead of model"},
            "name": {**_TEXT, "description": "name of the model in config"},
            "megatron_args": {**_TEXT, "description": "Megatron-LM's arguments or a launch script, instead of model"},
            "gpu": {**_TEXT, "default": "H100"}, "options": _OPTIONS,
            "stage": {"type": ["integer", "null"], "description": "the stage to draw; default: the highest peak"},
        },
    ),
    "Refusal": _object(
        {
            "field": {"type": ["string", "null"], "description": "the option, or the key of the question"},
            "fields": {**_many(_TEXT), "description": "all options and keys that the message names"},
            "message": _TEXT, "fix": _TEXT, "changes": _many(_object({"label": _TEXT, "options": _OPTIONS})),
        }
    ),
    "Options": _object(
        {
            "version": _TEXT, "hub": _YES, "default_gpu": _TEXT, "options": _many(_OPTION),
            "engines": {"type": "object", "additionalProperties": _TEXT}, "megatron_engines": _many(_TEXT),
            "engine_options": {"type": "object", "additionalProperties": _TEXT},
            "varied": _object({"megatron": _many(_TEXT), "torch": _many(_TEXT)}),
            "gpus": _many(_object({"name": _TEXT, "description": _TEXT, "capacity_bytes": _WHOLE, "common": _YES})),
        }
    ),
    "Models": _many(
        _object(
            {"name": _TEXT, "model_type": _TEXT, "num_layers": _WHOLE, "hidden_size": _WHOLE, "parameters": _WHOLE,
             "experts": _YES}
        )
    ),
    "Fit": _object(
        {
            "gpu": _TEXT, "gpu_arch": _TEXT, "capacity_bytes": _WHOLE, "peak_stage": _WHOLE, "peak_bytes": _WHOLE,
            "margin_bytes": _WHOLE, "headroom_bytes": _WHOLE, "fits": _YES, "lacks": _TEXT, "evidence": _TEXT,
            "reserved_bytes": _WHOLE, "outside_bytes": _WHOLE, "outside_least_bytes": _WHOLE,
            "band": {"type": ["object", "null"]},
            "verdict": {"enum": ["fits", "does not fit", "unknown", "tight"]},
        }, more=True,
    ),
    "Answer": _object(
        {
            "estimate": _ref("Estimate"), "fit": _ref("Fit"), "experts": _YES,
            "encoders": _many({"enum": ["vision", "audio"]}), "media": _TEXT,
            "rollout": {**_YES, "description": "the update of a pasted post-training job, for POST /api/rollout"},
            "answer": _TEXT, "whole": _or_null(_object({"verdict": _TEXT, "brief": _TEXT, "words": _TEXT})),
            "evidence": _TEXT, "band": _TEXT, "margin": _many(_TEXT),
            "effective": {"type": "object", "description": "option -> its value in this run, given or by default"},
            "step": _or_null(
                _object({"seconds": _REAL, "tokens_per_second_per_gpu": _REAL, "not_timed": _many(_TEXT)})
            ),
            "drawn": _object(
                {"stage": _WHOLE, "timeline": {"type": "object"}, "treemap": {"type": "object"}}
            ),
            "exports": _object(
                {
                    "command": _TEXT,
                    "texts": _many(_object({"format": _TEXT, "title": _TEXT, "text": _TEXT, "note": _TEXT})),
                }
            ),
        }
    ),
    "Effect": _object(
        {
            "title": _TEXT, "options": _OPTIONS, "words": _TEXT, "freed_bytes": _WHOLE, "peak_bytes": _WHOLE,
            "step_time_factor": {"type": ["number", "null"]}, "fits": _YES,
        }
    ),
    "WhatIf": _object(
        {
            "peak_bytes": _WHOLE, "other_gpus": _many(_object({"gpu": _TEXT, "verdict": _TEXT})),
            "changes": _many(_ref("Effect")), "cheapest": _or_null(_ref("Effect")),
        }
    ),
    "Report": _object({"html": _TEXT, "markdown": _TEXT}),
    "Rollout": _object(
        {
            "rollout": _ref("PostTraining"), "words": _many(_TEXT), "brief": _TEXT, "limits": _many(_TEXT),
            "notes": _many(_TEXT),
            "table": _object(
                {"title": _TEXT, "columns": _many(_TEXT), "rows": _many(_many(_TEXT)), "emphasis": _WHOLE,
                 "notes": _many(_TEXT)}
            ),
            "chart": _object(
                {
                    "gpu": _TEXT, "capacity_bytes": _WHOLE, "capacity": _TEXT, "unit": _TEXT, "unit_bytes": _WHOLE,
                    "binds": _WHOLE, "phases": _many(_object(
                        {
                            "name": _TEXT, "verdict": _TEXT, "room": _TEXT, "driver": _TEXT,
                            "driver_bytes": _many(_WHOLE), "largest": _many(_TEXT), "cells": _many(_many(_TEXT)),
                            "parts": {"type": "object", "additionalProperties": _WHOLE},
                        }
                    )),
                }
            ),
        }
    ),
    "Search": _object(
        {"question": _ref("Question")},
        {"vary": _many(_TEXT), "top": {"type": "integer", "minimum": 1, "maximum": 50}},
    ),
    "Row": _object(
        {
            "options": _OPTIONS, "mbs": _WHOLE, "recompute": _TEXT, "peak_bytes": _WHOLE, "stage": _WHOLE,
            "headroom_bytes": _WHOLE, "step_seconds": _REAL, "tokens_per_second_per_gpu": _REAL,
        },
        {
            **dict.fromkeys(("tp", "pp", "vpp", "cp", "ep", "etp", "microbatches"), _WHOLE),
            **dict.fromkeys(("engine", "sharded", "overlap", "offload", "dispatcher"), _TEXT),
        }
    ),
    "Found": _object(
        {
            "looked_at": _WHOLE, "fit": _WHOLE, "too_large": _WHOLE, "tight": _WHOLE, "stopped": _YES,
            "refused": {"type": "object", "additionalProperties": _WHOLE}, "global_batch_size": _WHOLE,
            "global_batch_size_given": _YES, "ties": _WHOLE, "not_timed": _many(_TEXT),
            "not_modelled": _many(_TEXT), "rows": _many(_ref("Row")), "front": _many(_ref("Row")),
        }
    ),
    "Fitted": _object(
        {"looked_at": _WHOLE, "fit": _WHOLE, "options": {"type": ["object", "null"]}, "words": {"type": "string"}}
    ),
    "Job": _object(
        {
            "id": _TEXT, "state": {"enum": ["running", "done", "cancelled", "refused"]}, "seconds": _REAL,
            "progress": _object({}, {"looked_at": _WHOLE, "fit": _WHOLE}, more=True),
            "result": {"anyOf": [_ref("Found"), _ref("Fitted"), {"type": "null"}]},
            "refused": _or_null(_ref("Refusal")),
        }
    ),
}  # fmt: skip


def _answers(name: str, what: str, status: str = "200") -> dict[str, Any]:
    refused = {"description": "refused", "content": {"application/json": {"schema": _ref("Refusal")}}}
    return {
        status: {"description": what, "content": {"application/json": {"schema": _ref(name)}}}, "default": refused
    }


def _asks(name: str) -> dict[str, Any]:
    return {"required": True, "content": {"application/json": {"schema": _ref(name)}}}


def _embedded(name: str, path: str) -> dict[str, Any]:
    """A JSON Schema of the package as a component: what it references in itself moves with it."""
    with open(path, encoding="utf-8") as file:
        text = file.read().replace('"#/$defs/', f'"#/components/schemas/{name}/$defs/')
    found: dict[str, Any] = json.loads(text)
    return {key: value for key, value in found.items() if key not in ("$schema", "$id")}


_ID = [{"name": "id", "in": "path", "required": True, "schema": _TEXT}]


@cache
def document() -> dict[str, Any]:
    """OpenAPI 3.1."""
    from bridge_memory import __version__

    estimate = _embedded("Estimate", SCHEMA_PATH)
    compare = _embedded("Compared", SCHEMA_PATH.replace("estimate.schema", "compare.schema"))
    # Why the job of the file failed, by the schema of `why`; null where it did not.
    compare["properties"]["why"] = {"anyOf": [_embedded("Why", SCHEMA_PATH.replace("estimate.schema", "why.schema")),
                                              {"type": "null"}]}  # fmt: skip
    # Memory lines of the log of a pasted post-training job.
    compare["properties"]["log"] = _object(
        {"lines": _many({"$ref": "#/components/schemas/PostTraining/$defs/line"}), "pool_bytes": _WHOLE, "title": _TEXT,
         "columns": _many(_TEXT), "rows": _many(_many(_TEXT)), "notes": _many(_TEXT)}
    )  # fmt: skip
    rollout = _embedded("PostTraining", SCHEMA_PATH.replace("estimate.schema", "rollout.schema"))
    page = _embedded("Page", SCHEMA_PATH.replace("estimate.schema", "page.schema"))
    return {
        "openapi": "3.1.0",
        "info": {"title": "bridge-memory", "version": __version__,
                 "description": "GPU memory of Megatron training runs. Bytes are of one rank."},
        "paths": {
            "/api/options": {"get": {"summary": "options, GPUs and engines of the form",
                                     "responses": _answers("Options", "options, GPUs, engines")}},
            "/api/models": {"get": {"summary": "the embedded models", "responses": _answers("Models", "models")}},
            "/api/estimate": {"post": {"summary": "one run", "requestBody": _asks("Question"),
                                       "responses": _answers("Answer", "every stage, and the verdict")}},
            "/api/whatif": {"post": {"summary": "memory freed by changing one option", "requestBody": _asks("Question"),
                                     "responses": _answers("WhatIf", "changes, largest first")}},
            "/api/phases": {"post": {"summary": "the whole job, phase by phase", "requestBody": _asks("Question"),
                                     "responses": _answers("Page/$defs/job", "from build to resume")}},
            "/api/rollout": {"post": {"summary": "a pasted job of verl, NeMo-RL, slime, TRL or ms-swift, phase by "
                                                 "phase, and what would fit", "requestBody": _asks("Question"),
                                      "responses": _answers("Rollout", "the phases, and the largest share")}},
            "/api/report": {"post": {"summary": "one run as one HTML file and as Markdown",
                                     "requestBody": _asks("Question"), "responses": _answers("Report", "both")}},
            "/api/search": {"post": {"summary": "start a search", "requestBody": _asks("Search"),
                                     "responses": _answers("Job", "the search", "202")}},
            "/api/fit": {"post": {"summary": "what to recompute and offload so that a run fits as it is laid out",
                                  "requestBody": _asks("Question"),
                                  "responses": _answers("Job", "a job, asked for like a search", "202")}},
            "/api/search/{id}": {"parameters": _ID, "get": {
                "summary": "progress of a search", "responses": _answers("Job", "progress, then the layouts")}},
            "/api/search/{id}/cancel": {"parameters": _ID, "post": {
                "summary": "stop a search and keep what it found", "responses": _answers("Job", "the search")}},
            "/api/compare": {"post": {
                "summary": "compare a log, journal or snapshot with the prediction",
                "requestBody": {"required": True, "content": {"application/octet-stream": {"schema": {
                    "type": "string", "format": "binary",
                    "description": "one line of JSON, {question or null, name, stage}, then the file"}}}},
                "responses": _answers("Compared", "by stage, or for a snapshot by component")}},
        },
        "components": {"schemas": {**_SCHEMAS, "Estimate": estimate, "Compared": compare, "Page": page,
                                   "PostTraining": rollout}},
    }  # fmt: skip
