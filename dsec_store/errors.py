"""What can go wrong in the store, the registry and the node.

    DsecError
    ├── ReferenceInvalid      the text is not a reference
    ├── ReferenceUnknown      no such reference in the store or the registry
    ├── ReferenceConflict     a compare-and-swap of a reference found another digest
    ├── BlobUnknown           no such blob
    ├── WrongKind             a layer of another kind than the place asks for
    ├── IntegrityError        bytes that do not match their digest, size or format
    ├── StoreFull             no space left (ENOSPC, EDQUOT)
    ├── StoreUnusable         the store's folder cannot hold a store
    ├── RegistryError         a registry refused, or answered what it must not
    │   └── RegistryUnreachable   it did not answer at all
    └── NodeError             the node refused a request, or cannot be reached

Each message is one line: what was attempted, on what, what was found, what was expected.
"""

from __future__ import annotations


class DsecError(Exception):
    """Root of the package's errors; ``str()`` is one line for a person."""


class ReferenceInvalid(DsecError):
    pass


class ReferenceUnknown(DsecError):
    pass


class ReferenceConflict(DsecError):
    pass


class BlobUnknown(DsecError):
    pass


class WrongKind(DsecError):
    pass


class IntegrityError(DsecError):
    pass


class StoreFull(DsecError):
    pass


class StoreUnusable(DsecError):
    pass


class RegistryError(DsecError):
    """``status`` is the HTTP status (0: none was received), ``code`` the OCI error code where there was one."""

    def __init__(self, message: str, *, status: int = 0, code: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class RegistryUnreachable(RegistryError):
    pass


class NodeError(DsecError):
    pass
