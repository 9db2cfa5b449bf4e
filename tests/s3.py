"""A local server that speaks S3 (moto's ThreadedMotoServer), for tests of s3:// addresses; skips them without moto."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator

import pytest

s3fs = pytest.importorskip("s3fs")
server = pytest.importorskip("moto.server")
boto3 = pytest.importorskip("boto3")

logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line for every request


class Store:
    """The server, with one bucket. It keeps its objects while it is stopped."""

    def __init__(self) -> None:
        self._server = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        self._server.start()
        _, self._port = self._server.get_host_and_port()
        self.env = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._port}",
            "AWS_ACCESS_KEY_ID": "tests",
            "AWS_SECRET_ACCESS_KEY": "tests",
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def client(self):
        return boto3.client("s3")

    def create(self, bucket: str) -> None:
        self.client().create_bucket(Bucket=bucket)

    def names(self, bucket: str) -> list[str]:
        found = self.client().list_objects_v2(Bucket=bucket).get("Contents", [])
        return [entry["Key"] for entry in found]

    def put(self, bucket: str, name: str, content: bytes) -> None:
        self.client().put_object(Bucket=bucket, Key=name, Body=content)

    def get(self, bucket: str, name: str) -> bytes:
        return self.client().get_object(Bucket=bucket, Key=name)["Body"].read()

    def delete(self, bucket: str, name: str) -> None:
        self.client().delete_object(Bucket=bucket, Key=name)

    @contextlib.contextmanager
    def denying(self, bucket: str, action: str = "s3:PutObject") -> Iterator[None]:
        """The bucket's policy refuses this action to everybody."""
        rule = {"Effect": "Deny", "Principal": "*", "Action": action, "Resource": f"arn:aws:s3:::{bucket}/*"}
        policy = json.dumps({"Version": "2012-10-17", "Statement": [rule]})
        self.client().put_bucket_policy(Bucket=bucket, Policy=policy)
        try:
            yield
        finally:
            self.client().delete_bucket_policy(Bucket=bucket)

    def stop(self) -> None:
        self._server.stop()

    def start(self) -> None:
        self._server = server.ThreadedMotoServer(ip_address="127.0.0.1", port=self._port, verbose=False)
        self._server.start()


@pytest.fixture(scope="module")
def s3() -> Iterator[Store]:
    """The server; s3:// addresses lead there."""
    store = Store()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in store.env.items():
            patch.setenv(name, value)
        s3fs.S3FileSystem.clear_instance_cache()  # those of another module's server
        yield store
    store.stop()


@pytest.fixture
def bucket(s3, request) -> str:
    """A bucket for one test."""
    name = "t" + format(abs(hash(request.node.nodeid)), "x")
    s3.create(name)
    return name
