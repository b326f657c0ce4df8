"""Who fetches from whom: everybody once, from one at a time, in rounds that double."""

from hypothesis import given
from hypothesis import strategies as st

from lab.copies import Copies, Place, Source, Turn


def engine(machine: int, number: int, many: bool = False) -> Source:
    return Source(place=Place("a", f"m/{machine}"), name=f"e{number}", ends=(f"m[{number}]",), many=many)


@given(st.integers(1, 60))
def test_on_one_machine_all_have_them_after_a_logarithm_of_rounds(number: int) -> None:
    copies, granted = Copies(engine(0, -1), tree=True), list[tuple[int, int]]()
    for i in range(number):
        copies.ask(Place("a", "m/0"), lambda source, i=i: granted.append((i, source)))  # type: ignore[misc]
    rounds, done = 0, 0
    while done < number:
        rounds, ended = rounds + 1, granted[done:]
        assert len({source for _, source in ended}) == len(ended), "each gives to one"
        done = len(granted)
        for i, source in ended:
            copies.release(source, Place("a", "m/0"), engine(0, i))
    assert rounds == number.bit_length() and [i for i, _ in granted] == list(range(number))


@given(st.lists(st.integers(0, 4), min_size=1, max_size=30), st.booleans())
def test_a_machine_gets_them_from_another_once(machines: list[int], many: bool) -> None:
    copies, granted = Copies(engine(9, -1, many), tree=True), list[tuple[int, int]]()
    for i, machine in enumerate(machines):
        copies.ask(Place("a", f"m/{machine}"), lambda source, i=i: granted.append((i, source)))  # type: ignore[misc]
    done, crossed = 0, list[int]()
    while done < len(granted):
        i, source = granted[done]
        here = Place("a", f"m/{machines[i]}")
        crossed += [machines[i]] if copies.source(source).place != here else []
        copies.release(source, here, engine(machines[i], i, many))
        done += 1
    assert len(granted) == len(machines)
    assert sorted(crossed) == sorted(set(machines))


def test_whoever_leaves_is_not_waited_for() -> None:
    copies, here, seen = Copies(engine(0, -1), tree=True), Place("a", "m/0"), list[str]()
    turns: dict[str, Turn] = {name: copies.ask(here, lambda _, name=name: seen.append(name)) for name in "abc"}  # type: ignore[misc]
    copies.leave(here, turns["b"])
    copies.leave(here, turns["a"])
    assert seen == ["a", "c"]


def test_without_a_tree_all_fetch_from_the_origin_at_once() -> None:
    copies, seen = Copies(engine(0, -1), tree=False), list[int]()
    for _ in range(3):
        copies.ask(Place("a", "m/0"), seen.append)
    assert seen == [0, 0, 0]
