"""An application's arguments in Serve: all settings' fields, read from words or a YAML file.

No `from __future__ import annotations` here: pydantic reads the types at run time."""

from dataclasses import fields, replace
from typing import TYPE_CHECKING, Annotated, Any, Self, get_type_hints

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    create_model,
    model_validator,
)

from runtime.base.config import EngineConfig
from runtime.base.types import CallboardError
from serve_app.build_errors import build_errors
from serve_app.settings import HttpSettings, ModelSettings, ScalingSettings


class _ServeArgs(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    served_model_name: Annotated[tuple[str, ...], BeforeValidator(lambda value: _split(value or ()))] = Field(
        (), description="the names that clients use; answers have the first one; default: model"
    )
    num_fronts: int | None = Field(
        None,
        ge=1,
        description="front replicas (CPU only) that share the engines; default, at most 4: one per 4 CPUs of a single "
        "machine; on a cluster one per engine, two if it uses GPUs",
    )
    accelerator_type: str | None = Field(
        None, description="type of GPU as Ray names it, such as H100; engines wait for a machine with it"
    )

    models: tuple[dict[str, Any], ...] = Field(
        (), description="several models behind one address: a list with `model` and other settings of each"
    )

    @model_validator(mode="wrap")
    @classmethod
    def _validated(cls, values: Any, validate: ModelWrapValidatorHandler[Self]) -> Self:
        with build_errors():
            return validate(values)

    def model_settings(self) -> tuple[ModelSettings, ...]:
        """Return the application's models; raises CallboardError if a value is out of range."""
        each = [self._of_model(entry) for entry in self.models] or [self]
        models = ModelSettings.of_all([(args.engine_config(), args.served_model_name, args.scaling()) for args in each])
        types = [args.accelerator_type for args in each]
        return tuple(replace(model, accelerator_type=kind) for model, kind in zip(models, types, strict=True))

    def _of_model(self, entry: dict[str, Any]) -> Self:
        """Return the settings of an entry in `models`; settings outside apply to all models."""
        names = {f.name for config in (EngineConfig, ScalingSettings) for f in fields(config)}
        names |= {"served_model_name", "accelerator_type"}
        for name in entry:
            if name not in names:
                raise CallboardError(f"An entry of models has {name!r}, which is not a setting of one model.")
        shared = {name: getattr(self, name) for name in self.model_fields_set & names}
        return type(self).model_validate(shared | entry)

    def engine_config(self) -> EngineConfig:
        """Return the engine's settings; raises CallboardError if a value is out of range."""
        config = EngineConfig(**{f.name: getattr(self, f.name) for f in fields(EngineConfig)})
        if self.accelerator_type and config.device == "cpu":
            raise CallboardError(f"accelerator_type is {self.accelerator_type!r}, but device is cpu; leave one out.")
        return replace(config, device="cuda") if self.accelerator_type else config

    def scaling(self) -> ScalingSettings:
        """Return the number of engines; raises CallboardError if a value is out of range."""
        return ScalingSettings(**{f.name: getattr(self, f.name) for f in fields(ScalingSettings)})

    def http_settings(self) -> HttpSettings:
        """Return the fronts' settings; raises CallboardError if a value is out of range."""
        return HttpSettings(**{f.name: getattr(self, f.name) for f in fields(HttpSettings)})


def _split(value: Any) -> Any:
    return tuple(value.split(",")) if isinstance(value, str) else value


def _model_fields(config: type) -> dict[str, Any]:
    """Return the fields of a dataclass for pydantic.

    `serve run name=a,b` gives text for several values. An optional number may be "auto", as on the command line."""
    split = BeforeValidator(_split)
    auto = BeforeValidator(lambda value: None if value == "auto" else value)
    read = {tuple[str, ...]: split, int | None: auto}
    types = {name: Annotated[t, read[t]] if t in read else t for name, t in get_type_hints(config).items()}
    return {f.name: (types[f.name], Field(f.default, description=f.metadata["help"])) for f in fields(config)}


if TYPE_CHECKING:
    AppArgs = _ServeArgs
else:
    AppArgs = create_model(
        "AppArgs",
        __base__=_ServeArgs,
        __doc__="The settings of an application: EngineConfig, ScalingSettings, HttpSettings, names and fronts.",
        **_model_fields(EngineConfig),
        **_model_fields(ScalingSettings),
        **_model_fields(HttpSettings),
    )
