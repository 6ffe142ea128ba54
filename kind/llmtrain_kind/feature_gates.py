"""Native gang scheduling (Workload and PodGroup objects): alpha here, so it must be switched on by hand."""

_GATES = ("GenericWorkload", "GangScheduling")

#: API version of scheduling.k8s.io that serves the gang objects, by Kubernetes minor version.
_API_VERSIONS = {35: "v1alpha1", 36: "v1alpha2"}


def gates(kubernetes: str) -> dict[str, bool]:
    """Feature gates for API server and scheduler at this Kubernetes version."""
    return dict.fromkeys(_GATES, True) if _minor(kubernetes) in _API_VERSIONS else {}


def runtime_config(kubernetes: str) -> dict[str, str]:
    """API groups to serve beyond the default ones."""
    version = _API_VERSIONS.get(_minor(kubernetes))
    return {f"scheduling.k8s.io/{version}": "true"} if version else {}


def as_flag(settings: dict[str, bool] | dict[str, str]) -> str:
    """``a=true,b=true``: the form in which Kubernetes' flags take a map."""
    return ",".join(f"{key}={str(value).lower()}" for key, value in settings.items())


def _minor(kubernetes: str) -> int:
    return int(kubernetes.split(".")[1])
