"""Short names of known models."""

from __future__ import annotations

import difflib
import os
from dataclasses import dataclass
from importlib.resources import files

import yaml

from longgen.model_shape import ModelShape
from longgen.shape_file import shape_from_mapping


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model with a short name. aliases: other short names; hub: its hub id."""

    name: str
    aliases: tuple[str, ...]
    hub: str
    shape: ModelShape


def known_models() -> tuple[KnownModel, ...]:
    """All models of longgen/data/models.yaml, in its order."""
    text = files("longgen").joinpath("data/models.yaml").read_text(encoding="utf-8")
    models = []
    # libyaml's loader where it is there: every run looks its model up, and Python takes 50 ms to parse the table.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    for name, entry in yaml.load(text, Loader=loader).items():
        aliases = tuple(entry.get("aliases", ()))
        models.append(KnownModel(name, aliases, entry["hub"], shape_from_mapping(entry, name, "models.yaml")))
    return tuple(models)


def find_known(name: str) -> KnownModel | None:
    """The known model of a short name, an alias or a hub id, in any case; None if there is none."""
    wanted = name.lower()
    for model in known_models():
        if wanted in (model.name, model.hub.lower(), *model.aliases):
            return model
    return None


def similar_name(name: str) -> str | None:
    """The short name that is most like a name that is none; None if all are quite different."""
    known = [short for model in known_models() for short in (model.name, *model.aliases)]
    return next(iter(difflib.get_close_matches(name.lower(), known, n=1)), None)


def checkpoint_name(name: str) -> str:
    """The hub id that a short name stands for; what exists as a path, and any other name, as it is."""
    if "/" in name or os.path.exists(name):
        return name
    known = find_known(name)
    return known.hub if known else name
