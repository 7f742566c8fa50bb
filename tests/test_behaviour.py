"""What zero_fx does beside the right numbers: graphs, volumes, copies, state dicts, errors. See scenarios/."""

from __future__ import annotations

import pytest
import ranks
from scenarios import api, gradients, graphs, mistakes, several

pytestmark = pytest.mark.timeout(180)
slow, full = pytest.mark.slow, pytest.mark.full


def over(values, quick=(), rest=slow):
    """Parameters, of which those in `quick` belong to the quick run."""
    return [value if value in quick else pytest.param(value, marks=rest) for value in values]


def by_turns(values, every: int = 1) -> list:
    """(value, stage) for stages 1 and 3. Outside of the full run each `every`-th value, by turns at one of them."""
    pairs = [(value, stage, i) for i, value in enumerate(values) for stage in (1, 3)]
    return [pytest.param(value, stage, marks=slow if i % every == 0 and stage == (3, 1)[i // every % 2] else full) for value, stage, i in pairs]


STAGES = [pytest.param(0, marks=full), pytest.param(1, marks=slow), pytest.param(2, marks=full), 3]
each_stage = pytest.mark.parametrize("stage", STAGES)
sharded_stage = pytest.mark.parametrize("stage", over((1, 3), quick=()))


# --- graphs


@pytest.mark.parametrize("name", over(("multihead", "tied_head"), quick=("tied_head",)))
@each_stage
def test_identical_steps_are_one_capture(name, stage):
    ranks.run(graphs.check_one_capture, name, stage)


BOUNDED = graphs.check_flips, graphs.check_toggles, graphs.check_lengths, graphs.check_accumulation_captures


@pytest.mark.parametrize("check, stage", by_turns(BOUNDED))
def test_captures_are_bounded(check, stage):
    ranks.run(check, stage)


SAVING = ("mlp", "tied_head", "cast_weights", "multihead", "lora_checkpoint", "rotary", "batch_norm", "orthogonal")


@pytest.mark.parametrize("name", over(SAVING[:5], quick=("cast_weights", "multihead")) + over(SAVING[5:], rest=full))
def test_stage_3_saves_no_full_parameter(name):
    ranks.run(graphs.check_nothing_full_is_saved, name)


@pytest.mark.parametrize("micros", over((1, 3), quick=(3,)))
@pytest.mark.parametrize("stage", (0, 1, 2, 3))
def test_volume_equals_the_formula(stage, micros):
    ranks.run(graphs.check_volume, stage, micros)


@pytest.mark.parametrize("stage", over((0, 1, 2, 3), rest=full))
def test_volume_of_3_ranks(stage):
    ranks.run(graphs.check_volume, stage, 2, world=3)


@pytest.mark.parametrize("stage", over((1, 3), quick=(3,)))
def test_parity_notices_a_missing_reduction(stage):
    ranks.run(graphs.check_mutant, stage)


@pytest.mark.parametrize("world", (pytest.param(2, marks=full), pytest.param(3, marks=slow)))
@pytest.mark.parametrize("name", ("odd_sizes", pytest.param("encoder_layer", marks=full)))
def test_stages_agree_bitwise(name, world):
    ranks.run(graphs.check_bitwise, name, world=world)


# --- what a user calls


@each_stage
def test_deepcopy_for_an_average(stage):
    ranks.run(graphs.check_copy_is_apart, stage)


@pytest.mark.parametrize("kind, stage", by_turns(gradients.OPTIMIZERS, every=2))
def test_optimizers(kind, stage):
    ranks.run(gradients.check_optimizer, kind, stage)


@pytest.mark.parametrize("name, stage", by_turns(("tied_head", "batch_norm", "lstm", "multihead"), every=2))
def test_state_dict(name, stage):
    ranks.run(api.check_state_dict, name, stage)


@pytest.mark.parametrize("name", over(("mlp", "multihead", "lstm", "weight_norm", "odd_sizes"), quick=("mlp",)))
def test_printing_on_one_rank(name):
    ranks.run(api.check_print, name, 3, timeout_s=30)


@pytest.mark.parametrize("micros", (1, 2))
@sharded_stage
def test_post_accumulate_hooks(stage, micros):
    ranks.run(gradients.check_hooks, stage, micros)


@pytest.mark.parametrize("norm_type", (2.0, pytest.param(1.0, marks=full), float("inf")))
@sharded_stage
def test_clipping(stage, norm_type):
    ranks.run(gradients.check_clipping, stage, norm_type)


@pytest.mark.parametrize("to_none", (True, False))
@each_stage
def test_zero_grad(stage, to_none):
    ranks.run(gradients.check_zero_grad, stage, to_none)


USES = (
    gradients.check_param_groups, gradients.check_grad_hooks, gradients.check_optimizer_in_backward,
    gradients.check_torch_clipping, gradients.check_scaler, api.check_optimizer_before, api.check_tie_lasts,
    api.check_pickle, api.check_eval_first, api.check_freed, api.check_failed_backward, api.check_failed_forward,
    several.check_part, mistakes.check_added_param, mistakes.check_misuse_of_no_sync,
    mistakes.check_double_backward, mistakes.check_weight_penalty,
)  # fmt: skip


@pytest.mark.parametrize("check, stage", by_turns(USES))
def test_uses(check, stage):
    ranks.run(check, stage)


# --- several models, random numbers, mistakes


@slow
@pytest.mark.parametrize("stages", ((1, 3), pytest.param((3, 3), marks=full), (2, 0)))
def test_two_models_against_each_other(stages):
    ranks.run(several.check_adversaries, stages)


@slow
@pytest.mark.parametrize("world", (2, 3))
def test_two_models_that_share_nothing(world):
    ranks.run(several.check_strangers, world=world)


MASKS = ("eager", 1), ("inductor", 3)


@pytest.mark.parametrize("checkpointed", (False, True))
@pytest.mark.parametrize("lowering, stage", (("eager", 3), *(pytest.param(*p, marks=slow) for p in MASKS)))
def test_dropout_masks(stage, lowering, checkpointed):
    ranks.run(several.check_masks, stage, lowering, checkpointed)


@pytest.mark.parametrize("lowering", over(("eager", "inductor"), rest=full, quick=("eager",)))
@pytest.mark.parametrize("stage", over((1, 3)))
def test_seeds(stage, lowering):
    ranks.run(several.check_seed, stage, lowering)


@pytest.mark.parametrize("stage", over((1, 2, 3), quick=(3,)))
def test_ranks_in_different_branches(stage):
    ranks.run(mistakes.check_branches_differ, stage, timeout_s=45)


@slow
@pytest.mark.parametrize("stage", (pytest.param(0, marks=full), pytest.param(1, marks=full), 3))
@pytest.mark.parametrize("kind", ("no_grad", "data", "eager"))
def test_weight_edited_in_forward(kind, stage):
    ranks.run(mistakes.check_weight_edit, kind, stage)


def test_refusals():
    ranks.run(mistakes.check_refusals)


@pytest.mark.parametrize("name", (pytest.param("hf_llama", marks=slow), pytest.param("hf_gpt2", marks=full)))
@pytest.mark.parametrize("stage", (pytest.param(1, marks=full), 3))
def test_generate(name, stage):
    ranks.run(several.check_generate, name, stage)
