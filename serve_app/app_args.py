"""The arguments of an application in Serve: the fields of all settings, read from words or a YAML file.

No `from __future__ import annotations` here: pydantic reads the types at run time.
"""

from dataclasses import fields, replace
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, create_model

from runtime.spec.config import EngineConfig
from runtime.spec.types import CallboardError
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

    def models(self) -> tuple[ModelSettings, ...]:
        """Return the models of the application; raises CallboardError if a value is out of range."""
        models = ModelSettings.of_all([(self.engine_config(), self.served_model_name, self.scaling())])
        return tuple(replace(model, accelerator_type=self.accelerator_type) for model in models)

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
