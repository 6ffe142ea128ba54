"""Every name that crosses a boundary: groups, labels, exit codes, environment, conditions, states, reasons."""

from __future__ import annotations

from enum import IntEnum, StrEnum

GROUP = "llmtrain.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "LLMTrainJob"
PLURAL = "llmtrainjobs"
SINGULAR = "llmtrainjob"
SHORT_NAME = "ltj"
CRD_NAME = f"{PLURAL}.{GROUP}"

MANAGER = f"{GROUP}/operator"
"""The value of spec.managedBy that makes this operator act on a job, and the field manager of what it applies."""

LABEL_JOB = f"{GROUP}/job"
LABEL_JOB_UID = f"{GROUP}/job-uid"
LABEL_WORKER = f"{GROUP}/worker"
LABEL_ATTEMPT = f"{GROUP}/attempt"
"""The attempt in which the pod was created; a pod outlives attempts when ranks restart in place."""
LABEL_MANAGED_BY = "app.kubernetes.io/managed-by"
MANAGED_BY_VALUE = "llmtrain"

MAX_NAME_LENGTH = 46
"""A job's name plus '-w4095-a99999' and room to spare must fit a 63-character label and host name."""

CONTAINER = "trainer"
"""The name of the container in a worker pod that a template may extend."""
COORDINATOR_PORT = 8470
METRICS_PORT = 8080
RENDEZVOUS_PORT_BASE = 29500
RENDEZVOUS_PORT_SPAN = 400
"""The store of attempt N listens on base + N mod span: a stale rank dials a port where nobody waits for it."""
VOLUME_ROOT = "/mnt/llmtrain"
"""pvc://CLAIM/PATH is mounted at VOLUME_ROOT/CLAIM in every worker."""


class ExitCode(IntEnum):
    """What a rank's exit code tells the operator. Any other code or signal is a crash."""

    SUCCESS = 0
    USER_ERROR = 64
    """Wrong configuration or data: a restart cannot help (EX_USAGE)."""
    PEER_LOST = 75
    """A collective failed because another rank went away: a symptom, not a cause (EX_TEMPFAIL)."""
    NUMERICS = 76
    """Loss or gradient is not finite."""
    CHECKPOINT = 77
    """A checkpoint could not be written or read although the configuration is right."""
    STALE_ATTEMPT = 78
    """A newer attempt has claimed the job's checkpoints: this one may not write them any more."""
    PREEMPTED = 143
    """SIGTERM was obeyed: the step was finished and a checkpoint committed."""


class FailureClass(StrEnum):
    """Causes, as the operator counts them. Order is priority: the first that applies names the failure."""

    USER_ERROR = "UserError"
    OUT_OF_MEMORY = "OutOfMemory"
    HARDWARE = "Hardware"
    NUMERICS = "Numerics"
    CHECKPOINT = "Checkpoint"
    NODE_LOST = "NodeLost"
    HANG = "Hang"
    CRASH = "Crash"
    DISRUPTION = "Disruption"
    STARTUP = "Startup"
    COMMUNICATION = "Communication"


class Action(StrEnum):
    """The rungs of the ladder, cheapest first."""

    RESTART_RANKS = "RestartRanks"
    REPLACE_WORKER = "ReplaceWorker"
    REPLACE_NODE = "ReplaceNode"
    """Another pod, on another node."""
    REQUEUE = "Requeue"
    """Release all workers, then begin anew."""
    FAIL_JOB = "FailJob"


class State(StrEnum):
    """One word for people; the conditions are the truth."""

    PENDING = "Pending"
    """Workers are being created, scheduled or pulled."""
    STARTING = "Starting"
    """Ranks were told to start; no optimizer step of the first attempt yet."""
    TRAINING = "Training"
    RESTARTING = "Restarting"
    """A failure was met and the next attempt has not made a step yet."""
    BLOCKED = "Blocked"
    """The job cannot be accepted as it stands; the message says why and what to do."""
    SUSPENDED = "Suspended"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"


TERMINAL_STATES = frozenset({State.SUCCEEDED, State.FAILED})


class GoodputPart(StrEnum):
    """What wall time can go into, by the names of status.goodput.milliseconds."""

    SCHEDULING = "scheduling"
    START = "start"
    COMPUTE = "compute"
    CHECKPOINT_STALL = "checkpointStall"
    REDONE = "redone"
    HANG = "hang"
    RESTART = "restart"
    SUSPENDED = "suspended"
    IDLE = "idle"


class ConditionType(StrEnum):
    ACCEPTED = "Accepted"
    WORKERS_READY = "WorkersReady"
    PROGRESSING = "Progressing"
    HANGING = "Hanging"
    """A rank is overdue in what it does; the message names the one that is furthest behind."""
    STRAGGLING = "Straggling"
    """A rank's own work takes longer than that of its peers, and all wait for it; the message names it."""
    SUSPENDED = "Suspended"
    COMPLETE = "Complete"
    FAILED = "Failed"


class Env(StrEnum):
    """Environment that the operator gives to an agent."""

    COORDINATOR_URL = "LLMTRAIN_COORDINATOR_URL"
    """Base address of the coordinator, for instance http://llmtrain.llmtrain-system:8470 ."""
    TOKEN_FILE = "LLMTRAIN_TOKEN_FILE"
    """File with the job's bearer token; re-read at every connection."""
    JOB_NAMESPACE = "LLMTRAIN_JOB_NAMESPACE"
    JOB_NAME = "LLMTRAIN_JOB_NAME"
    JOB_UID = "LLMTRAIN_JOB_UID"
    POD_NAME = "LLMTRAIN_POD_NAME"
    POD_ADDRESS = "LLMTRAIN_POD_ADDRESS"
    """The address at which other workers reach this one (the pod's IP; 127.0.0.1 on a laptop)."""
    WORKER_INDEX = "LLMTRAIN_WORKER_INDEX"
    GRACE_SECONDS = "LLMTRAIN_GRACE_SECONDS"
    """How long ranks have between SIGTERM and SIGKILL."""
    ORPHAN_SECONDS = "LLMTRAIN_ORPHAN_SECONDS"
    """Leave (exit 0) when idle and the coordinator has been away this long; unset or 0 = wait for ever."""
    FENCE_SECONDS = "LLMTRAIN_FENCE_SECONDS"
    """Kill ranks that are stuck while the coordinator has been away this long. Default 15; 0 = never."""
    WORK_DIR = "LLMTRAIN_WORK_DIR"
    """A writable folder of this worker alone: sockets, error files. Default /tmp/llmtrain."""
    VOLUMES = "LLMTRAIN_VOLUMES"
    """JSON {claim: folder}; on a cluster absent: VOLUME_ROOT/CLAIM."""
