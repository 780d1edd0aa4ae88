"""Assigns each test to its layers, in this one place.

    layer      command              what it has
    fast       make test            pure code, each behaviour on a few rows, twelve cells of the matrix
    full       make test-full       more of each product; faults, processes, oracles, documentation, the small matrix
    nightly    make test-nightly    both of them and all the rest: full products, the full matrix, SmolLM2

``SHARES`` gives a share to folders, files and tests; the longest path that leads to a test decides.  A share says which
cases of a test are in the fast layer, and which are in it or in the full one:

    all       every case
    pairs     cases in which every two values of two parameters meet
    thrice    cases in which every value of every parameter stands three times, beside others each time
    values    cases in which every value of every parameter stands
    third     the same for every third value of the longest parameter, where this has five and more: of eight rows three
    few       two cases that have little in common
    none      no case

A test that is parametrized several times, over rows, meshes and microbatches say, has a full product of cases.  Faults
that need one value of one parameter show in ``values``, those that need two together in ``pairs``; faults that need
three wait for the night.  The matrix has rows and meshes in pairs, so user programs are tried ``thrice``.  Names
that are parametrized together are one parameter.  The cases with every pair come from the generator that writes the
matrix, ``plait.referee.verify.covering``.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

from plait.referee.verify.covering import covering

Layer: TypeAlias = Literal["fast", "full", "nightly"]
Part: TypeAlias = Literal["all", "pairs", "thrice", "values", "third", "few", "none"]
Case: TypeAlias = tuple[str, ...]
"""A value's id for each parameter."""

LAYERS: tuple[Layer, ...] = ("fast", "full", "nightly")


class Share(NamedTuple):
    """The cases of a test in the fast layer, and those in the fast or the full one."""

    fast: Part
    full: Part


FAST = Share("all", "all")
FULL = Share("none", "all")
NIGHTLY = Share("none", "none")

PROCESSES = ORACLES = DOCUMENTATION = FULL
TRAINING = Share("few", "pairs")
PROGRAMS = Share("few", "thrice")
VALUES = Share("values", "thrice")
ROWS = Share("third", "thrice")
HELD_BY_THE_MATRIX = Share("none", "values")

SHARES: dict[str, Share] = {
    "": FAST,
    "anymodel": TRAINING,
    "anymodel/test_crossing_values.py::test_a_model_with_one_list_of_blocks_is_the_run_of_one_process": VALUES,
    "anymodel/test_models.py::test_links_of_every_kind": Share("few", "values"),
    "anymodel/test_stage_models.py": Share("values", "pairs"),
    "anymodel/test_refusals.py::test_ranks_and_modes_that_do_not_fit": FAST,
    "anymodel/test_refusals.py::test_what_no_pipeline_can_run": FAST,
    "benchmarks/test_results.py::test_a_suite_that_hangs_is_stopped_with_its_children_and_keeps_its_rows": PROCESSES,
    "benchmarks/test_gpu.py::test_every_contestant_runs_and_agrees": NIGHTLY,
    "benchmarks/test_planner.py::test_a_folder_without_the_data_is_refused": PROCESSES,
    "chaos/test_chaos.py::test_a_campaign_of_one_host": NIGHTLY,
    "chaos/test_chaos.py::test_a_short_campaign": PROCESSES,
    "checkpoint/test_checkpoint_faults.py::test_no_bit_of_any_file_can_flip_unseen": Share("few", "all"),
    "checkpoint/test_checkpoint_faults.py::test_random_harm_is_refused_or_loaded": Share("few", "all"),
    "checkpoint/test_dcp.py::test_what_fsdp2_saves_goes_on_in_any_layout": ORACLES,
    "checkpoint/test_dcp.py::test_what_plait_saves_is_read_by_fsdp2": ORACLES,
    "checkpoint/test_huggingface_command.py::test_a_fine_tuning_is_one_process_and_trains_on": Share("few", "all"),
    "checkpoint/test_huggingface_hostile.py::test_random_harm_is_refused_or_what_was_written": Share("few", "all"),
    "checkpoint/test_huggingface_hostile.py::test_odd_files_beside_the_weights_are_refused": Share("values", "all"),
    "checkpoint/test_huggingface_folders.py::test_every_layout_has_the_values_of_the_folder": Share("few", "all"),
    "checkpoint/test_huggingface_folders.py::test_transformers_reads_what_was_trained": Share("few", "values"),
    "checkpoint/test_save_load.py::test_any_layout_loads_it_to_the_bit": Share("few", "values"),
    "checkpoint/test_save_kills.py": PROCESSES,
    "checkpoint/test_saver.py::test_what_is_saved_is_the_run_at_that_moment": Share("few", "all"),
    "comm/test_check.py::test_what_is_right_goes_on_as_without_it": Share("few", "values"),
    "comm/test_check.py::test_every_rank_is_told_what_each_meant_and_where": Share("values", "all"),
    "comm/test_elastic.py": PROCESSES,
    "comm/test_elastic.py::test_ranks_meet_again_when_an_agent_is_killed_and_another_is_started": NIGHTLY,
    "comm/test_process_world.py": PROCESSES,
    "remote/test_remote.py": PROCESSES,
    "remote/test_remote.py::test_an_example_on_other_ranks_is_one_line": NIGHTLY,
    "remote/test_remote.py::test_threads_are_refused": FAST,
    "remote/test_remote.py::test_copies_are_sent_and_classes_refused": FAST,
    "comm/test_thread_world.py::test_does_what_every_world_does": Share("values", "all"),
    "commands/test_checkpoint.py::test_values_that_no_save_writes_are_one_line_though_they_are_signed": Share(
        "values", "all"
    ),
    "commands/test_plan.py::test_a_job_of_your_own_is_counted_on_meta_and_trains": FULL,
    "commands/test_start.py::test_no_command_imports_a_module_of_the_current_folder": Share("none", "few"),
    "commands/test_start.py::test_plait_itself_imports_no_torch_and_has_all_its_names": PROCESSES,
    "commands/test_start.py::test_the_module_imports_no_other_and_is_the_installed_command": PROCESSES,
    "commands/test_start.py::test_the_processes_that_compile_import_none_either": NIGHTLY,
    "data/test_workers.py": PROCESSES,
    "context/test_published_faults.py": Share("few", "all"),
    "experts/test_published_faults.py": Share("few", "all"),
    "context/test_published_faults.py::test_without_a_fault_nothing_is_found": FULL,
    "context/test_cells.py": Share("few", "all"),
    "context/test_context.py::test_messages_are_predicted_byte_for_byte": Share("third", "all"),
    "experts": Share("few", "all"),
    "experts/test_plan.py::test_a_mixture_of_a_users_is_proved": FULL,
    "experts/test_published_faults.py::test_a_published_fault_is_named_and_placed": FULL,
    "experts/test_published_faults.py::test_without_a_fault_nothing_is_found": FULL,
    "device": PROCESSES,
    "docs": DOCUMENTATION,
    "docs/test_coming_from.py::test_a_converted_script_is_the_plain_one": Share("none", "few"),
    "forward": VALUES,
    "forward/test_dropout.py::test_numpy_makes_the_masks_of_torch": FAST,
    "forward/test_recompute.py::test_models_of_many_kinds": Share("few", "all"),
    "forward/test_recompute.py::test_saving_on_the_cpu_changes_no_bit": Share("few", "all"),
    "forward/test_tensor_parallel.py::test_every_style_at_once_is_the_single_process": Share("few", "thrice"),
    "pipeline": VALUES,
    "pipeline/test_runtime.py::test_activations_live_as_long_as_the_schedule_says": ROWS,
    "pipeline/test_runtime.py::test_a_schedule_written_by_hand": ROWS,
    "shared_memory/test_common_memory.py": VALUES,
    "shared_memory/test_protocol.py": Share("values", "all"),
    "shared_memory/test_shared_memory.py::test_does_what_every_world_does": Share("values", "all"),
    "shared_memory/test_protocol.py::test_some_order_finds_each_mutant": Share("few", "all"),
    "tensor": VALUES,
    "zero": VALUES,
    "step": PROGRAMS,
    "step/test_equal.py": VALUES,
    "step/test_loop.py": VALUES,
    "step/test_parameters.py": ROWS,
    "step/test_exceptions.py": ROWS,
    "step/test_nonfinite.py": ROWS,
    "step/test_refusals.py": Share("values", "all"),
    "step/test_state.py": ROWS,
    "step/test_together.py": VALUES,
    "step/test_together.py::test_a_loss_over_the_features_of_all_ranks_has_the_gradients_of_one_process": ROWS,
    "zero/test_optim.py::test_the_table_of_torchs_classes_is_right": Share("values", "all"),
    "zero/state/test_full.py": ROWS,
    "zero/state/test_init.py::test_every_layout_begins_with_the_single_process_bits": Share("few", "all"),
    "zero/state/test_init.py::test_no_rank_ever_holds_the_model": Share("few", "all"),
    "zero/test_ledger.py": ROWS,
    "zero/test_unit.py": ROWS,
    "zero/test_unshard.py": ROWS,
    "zero/test_foreign_optimizers.py": Share("few", "all"),
    "step/loops/test_agreement.py::test_different_loss_functions_are_told": FAST,
    "step/loops/test_ema.py::test_what_is_refused": FAST,
    "step/test_parallelism.py::test_a_value_that_means_nothing_is_refused": FAST,
    "step/test_sanitized.py": FAST,
    "step/test_sanitized.py::test_a_flipped_bit_is_found_at_the_next_check": Share("third", "all"),
    "pipeline/test_p2p.py::test_processes_keep_few_messages_and_train_as_one": PROCESSES,
    "extending/test_extending.py::test_processes_run_a_plugin_and_a_script_cannot_lose_its_exit_code": PROCESSES,
    "fuzz": NIGHTLY,
    "launch/test_fork_server.py::test_each_rank_draws_its_own_numbers_and_what_it_leaves_with_is_said": FULL,
    "launch/test_local.py": PROCESSES,
    "launch/test_slurm_cluster.py": NIGHTLY,
    "launch/test_local.py::test_rank_0_speaks_and_every_argument_arrives_as_it_was": FAST,
    "lessons/test_browser.py": DOCUMENTATION,
    "lessons/test_notebooks.py": DOCUMENTATION,
    "lessons/test_course.py::test_so_does_a_long_one": FULL,
    "lessons/test_course.py::test_the_capstone_holds": NIGHTLY,
    "lessons/test_worlds.py::test_a_body_gives_the_same_twice_so_that_worlds_can_be_compared": Share("third", "all"),
    "lessons/test_worlds.py::test_processes_have_the_bits_of_threads": Share("none", "few"),
    "lessons/test_worlds.py::test_the_fewest_and_the_most_ranks": Share("third", "all"),
    "lessons/test_worlds.py::test_torchrun_says_how_many_ranks_there_are": NIGHTLY,
    "lessons/test_viewer.py::test_processes_write_a_file_each_and_are_one_page": PROCESSES,
    "models/test_hf.py::test_plait_comes_without_transformers": PROCESSES,
    "predict/test_memory.py::test_a_block_cut_over_tensor_ranks_keeps_what_is_predicted": Share("values", "all"),
    "predict/test_memory.py::test_the_decoder_keeps_what_is_predicted": Share("values", "all"),
    "predict/test_plan.py::test_bytes_are_those_that_a_proof_counts": Share("values", "all"),
    "prove/test_engine_link.py": Share("few", "all"),
    "prove/test_mutants.py::test_no_slip_is_proved": Share("few", "all"),
    "prove/test_mutants.py::test_ten_thousand_slips": NIGHTLY,
    "prove/test_proof.py": Share("few", "all"),
    "prove/test_proof.py::test_every_row_and_order_on_three_data_ranks": Share("values", "all"),
    "prove/test_proof.py::test_published_layouts_are_proved": FULL,
    "referee/test_faults.py": Share("few", "all"),
    "referee/test_faults.py::test_other_faults_and_other_layouts": NIGHTLY,
    "referee/test_faults.py::test_a_wrong_loop_is_named": Share("values", "all"),
    "sharded/test_op_database.py::test_a_few_operators": Share("third", "all"),
    "sharded/test_op_database.py::test_every_operator": NIGHTLY,
    "sharded/test_property.py::test_programs_of_several_operators": FULL,
    "measure/test_comm.py::test_a_measured_machine_plans_and_trains": PROCESSES,
    "train/test_places.py::test_processes_say_it_once_and_leave_together": PROCESSES,
    "train/test_report.py": Share("few", "all"),
    "train/test_resume.py::test_it_is_the_run_that_was_never_stopped_to_the_bit": Share("few", "all"),
    "train/test_resume.py::test_killed_at_any_step_it_is_the_uninterrupted_run_over_fifty_steps": Share("none", "few"),
    "train/test_resume.py::test_three_resumes_in_an_epoch_each_in_another_layout": FULL,
    "train/test_stop_and_restart.py::test_a_killed_rank_is_named_and_the_run_goes_on_to_the_same_end": PROCESSES,
    "train/test_places.py::test_a_step_leaves_no_object_behind": FULL,
    "train/test_places.py::test_five_thousand_steps": NIGHTLY,
    "train/test_train.py::test_a_run_that_is_stopped_keeps_its_metrics": PROCESSES,
    "train/test_train.py::test_all_of_a_loop_at_once_is_the_one_process_run": PROCESSES,
    "verify": Share("none", "pairs"),
    "verify/test_spread.py": Share("few", "all"),
    "verify/test_spread.py::test_no_honest_run_is_called_a_bug": FULL,
    "verify/test_processes.py": PROCESSES,
    "verify/test_compare.py": FAST,
    "verify/test_compiled.py": FULL,
    "verify/test_compiled.py::test_a_layout_is_the_compiled_process": HELD_BY_THE_MATRIX,
    "verify/test_layouts.py": Share("few", "all"),
    "verify/test_layouts.py::test_bf16_with_fp32_masters_follows_fp32": FULL,
    "verify/test_layouts.py::test_layouts_that_are_one_run": Share("few", "few"),
    "verify/test_matrix.py": FAST,
    "verify/test_matrix.py::test_the_small_matrix": FULL,
    "verify/test_matrix.py::test_the_full_matrix": NIGHTLY,
    "verify/test_resume_engine.py": Share("few", "all"),
    "verify/test_stock_models.py::test_every_row_on_every_mesh": Share("few", "values"),
    "verify/test_stock_models.py::test_pipelines": HELD_BY_THE_MATRIX,
    "verify/test_stock_models.py::test_modules_of_torch": HELD_BY_THE_MATRIX,
    "verify/test_right_jobs.py": Share("values", "all"),
    "watch/test_joined.py": NIGHTLY,
    "watch/test_joined.py::test_a_killed_rank_is_named_before_the_agent_ends_the_others": PROCESSES,
    "watch/test_joined.py::test_a_rank_that_stands_still_shows_its_stack_and_a_stopped_one_is_called_so": PROCESSES,
    "watch/test_diagnose.py::test_false_alarms_in_a_thousand_runs": NIGHTLY,
    "witness/test_engines.py::test_an_engine_is_the_run_of_a_single_process": PROCESSES,
    "witness/test_expert_faults.py": Share("few", "all"),
    "witness/test_rounding.py": Share("few", "all"),
    "witness/test_rounding.py::test_frozen_numbers_of_eight_bits_are_judged": Share("values", "all"),
    "witness/test_rounding.py::test_what_is_wrong_with_a_complex_gradient_is_named": Share("values", "all"),
    "witness/test_rounding.py::test_what_is_wrong_with_the_update_of_a_complex_weight_is_named": Share("values", "all"),
    "witness/test_own_engine.py": Share("few", "all"),
    "witness/test_engines.py::test_the_engines_below_the_bugs_are_right": FULL,
    "witness/test_engines.py::test_a_published_bug_is_named": FULL,
    "witness/test_trainer.py": FULL,
    "witness/test_verdicts.py": NIGHTLY,
    "witness/test_judge.py::test_a_right_loop_is_the_run_of_a_single_process": Share("values", "all"),
    "zoo/test_zoo.py::test_a_few_architectures_are_the_run_of_plain_pytorch": FULL,
}


LONG = (
    "referee/test_faults.py",
    "verify/test_matrix.py",
    "verify/test_layouts.py",
    "verify/test_stock_models.py",
    "verify/test_written_pipelines.py",
    "comm/test_process_world.py",
)
"""The files that a worker is longest with, which therefore come first: the last file should be a short one."""


def share_of(node: str) -> Share:
    """The share of ``comm/test_base.py::test_name[case]``, by the longest path that leads to it."""
    test = as_path(node.split("[")[0])
    return SHARES[max((path for path in SHARES if test.startswith(as_path(path))), key=len)]


def as_path(path: str) -> str:
    return f"/{path}/".replace("::", "/").replace("//", "/")


def place_of(node: str) -> int:
    """The place of a node's file among the long ones; all others follow in their order."""
    file = node.split("::")[0]
    return LONG.index(file) if file in LONG else len(LONG)


def layers_of(nodes: Mapping[str, Case]) -> dict[str, Layer]:
    """The layer of each node; ``nodes`` must have all cases of a test."""
    tests: defaultdict[str, list[str]] = defaultdict(list)
    for node in nodes:
        tests[node.split("[")[0]].append(node)
    layers: dict[str, Layer] = {}
    for test, every in tests.items():
        cases = [nodes[node] for node in every]
        fast, full = (chosen(cases, part) for part in share_of(test))
        for node, case in zip(every, cases, strict=True):
            layers[node] = "fast" if case in fast else "full" if case in full else "nightly"
    return layers


def chosen(cases: Sequence[Case], part: Part) -> Sequence[Case]:
    """The cases of a test in this part of them."""
    match part:
        case "all":
            return cases
        case "pairs":
            return pairwise(cases)
        case "thrice":
            return list(dict.fromkeys(case for turn in range(3) for case in valuewise(cases, turn)))
        case "values":
            return valuewise(cases)
        case "third":
            return valuewise(thinned(cases))
        case "few":
            return distant(pairwise(cases), 2)
        case "none":
            return []


def pairwise(cases: Sequence[Case]) -> list[Case]:
    """Cases of a product in which every two values of two parameters meet; all of them where there is one parameter."""
    if len(cases[0]) < 2:
        return list(cases)
    dimensions = {str(place): ids for place, ids in enumerate(parameters(cases))}
    return [tuple(map(str, row.values())) for row in covering(dimensions)]


def valuewise(cases: Sequence[Case], turn: int = 0) -> list[Case]:
    """As many cases of a product as the longest parameter has values, the others in turn: from the first one on, or
    from a third or two thirds of them on, no two neighbours from the same."""
    ids = parameters(cases)
    longest = max(ids, key=len, default=[""])
    thirds = [0 if values is longest else turn * (1 + i % 2) % 3 for i, values in enumerate(ids)]
    starts = [max(1, len(values) // 3) * third for values, third in zip(ids, thirds, strict=True)]
    return [
        tuple(values[(i + start) % len(values)] for values, start in zip(ids, starts, strict=True))
        for i in range(len(longest))
    ]


def thinned(cases: Sequence[Case]) -> Sequence[Case]:
    """The cases with every third value of the longest parameter, where this has five and more."""
    ids = parameters(cases)
    longest = max(ids, key=len, default=[])
    place = ids.index(longest) if len(longest) > 4 else -1
    return [case for case in cases if place < 0 or case[place] in longest[::3]]


def parameters(cases: Sequence[Case]) -> list[list[str]]:
    """The values of each parameter."""
    return [list(dict.fromkeys(column)) for column in zip(*cases, strict=True)]


def distant(cases: Sequence[Case], count: int) -> list[Case]:
    """The first case, and each time the one that shares the fewest values with those taken before."""
    taken: list[Case] = []
    while len(taken) < min(count, len(cases)):
        left = [case for case in cases if case not in taken]
        taken.append(
            min(left, key=lambda case: sum(a == b for other in taken for a, b in zip(case, other, strict=True)))
        )
    return taken
