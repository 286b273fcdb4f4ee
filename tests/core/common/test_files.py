"""Files are replaced atomically, and locks hold between open descriptors."""

import os

import pytest

from core.common.files import folder_lock, replace_atomically, try_lock, write_atomically


def test_a_file_is_replaced_when_the_block_ends(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    with replace_atomically(path) as temporary:
        temporary.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new" and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("existing", [False, True])
def test_an_error_leaves_the_old_file_and_no_temporary_one(tmp_path, existing):
    path = tmp_path / "file"
    if existing:
        write_atomically(path, b"old")
    with pytest.raises(ValueError), replace_atomically(path) as temporary:
        temporary.write_text("half")
        raise ValueError
    assert [file.read_text() for file in tmp_path.iterdir()] == ["old"] * existing


def test_a_folder_is_locked_by_one_holder_at_a_time(tmp_path):
    with folder_lock(tmp_path) as first:
        with folder_lock(tmp_path) as second:
            assert (first, second) == (True, False)
        descriptor = os.open(tmp_path, os.O_RDONLY)
        assert not try_lock(descriptor)
    assert try_lock(descriptor)
    os.close(descriptor)
    with folder_lock(tmp_path) as third:
        assert third
