"""The pool's accounts, by hand and under random use."""

from hypothesis import given
from hypothesis import strategies as st

from decodefleet.cluster.simulate.kv_pool import KvPool


def names(text: str) -> list[bytes]:
    return [letter.encode() for letter in text]


def keep(pool: KvPool, text: str) -> None:
    """A prompt of these blocks comes and goes."""
    chain = names(text)
    found, _ = pool.leading(chain)
    pool.share(chain[:found])
    pool.allocate(len(chain) - found)
    fresh = pool.publish(chain[found:])
    pool.release(chain[:found] + fresh, len(chain) - found - len(fresh))


def test_prefix_is_found_up_to_the_first_gap():
    pool = KvPool(8)
    keep(pool, "abc")
    assert pool.leading(names("abxc")) == (2, 2)
    assert pool.leading(names("xabc")) == (0, 0)


def test_tails_go_first_and_the_longest_idle():
    pool = KvPool(4)
    keep(pool, "ab")
    keep(pool, "cd")
    pool.allocate(1)
    assert pool.leading(names("ab"))[0] == 1
    pool.allocate(2)
    assert pool.leading(names("ab"))[0] == 0
    assert pool.leading(names("cd"))[0] == 1
    assert pool.take_news() == ([b"b", b"a", b"d"], [b"c"])


def test_what_is_in_use_stays():
    pool = KvPool(3)
    keep(pool, "ab")
    pool.share(names("ab"))
    assert pool.available == 1
    pool.allocate(1)
    assert pool.leading(names("ab")) == (2, 0)


def test_twin_of_a_block_stays_nameless():
    pool = KvPool(4)
    pool.allocate(2)
    first, second = pool.publish(names("a")), pool.publish(names("a"))
    assert (first, second) == ([b"a"], [])
    pool.release(first, 0)
    assert (pool.used, pool.cached) == (1, 1)
    pool.release([], 1)
    assert pool.available == 4


def test_news_tell_the_latest():
    pool = KvPool(2)
    keep(pool, "ab")
    assert pool.take_news() == ([], names("ab"))
    keep(pool, "cd")
    keep(pool, "ab")
    removed, stored = pool.take_news()
    assert (sorted(removed), sorted(stored)) == (names("cd"), names("ab"))


@given(st.lists(st.tuples(st.text("abcdef", max_size=5), st.integers(0, 3)), max_size=40))
def test_accounts_hold_under_random_use(steps):
    """What was told of, applied in order, is what is held."""
    pool, told, held = KvPool(6), set(), []
    for text, release in steps:
        chain = names("".join(sorted(set(text))))
        found, revived = pool.leading(chain)
        if len(chain) - found + revived <= pool.available:
            pool.share(chain[:found])
            pool.allocate(len(chain) - found)
            fresh = pool.publish(chain[found:])
            held.append((chain[:found] + fresh, len(chain) - found - len(fresh)))
        for _ in range(min(release, len(held))):
            pool.release(*held.pop(0))
        pool.check_integrity((named for named, _ in held), sum(count for _, count in held))
        removed, stored = pool.take_news()
        told = told - set(removed) | set(stored)
        assert {name for name in names("abcdef") if pool.leading([name])[0]} == told
