"""A job that leaves its layout to the planner trains in the layout that the planner chooses, and says which."""

from __future__ import annotations

import json

import pytest

from llmtrain_api.planning.decision import decided
from llmtrain_api.spec import LLMTrainJobSpec
from llmtrain_api.status import Shape
from tests.integration.local.conftest import Start
from tests.integration.local.harness import STEPS, bits

pytestmark = pytest.mark.timeout(600)


def test_ranks_train_in_the_layout_that_the_planner_chooses(new_run: Start) -> None:
    # Four ranks cannot share two sequences out between them: the default layout would be refused.
    run = new_run(parallelism_planFor="cpu", training_globalBatchSize=2)
    run.start()
    run.wait_for_step(8)
    run.kill_rank(1)
    run.succeed()
    chosen = decided(LLMTrainJobSpec.model_validate(run.manifest["spec"])).parallelism
    assert (chosen.pipeline, chosen.context) == (2, 2)
    shape = Shape.model_validate(run.status()["shape"])
    assert shape.parallelism() == chosen
    assert run.status()["attempt"] == 2, "the second attempt had the same shape"
    assert run.steps()[-1].step == STEPS
    assert run.job()["spec"]["parallelism"] == {"planFor": "cpu"}, "the stored spec is the user's"
    newest = max(folder for folder in run.store.glob("step-*") if folder.is_dir())
    ranks_had = json.loads((newest / "manifest.json").read_text())
    assert (ranks_had["worldSize"], ranks_had["pipeline"], ranks_had["context"]) == (4, 2, 2)
    assert all(len(seen) == 1 for seen in bits(run.steps()).values()), "losses are those of one layout"
    run.assert_nothing_runs()
