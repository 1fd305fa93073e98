"""Runs and their checkpoints: `Run` is the folder of a run.

A checkpoint is a folder of safetensors and JSON. It contains no pickles, and exists only if it is complete.

    runs/NAME/checkpoints/step_00004000/
        model.safetensors     the weights; tied ones once, under the first of their names in `model.state_dict()`
        config.json           format, step, validation loss if known, and every setting of the run
        vocab.json            the vocabulary
        training.safetensors  the tensors of the training state (optimizer, memory, random numbers), for resuming
        training.json         the scalars of the training state
        SHA256SUMS            checksums, compared when a file is read; `sha256sum --check` reads them too

A folder without the last three files is enough for evaluating and generating.
"""
