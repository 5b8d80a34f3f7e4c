"""What people who do this job have run into, each with the tests that hold it off.

The rows are those of a collection of public reports about MXNet's KVStore and Trainer, ps-lite,
Horovod and their kin: the symptom, and the tests that fail on the old way of doing it.
"""

from __future__ import annotations

import ast
from functools import lru_cache
from typing import Dict, List, NamedTuple, Tuple

import pytest

from .pool import ROOT


class Row(NamedTuple):
    """A report: what people saw, and who watches that it does not come back."""

    symptom: str
    tests: Tuple[str, ...]


FAULTS = "test_reported_faults.py::"
ELASTIC, RECORDS = "optim/test_elastic.py::", "data/test_records.py::"
RANKS, RUN = "training/test_ranks.py::", "launch/test_run.py::"
SAMPLER, STATES = "data/test_sampler.py::", "training/test_states.py::"
SETTINGS = "training/test_optimizer_settings.py::"
SURFACE = "surface/test_behaviours.py::test_behaviour"  # and which of them

ROWS: Dict[int, Row] = {
    1: Row(
        "a new learning rate has no effect",
        (
            SETTINGS + "test_a_learning_rate_holds_from_the_next_step_on_every_rank",
            SURFACE + "[`set_learning_rate` at the next step]",
        ),
    ),
    2: Row(
        "schedulers count per device or per worker",
        (
            SETTINGS + "test_schedules_count_steps_whatever_devices_and_clients",
            SURFACE + "[schedulers count one per step]",
        ),
    ),
    3: Row(
        "trainer states cannot be saved",
        (
            STATES + "test_one_client_goes_on_to_the_bit",
            STATES + "test_two_clients_go_on_each_with_its_own",
            STATES + "test_two_clients_under_sgd_stay_equal",
        ),
    ),
    4: Row(
        "what rank 0 restores does not reach the others",
        ("training/test_states_moved.py::test_only_the_leader_needs_the_file",),
    ),
    5: Row(
        "a smaller last batch raises, or is scaled wrongly",
        (
            SURFACE + "[changing batch sizes, a smaller last batch]",
            "training/test_equivalence.py::test_uneven_batches_are_exact",
        ),
    ),
    6: Row(
        "dist_async without an updater dies",
        (
            SETTINGS + "test_a_script_with_its_own_optimizer_and_dist_async",
            SURFACE + "[`kvstore='dist_async', update_on_kvstore=True`]",
            "training/test_messages.py::test_update_on_kvstore_is_taken_with_one_warning",
        ),
    ),
    7: Row(
        "an optimizer of the script's own ends the server",
        (
            SETTINGS + "test_a_script_with_its_own_optimizer_and_dist_async",
            SURFACE + "[an instance of a class of the script's own]",
        ),
    ),
    8: Row(
        "unequal numbers of batches hang at the end of an epoch",
        (
            FAULTS + "test_8_the_sampler_gives_equal_counts",
            FAULTS + "test_8_without_it_the_missing_rank_is_named",
            "data/test_record_shard.py::test_every_part_has_the_same_number_of_full_batches",
            "training/test_ends.py::test_a_rank_with_fewer_batches_is_named_at_once",
        ),
    ),
    9: Row(
        "the job does not end after training",
        (FAULTS + "test_9_the_job_ends_with_its_last_worker",),
    ),
    10: Row(
        "Ctrl-C or a crash leaves processes behind",
        (
            RUN + "test_ctrl_c_ends_even_those_who_ignore_it",
            RUN + "test_a_killed_rank_is_named_with_its_signal_and_last_words",
            RUN + "test_nothing_survives_a_killed_launcher",
        ),
    ),
    11: Row(
        "one dead node stalls everyone",
        (
            "test_chaos.py::test_a_job_whose_processes_are_killed_comes_to_the_same_loss",
            "launch/test_restarts.py::test_a_failed_client_starts_again_and_the_others_go_on",
        ),
    ),
    12: Row(
        "parameters of deferred shape start unequal",
        (RANKS + "test_deferred_parameters_are_equal_before_the_first_gradient",),
    ),
    13: Row(
        "an embedding with sparse gradients crashes",
        (
            SURFACE + "[row-sparse gradients]",
            "training/test_messages.py::test_row_sparse_parameters",
        ),
    ),
    14: Row(
        "half-precision weights crash, or part from their masters",
        (
            "training/test_optimizers.py::test_half_precision",
            "training/test_optimizers.py::test_exchanges_move_masters",
        ),
    ),
    15: Row(
        "gradients cannot be clipped between reduction and update",
        (
            "training/test_clipping.py::test_allreduce_clip_update_equals_a_hand_computation",
            SURFACE + "[`allreduce_grads()`, then `update()`]",
        ),
    ),
    16: Row(
        "every rank reports another accuracy",
        (
            "training/test_statistics.py::"
            "test_evaluation_in_the_center_gives_one_number_on_all_ranks",
            "test_metrics.py::test_real_ranks_agree",
        ),
    ),
    17: Row(
        "all workers read the same samples, or in the same order in each epoch",
        (
            SAMPLER + "test_workers_of_a_job_share_every_epoch",
            SAMPLER + "test_each_epoch_has_another_order_and_comes_back",
        ),
    ),
    18: Row(
        "asynchronous training fails at the synchronous learning rate",
        (
            FAULTS + "test_18_three_rules_reach_the_minimum",
            FAULTS + "test_18_accumulated_changes_need_a_smaller_rate",
            FAULTS + "test_18_the_docs_say_so",
        ),
    ),
    19: Row(
        "more workers are a larger learning rate: sums for means",
        (
            "training/test_equivalence.py::test_shared_batch_gives_the_weights_of_one_process",
            "training/test_equivalence.py::test_uneven_batches_are_exact",
        ),
    ),
    20: Row(
        "wrong interface, unresolved names, a start that hangs",
        (
            FAULTS + "test_20_a_missing_client_is_named_in_time",
            FAULTS + "test_20_a_name_and_a_foreign_port_do_no_harm",
            RUN + "test_who_has_not_started_in_time_is_named",
        ),
    ),
    21: Row(
        "several processes on a machine are slow together",
        (
            RUN + "test_workers_get_cores_of_their_own_and_thread_caps",
            RUN + "test_binding_can_be_switched_off_and_the_users_caps_win",
        ),
    ),
    22: Row(
        "a broken RecordIO file, or one without index, ends a run late",
        (
            RECORDS + "test_a_truncated_file",
            RECORDS + "test_any_flipped_byte_in_a_header_is_found_and_costs_one_record",
            RECORDS + "test_flipped_bytes_of_an_image_show_when_it_is_decoded",
            RECORDS + "test_a_wrong_index",
            RECORDS + "test_no_index",
            RECORDS + "test_a_copy_has_what_is_good_and_the_reader_takes_it",
        ),
    ),
    23: Row(
        "a new numpy breaks the import",
        (
            FAULTS + "test_23_numpy_is_pinned",
            FAULTS + "test_23_a_new_numpy_is_named_with_what_to_install",
            "launch/test_doctor.py::test_what_is_broken_comes_with_a_remedy",
        ),
    ),
    24: Row(
        "a silent stall, and nobody knows whose",
        (
            FAULTS + "test_24_a_stall_is_told_and_the_run_goes_on",
            "training/test_failures.py::test_a_stall_is_reported_and_ends_within_its_limit",
        ),
    ),
    25: Row(
        "which elastic variant is this",
        (
            FAULTS + "test_25_the_docs_state_equations_order_and_timing",
            ELASTIC + "test_one_exchange_contracts_the_distance",
            ELASTIC + "test_sum_of_clients_and_center_is_conserved",
            ELASTIC + "test_bound_for_clients_at_once",
            ELASTIC + "test_bound_for_round_robin",
            "center/test_exchange.py::test_elastic_exchanges_conserve_the_sum",
        ),
    ),
    26: Row(
        "parameters given as a list fail",
        (
            SURFACE + "[from a list]",
            SURFACE + "[from a dict]",
            SURFACE + "[from `net.collect_params()`]",
        ),
    ),
}  # fmt: skip


@lru_cache(maxsize=None)
def functions(file: str) -> List[str]:
    tree = ast.parse((ROOT / "tests" / file).read_text())
    return [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]


@lru_cache(maxsize=None)
def behaviours() -> str:
    files = (ROOT / "tests" / "surface" / "behaviours").glob("*.py")
    return "".join(file.read_text() for file in files)


@pytest.mark.parametrize("number", range(1, 27))
def test_every_report_has_its_tests(number: int) -> None:
    row = ROWS[number]
    assert row.symptom and row.tests
    for test in row.tests:
        file, _, name = test.partition("::")
        name, _, behaviour = name.rstrip("]").partition("[")
        assert name.startswith("test_") and name in functions(file), test
        assert not behaviour or f'"{behaviour}"' in behaviours(), test
