"""Which nodes measure the network between them."""

from __future__ import annotations

from mgpu_slurm.doctor.partners import PARTNERS, Partners


def arrived(*nodes: str) -> Partners:
    partners = Partners()
    for node in nodes:
        partners.arrive(node)
    return partners


def test_each_node_is_measured_with_two_others_and_never_with_two_at_once() -> None:
    for size in (3, 4, 5, 8, 31):
        partners = arrived(*map(str, range(size)))
        met: dict[str, set[str]] = {str(number): set() for number in range(size)}
        while pairs := partners.begin():
            assert len({node for pair in pairs for node in pair}) == 2 * len(pairs)
            assert partners.begin() == []
            for node, other in pairs:
                assert other not in met[node]
                met[node].add(other)
                met[other].add(node)
                partners.end(node, other)
        assert sum(len(others) == PARTNERS for others in met.values()) >= size - 1, size
        assert all(others for others in met.values())
        assert not any(partners.may_meet(node, may_come=False) for node in partners.waiting())


def test_lone_node_waits_only_while_another_may_come() -> None:
    partners = arrived("n1")
    assert partners.begin() == []
    assert (partners.may_meet("n1", may_come=True), partners.may_meet("n1", may_come=False)) == (True, False)
    partners.arrive("n2")
    assert partners.begin() == [("n1", "n2")]
    assert partners.waiting() == []
    partners.end("n1", "n2")
    assert partners.has_met("n1")
    assert not partners.may_meet("n1", may_come=False)


def test_node_whose_partner_fails_is_free_again() -> None:
    partners = arrived("n1", "n2", "n3")
    assert partners.begin() == [("n1", "n2")]
    partners.leave("n2")
    assert partners.begin() == [("n3", "n1")]
