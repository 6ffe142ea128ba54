"""The body of a request as the API server reads it: YAML where it is an apply, with all that YAML refuses."""

from __future__ import annotations

import json

import yaml
from aiohttp import web

from tests.support.merging import Object


def parsed(body: bytes, content_type: str) -> Object:
    """Return the object.

    Raises:
        aiohttp.web.HTTPBadRequest: it cannot be read; the answer is a Status.
    """
    try:
        if content_type == "application/apply-patch+yaml":
            # The C loader is libyaml, which the API server's reader is a port of.
            found = yaml.load(body, yaml.CSafeLoader)
        else:
            found = json.loads(body or b"{}")
    except (ValueError, yaml.YAMLError) as error:
        status = {"kind": "Status", "status": "Failure", "reason": "BadRequest", "code": 400, "message": str(error)}
        raise web.HTTPBadRequest(text=json.dumps(status), content_type="application/json") from error
    assert isinstance(found, dict)
    return found
