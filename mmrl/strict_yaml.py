"""PyYAML's safe loader with errors of ours; a key that is given twice is one of them, not a silent choice."""

from __future__ import annotations

from typing import Any

import yaml

from mmrl.errors import ConfigError


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
        return yaml.load(text, Loader=_StrictLoader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{source}: not YAML ({' '.join(str(error).split())}).") from error
    except ValueError as error:  # such as a date with a 13th month
        raise ConfigError(f"{source}: holds a value that YAML cannot read ({error}).") from error
    except RecursionError as error:
        raise ConfigError(f"{source}: is nested too deeply to be a config.") from error
