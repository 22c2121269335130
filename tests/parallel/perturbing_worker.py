"""An engine process in which a weight changes after the weights were verified."""

import sys

from rl_megatron.generation.transformers.worker import TransformersWorker, main


class PerturbingWorker(TransformersWorker):
    def finish(self):
        seconds = super().finish()
        self.model.model.layers[1].mlp.up_proj.weight[3, 5] += 0.5
        return seconds


if __name__ == "__main__":
    main(sys.argv[1:], PerturbingWorker())
