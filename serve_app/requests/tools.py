"""The functions that a chat's model may call."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag

from serve_app.requests.shapes import RequestModel


class Function(RequestModel):
    model_config = ConfigDict(extra="allow")  # what else there is may mean something to the template

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None  # the arguments fit `parameters`, or the request is refused


class Tool(RequestModel):
    type: Literal["function"]
    function: Function

    def as_template_sees_it(self) -> dict[str, Any]:
        return {"type": self.type, "function": self.function.model_dump(exclude_unset=True, exclude={"strict"})}


class ChosenFunction(RequestModel):
    name: str


class ChosenTool(RequestModel):
    type: Literal["function"]
    function: ChosenFunction


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<text>")] | Annotated[ChosenTool, Tag("<tool>")],
    Discriminator(
        lambda value: "<text>" if isinstance(value, str) else "<tool>" if isinstance(value, dict) else None,
        custom_error_type="tool_choice_shape",
        custom_error_message="it should be 'none', 'auto', 'required' or an object that names a function",
    ),
]
