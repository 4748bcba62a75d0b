"""Sealed checkpoints whose key never leaves a key service.

    python examples/checkpoint_kms.py serve /run/keys.sock    # as another user, or in another machine behind a tunnel
    export KEY_SERVICE=/run/keys.sock
    python examples/checkpoint_kms.py try
    ringfence checkpoint show checkpoint --key python:examples.checkpoint_kms:key

The service stands for a KMS or an HSM: it makes its key itself, wraps and unwraps data keys with it, binds them to their
context, admits the users that it is told to, and writes down each request. `ServiceKey` is all that a training needs of it.
The service forgets its key when it ends; a real one keeps it.
"""

import argparse
import base64
import http.client
import http.server
import json
import os
import secrets
import socket
import socketserver
import struct
import sys

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

SECONDS = 10  # that a request may take
LIMIT = 1 << 20  # bytes of a request
NAME = "example-kms:checkpoints"


# -- the training's side ----------------------------------------------------------------------------------------------


class ServiceKey:
    """A `ringfence.checkpoint.KeyWrapper`: asks the service to wrap and unwrap. Only rank 0 calls it."""

    def __init__(self, path: str, name: str = NAME) -> None:
        self._path, self.name = path, name

    def wrap(self, key: bytes, context: bytes) -> bytes:
        return self._ask("encrypt", plaintext=key, context=context)

    def unwrap(self, wrapped: bytes, context: bytes) -> bytes:
        return self._ask("decrypt", ciphertext=wrapped, context=context)

    def _ask(self, operation: str, **fields: bytes) -> bytes:
        body = {"key": self.name, **{name: base64.b64encode(value).decode() for name, value in fields.items()}}
        connection = http.client.HTTPConnection("localhost", timeout=SECONDS)
        connection.sock = socket.socket(socket.AF_UNIX)
        try:
            connection.sock.settimeout(SECONDS)
            connection.sock.connect(self._path)
            connection.request("POST", f"/{operation}", json.dumps(body))
            response = connection.getresponse()
            answer = response.read(LIMIT)
        finally:
            connection.close()
        if response.status != 200:
            raise PermissionError(f"the key service refuses to {operation}: {answer.decode(errors='replace')}")
        return base64.b64decode(answer, validate=True)


def key() -> ServiceKey:
    """The key for `ringfence checkpoint --key python:examples.checkpoint_kms:key`."""
    return ServiceKey(os.environ["KEY_SERVICE"])


# -- the service ------------------------------------------------------------------------------------------------------


class Service(socketserver.ThreadingUnixStreamServer):
    """Holds the key. Nothing returns it."""

    daemon_threads = True

    def __init__(self, path: str, users: set[int]) -> None:
        self.users = users
        self.aead = AESGCM(AESGCM.generate_key(256))
        before = os.umask(0o077)
        try:
            super().__init__(path, Requests)
        finally:
            os.umask(before)


class Requests(http.server.BaseHTTPRequestHandler):
    server: Service
    timeout = SECONDS

    def do_POST(self) -> None:
        credentials = self.connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        process, user, _ = struct.unpack("3i", credentials)
        length = int(self.headers.get("Content-Length", 0))
        content = (
            self.rfile.read(length) if 0 < length <= LIMIT else b""
        )  # also of a user who is refused, who then reads why
        status, answer = self._answer(user, content)
        print(f"{self.path[1:]} for user {user}, process {process}: {status}", flush=True)
        self.send_response(status)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def _answer(self, user: int, content: bytes) -> tuple[int, bytes]:
        if user not in self.server.users:
            return 403, b"this user may not use the key"
        try:
            request = json.loads(content or "{}")
            fields = {name: base64.b64decode(request[name], validate=True) for name in request if name != "key"}
            if request["key"] != NAME:
                return 404, b"no key of this name"
            if self.path == "/encrypt":
                nonce = secrets.token_bytes(12)
                sealed = nonce + self.server.aead.encrypt(nonce, fields["plaintext"], fields["context"])
                return 200, base64.b64encode(sealed)
            if self.path == "/decrypt":
                nonce, sealed = fields["ciphertext"][:12], fields["ciphertext"][12:]
                return 200, base64.b64encode(self.server.aead.decrypt(nonce, sealed, fields["context"]))
        except InvalidTag:
            return 400, b"not wrapped with this key and context"
        except (KeyError, TypeError, ValueError):
            return 400, b"not a request"
        return 404, b"no such operation"

    def address_string(self) -> str:
        return "unix"

    def log_message(self, *_: object) -> None:
        """The line of `do_POST` is enough."""


# -- try it -----------------------------------------------------------------------------------------------------------


def try_it() -> None:
    import torch

    from ringfence import checkpoint

    weights = {"weight": torch.arange(6.0).reshape(2, 3)}
    anchor = checkpoint.save(weights, "checkpoint", key=key(), step=1)
    loaded = {"weight": torch.zeros(2, 3)}
    info = checkpoint.load(loaded, "checkpoint", key=key(), anchor=anchor)
    print(f"step {info.step}, key {info.key_name}: {loaded['weight'].tolist()}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("serve", "try"))
    parser.add_argument("socket", nargs="?", help="of the service")
    parser.add_argument("--user", type=int, action="append", help="who may use the key (default: the service's user)")
    options = parser.parse_args()
    if options.what == "try":
        try_it()
    elif options.socket is None:
        sys.exit("serve needs the path of a socket")
    else:
        with Service(options.socket, set(options.user or [os.getuid()])) as service:
            print(f"serving {NAME}", flush=True)
            service.serve_forever()


if __name__ == "__main__":
    main()
