"""What can go wrong with sandboxes and commands.

    RuntimesError
    ├── SettingsError      what was asked for, or what the image says, cannot be run (unknown user, no command, …)
    ├── SandboxUnknown     no sandbox of that id or name
    ├── NameInUse          another sandbox has that name
    ├── SandboxBusy        the sandbox runs, or another command works on it
    └── ContainerFailed    the OCI runtime did not bring the container up
        └── CannotStart    it did, but the command could not be started (``code`` 126 or 127)

Each message is one line: what was attempted, on what, what was found, what was expected.
"""

from __future__ import annotations


class RuntimesError(Exception):
    """Root of the package's errors; ``str()`` is one line for a person."""


class SettingsError(RuntimesError):
    pass


class SandboxUnknown(RuntimesError):
    pass


class NameInUse(RuntimesError):
    pass


class SandboxBusy(RuntimesError):
    pass


class ContainerFailed(RuntimesError):
    pass


class CannotStart(ContainerFailed):
    """``code`` is 127 when the program, its interpreter or its loader is not there, 126 when it cannot be
    executed.
    """

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code
