"""PyYAML's safe loader with errors of ours; a key that is given twice is one of them, not a silent choice."""

from __future__ import annotations

from typing import Any

import yaml

from mmrl.errors import ConfigError

MAX_VALUES = 100_000
"""Values of one document, each use of an alias counted."""


class _StrictLoader(yaml.SafeLoader):
    """Refuses mappings in which a key occurs twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[Any, yaml.Mark] = {}
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node)
            if key in seen:
                message = f"the key {key!r} is given twice (first in line {seen[key].line + 1}); keep one of them"
                raise yaml.constructor.ConstructorError(None, None, message, key_node.start_mark)
            seen[key] = key_node.start_mark
        return super().construct_mapping(node, deep)


def read_yaml(text: str, source: str) -> Any:
    """The one document in ``text``; `ConfigError` with ``source`` in front if it is not YAML."""
    try:
        value = yaml.load(text, Loader=_StrictLoader)
        _require_plain(value, source, {})
    except yaml.YAMLError as error:
        raise ConfigError(f"{source}: not YAML ({' '.join(str(error).split())}).") from error
    except ValueError as error:  # such as a date with a 13th month
        raise ConfigError(f"{source}: holds a value that YAML cannot read ({error}).") from error
    except RecursionError as error:
        raise ConfigError(f"{source}: is nested too deeply to be a config.") from error
    return value


def _require_plain(value: Any, source: str, sizes: dict[int, int | None]) -> int:
    """The number of values in ``value``, a list or mapping that is used again counted again; it is held in ``sizes`` by id.

    Raises `ConfigError` for what a config cannot hold: a value inside of itself, copies of copies, dates and other types.
    """
    if isinstance(value, (list, dict)):
        if id(value) in sizes:
            if sizes[id(value)] is None:
                raise ConfigError(f"{source}: an anchor (&) is used inside of itself; write the values out.")
            return sizes[id(value)]
        sizes[id(value)] = None
        inner = [*value, *value.values()] if isinstance(value, dict) else value
        size = sizes[id(value)] = 1 + sum(_require_plain(entry, source, sizes) for entry in inner)
        if size > MAX_VALUES:
            raise ConfigError(f"{source}: aliases (*) repeat values until there are {size}; expected {MAX_VALUES} at most.")
        return size
    if isinstance(value, str) and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise ConfigError(f"{source}: {value!r:.60} holds half of a surrogate pair, which is no text.") from None
    if value is not None and not isinstance(value, (str, bool, int, float)):
        kind = type(value).__name__
        raise ConfigError(
            f"{source}: {value!r:.60} is read as {kind}; expected text (in quotes), a number, true, false or null."
        )
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ConfigError(f"{source}: {value!r:.40} is too large; expected whole numbers of at most 64 bits.")
    return 1
