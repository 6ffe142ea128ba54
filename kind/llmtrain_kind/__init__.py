"""A test cluster on any machine: the package behind the command ``kind/cluster`` (standard library only)."""
