"""Native gang scheduling (Workload and PodGroup objects): off by default in these releases, so switched on by hand."""

#: Kubernetes minor version -> its feature gates, and the version of scheduling.k8s.io that serves the objects.
_GANG_SCHEDULING = {
    35: (("GenericWorkload", "GangScheduling"), "v1alpha1"),
    36: (("GenericWorkload", "GangScheduling"), "v1alpha2"),
    37: (("GenericWorkload",), "v1beta1"),
}


def gates(kubernetes: str) -> dict[str, bool]:
    """Feature gates for API server, controllers and scheduler at this Kubernetes version."""
    names, _ = _GANG_SCHEDULING.get(_minor(kubernetes), ((), ""))
    return dict.fromkeys(names, True)


def runtime_config(kubernetes: str) -> dict[str, str]:
    """API groups to serve beyond the default ones."""
    _, version = _GANG_SCHEDULING.get(_minor(kubernetes), ((), ""))
    return {f"scheduling.k8s.io/{version}": "true"} if version else {}


def as_flag(settings: dict[str, bool] | dict[str, str]) -> str:
    """``a=true,b=true``: the form in which Kubernetes' flags take a map."""
    return ",".join(f"{key}={str(value).lower()}" for key, value in settings.items())


def _minor(kubernetes: str) -> int:
    return int(kubernetes.split(".")[1])
