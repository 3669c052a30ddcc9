"""Files that a step uses at once lie on different drives, and drives fill by their room."""

from __future__ import annotations

from mt_lightning.tiers.placing import place_for

KINDS = ("weight.0", "state.0", "weight.1", "state.1")


def place_all(rooms: list[int], pages: list[int]) -> tuple[dict[str, int], list[int]]:
    """Place files of pages so long; return where each lies, and what each place has."""
    places: dict[str, int] = {}
    assigned = dict.fromkeys(range(len(rooms)), 0)
    for kind in KINDS:
        for page, nbytes in enumerate(pages):
            name = f"p{page:05d}.{kind}"
            nbytes *= 1 + kind.startswith("state")
            free = {place: room - assigned[place] for place, room in enumerate(rooms)}
            place = place_for(name, nbytes, places, assigned, free)
            places[name] = place
            assigned[place] += nbytes
    return places, list(assigned.values())


def test_the_files_of_a_page_lie_apart_and_so_do_pages_side_by_side() -> None:
    places, assigned = place_all([10_000] * 4, [10] * 32)
    for page in range(32):
        assert len({places[f"p{page:05d}.{kind}"] for kind in KINDS}) == 4
        if page:
            for kind in KINDS:
                assert places[f"p{page:05d}.{kind}"] != places[f"p{page - 1:05d}.{kind}"]
    assert len(set(assigned)) == 1


def test_a_large_page_and_uneven_drives_leave_all_of_them_equally_full() -> None:
    for rooms in ([10_000] * 4, [9_000, 3_000, 3_000], [8_000, 8_000]):
        _, assigned = place_all(rooms, [70, *[10] * 31, 70])
        full = [has / room for has, room in zip(assigned, rooms, strict=True)]
        # A place may have a file more than the least full one, and then get one of the longest.
        assert max(full) - min(full) <= 2 * 140 / min(rooms)


def test_a_file_goes_where_there_is_room() -> None:
    places = {"p00000.weight.0": "a"}
    assigned, free = {"a": 10, "b": 0}, {"a": 1000, "b": 5}
    assert place_for("p00000.state.0", 20, places, assigned, free) == "a"
