from __future__ import annotations

from keepstep.detect.memory import Shortages, kills


class Counter:
    def __init__(self, count: int) -> None:
        self.count = count

    def __call__(self) -> int:
        return self.count


def test_each_kill_for_lack_of_memory_explains_one_death():
    counter = Counter(7)
    shortages = Shortages(counter)
    assert not shortages.explains_a_death(), "what was killed before is nobody of ours"
    counter.count = 9
    assert [shortages.explains_a_death() for _ in range(3)] == [True, True, False]


def test_what_was_killed_beside_a_death_with_last_words_explains_no_later_one():
    counter = Counter(0)
    shortages = Shortages(counter)
    counter.count = 1
    shortages.forget()
    assert not shortages.explains_a_death()


def test_this_machine_tells_how_many_were_killed():
    assert kills() >= 0
