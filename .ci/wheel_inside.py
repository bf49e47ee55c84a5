"""Run by wheel_guard.py inside the fresh environment, away from the checkout.

Arguments: the data files to load, and the names that must not be importable, each a JSON list.
"""

import importlib.util
import json
import sys
from importlib.resources import files
from pathlib import Path

import yaml

import splitkv

data, strangers = map(json.loads, sys.argv[1:])
home = Path(splitkv.__file__).parent
if not home.is_relative_to(sys.prefix):
    sys.exit(f"splitkv comes from {home}, not from the wheel installed in {sys.prefix}")
if found := [name for name in strangers if importlib.util.find_spec(name) is not None]:
    sys.exit(f"importable beside splitkv: {found}")
for name in data:
    content = files("splitkv").joinpath(name.removeprefix("splitkv/")).read_bytes()
    if not content and name != "splitkv/py.typed":
        sys.exit(f"{name} is empty")
    try:
        if name.endswith(".json"):
            json.loads(content)
        if name.endswith(".yaml"):
            yaml.safe_load(content)
    except (ValueError, yaml.YAMLError) as error:
        sys.exit(f"{name} does not load: {error}")
print(f"{len(data)} data files load from {home}")
