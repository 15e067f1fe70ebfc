"""Kill a real worker with SIGKILL at every step of a transaction; its successor finishes the work exactly once.

Before each kill the test proves the step from outside (DescribeTransactions and the registered partitions), so a fault
at another step fails the test. A request of the killed worker may still arrive: before the successor starts, inside the
successor's first transaction, or never.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from eos.broker import LocalKafka
from tests.support.proxy import ApiKey, Fault, HoldingProxy, Rule
from tests.support.reading import wait_until

if TYPE_CHECKING:  # pytest must import the module first, as a plugin: its failed asserts then show values.
    from tests.support.pipeline import Pipeline, Pipelines, WorkerProcess
pytest_plugins = ["tests.support.pipeline"]

RECORDS = 2_000
SESSION = {"session.timeout.ms": "3000"}  # equal to the transaction timeout, so that both expire together
COMMITTED = ("PrepareCommit", "CompleteCommit")
ONGOING = ("Ongoing",)


@dataclass(frozen=True)
class Step:
    """Describe where the worker is stopped, and the state that the coordinator must then report."""

    name: str
    states: tuple[str, ...]  # (): no transaction may be open
    event: str = ""  # the worker holds at this step
    api: ApiKey | None = None  # or the proxy holds this request; with an event, the first request after it
    fault: Fault = Fault.HOLD_REQUEST
    nth: int = 3
    then: str = ""  # with an event and a request, the worker continues to this step before it is killed
    offsets_registered: bool | None = (
        None  # whether the transaction already has the group's offsets, or None for either
    )

    def __str__(self) -> str:
        return self.name


STEPS = [
    Step("after-begin", (), event="begun"),
    Step("after-produce", ONGOING, event="flush", offsets_registered=False),
    # The event is counted from the third begin, because the number of Produce requests per transaction depends on the
    # machine. The proxy holds one Produce, so that the flush cannot end.
    Step("in-flush", ONGOING, event="begun", api=ApiKey.Produce, then="flush", offsets_registered=False),
    Step("after-send-offsets", ONGOING, event="offsets sent", offsets_registered=True),
    Step("commit-before-it-arrives", ONGOING, api=ApiKey.EndTxn, offsets_registered=True),
    Step("commit-before-its-answer", COMMITTED, api=ApiKey.EndTxn, fault=Fault.HOLD_RESPONSE),
    Step("after-commit", COMMITTED, event="committed"),
]
SOME_STEPS = [STEPS[1], STEPS[4], STEPS[5]]
SUCCESSORS = ["before-the-timeouts", "after-the-timeouts"]
REPETITIONS = [0, *(pytest.param(n, marks=pytest.mark.long) for n in range(1, 21))]


@contextlib.contextmanager
def held_at(step: Step, pipeline: Pipeline, settings: dict[str, str]) -> Iterator[tuple[WorkerProcess, Rule | None]]:
    """Start a worker and wait until the coordinator confirms that it is at the step."""
    if step.api is None:
        worker = pipeline.worker(settings=settings, holds=[(step.event, step.nth)])
        worker.wait_at(step.event, step.nth)
        prove(step, pipeline)
        yield worker, None
        return
    kafka = pipeline.kafka
    with HoldingProxy.before(kafka) as proxy:
        ids = pipeline.transactional_ids()

        def arm(nth: int) -> Rule:
            return proxy.on(step.api, step.fault, nth=nth, match=lambda request: request.transactional_id in ids)

        if step.event:
            places = [(event, step.nth) for event in (step.event, step.then) if event]
            worker = pipeline.worker(servers=kafka.proxied_servers, settings=settings, holds=places)
            worker.wait_at(*places[0])
            rule = arm(1)
            for hold in places[1:]:
                worker.release()
                worker.wait_at(*hold)
            worker.release()
        else:
            rule = arm(step.nth)
            worker = pipeline.worker(servers=kafka.proxied_servers, settings=settings)
        rule.wait(30)
        if rule.fault is Fault.HOLD_RESPONSE:
            assert rule.answer().error == 0
        prove(step, pipeline)
        yield worker, rule


def prove(step: Step, pipeline: Pipeline) -> None:
    if not step.states:
        pipeline.wait_not_open(timeout_s=2.5)
        return
    pipeline.wait_state(*step.states, timeout_s=2.5)
    if step.offsets_registered is None:
        return

    def is_registered() -> bool:
        topics = {topic for topic, _ in pipeline.open_partitions()}
        registered = "__consumer_offsets" in topics
        return registered is step.offsets_registered and not topics.isdisjoint(pipeline.destinations)

    wait_until(f"{step} has registered its partitions", is_registered, 2.5)


def arrive(rule: Rule) -> None:
    """Deliver the request of the dead worker to the broker now. Any answer is allowed, but the outcome must be
    exact."""
    rule.release()
    print(f"the late {rule} was answered with {rule.answer().errors}")


def kill_and_finish(
    step: Step, after_timeouts: bool, pipeline: Pipeline, chance: random.Random, settings: dict[str, str]
) -> None:
    with held_at(step, pipeline, settings) as (worker, rule):
        time.sleep(chance.uniform(0, 0.05))  # waits for nothing, so that the kill comes anywhere in the step
        worker.kill()
        late = rule if rule is not None and rule.fault is Fault.HOLD_REQUEST else None
        arrival = chance.choice(["never", "before the successor", "inside the successor's transaction"])
        print(f"{step}: the held request arrives {arrival}")
        if after_timeouts:
            pipeline.wait_not_open()
            pipeline.wait_members(0)
            pipeline.verify(complete=False)
        if late is not None and arrival == "before the successor":
            arrive(late)
        time.sleep(chance.uniform(0, 0.05))
        if late is not None and arrival == "inside the successor's transaction":
            successor = pipeline.worker(settings=settings, until_end=True, holds=[("offsets sent", 1)])
            successor.wait_at("offsets sent", 1)
            pipeline.wait_state("Ongoing", timeout_s=2.5)
            arrive(late)
            successor.release()
            assert successor.wait() == 0, successor.final_output
        else:
            pipeline.finish(settings=settings)
    pipeline.verify()


@pytest.mark.deep_for(
    "after-begin-after*",
    "after-produce-before*",
    "in-flush-after*",
    "after-send-offsets-before*",
    "commit-before-it-arrives-after*",
    "commit-before-its-answer-before*",
    "after-commit-before*",
)
@pytest.mark.parametrize("repetition", REPETITIONS)
@pytest.mark.parametrize("successor", SUCCESSORS)
@pytest.mark.parametrize("step", STEPS, ids=str)
def test_worker_killed_at_any_step_loses_and_duplicates_nothing(
    step: Step, successor: str, repetition: int, kafka: LocalKafka, pipelines: Pipelines, chance: random.Random
) -> None:
    pipeline = pipelines.on(kafka, RECORDS)
    kill_and_finish(step, successor == "after-the-timeouts", pipeline, chance, SESSION)


@pytest.mark.deep_for("after-produce*", "commit-before-it-arrives*")
@pytest.mark.parametrize("repetition", REPETITIONS)
@pytest.mark.parametrize("step", SOME_STEPS, ids=str)
def test_worker_killed_in_the_consumer_protocol_is_exactly_once(
    step: Step, repetition: int, kafka: LocalKafka, pipelines: Pipelines, chance: random.Random
) -> None:
    pipeline = pipelines.on(kafka, RECORDS)
    pipeline.set_group_session_timeout(2_000)
    kill_and_finish(step, chance.random() < 0.5, pipeline, chance, {"group.protocol": "consumer"})


@pytest.mark.deep_for("after-produce*", "commit-before-it-arrives*")
@pytest.mark.parametrize("repetition", REPETITIONS)
@pytest.mark.parametrize("step", SOME_STEPS, ids=str)
def test_worker_killed_on_a_broker_before_kip_890_is_exactly_once(
    step: Step, repetition: int, kafka392: LocalKafka, pipelines: Pipelines, chance: random.Random
) -> None:
    pipeline = pipelines.on(kafka392, RECORDS)
    kill_and_finish(step, chance.random() < 0.5, pipeline, chance, SESSION)
