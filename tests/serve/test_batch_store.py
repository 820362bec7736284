"""The folder of files and batches: its limits, failures of the disk, two fronts at once, and the files of dead
fronts."""

import errno
import io
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from serve_app.apis.batches.disk import replacing, try_lock
from serve_app.apis.batches.lines import Position, Requests, append, finished
from serve_app.apis.batches.routes import CreateBatchRequest, _created
from serve_app.apis.batches.store import BatchStore, Record
from serve_app.protocol.errors import ApiError
from serve_app.settings import HttpSettings

NO_SPACE = OSError(errno.ENOSPC, "No space left on device")


def store_of(folder: Path, **limits: Any) -> BatchStore:
    return BatchStore(str(folder), HttpSettings(**{f"batch_max_{name}": most for name, most in limits.items()}))


def upload(store: BatchStore, owner: str = "one", content: bytes = b"0123456789") -> str:
    return store.upload(io.BytesIO(content), owner, "in.jsonl").object["id"]


def create(store: BatchStore, file_id: str, owner: str = "one") -> Record:
    asked = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
    return _created(store, CreateBatchRequest(**asked), owner)


def end(store: BatchStore, record: Record) -> None:
    record.object["status"] = "completed"
    store.batches.write(record)
    store.forget(record)


def paths(folder: Path) -> set[str]:
    """All files but the lock of the folder."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} - {"store.lock"}


# ---- limits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "most", "status"),
    [("files", 2, 429), ("files_per_key", 2, 429), ("bytes", 25, 413), ("bytes_per_key", 25, 413)],
)
def test_an_upload_beyond_a_limit_names_it(tmp_path: Path, name: str, most: int, status: int):
    store = store_of(tmp_path, **{name: most})
    first = upload(store)
    upload(store)
    before = paths(tmp_path)
    with pytest.raises(ApiError, match=rf"limit of {most} \(batch_max_{name}\)") as error:
        upload(store)
    assert error.value.status == status
    assert paths(tmp_path) == before
    if name.endswith("per_key"):
        upload(store, "two")
    else:
        with pytest.raises(ApiError, match="All API keys"):
            upload(store, "two")
    store.delete_file(first, "one")
    upload(store)


@pytest.mark.parametrize("name", ["open", "open_per_key"])
def test_open_batches_are_limited(tmp_path: Path, name: str):
    store = store_of(tmp_path, **{name: 2})
    file_id, other = upload(store), upload(store, "two")
    first = create(store, file_id)
    create(store, file_id)
    with pytest.raises(ApiError, match=rf"limit of 2 \(batch_max_{name}\); wait until one ends") as error:
        create(store, file_id)
    assert error.value.status == 429
    if name == "open_per_key":
        create(store, other, "two")
    end(store, first)
    create(store, file_id)


def test_results_are_reserved_from_the_start(tmp_path: Path):
    store = store_of(tmp_path, files=3)
    record = create(store, upload(store))
    with pytest.raises(ApiError, match="3 files"):
        upload(store)
    end(store, record)  # without results
    upload(store)


def test_a_deleted_input_counts_until_its_batch_ends(tmp_path: Path):
    store = store_of(tmp_path, bytes=15)
    file_id = upload(store)
    record = create(store, file_id)
    store.delete_file(file_id, "one")
    with pytest.raises(ApiError, match="10 bytes of files"):
        upload(store)
    end(store, record)
    upload(store)


def test_growing_results_count(tmp_path: Path):
    store = store_of(tmp_path, bytes_per_key=500)
    record = create(store, upload(store))
    output = store.files.path(record.results[0])
    append(output, [{"custom_id": "a"}])
    assert store.charge(record) is None
    append(output, [{"custom_id": "b" * 500}])
    assert "batch_max_bytes_per_key" in str(store.charge(record))
    with pytest.raises(ApiError, match="delete some files"):
        upload(store)


def test_the_oldest_ended_batches_are_forgotten(tmp_path: Path):
    store = store_of(tmp_path, ended_per_key=2)
    file_id, made = upload(store), []
    for _ in range(5):
        made.append(create(store, file_id).object["id"])
        end(store, store.batches.read(made[-1]))
    running = create(store, file_id).object["id"]
    seen, has_more = store.batches.page("one", None, 10, True, lambda record: True)
    assert ([record.object["id"] for record in seen], has_more) == ([*made[-2:], running], False)


def test_two_fronts_pass_no_limit_together(tmp_path: Path):
    stores = [store_of(tmp_path, files=5) for _ in range(4)]

    def attempt(i: int) -> bool:
        try:
            upload(stores[i % 4], f"key{i % 3}")
        except ApiError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(attempt, range(24))) == 5


def test_a_page_reads_no_record_of_another_key(tmp_path: Path, monkeypatch):
    store = store_of(tmp_path)
    own = [upload(store) for _ in range(3)]
    for _ in range(20):
        upload(store, "two")
    read, opened = store.files.read, []
    monkeypatch.setattr(
        store.files, "read", lambda record_id, owner: opened.append(record_id) or read(record_id, owner)
    )
    page, has_more = store.files.page("one", None, 2, False, lambda record: True)
    assert ([record.object["id"] for record in page], has_more) == ([own[2], own[1]], True)
    assert opened == own[::-1]


# ---- failures of the disk --------------------------------------------------------------------------------------------


class HalfRead(io.BytesIO):
    def read(self, *args: Any) -> bytes:
        if self.tell():
            raise NO_SPACE
        return super().read(5)


def test_an_upload_that_fails_leaves_nothing(tmp_path: Path):
    store = store_of(tmp_path)
    with pytest.raises(OSError, match="No space"):
        store.upload(HalfRead(b"0123456789"), "one", "in.jsonl")
    assert paths(tmp_path) == set()


def test_a_record_that_fails_leaves_nothing(tmp_path: Path, monkeypatch):
    store, fsync, num_calls = store_of(tmp_path), os.fsync, []

    def fails(fd: int) -> None:
        num_calls.append(fd)
        if len(num_calls) == 2:  # after the content
            raise NO_SPACE
        fsync(fd)

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(OSError, match="No space"):
        upload(store)
    assert paths(tmp_path) == set()


def test_a_batch_that_fails_leaves_nothing(tmp_path: Path, monkeypatch):
    store = store_of(tmp_path)
    file_id = upload(store)
    before = paths(tmp_path)

    def fails(record: Record) -> None:
        raise NO_SPACE

    monkeypatch.setattr(store.batches, "write", fails)
    with pytest.raises(OSError, match="No space"):
        create(store, file_id)
    assert paths(tmp_path) == before


def test_a_replaced_file_is_old_or_new(tmp_path: Path):
    path = tmp_path / "a"
    path.write_bytes(b"old")
    with suppress(OSError), replacing(path) as file:
        file.write(b"new")
        raise NO_SPACE
    assert (path.read_bytes(), list(tmp_path.iterdir())) == (b"old", [path])


def test_a_result_that_fails_leaves_no_part(tmp_path: Path, monkeypatch):
    path = tmp_path / "out"
    append(path, [{"custom_id": "a"}])
    before = path.read_bytes()

    def fails(fd: int) -> None:
        raise NO_SPACE

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(OSError, match="No space"):
        append(path, [{"custom_id": "b"}])
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "torn", [b'{"custom_id": "x", "resp\n', b'{"custom_id": "x"{"custom_id":"y"}\n', b"\xff\n", b"\n"]
)
def test_torn_lines_are_removed_from_results(tmp_path: Path, torn: bytes):
    path = tmp_path / "out"
    whole = [b'{"custom_id":"%d"}\n' % i for i in range(3)]
    path.write_bytes(whole[0] + torn + whole[1] + whole[2] + b'{"custom_id":"3"}')
    assert finished(path) == {"0", "1", "2"}
    assert (path.read_bytes(), list(tmp_path.iterdir())) == (b"".join(whole), [path])


# ---- what dead fronts leave ------------------------------------------------------------------------------------------


def test_a_sweep_removes_files_without_a_record(tmp_path: Path):
    store = store_of(tmp_path)
    record = create(store, upload(store))
    append(store.files.path(record.results[1]), [{"custom_id": "a"}])
    kept = paths(tmp_path)
    dead, entry, batch_id = store.files.new_id(), store.files.new_id(), store.batches.new_id()
    store.files.path(dead).write_bytes(b"half")
    store.files.path(dead, ".json.part").write_bytes(b"{")
    store.index.set("one", dead, 4)
    store.index.set("two", entry, 0)
    for suffix in (".lock", ".input", ".cancel", ".json.part"):
        store.batches.path(batch_id, suffix).touch()
    store.batches.path(store.batches.new_id(), ".cancel").touch()
    receiving = upload(store, content=b"all of it")
    store.files.path(receiving, ".json").unlink()
    with open(store.files.path(receiving), "r+b") as held:
        assert try_lock(held)
        store_of(tmp_path).sweep()
        assert paths(tmp_path) == kept | {f"files/{receiving}", f"keys/key-one/{receiving}.9"}
    store.sweep()
    assert paths(tmp_path) == kept


def test_a_sweep_indexes_records_without_an_entry(tmp_path: Path):
    store = store_of(tmp_path, files_per_key=5)
    file_id = upload(store)
    record = create(store, file_id)
    entries = {path for path in paths(tmp_path) if path.startswith("keys/")}
    for path in entries:
        (tmp_path / path).unlink()
    assert store.files.page("one", None, 10, True, lambda record: True) == ([], False)
    store.sweep()
    assert {path for path in paths(tmp_path) if path.startswith("keys/")} == entries
    assert store.batches.page("one", None, 10, True, lambda record: True) == ([record], False)


def test_an_input_deleted_meanwhile_is_not_found(tmp_path: Path, monkeypatch):
    store = store_of(tmp_path)
    file_id = upload(store)
    new_id = store.batches.new_id
    monkeypatch.setattr(store.batches, "new_id", lambda: store.delete_file(file_id, "one") or new_id())
    with pytest.raises(ApiError, match="There is no file") as error:
        create(store, file_id)
    assert error.value.status == 404
    assert paths(tmp_path) == set()


def test_a_record_that_cannot_be_read_is_not_found(tmp_path: Path):
    store = store_of(tmp_path)
    file_id, other = upload(store), upload(store)
    store.files.path(file_id, ".json").write_bytes(b"\0\0")
    with pytest.raises(ApiError, match="There is no file"):
        store.files.read(file_id, "one")
    assert [r.object["id"] for r in store.files.page("one", None, 9, True, lambda record: True)[0]] == [other]


# ---- windows ---------------------------------------------------------------------------------------------------------


def test_places_are_read_a_window_at_a_time(tmp_path: Path):
    path = tmp_path / "in"
    lines = [b'{"custom_id": "%d"}' % i for i in range(300)]
    path.write_bytes(b"\r\n\n".join(lines))
    requests = Requests(path, 1000)
    requests.mark({str(i) for i in range(0, 300, 2)} | {str(i) for i in range(100)})
    index, start, windows = 0, 0, []
    while True:
        window, index, start = requests.window(index, start)
        if not window:
            break
        windows.append(window)
    assert [len(window) for window in windows] == [64, 36]
    content = path.read_bytes()
    assert [content[p.start : p.start + p.length] for w in windows for p in w] == lines[101::2]
    assert list(requests.without_result()) == [str(i) for i in range(101, 300, 2)]
    assert isinstance(windows[0][0], Position)
