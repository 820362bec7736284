"""The Serve application: `serve run callboard.app:build_app model=...`, or the import_path of a Serve YAML file."""

from serve_app.app import build_app
from serve_app.app_args import AppArgs

__all__ = ["AppArgs", "build_app"]
