"""Sites that come and go, and the coordinator that relays their payloads."""

import os

# Errors of gRPC reach the user as one sentence; its own log repeats them in C++ terms.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
