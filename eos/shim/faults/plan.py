"""Define plans of faults: rules that name a request, a time and a fault.

The module owns the rules' meaning and their TOML form, and does no I/O except reading the file. A run in which a rule
never fired proves nothing, so a plan reports those rules. Plans are deterministic: counters decide, or the plan's seed
for a rule with a chance.

    seed = 7
    [[rule]]
    api = "EndTxn"                  # Kafka's name of the API
    nth = 3                         # the third matching request; with times = 2 the third and the fourth
    transactional_id = "orders-*"   # also: partition = "out-0", group, broker (node id), outcome = "abort"
    phase = "late"                  # before_apply (default), after_apply, late
    action = "reset"                # blackhole, delay, error, duplicate, throttle
    until = { api = "Produce", nth = 1, when = "answered" }     # for late and delay: this event, or seconds = 1.5
    until = { rule = 1 }            # or: until the first rule of this plan has fired
    beside = 1                      # only after the first rule has fired, and on other partitions than its request
"""

from __future__ import annotations

import random
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from kafka.protocol.api_key import ApiKey

from eos.codes import CODES, error_name
from eos.errors import ConfigurationError
from eos.shim.faults.facts import RequestFacts
from eos.shim.pipeline import Connection
from eos.shim.wire import messages


class Phase(Enum):
    BEFORE_APPLY = "before_apply"  # the broker has not received the request
    AFTER_APPLY = "after_apply"  # the broker has acted, and the client gets no response or another one
    LATE = "late"  # the request arrives after its client's connection has closed


# The phases that each action supports.
ACTIONS: Mapping[str, frozenset[Phase]] = {
    "reset": frozenset(Phase),
    "blackhole": frozenset({Phase.BEFORE_APPLY, Phase.AFTER_APPLY}),
    "delay": frozenset({Phase.BEFORE_APPLY, Phase.AFTER_APPLY}),
    "error": frozenset({Phase.BEFORE_APPLY, Phase.AFTER_APPLY}),
    "duplicate": frozenset(Phase),
    "throttle": frozenset({Phase.AFTER_APPLY}),
}
SIDES = ("broker", "client")
_CODES = {error_name(code): code for code in CODES if code}


@dataclass(frozen=True)
class Event:
    """Define an event: the `nth` request of `api` after the fault, with a matching transactional.id.

    The transactional.id is that of the faulted request by default. The event occurs when the request `arrives` or was
    `answered`. The request then waits until the late frame has been handled, so the order is the same in every run.

    With `rule` instead of `api`, the event is the `nth` time that this rule fired (numbered from 1, of the same side).
    A rule with after_apply fires when the broker's response arrives.
    """

    api: str = ""
    nth: int = 1
    when: str = "answered"
    outcome: str | None = None
    transactional_id: str | None = None
    rule: int | None = None

    def __post_init__(self) -> None:
        if self.rule is None:
            _api_key(self.api)
        elif self.api or self.when != "answered" or self.outcome or self.transactional_id:
            raise ConfigurationError(f"rule = {self.rule}: can be combined only with nth")
        if self.when not in ("arrives", "answered"):
            raise ConfigurationError(f"when = {self.when}: must be 'arrives' or 'answered'")
        if self.nth < 1:
            raise ConfigurationError(f"nth = {self.nth}: must be at least 1")

    @property
    def api_key(self) -> int:
        return _api_key(self.api)

    def matches(self, facts: RequestFacts, of_fault: RequestFacts) -> bool:
        if self.transactional_id is None and of_fault.transactional_id is not None:
            same = facts.transactional_id == of_fault.transactional_id
        else:
            same = _fits(self.transactional_id, facts.transactional_id)
        return same and facts.api_key == self.api_key and self.outcome in (None, facts.outcome)

    def __str__(self) -> str:
        if self.rule is not None:
            return f"rule {self.rule} fired"
        return f"{self.api} no. {self.nth} {'is' if self.when == 'answered' else ''} {self.when}".replace("  ", " ")


@dataclass(frozen=True)
class Rule:
    """Define one fault. `side` places it between clients and protection, or (default) between protection and brokers.

    `beside` is the number of another rule: only requests after that rule's first fault count, and only if they name
    other partitions. Clients write their partitions in no fixed order.
    """

    api: str
    action: str
    phase: Phase = Phase.BEFORE_APPLY
    nth: int = 1
    times: int = 1
    transactional_id: str | None = None
    group: str | None = None
    partition: str | None = None
    outcome: str | None = None
    broker: int | None = None
    beside: int | None = None
    seconds: float | None = None
    until: Event | None = None
    error: str | int | None = None
    throttle_ms: int = 1_000
    chance: float | None = None
    side: str = "broker"
    optional: bool = False

    def __post_init__(self) -> None:
        key = _api_key(self.api)
        if self.action not in ACTIONS:
            raise ConfigurationError(f"action = {self.action}: must be one of {', '.join(ACTIONS)}")
        if self.phase not in ACTIONS[self.action]:
            allowed = ", ".join(sorted(phase.value for phase in ACTIONS[self.action]))
            raise ConfigurationError(f"{self.action} has no phase {self.phase.value}: use {allowed}")
        if self.nth < 1 or self.times < 1:
            raise ConfigurationError(f"nth = {self.nth}, times = {self.times}: must be at least 1")
        if self.side not in SIDES:
            raise ConfigurationError(f"side = {self.side}: must be broker or client")
        if self.chance is not None and not 0 < self.chance <= 1:
            raise ConfigurationError(f"chance = {self.chance}: must be above 0 and at most 1")
        waits = self.action == "delay" or self.phase is Phase.LATE
        # An error response that is sent after the broker has acted may be delayed too.
        may_wait = waits or (self.action == "error" and self.phase is Phase.AFTER_APPLY)
        times_given = (self.seconds is not None) + (self.until is not None)
        if times_given > 1 or (waits and not times_given) or (times_given and not may_wait):
            what = f"{self.action} {self.phase.value}"
            raise ConfigurationError(
                f"{what} needs seconds or until" if waits else f"{what} takes neither seconds nor until"
            )
        if (self.action == "error") != (self.error is not None):
            raise ConfigurationError(
                f"{self.action} " + ("needs error" if self.action == "error" else "takes no error")
            )
        if self.error is not None:
            _ = self.code
            if key not in messages.RESPONSES:
                raise ConfigurationError(f"{self.api} cannot be answered with an error")

    @property
    def api_key(self) -> int:
        return _api_key(self.api)

    @property
    def code(self) -> int:
        if isinstance(self.error, int):
            return self.error
        if self.error not in _CODES:
            raise ConfigurationError(f"error = {self.error}: Kafka has no error of this name")
        return _CODES[self.error]

    def matches(self, facts: RequestFacts, connection: Connection) -> bool:
        return (
            facts.api_key == self.api_key
            and _fits(self.transactional_id, facts.transactional_id)
            and _fits(self.group, facts.group)
            and (self.outcome is None or self.outcome == facts.outcome)
            and (self.partition is None or any(_fits(self.partition, name) for name in facts.partitions))
            and (self.broker is None or self.broker == connection.node_id)
        )

    def __str__(self) -> str:
        what = f"{self.action} {self.error}" if self.error is not None else self.action
        conditions = (self.transactional_id, self.group, self.partition, self.outcome)
        who = "".join(f" of {value}" for value in conditions if value is not None)
        who += f" beside rule {self.beside}" if self.beside is not None else ""
        when = f" until {self.until}" if self.until else f" for {self.seconds:g} s" if self.seconds else ""
        return f"{what} {self.phase.value} at {self.api} no. {self.nth}{who}{when}"


def _fits(pattern: str | None, name: str | None) -> bool:
    return pattern is None or (name is not None and fnmatchcase(name, pattern))


def _api_key(name: str) -> int:
    try:
        return int(ApiKey[name])
    except KeyError:
        raise ConfigurationError(f"api = {name}: Kafka has no API of this name (Produce, EndTxn, ...)") from None


@dataclass
class Progress:
    """Count the matching requests of a rule (`matched`), those with a fault (`injected`), and unfinished ones (`open`).

    `number` is the rule's number in the plan, from 1. `completed` counts the completed faults: with after_apply it is
    below `injected` until the broker has answered.
    """

    rule: Rule
    chances: random.Random
    number: int = 1
    completed: int = 0
    first: RequestFacts | None = None  # describes the first request into which the rule injected its fault
    matched: int = 0
    injected: int = 0
    open: int = 0
    failed: list[str] = field(default_factory=list)

    def is_on_other_partitions(self, facts: RequestFacts) -> bool:
        """Return whether the request comes after this rule's first fault and names only other partitions."""
        return self.first is not None and bool(facts.partitions) and not facts.partitions & self.first.partitions

    def count_match(self) -> bool:
        """Count a matching request, and return whether it gets the fault."""
        self.matched += 1
        if self.matched < self.rule.nth:
            return False
        if self.rule.chance is not None:
            return self.chances.random() < self.rule.chance
        return self.injected < self.rule.times


class Plan:
    """Hold rules and their progress in one run of a shim."""

    def __init__(self, rules: Sequence[Rule], seed: int = 0) -> None:
        if not rules:
            raise ConfigurationError("a plan of faults needs at least one rule")
        self.seed = seed
        # Each rule has its own random generator: the decision about the rule's k-th request must not depend on requests
        # that other rules match.
        self.progress = [Progress(rule, random.Random(f"{seed}:{at}"), at + 1) for at, rule in enumerate(rules)]
        for each in self.progress:
            known = [one.number for one in self.on(each.rule.side) if one is not each]
            for other in (each.rule.beside, each.rule.until.rule if each.rule.until else None):
                if other is not None and other not in known:
                    raise ConfigurationError(f"rule {other}: not the number of another rule of side {each.rule.side}")

    @property
    def rules(self) -> list[Rule]:
        return [each.rule for each in self.progress]

    def on(self, side: str) -> list[Progress]:
        return [each for each in self.progress if each.rule.side == side]

    @property
    def fired(self) -> int:
        return sum(each.injected for each in self.progress)

    def fired_by_action(self) -> dict[str, int]:
        counts = dict.fromkeys(sorted({rule.action for rule in self.rules}), 0)
        for each in self.progress:
            counts[each.rule.action] += each.injected
        return counts

    def complaints(self) -> list[str]:
        """Return a sentence for each rule that did not fire as planned."""
        found = []
        for number, each in enumerate(self.progress, 1):
            name = f"rule {number} ({each.rule})"
            missing = each.rule.times - each.injected if each.rule.chance is None else int(each.injected == 0)
            if missing > 0 and not each.rule.optional:
                found.append(
                    f"{name} never fired: {each.matched} requests matched"
                    if not each.injected
                    else f"{name} fired {each.injected} of {each.rule.times} times: {each.matched} requests matched"
                )
            if each.open:
                found.append(f"{name} fired, but its event never occurred")
            found += [f"{name} failed: {reason}" for reason in each.failed]
        return found


def read_plan(path: Path) -> Plan:
    """Read a plan from a TOML file. Raises ConfigurationError, with the rule's number, for an invalid plan."""
    try:
        table = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigurationError(f"the plan {path} cannot be read: {error}") from error
    unknown = set(table) - {"seed", "rule"}
    rules, seed = table.get("rule", []), table.get("seed", 0)
    if unknown or not isinstance(rules, list) or not isinstance(seed, int):
        what = f"{sorted(unknown)[0]} is unknown" if unknown else "expected a number as seed and rules as [[rule]]"
        raise ConfigurationError(f"the plan {path}: {what}")
    made = []
    for number, values in enumerate(rules, 1):
        try:
            made.append(_parse_rule(values))
        except (ConfigurationError, TypeError, ValueError) as error:
            raise ConfigurationError(f"rule {number} of {path}: {error}") from error
    return Plan(made, seed)


def _parse_rule(values: Mapping[str, Any]) -> Rule:
    given = dict(values)
    _refuse_unknown(given, Rule)
    if "phase" in given:
        names = [phase.value for phase in Phase]
        if given["phase"] not in names:
            raise ConfigurationError(f"phase = {given['phase']}: must be one of {', '.join(names)}")
        given["phase"] = Phase(given["phase"])
    if "until" in given:
        if not isinstance(given["until"], dict):
            raise ConfigurationError('until: expected { api = "...", nth = 1, when = "answered" }')
        _refuse_unknown(given["until"], Event)
        given["until"] = Event(**given["until"])
    for name in ("api", "action"):
        if name not in given:
            raise ConfigurationError(f"{name} is missing")
    return Rule(**given)


def _refuse_unknown(given: Mapping[str, Any], kind: type) -> None:
    known = {each.name: str(each.type) for each in fields(kind)}
    for name, value in given.items():
        if name not in known:
            raise ConfigurationError(f"{name} is unknown: expected one of {', '.join(known)}")
        if name not in ("until", "phase") and not _has_type(value, known[name]):
            raise ConfigurationError(f"{name} = {value!r}: expected {known[name].removesuffix(' | None')}")


def _has_type(value: object, wanted: str) -> bool:
    kinds: dict[str, tuple[type, ...]] = {"str": (str,), "int": (int,), "float": (int, float), "bool": (bool,)}
    named = [name for name in wanted.split(" | ") if name != "None"]
    if isinstance(value, bool):
        return "bool" in named
    return isinstance(value, tuple(kind for name in named for kind in kinds[name]))
