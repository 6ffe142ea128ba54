"""What a rule is: one statement in two languages, CEL for the API server and Python for everybody else.

A `Term` is one value in both languages; a rule's text names terms in braces, so that both sides show the same message.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from typing import Any


@dataclass(frozen=True)
class Scope:
    """What a rule looks at: plain JSON data, nulls dropped and defaults filled in."""

    now: Any
    """CEL's self."""
    before: Any = None
    """CEL's oldSelf; only transition rules get one."""


@dataclass(frozen=True)
class Term:
    """One value, in CEL and in Python."""

    cel: str
    of: Callable[[Scope], Any]

    def as_text(self, scope: Scope) -> str:
        return shown(self.of(scope))


@dataclass(frozen=True)
class Rule:
    """One rule about one field."""

    at: str
    """The node that CEL calls self: '' for the whole object, spec.data.sources[].uri for every item's uri."""
    field: str
    """The field to blame, below that node; '' for the node itself."""
    reads: tuple[str, ...]
    """Fields below the node that must be right by themselves before the rule means anything; ('',) for the node."""
    cel: str | None
    """None where CEL cannot look, because the schema leaves the content open: then the operator and `llmtrain validate`
    alone refuse it."""
    holds: Callable[[Scope], bool]
    value: Term
    """What the field is, for the message."""
    allowed: str
    fix: str
    terms: Mapping[str, Term] = dataclass_field(default_factory=dict)
    """What `allowed` and `fix` name in braces."""
    transition: bool = False
    """True: compares an update with what was there; not asked when an object is created."""

    def allowed_for(self, scope: Scope) -> str:
        return self._fill(self.allowed, scope)

    def fix_for(self, scope: Scope) -> str:
        return self._fill(self.fix, scope)

    def message_for(self, scope: Scope) -> str:
        """The whole message, the same as the API server's."""
        return self._fill(self._text(), scope)

    def message_cel(self) -> str:
        """A CEL messageExpression that gives the same text as `message_for`."""
        # One format() call, not concatenation: the cost of adding string(int) cannot be bounded by an API server.
        pattern, arguments = "", []
        for literal, name, _, _ in string.Formatter().parse(self._text()):
            pattern += literal.replace("%", "%%")
            if name is not None:
                pattern += "%s"
                arguments.append(self._all_terms()[name].cel)
        return f"{cel_string(pattern)}.format([{', '.join(arguments)}])"

    def message_without_values(self) -> str:
        """What the API server shows should the expression fail."""
        return self._text().format_map({name: f"<{name}>" for name in self._all_terms()})

    def _text(self) -> str:
        where = f"{self.field}: " if self.at == "" else ""
        return f"{where}{{value}} is refused; allowed: {self.allowed}; fix: {self.fix}"

    def _all_terms(self) -> Mapping[str, Term]:
        return {"value": self.value, **self.terms}

    def _fill(self, text: str, scope: Scope) -> str:
        return text.format_map({name: term.as_text(scope) for name, term in self._all_terms().items()})


def shown(value: Any) -> str:
    """A value as CEL's format() shows it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return repr(value).removesuffix(".0")
    return str(value)


def cel_string(text: str) -> str:
    """Return the text as a CEL string literal."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
