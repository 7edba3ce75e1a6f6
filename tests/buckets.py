"""A server of buckets over HTTP, for S3 and GCS, that tests can interrupt."""

import contextlib
import json
import threading
import urllib.request

# moto lets nobody write without it, and checks no signature.
_SIGNED = (
  "AWS4-HMAC-SHA256 Credential=any/20260101/us-east-1/s3/aws4_request,"
  " SignedHeaders=host, Signature=any"
)


class Server:
  """moto's S3 server, which also understands the headers of GCS's XML interface.

  Attributes:
    on_put: called with the path of every file before it is written; the server fails
      for the client if it raises OSError.
    env: environment variables with which a client finds the server.
  """

  def __init__(self, folder):
    from moto.moto_server.werkzeug_app import (
      DomainDispatcherApplication,
      create_backend_app,
    )
    from werkzeug.serving import make_server

    self.on_put = lambda path: None
    self._app = DomainDispatcherApplication(create_backend_app)
    self._server = make_server("127.0.0.1", 0, self._answer, threaded=True)
    threading.Thread(target=self._server.serve_forever, daemon=True).start()
    self.url = f"http://127.0.0.1:{self._server.port}"
    account = {"gcs_base_url": self.url, "disable_oauth": True, "private_key_id": ""}
    account |= {"client_email": "", "private_key": ""}
    (folder / "account.json").write_text(json.dumps(account))
    self.env = {
      "AWS_ACCESS_KEY_ID": "any",
      "AWS_SECRET_ACCESS_KEY": "any",
      "AWS_ENDPOINT_URL": self.url,
      "GOOGLE_SERVICE_ACCOUNT": str(folder / "account.json"),
    }

  def make(self, bucket):
    request = urllib.request.Request(f"{self.url}/{bucket}", method="PUT")
    urllib.request.urlopen(request).close()

  def close(self):
    self._server.shutdown()

  def _answer(self, environ, start):
    if environ["REQUEST_METHOD"] == "PUT":
      try:
        self.on_put(environ["PATH_INFO"])
      except OSError:
        start("503 Service Unavailable", [("Content-Length", "0")])
        return []
    if not environ.get("HTTP_AUTHORIZATION", "").startswith("AWS4"):
      environ["HTTP_AUTHORIZATION"] = _SIGNED
    if environ.pop("HTTP_X_GOOG_IF_GENERATION_MATCH", "") == "0":
      environ["HTTP_IF_NONE_MATCH"] = "*"
    if source := environ.pop("HTTP_X_GOOG_COPY_SOURCE", ""):
      environ["HTTP_X_AMZ_COPY_SOURCE"] = source
    return self._app(environ, start)


@contextlib.contextmanager
def serving(folder):
  server = Server(folder)
  try:
    yield server
  finally:
    server.close()
