"""The schema of the strategy file, as pydantic models; ``schema.json`` beside this file is made from it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue


class StepDocument(BaseModel):
    """A method and its config."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(min_length=1, description="The method's registered name.")
    config: JsonValue = Field(default=None, description="Its config; null for the method's defaults.")


class RequiresDocument(BaseModel):
    """The setting the strategy was resolved for."""

    model_config = ConfigDict(extra="forbid")

    world_size: int | None = Field(default=None, ge=1, description="Number of processes.")
    device: str | None = Field(default=None, description="cpu or cuda.")
    torch: str | None = Field(default=None, description="Version of torch, as 2.13.")


class StrategyDocument(BaseModel):
    """A strategy file."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    schema_: Literal[1] = Field(alias="schema", description="Version of this schema.")
    requires: RequiresDocument = Field(default_factory=RequiresDocument)
    steps: list[StepDocument] = Field(description="The methods, in the order they are applied.")
    provenance: dict[str, Any] = Field(
        default_factory=dict, description="Where it came from: versions, fingerprint, measured figures."
    )


def json_schema() -> dict[str, Any]:
    """The JSON Schema of a strategy file."""
    schema = StrategyDocument.model_json_schema(by_alias=True)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Strategy", **schema}
