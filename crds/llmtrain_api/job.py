"""The resource itself."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from llmtrain_api.meta import ApiModel, LenientModel
from llmtrain_api.spec import LLMTrainJobSpec
from llmtrain_api.status import LLMTrainJobStatus


class Metadata(LenientModel):
    """The part of ObjectMeta that we read."""

    name: Annotated[str, Field(min_length=1, max_length=253)]
    namespace: str = "default"
    uid: str = ""
    generation: int = 0
    resource_version: str = ""
    creation_timestamp: str = ""
    deletion_timestamp: str | None = None


class LLMTrainJob(ApiModel):
    """An LLMTrainJob: one training run of a large language model."""

    api_version: Literal["llmtrain.dev/v1alpha1"]
    kind: Literal["LLMTrainJob"]
    metadata: Metadata
    spec: LLMTrainJobSpec
    status: LLMTrainJobStatus = LLMTrainJobStatus()

    @classmethod
    def parse(cls, manifest: dict[str, Any]) -> LLMTrainJob:
        """Parse a manifest or an object of the API server.

        Raises:
            pydantic.ValidationError: with one entry for each field that is wrong.
        """
        return cls.model_validate({**manifest, "status": manifest.get("status") or {}})
