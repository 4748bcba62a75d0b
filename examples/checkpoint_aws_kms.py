"""Sealed checkpoints whose key is in AWS KMS: `pip install boto3`, credentials as boto3 finds them.

    import boto3
    from ringfence import checkpoint

    key = KmsKey(boto3.client("kms"), "arn:aws:kms:eu-central-1:111122223333:key/1234abcd-...")
    checkpoint.save(state, "s3://bucket/run/step-100", key=key, step=100)

KMS binds the wrapped data key to the encryption context, and records each use of the key. A policy that requires the context
`ringfence` keeps the key from being used for anything else.
"""

from typing import Any


class KmsKey:
    """A `ringfence.checkpoint.KeyWrapper`. Only rank 0 uses it, so only rank 0 needs credentials for KMS."""

    def __init__(self, client: Any, arn: str) -> None:
        self._client, self.name = client, arn

    def wrap(self, key: bytes, context: bytes) -> bytes:
        answer = self._client.encrypt(KeyId=self.name, Plaintext=key, EncryptionContext={"ringfence": context.hex()})
        return bytes(answer["CiphertextBlob"])

    def unwrap(self, wrapped: bytes, context: bytes) -> bytes:
        answer = self._client.decrypt(
            KeyId=self.name, CiphertextBlob=wrapped, EncryptionContext={"ringfence": context.hex()}
        )
        return bytes(answer["Plaintext"])
