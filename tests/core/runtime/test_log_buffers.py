"""The logger gets every record whole, or counts it as dropped."""

import pytest

from core.runtime.log_buffers import LogRings

CAPACITY = 8


class WrittenWhileRead(dict):
    """The arrays of a ring whose process reports once while the logger reads a column."""

    def __init__(self, arrays, column, report):
        super().__init__(arrays)
        self._column, self._report = column, report

    def __getitem__(self, name):
        array = super().__getitem__(name)
        if name == self._column and self._report is not None:
            report, self._report = self._report, None
            report()
        return array


@pytest.mark.parametrize("column", ["name", "value", "step", "time"])
@pytest.mark.parametrize("new", [0, 1, 3, CAPACITY, CAPACITY + 3])
def test_records_that_are_overwritten_while_they_are_read_are_dropped(column, new):
    logs = LogRings(1, CAPACITY)
    for number in range(CAPACITY):
        logs.write(0, {f"number {number}": float(number)}, number)

    def report():
        logs.write(0, {f"number {CAPACITY + number}": float(CAPACITY + number) for number in range(new)}, CAPACITY)

    arrays = logs._arrays
    logs._arrays = WrittenWhileRead(arrays, column, report)
    first, first_dropped = logs.drain_process(0)
    logs._arrays = arrays
    second, second_dropped = logs.drain_process(0)
    for record in first + second:
        assert record.name == f"number {record.value:g}" and record.step == min(record.value, CAPACITY)
    assert [record.value for record in first + second] == list(range(CAPACITY + new))[-CAPACITY:]
    assert first_dropped + second_dropped == new


def test_a_process_that_dies_within_a_report_leaves_the_records_before_it():
    logs = LogRings(1, CAPACITY)
    for number in range(CAPACITY):
        logs.write(0, {"value": float(number)}, number)
    logs._arrays["counters"][0, 1] += 2  # it announced two records, and wrote a part of them
    logs._arrays["value"][0, :2] = float("nan")
    records, dropped = logs.drain_process(0)
    assert [record.value for record in records] == list(range(2, CAPACITY)) and dropped == 2
    logs.write(0, {"value": 9.0}, 9)
    assert [record.value for record in logs.drain_process(0)[0]] == [9.0]


def test_a_name_that_does_not_fit_is_refused():
    """Cut, two names with one beginning would become one metric."""
    logs, longest = LogRings(1, CAPACITY), "learner/" + "x" * 56
    logs.write(0, {longest: 1.0}, 0)
    with pytest.raises(ValueError, match=f"metric '{longest}x' is longer than 64 bytes"):
        logs.write(0, {"learner/loss": 1.0, longest + "x": 2.0}, 0)
    assert [record.name for record in logs.drain()[0]] == [longest]
