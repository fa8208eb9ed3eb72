"""The error tree. Every message names what was given, what was expected, and what to do.

Each error also derives from the builtin that it resembles, so callers that catch ``ValueError`` keep working. The command
line prints any `MMRLError` as one line and exits with code 2.
"""


class MMRLError(Exception):
    """Base of every error that this project raises on purpose."""


class ConfigError(MMRLError, ValueError):
    """A configuration file or an override is wrong; names the file and the key."""


class DataError(MMRLError, ValueError):
    """A task, dataset row or medium cannot be used; names the file, row and field."""


class AdapterError(MMRLError, ValueError):
    """An adapter broke the contract of the tensor waist; names the tensor and its shapes."""


class RewardError(MMRLError, RuntimeError):
    """A reward term raised or returned something that is not a number; names the term and the task."""


class CheckpointError(MMRLError, OSError):
    """A checkpoint is missing, damaged or belongs to another run; names the file."""


class ParityError(MMRLError, ArithmeticError):
    """Log-probabilities recorded while sampling are not those of the trainer; names the task, the rollout and the decision."""


class NumericsError(MMRLError, ArithmeticError):
    """A loss or gradient is not finite; the step is dumped and the last checkpoint stands."""


class MissingExtra(MMRLError, ImportError):
    """An optional package is needed; names the package and how to install it."""
