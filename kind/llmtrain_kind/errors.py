"""The errors a user of ``kind/cluster`` can meet, each with the exit code it ends in."""


class ClusterError(Exception):
    """Something failed; the message says what, where, and what to do about it."""

    exit_code = 1


class CannotRunHere(ClusterError):
    """This machine lacks something a cluster needs; the message is one line naming it."""

    exit_code = 3


class Refused(ClusterError):
    """The request makes no sense here (unknown node, a fault verb on somebody else's cluster, ...)."""

    exit_code = 2
