"""An engine process that raises in the middle of the second refit, as it would if it ran out of memory."""

import sys

from rl_megatron.generation.transformers.worker import TransformersWorker, main


class FailingWorker(TransformersWorker):
    def receive(self, version):
        if version == 1:
            self.receiver.accept = self.fail
        return super().receive(version)

    def fail(self, bucket_index, buffer):
        raise RuntimeError(f"no memory for bucket {bucket_index}")


if __name__ == "__main__":
    main(sys.argv[1:], FailingWorker())
