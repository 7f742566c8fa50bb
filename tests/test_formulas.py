"""The formulas against numbers worked out by hand, and against the paper's own examples."""

import pytest

from zero_fx.formulas import elements_sent, model_state_bytes

# 1000 elements partitioned over 4 ranks, 10 kept whole.
SIZES = (1000, 10, 4)
WHOLE_BYTES, WHOLE_SENT = 160, 15


@pytest.mark.parametrize(
    ("stage", "micro_batches", "sharded_bytes"),
    [
        (0, 1, 16000),
        (0, 3, 16000),
        (1, 1, 4000 + 4000),  # gathered; own rows, gradient and moments of a quarter
        (1, 3, 4000 + 4000 + 3000),  # gathered, local gradient; own rows and moments of a quarter
        (2, 1, 4000 + 4000),
        (2, 3, 4000 + 4000),
        (3, 1, 4000),
        (3, 3, 4000),
    ],
)
def test_bytes_of_model_states(stage, micro_batches, sharded_bytes):
    assert model_state_bytes(stage, *SIZES, micro_batches) == sharded_bytes + WHOLE_BYTES


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_one_rank_holds_no_copy(stage):
    assert model_state_bytes(stage, 1000, 10, 1) == 16 * 1010


@pytest.mark.parametrize(
    ("stage", "micro_batches", "sharded_bytes"), [(0, 1, 16000), (1, 1, 2000 + 4000), (1, 3, 2000 + 4000 + 3000), (2, 3, 6000), (3, 1, 4000)]
)
def test_bytes_in_mixed_precision(stage, micro_batches, sharded_bytes):
    """Gathered copies of 2 bytes; masters, gradients and moments as in fp32."""
    assert model_state_bytes(stage, *SIZES, micro_batches, gathered_bytes=2) == sharded_bytes + WHOLE_BYTES


@pytest.mark.parametrize(
    ("stage", "micro_batches", "sharded_sent"),
    [(0, 1, 1500), (0, 3, 1500), (1, 1, 1500), (1, 3, 1500), (2, 1, 1500), (2, 3, 3000), (3, 1, 2250), (3, 3, 6750)],
)
def test_elements_sent(stage, micro_batches, sharded_sent):
    assert elements_sent(stage, *SIZES, micro_batches) == sharded_sent + WHOLE_SENT


def test_the_papers_example():
    """Section 3: 7.5 B parameters on 64 ranks are 120 GB without ZeRO and 1.9 GB with all three stages."""
    assert model_state_bytes(0, 7_500_000_000, 0, 64) == 120e9
    assert model_state_bytes(3, 7_500_000_000, 0, 64) == pytest.approx(1.9e9, rel=0.02)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_one_rank_sends_nothing(stage):
    assert elements_sent(stage, 1000, 10, 1, 2) == 0


def test_stage_3_sends_half_as_much_again_as_stage_0():
    """Section 7 of the paper, for one micro-batch: 3Ψ against 2Ψ."""
    assert elements_sent(3, 1000, 0, 64) == 1.5 * elements_sent(0, 1000, 0, 64) == 1.5 * elements_sent(2, 1000, 0, 64)
