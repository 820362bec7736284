"""The answers of /v1/files and /v1/batches."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct


class StoredFile(Struct):
    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    filename: str
    purpose: str
    status: str


class FileList(Struct):
    object: Literal["list"]
    data: list[StoredFile]
    has_more: bool


class DeletedFile(Struct):
    id: str
    object: Literal["file"] = "file"
    deleted: bool = True


class RequestCounts(Struct):
    total: int
    completed: int
    failed: int


class Batch(Struct):
    id: str
    object: Literal["batch"]
    endpoint: str
    input_file_id: str
    completion_window: str
    status: Literal[
        "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
    ]
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    expires_at: int
    request_counts: RequestCounts
    metadata: dict[str, str] | None


class BatchList(Struct):
    object: Literal["list"]
    data: list[Batch]
    has_more: bool
