"""The relay of output waits for a slow reader."""

import os

from core.common.terminal import _StreamRelay


def test_a_relay_waits_for_its_reader_where_another_program_does_not():
    reader, writer = os.pipe()
    os.set_blocking(writer, False)  # This holds for all descriptors of a pipe or terminal.
    relay = _StreamRelay(writer)
    assert os.get_blocking(relay.target)
    for descriptor in (reader, writer, relay.source, relay.target):
        os.close(descriptor)
