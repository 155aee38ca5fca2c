"""Load arithmetic and what fits."""

import pytest

from decodefleet.cluster.scheduling.view import NO_HIT, NO_LOAD, Demand, Hit, Load, reported_load

DEMAND = Demand("m", prompt_tokens=100, expected_tokens=28)


def test_reported_load(make):
    stats = make.stats(
        running=2,
        waiting=3,
        waiting_prefill_tokens=40,
        running_kv_tokens=50,
        free_blocks=600,
        cached_blocks=100,
    )
    assert reported_load(stats) == Load(40, 5, 50, 300)


def test_beyond_never_goes_below_zero():
    assert Load(1, 2, 3, 4).beyond(Load(3, 1, 3, 1)) == Load(0, 1, 0, 3)


def test_load_of_a_request(make):
    view = make.view()
    assert view.load_of(DEMAND, NO_HIT) == Load(100, 1, 114, 8)
    assert view.load_of(DEMAND, Hit(3, 3)) == Load(52, 1, 114, 5)
    # what comes from below the GPU is not computed, and takes as much of its memory
    assert view.load_of(DEMAND, Hit(3, 1, 3)) == Load(52, 1, 114, 7)
    assert view.load_of(Demand("m", 100, 28, n=3), NO_HIT) == Load(100, 3, 342, 12)


@pytest.mark.parametrize(
    ("blocks", "hit", "fits"),
    [(992, NO_HIT, True), (993, NO_HIT, False), (995, Hit(3, 3), True), (995, Hit(3, 1, 3), False)],
)
def test_fits_by_blocks(make, blocks, hit, fits):
    assert make.view(load=Load(sequences=1, blocks=blocks)).fits(DEMAND, hit) is fits


@pytest.mark.parametrize(("running", "n", "fits"), [(3, 1, True), (4, 1, False), (3, 2, False), (0, 9, True)])
def test_fits_by_sequences(make, running, n, fits):
    view = make.view(max_running=4, load=Load(sequences=running))
    assert view.fits(Demand("m", 10, 10, n), NO_HIT) is fits


def test_an_idle_worker_takes_what_its_pool_can_hold(make):
    assert make.view(total_blocks=4, free_blocks=4).fits(Demand("m", 63, 1000), NO_HIT)
    assert not make.view(total_blocks=4, free_blocks=4).fits(Demand("m", 64, 1), NO_HIT)
    # one that has not said how large its pool is
    assert make.view(total_blocks=0, free_blocks=0, load=NO_LOAD).fits(Demand("m", 64, 1), NO_HIT)


def test_layers_with_a_window_need_no_more_than_it_holds(make):
    """One group of layers keeps all blocks of 16 tokens, and two keep five each at most."""
    card = make.card(group_blocks=(None, 5, 5))
    assert [card.blocks_for(tokens) for tokens in (16, 80, 81, 1600)] == [3, 15, 16, 110]
    assert card.blocks_for(1600, sequences=3) == 130
    view = make.view(card=card, total_blocks=26, free_blocks=26)
    assert view.fits(Demand("m", 255, 1000), NO_HIT)
    assert not view.fits(Demand("m", 256, 1), NO_HIT)
    assert view.load_of(DEMAND, NO_HIT).blocks == 18
    assert view.load_of(Demand("m", 100, 28, n=3), NO_HIT).blocks == 36
