"""Carrying plans out on a Kubernetes cluster."""
