"""Which tests are too much for `make test`: `deep` ones run in CI where a change asks for them, and in `make test-all`.

`make test` shows the whole promise once: each step of a transaction killed, each row of the guarantees, each client
of the shim, each kind of fault of a cluster. What shows the same again (another protocol, another version, another
side) is here. Repetitions are marked `long` where they are.
"""

from __future__ import annotations

import os
from fnmatch import fnmatchcase

DEEP: dict[str, dict[str, tuple[str, ...]]] = {
    "tests/state/test_demo.py": {"the_demo_kills_two_workers": ()},
    "tests/state/test_state.py": {
        "state_goes_on_where": ("memory",),
        "a_worker_that_is_killed_at_a_step": ("send_offsets-behind",),
        "a_commit_whose_outcome": ("before",),
        "what_is_forgotten": ("folder",),
    },
    "tests/broker/test_broker_faults.py": {
        "a_commit_to_a_broker_that_is_away": ("past-its-timeout",),
        "a_killed_coordinator_of_three_brokers": ("offsets sent",),
        "a_group_session_that_ended_while_no_broker": (),
    },
    "tests/broker/test_demo.py": {"an_interrupt_while_the_workers_run": ()},
    "tests/broker/test_eos_run.py": {"what_was_loaded_is_handled_however_late": ()},
    "tests/broker/test_full_queue.py": {"a_full_queue_is_waited_for": ()},
    "tests/broker/test_holding_proxy.py": {"a_late_request_to_join": ("AddPartitionsToTxn",)},
    "tests/broker/test_kill_steps.py": {
        # Each step once, before the timeouts or after them.
        "a_worker_killed_at_any_step": (
            "after-begin-after*",
            "after-produce-before*",
            "in-flush-after*",
            "after-send-offsets-before*",
            "commit-before-it-arrives-after*",
            "commit-before-its-answer-before*",
            "after-commit-before*",
        ),
        "a_worker_killed_in_a_group_of_the_consumer": ("after-produce*", "commit-before-it-arrives*"),
        "a_worker_killed_on_a_broker_before_kip_890": ("after-produce*", "commit-before-it-arrives*"),
    },
    "tests/broker/test_late_requests.py": {
        "a_late_commit_in_the_next_transaction": ("*-60",),
        "a_late_offset_commit_moves_the_group": ("*-40",),
        "the_next_transaction_waits_for_the_statistics": ("*AddOffsetsToTxn", "*-TxnOffsetCommit"),
        "a_call_that_was_slow_and_not_retried": ("*AddOffsetsToTxn", "*TxnOffsetCommit"),
        "the_next_transaction_waits_for_the_statistics_behind": ("*TxnOffsetCommit that timed out",),
    },
    "tests/broker/test_local_kafka.py": {"a_committed_record_survives_a_stop": ()},  # tests/containers, on three
    "tests/broker/test_operations.py": {"reload_starts": ()},
    "tests/broker/test_overdue.py": {"": ("3.9.2",)},
    "tests/broker/test_own_loop.py": {"aborts_at_random_places": ("consumer",)},
    "tests/broker/test_patterns.py": {
        "a_topic_that_comes_under_a_running": ("roundrobin", "cooperative*", "consumer", "latest"),
        "two_workers_under_a_supervisor": (),
        "dead_letters_of_new_topics_are_created": (),
        "of_two_workers_one_is_killed": ("roundrobin", "consumer"),
        "a_worker_that_has_not_heard": ("cooperative-sticky",),
        "topics_that_come_on_three_brokers": (),
    },
    "tests/broker/test_places.py": {
        "a_group_that_was_forgotten": ("earliest*",),
        "without_a_topic_of_notes": (),
    },
    "tests/broker/test_policies.py": {
        "an_output_that_is_too_large": ("client-skip", "client-retry", "broker-*"),
        "dead_letters_are_there_exactly_once_on_a_broker_before": (),
        "dead_letters_are_there_exactly_once_in_a_group_of": (),
    },
    "tests/broker/test_preflight.py": {"topics_that_can_lose_acknowledged": (), "an_older_broker": ()},
    "tests/broker/test_rebalances.py": {
        "members_that_come_and_go_while": ("roundrobin*", "cooperative*"),
        "a_member_that_loses_its_partitions": ("cooperative-sticky-flushed*", "consumer-offsets*"),
        "a_rebalance_waits_for": ("roundrobin", "consumer"),
    },
    "tests/broker/test_reset.py": {
        "an_app_whose_sources_changed": ("more1",),
        "a_topic_made_anew_under_a_running": ("fewer*",),
        "a_rolling_restart": (),
    },
    "tests/broker/test_security.py": {
        "a_worker_with_just_its_rights": ("plain", "certificate", "token*"),
        "a_right_that_is_withdrawn": ("input", "output", "group"),
        "a_missing_right": ("nothing-input", "nothing-output", "nothing-group"),
    },
    "tests/broker/test_starts_and_ends.py": {
        "a_stop_that_takes_too_long": ("the-shutdown-timeout",),
        "an_output_that_is_too_large": ("the-broker",),
    },
    "tests/broker/test_topic_ids.py": {"while_a_broker_is_down": ()},
    "tests/broker/test_zombies.py": {
        "a_worker_paused_past_its_transaction_timeout_goes": ("kafka-flushed", "kafka-offsets sent", "kafka392-*"),
        "a_worker_whose_every_transaction": (),
        "an_idle_zombie_of_the_consumer": (),
        "a_zombie_whose_successor_was_killed": (),
        "a_place_in_the_group": ("kafka392",),
        # Who owns an id: on the older broker what is asked differently there.
        "an_id_that": ("kafka392",),
        "the_first_transaction": ("kafka392",),
        "an_own_timeout": ("kafka392",),
        "a_second_one_init": ("kafka392",),
        "a_second_one_at_work": ("kafka392",),
        "a_zombie_resumed_while": ("before-its-timeout-consumer", "past-its-timeout-classic", "kafka392"),
        "a_zombie_resumed_when": ("before-its-timeout-classic", "past-its-timeout-consumer"),
    },
    "tests/containers/test_clusters.py": {
        "": ("container-3.9.2",),
        "a_stopped_leader": ("jvm*",),
        "a_restarted_node": ("jvm*",),
        "the_controller_and": ("jvm*",),
        "a_node_that_is_slow": ("jvm*",),
    },
    "tests/containers/test_plugin.py": {"a_backend_that_was_asked_for_runs": ("jvm",)},
    "tests/containers/test_compose.py": {"records_outlive": ()},
    # Only there a worker meets a cut; brokers that are killed under it: tests/broker/test_broker_faults.py.
    "tests/containers/matrix/test_matrix.py": {"a_cell_of_the_matrix": ("*-whole", "kill-*")},
    "tests/shim/test_clients.py": {
        "": ("3.9.2*",),
        "records_of_every_codec": ("*-gzip", "*-lz4"),
        "java_console_tools": (),
        "eos_worker": (),  # tests/shim/test_sweep.py
    },
    "tests/shim/test_faults.py": {
        "fault_phase_decides": ("blackhole-*",),
    },
    "tests/shim/test_protect.py": {
        "each_transaction_has_its_own_epoch": ("none", "gzip", "snappy", "lz4"),
        # Both clients, both sides and one without protection stay; not their product.
        "h1_late_end": ("abort-*", "*--no-protect-*-kafka-python"),
        "h1_next_transaction": (
            *("* commit-*-broker-*", "* abort-*-client-*", "* crash-*-broker-*"),
            "*--no-protect-*-kafka-python",
        ),
        "h2b_abandoned_produce": (
            *("acknowledgement lost-*-broker-*", "record late-*-client-*"),
            # After an abort this client takes other sequences: it loses nothing.
            *("acknowledgement lost-*-kafka-python", "record late---no-protect-*-kafka-python"),
        ),
        "late_offsets_do_not": ("--no-protect-*-kafka-python",),
        "end_with_lost_responses": ("commit-kafka-python", "abort-confluent-kafka"),
        "librdkafka_abort_during_a_cut": ("--no-protect",),
    },
    "tests/shim/test_protect_failover.py": {"death_of_coordinator": ("*-leader-*",)},
    "tests/shim/test_protect_restarts.py": {
        "client_survives": ("after an abort-confluent-kafka", "after a commit-kafka-python"),
        "shim_killed_at_a_step": ("*-before",),
    },
    "tests/shim/test_sweep.py": {
        "sweep_finds_no_error": ("FindCoordinator*", "TxnOffsetCommit*", "EndTxn: reset*"),
        "pytest_summary": ("one process",),
    },
    "tests/shim/test_tls_and_sasl.py": {"tls_on_either_side": ("PLAINTEXT-plain", "TLS-tls", "BOTH-plain")},
    "tests/spark/test_brokers.py": {
        "a_broker_killed_in_mid_batch": ("coordinator-mark",),
        "a_topic_that_has_too_few_replicas": (),
    },
    "tests/spark/test_kills.py": {
        "a_driver_killed_behind_a_step": ("produce-driver", "commit-tasks"),
        "a_driver_killed_inside_a_step": ("half produced-*", "EndTxn sent-driver"),
    },
    "tests/spark/test_run.py": {
        "a_jvm_that_is_gone": (),
        "a_second_signal_gives_up": (),
        "executors_of_a_cluster_get": (),
        "what_is_wrong_is_said": (),
        "what_the_executors_python_lacks": (),
        "of_two_drivers_in_one_batch": (),
        "of_two_drivers_on_one_checkpoint": ("the older",),
    },
    "tests/spark/test_security.py": {"": ()},
    "tests/spark/test_sink.py": {"many_and_large_rows": ("zstd",)},
    "tests/spark/test_standalone.py": {"executors_need_neither": ()},
    "tests/spark/test_tasks.py": {"a_task_that_dies": ("counted",)},
    "tests/spark/test_through_shim.py": {"": ("3.9.2",)},
}
"""File -> beginning of a test's name behind `test_` -> patterns of the parameters that are deep; none: all of it."""


STATEFUL = "EOS_TEST_STATEFUL"
"""Set: the functions of every pipeline have state."""


def is_deep(nodeid: str) -> bool:
    if STATEFUL in os.environ and nodeid.startswith("tests/broker/"):
        return True
    file, _, name = nodeid.partition("::")
    test, _, parameters = name.removeprefix("test_").removesuffix("]").partition("[")
    return any(
        test.startswith(begin) and (not patterns or any(fnmatchcase(parameters, pattern) for pattern in patterns))
        for begin, patterns in DEEP.get(file, {}).items()
    )
