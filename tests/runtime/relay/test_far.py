"""What depends on who decides, once more with a brain behind a link: nobody sees a difference."""

from __future__ import annotations

from types import ModuleType

import pytest

from tests.runtime.relay import (
    rig,
    test_answer_headers,
    test_answers,
    test_classes,
    test_faults,
    test_overload,
    test_refusals,
    test_retries,
    test_streaming,
    test_upstream,
)

TESTS: dict[ModuleType, tuple[str, ...]] = {
    test_answer_headers: ("the_worker_gets_its_own_key_host_and_the_way_of_the_request",),
    test_answers: (
        "an_answer_may_begin_while_the_request_is_still_being_sent",
        "what_is_not_an_answer_is_502",
    ),
    test_classes: (
        "a_claim_that_names_no_class_is_refused",
        "a_worker_that_goes_by_priorities_is_told_the_class",
        "errors_say_it_too",
    ),
    test_faults: (
        "a_fault_after_a_failed_attempt_ends_the_request",
        "a_fault_at_the_end_leaves_nothing_charged",
        "a_fault_in_news_of_an_answer_costs_it_nothing",
        "a_request_that_cannot_be_taken_in_is_500_and_leaves_nothing",
        "nor_one_that_has_to_wait",
    ),
    test_overload: (
        "a_body_that_cannot_be_written_again_is_refused",
        "a_plain_answer_that_has_begun_is_never_stopped_though_the_core_cannot_know",
        "a_request_goes_to_the_smaller_model",
        "a_request_is_cut_and_its_answer_says_so",
        "a_victim_is_stopped_and_served_later_without_noticing",
        "a_victim_whose_client_leaves_while_it_waits_again_is_forgotten",
        "an_answer_that_has_begun_is_never_stopped",
        "the_body_is_cut_once_though_it_is_tried_twice",
        "the_lowest_classes_are_refused_with_a_time_to_come_back",
    ),
    test_refusals: (
        "a_full_engine_alone_is_503_with_retry_after",
        "a_wrapped_500_is_a_failure_of_the_worker",
        "what_a_full_engine_refuses_is_served_by_another",
    ),
    test_retries: (
        "a_failure_that_is_passed_on_has_its_reason_beside_it",
        "a_full_worker_without_retry_after_gets_one",
        "a_worker_that_dies_before_its_body_is_replaced",
        "a_worker_that_is_removed_finishes_what_it_runs",
        "an_attempt_that_failed_is_repeated_elsewhere",
        "an_unreachable_worker_alone_is_502",
        "an_unreachable_worker_is_replaced_by_another",
        "other_statuses_are_passed_on_and_not_repeated",
        "the_last_failure_is_passed_on_after_every_worker_was_tried_once",
    ),
    test_streaming: (
        "a_client_that_leaves_stops_the_worker_at_once",
        "a_full_queue_in_the_first_event_is_answered_503_with_retry_after",
        "a_full_queue_in_the_first_event_is_tried_elsewhere",
        "a_refused_stream_is_answered_with_the_workers_own_status",
        "a_reset_in_mid_stream_ends_as_an_error_event_and_counts_against_the_worker",
        "a_stream_reaches_the_client_byte_for_byte",
        "characters_cut_anywhere_arrive_whole_and_usage_is_counted",
        "eight_tokens_without_usage_are_logged_as_eight",
        "leaving_one_stream_leaves_others_of_a_like_rid_alone",
        "no_first_byte_in_time_is_504_and_not_tried_again",
        "streams_that_always_break_open_the_breaker",
    ),
    test_upstream: (
        "a_connection_that_breaks_after_the_first_byte_is_not_stale",
        "a_fresh_connection_that_closes_is_a_failure",
        "connections_are_kept_and_used_again",
    ),
}
globals().update(
    {
        f"test_{name}": getattr(module, f"test_{name}")
        for module, names in TESTS.items()
        for name in names
    }
)


@pytest.fixture(autouse=True)
def far(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rig, "decides_far", True)
