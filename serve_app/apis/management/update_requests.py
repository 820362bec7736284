"""The bodies of a trainer's requests, and the checks that only a front can do.

The ranks check whether the tensors are the model's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Literal

import msgspec
from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from actors.wire.weight_calls import Finish, UpdateInfo
from runtime.base.types import CallboardError
from runtime.output.fields import FieldError, invalid, shown
from runtime.updates.update_info import group_of_init_info, has_group, parts_of_json
from serve_app.apis.management.adapters import AdapterName
from serve_app.apis.management.allowed_folder import path_within
from serve_app.protocol.errors import ApiError
from serve_app.protocol.parsing import parse
from serve_app.protocol.shapes import RequestModel, VersionName


def _printable(name: str | int) -> str | int:
    if not str(name).isprintable():  # logs and answers show it in one line
        raise PydanticCustomError("not_printable", "it should have only characters that can be printed")
    return name


_NewName = Annotated[VersionName, AfterValidator(_printable)]


class InitTransferRequest(RequestModel):
    """POST /init_weight_transfer_engine."""

    init_info: dict[str, Any]  # vLLM's: how the ranks find the trainer


class StartUpdateRequest(RequestModel):
    """POST /start_weight_update."""

    is_checkpoint_format: bool = True  # names and layouts are the checkpoint's

    def check(self) -> None:
        if not self.is_checkpoint_format:
            problem = "is false, but tensors have the names and layouts of the checkpoint here; leave it out"
            raise invalid("is_checkpoint_format", problem)


class UpdateWeightsRequest(RequestModel):
    """POST /update_weights."""

    update_info: UpdateInfo  # vLLM's, or {"paths": [...]}: safetensors files, or folders with such files


class AdapterUpdate(RequestModel):
    """An update_info for an adapter (LoRA). Only requests of this adapter change, so no other call is needed."""

    lora_name: AdapterName
    paths: Annotated[list[str], Field(min_length=1, max_length=1)]  # a folder that PEFT has written


class FinishUpdateRequest(RequestModel):
    """POST /finish_weight_update."""

    weight_version: _NewName | None = None  # the new weights' name; default: the number of their update
    wait_stored: bool | None = None  # answer when restarted engines would have them
    kv: Literal["recompute", "keep"] | None = None  # running requests' KV; default: the pause's choice, or recompute

    def call(self) -> Finish:
        """Return the engines' call."""
        version = None if self.weight_version is None else str(self.weight_version)
        return Finish(version, self.wait_stored is True, self.kv)


class RenameRequest(RequestModel):
    """POST /update_weight_version."""

    new_version: _NewName


def read_update(body: bytes) -> UpdateInfo:
    """Return a body's checked update_info; raises ApiError or FieldError.

    A large model has tens of thousands of tensors, more values than pydantic checks at once."""
    try:
        fields = msgspec.json.decode(body, type=dict[str, Any])
    except msgspec.ValidationError:
        raise ApiError(400, "The request body must be a JSON object.") from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as e:
        raise ApiError(400, f"The request body is not valid JSON: {e}.", code="invalid_json") from None
    if "update_info" not in fields:
        raise FieldError("update_info", "update_info is missing; it is required.")
    info: UpdateInfo = fields["update_info"]
    if isinstance(info, dict) and "lora_name" in info:
        parse(AdapterUpdate, msgspec.json.encode(info))
        return info
    with _named("update_info"):
        parts_of_json(info)
    return info


def check_init_info(info: dict[str, Any]) -> None:
    """Check how ranks find a trainer; raises ApiError."""
    with _named("init_info"):
        if has_group(info):
            group_of_init_info(info, 0)


def allowed_update(info: UpdateInfo, folder: str | None) -> UpdateInfo:
    """Return a checked update_info with resolved paths. Raises FieldError for a path outside `folder`.

    Without a folder, paths are refused with the 403."""
    if isinstance(info, list):
        return [_allowed_part(f"update_info.{at}", part, folder) for at, part in enumerate(info)]
    return _allowed_part("update_info", info, folder)


def _allowed_part(where: str, part: dict[str, Any], folder: str | None) -> dict[str, Any]:
    if "paths" not in part:
        return part
    if folder is None:
        text = "This server loads no weights from files; start it with --weight-folder to allow it."
        raise ApiError(403, text, param=f"{where}.paths", code="weight_files_not_allowed")
    resolved = []
    for at, path in enumerate(part["paths"]):
        field = f"{where}.paths.{at}"
        if not path.isprintable():  # logs and errors show it in one line
            raise invalid(field, f"is {shown(path)}, which has characters that cannot be printed")
        resolved.append(path_within(folder, path, field, "weights"))
    return {**part, "paths": resolved}


@contextmanager
def _named(field: str) -> Iterator[None]:
    """Turn an error about a part of this field into the 400."""
    try:
        yield
    except CallboardError as e:
        raise ApiError(400, str(e), param=field) from e
