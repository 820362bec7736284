"""Whatever is chosen under the masks, by whatever weights: what comes out parses, and fits its schema."""

import json
import random

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from hypothesis_jsonschema._from_schema import JSON_SCHEMA_DIALECT  # noqa: F401
