"""Makes models of all systems, and loads their weights."""
from types import SimpleNamespace

from common.checkpoint import read_checkpoint
from common.commandline import UserError
from model import Model


def make_model(hp):
    """A new model of hp.system; hp has an attribute for each hyperparameter. Or UserError."""
    if hp.system == "learned":
        return Model(hp)
    try:
        from experiments.systems import make_system  # here, so that experiments/ may be deleted
    except ModuleNotFoundError as error:
        raise UserError(f"system={hp.system!r} needs the folder experiments/: {error}") from error
    return make_system(hp)


def load_weights(model, saved, path):
    """Loads the weights that train.py saved in path. UserError if they are not this model's."""
    for key in (
            "system", "embedding_dim", "n_down_layers", "n_mid_layers", "n_up_layers",
            "policy_window", "num_heads", "seq_len"):  # the last two change no weight's shape
        old, new = saved["config"].get(key), getattr(model.hp, key)
        if new != old:
            raise UserError(f"{key} cannot change; it was {old!r} in {path}, now it is {new!r}")
    try:
        model.load_state_dict(saved["model"])
    except RuntimeError as error:  # it lists all parameters
        raise UserError(f"{path} does not fit the model, whose code has changed") from error


def load_model(path):
    """The saved model, in evaluation mode on the CPU, and the checkpoint. Raises UserError."""
    saved = read_checkpoint(path)
    try:
        model = make_model(SimpleNamespace(**saved["config"]))
    except AttributeError as error:  # a hyperparameter that did not exist
        raise UserError(f"another version of train.py wrote {path}: {error}") from error
    load_weights(model, saved, path)
    return model.eval(), saved
