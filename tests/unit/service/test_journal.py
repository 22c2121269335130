"""The journal has every acknowledged record after a crash, and no part of one that was cut off."""

import os

import pytest

from rl_megatron.service.journal import Journal, Record, read_journal
from tests.full_disk import files_of_at_most
from tests.synced_files import note_syncs

RECORDS = [Record({"number": number}, bytes([number]) * number) for number in range(5)]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "journal"


def test_records_are_read_in_their_order(path):
    journal = Journal(path)
    journal.append(RECORDS[:2])
    journal.append(RECORDS[2:4])
    journal.close()
    journal = Journal(path)
    journal.append(RECORDS[4:])
    assert list(read_journal(path)) == RECORDS


def test_records_are_on_the_disk_when_they_are_acknowledged(path, monkeypatch):
    journal = Journal(path)
    synced = note_syncs(monkeypatch)
    journal.append(RECORDS)
    assert synced


@pytest.mark.parametrize("lost", [1, 7, 13, 20])
def test_a_record_that_was_cut_off_is_dropped(path, lost):
    """Wherever the crash came: the records before are there, and new ones follow them."""
    journal = Journal(path)
    journal.append(RECORDS)
    journal.close()
    os.truncate(path, path.stat().st_size - lost)
    kept = list(read_journal(path))
    assert kept == RECORDS[: len(kept)]
    assert len(kept) < len(RECORDS)
    journal = Journal(path)
    journal.append([Record({"number": "new"})])
    assert list(read_journal(path)) == [*kept, Record({"number": "new"})]


def test_a_record_whose_bytes_changed_ends_the_journal(path):
    journal = Journal(path)
    journal.append(RECORDS)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert list(read_journal(path)) == RECORDS[:-1]


def test_a_full_disk_leaves_the_journal_as_it_was(path):
    journal = Journal(path)
    journal.append(RECORDS)
    with files_of_at_most(path.stat().st_size + 100), pytest.raises(OSError):
        journal.append([Record({}, b"x" * 1000)])
    journal.append([Record({"number": "after"})])
    assert list(read_journal(path)) == [*RECORDS, Record({"number": "after"})]


def test_another_file_is_not_taken_for_a_journal(path):
    path.write_text("something else that is long enough")
    with pytest.raises(ValueError, match="is not a journal of the training service"):
        Journal(path)
