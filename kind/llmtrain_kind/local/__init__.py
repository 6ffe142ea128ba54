"""The `local` provider: a real Kubernetes cluster of plain processes on one Linux machine, without Docker."""
