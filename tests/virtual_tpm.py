"""A real TPM 2.0 in software: swtpm in a process of its own, provisioned with tpm2-tools as Azure provisions a vTPM."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import load_pem_public_key

from ringfence.evidence import tpm
from ringfence.evidence.azure_guest import ATTESTATION_KEY, HCL_INDEX
from tests.limits import HANG

PROGRAMS = ("swtpm", "tpm2_createprimary")
USAGE = "restricted|sign|fixedtpm|fixedparent|sensitivedataorigin|userwithauth"


class VirtualTpm:
    """One TPM. Its commands go over a Unix socket, as those of a guest go through the kernel's device file."""

    def __init__(self, folder: Path) -> None:
        assert all(map(shutil.which, PROGRAMS)), "apt-get install swtpm tpm2-tools"
        self._folder = folder
        self._socket = folder / "tpm.sock"
        state = folder / "state"
        state.mkdir(parents=True)
        self._pid = folder / "pid"
        command = ["swtpm", "socket", "--tpm2", "--tpmstate", f"dir={state}", "--flags", "not-need-init,startup-clear"]
        command += ["--server", f"type=unixio,path={self._socket}", "--ctrl", f"type=unixio,path={self._socket}.ctrl"]
        self._run(*command, "--daemon", "--pid", f"file={self._pid}")  # returns when it listens

    def close(self) -> None:
        os.kill(int(self._pid.read_text()), signal.SIGTERM)

    @contextmanager
    def opened(self, seconds: float = tpm.SECONDS) -> Iterator[tpm.TpmDevice]:
        """The same as `tpm.opened`, at the socket."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.connect(str(self._socket))
            connection.setblocking(False)
            yield tpm.TpmDevice(connection.fileno(), seconds)

    def make_key(self, handle: int = ATTESTATION_KEY) -> rsa.RSAPublicKey:
        """Make a restricted signing key, as the attestation key is, and store it under a handle."""
        context, pem = self._folder / "key.ctx", self._folder / "key.pem"
        scheme = ("-G", "rsa2048:rsassa-sha256:null", "-a", USAGE)
        self._run("tpm2_createprimary", "-C", "e", *scheme, "-c", str(context))
        self._run("tpm2_evictcontrol", "-C", "o", "-c", str(context), hex(handle))
        self._run("tpm2_readpublic", "-c", hex(handle), "-f", "pem", "-o", str(pem))
        self._run("tpm2_flushcontext", "-t")
        key = load_pem_public_key(pem.read_bytes())
        assert isinstance(key, rsa.RSAPublicKey)
        return key

    def store(self, content: bytes, index: int = HCL_INDEX) -> None:
        """Define an NV index that the owner may read, and write it."""
        file = self._folder / "content"
        file.write_bytes(content)
        attributes = "ownerread|ownerwrite|authread|authwrite"
        self._run("tpm2_nvdefine", hex(index), "-C", "o", "-s", str(len(content)), "-a", attributes)
        self._run("tpm2_nvwrite", hex(index), "-C", "o", "-i", str(file))

    def extend(self, pcr: int, digest: bytes) -> None:
        self._run("tpm2_pcrextend", f"{pcr}:sha256={digest.hex()}")

    def set_owner_password(self, password: str) -> None:
        self._run("tpm2_changeauth", "-c", "o", password)

    def _run(self, *command: str) -> None:
        environ = os.environ | {"TPM2TOOLS_TCTI": f"swtpm:path={self._socket}"}
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=HANG, check=False)
        assert done.returncode == 0, f"{command}: {done.stderr}"


@contextmanager
def running(folder: Path) -> Iterator[VirtualTpm]:
    device = VirtualTpm(folder)
    try:
        yield device
    finally:
        device.close()
