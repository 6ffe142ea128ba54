"""The bytes of a server-side apply: JSON that a YAML reader takes too.

The API server reads the body of an apply as YAML, which is nearly but not quite a superset of JSON: it refuses the
surrogate pairs by which JSON writes an emoji in ASCII ("found invalid Unicode character escape code"), and control
characters that JSON lets through. A message of a user's program may hold any of them, and a refused write of a status
stops its job from being looked after.
"""

from __future__ import annotations

import json
import re
from typing import Any

_ESCAPED = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")
"""Not printable to YAML, or a line break to it: written as an escape."""
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
"""No character at all; Python keeps bytes in them that were no UTF-8."""


def apply_body(body: dict[str, Any]) -> bytes:
    """Return the object as UTF-8; what is no character becomes U+FFFD, all else arrives as it is.

    Raises:
        TypeError: it holds what JSON has no form for.
    """
    text = json.dumps(body, ensure_ascii=False, separators=(",", ":"))
    text = _LONE_SURROGATE.sub("\ufffd", text)
    return _ESCAPED.sub(lambda found: f"\\u{ord(found[0]):04x}", text).encode()
