"""One table of manifests, accepted and refused: read by the Python twin, by CEL, and by a real API server."""

from __future__ import annotations

from tests.unit.api.cases_checkpoint import CHECKPOINT_ACCEPTED, CHECKPOINT_MISTYPED, CHECKPOINT_REFUSED
from tests.unit.api.cases_failure import FAILURE_ACCEPTED, FAILURE_MISTYPED
from tests.unit.api.cases_layout import LAYOUT_ACCEPTED, LAYOUT_MISTYPED, LAYOUT_REFUSED
from tests.unit.api.cases_metrics import METRICS_ACCEPTED, METRICS_MISTYPED, METRICS_REFUSED
from tests.unit.api.cases_updates import FROZEN
from tests.unit.api.manifests import ABSENT, Case

LONG_NAME = "n" * 47
DIMENSIONS = {
    "dim": 64,
    "layers": 2,
    "heads": 4,
    "kvHeads": 2,
    "ffnDim": 128,
    "vocabSize": 300,
    "sequenceLength": 64,
}
WITHOUT_LAYERS = {name: value for name, value in DIMENSIONS.items() if name != "layers"}

ACCEPTED = (
    *LAYOUT_ACCEPTED,
    *CHECKPOINT_ACCEPTED,
    *FAILURE_ACCEPTED,
    *METRICS_ACCEPTED,
    Case("the base", {}),
    Case("an update that changes nothing", {}, old={}),
    Case("no replicas: one worker", {"spec.workers.replicas": ABSENT}),
    Case(
        "no ranks per worker: one for each accelerator",
        {"spec.workers.ranksPerWorker": ABSENT, "spec.training.globalBatchSize": 16},
    ),
    Case("no accelerator: one rank", {"spec.workers.ranksPerWorker": ABSENT, "spec.workers.accelerator": {"count": 0}}),
    Case("cuda with as many ranks as accelerators", {"spec.workers.device": "cuda", "spec.workers.ranksPerWorker": 4}),
    Case("another accelerator", {"spec.workers.accelerator": {"resource": "amd.com/gpu", "count": 4}}),
    Case("all dimensions, no preset", {"spec.model": DIMENSIONS}),
    Case("a preset with other heads", {"spec.model": {"preset": "tiny", "heads": 8}}),
    Case(
        "a small vocabulary with a tokenizer",
        {"spec.model.vocabSize": 100, "spec.data.tokenizer": {"uri": "file:///t/tokenizer.json"}},
    ),
    Case("first weights from a claim", {"spec.model.initFrom": "pvc://weights/llama-3"}),
    Case("the smallest vocabulary for bytes", {"spec.model.vocabSize": 257}),
    Case("replicas of the model on all ranks", {"spec.parallelism.replicate": 4}),
    Case("pairs of ranks share every matrix", {"spec.parallelism": {"tensor": 2, "replicate": 2}}),
    Case("long sequences in parts", {"spec.parallelism": {"context": 2, "tensor": 2}}),
    Case("a batch for what the tensor axis leaves", {"spec.parallelism.tensor": 2, "spec.training.globalBatchSize": 2}),
    Case("ZeRO-1 and recomputation", {"spec.parallelism": {"zeroStage": 1, "recompute": "selective"}}),
    Case("nothing sharded", {"spec.parallelism": {"zeroStage": 0, "replicate": 2}}),
    Case("a learning rate as an integer", {"spec.training.optimizer": {"learningRate": 1}}),
    Case("a small learning rate", {"spec.training.optimizer": {"learningRate": 6e-5}}),
    Case("an integer written as a float", {"spec.training.steps": 20.0}),
    Case("warm-up until the step before the last", {"spec.training.schedule": {"warmupSteps": 19}}),
    Case("two sources", {"spec.data.sources": [{"uri": "pvc://corpus/en/*.jsonl"}, {"uri": "file:///data/text"}]}),
    Case("the largest seed", {"spec.training.seed": 2**63 - 1}),
    Case("the longest name", {"metadata.name": LONG_NAME[:-1]}),
    Case("a null is an absent field", {"spec.workers.template": None, "spec.activeDeadlineSeconds": None}),
    Case("labels", {"metadata.labels": {"team": "a"}}),
    Case(
        "a pod template",
        {
            "spec.workers.template": {
                "spec": {
                    "nodeSelector": {"pool": "gpu"},
                    "tolerations": [{"operator": "Exists"}],
                    "containers": [{"name": "trainer", "env": [{"name": "NCCL_DEBUG", "value": "INFO"}]}],
                    "volumes": [{"name": "data", "emptyDir": {}}],
                }
            }
        },
    ),
    Case("limits of a hang", {"spec.failurePolicy": {"hang": {"factor": 5, "floorSeconds": 60}}}),
    Case("budgets and deadlines", {"spec.failurePolicy": {"budgets": {"crash": 0}, "deadlines": {"stopSeconds": 0}}}),
    Case(
        "an update of all that may change",
        {
            "spec.suspend": False,
            "spec.workers.replicas": 4,
            "spec.failurePolicy": {"budgets": {"crash": 1}},
            "spec.activeDeadlineSeconds": 60,
            "spec.ttlSecondsAfterFinished": 0,
        },
        old={},
    ),
    Case("an update that writes a default out", {"spec.training.microBatchSize": 1}, old={}),
)

MISTYPED = (
    *LAYOUT_MISTYPED,
    *CHECKPOINT_MISTYPED,
    *FAILURE_MISTYPED,
    *METRICS_MISTYPED,
    Case("unknown field", {"spec.workers.replica": 2}, ("spec.workers.replica",), ("did you mean replicas?",)),
    Case("unknown field at the top of the spec", {"spec.traning": {}}, ("spec.traning",), ("training",)),
    Case(
        "Python's spelling",
        {"spec.training.micro_batch_size": 1},
        ("spec.training.micro_batch_size",),
        ("microBatchSize",),
    ),
    Case(
        "field of another place",
        {"spec.training.warmupSteps": 1},
        ("spec.training.warmupSteps",),
        ("spec.training.schedule.warmupSteps",),
    ),
    Case("unknown field in a list", {"spec.data.sources.0.url": "x"}, ("spec.data.sources[0].url",), ("uri",)),
    Case(
        "reserved field of the pod",
        {"spec.workers.template": {"spec": {"restartPolicy": "Always"}}},
        ("spec.workers.template.spec.restartPolicy",),
        ("remove it",),
    ),
    Case(
        "misspelt field of the pod",
        {"spec.workers.template": {"spec": {"nodeselector": {}}}},
        ("spec.workers.template.spec.nodeselector",),
        ("nodeSelector",),
    ),
    Case(
        "number in quotes",
        {"spec.training.steps": "20"},
        ("spec.training.steps",),
        ('"20"', "an integer", "remove the quotes"),
    ),
    Case("fraction for an integer", {"spec.training.steps": 2.5}, ("spec.training.steps",), ("2.5", "an integer")),
    Case("truth value for an integer", {"spec.training.steps": True}, ("spec.training.steps",), ("true", "an integer")),
    Case("text for a truth value", {"spec.suspend": "yes"}, ("spec.suspend",), ('"yes"', "true or false")),
    Case("number for text", {"spec.workers.image": 5}, ("spec.workers.image",), ("5", "a string", "put it in quotes")),
    Case("text for an object", {"spec.model": "tiny"}, ("spec.model",), ('"tiny"', "an object of preset")),
    Case("text for a list", {"spec.data.sources": "builtin://python-stdlib"}, ("spec.data.sources",), ("a list",)),
    Case(
        "missing field",
        {"spec.workers.image": ABSENT},
        ("spec.workers.image",),
        ("is missing", "add spec.workers.image"),
    ),
    Case("missing spec", {"spec": ABSENT}, ("spec",), ("is missing",)),
    Case(
        "wrong word", {"spec.model.preset": "llama-7B"}, ("spec.model.preset",), ("llama-7B", "did you mean llama-7b?")
    ),
    Case(
        "wrong number of a choice",
        {"spec.parallelism.zeroStage": 4},
        ("spec.parallelism.zeroStage",),
        ("4", "0 or 1 or 2 or 3"),
    ),
    Case("replicas 0", {"spec.workers.replicas": 0}, ("spec.workers.replicas",), ("0", "at least 1")),
    Case("micro-batch 0", {"spec.training.microBatchSize": 0}, ("spec.training.microBatchSize",), ("at least 1",)),
    Case("replicate 0", {"spec.parallelism.replicate": 0}, ("spec.parallelism.replicate",), ("at least 1",)),
    Case(
        "no micro-batch between reductions",
        {"spec.training.syncEveryMicroBatches": 0},
        ("spec.training.syncEveryMicroBatches",),
        ("at least 1",),
    ),
    Case("context 0", {"spec.parallelism.context": 0}, ("spec.parallelism.context",), ("at least 1",)),
    Case("tensor 0", {"spec.parallelism.tensor": 0}, ("spec.parallelism.tensor",), ("at least 1",)),
    Case("heads 0", {"spec.model.heads": 0}, ("spec.model.heads",), ("at least 1",)),
    Case("key heads 0", {"spec.model.kvHeads": 0}, ("spec.model.kvHeads",), ("at least 1",)),
    Case(
        "too many replicas",
        {"spec.workers.replicas": 5000},
        ("spec.workers.replicas",),
        ("at most 4096",),
        api_problems=("spec.workers.replicas", "spec.training.globalBatchSize"),
    ),
    Case(
        "learning rate 0",
        {"spec.training.optimizer": {"learningRate": 0}},
        ("spec.training.optimizer.learningRate",),
        ("more than 0",),
    ),
    Case("beta 1", {"spec.training.optimizer": {"beta1": 1}}, ("spec.training.optimizer.beta1",), ("less than 1",)),
    Case("integer beyond 32 bits", {"spec.training.steps": 2**31}, ("spec.training.steps",), ()),
    Case("negative seed", {"spec.training.seed": -1}, ("spec.training.seed",), ("at least 0",)),
    Case("no sources", {"spec.data.sources": []}, ("spec.data.sources",), ("1 to 64",)),
    Case("a hub's name", {"spec.model.initFrom": "meta/llama"}, ("spec.model.initFrom",), ("pvc://CLAIM/PATH",)),
    Case("space in an address", {"spec.data.sources": [{"uri": "file:///a b"}]}, ("spec.data.sources[0].uri",), ()),
    Case(
        "builtin text that does not exist",
        {"spec.data.sources": [{"uri": "builtin://wikipedia"}]},
        ("spec.data.sources[0].uri",),
        ("builtin://python-stdlib",),
    ),
    Case(
        "accelerator that is no extended resource",
        {"spec.workers.accelerator": {"resource": "gpu"}},
        ("spec.workers.accelerator.resource",),
        ('"gpu"', "nvidia.com/gpu"),
    ),
    Case(
        "one source twice",
        {"spec.data.sources": [{"uri": "file:///a"}, {"uri": "file:///a"}]},
        ("spec.data.sources[1].uri",),
        ("each uri once",),
        api_problems=("spec.data.sources[1]",),
    ),
    Case(
        "a path for a namespace",
        {"metadata.namespace": "x/../../../escaped"},
        ("metadata.namespace",),
        ("escaped", "a-z, 0-9 and '-', at most 63 characters"),
        python_only=True,
    ),
    Case("capital letters in the name", {"metadata.name": "Case"}, ("metadata.name",), ('"Case"', "a-z")),
    Case("wrong kind", {"kind": "LLMTrainJobs"}, ("kind",), ("LLMTrainJob",), python_only=True),
    Case(
        "wrong version",
        {"apiVersion": "llmtrain.dev/v1"},
        ("apiVersion",),
        ("llmtrain.dev/v1alpha1",),
        python_only=True,
    ),
    Case("unknown field beside the spec", {"specs": {}}, ("specs",), ("did you mean spec?",)),
    Case("unknown field of the metadata", {"metadata.lables": {}}, ("metadata.lables",), ("did you mean labels?",)),
)

BROKEN_RULES = (
    *LAYOUT_REFUSED,
    *CHECKPOINT_REFUSED,
    *METRICS_REFUSED,
    Case(
        "name too long",
        {"metadata.name": LONG_NAME},
        ("metadata.name",),
        (LONG_NAME, "at most 46", "choose a shorter name"),
        api_problems=("<nil>",),
    ),
    Case("dot in the name", {"metadata.name": "a.b"}, ("metadata.name",), ("a.b", "no dot"), api_problems=("<nil>",)),
    Case(
        "neither preset nor dimensions",
        {"spec.model": {}},
        ("spec.model",),
        ("without dim layers heads", "tiny, demo", "add preset"),
    ),
    Case("one dimension missing", {"spec.model": WITHOUT_LAYERS}, ("spec.model",), ("without layers",)),
    Case(
        "heads that do not divide dim",
        {"spec.model": {"preset": "tiny", "heads": 6}},
        ("spec.model.heads",),
        ("6 is refused", "a divisor of dim, which is 64"),
    ),
    Case(
        "dim that heads do not divide",
        {"spec.model": {**DIMENSIONS, "dim": 70}},
        ("spec.model.heads",),
        ("which is 70",),
    ),
    Case(
        "odd width of a head", {"spec.model": {**DIMENSIONS, "dim": 12}}, ("spec.model.heads",), ("dim 12 makes it 3",)
    ),
    Case(
        "key heads that do not divide heads",
        {"spec.model": {**DIMENSIONS, "kvHeads": 3}},
        ("spec.model.kvHeads",),
        ("3 is refused", "which is 4"),
    ),
    Case(
        "vocabulary too small for bytes",
        {"spec.model.vocabSize": 256},
        ("spec.model.vocabSize",),
        ("256 is refused", "257 or more", "name a tokenizer"),
    ),
    Case(
        "cuda without accelerators",
        {"spec.workers.device": "cuda", "spec.workers.accelerator": {"count": 0}},
        ("spec.workers.accelerator.count",),
        ("0 is refused", "set workers.device to cpu"),
    ),
    Case(
        "more ranks than accelerators",
        {"spec.workers.device": "cuda", "spec.workers.accelerator": {"count": 1}},
        ("spec.workers.ranksPerWorker",),
        ("2 is refused", "accelerator.count, which is 1"),
    ),
    Case(
        "axis that does not divide the ranks",
        {"spec.parallelism.replicate": 3},
        ("spec.parallelism.replicate",),
        ("3 is refused", "4 (workers.replicas 2 x 2 ranks)"),
    ),
    Case(
        "tensor axis that does not divide the ranks",
        {"spec.parallelism.tensor": 8},
        ("spec.parallelism.tensor", "spec.parallelism.tensor"),
        ("8 is refused", "4 (workers.replicas 2 x 2 ranks)", "heads (4), kvHeads (2)"),
    ),
    Case(
        "tensor axis that does not divide the key heads",
        {"spec.parallelism.tensor": 4},
        ("spec.parallelism.tensor",),
        ("4 is refused", "kvHeads (2), ffnDim (192), vocabSize (320), sequenceLength (64)"),
    ),
    Case(
        "context axis that does not divide the ranks",
        {"spec.parallelism": {"tensor": 2, "context": 4}},
        ("spec.parallelism.context",),
        ("4 is refused", "4 (workers.replicas 2 x 2 ranks), by tensor 2"),
    ),
    Case(
        "context axis that does not divide the sequence",
        {"spec.parallelism": {"tensor": 2, "context": 2}, "spec.model.sequenceLength": 62},
        ("spec.parallelism.context",),
        ("2 is refused", "times tensor (2) divides the model's sequenceLength (62)"),
    ),
    Case(
        "replicas of what the tensor axis leaves",
        {"spec.parallelism": {"tensor": 2, "replicate": 4}},
        ("spec.parallelism.replicate",),
        ("4 is refused", "a divisor of 2"),
    ),
    Case(
        "batch that the ranks do not divide",
        {"spec.training.globalBatchSize": 10},
        ("spec.training.globalBatchSize",),
        ("10 is refused", "a multiple of 4", "use 12"),
    ),
    Case(
        "batch that the micro-batch does not divide",
        {"spec.training.microBatchSize": 3},
        ("spec.training.globalBatchSize",),
        ("a multiple of 12 (", "microBatchSize 3"),
    ),
    Case(
        "batch and the default number of ranks",
        {"spec.workers.ranksPerWorker": ABSENT},
        ("spec.training.globalBatchSize",),
        ("a multiple of 16",),
    ),
    Case(
        "warm-up as long as the training",
        {"spec.training.schedule": {"warmupSteps": 20}},
        ("spec.training.schedule.warmupSteps",),
        ("20 is refused", "which is 20"),
    ),
    Case(
        "source outside its claim",
        {"spec.data.sources": [{"uri": "file:///a"}, {"uri": "pvc://c/../d"}]},
        ("spec.data.sources[1].uri",),
        ("pvc://c/../d is refused",),
    ),
    Case(
        "first weights outside their claim",
        {"spec.model.initFrom": "pvc://c/../weights"},
        ("spec.model.initFrom",),
        ("pvc://c/../weights is refused", "without '..'"),
    ),
    Case(
        "tokenizer outside its claim",
        {"spec.data.tokenizer": {"uri": "pvc://c/../t.json"}},
        ("spec.data.tokenizer.uri",),
        ("without '..'",),
    ),
    Case(
        "reserved environment variable",
        {
            "spec.workers.template": {
                "spec": {"containers": [{"name": "trainer", "env": [{"name": "LLMTRAIN_JOB_UID", "value": "x"}]}]}
            }
        },
        ("spec.workers.template.spec",),
        ("LLMTRAIN_JOB_UID", "choose another name"),
        python_only=True,
    ),
    Case(
        "resize to a number of ranks that does not divide the batch",
        {"spec.workers.replicas": 3},
        ("spec.training.globalBatchSize",),
        ("a multiple of 6",),
        old={},
    ),
    Case(
        "several at once",
        {"spec.parallelism.replicate": 3, "spec.training.globalBatchSize": 9, "spec.model.heads": 5},
        ("spec.model.heads", "spec.model.kvHeads", "spec.parallelism.replicate", "spec.training.globalBatchSize"),
    ),
)


CASES = (*ACCEPTED, *MISTYPED, *BROKEN_RULES, *FROZEN)
