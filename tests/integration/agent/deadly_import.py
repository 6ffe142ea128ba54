"""A rank entry that ends the process which imports it, as a broken shared library does."""

import os

os._exit(3)
