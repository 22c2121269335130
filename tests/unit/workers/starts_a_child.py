"""A process that starts a child, tells its parent so, and leaves when its parent closes the socket."""

import pickle
import subprocess
import sys

from rl_megatron.workers.child import connect
from rl_megatron.workers.frames import read_frame, write_frame

if __name__ == "__main__":
    connection, _ = connect(sys.argv[1:])
    child = subprocess.Popen(["sleep", "60"])
    write_frame(connection, pickle.dumps(child.pid))
    read_frame(connection)
    sys.exit(3)
