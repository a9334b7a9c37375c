"""The file store: after any calls and any restart it has what was put in and not taken out."""

import io
from functools import partial

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.serve.batches.harness import Clock
from turbojax.serve.batches.batches import BatchStore
from turbojax.serve.batches.disk import BATCH, FILE, BatchFolderError, new_id
from turbojax.serve.batches.files import FileStore
from turbojax.serve.openai_errors import ApiError

MAX_TOTAL_BYTES = 200


class Files(RuleBasedStateMachine):
    """Against a dict; a crash leaves parts, contents without a record, and records without a content."""

    def __init__(self):
        super().__init__()
        import tempfile
        from pathlib import Path

        self.place = tempfile.TemporaryDirectory()
        self.folder, self.clock = Path(self.place.name), Clock()
        self.known = {}
        self.open()

    def open(self):
        self.store = FileStore(self.folder, MAX_TOTAL_BYTES, self.clock)

    @rule(data=st.binary(max_size=80), name=st.text(max_size=10), lifetime_s=st.none() | st.integers(3600, 7200))
    def create(self, data, name, lifetime_s):
        total = sum(len(content) for content, _ in self.alive().values())
        if total + len(data) > MAX_TOTAL_BYTES:
            with pytest.raises(ApiError) as caught:
                self.store.create(io.BytesIO(data), name, lifetime_s)
            assert caught.value.status == 507
            return
        made = self.store.create(io.BytesIO(data), name, lifetime_s)
        assert (made.bytes, made.filename, made.created_at) == (len(data), name, int(self.clock()))
        self.known[made.id] = (data, made.expires_at)

    def alive(self):
        return {key: one for key, one in self.known.items() if one[1] is None or one[1] > self.clock()}

    @precondition(lambda self: self.alive())
    @rule(data=st.data())
    def delete(self, data):
        file_id = data.draw(st.sampled_from(sorted(self.alive())))
        self.store.delete(file_id)
        del self.known[file_id]

    @rule(hours=st.integers(0, 2))
    def wait(self, hours):
        self.clock.now += hours * 3600

    @rule()
    def sweep(self):
        self.store.sweep(())

    @rule(kind=st.sampled_from(["part", "content", "record", "torn record", "foreign"]))
    def crash(self, kind):
        lost = f"file-{len(list(self.folder.iterdir())):032x}"
        name, text = {
            "part": (f"{lost}.part", "half"),
            "content": (f"{lost}.jsonl", "no record"),
            "record": (f"{lost}.json", f'{{"id":"{lost}","bytes":1,"created_at":1,"filename":"x","purpose":"batch"}}'),
            "torn record": (f"{lost}.json", '{"id":'),
            "foreign": ("notes.json", "{}"),
        }[kind]
        (self.folder / name).write_text(text)
        self.open()
        self.store.sweep((), being_written=())

    @invariant()
    def it_has_what_it_was_given(self):
        alive = self.alive()
        assert {one.id for one in self.store.all()} == set(alive)
        for file_id, (content, _) in alive.items():
            assert self.store.content(file_id).read_bytes() == content
        for file_id in set(self.known) - set(alive):
            with pytest.raises(ApiError):
                self.store.get(file_id)

    def teardown(self):
        self.place.cleanup()


Files.TestCase.settings = settings(max_examples=25, stateful_step_count=15, deadline=None)
TestFiles = Files.TestCase


def test_what_expires_is_deleted_once_nobody_uses_it(tmp_path):
    clock = Clock()
    store = FileStore(tmp_path, MAX_TOTAL_BYTES, clock)
    file = store.create(io.BytesIO(b"x"), "x", 3600)
    clock.now += 3600
    store.sweep({file.id})
    assert len(list(tmp_path.iterdir())) == 2
    store.sweep(())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("file_id", ["../files", "file-../../x", "/etc/passwd", "", "file-", "file-" + "0" * 32, "\0"])
def test_an_id_that_was_not_given_out_is_no_file(tmp_path, file_id):
    store = FileStore(tmp_path, MAX_TOTAL_BYTES)
    for call in (store.get, store.delete):
        with pytest.raises(ApiError) as caught:
            call(file_id)
        assert caught.value.status == 404


def test_a_disk_that_is_full_is_told_and_leaves_nothing(tmp_path):
    class Failing(io.BytesIO):
        def read(self, size=-1):
            raise OSError(28, "No space left on device")

    store = FileStore(tmp_path, MAX_TOTAL_BYTES)
    with pytest.raises(ApiError, match="No space left") as caught:
        store.create(Failing(), "x")
    assert caught.value.status == 507
    assert list(tmp_path.iterdir()) == []


class Upload(io.BytesIO):
    """`meanwhile` happens once all of it has come, before it is a file."""

    def __init__(self, data, meanwhile):
        super().__init__(data)
        self.meanwhile = meanwhile

    def read(self, size=-1):
        data = super().read(size)
        if not data:
            self.meanwhile()
        return data


def test_what_is_being_uploaded_has_its_room_already(tmp_path):
    store = FileStore(tmp_path, MAX_TOTAL_BYTES)

    def leave():
        raise KeyboardInterrupt

    def others():
        with pytest.raises(ApiError, match=f"larger than {MAX_TOTAL_BYTES} bytes together"):
            store.create(io.BytesIO(b"b" * 81), "too large beside the first")
        store.create(io.BytesIO(b"c" * 80), "fits")

    with pytest.raises(KeyboardInterrupt):
        store.create(Upload(b"d" * 200, leave), "its client leaves")
    store.create(Upload(b"a" * 120, others), "the first")
    assert sorted(one.bytes for one in store.all()) == [80, 120]


@pytest.mark.parametrize(
    ("store", "kind"), [(partial(FileStore, max_total_bytes=MAX_TOTAL_BYTES), FILE), (BatchStore, BATCH)]
)
def test_a_record_that_cannot_be_read_is_no_reason_to_forget_it(tmp_path, store, kind):
    kept = tmp_path / f"{new_id(kind)}.json"
    kept.mkdir()  # reading it is an error of the disk
    with pytest.raises(BatchFolderError, match=r"\.json cannot be read: Is a directory"):
        store(tmp_path)
    assert kept.exists()
