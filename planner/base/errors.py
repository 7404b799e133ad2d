"""Errors and warnings that users meet; each message names the thing, the numbers and the way out."""


class AutoparError(Exception):
    """Base of every error that autopar raises for its users."""


class PlanWarning(UserWarning):
    """What was asked for can be done, and may not be what was meant; to be filtered as any warning."""


class CaptureError(AutoparError):
    """The model could not be captured as a graph."""


class ClusterError(AutoparError, ValueError):
    """A cluster description is wrong or too small."""


class PinError(AutoparError, ValueError):
    """A pinned decision contradicts another, the model, or the cluster."""


class ConfigError(AutoparError, ValueError):
    """A configuration of another tool cannot be read, or contradicts itself."""


class PlanError(AutoparError, ValueError):
    """A plan file is damaged, or does not fit the model or the cluster."""


class ScheduleError(AutoparError, ValueError):
    """A pipeline schedule cannot run, or does not exist for so many ranks, stages and micro-batches."""


class FleetError(AutoparError, ValueError):
    """The jobs of a fleet are described wrongly."""


class TransferScheduleError(AutoparError, ValueError):
    """A trace of moments and items contradicts itself, or a transfer schedule of their movements cannot be carried
    out.
    """


class InfeasibleError(AutoparError):
    """No plan satisfies the limits; the message says by how much.

    ``excess_bytes`` is what the minimum-memory plan found needs beyond the memory limit.
    """

    def __init__(self, message: str, excess_bytes: int = 0):
        super().__init__(message)
        self.excess_bytes = excess_bytes


class InputError(AutoparError, ValueError):
    """A call received inputs that the plan was not made for."""


class DiskError(AutoparError):
    """A file in which a plan keeps model data cannot be read, or not be written."""


class CheckpointError(AutoparError):
    """A checkpoint cannot be written, cannot be read, or is of something else."""


class VerificationError(AutoparError):
    """The emitted program does not compute what the model computes, or that could not be found out."""
